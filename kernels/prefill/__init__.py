"""Prefill attention: the new tokens of several sequences attend to what is cached of each and, causally, to each other.

Two-phase attention over a prefix tree (ChunkAttention, arXiv 2402.15220), carried over from decoding to pieces of
prompts: the queries of all sequences that share cached chunks attend to them in the same matrix products. `naive.py`
says what is computed, `plan.py` who attends to what together, `cpu.py` and `kernel.py` (Triton) how it is done fast.
"""

from __future__ import annotations

import torch

from kvstore.kernels.arguments import check_attention, check_turned, checked_scale
from kvstore.kernels.prefill import cpu
from kvstore.kernels.prefill.plan import PrefillPlan

__all__ = ["PrefillPlan", "prefill_attention"]


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q @ K.T) @ V of each new token over the tokens of its sequence up to itself.

    * `plan`: `forest.prefill({row: new_tokens})`, where the forest has the sequences with the new tokens counted.
    * `q`: [tokens, heads, head_dim], the new tokens of the rows one after the other, in the order in which the plan was
      asked for. Any number of them for each row: a piece of a prompt, or one token that is decoded.
    * `keys`, `values`: [chunks, kv_heads, chunk_tokens, head_dim], each [chunk_tokens, head_dim] contiguous; heads is a
      multiple of kv_heads. The K and V of the new tokens are in them already.
    * `scale`: 1 / sqrt(head_dim) by default. `soft_cap`: logits become soft_cap * tanh(logits / soft_cap).
    * dtype: float16 or bfloat16, the same for all; on a CPU also float32 and float64. Products accumulate in float32
      (float64 for float64), partial results stay in it.
    * `out`: where the result goes, like `q`; it must not overlap what is read. A new tensor by default.
    * `turned`: where sequences have stretches, `plan.stretches.turn(q, inv_freq)`.

    On a CUDA device it launches Triton kernels on the current stream: head dimensions up to 256, chunks of 16, 32, 64,
    128 or 256 tokens. What lies in the pool outside of the sequences' tokens is never used, be it NaN. Results do not
    depend on where chunks lie in the pool, and the same plan gives the same bits. Raises ValueError for arguments that
    do not fit.
    """
    check_attention(
        *(q, keys, values, out),
        queries=plan.queries.shape[0],
        queries_are="new tokens in the plan",
        chunks=plan.chunks,
        chunk_tokens=plan.chunk_tokens,
        plan_device=plan.queries.device,
        checked=plan.checked,
    )
    check_turned(turned, q, plan.stretches)
    scale = checked_scale(scale, soft_cap, q.shape[2])
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.shape[0] == 0:
        return out
    if q.device.type == "cpu":
        cpu.prefill(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out, turned=turned)
    else:
        from kvstore.kernels.prefill import kernel  # Triton is there only where there is a GPU

        kernel.prefill(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out, turned=turned)
    return out
