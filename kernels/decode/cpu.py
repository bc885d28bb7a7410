"""Decode attention on a CPU: numpy on the pool's own memory, in threads.

What several sequences share is an item of the plan: one matrix product per chunk and KV head for the queries of all of
them. What a sequence has for itself is done chunk by chunk, and chunks that lie side by side in the pool together,
whoever they belong to: each call into numpy is long, and lets the other threads run meanwhile. For one query per KV
head, a multiply-and-add over the chunks as they lie (einsum) reads at twice the speed of the BLAS routines; for several
matrix products are better. Nothing of fp32 is copied; half precision is converted some chunks at a time, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.forest import BEGIN, COUNT, FIRST, LENGTH, PARTIAL, TOKENS, Plan
from kvstore.kernels.stretches import cpu as stretches
from kvstore.kernels.stretches.cpu import Softmax
from kvstore.kernels.threads import PRODUCT_MAX, in_threads

Floats = NDArray[Any]
"""float32; float64 if the inputs are."""
Ints = NDArray[np.int64]
Piece = tuple[slice, Floats, Floats]
NEIGHBOURS_MAX = 1 << 19
"""Elements of the keys of chunks that are done together: enough for a long call, few enough to share among threads."""
CONVERTED_MAX = 1 << 17
"""The same of what is converted first, so that it stays in the cache."""
PARTS_MIN = 4
"""What sequences have for themselves is cut into so many parts at least, so that threads end at the same time."""
NATIVE = (torch.float32, torch.float64)
"""What numpy computes in; anything else is converted to float32."""


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
    turned: torch.Tensor | None = None,
) -> None:
    """See `decode_attention`, which checked the arguments."""
    native = q.dtype in NATIVE  # numpy knows the format
    most = max(1, (NEIGHBOURS_MAX if native else CONVERTED_MAX) // keys[0].numel())
    division = plan.divisions.get(most)
    if division is None:
        division = plan.divisions[most] = _divide(plan, most)
    assert isinstance(division, _Division)
    work = _Work(q.detach(), keys.detach(), values.detach(), division, plan.chunk_tokens, scale, soft_cap)
    in_threads(work.pending())
    elsewhere = None
    if plan.stretches is not None and turned is not None:
        elsewhere = stretches.attend(turned, keys, values, plan.stretches, scale=scale, soft_cap=soft_cap)
    out.detach().copy_(torch.from_numpy(work.merged(elsewhere)))


@dataclass(frozen=True, slots=True)
class _Alone:
    """Chunks from number `chunk` on, one for each of `rows`, which sees `sizes` tokens of it; those that are not full
    are `short`. The results go to `slots`."""

    chunk: int
    rows: Ints
    slots: Ints
    sizes: Ints
    short: list[int]


@dataclass(frozen=True, slots=True)
class _Together:
    """Chunks that several rows see, so many tokens of them."""

    chunks: list[int]
    tokens: int
    rows: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class _Division:
    """The work of a plan and where its results go, the same for every layer.

    Each sequence has a slot for the result of each item that it shares and of each chunk that it has for itself, in the
    order of its tokens; `rows` are those with tokens, whose slots begin at `first` and are `counts` each. `alike` are
    stretches of them with equal counts: (which of `rows`, which slots).
    """

    alone: list[_Alone]
    together: list[_Together]
    """Longest last."""
    slots: int
    rows: Ints
    first: Ints
    counts: Ints
    alike: list[tuple[slice, slice]]


def _divide(plan: Plan, most: int) -> _Division:
    """`most`: chunks that are done together where they lie side by side."""
    every, every_chunks, schedule, order, rows = (array.numpy() for array in plan.arrays())
    used = schedule[every[schedule, COUNT] > 0]  # longest first
    items, item_chunks = every[used].astype(np.int64), every_chunks[used]
    tokens = np.minimum(items[:, TOKENS], rows[order[items[:, BEGIN]], LENGTH] - items[:, FIRST])
    chunks = -(-tokens // plan.chunk_tokens)

    # A line for each sequence of each item, those of an item together
    counts = items[:, COUNT]
    lines = np.cumsum(counts) - counts  # of each item, the first
    item = np.repeat(np.arange(len(items)), counts)
    line_rows: Ints = order[items[item, BEGIN] + np.arange(len(item)) - lines[item]].astype(np.int64)
    widths = np.where(counts == 1, chunks, 1)[item]
    in_order = np.lexsort((items[item, PARTIAL], line_rows))
    ends = np.cumsum(widths[in_order])
    line_slots: Ints = np.empty_like(ends)
    line_slots[in_order] = ends - widths[in_order]
    owners = np.repeat(line_rows[in_order], widths[in_order])  # of each slot

    alone = np.flatnonzero(counts == 1)
    own = lines[alone]
    together = []
    for number in np.flatnonzero(counts > 1)[::-1].tolist():
        which = slice(lines[number], lines[number] + counts[number])
        seen = item_chunks[number, : chunks[number]].tolist()
        together.append(_Together(seen, int(tokens[number]), line_rows[which], line_slots[which]))
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    per_row = np.diff(first, append=len(owners))
    edges = [*np.flatnonzero(np.diff(per_row, prepend=0)).tolist(), len(first)]
    return _Division(
        alone=list(
            _neighbours(
                *(item_chunks[alone], chunks[alone], tokens[alone], line_rows[own], line_slots[own]),
                chunk_tokens=plan.chunk_tokens,
                most=most,
            )
        ),
        together=together,
        slots=len(owners),
        rows=owners[first],
        first=first,
        counts=per_row,
        alike=[
            (slice(begin, end), slice(int(first[begin]), int(first[end - 1] + per_row[end - 1])))
            for begin, end in pairwise(edges)
        ],
    )


def _neighbours(
    item_chunks: NDArray[np.int32],
    chunks: Ints,
    tokens: Ints,
    item_rows: Ints,
    item_slots: Ints,
    *,
    chunk_tokens: int,
    most: int,
) -> Iterator[_Alone]:
    """What sequences have for themselves: chunks with numbers in a row."""
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
    rows, slots = item_rows[item], item_slots[item] + column
    sizes = np.minimum(tokens[item] - column * chunk_tokens, chunk_tokens)
    most = max(1, min(most, len(ordered) // PARTS_MIN))
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    for begin, end in pairwise([0, *breaks.tolist(), len(ordered)]):
        for at in range(begin, end, most):
            some = slice(at, min(at + most, end))
            short = np.flatnonzero(sizes[some] < chunk_tokens).tolist()
            yield _Alone(int(ordered[at]), rows[some], slots[some], sizes[some], short)


class _Work:
    """One call: its inputs, and its partial results by slot."""

    def __init__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        division: _Division,
        chunk_tokens: int,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        self.dtype = q.dtype if q.dtype in NATIVE else torch.float32
        self.keys, self.values, self.soft_cap = keys, values, soft_cap
        # Where numpy knows the format, the pool itself
        self.native = (keys.numpy(), values.numpy()) if q.dtype is self.dtype else None
        sequences, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        scaled = (q.to(self.dtype) * scale).numpy()
        self.queries: Floats = scaled.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
        self.division, self.chunk_tokens = division, chunk_tokens
        self.maxima: Floats = np.empty((division.slots, *self.queries.shape[1:3]), scaled.dtype)
        self.sums: Floats = np.empty_like(self.maxima)
        self.outputs: Floats = np.empty((*self.maxima.shape, head_dim), scaled.dtype)

    def pending(self) -> list[Callable[[], None]]:
        """What is to be done, longest last."""
        return [
            *(partial(self._alone, work) for work in self.division.alone),
            *(partial(self._together, work) for work in self.division.together),
        ]

    def _alone(self, work: _Alone) -> None:
        keys, values = self._load(work.chunk, len(work.rows), self.chunk_tokens)
        queries = self.queries[work.rows]  # [chunks, kv_heads, group, head_dim]
        logits: Floats = np.empty((*queries.shape[:3], self.chunk_tokens), queries.dtype)
        if queries.shape[2] == 1:
            np.einsum("nhtd,nhd->nht", keys, queries[:, :, 0], out=logits[:, :, 0])
        else:
            for some in self._products(queries.shape[2]):
                np.matmul(queries[:, :, some], keys.swapaxes(2, 3), out=logits[:, :, some])
        self._cap(logits)
        for number in work.short:
            logits[number, :, :, work.sizes[number] :] = -np.inf
        maxima = logits.max(-1)
        np.subtract(logits, maxima[..., None], out=logits)
        np.exp(logits, out=logits)
        outputs = self._weighted(logits, values)
        for number in work.short:  # 0 times what nobody wrote is not 0 if that is NaN: again without it
            if not np.isfinite(outputs[number]).all():
                written = values[number : number + 1].copy()
                written[:, :, work.sizes[number] :] = 0
                outputs[number] = self._weighted(logits[number : number + 1], written)[0]
        slots = work.slots
        self.maxima[slots], self.sums[slots], self.outputs[slots] = maxima, logits.sum(-1), outputs

    def _weighted(self, weights: Floats, values: Floats) -> Floats:
        """[chunks, kv_heads, group, chunk_tokens] @ [chunks, kv_heads, chunk_tokens, head_dim]"""
        if weights.shape[2] == 1:
            return np.einsum("nht,nhtd->nhd", weights[:, :, 0], values)[:, :, None]  # type: ignore[no-any-return]
        outputs: Floats = np.empty((*weights.shape[:3], values.shape[3]), values.dtype)
        for some in self._products(weights.shape[2]):
            np.matmul(weights[:, :, some], values, out=outputs[:, :, some])
        return outputs

    def _together(self, work: _Together) -> None:
        rows, slots = work.rows, work.slots
        pieces = list(self._pieces(work.chunks, work.tokens))
        kv_heads, group, head_dim = self.queries.shape[1:]
        # [count, kv_heads, group, head_dim] -> [kv_heads, head_dim, count x group]
        queries = self.queries[rows].transpose(1, 3, 0, 2).reshape(kv_heads, head_dim, -1)
        together = queries.shape[2]
        maxima, sums = (np.empty((kv_heads, together), queries.dtype) for _ in range(2))
        outputs = np.empty((kv_heads, together, head_dim), queries.dtype)
        for some in self._products(together):
            found = self._many(np.ascontiguousarray(queries[:, :, some]), pieces, work.tokens)
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

    def merged(self, elsewhere: Softmax | None = None) -> Floats:
        """The partial results of each row made one, [sequences_max, heads, head_dim]; with those over stretches."""
        result: Floats = np.zeros(self.queries.shape, self.outputs.dtype)
        rows, first = self.division.rows, self.division.first
        if rows.size:
            most = np.maximum.reduceat(self.maxima, first)
            weights = self.maxima - np.repeat(most, self.division.counts, 0)
            np.exp(weights, out=weights)
            outputs = np.empty((len(rows), *result.shape[1:]), result.dtype)
            for these, slots in self.division.alike:
                shape = (these.stop - these.start, -1)
                np.einsum(
                    "rphg,rphgd->rhgd",
                    weights[slots].reshape(*shape, *weights.shape[1:]),
                    self.outputs[slots].reshape(*shape, *self.outputs.shape[1:]),
                    out=outputs[these],
                )
            sums = np.add.reduceat(self.sums * weights, first)
            if elsewhere is not None:
                larger = np.maximum(most, elsewhere.maxima[rows])
                here, there = np.exp(most - larger), np.exp(elsewhere.maxima[rows] - larger)
                sums = sums * here + elsewhere.sums[rows] * there
                outputs = outputs * here[..., None] + elsewhere.outputs[rows] * there[..., None]
            result[rows] = outputs / sums[..., None]
        return result.reshape(result.shape[0], -1, result.shape[-1])


def _exp(logits: Floats) -> tuple[Floats, Floats]:
    """Replace logits [chunks, kv_heads, tokens, queries] by exp(logit - maximum); (the maxima, the sums) over tokens.
    One axis after the other: numpy is ten times as fast at that."""
    maxima = logits.max(0).max(1)
    np.subtract(logits, maxima[:, None], out=logits)
    np.exp(logits, out=logits)
    return maxima, logits.sum(0).sum(1)
