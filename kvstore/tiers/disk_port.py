"""The disk port: the only place that opens, reads, writes and syncs files of the SSD tier (LMDB does its own).

`RealDisk` is the operating system. Disks on their bad days: `kvstore/sim/faulty_disk.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Literal, Protocol

from kvstore.types import DiskResult

Buffer = bytes | bytearray | memoryview
IndexCall = Literal["open", "begin", "get", "put", "delete", "commit", "committed", "read"]

SYNC_FILE_RANGE_WRITE = 2
"""From linux/fs.h."""

# It lets go of the interpreter's lock, as every function of a CDLL does.
_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Disk(Protocol):
    """Positional, blocking calls that do not hold the interpreter's lock. All raise OSError; none retries.

    A descriptor stays open from `open` to `close`, because a failed write-back is reported once per open file: who
    reopened before syncing would never hear of it.
    """

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """Read-write. With `create` the file must not exist. `direct` bypasses the page cache: offsets, lengths and
        addresses are then multiples of 4096."""

    def close(self, fd: int) -> None: ...

    def allocate(self, fd: int, size: int) -> None:
        """Gives the file `size` bytes of space, so that writing them later cannot run out of it."""

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes read into `buffers`: fewer than they hold at the end of the file, or after an interruption."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int: ...

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        """Has the kernel begin to write what is dirty there, and waits for nothing: `sync` has less to do. Proves
        nothing; what goes wrong with it is reported by the next `sync`."""

    def sync(self, fd: int) -> None:
        """Data, and of the metadata what is needed to find it."""

    def sync_directory(self, path: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def names(self, path: str) -> list[str]: ...

    def size(self, fd: int) -> int: ...

    def is_at(self, fd: int, path: str) -> bool:
        """Whether `path` names the open file still: it was neither removed, nor renamed, nor replaced by another."""

    def free_bytes(self, path: str) -> int:
        """What an unprivileged writer could still use of the file system."""

    def index(self, call: IndexCall) -> None:
        """Called before each call of LMDB, which does its own I/O (after it: "committed"). Does nothing, unless a test
        wants the call to fail or to hang."""


class RealDisk:
    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        if _sync_file_range(fd, offset, size, SYNC_FILE_RANGE_WRITE):
            number = ctypes.get_errno()
            # Interrupted, or a file system that cannot be told so: the sync does the rest, or all of it.
            if number not in (errno.EINTR, errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number))

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_at(self, fd: int, path: str) -> bool:
        try:
            named = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(named, os.fstat(fd))

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def index(self, call: IndexCall) -> None:
        pass


def read_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fills `buffers` from `offset` on, in as many calls as it takes; returns the bytes read: fewer only at the end of
    the file."""
    done, total = 0, sum(map(len, buffers))
    while done < total:
        count = disk.read(fd, buffers if not done else _rest(buffers, done), offset + done)
        if count == 0:
            break
        done += count
    return done


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Writes `buffers` at `offset`, in as many calls as it takes."""
    done, total = 0, sum(map(len, buffers))
    while done < total:
        count = disk.write(fd, buffers if not done else _rest(buffers, done), offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the disk took no byte")
        done += count


def disk_result(problem: OSError) -> DiskResult:
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return DiskResult.NO_SPACE if full else DiskResult.IO_ERROR


def describe(problem: OSError) -> str:
    """ "EIO: Input/output error": what `DiskDone.why` says."""
    name = errno.errorcode.get(problem.errno or 0, "OSError")
    return f"{name}: {problem.strerror or problem}"


def _rest(buffers: Sequence[Buffer], done: int) -> list[memoryview]:
    """What lies behind the first `done` bytes."""
    rest = []
    for buffer in buffers:
        view = memoryview(buffer)
        rest.append(view[done:])
        done = max(0, done - len(view))
    return [view for view in rest if len(view)]
