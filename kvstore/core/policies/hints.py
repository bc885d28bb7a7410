"""What no queued job needs goes first, least recently used first; then what is needed, latest job first, and of one job
the end of the chain before its beginning."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from kvstore.core.bulk import batch, needed
from kvstore.core.chunks import LISTED, RANKED, STORED, LinkedRows
from kvstore.core.jobs import PLACE_MAX
from kvstore.core.namespaces import Namespace
from kvstore.core.policies.interface import Rows
from kvstore.core.policies.lists import Candidates, Ranked
from kvstore.core.policies.lru import ByRecency, Lru
from kvstore.types import NamespaceId

CHANGES_MIN = 64
CHANGES_SHARE = 8
"""When so large a part of the ranks changes, all are set anew: that costs a third for each."""


class ByNeed(ByRecency):
    __slots__ = ("ranked",)

    def __init__(self) -> None:
        super().__init__()
        self.ranked = Ranked()
        """Those that queued jobs need, the chunk that is needed last first; all others are in `recency`."""

    @property
    def lists(self) -> tuple[LinkedRows | Ranked, ...]:
        return self.recency, self.ranked


class Hints(Lru):
    uses_ranks = True

    def candidates(self) -> ByNeed:
        return ByNeed()

    # ------------------------------------------------------------------------------------------- coming and going

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        super().add(candidates, self._without_needed(candidates, rows))

    def add_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        super().add_each(candidates, self._without_needed(candidates, rows))

    def add_last(self, candidates: Candidates, row: int) -> None:
        if row in self.rank:
            self._rank(ranked(candidates), row)
        else:
            super().add_last(candidates, row)

    def add_last_many(self, candidates: Candidates, rows: Rows) -> None:
        left = self._without_needed(candidates, rows.tolist()) if self.rank else rows
        if len(left):
            super().add_last_many(candidates, batch.as_rows(left))

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        super().put_back(candidates, self._without_needed(candidates, rows))

    def put_back_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        super().put_back_each(candidates, self._without_needed(candidates, rows))

    def remove(self, candidates: Candidates, row: int) -> None:
        chunks = self._chunks
        flags = chunks.flags[row]
        if flags & RANKED:
            ranked(candidates).remove(row)
            chunks.flags[row] = flags & ~(RANKED | LISTED)
        elif flags & LISTED:
            self.unlink(candidates, row)

    def remove_many(self, candidates: Candidates, rows: Rows) -> None:
        mine = self._chunks.views.flags[rows] & RANKED != 0
        if mine.any():
            for row in rows[mine].tolist():
                self.remove(candidates, row)
            rows = rows[~mine]
        if len(rows):
            self.unlink_many(candidates, rows)

    def unlink(self, candidates: Candidates, row: int) -> None:
        """`row`, listed among what no job needs, leaves."""
        self._chunks.unlink(cast("ByNeed", candidates).recency, row)

    def unlink_many(self, candidates: Candidates, rows: Rows) -> None:
        """`unlink` for each."""
        batch.unlink(self._chunks, cast("ByNeed", candidates).recency, rows)

    def forget(self, row: int) -> None:
        self.rank.pop(row, None)

    def forget_many(self, rows: Sequence[int]) -> None:
        if self.rank:
            for row in rows:
                self.rank.pop(row, None)

    def _without_needed(self, candidates: Candidates, rows: Sequence[int]) -> Sequence[int]:
        """Rank those of `rows` that queued jobs need; the others."""
        rank = self.rank
        if not rank or rank.keys().isdisjoint(rows):
            return rows
        others: list[int] = []
        for row in rows:
            if row in rank:
                self._rank(ranked(candidates), row)
            else:
                others.append(row)
        return others

    def _rank(self, rows: Ranked, row: int) -> None:
        rows.add(row, -self.rank[row])
        self._chunks.flags[row] |= LISTED | RANKED

    # ----------------------------------------------------------------------------------------------------- victims

    def needed(self, *lists: Candidates, limit: int, sooner_than: int = -1) -> Iterator[int]:
        below = -sooner_than if sooner_than >= 0 else None
        latest = [ranked(candidates).smallest(limit, below) for candidates in lists]
        if len(latest) == 1:
            return latest[0]
        return heapq.merge(*latest, key=self.rank.__getitem__, reverse=True)

    # ------------------------------------------------------------------------------------------------------- ranks

    def job_end(self, row: int) -> int:
        rank = self.rank.get(row)
        return 0 if rank is None else rank | PLACE_MAX

    def set_ranks(self, namespaces: Mapping[NamespaceId, Namespace], rank: dict[int, int]) -> None:
        before, self.rank = self.rank, rank
        if len(before) + len(rank) >= self._batch_min:
            needed.changed(self, self._chunks, namespaces, before, rank)
        else:
            self._changed(namespaces, before, rank)

    def _changed(
        self, namespaces: Mapping[NamespaceId, Namespace], before: Mapping[int, int], rank: Mapping[int, int]
    ) -> None:
        """What is needed no more goes back among the others, what is new leaves them; and what is needed is ordered
        anew."""
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
            ranked(namespace.dram).replace((), ())
            ranked(namespace.ssd).replace((), ())
        for row in rank:
            self._list_ranked(namespaces, row)

    def _list_ranked(self, namespaces: Mapping[NamespaceId, Namespace], row: int) -> None:
        """A candidate that has a rank, to its place."""
        chunks = self._chunks
        flags = chunks.flags[row]
        if not flags & LISTED:
            return
        namespace = namespaces[NamespaceId(chunks.namespace[row])]
        if chunks.ready[row] == namespace.shards:
            candidates = namespace.dram
        elif flags & STORED:
            candidates = namespace.ssd
        else:
            return
        if not flags & RANKED:
            self.unlink(candidates, row)
        self._rank(ranked(candidates), row)

    def change_ranks(
        self, namespaces: Mapping[NamespaceId, Namespace], changes: Mapping[int, int | None]
    ) -> None:
        chunks, rank = self._chunks, self.rank
        if len(changes) > CHANGES_MIN + len(rank) // CHANGES_SHARE:
            super().change_ranks(namespaces, changes)
            return
        gone: dict[tuple[NamespaceId, bool], list[tuple[int, int]]] = {}
        for row, new in changes.items():
            old = rank.pop(row, None)
            if new is None:
                if old is not None and chunks.flags[row] & RANKED:
                    namespace = namespaces[NamespaceId(chunks.namespace[row])]
                    cold = chunks.ready[row] != namespace.shards
                    gone.setdefault((namespace.id, cold), []).append((old, row))
                continue
            rank[row] = new
            self._list_ranked(namespaces, row)
        for number, cold in sorted(gone):
            candidates = namespaces[number].ssd if cold else namespaces[number].dram
            rows = [row for _, row in sorted(gone[number, cold])]
            for row in rows:
                self.remove(candidates, row)
            self.put_back(candidates, rows)

    # ------------------------------------------------------------------------------------------------- for checkers

    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        """What a job needs is never among what nobody does, nor the other way round; and it has its place there."""
        chunks, mine = self._chunks, ranked(candidates)
        key = mine.keys.get(row)
        wanted = -self.rank[row] if row in self.rank else None
        assert key == wanted, (chunks.describe(row), key, wanted)
        assert bool(chunks.flags[row] & RANKED) == (key is not None), chunks.describe(row)
        return cast("ByNeed", candidates).recency if key is None else mine


def ranked(candidates: Candidates) -> Ranked:
    """What queued jobs need, the latest first."""
    return cast("ByNeed", candidates).ranked
