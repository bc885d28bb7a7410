"""Slab files of the SSD tier: how a chunk's shard gets a slot of one, and which file, or chunk, gives way.

file: absent -> being made -> in use by one slab class -> retiring (its row leaves the index first) -> absent
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.chunks import NONE, PROMOTING, STORING
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.state import DISK, State
from kvstore.types import DiskResult, DiskState, Millis, OpId, SlabId, SlotState

VICTIMS_LOOKED_AT_MAX = 64
SLAB_RETRY_MS = 10_000
"""After a slab file could not be made (full), how long until the next try."""
FAILURES_IN_A_ROW_MS = 60_000
"""A slab file that fails again within this time after it was in use again is closed, CLOSED_MIN_MS at first, and twice
as long each time: the disk may be fine but for this file, and a tier that tries it again with each probe would be
degraded every second."""
CLOSED_MIN_MS = 10_000
CLOSED_MAX_MS = 600_000
LONG_DEADLINE_MS = 10_000
"""For what may take long without anything being wrong: making a file, an index transaction with its syncs."""

Degrade = Callable[[DiskState, str], None]


@dataclass(slots=True)
class NewSlab:
    segment: Segment
    slot_bytes: int
    deadline: Millis


@dataclass(slots=True)
class Failing:
    """A slab file that failed, though the disk did not."""

    times: int
    closed_until: Millis


class Slabs:
    def __init__(self, state: State, degrade: Degrade) -> None:
        self.state = state
        self._degrade = degrade
        self.creating: dict[OpId, NewSlab] = {}
        self.retiring: list[Segment] = []
        """Empty, and to be deleted with the next index transaction."""
        self.unusable: list[SlabId] = []
        """Likewise: files that a restart found and has no use for."""
        self.retry_at: Millis = 0
        self._not_made = 0
        """How many in a row could not be made because of an error."""
        self._failing: dict[int, Failing] = {}
        """By index of the slab."""

    def __repr__(self) -> str:
        return f"Slabs({len(self.creating)} being made, {len(self.retiring)} retiring)"

    def slot_bytes(self, namespace: Namespace, shard: int) -> int:
        """In a slab file: header, bytes, and padding to whole pages (`format.slot_bytes`)."""
        header = self.state.limits.disk_header_bytes
        return self.state.disk.slot_bytes(header + namespace.shard_bytes[shard])

    def fits(self, namespace: Namespace) -> bool:
        """Whether a slab file has room for a slot of each size; if not, the chunks stay in DRAM alone."""
        largest = max(self.slot_bytes(namespace, shard) for shard in range(namespace.shards))
        return self.state.disk.slots_of(largest) > 0

    def take(self, slot_bytes: int, row: int) -> tuple[Segment, int] | None:
        """A RESERVED disk slot; None when one may come later (a slab is being made) or none can be had.

        free slot -> new slab file -> slots of chunks that left DRAM longest ago -> another slab class's oldest file
          -> the SSD copy of the resident chunk that was used longest ago
        """
        pool = self.state.disk
        closed = self.closed
        slab = pool.classes.get((DISK, slot_bytes))
        taken = pool.take(slab, row, closed=closed) if slab is not None else None
        if taken is not None:
            return taken
        if any(new.slot_bytes == slot_bytes for new in self.creating.values()):
            return None
        if self._new_slab(slot_bytes) or self.retiring:
            return None
        if self._evict(slot_bytes, closed):
            return pool.take(pool.classes[DISK, slot_bytes], row, closed=closed)
        if not self._retire_slab(slot_bytes, closed):
            self.state.disk_full = True
        return None

    def _new_slab(self, slot_bytes: int) -> bool:
        state = self.state
        if state.now < self.retry_at or state.disk.slots_of(slot_bytes) < 1:
            return False
        for segment in state.disk.segments:
            if segment.phase is Phase.ABSENT:
                state.disk.begin(segment)
                op = state.new_op()
                self.creating[op] = NewSlab(segment, slot_bytes, state.now + long_deadline_ms(self.state))
                state.effects.append(
                    ev.CreateSlab(op, SlabId(segment.id), slot_bytes, state.disk.slots_of(slot_bytes))
                )
                return True
        return False

    def ready(self, op: OpId) -> None:
        new = self.creating.pop(op)
        self.state.disk.created(new.segment)
        self.state.disk.assign(new.segment, DISK, new.slot_bytes)
        self.state.disk_full = False
        self._not_made = 0

    def failed(self, op: OpId, result: DiskResult, why: str) -> None:
        """No room for another file: go on with those that exist; with none at all nothing can be written."""
        state = self.state
        state.disk.replace(self.creating.pop(op).segment, Phase.ABSENT)
        self.retry_at = state.now + SLAB_RETRY_MS
        state.counters["ssd_slab_failures"] += 1
        self._not_made += result is not DiskResult.NO_SPACE
        if self._not_made == 1 or not state.disk.classes:
            self._degrade(DiskState.READ_ONLY, why)

    def healed(self) -> None:
        """The disk is in order. A file that cannot be made all the same is not tried at once again."""
        if self._not_made < 2:
            self.retry_at = self.state.now

    @property
    def closed(self) -> frozenset[int]:
        """Indices of slabs that take no new records for a while: writes or syncs failed there, again and again."""
        if not self._failing:
            return frozenset()
        now = self.state.now
        return frozenset(index for index, failing in self._failing.items() if failing.closed_until > now)

    def fails(self, slab: Segment) -> None:
        """A call for this slab file failed. With every failure that follows soon it is left alone for longer."""
        now = self.state.now
        before = self._failing.get(slab.index)
        if before is not None and before.closed_until > now:
            return  # what was under way already
        soon = before is not None and now < before.closed_until + FAILURES_IN_A_ROW_MS
        times = before.times + 1 if before is not None and soon else 1
        closed_ms = min(CLOSED_MIN_MS << (times - 2), CLOSED_MAX_MS) if times > 1 else 0
        self._failing[slab.index] = Failing(times, now + closed_ms)
        if times == 2:
            self.state.counters["ssd_slabs_closed"] += 1

    def forget_failures(self) -> None:
        """Of slabs that were in use again for long, or are other files now."""
        now = self.state.now
        for index, failing in list(self._failing.items()):
            in_use = self.state.disk.segments[index].phase is Phase.ASSIGNED
            if not in_use or failing.closed_until + FAILURES_IN_A_ROW_MS <= now:
                del self._failing[index]

    def _evict(self, slot_bytes: int, closed: Container[int]) -> bool:
        """Drop one chunk that has a slot of this size: the one that left DRAM longest ago and no queued job needs."""
        state = self.state
        chosen = NONE
        for row in islice(state.chunks.walk(state.cold), VICTIMS_LOOKED_AT_MAX):
            if self._has_slot_of(row, slot_bytes, closed):
                chosen = row if chosen == NONE else chosen
                if row not in state.policy.rank:
                    chosen = row
                    break
        if chosen == NONE:
            return False
        state.evict_from_disk(chosen)
        return True

    def _has_slot_of(self, row: int, slot_bytes: int, closed: Container[int]) -> bool:
        chunks = self.state.chunks
        namespace = self.state.namespace_of(row)
        return any(
            self.slot_bytes(namespace, shard) == slot_bytes
            and chunks.disk_slab[chunks.shard0[row] + shard] not in closed
            for shard in range(namespace.shards)
        )

    def _retire_slab(self, slot_bytes: int, closed: Container[int]) -> bool:
        """Empty the file that was written longest ago: another class's, or our own with resident chunks in it (they
        stay in DRAM)."""
        state = self.state
        candidates = [
            s for s in state.disk.segments if s.phase is Phase.ASSIGNED and not s.counts[SlotState.RESERVED]
        ]
        candidates = [s for s in candidates if not s.counts[SlotState.QUARANTINED] and not self._busy(s)]
        candidates = [s for s in candidates if s.index not in closed]
        if not candidates:
            return False
        oldest = min(candidates, key=lambda s: (not s.empty, s.slot_bytes == slot_bytes, s.touched_at))
        for row in dict.fromkeys(row for row in oldest.owner if row != NONE):
            state.evict_from_disk(row)
        if oldest.slot_bytes == slot_bytes:
            return True
        state.disk.retire(oldest, DISK)
        self.retiring.append(oldest)
        return True

    def _busy(self, slab: Segment) -> bool:
        flags = self.state.chunks.flags
        return any(row != NONE and flags[row] & (PROMOTING | STORING) for row in slab.owner)

    @property
    def overdue(self) -> bool:
        """Whether a file takes too long to be made."""
        return any(new.deadline <= self.state.now for new in self.creating.values())


def long_deadline_ms(state: State) -> Millis:
    return max(LONG_DEADLINE_MS, state.limits.disk_deadline_ms)
