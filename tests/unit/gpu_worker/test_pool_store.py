"""Requests that run together load what the store has and save what becomes full; tokens are the same with it, without
it, and when it fails in between."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvstore.errors import BadRequest, Exhausted, Unsupported
from kvstore.gpu_worker import scheduling
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import bits
from kvstore.gpu_worker.pool_store import PoolStore
from kvstore.types import ChunkKey

from .conftest import FakeStore, text, tiny_llama
from .emulated import EmulatedDevice, Trusting
from .recording import Recording, T
from .test_batching import play

MakeEngine = Callable[..., Recording]
BOUND_S = 30.0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(layers=3)


@pytest.fixture(params=["cpu", "emulated"])
def engine(model: PreTrainedModel, store: FakeStore, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Engines on one store, one after another or at once; in the end no lease is open. Each test also runs on a device
    whose streams are late, and that tells races."""
    made: list[Recording] = []
    devices: list[EmulatedDevice] = []
    store.views = {} if request.param == "emulated" else None

    def make(**options: Any) -> Recording:
        if request.param == "emulated":
            devices.append(EmulatedDevice(seed=len(devices)))
            devices[-1].on_copy_in = store.copied_by_device
            options = {"device": devices[-1], "verdicts": Trusting()} | options
        made.append(Recording(model, store.connect, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert store.leases == 0
    assert not [race for device in devices for race in device.races]
    assert not sum(device.pageable for device in devices), "a copy held up whoever asked for it"
    assert not sum(device.registered for device in devices), "memory that is gone is registered"


def finish(one: Recording) -> Recording:
    one.finish().check()
    assert one.flush(BOUND_S)
    return one


def warm(make: MakeEngine, *prompts: list[int]) -> Recording:
    """The store has all full chunks of these."""
    one = make()
    for prompt in prompts:
        one.add(prompt, 5)
    return finish(one)


def test_another_engine_goes_on_from_what_was_saved(engine: MakeEngine, store: FakeStore) -> None:
    prompts = [[*text(3 * T), *text(n, seed=n)] for n in (1, 5, 20)]
    first = warm(engine, *prompts)
    assert first.counters["restored_tokens"] == 0
    assert len(store.chunks) == 4  # three that all have, and one of the longest
    second = warm(engine, *prompts)
    assert second.got == first.got
    assert second.counters["restored_tokens"] == 4 * T
    assert second.counters["adopted_tokens"] == 2 * 3 * T, "what one loads, the others wait for"
    assert second.counters["computed_tokens"] == first.counters["computed_tokens"] - 4 * T


def test_what_is_saved_are_the_bytes_of_the_pool(model: PreTrainedModel, store: FakeStore) -> None:
    engine = BatchEngine(model, store.connect, pool_chunks=8, chunk_tokens=T)
    engine.add(text(2 * T), 3)
    for _ in engine.run():
        pass
    assert engine.flush(BOUND_S)
    shards = list(store.chunks.values())
    assert len(shards) == 2
    geometry = engine.pool.geometry
    for chunk, shard in enumerate(shards):
        for number, layer in enumerate(engine.pool.layers):
            assert (geometry.window(shard, number, T) == bits(layer[chunk])).all()
    again = BatchEngine(model, store.connect, pool_chunks=8, chunk_tokens=T)
    for layer in again.pool.layers:
        layer.fill_(float("nan"))
    again.add([*text(2 * T), 1], 1)
    for _ in again.run():
        pass
    assert again.counters["restored_tokens"] == 2 * T
    for mine, theirs in zip(engine.pool.layers, again.pool.layers, strict=True):
        assert torch.equal(mine[:2].view(torch.int32), theirs[:2].view(torch.int32))
    engine.close()
    again.close()
    assert store.closed == 2


def test_every_engine_names_itself_as_the_maker(engine: MakeEngine, store: FakeStore) -> None:
    for seed in range(2):
        warm(engine, text(40, seed=seed))
    assert len(store.makers) == 2 and {len(maker) for maker in store.makers} == {16}


def test_of_a_prompt_that_is_all_there_the_last_token_is_computed(
    engine: MakeEngine, store: FakeStore
) -> None:
    first = warm(engine, text(2 * T))
    assert len(store.chunks) == 2
    second = warm(engine, text(2 * T))
    assert second.got == first.got
    assert second.counters["restored_tokens"] == T


def test_what_is_decoded_is_saved_too(engine: MakeEngine, store: FakeStore) -> None:
    one = engine()
    number = one.add(text(T - 3), 3 * T)
    finish(one)
    assert len(store.chunks) == 3
    two = engine()
    two.add([*text(T - 3), *one.got[number]], 4)
    assert finish(two).counters["restored_tokens"] == 3 * T


def test_the_others_go_on_while_one_is_loaded(engine: MakeEngine, store: FakeStore) -> None:
    """Neither a lookup nor a load holds up a step."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    asked, copied = threading.Event(), threading.Event()
    store.on_read = lambda: asked.wait(BOUND_S) and None
    store.on_copy = lambda number: copied.wait(BOUND_S)
    one = engine()
    short = one.add(text(4, seed=9), 40)
    loading = one.add(prompt, 5)
    for event in (asked, copied):
        before = len(one.got[short])
        for _ in range(10):
            one.step()
        assert len(one.got[short]) == before + 10 and not one.got[loading]
        event.set()
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T


def test_nobody_adopts_the_next_chunk_in_the_middle_of_one(engine: MakeEngine, store: FakeStore) -> None:
    """One is slowly read while an older one, whose lookup took its time, is loaded whole."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    go = threading.Event()
    store.on_read = lambda: go.wait(BOUND_S) and None
    one = engine(prefill_tokens=T // 4)
    one.add(prompt, 5)
    one.step()
    one._store._no_lookup_before = float("inf")
    one.add(prompt, 5)
    one.step()
    go.set()
    older = one._scheduler.running[0]
    older.lookup.result(BOUND_S)
    one.step()
    if older.load is not None:  # else it has ended in the middle of that step
        older.load.ended.result(BOUND_S)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * T
    assert one.counters["adopted_tokens"] == 2 * T


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("how", ["void", "broken"])
def test_a_load_that_fails_is_computed(at: int, how: str, engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    first = warm(engine, prompt)
    both_know = threading.Event()

    def copy(number: int) -> bool:
        assert both_know.wait(BOUND_S)
        if number == at and how == "broken":
            raise ZeroDivisionError("a bug")
        return number != at

    store.on_copy = copy
    second = engine()
    second.add(prompt, 5)
    second.add(prompt, 5)
    second.step()
    for (
        request
    ) in second._scheduler.running:  # one whose look-up is later than the failure would load it once more
        if request.lookup is not None:
            request.lookup.result(BOUND_S)
    second.step()
    both_know.set()
    finish(second)
    assert second.got[1] == second.got[2] == first.got[1]
    assert second.counters["load_failures"] == 1, "the second one waits for what the first computes"
    assert second.counters["restored_tokens"] == 0


@pytest.mark.parametrize("how", ["abort", "room"])
def test_chunks_that_may_still_be_written_are_nobody_elses(
    how: str, engine: MakeEngine, store: FakeStore
) -> None:
    """A load is given up in the middle of a copy, which goes on and writes. Whoever gets its chunks before that ended
    would have wrong KV."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    copying, go = threading.Event(), threading.Event()

    def copy(number: int) -> bool:
        copying.set()
        return go.wait(BOUND_S)

    store.on_copy = copy
    one = engine(pool_chunks=8)
    old = one.add(text(T, seed=5), 5 * T)
    one.step()
    loading = one.add(prompt, 5)
    while not copying.is_set():
        one.step()
        assert len(one.got[old]) < 40
    if how == "abort":
        assert one.abort(loading)
        one.step()
        assert one.pool.used > len(one._scheduler.running[0].chunks), (
            "they are free before the copy has ended"
        )
    else:
        while one.counters["preemptions"] == 0 and one.live == 2:
            one.step()
    for _ in range(5):
        one.step()
    go.set()
    finish(one)
    assert len(one.got[old]) == 5 * T
    assert len(one.got[loading]) == (0 if how == "abort" else 5)


def test_a_lookup_that_nobody_waits_for_gives_its_lease_back(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    go = threading.Event()
    store.on_read = lambda: go.wait(BOUND_S) and None
    one = engine()
    number = one.add(prompt, 5)
    one.step()
    assert one.abort(number)
    go.set()
    one.add(text(3), 2)
    finish(one)  # and the fixture counts leases


def test_nobody_spins_while_there_is_nothing_to_compute(
    engine: MakeEngine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    waited = threading.Event()

    def wait(*args: Any, **options: Any) -> Any:
        waited.set()
        return concurrent.futures.wait(*args, **options)

    monkeypatch.setattr(scheduling, "wait", wait)
    store.on_copy = lambda number: waited.wait(BOUND_S / 6)
    assert warm(engine, prompt).counters["restored_tokens"] == 3 * T, "it was not waited for"


def test_nobody_spins_who_waits_for_what_another_one_loads(
    engine: MakeEngine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's look-up has ended: waiting for that would be no wait."""
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one, answered = engine(), 0
    waited = threading.Event()

    def wait(pending: Any, **options: Any) -> Any:
        nonlocal answered
        lookups = [each.lookup for each in one._scheduler.running if each.lookup is not None]
        if answered:  # when it was called before
            assert not set(lookups) & set(pending), "it waits for what has come already"
        if lookups and len(one._scheduler.running) == 2 and all(lookup.done() for lookup in lookups):
            answered += 1
            if answered == 3:
                waited.set()
        return concurrent.futures.wait(pending, **options)

    monkeypatch.setattr(scheduling, "wait", wait)
    store.on_copy = lambda number: waited.wait(BOUND_S / 6)
    one.add(prompt, 3)
    one.add([*prompt, 9], 3)
    finish(one)
    assert answered >= 3
    assert one.counters["restored_tokens"] == one.counters["adopted_tokens"] == 3 * T


def test_a_lookup_that_breaks_is_a_miss(
    engine: MakeEngine, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = warm(engine, text(40))
    store.on_read = lambda: 1 / 0
    assert warm(engine, text(40)).got == first.got
    assert "ZeroDivisionError" in caplog.text


def test_what_is_on_ssd_rises(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    store.on_ssd = {key for _, key in list(store.chunks)[:2]}
    one = warm(engine, prompt)
    assert one.counters["restored_tokens"] == 3 * T
    assert one.counters["promotions_awaited"] == 1
    store.on_ssd, store.promotes = {key for _, key in list(store.chunks)[1:]}, False
    assert warm(engine, prompt).counters["restored_tokens"] == T


def test_who_made_room_is_loaded_again(engine: MakeEngine, store: FakeStore) -> None:
    """Its own chunks, saved before it had to go."""
    one = engine(pool_chunks=10)
    numbers = [one.add(text(2 * T, seed=n), 3 * T) for n in range(3)]
    while one.counters["preemptions"] == 0:
        one.step()
    assert one.flush(BOUND_S)
    finish(one)
    assert one.counters["restored_tokens"] > 0
    assert all(len(one.got[number]) == 3 * T for number in numbers)


def test_a_store_that_comes_and_goes_changes_no_token(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    first = warm(engine, prompt)
    store.away = True
    away = warm(engine, prompt)
    assert away.got == first.got and away.counters["restored_tokens"] == 0
    store.away = False
    one = engine()
    one.add(prompt, 3 * T)
    for _ in range(4):
        one.step()
    store.away = True
    assert finish(one).got[1][:5] == first.got[1]
    assert one._store.saver.counters["chunks_refused"] > 0


def test_a_daemon_that_hangs_holds_up_one_request_not_all(
    engine: MakeEngine, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked again for a while."""
    one = engine()
    monkeypatch.setattr(one._store, "_lookup_timeout_s", 0.0)  # any answer is late
    store.away = True
    for n in range(4):
        one.add(text(2 * T, seed=n), 2)
        finish(one)
    assert len(store.reads) == 1


def test_without_sharing_each_loads_its_own(engine: MakeEngine, store: FakeStore) -> None:
    prompt = [*text(3 * T), 7]
    warm(engine, prompt)
    one = engine(share=False)
    for _ in range(3):
        one.add(prompt, 5)
    finish(one)
    assert one.counters["restored_tokens"] == 3 * 3 * T and one.pool.peak_chunks == 3 * 4


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_with_a_store_that_fails_at_times(
    seed: int, engine: MakeEngine, store: FakeStore
) -> None:
    choose = random.Random(seed)
    store.on_copy = lambda number: choose.random() < 0.9
    store.room = 30 if seed % 2 else None
    one = engine(pool_chunks=(9, 12, 40)[seed % 3], sequences_max=4, prefill_tokens=33)
    play(one, seed, 50)
    assert one.flush(BOUND_S)
    if keys := [key for _, key in store.chunks]:
        store.forget(*choose.sample(keys, len(keys) // 3))
    two = engine(pool_chunks=(9, 12, 40)[seed % 3], sequences_max=4, prefill_tokens=33)
    play(two, seed, 50)
    one.check()
    two.check()
    assert two.counters["restored_tokens"] > 0 or seed == 0


def test_a_model_that_is_not_in_cpu_memory_is_refused(
    model: PreTrainedModel, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BatchEngine(model, pool_chunks=4)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with pytest.raises(Unsupported, match=r"model\.device"):
        PoolStore(model, engine.pool, store.connect, spec=None, counters=engine.counters)


# ---------------------------------------------------------------------------------------- sessions, and the HBM tier


def turn(one: Recording, prompt: list[int], count: int = 5) -> list[int]:
    """An answered turn of session "s", whose KV is saved."""
    number = one.add(prompt, count, session="s")
    finish(one)
    return one.got[number]


def test_the_next_turn_goes_on_in_the_pool_and_its_manifest_is_whole(
    engine: MakeEngine, store: FakeStore
) -> None:
    """Nothing is loaded that is in the pool; what another worker finds in the store is all of it."""
    one = engine()
    history = text(3 * T + 5)
    for seed in range(3):
        history += [*turn(one, history), *text(7, seed=seed)]
    assert one.counters["restored_tokens"] == 0
    assert one.counters["computed_tokens"] == len(history) - 7 - 1, "each token once, but for the last"
    two = engine()
    turn(two, history)
    assert two.counters["restored_tokens"] == len(history) - 7 - 1


def test_sessions_of_one_batch_have_their_own_manifests(engine: MakeEngine, store: FakeStore) -> None:
    one = engine()
    prompts = {f"s{n}": [*text(2 * T), *text(10 + n, seed=n)] for n in range(4)}
    for name, prompt in prompts.items():
        one.add(prompt, 4, session=name)
    finish(one)
    counts = {name: sum(e.token_count for e in info.entries) for (_, name), info in store.sessions.items()}
    assert counts == {name: len(prompt) + 3 for name, prompt in prompts.items()}


def test_an_aborted_request_leaves_its_session_what_it_had(engine: MakeEngine, store: FakeStore) -> None:
    """In mid-load, and while its prompt is read; once it answers, the session has what was said."""
    one = engine(retain=False, prefill_tokens=T)
    history = [*text(3 * T + 5), *turn(one, text(3 * T + 5)), *text(6 * T, seed=2)]
    (before,) = store.sessions.values()
    go = threading.Event()
    store.on_copy = lambda number: go.wait(BOUND_S)
    number = one.add(history, 5, session="s")
    while one._scheduler.running == [] or one._scheduler.running[0].load is None:
        one.step()
    one.abort(number)
    go.set()
    number = one.add(history, 5, session="s")
    while one.request(number).computed < 5 * T:
        one.step()
    one.abort(number)
    assert one.flush(BOUND_S) and list(store.sessions.values()) == [before]
    number = one.add(history, 50, session="s")
    while len(one.got[number]) < 10:
        one.step()
    one.abort(number)
    assert one.flush(BOUND_S)
    (after,) = store.sessions.values()
    assert sum(entry.token_count for entry in after.entries) == len(history) + 9


def test_what_the_store_has_lost_is_saved_again_from_the_pool(engine: MakeEngine, store: FakeStore) -> None:
    """A daemon without an SSD was restarted: the first turn after it finds out, the next one saves all again."""
    one = engine()
    history = [*text(3 * T + 5), *turn(one, text(3 * T + 5))]
    store.chunks.clear()
    store.sessions.clear()
    for seed in range(2):
        history += [*text(3, seed=seed)]
        history += turn(one, history)
    assert one.counters["restored_tokens"] == 0
    two = engine()
    turn(two, [*history, 1])
    assert two.counters["restored_tokens"] == len(history) - 1


def test_idle_chunks_make_room_and_come_back_from_the_store(engine: MakeEngine, store: FakeStore) -> None:
    one = engine(pool_chunks=9)
    prompts = [text(3 * T + 5, seed=n) for n in range(4)]
    for _ in range(2):
        for prompt in prompts:
            one.add(prompt, 3)
            finish(one)
    assert one.pool.evicted > 0 and one.counters["restored_tokens"] == 4 * 3 * T
    assert one.counters["preemptions"] == 0
    one.add(prompts[-1], 3)
    finish(one)
    assert one.counters["adopted_tokens"] == 3 * T


def test_of_what_was_promoted_it_is_said_that_it_came_from_ssd(engine: MakeEngine, store: FakeStore) -> None:
    one = engine()
    history = [*text(3 * T + 5), *turn(one, text(3 * T + 5)), 7]
    store.on_ssd = {key for _, key in list(store.chunks)[2:]}
    two = engine()
    number = two.add(history, 1, session="s")
    request = two.request(number)
    finish(two)
    ssd = T + len(history) - 2 - 3 * T
    assert (request.reused.dram, request.reused.ssd) == (2 * T, ssd)
    assert two.counters["restored_ssd_tokens"] == ssd


def test_requests_with_other_roots_share_nothing(engine: MakeEngine, store: FakeStore) -> None:
    one = engine()
    for root in (b"a" * 32, b"b" * 32):
        one.add(text(2 * T + 3), 3, root=ChunkKey(root))
    finish(one)
    assert one.counters["adopted_tokens"] == 0 and len(store.chunks) == 4
    two = engine()
    two.add(text(2 * T + 3), 3, root=ChunkKey(b"a" * 32))
    two.add(text(2 * T + 3), 3)
    finish(two)
    assert two.counters["restored_tokens"] == 2 * T


def test_a_queue_that_is_full_refuses(engine: MakeEngine) -> None:
    one = engine(waiting_max=2)
    for _ in range(2):
        one.add(text(5), 3)
    with pytest.raises(Exhausted, match="waiting_max=2: too many requests wait"):
        one.add(text(5), 3)
    assert one.counters["requests_rejected"] == 1
    finish(one)


def reported(one: Recording, what: Callable[[], Any]) -> None:
    """Steps, with a report at each, until something is so."""
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline, "it was never reported"
        one._store._reporter._due_at = 0.0
        one.add([1], 1)
        one.finish()


def test_what_stays_is_reported_and_what_the_queue_needs_stays_longest(
    engine: MakeEngine, store: FakeStore
) -> None:
    one = engine(pool_chunks=9)
    first, second, third = (text(3 * T + 5, seed=n) for n in range(3))
    for prompt in (first, second):
        one.add(prompt, 3)
        finish(one)
    ((salt, _), *_) = store.chunks
    keys = [key for _, key in store.chunks]
    reported(one, lambda: {*store.resident.get(salt, ())} == {*keys})
    store.needed = keys[:3]
    reported(one, lambda: len(one.pool._needed) == 3)
    one.add(third, 3)
    finish(one)
    assert one.pool.evicted and {*keys[:3]} <= {*one.pool.resident(9)} and len(one.pool.resident(9)) < 9
    store.needed = []
    reported(one, lambda: not one.pool._needed)
    one.reset()
    reported(one, lambda: not store.resident[salt])  # it was of other weights


def test_a_daemon_that_hangs_while_it_is_told_holds_up_nobody(engine: MakeEngine, store: FakeStore) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        assert go_on.wait(BOUND_S)

    store.on_report = hang
    one = engine()
    one.add(text(3 * T + 5), 3)
    one.finish().check()
    assert asked.wait(BOUND_S)
    for seed in range(3):
        one._store._reporter._due_at = 0.0
        one.add(text(3 * T + 5, seed=seed), 3)
        one.finish().check()
    go_on.set()


def test_a_daemon_that_takes_no_reports_is_told_no_more(engine: MakeEngine, store: FakeStore) -> None:
    def refuse() -> None:
        raise BadRequest("a request has a known body")

    store.on_report = refuse
    one = engine()
    reported(one, lambda: one.counters["reports_failed"] == 1)
    for _ in range(3):
        one._store._reporter._due_at = 0.0
        one.add(text(20), 3)
        one.finish().check()
    assert one.counters["reports_failed"] == 1 and one.counters["reports"] == 0


def test_what_could_not_be_saved_of_an_aborted_request_is_saved_by_the_next(
    engine: MakeEngine, store: FakeStore
) -> None:
    one = engine(prefill_tokens=T)
    prompt = text(5 * T + 3)
    store.room = 0
    number = one.add(prompt, 3)
    while one.request(number).computed < 3 * T:
        one.step()
    one.abort(number)
    assert one.flush(BOUND_S)
    store.room = None
    one.add(prompt, 3)
    finish(one)
    assert len(store.chunks) == 5
