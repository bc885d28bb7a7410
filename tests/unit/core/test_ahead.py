"""Eviction ahead of need: an `Idle` frees a few slots, so that the save after it need not evict; never others than that
save would have."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.policies import POLICIES
from kvstore.core.policies.interface import AWAITED_MS
from kvstore.layout import GroupSpec
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, DiskResult, NamespaceId, Outcome, SlotState, WorkerId

SLOTS = 512
AHEAD = SLOTS // 64
OLD = chain("old", SLOTS)


def full_world(kind: type[World] = World, **named: Any) -> tuple[Any, WorkerId, NamespaceId]:
    """An arena of 8 segments, full of OLD, of which the first was used last but for the second, and so on."""
    world = kind(segment_bytes=64 * PAGE, reserve_share_max=1.0, pin_share_max=1.0, **named)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for start in range(SLOTS - 16, -1, -16):
        world.now += 1
        world.save(worker, namespace, OLD[start : start + 16])
    assert free(world) == 0
    return world, worker, namespace


def free(world: World) -> int:
    return sum(segment.counts[SlotState.FREE] for segment in world.store.state.pool.segments)


def misses(world: World, worker: WorkerId, namespace: NamespaceId, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
    keys = tuple(keys)
    found = world.match(worker, namespace, keys).outcomes
    return {key for key, outcome in zip(keys, found, strict=True) if outcome is Outcome.MISS}


@pytest.mark.parametrize("eviction", POLICIES)
def test_what_is_freed_is_what_the_next_saves_would_have_evicted(eviction: str) -> None:
    idle, worker, namespace = full_world(eviction=eviction)
    idle.step(ev.Idle())
    assert free(idle) == AHEAD
    evicted = idle.store.state.counters["chunks_evicted"]
    idle.save(worker, namespace, chain("new", AHEAD))
    assert idle.store.state.counters["chunks_evicted"] == evicted == AHEAD
    busy, worker, namespace = full_world(eviction=eviction)
    busy.save(worker, namespace, chain("new", AHEAD))
    assert misses(idle, worker, namespace, OLD) == misses(busy, worker, namespace, OLD)


def test_it_waits_until_half_of_the_slots_are_used_and_looks_once() -> None:
    world, worker, namespace = full_world()
    world.step(ev.Idle())
    world.save(worker, namespace, chain("new", AHEAD // 2))
    assert not world.store.has_ahead()
    world.step(ev.Idle())
    assert free(world) == AHEAD // 2
    world.save(worker, namespace, chain("newer", 1))
    assert world.store.has_ahead()
    world.step(ev.Idle())
    assert free(world) == AHEAD
    assert not world.store.has_ahead()


def test_it_looks_once_though_nothing_may_go() -> None:
    world, worker, namespace = full_world()
    world.acquire(worker, namespace, OLD, prefix_only=False)
    assert world.store.has_ahead()
    world.step(ev.Idle())
    assert free(world) == 0
    assert not world.store.has_ahead()


@pytest.mark.parametrize("limits", [{"ahead_slots_max": 0}, {"ahead_share_max": 1 / (SLOTS + 1)}])
def test_nothing_is_kept_free_where_that_is_not_wanted(limits: dict[str, Any]) -> None:
    world, _, _ = full_world(**limits)
    world.step(ev.Idle())
    assert free(world) == 0


def test_no_more_than_a_quarter_of_a_segment_is_kept_free() -> None:
    world, _, _ = full_world(ahead_share_max=1.0)
    world.step(ev.Idle())
    assert free(world) == 64 // 4


def test_what_is_pinned_or_needed_by_a_queued_job_stays() -> None:
    world, worker, namespace = full_world()
    oldest = OLD[::-1]
    lease = world.acquire(worker, namespace, oldest[: SLOTS - 20], prefix_only=False)
    hint = ev.Hint(b"job", 0, keys=oldest[SLOTS - 20 : SLOTS - 3])
    world.ask(ev.PublishQueue, worker, namespace, (hint,))
    world.save(worker, namespace, chain("new", 1))  # in the place of one of three that nobody needs
    world.step(ev.Idle())
    kept = (*oldest[: SLOTS - 20], *hint.keys)
    assert not misses(world, worker, namespace, kept)
    assert free(world) == 3 and lease.lease  # two of old and the one that is new


def test_where_a_segment_is_idle_nothing_is_evicted() -> None:
    world, _, namespace = full_world(segments=9)
    world.store.state.namespaces[namespace].donor_search_at = (
        world.now + 100
    )  # nor is another's looked for now
    world.step(ev.Idle())
    assert free(world) == 0


def test_before_it_is_known_whether_others_would_give_a_segment_nothing_is_evicted() -> None:
    world, _, namespace = full_world()
    world.now = world.store.state.namespaces[namespace].donor_search_at
    world.step(ev.Idle())
    assert free(world) == 0


def test_where_a_segment_of_another_namespace_is_on_its_way_nothing_is_evicted() -> None:
    world = World(segments=8, segment_bytes=64 * PAGE, reserve_share_max=1.0, ahead_share_max=0.1)
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    for start in range(0, 7 * 64, 64):
        world.save(alice, hers, OLD[start : start + 64])
    world.release(alice, world.acquire(alice, hers, OLD[: 3 * 64]).lease)  # she maps some of them now
    world.unmap_at_once = False
    world.now += 1_000
    world.save(bob, his, OLD[:64])
    assert world.store.state.namespaces[his].in_flight == 1
    assert world.store.has_ahead()
    world.step(ev.Idle())
    assert not misses(world, bob, his, OLD[:64])


def test_with_an_ssd_only_what_is_stored_leaves_and_it_is_not_lost() -> None:
    world, worker, namespace = full_world(DiskWorld, slabs=60)
    world.settle(1_000)
    world.save(worker, namespace, chain("new", 1))
    world.step(ev.Idle())
    assert free(world) == AHEAD
    assert not misses(world, worker, namespace, OLD)
    assert world.store.state.counters["chunks_evicted"] == 0


def test_what_is_about_to_be_written_to_ssd_is_not_dropped_ahead_of_need() -> None:
    limits = {"reserve_share_max": 1.0, "disk_bytes_in_flight_max": 16 * PAGE, "ahead_share_max": 1 / 16}
    world = DiskWorld(segments=8, segment_bytes=64 * PAGE, slabs=60, **limits)
    world.hold = {ev.WriteRecords}
    worker = world.join()
    namespace = world.open(spec(), worker)
    for start in range(0, SLOTS, 16):
        world.save(worker, namespace, OLD[start : start + 16])
    world.step(ev.Idle())
    assert free(world) == 0
    assert not misses(world, worker, namespace, OLD)


def test_of_what_is_stored_and_what_is_not_only_the_former_leaves() -> None:
    limits = {"reserve_share_max": 1.0, "disk_bytes_in_flight_max": 16 * PAGE, "ahead_share_max": 1 / 16}
    world = DiskWorld(segments=8, segment_bytes=64 * PAGE, slabs=60, **limits)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, OLD[:13])
    world.settle(1_000)
    world.hold = {ev.WriteRecords}
    for start in range(13, SLOTS, 16):
        world.save(worker, namespace, OLD[start : start + 16])
    assert free(world) == 0
    world.step(ev.Idle())
    assert free(world) == 13, "of the 16 that are wanted"
    assert not misses(world, worker, namespace, OLD)


def test_what_a_disk_that_is_not_well_will_not_take_soon_goes_as_without_one() -> None:
    class SickWorld(DiskWorld):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            self.faults[ev.WriteRecords] = DiskResult.IO_ERROR

    world, worker, namespace = full_world(SickWorld, slabs=60)
    assert not world.store.state.storing
    world.step(ev.Idle())
    assert free(world) == AHEAD
    assert misses(world, worker, namespace, OLD) == set(OLD[-AHEAD:])


def test_what_somebody_asked_for_and_has_not_used_yet_stays() -> None:
    world, worker, namespace = full_world(DiskWorld, slabs=80)
    world.settle(1_000)
    world.save(worker, namespace, chain("new", 64))
    world.settle(1_000)
    promoted = OLD[-16:]
    world.acquire(worker, namespace, promoted, prefix_only=False, wait_ms=50)
    world.settle(100)
    assert len(world.store.state.demanded) == 16
    others = (*OLD[:-16], *chain("new", 64))
    found = world.match(worker, namespace, others).outcomes
    others = tuple(key for key, outcome in zip(others, found, strict=True) if outcome is Outcome.HIT)
    world.release(worker, world.acquire(worker, namespace, others, prefix_only=False).lease)
    world.save(worker, namespace, chain("newer", 1))
    assert world.store.has_ahead()
    world.step(ev.Idle())
    assert len(world.store.state.demanded) == 16, "others made room for the new one, and for those to come"
    world.settle(AWAITED_MS)
    for number in range(4):
        world.save(worker, namespace, chain(f"late {number}", 64))
    assert not world.store.state.demanded, "nobody waits so long"


@pytest.mark.parametrize("sizes", [(PAGE, PAGE), (PAGE, 2 * PAGE)])
def test_chunks_of_several_shards_go_whole_and_only_if_these_are_of_one_size(sizes: tuple[int, int]) -> None:
    world = World(segments=12, segment_bytes=64 * PAGE, reserve_share_max=1.0, ahead_share_max=1.0)
    worker = world.join()
    groups = tuple(GroupSpec(f"group {number}", size) for number, size in enumerate(sizes))
    namespace = world.open(spec(groups=groups), worker)
    for number in range(40):
        world.now += 1
        world.save(worker, namespace, chain(f"{number} ", 16))
    before = free(world)
    world.step(ev.Idle())
    assert (free(world) - before > 0) == (sizes[0] == sizes[1])
    assert free(world) <= 16 or sizes[0] != sizes[1]


def test_it_costs_no_hit_that_so_many_slots_less_would_not_cost() -> None:
    """What the store holds lies between what LRU holds in the whole arena, and in one without the slots that are kept
    free."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    world, worker, namespace = full_world(ahead_share_max=16 / SLOTS, eviction="lru")
    whole, less = (OrderedDict.fromkeys(OLD[SLOTS - 1 - n] for n in range(SLOTS)) for _ in range(2))
    freed = hits = 0
    for _ in range(600):
        world.now += 1
        key = ChunkKey(b"%d" % int(dice.paretovariate(0.3) % 2_000))
        found = world.acquire(worker, namespace, (key,))
        hits += bool(found.lease)
        if found.lease:
            world.release(worker, found.lease)
        else:
            world.save(worker, namespace, (key,))
        for model, size in ((whole, SLOTS), (less, SLOTS - 16)):
            model[key] = None
            model.move_to_end(key)
            while len(model) > size:
                model.popitem(last=False)
        before = free(world)
        world.step(ev.Idle())
        freed += free(world) - before
    assert freed > 50
    assert hits > 50
    assert not misses(world, worker, namespace, less)
    assert len(misses(world, worker, namespace, whole)) == free(world)
