"""A world with a source beyond its node: chunks that other nodes have put there, and what goes wrong with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core import events as ev
from kvstore.types import ChunkKey, DiskResult, Found, NamespaceId, OpId

from .disk import GARBAGE, DiskWorld
from .told_sessions import ToldSessions
from .world import CHUNK_TOKENS, tag

SOURCE = "remote"


@dataclass(slots=True)
class Elsewhere:
    """One chunk of a source."""

    contents: list[int]
    """What stands for the bytes of each shard."""
    token_count: int = CHUNK_TOKENS
    derived: bool = False
    makers: tuple[bytes, ...] = ()
    results: list[DiskResult] = field(default_factory=list)
    """How the next fetches end that are not OK."""


class RemoteWorld(DiskWorld):
    """Look-ups and fetches are performed at once, or (`hold`) when `finish` is told to."""

    def __init__(self, *, sources: tuple[str, ...] = (SOURCE,), **world: Any) -> None:
        self.elsewhere: dict[str, dict[tuple[bytes, ChunkKey], Elsewhere]] = {name: {} for name in sources}
        """By source, by (digest of the namespace, key)."""
        self.cost_ms = dict.fromkeys(sources, 1.0)
        self.looked_up: list[ChunkKey] = []
        """All that sources were asked for."""
        self.count = 0
        """Up to which count of forgets what comes is held against."""
        self.sessions = ToldSessions(random.Random("sessions"))
        self.tombstones: set[tuple[bytes, ChunkKey, bytes]] = set()
        self.untold: dict[str, list[ev.ForgetChunks]] = {}
        """By source: what it could not take."""
        if "remote_store" in world:
            world.setdefault("forgets_told", (world["remote_store"],))
        super().__init__(sources=sources, **world)

    def put_elsewhere(
        self,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        *,
        source: str = SOURCE,
        results: Sequence[DiskResult] = (),
        **described: Any,
    ) -> None:
        """Another node has put these chunks there."""
        found = self.store.state.namespaces[namespace]
        for key in keys:
            contents = [tag((namespace, key, shard)) for shard in range(found.shards)]
            self.elsewhere[source][found.salt, key] = Elsewhere(contents, results=list(results), **described)
            for shard, content in enumerate(contents):
                self._note_committed((namespace, key, shard), content)

    def _perform_op(self, effect: Any, *, fails: str = "", spoil: int = 0) -> None:
        match effect:
            case ev.LookUpChunks():
                self.looked_up += effect.keys
                self._inbox.append(self._look_up(effect, fails))
            case ev.FetchChunks():
                self._inbox.append(self._fetch(effect, fails))
            case ev.StoreChunks():
                self._inbox.append(self._store_elsewhere(effect, fails))
            case ev.DropChunks():
                for key in effect.keys:
                    self.elsewhere[effect.source].pop((effect.digest, key), None)
            case ev.ForgetChunks():
                if fails:
                    self.untold.setdefault(effect.source, []).append(effect)
                else:
                    self.tell_untold(effect.source)
                    self._forget_elsewhere(effect)
                self._inbox.append(ev.ChunksForgotten(effect.op, fails))
            case ev.ForgetSessions():
                self._inbox.append(self.sessions.forget(effect))
            case ev.ShareSessions() | ev.LookUpSessions():
                self._inbox.append(self.sessions.perform(effect, "fails" if fails else ""))
            case _:
                super()._perform_op(effect, fails=fails, spoil=spoil)

    def _store_elsewhere(self, effect: ev.StoreChunks, fails: str) -> ev.ChunksStored:
        if fails:
            result = (DiskResult.IO_ERROR,) * len(effect.keys)
            return ev.ChunksStored(effect.op, result, failed=fails)
        shards = len(effect.sources) // len(effect.keys)
        for number, (key, about) in enumerate(zip(effect.keys, effect.about, strict=True)):
            sources = effect.sources[number * shards : (number + 1) * shards]
            contents = [self._read(source) for source in sources]
            self.elsewhere[effect.source][effect.digest, key] = Elsewhere(
                contents, about.token_count, about.derived, about.makers
            )
        return ev.ChunksStored(
            effect.op,
            (DiskResult.OK,) * len(effect.keys),
            cost_ms=1.0,
            wheres=(effect.source,) * len(effect.keys),
        )

    def tell_untold(self, source: str) -> None:
        """It can be reached again."""
        for effect in self.untold.pop(source, ()):
            self._forget_elsewhere(effect)
            self._inbox.append(ev.ChunksForgotten(effect.op))

    def _forget_elsewhere(self, effect: ev.ForgetChunks) -> None:
        """A tombstone, and what it is about goes."""
        self.tombstones |= set(effect.forgotten)
        there = self.elsewhere[effect.source]
        for digest, key, maker in effect.forgotten:
            for name, chunk in list(there.items()):
                if maker:
                    gone = maker in chunk.makers and (not key or key in chunk.makers)
                else:
                    gone = name[0] == digest and key in (b"", name[1])
                if gone:
                    del there[name]

    def _look_up(self, effect: ev.LookUpChunks, fails: str) -> ev.ChunksLookedUp:
        if fails:
            return ev.ChunksLookedUp(effect.op, failed=fails)
        there = self.elsewhere[effect.source]
        found = []
        for key in effect.keys:
            chunk = there.get((effect.digest, key))
            size = len(chunk.contents) * 4096 if chunk is not None else 0
            tokens = chunk.token_count if chunk is not None else 0
            cost = self.cost_ms[effect.source]
            found.append(None if chunk is None else Found(size, cost, tokens, where=effect.source))
        return ev.ChunksLookedUp(effect.op, tuple(found))

    def _fetch(self, effect: ev.FetchChunks, fails: str) -> ev.ChunksFetched:
        shards = len(effect.targets) // len(effect.keys)
        chunks = []
        for number, key in enumerate(effect.keys):
            assert effect.wheres[number] == effect.source, effect
            targets = effect.targets[number * shards : (number + 1) * shards]
            chunk = self.elsewhere[effect.source].get((effect.digest, key))
            if fails:
                result = DiskResult[fails]
            elif chunk is None:
                result = DiskResult.REUSED
            else:
                result = chunk.results.pop() if chunk.results else DiskResult.OK
            for shard, target in enumerate(targets):
                if target.segment in self.memory:
                    good = chunk is not None and result is DiskResult.OK
                    self._write(
                        target, chunk.contents[shard] if good and chunk is not None else GARBAGE, by=None
                    )
            if result is DiskResult.OK and chunk is not None:
                chunks.append(
                    ev.FetchedChunk(
                        result, tuple(chunk.contents), chunk.token_count, chunk.derived, chunk.makers
                    )
                )
            else:
                chunks.append(ev.FetchedChunk(result, why=f"it is {result.name}"))
        return ev.ChunksFetched(effect.op, tuple(chunks), self.count)

    def late_ops(self) -> list[OpId]:
        """Fetches that the core does not wait for any longer."""
        return [op for op, fetch in self.store.sources.fetches.items() if fetch.quarantined is not None]

    def finish_over_link(self, *, ms_per_chunk: int) -> int:
        """Ends what is held and what follows, one op after another; the most chunks that were under way."""
        most = 0
        while self.held:
            most = max(most, sum(len(held.keys) for held in self.held))
            first = self.held[0]
            self.tick(ms_per_chunk * len(first.keys))
            self.finish(first)
        return most
