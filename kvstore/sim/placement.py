"""What leaves the SSD, and what is promoted again: held against a look at every chunk, whatever lists the core keeps.

While no file is closed, a chunk that a queued job needs gives up its place on SSD for a new one only when no chunk
that no job needs has a slot of the same size, in DRAM too or not, in a file that takes records (but for those that
are being read).
A file that gives its room to another slot size holds no more chunks that jobs need than any other that may.
A promotion ahead of need that found no slot is not tried again before something happened that may give it one.
What somebody asked for and is about to take leaves DRAM for another chunk only when all others have to stay.
Who saves, or asked for what is on SSD, finds a slot in DRAM if any chunk may leave it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from kvstore.core.chunks import LISTED, NONE, PROMOTING, STORED, STORING
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment
from kvstore.core.segments import PASSED_OVER_MAX, Segments
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.core.store import Store
from kvstore.types import Millis, NamespaceId, SlotState


class Placement:
    """Looks over the shoulder of one store."""

    def __init__(self, store: Store, tier: SlabTier) -> None:
        self._store = store
        self._slabs = tier.slabs
        self._no_slot: dict[NamespaceId, tuple[int, Millis]] = {}
        slabs, segments = tier.slabs, store.segments
        self._evict_needed, self._begin_to_empty = slabs._evict_needed, slabs._begin_to_empty
        self._allocate = segments.allocate
        self._leave_dram = segments._leave_dram
        slabs._evict_needed = self.evict_needed  # type: ignore[method-assign]
        slabs._begin_to_empty = self.begin_to_empty  # type: ignore[method-assign]
        segments.allocate = self.allocate  # type: ignore[method-assign]
        segments._leave_dram = self.leave_dram  # type: ignore[method-assign]
        segments._evict_one = self.evict_one  # type: ignore[method-assign]
        self._evicting = False
        """For another chunk, and not because a whole segment goes to somebody else."""

    def evict_needed(self, slot_bytes: int, closed: Container[int]) -> bool:
        if not self._slabs.closed:
            spared = list(self._unneeded(slot_bytes, closed))
            assert not spared, [self._store.state.chunks.describe(row) for row in spared[:3]]
        return self._evict_needed(slot_bytes, closed)

    def _unneeded(self, slot_bytes: int, closed: Container[int]) -> Iterator[int]:
        state = self._store.state
        chunks = state.chunks
        for row in range(chunks.rows_ever):
            start = chunks.shard0[row]
            if start == NONE or row in state.policy.rank:
                continue
            if chunks.flags[row] & (STORED | STORING | PROMOTING) != STORED:
                continue
            for slab in chunks.disk_slab[start : start + state.namespace_of(row).shards]:
                if state.ssd_slots.segments[slab].slot_bytes == slot_bytes and slab not in closed:
                    yield row
                    break

    def begin_to_empty(self, slab: Segment) -> None:
        files = [
            other
            for other in self._store.state.ssd_slots.segments
            if other.phase is Phase.ASSIGNED
            and not (other.counts[SlotState.RESERVED] or other.counts[SlotState.QUARANTINED])
            and other.slot_bytes == slab.slot_bytes
            and other.index not in self._slabs.closed
        ]
        assert self._needed_in(slab) == min(map(self._needed_in, files)), slab
        self._begin_to_empty(slab)

    def _needed_in(self, slab: Segment) -> int:
        rank = self._store.state.policy.rank
        return sum(row in rank for row in slab.owner)

    def allocate(
        self, namespace: Namespace, slot_bytes: int, row: int, sooner_than: int = -1
    ) -> tuple[Segment, int] | None:
        state = self._store.state
        ahead = sooner_than >= 0
        if ahead:
            room, until = self._no_slot.pop(namespace.id, (-1, 0))
            assert room != state.room or state.now >= until, (namespace, room, until)
        taken = self._allocate(namespace, slot_bytes, row, sooner_than)
        if ahead and taken is None:
            self._no_slot[namespace.id] = (state.room, self._store.segments.next_chance(namespace))
        if taken is None and not ahead and not self._store.segments._waits_for_segment(namespace):
            left = self._others(row, namespace)
            assert not left or len(left) >= PASSED_OVER_MAX, list(map(state.chunks.describe, left[:3]))
        return taken

    def evict_one(self, namespace: Namespace, sooner_than: int) -> bool:
        self._evicting = True
        try:
            return Segments._evict_one(self._store.segments, namespace, sooner_than)
        finally:
            self._evicting = False

    def leave_dram(self, row: int) -> bool:
        policy = self._store.state.policy
        awaited = self._evicting and row in self._store.state.demanded and policy.is_awaited(row)
        others = self._others(row, self._store.state.namespace_of(row)) if awaited else []
        left = self._leave_dram(row)
        if left and len(others) < PASSED_OVER_MAX:  # no allocation looks at more
            spared = [other for other in others if not policy.is_awaited(other)]
            assert not spared, [self._store.state.chunks.describe(other) for other in (row, *spared[:3])]
        return left

    def _others(self, row: int, namespace: Namespace) -> list[int]:
        """The candidates of this namespace that could leave DRAM in its place."""
        state, segments = self._store.state, self._store.segments
        chunks = state.chunks
        return [
            other
            for other in range(chunks.rows_ever)
            if other != row
            and chunks.namespace[other] == namespace.id
            and chunks.flags[other] & LISTED
            and state.is_hit(other)
            and not chunks.pins[other]
            and not segments._has_to_stay(other)
        ]
