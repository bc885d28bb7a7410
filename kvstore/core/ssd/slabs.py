"""Slab files of the SSD tier: how a chunk's shard gets a slot of one, and which file, or chunk, gives way.

file: absent -> being made -> in use by one slab class -> being emptied, in steps
       -> retiring (its row leaves the index first) -> absent
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.bulk.needed import needed_in
from kvstore.core.chunks import NONE, PROMOTING, STORED, STORING
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.state import DISK, State
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    DiskState,
    Millis,
    NamespaceId,
    OpId,
    SlabId,
    SlotState,
    Tier,
)

VICTIMS_LOOKED_AT_MAX = 64
"""In one look for a chunk that has a slot in a file that takes records."""
EMPTIED_PER_STEP_MAX = 256
"""Chunks that leave a file that is being emptied, in one step: each costs some ten microseconds."""
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


class Looking(enum.Enum):
    """How a look for a chunk that may leave the SSD ended."""

    FOUND = enum.auto()
    NOTHING = enum.auto()
    AGAIN = enum.auto()
    """There are more to look at: in the next step."""


@dataclass(frozen=True, slots=True)
class Donor:
    slab: Segment
    needed: int
    """Shards in it of chunks that queued jobs need."""


@dataclass(slots=True)
class Emptying:
    """A file that gives its room to another slot size, in steps: what no queued job needs leaves it first. It takes no
    new records. An index that is read after a crash in between still names a file that is there, and chunks in it that
    nobody has written over."""

    slab: Segment
    next_slot: int = 0
    """What is in the slots below has left, if it could and no job needed it."""
    needed: list[int] = field(default_factory=list)
    """Rows in the slots below that jobs need; entries may be stale."""


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
        self.emptying: Emptying | None = None
        self.retiring: list[Segment] = []
        """Empty, and to be deleted with the next index transaction."""
        self.unusable: list[SlabId] = []
        """Likewise: files that a restart found and has no use for."""
        self.retry_at: Millis = 0
        self._not_made = 0
        """How many in a row could not be made because of an error."""
        self._failing: dict[int, Failing] = {}
        """By index of the slab."""
        self.awaited: Counter[tuple[NamespaceId, ChunkKey]] = Counter()
        """How many commits that wait until they are durable have the chunk (`Durability`)."""
        self._passed_over = 0
        """Victims in files that take no records, one after the other since one was found elsewhere."""

    def __repr__(self) -> str:
        return f"Slabs({len(self.creating)} being made, {len(self.retiring)} retiring)"

    def slot_bytes(self, namespace: Namespace, shard: int) -> int:
        """In a slab file: header, bytes, and padding to whole pages (`format.slot_bytes`)."""
        header = self.state.limits.disk_header_bytes
        return self.state.ssd_slots.slot_bytes(header + namespace.shard_bytes[shard])

    def fits(self, namespace: Namespace) -> bool:
        """Whether a slab file has room for a slot of each size; if not, the chunks stay in DRAM alone."""
        largest = max(self.slot_bytes(namespace, shard) for shard in range(namespace.shards))
        return self.state.ssd_slots.slots_of(largest) > 0

    def place(self, row: int, shard: int, slab: Segment, slot: int, generation: int) -> None:
        """A RESERVED slot for a shard that has none."""
        chunks = self.state.chunks
        shard_row = chunks.shard0[row] + shard
        assert chunks.disk_slab[shard_row] == NONE, chunks.describe(row)
        chunks.disk_slab[shard_row] = slab.index
        chunks.disk_slot[shard_row] = slot
        chunks.disk_generation[shard_row] = generation

    def place_of(self, row: int, shard: int) -> DiskPlace:
        chunks = self.state.chunks
        shard_row = chunks.shard0[row] + shard
        slab = self.state.ssd_slots.segments[chunks.disk_slab[shard_row]]
        return DiskPlace(SlabId(slab.id), chunks.disk_slot[shard_row], chunks.disk_generation[shard_row])

    def unplace(self, row: int, shard: int, *, quarantine: bool = False) -> None:
        state = self.state
        chunks, pool = state.chunks, state.ssd_slots
        shard_row = chunks.shard0[row] + shard
        slab, slot = pool.segments[chunks.disk_slab[shard_row]], chunks.disk_slot[shard_row]
        assert slab.owner[slot] == row, (chunks.describe(row), slab, slot)
        chunks.disk_slab[shard_row] = chunks.disk_slot[shard_row] = NONE
        if quarantine:
            state.book_quarantined(Tier.SSD, slab, slot, corrupt=True)
            pool.quarantine(slab, slot)
            state.counters["disk_slots_quarantined"] += 1
        else:
            pool.give_back(slab, slot)

    def take(self, slot_bytes: int, row: int) -> tuple[Segment, int] | None:
        """A RESERVED disk slot; None when one may come later (a slab is being made) or none can be had.

        free slot -> new slab file -> a slot of the chunk that left DRAM longest ago, of those that no queued job needs
          -> another slab class's file that holds nothing that a job needs, the one that was written longest ago
          -> the SSD copies of resident chunks that no job needs -> the chunk that is needed last
          -> another slab class's file that holds the fewest chunks that jobs need
        """
        pool = self.state.ssd_slots
        closed = self.closed
        if self.emptying is not None:
            closed |= {self.emptying.slab.index}
        slab = pool.classes.get((DISK, slot_bytes))
        taken = pool.take(slab, row, closed=closed) if slab is not None else None
        if taken is not None:
            return taken
        if any(new.slot_bytes == slot_bytes for new in self.creating.values()):
            return None
        if self._new_slab(slot_bytes) or self.retiring or self.emptying is not None:
            return None
        looking = self._evict_unneeded(slot_bytes, closed)
        if looking is Looking.AGAIN:
            return None
        if looking is Looking.FOUND:
            return pool.take(pool.classes[DISK, slot_bytes], row, closed=closed)
        others = self._other_files(slot_bytes, closed)
        if others and not others[0].needed:
            self._begin_to_empty(others[0].slab)
        elif self._drop_copies(slot_bytes, closed) or self._evict_needed(slot_bytes, closed):
            return pool.take(pool.classes[DISK, slot_bytes], row, closed=closed)
        elif others:
            self._begin_to_empty(others[0].slab)
        else:
            self.state.disk_full = True
            self.state.room += 1  # what waits for its write need not stay in DRAM
        return None

    def _new_slab(self, slot_bytes: int) -> bool:
        state = self.state
        if state.now < self.retry_at or state.ssd_slots.slots_of(slot_bytes) < 1:
            return False
        for segment in state.ssd_slots.segments:
            if segment.phase is Phase.ABSENT:
                state.ssd_slots.begin(segment)
                op = state.new_op()
                self.creating[op] = NewSlab(segment, slot_bytes, state.now + long_deadline_ms(self.state))
                state.effects.append(
                    ev.CreateSlab(op, SlabId(segment.id), slot_bytes, state.ssd_slots.slots_of(slot_bytes))
                )
                return True
        return False

    def ready(self, op: OpId) -> None:
        new = self.creating.pop(op)
        self.state.ssd_slots.created(new.segment)
        self.state.ssd_slots.assign(new.segment, DISK, new.slot_bytes)
        self.state.disk_full = False
        self._not_made = 0

    def failed(self, op: OpId, result: DiskResult, why: str) -> None:
        """No room for another file: go on with those that exist; with none at all nothing can be written."""
        state = self.state
        state.ssd_slots.replace(self.creating.pop(op).segment, Phase.ABSENT)
        self.retry_at = state.now + SLAB_RETRY_MS
        state.counters["ssd_slab_failures"] += 1
        self._not_made += result is not DiskResult.NO_SPACE
        if self._not_made == 1 or not state.ssd_slots.classes:
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
            in_use = self.state.ssd_slots.segments[index].phase is Phase.ASSIGNED
            if not in_use or failing.closed_until + FAILURES_IN_A_ROW_MS <= now:
                del self._failing[index]

    # ----------------------------------------------------------------------------------------------------- victims

    def coldest(self, limit: int) -> list[int]:
        """At most `limit` chunks that are on SSD only, whatever the size of their slots: the next to go first."""
        state = self.state
        cold = list(state.cold.by_sizes.values())
        rows = list(islice(state.policy.unneeded(*cold), limit))
        left = limit - len(rows)
        return rows + list(islice(state.policy.needed(*cold, limit=left), left))

    def _evict_unneeded(self, slot_bytes: int, closed: Container[int]) -> Looking:
        """Drop the chunk that left DRAM longest ago, of those that have a slot of this size and no queued job needs. In
        a file that takes no records its slot is of no use: such a chunk goes behind the others, and after so many the
        look goes on in the next step."""
        state = self.state
        policy = state.policy
        cold = state.cold.with_slots_of(slot_bytes)
        for _ in range(VICTIMS_LOOKED_AT_MAX):
            if self._passed_over >= sum(mine.unneeded for mine in cold):
                self._passed_over = 0
                return Looking.NOTHING
            row = next(policy.unneeded(*cold))
            if self._has_slot_of(row, slot_bytes, closed):
                self._passed_over = 0
                state.evict_copy(row)
                return Looking.FOUND
            mine = state.namespace_of(row).ssd
            policy.pass_over(mine, row)
            self._passed_over += 1
        return Looking.AGAIN

    def _evict_needed(self, slot_bytes: int, closed: Container[int]) -> bool:
        """The same of those that jobs need: the one that is needed last, on SSD only or in DRAM too, where it stays."""
        state = self.state
        flags = state.chunks.flags
        if not state.policy.rank:
            return False
        cold = state.cold.with_slots_of(slot_bytes)
        resident = [space.dram for space in state.namespaces.values() if space.ssd in cold]
        for row in state.policy.needed(*cold, *resident, limit=VICTIMS_LOOKED_AT_MAX):
            if flags[row] & STORED and self._has_slot_of(row, slot_bytes, closed):
                state.evict_copy(row)
                state.counters["needed_chunks_evicted_from_ssd"] += 1
                return True
        return False

    def _has_slot_of(self, row: int, slot_bytes: int, closed: Container[int]) -> bool:
        chunks = self.state.chunks
        namespace = self.state.namespace_of(row)
        return any(
            self.slot_bytes(namespace, shard) == slot_bytes
            and chunks.disk_slab[chunks.shard0[row] + shard] not in closed
            for shard in range(namespace.shards)
        )

    def _drop_copies(self, slot_bytes: int, closed: Container[int]) -> bool:
        """In the file of this slot size that was written longest ago, of those with such a chunk: the copies of what no
        queued job needs and is in DRAM too, where it stays. What somebody waits for until it is durable goes last."""
        state = self.state
        slab_class = state.ssd_slots.classes.get((DISK, slot_bytes))
        if slab_class is None:
            return False
        mine = [slab for slab in slab_class.segments.values() if slab.index not in closed]
        mine.sort(key=lambda slab: slab.touched_at)
        for is_spare in (self._is_idle_spare, self._is_spare) if self.awaited else (self._is_spare,):
            for slab in mine:
                copies = dict.fromkeys(islice(filter(is_spare, slab.owner), EMPTIED_PER_STEP_MAX))
                for row in copies:
                    state.evict_copy(row)
                if copies:
                    return True
        return False

    def _is_idle_spare(self, row: int) -> bool:
        if not self._is_spare(row):
            return False
        chunks = self.state.chunks
        return (NamespaceId(chunks.namespace[row]), chunks.key[row]) not in self.awaited

    def _is_spare(self, row: int) -> bool:
        state = self.state
        if row == NONE or row in state.policy.rank:
            return False
        return state.chunks.flags[row] & (STORED | STORING | PROMOTING) == STORED and state.is_resident(row)

    # ---------------------------------------------------------------------------------------- a file changes its size

    def _other_files(self, slot_bytes: int, closed: Container[int]) -> list[Donor]:
        """Files of other slot sizes that may be emptied: first what is empty, then the one with the fewest chunks that
        queued jobs need, then the one that was written longest ago."""
        files = [
            slab
            for slab in self.state.ssd_slots.segments
            if slab.phase is Phase.ASSIGNED
            and slab.slot_bytes != slot_bytes
            and slab.index not in closed
            and not slab.counts[SlotState.RESERVED]
            and not slab.counts[SlotState.QUARANTINED]
        ]
        if not files:
            return []
        needed = needed_in(self.state)
        donors = [Donor(slab, needed.get(slab.index, 0)) for slab in files]
        donors.sort(key=lambda donor: (not donor.slab.empty, donor.needed, donor.slab.touched_at))
        return donors

    def _begin_to_empty(self, slab: Segment) -> None:
        self.emptying = Emptying(slab)
        self.state.counters["ssd_slabs_emptied"] += 1
        self._go_on(self.emptying)

    @property
    def going(self) -> bool:
        """Whether a file is being emptied, and a step more would do something."""
        emptying = self.emptying
        return emptying is not None and bool(emptying.next_slot < emptying.slab.capacity or emptying.needed)

    def pump(self) -> None:
        """After every step, while the disk is well."""
        if self.emptying is not None and self.going:
            self._go_on(self.emptying)

    def tick(self) -> None:
        """While the disk is well. Chunks that were being read when they should have left may leave now."""
        if self.emptying is not None and not self.going:
            self.emptying.next_slot = 0

    def _go_on(self, emptying: Emptying) -> None:
        slab, rank = emptying.slab, self.state.policy.rank
        first = emptying.next_slot
        emptying.next_slot = min(first + EMPTIED_PER_STEP_MAX, slab.capacity)
        for row in slab.owner[first : emptying.next_slot]:
            if row in rank:
                emptying.needed.append(row)
            elif row != NONE:
                self._leave_file(slab, row)
        if first == slab.capacity:
            emptying.needed.sort(key=lambda row: rank.get(row, len(rank)))
            for _ in range(min(EMPTIED_PER_STEP_MAX, len(emptying.needed))):
                self._leave_file(slab, emptying.needed.pop())
        if slab.counts[SlotState.QUARANTINED]:
            self.emptying = None  # it has to keep its slots until they are well
        elif slab.empty:
            self.emptying = None
            self.state.ssd_slots.retire(slab, DISK)
            self.retiring.append(slab)

    def _leave_file(self, slab: Segment, row: int) -> None:
        """Unless it left already, or is on its way to DRAM and leaves later."""
        state = self.state
        chunks = state.chunks
        start = chunks.shard0[row]
        if start == NONE or chunks.flags[row] & (STORED | STORING | PROMOTING) != STORED:
            return
        shards = state.namespace_of(row).shards
        if slab.index not in chunks.disk_slab[start : start + shards]:
            return
        needed = row in state.policy.rank
        state.evict_copy(row)
        if needed and state.is_hit(row):
            state.store_later(row)  # in another file

    @property
    def overdue(self) -> bool:
        """Whether a file takes too long to be made."""
        return any(new.deadline <= self.state.now for new in self.creating.values())


def long_deadline_ms(state: State) -> Millis:
    return max(LONG_DEADLINE_MS, state.limits.disk_deadline_ms)
