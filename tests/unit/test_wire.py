"""Both directions of every conversion, and what a newer or hostile peer may send."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from kvstore import errors, wire
from kvstore.core import events
from kvstore.errors import BadRequest
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec
from kvstore.transport import decoding
from kvstore.types import (
    ChunkKey,
    CommitResult,
    Extent,
    GrantResult,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    SegmentId,
)
from kvstore.v1 import store_pb2, types_pb2
from kvstore.wire import repeated

SPEC = NamespaceSpec(
    model="llama",
    weights_digest=b"w" * 32,
    layout_fingerprint="hf/k,v:[H,T,D]:float32",
    chunk_tokens=64,
    groups=(
        GroupSpec("full", 4096, shard_count=2, layers=(LayerSlice(0, 0, 2048), LayerSlice(3, 2048, 2048))),
        GroupSpec("mla", 512, kind=GroupKind.LATENT, position_rule="none"),
    ),
    weights_epoch=7,
    adapter_digest=b"a",
    kv_scales_digest=b"s",
    hash_protocol="vllm",
    tensor_parallel=2,
    pipeline_parallel=3,
    context_parallel=4,
    salt=b"pepper",
)
EXTENTS = (
    Extent(SegmentId(1), 0, 4096, 0, 1, 2**64 - 1),
    Extent(SegmentId(2**32 - 1), 1 << 40, 512, 9, 2**63, 0),
)
ENTRY = events.SessionEntry(ChunkKey(b"k"), 64, 64, delta=-128, approximate=True)
ANSWERS: list[Any] = [
    events.Opened(NamespaceId(3), b"x" * 32, 7, 1 << 30, ("weights_epoch: 6 != 7",)),
    events.Matched(1, (Outcome.HIT, Outcome.MISS), (Reason.NONE, Reason.EVICTED)),
    events.Matched(0, (Outcome.PENDING,), (Reason.ON_SSD,), events.Backlog(1, 1 << 40, 0)),
    events.Acquired(
        LeaseId(2**63), 10_000, (Outcome.HIT, Outcome.PENDING), (Reason.NONE, Reason.BEING_SAVED), EXTENTS
    ),
    events.Acquired(
        LeaseId(0), 0, (Outcome.PENDING,), (Reason.ON_SSD,), (), events.Backlog(4096, 0, 2 << 30)
    ),
    events.Renewed((10_000, 0)),
    events.Reserved(ReservationId(9), 30_000, (GrantResult.GRANTED, GrantResult.QUOTA), EXTENTS),
    events.Committed((CommitResult.VISIBLE, CommitResult.WAITING_FOR_SHARDS, CommitResult.ALREADY)),
    events.SessionInfo(b"s\xff", 2, (ENTRY,), 1),
    events.Done(5),
]


def test_a_namespace_survives_the_wire_whole() -> None:
    message = types_pb2.Namespace.FromString(wire.spec_to_proto(SPEC).SerializeToString())
    assert wire.spec_from_proto(message) == SPEC
    assert set(SPEC.__dataclass_fields__) == {field.name for field in types_pb2.Namespace.DESCRIPTOR.fields}


def test_an_unknown_group_kind_is_named() -> None:
    message = wire.spec_to_proto(SPEC)
    message.groups[1].kind = "hologram"
    with pytest.raises(errors.Unsupported, match=r"namespace\.groups\[1\]\.kind=hologram") as caught:
        wire.spec_from_proto(message)
    assert "latent" in caught.value.remedy


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_survives_the_wire_whole(answer: Any) -> None:
    data = wire.attach_reply(2**63, answer).SerializeToString()
    reply = store_pb2.AttachReply.FromString(data)
    assert reply.request_id == 2**63
    assert wire.answer_of(reply) == answer


@pytest.mark.parametrize("count", [0, 1, 127, 128, repeated.TOGETHER + 1, 3 * repeated.TOGETHER])
def test_entries_in_columns_are_on_the_wire_what_objects_are(count: int) -> None:
    """To the last byte: numbers of all lengths, 0 left out, keys of all lengths, negative deltas."""
    dice = random.Random(count)
    tokens = (0, 1, 127, 128, 1 << 20)
    deltas = (0, -1, 1, 63, 64, -64, -65, 1 << 40, -(1 << 40))
    columns = events.SessionEntries(
        [ChunkKey(dice.randbytes(dice.choice((0, 1, 32, 63, 64)))) for _ in range(count)],
        array("q", [dice.choice((0, 1, 127, 128, place, 1 << 40)) for place in range(count)]),
        array("i", [dice.choice(tokens) for _ in range(count)]),
        array("q", [dice.choice(deltas) for _ in range(count)]),
        bytearray(dice.choice((0, 1)) for _ in range(count)),
    )
    objects = tuple(columns)
    assert repeated.session_entries(columns) == (
        store_pb2.SessionReply(entries=wire.entries_to_proto(objects)).SerializeToString()
    )
    answer = events.SessionInfo(b"s", 3, columns, 2)
    reply = store_pb2.AttachReply.FromString(wire.attach_reply(7, answer).SerializeToString())
    assert wire.answer_of(reply) == answer == events.SessionInfo(b"s", 3, objects, 2)


def test_entries_in_columns_read_like_a_tuple() -> None:
    objects = tuple(events.SessionEntry(ChunkKey(b"%d" % n), n, 2, -n, n == 2) for n in range(4))
    keys, first, count, delta, approximate = zip(
        *((e.key, e.first_token, e.token_count, e.delta, e.approximate) for e in objects), strict=True
    )
    columns = events.SessionEntries(
        list(keys), array("q", first), array("i", count), array("q", delta), bytearray(approximate)
    )
    assert (len(columns), columns[2], columns[-1]) == (4, objects[2], objects[3])
    assert tuple(columns) == objects == columns != objects[:3]
    assert columns != columns[:3] == objects[:3]
    assert columns[2].approximate is True


def test_bytes_of_a_newer_peer_read_as_the_least_promise() -> None:
    matched = wire.matched_from_proto(store_pb2.MatchReply(outcomes=b"\x00\xee", reasons=b"\x00\xee"))
    assert matched.outcomes == (Outcome.HIT, Outcome.MISS)
    assert matched.reasons == (Reason.NONE, Reason.NONE)
    assert wire.reserved_from_proto(store_pb2.ReserveReply(results=b"\xee")).results == (GrantResult.FULL,)
    committed = wire.committed_from_proto(store_pb2.CommitReply(results=b"\xee"))
    assert committed.results == (CommitResult.WAITING_FOR_SHARDS,)


def test_ragged_extents_are_refused() -> None:
    message = wire.extents_to_proto(EXTENTS)
    message.checksum.pop()
    with pytest.raises(errors.StoreError, match="extents"):
        wire.extents_from_proto(message)


@pytest.mark.parametrize("kind", list(errors.BY_CODE.values()))
def test_an_error_keeps_its_class_and_parts(kind: type[errors.StoreError]) -> None:
    error = kind("is wrong", field="keys[3]", value=b"\x01\x02", remedy="send less")
    back = wire.answer_of(wire.attach_reply(1, error))
    assert type(back) is kind
    assert isinstance(back, errors.StoreError)
    assert (str(back), back.field, back.value, back.remedy) == (str(error), "keys[3]", "0102", "send less")

    unary = wire.error_from_status(error.code.value, "cut", wire.error_metadata(error))
    assert type(unary) is kind
    assert str(unary) == str(error)


def test_a_status_without_our_metadata_still_has_a_class() -> None:
    assert type(wire.error_from_status(14, "no route", ())) is errors.Unavailable
    assert type(wire.error_from_status(1, "cancelled", ())) is errors.Unavailable
    assert type(wire.error_from_status(4, "", ())) is errors.DeadlineExceeded
    unknown = wire.error_from_status(2, "", ((wire.ERROR_METADATA, b"\xff\xff"),))
    assert type(unknown) is errors.StoreError
    assert str(unknown) == "gRPC status 2"


def test_an_error_with_unencodable_text_can_be_sent() -> None:
    back = wire.answer_of(wire.attach_reply(1, errors.NotFound("no \udcff file", field="\udcfe")))
    assert str(back) == "\\udcfe: no \\udcff file"


def test_an_unknown_answer_is_an_error_of_ours() -> None:
    with pytest.raises(errors.StoreError, match="body="):
        wire.answer_of(store_pb2.AttachReply(request_id=1))


def test_broken_messages_are_bad_requests() -> None:
    assert wire.parse(store_pb2.MatchRequest, b"") == store_pb2.MatchRequest()
    # field 2 of Error is text: two bytes that are no UTF-8
    with pytest.raises(errors.BadRequest, match="not a valid Error"):
        wire.parse(types_pb2.Error, b"\x12\x02\xff\xfe")
    with pytest.raises(errors.BadRequest, match="not a valid MatchRequest"):
        wire.parse(store_pb2.MatchRequest, b"\x1a\xff")


def test_lists_for_the_operator() -> None:
    row = events.SessionRow(b"s", "alice", NamespaceId(1), 2, 3, 192, 3, 4096, 17)
    message = wire.sessions_to_proto(events.SessionList((row,), 12))
    assert (message.total, message.rows[0].tenant, message.rows[0].idle_ms) == (12, "alice", 17)
    chunk = events.ChunkHistory(
        ChunkKey(b"k"), Outcome.MISS, Reason.EVICTED, 64, 1, 2, 0, 4, 100, 50, 1, True, b"m" * 16
    )
    explained = wire.explained_to_proto(events.Explained(3, (chunk,)))
    assert explained.version == 3
    assert (explained.chunks[0].reason, explained.chunks[0].derived, explained.chunks[0].shards) == (
        2,
        True,
        2,
    )


MINIMAL = types_pb2.Namespace(
    model="m",
    weights_digest=b"w",
    layout_fingerprint="l",
    hash_protocol="kvs.exact.v1",
    chunk_tokens=4,
    groups=[types_pb2.Group(name="kv", shard_bytes=64, position_rule="rope")],
)
"""What other languages must send: they have no defaults but protobuf's."""


def test_what_was_not_sent_has_the_defaults_of_a_spec():
    spec = wire.spec_from_proto(MINIMAL)
    spec.validate()
    assert spec == NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 64),))


@pytest.mark.parametrize(
    "field", ["model", "weights_digest", "layout_fingerprint", "hash_protocol", "chunk_tokens", "groups"]
)
def test_a_required_field_that_was_not_sent_is_named(field):
    message = types_pb2.Namespace()
    message.CopyFrom(MINIMAL)
    message.ClearField(field)
    with pytest.raises(BadRequest, match="it is missing") as error:
        wire.spec_from_proto(message).validate()
    assert error.value.field == f"namespace.{field}"


@pytest.mark.parametrize("field", ["name", "shard_bytes"])
def test_a_required_field_of_a_group_that_was_not_sent_is_named(field):
    message = types_pb2.Namespace()
    message.CopyFrom(MINIMAL)
    message.groups[0].ClearField(field)
    with pytest.raises(BadRequest, match="it is missing") as error:
        wire.spec_from_proto(message).validate()
    assert error.value.field == f"namespace.groups[0].{field}"


@pytest.mark.parametrize(
    ("call", "sent", "field"),
    [
        ("Open", {}, "namespace"),
        ("Match", {"keys": [b"k"]}, "namespace_id"),
        ("Match", {"namespace_id": 1}, "keys"),
        ("Acquire", {"namespace_id": 1}, "keys"),
        ("Reserve", {"keys": [b"k"]}, "namespace_id"),
        ("Fill", {}, "reservation_id"),
        ("Commit", {"staging_offsets": [0]}, "reservation_id"),
        ("GetSession", {"namespace_id": 1}, "session"),
        ("UpdateSession", {"session": b"s"}, "namespace_id"),
        ("UpdateSession", {"namespace_id": 1}, "session"),
        ("Truncate", {"namespace_id": 1}, "session"),
        ("Fork", {"namespace_id": 1, "session": b"s"}, "new_session"),
        ("Forget", {"session": b"s"}, "namespace_id"),
        ("PublishQueue", {"hints": [{"position": 1}], "namespace_id": 1}, "hints[0].job"),
        ("Recall", {}, "maker"),
    ],
)
def test_a_required_field_of_a_request_that_was_not_sent_is_named(call, sent, field):
    known = {**decoding.STORE_CALLS, **decoding.HINTS_CALLS, **decoding.ADMIN_CALLS}[call]
    with pytest.raises(BadRequest, match="missing") as error:
        known.event(known.request(**sent), events.Ticket(1))
    assert error.value.field == field
