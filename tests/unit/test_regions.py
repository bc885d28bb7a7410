"""Regions: which descriptors are taken in, that they can only be read, and that each is closed again, by a thread."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.core.events import FillSlots, OpDone, OpFailed
from kvstore.errors import BadRequest, Exhausted, NotFound, Unavailable
from kvstore.tiers import copier as copier_module
from kvstore.tiers import regions as regions_module
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.copier import Copier, Task
from kvstore.tiers.regions import REGIONS_PER_WORKER_MAX, Regions
from kvstore.types import Extent, OpId, Protection, RegionId, SegmentId, StagedPiece, WorkerId

from ..waiting import eventually

SIZE = 1 << 20
ME, OTHER = WorkerId(1), WorkerId(2)
WAIT_S = 30.0


def open_fds() -> set[int]:
    return {int(fd) for fd in os.listdir("/proc/self/fd") if is_open(int(fd))}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def regions() -> Iterator[Regions]:
    regions = Regions()
    yield regions
    regions.close(WAIT_S)


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture
def memfd(data: bytes) -> Iterator[int]:
    """Ours; what is lent is a copy of it."""
    fd = os.memfd_create("test")
    os.pwrite(fd, data, 0)
    yield fd
    os.close(fd)


@pytest.fixture
def shm_file() -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir="/dev/shm", prefix="kvs-test-")
    os.close(handle)
    yield Path(name)
    os.unlink(name)


# ---------------------------------------------------------------------------------------------------------- taking in


def test_a_region_is_read_as_it_is_now(regions: Regions, memfd: int, data: bytes) -> None:
    region = regions.of(ME, regions.adopt(ME, os.dup(memfd), SIZE))
    view = memoryview(bytearray(5000))
    region.read_into(view, 123)
    assert bytes(view) == data[123:5123]
    os.pwrite(memfd, b"new", 123)
    region.read_into(view[:3], 123)
    assert bytes(view[:3]) == b"new"
    region.read_into(view[:0], SIZE)


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_RDWR])
def test_what_is_kept_can_only_read(regions: Regions, shm_file: Path, mode: int) -> None:
    shm_file.write_bytes(bytes(SIZE))
    before = open_fds()
    lent = os.open(shm_file, mode)
    number = regions.adopt(ME, lent, SIZE)
    eventually(lambda: len(open_fds() - before) == 1)  # one that can write is closed once there is another
    (kept,) = open_fds() - before
    assert fcntl.fcntl(kept, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(kept, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(kept, b"x", 0)
    regions.drop(ME, number)
    eventually(lambda: open_fds() <= before)


def test_a_writable_one_that_may_not_be_opened_anew_is_refused(
    regions: Regions, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    lent = os.dup(memfd)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Unavailable, match=r"may not open it anew.*Permission denied.*O_RDONLY"):
        regions.adopt(ME, lent, SIZE)
    monkeypatch.undo()
    eventually(lambda: not is_open(lent))
    assert regions.stats().regions == 0


def a_pipe() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


def a_socket() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


def a_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(theirs)
    return ours


NOT_ADOPTED: dict[str, Callable[[], int]] = {
    "directory": lambda: os.open("/", os.O_RDONLY),
    "directory in memory": lambda: os.open("/dev/shm", os.O_RDONLY),
    "socket": a_socket,
    "pipe": a_pipe,
    "terminal": a_terminal,
    "device": lambda: os.open("/dev/zero", os.O_RDONLY),
    "file of a kernel file system": lambda: os.open("/proc/self/status", os.O_RDONLY),
    "file on a disk": lambda: os.open(sys.executable, os.O_RDONLY),
    "only a path": lambda: os.open("/dev/shm", os.O_PATH),
}


@pytest.mark.parametrize("kind", NOT_ADOPTED)
def test_what_is_no_file_in_memory_is_refused_and_closed(regions: Regions, kind: str) -> None:
    fd = NOT_ADOPTED[kind]()
    with pytest.raises(BadRequest, match=r"no file in memory.*memfd, or a file in /dev/shm"):
        regions.adopt(ME, fd, 1)
    eventually(lambda: not is_open(fd))


def test_what_cannot_be_read_is_refused(regions: Regions, shm_file: Path) -> None:
    shm_file.write_bytes(bytes(SIZE))
    for mode, why in ((os.O_WRONLY, "cannot be read"), (os.O_PATH, "no file in memory")):
        fd = os.open(shm_file, mode)
        with pytest.raises(BadRequest, match=why):
            regions.adopt(ME, fd, SIZE)
        eventually(lambda fd=fd: not is_open(fd))


@pytest.mark.parametrize(("size", "why"), [(0, "above 0"), (SIZE + 1, f"only {SIZE} bytes")])
def test_the_file_must_have_the_size(regions: Regions, memfd: int, size: int, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        regions.adopt(ME, os.dup(memfd), size)


# ------------------------------------------------------------------------------------------------------------- bounds


def test_a_worker_lends_only_so_many(regions: Regions, memfd: int) -> None:
    numbers = [regions.adopt(ME, os.dup(memfd), SIZE) for _ in range(REGIONS_PER_WORKER_MAX)]
    assert len(set(numbers)) == len(numbers)
    with pytest.raises(Exhausted, match="8 regions already"):
        regions.adopt(ME, os.dup(memfd), SIZE)
    regions.adopt(OTHER, os.dup(memfd), SIZE)
    regions.drop(ME, numbers[3])
    assert regions.adopt(ME, os.dup(memfd), SIZE) not in numbers, "a number came back"
    assert (regions.stats().regions, regions.stats().bytes) == (9, 9 * SIZE)


def test_nobody_reads_the_region_of_another(regions: Regions, memfd: int) -> None:
    number = regions.adopt(ME, os.dup(memfd), SIZE)
    for worker, wanted in ((OTHER, number), (ME, RegionId(number + 1)), (ME, RegionId(0))):
        for use in (regions.of, regions.drop):
            with pytest.raises(NotFound, match="no such region of this worker"):
                use(worker, wanted)
    regions.drop_all(OTHER)
    assert regions.of(ME, number).size_bytes == SIZE


def test_regions_end_with_their_worker_but_a_reader_keeps_its_own(
    regions: Regions, memfd: int, data: bytes
) -> None:
    before = open_fds()
    held = regions.of(ME, regions.adopt(ME, os.dup(memfd), SIZE))
    regions.adopt(ME, os.dup(memfd), SIZE)
    regions.drop_all(ME)
    eventually(lambda: len(open_fds() - before) == 1)
    view = memoryview(bytearray(10))
    held.read_into(view, 0)
    assert bytes(view) == data[:10]
    del held
    eventually(lambda: open_fds() <= before)
    assert regions.stats().regions == 0


def test_a_lease_on_the_file_holds_up_nobody(regions: Regions) -> None:
    """Opening a file waits for whoever has a lease on it (fcntl F_SETLEASE), 45 s unless set otherwise."""
    fd, name = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(name)
    os.ftruncate(fd, SIZE)
    told = signal.signal(signal.SIGIO, signal.SIG_IGN)
    taken_back = threading.Timer(1.0, fcntl.fcntl, (fd, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        taken_back.start()
        with pytest.raises(Unavailable, match="may not open it anew"):
            regions.adopt(ME, os.dup(fd), SIZE)
    finally:
        taken_back.join(WAIT_S)
        signal.signal(signal.SIGIO, told)
        os.close(fd)


def test_closing_that_hangs_holds_up_nobody_and_is_bounded(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of a user's own making can let close() wait for ever."""
    gate = threading.Event()
    close = os.close

    def hanging(fd: int) -> None:
        if threading.current_thread().name == "kvstored-regions":
            assert gate.wait(WAIT_S)
        close(fd)

    before = open_fds()
    regions = Regions()
    monkeypatch.setattr(regions_module.os, "close", hanging)
    taken = 0
    while not regions.full:
        regions.drop(ME, regions.adopt(ME, os.dup(memfd), SIZE))
        taken += 1
        assert taken <= regions_module.CLOSING_MAX
    regions.close(0.01)  # in bounded time
    gate.set()
    eventually(lambda: open_fds() <= before)


# -------------------------------------------------------------------------------------------------------- copying out


SLOT = 64 << 10
ONE = SegmentId(1)


class Fixture:
    def __init__(self, regions: Regions, memfd: int) -> None:
        self.arena = Arena(protection=Protection.SEALED, boot_id=bytes(16), huge_pages=False, prefault=False)
        self.arena.create(ONE, 8 * SIZE, 2048)
        self.staging = Staging(bytes_max=SIZE)
        self.regions = regions
        self.region = regions.adopt(ME, os.dup(memfd), SIZE)
        self.copier = Copier(self.arena, self.staging, regions, threads=2)
        self.answers: queue.SimpleQueue[OpDone | OpFailed] = queue.SimpleQueue()

    def run(self, effect: Task) -> OpDone | OpFailed:
        self.copier.submit(effect, self.answers.put)
        return self.answers.get(timeout=WAIT_S)

    def slot(self, offset: int, length: int) -> bytes:
        return self.arena.view(ONE, offset, length).tobytes()


@pytest.fixture
def it(regions: Regions, memfd: int) -> Iterator[Fixture]:
    it = Fixture(regions, memfd)
    yield it
    it.copier.close(WAIT_S)
    it.staging.close()
    it.arena.close()


def fill(*rows: tuple[int, int, int], region: int = 1, worker: WorkerId = ME) -> FillSlots:
    """(offset in the region, offset in the segment, length)"""
    return FillSlots(
        OpId(1),
        worker,
        RegionId(region),
        tuple(StagedPiece(source, length) for source, _, length in rows),
        tuple(Extent(ONE, target, length, target // 4096, 1) for _, target, length in rows),
    )


@pytest.mark.parametrize("length", [1, 4095, 4096, 10_000, SLOT])
def test_rows_go_into_their_slots(
    it: Fixture, data: bytes, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "BLOCK_BYTES", 4096)
    rows = ((5, SLOT, length), (SIZE - length, 0, length), (5, 4 * SLOT, length))
    answer = it.run(fill(*rows))
    expected = [data[source : source + length] for source, _, _ in rows]
    assert answer == OpDone(OpId(1), tuple(map(xxhash.xxh3_64_intdigest, expected)))
    assert [it.slot(target, length) for _, target, _ in rows] == expected
    assert not any(it.slot(2 * SLOT, 2 * SLOT)) and not any(it.slot(SLOT + length, SLOT - length)), (
        "more was written"
    )


def test_a_large_fill_is_shared_among_the_threads(
    it: Fixture, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "PART_BYTES", SLOT)
    readers = set()
    both = threading.Barrier(2)
    read_in = Copier._read_in

    def noting(self: Copier, *row: object) -> int:
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            both.wait(WAIT_S)
        return read_in(self, *row)  # type: ignore[arg-type]

    monkeypatch.setattr(Copier, "_read_in", noting)
    rows = tuple((SIZE - (n + 1) * SLOT, n * SLOT, SLOT) for n in range(16))
    answer = it.run(fill(*rows))
    assert isinstance(answer, OpDone)
    assert answer.checksums == tuple(xxhash.xxh3_64_intdigest(data[s : s + n]) for s, _, n in rows)
    assert len(readers) == 2


@pytest.mark.parametrize(
    ("effect", "why"),
    [
        (fill((SIZE - 9, 0, 10)), "not inside"),
        (fill((-1, 0, 10)), "not inside"),
        (fill((1 << 62, 0, 10)), "not inside"),
        (fill((0, 0, 10), region=2), "no such region"),
        (fill((0, 0, 10), worker=OTHER), "no such region"),
    ],
)
def test_what_cannot_be_filled_fails_with_a_reason(it: Fixture, effect: FillSlots, why: str) -> None:
    answer = it.run(effect)
    assert isinstance(answer, OpFailed) and why in answer.why


def test_a_region_that_is_cut_short_fails_the_fill_and_nothing_else(it: Fixture, memfd: int) -> None:
    os.ftruncate(memfd, 5000)
    answer = it.run(fill((0, 0, 4096), (4096, 4096, 4096)))
    assert isinstance(answer, OpFailed) and "cut short" in answer.why
    assert isinstance(it.run(fill((0, 0, 4096))), OpDone)
    os.ftruncate(memfd, 0)
    assert isinstance(it.run(fill((0, 0, 1))), OpFailed)


def test_an_error_of_the_system_fails_the_fill(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(regions_module.os, "preadv", fails)
    answer = it.run(fill((0, 0, 4096)))
    assert isinstance(answer, OpFailed) and "cannot be read at 0: Input/output error" in answer.why


def test_a_read_that_gets_less_than_it_asked_for_goes_on(
    it: Fixture, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(regions_module.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    assert isinstance(it.run(fill((77, 0, 4096))), OpDone)
    assert it.slot(0, 4096) == data[77 : 77 + 4096]


def test_a_fill_that_waits_holds_its_region(it: Fixture, data: bytes) -> None:
    """Dropped after it was asked for: the fill still reads the region that it named."""
    gate = threading.Event()
    for _ in range(2):
        it.copier.submit(fill((0, 0, 1)), lambda answer: gate.wait(WAIT_S))  # type: ignore[arg-type,return-value]
    it.copier.submit(fill((0, SLOT, 4096)), it.answers.put)
    it.regions.drop(ME, it.region)
    gate.set()
    assert isinstance(it.answers.get(timeout=WAIT_S), OpDone)
    assert it.slot(SLOT, 4096) == data[:4096]
    assert isinstance(it.run(fill((0, SLOT, 4096))), OpFailed)


def test_the_copier_does_not_keep_a_region_open_that_it_has_read(it: Fixture, memfd: int) -> None:
    before = open_fds()
    number = it.regions.adopt(OTHER, os.dup(memfd), SIZE)
    assert isinstance(it.run(fill((0, 0, 4096), region=number, worker=OTHER)), OpDone)
    it.regions.drop_all(OTHER)
    eventually(lambda: open_fds() <= before)
