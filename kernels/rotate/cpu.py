"""Rotate-on-load on a CPU: piece by piece, so that what is in between stays in the cache."""

from __future__ import annotations

import torch

PIECE = 1 << 16
"""Elements that are rotated at a time."""


def rotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """See `rotate` in __init__.py, which checked the arguments. `cos`, `sin`: [*keys.shape[:-1], pairs]."""
    if keys.numel() > PIECE and keys.dim() > 1:
        if keys.shape[0] > 1:
            step = max(1, PIECE * keys.shape[0] // keys.numel())
            parts = (tensor.split(step) for tensor in (keys, cos, sin, out))
        else:
            parts = ((tensor[0],) for tensor in (keys, cos, sin, out))
        for one in zip(*parts, strict=True):
            rotate(*one, interleaved=interleaved)
        return
    rotary = 2 * cos.shape[-1]
    out[..., rotary:] = keys[..., rotary:]
    source, target = keys[..., :rotary], out[..., :rotary]
    still = sin == 0
    if still.all():
        target.copy_(source)
        return
    turned = target if keys.dtype is torch.float32 else torch.empty(source.shape)
    (x, y), (to_x, to_y) = (_pairs(each, interleaved) for each in (source.to(torch.float32), turned))
    torch.mul(x, cos, out=to_x)
    to_x.addcmul_(y, sin, value=-1)
    torch.mul(y, cos, out=to_y)
    to_y.addcmul_(x, sin)
    if turned is not target:
        target.copy_(turned)
    if still.any():
        for was, now in zip(_pairs(source, interleaved), _pairs(target, interleaved), strict=True):
            now.copy_(torch.where(still, was, now))


def _pairs(keys: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return keys[..., 0::2], keys[..., 1::2]
    half = keys.shape[-1] // 2
    return keys[..., :half], keys[..., half:]
