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
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.client.call import FORKED, Call, Operation, Reply, drive, gone
from kvstore.client.staging import Staging
from kvstore.errors import BadRequest, StoreError, Unavailable
from kvstore.types import CommitResult, GrantResult, Wait
from kvstore.v1 import store_pb2

if TYPE_CHECKING:
    from kvstore.client.attachment import Attachment
    from kvstore.client.region import Region

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`ok`: the daemon has everything that was granted; `results` has one entry per granted key. Else `error` says why
    the save was dropped; after a timeout the chunks may still appear."""

    ok: bool
    results: tuple[CommitResult, ...] = ()
    error: StoreError | None = None


class StagedPieces:
    """Staging memory of one batch, given back exactly once, when nobody reads it any more."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._taken: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def take(self, length: int) -> int | None:
        start = self.staging.space.take(length)
        if start is not None:
            self._taken.append((start, length))
        return start

    def give_back(self, keep: Sequence[int] | None = None) -> None:
        """All; or all but the pieces with these numbers, in the order of `take`."""
        with self._lock:
            taken, self._taken = self._taken, []
        kept = set(keep or ())
        for number, (start, length) in enumerate(taken):
            if number in kept:
                self._taken.append((start, length))
            else:
                self.staging.space.give_back(start, length)


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
        attachment: Attachment | None = None,
        timeout_s: float = 0.0,
        reservation_id: int = 0,
        buffers: Sequence[Bytes] = (),
        offsets: Sequence[int] = (),
        pieces: StagedPieces | None = None,
        lengths: Sequence[int] = (),
        error: StoreError | None = None,
    ) -> None:
        """`buffers` (and `offsets` in staging memory, if it is staged in `pieces`) per granted key, then per shard.
        With `lengths` (of the shards) there are none of these: the bytes come by `fill`."""
        self.results = tuple(results)
        self.granted = tuple(n for n, result in enumerate(results) if result is GrantResult.GRANTED)
        self.shards = shards
        self.error = error
        self.reservation_id = reservation_id
        self._attachment = attachment
        self._timeout_s = timeout_s
        self._buffers = tuple(buffers)
        self._offsets = tuple(offsets)
        self._pieces = pieces
        self._lengths = tuple(lengths)
        self._filled = False
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
        """Where to put the bytes of key number `index`, shard `shard` (default: the first wanted): a writable row of
        uint8, not zeroed, valid until commit or abort; writing later corrupts other saves of this process.

        Raises BadRequest for a key that was not granted or a batch that has ended, Unavailable in a forked child.
        """
        self._check_open()
        if index not in self.granted:
            raise BadRequest("this key was not granted", field="index", value=index)
        if self._lengths:
            raise BadRequest(
                "the batch has no buffers", field="staged", value=False, remedy="use fill, or write staged"
            )
        if shard is None:
            shard = self.shards[0]
        elif shard not in self.shards:
            raise BadRequest(f"the batch was asked for shards {self.shards}", field="shard", value=shard)
        if self._attachment is not None and os.getpid() != self._attachment.pid:
            raise gone(FORKED)  # the memory is not mapped here: touching it would be SIGSEGV
        return self._buffers[self.granted.index(index) * len(self.shards) + self.shards.index(shard)]

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
        if not self._lengths:
            raise BadRequest("the batch has buffers", field="staged", value=True, remedy="write staged=False")
        self._check_rows(region, offsets)
        self._filled = False
        attachment = self._attachment
        if attachment is None or not self.granted:
            return
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
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

        A failure is data. Raises BadRequest for a batch that has ended, or that was to be filled and is not.
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
        the client's own thread and must be short."""
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
        self._buffers = ()
        pieces, self._pieces = self._pieces, None
        if self._attachment is not None and os.getpid() == self._attachment.pid:
            _give_back(self._attachment, self.reservation_id, pieces)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise BadRequest("the batch has ended", field="batch", value=self._state.value)

    def _send_commit(self, wait: Wait, timeout_s: float | None) -> Call | CommitOutcome:
        with self._lock:
            self._check_open()
            if self._lengths and self.granted and not self._filled:
                raise BadRequest(
                    "no fill has ended well", field="batch", value="not filled", remedy="abort it"
                )
            self._state = _State.COMMITTED
        self._buffers = ()
        attachment = self._attachment
        pieces, self._pieces = self._pieces, None
        if self.error is not None or attachment is None or not self.granted:
            return CommitOutcome(ok=self.error is None, error=self.error)

        def answered(_: Reply) -> None:
            if pieces is not None:
                pieces.give_back()

        body = store_pb2.CommitRequest(
            reservation_id=self.reservation_id, staging_offsets=self._offsets, wait=wait
        )
        limit = self._timeout_s if timeout_s is None else timeout_s
        call = attachment.call("commit", body, time.monotonic() + limit, must_end=True, on_reply=answered)
        if call.request is None and os.getpid() == attachment.pid:
            _give_back(attachment, self.reservation_id, pieces)  # it was never sent: nobody reads them
        return call

    def _outcome(self, answer: Reply) -> CommitOutcome:
        if isinstance(answer, store_pb2.AttachReply):
            results = wire.committed_from_proto(answer.commit).results
            if len(results) == len(self.granted):
                return CommitOutcome(ok=True, results=results)
            answer = Unavailable("the daemon answered for other chunks than were granted")
        if self._attachment is not None and os.getpid() == self._attachment.pid:
            self._attachment.count("commits_failed", 1)
        return CommitOutcome(ok=False, error=answer)


def _give_back(attachment: Attachment, reservation_id: int, pieces: StagedPieces | None) -> None:
    """Of a batch whose commit was never sent, so that the daemon reads none of its staging memory."""
    if pieces is not None:
        pieces.give_back()
    if reservation_id:
        attachment.notice("abort", [reservation_id])
