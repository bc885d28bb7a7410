"""One lookup against a store whose SSD reads at a given speed, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client import Backlog
from kvstore.gpu_worker.compute_or_load import EXPLORE_SHARE, ComputeOrLoad, Delay, Why
from kvstore.gpu_worker.connectors import lookup as module
from kvstore.gpu_worker.connectors.lookup import Looked, look_up
from kvstore.types import ChunkKey, Outcome, Reason, Tier

TOKENS, CHUNK = 64, 1 << 20
RATE = 100e6


PLACES = {"D": Reason.NONE, "S": Reason.ON_SSD, "R": Reason.ON_REMOTE, "W": Reason.BEING_SAVED}


class Store:
    """Chunks `places`: D in DRAM, S on SSD, W being saved, . missing; the SSD reads one after the other."""

    def __init__(self, places: str, *, rate: float = RATE, told: float | None = None, ahead: int = 0) -> None:
        self.places = list(places)
        self.keys = [ChunkKey(bytes([number])) for number in range(len(places))]
        self.now = 0.0
        self.rate = rate
        self.told = rate if told is None else told
        self.ahead = ahead
        self.spec = SimpleNamespace(chunk_bytes=CHUNK)
        self.reading: dict[int, float] = {}
        """Chunk -> when it has come."""
        self.saved_at: dict[int, float] = {}
        self.promoted: set[int] = set()
        self.pins = 0
        self.failing = False
        """Each read from SSD fails at once."""
        self.reads = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pass_(seconds)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        for number, at in [*self.reading.items(), *self.saved_at.items()]:
            if at <= self.now:
                self.places[number] = "D"
        self.reading = {number: at for number, at in self.reading.items() if at > self.now}
        self.saved_at = {number: at for number, at in self.saved_at.items() if at > self.now}

    def promote(self, number: int) -> None:
        if number not in self.reading:
            self.promoted.add(number)
            begun = max([self.now + self.ahead / self.rate, *self.reading.values()])
            self.reading[number] = begun + CHUNK / self.rate

    def read(
        self,
        keys: Sequence[ChunkKey],
        *,
        promote: bool = True,
        pin: bool = False,
        wait_ms: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        self.reads += 1
        assert timeout_s is None or timeout_s > 0
        self.pass_(0.001)
        numbers = [self.keys.index(key) for key in keys]
        reasons = []
        for number in numbers:
            place = self.places[number]
            if place == ".":
                reasons += [Reason.NEVER_SEEN] + [Reason.BEYOND_MISS] * (len(keys) - len(reasons) - 1)
                break
            reasons.append(PLACES[place])
            if place in "SR" and promote:
                self.promote(number)
        return Lease(self, keys, numbers, reasons, wait_ms)


class Lease:
    def __init__(
        self, store: Store, keys: Sequence[ChunkKey], numbers: list[int], reasons: list[Reason], wait_ms: int
    ) -> None:
        self._store = store
        self._numbers = numbers
        self._wait_ms = wait_ms
        self.keys = tuple(keys)
        self.reasons = reasons
        pending = (Reason.ON_SSD, Reason.ON_REMOTE, Reason.BEING_SAVED)
        self.outcomes = [
            Outcome.HIT if why is Reason.NONE else Outcome.PENDING if why in pending else Outcome.MISS
            for why in reasons
        ]
        hits = [outcome is Outcome.HIT for outcome in self.outcomes]
        self.hits = hits.index(False) if False in hits else len(hits)
        self.lease_id = int(any(hits))
        cold = reasons.count(Reason.ON_SSD)
        self.backlog = Backlog(cold * CHUNK, store.ahead, int(store.told)) if cold else Backlog()
        store.pins += self.lease_id

    def settled(self, timeout_s: float) -> None:
        store = self._store
        assert self._wait_ms > 0
        if store.failing:
            store.reading.clear()
            return
        ends = list((store.reading | store.saved_at).values())
        store.pass_(min(timeout_s, max(ends) - store.now + 0.001) if ends else timeout_s)

    def release(self) -> None:
        self._store.pins -= self.lease_id
        self.lease_id = 0


def choice(tokens_per_s: float = 1_000) -> ComputeOrLoad:
    made = ComputeOrLoad()
    for tokens in (1, 100, 900, 100, 900, 100):  # the first does not count
        made.compute.observe(tokens, 0.01 + tokens / tokens_per_s)
        made.copy.observe(tokens * CHUNK, tokens * CHUNK / 5e9)
    return made


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: stores[-1].sleep(seconds))


stores: list[Store] = []


def ask(store: Store, made: ComputeOrLoad | None = None, **more: Any) -> Looked:
    stores.append(store)
    leases: list[Any] = []
    options = {"deadline": 5.0, "chunk_tokens": TOKENS, "clock": store.clock, **more}
    looked = look_up(store, store.keys, made or choice(), leases, **options)  # type: ignore[arg-type]
    pinned = {number for lease in leases if lease.lease_id for number in lease._numbers}
    assert pinned.issuperset(range(looked.hits)), "what is to be loaded is pinned"
    assert looked.load <= looked.hits
    for lease in leases:
        lease.release()
    assert store.pins == 0, "whatever is pinned is in `leases`"
    return looked


def test_what_is_in_dram_takes_one_question() -> None:
    store = Store("DDD.")
    looked = ask(store)
    assert (looked.hits, looked.load, looked.lost) == (3, 3, store.keys[3])
    assert store.reads == 1 and not store.promoted


def test_an_ssd_that_is_fast_enough_is_waited_for() -> None:
    store = Store("DDSSSS")
    looked = ask(store)
    assert (looked.hits, looked.load) == (6, 6)
    assert store.now < 0.1


def test_what_a_request_waits_for_is_told_as_it_begins() -> None:
    """The engine measures until the request goes on: the last chunk is not the end of it."""
    for places, tier in (("DDSS", Tier.SSD), ("DD", Tier.DRAM), ("..", None)):
        delay = Delay()
        ask(Store(places), delay=delay)
        assert delay.tier is tier
        assert tier is None or delay.since <= 0.003
        reading_s = 2 * CHUNK / RATE if tier is Tier.SSD else 0.0
        copying_s = len(places) * CHUNK / 5e9 if tier is not None else 0.0
        assert delay.expected_s == pytest.approx(reading_s + copying_s)
    had = Delay()
    ask(Store("DD"), delay=had, have=lambda: 2)
    assert had.tier is None


def test_what_is_beyond_the_node_is_waited_for_a_little() -> None:
    """Nobody tells how fast that is: what it may cost is bounded by what it could save."""
    near = Store("DD" + "R" * 8, rate=1e9)
    assert ask(near).load == 10
    far = Store("DD" + "R" * 8, rate=1.0)
    assert ask(far).load == 2
    assert far.now < 0.1 * 8 * TOKENS / 1_000 + 0.05


def test_one_that_is_slower_than_computing_is_left_alone() -> None:
    store = Store("DDSSSS", rate=1e6)
    looked = ask(store)
    assert (looked.hits, looked.load, looked.plan.why) == (2, 2, Why.SPLIT)
    assert not store.promoted and store.now < 0.01


def test_what_others_wait_for_counts() -> None:
    store = Store("S" * 4, ahead=100 << 20)
    assert ask(store).load == 0
    assert not store.promoted


def test_one_that_is_slower_than_it_was_costs_no_more_than_computing() -> None:
    """It said 100 MB/s, and gives 4."""
    store = Store("S" * 16, rate=4e6, told=RATE)
    looked = ask(store, deadline=60.0)
    assert store.now <= 16 * TOKENS / 1_000 + 0.1
    assert 0 < looked.load < 16, "what has come is used"


def test_nobody_waits_beyond_the_deadline() -> None:
    store = Store("S" * 16, rate=1e6, told=RATE)
    ask(store, ComputeOrLoad(), deadline=0.7)
    assert store.now <= 0.71


def test_while_nobody_knows_what_computing_takes_everything_is_waited_for() -> None:
    store = Store("S" * 3, rate=1e6)
    assert ask(store, ComputeOrLoad()).load == 3


def test_what_the_engine_has_by_itself_is_not_read_from_ssd() -> None:
    store = Store("SSSS", rate=1e6)
    assert ask(store, have=lambda: 4).load == 0
    assert not store.promoted


def test_an_unknown_ssd_is_tried_with_little_time_and_then_used() -> None:
    store = Store("S" * 40, rate=500e6, told=0)

    def learn(keys: Sequence[ChunkKey], **options: Any) -> Any:
        if store.promoted:
            store.told = store.rate
        return Store.read(store, keys, **options)

    store.read = learn  # type: ignore[method-assign]
    assert ask(store).load == 40
    slow = Store("S" * 40, rate=1e5, told=0)
    assert ask(slow).load == 0
    assert slow.now <= 3 * EXPLORE_SHARE * 40 * TOKENS / 1_000 + 0.02
    assert len(slow.promoted) < 40


def test_a_chunk_that_somebody_saves_just_now_is_awaited_but_not_for_long() -> None:
    store = Store("DDWD")
    store.saved_at[2] = 0.02
    assert ask(store).load == 4
    never = Store("DDWW")
    assert ask(never).load == 2
    assert never.now <= 2 * TOKENS / 1_000


def test_reads_that_fail_at_once_are_not_asked_for_again_and_again() -> None:
    store = Store("SS")
    store.failing = True
    assert ask(store, deadline=60.0).load == 0
    assert store.reads < 10


def test_what_was_promised_is_awaited_but_not_for_long() -> None:
    """By the engine that computed the prompt: it saves behind its answer."""
    store = Store("D....")
    store.saved_at = {number: 0.01 * number for number in range(1, 4)}
    assert ask(store, promised=4).load == 4
    assert ask(Store("D...."), promised=0).load == 1
    never = Store("D....")
    assert ask(never, promised=1_000_000).load == 1
    assert never.now <= 4 * TOKENS / 1_000


def test_more_keys_than_a_request_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_PER_REQUEST_MAX", 2)
    assert ask(Store("DDDDD")).load == 5
    assert ask(Store("DSSDS.")).load == 5
    assert ask(Store("DD.DD")).load == 2
