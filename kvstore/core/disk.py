"""The SSD tier as the core sees it: what is written, read back, indexed, given up, and when it is healthy again.

    resident -> STORING -> STORED -> DURABLE        save-through: every committed chunk, soon after its commit
    resident and STORED -> cold                     demotion: the DRAM slots go (State.demote)
    cold -> RISING -> resident                      promotion: an Acquire or a hint asked for it

A write pins its source; a read fills RESERVED slots. All effects are bounded in bytes and carry a deadline that is kept
here: a late read's targets are quarantined until the call returns, a late write's sources stay pinned until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from kvstore.core import events as ev
from kvstore.core.chunks import (
    DERIVED,
    DOOMED,
    DURABLE,
    LISTED,
    NONE,
    QUEUED,
    RISING,
    STORED,
    STORING,
    TAIL,
)
from kvstore.core.namespaces import Namespace, chunk_salt
from kvstore.core.pool import Phase, Segment
from kvstore.core.segments import Segments
from kvstore.core.state import DISK, State
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.types import (
    ChunkKey,
    DiskResult,
    DiskState,
    Extent,
    Millis,
    NamespaceId,
    OpId,
    Reason,
    Record,
    SlabId,
    SlotState,
)

CHUNKS_PER_OP_MAX = 64
BYTES_PER_OP_MAX = 8 << 20
INDEX_BATCH_MAX = 4096
INDEX_ENTRIES_MAX = 16_384
"""Of the sessions in one transaction; a longer one goes alone."""
INDEX_ROOM_MIN = 64
VICTIMS_LOOKED_AT_MAX = 64
READ_ERRORS_MAX = 3
"""Failed reads in a row, after which the tier is off until a probe succeeds."""
LONG_DEADLINE_MS = 10_000
"""For an index transaction with its syncs, and for making a slab file."""
SLAB_RETRY_MS = 10_000
"""After a slab file could not be made (full), how long until the next try."""
PERSISTENT_FLAGS = DERIVED | TAIL


@dataclass(slots=True)
class Write:
    rows: list[int]
    bytes: int
    deadline: Millis


@dataclass(slots=True)
class Read:
    rows: list[int]
    bytes: int
    deadline: Millis
    quarantined: list[tuple[Segment, int]] | None = None
    """The targets, once the read is late."""


@dataclass(slots=True)
class IndexWrite:
    effect: ev.WriteIndex
    rows: list[tuple[int, int]]
    """(chunk row, generation of its first shard): durable with this transaction, if still the same."""
    since: Millis
    """When the oldest of what is in it changed."""
    deadline: Millis


@dataclass(slots=True)
class DurableWait:
    """A commit that is answered when all its chunks are durable."""

    ticket: ev.Ticket
    answer: ev.Committed
    chunks: tuple[tuple[NamespaceId, ChunkKey], ...]
    missing: set[tuple[NamespaceId, ChunkKey]]
    """Those that were never durable since."""
    deadline: Millis


@dataclass(slots=True)
class NewSlab:
    segment: Segment
    slot_bytes: int
    deadline: Millis


@dataclass(slots=True)
class Slabs:
    """Slab files that come and go."""

    creating: dict[OpId, NewSlab] = field(default_factory=dict)
    retiring: list[Segment] = field(default_factory=list)
    """Empty, and to be deleted with the next index transaction."""
    unusable: list[SlabId] = field(default_factory=list)
    """Likewise: files that a restart found and has no use for."""
    retry_at: Millis = 0


class Disk:
    def __init__(self, state: State, segments: Segments) -> None:
        self.state = state
        self._segments = segments
        self.writes: dict[OpId, Write] = {}
        self.reads: dict[OpId, Read] = {}
        self.index: tuple[OpId, IndexWrite] | None = None
        self.probe: OpId | None = None
        self.slabs = Slabs()
        self.demanded: deque[tuple[int, ChunkKey]] = deque()
        """Rising chunks whose read has not begun: asked for by an Acquire, or (below) by a hint."""
        self.foreseen: deque[tuple[int, ChunkKey]] = deque()
        self.durable_waits: list[DurableWait] = []
        self.dirty_namespaces: dict[NamespaceId, Namespace] = {}
        self.deleted_namespaces: list[NamespaceId] = []
        self._unsynced: set[SlabId] = set()
        self._index_full = False
        """The next transaction only deletes."""
        self._probe_at: Millis = 0
        self._read_errors = 0
        self._next_generation = 1

    def __repr__(self) -> str:
        return (
            f"Disk({self.state.disk_state.name}, {len(self.writes)} writes, {len(self.reads)} reads, "
            f"{len(self.state.to_store)} chunks to store, {len(self.state.dirty_chunks)} index records to write)"
        )

    @property
    def present(self) -> bool:
        return self.state.disk_state is not DiskState.ABSENT

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget something that a healthy disk is about to remember."""
        state = self.state
        if state.disk_state is not DiskState.OK:
            return False
        waiting = self.writes or self.index or (state.to_store and not state.disk_full)
        return bool(waiting or state.dirty_chunks or state.dirty_sessions or self.dirty_namespaces)

    @property
    def _long_deadline_ms(self) -> Millis:
        """For what may take long without anything being wrong."""
        return max(LONG_DEADLINE_MS, self.state.limits.disk_deadline_ms)

    # ------------------------------------------------------------------------------------------------ each step

    def pump(self) -> None:
        """At the end of every step: start what may be started."""
        if not self.present:
            return
        state = self.state
        if state.disk_state is DiskState.OK:
            if state.to_store and not state.disk_full:
                self._start_writes()
            self._write_index()
        if self.demanded or self.foreseen:
            self._start_reads()

    def tick(self) -> None:
        if not self.present:
            return
        state = self.state
        state.disk_full = False
        for op, read in self.reads.items():
            if read.quarantined is None and read.deadline <= state.now:
                self._late_read(op, read)
        late = any(read.quarantined is not None for read in self.reads.values())
        if any(write.deadline <= state.now for write in self.writes.values()):
            late = True
            self._degrade(DiskState.OFF, "a write missed its deadline")
        if self.index is not None and self.index[1].deadline <= state.now:
            late = True
            self._degrade(DiskState.READ_ONLY, "an index transaction missed its deadline")
        if any(new.deadline <= state.now for new in self.slabs.creating.values()):
            late = True
            self._degrade(DiskState.READ_ONLY, "a slab file was not made in time")
        self._end_durable_waits()
        unhealthy = state.disk_state is not DiskState.OK
        if unhealthy and not late and self.probe is None and self._probe_at <= state.now:
            self.probe = state.new_op()
            state.effects.append(ev.ProbeDisk(self.probe))

    def _degrade(self, to: DiskState, why: str) -> None:
        state = self.state
        if state.disk_state < to:
            state.disk_state = to
            state.disk_why = why
            state.counters[f"ssd_degraded_{to.name.lower()}"] += 1
            self._probe_at = state.now + state.limits.probe_interval_ms
            for wait in self.durable_waits:
                state.reply(
                    wait.ticket, Unavailable(f"committed and visible, but not durable: {why}", field="wait")
                )
            self.durable_waits.clear()
        if to is DiskState.OFF:
            for row, key in (*self.demanded, *self.foreseen):
                self._not_risen(row, key)
            self.demanded.clear()
            self.foreseen.clear()

    # ---------------------------------------------------------------------------------------------------- writes

    def _start_writes(self) -> None:
        state = self.state
        in_flight = sum(write.bytes for write in self.writes.values())
        while state.to_store and in_flight < state.limits.disk_bytes_in_flight_max:
            rows: list[int] = []
            size = 0
            while state.to_store and len(rows) < CHUNKS_PER_OP_MAX and size < BYTES_PER_OP_MAX:
                row, key = state.to_store[0]
                storable = self._storable(row, key)
                if storable and not self._place(row):
                    if state.disk_full:  # for this slot size at least: another may have room
                        state.to_store.rotate(-1)
                    break
                state.to_store.popleft()
                if state.is_queued(row, key):
                    state.chunks.flags[row] &= ~QUEUED
                if storable:
                    rows.append(row)
                    size += state.namespace_of(row).spec.chunk_bytes
            if not rows:
                return
            self._write(rows, size)
            in_flight += size

    def _storable(self, row: int, key: ChunkKey) -> bool:
        state = self.state
        flags = state.chunks.flags[row]
        if not state.is_queued(row, key) or not state.is_hit(row) or flags & (STORED | STORING):
            return False
        return self._fits(state.namespace_of(row))

    def _fits(self, namespace: Namespace) -> bool:
        """Whether a slab file has room for a slot of each size; if not, the chunks stay in DRAM alone."""
        largest = max(self.slot_bytes(namespace, shard) for shard in range(namespace.shards))
        return self.state.disk.slots_of(largest) > 0

    def _place(self, row: int) -> bool:
        """Disk slots for all shards of a chunk, or none."""
        state = self.state
        namespace = state.namespace_of(row)
        for shard in range(namespace.shards):
            taken = self._take(self.slot_bytes(namespace, shard), row)
            if taken is None:
                for placed in range(shard):
                    state.unplace_from_disk(row, placed)
                return False
            self._next_generation += 1
            state.place_on_disk(row, shard, *taken, self._next_generation)
        state.chunks.flags[row] |= STORING
        return True

    def slot_bytes(self, namespace: Namespace, shard: int) -> int:
        """In a slab file: header, bytes, and padding to whole pages (`format.slot_bytes`)."""
        header = self.state.limits.disk_header_bytes
        return self.state.disk.slot_bytes(header + namespace.spec.shard_bytes[shard])

    def _write(self, rows: list[int], size: int) -> None:
        state = self.state
        op = state.new_op()
        records: list[Record] = []
        sources: list[Extent] = []
        targets = []
        for row in rows:
            state.pin(row)
            namespace = state.namespace_of(row)
            for shard in range(namespace.shards):
                records.append(self._record(namespace, row, shard))
                sources.append(state.extent(row, shard, namespace.spec.shard_bytes[shard]))
                targets.append(state.disk_place(row, shard))
        self.writes[op] = Write(rows, size, state.now + state.limits.disk_deadline_ms)
        state.effects.append(ev.WriteRecords(op, tuple(records), tuple(sources), tuple(targets)))

    def _record(self, namespace: Namespace, row: int, shard: int) -> Record:
        chunks = self.state.chunks
        return Record(
            namespace=chunk_salt(namespace.family, namespace.spec.weights_epoch),
            key=chunks.key[row],
            shard=shard,
            length=namespace.spec.shard_bytes[shard],
            checksum=chunks.shard_checksum[chunks.shard0[row] + shard],
            maker=chunks.maker(row),
        )

    def _written(self, op: OpId, results: Sequence[DiskResult], why: str) -> None:
        state = self.state
        chunks = state.chunks
        write = self.writes.pop(op)
        at = 0
        worst = DiskResult.OK
        for row in write.rows:
            namespace = state.namespace_of(row)
            mine = results[at : at + namespace.shards]
            at += namespace.shards
            chunks.flags[row] &= ~STORING
            if all(result is DiskResult.OK for result in mine):
                for shard in range(namespace.shards):
                    place = chunks.shard0[row] + shard
                    slab = state.disk.segments[chunks.disk_slab[place]]
                    state.disk.fill(slab, chunks.disk_slot[place])
                    slab.touched_at = state.now
                    self._unsynced.add(SlabId(slab.id))
                chunks.flags[row] |= STORED
                state.dirty_chunks.setdefault((namespace.id, chunks.key[row]), state.now)
                state.counters["chunks_stored"] += 1
            else:
                worst = max(worst, *mine)
                for shard in range(namespace.shards):
                    state.unplace_from_disk(row, shard)
                state.store_later(row)
        for namespace_id, group in groupby(write.rows, chunks.namespace.__getitem__):
            state.unpin(state.namespaces[NamespaceId(namespace_id)], list(group), used=False)
        state.counters["ssd_bytes_written"] += write.bytes
        if worst is not DiskResult.OK:
            state.counters["ssd_write_errors"] += 1
            self._degrade(DiskState.READ_ONLY, why)

    # ------------------------------------------------------------------------------------------------------ slabs

    def _take(self, slot_bytes: int, row: int) -> tuple[Segment, int] | None:
        """A RESERVED disk slot; None when one may come later (a slab is being made) or none can be had.

        free slot -> new slab file -> slots of chunks that left DRAM longest ago -> another slab class's oldest file
          -> the SSD copy of the resident chunk that was used longest ago
        """
        pool = self.state.disk
        slab = pool.classes.get((DISK, slot_bytes))
        taken = pool.take(slab, row) if slab is not None else None
        if taken is not None:
            return taken
        if any(new.slot_bytes == slot_bytes for new in self.slabs.creating.values()):
            return None
        if self._new_slab(slot_bytes) or self.slabs.retiring:
            return None
        if self._evict(slot_bytes):
            return pool.take(pool.classes[DISK, slot_bytes], row)
        if not self._retire_slab(slot_bytes):
            self.state.disk_full = True
        return None

    def _new_slab(self, slot_bytes: int) -> bool:
        state = self.state
        if state.now < self.slabs.retry_at or state.disk.slots_of(slot_bytes) < 1:
            return False
        for segment in state.disk.segments:
            if segment.phase is Phase.ABSENT:
                state.disk.begin(segment)
                op = state.new_op()
                self.slabs.creating[op] = NewSlab(segment, slot_bytes, state.now + self._long_deadline_ms)
                state.effects.append(
                    ev.CreateSlab(op, SlabId(segment.id), slot_bytes, state.disk.slots_of(slot_bytes))
                )
                return True
        return False

    def slab_ready(self, op: OpId) -> None:
        new = self.slabs.creating.pop(op)
        self.state.disk.created(new.segment)
        self.state.disk.assign(new.segment, DISK, new.slot_bytes)
        self.state.disk_full = False

    def _slab_failed(self, op: OpId, result: DiskResult, why: str) -> None:
        """No room for another file: go on with those that exist; with none at all nothing can be written."""
        state = self.state
        state.disk.replace(self.slabs.creating.pop(op).segment, Phase.ABSENT)
        self.slabs.retry_at = state.now + SLAB_RETRY_MS
        state.counters["ssd_slab_failures"] += 1
        if result is not DiskResult.NO_SPACE or not state.disk.classes:
            self._degrade(DiskState.READ_ONLY, why)

    def _evict(self, slot_bytes: int) -> bool:
        """Drop one chunk that has a slot of this size: the one that left DRAM longest ago and no queued job needs."""
        state = self.state
        chosen = NONE
        for row in islice(state.chunks.walk(state.cold), VICTIMS_LOOKED_AT_MAX):
            if self._has_slot_of(row, slot_bytes):
                chosen = row if chosen == NONE else chosen
                if row not in state.policy.rank:
                    chosen = row
                    break
        if chosen == NONE:
            return False
        state.evict_from_disk(chosen)
        return True

    def _has_slot_of(self, row: int, slot_bytes: int) -> bool:
        namespace = self.state.namespace_of(row)
        return any(self.slot_bytes(namespace, shard) == slot_bytes for shard in range(namespace.shards))

    def _retire_slab(self, slot_bytes: int) -> bool:
        """Empty the file that was written longest ago: another class's, or our own with resident chunks in it (they
        stay in DRAM)."""
        state = self.state
        candidates = [
            s for s in state.disk.segments if s.phase is Phase.ASSIGNED and not s.counts[SlotState.RESERVED]
        ]
        candidates = [s for s in candidates if not s.counts[SlotState.QUARANTINED] and not self._busy(s)]
        if not candidates:
            return False
        oldest = min(candidates, key=lambda s: (not s.empty, s.slot_bytes == slot_bytes, s.touched_at))
        for row in dict.fromkeys(row for row in oldest.owner if row != NONE):
            state.evict_from_disk(row)
        if oldest.slot_bytes == slot_bytes:
            return True
        state.disk.retire(oldest, DISK)
        self.slabs.retiring.append(oldest)
        return True

    def _busy(self, slab: Segment) -> bool:
        flags = self.state.chunks.flags
        return any(row != NONE and flags[row] & (RISING | STORING) for row in slab.owner)

    # ------------------------------------------------------------------------------------------------------ reads

    def rise(self, row: int, *, demanded: bool) -> None:
        """Begin to bring a cold chunk back to DRAM; `settle` tells whoever waits how it ends."""
        state = self.state
        chunks = state.chunks
        if chunks.flags[row] & RISING:
            if demanded and row in state.prefetched:
                state.prefetched.discard(row)
                state.counters["prefetch_late"] += 1
                if not chunks.reserved[row]:
                    self.demanded.append((row, chunks.key[row]))
            return
        if chunks.flags[row] & LISTED:
            chunks.unlink(state.cold, row)
        chunks.flags[row] |= RISING
        if demanded:
            self.demanded.append((row, chunks.key[row]))
        else:
            state.prefetched.add(row)
            self.foreseen.append((row, chunks.key[row]))

    def _start_reads(self) -> None:
        state = self.state
        in_flight = sum(read.bytes for read in self.reads.values())
        while (self.demanded or self.foreseen) and in_flight < state.limits.disk_bytes_in_flight_max:
            rows: list[int] = []
            size = 0
            while (
                (self.demanded or self.foreseen) and len(rows) < CHUNKS_PER_OP_MAX and size < BYTES_PER_OP_MAX
            ):
                demanded = bool(self.demanded)
                row, key = (self.demanded or self.foreseen).popleft()
                if (
                    state.chunks.key[row] != key
                    or not state.chunks.flags[row] & RISING
                    or state.chunks.reserved[row]
                ):
                    continue
                if state.chunks.flags[row] & DOOMED or not self._reserve(row, demanded=demanded):
                    self._not_risen(row, key)
                    continue
                rows.append(row)
                size += state.namespace_of(row).spec.chunk_bytes
            if rows:
                self._read(rows, size)
                in_flight += size

    def _reserve(self, row: int, *, demanded: bool) -> bool:
        """DRAM slots for a rising chunk. A prefetch takes none from what an earlier job needs."""
        state = self.state
        namespace = state.namespace_of(row)
        sooner_than = -1 if demanded else state.policy.rank.get(row, 0)
        for shard in range(namespace.shards):
            taken = self._segments.allocate(namespace, namespace.slot_bytes[shard], row, sooner_than)
            if taken is None:
                for placed in range(shard):
                    state.free_slot(*state.unplace_shard(row, placed))
                state.counters["promotions_without_slot"] += 1
                return False
            state.place_shard(row, shard, *taken)
        return True

    def _not_risen(self, row: int, key: ChunkKey) -> None:
        state = self.state
        flags = state.chunks.flags[row]
        if state.chunks.key[row] == key and flags & RISING and not state.chunks.reserved[row]:
            state.prefetched.discard(row)
            state.make_cold(row)

    def _read(self, rows: list[int], size: int) -> None:
        state = self.state
        op = state.new_op()
        records = []
        sources = []
        targets = []
        for row in rows:
            namespace = state.namespace_of(row)
            for shard in range(namespace.shards):
                length = namespace.spec.shard_bytes[shard]
                # The checksum at commit is kept with the shard while it is on SSD: it is what the read must match.
                records.append(self._record(namespace, row, shard))
                sources.append(state.disk_place(row, shard))
                targets.append(state.extent(row, shard, length))
        self.reads[op] = Read(rows, size, state.now + state.limits.disk_deadline_ms)
        state.effects.append(ev.ReadRecords(op, tuple(records), tuple(sources), tuple(targets)))

    def _has_read(self, op: OpId, results: Sequence[DiskResult]) -> None:
        state = self.state
        chunks = state.chunks
        read = self.reads.pop(op)
        if read.quarantined is not None:
            for segment, slot in read.quarantined:
                state.free_slot(segment, slot)
            return
        risen: list[int] = []
        at = 0
        for row in read.rows:
            namespace = state.namespace_of(row)
            mine = results[at : at + namespace.shards]
            at += namespace.shards
            if all(result is DiskResult.OK for result in mine) and not chunks.flags[row] & DOOMED:
                self._read_errors = 0
                how = "ahead" if row in state.prefetched else "on_demand"
                for shard in range(namespace.shards):
                    checksum = chunks.shard_checksum[chunks.shard0[row] + shard]
                    if state.shard_filled(row, shard, checksum):
                        risen.append(row)
                if row not in state.prefetched:
                    state.demanded.add(row)
                state.counters[f"chunks_promoted_{how}"] += 1
                continue
            self._drop_targets(row)
            if DiskResult.CORRUPT in mine:
                state.counters["chunks_corrupt"] += 1
                chunks.flags[row] &= ~RISING
                state.to_ghost(row, Reason.CORRUPT)
                continue
            if not chunks.flags[row] & DOOMED:
                state.counters["ssd_read_errors"] += 1
                self._read_errors += 1
            state.prefetched.discard(row)
            state.make_cold(row)
        state.arrived(risen)
        state.counters["ssd_bytes_read"] += read.bytes
        if self._read_errors >= READ_ERRORS_MAX:
            self._degrade(DiskState.OFF, "reads fail")

    def _drop_targets(self, row: int) -> None:
        state = self.state
        for shard in range(state.namespace_of(row).shards):
            state.free_slot(*state.unplace_shard(row, shard))

    def _late_read(self, op: OpId, read: Read) -> None:
        """Nobody waits for it any longer; its targets stay out of use until the call has returned."""
        state = self.state
        read.quarantined = []
        for row in read.rows:
            for shard in range(state.namespace_of(row).shards):
                segment, slot = state.unplace_shard(row, shard)
                state.quarantine_slot(segment, slot)
                read.quarantined.append((segment, slot))
            state.prefetched.discard(row)
            state.make_cold(row)
        state.counters["ssd_reads_late"] += 1
        self._degrade(DiskState.OFF, "a read missed its deadline")

    # ------------------------------------------------------------------------------------------------------ index

    def _write_index(self) -> None:
        """One transaction at a time; when something has waited for a quarter of durable_within, somebody waits for
        durability, or a batch is full."""
        state = self.state
        if self.index is not None:
            return
        due_ms = state.limits.durable_within_ms // 4
        oldest = min(
            next(iter(state.dirty_chunks.values()), state.now),
            next(iter(state.dirty_sessions.values()), state.now),
        )
        going = bool(self.slabs.retiring or self.slabs.unusable or self.deleted_namespaces)
        if not (going or state.dirty_chunks or state.dirty_sessions or self.dirty_namespaces):
            return
        urgent = going or self.durable_waits or len(state.dirty_chunks) >= INDEX_BATCH_MAX or self._index_full
        if not urgent and state.now < oldest + due_ms:
            return
        op = state.new_op()
        effect, rows = self._batch(op)
        self.index = (op, IndexWrite(effect, rows, oldest, state.now + self._long_deadline_ms))
        state.indexing_since = oldest
        state.effects.append(effect)

    def _batch(self, op: OpId) -> tuple[ev.WriteIndex, list[tuple[int, int]]]:
        state = self.state
        chunks = state.chunks
        puts: list[ev.ChunkRecord] = []
        deletes: list[tuple[int, ChunkKey]] = []
        rows: list[tuple[int, int]] = []
        looked_at = None if self._index_full else INDEX_BATCH_MAX
        for namespace_id, key in list(islice(state.dirty_chunks, looked_at)):
            namespace = state.namespaces.get(namespace_id)
            row = NONE if namespace is None else namespace.index.get(key, NONE)
            if namespace is None or row == NONE or chunks.flags[row] & (STORED | DOOMED) != STORED:
                deletes.append((namespace_id, key))
            elif self._index_full:
                continue
            else:
                puts.append(self._chunk_record(namespace, row))
                rows.append((row, chunks.disk_generation[chunks.shard0[row]]))
            del state.dirty_chunks[namespace_id, key]
        sessions: list[ev.SessionRecord] = []
        gone: list[tuple[int, bytes]] = []
        entries_left = INDEX_ENTRIES_MAX
        for namespace_id, name in list(islice(state.dirty_sessions, looked_at)):
            session = state.sessions.by_name.get((namespace_id, name))
            if session is None:
                gone.append((namespace_id, name))
            elif self._index_full or entries_left <= 0:
                continue
            else:
                entries_left -= len(session.manifest)
                m = session.manifest
                entries = tuple(
                    ev.SessionEntry(
                        chunks.key[row], m.first[i], m.count[i], m.delta[i], bool(m.approximate[i])
                    )
                    for i, row in enumerate(m.rows)
                )
                sessions.append(ev.SessionRecord(namespace_id, name, session.version, entries))
            del state.dirty_sessions[namespace_id, name]
        # A dict that was emptied from its front keeps the holes, and finding its first entry passes all of them.
        state.dirty_chunks = state.dirty_chunks or {}
        state.dirty_sessions = state.dirty_sessions or {}
        new: tuple[ev.NamespaceRecord, ...] = ()
        if not self._index_full:
            new = tuple(ev.NamespaceRecord(n.id, n.tenant, n.spec) for n in self.dirty_namespaces.values())
            self.dirty_namespaces = {}
        effect = ev.WriteIndex(
            op,
            tuple(sorted(self._unsynced)),
            namespaces=new,
            namespaces_deleted=tuple(self.deleted_namespaces),
            chunks=tuple(puts),
            chunks_deleted=tuple(deletes),
            sessions=tuple(sessions),
            sessions_deleted=tuple(gone),
            slabs_deleted=(*(SlabId(slab.id) for slab in self.slabs.retiring), *self.slabs.unusable),
        )
        self._unsynced = set()
        self.deleted_namespaces = []
        return effect, rows

    def _chunk_record(self, namespace: Namespace, row: int) -> ev.ChunkRecord:
        chunks = self.state.chunks
        start = chunks.shard0[row]
        return ev.ChunkRecord(
            namespace.id,
            chunks.key[row],
            chunks.tokens[row],
            chunks.flags[row] & PERSISTENT_FLAGS,
            chunks.maker(row),
            tuple(self.state.disk_place(row, shard) for shard in range(namespace.shards)),
            tuple(chunks.shard_checksum[start : start + namespace.shards]),
        )

    def _indexed(self, result: DiskResult, why: str) -> None:
        state = self.state
        chunks = state.chunks
        assert self.index is not None
        write = self.index[1]
        effect, rows = write.effect, write.rows
        self.index = None
        state.indexing_since = None
        if result is DiskResult.OK:
            for row, generation in rows:
                if self._is_stored(row, generation):
                    chunks.flags[row] |= DURABLE
                    self._tell_durable((NamespaceId(chunks.namespace[row]), chunks.key[row]))
            gone = set(effect.slabs_deleted)
            for slab in [slab for slab in self.slabs.retiring if SlabId(slab.id) in gone]:
                self.slabs.retiring.remove(slab)
                state.disk.replace(slab, Phase.ABSENT)
            self.slabs.unusable = [slab_id for slab_id in self.slabs.unusable if slab_id not in gone]
            state.counters["index_transactions"] += 1
            self._index_full = False
            return
        # Nothing of it is in the index: all of it is to be written again, and first. A slot that one of these chunks
        # gave up may have been filled since; the index must not name its new owner while it still names the old one.
        since = write.since
        again = [(NamespaceId(record.namespace), record.key) for record in effect.chunks]
        again += [(NamespaceId(number), key) for number, key in effect.chunks_deleted]
        state.dirty_chunks = dict.fromkeys(again, since) | state.dirty_chunks
        names = [(NamespaceId(session.namespace), session.session) for session in effect.sessions]
        names += [(NamespaceId(number), name) for number, name in effect.sessions_deleted]
        state.dirty_sessions = dict.fromkeys(names, since) | state.dirty_sessions
        for new in effect.namespaces:
            namespace = state.namespaces.get(NamespaceId(new.number))
            if namespace is not None:
                self.dirty_namespaces[namespace.id] = namespace
        self.deleted_namespaces += [NamespaceId(number) for number in effect.namespaces_deleted]
        self._unsynced.update(effect.slabs)
        if result is DiskResult.CORRUPT:
            self._write_anew(rows)
        state.counters["index_errors"] += 1
        if result is DiskResult.NO_SPACE and not self._index_full and self._make_room(len(effect.chunks)):
            return
        self._index_full = False
        self._degrade(DiskState.READ_ONLY, why)

    def _make_room(self, records: int) -> bool:
        """The index is full. The chunks that left DRAM longest ago give up theirs, in a transaction that only deletes:
        for those the index keeps a reserve. False: there are none."""
        state = self.state
        oldest = list(islice(state.chunks.walk(state.cold), max(records, INDEX_ROOM_MIN)))
        for row in oldest:
            state.evict_from_disk(row)
        self._index_full = bool(oldest)
        state.counters["index_full"] += 1
        return self._index_full

    def _write_anew(self, rows: Sequence[tuple[int, int]]) -> None:
        """A sync failed, and some of these chunks may not have reached the medium, nor ever will: syncing again proves
        nothing. Those in DRAM are written once more, elsewhere; those on SSD alone cannot become durable."""
        state = self.state
        for row, generation in rows:
            if not self._is_stored(row, generation):
                continue
            if state.is_resident(row):
                state.leave_disk(row)
                state.store_later(row)
            else:
                state.doom(row, Reason.LOST)
            state.counters["chunks_lost_by_sync"] += 1

    def _is_stored(self, row: int, generation: int) -> bool:
        """Whether what was in the row when its record got this generation still is."""
        chunks = self.state.chunks
        same = chunks.shard0[row] != NONE and chunks.disk_generation[chunks.shard0[row]] == generation
        return same and bool(chunks.flags[row] & STORED)

    # --------------------------------------------------------------------------------------------------- durability

    def await_durable(
        self, ticket: ev.Ticket, namespace: Namespace, keys: Sequence[ChunkKey], answer: ev.Committed
    ) -> None:
        """Answer `ticket` when the chunks are on SSD and indexed; at once, with an error, if that cannot be now."""
        state = self.state
        if state.disk_state is not DiskState.OK:
            why = f"the SSD tier is {state.disk_state.name.lower()}"
            state.reply(ticket, Unavailable(f"committed and visible, but not durable: {why}", field="wait"))
            return
        chunks = tuple((namespace.id, key) for key in keys)
        missing = {chunk for chunk in chunks if not self._is_durable(chunk)}
        if not missing:
            state.reply(ticket, answer)
            return
        deadline = state.now + 2 * state.limits.durable_within_ms + state.limits.disk_deadline_ms
        self.durable_waits.append(DurableWait(ticket, answer, chunks, missing, deadline))

    def _is_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> bool:
        namespace = self.state.namespaces.get(chunk[0])
        row = NONE if namespace is None else namespace.index.get(chunk[1], NONE)
        return row != NONE and bool(self.state.chunks.flags[row] & DURABLE)

    def _tell_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> None:
        if not self.durable_waits:
            return
        for wait in self.durable_waits:
            wait.missing.discard(chunk)
            if wait.missing:
                continue
            if all(map(self._is_durable, wait.chunks)):
                self.state.reply(wait.ticket, wait.answer)
            else:
                why = "the SSD is too full for all of it at once"
                self.state.reply(
                    wait.ticket, Unavailable(f"committed and visible, but not durable: {why}", field="wait")
                )
        self.durable_waits = [wait for wait in self.durable_waits if wait.missing]

    def _end_durable_waits(self) -> None:
        state = self.state
        over = [wait for wait in self.durable_waits if wait.deadline <= state.now]
        if over:
            self.durable_waits = [wait for wait in self.durable_waits if wait.deadline > state.now]
            for wait in over:
                state.reply(
                    wait.ticket,
                    DeadlineExceeded("committed and visible, but not durable in time", field="wait"),
                )

    # ----------------------------------------------------------------------------------------------------- answers

    def ended(self, op: OpId, results: Sequence[DiskResult], why: str) -> None:
        """A disk op has returned."""
        state = self.state
        if op in self.writes:
            self._written(op, results, why)
        elif op in self.reads:
            self._has_read(op, results)
        elif self.index is not None and self.index[0] == op:
            self._indexed(results[0], why)
        elif op in self.slabs.creating:
            self._slab_failed(op, results[0], why)
        else:
            assert op == self.probe, f"disk op {op} is not under way"
            self.probe = None
            if results[0] is DiskResult.OK:
                state.disk_state = DiskState.OK
                state.disk_why = ""
                state.counters["ssd_healed"] += 1
                state.disk_full = False
                self.slabs.retry_at = state.now
                self._read_errors = 0
            else:
                self._probe_at = state.now + state.limits.probe_interval_ms

    def begin_generations(self, boot_count: int) -> None:
        """Above whatever any earlier start of the daemon wrote."""
        self._next_generation = boot_count << 32
