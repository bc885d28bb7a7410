"""The world with an SSD under it: slab files and an index that outlive the core, and lose what was never synced.

The platter keeps, per slot, what is on the medium and what a power cut would still lose. A sync covers what had been
written when its index transaction was asked for, and nothing later. Each index transaction is held against the contract
of `WriteIndex`: whatever it names lies on the medium, in a file that exists, for a namespace that the index knows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core import events as ev
from kvstore.core.disk import BYTES_PER_OP_MAX, CHUNKS_PER_OP_MAX
from kvstore.core.restart import ChunkBatch, Restored, Snapshot
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    DiskState,
    NamespaceId,
    OpId,
    Outcome,
    Reason,
    Record,
    ReservationId,
    SlabId,
    Wait,
    WorkerId,
)

from .world import PAGE, World

SLAB_HEADER_BYTES = 4096
SLOT_BYTES = 2 * PAGE
"""Of a shard of one page, with its header, on disk."""
GARBAGE = 0xBAD

DiskOp = ev.CreateSlab | ev.WriteRecords | ev.ReadRecords | ev.WriteIndex | ev.ProbeDisk
DISK_OPS = (ev.CreateSlab, ev.WriteRecords, ev.ReadRecords, ev.WriteIndex, ev.ProbeDisk)
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
    next_slab: SlabId = field(default=SlabId(1))
    boot_count: int = 0

    def read(self, place: DiskPlace) -> Written | None:
        return self.cached.get((place.slab, place.slot), self.synced.get((place.slab, place.slot)))

    def holds(self, chunk: ev.ChunkRecord, *, after_power_cut: bool) -> bool:
        """Every shard of the chunk is there, as the index says."""
        for place, checksum in zip(chunk.places, chunk.checksums, strict=True):
            found = self.synced.get((place.slab, place.slot)) if after_power_cut else self.read(place)
            if found is None or (found.generation, found.content) != (place.generation, checksum):
                return False
        return place.slab in self.slabs

    def power_cut(self, chance: random.Random) -> None:
        for slot, written in self.cached.items():
            fate = chance.choice(("lost", "torn", "kept"))
            if fate != "lost":
                self.synced[slot] = written if fate == "kept" else TORN
        self.cached.clear()

    def apply(self, effect: ev.WriteIndex) -> None:
        """One transaction; what it names must be there."""
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
        for namespace in effect.namespaces:
            self.namespaces[namespace.number] = namespace
        for chunk in effect.chunks:
            assert chunk.namespace in self.namespaces, chunk
            assert self.holds(chunk, after_power_cut=True), chunk
            self.chunks[chunk.namespace, chunk.key] = chunk
        for session in effect.sessions:
            assert session.namespace in self.namespaces, session
            self.sessions[session.namespace, session.session] = session
        claimed = [place for chunk in self.chunks.values() for place in chunk.places]
        assert len({(place.slab, place.slot) for place in claimed}) == len(claimed), "a slot is named twice"

    def snapshot(self) -> Snapshot:
        """What the edge reads at the start of the daemon."""
        return Snapshot(
            self.boot_count,
            self.next_slab,
            [(slab, *shape) for slab, shape in sorted(self.slabs.items())],
            list(self.namespaces.values()),
            [self._batch(number) for number in sorted({number for number, _ in self.chunks})],
            list(self.sessions.values()),
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


class DiskWorld(World):
    """`slab_slots` one-page shards fit in a slab file, of which there may be `slabs`."""

    def __init__(self, *, slabs: int = 8, slab_slots: int = 16, platter: Platter | None = None, **world: Any):
        self.platter = platter or Platter()
        self.faults: dict[type, DiskResult] = {}
        """What every op of a kind ends with, until it is removed."""
        self.power = True
        """Whether a crash also loses what was not synced."""
        self._covered: dict[OpId, dict[Slot, Written]] = {}
        self._making: set[SlabId] = set()
        self._shape = {
            "disk_slab_bytes": SLAB_HEADER_BYTES + slab_slots * SLOT_BYTES,
            "disk_slabs_max": slabs,
            **world,
        }
        super().__init__(**self._shape)

    def _begin(self) -> list[ev.Effect]:
        self.platter.boot_count += 1
        self.restored: Restored = self.store.restore(self.platter.snapshot())
        self.store.check_integrity()
        assert set(self.platter.slabs) >= {
            SlabId(s.id) for s in self.store.state.disk.segments if s.phase.value == "assigned"
        }
        return super()._begin()

    def crash(self, chance: random.Random | None = None, *, power: bool = True, **changed: Any) -> None:
        """The daemon ends in the middle of everything, and starts again, perhaps with other limits. Its ops had begun:
        each has done all of its work, some of it, or none. With `power` what was not synced may be lost or torn."""
        chance = chance or random.Random(0)
        running = [op for op in self.held if isinstance(op, DISK_OPS)]
        chance.shuffle(running)
        for op in running:
            self._leave_behind(op, chance)
        if power:
            self.platter.power_cut(chance)
        committed = {s: tag for s, tag in self.committed.items() if int(s[0]) in self.platter.namespaces}
        self._shape.update(changed)
        now, hold, next_worker, unmap = self.now, self.hold, self._next_worker, self.unmap_at_once
        self._covered = {}
        self._making = set()
        World.__init__(self, **self._shape)
        self.now, self.hold, self._next_worker, self.unmap_at_once = now, hold, next_worker, unmap
        self.committed = committed

    def _leave_behind(self, op: DiskOp, chance: random.Random) -> None:
        match op:
            case ev.WriteRecords():
                for number in range(len(op.records)):
                    fate = chance.choice(("none", "torn", "all"))
                    if fate == "all":
                        self._put(op, number)
                    elif fate == "torn":
                        self.platter.cached[op.targets[number].slab, op.targets[number].slot] = TORN
            case ev.WriteIndex() if chance.random() < 0.5:
                self._sync(op)
                self.platter.apply(op)
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
                    assert effect.slab >= self.platter.next_slab, "the number of a slab file comes back"
                case ev.WriteRecords() | ev.ReadRecords():
                    self._check_bounded(effect)
        super()._perform_all(effects)

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
        results = (result,)
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
            case ev.WriteIndex():
                if result is DiskResult.OK:
                    self._sync(effect)
                    self.platter.apply(effect)
                else:
                    del self._covered[effect.op]
        why = "" if set(results) == {DiskResult.OK} else f"{effect.__class__.__name__} fails"
        self._inbox.append(ev.DiskDone(effect.op, results, why))

    def _make_slab(self, effect: ev.CreateSlab) -> None:
        self.platter.slabs[effect.slab] = (effect.slot_bytes, effect.slots)
        self.platter.next_slab = max(self.platter.next_slab, SlabId(effect.slab + 1))

    def _sync(self, effect: ev.WriteIndex) -> None:
        """What was in the cache of the named slabs when the transaction was asked for is on the medium now."""
        for slot, written in self._covered.pop(effect.op).items():
            if slot[0] in self.platter.slabs:
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
        assert self._read(source) == effect.records[number].checksum, (effect.records[number], source)
        before = self.platter.read(place)
        assert before is None or before.generation < place.generation, (before, place)
        if result is DiskResult.OK:
            self._put(effect, number)
        else:
            self.platter.cached[place.slab, place.slot] = TORN
        return result

    def _read_record(self, effect: ev.ReadRecords, number: int, result: DiskResult) -> DiskResult:
        """Verified as the edge does; whatever the result, the target's bytes have changed."""
        record, place, target = effect.records[number], effect.sources[number], effect.targets[number]
        found = self.platter.read(place) or TORN
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

    # -------------------------------------------------------------------------------------------------------- asking

    def save_durably(
        self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey], **named: Any
    ) -> ReservationId:
        """Reserve, write, and commit with wait=DURABLE; the answer may come later (`durable_answer`)."""
        reserved = self.reserve(worker, namespace, keys, **named)
        assert reserved.reservation, reserved
        staged = self.write(reserved)
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
        """Per key: "dram", "dram+ssd", "ssd", "rising", "partial", or the reason why it is gone."""
        state = self.store.state
        found = []
        for key in keys:
            row = state.namespaces[namespace].index.get(key, -1)
            if row < 0 or state.chunks.shard0[row] < 0 or state.chunks.flags[row] & 8:
                reason = Reason.NEVER_SEEN if row < 0 else Reason(state.chunks.reason[row])
                found.append(reason.name)
                continue
            stored = bool(state.chunks.flags[row] & 64)
            if state.is_resident(row):
                found.append("dram+ssd" if stored else "dram")
            elif stored:
                found.append("rising" if state.chunks.flags[row] & 256 else "ssd")
            else:
                found.append("partial")
        return found

    def fetch(self, worker: WorkerId, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> list[str]:
        """Acquire, wait for what rises, acquire again, release: the outcome per key at last."""
        first = self.acquire(worker, namespace, keys, wait_ms=1_000, prefix_only=False)
        self.tick()
        again = self.acquire(worker, namespace, keys, prefix_only=False)
        self.release(worker, *[lease for lease in (first.lease, again.lease) if lease])
        return [
            outcome.name if outcome is not Outcome.MISS else reason.name
            for outcome, reason in zip(again.outcomes, again.reasons, strict=True)
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

    @property
    def health(self) -> DiskState:
        return self.store.state.disk_state

    def of(self, kind: type) -> list[Any]:
        """The ops of a kind that are held."""
        return [op for op in self.held if isinstance(op, kind)]
