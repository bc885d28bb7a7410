"""A section of the check: what it is given, and what all of them use."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.gpu_worker.device import CpuDevice
from kvstore.kernels.forest import Forest
from kvstore.kernels.launch import card_of, rows_max
from kvstore.kernels.prefill import PrefillPlan
from kvstore.kernels.warm_up import ROWS

Sequences = dict[int, tuple[list[int], int]]
Row = dict[str, Any]
Steps = Iterator[tuple[str, Callable[[], Row]]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, and of which size."""

    device: str = "cuda"
    batch: int = 32
    heads: int = 32
    head_dim: int = 128
    chunk: int = 64
    points: tuple[tuple[int, int], ...] = (
        *((4096, shared) for shared in (4096, 3072, 2048, 1024, 0)),
        *((tokens, tokens * part // 4) for tokens in (2048, 1024) for part in (4, 3, 2, 0)),
    )
    """(tokens of a sequence, how many of them are shared)."""
    variants: tuple[tuple[int, int], ...] = ((16, 512), (32, 256), (32, 512), (32, 1024), (64, 512))
    """(rows of a tile, tokens of an item), all timed at each point."""
    prefill_points: tuple[tuple[int, int, int], ...] = (
        *((8, 4096, new) for new in (16, 64, 128, 512)),
        *((1, 0, 4096), (1, 8192, 512), (32, 4096, 1)),
    )
    """(sequences, cached tokens that they share, new tokens of each)."""
    copied_tokens: int = 65536
    flush_bytes: int = 256 << 20
    """More than any L2."""
    repeats: int = 20
    brief: bool = False
    """Each kernel is launched once: so that it is compiled."""
    real: bool = True
    """A card; False: the CPU, in small."""


DRY = Setting(
    device="cpu",
    batch=3,
    heads=4,
    head_dim=16,
    chunk=16,
    points=((64, 64), (64, 32), (64, 0)),
    variants=((16, 32),),
    prefill_points=((2, 32, 5), (1, 0, 20)),
    copied_tokens=64,
    flush_bytes=1 << 10,
    repeats=2,
    real=False,
)


class Section:
    def __init__(self, on: Setting, speeds: dict[str, float]) -> None:
        """`speeds`: what the device section measures, and others are held against."""
        self.on = on
        self.speeds = speeds

    def steps(self) -> Steps:
        raise NotImplementedError

    def dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def randn(self, seed: int, *shape: int) -> torch.Tensor:
        draw = torch.Generator(self.on.device).manual_seed(seed)
        return torch.randn(shape, generator=draw, device=self.on.device)

    def pool(
        self,
        dtype: torch.dtype,
        seed: int,
        sequences: Sequences,
        chunks: int,
        chunk_tokens: int,
        kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        """With NaN wherever no sequence has a token."""
        pool = self.randn(seed + 1, chunks, 2, kv_heads, chunk_tokens, head_dim).to(dtype)
        unwritten = torch.ones(chunks, chunk_tokens, dtype=torch.bool)
        for own, tokens in sequences.values():
            for number, chunk in enumerate(own):
                unwritten[chunk, : tokens - number * chunk_tokens] = False
        return pool.masked_fill_(unwritten.to(self.on.device)[:, None, None, :, None], math.nan)

    def forest(
        self,
        sequences: Sequences,
        batch: int,
        chunks: int,
        chunk_tokens: int,
        tile: int,
        *,
        split_tokens: int,
        timed: bool = False,
    ) -> Forest:
        """`timed`: with no more room than two levels need, since programs for unused items take time as well."""
        pieces = sum(2 - (-tokens // split_tokens) for _, tokens in sequences.values())
        forest = Forest(
            chunk_tokens=chunk_tokens,
            chunks=chunks,
            sequences_max=batch,
            split_tokens=split_tokens,
            tile_sequences=tile,
            items_max=pieces if timed else 2048,
            partials_max=2048,
            device=self.on.device,
        )
        for row, (own, tokens) in sequences.items():
            forest.join(row, own, tokens)
        return forest

    def sharing(self, batch: int, tokens: int, shared: int) -> tuple[Sequences, int]:
        """Sequences of so many tokens that begin with the same `shared` ones; how many chunks they have in all."""
        first, own = shared // self.on.chunk, -(-(tokens - shared) // self.on.chunk)
        sequences = {
            row: ([*range(first), *range(first + row * own, first + (row + 1) * own)], tokens)
            for row in range(batch)
        }
        return sequences, first + batch * own

    def prefilling(
        self, batch: int, cached: int, new: int, kv_heads: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PrefillPlan, Sequences]:
        """(queries, keys, values, plan, sequences)"""
        on = self.on
        sequences, chunks = self.sharing(batch, cached + new, cached)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(dtype)
        q = self.randn(1, batch * new, on.heads, on.head_dim).to(dtype)
        forest = self.forest(sequences, batch, chunks, on.chunk, 16, split_tokens=8 * on.chunk, timed=True)
        return q, *pool.unbind(1), forest.prefill(dict.fromkeys(sequences, new)), sequences

    def rows_max(self, head_dim: int) -> int:
        """Rows of a tile that fit on this card: not all have as many as an H100."""
        return rows_max(head_dim, most=ROWS[-1], card=card_of(torch.device(self.on.device)))

    def cuda(self) -> Any:
        from kvstore.gpu_worker.cuda import CudaDevice

        return CudaDevice(torch.device("cuda", 0))

    def make_device(self) -> Any:
        """Which a worker would copy KV by."""
        return self.cuda() if self.on.real else CpuDevice()

    def synchronize(self) -> None:
        if self.on.real:
            torch.cuda.synchronize()

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a CUDA graph; compiled before, as a graph may not."""
        if not self.on.real or self.on.brief:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay(call: Callable[[], object] = call) -> None:  # with all that the graph reads
            graph.replay()

        return replay

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of a call with a cold L2. Writing the flushed bytes also hides the time to launch."""
        if self.on.brief:
            call()
            self.synchronize()
            return 1.0
        repeats = repeats or self.on.repeats
        for _ in range(3):
            call()
        flush = torch.empty(self.on.flush_bytes, dtype=torch.int8, device=self.on.device)
        if not self.on.real:
            took = []
            for _ in range(repeats):
                flush.zero_()
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            return statistics.median(took)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def random_sequences(seed: int, batch: int, chunk_tokens: int, more: int = 0) -> tuple[Sequences, int]:
    """Forks of one another at random chunks, with tails of any length, some empty; and how many chunks a pool needs."""
    draw = random.Random(seed)
    sequences: Sequences = {}
    used = 0
    for row in range(batch):
        chunks: list[int] = []
        if sequences and draw.random() < 0.8:
            other, tokens = sequences[draw.choice(list(sequences))]
            chunks = other[: draw.randint(0, tokens // chunk_tokens)]
        own = draw.randrange(6 * chunk_tokens) if draw.random() < 0.9 else 0
        count = -(-own // chunk_tokens)
        sequences[row] = ([*chunks, *range(used, used + count)], len(chunks) * chunk_tokens + own)
        used += count
    chunks_in_all = used + 5 + more
    places = list(range(chunks_in_all))
    draw.shuffle(places)
    return {
        row: ([places[chunk] for chunk in own], tokens) for row, (own, tokens) in sequences.items()
    }, chunks_in_all
