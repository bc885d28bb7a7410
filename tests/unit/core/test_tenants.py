"""Tenants: nothing of one can be reached, or told from what does not exist, by another (invariant 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import Denied, NotFound, StoreError
from kvstore.sim.world import World, chain, spec
from kvstore.types import LeaseId, NamespaceId, ReservationId, SegmentId, StagedPiece, WorkerId

ANYTHING: list[tuple[str, Callable[[NamespaceId], tuple[Any, ...]]]] = [
    ("Match", lambda n: (n, chain("k", 1))),
    ("Acquire", lambda n: (n, chain("k", 1))),
    ("Reserve", lambda n: (n, chain("k", 1))),
    ("ReportLoad", lambda n: (n, chain("k", 1))),
    ("GetSession", lambda n: (n, b"s")),
    ("UpdateSession", lambda n: (n, b"s", 1, 0, ())),
    ("Truncate", lambda n: (n, b"s", 1, 0, 4)),
    ("Fork", lambda n: (n, b"s", b"t")),
    ("Forget", lambda n: (n, b"s", chain("k", 1))),
    ("Explain", lambda n: (n, b"s", chain("k", 1))),
]


def two_tenants() -> tuple[World, WorkerId, WorkerId, NamespaceId, NamespaceId]:
    """Alice has two chunks, a session, a lease and a reservation; Bob the same model and nothing in it."""
    world = World()
    alice, bob = world.join("alice", group="engine"), world.join("bob", group="engine")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    world.save(alice, hers, chain("k", 2))
    world.append(alice, hers, b"s", chain("k", 2))
    world.acquire(alice, hers, chain("k", 2))
    world.reserve(alice, hers, chain("r", 1))
    return world, alice, bob, hers, his


@pytest.mark.parametrize(("kind", "arguments"), ANYTHING, ids=[name for name, _ in ANYTHING])
def test_a_namespace_of_another_tenant_is_not_told_from_a_missing_one(
    kind: str, arguments: Callable[[NamespaceId], tuple[Any, ...]]
) -> None:
    world, alice, bob, hers, _ = two_tenants()
    missing = NamespaceId(99)
    errors = []
    for namespace in (hers, missing):
        with pytest.raises(NotFound) as error:
            world.ask(getattr(ev, kind), bob, *arguments(namespace))
        errors.append(str(error.value).replace(str(namespace), "N"))
    assert errors[0] == errors[1]
    assert world.outcomes(alice, hers, chain("k", 2)) == ["HIT", "HIT"]
    assert world.session(alice, hers, b"s").version == 1


def test_the_same_model_shares_nothing_between_tenants() -> None:
    world, alice, bob, hers, his = two_tenants()
    assert hers != his
    salts = [world.ask(ev.Open, worker, spec()).salt for worker in (alice, bob)]
    assert salts[0] != salts[1]
    assert world.outcomes(bob, his, chain("k", 2)) == ["NEVER_SEEN"] * 2
    assert world.session(bob, his, b"s").version == 0
    world.save(bob, his, chain("k", 2))
    segments = [
        {extent.segment for extent in world.acquire(worker, namespace, chain("k", 2)).extents}
        for worker, namespace in ((alice, hers), (bob, his))
    ]
    assert not segments[0] & segments[1]


def test_leases_and_reservations_of_another_tenant_are_unknown() -> None:
    world, alice, bob, _, _ = two_tenants()
    (lease,) = world.store.state.leases.leases
    (reservation,) = world.store.state.reservations
    for theirs, missing in ((lease, LeaseId(99)),):
        assert world.ask(ev.Release, bob, (theirs,)) == world.ask(ev.Release, bob, (missing,)) == ev.Done(0)
        assert world.ask(ev.Renew, bob, (theirs,)) == world.ask(ev.Renew, bob, (missing,)) == ev.Renewed((0,))
    assert (
        world.ask(ev.Abort, bob, (reservation,))
        == world.ask(ev.Abort, bob, (ReservationId(99),))
        == ev.Done(0)
    )
    texts = []
    for number in (reservation, ReservationId(99)):
        with pytest.raises(NotFound) as error:
            world.ask(ev.Commit, bob, number, (StagedPiece(0, 0),))
        texts.append(str(error.value).replace(str(number), "N"))
    assert texts[0] == texts[1]
    assert lease in world.store.state.leases.leases and reservation in world.store.state.reservations
    # Also when the reservation has ended.
    saving = world.store.state.reservations[reservation]
    world.ask(ev.Abort, alice, (saving.id,))
    with pytest.raises(NotFound) as error:
        world.ask(ev.Commit, bob, reservation, (StagedPiece(0, 0),))
    assert str(error.value).replace(str(reservation), "N") == texts[0]


def test_segments_of_another_tenant_cannot_be_mapped() -> None:
    world, alice, bob, _, _ = two_tenants()
    every = tuple(segment.id for segment in world.store.state.pool.segments)
    assert len(every) == 8 and world.map(bob, every) == ()
    assert world.map(alice, every) == tuple(sorted(world.mapped[alice]))
    assert world.map(bob, (SegmentId(99),)) == ()
    world.ask(ev.SegmentsUnmapped, bob, every)  # says nothing about Alice
    assert all(alice in world.store.state.pool.by_id[segment].holders for segment in world.mapped[alice])


def test_segments_are_only_for_who_opened_the_namespace() -> None:
    world, _, _, hers, _ = two_tenants()
    sibling = world.join("alice")
    every = tuple(segment.id for segment in world.store.state.pool.segments)
    assert world.map(sibling, every) == ()
    world.open(spec(), sibling)
    assert len(world.map(sibling, every)) == 1
    assert hers in world.store.state.workers[sibling].opened


def test_a_tenant_sees_its_own_stats_and_an_admin_everybody_s() -> None:
    world, alice, bob, hers, his = two_tenants()
    admin = world.join("operator", admin=True)

    def seen(worker: WorkerId) -> tuple[set[int], set[int], bool]:
        values = world.ask(ev.GetStats, worker).values
        return (
            {row["namespace_id"] for row in values["namespaces"]},
            {row["namespace_id"] for row in values["pools"]},
            bool(values["counters"] or values["gauges"]),
        )

    assert seen(alice) == ({hers}, {hers}, False)
    assert seen(bob) == ({his}, set(), False)
    assert seen(admin) == ({hers, his}, {hers}, True)


def test_stats_add_up() -> None:
    world, alice, _, hers, _ = two_tenants()
    world.acquire(alice, hers, chain("nothing", 1))
    values = world.ask(ev.GetStats, alice).values
    (pool,) = values["pools"]
    assert pool["free"] + pool["reserved"] + pool["ready"] + pool["quarantined"] == pool["capacity"] == 16
    assert (pool["ready"], pool["reserved"]) == (2, 1)
    (row,) = values["namespaces"]
    assert (row["chunks"], row["incomplete"], row["pinned_bytes"], row["sessions"]) == (2, 1, 2 * 4096, 1)
    assert (row["lookups"], row["hits"], row["by_reason"]) == (3, 2, {"none": 2, "never_seen": 1})
    assert values["arena"]["assigned_bytes"] * 8 == values["arena"]["bytes"] == values["arena"]["ready_bytes"]


def test_a_tenant_lists_its_own_sessions_and_an_admin_everybody_s() -> None:
    world, alice, bob, hers, his = two_tenants()
    world.append(bob, his, b"b", ())
    admin = world.join("operator", admin=True)

    def listed(worker: WorkerId, *about: Any) -> tuple[list[bytes], int]:
        answer = world.ask(ev.ListSessions, worker, *about)
        return [row.session for row in answer.rows], answer.total

    assert listed(alice) == ([b"s"], 1)
    assert listed(bob) == ([b"b"], 1)
    assert listed(bob, hers) == ([], 0) == listed(bob, NamespaceId(99))
    assert listed(admin) == ([b"b", b"s"], 2)
    assert listed(admin, hers) == ([b"s"], 1)


def test_an_admin_may_look_but_gets_no_bytes_of_what_it_has_not_opened() -> None:
    world, _, _, hers, _ = two_tenants()
    admin = world.join("operator", admin=True)
    assert world.outcomes(admin, hers, chain("k", 2)) == ["HIT", "HIT"]
    assert world.session(admin, hers, b"s").version == 1
    assert len(world.ask(ev.Explain, admin, hers, b"s").chunks) == 2
    for kind, arguments in ((ev.Acquire, (chain("k", 2),)), (ev.Reserve, (chain("k", 3),))):
        with pytest.raises(Denied, match="only for workers that opened it"):
            world.ask(kind, admin, hers, *arguments)
    assert world.map(admin, tuple(segment.id for segment in world.store.state.pool.segments)) == ()
    assert world.ask(ev.Forget, admin, hers, b"s").count == 3  # the session and what it alone named


def test_errors_show_no_more_than_the_caller_sent() -> None:
    world, _, bob, hers, _ = two_tenants()
    with pytest.raises(StoreError) as error:
        world.ask(ev.GetSession, bob, hers, b"s")
    assert "alice" not in str(error.value) and "llama" not in str(error.value)
