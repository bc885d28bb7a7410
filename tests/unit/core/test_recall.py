"""Recall: what one maker made is a miss at once, everywhere, for good."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import recall
from kvstore.errors import DeadlineExceeded, Denied, StoreError, Unavailable
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import World, chain, spec
from kvstore.types import DiskResult, DiskState, NamespaceId, WorkerId

from .test_disk import small, start

SICK, WELL = b"S" * 16, b"W" * 16


def recalled(world: World, admin: WorkerId, maker: bytes = SICK, **named: Any) -> ev.Recalled:
    """The answer, when it comes."""
    request = world._next_request
    answer = world.ask(ev.Recall, admin, maker, **named)
    for _ in range(100):
        if answer is not None:
            break
        world.tick(100)
        answer = world.answers.get((admin, request))
    if isinstance(answer, StoreError):
        raise answer
    assert isinstance(answer, ev.Recalled), answer
    return answer


def made(world: World, worker: WorkerId, namespace: NamespaceId) -> None:
    world.save(worker, namespace, chain("good", 3), maker=WELL)
    world.save(worker, namespace, chain("bad", 4), maker=SICK)


def test_only_what_the_maker_made_goes() -> None:
    world, worker, namespace = start(durable_within_ms=0)
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.settle(100)
    done = recalled(world, admin)
    assert (done.chunks, done.pinned, done.bytes) == (4, 0, 4 * spec().chunk_bytes)
    assert world.outcomes(worker, namespace, chain("bad", 4)) == ["RECALLED"] * 4
    assert world.outcomes(worker, namespace, chain("good", 3)) == ["HIT"] * 3
    assert not [key for _, key in world.platter.chunks if key in chain("bad", 4)]
    assert recalled(world, admin).chunks == 0, "asked again"
    world.crash()
    assert world.where(namespace, chain("bad", 4)) == ["NEVER_SEEN"] * 4
    assert world.where(namespace, chain("good", 3)) == ["ssd"] * 3


def test_a_dry_run_changes_nothing() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    made(world, worker, namespace)
    assert recalled(world, admin, dry_run=True).chunks == 4
    assert world.outcomes(worker, namespace, chain("bad", 4)) == ["HIT"] * 4
    world.save(worker, namespace, chain("more", 1), maker=SICK)


def test_what_a_lease_pins_is_a_miss_at_once_and_goes_with_it() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    made(world, worker, namespace)
    lease = world.acquire(worker, namespace, chain("bad", 2))
    extent = lease.extents[0]
    done = recalled(world, admin)
    assert (done.chunks, done.pinned) == (4, 2)
    assert world.outcomes(worker, namespace, chain("bad", 2)) == ["RECALLED"] * 2
    assert world.load(worker, extent) == extent.checksum, "who reads it reads on"
    world.release(worker, lease.lease)
    assert world.load(worker, extent) is None
    assert world.slots()["ready"] == 3


def test_it_is_answered_only_when_no_restart_brings_it_back() -> None:
    world, worker, namespace = start(durable_within_ms=4_000)
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.settle(4_000)
    assert len(world.platter.chunks) == 7
    world.hold = {ev.WriteIndex}
    request = world._next_request
    assert world.ask(ev.Recall, admin, SICK) is None
    assert world.outcomes(worker, namespace, chain("bad", 1)) == ["RECALLED"]
    assert world.of(ev.WriteIndex), "and nobody waits for a batch to fill"
    world.tick(100)
    assert (admin, request) not in world.answers
    world.finish()
    assert isinstance(world.answers[admin, request], ev.Recalled)
    assert len(world.platter.chunks) == 3


def test_a_transaction_that_was_under_way_does_not_count() -> None:
    world, worker, namespace = start(durable_within_ms=0)
    admin = world.join(admin=True)
    world.hold = {ev.WriteIndex}
    made(world, worker, namespace)
    world.tick(1)
    (old,) = world.of(ev.WriteIndex)
    request = world._next_request
    world.ask(ev.Recall, admin, SICK)
    world.finish(old)  # writes rows of chunks that are recalled
    assert (admin, request) not in world.answers
    while world.held:
        world.finish()
    assert isinstance(world.answers[admin, request], ev.Recalled)
    assert {key for _, key in world.platter.chunks} == set(chain("good", 3))


def test_chunks_on_their_way_go_too() -> None:
    """Being saved, being written to SSD, being read from there."""
    world, worker, namespace = small(durable_within_ms=0)
    admin = world.join(admin=True)
    world.save(worker, namespace, chain("bad", 4), maker=SICK)
    for number in range(2):
        world.save(worker, namespace, chain(f"other {number}", 4), maker=WELL)
    world.settle(100)
    world.hold = {ev.ReadRecords, ev.WriteRecords, ev.CopyIn}
    world.acquire(worker, namespace, chain("bad", 1), wait_ms=1_000)
    reserved = world.reserve(worker, namespace, chain("late", 1), maker=SICK)
    open_still = world.reserve(worker, namespace, chain("later", 1), maker=SICK)
    assert reserved.reservation and open_still.reservation
    world.commit(worker, reserved)
    world.ask(ev.Recall, admin, SICK)
    world.hold = set()
    while world.held:
        world.finish()
    world.commit(worker, open_still)
    world.settle(200)
    keys = (*chain("bad", 4), *chain("late", 1), *chain("later", 1))
    assert set(world.outcomes(worker, namespace, keys)) == {"RECALLED"}
    assert not {key for _, key in world.platter.chunks} & set(keys)


def test_the_maker_gets_no_reservation_any_more() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    made(world, worker, namespace)
    recalled(world, admin)
    with pytest.raises(Denied, match="recalled"):
        world.reserve(worker, namespace, chain("bad", 1), maker=SICK)
    world.save(worker, namespace, chain("bad", 1), maker=WELL)
    assert world.outcomes(worker, namespace, chain("bad", 1)) == ["HIT"]
    assert recalled(world, admin).chunks == 0, "what somebody else made since is not meant"


def test_a_chunk_of_several_ranks_goes_with_any_of_them() -> None:
    """Also after a restart, when only the index knows who they were."""
    ranks = [b"%d" % rank * 16 for rank in range(3)]
    for restarted in (False, True):
        for sick in (0, 2):
            world = DiskWorld(durable_within_ms=0, reserve_share_max=1.0)
            worker, admin = world.join(), world.join(admin=True)
            namespace = world.open(spec(shards=3), worker)
            for rank, maker in enumerate(ranks):
                world.save(worker, namespace, chain("all", 2), maker=maker, shards=(rank,))
            for rank in range(3):
                world.save(worker, namespace, chain("two", 1), maker=ranks[1], shards=(rank,))
            world.settle(100)
            (history,) = world.ask(ev.Explain, admin, namespace, b"", chain("all", 1)).chunks
            assert history.maker == b"".join(ranks)
            if restarted:
                world.crash()
                worker, admin = world.join(), world.join(admin=True)
                assert world.open(spec(shards=3), worker) == namespace
            assert recalled(world, admin, ranks[sick]).chunks == 2
            assert set(world.where(namespace, chain("all", 2))) == {"RECALLED"}
            assert world.where(namespace, chain("two", 1))[0].endswith("ssd")


def test_saved_anew_a_chunk_has_new_makers_only() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.ask(ev.Forget, worker, namespace, b"", chain("bad", 4))
    world.save(worker, namespace, chain("bad", 4), maker=WELL)
    assert recalled(world, admin).chunks == 0
    assert recalled(world, admin, WELL).chunks == 7


def test_only_what_was_made_since() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    world.now = 10_000
    world.save(worker, namespace, chain("old", 2), maker=SICK)
    world.now = 20_000
    world.save(worker, namespace, chain("new", 2), maker=SICK)
    assert recalled(world, admin, age_ms_max=5_000).chunks == 2
    assert world.outcomes(worker, namespace, chain("old", 2)) == ["HIT"] * 2
    assert world.outcomes(worker, namespace, chain("new", 2)) == ["RECALLED"] * 2
    world.settle(6_000)
    world.crash()
    admin = world.join(admin=True)
    world.now = 60_000
    assert recalled(world, admin, age_ms_max=1).chunks == 2, "of an earlier start nobody knows the time"


@pytest.mark.parametrize("shards", [1, 2])
def test_what_was_begun_before_and_committed_since_goes_too(shards: int) -> None:
    """Its bytes may have been computed at any time until the commit. Of two shards the other one is not there yet."""
    world = DiskWorld(durable_within_ms=0)
    admin, worker = world.join(admin=True), world.join()
    namespace = world.open(spec(shards=shards), worker)
    world.now = 10_000
    held = world.reserve(worker, namespace, chain("x", 1), shards=(0,), maker=SICK)
    world.now = 20_000
    world.commit(worker, held)
    assert recalled(world, admin, age_ms_max=5_000).chunks == (shards == 1)
    world.save(worker, namespace, chain("x", 1), shards=(shards - 1,), maker=WELL)
    assert world.outcomes(worker, namespace, chain("x", 1)) == (["HIT"] if shards == 1 else ["INCOMPLETE"])


def test_sessions_that_read_it_are_named() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.append(worker, namespace, b"both", (*chain("good", 2), *chain("bad", 2)))
    world.append(worker, namespace, b"well", chain("good", 3))
    for _ in range(2):
        done = recalled(world, admin)
        (session,) = done.sessions
        assert (session.session, session.namespace, session.entry, session.first_token) == (
            b"both",
            namespace,
            2,
            8,
        )
        assert session.tenant == "alice" and done.sessions_in_all == 1
    assert world.session(worker, namespace, b"both").usable == 2
    assert recalled(world, admin, sessions_max=0).sessions == ()


def test_much_goes_in_steps_and_none_of_it_is_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 2)
    monkeypatch.setattr(recall, "ROWS_PER_STEP_MAX", 3)
    world, worker, namespace = start(durable_within_ms=0)
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.save(worker, namespace, chain("more", 6), maker=SICK)
    request = world._next_request
    world.ask(ev.Recall, admin, SICK)
    assert world.store.state.counters["chunks_recalled"] < 10
    keys = (*chain("bad", 4), *chain("more", 6))
    assert set(world.outcomes(worker, namespace, keys)) == {"RECALLED"}
    assert world.acquire(worker, namespace, keys, prefix_only=False).lease == 0
    for _ in range(20):
        world.tick(100)
    answer = world.answers[admin, request]
    assert isinstance(answer, ev.Recalled) and answer.chunks == 10
    assert not world.store.state.recalling


@pytest.mark.parametrize("event", [ev.Tick(), ev.Idle()])
def test_several_go_on_one_step_after_the_other_also_when_nothing_waits(
    event: ev.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 2)
    world = World()
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    made(world, worker, namespace)
    world.save(worker, namespace, chain("other", 6), maker=b"also sick, it is")
    assert world.ask(ev.Recall, admin, SICK) is None
    assert world.ask(ev.Recall, admin, b"also sick, it is") is None
    dropped = [world.store.state.counters["chunks_recalled"]]
    for _ in range(3):
        assert world.store.has_ahead()
        world.step(event)
        dropped.append(world.store.state.counters["chunks_recalled"])
    assert dropped == [4, 6, 8, 10] and not world.store.has_ahead()
    assert [reply.answer.chunks for reply in world.replies[-2:]] == [4, 6]


def test_without_an_ssd_it_is_done_at_once() -> None:
    world = World()
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    made(world, worker, namespace)
    assert world.ask(ev.Recall, admin, SICK).chunks == 4


def sick_disk(fault: DiskResult) -> tuple[DiskWorld, WorkerId, NamespaceId, WorkerId]:
    world, worker, namespace = start(durable_within_ms=0)
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.settle(100)
    world.faults = {ev.WriteIndex: fault, ev.ProbeDisk: fault}
    return world, worker, namespace, admin


def test_a_disk_that_cannot_forget_is_told_of() -> None:
    world, worker, namespace, admin = sick_disk(DiskResult.IO_ERROR)
    with pytest.raises(Unavailable, match="a restart could bring them back"):
        recalled(world, admin)
    assert world.health() is DiskState.READ_ONLY
    assert world.outcomes(worker, namespace, chain("bad", 4)) == ["RECALLED"] * 4
    world.faults.clear()
    world.settle(5_000)
    assert recalled(world, admin).chunks == 0
    assert {key for _, key in world.platter.chunks} == set(chain("good", 3))


def test_an_index_that_is_late_is_told_of() -> None:
    world, worker, namespace = start(durable_within_ms=0, disk_deadline_ms=100_000)
    admin = world.join(admin=True)
    made(world, worker, namespace)
    world.settle(100)
    world.hold = {ev.WriteIndex}
    request = world._next_request
    world.ask(ev.Recall, admin, SICK)
    world.tick(recall.PATIENCE_MS)
    assert isinstance(world.answers[admin, request], DeadlineExceeded)
