"""Turns of sessions: reuse is exact, logits are those of an engine that never let go, whatever fails is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
import torch

from kvstore.errors import Unavailable
from kvstore.gpu_worker import pool_store as pool_store_module
from kvstore.gpu_worker import saver as saver_module
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.kernels.prefill import PrefillPlan, cpu
from kvstore.types import ChunkKey

from .conftest import FakeStore, recorded_logits, text, tiny_llama

MakeEngine = Callable[..., BatchEngine]
T = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("prefill_tokens", [512, 23])
def test_logits_are_bit_equal_to_an_engine_that_kept_its_kv(
    dtype: torch.dtype, prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    """Four turns; before each one the worker starts anew, so that all it knows comes from the store."""
    model = tiny_llama(dtype)
    kept = engines(model, None, retain=True, prefill_tokens=prefill_tokens)
    history = text(100)
    for number in range(4):
        with recorded_logits(model) as expected:
            there = kept.turn("s", history, 30)
        with recorded_logits(model) as seen:
            engine = engines(model, store, prefill_tokens=prefill_tokens)
            result = engine.turn("s", history, 30)
        assert engine.flush(10)
        assert result.tokens == there.tokens
        assert len(expected) == len(seen)
        assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
        # All that an engine could have kept: the KV of the last token of an answer is never computed.
        assert there.reused_tokens == there.reused.hbm == (0 if number == 0 else len(history) - 20 - 1)
        assert result.reused_tokens == result.reused.dram == there.reused_tokens
        history = [*history, *result.tokens, *text(20, seed=number)]


@pytest.mark.parametrize("prefill_tokens", [512, 280])
def test_long_prompts_take_the_same_attention_wherever_their_history_is(
    prefill_tokens: int, store: FakeStore, engines: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's for pieces that are long enough, ours for what is left of them: the same, and the same bits, for a
    history in the pool and one that was loaded."""
    ways: list[tuple[bool, tuple[tuple[int, int, int], ...]]] = []
    is_torchs = cpu.is_torchs

    def noted(plan: PrefillPlan, dtype: torch.dtype, group: int) -> bool:
        ways.append((is_torchs(plan, dtype, group), plan.rows))
        return ways[-1][0]

    monkeypatch.setattr(cpu, "is_torchs", noted)
    model = tiny_llama()
    kept = engines(model, None, retain=True, prefill_tokens=prefill_tokens)
    history, known = text(300), {True: 0, False: 0}
    for number, new in enumerate((40, 300, 20, 0)):
        with recorded_logits(model) as expected:
            there = kept.turn("s", history, 5)
        pooled, ways = ways, []
        engine = engines(model, store, prefill_tokens=prefill_tokens)
        with recorded_logits(model) as seen:
            result = engine.turn("s", history, 5)
        assert engine.flush(10)
        assert ways == pooled
        for torchs, _ in ways:
            known[torchs] += 1
        ways = []
        assert result.tokens == there.tokens and result.reused_tokens == there.reused_tokens
        assert bool(result.reused_tokens) == bool(number)
        assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
        history = [*history, *result.tokens, *text(new, seed=number)]
    assert all(known.values())


@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 65, 127, 128, 129, 200])
def test_the_next_turn_reuses_every_token_that_was_computed(
    prompt_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(prompt_tokens)
    first = engine.turn("s", prompt, 1)  # no decode step: the KV of exactly the prompt
    assert engine.flush(10)
    assert first.reused_tokens == 0
    second = engine.turn("s", [*prompt, *first.tokens, 7], 1)
    assert second.reused_tokens == prompt_tokens
    assert second.tokens == engines(engine._model, None).turn("s", [*prompt, *first.tokens, 7], 1).tokens


def test_decoding_fills_chunks_too(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    result = engine.turn("s", text(60), 80)
    assert engine.flush(10)
    assert engine.save_counters["chunks_saved"] == 3  # 139 tokens: two full chunks and a tail
    assert engine.turn("s", [*text(60), *result.tokens], 1).reused_tokens == 139


def test_at_least_one_token_is_left_to_compute(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    for tokens in (2 * T, 2 * T - 1):
        first = engine.turn("s", text(tokens), 1)
        assert engine.flush(10)
        again = engine.turn("s", text(tokens), 1)  # the same request again, nothing new in it
        assert again.tokens == first.tokens
        assert again.reused_tokens == T


def test_sessions_share_what_their_prompts_begin_with(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    system = text(150)
    engine.turn("a", [*system, 1, 2, 3], 5)
    assert engine.flush(10)
    result = engine.turn("b", [*system, 4, 5, 6], 5)
    assert result.reused_tokens == 2 * T
    assert result.tokens == engines(engine._model, None).turn("b", [*system, 4, 5, 6], 5).tokens


def test_the_tokens_decide_not_the_name(store: FakeStore, engines: MakeEngine) -> None:
    """A tail is used only if its key is that of our tokens: an edited message must not meet the old one's KV."""
    engine = engines(tiny_llama(), store)
    prompt = text(T + 30)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)
    edited = [*prompt[: T + 10], (prompt[T + 10] + 1) % 256, *prompt[T + 11 :], 9]
    assert engine.turn("s", edited, 1).reused_tokens == T
    assert engine.flush(10)
    other_head = [(prompt[0] + 1) % 256, *prompt[1:], 9]
    assert engine.turn("s", other_head, 1).reused_tokens == 0


def test_a_history_that_lost_its_beginning_is_computed_anew(store: FakeStore, engines: MakeEngine) -> None:
    """Its KV is there, at other positions and behind tokens that are gone: moved, it would answer otherwise."""
    model = tiny_llama()
    engine, plain = engines(model, store), engines(model, None)
    prompt = text(3 * T + 5)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)
    shorter = [*prompt[T:], 9]
    turn = engine.turn("s", shorter, 5)
    assert (turn.reused_tokens, turn.tokens) == (0, plain.turn("s", shorter, 5).tokens)


def test_other_weights_never_hit(store: FakeStore, engines: MakeEngine) -> None:
    prompt = text(200)
    engine = engines(tiny_llama(seed=0), store)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)
    assert engines(tiny_llama(seed=1), store).turn("s", [*prompt, 1], 1).reused_tokens == 0
    assert (
        engines(tiny_llama(seed=0), store, weights_epoch=1, salt=b"x")
        .turn("s", [*prompt, 1], 1)
        .reused_tokens
        == 0
    )
    assert engines(tiny_llama(seed=0), store).turn("s", [*prompt, 1], 1).reused_tokens == 200


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("prefill_tokens", [2048, 50])
def test_a_load_that_fails_at_any_layer_is_computed_instead(
    layer: int, prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    model = tiny_llama()
    engine = engines(model, store, prefill_tokens=prefill_tokens)
    prompt = text(150)
    first = engine.turn("s", prompt, 5)
    assert engine.flush(10)
    prompt = [*prompt, *first.tokens, *text(70, seed=2)]
    expected = engines(model, None, prefill_tokens=prefill_tokens).turn("s", prompt, 20).tokens

    store.on_copy = lambda number: number != layer
    failed = engine.turn("s", prompt, 20)
    assert failed.tokens == expected
    assert failed.reused_tokens == 0
    assert failed.load_failures == engine.counters["load_failures"] == 1
    assert store.leases == 0

    assert engine.flush(10)
    store.on_copy = lambda number: True
    again = engine.turn("s", prompt, 20)  # nothing wrong was saved meanwhile
    assert again.tokens == expected
    assert again.reused_tokens == len(prompt) // T * T


def test_a_turn_waits_for_the_save_of_the_turn_before(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store, lookup_timeout_s=30)
    go = threading.Event()

    class Saved(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            go.set()  # the save is held up until somebody waits for it
            return super().wait(timeout)

    store.on_write = lambda: go.wait(30) and None
    first = engine.turn("s", text(150), 1)
    engine._store._saving["s"].saved = Saved()
    second = engine.turn("s", [*text(150), *first.tokens], 1)
    go.set()
    assert second.reused_tokens == 150


def test_a_loader_that_breaks_does_not_hold_up_the_model(
    store: FakeStore, engines: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(150)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)

    def break_down(number: int) -> bool:
        raise ZeroDivisionError("a bug")

    store.on_copy = break_down
    result = engine.turn("s", [*prompt, 1], 5)
    assert result.load_failures == 1
    assert result.tokens == engines(engine._model, None).turn("s", [*prompt, 1], 5).tokens
    assert "ZeroDivisionError" in caplog.text
    engine._store._loader.close()
    assert store.leases == 0


def test_without_a_daemon_everything_is_computed_until_there_is_one(
    store: FakeStore, engines: MakeEngine
) -> None:
    store.away = True
    engine = engines(tiny_llama(), store)
    prompt = text(150)
    plain = engines(engine._model, None).turn("s", prompt, 5)
    assert engine.turn("s", prompt, 5).tokens == plain.tokens
    assert engine._store._store._connecting is None  # not yet
    for away in (True, False):
        store.away = away
        engine._store._store._connect_at = 0.0  # as after a while
        assert engine.turn("s", prompt, 5).tokens == plain.tokens  # it may have found it or not: nobody waits
        engine._store._store._connecting.join(10)
    engine.turn("s", prompt, 5)
    assert engine.flush(10)
    assert engine.turn("s", prompt, 5).reused_tokens > 0


def test_closing_an_engine_closes_its_client(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    engine.close()
    assert store.closed == 1
    with pytest.raises(Unavailable, match=r"the engine is closed \(make another one\)"):
        engine.turn("s", text(20), 3)


def test_a_client_that_comes_after_the_end_is_closed(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks for its daemon in the background, and finds it when nobody wants it any more."""
    monkeypatch.setattr("kvstore.gpu_worker.store.CONNECT_AGAIN_S", 0.0)
    asked, answer = threading.Event(), threading.Event()

    def connect() -> object:
        if store.away:
            raise Unavailable("no daemon")
        asked.set()
        assert answer.wait(30)
        return store.connect()

    store.away = True
    engine = BatchEngine(tiny_llama(layers=2), connect, pool_chunks=4)  # type: ignore[arg-type]
    store.away = False
    engine.turn("s", text(20), 1)
    assert asked.wait(30)
    connecting = engine._store._store._connecting
    engine.close()
    answer.set()
    connecting.join(30)
    assert store.closed == 1


def test_one_connection_is_made_however_many_ask(
    store: FakeStore, engines: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's thread asks for the namespace, and so does everybody who asks for the worker's health."""
    store.away = True
    engine = engines(tiny_llama(layers=2), store)
    made: list[threading.Thread] = []
    together = threading.Barrier(2)
    thread = threading.Thread

    def making(**options: Any) -> threading.Thread:
        with suppress(threading.BrokenBarrierError):  # nobody else comes
            together.wait(0.5)
        made.append(thread(**options))
        return made[-1]

    asking = [thread(target=lambda: engine.connected) for _ in range(2)]
    monkeypatch.setattr("kvstore.gpu_worker.store.threading.Thread", making)
    engine._store._store._connect_at = 0.0
    for each in asking:
        each.start()
    for each in (*asking, *made):
        each.join(10)
    assert len(made) == 1


def test_a_daemon_that_goes_in_mid_turn_is_not_missed(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(150)
    first = engine.turn("s", prompt, 5)
    assert engine.flush(10)
    prompt = [*prompt, *first.tokens]
    expected = engines(engine._model, None).turn("s", prompt, 100).tokens

    def go(number: int) -> bool:
        store.away = True
        return number == 0

    store.on_copy = go
    assert engine.turn("s", prompt, 100).tokens == expected
    assert engine.flush(10)
    assert engine.save_counters["chunks_refused"] > 0
    assert engine.turn("s", prompt, 100).tokens == expected


def test_what_was_evicted_is_computed_and_saved_again(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(4 * T + 10)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)
    keys = [entry.key for entry in engine._store._store.namespace().get_session("s").entries]
    store.forget(keys[1])
    assert engine.turn("s", [*prompt, 1], 1).reused_tokens == T
    assert engine.flush(10)
    assert engine.turn("s", [*prompt, 1, 2], 1).reused_tokens == 4 * T + 11


def test_a_chunk_that_has_grown_out_of_a_tail_is_preferred_to_it(
    store: FakeStore, engines: MakeEngine
) -> None:
    """Another session went on from the same text: its full chunk is worth more than our tail."""
    engine = engines(tiny_llama(), store)
    prompt = text(2 * T + 20)
    engine.turn("a", prompt[: T + 20], 1)
    engine.turn("b", prompt, 1)
    assert engine.flush(10)
    assert engine.turn("a", prompt, 1).reused_tokens == 2 * T


def test_a_stop_token_ends_the_answer(engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), None)
    free = engine.turn("s", text(20), 10).tokens
    stopped = engine.turn("s", text(20), 10, stop_tokens=[free[3]]).tokens
    assert stopped == free[: free.index(free[3]) + 1]


def test_gaps_tell_how_clear_each_choice_was(engines: MakeEngine) -> None:
    model = tiny_llama()
    with recorded_logits(model) as logits:
        result = engines(model, None).turn("s", text(20), 3)
    for gap, seen in zip(result.gaps, logits, strict=True):
        best, second = seen[0, -1].float().sort(descending=True).values[:2]
        assert gap == pytest.approx((best - second).item())


@pytest.mark.parametrize(
    ("prompt", "new"),
    [([], 1), ([1], 0), (list(range(200)) * 5, 100), ([1, 256], 1), ([-1], 1), ([1.5] * 80, 1), ([1], 1.5)],
)
def test_a_turn_that_the_model_cannot_take_is_refused(
    prompt: Any, new: Any, store: FakeStore, engines: MakeEngine
) -> None:
    """By what a worker process answers, and does not end with."""
    with pytest.raises(ValueError, match="token"):
        engines(tiny_llama(), store).turn("s", prompt, new)


@pytest.mark.parametrize("name", ["prefill_tokens", "chunk_tokens"])
def test_steps_and_chunks_of_no_tokens_are_refused(name: str, store: FakeStore, engines: MakeEngine) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: must be at least 1"):
        engines(tiny_llama(), store, **{name: 0})


def test_the_store_is_asked_for_keys_only_once_a_turn(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    engine.turn("s", text(150), 1)
    assert engine.flush(10)
    engine.turn("s", [*text(150), 1], 1)
    asked: list[list[ChunkKey]] = store.reads
    assert [len(keys) for keys in asked] == [2, 3]  # two full chunks, then with the tail


@pytest.mark.parametrize("tokens", [3 * T + 9, 4 * T + 1, 5 * T, 9 * T + 7])
def test_of_a_prompt_of_more_chunks_than_a_request_names_the_first_are_used(
    tokens: int, store: FakeStore, engines: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pool_store_module, saver_module):
        monkeypatch.setattr(module, "KEYS_PER_REQUEST_MAX", 4)
    store.keys_max = 4
    model = tiny_llama()
    engine, plain = engines(model, store), engines(model, None)
    prompt = text(tokens)
    for turn in range(3):
        result = engine.turn("s", prompt, 3)
        assert engine.flush(10)
        assert result.tokens == plain.turn("s", prompt, 3).tokens
        assert result.reused_tokens >= (turn > 0) * 3 * T
        prompt = [*prompt, *result.tokens, *text(5, seed=turn)]
    (info,) = store.sessions.values()
    assert len(info.entries) == 4
    store.forget(info.entries[-1].key)  # its manifest is checked before it is written again
    engine.turn("s", [*prompt, 1], 1)
    assert engine.flush(10)


def test_what_is_on_ssd_is_waited_for_and_then_loaded(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(3 * T + 5)
    first = engine.turn("s", prompt, 1)
    assert engine.flush(10)
    store.on_ssd = {key for _, key in list(store.chunks)[1:]}
    prompt = [*prompt, *first.tokens, 7]
    second = engine.turn("s", prompt, 1)
    assert second.reused_tokens == 3 * T + 5 and not store.on_ssd
    assert engine.counters["promotions_awaited"] == 1
    assert second.tokens == engines(engine._model, None).turn("s", prompt, 1).tokens
    assert engine.flush(10) and store.leases == 0


def test_what_does_not_rise_in_time_is_computed(store: FakeStore, engines: MakeEngine) -> None:
    engine = engines(tiny_llama(), store)
    prompt = text(3 * T)
    engine.turn("s", prompt, 1)
    assert engine.flush(10)
    store.on_ssd, store.promotes = {list(store.chunks)[1][1]}, False
    second = engine.turn("s", [*prompt, 7], 1)
    assert second.reused_tokens == T
    assert second.tokens == engines(engine._model, None).turn("s", [*prompt, 7], 1).tokens
    assert engine.flush(10) and store.leases == 0


def test_what_a_younger_request_loads_is_loaded_once(store: FakeStore, engines: MakeEngine) -> None:
    """Though its look-up was answered before that of the older one, which wants the same."""
    model = tiny_llama(layers=2)
    shared = text(5 * T)
    prompts = [[*shared, *text(80, seed=seed)] for seed in (2, 3)]
    saver = engines(model, store, chunk_tokens=T)
    expected = [list(saver.turn("", prompt, 4).tokens) for prompt in prompts]
    assert saver.flush(30)
    engine = engines(model, store, chunk_tokens=T)
    look_up = engine._store.look_up
    late: Future[Any] = Future()
    begun: list[Future[Any]] = []

    def answered_late(request: Any) -> Any:
        begun.append(look_up(request))
        return late if len(begun) == 1 else begun[-1]

    engine._store.look_up = answered_late  # type: ignore[method-assign]
    copying, go_on = threading.Event(), threading.Event()

    def copy(number: int) -> bool:
        copying.set()
        return go_on.wait(30)

    store.on_copy = copy
    got: dict[int, list[int]] = {engine.add(prompt, 4): [] for prompt in prompts}
    while not copying.is_set():
        assert not engine.step()
    late.set_result(begun[0].result(30))
    for _ in range(3):
        assert not engine.step()
    go_on.set()
    for output in engine.run():
        got[output.request].append(output.token)
    assert list(got.values()) == expected
    assert engine.counters["restored_tokens"] == (5 + 1 + 1) * T
    assert engine.counters["load_failures"] == 0
