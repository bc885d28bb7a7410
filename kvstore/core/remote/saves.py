"""What this node puts into the REMOTE store.

    write-through   every chunk, soon after it is whole here
    on-evict        what is about to leave DRAM (the next victims of an arena that is almost full)
    off             nothing; what others put there is read all the same

    resident -> queued -> pinned, StoreChunks -> ChunksStored: known to be there

A chunk is admitted by its value: while this node's share of the store (`remote_bytes_max`) has room, all; then what
somebody named (a session, a hint, a durable commit), and what promises more hits per byte than the oldest of what this
node has put there, which goes for it. Nothing waits for a write: a store that is slow or away costs the pins of
`remote_writes_in_flight_max` bytes at most, and the queue is bounded.

What is forgotten there: `forgets.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from math import inf

from kvstore.core import events as ev
from kvstore.core.chunks import DERIVED, DOOMED, KEPT, NONE
from kvstore.core.namespaces import Namespace
from kvstore.core.rate import AtOnce
from kvstore.core.remote.sources import Sources
from kvstore.core.state import State
from kvstore.keys import tenant_mark
from kvstore.types import ChunkKey, DiskResult, Extents, Found, Millis, NamespaceId, OpId, Reason, Tier

QUEUED_MAX = 8_192
"""Chunks that wait for their write; the oldest are passed over."""
CHUNKS_PER_OP_MAX = 32
LOOKED_AT_PER_STEP_MAX = 512
ALMOST_FULL = 8
"""An arena of which less than such a part is free is about to evict,"""
VICTIMS_AHEAD = 64
"""and these next victims of each namespace are written first."""
MAKERS_MAX = 64
"""A record names all makers of its chunk, and its tenant as one, or they could not be recalled: a chunk of as many
stays here."""


GONE = (Reason.FORGOTTEN, Reason.RECALLED)


@dataclass(slots=True)
class Store:
    rows: list[int]
    keys: list[ChunkKey]
    bytes: int
    deadline: Millis
    late: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk that this node has put there."""

    tenant: str
    bytes: int
    worth: float
    """When it was admitted, in expected hits per byte and millisecond."""


class RemoteSaves:
    def __init__(self, state: State, sources: Sources) -> None:
        self.state = state
        self._sources = sources
        self.name = state.limits.remote_store
        """Of the source that takes writes; empty: there is none."""
        self.to_store: OrderedDict[int, tuple[ChunkKey, Millis]] = OrderedDict()
        """By row: which chunk, and since when it waits."""
        self.stores: dict[OpId, Store] = {}
        limits = state.limits
        self._at_once = AtOnce(
            limits.remote_writes_in_flight_max,
            limits.remote_deadline_ms,
            first=limits.remote_first_bytes,
            least=limits.remote_least_bytes,
        )
        self.stored: OrderedDict[tuple[NamespaceId, ChunkKey], Stored] = OrderedDict()
        self.stored_bytes = 0
        self.stored_of: dict[str, OrderedDict[tuple[NamespaceId, ChunkKey], None]] = {}
        """The same by tenant, of those with a quota,"""
        self.bytes_of: Counter[str] = Counter()
        """and how many bytes each tenant has there."""
        self._dropped: list[tuple[Namespace, ChunkKey]] = []

    def __repr__(self) -> str:
        return f"RemoteSaves({self.name or 'none'}: {len(self.to_store)} to store, {len(self.stores)} writes)"

    @property
    def active(self) -> bool:
        return bool(self.name)

    @property
    def writes(self) -> bool:
        return self.active and self.state.limits.remote_writes != "off"

    # --------------------------------------------------------------------------------------------------- each step

    def pump(self) -> None:
        if not self.name:
            return
        came = self.state.arrivals
        if came:
            self.state.arrivals = []
            if self.state.limits.remote_writes == "write-through":
                self._queue(came)
        if self.to_store and self._sources.by_name[self.name].is_well:
            self._start()
        if self._dropped:
            self._drop()

    def tick(self) -> None:
        if not self.name:
            return
        state = self.state
        if state.limits.remote_writes == "on-evict":
            for namespace in state.namespaces.values():
                self._queue_victims(namespace)
        for store in self.stores.values():
            if not store.late and store.deadline <= state.now:
                store.late = True
                state.counters["remote_stores_late"] += 1
                self._sources.is_late(self.name, "a write missed its deadline")

    # ------------------------------------------------------------------------------------------------------- writes

    def _queue(self, rows: Iterable[int]) -> None:
        state = self.state
        for row in rows:
            if row not in self.to_store and state.is_hit(row) and not self._is_there(row):
                self.to_store[row] = state.chunks.key[row], state.now
        while len(self.to_store) > QUEUED_MAX:
            self.to_store.popitem(last=False)
            state.counters["remote_chunks_passed_over"] += 1

    def _queue_victims(self, namespace: Namespace) -> None:
        state = self.state
        if namespace.retired or not namespace.visible:
            return
        for size in set(namespace.slot_bytes):
            slab = state.pool.classes.get((namespace.id, size))
            if slab is None:
                return
            capacity = sum(segment.capacity for segment in slab.segments.values())
            if slab.free * ALMOST_FULL > capacity or state.pool.idle:
                left, quota = (
                    state.quotas.dram_left(namespace.tenant),
                    state.quotas.of(Tier.DRAM, namespace.tenant),
                )
                if left * ALMOST_FULL > quota:
                    return
        self._queue(list(state.policy.victims(namespace.dram, VICTIMS_AHEAD)))

    def _is_there(self, row: int) -> bool:
        name = (NamespaceId(self.state.chunks.namespace[row]), self.state.chunks.key[row])
        return name in self.stored or self._sources.has(name, self.name)

    def _start(self) -> None:
        state = self.state
        limits = state.limits
        in_flight = sum(store.bytes for store in self.stores.values())
        looked_at = 0
        oldest = next(iter(self.to_store.values()))[1]
        if len(self.to_store) < CHUNKS_PER_OP_MAX and state.now - oldest < limits.remote_linger_ms:
            return
        while self.to_store and in_flight < self._at_once.bytes:
            rows: list[int] = []
            size = 0
            while self.to_store and len(rows) < CHUNKS_PER_OP_MAX and size < self._at_once.op_bytes:
                looked_at += 1
                if looked_at > LOOKED_AT_PER_STEP_MAX:
                    break
                row, (key, _) = next(iter(self.to_store.items()))
                if rows and state.chunks.namespace[row] != state.chunks.namespace[rows[0]]:
                    break
                del self.to_store[row]
                if state.chunks.key[row] == key and self._admit(row):
                    rows.append(row)
                    size += state.namespace_of(row).payload_bytes
            if rows:
                self._store(rows, size)
                in_flight += size
            if looked_at > LOOKED_AT_PER_STEP_MAX:
                return

    def _admit(self, row: int) -> bool:
        """Whether it is worth its bytes there; what goes for it is dropped."""
        state = self.state
        chunks = state.chunks
        namespace = state.namespace_of(row)
        if namespace.retired or namespace.spec.is_of_one_node or not state.is_hit(row) or self._is_there(row):
            return False
        if len(state.makers_of(row)) >= MAKERS_MAX:
            return False
        size = namespace.payload_bytes
        share = state.limits.remote_bytes_max
        quota = state.quotas.of(Tier.REMOTE, namespace.tenant)
        if size > share:
            return False
        named = bool(chunks.flags[row] & KEPT or chunks.refs[row] or row in state.policy.rank)
        worth = state.policy.worth_of(row) / size
        own = self._giving_way(
            self.stored_of.get(namespace.tenant, ()),
            quota - self.bytes_of[namespace.tenant],
            size,
            inf if named else worth,
        )
        if own is None:
            state.counters["remote_quota_refusals"] += 1
            return False
        freed = sum(self.stored[name].bytes for name in own)
        others = (name for name in self.stored if name not in own)
        victims = self._giving_way(others, share - self.stored_bytes + freed, size, inf if named else worth)
        if victims is None:
            state.counters["remote_chunks_not_admitted"] += 1
            return False
        for name in (*own, *victims):
            self._forget_stored(name)
            found = state.namespaces.get(name[0])
            if found is not None:
                self._dropped.append((found, name[1]))
        name = namespace.id, chunks.key[row]
        self.stored[name] = Stored(namespace.tenant, size, worth)
        self.stored_bytes += size
        self.bytes_of[namespace.tenant] += size
        if state.quotas.has(Tier.REMOTE, namespace.tenant):
            self.stored_of.setdefault(namespace.tenant, OrderedDict())[name] = None
        return True

    def _giving_way(
        self, names: Iterable[tuple[NamespaceId, ChunkKey]], room: int, size: int, worth: float
    ) -> dict[tuple[NamespaceId, ChunkKey], None] | None:
        """Which of these, the oldest first, go until there is `room` for so many bytes; None: too few that are worth
        less, or they come again."""
        going: dict[tuple[NamespaceId, ChunkKey], None] = {}
        if room >= size:
            return going
        for name in islice(names, LOOKED_AT_PER_STEP_MAX):
            if self._comes_again(name):
                continue
            stored = self.stored[name]
            if stored.worth > worth:
                return None
            going[name] = None
            room += stored.bytes
            if room >= size:
                return going
        return None

    def _comes_again(self, name: tuple[NamespaceId, ChunkKey]) -> bool:
        """It is about to leave DRAM, too: two that went for each other would be written without end."""
        state = self.state
        found = state.namespaces.get(name[0])
        row = found.index.get(name[1], NONE) if found is not None else NONE
        return state.limits.remote_writes == "on-evict" and row != NONE and state.is_hit(row)

    def was_forgotten(self, name: tuple[NamespaceId, ChunkKey]) -> None:
        """It is not there any more, or is refused by whoever reads it."""
        self._forget_stored(name)

    def _forget_stored(self, name: tuple[NamespaceId, ChunkKey]) -> None:
        stored = self.stored.pop(name, None)
        if stored is not None:
            self.stored_bytes -= stored.bytes
            self.bytes_of[stored.tenant] -= stored.bytes
            if mine := self.stored_of.get(stored.tenant):
                mine.pop(name, None)

    def _store(self, rows: list[int], size: int) -> None:
        state = self.state
        chunks = state.chunks
        namespace = state.namespace_of(rows[0])
        op = state.new_op()
        keys = [chunks.key[row] for row in rows]
        for row in rows:
            state.pin(namespace, row)
        self.stores[op] = Store(rows, keys, size, state.now + state.limits.remote_deadline_ms)
        parents = tuple(
            chunks.key[chunks.parent[row]] if chunks.parent[row] != NONE else ChunkKey(b"") for row in rows
        )
        about = tuple(
            ev.ChunkAbout(
                chunks.tokens[row],
                bool(chunks.flags[row] & DERIVED),
                (*self.state.makers_of(row), tenant_mark(namespace.tenant)),
                parent,
            )
            for row, parent in zip(rows, parents, strict=True)
        )
        sources = Extents.of(state.extents(namespace, rows, range(namespace.shards)))
        state.effects.append(
            ev.StoreChunks(
                op,
                self.name,
                namespace.id,
                namespace.salt,
                tuple(keys),
                about,
                sources,
                state.applied.get(self.name, 0),
            )
        )

    def ended(self, event: ev.ChunksStored) -> None:
        state = self.state
        under_way = sum(store.bytes for store in self.stores.values())
        store = self.stores.pop(event.op)
        took_ms = state.now - store.deadline + state.limits.remote_deadline_ms
        self._at_once.ended(took_ms, under_way, failed=DiskResult.OK not in event.results)
        namespace = state.namespace_of(store.rows[0])
        wheres = event.wheres or (None,) * len(store.keys)
        for row, key, result, where in zip(store.rows, store.keys, event.results, wheres, strict=True):
            if result is DiskResult.OK:
                state.counters["remote_chunks_stored"] += 1
                state.counters["remote_bytes_stored"] += namespace.payload_bytes
                if not state.chunks.flags[row] & DOOMED:
                    found = Found(namespace.payload_bytes, event.cost_ms, state.chunks.tokens[row], where)
                    self._sources.note_stored(row, self.name, found)
                elif state.chunks.reason[row] in GONE and (namespace.id, key) not in self.stored:
                    self._dropped.append((namespace, key))  # it was written while it was forgotten
            else:
                state.counters["remote_chunks_not_stored"] += 1
                self._forget_stored((namespace.id, key))
        if event.failed:
            self._sources.has_failed(self.name, event.failed)
        elif not store.late:
            self._sources.is_alive(self.name)
        state.unpin(namespace, store.rows, used=False)
        state.drop_transient(store.rows)

    def _drop(self) -> None:
        """What went for others; the records of those that are still there expire all the same."""
        state = self.state
        dropped, self._dropped = self._dropped, []
        dropped.sort(key=lambda one: one[0].id)
        for _, group in groupby(dropped, lambda one: one[0].id):
            mine = list(group)
            keys = tuple(key for _, key in mine)
            state.effects.append(ev.DropChunks(state.new_op(), self.name, mine[0][0].salt, keys))
            for namespace, key in mine:
                self._sources.is_gone((namespace.id, key), self.name)

    def purge_row(self, row: int) -> None:
        """As `purge`, of what was put there since."""
        name = NamespaceId(self.state.chunks.namespace[row]), self.state.chunks.key[row]
        if name in self.stored:
            self._forget_stored(name)
            self._dropped.append((self.state.namespace_of(row), name[1]))

    def purge(self, namespaces: Mapping[NamespaceId, Namespace]) -> None:
        """What this node has put there for these goes; that it is not served again is for `forgets.py` to say."""
        for name in [name for name in self.stored if name[0] in namespaces]:
            self._forget_stored(name)
            self._dropped.append((namespaces[name[0]], name[1]))

    def gauges(self) -> dict[str, float]:
        """For admins; none without a store."""
        if not self.name:
            return {}
        return {
            "remote_chunks_to_store": len(self.to_store),
            "remote_chunks_being_stored": sum(len(store.rows) for store in self.stores.values()),
            "remote_bytes_kept": self.stored_bytes,
        }

    @property
    def behind(self) -> bool:
        """Whether something of this node is on its way there that is about to be taken."""
        return bool(self.stores)
