"""Loads that fail at every layer, a daemon that is killed at every layer, and a cut that meets a save of its session: a
real daemon, and answers that are right each time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import kvstore.client.lease
from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.truncation import Turns

from .conftest import BOUND_S, Daemon
from .test_truncation import HEAD, SETTINGS, Chat, T, converse, engine_of, model, text

__all__ = ["model"]  # a fixture
LAYERS = 3
PROMPT = text(150, 1)


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], bool]], None]:
    """From now on the copy of that layer is what the function says: whether it came."""
    copy = kvstore.client.lease.ReadLease.copy_many
    calls = 0

    def arm(layer: int, what: Callable[[], bool]) -> None:
        nonlocal calls
        calls = 0

        def copying(self: Any, pieces: Any) -> bool:
            nonlocal calls
            calls += 1
            return what() and copy(self, pieces) if calls == layer + 1 else copy(self, pieces)

        monkeypatch.setattr(kvstore.client.lease.ReadLease, "copy_many", copying)

    return arm


def ways(daemon: Daemon) -> dict[str, Callable[[], bool]]:
    def fail() -> bool:
        raise RuntimeError("the test's fault")

    def kill() -> bool:
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait(BOUND_S)
        return True

    return {"void": lambda: False, "raises": fail, "killed": kill}


def plain_engine(model: LlamaForCausalLM, **options: Any) -> BatchEngine:
    return BatchEngine(model, pool_chunks=48, chunk_tokens=T, retain=False, **options)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("way", ["void", pytest.param("raises", marks=pytest.mark.slow), "killed"])
def test_a_load_that_fails_at_any_layer(
    way: str, layer: int, model: LlamaForCausalLM, daemon: Daemon, strike: Any
) -> None:
    plain = plain_engine(model)
    wanted = plain.turn("", PROMPT, 8).tokens
    plain.close()
    client = lambda: connect(str(daemon.run_dir), timeout_s=BOUND_S)  # noqa: E731
    engine = BatchEngine(model, client, pool_chunks=48, chunk_tokens=T, retain=False)
    try:
        engine.turn("s", PROMPT, 1)
        assert engine.flush(BOUND_S)
        strike(layer, ways(daemon)[way])
        turn = engine.turn("s", PROMPT, 8)
        assert turn.tokens == wanted
        assert turn.load_failures == 1 or way == "killed"  # by then all may have been copied
        engine.check_integrity()
        assert engine.turn("s", PROMPT, 8).tokens == wanted and engine.pool.used == 0
    finally:
        engine.close()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("way", ["void", pytest.param("killed", marks=pytest.mark.slow)])
def test_what_a_cut_conversation_needs_fails_at_any_layer(
    way: str, layer: int, model: LlamaForCausalLM, daemon: Daemon, strike: Any
) -> None:
    chat = converse(model, daemon, 10)
    length = len(chat.tokens)
    good, engine = engine_of(model, daemon.run_dir), engine_of(model, daemon.run_dir)
    plain = plain_engine(model, truncation=SETTINGS)
    try:
        prompt = [*chat.tokens, *text(30, 50)]
        turns = Turns(HEAD, (*chat.begins, length), (*chat.ends, len(prompt)))
        right = [each.turn("", prompt, 8, turns=turns).tokens for each in (good, plain)]
        assert good.counters["truncations_recomputed"] == 0 < plain.counters["truncations_recomputed"]
        assert good.flush(BOUND_S)
        strike(layer, ways(daemon)[way])
        tokens = engine.turn("chat", prompt, 8, turns=turns).tokens
        assert tokens in right
        assert tokens == right[1] or way == "killed", "a load that failed was used"
        engine.check_integrity()
        assert engine.pool.used == 0
    finally:
        for each in (good, engine, plain):
            each.close()


@pytest.mark.parametrize("cut_first", [False, True])
def test_a_cut_meets_a_save_of_the_same_session(
    cut_first: bool, model: LlamaForCausalLM, daemon: Daemon
) -> None:
    """One worker's save of a turn is held up; another one cuts the conversation in the next turn, and saves that."""
    chat = converse(model, daemon, 9 if cut_first else 3)
    reached, go = threading.Event(), threading.Event()
    one, other, third = (engine_of(model, daemon.run_dir) for _ in range(3))
    saver = one._store.saver
    shard = saver._shard

    def hold(*which: Any) -> Any:
        reached.set()
        assert go.wait(BOUND_S)
        return shard(*which)

    saver._shard = hold
    try:
        chat.turn(one, 50)
        assert reached.wait(BOUND_S)
        while True:  # until a cut that the first worker knows nothing of
            cut, _ = chat.turn(other, 60 + len(chat.ends))
            if cut:
                break
        go.set()
        assert other.flush(BOUND_S) and one.flush(BOUND_S)
        before = len(chat.tokens)
        chat.turn(third, 99)
        assert len(chat.tokens) == before + 42 and third.flush(BOUND_S)
        namespace = third._store._store.namespace()
        info = namespace.get_session("chat", timeout_s=BOUND_S)
        assert info is not None and info.usable == len(info.entries), "it names what is not there"
        # What the manifest is does not decide what is used: the same turn again is the same answer
        again = Chat()
        again.tokens, again.begins, again.ends = chat.tokens[:before], chat.begins[:-1], chat.ends[:-1]
        again.turn(other, 99)
        assert again.tokens == chat.tokens
        for engine in (one, other, third):
            engine.check_integrity()
            assert engine.pool.used == 0
    finally:
        go.set()
        for engine in (one, other, third):
            engine.close()
