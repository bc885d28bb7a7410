"""Prompts of one batch read a module that they have in common in one place, whatever stands before it in each and
wherever it stands, and what comes out is what each would say by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.importing import Importing
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.promptcache import Method
from kvstore.types import ChunkKey

from .conftest import FakeStore, recorded_logits
from .modular import Plain, answer, assembly_of, bytes_llama, encode_all, encode_documents, encoding_of

MakeEngine = Callable[..., BatchEngine]
T = 16
NEW = 5
LONG = "The river comes down from the hills, passes the town, and ends in a lake. " * 2
SCHEMA = f"""<schema name="s">Read: <module name="who">Asked by <param name="name" length="12"/>. </module>
<module name="short">Be brief.</module><module name="river">{LONG}</module><module name="town">The town is old.</module>
</schema>"""
BEFORE = (
    '<who name="Ann"/><river/>',
    '<who name="Benedict"/><river/>',
    "<short/><river/>",
    "Quick: <river/>",
    '<who name="Ann"/>So, <short/><river/><town/>',
)
"""What differs before the module that all import."""


def prompt(number: int, own: str = "What is it?") -> str:
    return f'<prompt schema="s">{BEFORE[number]}{own}</prompt>'


def engine_of(engines: MakeEngine, store: FakeStore | None, **options: Any) -> BatchEngine:
    return engines(bytes_llama(), store, **{"chunk_tokens": T, "pool_chunks": 160, "retain": True} | options)


def run(engine: BatchEngine, asked: list[Assembly], count: int = NEW) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {
        engine.add(assembly.tokens, count, assembly=assembly): [] for assembly in asked
    }
    for output in engine.run():
        got[output.request].append(output.token)
        engine.check_integrity()
    return got


def river(encoding: Any) -> list[ChunkKey]:
    return list(encoding.units["river",].keys)


@pytest.mark.parametrize("prefill_tokens", [512, 7])
def test_a_module_is_loaded_once_for_all_that_import_it_wherever_it_stands(
    prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, prefill_tokens=prefill_tokens, sequences_max=8)
    encoding = encoding_of(engine, SCHEMA)
    plain = Plain(engine._model, encode_all(engine, encoding))
    engine.pool.forget()
    asked = [assembly_of(engine, encoding, prompt(number)) for number in range(len(BEFORE))]
    places = {
        (part.first, part.delta) for each in asked for part in each.parts if part.key in river(encoding)
    }
    assert len({first for first, _ in places}) >= 8  # none of them stands where another one does
    assert all(each.by_part for each in asked)
    before = engine.counters["restored_tokens"]
    got = run(engine, asked)
    distinct = {part.key: part.count for each in asked for part in each.parts}
    assert engine.counters["restored_tokens"] - before == sum(distinct.values())
    for assembly, tokens in zip(asked, got.values(), strict=True):
        if any(part.delta for part in assembly.parts):
            continue
        assert tokens == plain.logits(assembly, tokens).argmax(1).tolist()


def test_in_a_step_a_shared_module_is_one_piece_of_work(store: FakeStore, engines: MakeEngine) -> None:
    """The queries of all sequences, each turned by its own delta, over chunks that are read once."""
    engine = engine_of(engines, store, sequences_max=8)
    encoding = encoding_of(engine, SCHEMA)
    encode_all(engine, encoding)
    asked = [assembly_of(engine, encoding, prompt(number)) for number in range(len(BEFORE))]
    numbers = [engine.add(assembly.tokens, 20, assembly=assembly) for assembly in asked]
    while any(
        len(engine.request(number).tokens) < 12 or engine.request(number).missing > 1 for number in numbers
    ):
        engine.step()
    requests = [engine.request(number) for number in numbers]
    chunks = {key: engine.pool.find([key])[0] for key in river(encoding)}
    for request in requests:
        assert set(chunks.values()) <= {one.chunk for one in request.stretches}
    deltas = {one.delta for request in requests for one in request.stretches if one.chunk in chunks.values()}
    assert len(deltas) > 1
    plan = engine._forward._decoding.plan().stretches
    assert plan is not None
    read = [
        plan.parts[at, 0].item() for _, _, at, count in plan.items.tolist() for at in range(at, at + count)
    ]
    assert sorted(chunk for chunk in read if chunk in chunks.values()) == sorted(chunks.values())
    for number in numbers:
        engine.abort(number)
    engine.check_integrity()
    assert engine.pool.used == 0


def test_it_takes_the_memory_of_one(store: FakeStore, engines: MakeEngine) -> None:
    peaks = []
    for share in (True, False):
        engine = engine_of(engines, store, sequences_max=16, pool_chunks=400, share=share)
        encoding = encoding_of(engine, SCHEMA)
        encode_all(engine, encoding)
        engine.pool.forget()
        engine.pool.peak_chunks = 0
        asked = [
            assembly_of(engine, encoding, prompt(number % len(BEFORE), f"Number {number}?"))
            for number in range(16)
        ]
        run(engine, asked)
        peaks.append(engine.pool.peak_chunks)
    assert peaks[0] < 0.5 * peaks[1], peaks


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(share=0.2), Recipe(see_later=True)], ids=str)
def test_both_ways_say_the_same(recipe: Recipe, store: FakeStore, engines: MakeEngine) -> None:
    """Read where it lies, and copied between the prompt's own tokens with keys that are rotated."""
    one, other = engine_of(engines, store), engine_of(engines, store, share=False)
    encoding = encoding_of(one, SCHEMA)
    encode_all(one, encoding)
    for number in range(len(BEFORE)):
        assembly = assembly_of(one, encoding, prompt(number), recipe)
        logits = []
        for engine in (one, other):
            with recorded_logits(engine._model) as seen:
                tokens = answer(engine, assembly, NEW)
            logits.append(torch.stack([each[0, -1] for each in seen[-NEW:]]))
            assert tokens
        assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_the_same_document_twice_is_one_in_the_pool(store: FakeStore, engines: MakeEngine) -> None:
    schema = '<schema name="s">Read: <collection name="docs"/></schema>'
    one_, two = f"<document>{LONG}</document>", "<document>Short.</document>"
    text = f'<prompt schema="s"><docs>{one_}{two}{one_}</docs>Why?</prompt>'
    one, other = engine_of(engines, store), engine_of(engines, store, share=False)
    encoding = encoding_of(one, schema)
    encode_documents(one, encoding, text)
    assembly = assembly_of(one, encoding, text)
    keys = [part.key for part in assembly.parts]
    assert len(set(keys)) < len(keys)
    logits = []
    for engine in (one, other):
        with recorded_logits(engine._model) as seen:
            answer(engine, assembly, 3)
        logits.append(torch.stack([each[0, -1] for each in seen[-3:]]))
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_what_was_computed_before_it_is_found_again_but_by_nobody_who_sees_other_modules(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA)
    plain = Plain(engine._model, encode_all(engine, encoding))
    own = "A question that is long enough to fill some chunks of the pool by itself, is it not?"
    first = assembly_of(engine, encoding, prompt(0, own))
    said = answer(engine, first, NEW)
    before = engine.counters["computed_tokens"]
    assert answer(engine, first, NEW) == said
    again = engine.counters["computed_tokens"] - before
    assert again < len(first.tokens) - sum(part.count for part in first.parts) - T
    for number in range(1, len(BEFORE)):
        other = assembly_of(engine, encoding, prompt(number, own))
        with recorded_logits(engine._model) as seen:
            answer(engine, other, 1)
        if not any(part.delta for part in other.parts):
            assert (seen[-1][0, -1] - plain.logits(other)[-1]).abs().max() < 1e-4


def test_a_small_pool_makes_the_newest_wait_and_nothing_is_lost(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, pool_chunks=30, sequences_max=6, retain=False)
    encoding = encoding_of(engine, SCHEMA)
    encode_all(engine, encoding)
    asked = [assembly_of(engine, encoding, prompt(number)) for number in range(len(BEFORE))]
    alone = [answer(engine, assembly, 60) for assembly in asked]
    got = run(engine, asked + asked, 60)
    assert engine.counters["preemptions"] > 0
    assert list(got.values()) == alone + alone
    assert engine.pool.used == 0


@pytest.mark.parametrize("layer", range(3))
def test_a_load_that_fails_is_computed_and_the_next_one_tries_again(
    layer: int, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, sequences_max=8)
    encoding = encoding_of(engine, SCHEMA)
    plain = Plain(engine._model, encode_all(engine, encoding))
    engine.pool.forget()
    fails = [True]
    store.on_copy = lambda number: number != layer or not fails or not fails.pop()
    asked = [assembly_of(engine, encoding, prompt(number)) for number in (0, 1)]
    first, second = run(engine, asked).values()
    assert engine.counters["load_failures"] == 1 and not fails
    assert first == Plain(engine._model, []).logits(asked[0], first).argmax(1).tolist()
    assert second == plain.logits(asked[1], second).argmax(1).tolist()


def test_a_request_that_ends_while_it_loads_leaves_the_module_to_the_next(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, sequences_max=8)
    encoding = encoding_of(engine, SCHEMA)
    plain = Plain(engine._model, encode_all(engine, encoding))
    engine.pool.forget()
    asked = [assembly_of(engine, encoding, prompt(number)) for number in (0, 1)]
    numbers = [engine.add(assembly.tokens, NEW, assembly=assembly) for assembly in asked]
    while not (isinstance(at := engine.request(numbers[0]).gathering, Importing) and at.begun):
        engine.step()
    engine.abort(numbers[0])
    engine.check_integrity()
    got = [output.token for output in engine.run()]
    assert got == plain.logits(asked[1], got).argmax(1).tolist()
    assert engine.pool.used == 0


def test_other_weights_in_mid_answer_compute_all_of_it_again(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA)
    encode_all(engine, encoding)
    assembly = assembly_of(engine, encoding, prompt(0))
    number = engine.add(assembly.tokens, NEW, assembly=assembly)
    got = []
    while len(got) < 2:
        got += [output.token for output in engine.step()]
    with torch.no_grad():
        engine._model.model.layers[0].mlp.up_proj.weight.add_(0.05)
    engine.reset()
    request = engine.request(number)
    assert request.tokens == [*assembly.tokens, *got] and request.chain is None
    got += [output.token for output in engine.run()]
    engine.check_integrity()
    assert got[2:] == Plain(engine._model, []).logits(assembly, got).argmax(1).tolist()[2:]


@pytest.mark.parametrize("method", list(Method))
def test_tokens_are_counted_by_where_their_kv_was(
    method: Method, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA, method=method)
    encode_all(engine, encoding)
    engine.pool.forget()
    assembly = assembly_of(engine, encoding, prompt(4))
    stored = sum(part.count for part in assembly.parts)
    for place in ("dram", "hbm"):
        number = engine.add(assembly.tokens, 1, assembly=assembly)
        request = engine.request(number)
        list(engine.run())
        assert getattr(request.reused, place) >= stored
        assert request.reused.dram + request.reused.ssd == (stored if place == "dram" else 0)
        assert request.attended_prompt_tokens == len(assembly.tokens) or request.chain is None
