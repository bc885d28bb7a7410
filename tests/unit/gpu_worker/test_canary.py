"""Hits are checked on a sample: KV that is not what the worker computes stops it from loading and saving, loudly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.canary import SelfTest, differs, is_sampled
from kvstore.keys import exact_chain
from kvstore.types import ChunkKey

from .conftest import FakeStore, text, tiny_llama

T = 16
Make = Callable[..., BatchEngine]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=3)


def saved(model: LlamaForCausalLM, store: FakeStore, engines: Make) -> list[int]:
    engine = engines(model, store, chunk_tokens=T)
    prompt = text(70)
    engine.turn("s", prompt, 4)
    assert engine.flush(30)
    return [*prompt, *text(10, seed=3)]


def keys_of(store: FakeStore, prompt: list[int]) -> list[ChunkKey]:
    ((salt, _), *_) = store.chunks
    return exact_chain(salt, prompt, T)


def damage(store: FakeStore) -> None:
    """As a sick worker would have saved it: numbers that are plausible, and wrong."""
    for name, shard in store.chunks.items():
        numbers = shard.view("f4").copy()
        numbers[len(numbers) // 2 :] *= 1.5
        store.chunks[name] = numbers.view("u1")


def test_what_was_stored_well_passes(model: LlamaForCausalLM, store: FakeStore, engines: Make) -> None:
    prompt = saved(model, store, engines)
    engine = engines(model, store, chunk_tokens=T, canary_every=1)
    wanted = engines(model, None, chunk_tokens=T).turn("", prompt, 5).tokens
    assert engine.turn("s", prompt, 5).tokens == wanted
    assert engine.counters["canary_checks"] == 1 and engine.counters["canary_failures"] == 0
    assert not engine.alarm and engine.connected
    engine.check_integrity()


def test_wrong_kv_stops_loading_and_saving(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = saved(model, store, engines)
    keys = keys_of(store, prompt)
    damage(store)
    engine = engines(model, store, chunk_tokens=T, canary_every=1, retain=True)
    with caplog.at_level(logging.ERROR):
        engine.turn("s", prompt, 5)
    assert engine.counters["canary_failures"] == 1
    assert (
        "self-test passes: the maker of these chunks is quarantined" in engine.alarm
        and engine.alarm in caplog.text
    )
    engine.check_integrity()
    engine._store._lookups.shutdown(wait=True)  # what tells the store
    assert store.found_wrong == [(keys[:1], True)], "the first chunk that differs, and no other"
    there = {key for _, key in store.chunks}
    assert not there & {*keys[1:4]}, "what somebody computed from it is still there"
    assert not there & {*keys[4:]}, "what this worker computed from it is still there"
    before, reads = set(store.chunks), len(store.reads)
    wanted = engines(model, None, chunk_tokens=T).turn("", prompt, 5).tokens
    assert engine.turn("s", prompt, 5).tokens == wanted, "what was loaded is still used"
    assert engine.flush(30)
    assert set(store.chunks) == before and len(store.reads) == reads, "it goes on loading or saving"
    assert not engine.connected


def test_a_saver_that_failed_keeps_nobody_from_telling(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = saved(model, store, engines)
    keys = keys_of(store, prompt)
    damage(store)
    engine = engines(model, store, chunk_tokens=T, canary_every=1)

    def fails(timeout_s: float) -> bool:
        raise RuntimeError("the saver failed")

    monkeypatch.setattr(engine._store.saver, "flush", fails)
    engine.turn("s", prompt, 5)
    engine._store._lookups.shutdown(wait=True)
    assert store.found_wrong == [(keys[:1], True)]


def test_without_a_canary_nobody_would_know(model: LlamaForCausalLM, store: FakeStore, engines: Make) -> None:
    prompt = saved(model, store, engines)
    damage(store)
    engine = engines(model, store, chunk_tokens=T)
    engine.turn("s", prompt, 5)
    assert engine.counters["canary_checks"] == 0 and not engine.alarm


def test_others_that_run_are_computed_again(model: LlamaForCausalLM, store: FakeStore, engines: Make) -> None:
    prompt = saved(model, store, engines)
    damage(store)
    engine = engines(model, store, chunk_tokens=T, canary_every=1)
    first, other = engine.add(prompt, 2, session="s"), engine.add(text(40, seed=9), 12)
    got: dict[int, list[int]] = {first: [], other: []}
    for output in engine.run():
        got[output.request].append(output.token)
        engine.check_integrity()
    plain = engines(model, None, chunk_tokens=T)
    assert engine.alarm and tuple(got[other]) == plain.turn("", text(40, seed=9), 12).tokens


def test_a_worker_that_fails_its_self_test_blames_nobody(
    model: LlamaForCausalLM, store: FakeStore, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = saved(model, store, engines)
    before = set(store.chunks)
    damage(store)
    monkeypatch.setattr(SelfTest, "passes", lambda *_: False)
    engine = engines(model, store, chunk_tokens=T, canary_every=1)
    engine.turn("s", prompt, 5)
    engine._store._lookups.shutdown(wait=True)
    assert "FAILS: this worker is sick" in engine.alarm
    assert store.found_wrong == [(keys_of(store, prompt)[:1], False)] and set(store.chunks) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_no_difference_and_another_text_is(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    one = [torch.randn(3, 2, 2, 4, 8, generator=draw, dtype=torch.float64) for _ in range(2)]
    near = [(layer * (1 + torch.finfo(dtype).eps)).to(dtype) for layer in one]
    same = [layer.to(dtype) for layer in one]
    assert differs(near, same) == ""
    far = [layer.clone() for layer in same]
    far[1][2, 1, 0, 0, 0] += 1
    assert differs(far, same).startswith("V of layer 1 differs by")
    far[1][2, 1, 0, 0, 0] = float("nan")
    assert differs(far, same).startswith("V of layer 1 differs by nan")


def test_a_sick_worker_fails_its_own_test() -> None:
    test = SelfTest(100)
    health = 0.0

    def compute(tokens: object) -> list[torch.Tensor]:
        return [torch.ones(2, 2) + health]

    test.remember(compute)
    assert test.passes(compute, [1, 2])
    health = 1.0
    assert not test.passes(compute, [1, 2])
    flips = iter(range(9))
    assert not test.passes(lambda tokens: [torch.full((2, 2), float(next(flips)))], [1, 2])
    assert not SelfTest(100).passes(compute, [1, 2]), "nothing is known of the beginning"


def test_one_of_so_many_is_sampled_and_the_same_everywhere() -> None:
    keys = exact_chain(bytes(32), text(4096), 1)
    picked = [is_sampled(key, 16) for key in keys]
    assert 100 < sum(picked) < 400 and picked == [is_sampled(key, 16) for key in keys]
    assert not any(is_sampled(key, 0) for key in keys)
