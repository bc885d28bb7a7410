"""KV that is wrong though its bytes are what was committed: who finds it, who is believed, and what is purged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine

from ..small_models import tiny_llama
from .conftest import BOUND_S, Daemon

T = 16
PROMPT = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()
Make = Callable[..., BatchEngine]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return tiny_llama(layers=3)


@pytest.fixture
def engines(model: LlamaForCausalLM, daemon: Daemon) -> Iterator[Make]:
    """Each is a worker of its own, as far as the daemon knows."""
    made: list[BatchEngine] = []

    def make(name: str, *, every: int = 0) -> BatchEngine:
        def client() -> Any:
            return connect(str(daemon.run_dir), engine_group=name, timeout_s=BOUND_S)

        made.append(
            BatchEngine(model, client, pool_chunks=32, chunk_tokens=T, retain=False, canary_every=every)
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def sick_saver(engine: BatchEngine) -> None:
    """What it saves is plausible, and wrong: checksums are made of the wrong bytes."""
    saver = engine._store.saver
    shard = saver._shard

    def wrong(*which: Any) -> np.ndarray:
        numbers = shard(*which).view("f4").copy()
        numbers[len(numbers) // 2 :] *= 1.5
        return numbers.view("u1")

    saver._shard = wrong


def sick_computer(engine: BatchEngine) -> None:
    """From now on it computes otherwise than before, and every time anew."""
    compute, draw = engine._compute_once, torch.Generator().manual_seed(3)

    def wrong(tokens: Any) -> list[torch.Tensor] | None:
        found = compute(tokens)
        return found and [layer + torch.randn(layer.shape, generator=draw) for layer in found]

    engine._compute_once = wrong


def saved_by(engine: BatchEngine) -> tuple[int, ...]:
    tokens = engine.turn("s", PROMPT, 4).tokens
    assert engine.flush(BOUND_S) and engine.save_counters["chunks_saved"] > 8
    return tokens


def hits(engine: BatchEngine) -> int:
    """Leading chunks of the prompt that the daemon has."""
    namespace = engine._store._store.namespace()
    return namespace.match(namespace.keys(PROMPT), timeout_s=BOUND_S).usable


def eventually(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 2 * BOUND_S
    while not what():
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.02)


def test_a_healthy_worker_has_a_sick_maker_quarantined(
    model: LlamaForCausalLM, daemon: Daemon, engines: Make
) -> None:
    sick, good, third = engines("sick"), engines("good", every=1), engines("third")
    sick_saver(sick)
    wanted = saved_by(sick)  # its own answer came from its own pool
    assert hits(third) > 0
    good.turn("s", PROMPT, 4)
    assert "self-test passes" in good.alarm
    eventually(lambda: hits(third) == 0)
    before = sick.save_counters["chunks_saved"]
    sick.turn("other", PROMPT[::-1], 4)
    assert sick.flush(BOUND_S) and sick.save_counters["chunks_saved"] == before, "it saves on"
    turn = third.turn("s", PROMPT, 4)
    assert turn.tokens == wanted and turn.reused_tokens == 0
    assert third.flush(BOUND_S) and hits(third) == len(PROMPT) // T, "what is good finds no place"
    assert engines("fourth").turn("s", PROMPT, 4).tokens == wanted


def test_a_sick_checker_purges_nothing(model: LlamaForCausalLM, daemon: Daemon, engines: Make) -> None:
    maker, sick, third = engines("maker"), engines("sick", every=1), engines("third")
    wanted = saved_by(maker)
    sick.turn("warm", PROMPT[:20], 1)  # its golden test was made while it was well
    sick._self_test.remember(sick._compute_once)
    sick._golden = sick._verdict
    sick_computer(sick)
    sick.turn("s", PROMPT, 4)
    assert "FAILS" in sick.alarm
    sick._store._lookups.shutdown(wait=True)  # it has told the daemon
    turn = third.turn("s", PROMPT, 4)
    assert turn.tokens == wanted and turn.reused_tokens >= len(PROMPT) // T * T
    before = maker.save_counters["chunks_saved"]
    maker.turn("other", PROMPT[::-1], 4)
    assert maker.flush(BOUND_S) and maker.save_counters["chunks_saved"] > before


def test_two_that_agree_are_believed(model: LlamaForCausalLM, daemon: Daemon, engines: Make) -> None:
    """Neither knows of its own health: no golden test was made."""
    sick = engines("maker")
    sick_saver(sick)
    saved_by(sick)
    for name, left in (("one", True), ("two", False)):
        checker = engines(name, every=1)
        checker._golden = checker._verdict
        checker.turn("s", PROMPT, 4)
        assert "FAILS" in checker.alarm
        checker._store._lookups.shutdown(wait=True)
        assert (hits(sick) > 0) is left
