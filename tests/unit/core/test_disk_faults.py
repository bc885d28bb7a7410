"""A disk that is late, fails, lies or is full: what is served meanwhile, who is told, and how it heals."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import DURABLE
from kvstore.errors import Unavailable
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import DiskResult, DiskState, NamespaceId, Outcome, Reason, WorkerId

from .test_disk import cold, small, start

HIT, PENDING, MISS = Outcome
BROKEN: dict[type, DiskResult] = dict.fromkeys(
    (ev.WriteRecords, ev.WriteIndex, ev.ProbeDisk, ev.CreateSlab), DiskResult.IO_ERROR
)


def row_of(world: DiskWorld, namespace: NamespaceId, name: str, number: int = 0) -> int:
    return world.store.state.namespaces[namespace].index[chain(name, number + 1)[number]]


def tick_until_probe(world: DiskWorld) -> ev.ProbeDisk:
    for _ in range(100):
        if world.of(ev.ProbeDisk):
            probe: ev.ProbeDisk = world.of(ev.ProbeDisk)[0]
            return probe
        world.tick(100)
    raise AssertionError("no probe")


# ----------------------------------------------------------------------------------------------------------- late ops


def late_read(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId, ev.ReadRecords]:
    world, worker, namespace = small(disk_deadline_ms=400, probe_interval_ms=100, **limits)
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords, ev.ProbeDisk}
    world.acquire(worker, namespace, chain("k", 2), wait_ms=5_000)
    (read,) = world.of(ev.ReadRecords)
    return world, worker, namespace, read


def test_a_late_read_is_a_miss_in_time() -> None:
    world, worker, namespace, _ = late_read()
    world.tick(399)
    assert world.take(ev.ChunksSettled) == []
    assert world.health() is DiskState.OK
    world.tick(1)
    assert [push.failed for push in world.take(ev.ChunksSettled)] == [(key,) for key in chain("k", 2)]
    assert world.health() is DiskState.OFF
    assert world.counters["ssd_reads_late"] == 1
    asked = world.acquire(worker, namespace, chain("k", 1))
    assert (asked.outcomes, asked.reasons) == ((MISS,), (Reason.SLOW,))
    assert world.match(worker, namespace, chain("k", 2)).usable == 0


def test_the_targets_of_a_late_read_are_out_of_use_until_it_has_returned() -> None:
    """The world compares every hit with what was committed: bytes that land late must not be in anybody's slot."""
    world, worker, namespace, read = late_read()
    world.tick(400)
    assert world.slots()["quarantined"] == 2
    for number in range(12):
        world.save(worker, namespace, chain(f"new {number}", 1))
    targets = {(extent.segment, extent.offset) for extent in read.targets}
    in_use = [
        (extent.segment, extent.offset)
        for number in range(12)
        for extent in world.acquire(worker, namespace, chain(f"new {number}", 1)).extents
    ]
    assert in_use and not targets & set(in_use)
    world.finish(read)
    assert world.slots()["quarantined"] == 0
    assert world.where(namespace, chain("k", 2)) == ["ssd"] * 2


def test_dram_serves_and_saves_while_the_ssd_is_off() -> None:
    world, worker, namespace, _ = late_read()
    world.tick(400)
    world.tick(5_000)
    hits = [key for key in chain("k other 1", 4) if world.where(namespace, (key,)) == ["dram+ssd"]]
    assert hits
    assert world.acquire(worker, namespace, hits[:1]).outcomes == (HIT,)
    for number in range(20):  # what is not on SSD is dropped for newer ones: nothing is stored now
        world.save(worker, namespace, chain(f"new {number}", 1))
    assert world.outcomes(worker, namespace, chain("new 19", 1)) == ["HIT"]
    assert world.counters["chunks_evicted"] > 0
    assert world.counters["grants_full"] == 0


def test_nothing_is_probed_before_the_late_call_has_returned_and_then_it_heals() -> None:
    world, worker, namespace, read = late_read()
    world.tick(400)
    for _ in range(50):
        world.tick(100)
    assert world.of(ev.ProbeDisk) == []
    world.finish(read)
    probe = tick_until_probe(world)
    assert world.health() is DiskState.OFF
    world.hold = set()
    world.finish(probe)
    assert world.health() is DiskState.OK
    assert world.counters["ssd_healed"] == 1
    assert world.fetch(worker, namespace, chain("k", 2)) == ["HIT"] * 2


def test_a_probe_that_fails_is_repeated_at_its_interval() -> None:
    world, worker, namespace = start(probe_interval_ms=100)
    world.faults = dict(BROKEN)
    world.save(worker, namespace, chain("k", 1))
    assert world.health() is DiskState.READ_ONLY
    world.hold = {ev.ProbeDisk}
    for _ in range(3):
        probe = tick_until_probe(world)
        world.tick(10_000)
        assert world.of(ev.ProbeDisk) == [probe], "one at a time"
        world.finish(probe)
        assert world.of(ev.ProbeDisk) == []
        world.tick(99)
        assert world.of(ev.ProbeDisk) == []
    assert world.health() is DiskState.READ_ONLY


def test_files_that_somebody_touched_take_nothing_until_a_probe_finds_them_in_order() -> None:
    """No call failed: what is there is served, nothing new is promised, and the reason is the last one told."""
    world, worker, namespace = start(probe_interval_ms=100)
    world.save(worker, namespace, chain("k", 1))
    world.step(ev.DiskTrouble("a slab file was removed"))
    assert world.health() is DiskState.READ_ONLY
    assert world.store.state.disk_why == "a slab file was removed"
    with pytest.raises(Unavailable, match="read_only: a slab file was removed"):
        raise world.durable_answer(worker, world.save_durably(worker, namespace, chain("d", 1)))
    assert world.where(namespace, chain("d", 1)) == ["dram"]
    world.faults = {ev.ProbeDisk: DiskResult.IO_ERROR}
    for _ in range(20):
        world.tick(100)
    world.step(ev.DiskTrouble("two slab files were removed"))
    assert (world.health(), world.store.state.disk_why) == (
        DiskState.READ_ONLY,
        "two slab files were removed",
    )
    assert world.counters["ssd_degraded_read_only"] == 1
    assert world.fetch(worker, namespace, chain("k", 1)) == ["HIT"]
    world.faults = {}
    world.tick(100)
    assert (world.health(), world.store.state.disk_why) == (DiskState.OK, "")
    assert world.where(namespace, chain("d", 1)) == ["dram+ssd"]


def test_trouble_with_files_heals_no_tier_that_is_off_and_makes_none() -> None:
    world, _, _, _ = late_read()
    world.tick(400)
    world.step(ev.DiskTrouble("a slab file was cut"))
    assert world.health() is DiskState.OFF
    without = World()
    without.step(ev.DiskTrouble("nothing is there"))
    assert without.store.state.disk_state is DiskState.ABSENT


def test_what_waits_behind_a_late_read_is_told_too() -> None:
    world, worker, namespace, _ = late_read(disk_bytes_in_flight_max=PAGE)
    world.acquire(worker, namespace, chain("k", 4)[2:], wait_ms=60_000)
    assert len(world.of(ev.ReadRecords)) == 1
    world.tick(400)
    failed = {key for push in world.take(ev.ChunksSettled) for key in push.failed}
    assert failed == set(chain("k", 4))
    assert world.where(namespace, chain("k", 4)) == ["ssd"] * 4


def test_a_chunk_that_is_forgotten_after_its_read_is_late() -> None:
    world, worker, namespace, read = late_read()
    world.tick(400)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))
    world.finish(read)
    assert world.where(namespace, chain("k", 2)) == ["FORGOTTEN"] * 2
    assert world.slots()["quarantined"] == 0


def test_a_late_write_keeps_its_source_until_it_has_returned() -> None:
    world, worker, namespace = small(disk_deadline_ms=400, probe_interval_ms=100)
    world.hold = {ev.WriteRecords, ev.ProbeDisk}
    world.save(worker, namespace, chain("k", 2))
    (write,) = world.of(ev.WriteRecords)
    world.tick(399)
    assert world.health() is DiskState.OK
    world.tick(1)
    assert world.health() is DiskState.OFF
    for number in range(20):
        world.save(worker, namespace, chain(f"new {number}", 1))
    assert world.where(namespace, chain("k", 2)) == ["dram"] * 2
    world.tick(5_000)
    assert world.of(ev.ProbeDisk) == []
    world.finish(write)  # the world compares what it writes with what was committed
    assert world.where(namespace, chain("k", 2)) == ["dram+ssd"] * 2
    probe = tick_until_probe(world)
    world.hold = set()
    world.finish(probe)
    assert world.health() is DiskState.OK
    world.settle(2_000)
    assert {key for _, key in world.platter.chunks} >= set(chain("k", 2))


def test_a_late_index_transaction_stops_writes_not_reads() -> None:
    world, worker, namespace = small(durable_within_ms=400, probe_interval_ms=100)
    cold(world, worker, namespace)
    world.hold = {ev.WriteIndex, ev.ProbeDisk}
    world.tick(400)
    world.tick(9_999)
    assert world.health() is DiskState.OK
    world.tick(1)
    assert world.health() is DiskState.READ_ONLY
    assert world.fetch(worker, namespace, chain("k", 2)) == ["HIT"] * 2
    world.tick(5_000)
    assert world.of(ev.ProbeDisk) == []
    world.finish()
    world.finish(tick_until_probe(world))
    assert world.health() is DiskState.OK


def test_what_a_transaction_under_way_names_is_gathered_once() -> None:
    """Each tick asks for thousands of quarantined slots whether it names them."""
    world, worker, namespace = small(durable_within_ms=400)
    world.hold = {ev.WriteIndex}
    world.save(worker, namespace, chain("k", 2))
    world.tick(400)
    durability = world.store.cold_tier.durability
    named = durability.in_flight
    assert named == {(namespace, key) for key in chain("k", 2)}
    assert durability.in_flight is named
    world.finish()
    assert not durability.in_flight
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    assert durability.in_flight == {(namespace, chain("k", 1)[0])}


def test_a_slab_file_that_is_never_made_holds_nothing_up_for_long() -> None:
    world, worker, namespace = small(probe_interval_ms=100)
    world.hold = {ev.CreateSlab, ev.ProbeDisk}
    for number in range(8):
        world.save(worker, namespace, chain(f"{number}", 1))
    assert world.reserve(worker, namespace, chain("more", 1)).results[0].name == "FULL"
    world.tick(10_000)
    assert world.health() is DiskState.READ_ONLY
    world.save(worker, namespace, chain("more", 1))
    world.tick(5_000)
    assert world.of(ev.ProbeDisk) == []
    world.hold = set()
    world.finish(world.of(ev.CreateSlab)[0])
    world.settle(1_000)
    assert world.health() is DiskState.OK
    assert world.where(namespace, chain("more", 1)) == ["dram+ssd"]


# ------------------------------------------------------------------------------------------------------ failing writes


@pytest.mark.parametrize("result", [DiskResult.IO_ERROR, DiskResult.NO_SPACE])
def test_after_a_failed_write_dram_goes_on_and_all_that_waited_is_stored_in_the_end(
    result: DiskResult,
) -> None:
    world, worker, namespace = small(probe_interval_ms=100)
    cold(world, worker, namespace)
    world.faults = dict.fromkeys((ev.WriteRecords, ev.WriteIndex, ev.ProbeDisk), result)
    world.save(worker, namespace, chain("a", 2))
    assert world.health() is DiskState.READ_ONLY
    assert world.where(namespace, chain("a", 2)) == ["dram"] * 2
    assert world.fetch(worker, namespace, chain("k", 2)) == ["HIT"] * 2  # reads go on
    for number in range(12):
        world.save(worker, namespace, chain(f"new {number}", 1))
        world.tick(100)
    assert world.counters["grants_full"] == 0
    assert world.where(namespace, chain("a", 2)) == ["EVICTED"] * 2
    assert sum(slab.counts[1] for slab in world.store.state.ssd_slots.segments) == 0, "slots of failed writes"
    world.faults.clear()
    world.settle(1_000)
    assert world.health() is DiskState.OK
    names = [f"new {number}" for number in range(12)]
    here = [name for name in names if world.where(namespace, chain(name, 1)) != ["EVICTED"]]
    assert here
    assert all(world.where(namespace, chain(name, 1)) == ["dram+ssd"] for name in here)


def test_of_a_write_op_that_fails_in_part_the_rest_is_stored() -> None:
    world, worker, namespace = start()
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 4))
    write = world.of(ev.WriteRecords)[0]
    world.held.remove(write)
    results = [
        world._write_record(write, n, DiskResult.IO_ERROR if n == 2 else DiskResult.OK) for n in range(4)
    ]
    world.step(ev.DiskDone(write.op, tuple(results), "EIO"))
    assert world.where(namespace, chain("k", 4)) == ["dram+ssd", "dram+ssd", "dram", "dram+ssd"]
    world.hold = set()
    world.settle(3_000)
    assert world.where(namespace, chain("k", 4)) == ["dram+ssd"] * 4


def test_of_a_chunk_one_shard_of_which_fails_nothing_is_stored() -> None:
    world = DiskWorld()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 1))
    write = world.of(ev.WriteRecords)[0]
    world.held.remove(write)
    world._write_record(write, 0, DiskResult.OK)
    world.step(ev.DiskDone(write.op, (DiskResult.OK, DiskResult.IO_ERROR), "EIO"))
    assert world.where(namespace, chain("k", 1)) == ["dram"]
    assert sum(slab.counts[2] for slab in world.store.state.ssd_slots.segments) == 0


def test_what_cannot_be_written_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.state.STALE_TO_STORE_MAX", 20)
    world, worker, namespace = small(ghosts_max=4, probe_interval_ms=1_000)
    world.faults = dict(BROKEN)
    for number in range(300):
        world.save(worker, namespace, chain(f"{number}", 1))
        assert len(world.store.state.to_store) <= 2 * world.store.state.chunks.rows_used + 20
    world.faults.clear()
    world.settle(2_000)
    assert world.where(namespace, chain("299", 1)) == ["dram+ssd"]


def test_without_room_for_another_slab_file_the_store_goes_on_with_fewer() -> None:
    world, worker, namespace = small(slabs=8, slab_slots=4)
    for number in range(8):
        world.save(worker, namespace, chain(f"{number}", 1))
    assert len(world.platter.slabs) == 2
    world.faults = {ev.CreateSlab: DiskResult.NO_SPACE}
    for number in range(8, 20):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.tick(10)
    assert world.health() is DiskState.OK
    assert world.counters["ssd_slab_failures"] == 1, "not again and again"
    assert world.where(namespace, chain("19", 1)) == ["dram+ssd"]
    assert world.counters["chunks_evicted_from_ssd"] > 0
    world.faults.clear()
    world.tick(10_000)
    world.save(worker, namespace, chain("more", 1))
    assert len(world.platter.slabs) == 3


@pytest.mark.parametrize("result", [DiskResult.IO_ERROR, DiskResult.NO_SPACE])
def test_without_any_slab_file_nothing_can_be_written_and_that_is_said(result: DiskResult) -> None:
    world, worker, namespace = small(probe_interval_ms=100)
    world.faults = {ev.CreateSlab: result, ev.ProbeDisk: result}
    for number in range(12):
        world.save(worker, namespace, chain(f"{number}", 1))
    assert world.health() is DiskState.READ_ONLY
    world.faults.clear()
    world.settle(12_000)
    assert world.health() is DiskState.OK
    assert world.where(namespace, chain("11", 1)) == ["dram+ssd"]


# ----------------------------------------------------------------------------------------------------- failing indexes


def test_all_of_a_failed_index_transaction_is_written_again() -> None:
    world, worker, namespace = start(durable_within_ms=400, probe_interval_ms=100)
    world.save(worker, namespace, chain("old", 2))
    world.append(worker, namespace, b"old", chain("old", 1))
    world.tick(400)
    world.hold = {ev.WriteIndex}
    world.ask(ev.Forget, worker, namespace, b"old", chain("old", 2))
    deletions = world.of(ev.WriteIndex)[0]
    assert set(deletions.chunks_deleted) == {(namespace, key) for key in chain("old", 2)}
    assert deletions.sessions_deleted == ((namespace, b"old"),)
    world.finish(fails="IO_ERROR")
    assert world.health() is DiskState.READ_ONLY
    world.tick(100)
    again = world.of(ev.WriteIndex)[0]
    assert set(again.chunks_deleted) == set(deletions.chunks_deleted)
    assert again.sessions_deleted == deletions.sessions_deleted
    world.finish(fails="IO_ERROR")
    world.tick(100)
    other = world.open(spec("other"), worker)
    world.save(worker, namespace, chain("k", 2))
    world.save(worker, other, chain("k", 1))
    world.append(worker, namespace, b"s", chain("k", 2))
    assert {key for _, key in world.platter.chunks} == set(chain("old", 2))
    world.finish()
    assert not world.platter.chunks and not world.platter.sessions
    while not world.of(ev.WriteIndex):
        world.tick(100)
    first = world.of(ev.WriteIndex)[0]
    world.finish(fails="IO_ERROR")
    assert world.health() is DiskState.READ_ONLY
    for _ in range(10):
        world.tick(100)
    assert world.health() is DiskState.OK
    again = world.of(ev.WriteIndex)[0]
    assert set(again.slabs) == set(first.slabs)
    assert (again.namespaces, again.chunks, again.sessions) == (
        first.namespaces,
        first.chunks,
        first.sessions,
    )
    world.finish()
    assert set(world.platter.chunks) == {(namespace, key) for key in chain("k", 2)} | {
        (other, chain("k", 1)[0])
    }
    assert set(world.platter.sessions) == {(namespace, b"s")}


def test_a_namespace_that_is_closed_for_good_leaves_the_index_also_at_the_second_try() -> None:
    world = DiskWorld(namespaces_max=2, durable_within_ms=400, probe_interval_ms=100)
    first = world.join()
    unused = world.open(spec("unused"), first)
    world.kill(first)
    worker = world.join()
    namespace = world.open(spec("used"), worker)
    world.save(worker, namespace, chain("k", 1))
    world.tick(400)
    assert set(world.platter.namespaces) == {unused, namespace}
    world.hold = {ev.WriteIndex}
    world.open(spec("new"), worker)
    while not (op := world.of(ev.WriteIndex)) or not op[0].namespaces_deleted:
        world.tick(100)
    world.finish(fails="IO_ERROR")
    world.hold = set()
    world.settle(2_000)
    assert set(world.platter.namespaces) == {namespace}, "the new one holds nothing yet"


def test_a_transaction_that_is_tried_again_puts_the_present_into_the_index() -> None:
    world, worker, namespace = start(durable_within_ms=400, probe_interval_ms=100)
    world.hold = {ev.WriteIndex}
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"s", chain("k", 2))
    world.tick(400)
    world.ask(ev.Forget, worker, namespace, b"s")
    world.save(worker, namespace, chain("l", 1))
    world.finish(fails="IO_ERROR")
    world.hold = set()
    world.settle(2_000)
    assert [key for _, key in world.platter.chunks] == list(chain("l", 1))
    assert world.platter.sessions == {}


def test_the_new_owner_of_a_slot_is_never_indexed_before_the_deletion_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With batches of one record, in the order of what happened. The platter refuses a slot that is named twice."""
    monkeypatch.setattr("kvstore.core.ssd.durability.INDEX_BATCH_MAX", 1)
    world, worker, namespace = small(slabs=1, slab_slots=1, durable_within_ms=400, probe_interval_ms=100)
    world.save(worker, namespace, chain("old", 1))
    world.settle(1_000)
    assert [key for _, key in world.platter.chunks] == list(chain("old", 1))
    world.hold = {ev.WriteIndex}
    world.ask(ev.Forget, worker, namespace, b"", chain("old", 1))
    while not (op := world.of(ev.WriteIndex)) or not op[0].chunks_deleted:
        world.tick(100)
    world.save(worker, namespace, chain("new", 1))  # into the same slot, while the deletion is under way
    assert world.where(namespace, chain("new", 1)) == ["dram+ssd"]
    world.finish(fails="IO_ERROR")
    world.hold = set()
    world.settle(3_000)
    assert [key for _, key in world.platter.chunks] == list(chain("new", 1))


def test_after_a_failed_sync_chunks_in_dram_are_written_anew_and_the_tier_heals() -> None:
    world, worker, namespace = start(durable_within_ms=400, probe_interval_ms=100)
    world.hold = {ev.WriteIndex}
    world.save(worker, namespace, chain("k", 3))
    world.tick(400)
    first = world.of(ev.WriteIndex)[0]
    world.failing_syncs = True
    world.finish(fails="IO_ERROR")  # what it was to sync can never be indexed: the platter answers CORRUPT
    world.failing_syncs = False
    world.hold = set()
    world.settle(5_000)
    assert world.health() is DiskState.OK
    assert {key for _, key in world.platter.chunks} == set(chain("k", 3))
    assert world.counters["chunks_lost_by_sync"] == 3
    lost = {place for chunk in first.chunks for place in chunk.places}
    assert not lost & {place for chunk in world.platter.chunks.values() for place in chunk.places}
    world.crash(power=True)
    worker = world.join()
    world.open(spec(), worker)
    assert world.fetch(worker, namespace, chain("k", 3)) == ["HIT"] * 3


@pytest.mark.parametrize("promoting", [False, True])
def test_after_a_failed_sync_chunks_on_ssd_alone_are_lost(promoting: bool) -> None:
    world, worker, namespace = small(durable_within_ms=400, probe_interval_ms=100, disk_deadline_ms=60_000)
    world.hold = {ev.WriteIndex}
    cold(world, worker, namespace)
    world.tick(400)
    world.failing_syncs = True
    world.finish(fails="IO_ERROR")
    world.failing_syncs = False
    if promoting:
        world.hold = {ev.ReadRecords}
        world.acquire(worker, namespace, chain("k", 4), wait_ms=60_000)
    else:
        world.hold = set()
    for _ in range(30):
        world.tick(100)
    assert world.health() is DiskState.OK
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["LOST"] * 4
    world.hold = set()
    world.settle(1_000)
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["LOST"] * 4
    others = [*chain("k other 0", 4), *chain("k other 1", 4)]
    there = world.where(namespace, others).count("dram+ssd")
    assert there == (4 if promoting else 8)  # four had left DRAM for what was to be promoted
    assert len(world.platter.chunks) == there


def test_a_full_index_makes_room_by_what_left_dram_longest_ago_and_nobody_notices() -> None:
    world, worker, namespace = small(durable_within_ms=400)
    for number in range(25):
        world.save(worker, namespace, chain(f"{number}", 4))
        world.tick(1)
    world.settle(2_000)
    assert len(world.platter.chunks) == 100
    commit = world.save_durably(worker, namespace, chain("new", 1))
    world.platter.index_bytes = world.platter.usage.used
    world.hold = {ev.WriteIndex}
    commit = world.save_durably(worker, namespace, chain("more", 1))
    world.append(worker, namespace, b"s", chain("more", 1))
    world.finish()
    assert world.health() is DiskState.OK
    assert world.durable_answer(worker, commit) is None
    (op,) = world.of(ev.WriteIndex)
    assert set(op.chunks_deleted) < {(namespace, key) for key in chain("0", 4)}, "no more than it takes"
    assert not op.chunks and not op.sessions and not op.namespaces
    assert world.where(namespace, chain("0", 4)).count("EVICTED") == len(op.chunks_deleted)
    while world.held:
        world.finish()
    assert isinstance(world.durable_answer(worker, commit), ev.Committed)
    assert (namespace, chain("more", 1)[0]) in world.platter.chunks
    assert (namespace, b"s") in world.platter.sessions
    assert world.counters["index_full"] == world.counters["index_errors"] >= 1


@pytest.mark.parametrize("cold_ones", [False, True])
def test_an_index_that_cannot_even_delete_stops_writes(cold_ones: bool) -> None:
    world, worker, namespace = small(durable_within_ms=400)
    if cold_ones:
        cold(world, worker, namespace)
        world.tick(400)
    world.save(worker, namespace, chain("new", 1))
    world.faults = {ev.WriteIndex: DiskResult.NO_SPACE}
    world.tick(400)
    assert world.health() is DiskState.READ_ONLY
    world.faults.clear()
    world.settle(3_000)
    assert world.health() is DiskState.OK
    assert (namespace, chain("new", 1)[0]) in world.platter.chunks


def test_index_transactions_are_bounded_in_session_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.ssd.durability.INDEX_ENTRIES_MAX", 5)
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 8))
    world.hold = {ev.WriteIndex}
    for number in range(4):
        world.append(worker, namespace, b"%d" % number, chain("k", 3))
    world.append(worker, namespace, b"long", chain("k", 8))
    sizes = []
    for _ in range(30):
        world.tick(100)
        if world.held:
            sizes.append([len(session.entries) for session in world.held[0].sessions])
            world.finish()
    assert sizes == [[3, 3], [3, 3], [8]]
    assert len(world.platter.sessions) == 5


# ---------------------------------------------------------------------------------------------------------- bad bytes


def rotten(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    world, worker, namespace = small(durable_within_ms=400, **limits)
    cold(world, worker, namespace)
    world.tick(400)
    world.rot(world.store.cold_tier.slabs.place_of(row_of(world, namespace, "k", 1), 0))
    return world, worker, namespace


def test_bytes_that_rotted_are_a_miss_that_says_so_and_are_never_served_again() -> None:
    world, worker, namespace = rotten()
    place = world.store.cold_tier.slabs.place_of(row_of(world, namespace, "k", 1), 0)
    assert world.fetch(worker, namespace, chain("k", 3)) == ["HIT", "CORRUPT", "HIT"]
    assert world.counters["chunks_corrupt"] == 1
    assert world.health() is DiskState.OK
    world.tick(400)
    assert (namespace, chain("k", 2)[1]) not in world.platter.chunks
    for number in range(20):
        world.save(worker, namespace, chain(f"new {number}", 4))
        world.tick(100)
    used = {p for chunk in world.platter.chunks.values() for p in chunk.places}
    assert not any((p.slab, p.slot) == (place.slab, place.slot) for p in used)
    assert sum(slab.counts[3] for slab in world.store.state.ssd_slots.segments) == 1
    assert world.slots()["quarantined"] == 0, "there is nothing wrong with the DRAM slot"


def test_who_waits_for_bytes_that_rotted_is_told() -> None:
    world, worker, namespace = rotten()
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, chain("k", 3), wait_ms=1_000)
    world.finish()
    settled = world.take(ev.ChunksSettled)
    assert {key for push in settled for key in push.ready} == {chain("k", 3)[0], chain("k", 3)[2]}
    assert {key for push in settled for key in push.failed} == {chain("k", 3)[1]}


def test_what_rotted_can_be_saved_again() -> None:
    world, worker, namespace = rotten()
    world.fetch(worker, namespace, chain("k", 3))
    world.save(worker, namespace, chain("k", 2)[1:], variant=1)
    world.settle(1_000)
    assert world.where(namespace, chain("k", 2)[1:]) == ["dram+ssd"]


def test_one_rotten_shard_is_a_miss_of_the_chunk() -> None:
    world = DiskWorld(segments=1, segment_bytes=8 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 2))
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 2))
    world.rot(world.store.cold_tier.slabs.place_of(row_of(world, namespace, "k"), 1))
    assert world.fetch(worker, namespace, chain("k", 2)) == ["CORRUPT", "HIT"]
    assert world.slots()["reserved"] == 0


def test_what_was_evicted_before_a_crash_is_a_miss_and_no_alarm() -> None:
    """Its slot holds another record already; the index did not know yet."""
    world, worker, namespace = small()
    cold(world, worker, namespace)
    world.faults = {ev.ReadRecords: DiskResult.REUSED}
    ready = sum(slab.counts[2] for slab in world.store.state.ssd_slots.segments)
    assert world.fetch(worker, namespace, chain("k", 1)) == ["EVICTED"]
    assert (world.counters["chunks_corrupt"], world.counters["chunks_reused"]) == (0, 1)
    assert world.health() is DiskState.OK
    assert sum(slab.counts[2] for slab in world.store.state.ssd_slots.segments) == ready - 1, (
        "the slot is free"
    )
    assert sum(slab.counts[3] for slab in world.store.state.ssd_slots.segments) == 0
    world.faults.clear()
    world.save(worker, namespace, chain("k", 1))
    world.settle(1_000)
    assert world.where(namespace, chain("k", 1)) == ["dram+ssd"]


def test_a_chunk_that_rots_after_it_was_read_is_served_from_dram() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, chain("k", 1))
    world.rot(world.store.cold_tier.slabs.place_of(row_of(world, namespace, "k"), 0))
    assert world.fetch(worker, namespace, chain("k", 1)) == ["HIT"]


# -------------------------------------------------------------------------------------------------------- failed reads


def test_a_failed_read_is_told_and_can_be_tried_again() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    world.faults = {ev.ReadRecords: DiskResult.IO_ERROR}
    asked = world.acquire(worker, namespace, chain("k", 1), wait_ms=1_000)
    assert asked.outcomes == (PENDING,)
    assert [push.failed for push in world.take(ev.ChunksSettled)] == [chain("k", 1)]
    assert world.health() is DiskState.OK
    world.faults.clear()
    assert world.fetch(worker, namespace, chain("k", 1)) == ["HIT"]


def test_reads_that_fail_one_after_the_other_turn_the_tier_off() -> None:
    world, worker, namespace = small(probe_interval_ms=100)
    cold(world, worker, namespace)
    world.faults = {ev.ReadRecords: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
    for number in range(2):
        world.acquire(worker, namespace, chain("k", 4)[number : number + 1])
    world.faults.clear()
    world.fetch(worker, namespace, chain("k", 4)[3:])  # one that succeeds in between: in a row is what counts
    world.faults = {ev.ReadRecords: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
    for number in range(2):
        world.acquire(worker, namespace, chain("k", 4)[number : number + 1])
        assert world.health() is DiskState.OK
    world.acquire(worker, namespace, chain("k", 4)[2:3])
    assert world.health() is DiskState.OFF
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["SLOW"] * 2
    world.faults.clear()
    world.settle(1_000)
    assert world.health() is DiskState.OK
    assert world.fetch(worker, namespace, chain("k", 4)) == ["HIT"] * 4


def test_durable_stays_durable_through_all_of_this() -> None:
    world, worker, namespace = small(durable_within_ms=400, probe_interval_ms=100)
    world.save_durably(worker, namespace, chain("k", 4))
    assert len(world.promised) == 4
    world.faults = dict(BROKEN)
    for number in range(12):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.tick(500)
    assert len(world.promised) == 4
    for number in range(4):
        assert world.store.state.chunks.flags[row_of(world, namespace, "k", number)] & DURABLE
    world.crash(power=True)
    worker = world.join()
    world.open(spec(), worker)
    assert world.fetch(worker, namespace, chain("k", 4)) == ["HIT"] * 4


# --------------------------------------------------------------------------------------------- one slab file that fails


class OneBadSlab(DiskWorld):
    """The disk is fine, and so is the probe; but what is asked of some slab files fails."""

    bad: frozenset[int] = frozenset()
    calls: frozenset[str] = frozenset({"write", "read", "sync"})

    def _write_record(self, effect: ev.WriteRecords, number: int, result: DiskResult) -> DiskResult:
        if "write" in self.calls and effect.targets[number].slab in self.bad:
            result = DiskResult.IO_ERROR
        return super()._write_record(effect, number, result)

    def _read_record(self, effect: ev.ReadRecords, number: int, result: DiskResult) -> DiskResult:
        if "read" in self.calls and effect.sources[number].slab in self.bad:
            result = DiskResult.IO_ERROR
        return super()._read_record(effect, number, result)

    def _perform_op(self, effect: Any, **named: Any) -> None:
        failed = self.bad.intersection(effect.slabs) if isinstance(effect, ev.WriteIndex) else frozenset()
        if not failed or "sync" not in self.calls:
            super()._perform_op(effect, **named)
            return
        covered = self._covered.pop(effect.op)
        self._lost.update({slot: written for slot, written in covered.items() if slot[0] in failed})
        lost = any(place.slab in failed for chunk in effect.chunks for place in chunk.places)
        result = DiskResult.CORRUPT if lost else DiskResult.IO_ERROR
        self._inbox.append(ev.DiskDone(effect.op, (result,), "EIO", slabs=tuple(failed)))


def one_bad_slab(*calls: str, slots: int = 4, **limits: Any) -> tuple[OneBadSlab, WorkerId, NamespaceId]:
    """With two chunks in it, and room for two more; DRAM holds eight."""
    world = OneBadSlab(
        slab_slots=slots,
        segments=1,
        segment_bytes=8 * PAGE,
        probe_interval_ms=1_000,
        durable_within_ms=400,
        **limits,
    )
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("first", 2))
    world.settle(1_000)
    (slab,) = world.platter.slabs
    world.bad, world.calls = frozenset({slab}), frozenset(calls)
    return world, worker, namespace


def degraded(world: DiskWorld) -> int:
    return world.counters["ssd_degraded_read_only"] + world.counters["ssd_degraded_off"]


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_slab_file_that_fails_again_and_again_is_left_alone(call: str) -> None:
    """Degraded twice, and then never more often than it is tried again: after 10, 20, 40 ... s."""
    world, worker, namespace = one_bad_slab(call)
    saved = []
    for number in range(60):
        saved.append(chain(f"{number}", 1)[0])
        world.save(worker, namespace, saved[-1:])
        world.tick(1_000)
    assert world.counters["ssd_slabs_closed"] == 1
    assert 2 <= degraded(world) <= 5
    assert world.health() is DiskState.OK
    world.settle(2_000)
    kept = [key for key in saved if world.where(namespace, (key,)) != ["EVICTED"]]
    assert len(kept) >= 24, "what was written elsewhere stays"
    assert {place.slab for key in kept for place in world.platter.chunks[namespace, key].places}.isdisjoint(
        world.bad
    )
    assert world.fetch(worker, namespace, chain("first", 2)) == ["HIT"] * 2, "and it is read from"
    world.bad = frozenset()
    for _ in range(12):
        world.tick(60_000)
    before = degraded(world)
    for number in range(40):
        world.save(worker, namespace, chain(f"more {number}", 1))
        world.tick(100)
    assert degraded(world) == before
    used = {place.slab for chunk in world.platter.chunks.values() for place in chunk.places}
    assert min(world.platter.slabs) in used, "it is in use again"


def test_a_slab_file_that_cannot_be_read_does_not_take_the_others_along() -> None:
    world, worker, namespace = one_bad_slab("read", slots=8)
    for first in range(0, 6, 2):
        world.save(worker, namespace, chain("bad", 6)[first : first + 2])
    for number in range(12):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.settle(500)
    good = chain("2", 1)
    assert world.where(namespace, (*chain("bad", 6), *good)) == ["ssd"] * 7
    for second in range(60):
        world.fetch(worker, namespace, chain("bad", 6)[second % 6 :][:1])
        world.tick(1_000)
    assert world.health() is DiskState.OK
    assert degraded(world) <= 2
    assert world.where(namespace, chain("bad", 6)) == ["LOST"] * 6, (
        "they are saved anew when they are next computed"
    )
    assert world.fetch(worker, namespace, good) == ["HIT"]


def test_slab_files_that_cannot_be_made_do_not_stop_those_that_exist() -> None:
    world, worker, namespace = one_bad_slab()
    world.faults = {ev.CreateSlab: DiskResult.IO_ERROR}
    for number in range(60):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.tick(1_000)
    assert degraded(world) == 1
    assert world.health() is DiskState.OK
    assert world.counters["ssd_slab_failures"] >= 3
    assert world.counters["chunks_evicted_from_ssd"] > 0
    world.faults.clear()
    world.tick(10_000)
    for number in range(4):
        world.save(worker, namespace, chain(f"more {number}", 1))
        world.settle(1_000)
    assert len(world.platter.slabs) == 2
