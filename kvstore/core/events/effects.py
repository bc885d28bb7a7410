"""What leaves the core: what the loop is to do, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.answers import Answer
from kvstore.core.events.requests import Heeded, Ticket
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    Extent,
    Extents,
    LeaseId,
    NamespaceId,
    OpId,
    Record,
    RegionId,
    SegmentId,
    SessionEntry,
    SlabId,
    StagedPiece,
    Tier,
    WorkerId,
)


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
class CreateDirectory:
    """Make the directory of a namespace, open and empty: memory that its workers may map and read."""

    namespace: NamespaceId
    shards: int
    rows_max: int
    slot_bytes: tuple[int, ...]
    """Per shard."""
    rows_in_dram: int
    """Of `rows_max`, those that are there at once soon."""
    ask_for_others: bool
    """Chunks may be beyond this node, of which nothing is published."""


@dataclass(frozen=True, slots=True)
class CloseDirectory:
    """Readers ask the daemon from now on; what they are copying is void."""

    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """Readers may look by themselves again."""

    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class DropDirectory:
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class Unpublish:
    """These rows of a directory hold nothing any more. Performed before any byte comes into a slot of theirs."""

    namespace: NamespaceId
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Publish:
    """What these rows of a directory hold: a chunk each, in DRAM (`extents`, for each all its shards), or on SSD alone
    (none). Tags of the keys are put beside the generations of its slots. A row that holds a chunk already holds the
    same."""

    namespace: NamespaceId
    rows: Sequence[int]
    keys: Sequence[ChunkKey]
    tokens: Sequence[int]
    extents: Sequence[Extent]


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
    """Checksum slots in place (group protection, audits, reports). Answer: OpDone or OpFailed, which says nothing about
    the bytes. `worker`: for whom; None: for the daemon itself."""

    op: OpId
    extents: Sequence[Extent]
    worker: WorkerId | None = None


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
class Bar:
    """A maker whose chunks are not stored any more."""

    mark: bytes
    """`keys.tenant_mark` of the tenant for which it is quarantined; empty: it was recalled for all."""
    maker: bytes
    purge: bool
    """All that it made is to go, also what a restart finds."""


@dataclass(frozen=True, slots=True)
class WriteIndex:
    """fdatasync `slabs`, then transactions of the index, in this order: what the index names is on the disk.

    It either deletes or writes, never both: a deletion must not fail because there is no room for something else. One
    at a time. Answer: DiskDone with one result and the usage of the index; after OK everything in it is durable. After
    a failure any part of it may be in the index. NO_SPACE with `usage.full`: deletions make room. CORRUPT: a sync
    failed, now or before, and a record of one of these chunks may be lost for good."""

    op: OpId
    slabs: tuple[SlabId, ...]
    namespaces: tuple[NamespaceRecord, ...] = ()
    namespaces_deleted: tuple[int, ...] = ()
    makers: tuple[tuple[bytes, tuple[bytes, ...]], ...] = ()
    """Digests that stand for several makers in `chunks`, and who they are."""
    makers_deleted: tuple[bytes, ...] = ()
    bars: tuple[Bar, ...] = ()
    heeded: tuple[Heeded, ...] = ()
    chunks: tuple[ChunkRecord, ...] = ()
    chunks_deleted: tuple[tuple[int, ChunkKey], ...] = ()
    sessions: tuple[SessionRecord, ...] = ()
    sessions_deleted: tuple[tuple[int, bytes], ...] = ()
    slabs_deleted: tuple[SlabId, ...] = ()

    @property
    def deletes(self) -> bool:
        return bool(
            self.chunks_deleted
            or self.sessions_deleted
            or self.namespaces_deleted
            or self.makers_deleted
            or self.slabs_deleted
        )

    @property
    def writes(self) -> bool:
        return bool(
            self.chunks or self.sessions or self.namespaces or self.makers or self.bars or self.heeded
        )


@dataclass(frozen=True, slots=True)
class ProbeDisk:
    """Write, sync, read back and verify a small file, and try a transaction on the index. Answer: DiskDone."""

    op: OpId


@dataclass(frozen=True, slots=True)
class LookUpChunks:
    """Ask a source beyond this node what it has of these keys, which are in chain order for a prefix lookup. Answer:
    ChunksLookedUp, within `Limits.lookup_deadline_ms`."""

    op: OpId
    source: str
    namespace: NamespaceId
    digest: bytes
    """32 bytes: the namespace's `salt`, the same on every node."""
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class FetchChunks:
    """Chunks of a source -> RESERVED DRAM slots, verified. Answer: ChunksFetched, only when nothing writes to the
    targets any more: the core quarantines those of a late op until then."""

    op: OpId
    source: str
    namespace: NamespaceId
    digest: bytes
    keys: tuple[ChunkKey, ...]
    wheres: tuple[object, ...]
    """`Found.where` of each key."""
    targets: Extents
    """Of all shards of the first key, then of the next."""


@dataclass(frozen=True, slots=True)
class ChunkAbout:
    """What a record says of its chunk beside the bytes."""

    token_count: int
    derived: bool
    makers: tuple[bytes, ...]
    parent: ChunkKey
    """Key of the chunk before it, as far as it is known; else empty."""


@dataclass(frozen=True, slots=True)
class StoreChunks:
    """DRAM slots -> the REMOTE store. The core pins the sources. Answer: ChunksStored, when they are read no more."""

    op: OpId
    source: str
    namespace: NamespaceId
    digest: bytes
    keys: tuple[ChunkKey, ...]
    about: tuple[ChunkAbout, ...]
    sources: Extents
    """Of all shards of the first key, then of the next; with the checksums of their commits."""
    generation: int = 0
    """Up to which count of that store's forgets this node has dropped what was forgotten: stands in the records."""


@dataclass(frozen=True, slots=True)
class DropChunks:
    """These records are not wanted any more; they would expire by themselves. No answer."""

    op: OpId
    source: str
    digest: bytes
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ForgetChunks:
    """No node may serve any of this again. Answer: ChunksForgotten."""

    op: OpId
    source: str
    forgotten: tuple[tuple[bytes, ChunkKey, bytes], ...]
    """(digest of the namespace, key, maker): a maker alone; a maker for one tenant, whose `keys.tenant_mark` the key is
    then; all of a namespace, or one key of it."""


@dataclass(frozen=True, slots=True)
class SessionTold:
    """One session, as this node has it. It replaces what is told of it if that is `seen` (`seen_count`: its count, and
    nothing is older than that), or if nothing is."""

    digest: bytes
    """Of its namespace, as in LookUpChunks."""
    mark: bytes
    """Of its tenant (`keys.tenant_mark`)."""
    session: bytes
    version: int
    keys: tuple[ChunkKey, ...]
    """None: there is nothing that other nodes could use."""
    token_counts: tuple[int, ...]
    seen: bytes = b""
    """`SharedManifest.head`; empty: none."""
    seen_count: int = 0
    ends: bool = False
    """What is told goes, if it is `seen`."""


@dataclass(frozen=True, slots=True)
class ShareSessions:
    """Other nodes may hear of these. Answer: SessionsShared."""

    op: OpId
    source: str
    sessions: tuple[SessionTold, ...]


@dataclass(frozen=True, slots=True)
class LookUpSessions:
    """What other nodes told of these: (digest of the namespace, mark of its tenant, name). Answer: SessionsLookedUp."""

    op: OpId
    source: str
    sessions: tuple[tuple[bytes, bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class ForgetSessions:
    """What was told of a tenant's sessions goes, whoever told it. Answer: PurgedBeyond, once it has."""

    op: OpId
    source: str
    mark: bytes
    """`keys.tenant_mark`."""


@dataclass(frozen=True, slots=True)
class TenantPurged:
    """All that the core has of this tenant goes: what the edge keeps for it is to go, too. Answer: PurgedBeyond, once
    it has."""

    op: OpId
    mark: bytes
    """`keys.tenant_mark`: the core may know nothing else of it."""


@dataclass(frozen=True, slots=True)
class DropStaging:
    """This worker's connection has ended and nothing of its staging memory will be copied any more. Its process may
    live on and hold mappings for long; others need that memory."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Nothing of this worker is left in the core: the edge may close its pidfd and staging memory."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class TierEffect:
    """What a tier below DRAM of another kind than the SSD asks of its edge; each kind brings subclasses. Answer, unless
    a subclass says that there is none: DiskDone."""

    op: OpId


Effect = (
    Reply
    | ChunksSettled
    | SegmentsRetired
    | LeasesRevoked
    | SetGenerations
    | CreateDirectory
    | CloseDirectory
    | OpenDirectory
    | DropDirectory
    | Unpublish
    | Publish
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
    | TierEffect
    | LookUpChunks
    | FetchChunks
    | StoreChunks
    | DropChunks
    | ForgetChunks
    | ShareSessions
    | LookUpSessions
    | ForgetSessions
    | TenantPurged
    | Quarantined
    | DuplicateDiffers
    | DropStaging
    | ForgetWorker
)
