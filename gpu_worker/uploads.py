"""Small arrays that the host works out for each step, on their way to the device: plans of attention, inputs of graphs.

A copy from ordinary host memory holds up whoever asks for it. So the arrays of a step are put one behind the other into
registered memory, and the compute stream copies them from there, in order with what it computes. A buffer is written
again once the device has read it: with several of them the host is steps ahead before it has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu_worker.device import Device, Event, Region

BUFFERS = 4
BUFFER_BYTES = 64 << 10
ALIGNED = 16
"""Each array begins at a multiple of so many bytes."""


@dataclass(slots=True)
class _Buffer:
    memory: npt.NDArray[np.uint8]
    region: Region
    read: Event | None = field(default=None)
    """After the last copy out of it."""


class Uploads:
    """Of the model's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        memories = [device.buffer(BUFFER_BYTES) for _ in range(BUFFERS)]
        self._buffers = [_Buffer(memory, ("upload", memory.ctypes.data)) for memory in memories]
        self._taken = 0

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each first tensor, of the device and contiguous, becomes what the second, of the host, is now; before what
        the compute stream is given next. Raises DeviceFailed."""
        if not pairs:
            return
        places, size = [], 0
        for _, here in pairs:
            places.append(size)
            size += -(-here.nbytes // ALIGNED) * ALIGNED
        buffer = self._take(size)
        memory = buffer.memory
        for place, (there, here) in zip(places, pairs, strict=True):
            assert there.is_contiguous() and there.shape == here.shape and there.dtype == here.dtype, (
                there.shape,
                here.shape,
                there.dtype,
            )
            memory[place : place + here.nbytes] = here.contiguous().view(-1).view(torch.uint8).numpy()

        def copy() -> None:
            for place, (there, here) in zip(places, pairs, strict=True):
                self._device.copy_in(there, memory[place : place + here.nbytes])

        self._device.compute.run(copy, reads=[buffer.region])
        buffer.read = self._device.compute.record()

    def _take(self, size: int) -> _Buffer:
        """The next one, which the device reads no more, with room for so many bytes."""
        buffer = self._buffers[self._taken % BUFFERS]
        self._taken += 1
        if buffer.read is not None:
            buffer.read.synchronize()
            self._device.freeing([buffer.region])
            buffer.read = None
        if len(buffer.memory) < size:
            buffer.memory = self._device.buffer(1 << (size - 1).bit_length())
        return buffer
