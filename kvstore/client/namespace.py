"""One namespace of the store, and every operation on it, each written once as a generator (see `call`).

`Namespace` is its blocking face, `aio.AsyncNamespace` the awaitable one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvstore import wire
from kvstore.answers import (
    ActionsApplied,
    Matched,
    Peeked,
    QueueAccepted,
    SessionInfo,
)
from kvstore.arguments import flag, whole, wholes
from kvstore.client.attachment import Attachment
from kvstore.client.batch import PutOutcome, WriteBatch
from kvstore.client.binding import Binding
from kvstore.client.call import Operation, drive
from kvstore.client.connection import Connection
from kvstore.client.geometry import Geometry
from kvstore.client.lease import ReadLease
from kvstore.client.prompts import prompt_keys
from kvstore.client.reader import Reader
from kvstore.client.requests import (
    actions_applied,
    actions_request,
    check_entries,
    check_maker,
    checked_keys,
    queue_accepted,
    queue_request,
    session_name,
)
from kvstore.client.writer import Writer
from kvstore.errors import BadRequest, DeadlineExceeded, NotFound, StoreError, Unavailable
from kvstore.keys import ROOT, Tokens, exact_chain, exact_key
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ChunkKey,
    Hint,
    HintAction,
    SessionEntry,
    Wait,
)
from kvstore.v1 import store_pb2

if TYPE_CHECKING:  # the public way back from a namespace to the client that opened it
    from kvstore.client.sync import Client

log = logging.getLogger(__name__)

CHECKSUM_MAX = (1 << 64) - 1


class Forgotten(int):
    """How many were dropped. All are misses from now on, as long as the daemon lives."""

    not_durable: str
    """Why a restart of the daemon now could bring them back; empty: nothing brings them back."""

    def __new__(cls, count: int, not_durable: str = "") -> Forgotten:
        self = super().__new__(cls, count)
        self.not_durable = not_durable
        return self


class Namespace:
    """Chunks of one model replica in one layout. Made by `Client.open`; survives restarts of the daemon, after which it
    is opened again in the background. Thread-safe.

    `match`, `read`, `write` and `put` never raise because the daemon is away, late or refuses: then every key is a MISS
    (UNAVAILABLE) or not granted. They raise BadRequest for what the caller got wrong. Timeouts are in seconds; None
    stands for the connection's.
    """

    def __init__(self, client: Client, connection: Connection, spec: NamespaceSpec) -> None:
        """Not known to the daemon yet: `opening` does that."""
        self.spec = spec
        self.client = client
        self._connection = connection
        self._geometry = Geometry(spec)
        self._binding = Binding(connection, spec)
        self._reader = Reader(self._binding, self._geometry)
        self._writer = Writer(self._binding, self._geometry)
        self.matching = self._reader.matching
        self.reading = self._reader.reading
        self.asked = self._writer.asked
        self.writing = self._writer.writing
        self.putting = self._writer.putting

    def __repr__(self) -> str:
        return f"Namespace({self.spec.model}, epoch {self.spec.weights_epoch}, {self._binding!r})"

    @property
    def salt(self) -> bytes:
        """32 bytes that key this namespace's chunk hashes; the daemon derives them from tenant and spec."""
        return self._binding.salt

    @property
    def notes(self) -> tuple[str, ...]:
        """In which fields other namespaces of the same model differ: why there may be no hits."""
        return self._binding.notes

    def keys(self, tokens: Tokens, parent: ChunkKey = ROOT) -> list[ChunkKey]:
        """Keys of all full chunks of `tokens`, which follow the chain that ends in `parent`."""
        return exact_chain(self.salt, tokens, self.spec.chunk_tokens, parent)

    def prompt_keys(self, tokens: Tokens) -> list[ChunkKey]:
        """As `keys` of a chain's beginning, by whatever protocol the namespace's keys are made. Raises Unsupported for
        one that is not known."""
        return prompt_keys(self.spec, self.salt, tokens)

    def tail_key(self, tokens: Tokens, parent: ChunkKey) -> ChunkKey:
        """Key of the rest of a conversation: fewer tokens than a chunk, after `parent`."""
        return exact_key(self.salt, parent, tokens)

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
        return self._reader.peek(keys, token_count=token_count)

    def note_lookup(self, keys: Sequence[ChunkKey], peeked: Peeked) -> None:
        """Tell the daemon that a request was answered with what `peek` said of these keys: for statistics, recordings
        and what is learned of misses, since no other message may come of it. Once for each request; what is found is
        counted when it is read. Waits for nothing."""
        self._reader.note_lookup(keys, peeked)

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

    def map_segments(self, *, shards: Sequence[int] = (), timeout_s: float | None = None) -> int:
        """Maps the segments that have chunks of these `shards` now (none: all), for an engine whose device takes long
        to register memory; others are mapped when they are first read. Returns how many it found: 0 where the
        namespace has no directory. Raises BadRequest for shards that there are not."""
        numbers = self._geometry.shards_of(tuple(shards))
        published, binding = self._binding.published, self._binding.now()
        if published is None or binding is None or published[0] is not binding[0]:
            return 0
        attachment, directory = published
        segments = directory.segments(numbers)
        attachment.map_segments(segments, self._connection.deadline(timeout_s))
        return len(segments)

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

        A daemon that is away or late is UNAVAILABLE. What does not fit in staging memory now is answered FULL: dropped
        and counted, never stalled. With `staged=False` none is used: the bytes come out of a region, by
        `WriteBatch.fill`. `transient` says that the caller keeps the bytes itself: the daemon drops them from DRAM once
        they are on SSD and nobody reads them.
        """
        asked = self.asked(keys, parent, parents, token_counts, shards, derived, maker, transient)
        return drive(self.writing(asked, staged, timeout_s))

    def put(
        self,
        keys: Sequence[ChunkKey],
        values: Sequence[Any] | npt.NDArray[Any],
        *,
        parent: ChunkKey = ROOT,
        parents: Sequence[ChunkKey] = (),
        token_counts: Sequence[int] = (),
        shards: Sequence[int] = (),
        derived: bool = False,
        maker: bytes = b"",
        transient: bool = False,
        wait: Wait = Wait.VISIBLE,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        """`write`, copies and commit in one call, for bytes that are all there: `values` has a numpy array (any
        strides), CPU tensor or other buffer for each key, then for each of `shards`.

        Under protection `sealed`, what is new and no more than some MiB takes one message. Raises BadRequest.
        """
        asked = self.asked(keys, parent, parents, token_counts, shards, derived, maker, transient)
        return drive(self.putting(asked, values, wait, timeout_s))

    # ---------------------------------------------------------------------------------------------- sessions

    def get_session(self, name: str | bytes, *, timeout_s: float | None = None) -> SessionInfo | None:
        """None: no such session, or the daemon could not be asked."""
        return drive(self.getting_session(name, timeout_s))

    def find_session(self, name: str | bytes, *, timeout_s: float | None = None) -> SessionInfo | None:
        """As `get_session`, and in `elsewhere` what another node of the fleet told of it last: the keys of its chunks.
        Its version is 0 if this node has no such session. None: nobody has, or the daemon could not be asked."""
        return drive(self.finding_session(name, timeout_s))

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

    def report_wrong(
        self, keys: Sequence[ChunkKey], *, healthy: bool, maker: bytes = b"", timeout_s: float | None = None
    ) -> int:
        """Tell the daemon that the caller (`maker`) loaded these chunks, computed them again, and came to something
        else than rounding explains. `healthy`: it computes the same twice, and what it computed when it began. Who made
        them is quarantined for this tenant if the caller is healthy, or once a second engine group says the same: what
        it made is purged, and it saves no more. Returns how many makers this report has sent there."""
        return drive(self.reporting_wrong(keys, healthy, maker, timeout_s))

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
        keys = checked_keys("keys", keys)
        bound = self._binding.now()
        if bound is None or not keys:
            return False
        attachment, number = bound
        body = store_pb2.TouchRequest(namespace_id=number, keys=keys)
        return attachment.call("touch", body, self._connection.deadline(None)).request is not None

    # -------------------------------------------------------------------------------------------- operations

    def opening(self, timeout_s: float | None) -> Operation[None]:
        yield from self._binding.opening(timeout_s)
        self._connection.namespaces[id(self)] = self

    def reopen(self, attachment: Attachment, now: float) -> None:
        """Called now and then by the connection: after a restart of the daemon, open the namespace there too."""
        self._binding.reopen(attachment, now)

    def getting_session(self, name: str | bytes, timeout_s: float | None) -> Operation[SessionInfo | None]:
        try:
            answer = yield from self._binding.asking(
                "get_session", store_pb2.GetSessionRequest(session=session_name(name)), timeout_s
            )
        except (NotFound, Unavailable, DeadlineExceeded):
            return None
        info = wire.session_from_proto(answer.session)
        return info if info.version else None

    def finding_session(self, name: str | bytes, timeout_s: float | None) -> Operation[SessionInfo | None]:
        request = store_pb2.GetSessionRequest(session=session_name(name), elsewhere=True)
        try:
            answer = yield from self._binding.asking("get_session", request, timeout_s)
        except (NotFound, Unavailable, DeadlineExceeded):
            return None
        info = wire.session_from_proto(answer.session)
        return info if info.version or info.elsewhere is not None else None

    def updating_session(
        self,
        name: str | bytes,
        expected_version: int,
        keep: int,
        append: Sequence[SessionEntry],
        timeout_s: float | None,
    ) -> Operation[SessionInfo]:
        check_entries(append)
        body = store_pb2.UpdateSessionRequest(
            session=session_name(name),
            expected_version=whole("expected_version", expected_version),
            keep=whole("keep", keep),
            append=wire.entries_to_proto(append),
        )
        answer = yield from self._binding.asking("update_session", body, timeout_s)
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
            session=session_name(name),
            expected_version=whole("expected_version", expected_version),
            first_token=whole("first_token", first_token),
            token_count=whole("token_count", token_count),
            close_gap=flag("close_gap", close_gap),
        )
        answer = yield from self._binding.asking("truncate", body, timeout_s)
        return wire.session_from_proto(answer.session)

    def forking(
        self, name: str | bytes, new_name: str | bytes, timeout_s: float | None
    ) -> Operation[SessionInfo]:
        body = store_pb2.ForkRequest(
            session=session_name(name), new_session=session_name(new_name, "new_name")
        )
        answer = yield from self._binding.asking("fork", body, timeout_s)
        return wire.session_from_proto(answer.session)

    def forgetting(
        self, name: str | bytes | None, keys: Sequence[ChunkKey], timeout_s: float | None
    ) -> Operation[Forgotten]:
        keys = checked_keys("keys", keys)
        session = b"" if name is None else session_name(name)
        if bool(session) == bool(keys):
            raise BadRequest("name either a session or keys", field="name", value=name)
        answer = yield from self._binding.asking(
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
            keys=checked_keys("keys", keys),
            checksums=wholes("checksums", checksums, 0, CHECKSUM_MAX),
            shards=self._geometry.shards_of(tuple(wholes("shards", shards))),
            maker=check_maker(maker),
        )
        answer = yield from self._binding.asking("report_duplicates", body, timeout_s)
        return answer.done.count

    def reporting_wrong(
        self, keys: Sequence[ChunkKey], healthy: bool, maker: bytes, timeout_s: float | None
    ) -> Operation[int]:
        body = store_pb2.ReportDuplicatesRequest(
            keys=checked_keys("keys", keys), maker=check_maker(maker), wrong=True, healthy=healthy
        )
        answer = yield from self._binding.asking("report_duplicates", body, timeout_s)
        return answer.done.count

    def reporting_resident(
        self, keys: Sequence[ChunkKey], ttl_ms: int, timeout_s: float | None
    ) -> Operation[tuple[int, ...]]:
        body = store_pb2.ReportResidentRequest(
            keys=checked_keys("keys", keys), ttl_ms=whole("ttl_ms", ttl_ms)
        )
        answer = yield from self._binding.asking("report_resident", body, timeout_s)
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
        answer = yield from self._binding.asking("publish_queue", body, timeout_s)
        return queue_accepted(answer.queue, len(hints))

    def applying_actions(
        self, actions: Sequence[HintAction], cancelled: Sequence[bytes], timeout_s: float | None
    ) -> Operation[ActionsApplied]:
        body = actions_request(actions, cancelled=cancelled, keys_of=self.prompt_keys)
        answer = yield from self._binding.asking("apply_actions", body, timeout_s)
        return actions_applied(answer.actions, len(actions))
