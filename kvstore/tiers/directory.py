"""Who may use the directory of the SSD tier: one process at a time, held with flock on `<ssd_dir>/lock`. The kernel
drops the lock when the process dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from kvstore.config import LOCK_FILE
from kvstore.errors import ConfigError, Exhausted
from kvstore.tiers.disk_port import describe, disk_result
from kvstore.types import DiskResult


class DirectoryLock:
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
