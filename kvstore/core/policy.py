"""Which of a namespace's chunks goes first. The policy orders victims; the store owns pins, capacity and the final say.

    hints   what no queued job needs goes first, least recently used first; then what is needed, latest job first
            (AttentionStore, section 3.3: the eviction window is the part of the queue that is ranked here)
    lru     least recently used first, whatever the queue says
    fifo    in the order of arrival

Only resident, unpinned chunks are known here. A chunk comes back (`add`) when its last pin goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from kvstore.core.bulk import batch, needed
from kvstore.core.chunks import LISTED, NEEDED, NONE, TAIL, ChunkTable
from kvstore.core.namespaces import Namespace
from kvstore.types import NamespaceId


class Policy:
    def __init__(self, chunks: ChunkTable, kind: str, batch_min: int) -> None:
        assert kind in ("hints", "lru", "fifo"), kind
        self._chunks = chunks
        self._batch_min = batch_min
        self.kind = kind
        self.rank: dict[int, int] = {}
        """Position in the queue of the soonest job that needs a chunk row."""

    def __repr__(self) -> str:
        return f"Policy({self.kind}, {len(self.rank)} chunks ranked)"

    def add(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`rows` became evictable; they were used together and stand in chain order. Of chunks used together,
        descendants go before their ancestors, and tails that no manifest names before everything."""
        if len(rows) >= self._batch_min and self.kind != "fifo":
            batch.evictable(self, self._chunks, namespace, rows)
        else:
            self.add_each(namespace, rows)

    def add_each(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`add`, one by one."""
        chunks = self._chunks
        for row in reversed(rows):
            if row in self.rank:
                self._want(namespace, row)
            elif chunks.flags[row] & TAIL and not chunks.refs[row]:
                chunks.link_oldest(namespace.recency, row)
            else:
                chunks.link_newest(namespace.recency, row)
            if self.kind == "fifo":
                heapq.heappush(namespace.order, (chunks.born_at[row], row))

    def put_back(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`rows` became evictable again without having been used: to the end of the list that is nearer in time. They
        stand in chain order, and as with `add` descendants go before their ancestors."""
        chunks = self._chunks
        if len(rows) >= self._batch_min and self.kind != "fifo" and self.rank.keys().isdisjoint(rows):
            needed.put_back(self, chunks, namespace, batch.as_rows(rows))
            return
        oldest, newest = namespace.recency.oldest, namespace.recency.newest
        long_unused: list[int] = []
        for row in reversed(rows):
            used_at = chunks.used_at[row]
            near_oldest = (
                oldest != NONE and used_at - chunks.used_at[oldest] < chunks.used_at[newest] - used_at
            )
            if row in self.rank or not near_oldest or self.kind == "fifo":
                self.add(namespace, (row,))
            else:
                long_unused.append(row)
        for row in reversed(long_unused):
            chunks.link_oldest(namespace.recency, row)

    def remove(self, namespace: Namespace, row: int) -> None:
        chunks = self._chunks
        if chunks.flags[row] & LISTED:
            chunks.unlink(namespace.needed if chunks.flags[row] & NEEDED else namespace.recency, row)
            chunks.flags[row] &= ~NEEDED

    def victims(self, namespace: Namespace, limit: int, sooner_than: int = -1) -> Iterator[int]:
        """At most `limit` rows, the next victim first. Of chunks that queued jobs need, only those of jobs after
        position `sooner_than`: a prefetch never pushes out what is needed before it."""
        if self.kind == "fifo":
            yield from self._by_order(namespace, limit, -1)
            return
        row = namespace.recency.oldest
        while row != NONE and limit > 0:
            following = self._chunks.newer[row]
            yield row
            row = following
            limit -= 1
        yield from self._by_order(namespace, limit, sooner_than)

    def oldest_use(self, namespace: Namespace) -> int | None:
        """When the next victim was last used."""
        for row in self.victims(namespace, 1):
            return self._chunks.used_at[row]
        return None

    def set_ranks(self, namespaces: Mapping[NamespaceId, Namespace], rank: dict[int, int]) -> None:
        """The queue changed: `rank` is all that is needed now."""
        if self.kind != "hints":
            return
        chunks = self._chunks
        before, self.rank = self.rank, rank
        if len(before) + len(rank) >= self._batch_min:
            needed.changed(self, chunks, namespaces, before, rank)
        else:
            self._changed(namespaces, before, rank)
        for namespace in namespaces.values():
            heapq.heapify(namespace.order)

    def _changed(
        self, namespaces: Mapping[NamespaceId, Namespace], before: Mapping[int, int], rank: Mapping[int, int]
    ) -> None:
        """`needed.changed`, one by one."""
        chunks = self._chunks
        flags = chunks.flags
        gone: dict[NamespaceId, list[int]] = {}
        for row in before:
            if row not in rank and flags[row] & NEEDED:
                gone.setdefault(NamespaceId(chunks.namespace[row]), []).append(row)
        for number, rows in gone.items():
            for row in rows:
                self.remove(namespaces[number], row)
            self.put_back(namespaces[number], rows)
        for namespace in namespaces.values():
            namespace.order.clear()
        orders = {namespace.id: namespace.order for namespace in namespaces.values()}
        for row, position in rank.items():
            if flags[row] & NEEDED:
                orders[NamespaceId(chunks.namespace[row])].append((-position, row))
            elif flags[row] & LISTED:
                namespace = namespaces[NamespaceId(chunks.namespace[row])]
                if chunks.ready[row] == namespace.shards:
                    self.remove(namespace, row)
                    self._link_needed(namespace, row)
                    namespace.order.append((-position, row))

    def forget(self, row: int) -> None:
        """The row's bytes are gone, or its number is about to be reused."""
        self.rank.pop(row, None)

    def _link_needed(self, namespace: Namespace, row: int) -> None:
        self._chunks.link_newest(namespace.needed, row)
        self._chunks.flags[row] |= NEEDED

    def _want(self, namespace: Namespace, row: int) -> None:
        self._link_needed(namespace, row)
        heapq.heappush(namespace.order, (-self.rank[row], row))

    def _by_order(self, namespace: Namespace, limit: int, sooner_than: int) -> Iterator[int]:
        """From the heap, skipping stale entries; what is not evicted by the caller goes back in."""
        chunks = self._chunks
        seen: list[tuple[int, int]] = []
        try:
            while namespace.order and len(seen) < limit:
                sort_key, row = namespace.order[0]
                if self._stale(namespace, sort_key, row):
                    heapq.heappop(namespace.order)
                    continue
                if self.kind != "fifo" and -sort_key <= sooner_than:
                    return
                seen.append(heapq.heappop(namespace.order))
                yield row
        finally:
            for sort_key, row in seen:
                if chunks.flags[row] & LISTED and not self._stale(namespace, sort_key, row):
                    heapq.heappush(namespace.order, (sort_key, row))

    def _stale(self, namespace: Namespace, sort_key: int, row: int) -> bool:
        chunks = self._chunks
        if chunks.namespace[row] != namespace.id or not chunks.flags[row] & LISTED:
            return True
        if self.kind == "fifo":
            return chunks.ready[row] != namespace.shards or chunks.born_at[row] != sort_key
        return not chunks.flags[row] & NEEDED or self.rank.get(row) != -sort_key
