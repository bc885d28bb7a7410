"""What queued jobs do not need goes in the order of the hits that a slot may expect of it (`ages.py`), the least first;
descendants go before their ancestors, be they worth more by their kinds: nobody finds them without. What jobs need goes
last, as with `Hints`.

Chunks of one kind that were used at one time are a cohort: linked rows, which leave from the end of their chain.
Cohorts of one kind and one bucket of ages are a cell, the oldest first, and cells stand in the order of their worth: to
use a chunk costs as much as in a list by recency, and an eviction looks at the first cell that is not empty.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from operator import itemgetter
from typing import cast

from kvstore.answers import Standing
from kvstore.core.bulk import batch, cohorts
from kvstore.core.chunks import LISTED, NONE, RANKED, TAIL, ChunkTable, LinkedRows
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import ages
from kvstore.core.policies.ages import BUCKETS, EDGES, KINDS, UNKNOWN, Book, Learned
from kvstore.core.policies.hints import ByNeed, Hints, ranked
from kvstore.core.policies.interface import Rows
from kvstore.core.policies.lists import Candidates, Ranked
from kvstore.types import Millis, NamespaceId

UNNAMED = KINDS
"""A kind of its own: tails that no manifest names, which go before everything;"""
SPARED = KINDS + 1
"""and what was passed over, or is about to be taken by who asked for it, which goes after everything, until"""
SPARED_MS = 10_000
"""so long after that."""
HOUR_MS = 3_600_000
KINDS_MAX = 64
CELLS_MAX = KINDS_MAX * BUCKETS
AGED_EVERY_MS = 100
"""Cohorts change their cells at most so often."""
RESTING = 64
"""Numbers of cohorts that ended rest before they are used again."""
EXPLORE = 100
"""One of so many saves that are not worth a slot gets one."""
CHILDREN_MAX = 64
"""Of a chunk that is to go, so many are looked at: a beginning that many requests share has thousands."""

TENANTS_LEARNED_MAX = 64
"""So many tenants' statistics survive a restart, those first that know most: some 20 KB each."""

KIND_BITS, USES_BITS, TURN_BITS = 6, 3, 3
USES_SHIFT, TURN_SHIFT = KIND_BITS, KIND_BITS + USES_BITS
KIND_MASK, USES_MASK, TURN_MASK = (1 << KIND_BITS) - 1, (1 << USES_BITS) - 1, (1 << TURN_BITS) - 1
"""What is known of a chunk's past is one number (`ChunkTable.history`): its kind since its last use, its uses, and the
turn of the dialogue that computed it. 0: nothing is known."""


def _lives(learned: Learned) -> float:
    return sum(sum(ended) + passed[0] for ended, passed in learned.values())


def history_of(kind: int, uses: int, turn: int) -> int:
    return kind | min(uses, USES_MASK) << USES_SHIFT | min(turn, TURN_MASK) << TURN_SHIFT


class Cohort(LinkedRows):
    """The next to go is the oldest."""

    __slots__ = ("cell", "number", "since")

    def __init__(self, number: int, cell: int, since: Millis) -> None:
        super().__init__()
        self.number = number
        self.cell = cell
        """(book * KINDS_MAX + kind) * BUCKETS + bucket."""
        self.since = since
        """When they were used."""

    def __repr__(self) -> str:
        return f"Cohort({self.count} rows of {self.since}, cell {self.cell})"


class ByWorth(ByNeed):
    __slots__ = ("aged_at", "by_use", "by_worth", "in_order", "row_count", "worth_versions")

    def __init__(self) -> None:
        super().__init__()
        self.by_worth: dict[int, deque[Cohort]] = {}
        self.by_use: dict[tuple[int, Millis], Cohort] = {}
        """By book and kind, and time of use."""
        self.in_order: list[tuple[float, int, int]] = []
        """(worth, bucket times -1, cell) of all cells, the least worth first."""
        self.worth_versions = -1
        self.aged_at: Millis = 0
        self.row_count = 0

    @property
    def lists(self) -> tuple[LinkedRows | Ranked, ...]:
        return *self.by_use.values(), self.ranked

    @property
    def unneeded(self) -> int:
        return self.row_count

    @property
    def count(self) -> int:
        return self.row_count + len(self.ranked)


class Expected(Hints):
    def __init__(self, chunks: ChunkTable, batch_min: int) -> None:
        super().__init__(chunks, batch_min)
        self.books: list[Book] = []
        self._book_of_tenant: dict[str, int] = {}
        self._book_of: dict[int, int] = {}
        """By number of the namespace."""
        self.cohorts: list[Cohort | None] = []
        """By number: `ChunkTable.cohort` of what is listed by worth."""
        self._free_numbers: deque[int] = deque()
        """The oldest is used again, once there are more than RESTING: who watches rows sees that they moved."""
        self._refused = 0
        self._recalled: dict[str, Learned] = {}
        """Of tenants that have opened nothing since the start."""
        self.foreseen: dict[int, Millis] = {}
        """Since when queued jobs have needed a chunk, of those in `rank`."""

    def learned(self) -> dict[str, object]:
        known: dict[str, Learned] = dict(self._recalled)
        for tenant, number in self._book_of_tenant.items():
            known[tenant] = self.books[number].learned()
        by_lives = sorted(known.items(), key=lambda item: -_lives(item[1]))
        return dict(by_lives[:TENANTS_LEARNED_MAX])

    def recall(self, learned: Mapping[str, object]) -> None:
        for tenant, of_tenant in learned.items():
            checked = ages.as_learned(of_tenant)
            number = self._book_of_tenant.get(tenant)
            (Book() if number is None else self.books[number]).recall(checked)
            if number is None:
                self._recalled[tenant] = checked

    def candidates(self) -> ByWorth:
        return ByWorth()

    def opened(self, namespace: Namespace) -> None:
        number = self._book_of_tenant.get(namespace.tenant)
        if number is None:
            number = self._book_of_tenant[namespace.tenant] = len(self.books)
            book = Book(self.lives_min)
            book.recall(self._recalled.pop(namespace.tenant, {}))
            self.books.append(book)
        self._book_of[namespace.id] = number

    def closed(self, namespace: NamespaceId) -> None:
        del self._book_of[namespace]

    # -------------------------------------------------------------------------------------------------- observation

    def used(self, rows: Sequence[int], behind: int = 0) -> None:
        """Their lives end, and others begin."""
        if len(rows) >= self._batch_min:
            cohorts.used(self, self._chunks, rows, behind)
        else:
            self.used_each(rows, behind)

    def used_each(self, rows: Sequence[int], behind: int = 0) -> None:
        """`used`, one by one."""
        history, used_at = self._chunks.history, self._chunks.used_at
        for row in rows:
            history[row] = self.end_lives(row, history[row], used_at[row], 1, behind)

    def end_lives(self, row: int, past: int, used_at: Millis, count: int, behind: int) -> int:
        """So many chunks with one past, `row` among them, are used now; what their past is from now on. What a queue
        told of is worth what it was until then: its life ends at the age that it had when the queue told."""
        book = self.book(row)
        uses = max(1, past >> USES_SHIFT & USES_MASK) + 1
        if past:
            since = self.foreseen.get(row)
            notice = 0 if since is None else self.now - max(since, used_at)
            book.end(past & KIND_MASK, used_at, self.now, count, notice)
        kind = ages.kind_of_used(uses, self.now - used_at, behind)
        book.begin(kind, self.now, count)
        return history_of(kind, uses, past >> TURN_SHIFT & TURN_MASK)

    def book(self, row: int) -> Book:
        """Of the tenant whose chunk it is."""
        return self.books[self._number(row)]

    def _number(self, row: int) -> int:
        """Of its book."""
        return self._book_of[self._chunks.namespace[row]]

    def came_back(self, row: int) -> None:
        if self._chunks.history[row]:
            self.used((row,))

    def used_elsewhere(self, row: int) -> None:
        self.came_back(row)

    def _begin_lives(self, rows: Sequence[int]) -> None:
        """Of `rows`, in chain order, those that were never seen before begin their first lives."""
        chunks = self._chunks
        if len(rows) >= self._batch_min:
            new = cohorts.without_past(chunks, rows)
        else:
            new = [row for row in rows if not chunks.history[row]]
        if not new:
            return
        tokens = sum(map(chunks.tokens.__getitem__, new))
        if len(new) >= self._batch_min:
            for start, end in cohorts.chains(chunks, new):
                self._begin_run(new[start:end], tokens)
            return
        start = 0
        for end in range(1, len(new) + 1):
            row = new[end] if end < len(new) else NONE
            if row == NONE or chunks.parent[row] != new[end - 1] or chunks.flags[row] & TAIL:
                self._begin_run(new[start:end], tokens)
                start = end

    def _begin_run(self, rows: Sequence[int], tokens: int) -> None:
        """`rows`, each the child of the one before, were computed in one turn, with others `tokens` in all."""
        chunks = self._chunks
        first = rows[0]
        turn = self._turn(first, chunks.parent[first])
        kind = ages.kind_of_new(partial=bool(chunks.flags[first] & TAIL), turn=turn, tokens=tokens)
        past = history_of(kind, 1, turn)
        if len(rows) >= self._batch_min:
            chunks.views.history[batch.as_rows(rows)] = past
        else:
            for row in rows:
                chunks.history[row] = past
        self.book(first).begin(kind, self.now, len(rows))

    def _turn(self, row: int, parent: int) -> int:
        """Which turn of a dialogue computed a chunk. One that branches off what others share begins a dialogue; one
        behind what was never used goes on with the turn that computed it."""
        chunks = self._chunks
        if parent == NONE:
            return 1
        past = chunks.history[parent]
        turn = max(1, past >> TURN_SHIFT & TURN_MASK)
        if past >> USES_SHIFT & USES_MASK <= 1:
            return turn
        for child in chunks.children(parent):
            if child != row and not chunks.flags[child] & TAIL:
                return 1
        return turn + 1

    def worth_of(self, row: int) -> float:
        book = self.book(row)
        past = self._chunks.history[row]
        if not past or not book.knows:
            return inf
        return book.worth[past & KIND_MASK][ages.bucket_of(max(0, self.now - self._chunks.used_at[row]))]

    def used_within(self, row: int, ms: Millis) -> float:
        book = self.book(row)
        past = self._chunks.history[row]
        if not past or not book.knows:
            return 1.0
        return book.used_by[past & KIND_MASK][ages.bucket_of(ms)]

    def standing(self, candidates: Candidates, row: int) -> Standing:
        by_recency = super().standing(candidates, row)
        past = self._chunks.history[row]
        if by_recency.rule != "recency" or not past or not self.book(row).knows:
            return by_recency
        worth, least = self.worth_of(row), self.least_worth(candidates)
        return Standing(
            "worth",
            worth=worth * HOUR_MS,
            least_worth=least * HOUR_MS if least < inf else 0.0,
            kind=ages.NAMES[past & KIND_MASK],
        )

    def least_worth(self, candidates: Candidates) -> float:
        for worth, _ in self._walk_cells(cast("ByWorth", candidates)):
            return worth
        return 0.0

    # ------------------------------------------------------------------------------------------------------- ranks

    def set_ranks(self, namespaces: Mapping[NamespaceId, Namespace], rank: dict[int, int]) -> None:
        foreseen = self.foreseen
        self.foreseen = {row: foreseen.get(row, self.now) for row in rank}
        super().set_ranks(namespaces, rank)

    def change_ranks(
        self, namespaces: Mapping[NamespaceId, Namespace], changes: Mapping[int, int | None]
    ) -> None:
        for row, place in changes.items():
            if place is None:
                self.foreseen.pop(row, None)
            else:
                self.foreseen.setdefault(row, self.now)
        super().change_ranks(namespaces, changes)

    def forget(self, row: int) -> None:
        super().forget(row)
        self.foreseen.pop(row, None)

    def forget_many(self, rows: Sequence[int]) -> None:
        super().forget_many(rows)
        if self.foreseen:
            for row in rows:
                self.foreseen.pop(row, None)

    # ---------------------------------------------------------------------------------------------------- admission

    def admitted(
        self, namespace: Namespace, rows: Sequence[int], parent: int, tokens: Sequence[int], free: int
    ) -> int:
        book = self.books[self._book_of[namespace.id]]
        if len(rows) <= free or not book.knows:
            return len(rows)
        if self._refused >= EXPLORE:
            self._refused = 0
            return len(rows)
        new = self._worths_of_saves(book, namespace, rows, parent, tokens)
        victims = self._walk_cells(cast("ByWorth", namespace.dram))
        for number, worth in enumerate(new):
            if number < free:
                continue
            victim = next(victims, None)
            if victim is None:  # what is left is needed, or not for us to say
                return len(rows) if not self.rank else number
            if victim[0] >= worth:
                self._refused += 1
                return number
        return len(rows)

    def _worths_of_saves(
        self, book: Book, namespace: Namespace, rows: Sequence[int], parent: int, tokens: Sequence[int]
    ) -> Iterator[float]:
        """Of each, once it is there."""
        chunks = self._chunks
        full = namespace.spec.chunk_tokens
        turn = 0
        size = sum(count for row, count in zip(rows, tokens, strict=True) if row == NONE)
        for row, count in zip(rows, tokens, strict=True):
            past = chunks.history[row] if row != NONE else 0
            if past:
                uses = max(1, past >> USES_SHIFT & USES_MASK) + 1
                kind = ages.kind_of_used(uses, self.now - chunks.used_at[row], 0)
            else:
                turn = turn or self._turn(row, parent)
                kind = ages.kind_of_new(partial=count < full, turn=turn, tokens=size)
            if row != NONE:
                parent = row
            yield book.worth[kind][0]

    def refused(self, rows: Sequence[int]) -> None:
        """Ghosts that somebody would have saved, in chain order: they are used all the same."""
        known = [row for row in rows if self._chunks.history[row]]
        self._begin_lives(rows)
        self.used(known)

    # ------------------------------------------------------------------------------------------- coming and going

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self._begin_lives(rows)
        self._file(cast("ByWorth", candidates), self._without_needed(candidates, rows))

    def add_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self.add(candidates, rows)

    def add_last(self, candidates: Candidates, row: int) -> None:
        """Where its worth says."""
        if row in self.rank:
            self._rank(ranked(candidates), row)
        else:
            self._file(cast("ByWorth", candidates), (row,), behind=True)

    def add_last_many(self, candidates: Candidates, rows: Rows) -> None:
        left = self._without_needed(candidates, rows.tolist())
        self._file(cast("ByWorth", candidates), left, behind=True)

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self._file(cast("ByWorth", candidates), self._without_needed(candidates, rows))

    def put_back_each(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self.put_back(candidates, rows)

    def pass_over(self, candidates: Candidates, row: int) -> None:
        self.remove(candidates, row)
        self._spare(candidates, (row,))

    def _spare(self, candidates: Candidates, rows: Sequence[int]) -> None:
        """The end of the chain is the first of them that goes."""
        if rows:
            mine = cast("ByWorth", candidates)
            cohort = self._cohort(mine, self._number(rows[0]) * KINDS_MAX + SPARED, self.now)
            self._link(mine, cohort, rows[::-1], first=False)

    def _without_awaited(self, candidates: Candidates, rows: Sequence[int]) -> Sequence[int]:
        """Spare those of `rows` that came because somebody waits for them, who is about to take them: else what comes
        for one turn would push each other out. The others."""
        came = set().union(*(each.intersection(rows) for each in self.awaited))
        spared = set(filter(self.is_awaited, came))
        if not spared:
            return rows
        self._spare(candidates, [row for row in rows if row in spared])
        return [row for row in rows if row not in spared]

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
        cohort = self.cohorts[self._chunks.cohort[row]]
        assert cohort is not None, self._chunks.describe(row)
        self._chunks.unlink(cohort, row)
        self._chunks.cohort[row] = NONE
        cast("ByWorth", candidates).row_count -= 1

    def unlink_many(self, candidates: Candidates, rows: Rows) -> None:
        for number, mine in cohorts.by_cohort(self._chunks, rows):
            cohort = self.cohorts[number]
            assert cohort is not None, number
            batch.unlink(self._chunks, cohort, mine)
        self._chunks.views.cohort[rows] = NONE
        cast("ByWorth", candidates).row_count -= len(rows)

    def _file(self, candidates: ByWorth, rows: Sequence[int], *, behind: bool = False) -> None:
        """Into the cohorts of their kinds and times; they stand in chain order, and the end of a chain goes first, also
        of what is there already. `behind`: they stand in the order in which they are to go, after what is there."""
        if any(self.awaited):
            rows = self._without_awaited(candidates, rows)
        if not rows:
            return
        chunks = self._chunks
        number = self._number(rows[0])
        book = self.books[number]
        kinds = number * KINDS_MAX
        groups: dict[tuple[int, Millis], list[int]] = {}
        knows = book.knows
        history, used_at, flags, refs = chunks.history, chunks.used_at, chunks.flags, chunks.refs
        if len(rows) >= self._batch_min:
            runs = cohorts.alike(chunks, rows)
        else:
            runs = ([row] for row in rows)
        for run in runs:
            row = run[0]
            past = history[row]
            kind = past & KIND_MASK if past and knows else UNKNOWN
            if flags[row] & TAIL and not refs[row]:
                kind = UNNAMED
            group = groups.setdefault((kind, used_at[row]), run)
            if group is not run:
                group += run
        for (kind, since), mine in groups.items():
            cohort = self._cohort(candidates, kinds + kind, since)
            before = NONE if behind or not cohort.count else chunks.parent[mine[0]]
            listed = before != NONE and chunks.flags[before] & LISTED
            first = bool(listed and chunks.cohort[before] == cohort.number)
            if not (behind or first):
                mine.reverse()
            self._link(candidates, cohort, mine, first=first)

    def _link(self, candidates: ByWorth, cohort: Cohort, rows: Sequence[int], *, first: bool) -> None:
        """One after the other, before all that is there (`first`), or after it."""
        chunks = self._chunks
        number = cohort.number
        if len(rows) >= self._batch_min:
            which = batch.as_rows(rows)
            chunks.views.cohort[which] = number
            (batch.link_oldest if first else batch.link_newest)(chunks, cohort, which)
        else:
            link = chunks.link_oldest if first else chunks.link_newest
            for row in rows:
                chunks.cohort[row] = number
                link(cohort, row)
        candidates.row_count += len(rows)

    def _cohort(self, candidates: ByWorth, kind: int, since: Millis) -> Cohort:
        found = candidates.by_use.get((kind, since))
        if found is not None:
            return found
        cell = kind * BUCKETS + ages.bucket_of(max(0, self.now - since))
        reused = len(self._free_numbers) > RESTING
        number = self._free_numbers.popleft() if reused else len(self.cohorts)
        cohort = Cohort(number, cell, since)
        if number == len(self.cohorts):
            self.cohorts.append(cohort)
        else:
            self.cohorts[number] = cohort
        candidates.by_use[kind, since] = cohort
        self._into_cell(candidates, cohort)
        return cohort

    def _into_cell(self, candidates: ByWorth, cohort: Cohort) -> None:
        cell = candidates.by_worth.get(cohort.cell)
        if cell is None:
            candidates.by_worth[cohort.cell] = deque((cohort,))
            insort(candidates.in_order, self._place(cohort.cell))
            return
        newer = 0
        while newer < len(cell) and cell[-1 - newer].since > cohort.since:
            newer += 1
        cell.insert(len(cell) - newer, cohort)

    # ----------------------------------------------------------------------------------------------------- victims

    def unneeded(self, *lists: Candidates) -> Iterator[int]:
        if len(lists) == 1:
            return map(itemgetter(1), self._walk_cells(cast("ByWorth", lists[0])))
        walks = (self._walk_cells(cast("ByWorth", candidates)) for candidates in lists)
        return map(itemgetter(1), heapq.merge(*walks, key=itemgetter(0)))

    def _walk_cells(self, candidates: ByWorth) -> Iterator[tuple[float, int]]:
        """(worth, row), the least worth first."""
        self._age(candidates)
        chunks = self._chunks
        newer = chunks.newer
        first_child, next_sibling = chunks.first_child, chunks.next_sibling
        given: set[int] = set()
        for worth, _, number in list(candidates.in_order):
            cell = candidates.by_worth.get(number, ())
            while cell and not cell[0].count:
                self._drop(candidates, cell.popleft())
            at = 0
            while at < len(cell):
                cohort = cell[at]
                row = cohort.oldest
                while row != NONE:
                    following = newer[row]
                    if row not in given:
                        child = first_child[row]
                        if child == NONE or (child in given and next_sibling[child] == NONE):
                            given.add(row)  # as most are: the end of its chain, or of what is left of it
                            yield worth, row
                        else:
                            for each in self._ends_first(candidates, row, given):
                                yield worth, each
                            if following in given:  # and gone with its ancestor, perhaps
                                following = cohort.oldest
                    row = following
                at += 1

    def _ends_first(self, candidates: ByWorth, row: int, given: set[int]) -> Iterator[int]:
        """`row`, and before it what it is the beginning of: without it that is of no use, whatever its kind is worth.
        All that is yielded joins `given`, which is left out."""
        children = self._chunks.children
        path = [row]
        while path:
            last = path[-1]
            for child in islice(children(last), CHILDREN_MAX):
                if child not in given and self._may_go(candidates, child):
                    path.append(child)
                    break
            else:
                path.pop()
                given.add(last)
                yield last

    def _may_go(self, candidates: ByWorth, row: int) -> bool:
        """Whether a row is among those that go by worth, and was not passed over."""
        number = self._chunks.cohort[row]
        cohort = self.cohorts[number] if number != NONE else None
        if cohort is None or cohort.cell // BUCKETS % KINDS_MAX == SPARED:
            return False
        return candidates.by_use.get((cohort.cell // BUCKETS, cohort.since)) is cohort

    def _drop(self, candidates: ByWorth, cohort: Cohort) -> None:
        """An empty cohort ends."""
        del candidates.by_use[cohort.cell // BUCKETS, cohort.since]
        self.cohorts[cohort.number] = None
        self._free_numbers.append(cohort.number)

    def _age(self, candidates: ByWorth) -> None:
        """Cohorts that are too old for their cell go to the next; cells are ordered by what they are worth now."""
        now = self.now
        if now - candidates.aged_at >= AGED_EVERY_MS:
            candidates.aged_at = now
            for book in self.books:
                book.refresh(now)
            for number, cell in sorted(candidates.by_worth.items()):
                if cell:
                    self._age_cell(candidates, number, cell)
            versions = sum(book.version for book in self.books)
            if versions != candidates.worth_versions:
                candidates.worth_versions = versions
                candidates.by_worth = {number: cell for number, cell in candidates.by_worth.items() if cell}
                candidates.in_order = sorted(map(self._place, candidates.by_worth))

    def _place(self, number: int) -> tuple[float, int, int]:
        """Where a cell stands: of those that are worth the same, the older ones first."""
        return self._worth_of_cell(number), -(number % BUCKETS), number

    def _age_cell(self, candidates: ByWorth, number: int, cell: deque[Cohort]) -> None:
        now = self.now
        spared = number // BUCKETS % KINDS_MAX == SPARED
        edge = SPARED_MS if spared else EDGES[number % BUCKETS + 1]
        last = number % BUCKETS == BUCKETS - 1 and not spared
        while cell and (not cell[0].count or (now - cell[0].since >= edge and not last)):
            cohort = cell.popleft()
            if not cohort.count:
                self._drop(candidates, cohort)
            elif spared:
                rows = list(self._chunks.walk(cohort))
                for row in rows:
                    self.unlink(candidates, row)
                self._file(candidates, rows[::-1])
                self._drop(candidates, cohort)
            else:
                cohort.cell = number - number % BUCKETS + ages.bucket_of(now - cohort.since)
                self._into_cell(candidates, cohort)

    def _worth_of_cell(self, number: int) -> float:
        kind = number // BUCKETS % KINDS_MAX
        if kind >= KINDS:
            return -1.0 if kind == UNNAMED else inf
        return self.books[number // CELLS_MAX].worth[kind][number % BUCKETS]

    def oldest_use(self, candidates: Candidates) -> Millis | None:
        """When what was used longest ago was used, of what no job needs."""
        mine = cast("ByWorth", candidates)
        if not mine.row_count:
            return super().oldest_use(candidates)
        return min(
            next((cohort.since for cohort in cell if cohort.count), self.now)
            for cell in mine.by_worth.values()
        )

    # ------------------------------------------------------------------------------------------------- for checkers

    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        """What a job needs is never among what nobody does; the rest is in a cohort of its kind and time."""
        chunks, mine = self._chunks, ranked(candidates)
        key = mine.keys.get(row)
        wanted = -self.rank[row] if row in self.rank else None
        assert key == wanted, (chunks.describe(row), key, wanted)
        assert bool(chunks.flags[row] & RANKED) == (key is not None), chunks.describe(row)
        if key is not None:
            return mine
        cohort = self.cohorts[chunks.cohort[row]]
        assert cohort is not None, chunks.describe(row)
        kind, book = cohort.cell // BUCKETS % KINDS_MAX, cohort.cell // CELLS_MAX
        assert book == self._number(row), chunks.describe(row)
        assert cohort.since == chunks.used_at[row] or kind == SPARED, (chunks.describe(row), cohort)
        past = chunks.history[row]
        assert kind in (past & KIND_MASK, UNKNOWN, UNNAMED, SPARED), (chunks.describe(row), cohort)
        assert cast("ByWorth", candidates).by_use[cohort.cell // BUCKETS, cohort.since] is cohort, cohort
        return cohort
