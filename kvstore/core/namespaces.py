"""Namespaces: what makes KV comparable, one object for each (tenant, spec, weights epoch)."""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey, Millis, NamespaceId, Reason

if TYPE_CHECKING:
    from kvstore.core.policies import Candidates


@dataclass(slots=True, eq=False)
class Namespace:
    id: NamespaceId
    tenant: str
    spec: NamespaceSpec
    family: bytes
    """Digest of everything but the epoch."""
    shards: int
    slot_bytes: tuple[int, ...]
    """Per shard number."""
    chunk_bytes: int
    """Slots of one chunk in bytes: what pins and reservations are charged."""
    shard_bytes: tuple[int, ...] = field(init=False)
    """Per shard number: what its bytes are, without padding."""
    payload_bytes: int = field(init=False)
    """Of one chunk."""
    salt: bytes = field(init=False)
    """What its chunk hashes are keyed with, and its records on SSD begin with."""
    index: dict[ChunkKey, int] = field(default_factory=dict)
    dram: Candidates = field(init=False)
    """Resident unpinned chunks, in the order of the policy."""
    ssd: Candidates = field(init=False)
    """Chunks on SSD only, with those of the other namespaces whose slots there have the same sizes."""
    retired: bool = False
    """A newer weights epoch was opened: nothing is served any more."""
    opened: int = 0
    """Opens of all namespaces, up to the last one of this; 0: none since the daemon started."""
    visible: int = 0
    cold: int = 0
    below: int = 0
    """Chunks that have room on SSD: STORED, or about to be (STORING)."""
    ssd_chunk_bytes: int = 0
    """Slots of one chunk on SSD in bytes: what quotas charge."""
    partial: int = 0
    pinned: int = 0
    sessions: int = 0
    lookups: list[int] = field(default_factory=lambda: [0] * len(Reason))
    """Keys asked for by Acquire, by reason; NONE are the hits."""
    ssd_hits: int = 0
    """Of the hits: chunks that had to be read from SSD first, because they were asked for."""
    remote_hits: int = 0
    """Of the hits: chunks that came from beyond this node."""
    donor_search_at: Millis = 0
    """When another namespace's segment may be looked for again."""
    in_flight: int = 0
    """Segments that are being retired or created for this namespace."""
    in_flight_since: Millis = 0
    directory_rows_max: int = 0
    """Rows that its directory has room for: what readers without a message are told (`directory.py`); 0: there is
    none."""
    directory_rows: int = 0
    """Of those, the ones that were ever used,"""
    directory_free: array[int] = field(default_factory=lambda: array("i"))
    """and the ones of them that are free."""
    directory_open: bool = False
    directory_full: bool = False
    """It has no room for some chunk, and stays closed."""
    no_slot_at: int = -1
    """`State.room` when a promotion ahead of need last found no slot; -1: it was found,"""
    no_slot_until: Millis = 0
    """and when time alone may give it one."""
    no_victim_at: tuple[int, Millis] = (-1, 0)
    """`State.room` and the time when an eviction last found nothing that may go."""

    def __post_init__(self) -> None:
        self.shard_bytes = self.spec.shard_bytes
        self.payload_bytes = self.spec.chunk_bytes
        self.salt = chunk_salt(self.family, self.spec.weights_epoch)

    def __repr__(self) -> str:
        what = f"{self.tenant}/{self.spec.model} epoch {self.spec.weights_epoch}"
        return f"Namespace({self.id} {what}: {self.visible} chunks in DRAM, {self.cold} on SSD)"


def chunk_salt(family: bytes, epoch: int) -> bytes:
    """32 bytes that key the chunk hashes of a namespace: derived from the identity, never from a request."""
    return hashlib.blake2b(family + struct.pack("<Q", epoch), digest_size=32, person=b"kvs.salt.v1").digest()
