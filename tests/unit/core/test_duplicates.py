"""The audit of second commits."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import BadRequest, NotFound
from kvstore.sim.world import PAGE, World, chain, spec, tag
from kvstore.types import ChunkKey, GrantResult, NamespaceId, WorkerId

from .test_disk import cold, small

FIRST, SECOND = b"1" * 16, b"2" * 16


def start(shards: int = 1) -> tuple[World, WorkerId, NamespaceId, list[ev.DuplicateDiffers]]:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=shards), worker)
    world.save(worker, namespace, chain("k", 3), maker=FIRST)
    return world, worker, namespace, watched(world)


def watched(world: World) -> list[ev.DuplicateDiffers]:
    """What is to be logged from now on."""
    seen: list[ev.DuplicateDiffers] = []
    perform = world._perform_all

    def look(effects: Any) -> None:
        seen.extend(effect for effect in effects if isinstance(effect, ev.DuplicateDiffers))
        perform(effects)

    world._perform_all = look  # type: ignore[method-assign]
    return seen


def checksums(
    namespace: NamespaceId, keys: tuple[ChunkKey, ...], variant: int = 0, shards: int = 1
) -> tuple[int, ...]:
    return tuple(tag((namespace, key, shard), variant) for key in keys for shard in range(shards))


def report(world: World, worker: WorkerId, namespace: NamespaceId, keys: Any, sums: Any, **named: Any) -> int:
    done: ev.Done = world.ask(ev.ReportDuplicates, worker, namespace, keys, sums, maker=SECOND, **named)
    return done.count


def test_equal_bytes_are_counted() -> None:
    world, worker, namespace, seen = start(shards=2)
    keys = chain("k", 3)
    assert set(world.reserve(worker, namespace, keys, maker=SECOND).results) == {GrantResult.ALREADY}
    assert report(world, worker, namespace, keys, checksums(namespace, keys, shards=2)) == 0
    one = tuple(tag((namespace, key, 1)) for key in keys)
    assert report(world, worker, namespace, keys, one, shards=(1,)) == 0
    counters = world.store.state.counters
    assert (counters["duplicate_commits_compared"], counters["duplicate_commits_differed"]) == (6, 0)
    assert seen == []


def test_a_difference_names_both_makers_once() -> None:
    world, worker, namespace, seen = start()
    keys = chain("k", 3)
    sums = (*checksums(namespace, keys[:1]), *checksums(namespace, keys[1:], 1))
    assert report(world, worker, namespace, keys, sums) == 2
    assert report(world, worker, namespace, keys, sums) == 2
    (told,) = seen
    assert (told.key, told.first, told.second, told.shard) == (keys[1], FIRST, SECOND, 0)
    assert world.store.state.counters["duplicate_commits_differed"] == 4
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 3, "first copy wins"


def test_however_much_differs_few_copies_are_read_again_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's reports must not keep the threads that copy for everybody."""
    monkeypatch.setattr("kvstore.core.requests.duplicates.AUDITS_MAX", 2)
    world, worker, namespace = small()
    world.save(worker, namespace, chain("k", 3), maker=FIRST)
    seen = watched(world)
    world.hold = {ev.Checksum}
    keys = chain("k", 3)
    for _ in range(5):
        assert report(world, worker, namespace, keys * 4, checksums(namespace, keys, 1) * 4) == 12
    audits = world.of(ev.Checksum)
    assert [len(audit.extents) for audit in audits] == [1, 1]
    assert [told.key for told in seen] == [keys[2]], "of the third it is told at once"
    for audit in audits:
        world.finish(audit)
    assert world.store.state.counters["duplicate_commits_differed"] == 60
    assert not world.store.duplicates.audits and world.outcomes(worker, namespace, keys) == ["HIT"] * 3


def test_damage_of_our_own_is_no_difference() -> None:
    world, worker, namespace, seen = start()
    state = world.store.state
    extent = state.extent(state.namespaces[namespace].index[chain("k", 1)[0]], 0, PAGE)
    world.memory[extent.segment][extent.offset // PAGE] ^= 1
    world.damaged.add((extent.segment, extent.offset // PAGE))
    report(world, worker, namespace, chain("k", 1), checksums(namespace, chain("k", 1), 1))
    assert seen == [] and state.counters["duplicate_commits_differed"] == 0
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["CORRUPT"]


def test_our_own_copy_that_could_not_be_read_again_is_no_damage() -> None:
    world, worker, namespace, seen = start()
    world.hold = {ev.Checksum}
    report(world, worker, namespace, chain("k", 1), checksums(namespace, chain("k", 1), 1))
    assert [held.worker for held in world.held] == [worker]
    world.finish(fails="busy")
    assert len(seen) == 1 and world.store.state.counters["duplicate_commits_differed"] == 1
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]
    world.tick(100)
    world.finish()
    assert len(seen) == 1 and world.store.state.counters["chunks_corrupt"] == 0


def test_what_is_on_ssd_only_is_compared_with_its_checksum() -> None:
    world, worker, namespace = small()
    cold(world, worker, namespace)
    keys = chain("k", 4)
    assert report(world, worker, namespace, keys, checksums(namespace, keys)) == 0
    assert report(world, worker, namespace, keys[:1], checksums(namespace, keys[:1], 1)) == 1
    assert world.where(namespace, keys) == ["ssd"] * 4
    assert world.counters["duplicate_commits_compared"] == 5


def test_what_is_not_there_is_not_compared() -> None:
    world, worker, namespace, seen = start()
    world.reserve(worker, namespace, chain("half", 1))
    keys = (*chain("half", 1), *chain("none", 1))
    assert report(world, worker, namespace, keys, (1, 2)) == 0
    assert world.store.state.counters["duplicate_commits_compared"] == 0 and seen == []


def test_what_makes_no_sense_is_refused() -> None:
    world, worker, namespace, _ = start()
    with pytest.raises(BadRequest, match="checksums"):
        report(world, worker, namespace, chain("k", 3), (1, 2))
    with pytest.raises(BadRequest, match="shards"):
        report(world, worker, namespace, chain("k", 1), (1,), shards=(7,))
    with pytest.raises(NotFound):
        report(world, world.join("bob"), namespace, chain("k", 1), (1,))
