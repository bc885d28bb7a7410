"""Which segments of the arena this process has mapped, for one connection to one daemon.

A lease holds the `Segment` objects it reads, and every view of their bytes holds the mapping. So "in use" is what the
interpreter counts anyway: a retired segment is unmapped when its last lease, batch or view goes, and only then do we
tell the daemon.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore import memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One mapped segment. `data` is writable only under protection `group`."""

    number: int
    data: npt.NDArray[np.uint8]
    cells: memoryview
    """Of the header, as numbers of 64 bits: 2 n is the generation of cell n, 2 n + 1 its tag. Indexing one loads it
    from shared memory."""


class Registrar(Protocol):
    """Whoever makes mapped segments known to a device, which then copies from them by itself."""

    def mapped(self, number: int, data: npt.NDArray[np.uint8]) -> None:
        """A segment has been mapped, and nobody has seen it yet; no view of `data` is kept. Raises OSError: it is not
        to be used, and is unmapped again."""

    def last_view_gone(self, address: int, unmap: Callable[[], None]) -> None:
        """Of a segment that was mapped at `address`: see `memory.LastView`."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    segment: Segment
    data: memory.SharedMapping
    header: memory.SharedMapping


class Mappings:
    """`boot_id` is what every header must carry; `writable` whether segments are mapped for writing in place."""

    def __init__(self, *, boot_id: bytes, writable: bool) -> None:
        self._registrar: Registrar | None = None
        self._boot_id = boot_id
        self._writable = writable
        self._lock = threading.Lock()
        self._mapped: dict[int, _Mapped] = {}
        self._leaving: list[tuple[int, memory.SharedMapping, memory.SharedMapping]] = []
        self._retired_early: set[int] = set()
        self._asked: list[int] = []
        """Segments in requests that are under way, one entry per request."""
        self._closed = False
        self._paging_in = threading.Semaphore()
        """Held by the thread that does it. Not the lock: a child that is forked meanwhile needs that one."""

    def __repr__(self) -> str:
        return f"Mappings({len(self._mapped)} mapped, {len(self._leaving)} leaving)"

    def get(self, segment: int) -> Segment | None:
        mapped = self._mapped.get(segment)
        return mapped.segment if mapped else None

    def register_with(self, registrar: Registrar) -> None:
        """From now on, and of what is mapped already. Raises OSError."""
        with self._lock:
            self._registrar = registrar
            for number, mapped in self._mapped.items():
                self._register(number, mapped.data)

    def missing(self, segments: Iterable[int]) -> list[int]:
        return [number for number in dict.fromkeys(segments) if number not in self._mapped]

    def asking(self, segments: Sequence[int]) -> None:
        """A request for these is about to be sent. Ends with `install` and `answered`."""
        with self._lock:
            self._asked.extend(segments)

    def answered(self, segments: Sequence[int]) -> None:
        with self._lock:
            for number in segments:
                self._asked.remove(number)
            self._retired_early.intersection_update(self._asked)

    def install(self, number: int, size_bytes: int, cells: int, data_fd: int, header_fd: int) -> bool:
        """Map what the daemon handed over and close both descriptors. False: not mapped, and the daemon must be told
        so (the segment was retired meanwhile, memory is short, or the header is not what it should be)."""
        try:
            with self._lock:
                if number in self._mapped:
                    return True
                if self._closed or number in self._retired_early:
                    return False
                mapped = self._mapped[number] = self._map(number, size_bytes, cells, data_fd, header_fd)
                # Where pages are missing, it would be us who allocates them.
                if os.fstat(data_fd).st_blocks * 512 >= size_bytes:
                    self._page_in(mapped.data)
                return True
        except (OSError, ValueError) as problem:
            log.error("segment %d could not be mapped: %s", number, problem)
            return False
        finally:
            os.close(data_fd)
            os.close(header_fd)

    def _map(self, number: int, size_bytes: int, cells: int, data_fd: int, header_fd: int) -> _Mapped:
        header = memory.map_shared(header_fd, memory.header_bytes(cells))
        found = memory.read_header(header.array)
        expected = memory.SegmentHeader(cells=cells, segment_bytes=size_bytes, boot_id=self._boot_id)
        if found != expected:
            raise ValueError(f"its header says {found}, expected {expected}")
        data = memory.map_shared(data_fd, size_bytes, writable=self._writable)
        self._register(number, data)
        segment = Segment(number, data.array, memory.cells_of(header.array, cells).reshape(-1).data)
        return _Mapped(segment, data, header)

    def _register(self, number: int, data: memory.SharedMapping) -> None:
        if self._registrar is not None:
            self._registrar.mapped(number, data.array)
            data.unmap_by(self._registrar.last_view_gone)

    def _page_in(self, mapping: memory.SharedMapping) -> None:
        """Have a thread enter its pages in our page table (0.1 s per GiB): copies then find them there, instead of
        taking a page fault for each. Without the thread, copies are slower at first."""

        def run() -> None:
            with self._paging_in:
                mapping.map_pages(cancelled=lambda: self._closed)

        with suppress(RuntimeError):  # no more threads
            threading.Thread(target=run, name="kvstore-page-in", daemon=True).start()

    def retire(self, segments: Iterable[int]) -> list[int]:
        """The daemon wants these back. Returns those that are not mapped now; `collect` tells of the others later."""
        gone = []
        with self._lock:
            for number in segments:
                mapped = self._mapped.pop(number, None)
                if mapped is not None:
                    mapped.data.close()
                    mapped.header.close()
                    self._leaving.append((number, mapped.data, mapped.header))
                elif number in self._asked:
                    self._retired_early.add(number)  # its descriptors may be on their way
                elif all(number != leaving for leaving, _, _ in self._leaving):
                    gone.append(number)
        return gone

    def collect(self) -> list[int]:
        """Retired segments whose last user has gone since the last look."""
        if not self._leaving:
            return []
        with self._lock:
            gone = [n for n, data, header in self._leaving if data.unmapped and header.unmapped]
            self._leaving = [entry for entry in self._leaving if entry[0] not in gone]
        return gone

    def retire_all(self) -> None:
        """The connection ends: give up everything; what a lease or view still uses goes with it."""
        with self._lock:
            self._closed = True
            everything = list(self._mapped)
        self.retire(everything)
