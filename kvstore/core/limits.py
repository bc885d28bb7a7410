"""Every bound and time that the core needs, in one frozen object. `StoreConfig` validates and builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.core.rate import AT_FIRST_BYTES, AT_LEAST_BYTES
from kvstore.types import EXTENTS_PER_ANSWER_MAX, Protection

EVICTION = "expected"
"""Which policy says who goes first, where nobody chose one."""
GHOSTS_MIN, GHOSTS_SHARE, GHOST_BYTES = 100_000, 512, 300
"""So many ghosts, or as many as fit into such a part of the arena's size, at so many bytes each."""


@dataclass(frozen=True, slots=True)
class Limits:
    arena_bytes: int
    segment_bytes: int
    protection: Protection = Protection.SEALED
    slot_alignment: int = 4096
    """A slot starts at a multiple of this (pages for direct I/O; smaller only for very small shards)."""

    lease_ttl_ms: int = 10_000
    lease_ttl_max_ms: int = 60_000
    revoke_grace_ms: int = 1_000
    """How long after its expiry a lease keeps its pins even when its slots are wanted."""
    reservation_ttl_ms: int = 30_000
    reservation_ttl_max_ms: int = 120_000
    incomplete_ttl_ms: int = 60_000
    """A chunk of which some shard never comes is dropped after this."""
    wait_max_ms: int = 60_000
    retire_grace_ms: int = 50
    """How long a reservation is put off in favour of a segment that is being retired, before the caller's own oldest
    chunks are evicted instead."""

    pin_share_max: float = 0.5
    """Share of the arena that one engine group may pin; also what Renew may go on holding."""
    reserve_share_max: float = 0.25
    """Share of the arena that one worker may hold in open reservations."""

    ahead_share_max: float = 1 / 64
    """Share of a slab class's slots that is kept free ahead of need, once the arena is full;"""
    ahead_slots_max: int = 64
    """no more than these, for what is free serves nobody (0: none). Half of them spare most saves an eviction."""

    eviction: str = EVICTION
    """"expected": chunks that queued jobs need go last, the others in the order of the hits that may be expected of
    them; "hints": these least recently used first; "lru"; "fifo"."""
    lives_min: int = 5_000
    """"expected" goes by recency alone until it has seen so many chunks of a tenant being saved or used."""
    prefetch_share_max: float = 0.8
    """Share of the arena that the prefetch window may fill."""
    hints_per_worker_max: int = 1 << 17
    """Queued jobs and hint actions together."""
    hint_pin_share_max: float = 0.25
    """Share of the arena that pins of hints may keep, of all tenants together; each has an equal part."""
    hint_retain_share_max: float = 0.5
    """Share of all tiers that hints may have retained, likewise."""
    hint_ttl_ms: int = 60_000
    hint_ttl_max_ms: int = 3_600_000
    session_ttl_ms: int = 0
    """Sessions end this long after their last use, with their chunks that nobody used for as long; 0: never."""
    index_sessions_share: float = 0.5
    """Share of the index that sessions keep when it is full; chunks keep the rest. Either may use more while the other
    does not need it: who has more than its share gives way, the oldest first."""

    cold_tier: str = "ssd"
    """What is below DRAM: a name in `store.TIERS`."""
    disk_slab_bytes: int = 0
    disk_slabs_max: int = 0
    """0: no SSD tier."""
    disk_header_bytes: int = 256
    """Of each record, before its bytes."""
    disk_alignment: int = 4096
    disk_deadline_ms: int = 2_000
    durable_within_ms: int = 5_000
    disk_bytes_in_flight_max: int = 64 << 20
    """Of writes, and of reads."""
    probe_interval_ms: int = 1_000
    scrub_bytes_per_s: int = 0
    """Of the background's rounds; 0: none."""
    scrub_pause_ms: int = 60_000
    """Between the beginnings of two of them at least."""
    quarantine_ms: int = 60_000
    """How long a slot whose bytes went bad is left alone before it is rewritten and verified."""

    directory: bool = True
    """Workers may look chunks up by themselves, in shared memory."""
    dram_quotas: Mapping[str, int] = field(default_factory=dict)
    """By tenant: how many bytes of slots it may have in DRAM; "*": each that is not named (`quotas.py`)."""
    ssd_quotas: Mapping[str, int] = field(default_factory=dict)
    remote_quotas: Mapping[str, int] = field(default_factory=dict)
    """Of what this node has put there."""
    sources: tuple[str, ...] = ()
    """Beyond this node, by name: who is asked for chunks that are missing here (`remote/sources.py`)."""
    lookup_wait_ms: int = 50
    """How long a Match or an Acquire waits for what its missing keys' look-up finds, at most."""
    lookup_deadline_ms: int = 500
    """A source that has not answered a look-up by then is left alone for a while."""
    lookup_fresh_ms: int = 30_000
    """So long an answer that a chunk is there counts,"""
    lookup_absent_ms: int = 1_000
    """and one that it is not."""
    remote_deadline_ms: int = 5_000
    """Of a fetch, likewise."""
    fetch_within_ms: Mapping[str, int] = field(default_factory=dict)
    """Sources that give up a fetch sooner, by name: what has not come by then does not come."""
    remote_first_bytes: int = AT_FIRST_BYTES
    remote_least_bytes: int = AT_LEAST_BYTES
    """May be under way to or from a source of which nothing is known yet, and one that missed a deadline."""
    remote_bytes_in_flight_max: int = 64 << 20
    """Of fetches,"""
    remote_writes_in_flight_max: int = 16 << 20
    """and of writes, whose chunks are pinned."""
    remote_store: str = ""
    """Which of the sources takes what this node writes and forgets; empty: none."""
    forgets_told: tuple[str, ...] = ()
    """Which of the sources are told what is forgotten here, and tell what is elsewhere (`remote/forgets.py`)."""
    forget_within_ms: int = 300_000
    """What came from other nodes goes when this node could read none of them for so long; 0: never."""
    sessions_told: str = ""
    """Which of the sources is told of sessions, and asked what others told of them (`remote/sessions.py`); empty:
    none."""
    sessions_told_per_s: int = 100
    sessions_told_max: int = 10_000
    """Of this node; what was told longest ago goes."""
    remote_writes: str = "off"
    """What is written there: "off"; "write-through": all, soon; "on-evict": what is about to leave DRAM."""
    remote_bytes_max: int = 1 << 50
    """Of what this node has put there."""
    remote_linger_ms: int = 0
    """So long a write waits for others that go into the same object."""
    source_pause_ms: int = 1_000
    """For how long a source that failed is left alone at first,"""
    source_pause_max_ms: int = 30_000
    """and at most."""

    batch_min: int = 24
    """From so many chunks of a request on, they are handled as a batch: it costs some tens of microseconds, and then
    a fifth for each."""
    evict_min: int = 12
    """The same for chunks that are evicted, alone or for new ones in their slots: each costs so much by itself that a
    batch pays sooner."""
    extents_per_answer_max: int = EXTENTS_PER_ANSWER_MAX
    """An Acquire or Reserve that would answer more stops there; the rest is asked for again."""
    workers_max: int = 1024
    namespaces_max: int = 4096
    makers_max: int = 65_536
    """Digests of several makers. Beyond, a chunk's maker is the last of those that committed a shard of it."""
    makers_barred_max: int = 65_536
    """Makers that were recalled since the start; beyond, no further one is recalled."""
    chunks_max: int = 64_000_000
    leases_per_worker_max: int = 4096
    reservations_per_worker_max: int = 1024
    waits_per_worker_max: int = 4096
    remembered_answers_max: int = 256
    """Per worker: how many answers are kept for repeated requests."""
    remembered_rows_max: int = 16_384
    """Extents and entries of those that are kept whole, the newest in any case; of the rest an outline is kept.
    0: of all."""
    ghosts_max: int | None = None
    """Keys remembered after their bytes went, to say why they are a miss and when they are used again.
    None: GHOSTS_MIN, or as many as GHOSTS_SHARE of the arena holds."""
    sessions_max: int = 1_000_000
    session_entries_max: int = 65_536
    manifest_entries_max: int = 16_000_000
    """Of all sessions together (25 bytes each); beyond, the sessions that were used longest ago are dropped."""

    @property
    def segment_count(self) -> int:
        return self.arena_bytes // self.segment_bytes

    @property
    def ghost_rows_max(self) -> int:
        """A policy learns nothing of a reuse that comes after the ghost is gone, so ghosts grow with the arena."""
        if self.ghosts_max is not None:
            return self.ghosts_max
        return max(GHOSTS_MIN, self.arena_bytes // GHOSTS_SHARE // GHOST_BYTES)

    @property
    def pin_bytes_max(self) -> int:
        return int(self.arena_bytes * self.pin_share_max)

    @property
    def reserve_bytes_max(self) -> int:
        return int(self.arena_bytes * self.reserve_share_max)
