"""Hints bring what is beyond the node before it is asked for, as the prefetch window and the source's speed say."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ActionKind, HintAction, NamespaceId, WorkerId

KEYS = chain("k", 4)


def start(**limits: Any) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    defaults: dict[str, Any] = {"segments": 2, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0}
    world = RemoteWorld(**{**defaults, "prefetch_share_max": 0.5, **limits})
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def publish(world: RemoteWorld, worker: WorkerId, namespace: NamespaceId, *jobs: Any) -> None:
    hints = tuple(
        ev.Hint(b"job %d" % position, position, b"", tuple(keys)) for position, keys in enumerate(jobs)
    )
    world.ask(ev.PublishQueue, worker, namespace, hints)


def hits(world: RemoteWorld, worker: WorkerId, namespace: NamespaceId, keys: Any) -> int:
    state = world.store.state
    index = state.namespaces[namespace].index
    return sum(key in index and state.is_hit(index[key]) for key in keys)


def test_what_a_queued_job_needs_is_here_when_it_asks() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS[:1])
    world.put_elsewhere(namespace, KEYS[1:])
    publish(world, worker, namespace, KEYS)
    for _ in range(5):
        world.tick(200)
    assert hits(world, worker, namespace, KEYS) == 4
    state = world.store.state
    ranked = {state.chunks.key[row] for row in state.policy.rank}
    assert ranked == set(KEYS), "what came is needed as if it had been here"
    assert world.counters["remote_chunks_wanted_ahead"] == 3


def test_a_session_that_lost_its_chunks_gets_them_back() -> None:
    world, worker, namespace = start(slabs=0)
    world.save(worker, namespace, KEYS)
    world.append(worker, namespace, b"talk", KEYS)
    for number in range(5):
        world.save(worker, namespace, chain(f"o {number}", 4))
    assert hits(world, worker, namespace, KEYS) < 4
    world.put_elsewhere(namespace, KEYS)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"j", 1, b"talk", ()),))
    for _ in range(3):
        world.tick(200)
    assert hits(world, worker, namespace, KEYS) == 4


def test_only_what_the_prefetch_window_holds() -> None:
    """16 chunks of DRAM, half of them for the window: two jobs of four."""
    world, worker, namespace = start()
    names = [chain(name, 4) for name in "abcd"]
    for keys in names:
        world.put_elsewhere(namespace, keys)
    publish(world, worker, namespace, *names)
    for _ in range(5):
        world.tick(300)
    assert [hits(world, worker, namespace, keys) for keys in names] == [4, 4, 0, 0]
    world.ask(ev.PublishQueue, worker, namespace, (), (b"job 0", b"job 1"), False)
    for _ in range(8):
        world.tick(1_000)
    assert [hits(world, worker, namespace, keys) for keys in names[2:]] == [4, 4]


def test_what_nobody_has_is_asked_for_once_a_second() -> None:
    world, worker, namespace = start(lookup_absent_ms=100)
    publish(world, worker, namespace, KEYS)
    for _ in range(40):
        world.tick(100)
    assert 2 <= world.looked_up.count(KEYS[0]) <= 6


def test_what_is_due_later_comes_just_in_time() -> None:
    """By the latency that the source is known to have."""
    world, worker, namespace = start()
    world.cost_ms["remote"] = 1_000.0
    world.put_elsewhere(namespace, KEYS)
    action = HintAction(b"later", ActionKind.EXPECT, keys=tuple(KEYS), eta_ms=60_000, ttl_ms=60_000)
    world.ask(ev.ApplyActions, worker, namespace, (action,))
    for _ in range(50):
        world.tick(1_000)
    assert hits(world, worker, namespace, KEYS) == 0
    for _ in range(9):
        world.tick(1_000)
    assert hits(world, worker, namespace, KEYS) == 4


@pytest.mark.parametrize(
    "four_chunks",
    [
        {"remote_bytes_in_flight_max": 4 * PAGE},
        {"remote_bytes_in_flight_max": 64 * PAGE, "remote_first_bytes": 4 * PAGE, "remote_least_bytes": PAGE},
    ],
    ids=["of all sources", "of one"],
)
def test_who_asks_goes_first(four_chunks: dict[str, int]) -> None:
    world, worker, namespace = start(**four_chunks)
    later, now = chain("later", 4), chain("now", 2)
    for keys in (later, now):
        world.put_elsewhere(namespace, keys)
    world.hold = {ev.FetchChunks}
    publish(world, worker, namespace, later)
    world.tick(200)
    world.tick(200)
    under_way = [key for held in world.held for key in held.keys]
    assert under_way == list(later[:2]), "half of what may be under way is kept for who asks"
    world.ask(ev.Acquire, worker, namespace, now, wait_ms=1_000)
    assert {key for held in world.held for key in held.keys} >= set(now)
    world.finish()


def test_nothing_comes_for_an_old_epoch_or_without_plans() -> None:
    world, worker, namespace = start(eviction="lru")
    world.put_elsewhere(namespace, KEYS)
    publish(world, worker, namespace, KEYS)
    world.tick(500)
    assert not world.looked_up
