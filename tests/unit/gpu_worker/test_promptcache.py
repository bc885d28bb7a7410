"""Prompts of modules in the engine: the logits are those of the plain model over the same KV, whatever is missing is
computed, and nothing approximate becomes anybody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import OWNER_PREFIX, Recipe, tenant_salt
from kvstore.promptcache import Method
from kvstore.types import ChunkKey

from .conftest import FakeStore, recorded_logits
from .modular import PROMPT, TRIP, Plain, answer, assembly_of, bytes_llama, encode_all, encoding_of
from .recording import same_to_the_bit

MakeEngine = Callable[..., BatchEngine]
T = 16
NEW = 6
OTHER = '<prompt schema="trip"><plan days="12"/><food/> Why?</prompt>'


def engine_of(engines: MakeEngine, store: FakeStore | None, **options: Any) -> BatchEngine:
    model = options.pop("model", None) or bytes_llama()
    return engines(model, store, **{"chunk_tokens": T, "pool_chunks": 64} | options)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("prefill_tokens", [512, 7])
def test_the_answer_is_that_of_the_plain_model_over_the_same_kv(
    method: Method, share: float, prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    """Arguments, text between the modules and recomputed tokens are computed where they stand."""
    engine = engine_of(engines, store, prefill_tokens=prefill_tokens)
    encoding = encoding_of(engine, TRIP, method=method)
    plain = Plain(engine._model, encode_all(engine, encoding))
    for text in (PROMPT, OTHER):
        assembly = assembly_of(engine, encoding, text, Recipe(method, share))
        if any(part.delta for part in assembly.parts):
            continue  # method SHARED: the next test
        with recorded_logits(engine._model) as seen:
            tokens = answer(engine, assembly, NEW)
        expected = plain.logits(assembly, tokens)
        found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
        assert (found - expected).abs().max() < 1e-4
        assert engine.counters["restored_tokens"] > 0


@pytest.mark.parametrize("moves", [True, False])
def test_what_moved_is_rotated_or_computed(moves: bool, store: FakeStore, engines: MakeEngine) -> None:
    """Alone, a module's KV that is rotated is that of the module encoded where it is now."""
    engine = engine_of(engines, store)
    assert engine.moves
    schema = (
        '<schema name="s"><module name="a">One.</module><module name="b">The second one is longer.</module>'
        "</schema>"
    )
    encoding = encoding_of(engine, schema, method=Method.ALONE)
    encode_all(engine, encoding)
    if not moves:
        engine._store._positions = None
    assembly = assembly_of(engine, encoding, '<prompt schema="s">Some text. <b/> And?</prompt>')
    plain = Plain(engine._model, [])
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    if moves:
        assert [part.delta for part in assembly.parts] == [7, 7]
        assert engine.counters["restored_tokens"] == 25
        assembly = plain.move(assembly)
    else:
        assert not assembly.parts and engine.counters["restored_tokens"] == 0
    assert (seen[-1][0, -1] - plain.logits(assembly)[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("prefill_tokens", [512, 10])
def test_all_text_in_one_module_is_bit_equal_to_full_attention(
    prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    check_bit_equal(
        '<schema name="s">Read this: <module name="a">A fjord is a long and narrow inlet with steep sides.'
        "</module></schema>",
        '<prompt schema="s"><a/></prompt>',
        '<prompt schema="s"><a/> What is a fjord?</prompt>',
        prefill_tokens,
        store,
        engines,
    )


@pytest.mark.parametrize("prefill_tokens", [512, 10])
def test_all_text_in_one_scaffold_is_bit_equal_to_full_attention(
    prefill_tokens: int, store: FakeStore, engines: MakeEngine
) -> None:
    check_bit_equal(
        '<schema name="s">Read this: <module name="a">A fjord is long. </module><module name="b">Its sides are steep.'
        '</module><scaffold modules="a b"/></schema>',
        '<prompt schema="s"><a/><b/></prompt>',
        '<prompt schema="s"><a/><b/> What is a fjord?</prompt>',
        prefill_tokens,
        store,
        engines,
    )


def check_bit_equal(
    schema: str,
    without: str,
    text: str,
    prefill_tokens: int,
    store: FakeStore,
    engines: MakeEngine,
) -> None:
    """An engine without a store that computes the text and then the question has the very same bits: rounding depends
    on how many tokens are computed at a time, so it computes the modules first, as encoding them does."""
    engine = engine_of(engines, store, prefill_tokens=prefill_tokens)
    encoding = encoding_of(engine, schema)
    encode_all(engine, encoding)
    assembly = assembly_of(engine, encoding, text)
    stored = sum(part.count for part in assembly.parts)
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, NEW)
    assert engine.counters["restored_tokens"] >= stored - encoding.layout.beginning
    plain = engine_of(engines, None, prefill_tokens=prefill_tokens, retain=True, model=engine._model)
    for count in (encoding.layout.beginning, stored):
        plain.turn("", assembly.tokens[:count], 1)
    with recorded_logits(plain._model) as expected:
        there = plain.turn("", assembly.tokens, NEW)
    assert there.reused.hbm == stored
    assert list(there.tokens) == tokens
    assert same_to_the_bit(seen, expected)


@pytest.mark.parametrize("lost", ["all", "food", "oslo", "beginning", "away"])
def test_what_the_store_has_lost_is_computed(lost: str, store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    made = encode_all(engine, encoding)
    gone = [job for job in made if lost in job.name or lost == "all"]
    assert gone or lost == "away"
    store.forget(*(key for job in gone for key in job.keys))
    store.away = lost == "away"
    assembly = assembly_of(engine, encoding, PROMPT)
    plain = Plain(engine._model, made)
    for key in [key for key in plain.chunks if store.away or (assembly.salt, key) not in store.chunks]:
        del plain.chunks[key]
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, NEW)
    found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
    assert (found - plain.logits(assembly, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("layer", range(3))
def test_a_load_that_fails_is_computed(layer: int, store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    store.on_copy = lambda number: number != layer
    assembly = assembly_of(engine, encoding, PROMPT)
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, NEW)
    assert engine.counters["load_failures"] == 1
    found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
    assert (found - Plain(engine._model, []).logits(assembly, tokens)).abs().max() < 1e-4


def test_nothing_approximate_is_shared_or_stored_as_exact(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store, retain=True)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    exact = {chunk.key for chunk in encoding.beginning}
    assert {key for (_, key), derived in store.derived.items() if not derived} == exact
    kept = dict(store.chunks)
    assembly = assembly_of(engine, encoding, PROMPT)
    tokens = answer(engine, assembly, 40)
    assert engine.flush(10)
    assert store.chunks.keys() == kept.keys()
    whole = [*assembly.tokens, *tokens]
    # What the pool takes to be in the store are the parts, as they came from there
    assert set(engine.pool._chunk_of) == {part.key for part in assembly.parts}
    # The same tokens as an ordinary prompt: only the beginning is found
    turn = engine.turn("", whole, 1)
    assert turn.reused_tokens == assembly.exact // T * T


def test_each_module_belongs_to_a_session(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    made = encode_all(engine, encoding)
    owners = {name: info for (_, name), info in store.sessions.items()}
    assert owners.keys() == {job.assembly.owner for job in made}
    assert all(name.startswith(OWNER_PREFIX) for name in owners)
    for job in made:
        entries = owners[job.assembly.owner].entries
        assert [entry.key for entry in entries] == list(job.keys)
        assert all(entry.approximate for entry in entries)
    edited = encoding_of(engine, TRIP.replace("olives", "figs"))
    again = encode_all(engine, edited)
    food = next(job for job in again if "food" in job.name)
    assert [
        entry.key for entry in store.sessions[engine.namespace.salt, food.assembly.owner].entries
    ] == list(food.keys)


def test_an_encoding_without_room_has_no_owner(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    store.room = 3
    encode_all(engine, encoding_of(engine, TRIP))
    assert engine.save_counters["modules_dropped"] > 0
    for info in store.sessions.values():
        assert all((engine.namespace.salt, entry.key) in store.chunks for entry in info.entries)


def test_an_edited_schema_never_meets_an_old_module(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    old, new = encoding_of(engine, TRIP), encoding_of(engine, TRIP.replace("olives", "apples"))
    made = encode_all(engine, old)
    assembly = assembly_of(engine, new, PROMPT)
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, NEW)
    plain = Plain(engine._model, made)
    # What stands before the edited word is the same as ever; what stands behind it is computed
    food = new.units["food",].keys
    assert [key in plain.chunks for key in food] == [True] + [False] * (len(food) - 1)
    found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
    assert (found - plain.logits(assembly, tokens)).abs().max() < 1e-4


def test_two_tenants_share_nothing(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store, retain=True)
    alice, bob = ChunkKey(b"a" * 32), ChunkKey(b"b" * 32)
    one, two = (encoding_of(engine, TRIP, root=root) for root in (alice, bob))
    assert not set(one.keys()) & set(two.keys())
    encode_all(engine, one, root=alice)
    before = dict(engine.counters)
    answer(engine, assembly_of(engine, two, PROMPT), 2, root=bob)
    assert engine.counters["restored_tokens"] == before.get("restored_tokens", 0)
    assert engine.counters["adopted_tokens"] == before.get("adopted_tokens", 0)
    assert tenant_salt(bytes(32), ChunkKey(b"")) == bytes(32)


def test_a_new_worker_finds_the_modules(store: FakeStore, engines: MakeEngine) -> None:
    model = bytes_llama()
    engine = engine_of(engines, store, model=model)
    encode_all(engine, encoding_of(engine, TRIP))
    again = engine_of(engines, store, model=model)
    assembly = assembly_of(again, encoding_of(again, TRIP), PROMPT)
    answer(again, assembly, 1)
    computed = len(assembly.tokens) - sum(part.count for part in assembly.parts)
    assert again.counters["computed_tokens"] == computed
    assert again.counters["restored_tokens"] == sum(part.count for part in assembly.parts)


def test_other_weights_find_none(store: FakeStore, engines: MakeEngine) -> None:
    """And a plan that was made for the weights before is computed with those of now."""
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    assembly = assembly_of(engine, encoding, PROMPT)
    before = engine.counters["restored_tokens"]
    with torch.no_grad():
        engine._model.model.layers[0].mlp.up_proj.weight.add_(0.05)
    engine.reset()
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, NEW)
    assert engine.counters["restored_tokens"] == before
    found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
    assert (found - Plain(engine._model, []).logits(assembly, tokens)).abs().max() < 1e-4


def test_a_full_pool_makes_the_newest_wait_and_nothing_is_lost(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store, pool_chunks=23, sequences_max=4)
    encoding = encoding_of(engine, TRIP)
    encode_all(engine, encoding)
    alone = {text: answer(engine, assembly_of(engine, encoding, text), 60) for text in (PROMPT, OTHER)}
    numbers = {}
    for text in (PROMPT, OTHER, PROMPT, OTHER):
        assembly = assembly_of(engine, encoding, text)
        numbers[engine.add(assembly.tokens, 60, assembly=assembly)] = text
    got: dict[int, list[int]] = {number: [] for number in numbers}
    for output in engine.run():
        got[output.request].append(output.token)
        engine.check_integrity()
    assert engine.counters["preemptions"] > 0
    assert all(len(tokens) == 60 for tokens in got.values())
    assert got == {number: alone[text] for number, text in numbers.items()}
    assert engine.pool.used == 0


def test_the_papers_pass_lets_arguments_see_what_stands_behind_them(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, TRIP)
    plain = Plain(engine._model, encode_all(engine, encoding))
    smaller = assembly_of(engine, encoding, PROMPT)
    assembly = assembly_of(engine, encoding, PROMPT, Recipe(see_later=True))
    assert sorted(zip(assembly.positions, assembly.tokens, strict=True)) == list(
        zip(smaller.positions, smaller.tokens, strict=True)
    )
    stored = list(assembly.parts)
    assert [part.first for part in stored] == [sum(p.count for p in stored[:n]) for n in range(len(stored))]
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    assert (seen[-1][0, -1] - plain.logits(assembly)[-1]).abs().max() < 1e-4
    assert (plain.logits(assembly)[-1] - plain.logits(smaller)[-1]).abs().max() > 1e-3


def test_prompts_that_begin_with_the_same_modules_share_them_in_the_pool(
    store: FakeStore, engines: MakeEngine
) -> None:
    """The first loads them, the others wait for it; so does the next one, as long as they stay."""
    engine = engine_of(engines, store, retain=True, pool_chunks=128)
    encoding = encoding_of(engine, TRIP)
    plain = Plain(engine._model, encode_all(engine, encoding))
    start = '<prompt schema="trip"><plan days="3"><oslo/></plan><food/>'
    texts = [f"{start}Question number {number}?</prompt>" for number in range(6)]
    assemblies = {}
    for text in texts:
        assembly = assembly_of(engine, encoding, text)
        assemblies[engine.add(assembly.tokens, NEW, assembly=assembly)] = assembly
    restored = engine.counters["restored_tokens"]
    got: dict[int, list[int]] = {number: [] for number in assemblies}
    most = 0
    for output in engine.run():
        got[output.request].append(output.token)
        engine.check_integrity()
        most = max(most, engine.pool.used)
    one = len(assemblies[min(assemblies)].tokens)
    whole = one // T - 3  # all that they have in common, in full chunks
    assert engine.counters["restored_tokens"] - restored < 2 * one
    assert most <= whole + 6 * 5
    for number, assembly in assemblies.items():
        logits = plain.logits(assembly, got[number])
        assert got[number] == logits.argmax(1).tolist()
    before = engine.counters["restored_tokens"]
    answer(engine, assembly_of(engine, encoding, texts[0]), 1)
    assert engine.counters["restored_tokens"] - before < 2 * T
    # Another module, argument or share of them at the same place is another key
    for other, recipe in (
        (texts[0].replace('days="3"', 'days="4"'), Recipe()),
        (texts[0].replace("<oslo/>", "<rome/>"), Recipe()),
        (texts[0], Recipe(share=0.3)),
    ):
        assembly = assembly_of(engine, encoding, other, recipe)
        with recorded_logits(engine._model) as seen:
            answer(engine, assembly, 1)
        assert (seen[-1][0, -1] - plain.logits(assembly)[-1]).abs().max() < 1e-4


def test_what_was_computed_for_want_of_a_module_is_not_shared_as_if_it_was_loaded(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store, retain=True, pool_chunks=128)
    encoding = encoding_of(engine, TRIP)
    made = encode_all(engine, encoding)
    plain = Plain(engine._model, made)
    assembly = assembly_of(engine, encoding, PROMPT)
    lost = {key: store.chunks.pop((assembly.salt, key)) for key in encoding.units["food",].keys}
    answer(engine, assembly, 2)
    store.chunks |= {(assembly.salt, key): shard for key, shard in lost.items()}
    with recorded_logits(engine._model) as seen:
        answer(engine, assembly, 1)
    assert (seen[-1][0, -1] - plain.logits(assembly)[-1]).abs().max() < 1e-4


def test_positions_beyond_those_of_the_model_are_refused(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    assembly = assembly_of(engine, encoding_of(engine, TRIP), PROMPT)
    with pytest.raises(ValueError, match="ends at position"):
        engine.add(assembly.tokens, 1024 - assembly.end + 1, assembly=assembly)
    with pytest.raises(ValueError, match="not the assembly's"):
        engine.add(assembly.tokens[1:], 1, assembly=assembly)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=320,
        n_positions=1024,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(share=0.2)], ids=str)
def test_a_model_with_a_table_of_positions_is_served_at_the_schemas(
    recipe: Recipe, store: FakeStore, engines: MakeEngine
) -> None:
    """What the prompt's own text moved is computed: there is nothing to turn."""
    engine = engine_of(engines, store, model=gpt2())
    assert not engine.moves
    encoding = encoding_of(engine, TRIP)
    plain = Plain(engine._model, encode_all(engine, encoding))
    moved = f'<prompt schema="trip">{"Or is it not so at all? " * 4}<food/>Then what?</prompt>'
    for text in (PROMPT, OTHER, moved):
        assembly = assembly_of(engine, encoding, text, recipe)
        assert not any(part.delta for part in assembly.parts)
        before = engine.counters["restored_tokens"]
        with recorded_logits(engine._model) as seen:
            tokens = answer(engine, assembly, NEW)
        found = torch.stack([logits[0, -1] for logits in seen[-NEW:]])
        assert (found - plain.logits(assembly, tokens)).abs().max() < 1e-3
        assert engine.counters["restored_tokens"] > before
        food = {*encoding.units["food",].keys} & {part.key for part in assembly.parts}
        assert bool(food) is (text is not moved)
    full = assembly_of(engine, encoding, PROMPT, Recipe(deviating=1.0))
    with recorded_logits(engine._model) as seen:
        answer(engine, full, 1)
    assert (seen[-1][0, -1] - Plain(engine._model, []).logits(full)[-1]).abs().max() < 1e-3
    with pytest.raises(ValueError, match="the model has 1024 positions"):
        engine.add(full.tokens, 1024 - full.end + 1, assembly=full)
