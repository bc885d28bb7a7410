"""Many chunks of one namespace at a time, through views of their columns.

Each function does what a loop over the methods of `State` and `ChunkTable` that it names would do, in a tenth
of the time once there are a few dozen; the callers choose by `State.batch_min`. That both do the same, to the last slot
and link, is what the tests of this file are about.

Views export the columns' memory, so a column cannot grow while somebody holds one. Hence they are asked for here alone,
after whatever may grow, and nothing here raises an error that is kept as an answer (its traceback would hold them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.core.bulk import equals, helper, table
from kvstore.core.bulk import slots as slots_of
from kvstore.core.chunks import (
    COMMITTED,
    DOOMED,
    HITS_MAX,
    KEPT,
    LISTED,
    NONE,
    QUEUED,
    STORED,
    ChunkTable,
    LinkedRows,
)
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Pool, Segment, SlabClass
from kvstore.types import ChunkKey, DiskState, Extents, Reason, SlotState

if TYPE_CHECKING:
    from kvstore.core.state import State
    from kvstore.core.workers import EngineGroup

Rows = npt.NDArray[np.intp]


@helper
def as_rows(rows: Sequence[int] | Rows) -> Rows:
    return np.array(rows, np.intp)


@helper
def distinct(rows: Sequence[int]) -> bool:
    return len(set(rows)) == len(rows)


# ---------------------------------------------------------------------------------------------------------- looking


@equals("requests.reads.lookup")
def look_up(
    state: State, namespace: Namespace, keys: Sequence[ChunkKey]
) -> tuple[Rows, bytearray, list[int]]:
    """(row or NONE, reason) of each key as `lookup` has them, and the numbers of the keys whose reason only `lookup`
    knows. The namespace is not retired, and nothing is being recalled."""
    chunks = state.chunks
    rows = np.fromiter(map(namespace.index.get, keys, repeat(NONE)), np.intp, len(keys))
    if not chunks.rows_ever:
        return rows, bytearray([Reason.NEVER_SEEN]) * len(keys), []
    view = chunks.views
    flags = view.flags[rows]  # of row NONE something, which does not count
    alive = (rows >= 0) & (view.shard0[rows] >= 0) & (flags & DOOMED == 0)
    hit = alive & (view.ready[rows] == namespace.shards)
    if hit.all():
        return rows, bytearray(len(keys)), []
    cold = alive & ~hit & (flags & STORED != 0)
    reasons = np.zeros(len(keys), np.uint8)
    reasons[rows < 0] = Reason.NEVER_SEEN
    reasons[cold] = Reason.SLOW if state.disk_state is DiskState.OFF else Reason.ON_SSD
    rest = np.flatnonzero((rows >= 0) & ~hit & ~cold).tolist()
    return rows, bytearray(reasons), rest


@equals("state.State.is_usable")
def usable_leading(state: State, namespace: Namespace, rows: Sequence[int]) -> int:
    """How many of these, from the first, `State.is_usable`; NONE is not."""
    first_hole = usable_each(state, namespace, rows).find(0)
    return len(rows) if first_hole < 0 else first_hole


@equals("state.State.is_usable")
def usable_each(state: State, namespace: Namespace, rows: Sequence[int]) -> bytes:
    """Of each of these whether `State.is_usable`, 1 or 0; NONE is not."""
    if not state.chunks.rows_ever:
        return bytes(len(rows))
    view = state.chunks.views
    which = as_rows(rows)
    flags = view.flags[which]
    resident = (view.shard0[which] != NONE) & (view.ready[which] == namespace.shards)
    usable = resident & (flags & DOOMED == 0)
    if state.disk_state is not DiskState.OFF:
        usable |= flags & (STORED | DOOMED) == STORED
    usable &= which != NONE
    return bytes(usable.astype(np.uint8))


@equals("state.State.extent")
def extents(state: State, rows: Sequence[int], shards: Sequence[int], lengths: Sequence[int]) -> Extents:
    """Where these shards of each row are (`State.extent`)."""
    view = state.chunks.views
    shard_rows = _shard_rows(view.shard0[as_rows(rows)], shards)
    index = view.shard_segment[shard_rows]
    cell = view.shard_slot[shard_rows].astype(np.uint64)
    segment = np.empty(len(shard_rows), np.uint64)
    slot_bytes = np.empty(len(shard_rows), np.uint64)
    generation = np.empty(len(shard_rows), np.uint64)
    for found, mine in _by_segment(state.pool, index):
        segment[mine] = found.id
        slot_bytes[mine] = found.slot_bytes
        generation[mine] = np.frombuffer(found.generation, np.uint64)[cell[mine]]
    length = np.tile(np.array([lengths[shard] for shard in shards], np.uint64), len(rows))
    columns = (segment, cell * slot_bytes, length, cell, generation, view.shard_checksum[shard_rows])
    return Extents.of_columns(*(column.tobytes() for column in columns))


def _shard_rows(shard0: npt.NDArray[Any], shards: Sequence[int]) -> Rows:
    """In the columns of shards: row by row, then shard by shard."""
    return (shard0.astype(np.intp)[:, None] + np.array(shards, np.intp)).ravel()


def _by_segment(pool: Pool, index: npt.NDArray[np.int32]) -> Iterator[tuple[Segment, Any]]:
    """Each segment, with what selects its shards."""
    first = index[0]
    if (index == first).all():
        yield pool.segments[first], slice(None)
        return
    order = np.argsort(index, kind="stable")
    ends = [0, *(np.flatnonzero(np.diff(index[order])) + 1).tolist(), len(index)]
    for start, end in pairwise(ends):
        mine = order[start:end]
        yield pool.segments[index[mine[0]]], mine


# ------------------------------------------------------------------------------------------------------------- lists


@equals("chunks.ChunkTable.unlink")
def unlink(chunks: ChunkTable, rows: LinkedRows, which: Rows) -> None:
    """`ChunkTable.unlink` for each; quick where neighbours of the list stand side by side, the newer one first."""
    view = chunks.views
    assert (view.flags[which] & LISTED).all(), which
    breaks = np.flatnonzero(view.newer[which[1:]] != which[:-1])
    firsts = which[np.append(0, breaks + 1)].tolist()
    lasts = which[np.append(breaks, len(which) - 1)].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        newer, older = chunks.newer[first], chunks.older[last]
        if older != NONE:
            chunks.newer[older] = newer
        else:
            rows.oldest = newer
        if newer != NONE:
            chunks.older[newer] = older
        else:
            rows.newest = older
    view.newer[which] = view.older[which] = NONE
    view.flags[which] &= ~np.uint16(LISTED)
    rows.count -= len(which)


@equals("chunks.ChunkTable.link_newest")
def link_newest(chunks: ChunkTable, rows: LinkedRows, which: Rows) -> None:
    """`ChunkTable.link_newest` for each, one after the other."""
    view = chunks.views
    assert not (view.flags[which] & LISTED).any(), which
    view.older[which[1:]] = which[:-1]
    view.newer[which[:-1]] = which[1:]
    first, last = int(which[0]), int(which[-1])
    chunks.older[first] = rows.newest
    chunks.newer[last] = NONE
    if rows.newest != NONE:
        chunks.newer[rows.newest] = first
    else:
        rows.oldest = first
    rows.newest = last
    rows.count += len(which)
    view.flags[which] |= LISTED


@equals("chunks.ChunkTable.link_oldest")
def link_oldest(chunks: ChunkTable, rows: LinkedRows, which: Rows) -> None:
    """`ChunkTable.link_oldest` for each, one after the other."""
    view = chunks.views
    assert not (view.flags[which] & LISTED).any(), which
    view.newer[which[1:]] = which[:-1]
    view.older[which[:-1]] = which[1:]
    first, last = int(which[0]), int(which[-1])
    chunks.newer[first] = rows.oldest
    chunks.older[last] = NONE
    if rows.oldest != NONE:
        chunks.older[rows.oldest] = first
    else:
        rows.newest = first
    rows.oldest = last
    rows.count += len(which)
    view.flags[which] |= LISTED


# -------------------------------------------------------------------------------------------------------------- pins


@equals("state.State.pin")
def pin(state: State, namespace: Namespace, rows: Sequence[int]) -> None:
    """`State.pin` for each of these different rows."""
    view = state.chunks.views
    which = as_rows(rows)
    pins = view.pins[which]
    view.pins[which] = pins + 1
    if pins.any():
        which = which[pins == 0]
    if not len(which):
        return
    namespace.pinned += len(which)
    _count_pinned(state, namespace, which, +1)
    state.policy.remove_many(namespace.dram, which)


@equals("state.State._unpin_each")
def unpin(state: State, namespace: Namespace, rows: Sequence[int]) -> Sequence[int]:
    """`State.unpin` for each of these different rows, none of which is doomed, but for making those that nobody pins
    any more evictable: they are returned."""
    view = state.chunks.views
    which = as_rows(rows)
    pins = view.pins[which]
    assert (pins > 0).all(), rows
    view.pins[which] = pins - 1
    if (pins > 1).any():
        which = which[pins == 1]
        rows = which.tolist()
    if len(which):
        namespace.pinned -= len(which)
        _count_pinned(state, namespace, which, -1)
    return rows


@equals("workers.EngineGroup.charge")
def charge_new(group: EngineGroup, rows: Sequence[int], chunk_bytes: int, bytes_max: int) -> bool:
    """`EngineGroup.charge` for all `rows`, if they are different and the group pins none of them yet; else nothing
    happens."""
    once = dict.fromkeys(rows, 1)
    size = len(rows) * chunk_bytes
    if (
        len(once) < len(rows)
        or group.pinned_bytes + size > bytes_max
        or not group.pins.keys().isdisjoint(rows)
    ):
        return False
    group.pinned_bytes += size
    group.pins.update(once)
    return True


@helper
def any_flag(chunks: ChunkTable, rows: Sequence[int], flag: int) -> bool:
    return bool((chunks.views.flags[as_rows(rows)] & flag).any())


def _count_pinned(state: State, namespace: Namespace, which: Rows, change: int) -> None:
    view = state.chunks.views
    shard_rows = _shard_rows(view.shard0[which], range(namespace.shards))
    for index, count in _counts(view.shard_segment[shard_rows]):
        state.pool.segments[index].pinned += change * count


def _counts(index: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """How many shards are in each segment."""
    first = int(index[0])
    if (index == first).all():
        yield first, len(index)
        return
    found, counts = np.unique(index, return_counts=True)
    yield from zip(found.tolist(), counts.tolist(), strict=True)


@equals("requests.reads.Reads._used_each")
def used(state: State, namespace: Namespace, rows: Sequence[int]) -> None:
    """These different rows are used now, as far as their columns and segments tell."""
    view = state.chunks.views
    which = as_rows(rows)
    view.used_at[which] = state.now
    hits = view.hits[which]
    view.hits[which] = hits + (hits < HITS_MAX)
    shard_rows = _shard_rows(view.shard0[which], range(namespace.shards))
    for index, _ in _counts(view.shard_segment[shard_rows]):
        state.pool.segments[index].touched_at = state.now


# ------------------------------------------------------------------------------------------------------------- saves


@equals("chunks.ChunkTable.new_row", "state.State.begin_chunk", "pool.Pool.take", "state.State.place_shard")
def begin(
    state: State, namespace: Namespace, keys: Sequence[ChunkKey], slab: SlabClass, shards: Sequence[int]
) -> list[int]:
    """A row for each of these new keys, with a RESERVED slot of `slab` for each of `shards`: `ChunkTable.new_row`,
    `State.begin_chunk`, `Pool.take`, `State.place_shard`. There are enough free slots."""
    chunks = state.chunks
    rows = table.new_rows(chunks, keys)
    which = _begin(state, namespace, keys, rows, table.new_shards(chunks, len(keys), namespace.shards))
    view = chunks.views
    shard_rows = _shard_rows(view.shard0[which], shards)
    owners = np.repeat(which, len(shards))
    at = 0
    while at < len(shard_rows):
        segment, slots = slots_of.take(state.pool, slab, owners[at:])
        part = slice(at, at + len(slots))
        view.shard_segment[shard_rows[part]] = segment.index
        view.shard_slot[shard_rows[part]] = slots
        at += len(slots)
    view.reserved[which] += np.uint16(len(shards))
    return rows


def _begin(
    state: State,
    namespace: Namespace,
    keys: Sequence[ChunkKey],
    rows: Sequence[int],
    starts: Sequence[int],
) -> Rows:
    """New rows with room for their shards become partial chunks."""
    namespace.index.update(zip(keys, rows, strict=True))
    which = as_rows(rows)
    view = state.chunks.views
    view.namespace[which] = namespace.id
    view.used_at[which] = view.born_at[which] = state.now
    view.shard0[which] = starts
    namespace.partial += len(rows)
    link_newest(state.chunks, state.partials, which)
    return which


@equals("state.State.demote", "state.State.to_ghost", "state.State.begin_chunk", "state.State.place_shard")
def take_over(
    state: State, namespace: Namespace, keys: Sequence[ChunkKey], victims: Sequence[int], *, stored: bool
) -> list[int]:
    """A row for each of these new keys, which takes the slot of one of the namespace's candidates in DRAM:
    `begin` with `State.demote`, of those that are STORED, or `State.to_ghost` in between. All have one shard."""
    chunks = state.chunks
    gone = as_rows(victims)
    freed = chunks.views.shard0[gone].astype(np.intp)
    index, slots = _take_out(state, namespace, gone, freed, stored=stored)
    if stored:
        rows = table.new_rows(chunks, keys)
        starts = table.new_shards(chunks, len(keys), 1)
    else:
        rows, starts = [], []
        for key, victim, start in zip(keys, victims, freed.tolist(), strict=True):
            rows.append(chunks.new_row(namespace.id, key, state.now))
            starts += table.new_shards(chunks, 1, 1)
            chunks.give_back_shards((start,), 1)
            if not chunks.refs[victim]:
                state.remember_ghost(victim)
    which = _begin(state, namespace, keys, rows, starts)
    view = chunks.views
    for segment, mine in _by_first(state.pool, index):
        slots_of.pass_on(segment, slots[mine], which[mine])
        state.bump(segment, slots[mine].tolist())
    shard_rows = view.shard0[which]
    view.shard_segment[shard_rows] = index
    view.shard_slot[shard_rows] = slots
    view.reserved[which] += np.uint16(1)
    return rows


@equals("state.State.demote", "state.State.to_ghost")
def leave_dram(state: State, namespace: Namespace, victims: Sequence[int], *, stored: bool) -> None:
    """`State.demote`, of those that are STORED, or `State.to_ghost` for EVICTED, of candidates in DRAM."""
    chunks = state.chunks
    gone = as_rows(victims)
    start = chunks.views.shard0[gone]
    index, slots = _take_out(
        state, namespace, gone, _shard_rows(start, range(namespace.shards)), stored=stored
    )
    groups = _by_first(state.pool, index)
    for segment, mine in sorted(groups, key=_when_given_back):
        slots_of.give_back(state.pool, segment, slots[mine])
    for segment, mine in groups:
        state.bump(segment, slots[mine].tolist())
    state.room += 1
    if not stored:
        chunks.give_back_shards(start.tolist(), namespace.shards)
        unnamed = gone[chunks.views.refs[gone] == 0]
        if len(unnamed):
            link_newest(chunks, state.ghosts, unnamed)
            state.forget_ghosts()


def _take_out(
    state: State, namespace: Namespace, gone: Rows, shard_rows: Rows, *, stored: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """These candidates in DRAM, with their shards, have no slots any more; (index of the segment, number)
    of those. They are cold if they are `stored`, else nearly ghosts: whose room for shards, and who remembers them, is
    up to the caller."""
    chunks = state.chunks
    view = chunks.views
    victims = gone.tolist()
    index, slots = view.shard_segment[shard_rows], view.shard_slot[shard_rows]
    state.demanded.difference_update(victims)
    if wasted := state.prefetched.intersection(victims):
        state.prefetched -= wasted
        state.counters["prefetch_wasted"] += len(wasted)
    state.policy.remove_many(namespace.dram, gone[::-1])
    state.directory.noted.update(dict.fromkeys(victims))
    view.shard_segment[shard_rows] = view.shard_slot[shard_rows] = NONE
    view.shard_ready[shard_rows] = 0
    view.ready[gone] = 0
    namespace.visible -= len(victims)
    if stored:
        namespace.cold += len(victims)
        state.policy.add_last_many(namespace.ssd, gone)
        state.jobs.left_dram(victims)
        state.counters["chunks_demoted"] += len(victims)
    else:
        state.policy.forget_many(victims)
        state.jobs.lost_many(victims)
        view.shard_checksum[shard_rows] = 0
        view.shard0[gone] = NONE
        view.flags[gone] &= ~np.uint16(KEPT)
        view.reason[gone] = Reason.EVICTED
        state.counters["chunks_evicted"] += len(victims)
    return index, slots


def _by_first(pool: Pool, index: npt.NDArray[np.int32]) -> list[tuple[Segment, Any]]:
    """As `_by_segment`, in the order of the first shard in each."""
    return sorted(_by_segment(pool, index), key=lambda group: _first(group[1]))


def _when_given_back(group: tuple[Segment, Any]) -> int:
    """Which shard puts a segment where it stands among those with free slots: the first one in it, or the last where
    nothing is left in the segment, since `Pool.give_back` puts an empty one behind the others."""
    segment, mine = group
    if isinstance(mine, slice):  # all are in this one
        return 0
    becomes_empty = segment.counts[SlotState.FREE] + len(mine) == segment.capacity
    return int(mine[-1 if becomes_empty else 0])


def _first(mine: Any) -> int:
    return 0 if isinstance(mine, slice) else int(mine[0])


@equals("requests.saves.Saves._describe")
def describe(
    chunks: ChunkTable, rows: Sequence[int], above: Sequence[int], tokens: Sequence[int], flags: Sequence[int]
) -> None:
    """What these new chunks are (`Saves._describe`); `above` has the row of the parent of each, NONE for nobody."""
    view = chunks.views
    which, parents = as_rows(rows), as_rows(above)
    view.tokens[which] = tokens
    view.flags[which] |= np.array(flags, np.uint16)
    # The usual parent is the chunk before, which is as new and has no other child yet.
    chained = np.append(False, parents[1:] == which[:-1])
    child, parent = which[chained], parents[chained]
    view.parent[child] = parent
    view.first_child[parent] = child
    for number in np.flatnonzero(~chained & (parents != NONE)).tolist():
        chunks.attach(rows[number], above[number])


@helper
def may_mark_ready(chunks: ChunkTable, rows: Sequence[int]) -> bool:
    """Whether `mark_shards_ready` may be asked for these partial chunks: none of them is doomed."""
    return not (chunks.views.flags[as_rows(rows)] & DOOMED).any()


@equals("state.State.mark_shard_ready")
def mark_shards_ready(
    state: State, namespace: Namespace, rows: Sequence[int], shards: Sequence[int], checksums: Sequence[int]
) -> list[bool]:
    """`State.mark_shard_ready` for `shards` of each of these different rows, none of which is doomed or promoting.
    Which of them are resident by it."""
    chunks = state.chunks
    view = chunks.views
    which = as_rows(rows)
    shard_rows = _shard_rows(view.shard0[which], shards)
    slots = view.shard_slot[shard_rows]
    for segment, mine in _by_segment(state.pool, view.shard_segment[shard_rows]):
        slots_of.mark_ready(segment, slots[mine])
        segment.touched_at = state.now
    view.born_at[which] = state.now
    view.shard_checksum[shard_rows] = np.array(checksums, np.uint64)
    view.shard_ready[shard_rows] = 1
    view.reserved[which] -= np.uint16(len(shards))
    view.ready[which] += np.uint16(len(shards))
    whole = view.ready[which] == namespace.shards
    arrived = which[whole]
    if len(arrived):
        state.directory.noted.update(dict.fromkeys(arrived.tolist()))
        namespace.partial -= len(arrived)
        namespace.visible += len(arrived)
        unlink(chunks, state.partials, arrived[::-1])
        view.flags[arrived] |= COMMITTED
        view.reason[arrived] = Reason.NONE
        view.used_at[arrived] = state.now
        if state.disk_state is not DiskState.ABSENT:
            unqueued = arrived[view.flags[arrived] & (STORED | QUEUED) == 0]
            view.flags[unqueued] |= QUEUED
            later = unqueued.tolist()
            state.to_store.extend(zip(later, map(chunks.key.__getitem__, later), strict=True))
            state.forget_stale_to_store()
        for row in arrived.tolist() if state.waits else ():
            state.settle(row, ready=True)
        state.jobs.came_many(namespace.id, map(chunks.key.__getitem__, arrived.tolist()))
    return list(map(bool, whole))


@equals("state.State.add_maker")
def add_maker(state: State, rows: Sequence[int], maker: bytes) -> None:
    """`State.add_maker` for each of these different rows."""
    view = state.chunks.views
    which = as_rows(rows)
    nobody = view.maker[which] == NONE
    if nobody.any():
        view.maker[which[nobody]] = state.chunks.number_of_maker(maker, uses=int(nobody.sum()))
    for row in which[~nobody].tolist():
        state.add_maker(row, maker)
