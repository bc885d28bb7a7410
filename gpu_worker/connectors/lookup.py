"""One lookup: which of a request's leading chunks are to be loaded, pinned in DRAM when it ends.

    read, promoting nothing       what is in DRAM is pinned; what is on SSD: how much, behind what, how fast
    choose                        how many to load (see `compute_or_load`)
    read those, promoting         wait as long as that was said to take; then look again at what has come

It never waits longer than computing the chunks would take, and what has come by then is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.client import Peeked, ReadLease
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Delay, Found, Plan, Why
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome, Reason, Tier

if TYPE_CHECKING:
    from kvstore.client import Namespace

LOST = frozenset(
    {
        *(Reason.NEVER_SEEN, Reason.EVICTED, Reason.EXPIRED, Reason.CORRUPT, Reason.INCOMPLETE),
        *(Reason.TRUNCATED, Reason.FORGOTTEN, Reason.OLD_EPOCH),
    }
)
"""Reasons of misses that last until somebody saves the chunk anew."""
COLD = frozenset({Reason.ON_SSD, Reason.ON_REMOTE})
"""Reasons of chunks that come if somebody asks for them."""
SAVING_SHARE = 0.5
"""Of the computing that it saves: so long a chunk is awaited that somebody is saving."""
PROMISED_AGAIN_S = 0.005
"""Between two looks for a chunk that somebody said he would save."""
LAST_LOOK_S = 0.01
"""For a look at what has come when the time is up."""
IN_VAIN_MAX = 3
"""Looks in a row that find nothing new, where the store said that something comes: reads may fail as soon as begun."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Of the leading keys."""

    hits: int
    """Are in DRAM and pinned."""
    load: int
    """Of them are to be loaded; those included that the engine has itself."""
    plan: Plan
    lost: ChunkKey | None = None
    """The first key behind them, when the store does not have it."""


def lost_key(lease: ReadLease) -> ChunkKey | None:
    """The key behind the lease's hits, if the store said that it does not have it."""
    gone = lease.hits < len(lease.keys) and lease.reasons[lease.hits] in LOST
    return lease.keys[lease.hits] if gone else None


def peek(namespace: Namespace, keys: Sequence[ChunkKey], *, any_order: bool = False) -> Peeked | None:
    """As the namespace's own, of any number of keys; unless `any_order`, of those before the first that is missing."""
    usable = hits = 0
    outcomes: list[Outcome] = []
    for start in range(0, len(keys), KEYS_PER_REQUEST_MAX):
        part = keys[start : start + KEYS_PER_REQUEST_MAX]
        peeked = namespace.peek(part)
        if peeked is None:
            return None
        hits += peeked.hits if hits == start else 0
        usable += peeked.usable if usable == start else 0
        outcomes += peeked.outcomes
        if peeked.usable < len(part) and not any_order:
            break
    return Peeked(usable, hits, tuple(outcomes))


def note(namespace: Namespace, keys: Sequence[ChunkKey], usable: int) -> None:
    """Tell the daemon what a request was answered by `peek`: so many leading keys of these."""
    for start in range(0, min(len(keys), usable + 1), KEYS_PER_REQUEST_MAX):
        part = keys[start : start + KEYS_PER_REQUEST_MAX]
        here = min(len(part), usable - start)
        namespace.note_lookup(part, Peeked(here, here))


def look_up(
    namespace: Namespace,
    keys: Sequence[ChunkKey],
    choice: ComputeOrLoad,
    leases: list[ReadLease],
    *,
    chunk_tokens: int,
    deadline: float,
    have: Callable[[], int] = lambda: 0,
    promised: int = 0,
    delay: Delay | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Looked:
    """Adds to `leases` what it pins, also when it raises. `deadline`: of `clock`; `have`: leading chunks that the
    engine is known by now to have itself; `promised`: leading chunks that another engine is about to save; `delay`: is
    told what the request waits for."""
    delay = delay or Delay()
    search = _Search(namespace, keys, choice, leases, chunk_tokens, deadline, have, promised, delay, clock)
    while not search.over:
        search.look()
    return search.result()


class _Search:
    def __init__(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        choice: ComputeOrLoad,
        leases: list[ReadLease],
        chunk_tokens: int,
        deadline: float,
        have: Callable[[], int],
        promised: int,
        delay: Delay,
        clock: Callable[[], float],
    ) -> None:
        self._delay = delay
        self._namespace = namespace
        self._keys = keys
        self._choice = choice
        self._leases = leases
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = namespace.spec.chunk_bytes
        self._deadline = deadline
        self._have = have
        self._promised = min(promised, len(keys))
        self._clock = clock
        self._begun = clock()
        self._explored = False
        self._waited = False
        """Since the last look."""
        self._in_vain = 0
        """Looks since the last that found something new."""
        self.over = not keys
        self._hits = 0
        """Leading keys that are in DRAM and pinned."""
        self._plan = Plan(0, Why.NOTHING, saves_s=0.0)
        self._lost: ChunkKey | None = None

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._clock())

    def _within(self, seconds: float) -> None:
        """From the begin of the lookup on; never later than was said before."""
        self._deadline = min(self._deadline, self._begun + seconds)

    def result(self) -> Looked:
        if min(self._hits, self._plan.chunks) > self._have():
            self._delay.begin(self._plan, Tier.DRAM, self._clock())
        return Looked(self._hits, min(self._hits, self._plan.chunks), self._plan, self._lost)

    def look(self) -> None:
        """Once at what is there; and wait once for what is wanted of the rest."""
        left_s = self._left_s
        waited, self._waited = self._waited, False
        rest = self._keys[self._hits : self._hits + KEYS_PER_REQUEST_MAX]
        if not rest or (left_s <= 0 and not waited):
            self.over = True
            return
        lease = self._namespace.read(rest, promote=False, pin=True, timeout_s=max(left_s, LAST_LOOK_S))
        self._keep(lease)
        self._hits += lease.hits
        self._lost = lost_key(lease)
        behind = range(lease.hits, len(rest))
        cold = 0
        while cold < len(behind) and lease.reasons[behind[cold]] in (Reason.NONE, *COLD):
            cold += 1
        if not behind:
            self._choose([])
            return  # there may be more than one request can name
        where = [lease.outcomes[number] is Outcome.HIT for number in behind[:cold]]
        plan = self._choose(where, lease)
        wanted = plan.chunks - self._hits if plan.chunks > self._have() else 0
        self._in_vain = 0 if lease.hits else self._in_vain + 1
        if wanted > 0 and plan.wait_s > 0:
            self._delay.begin(plan, Tier.SSD, self._clock())
        if self._in_vain > IN_VAIN_MAX or left_s <= 0:
            self.over = True
        elif wanted > 0:
            self._promote(rest[lease.hits : lease.hits + wanted], plan)
        elif cold or not self._await_saving(lease, behind):
            self.over = True

    def _keep(self, lease: ReadLease) -> None:
        if lease.lease_id:
            self._leases.append(lease)
        else:
            lease.release()

    def _choose(self, where: Sequence[bool], lease: ReadLease | None = None) -> Plan:
        """`where`: behind the hits, what is in DRAM and what on SSD."""
        in_dram = [True] * self._hits + list(where)
        ahead, rate = (lease.backlog.ahead_bytes, lease.backlog.ssd_bytes_per_s) if lease else (0, 0)
        self._choice.reads_from_ssd(rate)
        found = Found(in_dram, self._chunk_tokens, self._chunk_bytes, ahead, rate)
        plan = self._choice.choose(found, now=self._clock(), wait_max_s=self._left_s, have=self._have())
        self._plan = plan
        if plan.why is Why.EXPLORE and plan.chunks > self._hits:
            if self._explored:
                self._plan = Plan(self._hits, Why.EXPLORE, saves_s=plan.saves_s)
            self._explored = True
        return self._plan

    def _promote(self, wanted: Sequence[ChunkKey], plan: Plan) -> None:
        if plan.why is not Why.EXPLORE:
            self._within(plan.saves_s)
        wait_s = min(plan.wait_s, self._left_s)
        if wait_s <= 0:
            self.over = True
            return
        self._waited = True
        lease = self._namespace.read(wanted, wait_ms=_ms(wait_s), timeout_s=self._left_s)
        try:
            if Outcome.PENDING in lease.outcomes:
                lease.settled(wait_s)
        finally:
            self._keep(lease)

    def _await_saving(self, lease: ReadLease, behind: Sequence[int]) -> bool:
        """Whether to look again: somebody saves the next chunk, or has promised to."""
        first = behind[0]
        saving = sum(lease.outcomes[number] is not Outcome.MISS for number in behind)
        promised = self._promised - self._hits
        if lease.reasons[first] is Reason.BEING_SAVED:
            useful = max(saving, promised)
        elif lease.reasons[first] in LOST and promised > 0:
            useful = promised
        else:
            return False
        self._within(SAVING_SHARE * self._choice.saves(useful * self._chunk_tokens))
        left_s = self._left_s
        if left_s <= 0:
            return False
        self._waited = True
        if lease.reasons[first] is Reason.BEING_SAVED:
            waiting = self._namespace.read(
                [lease.keys[first]], promote=False, wait_ms=_ms(left_s), timeout_s=left_s
            )
            try:
                if waiting.outcomes[0] is Outcome.PENDING:
                    waiting.settled(left_s)
            finally:
                waiting.release()
        else:
            self._in_vain = 0  # it is not the store that said so
            time.sleep(min(PROMISED_AGAIN_S, left_s))
        return True


def _ms(seconds: float) -> int:
    return max(1, int(1000 * seconds))
