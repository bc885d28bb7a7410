"""The SSD as a `ColdTier`: slots of slab files (`slabs.py`), and an index of what is in them (`durability.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.core import events as ev
from kvstore.core.cold_tier import ColdTier, Restored
from kvstore.core.manifests import Session
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase
from kvstore.core.ssd.durability import Durability
from kvstore.core.ssd.index_room import IndexRoom
from kvstore.core.ssd.quarantine import Entry
from kvstore.core.ssd.restart import Snapshot, restore
from kvstore.core.ssd.slabs import Slabs
from kvstore.core.state import State
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    DiskState,
    Millis,
    NamespaceId,
    OpId,
    Record,
    SlabId,
    SlotState,
)


class SlabTier(ColdTier):
    persistent = True

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.slabs = Slabs(state, self.degrade)
        self.durability = Durability(state, self.slabs, self.degrade)
        self._index_room = IndexRoom(state, self.durability, self.slabs)
        self._unreadable: set[int] = set()
        """Slabs (by index) of the reads that failed since one succeeded."""

    def __repr__(self) -> str:
        return f"SlabTier({self.state.disk_state.name}, {self.slabs}, {self.durability})"

    # ------------------------------------------------------------------------------------------------------- places

    @property
    def bytes_max(self) -> int:
        return self.state.limits.disk_slab_bytes * self.state.limits.disk_slabs_max

    def fits(self, namespace: Namespace) -> bool:
        return self.slabs.fits(namespace)

    def place(self, row: int) -> bool:
        namespace = self.state.namespace_of(row)
        for shard in range(namespace.shards):
            taken = self.slabs.take(self.slabs.slot_bytes(namespace, shard), row)
            if taken is None:
                for placed in range(shard):
                    self.slabs.unplace(row, placed)
                return False
            self.slabs.place(row, shard, *taken, self.new_generation())
        return True

    def drop(self, row: int, *, corrupt: bool) -> None:
        for shard in range(self.state.namespace_of(row).shards):
            self.slabs.unplace(row, shard, quarantine=corrupt)

    def places(self, row: int) -> Sequence[tuple[int, int]]:
        return [(int(place.slab), place.slot) for place in self._places(row)]

    def _places(self, row: int) -> list[DiskPlace]:
        return [self.slabs.place_of(row, shard) for shard in range(self.state.namespace_of(row).shards)]

    # ----------------------------------------------------------------------------------------------------- transfers

    def write(self, op: OpId, rows: Sequence[int]) -> None:
        state = self.state
        records, targets = self._records(rows)
        sources = [
            state.extent(row, shard, length)
            for row in rows
            for shard, length in enumerate(state.namespace_of(row).shard_bytes)
        ]
        state.effects.append(ev.WriteRecords(op, records, tuple(sources), targets))

    def read(self, op: OpId, rows: Sequence[int]) -> None:
        """The checksum at commit is kept with the shard while it is on SSD: it is what the read must match."""
        state = self.state
        records, sources = self._records(rows)
        targets = [
            state.extent(row, shard, length)
            for row in rows
            for shard, length in enumerate(state.namespace_of(row).shard_bytes)
        ]
        state.effects.append(ev.ReadRecords(op, records, sources, tuple(targets)))

    def scrub(self, op: OpId, rows: Sequence[int], bytes_per_s: int) -> None:
        self.state.effects.append(ev.ScrubRecords(op, *self._records(rows), bytes_per_s))

    def _records(self, rows: Sequence[int]) -> tuple[tuple[Record, ...], tuple[DiskPlace, ...]]:
        """What the records of all shards say of them, or are to say, and where they are."""
        chunks = self.state.chunks
        records = []
        places: list[DiskPlace] = []
        for row in rows:
            namespace, start = self.state.namespace_of(row), chunks.shard0[row]
            for shard, length in enumerate(namespace.shard_bytes):
                records.append(
                    Record(
                        namespace=namespace.salt,
                        key=chunks.key[row],
                        shard=shard,
                        length=length,
                        checksum=chunks.shard_checksum[start + shard],
                        maker=chunks.maker(row),
                    )
                )
            places += self._places(row)
        return tuple(records), tuple(places)

    def stored(self, row: int) -> None:
        state = self.state
        chunks = state.chunks
        namespace = state.namespace_of(row)
        for shard_row in range(chunks.shard0[row], chunks.shard0[row] + namespace.shards):
            slab = state.ssd_slots.segments[chunks.disk_slab[shard_row]]
            state.ssd_slots.mark_ready(slab, chunks.disk_slot[shard_row])
            slab.touched_at = state.now
            self.durability.unsynced.add(SlabId(slab.id))
        state.dirty_chunks.pop((namespace.id, chunks.key[row]), None)  # of an earlier place
        state.dirty_chunks[namespace.id, chunks.key[row]] = state.now

    def not_stored(self, row: int, results: Sequence[DiskResult]) -> None:
        chunks = self.state.chunks
        for shard, result in enumerate(results):
            if result is DiskResult.IO_ERROR:
                slab = chunks.disk_slab[chunks.shard0[row] + shard]
                self.slabs.fails(self.state.ssd_slots.segments[slab])
            self.slabs.unplace(row, shard)

    def is_lost(self, row: int, results: Sequence[DiskResult]) -> bool:
        """In a file that is closed: of this file it is known, and of the disk it says nothing."""
        chunks = self.state.chunks
        slabs = {
            chunks.disk_slab[chunks.shard0[row] + shard]
            for shard, result in enumerate(results)
            if result is DiskResult.IO_ERROR
        }
        if slabs & self.slabs.closed:
            return True
        self._unreadable |= slabs
        return False

    def reads_recover(self) -> None:
        self._unreadable.clear()

    def reads_fail(self) -> None:
        for index in self._unreadable:
            self.slabs.fails(self.state.ssd_slots.segments[index])
        self._unreadable.clear()

    # -------------------------------------------------------------------------------------------------------- health

    def probe(self, op: OpId) -> None:
        self.state.effects.append(ev.ProbeDisk(op))

    def degraded(self, why: str) -> None:
        self.durability.fail_waits(why)

    def healed(self) -> None:
        self.slabs.healed()
        self.durability.healed()

    def tick(self) -> bool:
        self.slabs.forget_failures()
        if self.health is DiskState.OK:
            self.slabs.tick()
        late = False
        if self.durability.overdue:
            late = True
            self.degrade(DiskState.READ_ONLY, "an index transaction missed its deadline")
        if self.slabs.overdue:
            late = True
            self.degrade(DiskState.READ_ONLY, "a slab file was not made in time")
        self.durability.end_waits()
        self.durability.tick()
        return late

    def pump(self) -> None:
        self.slabs.pump()

    def persist(self) -> None:
        self.durability.write()

    def make_room(self, end_session: Callable[[Session], None]) -> None:
        self._index_room.pump(end_session)

    @property
    def going(self) -> bool:
        return self.health is DiskState.OK and self.slabs.going

    def facts(self) -> Mapping[type, Callable[[Any], None]]:
        return {ev.SlabReady: lambda event: self.slabs.ready(event.op)}

    def ended(self, event: ev.DiskDone) -> None:
        if self.durability.index is not None and self.durability.index[0] == event.op:
            self.durability.ended(event.results[0], event.why, event.slabs, event.usage)
        elif event.op in self.slabs.creating:
            self.slabs.failed(event.op, event.results[0], event.why)
        else:
            super().ended(event)

    def stats(self) -> dict[str, Any]:
        state = self.state
        pool = state.ssd_slots
        assigned = [segment for segment in pool.segments if segment.phase is Phase.ASSIGNED]
        counts = [sum(segment.counts[kind] for segment in assigned) for kind in SlotState]
        waiting = (state.dirty_chunks, state.dirty_sessions, state.deleted_chunks, state.deleted_sessions)
        oldest = [next(iter(dirty.values()), state.now) for dirty in waiting]
        if state.indexing_since is not None:  # until it has ended, nothing of it is durable
            oldest.append(state.indexing_since)
        return {
            "bytes": pool.segment_bytes * len(pool.segments),
            "slab_bytes": pool.segment_bytes * len(assigned),
            "capacity": sum(segment.capacity for segment in assigned),
            "free": counts[SlotState.FREE],
            "reserved": counts[SlotState.RESERVED],
            "ready": counts[SlotState.READY],
            "quarantined": counts[SlotState.QUARANTINED],
            "oldest_not_durable_ms": state.now - min(oldest),
            "to_forget": len(state.deleted_chunks) + len(state.deleted_sessions),
        }

    # ---------------------------------------------------------------------------------------------------- durability

    def restore(self, snapshot: Snapshot) -> Restored:
        self.begin_generations(snapshot.boot_count)
        return restore(self.state, self.slabs, self.durability, snapshot)

    def await_durable(
        self,
        ticket: ev.Ticket,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        answer: ev.Committed | ev.Saved,
    ) -> None:
        self.durability.await_durable(ticket, namespace, keys, answer)

    def refused(self, namespace: Namespace, key: ChunkKey, why: str) -> None:
        self.durability.refused((namespace.id, key), why)

    def await_gone(self, ticket: ev.Ticket | None, count: int) -> ev.Done | None:
        return self.durability.await_gone(ticket, count)

    def is_gone(self, since: Millis) -> bool:
        return self.durability.is_gone(since)

    def why_not_gone(self, since: Millis, deadline: Millis) -> str:
        return self.durability.why_not_gone(since, deadline)

    def tell_gone(self) -> None:
        self.durability.tell_gone()

    def hurry(self, change: int) -> None:
        self.durability.hurry += change

    @property
    def behind(self) -> bool:
        return self.durability.behind

    @property
    def forgetting(self) -> bool:
        return self.durability.forgetting

    def opened(self, namespace: Namespace) -> None:
        if self.health is not DiskState.ABSENT:
            self.durability.dirty_namespaces[namespace.id] = namespace

    def closed(self, namespace: NamespaceId) -> None:
        if self.health is not DiskState.ABSENT:
            self.durability.dirty_namespaces.pop(namespace, None)
            self.durability.deleted_namespaces.append(namespace)

    # ---------------------------------------------------------------------------------------------------- quarantine

    def may_rewrite(self, entry: Entry) -> bool:
        """Of the oldest transaction each may be named by the index still, whatever is in it."""
        state, row = self.state, (entry.namespace, entry.key)
        return not (
            row in state.dirty_chunks or row in state.deleted_chunks or row in self.durability.in_flight
        )

    def rewrite(self, op: OpId, entries: Sequence[Entry]) -> None:
        places = [DiskPlace(SlabId(entry.place[1]), entry.place[2], 0) for entry in entries]
        self.state.effects.append(ev.RewriteRecords(op, tuple(places)))

    # --------------------------------------------------------------------------------------------------------- checks

    def check_row(self, row: int) -> None:
        chunks, pool = self.state.chunks, self.state.ssd_slots
        namespace = self.state.namespace_of(row)
        for shard in range(namespace.shards):
            slab = pool.segments[chunks.disk_slab[chunks.shard0[row] + shard]]
            assert slab.phase is Phase.ASSIGNED, (chunks.describe(row), slab)
            assert slab.slot_bytes == self.slabs.slot_bytes(namespace, shard), (chunks.describe(row), slab)
