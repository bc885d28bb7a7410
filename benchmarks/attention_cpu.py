"""Decode attention on a CPU: over shared chunks, beside torch's own attention on unshared copies and after a gather.

32 sequences of 1,024 tokens, 8 heads of 128, float32, chunks of 64; the first tokens, as many as `shared` says, are the
same for all. "sdpa" is torch.nn.functional.scaled_dot_product_attention over KV that was copied for each sequence
beforehand: no look-up, no sharing. "gather" makes that copy from the pool in every call, as an engine without a paged
kernel has to. Calls take turns, so that a machine whose speed drifts favours nobody; figures are medians over rounds, a
speed-up is the median of the rounds' own. "cpu" is processor time of all threads, which other work disturbs less.

    make bench-attention_cpu ARGS='--quick --json'
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kvstore.benchmark import Goal, heading, report
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import Forest

SEQUENCES, TOKENS, HEADS, HEAD_DIM, CHUNK = 32, 1024, 8, 128, 64
THREADS = 2
SPEEDUP_GOALS = {0: 0.9, 512: 1.7, 960: 6.0}
"""Of our path over sdpa, by shared tokens."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds, no extra cases")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    chosen = options.parse_args()
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ")
    print(
        f"{'shared':>6} {'pool':>9} {'heads':>6} {'':>7} {'wall ms':>9} {'cpu ms':>8} {'x sdpa':>7} {'x (cpu)':>8}"
    )
    cases: list[dict[str, Any]] = [{"shared": shared} for shared in SPEEDUP_GOALS]
    if not chosen.quick:
        cases += [{"shared": 0, "shuffled": True}, {"shared": 512, "shuffled": True}]
        cases += [{"shared": shared, "kv_heads": 2} for shared in SPEEDUP_GOALS]
    results, goals = [], []
    for case in cases:
        row = measure(**case, rounds=9 if chosen.quick else 25)
        results.append(row)
        for name in ("ours", "sdpa", "gather"):
            told = f"{HEADS}/{row['kv_heads']}"
            print(
                f"{row['shared']:6} {'shuffled' if row['shuffled'] else 'in order':>9} {told:>6} {name:>7} "
                f"{row[name + '_ms']:9.2f} {row[name + '_cpu_ms']:8.2f} {row[name + '_speedup']:7.2f} "
                f"{row[name + '_cpu_speedup']:8.2f}",
                flush=True,
            )
        if case.keys() == {"shared"}:
            goal = SPEEDUP_GOALS[row["shared"]]
            for kind in ("", "cpu_"):
                name = f"{kind or 'wall_'}speed-up over sdpa, {row['shared']} of {TOKENS} shared".replace(
                    "_", " "
                )
                goals.append(Goal(name, row[f"ours_{kind}speedup"], "x", goal, ">="))
    print(*goals, sep="\n")
    if chosen.json:
        print(report(__file__, results, goals))
    return 0


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
    for name, call in calls.items():
        assert torch.allclose(call(), calls["sdpa"](), rtol=1e-4, atol=1e-5), f"{name} is wrong"
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            if name == "gather" and number % 5:
                continue  # ten times as slow
            began, used = time.perf_counter(), time.process_time()
            call()
            wall[name].append(1e3 * (time.perf_counter() - began))
            cpu[name].append(1e3 * (time.process_time() - used))
    row: dict[str, Any] = {"shared": shared, "shuffled": shuffled, "kv_heads": kv_heads, "rounds": rounds}
    for name in calls:
        for kind, took in (("", wall), ("cpu_", cpu)):
            row[f"{name}_{kind}ms"] = round(statistics.median(took[name]), 3)
            beside = took["sdpa"][::5] if name == "gather" else took["sdpa"]
            ratios = [sdpa / mine for sdpa, mine in zip(beside, took[name], strict=True)]
            row[f"{name}_{kind}speedup"] = round(statistics.median(ratios), 3)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
