"""The write buffer: KV on its way out of the pool, copied by a stream of its own while the model goes on.

A copy waits for nothing but the layer that it reads, so it is soon over, however slow the store is; the saver works
from the buffer. Behind prefill, layer by layer (`Outgoing.copy` as each layer is computed); behind decode, by chunk.
Chunks may be freed and filled with other KV meanwhile: whoever writes them comes after `WriteBuffer.reads`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu_worker.device import Device, DeviceFailed, Event, Region
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Bits, bits

KEPT_BYTES = 64 << 20
"""Of buffers that are not in use, for the next copies: new memory costs page faults, or registration."""


def regions(layer: int, chunks: Iterable[int]) -> list[Region]:
    """What devices call the KV of these chunks in one layer."""
    return [("kv", layer, chunk) for chunk in chunks]


_Leaving = tuple[list[npt.NDArray[np.uint8]], Event]
"""Buffers, and when the copy out of them is done."""


class Outgoing:
    """Chunks on their way: `copy` and `stop` belong to the model's thread, the rest to the saver's."""

    def __init__(self, buffer: WriteBuffer, chunks: Sequence[int], tokens: int) -> None:
        self.chunks = tuple(chunks)
        self.tokens = tokens
        self._buffer = buffer
        self._shards = [buffer.take() for _ in chunks]
        self._layers = 0
        self._ready: Event | None = None
        self._waited = False

    def copy(self, layer: int) -> None:
        """The next layer, as the model has just computed it. Enqueues, and returns."""
        assert layer == self._layers, (layer, self._layers)
        self._layers += 1
        stream, device = self._buffer.stream, self._buffer.device
        stream.wait(device.compute.record())
        stream.run(
            partial(self._copy, layer),
            reads=regions(layer, self.chunks),
            writes=[("buffer", shard.ctypes.data) for shard in self._shards],
        )

    def stop(self) -> None:
        """No more is copied."""
        self._ready = self._buffer.stream.record()
        self._buffer.note(self.chunks, self._ready)

    @property
    def whole(self) -> bool:
        """Whether all layers were copied, or will be."""
        return self._layers == self._buffer.pool.geometry.layers

    def wait(self) -> None:
        """Until all is in the buffer. Raises DeviceFailed."""
        assert self._ready is not None
        self._ready.synchronize()
        self._waited = True

    def shard(self, number: int) -> npt.NDArray[np.uint8]:
        """All bytes of one chunk, as the store has them."""
        shard = self._shards[number]
        self._buffer.device.reading([("buffer", shard.ctypes.data)])
        return shard

    def release(self) -> None:
        """The saver needs it no more. Buffers that a copy may still write are used again once that is over."""
        shards, self._shards = self._shards, []
        if self._waited:
            self._buffer.give_back(shards)
        elif shards:
            self._buffer.leave(shards, self._ready or self._buffer.stream.record())

    def _copy(self, layer: int) -> None:
        pool, size = self._buffer.pool, self._buffer.pool.geometry.chunk_tokens
        geometry = pool.geometry
        start = geometry.offset(layer)
        plain: list[tuple[npt.NDArray[np.uint8], torch.Tensor]] = []
        for number, (chunk, shard) in enumerate(zip(self.chunks, list(self._shards), strict=False)):
            count = min(size, self.tokens - number * size)
            used = count * geometry.token_bytes
            if self._buffer.layers is not None:
                geometry.window(shard, layer, count)[...] = self._buffer.layers[layer][chunk][:, :, :count]
            else:
                source = pool.layers[layer][chunk][:, :, :count]
                plain.append((shard[start : start + used], source))
            shard[start + used : start + geometry.slice_bytes] = 0
        self._buffer.device.copy_all_out(plain)


class WriteBuffer:
    """Copies out of one pool. Safe for the model's thread and the saver's."""

    def __init__(self, pool: HbmPool, device: Device) -> None:
        self.pool = pool
        self.device = device
        self.stream = device.stream("kv-write")
        self.layers: list[Bits] | None = None
        """The pool as the host sees it; None: it does not."""
        if device.in_host_memory:
            self.layers = [bits(layer) for layer in pool.layers]
        self._reads: dict[int, Event] = {}
        """Chunk -> the last copy out of it that may be in flight. Of the model's thread."""
        self._lock = threading.Lock()
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._leaving: list[_Leaving] = []
        """Given back while a copy may still write them, and after which event it does not."""

    def __repr__(self) -> str:
        return f"WriteBuffer({len(self._reads)} chunks being copied, {len(self._spare)} buffers to spare)"

    def begin(self, chunks: Sequence[int], tokens: int) -> Outgoing:
        """`tokens`: that are in these chunks; the last may be a tail."""
        return Outgoing(self, chunks, tokens)

    def copy(self, chunks: Sequence[int], tokens: int) -> Outgoing:
        """All layers of them."""
        outgoing = self.begin(chunks, tokens)
        for layer in range(self.pool.geometry.layers):
            outgoing.copy(layer)
        outgoing.stop()
        return outgoing

    def reads(self, chunks: Iterable[int]) -> list[Event]:
        """Copies out of these that may be in flight: who writes them comes after those."""
        self._forget_done()
        if not self._reads:
            return []
        return [self._reads[chunk] for chunk in chunks if chunk in self._reads]

    def note(self, chunks: Iterable[int], event: Event) -> None:
        self._reads.update(dict.fromkeys(chunks, event))

    def take(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            over: list[_Leaving] = []
            going_on: list[_Leaving] = []
            for entry in self._leaving:
                (over if entry[1].query() else going_on).append(entry)
            self._leaving = going_on
        for shards, event in over:
            with suppress(DeviceFailed):  # then nothing is copied any more
                event.synchronize()
                self.give_back(shards)
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return self.device.buffer(self.pool.geometry.shard_bytes)

    def leave(self, shards: list[npt.NDArray[np.uint8]], event: Event) -> None:
        """To be given back after it. Until then they are ours: freed memory is somebody else's at once."""
        with self._lock:
            self._leaving.append((shards, event))

    def give_back(self, shards: Sequence[npt.NDArray[np.uint8]]) -> None:
        try:
            self.device.freeing([("buffer", shard.ctypes.data) for shard in shards])
        except DeviceFailed:
            return
        with self._lock:
            room = KEPT_BYTES // self.pool.geometry.shard_bytes - len(self._spare)
            self._spare += shards[: max(0, room)]

    def _forget_done(self) -> None:
        if self._reads and not self.device.tracks:
            self._reads = {chunk: event for chunk, event in self._reads.items() if not event.query()}
