"""What came and went is found by looking at the columns, whatever the core did to get there."""

from __future__ import annotations

import random

import pytest

from kvstore.core import events as ev
from kvstore.fleet.held import Where
from kvstore.fleet.sweep import Sweep
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey


def start(**limits: object) -> tuple[World, Sweep]:
    world = World(**{"segments": 2, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0, **limits})
    return world, Sweep(lambda: world.store.state)


def apply(known: dict[int, tuple[ChunkKey, Where]], sweep: Sweep, rows_max: int = 100_000) -> int:
    changes = sweep.look(rows_max)
    for change in changes:
        if change.where is Where.NOWHERE:
            known.pop(change.row, None)
        else:
            known[change.row] = (change.key, change.where)
    return len(changes)


def test_saved_forgotten_and_reloaded() -> None:
    world, sweep = start()
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 4)
    known: dict[int, tuple[ChunkKey, Where]] = {}
    world.save(worker, namespace, keys)
    assert apply(known, sweep) == 4
    assert set(known.values()) == {(key, Where.DRAM) for key in keys}
    assert apply(known, sweep) == 0, "nothing changed"
    world.ask(ev.Forget, worker, namespace, keys=keys[3:])
    assert apply(known, sweep) == 1
    assert {key for key, _ in known.values()} == set(keys[:3])
    world.open(spec(epoch=1), worker)
    apply(known, sweep)
    assert known == {}, "an old epoch is told"


@pytest.mark.parametrize("rows_max", [3, 100_000])
def test_after_each_round_it_is_what_a_lookup_says(rows_max: int) -> None:
    """Through evictions and rows that are used again, also where a look sees only a part."""
    world, sweep = start()
    worker = world.join()
    namespace = world.open(spec(), worker)
    known: dict[int, tuple[ChunkKey, Where]] = {}
    draw = random.Random(7)
    chains = [chain(f"c{number}", 5) for number in range(12)]
    for _ in range(60):
        keys = draw.choice(chains)
        world.tick(draw.choice([0, 0, 1, 50]))
        if draw.random() < 0.2:
            world.ask(ev.Forget, worker, namespace, keys=keys[draw.randrange(5) :])
        elif not all(outcome == "HIT" for outcome in world.outcomes(worker, namespace, keys)):
            world.save(worker, namespace, keys)
        for _ in range(-(-world.store.state.chunks.rows_ever // rows_max) + 1):
            apply(known, sweep, rows_max)
        told = {key for key, _ in known.values()}
        index = world.store.state.namespaces[namespace].index
        hits = {key for key, row in index.items() if world.store.state.is_hit(row)}
        assert told == hits
