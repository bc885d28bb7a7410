"""What readers without a message are told, and what they tell. `World` holds the directory against `lookup` and lets
readers go on between any two effects, in every test of the core; here are the cases that tests must name."""

from __future__ import annotations

import pytest

from kvstore.core import directory
from kvstore.core import events as ev
from kvstore.errors import Denied, NotFound, Precondition
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, epoch_of, spec
from kvstore.types import DiskResult, DiskState, Reason

FOUND, BEHIND = b"\1", b"\2"


def touched(world: World, worker, space, keys, found: bytes) -> ev.Done:
    return world.ask(ev.Touched, worker, space, tuple(keys), (len(keys),), found)


def test_chunks_come_and_go_and_are_told_with_their_tokens() -> None:
    world = World(segments=2)
    worker = world.join()
    space = world.open(spec(), worker)
    keys = chain("a", 3)
    world.save(worker, space, keys, token_counts=(4, 4, 1))
    its = world.directories.published[space]
    found = its.view.look_up(keys)
    assert found is not None and found.hits == 3 and found.tokens() == [4, 4, 1]
    world.ask(ev.Forget, worker, space, b"", keys[:1])
    found = its.view.look_up(keys)
    assert found is not None and found.states == b"\0\1\1"
    assert its.writer.count == 2
    row = found.numbers[1]
    world.ask(ev.Forget, worker, space, b"", keys[1:])
    world.save(worker, space, chain("b", 3))
    again = its.view.look_up(chain("b", 3))
    assert again is not None and row in again.numbers, "rows are used again before new ones"


def test_a_lookup_without_a_message_counts_like_one_with() -> None:
    """Ages and hits: what was found there last stays, what was not goes."""
    world = World(segments=1, segment_bytes=8 * PAGE, eviction="lru", ahead_slots_max=0)
    worker = world.join()
    space = world.open(spec(), worker)
    keys = chain("a", 8)
    for key in keys:
        world.now += 10
        world.save(worker, space, (key,))
    world.now += 10
    done = touched(world, worker, space, (*keys[:2], b"never", b"never 2"), FOUND * 2 + b"\0" + BEHIND)
    assert done == ev.Done(2)
    namespace = world.store.state.namespaces[space]
    assert namespace.lookups[Reason.NONE] == 2 and namespace.lookups[Reason.NEVER_SEEN] == 1
    world.now += 10
    world.save(worker, space, chain("b", 2))
    said = world.outcomes(worker, space, keys)
    assert said == ["HIT", "HIT", "EVICTED", "EVICTED", *["HIT"] * 4]
    assert world.store.state.counters["lookups_without_message"] == 1


@pytest.mark.parametrize("behind", [0, 600])
def test_what_was_named_behind_a_lookup_is_learned_as_by_a_request(behind: int) -> None:
    """A chunk of a request that goes on for long behind its hits is of another kind than one of a request that ends
    there, whichever way it was found. Several lookups come in one message: each has its own end."""
    told = []
    for asks in (True, False):
        world = World(segments=2)
        worker = world.join()
        space = world.open(spec(), worker)
        keys = chain("a", 4)
        world.save(worker, space, keys)
        world.now += 1_000
        first, more = keys[:2], (*keys[2:], *chain("new", behind))
        if asks:
            for named in (first, more):
                world.ask(ev.Release, worker, (world.acquire(worker, space, named).lease,))
        else:
            found = FOUND * 4 + (b"\0" + BEHIND * (behind - 1) if behind else b"")
            world.ask(ev.Touched, worker, space, (*first, *more), (len(first), len(more)), found)
        namespace = world.store.state.namespaces[space]
        history = [world.store.state.chunks.history[namespace.index[key]] for key in keys]
        assert history[0] == history[1] and history[2] == history[3]
        assert (history[1] != history[2]) == bool(behind)
        told.append(history)
    assert told[0] == told[1]


def test_a_transient_chunk_leaves_dram_when_it_was_read_without_a_message() -> None:
    world = DiskWorld(segments=4, slabs=4)
    worker = world.join()
    space = world.open(spec(), worker)
    keys = chain("a", 2)
    world.save(worker, space, keys, transient=True)
    assert world.where(space, keys) == ["ssd"] * 2
    world.acquire(worker, space, keys)
    for _ in range(5):
        world.tick(10)
    assert world.where(space, keys) == ["dram+ssd"] * 2
    touched(world, worker, space, keys, FOUND * 2)
    assert world.where(space, keys) == ["ssd"] * 2
    assert world.store.state.namespaces[space].ssd_hits == 2
    found = world.directories.published[space].view.look_up(keys)
    assert found is not None and (found.hits, found.usable) == (0, 2)


def test_an_old_epoch_is_closed_for_ever_and_the_ssd_while_it_is_off() -> None:
    world = DiskWorld(segments=4, slabs=4)
    worker = world.join()
    space = world.open(spec(), worker)
    view = world.directories.published[space].view
    assert not view.closed
    world.faults[ev.ReadRecords] = DiskResult.IO_ERROR
    world.store.cold_tier.degrade(DiskState.OFF, "test")
    world.tick(1)
    assert view.closed
    world.faults.clear()
    for _ in range(5):
        world.tick(2_000)
    assert not view.closed and world.store.state.disk_state is DiskState.OK
    newer = world.open(epoch_of(spec(), 1), worker)
    assert view.closed and not world.directories.published[newer].view.closed


def test_many_rows_at_once_are_told_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of chunks of two namespaces come, are demoted, are forgotten, and come back with a restart."""
    told = []
    for many in (2, 1 << 20):
        monkeypatch.setattr(directory, "MANY", many)
        world = DiskWorld(segments=16, segment_bytes=32 * PAGE, slabs=8, reserve_share_max=1.0)
        worker = world.join()
        spaces = [world.open(spec(name, shards=shards), worker) for name, shards in (("one", 1), ("two", 2))]
        for space in spaces:
            for part in range(4):
                world.save(worker, space, chain(f"{space} {part}", 40))
        world.ask(ev.Forget, worker, spaces[0], b"", chain(f"{spaces[0]} 1", 40))
        for _ in range(4):
            world.tick(10_000)
        entries = [world.directories.published[space].writer.entries() for space in spaces]
        world.crash()
        world.tick(10)
        after = [world.directories.published[space].writer.entries() for space in spaces]
        assert all(entries) and any(after)
        told.append((entries, after))
    assert told[0] == told[1]


def test_only_who_opened_the_namespace_gets_it_and_only_where_there_is_one() -> None:
    world = World()
    alice, bob, root = world.join(), world.join("bob"), world.join("operator", admin=True)
    space = world.open(spec(), alice)
    assert world.ask(ev.WantDirectory, alice, space) == ev.DirectoryAllowed(space)
    with pytest.raises(NotFound):
        world.ask(ev.WantDirectory, bob, space)
    with pytest.raises(Denied):
        world.ask(ev.WantDirectory, root, space)
    with pytest.raises(NotFound):
        touched(world, bob, space, chain("a", 1), FOUND)
    without = World(directory=False)
    worker = without.join()
    space = without.open(spec(), worker)
    without.save(worker, space, chain("a", 2))
    with pytest.raises(Precondition, match="off"):
        without.ask(ev.WantDirectory, worker, space)
    assert not without.directories.published


def test_a_full_directory_is_closed() -> None:
    """It has room for all that fits, so this is a bug; but no reader may take it for a miss."""
    world = World(segments=2)
    worker = world.join()
    space = world.open(spec(), worker)
    world.store.state.namespaces[space].directory_rows_max = 2
    world.save(worker, space, chain("a", 2))
    its = world.directories.published[space]
    assert not its.view.closed
    world.directories.check = lambda changed: None  # type: ignore[method-assign]
    world.save(worker, space, chain("b", 2))
    assert its.view.closed
    world.tick(10)
    assert its.view.closed
