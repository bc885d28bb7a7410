"""What the store answers, as the core makes it and as the client hands it on. Imports only types.py and errors.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import StoreError
from kvstore.types import (
    ChunkKey,
    CommitResult,
    Extents,
    GrantResult,
    HintResult,
    HintState,
    LeaseId,
    Millis,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    SegmentId,
    SessionEntry,
    Tier,
)


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
class Backlog:
    """What lies between a request and those of its keys that are on SSD alone, when it was answered: whoever asks can
    tell whether to wait for them or to compute."""

    ssd_bytes: int = 0
    """Of the answer's keys with Reason.ON_SSD. All others are 0 when there are none."""
    ahead_bytes: int = 0
    """Of other chunks that are read before: being read, or asked for earlier by anybody. What is read ahead of need
    gives way, and does not count."""
    ssd_bytes_per_s: int = 0
    """How fast reads came of late, all together; 0: none came yet."""


NO_BACKLOG = Backlog()


@dataclass(frozen=True, slots=True)
class Matched:
    usable: int
    """Leading keys that are hits, leaving at least one token to compute if token_count was given."""
    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    backlog: Backlog = NO_BACKLOG


@dataclass(frozen=True, slots=True)
class Peeked:
    """What the directory of a namespace says at this moment."""

    usable: int
    """Leading keys whose bytes can be had, those on SSD included; as `Matched.usable`."""
    hits: int
    """Of them, the leading ones that are in DRAM."""
    outcomes: tuple[Outcome, ...] = ()
    """Of each key, whatever is missing before it: HIT in DRAM, PENDING on SSD alone, else MISS."""


@dataclass(frozen=True, slots=True)
class Acquired:
    lease: LeaseId
    """0 when nothing was a hit."""
    ttl_ms: int
    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    extents: Extents
    """Of the hits, in key order, then in the order of the wanted shards."""
    backlog: Backlog = NO_BACKLOG


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
class Saved:
    """Of a Save."""

    results: tuple[GrantResult, ...]
    """One per key."""
    committed: tuple[CommitResult, ...]
    """One per granted key."""


@dataclass(frozen=True, slots=True)
class SharedManifest:
    """What a node told the others of one of its sessions: which keys to look for, not that they are anywhere."""

    head: bytes
    """Tells it from every other one that was told: made of node, boot and version."""
    count: int
    """Higher than those that its writer had seen."""
    node: str
    version: int
    """Of the session at that node."""
    keys: tuple[ChunkKey, ...] = ()
    """None: the session is that node's own, or was forgotten."""
    token_counts: tuple[int, ...] = ()
    ours: bool = False
    """This start of this node told it."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    session: bytes
    version: int
    entries: Sequence[SessionEntry]
    usable: int
    """Leading entries that are whole: what can be loaded now of a chain."""
    usable_beyond: bytes = b""
    """Of the entries from `usable` on, a byte each: 1 where the entry can be loaded now, too. Entries of an approximate
    manifest (Prompt Cache's) do not need those before them."""
    entries_forgotten: bool = False
    """Of a repeated request: it was carried out, as `version`, but the session has moved on since, and what it held at
    that version is not remembered."""
    elsewhere: SharedManifest | None = None
    """What another node told of it last, where that was asked for."""


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
    hints: tuple[HintState, ...] = ()
    """Hint actions that name the session."""


@dataclass(frozen=True, slots=True)
class SessionList:
    rows: tuple[SessionRow, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Why a chunk is still there, and what decides when it goes."""

    rule: str
    """pinned; needed: by a queued job; unnamed tail: no manifest has it, it goes first; worth: by expected hits;
    recency; arrival."""
    jobs_before: int = 0
    """Queued jobs that come before the one that needs it first."""
    worth: float = 0.0
    """Hits that its slot may expect in an hour."""
    least_worth: float = 0.0
    """The same of what goes next from the tier that it is in."""
    kind: str = ""
    """What its past makes of it."""
    jobs_ahead: int = 0
    """Needed: queued jobs in the tenant's prefetch window,"""
    jobs_kept: int = 0
    """and in its eviction window;"""
    ahead_bytes: int = 0
    """how much of DRAM the former may take now,"""
    kept_bytes: int = 0
    """and how much of all tiers the latter."""


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
    """By a queued job, or a hint action, inside the eviction window."""
    hints: tuple[HintState, ...] = ()
    """Hint actions that name it, itself or its session."""
    resident_in: tuple[str, ...] = ()
    """Engine groups whose workers have it in memory of their own, as they reported."""
    standing: Standing | None = None
    """Of what is in DRAM, or on SSD alone."""


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
    not_durable: str = ""
    """Of a Forget: why a restart now could bring back what was forgotten; empty: it cannot."""


@dataclass(frozen=True, slots=True)
class QueueAccepted:
    """One result per hint, and how far the windows reach now."""

    results: tuple[HintResult, ...]
    prefetch_window: int
    """Jobs at the head of all queues whose chunks fit in DRAM: C_mem / S_kv."""
    eviction_window: int
    """Jobs whose chunks fit in DRAM and SSD: (C_mem + C_disk) / S_kv."""
    snapshot_wanted: bool = False
    """Nothing was taken: a numbered message before this one is not known here. Publish a snapshot."""
    namespaces: tuple[NamespaceId, ...] = ()
    """Of hints by model: where sessions and keys were looked for, the one opened last first."""


@dataclass(frozen=True, slots=True)
class ResidentRanks:
    """How soon what a worker keeps is needed."""

    ranks: tuple[int, ...]
    """One per key: 0 if no job inside the eviction window needs it; else from 1 on, what is needed first has 1."""


@dataclass(frozen=True, slots=True)
class ActionsApplied:
    """One result, and one number of chunks that it is about, per action."""

    results: tuple[HintResult, ...]
    """ACCEPTED: it is done, or in force. DEFERRED: in force, and chunks are on their way or wait for the SSD. CLIPPED:
    in force for the first of the chunks, as far as the tenant's share goes. REJECTED: nothing of it can be done."""
    chunks: tuple[int, ...]
    namespaces: tuple[NamespaceId, ...] = ()
    """As of `QueueAccepted`."""


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
class Purged:
    """Of a PurgeTenant, at this node."""

    chunks: int
    bytes: int
    pinned: int
    """Of the chunks: a lease still reads them, and they go with it."""
    sessions: int


@dataclass(frozen=True, slots=True)
class SegmentsAllowed:
    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class DirectoryAllowed:
    namespace: NamespaceId


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
    | Saved
    | SessionInfo
    | SessionList
    | Explained
    | Done
    | QueueAccepted
    | ResidentRanks
    | ActionsApplied
    | Scrubbed
    | QuarantineList
    | Recalled
    | Purged
    | SegmentsAllowed
    | DirectoryAllowed
    | Stats
    | StoreError
)
