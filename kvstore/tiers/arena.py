"""The DRAM tier: segments that the daemon owns, and the staging memory through which workers write.

    protection   who maps a segment's data writable                    how a worker writes
    sealed       the daemon alone: mapped first, then sealed           into its staging memory; the daemon copies
    group        the daemon and the workers that got the descriptor    in place

Nobody but the daemon ever maps a header writable, and nobody at all can resize any of these memfds.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore import memory
from kvstore.errors import BadRequest, Exhausted, NotFound
from kvstore.server.logs import fields
from kvstore.types import Protection, SegmentId, WorkerId

log = logging.getLogger(__name__)

FAULT_BYTES = 16 << 20
"""Faulted in at once, while segments that are to be made or unmade wait."""


@dataclass(frozen=True, slots=True)
class _Segment:
    data: memory.SharedMapping
    header: memory.SharedMapping
    cells: npt.NDArray[np.uint64]
    """(generation, tag) of each."""
    data_fd: int
    header_fd: int


class Arena:
    """All segments. `create`, `fault_in` and `destroy` block and belong in one thread; everything else takes
    microseconds and may be called from any thread meanwhile.

    With `prefault` a new segment has all its pages at once (0.1 s per GiB), so that it can be used, and is faulted in
    afterwards, bit by bit (0.5 to 10 s per GiB: the machine under a virtual one may have to find each page first). Who
    touches a page before that waits for this one. Huge pages that have to be asked for come by faults alone.
    """

    def __init__(self, *, protection: Protection, boot_id: bytes, huge_pages: bool, prefault: bool) -> None:
        self._data_seals = memory.SEALS_READ_ONLY if protection is Protection.SEALED else memory.SEALS_RESIZE
        self._boot_id = boot_id
        self._huge_pages = huge_pages
        self._prefault = prefault
        self._segments: dict[SegmentId, _Segment] = {}
        self._lock = threading.Lock()
        """Held to change the table, so that close() and a create() in another thread agree; and to duplicate
        descriptors, which are closed only once they are out of the table."""
        self._closed = False
        self._to_fault: deque[tuple[SegmentId, int]] = deque()
        """Segments that are not faulted in yet, and from where on; of the creating thread alone."""

    def create(self, segment: SegmentId, segment_bytes: int, cells: int) -> None:
        """Make a segment with all its pages, unless they are to come when they are touched; all or nothing. Raises
        OSError, ECANCELED when the arena is closed meanwhile."""
        header = memory.SegmentHeader(cells=cells, segment_bytes=segment_bytes, boot_id=self._boot_id)
        with ExitStack() as undo:
            data_fd, data = _new_memfd(f"kvs-data-{segment}", segment_bytes, self._data_seals, undo)
            header_fd, head = _new_memfd(
                f"kvs-header-{segment}", memory.header_bytes(cells), memory.SEALS_READ_ONLY, undo
            )
            memory.write_header(head.array, header)
            if self._huge_pages:
                data.ask_for_huge_pages()
            if self._prefault and not self._fill(data_fd, data):
                raise OSError(errno.ECANCELED, "the arena was closed")
            made = _Segment(
                data=data,
                header=head,
                cells=memory.cells_of(head.array, cells),
                data_fd=data_fd,
                header_fd=header_fd,
            )
            with self._lock:
                if self._closed:
                    raise OSError(errno.ECANCELED, "the arena was closed")
                assert segment not in self._segments, segment
                self._segments[segment] = made
            undo.pop_all()
        if self._prefault:
            self._to_fault.append((segment, 0))

    def _fill(self, fd: int, data: memory.SharedMapping) -> bool:
        """See to it that no page of a new segment can be missing later. False: the arena was closed meanwhile. Raises
        OSError."""
        if self._huge_pages and memory.huge_pages_by_advice():
            return not memory.promises_are_kept() or data.populate(cancelled=lambda: self._closed)
        try:
            return memory.allocate(fd, data.size_bytes, cancelled=lambda: self._closed)
        except OSError as problem:
            if problem.errno in (errno.ENOMEM, errno.ENOSPC):
                raise
            return data.populate(cancelled=lambda: self._closed)  # a kernel that allocates by faults alone

    def fault_in(self) -> bool:
        """Some of what is not faulted in yet. Returns whether there is more."""
        while self._to_fault and not self._closed:
            segment, offset = self._to_fault.popleft()
            found = self._segments.get(segment)
            if found is None:
                continue
            size = found.data.size_bytes
            with suppress(ValueError):  # the arena is being closed at this moment
                found.data.fault_in(offset, min(FAULT_BYTES, size - offset))
            if offset + FAULT_BYTES < size:
                self._to_fault.appendleft((segment, offset + FAULT_BYTES))
            else:
                log.debug("segment faulted in", extra=fields(segment=segment))
            break
        return bool(self._to_fault) and not self._closed

    def destroy(self, segment: SegmentId) -> None:
        """The memory returns to the machine once no worker maps it and no view of it is left. Raises NotFound."""
        with self._lock:
            gone = self._segments.pop(segment, None)
        if gone is None:
            raise NotFound("no such segment", field="segment", value=segment)
        _release(gone)

    def set_generations(self, segment: SegmentId, cells: Sequence[int], generations: Sequence[int]) -> None:
        """Aligned stores; whoever sees a byte stored later than this also sees the new generation, and no tag."""
        assert len(cells) == len(generations), (segment, len(cells), len(generations))
        assert min(cells, default=0) >= 0, (segment, min(cells))  # numpy would count from the end
        table = self._segment(segment).cells
        which = np.asarray(cells, dtype=np.intp)
        table[which, 0] = np.asarray(generations, dtype=np.uint64)
        table[which, 1] = 0
        memory.fence()

    def set_tags(self, segment: SegmentId, cells: npt.NDArray[np.intp], tags: npt.NDArray[np.uint64]) -> None:
        """The bytes of these keys are in the slots, under the generations that stand there."""
        self._segment(segment).cells[cells, 1] = tags

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """The daemon's own, writable bytes [offset, offset + length). Raises NotFound, or BadRequest outside of it."""
        try:
            return memory.cut(self._segment(segment).data.array, offset, length)
        except ValueError as error:
            raise BadRequest(str(error), field="extent", value=f"segment {segment}") from None

    def holds(self, segment: SegmentId, cell: int, generation: int) -> bool:
        """Whether the slot of this cell was not given away since it had this generation. From any thread, after the
        last byte of it was read."""
        memory.fence()
        found = self._segments.get(segment)
        return found is not None and int(found.cells[cell, 0]) == generation

    def descriptors(self, segment: SegmentId) -> tuple[int, int]:
        """(data, header): duplicates, which the caller sends and closes. Raises NotFound, OSError.

        The arena's own would not do: another thread may destroy the segment before they are sent, and the next segment,
        another tenant's, gets the same numbers.
        """
        with self._lock:  # the arena closes no descriptor of a segment that is in the table
            found = self._segment(segment)
            data_fd, header_fd = _duplicates(found.data_fd, found.header_fd)
            return data_fd, header_fd

    def size_of(self, segment: SegmentId) -> tuple[int, int]:
        """(bytes, cells). Raises NotFound."""
        found = self._segment(segment)
        return found.data.size_bytes, len(found.cells)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._segments.values())
            self._segments.clear()
        for gone in left:
            _release(gone)

    def _segment(self, segment: SegmentId) -> _Segment:
        found = self._segments.get(segment)
        if found is None:
            raise NotFound("no such segment", field="segment", value=segment)
        return found

    def __repr__(self) -> str:
        size_bytes = sum(segment.data.size_bytes for segment in list(self._segments.values()))
        return (
            f"Arena({len(self._segments)} segments, {size_bytes} bytes{', closed' if self._closed else ''})"
        )


def _duplicates(*fds: int) -> list[int]:
    """A new descriptor of each, or none. Raises OSError."""
    with ExitStack() as undo:
        made: list[int] = []
        for fd in fds:
            made.append(os.dup(fd))
            undo.callback(os.close, made[-1])
        undo.pop_all()
    return made


def _new_memfd(name: str, size_bytes: int, seals: int, undo: ExitStack) -> tuple[int, memory.SharedMapping]:
    """Mapped writable first, sealed afterwards: a mapping that exists stays as it is."""
    fd = memory.create_memfd(name, size_bytes)
    undo.callback(os.close, fd)
    mapping = memory.map_shared(fd, size_bytes, writable=True)
    undo.callback(mapping.close)
    memory.add_seals(fd, seals)
    return fd, mapping


def _release(segment: _Segment) -> None:
    segment.data.close()
    segment.header.close()
    os.close(segment.data_fd)
    os.close(segment.header_fd)


@dataclass(frozen=True, slots=True)
class _Staged:
    mapping: memory.SharedMapping
    fd: int

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


class Staging:
    """The staging memory of all workers: each writes its own, the daemon reads them all, nobody can resize them."""

    def __init__(self, *, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_granted = 0
        self._by_worker: dict[WorkerId, _Staged] = {}
        self._lock = threading.Lock()
        """Held to look into the tables and to change them and the sum, never while memory is freed: that takes up to
        20 ms for 64 MiB, so drop() may run in a thread."""

    def create(self, worker: WorkerId, wanted: int) -> tuple[int, int]:
        """(descriptor, granted bytes), whole pages, less than `wanted` where the common bound leaves less.

        The descriptor is a duplicate, which the caller sends and closes: ours may be closed by drop() in another thread
        before that. Raises BadRequest for a second one, Exhausted when nothing is left, OSError.
        """
        if wanted <= 0:
            raise BadRequest("must be above 0", field="staging.bytes", value=wanted)
        with self._lock:
            if worker in self._by_worker:
                raise BadRequest("the worker has staging memory already", field="staging.bytes", value=wanted)
            room = self.bytes_max - self.bytes_granted
            if room < mmap.PAGESIZE:
                raise Exhausted(
                    f"all {self.bytes_max} bytes of staging memory are in use",
                    field="staging.bytes",
                    value=wanted,
                    remedy="raise staging_bytes_max or lower staging_bytes",
                )
            granted = min(_pages(wanted), room // mmap.PAGESIZE * mmap.PAGESIZE)
            with ExitStack() as undo:
                fd = memory.create_memfd(f"kvs-staging-{worker}", granted)
                undo.callback(os.close, fd)
                memory.add_seals(fd, memory.SEALS_RESIZE)
                mapping = memory.map_shared(fd, granted)
                undo.callback(mapping.close)
                (lent,) = _duplicates(fd)
                undo.pop_all()
            self._by_worker[worker] = _Staged(mapping, fd)
            self.bytes_granted += granted
        return lent, granted

    def view(self, worker: WorkerId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Not to be written; the worker may change the bytes at any time. Raises NotFound, or BadRequest outside."""
        with self._lock:  # so that drop() does not close it meanwhile
            found = self._by_worker.get(worker)
            if found is None:
                raise NotFound("the worker has no staging memory", field="worker", value=worker)
            try:
                return memory.cut(found.mapping.array, offset, length)
            except ValueError as error:
                raise BadRequest(str(error), field="staging_offsets", value=offset) from None

    def drop(self, worker: WorkerId) -> None:
        """Does nothing for a worker without. Views that a copy runs on stay valid until it has ended."""
        with self._lock:
            gone = self._by_worker.pop(worker, None)
            if gone is None:
                return
            self.bytes_granted -= gone.mapping.size_bytes
        gone.close()

    def close(self) -> None:
        for worker in list(self._by_worker):
            self.drop(worker)

    def __repr__(self) -> str:
        return f"Staging({len(self._by_worker)} workers, {self.bytes_granted} of {self.bytes_max} bytes)"


def _pages(size: int) -> int:
    """Bytes of the whole pages that hold `size`."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
