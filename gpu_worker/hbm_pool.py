"""The paged pool: KV of live sequences in device memory, in chunks that several of them may hold.

Of each layer one tensor [chunks, 2, kv_heads, chunk_tokens, head_dim]; a chunk has the same number in all layers. Its
slice there has the bytes of a layer's slice in the store (gpu_worker/layout.py), so that a load is a plain copy.

The prefix tree is a table from chunk keys to chunks: a key stands for the tokens of its chunk and of all before it, so
that a walk down the tree is one look-up a chunk. Only full chunks whose KV is computed are in it. A chunk that nobody
holds any more is free, and gone from the tree: what idle sequences leave behind is the store's to keep.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from kvstore.gpu_worker.layout import Geometry
from kvstore.types import ChunkKey


class HbmPool:
    """Chunks, who holds them, and which tokens they stand for. Not safe for concurrent use."""

    def __init__(self, geometry: Geometry, chunks: int, *, device: torch.device | str = "cpu") -> None:
        """Raises ValueError for a pool of no chunks."""
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}: must be at least 1")
        self.geometry = geometry
        self.chunks = chunks
        shape = (chunks, 2, geometry.heads, geometry.chunk_tokens, geometry.head_dim)
        self.layers = [
            torch.empty(shape, dtype=geometry.dtype, device=device) for _ in range(geometry.layers)
        ]
        self.peak_chunks = 0
        """The most that were in use at one time."""
        # Lowest number first: memory that is not needed is never touched, and neighbours are read in one go
        self._free = list(range(chunks))
        self._holders = [0] * chunks
        self._tree: dict[ChunkKey, int] = {}
        self._keys: dict[int, ChunkKey] = {}

    def __repr__(self) -> str:
        return f"HbmPool({self.used}/{self.chunks} chunks in use, {len(self._tree)} in the tree)"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.chunks - len(self._free)

    @property
    def peak_bytes(self) -> int:
        return self.peak_chunks * self.geometry.shard_bytes

    def take(self, count: int) -> list[int] | None:
        """So many free chunks, each with one holder; None, and nothing changed, if there are fewer."""
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for chunk in taken:
            assert self._holders[chunk] == 0, (chunk, self._holders[chunk])
            self._holders[chunk] = 1
        self.peak_chunks = max(self.peak_chunks, self.used)
        return taken

    def find(self, keys: Iterable[ChunkKey]) -> list[int]:
        """The chunks of the longest prefix of `keys` that is here. Nobody holds them by that."""
        found: list[int] = []
        for key in keys:
            if (chunk := self._tree.get(key)) is None:
                break
            found.append(chunk)
        return found

    def hold(self, chunks: Iterable[int]) -> None:
        """One holder more for each of these, which are in use."""
        for chunk in chunks:
            assert self._holders[chunk] > 0, f"chunk {chunk} is free"
            self._holders[chunk] += 1

    def publish(self, chunk: int, key: ChunkKey) -> None:
        """Put a chunk that is full and computed into the tree. If its tokens are there already, it stays private."""
        assert self._holders[chunk] > 0, f"chunk {chunk} is free"
        assert chunk not in self._keys, f"chunk {chunk} is in the tree"
        if key not in self._tree:
            self._tree[key] = chunk
            self._keys[chunk] = key

    def drop(self, chunks: Iterable[int]) -> None:
        """One holder less for each; what nobody holds is free."""
        for chunk in chunks:
            self._holders[chunk] -= 1
            assert self._holders[chunk] >= 0, f"chunk {chunk} was free"
            if self._holders[chunk] == 0:
                heapq.heappush(self._free, chunk)
                if (key := self._keys.pop(chunk, None)) is not None:
                    del self._tree[key]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert what only a bug could break; `held`: of each holder, its chunks."""
        holders = Counter(chunk for chunks in held for chunk in chunks)
        assert [holders[chunk] for chunk in range(self.chunks)] == self._holders, (
            "a holder is lost or too many"
        )
        assert sorted(self._free) == [n for n, count in enumerate(self._holders) if count == 0]
        assert len(self._free) + len(holders) == self.chunks, "chunks are not conserved"
        assert {chunk: key for key, chunk in self._tree.items()} == self._keys
        assert all(self._holders[chunk] for chunk in self._keys), "a free chunk is in the tree"
