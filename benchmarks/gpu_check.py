"""All of the kernels that needs a GPU, in one call: is it right on the device, and how fast.

1. The engine: `BatchEngine`, with graphs, against Hugging Face's `generate` on the same device, also with 256 sequences
   at a time. The way to the store: registration of host memory; copies from registered, pinned and pageable memory, one
   by one and in batches, and the worker's loads, out of registered memory, through the bounce ring and with keys that
   are rotated, each beside the link's own rate; the self-check that a worker makes before it trusts a device.
   Correct, in float16 and bfloat16, with NaN wherever nothing was written: decode and prefill attention against fp64
   from the sequences as told, also in layers of more than 2^31 elements, with contexts of 32,768 and 131,072 tokens,
   logits of 10^4, and on another stream than the current one; rotate against fp64, gather and scatter bit by bit;
   repeated runs and moved chunks give the same bits; a captured CUDA graph stays right while sequences grow.
2. Fast: decoding at the points of ChunkAttention's Table 3 and Figures 3 and 4 (arXiv 2402.15220; 32 sequences, 32
   heads of 128, chunks of 64) and the same with 8 KV heads, as share of the bandwidth measured in this run, counting
   each shared chunk once. Medians over graph replays with a cold L2. Beside them: torch's attention on unshared copies,
   and FlashInfer where it can be imported.
3. Overlap: AttentionStore's Figures 18 to 20 (arXiv 2403.19708) on a random model of a 7B Llama's shape, with as many
   layers as there is room for: turns whose history is loaded against turns whose history was kept, with read buffers of
   several sizes and without pre-loading; prefill and decoding with saves against without.
4. Prefill as share of a large matrix product's rate. Where the time of a turn goes that is loaded and saved: `--trace
   FILE`, for chrome://tracing. Rotate, gather and scatter beside a copy of the same bytes. What a plan costs: a token
   more, a join and a leave, the plan of a prefill. Tile shapes: a few of each kernel; `--tiles FILE` writes the best
   ones, as kernels/tiles.py has them.

What is only to be right, and what has to be compiled for all that is timed, is done first by several processes at a
time; all else by one. A step that loses the card's context, ends its process or hangs is told, and the others are done
by the next process (`gpu/processes.py`).

Needed on the machine: this checkout, and `pip install -e .[daemon]` beside a torch for CUDA, transformers and triton.
Each section has its share of the time; what does not fit in is left out and named, and what fails is told and stops
nothing else. The JSON object is written to `--into` after every step, with the goals (`gpu/goals.py`) so far. Without a
GPU it says so and ends well. `--dry-run` does all of it on the CPU with small shapes, to see that it runs; its figures
mean nothing.

    make bench-gpu_check ARGS='--into result.json --seconds 420 --tiles kernels/tiles.py'
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu.attention import Decode, Plans, Prefill
from gpu.card import Card
from gpu.copies import Copies
from gpu.correct import Correct
from gpu.engine import Engine, Trace
from gpu.goals import goals_of
from gpu.overlap import Overlap
from gpu.processes import Work, is_lost, rows_of_all, say
from gpu.section import DRY, Row, Section, Setting
from gpu.store import Store
from gpu.tile_shapes import TileShapes
from harness import report

ONLY_CORRECT = ("device", "engine", "store", "correct")
COMPILE = "compile "
"""Before a section's name: each of its kernels is launched once, and found in Triton's cache later."""
SHARES = {
    "device": 0.03,
    "correct": 0.14,
    **{f"{COMPILE}{each}": 0.03 for each in ("engine", "overlap", "decode", "prefill", "copies", "tiles")},
    "engine": 0.08,
    "store": 0.07,
    "decode": 0.14,
    "overlap": 0.17,
    "prefill": 0.06,
    "trace": 0.02,
    "copies": 0.02,
    "plans": 0.01,
    "tiles": 0.08,
}
"""Of the time, in the order in which sections come."""
FIRST = ("device",)
TOGETHER = tuple(each for each in SHARES if each == "correct" or each.startswith(COMPILE))
"""Of which no time is measured."""
ALONE = tuple(each for each in SHARES if each not in (*FIRST, *TOGETHER))
NO_GPU = "no GPU here"
HANGS_S = 150.0
"""No step takes so long, nor a start; of a dry run, on whatever machine, ten times as long."""
PROCESS_BYTES = 8 << 30
"""Of the card's memory, that a process takes at most."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--into", type=Path, help="a file for the JSON object that also is the last line of output"
    )
    options.add_argument("--seconds", type=float, default=420, help="begin nothing new after this time")
    options.add_argument("--only-correct", action="store_true", help="no timing")
    options.add_argument(
        "--tiles", type=Path, help="write the best tile shapes there, as kernels/tiles.py has them"
    )
    options.add_argument("--trace", type=Path, help="write where a turn's time goes, for chrome://tracing")
    options.add_argument("--dry-run", action="store_true", help="on the CPU, with small shapes")
    options.add_argument("--processes", type=int, default=processes(), help="where no time is measured")
    options.add_argument("--work", type=Work.of, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.work is not None:
        return work_on(chosen, chosen.work)
    on = DRY if chosen.dry_run else Setting()
    results: list[Row] = []
    for row in rows(chosen):
        results.append(row)
        print(json.dumps(row), flush=True)
        written(chosen.into, told(on, results))
    if not results:
        print(f"{NO_GPU}: nothing was checked (--dry-run goes through all of it on the CPU)")
    wrong = [
        row
        for row in results
        if "error" in row and (row["section"] in ONLY_CORRECT or "differs" in row["error"])
    ]
    print(*goals_of(on, results), sep="\n")
    written(chosen.into, told(on, results))
    print(told(on, results))
    return 1 if wrong else 0


def processes() -> int:
    return max(1, min(12, len(os.sched_getaffinity(0)) - 2))


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """Of all sections; none without a GPU."""
    began = time.monotonic()

    def command(work: Work) -> list[str]:
        given = [sys.executable, "-P", __file__, "--work", work.told(), "--seconds", str(chosen.seconds)]
        for name, value in (("--tiles", chosen.tiles), ("--trace", chosen.trace)):
            given += [name, str(value)] if value else []
        if (
            work.part[1] > 1
        ):  # what is exact is computed on the host, too, and each would take all of its cores
            threads = max(1, len(os.sched_getaffinity(0)) // work.part[1])
            given = ["env", f"OMP_NUM_THREADS={threads}", *given]
        return given + ["--dry-run"] * chosen.dry_run

    def works(sections: Sequence[str], count: int, speeds: dict[str, float]) -> list[Work]:
        kept = tuple(each for each in sections if not chosen.only_correct or each in ONLY_CORRECT)
        spent_s = time.monotonic() - began
        return [Work(kept, part=(n, count), spent_s=spent_s, speeds=speeds) for n in range(count)]

    speeds: dict[str, float] = {}
    count, hangs_s = chosen.processes, HANGS_S * (10 if chosen.dry_run else 1)
    for sections in (FIRST, TOGETHER, ALONE):
        together = count if sections is TOGETHER else 1
        for row in rows_of_all(works(sections, together, speeds), command, hangs_s=hangs_s):
            if row.get("left_out") == NO_GPU:
                return
            yield row
            if "memory_bytes" in row:
                count = max(1, min(count, row["memory_bytes"] // PROCESS_BYTES))


def told(on: Setting, results: list[Row]) -> str:
    return report(__file__, results, goals_of(on, results))


def written(into: Path | None, line: str) -> None:
    """Whole at any time, whenever the run is ended."""
    if into is not None:
        beside = into.with_suffix(".part")
        beside.write_text(line + "\n")
        beside.replace(into)


def work_on(chosen: argparse.Namespace, work: Work) -> int:
    """What a process does: see `gpu/processes.py`."""
    on = DRY if chosen.dry_run else Setting()
    if on.real and not torch.cuda.is_available():
        say(row={"section": work.sections[0], "what": "", "left_out": NO_GPU})
        say(done=True)
        return 0
    begun, speeds, number = time.monotonic() - work.spent_s, dict(work.speeds), -1
    for name in work.sections:
        share = sum(SHARES[each] for each in list(SHARES)[: list(SHARES).index(name) + 1])
        deadline = begun + share * chosen.seconds  # what a section leaves, the next ones have
        section = section_of(name, on, speeds, chosen)
        for what, step in section.steps():
            number += 1
            if not work.mine(number):
                continue
            say(begins={"section": name, "what": what}, number=number)
            row = performed({"section": name, "what": what}, step, deadline)
            if speeds != work.speeds:
                say(speeds=speeds)
            say(row=row)
            if is_lost(row):
                return 1  # the next process has the other steps
        if isinstance(section, TileShapes) and chosen.tiles and not section.on.brief:
            chosen.tiles.write_text(section.tiles_module())
    say(done=True)
    return 0


def performed(row: Row, step: Callable[[], Row], deadline: float) -> Row:
    """With what a step found, or its error."""
    if time.monotonic() > deadline:
        return row | {"left_out": "no time left"}
    began = time.monotonic()
    try:
        found = step()
        row = row if row["section"].startswith(COMPILE) else row | found
    except Exception as error:  # the other steps are worth their time all the same
        row = row | {"error": f"{type(error).__name__}: {error}"[:500]}
    return row | {"seconds": round(time.monotonic() - began, 2)}


SECTIONS: dict[str, type[Section]] = {
    "device": Card,
    "engine": Engine,
    "store": Store,
    "correct": Correct,
    "decode": Decode,
    "overlap": Overlap,
    "prefill": Prefill,
    "copies": Copies,
    "plans": Plans,
    "tiles": TileShapes,
}


def section_of(name: str, on: Setting, speeds: dict[str, float], chosen: argparse.Namespace) -> Section:
    if name == "trace":
        return Trace(on, speeds, chosen.trace)
    if name.startswith(COMPILE):
        return SECTIONS[name.removeprefix(COMPILE)](replace(on, brief=True), {})
    return SECTIONS[name](on, speeds)


if __name__ == "__main__":
    raise SystemExit(main())
