"""Decode attention on a CPU: numpy on the pool's own memory, in threads.

What several sequences share is an item of the plan: one matrix product per chunk and KV head for the queries of all of
them. What a sequence has for itself is done chunk by chunk, and chunks that lie side by side in the pool together,
whoever they belong to: each call into numpy is long, and lets the other threads run meanwhile. For one query per KV
head, a multiply-and-add over the chunks as they lie (einsum) reads at twice the speed of the BLAS routines; for several
matrix products are better. Nothing of fp32 is copied; half precision is converted some chunks at a time, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.forest import BEGIN, COUNT, FIRST, LENGTH, PARTIAL, TOKENS, Plan
from kvstore.kernels.threads import PRODUCT_MAX, in_threads

Floats = NDArray[Any]
"""float32; float64 if the inputs are."""
Ints = NDArray[np.int64]
Piece = tuple[slice, Floats, Floats]
NEIGHBOURS_MAX = 1 << 19
"""Elements of the keys of chunks that are done together: enough for a long call, few enough to share among threads."""
CONVERTED_MAX = 1 << 17
"""The same of what is converted first, so that it stays in the cache."""


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
    in_threads(work.pending)
    out.detach().copy_(torch.from_numpy(work.merged()))


class _Work:
    """One call: its inputs, its partial results, and what nobody has done yet, longest last.

    Each sequence has a slot for the result of each item that it shares and of each chunk that it has for itself, in the
    order of its tokens.
    """

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
        every, every_chunks, schedule, order, rows = (array.numpy() for array in plan.arrays())
        used = schedule[every[schedule, COUNT] > 0]  # longest first
        items, self.item_chunks = every[used].astype(np.int64), every_chunks[used]
        tokens = np.minimum(items[:, TOKENS], rows[order[items[:, BEGIN]], LENGTH] - items[:, FIRST])
        chunks = -(-tokens // self.chunk_tokens)

        # A line for each sequence of each item, those of an item together
        counts = items[:, COUNT]
        lines = np.cumsum(counts) - counts  # of each item, the first
        item = np.repeat(np.arange(len(items)), counts)
        self.line_rows: Ints = order[items[item, BEGIN] + np.arange(len(item)) - lines[item]].astype(np.int64)
        widths = np.where(counts == 1, chunks, 1)[item]
        in_order = np.lexsort((items[item, PARTIAL], self.line_rows))
        ends = np.cumsum(widths[in_order])
        self.line_slots: Ints = np.empty_like(ends)
        self.line_slots[in_order] = ends - widths[in_order]
        self.owners: Ints = np.repeat(self.line_rows[in_order], widths[in_order])  # of each slot

        slots = len(self.owners)
        self.maxima: Floats = np.empty((slots, kv_heads, heads // kv_heads), scaled.dtype)
        self.sums: Floats = np.empty_like(self.maxima)
        self.outputs: Floats = np.empty((*self.maxima.shape, head_dim), scaled.dtype)

        self.pending: list[Callable[[], None]] = []
        alone = np.flatnonzero(counts == 1)
        if alone.size:
            self._add_neighbours(self.item_chunks[alone], chunks[alone], tokens[alone], lines[alone])
        for number in np.flatnonzero(counts > 1)[::-1].tolist():
            which = slice(lines[number], lines[number] + counts[number])
            self.pending.append(
                partial(
                    self._together,
                    which,
                    self.item_chunks[number, : chunks[number]].tolist(),
                    int(tokens[number]),
                )
            )

    def _add_neighbours(
        self, item_chunks: NDArray[np.int32], chunks: Ints, tokens: Ints, lines: Ints
    ) -> None:
        """Work for what sequences have for themselves: chunks with numbers in a row."""
        item, column = np.nonzero(np.arange(item_chunks.shape[1]) < chunks[:, None])
        numbers = item_chunks[item, column].astype(np.int64)
        by_number = np.argsort(numbers, kind="stable")
        ordered = numbers[by_number]
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if again.size:  # a chunk of several sequences that is not to be shared: each round takes it once
            start = np.maximum.accumulate(
                np.where(np.r_[True, np.diff(ordered) != 0], np.arange(len(ordered)), 0)
            )
            by_number = by_number[np.lexsort((ordered, np.arange(len(ordered)) - start))]
            ordered = numbers[by_number]
        item, column = item[by_number], column[by_number]
        rows, slots = self.line_rows[lines[item]], self.line_slots[lines[item]] + column
        sizes = np.minimum(tokens[item] - column * self.chunk_tokens, self.chunk_tokens)
        most = NEIGHBOURS_MAX if self.native else CONVERTED_MAX
        most = max(1, most // self.keys[0].numel())
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ordered)], strict=True):
            for at in range(begin, end, most):
                some = slice(at, min(at + most, end))
                self.pending.append(
                    partial(self._alone, int(ordered[at]), rows[some], slots[some], sizes[some])
                )

    def _alone(self, chunk: int, rows: Ints, slots: Ints, sizes: Ints) -> None:
        """Chunks from this number on, each with the query of a row, which sees `sizes` tokens of it."""
        keys, values = self._load(chunk, len(rows), self.chunk_tokens)
        queries = self.queries[rows]  # [chunks, kv_heads, group, head_dim]
        logits: Floats = np.empty((*queries.shape[:3], self.chunk_tokens), queries.dtype)
        one = queries.shape[2] == 1
        if one:
            np.einsum("nhtd,nhd->nht", keys, queries[:, :, 0], out=logits[:, :, 0])
        else:
            for some in self._products(queries.shape[2]):
                np.matmul(queries[:, :, some], keys.swapaxes(2, 3), out=logits[:, :, some])
        self._cap(logits)
        short = np.flatnonzero(sizes < self.chunk_tokens).tolist()
        for number in short:
            logits[number, :, :, sizes[number] :] = -np.inf
        maxima = logits.max(-1)
        np.subtract(logits, maxima[..., None], out=logits)
        np.exp(logits, out=logits)
        if one:
            outputs = np.einsum("nht,nhtd->nhd", logits[:, :, 0], values)[:, :, None]
        else:
            outputs = np.empty_like(queries)
            for some in self._products(queries.shape[2]):
                np.matmul(logits[:, :, some], values, out=outputs[:, :, some])
        for number in short:  # again, without what nobody wrote: nothing times NaN is not nothing
            seen = sizes[number]
            np.einsum(
                "hgt,htd->hgd", logits[number, :, :, :seen], values[number, :, :seen], out=outputs[number]
            )
        self.maxima[slots], self.sums[slots], self.outputs[slots] = maxima, logits.sum(-1), outputs

    def _together(self, lines: slice, chunks: list[int], tokens: int) -> None:
        """An item of several sequences: chunks that all of them see."""
        rows, slots = self.line_rows[lines], self.line_slots[lines]
        pieces = list(self._pieces(chunks, tokens))
        kv_heads, group, head_dim = self.queries.shape[1:]
        # [count, kv_heads, group, head_dim] -> [kv_heads, head_dim, count x group]
        queries = self.queries[rows].transpose(1, 3, 0, 2).reshape(kv_heads, head_dim, -1)
        together = queries.shape[2]
        maxima, sums = (np.empty((kv_heads, together), queries.dtype) for _ in range(2))
        outputs = np.empty((kv_heads, together, head_dim), queries.dtype)
        for some in self._products(together):
            found = self._many(np.ascontiguousarray(queries[:, :, some]), pieces, tokens)
            maxima[:, some], sums[:, some], outputs[:, some] = found
        shape = (kv_heads, len(rows), group)
        self.maxima[slots] = maxima.reshape(shape).swapaxes(0, 1)
        self.sums[slots] = sums.reshape(shape).swapaxes(0, 1)
        self.outputs[slots] = outputs.reshape(*shape, head_dim).swapaxes(0, 1)

    def _products(self, queries: int) -> Iterator[slice]:
        """As many of the queries as one matrix product may have."""
        width = max(1, PRODUCT_MAX // (self.chunk_tokens * self.queries.shape[3]))
        return (slice(start, min(start + width, queries)) for start in range(0, queries, width))

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
        result: Floats = np.zeros(self.queries.shape, self.outputs.dtype)
        if self.owners.size:
            first = np.flatnonzero(np.r_[True, np.diff(self.owners) != 0])
            rows, counts = self.owners[first], np.diff(np.r_[first, len(self.owners)])
            weights = self.maxima - np.repeat(np.maximum.reduceat(self.maxima, first), counts, 0)
            np.exp(weights, out=weights)
            totals = np.add.reduceat(self.sums * weights, first)[..., None]
            for row, begin, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
                some = slice(begin, begin + count)
                np.einsum("phg,phgd->hgd", weights[some], self.outputs[some], out=result[row])
            result[rows] /= totals
        return result.reshape(result.shape[0], -1, result.shape[-1])


def _exp(logits: Floats) -> tuple[Floats, Floats]:
    """Replace logits [chunks, kv_heads, tokens, queries] by exp(logit - maximum); (the maxima, the sums) over tokens.
    One axis after the other: numpy is ten times as fast at that."""
    maxima = logits.max(0).max(1)
    np.subtract(logits, maxima[:, None], out=logits)
    np.exp(logits, out=logits)
    return maxima, logits.sum(0).sum(1)
