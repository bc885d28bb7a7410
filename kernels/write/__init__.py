"""Writes the KV of new tokens into the chunks of a pool: K and V of a layer in one launch.

`naive.py` says what is written, `kernel.py` (Triton) how on a GPU; a CPU does it by indexing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

NOWHERE = -1
"""Instead of a chunk: the KV of this token is not written."""

__all__ = ["NOWHERE", "Slots", "write_kv"]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where the new tokens of a step go, the same in all layers: int64 arrays [tokens] on the pool's device."""

    chunks: torch.Tensor
    places: torch.Tensor
    pool_chunks: int
    chunk_tokens: int
    all_written: bool
    """Whether no token goes nowhere."""
    checked: set[object] = field(default_factory=set, repr=False)
    """Shapes, strides and types of arguments that fit."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[int],
        places: Sequence[int],
        *,
        pool_chunks: int,
        chunk_tokens: int,
        device: torch.device | str = "cpu",
    ) -> Slots:
        """Raises ValueError for a chunk or a place that the pool does not have, and for a slot that is named twice."""
        if len(chunks) != len(places):
            raise ValueError(f"{len(chunks)} chunks and {len(places)} places: must be as many")
        for name, values, least, most in (
            ("chunks", chunks, NOWHERE, pool_chunks),
            ("places", places, 0, chunk_tokens),
        ):
            if values and not (least <= min(values) and max(values) < most):
                raise ValueError(
                    f"{name} are {min(values)} to {max(values)}: must be at least {least} and below {most}"
                )
        written = [slot for slot in zip(chunks, places, strict=True) if slot[0] != NOWHERE]
        if len(set(written)) < len(written):
            raise ValueError("chunks and places name a slot twice: each token has one of its own")
        both = torch.tensor([list(chunks), list(places)], dtype=torch.long, device=device)
        return cls(both[0], both[1], pool_chunks, chunk_tokens, len(written) == len(chunks))


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor
) -> None:
    """keys[chunk, :, place] = k[token] and values[chunk, :, place] = v[token] for each token that goes somewhere.

    `keys`, `values`: [chunks, kv_heads, chunk_tokens, head_dim], each [chunk_tokens, head_dim] contiguous. `k`, `v`:
    [tokens, kv_heads, head_dim] of the same type, with any strides. Bits are copied. On a CUDA device
    it is one Triton launch on the current stream, and can be captured in a graph. Raises ValueError for arguments that
    do not fit.
    """
    seen = tuple((each.shape, each.stride(), each.dtype, each.device) for each in (keys, values, k, v))
    if seen not in slots.checked:
        _check(keys, values, slots, k, v)
        slots.checked.add(seen)
    if keys.device.type == "cpu":
        chunks, places = slots.chunks, slots.places
        if not slots.all_written:
            some = chunks != NOWHERE
            chunks, places, k, v = chunks[some], places[some], k[some], v[some]
        keys[chunks, :, places] = k
        values[chunks, :, places] = v
    elif len(k):
        from kvstore.kernels.write import kernel  # Triton is there only where there is a GPU

        kernel.write(keys, values, slots, k, v)


def _check(keys: torch.Tensor, values: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
    shape = [slots.pool_chunks, k.shape[1] if k.dim() == 3 else "kv_heads", slots.chunk_tokens, k.shape[-1]]
    for name, pool in (("keys", keys), ("values", values)):
        if list(pool.shape) != shape:
            raise ValueError(f"{name} is {list(pool.shape)}: must be {shape}")
        if pool.stride()[2:] != (k.shape[2], 1):
            raise ValueError(
                f"{name} has strides {pool.stride()}: each [chunk_tokens, head_dim] must be contiguous"
            )
    wanted = [len(slots.chunks), *k.shape[1:]]
    for name, new in (("k", k), ("v", v)):
        if list(new.shape) != wanted:
            raise ValueError(f"{name} is {list(new.shape)}: must be {wanted}")
    for name, other in (("values", values), ("k", k), ("v", v), ("slots", slots.chunks)):
        if other.device != keys.device or (name != "slots" and other.dtype != keys.dtype):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}: keys is {keys.dtype} on {keys.device}"
            )
