"""Where slots come from: free ones, segments that change hands, evicted chunks, revoked leases; and compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvstore.core import events as ev
from kvstore.core import planner
from kvstore.core.bulk import batch
from kvstore.core.chunks import QUEUED, STORED
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase, Segment, SlabClass
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.types import ChunkKey, Extent, Millis, NamespaceId, OpId, Reason, SegmentId, SlotState, Tier

DONOR_SEARCH_MS = 100
"""After a fruitless look through all segments, how long a namespace waits before the next."""
RETIRE_PATIENCE_MS = 1_000
"""How long a namespace waits for workers to unmap a retired segment before it asks for one that others hold."""
CREATE_RETRY_MS = 1_000
NEVER: Millis = 1 << 62
PASSED_OVER_FROM, PASSED_OVER_MAX = 32, 512
"""So many chunks that have to stay may stand before the next victim; more are passed over, and so many looked at."""
MOVES_PER_OP_MAX = 64
MOVE_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Move:
    """Chunks whose shard in one segment is being copied to another slot; pinned meanwhile."""

    rows: list[int]
    shards: list[int]
    targets: list[tuple[Segment, int]]


class Segments:
    def __init__(self, state: State, revoke: Callable[[Namespace], bool]) -> None:
        self.state = state
        self._revoke = revoke
        self.creating: dict[OpId, Segment] = {}
        self.moves: dict[OpId, Move] = {}
        self.retries: list[tuple[Millis, Segment]] = []
        self.used_last: tuple[Namespace, int] | None = None
        """The slab class of which slots were taken since `evict_ahead` last looked: its namespace and slot size."""

    # ------------------------------------------------------------------------------------------- coming and going

    def create(self, segment: Segment) -> None:
        op = self.state.new_op()
        self.creating[op] = segment
        pool = self.state.pool
        self.state.effects.append(ev.CreateSegment(op, segment.id, pool.segment_bytes, pool.cells))

    def created(self, op: OpId) -> None:
        segment = self.creating.pop(op)
        self.state.pool.created(segment)
        self.state.room += 1
        self._arrived(segment)

    def create_failed(self, op: OpId) -> None:
        """No memory now: try again later; the arena is smaller meanwhile."""
        segment = self.creating.pop(op)
        self.state.counters["segment_create_failures"] += 1
        self._arrived(segment)
        self.retries.append((self.state.now + CREATE_RETRY_MS, segment))

    def _arrived(self, segment: Segment) -> None:
        namespace = self.state.namespaces.get(segment.wanted_by)
        if namespace is not None:
            namespace.in_flight -= 1
        segment.wanted_by = NamespaceId(-1)

    def want(self, worker: Worker, event: ev.WantSegments) -> ev.SegmentsAllowed:
        """Which of these the worker may map: those of namespaces that it opened (invariant 9)."""
        allowed: list[SegmentId] = []
        for segment_id in dict.fromkeys(event.segments):
            segment = self.state.pool.by_id.get(segment_id)
            if segment is not None and segment.phase is Phase.ASSIGNED and segment.namespace in worker.opened:
                segment.holders.add(worker.id)
                worker.holds.add(segment_id)
                allowed.append(segment_id)
        return ev.SegmentsAllowed(tuple(allowed))

    def unmapped(self, worker: Worker, segments: Sequence[SegmentId]) -> None:
        for segment_id in segments:
            segment = self.state.pool.by_id.get(segment_id)
            worker.holds.discard(segment_id)
            if segment is not None:
                segment.holders.discard(worker.id)
                self._replace_if_unmapped(segment)

    def _retire(self, segment: Segment, wanted_by: Namespace) -> None:
        state = self.state
        state.pool.retire(segment, wanted_by.id)
        wanted_by.in_flight_since = state.now
        wanted_by.in_flight += 1
        state.counters["segments_retired"] += 1
        for holder in sorted(segment.holders):
            state.effects.append(ev.SegmentsRetired(holder, (segment.id,)))
        self._replace_if_unmapped(segment)

    def _replace_if_unmapped(self, segment: Segment) -> None:
        if segment.phase is Phase.RETIRING and not segment.holders:
            self.state.effects.append(ev.DestroySegment(segment.id))
            self.create(self.state.pool.replace(segment))

    def _assign(self, segment: Segment, namespace: Namespace, slot_bytes: int) -> None:
        state = self.state
        state.pool.assign(segment, namespace.id, slot_bytes)
        segment.touched_at = state.now
        state.bump(segment, range(segment.capacity))
        state.effects.append(ev.AssignSegment(segment.id, namespace.id))

    # -------------------------------------------------------------------------------------------------- allocation

    def allocate(
        self, namespace: Namespace, slot_bytes: int, row: int, sooner_than: int = -1
    ) -> tuple[Segment, int] | None:
        """A RESERVED slot for chunk row `row`, or None (the save is dropped, or tried again). A tenant at its quota
        gives way to itself first.

        free slot of the class -> idle segment -> empty segment of the namespace's own
          -> another namespace's segment, if that is no worse than evicting our own oldest (it comes later)
          -> our own oldest chunk -> an expired lease of ours
        """
        pool = self.state.pool
        if not self._fits_quota(namespace, slot_bytes, sooner_than):
            return None
        self.used_last = namespace, slot_bytes
        taken = self._take(namespace, slot_bytes, row)
        if taken is not None:
            self.ask_if_short(namespace, pool.classes[namespace.id, slot_bytes])
            return taken
        idle = next(iter(pool.idle.values()), None) or planner.empty_of(pool, namespace.id)
        if idle is not None:
            self._assign(idle, namespace, slot_bytes)
            return self._take(namespace, slot_bytes, row)
        self._ask_for_more(namespace)
        if self._waits_for_segment(namespace):
            return None
        while self._evict_one(namespace, sooner_than):
            taken = self._take(namespace, slot_bytes, row)
            if taken is not None:
                return taken
            # What was evicted may have been the last chunk of another slab class's segment.
            empty = planner.empty_of(pool, namespace.id)
            if empty is not None:
                self._assign(empty, namespace, slot_bytes)
        return None

    def with_free(self, namespace: Namespace, slot_bytes: int, count: int) -> SlabClass | None:
        """The class, if it has `count` free slots without anything being evicted; an idle segment may become its."""
        pool = self.state.pool
        if self.state.quotas.dram_left(namespace.tenant) < count * slot_bytes:
            return None
        self.used_last = namespace, slot_bytes
        slab = pool.classes.get((namespace.id, slot_bytes))
        if slab is None or slab.free < count:
            idle = next(iter(pool.idle.values()), None) or planner.empty_of(pool, namespace.id)
            if idle is None:
                return None
            self._assign(idle, namespace, slot_bytes)
            slab = pool.classes[namespace.id, slot_bytes]
        return slab if slab.free >= count else None

    def _fits_quota(self, namespace: Namespace, slot_bytes: int, sooner_than: int) -> bool:
        """Whether the tenant may have one more slot. Chunks of its own go for it, first of the namespace whose next
        victim was used longest ago."""
        quotas, policy = self.state.quotas, self.state.policy
        while quotas.dram_left(namespace.tenant) < slot_bytes:
            oldest = [(policy.oldest_use(mine.dram), mine) for mine in quotas.namespaces[namespace.tenant]]
            oldest.sort(key=lambda one: NEVER if one[0] is None else one[0])
            if not any(self._evict_one(mine, sooner_than) for _, mine in oldest):
                if sooner_than < 0:
                    self.state.counters["dram_quota_refusals"] += 1
                return False
        return True

    def take_over(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> list[int]:
        """Where nothing is free: rows for the first of these new keys, in the slots of the oldest chunks. None where
        `allocate` has to look at them one by one, or where it would wait for a segment."""
        state = self.state
        if namespace.shards > 1:
            return []
        if self.may_ask(namespace) or self._waits_for_segment(namespace):
            return []
        victims, stored = self._next_victims(namespace, len(keys))
        if len(victims) < min(len(keys), state.limits.evict_min):
            return []
        return batch.take_over(state, namespace, keys[: len(victims)], victims, stored=stored)

    def evict_ahead(self) -> None:
        """Free some slots of the slab class that was used last before somebody waits for them: those of the chunks that
        `allocate` would evict next, as far as no queued job needs them and nobody who asked for them is about to use
        them.

        None while there is an idle segment, or one may come from another namespace; nor where a chunk's shards differ
        in size.
        """
        state = self.state
        if self.used_last is None or not self.is_short():
            return
        (namespace, slot_bytes), self.used_last = self.used_last, None
        if len(set(namespace.slot_bytes)) > 1:
            return
        if namespace.in_flight or self.may_ask(namespace):
            return
        slab = state.pool.classes[namespace.id, slot_bytes]
        victims, stored = self._next_victims(namespace, (self._ahead(slab) - slab.free) // namespace.shards)
        victims = list(takewhile(lambda row: row not in state.demanded, victims))
        if len(victims) >= state.limits.evict_min:
            batch.leave_dram(state, namespace, victims, stored=stored)
        else:
            for row in victims:
                self._leave_dram(row)

    def is_short(self) -> bool:
        """Whether `evict_ahead` may find something to do: slots were taken, and of those that it sees to less than half
        are left."""
        if self.used_last is None:
            return False
        namespace, slot_bytes = self.used_last
        pool = self.state.pool
        slab = pool.classes.get((namespace.id, slot_bytes))
        if slab is None or pool.idle or 2 * slab.free >= self._ahead(slab):
            self.used_last = None
            return False
        return True

    def _ahead(self, slab: SlabClass) -> int:
        """How many slots of a class are kept free. At most a quarter of a segment: else one might be emptied for it."""
        limits = self.state.limits
        in_segment = self.state.pool.slots_of(slab.slot_bytes)
        in_all = in_segment * len(slab.segments)
        return min(limits.ahead_slots_max, int(in_all * limits.ahead_share_max), in_segment // 4)

    def _next_victims(self, namespace: Namespace, count: int) -> tuple[list[int], bool]:
        """The chunks that go next, of those that no queued job needs, as far as all of them are on SSD (then True), or
        none is and none is about to be written there."""
        state = self.state
        flags = state.chunks.flags
        stored = False
        victims: list[int] = []
        for row in islice(state.policy.unneeded(namespace.dram), max(0, count)):
            if not victims:
                stored = bool(flags[row] & STORED)
            if bool(flags[row] & STORED) != stored or (state.storing and not stored and flags[row] & QUEUED):
                break
            if state.policy.is_awaited(row):
                break
            victims.append(row)
        return victims, stored

    def _waits_for_segment(self, namespace: Namespace) -> bool:
        passed = self.state.now - namespace.in_flight_since
        return bool(namespace.in_flight) and passed < self.state.limits.retire_grace_ms

    def until_short(self, slab: SlabClass) -> int:
        """How many slots may be taken before more should be asked for; at least one."""
        pool = self.state.pool
        return slab.free if pool.idle else max(1, slab.free - pool.slots_of(slab.slot_bytes) // 4)

    def ask_if_short(self, namespace: Namespace, slab: SlabClass) -> bool:
        """Slots were taken: some should always be left."""
        pool = self.state.pool
        short = not pool.idle and slab.free <= pool.slots_of(slab.slot_bytes) // 4
        if short:
            self._ask_for_more(namespace)
        return short

    def _take(self, namespace: Namespace, slot_bytes: int, row: int) -> tuple[Segment, int] | None:
        slab = self.state.pool.classes.get((namespace.id, slot_bytes))
        return None if slab is None else self.state.pool.take(slab, row)

    def _evict_one(self, namespace: Namespace, sooner_than: int) -> bool:
        """Free the DRAM slots of one chunk: demoted if it is on SSD; dropped if it is not going to be; and rather left
        alone, for the save in hand to be tried again, if its write to SSD is about to come. What somebody asked for and
        is about to take goes last, and for a prefetch (`sooner_than`) not at all: what a turn waits for would push each
        other out."""
        state, policy = self.state, self.state.policy
        while True:
            if namespace.no_victim_at != (state.room, state.now):
                awaited: list[int] = []
                if self._evict_unneeded(namespace, sooner_than, awaited):
                    return True
                for row in policy.needed(namespace.dram, limit=PASSED_OVER_MAX, sooner_than=sooner_than):
                    if self._is_asked_for(row, sooner_than):
                        awaited.append(row)
                    elif self._leave_dram(row):
                        return True
                if sooner_than < 0:
                    if any(map(self._leave_dram, awaited)):
                        return True
                    namespace.no_victim_at = state.room, state.now
            if not self._revoke(namespace):
                return False

    def _evict_unneeded(self, namespace: Namespace, sooner_than: int, awaited: list[int]) -> bool:
        """Free one of those that no queued job needs and nobody waits for (such join `awaited`). Many that have to stay
        are passed over, else each eviction would look at all of them again."""
        policy = self.state.policy
        staying: list[int] = []
        found = False
        for row in islice(policy.unneeded(namespace.dram), PASSED_OVER_MAX):
            if self._is_asked_for(row, sooner_than):
                awaited.append(row)
            elif self._leave_dram(row):
                found = True
                break
            staying.append(row)
        if len(staying) > PASSED_OVER_FROM and (found or len(staying) == PASSED_OVER_MAX):
            for row in staying:
                policy.pass_over(namespace.dram, row)
        return found

    def _is_asked_for(self, row: int, sooner_than: int) -> bool:
        """Whether somebody is about to take it; a prefetch leaves it alone for as long as nobody did."""
        state = self.state
        return row in state.demanded and (sooner_than >= 0 or state.policy.is_awaited(row))

    def _leave_dram(self, row: int) -> bool:
        state = self.state
        if self._has_to_stay(row):
            return False
        if state.chunks.flags[row] & STORED:
            state.demote(row)
        else:
            state.to_ghost(row, Reason.EVICTED)
            state.counters["chunks_evicted"] += 1
        return True

    def _has_to_stay(self, row: int) -> bool:
        """Its write to SSD is about to come."""
        state = self.state
        return state.storing and state.chunks.flags[row] & (STORED | QUEUED) == QUEUED

    def _ask_for_more(self, namespace: Namespace) -> None:
        """Start taking another namespace's segment, if there is one that should go; one at a time."""
        state = self.state
        if not self.may_ask(namespace):
            return
        own_oldest = state.policy.oldest_use(namespace.dram)
        with_segments = {s.namespace for s in state.pool.segments if s.phase is Phase.ASSIGNED} | {
            namespace.id
        }
        donor = planner.donor(state.pool.segments, namespace.id, own_oldest, len(with_segments))
        if donor is None:
            donor = self._revoked_donor(namespace)
        if donor is None or not self._empty(donor):
            namespace.donor_search_at = state.now + DONOR_SEARCH_MS
            return
        self._retire(donor, namespace)

    def next_chance(self, namespace: Namespace) -> Millis:
        """`allocate` just found nothing for a prefetch. When it may find something though nothing happens until then
        but that time passes (what happens counts in `State.room`)."""
        state = self.state
        times = [
            lease.expires_at + state.limits.revoke_grace_ms
            for lease in (next(iter(waiting.values())) for waiting in state.leases.expired.values())
        ]
        others = any(owner != namespace.id for owner, _ in state.pool.classes)
        if others and namespace.donor_search_at < state.now + DONOR_SEARCH_MS:  # nobody has looked just now
            times.append(namespace.donor_search_at)
        if namespace.in_flight:
            since = namespace.in_flight_since
            times += [since + state.limits.retire_grace_ms, since + RETIRE_PATIENCE_MS]
        return min((time for time in times if time > state.now), default=NEVER)

    def may_ask(self, namespace: Namespace) -> bool:
        if self.state.now < namespace.donor_search_at:
            return False
        return not namespace.in_flight or self._held_up(namespace)

    def _held_up(self, namespace: Namespace) -> bool:
        """All segments on their way to it wait for workers that do not unmap them (stopped, or hostile)."""
        state = self.state
        if state.now - namespace.in_flight_since < RETIRE_PATIENCE_MS:
            return False
        segments = state.pool.segments
        held = sum(s.phase is Phase.RETIRING and s.wanted_by == namespace.id for s in segments)
        return held == namespace.in_flight

    def _revoked_donor(self, namespace: Namespace) -> Segment | None:
        """While `namespace` has nothing at all: expired leases of others give way."""
        state = self.state
        if any(key[0] == namespace.id and slab.segments for key, slab in state.pool.classes.items()):
            return None
        for other_id in list(state.leases.expired):
            while self._revoke(state.namespaces[other_id]):
                found = planner.donor(state.pool.segments, namespace.id, None, 1)
                if found is not None:
                    return found
        return None

    def _empty(self, segment: Segment) -> bool:
        """Evict every chunk of an unpinned segment, least recently used first and the ends of chains before their
        beginnings; False, and nothing happened, if one has to stay."""
        state = self.state
        flags, rank = state.chunks.flags, state.policy.rank
        owners = (row for slot, row in enumerate(segment.owner) if segment.state[slot] == SlotState.READY)
        rows = list(dict.fromkeys(owners))
        if any(map(state.chunks.reserved.__getitem__, rows)) or any(map(self._has_to_stay, rows)):
            return False
        rows.reverse()  # as they were filled, the end of a chain is behind its beginning
        rows.sort(key=state.chunks.used_at.__getitem__)
        for wanted in (STORED, 0):
            mine = [row for row in rows if flags[row] & STORED == wanted]
            ends = [row for row in mine if row in rank or not state.is_resident(row)]
            many = [row for row in mine if row not in rank and state.is_resident(row)]
            if len(many) >= state.limits.evict_min:
                batch.leave_dram(state, state.namespace_of(many[0]), many, stored=bool(wanted))
            else:
                ends = many + ends
            for row in ends:
                self._leave_dram(row)
        return True

    # -------------------------------------------------------------------------------------------------- compaction

    def tick(self) -> None:
        state = self.state
        due = [segment for at, segment in self.retries if at <= state.now]
        if due:
            self.retries = [(at, segment) for at, segment in self.retries if at > state.now]
            for segment in due:
                self.create(segment)
        if not self.moves and not state.pool.idle:
            for slab in list(state.pool.classes.values()):
                segment_or_none = planner.sparse(slab)
                if segment_or_none is not None:
                    self._move_out(segment_or_none)
                    break

    def _move_out(self, segment: Segment) -> None:
        """Copy some of a sparse segment's chunks into its class's other segments; on later ticks the rest."""
        state = self.state
        chunks = state.chunks
        slab = state.pool.classes[segment.namespace, segment.slot_bytes]
        namespace = state.namespaces[segment.namespace]
        lengths = namespace.shard_bytes
        move = Move([], [], [])
        sources: list[Extent] = []
        targets: list[Extent] = []
        budget = min(MOVES_PER_OP_MAX, max(1, MOVE_BYTES_MAX // segment.slot_bytes))
        for slot, row in enumerate(segment.owner):
            if len(sources) >= budget:
                break
            if segment.state[slot] != SlotState.READY or not state.is_hit(row):
                continue
            taken = state.pool.take(slab, row, avoid=segment.index)
            if taken is None:
                break
            shard = next(
                number
                for number in range(namespace.shards)
                if chunks.shard_segment[chunks.shard0[row] + number] == segment.index
                and chunks.shard_slot[chunks.shard0[row] + number] == slot
            )
            state.pin(namespace, row)
            move.rows.append(row)
            move.shards.append(shard)
            move.targets.append(taken)
            sources.append(state.extent(row, shard, lengths[shard]))
            target, target_slot = taken
            targets.append(
                Extent(
                    target.id,
                    target_slot * target.slot_bytes,
                    lengths[shard],
                    target_slot,
                    target.generation[target_slot],
                )
            )
        if sources:
            op = state.new_op()
            self.moves[op] = move
            state.effects.append(ev.MoveSlots(op, tuple(sources), tuple(targets)))

    def moved(self, op: OpId, checksums: Sequence[int] | None) -> None:
        """Switch each chunk to its new slot, unless the copy differs, or somebody reads the old one meanwhile."""
        state = self.state
        chunks = state.chunks
        move = self.moves.pop(op)
        namespace = state.namespace_of(move.rows[0])
        for index, (row, shard, (target, slot)) in enumerate(
            zip(move.rows, move.shards, move.targets, strict=True)
        ):
            place = chunks.shard0[row] + shard
            checksum = chunks.shard_checksum[place]
            state.unpin(namespace, (row,), used=False)
            good = checksums is not None and checksums[index] == checksum
            if checksums is not None and not good:
                state.found_corrupt(row, Tier.DRAM, "a copy of its bytes does not match their checksum")
                state.doom(row, Reason.CORRUPT)
            if not good or chunks.pins[row] or not state.is_hit(row):
                state.free_slot(target, slot)
                continue
            old, old_slot = state.unplace_shard(row, shard)
            state.free_slot(old, old_slot)
            state.place_shard(row, shard, target, slot)
            state.pool.mark_ready(target, slot)
            target.touched_at = max(target.touched_at, old.touched_at)
            chunks.shard_checksum[place] = checksum
            chunks.shard_ready[place] = 1
            chunks.reserved[row] -= 1
            chunks.ready[row] += 1
            state.note(row)
            state.counters["chunks_moved"] += 1
