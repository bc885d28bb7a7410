"""Segments come and go by what still uses them; nothing of a parent is touched in a child."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvstore import memory
from kvstore.client.mappings import Mappings

BOOT = b"b" * 16
SIZE = 1 << 20
CELLS = 256

Handed = Callable[..., tuple[int, int]]


@pytest.fixture
def handed() -> Handed:
    """Descriptors (data, header) of a new segment, as the daemon hands them over."""

    def make(
        boot: bytes = BOOT,
        cells: int = CELLS,
        size: int = SIZE,
        fill: int | None = 1,
        seals: int = memory.SEALS_READ_ONLY,
    ) -> tuple[int, int]:
        data_fd = memory.create_memfd("test-data", size)
        data = memory.map_shared(data_fd, size, writable=True)
        if fill is not None:
            data.array[:] = fill
        header_fd = memory.create_memfd("test-header", memory.header_bytes(CELLS))
        header = memory.map_shared(header_fd, memory.header_bytes(CELLS), writable=True)
        memory.write_header(header.array, memory.SegmentHeader(cells, size, boot))
        memory.generations(header.array, CELLS)[:] = 7
        memory.add_seals(data_fd, seals)
        memory.add_seals(header_fd, memory.SEALS_READ_ONLY)
        return data_fd, header_fd

    return make


@pytest.fixture
def mappings() -> Mappings:
    return Mappings(boot_id=BOOT, writable=False)


def wait_for_pages() -> None:
    """Until no thread holds a mapping to page it in."""
    for thread in threading.enumerate():
        if thread.name == "kvstore-page-in":
            thread.join(30)
            assert not thread.is_alive()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("writable", [False, True])
def test_pages_are_mapped_before_anybody_touches_them(handed: Handed, writable: bool) -> None:
    size = 64 << 20
    fds = handed(size=size, seals=0 if writable else memory.SEALS_READ_ONLY)
    mappings = Mappings(boot_id=BOOT, writable=writable)
    assert mappings.install(3, size, CELLS, *fds)
    wait_for_pages()
    segment = mappings.get(3)
    assert segment is not None
    before = faults()
    assert segment.data[:: mmap.PAGESIZE].sum() == size // mmap.PAGESIZE
    if writable:
        segment.data[:: mmap.PAGESIZE] = 2
    assert faults() - before < 100


def test_what_the_daemon_has_not_allocated_is_not_allocated_by_us(mappings: Mappings, handed: Handed) -> None:
    size = 64 << 20
    data_fd, header_fd = handed(size=size, fill=None)
    kept = os.dup(data_fd)
    assert mappings.install(3, size, CELLS, data_fd, header_fd)
    wait_for_pages()
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)


def test_paging_in_ends_with_the_connection(mappings: Mappings, handed: Handed) -> None:
    for number in range(8):
        assert mappings.install(number, SIZE, CELLS, *handed())
    mappings.retire_all()
    wait_for_pages()
    assert mappings.collect() == list(range(8))


def test_installed_read_only_and_without_descriptors(mappings: Mappings, handed: Handed) -> None:
    fds = handed()
    assert mappings.missing([3, 4, 3]) == [3, 4]
    assert mappings.install(3, SIZE, CELLS, *fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    segment = mappings.get(3)
    assert segment is not None
    assert segment.data.sum() == SIZE
    assert list(segment.cells[:4:2]) == [7, 7]
    with pytest.raises(ValueError, match="read-only"):
        segment.data[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        segment.cells[0] = 1
    assert mappings.missing([3, 4]) == [4]


def test_the_same_segment_twice_is_mapped_once(mappings: Mappings, handed: Handed) -> None:
    mappings.install(3, SIZE, CELLS, *handed())
    first = mappings.get(3)
    assert mappings.install(3, SIZE, CELLS, *handed(fill=2))
    assert mappings.get(3) is first


@pytest.mark.parametrize(
    "wrong", [{"boot": b"x" * 16}, {"cells": 255}, {"size": 2 * SIZE}], ids=lambda wrong: next(iter(wrong))
)
def test_a_header_that_says_something_else_is_refused(
    mappings: Mappings, handed: Handed, wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    fds = handed(**wrong)
    assert not mappings.install(3, SIZE, CELLS, *fds)
    assert mappings.get(3) is None
    assert "segment 3 could not be mapped" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


def test_sealed_memory_cannot_be_mapped_for_writing(handed: Handed) -> None:
    assert not Mappings(boot_id=BOOT, writable=True).install(3, SIZE, CELLS, *handed())


def test_a_retired_segment_goes_with_its_last_user(mappings: Mappings, handed: Handed) -> None:
    mappings.install(3, SIZE, CELLS, *handed())
    wait_for_pages()
    segment = mappings.get(3)
    assert segment is not None
    view = memoryview(segment.data[10:20].data)
    assert mappings.retire([3, 9]) == [9], "what we never had is gone already"
    assert mappings.get(3) is None
    assert mappings.collect() == []
    assert mappings.retire([3]) == [], "asked again: still there"
    del segment
    assert mappings.collect() == []
    assert view[0] == 1
    view.release()
    assert mappings.collect() == [3]
    assert mappings.collect() == []
    assert mappings.retire([3]) == [3]


def test_descriptors_that_arrive_after_the_retirement(mappings: Mappings, handed: Handed) -> None:
    mappings.asking([3, 4])
    assert mappings.retire([3]) == [], "its descriptors may be on their way"
    assert not mappings.install(3, SIZE, CELLS, *handed())
    assert mappings.install(4, SIZE, CELLS, *handed())
    mappings.answered([3, 4])
    assert mappings.get(3) is None
    assert mappings.retire([3]) == [3]


def test_after_the_end_nothing_is_mapped(mappings: Mappings, handed: Handed) -> None:
    mappings.install(3, SIZE, CELLS, *handed())
    wait_for_pages()
    segment = mappings.get(3)
    assert segment is not None
    data = weakref.ref(segment.data.base)
    mappings.retire_all()
    assert mappings.get(3) is None
    assert segment.data[0] == 1, "held by whoever still reads"
    del segment
    assert data() is None
    assert mappings.collect() == [3]
    assert not mappings.install(4, SIZE, CELLS, *handed())


INHERITED, ELSEWHERE, CHANGED = 3, 4, 5
"""What a child ends with: it has its parent's mapping; its own memory is not where that was; or is not what it was."""


def test_a_child_that_drops_its_parents_mapping_leaves_its_own_memory_alone(
    mappings: Mappings, handed: Handed
) -> None:
    data_fd, header_fd = handed()
    inode = os.fstat(data_fd).st_ino
    mappings.install(3, SIZE, CELLS, data_fd, header_fd)
    segment = mappings.get(3)
    assert segment is not None
    wait_for_pages()
    address = segment.data.ctypes.data
    fixed_noreplace = 0x100000
    libc = ctypes.PyDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = memory._libc.mmap.argtypes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace

    def child() -> int:
        """Not by os.fork: what the interpreter and libraries do after one allocates, and may get the very pages that
        are to be free in the child. Whatever allocates here may, too: then another child is to try."""
        pid: int = libc.fork()
        if pid:
            return pid
        signal.alarm(20)
        found = libc.mmap(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found != address:
            with open("/proc/self/maps") as maps:
                inherited = any(line.split()[4] == str(inode) for line in maps)
            os._exit(INHERITED if inherited else ELSEWHERE)
        ctypes.memset(found, 9, SIZE)
        mappings.retire_all()
        os._exit(0 if ctypes.string_at(found, SIZE) == bytes([9]) * SIZE else CHANGED)

    ended = ELSEWHERE
    spare: list[bytearray] = []
    for _ in range(20):
        ended = os.waitstatus_to_exitcode(os.waitpid(child(), 0)[1])
        if ended != ELSEWHERE:
            break
        spare.append(bytearray(SIZE))  # the next child allocates from another state
    assert ended == 0
    assert int(segment.data.astype(np.uint64).sum()) == SIZE


# ------------------------------------------------------------------------------------------------ devices that copy


class Registrar:
    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.known: dict[int, int] = {}
        """Address -> number."""
        self.gone: list[tuple[int, Callable[[], None]]] = []

    def mapped(self, number: int, data: np.ndarray) -> None:
        if self.refuses:
            raise OSError("no more memory can be locked")
        self.known[data.ctypes.data] = number

    def last_view_gone(self, address: int, unmap: Callable[[], None]) -> None:
        self.gone.append((address, unmap))


def test_a_registrar_hears_of_segments_before_anybody_reads_and_before_they_go(
    mappings: Mappings, handed: Handed
) -> None:
    registrar = Registrar()
    assert mappings.install(3, SIZE, CELLS, *handed())
    mappings.register_with(registrar)
    assert mappings.install(4, SIZE, CELLS, *handed())
    wait_for_pages()
    assert sorted(registrar.known.values()) == [3, 4]
    segment = mappings.get(4)
    assert segment is not None
    address, view = segment.data.ctypes.data, segment.data[100:200]
    mappings.retire([4])
    del segment
    assert not registrar.gone and mappings.collect() == []
    assert view.sum() == 100
    del view
    assert [where for where, _ in registrar.gone] == [address]
    assert mappings.collect() == [], "it is mapped until the device has forgotten it"
    ctypes.string_at(address, SIZE)  # would be a fault
    registrar.gone[0][1]()
    assert mappings.collect() == [4]
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(f"{address:x}-") for line in maps)


def test_a_segment_that_cannot_be_registered_is_not_mapped(
    mappings: Mappings, handed: Handed, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar(refuses=True)
    mappings.register_with(registrar)
    assert not mappings.install(3, SIZE, CELLS, *handed())
    assert mappings.get(3) is None and "no more memory can be locked" in caplog.text
    assert not registrar.gone, "it knows nothing of it"
