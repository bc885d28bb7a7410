"""What an engine loads of what the store has, by what it has measured; and what it does when that was wrong."""

from __future__ import annotations

import threading

import pytest
from transformers import PreTrainedModel

from kvstore.answers import Backlog
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad

from .conftest import FakeStore, text, tiny_llama
from .recording import Recording, T
from .test_pool_store import BOUND_S, MakeEngine, engine, finish, warm

__all__ = ["engine"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(layers=3)


def learned(one: Recording, *, token_s: float) -> ComputeOrLoad:
    """It computes a token in so long, and copies at once; what it measures from now on does not count."""
    choice = one._store._choice
    assert choice is not None
    for tokens in (1, 16, 64, 1, 16, 64):
        choice.compute.observe(tokens, tokens * token_s)
        choice.copy.observe(tokens, tokens * 1e-12)
    choice.compute.observe = lambda units, seconds: None  # type: ignore[method-assign]
    return choice


def ssd(store: FakeStore, keys: slice, *, chunk_s: float) -> int:
    """Those chunks are on an SSD that takes so long for one. Returns how many they are."""
    found = [key for _, key in store.chunks][keys]
    size = len(next(iter(store.chunks.values())))
    store.on_ssd = {*found}
    store.backlog = Backlog(len(found) * size, 0, int(size / chunk_s))
    return len(found)


def asked(one: Recording, prompt: list[int]) -> str:
    """What was made of what the store has of it."""
    request = one.request(one.add(prompt, 3))
    finish(one)
    return request.choice


def test_as_long_as_nothing_is_measured_all_is_loaded(engine: MakeEngine, store: FakeStore) -> None:
    prompt = text(4 * T + 3)
    warm(engine, prompt)
    ssd(store, slice(2, None), chunk_s=1e-9)
    one = engine(compute_or_load=True)
    assert asked(one, prompt) == "unknown"
    assert one.counters["restored_tokens"] == 4 * T and one.counters["restored_ssd_tokens"] == 2 * T


@pytest.mark.parametrize(
    ("token_s", "chunk_s", "choice", "loaded"),
    [
        (1.0, 1e-6, "load", 4),
        (1.0, 1e4, "split", 2),  # what is in DRAM costs nothing; the rest takes longer than computing it
    ],
)
def test_what_is_on_a_slow_disk_is_computed(
    token_s: float, chunk_s: float, choice: str, loaded: int, engine: MakeEngine, store: FakeStore
) -> None:
    prompt = text(4 * T + 3)
    warm(engine, prompt)
    one = engine(compute_or_load=True)
    learned(one, token_s=token_s)
    ssd(store, slice(2, None), chunk_s=chunk_s)
    assert asked(one, prompt) == choice
    assert one.counters["restored_tokens"] == loaded * T
    assert one.counters[f"choices_{choice}"] == 1
    assert len(store.promoted) == loaded - 2, "what is computed need not be promoted"


def test_what_is_all_on_a_slow_disk_is_computed(engine: MakeEngine, store: FakeStore) -> None:
    prompt = text(4 * T + 3)
    warm(engine, prompt)
    one = engine(compute_or_load=True)
    learned(one, token_s=1.0)
    ssd(store, slice(None), chunk_s=1e4)
    assert asked(one, prompt) == "compute"
    assert one.counters["restored_tokens"] == 0 and not store.promoted


def test_what_does_not_come_in_time_is_computed(engine: MakeEngine, store: FakeStore) -> None:
    """The disk was fast, and hangs. What was in DRAM is loaded nevertheless."""
    prompt = text(4 * T + 3)
    warm(engine, prompt)
    one = engine(compute_or_load=True, promote_timeout_s=1000.0)
    learned(one, token_s=1.0)  # a copy is not late before a minute, on the busiest machine
    ssd(store, slice(2, None), chunk_s=1e-6)
    store.promotes = False
    assert asked(one, prompt) == "load"
    assert one.counters["restored_tokens"] == 2 * T
    assert one.counters["promotions_late"] == 1 == one.counters["promotions_awaited"]


def test_a_copy_that_takes_longer_than_computing_is_given_up(engine: MakeEngine, store: FakeStore) -> None:
    prompt = text(4 * T + 3)
    warm(engine, prompt)
    one = engine(compute_or_load=True)
    learned(one, token_s=1e-3)
    go = threading.Event()
    store.on_copy = lambda number: go.wait(BOUND_S)
    number = one.add(prompt, 3)
    while one.live:
        one.step()
    go.set()
    assert len(one.got[number]) == 3
    assert one.counters["loads_late"] == 1 and one.counters["restored_tokens"] == 0
    while one.pool.used:  # the copy still runs
        one.add([1], 1)
        while one.live:
            one.step()
    one.check()


def test_tails_are_loaded_with_what_is_before_them(engine: MakeEngine, store: FakeStore) -> None:
    first = engine()
    number = first.add(text(2 * T + 3), 3, session="s")
    finish(first)
    history = [*text(2 * T + 3), *first.got[number], 7]
    one = engine(compute_or_load=True)
    learned(one, token_s=1.0)
    ssd(store, slice(1, None), chunk_s=1e-6)
    request = one.request(one.add(history, 3, session="s"))
    finish(one)
    assert request.choice == "load" and request.reused.tokens == len(history) - 2
    assert request.reused.ssd == len(history) - 2 - T
