"""What a restart brings back, what it drops, and what never repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.ssd.restart import ChunkBatch, Restored, Snapshot
from kvstore.core.store import Store
from kvstore.errors import Conflict, Precondition
from kvstore.sim.disk import SLAB_HEADER_BYTES, SLOT_BYTES, DiskWorld
from kvstore.sim.integrity import check_integrity
from kvstore.sim.world import CHUNK_TOKENS, PAGE, chain, epoch_of, spec
from kvstore.types import ChunkKey, DiskState, NamespaceId, Outcome, SlabId

from .test_disk import small, start

HIT, PENDING, MISS = Outcome


def again(world: DiskWorld, *specs: Any, tenant: str = "alice", **crash: Any) -> tuple[Any, ...]:
    """A restart, and a worker that opens the specs anew: (worker, namespaces...)."""
    world.crash(**crash)
    worker = world.join(tenant)
    return (worker, *(world.open(each, worker) for each in specs or (spec(),)))


# ----------------------------------------------------------------------------------------------------- what comes back


def test_chunks_come_back_cold_and_rise_with_their_bytes() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 5), maker=b"maker of 16 byte")
    world.tick(400)
    worker, same = again(world)
    assert same == namespace
    assert world.restored == Restored(chunks=5, next_namespace=2)
    assert world.where(namespace, chain("k", 5)) == ["ssd"] * 5
    assert world.match(worker, namespace, chain("k", 6)).usable == 5
    assert world.fetch(worker, namespace, chain("k", 5)) == ["HIT"] * 5  # the world compares their bytes
    explained = world.ask(ev.Explain, worker, namespace, b"", chain("k", 1)).chunks[0]
    assert (explained.token_count, explained.maker) == (CHUNK_TOKENS, b"maker of 16 byte")


def test_what_is_restored_is_not_written_again() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 5))
    world.tick(400)
    worker, _ = again(world)
    world.fetch(worker, namespace, chain("k", 5))
    world.settle(2_000)
    assert world.counters["chunks_stored"] == 0
    assert world.counters["index_transactions"] == 0


def test_what_was_never_indexed_is_gone_with_a_power_cut_or_without() -> None:
    for power in (False, True):
        world, worker, namespace = start()
        world.save(worker, namespace, chain("k", 3))
        assert world.where(namespace, chain("k", 3)) == ["dram+ssd"] * 3
        worker, namespace = again(world, power=power)
        assert world.outcomes(worker, namespace, chain("k", 3)) == ["NEVER_SEEN"] * 3
        world.save(worker, namespace, chain("k", 3), variant=1)


def test_a_namespace_that_is_not_in_the_index_may_come_back_under_its_number() -> None:
    """It holds nothing, and the record names the namespace by digest: another's bytes are never taken for its own."""
    world, worker, one = start(durable_within_ms=400)
    world.save(worker, one, chain("k", 1))
    world.tick(400)
    two = world.open(spec("two"), worker)
    worker, three = again(world, spec("three"))
    assert three == two != one
    assert world.outcomes(worker, three, chain("k", 1)) == ["NEVER_SEEN"]


@pytest.mark.parametrize("shards", [1, 3])
def test_chunks_of_several_namespaces_and_shards_come_back(shards: int) -> None:
    world = DiskWorld(durable_within_ms=400)
    worker = world.join()
    specs = [spec("a", shards=shards), spec("b", shard_bytes=2 * PAGE), spec("c", shards=2)]
    namespaces = [world.open(each, worker) for each in specs]
    for number, namespace in enumerate(namespaces):
        world.save(worker, namespace, chain("k", 2 + number), maker=b"%d" % number)
    world.save(worker, namespaces[0], chain("tail", 1), token_counts=(3,), derived=True)
    world.tick(400)
    before = world.platter.chunks.copy()
    worker, *found = again(world, *specs)
    assert found == namespaces
    for number, namespace in enumerate(namespaces):
        assert world.fetch(worker, namespace, chain("k", 2 + number)) == ["HIT"] * (2 + number)
        row = world.store.state.namespaces[namespace].index[chain("k", 1)[0]]
        assert world.store.state.chunks.maker(row) == b"%d" % number
    explained = world.ask(ev.Explain, worker, namespaces[0], b"", chain("tail", 1)).chunks[0]
    assert (explained.token_count, explained.derived) == (3, True)
    world.settle(1_000)
    assert world.platter.chunks == before


def test_the_oldest_in_the_index_are_the_first_to_leave_a_full_ssd() -> None:
    world, worker, namespace = small(slabs=1, slab_slots=8, durable_within_ms=0)
    world.save(worker, namespace, chain("k", 8))
    world.settle(100)
    worker, _ = again(world)
    for number in range(8):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.tick(1)
        world.tick(1)
        assert world.where(namespace, chain("k", 8)).count("EVICTED") == number + 1
    assert world.platter.chunks.keys() == {(namespace, chain(f"{number}", 1)[0]) for number in range(8)}


def test_a_second_restart_finds_what_the_first_found() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 5))
    world.append(worker, namespace, b"s", chain("k", 5))
    world.tick(400)
    for _ in range(3):
        world.crash(power=True)
        assert (world.restored.chunks, world.restored.sessions) == (5, 1)


# ------------------------------------------------------------------------------------------------------------ sessions


def test_sessions_come_back_with_what_is_left_of_their_chunks() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 4))
    info = world.append(worker, namespace, b"s", chain("k", 4))
    world.tick(400)
    lost = world.store.state.chunks
    world.platter.chunks.pop((namespace, chain("k", 4)[2]))
    assert lost.rows_used == 4
    worker, _ = again(world)
    found = world.session(worker, namespace, b"s")
    assert (found.version, found.entries, found.usable) == (info.version, info.entries, 2)
    assert world.outcomes(worker, namespace, chain("k", 4)) == ["ON_SSD", "ON_SSD", "LOST", "ON_SSD"]
    assert world.ask(ev.ListSessions, worker).rows[0].usable == 2
    world.save(worker, namespace, chain("k", 4)[2:3])
    assert world.session(worker, namespace, b"s").usable == 4


def test_a_session_whose_chunks_were_in_dram_only_says_lost() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 3), token_counts=(4, 4, 1))
    world.append(worker, namespace, b"s", chain("k", 3), counts=(4, 4, 1))
    world.tick(400)
    worker, _ = again(world)
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["LOST"] * 3
    explained = world.ask(ev.Explain, worker, namespace, b"s").chunks
    assert [(each.token_count, each.manifests) for each in explained] == [(4, 1), (4, 1), (1, 1)]
    # What each of them was is settled: the tail is one still, and goes with its manifest.
    world.hold = set()
    world.save(worker, namespace, chain("k", 3), token_counts=(4, 4, 1))
    world.ask(ev.Forget, worker, namespace, b"s")
    assert "HIT" not in world.outcomes(worker, namespace, chain("k", 3))


def test_a_lost_chunk_that_was_derived_is_saved_again_as_derived() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.hold = {ev.WriteRecords}
    world.save(worker, namespace, chain("k", 2))
    info = world.append(worker, namespace, b"s", chain("k", 2), approximate=True)
    world.save(worker, namespace, chain("d", 1), derived=True)
    world.append(worker, namespace, b"s", chain("d", 1), version=info.version, keep=2)
    world.tick(400)
    worker, _ = again(world)
    assert world.outcomes(worker, namespace, chain("d", 1)) == ["LOST"]
    assert world.reserve(worker, namespace, chain("d", 1), derived=True).results[0].name == "GRANTED"
    # Of an approximate entry nothing is known: it may have been either.
    assert world.reserve(worker, namespace, chain("k", 1), derived=True).results[0].name == "GRANTED"
    assert world.reserve(worker, namespace, chain("k", 2)[1:]).results[0].name == "GRANTED"


def test_versions_never_repeat_neither_of_names_nor_of_updates_that_were_lost() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3))
    kept = world.append(worker, namespace, b"s", chain("k", 1))
    world.tick(400)
    lost = world.append(worker, namespace, b"s", chain("k", 2)[1:], version=kept.version, keep=1)
    gone = world.append(worker, namespace, b"never indexed", chain("k", 3))
    seen = {kept.version, lost.version, gone.version}
    worker, _ = again(world)
    assert world.session(worker, namespace, b"s").version == kept.version
    with pytest.raises(Conflict):
        world.append(worker, namespace, b"s", chain("k", 1), version=lost.version, keep=1)
    new = world.append(worker, namespace, b"s", chain("k", 3)[2:], version=kept.version, keep=0, first=0)
    other = world.append(worker, namespace, b"never indexed", chain("k", 1))
    assert not seen & {new.version, other.version}
    assert min(new.version, other.version) > max(seen)
    more = world.append(worker, namespace, b"s", (), version=new.version, keep=1)
    assert more.version == new.version + 1


def test_time_to_live_of_a_restored_session_begins_anew() -> None:
    world, worker, namespace = start(session_ttl_ms=5_000, durable_within_ms=400)
    world.save(worker, namespace, chain("k", 1))
    world.append(worker, namespace, b"s", chain("k", 1))
    world.tick(4_000)
    worker, _ = again(world)
    world.tick(4_999)
    assert (namespace, b"s") in world.platter.sessions
    world.tick(1)
    world.tick(400)
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["EXPIRED"]
    assert not world.platter.sessions and not world.platter.chunks


def test_the_clock_of_a_restart_is_that_of_the_machine_not_of_the_daemon() -> None:
    """On a machine that has been up for longer than sessions live, a restart once ended them all."""
    up_ms = 10 * 3_600_000
    entry = ev.SessionEntry(ChunkKey(b"a"), 0, CHUNK_TOKENS)
    sessions = [ev.SessionRecord(1, b"s", 1, (entry,))]
    store, restored = restore(batch((3, 0)), now=up_ms, limits={"session_ttl_ms": 5_000}, sessions=sessions)
    assert restored.sessions == 1
    row = store.state.namespaces[NamespaceId(1)].index[ChunkKey(b"a")]
    assert store.state.chunks.used_at[row] == store.state.chunks.born_at[row] == up_ms
    store.apply(ev.Tick(), up_ms + 4_999)
    assert (1, b"s") in store.state.sessions.by_name
    store.apply(ev.Tick(), up_ms + 5_000)
    assert not store.state.sessions.by_name


# --------------------------------------------------------------------------------------------------- generations, slabs


def test_generations_rise_over_restarts() -> None:
    world, worker, namespace = start(durable_within_ms=0)
    highest = 0
    for boot in range(3):
        world.save(worker, namespace, chain(f"{boot}", 3))
        world.settle(100)
        mine = [world.platter.chunks[namespace, key].places[0].generation for key in chain(f"{boot}", 3)]
        assert len(set(mine)) == 3
        assert min(mine) > highest
        highest = max(mine)
        worker, _ = again(world)


def test_numbers_of_slab_files_never_come_back() -> None:
    """The world knows every file that ever was."""
    world = DiskWorld(slabs=2, slab_slots=4, durable_within_ms=0)
    for boot in range(4):
        worker = world.join()
        namespace = world.open(spec(f"{boot}", shard_bytes=(1 + boot % 2) * PAGE), worker)
        for number in range(12):
            world.save(worker, namespace, chain(f"{number}", 1))
            world.tick(20)
        world.settle(200)
        world.crash()
    assert len(world.platter.made) > 4


def test_free_slots_of_restored_slabs_are_used_before_a_new_file_is_made() -> None:
    world, worker, namespace = start(slab_slots=8, durable_within_ms=0)
    world.save(worker, namespace, chain("k", 5))
    world.settle(100)
    worker, _ = again(world)
    world.save(worker, namespace, chain("l", 3))
    world.settle(100)
    assert len(world.platter.slabs) == 1
    world.save(worker, namespace, chain("m", 1))
    world.settle(100)
    assert len(world.platter.slabs) == 2


# ---------------------------------------------------------------------------------------------------- what is dropped


def test_an_old_epoch_is_retired_and_goes() -> None:
    world, worker, namespace = start(durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 3))
    world.tick(400)
    new = world.open(epoch_of(spec(), 1), worker)
    world.hold = {ev.WriteIndex}
    world.save_durably(worker, new, chain("k", 2), variant=1)
    op = world.of(ev.WriteIndex)
    assert op[0].namespaces
    world._perform_op(
        op[0]
    )  # the new epoch is in the index, and the daemon ends before the old one is out of it
    world.held.clear()
    world.hold = set()
    world.crash()
    worker = world.join()
    assert world.open(epoch_of(spec(), 1), worker) == new
    with pytest.raises(Precondition, match="epoch 1 of these weights was opened already"):
        world.open(spec(), worker)
    world.settle(2_000)
    assert {number for number, _ in world.platter.chunks} <= {new}
    assert not world.platter.sessions


def test_an_arena_too_small_for_a_namespace_drops_it_and_its_number_is_not_given_out_again() -> None:
    world = DiskWorld(segments=4, segment_bytes=16 * PAGE, durable_within_ms=400)
    worker = world.join()
    plain, large = world.open(spec(), worker), world.open(spec("large", shard_bytes=8 * PAGE), worker)
    for namespace in (plain, large):
        world.save(worker, namespace, chain("k", 1))
        world.append(worker, namespace, b"s", chain("k", 1))
    world.tick(400)
    worker, same, other = again(world, spec(), spec("other"), segments=1, segment_bytes=4 * PAGE)
    assert world.restored.chunks_dropped == 1
    assert same == plain
    assert other not in (plain, large)
    world.settle(2_000)
    assert set(world.platter.namespaces) == {plain}
    assert {number for number, _ in (*world.platter.chunks, *world.platter.sessions)} == {plain}


def test_fewer_slab_files_than_before_drop_the_others_from_disk_and_index() -> None:
    world, worker, namespace = start(slab_slots=4, durable_within_ms=400)
    world.save(worker, namespace, chain("k", 12))
    world.settle(1_000)
    assert len(world.platter.slabs) == 3
    size = SLAB_HEADER_BYTES + 4 * SLOT_BYTES
    worker, _ = again(world, disk_slab_bytes=size, disk_slabs_max=2)
    assert world.restored.chunks == 8
    assert world.restored.chunks_dropped == 4
    assert len(world.restored.slabs_dropped) == 1
    assert world.where(namespace, chain("k", 12)).count("NEVER_SEEN") == 4
    world.settle(1_000)
    assert len(world.platter.slabs) == 2
    assert len(world.platter.chunks) == 8
    assert sorted(set(world.fetch(worker, namespace, chain("k", 12)))) == ["HIT", "NEVER_SEEN"]


def test_slab_files_of_another_size_are_dropped() -> None:
    world, worker, namespace = start(slab_slots=4, durable_within_ms=400)
    world.save(worker, namespace, chain("k", 3))
    world.settle(1_000)
    worker, _ = again(world, disk_slab_bytes=SLAB_HEADER_BYTES + 5 * SLOT_BYTES)
    assert (world.restored.chunks, world.restored.chunks_dropped) == (0, 3)
    world.save(worker, namespace, chain("k", 3), variant=1)
    world.settle(1_000)
    assert [shape[1] for shape in world.platter.slabs.values()] == [5]
    assert len(world.platter.chunks) == 3


def test_without_an_ssd_any_more_nothing_is_restored() -> None:
    store = Store(Limits(8 * PAGE, 8 * PAGE))
    assert store.state.disk_state is DiskState.ABSENT


SLAB_BYTES = SLAB_HEADER_BYTES + 4 * SLOT_BYTES


def restore(
    *batches: ChunkBatch,
    slabs: tuple[tuple[SlabId, int, int], ...] = (),
    now: int = 0,
    limits: Mapping[str, Any] = MappingProxyType({}),
    **snapshot: Any,
) -> tuple[Store, Restored]:
    """Of an index that does not fit together: none of what is not certain comes back, and all of that is deleted."""
    store = Store(
        Limits(
            32 * PAGE, 8 * PAGE, disk_slab_bytes=SLAB_BYTES, disk_slabs_max=4, durable_within_ms=0, **limits
        )
    )
    known = slabs or ((SlabId(3), SLOT_BYTES, 4), (SlabId(5), 3 * PAGE, 2))
    namespaces = snapshot.pop("namespaces", [ev.NamespaceRecord(1, "alice", spec())])
    restored = store.restore(Snapshot(7, SlabId(6), known, namespaces, batches, **snapshot), now)
    check_integrity(store)
    return store, restored


def batch(
    *places: tuple[int, int], namespace: int = 1, shards: int = 1, names: str = "abcdefgh"
) -> ChunkBatch:
    count = len(places) // shards
    return ChunkBatch(
        namespace=namespace,
        shards=shards,
        keys=[name.encode() for name in names[:count]],
        token_count=[CHUNK_TOKENS] * count,
        flags=[0] * count,
        maker=[-1] * count,
        makers=[],
        slab=[slab for slab, _ in places],
        slot=[slot for _, slot in places],
        generation=list(range(len(places))),
        checksum=list(range(100, 100 + len(places))),
    )


def deleted(store: Store) -> set[tuple[int, bytes]]:
    return set(store.state.deleted_chunks)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param((4, 0), id="the slab is gone"),
        pytest.param((3, 1), id="the slot is another's"),
        pytest.param((3, 4), id="beyond the slab"),
        pytest.param((3, -1), id="before the slab"),
        pytest.param((5, 0), id="of another size"),
    ],
)
def test_a_chunk_whose_place_is_not_its_own_is_dropped(place: tuple[int, int]) -> None:
    store, restored = restore(batch((3, 1), place, (3, 2)))
    assert (restored.chunks, restored.chunks_dropped) == (2, 1)
    assert deleted(store) == {(1, b"b")}
    index = store.state.namespaces[NamespaceId(1)].index
    assert set(index) == {b"a", b"c"}
    for key, slot in ((b"a", 1), (b"c", 2)):
        row = index[ChunkKey(key)]
        assert store.cold_tier.slabs.place_of(row, 0).slot == slot
        assert store.state.chunks.shard_checksum[store.state.chunks.shard0[row]] == (
            100 if slot == 1 else 102
        )


def test_of_a_chunk_with_one_bad_shard_no_slot_is_kept() -> None:
    two = [ev.NamespaceRecord(1, "alice", spec(shards=2))]
    store, restored = restore(batch((3, 0), (4, 0), (3, 0), (3, 1), shards=2), namespaces=two)
    assert (restored.chunks, restored.chunks_dropped) == (1, 1)
    assert set(store.state.namespaces[NamespaceId(1)].index) == {b"b"}


def test_chunks_of_another_shape_are_dropped() -> None:
    store, restored = restore(batch((3, 0), (3, 1), (3, 2), (3, 3), shards=2))
    assert (restored.chunks, restored.chunks_dropped) == (0, 2)
    assert deleted(store) == {(1, b"a"), (1, b"b")}


def test_a_namespace_that_the_index_does_not_know_is_deleted_with_all_it_has() -> None:
    entry = ev.SessionEntry(ChunkKey(b"a"), 0, 4)
    store, restored = restore(
        batch((3, 0)),
        batch((3, 1), namespace=8),
        sessions=[ev.SessionRecord(9, b"s", 1, (entry,)), ev.SessionRecord(1, b"s", 1, (entry,))],
    )
    assert (restored.chunks, restored.chunks_dropped, restored.sessions) == (1, 1, 1)
    assert restored.next_namespace == 10
    index = next(effect for effect in store.apply(ev.Tick(), 1) if isinstance(effect, ev.WriteIndex))
    assert index.namespaces_deleted == (8, 9)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_several_epochs_the_newest_is_served_and_the_others_go(order: tuple[int, ...]) -> None:
    records = [ev.NamespaceRecord(1 + epoch, "alice", epoch_of(spec(), epoch)) for epoch in order]
    another = ev.NamespaceRecord(9, "bob", spec())
    store, restored = restore(
        *(batch((3, epoch), namespace=1 + epoch) for epoch in range(3)), namespaces=[*records, another]
    )
    assert restored.chunks == 3
    retired = {namespace.id: namespace.retired for namespace in store.state.namespaces.values()}
    assert retired == {1: True, 2: True, 3: False, 9: False}
    index = next(effect for effect in store.apply(ev.Tick(), 1) if isinstance(effect, ev.WriteIndex))
    assert set(index.chunks_deleted) == {(1, b"a"), (2, b"a")}
    assert set(store.state.namespaces[NamespaceId(3)].index) == {b"a"}


def test_flags_that_mean_nothing_on_disk_are_not_taken_over() -> None:
    plain = batch((3, 0))
    store, _ = restore(replace(plain, flags=[0xFFFF]))
    assert store.state.chunks.pins[0] == 0  # and `check_integrity` has seen the row


def test_many_batches_make_one_list_in_the_order_of_the_index() -> None:
    store, restored = restore(
        batch((3, 0), (3, 1)), batch((3, 3), (3, 2), names="xy"), batch((4, 0), names="z")
    )
    assert restored.chunks == 4
    chunks = store.state.chunks
    (cold,) = store.state.cold.by_sizes.values()
    assert [chunks.key[row] for row in store.state.policy.unneeded(cold)] == [b"a", b"b", b"x", b"y"]
