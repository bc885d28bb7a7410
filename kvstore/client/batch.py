"""A grant to save chunks: buffers to be filled, then committed all together or not at all."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import wire
from kvstore.arguments import NUMBER_MAX, one_of, rows_of, seconds, whole, wholes
from kvstore.client.call import FORKED, Call, Operation, Reply, drive, gone
from kvstore.client.destination import gather, groups, origin
from kvstore.client.line import Line
from kvstore.client.region import Region
from kvstore.client.staging import Staging, footprint
from kvstore.errors import BadRequest, DeadlineExceeded, StoreError, Unavailable
from kvstore.types import CommitResult, GrantResult, Wait
from kvstore.v1 import store_pb2

Bytes = npt.NDArray[np.uint8]

FILL_AHEAD_BYTES = 4 << 20
"""What was written is handed over in parts of this much while the rest is being written: enough that a message costs
little beside it."""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`ok`: the daemon has everything that was granted; `results` has one entry per granted key. Else `error` says why
    the save was dropped; after a timeout the chunks may still appear."""

    ok: bool
    results: tuple[CommitResult, ...] = ()
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """`results` has one entry per key: GRANTED, its bytes were taken; ALREADY, the daemon has it; else why not.
    `committed` has one entry per granted key. With an `error` nothing is known to have been taken; after a timeout it
    may still appear."""

    results: tuple[GrantResult, ...]
    committed: tuple[CommitResult, ...] = ()
    error: StoreError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class StagedPieces:
    """Staging memory of one batch, in pieces of one size, one for each chunk at most. A piece that the daemon has read
    serves the batch again at once, while it is in the cache still; when the batch ends each is given back, as soon as
    nobody reads it any more. Thread-safe.

    What an interruption (Ctrl-C) kept from being given back is given back in the end all the same: a request that names
    a piece holds this object until it is answered, so when nobody holds it any more, nobody reads any of it.
    """

    def __init__(self, staging: Staging, length: int, wanted: int) -> None:
        """As many pieces as there is room for, `wanted` at most."""
        self.staging = staging
        self._length = length
        self._lock = threading.Lock()
        self._ended = False
        self._held: set[int] = set()
        """By a chunk, and not handed over yet."""
        self._idle: list[int] = []
        """The last is next."""
        self._taken: set[int] = set()
        """All that are not given back."""
        while self.count < wanted and (start := staging.space.take(length)) is not None:
            self._taken.add(start)
            self._idle.append(start)
        self._idle.reverse()

    def __del__(self) -> None:
        for start in getattr(self, "_taken", ()):
            self.staging.space.drop(start, self._length)

    def __repr__(self) -> str:
        return f"StagedPieces({len(self._held)} held, {len(self._idle)} idle, of {self._length} bytes)"

    @property
    def count(self) -> int:
        return len(self._idle) + len(self._held)

    def limit(self, count: int) -> None:
        """Keep `count` of the idle ones."""
        with self._lock:
            spare, self._idle = self._idle[: len(self._idle) - count], self._idle[len(self._idle) - count :]
        self._give_back(spare)

    def next(self) -> int:
        """A piece for one more chunk; there is one for each."""
        with self._lock:
            start = self._idle.pop()
            self._held.add(start)
        return start

    def handed_over(self, starts: Sequence[int]) -> None:
        """The daemon is told to read these."""
        with self._lock:
            self._held.difference_update(starts)

    def take_back(self, starts: Sequence[int]) -> None:
        """It was not told."""
        with self._lock:
            self._held.update(starts)

    def read(self, starts: Sequence[int]) -> None:
        """The daemon has read these, or never will."""
        with self._lock:
            if not self._ended:
                self._idle += starts
                return
        self._give_back(starts)

    def end(self) -> None:
        """No chunk will be written any more. Idempotent."""
        with self._lock:
            self._ended = True
            unread = [*self._idle, *self._held]
            self._idle, self._held = [], set()
        self._give_back(unread)

    def _give_back(self, starts: Sequence[int]) -> None:
        for start in starts:
            self._taken.discard(start)
            self.staging.space.give_back(start, self._length)


class _State(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    """Sent; whatever came of it."""
    ENDED = "aborted"


class WriteBatch:
    """What `Namespace.write` was granted. A context manager that aborts what was not committed; never raises because of
    a lost or late daemon.

    `results` has one entry per key of the request; `granted` the numbers of the keys that are to be written. `error`
    says why nothing was granted when the daemon could not be asked.
    """

    def __init__(
        self,
        results: Sequence[GrantResult],
        *,
        shards: tuple[int, ...] = (),
        attachment: Line | None = None,
        timeout_s: float = 0.0,
        reservation_id: int = 0,
        lengths: Sequence[int] = (),
        slots: Sequence[Bytes] = (),
        pieces: StagedPieces | None = None,
        error: StoreError | None = None,
    ) -> None:
        """`lengths` are those of the shards. Chunks are written into `slots`, per granted key, then per shard; or into
        `pieces`, one for each granted key at least. Without either the bytes come by `fill`."""
        self.results = tuple(results)
        self.granted = tuple(n for n, result in enumerate(results) if result is GrantResult.GRANTED)
        self.shards = shards
        self.error = error
        self.reservation_id = reservation_id
        self._attachment = attachment
        self._timeout_s = timeout_s
        self._lengths = tuple(lengths)
        self._slots = tuple(slots)
        self._pieces = pieces
        # Of one chunk: where its shards are in a piece, and its bytes.
        self._columns = [footprint(lengths[:column]) for column in range(len(lengths))]
        self._chunk_bytes = sum(lengths)
        self._in_place = bool(slots)
        self._staged = self._in_place or pieces is not None
        # By row: the number of a key among the granted ones.
        self._rows = {index: row for row, index in enumerate(self.granted)}
        self._starts: dict[int, int] = {}
        """Piece of each that has one."""
        self._begun: set[int] = set()
        """Place x number of shards + column of what was copied, and of buffers that were asked for."""
        self._unwritten: dict[int, set[int]] = {}
        """Shards (by their number in `shards`) that are still to be written, of those that were begun."""
        self._written: list[int] = []
        self._handed_over: set[int] = set()
        self._checksums: dict[tuple[int, int], int] = {}
        """By row and column, of what we copied in place: the daemon would have to read from memory what is in our
        cache now."""
        self._filled = False
        self._copying = 0
        """Threads that are inside of `copy_from`."""
        self._state = _State.OPEN
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        why = f", {self.error}" if self.error else ""
        return (
            f"WriteBatch({self.reservation_id}, {len(self.granted)} of {len(self.results)} keys granted, "
            f"{self._state.value}{why})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is _State.OPEN:
            self.abort()

    def __del__(self) -> None:
        # May run at any point of any thread, so it takes no lock and leaves the work to the housekeeping.
        if getattr(self, "_state", None) is _State.OPEN and self._attachment is not None:
            self._attachment.later(partial(_give_back, self._attachment, self.reservation_id, self._pieces))

    def buffer(self, index: int, shard: int | None = None) -> Bytes:
        """Where to put the bytes of key number `index`, shard `shard` (default: the first): a writable row of
        uint8, not zeroed, valid until `written`, commit or abort; writing later corrupts other saves of this process.

        Raises BadRequest for a key that was not granted or a batch that has ended, Unavailable in a forked child.
        """
        return self._buffer(*self._row_and_column(index, shard))

    def copy_from(self, index: int, source: Any, *, shard: int | None = None) -> None:
        """Copy `source` into the buffer: a numpy array (any strides), CPU tensor or other buffer of the shard's bytes;
        and hand it over, as `written` does. Raises as `buffer`, and BadRequest for a wrong size."""
        self.copy_many(((index, shard, source),))

    def copy_many(self, pieces: Sequence[tuple[int, int | None, Any]]) -> None:
        """`copy_from` for all of (index, shard, source), in less time where they are many and small. Raises as that
        does; whatever is wrong with an index, a shard or a size before anything is copied."""
        plan = []
        for index, shard, source in rows_of("pieces", pieces, "(index, shard, source)", 3):
            row, column = self._row_and_column(index, shard)
            bits = origin(source)
            if bits.nbytes != self._lengths[column]:
                raise BadRequest(
                    f"must have the shard's {self._lengths[column]} bytes",
                    field="source",
                    value=f"{bits.nbytes} bytes",
                )
            plan.append((row, column, bits))
        for group in groups([bits.nbytes for _, _, bits in plan]):
            mine = plan[group]
            with self._lock:
                pairs = [(self._target(row, column), bits) for row, column, bits in mine]
                self._copying += 1
            try:
                gather(pairs)
                checksums = [_checksum(target) for target, _ in pairs] if self._in_place else []
            finally:
                self._copied()
            self._note_written([(row, column) for row, column, _ in mine], checksums)

    def written(self, index: int, shard: int | None = None) -> None:
        """The buffer has its bytes, and is not touched any more: the daemon may copy and checksum them while the next
        ones are being written. Optional: `commit` hands over the rest. Raises as `buffer`."""
        row, column = self._row_and_column(index, shard)
        self._buffer(row, column)
        self._note_written([(row, column)])

    def _row_and_column(self, index: int, shard: int | None) -> tuple[int, int]:
        """The key's number among the granted ones, and the shard's among those of the batch."""
        self._check_open()
        row = self._rows.get(index if type(index) is int else whole("index", index))
        if row is None:
            raise BadRequest("this key was not granted", field="index", value=index)
        if not self._staged:
            raise BadRequest(
                "the batch has no buffers", field="staged", value=False, remedy="use fill, or write staged"
            )
        if shard is not None and (shard if type(shard) is int else whole("shard", shard)) not in self.shards:
            raise BadRequest(f"the batch was asked for shards {self.shards}", field="shard", value=shard)
        if self._attachment is not None and os.getpid() != self._attachment.pid:
            raise gone(FORKED)  # the memory is not mapped here: touching it would be SIGSEGV
        return row, 0 if shard is None else self.shards.index(shard)

    def _buffer(self, row: int, column: int) -> Bytes:
        with self._lock:
            buffer = self._target(row, column)
            self._begun.add(row * len(self.shards) + column)
            return buffer

    def _target(self, row: int, column: int) -> Bytes:
        """Under the lock."""
        self._check_open()
        unwritten = self._unwritten.get(row)
        if unwritten is None:
            unwritten = self._unwritten[row] = set(range(len(self.shards)))
        if column not in unwritten:
            index = self.granted[row]
            raise BadRequest("was said to be written", field="index", value=index, remedy="commit")
        if self._pieces is None:
            return self._slots[row * len(self.shards) + column]
        start = self._starts.get(row)
        if start is None:
            start = self._starts[row] = self._pieces.next()
        start += self._columns[column]
        return self._pieces.staging.array[start : start + self._lengths[column]]

    def _note_written(self, written: Sequence[tuple[int, int]], checksums: Sequence[int] = ()) -> None:
        """These (row, column) are; with `checksums` of all of them the daemon has nothing to do for them. Hand over
        what is written, when it is much, and not the last: that goes with the commit."""
        attachment = self._attachment
        with self._lock:
            self._check_open()
            self._checksums.update(zip(written, checksums, strict=False))
            for row, column in written:
                self._begun.add(row * len(self.shards) + column)
                unwritten = self._unwritten[row]
                if column in unwritten:
                    unwritten.discard(column)
                    if not unwritten and not checksums:
                        self._written.append(row)
            much = len(self._written) * self._chunk_bytes >= FILL_AHEAD_BYTES
            last = len(self._written) + len(self._handed_over) == len(self.granted)
            if attachment is None or not much or last:
                return
            rows = sorted(self._written)
            self._written.clear()
            self._handed_over.update(rows)
            starts = self._hand_over(rows)
            pieces = self._pieces
        columns = range(len(self.shards))
        body = store_pb2.FillRequest(
            reservation_id=self.reservation_id,
            offsets=self._offsets(starts),
            numbers=[row * len(columns) + column for row in rows for column in columns],
        )
        limit = time.monotonic() + self._timeout_s
        answered = partial(were_read, pieces, starts)
        call = attachment.call("fill", body, limit, must_end=True, on_reply=answered)
        if call.request is not None:
            call.watch()  # the pieces are to serve again while they are in the cache
        else:  # it was never sent: the commit, if it is, brings them all the same
            with self._lock:
                if self._state is _State.OPEN:
                    self._handed_over.difference_update(rows)
                    if pieces is not None:
                        pieces.take_back(starts)
                        self._starts.update(zip(rows, starts, strict=True))
                    return
            answered()

    def _hand_over(self, rows: Sequence[int]) -> list[int]:
        """Their pieces, which are the daemon's from now on. Under the lock, or when nobody else writes any more."""
        if self._pieces is None:
            return []
        starts = [self._starts.pop(row) for row in rows]
        self._pieces.handed_over(starts)
        return starts

    def _offsets(self, starts: Sequence[int]) -> list[int]:
        """In staging memory, per piece, then per shard."""
        return [start + column for start in starts for column in self._columns]

    def fill(self, region: Region, offsets: Sequence[int], *, timeout_s: float | None = None) -> None:
        """Have the daemon copy rows of `region` into the granted slots of a batch that was made with `staged=False`.

        `offsets` (in bytes) has one entry per granted key, or per granted (key, shard) in that order; each row is as
        long as its shard. Nothing becomes visible. The rows must not change until this returns, and `commit` is allowed
        only after it did: whoever gives up waiting must not commit, because a daemon that was stopped may read the
        rows when they hold something else. May be repeated.

        Raises StoreError: BadRequest; Precondition (a row could not be read, the reservation has ended);
        DeadlineExceeded, Unavailable.
        """
        drive(self.filling(region, offsets, timeout_s))

    def filling(self, region: Region, offsets: Sequence[int], timeout_s: float | None) -> Operation[None]:
        self._check_open()
        if self._staged:
            raise BadRequest("the batch has buffers", field="staged", value=True, remedy="write staged=False")
        offsets = wholes("offsets", offsets, -NUMBER_MAX)
        self._check_rows(region, offsets)
        self._filled = False
        attachment = self._attachment
        if attachment is None or not self.granted:
            return
        deadline = time.monotonic() + self._seconds(timeout_s)
        if not region.number(attachment):
            yield partial(region.lend, attachment, deadline)
        body = store_pb2.FillRequest(
            reservation_id=self.reservation_id, region=region.number(attachment), offsets=offsets
        )
        call = attachment.call("fill", body, deadline)
        yield call
        if isinstance(call.answer, StoreError):
            attachment.count("fills_failed")
            raise call.answer
        self._filled = True

    def _check_rows(self, region: Region, offsets: Sequence[int]) -> None:
        one_of("region", region, Region)
        if len(offsets) != len(self.granted) * len(self._lengths):
            raise BadRequest(
                f"has one entry for each of {len(self.granted)} keys and {len(self._lengths)} shards",
                field="offsets",
                value=len(offsets),
            )
        for number, offset in enumerate(offsets):
            length = self._lengths[number % len(self._lengths)]
            if not 0 <= offset <= region.size_bytes - length:
                raise BadRequest(
                    f"{length} bytes from there are not inside the region's {region.size_bytes}",
                    field=f"offsets[{number}]",
                    value=offset,
                )

    def commit(self, *, wait: Wait = Wait.VISIBLE, timeout_s: float | None = None) -> CommitOutcome:
        """Make all granted chunks visible (or durable). `timeout_s`: default that of the connection.

        A failure is data. Raises BadRequest for a batch that has ended, that was to be filled and is not, or of which
        something is not written: a buffer was never asked for.
        """
        return drive(self.committing(wait, timeout_s))

    def committing(self, wait: Wait, timeout_s: float | None) -> Operation[CommitOutcome]:
        call = self._send_commit(wait, timeout_s)
        if isinstance(call, CommitOutcome):
            return call
        yield call
        return self._outcome(call.answer)

    def commit_async(self, *, wait: Wait = Wait.VISIBLE) -> Future[CommitOutcome]:
        """The same without waiting: the future gets its result within the connection's timeout. Callbacks of it run on
        the thread that received the answer, which may be one that waits for an answer of its own: they must be short
        and not wait for the daemon."""
        outcome: Future[CommitOutcome] = Future()
        outcome.set_running_or_notify_cancel()
        call = self._send_commit(wait, None)
        if isinstance(call, CommitOutcome):
            outcome.set_result(call)
        else:
            call.when_done(lambda done: outcome.set_result(self._outcome(done.answer)))
        return outcome

    def abort(self) -> None:
        """Give the grant back. Does not wait; idempotent; harmless after a commit."""
        with self._lock:
            if self._state is not _State.OPEN:
                return
            self._state = _State.ENDED
            if self._copying:
                return  # whoever copies last does the rest: nobody else may have that memory before
        self._let_go()

    def _copied(self) -> None:
        with self._lock:
            self._copying -= 1
            aborted = self._state is _State.ENDED and not self._copying
        if aborted:
            self._let_go()

    def _let_go(self) -> None:
        self._slots = ()
        pieces, self._pieces = self._pieces, None
        if self._attachment is not None and os.getpid() == self._attachment.pid:
            _give_back(self._attachment, self.reservation_id, pieces)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise BadRequest("the batch has ended", field="batch", value=self._state.value)

    def _seconds(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)

    def _send_commit(self, wait: Wait, timeout_s: float | None) -> Call | CommitOutcome:
        whole("wait", wait, 0, max(Wait))
        timeout = self._seconds(timeout_s)
        with self._lock:
            self._check_open()
            if self.granted and not self._staged and not self._filled and self._attachment is not None:
                raise BadRequest(
                    "no fill has ended well", field="batch", value="not filled", remedy="abort it"
                )
            self._check_written()
            self._state = _State.COMMITTED
            starts = self._hand_over([n for n in range(len(self.granted)) if n not in self._handed_over])
            self._slots = ()
            attachment, pieces, self._pieces = self._attachment, self._pieces, None
        if pieces is not None:
            pieces.end()
        if self.error is not None or attachment is None or not self.granted:
            return CommitOutcome(ok=self.error is None, error=self.error)
        checksums = [self._checksums[which] for which in sorted(self._checksums)]
        if len(checksums) < len(self.granted) * len(self.shards):
            checksums = []  # what was not copied by us we have not seen
        body = store_pb2.CommitRequest(
            reservation_id=self.reservation_id,
            staging_offsets=self._offsets(starts),
            wait=wait,
            checksums=checksums,
        )
        limit = time.monotonic() + timeout
        answered = partial(self._has_answered, attachment, pieces, starts)
        call = attachment.call("commit", body, limit, must_end=True, on_reply=answered)
        if call.request is None and os.getpid() == attachment.pid:  # it was never sent
            were_read(pieces, starts)
            _give_back(attachment, self.reservation_id, pieces)
        return call

    def _check_written(self) -> None:
        """What nobody asked a buffer for holds what was there before: other chunks' bytes, under this one's key."""
        columns = len(self.shards)
        if not self._staged or len(self._begun) == len(self.granted) * columns:
            return
        forgotten = next(n for n in range(len(self.granted) * columns) if n not in self._begun)
        row, column = divmod(forgotten, columns)
        raise BadRequest(
            f"shard {self.shards[column]} of this key was granted and never written",
            field="index",
            value=self.granted[row],
            remedy="write all shards of every key in `granted`, or abort",
        )

    def _has_answered(
        self, attachment: Line, pieces: StagedPieces | None, starts: Sequence[int], answer: Reply
    ) -> None:
        were_read(pieces, starts)
        # What the daemon has refused it still keeps for us; what is visible and not durable in time it has taken.
        if isinstance(answer, StoreError) and not isinstance(answer, DeadlineExceeded):
            attachment.notice("abort", [self.reservation_id])

    def _outcome(self, answer: Reply) -> CommitOutcome:
        if isinstance(answer, store_pb2.AttachReply):
            results = wire.committed_from_proto(answer.commit).results
            if len(results) == len(self.granted):
                return CommitOutcome(ok=True, results=results)
            answer = Unavailable("the daemon answered for other chunks than were granted")
        if self._attachment is not None and os.getpid() == self._attachment.pid:
            self._attachment.count("commits_failed", 1)
        return CommitOutcome(ok=False, error=answer)


def _checksum(shard: Bytes) -> int:
    state = xxhash.xxh3_64()  # its update() lets go of the interpreter's lock
    state.update(shard.data)
    return state.intdigest()


def were_read(pieces: StagedPieces | None, starts: Sequence[int], _: Reply | None = None) -> None:
    """The daemon has answered: it does not read these any more."""
    if pieces is not None:
        pieces.read(starts)


def _give_back(attachment: Line, reservation_id: int, pieces: StagedPieces | None) -> None:
    """Of a batch whose commit was never sent. What was handed over comes back when the daemon has answered."""
    if pieces is not None:
        pieces.end()
    if reservation_id:
        attachment.notice("abort", [reservation_id])
