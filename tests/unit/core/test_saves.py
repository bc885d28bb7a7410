"""Reserve, Commit, Abort: when a chunk becomes visible, who may write it, and what becomes of saves that end badly."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import saves
from kvstore.errors import BadRequest, Conflict, DeadlineExceeded, Denied, Exhausted, NotFound, Precondition
from kvstore.layout import GroupSpec
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, chain, spec, tag
from kvstore.types import ChunkKey, CommitResult, Outcome, Protection, ReservationId, StagedPiece, WorkerId

VISIBLE, WAITING, ALREADY = CommitResult
BOTH = pytest.mark.parametrize("protection", list(Protection))
GROUP = Protection.GROUP


def names(reserved: ev.Reserved) -> list[str]:
    return [result.name for result in reserved.results]


# ------------------------------------------------------------------------------------------------------- visibility


@BOTH
def test_a_chunk_is_visible_once_all_its_bytes_are_in(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 3)
    world.hold = {ev.CopyIn, ev.Checksum}
    reserved = world.reserve(worker, namespace, keys)
    assert names(reserved) == ["GRANTED"] * 3
    assert world.outcomes(worker, namespace, keys) == ["BEING_SAVED"] * 3
    assert world.commit(worker, reserved) is None
    assert world.outcomes(worker, namespace, keys) == ["BEING_SAVED"] * 3
    world.finish()
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 3
    assert world.acquire(worker, namespace, keys).outcomes == (Outcome.HIT,) * 3


@BOTH
def test_what_the_daemon_itself_has_written_is_not_copied_again(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 3)
    world.hold = {ev.CopyIn, ev.Checksum}
    reserved = world.reserve(worker, namespace, keys)
    written = [tag(shard, 0) for shard in world.savings[reserved.reservation].shards]
    for extent, what in zip(reserved.extents, written, strict=True):
        world._write(extent, what, by=worker if protection is GROUP else None)
    world._meant[reserved.reservation] = tuple(written)
    committed = world.ask(ev.Commit, worker, reserved.reservation, checksums=tuple(written))
    assert committed.results == (VISIBLE,) * 3
    assert not world.held
    assert (
        world.acquire(worker, namespace, keys).outcomes == (Outcome.HIT,) * 3
    )  # compares bytes and checksums


def test_the_checksums_that_a_worker_tells_of_what_it_wrote_in_place_are_taken() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.Checksum}
    reserved = world.reserve(worker, namespace, chain("k", 3))
    world.write(reserved)
    world._let_go(reserved.reservation)
    sums = tuple(tag(shard, 0) for shard in world.savings[reserved.reservation].shards)
    committed = world.ask(ev.Commit, worker, reserved.reservation, told=sums)
    assert committed.results == (VISIBLE,) * 3
    assert not world.held
    assert world.acquire(worker, namespace, chain("k", 3)).outcomes == (Outcome.HIT,) * 3  # compares them


def test_what_the_daemon_has_read_itself_counts_more_than_what_a_worker_tells() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 3))
    staged = world.write(reserved)
    world.fill_part(worker, reserved, (0, 2), staged)
    sums = [tag(shard, 0) for shard in world.savings[reserved.reservation].shards]
    assert world.ask(ev.Commit, worker, reserved.reservation, told=(1, sums[1], 1)).results == (VISIBLE,) * 3
    assert world.acquire(worker, namespace, chain("k", 3)).outcomes == (Outcome.HIT,) * 3


def test_what_it_is_still_reading_then_does_too() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 3))
    staged = world.write(reserved)
    world.hold = {ev.Checksum}
    world.fill_part(worker, reserved, (0, 2), staged)
    sums = [tag(shard, 0) for shard in world.savings[reserved.reservation].shards]
    world._let_go(reserved.reservation)
    assert world.ask(ev.Commit, worker, reserved.reservation, told=(1, sums[1], 1)) is None
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["BEING_SAVED"] * 3
    world.finish()
    assert world.acquire(worker, namespace, chain("k", 3)).outcomes == (Outcome.HIT,) * 3


def test_a_commit_that_is_refused_has_told_nothing() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 3))
    with pytest.raises(BadRequest, match="staging_offsets"):
        world.ask(ev.Commit, worker, reserved.reservation, (StagedPiece(0, 0),) * 3, told=(1, 1, 1))
    assert world.commit(worker, reserved)
    assert world.acquire(worker, namespace, chain("k", 3)).outcomes == (Outcome.HIT,) * 3


@BOTH
def test_who_has_no_shared_memory_reserves_nothing(protection: Protection) -> None:
    """It could commit whatever the slots hold, and what expires would stay reserved for ever."""
    world = World(protection=protection)
    worker, caller = world.join(), WorkerId(-2)
    world.groups[caller] = ("alice", "over TCP")
    world.mapped[caller] = set()
    world.step(ev.WorkerJoined(caller, "alice", "", remote=True))
    namespace = world.open(spec(), worker, caller)
    with pytest.raises(Denied, match=r"share memory.*Bytes\.Put"):
        world.ask(ev.Reserve, caller, namespace, chain("k", 3))
    assert names(world.reserve(worker, namespace, chain("k", 3))) == ["GRANTED"] * 3
    assert world.ask(ev.Match, caller, namespace, chain("k", 3)).usable == 0


@BOTH
def test_checksums_that_nobody_can_have_are_refused(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 3))
    why = "sealed" if protection is not GROUP else "one for each of the 3 granted shards"
    with pytest.raises(BadRequest, match=why):
        world.ask(ev.Commit, worker, reserved.reservation, told=(1,) * (3 if protection is not GROUP else 2))
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["BEING_SAVED"] * 3
    assert world.commit(worker, reserved)


@BOTH
def test_nor_is_it_seen_when_the_reservation_has_ended(protection: Protection) -> None:
    world = World(protection=protection, reservation_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 1))
    world.tick(1_000)
    with pytest.raises(Precondition, match="expired"):
        world.ask(ev.Commit, worker, reserved.reservation, checksums=(1,))
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["NEVER_SEEN"]


def test_a_chunk_is_visible_only_when_every_shard_is_there() -> None:
    world = World()
    ranks = [world.join(group="engine", rank=rank) for rank in range(3)]
    namespace = world.open(spec(shards=3), *ranks)
    keys = chain("k", 2)
    assert world.save(ranks[0], namespace, keys, shards=(0,)).results == (WAITING,) * 2
    assert world.save(ranks[2], namespace, keys, shards=(2,)).results == (WAITING,) * 2
    assert world.outcomes(ranks[1], namespace, keys) == ["INCOMPLETE"] * 2
    assert world.acquire(ranks[0], namespace, keys).lease == 0
    assert world.save(ranks[1], namespace, keys[:1], shards=(1,)).results == (VISIBLE,)
    assert world.outcomes(ranks[1], namespace, keys) == ["HIT", "INCOMPLETE"]
    assert len(world.acquire(ranks[1], namespace, keys).extents) == 3


def test_groups_of_one_chunk_are_shards_of_one_chunk() -> None:
    world = World()
    worker = world.join()
    groups = (GroupSpec("full", PAGE, shard_count=2), GroupSpec("latent", 3 * PAGE + 1))
    namespace = world.open(spec(groups=groups), worker)
    world.save(worker, namespace, chain("k", 2), shards=(0, 1))
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["INCOMPLETE"] * 2
    world.save(worker, namespace, chain("k", 2), shards=(2,))
    acquired = world.acquire(worker, namespace, chain("k", 2), shards=(2, 0))
    assert [extent.length for extent in acquired.extents] == [3 * PAGE + 1, PAGE] * 2


def test_a_chunk_whose_second_rank_never_commits_is_dropped_as_incomplete() -> None:
    world = World(incomplete_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    keys = chain("k", 2)
    world.save(worker, namespace, keys, shards=(0,))
    world.tick(999)
    assert world.slots()["ready"] == 2
    world.tick(1)
    assert world.outcomes(worker, namespace, keys) == ["INCOMPLETE"] * 2
    assert world.slots()["ready"] == 0
    # It is no worse off than a new one.
    world.save(worker, namespace, keys)
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 2


def test_a_shard_that_is_being_written_keeps_an_incomplete_chunk() -> None:
    world = World(incomplete_ttl_ms=1_000, reservation_ttl_ms=5_000)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 1), shards=(0,))
    reserved = world.reserve(worker, namespace, chain("k", 1), shards=(1,))
    world.tick(1_500)
    committed = world.commit(worker, reserved)
    assert committed is not None and committed.results == (VISIBLE,)


def test_the_time_of_an_incomplete_chunk_runs_from_its_last_beginning() -> None:
    world = World(incomplete_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.abort(worker, world.reserve(worker, namespace, chain("k", 1), shards=(0,)))
    world.tick(900)
    world.save(worker, namespace, chain("k", 1), shards=(0,))
    world.tick(900)
    assert world.slots()["ready"] == 1, "dropped after the time of its first, aborted beginning"
    world.tick(100)
    assert world.slots()["ready"] == 0


# ------------------------------------------------------------------------------------------------------- write-once


def test_committed_bytes_are_never_written_again() -> None:
    world = World()
    one, other = world.join(), world.join()
    namespace = world.open(spec(), one, other)
    world.save(one, namespace, chain("k", 2))
    reserved = world.reserve(other, namespace, chain("k", 3))
    assert names(reserved) == ["ALREADY", "ALREADY", "GRANTED"]
    world.commit(other, reserved, variant=1)
    world.acquire(other, namespace, chain("k", 3))  # compares with what was committed first


def test_what_another_worker_writes_is_busy() -> None:
    world = World()
    one, other = world.join(), world.join()
    namespace = world.open(spec(shards=2), one, other)
    world.reserve(one, namespace, chain("k", 1), shards=(0,))
    assert names(world.reserve(other, namespace, chain("k", 1))) == ["BUSY"]
    assert names(world.reserve(other, namespace, chain("k", 1), shards=(0,))) == ["BUSY"]
    assert names(world.reserve(other, namespace, chain("k", 1), shards=(1,))) == ["GRANTED"]


def test_a_chunk_of_which_one_shard_is_there_is_not_said_to_be_saved() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 1), shards=(0,))
    assert names(world.reserve(worker, namespace, chain("k", 1), shards=(0,))) == ["ALREADY"]
    assert names(world.reserve(worker, namespace, chain("k", 1))) == ["BUSY"]
    assert names(world.reserve(worker, namespace, chain("k", 1), shards=(1,))) == ["GRANTED"]


def test_a_key_twice_in_one_request_is_granted_once() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    assert names(world.reserve(worker, namespace, chain("k", 1) * 3)) == ["GRANTED", "BUSY", "BUSY"]


def test_first_copy_wins_and_the_late_commit_is_a_success() -> None:
    world = World(reservation_ttl_ms=1_000)
    slow, fast = world.join(), world.join()
    namespace = world.open(spec(), slow, fast)
    keys = chain("k", 2)
    reserved = world.reserve(slow, namespace, keys)
    world.tick(1_000)
    world.save(fast, namespace, keys)
    committed = world.commit(slow, reserved, variant=1)
    assert committed is not None and committed.results == (CommitResult.ALREADY,) * 2
    world.acquire(slow, namespace, keys)


def test_a_late_commit_of_which_others_saved_only_a_part_is_no_success() -> None:
    world = World(reservation_ttl_ms=1_000)
    slow, fast = world.join(), world.join()
    namespace = world.open(spec(), slow, fast)
    reserved = world.reserve(slow, namespace, chain("k", 2))
    world.tick(1_000)
    world.save(fast, namespace, chain("k", 1))
    with pytest.raises(Precondition, match="expired"):
        world.commit(slow, reserved)


@pytest.mark.parametrize("noticed_by", ["tick", "commit"])
def test_a_commit_after_the_expiry_is_refused(noticed_by: str) -> None:
    world = World(reservation_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    world.now += 1_000
    if noticed_by == "tick":
        world.tick()
    with pytest.raises(Precondition, match=r"was expired.*reserve again") as error:
        world.commit(worker, reserved)
    assert (error.value.field, error.value.value) == ("reservation_id", str(reserved.reservation))
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["NEVER_SEEN"] * 2
    assert world.slots()["reserved"] == world.slots()["quarantined"] == 0


def test_a_commit_just_before_the_expiry_is_in_time() -> None:
    world = World(reservation_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    world.tick(999)
    assert world.commit(worker, reserved) is not None


def test_an_aborted_reservation_cannot_be_committed() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    assert world.abort(worker, reserved) == 1
    assert world.abort(worker, reserved) == 0
    with pytest.raises(Precondition, match="was aborted"):
        world.commit(worker, reserved)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["NEVER_SEEN"] * 2


def test_a_commit_of_nothing_known_is_refused() -> None:
    world = World()
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    reserved = world.reserve(other, namespace, chain("k", 1))
    for unknown in (ReservationId(99), reserved.reservation):
        with pytest.raises(NotFound, match="no such reservation of this worker"):
            world.ask(ev.Commit, worker, unknown)
    assert world.ask(ev.Abort, worker, (reserved.reservation,)).count == 0
    assert world.commit(other, reserved) is not None


def test_a_commit_repeated_after_its_answer_was_lost_is_a_success() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    world.commit(worker, reserved)
    again = world.commit(worker, reserved)
    assert again is not None and again.results == (CommitResult.ALREADY,) * 2


def test_a_committed_reservation_is_not_said_to_be_lost() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    reserved = world.reserve(worker, namespace, chain("k", 1), shards=(0,))
    world.commit(worker, reserved)
    with pytest.raises(Precondition, match="was committed") as error:
        world.commit(worker, reserved)
    assert "lost" not in str(error.value)


# -------------------------------------------------------------------------------------------------- all or nothing


def test_a_key_gets_all_its_shards_or_none() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(shards=2), worker, other)
    world.reserve(other, namespace, chain("held", 1), shards=(0,))
    reserved = world.reserve(worker, namespace, chain("k", 2))
    assert names(reserved) == ["GRANTED", "FULL"]
    assert world.slots() == {"capacity": 4, "free": 1, "reserved": 3, "ready": 0, "quarantined": 0}
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["BEING_SAVED", "NEVER_SEEN"]


@BOTH
def test_a_failed_copy_commits_nothing(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.hold = {ev.CopyIn, ev.Checksum}
    reserved = world.reserve(worker, namespace, chain("k", 3))
    request = world._next_request
    world.commit(worker, reserved)
    world.finish(fails="staging is gone")
    answer = world.answers[worker, request]
    assert isinstance(answer, Precondition) and "staging is gone" in str(answer)
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["NEVER_SEEN"] * 3
    assert world.slots()["free"] == world.slots()["capacity"]


def test_a_commit_that_is_under_way_cannot_be_committed_or_aborted() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn}
    reserved = world.reserve(worker, namespace, chain("k", 1))
    world.commit(worker, reserved)
    with pytest.raises(Conflict, match="is being committed already"):
        world.commit(worker, reserved)
    assert world.abort(worker, reserved) == 0
    world.finish()
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]


def test_a_commit_outlives_its_reservation_and_its_worker() -> None:
    world = World(reservation_ttl_ms=1_000)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.hold = {ev.CopyIn}
    reserved = world.reserve(worker, namespace, chain("k", 1))
    world.commit(worker, reserved)
    world.tick(2_000)
    world.kill(worker)
    world.finish()
    assert world.outcomes(other, namespace, chain("k", 1)) == ["HIT"]


# ----------------------------------------------------------------------------------------------- late, expired, dead


@BOTH
def test_the_slots_of_a_late_copy_are_quarantined_until_it_returns(protection: Protection) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn, ev.Checksum}
    reserved = world.reserve(worker, namespace, chain("k", 2))
    request = world._next_request
    world.commit(worker, reserved)
    world.tick(saves.COPY_DEADLINE_MS)
    answer = world.answers[worker, request]
    assert isinstance(answer, DeadlineExceeded) and answer.field == "reservation_id"
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["NEVER_SEEN"] * 2
    assert (world.slots()["quarantined"], world.slots()["reserved"]) == (2, 0)
    # The same keys can be saved meanwhile, and the copy that returns late harms nothing.
    late = world.held[0]
    world.hold = set()
    world.save(worker, namespace, chain("k", 2), variant=1)
    world.finish(late)
    assert world.slots()["quarantined"] == 0
    world.acquire(worker, namespace, chain("k", 2))


def test_a_late_copy_that_fails_gives_its_slots_back_too() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn}
    world.commit(worker, world.reserve(worker, namespace, chain("k", 2)))
    world.tick(saves.COPY_DEADLINE_MS)
    world.finish(fails="at last")
    assert world.slots()["free"] == world.slots()["capacity"]


def test_an_expired_reservation_in_place_is_quarantined_until_its_owner_dies() -> None:
    world = World(protection=GROUP, reservation_ttl_ms=1_000)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.map(worker, sorted(world.memory))
    reserved = world.reserve(worker, namespace, chain("k", 3))
    world.map(worker, [extent.segment for extent in reserved.extents])
    world.tick(1_000)
    assert world.slots()["quarantined"] == 3
    world.write(reserved, variant=1)  # SIGSTOPped past its time, then continued
    for number in range(20):
        world.save(
            other, namespace, chain(f"n{number}", 16)
        )  # the world checks that none of them lands there
    world.kill(worker)
    assert world.slots()["quarantined"] == 0


def test_an_owner_that_aborts_an_expired_reservation_in_time_needs_no_quarantine() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.abort(worker, world.reserve(worker, namespace, chain("k", 3)))
    assert world.slots()["quarantined"] == 0


def test_staged_bytes_of_an_expired_reservation_need_no_quarantine() -> None:
    world = World(reservation_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.reserve(worker, namespace, chain("k", 3))
    world.tick(1_000)
    assert world.slots()["free"] == world.slots()["capacity"]


@BOTH
def test_what_a_dead_worker_had_reserved_is_free_at_once(protection: Protection) -> None:
    world = World(protection=protection)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.reserve(worker, namespace, chain("k", 3))
    world.kill(worker)
    assert world.slots()["free"] == world.slots()["capacity"]
    assert names(world.reserve(other, namespace, chain("k", 3))) == ["GRANTED"] * 3


def test_a_forgotten_chunk_that_is_being_saved_never_becomes_visible() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn}
    reserved = world.reserve(worker, namespace, chain("k", 1))
    world.commit(worker, reserved)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["FORGOTTEN"]
    assert names(world.reserve(worker, namespace, chain("k", 1))) == ["BUSY"]
    world.finish()
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["FORGOTTEN"]
    assert world.slots()["free"] == world.slots()["capacity"]


# ------------------------------------------------------------------------------------------------ what a chunk is


def test_shards_of_one_chunk_must_agree_on_what_it_is() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 2), shards=(0,))
    with pytest.raises(BadRequest, match="has 4 tokens") as error:
        world.reserve(worker, namespace, chain("k", 2), shards=(1,), token_counts=(CHUNK_TOKENS, 3))
    assert error.value.field == "token_counts"
    with pytest.raises(BadRequest, match="exact") as error:
        world.reserve(worker, namespace, chain("k", 2), shards=(1,), derived=True)
    assert error.value.field == "derived"
    assert world.slots()["reserved"] == 0, "a refused request changes nothing"


@pytest.mark.parametrize("derived", [False, True])
def test_a_chunk_comes_back_as_what_it_was(derived: bool) -> None:
    """Derived for ever (invariant 2), also when the bytes were gone in between."""
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1), derived=derived)
    world.append(worker, namespace, b"s", chain("k", 1), approximate=derived)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 1))
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["FORGOTTEN"]
    with pytest.raises(BadRequest, match="derived"):
        world.reserve(worker, namespace, chain("k", 1), derived=not derived)
    with pytest.raises(BadRequest, match="has 4 tokens"):
        world.reserve(worker, namespace, chain("k", 1), derived=derived, token_counts=(1,))
    world.save(worker, namespace, chain("k", 1), derived=derived)
    (history,) = world.ask(ev.Explain, worker, namespace, b"", chain("k", 1)).chunks
    assert (history.derived, history.token_count) == (derived, CHUNK_TOKENS)


def test_an_aborted_save_binds_nobody_to_what_it_said() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.abort(worker, world.reserve(worker, namespace, chain("k", 1), token_counts=(2,), derived=True))
    world.save(worker, namespace, chain("k", 1))
    (history,) = world.ask(ev.Explain, worker, namespace, b"", chain("k", 1)).chunks
    assert (history.derived, history.token_count) == (False, CHUNK_TOKENS)


def test_a_chunk_remembers_its_maker() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("a", 1), maker=b"m" * 16)
    world.save(worker, namespace, chain("b", 1))
    found = world.ask(ev.Explain, worker, namespace, b"", chain("a", 1) + chain("b", 1)).chunks
    assert [history.maker for history in found] == [b"m" * 16, b""]


# ---------------------------------------------------------------------------------------------------------- quotas


def test_a_worker_reserves_at_most_its_share() -> None:
    world = World(reserve_share_max=0.25)  # of 128 pages
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    first = world.reserve(worker, namespace, chain("k", 40))
    assert names(first) == ["GRANTED"] * 32 + ["QUOTA"] * 8
    assert names(world.reserve(other, namespace, chain("o", 1))) == ["GRANTED"]
    world.commit(worker, first)
    assert names(world.reserve(worker, namespace, chain("k", 40))) == ["ALREADY"] * 32 + ["GRANTED"] * 8


def test_aborted_and_expired_reservations_are_given_back_to_the_quota() -> None:
    world = World(reserve_share_max=0.25, reservation_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.abort(worker, world.reserve(worker, namespace, chain("a", 32)))
    world.reserve(worker, namespace, chain("b", 32))
    assert names(world.reserve(worker, namespace, chain("c", 1))) == ["QUOTA"]
    world.tick(1_000)
    assert names(world.reserve(worker, namespace, chain("c", 1))) == ["GRANTED"]


def test_reservations_of_a_worker_are_bounded() -> None:
    world = World(reservations_per_worker_max=2)
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    first = world.reserve(worker, namespace, chain("a", 1))
    world.reserve(worker, namespace, chain("b", 1))
    with pytest.raises(Exhausted, match=r"too many open reservations.*commit or abort"):
        world.reserve(worker, namespace, chain("c", 1))
    assert world.reserve(other, namespace, chain("c", 1)).reservation
    world.commit(worker, first)
    assert world.reserve(worker, namespace, chain("d", 1)).reservation


def test_time_to_live_is_what_was_asked_but_at_most_the_bound() -> None:
    world = World(reservation_ttl_ms=1_000, reservation_ttl_max_ms=5_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    asked = [(0, 1_000), (10, 10), (1 << 40, 5_000)]
    for number, (wanted, granted) in enumerate(asked):
        reserved = world.reserve(worker, namespace, chain(f"{number}", 1), ttl_ms=wanted)
        assert reserved.ttl_ms == granted


def test_reasons_why_old_reservations_ended_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "ENDED_REMEMBERED_MAX", 3)
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    ended = []
    for _ in range(4):
        ended.append(world.reserve(worker, namespace, chain("k", 1)))
        world.abort(worker, ended[-1])
    with pytest.raises(NotFound):
        world.commit(worker, ended[0])
    with pytest.raises(Precondition, match="was aborted"):
        world.commit(worker, ended[1])


def test_keys_of_ended_reservations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "ENDED_KEYS_MAX", 8)
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    ended = []
    for number in range(4):
        ended.append(world.reserve(worker, namespace, chain(f"{number}", 4)))
        world.commit(worker, ended[-1])
    for reserved in ended[:2]:
        with pytest.raises(NotFound):
            world.commit(worker, reserved)
    for reserved in ended[2:]:
        assert world.commit(worker, reserved) == ev.Committed((CommitResult.ALREADY,) * 4)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("request_", "field", "value", "message"),
    [
        ({"parents": (ChunkKey(b"p"),)}, "parents", "1", "one entry per key"),
        ({"token_counts": (4,)}, "token_counts", "1", "one entry per key"),
        ({"token_counts": (4, 0)}, "token_counts", "0", "between 1 and chunk_tokens=4"),
        ({"token_counts": (5, 4)}, "token_counts", "5", "between 1 and chunk_tokens=4"),
        ({"shards": (2,)}, "shards", "2", "shards 0 to 1"),
        ({"shards": (-1,)}, "shards", "-1", "shards 0 to 1"),
        ({"shards": (1, 1)}, "shards", "(1, 1)", "twice"),
    ],
)
def test_a_bad_reserve_is_refused_and_changes_nothing(
    request_: dict[str, object], field: str, value: str, message: str
) -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    with pytest.raises(BadRequest, match=message) as error:
        world.reserve(worker, namespace, chain("k", 2), **request_)
    assert (error.value.field, error.value.value) == (field, value)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["NEVER_SEEN"] * 2


def test_a_commit_names_one_piece_of_the_right_length_for_each_shard() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    pieces = world.write(reserved)
    for staged in ((), pieces[:1], pieces * 2):
        with pytest.raises(BadRequest, match="one piece of staging memory for each of the 2") as error:
            world.ask(ev.Commit, worker, reserved.reservation, staged)
        assert (error.value.field, error.value.value) == ("staging_offsets", str(len(staged)))
    wrong = (pieces[0], StagedPiece(pieces[1].offset, PAGE - 1))
    with pytest.raises(BadRequest, match="4096 bytes") as error:
        world.ask(ev.Commit, worker, reserved.reservation, wrong)
    assert error.value.value == str(PAGE - 1)
    assert world.commit(worker, reserved) is not None


def test_a_commit_in_place_names_no_staging_memory() -> None:
    world = World(protection=GROUP)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 1))
    with pytest.raises(BadRequest, match="must be empty: under protection group") as error:
        world.ask(ev.Commit, worker, reserved.reservation, (StagedPiece(0, 0),))
    assert error.value.field == "staging_offsets"
    assert world.commit(worker, reserved) is not None
