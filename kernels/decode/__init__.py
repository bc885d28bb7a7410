"""Decode attention: one new token of each sequence attends to all of the sequence's KV, wherever runs of it are shared.

Two-phase attention over a prefix tree (ChunkAttention, arXiv 2402.15220), for forests, grouped heads and exact fp32
partial results. `naive.py` says what is computed, `cpu.py` and `kernel.py` (Triton) how it is done fast.
"""

from __future__ import annotations

import torch

from kvstore.kernels.arguments import check_attention, check_turned, checked_scale
from kvstore.kernels.decode import cpu
from kvstore.kernels.forest import Plan

__all__ = ["decode_attention"]


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q @ K.T) @ V of each sequence in the plan; zeros for rows without a sequence or a token.

    * `q`: [sequences_max, heads, head_dim], one row for each row of the forest.
    * `keys`, `values`: [chunks, kv_heads, chunk_tokens, head_dim], each [chunk_tokens, head_dim] contiguous; heads is a
      multiple of kv_heads. Views of one pool [chunks, 2, kv_heads, chunk_tokens, head_dim] (`pool.unbind(1)`) do:
      then a chunk is one contiguous piece, and so is each tile that a kernel reads.
    * `scale`: 1 / sqrt(head_dim) by default. `soft_cap`: logits become soft_cap * tanh(logits / soft_cap).
    * dtype: float16 or bfloat16, the same for all; on a CPU also float32 and float64. Products accumulate in float32
      (float64 for float64), partial results stay in it.
    * `out`: where the result goes, like `q`; it must not overlap what is read. A new tensor by default.
    * `turned`: where sequences have stretches, `plan.stretches.turn(q, inv_freq)`.

    On a CUDA device it launches two Triton kernels on the current stream, needs no other synchronisation and can be
    captured in a graph. Head dimensions up to 256 and chunks of 16, 32, 64, 128 or 256 tokens, which the CPU path does
    not ask for. What lies in the pool outside of the plan's tokens is never used, be it NaN. Results do not
    depend on where chunks lie in the pool, and the same plan gives the same bits. Raises ValueError for arguments that
    do not fit.
    """
    check_attention(
        *(q, keys, values, out),
        queries=plan.rows.shape[0],
        queries_are="sequences_max",
        chunks=plan.chunks,
        chunk_tokens=plan.chunk_tokens,
        plan_device=plan.rows.device,
        checked=plan.checked,
    )
    check_turned(turned, q, plan.stretches)
    scale = checked_scale(scale, soft_cap, q.shape[2])
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.device.type == "cpu":
        cpu.decode(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out, turned=turned)
    else:
        from kvstore.kernels.decode import kernel  # Triton is there only where there is a GPU

        kernel.decode(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out, turned=turned)
    return out
