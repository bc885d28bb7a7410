"""Fail the n-th call, for all n: a life of saves, loads, demotions, promotions, deletions and a restart, in which one
call of the disk or of LMDB goes wrong, each in its turn.

The core, the SSD tier and the index are the real ones, on real files; memory and clock are simple ones of our own.
After each run the directory is opened anew, on a disk that works: what was acknowledged as durable is there bit-exact,
or was said to be dropped before; nothing that was dropped is back, nothing is there that was never sent; and nothing
leaked.

ATTNSTORE_FAIL_NTH=all tries every n for every kind of failure (minutes); otherwise some kinds take every few n only.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import queue
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.config import StoreConfig
from kvstore.core import events as ev
from kvstore.core.chunks import DURABLE
from kvstore.core.store import Store
from kvstore.errors import StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.integrity import check_integrity
from kvstore.tiers import ssd
from kvstore.tiers.disk_port import Buffer, IndexCall, RealDisk
from kvstore.tiers.ssd import SsdTier
from kvstore.types import (
    ChunkKey,
    DiskState,
    Extent,
    Outcome,
    Reason,
    SegmentId,
    SlotState,
    StagedPiece,
    Wait,
    WorkerId,
)

EVERYTHING = os.environ.get("ATTNSTORE_FAIL_NTH") == "all"
WAIT_S = 20.0
"""In which every call of a disk that does not hang has returned."""
PATIENCE_MS = 60_000
"""Of the rig's own clock: by then every request is answered, and a disk that works again is in use again."""
WORKER = WorkerId(1)
SPECS = (
    NamespaceSpec("two", b"w", "l", 16, (GroupSpec("a", 5_000), GroupSpec("b", 3_000))),
    NamespaceSpec("one", b"w", "l", 16, (GroupSpec("a", 20_000),)),
    NamespaceSpec("big", b"w", "l", 16, (GroupSpec("a", 50_000),)),
)
SESSION = b"conversation"
AGAIN = (Reason.SLOW, Reason.ON_SSD, Reason.BEING_SAVED)


class Died(Exception):
    """The process is gone."""


class NthDisk(RealDisk):
    """A disk of which call number `n` goes wrong (0: none). What was not synced can be taken back: a power cut."""

    def __init__(self, kind: str = "", n: int = 0) -> None:
        self.kind = kind
        self.n = n
        self.calls = 0
        self.struck = ""
        """The call that went wrong."""
        self.dead = False
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._undo: list[tuple[str, int, bytes]] = []
        """What lay there before each write that is not synced."""
        self._created: set[str] = set()
        """Files whose names may be lost, because their directory is not synced."""

    def heal(self) -> None:
        self.kind = ""

    def _call(self, name: str) -> bool:
        """Whether this call is to be made short."""
        with self._lock:
            if self.dead:
                raise OSError(errno.EIO, "after the end")
            self.calls += 1
            if not self.kind or self.calls < self.n or (self.calls > self.n and self.kind != "EIO for ever"):
                return False
            self.struck = self.struck or name
            if self.kind.startswith("crash"):
                self.dead = True
                raise OSError(errno.EIO, "the end")
            if self.kind == "short":
                return True
            number = errno.ENOSPC if self.kind == "ENOSPC" else errno.EIO
            raise OSError(number, f"{name}, call {self.calls}, is to fail")

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        self._call("open")
        fd = super().open(path, create=create, direct=direct)
        self._paths[fd] = path
        if create:
            self._created.add(path)
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)  # it is closed in any case, as close(2) does
        if not self.dead:
            self._call("close")

    def allocate(self, fd: int, size: int) -> None:
        self._call("allocate")
        super().allocate(fd, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._call(f"read of {os.path.basename(self._paths[fd])}"):
            buffers = _half(buffers)
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        short = self._call("write")
        if short:
            buffers = _half(buffers)
        before = os.pread(fd, sum(map(len, buffers)), offset)
        with self._lock:
            self._undo.append((self._paths[fd], offset, before))
        return super().write(fd, buffers, offset)

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        self._call("writeback")
        super().start_writeback(fd, offset, size)

    def sync(self, fd: int) -> None:
        path = self._paths[fd]
        try:
            self._call("sync")
        except OSError:
            if not self.dead:  # what a failed sync did not write is marked clean, and lost
                self._take_back(path)
            raise
        finally:
            if not self.dead:
                with self._lock:
                    self._undo = [entry for entry in self._undo if entry[0] != path]

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory")
        self._created = {name for name in self._created if os.path.dirname(name) != path}

    def unlink(self, path: str) -> None:
        self._call("unlink")
        super().unlink(path)

    def names(self, path: str) -> list[str]:
        self._call("names")
        return super().names(path)

    def size(self, fd: int) -> int:
        self._call(f"size of {os.path.basename(self._paths[fd])}")
        return super().size(fd)

    def free_bytes(self, path: str) -> int:
        self._call("free_bytes")
        return super().free_bytes(path)

    def index(self, call: IndexCall) -> None:
        try:
            self._call(f"index {call}")
        except OSError as problem:  # as LMDB would say it
            full = problem.errno == errno.ENOSPC
            raise (lmdb.DiskError if full else lmdb.Error)(f"mdb_{call}: {problem.strerror}") from None

    def cut_power(self) -> None:
        """Take back what was not synced: all of it, the second half of each write, or (only the process died) none."""
        if self.kind == "crash":
            return
        for path in {path for path, _, _ in self._undo if os.path.exists(path)}:
            self._take_back(path)
        for path in self._created:
            if os.path.exists(path) and path.endswith(".kvs"):
                os.unlink(path)

    def _take_back(self, path: str) -> None:
        with open(path, "r+b") as file:
            for written, offset, before in reversed(self._undo):
                if written == path:
                    start = len(before) // 1024 * 512 if self.kind == "crash, torn" else 0
                    file.seek(offset + start)
                    file.write(before[start:])


def _half(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The first half of them, at least a byte."""
    left = max(1, sum(map(len, buffers)) // 2)
    found = []
    for buffer in buffers:
        found.append(memoryview(buffer)[:left])
        left -= len(found[-1])
    return [view for view in found if len(view)]


def content(key: ChunkKey, shard: int, size: int) -> bytes:
    return np.random.default_rng([*key, shard]).bytes(size)


def key(space: int, number: int) -> ChunkKey:
    return ChunkKey(b"%d/%d" % (space, number))


@dataclass
class Oracle:
    """What the caller was told, through all restarts."""

    sent: set[ChunkKey] = field(default_factory=set)
    durable: set[ChunkKey] = field(default_factory=set)
    """Acknowledged as such, and not said to be dropped since."""
    forgotten: set[ChunkKey] = field(default_factory=set)
    """Their deletion was durable."""
    session_sent: int = 0
    session_durable: int = 0
    """Entries."""


class Rig:
    """The daemon without its edges: core and SSD tier, driven step by step."""

    def __init__(self, folder: Path, disk: RealDisk, oracle: Oracle) -> None:
        self.oracle = oracle
        self.now = 0
        self.config = StoreConfig(
            run_dir=str(folder),
            dram_bytes=128 << 10,
            segment_bytes=64 << 10,
            reserve_share_max=1.0,
            pin_share_max=1.0,
            ssd_dir=str(folder / "ssd"),
            ssd_bytes=(2 << 20) + 3 * (64 << 10),
            ssd_slab_bytes=64 << 10,
            ssd_index_bytes=1 << 20,
            ssd_threads=1,
            durable_within_ms=400,
        )
        self.disk = disk
        self.memory: dict[SegmentId, npt.NDArray[np.uint8]] = {}
        self.answers: dict[int, Any] = {}
        self._inbox: deque[ev.Event] = deque()
        self._returned: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outstanding = 0
        self._staged: dict[int, bytes] = {}
        self._requests = itertools.count(1)
        self.store = Store(self.config.limits)
        self.tier = SsdTier(self.config, self, disk, done=self._returned.put)
        try:
            self.store.restore(self.tier.open(), self.now)
            self.perform(self.store.start())
            self.step(ev.WorkerJoined(WORKER, "alice", ""))
            self.spaces = [self.ask(ev.Open, spec).namespace for spec in SPECS]
        except BaseException:
            self.tier.close(WAIT_S)
            raise

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        return self.memory[segment][offset : offset + length]

    def view_of(self, extent: Extent) -> npt.NDArray[np.uint8]:
        return self.view(extent.segment, extent.offset, extent.length)

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self, event: ev.Event) -> None:
        """An event and all that follows from it, until the last call of the disk has returned."""
        self._inbox.append(event)
        while True:
            while self._inbox:
                self.perform(self.store.apply(self._inbox.popleft(), self.now))
            if isinstance(self.disk, NthDisk) and self.disk.dead:
                raise Died
            if not self._outstanding:
                return
            self._inbox.append(self._returned.get(timeout=WAIT_S))
            self._outstanding -= 1

    def perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Reply():
                    self.answers[effect.ticket.request_id] = effect.answer
                case ev.CreateSegment():
                    self.memory[effect.segment] = np.full(effect.bytes, 0xEE, np.uint8)
                    self._inbox.append(ev.SegmentReady(effect.op))
                case ev.DestroySegment():
                    del self.memory[effect.segment]
                case ev.CopyIn():
                    sums = []
                    for piece, target in zip(effect.pieces, effect.targets, strict=True):
                        self.view_of(target)[:] = np.frombuffer(self._staged.pop(piece.offset), np.uint8)
                        sums.append(xxhash.xxh3_64_intdigest(self.view_of(target)))
                    self._inbox.append(ev.OpDone(effect.op, tuple(sums)))
                case ev.MoveSlots():
                    sums = []
                    for source, target in zip(effect.sources, effect.targets, strict=True):
                        self.view_of(target)[:] = self.view_of(source)
                        sums.append(xxhash.xxh3_64_intdigest(self.view_of(target)))
                    self._inbox.append(ev.OpDone(effect.op, tuple(sums)))
                case ev.RewriteSlots():
                    self._inbox.append(ev.OpDone(effect.op, (1,) * len(effect.targets)))
                case (
                    ev.CreateSlab()
                    | ev.WriteRecords()
                    | ev.ReadRecords()
                    | ev.WriteIndex()
                    | ev.ProbeDisk()
                    | ev.ScrubRecords()
                    | ev.RewriteRecords()
                ):
                    self._outstanding += 1
                    self.tier.submit(effect)
                case ev.Checksum() | ev.FillSlots() | ev.DropStaging() | ev.ForgetWorker():
                    raise AssertionError(effect)

    def tick(self) -> None:
        self.now += 100
        self.step(ev.Tick())

    def ask(self, kind: type, *args: Any, **named: Any) -> Any:
        """The answer, or the StoreError that is the answer."""
        number = next(self._requests)
        self.step(kind(ev.Ticket(WORKER, number), *args, **named))
        until = self.now + PATIENCE_MS
        while number not in self.answers:
            assert self.now < until, f"{kind.__name__} is never answered"
            self.tick()
        return self.answers.pop(number)

    def settle(self) -> None:
        """Until all that can be stored is stored, on a disk that may be failing."""
        until = self.now + PATIENCE_MS
        while self.store.transfers.behind and self.now < until:
            self.tick()

    def heal(self) -> None:
        """The disk works again, and the tier finds out."""
        until = self.now + PATIENCE_MS
        while self.store.state.disk_state is not DiskState.OK or self.store.transfers.behind:
            assert self.now < until, f"it does not heal: {self.store.transfers} {self.store.state.disk_why}"
            self.tick()

    def close(self) -> None:
        """In good order; nothing is left of it."""
        for pool in (self.store.state.pool, self.store.state.ssd_slots):
            left = [segment for segment in pool.segments if segment.counts[SlotState.RESERVED]]
            assert not left, f"slots that nobody will ever fill: {left}"
        self.tier.close(WAIT_S)

    # ------------------------------------------------------------------------------------------------------ requests

    def save(self, space: int, *numbers: int, wait: Wait = Wait.VISIBLE) -> None:
        for number in numbers:
            name = key(space, number)
            reserved = self.ask(ev.Reserve, self.spaces[space], (name,))
            for _ in range(100):  # a segment changes hands, or SSD copies are on their way
                if isinstance(reserved, StoreError) or reserved.reservation or self.had(space, number):
                    break
                self.tick()
                reserved = self.ask(ev.Reserve, self.spaces[space], (name,))
            if isinstance(reserved, StoreError) or not reserved.reservation:
                continue
            pieces = []
            for shard, size in enumerate(SPECS[space].shard_bytes):
                at = next(self._requests)
                self._staged[at] = content(name, shard, size)
                pieces.append(StagedPiece(at, size))
            self.oracle.sent.add(name)
            answer = self.ask(ev.Commit, reserved.reservation, tuple(pieces), wait=wait)
            if wait is Wait.DURABLE and not isinstance(answer, StoreError):
                self.oracle.durable.add(name)

    def had(self, space: int, number: int) -> bool:
        """Load it if it can be had, from wherever it is, and compare every byte."""
        name = key(space, number)
        until = self.now + PATIENCE_MS
        while True:
            got = self.ask(ev.Acquire, self.spaces[space], (name,), wait_ms=5_000)
            assert not isinstance(got, StoreError), got
            for shard, extent in enumerate(got.extents):
                expected = content(name, shard, SPECS[space].shard_bytes[shard])
                assert self.view_of(extent).tobytes() == expected, (
                    f"wrong bytes under {name!r}, shard {shard}"
                )
            if got.lease:
                self.ask(ev.Release, (got.lease,))
            if got.outcomes[0] is Outcome.HIT:
                return True
            assert got.reasons[0] is not Reason.CORRUPT, f"{name!r} was not written as it was said to be"
            if got.outcomes[0] is Outcome.MISS and got.reasons[0] not in AGAIN:
                self.oracle.durable.discard(name)  # it said so
                return False
            if self.now >= until:
                return False  # a disk that fails for ever
            self.tick()

    def name(self, space: int, *numbers: int) -> None:
        """Session = these chunks."""
        entries = tuple(ev.SessionEntry(key(space, n), 16 * at, 16) for at, n in enumerate(numbers))
        self.oracle.session_sent = len(entries)
        self.ask(ev.UpdateSession, self.spaces[space], SESSION, 0, 0, entries)

    def forget(self, space: int, number: int) -> None:
        self.oracle.durable.discard(key(space, number))
        self.ask(ev.Forget, self.spaces[space], b"", (key(space, number),))
        self.settle()
        if self.in_order:
            self.oracle.forgotten.add(key(space, number))

    def note_evicted(self) -> None:
        """Chunks that had to leave a full SSD before the end: nobody has asked yet, and so nobody was told."""
        state = self.store.state
        for name in list(self.oracle.durable):
            namespace = state.namespaces[self.spaces[int(name[:1])]]
            row = namespace.index.get(name)
            if row is None or not state.chunks.flags[row] & DURABLE:
                self.oracle.durable.discard(name)

    @property
    def in_order(self) -> bool:
        """All that was asked for is on the disk."""
        return self.store.state.disk_state is DiskState.OK and not self.store.transfers.behind


def first_half(rig: Rig) -> None:
    rig.save(0, 0, 1, wait=Wait.DURABLE)
    rig.name(0, 0, 1)
    rig.save(0, 2)
    rig.settle()
    rig.oracle.session_durable = 2 if rig.in_order else 0
    rig.save(0, *range(3, 11))  # pushes the first ones out of DRAM
    rig.settle()
    rig.had(0, 0)
    rig.forget(0, 1 + 1)
    rig.save(1, 0, wait=Wait.DURABLE)  # another class of slots, in DRAM and on SSD


def second_half(rig: Rig) -> None:
    rig.had(0, 1)
    rig.save(2, 0)  # a class for which there is no slab file left: another one's goes
    rig.settle()
    rig.tick()
    for number in (0, 1):
        rig.had(0, number)
    rig.had(1, 0)
    rig.save(2, 1, wait=Wait.DURABLE)
    rig.settle()


def run(folder: Path, disk: NthDisk, oracle: Oracle) -> None:
    """The whole life. Raises Died if the disk says so."""
    for half in (first_half, second_half):
        rig = None
        try:
            rig = Rig(folder, disk, oracle)
        except StoreError:  # it cannot be opened, and says why
            if disk.dead:
                raise Died from None
            if disk.kind == "EIO for ever":
                return
            rig = Rig(folder, disk, oracle)
        try:
            half(rig)
            if half is second_half or disk.kind == "EIO for ever":
                disk.heal()
                rig.heal()
            if disk.kind != "EIO for ever" and not disk.struck:
                rig.heal()
        except Died:
            rig.tier.close(WAIT_S)
            raise
        finally:
            rig.note_evicted()
        check_integrity(rig.store)
        if disk.kind == "short" or not disk.struck:
            stats = rig.tier.stats()
            assert (stats.records_corrupt, stats.io_errors) == (0, 0), "nothing was wrong"
        rig.close()
        if disk.dead:
            raise Died


def judge(folder: Path, oracle: Oracle, *, dropped: bool) -> None:
    """On a disk that works. `dropped`: a slab file could not be read at a start, and was given up for that."""
    rig = Rig(folder, RealDisk(), oracle)
    durable = set(oracle.durable)
    for space, numbers in ((0, range(12)), (1, range(2)), (2, range(3))):
        for number in numbers:
            name = key(space, number)
            there = rig.had(space, number)
            assert name in oracle.sent or not there, f"{name!r} was never sent"
            assert not (there and name in oracle.forgotten), f"{name!r} came back"
            assert there or name not in durable or dropped, f"{name!r} was durable, and is lost"
    info = rig.ask(ev.GetSession, rig.spaces[0], SESSION)
    names = [entry.key for entry in info.entries]
    assert names in ([], [key(0, 0), key(0, 1)])
    assert oracle.session_durable <= len(names) <= oracle.session_sent
    rig.save(0, 11, wait=Wait.DURABLE)
    assert key(0, 11) in oracle.durable, "and it works"
    assert rig.store.state.disk_state is DiskState.OK
    rig.close()


def descriptors(folder: Path) -> set[str]:
    """Open files in the folder."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if path.startswith(str(folder)):
            found.add(path)
    return found


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory if there is any: the calls are what counts, and there are many."""
    monkeypatch.setattr(ssd, "WRITEBACK_BYTES_MIN", 1)  # also for shards as small as these
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="kvs-nth-", dir=where))
    yield path
    shutil.rmtree(path)


def one_run(folder: Path, kind: str, n: int) -> NthDisk:
    disk, oracle = NthDisk(kind, n), Oracle()
    shutil.rmtree(folder / "ssd", ignore_errors=True)
    threads = set(threading.enumerate())
    crash = kind.startswith("crash")
    try:
        run(folder, disk, oracle)
        assert not (crash and disk.struck), "it went on after its end"
    except Died:
        assert crash
        disk.cut_power()
    if descriptors(folder):
        gc.collect()  # who failed is still named by its exception
    assert not descriptors(folder), f"left open after {kind} at call {n} ({disk.struck})"
    assert set(threading.enumerate()) <= threads
    dropped = disk.struck.startswith(("open", "read of slab", "size of slab")) and not crash
    judge(folder, oracle, dropped=dropped)
    if not disk.struck or kind == "short":
        assert oracle.durable >= {key(2, 1), key(0, 11)}
        assert (oracle.forgotten, oracle.session_durable) == ({key(0, 2)}, 2)
    return disk


@pytest.mark.timeout(3600 if EVERYTHING else 600)  # of a machine that does much else
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("EIO", 1),
        ("crash", 3),
        ("crash, unsynced lost", 1),
        ("crash, torn", 3),
        ("ENOSPC", 3),
        ("EIO for ever", 4),
        ("short", 2),
    ],
)
def test_whatever_call_fails(folder: Path, kind: str, step: int) -> None:
    step = 1 if EVERYTHING else step
    for n in itertools.count(1 + random.randrange(step), step):
        try:
            disk = one_run(folder, kind, n)
        except BaseException as problem:
            problem.add_note(f"{kind} at call {n}")
            raise
        if not disk.struck:
            assert n > 100, "so few calls?"
            return
