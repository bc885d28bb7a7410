"""Slots of the DRAM arena: segments, slab classes, generations, and the conservation law.

    segment:  CREATING -> IDLE -> ASSIGNED(namespace, slot size) -> RETIRING -> gone, a new one is CREATING
    slot:     FREE -> RESERVED -> READY -> FREE, QUARANTINED aside; free + reserved + ready + quarantined = capacity

A segment belongs to one namespace (trust group) and one slab class at a time. Within its namespace an empty segment may
change class; between namespaces it must be retired: every worker that maps it unmaps it (or dies), it is destroyed, and
a new one takes its place, so that no mapping of one trust group ever shows another's bytes (invariant 9).

A slot's generation is bumped whenever it stops being READY, before it can be reserved again (invariant 8).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvstore.types import NamespaceId, SegmentId, SlotState, WorkerId

NO_OWNER = -1
Slots = npt.NDArray[Any]
"""Numbers of different slots of one segment, or a row for each."""


class Phase(enum.Enum):
    ABSENT = "absent"
    """Not made yet (slab files are made when they are first needed)."""
    CREATING = "creating"
    IDLE = "idle"
    ASSIGNED = "assigned"
    RETIRING = "retiring"


@dataclass(slots=True, eq=False)
class Segment:
    id: SegmentId
    index: int
    """Place in the pool; a replacement gets a new id in the same place."""
    phase: Phase = Phase.CREATING
    namespace: NamespaceId = NamespaceId(-1)
    slot_bytes: int = 0
    owner: array[int] = field(default_factory=lambda: array("i"))
    """Per slot: the chunk row it belongs to."""
    state: bytearray = field(default_factory=bytearray)
    generation: array[int] = field(default_factory=lambda: array("Q"))
    free: array[int] = field(default_factory=lambda: array("i"))
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Slots per SlotState."""
    pinned: int = 0
    """READY slots whose chunk is pinned (by leases or by the mover)."""
    touched_at: int = 0
    """When the most recently used of its chunks was used."""
    generation_floor: int = 0
    """Above every generation ever used here: where the next slab class starts."""
    holders: set[WorkerId] = field(default_factory=set)
    """Workers that may have it mapped."""
    wanted_by: NamespaceId = NamespaceId(-1)
    """For whom it is being retired or created."""

    @property
    def capacity(self) -> int:
        return len(self.state)

    @property
    def empty(self) -> bool:
        return self.counts[SlotState.FREE] == len(self.state)

    def __repr__(self) -> str:
        free, reserved, ready, quarantined = self.counts
        return (
            f"Segment({self.id} {self.phase.value} namespace {self.namespace} {self.capacity} x {self.slot_bytes} B: "
            f"{free} free {reserved} reserved {ready} ready {quarantined} quarantined, {self.pinned} pinned)"
        )


class SlabClass:
    """The segments of one namespace with one slot size."""

    __slots__ = ("free", "namespace", "segments", "slot_bytes", "with_free")

    def __init__(self, namespace: NamespaceId, slot_bytes: int) -> None:
        self.namespace = namespace
        self.slot_bytes = slot_bytes
        self.segments: dict[int, Segment] = {}
        self.with_free: dict[int, Segment] = {}
        self.free = 0

    def __repr__(self) -> str:
        where = f"namespace {self.namespace}, {self.slot_bytes} B"
        return f"SlabClass({where}, {len(self.segments)} segments, {self.free} free)"


class Pool:
    """`count` segments of `segment_bytes`, of which `header_bytes` hold no slots. The arena is one, the SSD another."""

    def __init__(
        self,
        *,
        segment_bytes: int,
        count: int,
        alignment: int,
        header_bytes: int = 0,
        phase: Phase = Phase.CREATING,
    ) -> None:
        self.segment_bytes = segment_bytes
        self.alignment = alignment
        self.header_bytes = header_bytes
        self.cells = segment_bytes // alignment
        self.segments: list[Segment] = []
        self.by_id: dict[SegmentId, Segment] = {}
        self.idle: dict[int, Segment] = {}
        self.empties: dict[int, Segment] = {}
        """Of those that are assigned, the ones without a slot in use."""
        self.classes: dict[tuple[NamespaceId, int], SlabClass] = {}
        self._next_id = 1
        for index in range(count):
            self.segments.append(self._new(index, phase))

    def __repr__(self) -> str:
        return f"Pool({len(self.segments)} segments of {self.segment_bytes} B, {len(self.idle)} idle)"

    def slot_bytes(self, shard_bytes: int) -> int:
        """Slot size for a shard: rounded up to the alignment."""
        return -(-shard_bytes // self.alignment) * self.alignment

    # ------------------------------------------------------------------------------------------------ segments

    def slots_of(self, slot_bytes: int) -> int:
        """How many slots of this size a segment holds."""
        return (self.segment_bytes - self.header_bytes) // slot_bytes

    def _new(self, index: int, phase: Phase) -> Segment:
        segment = Segment(id=SegmentId(self._next_id), index=index, phase=phase)
        self._next_id += 1
        self.by_id[segment.id] = segment
        return segment

    def created(self, segment: Segment) -> None:
        assert segment.phase is Phase.CREATING, segment
        segment.phase = Phase.IDLE
        self.idle[segment.index] = segment

    def assign(self, segment: Segment, namespace: NamespaceId, slot_bytes: int) -> None:
        """Give an idle segment, or an empty one of the same namespace, to a slab class. All its generations change."""
        if segment.phase is Phase.IDLE:
            del self.idle[segment.index]
        else:
            assert segment.phase is Phase.ASSIGNED and segment.namespace == namespace and segment.empty, (
                segment
            )
            self._leave_class(segment)
        slots = self.slots_of(slot_bytes)
        assert 0 < slots <= self.cells, (slot_bytes, self.segment_bytes)
        segment.phase = Phase.ASSIGNED
        segment.namespace = namespace
        segment.slot_bytes = slot_bytes
        segment.wanted_by = NamespaceId(-1)
        segment.generation_floor += 1
        segment.owner = array("i", [NO_OWNER]) * slots
        segment.state = bytearray(slots)
        segment.generation = array("Q", [segment.generation_floor]) * slots
        segment.free = array("i", range(slots - 1, -1, -1))
        segment.counts = [slots, 0, 0, 0]
        slab = self.classes.setdefault((namespace, slot_bytes), SlabClass(namespace, slot_bytes))
        slab.segments[segment.index] = segment
        slab.with_free[segment.index] = segment
        slab.free += slots
        self.empties[segment.index] = segment

    def _leave_class(self, segment: Segment) -> None:
        slab = self.classes[segment.namespace, segment.slot_bytes]
        self.empties.pop(segment.index, None)
        del slab.segments[segment.index]
        slab.with_free.pop(segment.index, None)
        slab.free -= segment.counts[SlotState.FREE]
        if not slab.segments:
            del self.classes[segment.namespace, segment.slot_bytes]

    def retire(self, segment: Segment, wanted_by: NamespaceId) -> None:
        """Take an empty segment out of service; it is replaced once nobody maps it."""
        assert segment.phase is Phase.ASSIGNED and segment.empty and not segment.pinned, segment
        self._leave_class(segment)
        segment.phase = Phase.RETIRING
        segment.wanted_by = wanted_by

    def begin(self, segment: Segment) -> None:
        """An absent segment is being made now."""
        assert segment.phase is Phase.ABSENT, segment
        segment.phase = Phase.CREATING

    def restore(self, segment: Segment, segment_id: SegmentId) -> None:
        """An absent segment exists already, from before the restart, under this id."""
        assert segment.phase is Phase.ABSENT and segment_id not in self.by_id, (segment, segment_id)
        del self.by_id[segment.id]
        segment.id = segment_id
        segment.phase = Phase.IDLE
        self.by_id[segment_id] = segment
        self.idle[segment.index] = segment
        self._next_id = max(self._next_id, segment_id + 1)

    def number_from(self, next_id: int) -> None:
        """Ids below this were used before the restart: absent segments get new ones."""
        self._next_id = max(self._next_id, next_id)
        for segment in self.segments:
            if segment.phase is Phase.ABSENT:
                del self.by_id[segment.id]
                segment.id = SegmentId(self._next_id)
                self._next_id += 1
                self.by_id[segment.id] = segment

    def replace(self, segment: Segment, phase: Phase = Phase.CREATING) -> Segment:
        """The new segment in the place of a retired one that nobody maps any more."""
        assert segment.phase in (Phase.RETIRING, Phase.CREATING) and not segment.holders, segment
        del self.by_id[segment.id]
        new = self._new(segment.index, phase)
        new.wanted_by = segment.wanted_by
        self.segments[segment.index] = new
        return new

    # --------------------------------------------------------------------------------------------------- slots

    def take(
        self, slab: SlabClass, owner: int, avoid: int = -1, closed: Container[int] = ()
    ) -> tuple[Segment, int] | None:
        """Reserve a free slot for chunk row `owner`, in no segment whose index is `closed`. The mover's source is the
        segment with index `avoid`: it wants another one, and no empty one."""
        found = iter(slab.with_free.values())
        if avoid != -1:
            found = (other for other in found if other.index != avoid and not other.empty)
        elif closed:
            found = (other for other in found if other.index not in closed)
        segment = next(found, None)
        if segment is None:
            return None
        slot = segment.free.pop()
        assert segment.owner[slot] == NO_OWNER, (segment, slot, segment.owner[slot])
        segment.owner[slot] = owner
        self._change(segment, slot, SlotState.FREE, SlotState.RESERVED)
        self.empties.pop(segment.index, None)
        slab.free -= 1
        if not segment.free:
            segment.free = array("i")  # a list that was popped from keeps its memory
            del slab.with_free[segment.index]
        return segment, slot

    def mark_ready(self, segment: Segment, slot: int) -> None:
        """RESERVED -> READY: the bytes are in."""
        self._change(segment, slot, SlotState.RESERVED, SlotState.READY)

    def quarantine(self, segment: Segment, slot: int) -> None:
        """Out of service, still owned: somebody may yet write it, or its bytes are wrong. The generation moves on."""
        before = segment.state[slot]
        assert before in (SlotState.RESERVED, SlotState.READY), (segment, slot, before)
        self._change(segment, slot, before, SlotState.QUARANTINED)
        segment.owner[slot] = NO_OWNER
        self._bump(segment, slot)

    def give_back(self, segment: Segment, slot: int) -> None:
        """-> FREE. The generation moves on before anybody can reserve the slot again."""
        before = segment.state[slot]
        assert before != SlotState.FREE, (segment, slot)
        assert segment.phase is Phase.ASSIGNED, segment
        self._change(segment, slot, before, SlotState.FREE)
        segment.owner[slot] = NO_OWNER
        self._bump(segment, slot)
        segment.free.append(slot)
        slab = self.classes[segment.namespace, segment.slot_bytes]
        slab.free += 1
        if segment.empty:  # the last to be used again: it may serve another class or namespace
            slab.with_free.pop(segment.index, None)
            self.empties[segment.index] = segment
        slab.with_free[segment.index] = segment

    def _change(self, segment: Segment, slot: int, before: int, after: SlotState) -> None:
        assert segment.state[slot] == before, (segment, slot, segment.state[slot], before)
        segment.state[slot] = after
        segment.counts[before] -= 1
        segment.counts[after] += 1

    def _bump(self, segment: Segment, slot: int) -> None:
        generation = segment.generation[slot] + 1
        segment.generation[slot] = generation
        segment.generation_floor = max(segment.generation_floor, generation)

    # ----------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Invariant 10: slots are conserved in every pool, and no slot has two owners (owners are checked above us)."""
        for segment in self.segments:
            self.check_segment(segment)
        self.check_classes()

    def check_segment(self, segment: Segment) -> None:
        assert self.by_id[segment.id] is segment, segment
        assert (segment.index in self.idle) == (segment.phase is Phase.IDLE), segment
        empty = segment.phase is Phase.ASSIGNED and segment.empty
        assert self.empties.get(segment.index) is (segment if empty else None), segment
        if segment.phase is not Phase.ASSIGNED:
            return
        slab = self.classes[segment.namespace, segment.slot_bytes]
        assert slab.segments[segment.index] is segment, segment
        counted = [segment.state.count(state) for state in range(4)]
        assert counted == segment.counts, (segment, counted)
        assert sum(segment.counts) == segment.capacity == self.slots_of(segment.slot_bytes), segment
        free = [slot for slot, state in enumerate(segment.state) if state == SlotState.FREE]
        assert sorted(segment.free) == free, segment
        assert (segment.index in slab.with_free) == bool(segment.free), segment
        for slot, state in enumerate(segment.state):
            owned = state in (SlotState.RESERVED, SlotState.READY)
            assert (segment.owner[slot] != NO_OWNER) == owned, (segment, slot, state, segment.owner[slot])
        assert max(segment.generation) <= segment.generation_floor, segment

    def check_classes(self) -> None:
        for slab in self.classes.values():
            assert slab.segments, slab
            assert slab.free == sum(segment.counts[SlotState.FREE] for segment in slab.segments.values()), (
                slab
            )
