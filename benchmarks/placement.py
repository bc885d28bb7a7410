"""What is kept where: a trace replayed through the production core in virtual time, under each policy.

hits      of the chunks of all prompts, with DRAM alone, without hints and with the next turns known
ssd       DRAM of 1,000 chunks above an SSD of 10,000 at 2 GB/s, the next 20 turns known: which hits were in DRAM when
          they were asked for, and how much was written to SSD, beside writing every chunk once
memory    how much LRU needs for the same hits

    make bench-placement ARGS='--trace conversations.jsonl.zst --format mooncake'

Without --trace a workload is drawn: dialogues of several applications with prompts in common. The goals on hits are
those of the Mooncake conversation trace (FAST'25, 12,031 requests); any trace has the goal that nothing is lost to LRU.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading

from kvstore.replay import FORMATS, WHOLE_FUTURE, Trace, Turn, read_trace, replay

MOONCAKE_TURNS = 12_031
MOONCAKE = {
    (1_000, 0): 0.090, (3_000, 0): 0.140, (10_000, 0): 0.245,
    (1_000, 100): 0.102, (3_000, 100): 0.153, (10_000, 100): 0.256,
    (1_000, 400): 0.185, (3_000, 400): 0.233, (10_000, 400): 0.288,
    (1_000, WHOLE_FUTURE): 0.188, (3_000, WHOLE_FUTURE): 0.292, (10_000, WHOLE_FUTURE): 0.365,
}  # fmt: skip
"""Goals by chunks of DRAM and look-ahead."""
LOST_TO_LRU_MAX = 0.005
LESS_MEMORY = 0.45
SSD_CHUNKS, SSD_BYTES_PER_S, SSD_LOOK_AHEAD = 10_000, 2e9, 20
IN_DRAM, WRITTEN_MAX = 0.99, 0.5
QUICK_TURNS = 500
TOUCHED_MS, TOLD_LATE_MAX = 50, 0.002

Row = dict[str, Any]


def main() -> int:
    chosen = options().parse_args()
    print(heading(__file__), flush=True)
    trace = read_trace(chosen.trace, chosen.format) if chosen.trace else drawn()
    if chosen.quick:
        trace = trace.first(QUICK_TURNS)
    chunks = sum(len(turn.chunks) for turn in trace)
    print(f"{trace.name}: {len(trace)} turns, {chunks} chunks of {trace.chunk_tokens} tokens")
    sizes = chosen.dram or ([300] if chosen.quick else [1_000, 3_000, 10_000])
    aheads = chosen.look_ahead or [0, 100, 400, WHOLE_FUTURE]
    if chosen.quick:
        aheads = aheads[:2]
    rows, goals = [], []
    for size in sizes:
        for ahead in aheads:
            policies = ("lru", "expected") if not ahead else ("expected",)
            found = {policy: hits(trace, policy, size, ahead) for policy in policies}
            rows += found.values()
            goals += judged(trace, size, ahead, {policy: row["hits"] for policy, row in found.items()})
        if not chosen.quick and 0 in aheads:
            mine = next(row["hits"] for row in rows if (row["dram"], row["policy"]) == (size, "expected"))
            goals.append(memory(trace, size, mine))
    if 0 in aheads:
        goals.append(told_late(trace, sizes[0], rows))
    if chosen.ssd or chosen.quick:
        goals += with_ssd(trace, sizes[0], rows)
    return finish(__file__, chosen, rows, goals, key=("trace", "policy", "dram", "ssd", "look_ahead"))


def options() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--trace", metavar="FILE", help="as published, compressed with zstd or not")
    found.add_argument("--format", choices=sorted(FORMATS), default="mooncake")
    found.add_argument("--dram", type=int, nargs="+", metavar="CHUNKS")
    found.add_argument("--look-ahead", type=int, nargs="+", metavar="TURNS")
    found.add_argument("--ssd", action="store_true", help="the part with an SSD too")
    return found


def hits(trace: Trace, policy: str, size: int, ahead: int) -> Row:
    result = replay(trace, dram_chunks=size, policy=policy, look_ahead=ahead)
    known = "all" if ahead == WHOLE_FUTURE else ahead
    print(f"  {size:7,} chunks, {known:>4} turns known, {policy:9} {result.hit_rate:.4f}", flush=True)
    return {
        "trace": trace.name, "policy": policy, "dram": size, "ssd": 0, "look_ahead": known,
        "hits": result.hit_rate, "tokens": result.token_hit_rate,
    }  # fmt: skip


def judged(trace: Trace, size: int, ahead: int, found: dict[str, float]) -> Iterator[Goal]:
    if "lru" in found:
        lost = found["lru"] - found["expected"]
        yield Goal(f"{size} chunks: hits lost to LRU", lost, "of chunks", LOST_TO_LRU_MAX, "<=")
    wanted = MOONCAKE.get((size, ahead))
    if wanted is not None and "mooncake" in trace.name and len(trace) == MOONCAKE_TURNS:
        known = "all" if ahead == WHOLE_FUTURE else ahead
        yield Goal(f"{size} chunks, {known} turns known: hits", found["expected"], "of chunks", wanted, ">=")


def told_late(trace: Trace, size: int, rows: list[Row]) -> Goal:
    """Lookups in the directory, of which the store hears as late as workers tell it."""
    asked = next(row["hits"] for row in rows if (row["policy"], row["look_ahead"]) == ("expected", 0))
    result = replay(trace, dram_chunks=size, policy="expected", touched_ms=TOUCHED_MS)
    assert result.counters["lookups_without_message"], result
    print(f"  {size:7,} chunks, lookups told {TOUCHED_MS} ms later: {result.hit_rate:.4f}", flush=True)
    lost = abs(asked - result.hit_rate)
    return Goal(
        f"{size} chunks: hits that change by lookups told late", lost, "of chunks", TOLD_LATE_MAX, "<="
    )


def memory(trace: Trace, size: int, wanted: float) -> Goal:
    """With how much less than LRU needs."""
    low, high = size, 16 * size
    while high - low > size // 50:
        middle = (low + high) // 2
        low, high = (middle, high) if lru(trace, middle) < wanted else (low, middle)
    print(f"  LRU has these hits with {high:,} chunks")
    return Goal(f"{size} chunks: less memory than LRU", 1 - size / high, "", LESS_MEMORY, ">=")


def lru(trace: Trace, size: int) -> float:
    """The hits of LRU, the core aside."""
    kept: dict[int, None] = {}
    found = asked = 0
    for turn in trace:
        asked += len(turn.chunks)
        for chunk in turn.chunks:
            if chunk not in kept:
                break
            found += 1
        for chunk in (*reversed(turn.answer), *reversed(turn.chunks)):
            kept.pop(chunk, None)
            kept[chunk] = None
        while len(kept) > size:
            del kept[next(iter(kept))]
    return found / asked if asked else 0.0


def with_ssd(trace: Trace, size: int, rows: list[Row]) -> Iterator[Goal]:
    named: Row = {"dram_chunks": size, "ssd_chunks": 10 * size, "ssd_bytes_per_s": SSD_BYTES_PER_S}
    plain = replay(trace, policy="hints", **named)
    mine = replay(trace, policy="expected", **named)
    ahead = replay(trace, policy="expected", look_ahead=SSD_LOOK_AHEAD, **named)
    once = len({chunk for turn in trace for chunk in (*turn.chunks, *turn.answer)}) << 20
    for result in (plain, mine, ahead):
        rows.append({
            "trace": trace.name, "policy": result.policy, "dram": size, "ssd": 10 * size,
            "look_ahead": result.look_ahead, "hits": result.hit_rate, "in_dram": result.dram_share,
            "written": result.ssd_bytes_written,
        })  # fmt: skip
        print(
            f"  with an SSD, {result.look_ahead:>3} turns known, {result.policy:9} {result.hit_rate:.4f}, "
            f"{result.dram_share:.4f} of these in DRAM, {result.ssd_bytes_written / once:.3f} of all chunks written"
        )
    yield Goal("with an SSD, 20 turns known: hits that are in DRAM", ahead.dram_share, "", IN_DRAM, ">=")
    yield Goal("written to SSD, of every chunk once", mine.ssd_bytes_written / once, "", WRITTEN_MAX, "<=")
    yield Goal("hits lost by it", plain.hit_rate - mine.hit_rate, "of chunks", 0.0, "<=")


def drawn(sessions: int = 1_500, seed: int = 1) -> Trace:
    """Dialogues of 12 applications, each with a system prompt, that arrive at random and think for a while."""
    dice = random.Random(seed)
    numbers: dict[tuple[int, ...], int] = {}
    turns = []
    arrives = 0.0
    for session in range(sessions):
        arrives += dice.expovariate(0.5)
        at, application, length = arrives, int(12 * dice.random() ** 3), 0
        while True:
            length += 1 + int(dice.expovariate(0.4))
            names = [(0, application, n) for n in range(4)] + [(1, session, n) for n in range(length)]
            chunks = [numbers.setdefault(name, len(numbers)) for name in names]
            turns.append(Turn(int(1_000 * at), chunks, 512 * len(chunks), session=session))
            at += dice.lognormvariate(math.log(40), 1.0)
            if dice.random() < 0.2:
                break
    return Trace("drawn dialogues", 512, turns)


if __name__ == "__main__":
    sys.exit(main())
