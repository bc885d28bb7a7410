"""The invariants, stated as assertions over the whole state. Costs a pass over everything: for tests and idle time."""

from __future__ import annotations

from collections import Counter

from kvstore.core.chunks import (
    DOOMED,
    DURABLE,
    LISTED,
    NONE,
    QUEUED,
    RISING,
    STORED,
    STORING,
    WANTED,
    ChunkTable,
    LinkedRows,
)
from kvstore.core.disk import Disk
from kvstore.core.pool import Phase
from kvstore.core.saves import Saves
from kvstore.core.segments import Segments
from kvstore.core.state import State
from kvstore.types import SlotState


def check_integrity(
    state: State, saves: Saves, segments: Segments, disk: Disk, audit_rows: list[int]
) -> None:
    """Raises AssertionError, naming what is wrong. `audit_rows` are pinned by checksum ops that are under way."""
    state.pool.check_integrity()
    state.disk.check_integrity()
    _check_chunks(state)
    _check_slots(state, saves, segments, disk)
    _check_disk(state, disk)
    _check_pins(state, segments, disk, audit_rows)
    _check_references(state)
    _check_workers(state)


def _check_chunks(state: State) -> None:
    chunks = state.chunks
    free = set(chunks.free_rows)
    indexed = 0
    for namespace in state.namespaces.values():
        indexed += len(namespace.index)
        visible = cold = partial = pinned = 0
        wanted = set(chunks.walk(namespace.wanted))
        listed = [*chunks.walk(namespace.recency), *wanted]
        assert len(listed) == namespace.recency.count + namespace.wanted.count, namespace
        _check_list(chunks, namespace.recency)
        _check_list(chunks, namespace.wanted)
        for row in listed:
            assert bool(chunks.flags[row] & WANTED) == (row in wanted), chunks.describe(row)
            assert chunks.namespace[row] == namespace.id and state.is_hit(row) and not chunks.pins[row], (
                chunks.describe(row)
            )
        for key, row in namespace.index.items():
            where = chunks.describe(row)
            assert row not in free and chunks.key[row] == key and chunks.namespace[row] == namespace.id, where
            if chunks.shard0[row] == NONE:
                assert chunks.ready[row] == chunks.reserved[row] == chunks.pins[row] == 0, where
                assert bool(chunks.flags[row] & LISTED) == (chunks.refs[row] == 0), where
                continue
            places = range(chunks.shard0[row], chunks.shard0[row] + namespace.shards)
            assert chunks.ready[row] == sum(chunks.shard_ready[place] for place in places), where
            placed = sum(chunks.shard_segment[place] != NONE for place in places)
            assert placed == chunks.ready[row] + chunks.reserved[row], where
            resident = chunks.ready[row] == namespace.shards
            visible += resident and not chunks.flags[row] & DOOMED
            stored = bool(chunks.flags[row] & STORED)
            cold += stored and not resident and not chunks.flags[row] & DOOMED
            partial += not resident and not stored
            pinned += chunks.pins[row] > 0
            rising = bool(chunks.flags[row] & RISING)
            assert not rising or (stored and not resident), where
            assert bool(chunks.flags[row] & LISTED) == (chunks.pins[row] == 0 and not rising), where
            assert resident or not chunks.pins[row], where
            if resident and chunks.flags[row] & DOOMED:
                assert chunks.pins[row], where
        counted = (visible, cold, partial, pinned)
        assert counted == (namespace.visible, namespace.cold, namespace.partial, namespace.pinned), (
            namespace,
            counted,
        )
    assert indexed == chunks.rows_used, (indexed, chunks)
    _check_tree(chunks, free)
    ghosts = list(chunks.walk(state.ghosts))
    assert len(ghosts) == state.ghosts.count <= state.limits.ghosts_max, state.ghosts
    assert all(chunks.shard0[row] == NONE for row in ghosts)
    _check_list(chunks, state.ghosts)
    _check_list(chunks, state.cold)
    assert sum(1 for _ in chunks.walk(state.cold)) == state.cold.count, state.cold
    for row in chunks.walk(state.cold):
        assert chunks.flags[row] & (STORED | RISING) == STORED and not chunks.ready[row], chunks.describe(row)
    partials = list(chunks.walk(state.partials))
    assert len(partials) == state.partials.count == sum(n.partial for n in state.namespaces.values())
    for row in partials:
        assert chunks.shard0[row] != NONE and not state.is_resident(row), chunks.describe(row)
        assert not chunks.flags[row] & STORED, chunks.describe(row)
    assert [chunks.used_at[row] for row in partials] == sorted(chunks.used_at[row] for row in partials)
    _check_list(chunks, state.partials)


def _check_tree(chunks: ChunkTable, free: set[int]) -> None:
    children = 0
    for row in range(len(chunks.key)):
        previous = NONE
        for child in chunks.children(row):
            assert row not in free and child not in free, (chunks.describe(row), chunks.describe(child))
            assert chunks.parent[child] == row and chunks.prev_sibling[child] == previous, chunks.describe(
                child
            )
            assert chunks.namespace[child] == chunks.namespace[row], chunks.describe(child)
            previous = child
            children += 1
    assert children == sum(parent != NONE for parent in chunks.parent)


def _check_list(chunks: ChunkTable, rows: LinkedRows) -> None:
    previous = NONE
    for row in chunks.walk(rows):
        assert chunks.older[row] == previous and chunks.flags[row] & LISTED, chunks.describe(row)
        previous = row
    assert rows.newest == previous


def _check_disk(state: State, disk: Disk) -> None:
    """Every slot in use of every slab belongs to one shard; STORED means all shards are there."""
    chunks = state.chunks
    owners: Counter[tuple[int, int]] = Counter()
    for namespace in state.namespaces.values():
        for row in namespace.index.values():
            if chunks.shard0[row] == NONE:
                continue
            where = chunks.describe(row)
            flags = chunks.flags[row]
            assert not (flags & DURABLE and not flags & STORED), where
            on_disk = bool(flags & (STORED | STORING))
            for shard in range(namespace.shards):
                place = chunks.shard0[row] + shard
                assert (chunks.disk_slab[place] != NONE) == on_disk, where
                if on_disk:
                    slab, slot = state.disk.segments[chunks.disk_slab[place]], chunks.disk_slot[place]
                    owners[slab.index, slot] += 1
                    assert slab.owner[slot] == row and slab.slot_bytes == disk.slabs.slot_bytes(
                        namespace, shard
                    ), where
                    wanted = SlotState.READY if flags & STORED else SlotState.RESERVED
                    assert slab.state[slot] == wanted, (where, slab)
    assert all(count == 1 for count in owners.values()), owners
    used = sum(slab.counts[SlotState.RESERVED] + slab.counts[SlotState.READY] for slab in state.disk.segments)
    assert used == len(owners), (used, len(owners))
    for read in disk.reads.values():
        for row in read.rows if read.quarantined is None else ():
            assert chunks.flags[row] & RISING, chunks.describe(row)
    queued = {row for row, key in state.to_store if state.is_queued(row, key)}
    assert queued == {row for row, flags in enumerate(chunks.flags) if flags & QUEUED}, queued
    assert not state.demanded & state.prefetched, state.demanded & state.prefetched
    for row in state.demanded:
        assert state.is_resident(row), chunks.describe(row)
    for row in state.prefetched:
        assert chunks.flags[row] & (RISING | LISTED) or chunks.pins[row], chunks.describe(row)


def _check_slots(state: State, saves: Saves, segments: Segments, disk: Disk) -> None:
    """Invariant 10: each slot that is in use is used by exactly one shard, move or copy."""
    chunks = state.chunks
    owners: Counter[tuple[int, int]] = Counter()
    for namespace in state.namespaces.values():
        for row in namespace.index.values():
            if chunks.shard0[row] == NONE:
                continue
            for shard in range(namespace.shards):
                place = chunks.shard0[row] + shard
                if chunks.shard_segment[place] == NONE:
                    continue
                segment, slot = state.pool.segments[chunks.shard_segment[place]], chunks.shard_slot[place]
                owners[segment.index, slot] += 1
                where = f"{chunks.describe(row)} in {segment} slot {slot}"
                # Invariant 9: a chunk lies in segments of its own namespace only.
                assert segment.phase is Phase.ASSIGNED and segment.namespace == namespace.id, where
                assert segment.slot_bytes == namespace.slot_bytes[shard], where
                assert segment.owner[slot] == row, where
                wanted = SlotState.READY if chunks.shard_ready[place] else SlotState.RESERVED
                assert segment.state[slot] == wanted, where
    for move in segments.moves.values():
        for target, slot in move.targets:
            owners[target.index, slot] += 1
            assert target.state[slot] == SlotState.RESERVED, (target, slot)
    assert all(count == 1 for count in owners.values()), owners
    used = sum(
        segment.counts[SlotState.RESERVED] + segment.counts[SlotState.READY]
        for segment in state.pool.segments
        if segment.phase is Phase.ASSIGNED
    )
    assert used == len(owners), (used, len(owners))
    for read in disk.reads.values():
        for segment, slot in read.quarantined or ():
            assert segment.state[slot] == SlotState.QUARANTINED, (segment, slot)
    for late in saves.late.values():
        for segment, slot in late.slots:
            assert segment.state[slot] == SlotState.QUARANTINED, (segment, slot)


def _check_pins(state: State, segments: Segments, disk: Disk, audit_rows: list[int]) -> None:
    chunks = state.chunks
    pins: Counter[int] = Counter(audit_rows)
    for lease in state.leases.leases.values():
        pins.update(lease.rows)
        assert lease.id in lease.group.leases and lease.group.members, lease
    for move in segments.moves.values():
        pins.update(move.rows)
    for write in disk.writes.values():
        pins.update(write.rows)
    for row in range(len(chunks.key)):
        assert chunks.pins[row] == pins[row], (chunks.describe(row), pins[row])
    per_segment: Counter[int] = Counter()
    for row in pins:
        start = chunks.shard0[row]
        for place in range(start, start + state.namespace_of(row).shards):
            per_segment[chunks.shard_segment[place]] += 1
    for segment in state.pool.segments:
        assert segment.pinned == per_segment[segment.index], (segment, per_segment[segment.index])
    for group in {worker.group for worker in state.workers.values()}:
        assert set(group.pins) == {
            row for lease_id in group.leases for row in state.leases.leases[lease_id].rows
        }, group
        charged = sum(state.namespace_of(row).chunk_bytes for row in group.pins)
        assert group.pinned_bytes == charged <= state.limits.pin_bytes_max, (group, charged)


def _check_references(state: State) -> None:
    chunks = state.chunks
    refs: Counter[int] = Counter()
    sessions: Counter[int] = Counter()
    for session in state.sessions.by_name.values():
        refs.update(session.manifest.rows)
        sessions[session.namespace] += 1
        assert session.version > 0, session
        for row in session.manifest.rows:
            assert chunks.namespace[row] == session.namespace, (session.name, chunks.describe(row))
    for row in range(len(chunks.key)):
        assert chunks.refs[row] == refs[row], (chunks.describe(row), refs[row])
    for namespace in state.namespaces.values():
        assert namespace.sessions == sessions[namespace.id], namespace
    assert state.sessions.entries == sum(refs.values()) <= state.limits.manifest_entries_max, state.sessions
    for row, waits in state.waits.items():
        assert waits and chunks.shard0[row] != NONE and not state.is_resident(row), chunks.describe(row)


def _check_workers(state: State) -> None:
    waiting = Counter(wait.worker for waits in state.waits.values() for wait in waits)
    for worker in state.workers.values():
        assert worker.id in worker.group.members, worker
        assert worker.waits == waiting[worker.id], (worker, worker.waits, waiting[worker.id])
        mine = [r for r in state.reservations.values() if r.worker == worker.id]
        assert {r.id for r in mine} == worker.reservations, worker
        assert worker.reserved_bytes == sum(r.reserved_bytes for r in mine), worker
        for segment_id in worker.holds:
            segment = state.pool.by_id[segment_id]
            assert worker.id in segment.holders, (worker, segment)
            # Invariant 9: nobody holds a segment of a namespace that it did not open.
            assert segment.namespace in worker.opened, (worker, segment)
    for reservation in state.reservations.values():
        for row in reservation.rows:
            for shard in reservation.shards:
                place = state.chunks.shard0[row] + shard
                segment = state.pool.segments[state.chunks.shard_segment[place]]
                assert segment.state[state.chunks.shard_slot[place]] == SlotState.RESERVED, reservation
