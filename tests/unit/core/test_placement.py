"""Who leaves the SSD, what a file's change of size costs, and what is not tried in vain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core import transfers
from kvstore.core.policies.lists import STALE_IN_HEAP_MAX, Ranked
from kvstore.core.ssd import slabs
from kvstore.core.ssd.slabs import Failing
from kvstore.errors import DeadlineExceeded
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, DiskState, HintResult, NamespaceId, Wait, WorkerId

ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult


def start(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """DRAM for 8 chunks, and four files of 32 slots."""
    world = DiskWorld(
        **{
            "segments": 2,
            "segment_bytes": 4 * PAGE,
            "slabs": 4,
            "slab_slots": 32,
            "reserve_share_max": 1.0,
            "pin_share_max": 1.0,
            "prefetch_share_max": 0.01,
            "ahead_slots_max": 0,
            **limits,
        }
    )
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def save(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> None:
    """Four at a time, each stored before the next."""
    for first in range(0, len(keys), 4):
        for _ in range(20):
            reserved = world.reserve(worker, namespace, keys[first : first + 4])
            if reserved.reservation and len(reserved.extents) == len(keys[first : first + 4]):
                world.commit(worker, reserved)
                break
            if reserved.reservation:
                world.ask(ev.Abort, worker, reserved.reservation)
            world.tick(60)
        world.tick(1)


def need(
    world: World, worker: WorkerId, namespace: NamespaceId, *jobs: Sequence[ChunkKey]
) -> ev.QueueAccepted:
    """A queue of these jobs, the soonest first."""
    hints = tuple(ev.Hint(b"%d" % place, place, keys=tuple(keys)) for place, keys in enumerate(jobs))
    accepted: ev.QueueAccepted = world.ask(ev.PublishQueue, worker, namespace, hints, ttl_ms=3_600_000)
    return accepted


def lost(world: DiskWorld, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    return [key for key, where in zip(keys, world.where(namespace, keys), strict=True) if "ssd" not in where]


# ------------------------------------------------------------------------------------------------------ leaving the SSD


@pytest.mark.parametrize("needed", [70, 100])
def test_no_chunk_that_a_job_needs_leaves_the_ssd_while_others_are_there(needed: int) -> None:
    """However many of those that are needed left DRAM before the others."""
    world, worker, namespace = start()
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, keys[:needed])
    save(world, worker, namespace, chain("b", 8))
    gone = lost(world, namespace, keys)
    assert len(gone) == 8 and set(gone) <= set(keys[needed : needed + 12])


def test_then_the_end_of_the_latest_job_leaves_it() -> None:
    world, worker, namespace = start()
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, keys[40:80], keys[:40], keys[80:])
    save(world, worker, namespace, chain("b", 4))
    assert world.counters["needed_chunks_evicted_from_ssd"] == len(lost(world, namespace, keys))
    assert lost(world, namespace, keys) == list(keys[-4:])


@pytest.mark.parametrize("with_ssd", [False, True])
@pytest.mark.parametrize("batch_min", [2, 1 << 30])
def test_in_dram_too_the_end_of_a_job_goes_before_its_beginning(with_ssd: bool, batch_min: int) -> None:
    slabs_max = 4 if with_ssd else 0
    world, worker, namespace = start(slabs=slabs_max, batch_min=batch_min, segments=4)
    jobs = [chain(name, 4) for name in "abcd"]
    for keys in jobs:
        save(world, worker, namespace, keys)
    need(world, worker, namespace, *jobs)
    save(world, worker, namespace, chain("new", 2))
    state = world.store.state
    index = state.namespaces[namespace].index
    there = {key: key in index and state.is_resident(index[key]) for keys in jobs for key in keys}
    gone = [key for key, is_there in there.items() if not is_there]
    assert gone == list(jobs[-1][-2:])


def test_a_chunk_in_a_file_that_takes_no_records_gives_way_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, some in each step; and what a job needs stays all the same."""
    monkeypatch.setattr(slabs, "VICTIMS_LOOKED_AT_MAX", 4)
    world, worker, namespace = start()
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, keys[32:64])
    files = world.store.state.ssd_slots.segments
    places = [
        world.store.cold_tier.slabs.place_of(row, 0).slab
        for row in world.store.state.namespaces[namespace].index.values()
    ]
    (closed,) = [slab.index for slab in files if slab.id == places[0]]
    world.store.cold_tier.slabs._failing[closed] = Failing(2, world.now + 1_000_000)
    before = lost(world, namespace, keys)
    save(world, worker, namespace, chain("b", 4))
    for _ in range(100):
        world.tick(1)
    gone = [key for key in lost(world, namespace, keys) if key not in before]
    assert world.where(namespace, chain("b", 4)) == ["dram+ssd"] * 4
    assert len(gone) == 4 and set(gone) <= set(keys[64:])


def test_the_index_that_is_full_gives_up_last_what_jobs_need() -> None:
    world, worker, namespace = start()
    keys = chain("a", 64)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, keys[:16], keys[16:32])
    index = world.store.state.namespaces[namespace].index
    coldest = world.store.cold_tier.slabs.coldest(48)
    assert set(coldest[:24]) == {index[key] for key in keys[32:56]}
    assert coldest[24:] == [index[key] for key in reversed(keys[8:32])]


# ---------------------------------------------------------------------------------------------- files of another size


def wide(world: DiskWorld, worker: WorkerId) -> NamespaceId:
    return world.open(spec("wide", shard_bytes=2 * PAGE), worker)


def test_the_file_that_changes_its_size_is_one_that_no_job_needs() -> None:
    world, worker, namespace = start()
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, keys[:32], keys[40:44])
    save(world, worker, wide(world, worker), chain("w", 1))
    world.settle(200)
    assert not lost(world, namespace, [*keys[:32], *keys[40:44]])
    assert lost(world, namespace, keys) == list(keys[64:96])


def test_or_else_the_one_that_the_fewest_are_needed_of() -> None:
    """Those that are in DRAM too find a place in another file."""
    world, worker, namespace = start()
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, [*keys[:4], *keys[40:43], *keys[64:66], *keys[100:110]])
    save(world, worker, wide(world, worker), chain("w", 1))
    world.settle(400)
    assert world.counters["ssd_slabs_emptied"] == 1
    assert set(lost(world, namespace, keys)) >= set(keys[64:96])
    assert not lost(world, namespace, [*keys[:4], *keys[40:43], *keys[100:110]])


def test_a_file_is_emptied_in_steps_and_takes_no_records_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 3)
    world, worker, namespace = start(segments=4, segment_bytes=8 * PAGE)
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    need(world, worker, namespace, *[(keys[at], keys[at + 1]) for at in range(0, 128, 16)])
    most, steps, ready = 0, 0, 32
    apply = world.store.apply

    def stepping(event: Any, now: int) -> Any:
        nonlocal most, steps, ready
        effects = apply(event, now)
        emptying = world.store.cold_tier.slabs.emptying
        if emptying is not None:
            free, reserved, left, _ = emptying.slab.counts
            assert not reserved and free + left == 32, emptying
            most = max(most, ready - left)
            steps += left < ready
            ready = left
            assert world.store.has_ahead()
        return effects

    monkeypatch.setattr(world.store, "apply", stepping)
    other = wide(world, worker)
    save(world, worker, other, chain("w", 1))
    assert world.store.cold_tier.slabs.emptying is not None
    for name in "xyz":
        save(world, worker, namespace, chain(name, 4))
    for _ in range(60):
        world.step(ev.Idle())
    world.settle(200)
    assert world.where(other, chain("w", 1)) == ["dram+ssd"]
    assert most == 3 and steps >= 10


def test_nobody_writes_into_a_file_that_is_being_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when the chunk that it is emptied for is gone."""
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 1)
    world, worker, namespace = start()
    save(world, worker, namespace, chain("a", 128))
    other = wide(world, worker)
    save(world, worker, other, chain("w", 1))
    emptying = world.store.cold_tier.slabs.emptying
    assert emptying is not None
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 0)  # it is not empty before somebody may try
    world.ask(ev.Forget, worker, other, b"", chain("w", 1))
    save(world, worker, namespace, chain("b", 4))
    assert emptying.slab.counts[1] == 0 and set(lost(world, namespace, chain("b", 4))) == set(chain("b", 4))
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 1)
    for _ in range(40):
        world.step(ev.Idle())
    assert world.store.cold_tier.slabs.emptying is None
    world.settle(200)
    assert world.where(namespace, chain("b", 4)) == ["dram+ssd"] * 4


def test_nothing_is_ahead_while_the_tier_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that has time takes steps as long as something is ahead: it would take them until the tier heals."""
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 1)
    world, worker, namespace = start()
    save(world, worker, namespace, chain("a", 128))
    save(world, worker, wide(world, worker), chain("w", 1))
    tier = world.store.cold_tier
    assert tier.slabs.emptying is not None and world.store.has_ahead()
    tier.degrade(DiskState.READ_ONLY, "as a test says")
    assert not world.store.has_ahead()
    world.settle(3_000)
    assert tier.health is DiskState.OK and tier.slabs.emptying is None


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_while_a_file_is_emptied_loses_only_what_left_it(
    power: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 3)
    world, worker, namespace = start(durable_within_ms=200)
    keys = chain("a", 128)
    save(world, worker, namespace, keys)
    world.settle(200)
    save(world, worker, wide(world, worker), chain("w", 1))
    assert world.store.cold_tier.slabs.emptying is not None
    left = set(lost(world, namespace, keys))
    assert 0 < len(left) < 32
    world.crash(random.Random(1), power=power)
    worker = world.join()
    world.open(spec(), worker)
    assert set(lost(world, namespace, keys)) <= left
    assert world.fetch(worker, namespace, [key for key in keys if key not in left][:4]) == ["HIT"] * 4


def test_a_chunk_that_is_being_read_leaves_its_file_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 5)
    world, worker, namespace = start(slabs=1)
    keys = chain("a", 32)
    save(world, worker, namespace, keys)
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, keys[3:4], wait_ms=300)
    other = wide(world, worker)
    save(world, worker, other, chain("w", 1))
    for _ in range(20):
        world.step(ev.Idle())
    assert not world.store.has_ahead(), "there is nothing to do but to wait"
    assert world.where(other, chain("w", 1)) == ["dram"]
    world.finish()
    assert world.outcomes(worker, namespace, keys[3:4]) == ["HIT"]
    world.settle(200)
    assert world.where(other, chain("w", 1)) == ["dram+ssd"]


def test_a_segment_is_emptied_wholly_or_not_at_all() -> None:
    """What waits for its write to SSD stays, and so does what is beside it."""
    world, worker, namespace = start(segments=1, segment_bytes=8 * PAGE)
    keys = chain("a", 8)
    save(world, worker, namespace, keys)
    state = world.store.state
    (segment,) = state.pool.segments
    row = state.namespaces[namespace].index[keys[2]]
    state.drop_copy(row)
    state.store_later(row)
    assert not world.store.segments._empty(segment)
    assert segment.counts[2] == 8
    world.tick(1)
    assert world.store.segments._empty(segment) and segment.empty
    assert world.where(namespace, keys) == ["ssd"] * 8


# -------------------------------------------------------------------------------------------------- trying in vain


def full_of_pins(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId, Any]:
    """All of DRAM is pinned; chunks a-0 to a-23 are on SSD only."""
    world, worker, namespace = start(prefetch_share_max=1.0, **limits)
    keys = chain("a", 32)
    save(world, worker, namespace, keys)
    world.settle(200)
    held = world.acquire(worker, namespace, keys[24:], prefix_only=False, ttl_ms=60_000)
    assert len(held.extents) == 8
    return world, worker, namespace, held.lease


@pytest.fixture
def coarse_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not hear what leases pin, so that promotions begin and find no slot."""
    monkeypatch.setattr("kvstore.core.requests.plan.MEMORY_STEPS", 1)


@pytest.mark.usefixtures("coarse_windows")
def test_a_promotion_that_finds_no_slot_waits_until_something_happened() -> None:
    world, worker, namespace, lease = full_of_pins()
    assert need(world, worker, namespace, chain("a", 6)).results == (ACCEPTED,)
    assert world.counters["promotions_without_slot"] == 6
    for _ in range(100):
        world.tick(20)
    assert world.counters["promotions_without_slot"] == 6
    world.release(worker, lease)
    world.tick(20)
    assert world.where(namespace, chain("a", 6)) == ["dram+ssd"] * 6
    assert world.counters["promotions_without_slot"] == 6


@pytest.mark.usefixtures("coarse_windows")
@pytest.mark.parametrize("what", ["expiry", "forget", "ranks"])
def test_what_may_give_it_one(what: str) -> None:
    world, worker, namespace, lease = full_of_pins(lease_ttl_max_ms=1_000, revoke_grace_ms=100)
    if what == "ranks":
        need(world, worker, namespace, chain("a", 32)[24:], chain("a", 4))
        world.release(worker, lease)
        assert world.where(namespace, chain("a", 4)) == ["ssd"] * 4, "what is sooner keeps its slots"
        need(world, worker, namespace, chain("a", 4), chain("a", 32)[24:])
        world.tick(20)
    else:
        need(world, worker, namespace, chain("a", 4))
        world.tick(20)
        assert world.where(namespace, chain("a", 4)) == ["ssd"] * 4
    if what == "forget":
        world.ask(ev.Forget, worker, namespace, b"", chain("a", 32)[24:])
        world.release(worker, lease)
        world.tick(20)
    if what == "expiry":
        for _ in range(60):
            world.tick(20)
    assert world.where(namespace, chain("a", 4)) == ["dram+ssd"] * 4


def test_a_chunk_that_the_disk_cannot_read_is_read_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though others can be read: the tier stays up."""
    monkeypatch.setattr(transfers, "CHUNKS_PER_OP_MAX", 1)
    monkeypatch.setattr(transfers, "READ_ERRORS_MAX", 1_000)
    world, worker, namespace = start(prefetch_share_max=1.0)
    save(world, worker, namespace, chain("a", 32))
    world.settle(200)
    world.hold = {ev.ReadRecords}
    need(world, worker, namespace, chain("a", 1))
    reads = 0
    for _ in range(150):
        while world.held:
            reads += 1
            world.finish(fails="IO_ERROR")
        world.tick(20)
    assert 3 <= reads <= 6, reads  # after 100, 200, 400 ms ...
    world.store.cold_tier.degrade(DiskState.READ_ONLY, "as if a write had failed")
    world.hold = set()
    for _ in range(60):
        world.tick(20)
    assert world.where(namespace, chain("a", 1)) == ["dram+ssd"], "the disk has healed"


def test_stale_entries_of_the_queues_are_passed_some_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LOOKED_AT_PER_STEP_MAX", 3)
    world, worker, namespace = start(segments=4, segment_bytes=8 * PAGE)
    world.hold = {ev.CreateSlab}
    save(world, worker, namespace, chain("a", 12))
    assert len(world.store.state.to_store) == 12
    world.ask(ev.Forget, worker, namespace, b"", chain("a", 12))
    left = [len(world.store.state.to_store)]
    while world.store.state.to_store:
        world.step(ev.Tick())
        left.append(len(world.store.state.to_store))
    assert all(before - after <= 3 for before, after in itertools.pairwise(left)), left


# ------------------------------------------------------------------------------------------------------------ windows


def test_a_tenant_whose_jobs_have_no_chunk_takes_no_share() -> None:
    world, worker, namespace = start(prefetch_share_max=0.5)
    save(world, worker, namespace, chain("a", 32))
    jobs = [chain("a", 32)[at : at + 2] for at in (0, 2, 4)]
    alone = need(world, worker, namespace, *jobs)
    assert alone.results == (ACCEPTED, ACCEPTED, DEFERRED)
    bob = world.join("bob")
    bobs = world.open(spec(), bob)
    need(world, bob, bobs, chain("nothing", 3))
    world.tick(20)
    assert need(world, worker, namespace, *jobs) == alone
    save(world, bob, bobs, chain("nothing", 1))
    world.tick(20)
    assert need(world, worker, namespace, *jobs).results == (ACCEPTED, DEFERRED, DEFERRED)


def test_nor_does_it_look_further_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of which nothing is there is looked at as far as its first chunk."""
    monkeypatch.setattr("kvstore.core.requests.plan.PLAN_ROWS_MAX", 16)
    world, worker, namespace = start()
    save(world, worker, namespace, chain("a", 8))
    bob = world.join("bob")
    bobs = world.open(spec(), bob)
    unknown = [chain(f"x{number}", 3) for number in range(17)]
    nothing = need(world, bob, bobs, *unknown)
    assert nothing.results == (ACCEPTED,) * 16 + (CLIPPED,)
    need(world, worker, namespace, chain("a", 4), chain("a", 8)[4:])
    world.tick(20)
    assert need(world, worker, namespace, chain("a", 4), chain("a", 8)[4:]).eviction_window == 2
    world.tick(20)
    again = need(world, bob, bobs, *unknown)
    assert again.results == (ACCEPTED,) * 8 + (CLIPPED,) * 9


# ------------------------------------------------------------------------------------------------- nothing grows


@pytest.mark.parametrize("kind", ["fifo", "hints", "lru"])
def test_reading_a_chunk_again_and_again_leaves_nothing_behind(kind: str) -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, eviction=kind, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("a", 4))
    need(world, worker, namespace, chain("a", 1))
    for _ in range(2 * STALE_IN_HEAP_MAX):
        world.release(worker, world.acquire(worker, namespace, chain("a", 1)).lease)
    dram = world.store.state.namespaces[namespace].dram
    assert all(rows.entries <= 2 * 4 + STALE_IN_HEAP_MAX for rows in dram.lists if isinstance(rows, Ranked))
    assert len(list(world.store.state.policy.victims(dram, 100))) == 4


@pytest.mark.parametrize("seed", range(10))
def test_ranked_rows_are_those_of_a_dict(seed: int) -> None:
    dice = random.Random(seed)
    ranked, model = Ranked(), dict[int, int]()
    for _ in range(3_000):
        row = dice.randrange(40)
        if row in model:
            ranked.remove(row)
            del model[row]
        else:
            model[row] = dice.choice((row, dice.randrange(100)))
            ranked.add(row, model[row])
        if dice.random() < 0.01:
            order = sorted(model, key=lambda row: (model[row], row))
            ranked.replace(order, [model[row] for row in order])
        assert ranked.keys == model
        assert ranked.entries <= 2 * len(model) + STALE_IN_HEAP_MAX
        if dice.random() < 0.2:
            below, limit = dice.randrange(100), dice.randrange(1, 50)
            wanted = sorted((key, row) for row, key in model.items() if key < below)[:limit]
            assert list(ranked.smallest(limit, below)) == [row for _, row in wanted]
        if dice.random() < 0.05 and model:  # rows that leave, and come, while one looks
            found = []
            for victim in ranked.smallest(30):
                assert victim not in found
                found.append(victim)
                if dice.random() < 0.5:
                    ranked.remove(victim)
                    del model[victim]
                if dice.random() < 0.3:
                    model[1_000 + victim] = 1_000
                    ranked.add(1_000 + victim, 1_000)


class Counting(set[Any]):
    looked_at = 0

    def discard(self, element: Any) -> None:
        Counting.looked_at += 1
        super().discard(element)


@pytest.mark.parametrize("count", [16, 48])
def test_each_wait_for_durability_is_touched_once_for_each_of_its_chunks(count: int) -> None:
    world, worker, namespace = start(segments=4, segment_bytes=16 * PAGE)
    world.hold = {ev.WriteIndex}
    for key in chain("a", count):
        reserved = world.reserve(worker, namespace, (key,))
        staged = world.write(reserved)
        world.ask(ev.Commit, worker, reserved.reservation, staged, Wait.DURABLE)
    waits = world.store.cold_tier.durability.waits
    assert len(waits) == count
    for wait in waits.values():
        wait.missing = Counting(wait.missing)
    Counting.looked_at = 0
    while world.held:
        world.finish()
    assert not world.store.cold_tier.durability.waits
    assert Counting.looked_at == count


def test_waits_that_are_too_late_leave_nothing_behind() -> None:
    world, worker, namespace = start(durable_within_ms=100, disk_deadline_ms=20_000)
    world.hold = {ev.WriteIndex}
    for key in chain("a", 4):
        reserved = world.reserve(worker, namespace, (key,))
        world.ask(ev.Commit, worker, reserved.reservation, world.write(reserved), Wait.DURABLE)
    world.hold.add(ev.ProbeDisk)
    durability = world.store.cold_tier.durability
    assert len(durability.waits) == len(durability._waits_of) == 4
    durability.waits[0].deadline = world.now
    durability.end_waits()
    assert len(durability.waits) == len(durability._waits_of) == 3
    assert isinstance(world.store.state.effects[-1].answer, DeadlineExceeded)  # type: ignore[union-attr]
    durability.fail_waits("the disk is off")
    assert not durability.waits and not durability._waits_of
