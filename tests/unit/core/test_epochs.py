"""Weights epochs: an old one is never served again, and its memory comes back in steps."""

from __future__ import annotations

import itertools

import pytest

from kvstore.core import events as ev
from kvstore.core import store as store_module
from kvstore.errors import Exhausted, NotFound, Precondition
from kvstore.sim.world import PAGE, World, chain, epoch_of, spec
from kvstore.types import Outcome, Reason


def test_a_newer_epoch_is_a_namespace_of_its_own_with_its_own_salt() -> None:
    world = World()
    worker = world.join()
    old = world.ask(ev.Open, worker, spec())
    new = world.ask(ev.Open, worker, spec(epoch=1))
    assert old.namespace != new.namespace and old.salt != new.salt
    assert (old.epoch, new.epoch) == (0, 1)
    assert world.ask(ev.Open, worker, spec(epoch=1)).namespace == new.namespace


def test_an_old_epoch_is_never_served() -> None:
    world = World()
    worker = world.join()
    old = world.open(spec(), worker)
    world.save(worker, old, chain("k", 2))
    world.append(worker, old, b"s", chain("k", 2))
    reserved = world.reserve(worker, old, chain("k", 3))
    new = world.open(epoch_of(spec(), 5), worker)
    assert world.outcomes(worker, old, chain("k", 2)) == ["OLD_EPOCH"] * 2
    acquired = world.acquire(worker, old, chain("k", 2))
    assert (acquired.lease, acquired.reasons[0]) == (0, Reason.OLD_EPOCH)
    assert world.session(worker, old, b"s").usable == 0
    assert world.match(worker, old, chain("k", 2)).usable == 0
    with pytest.raises(Precondition, match=r"newer weights epoch was opened.*open it again"):
        world.reserve(worker, old, chain("n", 1))
    world.commit(worker, reserved)  # it was granted; nobody will see it
    assert world.outcomes(worker, old, chain("k", 3)) == ["OLD_EPOCH"] * 3
    assert world.outcomes(worker, new, chain("k", 2)) == ["NEVER_SEEN"] * 2


@pytest.mark.parametrize("epoch", [0, 4])
def test_an_old_epoch_cannot_be_opened_again(epoch: int) -> None:
    world = World()
    worker = world.join()
    world.open(spec(), worker)
    world.open(spec(epoch=5), worker)
    with pytest.raises(Precondition, match=r"epoch 5 of these weights was opened.*use the newest") as error:
        world.open(spec(epoch=epoch), worker)
    assert (error.value.field, error.value.value) == ("namespace.weights_epoch", str(epoch))


def test_other_models_and_tenants_keep_their_epoch() -> None:
    world = World()
    worker, other = world.join("alice"), world.join("bob")
    untouched = [world.open(spec("model 2"), worker), world.open(spec(), other)]
    for user, namespace in zip((worker, other), untouched, strict=True):
        world.save(user, namespace, chain("k", 1))
    world.open(spec(), worker)
    world.open(spec(epoch=1), worker)
    for _ in range(5):
        world.tick(100)
    for user, namespace in zip((worker, other), untouched, strict=True):
        assert world.outcomes(user, namespace, chain("k", 1)) == ["HIT"]


def test_memory_of_old_epochs_comes_back_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETIRED_DROPS_PER_TICK", 4)
    world = World()
    worker = world.join()
    for epoch in range(2):
        namespace = world.open(spec(epoch=epoch), worker)
        world.save(worker, namespace, chain("k", 8))
        for number in range(2):
            world.append(worker, namespace, b"%d" % number, chain("k", 8)[:4])
    world.open(spec(epoch=2), worker)
    ready = [world.slots()["ready"]]
    while ready[-1]:
        world.tick(100)
        ready.append(world.slots()["ready"])
        assert len(ready) < 10
    assert ready[0] == 16 and all(0 <= before - after <= 4 for before, after in itertools.pairwise(ready))
    assert world.store.state.sessions.by_name == {}
    assert world.store.state.chunks.rows_used == 0, "no ghosts are kept of an old epoch"


def test_a_pinned_chunk_of_an_old_epoch_goes_with_its_lease_and_holds_up_nothing() -> None:
    world = World()
    worker, other = world.join(), world.join()
    first = world.open(spec(), worker)
    world.save(worker, first, chain("k", 4))
    acquired = world.acquire(worker, first, chain("k", 1))
    second = world.open(spec(epoch=1), worker)
    world.save(worker, second, chain("k", 4))
    world.open(spec(epoch=2), other)
    for _ in range(3):
        world.tick(100)
    assert world.slots()["ready"] == 1
    assert world.load(worker, acquired.extents[0]) is not None
    world.release(worker, acquired.lease)
    assert world.slots()["ready"] == 0


def test_pinned_chunks_at_the_front_do_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETIRED_DROPS_PER_TICK", 2)
    world = World()
    worker = world.join()
    old = world.open(spec(), worker)
    world.save(worker, old, chain("k", 8))
    world.acquire(worker, old, chain("k", 4))
    world.open(spec(epoch=1), worker)
    for _ in range(10):
        world.tick(100)
    assert world.slots()["ready"] == 4


def test_an_old_epoch_s_segments_serve_the_new_one() -> None:
    world = World(segments=2, segment_bytes=16 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    for epoch in range(6):
        namespace = world.open(spec(epoch=epoch), worker)
        for start in range(0, 32, 8):
            for _ in range(3):
                reserved = world.reserve(worker, namespace, chain("k", 32)[start : start + 8])
                if reserved.reservation:
                    world.commit(worker, reserved)
                world.tick(100)
        assert world.outcomes(worker, namespace, chain("k", 32)) == ["HIT"] * 32, epoch


def test_epochs_without_end_are_no_namespaces_without_end() -> None:
    world = World(namespaces_max=4, segments=2)
    worker = world.join()
    for epoch in range(50):
        namespace = world.open(spec(epoch=epoch), worker)
        if world.reserve(worker, namespace, chain("ask for a segment", 1)).reservation == 0:
            world.tick(100)
        world.save(worker, namespace, chain("k", 1))
        world.tick(60_000)
        world.tick(100)
    assert len(world.store.state.namespaces) <= 4
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]
    assert len(world.store.state.workers[worker].opened) <= 4


def test_a_namespace_that_was_reaped_is_no_longer_open_and_its_reservations_are_unknown() -> None:
    world = World(namespaces_max=2, segments=1)
    worker = world.join()
    old = world.open(spec(), worker)
    reserved = world.reserve(worker, old, chain("k", 1))
    world.commit(worker, reserved)
    world.open(spec(epoch=1), worker)
    world.tick(100)
    new = world.open(spec(epoch=1), worker)
    world.reserve(worker, new, chain("k", 1))  # takes the only segment over
    world.tick(100)
    world.save(worker, new, chain("k", 1))
    world.open(spec("another"), worker)
    with pytest.raises(NotFound, match="call Open first"):
        world.match(worker, old, chain("k", 1))
    with pytest.raises(NotFound, match="no such reservation"):
        world.commit(worker, reserved)


def test_open_namespaces_are_bounded() -> None:
    world = World(namespaces_max=2)
    worker, other = world.join(), world.join()
    world.open(spec("one"), worker)
    world.open(spec("two"), other)
    with pytest.raises(Exhausted, match="too many namespaces") as error:
        world.open(spec("three"), worker)
    assert error.value.value == "2"
    world.open(spec("two"), worker)
    world.kill(other)
    with pytest.raises(Exhausted):
        world.open(spec("three"), worker)
    world.kill(worker)
    world.open(spec("three"), world.join())


def test_a_wait_for_a_chunk_of_an_old_epoch_ends() -> None:
    world = World()
    saver, reader = world.join(), world.join()
    namespace = world.open(spec(), saver, reader)
    world.reserve(saver, namespace, chain("k", 1))
    assert world.acquire(reader, namespace, chain("k", 1), wait_ms=1_000).outcomes == (Outcome.PENDING,)
    world.open(spec(epoch=1), saver)
    world.tick(100)
    (settled,) = world.take(ev.ChunksSettled)
    assert (settled.ready, settled.failed) == ((), chain("k", 1))
