"""Attention over stretches on a CPU: numpy on the pool's own memory, in threads; one item is one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.stretches.plan import PARTIAL, TURNED, StretchPlan
from kvstore.kernels.threads import PRODUCT_MAX, in_threads

Floats = NDArray[Any]
"""float32; float64 if the inputs are."""
Piece = tuple[int, Floats, Floats]


class Softmax(NamedTuple):
    """Of each query, over all it has seen so far: the largest logit [queries, kv_heads, group] (minus infinity:
    nothing), the sum of exp(logit - largest), and the values weighted by these [queries, kv_heads, group, head_dim]."""

    maxima: Floats
    sums: Floats
    outputs: Floats


def attend(
    turned: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: StretchPlan,
    *,
    scale: float,
    soft_cap: float | None,
) -> Softmax:
    """Of every line of q, over the stretches it sees. `turned` [v, heads, head_dim]: see `StretchPlan.turn`."""
    work = _Work(turned.detach(), keys.detach(), values.detach(), plan, scale, soft_cap)
    in_threads([partial(work.attend, item) for item in plan.items.tolist()[::-1]])
    return work.merged()


class _Work:
    def __init__(
        self,
        turned: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: StretchPlan,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        self.dtype = torch.float64 if turned.dtype is torch.float64 else torch.float32
        self.keys, self.values, self.soft_cap = keys, values, soft_cap
        # Where numpy knows the format, the pool itself
        self.native = (keys.numpy(), values.numpy()) if turned.dtype is self.dtype else None
        kv_heads, self.chunk_tokens, self.head_dim = keys.shape[1:]
        self.group = turned.shape[1] // kv_heads
        scaled = (turned.to(self.dtype) * scale).numpy()
        self.queries: Floats = scaled.reshape(len(scaled), kv_heads, self.group, self.head_dim)
        self.lines, self.parts = plan.lines.numpy(), plan.parts.tolist()
        self.results = plan.results.numpy()
        shape = (plan.partials, kv_heads, self.group)
        self.maxima: Floats = np.empty(shape, scaled.dtype)
        self.sums: Floats = np.empty(shape, scaled.dtype)
        self.outputs: Floats = np.empty((*shape, self.head_dim), scaled.dtype)
        self.product_rows = max(1, PRODUCT_MAX // (self.chunk_tokens * self.head_dim * self.group))

    def attend(self, item: list[int]) -> None:
        begin, count, part, parts = item
        here = self.parts[part : part + parts]
        pieces, width = list(self._pieces(here)), max(tokens for _, _, tokens in here)
        for start in range(begin, begin + count, self.product_rows):
            lines = self.lines[start : min(start + self.product_rows, begin + count)]
            self._attend(lines, pieces, parts, width)

    def _attend(self, lines: NDArray[np.int32], pieces: list[Piece], parts: int, width: int) -> None:
        kv_heads, rows = self.queries.shape[1], len(lines) * self.group
        # [lines, kv_heads, group, head_dim] -> [kv_heads, head_dim, lines x group]
        queries = self.queries[lines[:, TURNED]].transpose(1, 3, 0, 2).reshape(kv_heads, self.head_dim, rows)
        logits: Floats = np.full((parts, kv_heads, width, rows), -np.inf, queries.dtype)
        for at, keys, _ in pieces:
            here = logits[at : at + len(keys), :, : keys.shape[2]]
            np.matmul(keys, queries, out=here)
            if self.soft_cap is not None:
                np.divide(here, self.soft_cap, out=here)
                np.tanh(here, out=here)
                np.multiply(here, self.soft_cap, out=here)
        maxima = logits.max(0).max(1)
        np.subtract(logits, maxima[:, None], out=logits)
        np.exp(logits, out=logits)
        outputs: Floats = np.zeros((kv_heads, rows, self.head_dim), maxima.dtype)
        for at, _, values in pieces:
            for weights, part in zip(
                logits[at : at + len(values), :, : values.shape[2]], values, strict=True
            ):
                outputs += np.matmul(weights.swapaxes(1, 2), part)
        slots, shape = lines[:, PARTIAL], (kv_heads, len(lines), self.group)
        self.maxima[slots] = maxima.reshape(shape).swapaxes(0, 1)
        self.sums[slots] = logits.sum(0).sum(1).reshape(shape).swapaxes(0, 1)
        self.outputs[slots] = outputs.reshape(*shape, self.head_dim).swapaxes(0, 1)

    def _pieces(self, parts: list[list[int]]) -> Iterator[Piece]:
        """(place among the parts, keys, values), [n, kv_heads, tokens, head_dim]: stretches with the same tokens of
        chunks with numbers in a row go together."""
        begin = 0
        while begin < len(parts):
            chunk, first, tokens = parts[begin]
            end = begin + 1
            while self.native and end < len(parts) and parts[end] == [chunk + end - begin, first, tokens]:
                end += 1
            here = np.s_[chunk : chunk + end - begin, :, first : first + tokens]
            if self.native:
                yield begin, self.native[0][here], self.native[1][here]
            else:
                keys, values = (pool[here].to(self.dtype).numpy() for pool in (self.keys, self.values))
                yield begin, keys, values
            begin = end

    def merged(self) -> Softmax:
        """The partial results of each query made one."""
        counts, first = self.results[:, 0], self.results[:, 1]
        shape = (len(counts), *self.queries.shape[1:3])
        maxima: Floats = np.full(shape, -np.inf, self.maxima.dtype)
        sums: Floats = np.zeros(shape, self.maxima.dtype)
        outputs: Floats = np.zeros((*shape, self.head_dim), self.maxima.dtype)
        have = counts > 0
        if have.any():
            owners = np.repeat(np.arange(len(counts)), counts)
            at = np.concatenate(
                [np.arange(begin, begin + some) for begin, some in zip(first, counts, strict=True)]
            )
            starts = np.cumsum(counts[have]) - counts[have]
            maxima[have] = np.maximum.reduceat(self.maxima[at], starts)
            weights = np.exp(self.maxima[at] - maxima[owners])
            sums[have] = np.add.reduceat(self.sums[at] * weights, starts)
            outputs[have] = np.add.reduceat(self.outputs[at] * weights[..., None], starts)
        return Softmax(maxima, sums, outputs)
