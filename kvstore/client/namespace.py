"""One namespace of the store, and every operation on it, each written once as a generator (see `call`).

`Namespace` is its blocking face, `aio.AsyncNamespace` the awaitable one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.answers import (
    NO_BACKLOG,
    Acquired,
    ActionsApplied,
    Matched,
    Opened,
    Peeked,
    QueueAccepted,
    Reserved,
    SessionInfo,
)
from kvstore.arguments import NUMBER_MAX, binary, flag, listed, one_of, shown, text, whole, wholes, wrong_type
from kvstore.client.attachment import Attachment
from kvstore.client.batch import StagedPieces, WriteBatch
from kvstore.client.call import Operation, Reply, drive, gone
from kvstore.client.connection import Connection
from kvstore.client.directory import Directory, PublishedExtents
from kvstore.client.geometry import Geometry
from kvstore.client.lease import Grant, ReadLease, Waiter
from kvstore.client.mapped_extents import MappedExtents
from kvstore.client.mappings import Mappings
from kvstore.client.prompts import prompt_keys
from kvstore.client.reads import Reads
from kvstore.client.staging import footprint
from kvstore.directory import ON_SSD, Found
from kvstore.errors import BadRequest, DeadlineExceeded, NotFound, StoreError, Unavailable
from kvstore.keys import ROOT, Tokens, exact_chain, exact_key
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    KEY_BYTES_MAX,
    KEYS_PER_REQUEST_MAX,
    MAKER_BYTES,
    SESSION_NAME_BYTES_MAX,
    ActionKind,
    ChunkKey,
    GrantResult,
    Hint,
    HintAction,
    NamespaceId,
    Outcome,
    Protection,
    Reason,
    SessionEntry,
)
from kvstore.v1 import hints_pb2, store_pb2

if TYPE_CHECKING:  # the public way back from a namespace to the client that opened it
    from kvstore.client.sync import Client

log = logging.getLogger(__name__)

DIRECTORY_AGAIN_S = 0.5
"""How long the housekeeping waits for the directory of a namespace that was opened again."""
REOPEN_AGAIN_S = 1.0
"""After the daemon refused to open a namespace again."""
GROUP_VERIFY_EVERY = 64
"""Under protection `group` other workers can write what we read: one load in so many is compared with its checksum."""
READS_AHEAD_MAX = 16
CHECKSUM_MAX = (1 << 64) - 1
JOB_NAME_BYTES_MAX = 64
QUEUE_POSITION_MAX = 1 << 31


_OUTCOMES = (Outcome.MISS, Outcome.HIT)
"""By the state of a row: 0, or HIT."""

KeysOf = Callable[[Tokens], list[ChunkKey]]
"""Makes keys of a prompt's token ids."""


class Forgotten(int):
    """How many were dropped. All are misses from now on, as long as the daemon lives."""

    not_durable: str
    """Why a restart of the daemon now could bring them back; empty: nothing brings them back."""

    def __new__(cls, count: int, not_durable: str = "") -> Forgotten:
        self = super().__new__(cls, count)
        self.not_durable = not_durable
        return self


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


class Namespace:
    """Chunks of one model replica in one layout. Made by `Client.open`; survives restarts of the daemon, after which it
    is opened again in the background. Thread-safe.

    `match`, `read` and `write` never raise because the daemon is away, late or refuses: then every key is a MISS
    (UNAVAILABLE) or not granted. They raise BadRequest for what the caller got wrong. Timeouts are in seconds; None
    stands for the connection's.
    """

    def __init__(self, client: Client, connection: Connection, spec: NamespaceSpec) -> None:
        """Not bound yet: `opening` does that."""
        self.spec = spec
        self.client = client
        self.notes: tuple[str, ...] = ()
        """In which fields other namespaces of the same model differ: why there may be no hits."""
        self._salt = b""
        self._connection = connection
        self._geometry = Geometry(spec)
        self._binding: tuple[Attachment, NamespaceId] | None = None
        self._reopening: tuple[Attachment | None, float] = (None, 0.0)
        self._published: tuple[Attachment, Directory] | None = None
        """The directory, and for which attachment."""

    def __repr__(self) -> str:
        binding = self._binding
        state = "unbound" if binding is None or not binding[0].alive else f"id {binding[1]}"
        return f"Namespace({self.spec.model}, epoch {self.spec.weights_epoch}, {state})"

    @property
    def salt(self) -> bytes:
        """32 bytes that key this namespace's chunk hashes; the daemon derives them from tenant and spec."""
        return self._salt

    def keys(self, tokens: Tokens, parent: ChunkKey = ROOT) -> list[ChunkKey]:
        """Keys of all full chunks of `tokens`, which follow the chain that ends in `parent`."""
        return exact_chain(self._salt, tokens, self.spec.chunk_tokens, parent)

    def prompt_keys(self, tokens: Tokens) -> list[ChunkKey]:
        """As `keys` of a chain's beginning, by whatever protocol the namespace's keys are made. Raises Unsupported for
        one that is not known."""
        return prompt_keys(self.spec, self._salt, tokens)

    def tail_key(self, tokens: Tokens, parent: ChunkKey) -> ChunkKey:
        """Key of the rest of a conversation: fewer tokens than a chunk, after `parent`."""
        return exact_key(self._salt, parent, tokens)

    # ------------------------------------------------------------------------------------- the engine's path

    def match(
        self, keys: Sequence[ChunkKey], *, token_count: int = 0, timeout_s: float | None = None
    ) -> Matched:
        """How many leading keys could be loaded now; with `token_count`, leaving at least one of so many tokens to
        compute. Pins and promotes nothing.

        Looks in the directory, without a message, unless some of it is on SSD (then only the daemon knows the backlog).
        Why a key is no hit the daemon is asked when somebody reads `reasons`."""
        return drive(self.matching(keys, token_count, timeout_s))

    def peek(self, keys: Sequence[ChunkKey], *, token_count: int = 0) -> Peeked | None:
        """As `match`, for a thread that must not wait: looks in the directory and nowhere else, which takes some tenths
        of a millisecond for hundreds of keys. None: it cannot tell now (there is no directory, it is closed, or what it
        lacks may be beyond this node), and `match` asks the daemon."""
        keys = _checked_keys("keys", keys)
        token_count = whole("token_count", token_count)
        published = self._looked_up(keys)
        if published is None:
            return None
        directory, found = published
        if found.usable < len(keys) and directory.view.ask_for_others:
            return None
        usable = _usable(found, token_count)
        return Peeked(usable, min(usable, found.hits))

    def read(
        self,
        keys: Sequence[ChunkKey],
        *,
        shards: Sequence[int] = (),
        wait_ms: int = 0,
        any_order: bool = False,
        promote: bool = True,
        ttl_ms: int = 0,
        verify: float | None = None,
        pin: bool = False,
        timeout_s: float | None = None,
    ) -> ReadLease:
        """Find what is there of `keys` and map it; of interest are `shards` (none: all).

        What is all in DRAM is found in the directory, without a message, and pinned only when somebody copies a chunk
        in parts or looks at it where it is: whoever keeps the lease for long before he copies says `pin`, or some of it
        may be gone by then. What needs the daemon (`wait_ms`, chunks on SSD) is pinned at once.

        Stops at the first key that is no hit unless `any_order`. With `wait_ms` the lease's `settled()` waits for
        PENDING keys. Without `promote`, what is on SSD alone stays there, and the lease's `backlog` says what it would
        take. `ttl_ms` 0: the daemon's default; the client renews while the lease is open. `verify` is the share
        of loads compared with their checksum (None: 0, or 1/64 under protection `group`).
        """
        return drive(
            self.reading(keys, shards, wait_ms, any_order, ttl_ms, verify, timeout_s, promote, pin=pin)
        )

    def reads(
        self,
        batches: Iterable[Sequence[ChunkKey]],
        *,
        ahead: int = 1,
        shards: Sequence[int] = (),
        wait_ms: int = 0,
        any_order: bool = False,
        ttl_ms: int = 0,
        verify: float | None = None,
        timeout_s: float | None = None,
    ) -> Reads:
        """`read` of one batch of keys after the other: an iterator of leases, to be used with `with` each.

        The next `ahead` batches (0 to 16) are asked for before one is handed out, so their answers come while it is
        being copied. Whoever ends before the last closes the iterator, or uses it with `with`: what was pinned ahead is
        given back. What `read` raises is raised in the batch's turn.
        """
        ahead = whole("ahead", ahead, 0, READS_AHEAD_MAX)
        _check_iterable("batches", batches)

        def read(keys: Sequence[ChunkKey]) -> Operation[ReadLease]:
            return self.reading(keys, shards, wait_ms, any_order, ttl_ms, verify, timeout_s, pin=True)

        return Reads(batches, read, ahead)

    def write(
        self,
        keys: Sequence[ChunkKey],
        *,
        parent: ChunkKey = ROOT,
        parents: Sequence[ChunkKey] = (),
        token_counts: Sequence[int] = (),
        shards: Sequence[int] = (),
        derived: bool = False,
        maker: bytes = b"",
        transient: bool = False,
        staged: bool = True,
        timeout_s: float | None = None,
    ) -> WriteBatch:
        """Ask to save `shards` (none: all) of each key. The parent of keys[i] is keys[i-1], that of keys[0] is
        `parent`, unless `parents` names one per key. `token_counts` has one entry per key when some are tails.

        What does not fit in staging memory now is answered FULL: dropped and counted, never stalled. With
        `staged=False` none is used: the bytes come out of a region, by `WriteBatch.fill`. `transient` says that the
        caller keeps the bytes itself: the daemon drops them from DRAM once they are on SSD and nobody reads them.
        """
        return drive(
            self.writing(
                keys, parent, parents, token_counts, shards, derived, maker, transient, staged, timeout_s
            )
        )

    # ---------------------------------------------------------------------------------------------- sessions

    def get_session(self, name: str | bytes, *, timeout_s: float | None = None) -> SessionInfo | None:
        """None: no such session, or the daemon could not be asked."""
        return drive(self.getting_session(name, timeout_s))

    def update_session(
        self,
        name: str | bytes,
        *,
        expected_version: int,
        keep: int,
        append: Sequence[SessionEntry],
        timeout_s: float | None = None,
    ) -> SessionInfo:
        """New version = the first `keep` entries of version `expected_version` (0: the session is new) + `append`.

        Raises Conflict when the version has moved on, Precondition when an appended chunk is not committed,
        Unavailable, and other StoreErrors.
        """
        return drive(self.updating_session(name, expected_version, keep, append, timeout_s))

    def truncate(
        self,
        name: str | bytes,
        *,
        expected_version: int,
        first_token: int,
        token_count: int,
        close_gap: bool = False,
        timeout_s: float | None = None,
    ) -> SessionInfo:
        """New version without tokens [first_token, first_token + token_count), which must fall on entry boundaries."""
        return drive(self.truncating(name, expected_version, first_token, token_count, close_gap, timeout_s))

    def fork(
        self, name: str | bytes, new_name: str | bytes, *, timeout_s: float | None = None
    ) -> SessionInfo:
        """A second name for the session's present version. Raises Conflict when it exists, NotFound, Unavailable."""
        return drive(self.forking(name, new_name, timeout_s))

    def report_duplicates(
        self,
        keys: Sequence[ChunkKey],
        checksums: Sequence[int],
        *,
        shards: Sequence[int] = (),
        maker: bytes = b"",
        timeout_s: float | None = None,
    ) -> int:
        """Tell the daemon what the caller's own bytes of chunks are that were answered ALREADY: `checksums` has one
        xxh3_64 per key and shard (of `shards`; none: all). It compares them with what it keeps, counts and logs; how
        many of the chunks differ. For a sample of chunks: an audit of engines and devices."""
        return drive(self.reporting_duplicates(keys, checksums, shards, maker, timeout_s))

    def forget(
        self,
        name: str | bytes | None = None,
        *,
        keys: Sequence[ChunkKey] = (),
        timeout_s: float | None = None,
    ) -> Forgotten:
        """Drop a session, with the chunks that nothing else names, or single keys; how many were dropped, and whether
        that holds after a restart of the daemon too (`Forgotten.not_durable`)."""
        return drive(self.forgetting(name, keys, timeout_s))

    # ------------------------------------------------------------------------------------------------- hints

    def report_resident(
        self, keys: Sequence[ChunkKey], *, ttl_ms: int = 0, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Tell the daemon which chunks this worker keeps in memory of its own (HBM), up to 4,096 of them: it replaces
        what was said before, and ends after `ttl_ms` (0: the daemon's default, a minute) and with this client. For
        `kvctl explain`, statistics and routers. How soon queued jobs need each of them: 0 not at all, else from 1 on,
        soonest first."""
        return drive(self.reporting_resident(keys, ttl_ms, timeout_s))

    def publish_queue(
        self,
        hints: Sequence[Hint],
        *,
        removed: Sequence[bytes] = (),
        snapshot: bool = True,
        ttl_ms: int = 0,
        number: int = 0,
        timeout_s: float | None = None,
    ) -> QueueAccepted:
        """Tell the daemon which jobs come next, so that their chunks are in DRAM when they are asked for.

        A snapshot replaces what this client published before for the namespace; `snapshot=False` adds or moves the jobs
        of `hints` and drops those named in `removed`. Hints end `ttl_ms` later (0: the daemon's default), and with this
        client: publish again before that. The answer has one result per hint and how far both windows reach, in jobs.

        `number` (1, 2, 3, ... over this client's messages about the namespace) lets the daemon notice that a change was
        lost: then nothing is taken, and the answer's `snapshot_wanted` asks for a snapshot. A numbered message renews
        all hints that were published before, so that an empty one is enough. 0: they are not numbered.

        Raises StoreError: a scheduler that is not heard has only lost time, so most callers log it and go on.
        """
        return drive(self.publishing_queue(hints, removed, snapshot, ttl_ms, number, timeout_s))

    def apply_actions(
        self,
        actions: Sequence[HintAction],
        *,
        cancelled: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> ActionsApplied:
        """Prefetch, demote, pin, retain or expect chunks, by session, keys or token ids; `cancelled` are names of
        earlier actions. An action ends after its time, and with this client. The answer has a result per action, and
        how many of its chunks are there.

        Raises StoreError: nothing is lost but time that could have been saved.
        """
        return drive(self.applying_actions(actions, cancelled, timeout_s))

    def touch(self, keys: Sequence[ChunkKey]) -> bool:
        """A request used these chunks, in chain order, and found them in its engine's own caches: their ages start
        anew. One message, whose answer nobody waits for. False: not connected, or too much is unanswered. At most 4096
        keys."""
        keys = _checked_keys("keys", keys)
        binding = self._bound()
        if binding is None or not keys:
            return False
        attachment, number = binding
        body = store_pb2.TouchRequest(namespace_id=number, keys=keys)
        return attachment.call("touch", body, self._connection.deadline(None)).request is not None

    # -------------------------------------------------------------------------------------------- operations

    def opening(self, timeout_s: float | None) -> Operation[None]:
        deadline = self._connection.deadline(timeout_s)
        yield partial(self._connection.wait_until, self._can_open, deadline)
        attachment = self._connection.attachment
        assert attachment is not None, self._connection
        body = store_pb2.OpenRequest(namespace=wire.spec_to_proto(self.spec))
        call = attachment.call("open", body, deadline, patient=True)
        yield call
        self._bind(attachment, wire.opened_from_proto(_raised(call.answer).open))
        self._connection.namespaces[id(self)] = self
        yield partial(self._map_directory, attachment, deadline)

    def _map_directory(self, attachment: Attachment, deadline: float) -> None:
        """Blocks. Without a directory everything is asked."""
        binding = self._binding
        if binding is None or binding[0] is not attachment or not self._connection.directory:
            return
        directory = attachment.map_directory(binding[1], deadline)
        self._published = (attachment, directory) if directory is not None else None

    def _looked_up(self, keys: Sequence[ChunkKey]) -> tuple[Directory, Found] | None:
        """What the directory says; None: the daemon has to be asked."""
        published, binding = self._published, self._bound()
        if published is None or binding is None or published[0] is not binding[0] or not keys:
            return None
        if published[0].closing:
            return None
        found = published[1].look_up(keys)
        return None if found is None else (published[1], found)

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
        keys = _checked_keys("keys", keys)
        token_count = whole("token_count", token_count)
        self._connection.deadline(timeout_s)
        published = self._looked_up(keys)
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
        binding = self._bound()
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
        keys = _checked_keys("keys", keys)
        shard_numbers = self._geometry.shards_of(tuple(wholes("shards", shards)))
        wait_ms = whole("wait_ms", wait_ms)
        ttl_ms = whole("ttl_ms", ttl_ms)
        any_order = flag("any_order", any_order)
        promote = flag("promote", promote)
        if verify is not None:
            _check_share("verify", verify)
        deadline = self._connection.deadline(timeout_s)
        binding = self._bound()
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
        published = self._looked_up(keys)
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
            told = states[:first_miss] + b"\0" + b"\2" * (len(keys) - first_miss - 1)
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

    def writing(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey,
        parents: Sequence[ChunkKey],
        token_counts: Sequence[int],
        shards: Sequence[int],
        derived: bool,
        maker: bytes,
        transient: bool,
        staged: bool,
        timeout_s: float | None,
    ) -> Operation[WriteBatch]:
        keys = _checked_keys("keys", keys)
        _check_parent(parent)
        parents = _checked_keys("parents", parents, empty=True)
        token_counts = wholes("token_counts", token_counts, 1, self.spec.chunk_tokens)
        derived, transient, staged = (
            flag(field, value)
            for field, value in (("derived", derived), ("transient", transient), ("staged", staged))
        )
        for field, column in (("parents", parents), ("token_counts", token_counts)):
            if column and len(column) != len(keys):
                raise BadRequest(
                    f"has one entry per key ({len(keys)}) or none", field=field, value=len(column)
                )
        shard_numbers = self._geometry.shards_of(tuple(wholes("shards", shards)))
        _check_maker(maker)
        lengths = [self._geometry.shard_bytes[shard] for shard in shard_numbers]
        deadline = self._connection.deadline(timeout_s)
        binding = self._bound()
        if binding is None or not keys:
            return self._no_batch(keys, self._connection.absence if keys else None)
        attachment, number = binding

        pieces: StagedPieces | None = None
        asked = len(keys)
        if staged and attachment.protection is Protection.SEALED:
            self._check_staging(lengths)
            if attachment.staging is None:
                yield partial(attachment.make_staging, self._connection.staging_bytes, deadline)
            staging = attachment.staging
            if staging is None:
                return self._no_batch(keys, None)
            pieces = StagedPieces(staging, footprint(lengths), len(keys))
            asked = pieces.count
        if not asked:
            return self._no_batch(keys, None)

        def give_back(answer: store_pb2.AttachReply) -> None:
            attachment.notice(
                "abort", [answer.reserve.reservation_id] if answer.reserve.reservation_id else []
            )

        body = store_pb2.ReserveRequest(
            namespace_id=number,
            keys=keys[:asked],
            parent=parent,
            parents=parents[:asked],
            token_counts=token_counts[:asked],
            shards=shard_numbers,
            derived=derived,
            maker=maker,
            transient=transient,
            packed_extents=True,
        )
        batch = None
        try:
            call = attachment.call("reserve", body, deadline, on_late=give_back)
            yield call
            answer = call.answer
            if not isinstance(answer, store_pb2.AttachReply):
                return self._no_batch(keys, answer)
            try:
                reserved = wire.reserved_from_proto(answer.reserve)
                if staged and pieces is None:
                    missing = attachment.mappings.missing(set(reserved.extents.segment))
                    if missing:
                        yield partial(attachment.map_segments, missing, deadline)
                batch = self._batch(reserved, keys, shard_numbers, lengths, staged, pieces, attachment)
                if batch is not None:
                    attachment.batches[batch.reservation_id] = batch
            finally:
                kept = attachment.keep(call)
                if batch is None and kept:
                    give_back(answer)
        finally:
            if batch is None and pieces is not None:
                pieces.end()  # nothing was committed, so the daemon reads none of it
        if batch is None:
            return self._no_batch(keys, gone("the reserved slots could not be mapped"))
        if kept:
            return batch
        batch.abort()
        return self._no_batch(keys, self._connection.absence)

    def _batch(
        self,
        reserved: Reserved,
        keys: Sequence[ChunkKey],
        shards: tuple[int, ...],
        lengths: Sequence[int],
        staged: bool,
        pieces: StagedPieces | None,
        attachment: Attachment,
    ) -> WriteBatch | None:
        """The batch of an answer; None when it does not fit the request, or its slots are not mapped."""
        results = list(reserved.results)
        results += [GrantResult.FULL] * (len(keys) - len(results))
        granted = [index for index, result in enumerate(results) if result is GrantResult.GRANTED]
        if list(reserved.extents.length) != list(lengths) * len(granted):
            log.error("an answer to Reserve does not fit the request: %d keys granted", len(granted))
            return None
        slots: list[npt.NDArray[np.uint8]] = []
        if pieces is not None:
            pieces.limit(len(granted))
        elif staged:
            mapped = MappedExtents(reserved.extents, lengths, attachment.mappings)
            if mapped.wrong:
                return None
            slots = [mapped.data(row) for row in range(len(mapped))]
        self._count_dropped(results)
        return WriteBatch(
            results,
            shards=shards,
            attachment=attachment,
            timeout_s=self._connection.timeout_s,
            reservation_id=reserved.reservation,
            lengths=lengths,
            slots=slots,
            pieces=pieces,
        )

    def _no_batch(self, keys: Sequence[ChunkKey], error: StoreError | None) -> WriteBatch:
        results = (GrantResult.FULL,) * len(keys)
        self._count_dropped(results)
        return WriteBatch(results, error=error)

    def _count_dropped(self, results: Sequence[GrantResult]) -> None:
        dropped = results.count(GrantResult.FULL) + results.count(GrantResult.QUOTA)
        if dropped:
            self._connection.count("saves_dropped", dropped)

    def _check_staging(self, lengths: Sequence[int]) -> None:
        if footprint(lengths) > self._connection.staging_bytes:
            raise BadRequest(
                f"is too small for one chunk's {footprint(lengths)} bytes",
                field="staging_bytes",
                value=self._connection.staging_bytes,
                remedy="connect with more, or write fewer shards at a time",
            )

    # ---------------------------------------------------------------------------------------------- sessions

    def getting_session(self, name: str | bytes, timeout_s: float | None) -> Operation[SessionInfo | None]:
        try:
            answer = yield from self._asking(
                "get_session", store_pb2.GetSessionRequest(session=_name(name)), timeout_s
            )
        except (NotFound, Unavailable, DeadlineExceeded):
            return None
        info = wire.session_from_proto(answer.session)
        return info if info.version else None

    def updating_session(
        self,
        name: str | bytes,
        expected_version: int,
        keep: int,
        append: Sequence[SessionEntry],
        timeout_s: float | None,
    ) -> Operation[SessionInfo]:
        _check_entries(append)
        body = store_pb2.UpdateSessionRequest(
            session=_name(name),
            expected_version=whole("expected_version", expected_version),
            keep=whole("keep", keep),
            append=wire.entries_to_proto(append),
        )
        answer = yield from self._asking("update_session", body, timeout_s)
        return wire.session_from_proto(answer.session)

    def truncating(
        self,
        name: str | bytes,
        expected_version: int,
        first_token: int,
        token_count: int,
        close_gap: bool,
        timeout_s: float | None,
    ) -> Operation[SessionInfo]:
        body = store_pb2.TruncateRequest(
            session=_name(name),
            expected_version=whole("expected_version", expected_version),
            first_token=whole("first_token", first_token),
            token_count=whole("token_count", token_count),
            close_gap=flag("close_gap", close_gap),
        )
        answer = yield from self._asking("truncate", body, timeout_s)
        return wire.session_from_proto(answer.session)

    def forking(
        self, name: str | bytes, new_name: str | bytes, timeout_s: float | None
    ) -> Operation[SessionInfo]:
        body = store_pb2.ForkRequest(session=_name(name), new_session=_name(new_name, "new_name"))
        answer = yield from self._asking("fork", body, timeout_s)
        return wire.session_from_proto(answer.session)

    def forgetting(
        self, name: str | bytes | None, keys: Sequence[ChunkKey], timeout_s: float | None
    ) -> Operation[Forgotten]:
        keys = _checked_keys("keys", keys)
        session = b"" if name is None else _name(name)
        if bool(session) == bool(keys):
            raise BadRequest("name either a session or keys", field="name", value=name)
        answer = yield from self._asking(
            "forget", store_pb2.ForgetRequest(session=session, keys=keys), timeout_s
        )
        return Forgotten(answer.done.count, answer.done.not_durable)

    def reporting_duplicates(
        self,
        keys: Sequence[ChunkKey],
        checksums: Sequence[int],
        shards: Sequence[int],
        maker: bytes,
        timeout_s: float | None,
    ) -> Operation[int]:
        body = store_pb2.ReportDuplicatesRequest(
            keys=_checked_keys("keys", keys),
            checksums=wholes("checksums", checksums, 0, CHECKSUM_MAX),
            shards=self._geometry.shards_of(tuple(wholes("shards", shards))),
            maker=_check_maker(maker),
        )
        answer = yield from self._asking("report_duplicates", body, timeout_s)
        return answer.done.count

    def reporting_resident(
        self, keys: Sequence[ChunkKey], ttl_ms: int, timeout_s: float | None
    ) -> Operation[tuple[int, ...]]:
        body = store_pb2.ReportResidentRequest(
            keys=_checked_keys("keys", keys), ttl_ms=whole("ttl_ms", ttl_ms)
        )
        answer = yield from self._asking("report_resident", body, timeout_s)
        ranks = tuple(answer.resident.ranks)
        if len(ranks) != len(keys):
            raise StoreError("one rank a key was asked for", field="ranks", value=len(ranks))
        return ranks

    def publishing_queue(
        self,
        hints: Sequence[Hint],
        removed: Sequence[bytes],
        snapshot: bool,
        ttl_ms: int,
        number: int,
        timeout_s: float | None,
    ) -> Operation[QueueAccepted]:
        body = queue_request(
            hints,
            removed=removed,
            snapshot=snapshot,
            ttl_ms=ttl_ms,
            number=number,
            keys_of=self.prompt_keys,
        )
        answer = yield from self._asking("publish_queue", body, timeout_s)
        return queue_accepted(answer.queue, len(hints))

    def applying_actions(
        self, actions: Sequence[HintAction], cancelled: Sequence[bytes], timeout_s: float | None
    ) -> Operation[ActionsApplied]:
        body = actions_request(actions, cancelled=cancelled, keys_of=self.prompt_keys)
        answer = yield from self._asking("apply_actions", body, timeout_s)
        return actions_applied(answer.actions, len(actions))

    def _asking(self, field: str, body: Any, timeout_s: float | None) -> Operation[store_pb2.AttachReply]:
        """A request that waits for a connection and whose failure is raised."""
        deadline = self._connection.deadline(timeout_s)
        if not self._can_ask():
            yield partial(self._connection.wait_until, self._can_ask, deadline)
        binding = self._bound()
        if binding is None:
            raise gone("the connection was lost at this moment")
        attachment, body.namespace_id = binding
        call = attachment.call(field, body, deadline, patient=True)
        yield call
        return _raised(call.answer)

    # ----------------------------------------------------------------------------------------------- binding

    def _bound(self) -> tuple[Attachment, NamespaceId] | None:
        """The attachment and the number that the namespace has there; None while there is none, and in a forked child.
        The two belong together: another boot of the daemon may know another namespace by that number."""
        binding = self._binding
        usable = binding is not None and binding[0].alive and binding[0].pid == os.getpid()
        return binding if usable else None

    def _can_open(self) -> bool:
        attachment = self._connection.attachment
        return attachment is not None and attachment.attached

    def _can_ask(self) -> bool:
        binding = self._bound()
        return binding is not None and binding[0].attached

    def _bind(self, attachment: Attachment, opened: Opened) -> None:
        self._salt = opened.salt
        self.notes = opened.notes
        self._binding = (attachment, opened.namespace)
        self._published = None
        self._connection.changed()

    def reopen(self, attachment: Attachment, now: float) -> None:
        """Called now and then by the connection: after a restart of the daemon, open the namespace there too."""
        if self._bound() is not None and self._binding is not None and self._binding[0] is attachment:
            return
        asked, at = self._reopening
        if asked is attachment and now < at + REOPEN_AGAIN_S:
            return
        self._reopening = (attachment, now)

        def answered(answer: Reply) -> None:
            if isinstance(answer, store_pb2.AttachReply):
                self._bind(attachment, wire.opened_from_proto(answer.open))
                # On the housekeeping thread, which may wait a little.
                attachment.later(
                    lambda: self._map_directory(attachment, time.monotonic() + DIRECTORY_AGAIN_S)
                )
                self._connection.wake()
            else:
                self._connection.count("reopens_failed")
                log.warning("%r could not be opened again: %s", self, answer)

        body = store_pb2.OpenRequest(namespace=wire.spec_to_proto(self.spec))
        attachment.call("open", body, now + self._connection.timeout_s, patient=True, on_reply=answered)


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


def _raised(answer: Reply) -> store_pb2.AttachReply:
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _check_count(field: str, items: Sequence[Any], what: str = "of them") -> None:
    if len(items) > KEYS_PER_REQUEST_MAX:
        raise BadRequest(
            f"a request has at most {KEYS_PER_REQUEST_MAX} {what}",
            field=field,
            value=len(items),
            remedy="split the request",
        )


def _check_job(field: str, name: bytes) -> bytes:
    if not 1 <= len(binary(field, name)) <= JOB_NAME_BYTES_MAX:
        raise BadRequest(
            f"a job's name has 1 to {JOB_NAME_BYTES_MAX} bytes", field=field, value=f"{len(name)} bytes"
        )
    return name


def _checked_keys(field: str, keys: Sequence[ChunkKey], *, empty: bool = False) -> Sequence[ChunkKey]:
    """The keys, in a list or tuple."""
    keys = listed(field, keys, "keys (bytes)")
    _check_count(field, keys, "keys")
    sizes = set(map(len, keys)) if set(map(type, keys)) == {bytes} else {0}
    if min(sizes) > 0 and max(sizes) <= KEY_BYTES_MAX:
        return keys
    for index, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) > KEY_BYTES_MAX or not (key or empty):
            raise BadRequest(
                f"a key is {0 if empty else 1} to {KEY_BYTES_MAX} bytes",
                field=f"{field}[{index}]",
                value=f"{len(key)} bytes" if isinstance(key, bytes) else shown(key),
            )
    return keys


def _check_iterable(field: str, values: Any) -> None:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise wrong_type(field, values, "an iterable of lists of keys")


def _check_parent(parent: ChunkKey) -> None:
    if len(binary("parent", parent)) > KEY_BYTES_MAX:
        raise BadRequest(f"a key is 0 to {KEY_BYTES_MAX} bytes", field="parent", value=f"{len(parent)} bytes")


def _check_share(field: str, value: float) -> None:
    try:
        good = 0 <= value <= 1
    except TypeError:
        raise wrong_type(field, value, "a number between 0 and 1, or None") from None
    if not good:
        raise BadRequest("must be between 0 and 1", field=field, value=value)


def _check_maker(maker: bytes) -> bytes:
    if len(binary("maker", maker)) not in (0, MAKER_BYTES):
        raise BadRequest(f"has {MAKER_BYTES} bytes or none", field="maker", value=maker)
    return maker


def _check_entries(append: Sequence[SessionEntry]) -> None:
    for index, entry in enumerate(listed("append", append, "SessionEntry")):
        where = f"append[{index}]"
        one_of(where, entry, SessionEntry)
        whole(f"{where}.first_token", entry.first_token)
        whole(f"{where}.token_count", entry.token_count, 1)
        whole(f"{where}.delta", entry.delta, -NUMBER_MAX)
        flag(f"{where}.approximate", entry.approximate)
    _checked_keys("append", [entry.key for entry in append])


def _name(name: str | bytes, field: str = "name") -> bytes:
    if isinstance(name, str):
        name = text(field, name).encode()
    elif not isinstance(name, bytes):
        raise wrong_type(field, name, "a str or bytes")
    if not 1 <= len(name) <= SESSION_NAME_BYTES_MAX:
        raise BadRequest(
            f"a session's name has 1 to {SESSION_NAME_BYTES_MAX} bytes",
            field=field,
            value=f"{len(name)} bytes",
        )
    return name


def queue_request(
    hints: Sequence[Hint],
    *,
    removed: Sequence[bytes],
    snapshot: bool,
    ttl_ms: int,
    number: int = 0,
    keys_of: KeysOf | None = None,
) -> hints_pb2.PublishQueueRequest:
    """The message, without its namespace. Raises BadRequest."""
    hints = listed("hints", hints, "Hint")
    removed = listed("removed", removed, "names of jobs (bytes)")
    _check_count("hints", hints)
    _check_count("removed", removed)
    return hints_pb2.PublishQueueRequest(
        hints=[_hint(f"hints[{index}]", hint, keys_of) for index, hint in enumerate(hints)],
        removed=[_check_job(f"removed[{index}]", job) for index, job in enumerate(removed)],
        delta=not flag("snapshot", snapshot),
        ttl_ms=whole("ttl_ms", ttl_ms),
        number=whole("number", number),
    )


def _hint(where: str, hint: Hint, keys_of: KeysOf | None) -> hints_pb2.Hint:
    one_of(where, hint, Hint)
    keys = _keys_named(where, hint, keys_of)
    session = hint.session
    return hints_pb2.Hint(
        job=_check_job(f"{where}.job", hint.job),
        position=whole(f"{where}.position", hint.position, 0, QUEUE_POSITION_MAX),
        session=_name(session, f"{where}.session") if session or not isinstance(session, bytes) else b"",
        keys=keys,
    )


def _keys_named(where: str, named: Hint | HintAction, keys_of: KeysOf | None) -> Sequence[ChunkKey]:
    """By keys, else by the beginning of a prompt: behind so many chunks nobody needs a hint."""
    keys = _checked_keys(f"{where}.keys", named.keys)
    if keys or keys_of is None or not len(named.tokens):
        return keys
    return keys_of(named.tokens)[:KEYS_PER_REQUEST_MAX]


def actions_request(
    actions: Sequence[HintAction], *, cancelled: Sequence[bytes], keys_of: KeysOf
) -> hints_pb2.ApplyActionsRequest:
    """The message, without its namespace. Raises BadRequest."""
    actions = listed("actions", actions, "HintAction")
    cancelled = listed("cancelled", cancelled, "names of actions (bytes)")
    return hints_pb2.ApplyActionsRequest(
        actions=[_action(f"actions[{index}]", action, keys_of) for index, action in enumerate(actions)],
        cancelled=[_check_job(f"cancelled[{index}]", name) for index, name in enumerate(cancelled)],
    )


def _action(where: str, action: HintAction, keys_of: KeysOf) -> hints_pb2.HintAction:
    one_of(where, action, HintAction)
    one_of(f"{where}.kind", action.kind, ActionKind)
    return hints_pb2.HintAction(
        name=_check_job(f"{where}.name", action.name),
        kind=f"ACTION_KIND_{action.kind.name}",
        session=_name(action.session, f"{where}.session") if action.session else b"",
        keys=_keys_named(where, action, keys_of),
        ttl_ms=whole(f"{where}.ttl_ms", action.ttl_ms),
        eta_ms=whole(f"{where}.eta_ms", action.eta_ms),
    )


def actions_applied(reply: hints_pb2.ActionsReply, actions: int) -> ActionsApplied:
    applied = wire.actions_from_proto(reply)
    if not len(applied.results) == len(applied.chunks) == actions:
        raise StoreError(
            "the daemon answered for another number of actions", field="results", value=len(applied.results)
        )
    return applied


def queue_accepted(reply: hints_pb2.QueueReply, hints: int) -> QueueAccepted:
    accepted = wire.queue_from_proto(reply)
    if len(accepted.results) != hints:
        raise StoreError(
            "the daemon answered for another number of hints", field="results", value=len(accepted.results)
        )
    return accepted
