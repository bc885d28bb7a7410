"""What the core knows, and the few transitions that everything else is made of.

Every change of a chunk's condition, a pin or a slot goes through a method here, so that the invariants have one place
each. `Reads`, `Saves`, `Segments`, `Transfers`, `Queue` and `Sessions` decide; this file keeps the books.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvstore.core.bulk import batch, ghosts
from kvstore.core.chunks import (
    COMMITTED,
    DOOMED,
    DURABLE,
    FETCHING,
    FOREIGN,
    KEPT,
    LISTED,
    NONE,
    PROMOTING,
    QUEUED,
    STORED,
    STORING,
    TAIL,
    TRANSIENT,
    ChunkTable,
    LinkedRows,
)
from kvstore.core.cold_tier import TOO_FULL, ColdTier
from kvstore.core.directory import Directory
from kvstore.core.events import (
    Bar,
    ChunksSettled,
    Effect,
    Heeded,
    IndexUsage,
    Quarantined,
    Reply,
    SetGenerations,
    Ticket,
)
from kvstore.core.jobs import JobBook
from kvstore.core.lease import Lease, LeaseBook
from kvstore.core.limits import Limits
from kvstore.core.manifests import SessionBook
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import POLICIES, Policy
from kvstore.core.pool import Phase, Pool, Segment
from kvstore.core.quotas import Quotas
from kvstore.core.rate import Rate
from kvstore.core.reservation import Reservation
from kvstore.core.ssd.cold import Cold
from kvstore.core.ssd.quarantine import QuarantineBook
from kvstore.core.workers import EngineGroup, Worker
from kvstore.errors import Denied, NotFound, StoreError, Unauthenticated
from kvstore.keys import tenant_mark
from kvstore.types import (
    ChunkKey,
    DiskState,
    Extent,
    Extents,
    LeaseId,
    Millis,
    NamespaceId,
    OpId,
    Protection,
    Reason,
    ReservationId,
    SegmentId,
    SlotState,
    Tier,
    WorkerId,
)

SessionName = tuple[NamespaceId, bytes]
DISK = NamespaceId(0)
"""The one owner of all slabs in the disk pool; namespaces of users start at 1."""
DISK_SLAB_HEADER_BYTES = 4096
STALE_TO_STORE_MAX = 1_024


@dataclass(slots=True)
class Waiter:
    """A worker that wants to be told when a PENDING chunk settles."""

    worker: WorkerId
    until: Millis


@dataclass(slots=True)
class State:
    limits: Limits
    now: Millis = 0
    chunks: ChunkTable = field(default_factory=ChunkTable)
    pool: Pool = field(init=False)
    ssd_slots: Pool = field(init=False)
    """Slots of the SSD tier; its segments are slab files, all of one namespace (nobody maps them)."""
    cold_tier: ColdTier = field(init=False)
    """Where chunks are that left DRAM; whoever makes the state makes it (`Store`)."""
    disk_state: DiskState = DiskState.ABSENT
    disk_why: str = ""
    """Why it is not OK."""
    quotas: Quotas = field(init=False)
    disk_full: bool = False
    """No slot can be freed on SSD: what is saved now stays in DRAM alone."""
    policy: Policy = field(init=False)
    leases: LeaseBook = field(default_factory=LeaseBook)
    jobs: JobBook = field(default_factory=JobBook)
    """What schedulers say will come, and the chunks that it needs."""
    sessions: SessionBook = field(init=False)
    namespaces: dict[NamespaceId, Namespace] = field(default_factory=dict)
    newest_epoch: dict[bytes, Namespace] = field(default_factory=dict)
    opens: int = 0
    """Of namespaces, by whomever."""
    """By family digest: the namespace that is served."""
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    groups: dict[tuple[str, str], EngineGroup] = field(default_factory=dict)
    """Of the groups that have a name; a worker that gave none is a group of its own, which nobody can join."""
    reservations: dict[ReservationId, Reservation] = field(default_factory=dict)
    ghosts: LinkedRows = field(default_factory=LinkedRows)
    cold: Cold = field(init=False)
    """Chunks on SSD only and not promoting: the candidates to leave the SSD."""
    room: int = 0
    """Counts whatever may give a chunk the DRAM slot that it did not get before: slots that become free, chunks that
    may go, memory that comes, a disk that heals."""
    write_at_once: bool = False
    """Somebody waits until what is queued here is durable:"""
    to_store: deque[tuple[int, ChunkKey]] = field(default_factory=deque)
    """Resident chunks that are not on SSD yet, in the order of their commits; entries may be stale."""
    dirty_chunks: dict[tuple[NamespaceId, ChunkKey], Millis] = field(default_factory=dict)
    """Chunks whose index record is to be written, since when."""
    dirty_sessions: dict[tuple[NamespaceId, bytes], Millis] = field(default_factory=dict)
    deleted_chunks: dict[tuple[NamespaceId, ChunkKey], Millis] = field(default_factory=dict)
    """Chunks whose index record is to be deleted, since when, the oldest first: before anything is written, whatever
    is to be written under the same key included. Bounded, as the next, by what the index holds."""
    deleted_sessions: dict[tuple[NamespaceId, bytes], Millis] = field(default_factory=dict)
    cut_sessions: dict[tuple[NamespaceId, bytes], None] = field(default_factory=dict)
    """Sessions that were truncated, while the index has the whole of them. If it cannot take the new manifest, the old
    one goes."""
    indexing_since: Millis | None = None
    """Since when the oldest of what the index transaction under way holds was dirty."""
    index_usage: IndexUsage | None = None
    """Of the index after its last transaction; None: not known yet."""
    prefetched: set[int] = field(default_factory=set)
    """Rows that a hint brought to DRAM and nobody has used yet."""
    demanded: set[int] = field(default_factory=set)
    """Rows that came to DRAM because somebody asked, and were not used since: their next use is a hit on SSD."""
    arrivals: list[int] = field(default_factory=list)
    """Rows that became resident since the last step, where somebody wants to know (`remote/saves.py`)."""
    forgotten: list[tuple[NamespaceId, ChunkKey]] = field(default_factory=list)
    """Chunks that were forgotten since, likewise."""
    changed_sessions: dict[SessionName, bool] = field(default_factory=dict)
    """Sessions with another manifest, where other nodes are told of it (`remote/sessions.py`); True: forgotten."""
    keys_elsewhere: Callable[[SessionName], Sequence[ChunkKey]] = field(default=lambda name: ())
    """What another node told of a session; set by the store."""
    to_hold: set[Ticket] = field(default_factory=set)
    """Requests whose answers wait until the other nodes are told what they have forgotten."""
    applied: dict[str, int] = field(default_factory=dict)
    """By channel (`remote/forgets.py`): up to which count of its forgets nothing is left here."""
    hold: Callable[[Ticket, object], bool] = field(default=lambda ticket, answer: False)
    """Takes such an answer, or does not; set by the store."""
    fetched: set[int] = field(default_factory=set)
    """Rows that came from beyond this node and were not used since: their next use is a hit there."""
    partials: LinkedRows = field(default_factory=LinkedRows)
    """Chunks that lack some shard, in the order of `used_at`: since when they wait for it."""
    read_rate: Rate = field(default_factory=Rate)
    """Of what is read from the tier below DRAM."""
    reading_bytes: int = 0
    """Under way there, but for what is late."""
    wanted_bytes: int = 0
    """Asked for by an Acquire, whose read has not begun."""
    waits: dict[int, list[Waiter]] = field(default_factory=dict)
    """By chunk row."""
    counters: Counter[str] = field(default_factory=Counter)
    effects: list[Effect] = field(default_factory=list)
    bumps: dict[SegmentId, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Generations to be written before any other effect of this step but those that send readers to the daemon."""
    directory: Directory = field(init=False)
    """What readers without a message are told."""
    next_op: int = 1
    quarantine: QuarantineBook = field(default_factory=QuarantineBook)
    recalling: dict[tuple[str, bytes], Millis] = field(default_factory=dict)
    """(tenant, maker) whose chunks are misses from now on, and are about to be doomed; since when they must have made
    them. No tenant: of all."""
    bars: dict[tuple[bytes, bytes], Bar] = field(default_factory=dict)
    """(mark of the tenant or empty, maker) of those whose chunks are stored no more, in this start and earlier ones."""
    dirty_bars: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    """Those that the index does not know yet."""
    heeded: dict[str, Heeded] = field(default_factory=dict)
    """By channel: how far its journal of forgets was carried out, as the index says, or is to say."""
    dirty_heeded: dict[str, Millis] = field(default_factory=dict)
    """Those that the index does not know yet; since when."""
    makers: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """Who is meant where several ranks each committed shards of one chunk: its maker is then a digest of theirs."""
    batch_min: int = field(init=False)
    """From how many chunks on they are handled as a batch."""
    _ghosts_max: int = field(init=False)
    restored_at: Millis = -1
    """Chunks that a restart brought were born then, as far as anybody knows."""

    def __post_init__(self) -> None:
        limits = self.limits
        self.directory = Directory(self)
        self.sessions = SessionBook(self.jobs)
        self.pool = Pool(
            segment_bytes=limits.segment_bytes, count=limits.segment_count, alignment=limits.slot_alignment
        )
        self.quotas = Quotas(limits, self.pool, self.counters)
        self.batch_min = limits.batch_min
        self.policy = POLICIES[limits.eviction](self.chunks, limits.batch_min)
        self.policy.lives_min = limits.lives_min
        self.policy.awaited = self.demanded, self.fetched
        self._ghosts_max = limits.ghost_rows_max
        self.cold = Cold(self.policy.candidates)
        self.ssd_slots = Pool(
            segment_bytes=limits.disk_slab_bytes,
            count=limits.disk_slabs_max,
            alignment=limits.disk_alignment,
            header_bytes=DISK_SLAB_HEADER_BYTES,
            phase=Phase.ABSENT,
        )
        if limits.disk_slabs_max:
            self.disk_state = DiskState.OK

    # ------------------------------------------------------------------------------------------------- effects

    @property
    def storing(self) -> bool:
        """What is in DRAM only will be on SSD soon: worth waiting for, rather than dropping it."""
        return self.disk_state is DiskState.OK and not self.disk_full

    def new_op(self) -> OpId:
        op = OpId(self.next_op)
        self.next_op += 1
        return op

    def take_effects(self) -> list[Effect]:
        """Generation changes first: bumping early only ever voids more. Then what readers are told, see `Directory`."""
        first, told, last = self.directory.take()
        effects: list[Effect] = first
        effects += [
            SetGenerations(segment, tuple(cells), tuple(generations))
            for segment, (cells, generations) in self.bumps.items()
        ]
        effects += told
        effects += last
        effects += self.effects
        self.bumps = {}
        self.effects = []
        return effects

    def reply(self, ticket: Ticket, answer: object) -> None:
        """The answer of a request, to whoever asked and to whoever repeated it meanwhile."""
        if ticket in self.to_hold:
            self.to_hold.discard(ticket)
            if not isinstance(answer, StoreError) and self.hold(ticket, answer):
                return
        self.release(ticket, answer)

    def release(self, ticket: Ticket, answer: object) -> None:
        """`reply`, with an answer that waits for nothing more."""
        self.effects.append(Reply(ticket, answer))  # type: ignore[arg-type]  # handlers return members of Answer
        worker = self.workers.get(ticket.worker)
        if worker is not None and ticket.request_id:
            for repeated in worker.memory.waiting.pop(ticket.request_id, ()):
                self.effects.append(Reply(repeated, answer))  # type: ignore[arg-type]
            worker.memory.remember(ticket.request_id, answer)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------- look-ups

    def worker(self, worker_id: WorkerId) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None or worker.closed:
            raise Unauthenticated(
                "no such worker is connected", field="worker", value=worker_id, remedy="say hello again"
            )
        return worker

    def namespace(self, worker: Worker, namespace_id: NamespaceId) -> Namespace:
        """The namespace, if `worker` opened it (an admin sees all): another tenant's is not told from a missing one."""
        namespace = self.namespaces.get(namespace_id)
        if namespace is None or not (namespace_id in worker.opened or worker.admin):
            raise NotFound(
                "is not open for this caller",
                field="namespace_id",
                value=namespace_id,
                remedy="call Open first",
            )
        return namespace

    def add_namespace(self, namespace: Namespace) -> None:
        self.namespaces[namespace.id] = namespace
        self.policy.opened(namespace)
        namespace.dram = self.policy.candidates()
        header = self.limits.disk_header_bytes
        slots = [self.ssd_slots.slot_bytes(header + length) for length in namespace.shard_bytes]
        namespace.ssd_chunk_bytes = sum(slots)
        of_its_own = namespace.tenant if self.quotas.has(Tier.SSD, namespace.tenant) else ""
        namespace.ssd = self.cold.of(frozenset(slots), of_its_own)
        self.quotas.opened(namespace)
        if self.limits.directory:
            self.directory.opened(namespace)

    def remove_namespaces(self, gone: Sequence[Namespace]) -> None:
        """They hold nothing any more."""
        for namespace in gone:
            del self.namespaces[namespace.id]
            self.policy.closed(namespace.id)
            if namespace.directory_rows_max:
                self.directory.gone(namespace)
        self.quotas.gone(gone)
        self.cold.keep([namespace.ssd for namespace in self.namespaces.values()])

    def own_namespace(self, worker: Worker, namespace_id: NamespaceId) -> Namespace:
        """As `namespace`, for calls that hand out or take bytes: even an admin must have opened it."""
        namespace = self.namespace(worker, namespace_id)
        if namespace_id not in worker.opened:
            raise Denied(
                "bytes are only for workers that opened it", field="namespace_id", value=namespace_id
            )
        return namespace

    def administered_namespace(self, worker: Worker, namespace_id: NamespaceId) -> Namespace:
        """For an operator's questions and orders, which concern no bytes: any namespace of the caller's tenant, opened
        or not; all for an admin."""
        namespace = self.namespaces.get(namespace_id)
        if namespace is None or not (worker.admin or namespace.tenant == worker.tenant):
            raise NotFound("no such namespace of this tenant", field="namespace_id", value=namespace_id)
        return namespace

    def namespaces_of_model(self, namespace: Namespace) -> list[Namespace]:
        """Those of its tenant and model that are served, the one opened last first."""
        tenant, model = namespace.tenant, namespace.spec.model
        found = [
            each
            for each in self.namespaces.values()
            if each.tenant == tenant and each.spec.model == model and not each.retired
        ]
        return sorted(found, key=lambda each: (each.opened, each.id), reverse=True)

    def namespace_of(self, row: int) -> Namespace:
        return self.namespaces[NamespaceId(self.chunks.namespace[row])]

    def extents(self, namespace: Namespace, rows: Sequence[int], shards: Sequence[int]) -> Extents:
        """Where `shards` of each row are, row by row; their slots must be there."""
        lengths = namespace.shard_bytes
        if len(rows) >= self.batch_min:
            return batch.extents(self, rows, shards, lengths)
        chunks = self.chunks
        segments = self.pool.segments
        fields = []
        for row in rows:
            start = chunks.shard0[row]
            for shard in shards:
                segment = segments[chunks.shard_segment[start + shard]]
                slot = chunks.shard_slot[start + shard]
                checksum = chunks.shard_checksum[start + shard]
                offset = slot * segment.slot_bytes
                fields.append((segment.id, offset, lengths[shard], slot, segment.generation[slot], checksum))
        return Extents.of_rows(fields)

    def extent(self, row: int, shard: int, length: int) -> Extent:
        """Where a shard is; its slot must be there."""
        chunks = self.chunks
        shard_row = chunks.shard0[row] + shard
        segment = self.pool.segments[chunks.shard_segment[shard_row]]
        slot = chunks.shard_slot[shard_row]
        return Extent(
            segment.id,
            slot * segment.slot_bytes,
            length,
            slot,
            segment.generation[slot],
            chunks.shard_checksum[shard_row],
        )

    # --------------------------------------------------------------------------------------------------- slots

    def bump(self, segment: Segment, slots: Iterable[int]) -> None:
        cells, generations = self.bumps.setdefault(segment.id, ([], []))
        for slot in slots:
            cells.append(slot)
            generations.append(segment.generation[slot])

    def free_slot(self, segment: Segment, slot: int) -> None:
        if segment.state[slot] == SlotState.QUARANTINED:
            self.quarantine.drop((Tier.DRAM, segment.id, slot))
        self.pool.give_back(segment, slot)
        self.bump(segment, (slot,))
        self.room += 1

    def quarantine_slot(self, segment: Segment, slot: int, *, corrupt: bool = False) -> None:
        """Because somebody may still write it, or its bytes are wrong (`corrupt`)."""
        self.book_quarantined(Tier.DRAM, segment, slot, corrupt=corrupt)
        self.pool.quarantine(segment, slot)
        self.bump(segment, (slot,))
        self.counters["slots_quarantined"] += 1

    def book_quarantined(self, tier: Tier, segment: Segment, slot: int, *, corrupt: bool) -> None:
        """While the slot still has its owner."""
        row = segment.owner[slot]
        self.quarantine.add(
            (tier, segment.id, slot),
            segment.slot_bytes,
            NamespaceId(self.chunks.namespace[row]),
            self.chunks.key[row],
            corrupt=corrupt,
            shared=self.limits.protection is Protection.GROUP,
            now=self.now,
            retry_ms=self.limits.quarantine_ms,
        )

    def found_corrupt(self, row: int, tier: Tier, why: str, *, miss: bool = True) -> None:
        """Bytes of a chunk are not those that were committed: counted, and logged once. What is done about it is up to
        the caller."""
        chunks = self.chunks
        found: list[tuple[int, int]] = []
        if tier is Tier.SSD:
            found += self.cold_tier.places(row)
        else:
            shard_rows = range(chunks.shard0[row], chunks.shard0[row] + self.namespace_of(row).shards)
            for shard_row in shard_rows:
                if chunks.shard_segment[shard_row] != NONE:
                    segment = self.pool.segments[chunks.shard_segment[shard_row]]
                    found.append((int(segment.id), chunks.shard_slot[shard_row]))
        self.counters["chunks_corrupt"] += 1
        self.effects.append(
            Quarantined(tier, tuple(found), NamespaceId(chunks.namespace[row]), chunks.key[row], why, miss)
        )

    def place_shard(self, row: int, shard: int, segment: Segment, slot: int) -> None:
        """A RESERVED slot for a shard that has none."""
        shard_row = self.chunks.shard0[row] + shard
        assert self.chunks.shard_segment[shard_row] == NONE, self.chunks.describe(row)
        self.chunks.shard_segment[shard_row] = segment.index
        self.chunks.shard_slot[shard_row] = slot
        self.chunks.reserved[row] += 1

    def unplace_shard(self, row: int, shard: int) -> tuple[Segment, int]:
        """Take a shard's slot away from it; what becomes of the slot is the caller's business."""
        chunks = self.chunks
        shard_row = chunks.shard0[row] + shard
        segment, slot = self.pool.segments[chunks.shard_segment[shard_row]], chunks.shard_slot[shard_row]
        assert segment.owner[slot] == row, (chunks.describe(row), segment, slot)
        # The checksum stays: it is also that of the copy on SSD, and what a read from there must match.
        chunks.shard_segment[shard_row] = chunks.shard_slot[shard_row] = NONE
        if chunks.shard_ready[shard_row]:
            chunks.shard_ready[shard_row] = 0
            chunks.ready[row] -= 1
            self.note(row)
        else:
            chunks.reserved[row] -= 1
        return segment, slot

    # -------------------------------------------------------------------------------------------------- chunks

    def note(self, row: int) -> None:
        """Whether it is a hit or on SSD, or its place, may have changed: readers are told at the end of the step."""
        self.directory.noted[row] = None

    def is_resident(self, row: int) -> bool:
        chunks = self.chunks
        return chunks.shard0[row] != NONE and chunks.ready[row] == self.namespace_of(row).shards

    def is_hit(self, row: int) -> bool:
        return self.is_resident(row) and not self.chunks.flags[row] & DOOMED

    def is_usable(self, row: int) -> bool:
        """A hit, or on SSD and readable: its bytes can be had."""
        if self.is_hit(row):
            return True
        stored = self.chunks.flags[row] & (STORED | DOOMED) == STORED
        return stored and self.disk_state is not DiskState.OFF

    def makers_of(self, row: int) -> tuple[bytes, ...]:
        """Everybody who committed a shard of it, as far as they said who they are."""
        maker = self.chunks.maker(row)
        return self.makers.get(maker, (maker,) if maker else ())

    def ids_of(self, maker: bytes) -> set[bytes]:
        """What stands in the chunks that it made, alone or with others."""
        return {maker, *(name for name, members in self.makers.items() if maker in members)}

    def add_maker(self, row: int, maker: bytes) -> None:
        """It commits shards of a chunk; others may have committed the rest."""
        members = self.makers_of(row)
        if maker in members:
            return
        if members and len(self.makers) < self.limits.makers_max:
            together = tuple(sorted((*members, maker)))
            maker = hashlib.blake2b(b"".join(together), digest_size=16, person=b"kvs.makers.v1").digest()
            self.makers[maker] = together
        self.chunks.set_maker(row, maker)

    def forget_makers(self) -> list[bytes]:
        """Drop the digests that no chunk carries any more; which they are."""
        unused = [digest for digest in self.makers if not self.chunks.is_maker(digest)]
        for digest in unused:
            del self.makers[digest]
        return unused

    def made_since(self, row: int, since: Millis) -> bool:
        """Nobody knows when a chunk was made that an earlier start of the daemon left: it may have been."""
        born = self.chunks.born_at[row]
        return born >= since or born <= self.restored_at

    def is_recalled(self, row: int) -> bool:
        """It is about to be doomed."""
        maker = self.chunks.maker(row)
        for tenant in ("", self.namespace_of(row).tenant):
            since = self.recalling.get((tenant, maker))
            if since is not None and self.made_since(row, since):
                return True
        return False

    def bar(self, bar: Bar) -> None:
        """What it makes is stored no more, also after a restart, as far as there is an index."""
        name = bar.mark, bar.maker
        known = self.bars.get(name)
        if known is None or (bar.purge and not known.purge):
            self.bars[name] = bar
            if self.disk_state is not DiskState.ABSENT:
                self.dirty_bars[name] = None

    def is_barred(self, tenant: str, maker: bytes, *, purged: bool = False) -> bool:
        """Whether it was recalled, or quarantined for this tenant; `purged`: and all that it made is to go."""
        if not self.bars:
            return False
        found = self.bars.get((b"", maker)), self.bars.get((tenant_mark(tenant), maker))
        return any(bar is not None and (bar.purge or not purged) for bar in found)

    def _tally(self, namespace: Namespace, row: int, change: int) -> None:
        """Count the row in, or out of, the condition that it is in now."""
        chunks = self.chunks
        if chunks.shard0[row] == NONE:
            return
        if chunks.ready[row] == namespace.shards:
            if not chunks.flags[row] & DOOMED:
                namespace.visible += change
        elif chunks.flags[row] & STORED:
            if not chunks.flags[row] & DOOMED:
                namespace.cold += change
        else:
            namespace.partial += change

    def begin_chunk(self, namespace: Namespace, row: int) -> None:
        """ghost -> partial: room for its shards, none of them placed yet."""
        chunks = self.chunks
        if chunks.reason[row] != Reason.NEVER_SEEN:
            self.policy.came_back(row)
        if chunks.flags[row] & LISTED:
            chunks.unlink(self.ghosts, row)
        chunks.give_shards(row, namespace.shards)
        chunks.set_maker(row, b"")
        chunks.flags[row] &= ~(DOOMED | FOREIGN)
        chunks.born_at[row] = chunks.used_at[row] = self.now
        self._tally(namespace, row, +1)
        chunks.link_newest(self.partials, row)

    def mark_shard_ready(self, namespace: Namespace, row: int, shard: int, checksum: int) -> bool:
        """RESERVED -> READY; with the last shard the chunk becomes resident. True: that is so, and the caller makes it
        evictable (`arrived`), together with those that came with it."""
        chunks = self.chunks
        shard_row = chunks.shard0[row] + shard
        segment = self.pool.segments[chunks.shard_segment[shard_row]]
        self.pool.mark_ready(segment, chunks.shard_slot[shard_row])
        segment.touched_at = self.now
        whole = chunks.ready[row] + 1 == namespace.shards
        if whole:
            self._tally(namespace, row, -1)
        if not chunks.flags[row] & PROMOTING:
            chunks.born_at[row] = self.now  # what was computed until now is in it
        chunks.shard_checksum[shard_row] = checksum
        chunks.shard_ready[shard_row] = 1
        chunks.reserved[row] -= 1
        chunks.ready[row] += 1
        if not whole:
            return False
        self.note(row)
        self._tally(namespace, row, +1)
        if chunks.flags[row] & LISTED:
            chunks.unlink(self.partials, row)
        promoted = chunks.flags[row] & PROMOTING
        chunks.flags[row] = chunks.flags[row] & ~PROMOTING | COMMITTED
        if chunks.flags[row] & DOOMED:
            self.to_ghost(row, Reason(chunks.reason[row]))
            return False
        chunks.reason[row] = Reason.NONE
        if not promoted:
            chunks.used_at[row] = self.now
        if self.disk_state is not DiskState.ABSENT and not chunks.flags[row] & STORED:
            self.store_later(row)
        self.settle(row, ready=True)
        self.jobs.came(namespace.id, chunks.key[row])
        return True

    def arrived(self, rows: Sequence[int]) -> None:
        """`rows` became resident together; they stand in chain order."""
        for namespace_id, group in groupby(rows, self.chunks.namespace.__getitem__):
            self.policy.add(self.namespaces[NamespaceId(namespace_id)].dram, list(group))
            self.room += 1
        if self.limits.remote_writes == "write-through":
            self.arrivals += rows

    def store_later(self, row: int) -> None:
        """Queue a resident chunk for its write to SSD. Where nothing can be written for long, what left DRAM meanwhile
        must not fill the queue."""
        chunks = self.chunks
        if chunks.flags[row] & QUEUED:
            return
        chunks.flags[row] |= QUEUED
        self.to_store.append((row, chunks.key[row]))
        self.forget_stale_to_store()

    def keep(self, rows: Iterable[int]) -> None:
        """Somebody named these chunks: they are to be on SSD, whatever they are worth."""
        chunks = self.chunks
        for row in rows:
            chunks.flags[row] |= KEPT
            stored = chunks.flags[row] & (STORED | STORING | QUEUED)
            if self.disk_state is not DiskState.ABSENT and not stored and self.is_hit(row):
                self.store_later(row)

    def forget_stale_to_store(self) -> None:
        chunks = self.chunks
        if len(self.to_store) > 2 * chunks.rows_used + STALE_TO_STORE_MAX:
            entries = ((other, key) for other, key in self.to_store if self.is_queued(other, key))
            self.to_store = deque(dict.fromkeys(entries))

    def is_queued(self, row: int, key: ChunkKey) -> bool:
        """Whether this entry of `to_store` is still about this chunk."""
        return self.chunks.key[row] == key and bool(self.chunks.flags[row] & QUEUED)

    def doom(self, row: int, reason: Reason) -> bool:
        """A miss from now on; the bytes go at once, or with the last pin, reservation or read. False: there was nothing
        to lose."""
        chunks = self.chunks
        if reason is Reason.FORGOTTEN and self.limits.forgets_told:
            self.forgotten.append((NamespaceId(chunks.namespace[row]), chunks.key[row]))
        if chunks.shard0[row] == NONE:
            if reason is Reason.FORGOTTEN and not chunks.refs[row]:
                self.remove_row(row)
            return False
        if chunks.flags[row] & DOOMED:
            return False
        usable = self.is_resident(row) or bool(chunks.flags[row] & STORED)
        if chunks.pins[row] or chunks.reserved[row] or chunks.flags[row] & (PROMOTING | FETCHING):
            namespace = self.namespace_of(row)
            self._tally(namespace, row, -1)
            chunks.flags[row] |= DOOMED
            self.note(row)
            self._tally(namespace, row, +1)
            chunks.reason[row] = reason
            if (
                chunks.flags[row] & STORED
            ):  # its place on SSD is freed later; a restart must not bring it back
                self.delete_record(namespace.id, chunks.key[row])
            self.jobs.lost(row)
            self.settle(row, ready=False)
        else:
            self.to_ghost(row, reason)
        return usable

    def to_ghost(self, row: int, reason: Reason) -> None:
        """Free every slot of an unpinned chunk that nobody is writing; its key stays behind with the reason."""
        chunks = self.chunks
        namespace = self.namespace_of(row)
        assert not chunks.pins[row] and not chunks.reserved[row], chunks.describe(row)
        assert not chunks.flags[row] & (STORING | PROMOTING | FETCHING), chunks.describe(row)
        self._unlist(namespace, row)
        self._tally(namespace, row, -1)
        nothing_lost = chunks.ready[row] == 0 and not chunks.flags[row] & STORED
        self._free_dram(namespace, row, quarantine=reason is Reason.CORRUPT)
        self._free_copy(namespace, row, quarantine=reason is Reason.CORRUPT)
        chunks.take_shards(row, namespace.shards)
        chunks.flags[row] &= ~(DOOMED | KEPT)
        self.policy.forget(row)
        self.jobs.lost(row)
        self.settle(row, ready=False)
        if nothing_lost and reason is Reason.INCOMPLETE:
            reason = Reason(chunks.reason[row])  # an aborted save tells nothing new
        chunks.reason[row] = reason
        if chunks.refs[row]:
            return
        if reason is Reason.NEVER_SEEN:
            self.remove_row(row)
        else:
            self.remember_ghost(row)

    def demote(self, row: int) -> None:
        """resident -> cold: its bytes are on SSD, the DRAM slots go."""
        chunks = self.chunks
        namespace = self.namespace_of(row)
        assert chunks.flags[row] & (STORED | STORING) == STORED and not chunks.pins[row], chunks.describe(row)
        self._unlist(namespace, row)
        self._tally(namespace, row, -1)
        self._free_dram(namespace, row, quarantine=False)
        self._tally(namespace, row, +1)
        self.policy.add_last(namespace.ssd, row)
        self.jobs.left_dram((row,))
        self.counters["chunks_demoted"] += 1

    def drop_transient(self, rows: Sequence[int]) -> None:
        """Of `rows`, which were just unpinned: what its worker keeps too, and the SSD has, is not kept in DRAM. While
        the SSD is not well it is: DRAM may soon be all that serves."""
        if self.disk_state is not DiskState.OK:
            return
        chunks = self.chunks
        if len(rows) >= self.batch_min and not batch.any_flag(chunks, rows, TRANSIENT):
            return
        for row in rows:
            flags = chunks.flags[row] & (TRANSIENT | STORED | STORING | DOOMED)
            if flags == TRANSIENT | STORED and not chunks.pins[row] and self.is_resident(row):
                self.demote(row)
                self.counters["transient_chunks_dropped"] += 1

    def _unlist(self, namespace: Namespace, row: int) -> None:
        """Out of whatever list it is in; a chunk that a hint brought in vain is counted."""
        chunks = self.chunks
        self.demanded.discard(row)
        self.fetched.discard(row)
        if row in self.prefetched:
            self.prefetched.discard(row)
            self.counters["prefetch_wasted"] += 1
        if not chunks.flags[row] & LISTED:
            return
        if chunks.ready[row] == namespace.shards:
            self.policy.remove(namespace.dram, row)
        elif chunks.flags[row] & STORED:
            self.policy.remove(namespace.ssd, row)
        else:
            chunks.unlink(self.partials, row)

    def _free_dram(self, namespace: Namespace, row: int, *, quarantine: bool) -> None:
        chunks = self.chunks
        for shard in range(namespace.shards):
            if chunks.shard_segment[chunks.shard0[row] + shard] != NONE:
                segment, slot = self.unplace_shard(row, shard)
                if quarantine:
                    self.quarantine_slot(segment, slot, corrupt=True)
                else:
                    self.free_slot(segment, slot)

    # --------------------------------------------------------------------------------------------------- cold tier

    def _free_copy(self, namespace: Namespace, row: int, *, quarantine: bool = False) -> None:
        if not self.chunks.flags[row] & STORED:
            return
        self.cold_tier.drop(row, corrupt=quarantine)
        namespace.below -= 1
        self.chunks.flags[row] &= ~(STORED | DURABLE)
        self.note(row)
        self.delete_record(namespace.id, self.chunks.key[row])

    def delete_record(self, namespace_id: NamespaceId, key: ChunkKey) -> None:
        """The index, if the tier has one, is to forget this chunk, also if it does not know it yet."""
        if not self.cold_tier.persistent:
            return
        self.dirty_chunks.pop((namespace_id, key), None)
        self.deleted_chunks.setdefault((namespace_id, key), self.now)

    def evict_copy(self, row: int) -> None:
        """Its SSD slots are wanted: a cold chunk becomes a ghost, a resident one stays in DRAM alone."""
        self.cold_tier.refused(self.namespace_of(row), self.chunks.key[row], TOO_FULL)
        if not self.is_resident(row):
            self.to_ghost(row, Reason.EVICTED)
        else:
            self.drop_copy(row)
        self.counters["chunks_evicted_from_ssd"] += 1

    def drop_copy(self, row: int, *, quarantine: bool = False) -> None:
        """The SSD copy of a resident chunk goes; its slots to quarantine, if their bytes are wrong."""
        assert self.is_resident(row), self.chunks.describe(row)
        self._free_copy(self.namespace_of(row), row, quarantine=quarantine)

    def make_cold(self, rows: Sequence[int]) -> None:
        """Chunks whose read ended without bytes, or was never begun, are on SSD only, as before. They stand in chain
        order: what is first in a chain leaves the SSD after the rest."""
        chunks = self.chunks
        for row in rows:
            assert chunks.flags[row] & STORED and not chunks.reserved[row] and not chunks.ready[row], (
                chunks.describe(row)
            )
            chunks.flags[row] &= ~PROMOTING
            if chunks.flags[row] & DOOMED:
                self.to_ghost(row, Reason(chunks.reason[row]))
            else:
                self.settle(row, ready=False)
        for row in reversed(rows):
            if chunks.flags[row] & STORED:
                self.policy.add_last(self.namespace_of(row).ssd, row)
        self.jobs.left_dram(rows)

    # -------------------------------------------------------------------------------------------------- ghosts

    def remember_ghost(self, row: int) -> None:
        self.chunks.link_newest(self.ghosts, row)
        self.forget_ghosts()

    def forget_ghosts(self) -> None:
        """The oldest, if there are too many."""
        over = self.ghosts.count - self._ghosts_max
        if over >= self.batch_min:
            ghosts.forget_oldest(self, over)
        else:
            for _ in range(over):
                self.remove_row(self.ghosts.oldest)

    def remove_row(self, row: int) -> None:
        """Forget the key of a ghost altogether."""
        self.policy.forget(row)
        self.directory.forget(row)
        if self.chunks.flags[row] & LISTED:
            self.chunks.unlink(self.ghosts, row)
        del self.namespace_of(row).index[self.chunks.key[row]]
        self.chunks.free_row(row)

    def add_ref(self, row: int) -> None:
        chunks = self.chunks
        chunks.refs[row] += 1
        if chunks.shard0[row] == NONE and chunks.flags[row] & LISTED:
            chunks.unlink(self.ghosts, row)

    def drop_ref(self, row: int, reason: Reason = Reason.TRUNCATED) -> None:
        """One manifest entry less. A tail goes with its last manifest, for `reason`; a ghost may now be forgotten."""
        chunks = self.chunks
        assert chunks.refs[row] > 0, chunks.describe(row)
        chunks.refs[row] -= 1
        if chunks.refs[row]:
            return
        if chunks.shard0[row] == NONE:
            self.remember_ghost(row)
        elif chunks.flags[row] & TAIL and (self.is_resident(row) or chunks.flags[row] & STORED):
            self.doom(row, reason)

    # ---------------------------------------------------------------------------------------------------- pins

    def pin(self, namespace: Namespace, row: int) -> None:
        chunks = self.chunks
        if chunks.pins[row] == 0:
            self.policy.remove(namespace.dram, row)
            namespace.pinned += 1
            self._count_pinned(namespace, row, +1)
        chunks.pins[row] += 1

    def pin_all(self, namespace: Namespace, rows: Sequence[int]) -> None:
        if len(rows) >= self.batch_min and batch.distinct(rows):
            batch.pin(self, namespace, rows)
        else:
            for row in rows:
                self.pin(namespace, row)

    def unpin(self, namespace: Namespace, rows: Sequence[int], *, used: bool = True) -> None:
        """`rows` of one namespace, in chain order; those without another pin become evictable, or go if doomed.

        `used=False`: the pin was the mover's, which is no use of the chunk."""
        many = len(rows) >= self.batch_min and batch.distinct(rows)
        if many and not batch.any_flag(self.chunks, rows, DOOMED):
            evictable = batch.unpin(self, namespace, rows)
        else:
            evictable = self._unpin_each(namespace, rows)
        if used:
            self.store_used(evictable)
            self.policy.add(namespace.dram, evictable)
        else:
            self.policy.put_back(namespace.dram, evictable)
        self.room += 1

    def store_used(self, rows: Sequence[int]) -> None:
        """What was not worth a write to SSD may be now that it was used."""
        if not self.counters["chunks_not_stored"]:
            return
        flags = self.chunks.flags
        for row in rows:
            if not flags[row] & (STORED | STORING | QUEUED):
                self.store_later(row)

    def _unpin_each(self, namespace: Namespace, rows: Sequence[int]) -> Sequence[int]:
        chunks = self.chunks
        evictable: list[int] = []
        for row in rows:
            assert chunks.pins[row] > 0, chunks.describe(row)
            chunks.pins[row] -= 1
            if chunks.pins[row] == 0:
                namespace.pinned -= 1
                self._count_pinned(namespace, row, -1)
                if chunks.flags[row] & DOOMED:
                    self.to_ghost(row, Reason(chunks.reason[row]))
                else:
                    evictable.append(row)
        return evictable

    def _count_pinned(self, namespace: Namespace, row: int, change: int) -> None:
        start = self.chunks.shard0[row]
        for shard_row in range(start, start + namespace.shards):
            self.pool.segments[self.chunks.shard_segment[shard_row]].pinned += change

    def close_lease(self, lease: Lease) -> None:
        """Unpin all of it: released, revoked, or its engine group is gone."""
        namespace = self.namespaces[lease.namespace]
        lease.group.discharge(lease.rows, namespace.chunk_bytes)
        self.leases.close(lease)
        self.unpin(namespace, lease.rows)
        self.drop_transient(lease.rows)

    # ------------------------------------------------------------------------------------------------- waiting

    def wait_for(self, worker: Worker, row: int, until: Millis) -> None:
        if worker.waits < self.limits.waits_per_worker_max:
            worker.waits += 1
            self.waits.setdefault(row, []).append(Waiter(worker.id, until))

    def settle(self, row: int, *, ready: bool) -> None:
        """Tell whoever waits for this chunk."""
        for wait in self.waits.pop(row, ()):
            self.tell(wait, row, ready=ready)

    def tell(self, wait: Waiter, row: int, *, ready: bool) -> None:
        worker = self.workers.get(wait.worker)
        if worker is None:
            return
        worker.waits -= 1
        key = (self.chunks.key[row],)
        self.effects.append(
            ChunksSettled(
                worker.id,
                NamespaceId(self.chunks.namespace[row]),
                ready=key if ready else (),
                failed=() if ready else key,
            )
        )

    def lease(self, worker: Worker, lease_id: LeaseId) -> Lease | None:
        """The lease, if it belongs to the worker's engine group."""
        lease = self.leases.leases.get(lease_id)
        return lease if lease is not None and lease.group is worker.group else None
