"""What survives a restart: the index of the SSD tier, written in batches, and the commits that wait for it.

One transaction at a time; what changes meanwhile goes into the next. Nothing is durable before its transaction has
returned, and nothing of a failed transaction counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.chunks import DERIVED, DOOMED, DURABLE, NONE, STORED, TAIL, TRANSIENT
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase
from kvstore.core.ssd.slabs import Degrade, Slabs, long_deadline_ms
from kvstore.core.state import State
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.types import (
    ChunkKey,
    DiskResult,
    DiskState,
    Millis,
    NamespaceId,
    OpId,
    Reason,
    SegmentId,
    SlabId,
)

INDEX_BATCH_MAX = 4096
INDEX_ENTRIES_MAX = 16_384
"""Of the sessions in one transaction; a longer one goes alone."""
INDEX_ROOM_MIN = 64
PERSISTENT_FLAGS = DERIVED | TAIL | TRANSIENT


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


class Durability:
    def __init__(self, state: State, slabs: Slabs, degrade: Degrade) -> None:
        self.state = state
        self._slabs = slabs
        self._degrade = degrade
        self.index: tuple[OpId, IndexWrite] | None = None
        """The transaction under way."""
        self.waits: list[DurableWait] = []
        self.dirty_namespaces: dict[NamespaceId, Namespace] = {}
        self.deleted_namespaces: list[NamespaceId] = []
        self.unsynced: set[SlabId] = set()
        """Slab files that were written since they were last synced."""
        self._index_full = False
        """The next transaction only deletes."""
        self.indexed_makers: set[bytes] = set()
        """Digests of several makers that the index explains."""
        self.hurry = 0
        """How many wait for the index to be up to date, beside `waits`."""

    def __repr__(self) -> str:
        return f"Durability({len(self.state.dirty_chunks)} index records to write, {len(self.waits)} commits wait)"

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget something. A namespace that was only opened is nothing to remember: its
        row goes along with the first chunk or session in it."""
        state = self.state
        return bool(self.index or state.dirty_chunks or state.dirty_sessions)

    @property
    def in_flight(self) -> frozenset[tuple[NamespaceId, ChunkKey]]:
        """Chunks whose row the transaction under way writes or deletes."""
        if self.index is None:
            return frozenset()
        effect = self.index[1].effect
        written = ((NamespaceId(record.namespace), record.key) for record in effect.chunks)
        deleted = ((NamespaceId(number), key) for number, key in effect.chunks_deleted)
        return frozenset((*written, *deleted))

    @property
    def overdue(self) -> bool:
        return self.index is not None and self.index[1].deadline <= self.state.now

    def write(self) -> None:
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
        going = bool(self._slabs.retiring or self._slabs.unusable or self.deleted_namespaces)
        if not (going or state.dirty_chunks or state.dirty_sessions or self.dirty_namespaces):
            return
        urgent = (
            going
            or self.waits
            or self.hurry
            or len(state.dirty_chunks) >= INDEX_BATCH_MAX
            or self._index_full
        )
        if not urgent and state.now < oldest + due_ms:
            return
        op = state.new_op()
        effect, rows = self._batch(op)
        self.index = (op, IndexWrite(effect, rows, oldest, state.now + long_deadline_ms(state)))
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
                entries = session.manifest.entries(chunks.key)
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
            tuple(sorted(self.unsynced)),
            namespaces=new,
            namespaces_deleted=tuple(self.deleted_namespaces),
            makers=tuple(
                (maker, state.makers[maker])
                for maker in {put.maker for put in puts} - self.indexed_makers
                if maker in state.makers
            ),
            chunks=tuple(puts),
            chunks_deleted=tuple(deletes),
            sessions=tuple(sessions),
            sessions_deleted=tuple(gone),
            slabs_deleted=(*(SlabId(slab.id) for slab in self._slabs.retiring), *self._slabs.unusable),
        )
        self.unsynced = set()
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

    def ended(self, result: DiskResult, why: str, failed: Sequence[SlabId] = ()) -> None:
        """`failed`: the slab files whose sync failed. What was not synced in there is lost: no later sync brings it."""
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
            self.indexed_makers.update(maker for maker, _ in effect.makers)
            gone = set(effect.slabs_deleted)
            for slab in [slab for slab in self._slabs.retiring if SlabId(slab.id) in gone]:
                self._slabs.retiring.remove(slab)
                state.disk.replace(slab, Phase.ABSENT)
            self._slabs.unusable = [slab_id for slab_id in self._slabs.unusable if slab_id not in gone]
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
        self.unsynced.update(set(effect.slabs).difference(failed))
        for slab_id in failed:
            if (segment := state.disk.by_id.get(SegmentId(slab_id))) is not None:
                self._slabs.fails(segment)
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

    def await_durable(
        self, ticket: ev.Ticket, namespace: Namespace, keys: Sequence[ChunkKey], answer: ev.Committed
    ) -> None:
        """Answer `ticket` when the chunks are on SSD and indexed; at once, with an error, if that cannot be now."""
        state = self.state
        if state.disk_state is not DiskState.OK:
            why = f": {state.disk_why}" if state.disk_why else ""
            self._answer_not_durable(ticket, f"the SSD tier is {state.disk_state.name.lower()}{why}")
            return
        chunks = tuple((namespace.id, key) for key in keys)
        missing = {chunk for chunk in chunks if not self._is_durable(chunk)}
        if not missing:
            state.reply(ticket, answer)
            return
        deadline = state.now + 2 * state.limits.durable_within_ms + state.limits.disk_deadline_ms
        self.waits.append(DurableWait(ticket, answer, chunks, missing, deadline))

    def _is_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> bool:
        namespace = self.state.namespaces.get(chunk[0])
        row = NONE if namespace is None else namespace.index.get(chunk[1], NONE)
        return row != NONE and bool(self.state.chunks.flags[row] & DURABLE)

    def _tell_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> None:
        if not self.waits:
            return
        for wait in self.waits:
            wait.missing.discard(chunk)
            if wait.missing:
                continue
            if all(map(self._is_durable, wait.chunks)):
                self.state.reply(wait.ticket, wait.answer)
            else:
                self._answer_not_durable(wait.ticket, "the SSD is too full for all of it at once")
        self.waits = [wait for wait in self.waits if wait.missing]

    def end_waits(self) -> None:
        state = self.state
        over = [wait for wait in self.waits if wait.deadline <= state.now]
        if over:
            self.waits = [wait for wait in self.waits if wait.deadline > state.now]
            for wait in over:
                state.reply(
                    wait.ticket,
                    DeadlineExceeded("committed and visible, but not durable in time", field="wait"),
                )

    def fail_waits(self, why: str) -> None:
        """The tier degrades: nobody waits for it."""
        for wait in self.waits:
            self._answer_not_durable(wait.ticket, why)
        self.waits.clear()

    def _answer_not_durable(self, ticket: ev.Ticket, why: str) -> None:
        self.state.reply(ticket, Unavailable(f"committed and visible, but not durable: {why}", field="wait"))
