"""A disk on its bad days: a disk port whose calls fail, hang, lie or forget as a small control file says.

Stands in front of a real disk, in tests and inside a daemon that was started by `python -m kvstore.sim.daemon`.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.tiers.disk_port import Buffer, Disk, IndexCall, write_all

POLL_S = 0.01


@dataclass(slots=True)
class Fault:
    """One line of the control file."""

    calls: tuple[str, ...]
    """Of: open, allocate, read, write, writeback, sync, sync_directory, unlink, and index_ before an `IndexCall`."""
    do: str
    """An errno's name ("EIO", "ENOSPC"): the call fails with it. "hang": it does not go on until the control file no
    longer says so. "delay": it starts after `ms`. "flip": a bit in the middle of what was read, or of what is written,
    is the other one. "tear": only the first half of what is written is, and success is reported. "hold": what is
    written is kept in memory until the file is synced, so that kill -9 loses it as a power cut would. "part": the first
    half of what is written reaches the file, the rest is held: what a power cut tears. "lie": a sync reports success
    and does nothing."""
    files: str = "*"
    """Pattern for the file's name, without its directory; "index" for the calls of LMDB."""
    skip: int = 0
    """How many calls that match go by before the fault strikes."""
    count: int = 0
    """How many calls it then strikes; 0: all."""
    ms: int = 0
    seen: int = field(default=0, compare=False)

    def strikes(self, call: str, name: str) -> bool:
        if call not in self.calls or not fnmatch.fnmatch(name, self.files):
            return False
        self.seen += 1
        return self.skip < self.seen and (self.count == 0 or self.seen <= self.skip + self.count)


class FaultyDisk:
    """For tests: a disk whose calls fail, hang, lie or forget as the control file says, a JSON list of `Fault`s:

        [{"calls": ["read"], "files": "slab-*", "do": "EIO", "skip": 2, "count": 1}]

    The file is read again before each call, so that a test changes the weather by replacing it (rename a new one over
    it: a half-written one would be read). A missing file is fair weather; a fault that stays as it is keeps its count.
    Control files are trusted: what cannot be read as such is an error of the test.
    """

    def __init__(self, disk: Disk, control: str) -> None:
        self._disk = disk
        self._control = control
        self._lock = threading.Lock()
        self._text = ""
        self._faults: list[Fault] = []
        self._names: dict[int, str] = {}
        self._held: dict[int, list[tuple[int, bytes]]] = {}
        self.waiting = 0
        """Calls that hang now."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        name = os.path.basename(path)
        self._strike("open", name)
        fd = self._disk.open(path, create=create, direct=direct)
        with self._lock:
            self._names[fd] = name
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._names.pop(fd, None)
            self._held.pop(fd, None)
        self._disk.close(fd)

    def allocate(self, fd: int, size: int) -> None:
        self._strike("allocate", self._name(fd))
        self._disk.allocate(fd, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        deeds = self._strike("read", self._name(fd))
        count = self._disk.read(fd, buffers, offset)
        with self._lock:
            held = list(self._held.get(fd, ()))
        if held or "flip" in deeds:
            data = bytearray(b"".join(bytes(buffer) for buffer in buffers)[:count])
            for start, piece in held:
                low, high = max(start, offset), min(start + len(piece), offset + count)
                if low < high:
                    data[low - offset : high - offset] = piece[low - start : high - start]
            _scatter(_flipped(data) if "flip" in deeds else data, buffers)
        return count

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        deeds = self._strike("write", self._name(fd))
        if not deeds:
            return self._disk.write(fd, buffers, offset)
        data = bytearray(b"".join(bytes(buffer) for buffer in buffers))
        size = len(data)
        if "flip" in deeds:
            data = _flipped(data)
        if "tear" in deeds:
            data = data[: size // 2 // 512 * 512]  # whole sectors, as a disk would
        if deeds & {"hold", "part"}:
            half = size // 2 // 512 * 512 if "part" in deeds else 0
            with self._lock:
                self._held.setdefault(fd, []).append((offset + half, bytes(data[half:])))
            data = data[:half]
        if data:
            with _aligned(data) as copy:
                write_all(self._disk, fd, [copy], offset)
        return size

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        self._strike("writeback", self._name(fd))
        self._disk.start_writeback(fd, offset, size)

    def sync(self, fd: int) -> None:
        if "lie" in self._strike("sync", self._name(fd)):
            return
        with self._lock:
            held = self._held.pop(fd, [])
        for offset, data in held:
            with _aligned(data) as copy:
                write_all(self._disk, fd, [copy], offset)
        self._disk.sync(fd)

    def sync_directory(self, path: str) -> None:
        self._strike("sync_directory", os.path.basename(path))
        self._disk.sync_directory(path)

    def unlink(self, path: str) -> None:
        self._strike("unlink", os.path.basename(path))
        self._disk.unlink(path)

    def names(self, path: str) -> list[str]:
        return self._disk.names(path)

    def size(self, fd: int) -> int:
        return self._disk.size(fd)

    def is_at(self, fd: int, path: str) -> bool:
        return self._disk.is_at(fd, path)

    def free_bytes(self, path: str) -> int:
        return self._disk.free_bytes(path)

    def index(self, call: IndexCall) -> None:
        self._strike(f"index_{call}", "index")
        self._disk.index(call)

    def _name(self, fd: int) -> str:
        with self._lock:
            return self._names[fd]

    def _strike(self, call: str, name: str) -> set[str]:
        """Raises, waits, or returns what is to be done to the call's bytes."""
        with self._lock:
            struck = [fault for fault in self._read_control() if fault.strikes(call, name)]
        deeds = set()
        for fault in struck:
            if fault.do == "hang":
                self._hang(fault)
            elif fault.do == "delay":
                time.sleep(fault.ms / 1000)
            elif fault.do in ("flip", "tear", "hold", "part", "lie"):
                deeds.add(fault.do)
            else:
                raise OSError(getattr(errno, fault.do), f"a test wants {call} of {name} to fail")
        return deeds

    def _hang(self, fault: Fault) -> None:
        with self._lock:
            self.waiting += 1
        while True:
            with self._lock:
                if fault not in self._read_control():
                    self.waiting -= 1
                    return
            time.sleep(POLL_S)

    def _read_control(self) -> list[Fault]:
        try:
            with open(self._control, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            text = ""
        if text != self._text:
            old, self._text = self._faults, text
            self._faults = [_parse(item) for item in json.loads(text or "[]")]
            for fault in self._faults:
                fault.seen = next((known.seen for known in old if known == fault), 0)
        return self._faults


def _parse(item: dict[str, Any]) -> Fault:
    return Fault(**{**item, "calls": tuple(item["calls"])})


def _flipped(data: bytearray) -> bytearray:
    if data:
        data[len(data) // 2] ^= 0x10
    return data


@contextmanager
def _aligned(data: bytes | bytearray) -> Iterator[memoryview]:
    """A copy that begins on a page boundary, as direct I/O wants it."""
    room = np.empty(len(data) + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    copy = room[start : start + len(data)]
    copy[:] = np.frombuffer(data, np.uint8)
    yield copy.data


def _scatter(data: bytearray, buffers: Sequence[Buffer]) -> None:
    done = 0
    for buffer in buffers:
        view = memoryview(buffer)
        piece = data[done : done + len(view)]
        view[: len(piece)] = piece
        done += len(view)
