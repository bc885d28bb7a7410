"""Random schedules over all tiers: ops that end late, badly and in any order, rot, failing syncs, crashes.

What a run checks is in `World` and `DiskWorld`: the content of every hit and of every chunk that is said to be ready;
that a slot is written by nobody while it may be read; that the index names only what lies on the medium; that whatever
was answered as durable is there after each crash, until it is dropped for a reason; that nobody waits longer than
agreed; and the core's own integrity after each step. In the end, with all faults healed, everything is stored, indexed
and quiet, and comes back after one more crash.

A run that fails prints its seed. `python -m tests.unit.core.test_world_disk FIRST COUNT [STEPS]` runs many.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import QUEUED
from kvstore.sim.disk import DISK_OPS, DiskWorld
from kvstore.types import DiskPlace, DiskResult, DiskState, NamespaceId, Protection, Wait, WorkerId

from .test_fuzz import Fuzz, drawn

STEPS = 500
EVERY_SEED = os.environ.get("KVSTORE_DISK_SEED")
SEEDS = [int(EVERY_SEED)] if EVERY_SEED else ["fresh-1", "fresh-2", "fresh-3"]
HELD = (ev.RewriteSlots, ev.CopyIn, ev.FillSlots, ev.Checksum, ev.MoveSlots, ev.CreateSegment, *DISK_OPS)
BAD = (DiskResult.IO_ERROR, DiskResult.NO_SPACE, DiskResult.CORRUPT)


class DiskFuzz(Fuzz):
    world: DiskWorld

    def __init__(self, seed: int, protection: Protection) -> None:
        super().__init__(seed, protection)
        self.totals: Counter[str] = Counter()
        self.world.chance = self.random
        self.jobs = 0

    def new_world(self, **limits: Any) -> DiskWorld:
        return DiskWorld(
            **limits,
            slabs=self.random.choice((2, 4, 8)),
            slab_slots=self.random.choice((3, 6, 12)),
            disk_deadline_ms=400,
            durable_within_ms=self.random.choice((200, 2_000)),
            probe_interval_ms=100,
            hint_ttl_ms=2_000,
            session_ttl_ms=self.random.choice((0, 20_000)),
            eviction=self.random.choice(("hints", "hints", "lru", "fifo")),
            hints_per_worker_max=6,
        )

    # -------------------------------------------------------------------------------------------------------- steps

    def do_hold(self) -> None:
        self.world.hold = {kind for kind in HELD if self.random.random() < 0.4}

    def do_finish(self) -> None:
        """Sometimes everything, sometimes some, in any order, now and then with a fault."""
        while self.world.held and self.random.random() < 0.9:
            held = self.random.choice(self.world.held)
            fails = ""
            if self.random.random() < 0.05:
                fails = self.random.choice(BAD).name if isinstance(held, DISK_OPS) else "as told"
            if fails == "CORRUPT" and isinstance(held, (ev.WriteRecords, ev.CreateSlab, ev.ProbeDisk)):
                fails = "IO_ERROR"
            spoil = int(isinstance(held, (ev.MoveSlots, ev.RewriteSlots)) and self.random.random() < 0.1)
            self.world.finish(held, fails=fails, spoil=spoil)

    def do_commit_durably(self) -> None:
        self.do_reserve()
        if self.saves and self.saves[-1][0] in self.workers:
            worker, reserved = self.saves.pop()
            self.variant += 1
            staged = self.world.write(reserved, self.variant)
            self.world._let_go(reserved.reservation)
            self.ask(ev.Commit, worker, reserved.reservation, staged, Wait.DURABLE)

    def do_raise(self) -> None:
        """Ask for some of what is on SSD alone."""
        worker, namespace = self.somebody()
        state = self.world.store.state
        cold = [
            state.chunks.key[row]
            for row in state.policy.victims(state.namespaces[namespace].ssd, 1_000)
            if state.chunks.namespace[row] == namespace
        ]
        if cold:
            keys = self.random.sample(cold, min(len(cold), self.random.randrange(1, 6)))
            self.world.acquire(worker, namespace, keys, wait_ms=100, prefix_only=self.random.random() < 0.3)

    def do_hint_cold(self) -> None:
        worker, namespace = self.somebody()
        state = self.world.store.state
        cold = [
            state.chunks.key[row]
            for row in state.policy.victims(state.namespaces[namespace].ssd, 1_000)
            if state.chunks.namespace[row] == namespace
        ]
        if cold:
            keys = tuple(self.random.sample(cold, min(len(cold), self.random.randrange(1, 6))))
            self.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"cold", 0, keys=keys),), snapshot=False)

    def do_faults(self) -> None:
        """The disk falls ill, or is well again."""
        self.world.failing_syncs = self.random.random() < 0.3
        if self.random.random() < 0.7:
            self.world.faults.clear()
        elif self.random.random() < 0.7:
            kinds = [kind for kind in DISK_OPS if self.random.random() < 0.3]
            self.world.faults = {kind: self.random.choice(BAD[:2]) for kind in kinds}

    def do_rot(self) -> None:
        slots = {**self.world.platter.synced, **self.world.platter.cached}
        if slots and self.random.random() < 0.1:
            slab, slot = self.random.choice(list(slots))
            self.world.rot(DiskPlace(slab, slot, slots[slab, slot].generation))

    def do_hints(self) -> None:
        worker, namespace = self.somebody()
        hints = []
        for _ in range(self.random.randrange(5)):
            self.jobs = (self.jobs + 1) % 12
            named: dict[str, Any] = {"keys": self.keys()}
            if self.random.random() < 0.5:
                named = {"session": self.some_session(worker, namespace)}
            hints.append(ev.Hint(b"%d" % self.jobs, self.random.randrange(6), **named))
        removed = tuple(b"%d" % self.random.randrange(12) for _ in range(self.random.randrange(3)))
        self.ask(
            ev.PublishQueue, worker, namespace, tuple(hints), removed=removed, snapshot=self.random.random() < 0.5
        )  # fmt: skip

    def do_crash(self) -> None:
        if self.random.random() < 0.05:
            self.crash()

    def crash(self) -> None:
        self.note()
        self.world.crash(self.random, power=self.random.random() < 0.7)
        self.fills.clear()
        self.totals["crashes"] += 1
        self.totals["chunks_restored"] += self.world.restored.chunks
        self.totals["sessions_restored"] += self.world.restored.sessions
        self.workers.clear()
        self.saves.clear()

    def note(self) -> None:
        self.totals.update(self.world.counters)
        self.totals["promised"] += len(self.world.promised)

    # ------------------------------------------------------------------------------------------------------ the end

    def settle(self) -> None:
        """Healed, everything that can be is on SSD, indexed, and nothing is under way; so a crash loses none of it."""
        world = self.world
        world.faults.clear()
        world.failing_syncs = False
        world.hold = set()
        while world.held:
            world.finish(self.random.choice(world.held))
        self.check_answered()
        self.note()
        super().settle()
        for _ in range(100):
            world.tick(200)
        state, transfers, tier = world.store.state, world.store.transfers, world.store.cold_tier
        durability, slabs = tier.durability, tier.slabs
        assert world.health() is DiskState.OK, transfers
        assert not (transfers.writes or transfers.reads or transfers.probe), transfers
        assert not (durability.index or slabs.creating or durability.waits), transfers
        assert not (transfers.demanded or transfers.foreseen), transfers
        assert slabs.emptying is None and not slabs.retiring, transfers
        assert not (state.dirty_chunks or state.dirty_sessions or durability.deleted_namespaces), transfers
        queued = [row for row, flags in enumerate(state.chunks.flags) if flags & QUEUED]
        assert state.disk_full or not queued, (transfers, queued)
        stored = {where for where in world.platter.chunks if self.is_on_disk(*where)}
        assert (
            len(stored)
            == len(world.platter.chunks)
            == sum(slab.counts[2] for slab in state.ssd_slots.segments) - self.extra_shards()
        ), transfers
        world.promised |= {
            (NamespaceId(where[0]), where[1])
            for where, chunk in world.platter.chunks.items()
            if not world.platter.is_rotten(chunk)
        }
        world.crash(self.random, power=True)
        self.read_everything()

    def read_everything(self) -> None:
        """All that was restored of an epoch that is served comes back with its bytes (`World` compares them)."""
        world = self.world
        for number, record in world.platter.namespaces.items():
            namespace = world.store.state.namespaces[NamespaceId(number)]
            if namespace.retired:
                continue
            worker = world.join(record.tenant)
            assert world.open(record.spec, worker) == number
            for key in [key for of, key in world.platter.chunks if of == number]:
                # What lay in the cache over a slot may have been lost since, and the old owner's bytes are back.
                wanted = ["HIT"] if (number, key) in world.promised else ["HIT", "CORRUPT"]
                found = world.fetch(worker, NamespaceId(number), (key,), tries=50)
                assert found[0] in wanted, (number, key, found, world.store.transfers)
            world.kill(worker)

    def is_on_disk(self, number: int, key: Any) -> bool:
        return self.world.where(NamespaceId(number), (key,))[0] in ("ssd", "dram+ssd")

    def extra_shards(self) -> int:
        """Slots beyond one for each chunk in the index."""
        return sum(len(chunk.places) - 1 for chunk in self.world.platter.chunks.values())

    def check_answered(self) -> None:
        """Every fill and commit of a living worker has its answer, however it ended."""
        world = self.world
        for _ in range(20):
            world.tick(1_000)
        for (worker, request), event in world._asked.items():
            if isinstance(event, (ev.Fill, ev.Commit)) and WorkerId(worker) in self.workers:
                assert (worker, request) in world.answers, event


def run(seed: int, protection: Protection, steps: int = STEPS) -> DiskFuzz:
    fuzz = DiskFuzz(seed, protection)
    fuzz.run(steps)
    return fuzz


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("protection", list(Protection))
def test_random_schedules_over_all_tiers(seed: int | str, protection: Protection) -> None:
    seed = drawn(seed)
    print(f"KVSTORE_DISK_SEED={seed} .venv/bin/pytest tests/unit/core/test_world_disk.py")
    run(seed, protection)


def test_the_schedules_reach_what_they_are_for() -> None:
    """A canary: schedules in which nothing is stored, raised, degraded, corrupt or restored test nothing."""
    wanted = (
        *("chunks_stored", "chunks_demoted", "chunks_promoted_on_demand", "chunks_promoted_ahead"),
        *("chunks_evicted_from_ssd", "chunks_corrupt", "index_transactions", "index_errors"),
        *("ssd_write_errors", "ssd_reads_late", "ssd_degraded_read_only", "ssd_degraded_off", "ssd_healed"),
        *("crashes", "chunks_restored", "sessions_restored", "promised", "hints_received"),
        *("scrub_records", "chunks_recalled", "disk_slots_quarantined", "slots_returned"),
    )
    totals: Counter[str] = Counter()
    for seed in range(40):
        totals += run(seed, Protection.SEALED).totals
        if all(totals[name] for name in wanted):
            return
    pytest.fail(f"never: {[name for name in wanted if not totals[name]]}")


def main(first: int, count: int, steps: int = STEPS) -> int:
    """Runs seeds one after the other; says which fail and goes on. Exit status: whether any did."""
    totals: Counter[str] = Counter()
    failed = []
    began = time.monotonic()
    for seed in range(first, first + count):
        for protection in Protection:
            try:
                totals += run(seed, protection, steps).totals
            except Exception:
                failed.append(seed)
                print(f"KVSTORE_DISK_SEED={seed} ({protection.value}, {steps} steps) fails:", flush=True)
                traceback.print_exc(limit=-4)
    print(f"{count} seeds in {time.monotonic() - began:.0f} s, {len(failed)} failures: {failed}")
    print(dict(sorted(totals.items())))
    return len(failed)


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
