"""Regions: memory of the workers' own, lent to the daemon by descriptor, out of which fills are copied.

A region is never mapped, so whoever cuts it short gives a copy an error and not the daemon a SIGBUS; and never written:
the descriptor kept can only read. It must lie in memory (memfd, tmpfs, hugetlbfs), because reading, and even closing, a
file of a slow, remote or user-made file system can take for ever, and would hold up the copies of everybody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import queue
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.errors import BadRequest, Exhausted, NotFound, Unavailable
from kvstore.types import RegionId, WorkerId

log = logging.getLogger(__name__)

REGIONS_PER_WORKER_MAX = 8
CLOSING_MAX = 64
"""Descriptors that may wait to be closed. More mean that closing one hangs: then none is taken in."""


class Region:
    """An open region. Its descriptor is closed when the last copy out of it has ended and nobody else holds it."""

    __slots__ = ("__weakref__", "_fd", "id", "size_bytes")

    def __init__(self, number: RegionId, fd: int, size_bytes: int) -> None:
        self.id = number
        self.size_bytes = size_bytes
        self._fd = fd

    def read_into(self, view: memoryview, offset: int) -> None:
        """Bytes [offset, offset + len(view)), all of them. Lets go of the interpreter's lock. Raises BadRequest outside
        of the region, Unavailable when the file has become shorter or cannot be read."""
        if not 0 <= offset <= self.size_bytes - len(view):
            raise BadRequest(
                f"{len(view)} bytes from there are not inside the {self.size_bytes} of region {self.id}",
                field="offsets",
                value=offset,
            )
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise Unavailable(
                    f"cannot be read at {offset + done}: {error.strerror}", field="region", value=self.id
                ) from None
            if got == 0:
                raise Unavailable(
                    f"was cut short: it ends before {offset + len(view)}",
                    field="region",
                    value=self.id,
                    remedy="never make a file shorter while the daemon has it; adopt it anew",
                )
            done += got

    def __repr__(self) -> str:
        return f"Region({self.id}, {self.size_bytes} bytes)"


@dataclass(slots=True)
class _Lent:
    """What one worker lent."""

    regions: dict[RegionId, Region] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(frozen=True, slots=True)
class RegionStats:
    regions: int
    bytes: int


class Regions:
    """Of all workers. `adopt` and `drop` take microseconds; whatever must be closed is closed by a thread."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, _Lent] = {}
        self._closing: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # A daemon thread: one that hangs in the kernel must not keep the process from ending.
        self._thread = threading.Thread(target=self._close_descriptors, name="kvstored-regions", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Too many descriptors wait to be closed: do not accept any more."""
        return self._closing.qsize() >= CLOSING_MAX

    def stats(self) -> RegionStats:
        regions = [region for lent in self._by_worker.values() for region in lent.regions.values()]
        return RegionStats(len(regions), sum(region.size_bytes for region in regions))

    def adopt(self, worker: WorkerId, fd: int, size_bytes: int) -> RegionId:
        """Takes over `fd`, whatever comes of it. Raises BadRequest, Exhausted, Unavailable."""
        try:
            lent = self._by_worker.get(worker) or _Lent()
            if len(lent.regions) >= REGIONS_PER_WORKER_MAX:
                raise Exhausted(
                    f"the worker has {len(lent.regions)} regions already",
                    field="adopt",
                    value=size_bytes,
                    remedy="drop one",
                )
            _check(fd, size_bytes)
            own = _read_only(fd)
        except BaseException:
            self.discard(fd)
            raise
        if own != fd:
            self.discard(fd)
        region = Region(RegionId(next(lent.numbers)), own, size_bytes)
        closing = weakref.finalize(region, self.discard, own)
        closing.atexit = False  # the process' end closes it
        lent.regions[region.id] = region
        self._by_worker[worker] = lent
        return region.id

    def of(self, worker: WorkerId, number: RegionId) -> Region:
        """Hold it as long as you read. Raises NotFound, also for another worker's."""
        lent = self._by_worker.get(worker)
        region = None if lent is None else lent.regions.get(number)
        if region is None:
            raise NotFound("no such region of this worker", field="region", value=number, remedy="adopt it")
        return region

    def drop(self, worker: WorkerId, number: RegionId) -> None:
        """A copy that runs goes on. Raises NotFound."""
        self.of(worker, number)
        del self._by_worker[worker].regions[number]

    def drop_all(self, worker: WorkerId) -> None:
        """The worker's connection or process has ended."""
        self._by_worker.pop(worker, None)

    def discard(self, fd: int) -> None:
        """Close a descriptor that came from a peer: never here and now, because its file system may make that last."""
        self._closing.put(fd)

    def close(self, timeout_s: float) -> None:
        """Ends the thread once all is closed; returns in time even if that hangs."""
        self._by_worker.clear()
        self._closing.put(None)
        self._thread.join(timeout_s)

    def _close_descriptors(self) -> None:
        while (fd := self._closing.get()) is not None:
            with contextlib.suppress(
                OSError
            ):  # what closing says of a file that we only read matters to nobody
                os.close(fd)

    def __repr__(self) -> str:
        return f"Regions({self.stats()}, {self._closing.qsize()} descriptors to close)"


def in_memory(fd: int) -> bool:
    """Whether it is a file in memory: a question that no file system can be slow to answer."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # known for files in memory, and for nothing else
        return True
    except OSError:
        return False


def _check(fd: int, size_bytes: int) -> None:
    """Raises BadRequest. Asks nothing that a file system could be slow to answer until it is known to be memory."""
    if size_bytes <= 0:
        raise BadRequest("must be above 0", field="adopt.bytes", value=size_bytes)
    if not in_memory(fd) or not stat.S_ISREG((status := os.fstat(fd)).st_mode):
        raise BadRequest(
            "is no file in memory",
            field="adopt",
            value="descriptor",
            remedy="hand over a memfd, or a file in /dev/shm or another tmpfs",
        )
    if status.st_size < size_bytes:
        raise BadRequest(
            f"the file has only {status.st_size} bytes",
            field="adopt.bytes",
            value=size_bytes,
            remedy="give it its size first",
        )


def _read_only(fd: int) -> int:
    """A descriptor of the same file that can read and nothing else: `fd` itself, or a new one. Raises BadRequest,
    Unavailable."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        raise BadRequest("cannot be read", field="adopt", value="descriptor", remedy="open it for reading")
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return fd
    try:
        # O_NONBLOCK: its owner may have a lease on the file (fcntl F_SETLEASE), for which opening would wait.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(
            f"is writable, and the daemon may not open it anew for reading only: {error.strerror}",
            field="adopt",
            value="descriptor",
            remedy="hand over one that was opened with O_RDONLY",
        ) from None
