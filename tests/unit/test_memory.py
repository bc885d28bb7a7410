"""Sealed memfds and their mappings, the segment header, the memory limit, packets with descriptors."""

import errno
import fcntl
import mmap
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import memory

SIZE = 1 << 20


def run_script(script: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    """Standard output of a process of its own."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mappings_of(fd: int) -> list[str]:
    """What the kernel says of each mapping of this very memfd: those of other tests, by the same name, may be waiting
    for the collector."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [part for part in parts if re.match(rf"(\S+ ){{4}}{os.fstat(fd).st_ino}\s+/memfd:", part)]


def resident_bytes(fd: int) -> int:
    """In all mappings of this memfd together."""
    found = re.findall(r"(?m)^Rss:\s+(\d+) kB", "".join(mappings_of(fd)))
    return sum(int(kib) * 1024 for kib in found)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def fd() -> Iterator[int]:
    fd = memory.create_memfd("kvs-test", SIZE)
    yield fd
    os.close(fd)


# -------------------------------------------------------------------------------------------------- memfds and seals


def test_memfd_is_sealable_zero_and_closed_on_exec(fd: int) -> None:
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_size == SIZE
    assert os.pread(fd, 16, SIZE - 16) == bytes(16)
    assert not memory.get_seals(fd) & memory.F_SEAL_SEAL
    assert os.stat(f"/proc/self/fd/{fd}").st_nlink == 0


def test_memfd_on_a_kernel_without_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & memory.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "unknown flag")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    fd = memory.create_memfd("kvs-test", SIZE)
    memory.add_seals(fd, memory.SEALS_RESIZE)
    os.close(fd)
    assert asked == [asked[1] | memory.MFD_NOEXEC_SEAL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING]


def test_failed_memfd_leaves_no_descriptor() -> None:
    before = open_fds()
    with pytest.raises(OSError, match="argument"):
        memory.create_memfd("kvs-test", -1)
    assert open_fds() == before


READER = """
    import errno, fcntl, mmap, os, sys, ctypes
    from kvstore import memory
    fd, size = int(sys.argv[1]), int(sys.argv[2])

    def refused(what, *codes):
        try:
            what()
        except OSError as error:
            assert error.errno in codes, (what, error)
            return
        raise AssertionError(f"{what} went through")

    libc = ctypes.CDLL(None, use_errno=True)
    def protect(address):
        if libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
    def punch(fd):
        if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")
    def remove(address):
        if libc.madvise(ctypes.c_void_p(address), 4096, 9):
            raise OSError(ctypes.get_errno(), "madvise")

    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for each in (fd, again):
        refused(lambda: os.ftruncate(each, 0), errno.EPERM)
        refused(lambda: os.ftruncate(each, 2 * size), errno.EPERM)
        refused(lambda: memory.add_seals(each, memory.F_SEAL_WRITE), errno.EPERM)
        refused(lambda: os.pwrite(each, b"evil", 0), errno.EPERM)
        refused(lambda: memory.map_shared(each, size, writable=True), errno.EPERM, errno.EACCES)
        refused(lambda: mmap.mmap(each, size, mmap.MAP_SHARED, mmap.PROT_WRITE), errno.EPERM, errno.EACCES)
        refused(lambda: punch(each), errno.EPERM)
    mapping = memory.map_shared(fd, size)
    refused(lambda: protect(mapping.array.ctypes.data), errno.EACCES)
    refused(lambda: remove(mapping.array.ctypes.data), errno.EACCES)
    print(bytes(mapping.array[:5]).decode())
"""


def test_reader_can_change_nothing_by_any_way(fd: int) -> None:
    own = memory.map_shared(fd, SIZE, writable=True)
    memory.add_seals(fd, memory.SEALS_READ_ONLY)
    own.array[:5] = list(b"after")  # the mapping that was there before the seal still writes
    assert run_script(READER, str(fd), str(SIZE), fds=(fd,)) == "after\n"
    assert bytes(own.array[:5]) == b"after"


def test_resize_seals_leave_it_writable(fd: int) -> None:
    memory.add_seals(fd, memory.SEALS_RESIZE)
    own = memory.map_shared(fd, SIZE)
    script = """
        import errno, os, sys
        from kvstore import memory
        fd, size = int(sys.argv[1]), int(sys.argv[2])
        memory.map_shared(fd, size, writable=True).array[7] = 42
        for length in (0, size - 1, size + 1):
            try:
                os.ftruncate(fd, length)
            except PermissionError as error:
                print(error.errno == errno.EPERM)
    """
    assert run_script(script, str(fd), str(SIZE), fds=(fd,)) == "True\n" * 3
    assert own.array[7] == 42


# ----------------------------------------------------------------------------------------------------------- mappings


def test_short_file_is_not_mapped(fd: int) -> None:
    for size in (SIZE + 1, 0, -1):
        with pytest.raises(OSError, match="cannot map") as caught:
            memory.map_shared(fd, size)
        assert caught.value.errno == errno.EINVAL


def test_closing_unmaps_at_once(fd: int) -> None:
    before = open_fds()
    mapping = memory.map_shared(fd, SIZE)
    assert mappings_of(fd)
    assert open_fds() == before
    mapping.close()
    assert mapping.unmapped
    assert not mappings_of(fd)
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.array
    mapping.close()


def test_a_view_outlives_close_and_unmaps_when_it_goes(fd: int) -> None:
    mapping = memory.map_shared(fd, SIZE, writable=True)
    view = memoryview(mapping.array[10:20].view("<u2"))
    mapping.close()
    assert not mapping.unmapped
    os.pwrite(fd, b"\x01\x02", 10)
    assert view[0] == 0x0201
    del view
    assert mapping.unmapped
    assert not mappings_of(fd)


def test_read_only_mapping_gives_read_only_arrays(fd: int) -> None:
    array = memory.map_shared(fd, SIZE).array
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array[5:].flags.writeable = True
    assert memoryview(array).readonly


def test_children_do_not_inherit_mappings(fd: int) -> None:
    script = """
        import os, sys
        from pathlib import Path
        from kvstore import memory
        mappings = [memory.map_shared(int(sys.argv[1]), int(sys.argv[2]), writable=way) for way in (True, False)]
        assert Path("/proc/self/maps").read_text().count("kvs-test") == 2
        child = os.fork()
        if not child:
            os._exit(Path("/proc/self/maps").read_text().count("kvs-test"))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_script(script, str(fd), str(SIZE), fds=(fd,)) == "0\n"


def test_a_child_does_not_unmap_what_it_never_had(fd: int) -> None:
    script = """
        import ctypes, os, sys
        from kvstore import memory
        size = int(sys.argv[2])
        mapping = memory.map_shared(int(sys.argv[1]), size)
        address = mapping.array.ctypes.data
        child = os.fork()
        if not child:
            fixed_private_anonymous = 0x100000 | 0x2 | 0x20
            assert memory._libc.mmap(address, size, 3, fixed_private_anonymous, -1, 0) == address
            ctypes.memset(address, 7, size)
            mapping.close()
            os._exit(ctypes.string_at(address, 1)[0])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_script(script, str(fd), str(SIZE), fds=(fd,)) == "7\n"


def test_mapping_flags_in_the_kernel(fd: int) -> None:
    mapping = memory.map_shared(fd, SIZE)
    (own,) = mappings_of(fd)
    (flags,) = re.findall(r"VmFlags: ([^\n]+)", own)
    assert {"sh", "dc", "dd"} <= set(flags.split())  # shared, not copied on fork, not dumped
    mapping.close()


def test_populate_makes_pages_resident_and_close_gives_them_back() -> None:
    size = 48 << 20
    fd = memory.create_memfd("kvs-test", size)
    mapping = memory.map_shared(fd, size, writable=True)
    mapping.ask_for_huge_pages()
    assert os.fstat(fd).st_blocks == resident_bytes(fd) == 0
    assert mapping.populate(step_bytes=7 << 20)
    assert os.fstat(fd).st_blocks * 512 == size
    assert resident_bytes(fd) == size
    mapping.close()
    assert not mappings_of(fd)
    os.close(fd)


def test_populate_stops_when_cancelled(fd: int) -> None:
    mapping = memory.map_shared(fd, SIZE, writable=True)
    answers = iter([False, True])
    assert not mapping.populate(step_bytes=SIZE // 4, cancelled=lambda: next(answers))
    assert os.fstat(fd).st_blocks * 512 == SIZE // 4


def test_populate_on_a_kernel_that_cannot(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", 9_999)
    assert memory.map_shared(fd, SIZE, writable=True).populate(step_bytes=SIZE // 4)
    assert os.fstat(fd).st_blocks * 512 == SIZE


def test_populate_failure_is_an_oserror(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = memory.map_shared(fd, SIZE, writable=True)
    monkeypatch.setattr(mapping, "_advise", lambda *_: errno.ENOMEM)
    with pytest.raises(OSError, match="memory") as caught:
        mapping.populate()
    assert caught.value.errno == errno.ENOMEM


def test_mapped_pages_do_not_fault_and_nothing_is_changed(fd: int) -> None:
    writer = memory.map_shared(fd, SIZE, writable=True)
    writer.array[:] = 5
    reader = memory.map_shared(fd, SIZE)
    assert resident_bytes(fd) == SIZE
    reader.map_pages(step_bytes=SIZE // 4)
    assert resident_bytes(fd) == 2 * SIZE
    assert (reader.array == 5).all()
    reader.close()
    reader.map_pages()  # closed meanwhile: no error


def test_mapping_pages_stops_when_cancelled_or_refused(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.map_shared(fd, SIZE, writable=True).populate()
    mapping = memory.map_shared(fd, SIZE)
    mapping.map_pages(cancelled=lambda: True)
    monkeypatch.setattr(memory, "MADV_POPULATE_READ", 9_999)
    mapping.map_pages()
    assert resident_bytes(fd) < SIZE // 2


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (0, -1), (0, 101), (100, 1), (1 << 62, 1 << 62)])
def test_cut_never_clips(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="outside of 100 bytes"):
        memory.cut(np.zeros(100, np.uint8), offset, length)


@pytest.mark.parametrize("memcpy", [False, True])
def test_copy_is_bit_for_bit_and_never_repeats(memcpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor."""
    monkeypatch.setattr(memory, "_MEMCPY_IS_FASTER", memcpy)
    source = np.random.default_rng(3).integers(0, 256, 100_003, dtype=np.uint8)
    target = np.zeros(100_005, np.uint8)
    memory.copy(target[1:-1], source)
    assert bytes(target) == b"\0" + bytes(source) + b"\0"
    for copy in (memory.copy_in, memory.copy_out):
        target[:] = 0
        copy(target[1:-1], source)
        assert bytes(target) == b"\0" + bytes(source) + b"\0"
    for size in (1, 2):
        with pytest.raises(AssertionError):
            memory.copy(np.zeros(4, np.uint8), np.ones(size, np.uint8))


def test_cut_is_a_view() -> None:
    array = np.zeros(100, np.uint8)
    memory.cut(array, 90, 10)[:] = 1
    assert array.sum() == 10
    assert memory.cut(array, 100, 0).size == 0


# ------------------------------------------------------------------------------------------------------------- header


def test_header_byte_for_byte() -> None:
    array = np.zeros(memory.header_bytes(3), np.uint8)
    memory.write_header(array, memory.SegmentHeader(cells=3, segment_bytes=12_288, boot_id=bytes(range(16))))
    memory.generations(array, 3)[:] = [1, 0x0102030405060708, (1 << 64) - 1]
    golden = "4b56534547484452 02000000 03000000 0030000000000000 000102030405060708090a0b0c0d0e0f"
    assert bytes(array[:40]).hex() == golden.replace(" ", "")
    assert not array[40:4096].any()
    memory.cells_of(array, 3)[1, 1] = 7
    cells = "0100000000000000" + "00" * 8 + "0807060504030201" + "0700000000000000" + "ff" * 8 + "00" * 8
    assert bytes(array[4096:4144]).hex() == cells
    assert memory.read_header(array) == memory.SegmentHeader(3, 12_288, bytes(range(16)))


@pytest.mark.parametrize(("cells", "pages"), [(0, 1), (1, 2), (256, 2), (257, 3)])
def test_header_has_whole_pages(cells: int, pages: int) -> None:
    assert memory.header_bytes(cells) == pages * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(0, 0, "not a segment header"), (8, 1, "version 1"), (13, 9, "cannot have")],
)
def test_foreign_headers_are_refused(position: int, value: int, message: str) -> None:
    array = np.zeros(memory.header_bytes(3), np.uint8)
    memory.write_header(array, memory.SegmentHeader(cells=3, segment_bytes=12_288, boot_id=bytes(16)))
    array[position] = value
    with pytest.raises(ValueError, match=message):
        memory.read_header(array)
    with pytest.raises(ValueError, match="at least 4096"):
        memory.read_header(array[:4095])


def test_cells_are_never_seen_half_written() -> None:
    size = memory.header_bytes(2)
    fd = memory.create_memfd("kvs-test", size)
    cells = memory.generations(memory.map_shared(fd, size).array, 2)
    script = """
        import sys
        import numpy as np
        from kvstore import memory
        size = memory.header_bytes(2)
        cells = memory.generations(memory.map_shared(int(sys.argv[1]), size, writable=True).array, 2)
        print("ready", flush=True)
        both, n = np.array([0, 1]), 0
        while not cells[1] >> np.uint64(63):
            n += 1
            cells[both[:1]] = np.array([n << 32 | n], np.uint64)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), str(fd)]
    with subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        seen = set()
        for _ in range(200_000):
            value = int(cells[0])
            assert value >> 32 == value & 0xFFFF_FFFF
            seen.add(value)
        memory.generations(memory.map_shared(fd, size, writable=True).array, 2)[1] = 1 << 63
        assert writer.wait(timeout=30) == 0
    assert len(seen) > 2  # else nothing was written meanwhile
    os.close(fd)


# ------------------------------------------------------------------------------------------------------- memory limit

V1 = "31 23 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "31 23 0:31 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "limit"),
    [
        pytest.param("0::/a/b\n", V2.format(root="/"), {}, 1 << 30, id="machine"),
        pytest.param("0::/\n", V2.format(root="/"), {"memory.max": "4096"}, 4096, id="container"),
        pytest.param(
            "0::/a/b\n",
            V2.format(root="/"),
            {"a/memory.max": "5000", "a/b/memory.max": "9000", "a/b/c/memory.max": "1"},
            5000,
            id="the parent has less",
        ),
        pytest.param(
            "0::/a/b\n",
            V2.format(root="/"),
            {"a/b/memory.max": "max", "a/b/memory.high": "7000"},
            7000,
            id="throttled above",
        ),
        pytest.param(
            "0::/pod/x\n",
            V2.format(root="/pod/x"),
            {"memory.max": "6000", "pod/x/memory.max": "1"},
            6000,
            id="mount shows our part only",
        ),
        pytest.param(
            "0::/../other\n",
            V2.format(root="/"),
            {"memory.max": "6000", "../other/memory.max": "1"},
            6000,
            id="our path is outside",
        ),
        pytest.param(
            "9:cpu:/z\n4:hugetlb,memory:/a/b\n0::/\n",
            V1.format(root="/") + V2.format(root="/").replace("fs/cgroup ", "fs/cgroup/unified "),
            {
                "memory/a/memory.limit_in_bytes": "8000",
                "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
            },
            8000,
            id="version 1, nested",
        ),
        pytest.param(
            "4:memory:/docker/x\n",
            V1.format(root="/docker/x"),
            {"memory/memory.limit_in_bytes": "3000"},
            3000,
            id="version 1, container",
        ),
        pytest.param(
            "4:memory:/docker/x/inner\n",
            V1.format(root="/docker/x"),
            {"memory/inner/memory.limit_in_bytes": "2000", "memory/memory.limit_in_bytes": "3000"},
            2000,
            id="version 1, below a container",
        ),
        pytest.param("4:memory:/\n", "", {}, 1 << 30, id="not mounted"),
    ],
)
def test_memory_limit(tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str], limit: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:        1048576 kB\nMemFree:  1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/self/mountinfo").write_text("1 2 0:3 / / rw shared:1 - ext4 /dev/sda rw\n" + mountinfo)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory.memory_limit_bytes(tmp_path) == limit


def test_memory_limit_without_cgroups(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2 kB\n")
    assert memory.memory_limit_bytes(tmp_path) == 2048


def test_memory_limit_of_this_machine() -> None:
    assert 0 < memory.memory_limit_bytes() <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


# ------------------------------------------------------------------------------------------------------------ packets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def test_packets_carry_descriptors(pair: tuple[socket.socket, socket.socket], fd: int) -> None:
    memory.send_packet(pair[0], b"two", [fd, pair[0].fileno()])
    memory.send_packet(pair[0], b"none")
    data, fds = memory.receive_packet(pair[1], fds_max=2)
    assert data == b"two"
    assert [os.fstat(each).st_ino for each in fds] == [os.fstat(fd).st_ino, os.fstat(pair[0].fileno()).st_ino]
    assert not any(os.get_inheritable(each) for each in fds)
    assert all(fcntl.fcntl(each, fcntl.F_GETFD) == fcntl.FD_CLOEXEC for each in fds)
    assert memory.receive_packet(pair[1], fds_max=2) == (b"none", [])
    for each in fds:
        os.close(each)


@pytest.mark.parametrize(("count", "fds_max"), [(1, 0), (2, 1), (3, 1), (32, 31), (253, 0)])
def test_too_many_descriptors_are_all_closed(
    pair: tuple[socket.socket, socket.socket], fd: int, count: int, fds_max: int
) -> None:
    before = open_fds()
    memory.send_packet(pair[0], b"x", [fd] * count)
    with pytest.raises(OSError, match="descriptors") as caught:
        memory.receive_packet(pair[1], fds_max=fds_max)
    assert caught.value.errno == errno.EMSGSIZE
    assert open_fds() == before


def test_too_long_packet_is_refused_and_its_descriptors_closed(
    pair: tuple[socket.socket, socket.socket], fd: int
) -> None:
    before = open_fds()
    memory.send_packet(pair[0], bytes(memory.PACKET_BYTES_MAX), [fd])
    memory.send_packet(pair[0], bytes(memory.PACKET_BYTES_MAX + 1), [fd])
    data, fds = memory.receive_packet(pair[1], fds_max=1)
    assert len(data) == memory.PACKET_BYTES_MAX
    os.close(fds[0])
    with pytest.raises(OSError, match="over 65536 bytes"):
        memory.receive_packet(pair[1], fds_max=1)
    assert open_fds() == before


def test_end_of_connection_is_no_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].shutdown(socket.SHUT_WR)
    assert memory.receive_packet(pair[1], fds_max=4) == (b"", [])
