"""What a node writes into the REMOTE store, and that it forgets there too."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.keys import tenant_mark
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ChunkKey, NamespaceId, WorkerId

KEYS = chain("k", 4)


def start(
    writes: str = "write-through", *, shard_bytes: int = PAGE, **limits: Any
) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    defaults = {"segments": 2, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0}
    world = RemoteWorld(**{**defaults, "remote_store": "remote", "remote_writes": writes, **limits})
    worker = world.join()
    return world, worker, world.open(spec(shard_bytes=shard_bytes), worker)


def there(world: RemoteWorld) -> set[ChunkKey]:
    return {key for _, key in world.elsewhere["remote"]}


def test_write_through_puts_every_chunk_there_as_it_was_committed() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS, maker=b"m" * 16)
    assert there(world) == set(KEYS)
    chunks = world.elsewhere["remote"].values()
    mark = tenant_mark(world.store.state.namespaces[namespace].tenant)
    assert {(chunk.makers, chunk.derived) for chunk in chunks} == {((b"m" * 16, mark), False)}
    assert world.counters["remote_chunks_stored"] == 4
    assert not any(world.store.state.chunks.pins)


def test_what_came_from_there_is_not_written_again() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    assert world.counters["remote_chunks_stored"] == 0


def test_on_evict_writes_what_is_about_to_leave() -> None:
    world, worker, namespace = start("on-evict", slabs=1, slab_slots=8)
    world.save(worker, namespace, KEYS)
    world.tick(100)
    assert not there(world)
    for number in range(3):
        world.save(worker, namespace, chain(f"o {number}", 4))
    world.tick(100)
    assert set(KEYS) <= there(world)


def test_off_writes_nothing_and_reads_all_the_same() -> None:
    world, worker, namespace = start("off")
    world.save(worker, namespace, KEYS)
    world.tick(1_000)
    assert not there(world)


def test_what_left_the_node_comes_back_without_a_look_up() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=8, lookup_absent_ms=60_000)
    world.save(worker, namespace, KEYS)
    for number in range(12):
        world.save(worker, namespace, chain(f"o {number}", 4))
    asked = len(world.looked_up)
    assert world.outcomes(worker, namespace, KEYS) == ["ON_REMOTE"] * 4
    assert len(world.looked_up) == asked
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4


def test_a_hung_write_pins_no_more_than_it_may_and_delays_nobody() -> None:
    world, worker, namespace = start(remote_writes_in_flight_max=4 * PAGE, remote_deadline_ms=400)
    world.hold = {ev.StoreChunks}
    for number in range(2):
        world.save(worker, namespace, chain(f"o {number}", 4))
    assert sum(map(bool, world.store.state.chunks.pins)) == 4
    world.tick(400)
    assert not world.store.sources.by_name["remote"].is_well
    world.save(worker, namespace, KEYS)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    world.finish()
    assert not any(world.store.state.chunks.pins)


def test_its_share_of_the_store_is_kept_and_what_somebody_named_comes_first() -> None:
    world, worker, namespace = start(remote_bytes_max=4 * PAGE)
    world.save(worker, namespace, KEYS)
    assert there(world) == set(KEYS)
    named = chain("named", 2)
    world.hold = {ev.StoreChunks}
    world.store.state.limits  # noqa: B018
    world.save(worker, namespace, named)
    world.hold = set()
    for held in list(world.held):
        world.finish(held)
    assert len(there(world)) <= 4 and world.store.remote.stored_bytes <= 4 * PAGE


def test_a_chunk_that_was_not_written_is_not_counted() -> None:
    world, worker, namespace = start()
    world.hold = {ev.StoreChunks}
    world.save(worker, namespace, KEYS)
    world.finish(fails="connection refused")
    assert world.store.remote.stored_bytes == 0 and world.counters["remote_chunks_not_stored"] == 4


def test_a_forget_reaches_the_store_before_it_is_answered() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    world.hold = {ev.ForgetChunks}
    assert world.ask(ev.Forget, worker, namespace, b"", (*KEYS, ChunkKey(b"elsewhere"))) is None
    (held,) = world.held
    assert {key for _, key, _ in held.forgotten} == {*KEYS, b"elsewhere"}
    world.finish()
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Done)]
    assert reply.answer == ev.Done(4, "")
    assert not there(world)


@pytest.mark.parametrize("answers", [True, False])
def test_a_forget_that_the_store_does_not_take_says_so_in_time(answers: bool) -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    world.hold = {ev.ForgetChunks}
    assert world.ask(ev.Forget, worker, namespace, b"", KEYS) is None
    if answers:
        world.finish(fails="connection refused")
    else:
        world.tick(2_000)
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Done)]
    assert "the REMOTE store does not know it yet" in reply.answer.not_durable
    assert set(world.outcomes(worker, namespace, KEYS)) <= {"FORGOTTEN", "NEVER_SEEN"}


def test_a_forgotten_session_takes_its_chunks_along() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    world.append(worker, namespace, b"talk", KEYS)
    assert world.ask(ev.Forget, worker, namespace, b"talk").not_durable == ""
    assert not there(world) and {key for _, key, _ in world.tombstones} == set(KEYS)


def test_a_recall_and_a_new_epoch_leave_tombstones() -> None:
    world, worker, namespace = start()
    admin = world.join("operator", admin=True)
    world.save(worker, namespace, KEYS, maker=b"m" * 16)
    world.hold = {ev.ForgetChunks}
    assert world.ask(ev.Recall, admin, b"m" * 16) is None
    world.finish()
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Recalled)]
    assert reply.answer.chunks == 4 and not there(world)
    world.hold = set()
    digest = world.store.state.namespaces[namespace].salt
    world.open(spec(epoch=1), worker)
    assert (b"", b"", b"m" * 16) in world.tombstones and (digest, b"", b"") in world.tombstones


def test_a_dry_recall_and_a_refused_one_leave_none() -> None:
    world, worker, namespace = start()
    admin = world.join("operator", admin=True)
    world.save(worker, namespace, KEYS, maker=b"m" * 16)
    assert world.ask(ev.Recall, admin, b"m" * 16, dry_run=True).chunks == 4
    with pytest.raises(Exception, match="admin"):
        world.ask(ev.Recall, worker, b"m" * 16)
    assert not world.tombstones and not world.store.state.to_hold


def test_no_more_is_written_at_once_than_ends_before_its_deadline() -> None:
    """A link of two chunks a second."""
    mib = 1 << 20
    world, worker, namespace = start(
        segments=4,
        segment_bytes=32 * mib,
        shard_bytes=mib,
        remote_writes_in_flight_max=64 * mib,
        remote_deadline_ms=5_000,
    )
    world.hold = {ev.StoreChunks}
    keys = chain("k", 48)
    world.save(worker, namespace, keys)
    assert world.finish_over_link(ms_per_chunk=500) == 8
    assert there(world) == set(keys) and not world.counters["remote_trips"]
