"""Tokens of modules whose KV deviates most from full attention: which these are, and that they are computed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.gpu_worker.assembly import Assembly, Part, most_deviating
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.promptcache import Method
from kvstore.types import ChunkKey

from .conftest import FakeStore, recorded_logits
from .modular import PROMPT, TRIP, Plain, answer, assembly_of, bytes_llama, encode_all, encoding_of

MakeEngine = Callable[..., BatchEngine]
OTHER = '<prompt schema="trip"><plan days="12"/><food/> Why?</prompt>'


def engine_of(engines: MakeEngine, store: FakeStore | None, **options: Any) -> BatchEngine:
    model = options.pop("model", None) or bytes_llama()
    return engines(model, store, **{"chunk_tokens": 16, "pool_chunks": 64} | options)


# --------------------------------------------------------------------------------------------------------------- which


@settings(max_examples=60, deadline=None)
@given(
    deviations=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan, math.inf]), max_size=30),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    count=st.integers(0, 32),
)
def test_none_that_is_left_deviates_more_than_one_that_is_chosen(
    deviations: list[float], cuts: list[int], count: int
) -> None:
    among, at, left = [], 3, len(deviations)
    for cut in cuts:
        here = min(cut, left)
        among += [(at, at + here)] if here else []
        at, left = at + here + 2, left - here
    slots = [slot for begin, end in among for slot in range(begin, end)]
    deviations = deviations[: len(slots)]
    found = most_deviating(deviations, among, count)
    chosen = [slot for begin, end in found for slot in range(begin, end)]
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(slots)
    assert len(chosen) == min(count, len(slots))
    assert all(before[1] < after[0] for before, after in pairwise(found))
    worth = {slot: math.inf if math.isnan(one) else one for slot, one in zip(slots, deviations, strict=True)}
    left_over = [worth[slot] for slot in slots if slot not in chosen]
    assert not left_over or not chosen or min(worth[slot] for slot in chosen) >= max(left_over)


def test_of_equal_ones_the_first_are_chosen() -> None:
    assert most_deviating([1.0, 1.0, 2.0, 1.0], [(4, 6), (9, 11)], 3) == [(4, 6), (9, 10)]


def test_candidates_are_approximate_slots_that_were_loaded_and_are_not_computed_anyway() -> None:
    parts = tuple(Part(ChunkKey(bytes([n])), first, 4) for n, first in enumerate((0, 4, 10, 14)))
    assembly = Assembly(
        tuple(range(20)), tuple(range(20)), 20, parts, recomputed=((10, 12),), deviating=0.5, exact=4
    )
    assert assembly.candidates(parts) == [(4, 8), (12, 18)]
    assert assembly.candidates(parts[:3]) == [(4, 8), (12, 14)]
    assert assembly.candidates(parts, first=16) == [(16, 18)]
    assert assembly.candidates(()) == []
    chosen = [(5, 6), (13, 15)]
    assert assembly.holes(20, parts, 0, chosen) == [(5, 6), (8, 12), (13, 15), (18, 20)]


@pytest.mark.parametrize("name", ["share", "deviating"])
def test_shares_are_from_0_to_1(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is 1.5: must be from 0 to 1"):
        Recipe(**{name: 1.5})
    assert "10% that deviate most" in str(Recipe(deviating=0.1))


# ------------------------------------------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("method", [Method.BEGINNING, Method.ALONE])
@pytest.mark.parametrize("prefill_tokens", [512, 7])
def test_all_of_them_computed_is_full_attention(
    method: Method, prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, prefill_tokens=prefill_tokens)
    encoding = encoding_of(engine, TRIP, method=method)
    encode_all(engine, encoding)
    plain = Plain(engine._model, [])
    for text in (PROMPT, OTHER):
        assembly = assembly_of(engine, encoding, text, Recipe(method, deviating=1.0))
        with recorded_logits(engine._model) as seen:
            tokens = answer(engine, assembly, 4)
        expected = plain.logits(assembly, tokens)
        found = torch.stack([logits[0, -1] for logits in seen[-4:]])
        assert (found - expected).abs().max() < 1e-4
        engine.check_integrity()
    assert engine.counters["probed_tokens"] > 0


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("deviating", [0.1, 0.5])
def test_those_are_computed_whose_values_in_the_second_layer_differ_most(
    share: float, deviating: float, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    plain = Plain(engine._model, encode_all(engine, encoding))
    assembly = assembly_of(engine, encoding, PROMPT, Recipe(share=share, deviating=deviating))
    full, kv = Plain(engine._model, []).kv(assembly), plain.kv(assembly)
    differ = (full[1][1] - kv[1][1]).square().sum((0, 2)).tolist()
    slots = [slot for begin, end in assembly.candidates(assembly.parts) for slot in range(begin, end)]
    slots.sort(key=lambda slot: -differ[slot])
    chosen = slots[: math.ceil(deviating * len(slots))]
    assert 0 < len(chosen) < len(slots) and differ[chosen[-1]] > 1.0001 * differ[slots[len(chosen)]]
    holes = assembly.holes(len(assembly.tokens), assembly.parts, 0)
    computed = sorted({slot for begin, end in holes for slot in range(begin, end)} | set(chosen))
    before = engine.counters["computed_tokens"]
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    assert engine.counters["computed_tokens"] - before == len(computed)
    assert (seen[-1][0, -1] - plain.over(kv, assembly, computed)).abs().max() < 1e-4


def test_what_the_store_has_lost_is_computed_and_the_rest_looked_at(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    made = encode_all(engine, encoding)
    store.forget(*(key for job in made if "food" in job.name for key in job.keys))
    assembly = assembly_of(engine, encoding, PROMPT, Recipe(deviating=1.0))
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    expected = Plain(engine._model, []).logits(assembly)
    assert (seen[-1][0, -1] - expected[-1]).abs().max() < 1e-4


def test_nobody_adopts_what_was_chosen_for_one_prompt(store: FakeStore, engines: MakeEngine) -> None:
    """Which tokens are computed depends on all modules: what stands before the same ones is not the same."""
    engine = engine_of(engines, store, retain=True, pool_chunks=128)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    recipe = Recipe(deviating=0.3)
    alone = {
        text: answer(
            engine_of(engines, store, model=engine._model), assembly_of(engine, encoding, text, recipe), 4
        )
        for text in (PROMPT, OTHER)
    }
    for text in (PROMPT, OTHER, PROMPT):
        assembly = assembly_of(engine, encoding, text, recipe)
        before = engine.counters["adopted_tokens"]
        assert answer(engine, assembly, 4) == alone[text]
        assert engine.counters["adopted_tokens"] - before <= assembly.exact


def test_a_full_pool_and_a_load_that_fails_leave_nothing_undecided(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, pool_chunks=23, sequences_max=4)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    recipe = Recipe(deviating=0.25)
    numbers = {}
    for text in (PROMPT, OTHER, PROMPT, OTHER):
        assembly = assembly_of(engine, encoding, text, recipe)
        numbers[engine.add(assembly.tokens, 60, assembly=assembly)] = text
    got: dict[int, list[int]] = {number: [] for number in numbers}
    for output in engine.run():
        got[output.request].append(output.token)
        engine.check_integrity()
    assert engine.counters["preemptions"] > 0
    assert all(len(tokens) == 60 for tokens in got.values())
    assert engine.pool.used == 0
    store.on_copy = lambda number: number != 1
    assembly = assembly_of(engine, encoding, PROMPT, recipe)
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    assert (seen[-1][0, -1] - Plain(engine._model, []).logits(assembly)[-1]).abs().max() < 1e-4


def test_an_abort_and_a_reset_between_load_and_choice(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    assembly = assembly_of(engine, encoding, PROMPT, Recipe(deviating=0.5))
    decide, engine._decide = engine._decide, lambda request: None  # type: ignore[method-assign]
    first, second = (engine.add(assembly.tokens, 2, assembly=assembly) for _ in range(2))
    deadline = time.monotonic() + 60
    while len(engine._scheduler.undecided) < 2:
        assert time.monotonic() < deadline
        engine.step()
    assert engine.abort(first)
    engine.check_integrity()
    engine.reset()
    assert not engine._scheduler.undecided
    engine._decide = decide  # type: ignore[method-assign]
    assert [output.request for output in engine.run()] == [second, second]
    engine.check_integrity()


def test_a_model_of_one_layer_has_nothing_that_deviates(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store, model=bytes_llama(layers=1))
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    assembly = assembly_of(engine, encoding, PROMPT, Recipe(deviating=0.2))
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    expected = Plain(engine._model, []).logits(assembly)
    assert (seen[-1][0, -1] - expected[-1]).abs().max() < 1e-4
