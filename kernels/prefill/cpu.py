"""Prefill attention on a CPU: torch's batched matrix products, with threads of their own, over blocks of chunks.

The keys and values of some chunks at a time are put side by side in a small block (in float32, whatever the pool's
format): a product over them is twice as fast as one for each chunk, and the block serves all queries of the item, tile
by tile. The logits of a tile and a block stay in the cache; the softmax goes on from block to block (online softmax),
and then from item to item, so that nothing has to be kept for a merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvstore.kernels.prefill.plan import LIMIT, PrefillPlan

BLOCK_TOKENS = 256
"""Tokens side by side, or one chunk."""
TILE_ROWS = 256
"""Rows of a tile, queries times heads of a group; more, if there are few KV heads."""
LOGITS_MAX = 1 << 19
"""Logits at a time: KV heads are taken together as long as there are not more."""
LOG2_E = math.log2(math.e)
"""Logits are to base 2: torch has no fast exp of what underflows."""


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """See `prefill_attention`, which checked the arguments."""
    with torch.no_grad():
        work = _Work(q, keys, values, plan, scale, soft_cap)
        tables = plan.tables.tolist()
        for begin, count, first, tokens, _, table in plan.items.tolist():
            at = first // plan.chunk_tokens
            chunks = tables[table][at : at - (-tokens // plan.chunk_tokens)]
            for head in range(0, work.kv_heads, work.heads):
                work.attend(slice(head, head + work.heads), begin, count, chunks, first, tokens)
        out[plan.order] = work.result().to(out.dtype)


@dataclass(slots=True)
class _Tile:
    """Some rows of some KV heads, [kv_heads, rows, head_dim], and what they have so far; contiguous, for products."""

    where: tuple[slice, slice]
    queries: torch.Tensor
    limits: torch.Tensor
    last: int
    maxima: torch.Tensor
    sums: torch.Tensor
    outputs: torch.Tensor


class _Work:
    """One call: its inputs, and of each query the maximum, the sum and the weighted values so far."""

    def __init__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: PrefillPlan,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        self.kv_heads, self.chunk_tokens, self.head_dim = keys.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.keys, self.values, self.soft_cap = keys, values, soft_cap
        self.block_tokens = max(1, BLOCK_TOKENS // self.chunk_tokens) * self.chunk_tokens
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        # [tokens, heads, head_dim] -> [kv_heads, tokens x group, head_dim], in the order of the plan
        shape = (len(q), self.kv_heads, self.group, self.head_dim)
        self.queries = torch.empty((self.kv_heads, len(q) * self.group, self.head_dim), dtype=dtype)
        self.queries.view(self.kv_heads, len(q), self.group, self.head_dim).copy_(
            q[plan.order].view(shape).transpose(0, 1)
        )
        self.queries *= scale * (LOG2_E if soft_cap is None else 2 * LOG2_E / soft_cap)
        self.limits = plan.queries[plan.order, LIMIT].repeat_interleave(self.group)
        self.maxima = self.queries.new_full((*self.queries.shape[:2], 1), -torch.inf)
        self.sums = torch.zeros_like(self.maxima)
        self.outputs = torch.zeros_like(self.queries)
        self.heads = min(self.kv_heads, max(1, LOGITS_MAX // (TILE_ROWS * self.block_tokens)))
        self.tile_rows = min(4 * TILE_ROWS, max(TILE_ROWS, LOGITS_MAX // (self.heads * self.block_tokens)))
        self.room = self.queries.new_empty(self.heads * self.tile_rows * self.block_tokens)
        self.block = self.queries.new_empty((2, self.heads, self.block_tokens, self.head_dim))

    def attend(
        self, heads: slice, begin: int, count: int, chunks: list[int], first: int, tokens: int
    ) -> None:
        """Queries of an item over its chunks, whose first token has the number `first`; some of the KV heads."""
        end = (begin + count) * self.group
        tiles = [
            self._tile(heads, slice(start, min(start + self.tile_rows, end)))
            for start in range(begin * self.group, end, self.tile_rows)
        ]
        for start in range(0, tokens, self.block_tokens):
            size = min(self.block_tokens, tokens - start)
            at = start // self.chunk_tokens
            keys, values = self._side_by_side(chunks[at : at - (-size // self.chunk_tokens)], heads, size)
            for tile in tiles:
                if first + start < tile.last:
                    self._step(tile, keys.transpose(1, 2), values, first + start)
        for tile in tiles:
            self.maxima[tile.where], self.sums[tile.where] = tile.maxima, tile.sums
            self.outputs[tile.where] = tile.outputs

    def _tile(self, heads: slice, rows: slice) -> _Tile:
        where, limits = (heads, rows), self.limits[rows]
        maxima, sums = self.maxima[where].clone(), self.sums[where].clone()
        outputs = self.outputs[where].clone(memory_format=torch.contiguous_format)
        return _Tile(where, self.queries[where], limits, int(limits[-1]), maxima, sums, outputs)

    def _step(self, tile: _Tile, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """A tile over a block, [kv_heads, head_dim, tokens] and [kv_heads, tokens, head_dim]."""
        heads, rows, tokens = *tile.queries.shape[:2], keys.shape[2]
        logits = self.room[: heads * rows * tokens].view(heads, rows, tokens)
        torch.bmm(tile.queries, keys, out=logits)
        if self.soft_cap is not None:
            # cap * tanh(x / cap), to base 2, of 2 x / cap to base 2; e^y overflows to the right values
            half = self.soft_cap * LOG2_E
            logits.exp2_().add_(1).reciprocal_().mul_(-2 * half).add_(half)
        if first + tokens > tile.limits[0]:  # rows are in the order of their tokens
            unseen = torch.arange(first, first + tokens) >= tile.limits[:, None]
            logits += torch.zeros_like(logits[0]).masked_fill_(unseen, -torch.inf)
        before = tile.maxima
        tile.maxima = torch.maximum(before, logits.amax(-1, keepdim=True))  # finite: all see the first token
        fade = before.sub_(tile.maxima).exp2_()
        weights = logits.sub_(tile.maxima).exp2_()
        tile.sums.mul_(fade).add_(weights.sum(-1, keepdim=True))
        tile.outputs.mul_(fade).baddbmm_(weights, values)

    def _side_by_side(self, chunks: list[int], heads: slice, tokens: int) -> torch.Tensor:
        """[2, kv_heads, tokens, head_dim]: the keys and values of these chunks."""
        block = self.block[:, : len(range(*heads.indices(self.kv_heads))), :tokens]
        for number, chunk in enumerate(chunks):
            here = block[:, :, number * self.chunk_tokens : (number + 1) * self.chunk_tokens]
            size = here.shape[2]
            here[0] = self.keys[chunk, heads, :size]
            here[1] = self.values[chunk, heads, :size]
        return block

    def result(self) -> torch.Tensor:
        """[tokens, heads, head_dim]"""
        shape = (self.kv_heads, -1, self.group, self.head_dim)
        return self.outputs.div_(self.sums).view(shape).transpose(0, 1).flatten(1, 2)
