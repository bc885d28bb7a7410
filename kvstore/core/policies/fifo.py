"""In the order of arrival, whatever is used: from DRAM by the time at which a chunk's bytes came, from SSD in the order
in which chunks left DRAM."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvstore.answers import Standing
from kvstore.core.chunks import LISTED, NONE, RANKED, LinkedRows
from kvstore.core.policies.interface import Policy
from kvstore.core.policies.lists import Candidates, Ranked


class ByArrival(Candidates):
    __slots__ = ("added_last", "by_arrival")

    def __init__(self) -> None:
        self.by_arrival = Ranked()
        """By the time at which they came."""
        self.added_last = LinkedRows()
        """Those that go after all of these, the next victim the oldest."""

    @property
    def lists(self) -> tuple[Ranked, LinkedRows]:
        return self.by_arrival, self.added_last

    @property
    def unneeded(self) -> int:
        return len(self.by_arrival) + self.added_last.count


class Fifo(Policy):
    def candidates(self) -> ByArrival:
        return ByArrival()

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        assert isinstance(candidates, ByArrival)
        chunks = self._chunks
        for row in reversed(rows):
            candidates.by_arrival.add(row, chunks.born_at[row])
            chunks.flags[row] |= LISTED | RANKED

    def add_last(self, candidates: Candidates, row: int) -> None:
        assert isinstance(candidates, ByArrival)
        self._chunks.link_newest(candidates.added_last, row)

    def standing(self, candidates: Candidates, row: int) -> Standing:
        return Standing("arrival")

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self.add(candidates, rows)

    def remove(self, candidates: Candidates, row: int) -> None:
        assert isinstance(candidates, ByArrival)
        flags = self._chunks.flags
        if flags[row] & RANKED:
            candidates.by_arrival.remove(row)
            flags[row] &= ~(RANKED | LISTED)
        elif flags[row] & LISTED:
            self._chunks.unlink(candidates.added_last, row)

    def unneeded(self, *lists: Candidates) -> Iterator[int]:
        walks = [self._walk(candidates) for candidates in lists if isinstance(candidates, ByArrival)]
        return walks[0] if len(walks) == 1 else heapq.merge(*walks, key=self._chunks.born_at.__getitem__)

    def _walk(self, candidates: ByArrival) -> Iterator[int]:
        yield from candidates.by_arrival.smallest(len(candidates.by_arrival))
        row = candidates.added_last.oldest
        while row != NONE:
            following = self._chunks.newer[row]
            yield row
            row = following

    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        assert isinstance(candidates, ByArrival)
        chunks = self._chunks
        key = candidates.by_arrival.keys.get(row)
        wanted = chunks.born_at[row] if chunks.flags[row] & RANKED else None
        assert key == wanted, (chunks.describe(row), key, wanted)
        return candidates.added_last if key is None else candidates.by_arrival
