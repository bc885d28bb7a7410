"""A rank's paged KV cache, block by block, as rows of plain bits.

vLLM registers one tensor a layer; one of its dimensions counts blocks, the others are the backend's business. A shard
is the layers' slices of one block in the order of the cache's group, each in the C order of its tensor's other
dimensions. What the elements mean is opaque to us (the CPU backend, for one, packs K transposed): it is told apart by
the layout fingerprint, never converted.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.bounce import BounceRing
from kvstore.gpu_worker.connectors.vllm.metadata import LayerShape
from kvstore.gpu_worker.device import Device, Event, Region
from kvstore.gpu_worker.segments import Path, Segments

if TYPE_CHECKING:
    from kvstore.client import ReadLease

Bits = npt.NDArray[np.signedinteger[Any]]
Shard = npt.NDArray[np.uint8]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLE_EVERY = 256
"""Of batches of blocks that a device copied in, one is compared with the store."""


class PagedBlocks:
    """In memory of the host: `layers[n][block]` is layer n's slice of that block, sharing memory with the engine's
    tensor. Copies are made by whoever asks for them; those of `DeviceBlocks` by streams."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], num_blocks: int) -> None:
        """`names`: the group's layers, in order. Raises Unsupported, naming the layer."""
        missing = sorted(set(names) ^ set(tensors))
        if missing:
            raise Unsupported(
                "layers outside of the one group of full attention", field="kv_caches", value=missing
            )
        self.shapes: list[LayerShape] = []
        self.numbers: dict[str, int] = {}
        """Layer name -> its number; layers that share one tensor have the same."""
        self.offsets: list[int] = []
        seen: dict[int, int] = {}
        offset = 0
        for name in names:
            tensor = tensors[name]
            number = seen.setdefault(tensor.data_ptr(), len(self.shapes))
            self.numbers[name] = number
            if number < len(self.shapes):
                continue
            bits, axis = _bits(name, tensor, num_blocks)
            slice_bytes = bits[0].numel() * bits.element_size()
            strides = [step for dimension, step in enumerate(tensor.stride()) if dimension != axis]
            order = tuple(int(n) for n in np.argsort([-step for step in strides], kind="stable"))
            self._add(name, bits)
            self.shapes.append(
                LayerShape(
                    tuple(bits.shape[1:]), order, str(tensor.dtype).removeprefix("torch."), slice_bytes
                )
            )
            self.offsets.append(offset)
            offset += slice_bytes
        self.shard_bytes = offset

    def _add(self, name: str, bits: torch.Tensor) -> None:
        if bits.device.type != "cpu":
            raise Unsupported(
                "KV is taken from memory of a CPU or of a CUDA device",
                field=name,
                value=bits.device,
                remedy="run vLLM's build for one of these",
            )
        if not self.shapes:
            self.layers: list[Bits] = []
        self.layers.append(bits.numpy())

    def buffer(self) -> Shard:
        """Memory for a shard, to `gather` into."""
        return np.empty(self.shard_bytes, np.uint8)

    def gather(self, pairs: Sequence[tuple[int, Shard]], layer: int) -> None:
        """Copies one layer's slice of each block to its place in the shard. `gathered` says when that is done."""
        start = self.offsets[layer]
        for block, shard in pairs:
            source = self.layers[layer][block]
            target = shard[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
            np.copyto(target, source)

    def gathered(self, blocks: Iterable[int]) -> Event | None:
        """When what was gathered of these is there, all layers; None: it is."""
        return None

    def overwritten(self, blocks: Iterable[int] | None) -> None:
        """The engine makes these anew from now on, None: any: nothing of ours reads them any more."""

    def free_for(self, blocks: Sequence[int]) -> list[Event]:
        """When `fill` may write these; of the thread that the engine computes on."""
        return []

    def fill(
        self,
        lease: ReadLease,
        rows: Sequence[tuple[int, int]],
        shard: int,
        layers: Sequence[int] | None = None,
        after: Sequence[Event] = (),
    ) -> bool:
        """All layers, or some, of (key number in the lease, block), once `after` are done. When it returns nothing of
        ours writes these blocks any more; False: they do not hold the committed bytes. From any thread."""
        return lease.copy_many(
            [piece for index, block in rows for piece in self.pieces(index, shard, block, layers)]
        )

    def pieces(
        self, index: int, shard: int, block: int, layers: Sequence[int] | None = None
    ) -> list[tuple[int, int, int, Bits]]:
        """What `ReadLease.copy_many` wants to fill `block` from key number `index`: all layers, or some."""
        wanted = range(len(self.layers)) if layers is None else layers
        return [(index, shard, self.offsets[layer], self.layers[layer][block]) for layer in wanted]

    def filled(self) -> None:
        """The engine's thread uses what was filled."""


class DeviceBlocks(PagedBlocks):
    """In memory of a device, that its streams copy from and to.

    who waits            for what                            because
    write stream         the compute stream                  a step computes what is copied out
    saver's thread       the copies out of a block           it reads the buffer
    engine's thread      the copies out of a block           vLLM has given it to another request, or to a connector
    read stream          the compute stream                  requests of before read the block until then
    loader's thread      the copies in                       then it is reported, and the lease goes back
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
        num_blocks: int,
        *,
        device: Device,
        segments: Segments,
    ) -> None:
        self._tensors: list[torch.Tensor] = []
        self._device = device
        self._segments = segments
        super().__init__(tensors, names, num_blocks)
        device.adopt(list(tensors.values()))
        self._write = device.stream("kv-write-blocks")
        self._read = device.stream("kv-read-blocks")
        self._reads: dict[int, Event] = {}
        """Block -> the last copy out of it that may be in flight. Of the engine's thread."""
        self._filling = threading.Lock()
        """Held by who gives the read stream work, and guards all below."""
        self._ring: BounceRing | None = None
        self._filled: Event | None = None
        """After the last `fill` that has returned. Read by anybody."""
        self._batches = 0

    def _add(self, name: str, bits: torch.Tensor) -> None:
        self._tensors.append(bits)

    def buffer(self) -> Shard:
        return self._device.buffer(self.shard_bytes)

    def gather(self, pairs: Sequence[tuple[int, Shard]], layer: int) -> None:
        if not pairs:
            return
        start = self.offsets[layer]
        self._write.wait(self._device.compute.record())
        copies = [
            (shard[start + at : start + at + part.nbytes], part)
            for block, shard in pairs
            for at, part in _parts(self._tensors[layer][block])
        ]
        self._write.run(
            partial(self._device.copy_all_out, copies),
            reads=_regions(layer, (block for block, _ in pairs)),
            writes=[("shard", shard.ctypes.data) for _, shard in pairs],
        )

    def gathered(self, blocks: Iterable[int]) -> Event | None:
        event = self._write.record()
        self._reads.update(dict.fromkeys(blocks, event))
        return event

    def overwritten(self, blocks: Iterable[int] | None) -> None:
        wanted = list(self._reads) if blocks is None else [block for block in blocks if block in self._reads]
        for event in dict.fromkeys([self._reads[block] for block in wanted]):
            event.synchronize()
        if not self._device.tracks:
            self._reads = {block: event for block, event in self._reads.items() if not event.query()}

    def free_for(self, blocks: Sequence[int]) -> list[Event]:
        # A load that fails before it copies leaves them to whoever computes the blocks: see `overwritten`
        reads = [self._reads[block] for block in blocks if block in self._reads]
        return [*dict.fromkeys(reads), self._device.compute.record()]

    def fill(
        self,
        lease: ReadLease,
        rows: Sequence[tuple[int, int]],
        shard: int,
        layers: Sequence[int] | None = None,
        after: Sequence[Event] = (),
    ) -> bool:
        """False also where the device failed; then nothing means anything any more."""
        wanted = range(len(self._tensors)) if layers is None else layers
        places = [(index, block, layer) for index, block in rows for layer in wanted]
        with self._filling:
            if self._segments.failure:
                return False
            for event in after:
                self._read.wait(event)
            try:
                if self._segments.path is Path.BOUNCE:
                    return self._bring(lease, places, shard)
                return self._copy(lease, places, shard)
            finally:
                done = self._read.record()
                done.synchronize()
                self._filled = done

    def filled(self) -> None:
        if (event := self._filled) is not None:  # which is over, whatever is being filled now
            event.synchronize()

    def _copy(self, lease: ReadLease, places: Sequence[tuple[int, int, int]], shard: int) -> bool:
        """Out of the arena itself: whether that was the committed bytes is known when it was read."""
        slices = [
            (index, shard, self.offsets[layer], self.shapes[layer].slice_bytes) for index, _, layer in places
        ]
        sources = lease.unsafe_views(slices)
        if sources is None:
            return False
        region: Region = ("lease", id(lease))
        self._enqueue(places, sources, region)
        done = self._read.record()
        done.synchronize()
        self._device.freeing([region])
        if not lease.intact():
            return False
        self._batches += 1
        return self._batches % SAMPLE_EVERY != 0 or self._is_stored(lease, secrets.choice(places), shard)

    def _bring(self, lease: ReadLease, places: Sequence[tuple[int, int, int]], shard: int) -> bool:
        """Through buffers that the client copies to."""
        if self._ring is None:
            self._ring = BounceRing(self._device, max(shape.slice_bytes for shape in self.shapes))
        sizes = [self.shapes[layer].slice_bytes for _, _, layer in places]
        for batch in self._ring.batches(sizes):
            buffer = self._ring.take()
            sources, at = [], 0
            for number in batch:
                sources.append(buffer.memory[at : at + sizes[number]])
                at += sizes[number]
            some = [places[number] for number in batch]
            if not lease.copy_many(
                [
                    (index, shard, self.offsets[layer], source)
                    for (index, _, layer), source in zip(some, sources, strict=True)
                ]
            ):
                return False
            self._enqueue(some, sources, buffer.region)
            buffer.sent = self._read.record()
        self._batches += 1
        return self._batches % SAMPLE_EVERY != 0 or self._is_stored(lease, secrets.choice(places), shard)

    def _enqueue(
        self, places: Sequence[tuple[int, int, int]], sources: Sequence[Shard], region: Region
    ) -> None:
        copies = [
            (part, source[at : at + part.nbytes])
            for (_, block, layer), source in zip(places, sources, strict=True)
            for at, part in _parts(self._tensors[layer][block])
        ]
        self._read.run(
            partial(self._device.copy_all_in, copies),
            reads=[region],
            writes=[("block", layer, block) for _, block, layer in places],
        )

    def _is_stored(self, lease: ReadLease, place: tuple[int, int, int], shard: int) -> bool:
        """One slice, back out of the device's memory: whether it is what the store has."""
        index, block, layer = place
        size = self.shapes[layer].slice_bytes
        found, stored = self._device.buffer(size), np.empty(size, np.uint8)
        region: Region = ("sample", found.ctypes.data)
        copies = [(found[at : at + part.nbytes], part) for at, part in _parts(self._tensors[layer][block])]
        self._read.run(
            partial(self._device.copy_all_out, copies), reads=_regions(layer, [block]), writes=[region]
        )
        self._read.record().synchronize()
        self._device.freeing([region])
        if not lease.copy_many([(index, shard, self.offsets[layer], stored)]) or (found == stored).all():
            return True  # or nothing can be said
        self._segments.fail(
            f"what {self._device.name} was given is not what it has: {int((found != stored).sum())} of {size} bytes of"
            f" block {block} in layer {layer} are not those of the store"
        )
        return False


def _regions(layer: int, blocks: Iterable[int]) -> list[Region]:
    return [("block", layer, block) for block in blocks]


def _parts(block: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """A block's slice of a layer as few pieces of memory, each with its place in the shard's slice; as a whole, which
    takes a kernel more, where they would be many."""
    if not block.is_contiguous() and block.dim() > 1 and block[0].is_contiguous():
        return [(number * block[0].nbytes, part) for number, part in enumerate(block)]
    return [(0, block)]


def _bits(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, int]:
    """The tensor as integers with the block dimension first, and which one that was."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported("is no tensor: a layer with state", field=name, value=type(tensor).__name__)
    axes = [axis for axis, length in enumerate(tensor.shape) if length == num_blocks]
    if len(axes) != 1:
        raise Unsupported(
            f"which dimension counts the {num_blocks} blocks cannot be told from the shape",
            field=name,
            value=tuple(tensor.shape),
            remedy="give the KV cache another size",
        )
    plain = tensor.detach().view(_INTEGERS[tensor.element_size()])
    return plain.movedim(axes[0], 0), axes[0]
