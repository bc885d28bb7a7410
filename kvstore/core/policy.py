"""Which chunk goes first, from DRAM and from SSD. The policy orders victims; the store owns pins, capacity and the
final say.

    hints   what no queued job needs goes first, least recently used first; then what is needed, latest job first, and
            of one job the end of the chain before its beginning (AttentionStore, section 3.3: the eviction window is
            the part of the queue that is ranked here)
    lru     least recently used first, whatever the queue says
    fifo    in the order of arrival

Only chunks that may go are known here: in DRAM those that are resident and unpinned, which come back (`add`) when their
last pin goes; on SSD those that are there alone and not promoting, in the order in which they left DRAM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from kvstore.core.bulk import batch, needed
from kvstore.core.candidates import Candidates
from kvstore.core.chunks import LISTED, NONE, RANKED, STORED, TAIL, ChunkTable
from kvstore.core.namespaces import Namespace
from kvstore.types import NamespaceId


class Policy:
    def __init__(self, chunks: ChunkTable, kind: str, batch_min: int) -> None:
        assert kind in ("hints", "lru", "fifo"), kind
        self._chunks = chunks
        self._batch_min = batch_min
        self.kind = kind
        self.rank: dict[int, int] = {}
        """By chunk row, of what the queue needs: 0 is needed first. Jobs follow each other, and chunks of one job stand
        in the order of its chain."""
        self._job_ends: Sequence[int] = ()
        """The last rank of each job that has any, ascending."""

    def __repr__(self) -> str:
        return f"Policy({self.kind}, {len(self.rank)} chunks ranked)"

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`rows` may go from now on; they were used together and stand in chain order. Of chunks used together,
        descendants go before their ancestors, and tails that no manifest names before everything."""
        if len(rows) >= self._batch_min and not candidates.by_arrival:
            batch.evictable(self, self._chunks, candidates, rows)
        else:
            self.add_each(candidates, rows)

    def add_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`add`, one by one."""
        chunks = self._chunks
        for row in reversed(rows):
            if candidates.by_arrival:
                self._rank(candidates, row, chunks.born_at[row])
            elif row in self.rank:
                self._rank(candidates, row, -self.rank[row])
            elif chunks.flags[row] & TAIL and not chunks.refs[row]:
                chunks.link_oldest(candidates.recency, row)
            else:
                chunks.link_newest(candidates.recency, row)

    def add_last(self, candidates: Candidates, row: int) -> None:
        """`row` goes after all others, unless a queued job needs any of these later, or none needs it."""
        if row in self.rank:
            self._rank(candidates, row, -self.rank[row])
        else:
            self._chunks.link_newest(candidates.recency, row)

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`rows` may go again without having been used: to the end of the list that is nearer in time. They stand in
        chain order, and as with `add` descendants go before their ancestors."""
        chunks = self._chunks
        if len(rows) >= self._batch_min and not candidates.by_arrival and self.rank.keys().isdisjoint(rows):
            needed.put_back(self, chunks, candidates, batch.as_rows(rows))
            return
        oldest, newest = candidates.recency.oldest, candidates.recency.newest
        long_unused: list[int] = []
        for row in reversed(rows):
            used_at = chunks.used_at[row]
            near_oldest = (
                oldest != NONE and used_at - chunks.used_at[oldest] < chunks.used_at[newest] - used_at
            )
            if row in self.rank or not near_oldest or candidates.by_arrival:
                self.add(candidates, (row,))
            else:
                long_unused.append(row)
        for row in reversed(long_unused):
            chunks.link_oldest(candidates.recency, row)

    def remove(self, candidates: Candidates, row: int) -> None:
        chunks = self._chunks
        if chunks.flags[row] & RANKED:
            candidates.ranked.remove(row)
            chunks.flags[row] &= ~(RANKED | LISTED)
        elif chunks.flags[row] & LISTED:
            chunks.unlink(candidates.recency, row)

    def victims(self, candidates: Candidates, limit: int, sooner_than: int = -1) -> Iterator[int]:
        """At most `limit` rows, the next victim first. Of chunks that queued jobs need, only those with a rank after
        `sooner_than` (see `job_end`): a prefetch never pushes out what is needed before it."""
        if candidates.by_arrival:
            yield from candidates.ranked.smallest(limit)
            return
        for row in self.unneeded(candidates):
            if limit <= 0:
                return
            yield row
            limit -= 1
        yield from candidates.ranked.smallest(limit, -sooner_than if sooner_than >= 0 else None)

    def unneeded(self, candidates: Candidates) -> Iterator[int]:
        """The victims that no queued job needs. The one that was given last may go, or move, meanwhile."""
        row = candidates.recency.oldest
        while row != NONE:
            following = self._chunks.newer[row]
            yield row
            row = following

    def oldest_use(self, candidates: Candidates) -> int | None:
        """When the next victim was last used."""
        for row in self.victims(candidates, 1):
            return self._chunks.used_at[row]
        return None

    def job_end(self, row: int) -> int:
        """The rank of the last chunk of the soonest job that needs `row`; 0 if none does."""
        rank = self.rank.get(row, 0)
        at = bisect_left(self._job_ends, rank)
        return self._job_ends[at] if at < len(self._job_ends) else rank

    def set_ranks(
        self,
        namespaces: Mapping[NamespaceId, Namespace],
        rank: dict[int, int],
        job_ends: Sequence[int] = (),
    ) -> None:
        """The queue changed: `rank` is all that is needed now, in ascending order, and `job_ends` the last rank of each
        job in it."""
        if self.kind != "hints":
            return
        chunks = self._chunks
        before, self.rank, self._job_ends = self.rank, rank, job_ends
        if len(before) + len(rank) >= self._batch_min:
            needed.changed(self, chunks, namespaces, before, rank)
        else:
            self._changed(namespaces, before, rank)

    def _changed(
        self, namespaces: Mapping[NamespaceId, Namespace], before: Mapping[int, int], rank: Mapping[int, int]
    ) -> None:
        """`needed.changed`, one by one."""
        chunks = self._chunks
        flags = chunks.flags
        gone: dict[tuple[NamespaceId, bool], list[int]] = {}
        for row in before:
            if row not in rank and flags[row] & RANKED:
                namespace = namespaces[NamespaceId(chunks.namespace[row])]
                cold = chunks.ready[row] != namespace.shards
                gone.setdefault((namespace.id, cold), []).append(row)
        for number, cold in sorted(gone):
            candidates = namespaces[number].ssd if cold else namespaces[number].dram
            for row in gone[number, cold]:
                self.remove(candidates, row)
            self.put_back(candidates, gone[number, cold])
        for namespace in namespaces.values():
            namespace.dram.ranked.replace((), ())
            namespace.ssd.ranked.replace((), ())
        for row, position in rank.items():
            if not flags[row] & LISTED:
                continue
            namespace = namespaces[NamespaceId(chunks.namespace[row])]
            if chunks.ready[row] == namespace.shards:
                candidates = namespace.dram
            elif flags[row] & STORED:
                candidates = namespace.ssd
            else:
                continue
            if not flags[row] & RANKED:
                chunks.unlink(candidates.recency, row)
            self._rank(candidates, row, -position)

    def forget(self, row: int) -> None:
        """The row's bytes are gone, or its number is about to be reused."""
        self.rank.pop(row, None)

    def _rank(self, candidates: Candidates, row: int, key: int) -> None:
        candidates.ranked.add(row, key)
        self._chunks.flags[row] |= LISTED | RANKED
