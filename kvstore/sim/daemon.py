"""`python -m kvstore.sim.daemon FLAGS`: the real `kvstored`, with the same flags, in a world that a test controls.

Its disk is a `FaultyDisk` where the environment names a control file, and reads no faster than it says. Before it ends
in good order it checks all invariants: a violation is exit status 70.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from kvstore.__main__ import main
from kvstore.sim.faulty_disk import FaultyDisk
from kvstore.sim.integrity import check_integrity
from kvstore.tiers.disk_port import Buffer, Disk, RealDisk

FAULTS = "ATTNSTORE_TEST_FAULTS"
"""Environment variable: path of the control file of a `FaultyDisk`."""
READ_BYTES_PER_S = "ATTNSTORE_TEST_READ_BYTES_PER_S"
"""Environment variable: how fast the disk reads, all threads together. Page caches hide what an SSD would take."""


class ThrottledDisk(RealDisk):
    """Reads take as long as from a disk of `bytes_per_s`, which serves one read after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        count = super().read(fd, buffers, offset)
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))
        return count


def disk_of(environment: dict[str, str]) -> Disk:
    rate = environment.get(READ_BYTES_PER_S)
    disk: Disk = ThrottledDisk(float(rate)) if rate else RealDisk()
    control = environment.get(FAULTS)
    return FaultyDisk(disk, control) if control else disk


def run() -> None:
    """Never returns."""
    main(disk=disk_of(dict(os.environ)), at_end=check_integrity)


if __name__ == "__main__":
    run()
