"""Looking chunks up, and reading them: in the directory where that can tell, else by asking the daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore import wire
from kvstore.answers import NO_BACKLOG, Acquired, Matched, Peeked
from kvstore.arguments import flag, one_of, whole, wholes
from kvstore.client.attachment import Attachment
from kvstore.client.binding import Binding
from kvstore.client.call import Operation, drive
from kvstore.client.directory import Directory, PublishedExtents
from kvstore.client.geometry import Geometry
from kvstore.client.lease import Grant, ReadLease, Waiter
from kvstore.client.mapped_extents import MappedExtents
from kvstore.client.mappings import Mappings
from kvstore.client.requests import check_share, checked_keys
from kvstore.directory import ON_SSD, Found
from kvstore.types import POSITION_MAX, TTL_MS_MAX, ChunkKey, NamespaceId, Outcome, Protection, Reason
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

GROUP_VERIFY_EVERY = 64
"""Under protection `group` other workers can write what we read: one load in so many is compared with its checksum."""

MISSED, BEHIND = b"\0", b"\2"
"""What the daemon is told of a key that was looked up in the directory."""
_OUTCOMES = (Outcome.MISS, Outcome.HIT)
"""By the state of a row: 0, or HIT."""
_PEEKED = (Outcome.MISS, Outcome.HIT, Outcome.PENDING)
"""By the state of a row: 0, HIT, or ON_SSD."""


class MatchedHere(Matched):
    """What the directory said: the daemon is asked for `reasons` when somebody reads them."""

    __slots__ = ("_ask", "_told")
    _ask: Callable[[], tuple[Reason, ...]]
    _told: tuple[Reason, ...] | None

    def __init__(
        self, usable: int, outcomes: tuple[Outcome, ...], ask: Callable[[], tuple[Reason, ...]]
    ) -> None:
        for name, value in (
            ("usable", usable),
            ("outcomes", outcomes),
            ("backlog", NO_BACKLOG),
            ("_ask", ask),
            ("_told", None),
        ):
            object.__setattr__(self, name, value)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        told = self._told
        if told is None:
            told = self._ask()
            object.__setattr__(self, "_told", told)
        return told

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Matched):
            return NotImplemented
        mine = (self.usable, self.outcomes, self.reasons, self.backlog)
        return mine == (other.usable, other.outcomes, other.reasons, other.backlog)

    __hash__ = Matched.__hash__


class Reader:
    """The reads of one namespace, each an operation (see `call`); what they do `Namespace` says."""

    def __init__(self, binding: Binding, geometry: Geometry) -> None:
        self._binding = binding
        self._connection = binding.connection
        self._geometry = geometry

    def peek(self, keys: Sequence[ChunkKey], *, token_count: int = 0) -> Peeked | None:
        keys = checked_keys("keys", keys)
        token_count = whole("token_count", token_count, 0, POSITION_MAX)
        published = self._binding.looked_up(keys)
        if published is None:
            return None
        directory, found = published
        if found.usable < len(keys) and directory.view.ask_for_others:
            return None
        usable = _usable(found, token_count)
        return Peeked(usable, min(usable, found.hits), tuple(map(_PEEKED.__getitem__, found.states)))

    def note_lookup(self, keys: Sequence[ChunkKey], peeked: Peeked) -> None:
        keys = checked_keys("keys", keys)
        one_of("peeked", peeked, Peeked)
        usable = whole("peeked.usable", peeked.usable, 0, len(keys))
        binding = self._binding.now()
        if binding is not None and keys:
            found = BEHIND * usable + MISSED + BEHIND * (len(keys) - usable)
            binding[0].touched(binding[1], keys, found[: len(keys)])

    @staticmethod
    def _is_for_the_daemon(directory: Directory, found: Found, *, all_keys: bool) -> bool:
        """Some of it is on SSD, or may be beyond this node; of interest are all keys, or those before a miss."""
        states = found.states
        if found.usable < len(states) and directory.view.ask_for_others:
            return True
        return ON_SSD in (states if all_keys else states[: found.usable])

    def _why(
        self, keys: Sequence[ChunkKey], outcomes: Sequence[Outcome], *, behind: int
    ) -> tuple[Reason, ...]:
        """Why keys that the directory lacked are no hits, as the daemon says now; those from `behind` on because they
        are behind such a one."""
        if Outcome.MISS not in outcomes:
            return (Reason.NONE,) * len(keys)
        asked = drive(self._asking_match(keys[:behind], 0, None)).reasons
        reasons = [
            Reason.NONE if outcome is Outcome.HIT else reason or Reason.BEING_SAVED
            for outcome, reason in zip(outcomes, asked, strict=False)
        ]
        return (*reasons, *(Reason.BEYOND_MISS for _ in keys[behind:]))

    def matching(
        self, keys: Sequence[ChunkKey], token_count: int, timeout_s: float | None
    ) -> Operation[Matched]:
        keys = checked_keys("keys", keys)
        token_count = whole("token_count", token_count, 0, POSITION_MAX)
        self._connection.deadline(timeout_s)
        published = self._binding.looked_up(keys)
        if published is None or self._is_for_the_daemon(*published, all_keys=True):
            matched = yield from self._asking_match(keys, token_count, timeout_s)
            return matched
        found = published[1]
        usable = _usable(found, token_count)
        if found.hits == len(keys):
            return Matched(usable, (Outcome.HIT,) * len(keys), (Reason.NONE,) * len(keys))
        outcomes = tuple(map(_OUTCOMES.__getitem__, found.states))
        return MatchedHere(usable, outcomes, partial(self._why, keys, outcomes, behind=len(keys)))

    def _asking_match(
        self, keys: Sequence[ChunkKey], token_count: int, timeout_s: float | None
    ) -> Operation[Matched]:
        binding = self._binding.now()
        if binding is not None and keys:
            attachment, number = binding
            body = store_pb2.MatchRequest(namespace_id=number, keys=keys, token_count=token_count)
            call = attachment.call("match", body, self._connection.deadline(timeout_s))
            yield call
            if isinstance(call.answer, store_pb2.AttachReply):
                matched = wire.matched_from_proto(call.answer.match)
                if len(matched.outcomes) == len(matched.reasons) == len(keys):
                    return matched
            self._connection.count("matches_failed")
        return Matched(0, (Outcome.MISS,) * len(keys), (Reason.UNAVAILABLE,) * len(keys))

    def reading(
        self,
        keys: Sequence[ChunkKey],
        shards: Sequence[int],
        wait_ms: int,
        any_order: bool,
        ttl_ms: int,
        verify: float | None,
        timeout_s: float | None,
        promote: bool = True,
        *,
        pin: bool = False,
    ) -> Operation[ReadLease]:
        keys = checked_keys("keys", keys)
        shard_numbers = self._geometry.shards_of(tuple(wholes("shards", shards)))
        # The daemon refuses what is longer, and a refused read is a miss; its own bounds are far below.
        wait_ms = min(whole("wait_ms", wait_ms), TTL_MS_MAX)
        ttl_ms = min(whole("ttl_ms", ttl_ms), TTL_MS_MAX)
        any_order = flag("any_order", any_order)
        promote = flag("promote", promote)
        if verify is not None:
            check_share("verify", verify)
        deadline = self._connection.deadline(timeout_s)
        binding = self._binding.now()
        if binding is None or not keys:
            return self._no_lease(keys, shard_numbers)
        attachment, number = binding
        lease: ReadLease | None = None
        if not (wait_ms or flag("pin", pin)):
            lease = yield from self._reading_here(
                attachment, number, keys, shard_numbers, any_order, ttl_ms, verify, deadline
            )
            if lease is not None:
                return lease
        waiter = attachment.new_waiter(Waiter(number, keys)) if wait_ms else None

        def give_back(answer: store_pb2.AttachReply) -> None:
            attachment.notice("release", [answer.acquire.lease_id] if answer.acquire.lease_id else [])

        body = store_pb2.AcquireRequest(
            namespace_id=number,
            keys=keys,
            shards=shard_numbers,
            ttl_ms=ttl_ms,
            wait_ms=wait_ms,
            any_order=any_order,
            packed_extents=True,
            no_promotion=not promote,
        )
        try:
            call = attachment.call("acquire", body, deadline, on_late=give_back)
            yield call
            answer = call.answer
            if not isinstance(answer, store_pb2.AttachReply):
                self._connection.count("reads_failed")
                return self._no_lease(keys, shard_numbers)
            try:
                acquired = wire.acquired_from_proto(answer.acquire)
                missing = attachment.mappings.missing(set(acquired.extents.segment))
                if missing:
                    yield partial(attachment.map_segments, missing, deadline)
                outcomes, reasons, mapped, ranks = self._hits(
                    acquired, keys, shard_numbers, any_order, attachment.mappings
                )
                grant = Grant(
                    attachment,
                    number,
                    acquired.lease,
                    acquired.ttl_ms,
                    call.sent_at,
                    mapped,
                    ranks,
                    waiter,
                    call.sent_at + wait_ms / 1000,
                )
                lease = ReadLease(
                    keys,
                    outcomes,
                    reasons,
                    self._geometry,
                    shard_numbers,
                    grant,
                    self._verify_every(verify),
                    acquired.backlog,
                )
                if lease.lease_id:
                    attachment.hold(lease)
            finally:
                kept = attachment.keep(call)
                if lease is None and kept:  # interrupted, or a bug
                    give_back(answer)
        finally:
            if waiter is not None and (lease is None or Outcome.PENDING not in lease.outcomes):
                attachment.forget_waiter(waiter)
        if kept:
            return lease
        lease.release()
        return self._no_lease(keys, shard_numbers)

    def _reading_here(
        self,
        attachment: Attachment,
        number: NamespaceId,
        keys: Sequence[ChunkKey],
        shards: tuple[int, ...],
        any_order: bool,
        ttl_ms: int,
        verify: float | None,
        deadline: float,
    ) -> Operation[ReadLease | None]:
        """Without a message: what the directory says. None: the daemon has to be asked."""
        published = self._binding.looked_up(keys)
        if published is None:
            return None
        directory, found = published
        states = found.states
        if self._is_for_the_daemon(directory, found, all_keys=any_order):
            return None
        hits: Sequence[int] | range = range(found.hits)
        if any_order and found.hits < len(keys):
            hits = [index for index, state in enumerate(states) if state]
        mapped = None
        if hits:
            lengths = [self._geometry.shard_bytes[shard] for shard in shards]
            if len(keys) == len(shards) == 1:
                extents = directory.extents_of_one(found, shards[0], lengths[0])
            else:
                extents = directory.extents(found, hits, shards, lengths)
            missing = attachment.mappings.missing(set(extents.segment))
            if missing:
                yield partial(attachment.map_segments, missing, deadline)
            mapped = PublishedExtents(directory, found, hits, extents, lengths, attachment.mappings)
            if mapped.wrong:
                return None
        first_miss = len(hits) if isinstance(hits, range) else len(keys)
        if first_miss < len(keys) and not any_order:
            told = states[:first_miss] + MISSED + BEHIND * (len(keys) - first_miss - 1)
        else:
            told = states
        attachment.touched(number, keys, told)
        outcomes: tuple[Outcome, ...]
        if len(hits) == len(keys):
            outcomes = (Outcome.HIT,) * len(keys)
        else:
            outcomes = tuple(_OUTCOMES[state & 1] for state in told)
        reasons: Any = (Reason.NONE,) * len(keys)
        if len(hits) < len(keys):
            behind = len(keys) if any_order else first_miss + 1
            reasons = partial(self._why, keys, outcomes, behind=behind)
        if mapped is None:
            return ReadLease(keys, outcomes, reasons, self._geometry, shards)

        def pin() -> ReadLease:
            return drive(self.reading(keys, shards, 0, any_order, ttl_ms, verify, None, False, pin=True))

        ranks: dict[int, int] | range = range(len(hits))
        if not isinstance(hits, range):
            ranks = {index: rank for rank, index in enumerate(hits)}
        grant = Grant(attachment, number, 0, 0, 0.0, mapped, ranks, pin=pin)
        return ReadLease(keys, outcomes, reasons, self._geometry, shards, grant, self._verify_every(verify))

    def _hits(
        self,
        acquired: Acquired,
        keys: Sequence[ChunkKey],
        shards: tuple[int, ...],
        any_order: bool,
        mappings: Mappings,
    ) -> tuple[Sequence[Outcome], Sequence[Reason], MappedExtents, dict[int, int] | range]:
        """Outcomes, reasons, mapped and ranks of an answer whose segments are mapped; a hit in one that could not be
        mapped becomes a miss."""
        outcomes, reasons = acquired.outcomes, acquired.reasons
        hits = outcomes.count(Outcome.HIT)
        mapped = MappedExtents(
            acquired.extents, [self._geometry.shard_bytes[shard] for shard in shards], mappings
        )
        ranks: dict[int, int] | range = range(hits)
        if not len(outcomes) == len(reasons) == len(keys) or len(mapped) != hits * len(shards):
            log.error("an answer to Acquire does not fit the request: %d extents, %d hits", len(mapped), hits)
            outcomes, reasons = (Outcome.MISS,) * len(keys), (Reason.UNAVAILABLE,) * len(keys)
            ranks = range(0)
        elif mapped.wrong or Outcome.HIT in outcomes[hits:]:
            numbers = (index for index, outcome in enumerate(outcomes) if outcome is Outcome.HIT)
            ranks = {index: rank for rank, index in enumerate(numbers)}
            outcomes, reasons = self._without(
                {row // len(shards) for row in mapped.wrong}, ranks, outcomes, reasons, any_order
            )
        return outcomes, reasons, mapped, ranks

    def _without(
        self,
        wrong: set[int],
        ranks: dict[int, int],
        outcomes: Sequence[Outcome],
        reasons: Sequence[Reason],
        any_order: bool,
    ) -> tuple[tuple[Outcome, ...], tuple[Reason, ...]]:
        """Outcomes and reasons once the hits of these ranks are misses, and with them what comes behind the first of
        them unless `any_order`. Takes them out of `ranks`."""
        outcomes, reasons = list(outcomes), list(reasons)
        for index, rank in list(ranks.items()):
            if rank not in wrong:
                continue
            self._connection.count("hits_not_mapped")
            del ranks[index]
            outcomes[index], reasons[index] = Outcome.MISS, Reason.UNAVAILABLE
            if not any_order:
                for behind in range(index + 1, len(outcomes)):
                    outcomes[behind], reasons[behind] = Outcome.MISS, Reason.BEYOND_MISS
                    ranks.pop(behind, None)
                break
        return tuple(outcomes), tuple(reasons)

    def _verify_every(self, verify: float | None) -> int:
        if verify is None:
            attachment = self._connection.attachment
            group = attachment is not None and attachment.protection is Protection.GROUP
            return GROUP_VERIFY_EVERY if group else 0
        return round(1 / verify) if verify > 0 else 0

    def _no_lease(self, keys: Sequence[ChunkKey], shards: tuple[int, ...]) -> ReadLease:
        outcomes, reasons = (Outcome.MISS,) * len(keys), (Reason.UNAVAILABLE,) * len(keys)
        return ReadLease(keys, outcomes, reasons, self._geometry, shards)


def _usable(found: Found, token_count: int) -> int:
    """Leading keys whose bytes can be had, leaving at least one of so many tokens to compute."""
    usable = found.usable
    if not token_count:
        return usable
    tokens = 0
    for number, more in enumerate(found.tokens()[:usable]):
        tokens += more
        if tokens >= token_count:
            return number
    return usable
