"""Shared memory and the packets that hand it over: what the daemon and the client both need, and nothing else.

A piece of shared memory is a *memfd*: it has no name in any file system, so nothing is left behind when its last holder
is killed. It is handed over as a file descriptor on a unix socket and protected by *seals*, which nobody can take off.
Imports only numpy and the standard library, so that an engine's process can afford it.

Header of a segment, a memfd of its own, little-endian:

    offset  bytes
    0       8       magic "KVSEGHDR"
    8       4       version, 2
    12      4       number of cells
    16      8       bytes of the segment
    24      16      boot id of the daemon that made it
    40      4056    zero
    4096    16 each per cell: generation, and the tag of the key whose bytes are in the slot (`directory.tag_of`; 0:
                    of none that readers without a message are told of)

Ordering. The daemon stores the new generation, then a `fence()`, and only then may new bytes go into the slot. A reader
loads the cell, the bytes, and the cell again, with a `fence()` on both sides of the bytes. So if it saw a new byte, its
second look at the cell sees the new generation, and the load is void. This holds on x86-64 and aarch64, where all
observers see stores in one order. A cell is eight bytes at a multiple of eight, loaded and stored as one uint64, so it
is never seen half-written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# From linux/fcntl.h, linux/memfd.h and asm-generic/mman-common.h; not all of them have a name in Python 3.11.
F_SEAL_SEAL = 0x01
F_SEAL_SHRINK = 0x02
F_SEAL_GROW = 0x04
F_SEAL_WRITE = 0x08
F_SEAL_FUTURE_WRITE = 0x10
MFD_NOEXEC_SEAL = 0x08
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

SEALS_RESIZE = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
"""Nobody can change the size: a mapping of it never faults with SIGBUS because somebody truncated the file."""
SEALS_READ_ONLY = SEALS_RESIZE | F_SEAL_FUTURE_WRITE
"""And nobody can write, but through mappings that exist already: the daemon's own."""

HEADER_MAGIC = b"KVSEGHDR"
HEADER_VERSION = 2
HEADER_CELLS_OFFSET = 4096
CELL_BYTES = 16
_HEADER = struct.Struct("<8sIIQ16s")

TOUCHED_BYTES = 2 << 20
"""What is touched, and then copied, at once."""

SCM_MAX_FD = 253
"""Descriptors that the kernel lets a packet have."""
PACKET_BYTES_MAX = 64 << 10
FRAME_PREFIX_BYTES = 4
"""Before each packet that goes over a SOCK_STREAM socket: its length."""
"""Longest packet on the descriptor socket, either way."""

# The libc calls themselves: mmap.mmap would keep a duplicate of every descriptor, and its madvise() holds the
# interpreter's lock, which would stop the daemon's loop for as long as a segment is being faulted in.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 256 << 10
MESSAGE_BYTES_MAX = 8 << 20
KEPT_BYTES = 64 << 20


def fix_mmap_threshold() -> None:
    """Let every large block of this process be a mapping of its own, which grows in place.

    glibc raises the size from which that holds by itself, up to 32 MiB. The core's columns are smaller than that: they
    would live in the heap and leave a hole behind whenever they grow (50 bytes a chunk, see benchmarks/scale.py).
    Other C libraries have no such threshold and are left alone.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def keep_freed_memory() -> None:
    """For who takes and gives messages of a few MiB: their memory stays with this process, up to 64 MiB. Else each
    comes from the kernel anew, which zeroes it page by page, for twice the time that the bytes take to be copied.
    Undoes `fix_mmap_threshold`, so that some of the heap may stay unused where the core's columns grow."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MESSAGE_BYTES_MAX)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


# ---------------------------------------------------------------------------------------------------- memfds, mappings


def create_memfd(name: str, size_bytes: int) -> int:
    """A new sealable memfd of zero bytes, closed on exec; `name` shows in /proc/PID/maps. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # before Linux 6.3
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def allocate(
    fd: int, size_bytes: int, *, step_bytes: int = 256 << 20, cancelled: Callable[[], bool] = lambda: False
) -> bool:
    """Gives a memfd all its pages without touching one, which takes a tenth of the time of faulting them in: so memory
    that is not there is an error now, and no SIGBUS later. Looks at `cancelled` before each step; returns False when it
    stopped for that. Raises OSError (ENOMEM, ENOSPC)."""
    for offset in range(0, size_bytes, step_bytes):
        if cancelled():
            return False
        os.posix_fallocate(fd, offset, min(step_bytes, size_bytes - offset))
    return True


def add_seals(fd: int, seals: int) -> None:
    """Raises OSError: EPERM once F_SEAL_SEAL is on, EINVAL for F_SEAL_FUTURE_WRITE before Linux 5.1."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def get_seals(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


LastView = Callable[[int, Callable[[], None]], None]
"""Called with the address of a mapping and with what unmaps it, once nobody has a view of it any more. It may be called
at any point of any thread, so it takes no lock: it hands both over to a thread, which calls the second."""


class _Fate:
    """Of a mapping: what outlives its region."""

    def __init__(self) -> None:
        self.unmapped = False


class _Region:
    """The mapped address range. Every numpy view of it holds a reference, so it is unmapped when the last one goes."""

    def __init__(self, address: int, size_bytes: int, *, writable: bool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pid = os.getpid()
        self.fate = _Fate()
        self.last_view: LastView | None = None
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, not writable),
        }

    def __del__(
        self,
        munmap: Callable[[int, int], int] = _libc.munmap,
        getpid: Callable[[], int] = os.getpid,
    ) -> None:
        fate, address, size_bytes = self.fate, self.address, self.size_bytes

        def unmap() -> None:
            munmap(address, size_bytes)
            fate.unmapped = True

        if getpid() != self.pid:  # a forked child never had it, and may have other memory at that address
            fate.unmapped = True
        elif self.last_view is None:
            unmap()
        else:
            self.last_view(address, unmap)


class SharedMapping:
    """A shared mapping of a memfd, as bytes.

    `close()` gives up this object's reference. The memory is unmapped at that moment unless somebody still holds a view
    of it, else when the last view goes: an address that a copy is running on, or that a user kept, never turns invalid.
    `unmapped` says whether it is gone. Holds no descriptor.
    """

    def __init__(self, region: _Region) -> None:
        self.size_bytes = region.size_bytes
        self._array: npt.NDArray[np.uint8] | None = np.asarray(region)
        self._region = weakref.ref(region)
        self._fate = region.fate

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes; read-only unless mapped writable. Raises ValueError after close()."""
        if self._array is None:
            raise ValueError("the mapping is closed")
        return self._array

    @property
    def unmapped(self) -> bool:
        return self._fate.unmapped

    def unmap_by(self, last_view: LastView) -> None:
        """Who is to be asked before it is unmapped: a device that knows this memory has to forget it first."""
        region = self._region()
        assert region is not None, self
        region.last_view = last_view

    def close(self) -> None:
        self._array = None

    def ask_for_huge_pages(self) -> bool:
        """Whether the kernel took the advice; it may still hand out small pages."""
        return self._advise(MADV_HUGEPAGE, 0, self.size_bytes) == 0

    def populate(self, *, step_bytes: int = 64 << 20, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Faults all pages of a writable mapping in, without holding the interpreter's lock.

        Looks at `cancelled` before each step; returns False when it stopped for that. For fresh memory only: where the
        kernel cannot populate (before 5.14) every page gets a zero. Raises OSError (ENOMEM).
        """
        for offset in range(0, self.size_bytes, step_bytes):
            if cancelled():
                return False
            length = min(step_bytes, self.size_bytes - offset)
            code = errno.EINTR
            while code == errno.EINTR:
                code = self._advise(MADV_POPULATE_WRITE, offset, length)
            if code == errno.EINVAL:
                self.array[offset : offset + length : mmap.PAGESIZE] = 0
            elif code:
                raise OSError(code, f"faulting {length} bytes in: {os.strerror(code)}")
        return True

    def fault_in(self, offset: int, length: int) -> None:
        """As `populate`, of memory that is in use already: its bytes stay. Where the kernel cannot (before 5.14), or
        has no memory now, nothing happens: pages come when they are touched."""
        code = errno.EINTR
        while code == errno.EINTR:
            code = self._advise(MADV_POPULATE_WRITE, offset, length)

    def map_pages(self, *, step_bytes: int = 8 << 20, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Enters all pages in this process' page table, so that the first access to each is no page fault; without
        holding the interpreter's lock. For memory that is there: pages that nobody has touched yet would be allocated.

        Stops early when `cancelled` says so, when the mapping is closed, and where the kernel cannot (before 5.14):
        then pages fault one by one, which is slower and nothing else.
        """
        for offset in range(0, self.size_bytes, step_bytes):
            if cancelled() or self._array is None:
                return
            try:
                code = self._advise(MADV_POPULATE_READ, offset, min(step_bytes, self.size_bytes - offset))
            except ValueError:  # closed at this moment
                return
            if code not in (0, errno.EINTR):
                return

    def _advise(self, advice: int, offset: int, length: int) -> int:
        """0 or the errno."""
        base = self.array  # held for the length of the call, so that close() in another thread cannot unmap
        if _libc.madvise(base.ctypes.data + offset, length, advice) == 0:
            return 0
        return ctypes.get_errno()

    def __repr__(self) -> str:
        state = "unmapped" if self.unmapped else "closed" if self._array is None else "mapped"
        return f"SharedMapping({self.size_bytes} bytes, {state})"


def map_shared(fd: int, size_bytes: int, *, writable: bool = False) -> SharedMapping:
    """Maps the first `size_bytes` of a memfd: not inherited by children, not in core dumps, always shared (a private
    mapping would go stale once something pinned it). The descriptor may be closed afterwards.

    Raises OSError: EPERM for a writable mapping of what is sealed against it, EINVAL for a file that is shorter,
    because touching what it lacks would be SIGBUS.
    """
    if size_bytes <= 0 or os.fstat(fd).st_size < size_bytes:
        raise OSError(errno.EINVAL, f"cannot map {size_bytes} bytes of a file of {os.fstat(fd).st_size}")
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size_bytes} bytes: {os.strerror(code)}")
    region = _Region(address, size_bytes, writable=writable)
    for advice in (MADV_DONTFORK, MADV_DONTDUMP):
        if _libc.madvise(address, size_bytes, advice):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot advise {advice} on a mapping: {os.strerror(code)}")
    return SharedMapping(region)


def cut(array: npt.NDArray[np.uint8], offset: int, length: int) -> npt.NDArray[np.uint8]:
    """View of [offset, offset + length). Raises ValueError outside of the array; slicing alone would silently clip."""
    if offset < 0 or length < 0 or offset + length > array.size:
        raise ValueError(f"[{offset}, {offset + length}) is outside of {array.size} bytes")
    return array[offset : offset + length]


def _copies_ahead() -> bool:
    """Whether this processor fetches by itself what a plain copy of pages of 4 KiB is about to need. Intel's do: there
    memcpy moves 7.0 GB/s in pieces of 256 KiB or 2 MiB, a loop 6.2, and 5.7 with a look at each page before; checksums
    come to 8.7 and 8.2 (two vCPU at 2.8 GHz)."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return b"GenuineIntel" in file.read(4096)
    except OSError:
        return False


_MEMCPY_IS_FASTER = _copies_ahead()


def touch(array: npt.NDArray[np.uint8]) -> None:
    """Look at one byte of each page of what is about to be copied or checksummed: some 2 MiB, no more than a processor
    keeps translations for.

    Shared memory is mostly mapped in pages of 4 KiB. A copy meets one such page after the other and waits for the
    translation of each, in a virtual machine for that of two tables; here they are independent of each other, and the
    processor works on many at a time. Copies of 2 MiB are faster by 10 to 20 % with it, checksums by 25 %. A copy of
    those bytes takes a third of the time of combining them, for a chunk of 64 pages. (All of this on Zen 5; nothing is
    done where a copy does it by itself.)
    """
    if array.size > mmap.PAGESIZE and not _MEMCPY_IS_FASTER:
        array[:: mmap.PAGESIZE].copy()


def copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy all bytes of a flat array to another of the same size, without the interpreter's lock.

    On Intel's processors numpy's own copying, which is memcpy. On others a loop of vector instructions: glibc copies
    what fits into the second-level cache by `rep movsb`, and where memory is mapped in pages of 4 KiB, as shared memory
    mostly is, some do that at half the speed (Zen 5: 7.4 against 14.5 GB/s in pieces of 256 KiB; larger lose 5 to
    10 %).
    """
    assert target.size == source.size, (target.size, source.size)  # numpy would repeat a single byte
    if _MEMCPY_IS_FASTER:
        np.copyto(target, source)
    else:
        np.positive(source, target)


def copy_out(target: npt.NDArray[np.uint8], shared: npt.NDArray[np.uint8]) -> None:
    """`copy` out of shared memory."""
    if shared.size <= TOUCHED_BYTES:
        touch(shared)
        copy(target, shared)
        return
    for start in range(0, shared.size, TOUCHED_BYTES):
        part = slice(start, start + TOUCHED_BYTES)
        touch(shared[part])
        copy(target[part], shared[part])


def copy_in(shared: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """`copy` into shared memory."""
    if shared.size <= TOUCHED_BYTES:
        touch(shared)
        copy(shared, source)
        return
    for start in range(0, shared.size, TOUCHED_BYTES):
        part = slice(start, start + TOUCHED_BYTES)
        touch(shared[part])
        copy(shared[part], source[part])


# ------------------------------------------------------------------------------------------------------ segment header


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    cells: int
    segment_bytes: int
    boot_id: bytes


def header_bytes(cells: int) -> int:
    """Size of a header with `cells` cells, in whole pages."""
    return -(-(HEADER_CELLS_OFFSET + cells * CELL_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def write_header(array: npt.NDArray[np.uint8], header: SegmentHeader) -> None:
    assert len(header.boot_id) == 16, header
    fields = (HEADER_MAGIC, HEADER_VERSION, header.cells, header.segment_bytes, header.boot_id)
    _HEADER.pack_into(array.data, 0, *fields)


def read_header(array: npt.NDArray[np.uint8]) -> SegmentHeader:
    """Raises ValueError when these are not the bytes of a header that we know how to read."""
    if array.size < HEADER_CELLS_OFFSET:
        raise ValueError(f"a segment header has at least {HEADER_CELLS_OFFSET} bytes, not {array.size}")
    magic, version, cells, segment_bytes, boot_id = _HEADER.unpack_from(array.data, 0)
    if magic != HEADER_MAGIC:
        raise ValueError(f"not a segment header: it begins with {magic!r}")
    if version != HEADER_VERSION:
        raise ValueError(f"segment header of version {version}; this program reads version {HEADER_VERSION}")
    if header_bytes(cells) > array.size:
        raise ValueError(f"a segment header with {cells} cells cannot have {array.size} bytes")
    return SegmentHeader(cells=cells, segment_bytes=segment_bytes, boot_id=boot_id)


def cells_of(array: npt.NDArray[np.uint8], cells: int) -> npt.NDArray[np.uint64]:
    """The header's cells as numbers, a row for each: (generation, tag). A view, so reading one loads it from shared
    memory."""
    return cut(array, HEADER_CELLS_OFFSET, cells * CELL_BYTES).view("<u8").reshape(cells, 2)


def generations(array: npt.NDArray[np.uint8], cells: int) -> npt.NDArray[np.uint64]:
    """Of all cells, likewise."""
    return cells_of(array, cells)[:, 0]


def _thread_fence() -> Callable[[], object]:
    """C11's atomic_thread_fence(memory_order_seq_cst), out of GCC's libatomic; else what is as strong."""
    try:
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return _fence_of_locks
    fence.argtypes = (ctypes.c_int,)
    fence.restype = None
    return partial(fence, ctypes.c_int(5))


def _fence_of_locks() -> None:
    """Nothing passes a release that an acquire of the same lock follows."""
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass


fence = _thread_fence()
"""What this thread loaded and stored before comes before what it loads and stores after, for all who look.

x86-64 lets only a later load pass an earlier store, and string instructions and non-temporal stores pass others; the
fence (MFENCE, or a locked instruction) lets nothing pass. aarch64 reorders any plain accesses; the fence (DMB ISH) lets
none pass. The compiler cannot move a load or store across it, because each is in a call that the interpreter makes.

Where there is no libatomic, two sections of one lock stand for it: its end is a release and its beginning an acquire
(on x86-64 a locked instruction; on aarch64 STLR or SWPL, then LDAXR or CASA), and a release is never passed by the
acquire that follows it."""


# -------------------------------------------------------------------------------------------------------- memory limit


def huge_pages_by_advice(root: str | os.PathLike[str] = "/") -> bool:
    """Whether shared memory gets huge pages where they are asked for, by faults alone: not by allocating a file."""
    try:
        text = (Path(root) / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return "[advise]" in text


def promises_are_kept(root: str | os.PathLike[str] = "/") -> bool:
    """Whether the kernel gives no more memory than it has (vm.overcommit_memory = 2): then a page of shared memory that
    is touched first and cannot be had is a SIGBUS, else the out-of-memory killer's matter."""
    try:
        return (Path(root) / "proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def memory_limit_bytes(root: str | os.PathLike[str] = "/") -> int:
    """The most memory this process can ever have: the machine's, or the lowest limit of its cgroup and of those above.

    memory.high counts too: shared memory cannot be reclaimed without swap, so above it every allocation is throttled
    to a crawl. `root` is where /proc and /sys are looked for.
    """
    base = Path(root)
    (total_kib,) = re.findall(r"(?m)^MemTotal:\s+(\d+) kB", (base / "proc/meminfo").read_text())
    limits = [int(total_kib) * 1024]
    for mount_point, path, names in _memory_cgroups(base):
        folder = base / mount_point.lstrip("/")
        for level in (folder, *(folder.joinpath(*path[: n + 1]) for n in range(len(path)))):
            limits += [limit for name in names if (limit := _limit_in(level / name)) is not None]
    return min(limits)


def _memory_cgroups(base: Path) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """For each hierarchy that limits our memory: mount point, our path below it, names of the files with limits."""
    try:
        memberships = (base / "proc/self/cgroup").read_text().splitlines()
        mounts = (base / "proc/self/mountinfo").read_text().splitlines()
    except FileNotFoundError:
        return []
    own: dict[str, str] = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    found: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for line in mounts:
        left, _, right = line.partition(" - ")
        mount_root, mount_point = (_unescape(text) for text in left.split()[3:5])
        kind, _, options = right.split()[:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # A container may see only a part of the tree: then our path begins with the mount's root, or lies outside.
        parts, above = Path(own[kind]).parts, Path(mount_root).parts
        inside = parts[: len(above)] == above and ".." not in parts
        names = ("memory.max", "memory.high") if kind == "cgroup2" else ("memory.limit_in_bytes",)
        found.append((mount_point, parts[len(above) :] if inside else (), names))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _limit_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:  # the root has no limits, or our path is one of another cgroup namespace
        return None
    return None if text == "max" else int(text)


# ------------------------------------------------------------------------------------------------------------- packets


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """One packet on a SOCK_SEQPACKET socket, whole or not at all. Raises OSError, BlockingIOError among them."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
    sock.sendmsg([data], [rights] if fds else [])


def receive_packet(
    sock: socket.socket,
    *,
    bytes_max: int = PACKET_BYTES_MAX,
    fds_max: int = 0,
    discard: Callable[[int], None] = os.close,
    leave_fds: bool = False,
) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it (close-on-exec, now the caller's).

    No bytes: the other end closed, or sent an empty packet. More bytes or descriptors than allowed: OSError (EMSGSIZE),
    and all descriptors are closed, by `discard`: what there is no room for the kernel would close here and now, and
    that can last (a socket that lingers). With `leave_fds` just that is done, and it is no error.
    """
    space = 0 if leave_fds else socket.CMSG_LEN(SCM_MAX_FD * 4)
    data, ancillary, flags, _ = sock.recvmsg(bytes_max, space, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for message in ancillary for fd in _fds_of(*message)]
    wrong = socket.MSG_TRUNC if leave_fds else socket.MSG_TRUNC | socket.MSG_CTRUNC
    if len(fds) > fds_max or flags & wrong:
        for fd in fds:
            discard(fd)
        raise OSError(errno.EMSGSIZE, f"a packet with over {bytes_max} bytes or {fds_max} descriptors")
    return data, fds


def peek_fds(sock: socket.socket, *, bytes_max: int = 1) -> list[int]:
    """Duplicates of the descriptors that come with the next packet, or with what is next received of `bytes_max` bytes
    of a stream, which stays where it is. Raises OSError (EMSGSIZE) when not all could be opened."""
    _, ancillary, flags, _ = sock.recvmsg(
        bytes_max, socket.CMSG_LEN(SCM_MAX_FD * 4), socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC
    )
    fds = [fd for message in ancillary for fd in _fds_of(*message)]
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMSGSIZE, "descriptors that cannot be opened")
    return fds


class Frames:
    """Packets over a SOCK_STREAM socket, for languages that have no other: each after its length in bytes (u32,
    little-endian), with its descriptors. What receives one reads no byte beyond it, so that a descriptor is always that
    of the packet with whose bytes it came."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._fds: list[int] = []

    def __repr__(self) -> str:
        return f"Frames({len(self._received)} bytes and {len(self._fds)} descriptors of the next packet)"

    @property
    def begun(self) -> bool:
        """A part of a packet is here."""
        return bool(self._received)

    @property
    def wanted(self) -> int:
        """Bytes to be received next. Raises OSError (EMSGSIZE) for a packet that is too long."""
        have = len(self._received)
        if have < FRAME_PREFIX_BYTES:
            return FRAME_PREFIX_BYTES - have
        length = int.from_bytes(self._received[:FRAME_PREFIX_BYTES], "little")
        if length > PACKET_BYTES_MAX:
            raise OSError(errno.EMSGSIZE, f"a packet with {length} bytes, over {PACKET_BYTES_MAX}")
        return FRAME_PREFIX_BYTES + length - have

    def receive(
        self,
        sock: socket.socket,
        *,
        fds_max: int = 0,
        discard: Callable[[int], None] = os.close,
        leave_fds: bool = False,
    ) -> tuple[bytes, list[int]] | None:
        """As `receive_packet`, of what is there; None: that is not all of it. No bytes: the other end closed, or sent
        an empty packet. Raises OSError, BlockingIOError among them."""
        data, fds = receive_packet(
            sock, bytes_max=self.wanted, fds_max=fds_max, discard=discard, leave_fds=leave_fds
        )
        self._fds += fds
        if len(self._fds) > fds_max:
            self.drop(discard)
            raise OSError(errno.EMSGSIZE, f"a packet with over {fds_max} descriptors")
        self._received += data
        if data and self.wanted:
            return None
        packet, fds = bytes(self._received[FRAME_PREFIX_BYTES:]), self._fds
        self._received, self._fds = bytearray(), []
        if not data:  # in the middle of a packet, if one had begun
            packet = b""
        return packet, fds

    def drop(self, discard: Callable[[int], None] = os.close) -> None:
        """The rest of a packet will not come."""
        fds, self._fds = self._fds, []
        self._received.clear()
        for fd in fds:
            discard(fd)


def send_frame(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """A packet for `Frames`. Raises OSError; BlockingIOError when the socket took a part of it or nothing, and then
    there can be no other."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
    frame = len(data).to_bytes(FRAME_PREFIX_BYTES, "little") + data
    if sock.sendmsg([frame], [rights] if fds else []) < len(frame):
        raise BlockingIOError(errno.EAGAIN, "the peer does not read")


def _fds_of(level: int, kind: int, data: Any) -> list[int]:
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        return []
    whole = len(data) - len(data) % 4
    return list(struct.unpack(f"{whole // 4}i", data[:whole]))
