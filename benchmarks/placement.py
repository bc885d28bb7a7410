"""What is kept where: traces replayed through the production core in virtual time, under each policy.

hits      of the chunks of all prompts of a trace, with DRAM alone, without hints and with the next turns known; beside
          LRU, S3-FIFO and the best possible (Belady)
memory    how much LRU needs for the same hits
late      the same hits, when lookups without a message are told the store later
ssd       DRAM of 1,000 chunks above an SSD of 10,000 at 2 GB/s: which hits were in DRAM when they were asked for, with
          the next 20 turns known; how much was written to SSD, beside writing every chunk once, and what that costs
drawn     traces of five other kinds of reuse (`drawn_traces.py`), on which nothing was tuned: what is lost to LRU
paper     AttentionStore's setting (section 4.1) at a part of its size, behind an engine with a queue: beside LRU, FIFO,
          Belady and the paper's own policy; and with other think times, of which the paper says nothing
cost      what a save that evicts costs the core, beside LRU

    make bench-placement ARGS='--trace conversations.jsonl.zst --format mooncake'
    make bench-placement ARGS='--trace FILE --only hits --dram 1000 --look-ahead 0 100 --out'     # parts, put together
    make bench-placement ARGS='--only paper --lengths sharegpt_lengths.jsonl.zst'

Without --trace a workload is drawn: dialogues of several applications with prompts in common; without --lengths
conversations with ShareGPT's shape. The goals on hits are those of the Mooncake conversation trace (FAST'25, 12,031
requests); any trace has the goal that nothing is lost to LRU. What planning costs is measured by `lookahead`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from drawn_traces import KINDS, drawn, lengths
from harness import Goal, arguments, finish, heading, keep, some
from placement_figures import CHUNK_TOKENS, DRAM, SESSIONS, SSD_SMALL, WARM_UP, scaled
from scale import BATCH, CHAIN, Driver, chains, fill, new_driver

from kvstore.replay import FORMATS, WHOLE_FUTURE, Trace, read_trace, replay
from kvstore.replay.baselines import baseline
from kvstore.replay.engine import Served, serve
from kvstore.replay.hardware import MODELS

PARTS = ("hits", "memory", "late", "ssd", "drawn", "paper", "cost")
MOONCAKE_TRACE = ("mooncake", 12_031)
"""Format and turns."""
MOONCAKE = {
    (1_000, 0): 0.090, (3_000, 0): 0.140, (10_000, 0): 0.245,
    (1_000, 100): 0.102, (3_000, 100): 0.153, (10_000, 100): 0.256,
    (1_000, 400): 0.185, (3_000, 400): 0.233, (10_000, 400): 0.288,
    (1_000, WHOLE_FUTURE): 0.188, (3_000, WHOLE_FUTURE): 0.292, (10_000, WHOLE_FUTURE): 0.365,
}  # fmt: skip
"""Goals by chunks of DRAM and look-ahead."""
SIZES, LOOK_AHEADS = (1_000, 3_000, 10_000), (0, 100, 400, WHOLE_FUTURE)
LOST_TO_LRU_MAX = 0.005
LESS_MEMORY = 0.45
SSD_SIZE, SSD_BYTES_PER_S, SSD_LOOK_AHEAD = 1_000, 2e9, 20
IN_DRAM, WRITTEN_MAX = 0.99, 0.5
TOUCHED_MS, TOLD_LATE_MAX = 50, 0.002
DRAWN = (("dialogues", 1_000), ("dialogues", 1_500), ("agents", 1_500), ("documents", 2_000), ("scans", 1_000),
         ("recent", 1_000))  # fmt: skip
"""Kinds and chunks of DRAM."""
PAPER_MODEL, PAPER_SCALE, PAPER_SCALE_QUICK = "llama-13b", 12, 24
THINK_S, THINK_OTHERS_S = 40.0, (10.0, 160.0)
ABOVE_LRU, BELOW_BELADY, IN_DRAM_PAPER = 0.20, 0.02, 0.996
COST_CHUNKS, COST_ROUNDS, COST_MAX = 100_000, 400, 1.10
QUICK_TURNS, QUICK_SIZE, QUICK_DRAWN = 400, 200, 600
KEY = ("part", "trace", "policy", "dram", "ssd", "look_ahead", "think_s", "told_ms")

Row = dict[str, Any]


class Report:
    """Rows and goals so far; kept where `--out` says after each part."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.rows: list[Row] = []
        self.goals: list[Goal] = []

    def row(self, **row: Any) -> None:
        self.rows.append(row)
        shown = {name: _shown(name, value) for name, value in row.items() if name != "part"}
        print(
            f"  {row['part']:7}" + "  ".join(f"{name} {value}" for name, value in shown.items()), flush=True
        )

    def goal(self, name: str, value: float, unit: str, goal: float, direction: Any) -> None:
        self.goals.append(Goal(name, value, unit, goal, direction))

    def keep(self) -> None:
        keep(__file__, self.chosen, self.rows, self.goals, key=KEY)


def _shown(name: str, value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and name != "think_s" else str(value)


def main() -> int:
    chosen = options().parse_args()
    print(heading(__file__), flush=True)
    report = Report(chosen)
    trace = the_trace(chosen)
    for name in chosen.only or PARTS:
        began = time.process_time()
        PART[name](report, trace)
        print(f"  {name}: {time.process_time() - began:.0f} s of a core", flush=True)
        report.keep()
    return finish(__file__, chosen, report.rows, report.goals, key=KEY)


def options() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    found.add_argument("--trace", metavar="FILE", help="as published, compressed or not")
    found.add_argument("--format", choices=sorted(FORMATS), default="mooncake")
    found.add_argument("--turns", type=some, metavar="N", help="of the trace, only the first")
    found.add_argument("--dram", type=some, nargs="+", metavar="CHUNKS")
    found.add_argument("--look-ahead", type=known_turns, nargs="+", metavar="TURNS", help='or "all"')
    found.add_argument("--kinds", nargs="+", choices=[*KINDS], metavar="KIND", help="of drawn traces")
    found.add_argument(
        "--think-s", type=float, nargs="+", metavar="S", help="median think times, in the paper's setting"
    )
    found.add_argument(
        "--lengths", metavar="FILE", help="of ShareGPT's conversations, for the paper's setting"
    )
    found.add_argument("--scale", type=some, metavar="S", help=f"1/S of the paper's size ({PAPER_SCALE})")
    return found


def known_turns(text: str) -> int:
    return WHOLE_FUTURE if text == "all" else int(text)


def the_trace(chosen: argparse.Namespace) -> Trace:
    if chosen.only and not {*chosen.only} & {"hits", "memory", "late", "ssd"}:
        return Trace("none", 1, [])
    trace = read_trace(chosen.trace, chosen.format) if chosen.trace else drawn("mixed")
    if chosen.trace and (trace.name, len(trace)) != MOONCAKE_TRACE:
        trace.name = Path(chosen.trace).name.partition(".")[0]
    turns = QUICK_TURNS if chosen.quick else chosen.turns
    if turns and turns < len(trace):
        trace = trace.first(turns)
        trace.name += f", {turns} turns"
    chunks = sum(len(turn.chunks) for turn in trace)
    print(f"{trace.name}: {len(trace)} turns, {chunks} chunks of {trace.chunk_tokens} tokens", flush=True)
    return trace


def known(turns: int) -> int | str:
    return "all" if turns == WHOLE_FUTURE else turns


# ---------------------------------------------------------------------------------------------------------- one trace


def hits(report: Report, trace: Trace) -> None:
    chosen = report.chosen
    sizes: Sequence[int] = chosen.dram or ((QUICK_SIZE,) if chosen.quick else SIZES)
    aheads: Sequence[int] = chosen.look_ahead or (LOOK_AHEADS[:2] if chosen.quick else LOOK_AHEADS)
    for size in sizes:
        of = {"part": "hits", "trace": trace.name, "dram": size}
        for ahead in aheads:
            rate = hit_rate(trace, size, ahead)
            report.row(**of, policy="expected", look_ahead=known(ahead), hits=rate)
            wanted = MOONCAKE.get((size, ahead))
            if wanted is not None and (trace.name, len(trace)) == MOONCAKE_TRACE:
                report.goal(f"{size} chunks, {known(ahead)} turns known: hits", rate, "", wanted, ">=")
            if not ahead:
                lru = baseline(trace, "lru", dram_chunks=size).hit_rate
                others = {
                    name: baseline(trace, name, dram_chunks=size).hit_rate for name in ("s3-fifo", "belady")
                }
                for name, found in {"lru": lru, **others}.items():
                    report.row(**of, policy=name, look_ahead=0, hits=found)
                lost = lru - rate
                report.goal(f"{trace.name}, {size} chunks: hits lost to LRU", lost, "", LOST_TO_LRU_MAX, "<=")


def hit_rate(trace: Trace, size: int, ahead: int = 0, **more: Any) -> float:
    return replay(trace, dram_chunks=size, look_ahead=ahead, policy="expected", **more).hit_rate


def memory(report: Report, trace: Trace) -> None:
    """With how much less than LRU needs the same hits are there."""
    chosen = report.chosen
    for size in chosen.dram or ((QUICK_SIZE,) if chosen.quick else SIZES):
        wanted = hit_rate(trace, size)
        low, high = size, 16 * size
        while high - low > size // 50:
            middle = (low + high) // 2
            enough = baseline(trace, "lru", dram_chunks=middle).hit_rate >= wanted
            low, high = (low, middle) if enough else (middle, high)
        report.row(part="memory", trace=trace.name, policy="lru", dram=high, hits=wanted, instead_of=size)
        report.goal(
            f"{trace.name}, {size} chunks: less memory than LRU", 1 - size / high, "", LESS_MEMORY, ">="
        )


def late(report: Report, trace: Trace) -> None:
    """Lookups in the directory, of which the store hears as late as workers tell it."""
    size = (report.chosen.dram or ((QUICK_SIZE,) if report.chosen.quick else SIZES))[0]
    rates = []
    for told_ms in (None, TOUCHED_MS):
        result = replay(trace, dram_chunks=size, policy="expected", touched_ms=told_ms)
        assert told_ms is None or result.counters["lookups_without_message"], result
        rates.append(result.hit_rate)
        report.row(part="late", trace=trace.name, dram=size, told_ms=told_ms or 0, hits=result.hit_rate)
    changed = abs(rates[0] - rates[1])
    name = f"{trace.name}, {size} chunks: hits that change by lookups told late"
    report.goal(name, changed, "", TOLD_LATE_MAX, "<=")


def with_ssd(report: Report, trace: Trace) -> None:
    """Of an SSD of ten times the DRAM; chunks are of 1 MiB. Beside a policy that writes every chunk."""
    chosen = report.chosen
    size = (chosen.dram or ((QUICK_SIZE,) if chosen.quick else (SSD_SIZE,)))[0]
    once = len({chunk for turn in trace for chunk in (*turn.chunks, *turn.answer)}) << 20
    for ahead in chosen.look_ahead or (0, SSD_LOOK_AHEAD):
        writes_all = "hints" if ahead else "lru"
        found = {}
        for policy in (writes_all, "expected"):
            result = found[policy] = replay(
                trace,
                dram_chunks=size,
                ssd_chunks=10 * size,
                ssd_bytes_per_s=SSD_BYTES_PER_S,
                policy=policy,
                look_ahead=ahead,
            )
            report.row(
                part="ssd", trace=trace.name, policy=policy, dram=size, ssd=10 * size, look_ahead=known(ahead),
                hits=result.hit_rate, in_dram=result.dram_share, written=result.ssd_bytes_written / once,
                waited_ms=result.waited_ms / max(1, result.turns),
            )  # fmt: skip
        mine, lost = found["expected"], found[writes_all].hit_rate - found["expected"].hit_rate
        of = f"{trace.name} with an SSD" + (f", {known(ahead)} turns known" if ahead else "")
        if ahead:
            report.goal(f"{of}: hits that are in DRAM", mine.dram_share, "", IN_DRAM, ">=")
        report.goal(
            f"{of}: written, of every chunk once", mine.ssd_bytes_written / once, "", WRITTEN_MAX, "<="
        )
        report.goal(f"{of}: hits lost to writing all", lost, "", 0.0, "<=")


# ------------------------------------------------------------------------------------------------------- other traces


def others(report: Report, _: Trace) -> None:
    wanted = {kind: QUICK_SIZE for kind, _ in DRAWN}.items() if report.chosen.quick else DRAWN
    for kind, size in wanted:
        if report.chosen.kinds and kind not in report.chosen.kinds:
            continue
        trace = drawn(kind)
        if report.chosen.quick:
            trace = trace.first(QUICK_DRAWN)
        of = {"part": "drawn", "trace": trace.name, "dram": size, "look_ahead": 0}
        mine = hit_rate(trace, size, whole=True)
        report.row(**of, policy="expected", hits=mine)
        rates = {
            name: baseline(trace, name, dram_chunks=size).hit_rate for name in ("lru", "s3-fifo", "belady")
        }
        for name, rate in rates.items():
            report.row(**of, policy=name, hits=rate)
        name = f"{trace.name}, {size} chunks: hits lost to LRU"
        report.goal(name, rates["lru"] - mine, "", LOST_TO_LRU_MAX, "<=")


# ------------------------------------------------------------------------------------------------ the paper's setting


def paper(report: Report, _: Trace) -> None:
    chosen = report.chosen
    scale = chosen.scale or (PAPER_SCALE_QUICK if chosen.quick else PAPER_SCALE)
    for think_s in chosen.think_s or ((THINK_S,) if chosen.quick else (THINK_S, *THINK_OTHERS_S)):
        with tempfile.TemporaryDirectory() as folder:
            trace = conversations(chosen.lengths or drawn_lengths(folder), think_s, scale)
        rates = judge(report, trace, think_s, scale)
        of = "the paper's setting" + ("" if think_s == THINK_S else f", think times of {think_s:g} s")
        report.goal(f"{of}: hits above LRU", rates["expected"] - rates["lru"], "", ABOVE_LRU, ">=")
        report.goal(f"{of}: hits below Belady", rates["belady"] - rates["expected"], "", BELOW_BELADY, "<=")
        report.goal(f"{of}: hits that are in DRAM", rates["in_dram"], "", IN_DRAM_PAPER, ">=")


def drawn_lengths(folder: str) -> Path:
    file = Path(folder) / "lengths.jsonl"
    rows = (json.dumps({"id": number, "turns": turns}) for number, turns in enumerate(lengths(SESSIONS)))
    file.write_text("\n".join(rows) + "\n")
    return file


def conversations(file: str | Path, think_s: float, scale: int) -> Trace:
    return read_trace(
        file,
        "sharegpt",
        sessions=SESSIONS // scale,
        rate=1.0 / scale,
        think_median_s=think_s,
        seed=1,
        chunk_tokens=CHUNK_TOKENS,
        window=MODELS[PAPER_MODEL].window,
    )


def judge(report: Report, trace: Trace, think_s: float, scale: int) -> dict[str, float]:
    """Our service, and every baseline over the same turns in the order in which it served them. Rates are of turns that
    found their history."""
    of = {"part": "paper", "trace": f"1/{scale} of the paper's", "think_s": think_s}
    served = service(trace, scale)
    result = served.result
    found = {"expected": result.session_hit_rate, "in_dram": result.dram_share}
    foreseen = served.hits_foreseen_dram / max(1, served.hits_foreseen)
    report.row(
        **of, policy="expected", hits=found["expected"], in_dram=result.dram_share, in_dram_foreseen=foreseen,
        first_token_s=served.first_token_mean_s,
    )  # fmt: skip
    chunk_bytes = MODELS[PAPER_MODEL].kv_bytes_per_token * CHUNK_TOKENS
    as_served = served.as_served(trace)
    for name in ("lru", "fifo", "s3-fifo", "belady", "paper"):
        other = baseline(
            as_served,
            name,
            dram_chunks=int(DRAM / scale // chunk_bytes),
            ssd_chunks=int(SSD_SMALL / scale // chunk_bytes),
            look_ahead=served.backlog,
            warm_up=WARM_UP // scale,
        )
        found[name] = other.session_hit_rate
        report.row(**of, policy=name, hits=other.session_hit_rate, in_dram=other.dram_share)
    return found


def service(trace: Trace, scale: int) -> Served:
    model, hardware = scaled(MODELS[PAPER_MODEL], scale)
    return serve(
        trace,
        model,
        hardware=hardware,
        dram_bytes=DRAM / scale,
        ssd_bytes=SSD_SMALL / scale,
        policy="expected",
        warm_up=WARM_UP // scale,
    )


# ----------------------------------------------------------------------------------------------------------- the core


def cost(report: Report, _: Trace) -> None:
    """Stores of both policies take turns, so that whatever else the machine does falls on both."""
    rounds = COST_ROUNDS // 5 if report.chosen.quick else COST_ROUNDS
    chunks = COST_CHUNKS // 10 if report.chosen.quick else COST_CHUNKS
    stores = {policy: full(policy, chunks) for policy in ("lru", "expected")}
    took: dict[str, list[float]] = {policy: [] for policy in stores}
    gc.collect()
    for at in range(rounds):
        for policy, driver in stores.items():
            keys = chains((1 << 40) + at * BATCH // CHAIN)
            began = time.thread_time()
            assert driver.save(keys) == BATCH
            took[policy].append(time.thread_time() - began)
            driver.tick(20)
    for policy, each in took.items():
        report.row(part="cost", policy=policy, dram=chunks, us_per_key=1e6 * median(each) / BATCH)
    name = "reserve + commit that evict, beside LRU's"
    report.goal(name, median(took["expected"]) / median(took["lru"]), "times", COST_MAX, "<=")


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def full(policy: str, chunks: int) -> Driver:
    """A store in which every save evicts."""
    driver = new_driver(chunks, eviction=policy)
    fill(driver, chunks // BATCH * BATCH)
    new: Iterator[int] = iter(range(1 << 30, 1 << 31, BATCH // CHAIN))
    while not driver.store.state.counters["chunks_evicted"]:
        driver.save(chains(next(new)))
        driver.tick(20)
    return driver


PART = dict(zip(PARTS, (hits, memory, late, with_ssd, others, paper, cost), strict=True))

if __name__ == "__main__":
    sys.exit(main())
