"""Eight at a time, shared prefixes, aborts, a paged cache so small that requests are preempted and prefixes evicted."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK, Daemon, Engine, prompt

REQUESTS = 200
SMALL = {"num_gpu_blocks_override": 44, "max_num_seqs": 8, "max_num_batched_tokens": 512}
ABORTED = {"5": 2, "17": 9, "40": 30, "41": 31, "90": 60, "150": 100}
"""Request number -> step of the engine."""


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "crowd", dram_bytes=128 << 20)
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """Ten conversations of several turns each: prefixes of one another, behind one of two system prompts."""
    chosen = random.Random(0)
    made = []
    for number in range(REQUESTS):
        story = chosen.randrange(10)
        tokens = prompt(story % 2, 3 * BLOCK + 5) + prompt(100 + story, chosen.randrange(20, 260))
        made.append({"tokens": tokens + prompt(1000 + number, 7), "max_tokens": chosen.randrange(4, 60)})
    return made


@pytest.fixture(scope="module")
def alone(launch_engine: Callable[..., Engine], requests: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens of the same engine without connector; two runs, which agree."""
    engine = launch_engine("crowd-control", None, **SMALL)
    runs = []
    for _ in range(2):
        outputs = engine.ask(generate=requests)["outputs"]
        runs.append([output["tokens"] for output in outputs])
        engine.ask(forget=True)
    engine.end()
    assert runs[0] == runs[1], "the control itself is not stable"
    return runs[0]


@pytest.mark.parametrize("layerwise", [False, True])
def test_tokens_are_those_of_an_engine_alone(
    layerwise: bool,
    daemon: Daemon,
    launch_engine: Callable[..., Engine],
    requests: list[dict[str, Any]],
    alone: list[list[int]],
) -> None:
    engine = launch_engine(f"crowd-{layerwise}", daemon.run_dir, {"layerwise": layerwise}, **SMALL)
    for aborts in (ABORTED, {}):
        outputs = engine.ask(generate=requests, abort=aborts)["outputs"]
        wrong = [
            number
            for number, output in enumerate(outputs)
            if output["finish"] != "abort" and output["tokens"] != alone[number]
        ]
        assert wrong == []
        assert sum(output["finish"] == "abort" for output in outputs) <= len(aborts)
        counts = engine.counts()
        assert counts["tracked"] == 0
        engine.forget()
    assert counts["hit_tokens"] > 0 and counts["blocks_loaded"] > 0
    metrics = engine.ask(metrics=True)
    print(
        f"layerwise={layerwise}",
        counts,
        {n: v for n, v in metrics.items() if "preempt" in n or "external" in n},
    )
    assert metrics["vllm:num_preemptions"] > 0, "the cache is not small enough for this test"
    assert engine.end() == 0
