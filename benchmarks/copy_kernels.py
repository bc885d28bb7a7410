"""Rotate-on-load, gather and scatter on a CPU, beside a plain copy of the same bytes in the same run.

One layer of Llama-3-8B: 8 KV heads of 128, chunks of 64 tokens, 64 chunks (16 MiB in bfloat16). Pools are as engines
lay them out: ours ([chunks, 2, kv_heads, chunk_tokens, head_dim]), tokens first (vLLM's NHD); blocks of 16 or 64, in
order or scattered over the pool. "indexing" does the same as one would write it in PyTorch: pool[numbers], put in
order. "copy" is a copy between two contiguous tensors. All of it runs on one thread, as loads and saves do. Calls take
turns; figures are medians over rounds, a ratio is the median of the rounds' own. GB/s counts each byte once.

    make bench-copy_kernels ARGS='--quick --json'
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from harness import Goal, arguments, finish, heading

from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.rotate import rotate, rotation

HEADS, HEAD_DIM, CHUNK_TOKENS, CHUNKS = 8, 128, 64, 64
KEY = ("op", "layout", "block_tokens", "order", "dtype")
Call = Callable[[], object]
GOALS = {
    ("gather", "ours", 64, "scattered", "bfloat16"): 0.6,
    ("scatter", "ours", 64, "scattered", "bfloat16"): 0.6,
    ("gather", "tokens first", 16, "scattered", "bfloat16"): 0.3,
    ("scatter", "tokens first", 16, "scattered", "bfloat16"): 0.3,
    ("rotate", "halves", 64, "", "float32"): 0.2,
    ("scatter and rotate", "ours", 64, "scattered", "bfloat16"): 0.1,
}
"""At least so much of the plain copy's speed."""


def main() -> int:
    chosen: argparse.Namespace = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    print(heading(__file__), f"torch {torch.__version__}, 1 thread", sep=", ")
    print(
        f"{'':>18} {'':>12} {'block':>5} {'order':>9} {'dtype':>9} "
        f"{'GB/s':>6} {'copy':>6} {'x copy':>6} {'x indexing':>10}"
    )
    rounds = 15 if chosen.quick else 60
    rows = [paged(*case, rounds=rounds) for case in cases(chosen.quick)]
    rows += [
        rotated(pairs, dtype, rounds=rounds)
        for pairs in ("halves", "interleaved")
        for dtype in ("float32", "bfloat16")
    ]
    goals = [
        Goal(name_of(key), row["of_copy"], "x copy", GOALS[key], ">=")
        for row in rows
        if (key := tuple(row[field] for field in KEY)) in GOALS
    ]
    return finish(__file__, chosen, rows, goals, key=KEY)


def cases(quick: bool) -> list[tuple[str, str, int, str, str]]:
    wanted = [key for key in GOALS if key[0] != "rotate"]
    if not quick:
        wanted += [
            (op, layout, block_tokens, order, "bfloat16")
            for op in ("gather", "scatter")
            for layout in ("ours", "tokens first")
            for block_tokens in (16, 64)
            for order in ("in order", "scattered")
        ]
    return list(dict.fromkeys(wanted))


def name_of(key: tuple[Any, ...]) -> str:
    op, layout, block_tokens, order, dtype = key
    return f"{op}, {layout}, blocks of {block_tokens} {order}".rstrip() + f", {dtype}"


def paged(op: str, layout: str, block_tokens: int, order: str, dtype: str, *, rounds: int) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    per_chunk = CHUNK_TOKENS // block_tokens
    blocks = CHUNKS * per_chunk
    shape = (blocks, 2, HEADS, block_tokens, HEAD_DIM)
    pool = torch.randn(shape).to(kind)
    if layout == "tokens first":
        pool = pool.permute(1, 0, 3, 2, 4).contiguous().permute(1, 0, 3, 2, 4)
    keys, values = pool.unbind(1)
    numbers = list(range(blocks))
    if order == "scattered":
        random.Random(1).shuffle(numbers)
    table = BlockTable.of(numbers, blocks=blocks, block_tokens=block_tokens, chunk_tokens=CHUNK_TOKENS)
    slices = torch.randn(CHUNKS, 2, HEADS, CHUNK_TOKENS, HEAD_DIM).to(kind)
    by = (
        rotation(torch.arange(1, CHUNKS + 1).unsqueeze(1), frequencies())
        if op == "scatter and rotate"
        else None
    )
    index = torch.tensor(numbers)

    def as_blocks(of: torch.Tensor) -> torch.Tensor:
        """[chunks, 2, kv_heads, chunk_tokens, head_dim] seen as [blocks, 2, kv_heads, block_tokens, head_dim]"""
        return of.unflatten(3, (per_chunk, block_tokens)).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)

    def indexing() -> None:
        if op == "gather":
            ordered = pool[index].unflatten(0, (CHUNKS, per_chunk)).permute(0, 2, 3, 1, 4, 5)
            slices.unflatten(3, (per_chunk, block_tokens)).copy_(ordered)
        else:
            pool[index] = as_blocks(slices)

    def ours() -> None:
        gather(keys, values, table, slices) if op == "gather" else scatter(keys, values, table, slices, by=by)

    ours()
    if op == "gather":
        assert torch.equal(as_blocks(slices), pool[index]), "wrong bytes"
    else:
        there = 1 if by is not None else slice(None)
        assert torch.equal(as_blocks(slices)[:, there], pool[index][:, there]), "wrong bytes"
    other = torch.empty_like(slices)
    calls: dict[str, Call] = {"ours": ours, "copy": lambda: other.copy_(slices)}
    if by is None:
        calls["indexing"] = indexing
    what = {"op": op, "layout": layout, "block_tokens": block_tokens, "order": order, "dtype": dtype}
    return measured(what, calls, slices.nbytes, rounds)


def rotated(layout: str, dtype: str, *, rounds: int) -> dict[str, Any]:
    """Keys of all chunks, each chunk by a delta of its own."""
    keys = torch.randn(CHUNKS, HEADS, CHUNK_TOKENS, HEAD_DIM).to(getattr(torch, dtype))
    deltas = torch.arange(1, CHUNKS + 1).view(-1, 1, 1)
    by = rotation(deltas, frequencies(), interleaved=layout == "interleaved")
    out = torch.empty_like(keys)
    calls: dict[str, Call] = {"ours": lambda: rotate(keys, by, out=out), "copy": lambda: out.copy_(keys)}
    what = {"op": "rotate", "layout": layout, "block_tokens": CHUNK_TOKENS, "order": "", "dtype": dtype}
    return measured(what, calls, keys.nbytes, rounds)


def frequencies() -> torch.Tensor:
    return 1.0 / 500_000.0 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)


def measured(what: dict[str, Any], calls: dict[str, Call], size: int, rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if number >= 2:  # pages are there, caches are warm
                took[name].append(time.perf_counter() - begun)

    def ratio(name: str) -> float | None:
        if name not in took:
            return None
        beside = zip(took[name], took["ours"], strict=True)
        return round(statistics.median(theirs / mine for theirs, mine in beside), 3)

    row = what | {
        "gb_per_s": round(size / statistics.median(took["ours"]) / 1e9, 2),
        "copy_gb_per_s": round(size / statistics.median(took["copy"]) / 1e9, 2),
        "of_copy": ratio("copy"),
        "of_indexing": ratio("indexing"),
    }
    print(
        f"{row['op']:>18} {row['layout']:>12} {row['block_tokens']:5} {row['order']:>9} {row['dtype']:>9} "
        f"{row['gb_per_s']:6.2f} {row['copy_gb_per_s']:6.2f} {row['of_copy']:6.2f} {row['of_indexing'] or '':>10}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    raise SystemExit(main())
