"""What was forgotten stays so whatever happens next, and an index that is full lets somebody give way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import sessions
from kvstore.core.ssd import durability
from kvstore.errors import Exhausted
from kvstore.sim.disk import CHUNK_ROW_BYTES, ENTRY_BYTES, NAMESPACE_ROW_BYTES, SESSION_ROW_BYTES, DiskWorld
from kvstore.sim.world import chain, spec
from kvstore.types import DiskResult, DiskState, NamespaceId, Reason, WorkerId

from .test_disk import cold, small, start
from .test_recall import SICK, recalled

SESSION = SESSION_ROW_BYTES + ENTRY_BYTES


def answer(world: DiskWorld, kind: type, worker: WorkerId, *args: Any, ms: int = 5_000, **named: Any) -> Any:
    """The answer of a request, when it comes."""
    request = world._next_request
    found = world.ask(kind, worker, *args, **named)
    until = world.now + ms
    while found is None and world.now < until:
        world.tick(10)
        found = world.answers.get((worker, request))
    return found


def full(*, chunks: int = 0, sessions: int = 0, **limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """An index with room for so many rows, and not one more."""
    room = NAMESPACE_ROW_BYTES + chunks * CHUNK_ROW_BYTES + sessions * SESSION
    return small(slabs=32, durable_within_ms=400, index_bytes=room, **limits)


def fill(
    world: DiskWorld, worker: WorkerId, namespace: NamespaceId, chunks: int, sessions: int, start: int = 0
) -> None:
    """Each session names the first chunk."""
    for number in range(start, start + chunks):
        world.save(worker, namespace, chain(f"chunk {number}", 1))
        world.tick(100)
    for number in range(start, start + sessions):
        world.append(worker, namespace, b"session %d" % number, chain("chunk 0", 1))
        world.tick(10)
    world.settle(2_000)


# ------------------------------------------------------------------------------------------- forgets that are durable


def kept(world: DiskWorld, namespace: NamespaceId) -> tuple[list[bytes], list[bytes]]:
    """Names of sessions and keys of chunks that a restart finds now."""
    world.crash(power=True)
    chunks = world.store.state.chunks
    return (
        [name for _, name in world.store.state.sessions.by_name],
        [
            key
            for key, row in world.store.state.namespaces[namespace].index.items()
            if chunks.shard0[row] >= 0
        ],
    )


@pytest.mark.parametrize("how", ["session", "keys", "recall"])
@pytest.mark.parametrize("state", ["full", "writes fail", "no sync"])
def test_what_was_answered_as_forgotten_is_gone_after_a_crash(how: str, state: str) -> None:
    world, worker, namespace = full(chunks=8, sessions=2)
    admin = world.join(admin=True)
    for number in range(8):
        world.save(worker, namespace, chain(f"chunk {number}", 1), maker=SICK if number == 3 else b"W" * 16)
    world.append(worker, namespace, b"other", chain("chunk 0", 1))
    world.append(worker, namespace, b"secret", chain("chunk 3", 1))
    world.settle(1_000)
    assert len(world.platter.chunks) == 8 and len(world.platter.sessions) == 2
    if state == "full":  # whatever is written finds no room, for good
        world.platter.index_bytes = 0
    elif state == "writes fail":
        world.faults = {ev.WriteRecords: DiskResult.NO_SPACE, ev.ProbeDisk: DiskResult.IO_ERROR}
    else:
        world.failing_syncs = True
    world.save(worker, namespace, chain("new", 1))
    if state != "full":
        world.tick(10)
    if how == "session":
        done = answer(world, ev.Forget, worker, namespace, b"secret")
    elif how == "keys":
        done = answer(world, ev.Forget, worker, namespace, b"", chain("chunk 3", 1))
    else:
        assert recalled(world, admin).chunks == 1
        done = ev.Done(1)
    assert isinstance(done, ev.Done) and done.count and not done.not_durable
    sessions, chunks = kept(world, namespace)
    assert chain("chunk 3", 1)[0] not in chunks
    assert how != "session" or b"secret" not in sessions


def test_a_forget_of_what_is_being_written_to_the_index_waits_for_the_next_transaction() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 1))
    world.append(worker, namespace, b"s", chain("k", 1))
    world.hold = {ev.WriteIndex}
    world.tick(400)
    assert world.of(ev.WriteIndex)[0].sessions
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    world.finish()
    assert world.platter.sessions, "what was under way came in between"
    world.finish()
    assert not world.platter.sessions and not world.platter.chunks
    assert list(world.answers.values())[-1] == ev.Done(2)


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_a_forget_that_is_not_durable_says_so_is_remembered_and_is_carried_out_later(trouble: str) -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 1))
    world.append(worker, namespace, b"s", chain("k", 1))
    world.settle(1_000)
    if trouble == "hangs":
        world.hold = {ev.WriteIndex, ev.ProbeDisk}
    else:
        world.faults = {ev.WriteIndex: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
    done = answer(world, ev.Forget, worker, namespace, b"s")
    assert done.count == 2 and "remembered" in done.not_durable
    again = answer(world, ev.Forget, worker, namespace, b"s")
    assert again.count == 0 and again.not_durable, "asked again, it is not said to be done"
    assert world.platter.sessions
    world.hold, world.faults = set(), {}
    world.settle(5_000)
    assert not world.platter.sessions and not world.platter.chunks
    assert answer(world, ev.Forget, worker, namespace, b"s") == ev.Done(0)


def test_a_deletion_that_failed_is_as_old_as_it_was_whatever_is_forgotten_again_meanwhile() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    keys = (*chain("k", 1), *chain("l", 1))
    for key in keys:
        world.save(worker, namespace, (key,))
    world.settle(1_000)
    world.hold = {ev.WriteIndex, ev.ProbeDisk}
    assert world.ask(ev.Forget, worker, namespace, b"", keys) is None
    assert world.of(ev.WriteIndex)[0].chunks_deleted == tuple((namespace, key) for key in keys)
    world.tick(10)
    world.save(worker, namespace, keys[:1])
    world.tick(10)
    assert world.ask(ev.Forget, worker, namespace, b"", keys[:1]) is None
    world.faults = {ev.WriteIndex: DiskResult.IO_ERROR}
    world.finish()
    done = [reply.answer for reply in world.replies if isinstance(reply.answer, ev.Done)]
    assert done[-2].not_durable and done[-1].not_durable and len(world.platter.chunks) == 2


def test_a_session_that_is_still_being_forgotten_is_not_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record is the last to go: who asks in between for the same name waits for it too."""
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 2)
    world, worker, namespace = start(durable_within_ms=400)
    keys = chain("k", 9)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    world.settle(1_000)
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    world.save(worker, namespace, chain("j", 1))
    world.append(worker, namespace, b"s", chain("j", 1))
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    assert (namespace, b"s") in world.platter.sessions
    assert answer(world, ev.Forget, worker, namespace, b"another") == ev.Done(0), (
        "who asks for another does not"
    )
    assert not [reply for reply in world.replies if reply.answer in (ev.Done(10), ev.Done(2))]
    world.settle(2_000)
    assert [reply.answer for reply in world.replies if isinstance(reply.answer, ev.Done)][-3:] == [
        ev.Done(10),
        ev.Done(0),
        ev.Done(2),
    ]
    assert kept(world, namespace) == ([], [])


def test_a_daemon_that_ends_in_good_order_waits_for_what_is_being_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 2)
    world, worker, namespace = start(durable_within_ms=400)
    keys = chain("k", 6)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    world.settle(1_000)
    assert not world.store.behind
    world.faults = {ev.WriteRecords: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
    world.save(worker, namespace, chain("l", 1))
    world.tick(10)
    assert world.health() is DiskState.READ_ONLY
    world.hold = {ev.WriteIndex}
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    while world.platter.sessions:
        assert world.store.behind, f"{len(world.held)} deletions are under way"
        if world.held:
            world.finish()
        else:
            world.tick(200)
    assert not world.store.behind and not world.platter.chunks


def test_a_forget_while_the_tier_is_off_is_tried_all_the_same() -> None:
    world, worker, namespace = small(durable_within_ms=400)
    cold(world, worker, namespace)
    world.settle(1_000)
    world.hold = {ev.ReadRecords, ev.ProbeDisk}
    world.ask(ev.Acquire, worker, namespace, chain("k", 1), wait_ms=10)
    world.tick(3_000)
    assert world.health() is DiskState.OFF
    assert not answer(world, ev.Forget, worker, namespace, b"", chain("k other 0", 1)).not_durable
    assert (namespace, chain("k other 0", 1)[0]) not in world.platter.chunks


def test_what_is_to_be_forgotten_is_bounded_by_what_the_index_holds() -> None:
    """While the disk hangs, sessions that come and go leave nothing behind that has to be remembered."""
    world, worker, namespace = start(durable_within_ms=400, sessions_max=10)
    world.save(worker, namespace, chain("k", 1))
    for number in range(10):
        world.append(worker, namespace, b"old %d" % number, chain("k", 1))
    world.settle(1_000)
    world.hold = {ev.WriteIndex, ev.ProbeDisk}
    for number in range(500):
        world.append(worker, namespace, b"new %d" % number, chain("k", 1))
        world.tick(100)
    state = world.store.state
    waiting = len(state.deleted_sessions) + len(
        world.store.cold_tier.durability.index[1].effect.sessions_deleted
    )
    assert waiting <= 10 and len(state.dirty_sessions) <= 10


@pytest.mark.parametrize("state", ["full", "read_only"])
def test_what_was_truncated_away_does_not_come_back_when_the_new_manifest_finds_no_room(state: str) -> None:
    world, worker, namespace = start(durable_within_ms=400, index_sessions_share=0.01)
    world.save(worker, namespace, chain("k", 4))
    first = world.append(worker, namespace, b"s", chain("k", 4))
    world.settle(1_000)
    if state == "full":
        world.platter.index_bytes = 0
    else:
        world.faults = {ev.WriteRecords: DiskResult.IO_ERROR, ev.ProbeDisk: DiskResult.IO_ERROR}
        world.save(worker, namespace, chain("l", 1))
        world.tick(10)
        assert world.health() is DiskState.READ_ONLY
    world.ask(ev.Truncate, worker, namespace, b"s", first.version, 0, 4)
    world.tick(1_000)
    assert (namespace, b"s") not in world.platter.sessions
    world.faults = {}
    world.platter.index_bytes = 1 << 40
    world.settle(5_000)
    if state == "read_only":
        assert len(world.platter.sessions[namespace, b"s"].entries) == 3


def test_what_expired_is_gone_after_a_crash_though_the_index_is_full() -> None:
    world, worker, namespace = full(chunks=4, sessions=4, session_ttl_ms=20_000)
    fill(world, worker, namespace, 4, 4)
    world.platter.index_bytes = 0
    world.save(worker, namespace, chain("new", 1))
    for _ in range(300):
        world.tick(100)
    assert not world.platter.sessions
    assert kept(world, namespace)[0] == []


def test_a_session_that_expires_leaves_chunks_that_somebody_uses_by_their_keys() -> None:
    world, worker, namespace = start(session_ttl_ms=10_000)
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"s", chain("k", 2))
    for _ in range(20):
        world.tick(1_000)
        assert world.fetch(worker, namespace, chain("k", 1)) == ["HIT"]
    assert not world.store.state.sessions.by_name
    assert world.where(namespace, chain("k", 2)) == ["dram+ssd", "EXPIRED"]


# ------------------------------------------------------------------------------------------------------- who gives way


def test_sessions_do_not_push_out_all_chunks_and_the_oldest_end() -> None:
    world, worker, namespace = full(chunks=20, sessions=20)
    fill(world, worker, namespace, 20, 20)
    fill(world, worker, namespace, 0, 300, start=100)
    assert world.health() is DiskState.OK and not world.store.state.dirty_sessions
    half = world.platter.index_bytes // 2
    assert world.platter.usage.chunks >= half - NAMESPACE_ROW_BYTES - 2 * CHUNK_ROW_BYTES
    names = {name for _, name in world.platter.sessions}
    assert b"session 399" in names and b"session 0" not in names
    assert names == {name for _, name in world.store.state.sessions.by_name}


def test_chunks_do_not_push_out_all_sessions() -> None:
    world, worker, namespace = full(chunks=20, sessions=20)
    fill(world, worker, namespace, 1, 20)
    fill(world, worker, namespace, 60, 0, start=100)
    assert world.health() is DiskState.OK and not world.store.state.dirty_chunks
    assert len(world.platter.sessions) >= 18
    assert (namespace, chain("chunk 159", 1)[0]) in world.platter.chunks


def test_who_needs_more_than_its_share_may_have_it_while_the_other_does_not() -> None:
    world, worker, namespace = full(chunks=1, sessions=40)
    fill(world, worker, namespace, 1, 40)
    assert len(world.platter.sessions) == 40


def test_a_commit_that_waits_is_durable_in_a_full_index() -> None:
    world, worker, namespace = full(chunks=10, sessions=10)
    fill(world, worker, namespace, 10, 30)
    commit = world.save_durably(worker, namespace, chain("new", 4))
    world.settle(1_000)
    assert isinstance(world.durable_answer(worker, commit), ev.Committed)
    world.crash(power=True)
    assert world.where(namespace, chain("new", 4)) == ["ssd"] * 4


def test_forgetting_heals_a_full_index_without_a_restart() -> None:
    world, worker, namespace = full(chunks=10, sessions=40)
    fill(world, worker, namespace, 10, 40)
    for number in range(30):
        world.ask(ev.Forget, worker, namespace, b"session %d" % number)
    fill(world, worker, namespace, 4, 4, start=200)
    assert world.health() is DiskState.OK
    assert {b"session 200", b"session 203", b"session 39"} <= {name for _, name in world.platter.sessions}
    assert world.counters["sessions_dropped"] == 0


def test_chunks_in_dram_give_up_their_records_when_there_are_no_cold_ones() -> None:
    world, worker, namespace = start(
        durable_within_ms=400, index_bytes=NAMESPACE_ROW_BYTES + 4 * CHUNK_ROW_BYTES
    )
    for number in range(10):
        world.save(worker, namespace, chain(f"chunk {number}", 1))
        world.settle(500)
    assert world.health() is DiskState.OK
    assert (namespace, chain("chunk 9", 1)[0]) in world.platter.chunks
    assert world.where(namespace, chain("chunk 0", 1)) == ["dram"]


def test_an_index_in_which_nothing_can_give_way_says_so_with_a_remedy() -> None:
    world, worker, namespace = start(durable_within_ms=400, index_bytes=10)
    world.save(worker, namespace, chain("k", 1))
    world.tick(400)
    world.tick(400)
    assert world.health() is DiskState.READ_ONLY
    assert "raise ssd_index_bytes" in world.store.state.disk_why


def test_a_full_file_system_lets_nobody_give_way() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    fill(world, worker, namespace, 4, 4)
    world.faults = {ev.WriteIndex: DiskResult.NO_SPACE}
    world.save(worker, namespace, chain("new", 1))
    world.settle(2_000)
    assert world.counters["chunks_evicted_from_ssd"] == world.counters["sessions_dropped"] == 0


def test_little_more_gives_way_than_is_needed_however_much_comes_at_once() -> None:
    """Eight times what the index holds, in one burst: in the end it is nearly full, of the newest."""
    world, worker, namespace = full(chunks=4, sessions=100)
    fill(world, worker, namespace, 4, 50)
    for number in range(800):
        world.append(worker, namespace, b"new %d" % number, chain("chunk 0", 1))
    fullest = 0.0
    for _ in range(200):
        world.tick(10)
        used = world.platter.usage.used / world.platter.index_bytes
        fullest = max(fullest, used)
        assert fullest < 0.95 or used > 7 / 8
    assert fullest > 0.95 and not world.store.state.dirty_sessions
    names = {name for _, name in world.platter.sessions}
    assert names == {name for _, name in world.store.state.sessions.by_name} and len(names) > 87
    assert names == {b"new %d" % number for number in range(800 - len(names), 800)}
    assert world.counters["sessions_dropped_for_index"] == 850 - len(names)
    assert len(world.platter.chunks) == 4, "none of them had more than its share"


def test_chunks_that_come_in_a_burst_let_few_others_leave_the_index() -> None:
    world, worker, namespace = full(chunks=200, sessions=0)
    for number in range(0, 400, 40):
        for chunk in range(number, number + 40):
            world.save(worker, namespace, chain(f"chunk {chunk}", 1))
        world.settle(1_000)
        if number >= 200:
            assert len(world.platter.chunks) > 175
    assert {key for _, key in world.platter.chunks} >= {chain(f"chunk {n}", 1)[0] for n in range(360, 400)}


def test_a_session_that_would_take_the_share_of_all_ends_and_no_other() -> None:
    world, worker, namespace = full(chunks=40, sessions=40)
    fill(world, worker, namespace, 40, 40)
    keys = [chain(f"chunk {number % 40}", 1)[0] for number in range(200)]
    entries = [ev.SessionEntry(key, 4 * number, 4, approximate=True) for number, key in enumerate(keys)]
    world.ask(ev.UpdateSession, worker, namespace, b"endless", 0, 0, tuple(entries))
    world.settle(1_000)
    names = {name for _, name in world.store.state.sessions.by_name}
    assert names == {b"session %d" % number for number in range(40)}
    assert len(world.platter.chunks) == len(world.platter.sessions) == 40
    assert world.health() is DiskState.OK


def test_makers_that_nobody_carries_leave_the_index() -> None:
    world = DiskWorld(durable_within_ms=400, makers_max=8)
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)
    for number in range(20):
        for rank, worker in enumerate(ranks):
            maker = b"%015d%d" % (number, rank)
            world.save(worker, namespace, chain(f"{number}", 1), shards=(rank,), maker=maker)
        world.settle(500)
        world.ask(ev.Forget, ranks[0], namespace, b"", chain(f"{number}", 1))
        world.settle(500)
    assert len(world.platter.makers) <= 8 and len(world.store.state.makers) <= 8


def made_by_two(world: DiskWorld, ranks: list[WorkerId], namespace: NamespaceId, name: str) -> None:
    for rank, worker in enumerate(ranks):
        world.save(worker, namespace, chain(name, 1), shards=(rank,), maker=b"%016d" % rank)


@pytest.mark.parametrize("batch", [4_096, 2])
def test_the_index_explains_every_maker_that_it_names(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a digest is used again before its deletion; and until the last row goes that names it."""
    monkeypatch.setattr(durability, "INDEX_BATCH_MAX", batch)
    world = DiskWorld(durable_within_ms=400, ghosts_max=0)
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)

    def finish() -> None:
        world.finish()
        assert {chunk.maker for chunk in world.platter.chunks.values()} <= world.platter.makers.keys()

    for name in "abcdef":
        made_by_two(world, ranks, namespace, name)
    world.settle(1_000)
    assert len(world.platter.makers) == 1 and len(world.platter.chunks) == 6
    state = world.store.state
    world.hold = {ev.WriteIndex}
    for row in list(state.namespaces[namespace].index.values()):
        state.doom(row, Reason.EVICTED)
    world.tick(200)
    world.store.cold_tier.durability.forget_makers()
    if batch > 2:
        made_by_two(world, ranks, namespace, "e")
    for _ in range(20):
        world.tick(100)
        if world.held:
            finish()
    assert len(world.platter.chunks) == len(world.platter.makers) == (batch > 2)


def test_what_is_evicted_all_the_time_does_not_keep_anything_from_being_written() -> None:
    world, worker, namespace = small(durable_within_ms=400, slabs=1, slab_slots=16)
    chance = random.Random(1)
    world.hold = {ev.WriteIndex}
    for number in range(200):
        world.save(worker, namespace, chain(f"{number}", 2))
        world.tick(50)
        if chance.random() < 0.5 and world.held:
            world.finish()
    behind = world.now - min((*world.store.state.dirty_chunks.values(), world.now))
    assert behind < 2_000
    world.settle(1_000)
    assert world.counters["chunks_evicted_from_ssd"] > 200


# ------------------------------------------------------------------------------------------------------------- bounds


def test_no_maker_is_let_in_again_because_another_is_recalled() -> None:
    world, worker, namespace = start(makers_barred_max=3)
    admin = world.join(admin=True)
    makers = [b"%016d" % number for number in range(4)]
    for maker in makers[:3]:
        recalled(world, admin, maker)
    world.save(worker, namespace, chain("k", 1), maker=makers[3])
    with pytest.raises(Exhausted, match="all stay barred"):
        world.ask(ev.Recall, admin, makers[3])
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"], "nothing was done"
    recalled(world, admin, makers[0])  # again
    for maker in makers[:3]:
        with pytest.raises(Exception, match="was recalled"):
            world.reserve(worker, namespace, chain("j", 1), maker=maker)


def test_a_session_is_found_by_its_name_however_many_there_are() -> None:
    world, worker, namespace = start()
    other = world.join(tenant="bob")
    world.save(worker, namespace, chain("k", 1))
    for number in range(600):
        world.append(worker, namespace, b"%d" % number, chain("k", 1))
    found = world.ask(ev.ListSessions, worker, session=b"7")
    assert [(row.session, row.namespace) for row in found.rows] == [(b"7", namespace)] and found.total == 1
    assert world.ask(ev.ListSessions, other, session=b"7").rows == ()
    assert world.ask(ev.ListSessions, worker, session=b"none").rows == ()
