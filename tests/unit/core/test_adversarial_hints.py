"""Hints are advice: wrong, late, doubled, hostile or absent, they make nothing worse than LRU by more than a hundredth
of the hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.limits import EVICTION, Limits
from kvstore.core.requests.credit import LEAST_SHARE
from kvstore.core.store import Store
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ActionKind, ChunkKey, HintAction, Outcome, StagedPiece, WorkerId

CHUNK = 4096
DRAM_CHUNKS = 512
TURNS = 1_800
AHEAD = 100
SESSIONS = 400
WORSE_MAX = 0.01
Turn = tuple[ChunkKey, ...]


class Engine:
    """A tenant's worker, whose turns load what is there and save the rest; and its scheduler."""

    def __init__(self, store: Store, worker: int, tenant: str) -> None:
        self._store = store
        self._request = 0
        self.now = 0
        self.worker = WorkerId(worker)
        self.hits = self.asked = 0
        self.apply(ev.WorkerJoined(self.worker, tenant, tenant))
        spec = NamespaceSpec("m", b"w", "bytes", 64, (GroupSpec("kv", CHUNK),))
        self.namespace = self.ask(ev.Open, spec).namespace

    def apply(self, event: Any) -> list[Any]:
        return self._store.apply(event, self.now)

    def ask(self, kind: Any, *args: Any, **named: Any) -> Any:
        self._request += 1
        effects = self.apply(kind(ev.Ticket(self.worker, self._request), *args, **named))
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, ev.Reply) and effect.ticket.worker == self.worker:
                return effect.answer
            if isinstance(effect, ev.CopyIn):
                effects += self.apply(ev.OpDone(effect.op, tuple(range(len(effect.targets)))))
        return None

    def turn(self, keys: Turn, now: int) -> None:
        self.now = now
        self.apply(ev.Tick())
        found = self.ask(ev.Acquire, self.namespace, keys)
        self.hits += found.outcomes.count(Outcome.HIT)
        self.asked += len(keys)
        if found.lease:
            self.ask(ev.Release, (found.lease,))
        reserved = self.ask(ev.Reserve, self.namespace, keys)
        if reserved.reservation:
            pieces = tuple(StagedPiece(CHUNK * at, CHUNK) for at in range(len(reserved.extents)))
            self.ask(ev.Commit, reserved.reservation, pieces)

    @property
    def rate(self) -> float:
        return self.hits / self.asked


def store(eviction: str = "hints") -> Store:
    made = Store(Limits(DRAM_CHUNKS * CHUNK, 16 * CHUNK, eviction=eviction, pin_share_max=1.0))
    for effect in made.start():
        assert isinstance(effect, ev.CreateSegment)
        made.apply(ev.SegmentReady(effect.op), 0)
    return made


def session(number: int, chunks: int = 8) -> Turn:
    return tuple(ChunkKey(b"%d %d" % (number, place)) for place in range(chunks))


@cache
def turns(seed: int) -> tuple[Turn, ...]:
    """Few sessions come often, many rarely (Zipf)."""
    dice = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(SESSIONS)]
    return tuple(session(number) for number in dice.choices(range(SESSIONS), weights, k=TURNS))


Adversary = Callable[[Sequence[Turn], int, random.Random], list[tuple[bytes, int, Turn]]]
"""What it publishes before a turn: jobs, their positions and chunks."""


def true(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    return [(b"%d" % turn, turn - at, work[turn]) for turn in range(at, min(at + AHEAD, TURNS))]


def absent(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    return []


def late(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """What was asked for lately."""
    return [(b"%d" % turn, place, work[turn]) for place, turn in enumerate(range(max(0, at - AHEAD), at))]


def wrong(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """Any sessions; a job stays for as long as a true one would."""
    return [
        (b"%d" % turn, turn - at, session(random.Random(turn).randrange(SESSIONS)))
        for turn in range(at, at + AHEAD)
    ]


def standing(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """The same for ever: of what is asked for least."""
    return [(b"%d" % place, place, session(SESSIONS - 1 - place)) for place in range(AHEAD)]


def backwards(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """What comes last comes first."""
    return [(name, AHEAD - position, keys) for name, position, keys in true(work, at, dice)]


def opposite(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """Everything but what comes."""
    coming = {work[turn] for turn in range(at, min(at + AHEAD, TURNS))}
    others = [number for number in range(SESSIONS) if session(number) not in coming]
    return [(b"%d" % number, place, session(number)) for place, number in enumerate(others[:AHEAD])]


def shuffled(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    return [(name, dice.randrange(AHEAD), keys) for name, _, keys in true(work, at, dice)]


def doubled(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    return [
        (name + suffix, position, keys) for name, position, keys in true(work, at, dice) for suffix in (b"", b"+")
    ]  # fmt: skip


def unknown(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """Chunks that nobody has."""
    return [(b"%d" % place, place, session(10_000 + at + place)) for place in range(AHEAD)]


def everything(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """All that there is, in any order, over and over."""
    numbers = dice.sample(range(SESSIONS), SESSIONS)
    return [(b"%d" % number, place, session(number)) for place, number in enumerate(numbers)]


def everything_for_long(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """The same; what is first stays there for less time than it takes to be overdue, and nothing is taken back: what
    comes is always among what was named."""
    numbers = random.Random(at // 64).sample(range(SESSIONS), SESSIONS)
    return [(b"%d" % number, place, session(number)) for place, number in enumerate(numbers)]


def flipping(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """The truth, and with the next message everything but that."""
    return (true if at // 4 % 2 else opposite)(work, at, dice)


def seldom_true(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """The truth for as long as it takes to be believed, then everything but that for as long."""
    return (true if at // 60 % 2 else opposite)(work, at, dice)


def just_behind(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """What is about to be evicted, and what just was: whatever was used as long ago as DRAM reaches back."""
    recent: dict[Turn, None] = {}
    for turn in reversed(work[:at]):
        recent.setdefault(turn)
    reach = DRAM_CHUNKS // len(work[0])
    edge = list(recent)[reach - 16 : reach + 48]
    return [(b"%d" % place, place, keys) for place, keys in enumerate(edge)]


def beginnings(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """Chains that begin as what comes, and go on as nothing ever does."""
    return [
        (name, position, keys[:1] + session(20_000 + at)[1:]) for name, position, keys in true(work, at, dice)
    ]


def one_place(work: Sequence[Turn], at: int, dice: random.Random) -> list[tuple[bytes, int, Turn]]:
    """All first, what nobody wants before the rest."""
    return [(name, 0, keys) for name, _, keys in standing(work, at, dice) + true(work, at, dice)[1:]]


SIMPLE = (absent, late, wrong, standing, backwards, opposite, shuffled, doubled, unknown)
CUNNING = (everything_for_long, flipping, seldom_true, just_behind, beginnings, one_place)
POLICIES = ("hints", "expected")


def cases(told: dict[str, Sequence[Any]], seldom: dict[str, Sequence[Any]]) -> list[Any]:
    """By policy; what is told seldom is for the long run of the tests alone."""
    often = [pytest.param(each, policy, id=named(each, policy)) for policy in told for each in told[policy]]
    return often + [
        pytest.param(each, policy, id=named(each, policy), marks=pytest.mark.slow)
        for policy in seldom
        for each in seldom[policy]
    ]


def named(case: Any, policy: str) -> str:
    words = case if isinstance(case, tuple) else (case,)
    return "-".join([*(getattr(word, "__name__", str(word)) for word in words), policy])


def replay(adversary: Adversary | None, eviction: str, seed: int = 1) -> float:
    """Hits of the last two thirds: nobody is known by his first words."""
    engine = Engine(store(eviction), 1, "alice")
    work, dice = turns(seed), random.Random(2)
    for at, keys in enumerate(work):
        if adversary is not None and at % 4 == 0:
            hints = tuple(
                ev.Hint(name, position, keys=of) for name, position, of in adversary(work, at, dice)
            )
            engine.ask(ev.PublishQueue, engine.namespace, hints)
        engine.turn(keys, 100 * (at + 1))
        if at == TURNS // 3:
            engine.hits = engine.asked = 0
    return engine.rate


def replay_actions(
    adversary: Adversary, kind: ActionKind, eviction: str, *, cancels: bool, seed: int = 1
) -> float:
    """The same, told as hint actions: each names what comes, and when. `cancels`: what is not said again ends."""
    engine = Engine(store(eviction), 1, "alice")
    work, dice = turns(seed), random.Random(2)
    told: set[bytes] = set()
    for at, keys in enumerate(work):
        if at % 4 == 0:
            jobs = adversary(work, at, dice)
            actions = tuple(
                HintAction(name, kind, keys=of, ttl_ms=20_000, eta_ms=100 * place) for name, place, of in jobs
            )
            names = {action.name for action in actions}
            gone = tuple(sorted(told - names)) if cancels else ()
            engine.ask(ev.ApplyActions, engine.namespace, actions, gone)
            told = names
        engine.turn(keys, 100 * (at + 1))
        if at == TURNS // 3:
            engine.hits = engine.asked = 0
    return engine.rate


def worse_max(adversary: Adversary, eviction: str, costly: Adversary) -> float:
    """The policy `hints` believes what is likely. It loses .016 where chains only begin as what comes, told as a
    queue: half of the jobs come true, so the windows are half of what they were. Windows that close earlier lose
    more, because they open and close with each lucky streak (.055, measured with a share that is 0 when half came
    true; .038, where a job comes true only if the first of its chunks that was not there came, too). It loses .014
    where actions name what is about to be evicted, of which most is asked for some time. The default policy weighs
    what is named against what else is known, and loses nothing."""
    return 0.02 if eviction == "hints" and adversary is costly else WORSE_MAX


@cache
def lru() -> float:
    return replay(None, "lru")


@pytest.mark.parametrize(
    ("adversary", "eviction"),
    cases(
        {"hints": SIMPLE, "expected": (*CUNNING, opposite, standing)},
        {
            "hints": (*CUNNING, everything),
            "expected": (everything, absent, late, wrong, backwards, shuffled, doubled, unknown),
        },
    ),
)
def test_no_hints_make_it_much_worse_than_lru(adversary: Adversary, eviction: str) -> None:
    rate = replay(adversary, eviction)
    assert rate >= lru() - worse_max(adversary, eviction, beginnings), (rate, lru())


EXPECTED = [(adversary, ActionKind.EXPECT, True) for adversary in (late, wrong, standing, opposite, doubled)]
BROUGHT = [(adversary, ActionKind.PREFETCH, False) for adversary in (standing, opposite)]
CUNNING_ACTIONS = [(adversary, ActionKind.EXPECT, True) for adversary in (just_behind, flipping)]


@pytest.mark.parametrize(
    ("case", "eviction"),
    cases(
        {"hints": EXPECTED + BROUGHT, "expected": CUNNING_ACTIONS},
        {"hints": CUNNING_ACTIONS, "expected": EXPECTED + BROUGHT},
    ),
)
def test_no_actions_make_it_much_worse_than_lru(
    case: tuple[Adversary, ActionKind, bool], eviction: str
) -> None:
    adversary, kind, cancels = case
    rate = replay_actions(adversary, kind, eviction, cancels=cancels)
    assert rate >= lru() - worse_max(adversary, eviction, just_behind), (rate, lru())


@pytest.mark.parametrize("eviction", POLICIES)
def test_true_expectations_make_it_better(eviction: str) -> None:
    assert replay_actions(true, ActionKind.EXPECT, eviction, cancels=True) > lru() + 0.02


@pytest.mark.parametrize("eviction", POLICIES)
def test_true_hints_make_it_better(eviction: str) -> None:
    assert replay(true, eviction) > lru() + 0.05


def beside(of_alice: Adversary, of_bob: Adversary, eviction: str) -> float:
    """What is hit of two tenants' requests, theirs together and hers alone."""
    made = store(eviction)
    alice, bob = Engine(made, 1, "alice"), Engine(made, 2, "bob")
    dice = random.Random(2)
    for at in range(TURNS):
        for engine, work, adversary in ((alice, turns(1), of_alice), (bob, turns(2), of_bob)):
            if at % 4 == 0:
                hints = tuple(ev.Hint(name, place, keys=of) for name, place, of in adversary(work, at, dice))
                engine.ask(ev.PublishQueue, engine.namespace, hints)
            engine.turn(work[at], 100 * (at + 1))
        if at == TURNS // 3:
            alice.hits = alice.asked = 0
    return alice.rate


@cache
def lru_beside() -> float:
    return beside(absent, absent, "lru")


@pytest.mark.parametrize(
    ("of_alice", "of_bob"),
    [
        pytest.param(of_alice, of_bob, id=named(of_alice, of_bob.__name__), marks=marks)
        for of_alice, of_bob, marks in (
            (absent, opposite, ()),
            (true, opposite, ()),
            (absent, everything, pytest.mark.slow),
            *((each, flipping, pytest.mark.slow) for each in (absent, true)),
            *((each, standing, pytest.mark.slow) for each in (absent, true)),
        )
    ],
)
def test_who_lies_costs_nobody_else_anything(of_alice: Adversary, of_bob: Adversary) -> None:
    """Under the default policy, what one tenant has beside another who lies is what it had if nobody told anything."""
    rate = beside(of_alice, of_bob, EVICTION)
    least = lru_beside() - WORSE_MAX if of_alice is absent else lru_beside() + 0.03
    assert rate >= least, (rate, lru_beside())


def test_credit_follows_each_tenants_record() -> None:
    """Whose hints come true has all of its windows, whose do not a hundredth; and gets them back when they do."""
    made = store()
    alice, bob = Engine(made, 1, "alice"), Engine(made, 2, "bob")
    dice = random.Random(2)

    def live(first: int, last: int, of_bob: Adversary) -> tuple[float, float]:
        for at in range(first, last):
            for engine, work, adversary in ((alice, turns(1), true), (bob, turns(2), of_bob)):
                if at % 4 == 0:
                    hints = tuple(
                        ev.Hint(name, place, keys=of) for name, place, of in adversary(work, at, dice)
                    )
                    engine.ask(ev.PublishQueue, engine.namespace, hints)
                engine.turn(work[at], 100 * (at + 1))
        shares = made.state.jobs.shares
        return shares.get("alice", 1.0), shares.get("bob", 1.0)

    assert live(0, 700, opposite) == (1.0, LEAST_SHARE)
    alice_has, bob_has = live(700, 1_000, true)
    assert alice_has == 1.0 and bob_has > 0.9
