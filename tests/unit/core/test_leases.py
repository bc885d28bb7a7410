"""Leases: renewal, expiry, revocation, and the engine group that they belong to."""

from __future__ import annotations

from kvstore.core import events as ev
from kvstore.core.lease import LeaseBook
from kvstore.core.workers import EngineGroup
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import LeaseId, NamespaceId, Reason, WorkerId


def full(world: World, workers: list[WorkerId]) -> NamespaceId:
    """An arena of 8 pages, half of it pinned by the first worker's lease 1, the rest evictable."""
    namespace = world.open(spec(), *workers)
    world.save(workers[0], namespace, chain("pinned", 4))
    world.save(workers[0], namespace, chain("idle", 4))
    assert world.acquire(workers[0], namespace, chain("pinned", 4)).lease == 1
    return namespace


def small(*, revoke_grace_ms: int = 500) -> World:
    return World(
        segments=1,
        segment_bytes=8 * PAGE,
        reserve_share_max=1.0,
        lease_ttl_ms=1_000,
        revoke_grace_ms=revoke_grace_ms,
    )


LEASE = LeaseId(1)


def test_a_lease_holds_its_pins_until_it_is_released() -> None:
    world = small()
    worker = world.join()
    namespace = full(world, [worker])
    assert world.reserve(worker, namespace, chain("new", 5)).results[4].name == "FULL"
    assert world.release(worker, LEASE) == 1
    assert world.release(worker, LEASE) == 0
    assert world.reserve(worker, namespace, chain("more", 1)).results[0].name == "GRANTED"


def test_an_expired_lease_keeps_its_pins_while_nobody_wants_the_slots() -> None:
    world = small()
    worker = world.join()
    namespace = full(world, [worker])
    world.tick(60_000)
    world.save(worker, namespace, chain("new", 4))  # there are idle ones to evict
    assert world.outcomes(worker, namespace, chain("pinned", 4)) == ["HIT"] * 4
    assert world.take(ev.LeasesRevoked) == []
    assert LEASE in world.store.state.leases.leases


def test_an_expired_lease_is_revoked_when_its_slots_are_wanted_after_its_grace() -> None:
    world = small()
    worker = world.join()
    namespace = full(world, [worker])
    extents = world.leases[LEASE][1]
    world.tick(1_499)
    assert [r.name for r in world.reserve(worker, namespace, chain("new", 5)).results] == ["GRANTED"] * 4 + [
        "FULL"
    ]
    assert world.take(ev.LeasesRevoked) == []
    world.tick(1)
    world.save(worker, namespace, chain("more", 2))
    assert world.take(ev.LeasesRevoked) == [ev.LeasesRevoked(worker, (LEASE,))]
    assert world.store.state.counters["leases_revoked"] == 1
    # Loads from the slots that were given away are void; the worker is told by the generation, whatever it missed.
    loads = [world.load(worker, extent) for extent in extents]
    assert loads[2:] == [None, None] and None not in loads[:2]


def test_a_renewed_lease_does_not_expire() -> None:
    world = small()
    worker = world.join()
    namespace = full(world, [worker])
    for _ in range(10):
        world.tick(999)
        assert world.ask(ev.Renew, worker, (LEASE,)).ttl_ms == (1_000,)
    assert world.reserve(worker, namespace, chain("new", 5)).results[4].name == "FULL"


def test_an_expired_lease_is_not_renewed() -> None:
    world = small()
    worker = world.join()
    full(world, [worker])
    world.tick(999)
    assert world.ask(ev.Renew, worker, (LEASE,), 500).ttl_ms == (500,)
    world.tick(500)
    assert world.ask(ev.Renew, worker, (LEASE,)).ttl_ms == (0,)
    assert world.release(worker, LEASE) == 1, "it can still say that it is done"


def test_renewing_never_shortens() -> None:
    world = small()
    worker = world.join()
    full(world, [worker])
    assert world.ask(ev.Renew, worker, (LEASE,), 10).ttl_ms == (1_000,)
    world.tick(999)
    assert world.ask(ev.Renew, worker, (LEASE,), 10).ttl_ms == (10,)


def test_the_lease_that_expired_first_is_revoked_first() -> None:
    world = World(
        segments=1, segment_bytes=8 * PAGE, revoke_grace_ms=0, reserve_share_max=1.0, pin_share_max=1.0
    )
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 8))
    long = world.acquire(worker, namespace, chain("k", 8)[:4], ttl_ms=2_000).lease
    short = world.acquire(worker, namespace, chain("k", 8)[4:], ttl_ms=1_000).lease
    world.ask(ev.Renew, worker, (short,), 3_000)
    world.tick(3_000)
    world.save(worker, namespace, chain("new", 1))
    assert world.take(ev.LeasesRevoked) == [ev.LeasesRevoked(worker, (long,))]
    world.save(worker, namespace, chain("new", 8)[1:])
    assert world.take(ev.LeasesRevoked) == [ev.LeasesRevoked(worker, (short,))]


def test_any_member_may_renew_and_release_and_nobody_else() -> None:
    world = small()
    worker, rank, other = world.join(group="engine"), world.join(group="engine", rank=1), world.join()
    full(world, [worker, rank, other])
    assert world.ask(ev.Renew, rank, (LEASE,)).ttl_ms == (1_000,)
    assert world.ask(ev.Renew, other, (LEASE, LeaseId(77))).ttl_ms == (0, 0)
    assert world.release(other, LEASE, LeaseId(77)) == 0
    assert world.release(rank, LEASE) == 1


def test_groups_of_the_same_name_in_two_tenants_are_two() -> None:
    world = small()
    worker, other = world.join("alice", group="engine"), world.join("bob", group="engine")
    full(world, [worker])
    assert world.release(other, LEASE) == 0


def test_a_worker_that_names_no_group_shares_its_leases_with_nobody() -> None:
    world = small()
    worker = world.join()
    others = [world.join(group=name) for name in ("", f"worker-{worker}", f"only {worker}", str(worker))]
    full(world, [worker, *others])
    for other in others:
        assert world.ask(ev.Release, other, (LEASE,)).count == 0


def test_all_members_are_told_of_a_revocation() -> None:
    world = small(revoke_grace_ms=0)
    worker, rank = world.join(group="engine"), world.join(group="engine", rank=1)
    namespace = full(world, [worker, rank])
    world.tick(1_000)
    world.save(worker, namespace, chain("new", 5))
    assert sorted(push.worker for push in world.take(ev.LeasesRevoked)) == [worker, rank]


def test_a_lease_of_a_group_outlives_the_member_that_took_it() -> None:
    world = small()
    worker, rank = world.join(group="engine"), world.join(group="engine", rank=1)
    namespace = full(world, [worker, rank])
    world.kill(worker)
    assert world.reserve(rank, namespace, chain("new", 5)).results[4].name == "FULL"
    assert world.ask(ev.Renew, rank, (LEASE,)).ttl_ms == (1_000,)


def test_a_lease_ends_with_the_last_member_of_its_group() -> None:
    world = small()
    worker, rank, other = world.join(group="engine"), world.join(group="engine", rank=1), world.join()
    namespace = full(world, [worker, rank, other])
    world.kill(worker)
    world.kill(rank)
    assert world.store.state.leases.leases == {}
    assert world.store.state.groups == {}
    assert [r.name for r in world.reserve(other, namespace, chain("new", 8)).results] == ["GRANTED"] * 8


def test_a_forgotten_chunk_stays_readable_for_who_reads_it_already() -> None:
    world = small()
    worker, other = world.join(), world.join()
    namespace = full(world, [worker, other])
    extents = world.leases[LEASE][1]
    world.ask(ev.Forget, other, namespace, b"", chain("pinned", 4))
    assert world.outcomes(other, namespace, chain("pinned", 4)) == ["FORGOTTEN"] * 4
    assert world.acquire(other, namespace, chain("pinned", 4)).lease == 0
    assert None not in [world.load(worker, extent) for extent in extents]
    assert world.slots()["ready"] == 8
    world.release(worker, LEASE)
    assert world.slots()["ready"] == 4
    assert [world.load(worker, extent) for extent in extents] == [None] * 4


def test_hits_of_a_quota_that_is_full_are_misses_with_a_reason() -> None:
    world = small()
    worker = world.join()
    namespace = full(world, [worker])
    acquired = world.acquire(worker, namespace, chain("pinned", 4) + chain("idle", 1))
    assert acquired.reasons[-1] is Reason.QUOTA


def test_what_is_remembered_of_expiries_is_bounded_by_open_leases() -> None:
    book = LeaseBook()
    group = EngineGroup("alice", "engine")
    kept = book.open(group, WorkerId(1), NamespaceId(1), 10)
    for now in range(100_000):
        book.renew(kept, now + 10_000)
        book.close(book.open(group, WorkerId(1), NamespaceId(1), now + 10_000))
    assert len(book._by_expiry) < 5_000
    assert book.expire(100_000) == 0
    assert book.expire(109_999) == 1
    assert kept.expired
