"""Batches: what is done to many chunks at once is what would be done to each, to the last slot, link and effect."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

import kvstore.core.chunks
import kvstore.sim.world
from kvstore.core import events as ev
from kvstore.core.bulk import batch
from kvstore.core.chunks import ChunkTable, LinkedRows
from kvstore.core.limits import Limits
from kvstore.core.policies import POLICIES
from kvstore.core.policies.interface import AWAITED_MS
from kvstore.core.ssd.restart import Restored, Snapshot
from kvstore.core.store import Store
from kvstore.core.workers import EngineGroup
from kvstore.errors import StoreError
from kvstore.layout import GroupSpec
from kvstore.sim.disk import DiskWorld
from kvstore.sim.integrity import ROW_COLUMNS, SHARD_COLUMNS
from kvstore.sim.simulation import Simulation
from kvstore.sim.world import PAGE, World, spec
from kvstore.types import ChunkKey, DiskResult, DiskState, Extent, Extents, Millis, SegmentId, WorkerId

NEVER = 1 << 30
STEPS = 800


COMPARED = tuple(column for column in ROW_COLUMNS if column != "cohort")
"""A cohort's number says when it was made, which is up to who looks at the lists, and how often."""


class Twins(Store):
    """A store that handles nearly everything in batches, beside one that never does: what one says, the other says."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(replace(limits, batch_min=2, evict_min=2))
        self.single = Store(replace(limits, batch_min=NEVER, evict_min=NEVER))

    def start(self) -> list[ev.Effect]:
        return self._same(super().start(), self.single.start())

    def restore(self, snapshot: Snapshot, now: Millis) -> Restored:
        snapshot = replace(snapshot, chunks=list(snapshot.chunks))
        self.single.restore(snapshot, now)
        return super().restore(snapshot, now)

    def apply(self, event: ev.Event, now: Millis) -> list[ev.Effect]:
        return self._same(super().apply(event, now), self.single.apply(event, now), event)

    def _same(
        self, mine: list[ev.Effect], others: list[ev.Effect], event: ev.Event | None = None
    ) -> list[ev.Effect]:
        assert plain(mine) == plain(others), event
        used = [(chunks.rows_ever, chunks._shards) for chunks in self._tables()]
        assert used[0] == used[1], event
        for column in (*COMPARED, *SHARD_COLUMNS, "key", "tokens", "hits", "born_at", "free_rows"):
            end = used[0][column in SHARD_COLUMNS]
            of_mine, of_other = (getattr(chunks, column)[:end] for chunks in self._tables())
            assert of_mine == of_other, (column, event)
        for name in ("demanded", "prefetched", "counters"):
            assert getattr(self.state, name) == getattr(self.single.state, name), (name, event)
        makers = [[chunks.maker(row) for row in range(chunks.rows_ever)] for chunks in self._tables()]
        assert makers[0] == makers[1], event
        return mine

    def _tables(self) -> tuple[ChunkTable, ChunkTable]:
        return self.state.chunks, self.single.state.chunks


def plain(value: Any) -> Any:
    """To be compared: errors by what they say."""
    if isinstance(value, StoreError):
        return type(value), str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return value


@pytest.fixture(autouse=True)
def short_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow all the time, which they cannot while something views them."""
    monkeypatch.setattr(kvstore.core.chunks, "GROWTH_MIN", 1)


@pytest.mark.parametrize("number", range(2))
def test_a_simulated_life_is_the_same_in_batches_and_one_by_one(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    Simulation(seed, STEPS).run()


CHAINS = [tuple(ChunkKey(b"%d %d" % (chain, place)) for place in range(90)) for chain in range(5)]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("eviction", POLICIES)
def test_hundreds_of_keys_at_once(eviction: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of hits, of what is new and of what is gone, shared and repeated keys, full quotas, a full arena, rows and
    slots that are used again, tails, parents in any order, ranked chunks, ranks that commit their own shards."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    limits = {"ghosts_max": 60, "eviction": eviction, "pin_share_max": 0.6, "reserve_share_max": 0.5}
    limits["ahead_share_max"] = 0.2
    world = World(segments=8 * shards, segment_bytes=48 * PAGE, extents_per_answer_max=200, **limits)
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    other = world.join()
    namespace = world.open(spec(shards=shards), *ranks, other)
    leases: list[tuple[WorkerId, ev.Acquired]] = []
    found = 0
    for _ in range(80):
        world.tick(dice.randrange(300))
        worker = dice.choice([*ranks, other])
        chain = dice.choice(CHAINS)
        keys = list(chain[: dice.randrange(1, 91)])
        if dice.random() < 0.2:
            keys += dice.choice(CHAINS)[:40]
        if dice.random() < 0.2:
            keys.append(dice.choice(keys))
        if dice.random() < 0.2:
            dice.shuffle(keys)
        action = dice.random()
        try:
            if action < 0.4:
                parents = [dice.choice((b"", *keys)) for _ in keys] if dice.random() < 0.3 else []
                mine = (dice.randrange(shards),) if dice.random() < 0.3 else ()
                maker = dice.choice((b"", b"one maker of 16 ", b"the other maker "))
                named: dict[str, Any] = {"parents": tuple(parents), "shards": mine, "maker": maker}
                if dice.random() < 0.1:
                    keys = [ChunkKey(key + b" tail") for key in keys]
                    named["token_counts"] = tuple(dice.randrange(1, 4) for _ in keys)
                reserved = world.reserve(worker, namespace, keys, **named)
                if reserved.reservation and dice.random() < 0.1:
                    world.abort(worker, reserved)
                elif reserved.reservation:
                    world.commit(worker, reserved)
            elif action < 0.7:
                acquired = world.acquire(worker, namespace, keys, prefix_only=dice.random() < 0.6, wait_ms=50)
                found += len(acquired.extents)
                assert len(acquired.extents) <= world.limits.extents_per_answer_max
                if acquired.lease:
                    leases.append((worker, acquired))
            elif action < 0.8:
                world.match(worker, namespace, keys, tokens=dice.choice((0, 100)))
            elif action < 0.85:
                hints = [ev.Hint(b"job", 1, keys=tuple(keys)), ev.Hint(b"sooner", 0, keys=tuple(keys[:9]))]
                world.ask(ev.PublishQueue, worker, namespace, tuple(hints))
            elif action < 0.88:
                world.ask(ev.Forget, worker, namespace, keys=tuple(keys[:5]))
        except StoreError:
            pass
        if dice.random() < 0.5:
            world.step(ev.Idle())
        while len(leases) > 6 or (leases and dice.random() < 0.3):
            holder, lease = leases.pop(dice.randrange(len(leases)))
            world.release(holder, lease.lease)
    assert found > 10, found


@pytest.mark.parametrize("eviction", POLICIES)
def test_hundreds_of_keys_of_two_models_above_an_ssd(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored, is promoted, is dropped once it is stored, or doomed while it is saved; a disk that is slow,
    full or hung; segments that change hands; a table of chunks that is full."""
    for seed in (
        332489163,
        random.SystemRandom().randrange(1 << 32),
    ):  # segments emptied in turns, and anything
        _two_models(seed, eviction, monkeypatch)


def _two_models(seed: int, eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    world = DiskWorld(
        **{"segments": 10, "segment_bytes": 32 * PAGE, "slabs": 40, "slab_slots": 16, "eviction": eviction},
        **{"chunks_max": dice.choice((200, 1 << 20)), "disk_deadline_ms": 400, "reservation_ttl_ms": 2_000},
        **{"reserve_share_max": 1.0, "retire_grace_ms": dice.choice((0, 500)), "probe_interval_ms": 500},
        **{"ahead_share_max": 0.2},
    )
    world.chance = dice  # of what fails, some records do not
    worker, admin = world.join(), world.join(admin=True)
    makers = (b"one maker of 16 ", b"the other maker ")
    groups = (GroupSpec("one", PAGE), GroupSpec("two", 2 * PAGE))
    spaces = [world.open(each, worker) for each in (spec(), spec("others", groups=groups))]
    open_ones: list[ev.Reserved] = []
    leases: list[ev.Acquired] = []
    for _ in range(100):
        world.now += dice.randrange(120)
        world.tick()
        if dice.random() < 0.1:
            world.hold = {dice.choice((ev.WriteRecords, ev.ReadRecords, ev.CopyIn, ev.WriteIndex))}
        elif dice.random() < 0.2:
            world.hold = set()
        failing = dice.random()
        world.faults = {ev.WriteRecords: DiskResult.IO_ERROR} if failing < 0.05 else {}
        world.faults |= {ev.ReadRecords: DiskResult.CORRUPT} if failing > 0.95 else {}
        while world.held and (not world.hold or dice.random() < 0.3):
            world.finish()
        namespace = dice.choice((spaces[0], spaces[0], spaces[1]))
        first = dice.choice((0, 0, dice.randrange(60)))
        keys = list(dice.choice(CHAINS)[first : dice.randrange(first, 91)])
        action = dice.random()
        try:
            if action < 0.4:
                maker, transient = dice.choice(makers), dice.random() < 0.3
                reserved = world.reserve(worker, namespace, keys, maker=maker, transient=transient)
                if reserved.reservation and dice.random() < 0.3:
                    open_ones.append(reserved)
                elif reserved.reservation:
                    world.commit(worker, reserved)
            elif action < 0.65:
                acquired = world.acquire(worker, namespace, keys, prefix_only=False, wait_ms=50)
                if acquired.lease:
                    leases.append(acquired)
            elif action < 0.75:
                world.match(worker, namespace, keys)
            elif action < 0.85:
                world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=tuple(keys)),))
            elif action < 0.9:
                world.ask(ev.Forget, worker, namespace, keys=tuple(keys[:9]))
            elif action < 0.91:
                world.ask(ev.Recall, admin, dice.choice(makers))
            elif open_ones:
                world.commit(worker, open_ones.pop(dice.randrange(len(open_ones))))
        except StoreError:
            pass
        if dice.random() < 0.5:
            world.step(ev.Idle())
        while len(leases) > 4 or (leases and dice.random() < 0.3):
            world.release(worker, leases.pop(dice.randrange(len(leases))).lease)


def test_what_was_fetched_in_vain_is_counted_when_hundreds_of_new_chunks_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    world = DiskWorld(segments=2, segment_bytes=64 * PAGE, slabs=40, reserve_share_max=1.0, eviction="hints")
    worker = world.join()
    namespace = world.open(spec(), worker)
    for keys in (CHAINS[0][:64], CHAINS[1][:64], CHAINS[2][:64]):
        world.save(worker, namespace, keys)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=CHAINS[0][:40]),))
    world.settle(200)
    assert len(world.store.state.prefetched) == 40
    world.ask(ev.PublishQueue, worker, namespace, ())
    world.acquire(worker, namespace, CHAINS[1][:24], prefix_only=False, wait_ms=50)
    world.settle(200)
    assert len(world.store.state.demanded) == 24
    for keys in (CHAINS[3], CHAINS[4]):
        world.save(worker, namespace, keys)
    assert not world.store.state.prefetched
    assert world.counters["prefetch_wasted"] == 40
    assert len(world.store.state.demanded) == 24, "whoever asked for them may still take them"
    world.settle(AWAITED_MS)
    for name in (b"late", b"later"):
        world.save(worker, namespace, [ChunkKey(b"%s %d" % (name, place)) for place in range(90)])
    assert not world.store.state.demanded, "nobody waits so long"


def test_hundreds_of_chunks_that_were_recalled_while_they_were_saved_never_become_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    world = World(segments=8, segment_bytes=32 * PAGE, reserve_share_max=1.0)
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    keys, maker = CHAINS[0], b"one maker of 16 "
    reserved = world.reserve(worker, namespace, keys, maker=maker)
    world.hold = {ev.CopyIn}
    assert world.commit(worker, reserved) is None
    world.ask(ev.Recall, admin, maker)
    for _ in range(10):
        world.tick(100)
    world.finish()
    assert world.match(worker, namespace, keys).usable == 0
    assert set(world.outcomes(worker, namespace, keys)) == {"RECALLED"}


def test_who_waits_for_hundreds_of_chunks_is_told_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    world = World(segments=8, segment_bytes=32 * PAGE, reserve_share_max=1.0)
    saver, reader = world.join(), world.join()
    namespace = world.open(spec(), saver, reader)
    keys = CHAINS[0]
    reserved = world.reserve(saver, namespace, keys)
    found = world.acquire(reader, namespace, keys, prefix_only=False, wait_ms=1_000)
    assert {reason.name for reason in found.reasons} == {"BEING_SAVED"}
    world.commit(saver, reserved)
    settled = [push for push in world.pushes if isinstance(push, ev.ChunksSettled)]
    assert sorted(key for push in settled for key in push.ready) == sorted(keys)


def test_hundreds_of_chunks_on_an_ssd_that_hangs_are_no_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.sim.world, "Store", Twins)
    world = DiskWorld(
        segments=2,
        segment_bytes=64 * PAGE,
        slabs=40,
        reserve_share_max=1.0,
        disk_deadline_ms=400,
        eviction="hints",
    )
    worker = world.join()
    namespace = world.open(spec(), worker)
    for chain in CHAINS[:3]:
        world.save(worker, namespace, chain)
    world.settle(200)
    keys = CHAINS[0][:64]
    assert world.where(namespace, keys) == ["ssd"] * 64
    assert world.match(worker, namespace, keys).usable == 64
    world.hold = {ev.ReadRecords, ev.ProbeDisk}
    world.acquire(worker, namespace, CHAINS[0][64:65], wait_ms=50)
    for _ in range(10):
        world.tick(100)
    assert world.health() is DiskState.OFF
    found = world.match(worker, namespace, keys)
    assert found.usable == 0 and {reason.name for reason in found.reasons} == {"SLOW"}
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=keys),))
    assert not world.store.state.policy.rank


def test_hundreds_of_keys_that_a_new_store_has_never_seen() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = CHAINS[0]
    assert set(world.outcomes(worker, namespace, keys)) == {"NEVER_SEEN"}
    assert not world.acquire(worker, namespace, keys, prefix_only=False).lease
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=keys),))
    world.tick(1_000)
    assert len(world.reserve(worker, namespace, keys).extents) > 20


@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_gets_no_more_than_it_may_reserve(shards: int) -> None:
    world = World(segments=8, segment_bytes=32 * PAGE, reserve_share_max=60 / 256)
    worker = world.join()
    namespace = world.open(spec(shards=shards), worker)
    reserved = world.reserve(worker, namespace, CHAINS[0])
    granted = 60 // shards
    assert [result.name for result in reserved.results] == ["GRANTED"] * granted + ["QUOTA"] * (90 - granted)
    assert world.commit(worker, reserved) is not None
    assert world.match(worker, namespace, CHAINS[0]).usable == granted


def test_a_job_is_known_up_to_its_first_unknown_key() -> None:
    """Which has no row: not even the last one."""
    world = World(segments=8, segment_bytes=32 * PAGE)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = CHAINS[0][:60]
    assert len(world.reserve(worker, namespace, keys[:40]).extents) == 40
    world.save(worker, namespace, keys[40:])
    chunks = world.store.state.chunks
    while chunks.rows_ever < len(chunks.key):  # the last place of the columns is a hit
        missing = len(chunks.key) - chunks.rows_ever
        many = [ChunkKey(b"more %d %d" % (missing, number)) for number in range(min(60, missing))]
        world.save(worker, namespace, many)
        if missing > 60:
            world.ask(ev.Forget, worker, namespace, keys=tuple(many))
    order = (*keys[40:50], ChunkKey(b"unknown"), *keys[50:], *CHAINS[1])
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=order),))
    assert len(world.store.state.policy.rank) == 10


def test_rows_are_unlinked_from_anywhere_in_any_order() -> None:
    dice = random.Random(1)
    for _ in range(200):
        tables = ChunkTable(), ChunkTable()
        lists = LinkedRows(), LinkedRows()
        count = dice.randrange(2, 30)
        for table, rows in zip(tables, lists, strict=True):
            table.new_rows(count)
            for row in range(count):
                table.link_newest(rows, row)
        gone = dice.sample(range(count), dice.randrange(1, count + 1))
        if dice.random() < 0.5:
            gone.sort(reverse=dice.random() < 0.7)
        batch.unlink(tables[0], lists[0], np.array(gone, np.intp))
        for row in gone:
            tables[1].unlink(lists[1], row)
        assert (
            list(tables[0].walk(lists[0]))
            == list(tables[1].walk(lists[1]))
            == sorted({*range(count)} - {*gone})
        )
        assert tables[0].newer == tables[1].newer and tables[0].flags == tables[1].flags
        assert lists[0].count == lists[1].count == count - len(gone)


def test_columns_grow_after_they_were_viewed() -> None:
    table = ChunkTable()
    table.new_rows(10)
    before = table.views
    assert table.views is before
    del before
    table.new_rows(100_000)
    table.new_shards(100_000)
    table.views.pins[99_999] = 7
    assert table.pins[99_999] == 7 and len(table.views.shard_slot) >= 100_000


def test_a_group_is_charged_for_many_chunks_or_for_none() -> None:
    group = EngineGroup("alice", "engine")
    assert not batch.charge_new(group, [1, 2, 3], 10, 29)
    assert batch.charge_new(group, [1, 2, 3], 10, 30)
    assert (group.pins, group.pinned_bytes) == ({1: 1, 2: 1, 3: 1}, 30)
    assert not batch.charge_new(group, [3, 4], 10, 100), "3 is pinned already"
    assert not batch.charge_new(group, [5, 5], 10, 100), "named twice"
    assert group.charge(3, 10, 30) and not group.charge(4, 10, 30)
    group.discharge([2, 3], 10)
    assert (group.pins, group.pinned_bytes) == ({1: 1, 3: 1}, 20)
    group.discharge([1, 3], 10)
    assert (group.pins, group.pinned_bytes) == ({}, 0)


def test_extents_read_like_a_tuple() -> None:
    rows = tuple(Extent(SegmentId(1), 4096 * n, 4096, n, (1 << 32) + n, (1 << 64) - 1 - n) for n in range(5))
    extents = Extents.of(rows)
    assert len(extents) == 5 and extents == rows and tuple(extents) == rows and extents != rows[1:]
    assert extents[-1] == rows[-1] and extents[1:3] == rows[1:3] and isinstance(extents[1:3], Extents)
    assert Extents.of(extents) is extents and Extents.of(()) == () and not Extents.of(())
    assert extents.checksum[4] == (1 << 64) - 5
    assert Extents.of_columns(*(column.tobytes() for column in extents.columns)) == extents
    with pytest.raises(TypeError):
        hash(extents)


def test_a_new_chunk_has_no_checksum_of_a_stranger() -> None:
    """What Reserve answers tells nothing of the bytes that were in the place before."""
    world = World()
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    keys = CHAINS[0][:4]
    world.save(alice, hers, keys)
    world.ask(ev.Forget, alice, hers, keys=keys)
    reserved = world.reserve(bob, his, keys)
    assert len(reserved.extents) == 4
    assert [extent.checksum for extent in reserved.extents] == [0] * 4


@pytest.mark.parametrize("stored", [True, False])
def test_the_oldest_chunks_give_way_to_hundreds_of_new_ones_unless_they_are_about_to_be_stored(
    stored: bool,
) -> None:
    world = DiskWorld(
        segments=2,
        segment_bytes=64 * PAGE,
        slabs=40,
        reserve_share_max=1.0,
        disk_bytes_in_flight_max=PAGE,  # one chunk is being written, and the others wait
        eviction="hints",
    )
    if not stored:
        world.hold = {ev.WriteRecords}
    worker = world.join()
    namespace = world.open(spec(), worker)
    for keys in (CHAINS[0][:64], CHAINS[1][:64]):
        world.save(worker, namespace, keys)
    results = world.reserve(worker, namespace, CHAINS[2]).results
    if stored:
        assert {result.name for result in results} == {"GRANTED"}
        assert world.where(namespace, CHAINS[0][:64]) == ["ssd"] * 64
    else:
        assert {result.name for result in results} == {"FULL"}
        assert world.match(worker, namespace, CHAINS[0][:64]).usable == 64
    world.watch.check()
