"""Prefill attention on a CPU: torch's batched matrix products on the pool's own memory, threads within each.

A product is one chunk of all KV heads with the queries of an item: nothing shared is copied, and half precision is
converted once for all queries of the item. Logits of some hundred tokens at a time stay in the cache; their softmax
goes on from what the queries have so far (online softmax), so that there are no partial results to merge.
"""

from __future__ import annotations

import torch

from kvstore.kernels.prefill.plan import LIMIT, PrefillPlan

BLOCK_TOKENS = 512
"""Tokens of the logits at a time, or one chunk."""


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
        tokens, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        # [tokens, heads, head_dim] -> [kv_heads, tokens x group, head_dim], in the order of the plan
        queries = (q[plan.order].to(dtype) * scale).view(tokens, kv_heads, group, head_dim)
        queries = queries.transpose(0, 1).reshape(kv_heads, tokens * group, head_dim)
        limits = plan.queries[:, LIMIT].repeat_interleave(group)
        work = _Work(queries, keys, values, limits, plan.chunk_tokens, soft_cap)
        tables = plan.tables.tolist()
        for begin, count, first, length, _, table in plan.items.tolist():
            rows = slice(begin * group, (begin + count) * group)
            at = first // plan.chunk_tokens
            work.attend(rows, tables[table][at : at - (-length // plan.chunk_tokens)], first, length)
        result = work.outputs / work.sums
        result = (
            result.view(kv_heads, tokens, group, head_dim).transpose(0, 1).reshape(tokens, heads, head_dim)
        )
        out[plan.order] = result.to(out.dtype)


class _Work:
    """One call: its inputs, and of each query the maximum, the sum and the weighted values so far."""

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        limits: torch.Tensor,
        chunk_tokens: int,
        soft_cap: float | None,
    ) -> None:
        self.queries, self.keys, self.values, self.limits = queries, keys, values, limits
        self.chunk_tokens, self.soft_cap = chunk_tokens, soft_cap
        self.block_chunks = max(1, BLOCK_TOKENS // chunk_tokens)
        self.maxima = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        self.sums = torch.zeros_like(self.maxima)
        self.outputs = torch.zeros_like(queries)

    def attend(self, rows: slice, chunks: list[int], first: int, tokens: int) -> None:
        """Queries of an item over its chunks, whose first token has the number `first`."""
        block_tokens = self.block_chunks * self.chunk_tokens
        for start in range(0, tokens, block_tokens):
            here = chunks[start // self.chunk_tokens :][: self.block_chunks]
            self._block(rows, here, first + start, min(block_tokens, tokens - start))

    def _block(self, rows: slice, chunks: list[int], first: int, tokens: int) -> None:
        queries, limits = self.queries[:, rows], self.limits[rows]
        spans = [(at, min(at + self.chunk_tokens, tokens)) for at in range(0, tokens, self.chunk_tokens)]
        logits = queries.new_empty((*queries.shape[:2], tokens))
        for chunk, (at, end) in zip(chunks, spans, strict=True):
            keys = self.keys[chunk, :, : end - at].to(queries.dtype)
            torch.bmm(queries, keys.transpose(1, 2), out=logits[:, :, at:end])
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if first + tokens > limits[0]:  # queries are in the order of their tokens
            unseen = torch.arange(first, first + tokens) >= limits[:, None]
            logits.masked_fill_(unseen, -torch.inf)
        before = self.maxima[:, rows].clone()
        maxima = torch.maximum(
            before, logits.amax(-1, keepdim=True)
        )  # finite: they see the item's first token
        fade = before.sub_(maxima).exp_()
        self.maxima[:, rows] = maxima
        weights = logits.sub_(maxima).exp_()
        self.sums[:, rows] = self.sums[:, rows] * fade + weights.sum(-1, keepdim=True)
        outputs = self.outputs[:, rows].mul_(fade)
        for chunk, (at, end) in zip(chunks, spans, strict=True):
            outputs.baddbmm_(weights[:, :, at:end], self.values[chunk, :, : end - at].to(queries.dtype))
