"""What a read found: bytes that can be copied out of shared memory, under a read pin or without one.

Without a pin (the chunks were found in the directory, see `Namespace.read`) a copy may find that its chunk went
meanwhile: then it is tried once more with one. Whoever copies a chunk in several calls, or wants to see it where it is,
gets the pin first: a chunk must not go while it is half loaded.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.answers import NO_BACKLOG, Backlog
from kvstore.arguments import NUMBER_MAX, rows_of, seconds, whole
from kvstore.client.destination import Bits, copy_pairs, destination
from kvstore.client.geometry import Geometry
from kvstore.client.line import Line
from kvstore.client.mapped_extents import MappedExtents
from kvstore.errors import BadRequest
from kvstore.memory import fence
from kvstore.types import ChunkKey, Outcome, Reason
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

SETTLE_SLACK_S = 0.25
"""The daemon tells at the latest after `wait_ms`; its word needs a moment to arrive."""

REPORT_MS = 10_000
"""How long the report of corrupt bytes that were read without a lease may wait for its answer."""

_samples = itertools.count()


class Waiter:
    """Collects what the daemon says about keys that were PENDING."""

    def __init__(self, namespace_id: int, keys: Iterable[ChunkKey]) -> None:
        self._namespace_id = namespace_id
        self._changed = threading.Condition()
        self._open = set(keys)
        self._ready: set[ChunkKey] = set()
        self._ended = False

    def settle(self, push: store_pb2.ChunksSettled) -> None:
        if push.namespace_id == self._namespace_id:
            with self._changed:
                self._ready.update(self._open.intersection(map(ChunkKey, push.ready)))
                self._open.difference_update(push.ready, push.failed)
                self._changed.notify_all()

    def end(self) -> None:
        """No more will be said."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, keys: Iterable[ChunkKey], deadline: float) -> set[ChunkKey]:
        """Those of `keys` that became READY: when all are settled, or until the deadline."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not (wanted & self._open), max(0.0, deadline - time.monotonic())
            )
            return wanted & self._ready


@dataclass(frozen=True, slots=True)
class Grant:
    """What the daemon pinned."""

    attachment: Line
    namespace_id: int
    lease_id: int
    ttl_ms: int
    sent_at: float
    """Monotonic seconds at which the request was sent: the daemon granted the lease later, so we give up earlier."""
    mapped: MappedExtents
    """Per hit, in key order, one for each wanted shard."""
    ranks: Mapping[int, int] | range
    """Which hit a key is, by its number; a range where the hits are the first keys."""
    waiter: Waiter | None = None
    settled_by: float = 0.0
    pin: Callable[[], ReadLease] | None = None
    """Nothing is pinned; this reads the same keys once more, with a pin."""


class ReadLease:
    """What `Namespace.read` found. A context manager; never raises because of a lost or late daemon.

    `outcomes` and `reasons` have one entry per key, `hits` counts the leading hits; `backlog` says what those keys that
    are on SSD alone would take. Copies are made in the calling
    thread, without the interpreter's lock for large ones. Not to be used after a fork.
    """

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        outcomes: Sequence[Outcome],
        reasons: Sequence[Reason] | Callable[[], Sequence[Reason]],
        geometry: Geometry,
        shards: tuple[int, ...],
        grant: Grant | None = None,
        verify_every: int = 0,
        backlog: Backlog = NO_BACKLOG,
    ) -> None:
        """`reasons` may be had when they are asked for. `verify_every` n: one copy in n is compared with its checksum;
        0: none."""
        self.backlog = backlog
        self._pinned: ReadLease | None = None
        """That of a second read, with a pin: copies are its."""
        self._released = False
        self._grant = grant
        self.keys = tuple(keys)
        self.outcomes = tuple(outcomes)
        self._reasons = reasons
        self.hits = len(grant.ranks) if grant and isinstance(grant.ranks, range) else _leading_hits(outcomes)
        self.shards = shards
        self.lease_id = grant.lease_id if grant else 0
        self.ttl_ms = grant.ttl_ms if grant else 0
        self.granted_at = grant.sent_at if grant else 0.0
        self.expires_at = self.granted_at + self.ttl_ms / 1000
        self._geometry = geometry
        self._verify_every = verify_every
        self._ranks = grant.ranks if grant else range(0)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Of what was looked up without a message the daemon is asked for them now, if anything is no hit."""
        if callable(self._reasons):
            self._reasons = self._reasons()
        return tuple(self._reasons)

    def __repr__(self) -> str:
        state = "open" if self.alive else "released" if self._released else "void"
        return f"ReadLease({self.lease_id}, {self.hits} of {len(self.keys)} keys hit, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # May run at any point of any thread, so it takes no lock and leaves the work to the housekeeping.
        if not getattr(self, "_released", True) and self._grant is not None:
            self._grant.attachment.later(
                partial(_give_back, self._grant.attachment, self.lease_id, self._grant.waiter)
            )

    @property
    def alive(self) -> bool:
        """Whether copies can succeed now: neither released, expired nor revoked, and the daemon is the same."""
        if self._pinned is not None:
            return self._pinned.alive
        grant = self._grant
        return (
            grant is not None
            and grant.attachment.alive
            and not self._released
            and (grant.pin is not None or time.monotonic() < self.expires_at)
            and os.getpid() == grant.attachment.pid
        )

    # ------------------------------------------------------------------------------------------------- copies

    def copy_to(
        self,
        index: int,
        out: Any,
        *,
        shard: int | None = None,
        layer: int | None = None,
        offset: int | None = None,
    ) -> bool:
        """Copy bytes of key number `index` into `out`: a writable buffer, numpy array (any strides) or CPU tensor.

        Of `shard` (default: the first wanted one) all bytes, or those of one `layer`; with `offset` (in bytes, from
        the start of the shard or layer) as many as `out` has. False: no hit, or void (expired, revoked, daemon gone,
        slot reused): `out` is undefined, recompute. Raises BadRequest for a wrong index, shard, layer or size.
        """
        row, shard = self._row(index, shard)
        bits = destination(out)
        start, length = self._geometry.span(shard, layer)
        if offset is not None:
            offset = whole("offset", offset, -NUMBER_MAX)
            _check_range(offset, bits.nbytes, length)
            start += offset
        elif bits.nbytes != length:
            what = f"shard {shard} whole" if layer is None else f"layer {layer} of shard {shard}"
            raise BadRequest(f"must have {length} bytes: {what}", field="out", value=f"{bits.nbytes} bytes")
        return row is not None and self._copy(((index, row, start, bits),))

    def copy_many(self, pieces: Sequence[tuple[int, int, int, Any]]) -> bool:
        """Copy all of (index, shard, offset in bytes within the shard, out); each `out` as in `copy_to`.

        False: at least one is no hit or void, and all outs are undefined. Raises BadRequest before copying anything.
        """
        plan: list[tuple[int, int, int, Bits]] = []
        for index, shard, offset, out in rows_of("pieces", pieces, "(index, shard, offset, out)", 4):
            row, shard = self._row(index, shard)
            bits = destination(out)
            if type(offset) is not int:
                offset = whole("offset", offset, -NUMBER_MAX)
            _check_range(offset, bits.nbytes, self._geometry.shard_bytes[shard])
            if row is not None:
                plan.append((index, row, offset, bits))
        return len(plan) == len(pieces) and self._copy(plan)

    def read_in_place(
        self,
        pieces: Sequence[tuple[int, int, int, int]],
        use: Callable[[Sequence[npt.NDArray[np.uint8]]], None],
    ) -> bool:
        """Call `use` with the bytes of all (index, shard, offset in bytes within the shard, length) where they lie: for
        what no strides describe, as parts of a shard that go to several places. It reads them and keeps none.

        False: at least one is no hit or void; then `use` was not called, or read bytes that are not to be used. Raises
        BadRequest before it is called, and what `use` raises.
        """
        plan: list[tuple[int, int, int, int]] = []
        for index, shard, offset, length in pieces:
            row, shard = self._row(index, shard)
            _check_range(offset, length, self._geometry.shard_bytes[shard])
            if row is not None:
                plan.append((index, row, offset, length))
        if self._has_to_pin():
            self._pin()
        if self._pinned is not None:
            return self._pinned.read_in_place(pieces, use)
        grant = self._grant
        if len(plan) < len(pieces) or grant is None or not self.alive:
            return self._void()
        mapped, rows = grant.mapped, [row for _, row, _, _ in plan]
        if not mapped.intact(rows):
            return self._void()
        fence()
        use([mapped.data(row, offset, length) for _, row, offset, length in plan])
        numbered = [(index, row) for index, row, _, _ in plan]
        corrupt = self._corrupt(mapped, numbered) if self._verify_every else []
        fence()
        if not mapped.intact(rows):
            return self._void()
        if corrupt:
            self._report(grant, corrupt)
        return not corrupt

    def unsafe_view(self, index: int, shard: int | None = None) -> memoryview | None:
        """The shard's bytes in shared memory, read-only and without a copy; None when no copy would succeed.

        Unsafe: after release or expiry the bytes may change under the reader, and nothing will tell. The segment
        stays mapped while the view lives.
        """
        row, _ = self._row(index, shard)
        if self._has_to_pin():
            self._pin()
        if self._pinned is not None:
            return self._pinned.unsafe_view(index, shard)
        grant = self._grant
        if grant is None or row is None or not self.alive or not grant.mapped.intact((row,)):
            return None
        return grant.mapped.data(row).data.toreadonly()

    def unsafe_views(self, pieces: Sequence[tuple[int, int, int, int]]) -> list[npt.NDArray[np.uint8]] | None:
        """The same of parts of shards, for a device that copies by itself: (index, shard, offset, length in bytes).
        None when one of them could not be copied now. What was read is the committed bytes only if `intact` says so
        after the last of it was."""
        if self._has_to_pin():
            self._pin()
        if self._pinned is not None:
            return self._pinned.unsafe_views(pieces)
        rows = []
        for index, shard, offset, length in pieces:
            row, shard = self._row(index, shard)
            _check_range(offset, length, self._geometry.shard_bytes[shard])
            if row is not None:
                rows.append(row)
        grant = self._grant
        if grant is None or len(rows) < len(pieces) or not self.alive or not grant.mapped.intact(rows):
            return None
        return [
            grant.mapped.data(row, offset, length)
            for row, (_, _, offset, length) in zip(rows, pieces, strict=True)
        ]

    def intact(self) -> bool:
        """Whether all slots of the hits still hold what the daemon granted: what was read of them until now, in
        whatever way, was the committed bytes."""
        if self._pinned is not None:
            return self._pinned.intact()
        grant = self._grant
        fence()
        return grant is not None and self.alive and grant.mapped.intact(range(len(grant.mapped)))

    def _copy(self, plan: Sequence[tuple[int, int, int, Bits]]) -> bool:
        """(key number, row, offset, destination). Each slot's generation is compared before the first byte and after
        the last, so bytes of a slot that was given to somebody else meanwhile never pass for ours."""
        if self._pinned is None and self._has_to_pin():
            if self._is_whole(plan) and (copied := self._copied(plan)) is not None:
                return copied
            self._pin()
        if self._pinned is not None:
            again = self._pinned_plan(plan, self._pinned)
            return self._pinned._copy(again) if again is not None else self._void()
        copied = self._copied(plan)
        return self._void() if copied is None else copied

    def _copied(self, plan: Sequence[tuple[int, int, int, Bits]]) -> bool | None:
        """True: the outs have the bytes; False: those are corrupt; None: they may be others."""
        grant = self._grant
        if grant is None or not self.alive:
            return None
        mapped = grant.mapped
        rows = [row for _, row, _, _ in plan]
        if not mapped.intact(rows):
            return None
        pairs = [(bits, mapped.data(row, offset, bits.nbytes)) for _, row, offset, bits in plan]
        fence()
        copy_pairs(pairs)
        numbered = [(index, row) for index, row, _, _ in plan]
        corrupt = self._corrupt(mapped, numbered) if self._verify_every else []
        fence()
        if not mapped.intact(rows):
            return None
        if corrupt:
            self._report(grant, corrupt)
        return not corrupt

    # ------------------------------------------------------------------------------------------------ without a pin

    @property
    def may_ask(self) -> bool:
        """Nothing is pinned yet: a copy may have to ask the daemon, and to wait for its answer."""
        return self._pinned is None and self._has_to_pin()

    def _has_to_pin(self) -> bool:
        """Before anything that takes longer than one call."""
        return self._grant is not None and self._grant.pin is not None and self.alive

    def _pin(self) -> None:
        """Read the same keys once more, with a pin. What went meanwhile is void from then on."""
        grant = self._grant
        assert grant is not None and grant.pin is not None, self
        grant.attachment.count("reads_pinned_late")
        self._pinned = grant.pin()

    def _is_whole(self, plan: Sequence[tuple[int, int, int, Bits]]) -> bool:
        """Whether each chunk's shard is copied from its first byte to its last, here and now."""
        left: dict[int, int] = {}
        for _, row, _, bits in plan:
            left[row] = left.get(row, 0) + bits.nbytes
        sizes = self._geometry.shard_bytes
        shards = self.shards
        return all(size == sizes[shards[row % len(shards)]] for row, size in left.items())

    def _pinned_plan(
        self, plan: Sequence[tuple[int, int, int, Bits]], pinned: ReadLease
    ) -> list[tuple[int, int, int, Bits]] | None:
        """The same copies of the second read; None: some chunk is no hit there."""
        ranks, each = pinned._ranks, len(self.shards)
        if any(index not in ranks for index, _, _, _ in plan):
            return None
        return [(index, ranks[index] * each + row % each, at, bits) for index, row, at, bits in plan]

    def _corrupt(self, mapped: MappedExtents, plan: Sequence[tuple[int, int]]) -> list[int]:
        """Of a sample of these (key number, row): numbers of the keys of which a shard no longer has the checksum that
        it was committed with."""
        return [
            index
            for index, row in plan
            if next(_samples) % self._verify_every == 0
            and xxhash.xxh3_64_intdigest(mapped.data(row).data) != mapped.extents.checksum[row]
        ]

    def _report(self, grant: Grant, corrupt: Sequence[int]) -> None:
        grant.attachment.count("loads_corrupt", len(corrupt))
        log.error("%d loaded chunks do not match their checksums: the daemon is asked to check", len(corrupt))
        body = store_pb2.ReportLoadRequest(
            namespace_id=grant.namespace_id, keys=[self.keys[index] for index in corrupt]
        )
        grant.attachment.call("report_load", body, time.monotonic() + (self.ttl_ms or REPORT_MS) / 1000)

    def _void(self) -> bool:
        if self._grant is not None and os.getpid() == self._grant.attachment.pid:
            self._grant.attachment.count("loads_void")
        return False

    def _row(self, index: int, shard: int | None) -> tuple[int | None, int]:
        """Where the shard is among those granted (None: the key is no hit), and its number. Raises BadRequest."""
        if type(index) is not int:
            index = whole("index", index, -NUMBER_MAX)
        if shard is not None and type(shard) is not int:
            shard = whole("shard", shard, -NUMBER_MAX)
        if not 0 <= index < len(self.keys):
            raise BadRequest(f"the lease has keys 0 to {len(self.keys) - 1}", field="index", value=index)
        if shard is None:
            shard = self.shards[0]
        elif shard not in self.shards:
            raise BadRequest(f"the lease was asked for shards {self.shards}", field="shard", value=shard)
        if index not in self._ranks:
            return None, shard
        return self._ranks[index] * len(self.shards) + self.shards.index(shard), shard

    # ---------------------------------------------------------------------------------------------------- end

    def settled(self, timeout_s: float | None = None) -> tuple[int, ...]:
        """Wait for the PENDING keys of a read with `wait_ms`; returns the numbers of those that became READY: read them
        again. Returns when all are settled, after `timeout_s`, or when the daemon's own time for it is over."""
        grant = self._grant
        pending = [number for number, outcome in enumerate(self.outcomes) if outcome is Outcome.PENDING]
        if grant is None or grant.waiter is None or not pending:
            return ()
        limit = grant.settled_by + SETTLE_SLACK_S
        if timeout_s is not None:
            limit = min(limit, time.monotonic() + seconds("timeout_s", timeout_s))
        ready = grant.waiter.wait([self.keys[number] for number in pending], limit)
        return tuple(number for number in pending if self.keys[number] in ready)

    def release(self) -> None:
        """Unpin. Does not wait; idempotent. Nothing can be copied any more."""
        if self._released:
            return
        self._released = True
        self._ranks = range(0)
        if self._pinned is not None:
            self._pinned.release()
        grant, self._grant = self._grant, None
        if grant is not None and os.getpid() == grant.attachment.pid:
            _give_back(grant.attachment, self.lease_id, grant.waiter)


def _give_back(attachment: Line, lease_id: int, waiter: Waiter | None) -> None:
    if waiter is not None:
        attachment.forget_waiter(waiter)
    if lease_id:
        attachment.renewals.remove(lease_id)
        attachment.notice("release", [lease_id])
        attachment.collect()


def _leading_hits(outcomes: Sequence[Outcome]) -> int:
    misses = (number for number, outcome in enumerate(outcomes) if outcome is not Outcome.HIT)
    return next(misses, len(outcomes))


def _check_range(offset: int, nbytes: int, length: int) -> None:
    if not 0 <= offset <= length - nbytes:
        raise BadRequest(
            f"{nbytes} bytes from there are not inside of {length}", field="offset", value=offset
        )
