"""The invariants, stated as assertions over the whole state.

A `Watch` that looks for the first time passes over everything. A simulation looks after every step: then it compares
the columns with what they were at the last look, checks the rows that changed, and keeps the sums (what a namespace
counts, who owns a slot). Every so often (`full_every`) another begins from nothing, to prove that this one missed
nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from kvstore.core.chunks import (
    DOOMED,
    DURABLE,
    FETCHING,
    LISTED,
    NONE,
    PROMOTING,
    QUEUED,
    RANKED,
    STORED,
    STORING,
    LinkedRows,
)
from kvstore.core.manifests import Manifest
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import Candidates
from kvstore.core.policies.lists import STALE_IN_HEAP_MAX, Ranked
from kvstore.core.pool import Phase, Pool, Segment
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.core.store import Store
from kvstore.types import NamespaceId, SlotState

Slot = tuple[int, int]
"""(index of a segment or slab, number of the slot in it)"""
Owner = tuple[int, int]
"""(row, state of the slot)"""

ROW_COLUMNS = (
    *("namespace", "parent", "first_child", "next_sibling", "prev_sibling", "newer", "older", "used_at"),
    *("cohort", "history"),
    *("pins", "refs", "shard0", "ready", "reserved", "flags", "reason"),
)
SHARD_COLUMNS = (
    *("shard_segment", "shard_slot", "shard_checksum", "shard_ready"),
    *("disk_slab", "disk_slot", "disk_generation"),
)
FULL_EVERY = 500
_NOTHING: tuple[Any, ...] = (None,) * 4
USED = (SlotState.RESERVED, SlotState.READY)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one row of the chunk table adds to the sums, and where it says that its bytes are."""

    namespace: Namespace
    visible: int
    cold: int
    partial: int
    below: int
    """1: it has room on SSD."""
    arena_bytes: int
    queued: bool
    rows: LinkedRows | Ranked | None
    """The list that it has to be in."""
    shard_rows: range
    """Of its shards in their columns."""
    arena: tuple[Slot, ...]
    disk: tuple[Slot, ...]
    states: tuple[int, ...]
    """Of the slots in `arena`, then of those in `disk`."""
    family: tuple[int, int]
    """Parent and first child."""


@dataclass(slots=True)
class Sums:
    """Of the facts of all rows."""

    rows: int = 0
    namespaces: Counter[tuple[str, NamespaceId]] = field(default_factory=Counter)
    lists: Counter[int] = field(default_factory=Counter)
    """Rows in each list, by the list's id()."""
    arena: dict[Slot, Owner] = field(default_factory=dict)
    """Who owns a slot: no slot has two owners (invariant 10)."""
    disk: dict[Slot, Owner] = field(default_factory=dict)
    shard_rows: dict[int, int] = field(default_factory=dict)
    """The row that a place in the columns of shards belongs to."""
    queued: set[int] = field(default_factory=set)

    def add(self, row: int, facts: Facts) -> None:
        self._count(facts, 1)
        states = iter(facts.states)
        for owners, slots in ((self.arena, facts.arena), (self.disk, facts.disk)):
            for slot in slots:
                assert slot not in owners, f"slot {slot} of rows {owners[slot]} and {row}"
                owners[slot] = (row, next(states))
        for shard_row in facts.shard_rows:
            assert self.shard_rows.setdefault(shard_row, row) == row, f"shard {shard_row} of two rows"
        if facts.queued:
            self.queued.add(row)

    def remove(self, row: int, facts: Facts) -> None:
        self._count(facts, -1)
        for slot in facts.arena:
            del self.arena[slot]
        for slot in facts.disk:
            del self.disk[slot]
        for shard_row in facts.shard_rows:
            del self.shard_rows[shard_row]
        self.queued.discard(row)

    def _count(self, facts: Facts, change: int) -> None:
        self.rows += change
        number = facts.namespace.id
        self.namespaces["rows", number] += change
        self.namespaces["visible", number] += change * facts.visible
        self.namespaces["cold", number] += change * facts.cold
        self.namespaces["partial", number] += change * facts.partial
        self.namespaces["below", number] += change * facts.below
        self.namespaces["arena bytes", number] += change * facts.arena_bytes
        if facts.rows is not None:
            self.lists[id(facts.rows)] += change


class Columns:
    """What parallel columns held at the last look."""

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        self._table = table
        self._names = names
        self._before: dict[str, bytes] = dict.fromkeys(names, b"")

    def changed(self) -> set[int]:
        """Numbers of the rows in which a column changed."""
        found: set[int] = set()
        for name in self._names:
            column: array[int] | bytearray = getattr(self._table, name)
            now = column.tobytes() if isinstance(column, array) else bytes(column)
            before = self._before[name]
            if now == before:
                continue
            self._before[name] = now
            kind = np.dtype(column.typecode if isinstance(column, array) else "B")
            new, old = np.frombuffer(now, kind), np.frombuffer(before, kind)
            same = min(len(new), len(old))
            found.update(np.flatnonzero(new[:same] != old[:same]).tolist())
            found.update(range(same, max(len(new), len(old))))
        return found


class Slots:
    """One pool as it was at the last look."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._before: list[tuple[Any, ...]] = []
        self._whole: tuple[Any, ...] = ()
        self.reassigned: set[int] = set()
        """Indices of the segments that became another's since the look before the last."""

    def changed(self) -> list[Segment]:
        """Segments that changed in anything; those are conserved (invariant 10) as `Pool` says."""
        found = []
        segments = self.pool.segments
        before = self._before if len(self._before) == len(segments) else [_NOTHING] * len(segments)
        self.reassigned = set()
        whole = (
            [(segment.id, segment.phase, segment.namespace, segment.slot_bytes) for segment in segments],
            b"".join([segment.state for segment in segments]),
            b"".join([segment.owner for segment in segments]),
            b"".join([segment.generation for segment in segments]),
            b"".join([segment.free for segment in segments]),
            [tuple(segment.counts) for segment in segments],
        )
        if whole == self._whole:
            return []
        self._whole = whole
        for index, segment in enumerate(segments):
            now = (
                segment.id,
                segment.phase,
                segment.namespace,
                segment.slot_bytes,
                bytes(segment.state),
                segment.owner.tobytes(),
                segment.generation.tobytes(),
                segment.free.tobytes(),
                tuple(segment.counts),
            )
            if now != before[index]:
                if now[:4] != before[index][:4]:
                    self.reassigned.add(index)
                before[index] = now
                found.append(segment)
        self._before = before
        if found:
            for segment in found:
                self.pool.check_segment(segment)
            self.pool.check_classes()
        return found


def check_integrity(store: Store) -> None:
    """The ten invariants, in a pass over everything; raises AssertionError."""
    Watch(store).check()


class Watch:
    """Looks at one store after each of its steps."""

    def __init__(self, store: Store, full_every: int = FULL_EVERY) -> None:
        self._store = store
        self.state = state = store.state
        self._saves = store.saves
        self._segments = store.segments
        self._transfers = store.transfers
        self._tier = store.cold_tier
        self._slab_tier = store.cold_tier if isinstance(store.cold_tier, SlabTier) else None
        self._reads = store.reads
        self._full_every = full_every
        self.looks = 0
        self.facts: dict[int, Facts] = {}
        """By row, of all rows that are in use."""
        self.changed: dict[int, Facts | None] = {}
        """Rows that changed before the last look, and what they were."""
        self._sums = Sums()
        self._rows = Columns(state.chunks, ROW_COLUMNS)
        self._shards = Columns(state.chunks, SHARD_COLUMNS)
        self._arena = Slots(state.pool)
        self._slabs = Slots(state.ssd_slots)
        self._free_rows = b""
        self._used: dict[tuple[int, str], int] = {}
        """What tenants with quotas had at the last look."""
        self._pinning: list[Any] = []
        self._pins: Counter[tuple[str, int]] = Counter()
        """Pinned slots by segment, pinned chunks by namespace."""
        self._group_pins: dict[int, tuple[dict[int, int], int]] = {}
        """By the group's id(): what its leases pin, and how many bytes that is."""
        self._manifests: dict[tuple[NamespaceId, bytes], Manifest] = {}
        self._refs: Counter[int] = Counter()
        self._sessions: Counter[NamespaceId] = Counter()
        self._to_store: list[Any] = []
        self._bars = 0

    def check(self) -> None:
        """Everything that changed since the last look; raises AssertionError, naming what is wrong."""
        arena, slabs = self._arena.changed(), self._slabs.changed()
        self._look_at_rows(self._changed_rows())
        self._check_barred()
        self._check_sums()
        self._check_lists()
        _check_owners(self._sums.arena, arena, self._move_targets())
        _check_owners(self._sums.disk, slabs, {})
        self._check_used()
        self._check_ops()
        self._check_queues()
        self._check_pins()
        self._check_references()
        self._check_workers()
        self._store.sources.check_integrity()
        self._store.shared_sessions.check_integrity()
        self._store.queue.planner.check()
        self._store.queue.check_integrity()
        if self.looks == 0:
            self._check_all()
        self.looks += 1
        if self.looks % self._full_every == 0:
            self._prove()

    def _prove(self) -> None:
        """All of it anew: what is kept from look to look is what a look at everything finds."""
        anew = Watch(self._store)
        anew.check()
        assert anew.facts == self.facts, [
            self.state.chunks.describe(row)
            for row in self.facts.keys() | anew.facts.keys()
            if self.facts.get(row) != anew.facts.get(row)
        ]
        for mine, other in (
            (self._sums.namespaces, anew._sums.namespaces),
            (self._sums.lists, anew._sums.lists),
        ):
            assert +mine == +other, (mine, other)
        assert (self._sums.arena, self._sums.disk) == (anew._sums.arena, anew._sums.disk)
        assert (self._sums.shard_rows, self._sums.queued) == (anew._sums.shard_rows, anew._sums.queued)

    # -------------------------------------------------------------------------------------------------------- rows

    def _changed_rows(self) -> set[int]:
        changed = self._rows.changed()
        shard_rows = self._sums.shard_rows
        changed.update(
            [shard_rows[shard_row] for shard_row in self._shards.changed() if shard_row in shard_rows]
        )
        for owners, slots in ((self._sums.arena, self._arena), (self._sums.disk, self._slabs)):
            if slots.reassigned:
                changed.update(row for (index, _), (row, _) in owners.items() if index in slots.reassigned)
        return changed

    def _look_at_rows(self, rows: set[int]) -> None:
        chunks = self.state.chunks
        self.changed = {row: self.facts.pop(row, None) for row in rows}
        for row, before in self.changed.items():
            if before is not None:
                self._sums.remove(row, before)
        for row in rows:
            if chunks.namespace[row] == NONE:
                self._check_free(row)
                continue
            facts = self.facts[row] = self._look_at(row)
            self._sums.add(row, facts)
        family: set[int] = set()
        for row, before in self.changed.items():  # now that all facts are of today
            family.add(row)
            family.update(() if before is None else before.family)
            if row in self.facts:
                self._check_links(row)
        for row in family & self.facts.keys():
            self._check_tree(row)
        free = chunks.free_rows.tobytes()
        if free != self._free_rows:
            self._free_rows = free
            assert len(set(chunks.free_rows)) == len(chunks.free_rows), chunks.free_rows
            assert not [row for row in chunks.free_rows if row in self.facts], chunks.free_rows
        assert self._sums.rows == chunks.rows_used, (self._sums.rows, chunks)

    def _check_barred(self) -> None:
        """Nothing is served that a maker made who was recalled, or is quarantined for its tenant."""
        state, flags = self.state, self.state.chunks.flags
        rows = self.facts.keys() if len(state.bars) != self._bars else self.changed.keys() & self.facts.keys()
        self._bars = len(state.bars)
        for row in rows if state.bars else ():
            served = state.is_hit(row) or flags[row] & (STORED | DOOMED) == STORED
            if served and not state.is_recalled(row):
                tenant = state.namespace_of(row).tenant
                made = [
                    maker for maker in state.makers_of(row) if state.is_barred(tenant, maker, purged=True)
                ]
                assert not made, (state.chunks.describe(row), made)

    def _check_free(self, row: int) -> None:
        chunks = self.state.chunks
        where = f"free {row}"
        assert not chunks.key[row] and chunks.shard0[row] == NONE and not chunks.flags[row], where
        assert not chunks.pins[row] and not chunks.refs[row], where
        assert not chunks.ready[row] and not chunks.reserved[row], where
        assert chunks.parent[row] == chunks.first_child[row] == NONE, where

    def _look_at(self, row: int) -> Facts:
        """What has to be true of a row by itself."""
        state, chunks = self.state, self.state.chunks
        namespace = state.namespaces[NamespaceId(chunks.namespace[row])]
        flags, pins, start = chunks.flags[row], chunks.pins[row], chunks.shard0[row]
        assert namespace.index.get(chunks.key[row]) == row, chunks.describe(row)
        listed = bool(flags & LISTED)
        family = (chunks.parent[row], chunks.first_child[row])
        assert not flags & RANKED or listed, chunks.describe(row)
        if start == NONE:
            assert chunks.ready[row] == chunks.reserved[row] == pins == 0, chunks.describe(row)
            assert not flags & (STORED | STORING | PROMOTING | RANKED | FETCHING), chunks.describe(row)
            assert listed == (chunks.refs[row] == 0), chunks.describe(row)
            ghosts = state.ghosts if listed else None
            return Facts(namespace, 0, 0, 0, 0, 0, bool(flags & QUEUED), ghosts, range(0), (), (), (), family)
        shard_rows = range(start, start + namespace.shards)
        assert chunks.ready[row] == sum(chunks.shard_ready[start : start + namespace.shards]), (
            chunks.describe(row)
        )
        resident = chunks.ready[row] == namespace.shards
        stored, promoting = bool(flags & STORED), bool(flags & PROMOTING)
        assert not flags & DURABLE or stored, chunks.describe(row)
        assert not promoting or (stored and not resident), chunks.describe(row)
        assert listed == (pins == 0 and not promoting), chunks.describe(row)
        assert resident or not pins, chunks.describe(row)
        assert pins or not (resident and flags & DOOMED), chunks.describe(row)
        rows: LinkedRows | Ranked | None = None
        if listed and (resident or stored):
            assert resident or not chunks.ready[row], chunks.describe(row)
            candidates = namespace.dram if resident else namespace.ssd
            rows = state.policy.check_row(candidates, row)
            assert bool(flags & RANKED) == isinstance(rows, Ranked), chunks.describe(row)
        elif listed:
            assert not flags & RANKED, chunks.describe(row)
            rows = state.partials
        placed = [shard_row for shard_row in shard_rows if chunks.shard_segment[shard_row] != NONE]
        assert len(placed) == chunks.ready[row] + chunks.reserved[row], chunks.describe(row)
        arena = tuple((chunks.shard_segment[shard_row], chunks.shard_slot[shard_row]) for shard_row in placed)
        in_arena = [
            SlotState.READY if chunks.shard_ready[shard_row] else SlotState.RESERVED for shard_row in placed
        ]
        self._check_arena(namespace, row, shard_rows)
        disk: tuple[Slot, ...] = ()
        if flags & (STORED | STORING):
            self._tier.check_row(row)
        if flags & (STORED | STORING) and self._slab_tier is not None:
            disk = tuple(
                (chunks.disk_slab[shard_row], chunks.disk_slot[shard_row]) for shard_row in shard_rows
            )
            self._check_slabs(row, disk)
        else:
            assert all(chunks.disk_slab[shard_row] == NONE for shard_row in shard_rows), chunks.describe(row)
        doomed = bool(flags & DOOMED)
        return Facts(
            namespace,
            visible=resident and not doomed,
            cold=stored and not resident and not doomed,
            partial=not resident and not stored,
            below=bool(flags & (STORED | STORING)),
            arena_bytes=sum(namespace.slot_bytes[shard_row - start] for shard_row in placed),
            queued=bool(flags & QUEUED),
            rows=rows,
            shard_rows=shard_rows,
            arena=arena,
            disk=disk,
            states=(*in_arena, *[SlotState.READY if stored else SlotState.RESERVED] * len(disk)),
            family=family,
        )

    def _check_arena(self, namespace: Namespace, row: int, shard_rows: range) -> None:
        chunks = self.state.chunks
        for shard, shard_row in enumerate(shard_rows):
            if chunks.shard_segment[shard_row] == NONE:
                continue
            segment, slot = (
                self.state.pool.segments[chunks.shard_segment[shard_row]],
                chunks.shard_slot[shard_row],
            )
            # Invariant 9: a chunk lies in segments of its own namespace only.
            assert segment.phase is Phase.ASSIGNED and segment.namespace == namespace.id, (
                chunks.describe(row),
                segment,
            )
            assert segment.slot_bytes == namespace.slot_bytes[shard], (chunks.describe(row), segment)
            assert segment.owner[slot] == row, (chunks.describe(row), segment, slot)
            wanted = SlotState.READY if chunks.shard_ready[shard_row] else SlotState.RESERVED
            assert segment.state[slot] == wanted, (chunks.describe(row), segment, slot)

    def _check_slabs(self, row: int, slots: tuple[Slot, ...]) -> None:
        """Every shard is on SSD, or on its way there."""
        chunks = self.state.chunks
        wanted = SlotState.READY if chunks.flags[row] & STORED else SlotState.RESERVED
        for index, slot in slots:
            assert index != NONE, chunks.describe(row)
            slab = self.state.ssd_slots.segments[index]
            assert slab.owner[slot] == row, (chunks.describe(row), slab, slot)
            assert slab.state[slot] == wanted, (chunks.describe(row), slab, slot)

    def _check_links(self, row: int) -> None:
        """Its neighbours in its list."""
        chunks = self.state.chunks
        rows = self.facts[row].rows
        if rows is None or isinstance(rows, Ranked):
            return
        older, newer = chunks.older[row], chunks.newer[row]
        assert rows.oldest == row if older == NONE else chunks.newer[older] == row, chunks.describe(row)
        assert rows.newest == row if newer == NONE else chunks.older[newer] == row, chunks.describe(row)
        for other in (older, newer):
            assert other == NONE or self.facts[other].rows is rows, (
                chunks.describe(row),
                chunks.describe(other),
            )
        if rows is self.state.partials:
            assert older == NONE or chunks.used_at[older] <= chunks.used_at[row], chunks.describe(row)
            assert newer == NONE or chunks.used_at[row] <= chunks.used_at[newer], chunks.describe(row)

    def _check_tree(self, row: int) -> None:
        """Its parent, first child and siblings."""
        chunks = self.state.chunks
        parent, before, after = chunks.parent[row], chunks.prev_sibling[row], chunks.next_sibling[row]
        if parent != NONE:
            assert chunks.namespace[parent] == chunks.namespace[row], chunks.describe(row)
            first = chunks.first_child[parent] == row
            assert first if before == NONE else chunks.next_sibling[before] == row, chunks.describe(row)
            for other in (before, after):
                assert other == NONE or chunks.parent[other] == parent, chunks.describe(row)
            assert after == NONE or chunks.prev_sibling[after] == row, chunks.describe(row)
        else:
            assert before == after == NONE, chunks.describe(row)
        child = chunks.first_child[row]
        if child != NONE:
            assert chunks.parent[child] == row and chunks.prev_sibling[child] == NONE, chunks.describe(row)

    # -------------------------------------------------------------------------------------------------------- sums

    def _check_sums(self) -> None:
        count = self._sums.namespaces
        for number, namespace in self.state.namespaces.items():
            assert count["rows", number] == len(namespace.index), namespace
            counted = (count["visible", number], count["cold", number], count["partial", number])
            assert counted == (namespace.visible, namespace.cold, namespace.partial), (namespace, counted)
            assert count["below", number] == namespace.below, (namespace, count["below", number])
        self._check_quotas()

    def _check_quotas(self) -> None:
        """No tenant has more than its quota; what a compaction copies counts once."""
        limits, count = self.state.limits, self._sums.namespaces
        if not (limits.dram_quotas or limits.ssd_quotas or limits.remote_quotas):
            return
        dram: Counter[str] = Counter()
        ssd: Counter[str] = Counter()
        remote: Counter[str] = Counter()
        for number, namespace in self.state.namespaces.items():
            dram[namespace.tenant] += count["arena bytes", number]
            ssd[namespace.tenant] += count["below", number] * namespace.ssd_chunk_bytes
        for stored in self._store.remote.stored.values():
            remote[stored.tenant] += stored.bytes
        for used, quotas in (
            (dram, limits.dram_quotas),
            (ssd, limits.ssd_quotas),
            (remote, limits.remote_quotas),
        ):
            for tenant, size in used.items():
                before = self._used.get(
                    (id(quotas), tenant), size
                )  # of a start that found more, less and less
                quota = max(before, quotas.get(tenant, quotas.get("*", size)))
                assert size <= quota, f"{tenant} has {size} bytes of {quota}"
                self._used[id(quotas), tenant] = size
        assert +remote == +self._store.remote.bytes_of, (remote, self._store.remote.bytes_of)

    def _lists(self) -> Iterable[LinkedRows]:
        state = self.state
        yield from (state.ghosts, state.partials)
        for candidates in self._candidates():
            yield from (rows for rows in candidates.lists if isinstance(rows, LinkedRows))

    def _ranked(self) -> Iterable[Ranked]:
        for candidates in self._candidates():
            yield from (rows for rows in candidates.lists if isinstance(rows, Ranked))

    def _candidates(self) -> Iterable[Candidates]:
        state = self.state
        yield from state.cold.by_sizes.values()
        for namespace in state.namespaces.values():
            yield namespace.dram

    def _check_lists(self) -> None:
        """Their ends, and that as many rows say that they are in it as it counts."""
        chunks = self.state.chunks
        for rows in self._lists():
            assert rows.count == self._sums.lists[id(rows)], (rows, self._sums.lists[id(rows)])
            if not rows.count:
                assert rows.oldest == rows.newest == NONE, rows
                continue
            assert chunks.older[rows.oldest] == NONE == chunks.newer[rows.newest], rows
            assert self.facts[rows.oldest].rows is rows is self.facts[rows.newest].rows, rows
        for ranked in self._ranked():
            assert len(ranked) == self._sums.lists[id(ranked)], (ranked, self._sums.lists[id(ranked)])
            assert ranked.entries <= 2 * len(ranked) + STALE_IN_HEAP_MAX, ranked
        assert self.state.ghosts.count <= self.state.limits.ghost_rows_max, self.state.ghosts

    def _check_all(self) -> None:
        """What only a walk through everything finds: rings apart from their list or parent, strange entries."""
        state, chunks = self.state, self.state.chunks
        for rows in self._lists():
            walked = list(islice(chunks.walk(rows), rows.count + 1))
            assert len(walked) == rows.count, (rows, len(walked))
        rows_used = len(self.facts)
        children = sum(1 for row in self.facts for _ in islice(chunks.children(row), rows_used))
        assert children == sum(parent != NONE for parent in chunks.parent), children
        for namespace in state.namespaces.values():
            for key, row in namespace.index.items():
                assert row in self.facts and chunks.key[row] == key, chunks.describe(row)
        for pool in (state.pool, state.ssd_slots):
            pool.check_integrity()
        for worker in state.workers.values():
            worker.memory.check()

    # ------------------------------------------------------------------------------------------------------- slots

    def _move_targets(self) -> dict[Slot, Owner]:
        targets: dict[Slot, Owner] = {}
        for move in self._segments.moves.values():
            for (target, slot), row in zip(move.targets, move.rows, strict=True):
                assert (target.index, slot) not in targets, (target, slot)
                assert target.state[slot] == SlotState.RESERVED, (target, slot)
                targets[target.index, slot] = (row, SlotState.RESERVED)
        return targets

    def _check_used(self) -> None:
        """Invariant 10: each slot that is in use is used by exactly one shard, move or copy."""
        moving = sum(len(move.targets) for move in self._segments.moves.values())
        for pool, owners, more in (
            (self.state.pool, self._sums.arena, moving),
            (self.state.ssd_slots, self._sums.disk, 0),
        ):
            used = sum(
                segment.counts[SlotState.RESERVED] + segment.counts[SlotState.READY]
                for segment in pool.segments
                if segment.phase is Phase.ASSIGNED
            )
            assert used == len(owners) + more, (used, len(owners), more)

    def _check_ops(self) -> None:
        chunks = self.state.chunks
        for read in self._transfers.reads.values():
            for row in read.rows if read.quarantined is None else ():
                assert chunks.flags[row] & PROMOTING, chunks.describe(row)
            for segment, slot in read.quarantined or ():
                assert segment.state[slot] == SlotState.QUARANTINED, (segment, slot)
        copies = {op: reservation for op, (reservation, _) in self._saves.copies.items()}
        assert copies == {op: r for r in self.state.reservations.values() for op in r.copies}, copies
        for late in self._saves.late.values():
            for segment, slot in late.slots:
                assert segment.state[slot] == SlotState.QUARANTINED, (segment, slot)

    def _check_queues(self) -> None:
        state, chunks = self.state, self.state.chunks
        to_store = list(state.to_store)
        if self.changed or to_store != self._to_store:
            self._to_store = to_store
            queued = {row for row, key in to_store if state.is_queued(row, key)}
            assert queued == self._sums.queued, (queued, self._sums.queued)
        assert not state.demanded & state.prefetched, state.demanded & state.prefetched
        if self._slab_tier is not None:
            self._check_slab_tier(self._slab_tier)
        for row in state.demanded:
            assert state.is_resident(row), chunks.describe(row)
        for row in state.prefetched:
            assert chunks.flags[row] & (PROMOTING | LISTED) or chunks.pins[row], chunks.describe(row)
        transfers = self._transfers
        promised = {wanted.row for wanted in (*transfers.demanded, *transfers._without_slot)}
        promised |= state.prefetched.intersection(wanted.row for _, wanted in transfers.foreseen)
        assert state.wanted_bytes == sum(wanted.bytes for wanted in transfers.demanded), state.wanted_bytes
        reading = sum(read.bytes for read in transfers.reads.values() if read.quarantined is None)
        assert state.reading_bytes == reading, (state.reading_bytes, reading)
        flags, reserved = (
            np.frombuffer(column, column.typecode) for column in (chunks.flags, chunks.reserved)
        )
        begun = np.flatnonzero((flags & PROMOTING != 0) & (reserved == 0)).tolist()
        assert promised.issuperset(begun), [chunks.describe(row) for row in begun if row not in promised]
        for row, waits in state.waits.items():
            assert waits and chunks.shard0[row] != NONE and not state.is_resident(row), chunks.describe(row)
        if not self._tier.persistent:
            noted = (state.dirty_chunks, state.dirty_sessions, state.deleted_chunks, state.deleted_sessions)
            assert not any((*noted, state.cut_sessions)), "noted for an index, and there is none"

    def _check_slab_tier(self, tier: SlabTier) -> None:
        durability = tier.durability
        waiting = {(chunk, number) for number, wait in durability.waits.items() for chunk in wait.missing}
        found = {(chunk, number) for chunk, waits in durability._waits_of.items() for number in waits}
        assert waiting == found and all(wait.missing for wait in durability.waits.values()), waiting ^ found
        awaited = Counter(chunk for wait in durability.waits.values() for chunk in wait.chunks)
        assert awaited == durability._slabs.awaited, awaited
        emptying = tier.slabs.emptying
        assert emptying is None or not emptying.slab.counts[SlotState.RESERVED], emptying

    # -------------------------------------------------------------------------------------------------------- pins

    def _check_pins(self) -> None:
        """Each pin is that of a lease, a move, a write to SSD or REMOTE, or an audit; a group's are its leases'."""
        state = self.state
        leases = state.leases.leases
        for lease in leases.values():
            assert lease.id in lease.group.leases and lease.group.members, lease
        pinning: list[Any] = [
            *leases.values(),
            *self._segments.moves.values(),
            *self._transfers.writes.values(),
            *self._store.remote.stores.values(),
            *(rows for rows, _ in self._reads.audits.values()),
        ]
        if self.changed or pinning != self._pinning:
            self._pinning = pinning
            self._count_pins()
        for segment in state.pool.segments:
            assert segment.pinned == self._pins["segment", segment.index], segment
        for namespace in state.namespaces.values():
            assert namespace.pinned == self._pins["namespace", namespace.id], namespace
        for group in {worker.group for worker in state.workers.values()}:
            pins, charged = self._group_pins.get(id(group), ({}, 0))
            assert group.pins == pins, group
            assert group.pinned_bytes == charged <= state.limits.pin_bytes_max, (group, charged)

    def _count_pins(self) -> None:
        pins: Counter[int] = Counter()
        for holder in self._pinning:
            pins.update(holder if isinstance(holder, list) else holder.rows)
        self._compare(self.state.chunks.pins, pins)
        self._pins = Counter()
        for row in pins:
            facts = self.facts[row]
            self._pins["namespace", facts.namespace.id] += 1
            for index, _ in facts.arena:
                self._pins["segment", index] += 1
        of_group: dict[int, Counter[int]] = {}
        for lease in self.state.leases.leases.values():
            of_group.setdefault(id(lease.group), Counter()).update(lease.rows)
        self._group_pins = {
            group: (dict(rows), sum(self.facts[row].namespace.chunk_bytes for row in rows))
            for group, rows in of_group.items()
        }

    def _check_references(self) -> None:
        state = self.state
        sessions = state.sessions.by_name
        manifests = {name: session.manifest for name, session in sessions.items()}
        if manifests != self._manifests:
            self._manifests = manifests
            self._refs, self._sessions = Counter(), Counter()
            for session in sessions.values():
                self._refs.update(session.manifest.rows)
                self._sessions[session.namespace] += 1
                assert session.version > 0, session
                for row in session.manifest.rows:
                    assert self.facts[row].namespace.id == session.namespace, session
            self._compare(state.chunks.refs, self._refs)
        elif self.changed:
            self._compare(state.chunks.refs, self._refs)
        for namespace in state.namespaces.values():
            assert namespace.sessions == self._sessions[namespace.id], namespace
        assert state.sessions.entries == self._refs.total() <= state.limits.manifest_entries_max, (
            state.sessions
        )

    def _compare(self, column: array[int], wanted: Mapping[int, int]) -> None:
        """What the rows count, with what there is to be counted."""
        counts = np.frombuffer(column, np.int32)
        rows = np.flatnonzero(counts)
        found = dict(zip(rows.tolist(), counts[rows].tolist(), strict=True))
        if found != wanted:
            wrong = [row for row in found.keys() | wanted if found.get(row) != wanted.get(row)]
            raise AssertionError([(self.state.chunks.describe(row), wanted.get(row, 0)) for row in wrong])

    # ----------------------------------------------------------------------------------------------------- workers

    def _check_workers(self) -> None:
        self._store.residents.check()
        state = self.state
        waiting = Counter(wait.worker for waits in state.waits.values() for wait in waits)
        reserved: Counter[int] = Counter()
        owned: dict[int, set[int]] = {}
        for reservation in state.reservations.values():
            shards = set(range(len(reservation.rows) * len(reservation.shards)))
            written = [number for copy in reservation.copies.values() for number in copy.numbers]
            assert len(set(written)) == len(written) and shards.issuperset(written), reservation
            assert shards.difference(written).issuperset(reservation.filled), reservation
            assert reservation.busy or not reservation.committing, reservation
            reserved[reservation.worker] += reservation.reserved_bytes
            owned.setdefault(reservation.worker, set()).add(reservation.id)
        for worker in state.workers.values():
            assert worker.id in worker.group.members, worker
            assert worker.waits == waiting[worker.id], (worker, worker.waits, waiting[worker.id])
            assert worker.reservations == owned.get(worker.id, set()), worker
            assert worker.reserved_bytes == reserved[worker.id], worker
            for segment_id in worker.holds:
                segment = state.pool.by_id[segment_id]
                assert worker.id in segment.holders, (worker, segment)
                # Invariant 9: nobody holds a segment of a namespace that it did not open.
                assert segment.namespace in worker.opened, (worker, segment)
        if not self.changed:
            return
        writing: Counter[int] = Counter()
        for reservation in state.reservations.values():
            for row in reservation.rows:
                writing[row] += len(reservation.shards)
                if row in self.changed:
                    for shard in reservation.shards:
                        shard_row = state.chunks.shard0[row] + shard
                        segment = state.pool.segments[state.chunks.shard_segment[shard_row]]
                        assert segment.state[state.chunks.shard_slot[shard_row]] == SlotState.RESERVED, (
                            reservation
                        )
        for row in writing.keys() & self.changed.keys():
            assert state.chunks.reserved[row] == writing[row], (state.chunks.describe(row), writing[row])


def _check_owners(owners: dict[Slot, Owner], segments: Iterable[Segment], moving: dict[Slot, Owner]) -> None:
    """Each slot in use belongs to the row that says so, or to a move of it."""
    for segment in segments:
        for slot, state in enumerate(segment.state):
            if state in USED:
                owner = owners.get((segment.index, slot)) or moving.get((segment.index, slot))
                assert owner == (segment.owner[slot], state), (
                    segment,
                    slot,
                    segment.owner[slot],
                    state,
                    owner,
                )
