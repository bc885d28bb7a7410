"""Pure choices about segments: whose memory should serve whom. The store owns pins, capacity and the final say."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.pool import Phase, Pool, Segment, SlabClass
from kvstore.types import Millis, NamespaceId, SlotState


def donor(
    segments: Sequence[Segment], wanted_by: NamespaceId, own_oldest: Millis | None, namespaces: int
) -> Segment | None:
    """The segment of another namespace that `wanted_by` should get, or None.

    In this order: an empty one; one that was last used before `own_oldest`, the oldest chunk that `wanted_by` could
    evict itself (giving it away is then no worse than LRU over everything); and, while `wanted_by` has less than an
    equal part of the arena, the one that a namespace with more than its part used longest ago. Never one with pinned,
    reserved or quarantined slots, nor one of a worker that still has to unmap another: it may be stopped for good.
    """
    unmapping = {
        worker for segment in segments if segment.phase is Phase.RETIRING for worker in segment.holders
    }
    held: dict[NamespaceId, int] = {}
    candidates: list[Segment] = []
    for segment in segments:
        if segment.phase is not Phase.ASSIGNED:
            continue
        held[segment.namespace] = held.get(segment.namespace, 0) + 1
        if segment.namespace != wanted_by and _movable(segment) and not segment.holders & unmapping:
            candidates.append(segment)
    if not candidates:
        return None
    coldest = min(candidates, key=lambda segment: (not segment.empty, segment.touched_at))
    if coldest.empty or own_oldest is None or coldest.touched_at < own_oldest:
        return coldest
    part = len(segments) / max(1, namespaces)
    if held.get(wanted_by, 0) + 1 <= part:
        rich = [segment for segment in candidates if held[segment.namespace] > part]
        if rich:
            return min(rich, key=lambda segment: segment.touched_at)
    return None


def sparse(slab: SlabClass) -> Segment | None:
    """A segment whose READY slots fit into the free slots of its class's other segments that are in use: emptying it
    gives memory back to other classes and namespaces. None if there is nothing to gain."""
    if slab.free < next(iter(slab.segments.values())).capacity // 2:
        return None  # too little elsewhere, wherever it is
    in_use = [segment for segment in slab.segments.values() if not segment.empty]
    if len(in_use) < 2:
        return None
    emptiest = max(in_use, key=lambda segment: segment.counts[SlotState.FREE])
    elsewhere = sum(segment.counts[SlotState.FREE] for segment in in_use if segment is not emptiest)
    used = emptiest.counts[SlotState.READY]
    # Half a segment of slack stays, or the next save would want a segment again at once.
    if used > 0 and used + emptiest.capacity // 2 <= elsewhere and _movable(emptiest):
        return emptiest
    return None


def empty_of(pool: Pool, namespace: NamespaceId) -> Segment | None:
    """An empty segment of the namespace's own, of whatever slab class: it can change class at once."""
    own = [segment for segment in pool.empties.values() if segment.namespace == namespace]
    return min(own, key=lambda segment: segment.index, default=None)


def _movable(segment: Segment) -> bool:
    return not (segment.pinned or segment.counts[SlotState.RESERVED] or segment.counts[SlotState.QUARANTINED])
