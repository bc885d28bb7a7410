"""The plan that is kept up to date is what a plan made anew would be, whatever happens in which order."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import plan
from kvstore.errors import StoreError
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ActionKind, DiskState, WorkerId


class Life:
    """Two tenants, three schedulers, two namespaces each; every step is checked by the world's watch."""

    def __init__(self, seed: int, *, disk: bool = True) -> None:
        self.dice = random.Random(seed)
        limits: dict[str, Any] = {
            "segments": 4,
            "segment_bytes": 4 * PAGE,
            "prefetch_share_max": 0.5,
            "reserve_share_max": 1.0,
            "pin_share_max": 1.0,
            "batch_min": self.dice.choice((2, 24)),
            "evict_min": self.dice.choice((2, 24)),
            "hint_ttl_ms": 2_000,
        }
        self.disk = disk
        self.world = (
            DiskWorld(slabs=1, disk_alignment=512, disk_slab_bytes=4096 + 24 * 512, **limits)
            if disk
            else World(**limits)
        )
        self.workers: list[tuple[WorkerId, list[int]]] = []
        self.numbers: dict[tuple[WorkerId, int], int] = {}
        for tenant in ("alice", "alice", "bob"):
            self.join(tenant)

    def join(self, tenant: str) -> None:
        worker = self.world.join(tenant)
        opened = [self.world.open(spec(shard_bytes=100, model=model), worker) for model in ("m", "n")]
        self.workers.append((worker, opened))

    def step(self) -> None:
        dice, world = self.dice, self.world
        worker, opened = dice.choice(self.workers)
        number = dice.choice(opened)
        name = dice.choice("abcdef")
        keys = chain(name, dice.randrange(1, 7))
        action = dice.random()
        with suppress(StoreError):
            if action < 0.2:
                reserved = world.reserve(worker, number, keys)
                if reserved.reservation:
                    world.commit(worker, reserved)
            elif action < 0.25:
                found = world.acquire(worker, number, keys, prefix_only=False)
                if found.lease:
                    world.release(worker, found.lease)
            elif action < 0.35:
                known = world.store.state.sessions.by_name.get((number, name.encode()))
                keep = dice.randrange(len(known.manifest) + 1) if known else 0
                version = known.version if known else 0
                world.append(worker, number, name.encode(), keys[keep:], version=version, keep=keep)
            elif action < 0.4:
                world.ask(ev.Forget, worker, number, name.encode() if dice.random() < 0.5 else b"", keys[:2])
            elif action < 0.43:
                world.ask(ev.Fork, worker, number, name.encode(), dice.choice(b"abcdef").to_bytes(1))
            elif action < 0.75:
                self.publish(worker, number)
            elif action < 0.85:
                self.order(worker, number)
            elif action < 0.87:
                (world.kill if dice.random() < 0.5 else world.close)(worker)
                self.workers = [pair for pair in self.workers if pair[0] != worker]
                self.join(dice.choice(("alice", "bob")))
            elif action < 0.9 and self.disk:
                states = (DiskState.OK, DiskState.READ_ONLY, DiskState.OFF)
                world.store.state.disk_state = dice.choice(states)
            else:
                world.tick(dice.choice((1, 20, 20, 500)))

    def publish(self, worker: WorkerId, number: int) -> None:
        dice = self.dice
        hints = []
        for _ in range(dice.randrange(5)):
            keys = chain(dice.choice("abcdef"), dice.randrange(1, 7))
            if dice.random() < 0.3:
                keys += chain(dice.choice("abcdef"), 3)
            session = b"" if dice.random() < 0.6 else dice.choice("abcdef").encode()
            hints.append(
                ev.Hint(b"%d" % dice.randrange(12), dice.randrange(6), session, () if session else keys)
            )
        removed = tuple(b"%d" % dice.randrange(12) for _ in range(dice.randrange(3)))
        said = self.number(worker, number)
        whole = dice.random() < 0.3
        self.world.ask(ev.PublishQueue, worker, number, tuple(hints), removed, whole, number=said)

    def order(self, worker: WorkerId, number: int) -> None:
        """Hint actions, before and behind the queue."""
        dice = self.dice
        keys = chain(dice.choice("abcdef"), dice.randrange(1, 5))
        session = dice.choice("abcdef").encode() if dice.random() < 0.4 else b""
        action = ev.HintAction(
            b"%d" % dice.randrange(6),
            dice.choice(list(ActionKind)),
            session,
            () if session else keys,
            ttl_ms=dice.choice((0, 50, 1_000)),
            eta_ms=dice.choice((0, 100, 700)),
        )
        cancelled = (b"%d" % dice.randrange(6),) if dice.random() < 0.3 else ()
        self.world.ask(ev.ApplyActions, worker, number, (action,), cancelled)

    def number(self, worker: WorkerId, number: int) -> int:
        """Mostly none; else one after the other, and now and then too late or too early."""
        if self.dice.random() < 0.5:
            return 0
        last = self.numbers.get((worker, number), 0)
        self.numbers[worker, number] = last + self.dice.choice((0, 1, 1, 1, 2))
        return self.numbers[worker, number]


@pytest.mark.parametrize(("rows_max", "share"), [(1 << 19, 0.3), (20, 1.0)])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_up_to_date_is_what_is_made_anew(
    seed: int, rows_max: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`share` of the memory is for the windows, so that they end within the queue."""
    monkeypatch.setattr(plan, "PLAN_ROWS_MAX", rows_max)
    measured = plan.Planner._measured

    def narrow(planner: plan.Planner) -> plan.Memory:
        found = measured(planner)
        return plan.Memory(int(found.ahead * share), int(found.kept * share))

    monkeypatch.setattr(plan.Planner, "_measured", narrow)
    life = Life(seed)
    ranked = kept = before = behind = 0
    for _ in range(400):
        life.step()
        store = life.world.store
        store.queue.plan()
        store.queue.planner.check()
        assert not store.queue.planner.is_due or store.state.disk_state is DiskState.OFF
        ranked += bool(store.state.policy.rank)
        windows = store.state.jobs.windows.values()
        kept += any(window.edge is not None for window in windows)
        before += any(window.queued and window.queued.start for window in windows)
        behind += any(window.queued and window.queued.stop < window.kept for window in windows)
    assert ranked > 100, "the life that is lived here has no queue to speak of"
    assert kept > 10, "nor one that is longer than the windows: the test shows little"
    assert before > 10 and behind > (10 if share < 1 or rows_max > 20 else 0), (
        "no hint actions around the queue"
    )


@pytest.mark.parametrize("seed", range(2, 5))
def test_so_it_is_where_nothing_is_below_dram(seed: int) -> None:
    """What leaves DRAM, often with others, is gone, for jobs too that no window reaches."""
    life = Life(seed, disk=False)
    for _ in range(400):
        life.step()
        life.world.store.queue.plan()
        life.world.store.queue.planner.check()
