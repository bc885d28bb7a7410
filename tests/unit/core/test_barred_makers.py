"""A maker that was recalled or quarantined stays so: after a restart, beyond the node, and on other nodes."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import recall
from kvstore.errors import Denied
from kvstore.keys import tenant_mark
from kvstore.sim.disk import DiskWorld
from kvstore.sim.remote_world import SOURCE, RemoteWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, DiskResult, NamespaceId, WorkerId

from .test_disk import start

SICK, WELL = b"S" * 16, b"W" * 16
ALICE, BOB = "alice", "bob"


def quarantine(world: World, worker: WorkerId, namespace: NamespaceId, key: ChunkKey) -> int:
    done: ev.Done = world.ask(ev.ReportDuplicates, worker, namespace, (key,), (), wrong=True, healthy=True)
    return done.count


def saved(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    world, worker, namespace = start(durable_within_ms=0, **limits)
    world.tick(1_000)  # what is as old as the start may be older, for all that the daemon knows
    world.save(worker, namespace, chain("good", 3), maker=WELL)
    world.save(worker, namespace, chain("bad", 4), maker=SICK)
    world.settle(100)
    assert len(world.platter.chunks) == 7
    return world, worker, namespace


def again(world: World) -> tuple[WorkerId, NamespaceId]:
    """A worker of the daemon that has started anew."""
    worker = world.join()
    return worker, world.open(spec(), worker)


def test_a_quarantined_maker_is_refused_after_a_restart_too() -> None:
    world, worker, namespace = saved()
    assert quarantine(world, worker, namespace, chain("bad", 4)[2]) == 1
    world.settle(100)
    world.crash()
    worker, namespace = again(world)
    with pytest.raises(Denied, match="was recalled"):
        world.reserve(worker, namespace, chain("new", 1), maker=SICK)
    assert world.where(namespace, chain("good", 3)) == ["ssd"] * 3
    assert set(world.where(namespace, chain("bad", 4))) == {"NEVER_SEEN"}
    world.save(worker, namespace, chain("bad", 4), maker=WELL)
    assert world.outcomes(worker, namespace, chain("bad", 4)) == ["HIT"] * 4, "another may make them"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_purge_had_not_reached_when_the_daemon_was_killed_is_not_served(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 1)
    world = start(durable_within_ms=0)[0]
    worker = world.join()
    namespace = world.open(spec(shards=ranks), worker)
    for rank in range(ranks):
        makers = WELL if rank else SICK
        world.save(worker, namespace, chain("bad", 4), shards=(rank,), maker=makers)
    world.settle(100)
    assert len(world.platter.chunks) == 4
    world.hold = {ev.WriteIndex}
    assert quarantine(world, worker, namespace, chain("bad", 1)[0]) >= 1
    while not world.platter.bars:  # deletions and writes are transactions of their own
        world.finish(world.of(ev.WriteIndex)[0])
    assert world.platter.chunks, "else nothing is shown"
    world.hold = set()
    world.crash()
    worker = world.join()
    namespace = world.open(spec(shards=ranks), worker)
    assert set(world.where(namespace, chain("bad", 4))) == {"NEVER_SEEN"}
    assert world.restored.chunks_barred > 0
    world.settle(100)
    assert not world.platter.chunks, "and the index forgets them"


def test_another_tenants_chunks_of_that_maker_stay_after_a_restart() -> None:
    world, worker, namespace = saved()
    bob = world.join(tenant=BOB)
    theirs = world.open(spec(), bob)
    world.save(bob, theirs, chain("bad", 4), maker=SICK)
    world.settle(100)
    assert quarantine(world, worker, namespace, chain("bad", 1)[0]) == 1
    world.settle(100)
    world.crash()
    bob = world.join(tenant=BOB)
    theirs = world.open(spec(), bob)
    assert world.where(theirs, chain("bad", 4)) == ["ssd"] * 4
    world.save(bob, theirs, chain("more", 1), maker=SICK)


def test_of_a_recall_by_age_a_restart_keeps_what_is_older() -> None:
    world, worker, namespace = saved()
    admin = world.join(admin=True)
    world.tick(5_000)
    world.save(worker, namespace, chain("young", 2), maker=SICK)
    world.settle(100)
    world.ask(ev.Recall, admin, SICK, 1_000)
    world.settle(100)
    world.crash()
    worker, namespace = again(world)
    assert world.where(namespace, chain("bad", 4)) == ["ssd"] * 4
    assert set(world.where(namespace, chain("young", 2))) == {"NEVER_SEEN"}
    with pytest.raises(Denied):
        world.reserve(worker, namespace, chain("new", 1), maker=SICK)
    world.ask(ev.Recall, world.join(admin=True), SICK)  # and now all of it
    world.settle(100)
    assert world.platter.bars[b"", SICK].purge


@pytest.mark.parametrize("result", [DiskResult.IO_ERROR, DiskResult.NO_SPACE])
def test_what_the_index_could_not_take_it_is_told_again(result: DiskResult) -> None:
    world, worker, namespace = saved()
    world.faults[ev.WriteIndex] = result
    assert quarantine(world, worker, namespace, chain("bad", 1)[0]) == 1
    world.settle(100)
    assert not world.platter.bars and world.store.behind
    del world.faults[ev.WriteIndex]
    for _ in range(100):
        world.tick(100)
    assert set(world.platter.bars) == {(tenant_mark(ALICE), SICK)}


def test_nothing_is_written_twice() -> None:
    world, worker, namespace = saved()
    assert quarantine(world, worker, namespace, chain("bad", 1)[0]) == 1
    world.settle(100)
    before = world.counters["index_transactions"]
    world.store.state.bar(next(iter(world.platter.bars.values())))
    world.settle(1_000)
    assert world.counters["index_transactions"] == before


def test_without_an_ssd_nothing_waits_for_an_index() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("bad", 2), maker=SICK)
    assert quarantine(world, worker, namespace, chain("bad", 1)[0]) == 1
    assert not world.store.behind


def test_one_tenant_does_not_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond its bound is purged all the same."""
    monkeypatch.setattr(recall, "QUARANTINED_MAX", 2)
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(4):
        keys = chain(f"m{number}", 2)
        world.save(worker, namespace, keys, maker=b"%16d" % number)
        assert quarantine(world, worker, namespace, keys[0]) == 1
        assert "HIT" not in world.outcomes(worker, namespace, keys)
    assert len(world.store.state.bars) == 2
    bob = world.join(tenant=BOB)
    theirs = world.open(spec(), bob)
    world.save(bob, theirs, chain("k", 1), maker=SICK)
    assert quarantine(world, bob, theirs, chain("k", 1)[0]) == 1
    assert len(world.store.state.bars) == 3


def test_lookups_of_other_tenants_go_on_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 1)
    world = World()
    spaces = {}
    for tenant in (ALICE, BOB):
        worker = world.join(tenant=tenant)
        spaces[tenant] = worker, world.open(spec(), worker)
        world.save(*spaces[tenant], chain("bad", 6), maker=SICK)
    assert quarantine(world, *spaces[ALICE], chain("bad", 1)[0]) == 1
    assert world.store.recalls.going
    opened = {name: world.store.state.namespaces[space].directory_open for name, (_, space) in spaces.items()}
    assert opened == {ALICE: False, BOB: True}
    assert set(world.outcomes(*spaces[ALICE], chain("bad", 6))) == {"RECALLED"}, (
        "also what is still to be dropped"
    )
    assert world.outcomes(*spaces[BOB], chain("bad", 6)) == ["HIT"] * 6


# --------------------------------------------------------------------------------------------------- beyond the node


class Node(RemoteWorld):
    """Two tenants that name the same maker."""

    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "segments": 4,
            "segment_bytes": 16 * PAGE,
            "slabs": 4,
            "slab_slots": 24,
            "reserve_share_max": 1.0,
            "remote_store": SOURCE,
            "remote_writes": "off",
        }
        super().__init__(**{**defaults, **limits})
        self.of = {tenant: self.began(tenant) for tenant in (ALICE, BOB)}

    def began(self, tenant: str) -> tuple[WorkerId, NamespaceId]:
        worker = self.join(tenant)
        return worker, self.open(spec(), worker)

    def wait(self) -> None:
        for _ in range(20):
            self.tick(100)

    def fetched(self, tenant: str, name: str) -> list[str]:
        """What is to be had of four chunks of another node."""
        worker, space = self.of[tenant]
        self.outcomes(worker, space, chain(name, 4))
        self.fetch(worker, space, chain(name, 4))
        return self.outcomes(worker, space, chain(name, 4))


def put(node: Node, tenant: str, name: str, maker: bytes = SICK) -> None:
    node.put_elsewhere(node.of[tenant][1], chain(name, 4), makers=(maker, tenant_mark(tenant)))


def test_other_nodes_are_told_and_what_they_put_there_goes() -> None:
    node = Node()
    for tenant in (ALICE, BOB):
        node.save(*node.of[tenant], chain("here", 2), maker=SICK)
        put(node, tenant, "there")
    put(node, ALICE, "good", WELL)
    assert quarantine(node, *node.of[ALICE], chain("here", 1)[0]) == 1
    assert (b"", ChunkKey(tenant_mark(ALICE)), SICK) in node.tombstones
    left = {digest for digest, key in node.elsewhere[SOURCE] if key in chain("there", 4)}
    assert left == {node.store.state.namespaces[node.of[BOB][1]].salt}
    assert node.fetched(ALICE, "good") == ["HIT"] * 4 and node.fetched(BOB, "there") == ["HIT"] * 4


@pytest.mark.parametrize("restarts", [False, True])
def test_a_copy_that_comes_from_elsewhere_is_refused(restarts: bool) -> None:
    """Of a node that has not heard, say: it is refused by its maker."""
    node = Node()
    node.save(*node.of[ALICE], chain("here", 2), maker=SICK)
    assert quarantine(node, *node.of[ALICE], chain("here", 1)[0]) == 1
    node.wait()
    if restarts:
        node.crash()
        node.of = {tenant: node.began(tenant) for tenant in (ALICE, BOB)}
    for tenant in (ALICE, BOB):
        put(node, tenant, "there")
    assert "HIT" not in node.fetched(ALICE, "there")
    assert node.fetched(BOB, "there") == ["HIT"] * 4


@pytest.mark.parametrize("restarts", [False, True])
def test_what_another_node_has_quarantined_goes_here(restarts: bool) -> None:
    node = Node()
    for tenant in (ALICE, BOB):
        node.save(*node.of[tenant], chain("here", 4), maker=SICK)
    node.save(*node.of[ALICE], chain("good", 4), maker=WELL)
    reserved = node.reserve(*node.of[ALICE], chain("begun", 2), maker=SICK)
    node.step(ev.ForgottenElsewhere(SOURCE, ((b"", ChunkKey(tenant_mark(ALICE)), SICK),), 1))
    node.wait()
    node.commit(node.of[ALICE][0], reserved)
    assert "HIT" not in node.outcomes(*node.of[ALICE], chain("begun", 2))
    if restarts:
        node.crash()
        node.of = {tenant: node.began(tenant) for tenant in (ALICE, BOB)}
    assert not {"ssd", "dram", "dram+ssd"} & set(node.where(node.of[ALICE][1], chain("here", 4)))
    for tenant, name in ((BOB, "here"), (ALICE, "good")):
        found = set(node.where(node.of[tenant][1], chain(name, 4)))
        assert found <= {"ssd", "dram+ssd"}, found
    with pytest.raises(Denied):
        node.reserve(*node.of[ALICE], chain("new", 1), maker=SICK)
    node.save(*node.of[BOB], chain("new", 1), maker=SICK)


def test_a_quarantine_of_a_tenant_that_comes_later_holds() -> None:
    node = Node()
    node.step(ev.ForgottenElsewhere(SOURCE, ((b"", ChunkKey(tenant_mark("carol")), SICK),), 1))
    node.wait()
    carol, space = node.began("carol")
    with pytest.raises(Denied):
        node.reserve(carol, space, chain("new", 1), maker=SICK)
