"""What decode attention computes, from the sequences as told, not from a plan: each by itself, one softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kvstore.kernels.stretches import Stretch
from kvstore.kernels.stretches.naive import with_stretches


def naive_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Mapping[int, tuple[Sequence[int], int]],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    dtype: torch.dtype = torch.float64,
    stretches: Mapping[int, Sequence[Stretch]] | None = None,
    inv_freq: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """As `decode_attention`, computed and returned in `dtype`. `sequences`: of each row, its chunks and its tokens;
    `stretches`: what it sees elsewhere."""
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for row, (chunks, tokens) in sequences.items():
        if tokens:
            index = torch.as_tensor(list(chunks), device=keys.device)
            # [chunks, kv_heads, chunk_tokens, head_dim] -> [heads, tokens, head_dim]
            k, v = (
                pool[index].transpose(0, 1).flatten(1, 2)[:, :tokens].repeat_interleave(group, 0).to(dtype)
                for pool in (keys, values)
            )
            there = (stretches or {}).get(row, ())
            seen = torch.ones(1, tokens, dtype=torch.bool, device=q.device)
            k, v, _ = with_stretches((k, v), seen, there, (keys, values), inv_freq, interleaved=interleaved)
            logits = (k @ q[row].to(dtype).unsqueeze(-1)).squeeze(-1)
            logits = logits * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            out[row] = (logits.softmax(-1).unsqueeze(-2) @ v).squeeze(-2)
    return out
