"""Documents that prompts bring themselves, in the engine: each has one KV, which is turned to wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.promptcache import Method

from .conftest import FakeStore, recorded_logits
from .modular import Plain, answer, assembly_of, bytes_llama, encode_all, encode_documents, encoding_of

MakeEngine = Callable[..., BatchEngine]
SCHEMA = '<schema name="s">Read all of this: <collection name="docs"/> Then say: </schema>'
FJORD = "A fjord is a long and narrow inlet with steep sides."
RIVER = "A river is a stream."


def prompt(*texts: str, question: str = "Which?") -> str:
    documents = "".join(f"<document>{text} </document>" for text in texts)
    return f'<prompt schema="s"><docs>{documents}</docs>{question}</prompt>'


def engine_of(engines: MakeEngine, store: FakeStore, **options: Any) -> BatchEngine:
    model = options.pop("model", None) or bytes_llama()
    return engines(model, store, **{"chunk_tokens": 16, "pool_chunks": 64} | options)


@pytest.mark.parametrize("method", [Method.BEGINNING, Method.ALONE])
def test_a_document_is_encoded_once_and_loaded_at_any_place(
    method: Method, store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA, method=method)
    made = encode_all(engine, encoding)
    made += encode_documents(engine, encoding, prompt(FJORD, RIVER))
    plain = Plain(engine._model, made)
    for text in (prompt(FJORD, RIVER), prompt(RIVER, FJORD), prompt("It rains.", FJORD)):
        assembly = assembly_of(engine, encoding, text)
        there = [part for part in assembly.parts if part.key in plain.chunks]
        assert any(part.delta for part in there)
        holes = assembly.holes(len(assembly.tokens), there, 0)
        expected = plain.over(
            plain.kv(assembly), assembly, [slot for begin, end in holes for slot in range(begin, end)]
        )
        before = engine.counters["restored_tokens"]
        with recorded_logits(engine._model) as seen:
            answer(engine, assembly, 1)
        assert (seen[-1][0, -1] - expected).abs().max() < 1e-3
        assert engine.counters["restored_tokens"] - before >= len(FJORD)


def test_two_tenants_and_two_texts_share_nothing(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA)
    made = encode_documents(engine, encoding, prompt(FJORD))
    names = {name for _, name in store.sessions}
    assert {job.assembly.owner for job in made} == names
    (job,) = made
    edited = encode_documents(engine, encoding, prompt(FJORD.replace("long", "wide")))
    assert edited[0].assembly.owner != job.assembly.owner
    assert not {*job.keys} & {*edited[0].keys}
    other = encoding_of(engine, SCHEMA, root=b"bob" * 10)  # type: ignore[arg-type]
    parts = assembly_of(engine, other, prompt(FJORD)).parts
    assert not {part.key for part in parts} & {*job.keys, *edited[0].keys}


def test_all_of_it_computed_is_full_attention(store: FakeStore, engines: MakeEngine) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA)
    encode_all(engine, encoding)
    encode_documents(engine, encoding, prompt(FJORD, RIVER))
    assembly = assembly_of(engine, encoding, prompt(RIVER, FJORD), Recipe(deviating=1.0))
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, 3)
    found = torch.stack([logits[0, -1] for logits in seen[-3:]])
    expected = Plain(engine._model, []).logits(assembly, tokens)
    assert (found - expected).abs().max() < 1e-3


def test_where_keys_cannot_be_turned_a_document_that_moved_is_computed(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    encoding = encoding_of(engine, SCHEMA)
    made = encode_all(engine, encoding) + encode_documents(engine, encoding, prompt(FJORD, RIVER))
    engine._store._positions = None  # type: ignore[union-attr]
    assembly = assembly_of(engine, encoding, prompt(FJORD, RIVER))
    assert [part.delta for part in assembly.parts] == [0] * len(assembly.parts)
    assert {*made[-2].keys} <= {part.key for part in assembly.parts}, "the first one has not moved"
    assert not {*made[-1].keys} & {part.key for part in assembly.parts}
    with recorded_logits(engine._model) as seen:
        tokens = answer(engine, assembly, 2)
    found = torch.stack([logits[0, -1] for logits in seen[-2:]])
    assert (found - Plain(engine._model, made).logits(assembly, tokens)).abs().max() < 1e-3
