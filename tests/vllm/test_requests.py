"""Requests of every kind that users send, restored and restored in part: the answer is that of the same engine when it
finds nothing. With the connector and with the tier, in steps of fewer tokens than a prompt has and no multiple of a
block. That an engine without either answers so too is what `test_engine` and `test_tier` compare."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK, Daemon, Engine, prompt, restorable
from .test_tier import tiering

OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 120,
    "enable_chunked_prefill": True,
    "scheduling_policy": "priority",
}
# Not with a seed: with prompts in several steps vLLM 0.32 ends on a CPU ("CPU Generator does not use offset").
KINDS: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1},
    "several answers": {"parameters": {"n": 3, "temperature": 1.0, "top_k": 1}},
    "sampled": {"parameters": {"temperature": 1.3, "top_k": 1}},
    "log-probabilities of the prompt": {"parameters": {"prompt_logprobs": 2}},
    "no log-probabilities": {"parameters": {"logprobs": None}},
    "penalties": {"parameters": {"repetition_penalty": 1.4, "presence_penalty": 0.5}},
    "of some tokens alone": {"parameters": {"allowed_token_ids": [5, 9, 77, 130, 400], "min_tokens": 3}},
    "a salt": {"salt": "theirs"},
    "urgent": {"priority": -3},
}
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 119, 120, 121, 301)
SHARED = prompt(3300, 170)
CROWD: list[dict[str, Any]] = [
    {"tokens": SHARED + prompt(3301 + number, 40 + 31 * number), "max_tokens": 5, "priority": number % 3}
    for number in range(6)
]
SALTS = itertools.count()
pytestmark = pytest.mark.timeout(1200)  # an engine starts with the first of them


def of_kind(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request, and another that begins as it does."""
    number = list(KINDS).index(kind)
    tokens = prompt(3000 + number, 301)
    return (
        {"tokens": tokens, **KINDS[kind]},
        {"tokens": tokens[:200] + prompt(3100 + number, 60), **KINDS[kind]},
    )


def of_length(count: int) -> dict[str, Any]:
    return {"tokens": prompt(3200 + count, count)}


@pytest.fixture(scope="module", params=["connector", "tier"])
def engine(request: Any, folder: Path, launch_engine: Callable[..., Engine]) -> Iterator[Engine]:
    daemon = Daemon(folder / f"requests-{request.param}")
    patient = {"lookup_ms": 10_000, "load_ms": 10_000}
    try:
        if request.param == "tier":
            config = tiering(daemon.run_dir, **patient)
            engine = launch_engine("requests-tier", None, kv_transfer_config=config, **OPTIONS)
        else:
            engine = launch_engine("requests-connector", daemon.run_dir, patient, **OPTIONS)
        yield engine
        assert engine.end() == 0
    finally:
        daemon.stop()


def whole(tokens: list[int]) -> int:
    return len(tokens) // BLOCK * BLOCK


def told(engine: Engine, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    outputs = engine.ask(generate=list(requests))["outputs"]
    assert all(output["finish"] == "length" for output in outputs), outputs
    return outputs


def computed(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for which nothing can be found: no other has its salt."""
    (output,) = told(engine, {**asked, "salt": f"{next(SALTS)}"})
    # Several answers are requests of their own to vLLM: what the first of them computed serves the others.
    assert not output["cached"] or len(output["all"]) > 1
    engine.forget()
    return output


def agree(output: dict[str, Any], expected: dict[str, Any]) -> None:
    assert output["all"] == expected["all"]
    assert len(output["prompt_logprobs"]) == len(expected["prompt_logprobs"])
    for mine, theirs in zip(output["prompt_logprobs"], expected["prompt_logprobs"], strict=True):
        assert (mine or {}) == pytest.approx(theirs or {}, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(engine: Engine, kind: str) -> None:
    first, other = of_kind(kind)
    expected = computed(engine, first)
    for attempt in range(3):
        (output,) = told(engine, first)
        agree(output, expected)
        if attempt and not first.get("parameters", {}).get("prompt_logprobs"):
            assert output["cached"] == 288
        engine.forget()
    # Of another one, what it has in common is restored, and the rest is computed.
    expected = computed(engine, other)
    (output,) = told(engine, other)
    agree(output, expected)
    assert engine.counts()["tracked"] == 0


def test_lengths(engine: Engine, request: pytest.FixtureRequest) -> None:
    """Of a prompt that is all there the last token is computed. The connector says so itself; the tier gives vLLM all
    of it, which counts that as found."""
    found = restorable if request.node.callspec.params["engine"] == "connector" else whole
    for count in LENGTHS:
        asked = of_length(count)
        expected = computed(engine, asked)
        for attempt in range(2):
            (output,) = told(engine, asked)
            agree(output, expected)
            assert output["cached"] == attempt * found(asked["tokens"]), count
            engine.forget()


def test_all_of_them_at_once_and_some_aborted(engine: Engine) -> None:
    """In a batch numbers are rounded otherwise, so only greedy answers are compared."""
    expected = [computed(engine, asked)["tokens"] for asked in CROWD]
    for step in range(5):
        outputs = engine.ask(generate=CROWD, abort={"1": step, "4": step + 2})["outputs"]
        for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            if number not in (1, 4):
                assert output["tokens"] == wanted, (step, number)
        assert engine.counts()["tracked"] == 0
        engine.forget()
    assert [output["tokens"] for output in told(engine, *CROWD)] == expected
