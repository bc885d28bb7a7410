"""Least recently used first, whatever the queue says. Of chunks that were used together descendants go before their
ancestors, and tails that no manifest names before everything."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import cast

from kvstore.core.bulk import batch, recency
from kvstore.core.chunks import LISTED, NONE, RANKED, TAIL, LinkedRows
from kvstore.core.policies.interface import Policy, Rows
from kvstore.core.policies.lists import Candidates, Ranked


class ByRecency(Candidates):
    __slots__ = ("recency",)

    def __init__(self) -> None:
        self.recency = LinkedRows()
        """The oldest is the next to go."""

    @property
    def lists(self) -> tuple[LinkedRows | Ranked, ...]:
        return (self.recency,)

    @property
    def unneeded(self) -> int:
        return self.recency.count


class Lru(Policy):
    def candidates(self) -> ByRecency:
        return ByRecency()

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        if len(rows) >= self._batch_min:
            recency.add(self._chunks, linked(candidates), rows)
        else:
            self.add_each(candidates, rows)

    def add_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`add`, one by one."""
        chunks, rows_linked = self._chunks, linked(candidates)
        for row in reversed(rows):
            if chunks.flags[row] & TAIL and not chunks.refs[row]:
                chunks.link_oldest(rows_linked, row)
            else:
                chunks.link_newest(rows_linked, row)

    def add_last(self, candidates: Candidates, row: int) -> None:
        self._chunks.link_newest(linked(candidates), row)

    def add_last_many(self, candidates: Candidates, rows: Rows) -> None:
        batch.link_newest(self._chunks, linked(candidates), rows)

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """To the end of the list that is nearer in time."""
        if len(rows) >= self._batch_min:
            recency.put_back(self._chunks, linked(candidates), rows)
        else:
            self.put_back_each(candidates, rows)

    def put_back_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`put_back`, one by one."""
        chunks, mine = self._chunks, linked(candidates)
        oldest, newest = mine.oldest, mine.newest
        long_unused: list[int] = []
        for row in reversed(rows):
            used_at = chunks.used_at[row]
            near_oldest = (
                oldest != NONE and used_at - chunks.used_at[oldest] < chunks.used_at[newest] - used_at
            )
            if near_oldest:
                long_unused.append(row)
            else:
                self.add_each(candidates, (row,))
        for row in reversed(long_unused):
            chunks.link_oldest(mine, row)

    def remove(self, candidates: Candidates, row: int) -> None:
        if self._chunks.flags[row] & LISTED:
            self._chunks.unlink(linked(candidates), row)

    def remove_many(self, candidates: Candidates, rows: Rows) -> None:
        batch.unlink(self._chunks, linked(candidates), rows)

    def unneeded(self, *lists: Candidates) -> Iterator[int]:
        if len(lists) == 1:
            return self._walk(linked(lists[0]))
        return heapq.merge(
            *(self._walk(linked(candidates)) for candidates in lists), key=self._chunks.used_at.__getitem__
        )

    def _walk(self, rows: LinkedRows) -> Iterator[int]:
        newer = self._chunks.newer
        row = rows.oldest
        while row != NONE:
            following = newer[row]
            yield row
            row = following

    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        assert not self._chunks.flags[row] & RANKED, self._chunks.describe(row)
        return linked(candidates)


def linked(candidates: Candidates) -> LinkedRows:
    """What no queued job needs, the next to go the oldest."""
    return cast("ByRecency", candidates).recency
