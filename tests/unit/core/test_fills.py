"""Fill, and chunks that their worker keeps too: what is copied out of a region is seen only by a commit that came after
the copy, and what a worker and the SSD have does not stay in DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import saves
from kvstore.errors import BadRequest, Conflict, DeadlineExceeded, NotFound, Precondition
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, REGION, World, chain, spec, tag
from kvstore.types import (
    DiskResult,
    DiskState,
    NamespaceId,
    Outcome,
    Protection,
    RegionId,
    StagedPiece,
    Wait,
    WorkerId,
)

BOTH = pytest.mark.parametrize("protection", list(Protection))
KEYS = chain("k", 3)


def start(protection: Protection, **limits: Any) -> tuple[World, WorkerId, NamespaceId]:
    world = World(protection=protection, **limits)
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def answer_of(world: World, kind: type) -> ev.Answer | None:
    """Of the last request of this kind."""
    asked = [where for where, event in world._asked.items() if isinstance(event, kind)]
    return world.answers.get(asked[-1])


# ------------------------------------------------------------------------------------------------------ two phases


@BOTH
def test_what_was_filled_is_seen_once_it_is_committed(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    reserved = world.reserve(worker, namespace, KEYS)
    assert isinstance(world.fill(worker, reserved), ev.Filled)
    assert world.outcomes(worker, namespace, KEYS) == ["BEING_SAVED"] * 3
    committed = world.commit_filled(worker, reserved)
    assert committed is not None and {result.name for result in committed.results} == {"VISIBLE"}
    assert world.acquire(worker, namespace, KEYS).outcomes == (Outcome.HIT,) * 3  # compares the bytes
    assert not [effect for effect in world.held if isinstance(effect, (ev.CopyIn, ev.Checksum))]
    counters = world.store.state.counters
    assert (counters["fills"], counters["bytes_filled"]) == (1, 3 * PAGE)
    assert (counters["chunks_saved"], counters["bytes_saved"]) == (3, 3 * PAGE)


@BOTH
def test_rows_that_were_read_late_are_never_seen(protection: Protection) -> None:
    """The daemon stood still, the worker gave up and used the rows for something else."""
    world, worker, namespace = start(protection)
    world.hold = {ev.FillSlots}
    reserved = world.reserve(worker, namespace, KEYS)
    assert world.fill(worker, reserved) is None
    world.reuse_rows(worker, reserved)
    world.finish()
    assert isinstance(answer_of(world, ev.Fill), ev.Filled), "the copy itself was fine"
    assert world.outcomes(worker, namespace, KEYS) == ["BEING_SAVED"] * 3
    world.abort(worker, reserved)
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 3
    assert world.slots()["free"] == world.slots()["capacity"]


@BOTH
def test_a_later_fill_replaces_an_earlier_one(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved, variant=1)
    world.fill(worker, reserved, variant=2)
    world.commit_filled(worker, reserved)
    world.acquire(worker, namespace, KEYS)  # compares with what the second meant


def test_staged_bytes_replace_what_was_filled() -> None:
    world, worker, namespace = start(Protection.SEALED)
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved, variant=1)
    world.commit(worker, reserved, variant=2)
    for shard in world.savings[reserved.reservation].shards:
        assert world.committed[shard] == tag(shard, 2)
    world.acquire(worker, namespace, KEYS)


@BOTH
def test_every_shard_has_a_row_of_its_own(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(shards=3, shard_bytes=2 * PAGE - 7), worker)
    world.save(worker, namespace, KEYS[:2], shards=(1,))
    reserved = world.reserve(worker, namespace, KEYS[:2], shards=(2, 0))
    world.fill(worker, reserved)
    committed = world.commit_filled(worker, reserved)
    assert committed is not None and len(committed.results) == 2
    assert len(world.acquire(worker, namespace, KEYS[:2]).extents) == 6


def test_a_commit_of_filled_chunks_waits_until_they_are_durable() -> None:
    world = DiskWorld(durable_within_ms=400)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.WriteIndex}
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved)
    assert world.commit_filled(worker, reserved, wait=Wait.DURABLE) is None
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 3
    world.settle(400)
    assert isinstance(world.durable_answer(worker, reserved.reservation), ev.Committed)
    world.crash(power=True)


# ---------------------------------------------------------------------------------------------------------- failures


@BOTH
def test_a_region_that_is_too_short_fails_the_fill_alone(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    world.hold = {ev.FillSlots}
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved)
    world.cut_region(worker)
    world.finish()
    error = answer_of(world, ev.Fill)
    assert isinstance(error, Precondition) and "cut short" in error.message
    assert world.store.state.counters["fills_failed"] == 1
    assert world.outcomes(worker, namespace, KEYS) == ["BEING_SAVED"] * 3
    world.hold = set()
    world.fill(worker, reserved, variant=1)  # the reservation is as good as before
    world.commit_filled(worker, reserved)
    world.acquire(worker, namespace, KEYS)


def test_a_fill_that_failed_undoes_the_one_before_it() -> None:
    """Its rows overwrote some of the slots before one could not be read."""
    world, worker, namespace = start(Protection.SEALED)
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved)
    world.hold = {ev.FillSlots}
    world.fill(worker, reserved, variant=1)
    world.finish(fails="EIO")
    with pytest.raises(BadRequest, match="must name one piece of staging memory"):
        world.commit_filled(worker, reserved)
    assert world.outcomes(worker, namespace, KEYS) == ["BEING_SAVED"] * 3


@BOTH
def test_one_copy_at_a_time(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    world.hold = {ev.FillSlots, ev.CopyIn, ev.Checksum}
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved)
    for again in (world.fill, world.commit_filled):
        with pytest.raises(Conflict, match="is being filled already"):
            again(worker, reserved)
    world.finish()
    world.commit_filled(worker, reserved)
    with pytest.raises(Precondition, match="was committed"):
        world.fill(worker, reserved)
    other = world.reserve(worker, namespace, chain("o", 1))
    world.commit(worker, other)
    with pytest.raises(Conflict, match="is being committed already"):
        world.fill(worker, other)


@BOTH
def test_what_fill_is_asked_must_fit_the_grant(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    other = world.join()
    world.open(spec(), other)
    reserved = world.reserve(worker, namespace, KEYS)
    for offsets in ((), (0,) * 2, (0,) * 4):
        with pytest.raises(BadRequest, match="one row of the region for each of the 3 granted shards"):
            world.ask(ev.Fill, worker, reserved.reservation, REGION, offsets)
    for asker, number in ((other, reserved.reservation), (worker, 99)):
        with pytest.raises(NotFound, match="no such reservation of this worker"):
            world.ask(ev.Fill, asker, number, REGION, (0,) * 3)
    world.abort(worker, reserved)
    with pytest.raises(Precondition, match="was aborted"):
        world.fill(worker, reserved)


@BOTH
def test_a_repeated_request_is_answered_with_its_first_fill(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    world.hold = {ev.FillSlots}
    reserved = world.reserve(worker, namespace, KEYS)
    world.rows.update({(worker, offset): offset for offset in (1, 2, 3)})
    world._let_go(reserved.reservation)
    for _ in range(2):
        assert world.ask(ev.Fill, worker, reserved.reservation, REGION, (1, 2, 3), request_id=77) is None
    assert len(world.held) == 1
    world.finish()
    assert sum(isinstance(reply.answer, ev.Filled) for reply in world.replies) == 2
    assert isinstance(
        world.ask(ev.Fill, worker, reserved.reservation, REGION, (1, 2, 3), request_id=77), ev.Filled
    )
    assert not world.held


# --------------------------------------------------------------------------------------------------- ends in mid-fill


def in_mid_fill(protection: Protection) -> tuple[World, WorkerId, WorkerId, NamespaceId, ev.Reserved]:
    """A world in which three slots are being filled, and another worker looks on."""
    world = World(protection=protection, reservation_ttl_ms=5_000)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.hold = {ev.FillSlots}
    reserved = world.reserve(worker, namespace, KEYS)
    assert world.fill(worker, reserved) is None
    return world, worker, other, namespace, reserved


@BOTH
def test_who_aborts_in_mid_fill_gets_an_answer_and_the_slots_wait_for_the_copy(
    protection: Protection,
) -> None:
    world, worker, other, namespace, reserved = in_mid_fill(protection)
    assert world.abort(worker, reserved) == 1
    error = answer_of(world, ev.Fill)
    assert isinstance(error, Precondition) and "was aborted" in error.message
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    assert world.slots()["quarantined"] == 3
    with pytest.raises(Precondition, match="was aborted"):
        world.commit_filled(worker, reserved)
    world.save(other, namespace, KEYS)  # elsewhere: the world sees to it that the late copy hurts nobody
    world.finish()
    world.acquire(other, namespace, KEYS)
    assert world.slots()["quarantined"] == 0


@BOTH
def test_the_slots_of_a_worker_killed_in_mid_fill_wait_for_the_copy(protection: Protection) -> None:
    world, worker, other, namespace, _ = in_mid_fill(protection)
    world.kill(worker)
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    assert world.slots()["quarantined"] == 3
    world.finish()
    assert world.slots()["quarantined"] == 0
    assert world.slots()["free"] == world.slots()["capacity"]


def test_a_closed_connection_ends_a_fill() -> None:
    world, worker, other, namespace, _ = in_mid_fill(Protection.SEALED)
    world.close(worker)
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    assert world.slots()["quarantined"] == 3
    world.finish()
    assert world.slots()["quarantined"] == 0


@pytest.mark.parametrize("killed_first", [True, False])
def test_who_may_write_in_place_keeps_its_slots_from_others_after_the_copy_too(killed_first: bool) -> None:
    """Under protection `group` both the copy and the process must have ended."""
    world, worker, other, namespace, _ = in_mid_fill(Protection.GROUP)
    world.save(other, namespace, chain("held", 1))
    world.map(worker, list(world.memory))  # closed, it lives on as long as it has a mapping
    world.close(worker)
    assert world.slots()["quarantined"] == 3
    for end in (lambda: world.kill(worker), world.finish)[:: 1 if killed_first else -1]:
        assert world.slots()["quarantined"] == 3
        end()
    assert world.slots()["quarantined"] == 0


@BOTH
def test_a_fill_that_takes_too_long_is_answered_and_its_slots_wait_for_the_copy(
    protection: Protection,
) -> None:
    world, worker, other, namespace, reserved = in_mid_fill(protection)
    world.tick(saves.COPY_DEADLINE_MS)
    assert isinstance(answer_of(world, ev.Fill), DeadlineExceeded)
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    counters = world.store.state.counters
    assert (counters["copies_late"], counters["fills_failed"]) == (1, 1)
    with pytest.raises(Precondition, match="missed the deadline"):
        world.commit_filled(worker, reserved)
    assert world.slots()["quarantined"] == 3
    world.finish()
    # Who writes in place was told of a failure, and may not know yet that the slots are not its own any more.
    assert world.slots()["quarantined"] == (3 if protection is Protection.GROUP else 0)
    world.kill(worker)
    assert world.slots()["quarantined"] == 0


@BOTH
def test_a_reservation_that_expires_in_mid_fill_ends_with_the_copy(protection: Protection) -> None:
    world, worker, other, namespace, reserved = in_mid_fill(protection)
    world.tick(5_000)
    assert answer_of(world, ev.Fill) is None
    assert world.slots()["reserved"] == 3, "nobody else may have them while they are written"
    world.finish()
    error = answer_of(world, ev.Fill)
    assert isinstance(error, Precondition) and "was expired" in error.message
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    with pytest.raises(Precondition, match="was expired"):
        world.commit_filled(worker, reserved)
    world.kill(worker)
    assert world.slots()["free"] == world.slots()["capacity"]


@BOTH
def test_what_was_filled_expires_with_its_reservation(protection: Protection) -> None:
    world, worker, namespace = start(protection, reservation_ttl_ms=5_000)
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill(worker, reserved)
    world.tick(5_000)
    with pytest.raises(Precondition, match="was expired"):
        world.commit_filled(worker, reserved)
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 3


# ------------------------------------------------------------------------------------------------ ahead of the commit

COPIES = {ev.CopyIn, ev.Checksum}


def rest_of(staged: tuple[StagedPiece, ...], filled: Sequence[int]) -> tuple[StagedPiece, ...]:
    return tuple(piece for number, piece in enumerate(staged) if number not in filled)


def finish_all(world: World) -> None:
    while world.held:
        world.finish()


def copied(world: World) -> list[int]:
    """How many slots each copy that is held writes or checksums."""
    return [len(op.targets if isinstance(op, ev.CopyIn) else op.extents) for op in world.held]


@BOTH
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_commit_copies_the_rest_and_waits_for_all(protection: Protection, order: tuple[int, ...]) -> None:
    world, worker, namespace = start(protection)
    world.hold = COPIES
    keys = chain("k", 5)
    reserved = world.reserve(worker, namespace, keys)
    staged = world.write(reserved, 1)
    assert world.fill_part(worker, reserved, (0, 3), staged) is None
    assert world.fill_part(worker, reserved, (1,), staged) is None
    assert world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0, 1, 3))) is None
    assert copied(world) == [2, 1, 2]
    held = [world.held[number] for number in order]
    for count, op in enumerate(held):
        assert world.outcomes(worker, namespace, keys) == ["BEING_SAVED"] * 5, count
        world.finish(op)
    assert isinstance(answer_of(world, ev.Commit), ev.Committed)
    assert world.acquire(worker, namespace, keys).outcomes == (Outcome.HIT,) * 5  # compares the bytes
    assert world.store.state.counters["bytes_saved"] == 5 * PAGE
    assert sum(isinstance(reply.answer, ev.Filled) for reply in world.replies) == 2


@BOTH
def test_a_commit_of_what_is_all_filled_copies_nothing(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    for numbers in ((1,), (0, 2)):
        assert isinstance(world.fill_part(worker, reserved, numbers, staged), ev.Filled)
    assert world.outcomes(worker, namespace, KEYS) == ["BEING_SAVED"] * 3
    world.hold = COPIES
    assert isinstance(world.ask(ev.Commit, worker, reserved.reservation, ()), ev.Committed)
    assert not world.held
    world.acquire(worker, namespace, KEYS)


def test_staged_bytes_of_all_replace_parts_that_were_filled() -> None:
    world, worker, namespace = start(Protection.SEALED)
    reserved = world.reserve(worker, namespace, KEYS)
    world.fill_part(worker, reserved, (1,), world.write(reserved, 1))
    world.commit(worker, reserved, variant=2)
    for shard in world.savings[reserved.reservation].shards:
        assert world.committed[shard] == tag(shard, 2)


@BOTH
@pytest.mark.parametrize("fails", [0, 1])
def test_a_copy_that_fails_fails_the_commit_that_waits_for_it(protection: Protection, fails: int) -> None:
    """And its slots are free only when the other copy has returned too."""
    world, worker, namespace = start(protection)
    world.hold = COPIES
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0,), staged)
    world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0,)))
    first, second = world.held[fails], world.held[1 - fails]
    world.finish(first, fails="EIO")
    assert answer_of(world, ev.Commit) is None
    assert world.slots()["reserved"] == 3
    world.finish(second)
    error = answer_of(world, ev.Commit)
    assert isinstance(error, Precondition) and "could not be copied: EIO" in error.message
    filled = answer_of(world, ev.Fill)
    assert isinstance(filled, ev.Filled if fails else Precondition)
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 3
    assert world.slots()["free"] == world.slots()["capacity"]


def test_a_part_that_failed_before_has_to_come_again() -> None:
    world, worker, namespace = start(Protection.SEALED)
    world.hold = COPIES
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0, 1), staged)
    world.finish(fails="EIO")
    with pytest.raises(BadRequest, match="each of the 3 granted shards that are not filled"):
        world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0, 1)))
    world.fill_part(worker, reserved, (0,), staged)
    finish_all(world)
    world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0,)))
    finish_all(world)
    world.acquire(worker, namespace, KEYS)


@BOTH
def test_a_part_that_is_filled_again_waits_and_counts_once(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0, 1), staged)
    world.hold = COPIES
    world.fill_part(worker, reserved, (1,), staged)
    for numbers in ((1,), (0, 1, 2), ()):
        with pytest.raises(Conflict, match="is being filled already"):
            world.fill_part(worker, reserved, numbers or (0, 1, 2), staged)
    world.fill_part(worker, reserved, (2,), staged)  # another is welcome
    assert world.ask(ev.Commit, worker, reserved.reservation, ()) is None
    finish_all(world)
    world.acquire(worker, namespace, KEYS)


@BOTH
def test_numbers_that_make_no_sense(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved)
    for numbers, why in (((3,), "has 3 granted shards"), ((1, 1), "must ascend"), ((1, 0), "must ascend")):
        with pytest.raises(BadRequest, match=why):
            world.ask(ev.Fill, worker, reserved.reservation, REGION, (0,) * len(numbers), numbers)
    offsets = (0,) if protection is Protection.GROUP else ()
    with pytest.raises(BadRequest, match="must be empty" if offsets else "one piece of staging memory"):
        world.ask(ev.Fill, worker, reserved.reservation, RegionId(0), offsets, (0,))
    assert isinstance(world.ask(ev.Commit, worker, reserved.reservation, staged), ev.Committed)


@BOTH
@pytest.mark.parametrize("how", ["abort", "kill", "late"])
def test_slots_wait_each_for_its_own_copy(protection: Protection, how: str) -> None:
    world, worker, namespace = start(protection)
    other = world.join()
    world.open(spec(), other)
    world.hold = COPIES
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0,), staged)
    world.fill_part(worker, reserved, (1,), staged)
    if how == "abort":
        world.abort(worker, reserved)
    elif how == "kill":
        world.kill(worker)
    else:
        world.tick(saves.COPY_DEADLINE_MS)
        assert isinstance(answer_of(world, ev.Fill), DeadlineExceeded)
        assert world.store.state.counters["copies_late"] == 1
    assert world.outcomes(other, namespace, KEYS) == ["NEVER_SEEN"] * 3
    waits_for_owner = how == "late" and protection is Protection.GROUP
    assert world.slots()["quarantined"] == (3 if waits_for_owner else 2)
    world.finish(world.held[1])
    assert world.slots()["quarantined"] == (3 if waits_for_owner else 1)
    finish_all(world)
    world.kill(worker) if waits_for_owner else None
    assert world.slots()["free"] == world.slots()["capacity"]


@BOTH
def test_a_commit_that_waits_for_a_late_part_is_answered(protection: Protection) -> None:
    world, worker, namespace = start(protection)
    world.hold = COPIES
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0,), staged)
    world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0,)))
    world.finish(world.held[1])
    world.tick(saves.COPY_DEADLINE_MS)
    assert isinstance(answer_of(world, ev.Commit), DeadlineExceeded)
    assert isinstance(answer_of(world, ev.Fill), DeadlineExceeded)
    assert world.slots()["quarantined"] == 1, "who commits has let go of the others"
    finish_all(world)
    assert world.slots()["free"] == world.slots()["capacity"]
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 3


@BOTH
def test_a_reservation_does_not_expire_while_a_part_is_filled(protection: Protection) -> None:
    world, worker, namespace = start(protection, reservation_ttl_ms=5_000)
    world.hold = COPIES
    reserved = world.reserve(worker, namespace, KEYS)
    staged = world.write(reserved, 1)
    world.fill_part(worker, reserved, (0,), staged)
    world.tick(5_000)
    assert world.slots()["reserved"] == 3
    world.ask(ev.Commit, worker, reserved.reservation, rest_of(staged, (0,)))
    finish_all(world)
    world.acquire(worker, namespace, KEYS)


# --------------------------------------------------------------------------------------------------- kept elsewhere


def tiers(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    world = DiskWorld(**limits)
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def test_a_transient_chunk_leaves_dram_once_the_ssd_has_it() -> None:
    world, worker, namespace = tiers()
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, KEYS, transient=True)
    assert world.where(namespace, KEYS) == ["dram"] * 3
    world.finish()
    assert world.where(namespace, KEYS) == ["ssd"] * 3
    assert world.slots()["ready"] == 0
    assert world.counters["transient_chunks_dropped"] == 3


def test_others_stay() -> None:
    world, worker, namespace = tiers()
    world.save(worker, namespace, KEYS)
    assert world.where(namespace, KEYS) == ["dram+ssd"] * 3


def test_a_transient_chunk_leaves_dram_with_the_lease_that_had_it_read_back() -> None:
    world, worker, namespace = tiers()
    world.save(worker, namespace, KEYS, transient=True)
    world.acquire(worker, namespace, KEYS, wait_ms=1_000)
    assert world.where(namespace, KEYS) == ["dram+ssd"] * 3, "it waits for its lease"
    first, second = (world.acquire(worker, namespace, KEYS).lease for _ in range(2))
    world.release(worker, first)
    assert world.where(namespace, KEYS) == ["dram+ssd"] * 3
    world.release(worker, second)
    assert world.where(namespace, KEYS) == ["ssd"] * 3
    assert world.fetch(worker, namespace, KEYS) == ["HIT"] * 3  # and it comes again, with its bytes
    assert world.where(namespace, KEYS) == ["ssd"] * 3


def test_a_reader_keeps_a_transient_chunk_whose_write_ends() -> None:
    world, worker, namespace = tiers()
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, KEYS, transient=True)
    lease = world.acquire(worker, namespace, KEYS).lease
    world.finish()
    assert world.where(namespace, KEYS) == ["dram+ssd"] * 3
    world.release(worker, lease)
    assert world.where(namespace, KEYS) == ["ssd"] * 3


def test_a_transient_chunk_is_an_ordinary_one_without_an_ssd() -> None:
    world, worker, namespace = start(Protection.SEALED)
    world.save(worker, namespace, KEYS, transient=True)
    world.release(worker, world.acquire(worker, namespace, KEYS).lease)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 3


@pytest.mark.parametrize("state", [DiskState.READ_ONLY, DiskState.OFF])
def test_a_transient_chunk_stays_while_the_ssd_is_not_well(state: DiskState) -> None:
    world, worker, namespace = tiers(probe_interval_ms=60_000)
    world.save(worker, namespace, KEYS, transient=True)
    world.acquire(worker, namespace, KEYS, wait_ms=1_000)
    lease = world.acquire(worker, namespace, KEYS).lease
    if state is DiskState.READ_ONLY:
        world.faults[ev.WriteRecords] = DiskResult.IO_ERROR
    else:
        world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("o", 1))
    world.tick(10_000)
    assert world.health() is state
    world.release(worker, lease)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 3
    world.faults.clear()
    world.settle()


def test_a_chunk_that_is_there_keeps_what_it_is() -> None:
    world, worker, namespace = tiers()
    world.save(worker, namespace, KEYS)
    world.reserve(worker, namespace, KEYS, transient=True)
    world.release(worker, world.acquire(worker, namespace, KEYS).lease)
    assert world.where(namespace, KEYS) == ["dram+ssd"] * 3
    other = chain("o", 1)
    world.save(worker, namespace, other, transient=True)
    world.ask(ev.Forget, worker, namespace, b"", other)
    world.save(worker, namespace, other)  # nothing of the first is left
    assert world.where(namespace, other) == ["dram+ssd"]


def test_a_restart_knows_which_chunks_are_transient() -> None:
    world, worker, namespace = tiers(durable_within_ms=0)
    world.save(worker, namespace, KEYS, transient=True)
    world.save(worker, namespace, chain("o", 1))
    world.settle()
    world.crash()
    worker = world.join()
    namespace = world.open(spec(), worker)
    assert world.fetch(worker, namespace, (*KEYS, *chain("o", 1))) == ["HIT"] * 4
    assert world.where(namespace, (*KEYS, *chain("o", 1))) == ["ssd"] * 3 + ["dram+ssd"]


def test_a_forgotten_transient_chunk_goes_with_its_lease() -> None:
    world, worker, namespace = tiers()
    world.save(worker, namespace, KEYS, transient=True)
    world.acquire(worker, namespace, KEYS, wait_ms=1_000)
    lease = world.acquire(worker, namespace, KEYS).lease
    world.ask(ev.Forget, worker, namespace, b"", KEYS)
    world.release(worker, lease)
    assert world.where(namespace, KEYS) == ["FORGOTTEN"] * 3
