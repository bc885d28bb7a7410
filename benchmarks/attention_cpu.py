"""Attention on a CPU: over shared chunks, beside torch's own attention on unshared copies and after a gather.

32 sequences of 1,024 tokens, 8 heads of 128, float32, chunks of 64; the first tokens, as many as `shared` says, are the
same for all. "sdpa" is torch.nn.functional.scaled_dot_product_attention over KV that was copied for each sequence
beforehand: no look-up, no sharing. "gather" makes that copy from the pool in every call, as an engine without a paged
kernel has to. Calls take turns, so that a machine whose speed drifts favours nobody; figures are medians over rounds, a
speed-up is the median of the rounds' own. "cpu" is processor time of all threads, which other work disturbs less.

Torch's threads are told not to spin (OMP_WAIT_POLICY=passive): else they do so for milliseconds after each call, on the
core of whoever comes next and in its processor time.

A plan is made before, and its work is divided in the first call only, as for the layers of a step.

Prefill: 8 sequences that share 1,024 cached tokens, each with so many new ones.

    make bench-attention_cpu ARGS='--quick --json'
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch reads it

import torch
import torch.nn.functional as F

from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.prefill import prefill_attention

SEQUENCES, TOKENS, HEADS, HEAD_DIM, CHUNK = 32, 1024, 8, 128, 64
THREADS = min(2, len(os.sched_getaffinity(0)))
SPEEDUP_GOALS = {(0, HEADS): 0.9, (512, HEADS): 1.7, (960, HEADS): 6.0, (0, HEADS // 4): 0.9}
"""Of our path over sdpa, by shared tokens and KV heads."""
PREFILL_SEQUENCES, PREFILL_CACHED, PREFILL_NEW = 8, 1024, (64, 128, 512)
PREFILL_SPEEDUP_GOAL = 0.9


def main() -> int:
    chosen = arguments(__doc__).parse_args()
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ")
    print(
        f"{'':>7} {'shared':>6} {'new':>4} {'pool':>9} {'heads':>6} {'':>7} {'wall ms':>9} {'cpu ms':>8} {'x sdpa':>7} "
        f"{'x (cpu)':>8}"
    )
    results, goals = [], []
    rounds = 9 if chosen.quick else 25
    cases: list[dict[str, Any]] = [
        {"shared": shared, "kv_heads": kv_heads, "goal": goal}
        for (shared, kv_heads), goal in SPEEDUP_GOALS.items()
    ]
    if not chosen.quick:
        cases += [{"shared": 0, "shuffled": True}, {"shared": 512, "shuffled": True}]
        cases += [{"shared": shared, "kv_heads": HEADS // 4} for shared in (512, 960)]
    for case in cases:
        goal = case.pop("goal", None)
        results.append(told(measure(**case, rounds=rounds)))
        goals += speedup_goals(results[-1], goal)
    for new in PREFILL_NEW:
        for kv_heads in (HEADS, HEADS // 4)[: 1 if chosen.quick else 2]:
            results.append(told(measure_prefill(new=new, kv_heads=kv_heads, rounds=max(3, rounds // 4))))
            goals += speedup_goals(results[-1], PREFILL_SPEEDUP_GOAL if kv_heads == HEADS else None)
    return finish(__file__, chosen, results, goals, key=("kind", "shared", "new", "shuffled", "kv_heads"))


def told(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("ours", "sdpa", "gather"):
        print(
            f"{row['kind']:>7} {row['shared']:6} {row['new']:4} "
            f"{'shuffled' if row['shuffled'] else 'in order':>9} {HEADS}/{row['kv_heads']:<4} {name:>7} "
            f"{row[name + '_ms']:9.2f} {row[name + '_cpu_ms']:8.2f} {row[name + '_speedup']:7.2f} "
            f"{row[name + '_cpu_speedup']:8.2f}",
            flush=True,
        )
    return row


def speedup_goals(row: dict[str, Any], goal: float | None) -> list[Goal]:
    """By the clock and in processor time."""
    what = f"{row['shared']} tokens shared, {row['new']} new, {HEADS}/{row['kv_heads']} heads"
    return [
        Goal(f"{row['kind']}: {kind} speed-up over sdpa, {what}", row[f"ours_{key}speedup"], "x", goal, ">=")
        for kind, key in (("wall", ""), ("cpu", "cpu_"))
        if goal is not None
    ]


def measure(*, shared: int, shuffled: bool = False, kv_heads: int = HEADS, rounds: int) -> dict[str, Any]:
    own = (TOKENS - shared) // CHUNK
    places = list(range(shared // CHUNK + SEQUENCES * own))
    if shuffled:
        random.Random(1).shuffle(places)
    first = places[: shared // CHUNK]
    sequences = [first + places[at : at + own] for at in range(len(first), len(places), own)]
    pool = torch.randn(len(places), 2, kv_heads, CHUNK, HEAD_DIM)
    keys, values = pool.unbind(1)
    q = torch.randn(SEQUENCES, HEADS, HEAD_DIM)
    forest = Forest(chunk_tokens=CHUNK, chunks=len(places), sequences_max=SEQUENCES, tile_sequences=SEQUENCES)
    for row, chunks in enumerate(sequences):
        forest.join(row, chunks, TOKENS)
    plan, index = forest.plan(), torch.tensor(sequences)
    out = torch.empty_like(q)

    def copy(of: torch.Tensor) -> torch.Tensor:
        """[sequences, kv_heads, tokens, head_dim]"""
        return of[index].transpose(1, 2).flatten(2, 3)

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=kv_heads < HEADS).squeeze(2)

    copies = copy(keys), copy(values)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: decode_attention(q, keys, values, plan, out=out),
        "sdpa": lambda: sdpa(*copies),
        "gather": lambda: sdpa(copy(keys), copy(values)),
    }
    row = {"kind": "decode", "shared": shared, "new": 1, "shuffled": shuffled, "kv_heads": kv_heads}
    return row | compared(calls, rounds)


def measure_prefill(*, new: int, kv_heads: int, rounds: int) -> dict[str, Any]:
    shared, own, tokens = PREFILL_CACHED // CHUNK, -(-new // CHUNK), PREFILL_CACHED + new
    sequences = [
        [*range(shared), *range(shared + row * own, shared + (row + 1) * own)]
        for row in range(PREFILL_SEQUENCES)
    ]
    pool = torch.randn(shared + PREFILL_SEQUENCES * own, 2, kv_heads, CHUNK, HEAD_DIM)
    keys, values = pool.unbind(1)
    q = torch.randn(PREFILL_SEQUENCES * new, HEADS, HEAD_DIM)
    forest = Forest(chunk_tokens=CHUNK, chunks=len(pool), sequences_max=PREFILL_SEQUENCES)
    for row, chunks in enumerate(sequences):
        forest.join(row, chunks, tokens)
    plan, index = forest.prefill(dict.fromkeys(range(PREFILL_SEQUENCES), new)), torch.tensor(sequences)
    out = torch.empty_like(q)
    seen = torch.ones(new, tokens, dtype=torch.bool).tril(PREFILL_CACHED)
    by_head = q.view(PREFILL_SEQUENCES, new, HEADS, HEAD_DIM).transpose(1, 2).contiguous()

    def copy(of: torch.Tensor) -> torch.Tensor:
        """[sequences, kv_heads, tokens, head_dim]"""
        return of[index].transpose(1, 2).flatten(2, 3)[:, :, :tokens]

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = F.scaled_dot_product_attention(by_head, k, v, attn_mask=seen, enable_gqa=kv_heads < HEADS)
        return result.transpose(1, 2).flatten(0, 1)

    copies = copy(keys), copy(values)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: prefill_attention(q, keys, values, plan, out=out),
        "sdpa": lambda: sdpa(*copies),
        "gather": lambda: sdpa(copy(keys), copy(values)),
    }
    row = {"kind": "prefill", "shared": PREFILL_CACHED, "new": new, "shuffled": False, "kv_heads": kv_heads}
    return row | compared(calls, rounds)


def compared(calls: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, Any]:
    """Medians of each, and over "sdpa"."""
    for name, call in calls.items():
        assert torch.allclose(call(), calls["sdpa"](), rtol=1e-4, atol=1e-5), f"{name} is wrong"
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            if name == "gather" and number % 5:
                continue  # up to ten times as slow
            began, used = time.perf_counter(), time.process_time()
            call()
            wall[name].append(1e3 * (time.perf_counter() - began))
            cpu[name].append(1e3 * (time.process_time() - used))
    row: dict[str, Any] = {"rounds": rounds}
    for name in calls:
        for kind, took in (("", wall), ("cpu_", cpu)):
            row[f"{name}_{kind}ms"] = round(statistics.median(took[name]), 3)
            beside = took["sdpa"][::5] if name == "gather" else took["sdpa"]
            ratios = [sdpa / mine for sdpa, mine in zip(beside, took[name], strict=True)]
            row[f"{name}_{kind}speedup"] = round(statistics.median(ratios), 3)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
