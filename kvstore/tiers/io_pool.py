"""The threads of the SSD tier, and their tasks: each op is answered exactly once, when its last call has returned.

An op of several records is shared among the I/O threads in parts, in the order in which the records lie on disk, and
what lies side by side is moved in one call. A task may go on on the index thread, of which there is one, so that
what it does is in order. A thread that hangs in the kernel is left behind at the end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.events import DiskDone, SlabReady
from kvstore.errors import StoreError
from kvstore.tiers.disk_port import Buffer, describe, disk_result
from kvstore.tiers.format import PAGE_BYTES, RECORD_HEADER_BYTES, slab_name
from kvstore.types import DiskPlace, DiskResult, Extent, OpId, Record, SlabId

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""An op is shared among the I/O threads in parts of at least this much."""
RUN_BYTES = 1 << 20
RUN_RECORDS_MAX = 64
"""Neighbours are moved in one call up to so much; a larger record alone."""
CLOSING = "the SSD tier is closing"


class Result(NamedTuple):
    result: DiskResult
    why: str = ""
    slabs: tuple[SlabId, ...] = ()
    """Of an index batch: the slab files whose sync failed."""


OK = Result(DiskResult.OK)
Row = tuple[Record, Extent, DiskPlace]
"""A record, where it is in DRAM, and where it is on SSD."""


class IoPool:
    def __init__(self, answer: Callable[[SlabReady | DiskDone], None]) -> None:
        """`answer` is called from the pool's threads, or from whoever calls `close`."""
        self.answer = answer
        self.out_of_time = False
        """What has not started will not start any more."""
        self._io: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._index: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._scrub: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._io_threads: list[threading.Thread] = []
        self._index_thread: threading.Thread | None = None
        self._scrub_thread: threading.Thread | None = None

    def start(self, io_threads: int, last: Callable[[], None]) -> None:
        """`last` is what the index thread does at its end."""
        # Daemon threads: one that hangs in the kernel must not keep the process from ending.
        self._index_thread = threading.Thread(
            target=self._run_index, args=(last,), name="kvstored-index", daemon=True
        )
        self._io_threads = [
            threading.Thread(target=self._run_io, name=f"kvstored-ssd-{number}", daemon=True)
            for number in range(io_threads)
        ]
        self._scrub_thread = threading.Thread(target=self._run_scrub, name="kvstored-scrub", daemon=True)
        for thread in self._threads:
            thread.start()

    @property
    def started(self) -> bool:
        return self._index_thread is not None

    @property
    def waiting(self) -> int:
        """Tasks that no thread has taken up."""
        return self._io.qsize() + self._index.qsize()

    def io(self, op: OpId, work: _Work) -> None:
        self._io.put(_Single(self, op, work))

    def index(self, op: OpId, work: _Work) -> None:
        self._index.put(_Single(self, op, work))

    def scrub(self, op: OpId, work: _Work) -> None:
        """On a thread of its own, so that what is asked for never waits behind it."""
        self._scrub.put(_Single(self, op, work))

    def go_on(self, op: OpId, work: _Work) -> None:
        """Of an I/O task that returned None: on the index thread, unless it hung until after `close`."""
        task = _Single(self, op, work)
        if self.out_of_time:
            task.fail(CLOSING)
        else:
            self._index.put(task)

    def share(self, op: OpId, rows: Sequence[Row], perform: _Perform) -> None:
        """`perform` gets rows whose places are neighbours, in their order, and returns as many results. If it raises,
        it gets them one by one: what is wrong with one record is not to be said of others."""
        order = sorted(range(len(rows)), key=lambda number: (rows[number][2].slab, rows[number][2].slot))
        total = sum(record.length for record, _, _ in rows)
        count = max(1, min(len(self._io_threads), len(rows), total // PART_BYTES))
        bounds = [len(rows) * number // count for number in range(count + 1)]
        shared = _SharedOp(self, op, len(rows), count)
        for start, end in itertools.pairwise(bounds):
            numbers = order[start:end]
            self._io.put(_Part(self, shared, numbers, [rows[number] for number in numbers], perform))

    def close(self, timeout_s: float) -> list[str]:
        """What waits has `timeout_s` to end; then what has not started fails. Returns the names of the threads that
        are in a call still, and are left behind."""
        deadline = time.monotonic() + timeout_s
        index_share_s = min(1.0, timeout_s / 4)  # a hung read must not cost the index thread its time
        self._scrub.put(None)
        _fail_what_waits(self._scrub, 1)  # of no use to anybody any more
        for _ in self._io_threads:
            self._io.put(None)
        for thread in (*self._io_threads, *([self._scrub_thread] if self._scrub_thread else [])):
            thread.join(max(0.0, deadline - index_share_s - time.monotonic()))
        self.out_of_time = any(thread.is_alive() for thread in self._io_threads)
        _fail_what_waits(self._io, len(self._io_threads))
        self._index.put(None)
        if self._index_thread is not None:
            self._index_thread.join(max(0.0, deadline - time.monotonic()))
        self.out_of_time = True
        _fail_what_waits(self._index, 1)
        return [thread.name for thread in self._threads if thread.is_alive()]

    @property
    def _threads(self) -> list[threading.Thread]:
        alone = [thread for thread in (self._index_thread, self._scrub_thread) if thread is not None]
        return [*self._io_threads, *alone]

    def _run_io(self) -> None:
        scratch = Scratch()
        while (task := self._io.get()) is not None:
            task.run(scratch)

    def _run_scrub(self) -> None:
        scratch = Scratch()
        while (task := self._scrub.get()) is not None:
            task.run(scratch)

    def _run_index(self, last: Callable[[], None]) -> None:
        scratch = Scratch()
        while (task := self._index.get()) is not None:
            task.run(scratch)
        last()

    def __repr__(self) -> str:
        alive = sum(thread.is_alive() for thread in self._threads)
        return f"IoPool({alive} threads, {self.waiting} tasks waiting)"


def _fail_what_waits(tasks: queue.SimpleQueue[_Task | None], ends: int) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            task = tasks.get_nowait()
            if task is not None:
                task.fail(CLOSING)
    for _ in range(ends):
        tasks.put(None)


# -------------------------------------------------------------------------------------------------------------- tasks


class _Single:
    """A task with one result, or None when another task goes on with its op."""

    def __init__(self, pool: IoPool, op: OpId, work: _Work) -> None:
        self._pool = pool
        self._op = op
        self._work = work

    def run(self, scratch: Scratch) -> None:
        answer: Result | SlabReady | DiskDone | None
        try:
            answer = self._work(scratch)
        except Exception as problem:
            answer = failed(problem)
        if isinstance(answer, Result):
            self._pool.answer(DiskDone(self._op, (answer.result,), answer.why, slabs=answer.slabs))
        elif answer is not None:
            self._pool.answer(answer)

    def fail(self, why: str) -> None:
        self._pool.answer(DiskDone(self._op, (DiskResult.IO_ERROR,), why))


class _SharedOp:
    """An op whose records several threads work on."""

    def __init__(self, pool: IoPool, op: OpId, records: int, parts: int) -> None:
        self._pool = pool
        self._op = op
        self._results = [OK] * records
        self._parts = parts
        self._lock = threading.Lock()

    def finish(self, numbers: Sequence[int], results: Sequence[Result]) -> None:
        """Of the records with these numbers. The last part answers."""
        with self._lock:
            for number, result in zip(numbers, results, strict=True):
                self._results[number] = result
            self._parts -= 1
            if self._parts:
                return
        whys = tuple(result.why for result in self._results)
        why = next(filter(None, whys), "")
        all_results = tuple(result.result for result in self._results)
        self._pool.answer(DiskDone(self._op, all_results, why, whys if why else ()))


class _Part:
    def __init__(
        self, pool: IoPool, op: _SharedOp, numbers: Sequence[int], rows: Sequence[Row], perform: _Perform
    ) -> None:
        self._pool = pool
        self._op = op
        self._numbers = numbers
        self._rows = rows
        self._perform = perform

    def run(self, scratch: Scratch) -> None:
        results: list[Result] = []
        for neighbours in runs(self._rows):
            results += self._attempt(neighbours, scratch)
        self._op.finish(self._numbers, results)

    def _attempt(self, rows: Sequence[Row], scratch: Scratch) -> list[Result]:
        try:
            if self._pool.out_of_time:
                raise OSError(errno.ECANCELED, CLOSING)
            return self._perform(rows, scratch)
        except Exception as problem:
            if len(rows) > 1:
                return [result for row in rows for result in self._attempt([row], scratch)]
            result = failed(problem)
            return [result._replace(why=f"{result.why} ({slab_name(rows[0][2].slab)})")]

    def fail(self, why: str) -> None:
        self._op.finish(self._numbers, [Result(DiskResult.IO_ERROR, why)] * len(self._rows))


def runs(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Cut where a place is not the next one of the same slab file, or enough is together."""
    start, size = 0, 0
    for number, (record, _, place) in enumerate(rows):
        before = rows[number - 1][2]
        apart = place.slab != before.slab or place.slot != before.slot + 1
        full = size + record.length > RUN_BYTES or number - start == RUN_RECORDS_MAX
        if number > start and (apart or full):
            yield rows[start:number]
            start, size = number, 0
        size += record.length
    if rows:
        yield rows[start:]


_Task = _Single | _Part


def failed(problem: Exception) -> Result:
    if isinstance(problem, OSError):
        return Result(disk_result(problem), describe(problem))
    if not isinstance(
        problem, StoreError
    ):  # a bug; its op must end all the same, or its slots would never be free
        log.error("a disk op failed", exc_info=problem)
    return Result(DiskResult.IO_ERROR, f"{type(problem).__name__}: {problem}")


# ----------------------------------------------------------------------------------------------------------- scratch


class Scratch:
    """A thread's own aligned memory: headers, and what direct I/O cannot take from or put into DRAM as it lies. For
    each record of a run two pages:

        [header page][buffered: what lies behind the payload in its slot; direct: the payload's last page, zeros]
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 2 * RUN_RECORDS_MAX * PAGE_BYTES))
        self.page = self._memory[:PAGE_BYTES]
        self.zeros = memoryview(bytes(PAGE_BYTES))
        self._bounce = memoryview(b"")
        self._sealed = memoryview(b"")

    def header(self, number: int) -> memoryview:
        """Of record `number` of the run."""
        start = 2 * number * PAGE_BYTES
        return self._memory[start : start + RECORD_HEADER_BYTES]

    def rest(self, number: int, size: int) -> memoryview:
        start = (2 * number + 1) * PAGE_BYTES
        return self._memory[start : start + size]

    def sealed(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Room for so many bytes each, aligned: what is written of payloads that are encrypted."""
        ends = list(itertools.accumulate(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes))
        if len(self._sealed) < ends[-1]:
            self._sealed = memoryview(mmap.mmap(-1, ends[-1]))
        room = np.frombuffer(self._sealed, np.uint8)
        return [room[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]

    # Direct I/O moves whole pages between page-aligned addresses, as slots of the arena are:
    #     file    [header page][payload, whole pages ...][rest of the payload, zeros]
    #     memory  [page       ][payload[:whole]         ][page                      ]
    # A payload that lies elsewhere takes a detour, for which there is one place: such records go alone.

    def direct_write(self, number: int, header: bytes, payload: npt.NDArray[np.uint8]) -> list[Buffer]:
        page, body, tail = self.direct_read(number, payload)
        page[:] = header.ljust(PAGE_BYTES, b"\0")
        if not is_aligned(payload):
            body[:] = payload.data[: len(body)]
        tail[:] = bytes(payload.data[len(body) :]).ljust(len(tail), b"\0")
        return [page, body, tail]

    def direct_read(self, number: int, payload: npt.NDArray[np.uint8]) -> list[memoryview]:
        """Header page, whole pages of the payload, and its rest: a page, or nothing."""
        start = 2 * number * PAGE_BYTES
        page = self._memory[start : start + PAGE_BYTES]
        whole = len(payload) // PAGE_BYTES * PAGE_BYTES
        tail = self.rest(number, PAGE_BYTES if len(payload) > whole else 0)
        if is_aligned(payload):
            return [page, payload.data[:whole], tail]
        if len(self._bounce) < whole:
            self._bounce = memoryview(mmap.mmap(-1, whole))
        return [page, self._bounce[:whole], tail]

    def finish_direct_read(self, number: int, payload: npt.NDArray[np.uint8]) -> None:
        _, body, tail = self.direct_read(number, payload)
        if not is_aligned(payload):
            payload.data[: len(body)] = body
        payload.data[len(body) :] = tail[: len(payload) - len(body)]


def is_aligned(payload: npt.NDArray[np.uint8]) -> bool:
    return int(payload.ctypes.data) % PAGE_BYTES == 0


_Work = Callable[[Scratch], Result | SlabReady | DiskDone | None]
_Perform = Callable[[Sequence[Row], Scratch], list[Result]]
