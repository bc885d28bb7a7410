"""Load a request's KV or compute it: how many of its leading chunks to load, decided from measured speeds.

A hit that takes longer to load than to compute makes an engine slower than it is without a store. The engine computes
`Line.each` seconds a token; a chunk in DRAM takes a copy; one on SSD first takes its turn behind what is read before it
(the store tells: `Backlog`). An engine parks a request while its KV loads, so the two do not overlap, and the best
number of chunks is at the end of a run of chunks in one tier, or where the time that a request may wait is used up.
(Cake, arXiv 2410.03065, loads from one end while it computes from the other: that needs an engine that does both.)

What is not loaded is not measured either. So a tier that lost is tried again after a while, with few bytes and a bound
on the time, and the longer the more often it lost. Pure: no clock, no thread, no I/O, no torch; times are seconds of
any monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvstore.types import Tier

HALF_LIFE = 16.0
"""Measurements after which an older one counts half."""
OUTLIER = 8.0
"""So many times what was expected is believed at a time: a machine that stood still says nothing about speed; one that
got slower is believed after a few."""
SETTLED_AFTER = 3.5
"""Measurements (the older ones count a little less) before outliers can be told."""
GOOD_NEWS = 4.0
"""What is so many times faster than expected weighs as much as all before: what seems slow is hardly measured."""
SWITCH_SHARE = 0.1
"""A tier that lost has to save this share of the computing before it is chosen again, so that it is not a matter of
noise."""
EXPLORE_AFTER_S = 5.0
EXPLORE_AFTER_MAX_S = 300.0
"""How long a tier that lost is left alone: twice as long each time, up to the latter."""
EXPLORE_BYTES = 16 << 20
EXPLORE_SHARE = 0.03
"""Of the computing that would be saved: what trying may cost."""
EXTRAPOLATED_SHARE = 0.25
"""Computing far more tokens than any step so far had may take so much less than it seems: short steps say little."""
SLACK = 1.5
SLACK_S = 0.01
"""A load may take so much longer than expected before it is looked at again."""
LATE_SHARE = 0.25
"""How much the last delay counts against those before it."""
MARGIN_SHARE = 0.25
"""Of the computing that they save: so much sooner than computing, chunks on SSD have to be there. A disk's next reads
are not as fast as its last ones, and a request that waited for nothing computes as well."""
VAIN_MAX = 4
"""So many answers in a row that give nothing to load: then an engine waits little for the next ones."""
VAIN_SHARE = 0.05
"""Of the computing that could be saved: so long it waits then."""
BOUND_MIN_S = 0.1
"""A copy in memory is given this time at least: a machine that is busy delays it, and computing too."""


class Line:
    """seconds = fixed + each * units, fitted to what was measured; the recent counts more (least squares with weights
    that halve)."""

    def __init__(self, *, skipped: int = 0) -> None:
        """`skipped`: so many measurements at first count for nothing: they pay for what is done once."""
        self._skip = skipped
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights; units; seconds; units squared; units times seconds. Replaced as a whole: any thread may look."""

    def __repr__(self) -> str:
        return (
            f"Line({self.fixed:.4g} s + {self.each:.3g} s each)" if self.known else "Line(nothing measured)"
        )

    @property
    def known(self) -> bool:
        return self._sums[1] > 0

    def observe(self, units: float, seconds: float) -> None:
        """`units` took so long. Nothing is learnt from no units."""
        if units <= 0 or seconds < 0:
            return
        if self._skip:
            self._skip -= 1
            return
        weight, x, y, xx, xy = self._sums
        expected = self.seconds(units)
        if self.settled:
            seconds = min(seconds, OUTLIER * max(expected, 1e-6))
        keep = 1 / (1 + weight) if seconds < expected / GOOD_NEWS else 0.5 ** (1 / HALF_LIFE)
        self._sums = (
            keep * weight + 1,
            keep * x + units,
            keep * y + seconds,
            keep * xx + units * units,
            keep * xy + units * seconds,
        )

    @property
    def settled(self) -> bool:
        """Whether there are enough to tell outliers, and to decide against what is measured."""
        return self._sums[0] >= SETTLED_AFTER

    @property
    def each(self) -> float:
        return self._fit()[1]

    @property
    def fixed(self) -> float:
        return self._fit()[0]

    def seconds(self, units: float) -> float:
        """How long it will take; 0 if nothing is known."""
        fixed, each = self._fit()
        return fixed + each * units

    def _fit(self) -> tuple[float, float]:
        weight, x, y, xx, xy = self._sums
        if x <= 0:
            return 0.0, 0.0
        spread = weight * xx - x * x
        if spread > 0.01 * x * x:  # else all were about the same size, and the two cannot be told apart
            each = (weight * xy - x * y) / spread
            fixed = (y - each * x) / weight
            if each > 0 and fixed >= 0:
                return fixed, each
            if each > 0:
                return 0.0, xy / xx
        return 0.0, y / x


class Computing(Line):
    """What computing tokens takes. Attention makes long prompts take more than in proportion, so a line through short
    and long ones says too much of the short: of each size, what was measured at about that size counts if it is less.
    """

    def __init__(self, *, skipped: int = 0) -> None:
        super().__init__(skipped=skipped)
        self.largest = 0.0
        """Units of the largest measurement."""
        self._sizes: dict[int, Line] = {}
        """By the number of bits of the size. Replaced as a whole."""

    def observe(self, units: float, seconds: float) -> None:
        skips = self._skip > 0
        super().observe(units, seconds)
        if units >= 1 and not skips:
            self.largest = max(self.largest, units)
            size = int(units).bit_length()
            line = self._sizes.get(size, Line())
            line.observe(units, seconds)
            self._sizes = {**self._sizes, size: line}

    def saved(self, units: float) -> float:
        """Seconds that computing `units` less saves."""
        line = self._sizes.get(int(units).bit_length())
        all_s = self.each * units
        return min(all_s, line.seconds(units)) if line is not None else all_s


def read_buffer_layers(layers: int, *, load_s: float, compute_s: float) -> int:
    """How many of so many layers have to be there before a step begins that is not to wait for the rest, when all of
    them take `load_s` and the step computes for `compute_s`. AttentionStore 3.2.1: a read buffer of
    S_buf = B (T_load L_hist - T_pref L_new) bytes, where B T_load L_hist are the bytes of all layers. At least the
    first one: nothing is computed before it."""
    if load_s <= 0:
        return 1
    return min(layers, max(1, math.ceil(layers * (load_s - compute_s) / load_s)))


class Why(enum.Enum):
    """What was decided about a request's chunks that are not in DRAM, or if all are, about those."""

    NOTHING = "nothing"
    """There is nothing to load that the engine does not have."""
    LOAD = "load"
    SPLIT = "split"
    """The first part is loaded, the rest computed: it would come too late."""
    COMPUTE = "compute"
    EXPLORE = "explore"
    """A few are loaded to learn how fast that is."""
    UNKNOWN = "unknown"
    """Nobody has measured yet what computing takes: all is loaded."""


class Found(NamedTuple):
    """What the store has of a request's leading chunks."""

    in_dram: Sequence[bool]
    """Of each chunk up to the first that is missing; False: it is on SSD alone."""
    chunk_tokens: float
    chunk_bytes: int
    ahead_bytes: int = 0
    """Read from SSD before these."""
    ssd_bytes_per_s: float = 0
    """0: not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: int
    """So many leading chunks are to be loaded, those included that the engine has."""
    why: Why
    wait_s: float = 0.0
    """How long those on SSD may take. After that: look at what has come, and choose again."""
    saves_s: float = math.inf
    """What computing them would take: a load that takes longer is of no use."""
    takes_s: float = 0.0
    """What reading and copying them should take."""

    @property
    def bound_s(self) -> float:
        """When a copy of these chunks is late: then they are computed."""
        return max(BOUND_MIN_S, self.saves_s)


@dataclass(slots=True)
class Delay:
    """What one request waits for because of a choice. Written by the thread that chooses, read when it is over."""

    tier: Tier | None = None
    """The slowest that it waits for; None: for none."""
    since: float = 0.0
    """When that was chosen: asking what there is comes before, and costs a request that computes as much."""
    expected_s: float = 0.0
    busy_s: float = 0.0
    """What the engine had computed when the request came, see `ComputeOrLoad.delayed`."""

    def begin(self, plan: Plan, tier: Tier, now: float) -> None:
        """The first choice counts: what is chosen later is part of its delay."""
        if self.tier is None and plan.why is not Why.UNKNOWN:
            self.since, self.expected_s, self.tier = now, plan.takes_s, tier


class Patience:
    """When a tier that lost may be tried again."""

    def __init__(self) -> None:
        self.lost = False
        self._after_s = EXPLORE_AFTER_S
        self._again_at: float | None = None

    def won(self) -> None:
        self.lost = False
        self._after_s, self._again_at = EXPLORE_AFTER_S, None

    def lose(self, now: float) -> bool:
        """It lost, by what is known. True: that is old, and it may be tried."""
        self.lost = True
        if self._again_at is None:
            self._again_at = now + self._after_s
        if now < self._again_at:
            return False
        self._after_s = min(2 * self._after_s, EXPLORE_AFTER_MAX_S)
        self._again_at = now + self._after_s
        return True


class ComputeOrLoad:
    """What an engine has learnt, and what it makes of it."""

    def __init__(self) -> None:
        self.compute = Computing(skipped=1)
        """Tokens computed in one step of the engine -> seconds."""
        self.copy = Line(skipped=1)
        """Bytes of one load, from DRAM to where the engine wants them -> seconds, waiting for earlier ones included."""
        self._late_s = {Tier.DRAM: 0.0, Tier.SSD: 0.0}
        """So much later than reading and copying takes requests went on, of late: questions, threads, the steps of an
        engine that parks them, a busy machine."""
        self._patience = {Tier.DRAM: Patience(), Tier.SSD: Patience()}
        self._computed: set[int] = set()
        """Sizes, by their number of bits, that were computed once to learn what that takes."""
        self._vain = 0
        self.ssd_bytes_per_s = 0.0
        """As the store told last; 0: it never did."""

    def __repr__(self) -> str:
        return f"ComputeOrLoad(compute {self.compute}, copy {self.copy})"

    def saves(self, tokens: float) -> float:
        """Seconds of computing; infinite as long as nobody knows."""
        if tokens <= 0:
            return 0.0
        return self.compute.saved(tokens) if self.compute.known else math.inf

    def reads_from_ssd(self, bytes_per_s: float) -> None:
        """The store told how fast it reads; 0: it did not."""
        self.ssd_bytes_per_s = bytes_per_s or self.ssd_bytes_per_s

    def answered(self, *, useful: bool) -> None:
        """The store has answered about a request, in time or not; `useful`: there is something to load."""
        self._vain = 0 if useful else self._vain + 1

    @property
    def asks_in_vain(self) -> bool:
        """Whether the store has nothing worth loading, of late: then it is not to cost anything either."""
        return self._vain >= VAIN_MAX

    def delayed(self, delay: Delay, now: float, busy_s: float = 0.0) -> None:
        """A request goes on: with what it waited for, or without. `busy_s`: seconds of steps that the engine has ever
        computed; those since the request came are no delay, for it would not have been its turn."""
        if delay.tier is None:
            return
        seconds = now - delay.since - max(0.0, busy_s - delay.busy_s)
        late_s = min(max(0.0, seconds - delay.expected_s), OUTLIER * delay.expected_s + SLACK_S)
        self._late_s[delay.tier] += LATE_SHARE * (late_s - self._late_s[delay.tier])
        delay.tier = None

    def choose(self, found: Found, *, now: float, wait_max_s: float, have: int = 0) -> Plan:
        """`have`: leading chunks that the engine has by itself; `wait_max_s`: for what is on SSD."""
        count = len(found.in_dram)
        if count <= have:
            return Plan(have, Why.NOTHING, saves_s=0.0)
        if not self.compute.known:
            return Plan(count, Why.UNKNOWN, wait_max_s)
        cold = _cold_before(found.in_dram, have)
        best = self._best(found, cold, have, wait_max_s)
        if cold[count - have] > cold[best - have]:  # some on SSD are not worth it
            tried = self._try_ssd(found, cold, have, best, now, wait_max_s)
            if tried is not None:
                return tried
        elif cold[best - have]:
            self._patience[Tier.SSD].won()
        if self._is_to_be_computed_once(found, cold, have, best):
            return Plan(have, Why.COMPUTE, saves_s=0.0)
        if best == have:
            if found.in_dram[have]:
                return self._try_dram(found, have, now)
            return Plan(have, Why.COMPUTE, saves_s=0.0)
        if found.in_dram[have]:
            self._patience[Tier.DRAM].won()
        why = Why.LOAD if best == count else Why.SPLIT
        return self._plan(found, cold, have, best, why, wait_max_s)

    # ------------------------------------------------------------------------------------------------- what it takes

    def _plan(
        self, found: Found, cold: Sequence[int], have: int, chunks: int, why: Why, wait_max_s: float
    ) -> Plan:
        saves_s = self.saves((chunks - have) * found.chunk_tokens)
        wait_s = 0.0
        if cold[chunks - have]:
            wait_s = min(wait_max_s, saves_s, SLACK * self._wait(found, cold[chunks - have]) + SLACK_S)
        return Plan(chunks, why, wait_s, saves_s, self._takes(found, cold[chunks - have], chunks - have))

    def _takes(self, found: Found, cold: int, chunks: int) -> float:
        copying_s = self._copying(chunks * found.chunk_bytes)
        return self._reading(found, cold) + copying_s if found.ssd_bytes_per_s or not cold else copying_s

    def _wait(self, found: Found, cold: int) -> float:
        """Seconds until `cold` chunks have come from SSD and the request goes on, copies left out."""
        return self._reading(found, cold) + self._late_s[Tier.SSD if cold else Tier.DRAM]

    def _reading(self, found: Found, cold: int) -> float:
        if not cold:
            return 0.0
        if not found.ssd_bytes_per_s:
            return math.inf
        return (found.ahead_bytes + cold * found.chunk_bytes) / found.ssd_bytes_per_s

    def _copying(self, size: int) -> float:
        return self.copy.seconds(size) if self.copy.settled else 0.0

    def _best(self, found: Found, cold: Sequence[int], have: int, wait_max_s: float) -> int:
        """The number of chunks that saves most; `have` if none saves anything."""
        best, most = have, 0.0
        for chunks in self._ends(found, cold, have, wait_max_s):
            saves_s = self.saves((chunks - have) * found.chunk_tokens)
            wait_s = self._wait(found, cold[chunks - have])
            won = saves_s - wait_s - self._copying((chunks - have) * found.chunk_bytes)
            won -= MARGIN_SHARE * self.saves(cold[chunks - have] * found.chunk_tokens)
            tiers = {Tier.SSD if cold[chunks - have] else Tier.DRAM}
            if any(self._patience[tier].lost for tier in tiers):
                won -= SWITCH_SHARE * saves_s
            if wait_s <= wait_max_s and won > most:
                best, most = chunks, won
        return best

    def _ends(self, found: Found, cold: Sequence[int], have: int, wait_max_s: float) -> list[int]:
        """Where a run of chunks in one tier ends, or the time to wait does: in between, each chunk adds the same."""
        where = list(found.in_dram)
        ends = [n for n, (one, next_one) in enumerate(pairwise(where), 1) if one != next_one and n > have]
        if found.ssd_bytes_per_s:
            room = int((wait_max_s * found.ssd_bytes_per_s - found.ahead_bytes) / max(1, found.chunk_bytes))
            ends += [have + n for n in range(1, len(cold)) if cold[n] == room and cold[n] > cold[n - 1]]
        return sorted({*ends, len(where)})

    # -------------------------------------------------------------------------------------------------------- trying

    def _is_to_be_computed_once(self, found: Found, cold: Sequence[int], have: int, best: int) -> bool:
        """Loading seems to be faster, and not by much, than computing more than was ever measured: an engine that
        always loads would not learn what that takes. Once for each size."""
        tokens = (best - have) * found.chunk_tokens
        size = int(tokens).bit_length()
        if tokens <= 2 * self.compute.largest or size in self._computed:
            return False
        takes_s = self._wait(found, cold[best - have]) + self._copying((best - have) * found.chunk_bytes)
        if takes_s < EXTRAPOLATED_SHARE * self.saves(tokens):
            return False
        self._computed.add(size)
        return True

    def _few(self, found: Found) -> int:
        return max(1, EXPLORE_BYTES // max(1, found.chunk_bytes))

    def _try_ssd(
        self, found: Found, cold: Sequence[int], have: int, best: int, now: float, wait_max_s: float
    ) -> Plan | None:
        """The next few chunks on SSD as well, if it is time for that."""
        patience = self._patience[Tier.SSD]
        known = found.ssd_bytes_per_s > 0
        if cold[best - have]:
            patience.won()  # the rest would come too late; how fast it is will be seen
            return None
        if not patience.lose(now) and known:
            return None
        last = max(n for n in range(len(cold)) if cold[n] <= cold[best - have] + self._few(found))
        chunks = have + last
        saves_s = self.saves((chunks - have) * found.chunk_tokens)
        all_s = self.saves((len(found.in_dram) - have) * found.chunk_tokens)
        wait_s = min(wait_max_s, EXPLORE_SHARE * (all_s if known else 3 * all_s))
        takes_s = self._takes(found, cold[last], last)
        return Plan(chunks, Why.EXPLORE, wait_s, saves_s, takes_s)

    def _try_dram(self, found: Found, have: int, now: float) -> Plan:
        if not self._patience[Tier.DRAM].lose(now):
            return Plan(have, Why.COMPUTE, saves_s=0.0)
        run = next((n for n, here in enumerate(found.in_dram[have:]) if not here), len(found.in_dram) - have)
        chunks = min(run, self._few(found))
        saves_s = self.saves(chunks * found.chunk_tokens)
        return Plan(have + chunks, Why.EXPLORE, saves_s=saves_s, takes_s=self._takes(found, 0, chunks))


def _cold_before(in_dram: Sequence[bool], have: int) -> list[int]:
    """How many of the first n chunks behind those that the engine has are on SSD alone, for each n from 0 on."""
    counts = [0]
    for here in in_dram[have:]:
        counts.append(counts[-1] + (not here))
    return counts
