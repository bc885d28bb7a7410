"""Purge: all that a tenant has goes, here and everywhere, and nothing of another."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import NONE
from kvstore.core.requests import recall
from kvstore.errors import Denied, StoreError, Unavailable
from kvstore.keys import tenant_mark
from kvstore.sim.remote_world import SOURCE, RemoteWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ChunkKey, NamespaceId, WorkerId

KEYS = chain("k", 4)
ALICE, BOB = "alice", "bob"
WHOLE, GONE = (8, 1, 5, 4, 1), (0, 0, 0, 0, 0)


class Node(RemoteWorld):
    """Two tenants with the same keys, in DRAM, on SSD, in a REMOTE store, and in a session that is told."""

    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "segments": 4,
            "segment_bytes": 16 * PAGE,
            "slabs": 4,
            "slab_slots": 24,
            "reserve_share_max": 1.0,
            "remote_store": SOURCE,
            "remote_writes": "write-through",
            "sessions_told": SOURCE,
        }
        super().__init__(**{**defaults, **limits})
        self.admin = self.join("operations", admin=True)
        self.of: dict[str, tuple[WorkerId, NamespaceId]] = {}
        for tenant in (ALICE, BOB):
            worker = self.join(tenant)
            space = self.open(spec(), worker)
            self.of[tenant] = (worker, space)
            self.save(worker, space, KEYS)
            self.append(worker, space, b"talk", KEYS)
        self.wait()

    def wait(self) -> None:
        for _ in range(20):
            self.tick(100)

    def purge(self, tenant: str = ALICE, **named: Any) -> ev.Purged:
        request = self._next_request
        answer = self.ask(ev.PurgeTenant, self.admin, tenant, **named)
        for _ in range(100):
            if answer is not None:
                break
            self.tick(100)
            answer = self.answers.get((self.admin, request))
        if isinstance(answer, StoreError):
            raise answer
        assert isinstance(answer, ev.Purged), answer
        return answer

    def left(self, tenant: str) -> tuple[int, int, int, int, int]:
        """Chunks with bytes, sessions, index records, records in the REMOTE store, manifests that are told."""
        state = self.store.state
        number = self.of[tenant][1]
        salt = state.namespaces[number].salt
        return (
            sum(state.chunks.shard0[row] != NONE for row in state.namespaces[number].index.values())
            + sum(state.is_usable(row) for row in state.namespaces[number].index.values()),
            sum(name[0] == number for name in state.sessions.by_name),
            sum(of == number for of, _ in self.platter.chunks)
            + sum(of == number for of, _ in self.platter.sessions),
            sum(digest == salt for digest, _ in self.elsewhere[SOURCE]),
            sum(place[0] == salt for place in self.sessions.there),
        )


def test_all_of_one_tenant_goes_and_nothing_of_another() -> None:
    node = Node()
    assert node.left(ALICE) == node.left(BOB) == WHOLE
    purged = node.purge()
    assert (purged.chunks, purged.sessions, purged.pinned) == (4, 1, 0)
    assert node.left(ALICE) == GONE
    assert node.left(BOB) == WHOLE
    told = {forgotten for forgotten in node.tombstones if forgotten[2]}
    assert told == {(b"", ChunkKey(b""), tenant_mark(ALICE))}
    worker, space = node.of[ALICE]
    assert set(node.outcomes(worker, space, KEYS)) == {"FORGOTTEN"}
    node.save(worker, space, KEYS)  # and may begin anew
    assert node.outcomes(worker, space, KEYS) == ["HIT"] * 4


def test_counting_changes_nothing() -> None:
    node = Node()
    assert node.purge(dry_run=True).chunks == 4
    assert node.left(ALICE) == WHOLE and not node.tombstones


def test_only_operators_may() -> None:
    node = Node()
    with pytest.raises(Denied):
        node.ask(ev.PurgeTenant, node.of[BOB][0], ALICE)
    assert node.left(ALICE) == WHOLE


def test_what_is_being_written_and_read_goes_too() -> None:
    node = Node()
    worker, space = node.of[ALICE]
    reserved = node.reserve(worker, space, chain("new", 2))
    lease = node.acquire(worker, space, KEYS[:1])
    assert node.purge().pinned == 1
    assert set(node.outcomes(worker, space, KEYS)) == {"FORGOTTEN"}
    node.commit(worker, reserved)
    assert "HIT" not in node.outcomes(worker, space, chain("new", 2)), "what began before is kept"
    node.release(worker, lease.lease)
    node.wait()
    assert node.left(ALICE)[0] == 0


def test_what_was_being_written_when_it_began_is_no_hit_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the purge comes to it much later."""
    node = Node()
    worker, space = node.of[ALICE]
    reserved = node.reserve(worker, space, chain("new", 2))
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 1)
    node.ask(ev.PurgeTenant, node.admin, ALICE)
    node.commit(worker, reserved)
    assert node.store.recalls.going
    assert set(node.outcomes(worker, space, chain("new", 2))) == {"FORGOTTEN"}
    node.wait()
    assert node.left(ALICE)[0] == 0


def test_in_steps_and_others_are_served_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 2)
    monkeypatch.setattr(recall, "ROWS_PER_STEP_MAX", 3)
    node = Node()
    assert node.purge().chunks == 4
    assert node.left(ALICE) == GONE and node.left(BOB) == WHOLE


def test_what_another_node_was_told_goes_here() -> None:
    node = Node()
    node.step(ev.ForgottenElsewhere(SOURCE, ((b"", ChunkKey(b""), tenant_mark(ALICE)),), 1))
    node.wait()
    assert node.left(ALICE) == GONE
    assert node.left(BOB) == WHOLE
    assert node.counters["tenants_purged"] == 1


def test_a_store_that_cannot_be_told_is_said() -> None:
    node = Node()
    node.hold = {ev.ForgetChunks}
    with pytest.raises(Unavailable, match="does not know it yet"):
        node.purge()
    assert node.left(ALICE)[:3] == (0, 0, 0)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_store_that_could_not_be_told_while_the_rest_went_on_is_said(comes_back: bool) -> None:
    """Its answer came before the index had dropped everything: that it was answered does not mean that it knows."""
    node = Node()
    node.hold = {ev.ForgetChunks, ev.WriteIndex}
    assert node.ask(ev.PurgeTenant, node.admin, ALICE) is None
    for _ in range(5):
        node.tick(100)
    (told,) = [each for each in node.held if isinstance(each, ev.ForgetChunks)]
    node.finish(told, fails="connection refused")
    waiting = node.store.forgets.gauges()["remote_forgets_waiting"]
    assert waiting == len(told.forgotten), "an alert says that others do not know it"
    if comes_back:
        node.tell_untold(SOURCE)
        node.tick()
        assert node.store.forgets.gauges()["remote_forgets_waiting"] == 0
    node.hold = {ev.ForgetChunks}
    while node.held:
        node.finish()
    for _ in range(20):
        node.tick(100)
    (answer,) = [reply.answer for reply in node.replies if isinstance(reply.answer, ev.Purged | StoreError)]
    if comes_back:
        assert isinstance(answer, ev.Purged)
    else:
        assert isinstance(answer, Unavailable) and "does not know it yet (connection refused)" in str(answer)


def test_makers_of_what_comes_back_are_not_tenants() -> None:
    """A record names its tenant beside its makers; here it is no maker."""
    node = Node(segments=2, slabs=0, remote_writes="off")
    worker, space = node.of[BOB]
    node.put_elsewhere(space, chain("e", 2), makers=(b"m" * 16, tenant_mark(BOB)))
    node.outcomes(worker, space, chain("e", 2))
    node.fetch(worker, space, chain("e", 2))
    state = node.store.state
    row = state.namespaces[space].index[chain("e", 2)[0]]
    assert state.makers_of(row) == (b"m" * 16,)


def hears(node: Node, mark: bytes, count: int) -> None:
    node.step(ev.ForgottenElsewhere(SOURCE, ((b"", ChunkKey(b""), mark),), count))


@pytest.mark.parametrize("mark", [tenant_mark(ALICE), b"m" * 16], ids=["purge", "recall"])
def test_what_is_not_dropped_yet_is_not_written_as_newer_than_the_order(
    monkeypatch: pytest.MonkeyPatch, mark: bytes
) -> None:
    """Another node would serve that record: by its count it was computed after the order."""
    node = Node()
    worker, space = node.of[ALICE]
    node.save(worker, space, chain("more", 4), maker=b"m" * 16)
    node.wait()
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 2)
    hears(node, mark, 9)
    assert node.store.recalls.going and not node.store.state.applied
    hears(node, b"n" * 16, 10)  # the next round
    assert not node.store.state.applied
    node.wait()
    assert not node.store.recalls.going and node.store.state.applied == {SOURCE: 10}


def test_a_record_that_is_being_written_goes_too() -> None:
    node = Node()
    worker, space = node.of[ALICE]
    node.hold = {ev.StoreChunks}
    node.save(worker, space, chain("new", 2))
    node.wait()
    assert len(node.held) == 1
    node.purge()
    node.hold = set()
    node.finish()
    node.wait()
    assert node.left(ALICE)[3] == 0


def test_what_is_put_elsewhere_while_it_is_purged_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(remote_linger_ms=0)
    worker, space = node.of[ALICE]
    monkeypatch.setattr(recall, "ROWS_PER_STEP_MAX", 1)
    hears(node, tenant_mark(ALICE), 1)
    node.save(worker, space, chain("new", 1))
    assert node.store.recalls.going and node.counters["remote_chunks_stored"] == 9, "it is not there"
    node.wait()
    assert not node.store.recalls.going and node.left(ALICE)[3] == 0


def test_sessions_that_go_on_while_they_are_purged_are_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    worker, space = node.of[ALICE]
    for name in (b"a", b"b", b"c"):
        node.append(worker, space, name, KEYS[:1])
    node.wait()
    assert node.left(ALICE)[4] == 4
    monkeypatch.setattr(recall, "DROPS_PER_STEP_MAX", 1)
    hears(node, tenant_mark(ALICE), 1)
    left = [name[1] for name in node.store.state.sessions.by_name if name[0] == space]
    assert len(left) == 3
    for name in left:
        version = node.store.state.sessions.by_name[space, name].version
        node.append(worker, space, name, KEYS[1:2], version=version, keep=1)
    node.tick(100)
    node.wait()
    assert node.left(ALICE)[1] == 0 and node.left(ALICE)[4] == 0


def test_the_edge_hears_of_a_tenant_that_has_nothing_in_the_core() -> None:
    """It may have schemas here."""
    node = Node()
    mark = tenant_mark("carol")
    effects = node.store.apply(
        ev.ForgottenElsewhere(SOURCE, ((b"", ChunkKey(b""), mark),), 1), node.store.state.now
    )
    assert [effect.mark for effect in effects if isinstance(effect, ev.TenantPurged)] == [mark]
