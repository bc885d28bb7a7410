"""What attention over a pool of chunks asks of its arguments, whatever the operation."""

from __future__ import annotations

import math

import torch

from kvstore.kernels.rotate import check_apart, check_elsewhere
from kvstore.kernels.stretches import StretchPlan

DTYPES = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "cuda": (torch.float16, torch.bfloat16),
}
CHECKED_MAX = 64
"""Kinds of arguments that a plan remembers."""


def checked_scale(scale: float | None, soft_cap: float | None, head_dim: int) -> float:
    """The scale, 1 / sqrt(head_dim) by default. Raises ValueError for one, or a cap, that cannot be."""
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}: must be finite")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}: must be positive, or None for no cap")
    return scale


def check_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor | None,
    *,
    queries: int,
    queries_are: str,
    chunks: int,
    chunk_tokens: int,
    plan_device: torch.device,
    checked: set[object],
) -> None:
    """Raise ValueError for what does not fit: q is to be [queries, heads, head_dim], the pool as the plan says.

    `checked`: of the plan. What all layers of a step have in common is looked at once; that `out` is apart from what is
    read, each time.
    """
    seen = tuple(
        tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in (q, keys, values, out)
    )
    if seen not in checked:
        _check_attention(
            q,
            keys,
            values,
            out,
            queries=queries,
            queries_are=queries_are,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            plan_device=plan_device,
        )
        if len(checked) >= CHECKED_MAX:
            checked.clear()
        checked.add(seen)
    if out is not None:
        check_elsewhere("out", out, q=q, keys=keys, values=values)


def _check_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor | None,
    *,
    queries: int,
    queries_are: str,
    chunks: int,
    chunk_tokens: int,
    plan_device: torch.device,
) -> None:
    if q.dim() != 3 or q.shape[0] != queries:
        raise ValueError(f"q is {list(q.shape)}: must be [{queries} ({queries_are}), heads, head_dim]")
    for name, tensor in (("keys", keys), ("values", values)):
        wanted = [chunks, keys.shape[1] if keys.dim() == 4 else "kv_heads", chunk_tokens, q.shape[2]]
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
    if out is not None:
        check_apart("out", out)
    if plan_device != q.device:
        raise ValueError(f"the plan is on {plan_device}, q on {q.device}: make the forest with device=")


def check_turned(turned: torch.Tensor | None, q: torch.Tensor, plan: StretchPlan | None) -> None:
    """Raise ValueError unless the turned queries are those that the plan asks for."""
    if plan is None:
        if turned is not None:
            raise ValueError("turned queries are given, but no sequence of the plan has stretches")
        return
    wanted = [len(plan.turned), *q.shape[1:]]
    if turned is None or list(turned.shape) != wanted:
        given = None if turned is None else list(turned.shape)
        raise ValueError(f"turned is {given}: must be {wanted}, as plan.stretches.turn(q, inv_freq) makes it")
    if turned.dtype != q.dtype or turned.device != q.device or not turned.is_contiguous():
        raise ValueError(f"turned is {turned.dtype} on {turned.device}: must be like q, and contiguous")
