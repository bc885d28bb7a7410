"""Wrong Python types, everywhere in the client: a BadRequest that names the argument and the value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Hint, SessionEntry, connect
from kvstore.client.aio import AsyncNamespace, AsyncReadLease, AsyncWriteBatch
from kvstore.client.batch import WriteBatch
from kvstore.client.connection import Connection
from kvstore.client.geometry import Geometry
from kvstore.client.lease import ReadLease
from kvstore.client.namespace import Namespace
from kvstore.client.region import Region
from kvstore.client.requests import queue_request
from kvstore.errors import BadRequest
from kvstore.keys import derived_key, exact_chain, exact_key
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason

SPEC = NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 64, layers=(LayerSlice(0, 0, 64),)),))
KEY = ChunkKey(b"k")
SALT = b"s" * 32
ENTRY = SessionEntry(KEY, 0, 4)
Case = tuple[Callable[[], Any], str, str]
"""What is called, the field that is named, and what the value begins with."""


class Absent:
    """Stands for a Connection that has no daemon."""

    timeout_s = 1.0
    staging_bytes = 1 << 20
    attachment = None
    absence = BadRequest("away")
    deadline = Connection.deadline

    def count(self, name: str, number: int = 1) -> None:
        pass

    def wait_until(self, *_: Any, **__: Any) -> None:
        raise BadRequest("there is no daemon", field="nothing is wrong")


def space() -> Any:
    space = Namespace(None, Absent(), SPEC)  # type: ignore[arg-type]
    space._binding.salt = SALT
    return space


def lease() -> Any:
    return ReadLease([KEY], [Outcome.HIT], [Reason.NONE], Geometry(SPEC), (0,))


def batch(**named: Any) -> Any:
    slots = {} if named else {"slots": [np.zeros(64, np.uint8)]}
    return WriteBatch([GrantResult.GRANTED], shards=(0,), lengths=(64,), **slots)


def spec(**changes: Any) -> Any:
    return lambda: replace(SPEC, **changes).validate()


def group(**changes: Any) -> Any:
    return spec(groups=(replace(SPEC.groups[0], **changes),))


def hint(**changes: Any) -> Any:
    known = {"job": b"j", "position": 0, "keys": (KEY,)}
    return lambda: space().publish_queue([Hint(**{**known, **changes})])


def entry(**changes: Any) -> Any:
    append = [ENTRY, replace(ENTRY, **changes)]
    return lambda: space().update_session("s", expected_version=0, keep=0, append=append)


def at(name: str, *args: Any, **named: Any) -> Any:
    return lambda: getattr(space(), name)(*args, **named)


def connecting(**named: Any) -> Any:
    return lambda: connect(**{"run_dir": "/nowhere", "timeout_s": 0.1, **named})


ROW = np.zeros(64, np.uint8)
CASES: list[Case] = [
    (connecting(run_dir=None), "run_dir", "None"),
    (connecting(run_dir=3), "run_dir", "3 (int)"),
    (connecting(engine_group=b"e"), "engine_group", "b'e' (bytes)"),
    (connecting(engine_group=None), "engine_group", "None"),
    (connecting(rank="0"), "rank", "'0' (str)"),
    (connecting(rank=1.0), "rank", "1.0 (float)"),
    (connecting(timeout_s="1"), "timeout_s", "'1' (str)"),
    (connecting(timeout_s=None), "timeout_s", "None"),
    (connecting(timeout_s=float("nan")), "timeout_s", "nan (float)"),
    (connecting(staging_bytes="64M"), "staging_bytes", "'64M' (str)"),
    (connecting(staging_bytes=1e6), "staging_bytes", "1000000.0 (float)"),
    (lambda: Client.unopened(SimpleNamespace(), {"model": "m"}), "spec", "{'model': 'm'} (dict)"),  # type: ignore[arg-type]
    (lambda: Client.publish_queue(SimpleNamespace(), b"m", []), "model", "b'm' (bytes)"),  # type: ignore[arg-type]
    (lambda: Region("3", 4), "fd", "'3' (str)"),  # type: ignore[arg-type]
    (lambda: Region(0, 4.0), "size_bytes", "4.0 (float)"),  # type: ignore[arg-type]
    # NamespaceSpec, GroupSpec
    (spec(model=b"m"), "namespace.model", "b'm' (bytes)"),
    (spec(model=None), "namespace.model", "None"),
    (spec(weights_digest="w"), "namespace.weights_digest", "'w' (str)"),
    (spec(weights_digest=[1, 2]), "namespace.weights_digest", "[1, 2] (list)"),
    (spec(adapter_digest=None), "namespace.adapter_digest", "None"),
    (spec(salt="s"), "namespace.salt", "'s' (str)"),
    (spec(layout_fingerprint=3), "namespace.layout_fingerprint", "3 (int)"),
    (spec(layout_fingerprint="\udcff"), "namespace.layout_fingerprint", "\\udcff"),
    (spec(hash_protocol=None), "namespace.hash_protocol", "None"),
    (spec(chunk_tokens=64.0), "namespace.chunk_tokens", "64.0 (float)"),
    (spec(chunk_tokens="64"), "namespace.chunk_tokens", "'64' (str)"),
    (spec(weights_epoch=None), "namespace.weights_epoch", "None"),
    (spec(tensor_parallel=1.5), "namespace.tensor_parallel", "1.5 (float)"),
    (spec(groups=None), "namespace.groups", "None"),
    (spec(groups=SPEC.groups[0]), "namespace.groups", "GroupSpec("),
    (spec(groups={"kv": 64}), "namespace.groups", "{'kv': 64} (dict)"),
    (spec(groups=[*SPEC.groups, ("kv", 64)]), "namespace.groups[1]", "('kv', 64) (tuple)"),
    (group(name=b"kv"), "namespace.groups[0].name", "b'kv' (bytes)"),
    (group(kind="full"), "namespace.groups[0].kind", "'full' (str)"),
    (group(shard_bytes=1e6), "namespace.groups[0].shard_bytes", "1000000.0 (float)"),
    (group(shard_count="2"), "namespace.groups[0].shard_count", "'2' (str)"),
    (group(position_rule=None), "namespace.groups[0].position_rule", "None"),
    (group(layers=None), "namespace.groups[0].layers", "None"),
    (group(layers=[(0, 0, 64)]), "namespace.groups[0].layers[0]", "(0, 0, 64) (tuple)"),
    (group(layers=[LayerSlice(0, 0.0, 64)]), "namespace.groups[0].layers[0].offset", "0.0 (float)"),  # type: ignore[arg-type]
    # keys
    (at("keys", None), "tokens", "object of shape ()"),
    (at("keys", "text"), "tokens", "<U4 of shape ()"),
    (at("keys", [1, 2.5]), "tokens", "float64 of shape (2,)"),
    (at("keys", [[1], [2, 3]]), "tokens", "[[1], [2, 3]] (list)"),
    (at("keys", [1, 2, 3, 4], "root"), "parent", "'root' (str)"),
    (at("keys", [1, 2, 3, 4], None), "parent", "None"),
    (at("tail_key", [1], 7), "parent", "7 (int)"),
    (lambda: exact_chain("s" * 32, [1], 1), "salt", "'sss"),  # type: ignore[arg-type]
    (lambda: exact_chain(SALT, [1], 0), "chunk_tokens", "0"),
    (lambda: exact_chain(SALT, [1], 1.0), "chunk_tokens", "1.0 (float)"),  # type: ignore[arg-type]
    (lambda: exact_key(SALT, KEY, [1], ["image"]), "extra_keys[0]", "'image' (str)"),  # type: ignore[list-item]
    (lambda: derived_key(SALT, "manifest", [1]), "manifest", "'manifest' (str)"),  # type: ignore[arg-type]
    # the engine's path
    *(
        case
        for call in ("match", "read", "write")
        for case in (
            (at(call, None), "keys", "None"),
            (at(call, "k"), "keys", "'k' (str)"),
            (at(call, b"k"), "keys", "b'k' (bytes)"),
            (at(call, 5), "keys", "5 (int)"),
            (at(call, {KEY}), "keys", "{b'k'} (set)"),
            (at(call, [KEY, "k"]), "keys[1]", "'k' (str)"),
            (at(call, [None]), "keys[0]", "None"),
            (at(call, [bytearray(b"k")]), "keys[0]", "bytearray(b'k') (bytearray)"),
            (at(call, [[KEY]]), "keys[0]", "[b'k'] (list)"),
        )
    ),
    (at("match", [KEY], token_count=1.5), "token_count", "1.5 (float)"),
    (at("read", [KEY], shards=0), "shards", "0 (int)"),
    (at("read", [KEY], shards=["0"]), "shards[0]", "'0' (str)"),
    (at("read", [KEY], wait_ms=0.5), "wait_ms", "0.5 (float)"),
    (at("read", [KEY], wait_ms=None), "wait_ms", "None"),
    (at("read", [KEY], ttl_ms="10"), "ttl_ms", "'10' (str)"),
    (at("read", [KEY], any_order="no"), "any_order", "'no' (str)"),
    (at("read", [KEY], promote="no"), "promote", "'no' (str)"),
    (at("read", [KEY], verify="all"), "verify", "'all' (str)"),
    (at("read", [KEY], timeout_s="1"), "timeout_s", "'1' (str)"),
    (at("write", [KEY], parent="p"), "parent", "'p' (str)"),
    (at("write", [KEY], parent=None), "parent", "None"),
    (at("write", [KEY], parents=KEY), "parents", "b'k' (bytes)"),
    (at("write", [KEY], parents=["p"]), "parents[0]", "'p' (str)"),
    (at("write", [KEY], token_counts=4), "token_counts", "4 (int)"),
    (at("write", [KEY], token_counts=[4.0]), "token_counts[0]", "4.0 (float)"),
    (at("write", [KEY], token_counts=[5]), "token_counts", "5"),
    (at("write", [KEY], derived=None), "derived", "None"),
    (at("write", [KEY], maker="m" * 16), "maker", "'mmmm"),
    (at("write", [KEY], maker=None), "maker", "None"),
    (at("write", [KEY], staged="yes"), "staged", "'yes' (str)"),
    (lambda: batch().buffer("0"), "index", "'0' (str)"),
    (lambda: batch().buffer(None), "index", "None"),
    (lambda: batch().buffer(0, "kv"), "shard", "'kv' (str)"),
    (lambda: batch().copy_from(0, None), "source", "NoneType"),
    (lambda: batch().copy_from(0, [0] * 64), "source", "list"),
    (lambda: batch().copy_many(None), "pieces", "None"),
    (lambda: batch().copy_many([(0, ROW)]), "pieces[0]", "(0, array("),
    (lambda: batch().written(0.0), "index", "0.0 (float)"),
    (lambda: batch().commit(wait="durable"), "wait", "'durable' (str)"),
    (lambda: batch().commit(timeout_s="1"), "timeout_s", "'1' (str)"),
    (lambda: batch(staged=False).fill(b"memory", [0]), "region", "b'memory' (bytes)"),
    (lambda: lease().copy_to("0", ROW), "index", "'0' (str)"),
    (lambda: lease().copy_to(0, None), "out", "NoneType"),
    (lambda: lease().copy_to(0, ROW, shard="kv"), "shard", "'kv' (str)"),
    (lambda: lease().copy_to(0, ROW, layer=0.5), "layer", "0.5 (float)"),
    (lambda: lease().copy_to(0, ROW, offset="0"), "offset", "'0' (str)"),
    (lambda: lease().copy_many([(0, 0, ROW)]), "pieces[0]", "(0, 0, array("),
    (lambda: lease().copy_many([(0, 0, None, ROW)]), "offset", "None"),
    (lambda: lease().unsafe_view(None), "index", "None"),
    # sessions
    (at("get_session", None), "name", "None"),
    (at("get_session", 7), "name", "7 (int)"),
    (at("get_session", "\ud800"), "name", "\\ud800"),
    (at("fork", "s", ["t"]), "new_name", "['t'] (list)"),
    (at("forget", 7), "name", "7 (int)"),
    (at("forget", keys="k"), "keys", "'k' (str)"),
    (
        at("truncate", "s", expected_version="1", first_token=0, token_count=4),
        "expected_version",
        "'1' (str)",
    ),
    (at("truncate", "s", expected_version=1, first_token=0.0, token_count=4), "first_token", "0.0 (float)"),
    (
        at("truncate", "s", expected_version=1, first_token=0, token_count=4, close_gap="x"),
        "close_gap",
        "'x' (str)",
    ),
    (at("update_session", "s", expected_version=None, keep=0, append=[]), "expected_version", "None"),
    (at("update_session", "s", expected_version=0, keep=0.5, append=[]), "keep", "0.5 (float)"),
    (at("update_session", "s", expected_version=0, keep=0, append=None), "append", "None"),
    (
        at("update_session", "s", expected_version=0, keep=0, append=[(KEY, 0, 4)]),
        "append[0]",
        "(b'k', 0, 4)",
    ),
    (entry(key="k"), "append[1]", "'k' (str)"),
    (entry(first_token=0.0), "append[1].first_token", "0.0 (float)"),
    (entry(token_count=None), "append[1].token_count", "None"),
    (entry(delta="1"), "append[1].delta", "'1' (str)"),
    (entry(approximate="no"), "append[1].approximate", "'no' (str)"),
    (at("report_duplicates", [KEY], None), "checksums", "None"),
    (at("report_duplicates", [KEY], ["7"]), "checksums[0]", "'7' (str)"),
    (at("report_duplicates", [KEY], [7], shards=[0.0]), "shards[0]", "0.0 (float)"),
    # hints
    (at("publish_queue", None), "hints", "None"),
    (at("publish_queue", Hint(b"j", 0)), "hints", "Hint("),
    (at("publish_queue", [(b"j", 0)]), "hints[0]", "(b'j', 0) (tuple)"),
    (at("publish_queue", [], removed=b"j"), "removed", "b'j' (bytes)"),
    (at("publish_queue", [], removed=["j"]), "removed[0]", "'j' (str)"),
    (at("publish_queue", [], snapshot=None), "snapshot", "None"),
    (at("publish_queue", [], ttl_ms=1.5), "ttl_ms", "1.5 (float)"),
    (hint(job="j"), "hints[0].job", "'j' (str)"),
    (hint(position="0"), "hints[0].position", "'0' (str)"),
    (hint(position=0.0), "hints[0].position", "0.0 (float)"),
    (hint(session=None), "hints[0].session", "None"),
    (hint(session=7), "hints[0].session", "7 (int)"),
    (hint(keys=None), "hints[0].keys", "None"),
    (hint(keys=["k"]), "hints[0].keys[0]", "'k' (str)"),
]


@pytest.mark.parametrize(
    ("call", "field", "value"), CASES, ids=[f"{n} {case[1]}" for n, case in enumerate(CASES)]
)
def test_a_wrong_type_is_named(call: Callable[[], Any], field: str, value: str) -> None:
    with pytest.raises(BadRequest) as error:
        call()
    assert error.value.field == field
    assert error.value.value.startswith(value), error.value.value
    assert f"{field}={value}" in str(error.value) and error.value.message


AWAITED: list[Case] = [
    (lambda: AsyncNamespace(space()).read(None), "keys", "None"),  # type: ignore[arg-type]
    (lambda: AsyncNamespace(space()).publish_queue("jobs"), "hints", "'jobs' (str)"),  # type: ignore[arg-type]
    (lambda: AsyncReadLease(lease()).copy_to(0, None), "out", "NoneType"),
    (lambda: AsyncReadLease(lease()).copy_many(None), "pieces", "None"),  # type: ignore[arg-type]
    (lambda: AsyncWriteBatch(batch()).copy_from(0, "text"), "source", "str"),
    (lambda: AsyncWriteBatch(batch()).copy_many([3]), "pieces[0]", "3 (int)"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("call", "field", "value"), AWAITED, ids=[case[1] for case in AWAITED])
def test_a_wrong_type_is_named_by_the_awaitable_client(
    call: Callable[[], Any], field: str, value: str
) -> None:
    with pytest.raises(BadRequest) as error:
        asyncio.run(call())
    assert (error.value.field, error.value.value[: len(value)]) == (field, value)


def test_numpy_s_numbers_lists_and_views_are_as_good() -> None:
    """Whatever else counts as a whole number, or as several things in an order."""
    made = space()
    one = np.int64(1)
    numbers = NamespaceSpec("m", b"w", "l", np.int32(4), [GroupSpec("kv", np.int64(64), np.int8(1))])  # type: ignore[arg-type]
    numbers.validate()
    assert numbers == NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 64),))
    assert numbers.digest("t") == NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 64),)).digest("t")
    assert made.match({KEY: 1}.keys(), token_count=one).usable == 0
    assert (
        made.read((KEY,), shards=np.array([0]), wait_ms=one, any_order=np.bool_(True), timeout_s=one).hits
        == 0
    )
    assert not made.write([KEY], token_counts=np.array([4]), derived=np.bool_(False)).granted
    assert made.keys(np.arange(8)) == made.keys(tuple(range(8))) == made.keys(list(np.arange(8)))
    saved = batch()
    saved.copy_many(iter([(np.int64(0), np.int64(0), ROW)]))
    assert saved.commit(wait=np.int64(0)).ok
    request = queue_request([Hint(b"j", one, session="talk")], removed=(), snapshot=True, ttl_ms=one)  # type: ignore[arg-type]
    assert (request.hints[0].position, request.hints[0].session, request.ttl_ms) == (1, b"talk", 1)
