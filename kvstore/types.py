"""The shared nouns. This module imports nothing of ours, so everything may import it.

The words are those of ARCHITECTURE.md: a *chunk* is the KV of a fixed number of tokens, a *shard* its bytes for
one group on one distinct rank, a *slot* the place of a shard in a *segment* of the arena.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType, overload

ChunkKey = NewType("ChunkKey", bytes)
"""At most KEY_BYTES_MAX bytes; opaque to the store."""
NamespaceId = NewType("NamespaceId", int)
WorkerId = NewType("WorkerId", int)
LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)
SegmentId = NewType("SegmentId", int)
"""Unique in one boot of the daemon, never reused: a stale extent can never name another segment."""
SlabId = NewType("SlabId", int)
"""A slab file of the SSD tier: `slab-%08d.kvs`; numbers are never reused in one directory."""
RegionId = NewType("RegionId", int)
"""Memory of its own that a worker lent the daemon; a number among that worker's, never reused."""
OpId = NewType("OpId", int)
"""One long action (copy, checksum, segment creation) that the edge performs for the core."""
Millis = int
"""Milliseconds of a monotonic clock (or of the simulator's)."""

KEY_BYTES_MAX = 64
MAKER_BYTES = 16
SESSION_NAME_BYTES_MAX = 256
KEYS_PER_REQUEST_MAX = 4096
TTL_MS_MAX = 24 * 3600 * 1000
"""Longest time a request may name; the core clips it further."""
POSITION_MAX = 1 << 40
"""Tokens of a session, positions and their deltas."""
EXTENTS_PER_ANSWER_MAX = 16_384
"""(key, shard) pairs of one lease or reservation. Handling more would keep everybody else waiting."""


class Outcome(enum.IntEnum):
    """The result of looking one key up."""

    HIT = 0
    PENDING = 1
    """Being saved or moved: READY or FAILED is pushed to whoever asked to be told."""
    MISS = 2


class Reason(enum.IntEnum):
    """Why a lookup was not a hit; kept with a chunk's key for a while after its bytes are gone."""

    NONE = 0
    NEVER_SEEN = 1
    EVICTED = 2
    """Newer chunks got the slots."""
    EXPIRED = 3
    """The time to live ended."""
    CORRUPT = 4
    """The bytes no longer matched their checksum; the slots are quarantined."""
    INCOMPLETE = 5
    """Some shard was never committed, or was lost."""
    LAYOUT_MISMATCH = 6
    TRUNCATED = 7
    FORGOTTEN = 8
    OLD_EPOCH = 9
    """The weights were reloaded since."""
    BEING_SAVED = 10
    BEING_MOVED = 11
    QUOTA = 12
    """The caller's engine group already pins its share of DRAM."""
    BEYOND_MISS = 13
    """Present perhaps, but behind the first missing key of a prefix lookup."""
    UNAVAILABLE = 14
    """Said by the client alone: the daemon could not be asked in time."""
    ON_SSD = 15
    """PENDING: being read from SSD, because an Acquire or a hint asked for it. MISS: on SSD, and nobody asked
    for it to be promoted."""
    SLOW = 16
    """On SSD, but not read in time: the tier is slow, failing or off, or DRAM has no slot to spare."""
    LOST = 17
    """The chunk was in DRAM only when the daemon stopped, or its bytes on SSD did not survive a failed sync."""
    RECALLED = 18
    """An operator recalled all that its maker had made."""
    ON_REMOTE = 19
    """PENDING: in the REMOTE store or at a peer, or on its way from there; an Acquire brings it."""


class SlotState(enum.IntEnum):
    """Life of a slot: FREE -> RESERVED -> READY -> FREE; QUARANTINED aside."""

    FREE = 0
    RESERVED = 1
    READY = 2
    QUARANTINED = 3


class Tier(enum.IntEnum):
    DRAM = 0
    SSD = 1
    REMOTE = 2


class Wait(enum.IntEnum):
    """What a commit waits for before it is answered."""

    VISIBLE = 0
    DURABLE = 1


class Protection(enum.Enum):
    """Who may write a segment's bytes (docs/formats.md, "Shared memory")."""

    SEALED = "sealed"
    GROUP = "group"


class GrantResult(enum.IntEnum):
    """What `Reserve` answers for one key."""

    GRANTED = 0
    ALREADY = 1
    """Committed before: the caller need not save it. First copy wins."""
    BUSY = 2
    """Another worker holds a reservation of the same shard; it will appear, or be free again, by itself."""
    FULL = 3
    """No slot can be freed now, or the policy holds what is there for worth more (counter `saves_refused`). The save is
    dropped by the caller and counted; it may try again."""
    QUOTA = 4
    """The worker has too many bytes reserved already, or this reservation as many shards as one may have."""
    UNAVAILABLE = 5
    """The client library's alone: the daemon is away, or did not answer in time. The save is dropped and counted."""


class CommitResult(enum.IntEnum):
    """What `Commit` answers for one granted key."""

    VISIBLE = 0
    WAITING_FOR_SHARDS = 1
    """Our shards are in; the chunk is a hit once every distinct shard is."""
    ALREADY = 2


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one shard's bytes are. Valid while the lease or reservation lives and `generation` still matches.

    `cell` is the index of the slot's generation in the segment's header; a reader compares the cell with `generation`
    before its first byte and after its last, and a mismatch voids the load.
    """

    segment: SegmentId
    offset: int
    length: int
    cell: int
    generation: int
    checksum: int = 0
    """xxh3_64 of the bytes at commit; 0 while being written."""


class Extents(Sequence[Extent]):
    """Many extents as columns, which cost far less than an object for each. It reads like a tuple of `Extent`; where
    there may be hundreds, read the columns. Nobody changes one."""

    __slots__ = ("cell", "checksum", "generation", "length", "offset", "segment")

    def __init__(
        self,
        segment: array[int],
        offset: array[int],
        length: array[int],
        cell: array[int],
        generation: array[int],
        checksum: array[int],
    ) -> None:
        """Arrays of type Q, all of one length."""
        self.segment = segment
        self.offset = offset
        self.length = length
        self.cell = cell
        self.generation = generation
        self.checksum = checksum

    @classmethod
    def of(cls, extents: Iterable[Extent]) -> Extents:
        if isinstance(extents, Extents):
            return extents
        return cls.of_rows(
            [(e.segment, e.offset, e.length, e.cell, e.generation, e.checksum) for e in extents]
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int, int, int, int]]) -> Extents:
        """From the fields of each `Extent`."""
        return cls(*(array("Q", column) for column in zip(*rows, strict=True))) if rows else NO_EXTENTS

    @classmethod
    def of_columns(cls, *columns: bytes) -> Extents:
        """From the bytes of columns of 64 bits, in the order of the fields of `Extent`."""
        return cls(*(array("Q", column) for column in columns))

    @property
    def columns(self) -> tuple[array[int], ...]:
        """In the order of the fields of `Extent`."""
        return self.segment, self.offset, self.length, self.cell, self.generation, self.checksum

    def __len__(self) -> int:
        return len(self.segment)

    @overload
    def __getitem__(self, index: int) -> Extent: ...

    @overload
    def __getitem__(self, index: slice) -> Extents: ...

    def __getitem__(self, index: int | slice) -> Extent | Extents:
        if isinstance(index, slice):
            return Extents(*(column[index] for column in self.columns))
        segment, *others = (column[index] for column in self.columns)
        return Extent(SegmentId(segment), *others)

    def __iter__(self) -> Iterator[Extent]:
        return map(Extent, map(SegmentId, self.segment), *self.columns[1:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extents):
            return self.columns == other.columns
        return isinstance(other, tuple) and tuple(self) == other

    __hash__ = None  # type: ignore[assignment]  # as of any other mutable sequence

    def __repr__(self) -> str:
        return f"Extents({len(self)} shards, {sum(self.length)} bytes)"


NO_EXTENTS = Extents(*(array("Q") for _ in range(6)))


class HintResult(enum.IntEnum):
    """What `PublishQueue` answers for one job."""

    ACCEPTED = 0
    """Inside the prefetch window: its chunks are in DRAM or on their way."""
    DEFERRED = 1
    """Inside the eviction window: its chunks are kept, and are promoted when the job comes nearer."""
    CLIPPED = 2
    """Behind the eviction window: too far for the memory there is, or for what is kept of a queue."""
    REJECTED = 3
    """No such session, or no keys."""


class DiskState(enum.IntEnum):
    """Health of the SSD tier. It degrades by itself and heals by itself."""

    OK = 0
    READ_ONLY = 1
    """Writes fail (full, EIO): what is there is served, nothing new becomes durable."""
    OFF = 2
    """Reads fail or hang: DRAM serves alone."""
    ABSENT = 3
    """No SSD tier is configured."""


class DiskResult(enum.IntEnum):
    """What became of one shard of a disk op."""

    OK = 0
    CORRUPT = 1
    """Header, generation, key or checksum is not what was written: never served."""
    IO_ERROR = 2
    NO_SPACE = 3
    REUSED = 4
    """The slot holds what an earlier boot wrote over it: the record was evicted, and the index was never told, because
    the daemon was killed first. A miss, and nothing is wrong with the disk."""


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """A fixed-size slot of a slab file, and the generation that its record carries."""

    slab: SlabId
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Record:
    """The header of a record on disk: enough to refuse a torn, stale or misdirected one."""

    namespace: bytes
    """32 bytes: digest of tenant, spec and epoch."""
    key: ChunkKey
    shard: int
    length: int
    checksum: int
    maker: bytes = b""


@dataclass(frozen=True, slots=True)
class Found:
    """What a source beyond this node has of one chunk."""

    bytes: int
    """Of all its shards."""
    cost_ms: float
    """How long it is expected to take from there."""
    token_count: int = 0
    """0: those of a full chunk."""
    where: object = None
    """The source's own: handed back to it with the fetch."""


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Bytes that a worker put in its staging memory, or in a region of its own, for one shard."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One entry of a manifest. `first_token` is the position at which the KV was computed; `delta` is what must be
    added to it when it is loaded. `approximate` entries make everything computed after them derived; they may name a
    part of a chunk, with `first_token` the position of the first token that is named."""

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


class ActionKind(enum.IntEnum):
    """What a hint asks for chunks that are named by keys or by session; see `HintAction`."""

    PREFETCH = 0
    """They will be asked for as soon as the queue's turn is over: bring them to DRAM."""
    DEMOTE = 1
    """Nobody will ask for them for long: let them leave DRAM for the tier below."""
    PIN = 2
    """They stay in DRAM as long as there is anything else to evict."""
    RETAIN = 3
    """They leave the last tier after what nobody asked to keep."""
    EXPECT = 4
    """They will be asked for in `eta_ms`: somebody types, or a tool runs. Kept till then, and in DRAM in time."""


@dataclass(frozen=True, slots=True)
class HintAction:
    """One order of a hint. Advisory: it orders victims and starts transfers, within bounds, and ends by itself."""

    name: bytes
    """The caller's name for it; a later action of the same name replaces it."""
    kind: ActionKind
    session: bytes = b""
    keys: tuple[ChunkKey, ...] = ()
    tokens: tuple[int, ...] = ()
    """Token ids of a prompt, of whose full chunks the client library makes keys."""
    ttl_ms: int = 0
    """How long it lasts (EXPECT: beyond `eta_ms`); 0: the daemon's default."""
    eta_ms: int = 0
    """Of EXPECT alone."""


@dataclass(frozen=True, slots=True)
class HintState:
    """An action that is in force, as `Explain` and `ListSessions` show it."""

    kind: ActionKind
    ends_in_ms: int
    due_in_ms: int = 0
    """Of EXPECT: until the chunks are wanted; 0: now."""


@dataclass(frozen=True, slots=True)
class Hint:
    """ "Job J, for session S or keys K, is n-th in the queue": what the scheduler knows of the future.

    `position` 0 is the head of the queue; it orders jobs, and equal positions are equally near.
    """

    job: bytes
    position: int
    session: bytes = b""
    keys: tuple[ChunkKey, ...] = ()
    tokens: tuple[int, ...] = ()
    """Token ids of the job's prompt, of whose full chunks the client library makes keys."""
    namespace: NamespaceId | None = None
    """Of hints by model: the one in which `keys` are names; None: that which has most of them."""
