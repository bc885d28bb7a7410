"""What rotate-on-load computes, element by element as the paper on rotary embeddings (arXiv 2104.09864) has it."""

from __future__ import annotations

import torch


def naive_rotate(
    keys: torch.Tensor,
    deltas: int | torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """As `rotate(keys, rotation(deltas, inv_freq))`, computed and returned in `dtype`; angles are always float64."""
    pairs = inv_freq.shape[0]
    angles = torch.as_tensor(deltas, device=keys.device).double().unsqueeze(-1) * inv_freq.double()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    out = keys.to(dtype, copy=True)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    x, y = keys[..., first].to(dtype), keys[..., second].to(dtype)
    out[..., first] = torch.where(angles == 0, x, x * cos - y * sin)
    out[..., second] = torch.where(angles == 0, y, y * cos + x * sin)
    return out
