"""Slots of one segment, hundreds at a time: what `Pool` does with one after another."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kvstore.core.bulk import equals
from kvstore.core.pool import NO_OWNER, Phase, Pool, Segment, SlabClass
from kvstore.types import SlotState

Slots = npt.NDArray[np.intp] | npt.NDArray[np.int32]


@equals("pool.Pool.take")
def take(pool: Pool, slab: SlabClass, owners: Slots) -> tuple[Segment, Slots]:
    """As `take` for each of `owners`, until the first segment has no free slot left: the slots of as many."""
    segment = next(iter(slab.with_free.values()))
    count = min(len(owners), len(segment.free))
    slots = np.array(segment.free[-count:], np.intp)[::-1]
    del segment.free[-count:]
    owner = np.frombuffer(segment.owner, np.int32)
    assert (owner[slots] == NO_OWNER).all(), (segment, slots)
    owner[slots] = owners[:count]
    _change(segment, slots, SlotState.FREE, SlotState.RESERVED)
    pool.empties.pop(segment.index, None)
    slab.free -= count
    if not segment.free:
        segment.free = array("i")
        del slab.with_free[segment.index]
    return segment, slots


@equals("pool.Pool.mark_ready")
def mark_ready(segment: Segment, slots: Slots) -> None:
    _change(segment, slots, SlotState.RESERVED, SlotState.READY)


@equals("pool.Pool.give_back", "pool.Pool.take")
def pass_on(segment: Segment, slots: Slots, owners: Slots) -> None:
    """`give_back` and `take`: these READY slots are RESERVED for other rows, and their generations move on."""
    _change(segment, slots, SlotState.READY, SlotState.RESERVED)
    np.frombuffer(segment.owner, np.int32)[slots] = owners
    _bump(segment, slots)


@equals("pool.Pool.give_back")
def give_back(pool: Pool, segment: Segment, slots: Slots) -> None:
    """`give_back` for each of these READY slots."""
    _change(segment, slots, SlotState.READY, SlotState.FREE)
    assert segment.phase is Phase.ASSIGNED, segment
    np.frombuffer(segment.owner, np.int32)[slots] = NO_OWNER
    _bump(segment, slots)
    segment.free.extend(slots.tolist())
    slab = pool.classes[segment.namespace, segment.slot_bytes]
    slab.free += len(slots)
    if segment.empty:
        slab.with_free.pop(segment.index, None)
        pool.empties[segment.index] = segment
    slab.with_free[segment.index] = segment


def _change(segment: Segment, slots: Slots, before: SlotState, after: SlotState) -> None:
    state = np.frombuffer(segment.state, np.uint8)
    assert (state[slots] == before).all(), (segment, slots, before)
    state[slots] = after
    segment.counts[before] -= len(slots)
    segment.counts[after] += len(slots)


def _bump(segment: Segment, slots: Slots) -> None:
    generation = np.frombuffer(segment.generation, np.uint64)
    generation[slots] += np.uint64(1)
    segment.generation_floor = max(segment.generation_floor, int(generation[slots].max()))
