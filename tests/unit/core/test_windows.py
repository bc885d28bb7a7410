"""How far windows reach: what leases pin is not for prefetches, idle tenants lend their parts, pins end no window."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import events as ev
from kvstore.core.requests import plan
from kvstore.core.requests.plan import Level, Memory, Planner
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ActionKind, Hint, NamespaceId, WorkerId

ENDLESS = plan.ENDLESS
_names = count()


def planner_of(world: World) -> Planner:
    return world.store.queue.planner


def level(total: int, needs: dict[str, int], shares: dict[str, float] | None = None) -> Level:
    world = World(segments=1, segment_bytes=16 * PAGE)
    world.store.state.jobs.shares.update(shares or {})
    return planner_of(world)._level(total, needs)


# ---------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize(
    ("needs", "wanted"),
    [
        ({"a": 500, "b": 500}, {"a": 50, "b": 50}),
        ({"a": 10, "b": 500}, {"a": 90, "b": 90}),
        ({"a": 10, "b": 20, "c": 500, "d": 500}, {"c": 35, "d": 35}),
        ({"a": 0, "b": 500}, {"b": 100}),
        ({"a": ENDLESS}, {"a": 100}),
        ({"a": 30, "b": 30}, {"a": 70, "b": 70}),
    ],
)
def test_who_needs_less_lends_the_rest(needs: dict[str, int], wanted: dict[str, int]) -> None:
    found = level(100, needs)
    assert {tenant: found.of(tenant) for tenant in wanted} == wanted


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 10_000),
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=2), st.integers(0, 5_000) | st.just(ENDLESS), max_size=8
    ),
)
def test_levels_share_all_and_no_more(total: int, needs: dict[str, int]) -> None:
    """Nobody gets less than an equal part of all, unless he needs no more; what all get fits."""
    found = level(total, needs)
    given_ = {tenant: min(need, found.of(tenant)) for tenant, need in needs.items()}
    assert sum(given_.values()) <= total
    sharing = [tenant for tenant, need in needs.items() if need]
    for tenant in sharing:
        assert given_[tenant] >= min(needs[tenant], total // len(sharing))
    if sum(needs.values()) >= total and sharing:
        assert total - sum(given_.values()) < len(sharing), (
            "but for what cannot be divided nothing is left over"
        )


def test_what_a_record_takes_is_lent_to_the_others() -> None:
    found = level(100, {"honest": ENDLESS, "liar": ENDLESS}, {"liar": 0.1})
    assert (found.of("liar"), found.of("honest")) == (5, 95)


# ---------------------------------------------------------------------------------------------------------- worlds


class Queues:
    """A DRAM of 64 chunks, and tenants with conversations of four chunks each."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World(
            segments=4, segment_bytes=16 * PAGE, reserve_share_max=1.0, pin_share_max=1.0
        )
        self.tenants: dict[str, tuple[WorkerId, NamespaceId]] = {}

    def tenant(self, name: str) -> tuple[WorkerId, NamespaceId]:
        if name not in self.tenants:
            worker = self.world.join(tenant=name)
            self.tenants[name] = worker, self.world.open(spec(), worker)
        return self.tenants[name]

    def save(self, tenant: str, name: str, chunks: int = 4) -> tuple[bytes, ...]:
        worker, namespace = self.tenant(tenant)
        keys = chain(name, chunks)
        self.world.commit(worker, self.world.reserve(worker, namespace, keys))
        return tuple(keys)

    def publish(self, tenant: str, names: list[str], chunks: int = 4) -> ev.QueueAccepted:
        worker, namespace = self.tenant(tenant)
        hints = tuple(
            Hint(name.encode(), at, keys=tuple(chain(name, chunks))) for at, name in enumerate(names)
        )
        found: ev.QueueAccepted = self.world.ask(ev.PublishQueue, worker, namespace, hints, (), snapshot=True)
        return found

    def ahead(self, tenant: str) -> int:
        return self.world.store.queue.reach(tenant)[0]

    def kept(self, tenant: str) -> int:
        return self.world.store.queue.reach(tenant)[1]


def test_what_leases_pin_is_not_for_prefetches() -> None:
    queues = Queues()
    names = [f"c{number}" for number in range(12)]
    for name in names:
        queues.save("a", name)
    queues.publish("a", names)
    assert queues.ahead("a") == 12, "48 of 64 chunks, four fifths are for prefetches"
    worker, namespace = queues.tenant("a")
    held = [queues.world.acquire(worker, namespace, chain(name, 4)) for name in names[:10]]
    queues.world.tick(1_000)
    assert queues.ahead("a") == 6, "24 are left"
    assert queues.kept("a") == 12, "what is pinned is there all the same"
    for one in held:
        queues.world.release(worker, one.lease)
    queues.world.tick(1_000)
    assert queues.ahead("a") == 12


def test_a_tenant_with_a_short_queue_lends_its_part() -> None:
    queues = Queues()
    for tenant, conversations in (("a", 10), ("b", 2)):
        for number in range(conversations):
            queues.save(tenant, f"{tenant}{number}")
    queues.publish("b", ["b0"])
    queues.publish("a", [f"a{number}" for number in range(10)])
    assert queues.ahead("b") == 1
    assert queues.ahead("a") == 10, "47 of 51 chunks: half of them would have been six conversations"


def test_a_pin_that_is_larger_than_a_window_ends_it_not() -> None:
    queues = Queues()
    for tenant in "abcd":
        for number in range(3):
            queues.save(tenant, f"{tenant}{number}")
    keys = queues.save("a", "pinned", 14)
    worker, namespace = queues.tenant("a")
    action = ev.HintAction(b"pin", ActionKind.PIN, b"", keys, ttl_ms=60_000, eta_ms=0)
    assert queues.world.ask(ev.ApplyActions, worker, namespace, (action,), ()).results[0].name in (
        "ACCEPTED",
        "CLIPPED",
    )
    for tenant in "bcd":
        queues.publish(tenant, [f"{tenant}{number}" for number in range(3)])
    queues.publish("a", [f"a{number}" for number in range(3)])
    assert (queues.ahead("a"), queues.kept("a")) == (3, 3)


def test_what_is_in_both_tiers_counts_once() -> None:
    queues = Queues(
        DiskWorld(
            segments=4,
            segment_bytes=16 * PAGE,
            slabs=4,
            slab_slots=16,
            reserve_share_max=1.0,
            pin_share_max=1.0,
        )
    )
    before = planner_of(queues.world)._measured()
    names = [f"c{number}" for number in range(12)]
    for name in names:
        queues.save("a", name)
    queues.world.tick(1_000)
    queues.publish("a", names)
    queues.world.tick(1_000)
    after: Memory = planner_of(queues.world)._measured()
    assert before.kept - after.kept == 48 * PAGE
