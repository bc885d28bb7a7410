"""Conversations that outgrow the window, and a real daemon: what is kept is served again, whatever dies in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.truncation import Truncation, Turns, view

from ..small_models import tiny_llama
from .conftest import BOUND_S, Daemon

T = 16
HEAD = 20
SETTINGS = Truncation(window=256)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return tiny_llama(layers=3)


def engine_of(model: LlamaForCausalLM, run_dir: Path) -> BatchEngine:
    client = lambda: connect(str(run_dir), timeout_s=BOUND_S)  # noqa: E731
    return BatchEngine(model, client, pool_chunks=48, chunk_tokens=T, retain=False, truncation=SETTINGS)


def text(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Chat:
    def __init__(self) -> None:
        self.tokens = text(HEAD, 99)
        self.begins: list[int] = []
        self.ends: list[int] = []

    @property
    def turns(self) -> Turns:
        return Turns(HEAD, tuple(self.begins), tuple(self.ends))

    def turn(
        self, engine: BatchEngine, number: int, between: Callable[[], None] = lambda: None
    ) -> tuple[int, int]:
        """Tokens of the prompt that were cut, and that were not computed."""
        self.begins.append(len(self.tokens))
        self.tokens += text(30, number)
        self.ends.append(len(self.tokens))
        request = engine.request(engine.add(self.tokens, 12, session="chat", turns=self.turns))
        for output in engine.run():
            assert output.finish != "error"
            self.tokens.append(output.token)
            between()
        return request.cut_tokens, request.reused.tokens


def converse(model: LlamaForCausalLM, daemon: Daemon, turns: int) -> Chat:
    engine, chat = engine_of(model, daemon.run_dir), Chat()
    try:
        for number in range(turns):
            chat.turn(engine, number)
            assert engine.flush(BOUND_S)
        assert engine.counters["truncations_recomputed"] == 0
        assert (engine.counters["requests_cut"] > 4) is (turns > 8)
    finally:
        engine.close()
    return chat


def test_another_worker_goes_on_with_a_conversation_that_was_cut(
    model: LlamaForCausalLM, daemon: Daemon
) -> None:
    chat = converse(model, daemon, 14)
    engine = engine_of(model, daemon.run_dir)
    try:
        cut, reused = chat.turn(engine, 50)
        kept = view(chat.tokens[:-12], SETTINGS, chat.turns, chunk_tokens=T)
        assert cut == kept.cut_tokens > 0
        assert reused > 0.6 * kept.attended
        assert engine.counters["truncations_recomputed"] == 0
        namespace = engine._store._store.namespace()
        assert engine.flush(BOUND_S)
        info = namespace.get_session("chat", timeout_s=BOUND_S)
        assert info is not None and info.usable == len(info.entries), (
            "the session does not name what it needs"
        )
        parts = [entry for entry in info.entries if entry.approximate]
        assert any(entry.token_count < T for entry in parts), "no entry begins inside of a chunk"
        assert len({entry.delta for entry in parts}) > 1
        named = {entry.key for entry in info.entries}
        needed = {part.key for one in kept.chain.seen for part in one.parts(namespace.salt, T)}
        assert needed <= named
    finally:
        engine.close()


def test_a_save_under_way_and_a_cut_of_the_same_session(model: LlamaForCausalLM, daemon: Daemon) -> None:
    """No turn waits for what the one before saves; a second worker cuts the same conversation meanwhile."""
    plain = converse(model, daemon, 1)
    one, other = engine_of(model, daemon.run_dir), engine_of(model, daemon.run_dir)
    try:
        mine, theirs = Chat(), Chat()
        for number in range(14):
            before = len(mine.tokens)
            mine.turn(one, number)
            theirs.turn(other, number)
            assert len(mine.tokens) == len(theirs.tokens) == before + 42
            theirs.tokens = list(mine.tokens)
            one.check_integrity()
        assert mine.tokens[:62] == plain.tokens[:62]
        for engine in (one, other):
            assert engine.flush(BOUND_S)
            assert engine.counters["load_failures"] == 0
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL], ids=str)
def test_a_daemon_that_hangs_or_dies_ends_no_conversation(
    model: LlamaForCausalLM, daemon: Daemon, what: signal.Signals
) -> None:
    chat = converse(model, daemon, 10)
    engine = engine_of(model, daemon.run_dir)
    steps = 0

    def strike() -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(daemon.process.pid, what)

    try:
        length = len(chat.tokens)
        for number in range(3):
            chat.turn(engine, 50 + number, strike)
        assert len(chat.tokens) == length + 3 * 42
        assert engine.counters["truncations_recomputed"] > 0, "what the store had was used without a store"
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
        engine.close()
