"""What a restart knows: slabs, namespaces, chunks and sessions out of the index, put into the core in bulk.

A million chunks must be in service within seconds, so columns are filled from whole arrays, not chunk by chunk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from kvstore.core.bulk import table
from kvstore.core.chunks import (
    COMMITTED,
    DERIVED,
    DURABLE,
    FOREIGN,
    NONE,
    STORED,
    TAIL,
)
from kvstore.core.cold_tier import Restored
from kvstore.core.events import Bar, Heeded, IndexUsage, NamespaceRecord, SessionEntry, SessionRecord
from kvstore.core.manifests import Manifest, Session
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.ssd.durability import PERSISTENT_FLAGS, Durability
from kvstore.core.ssd.slabs import Slabs
from kvstore.core.state import DISK, State
from kvstore.types import ChunkKey, NamespaceId, Reason, SegmentId, SlabId, SlotState

FLAGS = COMMITTED | STORED | DURABLE


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of one namespace, as columns. Per chunk: key, token_count, flags, maker (index into `makers`, -1: none);
    per chunk and shard, shard by shard within a chunk: slab, slot, generation, checksum.

    Any sequence of ints will do; `array` of type i (checksum, generation: Q) is fastest."""

    namespace: int
    shards: int
    keys: Sequence[bytes]
    token_count: Sequence[int]
    flags: Sequence[int]
    maker: Sequence[int]
    makers: Sequence[bytes]
    slab: Sequence[int]
    slot: Sequence[int]
    generation: Sequence[int]
    checksum: Sequence[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    boot_count: int
    next_slab: SlabId
    slabs: Sequence[tuple[SlabId, int, int]]
    """(slab, slot bytes, slots)"""
    namespaces: Sequence[NamespaceRecord] = ()
    chunks: Iterable[ChunkBatch] = ()
    sessions: Sequence[SessionRecord] = ()
    makers: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """Digests that stand for several makers."""
    bars: Sequence[Bar] = ()
    heeded: Sequence[Heeded] = ()
    usage: IndexUsage | None = None


def restore(state: State, files: Slabs, durability: Durability, snapshot: Snapshot) -> Restored:
    """Before the first event. Whatever does not fit together is dropped, never served, and deleted from the index:
    slabs of another size or beyond the cap, namespaces whose chunks no longer fit in the arena or that the index does
    not know, chunks whose slots are not there or another's."""
    done = Restored()
    state.restored_at = state.now
    state.index_usage = snapshot.usage
    state.makers.update(snapshot.makers)
    state.bars.update(((bar.mark, bar.maker), bar) for bar in snapshot.bars)
    state.heeded.update((one.channel, one) for one in snapshot.heeded)
    durability.indexed_makers.update(snapshot.makers)
    state.sessions.begin_versions(snapshot.boot_count)
    slabs = _slabs(state, files, snapshot, done)
    unusable: set[NamespaceId] = set()
    for record in snapshot.namespaces:
        done.next_namespace = max(done.next_namespace, record.number + 1)
        if not _namespace(state, record):
            unusable.add(NamespaceId(record.number))
    for other in state.namespaces.values():
        other.retired = state.newest_epoch[other.family] is not other
    for batch in snapshot.chunks:
        done.next_namespace = max(done.next_namespace, batch.namespace + 1)
        namespace = state.namespaces.get(NamespaceId(batch.namespace))
        if namespace is None:
            unusable.add(NamespaceId(batch.namespace))
            done.chunks_dropped += len(batch.keys)
        elif batch.shards != namespace.shards:
            _drop(state, namespace, batch.keys, done)
        else:
            _chunks(state, files, namespace, _without_barred(state, namespace, batch, done), slabs, done)
    for slab in slabs.values():
        _count_slots(state, slab)
    for session in snapshot.sessions:
        done.next_namespace = max(done.next_namespace, session.namespace + 1)
        namespace = state.namespaces.get(NamespaceId(session.namespace))
        if namespace is None:
            unusable.add(NamespaceId(session.namespace))
        else:
            _session(state, namespace, session, done)
    durability.deleted_namespaces += sorted(unusable)
    durability.forget_makers()
    return done


def _slabs(state: State, files: Slabs, snapshot: Snapshot, done: Restored) -> dict[int, Segment]:
    slabs: dict[int, Segment] = {}
    absent = [segment for segment in state.ssd_slots.segments if segment.phase is Phase.ABSENT]
    state.ssd_slots.number_from(snapshot.next_slab)
    for slab_id, slot_bytes, slots in snapshot.slabs:
        if len(slabs) == len(absent) or slots != state.ssd_slots.slots_of(slot_bytes):
            done.slabs_dropped.append(slab_id)
            continue
        segment = absent[len(slabs)]
        state.ssd_slots.restore(segment, SegmentId(slab_id))
        state.ssd_slots.assign(segment, DISK, slot_bytes)
        slabs[slab_id] = segment
    files.unusable += done.slabs_dropped
    return slabs


def _namespace(state: State, record: NamespaceRecord) -> bool:
    """False: the arena was made smaller, and its chunks cannot be served any more."""
    spec = record.spec
    slot_bytes = tuple(state.pool.slot_bytes(size) for size in spec.shard_bytes)
    if max(slot_bytes) > state.limits.segment_bytes or sum(slot_bytes) > state.limits.pin_bytes_max:
        return False
    family = spec.digest(record.tenant)
    namespace = Namespace(
        NamespaceId(record.number), record.tenant, spec, family, spec.shard_count, slot_bytes, sum(slot_bytes)
    )
    state.add_namespace(namespace)
    newest = state.newest_epoch.get(family)
    if newest is None or newest.spec.weights_epoch < spec.weights_epoch:
        state.newest_epoch[family] = namespace
    return True


def _drop(state: State, namespace: Namespace, keys: Iterable[bytes], done: Restored) -> None:
    for key in keys:
        state.delete_record(namespace.id, ChunkKey(key))
        done.chunks_dropped += 1


def _chunks(
    state: State,
    files: Slabs,
    namespace: Namespace,
    batch: ChunkBatch,
    slabs: dict[int, Segment],
    done: Restored,
) -> None:
    chunks = state.chunks
    shards = batch.shards
    first = chunks.new_rows(0)
    bad = _claim(files, namespace, batch, slabs, first)
    if bad:
        _drop(state, namespace, (batch.keys[number] for number in sorted(bad)), done)
        batch = _without(batch, bad)
    count = len(batch.keys)
    if not count:
        return
    assert chunks.new_rows(count) == first
    places = chunks.new_shards(count * shards)
    rows = slice(first, first + count)
    keys = cast("Sequence[ChunkKey]", batch.keys)
    chunks.key[rows] = keys
    chunks.namespace[rows] = array("i", [namespace.id]) * count
    chunks.used_at[rows] = chunks.born_at[rows] = array("q", [state.now]) * count
    chunks.tokens[rows] = _column("i", batch.token_count)
    table.set_makers(chunks, first, batch.maker, batch.makers)
    chunks.shard0[rows] = array("i", range(places, places + count * shards, shards))
    foreign = FOREIGN if state.limits.forgets_told else 0  # nobody knows any more where they came from
    flags = {kept: kept & PERSISTENT_FLAGS | FLAGS | foreign for kept in set(batch.flags)}
    chunks.flags[rows] = array("H", map(flags.__getitem__, batch.flags))
    chunks.reason[rows] = bytes([Reason.NONE]) * count
    of_shards = slice(places, places + count * shards)
    index = {slab_id: slab.index for slab_id, slab in slabs.items()}
    chunks.shard_checksum[of_shards] = _column("Q", batch.checksum)
    chunks.disk_slab[of_shards] = array("i", map(index.__getitem__, batch.slab))
    chunks.disk_slot[of_shards] = _column("i", batch.slot)
    chunks.disk_generation[of_shards] = _column("Q", batch.generation)
    namespace.index.update(zip(keys, range(first, first + count), strict=True))
    state.policy.add_last_many(namespace.ssd, np.arange(first, first + count))
    namespace.cold += count
    namespace.below += count
    done.chunks += count


def _without_barred(state: State, namespace: Namespace, batch: ChunkBatch, done: Restored) -> ChunkBatch:
    """What a purge of its maker had not reached when the daemon ended is deleted now."""
    barred = [
        number
        for number, maker in enumerate(batch.makers)
        if any(
            state.is_barred(namespace.tenant, member, purged=True)
            for member in state.makers.get(maker, (maker,))
        )
    ]
    if not barred:
        return batch
    gone = set(np.flatnonzero(np.isin(np.asarray(batch.maker), barred)).tolist())
    for number in gone:
        state.delete_record(namespace.id, ChunkKey(batch.keys[number]))
    done.chunks_barred += len(gone)
    return _without(batch, gone)


def _claim(
    files: Slabs, namespace: Namespace, batch: ChunkBatch, slabs: dict[int, Segment], first: int
) -> set[int]:
    """Own the slots of each chunk, all or none: each in a slab that exists, of the right size, and free. Returns the
    numbers of those that cannot; the others are rows from `first` on."""
    owners = [
        {slab_id: slab.owner for slab_id, slab in slabs.items() if slab.slot_bytes == slot_bytes}
        for slot_bytes in (files.slot_bytes(namespace, shard) for shard in range(batch.shards))
    ]
    bad: set[int] = set()
    row = first
    if batch.shards == 1:  # the same as below, without a list per chunk
        for number, (slab_id, slot) in enumerate(zip(batch.slab, batch.slot, strict=True)):
            owner = owners[0].get(slab_id)
            if owner is not None and 0 <= slot < len(owner) and owner[slot] == NONE:
                owner[slot] = row
                row += 1
            else:
                bad.add(number)
        return bad
    at = iter(zip(batch.slab, batch.slot, strict=True))
    for number in range(len(batch.keys)):
        claimed: list[tuple[array[int], int]] = []
        for of_slab, (slab_id, slot) in zip(
            owners, at, strict=False
        ):  # takes no more from `at` than there are shards
            owner = of_slab.get(slab_id)
            if owner is not None and 0 <= slot < len(owner) and owner[slot] == NONE:
                owner[slot] = row
                claimed.append((owner, slot))
        if len(claimed) == batch.shards:
            row += 1
        else:
            bad.add(number)
            for owner, slot in claimed:
                owner[slot] = NONE
    return bad


def _without(batch: ChunkBatch, bad: set[int]) -> ChunkBatch:
    good = [number for number in range(len(batch.keys)) if number not in bad]
    places = [number * batch.shards + shard for number in good for shard in range(batch.shards)]
    return replace(
        batch,
        keys=[batch.keys[number] for number in good],
        token_count=[batch.token_count[number] for number in good],
        flags=[batch.flags[number] for number in good],
        maker=[batch.maker[number] for number in good],
        slab=[batch.slab[place] for place in places],
        slot=[batch.slot[place] for place in places],
        generation=[batch.generation[place] for place in places],
        checksum=[batch.checksum[place] for place in places],
    )


def _column(code: str, values: Sequence[int]) -> array[int]:
    """As an array of this type, without a copy where it is one."""
    return values if isinstance(values, array) and values.typecode == code else array(code, values)


def _count_slots(state: State, slab: Segment) -> None:
    """States, counts and free list of a slab, from its owners."""
    owner = slab.owner
    if NONE in owner:
        slab.state = bytearray(SlotState.FREE if row == NONE else SlotState.READY for row in owner)
        slab.free = array("i", [slot for slot in range(len(owner) - 1, -1, -1) if owner[slot] == NONE])
    else:
        slab.state = bytearray([SlotState.READY]) * len(owner)
        slab.free = array("i")
    slab.counts = [len(slab.free), 0, len(owner) - len(slab.free), 0]
    of_class = state.ssd_slots.classes[DISK, slab.slot_bytes]
    of_class.free -= slab.counts[SlotState.READY]
    if not slab.empty:
        state.ssd_slots.empties.pop(slab.index, None)
    if not slab.free:
        of_class.with_free.pop(slab.index, None)


def _lost(state: State, namespace: Namespace, entry: SessionEntry, *, exact: bool) -> int:
    """The ghost of a chunk that only a manifest remembers. What it was is settled if the manifest tells: an entry that
    follows something approximate, and is not approximate itself, is derived."""
    chunks = state.chunks
    row = chunks.new_row(namespace.id, entry.key, state.now)
    chunks.reason[row] = Reason.LOST
    chunks.tokens[row] = entry.token_count
    if entry.token_count < namespace.spec.chunk_tokens:
        chunks.flags[row] |= TAIL
    if not entry.approximate:
        chunks.flags[row] |= COMMITTED if exact else COMMITTED | DERIVED
    return row


def _session(state: State, namespace: Namespace, record: SessionRecord, done: Restored) -> None:
    """A name and its manifest; chunks that were in DRAM only come back as ghosts that say so."""
    manifest = Manifest()
    exact = True
    for entry in record.entries:
        exact = exact and entry.first_token == manifest.end and entry.delta == 0
        row = namespace.index.get(entry.key, NONE)
        if row == NONE:
            row = namespace.index[entry.key] = _lost(state, namespace, entry, exact=exact)
        manifest.add(row, entry.first_token, entry.token_count, entry.delta, entry.approximate)
        exact = exact and not entry.approximate
    for row, count in Counter(manifest.rows).items():
        state.chunks.refs[row] += count
    session = Session(record.session, namespace.id, record.version, manifest, state.now, indexed=True)
    state.sessions.put(session, None)
    namespace.sessions += 1
    done.sessions += 1
