"""Each noun of the core, and the index, against a model of dicts and lists, under schedules that Hypothesis shrinks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.chunks import LISTED, NONE, RANKED, ChunkTable, LinkedRows
from kvstore.core.events import ChunkRecord, NamespaceRecord, SessionEntry, SessionRecord, WriteIndex
from kvstore.core.lease import Lease, LeaseBook
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import POLICIES
from kvstore.core.pool import Phase, Pool, Segment
from kvstore.core.workers import EngineGroup
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.index import Index, SlabRow
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    LeaseId,
    NamespaceId,
    OpId,
    SlabId,
    SlotState,
    WorkerId,
)

anything = st.integers(0, 1 << 16)
spaces = st.integers(1, 2).map(NamespaceId)
QUICK = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class PoolMachine(RuleBasedStateMachine):
    """Segments that change hands and slots that change state; the model has one dict entry for each slot in use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(segment_bytes=32, count=3, alignment=4)
        self.used: dict[tuple[int, int], tuple[SlotState, int]] = {}
        """(segment id, slot) -> state and owner."""
        self.seen: dict[tuple[int, int], int] = {}
        """Highest generation that a reader may have been given."""
        self.row = 0

    def of(self, phase: Phase) -> list[Segment]:
        return [segment for segment in self.pool.segments if segment.phase is phase]

    def slot(self, pick: int, *states: SlotState) -> tuple[Segment, int] | None:
        able = [place for place, (state, _) in sorted(self.used.items()) if state in states]
        if not able:
            return None
        segment_id, slot = able[pick % len(able)]
        return next(segment for segment in self.pool.segments if segment.id == segment_id), slot

    @rule(pick=anything)
    def created(self, pick: int) -> None:
        if creating := self.of(Phase.CREATING):
            self.pool.created(creating[pick % len(creating)])

    @rule(pick=anything, space=spaces, slot_bytes=st.sampled_from((4, 8, 12)))
    def assign(self, pick: int, space: NamespaceId, slot_bytes: int) -> None:
        able = self.of(Phase.IDLE)
        able += [s for s in self.of(Phase.ASSIGNED) if s.namespace == space and s.empty]
        if able:
            segment = able[pick % len(able)]
            self.pool.assign(segment, space, slot_bytes)
            assert segment.capacity == 32 // slot_bytes
            for slot in range(segment.capacity):
                self.expect_newer(segment, slot)

    @rule(space=spaces, slot_bytes=st.sampled_from((4, 8, 12)), avoid=st.integers(-1, 2))
    def take(self, space: NamespaceId, slot_bytes: int, avoid: int) -> None:
        slab = self.pool.classes.get((space, slot_bytes))
        if slab is None:
            return
        free = {
            segment.index
            for segment in slab.segments.values()
            if any((segment.id, slot) not in self.used for slot in range(segment.capacity))
        }
        if avoid != -1:
            filled = {place[0] for place in self.used}
            free = {index for index in free - {avoid} if self.pool.segments[index].id in filled}
        self.row += 1
        taken = self.pool.take(slab, self.row, avoid)
        assert (taken is None) == (not free)
        if taken is not None:
            segment, slot = taken
            assert segment.index in free and (segment.id, slot) not in self.used
            self.used[segment.id, slot] = (SlotState.RESERVED, self.row)
            self.seen[segment.id, slot] = segment.generation[slot]

    @rule(pick=anything)
    def fill(self, pick: int) -> None:
        if found := self.slot(pick, SlotState.RESERVED):
            self.pool.mark_ready(*found)
            segment, slot = found
            self.used[segment.id, slot] = (SlotState.READY, segment.owner[slot])

    @rule(pick=anything)
    def quarantine(self, pick: int) -> None:
        if found := self.slot(pick, SlotState.RESERVED, SlotState.READY):
            segment, slot = found
            self.pool.quarantine(segment, slot)
            self.used[segment.id, slot] = (SlotState.QUARANTINED, NONE)
            self.expect_newer(segment, slot)

    @rule(pick=anything)
    def give_back(self, pick: int) -> None:
        if found := self.slot(pick, SlotState.RESERVED, SlotState.READY, SlotState.QUARANTINED):
            segment, slot = found
            self.pool.give_back(segment, slot)
            del self.used[segment.id, slot]
            self.expect_newer(segment, slot)

    @rule(pick=anything, wanted_by=spaces)
    def retire_and_replace(self, pick: int, wanted_by: NamespaceId) -> None:
        able = [segment for segment in self.of(Phase.ASSIGNED) if segment.empty]
        if able:
            segment = able[pick % len(able)]
            self.pool.retire(segment, wanted_by)
            new = self.pool.replace(segment)
            assert new.index == segment.index and new.id > segment.id and new.wanted_by == wanted_by

    def expect_newer(self, segment: Segment, slot: int) -> None:
        """Invariant 8: no reader's generation is good for a slot that changed hands."""
        assert segment.generation[slot] > self.seen.get((segment.id, slot), -1)
        self.seen[segment.id, slot] = segment.generation[slot]

    @invariant()
    def slots_are_conserved(self) -> None:
        self.pool.check_integrity()
        found = {
            (segment.id, slot): (SlotState(state), segment.owner[slot])
            for segment in self.of(Phase.ASSIGNED)
            for slot, state in enumerate(segment.state)
            if state != SlotState.FREE
        }
        assert found == self.used


@dataclass
class Held:
    lease: Lease
    until: int
    expired: bool = False


class LeaseMachine(RuleBasedStateMachine):
    """Leases that are renewed, expire, are released and revoked."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.groups = [EngineGroup("alice", "a"), EngineGroup("bob", "b")]
        self.now = 0
        self.held: dict[LeaseId, Held] = {}

    def some(self, pick: int) -> Held:
        return self.held[sorted(self.held)[pick % len(self.held)]]

    @rule(group=st.integers(0, 1), space=spaces, ttl=st.integers(1, 50))
    def open(self, group: int, space: NamespaceId, ttl: int) -> None:
        lease = self.book.open(self.groups[group], WorkerId(1), space, self.now + ttl)
        assert lease.id not in self.held
        self.held[lease.id] = Held(lease, self.now + ttl)

    @precondition(lambda self: self.held)
    @rule(pick=anything, ttl=st.integers(0, 80))
    def renew(self, pick: int, ttl: int) -> None:
        held = self.some(pick)
        if not held.expired:
            self.book.renew(held.lease, self.now + ttl)
            held.until = max(held.until, self.now + ttl)
            assert held.lease.expires_at == held.until

    @precondition(lambda self: self.held)
    @rule(pick=anything)
    def close(self, pick: int) -> None:
        held = self.some(pick)
        del self.held[held.lease.id]
        self.book.close(held.lease)

    @rule(ms=st.integers(0, 60))
    def pass_time(self, ms: int) -> None:
        self.now += ms
        over = [held for held in self.held.values() if not held.expired and held.until <= self.now]
        assert self.book.expire(self.now) == len(over)
        for held in over:
            held.expired = True

    @invariant()
    def the_book_is_what_the_model_says(self) -> None:
        assert {id: lease.expired for id, lease in self.book.leases.items()} == {
            id: held.expired for id, held in self.held.items()
        }
        for group in self.groups:
            assert group.leases == {id for id, held in self.held.items() if held.lease.group is group}
        for space in (NamespaceId(1), NamespaceId(2)):
            expired = [h for h in self.held.values() if h.expired and h.lease.namespace == space]
            for grace_ms in (0, 30):
                found = self.book.revocable(space, self.now, grace_ms)
                if found is not None:
                    assert found in [held.lease for held in expired]
                    assert found.expires_at + grace_ms <= self.now
                elif grace_ms == 0:
                    assert not expired


class TableMachine(RuleBasedStateMachine):
    """The prefix tree and the lists of rows: a dict of parents, and two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ChunkTable()
        self.parent: dict[int, int] = {}
        self.lists: list[tuple[LinkedRows, list[int]]] = [(LinkedRows(), []), (LinkedRows(), [])]
        self.number = 0

    def some(self, pick: int) -> int:
        return sorted(self.parent)[pick % len(self.parent)]

    @rule()
    def new(self) -> None:
        self.number += 1
        row = self.table.new_row(1, ChunkKey(b"%d" % self.number), 0)
        assert row not in self.parent
        self.parent[row] = NONE

    @precondition(lambda self: len(self.parent) > 1)
    @rule(child=anything, above=anything)
    def attach(self, child: int, above: int) -> None:
        row, parent = self.some(child), self.some(above)
        up = parent
        while up not in (NONE, row):  # no circle: a chunk's key covers what is before it
            up = self.parent[up]
        if up == row:
            return
        self.table.leave_parent(row)
        self.table.attach(row, parent)
        self.parent[row] = parent

    @precondition(lambda self: self.parent)
    @rule(pick=anything, which=st.integers(0, 1), newest=st.booleans())
    def link(self, pick: int, which: int, newest: bool) -> None:
        row = self.some(pick)
        if self.table.flags[row] & LISTED:
            return
        rows, model = self.lists[which]
        if newest:
            self.table.link_newest(rows, row)
            model.append(row)
        else:
            self.table.link_oldest(rows, row)
            model.insert(0, row)

    @precondition(lambda self: any(model for _, model in self.lists))
    @rule(pick=anything, which=st.integers(0, 1))
    def unlink(self, pick: int, which: int) -> None:
        rows, model = self.lists[which]
        if model:
            row = model.pop(pick % len(model))
            self.table.unlink(rows, row)

    @precondition(lambda self: self.parent)
    @rule(pick=anything)
    def free(self, pick: int) -> None:
        row = self.some(pick)
        for rows, model in self.lists:
            if row in model:
                model.remove(row)
                self.table.unlink(rows, row)
        self.table.free_row(row)
        del self.parent[row]
        for child, parent in self.parent.items():
            if parent == row:
                self.parent[child] = NONE

    @invariant()
    def the_tree_is_what_the_model_says(self) -> None:
        assert self.table.rows_used == len(self.parent)
        for row, parent in self.parent.items():
            assert self.table.parent[row] == parent
            children = sorted(self.table.children(row))
            assert children == sorted(child for child, above in self.parent.items() if above == row)

    @invariant()
    def the_lists_are_what_the_model_says(self) -> None:
        for rows, model in self.lists:
            assert list(self.table.walk(rows)) == model and rows.count == len(model)
            assert (rows.oldest, rows.newest) == ((model[0], model[-1]) if model else (NONE, NONE))


class PolicyMachine(RuleBasedStateMachine):
    """Victims: what no job needs, least recently used first; then what is needed, latest job first."""

    @initialize(kind=st.sampled_from(("hints", "lru", "fifo")))
    def start(self, kind: str) -> None:
        self.table = ChunkTable()
        spec = NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 4096),))
        self.space = Namespace(NamespaceId(1), "alice", spec, b"f", 1, (4096,), 4096)
        self.kind = kind
        self.policy = POLICIES[kind](self.table, batch_min=2)
        self.space.dram, self.space.ssd = self.policy.candidates(), self.policy.candidates()
        self.order: list[int] = []
        """Evictable rows, least recently used first; after ranks were taken back only what is in it counts."""
        self.exact = True
        self.rank: dict[int, int] = {}
        self.out: list[int] = []
        """Rows that are pinned."""
        self.now = 0

    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        rows = []
        for _ in range(count):
            self.now += 1
            row = self.table.new_row(1, ChunkKey(b"%d" % self.now), self.now)
            self.table.give_shards(row, 1)
            self.table.ready[row] = 1
            self.table.tokens[row] = 4
            rows.append(row)
        self.come(rows)

    def come(self, rows: list[int]) -> None:
        self.now += 1
        for row in rows:
            self.table.used_at[row] = self.now
        self.policy.add(self.space.dram, rows)
        self.order += reversed(rows)

    @precondition(lambda self: self.order)
    @rule(pick=anything)
    def pin(self, pick: int) -> None:
        row = self.order.pop(pick % len(self.order))
        self.policy.remove(self.space.dram, row)
        self.out.append(row)

    @precondition(lambda self: self.out)
    @rule()
    def unpin(self) -> None:
        self.come(self.out)
        self.out = []

    @precondition(lambda self: self.order or self.out)
    @rule(picks=st.lists(anything, max_size=6))
    def publish(self, picks: list[int]) -> None:
        rows = sorted(self.order + self.out)
        picked = dict.fromkeys(rows[pick % len(rows)] for pick in picks)
        rank = {row: place for place, row in enumerate(picked)}
        if self.kind == "hints":
            self.exact = self.exact and self.rank.keys() <= rank.keys()
            self.rank = rank
        self.policy.set_ranks({self.space.id: self.space}, dict(rank))

    @invariant()
    def victims_are_what_the_model_says(self) -> None:
        if not hasattr(self, "order"):
            return
        found = list(self.policy.victims(self.space.dram, 1_000))
        if self.kind == "fifo":
            assert found == sorted(self.order, key=lambda row: (self.table.born_at[row], row))
            return
        unneeded = [row for row in self.order if row not in self.rank]
        needed = sorted((row for row in self.order if row in self.rank), key=lambda row: -self.rank[row])
        if self.exact:
            assert found[: len(unneeded)] == unneeded
        assert set(found[: len(unneeded)]) == set(unneeded)
        assert found[len(unneeded) :] == needed
        for row in self.order:
            assert bool(self.table.flags[row] & RANKED) == (row in self.rank)
        latest = max(self.rank.values(), default=0) // 2
        spared = list(self.policy.victims(self.space.dram, 1_000, latest))
        assert spared == found[: len(unneeded)] + [row for row in needed if self.rank[row] > latest]


SPEC = NamespaceSpec("m", b"w", "l", 16, (GroupSpec("g", 4096, 2),))
SPACES = (NamespaceRecord(1, "alice", SPEC), NamespaceRecord(2, "bob", replace(SPEC, model="n")))
SLAB = SlabRow(SlabId(0), 8192, 100)
Chunks = dict[tuple[int, ChunkKey], ChunkRecord]


class IndexMachine(RuleBasedStateMachine):
    """Transactions that put and delete, and restarts; after each it holds what two dicts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.chunks: Chunks = {}
        self.sessions: dict[tuple[int, bytes], SessionRecord] = {}
        self.version = 0
        self.index = self.opened()
        assert self.index.add_slab(*SLAB)[0] is DiskResult.OK
        self.write(namespaces=SPACES)

    def teardown(self) -> None:
        self.index.close()
        self.folder.cleanup()

    def opened(self) -> Index:
        path = str(Path(self.folder.name) / "ssd" / "index")
        return Index(path, bytes_max=2 << 20, direct=False, slab_bytes=1 << 20, disk=RealDisk())

    def write(self, **fields: object) -> None:
        result, why = self.index.write(WriteIndex(OpId(1), (), **fields))  # type: ignore[arg-type]
        assert result is DiskResult.OK, why

    @rule(
        puts=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 5)), max_size=4, unique=True),
        deletes=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 5)), max_size=4),
    )
    def change_chunks(self, puts: list[tuple[int, int]], deletes: list[tuple[int, int]]) -> None:
        gone = {(space, ChunkKey(b"%d" % number)) for space, number in deletes}
        for where in gone:
            self.chunks.pop(where, None)
        records = []
        free = iter(sorted(set(range(100)) - {p.slot for c in self.chunks.values() for p in c.places}))
        for space, number in puts:
            self.version += 1
            key = ChunkKey(b"%d" % number)
            places = tuple(DiskPlace(SlabId(0), next(free), self.version) for _ in range(2))
            record = ChunkRecord(space, key, 16, 0, b"m" * 16, places, (self.version, 2**64 - 1))
            records.append(record)
            self.chunks[space, key] = record
        self.write(chunks=tuple(records), chunks_deleted=tuple(sorted(gone)))

    @rule(
        space=st.integers(1, 2),
        name=st.sampled_from((b"", b"s", b"ss")),
        count=st.sampled_from((0, 1, 249, 600)),
    )
    def put_session(self, space: int, name: bytes, count: int) -> None:
        self.version += 1
        entries = tuple(SessionEntry(ChunkKey(b"%d" % number), 16 * number, 16) for number in range(count))
        record = self.sessions[space, name] = SessionRecord(space, name, self.version, entries)
        self.write(sessions=(record,))

    @precondition(lambda self: self.sessions)
    @rule(pick=anything)
    def delete_session(self, pick: int) -> None:
        where = sorted(self.sessions)[pick % len(self.sessions)]
        del self.sessions[where]
        self.write(sessions_deleted=(where,))

    @rule()
    def restart(self) -> None:
        self.index.close()
        self.index = self.opened()

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        specs = {record.number: record.spec for record in self.index.namespaces()}
        found = {
            (batch.namespace, key): (tuple(batch.slot[row].tolist()), tuple(batch.checksum[row].tolist()))
            for batch in self.index.chunks(specs, (SLAB,), direct=False)
            for row, key in enumerate(batch.keys)
        }
        assert found == {
            where: (tuple(place.slot for place in record.places), record.checksums)
            for where, record in self.chunks.items()
        }
        sessions = {(one.namespace, one.session): one for one in self.index.sessions([1, 2])}
        assert sessions == self.sessions


def quick(machine: type[RuleBasedStateMachine], examples: int = 60, steps: int = 50) -> type:
    machine.TestCase.settings = settings(QUICK, max_examples=examples, stateful_step_count=steps)
    return machine.TestCase


test_the_pool_is_what_the_model_says = quick(PoolMachine)
test_leases_are_what_the_model_says = quick(LeaseMachine)
test_tree_and_lists_are_what_the_model_says = quick(TableMachine)
test_the_policy_is_what_the_model_says = quick(PolicyMachine)
test_the_index_is_what_the_model_says = quick(IndexMachine, examples=15, steps=12)
