"""The peers as a source of chunks for the core (`core/remote/sources.py`): who has what is missing here, and bring it.

A look-up is answered out of memory in the same turn of the loop. A peer that fails is left alone by its own breaker, so
what it did not give is "there no more": the core asks the next source, and the other peers go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.core import events
from kvstore.core.namespaces import Namespace
from kvstore.errors import StoreError
from kvstore.fleet.client import PeerReads, Read, Result, Shards, Wanted
from kvstore.fleet.held import Where
from kvstore.fleet.registry import Node, Registry
from kvstore.fleet.secret import FleetSecret
from kvstore.tiers.base import SlotMemory
from kvstore.types import DiskResult, Found, NamespaceId, OpId

NAME = "peers"
BYTES_PER_S = 500e6
"""Of a peer that nothing was read from yet."""
ROUND_TRIP_MS = 1.0
SSD_BYTES_PER_S = 1e9
"""What a peer that has a chunk on SSD alone reads it with first."""


class PeerSource:
    def __init__(
        self,
        secret: FleetSecret,
        reads: PeerReads,
        memory: SlotMemory,
        *,
        registry: Callable[[], Registry | None],
        namespaces: Callable[[NamespaceId], Namespace | None],
        post: Callable[[events.Event], None],
        post_threadsafe: Callable[[events.Event], None],
        deadline_s: float,
    ) -> None:
        """`namespaces` and `post` are called on the loop's thread."""
        self._secret = secret
        self._reads = reads
        self._memory = memory
        self._registry = registry
        self._namespaces = namespaces
        self._post = post
        self._post_threadsafe = post_threadsafe
        self._deadline_s = deadline_s

    def submit(self, effect: events.LookUpChunks | events.FetchChunks) -> None:
        if isinstance(effect, events.LookUpChunks):
            self._post(events.ChunksLookedUp(effect.op, self._found(effect)))
        else:
            self._fetch(effect)

    def close(self, timeout_s: float) -> None:
        self._reads.close(timeout_s)

    # ----------------------------------------------------------------------------------------------------- look-ups

    def _found(self, effect: events.LookUpChunks) -> tuple[Found | None, ...]:
        found: list[Found | None] = [None] * len(effect.keys)
        registry = self._registry()
        namespace = self._namespaces(effect.namespace)
        if registry is None or namespace is None:
            return tuple(found)
        digest = self._secret.namespace(effect.digest)
        for holder in registry.holders(digest, effect.keys):
            node = holder.node
            if not self._reads.is_open(node):
                continue
            dram_ms, ssd_ms = self.cost_ms(node, namespace.payload_bytes)
            for index in np.flatnonzero(holder.where).tolist():
                if found[index] is None and not self._reads.lacked(node, digest, effect.keys[index]):
                    cost_ms = dram_ms if holder.where[index] == Where.DRAM else ssd_ms
                    found[index] = Found(namespace.payload_bytes, cost_ms, where=node)
        return tuple(found)

    def cost_ms(self, node: Node, size: int) -> tuple[float, float]:
        """Of bringing so many bytes from its DRAM, and from its SSD."""
        in_dram = ROUND_TRIP_MS + 1000 * size / (self._reads.speed(node) or BYTES_PER_S)
        return in_dram, in_dram + 1000 * size / SSD_BYTES_PER_S

    # ------------------------------------------------------------------------------------------------------ fetches

    def _fetch(self, effect: events.FetchChunks) -> None:
        count = len(effect.keys)
        shards = len(effect.targets) // count
        gathered = _Gathered(effect.op, count, self._post_threadsafe)
        by_node: dict[tuple[str, bytes], tuple[Node, list[int]]] = {}
        for index, node in enumerate(effect.wheres):
            assert isinstance(node, Node), effect
            by_node.setdefault((node.name, node.boot), (node, []))[1].append(index)
        digest = self._secret.namespace(effect.digest)
        deadline = time.monotonic() + self._deadline_s
        for node, indices in by_node.values():
            try:
                chunks = [
                    Wanted(effect.keys[index], self._targets(effect, index, shards)) for index in indices
                ]
            except StoreError as problem:  # a segment that is there no more is no place for bytes
                gathered.take(indices, [Result.FAILED] * len(indices), [()] * len(indices), str(problem))
                continue
            self._reads.submit(Read(node, digest, chunks, deadline, gathered.taker(indices)))

    def _targets(
        self, effect: events.FetchChunks, index: int, shards: int
    ) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        return [
            self._memory.view(extent.segment, extent.offset, extent.length)
            for extent in (effect.targets[index * shards + shard] for shard in range(shards))
        ]


class _Gathered:
    """The answers of several nodes to one effect, which gets one."""

    def __init__(self, op: OpId, count: int, post: Callable[[events.Event], None]) -> None:
        self._op = op
        self._post = post
        self._lock = threading.Lock()
        self._chunks: list[events.FetchedChunk | None] = [None] * count

    def taker(self, indices: Sequence[int]) -> Callable[[Sequence[Result], Sequence[Shards], str], None]:
        return lambda results, shards, why: self.take(indices, results, shards, why)

    def take(
        self, indices: Sequence[int], results: Sequence[Result], shards: Sequence[Shards], why: str
    ) -> None:
        with self._lock:
            for index, result, described in zip(indices, results, shards, strict=True):
                assert self._chunks[index] is None, (self._op, index)
                self._chunks[index] = _fetched(result, described, why)
            done = [chunk for chunk in self._chunks if chunk is not None]
        if len(done) == len(self._chunks):
            self._post(events.ChunksFetched(self._op, tuple(done)))


def _fetched(result: Result, shards: Shards, why: str) -> events.FetchedChunk:
    match result:
        case Result.OK:
            first = shards[0]
            return events.FetchedChunk(
                DiskResult.OK,
                tuple(shard.checksum for shard in shards),
                first.token_count,
                first.derived,
                first.makers,
            )
        case Result.CORRUPT:
            return events.FetchedChunk(DiskResult.CORRUPT, why=why)
        case _:
            return events.FetchedChunk(DiskResult.REUSED, why=why)
