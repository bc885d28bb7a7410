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
   heads of 128, chunks of 64) and the same with 8 KV heads, as share of the read bandwidth measured in this run,
   counting each shared chunk once. Medians over graph replays with a cold L2. Beside them: torch's attention on
   unshared copies, and FlashInfer where it can be imported.
3. Overlap: AttentionStore's Figures 18 to 20 (arXiv 2403.19708) on a random model of a 7B Llama's shape, with as many
   layers as there is room for: turns whose history is loaded against turns whose history was kept, with read buffers of
   several sizes and without pre-loading; prefill and decoding with saves against without.
4. Prefill as share of a large matrix product's rate. Where the time of a turn goes that is loaded and saved: `--trace
   FILE`, for chrome://tracing. Rotate, gather and scatter beside a copy of the same bytes. What a plan costs: a token
   more, a join and a leave, the plan of a prefill. Tile shapes: a few of each kernel; `--tiles FILE` writes the best
   ones, as kernels/tiles.py has them.

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
import sys
import time
from collections.abc import Callable, Iterator
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
from gpu.section import DRY, Row, Section, Setting, Steps
from gpu.store import Store
from gpu.tile_shapes import TileShapes
from harness import report

ONLY_CORRECT = ("device", "engine", "store", "correct")


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
    chosen = options.parse_args()
    on = DRY if chosen.dry_run else Setting()
    results: list[Row] = []
    speeds: dict[str, float] = {}
    if on.real and not torch.cuda.is_available():
        print("no GPU here: nothing was checked (--dry-run goes through all of it on the CPU)")
    else:
        shapes = TileShapes(on, speeds)
        sections = sections_of(on, speeds, shapes, chosen.trace)
        if chosen.only_correct:
            sections = [each for each in sections if each[0] in ONLY_CORRECT]
        begun = time.monotonic()
        share = 0.0
        for name, part, section in sections:
            share += part
            deadline = begun + share * chosen.seconds  # what a section leaves, the next ones have
            for row in performed(name, section.steps, deadline):
                results.append(row)
                print(json.dumps(row), flush=True)
                written(chosen.into, told(on, results))
        if chosen.tiles:
            chosen.tiles.write_text(shapes.tiles_module())
    wrong = [
        row
        for row in results
        if "error" in row and (row["section"] in ONLY_CORRECT or "differs" in row["error"])
    ]
    print(*goals_of(on, results), sep="\n")
    written(chosen.into, told(on, results))
    print(told(on, results))
    return 1 if wrong else 0


def performed(section: str, steps: Callable[[], Steps], deadline: float) -> Iterator[Row]:
    """The rows of a section; one that fails has its error."""
    for name, step in steps():
        row: Row = {"section": section, "what": name}
        if time.monotonic() > deadline:
            yield row | {"left_out": "no time left"}
            continue
        began = time.monotonic()
        try:
            row |= step()
        except Exception as error:  # the other steps are worth their time all the same
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        yield row | {"seconds": round(time.monotonic() - began, 2)}


def told(on: Setting, results: list[Row]) -> str:
    return report(__file__, results, goals_of(on, results))


def written(into: Path | None, line: str) -> None:
    """Whole at any time, whenever the run is ended."""
    if into is not None:
        beside = into.with_suffix(".part")
        beside.write_text(line + "\n")
        beside.replace(into)


def sections_of(
    on: Setting, speeds: dict[str, float], shapes: TileShapes, trace: Path | None
) -> list[tuple[str, float, Section]]:
    """(name, share of the time, section)"""
    return [
        ("device", 0.03, Card(on, speeds)),
        ("engine", 0.10, Engine(on, speeds)),
        ("store", 0.08, Store(on, speeds)),
        ("correct", 0.22, Correct(on, speeds)),
        ("decode", 0.15, Decode(on, speeds)),
        ("overlap", 0.20, Overlap(on, speeds)),
        ("prefill", 0.07, Prefill(on, speeds)),
        ("trace", 0.02, Trace(on, speeds, trace)),
        ("copies", 0.02, Copies(on, speeds)),
        ("plans", 0.01, Plans(on, speeds)),
        ("tiles", 0.10, shapes),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
