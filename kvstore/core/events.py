"""The daemon's whole vocabulary: every event that enters the core and every effect that leaves it.

One object per request, not per chunk. An event that wants an answer carries a `Ticket`; the core answers it with
exactly one `Reply` effect, at once or later. Effects are performed in the order in which they are returned.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from kvstore.errors import StoreError
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ChunkKey,
    CommitResult,
    DiskPlace,
    DiskResult,
    Extent,
    Extents,
    GrantResult,
    HintResult,
    LeaseId,
    Millis,
    NamespaceId,
    OpId,
    Outcome,
    Reason,
    Record,
    RegionId,
    ReservationId,
    SegmentId,
    SlabId,
    StagedPiece,
    Tier,
    Wait,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who asks, and under which number.

    `request_id` is chosen by the worker and unique among its requests; a repeated one gets the first answer again.
    0 means "do not remember". `channel` is opaque to the core: the edge's handle for the answer.
    """

    worker: WorkerId
    request_id: int = 0
    channel: int = 0


# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process connected to the descriptor socket and was identified. `engine_group` is scoped by tenant."""

    worker: WorkerId
    tenant: str
    engine_group: str
    rank: int = 0
    admin: bool = False
    remote: bool = False
    """It has no shared memory, so whatever it reserved it could not write."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The process is gone (its pidfd became readable): nothing of it can read or write any more."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerClosed:
    """The process closed its connection but lives: no new request will come, an old copy of it may still run. What it
    holds ends by expiry; its mappings end with `SegmentsUnmapped` (sent before) or with the process."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Open:
    ticket: Ticket
    spec: NamespaceSpec


@dataclass(frozen=True, slots=True)
class Match:
    """Read-only lookup; never promotes, never pins. `token_count` > 0 leaves at least one token to compute."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    token_count: int = 0


@dataclass(frozen=True, slots=True)
class Acquire:
    """Pin what is READY of `keys` until Release, Renew's absence, or the death of the whole engine group.

    `shards` are the shard numbers whose extents are wanted (empty: all); a chunk is a hit only if *every* shard
    is READY. `prefix_only` stops at the first key that is not a hit. With `wait_ms` > 0 the worker is told by
    `ChunksSettled` when PENDING keys become READY or FAILED, at the latest after that time.
    """

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    shards: tuple[int, ...] = ()
    ttl_ms: int = 0
    wait_ms: int = 0
    prefix_only: bool = True


@dataclass(frozen=True, slots=True)
class Renew:
    ticket: Ticket
    leases: tuple[LeaseId, ...]
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    ticket: Ticket
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Slots to save `shards` (empty: all) of each key.

    `parents` is empty (keys[i-1] is the parent of keys[i], and `parent` that of keys[0]) or one per key.
    `token_counts` is empty (full chunks) or one per key; fewer tokens than a chunk make a tail.
    """

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    parent: ChunkKey = ChunkKey(b"")
    parents: tuple[ChunkKey, ...] = ()
    token_counts: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    derived: bool = False
    maker: bytes = b""
    ttl_ms: int = 0
    transient: bool = False
    """The worker keeps these bytes itself: they leave DRAM as soon as they are on SSD and nobody pins them."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Put bytes into the reserved slots, ahead of the Commit that makes them visible: rows of a region that the worker
    lent us, or (region 0) what Commit would take. The worker commits once it knows that rows of a region were its own
    until the copy had ended; a later Fill of the same slots replaces an earlier one."""

    ticket: Ticket
    reservation: ReservationId
    region: RegionId
    offsets: tuple[int, ...]
    """One per (key, shard) that is filled, in grant order; each row has the length of its shard. Empty for bytes that
    were written in place."""
    numbers: tuple[int, ...] = ()
    """Which of the granted (key, shard), counted in grant order, ascending; none: all."""


@dataclass(frozen=True, slots=True)
class Commit:
    """All or nothing. `staged` has one piece per granted (key, shard) that no Fill has named (or per each, which
    replaces what was filled), in grant order; empty when bytes were written in place (protection `group`)."""

    ticket: Ticket
    reservation: ReservationId
    staged: tuple[StagedPiece, ...] = ()
    wait: Wait = Wait.VISIBLE
    checksums: tuple[int, ...] = ()
    """One per granted (key, shard), of what the daemon itself has put into the slots: there is nothing to copy. No
    worker can say so."""
    told: tuple[int, ...] = ()
    """The same of what the worker has written in place (protection `group` alone): it could write anything there, and
    what does not match is a miss, as if the bytes had changed since."""


@dataclass(frozen=True, slots=True)
class Abort:
    ticket: Ticket
    reservations: tuple[ReservationId, ...]


@dataclass(frozen=True, slots=True)
class ReportLoad:
    """The worker found that loaded bytes do not match their checksum; the core has them checked."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ReportDuplicates:
    """What `maker` computed for chunks that somebody else had committed before (GrantResult.ALREADY), to be compared
    with what is kept: the same key from two engines or devices is to have the same bytes (invariant 1)."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    checksums: tuple[int, ...]
    """xxh3_64; per key, then per shard."""
    shards: tuple[int, ...] = ()
    """Of each key; empty: all."""
    maker: bytes = b""


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One entry of a manifest. `first_token` is the position at which the KV was computed; `delta` is what must be
    added to it when it is loaded. `approximate` entries make everything computed after them derived."""

    key: ChunkKey
    first_token: int
    token_count: int
    delta: int = 0
    approximate: bool = False


class SessionEntries(Sequence[SessionEntry]):
    """Entries as columns, because a long session has tens of thousands. It reads like a tuple of `SessionEntry`. The
    arrays may be those of a manifest: nobody changes one."""

    __slots__ = ("approximate", "delta", "first_token", "keys", "token_count")

    def __init__(
        self,
        keys: list[ChunkKey],
        first_token: array[int],
        token_count: array[int],
        delta: array[int],
        approximate: bytearray,
    ) -> None:
        """All of one length; the arrays have signed types."""
        self.keys = keys
        self.first_token = first_token
        self.token_count = token_count
        self.delta = delta
        self.approximate = approximate

    @property
    def columns(self) -> tuple[list[ChunkKey], array[int], array[int], array[int], bytearray]:
        """In the order of the fields of `SessionEntry`."""
        return self.keys, self.first_token, self.token_count, self.delta, self.approximate

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> SessionEntry: ...

    @overload
    def __getitem__(self, index: slice) -> SessionEntries: ...

    def __getitem__(self, index: int | slice) -> SessionEntry | SessionEntries:
        keys, first, count, delta, approximate = self.columns
        if isinstance(index, slice):
            return SessionEntries(keys[index], first[index], count[index], delta[index], approximate[index])
        return SessionEntry(keys[index], first[index], count[index], delta[index], bool(approximate[index]))

    def __iter__(self) -> Iterator[SessionEntry]:
        return map(SessionEntry, *self.columns[:-1], map(bool, self.approximate))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SessionEntries):
            return self.columns == other.columns
        return isinstance(other, tuple) and tuple(self) == other

    __hash__ = None  # type: ignore[assignment]  # as of any other mutable sequence

    def __repr__(self) -> str:
        return f"SessionEntries({len(self)} entries, {sum(self.token_count)} tokens)"


@dataclass(frozen=True, slots=True)
class GetSession:
    ticket: Ticket
    namespace: NamespaceId
    session: bytes


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """New manifest version = the first `keep` entries of version `expected_version` + `append` (0: the session is new).

    Every appended key must be committed. The last entry may be a tail. Compare-and-set on `expected_version`.
    """

    ticket: Ticket
    namespace: NamespaceId
    session: bytes
    expected_version: int
    keep: int
    append: tuple[SessionEntry, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """New manifest without the entries that lie in tokens [first_token, first_token + token_count).

    The range must fall on entry boundaries. What follows is kept at its positions (a gap) or, with `close_gap`, moved
    down by a position delta; either way it attended to what was cut, so it becomes approximate.
    """

    ticket: Ticket
    namespace: NamespaceId
    session: bytes
    expected_version: int
    first_token: int
    token_count: int
    close_gap: bool = False


@dataclass(frozen=True, slots=True)
class Fork:
    ticket: Ticket
    namespace: NamespaceId
    session: bytes
    new_session: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop a session (and the chunks that nothing else names), or single keys."""

    ticket: Ticket
    namespace: NamespaceId
    session: bytes = b""
    keys: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True, slots=True)
class ListSessions:
    ticket: Ticket
    namespace: NamespaceId | None = None
    limit: int = 1000
    skip: int = 0
    """So many of those that would come first."""


@dataclass(frozen=True, slots=True)
class Explain:
    """History of a session, or of single keys."""

    ticket: Ticket
    namespace: NamespaceId
    session: bytes = b""
    keys: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True, slots=True)
class GetStats:
    """Of the caller's tenant; of everybody for an admin."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Hint:
    """ "Job J, for session S or keys K, is n-th in the queue": what the scheduler knows of the future.

    `position` 0 is the head of the queue; it orders jobs, and equal positions are equally near.
    """

    job: bytes
    position: int
    session: bytes = b""
    keys: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishQueue:
    """The queue of one scheduler. A snapshot replaces whatever this worker published before for the namespace; a delta
    adds, moves and removes jobs. Hints end by themselves after `ttl_ms`."""

    ticket: Ticket
    namespace: NamespaceId
    hints: tuple[Hint, ...]
    removed: tuple[bytes, ...] = ()
    snapshot: bool = True
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Scrub:
    """Begin a round of the scrubber that looks at everything now (`start`; one that was asked for before is joined), at
    `bytes_per_s` (0: a modest rate), or only say how far it is. Admins only, like the next two."""

    ticket: Ticket
    start: bool = False
    bytes_per_s: int = 0
    round: int = 0
    """To look at: one that was asked for; 0: the newest."""


@dataclass(frozen=True, slots=True)
class ListQuarantine:
    """Which slots are out of service. With `retry` those that hold nothing any more are rewritten and verified now,
    also those that failed it before."""

    ticket: Ticket
    limit: int = 1000
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Purge all that `maker` made in the last `age_ms_max` (0: ever), in all namespaces and tiers; what an earlier
    start of the daemon left is purged whatever its age, which nobody knows. The maker gets no reservation any more.

    Misses at once; answered when a restart cannot bring any of it back. `dry_run` only counts."""

    ticket: Ticket
    maker: bytes
    age_ms_max: int = 0
    dry_run: bool = False
    sessions_max: int = 1000


@dataclass(frozen=True, slots=True)
class SegmentsUnmapped:
    """The worker has no mapping of these retired segments any more."""

    ticket: Ticket
    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class WantSegments:
    """The worker asks for the descriptors of these segments. Those it may have are answered (`SegmentsAllowed`), and
    from then on hold memory until it unmaps them or dies."""

    ticket: Ticket
    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """A segment that was to be created exists and its pages are in."""

    op: OpId


@dataclass(frozen=True, slots=True)
class SegmentFailed:
    op: OpId
    why: str


@dataclass(frozen=True, slots=True)
class OpDone:
    """A copy or checksum ended; `checksums` has one xxh3_64 per extent, in the op's order."""

    op: OpId
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpFailed:
    """The op has returned and its target bytes are undefined."""

    op: OpId
    why: str


@dataclass(frozen=True, slots=True)
class SlabReady:
    """The slab file exists, preallocated."""

    op: OpId


@dataclass(frozen=True, slots=True)
class DiskDone:
    """A disk op has returned: one result per record, or per op for ProbeDisk, CreateSlab's failure and WriteIndex.

    Results other than OK say why; after OK of a read the target slot holds the record's verified bytes."""

    op: OpId
    results: tuple[DiskResult, ...]
    why: str = ""
    """Of the first of them that is not OK."""
    whys: tuple[str, ...] = ()
    """One per result; empty if all are OK, or the op has only one."""
    slabs: tuple[SlabId, ...] = ()
    """Of a WriteIndex: the slab files whose sync failed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: expiry, compaction, bounds."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nobody waits for anything just now: a little of what is long, or of what will be wanted next, can be done."""


Event = (
    WorkerJoined
    | WorkerLeft
    | WorkerClosed
    | Open
    | Match
    | Acquire
    | Renew
    | Release
    | Reserve
    | Fill
    | Commit
    | Abort
    | ReportLoad
    | ReportDuplicates
    | GetSession
    | UpdateSession
    | Truncate
    | Fork
    | Forget
    | ListSessions
    | Explain
    | GetStats
    | PublishQueue
    | Scrub
    | ListQuarantine
    | Recall
    | SegmentsUnmapped
    | WantSegments
    | SegmentReady
    | SegmentFailed
    | OpDone
    | OpFailed
    | SlabReady
    | DiskDone
    | Tick
    | Idle
)


# --------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Opened:
    namespace: NamespaceId
    salt: bytes
    """32 bytes: the namespace's digest, to key chunk hashes with."""
    epoch: int
    segment_bytes: int
    notes: tuple[str, ...] = ()
    """In which fields other namespaces of the same tenant and model differ: why there may be no hits."""


@dataclass(frozen=True, slots=True)
class Matched:
    usable: int
    """Leading keys that are hits, leaving at least one token to compute if token_count was given."""
    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Acquired:
    lease: LeaseId
    """0 when nothing was a hit."""
    ttl_ms: int
    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    extents: Extents
    """Of the hits, in key order, then in the order of the wanted shards."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """Per lease: remaining time in ms, 0 when it is gone (released, expired, or over the share it may hold)."""

    ttl_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    reservation: ReservationId
    """0 when nothing was granted."""
    ttl_ms: int
    results: tuple[GrantResult, ...]
    extents: Extents
    """Per granted key, in key order, then in shard order. Under protection `sealed` only `length` may be used."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Every row was copied, and the reservation can be committed."""


@dataclass(frozen=True, slots=True)
class Committed:
    results: tuple[CommitResult, ...]
    """One per granted key."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    session: bytes
    version: int
    entries: Sequence[SessionEntry]
    usable: int
    """Leading entries that are whole: what can be loaded now."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One line of `kvctl sessions`."""

    session: bytes
    tenant: str
    namespace: NamespaceId
    version: int
    entry_count: int
    token_count: int
    usable: int
    resident_bytes: int
    idle_ms: Millis
    bytes: int = 0
    """Of all its chunks, wherever they are."""
    ssd_bytes: int = 0
    """Of those that have a copy on SSD."""
    reason: Reason = Reason.NONE
    """Of the first entry that is not in DRAM; NONE if all are."""


@dataclass(frozen=True, slots=True)
class SessionList:
    rows: tuple[SessionRow, ...]
    total: int


@dataclass(frozen=True, slots=True)
class ChunkHistory:
    """One line of `kvctl explain`."""

    key: ChunkKey
    outcome: Outcome
    reason: Reason
    token_count: int
    shards_ready: int
    shards: int
    pins: int
    hits: int
    age_ms: Millis
    idle_ms: Millis
    manifests: int
    derived: bool
    maker: bytes
    """16 bytes of each that committed a shard."""
    bytes: int = 0
    """Of all its shards."""
    tiers: frozenset[Tier] = frozenset()
    """Where all of it is."""
    moving: bool = False
    """Being written to SSD, or read from there."""
    durable: bool = False
    """It survives a restart."""
    needed: bool = False
    """By a queued job inside the eviction window."""


@dataclass(frozen=True, slots=True)
class Explained:
    version: int
    chunks: tuple[ChunkHistory, ...]
    rest: tuple[ChunkKey, ...] = ()
    """Keys that were asked for too, and are to be asked for next: one step explains only so many."""


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; `count` of whatever it was about."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class QueueAccepted:
    """One result per hint, and how far the windows reach now."""

    results: tuple[HintResult, ...]
    prefetch_window: int
    """Jobs at the head of all queues whose chunks fit in DRAM: C_mem / S_kv."""
    eviction_window: int
    """Jobs whose chunks fit in DRAM and SSD: (C_mem + C_disk) / S_kv."""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a round is, or how it ended."""

    round: int
    """0: there was none yet."""
    running: bool
    asked_for: bool
    """Else it is the background's."""
    age_ms: Millis
    rows: int
    rows_in_all: int
    chunks: int
    """That were verified, in some tier."""
    bytes: int
    corrupt: int
    """Chunks."""
    failed: int
    """Records that could not be read."""
    bytes_per_s: int
    finished: int
    """Number of the last round that reached its end."""
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class QuarantinedSlot:
    tier: Tier
    place: int
    """Number of the segment or of the slab file."""
    slot: int
    slot_bytes: int
    namespace: NamespaceId
    key: ChunkKey
    reason: str
    age_ms: Millis
    next: str
    """What brings it back to service, or why nothing does."""


@dataclass(frozen=True, slots=True)
class QuarantineList:
    rows: tuple[QuarantinedSlot, ...]
    """Oldest first."""
    dram: int
    """Slots that are quarantined, listed or not."""
    ssd: int
    returned: int
    failed: int


@dataclass(frozen=True, slots=True)
class RecalledSession:
    session: bytes
    tenant: str
    namespace: NamespaceId
    version: int
    entry: int
    """The first of its entries that the maker made."""
    first_token: int


@dataclass(frozen=True, slots=True)
class Recalled:
    chunks: int
    bytes: int
    pinned: int
    """Of the chunks: a lease still reads them, and they go with it."""
    sessions: tuple[RecalledSession, ...]
    sessions_in_all: int


@dataclass(frozen=True, slots=True)
class SegmentsAllowed:
    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Plain numbers and rows, ready for JSON: see `Store.stats`."""

    values: Mapping[str, Any] = field(default_factory=dict)


Answer = (
    Opened
    | Matched
    | Acquired
    | Renewed
    | Reserved
    | Filled
    | Committed
    | SessionInfo
    | SessionList
    | Explained
    | Done
    | QueueAccepted
    | Scrubbed
    | QuarantineList
    | Recalled
    | SegmentsAllowed
    | Stats
    | StoreError
)


# --------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Reply:
    ticket: Ticket
    answer: Answer


@dataclass(frozen=True, slots=True)
class ChunksSettled:
    """Push to a worker: keys it waited for are READY (`ready`) or will not come (`failed`)."""

    worker: WorkerId
    namespace: NamespaceId
    ready: tuple[ChunkKey, ...]
    failed: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class SegmentsRetired:
    """Push to a worker: unmap these and say so."""

    worker: WorkerId
    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class LeasesRevoked:
    """Push to a worker: these expired and their slots were wanted. Loads under them are void."""

    worker: WorkerId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class SetGenerations:
    """Write the cells of one segment's header; performed before any later effect. Readers of the old value are void."""

    segment: SegmentId
    cells: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy staged pieces of a worker into slots and checksum the destination's bytes. Answer: OpDone or OpFailed."""

    op: OpId
    worker: WorkerId
    pieces: tuple[StagedPiece, ...]
    targets: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class FillSlots:
    """As CopyIn, with rows of a region that the worker lent us. Answer: OpDone, or OpFailed if any of it could not be
    read: the region may be cut short, or taken back, at any time."""

    op: OpId
    worker: WorkerId
    region: RegionId
    pieces: tuple[StagedPiece, ...]
    targets: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum slots in place (group protection, audits, reports). Answer: OpDone or OpFailed."""

    op: OpId
    extents: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class MoveSlots:
    """Copy slot to slot, checksumming the destination. Sources are pinned by the core until the answer."""

    op: OpId
    sources: Sequence[Extent]
    targets: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class CreateSegment:
    """Make a segment and fault its pages in, in the background. Answer: SegmentReady or SegmentFailed."""

    op: OpId
    segment: SegmentId
    bytes: int
    cells: int


@dataclass(frozen=True, slots=True)
class AssignSegment:
    """This segment now serves the namespace: only its workers may have the descriptors."""

    segment: SegmentId
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class DestroySegment:
    """No worker maps it and no op runs on it: close it, its memory returns."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class CreateSlab:
    """Make and preallocate a slab file. Answer: SlabReady or DiskDone with what went wrong."""

    op: OpId
    slab: SlabId
    slot_bytes: int
    """Size of a slot in the file: header, bytes and padding."""
    slots: int


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """DRAM slots -> disk slots, each with its self-describing header; not synced. The core pins the sources."""

    op: OpId
    records: tuple[Record, ...]
    sources: Sequence[Extent]
    targets: tuple[DiskPlace, ...]


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Disk slots -> RESERVED DRAM slots, verified against `records`. Answered only when the calls have returned: a late
    read must never land in a reused slot, so the core quarantines the targets of a late op until then."""

    op: OpId
    records: tuple[Record, ...]
    sources: tuple[DiskPlace, ...]
    targets: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class ScrubRecords:
    """Read and verify records where they are, after everything else that the disk is asked for. Answer: DiskDone. Slots
    may be freed and written anew meanwhile: the core knows which results still count."""

    op: OpId
    records: tuple[Record, ...]
    sources: tuple[DiskPlace, ...]
    bytes_per_s: int = 0
    """A long record is read no faster than about this; 0: as fast as it goes."""


@dataclass(frozen=True, slots=True)
class RewriteRecords:
    """Write patterns over whole disk slots that hold nothing any more, sync, and read them back. Answer: DiskDone, OK
    for a slot that kept what was written."""

    op: OpId
    targets: tuple[DiskPlace, ...]


@dataclass(frozen=True, slots=True)
class RewriteSlots:
    """The same with DRAM slots. Answer: OpDone with 1 per slot that kept what was written, else 0; or OpFailed."""

    op: OpId
    targets: Sequence[Extent]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """To be logged: bytes of a chunk are not those that were committed; their slots are out of service."""

    tier: Tier
    places: tuple[tuple[int, int], ...]
    """(segment or slab file, slot)"""
    namespace: NamespaceId
    key: ChunkKey
    why: str
    miss: bool
    """Else another tier has good ones."""


@dataclass(frozen=True, slots=True)
class DuplicateDiffers:
    """To be logged: two makers computed different bytes for one chunk, and what we have is what the first committed."""

    namespace: NamespaceId
    key: ChunkKey
    shard: int
    first: bytes
    second: bytes


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Index entry of one chunk: where all its shards are on disk."""

    namespace: int
    """Number of the namespace in the index."""
    key: ChunkKey
    token_count: int
    flags: int
    maker: bytes
    places: tuple[DiskPlace, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    number: int
    tenant: str
    spec: NamespaceSpec


@dataclass(frozen=True, slots=True)
class SessionRecord:
    namespace: int
    session: bytes
    version: int
    entries: Sequence[SessionEntry]


@dataclass(frozen=True, slots=True)
class WriteIndex:
    """fdatasync `slabs`, then one index transaction, in this order: what the index names is on the disk.

    One at a time. Answer: DiskDone with one result; after OK everything in it is durable. After a failure nothing of it
    is in the index, but perhaps some of its deletions if it only deletes. CORRUPT: a sync failed, now or before, and a
    record of one of these chunks may be lost for good."""

    op: OpId
    slabs: tuple[SlabId, ...]
    namespaces: tuple[NamespaceRecord, ...] = ()
    namespaces_deleted: tuple[int, ...] = ()
    makers: tuple[tuple[bytes, tuple[bytes, ...]], ...] = ()
    """Digests that stand for several makers in `chunks`, and who they are."""
    chunks: tuple[ChunkRecord, ...] = ()
    chunks_deleted: tuple[tuple[int, ChunkKey], ...] = ()
    sessions: tuple[SessionRecord, ...] = ()
    sessions_deleted: tuple[tuple[int, bytes], ...] = ()
    slabs_deleted: tuple[SlabId, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeDisk:
    """Write, sync, read back and verify a small file, and try a transaction on the index. Answer: DiskDone."""

    op: OpId


@dataclass(frozen=True, slots=True)
class DropStaging:
    """This worker's connection has ended and nothing of its staging memory will be copied any more. Its process may
    live on and hold mappings for long; others need that memory."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Nothing of this worker is left in the core: the edge may close its pidfd and staging memory."""

    worker: WorkerId


Effect = (
    Reply
    | ChunksSettled
    | SegmentsRetired
    | LeasesRevoked
    | SetGenerations
    | CopyIn
    | FillSlots
    | Checksum
    | MoveSlots
    | CreateSegment
    | AssignSegment
    | DestroySegment
    | CreateSlab
    | WriteRecords
    | ReadRecords
    | WriteIndex
    | ProbeDisk
    | ScrubRecords
    | RewriteRecords
    | RewriteSlots
    | Quarantined
    | DuplicateDiffers
    | DropStaging
    | ForgetWorker
)
