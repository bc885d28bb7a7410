"""A second tier below DRAM, for the simulator: objects by name, in a dictionary of the world's.

It is what a Redis, an object store or a peer looks like from the core: no slots, no files and no index, names that are
never given twice, a bound in bytes. Nothing is durable: what the daemon knew of it ends with the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvstore.core import events as ev
from kvstore.core.chunks import NONE, PROMOTING, STORED, STORING
from kvstore.core.cold_tier import ColdTier
from kvstore.core.namespaces import Namespace
from kvstore.core.state import State
from kvstore.core.store import TIERS
from kvstore.types import ChunkKey, DiskResult, Extent, OpId

EVICTED_PER_PLACE_MAX = 64
VICTIMS_LOOKED_AT_MAX = 256


@dataclass(frozen=True, slots=True)
class Name:
    """Of an object."""

    namespace: bytes
    """Its salt."""
    key: ChunkKey
    shard: int
    generation: int


@dataclass(frozen=True, slots=True)
class PutObjects(ev.TierEffect):
    """DRAM slots -> objects. The core pins the sources."""

    names: tuple[Name, ...]
    sources: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class GetObjects(ev.TierEffect):
    """Objects -> RESERVED DRAM slots, whose extents name the checksums."""

    names: tuple[Name, ...]
    targets: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class ScrubObjects(ev.TierEffect):
    """Objects are read, and held against these checksums."""

    names: tuple[Name, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropObjects(ev.TierEffect):
    """Objects, or what a failed put left of them, go. No answer."""

    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class ProbeObjects(ev.TierEffect):
    """Put, get and drop an object of no chunk."""


class MemoryTier(ColdTier):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._sizes: dict[int, int] = {}
        """Bytes by row, in the order in which they were placed."""
        self._used = 0

    def __repr__(self) -> str:
        return f"MemoryTier({self.health.name}, {len(self._sizes)} chunks, {self._used} bytes)"

    # ------------------------------------------------------------------------------------------------------- places

    @property
    def bytes_max(self) -> int:
        return self.state.limits.disk_slab_bytes * self.state.limits.disk_slabs_max

    def fits(self, namespace: Namespace) -> bool:
        return namespace.payload_bytes <= self.bytes_max

    def place(self, row: int) -> bool:
        state, chunks = self.state, self.state.chunks
        namespace = state.namespace_of(row)
        size = namespace.payload_bytes
        for _ in range(EVICTED_PER_PLACE_MAX):
            if self._used + size <= self.bytes_max:
                break
            victim = self._victim()
            if victim == NONE:
                state.disk_full = True
                state.room += 1  # what waits for its write need not stay in DRAM
                return False
            state.evict_copy(victim)
        if self._used + size > self.bytes_max:
            return False  # the next step evicts more
        for shard in range(namespace.shards):
            chunks.disk_generation[chunks.shard0[row] + shard] = self.new_generation()
        self._sizes[row] = size
        self._used += size
        return True

    def _victim(self) -> int:
        """Of the chunks that were placed first, the first that no queued job needs, or the one that is needed last."""
        flags, rank = self.state.chunks.flags, self.state.policy.rank
        able = [
            row
            for row in islice(self._sizes, VICTIMS_LOOKED_AT_MAX)
            if flags[row] & (STORED | STORING | PROMOTING) == STORED
        ]
        unneeded = next((row for row in able if row not in rank), NONE)
        return unneeded if unneeded != NONE or not able else max(able, key=rank.__getitem__)

    def drop(self, row: int, *, corrupt: bool) -> None:
        self._used -= self._sizes.pop(row)
        self.state.effects.append(DropObjects(self.state.new_op(), self.names((row,))))

    def places(self, row: int) -> Sequence[tuple[int, int]]:
        return [(name.generation, name.shard) for name in self.names((row,))]

    def names(self, rows: Sequence[int]) -> tuple[Name, ...]:
        state, chunks = self.state, self.state.chunks
        return tuple(
            Name(
                state.namespace_of(row).salt,
                chunks.key[row],
                shard,
                chunks.disk_generation[chunks.shard0[row] + shard],
            )
            for row in rows
            for shard in range(state.namespace_of(row).shards)
        )

    # ----------------------------------------------------------------------------------------------------- transfers

    def _extents(self, rows: Sequence[int]) -> tuple[Extent, ...]:
        state = self.state
        return tuple(
            state.extent(row, shard, length)
            for row in rows
            for shard, length in enumerate(state.namespace_of(row).shard_bytes)
        )

    def write(self, op: OpId, rows: Sequence[int]) -> None:
        self.state.effects.append(PutObjects(op, self.names(rows), self._extents(rows)))

    def stored(self, row: int) -> None:
        pass

    def not_stored(self, row: int, results: Sequence[DiskResult]) -> None:
        self.drop(row, corrupt=False)

    def read(self, op: OpId, rows: Sequence[int]) -> None:
        self.state.effects.append(GetObjects(op, self.names(rows), self._extents(rows)))

    def scrub(self, op: OpId, rows: Sequence[int], bytes_per_s: int) -> None:
        state, chunks = self.state, self.state.chunks
        checksums = tuple(
            chunks.shard_checksum[chunks.shard0[row] + shard]
            for row in rows
            for shard in range(state.namespace_of(row).shards)
        )
        state.effects.append(ScrubObjects(op, self.names(rows), checksums))

    # -------------------------------------------------------------------------------------------- health and numbers

    def probe(self, op: OpId) -> None:
        self.state.effects.append(ProbeObjects(op))

    def stats(self) -> dict[str, Any]:
        return {"bytes": self.bytes_max, "used_bytes": self._used}

    def check_row(self, row: int) -> None:
        chunks = self.state.chunks
        assert self._sizes[row] == self.state.namespace_of(row).payload_bytes, chunks.describe(row)
        assert all(name.generation for name in self.names((row,))), chunks.describe(row)
        assert self._used == sum(self._sizes.values()) <= self.bytes_max, self


TIERS["memory"] = MemoryTier
