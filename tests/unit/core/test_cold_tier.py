"""The seam below DRAM: a tier that is nothing like the SSD (`sim/memory_tier.py`) keeps its promises, and nobody else
in the core knows what is behind the seam."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import kvstore.core
from kvstore.core import events as ev
from kvstore.core.cold_tier import ColdTier
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.core.store import TIERS
from kvstore.errors import Unavailable
from kvstore.sim.memory_tier import DropObjects, GetObjects, MemoryTier, ProbeObjects, PutObjects
from kvstore.sim.memory_world import MemoryWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ChunkKey, DiskResult, DiskState, NamespaceId, Outcome, WorkerId


def start(**limits: Any) -> tuple[MemoryWorld, WorkerId, NamespaceId]:
    """DRAM for eight chunks, and far more below."""
    world = MemoryWorld(**{"segments": 1, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0, **limits})
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def cold(world: MemoryWorld, worker: WorkerId, namespace: NamespaceId) -> tuple[ChunkKey, ...]:
    """Chunks that others pushed out of DRAM."""
    keys = chain("k", 4)
    world.save(worker, namespace, keys)
    for number in range(2):
        world.save(worker, namespace, chain(f"other {number}", 4))
    assert world.where(namespace, keys) == ["ssd"] * 4
    return keys


def keys_below(world: MemoryWorld) -> set[ChunkKey]:
    return {name.key for name in world.objects}


def test_the_tiers_by_name() -> None:
    assert {"ssd": SlabTier, "memory": MemoryTier} == TIERS
    assert all(issubclass(tier, ColdTier) for tier in (SlabTier, MemoryTier))


def test_what_is_committed_is_written_and_comes_back_when_it_is_asked_for() -> None:
    world, worker, namespace = start()
    keys = cold(world, worker, namespace)
    assert keys_below(world) >= set(keys)
    assert world.fetch(worker, namespace, keys) == ["HIT"] * 4  # the world compares the bytes
    assert world.counters["chunks_promoted_on_demand"] == 4


def test_a_hint_brings_it_back_ahead() -> None:
    world, worker, namespace = start(prefetch_share_max=1.0)
    keys = cold(world, worker, namespace)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=keys),))
    assert world.where(namespace, keys) == ["dram+ssd"] * 4
    assert world.counters["chunks_promoted_ahead"] == 4


def test_what_is_forgotten_is_dropped_below_and_answered_at_once() -> None:
    world, worker, namespace = start()
    keys = cold(world, worker, namespace)
    assert world.ask(ev.Forget, worker, namespace, b"", keys) == ev.Done(4)
    assert keys_below(world).isdisjoint(keys)
    state = world.store.state
    assert not (state.deleted_chunks or state.dirty_chunks), "there is no index that could take them"


def test_sessions_are_not_noted_for_an_index() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"talk", chain("k", 2))
    assert not world.store.state.dirty_sessions
    assert world.ask(ev.Forget, worker, namespace, b"talk").not_durable == ""
    assert not world.store.state.deleted_sessions and not world.store.transfers.behind


def test_nothing_is_durable_and_who_asks_for_it_is_told() -> None:
    world, worker, namespace = start()
    with pytest.raises(Unavailable, match="nothing over a restart"):
        world.save_durably(worker, namespace, chain("k", 2))
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["HIT", "HIT"]


def test_after_a_restart_all_of_it_is_absent() -> None:
    world, worker, namespace = start()
    keys = cold(world, worker, namespace)
    world.crash()
    worker = world.join()
    namespace = world.open(spec(), worker)
    assert world.outcomes(worker, namespace, keys) == ["NEVER_SEEN"] * 4


def test_when_it_is_full_what_was_put_there_first_gives_way() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=7)
    room = world.store.cold_tier.bytes_max // PAGE
    for number in range(6):
        world.save(worker, namespace, chain(f"{number}", 4))
    assert len(world.objects) == room
    assert keys_below(world).isdisjoint(chain("0", 4)) and keys_below(world) >= set(chain("5", 4))
    assert world.outcomes(worker, namespace, chain("0", 4)) == ["EVICTED"] * 4
    assert world.store.cold_tier.stats()["used_bytes"] == room * PAGE


@pytest.mark.parametrize(("forget", "reason"), [(False, "CORRUPT"), (True, "EVICTED")])
def test_what_went_bad_or_away_down_there_is_a_miss(forget: bool, reason: str) -> None:
    world, worker, namespace = start()
    keys = cold(world, worker, namespace)
    world.spoil(next(name for name in world.objects if name.key == keys[0]), forget=forget)
    assert world.fetch(worker, namespace, keys) == [reason, "HIT", "HIT", "HIT"]
    assert world.health() is DiskState.OK


def test_a_scrub_finds_it_before_somebody_asks() -> None:
    world, worker, namespace = start()
    keys = cold(world, worker, namespace)
    admin = world.join(admin=True)
    world.spoil(next(name for name in world.objects if name.key == keys[0]), forget=False)
    world.ask(ev.Scrub, admin, True)
    for _ in range(20):
        world.tick(50)
    assert world.outcomes(worker, namespace, keys)[0] == "CORRUPT"
    assert world.counters["scrub_records"] > 1


def test_failed_writes_make_it_read_only_until_a_probe_succeeds() -> None:
    world, worker, namespace = start(probe_interval_ms=100)
    world.faults = {PutObjects: DiskResult.IO_ERROR, ProbeObjects: DiskResult.IO_ERROR}
    world.save(worker, namespace, chain("k", 2))
    assert world.health() is DiskState.READ_ONLY
    assert world.objects == {}, "what a failed put left is dropped"
    world.tick(100)
    assert world.health() is DiskState.READ_ONLY
    world.faults = {}
    world.tick(100)
    assert world.health() is DiskState.OK
    assert keys_below(world) == set(chain("k", 2))


def test_failed_reads_turn_it_off_and_what_is_there_is_slow() -> None:
    world, worker, namespace = start(probe_interval_ms=100)
    keys = cold(world, worker, namespace)
    world.faults = {GetObjects: DiskResult.IO_ERROR, ProbeObjects: DiskResult.IO_ERROR}
    assert world.fetch(worker, namespace, keys)[0] == "SLOW"
    assert world.health() is DiskState.OFF
    world.faults = {}
    world.tick(100)
    assert world.fetch(worker, namespace, keys) == ["HIT"] * 4


def test_the_targets_of_a_late_read_are_used_by_nobody_until_it_returns() -> None:
    world, worker, namespace = start(disk_deadline_ms=200)
    keys = cold(world, worker, namespace)
    world.hold = {GetObjects}
    assert world.acquire(worker, namespace, keys, prefix_only=False).outcomes == (Outcome.PENDING,) * 4
    world.tick(200)
    assert world.health() is DiskState.OFF and world.slots()["quarantined"] == 4
    world.finish()
    assert world.slots()["quarantined"] == 0
    world.hold = set()
    world.settle(2_000)
    assert world.fetch(worker, namespace, keys) == ["HIT"] * 4


def test_a_chunk_that_is_doomed_while_it_is_written_leaves_no_object() -> None:
    world, worker, namespace = start()
    world.hold = {PutObjects}
    world.save(worker, namespace, chain("k", 2))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))
    world.hold = set()
    world.finish()
    assert world.objects == {}


def test_a_name_is_never_given_twice() -> None:
    world, worker, namespace = start()
    dropped: set[Any] = set()
    for _ in range(3):
        world.save(worker, namespace, chain("k", 2))
        names = set(world.objects)
        assert len(names) == 2 and dropped.isdisjoint(names)
        dropped |= names
        world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))


# ------------------------------------------------------------------------------------------------ who knows what

INSIDE = {"slab_tier", "slabs", "durability", "index_room", "restart"}
"""Modules of `core/ssd/` that are behind the seam."""


def test_only_the_registry_names_a_tier() -> None:
    core = Path(kvstore.core.__file__).parent
    found = set()
    for path in core.rglob("*.py"):
        if path.parent.name == "ssd":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("kvstore.core.ssd.") and module.split(".")[-1] in INSIDE:
                found.add(str(path.relative_to(core)))
    assert found == {"store.py"}


def test_a_tier_has_no_say_in_what_the_edge_of_another_does() -> None:
    """Effects of a tier reach whoever performs them as they are: the SSD's are never asked for."""
    world, worker, namespace = start()
    seen: set[type] = set()
    perform = world._perform_all

    def note(effects: Any) -> None:
        seen.update(map(type, effects))
        perform(effects)

    world._perform_all = note  # type: ignore[method-assign]
    keys = cold(world, worker, namespace)
    world.fetch(worker, namespace, keys)
    world.ask(ev.Forget, worker, namespace, b"", keys)
    world.tick(10_000)
    assert seen >= {PutObjects, GetObjects, DropObjects}
    assert seen.isdisjoint({ev.CreateSlab, ev.WriteRecords, ev.ReadRecords, ev.WriteIndex, ev.ProbeDisk})
