"""Which of a namespace's chunks goes first. The policy orders victims; the store owns pins, capacity and the final say.

Only resident, unpinned chunks are known here. A chunk comes back (`add`) when its last pin goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.chunks import LISTED, NONE, TAIL, ChunkTable
from kvstore.core.namespaces import Namespace


class LeastRecentlyUsed:
    """Oldest use first; of chunks used together, descendants before their ancestors, and tails that no manifest names
    before everything."""

    def __init__(self, chunks: ChunkTable) -> None:
        self._chunks = chunks

    def add(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`rows` became evictable; they were used together and stand in chain order."""
        chunks = self._chunks
        for row in reversed(rows):
            if chunks.flags[row] & TAIL and not chunks.refs[row]:
                chunks.link_oldest(namespace.recency, row)
            else:
                chunks.link_newest(namespace.recency, row)

    def put_back(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """`rows` became evictable again without having been used: to the end of the list that is nearer in time."""
        chunks = self._chunks
        for row in rows:
            oldest, newest = namespace.recency.oldest, namespace.recency.newest
            used_at = chunks.used_at[row]
            if oldest != NONE and used_at - chunks.used_at[oldest] <= chunks.used_at[newest] - used_at:
                chunks.link_oldest(namespace.recency, row)
            else:
                chunks.link_newest(namespace.recency, row)

    def remove(self, namespace: Namespace, row: int) -> None:
        if self._chunks.flags[row] & LISTED:
            self._chunks.unlink(namespace.recency, row)

    def victim(self, namespace: Namespace) -> int:
        """The row to evict next, or NONE."""
        return namespace.recency.oldest

    def oldest_use(self, namespace: Namespace) -> int | None:
        """When the next victim was last used."""
        row = namespace.recency.oldest
        return None if row == NONE else self._chunks.used_at[row]
