"""Bounds that the other files do not reach: ghosts, rows, what fits at all; and what Open refuses."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.errors import BadRequest, Unsupported
from kvstore.layout import GroupKind, GroupSpec
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import Reason


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    world = World(ghosts_max=3)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 5))
    for key in chain("k", 5):
        world.ask(ev.Forget, worker, namespace, b"", (key,))
    assert world.outcomes(worker, namespace, chain("k", 5)) == ["NEVER_SEEN"] * 2 + ["FORGOTTEN"] * 3
    assert world.store.state.chunks.rows_used == 3


def test_no_ghosts_at_all_is_a_bound_too() -> None:
    world = World(ghosts_max=0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 5))
    world.append(worker, namespace, b"s", chain("k", 1))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 5))
    assert world.outcomes(worker, namespace, chain("k", 5)) == ["FORGOTTEN"] + ["NEVER_SEEN"] * 4
    world.ask(ev.Forget, worker, namespace, b"s")
    assert world.store.state.chunks.rows_used == 0


def test_ghosts_that_a_manifest_names_stay_until_it_goes() -> None:
    world = World(ghosts_max=1)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    world.append(worker, namespace, b"s", chain("k", 3))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 4))
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["FORGOTTEN"] * 4
    world.append(worker, namespace, b"s", (), version=1)
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["NEVER_SEEN"] * 2 + [
        "FORGOTTEN",
        "NEVER_SEEN",
    ]


def test_chunks_are_bounded_and_a_new_one_is_full() -> None:
    world = World(chunks_max=3)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 5))
    assert [result.name for result in reserved.results] == ["GRANTED"] * 3 + ["FULL"] * 2
    world.abort(worker, reserved)
    world.save(worker, namespace, chain("n", 3))


def test_reasons_of_misses() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    world.tick(1)
    world.save(worker, namespace, chain("n", 1))
    acquired = world.acquire(worker, namespace, chain("k", 4), prefix_only=False)
    assert sorted(acquired.reasons) == [Reason.NONE] * 2 + [Reason.EVICTED] + [Reason.QUOTA]
    found = world.store.state.namespaces[namespace].lookups
    assert (found[Reason.NONE], found[Reason.EVICTED], found[Reason.QUOTA]) == (2, 1, 1)
    assert world.store.state.counters["chunks_evicted"] == 1


def test_a_shard_that_fits_in_no_segment_is_refused() -> None:
    world = World(segments=8, segment_bytes=4 * PAGE)
    worker = world.join()
    with pytest.raises(BadRequest, match=r"does not fit in a segment of 16384 bytes.*raise") as error:
        world.open(spec(shard_bytes=4 * PAGE + 1), worker)
    assert (error.value.field, error.value.value) == ("namespace.groups: shard_bytes", str(4 * PAGE + 1))
    world.open(spec(shard_bytes=4 * PAGE), worker)


def test_a_chunk_that_nobody_could_pin_is_refused() -> None:
    """DRAM smaller than one chunk, or so little more that every lookup would be QUOTA."""
    world = World(segments=8, segment_bytes=4 * PAGE, pin_share_max=0.5)
    worker = world.join()
    with pytest.raises(
        BadRequest, match=r"larger than the 65536 bytes.*dram_bytes or pin_share_max"
    ) as error:
        world.open(spec(shards=5, shard_bytes=4 * PAGE), worker)
    assert (error.value.field, error.value.value) == ("namespace.groups: chunk bytes", str(20 * PAGE))
    namespace = world.open(spec(shards=4, shard_bytes=4 * PAGE), worker)
    for shard in range(4):
        world.save(worker, namespace, chain("k", 1), shards=(shard,))
    assert world.acquire(worker, namespace, chain("k", 1)).lease


def test_what_is_not_built_yet_is_refused_clearly() -> None:
    world = World()
    worker = world.join()
    with pytest.raises(Unsupported, match=r"not supported yet.*supported: full, latent") as error:
        world.open(spec(groups=(GroupSpec("mamba", PAGE, kind=GroupKind.STATE),)), worker)
    assert (error.value.field, error.value.value) == ("namespace.groups[0].kind", "state")


def test_open_is_the_same_namespace_for_everybody_of_the_tenant() -> None:
    world = World()
    first, second, third = world.join(), world.join(), world.join("bob")
    opened = [world.ask(ev.Open, worker, spec()) for worker in (first, second, first)]
    assert opened[0] == opened[1] == opened[2]
    assert (len(opened[0].salt), opened[0].segment_bytes) == (32, 16 * PAGE)
    assert world.ask(ev.Open, third, spec()).salt != opened[0].salt


def test_limits_derive_what_follows_from_them() -> None:
    limits = Limits(10 << 20, 1 << 20, pin_share_max=0.5, reserve_share_max=0.25)
    assert (limits.segment_count, limits.pin_bytes_max, limits.reserve_bytes_max) == (10, 5 << 20, 10 << 18)


def test_time_never_goes_back() -> None:
    world = World(lease_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    world.tick(5_000)
    lease = world.acquire(worker, namespace, chain("k", 1)).lease
    world.now = 10
    world.tick()
    assert world.store.state.now == 5_000
    assert world.ask(ev.Renew, worker, (lease,)).ttl_ms == (1_000,)


def test_a_store_describes_itself_in_one_line() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    world.acquire(worker, namespace, chain("k", 1))
    world.reserve(worker, namespace, chain("r", 1))
    world.append(worker, namespace, b"s", chain("k", 1))
    state = world.store.state
    described = [
        world.store,
        state.chunks,
        state.pool,
        state.pool.segments[0],
        *state.pool.classes.values(),
        state.leases,
        *state.leases.leases.values(),
        *state.reservations.values(),
        *state.workers.values(),
        *state.groups.values(),
        *state.namespaces.values(),
        state.sessions,
        state.sessions.oldest().manifest,
        state.ghosts,
    ]
    for thing in described:
        text = repr(thing)
        assert "\n" not in text and len(text) < 400 and not text.startswith("<"), text
    assert repr(world.store) == (
        "Store(ChunkTable(2 of 2 rows), Pool(8 segments of 65536 B, 7 idle), LeaseBook(1 leases, 0 of them expired), "
        "1 workers)"
    )


def test_an_answer_has_a_bounded_number_of_extents_and_the_rest_is_asked_for_again() -> None:
    world = World(extents_per_answer_max=3)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 3))
    world.save(worker, namespace, chain("k", 5))
    first = world.acquire(worker, namespace, chain("k", 5))
    assert [reason.name for reason in first.reasons] == ["NONE"] * 3 + ["BEYOND_MISS"] * 2
    rest = world.acquire(worker, namespace, chain("k", 5)[3:])
    assert [reason.name for reason in rest.reasons] == ["NONE"] * 2


@pytest.mark.parametrize("room", [4, 40])  # keys one by one, and as a batch
def test_a_reservation_has_a_bounded_number_of_shards_and_the_rest_is_asked_for_again(room: int) -> None:
    world = World(
        segments=4, segment_bytes=64 * PAGE, reserve_share_max=1.0, extents_per_answer_max=2 * room + 1
    )
    worker = world.join()
    namespace = world.open(spec(shards=2, shard_bytes=100), worker)
    keys = chain("k", room + 2)
    first = world.reserve(worker, namespace, keys)
    assert [result.name for result in first.results] == ["GRANTED"] * room + ["QUOTA"] * 2
    world.commit(worker, first)
    rest = world.reserve(worker, namespace, keys)
    assert [result.name for result in rest.results] == ["ALREADY"] * room + ["GRANTED"] * 2
    mine = world.reserve(worker, namespace, chain("l", 2 * room + 3), shards=(1,))
    assert [result.name for result in mine.results] == ["GRANTED"] * (2 * room + 1) + ["QUOTA"] * 2


def test_a_shard_that_no_worker_may_reserve_is_refused_at_once() -> None:
    world = World(segments=8, segment_bytes=4 * PAGE, pin_share_max=1.0, reserve_share_max=0.1)
    worker = world.join()
    world.open(spec(shard_bytes=3 * PAGE), worker)
    with pytest.raises(BadRequest, match=r"larger than the 13107 bytes.*reserve_share_max"):
        world.open(spec(model="larger", shard_bytes=4 * PAGE), worker)
