"""The Loader: copies KV from the store into the pool, layer by layer, ahead of the layer that computes. Keys that are
to lie at other positions than they were computed at are rotated on the way, from the stored bytes.

    loader's thread                      read stream             compute stream
    start: wait(after) ----------------> chunks are nobody's
    layer 0 ---------------------------> copy, event 0
    layer 1 ---------------------------> copy, event 1           wait(0): attention of layer 0
    ...                                                          wait(1): attention of layer 1
    the last event is done: was all of it the committed bytes? then the lease goes back
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.bounce import BounceRing
from kvstore.gpu_worker.device import CpuDevice, Device, DeviceFailed, Event, Region, Stream, Work
from kvstore.gpu_worker.layout import Bits, Geometry
from kvstore.gpu_worker.positions import Positions
from kvstore.kernels.rotate import Rotation, rotate

if TYPE_CHECKING:
    from kvstore.client import ReadLease

SHARD = 0
IN_FLIGHT = 2
"""Layers that are given to the stream and not copied yet: what is cancelled costs no more than these."""
log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The KV did not arrive whole and in time: nothing of it is used."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to load: its number in the lease, and the tokens [first_token, first_token + token_count) it fills.
    `delta`: how far its keys have moved from the positions that they were computed at. Only modules of Prompt Cache
    move: all else is to be what a model computes from the tokens, and moved KV has seen other tokens before it."""

    index: int
    first_token: int
    token_count: int
    delta: int = 0


Target = Callable[[int, Piece], Any]
"""Where a piece goes in a layer: [2, H_kv, token_count, D], `Bits` in host memory, else a tensor; or a list of such,
whose tokens follow one another, with a number in place of tokens that go nowhere."""
Regions = Callable[[int], Iterable[Region]]
"""What a layer of the load writes, for devices that look at that."""


class Load:
    """One turn's load in flight. `wait` is called by the model's thread, `run` by the loader's."""

    def __init__(
        self,
        lease: ReadLease,
        pieces: Sequence[Piece],
        target: Target,
        geometry: Geometry,
        deadline_s: float,
        positions: Positions | None,
        device: Device,
        stream: Stream,
        after: Sequence[Event],
        regions: Regions,
        bounce: BounceRing | None,
        sample: Sample | None,
    ) -> None:
        tokens = sum(piece.token_count for piece in pieces)
        self.bytes = tokens * geometry.token_bytes * geometry.layers
        self.begun: Future[None] = Future()
        """Done once the first layer is in, or nothing will come."""
        self.ended: Future[None]
        """Done once nothing more is written, whatever came of it."""
        self.layers_in = 0
        """That have been copied, in order."""
        self.started_at = time.monotonic()
        self.seconds = 0.0
        """From the first copy to the last, once it has ended."""
        self.waited_s = 0.0
        """How long the model's thread waited for layers."""
        self._copying_since = 0.0
        self._lease = lease
        self._pieces = pieces
        self._target = target
        self._geometry = geometry
        self._positions = positions
        self._moves: dict[int, tuple[Rotation, ...]] = {}
        self._device = device
        self._stream = stream
        self._after = after
        self._regions = regions
        self._bounce = bounce
        self._sample = sample
        self._source: Region = ("lease", id(lease))
        self._deadline = self.started_at + deadline_s
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._failure = ""

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    @property
    def layer_s(self) -> float:
        """What a layer took so far; 0 if none is in."""
        if not self.layers_in:
            return 0.0
        until = self._copying_since + self.seconds if self.seconds else time.monotonic()
        return (until - self._copying_since) / self.layers_in

    def wait(self, layer: int) -> None:
        """From here on the compute stream has `layer`. Raises LoadFailed if it will not come or did not come before the
        deadline; from then on every layer fails: a load is used whole or not at all. On devices whose streams do not
        hold up the thread that calls, a failure may be told only at the end: see `settle`."""
        begun = time.monotonic()
        with self._changed:
            asked = self._changed.wait_for(
                lambda: self._failure or len(self._events) > layer,
                timeout=None if self._deadline == np.inf else max(self._deadline - begun, 0.0),
            )
        try:
            left = None if self._deadline == np.inf else max(self._deadline - time.monotonic(), 0.0)
            if not self._failure and not (asked and self._device.compute.wait(self._events[layer], left)):
                self.cancel(f"layer {layer} was not in at the deadline")
        except DeviceFailed as error:
            self.cancel(str(error))
        self.waited_s += time.monotonic() - begun
        if self._failure:
            raise LoadFailed(self._failure)

    def settle(self) -> None:
        """The model's thread waits for the end. Raises LoadFailed if not all of it was the committed bytes."""
        self.ended.result()
        try:
            for event in self._events[-1:]:
                event.synchronize()
        except DeviceFailed as error:
            self.cancel(str(error))
        if self._failure:
            raise LoadFailed(self._failure)

    def cancel(self, why: str) -> None:
        """Nobody wants the rest. A copy that runs ends first; the lease is released after it."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def run(self) -> None:
        """Copies all layers in order, then releases the lease, whatever happened."""
        try:
            self._copy_all()
        except DeviceFailed as error:
            self.cancel(str(error))
        except Exception as error:
            # Our bug, or the client's: said loudly here, while the model must not wait for what will not come.
            log.exception("loading failed")
            self.cancel(f"the loader failed: {error!r}")
        finally:
            self._give_back()
            if not self.begun.done():
                self.begun.set_result(None)

    def _copy_all(self) -> None:
        layers = self._geometry.layers
        for event in self._after:
            self._stream.wait(event)
        self._copying_since = time.monotonic()
        for layer in range(layers + IN_FLIGHT - 1):
            if self._failure:
                return
            if layer < layers:
                self._copy(layer)
                event = self._stream.record()
                with self._changed:
                    self._events.append(event)
                    self._changed.notify_all()
            if (done := layer - IN_FLIGHT + 1) >= 0:
                self._events[done].synchronize()
                if self.failed:  # by another thread, meanwhile
                    return
                self.layers_in = done + 1
                if done == 0:
                    self.begun.set_result(None)
        self.seconds = max(time.monotonic() - self._copying_since, 1e-9)
        if self._reads_slots and not self._lease.intact():
            self.cancel("the lease was void when it had been copied")
        elif self._sample is not None and (found := self._differs(self._sample.number)):
            self.cancel(found)
            self._sample.on_wrong(found)

    def _differs(self, number: int) -> str:
        """One slice of the load, back out of the device's memory: whether it is what the store has; "" if it is."""
        layer, piece = number % self._geometry.layers, self._pieces[number % len(self._pieces)]
        target = self._target(layer, piece)
        if piece.delta or isinstance(target, list):
            return ""
        size = self._piece_bytes(piece)
        found, wanted = self._device.buffer(size), np.empty(size, np.uint8)
        region: Region = ("sample", found.ctypes.data)
        self._stream.run(
            lambda: self._device.copy_out(found, target),
            reads=list(self._regions(layer)),
            writes=[region],
        )
        self._events.append(self._stream.record())  # the load has ended when this is over, too
        self._events[-1].synchronize()
        self._device.freeing([region])
        if not self._lease.copy_many([(piece.index, SHARD, self._geometry.offset(layer), wanted)]):
            return ""  # nothing can be said, and what was loaded was intact
        wrong = np.flatnonzero(found != wanted)
        if not len(wrong):
            return ""
        return f"{len(wrong)} of {size} bytes in layer {layer} are not those of the store, the first at {wrong[0]}"

    def _give_back(self) -> None:
        try:
            for event in self._events[-1:]:
                event.synchronize()  # until then the slots are read
            self._device.freeing([self._source] if self._events else [])
        except DeviceFailed as error:
            self.cancel(str(error))
        finally:
            self._lease.release()

    @property
    def _reads_slots(self) -> bool:
        """Whether the device reads the arena by itself: only afterwards it shows that this was the committed bytes."""
        return not self._device.in_host_memory and self._bounce is None

    def _copy(self, layer: int) -> None:
        """Gives the stream the copies of one layer."""
        offset = self._geometry.offset(layer)
        plain: list[tuple[int, int, int, Any]] = []
        others: list[tuple[Piece, list[Any]]] = []
        """What is not copied as it is: it moves, or goes to several places."""
        placed: list[tuple[Piece, list[Any]]] = []
        for piece in self._pieces:
            target = self._target(layer, piece)
            placed.append((piece, target if isinstance(target, list) else [target]))
            if piece.delta or isinstance(target, list):
                others.append(placed[-1])
            else:
                plain.append((piece.index, SHARD, offset, target))
        if self._bounce is not None:
            self._bring_by_bounce(self._bounce, layer, placed)
        elif self._device.in_host_memory:
            self._give(layer, partial(self._bring, layer, plain, others), self._source)
        else:
            slices = [(piece.index, SHARD, offset, self._piece_bytes(piece)) for piece in self._pieces]
            sources = self._lease.unsafe_views(slices)
            if sources is None:
                self.cancel(f"the lease was void at layer {layer}")
            else:
                self._give(layer, partial(self._enqueue, layer, placed, sources), self._source)

    def _give(self, layer: int, work: Work, source: Region) -> None:
        self._stream.run(work, reads=[source], writes=list(self._regions(layer)))

    def _piece_bytes(self, piece: Piece) -> int:
        return piece.token_count * self._geometry.token_bytes

    def _bring(
        self,
        layer: int,
        plain: Sequence[tuple[int, int, int, Bits]],
        others: Sequence[tuple[Piece, Sequence[Bits | int]]],
    ) -> None:
        """In every call the lease compares the slots' generations before the first byte and after the last: what is
        reported as loaded here was the committed bytes, whatever becomes of the slots later."""
        if self._failure:
            return
        try:
            whole = not plain or self._lease.copy_many(plain)
            if whole and others:
                offset = self._geometry.offset(layer)
                whole = self._lease.read_in_place(
                    [(piece.index, SHARD, offset, self._piece_bytes(piece)) for piece, _ in others],
                    partial(self._scatter_all, layer, others),
                )
        except Exception as error:
            log.exception("loading failed")
            self.cancel(f"the loader failed: {error!r}")
            return
        if not whole:
            self.cancel(f"the lease was void at layer {layer}")

    def _scatter_all(
        self,
        layer: int,
        others: Sequence[tuple[Piece, Sequence[Bits | int]]],
        stored: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        for (piece, targets), source in zip(others, stored, strict=True):
            shape = (2, self._geometry.heads, piece.token_count, self._geometry.head_dim)
            bits = source.view(f"i{self._geometry.dtype.itemsize}").reshape(shape)
            self._scatter(layer, piece, bits, targets)

    def _scatter(self, layer: int, piece: Piece, stored: Bits, targets: Sequence[Bits | int]) -> None:
        begin = 0
        for target in targets:
            here = slice(begin, begin + (target if isinstance(target, int) else target.shape[2]))
            begin = here.stop
            if isinstance(target, int):
                continue
            if not piece.delta:
                target[...] = stored[:, :, here]
                continue
            # A copy, since torch takes no memory that cannot be written
            keys, out = (
                torch.from_numpy(each).view(self._geometry.dtype)
                for each in (stored[0, :, here].copy(), target[0])
            )
            rotate(keys, self._rotation(layer, piece), out=out)
            target[1] = stored[1, :, here]

    def _rotation(self, layer: int, piece: Piece, where: torch.device | None = None) -> Rotation:
        """`where`: the keys are; None: in host memory."""
        assert self._positions is not None
        if piece.delta not in self._moves:
            self._moves[piece.delta] = self._positions.rotations(piece.delta, device=where)
        return self._moves[piece.delta][layer]

    # ------------------------------------------------------------------- memory that the client's copies do not reach

    def _enqueue(
        self,
        layer: int,
        placed: Sequence[tuple[Piece, Sequence[torch.Tensor | int]]],
        sources: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        """Copies out of these bytes. What is read of the arena itself is not used before `ReadLease.intact` has said
        that it was the committed bytes, at the end."""
        if self._failure:
            return
        plain: list[tuple[torch.Tensor, npt.NDArray[np.uint8]]] = []
        for (piece, targets), source in zip(placed, sources, strict=True):
            first = targets[0]
            if not piece.delta and len(targets) == 1 and not isinstance(first, int):
                plain.append((first, source))
                continue
            like = next((target for target in targets if not isinstance(target, int)), None)
            if like is None:
                continue
            shape = (2, self._geometry.heads, piece.token_count, self._geometry.head_dim)
            stored = like.new_empty(shape)
            self._device.copy_in(stored, source)
            begin = 0
            for target in targets:
                if isinstance(target, int):
                    begin += target
                    continue
                here = stored[:, :, begin : begin + target.shape[2]]
                begin += target.shape[2]
                if piece.delta:
                    rotate(here[0].contiguous(), self._rotation(layer, piece, like.device), out=target[0])
                    target[1].copy_(here[1])
                else:
                    target.copy_(here)
        self._device.copy_all_in(plain)

    def _bring_by_bounce(
        self, ring: BounceRing, layer: int, placed: Sequence[tuple[Piece, Sequence[torch.Tensor | int]]]
    ) -> None:
        """Bytes are copied by this thread into buffers that the device copies from. The lease compares generations
        before and after the first copy, so that what is in a buffer was the committed bytes."""
        offset = self._geometry.offset(layer)
        for batch in ring.batches([self._piece_bytes(piece) for piece in self._pieces]):
            some = [placed[number] for number in batch]
            buffer = ring.take()
            sources, at = [], 0
            for piece, _ in some:
                sources.append(buffer.memory[at : at + self._piece_bytes(piece)])
                at += self._piece_bytes(piece)
            copies = [
                (piece.index, SHARD, offset, source) for (piece, _), source in zip(some, sources, strict=True)
            ]
            if not self._lease.copy_many(copies):
                self.cancel(f"the lease was void at layer {layer}")
                return
            self._give(layer, partial(self._enqueue, layer, some, sources), buffer.region)
            buffer.sent = self._stream.record()


@dataclass(frozen=True, slots=True)
class Sample:
    """This load is compared with the store when it has been copied. `number` says what of it; `on_wrong` is called with
    what differs, on the loader's thread."""

    number: int
    on_wrong: Callable[[str], None]


class Loader:
    """One thread that gives loads to one stream, in the order in which they were started."""

    def __init__(
        self,
        geometry: Geometry,
        positions: Positions | None = None,
        *,
        device: Device | None = None,
        bounce: bool = False,
        sample_every: int = 0,
        on_wrong: Callable[[str], None] = lambda found: None,
    ) -> None:
        """`positions`: of a model whose keys can be moved. `bounce`: the device cannot read the arena, and is given its
        bytes through buffers of its own. Of so many loads (`sample_every`; 0: none) into memory that is not the host's
        one is compared with the store, and `on_wrong` told of what differs."""
        self._geometry = geometry
        self._positions = positions
        self._own = device is None
        self._device = device or CpuDevice()
        self._stream = self._device.stream("kv-read")
        self._sample_every = 0 if self._device.in_host_memory else sample_every
        self._on_wrong = on_wrong
        self._started = 0
        self._bounce = BounceRing(self._device, geometry.slice_bytes) if bounce else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-loader")

    def start(
        self,
        lease: ReadLease,
        pieces: Sequence[Piece],
        target: Target,
        *,
        deadline_s: float,
        after: Sequence[Event] = (),
        regions: Regions = lambda layer: (),
    ) -> Load:
        """Takes over `lease`. What `target` names is not to be read before `Load.wait` says so; it is written once
        `after` are done. Raises Unsupported, and takes over nothing, if keys are to be moved and there are no
        `positions`."""
        if self._positions is None and (moved := [piece.delta for piece in pieces if piece.delta]):
            raise Unsupported(
                "this loader moves no keys",
                field="pieces.delta",
                value=moved[0],
                remedy="make it with positions",
            )
        load = Load(
            lease,
            pieces,
            target,
            self._geometry,
            deadline_s,
            self._positions,
            self._device,
            self._stream,
            after,
            regions,
            self._bounce,
            self._sampled(),
        )
        load.ended = self._thread.submit(load.run)
        return load

    def _sampled(self) -> Sample | None:
        self._started += 1
        if not self._sample_every or self._started % self._sample_every:
            return None
        return Sample(secrets.randbits(31), self._on_wrong)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._own:
            self._device.close()
