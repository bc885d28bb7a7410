"""The SSD tier: performs the core's disk effects on threads of its own, and answers each exactly once.

                    I/O threads (ssd_threads)                          index thread (one)
    WriteRecords    DRAM slot -> header + payload -> slab file
    ReadRecords     slab file -> header + DRAM slot -> verify
    CreateSlab      preallocate, header, sync                       -> its row in the index
    WriteIndex                                                         sync the slabs, then one transaction
    ProbeDisk       write, sync, read back                          -> a transaction
                                                                       scrub thread (one)
    ScrubRecords                                                       slab file -> verify
    RewriteRecords                                                     patterns, sync, read back

An op is answered when its last call *has returned*: until then its slots and places belong to it, however late it is.
Deadlines and how many ops are in flight are the core's business, so that a hung disk costs threads here and no more.

Who is exclusive: `<ssd_dir>/lock` is held with flock from `open` until the last thread that may touch the directory has
ended, also beyond `close`; the kernel drops it when the process dies, however it dies.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import SSD_OVERHEAD_BYTES, StoreConfig
from kvstore.core.events import (
    CreateSlab,
    DiskDone,
    DiskTrouble,
    IndexUsage,
    ProbeDisk,
    ReadRecords,
    RewriteRecords,
    ScrubRecords,
    SlabReady,
    WriteIndex,
    WriteRecords,
)
from kvstore.core.ssd.restart import ChunkBatch, Snapshot
from kvstore.errors import ConfigError, Unavailable
from kvstore.tiers import format
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.directory import DirectoryLock
from kvstore.tiers.disk_port import Buffer, Disk, describe, disk_result, read_all, write_all
from kvstore.tiers.disk_watch import DiskWatch, Problem
from kvstore.tiers.encryption import NOT_WHOLE, OTHER_KEY, DiskCipher
from kvstore.tiers.format import PAGE_BYTES, Defect
from kvstore.tiers.index import Index, IndexRows
from kvstore.tiers.io_pool import CLOSING, OK, IoPool, Result, Row, Scratch, failed, is_aligned
from kvstore.tiers.slab_files import SlabFile, SlabFiles
from kvstore.tiers.verify import Verifier
from kvstore.types import DiskPlace, DiskResult, Record, SlabId

log = logging.getLogger(__name__)

INDEX_DIR = "index"
NEW_INDEX_DIR = "index.new"
"""Of a `kvctl check --fix`; one that did not end leaves it."""
PROBE_FILE = "probe"
INDEX_BYTES_MIN = 1 << 20
OPS_MAX = 65_536
"""Parts of ops that may wait for a thread. The core keeps far fewer in flight; one more fails at once."""
WRITEBACK_BYTES_MIN = 256 << 10
"""Of so much the kernel is told at once to begin: a sync that finds all of it dirty would leave the disk idle before,
and let everybody wait after. Smaller ones it had better gather."""
SCRUB_HASTE = 2
"""A record is scrubbed at so many times the rate of the round, so that the round keeps to its rate between them."""
PAUSE_MAX_S = 1.0
"""Between two pieces of one record, however low the rate is: slots that are to be rewritten wait for this thread, and
so would a round that is made faster. What was too fast is made up for before the next record."""
FILES_SPARE = 4_096
"""Descriptors that the rest of the daemon may need beside one per slab file."""

DiskEffect = CreateSlab | WriteRecords | ReadRecords | WriteIndex | ProbeDisk | ScrubRecords | RewriteRecords
Done = Callable[[SlabReady | DiskDone | DiskTrouble], None]


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
    index: IndexUsage
    """What it holds, and beyond how much nothing is written."""
    index_bytes: int
    """Length that its file may have."""
    slab_files: int
    slab_bytes: int
    free_bytes: int = 0
    """Of the file system, as measured last."""
    problems: tuple[Problem, ...] = ()
    """Standing ones, severe ones first."""


class SsdTier:
    def __init__(self, config: StoreConfig, memory: SlotMemory, disk: Disk, *, done: Done) -> None:
        """`done` is called from tier threads; or, for what is refused at once, from `submit` or `close`."""
        self._config = config
        self._directory = config.ssd_dir
        self._direct = config.ssd_direct_io
        self._memory = memory
        self._disk = disk
        self._done = done
        self._counted = _Counters()
        self._counting = threading.Lock()
        self._closing = False
        self._pool = IoPool(self._answer)
        self._slabs = SlabFiles(config.ssd_dir, disk, direct=config.ssd_direct_io)
        self._lock: DirectoryLock | None = None
        self._index: Index | None = None
        self._first_generation = 0
        """Of what this boot writes."""
        self.cipher: DiskCipher | None = None
        """Of a directory that is to be encrypted, once it is open."""
        self._verifier: Verifier | None = None
        """Of the scrub thread, as is the next."""
        self._scrub_bytes_per_s = 0
        self._ending = threading.Event()
        self.slabs_max = 0
        """How many slab files the cap leaves room for, once it is open: fewer than the settings say if the index is
        larger than they do, because what it once had it keeps."""
        self._watch = DiskWatch(
            config, self._slabs, disk, os.path.join(config.ssd_dir, INDEX_DIR), trouble=self._troubled
        )

    # ------------------------------------------------------------------------------------------------- start and end

    def open(self) -> Snapshot:
        """Locks the directory and reads the index: its chunks as they are consumed, which is to end before the first
        submit. Raises ConfigError (in use, a newer format, settings that cannot
        work, a damaged index), Exhausted (the disk is full) or Unavailable (it fails); nothing is held then."""
        _check(self._config)
        if self._config.ssd_key_file:
            self.cipher = DiskCipher.read(self._config.ssd_key_file)
        self._lock = DirectoryLock(self._directory)
        try:
            index = self._index = Index(
                os.path.join(self._directory, INDEX_DIR),
                bytes_max=self._config.ssd_index_max,
                direct=self._direct,
                slab_bytes=self._config.ssd_slab_bytes,
                cipher=self.cipher,
                disk=self._disk,
            )
            self._first_generation = index.boot_count << 32
            self._verifier = Verifier(
                self._disk,
                direct=self._direct,
                first_generation=self._first_generation,
                cipher=self.cipher,
                pause=self._pause,
            )
            slabs_bytes_max = self._config.ssd_bytes - SSD_OVERHEAD_BYTES - index.bytes_max
            if slabs_bytes_max < self._config.ssd_slab_bytes:
                raise ConfigError(
                    f"leaves no room for one slab file beside the index, which has {index.bytes_max} bytes already",
                    field="ssd_bytes",
                    value=self._config.ssd_bytes,
                    remedy="raise it, or name another ssd_dir",
                )
            named = index.slabs()
            slabs = self._slabs.open(named, slabs_bytes_max)
            if len(slabs) < len(named):
                index.remove_slabs({row.slab for row in named} - {row.slab for row in slabs})
            self._slabs.remove_others()
            shutil.rmtree(os.path.join(self._directory, NEW_INDEX_DIR), ignore_errors=True)
            namespaces = index.namespaces()
            specs = {namespace.number: namespace.spec for namespace in namespaces}
            self.slabs_max = slabs_bytes_max // self._config.ssd_slab_bytes
            snapshot = Snapshot(
                slabs=slabs,
                next_slab=SlabId(index.next_slab),
                boot_count=index.boot_count,
                namespaces=namespaces,
                sessions=index.sessions(specs),
                makers=index.makers(),
                bars=index.bars(),
                heeded=index.heeded(),
                usage=index.usage,
                chunks=map(_batch, index.chunks(specs, slabs, direct=self._direct)),
            )
        except BaseException as problem:
            self._release_directory()
            if isinstance(problem, OSError):
                raise Unavailable(
                    f"{self._directory}: {describe(problem)}", remedy="check the disk"
                ) from None
            raise
        self._pool.start(self._config.ssd_threads, index.close)
        try:
            self._watch.look()
        except OSError as problem:
            log.warning("%s cannot be looked at: %s", self._directory, describe(problem))
        return snapshot

    def watch(self) -> None:
        """From now on look at what others do to the directory, and say it by `done` as DiskTrouble."""
        self._watch.start()

    def _troubled(self, why: str) -> None:
        self._deliver(DiskTrouble(why))

    def submit(self, effect: DiskEffect) -> None:
        """Never blocks, never raises because of I/O."""
        if self._closing:
            self._refuse(effect, CLOSING)
            return
        if self._pool.waiting >= OPS_MAX:
            self._refuse(effect, f"{OPS_MAX} disk ops are waiting already")
            return
        match effect:
            case WriteRecords():
                rows = list(zip(effect.records, effect.sources, effect.targets, strict=True))
                self._pool.share(effect.op, rows, self._write_run)
            case ReadRecords():
                rows = list(zip(effect.records, effect.targets, effect.sources, strict=True))
                self._pool.share(effect.op, rows, self._read_run)
            case WriteIndex():
                self._pool.index(effect.op, lambda _: self._write_index(effect))
            case CreateSlab():
                self._pool.io(effect.op, lambda scratch: self._create_slab(effect, scratch))
            case ProbeDisk():
                self._pool.io(effect.op, lambda scratch: self._probe(effect, scratch))
            case ScrubRecords():
                self._pool.scrub(effect.op, lambda _: self._scrub(effect))
            case RewriteRecords():
                self._pool.scrub(effect.op, lambda _: self._rewrite(effect))

    def close(self, timeout_s: float) -> None:
        """What was submitted has `timeout_s` to end; then what has not started fails. A thread that hangs is left
        behind, and the lock with it, so that nobody opens a directory into which that thread may still write."""
        self._closing = True
        self._ending.set()
        self._watch.close()
        if hung := self._pool.close(timeout_s):
            log.error("%s still in a call to the disk: left behind, with the lock", ", ".join(hung))
        else:
            self._release_directory()

    def _release_directory(self) -> None:
        self._slabs.close()
        if self._index is not None and not self._pool.started:
            self._index.close()  # else its thread has
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def stats(self) -> SsdStats:
        with self._counting:
            counted = self._counted
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
                index=self._index.usage if self._index else IndexUsage(0),
                index_bytes=self._index.bytes_max if self._index else 0,
                slab_files=len(self._slabs),
                slab_bytes=self._slabs.bytes,
                free_bytes=self._watch.free_bytes,
                problems=self._watch.problems,
            )

    # --------------------------------------------------------------------------------------------------- the threads

    def _answer(self, answer: SlabReady | DiskDone) -> None:
        if isinstance(answer, DiskDone):
            with self._counting:
                for result in answer.results:
                    self._counted.results[result] += 1
        self._deliver(answer)

    def _deliver(self, answer: SlabReady | DiskDone | DiskTrouble) -> None:
        try:
            self._done(answer)
        except Exception:
            log.exception("the answer %r could not be delivered", answer)

    def _refuse(self, effect: DiskEffect, why: str) -> None:
        count = len(effect.records) if isinstance(effect, (WriteRecords, ReadRecords, ScrubRecords)) else 1
        self._answer(DiskDone(effect.op, (DiskResult.IO_ERROR,) * count, why))

    # ------------------------------------------------------------------------------------------------------- records

    def _write_run(self, rows: Sequence[Row], scratch: Scratch) -> list[Result]:
        """Neighbours in one call, each [header][payload as it lies in DRAM][zeros to the end of its page]. The checksum
        is the one from the commit, not a new one: should the bytes have changed since, the reader finds out."""
        slab, offset = self._run_at(rows)
        payloads = self._payloads(rows)
        if not self._together(slab, payloads):
            return [result for row in rows for result in self._write_run([row], scratch)]
        buffers: list[Buffer] = []
        sealings = [b""] * len(rows)
        if self.cipher is not None:
            payloads, sealings = self._sealed(self.cipher, rows, payloads, scratch)
        for number, (payload, (record, _, place)) in enumerate(zip(payloads, rows, strict=True)):
            header = format.encode_record_header(
                record, place.generation, direct=self._direct, sealing=sealings[number]
            )
            if self._direct:
                buffers += scratch.direct_write(number, header, payload)
            else:
                room = slab.room(record.length, direct=False)
                buffers += (header, payload.data, scratch.zeros[: room % PAGE_BYTES])
        places = [place for _, _, place in rows]
        self._slabs.begin_write(slab, places)
        write_all(self._disk, slab.fd, buffers, offset)
        self._slabs.end_write(slab, places)
        size = sum(map(len, buffers))
        if not self._direct and size >= WRITEBACK_BYTES_MIN:
            self._disk.start_writeback(slab.fd, offset, size)
        with self._counting:
            self._counted.records_written += len(rows)
            self._counted.bytes_written += sum(map(len, payloads))
        return [OK] * len(rows)

    def _read_run(self, rows: Sequence[Row], scratch: Scratch) -> list[Result]:
        """Neighbours in one call, straight into their slots of DRAM; then each is verified."""
        slab, offset = self._run_at(rows)
        payloads = self._payloads(rows)
        if not self._together(slab, payloads):
            return [result for row in rows for result in self._read_run([row], scratch)]
        buffers: list[Buffer] = []
        for number, payload in enumerate(payloads):
            if self._direct:
                buffers += scratch.direct_read(number, payload)
            else:
                room = slab.room(len(payload), direct=False)
                rest = scratch.rest(number, room if number < len(rows) - 1 else 0)
                buffers += (scratch.header(number), payload.data, rest)
        count = read_all(self._disk, slab.fd, buffers, offset)
        results = []
        for number, (payload, (record, _, place)) in enumerate(zip(payloads, rows, strict=True)):
            left = count - number * slab.slot_bytes
            if left < format.record_header_bytes(direct=self._direct) + record.length:
                results.append(_corrupt(place, "the file ends in it"))
                continue
            if self._direct:
                scratch.finish_direct_read(number, payload)
            results.append(self._verify(record, place, scratch.header(number), payload))
        good = [
            record.length
            for record, result in zip((row[0] for row in rows), results, strict=True)
            if result is OK
        ]
        with self._counting:
            self._counted.records_read += len(good)
            self._counted.bytes_read += sum(good)
        return results

    def _sealed(
        self,
        cipher: DiskCipher,
        rows: Sequence[Row],
        payloads: Sequence[npt.NDArray[np.uint8]],
        scratch: Scratch,
    ) -> tuple[list[npt.NDArray[np.uint8]], list[bytes]]:
        """Ciphertexts, in memory of this thread, and their sealings."""
        sealed = scratch.sealed([len(payload) for payload in payloads])
        sealings = []
        for (record, _, place), payload, into in zip(rows, payloads, sealed, strict=True):
            about = format.record_about(record, place.generation, direct=self._direct)
            sealings.append(cipher.seal(payload, about, into))
        return sealed, sealings

    def _run_at(self, rows: Sequence[Row]) -> tuple[SlabFile, int]:
        """Where a run of neighbours begins."""
        first, last = rows[0][2], rows[-1][2]
        slab = self._slabs.at(first)
        if last is not first:
            self._slabs.at(last)
        return slab, format.slot_offset(slab.slot_bytes, first.slot)

    def _payloads(self, rows: Sequence[Row]) -> list[npt.NDArray[np.uint8]]:
        return [self._memory.view(extent.segment, extent.offset, record.length) for record, extent, _ in rows]

    def _together(self, slab: SlabFile, payloads: Sequence[npt.NDArray[np.uint8]]) -> bool:
        """Whether one call can move them: no whole page lies between two of them, and none takes a detour."""
        if len(payloads) == 1:
            slab.room(len(payloads[0]), direct=self._direct)
            return True
        rooms = [slab.room(len(payload), direct=self._direct) for payload in payloads]
        return max(rooms) < PAGE_BYTES and not (self._direct and not all(map(is_aligned, payloads)))

    def _verify(
        self, record: Record, place: DiskPlace, head: memoryview, payload: npt.NDArray[np.uint8]
    ) -> Result:
        header = format.decode_record_header(head)
        if isinstance(header, Defect):
            return _corrupt(place, header.value)
        if place.generation < header.generation < self._first_generation:
            return Result(DiskResult.REUSED, _where(place, "was reused before the restart"))
        if wrong := format.difference(header, record, place.generation, direct=self._direct):
            return _corrupt(place, wrong)
        if header.sealing:
            about = bytes(head[: format.RECORD_ABOUT_BYTES])
            opening = None if self.cipher is None else self.cipher.opening(header.sealing, about)
            if opening is None:
                self._say_other_key(place)
                return Result(DiskResult.REUSED, _where(place, OTHER_KEY))
            opening.decrypt(payload.data)
            if not opening.is_whole():
                return _corrupt(place, NOT_WHOLE)
        state = xxhash.xxh3_64()  # its update() lets go of the interpreter's lock
        state.update(payload.data)
        if state.intdigest() != record.checksum:
            return _corrupt(place, "its bytes do not match their checksum")
        return OK

    def _say_other_key(self, place: DiskPlace) -> None:
        """Only its record says with which key a chunk is encrypted, so that no start can count them. The log holds
        repeats back, and says how many."""
        log.warning(
            "%s: its chunk is dropped as evicted: it is encrypted with a key that ssd_key_file has not (any more); a "
            "file with both keys keeps such chunks",
            _name(place),
        )

    def _scrub(self, effect: ScrubRecords) -> None:
        """Nothing else is counted or logged: a slot that was freed meanwhile may hold another record, and only the core
        knows."""
        assert self._verifier is not None, "submit before open"
        self._scrub_bytes_per_s = effect.bytes_per_s
        results = []
        for record, place in zip(effect.records, effect.sources, strict=True):
            try:
                slab = self._slabs.at(place)
                slab.room(record.length, direct=self._direct)
                offset = format.slot_offset(slab.slot_bytes, place.slot)
                results.append(self._verifier.check(slab.fd, offset, record, place.generation))
                if results[-1].why == OTHER_KEY:
                    self._say_other_key(place)
            except Exception as problem:
                results.append(failed(problem))
        whys = tuple(result.why for result in results)
        self._deliver(DiskDone(effect.op, tuple(result.result for result in results), whys=whys))

    def _pause(self, size: int) -> None:
        """Between the windows of a long record: whoever reads meanwhile has most of the disk, and the end is soon."""
        rate = self._scrub_bytes_per_s * SCRUB_HASTE
        if self._ending.wait(min(size / rate, PAUSE_MAX_S) if rate else 0.0):
            raise OSError(errno.ECANCELED, CLOSING)

    def _rewrite(self, effect: RewriteRecords) -> DiskDone:
        assert self._verifier is not None, "submit before open"
        results = []
        for place in effect.targets:
            try:
                slab = self._slabs.at(place)
                offset = format.slot_offset(slab.slot_bytes, place.slot)
                path = self._slabs.path(place.slab)
                results.append(self._verifier.rewrite(path, offset, slab.slot_bytes))
            except Exception as problem:
                results.append(failed(problem))
        return DiskDone(effect.op, tuple(result.result for result in results))

    # --------------------------------------------------------------------------------------------------------- index

    def _write_index(self, effect: WriteIndex) -> DiskDone:
        index = self._opened_index
        index.usage = replace(index.usage, full=False)
        try:
            result, why, slabs = self._sync_and_write(effect)
        except Exception as problem:
            result, why, slabs = failed(problem)
        return DiskDone(effect.op, (result,), why, slabs=slabs, usage=index.usage)

    def _sync_and_write(self, effect: WriteIndex) -> Result:
        started = time.monotonic()
        failing: dict[SlabId, OSError] = {}
        for number, slab in self._slabs.to_sync(effect.slabs, effect.chunks).items():
            try:
                self._slabs.sync(slab)
            except OSError as problem:  # the others are synced all the same
                failing[number] = problem
        if failing:
            number, first = next(iter(failing.items()))
            lost = self._slabs.first_lost(effect.chunks)
            result = DiskResult.CORRUPT if lost else disk_result(first)
            why = f"a sync failed: {describe(first)} ({format.slab_name(number)})"
            return Result(result, why, tuple(failing))
        if lost := self._slabs.first_lost(effect.chunks):
            return Result(DiskResult.CORRUPT, f"slab {lost.slab}, slot {lost.slot}: a failed sync lost it")
        result, why = self._opened_index.write(effect)
        if result == DiskResult.NO_SPACE:
            self._watch.no_space("the index", why)
        if result == DiskResult.OK:
            self._watch.has_space("the index")
            for number in effect.slabs_deleted:
                self._slabs.delete(number)
            with self._counting:
                self._counted.index_commits += 1
                self._counted.index_commit_seconds += time.monotonic() - started
        return Result(result, why)

    @property
    def _opened_index(self) -> Index:
        assert self._index is not None, "submit before open"
        return self._index

    # --------------------------------------------------------------------------------------------------------- slabs

    def _create_slab(self, effect: CreateSlab, scratch: Scratch) -> Result | None:
        """The file, and then its row in the index; None: the index thread answers."""
        try:
            slab = self._slabs.make(effect, scratch)
        except OSError as problem:
            if disk_result(problem) is DiskResult.NO_SPACE:
                self._watch.no_space("another slab file", describe(problem))
            raise
        self._watch.has_space("another slab file")

        def add(_: Scratch) -> Result | SlabReady:
            result, why = self._opened_index.add_slab(effect.slab, effect.slot_bytes, effect.slots)
            if result != DiskResult.OK:
                self._slabs.remove(effect.slab, slab.bytes)
                return Result(result, why)
            self._slabs.add(effect.slab, slab)
            return SlabReady(effect.op)

        self._pool.go_on(effect.op, add)
        return None

    # --------------------------------------------------------------------------------------------------------- probe

    def _probe(self, effect: ProbeDisk, scratch: Scratch) -> Result | None:
        """The file stays, so that a full disk can be probed too."""
        if severe := self._watch.severe:
            return Result(DiskResult.IO_ERROR, severe)
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
        self._pool.go_on(effect.op, lambda _: Result(*self._opened_index.probe()))
        return None

    def __repr__(self) -> str:
        return f"SsdTier({self._directory}: {len(self._slabs)} slabs, {self._pool})"


@dataclass(slots=True)
class _Counters:
    bytes_read: int = 0
    bytes_written: int = 0
    records_read: int = 0
    records_written: int = 0
    index_commits: int = 0
    index_commit_seconds: float = 0.0
    results: dict[DiskResult, int] = field(default_factory=lambda: dict.fromkeys(DiskResult, 0))


def _corrupt(place: DiskPlace, why: str) -> Result:
    return Result(DiskResult.CORRUPT, _where(place, why))


def _where(place: DiskPlace, why: str) -> str:
    return f"{_name(place)}: {why}"


def _name(place: DiskPlace) -> str:
    return f"{format.slab_name(place.slab)}, slot {place.slot}"


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


def _batch(rows: IndexRows) -> ChunkBatch:
    """The index's arrays as the core's plain columns."""
    makers = sorted(set(rows.maker) - {b""})
    number = {maker: index for index, maker in enumerate(makers)} | {b"": -1}
    return ChunkBatch(
        namespace=rows.namespace,
        shards=rows.slab.shape[1],
        keys=rows.keys,
        token_count=_column("i", rows.token_count),
        flags=_column("i", rows.flags),
        maker=[number[maker] for maker in rows.maker],
        makers=makers,
        slab=_column("i", rows.slab),
        slot=_column("i", rows.slot),
        generation=_column("Q", rows.generation),
        checksum=_column("Q", rows.checksum),
    )


def _column(code: str, values: npt.NDArray[Any]) -> array[int]:
    column = array(code)
    column.frombytes(values.astype(f"={code}").tobytes())
    return column
