"""Bringing together the modules that a prompt imports: each part of one lies in a chunk of the pool of its own, as it
was encoded, and all requests that have it read it there, wherever it stands in each. What is nowhere is computed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.gpu_worker.assembly import Assembly, Part
from kvstore.gpu_worker.chain import Chain
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.loader import Load, LoadFailed
from kvstore.kernels.stretches import Stretch
from kvstore.types import ChunkKey

if TYPE_CHECKING:
    from kvstore.gpu_worker.pool_store import Found, PoolStore


@dataclass(slots=True)
class Importing:
    """Of one request, while it runs: `begin`, `arrived` until it is true, `start` and `loaded` if something is to be
    loaded, then `split`."""

    assembly: Assembly
    chunks: dict[ChunkKey, int] = field(default_factory=dict)
    """By key: parts that are here, which the request holds."""
    missing: list[Part] = field(default_factory=list)
    """One of each key that is not."""
    coming: list[Part] = field(default_factory=list)
    """Which of these the store has, in the order of its lease."""
    lookup: Future[Found] | None = None
    found: Found | None = None
    load: Load | None = None
    taken: list[int] = field(default_factory=list)
    """Chunks that `load` fills."""
    begun: bool = False
    from_ssd: frozenset[ChunkKey] = frozenset()
    restored: set[ChunkKey] = field(default_factory=set)

    @property
    def pending(self) -> list[Future[Any]]:
        """What can be waited for."""
        lookup = [self.lookup] if self.lookup is not None and not self.lookup.done() else []
        return [*lookup, self.load.ended] if self.load is not None else [*lookup]

    @property
    def keys(self) -> set[ChunkKey]:
        return {part.key for part in self.assembly.parts}

    def chunks_needed(self, pool: HbmPool, tokens: int) -> int:
        """At best, if all parts are found, with `tokens` tokens in all: those that it does not hold yet."""
        own = tokens - sum(part.count for part in self.assembly.parts)
        own += sum(end - begin for begin, end in self.assembly.recomputed) + 1
        others = [key for key in self.keys if key not in self.chunks and not pool.held(pool.find([key]))]
        return -(-own // pool.geometry.chunk_tokens) + len(others) - len(self.taken)

    def begin(self, pool: HbmPool, store: PoolStore) -> None:
        """Holds what is here, and asks for the rest."""
        self.begun = True
        missing: dict[ChunkKey, Part] = {}
        for part in self.assembly.parts:
            if part.key in self.chunks or part.key in missing or (part.delta and not store.moves):
                continue
            if found := pool.find([part.key]):
                pool.hold(found)
                self.chunks[part.key] = found[0]
            else:
                missing[part.key] = part
        self.missing = list(missing.values())
        if self.missing:
            self.lookup = store.look_up_parts(self.assembly, self.missing)

    def arrived(self) -> bool:
        """Whether it is known what the store has."""
        if self.lookup is not None:
            if not self.lookup.done():
                return False
            self.found, self.lookup = self.lookup.result(), None
            self.coming = [part for _, part in self.found.parts]
            self.from_ssd = frozenset(
                part.key for number, part in self.found.parts if number in self.found.from_ssd
            )
            if not self.coming:
                self.release()
        return True

    def start(self, store: PoolStore, taken: list[int]) -> None:
        """Loads what is coming into these chunks."""
        assert self.found is not None
        self.taken = taken
        self.load, self.found = store.load_apart(self.found, taken), None

    def loaded(self, pool: HbmPool) -> bool:
        """The load has ended: whether all of it came. If not, it is computed."""
        assert self.load is not None
        load, self.load = self.load, None
        coming, self.coming, taken, self.taken = self.coming, [], self.taken, []
        try:
            load.settle()
        except LoadFailed:
            pool.drop(taken)
            return False
        for part, chunk in zip(coming, taken, strict=True):
            pool.note(chunk, begin=self.assembly.positions[part.first] - part.delta, tokens=part.count)
            pool.publish(chunk, part.key)
            pool.mark_stored(chunk, part.key)
            self.chunks[part.key] = chunk
            self.restored.add(part.key)
        return True

    def split(self, root: ChunkKey, *, moves: bool) -> Chain:
        """What is computed of the prompt, now that it is known what is here."""
        here = [part for part in self.assembly.parts if part.key in self.chunks and (moves or not part.delta)]
        return self.assembly.split(here, root)

    def stretches(self, chain: Chain) -> list[Stretch]:
        """What `split` sees, in the chunks that are held."""
        return [
            Stretch(self.chunks[part.key], part.first, part.count, delta=part.delta, at=part.at)
            for one in chain.seen
            for part in one.parts(b"", 0)
        ]

    @property
    def absent(self) -> frozenset[ChunkKey]:
        """Keys of what is nowhere."""
        return frozenset(self.keys - self.chunks.keys())

    def release(self) -> None:
        """Nobody wants what is asked for. The caller sees to `load`, and drops `chunks` and `taken`."""
        if self.lookup is not None:
            self.lookup.add_done_callback(lambda lookup: lookup.result().release())
        if self.found is not None:
            self.found.release()
        self.lookup = self.found = None
