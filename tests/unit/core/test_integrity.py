"""What the invariants are worth: damage is found, at the next look of a watch as by a pass over everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.chunks import LISTED, NONE, PROMOTING, QUEUED, RANKED, STORED, LinkedRows
from kvstore.core.policies.hints import Hints
from kvstore.core.store import Store
from kvstore.sim.integrity import Watch, check_integrity
from kvstore.sim.simulation import Simulation
from kvstore.types import SlotState


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """In the middle of things: chunks in both tiers, pins, sessions, reservations; and lists by recency."""
    drawn = (Simulation(seed, 100_000, only=[]) for seed in itertools.count(1))
    simulation = next(each for each in drawn if type(each.cluster.store.state.policy) is Hints)
    while simulation.cluster.events < 1_500 or not enough(simulation.cluster.store):
        simulation._next()
        assert simulation.cluster.events < 20_000
    return simulation


def enough(store: Store) -> bool:
    state = store.state
    return bool(
        state.leases.leases
        and state.reservations
        and cold_list(store).count > 3
        and state.partials.count
        and any(space.dram.recency.count > 5 for space in state.namespaces.values())
        and any(group.pins for group in state.groups.values())
    )


def resident(store: Store) -> int:
    """A chunk in the middle of a list of candidates, on SSD too if possible."""
    chunks = store.state.chunks
    for space in store.state.namespaces.values():
        for row in list(chunks.walk(space.dram.recency))[1:-1]:
            if chunks.flags[row] & STORED:
                return row
    raise AssertionError("none")


def cold_list(store: Store) -> LinkedRows:
    """The longest."""
    return max((mine.recency for mine in store.state.cold.by_sizes.values()), key=lambda rows: rows.count)


def cold(store: Store) -> int:
    return store.state.chunks.newer[cold_list(store).oldest]


def segment_of(store: Store) -> Any:
    chunks = store.state.chunks
    return store.state.pool.segments[chunks.shard_segment[chunks.shard0[resident(store)]]]


def column(name: str, change: Callable[[int], int], row: Callable[[Store], int] = resident) -> Any:
    """A change of one row in one column, and how to take it back."""

    def damage(store: Store) -> Callable[[], None]:
        chunks = store.state.chunks
        table = getattr(chunks, name)
        at = row(store)
        if len(table) == len(chunks.shard_slot) and name.startswith(("shard_", "disk_")):
            at = chunks.shard0[at]
        before = table[at]
        table[at] = change(before)
        return lambda: table.__setitem__(at, before)

    return damage


def attribute(of: Callable[[Store], Any], name: str, change: Callable[[Any], Any]) -> Any:
    def damage(store: Store) -> Callable[[], None]:
        owner = of(store)
        before = getattr(owner, name)
        setattr(owner, name, change(before))
        return lambda: setattr(owner, name, before)

    return damage


def first_slot(name: str, value: int) -> Any:
    """Of the slot that a resident chunk lies in."""

    def damage(store: Store) -> Callable[[], None]:
        segment = segment_of(store)
        slot = store.state.chunks.shard_slot[store.state.chunks.shard0[resident(store)]]
        table = getattr(segment, name)
        before = table[slot]
        table[slot] = value
        return lambda: table.__setitem__(slot, before)

    return damage


def lose_key(store: Store) -> Callable[[], None]:
    row = resident(store)
    index, key = store.state.namespace_of(row).index, store.state.chunks.key[row]
    del index[key]
    return lambda: index.__setitem__(key, row)


def space_of(store: Store) -> Any:
    return store.state.namespace_of(resident(store))


def group_of(store: Store) -> Any:
    return next(group for group in store.state.groups.values() if group.pins)


def worker_of(store: Store) -> Any:
    return next(iter(store.state.workers.values()))


def more(value: int) -> int:
    return value + 1


DAMAGES: dict[str, Any] = {
    "pins": column("pins", more),
    "references": column("refs", more),
    "ready": column("ready", more),
    "reserved": column("reserved", more),
    "another namespace": column("namespace", lambda number: number % 2 + 1),
    "no shards": column("shard0", lambda _: NONE),
    "shards of another": column("shard0", more),
    "older": column("older", lambda _: NONE),
    "newer": column("newer", lambda _: NONE),
    "cold: older": column("older", lambda _: NONE, cold),
    "its own parent": column("parent", lambda _: 0),
    "its own child": column("first_child", lambda _: 0),
    "not ready": column("shard_ready", lambda _: 0),
    "another slot": column("shard_slot", lambda slot: slot ^ 1),
    "another segment": column("shard_segment", lambda index: index ^ 1),
    "another disk slot": column("disk_slot", lambda slot: slot ^ 1),
    "another slab": column("disk_slab", lambda index: index ^ 1),
    "cold: another disk slot": column("disk_slot", lambda slot: slot ^ 1, cold),
    "cold: ready": column("shard_ready", lambda _: 1, cold),
    **{
        f"flag {flag}": column("flags", lambda flags, flag=flag: flags ^ flag)
        for flag in (LISTED, STORED, PROMOTING, RANKED, QUEUED)
    },
    "slot: owner": first_slot("owner", 0x7FFF),
    "slot: free": first_slot("state", SlotState.FREE),
    "slot: reserved": first_slot("state", SlotState.RESERVED),
    "slot: generation": first_slot("generation", 1 << 60),
    "segment: pinned": attribute(segment_of, "pinned", more),
    "segment: size": attribute(segment_of, "slot_bytes", lambda size: size * 2),
    "segment: counts": attribute(segment_of, "counts", lambda counts: [counts[0] + 1, *counts[1:]]),
    "segment: namespace": attribute(segment_of, "namespace", more),
    "namespace: visible": attribute(space_of, "visible", more),
    "namespace: cold": attribute(space_of, "cold", more),
    "namespace: partial": attribute(space_of, "partial", more),
    "namespace: pinned": attribute(space_of, "pinned", more),
    "namespace: sessions": attribute(space_of, "sessions", more),
    "namespace: index": lose_key,
    "list: count": attribute(lambda store: space_of(store).dram.recency, "count", more),
    "list: oldest": attribute(lambda store: space_of(store).dram.recency, "oldest", lambda _: NONE),
    "list: newest": attribute(cold_list, "newest", lambda _: NONE),
    "group: bytes": attribute(group_of, "pinned_bytes", more),
    "group: pins": attribute(group_of, "pins", lambda pins: {**pins, 0: 7}),
    "worker: waits": attribute(worker_of, "waits", more),
    "worker: bytes": attribute(worker_of, "reserved_bytes", more),
    "worker: reservations": attribute(worker_of, "reservations", lambda ids: ids | {1 << 30}),
    "sessions: entries": attribute(lambda store: store.state.sessions, "entries", more),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("full", [False, True])
def test_damage_is_found(simulation: Simulation, name: str, full: bool) -> None:
    store = simulation.cluster.store
    watch = Watch(store)
    watch.check()
    undo = DAMAGES[name](store)
    try:
        with pytest.raises((AssertionError, KeyError, IndexError)):
            (Watch(store) if full else watch).check()
    finally:
        undo()
    check_integrity(store)


def test_a_watch_proves_that_it_missed_nothing(simulation: Simulation) -> None:
    """A list that was changed in place, which no look compares, is found when all is looked at anew."""
    store = simulation.cluster.store
    watch = Watch(store, full_every=2)
    watch.check()
    lease = next(iter(store.state.leases.leases.values()))
    lease.rows.append(resident(store))
    try:
        with pytest.raises(AssertionError):
            watch.check()
    finally:
        lease.rows.pop()
