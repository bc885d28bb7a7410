"""Bringing together what a request sees beside its own tokens: chunks that others have in the pool, and chunks of the
store, which are loaded into the pool as they are. All of it is there, or none of it is used."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.gpu_worker.chain import Chain, Part
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.loader import Load, LoadFailed
from kvstore.kernels.stretches import Stretch
from kvstore.types import ChunkKey

if TYPE_CHECKING:
    from kvstore.gpu_worker.pool_store import Found, PoolStore


@dataclass(slots=True)
class Gathering:
    """Of one request, while it runs. `step` is called until it says something else than None."""

    chain: Chain
    salt: bytes
    """Of the pool's keys."""
    chunks: dict[ChunkKey, int] = field(default_factory=dict)
    """By the pool's keys: chunks that are here, which the request holds."""
    missing: list[Part] = field(default_factory=list)
    lookup: Future[Found] | None = None
    found: Found | None = None
    load: Load | None = None
    taken: list[int] = field(default_factory=list)
    """Chunks that `load` fills."""
    begun: bool = False

    @property
    def pending(self) -> list[Future[Any]]:
        """What can be waited for."""
        lookup = [self.lookup] if self.lookup is not None and not self.lookup.done() else []
        return [*lookup, self.load.ended] if self.load is not None else [*lookup]

    def parts(self, size: int) -> list[Part]:
        return [part for one in self.chain.seen for part in one.parts(self.salt, size)]

    def begin(self, pool: HbmPool, store: PoolStore | None) -> bool:
        """Holds what is here, and asks for the rest; False if that is nowhere."""
        self.begun = True
        for part in self.parts(pool.geometry.chunk_tokens):
            if part.key in self.chunks or any(part.key == one.key for one in self.missing):
                continue
            if found := pool.find([part.key]):
                pool.hold(found)
                self.chunks[part.key] = found[0]
            else:
                self.missing.append(part)
        if not self.missing:
            return True
        self.lookup = store.look_up_chunks(self._store_keys(store, pool)) if store is not None else None
        return self.lookup is not None

    def arrived(self) -> bool | None:
        """Whether the store has all that is missing; None: it has not answered yet."""
        if self.lookup is not None:
            if not self.lookup.done():
                return None
            self.found, self.lookup = self.lookup.result(), None
        return self.found is None or self.found.chunks == len(self.missing)

    def start(self, store: PoolStore, taken: list[int]) -> None:
        """Loads what is missing into these chunks."""
        assert self.found is not None
        self.taken = taken
        self.load, self.found = store.load_chunks(self.found, taken), None

    def loaded(self, pool: HbmPool, store: PoolStore) -> int | None:
        """The load has ended: how many tokens came; None if it failed."""
        assert self.load is not None
        load, self.load = self.load, None
        try:
            load.settle()
        except LoadFailed:
            return None
        size = pool.geometry.chunk_tokens
        keys = self._store_keys(store, pool)
        for part, chunk, key in zip(self.missing, self.taken, keys, strict=True):
            pool.note(chunk, begin=part.begin - part.first, tokens=size)
            pool.publish(chunk, part.key)
            pool.mark_stored(chunk, key)
            self.chunks[part.key] = chunk
        count = size * len(self.missing)
        self.taken, self.missing = [], []
        return count

    def stretches(self, pool: HbmPool) -> list[Stretch]:
        return [
            Stretch(self.chunks[part.key], part.first, part.count, delta=part.delta, at=part.at)
            for part in self.parts(pool.geometry.chunk_tokens)
        ]

    def release(self) -> None:
        """Nobody wants what is asked for. The caller sees to `load`, and drops `chunks` and `taken`."""
        if self.lookup is not None:
            self.lookup.add_done_callback(lambda lookup: lookup.result().release())
        if self.found is not None:
            self.found.release()
        self.lookup = self.found = None

    def _store_keys(self, store: PoolStore, pool: HbmPool) -> list[ChunkKey]:
        """Of what is missing, as the store names it."""
        salt, size = store.salt, pool.geometry.chunk_tokens
        if salt is None:
            return []
        names = {
            mine.key: theirs.key
            for one in self.chain.seen
            for mine, theirs in zip(one.parts(self.salt, size), one.parts(salt, size), strict=True)
        }
        return [names[part.key] for part in self.missing]
