"""A check on hits: of a sampled share, the KV that came from the store is computed once more, and both are compared.

What differs by more than rounding was stored by a sick worker, damaged before its checksum was made, or this worker is
sick itself. It cannot tell alone: so it stops to load and to save, says so, and tells the store of the first chunk that
differs, and what speaks for its own health: whether it computes the same twice (a repeat), and whether a text that it
computed when it began gives the same bits now (a golden test). The store quarantines the maker of that chunk if the
test passes, or once a second worker agrees. What comes after the first such chunk may have been computed from it by
somebody who is well: that is forgotten, and nobody blamed for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from kvstore.types import ChunkKey

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest difference, as a share of the largest number of the layer's K or V: other neighbours in a step, other
tiles of a kernel. What another text or another model gives differs by as much as the numbers themselves."""
TOKENS_MAX = 512
"""Of one check: it holds up a step."""
GOLDEN_TOKENS = 32

Compute = Callable[[Sequence[int]], list[torch.Tensor] | None]
"""K and V of these tokens, of each layer, computed from nothing else; None: there is no room."""


def is_sampled(key: ChunkKey, every: int) -> bool:
    """Whether the hit that ends with this chunk is checked: one of `every`, the same ones on all workers; 0: none."""
    return every > 0 and int.from_bytes(key[-4:], "little") % every == 0


def wrong_chunks(restored: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of the chunks that are further apart than rounding explains."""
    count = len(restored[0])
    return [
        number
        for number in range(count)
        if differs(
            [each[number : number + 1] for each in restored], [each[number : number + 1] for each in computed]
        )
    ]


def differs(restored: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> str:
    """Where two are further apart than rounding explains; "" if nowhere. Of each layer [chunks, 2, ...]."""
    for layer, (mine, theirs) in enumerate(zip(computed, restored, strict=True)):
        for number, name in enumerate("KV"):
            one, other = mine[:, number].float(), theirs[:, number].float()
            apart = float((one - other).abs().max())
            allowed = TOLERANCE[mine.dtype] * float(one.abs().max())
            if not apart <= allowed:  # nor is NaN
                return f"{name} of layer {layer} differs by {apart:.3g}, where {allowed:.3g} is allowed"
    return ""


class SelfTest:
    """What this worker knows of its own health."""

    def __init__(self, vocabulary: int) -> None:
        self._tokens = [(7 * number + 3) % vocabulary for number in range(GOLDEN_TOKENS)]
        self._golden = b""

    def remember(self, compute: Compute) -> None:
        """How things were when it began, or when the model became another."""
        self._golden = _digest(compute(self._tokens))

    def passes(self, compute: Compute, tokens: Sequence[int]) -> bool:
        """Whether these tokens give the same bits twice, and the golden ones those of the beginning."""
        once, again = _digest(compute(tokens)), _digest(compute(tokens))
        return (
            bool(once)
            and once == again
            and bool(self._golden)
            and _digest(compute(self._tokens)) == self._golden
        )


def _digest(layers: Sequence[torch.Tensor] | None) -> bytes:
    if layers is None:
        return b""
    state = hashlib.blake2b(digest_size=16)
    for layer in layers:
        state.update(layer.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return state.digest()
