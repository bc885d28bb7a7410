"""How soon chunks are used again, learnt from what a tenant's chunks did, and what a slot that holds one is worth.

A chunk that was used begins a *life*: it ends with the next use. Lives are of a *kind*, which says all that is known of
a chunk when its life begins. Of each kind and each age (buckets grow by BASE) a book counts the lives that ended there
and those that came through, so the chance to end there, of those that came so far, is an estimate without a bias
(Kaplan and Meier 1958), whatever the store evicted meanwhile: ghosts live on.

The worth of a chunk is the best it can give, over all horizons T: the chance that it is used within T, over the time
that its slot is held until then (an index as Gittins 1979 has it), in hits per slot and millisecond.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.types import Millis

BUCKETS = 64
BASE = 1.25
FIRST_MS = 500
"""Upper edge of the first bucket; the last begins at 5 days."""
MERGED_SHARE = 0.1
"""Lives that began within such a part of their age count as of one time."""

GAPS_S = (10, 60, 300)
"""Of chunks that were used before: the time between their last two uses has one of four sizes."""
USES = (3, 5)
"""They were used twice, or at least so often."""
BEHIND_FEW = 2_048
"""The request that used them last had to compute so many tokens behind them, or fewer: it went on where they end; else
it left what they belong to."""
LENGTHS = (2_048, 8_192, 32_768)
"""Of what a first turn adds, in tokens."""
LATER_LENGTHS = (2_048, 8_192)
"""Of what a later turn adds."""
PART = 0
FIRST_TURN = 1
LATER_TURN = FIRST_TURN + len(LENGTHS) + 1
USED = LATER_TURN + 2 * (len(LATER_LENGTHS) + 1)
_GAP_COUNT = len(GAPS_S) + 1
UNKNOWN = USED + 2 * (len(USES) + 1) * _GAP_COUNT
"""Kinds: the last, partial chunk of a request; of a first turn, by what it adds; of the second turn of a dialogue and
of later ones, by what they add; used before, by the number of uses, by what the last request computed behind it, and by
the time between the last two uses; and what nobody knows of."""
KINDS = UNKNOWN + 1
_ADDED = ("under 2k", "2k to 8k", "8k to 32k", "over 32k")
_ADDED_LATER = ("under 2k", "2k to 8k", "over 8k")
NAMES = (
    "last part of a request",
    *(f"first turn, {length} tokens" for length in _ADDED),
    *(f"{turn} turn, {length} tokens" for turn in ("second", "later") for length in _ADDED_LATER),
    *(
        f"used {uses}, {behind} behind it, last {gap} apart"
        for uses in ("twice", "3 or 4 times", "5 times or more")
        for behind in ("little", "much")
        for gap in ("under 10 s", "10 s to 1 min", "1 to 5 min", "over 5 min")
    ),
    "unknown",
)
"""Of the kinds, for people."""
_COARSE = np.array([*range(USED), *(USED + (kind - USED) // _GAP_COUNT for kind in range(USED, KINDS))])
"""What a kind is where the time between uses does not count."""

LIVES_MIN = 5_000
"""A book that knows fewer says that what was used longer ago is worth less."""
PRIOR_USES, POOL_USES, COARSE_USES = 1.0, 3.0, 20.0
"""How many uses speak for what is believed beforehand: of all kinds, that an age is as that before it; of one kind,
that it is as all are; of a kind that is told apart by the time between uses, that it is as the coarser one."""
PRIOR_FIRST, PRIOR_LATER = 0.4, 0.02
"""What is believed of the first bucket, and of each later one, before anything was seen: a chance that falls with the
age, evenly on a logarithmic scale that begins at 1 ms."""
REFRESH_MIN = 1_024
REFRESH_SHARE = 64
REFRESH_MS = 100
"""The worths are computed anew after so many lives, or such a part of all; not more often than this."""
KEPT_LIVES = 200_000
KEPT_MS = 600_000
"""After so many lives, and as long a time, what was counted counts half."""

COUNT_MAX = 1e12
"""Of lives: no honest count is larger."""

Learned = dict[str, tuple[list[float], list[float]]]
"""By kind (NAMES): lives that ended at each age, and those that came through."""
Table = npt.NDArray[np.float64]

EDGES: tuple[Millis, ...] = (0, *(round(FIRST_MS * BASE**number) for number in range(BUCKETS)))
"""A bucket begins at its edge and ends before the next; the last never ends."""
_LOWER = np.array(EDGES[:-1], np.float64)
_UPPER = np.array(EDGES[1:], np.float64)
_MIDDLE = np.sqrt(np.maximum(_LOWER, 0.3 * FIRST_MS) * _UPPER)
_SPAN = np.triu(np.ones((BUCKETS, BUCKETS), np.bool_))
_LOG_BASE = math.log(BASE)


def bucket_of(age: Millis) -> int:
    """The bucket of an age in milliseconds."""
    if age < FIRST_MS:
        return 0
    number = min(BUCKETS - 1, 1 + int(math.log(age / FIRST_MS) / _LOG_BASE))
    if age < EDGES[number]:
        return number - 1
    return number + 1 if number + 1 < BUCKETS and age >= EDGES[number + 1] else number


def kind_of_new(*, partial: bool, turn: int, tokens: int) -> int:
    """Of a chunk that was just computed: whether it is a request's last, partial one; which turn of a dialogue computed
    it (1: the first); how many tokens the turn added."""
    if partial:
        return PART
    if turn <= 1:
        return FIRST_TURN + sum(tokens > length for length in LENGTHS)
    lengths = len(LATER_LENGTHS) + 1
    return LATER_TURN + (turn > 2) * lengths + sum(tokens > length for length in LATER_LENGTHS)


def kind_of_used(uses: int, gap_ms: Millis, behind: int) -> int:
    """Of a chunk that was used `uses` times, the last two of them `gap_ms` apart, the last one by a request that had to
    compute so many tokens behind it."""
    often = sum(uses >= count for count in USES)
    gap = sum(gap_ms >= 1_000 * size for size in GAPS_S)
    return USED + (2 * often + (behind > BEHIND_FEW)) * _GAP_COUNT + gap


def worths(chance: Table, after: Millis = 0) -> Table:
    """Hits per slot and millisecond by kind and age, of (kinds, BUCKETS) chances to be used in a bucket, of what came
    so far. `after`: given that nothing comes for so long (the look-ahead of a queue, in milliseconds)."""
    alive: Table = np.concatenate([np.ones((len(chance), 1)), np.cumprod(1 - chance, axis=1)], axis=1)
    ends = alive[:, :-1] * chance
    if after:
        # An age a sees the uses in buckets that begin after a + `after`, of what is alive then.
        return _worths_after(alive, ends, after)
    hits = np.concatenate([np.zeros((len(chance), 1)), np.cumsum(ends, axis=1)], axis=1)
    times = np.concatenate([np.zeros((len(chance), 1)), np.cumsum(ends * _MIDDLE, axis=1)], axis=1)
    found = hits[:, None, 1:] - hits[:, :-1, None]
    held = times[:, None, 1:] - times[:, :-1, None] - found * _LOWER[None, :, None]
    held += alive[:, None, 1:] * (_UPPER[None, None, :] - _LOWER[None, :, None])
    rate = np.where(_SPAN, found / np.maximum(held, 1e-300), 0.0)
    best: Table = rate.max(axis=2)
    return best


def _worths_after(alive: Table, ends: Table, after: Millis) -> Table:
    best = np.zeros_like(ends)
    for age in range(BUCKETS):
        first = bucket_of(EDGES[age] + after)
        if EDGES[first] < EDGES[age] + after:
            first += 1
        if first >= BUCKETS:
            continue
        left = ends[:, first:]
        found = np.cumsum(left, axis=1)
        held = np.cumsum(left * (_MIDDLE[first:] - _LOWER[age]), axis=1)
        held += alive[:, first + 1 :] * (_UPPER[first:] - _LOWER[age])
        best[:, age] = (found / np.maximum(held, 1e-300)).max(axis=1)
    return best


def as_learned(value: object) -> Learned:
    """What was written down and read again. Raises ValueError for what is no `Learned`."""
    if not isinstance(value, dict):
        raise ValueError("what was learned of a tenant is no table")
    found: Learned = {}
    for name, counts in value.items():
        if not (
            isinstance(name, str)
            and isinstance(counts, list | tuple)
            and len(counts) == 2
            and all(isinstance(each, list) for each in counts)
            and all(isinstance(count, int | float) for each in counts for count in each)
        ):
            raise ValueError(f"what was learned of {name!r} is no pair of lists of numbers")
        found[name] = ([*map(float, counts[0])], [*map(float, counts[1])])
    return found


class Ages:
    """Lives of one kind: how many ended at which age, and how many came through."""

    __slots__ = ("_ran_at", "ended", "passed", "young")

    def __init__(self) -> None:
        self._ran_at: Millis = 0
        self.ended = [0.0] * BUCKETS
        self.passed = [0.0] * BUCKETS
        self.young: list[deque[list[int]]] = [deque() for _ in range(BUCKETS)]
        """By bucket: (when they began, how many) of the lives that go on, the oldest first."""

    def __repr__(self) -> str:
        return f"Ages({sum(self.ended):.0f} lives ended)"

    def begin(self, now: Millis, count: int) -> None:
        young = self.young[0]
        if young and now - young[-1][0] < FIRST_MS * MERGED_SHARE:
            young[-1][1] += count
        else:
            young.append([now, count])

    def end(self, began: Millis, age: Millis, count: int, notice: Millis = 0) -> None:
        """`count` lives that began then end at this age. Who was told of it so long before (`notice`) has known them
        from then on, and learns when that was: what came through since does not count."""
        number = bucket_of(age)
        if began + age - self._ran_at >= FIRST_MS * MERGED_SHARE:
            self.run(began + age)
        told = bucket_of(max(0, age - notice)) if notice else number
        self.ended[told] += count
        for between in range(told, number):
            self.passed[between] = max(0.0, self.passed[between] - count)
        for near in (number, number - 1, number + 1):
            if 0 <= near < BUCKETS:
                count = self._take(self.young[near], began, count)
                if not count:
                    return

    @staticmethod
    def _take(young: deque[list[int]], began: Millis, count: int) -> int:
        """Take `count` lives out, those first that began at the time nearest before `began`; how many are left."""
        first = len(young) - 1
        while first > 0 and young[first][0] > began:
            first -= 1
        for number in (*range(first, -1, -1), *range(first + 1, len(young))) if young else ():
            taken = min(count, young[number][1])
            young[number][1] -= taken
            count -= taken
            if not count:
                return 0
        return count

    def run(self, now: Millis) -> None:
        """Time has passed: lives that outlived their bucket came through."""
        self._ran_at = now
        for number in range(BUCKETS - 1):
            young = self.young[number]
            if not young:
                continue
            edge = EDGES[number + 1]
            older = self.young[number + 1]
            while young and now - young[0][0] >= edge:
                life = young.popleft()
                if not life[1]:
                    continue
                self.passed[number] += life[1]
                if older and life[0] - older[-1][0] < edge * MERGED_SHARE:
                    older[-1][1] += life[1]
                else:
                    older.append(life)

    def halve(self) -> None:
        self.ended = [count / 2 for count in self.ended]
        self.passed = [count / 2 for count in self.passed]


def _prior() -> list[list[float]]:
    believed = np.full((1, BUCKETS), PRIOR_LATER)
    believed[0, 0] = PRIOR_FIRST
    return [worths(believed)[0].tolist()] * KINDS


PRIOR = _prior()
"""Worths where nothing is known: the longer ago, the less."""


class Book:
    """What one tenant's chunks taught."""

    __slots__ = (
        "_computed_at",
        "_halved_at",
        "_lives_min",
        "_lives_then",
        "ages",
        "lives",
        "used_by",
        "version",
        "worth",
    )

    def __init__(self, lives_min: int = LIVES_MIN) -> None:
        self._lives_min = lives_min
        self.ages = [Ages() for _ in range(KINDS)]
        self.lives = 0
        """That began, ever."""
        self.worth: list[list[float]] = PRIOR
        """By kind and bucket."""
        self.used_by: list[list[float]] = []
        """The chance to be used by the end of a bucket, of what was just used, by kind."""
        self.version = 0
        """Counts how often the worths were computed."""
        self._lives_then = 0
        self._computed_at: Millis = 0
        self._halved_at: Millis = 0

    def __repr__(self) -> str:
        return f"Book({self.lives} lives, version {self.version})"

    @property
    def knows(self) -> bool:
        """Whether kinds are told apart: enough was seen."""
        return self.version > 0

    def learned(self) -> Learned:
        """What a later start of the daemon may begin with: how many lives of a kind ended at which age, and came
        through."""
        return {
            name: (list(ages.ended), list(ages.passed))
            for name, ages in zip(NAMES, self.ages, strict=True)
            if any(ages.ended) or any(ages.passed)
        }

    def recall(self, learned: Learned) -> None:
        """Begin with what an earlier start learned; it counts half, for much may have changed meanwhile. Kinds that
        nobody knows any more are left out. Raises ValueError, and then nothing was taken."""
        taken = []
        for name, counts in learned.items():
            ended, passed = counts
            if len(ended) != BUCKETS or len(passed) != BUCKETS:
                raise ValueError(f"{name!r} has {len(ended)} and {len(passed)} ages, not {BUCKETS}")
            if not all(math.isfinite(count) and 0 <= count <= COUNT_MAX for count in (*ended, *passed)):
                raise ValueError(f"{name!r} has a count that is none")
            if name in NAMES:
                taken.append((NAMES.index(name), ended, passed))
        for kind, ended, passed in taken:
            ages = self.ages[kind]
            ages.ended = [count + half / 2 for count, half in zip(ages.ended, ended, strict=True)]
            ages.passed = [count + half / 2 for count, half in zip(ages.passed, passed, strict=True)]
            self.lives += int(sum(ended) + passed[0]) // 2

    def begin(self, kind: int, now: Millis, count: int) -> None:
        self.ages[kind].begin(now, count)
        self.lives += count

    def end(self, kind: int, began: Millis, now: Millis, count: int, notice: Millis = 0) -> None:
        self.ages[kind].end(began, now - began, count, notice)

    def refresh(self, now: Millis) -> bool:
        """Compute the worths anew, if enough happened."""
        if self.lives < self._lives_min:
            return False
        new = self.lives - self._lives_then
        few = new < max(REFRESH_MIN, min(self.lives, KEPT_LIVES) // REFRESH_SHARE)
        if self.version and (few or now - self._computed_at < REFRESH_MS):
            return False
        self._lives_then, self._computed_at = self.lives, now
        for ages in self.ages:
            ages.run(now)
        chances = self.chances()
        self.worth = worths(chances).tolist()
        self.used_by = (1 - np.cumprod(1 - chances, axis=1)).tolist()
        self.version += 1
        if sum(ages.passed[0] for ages in self.ages) > KEPT_LIVES and now - self._halved_at >= KEPT_MS:
            self._halved_at = now
            for ages in self.ages:
                ages.halve()
        return True

    def chances(self) -> Table:
        """To be used in a bucket, of what came so far: by kind and bucket. Counts of uses are gamma distributed around
        what is believed beforehand, so that much data without a use does not count twice."""
        ended = np.array([ages.ended for ages in self.ages])
        at_risk = ended + np.array([ages.passed for ages in self.ages])
        pool = np.empty(BUCKETS)
        believed = PRIOR_FIRST
        pairs = zip(ended.sum(axis=0).tolist(), at_risk.sum(axis=0).tolist(), strict=True)
        for number, (uses, lives) in enumerate(pairs):
            pool[number] = believed = (uses + PRIOR_USES) / (lives + PRIOR_USES / believed)
            if not number:
                believed *= PRIOR_LATER / PRIOR_FIRST
        coarse = (_by_coarse(ended) + POOL_USES) / (_by_coarse(at_risk) + POOL_USES / pool)
        believed_of_kind = coarse[_COARSE]
        fine: Table = (ended + COARSE_USES) / (at_risk + COARSE_USES / believed_of_kind)
        return fine


def _by_coarse(counts: Table) -> Table:
    summed = np.zeros((_COARSE.max() + 1, BUCKETS))
    np.add.at(summed, _COARSE, counts)
    return summed
