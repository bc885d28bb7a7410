"""What launches of Triton kernels have in common: which arguments a kernel is compiled for, what a card has room for,
and memory for intermediate results.

Triton compiles a kernel anew for each combination of what it takes for special in its arguments: integers that are 1 or
multiples of 16, addresses that are multiples of 16. While serving that would be a pause of seconds for a length that
came up for the first time. So strides and offsets are named in `do_not_specialize`, and what loads of 16 bytes need to
know of strides is said by one constant (`unit_of`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

UNITS = (16, 8)
"""Elements: 16 bytes are 8 of two bytes."""


INT32_MAX = (1 << 31) - 1


class Card(NamedTuple):
    """What a program can have on a card."""

    shared_bytes: int
    accumulator_max: int
    """Rows of a tile times head_dim: what is larger does not fit in registers."""
    reads_in_place: bool
    """Whether products of 64 rows and more read keys and values in shared memory, as wgmma and tcgen05 do: then as many
    tiles are there as the pipeline has stages, else one less, since the next one is in registers."""


HOPPER = Card(227 << 10, 128 * 128, True)
"""An H100 or H200."""
SHARED_BYTES_MIN = 99 << 10
"""That the smallest cards have which the kernels are for: L4, A10, RTX 4090."""


def unit_of(*strides: int) -> int:
    """The most of `UNITS` that all strides are multiples of, or 1: kernels get strides in units of it. A stride of 2^31
    and more has to stay itself: Triton takes what is smaller for 32 bits, and times the unit it would overflow."""
    if max(strides) > INT32_MAX:
        return 1
    return next((unit for unit in UNITS if not any(stride % unit for stride in strides)), 1)


def card_of(device: torch.device) -> Card:
    """An H100 where there is none."""
    if device.type != "cuda":
        return HOPPER
    return _card(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _card(number: int) -> Card:
    properties = torch.cuda.get_device_properties(number)
    return card((properties.major, properties.minor), properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch has no types for it


def card(capability: tuple[int, int], shared_bytes: int) -> Card:
    """By compute capability. What is held in registers was found by compiling: see tests/unit/kernels/test_cards.py."""
    most = HOPPER.accumulator_max if capability[0] == 9 else HOPPER.accumulator_max // 2
    return Card(shared_bytes, most, capability[0] in (9, 10))


def rows_max(head_dim: int, *, most: int, card: Card) -> int:
    """Rows of a tile for heads of that size, `most` at most."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    return min(most, card.accumulator_max // block_d)


class Scratch:
    """Memory for partial results, fp32, kept from layer to layer and from step to step.

    Each stream has its own, since what one stream reads another may overwrite. Nothing is given back before its owner
    is gone: a CUDA graph that was captured writes to the addresses that it was captured with.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"Scratch({len(self._kept)} pieces, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for both in self._kept.values() for tensor in both)

    def of(
        self, partials: int, heads: int, head_dim: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [partials, heads, head_dim] and their maxima and sums [partials, heads, 2]; what they hold is
        anything."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = device, stream, partials, heads, head_dim
        if key not in self._kept:
            self._kept[key] = (
                torch.empty((partials, heads, head_dim), dtype=torch.float32, device=device),
                torch.empty((partials, heads, 2), dtype=torch.float32, device=device),
            )
        return self._kept[key]
