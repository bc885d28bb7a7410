"""The simulator's world with a REMOTE store that nodes share, by the production core and the production records.

The store holds real records (`tiers/remote/records.py`) of eight bytes of payload, and real tombstones. It is slow,
hangs, fails, is wiped, put back from an older copy; its records are flipped, cut short, swapped; another node writes
there too. What the daemon serves out of it was written by somebody for that very key and shard, and not before a forget
of it that was answered as durable.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.core.chunks import FETCHING, NONE
from kvstore.keys import is_tenant_mark, tenant_mark
from kvstore.tiers.remote import records, tombstones
from kvstore.tiers.remote.tombstones import Forgotten, Journal, Tombstones
from kvstore.types import ChunkKey, DiskResult, Found, NamespaceId, OpId, Reason, Tier, WorkerId

from .cluster import OPS, Cluster
from .disk import GARBAGE
from .told_sessions import SESSION_OPS, ToldSessions
from .world import PAGE, tag

REMOTE_OPS = (
    *(ev.LookUpChunks, ev.FetchChunks, ev.StoreChunks, ev.ForgetChunks, ev.DropChunks, ev.TenantPurged),
    *SESSION_OPS,
)
OTHER_NODE = 9
"""The variant of what another node computes."""
SALT = b"salt of the simulation"
WHOLE = ChunkKey(b"")
"""In place of a key: all of a namespace, or of a tenant."""
TROUBLES = (*("",) * 5, "fails", "wiped", "older", "flipped", "cut", *("swapped",) * 3, "another node")
"""What may happen at a fetch."""


def encoded(content: int) -> bytes:
    return content.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Came:
    """A chunk that a fetch has brought, and the core is about to hear of."""

    namespace: NamespaceId
    key: ChunkKey
    contents: tuple[int, ...]
    makers: tuple[bytes, ...]
    made_at: int
    heeds: bool
    """Whoever made it would have heeded what this node has heard of."""
    is_peers: bool = False


class RemoteCluster(Cluster):
    FILLING_OPS = (*Cluster.FILLING_OPS, ev.FetchChunks)
    SOURCES: tuple[str, ...] = ("remote",)
    TROUBLES: tuple[str, ...] = TROUBLES

    def __init__(self, listener: Any, chance: random.Random, **limits: Any) -> None:
        self.remote: dict[str, bytes] = {}
        """Records by name."""
        self.told = Tombstones()
        """What the store has,"""
        self.journals = {name: Journal() for name in self.SOURCES}
        """and what this node knows, and has noted and not told, over its restarts, by channel."""
        self._copy: tuple[dict[str, bytes], Tombstones] = ({}, Tombstones())
        number = chance.random()
        self.weather = random.Random(f"remote {number}")
        self._link_pages_per_s = random.Random(f"link {number}").choice((0, 0, 50, 500))
        """Of what comes and of what goes, each; 0: as they like."""
        self._link_free_at: dict[type, int] = {}
        self._carried_ms = 0
        """By the link, of the last op."""
        self.sessions = ToldSessions(random.Random(f"sessions {chance.random()}"))
        self._sharing: dict[OpId, ev.ShareSessions] = {}
        self.calm = False
        """From now on nothing goes wrong."""
        self._emitted: dict[OpId, int] = {}
        """When the core asked for it, by the same count as the records' times."""
        self._news: dict[str, list[Forgotten]] = {name: [] for name in self.SOURCES}
        """What this node has read that another one forgot, and the core was not told of."""
        self._told_of: dict[str, ev.Heeded | None] = {}
        """How far the core was told that each journal goes."""
        self._saved_at: dict[tuple[NamespaceId, ChunkKey], int] = {}
        """When each chunk was committed last."""
        self._numbers: dict[bytes, set[NamespaceId]] = {}
        """Of each namespace, by its salt, those that it had before a crash: one that nothing was stored of yet gets
        another one then, and what was put elsewhere has the content of the first."""
        self.purged_beyond: set[bytes] = set()
        """Marks of the tenants of which the edge has removed what it kept."""
        self._came: dict[OpId, list[Came]] = {}
        self._orders = 0
        self._written_at: dict[bytes, int] = {}
        """By record: when it was written."""
        self._forgotten_at: dict[tuple[bytes, ChunkKey], int] = {}
        self._heeded_at: dict[tuple[bytes, ChunkKey], int] = {}
        """When the core was told that another node has forgotten it."""
        self._heeded_count: dict[tuple[str, Forgotten], int] = {}
        """By channel: the count of each forget when the core was told of it. A start may tell of it again."""
        self._others_at: dict[tuple[bytes, ChunkKey], int] = {}
        """At which count another node has forgotten it last."""
        self._others_told_at: dict[tuple[bytes, ChunkKey], int] = {}
        """And when."""
        self._of_others: set[bytes] = set()
        """Records that another node has written."""
        self._purge_asked: dict[tuple[WorkerId, int], int] = {}
        """By request: when a purge was asked for."""
        self._purged_at: dict[bytes, int] = {}
        self._purge_asked_last: dict[bytes, tuple[WorkerId, int]] = {}
        """Likewise, who asked last."""
        self._forget_asked: ev.Ticket | None = None
        """The Forget that was asked last."""
        self._postponed: defaultdict[str, list[OpId]] = defaultdict(list)
        """By source: what was answered as not told, and what the core is to hear of once more."""
        """By mark of the tenant: when what was answered as purged was asked for."""
        self._heeded_by_store_at: dict[tuple[bytes, ChunkKey], int] = {}
        """Likewise, by the REMOTE store, whose count its records say."""
        self._heard_orders: dict[tuple[bytes, ChunkKey], int] = {}
        """When the core heard last that it was forgotten, or all of its namespace."""
        self._asked_orders: dict[tuple[bytes, ChunkKey], int] = {}
        """When the core asked last who has it."""
        self._fetching: dict[tuple[NamespaceId, ChunkKey], int] = {}
        """Since when it has been on its way."""
        self._marks_heard: list[tuple[str, bytes, int, bool]] = []
        """Where the core heard of a tenant purged by another node, and when, perhaps again; it has yet to heed it."""
        super().__init__(
            listener,
            chance,
            sources=self.SOURCES,
            remote_store="remote",
            forgets_told=self.SOURCES,
            sessions_told="remote",
            sessions_told_per_s=self.weather.choice((10, 1_000)),
            sessions_told_max=self.weather.choice((3, 1_000)),
            remote_writes=self.weather.choice(("on-evict", "write-through")),
            remote_bytes_max=self.weather.choice((1 << 50, 40 * 4096)),
            remote_bytes_in_flight_max=64 * PAGE,
            remote_first_bytes=8 * PAGE,
            remote_least_bytes=PAGE,
            remote_writes_in_flight_max=self.weather.choice((4, 64)) * 4096,
            lookup_wait_ms=20,
            lookup_deadline_ms=100,
            lookup_fresh_ms=1_000,
            lookup_absent_ms=100,
            remote_deadline_ms=300,
            source_pause_ms=100,
            source_pause_max_ms=500,
            **limits,
        )

    def _begin(self) -> list[ev.Effect]:
        self._link_free_at = {}
        effects = super()._begin()
        self.hold = {*OPS, *REMOTE_OPS}
        self.sessions.begins()
        self._sharing.clear()
        self._emitted.clear()  # numbers of ops begin anew
        self._marks_heard.clear()
        self._postponed.clear()
        self._forget_asked = None
        self._fetching.clear()
        for name, journal in self.journals.items():
            self._news[name] = journal.behind(self.store.state.heeded.get(name))
        return effects

    @property
    def known(self) -> Tombstones:
        return self.journals["remote"].tombstones

    @property
    def pending(self) -> dict[Forgotten, None]:
        return self.journals["remote"].pending

    def crash(self, chance: random.Random | None = None, *, power: bool = False, **changed: Any) -> None:
        """And what the journals say that the index may still have goes, before anything is served."""
        for namespace in self.store.state.namespaces.values():
            self._numbers.setdefault(namespace.salt, set()).add(namespace.id)
        super().crash(chance, power=power, **changed)
        promised = set(self.promised)
        may_go = {chunk for chunk in promised if self._is_to_be_heeded(*chunk)}
        for name in self.SOURCES:
            self.step(self._tell_news(name))
        while self.store.forgets.going or self.store.recalls.going:
            self.step(ev.Idle())
        lost = promised - self.promised - may_go
        assert not lost, f"saved after they were forgotten, and dropped by a start: {lost}"
        for chunk in self.platter.chunks:
            self._check_restored(NamespaceId(chunk[0]), chunk[1])

    def _is_to_be_heeded(self, namespace: NamespaceId, key: ChunkKey) -> bool:
        """Whether a forget of it was not carried out to the end, as far as the index knows."""
        found = self.store.state.namespaces[namespace]
        mark = tenant_mark(found.tenant)
        for name, journal in self.journals.items():
            heeded = self.platter.heeded.get(name)
            for (digest, forgotten, maker), position in journal.positions.items():
                behind = heeded is None or heeded.journal != journal.name or position > heeded.position
                about = digest == found.salt and forgotten in (key, WHOLE)
                if behind and (about or maker == mark or (maker and not is_tenant_mark(maker))):
                    return True
        return False

    def _check_restored(self, namespace: NamespaceId, key: ChunkKey) -> None:
        """What the index brought back was saved after every forget that the core was told of."""
        state = self.store.state
        found = state.namespaces.get(namespace)
        row = found.index.get(key, NONE) if found is not None else NONE
        if found is None or row == NONE or not state.is_usable(row):
            return
        mark = tenant_mark(found.tenant)
        names = ((found.salt, key), (found.salt, WHOLE), (mark, WHOLE))
        forgotten = max(self._heeded_at.get(name, -1) for name in names)
        assert self._saved_at[namespace, key] > forgotten, f"a start brings back what was forgotten: {key!r}"

    def _note_committed(self, shard: Any, what: int) -> None:
        super()._note_committed(shard, what)
        self._orders += 1
        self._saved_at[shard[0], shard[1]] = self._orders

    def _tell_news(self, name: str) -> ev.ForgottenElsewhere:
        """In the order in which it was read; or that nothing is new."""
        journal = self.journals[name]
        news, self._news[name] = tuple(dict.fromkeys(self._news[name])), []
        self._told_of[name] = reached = journal.reached(name)
        untold = len(journal.pending)
        return ev.ForgottenElsewhere(name, news, journal.tombstones.count, heeded=reached, untold=untold)

    def _read_elsewhere(self, name: str, told: Tombstones, *, is_other: bool = False) -> None:
        """As `Book.learn`."""
        journal = self.journals[name]
        for forgotten, count in told.at.items():
            known = journal.tombstones.at.get(forgotten, 0)
            if known < count or (is_other and known != count):
                journal.note(forgotten)
                self._news[name].append(forgotten)
            journal.tombstones.add(forgotten, count)

    def delay_ms(self, op: Any, chance: random.Random) -> int:
        """Now and then beyond the deadline of the core."""
        self._orders += 1
        self._emitted[op.op] = self._orders
        if isinstance(op, ev.LookUpChunks):
            self._asked_orders |= {(op.digest, key): self._orders for key in op.keys}
        if isinstance(op, ev.ShareSessions):
            self._sharing[op.op] = op
            self.sessions.emitted(op, self.store)
        if isinstance(op, ev.ForgetChunks) and op.source == "remote":
            padded = [(digest, key, maker and maker.ljust(16)) for digest, key, maker in op.forgotten]
            self._postpone("remote", padded)
        usual: int = chance.choice((0, 1, 3, 10)) + self._carry(op)
        return usual if self.calm else usual + chance.choice((*(0,) * 12, 50, 350, 1_500))

    def _carry(self, op: Any) -> int:
        """How long until the link has carried it, behind what goes the same way."""
        self._carried_ms = 0
        if not self._link_pages_per_s or not isinstance(op, ev.FetchChunks | ev.StoreChunks):
            return 0
        pages = sum((op.targets if isinstance(op, ev.FetchChunks) else op.sources).length) // PAGE
        free_at = max(self._link_free_at.get(type(op), 0), self.now) + 1_000 * pages // self._link_pages_per_s
        self._link_free_at[type(op)] = free_at
        self._carried_ms = free_at - self.now
        return self._carried_ms

    def _postpone(self, name: str, forgotten: Sequence[Forgotten]) -> None:
        for one in forgotten:
            self.journals[name].pending[one] = None
            self.journals[name].note(one)
            self._is_heard_again(name, one)  # it is this node's own

    def _trouble(self, troubles: Sequence[str]) -> str:
        """What goes wrong with an op of the source; empty: nothing."""
        return "" if self.calm else self.weather.choice(troubles)

    # --------------------------------------------------------------------------------------------------- performing

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        if not isinstance(effect, REMOTE_OPS):
            super()._perform_op(effect, fails=fails, spoil=spoil)
            return
        trouble = self._trouble(self.TROUBLES)
        if trouble == "another node" and isinstance(effect, ev.FetchChunks | ev.StoreChunks):
            self._other_node_forgets(effect)
        match effect:
            case ev.LookUpChunks():
                self._inbox.append(self._look_up(effect, trouble))
            case ev.FetchChunks():
                self._inbox.append(self._fetch(effect, trouble))
            case ev.StoreChunks():
                self._inbox.append(self._store_away(effect, trouble))
            case ev.ForgetChunks():
                self._answer_forget("remote", effect.op, self._forget_away(trouble))
            case ev.ForgetSessions():
                self._inbox.append(self.sessions.forget(effect))
            case ev.TenantPurged():
                self.purged_beyond.add(effect.mark)
                self._inbox.append(ev.PurgedBeyond(effect.op))
            case ev.ShareSessions() | ev.LookUpSessions():
                self._inbox.append(self.sessions.perform(effect, trouble))
            case ev.DropChunks():
                for key in effect.keys:
                    self.remote.pop(records.name_of(effect.digest, key, 0, SALT), None)
        if self._news["remote"] or isinstance(effect, ev.ForgetChunks):
            self._inbox.append(self._tell_news("remote"))

    def _look_up(self, effect: ev.LookUpChunks, trouble: str) -> ev.ChunksLookedUp:
        if trouble == "fails":
            return ev.ChunksLookedUp(effect.op, failed="as told")
        found: list[Found | None] = []
        for key in effect.keys:
            record = self.remote.get(records.name_of(effect.digest, key, 0, SALT))
            seen = records.peek(record, namespace=effect.digest, key=key) if record else None
            found.append(None if seen is None else Found(seen[1], 1.0, seen[0]))
        return ev.ChunksLookedUp(effect.op, tuple(found))

    def _spoil(self, name: str, trouble: str) -> bytes | None:
        """The record as it is read."""
        record = self.remote.get(name)
        if record is None or trouble not in ("flipped", "cut", "swapped"):
            return record
        if trouble == "flipped":
            at = self.weather.randrange(len(record))
            return record[:at] + bytes([record[at] ^ 1 << self.weather.randrange(8)]) + record[at + 1 :]
        if trouble == "cut":
            return record[: self.weather.randrange(len(record))]
        return self.weather.choice(sorted(self.remote.values()))

    def _fetch(self, effect: ev.FetchChunks, trouble: str) -> ev.ChunksFetched:
        """As `backend.judge`, with memory of numbers."""
        if trouble == "wiped":
            self.remote, self.told = {}, Tombstones()
            self._lose_unread()
        elif trouble == "older":
            kept, told = self._copy
            self.remote, self.told = dict(kept), replace(told, at=dict(told.at))
            self._lose_unread()
        elif self.weather.random() < 0.1:
            self._copy = dict(self.remote), replace(self.told, at=dict(self.told.at))
        if trouble == "another node":
            self._other_node_writes(effect)
        shards = len(effect.targets) // len(effect.keys)
        failed = trouble == "fails" or not self._catch_up()
        chunks = []
        came = self._came[effect.op] = []
        for number, key in enumerate(effect.keys):
            targets = effect.targets[number * shards : (number + 1) * shards]
            chunk = ev.FetchedChunk(DiskResult.IO_ERROR, why="as told") if failed else None
            contents: list[int] = []
            read: list[bytes] = []
            first: records.Description | None = None
            makers: dict[bytes, None] = {}
            for shard in range(shards if chunk is None else 0):
                data = self._spoil(records.name_of(effect.digest, key, shard, SALT), trouble)
                if data is None:
                    chunk = ev.FetchedChunk(DiskResult.REUSED, why="gone")
                    break
                header = records.read_described(data)
                why = header if isinstance(header, str) else ""
                if not isinstance(header, str):
                    why = records.refusal(
                        header, namespace=effect.digest, key=key, shard=shard, shards=shards, length=8
                    ) or records.refusal_of_payload(header, data[header.size :], SALT)
                    d = header.description
                    first = first or d
                    if (d.token_count, d.derived) != (first.token_count, first.derived):
                        why = why or "its shards differ"
                    makers.update(dict.fromkeys(d.makers))
                if why or isinstance(header, str):
                    chunk = ev.FetchedChunk(DiskResult.CORRUPT, why=why)
                    break
                if self.known.refuses(header.description) or self._is_pending(header.description):
                    chunk = ev.FetchedChunk(DiskResult.REUSED, why="forgotten")
                    break
                self._check_not_forgotten_before(effect.digest, key, data, header.description.makers)
                contents.append(int.from_bytes(data[header.size :], "little"))
                read.append(data)
            for shard, target in enumerate(targets):
                if target.segment in self.memory:
                    self._write(target, contents[shard] if chunk is None else GARBAGE, by=None)
            if chunk is None:
                assert first is not None
                chunk = ev.FetchedChunk(
                    DiskResult.OK,
                    tuple(contents),
                    first.token_count,
                    first.derived,
                    tuple(maker.rstrip() for maker in makers),
                )
                made_at = min(self._written_at.get(each, 0) for each in read)
                heeds = not self._of_others.issuperset(read)
                described = first.makers
                came.append(Came(effect.namespace, key, tuple(contents), described, made_at, heeds))
            chunks.append(chunk)
        return ev.ChunksFetched(effect.op, tuple(chunks), self.known.count)

    def _is_pending(self, d: records.Description) -> bool:
        none = ChunkKey(b"")
        about: list[Forgotten] = [(d.namespace, d.key, b""), (d.namespace, none, b"")]
        about += [(b"", none, maker) for maker in d.makers]
        about += tombstones.quarantines_of(d)
        return any(one in self.pending for one in about)

    def is_forgotten(self, namespace: NamespaceId, key: ChunkKey) -> bool:
        found = self.store.state.namespaces[namespace]
        about: list[Forgotten] = [(found.salt, name, b"") for name in (key, WHOLE)]
        return any(one in self.known.at for one in (*about, (b"", WHOLE, tenant_mark(found.tenant))))

    def _check_not_forgotten_before(
        self, digest: bytes, key: ChunkKey, record: bytes, makers: Sequence[bytes]
    ) -> None:
        forgotten = self._forgotten_before(digest, key, makers, heard=record not in self._of_others)
        assert self._written_at.get(record, 1 << 60) > forgotten, f"what was forgotten comes back: {key!r}"

    def _forgotten_before(
        self, digest: bytes, key: ChunkKey, makers: Sequence[bytes], *, heard: bool, is_peers: bool = False
    ) -> int:
        """When it was forgotten last: here, and answered so; or by another node, which this one has heard of. A peer
        has dropped what it holds (`is_peers`) when it forgot, not when this node heard of it."""
        times = [self._forgotten_at.get((digest, key), -1)]
        times += [self._purged_at.get(maker, -1) for maker in makers]
        for name in ((digest, key), (digest, WHOLE), *((maker, WHOLE) for maker in makers)) if heard else ():
            heeded, told = self._heeded_at.get(name, -1), self._others_told_at.get(name, -1)
            if not is_peers:
                times.append(heeded)
            elif heeded > told:
                times.append(told)
        return max(times)

    def _describe(self, effect: ev.StoreChunks, number: int, shard: int, content: int) -> bytes:
        about = effect.about[number]
        shards = len(effect.sources) // len(effect.keys)
        payload = encoded(content)
        self._check_generation(effect, effect.keys[number])
        self._orders += 1
        description = records.Description(
            effect.digest,
            effect.keys[number],
            shard,
            shards,
            about.token_count,
            about.derived,
            tuple(maker.ljust(16) for maker in about.makers),
            8,
            records.checksum_of(payload),
            effect.generation,
            self._orders,
        )
        record = records.described(description, payload, SALT) + payload
        self._written_at[record] = self._emitted.get(effect.op, self._orders)
        return record

    def _store_away(self, effect: ev.StoreChunks, trouble: str) -> ev.ChunksStored:
        shards = len(effect.sources) // len(effect.keys)
        results = []
        for number, key in enumerate(effect.keys):
            result = DiskResult.OK
            for shard in reversed(range(shards)):
                source = effect.sources[number * shards + shard]
                content = self._read(source)
                if content != source.checksum:
                    assert self.is_damaged(source), (key, source)
                    result = DiskResult.IO_ERROR  # its checksum would tell the reader
                elif trouble != "fails":
                    name = records.name_of(effect.digest, key, shard, SALT)
                    self.remote[name] = self._describe(effect, number, shard, content)
            results.append(DiskResult.IO_ERROR if trouble == "fails" else result)
        return ev.ChunksStored(effect.op, tuple(results), "as told" if trouble == "fails" else "", 1.0)

    def _other_node_writes(self, effect: ev.FetchChunks) -> None:
        """It computed the same chunks, in other batches: other bytes, as good."""
        shards = len(effect.targets) // len(effect.keys)
        for key in effect.keys:
            old = self.remote.get(records.name_of(effect.digest, key, 0, SALT))
            header = records.read_described(old) if old is not None else ""
            if isinstance(header, str):
                continue
            for shard in range(shards):
                payload = encoded(tag((effect.namespace, key, shard), OTHER_NODE))
                description = replace(
                    header.description,
                    shard=shard,
                    checksum=records.checksum_of(payload),
                    generation=self.told.count,
                )
                record = records.described(description, payload, SALT) + payload
                self._orders += 1
                self._written_at[record] = self._orders
                self._of_others.add(record)
                self.remote[records.name_of(effect.digest, key, shard, SALT)] = record

    # ------------------------------------------------------------------------------------------------------ forgets

    def _check_generation(self, effect: ev.StoreChunks, key: ChunkKey) -> None:
        """A record may say that it is newer than a forget only if the core had heeded that before it asked for it."""
        mark = tenant_mark(self.store.state.namespaces[effect.namespace].tenant)
        for name in ((effect.digest, key), (effect.digest, WHOLE), (mark, WHOLE)):
            count = self._others_at.get(name)
            if count is not None and count <= effect.generation:
                heeded = self._heeded_by_store_at.get(name, 1 << 60)
                asked = self._emitted.get(effect.op, self._orders)
                assert heeded < asked, f"a record is to outlive a forget: {key!r}"

    def _other_node_forgets(self, effect: ev.LookUpChunks | ev.FetchChunks | ev.StoreChunks) -> None:
        """One of these keys, or all of their namespace, or of their tenant."""
        key = self.weather.choice((*effect.keys, *effect.keys, WHOLE))
        count = self.told.count + 1
        one, name = (effect.digest, key, b""), (effect.digest, key)
        if key == WHOLE and self.weather.random() < 0.5:
            mark = tenant_mark(self.store.state.namespaces[effect.namespace].tenant)
            one, name = (b"", WHOLE, mark), (mark, WHOLE)
        self._orders += 1
        self.told.add(one, count)
        self._others_at[name], self._others_told_at[name] = count, self._orders
        self.told.count, self.told.head = count, f"{self._orders}"

    def _lose_unread(self) -> None:
        """What another node forgot, and nobody read, went with the store: that node will tell it again."""
        there = {(maker or digest, key) for digest, key, maker in (*self.told.at, *self.known.at)}
        self._others_at = {name: count for name, count in self._others_at.items() if name in there}

    def step(self, event: ev.Event) -> None:
        if isinstance(event, ev.PurgeTenant) and not event.dry_run:
            self._orders += 1
            asked = (event.ticket.worker, event.ticket.request_id)
            if self._purge_asked.setdefault(asked, self._orders) == self._orders:
                self._purge_asked_last[tenant_mark(event.tenant)] = asked
        if isinstance(event, ev.Forget):
            self._forget_asked = event.ticket
        if isinstance(event, ev.ForgottenElsewhere) and event.forgotten:
            self._orders += 1
            self._heard_orders |= {
                (digest, key): self._orders for digest, key, maker in event.forgotten if not maker
            }
        super().step(event)

    def _applied(self, event: ev.Event) -> None:
        super()._applied(event)
        if isinstance(event, ev.ForgottenElsewhere):
            marks = [one for one in event.forgotten if is_tenant_mark(one[2])]
            self._marks_heard += [
                (event.source, one[2], self.store.state.now, self._is_heard_again(event.source, one))
                for one in marks
            ]
        self._check_asked_anew()
        if self._marks_heard and not (self.store.forgets.going or self.store.recalls.going):
            self._check_marks_heeded()
        if isinstance(event, ev.SessionsShared):
            self.sessions.applied(event, self._sharing.pop(event.op), self.store)
        if isinstance(event, ev.ForgottenElsewhere) and not self.store.forgets.going:
            self._check_heeded(event)

    def _check_asked_anew(self) -> None:
        """What was on its way when this node heard that it was forgotten may have been saved again since: it is no miss
        before all sources that are well were asked for it after that."""
        state, sources = self.store.state, self.store.sources
        chunks = state.chunks
        rows = np.flatnonzero(chunks.views.flags[: chunks.rows_ever] & FETCHING).tolist()
        before, since = self._fetching, self._orders
        now = {(NamespaceId(chunks.namespace[row]), chunks.key[row]) for row in rows}
        self._fetching = {name: before.get(name, since) for name in now}
        for (namespace_id, key), began in before.items():
            namespace = state.namespaces.get(namespace_id)
            row = namespace.index.get(key, NONE) if namespace is not None else NONE
            if (namespace_id, key) in now or namespace is None or row == NONE or namespace.retired:
                continue
            if chunks.shard0[row] != NONE or Reason(chunks.reason[row]) not in (Reason.SLOW, Reason.EVICTED):
                continue
            names = ((namespace.salt, key), (namespace.salt, WHOLE))
            heard = max(self._heard_orders.get(name, -1) for name in names)
            if sources._choices(namespace_id, key):
                continue  # it found no DRAM
            if heard > max(began, self._asked_orders.get((namespace.salt, key), -1)):
                able = [each for each in sources.by_name.values() if each.is_well and each.is_asked(self.now)]
                assert not able, f"a miss after a forget, and nobody was asked: {key!r}, {able}"

    def _check_marks_heeded(self) -> None:
        """Of the tenants that another node has purged nothing is left that was there when this one heard of it."""
        if self.store.forgets.makers:
            return
        self._orders += 1
        for source, mark, heard_at, is_again in self._marks_heard:
            namespaces = self.store.state.namespaces.values()
            self.check_purged({each.id for each in namespaces if tenant_mark(each.tenant) == mark}, heard_at)
            self._note_heeded(source, mark, WHOLE, is_again=is_again)
        self._marks_heard.clear()

    def _is_heard_again(self, source: str, forgotten: Forgotten) -> bool:
        """Whether this is the forget that the core was told of before."""
        count = self.journals[source].tombstones.at.get(forgotten, 0)
        before = self._heeded_count.get((source, forgotten))
        self._heeded_count[source, forgotten] = count
        return before == count

    def _note_heeded(self, source: str, of: bytes, key: ChunkKey, *, is_again: bool) -> None:
        """What was made since the core heard of it for the first time may be served, there and here."""
        if not is_again:
            self._heeded_at[of, key] = self._orders
            if source == "remote":
                self._heeded_by_store_at[of, key] = self._orders

    def _check_heeded(self, event: ev.ForgottenElsewhere) -> None:
        """Nothing of it is served; what this node asked to be written before may not come back."""
        self._orders += 1
        state = self.store.state
        for forgotten in event.forgotten:
            digest, key, maker = forgotten
            if maker:
                continue
            is_again = self._is_heard_again(event.source, forgotten)
            self._note_heeded(event.source, digest, key, is_again=is_again)
            for namespace in state.namespaces.values():
                if namespace.salt != digest:
                    continue
                for each in [key] if key else list(namespace.index):
                    row = namespace.index.get(each, NONE)
                    hit = row != NONE and state.is_hit(row)
                    assert not hit, f"what another node has forgotten is served: {each!r}"
                    self._note_heeded(event.source, digest, each, is_again=is_again)

    def _catch_up(self) -> bool:
        """False: the store is not the one that the node knew, and was told."""
        is_other = self.told.count < self.known.count or (
            self.told.count == self.known.count and self.told.head != self.known.head
        )
        self._read_elsewhere("remote", self.told, is_other=is_other)
        if is_other:
            self._tell(list(self.known.at))
            return False
        self.known.count, self.known.head = self.told.count, self.told.head
        if self.pending:
            self._tell(list(self.pending))
            for digest, key, maker in self.pending:  # the core has dropped it, whoever forgot it before
                name = (maker or digest, key)
                if self._heeded_by_store_at.get(name, -1) <= self._others_told_at.get(name, -1):
                    self._heeded_by_store_at[name] = self._orders
            self.pending.clear()
        self._tell_postponed("remote")
        return True

    def _tell(self, forgotten: list[Forgotten]) -> None:
        count = max(self.told.count, self.known.count) + 1
        for one in forgotten:
            self.told.add(one, count)
            self.known.add(one, count)
            self._is_heard_again("remote", one)
        self._orders += 1
        self.told.count = self.known.count = count
        self.told.head = self.known.head = f"{self._orders}"

    def _answer_forget(self, name: str, op: OpId, why: str) -> None:
        self._inbox.append(ev.ChunksForgotten(op, why))
        if why:
            self._postponed[name].append(op)

    def _tell_postponed(self, name: str) -> None:
        """What the source could not take before was told."""
        self._inbox += [ev.ChunksForgotten(op) for op in self._postponed.pop(name, ())]

    def _forget_away(self, trouble: str) -> str:
        if trouble == "fails" or not self._catch_up():
            return "as told"
        return ""

    # ------------------------------------------------------------------------------------------------------- checks

    def _perform_all(self, effects: Sequence[ev.Effect]) -> None:
        """What came counts as committed by whoever wrote it, before anything is compared with it."""
        state = self.store.state
        for op in [op for op in self._came if op not in self.store.sources.fetches]:
            for came in self._came.pop(op):
                namespace_id, key, contents = came.namespace, came.key, came.contents
                namespace = state.namespaces.get(namespace_id)
                row = namespace.index.get(key, NONE) if namespace is not None else NONE
                if namespace is None or row == NONE or not state.is_hit(row):
                    continue
                start = state.chunks.shard0[row]
                kept = tuple(state.chunks.shard_checksum[start : start + len(contents)])
                if kept == contents:
                    forgotten = self._forgotten_before(
                        namespace.salt, key, came.makers, heard=came.heeds, is_peers=came.is_peers
                    )
                    assert came.made_at > forgotten, f"what was forgotten on its way is served: {key!r}"
                    for number, content in enumerate(contents):
                        shard = (namespace_id, key, number)
                        numbers = self._numbers.get(namespace.salt, set()) | {namespace_id}
                        names = [(each, key, number) for each in numbers]
                        written = any((name, content) in self.ever for name in names)
                        written = written or content in [tag(name, OTHER_NODE) for name in names]
                        assert written, f"nobody ever wrote this for {shard}"
                        self._note_committed(shard, content)
        super()._perform_all(effects)

    def _replied(self, effect: ev.Reply) -> None:
        event = self._asked.get((effect.ticket.worker, effect.ticket.request_id))
        answer = effect.answer
        if isinstance(event, ev.Forget) and isinstance(answer, ev.Done) and not answer.not_durable:
            namespace = self.store.state.namespaces.get(event.namespace)
            if namespace is not None:
                for key in event.keys:
                    row = namespace.index.get(key, NONE)
                    if row == NONE or self.store.state.chunks.shard0[row] == NONE:
                        self._orders += 1
                        self._forgotten_at[namespace.salt, key] = self._orders
                if event.ticket == self._forget_asked:  # no other since
                    self._check_told([(namespace.salt, key, b"") for key in event.keys])
        asked = (effect.ticket.worker, effect.ticket.request_id)
        if isinstance(event, ev.PurgeTenant) and isinstance(answer, ev.Purged) and asked in self._purge_asked:
            mark = tenant_mark(event.tenant)
            self._purged_at[mark] = max(self._purge_asked[asked], self._purged_at.get(mark, -1))
            if self._purge_asked_last[mark] == asked:
                self._check_told([(b"", WHOLE, mark), (b"", WHOLE, mark.ljust(16))])
        super()._replied(effect)

    def _check_told(self, forgotten: Sequence[Forgotten]) -> None:
        """An answer without a reservation says that nobody serves it any more: every source knows of it."""
        for name, journal in self.journals.items():
            untold = [one for one in forgotten if one in journal.pending]
            assert not untold, f"answered as done, and {name} does not know it yet: {untold}"

    def _check_quarantined(self, effect: ev.Quarantined) -> None:
        if effect.tier is not Tier.REMOTE:
            super()._check_quarantined(effect)

    def _check_matched(self, ticket: ev.Ticket, answer: ev.Matched) -> None:
        """As ever, but for what is elsewhere: the core says that it is usable; and for requests that waited until a
        tick, which may forget in the same step what they were answered before."""
        if isinstance(self.history[-1][2], ev.Tick):
            return
        rest = [reason for reason in answer.reasons if reason.name == "ON_REMOTE"]
        if not rest:
            super()._check_matched(ticket, answer)

    def at_rest(self) -> None:
        super().at_rest()
        sources, remote, forgets = self.store.sources, self.store.remote, self.store.forgets
        assert not (sources.fetches or sources.parked or sources.wanted or sources._ahead), sources
        assert not remote.stores and not forgets.behind, (remote, forgets)
        assert not forgets.purging, forgets
        for name, reached in self._told_of.items():
            assert self.platter.heeded.get(name) == reached, (name, reached, self.platter.heeded)
        purged = {name for name, key in self._heeded_at if key == WHOLE and is_tenant_mark(name)}
        assert self.purged_beyond >= purged | self._purged_at.keys(), purged
        shared = self.store.shared_sessions
        assert not (shared.telling or shared.asking or shared.changed or shared._wanted), shared
