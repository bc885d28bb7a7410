"""Rotate-on-load: keys that were computed at one position, copied as if they had been computed `delta` further on.

A rotary embedding turns each pair of a key's elements by position * inv_freq. Rotations compose, R(a) R(b) = R(a + b),
so a key moves by being turned by delta * inv_freq once more, from its original bytes. Values have no position. What
YaRN multiplies keys by (its attention factor) is in them already: a rotation here is always a pure one.

`naive.py` says what is computed, `cpu.py` and `kernel.py` (Triton) how it is done fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.kernels.rotate import cpu

__all__ = [
    "Rotation",
    "apart",
    "check_apart",
    "check_elsewhere",
    "check_rotation",
    "rotate",
    "rotation",
    "span",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of keys. Quantised ones are refused: their scales belong to the elements as they were."""
DIMENSIONS_MAX = 4
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Made by `rotation`: cosines and sines, float32 [..., pairs], of one layer's angles. Where a sine is 0 the pair
    stays as it is, bit by bit."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    still: torch.Tensor | None = None
    """On a CPU, where sines are 0; None if nowhere. A GPU looks at each when it is used."""

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rotation:
        """The same for other views of the tables."""
        still = None if self.still is None else change(self.still)
        return Rotation(change(self.cos), change(self.sin), self.interleaved, still)


def rotation(
    deltas: int | torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    device: torch.device | str | None = None,
) -> Rotation:
    """What moves keys by `deltas` positions.

    * `deltas`: one integer, or an integer tensor; `rotate` broadcasts its shape against that of the keys without their
      last dimension.
    * `inv_freq`: [pairs], the model's own inverse frequencies for this layer: linear, llama3 and YaRN scaling, partial
      rotary and a theta of its own for each layer are all in there. Empty for a layer without positions.
    * `interleaved`: pairs are elements (2i, 2i + 1), as in GPT-J; else (i, i + pairs), as in Llama.
    * `device`: where the keys are; by default where the deltas are, the CPU for one integer.

    Angles, cosines and sines are computed in float64 and kept in float32: their error is at most 1e-16 of the largest
    angle and half a unit of float32's last place. Deltas on a GPU are not waited for, frequencies are. Raises
    ValueError for arguments that are no such thing.
    """
    if isinstance(deltas, torch.Tensor):
        if deltas.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"deltas are {deltas.dtype}: must be torch.int64 or torch.int32")
    else:
        if not isinstance(deltas, (int, np.integer)):
            raise ValueError(f"deltas are {deltas!r}: must be an integer, or a tensor of them")
        deltas = torch.tensor(deltas, dtype=torch.int64)
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
        raise ValueError(
            f"inv_freq is {inv_freq.dtype} {list(inv_freq.shape)}: must be floating-point [pairs]"
        )
    frequencies = inv_freq.detach().to("cpu", torch.float64)
    if not frequencies.isfinite().all():
        raise ValueError(f"inv_freq holds {frequencies[~frequencies.isfinite()][0]}: must be finite")
    angles = deltas.detach().to(torch.float64).unsqueeze(-1) * frequencies.to(deltas.device)
    device = deltas.device if device is None else torch.device(device)
    cos, sin = (
        table.to(torch.float32).to(device, non_blocking=True) for table in (angles.cos(), angles.sin())
    )
    still = sin == 0 if device.type == "cpu" else None
    return Rotation(cos, sin, interleaved, still if still is not None and still.any() else None)


def rotate(keys: torch.Tensor, by: Rotation, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of `keys` in which the first `by.rotary_dim` elements of each are rotated, the others as they were.

    * `keys`: [..., head_dim] with 1 to 4 dimensions, any strides; float16, bfloat16 or float32. For keys whose rotary
      slice does not come first (MLA), give a view that begins there.
    * `by`: the shape of its deltas is broadcast against keys.shape[:-1]: for keys [heads, tokens, head_dim], deltas []
      or [tokens]; for [tokens, heads, head_dim], [tokens, 1]; for [chunks, heads, tokens, head_dim], [chunks, 1, 1].
    * `out`: memory for the copy, like `keys` but with strides of its own; it must not overlap `keys`, since what was
      rotated twice is rounded twice. A new tensor by default.

    Products and sums are float32, rounded once to the dtype. Elements with a delta or a frequency of 0 are copied bit
    by bit. On a CUDA device it is one Triton kernel on the current stream that waits for nothing and can be captured in
    a graph. Raises ValueError for arguments that do not fit.
    """
    if not 1 <= keys.dim() <= DIMENSIONS_MAX:
        raise ValueError(f"keys is {list(keys.shape)}: must have 1 to {DIMENSIONS_MAX} dimensions")
    check_rotation(by, keys)
    try:
        # torch's own takes a second for its imports when it is first called
        fits = np.broadcast_shapes(by.cos.shape[:-1], keys.shape[:-1]) == keys.shape[:-1]
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"deltas are {list(by.cos.shape[:-1])}: must broadcast to {list(keys.shape[:-1])} (keys without head_dim)"
        )
    if out is None:
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
    if out.shape != keys.shape or out.dtype != keys.dtype or out.device != keys.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}: "
            f"must be like keys, {keys.dtype} {list(keys.shape)} on {keys.device}"
        )
    check_elsewhere("out", out, keys=keys)
    check_apart("out", out)
    if keys.numel() == 0:
        return out
    by = by.map(lambda table: table[(None,) * (keys.dim() - table.dim())])
    if keys.device.type == "cpu":
        cpu.rotate(keys.detach(), by, out.detach())
    else:
        from kvstore.kernels.rotate import kernel  # Triton is there only where there is a GPU

        kernel.rotate(keys, by, out)
    return out


def check_rotation(by: Rotation, keys: torch.Tensor) -> None:
    """Raises ValueError if keys like these cannot be rotated so."""
    if keys.device.type not in DEVICES:
        raise ValueError(f"keys is on {keys.device}: must be on one of {', '.join(DEVICES)}")
    if keys.dtype not in DTYPES:
        raise ValueError(f"keys is {keys.dtype}: what can be rotated is {', '.join(map(str, DTYPES))}")
    if by.rotary_dim > keys.shape[-1]:
        raise ValueError(f"inv_freq has {by.cos.shape[-1]} pairs: head_dim is {keys.shape[-1]}")
    if by.cos.device != keys.device:
        raise ValueError(f"the rotation is on {by.cos.device}, keys on {keys.device}: make it with device=")


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie: [first, behind the last)."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def check_elsewhere(name: str, tensor: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError if the memory of `tensor` reaches into that of one of the others."""
    begin, end = span(tensor)
    for other, read in others.items():
        first, behind = span(read)
        if begin < behind and first < end:
            raise ValueError(f"{name} overlaps {other}: give other memory")


def check_apart(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if what is written to one element would be in another one, too."""
    if not apart(zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{name} has strides {tensor.stride()}: its elements share memory")


def apart(dimensions: Iterable[tuple[int, int]], reach: int = 0) -> bool:
    """Whether stretches of reach + 1 elements, repeated along dimensions (stride, length), do not touch; False also
    where that is not plain from sorted strides."""
    for step, length in sorted(dimensions):
        if length > 1:
            if step <= reach:
                return False
            reach += (length - 1) * step
    return True
