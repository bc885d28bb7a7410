"""Loads and saves beside the forward call: layer by layer, bit by bit the same, and right whatever fails on the way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvstore.gpu_worker.compute_or_load import read_buffer_layers
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Geometry, bits
from kvstore.gpu_worker.write_buffer import Outgoing, WriteBuffer

from .conftest import FakeStore, text, tiny_llama
from .emulated import EmulatedDevice
from .recording import Recording, T
from .test_batching import play
from .test_pool_store import BOUND_S, MakeEngine, engine, finish, turn, warm

LAYERS = 3
__all__ = ["engine"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(layers=LAYERS)


def attention(one: Recording, begins: Callable[[int], None]) -> None:
    """`begins` is called before attention of each layer, on the model's thread."""
    begin = one._store.begin

    def call(layer: int) -> None:
        begins(layer)
        begin(layer)

    one._store.begin = call  # type: ignore[method-assign]


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_a_layer_is_loaded_while_the_one_before_it_computes(
    layer: int, engine: MakeEngine, store: FakeStore
) -> None:
    """It comes only once attention of the layer before has begun: who waits for all of it first would wait for ever."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one, computes = engine(), threading.Event()
    attention(one, lambda number: computes.set() if number == layer - 1 else None)
    store.on_copy = lambda number: number < layer or computes.wait(BOUND_S)
    one.add(prompt, 5)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T and one.counters["load_failures"] == 0
    assert one.counters["loads_overlapped"] == 1


@pytest.mark.parametrize("read_buffer", [None, 0, 1, 2, LAYERS, 100])
@pytest.mark.parametrize("tail", [0, 5])
def test_logits_are_those_of_an_engine_that_kept_the_kv(
    read_buffer: int | None, tail: int, engine: MakeEngine, store: FakeStore
) -> None:
    """Bit by bit, with chunks and a tail, however much of the load is there when it joins."""
    history = text(3 * T + tail)
    keeping = engine()
    history += turn(keeping, history)[:-1]
    prompt = [*history, *text(9, seed=2)]
    assert keeping.flush(BOUND_S)
    before = dict(store.chunks), dict(store.sessions)
    kept = keeping.add(prompt, 4, session="s")
    finish(keeping)
    store.chunks, store.sessions = before
    loading = engine(read_buffer=read_buffer)
    loaded = loading.add(prompt, 4, session="s")
    finish(loading)
    assert loading.counters["restored_tokens"] == keeping.counters["adopted_tokens"] == len(history)
    assert len(keeping.seen[kept]) == 4
    for mine, theirs in zip(loading.seen[loaded], keeping.seen[kept], strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("how", ["void", "broken"])
@pytest.mark.parametrize("at", range(LAYERS))
@pytest.mark.parametrize("beside", [0, 2])
def test_a_load_that_fails_in_the_middle_of_a_step(
    at: int, how: str, beside: int, engine: MakeEngine, store: FakeStore
) -> None:
    """At any layer, alone or beside others: its tokens are computed, and theirs are what they were."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine(read_buffer=0)
    others = [one.add(text(5 + n, seed=n), 30) for n in range(beside)]
    for _ in range(3):
        one.step()

    computes = threading.Event()

    def copy(number: int) -> bool:
        assert number != at or computes.wait(BOUND_S)
        if number == at and how == "broken":
            raise ZeroDivisionError("a bug")
        return number != at

    store.on_copy = copy
    number = one.add(prompt, 5)
    loading = one.request(number)
    attention(one, lambda layer: computes.set() if layer == at and loading.joined else None)
    finish(one)
    assert one.counters["loads_overlapped"] == one.counters["load_failures"] == 1
    assert one.counters["restored_tokens"] == 0 and len(one.got[number]) == 5
    assert all(len(one.got[other]) == 30 for other in others)


def test_a_prefix_that_two_want_is_loaded_once_though_one_has_joined(
    engine: MakeEngine, store: FakeStore
) -> None:
    prompt = text(4 * T)
    warm(engine, [*prompt, 1])
    one = engine()
    first, second = one.add([*prompt, 1], 5), one.add([*prompt, 2, 3], 5)
    finish(one)
    assert one.counters["restored_tokens"] == one.counters["adopted_tokens"] == 4 * T
    assert len(one.got[first]) == len(one.got[second]) == 5


def test_nobody_who_shares_a_step_waits(engine: MakeEngine, store: FakeStore) -> None:
    """By what was measured the step is over at once: then all of the load has to be there first."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one, go = engine(), threading.Event()
    short = one.add(text(4, seed=9), 60)
    for _ in range(3):
        one.step()
    one._scheduler.computing = _takes(0.0)
    store.on_copy = lambda number: number == 0 or go.wait(BOUND_S)
    loading = one.add(prompt, 5)
    while not (one.request(loading).load and one.request(loading).load.layers_in):
        one.step()
    before = len(one.got[short])
    for _ in range(5):
        one.step()
    assert len(one.got[short]) == before + 5 and not one.request(loading).joined
    go.set()
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T


def test_it_joins_others_where_the_step_takes_longer_than_the_rest(
    engine: MakeEngine, store: FakeStore
) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one, computes = engine(), threading.Event()
    one.add(text(4, seed=9), 60)
    for _ in range(3):
        one.step()
    one._scheduler.computing = _takes(1e6)
    loading = one.request(one.add(prompt, 5))
    attention(one, lambda layer: computes.set() if layer == 0 and loading.joined else None)
    store.on_copy = lambda number: number == 0 or computes.wait(BOUND_S)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T and one.counters["loads_overlapped"] == 1


def test_what_a_step_takes_on_a_gpu_is_known_once_it_is_over(
    engine: MakeEngine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has only asked for it. Steps that decode are not waited for, and those that loads come into take as long
    as these."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine()
    apart = one._device is not None
    log: list[str] = []
    monkeypatch.setattr(one._forward, "wait", lambda: log.append("waits"))
    monkeypatch.setattr(
        one._scheduler.computing, "observe", lambda tokens, seconds: log.append(f"{tokens} tokens")
    )
    one.add(text(6, seed=9), 3)
    finish(one)
    assert log == (["waits", "6 tokens"] if apart else ["6 tokens", "1 tokens", "1 tokens"])
    log.clear()
    go = threading.Event()
    store.on_copy = lambda number: number == 0 or go.wait(BOUND_S)
    attention(one, lambda layer: go.set())
    one.add([*prompt, *text(4, seed=8)], 1)
    finish(one)
    assert one.counters["loads_overlapped"] == 1 and log == ([] if apart else ["5 tokens"])


def _takes(seconds: float) -> Any:
    class Computing:
        def seconds(self, tokens: float) -> float:
            return seconds

        def observe(self, tokens: float, took: float) -> None: ...

    return Computing()


@pytest.mark.parametrize(
    ("load_s", "compute_s", "layers"),
    [(0, 1, 1), (1, 2, 1), (1, 1, 1), (2, 1, 15), (1, 0, 30), (30, 15.5, 15), (30, 14.5, 16), (1, 0.999, 1)],
)
def test_the_papers_read_buffer(load_s: float, compute_s: float, layers: int) -> None:
    """S_buf = B (T_load L_hist - T_pref L_new), in layers of 30: and then no layer comes after it is needed."""
    assert read_buffer_layers(30, load_s=load_s, compute_s=compute_s) == layers
    if layers > 1:
        for layer in range(30):
            assert (layer + 1 - layers) * load_s / 30 <= layer * compute_s / 30 + load_s / 30


# ----------------------------------------------------------------------------------------------------------- saving


def test_a_layer_is_copied_out_before_the_next_one_computes(engine: MakeEngine, store: FakeStore) -> None:
    one = engine()
    copied: list[int] = []

    def look(layer: int) -> None:
        staged = list(one._store._staged.values())
        if layer and staged:
            one._store._buffer.stream.record().synchronize()
            (outgoing,) = staged
            for number, chunk in enumerate(outgoing.chunks):
                shard = outgoing.shard(number)
                window = one.pool.geometry.window(shard, layer - 1, T)
                assert (window == bits(one.pool.layers[layer - 1][chunk])).all()
            copied.append(layer - 1)

    attention(one, look)
    one.add(text(3 * T + 2), 1)
    finish(one)
    assert copied == list(range(LAYERS - 1)) and len(store.chunks) == 3


def test_nothing_is_copied_on_the_models_thread(
    engine: MakeEngine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    copy = Outgoing._copy

    def note(self: Outgoing, layer: int) -> None:
        threads.add(threading.get_ident())
        copy(self, layer)

    monkeypatch.setattr(Outgoing, "_copy", note)
    one = engine()
    turn(one, text(3 * T + 5), 2 * T)
    assert len(store.chunks) == 6 and len(threads) == 1
    assert threading.get_ident() not in threads


def test_chunks_are_used_again_while_they_are_saved(engine: MakeEngine, store: FakeStore) -> None:
    """Nothing stays in the pool, so what one request leaves is overwritten by the next, and loaded into by the one
    after that. What is saved is what was computed."""
    one = engine(pool_chunks=5, retain=False)
    prompts = [text(3 * T + 5, seed=n) for n in range(4)]
    for _ in range(2):
        for prompt in prompts:
            one.add(prompt, 3)
            one.finish()
    finish(one)
    assert one.counters["restored_tokens"] > 0
    two = engine()
    for prompt in prompts:
        two.add([*prompt, 1], 3)
    finish(two)
    assert two.counters["restored_tokens"] == 4 * 3 * T


def _addresses(outgoing: Outgoing) -> list[int]:
    return [shard.ctypes.data for shard in outgoing._shards]


def test_a_buffer_that_is_dropped_is_used_again_when_its_copy_is_over() -> None:
    device = EmulatedDevice()
    pool = HbmPool(Geometry(2, 1, 8, torch.float32, chunk_tokens=4), 2)
    buffer = WriteBuffer(pool, device)
    device.hold()
    dropped = buffer.copy([0], 4)
    address = _addresses(dropped)[0]
    dropped.release()
    other = buffer.copy([1], 4)
    assert _addresses(other) != [address], "a copy will still write it"
    device.release()
    other.wait()
    third = buffer.begin([0], 4)
    assert _addresses(third) == [address] and not device.races
    device.close()


def test_a_save_that_finds_no_room_in_the_buffer_is_dropped_and_counted(
    engine: MakeEngine, store: FakeStore
) -> None:
    shard = engine().pool.geometry.shard_bytes
    one = engine(save_queue_bytes_max=2 * shard, prefill_tokens=T)
    saving, go = threading.Event(), threading.Event()

    def hang() -> None:
        saving.set()
        assert go.wait(BOUND_S)

    store.on_write = hang
    one.add(text(8 * T + 3), 3)
    one.step()
    assert saving.wait(BOUND_S)
    one.finish().check()  # nobody waits for the store
    counters = one._store.saver.counters
    assert counters["chunks_dropped"] == 6
    go.set()
    assert one.flush(BOUND_S)
    assert counters["chunks_saved"] == 2 == len(store.chunks)


def test_a_step_that_breaks_off_saves_nothing_of_it(engine: MakeEngine, store: FakeStore) -> None:
    """And is taken again."""
    one = engine()
    one.add(text(3 * T + 2), 3)
    broken = iter([True])

    def break_off(layer: int) -> None:
        if layer == 1 and next(broken, False):
            raise ZeroDivisionError("out of memory, say")

    attention(one, break_off)
    with pytest.raises(ZeroDivisionError):
        one.step()
    assert one.flush(BOUND_S) and not store.chunks
    finish(one)
    assert len(store.chunks) == 3


def test_a_step_with_a_load_that_breaks_off_is_taken_again(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine()
    one.add(prompt, 5)
    broken = iter([True])

    def break_off(layer: int) -> None:
        if layer == 1 and next(broken, False):
            raise ZeroDivisionError("out of memory, say")

    attention(one, break_off)
    with pytest.raises(ZeroDivisionError):
        one.finish()
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T


# ------------------------------------------------------------------------------------------------------ loading ahead


def test_who_waits_loads_while_another_one_runs(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine(sequences_max=1, load_ahead=1)
    first, waiting = one.add(text(5), 400), one.request(one.add(prompt, 5))
    while not waiting.reused.tokens:
        one.step()
    assert waiting.row < 0 and len(one.got[first]) < 400, "it ran before it had loaded"
    one.abort(first)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T and len(store.reads) == 2


def test_nobody_loads_ahead_beyond_the_setting(engine: MakeEngine, store: FakeStore) -> None:
    prompts = [[*text(3 * T, seed=n), 7] for n in range(3)]
    warm(engine, *prompts)
    one = engine(sequences_max=1, load_ahead=1)
    first = one.add(text(5), 400)
    waiting = [one.request(one.add(prompt, 5)) for prompt in prompts]
    while not waiting[0].reused.tokens:
        one.step()
    assert not any(request.chunks or request.lookup for request in waiting[1:])
    one.abort(first)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * 3 * T


def test_a_prefix_that_several_want_ahead_is_loaded_once(engine: MakeEngine, store: FakeStore) -> None:
    """What each has alone as well."""
    shared = text(3 * T)
    prompts = [[*shared, *text(2 * T + 1, seed=n)] for n in (2, 3)]
    warm(engine, *prompts)
    one = engine(sequences_max=1, load_ahead=2)
    first = one.add(text(5), 400)
    waiting = [one.request(one.add(prompt, 5)) for prompt in prompts]
    while not all(request.computed == 5 * T for request in waiting):
        one.step()
    assert all(request.row < 0 for request in waiting)
    one.abort(first)
    finish(one)
    assert one.counters["restored_tokens"] == (3 + 2 + 2) * T
    assert one.counters["adopted_tokens"] == 3 * T


def test_who_runs_gets_the_room_of_who_loads_ahead(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine(sequences_max=1, load_ahead=1, pool_chunks=7, retain=False)
    first, second = one.add(text(2 * T, seed=5), 4 * T), one.add(prompt, 5)
    waiting = one.request(second)
    while not waiting.chunks:
        one.step()
    while waiting.chunks:
        assert one.live == 2, "nobody needed its room"
        one.step()
    finish(one)
    assert len(one.got[first]) == 4 * T and len(one.got[second]) == 5
    assert one.counters["preemptions"] == 0


@pytest.mark.parametrize("how", ["abort", "reset", "close"])
def test_who_loads_ahead_may_go_at_any_time(how: str, engine: MakeEngine, store: FakeStore) -> None:
    """In mid-copy; its lease goes back (the fixture counts), and its chunks are free."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine(sequences_max=1, load_ahead=1)
    first, second = one.add(text(5), 400), one.add(prompt, 5)
    copying, go = threading.Event(), threading.Event()

    def copy(number: int) -> bool:
        copying.set()
        return go.wait(BOUND_S)

    store.on_copy = copy
    while not copying.is_set():
        one.step()
    load = one.request(second).load
    assert load is not None
    if how == "abort":
        assert one.abort(second)
    elif how == "reset":
        one.reset()
    else:
        one.abort_all()
    go.set()
    load.ended.result(BOUND_S)
    if how != "close":
        one.abort(first)
        one.add(text(3), 2)
        finish(one)


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_random_schedules_with_loads_ahead(seed: int, engine: MakeEngine, store: FakeStore) -> None:
    choose = random.Random(seed)
    settings = {
        "pool_chunks": (9, 14, 40)[seed // 2],
        "sequences_max": 2,
        "prefill_tokens": 33,
        "load_ahead": 3,
    }
    play(engine(**settings), seed, 50)
    store.on_copy = lambda number: choose.random() < 0.9
    two = engine(**settings)
    play(two, seed, 50)
    two.check()
    assert two.counters["restored_tokens"] > 0
