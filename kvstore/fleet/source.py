"""The peers as a source of chunks for the core (`core/remote/sources.py`): who has what is missing here, and bring it.

A look-up is answered out of memory in the same turn of the loop. A peer that fails is left alone by its own breaker, so
what it did not give is "there no more": the core asks the next source, and the other peers go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.config import PEERS
from kvstore.core import events
from kvstore.core.namespaces import Namespace
from kvstore.errors import StoreError
from kvstore.fleet.client import PeerReads, Read, Result, Shards, Wanted
from kvstore.fleet.forgets import FleetForgets
from kvstore.fleet.held import Where
from kvstore.fleet.registry import Node, Registry
from kvstore.fleet.secret import FleetSecret
from kvstore.fleet.sessions import FleetSessions
from kvstore.tiers.base import SlotMemory
from kvstore.types import ChunkKey, DiskResult, Found, NamespaceId

NAME = PEERS
BYTES_PER_S = 500e6
"""Of a peer that nothing was read from yet."""
ROUND_TRIP_MS = 1.0
FIRST_SHARE = 0.5
"""Of the time that is left: so long a peer may take where another one has the chunk, too."""
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
        forgets: FleetForgets | None = None,
        sessions: Callable[[], FleetSessions | None] = lambda: None,
    ) -> None:
        """`namespaces` and `post` are called on the loop's thread."""
        self._secret = secret
        self.reads = reads
        self._memory = memory
        self._registry = registry
        self._namespaces = namespaces
        self._post = post
        self.post_threadsafe = post_threadsafe
        self.deadline_s = deadline_s
        self.forgets = forgets
        self._sessions = sessions

    def submit(
        self,
        effect: events.LookUpChunks
        | events.FetchChunks
        | events.ForgetChunks
        | events.ShareSessions
        | events.LookUpSessions
        | events.ForgetSessions,
    ) -> None:
        match effect:
            case events.LookUpChunks():
                self._post(events.ChunksLookedUp(effect.op, self._found(effect)))
            case events.FetchChunks():
                self._fetch(effect)
            case events.ForgetChunks():
                assert self.forgets is not None, effect
                self.forgets.submit(effect)
            case events.ShareSessions() | events.LookUpSessions() | events.ForgetSessions():
                sessions = self._sessions()
                assert sessions is not None, effect
                sessions.submit(effect)

    def close(self, timeout_s: float) -> None:
        self.reads.close(timeout_s)

    # ----------------------------------------------------------------------------------------------------- look-ups

    def _found(self, effect: events.LookUpChunks) -> tuple[Found | None, ...]:
        namespace = self._namespaces(effect.namespace)
        if namespace is None or (self.forgets is not None and not self.forgets.is_fresh):
            return (None,) * len(effect.keys)
        size = namespace.payload_bytes
        digest = self._secret.namespace(effect.digest)
        found: list[Found | None] = [None] * len(effect.keys)
        for index, (node, where) in self.best(digest, effect.keys, [()] * len(effect.keys)).items():
            dram_ms, ssd_ms = self.cost_ms(node, size)
            found[index] = Found(size, ssd_ms if where is Where.SSD else dram_ms)
        return tuple(found)

    def best(
        self, digest: bytes, keys: Sequence[ChunkKey], tried: Sequence[Collection[str]]
    ) -> dict[int, tuple[Node, Where]]:
        """Who to ask for each key, by its place; nobody for some. Nodes that hold a longer beginning come first, those
        that were `tried`, or are left alone, not at all. On any thread."""
        registry = self._registry()
        found: dict[int, tuple[Node, Where]] = {}
        if registry is None:
            return found
        for holder in registry.holders(digest, keys):
            node = holder.node
            if not self.reads.is_open(node):
                continue
            for index in np.flatnonzero(holder.where).tolist():
                where = Where(int(holder.where[index]))
                better = index not in found or (found[index][1] is Where.SSD and where is Where.DRAM)
                refused = node.name in tried[index] or self.reads.lacked(node, digest, keys[index])
                if better and not refused:
                    found[index] = (node, where)
        return found

    def cost_ms(self, node: Node, size: int) -> tuple[float, float]:
        """Of bringing so many bytes from its DRAM, and from its SSD."""
        in_dram = ROUND_TRIP_MS + 1000 * size / (self.reads.speed(node) or BYTES_PER_S)
        return in_dram, in_dram + 1000 * size / SSD_BYTES_PER_S

    # ------------------------------------------------------------------------------------------------------ fetches

    def _fetch(self, effect: events.FetchChunks) -> None:
        shards = len(effect.targets) // len(effect.keys)
        try:
            wanted = [
                Wanted(key, self._targets(effect, index, shards)) for index, key in enumerate(effect.keys)
            ]
        except StoreError as problem:  # a segment that is there no more is no place for bytes
            failed = events.FetchedChunk(DiskResult.REUSED, why=str(problem))
            self._post(events.ChunksFetched(effect.op, (failed,) * len(effect.keys)))
            return
        _Fetch(self, effect, wanted, self._secret.namespace(effect.digest)).go_on(range(len(wanted)))

    def _targets(self, effect: events.FetchChunks, index: int, shards: int) -> list[npt.NDArray[np.uint8]]:
        return [
            self._memory.view(extent.segment, extent.offset, extent.length)
            for extent in (effect.targets[index * shards + shard] for shard in range(shards))
        ]


class _Fetch:
    """One effect, of which several nodes may give a part. What a node did not give is asked of the next that has it,
    while there is time."""

    def __init__(
        self, source: PeerSource, effect: events.FetchChunks, wanted: Sequence[Wanted], digest: bytes
    ) -> None:
        self._source = source
        self._op = effect.op
        self._wanted = wanted
        self._digest = digest
        self._deadline = time.monotonic() + source.deadline_s
        self._lock = threading.Lock()
        self._chunks: dict[int, events.FetchedChunk] = {}
        self._tried: list[set[str]] = [set() for _ in wanted]
        self._why = "no peer has it any more"
        self._count = source.forgets.book.seen[0] if source.forgets is not None else 0

    def go_on(self, indices: Sequence[int]) -> None:
        """Ask for these, which nobody is asked for now. On any thread."""
        keys = [self._wanted[index].key for index in indices]
        best = self._source.best(self._digest, keys, [self._tried[index] for index in indices])
        if time.monotonic() >= self._deadline:
            best = {}
        by_node: dict[tuple[str, bytes], tuple[Node, list[int]]] = {}
        missing: list[int] = []
        for place, index in enumerate(indices):
            if place not in best:
                missing.append(index)
                continue
            node = best[place][0]
            self._tried[index].add(node.name)
            by_node.setdefault((node.name, node.boot), (node, []))[1].append(index)
        self._take({index: events.FetchedChunk(DiskResult.REUSED, why=self._why) for index in missing})
        for node, mine in by_node.values():
            wanted = [self._wanted[index] for index in mine]
            others = self._source.best(
                self._digest, [each.key for each in wanted], [self._tried[index] for index in mine]
            )
            now = time.monotonic()
            share = FIRST_SHARE if others else 1.0
            until = now + (self._deadline - now) * share
            self._source.reads.submit(Read(node, self._digest, wanted, until, partial(self._has_read, mine)))

    def _has_read(
        self, indices: Sequence[int], results: Sequence[Result], shards: Sequence[Shards], why: str
    ) -> None:
        ended: dict[int, events.FetchedChunk] = {}
        again: list[int] = []
        for index, result, described in zip(indices, results, shards, strict=True):
            forgets = self._source.forgets
            refused = forgets.refuses(described[0]) if forgets is not None and result is Result.OK else ""
            if refused:
                ended[index] = events.FetchedChunk(DiskResult.REUSED, why=refused)
            elif result is Result.OK:
                ended[index] = _fetched(described)
            elif result is Result.CORRUPT:
                ended[index] = events.FetchedChunk(DiskResult.CORRUPT, why=why)
            else:
                again.append(index)
        self._why = why or self._why
        if again:
            self.go_on(again)
        self._take(ended)

    def _take(self, ended: Mapping[int, events.FetchedChunk]) -> None:
        with self._lock:
            assert not self._chunks.keys() & ended.keys(), (self._op, ended)
            self._chunks.update(ended)
            done = bool(ended) and len(self._chunks) == len(self._wanted)
        if done:
            chunks = tuple(self._chunks[index] for index in range(len(self._wanted)))
            self._source.post_threadsafe(events.ChunksFetched(self._op, chunks, self._count))


def _fetched(shards: Shards) -> events.FetchedChunk:
    first = shards[0]
    return events.FetchedChunk(
        DiskResult.OK,
        tuple(shard.checksum for shard in shards),
        first.token_count,
        first.derived,
        first.makers,
    )
