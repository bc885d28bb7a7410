"""Chunks that may leave a pool, in the order in which they go: a namespace's in DRAM, those of one slot size on SSD.

What no queued job needs stands in `recency`, what is needed in `ranked`. `Policy` puts them there and says who goes
next; nobody else walks these lists.
"""

from __future__ import annotations

import heapq
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


class Candidates:
    __slots__ = ("by_arrival", "ranked", "recency")

    def __init__(self) -> None:
        self.recency = LinkedRows()
        """Those that no queued job needs: the next to go first."""
        self.ranked = Ranked()
        """Those that queued jobs need, the chunk that is needed last first; or all, by arrival."""
        self.by_arrival = False

    def __repr__(self) -> str:
        return f"Candidates({self.recency.count} by recency, {len(self.ranked)} ranked)"

    @property
    def count(self) -> int:
        return self.recency.count + len(self.ranked)


class Cold:
    """Chunks on SSD only and not promoting: one `Candidates` for the namespaces whose shards take slots of equal sizes
    there. A chunk of another size gives way in vain."""

    __slots__ = ("by_sizes",)

    def __init__(self) -> None:
        self.by_sizes: dict[frozenset[int], Candidates] = {}

    def __repr__(self) -> str:
        return f"Cold({self.count} chunks of {len(self.by_sizes)} kinds)"

    @property
    def count(self) -> int:
        return sum(candidates.count for candidates in self.by_sizes.values())

    def of(self, sizes: frozenset[int]) -> Candidates:
        """Of chunks with shards of these slot sizes, in bytes."""
        return self.by_sizes.setdefault(sizes, Candidates())

    def with_slots_of(self, slot_bytes: int) -> list[Candidates]:
        return [candidates for sizes, candidates in self.by_sizes.items() if slot_bytes in sizes]

    def keep(self, used: Sequence[Candidates]) -> None:
        """No namespace uses the others any more."""
        kept = set(map(id, used))
        self.by_sizes = {sizes: mine for sizes, mine in self.by_sizes.items() if id(mine) in kept}
