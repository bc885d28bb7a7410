"""A worker's staging memory: where it puts bytes that the daemon copies into the arena on commit.

First fit over a sorted list of free ranges. Saves end roughly in the order in which they began, so the list stays
short, and a bound on batches in flight bounds it.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore import memory

ALIGNMENT = 64
"""A cache line, and what vector instructions like; pieces of a page or more start at a page."""
PAGE = 4096


def footprint(lengths: Sequence[int]) -> int:
    """Bytes of staging memory that pieces of these lengths take together."""
    return sum(_rounded(length) for length in lengths)


def _rounded(length: int) -> int:
    alignment = PAGE if length >= PAGE else ALIGNMENT
    return -(-length // alignment) * alignment


class FreeList:
    """Ranges of [0, size). Thread-safe; free + taken = size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_bytes = size
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, int]] = deque()
        """Given back by destructors, and not in the list yet."""
        self._free: list[tuple[int, int]] = [(0, size)] if size else []
        """(start, length), by start, never adjacent."""

    def __repr__(self) -> str:
        return f"FreeList({self.free_bytes} of {self.size} bytes free in {len(self._free)} ranges)"

    def take(self, length: int) -> int | None:
        """Start of a range of `length` bytes (a multiple of ALIGNMENT), page-aligned when a page or more; None: no
        room."""
        assert length > 0 and length % ALIGNMENT == 0, length
        alignment = PAGE if length >= PAGE else ALIGNMENT
        while self._dropped:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self.give_back(*self._dropped.popleft())
        with self._lock:
            for index, (start, free) in enumerate(self._free):
                aligned = -(-start // alignment) * alignment
                if aligned + length <= start + free:
                    before = (start, aligned - start)
                    after = (aligned + length, start + free - aligned - length)
                    self._free[index : index + 1] = [piece for piece in (before, after) if piece[1]]
                    self.free_bytes -= length
                    return aligned
        return None

    def drop(self, start: int, length: int) -> None:
        """Give back, for destructors, which may run anywhere and must take no lock."""
        self._dropped.append((start, length))

    def give_back(self, start: int, length: int) -> None:
        with self._lock:
            index = bisect_left(self._free, (start, 0))
            before = self._free[index - 1] if index else (0, 0)
            after = self._free[index] if index < len(self._free) else (self.size, 0)
            assert sum(before) <= start and start + length <= after[0], f"given back twice: {start}, {length}"
            self.free_bytes += length
            if before[1] and sum(before) == start:
                del self._free[index - 1]
                start, length = before[0], before[1] + length
            if after[1] and start + length == after[0]:
                self._free.remove(after)
                length += after[1]
            insort(self._free, (start, length))


class Staging:
    """Mapped staging memory of one connection; the daemon made it and reads it. Unmapped when the last buffer goes."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Does not take over `fd`. Raises OSError."""
        self._mapping = memory.map_shared(fd, size_bytes, writable=True)
        self.array: npt.NDArray[np.uint8] = self._mapping.array
        self.space = FreeList(size_bytes)

    def __repr__(self) -> str:
        return f"Staging({self.space!r})"
