"""What the store answers <-> proto, and ANSWERS: where each kind of answer stands in the replies of Attach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvstore.answers import (
    NO_BACKLOG,
    Acquired,
    ActionsApplied,
    Answer,
    Backlog,
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
    ResidentRanks,
    Saved,
    Scrubbed,
    SessionInfo,
    SessionList,
    SharedManifest,
    Standing,
)
from kvstore.errors import StoreError
from kvstore.types import (
    ChunkKey,
    HintState,
    LeaseId,
    NamespaceId,
    ReservationId,
    SessionEntries,
)
from kvstore.v1 import admin_pb2, hints_pb2, stats_pb2, store_pb2
from kvstore.wire import repeated
from kvstore.wire.errors import clean, error_from_proto, error_to_proto
from kvstore.wire.nouns import (
    commits_from_bytes,
    entries_from_proto,
    entries_to_proto,
    extents_from_proto,
    extents_to_proto,
    grants_from_bytes,
    hints_from_bytes,
    outcomes_from_bytes,
    reasons_from_bytes,
)

ENTRIES_MIN = 128
"""From so many entries of a session on they are encoded together."""


def opened_to_proto(answer: Opened) -> store_pb2.OpenReply:
    return store_pb2.OpenReply(
        namespace_id=answer.namespace,
        salt=answer.salt,
        weights_epoch=answer.epoch,
        segment_bytes=answer.segment_bytes,
        notes=[clean(note) for note in answer.notes],
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
        usable=answer.usable,
        outcomes=bytes(answer.outcomes),
        reasons=bytes(answer.reasons),
        backlog=_backlog_to_proto(answer.backlog),
    )


def matched_from_proto(message: store_pb2.MatchReply) -> Matched:
    return Matched(
        usable=message.usable,
        outcomes=outcomes_from_bytes(message.outcomes),
        reasons=reasons_from_bytes(message.reasons),
        backlog=_backlog_from_proto(message),
    )


def _backlog_to_proto(backlog: Backlog) -> store_pb2.Backlog | None:
    if backlog is NO_BACKLOG:
        return None
    return store_pb2.Backlog(
        ssd_bytes=backlog.ssd_bytes,
        ahead_bytes=backlog.ahead_bytes,
        ssd_bytes_per_s=backlog.ssd_bytes_per_s,
    )


def _backlog_from_proto(message: store_pb2.MatchReply | store_pb2.AcquireReply) -> Backlog:
    if not message.HasField("backlog"):
        return NO_BACKLOG
    told = message.backlog
    return Backlog(told.ssd_bytes, told.ahead_bytes, told.ssd_bytes_per_s)


def acquired_to_proto(answer: Acquired, *, packed: bool = False) -> store_pb2.AcquireReply:
    return store_pb2.AcquireReply(
        lease_id=answer.lease,
        ttl_ms=answer.ttl_ms,
        outcomes=bytes(answer.outcomes),
        reasons=bytes(answer.reasons),
        extents=extents_to_proto(answer.extents, packed=packed),
        backlog=_backlog_to_proto(answer.backlog),
    )


def acquired_from_proto(message: store_pb2.AcquireReply) -> Acquired:
    return Acquired(
        lease=LeaseId(message.lease_id),
        ttl_ms=message.ttl_ms,
        outcomes=outcomes_from_bytes(message.outcomes),
        reasons=reasons_from_bytes(message.reasons),
        extents=extents_from_proto(message.extents),
        backlog=_backlog_from_proto(message),
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
        results=grants_from_bytes(message.results),
        extents=extents_from_proto(message.extents),
    )


def queue_to_proto(answer: QueueAccepted) -> hints_pb2.QueueReply:
    return hints_pb2.QueueReply(
        results=bytes(answer.results),
        prefetch_window=answer.prefetch_window,
        eviction_window=answer.eviction_window,
        snapshot_wanted=answer.snapshot_wanted,
        namespaces=answer.namespaces,
    )


def queue_from_proto(message: hints_pb2.QueueReply) -> QueueAccepted:
    return QueueAccepted(
        results=hints_from_bytes(message.results),
        prefetch_window=message.prefetch_window,
        eviction_window=message.eviction_window,
        snapshot_wanted=message.snapshot_wanted,
        namespaces=tuple(map(NamespaceId, message.namespaces)),
    )


def actions_to_proto(answer: ActionsApplied) -> hints_pb2.ActionsReply:
    return hints_pb2.ActionsReply(
        results=bytes(answer.results), chunks=answer.chunks, namespaces=answer.namespaces
    )


def actions_from_proto(message: hints_pb2.ActionsReply) -> ActionsApplied:
    return ActionsApplied(
        hints_from_bytes(message.results), tuple(message.chunks), tuple(map(NamespaceId, message.namespaces))
    )


def _hint_states(states: Sequence[HintState]) -> list[hints_pb2.HintState]:
    return [
        hints_pb2.HintState(
            kind=f"ACTION_KIND_{state.kind.name}", ends_in_ms=state.ends_in_ms, due_in_ms=state.due_in_ms
        )
        for state in states
    ]


def filled_to_proto(_: Filled) -> store_pb2.FillReply:
    return store_pb2.FillReply()


def filled_from_proto(_: store_pb2.FillReply) -> Filled:
    return Filled()


def committed_to_proto(answer: Committed) -> store_pb2.CommitReply:
    return store_pb2.CommitReply(results=bytes(answer.results))


def committed_from_proto(message: store_pb2.CommitReply) -> Committed:
    return Committed(results=commits_from_bytes(message.results))


def saved_to_proto(answer: Saved) -> store_pb2.SaveReply:
    return store_pb2.SaveReply(results=bytes(answer.results), committed=bytes(answer.committed))


def saved_from_proto(message: store_pb2.SaveReply) -> Saved:
    return Saved(results=grants_from_bytes(message.results), committed=commits_from_bytes(message.committed))


def session_to_proto(
    answer: SessionInfo, reply: store_pb2.SessionReply | None = None
) -> store_pb2.SessionReply:
    """`reply`: to be filled, where it is part of another message: a long one is not copied there then."""
    if reply is None:
        reply = store_pb2.SessionReply()
    reply.session, reply.version, reply.usable = answer.session, answer.version, answer.usable
    reply.usable_beyond = answer.usable_beyond
    reply.entries_forgotten = answer.entries_forgotten
    if answer.elsewhere is not None:
        reply.elsewhere.node, reply.elsewhere.version = answer.elsewhere.node, answer.elsewhere.version
        reply.elsewhere.keys.extend(answer.elsewhere.keys)
        reply.elsewhere.token_counts.extend(answer.elsewhere.token_counts)
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
        usable_beyond=message.usable_beyond,
        entries_forgotten=message.entries_forgotten,
        elsewhere=SharedManifest(
            b"",
            0,
            message.elsewhere.node,
            message.elsewhere.version,
            tuple(map(ChunkKey, message.elsewhere.keys)),
            tuple(message.elsewhere.token_counts),
        )
        if message.HasField("elsewhere")
        else None,
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
                hints=_hint_states(row.hints),
            )
            for row in answer.rows
        ],
        total=answer.total,
    )


def _standing(standing: Standing | None) -> stats_pb2.Standing | None:
    if standing is None:
        return None
    return stats_pb2.Standing(
        rule=standing.rule,
        jobs_before=standing.jobs_before,
        worth=standing.worth,
        least_worth=standing.least_worth,
        kind=standing.kind,
        jobs_ahead=standing.jobs_ahead,
        jobs_kept=standing.jobs_kept,
        ahead_bytes=standing.ahead_bytes,
        kept_bytes=standing.kept_bytes,
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
                resident_in=map(clean, chunk.resident_in),
                hints=_hint_states(chunk.hints),
                standing=_standing(chunk.standing),
            )
            for chunk in answer.chunks
        ],
    )


def resident_to_proto(answer: ResidentRanks) -> store_pb2.ResidentReply:
    return store_pb2.ResidentReply(ranks=answer.ranks)


def resident_from_proto(message: store_pb2.ResidentReply) -> ResidentRanks:
    return ResidentRanks(tuple(message.ranks))


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


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """How one kind of answer travels."""

    to_proto: Callable[..., Message]
    """With `packed=True` too, where the reply has extents."""
    field: str = ""
    """Of AttachReply; none for what only unary calls are answered with."""
    from_proto: Callable[[Any], Answer] | None = None
    """None: only what shows replies as they are (`kvctl`) reads it."""


ANSWERS: dict[type[Any], AnswerKind] = {
    Opened: AnswerKind(opened_to_proto, "open", opened_from_proto),
    Matched: AnswerKind(matched_to_proto, "match", matched_from_proto),
    Acquired: AnswerKind(acquired_to_proto, "acquire", acquired_from_proto),
    Renewed: AnswerKind(renewed_to_proto, "renew", renewed_from_proto),
    Reserved: AnswerKind(reserved_to_proto, "reserve", reserved_from_proto),
    Filled: AnswerKind(filled_to_proto, "fill", filled_from_proto),
    Committed: AnswerKind(committed_to_proto, "commit", committed_from_proto),
    Saved: AnswerKind(saved_to_proto, "save", saved_from_proto),
    SessionInfo: AnswerKind(session_to_proto, "session", session_from_proto),
    ActionsApplied: AnswerKind(actions_to_proto, "actions", actions_from_proto),
    QueueAccepted: AnswerKind(queue_to_proto, "queue", queue_from_proto),
    ResidentRanks: AnswerKind(resident_to_proto, "resident", resident_from_proto),
    Done: AnswerKind(done_to_proto, "done", done_from_proto),
    SessionList: AnswerKind(sessions_to_proto),
    Explained: AnswerKind(explained_to_proto),
    Scrubbed: AnswerKind(scrubbed_to_proto),
    QuarantineList: AnswerKind(quarantine_to_proto),
    Recalled: AnswerKind(recalled_to_proto),
}
"""The one table of answers. Which request gets which answer: `transport/decoding.py`, REQUESTS."""
_BY_FIELD = {kind.field: kind.from_proto for kind in ANSWERS.values() if kind.field}


def attach_reply(request_id: int, answer: Answer, *, packed: bool = False) -> store_pb2.AttachReply:
    """`answer` (a StoreError too) as the reply on the Attach stream to request `request_id`; `packed`: its extents."""
    if isinstance(answer, StoreError):
        return store_pb2.AttachReply(request_id=request_id, error=error_to_proto(answer))
    if isinstance(answer, SessionInfo):
        reply = store_pb2.AttachReply(request_id=request_id)
        reply.session.SetInParent()
        session_to_proto(answer, reply.session)
        return reply
    kind = ANSWERS[type(answer)]
    body: Any = kind.to_proto(answer, packed=True) if packed else kind.to_proto(answer)
    return store_pb2.AttachReply(request_id=request_id, **{kind.field: body})


def answer_of(reply: store_pb2.AttachReply) -> Answer:
    """The answer inside a reply that is not a push (a StoreError is returned, not raised).

    Raises StoreError (INTERNAL) for a body that this build does not know.
    """
    field = reply.WhichOneof("body")
    if field == "error":
        return error_from_proto(reply.error)
    convert = _BY_FIELD.get(field or "")
    if convert is None:
        raise StoreError("unknown answer on the Attach stream", field="body", value=field)
    return convert(getattr(reply, field))
