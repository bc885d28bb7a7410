"""What enters the core: requests of workers, with a `Ticket` where an answer is wanted, and facts (a copy ended)."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.answers import SharedManifest
from kvstore.layout import NamespaceSpec
from kvstore.types import (
    ChunkKey,
    DiskResult,
    Found,
    Hint,
    HintAction,
    LeaseId,
    NamespaceId,
    OpId,
    RegionId,
    ReservationId,
    SegmentId,
    SessionEntry,
    SlabId,
    StagedPiece,
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

    With `promote` off, no promotion begins, and nobody waits for what is on SSD: the answer's `backlog` says what that
    would take.

    `local`: the caller is another node, which asks the others itself, so what is beyond this one is a miss.
    """

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    shards: tuple[int, ...] = ()
    ttl_ms: int = 0
    wait_ms: int = 0
    prefix_only: bool = True
    promote: bool = True
    local: bool = False


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
class Save:
    """Reserve and Commit at once, of what stands in the worker's staging memory already (protection `sealed` alone).
    What is granted becomes visible all together, or none of it."""

    ticket: Ticket
    reserve: Reserve
    """With the same ticket; its `ttl_ms` means nothing, since the copy begins at once."""
    offsets: tuple[int, ...]
    """In staging memory, one per (key, shard) in request order. Those of what is not granted are not looked at."""
    wait: Wait = Wait.VISIBLE


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
    wrong: bool = False
    """Instead: the worker computed these again, and they are not what it computes. There are no checksums."""
    healthy: bool = False
    """With `wrong`: it passes its self-test."""


@dataclass(frozen=True, slots=True)
class ReportResident:
    """What the worker keeps in memory of its own, as a snapshot of the namespace. The answer ranks these chunks by the
    queue."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    ttl_ms: int = 0
    """0: the default of hints."""


@dataclass(frozen=True, slots=True)
class GetSession:
    ticket: Ticket
    namespace: NamespaceId
    session: bytes
    elsewhere: bool = False
    """Also what other nodes told of it."""


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
    session: bytes = b""
    """Only those of this name, in whatever namespaces; empty: all."""


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
class PublishQueue:
    """The queue of one scheduler. A snapshot replaces whatever this worker published before for the namespace; a delta
    adds, moves and removes jobs. Hints end by themselves after `ttl_ms`.

    A scheduler that numbers its messages (from 1 on, one after the other) is told when one of them was lost: a delta is
    taken only after the one before it, a message that was taken is not taken again, and each renews all that was said
    before. A snapshot is taken whatever was lost."""

    ticket: Ticket
    namespace: NamespaceId
    hints: tuple[Hint, ...]
    removed: tuple[bytes, ...] = ()
    snapshot: bool = True
    ttl_ms: int = 0
    number: int = 0
    """0: it is not numbered."""
    by_model: bool = False
    """`namespace` stands for its model: each hint is for one of the model's namespaces (`hint_namespaces.py`)."""
    prompts: tuple[tuple[Prompt, ...], ...] = ()
    """Of each hint, or none at all: what else its keys may be."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Chunk keys of one prompt, as one namespace has them."""

    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ApplyActions:
    """Hint actions: each is in force from now on, for its time, or until its name comes in `cancelled`, or its worker
    goes. Cancelled ones go first."""

    ticket: Ticket
    namespace: NamespaceId
    actions: tuple[HintAction, ...] = ()
    cancelled: tuple[bytes, ...] = ()
    by_model: bool = False
    """As in `PublishQueue`,"""
    prompts: tuple[tuple[Prompt, ...], ...] = ()
    """and of each action."""


@dataclass(frozen=True, slots=True)
class Touch:
    """A request of an engine used these chunks, in chain order, and had no need to ask for them: they were in the
    engine's own caches. Their ages, and those of ghosts among them, are those of the last use anywhere."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Touched:
    """Lookups that the worker made by itself, in the directory: the same for ages, hits and statistics as if it had
    asked by Acquire. Nobody waits for an answer."""

    ticket: Ticket
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    """Of all lookups, one after the other, each in chain order."""
    counts: tuple[int, ...]
    """Keys of each lookup."""
    found: bytes
    """By key: 1 a hit, 0 the miss at which the lookup stopped, or one of several; 2 behind that."""


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
class PurgeTenant:
    """All that a tenant has goes, in every tier and at every node. For operators. Answer: Purged, when no restart can
    bring it back and the other nodes are told."""

    ticket: Ticket
    tenant: str
    dry_run: bool = False


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
class WantDirectory:
    """The worker asks for the descriptor of a namespace's directory: `DirectoryAllowed`."""

    ticket: Ticket
    namespace: NamespaceId


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
class IndexUsage:
    """What the index holds, in bytes of the pages in use; pages that wait to be used again do not count."""

    bytes_max: int
    """Beyond this nothing is written; what is left of the file is for deletions, which need pages too."""
    chunks: int = 0
    sessions: int = 0
    other: int = 0
    """Namespaces, slab files, makers, and the list of free pages."""
    full: bool = False
    """The transaction that this is the answer of was refused because it would have been more."""

    @property
    def used(self) -> int:
        return self.chunks + self.sessions + self.other


@dataclass(frozen=True, slots=True)
class DiskTrouble:
    """Others did something to the SSD tier's files, or a limit of the system's stands against them: no call has failed,
    but what is written now may not last. Probes fail until it is mended."""

    why: str


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
    usage: IndexUsage | None = None
    """Of a WriteIndex: of the index after it, as far as that is known."""


@dataclass(frozen=True, slots=True)
class ChunksLookedUp:
    """A source has answered a LookUpChunks, or could not (`failed` says why; then `found` is empty)."""

    op: OpId
    found: tuple[Found | None, ...] = ()
    """Per key."""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """What came of one chunk. After OK its slots hold verified bytes; else they are undefined."""

    result: DiskResult
    """CORRUPT: not what was asked for, or not whole. REUSED: there no more. IO_ERROR: the source failed."""
    checksums: tuple[int, ...] = ()
    """xxh3_64 of each shard's bytes in the slots. This and the next of OK alone."""
    token_count: int = 0
    derived: bool = False
    makers: tuple[bytes, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class ChunksFetched:
    """A FetchChunks has returned: nothing writes to its targets any more."""

    op: OpId
    chunks: tuple[FetchedChunk, ...]
    """Per key."""
    count: int = 0
    """Up to which count of the source's forgets they were held against, at least."""


@dataclass(frozen=True, slots=True)
class ChunksStored:
    """A StoreChunks has returned: its sources are read no more."""

    op: OpId
    results: tuple[DiskResult, ...]
    """Per key. NO_SPACE: the store is full."""
    failed: str = ""
    """Why the store failed, if it did."""
    cost_ms: float = 0.0
    """How long a fetch of one is expected to take."""
    wheres: tuple[object, ...] = ()
    """`Found.where` of each key; empty: None of all."""


@dataclass(frozen=True, slots=True)
class ChunksForgotten:
    """A ForgetChunks was carried out; or (`why`) it is noted on this node, and the store is told when it is back: then
    this comes once more, without a reason."""

    op: OpId
    why: str = ""


@dataclass(frozen=True, slots=True)
class Heeded:
    """How far this node has carried out what its journal of forgets says (`tiers/remote/tombstones.py`): what stands at
    this position or before has left the index."""

    channel: str
    journal: bytes
    """16 bytes that were drawn for it: the positions of another one mean nothing."""
    position: int


@dataclass(frozen=True, slots=True)
class ForgottenElsewhere:
    """A source was read: other nodes have forgotten this since the last time, in this order."""

    source: str
    forgotten: tuple[tuple[bytes, ChunkKey, bytes], ...]
    """As in ForgetChunks. A digest that this node knows no namespace of means nothing to it."""
    count: int
    """Of the source's forgets, with these: nothing up to it is missing."""
    age_ms: int = 0
    """How long ago the source was asked."""
    heeded: Heeded | None = None
    """How far this node's journal goes, with these; None: it keeps none."""
    untold: int = 0
    """Forgets of this node that the source does not know yet, by its journal: those of before the start, too."""


@dataclass(frozen=True, slots=True)
class PurgedBeyond:
    """What a TenantPurged or ForgetSessions asked for is done: no restart has to ask again."""

    op: OpId


@dataclass(frozen=True, slots=True)
class ToldResult:
    done: bool
    """False: another node had told what this one had not seen."""
    there: SharedManifest | None
    """What is told now."""


@dataclass(frozen=True, slots=True)
class SessionsShared:
    """A ShareSessions has ended, with a result for each; or failed, and nobody knows what came of it."""

    op: OpId
    results: tuple[ToldResult, ...] = ()
    failed: str = ""


@dataclass(frozen=True, slots=True)
class SessionsLookedUp:
    """A LookUpSessions has ended, with what is told of each; or failed."""

    op: OpId
    found: tuple[SharedManifest | None, ...] = ()
    failed: str = ""


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
    | Save
    | Abort
    | ReportLoad
    | ReportDuplicates
    | ReportResident
    | GetSession
    | UpdateSession
    | Truncate
    | Fork
    | Forget
    | ListSessions
    | Explain
    | GetStats
    | PublishQueue
    | ApplyActions
    | Touch
    | Touched
    | Scrub
    | ListQuarantine
    | Recall
    | PurgeTenant
    | SegmentsUnmapped
    | WantSegments
    | WantDirectory
    | SegmentReady
    | SegmentFailed
    | OpDone
    | OpFailed
    | SlabReady
    | DiskDone
    | DiskTrouble
    | ChunksLookedUp
    | ChunksFetched
    | ChunksStored
    | ChunksForgotten
    | ForgottenElsewhere
    | PurgedBeyond
    | SessionsShared
    | SessionsLookedUp
    | Tick
    | Idle
)
