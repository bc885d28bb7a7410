"""Segments: whose memory serves whom, how it changes hands, and compaction."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.core import segments as segments_module
from kvstore.core.limits import Limits
from kvstore.core.pool import Phase
from kvstore.core.store import Store
from kvstore.layout import GroupSpec
from kvstore.sim.integrity import check_integrity
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import NamespaceId, SegmentId, WorkerId

SEGMENT = 16 * PAGE


def fill(world: World, worker: WorkerId, namespace: NamespaceId, name: str, chunks: int) -> int:
    """Save chunks in batches, letting a little time pass after each; returns how many were granted."""
    granted = 0
    for start in range(0, chunks, 8):
        keys = chain(f"{name}{start}", min(8, chunks - start))
        for _ in range(3):
            reserved = world.reserve(worker, namespace, keys)
            if reserved.reservation:
                world.commit(worker, reserved)
            keys = tuple(
                key for key, result in zip(keys, reserved.results, strict=True) if result.name == "FULL"
            )
            granted += sum(result.name == "GRANTED" for result in reserved.results)
            world.tick(60)
            if not keys:
                break
    return granted


def resident_bytes(world: World, namespace: NamespaceId) -> int:
    found = world.store.state.namespaces[namespace]
    return found.visible * found.spec.chunk_bytes


# ---------------------------------------------------------------------------------------------------- changing hands


def test_a_segment_goes_to_another_namespace_only_when_nobody_maps_it() -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    fill(world, alice, hers, "a", 32)
    for start in (0, 8, 16, 24):
        world.release(alice, world.acquire(alice, hers, chain(f"a{start}", 8)).lease)
    assert len(world.mapped[alice]) == 2
    world.unmap_at_once = False
    world.tick(1_000)
    refused = world.reserve(bob, his, chain("b", 4))
    assert [result.name for result in refused.results] == ["FULL"] * 4
    (push,) = world.take(ev.SegmentsRetired)
    assert (push.worker, len(push.segments)) == (alice, 1)
    for _ in range(5):
        world.tick(1_000)
        assert not world.reserve(bob, his, chain("b", 4)).reservation, "alice maps it still"
    world.unmap(
        alice, push.segments
    )  # the world checks that it is destroyed unmapped, and never assigned again
    assert push.segments[0] not in world.memory
    world.save(bob, his, chain("b", 4))


def test_a_stopped_worker_does_not_keep_others_from_the_rest_of_the_memory() -> None:
    """It holds the segments that were used longest ago, and does not answer."""
    world = World(segments=4, segment_bytes=SEGMENT, reserve_share_max=1.0)
    stopped, alive, bob = world.join("alice"), world.join("carol"), world.join("bob")
    one, two, his = world.open(spec(), stopped), world.open(spec(), alive), world.open(spec(), bob)
    for worker, namespace, name in ((stopped, one, "s"), (alive, two, "a")):
        fill(world, worker, namespace, name, 24)
        for start in range(0, 24, 8):
            world.release(worker, world.acquire(worker, namespace, chain(f"{name}{start}", 8)).lease)
        world.tick(1_000)
    world.unmap_at_once = False
    assert fill(world, bob, his, "first", 8) == 0
    (push,) = world.take(ev.SegmentsRetired)
    assert push.worker == stopped
    world.tick(segments_module.RETIRE_PATIENCE_MS)
    assert fill(world, bob, his, "second", 8) == 0
    (push,) = world.take(ev.SegmentsRetired)
    assert push.worker == alive
    world.unmap(alive, push.segments)
    assert fill(world, bob, his, "third", 8) == 8
    assert resident_bytes(world, one) == 8 * PAGE, "what the stopped one has left stays its own"


def test_a_segment_of_a_dead_worker_needs_no_word_of_it() -> None:
    world = World(segments=1, segment_bytes=SEGMENT, reserve_share_max=1.0)
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    fill(world, alice, hers, "a", 16)
    world.release(alice, world.acquire(alice, hers, chain("a0", 8)).lease)
    world.unmap_at_once = False
    world.tick(1_000)
    assert not world.reserve(bob, his, chain("b", 4)).reservation
    world.kill(alice)
    world.save(bob, his, chain("b", 4))


def test_a_retired_segment_is_not_handed_out() -> None:
    world = World(segments=1, segment_bytes=SEGMENT)
    alice, more, bob = world.join("alice"), world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice, more), world.open(spec(), bob)
    world.save(alice, hers, chain("a", 1))
    (extent,) = world.acquire(alice, hers, chain("a", 1)).extents
    for lease in list(world.leases):
        world.release(alice, lease)
    world.unmap_at_once = False
    world.tick(1_000)
    world.reserve(bob, his, chain("b", 1))
    assert world.map(more, [extent.segment]) == ()


def test_an_empty_segment_goes_first_and_a_pinned_one_never() -> None:
    world = World(segments=3, segment_bytes=SEGMENT, reserve_share_max=1.0)
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    fill(world, alice, hers, "a", 48)
    pinned = world.acquire(alice, hers, chain("a0", 8))
    world.ask(ev.Forget, alice, hers, b"", chain("a40", 8) + chain("a32", 8))
    world.tick(60_000)
    before = {e.segment for e in pinned.extents}
    world.reserve(bob, his, chain("b", 1))
    assert resident_bytes(world, hers) == 32 * PAGE, "only what was empty went"
    fill(world, bob, his, "b", 64)
    assert world.outcomes(alice, hers, chain("a0", 8)) == ["HIT"] * 8
    assert before <= set(world.memory)


def test_two_models_of_different_shard_sizes_take_turns_with_the_arena() -> None:
    world = World(segments=6, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker, other = world.join(), world.join()
    small = world.open(spec("small", shard_bytes=PAGE), worker)
    large = world.open(spec("large", shard_bytes=3 * PAGE), other)
    arena = 6 * SEGMENT
    reached = []
    for turn in range(4):
        name, user, namespace, size = [("s", worker, small, PAGE), ("l", other, large, 3 * PAGE)][turn % 2]
        fill(world, user, namespace, f"{name}{turn}", 2 * arena // size)
        reached.append(resident_bytes(world, namespace) / arena)
    # 15 of a segment's 16 pages can hold shards of three pages.
    assert min(reached[0::2]) >= 0.9 and min(reached[1::2]) >= 0.9 * 15 / 16, reached
    assert min(reached) >= 0.9 * 15 / 16


def test_a_namespace_keeps_what_it_uses_when_another_wants_more_than_half() -> None:
    world = World(segments=8, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker, other = world.join(), world.join()
    one, two = world.open(spec("one"), worker), world.open(spec("two"), other)
    fill(world, worker, one, "a", 64)  # half of the arena
    for round_ in range(10):
        fill(world, other, two, f"b{round_}", 32)
        for start in range(0, 64, 8):
            world.release(worker, world.acquire(worker, one, chain(f"a{start}", 8)).lease)
    assert resident_bytes(world, one) >= 56 * PAGE


def test_who_has_nothing_gets_a_share_from_who_has_more() -> None:
    world = World(segments=8, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker, other = world.join(), world.join()
    one, two = world.open(spec("one"), worker), world.open(spec("two"), other)
    fill(world, worker, one, "a", 128)
    for round_ in range(8):
        fill(world, other, two, f"b{round_}", 16)
        for start in range(0, 128, 8):  # in use all the time
            lease = world.acquire(worker, one, chain(f"a{start}", 8)).lease
            if lease:
                world.release(worker, lease)
    assert resident_bytes(world, two) >= 3 * SEGMENT


def test_expired_leases_of_others_give_way_to_who_has_nothing() -> None:
    world = World(segments=1, segment_bytes=SEGMENT, lease_ttl_ms=1_000, revoke_grace_ms=500)
    worker, other = world.join("alice"), world.join("bob")
    one, two = world.open(spec("one"), worker), world.open(spec("two"), other)
    world.save(worker, one, chain("a", 4))
    world.acquire(worker, one, chain("a", 4))
    world.tick(1_400)
    assert not world.reserve(other, two, chain("b", 1)).reservation
    assert world.take(ev.LeasesRevoked) == []
    world.tick(100)
    world.reserve(other, two, chain("b", 1))
    assert [push.worker for push in world.take(ev.LeasesRevoked)] == [worker]
    world.save(other, two, chain("b", 1))


def test_a_chunk_that_another_rank_is_writing_keeps_its_segment() -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker, other = world.join("alice"), world.join("bob")
    groups = spec("one", shards=2)
    one, two = world.open(groups, worker), world.open(spec("two"), other)
    world.save(worker, one, chain("a", 16), shards=(0,))  # fills one segment
    reserved = world.reserve(worker, one, chain("a", 4), shards=(1,))
    world.tick(1_000)
    assert not world.reserve(other, two, chain("b", 1)).reservation
    world.commit(worker, reserved)
    assert world.outcomes(worker, one, chain("a", 4)) == ["HIT"] * 4


# ------------------------------------------------------------------------------------------------------ slab classes


def test_an_empty_segment_changes_class_inside_its_namespace_at_once() -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(groups=(GroupSpec("a", PAGE), GroupSpec("b", 5 * PAGE))), worker)
    world.save(worker, namespace, chain("k", 16), shards=(0,))  # a segment of each class; then no more
    world.save(worker, namespace, chain("k", 3), shards=(1,))
    old = world.acquire(worker, namespace, chain("k", 2))
    world.release(worker, old.lease)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 16))
    world.save(worker, namespace, chain("n", 6), shards=(1,))
    slabs = {key[1]: len(slab.segments) for key, slab in world.store.state.pool.classes.items()}
    assert slabs == {5 * PAGE: 2}
    assert world.take(ev.SegmentsRetired) == []
    assert [world.load(worker, extent) for extent in old.extents] == [None] * 4


def test_evicting_in_one_class_makes_room_in_the_other() -> None:
    world = World(segments=3, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(groups=(GroupSpec("a", PAGE), GroupSpec("b", 4 * PAGE))), worker)
    for number in range(30):
        world.save(worker, namespace, chain(f"{number}", 2))
    assert world.outcomes(worker, namespace, chain("29", 2)) == ["HIT"] * 2


# --------------------------------------------------------------------------------------------------------- compaction


def scattered(world: World, worker: WorkerId, namespace: NamespaceId) -> list[tuple[bytes, ...]]:
    """Every segment full, then all but the first chunk of every eight forgotten. Returns the chunks that are left."""
    pages = len(world.memory) * SEGMENT // PAGE
    for start in range(0, pages, 8):
        world.save(worker, namespace, chain(f"c{start}", 8))
    for start in range(0, pages, 8):
        world.ask(ev.Forget, worker, namespace, b"", chain(f"c{start}", 8)[1:])
    return [chain(f"c{start}", 1) for start in range(0, pages, 8)]


def test_sparse_segments_are_emptied_and_their_chunks_stay() -> None:
    world = World(segments=4, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker, other = world.join(), world.join("bob")
    namespace, his = world.open(spec(), worker), world.open(spec(), other)
    left = scattered(world, worker, namespace)
    for _ in range(20):
        world.tick(100)
    assert sum(segment.empty for segment in world.store.state.pool.segments) == 3
    assert world.store.state.counters["chunks_moved"] >= 6
    for keys in left:  # compared with what was committed
        world.release(worker, world.acquire(worker, namespace, keys).lease)  # type: ignore[arg-type]
    fill(world, other, his, "b", 40)
    assert resident_bytes(world, his) == 40 * PAGE, "what was freed serves others, at nobody's expense"
    assert resident_bytes(world, namespace) == 8 * PAGE


def test_a_chunk_that_is_read_while_it_is_moved_stays_where_it_is() -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    left = scattered(world, worker, namespace)
    world.hold = {ev.MoveSlots}
    world.tick()
    (move,) = world.held
    assert isinstance(move, ev.MoveSlots)
    readers = [world.acquire(worker, namespace, keys) for keys in left]  # type: ignore[arg-type]
    world.finish()
    world.tick()
    for acquired in readers:
        assert world.load(worker, acquired.extents[0]) is not None
        world.release(worker, acquired.lease)
    assert world.slots()["reserved"] == 0


def test_a_move_is_no_use_of_the_chunk() -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    left = scattered(world, worker, namespace)
    world.tick(1_000)
    before = [h.idle_ms for keys in left for h in world.ask(ev.Explain, worker, namespace, b"", keys).chunks]
    for _ in range(5):
        world.tick()
    assert world.store.state.counters["chunks_moved"]
    after = [h.idle_ms for keys in left for h in world.ask(ev.Explain, worker, namespace, b"", keys).chunks]
    assert before == after


@pytest.mark.parametrize("end", ["failed", "damaged", "forgotten"])
def test_a_move_that_ends_badly_leaks_nothing(end: str) -> None:
    world = World(segments=2, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    left = scattered(world, worker, namespace)
    world.hold = {ev.MoveSlots}
    world.tick()
    (move,) = world.held
    assert isinstance(move, ev.MoveSlots)
    moved = len(move.sources)
    if end == "forgotten":
        world.ask(ev.Forget, worker, namespace, b"", tuple(key for keys in left for key in keys))
    world.finish(fails="EIO" if end == "failed" else "", spoil=1 if end == "damaged" else 0)
    slots = world.slots()
    assert slots["reserved"] == 0
    expected = {"failed": (4, 0), "damaged": (4 - moved, moved), "forgotten": (0, 0)}[end]
    assert (slots["ready"], slots["quarantined"]) == expected


def test_nothing_is_moved_while_segments_are_idle() -> None:
    world = World(segments=4, segment_bytes=SEGMENT, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 16))
    for number in range(2):
        world.ask(ev.Forget, worker, namespace, b"", chain(f"{number}", 16)[1:])
    world.tick()
    assert world.store.state.counters["chunks_moved"] == 0


# ------------------------------------------------------------------------------------------------------ coming, going


def test_a_store_serves_as_its_segments_become_ready() -> None:
    store = Store(Limits(4 * SEGMENT, SEGMENT))
    created = store.start()
    assert [type(effect) for effect in created] == [ev.CreateSegment] * 4
    assert [e.bytes for e in created if isinstance(e, ev.CreateSegment)] == [SEGMENT] * 4
    assert [e.cells for e in created if isinstance(e, ev.CreateSegment)] == [16] * 4
    worker = WorkerId(1)
    store.apply(ev.WorkerJoined(worker, "alice", ""), 0)
    _, reply = store.apply(ev.Open(ev.Ticket(worker), spec()), 0)
    assert isinstance(reply, ev.Reply) and isinstance(reply.answer, ev.Opened)
    ask = ev.Reserve(ev.Ticket(worker), reply.answer.namespace, chain("k", 1))
    (full,) = (e for e in store.apply(ask, 0) if isinstance(e, ev.Reply))
    assert isinstance(full.answer, ev.Reserved) and full.answer.results[0].name == "FULL"
    first = created[0]
    assert isinstance(first, ev.CreateSegment)
    store.apply(ev.SegmentReady(first.op), 0)
    (granted,) = (e for e in store.apply(ask, 0) if isinstance(e, ev.Reply))
    assert isinstance(granted.answer, ev.Reserved) and granted.answer.results[0].name == "GRANTED"
    check_integrity(store)


def test_a_segment_that_cannot_be_made_is_tried_again() -> None:
    world = World(segments=1, segment_bytes=SEGMENT)
    alice, bob = world.join("alice"), world.join("bob")
    hers, his = world.open(spec(), alice), world.open(spec(), bob)
    world.save(alice, hers, chain("a", 1))
    world.tick(1_000)
    world.hold = {ev.CreateSegment}
    world.reserve(bob, his, chain("b", 1))
    world.finish(fails="ENOMEM")
    assert world.store.state.counters["segment_create_failures"] == 1
    world.tick(segments_module.CREATE_RETRY_MS - 1)
    assert world.held == []
    world.hold = set()
    world.tick(1)
    world.save(bob, his, chain("b", 1))


def test_segment_numbers_are_never_reused() -> None:
    world = World(segments=1, segment_bytes=SEGMENT, reserve_share_max=1.0)
    workers = [world.join(tenant) for tenant in ("alice", "bob")]
    namespaces = [world.open(spec(), worker) for worker in workers]
    seen: list[SegmentId] = []
    for turn in range(6):
        fill(world, workers[turn % 2], namespaces[turn % 2], f"{turn}", 8)
        (segment,) = world.store.state.pool.segments
        assert segment.phase is Phase.ASSIGNED
        seen.append(segment.id)
    assert len(set(seen)) == len(seen)


def test_a_full_store_says_so_and_takes_the_next_one() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0, pin_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    lease = world.acquire(worker, namespace, chain("k", 4)).lease
    full = world.reserve(worker, namespace, chain("n", 2))
    assert ([r.name for r in full.results], full.reservation, full.extents) == (["FULL", "FULL"], 0, ())
    world.release(worker, lease)
    world.save(worker, namespace, chain("n", 2))
