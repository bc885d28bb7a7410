"""Save: Reserve and Commit in one request, of what stands in staging memory already."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.errors import BadRequest, Denied, NotFound, Precondition
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import World, chain, spec, tag
from kvstore.types import CommitResult, GrantResult, NamespaceId, Outcome, Protection, Wait, WorkerId

VISIBLE, WAITING, _ = CommitResult
GRANTED, COMMITTED = GrantResult.GRANTED, GrantResult.ALREADY


def world_of(**limits: object) -> tuple[World, WorkerId, NamespaceId]:
    world = World(**limits)
    worker = world.join()
    return world, worker, world.open(spec(), worker)


@pytest.mark.parametrize("count", [1, 3, 30])
def test_what_is_granted_becomes_visible_with_the_bytes_of_its_own_pieces(count: int) -> None:
    world, worker, namespace = world_of()
    keys = chain("k", count)
    world.hold = {ev.CopyIn}
    assert world.save_at_once(worker, namespace, keys) is None
    assert world.outcomes(worker, namespace, keys[:1]) == ["BEING_SAVED"]
    world.finish()
    assert world.acquire(worker, namespace, keys).outcomes == (Outcome.HIT,) * count


def test_of_what_is_not_granted_no_piece_is_read() -> None:
    world, worker, namespace = world_of()
    keys = chain("k", 5)
    world.save(worker, namespace, keys[1:2])
    other = world.reserve(world_and_open(world, namespace), namespace, keys[3:4])
    saved = world.save_at_once(worker, namespace, keys, variant=7)
    assert saved == ev.Saved((GRANTED, COMMITTED, GRANTED, GrantResult.BUSY, GRANTED), (VISIBLE,) * 3)
    for key, variant in ((keys[0], 7), (keys[1], 0), (keys[2], 7), (keys[4], 7)):
        shard = (namespace, key, 0)
        assert world.committed[shard] == tag(shard, variant), key
    assert other.reservation
    assert world.acquire(worker, namespace, keys).outcomes[:3] == (Outcome.HIT,) * 3


def world_and_open(world: World, namespace: NamespaceId) -> WorkerId:
    worker = world.join()
    assert world.open(spec(), worker) == namespace
    return worker


def test_each_shard_has_its_own_piece_and_a_rank_may_save_one() -> None:
    world = World()
    worker, rank = world.join("alice", "engine", 0), world.join("alice", "engine", 1)
    namespace = world.open(spec(shards=2), worker, rank)
    keys = chain("k", 3)
    saved = world.save_at_once(worker, namespace, keys, shards=(1, 0))
    assert saved is not None and saved.committed == (VISIBLE,) * 3
    more = chain("m", 3)
    assert world.save_at_once(rank, namespace, more, shards=(1,)).committed == (WAITING,) * 3  # type: ignore[union-attr]
    assert world.save_at_once(worker, namespace, more, shards=(0,)).committed == (VISIBLE,) * 3  # type: ignore[union-attr]
    assert world.acquire(worker, namespace, more).outcomes == (Outcome.HIT,) * 3


def test_asked_again_it_gets_the_first_answer_and_copies_once() -> None:
    world, worker, namespace = world_of()
    world.hold = {ev.CopyIn}
    keys = chain("k", 2)
    offsets = world.stage(worker, [(namespace, key, 0) for key in keys])

    def event(ticket: ev.Ticket) -> ev.Save:
        return ev.Save(ticket, ev.Reserve(ticket, namespace, keys), offsets)

    assert world.ask(event, worker, request_id=9) is None
    assert world.ask(event, worker, request_id=9) is None
    assert len(world.held) == 1
    world.finish()
    first = ev.Saved((GRANTED,) * 2, (VISIBLE,) * 2)
    assert [reply.answer for reply in world.replies if isinstance(reply.answer, ev.Saved)] == [first, first]
    assert world.ask(event, worker, request_id=9) == first
    assert not world.held
    assert world.ask(event, worker, request_id=10) == ev.Saved((COMMITTED,) * 2, ())


def test_a_copy_that_fails_leaves_nothing() -> None:
    world, worker, namespace = world_of()
    world.hold = {ev.CopyIn}
    keys = chain("k", 2)
    free = world.slots()
    world.save_at_once(worker, namespace, keys)
    world.finish(fails="no such staging memory")
    errors = [reply.answer for reply in world.replies if isinstance(reply.answer, Precondition)]
    assert len(errors) == 1 and "no such staging memory" in str(errors[0])
    assert world.outcomes(worker, namespace, keys) == ["NEVER_SEEN"] * 2
    assert world.slots()["reserved"] == 0 and free["reserved"] == 0
    world.hold = set()
    assert world.save_at_once(worker, namespace, keys) == ev.Saved((GRANTED,) * 2, (VISIBLE,) * 2)


def test_a_copy_that_misses_its_deadline_is_answered_and_its_slots_wait_for_it() -> None:
    world, worker, namespace = world_of()
    world.hold = {ev.CopyIn}
    world.save_at_once(worker, namespace, chain("k", 1))
    world.tick(10_001)
    assert any("deadline" in str(reply.answer) for reply in world.replies)
    assert world.slots()["quarantined"] == 1
    world.finish()
    assert world.slots()["quarantined"] == 0


def test_who_is_killed_meanwhile_has_saved_what_was_under_way() -> None:
    world, worker, namespace = world_of()
    reader = world_and_open(world, namespace)
    world.hold = {ev.CopyIn}
    keys = chain("k", 3)
    world.save_at_once(worker, namespace, keys)
    world.kill(worker)
    world.finish()
    assert world.outcomes(reader, namespace, keys) == ["HIT"] * 3


def test_what_is_wrong_with_it_is_said_before_anything_is_reserved() -> None:
    world, worker, namespace = world_of()
    keys = chain("k", 2)

    def ask(number: NamespaceId, offsets: tuple[int, ...], wait: Wait = Wait.VISIBLE) -> None:
        world.ask(lambda ticket: ev.Save(ticket, ev.Reserve(ticket, number, keys), offsets, wait), worker)

    with pytest.raises(BadRequest, match="staging_offsets"):
        ask(namespace, (0,))
    with pytest.raises(NotFound):
        ask(NamespaceId(99), (0, 4096))
    with pytest.raises(Precondition, match="no SSD tier"):
        ask(namespace, (0, 4096), Wait.DURABLE)
    assert world.slots()["reserved"] == 0
    assert world.outcomes(worker, namespace, keys) == ["NEVER_SEEN"] * 2


def test_in_place_nothing_can_be_written_before_it_is_granted() -> None:
    world, worker, namespace = world_of(protection=Protection.GROUP)
    with pytest.raises(BadRequest, match="in place"):
        world.save_at_once(worker, namespace, chain("k", 1))
    assert world.slots()["reserved"] == 0


def test_a_maker_that_was_recalled_saves_nothing() -> None:
    world, worker, namespace = world_of()
    maker = b"m" * 16
    admin = world.join("operator", admin=True)
    world.save_at_once(worker, namespace, chain("k", 1), maker=maker)
    assert world.ask(ev.Recall, admin, maker).chunks == 1
    with pytest.raises(Denied, match="recalled"):
        world.save_at_once(worker, namespace, chain("m", 1), maker=maker)


def test_durable_is_answered_when_the_index_has_it() -> None:
    world = DiskWorld()
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 3)
    world.hold = {ev.WriteIndex}
    assert world.save_at_once(worker, namespace, keys, wait=Wait.DURABLE) is None
    world.tick(6_000)
    assert world.held, "the index is not written yet"
    assert not [reply for reply in world.replies if isinstance(reply.answer, ev.Saved)]
    while world.held:
        world.finish()
    saved = [reply.answer for reply in world.replies if isinstance(reply.answer, ev.Saved)]
    assert saved == [ev.Saved((GRANTED,) * 3, (VISIBLE,) * 3)]
    assert {(namespace, key) for key in keys} <= world.promised
