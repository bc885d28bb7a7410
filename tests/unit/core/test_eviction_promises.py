"""Whatever happens: no pinned chunk is evicted, none that a job needs while another may go, no capacity is exceeded,
and who saves makes progress."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.core import events as ev
from kvstore.core.chunks import STORED
from kvstore.errors import StoreError
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ActionKind, Hint, HintAction

CHAINS = "abcdef"
OPS = st.lists(
    st.tuples(
        st.sampled_from(("save", "save", "save", "ask", "pin", "unpin", "publish", "act", "wait")),
        st.sampled_from(CHAINS),
        st.integers(1, 6),
        st.sampled_from(CHAINS),
    ),
    max_size=20,
)
ASKED_FOR = [
    *(step for name in "abcd" for step in (("save", name, 6, "a"), ("wait", "a", 5, "a"))),
    ("ask", "a", 6, "a"), ("wait", "a", 5, "a"),
    *(step for name in "efbc" for step in (("save", name, 4, "a"), ("wait", "a", 5, "a"))),
]  # fmt: skip
"""What came because somebody asked for it is what was used longest ago, and nobody took it yet, when others save."""
ASKED_FOR_AND_QUEUED = [
    *ASKED_FOR[:10],
    ("save", "e", 4, "a"), ("wait", "a", 5, "a"), ("save", "f", 4, "a"), ("wait", "a", 5, "a"),
    ("publish", "e", 4, "f"), ("save", "b", 4, "a"), ("wait", "a", 5, "a"),
]  # fmt: skip
"""The same, and a queue needs all else."""


class Watched:
    """DRAM for 16 chunks; every step is held against what the state was before. The world checks capacities."""

    def __init__(self, policy: str, *, ssd: bool) -> None:
        limits: dict[str, Any] = {
            "eviction": policy, "lives_min": 10, "reserve_share_max": 1.0, "pin_share_max": 0.5, "ahead_slots_max": 0,
        }  # fmt: skip
        shape: dict[str, Any] = {"segments": 1, "segment_bytes": 16 * PAGE}
        self.world: World = (
            DiskWorld(slabs=2, slab_slots=12, **shape, **limits) if ssd else World(**shape, **limits)
        )
        self.worker = self.world.join()
        self.namespace = self.world.open(spec(), self.worker)
        self.held: dict[int, tuple[bytes, ...]] = {}
        """Keys by lease."""

    @property
    def state(self) -> Any:
        return self.world.store.state

    def resident(self) -> set[bytes]:
        space = self.state.namespaces[self.namespace]
        return {key for key, row in space.index.items() if self.state.is_hit(row)}

    def needed(self) -> set[bytes]:
        return {bytes(self.state.chunks.key[row]) for row in self.state.policy.rank}

    def awaited(self) -> set[bytes]:
        policy = self.state.policy
        return {
            bytes(self.state.chunks.key[row]) for row in self.state.demanded if policy.is_awaited(row)
        } & self.resident()

    def may_go(self) -> set[bytes]:
        """Evictable now, and on SSD, so that nothing has to be written before."""
        policy, chunks = self.state.policy, self.state.chunks
        dram = self.state.namespaces[self.namespace].dram
        rows = [*policy.unneeded(dram), *policy.needed(dram, limit=64)]
        return {bytes(chunks.key[row]) for row in rows if chunks.flags[row] & STORED}

    def step(self, op: str, name: str, count: int, other: str) -> None:
        before, needed, awaited, may_go = self.resident(), self.needed(), self.awaited(), self.may_go()
        dram = self.state.namespaces[self.namespace].dram
        with suppress(StoreError):
            self.perform(op, name, count, other)
        gone = before - self.resident()
        if gone & awaited and op != "unpin":  # what somebody asked for and is about to take goes last of all
            left = self.resident() & before & may_go
            assert not left - awaited, (op, gone, left)
        pinned = {key for keys in self.held.values() for key in keys}
        assert not gone & pinned, (op, gone)
        if gone & needed & self.needed():
            policy = self.state.policy
            others = (row for row in policy.unneeded(dram) if not policy.is_awaited(row))
            left = {bytes(self.state.chunks.key[row]) for row in others}
            assert not left & before, (op, gone, left)  # what was just saved came after the decision

    def perform(self, op: str, name: str, count: int, other: str) -> None:
        world, worker, namespace = self.world, self.worker, self.namespace
        keys = tuple(chain(name, count))
        match op:
            case "save":
                reserved = world.reserve(worker, namespace, keys)
                if reserved.reservation:
                    world.commit(worker, reserved)
            case "pin":
                found = world.acquire(worker, namespace, keys)
                if found.lease:
                    hits = [
                        key
                        for key, outcome in zip(keys, found.outcomes, strict=True)
                        if outcome.name == "HIT"
                    ]
                    self.held[found.lease] = tuple(hits)
            case "ask":
                world.acquire(worker, namespace, keys, wait_ms=5_000)
            case "unpin" if self.held:
                lease = sorted(self.held)[count % len(self.held)]
                del self.held[lease]
                world.release(worker, lease)
            case "publish":
                hints = tuple(
                    Hint(each.encode(), at, keys=tuple(chain(each, count)))
                    for at, each in enumerate((name, other))
                )
                world.ask(ev.PublishQueue, worker, namespace, hints, (), snapshot=True)
            case "act":
                kind = (ActionKind.PIN, ActionKind.EXPECT, ActionKind.PREFETCH, ActionKind.RETAIN)[count % 4]
                action = HintAction(other.encode(), kind, keys=keys, ttl_ms=1_000, eta_ms=50 * count)
                world.ask(ev.ApplyActions, worker, namespace, (action,), ())
            case "wait":
                world.tick(100 * count)

    def end(self) -> None:
        """All let go; then whoever saves must get his slots, if not at once, then soon."""
        for lease in list(self.held):
            self.world.release(self.worker, lease)
        self.held.clear()
        new = tuple(chain("new", 4))
        for _ in range(30):
            reserved = self.world.reserve(self.worker, self.namespace, new)
            if reserved.reservation:
                self.world.commit(self.worker, reserved)
            if self.resident() >= set(new):
                return
            self.world.tick(200)
        raise AssertionError(f"no progress: {self.state.pool}")


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
@pytest.mark.parametrize("policy", ["hints", "expected"])
@settings(deadline=None, max_examples=8)
@given(ops=OPS)
@example(ops=ASKED_FOR)
@example(ops=ASKED_FOR_AND_QUEUED)
def test_no_schedule_of_requests_breaks_what_eviction_promises(
    policy: str, ssd: bool, ops: list[tuple[str, str, int, str]]
) -> None:
    watched = Watched(policy, ssd=ssd)
    for op in ops:
        watched.step(*op)
    if (
        policy == "hints" or ssd
    ):  # without an SSD, "expected" may refuse what is worth less than what is there
        watched.end()
