"""Prefill attention on a CPU: numpy on the pool's own memory, in threads.

A product is one chunk and KV head with some tens of queries: small enough that BLAS does not start threads of its own,
large enough to be as fast as it can be. Nothing of fp32 is copied; half precision is converted once for all tiles of a
thread's work. Where prompts are long, torch's own attention is faster, though KV is gathered for it first: see
`is_torchs`. The logits of a tile and a block of chunks stay in the cache; the softmax goes on from block to block
(online softmax), and then from item to item, so that nothing has to be kept for a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kvstore.kernels.prefill.plan import LIMIT, PARTIAL, PrefillPlan
from kvstore.kernels.stretches import cpu as stretches
from kvstore.kernels.stretches.cpu import Softmax
from kvstore.kernels.threads import PRODUCT_MAX, in_threads

Floats = NDArray[Any]
"""float32; float64 if the inputs are."""
Ints = NDArray[np.int32]
BLOCK_TOKENS = 512
"""Logits at a time, or those of one chunk."""
TILE_ROWS = 128
"""Rows of a tile at most, queries times heads of a group; fewer, where chunks are large."""
TORCH_MIN = 192
"""Queries of a KV head, new tokens times heads of its group, from which on torch is faster for a sequence that has
tokens before them: KV is gathered once for all of a group. Measured for groups of 1 to 8, heads of 64 and 128: from
here on it takes .4 to .8 of our time, with 128 queries .8 to 1.2, with 64 1.1 to 1.9."""
TORCH_ALONE_MIN = 16
"""New tokens of one that has none before them."""
TOGETHER_MIN = 32
"""Queries of a KV head of each sequence, from which on it pays to attend to what all have cached with torch's kernel
and to merge."""
TOGETHER_TOKENS_MIN = 256
"""That all have cached."""
TILES = 4
"""For which a thread loads a block once."""


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
    turned: torch.Tensor | None = None,
) -> None:
    """See `prefill_attention`, which checked the arguments."""
    # With another scale torch's masks, which are -inf before it is multiplied, mask nothing
    if turned is None and soft_cap is None and scale > 0:
        group = q.shape[1] // keys.shape[1]
        here = q.detach(), keys.detach(), values.detach(), plan
        if shared := shared_chunks(plan, q.dtype, group):
            together(*here, shared, scale=scale, out=out.detach())
            return
        if is_torchs(plan, q.dtype, group):
            by_torch(*here, scale=scale, out=out.detach())
            return
    work = _Work(q.detach(), keys.detach(), values.detach(), plan, scale, soft_cap)
    if plan.stretches is not None and turned is not None:
        work.begin(stretches.attend(turned, keys, values, plan.stretches, scale=scale, soft_cap=soft_cap))
    for pending in work.stages():
        in_threads(pending)
    out.detach()[plan.order] = torch.from_numpy(work.result()).to(out.dtype)


def is_torchs(plan: PrefillPlan, dtype: torch.dtype, group: int) -> bool:
    """Whether torch's attention computes this faster; `group`: heads of a KV head. It loads KV once for more queries
    than our tiles have, but of each sequence by itself, after it was gathered, and the tokens that a query does not see
    yet like all others."""
    if dtype is not torch.float32 or not plan.rows:
        return False
    return all(new * group >= TORCH_MIN if cached else new >= TORCH_ALONE_MIN for _, new, cached in plan.rows)


def by_torch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """The same, sequence by sequence."""
    for table, (line, new, cached) in zip(plan.tables, plan.rows, strict=True):
        tokens = cached + new
        chunks = table[: -(-tokens // plan.chunk_tokens)]
        k, v = (of[chunks].transpose(0, 1).flatten(1, 2)[None, :, :tokens] for of in (keys, values))
        if cached and (new, cached) not in plan.masks:
            plan.masks[new, cached] = torch.ones(new, tokens, dtype=torch.bool).tril(cached)
        found = F.scaled_dot_product_attention(
            q[line : line + new].transpose(0, 1)[None],
            k,
            v,
            attn_mask=plan.masks[new, cached] if cached else None,
            is_causal=not cached,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        out[line : line + new] = found[0].transpose(0, 1)


def shared_chunks(plan: PrefillPlan, dtype: torch.dtype, group: int) -> int:
    """Chunks that all sequences have cached and begin with, where torch's attention to them together, with a merge, is
    the fastest; else 0."""
    if dtype is not torch.float32 or len(plan.rows) < 2:
        return 0
    if any(new * group < TOGETHER_MIN for _, new, _ in plan.rows):
        return 0
    most = min(cached for *_, cached in plan.rows) // plan.chunk_tokens
    if most * plan.chunk_tokens < TOGETHER_TOKENS_MIN:
        return 0
    tables = plan.tables[:, :most]
    alike = (tables == tables[0]).all(0).long().cumprod(0).sum()
    return int(alike) if int(alike) * plan.chunk_tokens >= TOGETHER_TOKENS_MIN else 0


def together(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    shared: int,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """ChunkAttention's two phases with torch's kernel: all queries attend to the first `shared` chunks at once, then
    those of each sequence to the rest of it, and a softmax over both merges them."""
    lines, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads

    def gathered(of: torch.Tensor, chunks: torch.Tensor, tokens: int) -> torch.Tensor:
        return of[chunks].transpose(0, 1).flatten(1, 2)[None, :, :tokens]

    begin = shared * plan.chunk_tokens
    k, v = (gathered(of, plan.tables[0, :shared], begin) for of in (keys, values))
    by_kv_head = q.view(lines, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)[None]
    found, sums = _attend(by_kv_head, k, v, scale=scale)
    first = found[0].view(kv_heads, lines, group, head_dim).transpose(0, 1).reshape(q.shape)
    first_sums = sums[0].view(kv_heads, lines, group).transpose(0, 1).reshape(lines, heads)
    for table, (line, new, cached) in zip(plan.tables, plan.rows, strict=True):
        tokens = cached + new - begin
        chunks = table[shared : shared - (-tokens // plan.chunk_tokens)]
        k, v = (gathered(of, chunks, tokens).repeat_interleave(group, 1) for of in (keys, values))
        mask = None
        if cached > begin:
            mask = plan.masks.get((new, cached, begin))
            if mask is None:
                unseen = torch.ones(new, tokens, dtype=torch.bool).triu(cached - begin + 1)
                mask = torch.zeros(new, tokens).masked_fill_(unseen, -torch.inf)
                plan.masks[new, cached, begin] = mask
        here = slice(line, line + new)
        found, sums = _attend(
            q[here].transpose(0, 1)[None], k, v, scale=scale, causal=mask is None, mask=mask
        )
        share = torch.sigmoid(first_sums[here] - sums[0].transpose(0, 1)).unsqueeze(-1)
        out[here] = torch.lerp(found[0].transpose(0, 1), first[here], share)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `scaled_dot_product_attention` calls on a CPU, which also says the logarithm of each query's sum."""
    found: tuple[torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    )
    return found


@dataclass(slots=True)
class _Tile:
    """Some rows: their queries [kv_heads, head_dim, rows] and what they have so far, [kv_heads, rows, ...]."""

    rows: slice
    queries: Floats
    limits: Ints
    maxima: Floats
    sums: Floats
    outputs: Floats


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
        self.plan, self.keys, self.values, self.soft_cap = plan, keys, values, soft_cap
        self.kv_heads, self.chunk_tokens, self.head_dim = keys.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        # Where numpy knows the format, the pool itself
        self.native = (keys.numpy(), values.numpy()) if q.dtype is self.dtype else None
        # [tokens, heads, head_dim] -> [kv_heads, tokens x group, head_dim], in the order of the plan
        shape = (len(q), self.kv_heads, self.group, self.head_dim)
        scaled = (q[plan.order].to(self.dtype) * scale).view(shape).transpose(0, 1).flatten(1, 2)
        self.queries: Floats = scaled.numpy()
        self.limits: Ints = np.repeat(plan.queries.numpy()[plan.order.numpy(), LIMIT], self.group)
        self.maxima: Floats = np.full(self.queries.shape[:2], -np.inf, self.queries.dtype)
        self.sums: Floats = np.zeros_like(self.maxima)
        self.outputs: Floats = np.zeros_like(self.queries)
        self.block_chunks = max(1, BLOCK_TOKENS // self.chunk_tokens)
        self.tile_rows = max(1, min(TILE_ROWS, PRODUCT_MAX // (self.chunk_tokens * self.head_dim)))

    def begin(self, seen: Softmax) -> None:
        """With what the queries see of stretches, [lines of q, kv_heads, group ...]."""
        order = self.plan.order.numpy()
        for mine, theirs in (
            (self.maxima, seen.maxima),
            (self.sums, seen.sums),
            (self.outputs, seen.outputs),
        ):
            mine[:] = theirs[order].swapaxes(0, 1).reshape(mine.shape)

    def stages(self) -> Iterator[list[Callable[[], None]]]:
        """What can be done at the same time: in a stage, a query is in one item. Longest last."""
        tables, items = self.plan.tables.tolist(), self.plan.items.tolist()
        for stage in range(max((item[PARTIAL] for item in items), default=-1) + 1):
            pending: list[Callable[[], None]] = []
            for begin, count, first, tokens, _, table in (item for item in items if item[PARTIAL] == stage):
                at = first // self.chunk_tokens
                chunks = tables[table][at : at - (-tokens // self.chunk_tokens)]
                end, most = (begin + count) * self.group, TILES * self.tile_rows
                for start in range(begin * self.group, end, most):
                    rows = slice(start, min(start + most, end))
                    pending.append(partial(self._attend, rows, chunks, first, tokens))
            yield pending[::-1]

    def _attend(self, rows: slice, chunks: list[int], first: int, tokens: int) -> None:
        """Queries of an item over its chunks, whose first token has the number `first`."""
        tiles = [
            self._tile(slice(start, min(start + self.tile_rows, rows.stop)))
            for start in range(rows.start, rows.stop, self.tile_rows)
        ]
        tokens = min(tokens, int(self.limits[rows.stop - 1]) - first)
        for start in range(0, -(-tokens // self.chunk_tokens), self.block_chunks):
            begin = start * self.chunk_tokens
            size = min(self.block_chunks * self.chunk_tokens, tokens - begin)
            block = list(self._pieces(chunks[start : start - (-size // self.chunk_tokens)], size))
            for tile in tiles:
                if first + begin < tile.limits[-1]:
                    self._step(tile, block, first + begin, size)
        for tile in tiles:
            self.maxima[:, tile.rows], self.sums[:, tile.rows] = tile.maxima, tile.sums
            self.outputs[:, tile.rows] = tile.outputs

    def _tile(self, rows: slice) -> _Tile:
        queries = np.ascontiguousarray(self.queries[:, rows].swapaxes(1, 2))
        maxima, sums, outputs = (of[:, rows].copy() for of in (self.maxima, self.sums, self.outputs))
        return _Tile(rows, queries, self.limits[rows], maxima, sums, outputs)

    def _pieces(self, chunks: list[int], tokens: int) -> Iterator[tuple[int, Floats, Floats]]:
        """(place in the block, keys, values) of stretches that are one array in memory, [n, kv_heads, tokens,
        head_dim]; the last chunk, if it is not full, with fewer tokens."""
        full = tokens // self.chunk_tokens
        begin = 0
        while begin < full:
            end = begin + 1
            while self.native and end < full and chunks[end] == chunks[end - 1] + 1:
                end += 1
            yield begin, *self._load(chunks[begin], end - begin, self.chunk_tokens)
            begin = end
        if full < len(chunks):
            yield full, *self._load(chunks[full], 1, tokens % self.chunk_tokens)

    def _load(self, chunk: int, count: int, tokens: int) -> tuple[Floats, Floats]:
        here = np.s_[chunk : chunk + count, :, :tokens]
        if self.native:
            return self.native[0][here], self.native[1][here]
        return self.keys[here].to(self.dtype).numpy(), self.values[here].to(self.dtype).numpy()

    def _step(self, tile: _Tile, block: list[tuple[int, Floats, Floats]], first: int, tokens: int) -> None:
        """A tile over a block, whose first token has the number `first`."""
        count, rows = -(-tokens // self.chunk_tokens), tile.queries.shape[2]
        # [chunks, kv_heads, tokens, rows]
        logits: Floats = np.empty((count, self.kv_heads, self.chunk_tokens, rows), tile.queries.dtype)
        if tokens % self.chunk_tokens:
            logits[-1, :, tokens % self.chunk_tokens :] = -np.inf
        for at, keys, _ in block:
            here = logits[at : at + len(keys), :, : keys.shape[2]]
            np.matmul(keys, tile.queries, out=here)
            if self.soft_cap is not None:
                np.divide(here, self.soft_cap, out=here)
                np.tanh(here, out=here)
                np.multiply(here, self.soft_cap, out=here)
        if first + tokens > tile.limits[0]:  # rows are in the order of their tokens
            number = np.arange(first, first + count * self.chunk_tokens).reshape(count, 1, -1, 1)
            np.copyto(logits, -np.inf, where=number >= tile.limits)
        before = tile.maxima
        tile.maxima = np.maximum(before, logits.max(0).max(1))  # finite: all see the item's first token
        fade = np.exp(before - tile.maxima)
        np.subtract(logits, tile.maxima[:, None], out=logits)
        np.exp(logits, out=logits)
        tile.sums *= fade
        tile.sums += logits.sum(0).sum(1)
        tile.outputs *= fade[..., None]
        for at, _, values in block:
            for weights, chunk in zip(
                logits[at : at + len(values), :, : values.shape[2]], values, strict=True
            ):
                tile.outputs += np.matmul(weights.swapaxes(1, 2), chunk)

    def result(self) -> Floats:
        """[tokens, heads, head_dim], in the order of the plan"""
        self.outputs /= self.sums[..., None]
        shape = (self.kv_heads, -1, self.group, self.head_dim)
        result = self.outputs.reshape(shape).swapaxes(0, 1)
        return result.reshape(len(result), -1, self.head_dim)
