"""What attention over stretches computes: keys rotated to where they stand, as if they had been copied there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.kernels.rotate.naive import naive_rotate
from kvstore.kernels.stretches.plan import Stretch


def with_stretches(
    own: tuple[torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    stretches: Sequence[Stretch],
    pool: tuple[torch.Tensor, torch.Tensor],
    inv_freq: torch.Tensor | None,
    *,
    interleaved: bool = False,
    number: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [heads, tokens, head_dim] of a sequence's `own` tokens and, in front of them, of its `stretches`;
    and which of them each of its new tokens sees, [new, tokens], where `seen` says it of its own. `number`: those new
    tokens' numbers, by default the last ones. `pool`: keys and values [chunks, kv_heads, chunk_tokens, head_dim]."""
    keys, values = own
    if number is None:
        number = torch.arange(seen.shape[1] - len(seen), seen.shape[1], device=keys.device)
    group = len(keys) // pool[0].shape[1]
    for chunk, first, tokens, delta, at in stretches:
        k, v = (
            each[chunk, :, first : first + tokens].repeat_interleave(group, 0).to(keys.dtype) for each in pool
        )
        if delta:
            assert inv_freq is not None
            k = naive_rotate(k, delta, inv_freq, interleaved=interleaved, dtype=keys.dtype)
        keys, values = torch.cat((k, keys), 1), torch.cat((v, values), 1)
        seen = torch.cat(((number >= at)[:, None].expand(-1, tokens), seen), 1)
    return keys, values, seen
