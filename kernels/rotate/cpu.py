"""Rotate-on-load on a CPU: piece by piece, so that what is in between stays in the cache.

Interleaved pairs are complex numbers as they lie, and are multiplied as such; halves take four passes. Half precision
is computed in float32 and rounded once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvstore.kernels.rotate import Rotation

PIECE, CONVERTED_PIECE = 1 << 20, 1 << 17
"""Elements that are rotated at a time, where they are float32 and where they have to become it: less than that is in
between, and a call's own 20 microseconds matter little."""


def rotate(keys: torch.Tensor, by: Rotation, out: torch.Tensor) -> None:
    """See `rotate` in __init__.py, which checked the arguments. The tables of `by` have the dimensions of `keys`, each
    as long or of length 1."""
    piece = PIECE if keys.dtype is torch.float32 else CONVERTED_PIECE
    if keys.numel() > piece and keys.dim() > 1:
        length = keys.shape[0]
        step = max(1, piece * length // keys.numel())
        for here in range(0, length, step):
            there = slice(here, here + step) if length > 1 else 0
            rotate(keys[there], by.map(partial(_part, there=there, length=length)), out[there])
        return
    rotary = by.rotary_dim
    if rotary < keys.shape[-1]:
        out[..., rotary:] = keys[..., rotary:]
    source, target = keys[..., :rotary], out[..., :rotary]
    if by.still is not None and by.still.all():
        target.copy_(source)
        return
    numbers = source.to(torch.float32)
    in_place = target.dtype is torch.float32
    if by.interleaved:
        numbers = numbers if _are_complex(numbers) else numbers.clone(memory_format=torch.contiguous_format)
        in_place = in_place and _are_complex(target)
    turned = target if in_place else torch.empty(target.shape)
    if by.interleaved:
        torch.mul(_complex(numbers), torch.complex(by.cos, by.sin), out=_complex(turned))
    else:
        (x, y), (to_x, to_y) = _pairs(numbers, by), _pairs(turned, by)
        torch.mul(x, by.cos, out=to_x)
        to_x.addcmul_(y, by.sin, value=-1)
        torch.mul(y, by.cos, out=to_y)
        to_y.addcmul_(x, by.sin)
    if not in_place:
        target.copy_(turned)
    if by.still is not None:
        for was, now in zip(_pairs(source, by), _pairs(target, by), strict=True):
            now.copy_(torch.where(by.still, was, now))


def _part(table: torch.Tensor, there: slice | int, length: int) -> torch.Tensor:
    """Where a table has length 1, it is the same for every piece."""
    return table[there] if table.shape[0] == length else table


def _are_complex(keys: torch.Tensor) -> bool:
    """Whether the pairs can be seen as complex numbers where they lie."""
    aligned = not any(step % 2 for step in (keys.storage_offset(), *keys.stride()[:-1]))
    return keys.stride(-1) == 1 and aligned


def _complex(keys: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(keys.unflatten(-1, (-1, 2)))


def _pairs(keys: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    if by.interleaved:
        return keys[..., 0::2], keys[..., 1::2]
    half = keys.shape[-1] // 2
    return keys[..., :half], keys[..., half:]
