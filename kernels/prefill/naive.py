"""What prefill attention computes, from the sequences as told, not from a plan: each row by itself, one softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kvstore.kernels.stretches import Stretch
from kvstore.kernels.stretches.naive import with_stretches


def naive_prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Mapping[int, tuple[Sequence[int], int]],
    new_tokens: Mapping[int, int | Sequence[int]],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    dtype: torch.dtype = torch.float64,
    stretches: Mapping[int, Sequence[Stretch]] | None = None,
    inv_freq: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """As `prefill_attention`, computed and returned in `dtype`. `sequences`: of each row, its chunks and its tokens,
    new ones included; `new_tokens`: of each row, in the order of `q`, how many of the last, or their numbers;
    `stretches`: what it sees elsewhere."""
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    begin = 0
    for row, told in new_tokens.items():
        chunks, tokens = sequences[row]
        numbers = range(tokens - told, tokens) if isinstance(told, int) else told
        new, number = len(numbers), torch.as_tensor(list(numbers), device=q.device)
        index = torch.as_tensor(list(chunks), device=keys.device)
        # [chunks, kv_heads, chunk_tokens, head_dim] -> [heads, tokens, head_dim]
        k, v = (
            pool[index].transpose(0, 1).flatten(1, 2)[:, :tokens].repeat_interleave(group, 0).to(dtype)
            for pool in (keys, values)
        )
        here = slice(begin, begin + new)
        seen = torch.arange(tokens, device=q.device) <= number[:, None]
        there = (stretches or {}).get(row, ())
        k, v, seen = with_stretches(
            (k, v), seen, there, (keys, values), inv_freq, interleaved=interleaved, number=number
        )
        logits = q[here].to(dtype).transpose(0, 1) @ k.transpose(1, 2)  # [heads, new, tokens]
        logits = logits * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        out[here] = (logits.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(0, 1)
        begin += new
    return out
