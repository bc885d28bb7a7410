"""Proto <-> the nouns of types.py, layout.py and errors.py and those of answers.py, both ways.

Used by the daemon and by the client, so that each conversion stands once. Nothing here does I/O. Results
travel as one byte per key; a byte that this build does not know (a newer peer) reads as the answer that
promises least: MISS, NONE, FULL, WAITING_FOR_SHARDS.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.answers import (
    Acquired,
    Answer,
    Committed,
    Done,
    Explained,
    Filled,
    Matched,
    Opened,
    QuarantineList,
    QueueAccepted,
    Recalled,
    Renewed,
    Reserved,
    Scrubbed,
    SessionInfo,
    SessionList,
)
from kvstore.errors import BY_CODE, BadRequest, StoreError, Unavailable, Unsupported
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import (
    ChunkKey,
    CommitResult,
    Extent,
    Extents,
    GrantResult,
    HintResult,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    SessionEntries,
    SessionEntry,
)
from kvstore.v1 import admin_pb2, hints_pb2, stats_pb2, store_pb2, types_pb2
from kvstore.wire import repeated

ERROR_METADATA = "kvstore-error-bin"
"""Trailing metadata of a failed unary call: a serialised `Error`."""
TOKEN_METADATA = "kvstore-token-bin"
"""Request metadata of a unary call: the token of the descriptor socket's hello."""

LITTLE_ENDIAN = sys.byteorder == "little"

LANE_PREFIX_BYTES = 4
"""Before each message on a fast lane: its length, u32 little-endian."""

ENTRIES_MIN = 128
"""From so many entries of a session on they are encoded together."""

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """`data` as a message; raises BadRequest where gRPC would say only "exception deserializing"."""
    try:
        return kind.FromString(data)
    except DecodeError as problem:
        raise BadRequest(
            f"is not a valid {kind.DESCRIPTOR.name}: {problem}",
            field="message",
            value=f"{len(data)} bytes",
            remedy="text fields must be UTF-8; use stubs generated from this version of proto/",
        ) from None


def lane_frame(data: bytes) -> bytes:
    """A serialised message as it goes over a fast lane."""
    return len(data).to_bytes(LANE_PREFIX_BYTES, "little") + data


# ------------------------------------------------------------------------------------------------- namespaces


def spec_to_proto(spec: NamespaceSpec) -> types_pb2.Namespace:
    """Call `spec.validate()` before: a number that does not fit its field is a ValueError here."""
    return types_pb2.Namespace(
        model=spec.model,
        weights_digest=spec.weights_digest,
        weights_epoch=spec.weights_epoch,
        adapter_digest=spec.adapter_digest,
        kv_scales_digest=spec.kv_scales_digest,
        layout_fingerprint=spec.layout_fingerprint,
        hash_protocol=spec.hash_protocol,
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        context_parallel=spec.context_parallel,
        chunk_tokens=spec.chunk_tokens,
        groups=[
            types_pb2.Group(
                name=group.name,
                kind=group.kind.value,
                shard_bytes=group.shard_bytes,
                shard_count=group.shard_count,
                layers=[
                    types_pb2.LayerSlice(layer=piece.layer, offset=piece.offset, length=piece.length)
                    for piece in group.layers
                ],
                position_rule=group.position_rule,
            )
            for group in spec.groups
        ],
        salt=spec.salt,
    )


def spec_from_proto(message: types_pb2.Namespace) -> NamespaceSpec:
    """Not validated, except that an unknown group kind is Unsupported; the receiver calls `validate()`. What was not
    sent and has a default has it: one shard, one rank, full attention."""
    return NamespaceSpec(
        model=message.model,
        weights_digest=message.weights_digest,
        weights_epoch=message.weights_epoch,
        adapter_digest=message.adapter_digest,
        kv_scales_digest=message.kv_scales_digest,
        layout_fingerprint=message.layout_fingerprint,
        hash_protocol=message.hash_protocol,
        tensor_parallel=message.tensor_parallel or 1,
        pipeline_parallel=message.pipeline_parallel or 1,
        context_parallel=message.context_parallel or 1,
        chunk_tokens=message.chunk_tokens,
        groups=tuple(_group_from_proto(group, index) for index, group in enumerate(message.groups)),
        salt=message.salt,
    )


def _group_from_proto(message: types_pb2.Group, index: int) -> GroupSpec:
    try:
        kind = GroupKind(message.kind or GroupKind.FULL.value)
    except ValueError:
        raise Unsupported(
            "no such kind of group",
            field=f"namespace.groups[{index}].kind",
            value=message.kind,
            remedy="known: " + ", ".join(item.value for item in GroupKind),
        ) from None
    return GroupSpec(
        name=message.name,
        kind=kind,
        shard_bytes=message.shard_bytes,
        shard_count=message.shard_count or 1,
        layers=tuple(LayerSlice(piece.layer, piece.offset, piece.length) for piece in message.layers),
        position_rule=message.position_rule,
    )


# ---------------------------------------------------------------------------------------------------- extents


def extents_to_proto(extents: Sequence[Extent], *, packed: bool = False) -> types_pb2.Extents:
    """`packed`: for a reader that asked for it (`packed_extents`)."""
    columns = Extents.of(extents)
    if packed:
        ordered = columns.columns if LITTLE_ENDIAN else map(_swapped, columns.columns)
        return types_pb2.Extents(packed=b"".join(ordered))
    return types_pb2.Extents(
        segment=columns.segment,
        offset=columns.offset,
        length=columns.length,
        cell=columns.cell,
        generation=columns.generation,
        checksum=columns.checksum,
    )


def _swapped(column: array[int]) -> array[int]:
    swapped = column[:]
    swapped.byteswap()
    return swapped


def extents_from_proto(message: types_pb2.Extents) -> Extents:
    """Raises StoreError (INTERNAL) when the columns differ in length."""
    packed = message.packed
    if packed:
        if len(packed) % (6 * 8):
            raise StoreError("is not six columns of u64", field="extents.packed", value=len(packed))
        whole = array("Q", packed) if LITTLE_ENDIAN else _swapped(array("Q", packed))
        n = len(whole) // 6
        return Extents(
            whole[:n],
            whole[n : 2 * n],
            whole[2 * n : 3 * n],
            whole[3 * n : 4 * n],
            whole[4 * n : 5 * n],
            whole[5 * n :],
        )
    columns = (
        message.segment,
        message.offset,
        message.length,
        message.cell,
        message.generation,
        message.checksum,
    )
    if len({len(column) for column in columns}) != 1:
        raise StoreError(
            "the columns of an Extents message differ in length", field="extents", value=[*map(len, columns)]
        )
    return Extents(*(array("Q", column) for column in columns))


# ---------------------------------------------------------------------------------------- results of one byte


E = TypeVar("E", Outcome, Reason, GrantResult, CommitResult, HintResult)


def _table(kind: type[E], unknown: E) -> list[E]:
    known = {item.value: item for item in kind}
    return [known.get(byte, unknown) for byte in range(256)]


_OUTCOMES = _table(Outcome, Outcome.MISS)
_REASONS = _table(Reason, Reason.NONE)
_GRANTS = _table(GrantResult, GrantResult.FULL)
_HINTS = _table(HintResult, HintResult.REJECTED)
_COMMITS = _table(CommitResult, CommitResult.WAITING_FOR_SHARDS)


def outcomes_from_bytes(data: bytes) -> tuple[Outcome, ...]:
    return tuple(map(_OUTCOMES.__getitem__, data))


def reasons_from_bytes(data: bytes) -> tuple[Reason, ...]:
    return tuple(map(_REASONS.__getitem__, data))


# ----------------------------------------------------------------------------------------------------- errors


def error_to_proto(error: StoreError) -> types_pb2.Error:
    return types_pb2.Error(
        code=error.code.value,
        message=_clean(error.message),
        field=_clean(error.field),
        value=error.value,
        remedy=_clean(error.remedy),
    )


def error_from_proto(message: types_pb2.Error) -> StoreError:
    return _error_of(message.code)(
        message.message, field=message.field, value=message.value, remedy=message.remedy
    )


def error_metadata(error: StoreError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for a unary call that is answered with `error`."""
    return ((ERROR_METADATA, error_to_proto(error).SerializeToString()),)


def error_from_status(code: int, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> StoreError:
    """The error of a failed call: what `error_metadata` carried, else (gRPC failed) the status alone."""
    for key, value in metadata:
        if key == ERROR_METADATA and isinstance(value, bytes):
            try:
                return error_from_proto(types_pb2.Error.FromString(value))
            except DecodeError:
                break
    return _error_of(code)(details or f"gRPC status {code}")


_CANCELLED = 1
"""gRPC's status for a call that was cut off from either end; to a caller the same as an absent daemon."""


def _error_of(code: int) -> type[StoreError]:
    return Unavailable if code == _CANCELLED else BY_CODE.get(code, StoreError)


def _clean(text: str) -> str:
    """A text field must be UTF-8; lone surrogates come from undecodable file names and the like."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# ---------------------------------------------------------------------------------------------------- answers


def opened_to_proto(answer: Opened) -> store_pb2.OpenReply:
    return store_pb2.OpenReply(
        namespace_id=answer.namespace,
        salt=answer.salt,
        weights_epoch=answer.epoch,
        segment_bytes=answer.segment_bytes,
        notes=[_clean(note) for note in answer.notes],
    )


def opened_from_proto(message: store_pb2.OpenReply) -> Opened:
    return Opened(
        namespace=NamespaceId(message.namespace_id),
        salt=message.salt,
        epoch=message.weights_epoch,
        segment_bytes=message.segment_bytes,
        notes=tuple(message.notes),
    )


def matched_to_proto(answer: Matched) -> store_pb2.MatchReply:
    return store_pb2.MatchReply(
        usable=answer.usable, outcomes=bytes(answer.outcomes), reasons=bytes(answer.reasons)
    )


def matched_from_proto(message: store_pb2.MatchReply) -> Matched:
    return Matched(
        usable=message.usable,
        outcomes=outcomes_from_bytes(message.outcomes),
        reasons=reasons_from_bytes(message.reasons),
    )


def acquired_to_proto(answer: Acquired, *, packed: bool = False) -> store_pb2.AcquireReply:
    return store_pb2.AcquireReply(
        lease_id=answer.lease,
        ttl_ms=answer.ttl_ms,
        outcomes=bytes(answer.outcomes),
        reasons=bytes(answer.reasons),
        extents=extents_to_proto(answer.extents, packed=packed),
    )


def acquired_from_proto(message: store_pb2.AcquireReply) -> Acquired:
    return Acquired(
        lease=LeaseId(message.lease_id),
        ttl_ms=message.ttl_ms,
        outcomes=outcomes_from_bytes(message.outcomes),
        reasons=reasons_from_bytes(message.reasons),
        extents=extents_from_proto(message.extents),
    )


def renewed_to_proto(answer: Renewed) -> store_pb2.RenewReply:
    return store_pb2.RenewReply(ttl_ms=answer.ttl_ms)


def renewed_from_proto(message: store_pb2.RenewReply) -> Renewed:
    return Renewed(ttl_ms=tuple(message.ttl_ms))


def reserved_to_proto(answer: Reserved, *, packed: bool = False) -> store_pb2.ReserveReply:
    return store_pb2.ReserveReply(
        reservation_id=answer.reservation,
        ttl_ms=answer.ttl_ms,
        results=bytes(answer.results),
        extents=extents_to_proto(answer.extents, packed=packed),
    )


def reserved_from_proto(message: store_pb2.ReserveReply) -> Reserved:
    return Reserved(
        reservation=ReservationId(message.reservation_id),
        ttl_ms=message.ttl_ms,
        results=tuple(map(_GRANTS.__getitem__, message.results)),
        extents=extents_from_proto(message.extents),
    )


def queue_to_proto(answer: QueueAccepted) -> hints_pb2.QueueReply:
    return hints_pb2.QueueReply(
        results=bytes(answer.results),
        prefetch_window=answer.prefetch_window,
        eviction_window=answer.eviction_window,
    )


def queue_from_proto(message: hints_pb2.QueueReply) -> QueueAccepted:
    return QueueAccepted(
        results=tuple(map(_HINTS.__getitem__, message.results)),
        prefetch_window=message.prefetch_window,
        eviction_window=message.eviction_window,
    )


def filled_to_proto(_: Filled) -> store_pb2.FillReply:
    return store_pb2.FillReply()


def filled_from_proto(_: store_pb2.FillReply) -> Filled:
    return Filled()


def committed_to_proto(answer: Committed) -> store_pb2.CommitReply:
    return store_pb2.CommitReply(results=bytes(answer.results))


def committed_from_proto(message: store_pb2.CommitReply) -> Committed:
    return Committed(results=tuple(map(_COMMITS.__getitem__, message.results)))


def entries_to_proto(entries: Iterable[SessionEntry]) -> list[store_pb2.SessionEntry]:
    return [
        store_pb2.SessionEntry(
            key=entry.key,
            first_token=entry.first_token,
            token_count=entry.token_count,
            delta=entry.delta,
            approximate=entry.approximate,
        )
        for entry in entries
    ]


def entries_from_proto(messages: Iterable[store_pb2.SessionEntry]) -> tuple[SessionEntry, ...]:
    return tuple(
        SessionEntry(
            key=ChunkKey(message.key),
            first_token=message.first_token,
            token_count=message.token_count,
            delta=message.delta,
            approximate=message.approximate,
        )
        for message in messages
    )


def session_to_proto(
    answer: SessionInfo, reply: store_pb2.SessionReply | None = None
) -> store_pb2.SessionReply:
    """`reply`: to be filled, where it is part of another message: a long one is not copied there then."""
    if reply is None:
        reply = store_pb2.SessionReply()
    reply.session, reply.version, reply.usable = answer.session, answer.version, answer.usable
    reply.entries_forgotten = answer.entries_forgotten
    if isinstance(answer.entries, SessionEntries) and len(answer.entries) >= ENTRIES_MIN:
        reply.MergeFromString(repeated.session_entries(answer.entries))
    else:
        reply.entries.extend(entries_to_proto(answer.entries))
    return reply


def session_from_proto(message: store_pb2.SessionReply) -> SessionInfo:
    return SessionInfo(
        session=message.session,
        version=message.version,
        entries=entries_from_proto(message.entries),
        usable=message.usable,
        entries_forgotten=message.entries_forgotten,
    )


def done_to_proto(answer: Done) -> store_pb2.DoneReply:
    return store_pb2.DoneReply(count=answer.count, not_durable=answer.not_durable)


def done_from_proto(message: store_pb2.DoneReply) -> Done:
    return Done(count=message.count, not_durable=message.not_durable)


def sessions_to_proto(answer: SessionList) -> stats_pb2.ListSessionsReply:
    return stats_pb2.ListSessionsReply(
        rows=[
            stats_pb2.SessionRow(
                session=row.session,
                tenant=row.tenant,
                namespace_id=row.namespace,
                version=row.version,
                entry_count=row.entry_count,
                token_count=row.token_count,
                usable=row.usable,
                resident_bytes=row.resident_bytes,
                idle_ms=row.idle_ms,
                bytes=row.bytes,
                ssd_bytes=row.ssd_bytes,
                reason=row.reason,
            )
            for row in answer.rows
        ],
        total=answer.total,
    )


def explained_to_proto(answer: Explained) -> stats_pb2.ExplainReply:
    return stats_pb2.ExplainReply(
        version=answer.version,
        chunks=[
            stats_pb2.ChunkHistory(
                key=chunk.key,
                outcome=chunk.outcome,
                reason=chunk.reason,
                token_count=chunk.token_count,
                shards_ready=chunk.shards_ready,
                shards=chunk.shards,
                pins=chunk.pins,
                hits=chunk.hits,
                age_ms=chunk.age_ms,
                idle_ms=chunk.idle_ms,
                manifests=chunk.manifests,
                derived=chunk.derived,
                maker=chunk.maker,
                bytes=chunk.bytes,
                tiers=sum(1 << tier for tier in chunk.tiers),
                moving=chunk.moving,
                durable=chunk.durable,
                needed=chunk.needed,
            )
            for chunk in answer.chunks
        ],
    )


def scrubbed_to_proto(answer: Scrubbed) -> admin_pb2.ScrubReply:
    return admin_pb2.ScrubReply(
        round=answer.round,
        running=answer.running,
        asked_for=answer.asked_for,
        age_ms=answer.age_ms,
        rows=answer.rows,
        rows_in_all=answer.rows_in_all,
        chunks=answer.chunks,
        bytes=answer.bytes,
        corrupt=answer.corrupt,
        failed=answer.failed,
        bytes_per_s=answer.bytes_per_s,
        finished=answer.finished,
        waits_for=answer.waits_for,
    )


def quarantine_to_proto(answer: QuarantineList) -> admin_pb2.ListQuarantineReply:
    return admin_pb2.ListQuarantineReply(
        rows=[
            admin_pb2.QuarantinedSlot(
                tier=row.tier.name.lower(),
                place=row.place,
                slot=row.slot,
                slot_bytes=row.slot_bytes,
                namespace_id=row.namespace,
                key=row.key,
                reason=row.reason,
                age_ms=row.age_ms,
                next=row.next,
            )
            for row in answer.rows
        ],
        dram=answer.dram,
        ssd=answer.ssd,
        returned=answer.returned,
        failed=answer.failed,
    )


def recalled_to_proto(answer: Recalled) -> admin_pb2.RecallReply:
    return admin_pb2.RecallReply(
        chunks=answer.chunks,
        bytes=answer.bytes,
        pinned=answer.pinned,
        sessions=[
            admin_pb2.RecalledSession(
                session=row.session,
                tenant=row.tenant,
                namespace_id=row.namespace,
                version=row.version,
                entry=row.entry,
                first_token=max(0, row.first_token),
            )
            for row in answer.sessions
        ],
        sessions_in_all=answer.sessions_in_all,
    )


_ATTACH: dict[type[Any], tuple[str, Any, Any]] = {
    Opened: ("open", opened_to_proto, opened_from_proto),
    Matched: ("match", matched_to_proto, matched_from_proto),
    Acquired: ("acquire", acquired_to_proto, acquired_from_proto),
    Renewed: ("renew", renewed_to_proto, renewed_from_proto),
    Reserved: ("reserve", reserved_to_proto, reserved_from_proto),
    Filled: ("fill", filled_to_proto, filled_from_proto),
    Committed: ("commit", committed_to_proto, committed_from_proto),
    SessionInfo: ("session", session_to_proto, session_from_proto),
    QueueAccepted: ("queue", queue_to_proto, queue_from_proto),
    Done: ("done", done_to_proto, done_from_proto),
}
_FROM_ATTACH = {field: convert for field, _, convert in _ATTACH.values()}


def attach_reply(request_id: int, answer: Answer, *, packed: bool = False) -> store_pb2.AttachReply:
    """`answer` (a StoreError too) as the reply on the Attach stream to request `request_id`; `packed`: its extents."""
    if isinstance(answer, StoreError):
        return store_pb2.AttachReply(request_id=request_id, error=error_to_proto(answer))
    if isinstance(answer, SessionInfo):
        reply = store_pb2.AttachReply(request_id=request_id)
        reply.session.SetInParent()
        session_to_proto(answer, reply.session)
        return reply
    field, convert, _ = _ATTACH[type(answer)]
    body = convert(answer, packed=True) if packed else convert(answer)
    return store_pb2.AttachReply(request_id=request_id, **{field: body})


def answer_of(reply: store_pb2.AttachReply) -> Answer:
    """The answer inside a reply that is not a push (a StoreError is returned, not raised).

    Raises StoreError (INTERNAL) for a body that this build does not know.
    """
    field = reply.WhichOneof("body")
    if field == "error":
        return error_from_proto(reply.error)
    convert = _FROM_ATTACH.get(field or "")
    if convert is None:
        raise StoreError("unknown answer on the Attach stream", field="body", value=field)
    answer: Answer = convert(getattr(reply, field))
    return answer
