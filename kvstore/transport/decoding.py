"""Requests -> events: the one place where every field that a peer sends is checked against its bound.

REQUESTS has a row for each request: its unary method, its field on the Attach stream, how its message becomes an
event, and which answer it gets (`wire.ANSWERS` says how that becomes a reply). The stream and the unary calls share the
rows, so they cannot differ. What is checked here needs no state; what does (an unknown lease, a tenant's namespace, the
number of shards) is the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from kvstore import wire
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.errors import BadRequest
from kvstore.layout import CHUNK_TOKENS_MAX, LAYER_SLICES_MAX, SHARDS_MAX
from kvstore.types import (
    EXTENTS_PER_ANSWER_MAX,
    KEY_BYTES_MAX,
    KEYS_PER_REQUEST_MAX,
    MAKER_BYTES,
    POSITION_MAX,
    SESSION_NAME_BYTES_MAX,
    TTL_MS_MAX,
    ActionKind,
    ChunkKey,
    LeaseId,
    NamespaceId,
    RegionId,
    ReservationId,
    SegmentId,
    StagedPiece,
    Wait,
)
from kvstore.v1 import admin_pb2, hints_pb2, stats_pb2, store_pb2

HINT_NUMBER_MAX = 1 << 53
NUMBER_MAX = (1 << 63) - 1
QUEUE_POSITION_MAX = 1 << 31
JOB_NAME_BYTES_MAX = 64
HINT_KEYS_PER_REQUEST_MAX = 65_536
ACTIONS_PER_REQUEST_MAX = 256
PROMPTS_MAX = 16
"""Namespaces of one model for which a hint has keys of its own."""
SEGMENTS_PER_REQUEST_MAX = 65_536
ROWS_MAX = 100_000
SCRUB_BYTES_PER_S_MAX = 1 << 40
TOUCHED_PER_MESSAGE_MAX = 1_024
BEHIND = 2
"""The highest of what `Touched.found` says of a key."""


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of request."""

    service: str
    """Where its unary call is; "" if it comes over the Attach stream alone."""
    method: str
    field: str
    """Of AttachRequest; "" if it is a unary call alone."""
    request: type[Message]
    event: Callable[[Any, Ticket], events.Event] | None
    """Raises BadRequest or Unsupported. None: the request needs no core."""
    answer: type[Any]
    extents: bool = False
    """The reply has extents, which the request may want packed."""

    @property
    def reply(self) -> Callable[..., Message]:
        return wire.ANSWERS[self.answer].to_proto


def number(field: str, value: int, high: int, low: int = 0) -> int:
    if not low <= value <= high:
        missing = "" if value else "; it is missing, or 0"
        raise BadRequest(f"must be between {low} and {high}{missing}", field=field, value=value)
    return value


def given(field: str, value: int) -> int:
    """A number that the daemon gave out, which never gives 0. What it stands for is looked up later."""
    if not value:
        raise BadRequest("is the daemon's number of something; it is missing, or 0", field=field, value=value)
    return value


def count(field: str, items: Sequence[Any], high: int) -> None:
    if len(items) > high:
        raise BadRequest(
            f"a request has at most {high}",
            field=f"number of {field}",
            value=len(items),
            remedy="split the request",
        )


def chunk_keys(field: str, keys: Sequence[bytes], *, empty: bool = False) -> tuple[ChunkKey, ...]:
    """`keys` as a tuple; `empty` allows keys of no bytes (the root of a chain)."""
    count(field, keys, KEYS_PER_REQUEST_MAX)
    found = tuple(keys)
    if max(map(len, found), default=0) > KEY_BYTES_MAX or not (empty or all(found)):
        index = next(n for n, key in enumerate(found) if len(key) > KEY_BYTES_MAX or not (key or empty))
        raise BadRequest(
            f"a key has {'at most' if empty else '1 to'} {KEY_BYTES_MAX} bytes",
            field=f"{field}[{index}]",
            value=f"{len(found[index])} bytes",
        )
    return cast("tuple[ChunkKey, ...]", found)


def some_keys(keys: Sequence[bytes]) -> tuple[ChunkKey, ...]:
    if not keys:
        raise BadRequest("name at least one key; they are missing", field="keys", value="()")
    return chunk_keys("keys", keys)


def shard_numbers(shards: Sequence[int]) -> tuple[int, ...]:
    count("shards", shards, SHARDS_MAX)
    found = tuple(shards)
    if found:
        number("shards", min(found), SHARDS_MAX - 1)
        number("shards", max(found), SHARDS_MAX - 1)
    if len(set(found)) != len(found):
        raise BadRequest("names a shard twice", field="shards", value=list(found))
    return found


def _wrong_length(rule: str, field: str, name: bytes) -> BadRequest:
    return BadRequest(rule if name else f"{rule}; it is missing", field=field, value=f"{len(name)} bytes")


def session_name(field: str, name: bytes) -> bytes:
    if not 1 <= len(name) <= SESSION_NAME_BYTES_MAX:
        raise _wrong_length(f"has 1 to {SESSION_NAME_BYTES_MAX} bytes", field, name)
    return name


def maker_id(maker: bytes) -> bytes:
    if len(maker) not in (0, MAKER_BYTES):
        raise BadRequest(f"has {MAKER_BYTES} bytes or none", field="maker", value=maker)
    return maker


def namespace_id(value: int) -> NamespaceId:
    return NamespaceId(number("namespace_id", value, NUMBER_MAX, low=1))


def lease_ids(leases: Sequence[int]) -> tuple[LeaseId, ...]:
    count("lease_ids", leases, KEYS_PER_REQUEST_MAX)
    return cast("tuple[LeaseId, ...]", tuple(leases))


# ------------------------------------------------------------------------------------------------------------ Store


def _open(message: store_pb2.OpenRequest, ticket: Ticket) -> events.Open:
    if not message.HasField("namespace"):
        raise BadRequest("is missing", field="namespace", value="absent")
    # before objects are made of them
    count("namespace.groups", message.namespace.groups, SHARDS_MAX)
    slices = sum(len(group.layers) for group in message.namespace.groups)
    number("namespace.groups: layer slices in all", slices, LAYER_SLICES_MAX)
    spec = wire.spec_from_proto(message.namespace)
    spec.validate()
    return events.Open(ticket, spec)


def _match(message: store_pb2.MatchRequest, ticket: Ticket) -> events.Match:
    return events.Match(
        ticket,
        namespace_id(message.namespace_id),
        some_keys(message.keys),
        token_count=number("token_count", message.token_count, POSITION_MAX),
    )


def _acquire(message: store_pb2.AcquireRequest, ticket: Ticket) -> events.Acquire:
    return events.Acquire(
        ticket,
        namespace_id(message.namespace_id),
        some_keys(message.keys),
        shards=shard_numbers(message.shards),
        ttl_ms=number("ttl_ms", message.ttl_ms, TTL_MS_MAX),
        wait_ms=number("wait_ms", message.wait_ms, TTL_MS_MAX),
        prefix_only=not message.any_order,
        promote=not message.no_promotion,
    )


def _renew(message: store_pb2.RenewRequest, ticket: Ticket) -> events.Renew:
    return events.Renew(ticket, lease_ids(message.lease_ids), number("ttl_ms", message.ttl_ms, TTL_MS_MAX))


def _release(message: store_pb2.ReleaseRequest, ticket: Ticket) -> events.Release:
    return events.Release(ticket, lease_ids(message.lease_ids))


def _reserve(message: store_pb2.ReserveRequest, ticket: Ticket) -> events.Reserve:
    keys = some_keys(message.keys)
    for field, column in (("parents", message.parents), ("token_counts", message.token_counts)):
        if column and len(column) != len(keys):
            raise BadRequest(
                f"has one entry per key ({len(keys)}) or none", field=f"number of {field}", value=len(column)
            )
    return events.Reserve(
        ticket,
        namespace_id(message.namespace_id),
        keys,
        parent=chunk_keys("parent", (message.parent,), empty=True)[0],
        parents=chunk_keys("parents", message.parents, empty=True),
        token_counts=tuple(
            number("token_counts", tokens, CHUNK_TOKENS_MAX, low=1) for tokens in message.token_counts
        ),
        shards=shard_numbers(message.shards),
        derived=message.derived,
        maker=maker_id(message.maker),
        ttl_ms=number("ttl_ms", message.ttl_ms, TTL_MS_MAX),
        transient=message.transient,
    )


def _fill(message: store_pb2.FillRequest, ticket: Ticket) -> events.Fill:
    count("offsets", message.offsets, EXTENTS_PER_ANSWER_MAX)
    count("numbers", message.numbers, EXTENTS_PER_ANSWER_MAX)
    return events.Fill(
        ticket,
        ReservationId(given("reservation_id", message.reservation_id)),
        RegionId(message.region),
        _offsets("offsets", message.offsets),
        tuple(message.numbers),
    )


def _commit(message: store_pb2.CommitRequest, ticket: Ticket) -> events.Commit:
    count("staging_offsets", message.staging_offsets, EXTENTS_PER_ANSWER_MAX)
    count("checksums", message.checksums, EXTENTS_PER_ANSWER_MAX)
    return events.Commit(
        ticket,
        ReservationId(given("reservation_id", message.reservation_id)),
        # the length is that of the shard, which the core knows
        staged=tuple(
            StagedPiece(offset, 0) for offset in _offsets("staging_offsets", message.staging_offsets)
        ),
        wait=Wait(number("wait", message.wait, max(Wait))),
        told=tuple(message.checksums),
    )


def _save(message: store_pb2.SaveRequest, ticket: Ticket) -> events.Save:
    if not message.HasField("reserve"):
        raise BadRequest("is missing", field="reserve", value="absent")
    count("staging_offsets", message.staging_offsets, EXTENTS_PER_ANSWER_MAX)
    return events.Save(
        ticket,
        _reserve(message.reserve, ticket),
        _offsets("staging_offsets", message.staging_offsets),
        wait=Wait(number("wait", message.wait, max(Wait))),
    )


def _offsets(field: str, offsets: Sequence[int]) -> tuple[int, ...]:
    found = tuple(offsets)
    number(field, max(found, default=0), NUMBER_MAX)
    return found


def _abort(message: store_pb2.AbortRequest, ticket: Ticket) -> events.Abort:
    count("reservation_ids", message.reservation_ids, KEYS_PER_REQUEST_MAX)
    return events.Abort(ticket, tuple(map(ReservationId, message.reservation_ids)))


def _report_load(message: store_pb2.ReportLoadRequest, ticket: Ticket) -> events.ReportLoad:
    return events.ReportLoad(ticket, namespace_id(message.namespace_id), some_keys(message.keys))


def _report_duplicates(message: store_pb2.ReportDuplicatesRequest, ticket: Ticket) -> events.ReportDuplicates:
    count("checksums", message.checksums, KEYS_PER_REQUEST_MAX * SHARDS_MAX)
    return events.ReportDuplicates(
        ticket,
        namespace_id(message.namespace_id),
        some_keys(message.keys),
        checksums=tuple(message.checksums),
        shards=shard_numbers(message.shards),
        maker=maker_id(message.maker),
        wrong=message.wrong,
        healthy=message.healthy,
    )


def _report_resident(message: store_pb2.ReportResidentRequest, ticket: Ticket) -> events.ReportResident:
    return events.ReportResident(
        ticket,
        namespace_id(message.namespace_id),
        chunk_keys("keys", message.keys),
        ttl_ms=number("ttl_ms", message.ttl_ms, TTL_MS_MAX),
    )


def _get_session(message: store_pb2.GetSessionRequest, ticket: Ticket) -> events.GetSession:
    return events.GetSession(
        ticket,
        namespace_id(message.namespace_id),
        session_name("session", message.session),
        elsewhere=message.elsewhere,
    )


def _update_session(message: store_pb2.UpdateSessionRequest, ticket: Ticket) -> events.UpdateSession:
    count("append", message.append, KEYS_PER_REQUEST_MAX)
    append = wire.entries_from_proto(message.append)
    for index, entry in enumerate(append):
        if not (
            0 < len(entry.key) <= KEY_BYTES_MAX
            and entry.first_token <= POSITION_MAX
            and 1 <= entry.token_count <= CHUNK_TOKENS_MAX
            and -POSITION_MAX <= entry.delta <= POSITION_MAX
        ):
            where = f"append[{index}]"
            chunk_keys(f"{where}.key", (entry.key,))
            number(f"{where}.first_token", entry.first_token, POSITION_MAX)
            number(f"{where}.token_count", entry.token_count, CHUNK_TOKENS_MAX, low=1)
            number(f"{where}.delta", entry.delta, POSITION_MAX, low=-POSITION_MAX)
    return events.UpdateSession(
        ticket,
        namespace_id(message.namespace_id),
        session_name("session", message.session),
        expected_version=number("expected_version", message.expected_version, NUMBER_MAX),
        keep=number("keep", message.keep, NUMBER_MAX),
        append=append,
    )


def _truncate(message: store_pb2.TruncateRequest, ticket: Ticket) -> events.Truncate:
    return events.Truncate(
        ticket,
        namespace_id(message.namespace_id),
        session_name("session", message.session),
        expected_version=number("expected_version", message.expected_version, NUMBER_MAX),
        first_token=number("first_token", message.first_token, POSITION_MAX),
        token_count=number("token_count", message.token_count, POSITION_MAX),
        close_gap=message.close_gap,
    )


def _fork(message: store_pb2.ForkRequest, ticket: Ticket) -> events.Fork:
    return events.Fork(
        ticket,
        namespace_id(message.namespace_id),
        session_name("session", message.session),
        session_name("new_session", message.new_session),
    )


def _forget(message: store_pb2.ForgetRequest, ticket: Ticket) -> events.Forget:
    if bool(message.session) == bool(message.keys):
        raise BadRequest(
            "name either a session or keys",
            field="session",
            value=message.session,
            remedy="send two requests for both",
        )
    return events.Forget(
        ticket,
        namespace_id(message.namespace_id),
        session=session_name("session", message.session) if message.session else b"",
        keys=chunk_keys("keys", message.keys),
    )


def _publish_queue(message: hints_pb2.PublishQueueRequest, ticket: Ticket) -> events.PublishQueue:
    count("hints", message.hints, KEYS_PER_REQUEST_MAX)
    count("removed", message.removed, KEYS_PER_REQUEST_MAX)
    # before objects are made of them
    keys = sum(map(_key_count, message.hints))
    if keys > HINT_KEYS_PER_REQUEST_MAX:
        raise BadRequest(
            f"a request has at most {HINT_KEYS_PER_REQUEST_MAX}",
            field="number of keys of all hints",
            value=keys,
            remedy="name sessions, or send the jobs behind as changes (delta) in further requests",
        )
    hints = tuple(_hint(index, hint) for index, hint in enumerate(message.hints))
    return events.PublishQueue(
        ticket,
        namespace_id(message.namespace_id),
        hints,
        removed=tuple(job_name("removed", job) for job in message.removed),
        snapshot=not message.delta,
        ttl_ms=number("ttl_ms", message.ttl_ms, TTL_MS_MAX),
        number=number("number", message.number, HINT_NUMBER_MAX),
        by_model=message.by_model,
        prompts=_prompts("hints", message.hints, message.by_model),
    )


def _key_count(named: hints_pb2.Hint | hints_pb2.HintAction) -> int:
    """Of what is kept of it: one of its prompts."""
    return max((len(prompt.keys) for prompt in named.prompts), default=0) + len(named.keys)


def _prompts(
    field: str, named: Iterable[hints_pb2.Hint | hints_pb2.HintAction], by_model: bool
) -> tuple[tuple[events.Prompt, ...], ...]:
    """None at all where none has any."""
    if not any(each.prompts for each in named):
        return ()
    found = []
    for index, each in enumerate(named):
        where = f"{field}[{index}].prompts"
        count(where, each.prompts, PROMPTS_MAX)
        if each.prompts and not by_model:
            raise BadRequest("are of hints by model alone", field=where, value=len(each.prompts))
        found.append(
            tuple(
                events.Prompt(
                    namespace_id(prompt.namespace_id), chunk_keys(f"{where}[{at}].keys", prompt.keys)
                )
                for at, prompt in enumerate(each.prompts)
            )
        )
    return tuple(found)


def _hint(index: int, hint: hints_pb2.Hint) -> events.Hint:
    job, position, session, keys = hint.job, hint.position, hint.session, hint.keys
    good = 1 <= len(job) <= JOB_NAME_BYTES_MAX and position <= QUEUE_POSITION_MAX
    if not good or len(session) > SESSION_NAME_BYTES_MAX:
        job_name(f"hints[{index}].job", job)
        number(f"hints[{index}].position", position, QUEUE_POSITION_MAX)
        session_name(f"hints[{index}].session", session)
    return events.Hint(
        job, position, session=session, keys=chunk_keys(f"hints[{index}].keys", keys) if keys else ()
    )


def job_name(field: str, name: bytes) -> bytes:
    if not 1 <= len(name) <= JOB_NAME_BYTES_MAX:
        raise _wrong_length(f"has 1 to {JOB_NAME_BYTES_MAX} bytes", field, name)
    return name


def _apply_actions(message: hints_pb2.ApplyActionsRequest, ticket: Ticket) -> events.ApplyActions:
    count("actions", message.actions, ACTIONS_PER_REQUEST_MAX)
    count("cancelled", message.cancelled, KEYS_PER_REQUEST_MAX)
    keys = sum(map(_key_count, message.actions))
    if keys > HINT_KEYS_PER_REQUEST_MAX:
        raise BadRequest(
            f"a request has at most {HINT_KEYS_PER_REQUEST_MAX}",
            field="number of keys of all actions",
            value=keys,
            remedy="name sessions, or split the request",
        )
    return events.ApplyActions(
        ticket,
        namespace_id(message.namespace_id),
        tuple(_action(f"actions[{index}]", action) for index, action in enumerate(message.actions)),
        cancelled=tuple(job_name("cancelled", name) for name in message.cancelled),
        by_model=message.by_model,
        prompts=_prompts("actions", message.actions, message.by_model),
    )


def _action(where: str, action: hints_pb2.HintAction) -> events.HintAction:
    kind = ActionKind(number(f"{where}.kind", action.kind, max(ActionKind)))
    if not (action.session or action.keys or action.prompts):
        raise BadRequest("names a session or keys; both are missing", field=f"{where}.keys", value="()")
    if action.eta_ms and kind is not ActionKind.EXPECT:
        raise BadRequest("is of EXPECT alone", field=f"{where}.eta_ms", value=action.eta_ms)
    return events.HintAction(
        job_name(f"{where}.name", action.name),
        kind,
        session=session_name(f"{where}.session", action.session) if action.session else b"",
        keys=chunk_keys(f"{where}.keys", action.keys),
        ttl_ms=number(f"{where}.ttl_ms", action.ttl_ms, TTL_MS_MAX),
        eta_ms=number(f"{where}.eta_ms", action.eta_ms, TTL_MS_MAX),
    )


def touched(message: store_pb2.Touched, ticket: Ticket) -> events.Touched:
    """Raises BadRequest."""
    keys = some_keys(message.keys)
    counts, found = tuple(message.counts), message.found
    if sum(counts) != len(keys):
        raise BadRequest(f"must add up to the {len(keys)} keys", field="touched.counts", value=sum(counts))
    if len(found) != len(keys) or max(found) > BEHIND:
        raise BadRequest(
            f"has one byte of 0 to {BEHIND} for each of the {len(keys)} keys",
            field="touched.found",
            value=found,
        )
    return events.Touched(ticket, namespace_id(message.namespace_id), keys, counts, found)


def _touch(message: store_pb2.TouchRequest, ticket: Ticket) -> events.Touch:
    return events.Touch(ticket, namespace_id(message.namespace_id), some_keys(message.keys))


def _segments_unmapped(message: store_pb2.SegmentsUnmappedRequest, ticket: Ticket) -> events.SegmentsUnmapped:
    count("segments", message.segments, SEGMENTS_PER_REQUEST_MAX)
    return events.SegmentsUnmapped(ticket, tuple(map(SegmentId, message.segments)))


# ------------------------------------------------------------------------------------------------------------ Stats


def _list_sessions(message: stats_pb2.ListSessionsRequest, ticket: Ticket) -> events.ListSessions:
    return events.ListSessions(
        ticket,
        namespace=namespace_id(message.namespace_id) if message.namespace_id else None,
        limit=number("limit", message.limit, ROWS_MAX) or 1000,
        skip=number("skip", message.skip, ROWS_MAX),
        session=session_name("session", message.session) if message.session else b"",
    )


def _explain(message: stats_pb2.ExplainRequest, ticket: Ticket) -> events.Explain:
    if bool(message.session) == bool(message.keys):
        raise BadRequest("name either a session or keys", field="session", value=message.session)
    return events.Explain(
        ticket,
        namespace_id(message.namespace_id),
        session=session_name("session", message.session) if message.session else b"",
        keys=chunk_keys("keys", message.keys),
    )


# ------------------------------------------------------------------------------------------------------------ Admin


def _scrub(message: admin_pb2.ScrubRequest, ticket: Ticket) -> events.Scrub:
    rate = number("bytes_per_s", message.bytes_per_s, SCRUB_BYTES_PER_S_MAX)
    return events.Scrub(ticket, start=message.start, bytes_per_s=rate, round=message.round)


def _list_quarantine(message: admin_pb2.ListQuarantineRequest, ticket: Ticket) -> events.ListQuarantine:
    limit = number("limit", message.limit, ROWS_MAX) or 1000
    return events.ListQuarantine(ticket, limit=limit, retry=message.retry)


def _recall(message: admin_pb2.RecallRequest, ticket: Ticket) -> events.Recall:
    if len(message.maker) != MAKER_BYTES:
        raise _wrong_length(f"has {MAKER_BYTES} bytes", "maker", message.maker)
    return events.Recall(
        ticket,
        message.maker,
        age_ms_max=number("age_ms_max", message.age_ms_max, NUMBER_MAX),
        dry_run=message.dry_run,
        sessions_max=number("sessions_max", message.sessions_max, ROWS_MAX) or 1000,
    )


# ----------------------------------------------------------------------------------------------------- all of them

REQUESTS = (
    Call("Store", "Open", "open", store_pb2.OpenRequest, _open, events.Opened),
    Call("Store", "Match", "match", store_pb2.MatchRequest, _match, events.Matched),
    Call("Store", "Acquire", "acquire", store_pb2.AcquireRequest, _acquire, events.Acquired, extents=True),
    Call("Store", "Renew", "renew", store_pb2.RenewRequest, _renew, events.Renewed),
    Call("Store", "Release", "release", store_pb2.ReleaseRequest, _release, events.Done),
    Call("Store", "Reserve", "reserve", store_pb2.ReserveRequest, _reserve, events.Reserved, extents=True),
    Call("Store", "Fill", "fill", store_pb2.FillRequest, _fill, events.Filled),
    Call("Store", "Commit", "commit", store_pb2.CommitRequest, _commit, events.Committed),
    Call("Store", "Save", "save", store_pb2.SaveRequest, _save, events.Saved),
    Call("Store", "Abort", "abort", store_pb2.AbortRequest, _abort, events.Done),
    Call("Store", "ReportLoad", "report_load", store_pb2.ReportLoadRequest, _report_load, events.Done),
    Call(
        "Store",
        "ReportDuplicates",
        "report_duplicates",
        store_pb2.ReportDuplicatesRequest,
        _report_duplicates,
        events.Done,
    ),
    Call(
        "Store",
        "ReportResident",
        "report_resident",
        store_pb2.ReportResidentRequest,
        _report_resident,
        events.ResidentRanks,
    ),
    Call("Store", "GetSession", "get_session", store_pb2.GetSessionRequest, _get_session, events.SessionInfo),
    Call(
        "Store",
        "UpdateSession",
        "update_session",
        store_pb2.UpdateSessionRequest,
        _update_session,
        events.SessionInfo,
    ),
    Call("Store", "Truncate", "truncate", store_pb2.TruncateRequest, _truncate, events.SessionInfo),
    Call("Store", "Fork", "fork", store_pb2.ForkRequest, _fork, events.SessionInfo),
    Call("Store", "Forget", "forget", store_pb2.ForgetRequest, _forget, events.Done),
    Call("Store", "Touch", "touch", store_pb2.TouchRequest, _touch, events.Done),
    Call("", "", "segments_unmapped", store_pb2.SegmentsUnmappedRequest, _segments_unmapped, events.Done),
    Call("", "", "heartbeat", store_pb2.HeartbeatRequest, None, events.Done),
    Call(
        "Hints",
        "PublishQueue",
        "publish_queue",
        hints_pb2.PublishQueueRequest,
        _publish_queue,
        events.QueueAccepted,
    ),
    Call(
        "Hints",
        "ApplyActions",
        "apply_actions",
        hints_pb2.ApplyActionsRequest,
        _apply_actions,
        events.ActionsApplied,
    ),
    Call("Stats", "ListSessions", "", stats_pb2.ListSessionsRequest, _list_sessions, events.SessionList),
    Call("Stats", "Explain", "", stats_pb2.ExplainRequest, _explain, events.Explained),
    Call("Admin", "Scrub", "", admin_pb2.ScrubRequest, _scrub, events.Scrubbed),
    Call(
        "Admin",
        "ListQuarantine",
        "",
        admin_pb2.ListQuarantineRequest,
        _list_quarantine,
        events.QuarantineList,
    ),
    Call("Admin", "Recall", "", admin_pb2.RecallRequest, _recall, events.Recalled),
)
"""The one table of requests. `GetStats`, `ListNamespaces` and `WatchStats` are asked and answered in `service.py`, the
streams of `Bytes` in `bytes_service.py`, `hello` by whoever carries the Attach stream."""


def _unary(service: str) -> dict[str, Call]:
    return {call.method: call for call in REQUESTS if call.service == service}


STORE_CALLS, HINTS_CALLS, STATS_CALLS, ADMIN_CALLS = map(_unary, ("Store", "Hints", "Stats", "Admin"))
"""The unary calls of each service, by method."""
ATTACH_CALLS = {call.field: call for call in REQUESTS if call.field}
"""The bodies of AttachRequest, by field; `hello` is the stream's own."""
