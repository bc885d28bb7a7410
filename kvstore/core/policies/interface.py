"""What a policy promises. The store owns pins, capacity and the final say; a policy says in which order chunks leave.

A chunk that may leave a pool is a row in some `Candidates`: of DRAM, where it is resident and unpinned, one for each
namespace; of SSD, where it is there alone and not promoting, one for all namespaces whose slots there have the same
sizes. The same policy orders both. Nobody but the policy looks into its candidates.

A policy keeps its rows in the lists that the checkers know: `LinkedRows`, whose links are columns of the table of
chunks, and `Ranked`, by a key. Linked rows carry the flag LISTED, rows with a key LISTED and RANKED; a row without
LISTED is nowhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from operator import itemgetter
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import Standing
from kvstore.core.chunks import TAIL, ChunkTable, LinkedRows
from kvstore.core.namespaces import Namespace
from kvstore.core.policies.lists import Candidates, Ranked
from kvstore.types import Millis, NamespaceId

Rows = npt.NDArray[np.intp]
AWAITED_MS: Millis = 60_000
"""So long what came to DRAM because somebody asked for it is kept for that: nobody waits longer (`Limits.wait_max_ms`),
and the last chunk of a turn comes when all are read."""


class Policy(ABC):
    """Single-row methods are what a policy has to say. The bulk methods beside them say the same for many rows: here
    one by one, in a policy that is used for hundreds at a time through views of the columns (`core/bulk`)."""

    uses_ranks: ClassVar[bool] = False
    """Whether it heeds what queued jobs need. If not, nobody plans: nothing is ranked, and nothing fetched ahead."""

    def __init__(self, chunks: ChunkTable, batch_min: int) -> None:
        self._chunks = chunks
        self._batch_min = batch_min
        self.rank: dict[int, int] = {}
        """By chunk row, of what the queue needs: the lowest is needed first (see `core.jobs`). Others may look,
        `set_ranks` and `change_ranks` alone change it."""
        self.now: Millis = 0
        """Of the step that is going on."""
        self.awaited: tuple[set[int], ...] = ()
        """Rows that came to DRAM because somebody asked for them, until they are taken."""
        self.lives_min = 0
        """A policy that learns goes by recency until it has seen so many chunks being saved or used."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.rank)} chunks ranked)"

    def is_awaited(self, row: int) -> bool:
        """Whether a chunk came because somebody asked for it, who is about to take it."""
        if not any(row in rows for rows in self.awaited):
            return False
        return self.now - self._chunks.used_at[row] < AWAITED_MS

    @abstractmethod
    def candidates(self) -> Candidates:
        """None yet, of a pool that is new."""

    # ------------------------------------------------------------------------------------------- coming and going

    @abstractmethod
    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`rows`, listed nowhere, may go from now on: they arrived, or their last pin went. They were used together and
        stand in chain order: descendants should go before their ancestors."""

    @abstractmethod
    def add_last(self, candidates: Candidates, row: int) -> None:
        """`row`, listed nowhere, left the tier above. By recency it goes after all others that are there now, unless a
        queued job needs any of these later, or none needs it; another policy may know better."""

    def add_last_many(self, candidates: Candidates, rows: Rows) -> None:
        """`add_last` for each, one after the other."""
        for row in rows.tolist():
            self.add_last(candidates, row)

    @abstractmethod
    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """`rows` may go again without having been used, as if they had not been away. They stand in chain order, and
        as with `add` descendants should go before their ancestors."""

    @abstractmethod
    def remove(self, candidates: Candidates, row: int) -> None:
        """`row` may not go any more; nothing happens if it is not listed."""

    def remove_many(self, candidates: Candidates, rows: Rows) -> None:
        """`remove` for each of these different rows, all of which are listed."""
        for row in rows.tolist():
            self.remove(candidates, row)

    def pass_over(self, candidates: Candidates, row: int) -> None:
        """`row`, which no queued job needs, is the next victim, and must stay: the others go before it."""
        self.remove(candidates, row)
        self.add_last(candidates, row)

    def learned(self) -> Mapping[str, object]:
        """By tenant: what a later start of the daemon may begin with, made of lists, numbers and text alone."""
        return {}

    def recall(self, learned: Mapping[str, object]) -> None:  # noqa: B027  # who learns nothing has nothing to recall
        """Begin with what an earlier start learned, before the first request. Raises ValueError for what
        is none of `learned`; the tenants before it are taken all the same."""

    def opened(self, namespace: Namespace) -> None:  # noqa: B027
        """A namespace is new."""

    def closed(self, namespace: NamespaceId) -> None:  # noqa: B027
        """It holds nothing any more, and its number is not used again."""

    def used(self, rows: Sequence[int], behind: int = 0) -> None:  # noqa: B027
        """Somebody uses these rows of one namespace now, which the store has; `used_at` still says when they were used
        before. Who uses them asked for `behind` tokens more behind them, which are not there."""

    def came_back(self, row: int) -> None:  # noqa: B027  # who has nothing to learn from it, says nothing
        """The bytes of a ghost are about to be written again: `reason` still says why they went, and
        `used_at` when they were last used."""

    def used_elsewhere(self, row: int) -> None:  # noqa: B027
        """A ghost was used in its engine's own caches; `used_at` still says when it was used before."""

    def forget(self, row: int) -> None:  # noqa: B027
        """The row's bytes are gone, or its number is about to be reused. It is in no candidates any more."""

    def forget_many(self, rows: Sequence[int]) -> None:
        """`forget` for each."""
        for row in rows:
            self.forget(row)

    # ---------------------------------------------------------------------------------------------------- admission

    def admitted(
        self, namespace: Namespace, rows: Sequence[int], parent: int, tokens: Sequence[int], free: int
    ) -> int:
        """How many of the leading chunks that somebody is about to save are worth more than what goes for them, with
        so many slots `free`. They stand in chain order, no queued job needs them, and nobody sees them now: `rows` are
        ghosts, or NONE. `parent` is the row above the first, `tokens` how many each has."""
        return len(rows)

    def worth_of(self, row: int) -> float:
        """Of a chunk that no queued job needs, in hits per slot and millisecond; what is not known is worth all."""
        return inf

    def standing(self, candidates: Candidates, row: int) -> Standing:
        """By which rule a chunk that no queued job needs goes from `candidates`, and with what figures."""
        chunks = self._chunks
        unnamed = chunks.flags[row] & TAIL and not chunks.refs[row]
        return Standing("unnamed tail" if unnamed else "recency")

    def used_within(self, row: int, ms: Millis) -> float:
        """The chance that a chunk is used within so long of its last use; what is not known is taken for certain."""
        return 1.0

    def least_worth(self, candidates: Candidates) -> float:
        """Of the next victim that no queued job needs; none is worth nothing."""
        return 0.0

    def refused(self, rows: Sequence[int]) -> None:  # noqa: B027
        """These ghosts were not admitted; `used_at` still says when they were used before, and is about to say now."""

    # ----------------------------------------------------------------------------------------------------- victims

    @abstractmethod
    def unneeded(self, *lists: Candidates) -> Iterator[int]:
        """The candidates in all of `lists` that no queued job needs, the next victim first. The one that was given last
        may go, or move, meanwhile."""

    def needed(self, *lists: Candidates, limit: int, sooner_than: int = -1) -> Iterator[int]:
        """The candidates that queued jobs need, the latest first: at most `limit` of each of `lists`, and only those
        with a rank after `sooner_than`. The one that was given last may go meanwhile."""
        return iter(())

    def victims(self, candidates: Candidates, limit: int, sooner_than: int = -1) -> Iterator[int]:
        """At most `limit` rows, the next victim first: `unneeded`, then `needed`. With the `sooner_than` of `job_end` a
        prefetch never pushes out what is needed before it."""
        for row in islice(self.unneeded(candidates), limit):
            yield row
            limit -= 1
        if limit > 0:
            yield from self.needed(candidates, limit=limit, sooner_than=sooner_than)

    def oldest_use(self, candidates: Candidates) -> Millis | None:
        """When the next victim was last used."""
        for row in self.victims(candidates, 1):
            return self._chunks.used_at[row]
        return None

    # ------------------------------------------------------------------------------------------------------- ranks

    def set_ranks(self, namespaces: Mapping[NamespaceId, Namespace], rank: dict[int, int]) -> None:  # noqa: B027
        """The queue changed: `rank` is all that is needed now, in ascending order. Chunks of one job stand in the order
        of its chain, and their ranks differ in their last PLACE_BITS alone."""

    def change_ranks(
        self, namespaces: Mapping[NamespaceId, Namespace], changes: Mapping[int, int | None]
    ) -> None:
        """The queue changed a little: these rows, in any order, have such a rank now, or none."""
        rank = {row: place for row, place in {**self.rank, **changes}.items() if place is not None}
        self.set_ranks(namespaces, dict(sorted(rank.items(), key=itemgetter(1))))

    def job_end(self, row: int) -> int:
        """No chunk of the soonest job that needs `row` has a higher rank; 0 if none needs it."""
        return 0

    # -------------------------------------------------------------------------------------------------- for checkers

    @abstractmethod
    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        """Assert what the policy promises about one listed row; the list of the candidates' that it has to be in."""
