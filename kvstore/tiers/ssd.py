"""The SSD tier: performs the core's disk effects on threads of its own, and answers each exactly once.

                    I/O threads (ssd_threads)                          index thread (one)
    WriteRecords    DRAM slot -> header + payload -> slab file
    ReadRecords     slab file -> header + DRAM slot -> verify
    CreateSlab      preallocate, header, sync                       -> its row in the index
    WriteIndex                                                         sync the slabs, then one transaction
    ProbeDisk       write, sync, read back                          -> a transaction

An op is answered when its last call *has returned*: until then its slots and places belong to it, however late it is.
Deadlines and how many ops are in flight are the core's business, so that a hung disk costs threads here and no more.

Who is exclusive: `<ssd_dir>/lock` is held with flock from `open` until the last thread that may touch the directory has
ended, also beyond `close`; the kernel drops it when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import queue
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import format
from kvstore.config import LOCK_FILE, SSD_OVERHEAD_BYTES, StoreConfig
from kvstore.core.events import (
    CreateSlab,
    DiskDone,
    NamespaceRecord,
    ProbeDisk,
    ReadRecords,
    SessionRecord,
    SlabReady,
    WriteIndex,
    WriteRecords,
)
from kvstore.errors import ConfigError, Exhausted, StoreError, Unavailable
from kvstore.format import PAGE_BYTES, Defect, SlabHeader
from kvstore.index import ChunkBatch, Index, SlabRow
from kvstore.logs import fields
from kvstore.ports import Buffer, Disk, describe, disk_result, read_all, write_all
from kvstore.tiers.base import SlotMemory
from kvstore.types import DiskPlace, DiskResult, Extent, OpId, Record, SlabId

log = logging.getLogger(__name__)

INDEX_DIR = "index"
PROBE_FILE = "probe"
INDEX_BYTES_MIN = 1 << 20
PART_BYTES = 1 << 20
"""An op is shared among the I/O threads in parts of at least this much."""
OPS_MAX = 65_536
"""Parts of ops that may wait for a thread. The core keeps far fewer in flight; one more fails at once."""
FILES_SPARE = 4_096
"""Descriptors that the rest of the daemon may need beside one per slab file."""
CLOSING = "the SSD tier is closing"

DiskEffect = CreateSlab | WriteRecords | ReadRecords | WriteIndex | ProbeDisk
Done = Callable[[SlabReady | DiskDone], None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a restart knows. `chunks` reads the index as it is consumed: read it to its end before the first submit."""

    slabs: list[SlabRow]
    next_slab: SlabId
    boot_count: int
    """One higher at each open; generations of this boot start at boot_count << 32."""
    namespaces: list[NamespaceRecord]
    sessions: list[SessionRecord]
    chunks: Iterator[ChunkBatch]


@dataclass(frozen=True, slots=True)
class SsdStats:
    """What happened since the start, and what is occupied now."""

    bytes_read: int
    bytes_written: int
    records_read: int
    records_written: int
    records_corrupt: int
    io_errors: int
    no_space: int
    index_commits: int
    index_commit_seconds: float
    """Syncs of slabs included."""
    index_used_bytes: int
    index_bytes: int
    slab_files: int
    slab_bytes: int


class Result(NamedTuple):
    result: DiskResult
    why: str = ""


OK = Result(DiskResult.OK)


class SsdTier:
    def __init__(self, config: StoreConfig, memory: SlotMemory, disk: Disk, *, done: Done) -> None:
        """`done` is called from tier threads; or, for what is refused at once, from `submit` or `close`."""
        self._config = config
        self._directory = config.ssd_dir
        self._direct = config.ssd_direct_io
        self._memory = memory
        self._disk = disk
        self._done = done
        self._state = threading.Lock()
        """Guards what both kinds of threads change: slabs and their sets, bytes, counters. Never held during I/O."""
        self._slabs: dict[SlabId, _Slab] = {}
        self._slab_bytes = 0
        self._counted = _Counters()
        self._closing = False
        self._out_of_time = False
        self._io: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._index_jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._io_threads: list[threading.Thread] = []
        self._index_thread: threading.Thread | None = None
        self._lock: _DirectoryLock | None = None
        self._index: Index | None = None

    # ------------------------------------------------------------------------------------------------- start and end

    def open(self) -> Snapshot:
        """Locks the directory and reads the index. Raises ConfigError (in use, a newer format, settings that cannot
        work, a damaged index), Exhausted (the disk is full) or Unavailable (it fails); nothing is held then."""
        _check(self._config)
        self._lock = _DirectoryLock(self._directory)
        try:
            index = self._index = Index(
                os.path.join(self._directory, INDEX_DIR),
                bytes_max=self._config.ssd_index_max,
                direct=self._direct,
                slab_bytes=self._config.ssd_slab_bytes,
                disk=self._disk,
            )
            slabs = self._open_slabs(index)
            namespaces = index.namespaces()
            specs = {namespace.number: namespace.spec for namespace in namespaces}
            snapshot = Snapshot(
                slabs=slabs,
                next_slab=SlabId(index.next_slab),
                boot_count=index.boot_count,
                namespaces=namespaces,
                sessions=index.sessions(specs),
                chunks=index.chunks(specs, slabs, direct=self._direct),
            )
        except BaseException as problem:
            self._release_directory()
            if isinstance(problem, OSError):
                raise Unavailable(
                    f"{self._directory}: {describe(problem)}", remedy="check the disk"
                ) from None
            raise
        # Daemon threads: one that hangs in the kernel must not keep the process from ending.
        self._index_thread = threading.Thread(
            target=self._run_index, args=(index,), name="kvstored-index", daemon=True
        )
        self._io_threads = [
            threading.Thread(target=self._run_io, name=f"kvstored-ssd-{number}", daemon=True)
            for number in range(self._config.ssd_threads)
        ]
        for thread in (self._index_thread, *self._io_threads):
            thread.start()
        return snapshot

    def submit(self, effect: DiskEffect) -> None:
        """Never blocks, never raises because of I/O."""
        if self._closing:
            self._refuse(effect, CLOSING)
            return
        if self._io.qsize() + self._index_jobs.qsize() >= OPS_MAX:
            self._refuse(effect, f"{OPS_MAX} disk ops are waiting already")
            return
        match effect:
            case WriteRecords():
                self._share(effect, self._write_record, effect.sources, effect.targets)
            case ReadRecords():
                self._share(effect, self._read_record, effect.targets, effect.sources)
            case WriteIndex():
                self._index_jobs.put(_Single(self, effect.op, lambda _: self._write_index(effect)))
            case CreateSlab():
                self._io.put(_Single(self, effect.op, lambda scratch: self._create_slab(effect, scratch)))
            case ProbeDisk():
                self._io.put(_Single(self, effect.op, lambda scratch: self._probe(effect, scratch)))

    def close(self, timeout_s: float) -> None:
        """What was submitted has `timeout_s` to end; then what has not started fails. A thread that hangs is left
        behind, and the lock with it, so that nobody opens a directory into which that thread may still write."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        index_share_s = min(1.0, timeout_s / 4)  # a hung read must not cost the index thread its time
        for _ in self._io_threads:
            self._io.put(None)
        for thread in self._io_threads:
            thread.join(max(0.0, deadline - index_share_s - time.monotonic()))
        self._out_of_time = any(thread.is_alive() for thread in self._io_threads)
        self._fail_what_waits(self._io, len(self._io_threads))
        self._index_jobs.put(None)
        if self._index_thread is not None:
            self._index_thread.join(max(0.0, deadline - time.monotonic()))
        self._out_of_time = True
        self._fail_what_waits(self._index_jobs, 1)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            log.error("%s still in a call to the disk: left behind, with the lock", ", ".join(hung))
        else:
            self._release_directory()

    @property
    def _threads(self) -> list[threading.Thread]:
        return [*self._io_threads, *([self._index_thread] if self._index_thread else [])]

    def _release_directory(self) -> None:
        self._slabs.clear()
        if self._index is not None and self._index_thread is None:
            self._index.close()  # else its thread has
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _fail_what_waits(self, jobs: queue.SimpleQueue[_Job | None], ends: int) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = jobs.get_nowait()
                if job is not None:
                    job.fail(CLOSING)
        for _ in range(ends):
            jobs.put(None)

    def stats(self) -> SsdStats:
        with self._state:
            counted, files, slab_bytes = self._counted, len(self._slabs), self._slab_bytes
            return SsdStats(
                bytes_read=counted.bytes_read,
                bytes_written=counted.bytes_written,
                records_read=counted.records_read,
                records_written=counted.records_written,
                records_corrupt=counted.results[DiskResult.CORRUPT],
                io_errors=counted.results[DiskResult.IO_ERROR],
                no_space=counted.results[DiskResult.NO_SPACE],
                index_commits=counted.index_commits,
                index_commit_seconds=counted.index_commit_seconds,
                index_used_bytes=self._index.used_bytes if self._index else 0,
                index_bytes=self._index.bytes_max if self._index else 0,
                slab_files=files,
                slab_bytes=slab_bytes,
            )

    # --------------------------------------------------------------------------------------------------- the threads

    def _run_io(self) -> None:
        scratch = _Scratch()
        while (job := self._io.get()) is not None:
            job.run(scratch)

    def _run_index(self, index: Index) -> None:
        scratch = _Scratch()
        while (job := self._index_jobs.get()) is not None:
            job.run(scratch)
        index.close()

    def _go_on(self, job: _Single) -> None:
        """On the index thread, unless this thread hung until after `close`."""
        if self._out_of_time:
            job.fail(CLOSING)
        else:
            self._index_jobs.put(job)

    def _answer(self, answer: SlabReady | DiskDone) -> None:
        if isinstance(answer, DiskDone):
            with self._state:
                for result in answer.results:
                    self._counted.results[result] += 1
        try:
            self._done(answer)
        except Exception:
            log.exception("the answer %r could not be delivered", answer)

    def _refuse(self, effect: DiskEffect, why: str) -> None:
        count = len(effect.records) if isinstance(effect, (WriteRecords, ReadRecords)) else 1
        self._answer(DiskDone(effect.op, (DiskResult.IO_ERROR,) * count, why))

    def _share(
        self,
        effect: WriteRecords | ReadRecords,
        perform: _Perform,
        extents: Sequence[Extent],
        places: Sequence[DiskPlace],
    ) -> None:
        rows = list(zip(effect.records, extents, places, strict=True))
        total = sum(record.length for record in effect.records)
        count = max(1, min(len(self._io_threads), len(rows), total // PART_BYTES))
        bounds = [len(rows) * number // count for number in range(count + 1)]
        op = _SharedOp(self, effect.op, len(rows), count)
        for start, end in itertools.pairwise(bounds):
            self._io.put(_Part(self, op, start, rows[start:end], perform))

    # ------------------------------------------------------------------------------------------------------- records

    def _write_record(self, record: Record, source: Extent, place: DiskPlace, scratch: _Scratch) -> Result:
        """[header][payload as it lies in DRAM][zeros to the end of the page] in one call. The checksum is the one from
        the commit, not a new one: should the bytes have changed since, the reader finds out."""
        slab = self._slab(place)
        payload = self._memory.view(source.segment, source.offset, record.length)
        header = format.encode_record_header(record, place.generation, direct=self._direct)
        zeros = slab.room(record.length, direct=self._direct)
        self._begin_write(slab, place)
        offset = format.slot_offset(slab.slot_bytes, place.slot)
        if self._direct:
            buffers = scratch.direct_write(header, payload)
        else:
            buffers = [header, payload.data, scratch.zeros[: zeros % PAGE_BYTES]]
        write_all(self._disk, slab.fd, buffers, offset)
        self._end_write(slab, place, record.length)
        return OK

    def _read_record(self, record: Record, target: Extent, place: DiskPlace, scratch: _Scratch) -> Result:
        slab = self._slab(place)
        payload = self._memory.view(target.segment, target.offset, record.length)
        slab.room(record.length, direct=self._direct)
        buffers = scratch.direct_read(payload) if self._direct else [scratch.header, payload.data]
        count = read_all(self._disk, slab.fd, buffers, format.slot_offset(slab.slot_bytes, place.slot))
        if count < sum(map(len, buffers)):
            return _corrupt(place, "the file ends in it")
        if self._direct:
            scratch.finish_direct_read(payload)
        header = format.decode_record_header(scratch.header)
        if isinstance(header, Defect):
            return _corrupt(place, header.value)
        if wrong := format.difference(header, record, place.generation, direct=self._direct):
            return _corrupt(place, wrong)
        if xxhash.xxh3_64_intdigest(payload.data) != record.checksum:
            return _corrupt(place, "its bytes do not match their checksum")
        with self._state:
            self._counted.records_read += 1
            self._counted.bytes_read += record.length
        return OK

    def _slab(self, place: DiskPlace) -> _Slab:
        with self._state:
            slab = self._slabs.get(place.slab)
        if slab is None or not 0 <= place.slot < slab.slots:
            raise OSError(errno.ENOENT, f"no such place: slab {place.slab}, slot {place.slot}")
        return slab

    # A failed fdatasync is never repeated: the kernel may have marked the lost pages clean, and the next call would
    # report success. So each slab knows which records were written since its last sync; those of a failed one are
    # *lost*, and an index batch that names one of them is refused as CORRUPT, until it is written anew. A record counts
    # from before its first byte, because the sync that fails may run meanwhile, and again after its last, because one
    # that succeeds may have missed it.

    def _begin_write(self, slab: _Slab, place: DiskPlace) -> None:
        with self._state:
            slab.unsynced[place.slot] = place.generation
            slab.lost.pop(place.slot, None)

    def _end_write(self, slab: _Slab, place: DiskPlace, length: int) -> None:
        with self._state:
            slab.unsynced[place.slot] = place.generation
            self._counted.records_written += 1
            self._counted.bytes_written += length

    def _sync(self, slab: _Slab) -> None:
        with self._state:
            written, slab.unsynced = slab.unsynced, {}
        try:
            self._disk.sync(slab.fd)
        except OSError:
            with self._state:
                slab.lost.update(written)
            raise

    # --------------------------------------------------------------------------------------------------------- index

    def _write_index(self, effect: WriteIndex) -> Result:
        started = time.monotonic()
        slabs = self._slabs_to_sync(effect)
        try:
            for slab in slabs:
                self._sync(slab)
        except OSError as problem:
            if not self._first_lost(effect):
                raise
            return Result(DiskResult.CORRUPT, f"a sync failed: {describe(problem)}")
        if lost := self._first_lost(effect):
            return Result(DiskResult.CORRUPT, f"slab {lost.slab}, slot {lost.slot}: a failed sync lost it")
        result, why = self._opened_index.write(effect)
        if result == DiskResult.OK:
            for number in effect.slabs_deleted:
                self._delete_slab(number)
            with self._state:
                self._counted.index_commits += 1
                self._counted.index_commit_seconds += time.monotonic() - started
        return Result(result, why)

    def _slabs_to_sync(self, effect: WriteIndex) -> list[_Slab]:
        """Those that are named, and any other in which the batch's chunks are not synced yet."""
        with self._state:
            wanted = {number: self._slabs[number] for number in effect.slabs if number in self._slabs}
            missing = set(effect.slabs) - wanted.keys()
            for chunk in effect.chunks:
                for place in chunk.places:
                    slab = self._slabs.get(place.slab)
                    if slab is None:
                        missing.add(place.slab)
                    elif place.slot in slab.unsynced:
                        wanted[place.slab] = slab
        if missing:
            raise OSError(errno.ENOENT, f"no such slab: {sorted(missing)}")
        return list(wanted.values())

    def _first_lost(self, effect: WriteIndex) -> DiskPlace | None:
        with self._state:
            if any(slab.lost for slab in self._slabs.values()):
                for chunk in effect.chunks:
                    for place in chunk.places:
                        if self._slabs[place.slab].lost.get(place.slot) == place.generation:
                            return place
        return None

    @property
    def _opened_index(self) -> Index:
        assert self._index is not None, "submit before open"
        return self._index

    # --------------------------------------------------------------------------------------------------------- slabs

    def _create_slab(self, effect: CreateSlab, scratch: _Scratch) -> Result | None:
        """The file, and then its row in the index; None: the index thread answers."""
        size = format.slab_file_bytes(effect.slot_bytes, effect.slots)
        with self._state:
            room = (
                self._config.ssd_bytes - SSD_OVERHEAD_BYTES - self._opened_index.bytes_max - self._slab_bytes
            )
            if effect.slab in self._slabs:
                raise FileExistsError(errno.EEXIST, f"slab {effect.slab} exists")
            if size > room:
                return Result(
                    DiskResult.NO_SPACE, f"a slab of {size} bytes would exceed ssd_bytes by {size - room}"
                )
            self._slab_bytes += size
        try:
            slab = self._make_slab_file(effect, size, scratch)
        except BaseException:
            self._forget_slab_file(effect.slab, size)
            raise

        def add(_: _Scratch) -> Result | SlabReady:
            result, why = self._opened_index.add_slab(effect.slab, effect.slot_bytes, effect.slots)
            if result != DiskResult.OK:
                self._forget_slab_file(effect.slab, size)
                return Result(result, why)
            with self._state:
                self._slabs[effect.slab] = slab
            return SlabReady(effect.op)

        self._go_on(_Single(self, effect.op, add))
        return None

    def _make_slab_file(self, effect: CreateSlab, size: int, scratch: _Scratch) -> _Slab:
        path = self._slab_path(effect.slab)
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(path)  # of an attempt that failed, and then could not even be removed
        fd = self._disk.open(path, create=True, direct=self._direct)
        slab = _Slab(self._disk, fd, effect.slot_bytes, effect.slots)
        self._disk.allocate(fd, size)
        header = SlabHeader(effect.slab, effect.slot_bytes, effect.slots, self._direct)
        scratch.page[:] = format.encode_slab_header(header)
        write_all(self._disk, fd, [scratch.page], 0)
        self._disk.sync(fd)
        self._disk.sync_directory(self._directory)
        return slab

    def _delete_slab(self, number: SlabId) -> None:
        """The index no longer names it. Its descriptor is closed when the last op that uses it has returned."""
        with self._state:
            slab = self._slabs.pop(number, None)
        if slab is not None:
            self._forget_slab_file(number, format.slab_file_bytes(slab.slot_bytes, slab.slots))

    def _forget_slab_file(self, number: SlabId, size: int) -> None:
        """Bytes of a file that cannot be removed go on counting; the next start removes it."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self._slab_path(number))
        except OSError as problem:
            log.warning("%s cannot be removed: %s", self._slab_path(number), describe(problem))
        else:
            with self._state:
                self._slab_bytes -= size

    def _open_slabs(self, index: Index) -> list[SlabRow]:
        """Opens the slab files that the index names, and removes all others. A named one that is missing, not what it
        should be, or beyond a cap that was lowered, is dropped, and with it (by `Index.chunks`) what lay in it."""
        budget = self._config.ssd_bytes - SSD_OVERHEAD_BYTES - index.bytes_max
        kept: list[SlabRow] = []
        dropped: list[SlabId] = []
        for row in index.slabs():
            size = format.slab_file_bytes(row.slot_bytes, row.slots)
            path = self._slab_path(row.slab)
            try:
                slab = self._open_slab(row, path)
                if self._slab_bytes + size > budget:
                    raise OSError(errno.EDQUOT, f"more than ssd_bytes={self._config.ssd_bytes} allows")
            except OSError as problem:
                log.warning("dropped %s and all that was in it: %s", path, describe(problem))
                dropped.append(row.slab)
                continue
            self._slabs[row.slab] = slab
            self._slab_bytes += size
            kept.append(row)
        if dropped:
            index.remove_slabs(dropped)
        names = {format.slab_name(row.slab) for row in kept}
        for name in self._disk.names(self._directory):
            if name.startswith("slab-") and name.endswith(".kvs") and name not in names:
                log.warning("removed %s, which the index does not name", name)
                self._disk.unlink(os.path.join(self._directory, name))
        return kept

    def _open_slab(self, row: SlabRow, path: str) -> _Slab:
        fd = self._disk.open(path, direct=self._direct)
        slab = _Slab(self._disk, fd, row.slot_bytes, row.slots)
        if self._disk.size(fd) < format.slab_file_bytes(row.slot_bytes, row.slots):
            raise OSError(errno.EINVAL, "the file is too short")
        page = _Scratch().page
        read_all(self._disk, fd, [page], 0)
        header = format.decode_slab_header(bytes(page))
        if isinstance(header, Defect):
            raise OSError(errno.EINVAL, f"its header {header.value}")
        if header != SlabHeader(row.slab, row.slot_bytes, row.slots, self._direct):
            raise OSError(errno.EINVAL, f"its header is that of {header}")
        return slab

    def _slab_path(self, number: SlabId) -> str:
        return os.path.join(self._directory, format.slab_name(number))

    # --------------------------------------------------------------------------------------------------------- probe

    def _probe(self, effect: ProbeDisk, scratch: _Scratch) -> Result | None:
        """The file stays, so that a full disk can be probed too."""
        path = os.path.join(self._directory, PROBE_FILE)
        try:
            fd = self._disk.open(path, direct=self._direct)
        except FileNotFoundError:
            fd = self._disk.open(path, create=True, direct=self._direct)
        try:
            expected = effect.op.to_bytes(8, "little", signed=True) * (PAGE_BYTES // 8)
            scratch.page[:] = expected
            write_all(self._disk, fd, [scratch.page], 0)
            self._disk.sync(fd)
            scratch.page[:] = bytes(PAGE_BYTES)
            read_all(self._disk, fd, [scratch.page], 0)
            if scratch.page != expected:
                return Result(DiskResult.CORRUPT, "the probe read back other bytes than it wrote")
        finally:
            self._disk.close(fd)
        self._go_on(_Single(self, effect.op, lambda _: Result(*self._opened_index.probe())))
        return None

    def __repr__(self) -> str:
        alive = sum(thread.is_alive() for thread in self._threads)
        waiting = self._io.qsize() + self._index_jobs.qsize()
        return (
            f"SsdTier({self._directory}: {len(self._slabs)} slabs, {alive} threads, {waiting} jobs waiting)"
        )


@dataclass(slots=True)
class _Counters:
    bytes_read: int = 0
    bytes_written: int = 0
    records_read: int = 0
    records_written: int = 0
    index_commits: int = 0
    index_commit_seconds: float = 0.0
    results: dict[DiskResult, int] = field(default_factory=lambda: dict.fromkeys(DiskResult, 0))


class _Slab:
    """An open slab file. Its descriptor lives as long as somebody holds this object, so that no number of a closed one
    is ever written to."""

    __slots__ = ("__weakref__", "fd", "lost", "slot_bytes", "slots", "unsynced")

    def __init__(self, disk: Disk, fd: int, slot_bytes: int, slots: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.unsynced: dict[int, int] = {}
        """Generation by slot: written since the last sync began."""
        self.lost: dict[int, int] = {}
        """Generation by slot: written before a sync that failed."""
        weakref.finalize(self, disk.close, fd).atexit = False

    def room(self, length: int, *, direct: bool) -> int:
        """What a slot has left behind a payload of `length` bytes."""
        left = self.slot_bytes - format.record_header_bytes(direct=direct) - length
        if left < 0:
            raise OSError(errno.EINVAL, f"{length} bytes do not fit a slot of {self.slot_bytes}")
        return left


class _Scratch:
    """A thread's own aligned memory: headers, and what direct I/O cannot take from or put into DRAM as it lies."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, 3 * PAGE_BYTES))
        self.page = memory[:PAGE_BYTES]
        self.header = self.page[: format.RECORD_HEADER_BYTES]
        self._tail = memory[PAGE_BYTES : 2 * PAGE_BYTES]
        self.zeros = memory[2 * PAGE_BYTES :]
        self._bounce = memoryview(b"")

    # Direct I/O moves whole pages between page-aligned addresses, as slots of the arena are:
    #     file    [header page][payload, whole pages ...][rest of the payload, zeros]
    #     memory  [self.page  ][payload[:whole]         ][self._tail                ]

    def direct_write(self, header: bytes, payload: npt.NDArray[np.uint8]) -> list[Buffer]:
        self.page[:] = header.ljust(PAGE_BYTES, b"\0")
        body, tail = self._direct(payload)
        if not _is_aligned(payload):
            body[:] = payload.data[: len(body)]
        tail[:] = bytes(payload.data[len(body) :]).ljust(len(tail), b"\0")
        return [self.page, body, tail]

    def direct_read(self, payload: npt.NDArray[np.uint8]) -> list[Buffer]:
        return [self.page, *self._direct(payload)]

    def finish_direct_read(self, payload: npt.NDArray[np.uint8]) -> None:
        body, tail = self._direct(payload)
        if not _is_aligned(payload):
            payload.data[: len(body)] = body
        payload.data[len(body) :] = tail[: len(payload) - len(body)]

    def _direct(self, payload: npt.NDArray[np.uint8]) -> tuple[memoryview, memoryview]:
        """Where the whole pages of `payload` are moved from or to, and where its rest is: a page, or nothing."""
        whole = len(payload) // PAGE_BYTES * PAGE_BYTES
        tail = self._tail[: PAGE_BYTES if len(payload) > whole else 0]
        if _is_aligned(payload):
            return payload.data[:whole], tail
        if len(self._bounce) < whole:
            self._bounce = memoryview(mmap.mmap(-1, whole))
        return self._bounce[:whole], tail


def _is_aligned(payload: npt.NDArray[np.uint8]) -> bool:
    return int(payload.ctypes.data) % PAGE_BYTES == 0


# -------------------------------------------------------------------------------------------------------------- jobs

_Perform = Callable[[Record, Extent, DiskPlace, _Scratch], Result]


class _Single:
    """A job with one result, or None when another job goes on with its op."""

    def __init__(
        self, tier: SsdTier, op: OpId, work: Callable[[_Scratch], Result | SlabReady | None]
    ) -> None:
        self._tier = tier
        self._op = op
        self._work = work

    def run(self, scratch: _Scratch) -> None:
        answer: Result | SlabReady | None
        try:
            answer = self._work(scratch)
        except Exception as problem:
            answer = _failed(problem)
        if isinstance(answer, Result):
            self._tier._answer(DiskDone(self._op, (answer.result,), answer.why))
        elif answer is not None:
            self._tier._answer(answer)

    def fail(self, why: str) -> None:
        self._tier._answer(DiskDone(self._op, (DiskResult.IO_ERROR,), why))


class _SharedOp:
    """An op whose records several threads work on."""

    def __init__(self, tier: SsdTier, op: OpId, records: int, parts: int) -> None:
        self._tier = tier
        self._op = op
        self._results = [OK] * records
        self._parts = parts
        self._lock = threading.Lock()

    def finish(self, start: int, results: list[Result]) -> None:
        """Of one part, from record number `start` on. The last one answers."""
        with self._lock:
            self._results[start : start + len(results)] = results
            self._parts -= 1
            if self._parts:
                return
        why = next((result.why for result in self._results if result.why), "")
        self._tier._answer(DiskDone(self._op, tuple(result.result for result in self._results), why))


class _Part:
    def __init__(
        self,
        tier: SsdTier,
        op: _SharedOp,
        start: int,
        rows: list[tuple[Record, Extent, DiskPlace]],
        perform: _Perform,
    ) -> None:
        self._tier = tier
        self._op = op
        self._start = start
        self._rows = rows
        self._perform = perform

    def run(self, scratch: _Scratch) -> None:
        results = []
        for record, extent, place in self._rows:
            try:
                if self._tier._out_of_time:
                    raise OSError(errno.ECANCELED, CLOSING)
                results.append(self._perform(record, extent, place, scratch))
            except Exception as problem:
                results.append(_failed(problem))
        self._op.finish(self._start, results)

    def fail(self, why: str) -> None:
        self._op.finish(self._start, [Result(DiskResult.IO_ERROR, why)] * len(self._rows))


_Job = _Single | _Part


def _failed(problem: Exception) -> Result:
    if isinstance(problem, OSError):
        return Result(disk_result(problem), describe(problem))
    if not isinstance(
        problem, StoreError
    ):  # a bug; its op must end all the same, or its slots would never be free
        log.error("a disk op failed", exc_info=problem)
    return Result(DiskResult.IO_ERROR, f"{type(problem).__name__}: {problem}")


def _corrupt(place: DiskPlace, why: str) -> Result:
    """Logged here, and so once: nobody reads this generation of the slot again."""
    where = f"{format.slab_name(place.slab)}, slot {place.slot}: {why}"
    log.error("a record on SSD is corrupt: it is a miss from now on", extra=fields(why=where))
    return Result(DiskResult.CORRUPT, where)


# --------------------------------------------------------------------------------------------------------- directory


class _DirectoryLock:
    def __init__(self, path: str) -> None:
        """Makes the directory if need be. Raises ConfigError, naming the pid of its holder, or Exhausted (no space)."""
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            if stat.S_IMODE(os.stat(path).st_mode) & 0o022:
                raise ConfigError(
                    "can be written to by other users",
                    field="ssd_dir",
                    value=path,
                    remedy="choose a directory of the daemon's own, or chmod go-w",
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(os.path.join(path, LOCK_FILE), flags, 0o600)
        except OSError as problem:
            if disk_result(problem) is DiskResult.NO_SPACE:
                raise Exhausted(
                    f"no space left: {describe(problem)}",
                    field="ssd_dir",
                    value=path,
                    remedy="free some space on its file system",
                ) from None
            raise ConfigError(
                f"cannot be used: {problem.strerror}",
                field="ssd_dir",
                value=path,
                remedy="choose another one",
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name on it
                os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"another daemon uses this directory (pid {holder or 'unknown'})",
                field="ssd_dir",
                value=path,
                remedy="stop it, or choose another directory",
            ) from None

    def release(self) -> None:
        os.close(self._fd)  # the file stays: removing it could take away the lock of a successor


def _check(config: StoreConfig) -> None:
    if not 1 <= config.ssd_threads <= 256:
        raise ConfigError("must be between 1 and 256", field="ssd_threads", value=config.ssd_threads)
    if config.ssd_slab_bytes < format.slab_file_bytes(format.slot_bytes(1, direct=True), 1):
        raise ConfigError("is too small for one slot", field="ssd_slab_bytes", value=config.ssd_slab_bytes)
    if config.ssd_index_max < INDEX_BYTES_MIN:
        raise ConfigError(
            f"must be at least {INDEX_BYTES_MIN}", field="ssd_index_bytes", value=config.ssd_index_bytes
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.ssd_slabs_max + FILES_SPARE
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ConfigError(
            f"gives {config.ssd_slabs_max} slab files, but only {hard} files may be open",
            field="ssd_slab_bytes",
            value=config.ssd_slab_bytes,
            remedy="raise it, or the limit of open files (LimitNOFILE)",
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
