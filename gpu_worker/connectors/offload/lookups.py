"""What is in the store of the keys that a request asks about. The engine's thread only looks at answers.

What the directory in shared memory says is known at once, and nothing is pinned or promoted for it: the load looks
again, and waits for what is on SSD. Else a lookup is a read without copies, on a thread of the crew: it pins what is
there and has what is on SSD promoted. The pins are kept for the load that follows, for at most `hold_s`.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client import ReadLease
from kvstore.errors import StoreError
from kvstore.gpu_worker.compute_or_load import ComputeOrLoad, Delay, Found, Plan, Why
from kvstore.gpu_worker.connectors.lookup import COLD, LAST_LOOK_S, SAVING_SHARE, note, peek
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.tally import Tally
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome, Reason, Tier

if TYPE_CHECKING:
    from kvstore.client import Namespace

Opener = Callable[[float], "Namespace | None"]
"""Gives the namespace, at the latest after so many seconds; None: there is no store now."""
Needed = Callable[[Collection[ChunkKey]], Sequence[ChunkKey]]
"""Of the keys of a question that are there, those that the request needs. Called on a thread of the crew."""
THERE = (Outcome.HIT, Outcome.PENDING)
FRESH_S = 0.05
"""An answer out of the directory is used for so long while the engine asks again."""
log = logging.getLogger(__name__)


class Verdict(enum.Enum):
    HIT = "hit"
    MISS = "miss"
    WAIT = "wait"
    """Ask again; there is a verdict by the request's deadline."""


class Hit(NamedTuple):
    """Where a hit is: key number `number` of `lease`."""

    lease: ReadLease
    number: int


class Question:
    """Keys of one request that the store is asked about once. Its leases live until nobody uses it any more."""

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        *,
        prefix: bool,
        deadline: float,
        held_until: float,
        needed: Needed | None = None,
        busy_s: float = 0.0,
    ) -> None:
        """`prefix`: behind the first key that is missing, the others are of no use. `needed`: only what it names is
        pinned, promoted and found."""
        self.keys = tuple(keys)
        self.prefix = prefix
        self.needed = needed
        self.deadline = deadline
        self.held_until = held_until
        self.done = False
        self.delay = Delay(busy_s=busy_s)
        self.bound_s = math.inf
        """A load of what is found that takes longer is of no use."""
        self.found: dict[ChunkKey, Hit | None] = {}
        """None: it is there and not pinned."""
        self.cold: frozenset[ChunkKey] = frozenset()
        """Of those that are not pinned: they are on SSD, and the load waits for them ..."""
        self.wait_s = math.inf
        """... for so long at most."""
        self.fresh_until = math.inf
        """Of an answer out of the directory: later it is worth another look."""
        self._lock = threading.Lock()
        self._users = 1
        self._leases: list[ReadLease] = []

    def settle(self, found: Mapping[ChunkKey, Hit | None], leases: list[ReadLease]) -> bool:
        """The store's answer. False: nobody waits for it any more, and it is given back at once."""
        with self._lock:
            taken = self._users > 0
            if taken:
                self.found = dict(found)
                self._leases, leases = leases, []
            self.done = True
        for lease in leases:
            lease.release()
        return taken

    def use(self) -> bool:
        """Keep the leases until `end` was called once more. False: they have gone."""
        with self._lock:
            if self._users:
                self._users += 1
            return self._users > 0

    def end(self) -> None:
        with self._lock:
            assert self._users > 0
            self._users -= 1
            leases: list[ReadLease] = []
            if not self._users:
                leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()


class Lookups:
    """Asks on the threads of a crew, and finds only what is worth loading."""

    def __init__(
        self,
        crew: Crew,
        opener: Opener,
        tally: Tally,
        choice: ComputeOrLoad,
        tokens_of: Callable[[Sequence[ChunkKey]], int],
    ) -> None:
        """`tokens_of`: how many tokens need not be computed with these chunks."""
        self._crew = crew
        self._opener = opener
        self._tally = tally
        self._choice = choice
        self._tokens_of = tokens_of

    def start(self, question: Question) -> None:
        """When too many wait already, nothing is found."""
        if self._crew.offer(lambda: self._answer(question)):
            return
        self._tally.add(lookups_dropped=len(question.keys))
        question.settle({}, [])

    def at_once(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        now: float,
        *,
        needed: Needed | None,
        wait_s: float,
        hold_s: float,
        ahead: int,
        busy_s: float,
        again: bool,
    ) -> Question | None:
        """A question that is answered already, by the directory in shared memory; None: it cannot tell enough, and
        the daemon has to be asked. `needed`: as of a question; None: these are leading keys. `wait_s`: how long the
        load may wait for what is on SSD; `ahead`: chunks that other loads wait for. `again`:
        the daemon was told of the request's question before."""
        prefix = needed is None
        peeked = peek(namespace, keys, any_order=not prefix)
        if peeked is None:
            return None
        where = dict(zip(keys, peeked.outcomes, strict=False))
        there = [key for key in keys if where.get(key, Outcome.MISS) in THERE]
        wanted = keys[: peeked.usable] if needed is None else needed(frozenset(there))
        on_ssd = {key for key in wanted if where[key] is not Outcome.HIT}
        if on_ssd and self._choice.compute.known and not self._choice.ssd_bytes_per_s:
            return None  # nobody has told yet how fast it reads
        plan, chosen = self._choose(namespace, wanted, on_ssd, now, wait_s, ahead)
        there_max = len(wanted)
        if needed is not None and 0 < len(chosen) < len(wanted) and plan.why is not Why.EXPLORE:
            # Some of what a boundary needs is of no use alone. There may be one for which what is in DRAM is enough.
            wanted = needed(frozenset(key for key in there if where[key] is Outcome.HIT))
            plan, chosen = self._choose(namespace, wanted, set(), now, wait_s, ahead)
        question = Question(keys, prefix=prefix, deadline=now, held_until=now + hold_s, busy_s=busy_s)
        question.bound_s = plan.bound_s
        question.fresh_until = now + FRESH_S
        question.cold = frozenset(on_ssd.intersection(chosen))
        if question.cold:
            question.wait_s = plan.wait_s
        if chosen:
            question.delay.begin(plan, Tier.SSD if question.cold else Tier.DRAM, now)
        self._tally.add(computed=there_max - len(chosen))
        question.settle(dict.fromkeys(chosen), [])
        if again:
            pass
        elif prefix or not chosen:
            note(namespace, keys, peeked.usable)
        else:
            note(namespace, chosen, len(chosen))  # of several groups, nobody knows which key was missed
        return question

    def _choose(
        self,
        namespace: Namespace,
        wanted: Sequence[ChunkKey],
        on_ssd: Collection[ChunkKey],
        now: float,
        wait_s: float,
        ahead: int,
    ) -> tuple[Plan, Sequence[ChunkKey]]:
        """Which of the keys, all of them there, are worth loading."""
        size = namespace.spec.chunk_bytes
        tokens = self._tokens_of(wanted) / len(wanted) if wanted else 0.0
        in_dram = [key not in on_ssd for key in wanted]
        there = Found(in_dram, tokens, size, ahead * size, self._choice.ssd_bytes_per_s)
        plan = self._choice.choose(there, now=now, wait_max_s=wait_s)
        return plan, wanted[: plan.chunks]

    def _answer(self, question: Question) -> None:
        leases: list[ReadLease] = []
        found: dict[ChunkKey, Hit] = {}
        try:
            namespace = self._opener(max(0.0, question.deadline - time.monotonic()))
            if namespace is not None:
                keys = self._chosen(namespace, question)
                for start in range(0, len(keys), KEYS_PER_REQUEST_MAX):
                    part = keys[start : start + KEYS_PER_REQUEST_MAX]
                    wanted, deadline = self._worth(namespace, part, question, found, leases)
                    if wanted:
                        find(namespace, wanted, deadline, found, leases, prefix=question.prefix)
                    if question.prefix and part[-1] not in found:
                        break
        except StoreError as error:
            log.warning("asked in vain: %s", error)
        finally:
            late = time.monotonic() >= question.deadline
            if not (question.settle(found, leases) and found) and late:
                self._tally.add(lookups_late=len(question.keys))

    def _worth(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        question: Question,
        found: dict[ChunkKey, Hit],
        leases: list[ReadLease],
    ) -> tuple[Sequence[ChunkKey], float]:
        """Which of the keys are still to be found, and until when: the others were found just now, are not there, or
        take longer to load than to compute."""
        if not self._choice.compute.known:
            return keys, question.deadline
        now = time.monotonic()
        left_s = max(0.0, question.deadline - now)
        lease = namespace.read(keys, any_order=not question.prefix, promote=False, pin=True, timeout_s=left_s)
        leases.append(lease)
        there = [number for number, outcome in enumerate(lease.outcomes) if outcome is not Outcome.MISS]
        if not question.prefix:
            there.sort(key=lambda number: lease.reasons[number] in COLD)  # first what is in DRAM
        plan = self._choice.choose(
            Found(
                [lease.reasons[number] not in COLD for number in there],
                self._tokens_of(keys) / len(keys),
                namespace.spec.chunk_bytes,
                lease.backlog.ahead_bytes,
                lease.backlog.ssd_bytes_per_s,
            ),
            now=now,
            wait_max_s=left_s,
        )
        self._choice.reads_from_ssd(lease.backlog.ssd_bytes_per_s)
        question.bound_s = max(plan.bound_s, question.bound_s if found else 0.0)
        self._tally.add(computed=len(there) - plan.chunks)
        chosen = there[: plan.chunks]
        hits = [number for number in chosen if lease.outcomes[number] is Outcome.HIT]
        found.update((keys[number], Hit(lease, number)) for number in hits)
        wait_s = plan.wait_s
        if any(lease.reasons[number] is Reason.BEING_SAVED for number in chosen):
            wait_s = max(wait_s, SAVING_SHARE * plan.saves_s)
        rest = [keys[number] for number in chosen if lease.outcomes[number] is Outcome.PENDING]
        if chosen:
            question.delay.begin(plan, Tier.SSD if rest and plan.wait_s > 0 else Tier.DRAM, now)
        return rest, min(question.deadline, now + wait_s)

    def _chosen(self, namespace: Namespace, question: Question) -> Sequence[ChunkKey]:
        if question.needed is None:
            return question.keys
        there: set[ChunkKey] = set()
        for start in range(0, len(question.keys), KEYS_PER_REQUEST_MAX):
            part = question.keys[start : start + KEYS_PER_REQUEST_MAX]
            matched = namespace.match(part, timeout_s=max(0.0, question.deadline - time.monotonic()))
            there.update(key for key, outcome in zip(part, matched.outcomes, strict=True) if outcome in THERE)
        return question.needed(there)


def find(
    namespace: Namespace,
    keys: Sequence[ChunkKey],
    deadline: float,
    found: dict[ChunkKey, Hit],
    leases: list[ReadLease],
    *,
    prefix: bool,
) -> None:
    """Adds to `found` what is there of `keys`, pinned by `leases`; waits until the deadline for what is on SSD, and
    finds what has come by then.

    What was pinned first stays pinned while the rest is waited for: a chunk that was saved as transient would sink
    again.
    """
    wanted = list(keys)
    while wanted:
        left_s = max(0.0, deadline - time.monotonic())
        lease = namespace.read(
            wanted, any_order=not prefix, wait_ms=int(1000 * left_s), timeout_s=max(left_s, LAST_LOOK_S)
        )
        leases.append(lease)
        found.update(
            (wanted[number], Hit(lease, number))
            for number, outcome in enumerate(lease.outcomes)
            if outcome is Outcome.HIT
        )
        if Outcome.PENDING not in lease.outcomes:
            return
        ready = lease.settled(max(0.0, deadline - time.monotonic()))
        wanted = [wanted[number] for number in ready]


class Inquiry:
    """One request, as far as it has asked. For the engine's thread alone; no call waits."""

    def __init__(
        self, name: str, position: int, lookups: Lookups, tally: Tally, *, lookup_s: float, hold_s: float
    ) -> None:
        """`position`: requests came in this order."""
        self.name = name
        self.position = position
        self.begun: float | None = None
        """When it first asked since it waits; None: it does not wait for us."""
        self._lookups = lookups
        self._tally = tally
        self._lookup_s = lookup_s
        self._hold_s = hold_s
        self._new: list[ChunkKey] = []
        self._asked: dict[ChunkKey, Question | None] = {}
        """The question that has the key; None until there is one."""
        self._questions: list[Question] = []
        self._loaded: set[ChunkKey] = set()
        self._told = False
        """Whether the daemon knows what it asked about at first."""
        self._delays: list[Delay] = []
        """Of the questions since it waits."""

    def __repr__(self) -> str:
        return f"Inquiry({self.name}, {len(self._asked)} keys asked, {len(self._loaded)} loaded)"

    @property
    def unasked(self) -> bool:
        """Whether it has asked nothing since it waits, and had nothing loaded before."""
        return self.begun is None and not self._loaded

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """Asked about since it waits; where it is known what of that the request needs, only that."""
        return tuple(
            key
            for key, question in self._asked.items()
            if question is None or question.needed is None or key in question.found
        )

    @property
    def new(self) -> tuple[ChunkKey, ...]:
        """To be asked about."""
        return tuple(self._new)

    @property
    def loads(self) -> bool:
        """Whether some of what was found was loaded, or is being."""
        return bool(self._loaded)

    def knows(self, key: ChunkKey) -> bool:
        """Whether the key was asked about since it waits, or loaded before."""
        return key in self._asked or key in self._loaded

    def outdated(self, first: ChunkKey, now: float) -> bool:
        """Whether all that it knows, beginning with this key, was seen in the directory and may be otherwise by now.
        Then it has asked nothing yet. Not once something of it is loaded."""
        question = self._asked.get(first)
        old = question is not None and question.keys[0] == first and now > question.fresh_until
        if not old or self._loaded or any(each.fresh_until == math.inf for each in self._questions):
            return False
        delays = self._delays[:1]
        self.scheduled()
        self._delays = delays
        return True

    def verdict(self, key: ChunkKey, now: float, *, keys_max: int) -> Verdict:
        """Of more than `keys_max` keys nothing is asked: no memory could hold what was found."""
        if key in self._loaded:
            # Its load failed, or others have taken its row since. Not again and again: the engine computes.
            return Verdict.MISS
        if key not in self._asked:
            if len(self._asked) >= keys_max:
                return Verdict.MISS
            if self.begun is None:
                self.begun = now
            self._asked[key] = None
            self._new.append(key)
        question = self._asked[key]
        if question is not None and question.done:
            return Verdict.HIT if key in question.found else Verdict.MISS
        assert self.begun is not None
        if now < self.begun + self._lookup_s:
            return Verdict.WAIT
        return Verdict.MISS

    def look(
        self,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        now: float,
        *,
        needed: Needed | None = None,
        ahead: int = 0,
        busy_s: float = 0.0,
    ) -> None:
        """Before the engine asks about the first of these keys: it will be answered at once, if the directory knows.
        Does not wait. `needed`, `ahead`: see `Lookups.at_once`."""
        question = self._lookups.at_once(
            namespace,
            keys,
            now,
            needed=needed,
            wait_s=self._lookup_s,
            hold_s=self._hold_s,
            ahead=ahead,
            busy_s=busy_s,
            again=self._told,
        )
        if question is None:
            return
        self._told = True
        if self.begun is None:
            self.begun = now
        self._delays.append(question.delay)
        self._asked.update(dict.fromkeys(keys, question))
        self._questions.append(question)
        self._tally.add(lookups=len(keys))

    def ask(self, now: float, *, prefix: bool, needed: Needed | None = None, busy_s: float = 0.0) -> None:
        """Ask about what is new, all at once. `busy_s`: what the engine has computed (see `ComputeOrLoad.delayed`)."""
        if not self._new or self.begun is None:
            return
        keys, self._new = self._new, []
        deadline = self.begun + self._lookup_s
        question = Question(
            keys,
            prefix=prefix,
            deadline=deadline,
            held_until=deadline + self._hold_s,
            needed=needed,
            busy_s=busy_s,
        )
        self._delays.append(question.delay)
        self._asked.update(dict.fromkeys(keys, question))
        self._tally.add(lookups=len(keys))
        if now < deadline:
            self._lookups.start(question)
        else:
            question.settle({}, [])
        self._questions.append(question)

    def tick(self, now: float) -> None:
        """Stop waiting for answers that are late, and unpin what was found too long ago."""
        for question in list(self._questions):
            if not question.done and now >= question.deadline:
                self._drop(question)
                question.settle({}, [])
            elif question.done and now >= question.held_until:
                self._drop(question)

    def load(self, keys: Sequence[ChunkKey]) -> tuple[list[Hit | None], list[Question]]:
        """Where the keys were found (None: look again), and what is to be ended once they are loaded."""
        self._loaded.update(keys)
        hits: list[Hit | None] = []
        used: dict[int, Question] = {}
        for key in keys:
            question = self._asked.get(key)
            if question is None or (id(question) not in used and not question.use()):
                hits.append(None)
                continue
            used[id(question)] = question
            hits.append(question.found.get(key))
        return hits, list(used.values())

    def delay(self) -> Delay:
        """What it has waited for since it first asked."""
        return next((delay for delay in self._delays if delay.tier is not None), Delay())

    def scheduled(self) -> None:
        """It waits no more: the engine has started to compute it."""
        self._delays.clear()
        for question in list(self._questions):
            self._drop(question)
        self._asked.clear()
        self._new.clear()
        self.begun = None

    def again(self) -> None:
        """What it had was taken away; it starts from the beginning."""
        self.scheduled()
        self._loaded.clear()
        self._told = False

    def _drop(self, question: Question) -> None:
        self._questions.remove(question)
        question.end()
