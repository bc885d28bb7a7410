"""What workers keep in memory of their own, as they report it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests.resident import NAMESPACES_MAX
from kvstore.errors import NotFound
from kvstore.sim.world import World, chain, spec
from kvstore.types import ChunkKey, NamespaceId, WorkerId


def start() -> tuple[World, WorkerId, NamespaceId, tuple[ChunkKey, ...]]:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 4)
    world.save(worker, namespace, keys)
    return world, worker, namespace, keys


def report(world: World, worker: WorkerId, namespace: NamespaceId, *keys: ChunkKey, ttl_ms: int = 0) -> Any:
    return world.ask(ev.ReportResident, worker, namespace, keys, ttl_ms).ranks


def holders(world: World, worker: WorkerId, namespace: NamespaceId, keys: Any) -> list[bool]:
    explained = world.ask(ev.Explain, worker, namespace, b"", tuple(keys))
    return [bool(chunk.resident_in) for chunk in explained.chunks]


def chunks(world: World, worker: WorkerId, namespace: NamespaceId) -> int:
    rows = world.ask(ev.GetStats, worker).values["namespaces"]
    return next(row["worker_chunks"] for row in rows if row["namespace_id"] == namespace)


def test_a_report_replaces_the_one_before_and_ends_with_its_worker() -> None:
    world, worker, namespace, keys = start()
    other = world.join()
    world.open(spec(), other)
    unknown = chain("never saved", 1)
    assert report(world, worker, namespace, *keys[:3], *unknown) == (0, 0, 0, 0)
    assert report(world, other, namespace, keys[0]) == (0,)
    assert holders(world, worker, namespace, (*keys, *unknown)) == [True, True, True, False, True]
    assert chunks(world, worker, namespace) == 5
    report(world, worker, namespace, keys[1])
    assert holders(world, worker, namespace, keys) == [True, True, False, False]
    report(world, worker, namespace)
    assert holders(world, worker, namespace, keys) == [True, False, False, False]
    world.step(ev.WorkerLeft(other))
    assert holders(world, worker, namespace, keys) == [False] * 4 and chunks(world, worker, namespace) == 0


def test_a_report_ends_by_the_clock() -> None:
    world, worker, namespace, keys = start()
    report(world, worker, namespace, *keys, ttl_ms=1_000)
    world.now += 999
    assert chunks(world, worker, namespace) == 4
    world.now += 1  # and before the clock's next tick
    assert chunks(world, worker, namespace) == 0 and holders(world, worker, namespace, keys) == [False] * 4
    world.tick()
    assert world.store.residents.reports == {}


def test_the_answer_ranks_what_the_queue_needs_soonest_first() -> None:
    world, worker, namespace, keys = start()
    later = chain("l", 2)
    world.save(worker, namespace, later)
    hints = (ev.Hint(b"late", 7, keys=later), ev.Hint(b"soon", 3, keys=keys[:2]))
    world.ask(ev.PublishQueue, worker, namespace, hints)
    assert report(world, worker, namespace, later[0], keys[1], keys[3], keys[0]) == (3, 2, 0, 1)
    world.ask(ev.PublishQueue, worker, namespace, ())
    assert report(world, worker, namespace, later[0], keys[1]) == (0, 0)


def test_of_many_namespaces_the_last_are_kept() -> None:
    world, worker, _, keys = start()
    spaces = [world.open(spec(f"m{number}"), worker) for number in range(NAMESPACES_MAX + 1)]
    for space in spaces:
        report(world, worker, space, *keys)
        world.tick(1)
    assert [chunks(world, worker, space) for space in spaces] == [0, *[4] * NAMESPACES_MAX]


def test_who_has_not_opened_a_namespace_keeps_nothing_of_it() -> None:
    world, _, namespace, keys = start()
    with pytest.raises(NotFound):
        report(world, world.join(), namespace, *keys)
