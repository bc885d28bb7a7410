"""What survives a restart: the index of the SSD tier, written in batches, and the requests that wait for it.

One transaction at a time; what changes meanwhile goes into the next. What is to go from the index goes alone and first,
because it must not fail for want of room, nor wait for a sync. Nothing is durable, or gone, before its transaction has
returned, and nothing of a failed transaction counts. An index that is full asks for room (`core/ssd/index_room.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from kvstore.core import events as ev
from kvstore.core.chunks import DERIVED, DOOMED, DURABLE, NONE, STORED, TAIL, TRANSIENT
from kvstore.core.cold_tier import TOO_FULL
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase
from kvstore.core.ssd.row_bytes import chunk_bytes, session_bytes
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
ROOM_SHARE = 64
"""The chunks, and the sessions, of one transaction take at most what is free in the index, or one part in so many of
it: what finds no room is then little, and little gives way to it."""
GONE_WAITS_MAX = 1_024
"""Requests that wait for what they forgot to leave the index; one more is told that it is not durable."""
GONE_PATIENCE_MS = 2_000
"""How long they wait at most: an operator does, and a disk that hangs can hang for long."""
MAKERS_SWEEP_SHARE = 8
"""When so large a part of all makers' digests has come since the last look, those that nobody carries are dropped."""
AGAIN = "it is remembered until the daemon ends, and tried again; ask again to see it done"
PERSISTENT_FLAGS = DERIVED | TAIL | TRANSIENT

_Row = TypeVar("_Row")


@dataclass(slots=True)
class IndexWrite:
    effect: ev.WriteIndex
    rows: list[tuple[int, int]]
    """(chunk row, generation of its first shard): durable with this transaction, if still the same."""
    cut: list[tuple[NamespaceId, bytes]]
    """Truncated sessions whose whole leaves the index with it."""
    since: Millis
    """When the oldest of what is in it changed."""
    deadline: Millis
    named: frozenset[tuple[NamespaceId, ChunkKey]] | None = None
    """The chunks in it; None until somebody asks."""


@dataclass(slots=True)
class DurableWait:
    """A commit that is answered when all its chunks are durable."""

    ticket: ev.Ticket
    answer: ev.Committed | ev.Saved
    chunks: tuple[tuple[NamespaceId, ChunkKey], ...]
    missing: set[tuple[NamespaceId, ChunkKey]]
    """Those that were never durable since."""
    deadline: Millis


@dataclass(slots=True)
class GoneWait:
    """A Forget that is answered when what it dropped has left the index."""

    ticket: ev.Ticket
    count: int
    since: Millis
    deadline: Millis


def _older_first(again: Iterable[_Row], since: Millis, waiting: Mapping[_Row, Millis]) -> dict[_Row, Millis]:
    """What is to be done again stands first, and is as old as it was, also if it came once more meanwhile: the first
    entry tells how old the oldest is."""
    merged = dict.fromkeys(again, since)
    for row, asked in waiting.items():
        merged.setdefault(row, asked)
    return merged


class Durability:
    def __init__(self, state: State, slabs: Slabs, degrade: Degrade) -> None:
        self.state = state
        self._slabs = slabs
        self._degrade = degrade
        self.index: tuple[OpId, IndexWrite] | None = None
        """The transaction under way."""
        self.waits: dict[int, DurableWait] = {}
        """By number, in the order of their deadlines."""
        self._waits_of: dict[tuple[NamespaceId, ChunkKey], dict[int, DurableWait]] = {}
        """By chunk that they miss."""
        self._next_wait = 0
        self.dirty_namespaces: dict[NamespaceId, Namespace] = {}
        self.deleted_namespaces: list[NamespaceId] = []
        self.unsynced: set[SlabId] = set()
        """Slab files that were written since they were last synced."""
        self.deleted_makers: list[bytes] = []
        self.gone_waits: list[GoneWait] = []
        self.wants_room: ev.WriteIndex | None = None
        """What found no room in the index; some of what is there is to give way."""
        self.full_rounds = 0
        """How often in a row it found none."""
        self._deleted_last = False
        """Whether the last transaction only deleted."""
        self.delete_trouble = ""
        """Why the last deletion failed."""
        self._delete_failed_at: Millis = -1
        self._delete_again_at: Millis = 0
        self._makers_left = 0
        """Digests that were left when they were last looked through."""
        self.indexed_makers: set[bytes] = set()
        """Digests of several makers that the index explains."""
        self.hurry = 0
        """How many wait for the index to be up to date, beside `waits`."""

    def __repr__(self) -> str:
        state = self.state
        to_go = len(state.deleted_chunks) + len(state.deleted_sessions)
        return (
            f"Durability({len(state.dirty_chunks)} index records to write, {to_go} to go, "
            f"{len(self.waits)} commits wait)"
        )

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget something. A namespace that was only opened is nothing to remember: its
        row goes along with the first chunk or session in it."""
        state = self.state
        dirty = state.dirty_chunks or state.dirty_sessions or state.dirty_bars or state.dirty_heeded
        return bool(self.index or dirty or self.forgetting)

    @property
    def forgetting(self) -> bool:
        """Whether a restart now could bring back what was dropped."""
        deleting = self.index is not None and self.index[1].effect.deletes
        return bool(deleting or self.state.deleted_chunks or self.state.deleted_sessions)

    @property
    def in_flight(self) -> frozenset[tuple[NamespaceId, ChunkKey]]:
        """Chunks whose row the transaction under way writes or deletes. It is asked for each slot that waits for a
        rewrite whether its chunk is among these, hence the set is made once."""
        if self.index is None:
            return frozenset()
        write = self.index[1]
        if write.named is None:
            effect = write.effect
            written = ((NamespaceId(record.namespace), record.key) for record in effect.chunks)
            deleted = ((NamespaceId(number), key) for number, key in effect.chunks_deleted)
            write.named = frozenset((*written, *deleted))
        return write.named

    @property
    def overdue(self) -> bool:
        return self.index is not None and self.index[1].deadline <= self.state.now

    def write(self) -> None:
        """One transaction at a time, and deletions first: one that only deletes finds room in an index that is full,
        and waits for no slab file. They are tried whatever state the tier is in; writing is for a tier that is well."""
        state = self.state
        if self.index is not None:
            return
        due = state.disk_state is DiskState.OK and self._is_due()
        delete = self._deletions_due(before_writing=due)
        # By turns: where chunks are evicted all the time, something always is to go.
        first = self._write_next if due and self._deleted_last and not self.gone_waits else self._delete_next
        write = first() if delete and due else None
        if write is None:
            write = self._delete_next() if delete else self._write_next() if due else None
        if write is None:
            return
        self._deleted_last = write.effect.deletes
        self.index = (write.effect.op, write)
        state.indexing_since = write.since
        state.effects.append(write.effect)

    def _delete_next(self) -> IndexWrite:
        state = self.state
        since = min(self._oldest(state.deleted_chunks), self._oldest(state.deleted_sessions))
        effect, cut = self._deletions(state.new_op())
        return IndexWrite(effect, [], cut, since, state.now + long_deadline_ms(state))

    def _write_next(self) -> IndexWrite | None:
        """None: what was to be written is gone since, or may not be written yet."""
        state = self.state
        since = min(self._oldest(state.dirty_chunks), self._oldest(state.dirty_sessions))
        cut = list(state.cut_sessions)
        effect, rows = self._batch(state.new_op())
        if not effect.writes:
            self.unsynced.update(effect.slabs)
            return None
        cut = [name for name in cut if name not in state.cut_sessions]
        return IndexWrite(effect, rows, cut, since, state.now + long_deadline_ms(state))

    def _oldest(self, waiting: Mapping[Any, Millis]) -> Millis:
        return next(iter(waiting.values()), self.state.now)

    def _is_due(self) -> bool:
        """When something has waited for a quarter of durable_within, somebody waits for durability, a batch is full, or
        room was made for what found none."""
        state = self.state
        if state.dirty_bars:
            return True
        waiting: tuple[Mapping[Any, Millis], ...] = (
            state.dirty_chunks,
            state.dirty_sessions,
            state.dirty_heeded,
        )
        if not (any(waiting) or self.dirty_namespaces):
            return False
        oldest = min(self._oldest(each) for each in waiting)
        return bool(
            self.waits
            or self.hurry
            or self.full_rounds
            or len(state.dirty_chunks) >= INDEX_BATCH_MAX
            or state.now >= oldest + state.limits.durable_within_ms // 4
        )

    def _deletions_due(self, *, before_writing: bool) -> bool:
        state = self.state
        well = state.disk_state is DiskState.OK
        going = bool(
            self._slabs.retiring or self._slabs.unusable or self.deleted_namespaces or self.deleted_makers
        )
        cut = bool(state.cut_sessions) and (self.full_rounds or not well)
        if not (going or cut or state.deleted_chunks or state.deleted_sessions):
            return False
        if state.now < self._delete_again_at:
            return False
        oldest = min(self._oldest(state.deleted_chunks), self._oldest(state.deleted_sessions))
        return bool(
            going
            or cut
            or before_writing
            or self.full_rounds
            or self.waits
            or self.hurry
            or self.gone_waits
            or len(state.deleted_chunks) >= INDEX_BATCH_MAX
            or state.now >= oldest + state.limits.durable_within_ms // 4
        )

    def _deletions(self, op: OpId) -> tuple[ev.WriteIndex, list[tuple[NamespaceId, bytes]]]:
        """What is to go, the oldest first. A slab file, a namespace, a digest goes with the last row that names it."""
        state = self.state
        chunks = list(islice(state.deleted_chunks, INDEX_BATCH_MAX))
        names = list(islice(state.deleted_sessions, INDEX_BATCH_MAX))
        for chunk in chunks:
            del state.deleted_chunks[chunk]
        for name in names:
            del state.deleted_sessions[name]
        # A dict that was emptied from its front keeps the holes, and finding its first entry passes all of them.
        state.deleted_chunks = state.deleted_chunks or {}
        state.deleted_sessions = state.deleted_sessions or {}
        cut: list[tuple[NamespaceId, bytes]] = []
        if self.full_rounds or state.disk_state is not DiskState.OK:
            cut = list(islice(state.cut_sessions, INDEX_BATCH_MAX))
            for name in cut:
                del state.cut_sessions[name]
        last = not (state.deleted_chunks or state.deleted_sessions)
        effect = ev.WriteIndex(
            op,
            (),
            namespaces_deleted=tuple(self.deleted_namespaces) if last else (),
            makers_deleted=tuple(self.deleted_makers) if last else (),
            chunks_deleted=tuple(chunks),
            sessions_deleted=tuple(dict.fromkeys((*names, *cut))),
            slabs_deleted=(*(SlabId(slab.id) for slab in self._slabs.retiring), *self._slabs.unusable)
            if last
            else (),
        )
        if last:
            self.deleted_namespaces = []
            self.deleted_makers = []
        return effect, cut

    def _batch(self, op: OpId) -> tuple[ev.WriteIndex, list[tuple[int, int]]]:
        """What is to be written. A slot that a chunk gave up may have been filled since: the index must not name its
        new owner while it still names the old one, so what became dirty after something that is to go has to wait."""
        state = self.state
        chunks = state.chunks
        until = next(iter(state.deleted_chunks.values()), state.now + 1)
        puts: list[ev.ChunkRecord] = []
        rows: list[tuple[int, int]] = []
        bytes_max = bytes_left = self._batch_bytes_max()
        for (namespace_id, key), since in list(islice(state.dirty_chunks.items(), INDEX_BATCH_MAX)):
            if since >= until or bytes_left <= 0:
                break
            namespace = state.namespaces.get(namespace_id)
            row = NONE if namespace is None else namespace.index.get(key, NONE)
            if namespace is not None and row != NONE and chunks.flags[row] & (STORED | DOOMED) == STORED:
                bytes_left -= chunk_bytes(len(key), namespace.shards)
                puts.append(self._chunk_record(namespace, row))
                rows.append((row, chunks.disk_generation[chunks.shard0[row]]))
            del state.dirty_chunks[namespace_id, key]
        sessions: list[ev.SessionRecord] = []
        entries_left, bytes_left = INDEX_ENTRIES_MAX, bytes_max
        for namespace_id, name in list(islice(state.dirty_sessions, INDEX_BATCH_MAX)):
            session = state.sessions.by_name.get((namespace_id, name))
            if (namespace_id, name) in state.deleted_sessions:
                continue
            if session is not None:
                if entries_left <= 0 or bytes_left <= 0:
                    break
                entries_left -= len(session.manifest)
                bytes_left -= session_bytes(len(name), len(session.manifest))
                entries = session.manifest.entries(chunks.key)
                sessions.append(ev.SessionRecord(namespace_id, name, session.version, entries))
                session.indexed = True
            del state.dirty_sessions[namespace_id, name]
            state.cut_sessions.pop((namespace_id, name), None)
        state.dirty_chunks = state.dirty_chunks or {}
        state.dirty_sessions = state.dirty_sessions or {}
        makers = state.makers.keys() & {put.maker for put in puts} - self.indexed_makers
        self.deleted_makers = [digest for digest in self.deleted_makers if digest not in makers]
        new = tuple(ev.NamespaceRecord(n.id, n.tenant, n.spec) for n in self.dirty_namespaces.values())
        self.dirty_namespaces = {}
        bars = tuple(state.bars[name] for name in state.dirty_bars)
        state.dirty_bars = {}
        heeded = tuple(state.heeded[name] for name in state.dirty_heeded)
        state.dirty_heeded = {}
        effect = ev.WriteIndex(
            op,
            tuple(sorted(self.unsynced)),
            namespaces=new,
            makers=tuple((digest, state.makers[digest]) for digest in makers),
            bars=bars,
            heeded=heeded,
            chunks=tuple(puts),
            sessions=tuple(sessions),
        )
        self.unsynced = set()
        return effect, rows

    def _batch_bytes_max(self) -> int:
        usage = self.state.index_usage
        if usage is None:
            return 1 << 62
        return max(usage.bytes_max - usage.used, usage.bytes_max // ROOM_SHARE)

    def _chunk_record(self, namespace: Namespace, row: int) -> ev.ChunkRecord:
        chunks = self.state.chunks
        start = chunks.shard0[row]
        return ev.ChunkRecord(
            namespace.id,
            chunks.key[row],
            chunks.tokens[row],
            chunks.flags[row] & PERSISTENT_FLAGS,
            chunks.maker(row),
            tuple(self._slabs.place_of(row, shard) for shard in range(namespace.shards)),
            tuple(chunks.shard_checksum[start : start + namespace.shards]),
        )

    def ended(
        self,
        result: DiskResult,
        why: str,
        failed: Sequence[SlabId] = (),
        usage: ev.IndexUsage | None = None,
    ) -> None:
        """`failed`: the slab files whose sync failed. What was not synced in there is lost: no later sync brings it."""
        state = self.state
        assert self.index is not None
        write = self.index[1]
        self.index = None
        state.indexing_since = None
        state.index_usage = usage or state.index_usage
        if result is not DiskResult.OK:
            state.counters["index_errors"] += 1
            if write.effect.deletes:
                self._delete_again(write, why)
            else:
                self._write_again(write, result, why, failed)
            return
        state.counters["index_transactions"] += 1
        if write.effect.deletes:
            self._deleted(write.effect)
        else:
            self._written(write)

    def _deleted(self, effect: ev.WriteIndex) -> None:
        state = self.state
        gone = set(effect.slabs_deleted)
        for slab in [slab for slab in self._slabs.retiring if SlabId(slab.id) in gone]:
            self._slabs.retiring.remove(slab)
            state.ssd_slots.replace(slab, Phase.ABSENT)
        self._slabs.unusable = [slab_id for slab_id in self._slabs.unusable if slab_id not in gone]
        self.delete_trouble = ""
        self._delete_again_at = 0

    def _written(self, write: IndexWrite) -> None:
        state = self.state
        chunks = state.chunks
        for row, generation in write.rows:
            if self._is_stored(row, generation):
                chunks.flags[row] |= DURABLE
                self._tell_durable((NamespaceId(chunks.namespace[row]), chunks.key[row]))
        self.indexed_makers.update(maker for maker, _ in write.effect.makers)
        self.full_rounds = 0

    def _delete_again(self, write: IndexWrite, why: str) -> None:
        """Some of them may have been carried out. The others are remembered, and tried again with each probe."""
        state = self.state
        effect, since = write.effect, write.since
        chunks = [(NamespaceId(number), key) for number, key in effect.chunks_deleted]
        names = [(NamespaceId(number), name) for number, name in effect.sessions_deleted]
        cut = set(write.cut)
        state.deleted_chunks = _older_first(chunks, since, state.deleted_chunks)
        again = (name for name in names if name not in cut)
        state.deleted_sessions = _older_first(again, since, state.deleted_sessions)
        self._cut_again(write.cut)
        self.deleted_namespaces += [NamespaceId(number) for number in effect.namespaces_deleted]
        self.deleted_makers += effect.makers_deleted
        self.delete_trouble = why
        self._delete_failed_at = state.now
        self._delete_again_at = state.now + state.limits.probe_interval_ms
        self._degrade(DiskState.READ_ONLY, why)

    def _cut_again(self, cut: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Of those that are still there, the whole is in the index still."""
        state = self.state
        state.cut_sessions.update((name, None) for name in cut if name in state.sessions.by_name)

    def _write_again(self, write: IndexWrite, result: DiskResult, why: str, failed: Sequence[SlabId]) -> None:
        """All of it is to be written again, and first; what is gone since is found out then."""
        state = self.state
        effect, since = write.effect, write.since
        again = [
            (NamespaceId(record.namespace), record.key)
            for record, row in zip(effect.chunks, write.rows, strict=True)
            if self._is_stored(*row)
        ]
        state.dirty_chunks = _older_first(again, since, state.dirty_chunks)
        names = [(NamespaceId(session.namespace), session.session) for session in effect.sessions]
        names = [name for name in names if name in state.sessions.by_name]
        state.dirty_sessions = _older_first(names, since, state.dirty_sessions)
        self._cut_again(write.cut)
        state.dirty_bars.update(((bar.mark, bar.maker), None) for bar in effect.bars)
        state.dirty_heeded.update((one.channel, since) for one in effect.heeded)
        for new in effect.namespaces:
            namespace = state.namespaces.get(NamespaceId(new.number))
            if namespace is not None:
                self.dirty_namespaces[namespace.id] = namespace
        self.unsynced.update(set(effect.slabs).difference(failed))
        for slab_id in failed:
            if (segment := state.ssd_slots.by_id.get(SegmentId(slab_id))) is not None:
                self._slabs.fails(segment)
        if result is DiskResult.CORRUPT:
            self._write_anew(write.rows)
        if result is DiskResult.NO_SPACE and state.index_usage is not None and state.index_usage.full:
            self.full_rounds += 1
            self.wants_room = effect
            state.counters["index_full"] += 1
            return
        self._degrade(DiskState.READ_ONLY, why)

    def has_no_room(self, why: str) -> None:
        """Nothing can give way to what found no room."""
        self._degrade(DiskState.READ_ONLY, why)

    def healed(self) -> None:
        self._delete_again_at = 0

    def forget_makers(self) -> None:
        """The index explains no digest that no chunk carries any more."""
        unused = self.state.forget_makers()
        self.deleted_makers += [digest for digest in unused if digest in self.indexed_makers]
        self.indexed_makers.difference_update(unused)
        self._makers_left = len(self.state.makers)

    def tick(self) -> None:
        makers_max = self.state.limits.makers_max
        if len(self.state.makers) >= min(makers_max, self._makers_left + makers_max // MAKERS_SWEEP_SHARE):
            self.forget_makers()

    # ------------------------------------------------------------------------------------------------- what is to go

    def await_gone(self, ticket: ev.Ticket | None, count: int) -> ev.Done | None:
        """Answer `ticket` with `count` when all that was forgotten until now has left the index, or with the reason why
        it has not. None: that is later."""
        state = self.state
        if self.is_gone(state.now):
            return ev.Done(count)
        if len(self.gone_waits) >= GONE_WAITS_MAX:
            return ev.Done(count, not_durable=f"{GONE_WAITS_MAX} wait for the index already; {AGAIN}")
        if ticket is not None:
            deadline = state.now + min(GONE_PATIENCE_MS, state.limits.disk_deadline_ms)
            self.gone_waits.append(GoneWait(ticket, count, state.now, deadline))
        return None

    def is_gone(self, since: Millis) -> bool:
        """Whether all that was to be deleted at `since` has left the index: whatever still is to go became so later."""
        state = self.state
        if state.disk_state is DiskState.ABSENT:
            return True
        waiting = [
            next(iter(dirty.values()), None) for dirty in (state.deleted_chunks, state.deleted_sessions)
        ]
        if self.index is not None and self.index[1].effect.deletes:
            waiting.append(self.index[1].since)
        return all(oldest is None or oldest > since for oldest in waiting)

    def why_not_gone(self, since: Millis, deadline: Millis) -> str:
        """Why whoever waits since then for what is to go waits no longer; empty: he does."""
        state = self.state
        if self.delete_trouble and self._delete_failed_at >= since:
            return f"the SSD tier is {state.disk_state.name.lower()} ({self.delete_trouble}); {AGAIN}"
        if deadline <= state.now:
            return f"the index is late (the SSD tier is {state.disk_state.name.lower()}); {AGAIN}"
        return ""

    def tell_gone(self) -> None:
        """After every step: who waits for what is to go."""
        if not self.gone_waits:
            return
        left: list[GoneWait] = []
        for wait in self.gone_waits:
            if self.is_gone(wait.since):
                self.state.reply(wait.ticket, ev.Done(wait.count))
            elif why := self.why_not_gone(wait.since, wait.deadline):
                self.state.reply(wait.ticket, ev.Done(wait.count, not_durable=why))
            else:
                left.append(wait)
        self.gone_waits = left

    def _write_anew(self, rows: Sequence[tuple[int, int]]) -> None:
        """A sync failed, and some of these chunks may not have reached the medium, nor ever will: syncing again proves
        nothing. Those in DRAM are written once more, elsewhere; those on SSD alone cannot become durable."""
        state = self.state
        for row, generation in rows:
            if not self._is_stored(row, generation):
                continue
            if state.is_resident(row):
                state.drop_copy(row)
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
        self,
        ticket: ev.Ticket,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        answer: ev.Committed | ev.Saved,
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
        wait = DurableWait(ticket, answer, chunks, missing, deadline)
        self.waits[self._next_wait] = wait
        for chunk in missing:
            self._waits_of.setdefault(chunk, {})[self._next_wait] = wait
        self._slabs.awaited.update(chunks)
        self._next_wait += 1

    def _is_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> bool:
        namespace = self.state.namespaces.get(chunk[0])
        row = NONE if namespace is None else namespace.index.get(chunk[1], NONE)
        return row != NONE and bool(self.state.chunks.flags[row] & DURABLE)

    def _tell_durable(self, chunk: tuple[NamespaceId, ChunkKey]) -> None:
        for number, wait in self._waits_of.pop(chunk, {}).items():
            wait.missing.discard(chunk)
            if wait.missing:
                continue
            self._end_wait(number)
            if all(map(self._is_durable, wait.chunks)):
                self.state.reply(wait.ticket, wait.answer)
            else:
                self._answer_not_durable(wait.ticket, TOO_FULL)

    def end_waits(self) -> None:
        state = self.state
        while self.waits:
            number, wait = next(iter(self.waits.items()))
            if wait.deadline > state.now:
                break
            self._end_wait(number)
            state.reply(
                wait.ticket,
                DeadlineExceeded("committed and visible, but not durable in time", field="wait"),
            )
        self.waits = self.waits or {}  # what was emptied from its front keeps the holes

    def _end_wait(self, number: int) -> None:
        wait = self.waits.pop(number)
        for chunk in wait.missing:
            others = self._waits_of[chunk]
            del others[number]
            if not others:
                del self._waits_of[chunk]
        for chunk in wait.chunks:
            self._slabs.awaited[chunk] -= 1
            if not self._slabs.awaited[chunk]:
                del self._slabs.awaited[chunk]

    def refused(self, chunk: tuple[NamespaceId, ChunkKey], why: str) -> None:
        """Nobody waits any longer for what is not going to be written."""
        for number, wait in list(self._waits_of.get(chunk, {}).items()):
            self._end_wait(number)
            self._answer_not_durable(wait.ticket, why)

    def fail_waits(self, why: str) -> None:
        """The tier degrades: nobody waits for it."""
        for wait in self.waits.values():
            self._answer_not_durable(wait.ticket, why)
        self.waits = {}
        self._waits_of = {}
        self._slabs.awaited.clear()

    def _answer_not_durable(self, ticket: ev.Ticket, why: str) -> None:
        self.state.reply(ticket, Unavailable(f"committed and visible, but not durable: {why}", field="wait"))
