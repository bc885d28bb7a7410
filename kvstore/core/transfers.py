"""Chunks on their way to the tier below DRAM (`ColdTier`) and back: which, when, how many at once, and how it ends.

    resident -> STORING -> STORED -> DURABLE        save-through: every committed chunk, soon after its commit
    resident and STORED -> cold                     demotion: the DRAM slots go (State.demote)
    cold -> PROMOTING -> resident                   promotion: an Acquire or a hint asked for it

A write pins its source; a read fills RESERVED slots. All effects are bounded in bytes and carry a deadline that is kept
here: a late read's targets are quarantined until the call returns, a late write's sources stay pinned until then.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import NamedTuple

from kvstore.core import events as ev
from kvstore.core.chunks import (
    DOOMED,
    KEPT,
    PROMOTING,
    QUEUED,
    STORED,
    STORING,
    TAIL,
    TRANSIENT,
)
from kvstore.core.cold_tier import ColdTier
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import Candidates
from kvstore.core.pool import Phase, Segment
from kvstore.core.rate import AtOnce
from kvstore.core.segments import Segments
from kvstore.core.state import State
from kvstore.types import (
    ChunkKey,
    DiskResult,
    DiskState,
    Millis,
    NamespaceId,
    OpId,
    Reason,
    Tier,
)

CHUNKS_PER_OP_MAX = 64
EXPLORE = 100
PUT_OFF_SHARE = 4
"""Writes wait for reads for such a part of `durable_within_ms`,"""
WAITING_SHARE = 16
"""and until what waits takes such a part of the arena."""
USED_MIN = 0.25
"""A write that is read again more seldom than this, before the SSD has been written over, is one too many,"""
SAVES_AVERAGED = 4_096
"""unless most of so many saves are no better."""
NEEDED_LAST = 1 << 62
"""The rank of what no job needs."""
ROOM_SHARE = 64
"""An SSD of which more than such a part is free has room."""
QUOTA_VICTIMS_MAX = 64
"""Chunks that go for one other of their tenant."""
LOOKED_AT_PER_STEP_MAX = 1_024
"""Entries of the queues of writes and of reads, most of which may be stale, in one step."""
READ_RETRY_MS = 100
READ_RETRY_MAX_MS = 60_000
FAILED_READS_MAX = 1_024
"""Chunks that are remembered for it; what the tier cannot read at all closes a file or turns the tier off."""
READ_ERRORS_MAX = 3
"""Failed reads in a row, after which the tier is off until a probe succeeds."""


@dataclass(slots=True)
class Write:
    rows: list[int]
    bytes: int
    deadline: Millis


@dataclass(slots=True)
class Read:
    rows: list[int]
    bytes: int
    deadline: Millis
    quarantined: list[tuple[Segment, int]] | None = None
    """The targets, once the read is late."""


class Wanted(NamedTuple):
    """A PROMOTING chunk whose read has not begun."""

    row: int
    key: ChunkKey
    bytes: int


@dataclass(frozen=True, slots=True)
class FailedRead:
    key: ChunkKey
    pause_ms: Millis
    retry_at: Millis


class Transfers:
    def __init__(self, state: State, tier: ColdTier, segments: Segments) -> None:
        self.state = state
        self._tier = tier
        self._segments = segments
        self.writes: dict[OpId, Write] = {}
        self.reads: dict[OpId, Read] = {}
        limits = state.limits
        self._writes_at_once = AtOnce(limits.disk_bytes_in_flight_max, limits.disk_deadline_ms)
        self._reads_at_once = AtOnce(limits.disk_bytes_in_flight_max, limits.disk_deadline_ms)
        self.probe: OpId | None = None
        self.scrub_deadline: Millis | None = None
        """Of the scrubber's read, while one is under way."""
        self.demanded: deque[Wanted] = deque()
        """Asked for by an Acquire, or (below) by a hint. `state.wanted_bytes` is the sum of the former."""
        self.foreseen: list[tuple[int, Wanted]] = []
        """A heap by rank, the soonest first: a chunk may be there more than once, and need not be read any more."""
        self._writes_put_off_at: Millis = -1
        """Since when writes have been waiting for reads; -1: they do not."""
        self._without_slot: list[Wanted] = []
        """Demanded chunks whose namespace waits for a segment; tried again when it has come, and with each tick."""
        self._read_errors = 0
        """In a row."""
        self._room: tuple[Millis, bool] = (-1, True)
        """Whether the SSD has some, and when that was looked up."""
        self.declined: OrderedDict[int, tuple[ChunkKey, int]] = OrderedDict()
        """Resident chunks that were not worth a write, with their hits then. They are looked at again while they are in
        DRAM: somebody may name or use them."""
        self._averaged = 0
        self._used_mean = 0.0
        """Of saves, how many are used again before the SSD has been written over."""
        self._slots_below = 0
        self._lap_slots = 0
        self._lap_began: Millis = 0
        self._lap_ms: Millis = 0
        """In which as many slots were written as the SSD has; 0: not yet."""
        self._failed_reads: dict[int, FailedRead] = {}
        """By chunk row, the one that failed last at the end."""

    def __repr__(self) -> str:
        return (
            f"Transfers({len(self.writes)} writes, {len(self.reads)} reads, "
            f"{len(self.state.to_store)} chunks to store, {self._tier})"
        )

    @property
    def present(self) -> bool:
        return self.state.disk_state is not DiskState.ABSENT

    @property
    def busy(self) -> bool:
        """Whether a read is wanted or under way, or more than one write."""
        return bool(self.reads or self.demanded or self.foreseen) or len(self.writes) > 1

    @property
    def behind(self) -> bool:
        """Whether a restart now would forget something that a healthy tier is about to remember."""
        state = self.state
        if not self._tier.persistent:
            return False
        if self._tier.health is not DiskState.OK:
            return self._tier.forgetting
        writing = self.writes or (state.to_store and not state.disk_full)
        return bool(writing) or self._tier.behind

    # ------------------------------------------------------------------------------------------------ each step

    def pump(self) -> None:
        """At the end of every step: start what may be started."""
        if not self.present:
            return
        state, tier = self.state, self._tier
        if tier.health is DiskState.OFF:
            self._give_up()
        if tier.health is DiskState.OK:
            tier.pump()
            if state.to_store and not state.disk_full:
                self._start_writes()
            state.write_at_once &= bool(state.to_store)
        tier.persist()
        if self.demanded or self.foreseen:
            self._start_reads()

    def try_again(self) -> None:
        """There may be DRAM now for what found none."""
        for wanted in self._without_slot:
            self._demand(wanted)
        self._without_slot.clear()

    def _demand(self, wanted: Wanted) -> None:
        self.demanded.append(wanted)
        self.state.wanted_bytes += wanted.bytes

    def tick(self) -> None:
        if not self.present:
            return
        state, tier = self.state, self._tier
        self.try_again()
        self._reconsider()
        state.disk_full = False
        self._trim_to_quotas()
        for op, read in self.reads.items():
            if read.quarantined is None and read.deadline <= state.now:
                self._late_read(op, read)
        late = any(read.quarantined is not None for read in self.reads.values())
        if any(write.deadline <= state.now for write in self.writes.values()):
            late = True
            tier.degrade(DiskState.OFF, "a write missed its deadline")
        if self.scrub_deadline is not None and self.scrub_deadline <= state.now:
            late = True
            tier.degrade(DiskState.OFF, "a read of the scrubber missed its deadline")
        late = tier.tick() or late
        unhealthy = tier.health is not DiskState.OK
        if unhealthy and not late and self.probe is None and tier.probe_at <= state.now:
            self.probe = state.new_op()
            tier.probe(self.probe)

    def _trim_to_quotas(self) -> None:
        """What a start found, of a tenant whose quota was made smaller."""
        state = self.state
        if not state.limits.ssd_quotas:
            return
        for tenant in state.quotas.namespaces:
            for _ in range(QUOTA_VICTIMS_MAX):
                over = state.quotas.ssd_left(tenant) < 0
                victim = self._quota_victim(tenant, copies=True) if over else None
                if victim is None:
                    break
                state.evict_copy(victim)

    def _give_up(self) -> None:
        """The tier is off: what is to be read is on it only, as before."""
        self.try_again()
        if self.demanded or self.foreseen:
            waiting = [*self.demanded, *(wanted for _, wanted in self.foreseen)]
            self.demanded.clear()
            self.state.wanted_bytes = 0
            self.foreseen.clear()
            self._not_promoted(waiting)

    # ---------------------------------------------------------------------------------------------------- writes

    def _start_writes(self) -> None:
        state = self.state
        in_flight = sum(write.bytes for write in self.writes.values())
        looked_at = 0
        if self._reads_come_first():
            return
        while state.to_store and in_flight < self._writes_at_once.bytes:
            rows: list[int] = []
            size = 0
            most = self._writes_at_once.op_bytes
            while state.to_store and len(rows) < CHUNKS_PER_OP_MAX and size < most:
                looked_at += 1
                if looked_at > LOOKED_AT_PER_STEP_MAX:
                    break
                row, key = state.to_store[0]
                storable = self._storable(row, key)
                if storable and not (self._is_worth_it(row) and self._fits_quota(row)):
                    storable = False
                    self.declined[row] = key, state.chunks.hits[row]
                if storable and not self._tier.place(row):
                    if state.disk_full:  # for this slot size at least: another may have room
                        state.to_store.rotate(-1)
                    break
                state.to_store.popleft()
                if state.is_queued(row, key):
                    state.chunks.flags[row] &= ~QUEUED
                if storable:
                    state.chunks.flags[row] |= STORING
                    state.namespace_of(row).below += 1
                    rows.append(row)
                    size += state.namespace_of(row).payload_bytes
                else:
                    state.room += 1  # nothing keeps it in DRAM any more
            if not rows:
                return
            self._write(rows, size)
            in_flight += size

    def _reads_come_first(self) -> bool:
        """Somebody waits for a read, or will soon: an SSD shares its bandwidth among all that it was asked for, and a
        write can wait where a job cannot. Not for long: what waits is lost in a power cut, and has to be in DRAM."""
        state = self.state
        if state.write_at_once or not (self.reads or self.demanded or self.foreseen) or not state.to_store:
            self._writes_put_off_at = -1
            return False
        if self._writes_put_off_at < 0:
            self._writes_put_off_at = state.now
        waited_ms = state.now - self._writes_put_off_at
        if waited_ms >= state.limits.durable_within_ms // PUT_OFF_SHARE:
            return False
        row, _ = state.to_store[0]
        if state.chunks.namespace[row] < 0:  # a stale entry
            return False
        waiting = len(state.to_store) * state.namespace_of(row).chunk_bytes
        return waiting <= state.limits.arena_bytes // WAITING_SHARE

    def _storable(self, row: int, key: ChunkKey) -> bool:
        state = self.state
        flags = state.chunks.flags[row]
        if not state.is_queued(row, key) or not state.is_hit(row) or flags & (STORED | STORING):
            return False
        return self._tier.fits(state.namespace_of(row))

    def _is_worth_it(self, row: int) -> bool:
        """A write to a full SSD is, if somebody named the chunk, or it promises more than what would go for it and is
        likely to be used before it goes itself. One of EXPLORE others is written all the same, or nobody would learn
        what it was worth."""
        state = self.state
        if self._is_named(row):
            return True
        worth = state.policy.worth_of(row)
        namespace = state.namespace_of(row)
        if worth == inf:
            return True
        if self._has_room() and state.quotas.ssd_left(namespace.tenant) >= namespace.ssd_chunk_bytes:
            return True
        if (
            not state.chunks.flags[row] & TAIL
            and worth > state.policy.least_worth(namespace.ssd)
            and self._is_likely_used(row)
        ):
            return True
        state.counters["chunks_not_stored"] += 1
        return state.counters["chunks_not_stored"] % EXPLORE == 0

    def _fits_quota(self, row: int) -> bool:
        """Whether its tenant may have one more chunk on SSD. Others of its own go for it; they are looked for in a
        bounded time, so a quota that was made smaller is reached in several steps."""
        state = self.state
        namespace = state.namespace_of(row)
        tenant, size = namespace.tenant, namespace.ssd_chunk_bytes
        quota = state.quotas.of(Tier.SSD, tenant)
        for _ in range(QUOTA_VICTIMS_MAX if size <= quota else 0):
            if state.quotas.ssd_left(tenant) >= size:
                return True
            victim = self._quota_victim(tenant, copies=state.write_at_once)
            if victim is None:
                break
            state.evict_copy(victim)
        state.counters["ssd_quota_refusals"] += 1
        self._tier.refused(
            namespace, state.chunks.key[row], f"its tenant's quota of {quota} bytes (ssd_quotas) is in use"
        )
        return False

    def _quota_victim(self, tenant: str, *, copies: bool) -> int | None:
        """Whose copy on SSD goes for another one of the tenant: of what is there alone the next. With `copies` also
        what is in DRAM too: not for any save, or what is used in DRAM would be written again and again."""
        state = self.state
        cold = self._cold_of(tenant)
        for row in state.policy.unneeded(*cold):
            return row
        if copies:
            flags = state.chunks.flags
            stored = [
                row
                for namespace in state.quotas.namespaces[tenant]
                for row in state.policy.victims(namespace.dram, QUOTA_VICTIMS_MAX)
                if flags[row] & (STORED | STORING | PROMOTING) == STORED
            ]
            if stored:  # the last to leave DRAM needs its copy last
                return stored[-1]
        return next(state.policy.needed(*cold, limit=1), None)

    def _cold_of(self, tenant: str) -> list[Candidates]:
        mine = self.state.quotas.namespaces[tenant]
        return list({id(namespace.ssd): namespace.ssd for namespace in mine}.values())

    def _may_fit_quota(self, row: int) -> bool:
        namespace = self.state.namespace_of(row)
        if self.state.quotas.ssd_left(namespace.tenant) >= namespace.ssd_chunk_bytes:
            return True
        return any(candidates.count for candidates in self._cold_of(namespace.tenant))

    def _is_named(self, row: int) -> bool:
        state = self.state
        kept = state.chunks.flags[row] & (KEPT | TRANSIENT)
        return bool(kept or state.chunks.refs[row] or row in state.policy.rank)

    def _is_likely_used(self, row: int) -> bool:
        """Before as much is written as the SSD holds: more likely than USED_MIN, or than the mean of all saves."""
        if not self._lap_ms:
            return True
        chance = self.state.policy.used_within(row, self._lap_ms)
        self._averaged = min(SAVES_AVERAGED, self._averaged + 1)
        self._used_mean += (chance - self._used_mean) / self._averaged
        return chance >= min(USED_MIN, self._used_mean)

    def _note_written(self, slots: int) -> None:
        """Measures how long the SSD holds what is written."""
        self._lap_slots += slots
        if self._lap_slots >= self._slots_below > 0:
            self._lap_ms = max(1, self.state.now - self._lap_began)
            self._lap_slots, self._lap_began = 0, self.state.now

    def _reconsider(self) -> None:
        """What was declined and is in DRAM still."""
        state = self.state
        for _ in range(min(len(self.declined), LOOKED_AT_PER_STEP_MAX)):
            row, (key, hits) = self.declined.popitem(last=False)
            flags = state.chunks.flags[row]
            if state.chunks.key[row] != key or flags & (STORED | STORING | QUEUED) or not state.is_hit(row):
                continue
            now = state.chunks.hits[row]
            if not self._may_fit_quota(row):
                self.declined[row] = key, hits
            elif self._is_named(row) or (now != hits and self._is_worth_it(row)):
                state.store_later(row)
            else:
                self.declined[row] = key, now

    def _has_room(self) -> bool:
        """The SSD, without dropping anything."""
        if self._room[0] == self.state.now:
            return self._room[1]
        pool = self.state.ssd_slots
        free = sum(slab.free for slab in pool.classes.values())
        slots = sum(segment.capacity for segment in pool.segments)
        self._slots_below = slots
        unused = pool.idle or any(segment.phase is Phase.ABSENT for segment in pool.segments)
        self._room = self.state.now, bool(unused) or free * ROOM_SHARE > slots
        return self._room[1]

    def _write(self, rows: list[int], size: int) -> None:
        state = self.state
        op = state.new_op()
        for row in rows:
            state.pin(state.namespace_of(row), row)
        self.writes[op] = Write(rows, size, state.now + state.limits.disk_deadline_ms)
        self._tier.write(op, rows)

    def _took_ms(self, deadline: Millis) -> Millis:
        return self.state.now - deadline + self.state.limits.disk_deadline_ms

    def _written(self, op: OpId, results: Sequence[DiskResult], why: str) -> None:
        state = self.state
        chunks = state.chunks
        under_way = sum(write.bytes for write in self.writes.values())
        write = self.writes.pop(op)
        self._writes_at_once.ended(
            self._took_ms(write.deadline), under_way, failed=DiskResult.OK not in results
        )
        at = 0
        worst = DiskResult.OK
        for row in write.rows:
            namespace = state.namespace_of(row)
            mine = results[at : at + namespace.shards]
            at += namespace.shards
            chunks.flags[row] &= ~STORING
            if all(result is DiskResult.OK for result in mine):
                self._tier.stored(row)
                self._note_written(namespace.shards)
                chunks.flags[row] |= STORED
                state.counters["chunks_stored"] += 1
            else:
                worst = max(worst, *mine)
                self._tier.not_stored(row, mine)
                namespace.below -= 1
                state.store_later(row)
        for namespace_id, group in groupby(write.rows, chunks.namespace.__getitem__):
            state.unpin(state.namespaces[NamespaceId(namespace_id)], list(group), used=False)
        state.drop_transient(write.rows)
        state.counters["ssd_bytes_written"] += write.bytes
        if worst is not DiskResult.OK:
            state.counters["ssd_write_errors"] += 1
            self._tier.degrade(DiskState.READ_ONLY, why)

    # ------------------------------------------------------------------------------------------------------ reads

    def promote(self, row: int, *, demanded: bool) -> None:
        """Begin to bring a cold chunk back to DRAM; `settle` tells whoever waits how it ends. Ahead of need it is not
        tried again, once it failed, before that may end otherwise."""
        state = self.state
        chunks = state.chunks
        if chunks.flags[row] & PROMOTING:
            if demanded and row in state.prefetched:
                state.prefetched.discard(row)
                state.policy.used((row,))
                chunks.used_at[row] = state.now
                state.counters["prefetch_late"] += 1
                if not chunks.reserved[row]:
                    self._demand(self._wanted(row))
            return
        if not demanded and not self._may_promote(row):
            return
        state.policy.remove(state.namespace_of(row).ssd, row)
        chunks.flags[row] |= PROMOTING
        if demanded:
            state.policy.used((row,))
            chunks.used_at[row] = state.now
            self._demand(self._wanted(row))
        else:
            state.prefetched.add(row)
            self._foresee(row)

    def needed_sooner(self, rows: Iterable[int]) -> None:
        """The ranks of these changed: what waits for its read ahead of need waits no longer than what comes later."""
        state = self.state
        for row in state.prefetched.intersection(rows):
            if state.chunks.flags[row] & PROMOTING and not state.chunks.reserved[row]:
                self._foresee(row)

    def _foresee(self, row: int) -> None:
        heapq.heappush(self.foreseen, (self.state.policy.rank.get(row, NEEDED_LAST), self._wanted(row)))

    def _wanted(self, row: int) -> Wanted:
        return Wanted(row, self.state.chunks.key[row], self.state.namespace_of(row).payload_bytes)

    def _start_reads(self) -> None:
        state = self.state
        in_flight = sum(read.bytes for read in self.reads.values())
        looked_at = 0
        without: list[Wanted] = []
        while (self.demanded or self.foreseen) and in_flight < self._reads_at_once.bytes:
            rows: list[int] = []
            size = 0
            most = self._reads_at_once.op_bytes
            while (self.demanded or self.foreseen) and len(rows) < CHUNKS_PER_OP_MAX and size < most:
                looked_at += 1
                if looked_at > LOOKED_AT_PER_STEP_MAX:
                    break
                demanded = bool(self.demanded)
                wanted = self.demanded.popleft() if demanded else heapq.heappop(self.foreseen)[1]
                row, key, _ = wanted
                if demanded:
                    state.wanted_bytes -= wanted.bytes
                if (
                    state.chunks.key[row] != key
                    or not state.chunks.flags[row] & PROMOTING
                    or state.chunks.reserved[row]
                    or not (demanded or row in state.prefetched)  # an Acquire has asked for it since
                ):
                    continue
                doomed = state.chunks.flags[row] & DOOMED
                if doomed or not self.reserve_slots(row, demanded=demanded):
                    if demanded and not doomed and self._may_wait(row):
                        self._without_slot.append(wanted)
                    else:
                        without.append(wanted)
                    continue
                rows.append(row)
                size += state.namespace_of(row).payload_bytes
            if rows:
                self._read(rows, size)
                in_flight += size
            if looked_at > LOOKED_AT_PER_STEP_MAX:
                break
        self._not_promoted(without)

    def reserve_slots(self, row: int, *, demanded: bool) -> bool:
        """DRAM slots for a chunk that is to be read from the tier below, or from beyond this node. A prefetch takes
        none from what an earlier job needs. When it finds none, those behind it in its namespace find none either: they
        may take them from fewer chunks."""
        state = self.state
        namespace = state.namespace_of(row)
        if not demanded and self._has_no_slot(namespace):
            state.counters["promotions_without_slot"] += 1
            return False
        sooner_than = -1 if demanded else state.policy.job_end(row)
        for shard in range(namespace.shards):
            taken = self._segments.allocate(namespace, namespace.slot_bytes[shard], row, sooner_than)
            if taken is None:
                room = state.room
                for placed in range(shard):
                    state.free_slot(*state.unplace_shard(row, placed))
                state.room = room  # that they are free again is no news
                state.counters["promotions_without_slot"] += 1
                if not demanded:
                    namespace.no_slot_at = state.room
                    namespace.no_slot_until = self._segments.next_chance(namespace)
                return False
            state.place_shard(row, shard, *taken)
        return True

    def _has_no_slot(self, namespace: Namespace) -> bool:
        """Whether a promotion ahead of need found none, and nothing happened since that may give it one."""
        if namespace.no_slot_at != self.state.room or namespace.no_slot_until <= self.state.now:
            namespace.no_slot_at = -1
        return namespace.no_slot_at != -1

    def _may_promote(self, row: int) -> bool:
        """Ahead of need."""
        state = self.state
        failed = self._failed_reads.get(row)
        if failed is not None and failed.key != state.chunks.key[row]:
            del self._failed_reads[row]
        elif failed is not None and state.now < failed.retry_at:
            return False
        return not self._has_no_slot(state.namespace_of(row))

    def _note_failed(self, row: int) -> None:
        """The disk could not read a chunk: ahead of need it is read again after a while, twice as long each time."""
        key = self.state.chunks.key[row]
        before = self._failed_reads.pop(row, None)
        pause_ms = READ_RETRY_MS
        if before is not None and before.key == key:
            pause_ms = min(2 * before.pause_ms, READ_RETRY_MAX_MS)
        self._failed_reads[row] = FailedRead(key, pause_ms, self.state.now + pause_ms)
        if len(self._failed_reads) > FAILED_READS_MAX:
            del self._failed_reads[next(iter(self._failed_reads))]

    def _may_wait(self, row: int) -> bool:
        """Somebody still waits for the chunk, and memory is on its way."""
        coming = self._segments.creating or self.state.namespace_of(row).in_flight
        return bool(coming) and row in self.state.waits

    def _not_promoted(self, entries: Sequence[Wanted]) -> None:
        state = self.state
        chunks = state.chunks
        rows = [
            row
            for row, key, _ in dict.fromkeys(entries)
            if chunks.key[row] == key and chunks.flags[row] & PROMOTING and not chunks.reserved[row]
        ]
        state.prefetched.difference_update(rows)
        state.make_cold(rows)

    def _read(self, rows: list[int], size: int) -> None:
        op = self.state.new_op()
        self.reads[op] = Read(rows, size, self.state.now + self.state.limits.disk_deadline_ms)
        self.state.reading_bytes += size
        self.state.read_rate.begin(self.state.now)
        self._tier.read(op, rows)

    def _has_read(self, op: OpId, results: Sequence[DiskResult], whys: Sequence[str]) -> None:
        state = self.state
        chunks = state.chunks
        under_way = sum(read.bytes for read in self.reads.values())
        read = self.reads.pop(op)
        self._reads_at_once.ended(
            self._took_ms(read.deadline), under_way, failed=DiskResult.OK not in results
        )
        if read.quarantined is not None:
            for segment, slot in read.quarantined:
                state.free_slot(segment, slot)
            return
        came = 0
        promoted: list[int] = []
        failed: list[int] = []
        at = 0
        for row in read.rows:
            namespace = state.namespace_of(row)
            mine = results[at : at + namespace.shards]
            why = next(filter(None, whys[at : at + namespace.shards]), "")
            at += namespace.shards
            if all(result is DiskResult.OK for result in mine) and not chunks.flags[row] & DOOMED:
                came += namespace.payload_bytes
                self._read_errors = 0
                self._tier.reads_recover()
                how = "ahead" if row in state.prefetched else "on_demand"
                for shard in range(namespace.shards):
                    checksum = chunks.shard_checksum[chunks.shard0[row] + shard]
                    if state.mark_shard_ready(namespace, row, shard, checksum):
                        promoted.append(row)
                if row not in state.prefetched:
                    state.demanded.add(row)
                state.counters[f"chunks_promoted_{how}"] += 1
                continue
            self._drop_targets(row)
            if DiskResult.REUSED in mine:
                state.counters["chunks_reused"] += 1
                chunks.flags[row] &= ~PROMOTING
                state.to_ghost(row, Reason.EVICTED)
                continue
            if DiskResult.CORRUPT in mine:
                state.found_corrupt(row, Tier.SSD, why)
                chunks.flags[row] &= ~PROMOTING
                state.to_ghost(row, Reason.CORRUPT)
                continue
            if not chunks.flags[row] & DOOMED:
                state.counters["ssd_read_errors"] += 1
                if self._tier.is_lost(row, mine):
                    state.counters["chunks_unreadable"] += 1
                    chunks.flags[row] &= ~PROMOTING
                    state.to_ghost(row, Reason.LOST)
                    continue
                self._read_errors += 1
                self._note_failed(row)
            failed.append(row)
        self._no_longer_reading(read, came)
        state.prefetched.difference_update(failed)
        state.make_cold(failed)
        state.arrived(promoted)
        state.counters["ssd_bytes_read"] += read.bytes
        if self._read_errors >= READ_ERRORS_MAX:
            self._tier.reads_fail()
            self._tier.degrade(DiskState.OFF, "reads fail")

    def _no_longer_reading(self, read: Read, came: int) -> None:
        state = self.state
        state.reading_bytes -= read.bytes
        more = any(other.quarantined is None for other in self.reads.values() if other is not read)
        state.read_rate.end(came, state.now, more=more)

    def _drop_targets(self, row: int) -> None:
        state = self.state
        for shard in range(state.namespace_of(row).shards):
            state.free_slot(*state.unplace_shard(row, shard))

    def _late_read(self, op: OpId, read: Read) -> None:
        """Nobody waits for it any longer; its targets stay out of use until the call has returned."""
        state = self.state
        read.quarantined = []
        self._reads_at_once.is_late()
        self._no_longer_reading(read, 0)
        for row in read.rows:
            for shard in range(state.namespace_of(row).shards):
                segment, slot = state.unplace_shard(row, shard)
                state.quarantine_slot(segment, slot)
                read.quarantined.append((segment, slot))
        state.prefetched.difference_update(read.rows)
        state.make_cold(read.rows)
        state.counters["ssd_reads_late"] += 1
        self._tier.degrade(DiskState.OFF, "a read missed its deadline")

    # ----------------------------------------------------------------------------------------------------- answers

    def ended(self, event: ev.DiskDone) -> None:
        """An op of the tier has returned."""
        if event.op in self.writes:
            self._written(event.op, event.results, event.why)
        elif event.op in self.reads:
            self._has_read(event.op, event.results, event.whys)
        elif event.op != self.probe:
            self._tier.ended(event)
        else:
            self.probe = None
            if event.results[0] is DiskResult.OK:
                self._tier.heal()
                self._failed_reads.clear()
                self._read_errors = 0
            else:
                self._tier.probe_at = self.state.now + self.state.limits.probe_interval_ms
