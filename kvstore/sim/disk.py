"""The world with an SSD under it: slab files and an index that outlive the core, and lose what was never synced.

The platter keeps, per slot, what is on the medium and what a power cut would still lose. A sync covers what had been
written when its index transaction was asked for, and nothing later. Each index transaction is held against the contract
of `WriteIndex`: whatever it names lies on the medium, in a file that exists, for a namespace that the index knows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, DURABLE, FOREIGN, NONE, PROMOTING, STORED
from kvstore.core.cold_tier import Restored
from kvstore.core.rate import BYTES_PER_OP_MAX
from kvstore.core.ssd.restart import ChunkBatch, Snapshot
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.core.transfers import CHUNKS_PER_OP_MAX
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    DiskState,
    GrantResult,
    NamespaceId,
    OpId,
    Outcome,
    Reason,
    Record,
    ReservationId,
    SlabId,
    SlotState,
    Wait,
    WorkerId,
)

from .placement import Placement
from .world import PAGE, Shard, World

SLAB_HEADER_BYTES = 4096
SLOT_BYTES = 2 * PAGE
"""Of a shard of one page, with its header, on disk."""
GARBAGE = 0xBAD
CHUNK_ROW_BYTES, SESSION_ROW_BYTES, ENTRY_BYTES = 100, 60, 40
"""Of a shard's part of a chunk's row, of a session's row, and of an entry in it."""
NAMESPACE_ROW_BYTES, MAKERS_ROW_BYTES = 150, 60
ROWS_PER_PART = 4
"""What one transaction writes."""

DiskOp = (
    ev.CreateSlab
    | ev.WriteRecords
    | ev.ReadRecords
    | ev.WriteIndex
    | ev.ProbeDisk
    | ev.ScrubRecords
    | ev.RewriteRecords
    | ev.TierEffect
)
DISK_OPS = (
    *(ev.CreateSlab, ev.WriteRecords, ev.ReadRecords, ev.WriteIndex, ev.ProbeDisk),
    *(ev.ScrubRecords, ev.RewriteRecords, ev.TierEffect),
)
Slot = tuple[SlabId, int]


@dataclass(frozen=True, slots=True)
class Written:
    """A record in a slot; `content` stands for its bytes."""

    record: Record | None
    generation: int
    content: int


TORN = Written(None, 0, GARBAGE)


@dataclass(slots=True)
class Platter:
    slabs: dict[SlabId, tuple[int, int]] = field(default_factory=dict)
    """(slot bytes, slots) of the slab files that the index names."""
    synced: dict[Slot, Written] = field(default_factory=dict)
    cached: dict[Slot, Written] = field(default_factory=dict)
    """Written since: a power cut may lose or tear it."""
    namespaces: dict[int, ev.NamespaceRecord] = field(default_factory=dict)
    chunks: dict[tuple[int, ChunkKey], ev.ChunkRecord] = field(default_factory=dict)
    sessions: dict[tuple[int, bytes], ev.SessionRecord] = field(default_factory=dict)
    makers: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    bars: dict[tuple[bytes, bytes], ev.Bar] = field(default_factory=dict)
    heeded: dict[str, ev.Heeded] = field(default_factory=dict)
    rotten: set[DiskPlace] = field(default_factory=set)
    """Records whose bytes changed on the medium, or whose slot was another's already when the daemon ended, and their
    deletion not in the index yet."""
    made: set[SlabId] = field(default_factory=set)
    """Every slab file that the index ever named."""
    next_slab: SlabId = field(default=SlabId(1))
    boot_count: int = 0
    index_bytes: int = 1 << 40
    """What the index may hold; deletions always find room."""
    forgotten_sessions: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """Versions up to which a session was forgotten, for good as its answer said."""
    forgotten_chunks: dict[tuple[int, ChunkKey], int] = field(default_factory=dict)
    """Likewise, generations of records."""

    def read(self, place: DiskPlace) -> Written | None:
        return self.cached.get((place.slab, place.slot), self.synced.get((place.slab, place.slot)))

    def holds(self, chunk: ev.ChunkRecord, *, after_power_cut: bool) -> bool:
        """Every shard of the chunk is there, as the index says."""
        for place, checksum in zip(chunk.places, chunk.checksums, strict=True):
            found = self.synced.get((place.slab, place.slot)) if after_power_cut else self.read(place)
            if found is None or (found.generation, found.content) != (place.generation, checksum):
                return False
        return place.slab in self.slabs

    def is_rotten(self, chunk: ev.ChunkRecord) -> bool:
        return not self.rotten.isdisjoint(chunk.places)

    def power_cut(self, chance: random.Random) -> None:
        for slot, written in self.cached.items():
            fate = chance.choice(("lost", "torn", "kept"))
            if fate != "lost":
                self.synced[slot] = written if fate == "kept" else TORN
        self.cached.clear()

    @property
    def usage(self) -> ev.IndexUsage:
        chunks = sum(CHUNK_ROW_BYTES * len(chunk.places) for chunk in self.chunks.values())
        sessions = sum(_session_bytes(session) for session in self.sessions.values())
        other = NAMESPACE_ROW_BYTES * len(self.namespaces)
        other += MAKERS_ROW_BYTES * (len(self.makers) + len(self.bars))
        return ev.IndexUsage(self.index_bytes, chunks, sessions, other)

    def apply(self, effect: ev.WriteIndex) -> bool:
        """Its transactions; what they name must be there. False: the index is full, and has an earlier part of it."""
        assert not (effect.deletes and effect.writes), f"deletes and writes: {effect}"
        before = None if effect.deletes else _tables_of(self)
        for part in _parts(effect):
            self._apply(part)
            if part.writes and self.usage.used > self.index_bytes:
                assert before is not None
                self.namespaces, self.chunks, self.sessions, self.makers, self.bars, self.heeded = before
                return False
            before = None if effect.deletes else _tables_of(self)
        return True

    def _apply(self, effect: ev.WriteIndex) -> None:
        for slab in effect.slabs_deleted:
            del self.slabs[slab]
            for slots in (self.synced, self.cached):
                for slot in [slot for slot in slots if slot[0] == slab]:
                    del slots[slot]
        for number in effect.namespaces_deleted:
            self.namespaces.pop(number, None)
            for table in (self.chunks, self.sessions):
                for row in [row for row in table if row[0] == number]:
                    del table[row]  # type: ignore[arg-type]
        for where in effect.chunks_deleted:
            self.chunks.pop((where[0], where[1]), None)
        for name in effect.sessions_deleted:
            self.sessions.pop((name[0], name[1]), None)
        for digest in effect.makers_deleted:
            self.makers.pop(digest, None)
        for namespace in effect.namespaces:
            self.namespaces[namespace.number] = namespace
        self.makers.update(effect.makers)
        self.bars.update(((bar.mark, bar.maker), bar) for bar in effect.bars)
        self.heeded.update((one.channel, one) for one in effect.heeded)
        for chunk in effect.chunks:
            assert chunk.namespace in self.namespaces, chunk
            assert self.holds(chunk, after_power_cut=True) or self.is_rotten(chunk), chunk
            self._check_not_forgotten(chunk)
            self.chunks[chunk.namespace, chunk.key] = chunk
        for session in effect.sessions:
            assert session.namespace in self.namespaces, session
            gone = self.forgotten_sessions.get((session.namespace, session.session), -1)
            assert session.version > gone, f"what was forgotten comes back: {session}"
            self.sessions[session.namespace, session.session] = session
        claimed = [place for chunk in self.chunks.values() for place in chunk.places]
        assert len({(place.slab, place.slot) for place in claimed}) == len(claimed), "a slot is named twice"

    def _check_not_forgotten(self, chunk: ev.ChunkRecord) -> None:
        gone = self.forgotten_chunks.get((chunk.namespace, chunk.key), -1)
        assert min(place.generation for place in chunk.places) > gone, (
            f"what was forgotten comes back: {chunk}"
        )

    def check_forgotten(self) -> None:
        """What was answered as forgotten for good is not in the index."""
        for name, version in self.forgotten_sessions.items():
            found = self.sessions.get(name)
            assert found is None or found.version > version, f"what was forgotten is there: {found}"
        for chunk in self.forgotten_chunks.keys() & self.chunks.keys():
            self._check_not_forgotten(self.chunks[chunk])

    def snapshot(self) -> Snapshot:
        """What the edge reads at the start of the daemon."""
        return Snapshot(
            self.boot_count,
            self.next_slab,
            [(slab, *shape) for slab, shape in sorted(self.slabs.items())],
            list(self.namespaces.values()),
            [self._batch(number) for number in sorted({number for number, _ in self.chunks})],
            list(self.sessions.values()),
            self.makers,
            tuple(self.bars.values()),
            tuple(self.heeded.values()),
            self.usage,
        )

    def _batch(self, number: int) -> ChunkBatch:
        chunks = [chunk for (of, _), chunk in sorted(self.chunks.items()) if of == number]
        makers = sorted({chunk.maker for chunk in chunks if chunk.maker})
        places = [place for chunk in chunks for place in chunk.places]
        return ChunkBatch(
            namespace=number,
            shards=len(chunks[0].places),
            keys=[chunk.key for chunk in chunks],
            token_count=[chunk.token_count for chunk in chunks],
            flags=[chunk.flags for chunk in chunks],
            maker=[makers.index(chunk.maker) if chunk.maker else -1 for chunk in chunks],
            makers=makers,
            slab=[place.slab for place in places],
            slot=[place.slot for place in places],
            generation=[place.generation for place in places],
            checksum=[checksum for chunk in chunks for checksum in chunk.checksums],
        )


def _session_bytes(session: ev.SessionRecord) -> int:
    return SESSION_ROW_BYTES + ENTRY_BYTES * len(session.entries)


def _tables_of(platter: Platter) -> tuple[Any, Any, Any, Any, Any, Any]:
    return (
        platter.namespaces.copy(),
        platter.chunks.copy(),
        platter.sessions.copy(),
        platter.makers.copy(),
        platter.bars.copy(),
        platter.heeded.copy(),
    )


def _parts(effect: ev.WriteIndex) -> list[ev.WriteIndex]:
    """The transactions of an effect: what goes goes in one, what is written in several."""
    if effect.deletes:
        return [effect]
    parts = [replace(effect, slabs=(), chunks=(), sessions=())]
    for start in range(0, len(effect.chunks), ROWS_PER_PART):
        parts.append(ev.WriteIndex(effect.op, (), chunks=effect.chunks[start : start + ROWS_PER_PART]))
    for start in range(0, len(effect.sessions), ROWS_PER_PART):
        parts.append(ev.WriteIndex(effect.op, (), sessions=effect.sessions[start : start + ROWS_PER_PART]))
    return parts


@dataclass(frozen=True, slots=True)
class Purging:
    """An order to purge a tenant, and what of it there was then."""

    asked_at: int
    generation: int
    """The newest of all records."""
    numbers: set[NamespaceId]
    chunks: set[tuple[NamespaceId, ChunkKey]]
    sessions: dict[tuple[int, bytes], int]
    """With their versions."""


class DiskWorld(World):
    """`slab_slots` one-page shards fit in a slab file, of which there may be `slabs`; the index holds `index_bytes`."""

    def __init__(
        self, *, slabs: int = 8, slab_slots: int = 16, index_bytes: int = 1 << 40, **world: Any
    ) -> None:
        self.platter = Platter(index_bytes=index_bytes)
        self._forgetting: dict[tuple[WorkerId, int], tuple[int, dict[ChunkKey, int]]] = {}
        """By request: version of the session, and generations of the keys, when they were asked to be forgotten."""
        self._purging: dict[tuple[WorkerId, int], Purging] = {}
        """By request, likewise."""
        self.faults: dict[type, DiskResult] = {}
        """What every op of a kind ends with, until it is removed."""
        self.chance: random.Random | None = None
        """If given, records of a failing op fail one by one, or do not."""
        self._refused = False
        """The last index transaction found no room."""
        self.failing_syncs = False
        """An index transaction that fails has also lost what it was to sync; its records can never be indexed."""
        self.ever: set[tuple[Shard, int]] = set()
        """Every tag that was ever committed for a shard."""
        self.promised: set[tuple[NamespaceId, ChunkKey]] = set()
        """Chunks of commits that were answered as durable, and that neither anybody nor a full SSD dropped since."""
        self._promised_rows: dict[int, tuple[NamespaceId, ChunkKey]] = {}
        self._promised_to: object = None
        """The watch whose rows these are."""
        self._answered: set[tuple[WorkerId, int]] = set()
        self._lost: dict[Slot, Written] = {}
        self._covered: dict[OpId, dict[Slot, Written]] = {}
        self._making: set[SlabId] = set()
        self._shape = {
            "disk_slab_bytes": SLAB_HEADER_BYTES + slab_slots * SLOT_BYTES,
            "disk_slabs_max": slabs,
            **world,
        }
        super().__init__(**self._shape)

    # ------------------------------------------------------------------------------------------------------ restarts

    def _begin(self) -> list[ev.Effect]:
        self.platter.boot_count += 1
        self.restored: Restored = self.store.restore(self.platter.snapshot(), self.now)
        self.watch.check()
        for bar in self.platter.bars.values():
            assert bar.purge <= self.store.state.bars[bar.mark, bar.maker].purge, f"let in again: {bar}"
        if isinstance(self.store.cold_tier, SlabTier):
            Placement(self.store, self.store.cold_tier)
        assert set(self.platter.slabs) >= {
            SlabId(s.id) for s in self.store.state.ssd_slots.segments if s.phase.value == "assigned"
        }
        return super()._begin()

    def crash(self, chance: random.Random | None = None, *, power: bool = False, **changed: Any) -> None:
        """The daemon ends in the middle of everything, and starts again, perhaps with other limits. Its ops had begun:
        each has done all of its work, some of it, or none. With `power` what was not synced may be lost or torn.

        Whatever was promised to be durable is there, and served again."""
        chance = chance or random.Random(0)
        running = [op for op in self.held if isinstance(op, DISK_OPS)]
        chance.shuffle(running)
        for op in running:
            self._leave_behind(op, chance)
        if power:
            self.platter.power_cut(chance)
            self._lost.clear()
        self.platter.check_forgotten()
        for where in self.promised:
            assert self.platter.holds(self.platter.chunks[where], after_power_cut=power), where
        for chunk in self.platter.chunks.values():
            if not self.platter.holds(chunk, after_power_cut=power):
                self.platter.rotten.update(chunk.places)
        promised = self.promised.copy()
        hold, next_worker, unmap = self.hold, self._next_worker, self.unmap_at_once
        self._covered = {}
        self._making = set()
        self._shape.update(changed)
        World.__init__(self, **self._shape)
        self.hold, self._next_worker, self.unmap_at_once = hold, next_worker, unmap
        for chunk in self.platter.chunks.values():
            for shard, checksum in enumerate(chunk.checksums):
                self.committed[NamespaceId(chunk.namespace), chunk.key, shard] = checksum
        assert self.ever >= set(self.committed.items())
        if not changed:
            assert not self.restored.chunks_dropped and not self.restored.slabs_dropped, self.restored
            assert self.promised == promised, promised - self.promised
            for namespace, key in promised:
                assert self.where(namespace, (key,)) == ["ssd"], (namespace, key)

    def _leave_behind(self, op: DiskOp, chance: random.Random) -> None:
        match op:
            case ev.WriteRecords():
                for number in range(len(op.records)):
                    fate = chance.choice(("none", "torn", "all"))
                    if fate == "all":
                        self._put(op, number)
                    elif fate == "torn":
                        self.platter.cached[op.targets[number].slab, op.targets[number].slot] = TORN
            case ev.RewriteRecords():
                for place in op.targets:
                    self.platter.cached[place.slab, place.slot] = TORN
            case ev.WriteIndex() if chance.random() < 0.5:
                self._write_index(op, DiskResult.OK)
            case ev.WriteIndex() if not op.deletes and chance.random() < 0.5:
                parts = _parts(op)
                some = parts[: chance.randrange(len(parts) + 1)]
                chunks = tuple(chunk for part in some for chunk in part.chunks)
                sessions = tuple(session for part in some for session in part.sessions)
                self._write_index(replace(op, chunks=chunks, sessions=sessions), DiskResult.OK)
            case ev.CreateSlab() if chance.random() < 0.5:
                self._make_slab(op)

    # ------------------------------------------------------------------------------------------------------ effects

    def _perform_all(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.WriteIndex():
                    assert not self._covered, "one index transaction at a time"
                    self._covered[effect.op] = {
                        slot: written
                        for slot, written in self.platter.cached.items()
                        if slot[0] in effect.slabs
                    }
                case ev.CreateSlab():
                    self._making.add(effect.slab)
                    files = len(self.platter.slabs.keys() | self._making)
                    assert files <= self.limits.disk_slabs_max, "more slab files than the cap allows"
                    assert effect.slab not in self.platter.made, "the number of a slab file comes back"
                case ev.WriteRecords() | ev.ReadRecords():
                    self._check_bounded(effect)
                case ev.ChunksSettled():
                    self._check_settled(effect)
        super()._perform_all(effects)

    def _check_settled(self, effect: ev.ChunksSettled) -> None:
        """What is ready has the bytes that were committed."""
        state = self.store.state
        for key in effect.ready:
            row = state.namespaces[effect.namespace].index.get(key, NONE)
            if row == NONE or not state.is_hit(row):
                continue  # pushed out again by what came after it in the same step
            for shard, length in enumerate(state.namespaces[effect.namespace].spec.shard_bytes):
                found = self._read(state.extent(row, shard, length))
                assert found == self.committed[effect.namespace, key, shard], (key, shard, found)

    def _applied(self, event: ev.Event) -> None:
        super()._applied(event)
        self._check_promises()
        for row in self.watch.changed:
            if row in self.watch.facts:
                self._check_stored(row)

    def _check_promises(self) -> None:
        """A durable chunk stays so until it is dropped for a reason."""
        state = self.store.state
        if self._promised_to is not self.watch or len(self._promised_rows) != len(self.promised):
            self._promised_to = self.watch
            self._promised_rows = {self._row_of(chunk): chunk for chunk in self.promised}
            suspects = list(self.promised)
        else:
            rows = self._promised_rows
            suspects = [rows[row] for row in self.watch.changed if row in rows]
        for chunk in suspects:
            row = self._row_of(chunk)
            if row == NONE or state.chunks.flags[row] & (STORED | DOOMED) != STORED:
                self.promised.discard(chunk)
                self._promised_rows.pop(row, None)
            else:
                assert state.chunks.flags[row] & DURABLE, state.chunks.describe(row)

    def _row_of(self, chunk: tuple[NamespaceId, ChunkKey]) -> int:
        namespace = self.store.state.namespaces.get(chunk[0])
        return NONE if namespace is None else namespace.index.get(chunk[1], NONE)

    def _check_stored(self, row: int) -> None:
        """What is on SSD lies on the medium as it was committed, and what is durable in the index."""
        state, chunks = self.store.state, self.store.state.chunks
        if not chunks.flags[row] & STORED:
            return
        assert isinstance(self.store.cold_tier, SlabTier)
        slabs = self.store.cold_tier.slabs
        places = [slabs.place_of(row, shard) for shard in range(state.namespace_of(row).shards)]
        if not self.platter.rotten.isdisjoint(places):
            return
        for place, checksum in zip(places, chunks.shard_checksum[chunks.shard0[row] :], strict=False):
            found = self.platter.read(place)
            assert found is not None and (found.generation, found.content) == (place.generation, checksum), (
                chunks.describe(row),
                place,
                found,
            )
        if chunks.flags[row] & (DURABLE | DOOMED) == DURABLE:
            record = self.platter.chunks[chunks.namespace[row], chunks.key[row]]
            assert record.places == tuple(places), (chunks.describe(row), record)

    def tick(self, ms: int = 0) -> None:
        super().tick(ms)
        late = [wait for waits in self.store.state.waits.values() for wait in waits if wait.until <= self.now]
        assert not late, late

    def _drain(self) -> None:
        for event in self._inbox:
            if isinstance(event, ev.Forget):
                self._note_forget(event)
            if isinstance(event, ev.PurgeTenant) and not event.dry_run:
                self._note_purge(event)
        super()._drain()

    def _note_purge(self, event: ev.PurgeTenant) -> None:
        """What of the tenant is there when it is asked for first."""
        state = self.store.state
        numbers = {each.id for each in state.namespaces.values() if each.tenant == event.tenant}
        chunks = {(number, key) for number in numbers for key in state.namespaces[number].index}
        chunks |= {(NamespaceId(number), key) for number, key in self.platter.chunks if number in numbers}
        sessions = {name: one.version for name, one in self.platter.sessions.items() if name[0] in numbers}
        for name, session in state.sessions.by_name.items():
            if name[0] in numbers:
                sessions[name] = max(session.version, sessions.get(name, -1))
        purging = Purging(state.now, self.store.cold_tier.newest_generation, numbers, chunks, sessions)
        self._purging.setdefault((event.ticket.worker, event.ticket.request_id), purging)

    def _check_purged(self, purging: Purging) -> None:
        """It was answered that all of it has gone, from DRAM too, and that nothing brings it back."""
        platter = self.platter
        for name, version in purging.sessions.items():
            platter.forgotten_sessions[name] = max(version, platter.forgotten_sessions.get(name, -1))
        for chunk in purging.chunks:
            platter.forgotten_chunks[chunk] = max(purging.generation, platter.forgotten_chunks.get(chunk, -1))
        platter.check_forgotten()
        self.check_purged(purging.numbers, purging.asked_at)

    def check_purged(self, numbers: set[NamespaceId], asked_at: int) -> None:
        """Nothing of these namespaces is served that was made here before."""
        state = self.store.state
        for number in numbers & state.namespaces.keys():
            for key, row in state.namespaces[number].index.items():
                if not state.is_usable(row) or state.chunks.flags[row] & FOREIGN:
                    continue
                born = state.chunks.born_at[row]
                assert born >= asked_at, f"what was purged at {asked_at} is served: {key!r}, made at {born}"

    def _note_forget(self, event: ev.Forget) -> None:
        """What the index may have, or get, of what is to be forgotten, when that is asked for first."""
        asked = (event.ticket.worker, event.ticket.request_id)
        state = self.store.state
        session = state.sessions.by_name.get((event.namespace, event.session))
        known = self.platter.sessions.get((event.namespace, event.session))
        version = max(session.version if session else -1, known.version if known else -1)
        generation = self.store.cold_tier.newest_generation
        generations = dict.fromkeys(event.keys, generation)
        self._forgetting.setdefault(asked, (version, generations))

    def _check_forgotten(self, event: ev.Forget, asked: tuple[WorkerId, int]) -> None:
        """It was answered that nothing brings it back."""
        version, generations = self._forgetting[asked]
        platter = self.platter
        if event.session:
            name = (event.namespace, event.session)
            platter.forgotten_sessions[name] = max(version, platter.forgotten_sessions.get(name, -1))
        for key, generation in generations.items():
            chunk = (event.namespace, key)
            platter.forgotten_chunks[chunk] = max(generation, platter.forgotten_chunks.get(chunk, -1))
        platter.check_forgotten()

    def _check_recalled(self, maker: bytes) -> None:
        """What it made is in the index no more."""
        for chunk in self.platter.chunks.values():
            makers = self.platter.makers.get(chunk.maker, (chunk.maker,))
            assert maker not in makers, f"what was recalled is there: {chunk}"

    def _replied(self, effect: ev.Reply) -> None:
        asked = (effect.ticket.worker, effect.ticket.request_id)
        event = self._asked.get(asked)
        super()._replied(effect)
        if (
            isinstance(event, ev.Forget)
            and isinstance(effect.answer, ev.Done)
            and asked not in self._answered
        ):
            self._answered.add(asked)
            if not effect.answer.not_durable:
                self._check_forgotten(event, asked)
        if isinstance(event, ev.PurgeTenant) and isinstance(effect.answer, ev.Purged):
            if asked in self._purging and asked not in self._answered:
                self._check_purged(self._purging[asked])
            self._answered.add(asked)
        if isinstance(event, ev.Recall) and isinstance(effect.answer, ev.Recalled) and not event.dry_run:
            if not event.age_ms_max and asked not in self._answered:
                self._check_recalled(event.maker)
            self._answered.add(asked)
        if (
            isinstance(event, (ev.Commit, ev.Save))
            and event.wait is Wait.DURABLE
            and asked not in self._answered
        ):
            self._answered.add(asked)  # asked again, it gets the same answer, whatever happened since
            if isinstance(effect.answer, (ev.Committed, ev.Saved)):
                for namespace, key in self._saved_by(event, effect.answer):
                    indexed = self.platter.chunks.get((namespace, key))
                    assert indexed is not None, f"{key!r} was answered as durable and is not in the index"
                    if not self.platter.is_rotten(indexed):
                        self.promised.add((namespace, key))

    def _saved_by(self, event: ev.Commit | ev.Save, answer: Any) -> set[tuple[NamespaceId, ChunkKey]]:
        if isinstance(event, ev.Commit):
            return {(namespace, key) for namespace, key, _ in self.savings[event.reservation].shards}
        granted = [result is GrantResult.GRANTED for result in answer.results]
        return {(event.reserve.namespace, key) for key in compress(event.reserve.keys, granted)}

    def _note_committed(self, shard: Shard, what: int) -> None:
        super()._note_committed(shard, what)
        self.ever.add((shard, what))

    def _check_bounded(self, effect: ev.WriteRecords | ev.ReadRecords) -> None:
        last = effect.records[-1].length
        assert len({(r.namespace, r.key) for r in effect.records}) <= CHUNKS_PER_OP_MAX
        assert sum(record.length for record in effect.records) < BYTES_PER_OP_MAX + len(effect.records) * last
        assert len(effect.records) == len(effect.sources) == len(effect.targets)

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        if not isinstance(effect, DISK_OPS):
            super()._perform_op(effect, fails=fails, spoil=spoil)
            return
        result = DiskResult[fails] if fails else self.faults.get(type(effect), DiskResult.OK)
        results: tuple[DiskResult, ...] = (result,)
        match effect:
            case ev.CreateSlab():
                self._making.discard(effect.slab)
                if result is DiskResult.OK:
                    self._make_slab(effect)
                    self._inbox.append(ev.SlabReady(effect.op))
                    return
            case ev.WriteRecords():
                results = tuple(self._write_record(effect, n, result) for n in range(len(effect.records)))
            case ev.ReadRecords():
                results = tuple(self._read_record(effect, n, result) for n in range(len(effect.records)))
            case ev.ScrubRecords():
                results = tuple(self._scrub_record(effect, n, result) for n in range(len(effect.records)))
            case ev.RewriteRecords():
                results = tuple(self._rewrite(place, result) for place in effect.targets)
            case ev.WriteIndex():
                result = self._write_index(effect, result)
                full = result is DiskResult.NO_SPACE and self._refused
                usage = replace(self.platter.usage, full=full)
                self._inbox.append(ev.DiskDone(effect.op, (result,), result.name, usage=usage))
                return
        why = "" if set(results) == {DiskResult.OK} else f"{effect.__class__.__name__} fails"
        self._inbox.append(ev.DiskDone(effect.op, results, why))

    def _make_slab(self, effect: ev.CreateSlab) -> None:
        self.platter.slabs[effect.slab] = (effect.slot_bytes, effect.slots)
        self.platter.made.add(effect.slab)
        self.platter.next_slab = max(self.platter.next_slab, SlabId(effect.slab + 1))

    def _write_index(self, effect: ev.WriteIndex, result: DiskResult) -> DiskResult:
        self._refused = False
        if result is not DiskResult.OK:
            covered = self._covered.pop(effect.op)
            if self.failing_syncs:
                self._lost.update(covered)
            return result
        self._sync(effect)
        for chunk in effect.chunks:
            for place in chunk.places:
                lost = self._lost.get((place.slab, place.slot))
                if lost is not None and lost.generation == place.generation:
                    return DiskResult.CORRUPT
        self._refused = not self.platter.apply(effect)
        return DiskResult.NO_SPACE if self._refused else DiskResult.OK

    def _sync(self, effect: ev.WriteIndex) -> None:
        """What was in the cache of the named slabs when the transaction was asked for is on the medium now."""
        for slot, written in self._covered.pop(effect.op).items():
            rotten = DiskPlace(*slot, written.generation) in self.platter.rotten
            if slot[0] in self.platter.slabs and self._lost.get(slot) is not written and not rotten:
                self.platter.synced[slot] = written
                if self.platter.cached.get(slot) is written:
                    del self.platter.cached[slot]

    def _put(self, effect: ev.WriteRecords, number: int) -> None:
        record, source, place = effect.records[number], effect.sources[number], effect.targets[number]
        slot_bytes, slots = self.platter.slabs[place.slab]
        assert 0 <= place.slot < slots, (place, slots)
        assert self.limits.disk_header_bytes + record.length <= slot_bytes, (record, slot_bytes)
        content = self._read(source)
        self.platter.cached[place.slab, place.slot] = Written(record, place.generation, content)

    def _write_record(self, effect: ev.WriteRecords, number: int, result: DiskResult) -> DiskResult:
        source, place = effect.sources[number], effect.targets[number]
        intact = self._read(source) == effect.records[number].checksum
        assert intact or self.is_damaged(source), (effect.records[number], source)
        before = self.platter.read(place)
        assert before is None or before.generation < place.generation, (before, place)
        result = self._one_by_one(result)
        if result is DiskResult.OK:
            self._put(effect, number)
        else:
            self.platter.cached[place.slab, place.slot] = TORN
        return result

    def _read_record(self, effect: ev.ReadRecords, number: int, result: DiskResult) -> DiskResult:
        """Verified as the edge does; whatever the result, the target's bytes have changed."""
        record, place, target = effect.records[number], effect.sources[number], effect.targets[number]
        found = self._found_at(place)
        result = self._one_by_one(result)
        if target.segment in self.memory:
            self._write(target, found.content if result is DiskResult.OK else GARBAGE, by=None)
        if result is not DiskResult.OK:
            return result
        intact = (found.record, found.generation, found.content) == (
            record,
            place.generation,
            record.checksum,
        )
        return DiskResult.OK if intact else DiskResult.CORRUPT

    def _noted(self, place: DiskPlace, result: DiskResult) -> DiskResult:
        """What a read has found."""
        return result

    def _found_at(self, place: DiskPlace) -> Written:
        return self.platter.read(place) or TORN

    def _scrub_record(self, effect: ev.ScrubRecords, number: int, result: DiskResult) -> DiskResult:
        """What is read lands nowhere, so the slot may be anybody's by now."""
        record, place = effect.records[number], effect.sources[number]
        found = self.platter.read(place) or TORN
        result = self._one_by_one(result)
        wanted = (record, place.generation, record.checksum)
        intact = (found.record, found.generation, found.content) == wanted
        return result if intact or result is not DiskResult.OK else DiskResult.CORRUPT

    def _rewrite(self, place: DiskPlace, result: DiskResult) -> DiskResult:
        """Nobody may find his record gone, not even after a power cut."""
        named = {(p.slab, p.slot) for chunk in self.platter.chunks.values() for p in chunk.places}
        assert (place.slab, place.slot) not in named, place
        slab = next(slab for slab in self.store.state.ssd_slots.segments if SlabId(slab.id) == place.slab)
        assert slab.state[place.slot] == SlotState.QUARANTINED, (slab, place)
        self.platter.cached[place.slab, place.slot] = TORN
        return self._one_by_one(result)

    def _one_by_one(self, result: DiskResult) -> DiskResult:
        spared = self.chance is not None and self.chance.random() < 0.5
        return DiskResult.OK if spared else result

    def rot_some(self, pick: int) -> None:
        """Whatever is kept, so much of it as there is: one of it goes bad."""
        slots = sorted({**self.platter.synced, **self.platter.cached})
        if slots:
            slab, slot = slots[pick % len(slots)]
            found = self.platter.read(DiskPlace(slab, slot, 0))
            assert found is not None
            self.rot(DiskPlace(slab, slot, found.generation))

    def rot(self, place: DiskPlace) -> None:
        """Bytes of a record change on the medium; whatever was promised of its chunk is void."""
        self.platter.rotten.add(place)
        for slots in (self.platter.cached, self.platter.synced):
            if (place.slab, place.slot) in slots:
                slots[place.slab, place.slot] = TORN
        for where, chunk in self.platter.chunks.items():
            if place in chunk.places:
                self.promised.discard((NamespaceId(where[0]), where[1]))

    # -------------------------------------------------------------------------------------------------------- asking

    def save_durably(
        self,
        worker: WorkerId,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        *,
        variant: int = 0,
        **named: Any,
    ) -> ReservationId:
        """Reserve, write, and commit with wait=DURABLE; the answer may come later (`durable_answer`)."""
        reserved = self.reserve(worker, namespace, keys, **named)
        assert reserved.reservation, reserved
        staged = self.write(reserved, variant)
        self._let_go(reserved.reservation)
        self.ask(ev.Commit, worker, reserved.reservation, staged, Wait.DURABLE)
        return reserved.reservation

    def durable_answer(self, worker: WorkerId, reservation: ReservationId) -> ev.Answer | None:
        """None: not answered yet. Errors are returned, not raised."""
        (request,) = [
            request
            for (asker, request), event in self._asked.items()
            if asker == worker and isinstance(event, ev.Commit) and event.reservation == reservation
        ]
        return self.answers.get((worker, request))

    def where(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> list[str]:
        """Per key: "dram", "dram+ssd", "ssd", "promoting", "partial", or the reason why it is gone."""
        state = self.store.state
        found = []
        for key in keys:
            row = state.namespaces[namespace].index.get(key, NONE)
            if row == NONE or state.chunks.shard0[row] == NONE or state.chunks.flags[row] & DOOMED:
                reason = Reason.NEVER_SEEN if row == NONE else Reason(state.chunks.reason[row])
                found.append(reason.name)
                continue
            stored = bool(state.chunks.flags[row] & STORED)
            if state.is_resident(row):
                found.append("dram+ssd" if stored else "dram")
            elif stored:
                found.append("promoting" if state.chunks.flags[row] & PROMOTING else "ssd")
            else:
                found.append("partial")
        return found

    def fetch(
        self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey], *, tries: int = 2
    ) -> list[str]:
        """Acquire until nothing is PENDING any more, at most so often, and release: the outcome per key at last."""
        for _ in range(tries):
            found = self.acquire(worker, namespace, keys, wait_ms=1_000, prefix_only=False)
            if found.lease:
                self.release(worker, found.lease)
            if Outcome.PENDING not in found.outcomes:
                break
            self.tick(50)
        return [
            outcome.name if outcome is not Outcome.MISS else reason.name
            for outcome, reason in zip(found.outcomes, found.reasons, strict=True)
        ]

    def settle(self, ms: int = 10_000, step_ms: int = 20) -> None:
        """Let everything that is held end, in order, and time go by."""
        end = self.now + ms
        while self.now < end:
            while self.held:
                self.finish()
            self.tick(step_ms)

    @property
    def counters(self) -> Mapping[str, int]:
        return self.store.state.counters

    def health(self) -> DiskState:
        return self.store.state.disk_state

    def of(self, kind: type) -> list[Any]:
        """The ops of a kind that are held."""
        return [op for op in self.held if isinstance(op, kind)]
