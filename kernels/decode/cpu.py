"""Decode attention on a CPU: numpy on the pool's own memory, the items of the plan spread over threads.

For one query per KV head, a multiply-and-add over the chunk as it lies (einsum) reads at about twice the speed of the
BLAS routines. For several, one matrix product per chunk and head serves the queries of all sequences that share the
chunk and of all heads of a group. numpy lets other Python threads run meanwhile. Half precision is converted chunk by
chunk, in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.forest import COUNT, LENGTH, PARTIALS, SLOT, Plan

Floats = NDArray[Any]
"""float32; float64 if the inputs are."""
Piece = tuple[slice, Floats, Floats]
PRODUCT_MAX = 1 << 18
"""Multiplications in one matrix product at most. Beyond it OpenBLAS starts threads of its own for each product, which
wait for each other in turns with ours: 20 times slower where cores are scarce."""


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """See `decode_attention`, which checked the arguments."""
    work = _Work(q.detach(), keys.detach(), values.detach(), plan, scale, soft_cap)
    threads = min(torch.get_num_threads(), len(work.pending))
    helpers = [_threads(os.getpid()).submit(work.run) for _ in range(threads - 1)]
    work.run()
    for helper in helpers:
        helper.result()
    out.detach().copy_(torch.from_numpy(work.merged()))


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """A forked process has none of its parent's threads."""
    return ThreadPoolExecutor(thread_name_prefix=f"decode-attention-{process}")


class _Work:
    """One call: its inputs, its partial results, and the items that nobody has taken yet, longest last."""

    def __init__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        self.dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.keys, self.values, self.soft_cap = keys, values, soft_cap
        # Where numpy knows the format, the pool itself
        self.native = (keys.numpy(), values.numpy()) if q.dtype is self.dtype else None
        sequences, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        scaled = (q.to(self.dtype) * scale).numpy()
        self.queries: Floats = scaled.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
        self.chunk_tokens = plan.chunk_tokens
        self.items, self.item_chunks, schedule, self.order, self.rows = (
            array.numpy() for array in plan.arrays()
        )
        self.pending: list[int] = schedule[self.items[schedule, COUNT] > 0][::-1].tolist()
        slots = int(self.rows[:, PARTIALS].sum())
        self.maxima: Floats = np.empty((slots, kv_heads, heads // kv_heads), scaled.dtype)
        self.sums: Floats = np.empty_like(self.maxima)
        self.outputs: Floats = np.empty((*self.maxima.shape, head_dim), scaled.dtype)

    def run(self) -> None:
        """Do items until none is left."""
        while True:
            try:
                item = self.pending.pop()  # one thread gets it
            except IndexError:
                return
            self._do(item)

    def _do(self, item: int) -> None:
        begin, count, first, tokens_max, partial = self.items[item].tolist()
        rows = self.order[begin : begin + count]
        tokens = min(tokens_max, int(self.rows[rows[0], LENGTH]) - first)
        chunks = -(-tokens // self.chunk_tokens)
        pieces = list(self._pieces(self.item_chunks[item, :chunks].tolist(), tokens))
        kv_heads, group, head_dim = self.queries.shape[1:]
        if count * group == 1:
            slot = int(self.rows[rows[0], SLOT]) + partial
            self._one(self.queries[rows[0], :, 0], pieces, tokens, slot)
            return
        slots = self.rows[rows, SLOT] + partial
        # [count, kv_heads, group, head_dim] -> [kv_heads, head_dim, count x group]
        queries = self.queries[rows].transpose(1, 3, 0, 2).reshape(kv_heads, head_dim, -1)
        together = count * group
        width = max(1, PRODUCT_MAX // (self.chunk_tokens * head_dim))
        maxima, sums = (np.empty((kv_heads, together), queries.dtype) for _ in range(2))
        outputs = np.empty((kv_heads, together, head_dim), queries.dtype)
        for start in range(0, together, width):
            some = slice(start, min(start + width, together))
            found = self._many(np.ascontiguousarray(queries[:, :, some]), pieces, tokens)
            maxima[:, some], sums[:, some], outputs[:, some] = found
        self.maxima[slots] = maxima.reshape(kv_heads, count, group).swapaxes(0, 1)
        self.sums[slots] = sums.reshape(kv_heads, count, group).swapaxes(0, 1)
        self.outputs[slots] = outputs.reshape(kv_heads, count, group, head_dim).swapaxes(0, 1)

    def _pieces(self, chunks: list[int], tokens: int) -> Iterator[Piece]:
        """(which of the chunks, their keys, their values) in stretches that are one array in memory, [n, kv_heads,
        chunk_tokens, head_dim]; the last chunk, if it is not full, with fewer tokens."""
        full = tokens // self.chunk_tokens
        begin = 0
        while begin < full:
            end = begin + 1
            while self.native and end < full and chunks[end] == chunks[end - 1] + 1:
                end += 1
            yield slice(begin, end), *self._load(chunks[begin], end - begin, self.chunk_tokens)
            begin = end
        if full < len(chunks):
            yield slice(full, full + 1), *self._load(chunks[full], 1, tokens % self.chunk_tokens)

    def _load(self, chunk: int, count: int, tokens: int) -> tuple[Floats, Floats]:
        here = np.s_[chunk : chunk + count, :, :tokens]
        if self.native:
            return self.native[0][here], self.native[1][here]
        return self.keys[here].to(self.dtype).numpy(), self.values[here].to(self.dtype).numpy()

    def _one(self, query: Floats, pieces: list[Piece], tokens: int, slot: int) -> None:
        """One query for each KV head, [kv_heads, head_dim]."""
        logits = self._room(query.shape[0], tokens)
        for where, keys, _ in pieces:
            here = logits[where, :, : keys.shape[2]]
            self._cap(np.einsum("nhtd,hd->nht", keys, query, out=here))
        self.maxima[slot, :, 0], self.sums[slot, :, 0] = _exp(logits)
        outputs = self.outputs[slot, :, 0]
        outputs[:] = 0
        for where, _, values in pieces:
            outputs += np.einsum("nht,nhtd->hd", logits[where, :, : values.shape[2]], values)

    def _many(self, queries: Floats, pieces: list[Piece], tokens: int) -> tuple[Floats, Floats, Floats]:
        """Several for each KV head, [kv_heads, head_dim, queries]."""
        kv_heads, head_dim, count = queries.shape
        logits = self._room(kv_heads, tokens, count)
        for where, keys, _ in pieces:
            here = logits[where, :, : keys.shape[2]]
            self._cap(np.matmul(keys, queries, out=here))
        maxima, sums = _exp(logits)
        outputs = np.zeros((kv_heads, count, head_dim), queries.dtype)
        for where, _, values in pieces:
            for weights, chunk in zip(logits[where, :, : values.shape[2]], values, strict=True):
                outputs += np.matmul(weights.swapaxes(1, 2), chunk)
        return maxima, sums, outputs

    def _room(self, kv_heads: int, tokens: int, *queries: int) -> Floats:
        """For logits; minus infinity where the last chunk is not full."""
        chunks = -(-tokens // self.chunk_tokens)
        logits: Floats = np.empty((chunks, kv_heads, self.chunk_tokens, *queries), self.queries.dtype)
        if tokens % self.chunk_tokens:
            logits[-1, :, tokens % self.chunk_tokens :] = -np.inf
        return logits

    def _cap(self, logits: Floats) -> None:
        if self.soft_cap is not None:
            np.divide(logits, self.soft_cap, out=logits)
            np.tanh(logits, out=logits)
            np.multiply(logits, self.soft_cap, out=logits)

    def merged(self) -> Floats:
        """The partial results of each row made one, [sequences_max, heads, head_dim]."""
        result = np.zeros((self.queries.shape[0], *self.outputs.shape[1:]), self.outputs.dtype)
        rows = np.flatnonzero(self.rows[:, PARTIALS])
        if rows.size:
            first, owner = self.rows[rows, SLOT], np.repeat(np.arange(rows.size), self.rows[rows, PARTIALS])
            weights = np.exp(self.maxima - np.maximum.reduceat(self.maxima, first)[owner])
            self.outputs *= weights[..., None]
            total = np.add.reduceat(self.sums * weights, first)
            result[rows] = np.add.reduceat(self.outputs, first) / total[..., None]
        return result.reshape(result.shape[0], -1, result.shape[-1])


def _exp(logits: Floats) -> tuple[Floats, Floats]:
    """Replace logits [chunks, kv_heads, tokens, ...] by exp(logit - maximum); (the maxima, the sums) over tokens."""
    maxima = logits.max((0, 2))
    np.subtract(logits, maxima[:, None], out=logits)
    np.exp(logits, out=logits)
    return maxima, logits.sum((0, 2))
