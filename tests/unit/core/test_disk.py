"""The way down and up again: save-through, the index, durable commits, demotion, promotion, and a full SSD."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.ssd import slabs
from kvstore.core.transfers import CHUNKS_PER_OP_MAX
from kvstore.errors import DeadlineExceeded, Precondition, Unavailable
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, chain, epoch_of, spec
from kvstore.types import DiskResult, DiskState, NamespaceId, Outcome, Reason, Wait, WorkerId

HIT, PENDING, MISS = Outcome


def start(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    world = DiskWorld(**{"reserve_share_max": 1.0, **limits})
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def small(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """DRAM for eight chunks, and far more on SSD."""
    return start(segments=1, segment_bytes=8 * PAGE, **limits)


def cold(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, name: str = "k", count: int = 4) -> None:
    """Save chunks, and push them out of a DRAM of eight by others."""
    world.save(worker, namespace, chain(name, count))
    for number in range(2):
        world.save(worker, namespace, chain(f"{name} other {number}", 4))
    assert world.where(namespace, chain(name, count)) == ["ssd"] * count


# ----------------------------------------------------------------------------------------------------- save-through


def test_what_is_committed_is_written_at_once_and_indexed_soon() -> None:
    world, worker, namespace = start(durable_within_ms=4_000)
    world.save(worker, namespace, chain("k", 3))
    assert world.where(namespace, chain("k", 3)) == ["dram+ssd"] * 3
    world.tick(999)
    assert world.platter.chunks == {}
    world.tick(1)  # a quarter of durable_within_ms: the other three are for the transaction
    assert {key for _, key in world.platter.chunks} == set(chain("k", 3))


def test_who_is_about_to_stop_waits_for_no_further_records() -> None:
    world, worker, namespace = start(durable_within_ms=400_000)
    world.save(worker, namespace, chain("k", 1))
    world.tick(1)
    assert world.platter.chunks == {}
    world.store.hurry()
    world.tick(1)
    assert {key for _, key in world.platter.chunks} == set(chain("k", 1))
    world.save(worker, namespace, chain("j", 1))  # a commit that was under way
    world.tick(1)
    assert not world.store.transfers.behind


def test_an_index_record_says_all_that_a_restart_needs() -> None:
    world = DiskWorld(durable_within_ms=0)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 2), token_counts=(4, 1), derived=True, maker=b"maker of 16 byte")
    world.tick(1)
    first, tail = (world.platter.chunks[namespace, key] for key in chain("k", 2))
    assert (first.token_count, tail.token_count) == (4, 1)
    assert first.maker == b"maker of 16 byte"
    assert tail.flags & first.flags == first.flags != tail.flags  # both derived, one a tail
    for record in (first, tail):
        assert len(record.places) == len(record.checksums) == 2
        for shard, checksum in enumerate(record.checksums):
            assert world.committed[namespace, record.key, shard] == checksum
    assert world.platter.namespaces[namespace].spec == spec(shards=2)
    assert world.platter.namespaces[namespace].tenant == "alice"


def test_writes_are_bounded_in_chunks_and_bytes_an_op_and_in_all() -> None:
    world, worker, namespace = start(segments=16, slabs=40, disk_bytes_in_flight_max=100 * PAGE)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 200))
    in_flight = [len(op.records) for op in world.of(ev.WriteRecords)]
    assert sum(in_flight) < 100 + CHUNKS_PER_OP_MAX
    assert max(in_flight) <= CHUNKS_PER_OP_MAX
    while world.held:
        world.finish()
        assert sum(len(op.records) for op in world.of(ev.WriteRecords)) < 100 + CHUNKS_PER_OP_MAX
    assert world.where(namespace, chain("k", 200)) == ["dram+ssd"] * 200


def test_a_large_chunk_goes_alone() -> None:
    world = DiskWorld(segments=2, segment_bytes=32 << 20, disk_slab_bytes=64 << 20)
    worker = world.join()
    namespace = world.open(spec(shard_bytes=9 << 20), worker)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 1))
    world.save(worker, namespace, chain("l", 1))
    world.settle(0)
    for op in world.of(ev.WriteRecords):
        assert len(op.records) == 1


def test_a_chunk_of_several_shards_is_written_once_it_is_whole() -> None:
    world = DiskWorld()
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)
    world.save(ranks[0], namespace, chain("k", 1), shards=(0,))
    world.tick(10_000)
    assert world.counters["chunks_stored"] == 0
    assert world.where(namespace, chain("k", 1)) == ["partial"]
    world.save(ranks[1], namespace, chain("k", 1), shards=(1,))
    assert world.where(namespace, chain("k", 1)) == ["dram+ssd"]


def test_a_chunk_that_is_being_written_keeps_its_dram_slot() -> None:
    world, worker, namespace = small()
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 4))
    for number in range(4):
        world.save(worker, namespace, chain(f"{number}", 1))
    # The first four cannot go while they are written; what waits for its turn is worth waiting for too.
    assert world.reserve(worker, namespace, chain("more", 1)).results[0].name == "FULL"
    assert world.where(namespace, chain("k", 4)) == ["dram"] * 4
    world.finish()
    world.save(worker, namespace, chain("more", 1))
    assert world.where(namespace, chain("k", 4)).count("ssd") == 1


def test_demotion_frees_dram_only_after_the_write_has_returned() -> None:
    """The world refuses to let a slot be written over that a later write op reads: contents are compared there."""
    world, worker, namespace = small()
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 8))
    (op,) = world.of(ev.WriteRecords)
    for number in range(20):
        world.reserve(worker, namespace, chain(f"{number}", 1))
        world.tick(50)
    assert world.of(ev.WriteRecords)[0] is op
    world.hold = set()
    while world.held:
        world.finish()
    assert world.counters["chunks_evicted"] == 0
    assert world.fetch(worker, namespace, chain("k", 2)) == ["HIT"] * 2


def test_without_pressure_nothing_leaves_dram() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, chain("k", 20))
    world.settle()
    assert world.where(namespace, chain("k", 20)) == ["dram+ssd"] * 20
    assert world.counters["chunks_demoted"] == 0


def test_a_shard_that_no_slab_can_hold_stays_in_dram_alone() -> None:
    world, worker, namespace = start(slabs=3, slab_slots=4)
    large = world.open(spec("large", shard_bytes=9 * PAGE), worker)
    world.save(worker, namespace, chain("k", 10))
    world.save(worker, large, chain("large", 1))
    world.settle()
    assert world.where(namespace, chain("k", 10)) == ["dram+ssd"] * 10
    assert world.where(large, chain("large", 1)) == ["dram"]
    for number in range(8):  # and does not hold its slot against newer ones
        world.save(worker, large, chain(f"{number}", 1))
    for number in range(20):
        world.save(worker, namespace, chain(f"{number}", 4))
    assert world.counters["grants_full"] == 0


# --------------------------------------------------------------------------------------------------------- the index


def test_an_index_transaction_comes_after_a_sync_of_every_slab_that_it_names() -> None:
    """The platter refuses records that are not on the medium; here also that nothing else is synced."""
    world, worker, namespace = start(slab_slots=4, durable_within_ms=4_000)
    world.save(worker, namespace, chain("k", 6))
    world.hold = {ev.WriteIndex}
    world.tick(1_000)
    (op,) = world.of(ev.WriteIndex)
    assert set(op.slabs) == {place.slab for chunk in op.chunks for place in chunk.places}
    assert len(op.slabs) == 2
    world.finish()
    world.save(worker, namespace, chain("l", 1))
    world.tick(1_000)
    assert len(world.of(ev.WriteIndex)[0].slabs) == 1


def test_one_index_transaction_at_a_time() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.hold = {ev.WriteIndex}
    for number in range(10):
        world.save(worker, namespace, chain(f"{number}", 2))
        world.tick(200)
    assert len(world.of(ev.WriteIndex)) == 1
    assert len(world.of(ev.WriteIndex)[0].chunks) == 2
    world.finish()
    assert len(world.of(ev.WriteIndex)[0].chunks) == 18


def test_what_goes_from_ssd_goes_from_the_index() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 3))
    world.tick(400)
    assert len(world.platter.chunks) == 3
    assert set(world.platter.sessions) == {(namespace, b"s")}
    world.hold = {ev.WriteIndex}
    world.ask(ev.Forget, worker, namespace, b"s")
    (op,) = world.of(ev.WriteIndex)
    assert (op.chunks_deleted, op.sessions_deleted) == (
        tuple((namespace, key) for key in reversed(chain("k", 3))),
        ((namespace, b"s"),),
    )
    world.finish()
    assert not world.platter.chunks and not world.platter.sessions


def test_sessions_are_in_the_index_as_they_are_last() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3))
    first = world.append(worker, namespace, b"s", chain("k", 2))
    info = world.append(worker, namespace, b"s", chain("k", 3)[2:], version=first.version, keep=2)
    world.tick(100)
    record = world.platter.sessions[namespace, b"s"]
    assert (record.version, record.entries) == (info.version, info.entries)
    cut = world.ask(ev.Truncate, worker, namespace, b"s", info.version, 0, 4, True)
    world.tick(100)
    record = world.platter.sessions[namespace, b"s"]
    assert record.version == cut.version
    assert [(entry.delta, entry.approximate) for entry in record.entries] == [(-4, True)] * 2


def test_what_changes_while_a_transaction_runs_comes_with_the_next() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 2))
    world.hold = {ev.WriteIndex}
    world.tick(100)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    world.save(worker, namespace, chain("k", 1))
    world.finish()
    (op,) = world.of(ev.WriteIndex)
    assert op.chunks_deleted == ((namespace, chain("k", 1)[0]),) and not op.chunks, "what is to go goes first"
    world.finish()
    world.tick(100)
    (op,) = world.of(ev.WriteIndex)
    assert [chunk.key for chunk in op.chunks] == list(chain("k", 1))
    world.finish()
    assert world.platter.chunks[namespace, chain("k", 1)[0]].places[0].generation > 0


# ---------------------------------------------------------------------------------------------------- durable commits


def test_a_durable_commit_is_answered_only_after_its_index_transaction() -> None:
    world, worker, namespace = start()
    world.hold = {ev.WriteRecords, ev.WriteIndex}
    commit = world.save_durably(worker, namespace, chain("k", 2))
    assert world.where(namespace, chain("k", 2)) == ["dram"] * 2
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["HIT"] * 2
    (write,) = world.of(ev.WriteRecords)
    world.finish(write)
    while not (index := world.of(ev.WriteIndex)[0]).chunks:  # asked for at once: somebody waits
        world.finish()
    assert world.durable_answer(worker, commit) is None
    world.finish(index)
    answer = world.durable_answer(worker, commit)
    assert isinstance(answer, ev.Committed)
    assert [result.name for result in answer.results] == ["VISIBLE"] * 2
    assert world.promised == {(namespace, key) for key in chain("k", 2)}
    world.crash(power=True)


def test_a_transaction_makes_nothing_durable_that_was_saved_anew_meanwhile() -> None:
    world, worker, namespace = start()
    world.hold = {ev.WriteIndex}
    world.save_durably(worker, namespace, chain("k", 1))
    while not (first := world.of(ev.WriteIndex)[0]).chunks:
        world.finish()
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    again = world.save_durably(worker, namespace, chain("k", 1), variant=1)
    assert world.where(namespace, chain("k", 1)) == ["dram+ssd"]
    world.finish(first)
    assert world.durable_answer(worker, again) is None
    assert world.of(ev.WriteIndex)[0].chunks_deleted
    world.finish()
    assert world.durable_answer(worker, again) is None
    world.finish()
    assert isinstance(world.durable_answer(worker, again), ev.Committed)


def test_a_durable_commit_that_is_repeated_waits_again() -> None:
    world, worker, namespace = start()
    world.hold = {ev.WriteIndex}
    commit = world.save_durably(worker, namespace, chain("k", 1))
    assert world.ask(ev.Commit, worker, commit, (), Wait.DURABLE) is None
    while world.held:
        world.finish()
    (first, second) = [r.answer for r in world.replies if isinstance(r.answer, ev.Committed)]
    assert isinstance(first, ev.Committed) and isinstance(second, ev.Committed)
    assert second.results[0].name == "ALREADY"
    # With everything durable already it is answered at once, and asked once more by the same number, again.
    for _ in range(2):
        answer = world.ask(ev.Commit, worker, commit, (), Wait.DURABLE, request_id=777)
        assert answer.results[0].name == "ALREADY"


def test_a_commit_that_is_repeated_after_demotion_is_a_success() -> None:
    world, worker, namespace = small()
    reserved = world.reserve(worker, namespace, chain("k", 1))
    world.commit(worker, reserved)
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 4))
    assert world.where(namespace, chain("k", 1)) == ["ssd"]
    assert world.ask(ev.Commit, worker, reserved.reservation, ()).results[0].name == "ALREADY"


def test_a_durable_commit_without_an_ssd_is_refused() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 1))
    with pytest.raises(Precondition, match=r"no SSD tier is configured.*set ssd_dir") as error:
        world.ask(ev.Commit, worker, reserved.reservation, world.write(reserved), Wait.DURABLE)
    assert error.value.field == "wait"


def test_a_durable_commit_while_the_ssd_is_degraded_is_visible_and_says_so() -> None:
    world, worker, namespace = start()
    world.faults = {ev.WriteRecords: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
    world.save(worker, namespace, chain("first", 1))
    assert world.health() is DiskState.READ_ONLY
    with pytest.raises(Unavailable, match=r"committed and visible, but not durable.*read_only"):
        world.save_durably(worker, namespace, chain("k", 1))
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]


@pytest.mark.parametrize("kind", [ev.WriteRecords, ev.WriteIndex])
def test_who_waits_for_durability_is_told_when_the_ssd_degrades(kind: type) -> None:
    world, worker, namespace = start()
    world.hold = {kind}
    commit = world.save_durably(worker, namespace, chain("k", 1))
    world.finish(fails="IO_ERROR")
    answer = world.durable_answer(worker, commit)
    assert isinstance(answer, Unavailable), answer
    assert "committed and visible, but not durable" in answer.message


def test_a_durable_commit_is_answered_in_time_also_if_it_cannot_be() -> None:
    world = DiskWorld(durable_within_ms=1_000, disk_deadline_ms=500)
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)
    commit = world.save_durably(ranks[0], namespace, chain("k", 1), shards=(0,))  # the other rank never comes
    world.tick(2_499)
    assert world.durable_answer(ranks[0], commit) is None
    world.tick(1)
    answer = world.durable_answer(ranks[0], commit)
    assert isinstance(answer, DeadlineExceeded), answer
    assert "not durable in time" in answer.message


def test_ranks_wait_for_each_other_and_both_get_their_answer() -> None:
    world = DiskWorld()
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)
    commits = [world.save_durably(ranks[r], namespace, chain("k", 1), shards=(r,)) for r in range(2)]
    for rank, commit in zip(ranks, commits, strict=True):
        assert isinstance(world.durable_answer(rank, commit), ev.Committed)


def test_a_commit_of_more_than_fits_on_ssd_at_once_is_not_called_durable() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=4)
    commit = world.save_durably(worker, namespace, chain("k", 8))
    world.settle(20_000)
    answer = world.durable_answer(worker, commit)
    assert isinstance(answer, (Unavailable, DeadlineExceeded)), answer
    assert world.outcomes(worker, namespace, chain("k", 8)) == ["HIT"] * 8


def test_commits_of_all_that_fits_on_ssd_become_durable_in_place_of_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slab file has more slots than are made free at once: what was written into it just now stays."""
    monkeypatch.setattr(slabs, "EMPTIED_PER_STEP_MAX", 8)
    world, worker, namespace = start(segments=8, segment_bytes=16 * PAGE, slabs=2, slab_slots=12)
    world.save(worker, namespace, chain("old", 24))
    world.settle(20_000)
    world.hold = {ev.WriteIndex}
    keys = chain("k", 24)
    commits = [world.save_durably(worker, namespace, keys[start : start + 8]) for start in (0, 8, 16)]
    world.hold = set()
    world.finish()
    world.settle(20_000)
    for commit in commits:
        answer = world.durable_answer(worker, commit)
        assert isinstance(answer, ev.Committed), answer


def test_who_waits_for_what_the_ssd_has_dropped_is_told_at_once() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=4, durable_within_ms=100_000)
    world.hold = {ev.WriteIndex}
    commit = world.save_durably(worker, namespace, chain("k", 4))
    world.store.state.evict_copy(world.store.state.namespaces[namespace].index[chain("k", 4)[0]])
    world.tick(1)
    answer = world.durable_answer(worker, commit)
    assert isinstance(answer, Unavailable) and "too full" in answer.message, answer


def test_a_chunk_that_is_forgotten_before_it_is_durable_is_not_called_durable() -> None:
    world, worker, namespace = start(ghosts_max=0)
    world.hold = {ev.CopyIn}
    commit = world.save_durably(worker, namespace, chain("k", 1))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    world.hold = set()
    world.settle(20_000)
    assert isinstance(world.durable_answer(worker, commit), DeadlineExceeded)


# ----------------------------------------------------------------------------------------------------------- promotion


def test_acquire_raises_what_is_on_ssd_and_tells_when_it_is_there() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords}
    asked = world.acquire(worker, namespace, chain("k", 4), wait_ms=1_000)
    assert asked.outcomes == (PENDING,) * 4
    assert asked.reasons == (Reason.ON_SSD,) * 4
    assert not asked.lease
    assert world.where(namespace, chain("k", 4)) == ["promoting"] * 4
    (read,) = world.of(ev.ReadRecords)
    assert [record.key for record in read.records] == list(chain("k", 4))
    assert world.take(ev.ChunksSettled) == []
    world.finish()
    settled = world.take(ev.ChunksSettled)
    assert sorted(key for push in settled for key in push.ready) == sorted(chain("k", 4))
    assert world.acquire(worker, namespace, chain("k", 4)).outcomes == (HIT,) * 4
    assert world.counters["chunks_promoted_on_demand"] == 4
    assert world.where(namespace, chain("k", 4)) == ["dram+ssd"] * 4  # written once, and not again
    assert world.counters["chunks_stored"] == 12


def test_match_and_explain_find_it_and_raise_nothing() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    matched = world.match(worker, namespace, chain("k", 5))
    assert matched.usable == 4
    assert matched.outcomes == (PENDING,) * 4 + (MISS,)
    assert matched.reasons[:4] == (Reason.ON_SSD,) * 4
    assert world.match(worker, namespace, chain("k", 4), tokens=4 * CHUNK_TOKENS).usable == 3
    world.ask(ev.Explain, worker, namespace, b"", chain("k", 4))
    world.tick(1_000)
    assert world.where(namespace, chain("k", 4)) == ["ssd"] * 4


def test_who_only_asks_what_it_takes_is_told_and_promotes_nothing() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    cold(world, worker, namespace, "j")
    world.hold = {ev.ReadRecords}
    keys = chain("k", 4)
    asked = world.acquire(worker, namespace, keys, wait_ms=1_000, promote=False)
    assert asked.reasons == (Reason.ON_SSD,) * 4 and not asked.lease
    assert asked.backlog == ev.Backlog(4 * PAGE, 0, 0) == world.match(worker, namespace, keys).backlog
    assert world.where(namespace, keys) == ["ssd"] * 4 and not world.store.state.waits
    assert world.acquire(worker, namespace, keys).backlog == asked.backlog, "before it has them promoted"
    behind = world.acquire(worker, namespace, chain("j", 3), promote=False)
    assert behind.backlog == ev.Backlog(3 * PAGE, 4 * PAGE, 0)
    assert world.match(worker, namespace, keys).backlog == asked.backlog, "its own are not ahead of it"
    world.tick(100)
    world.finish()
    rest = world.match(worker, namespace, chain("j", 3)).backlog
    assert (rest.ahead_bytes, rest.ssd_bytes_per_s) == (0, 40 * PAGE), "four chunks in 0.1 s"
    assert world.match(worker, namespace, keys[:1]).backlog == ev.NO_BACKLOG, "it is there"


def test_a_late_read_is_ahead_of_nobody() -> None:
    world, worker, namespace = small(disk_deadline_ms=1_000)
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, chain("k", 4))
    assert world.store.state.reading_bytes == 4 * PAGE
    world.tick(1_001)
    assert (world.store.state.reading_bytes, world.store.state.read_rate.bytes_per_s) == (0, 0)


def test_hits_behind_what_rises_stay_pinned() -> None:
    world, worker, namespace = small()
    world.save(worker, namespace, chain("k", 4))
    for number in range(5):
        world.save(worker, namespace, chain(f"{number}", 1))
    # Of chunks used together descendants go first: k-3 left.
    assert world.where(namespace, chain("k", 4)) == ["dram+ssd"] * 3 + ["ssd"]
    world.hold = {ev.ReadRecords}
    keys = (*chain("k", 4)[3:], *chain("k", 4)[:3])
    asked = world.acquire(worker, namespace, keys, wait_ms=1_000)
    assert asked.outcomes == (PENDING, HIT, HIT, HIT)
    assert len(asked.extents) == 3
    for number in range(8):
        world.reserve(worker, namespace, chain(f"more {number}", 1))
    assert world.where(namespace, chain("k", 3)) == ["dram+ssd"] * 3
    world.release(worker, asked.lease)


def test_a_miss_ends_a_prefix_lookup_and_raises_nothing_behind_it() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2)[1:])
    world.hold = {ev.ReadRecords}
    asked = world.acquire(worker, namespace, chain("k", 4))
    assert asked.reasons == (Reason.ON_SSD, Reason.FORGOTTEN, Reason.BEYOND_MISS, Reason.BEYOND_MISS)
    assert world.where(namespace, chain("k", 4)) == ["promoting", "FORGOTTEN", "ssd", "ssd"]


def test_a_chunk_rises_once_however_many_ask() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    other = world.join()
    world.open(spec(), other)
    world.hold = {ev.ReadRecords}
    for asker in (worker, other, worker):
        world.acquire(asker, namespace, chain("k", 1), wait_ms=1_000)
    assert len(world.of(ev.ReadRecords)) == 1
    world.finish()
    assert sorted(push.worker for push in world.take(ev.ChunksSettled)) == [worker, worker, other]


def test_who_waits_for_what_finds_no_slot_is_told() -> None:
    world, worker, namespace = small(pin_share_max=1.0)
    cold(world, worker, namespace)
    pinned = world.acquire(
        worker, namespace, [*chain("k other 0", 4), *chain("k other 1", 4)], prefix_only=False
    )
    assert pinned.outcomes.count(HIT) == 8
    asked = world.acquire(worker, namespace, chain("k", 1), wait_ms=1_000)
    assert asked.outcomes == (PENDING,)
    (push,) = world.take(ev.ChunksSettled)
    assert push.failed == chain("k", 1)
    assert world.where(namespace, chain("k", 1)) == ["ssd"]
    world.release(worker, pinned.lease)
    assert world.fetch(worker, namespace, chain("k", 1)) == ["HIT"]


def two_models() -> tuple[DiskWorld, WorkerId, NamespaceId, WorkerId, NamespaceId]:
    """The first one's chunks are on SSD, the second one has all the DRAM, and its worker maps it."""
    world, first, namespace = small()
    world.save(first, namespace, chain("k", 2))
    second = world.join()
    other = world.open(spec("other"), second)
    world.tick(5_000)
    assert not world.reserve(second, other, chain("x", 8)).reservation  # it asks for the first one's segment
    world.save(second, other, chain("x", 8))
    lease = world.acquire(second, other, chain("x", 8))
    world.map(second, [extent.segment for extent in lease.extents])
    world.release(second, lease.lease)
    world.unmap_at_once = False
    assert world.where(namespace, chain("k", 2)) == ["ssd"] * 2
    return world, first, namespace, second, other


def test_who_asks_waits_for_a_segment_that_is_on_its_way() -> None:
    world, worker, namespace, owner, _ = two_models()
    asked = world.acquire(worker, namespace, chain("k", 2), wait_ms=60_000)
    assert asked.outcomes == (PENDING, PENDING)
    world.tick(100)
    assert not world.take(ev.ChunksSettled), "the segment is not unmapped yet"
    for segment in list(world.mapped[owner]):
        world.unmap(owner, [segment])
    assert sorted(key for push in world.take(ev.ChunksSettled) for key in push.ready) == sorted(chain("k", 2))


def test_so_does_who_asks_for_what_a_hint_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place among the reads ahead of need does not end the promotion that somebody waits for now."""
    world, worker, namespace, owner, _ = two_models()
    transfers = world.store.transfers
    monkeypatch.setattr(transfers, "_start_reads", lambda: None)  # the disk has other things to read
    hints = (ev.Hint(b"j", 0, b"", tuple(chain("k", 2))),)
    world.ask(ev.PublishQueue, worker, namespace, hints)
    assert len(transfers.foreseen) == 2
    asked = world.acquire(worker, namespace, chain("k", 2), wait_ms=60_000)
    assert asked.outcomes == (PENDING, PENDING)
    monkeypatch.undo()
    world.tick(100)
    assert not world.take(ev.ChunksSettled), "the segment is not unmapped yet"
    for segment in list(world.mapped[owner]):
        world.unmap(owner, [segment])
    assert sorted(key for push in world.take(ev.ChunksSettled) for key in push.ready) == sorted(chain("k", 2))


def test_nobody_waits_for_a_segment_longer_than_it_said() -> None:
    world, worker, namespace, owner, _ = two_models()
    world.acquire(worker, namespace, chain("k", 2), wait_ms=200)
    world.tick(200)
    assert sorted(key for push in world.take(ev.ChunksSettled) for key in push.failed) == sorted(
        chain("k", 2)
    )
    world.tick(100)
    assert world.where(namespace, chain("k", 2)) == ["ssd"] * 2
    for segment in list(world.mapped[owner]):
        world.unmap(owner, [segment])
    assert not world.of(ev.ReadRecords), "nobody wants them now"


def test_reads_are_bounded_in_bytes() -> None:
    world, worker, namespace = start(segments=8, slabs=20, disk_bytes_in_flight_max=8 * PAGE)
    for number in range(10):
        world.save(worker, namespace, chain(f"{number}", 20))
    keys = [key for number in range(10) for key in chain(f"{number}", 20)]
    gone = [key for key, where in zip(keys, world.where(namespace, keys), strict=True) if where == "ssd"]
    assert len(gone) >= 72
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, gone, wait_ms=1_000)
    (first,) = world.of(ev.ReadRecords)
    assert len(first.records) == CHUNKS_PER_OP_MAX
    world.finish()
    assert len(world.of(ev.ReadRecords)) == 1


def test_a_save_of_what_is_on_ssd_is_not_needed() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    assert [result.name for result in world.reserve(worker, namespace, chain("k", 4)).results] == [
        "ALREADY"
    ] * 4


# ---------------------------------------------------------------------------------------------- forgetting on the way


@pytest.mark.parametrize("how", ["forget", "epoch"])
def test_a_chunk_that_is_dropped_while_it_rises_does_not_arrive(how: str) -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, chain("k", 2), wait_ms=1_000)
    if how == "forget":
        world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))
    else:
        world.open(epoch_of(spec(), 1), worker)
        world.tick(50)
    (failed,) = {push.failed for push in world.take(ev.ChunksSettled)} - {chain("k", 2)[1:]}
    assert failed == chain("k", 1)
    world.finish()
    assert world.take(ev.ChunksSettled) == []
    assert "promoting" not in world.where(namespace, chain("k", 2))
    world.tick(10_000)
    assert not any(key in chain("k", 2) for _, key in world.platter.chunks)
    assert world.slots()["reserved"] == 0


def test_a_chunk_that_is_dropped_before_its_read_begins_is_not_read() -> None:
    world, worker, namespace = small(disk_bytes_in_flight_max=PAGE)
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, chain("k", 1), wait_ms=1_000)
    world.acquire(worker, namespace, chain("k", 2)[1:], wait_ms=1_000)  # its turn comes after the first
    assert len(world.held) == 1
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2)[1:])
    world.finish()
    assert world.held == []
    assert world.where(namespace, chain("k", 2)) == ["dram+ssd", "FORGOTTEN"]


def test_a_chunk_that_is_dropped_while_it_is_written_is_gone_from_both_tiers() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 2))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["FORGOTTEN", "HIT"]
    world.finish()
    world.tick(400)
    assert [key for _, key in world.platter.chunks] == list(chain("k", 2)[1:])
    assert world.slots()["ready"] == 1
    assert sum(slab.counts[2] for slab in world.store.state.ssd_slots.segments) == 1


def test_a_chunk_that_is_forgotten_under_a_lease_does_not_come_back_with_a_restart() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 2))
    world.tick(400)
    world.acquire(worker, namespace, chain("k", 2))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    world.tick(100)
    assert [key for _, key in world.platter.chunks] == list(chain("k", 2)[1:])
    world.crash()
    worker = world.join()
    world.open(spec(), worker)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["NEVER_SEEN", "ON_SSD"]


def test_a_tail_goes_with_its_manifest_also_from_ssd() -> None:
    world, worker, namespace = small(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 2), token_counts=(4, 2))
    info = world.append(worker, namespace, b"s", chain("k", 2), counts=(4, 2))
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 4))
    assert world.where(namespace, chain("k", 2)) == ["ssd"] * 2
    world.tick(400)
    assert (namespace, chain("k", 2)[1]) in world.platter.chunks
    world.append(worker, namespace, b"s", (), version=info.version, keep=1)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["ON_SSD", "TRUNCATED"]
    world.tick(400)
    assert (namespace, chain("k", 2)[1]) not in world.platter.chunks


def test_sessions_end_with_their_time_to_live_and_their_chunks_say_so() -> None:
    world, worker, namespace = small(session_ttl_ms=5_000, durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3), token_counts=(4, 4, 1))
    world.append(worker, namespace, b"s", chain("k", 3), counts=(4, 4, 1))
    world.append(worker, namespace, b"shares the first", chain("k", 1))
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 4))
    world.tick(4_000)
    world.session(worker, namespace, b"shares the first")
    world.tick(999)
    assert world.session(worker, namespace, b"none").version == 0
    assert set(world.platter.sessions) == {(namespace, b"s"), (namespace, b"shares the first")}
    world.tick(1)
    world.tick(400)
    assert set(world.platter.sessions) == {(namespace, b"shares the first")}
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["ON_SSD", "EXPIRED", "EXPIRED"]
    assert world.counters["sessions_expired"] == 1
    world.tick(5_000)
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["EXPIRED"]


# ------------------------------------------------------------------------------------------------------------ full SSD


def insist(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, name: str) -> None:
    """Save one chunk of a namespace that may have to get a segment first."""
    for _ in range(20):
        reserved = world.reserve(worker, namespace, chain(name, 1))
        if reserved.reservation:
            world.commit(worker, reserved)
            return
        world.tick(60)
    raise AssertionError(f"{namespace} gets no slot")


def fill(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, *names: str) -> None:
    for name in names:
        world.tick(1)
        world.save(worker, namespace, chain(name, 1))
        world.tick(1)


def test_what_left_dram_longest_ago_leaves_a_full_ssd_first() -> None:
    world, worker, namespace = small(slabs=3, slab_slots=4)
    fill(world, worker, namespace, *"abcdefghijkl")
    keys = [chain(name, 1)[0] for name in "abcdefghijkl"]
    assert world.where(namespace, keys) == ["ssd"] * 4 + ["dram+ssd"] * 8
    fill(world, worker, namespace, "m")
    assert world.where(namespace, keys)[:5] == ["EVICTED", "ssd", "ssd", "ssd", "ssd"]
    assert world.counters["chunks_evicted_from_ssd"] == 1
    assert world.outcomes(worker, namespace, keys[:1]) == ["EVICTED"]


def test_what_queued_jobs_need_leaves_a_full_ssd_last() -> None:
    world, worker, namespace = small(slabs=3, slab_slots=4, prefetch_share_max=0.01)
    fill(world, worker, namespace, *"abcdefghijkl")
    keys = [chain(name, 1)[0] for name in "abcd"]
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"j", 0, keys=tuple(keys[:2])),))
    fill(world, worker, namespace, "m", "n")
    assert world.where(namespace, keys) == ["ssd", "ssd", "EVICTED", "EVICTED"]


def test_the_ssd_copies_of_what_is_in_dram_go_last_and_the_store_goes_on() -> None:
    world, worker, namespace = start(segments=1, segment_bytes=16 * PAGE, slabs=2, slab_slots=4)
    fill(world, worker, namespace, *"abcdefgh")
    keys = [chain(name, 1)[0] for name in "abcdefgh"]
    assert world.where(namespace, keys) == ["dram+ssd"] * 8
    fill(world, worker, namespace, "i")
    assert world.where(namespace, keys) == ["dram"] * 4 + ["dram+ssd"] * 4
    for number in range(30):  # what has no copy any more does not hold its slot
        fill(world, worker, namespace, f"more {number}")
    assert world.counters["grants_full"] == 0
    assert world.where(namespace, keys) == ["EVICTED"] * 8


def test_slab_files_change_class_and_never_exceed_the_cap() -> None:
    """The world counts files: those that are being made, those that are, and those whose deletion is not indexed."""
    world, worker, namespace = start(segments=4, segment_bytes=4 * PAGE, slabs=3, slab_slots=6)
    wide = world.open(spec("wide", shard_bytes=2 * PAGE), worker)
    fill(world, worker, namespace, *map(str, range(18)))
    assert len(world.platter.slabs) == 3
    before = set(world.platter.slabs)
    world.hold = {ev.WriteIndex}
    insist(world, worker, wide, "w")
    while not (op := world.of(ev.WriteIndex)[0]).slabs_deleted:
        world.finish()
    assert len(op.slabs_deleted) == 1
    assert not any(isinstance(held, ev.CreateSlab) for held in world.held)
    world.tick(10)
    assert world.where(wide, chain("w", 1)) == ["dram"]
    world.finish()
    world.hold = set()
    world.settle(200)
    assert world.where(wide, chain("w", 1)) == ["dram+ssd"]
    assert {shape[0] for shape in world.platter.slabs.values()} == {2 * PAGE, 3 * PAGE}
    assert len(world.platter.slabs.keys() & before) == 2
    deleted = set(op.slabs_deleted)
    assert not any(place.slab in deleted for chunk in world.platter.chunks.values() for place in chunk.places)


def test_the_slab_that_was_written_longest_ago_is_the_one_that_goes() -> None:
    world, worker, namespace = start(segments=4, segment_bytes=4 * PAGE, slabs=3, slab_slots=6)
    wide = world.open(spec("wide", shard_bytes=2 * PAGE), worker)
    fill(world, worker, namespace, *map(str, range(18)))
    first, *_ = sorted(world.platter.slabs)
    insist(world, worker, wide, "w")
    world.settle(200)
    assert first not in world.platter.slabs


def test_a_slab_with_a_read_under_way_stays() -> None:
    world, worker, namespace = start(segments=2, segment_bytes=4 * PAGE, slabs=1, slab_slots=12)
    wide = world.open(spec("wide", shard_bytes=2 * PAGE), worker)
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords}
    world.acquire(worker, namespace, chain("k", 1), wait_ms=1_000)
    insist(world, worker, wide, "w")
    world.tick(10)
    assert len(world.platter.slabs) == 1
    assert world.where(wide, chain("w", 1)) == ["dram"]
    world.finish()
    assert world.acquire(worker, namespace, chain("k", 1)).outcomes == (HIT,)
    world.settle(100)
    assert world.where(wide, chain("w", 1)) == ["dram+ssd"]


def test_a_full_slot_size_does_not_hold_up_another() -> None:
    """The only slab has a quarantined slot, so it cannot change class; its own class goes on."""
    world, worker, namespace = start(segments=2, segment_bytes=4 * PAGE, slabs=1, slab_slots=12)
    wide = world.open(spec("wide", shard_bytes=2 * PAGE), worker)
    cold(world, worker, namespace)
    world.rot(
        world.store.cold_tier.slabs.place_of(
            world.store.state.namespaces[namespace].index[chain("k", 1)[0]], 0
        )
    )
    assert world.fetch(worker, namespace, chain("k", 1)) == ["CORRUPT"]
    insist(world, worker, wide, "w")
    insist(world, worker, namespace, "n")
    world.tick(1)
    world.tick(1)
    assert world.where(wide, chain("w", 1)) == ["dram"]
    assert world.where(namespace, chain("n", 1)) == ["dram+ssd"]


def test_what_finds_no_place_on_a_full_ssd_does_not_hold_its_dram_slot() -> None:
    world, worker, namespace = start(segments=2, segment_bytes=4 * PAGE, slabs=1, slab_slots=12)
    wide = world.open(spec("wide", shard_bytes=2 * PAGE), worker)
    cold(world, worker, namespace)
    world.rot(
        world.store.cold_tier.slabs.place_of(
            world.store.state.namespaces[namespace].index[chain("k", 1)[0]], 0
        )
    )
    assert world.fetch(worker, namespace, chain("k", 1)) == ["CORRUPT"]  # the slab cannot change class
    insist(world, worker, wide, "w")
    for number in range(10):
        world.save(worker, wide, chain(f"{number}", 1))
        world.tick(10)
    assert world.store.state.disk_full
    assert world.where(wide, chain("9", 1)) == ["dram"]


def reading(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """A world in which somebody waits for a read, and then saves."""
    world, worker, namespace = start(segments=2, segment_bytes=64 * PAGE, slabs=40, **limits)
    world.save(worker, namespace, chain("k", 4))
    world.tick(1)
    index = world.store.state.namespaces[namespace].index
    for key in reversed(chain("k", 4)):
        world.store.state.demote(index[key])
    world.hold = {ev.ReadRecords, ev.WriteRecords}
    world.acquire(worker, namespace, chain("k", 4))
    assert world.of(ev.ReadRecords)
    return world, worker, namespace


def test_writes_wait_for_reads_but_not_for_ever() -> None:
    world, worker, namespace = reading(durable_within_ms=4_000)
    world.save(worker, namespace, chain("new", 2))
    world.tick(500)
    assert not world.of(ev.WriteRecords)
    world.tick(500)
    assert world.of(ev.WriteRecords), "the read may hang"


def test_writes_begin_when_the_reads_have_ended() -> None:
    world, worker, namespace = reading(durable_within_ms=4_000)
    world.save(worker, namespace, chain("new", 2))
    assert not world.of(ev.WriteRecords)
    world.finish()
    assert world.of(ev.WriteRecords) and not world.of(ev.ReadRecords)


def test_writes_do_not_wait_when_they_take_too_much_of_dram() -> None:
    world, worker, namespace = reading(durable_within_ms=4_000)
    world.save(worker, namespace, chain("new", 8))
    assert not world.of(ev.WriteRecords)
    world.save(worker, namespace, chain("more", 1))
    assert world.of(ev.WriteRecords)


def test_a_durable_commit_does_not_wait_for_reads() -> None:
    world, worker, namespace = reading(durable_within_ms=4_000)
    world.save(worker, namespace, chain("before", 2))
    assert not world.of(ev.WriteRecords)
    world.save_durably(worker, namespace, chain("new", 2))
    assert len(world.of(ev.WriteRecords)) == 1
    world.save(worker, namespace, chain("after", 2))
    assert len(world.of(ev.WriteRecords)) == 1, "for this write alone"
