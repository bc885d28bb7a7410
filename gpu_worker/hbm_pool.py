"""The paged pool: KV in device memory, in chunks that several sequences may hold, and that stay when nobody does.

Of each layer one tensor [chunks, 2, kv_heads, chunk_tokens, head_dim]; a chunk has the same number in all layers. Its
slice there has the bytes of a layer's slice in the store (gpu_worker/layout.py), so that a load is a plain copy.

The prefix tree is a table from chunk keys to chunks: a key stands for the tokens of its chunk and of all before it, so
that a walk down the tree is one look-up a chunk. Only chunks whose KV is computed are in it.

                 take                publish                  drop, by the last holder
    free ────────────▶ held, private ────────▶ held, in tree ─────────────────────────▶ idle, in tree
      ▲                    │ drop                    ▲                 hold, take_tail         │
      └────────────────────┴─────────────────────────┼───────────────────────────────────◀─────┘
                                                     └─────────────────────────────  evicted by `take`

Idle chunks are the HBM tier. When `take` finds too few free chunks it evicts idle ones: first those that no queued job
needs, least recently used first, the end of a sequence before its beginning; then needed ones, latest job first.

A *tail* is a chunk that is not full. It belongs under the key of the chunk before it, together with its tokens, and
goes to one taker alone, which writes on behind its last token.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch

from kvstore.gpu_worker.layout import Geometry
from kvstore.types import ChunkKey


class HbmPool:
    """Chunks, who holds them, and which tokens they stand for. Not safe for concurrent use."""

    def __init__(
        self, geometry: Geometry, chunks: int, *, retain: bool = True, device: torch.device | str = "cpu"
    ) -> None:
        """`retain`: whether chunks of the tree stay when nobody holds them. Raises ValueError for a pool of no
        chunks."""
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}: must be at least 1")
        self.geometry = geometry
        self.chunks = chunks
        shape = (chunks, 2, geometry.heads, geometry.chunk_tokens, geometry.head_dim)
        self.layers = [
            torch.empty(shape, dtype=geometry.dtype, device=device) for _ in range(geometry.layers)
        ]
        self.peak_chunks = 0
        """The most that were held at one time."""
        self.evicted = 0
        """Idle chunks that made room, since the start."""
        self._begins = [0] * chunks
        self._counts = [0] * chunks
        self._retain = retain
        # Lowest number first: memory that is not needed is never touched, and neighbours are read in one go
        self._free = list(range(chunks))
        self._holders = [0] * chunks
        self._tree: dict[ChunkKey, int] = {}
        self._keys: dict[int, ChunkKey] = {}
        self._tails: dict[ChunkKey, dict[tuple[int, ...], int]] = {}
        """Of the key before it: tails by their tokens."""
        self._tail_of: dict[int, tuple[ChunkKey, tuple[int, ...]]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """That no job needs; least recently used first."""
        self._needed: dict[int, int] = {}
        """Idle chunks that a job needs, with the rank of the first such job."""
        self._stored: dict[int, ChunkKey] = {}
        """Chunks that the store has too, or is about to get; by what keys it knows them."""
        self._chunk_of: dict[ChunkKey, int] = {}
        self._ranks: Mapping[ChunkKey, int] = {}

    def __repr__(self) -> str:
        return f"HbmPool({self.used}/{self.chunks} chunks in use, {self.idle} idle, {len(self._tree)} in the tree)"

    @property
    def available(self) -> int:
        """What `take` can give."""
        return len(self._free) + self.idle

    @property
    def idle(self) -> int:
        return len(self._idle) + len(self._needed)

    @property
    def used(self) -> int:
        """Chunks that somebody holds."""
        return self.chunks - self.available

    @property
    def peak_bytes(self) -> int:
        return self.peak_chunks * self.geometry.shard_bytes

    def take(self, count: int) -> list[int] | None:
        """So many chunks, each with one holder; None, and nothing changed, if fewer are free or idle."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for chunk in taken:
            assert self._holders[chunk] == 0, (chunk, self._holders[chunk])
            self._holders[chunk] = 1
        self._note_peak()
        return taken

    def note(self, chunk: int, *, begin: int, tokens: int) -> None:
        """This chunk holds so many tokens, and the keys of the first were computed for position `begin`."""
        assert self._holders[chunk] > 0, f"chunk {chunk} is free"
        assert 0 < tokens <= self.geometry.chunk_tokens, tokens
        self._begins[chunk], self._counts[chunk] = begin, tokens

    def begin(self, chunk: int) -> int:
        """The position for which the keys of its first token were computed: where it stands is not in the pool, but
        in what its holders say (`Stretch.delta`)."""
        return self._begins[chunk]

    def count(self, chunk: int) -> int:
        """Tokens that it holds."""
        return self._counts[chunk]

    def find(self, keys: Iterable[ChunkKey]) -> list[int]:
        """The chunks of the longest prefix of `keys` that is here. Nobody holds them by that."""
        found: list[int] = []
        for key in keys:
            if (chunk := self._tree.get(key)) is None:
                break
            found.append(chunk)
        return found

    def held(self, chunks: Iterable[int]) -> int:
        """How many of these somebody holds."""
        return sum(self._holders[chunk] > 0 for chunk in chunks)

    def hold(self, chunks: Iterable[int]) -> None:
        """One holder more for each of these, which are held or idle."""
        for chunk in chunks:
            if not self._holders[chunk]:
                assert chunk in self._keys, f"chunk {chunk} is free"
                self._leave_idle(chunk)
            self._holders[chunk] += 1
        self._note_peak()

    def publish(self, chunk: int, key: ChunkKey) -> None:
        """Put a chunk that is full and computed into the tree. If its tokens are there already, it stays private."""
        assert self._holders[chunk] > 0, f"chunk {chunk} is free"
        assert chunk not in self._keys, f"chunk {chunk} is in the tree"
        if key not in self._tree:
            self._tree[key] = chunk
            self._keys[chunk] = key

    def unpublish(self, chunks: Iterable[int]) -> None:
        """Nobody finds these any more; who holds them keeps them."""
        for chunk in chunks:
            assert self._holders[chunk] > 0, f"chunk {chunk} is not held"
            if (key := self._keys.pop(chunk, None)) is not None:
                del self._tree[key]
            self._forget_stored(chunk)

    def leave_tail(self, chunk: int, parent: ChunkKey, tokens: Sequence[int]) -> None:
        """Its only holder drops a chunk that holds `tokens` behind the one whose key is `parent`: the next to ask for
        these tokens may go on in it."""
        assert self._holders[chunk] == 1 and chunk not in self._keys, chunk
        assert 0 < len(tokens) < self.geometry.chunk_tokens, len(tokens)
        own = tuple(tokens)
        tails = self._tails.setdefault(parent, {})
        if self._retain and own not in tails:
            tails[own] = chunk
            self._tail_of[chunk] = parent, own
        elif not tails:
            del self._tails[parent]
        self.drop([chunk])

    def take_tail(self, parent: ChunkKey, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The longest tail behind `parent` that `tokens` begin with, but not all of them: its chunk, which has one
        holder from now on, and its number of tokens; None if there is none."""
        found = self._longest_tail(parent, tokens)
        if found is None:
            return None
        chunk = self._tails[parent][found]
        self._leave_idle(chunk)
        self._forget_tail(chunk)
        self._holders[chunk] = 1
        self._note_peak()
        return chunk, len(found)

    def tail_tokens(self, parent: ChunkKey, tokens: Sequence[int]) -> int:
        """How many tokens `take_tail` would find."""
        return len(self._longest_tail(parent, tokens) or ())

    def drop(self, chunks: Sequence[int]) -> None:
        """One holder less for each; what nobody holds is idle if it is in the tree, or free. `chunks` are in the order
        of their tokens: the end of a sequence is evicted before its beginning."""
        for chunk in reversed(chunks):
            self._holders[chunk] -= 1
            assert self._holders[chunk] >= 0, f"chunk {chunk} was free"
            if self._holders[chunk] == 0:
                if self._retain and (chunk in self._keys or chunk in self._tail_of):
                    self._enter_idle(chunk)
                else:
                    self._free_now(chunk)

    def forget(self) -> None:
        """The tree knows no tokens any more: what is idle is free, what is held stays with its holders, private."""
        for chunk in (*self._idle, *self._needed):
            self._leave_idle(chunk)
            self._free_now(chunk)
        self._tree.clear()
        self._keys.clear()
        self._stored.clear()
        self._chunk_of.clear()
        self._ranks = {}
        assert not self._tails and not self._tail_of, "a tail is held"

    # ---------------------------------------------------------------------------------------------------- the store

    def stored(self, chunk: int) -> ChunkKey | None:
        """By what key the store knows this chunk; None if it does not have it, as far as we know."""
        return self._stored.get(chunk)

    def mark_stored(self, chunk: int, key: ChunkKey) -> None:
        """The store has this chunk, or is about to get it, as `key`."""
        assert self._holders[chunk] > 0, f"chunk {chunk} is free"
        self._forget_stored(chunk)
        self._stored[chunk] = key
        self._chunk_of.setdefault(key, chunk)  # two that were computed side by side may be the same

    def unmark_stored(self, keys: Iterable[ChunkKey]) -> None:
        """The store has lost these, or never got them. Unknown keys are fine."""
        for key in keys:
            if (chunk := self._chunk_of.pop(key, None)) is not None:
                self._stored.pop(chunk, None)

    def resident(self, most: int) -> list[ChunkKey]:
        """What is here and in the store, by the store's keys; of more than `most` those that are evicted last, because
        a job needs them, then those that are evicted first, then those that somebody holds."""
        keys = self._chunk_of
        idle = (key for chunk in (*self._needed, *self._idle) if (key := self._stored.get(chunk)) is not None)
        ordered = dict.fromkeys(key for key in islice(idle, most) if key in keys)
        if len(ordered) < most:
            ordered |= dict.fromkeys(islice((key for key in keys if key not in ordered), most - len(ordered)))
        return list(ordered)

    def rank(self, ranks: Mapping[ChunkKey, int]) -> None:
        """From now on these keys of the store are needed, each by the job of that rank (0 comes first); others are
        not."""
        self._ranks = ranks
        for chunk in [chunk for chunk in self._needed if self._rank(chunk) is None]:
            del self._needed[chunk]
            self._idle[chunk] = None
        for key in ranks:
            needed = self._chunk_of.get(key)
            if needed is not None and not self._holders[needed]:
                self._idle.pop(needed, None)
                self._needed[needed] = ranks[key]

    # ---------------------------------------------------------------------------------------------------- eviction

    def _evict(self) -> None:
        if self._idle:
            chunk = next(iter(self._idle))
        else:
            chunk = max(self._needed, key=lambda chunk: self._needed[chunk])
        self._leave_idle(chunk)
        self._free_now(chunk)
        self.evicted += 1

    def _free_now(self, chunk: int) -> None:
        if (key := self._keys.pop(chunk, None)) is not None:
            del self._tree[key]
        if chunk in self._tail_of:
            self._forget_tail(chunk)
        self._forget_stored(chunk)
        self._begins[chunk] = self._counts[chunk] = 0
        heapq.heappush(self._free, chunk)

    def _enter_idle(self, chunk: int) -> None:
        if (rank := self._rank(chunk)) is None:
            self._idle[chunk] = None
        else:
            self._needed[chunk] = rank

    def _leave_idle(self, chunk: int) -> None:
        if chunk in self._needed:
            del self._needed[chunk]
        else:
            del self._idle[chunk]

    def _rank(self, chunk: int) -> int | None:
        key = self._stored.get(chunk)
        return None if key is None else self._ranks.get(key)

    def _longest_tail(self, parent: ChunkKey, tokens: Sequence[int]) -> tuple[int, ...] | None:
        begin = tuple(tokens[: self.geometry.chunk_tokens])
        fits = [
            tail
            for tail in self._tails.get(parent, ())
            if len(tail) < len(tokens) and begin[: len(tail)] == tail
        ]
        return max(fits, key=len, default=None)

    def _forget_tail(self, chunk: int) -> None:
        parent, tokens = self._tail_of.pop(chunk)
        tails = self._tails[parent]
        del tails[tokens]
        if not tails:
            del self._tails[parent]

    def _forget_stored(self, chunk: int) -> None:
        key = self._stored.pop(chunk, None)
        if key is not None and self._chunk_of.get(key) == chunk:
            del self._chunk_of[key]

    def _note_peak(self) -> None:
        self.peak_chunks = max(self.peak_chunks, self.used)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert what only a bug could break; `held`: of each holder, its chunks."""
        holders = Counter(chunk for chunks in held for chunk in chunks)
        assert [holders[chunk] for chunk in range(self.chunks)] == self._holders, (
            "a holder is lost or too many"
        )
        idle = [*self._idle, *self._needed]
        nobody = [chunk for chunk, count in enumerate(self._holders) if count == 0]
        assert sorted([*self._free, *idle]) == nobody, "a chunk is neither free nor idle, or both"
        assert len(self._free) + len(idle) + len(holders) == self.chunks, "chunks are not conserved"
        assert {chunk: key for key, chunk in self._tree.items()} == self._keys
        assert not {*self._free} & {*self._keys, *self._tail_of, *self._stored}, "a free chunk is known"
        assert not any(self._counts[chunk] for chunk in self._free), "a free chunk holds tokens"
        assert all(chunk in self._keys or chunk in self._tail_of for chunk in idle), (
            "an idle chunk is unknown"
        )
        assert not any(self._holders[chunk] for chunk in self._tail_of), "a tail is held"
        tails = {chunk: (parent, own) for parent, all_ in self._tails.items() for own, chunk in all_.items()}
        assert tails == self._tail_of
        assert all(self._stored.get(chunk) == key for key, chunk in self._chunk_of.items())
        assert self._retain or not idle
