"""What `write_kv` writes, token by token."""

from __future__ import annotations

import torch

from kvstore.kernels.write import NOWHERE, Slots


def naive_write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pools afterwards, as copies."""
    keys, values = keys.clone(), values.clone()
    for token, (chunk, place) in enumerate(zip(slots.chunks.tolist(), slots.places.tolist(), strict=True)):
        if chunk != NOWHERE:
            keys[chunk, :, place] = k[token]
            values[chunk, :, place] = v[token]
    return keys, values
