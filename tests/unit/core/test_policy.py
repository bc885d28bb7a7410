"""The order in which chunks leave DRAM, against models that sort everything anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.core import events as ev
from kvstore.core.jobs import ARRIVAL_BITS, LINES_BEFORE, PLACE_BITS
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, LeaseId, NamespaceId, WorkerId


@dataclass
class Model:
    """Unpinned chunks, the next victim first, by lists and sorting alone."""

    kind: str
    recency: list[ChunkKey] = field(default_factory=list)
    born: dict[ChunkKey, int] = field(default_factory=dict)
    pins: dict[ChunkKey, int] = field(default_factory=dict)
    rank: dict[ChunkKey, int] = field(default_factory=dict)
    arrivals: int = 0

    def arrived(self, keys: tuple[ChunkKey, ...]) -> None:
        for key in keys:
            self.born[key] = self.arrivals
            self.arrivals += 1
            self.pins[key] = 0
        self.recency += reversed(keys)

    def pin(self, keys: tuple[ChunkKey, ...]) -> None:
        for key in keys:
            self.pins[key] += 1
            if key in self.recency:
                self.recency.remove(key)

    def unpin(self, keys: tuple[ChunkKey, ...]) -> None:
        for key in keys:
            self.pins[key] -= 1
        self.recency += [key for key in reversed(keys) if not self.pins[key]]

    def evict(self) -> ChunkKey:
        victim = self.victims()[0]
        self.recency.remove(victim)
        del self.born[victim], self.pins[victim]
        return victim

    def victims(self, sooner_than: int = -1) -> list[ChunkKey]:
        if self.kind == "fifo":
            return sorted(self.recency, key=self.born.__getitem__)
        if self.kind == "lru":
            return list(self.recency)
        unneeded = [key for key in self.recency if key not in self.rank]
        needed = [key for key in self.recency if self.rank.get(key, -1) > sooner_than]
        return unneeded + sorted(needed, key=lambda key: -self.rank[key])


class Played:
    """The same steps in a world and in the model. Chunks arrive one each millisecond, so that fifo has one order."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(
            segments=1, segment_bytes=12 * PAGE, eviction=kind, reserve_share_max=1.0, pin_share_max=1.0,
            lease_ttl_max_ms=1 << 40, lease_ttl_ms=1 << 40, hint_ttl_ms=3_600_000,
        )  # fmt: skip
        self.worker: WorkerId = self.world.join()
        self.namespace: NamespaceId = self.world.open(spec(), self.worker)
        self.model = Model(kind)
        self.leases: list[tuple[LeaseId, tuple[ChunkKey, ...]]] = []
        self.saved = 0

    def save(self) -> None:
        if len(self.model.born) == 12 and not self.model.recency:
            return
        self.world.tick(1)
        (key,) = chain(f"{self.saved}", 1)
        self.saved += 1
        if len(self.model.born) == 12:
            victim = self.model.evict()
            self.world.save(self.worker, self.namespace, (key,))
            assert self.world.outcomes(self.worker, self.namespace, (victim,)) == ["EVICTED"]
        else:
            self.world.save(self.worker, self.namespace, (key,))
        self.model.arrived((key,))

    def acquire(self) -> None:
        if self.model.born:
            self.world.tick(1)
            count = self.random.randrange(1, min(4, len(self.model.born)) + 1)
            keys = tuple(self.random.sample(list(self.model.born), count))
            lease = self.world.acquire(self.worker, self.namespace, keys).lease
            self.model.pin(keys)
            self.leases.append((lease, keys))

    def release(self) -> None:
        if self.leases:
            self.world.tick(1)
            lease, keys = self.leases.pop(self.random.randrange(len(self.leases)))
            self.world.release(self.worker, lease)
            self.model.unpin(keys)

    def check(self) -> None:
        state = self.world.store.state
        namespace = state.namespaces[self.namespace]
        for sooner_than in (-1, 0, 2):
            bound = (
                LINES_BEFORE + sooner_than + 1 << ARRIVAL_BITS + PLACE_BITS
            ) - 1  # the last at that position
            found = [state.chunks.key[row] for row in state.policy.victims(namespace.dram, 1_000, bound)]
            if self.model.kind != "hints":
                assert found == self.model.victims()
                continue
            expected = self.model.victims(sooner_than)
            ranks = [self.model.rank.get(key, 1 << 30) for key in found]
            assert ranks == [self.model.rank.get(key, 1 << 30) for key in expected]
            assert sorted(found) == sorted(expected)
            unneeded = [key for key in found if key not in self.model.rank]
            assert unneeded == [key for key in expected if key not in self.model.rank]
        assert (
            list(state.policy.victims(namespace.dram, 3))[:3]
            == list(state.policy.victims(namespace.dram, 1_000))[:3]
        )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["lru", "fifo", "hints"])
def test_the_order_is_that_of_a_naive_model(kind: str, seed: int) -> None:
    """Without a queue, "hints" is lru."""
    played = Played(kind, seed)
    for _ in range(60):
        getattr(played, played.random.choice(("save", "save", "acquire", "release")))()
        played.check()


@pytest.mark.parametrize("seed", range(20))
def test_what_queued_jobs_need_goes_last_and_the_farthest_of_it_first(seed: int) -> None:
    """The queue is published once: what it names is ranked, whatever comes and goes, is pinned and let go of."""
    played = Played("hints", seed)
    for _ in range(12):
        played.save()
    wanted = played.random.sample(list(played.model.born), 6)
    hints = tuple(ev.Hint(b"%d" % place, place, keys=(key,)) for place, key in enumerate(wanted))
    played.world.ask(ev.PublishQueue, played.worker, played.namespace, hints)
    played.model.rank = {key: place for place, key in enumerate(wanted)}
    played.check()
    for _ in range(60):
        getattr(played, played.random.choice(("save", "acquire", "release")))()
        if played.random.random() < 0.2:
            played.world.tick(100)  # plans again
        played.model.rank = {key: rank for key, rank in played.model.rank.items() if key in played.model.born}
        played.check()


def test_what_a_job_no_longer_needs_goes_where_its_last_use_puts_it() -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = [chain(f"{number}", 1)[0] for number in range(8)]
    for key in keys:
        world.tick(10)
        world.save(worker, namespace, (key,))
    for wanted in ((keys[0], keys[7]), (keys[3],)):
        world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"j", 0, keys=wanted),))
    state = world.store.state
    found = [state.chunks.key[row] for row in state.policy.victims(state.namespaces[namespace].dram, 100)]
    assert found[0] == keys[0]
    assert found[-2:] == [keys[7], keys[3]]


def test_tails_that_no_manifest_names_go_before_everything() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    world.tick(10)
    world.save(worker, namespace, chain("named", 1), token_counts=(1,))
    world.append(worker, namespace, b"s", chain("named", 1), counts=(1,))
    world.save(worker, namespace, chain("tail", 1), token_counts=(1,))
    world.release(worker, world.acquire(worker, namespace, chain("named", 1)).lease)
    world.save(worker, namespace, chain("new", 1))
    assert world.outcomes(worker, namespace, chain("tail", 1)) == ["EVICTED"]
    assert world.outcomes(worker, namespace, [*chain("k", 2), *chain("named", 1)]) == ["HIT"] * 3


@pytest.mark.parametrize("what", ["save", "acquire"])
def test_chains_leave_from_their_ends(what: str) -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    if what == "acquire":
        world.release(worker, world.acquire(worker, namespace, chain("k", 4)).lease)
    world.save(worker, namespace, chain("l", 4))
    world.save(worker, namespace, chain("m", 2))
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["HIT"] * 2 + ["EVICTED"] * 2
