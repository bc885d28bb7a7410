"""A rank's paged KV cache, block by block, as rows of plain bits.

vLLM registers one tensor a layer; one of its dimensions counts blocks, the others are the backend's business. A shard
is the layers' slices of one block in the order of the cache's group, each in the C order of its tensor's other
dimensions. What the elements mean is opaque to us (the CPU backend, for one, packs K transposed): it is told apart by
the layout fingerprint, never converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.connectors.vllm.metadata import LayerShape

Bits = npt.NDArray[np.signedinteger[Any]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PagedBlocks:
    """`layers[n][block]` is layer n's slice of that block, sharing memory with the engine's tensor.

    Only memory of the CPU so far. On a device, `gather` is where an event of the compute stream has to be awaited, and
    the stream that overwrites the block has to wait for the copy in turn.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], num_blocks: int) -> None:
        """`names`: the group's layers, in order. Raises Unsupported, naming the layer."""
        missing = sorted(set(names) ^ set(tensors))
        if missing:
            raise Unsupported(
                "layers outside of the one group of full attention", field="kv_caches", value=missing
            )
        self.layers: list[Bits] = []
        self.shapes: list[LayerShape] = []
        self.numbers: dict[str, int] = {}
        """Layer name -> its number; layers that share one tensor have the same."""
        self.offsets: list[int] = []
        seen: dict[int, int] = {}
        offset = 0
        for name in names:
            tensor = tensors[name]
            number = seen.setdefault(tensor.data_ptr(), len(self.layers))
            self.numbers[name] = number
            if number < len(self.layers):
                continue
            bits, axis = _bits(name, tensor, num_blocks)
            block = bits[0]
            strides = [step for dimension, step in enumerate(tensor.stride()) if dimension != axis]
            order = tuple(int(n) for n in np.argsort([-step for step in strides], kind="stable"))
            self.layers.append(bits)
            self.shapes.append(
                LayerShape(block.shape, order, str(tensor.dtype).removeprefix("torch."), block.nbytes)
            )
            self.offsets.append(offset)
            offset += block.nbytes
        self.shard_bytes = offset

    def gather(self, block: int, layer: int, shard: npt.NDArray[np.uint8]) -> None:
        """Copies one layer's slice of `block` to its place in `shard`."""
        source = self.layers[layer][block]
        start = self.offsets[layer]
        target = shard[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
        np.copyto(target, source)

    def pieces(
        self, index: int, shard: int, block: int, layers: Sequence[int] | None = None
    ) -> list[tuple[int, int, int, Bits]]:
        """What `ReadLease.copy_many` wants to fill `block` from key number `index`: all layers, or some."""
        wanted = range(len(self.layers)) if layers is None else layers
        return [(index, shard, self.offsets[layer], self.layers[layer][block]) for layer in wanted]


def _bits(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[Bits, int]:
    """The tensor as integers with the block dimension first, and which one that was."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported("is no tensor: a layer with state", field=name, value=type(tensor).__name__)
    if tensor.device.type != "cpu":
        raise Unsupported(
            "KV is taken from CPU memory only, so far",
            field=name,
            value=tensor.device,
            remedy="run vLLM's CPU build",
        )
    axes = [axis for axis, length in enumerate(tensor.shape) if length == num_blocks]
    if len(axes) != 1:
        raise Unsupported(
            f"which dimension counts the {num_blocks} blocks cannot be told from the shape",
            field=name,
            value=tuple(tensor.shape),
            remedy="give the KV cache another size",
        )
    plain = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
    return np.moveaxis(plain, axes[0], 0), axes[0]
