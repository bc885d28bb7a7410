"""What a restart knows: slabs, namespaces, chunks and sessions out of the index, put into the core in bulk.

A million chunks must be in service within seconds, so columns are filled from whole arrays, not chunk by chunk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core.chunks import COMMITTED, DURABLE, LISTED, NONE, STORED, TAIL
from kvstore.core.disk import Disk
from kvstore.core.events import NamespaceRecord, SessionRecord
from kvstore.core.manifests import Manifest, Session
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.state import DISK, State
from kvstore.types import ChunkKey, NamespaceId, Reason, SegmentId, SlabId, SlotState

FLAGS = COMMITTED | STORED | DURABLE | LISTED


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of one namespace, as columns. Per chunk: key, token_count, flags, maker (index into `makers`, -1: none);
    per chunk and shard, shard by shard within a chunk: slab, slot, generation, checksum."""

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


@dataclass(slots=True)
class Restored:
    chunks: int = 0
    chunks_dropped: int = 0
    """Their slab is gone, or the slot is another's: the index promised too much."""
    sessions: int = 0
    slabs_dropped: list[SlabId] = field(default_factory=list)


def restore(state: State, disk: Disk, snapshot: Snapshot) -> Restored:
    """Before the first event. Whatever does not fit together is dropped, never served: records verify themselves."""
    done = Restored()
    disk.begin_generations(snapshot.boot_count)
    state.sessions.begin_versions(snapshot.boot_count)
    slabs = _slabs(state, disk, snapshot, done)
    for record in snapshot.namespaces:
        _namespace(state, record)
    for batch in snapshot.chunks:
        namespace = state.namespaces.get(NamespaceId(batch.namespace))
        if namespace is not None and batch.shards == namespace.shards:
            _chunks(state, disk, namespace, batch, slabs, done)
        else:
            done.chunks_dropped += len(batch.keys)
            for key in batch.keys:
                state.dirty_chunks[NamespaceId(batch.namespace), ChunkKey(key)] = state.now
    for slab in slabs.values():
        _count_slots(state, slab)
    for session in snapshot.sessions:
        _session(state, session, done)
    return done


def _slabs(state: State, disk: Disk, snapshot: Snapshot, done: Restored) -> dict[int, Segment]:
    slabs: dict[int, Segment] = {}
    absent = [segment for segment in state.disk.segments if segment.phase is Phase.ABSENT]
    state.disk.number_from(snapshot.next_slab)
    for (slab_id, slot_bytes, slots), segment in zip(snapshot.slabs, absent, strict=False):
        assert slots == state.disk.slots_of(slot_bytes), (slab_id, slots, slot_bytes)
        state.disk.restore(segment, SegmentId(slab_id))
        state.disk.assign(segment, DISK, slot_bytes)
        slabs[slab_id] = segment
    done.slabs_dropped = [slab_id for slab_id, _, _ in snapshot.slabs[len(absent) :]]
    return slabs


def _namespace(state: State, record: NamespaceRecord) -> None:
    spec = record.spec
    slot_bytes = tuple(state.pool.slot_bytes(size) for size in spec.shard_bytes)
    if max(slot_bytes) > state.limits.segment_bytes or sum(slot_bytes) > state.limits.pin_bytes_max:
        return  # the arena was made smaller: its chunks cannot be served any more
    family = spec.digest(record.tenant)
    namespace = Namespace(
        NamespaceId(record.number), record.tenant, spec, family, spec.shard_count, slot_bytes, sum(slot_bytes)
    )
    state.namespaces[namespace.id] = namespace
    newest = state.newest_epoch.get(family)
    if newest is None or newest.spec.weights_epoch < spec.weights_epoch:
        state.newest_epoch[family] = namespace
    for other in state.namespaces.values():
        other.retired = state.newest_epoch[other.family] is not other


def _chunks(
    state: State,
    disk: Disk,
    namespace: Namespace,
    batch: ChunkBatch,
    slabs: dict[int, Segment],
    done: Restored,
) -> None:
    chunks = state.chunks
    shards = batch.shards
    wanted = [disk.slot_bytes(namespace, shard) for shard in range(shards)]
    good: list[int] = []
    first = chunks.new_rows(0)
    for index in range(len(batch.keys)):
        start = index * shards
        row = first + len(good)
        if _claim(batch, start, shards, wanted, slabs, row):
            good.append(index)
        else:
            done.chunks_dropped += 1
            state.dirty_chunks[namespace.id, ChunkKey(batch.keys[index])] = state.now
    count = len(good)
    if not count:
        return
    whole = count == len(batch.keys)
    per_chunk = range(len(batch.keys)) if whole else good
    per_shard = (
        range(len(batch.keys) * shards)
        if whole
        else [i * shards + shard for i in good for shard in range(shards)]
    )
    keys = [ChunkKey(batch.keys[i]) for i in per_chunk]
    assert chunks.new_rows(count) == first
    places = chunks.new_shards(count * shards)
    rows = slice(first, first + count)
    chunks.key[rows] = keys
    chunks.namespace[rows] = array("i", [namespace.id]) * count
    chunks.older[rows] = array("i", range(first - 1, first + count - 1))
    chunks.newer[rows] = array("i", range(first + 1, first + count + 1))
    _link(state, first, count)
    chunks.used_at[rows] = chunks.born_at[rows] = array("q", [state.now]) * count
    chunks.tokens[rows] = array("i", [int(batch.token_count[i]) for i in per_chunk])
    chunks.set_makers(first, [int(batch.maker[i]) for i in per_chunk], batch.makers)
    chunks.shard0[rows] = array("i", range(places, places + count * shards, shards))
    chunks.flags[rows] = array("H", [int(batch.flags[i]) | FLAGS for i in per_chunk])
    chunks.reason[rows] = bytes([Reason.NONE]) * count
    shards_of = slice(places, places + count * shards)
    chunks.shard_checksum[shards_of] = array("Q", [int(batch.checksum[i]) for i in per_shard])
    chunks.disk_slab[shards_of] = array("i", [slabs[int(batch.slab[i])].index for i in per_shard])
    chunks.disk_slot[shards_of] = array("i", [int(batch.slot[i]) for i in per_shard])
    chunks.disk_generation[shards_of] = array("Q", [int(batch.generation[i]) for i in per_shard])
    namespace.index.update(zip(keys, range(first, first + count), strict=True))
    namespace.cold += count
    done.chunks += count


def _claim(
    batch: ChunkBatch, start: int, shards: int, wanted: Sequence[int], slabs: dict[int, Segment], row: int
) -> bool:
    """Own the slots of one chunk, all or none: each in a slab that exists, of the right size, and free."""
    claimed: list[tuple[Segment, int]] = []
    for shard in range(shards):
        slab = slabs.get(int(batch.slab[start + shard]))
        slot = int(batch.slot[start + shard])
        fits = slab is not None and slab.slot_bytes == wanted[shard] and 0 <= slot < slab.capacity
        if slab is None or not fits or slab.owner[slot] != NONE:
            for other, taken in claimed:
                other.owner[taken] = NONE
            return False
        slab.owner[slot] = row
        claimed.append((slab, slot))
    return True


def _link(state: State, first: int, count: int) -> None:
    """The new rows go at the newest end of the cold list, in order; their links are set but for the two ends."""
    chunks = state.chunks
    newest = state.cold.newest
    chunks.older[first] = newest
    chunks.newer[first + count - 1] = NONE
    if newest != NONE:
        chunks.newer[newest] = first
    else:
        state.cold.oldest = first
    state.cold.newest = first + count - 1
    state.cold.count += count


def _count_slots(state: State, slab: Segment) -> None:
    """States, counts and free list of a slab, from its owners."""
    owner = slab.owner
    slab.state = bytearray(SlotState.FREE if row == NONE else SlotState.READY for row in owner)
    slab.free = array("i", [slot for slot in range(len(owner) - 1, -1, -1) if owner[slot] == NONE])
    slab.counts = [len(slab.free), 0, len(owner) - len(slab.free), 0]
    of_class = state.disk.classes[DISK, slab.slot_bytes]
    of_class.free -= slab.counts[SlotState.READY]
    if not slab.free:
        of_class.with_free.pop(slab.index, None)


def _session(state: State, record: SessionRecord, done: Restored) -> None:
    """A name and its manifest; chunks that were in DRAM only come back as ghosts that say so."""
    namespace = state.namespaces.get(NamespaceId(record.namespace))
    if namespace is None:
        return
    manifest = Manifest()
    for entry in record.entries:
        row = namespace.index.get(entry.key, NONE)
        if row == NONE:
            row = namespace.index[entry.key] = state.chunks.new_row(namespace.id, entry.key, state.now)
            state.chunks.reason[row] = Reason.LOST
            state.chunks.tokens[row] = entry.token_count
            tail = TAIL if entry.token_count < namespace.spec.chunk_tokens else 0
            state.chunks.flags[row] |= COMMITTED | tail
        manifest.add(row, entry.first_token, entry.token_count, entry.delta, entry.approximate)
    for row, count in Counter(manifest.rows).items():
        state.chunks.refs[row] += count
    state.sessions.put(Session(record.session, namespace.id, record.version, manifest, state.now), None)
    namespace.sessions += 1
    done.sessions += 1
