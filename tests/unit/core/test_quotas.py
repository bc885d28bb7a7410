"""Byte quotas of tenants: who is at one gives way to itself, and others notice nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import BadRequest, Unavailable
from kvstore.sim.disk import DiskWorld
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import Tier, Wait

RECORD = 2 * PAGE
"""A page of KV with its header takes two on SSD."""


def names(reserved: ev.Reserved) -> list[str]:
    return [result.name for result in reserved.results]


def rows(world: World, tenant: str = "alice") -> dict[str, Any]:
    operator = world.join("nobody", admin=True)
    found = world.ask(ev.GetStats, operator).values["tenants"]
    world.kill(operator)
    return {row["tenant"]: row for row in found}[tenant]


# -------------------------------------------------------------------------------------------------------------- DRAM


@pytest.mark.parametrize("batch_min", [2, 1_000])
def test_a_tenant_at_its_quota_of_dram_gives_way_to_itself(batch_min: int) -> None:
    quotas = {"alice": 8 * PAGE}
    world = World(dram_quotas=quotas, eviction="lru", batch_min=batch_min, evict_min=batch_min)
    alice, bob = world.join("alice"), world.join("bob")
    mine, others = world.open(spec(), alice), world.open(spec(), bob)
    world.save(bob, others, chain("b", 30))
    for number in range(5):
        world.save(alice, mine, chain(f"a{number}", 4))
    assert world.outcomes(alice, mine, chain("a4", 4) + chain("a3", 4)) == ["HIT"] * 8
    assert world.outcomes(alice, mine, chain("a2", 4)) == ["EVICTED"] * 4
    assert world.outcomes(bob, others, chain("b", 30)) == ["HIT"] * 30
    assert (rows(world)["dram_bytes"], rows(world)["dram_quota"]) == (8 * PAGE, 8 * PAGE)
    assert (rows(world, "bob")["dram_bytes"], rows(world, "bob")["dram_quota"]) == (30 * PAGE, 0)


def test_one_save_larger_than_the_quota_is_cut_and_says_so() -> None:
    world = World(dram_quotas={"*": 8 * PAGE}, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    reserved = world.reserve(worker, namespace, chain("k", 40))
    assert names(reserved) == ["GRANTED"] * 8 + ["QUOTA"] * 32
    world.commit(worker, reserved)
    assert names(world.reserve(worker, namespace, chain("other", 2))) == ["GRANTED"] * 2
    assert world.store.state.counters["dram_quota_refusals"] == 32


def test_what_leases_hold_is_not_taken_for_a_tenant_at_its_quota() -> None:
    world = World(dram_quotas={"alice": 4 * PAGE})
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    lease = world.acquire(worker, namespace, chain("k", 4))
    assert names(world.reserve(worker, namespace, chain("new", 1))) == ["QUOTA"]
    world.release(worker, lease.lease)
    assert names(world.reserve(worker, namespace, chain("new", 1))) == ["GRANTED"]


def test_the_models_of_a_tenant_share_its_quota() -> None:
    world = World(dram_quotas={"alice": 6 * PAGE}, eviction="lru")
    worker = world.join()
    old, new = world.open(spec("old"), worker), world.open(spec("new"), worker)
    world.save(worker, old, chain("k", 6))
    world.tick(10)
    world.save(worker, new, chain("k", 4))
    assert world.outcomes(worker, new, chain("k", 4)) == ["HIT"] * 4
    assert world.outcomes(worker, old, chain("k", 6)).count("HIT") == 2


def test_a_chunk_that_the_quota_can_never_hold_is_refused_when_its_model_is_opened() -> None:
    world = World(dram_quotas={"alice": PAGE})
    worker, other = world.join("alice"), world.join("bob")
    with pytest.raises(BadRequest, match=r"quota of tenant alice is 4096.*dram_quotas"):
        world.open(spec(shards=2), worker)
    world.open(spec(shards=2), other)


def test_a_promotion_goes_by_the_quota_too() -> None:
    world = DiskWorld(dram_quotas={"alice": 4 * PAGE}, eviction="lru")
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    world.save(worker, namespace, chain("j", 4))
    assert world.where(namespace, chain("k", 4) + chain("j", 4)) == ["ssd"] * 4 + ["dram+ssd"] * 4
    world.fetch(worker, namespace, chain("k", 4))
    assert world.where(namespace, chain("k", 4) + chain("j", 4)) == ["dram+ssd"] * 4 + ["ssd"] * 4


# --------------------------------------------------------------------------------------------------------------- SSD


def test_a_tenant_at_its_quota_of_ssd_gives_way_to_itself() -> None:
    world = DiskWorld(
        segments=2,
        segment_bytes=8 * PAGE,
        ssd_quotas={"alice": 8 * RECORD},
        eviction="lru",
        reserve_share_max=1.0,
    )
    alice, bob = world.join("alice"), world.join("bob")
    theirs = world.open(spec(), bob)
    world.save(bob, theirs, chain("b", 8))
    mine = world.open(spec(), alice)
    for number in range(6):
        world.save(alice, mine, chain(f"a{number}", 4))
        world.tick(20)
    assert rows(world)["ssd_bytes"] == 8 * RECORD
    assert world.where(mine, chain("a5", 4)) == ["dram+ssd"] * 4
    assert all("ssd" in where for where in world.where(theirs, chain("b", 8)))


def test_a_durable_commit_beyond_the_quota_is_answered_with_its_name() -> None:
    world = DiskWorld(ssd_quotas={"*": 2 * RECORD})
    worker = world.join()
    namespace = world.open(spec(), worker)
    with pytest.raises(Unavailable, match=r"quota of 16384 bytes \(ssd_quotas\) is in use"):
        world.save_durably(worker, namespace, chain("k", 4))
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["HIT"] * 4


def test_a_durable_commit_takes_the_place_of_copies_of_what_is_in_dram() -> None:
    world = DiskWorld(ssd_quotas={"*": 4 * RECORD})
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("old", 4))
    world.settle()
    assert world.where(namespace, chain("old", 4)) == ["dram+ssd"] * 4
    world.save(worker, namespace, chain("not named", 2))
    world.settle()
    assert world.where(namespace, chain("not named", 2)) == ["dram"] * 2
    asked = world.save_durably(worker, namespace, chain("k", 2))
    world.settle()
    assert isinstance(world.durable_answer(worker, asked), ev.Committed)
    assert world.where(namespace, chain("old", 4)).count("dram+ssd") == 2


def test_a_start_with_a_smaller_quota_lets_go_of_what_is_beyond_it() -> None:
    world = DiskWorld()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 10))
    world.settle()
    world.crash(ssd_quotas={"alice": 4 * RECORD})
    assert rows(world)["ssd_bytes"] == 10 * RECORD
    world.tick(50)
    assert rows(world)["ssd_bytes"] == 4 * RECORD


# ------------------------------------------------------------------------------------------------------------ REMOTE


def test_a_tenant_at_its_quota_of_remote_gives_way_to_itself() -> None:
    world = RemoteWorld(
        remote_store="remote", remote_writes="write-through", remote_quotas={"alice": 4 * PAGE}
    )
    alice, bob = world.join("alice"), world.join("bob")
    mine, theirs = world.open(spec(), alice), world.open(spec(), bob)
    world.save(bob, theirs, chain("b", 8))
    for number in range(3):
        world.save(alice, mine, chain(f"a{number}", 4))
    world.tick(10)
    kept = {key for _, key in world.elsewhere["remote"]}
    assert kept == {*chain("b", 8), *chain("a2", 4)}
    assert (rows(world)["remote_bytes"], rows(world)["remote_quota"]) == (4 * PAGE, 4 * PAGE)


def test_what_a_quota_of_dram_pushes_out_goes_to_the_remote_store_first() -> None:
    """Though the arena is almost empty."""
    world = RemoteWorld(remote_store="remote", remote_writes="on-evict", dram_quotas={"alice": 8 * PAGE})
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 8))
    world.tick(100)
    assert {key for _, key in world.elsewhere["remote"]} == set(chain("k", 8))


def test_no_quota_is_no_limit() -> None:
    world = World(dram_quotas={"bob": PAGE})
    assert not world.store.state.quotas.has(Tier.DRAM, "alice")
    assert world.store.state.quotas.has(Tier.DRAM, "bob")


def test_a_save_in_one_message_goes_by_the_quota() -> None:
    world = World(dram_quotas={"*": 4 * PAGE}, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    saved = world.save_at_once(worker, namespace, chain("k", 6), wait=Wait.VISIBLE)
    assert saved is not None and [result.name for result in saved.results] == ["GRANTED"] * 4 + ["QUOTA"] * 2
