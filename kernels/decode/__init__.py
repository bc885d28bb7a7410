"""Decode attention: one new token of each sequence attends to all of the sequence's KV, wherever runs of it are shared.

Two-phase attention over a prefix tree (ChunkAttention, arXiv 2402.15220), for forests, grouped heads and exact fp32
partial results. `naive.py` says what is computed, `cpu.py` and `kernel.py` (Triton) how it is done fast.
"""

from __future__ import annotations

import math

import torch

from kvstore.kernels.decode import cpu
from kvstore.kernels.forest import Plan

__all__ = ["decode_attention"]

DTYPES = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "cuda": (torch.float16, torch.bfloat16),
}


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q @ K.T) @ V of each sequence in the plan; zeros for rows without a sequence or a token.

    * `q`: [sequences_max, heads, head_dim], one row for each row of the forest.
    * `keys`, `values`: [chunks, kv_heads, chunk_tokens, head_dim], each [chunk_tokens, head_dim] contiguous; heads is a
      multiple of kv_heads. Views of one pool [chunks, 2, kv_heads, chunk_tokens, head_dim] (`pool.unbind(1)`) do:
      then a chunk is one contiguous piece, and so is each tile that a kernel reads.
    * `scale`: 1 / sqrt(head_dim) by default. `soft_cap`: logits become soft_cap * tanh(logits / soft_cap).
    * dtype: float16 or bfloat16, the same for all; on a CPU also float32 and float64. Products accumulate in float32
      (float64 for float64), partial results stay in it.
    * `out`: where the result goes, like `q`; a new tensor by default.

    On a CUDA device it launches two Triton kernels on the current stream, needs no other synchronisation and can be
    captured in a graph. Head dimensions up to 256 and chunks of 16, 32, 64, 128 or 256 tokens, which the CPU path does
    not ask for. What lies in the pool outside of the plan's tokens is never used, be it NaN. Results do not
    depend on where chunks lie in the pool, and the same plan gives the same bits. Raises ValueError for arguments that
    do not fit.
    """
    _check(q, keys, values, plan, out)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}: must be finite")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}: must be positive, or None for no cap")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.device.type == "cpu":
        cpu.decode(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out)
    else:
        from kvstore.kernels.decode import kernel  # Triton is there only where there is a GPU

        kernel.decode(q, keys, values, plan, scale=scale, soft_cap=soft_cap, out=out)
    return out


def _check(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan, out: torch.Tensor | None
) -> None:
    if q.dim() != 3 or q.shape[0] != plan.rows.shape[0]:
        raise ValueError(
            f"q is {list(q.shape)}: must be [{plan.rows.shape[0]} (sequences_max), heads, head_dim]"
        )
    for name, tensor in (("keys", keys), ("values", values)):
        wanted = [
            plan.chunks,
            keys.shape[1] if keys.dim() == 4 else "kv_heads",
            plan.chunk_tokens,
            q.shape[2],
        ]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} is {list(tensor.shape)}: must be {wanted}")
        if tensor.stride()[2:] != (q.shape[2], 1):
            raise ValueError(
                f"{name} has strides {tensor.stride()}: each [chunk_tokens, head_dim] must be contiguous"
            )
    if keys.shape[1] == 0 or q.shape[1] % keys.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads: must be a multiple of the {keys.shape[1]} of keys")
    if q.stride(2) != 1:
        raise ValueError("q must be contiguous in its last dimension")
    allowed = DTYPES.get(q.device.type, ())
    if not allowed:
        raise ValueError(f"q is on {q.device}: must be on one of {', '.join(DTYPES)}")
    if q.dtype not in allowed:
        raise ValueError(f"q is {q.dtype}: must be one of {', '.join(map(str, allowed))}")
    if out is not None and (out.shape != q.shape or out.stride(2) != 1):
        raise ValueError(
            f"out is {list(out.shape)}: must be like q, {list(q.shape)}, contiguous in its last dimension"
        )
    for name, other in (("keys", keys), ("values", values), ("out", q if out is None else out)):
        if other.dtype != q.dtype or other.device != q.device:
            raise ValueError(f"{name} is {other.dtype} on {other.device}: q is {q.dtype} on {q.device}")
    if plan.rows.device != q.device:
        raise ValueError(f"the plan is on {plan.rows.device}, q on {q.device}: make the forest with device=")
