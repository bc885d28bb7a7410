"""All of the attention kernels that needs a GPU, in one call: is it right on the device, and how fast.

1. Correct: fp16 and bf16 against fp64 from the sequences as told, with NaN wherever no sequence has a token; repeated
   runs and moved chunks give the same bits; a captured CUDA graph stays right while sequences grow.
2. Fast: the points of ChunkAttention's Table 3 (arXiv 2402.15220; 32 sequences, 32 heads of 128, chunks of 64) and the
   same with 8 KV heads. Each figure is the median over graph replays with a cold L2, as time and as share of the read
   bandwidth measured in this run, counting each shared chunk once. Beside it: torch's attention on unshared copies, and
   FlashInfer where it can be imported.

What does not fit in the time given is left out and named. Without a GPU it says so, writes an empty result, ends well.

    make bench-gpu_check ARGS='--into result.json --seconds 420'
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvstore.benchmark import report
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.decode.naive import naive_decode_attention
from kvstore.kernels.forest import Forest, Plan

Sequences = dict[int, tuple[list[int], int]]
BATCH, HEADS, HEAD_DIM, CHUNK = 32, 32, 128, 64
FLUSH_BYTES = 256 << 20
"""More than any L2."""
POINTS = [(4096, shared) for shared in (4096, 3072, 2048, 1024, 0)] + [
    (tokens, shared) for tokens in (2048, 1024) for shared in (tokens, tokens // 2, 0)
]
VARIANTS = [(16, 512), (32, 256), (32, 512), (32, 1024), (64, 512)]
"""(rows of a tile, tokens of an item), all timed at each point."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--into", type=Path, help="a file for the JSON object that also is the last line of output"
    )
    options.add_argument("--seconds", type=float, default=420, help="begin nothing new after this time")
    options.add_argument("--only-correct", action="store_true", help="no timing")
    chosen = options.parse_args()
    deadline = time.monotonic() + chosen.seconds
    results: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        on = torch.cuda.get_device_properties(0)
        results.append(
            {"what": "device", "name": on.name, "torch": torch.__version__, "l2_bytes": on.L2_cache_size}
        )
        steps = [*correctness_steps("cuda"), *([] if chosen.only_correct else timing_steps())]
        for name, step in steps:
            row: dict[str, Any] = {"what": name}
            if time.monotonic() > deadline:
                row["left_out"] = "no time left"
            else:
                try:
                    row |= step()
                except Exception as error:  # the other steps are worth their time all the same
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
            results.append(row)
            print(json.dumps(row), flush=True)
    else:
        print("no GPU here: nothing to check")
    wrong = [row["what"] for row in results if "error" in row and row["what"].startswith("correct")]
    told = report(__file__, results, [])
    if chosen.into:
        chosen.into.write_text(told + "\n")
    print(told)
    return 1 if wrong else 0


# -- is it right


def correctness_steps(device: str) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    shapes = [
        {"head_dim": 128, "group": 1, "chunk_tokens": 64, "tile": 16},
        {"head_dim": 128, "group": 4, "chunk_tokens": 64, "tile": 8},
        {"head_dim": 128, "group": 4, "chunk_tokens": 16, "tile": 16, "soft_cap": 20.0},
        {"head_dim": 128, "group": 8, "chunk_tokens": 256, "tile": 16},
        {"head_dim": 64, "group": 1, "chunk_tokens": 32, "tile": 64, "scale": 0.3},
        {"head_dim": 80, "group": 2, "chunk_tokens": 64, "tile": 16},
        {"head_dim": 96, "group": 7, "chunk_tokens": 128, "tile": 4},
        {"head_dim": 256, "group": 1, "chunk_tokens": 64, "tile": 64},
        {"head_dim": 256, "group": 2, "chunk_tokens": 16, "tile": 8, "soft_cap": 50.0},
    ]
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for dtype in (torch.float16, torch.bfloat16):
        for seed, shape in enumerate(shapes):
            name = f"correct: {dtype} {shape}".replace("torch.", "")
            steps.append(
                (name, lambda shape=shape, dtype=dtype, seed=seed: correct(device, dtype, seed, **shape))
            )
    steps.append(
        ("correct: a graph that is replayed while sequences grow", lambda: graph_while_growing(device))
    )
    return steps


def correct(
    device: str,
    dtype: torch.dtype,
    seed: int,
    *,
    head_dim: int,
    group: int,
    chunk_tokens: int,
    tile: int,
    scale: float | None = None,
    soft_cap: float | None = None,
    batch: int = 24,
    kv_heads: int = 4,
) -> dict[str, Any]:
    sequences, chunks = random_sequences(seed, batch, chunk_tokens)
    q, pool = tensors(
        device, dtype, seed, sequences, chunks, chunk_tokens, group * kv_heads, kv_heads, head_dim
    )
    keys, values = pool.unbind(1)
    options = {"scale": scale, "soft_cap": soft_cap}

    def attend(keys: torch.Tensor, values: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        plan = planned(device, sequences, batch, chunks, chunk_tokens, tile, split_tokens=256)
        return decode_attention(q, keys, values, plan, out=torch.full_like(q, math.nan), **options)

    out = attend(keys, values, sequences)
    exact = naive_decode_attention(q, keys, values, sequences, **options)
    plain = naive_decode_attention(q, keys, values, sequences, dtype=dtype, **options)
    rounding = ((exact.to(dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    error, allowed = ((found.double() - exact).abs().max().item() for found in (out, plain))
    allowed = 2 * allowed + 2 * rounding
    if not error <= allowed:  # also if it is NaN
        raise AssertionError(f"differs by {error:.3g} from fp64, allowed are {allowed:.3g}")
    if not all(torch.equal(attend(keys, values, sequences), out) for _ in range(5)):
        raise AssertionError("repeated runs differ")
    moved = {row: ([chunks - 1 - chunk for chunk in own], tokens) for row, (own, tokens) in sequences.items()}
    if not torch.equal(attend(*pool.flip(0).unbind(1), moved), out):
        raise AssertionError("moved chunks give other bits")
    return {"max_error": error, "allowed": allowed}


def graph_while_growing(device: str, tokens: int = 200) -> dict[str, Any]:
    batch, chunk_tokens, dtype = 8, 16, torch.float16
    sequences, chunks = random_sequences(1, batch, chunk_tokens, more=batch * (tokens // chunk_tokens + 1))
    unused = iter(sorted(set(range(chunks)) - {chunk for own, _ in sequences.values() for chunk in own}))
    forest = Forest(
        chunk_tokens=chunk_tokens,
        chunks=chunks,
        sequences_max=batch,
        split_tokens=64,
        device=device,
        items_max=512,
    )
    for row, sequence in sequences.items():
        forest.join(row, *sequence)
    q, pool = tensors(device, dtype, 1, sequences, chunks, chunk_tokens, 8, 8, 128)
    keys, values = pool.nan_to_num_(0.5).unbind(1)
    plan, out = forest.plan(), torch.empty_like(q)
    replay = captured(lambda: decode_attention(q, keys, values, plan, out=out))
    worst = 0.0
    for number in range(tokens):
        new = {row: next(unused) for row, (_, length) in sequences.items() if length % chunk_tokens == 0}
        forest.step(new)
        forest.plan()
        for row, (own, length) in sequences.items():
            sequences[row] = ([*own, *([new[row]] if row in new else ())], length + 1)
        if number % 10 == 0:
            out.fill_(math.nan)
            replay()
            exact = naive_decode_attention(q, keys, values, sequences)
            worst = max(worst, (out.double() - exact).abs().max().item())
            if not (out.double() - exact).abs().max().item() < 5e-3:
                raise AssertionError(f"after {number + 1} tokens it differs by {worst:.3g}")
    return {"max_error": worst}


def random_sequences(seed: int, batch: int, chunk_tokens: int, more: int = 0) -> tuple[Sequences, int]:
    """Forks of one another at random chunks, with tails of any length, some empty; and how many chunks a pool needs."""
    draw = random.Random(seed)
    sequences: Sequences = {}
    used = 0
    for row in range(batch):
        chunks: list[int] = []
        if sequences and draw.random() < 0.8:
            other, tokens = sequences[draw.choice(list(sequences))]
            chunks = other[: draw.randint(0, tokens // chunk_tokens)]
        own = draw.randrange(6 * chunk_tokens) if draw.random() < 0.9 else 0
        count = -(-own // chunk_tokens)
        sequences[row] = ([*chunks, *range(used, used + count)], len(chunks) * chunk_tokens + own)
        used += count
    chunks = used + 5 + more
    places = list(range(chunks))
    draw.shuffle(places)
    return {
        row: ([places[chunk] for chunk in own], tokens) for row, (own, tokens) in sequences.items()
    }, chunks


def tensors(
    device: str,
    dtype: torch.dtype,
    seed: int,
    sequences: Sequences,
    chunks: int,
    chunk_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and a pool with NaN wherever no sequence has a token."""
    torch.manual_seed(seed)
    q = torch.randn(max(sequences) + 1, heads, head_dim, device=device).to(dtype)
    pool = torch.randn(chunks, 2, kv_heads, chunk_tokens, head_dim, device=device).to(dtype)
    written = torch.zeros(chunks, chunk_tokens, dtype=torch.bool)
    for own, tokens in sequences.values():
        for number, chunk in enumerate(own):
            written[chunk, : tokens - number * chunk_tokens] = True
    return q, pool.masked_fill_(~written.to(device)[:, None, None, :, None], math.nan)


def planned(
    device: str,
    sequences: Sequences,
    batch: int,
    chunks: int,
    chunk_tokens: int,
    tile: int,
    *,
    split_tokens: int,
) -> Plan:
    forest = Forest(
        chunk_tokens=chunk_tokens,
        chunks=chunks,
        sequences_max=batch,
        split_tokens=split_tokens,
        tile_sequences=tile,
        items_max=1024,
        partials_max=1024,
        device=device,
    )
    for row, (own, tokens) in sequences.items():
        forest.join(row, own, tokens)
    return forest.plan()


# -- how fast


def timing_steps() -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    speeds: dict[str, float] = {}
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [("bandwidth", lambda: bandwidth(speeds))]
    for tokens, shared in POINTS:
        for kv_heads in (HEADS, HEADS // 4):
            name = f"time: {tokens} tokens, {shared} shared, {HEADS}/{kv_heads} heads"
            steps.append(
                (
                    name,
                    lambda tokens=tokens, shared=shared, heads=kv_heads: point(tokens, shared, heads, speeds),
                )
            )
    return steps


def bandwidth(speeds: dict[str, float]) -> dict[str, Any]:
    """Bytes a second: of a copy (read and written bytes together) and of reading alone."""
    source = torch.ones(1 << 30, dtype=torch.float16, device="cuda")
    target = torch.empty_like(source)
    speeds["copy"] = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    speeds["read"] = source.nbytes / seconds(lambda: torch.amax(source))
    return {f"{name}_tb_per_s": round(speed / 1e12, 3) for name, speed in speeds.items()}


def point(tokens: int, shared: int, kv_heads: int, speeds: dict[str, float]) -> dict[str, Any]:
    own = (tokens - shared) // CHUNK
    chunks = shared // CHUNK + BATCH * own
    pool = torch.randn(chunks, 2, kv_heads, CHUNK, HEAD_DIM, device="cuda", dtype=torch.float16)
    keys, values = pool.unbind(1)
    q = torch.randn(BATCH, HEADS, HEAD_DIM, device="cuda", dtype=torch.float16)
    first = list(range(shared // CHUNK))
    sequences: Sequences = {
        row: (first + list(range(len(first) + row * own, len(first) + (row + 1) * own)), tokens)
        for row in range(BATCH)
    }
    moved = pool.nbytes + 2 * q.nbytes
    row: dict[str, Any] = {"bytes": moved}
    out = torch.empty_like(q)
    for rows, split in VARIANTS:
        tile = max(1, rows * kv_heads // HEADS)
        plan = planned("cuda", sequences, BATCH, chunks, CHUNK, tile, split_tokens=split)
        took = seconds(
            captured(lambda plan=plan: decode_attention(q, keys, values, plan, out=out)), repeats=40
        )
        row[f"us_rows_{rows}_split_{split}"] = round(1e6 * took, 1)
    best = min(value for name, value in row.items() if name.startswith("us_rows"))
    row |= {"us": best, "tb_per_s": round(moved / best / 1e6, 3)}
    if speeds:
        row["of_read"] = round(moved / best * 1e6 / speeds["read"], 3)
        row["of_copy"] = round(moved / best * 1e6 / speeds["copy"], 3)

    index = torch.tensor([chunks for chunks, _ in sequences.values()], device="cuda")
    k, v = (of[index].transpose(1, 2).flatten(2, 3) for of in (keys, values))
    grouped = {"enable_gqa": True} if kv_heads < HEADS else {}
    torch_out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, **grouped).squeeze(2)
    row["differs_from_torch"] = (out - torch_out).abs().max().item()
    call = captured(lambda: F.scaled_dot_product_attention(q.unsqueeze(2), k, v, **grouped))
    row["torch_us"] = round(1e6 * seconds(call, repeats=20), 1)
    row |= flashinfer_times(q, pool, len(first), own, out)
    others = [value for name, value in row.items() if name.endswith("_us") and isinstance(value, float)]
    row["speedup_over_best_other"] = round(min(others) / best, 3)
    return row


def flashinfer_times(
    q: torch.Tensor, pool: torch.Tensor, shared: int, own: int, ours: torch.Tensor
) -> dict[str, Any]:
    """Its decode kernel, and its cascade with the backend that it picks and with fa2; what fails is told."""
    try:
        import flashinfer
    except ImportError:
        return {}
    found: dict[str, Any] = {}
    heads = {"num_qo_heads": HEADS, "num_kv_heads": pool.shape[2], "head_dim": HEAD_DIM, "page_size": CHUNK}

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def pages(counts: int) -> torch.Tensor:
        return ints([row * counts for row in range(BATCH + 1)])

    def private(row: int) -> list[int]:
        return list(range(shared + row * own, shared + (row + 1) * own))

    def workspace() -> torch.Tensor:
        return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

    def decode() -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND", use_tensor_cores=True)
        every = [chunk for row in range(BATCH) for chunk in (*range(shared), *private(row))]
        last = ints([CHUNK] * BATCH)
        wrapper.plan(pages(shared + own), ints(every), last, *heads.values(), q_data_type=q.dtype)
        return wrapper

    def cascade(backend: str | None) -> Any:
        if not shared or not own:
            raise ValueError("two levels need shared and private chunks")
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "HND")
        for level in wrapper._batch_prefill_wrappers if backend else ():
            level._backend = backend
        wrapper.plan(
            [ints([0, BATCH]), pages(1)],
            [ints([0, shared]), pages(own)],
            [ints(list(range(shared))), ints([chunk for row in range(BATCH) for chunk in private(row)])],
            [ints([CHUNK]), ints([CHUNK] * BATCH)],
            *heads.values(),
            q_data_type=q.dtype,
        )
        return wrapper

    for name, make in (
        ("flashinfer_decode", decode),
        ("flashinfer_cascade", lambda: cascade(None)),
        ("flashinfer_cascade_fa2", lambda: cascade("fa2")),
    ):
        try:
            wrapper = make()
            found[f"{name}_differs"] = (wrapper.run(q, pool) - ours).abs().max().item()
            found[f"{name}_us"] = round(
                1e6 * seconds(lambda wrapper=wrapper: wrapper.run(q, pool), repeats=20), 1
            )
        except Exception as error:  # a peer's trouble is not ours
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    return found


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph; compiled before, as a graph may not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call on the device with a cold L2. Writing the flushed bytes also hides the time to launch."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        call()
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
