"""What policies share: rows by a key, and what everybody may know of the candidates that a policy keeps."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvstore.core.chunks import LinkedRows

STALE_IN_HEAP_MAX = 256
"""Beside as many as there are rows: beyond, the heap is made anew."""


class Ranked:
    """Rows by a key, the smallest first. A heap beside a dict: a row that leaves keeps its entry in the heap, which is
    skipped when it comes up, and swept out when such entries outnumber the others."""

    __slots__ = ("_heap", "keys")

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"Ranked({len(self.keys)} rows, {len(self._heap)} entries)"

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def entries(self) -> int:
        """Of the heap, the stale ones included."""
        return len(self._heap)

    def add(self, row: int, key: int) -> None:
        self.keys[row] = key
        heapq.heappush(self._heap, (key, row))
        self._sweep()

    def remove(self, row: int) -> None:
        del self.keys[row]
        self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self.keys) + STALE_IN_HEAP_MAX:
            self._heap = [(key, row) for row, key in self.keys.items()]
            heapq.heapify(self._heap)

    def replace(self, rows: Sequence[int], keys: Sequence[int]) -> None:
        """These alone from now on; the keys ascend."""
        self.keys = dict(zip(rows, keys, strict=True))
        self._heap = list(zip(keys, rows, strict=True))  # what is sorted is a heap

    def smallest(self, limit: int, below: int | None = None) -> Iterator[int]:
        """At most `limit` rows, of those with a key smaller than `below`. Rows may leave meanwhile."""
        seen: list[tuple[int, int]] = []
        try:
            while self._heap and len(seen) < limit:
                entry = self._heap[0]
                key, row = entry
                again = bool(seen) and entry <= seen[-1] and entry in seen
                if again or self.keys.get(row) != key:
                    heapq.heappop(self._heap)
                    continue
                if below is not None and key >= below:
                    return
                seen.append(heapq.heappop(self._heap))
                yield row
        finally:
            for key, row in seen:
                if self.keys.get(row) == key:
                    heapq.heappush(self._heap, (key, row))


class Candidates(ABC):
    """Chunks that may leave a pool: a namespace's in DRAM, those of one slot size on SSD. A policy makes them, and it
    alone knows in which order they go."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count} rows, {self.unneeded} of them unneeded)"

    @property
    @abstractmethod
    def lists(self) -> Sequence[LinkedRows | Ranked]:
        """All that they are kept in, for checkers. A row is in one of them."""

    @property
    @abstractmethod
    def unneeded(self) -> int:
        """How many no queued job needs."""

    @property
    def count(self) -> int:
        return sum(rows.count if isinstance(rows, LinkedRows) else len(rows) for rows in self.lists)
