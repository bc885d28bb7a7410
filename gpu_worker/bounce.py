"""The bounce ring: host memory that a device copies from where it cannot copy from the arena itself.

Under protection `sealed` a worker can only read the arena, and most cards register no memory that is read-only. So the
loader's thread copies slots into these buffers, and the device copies on from there, beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.gpu_worker.device import Device, Event, Region

BUFFERS = 4
BUFFER_BYTES = 4 << 20
"""Of each, or as much as the slice of one chunk has: a copy of so much takes far longer than to ask for it."""


@dataclass(slots=True, eq=False)
class Bounce:
    memory: npt.NDArray[np.uint8]
    region: Region
    sent: Event | None = None
    """After the last copy out of it."""


class BounceRing:
    """Of the loader's thread."""

    def __init__(self, device: Device, slice_bytes: int) -> None:
        """`slice_bytes`: of the largest piece."""
        self._device = device
        self._bytes = max(BUFFER_BYTES, slice_bytes)
        memories = [device.buffer(self._bytes) for _ in range(BUFFERS)]
        self._buffers = [Bounce(memory, ("bounce", memory.ctypes.data)) for memory in memories]
        self._taken = 0

    def batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of pieces of these sizes that go into one buffer, in their order."""
        batch: list[int] = []
        room = self._bytes
        for number, size in enumerate(sizes):
            if size > room and batch:
                yield batch
                batch, room = [], self._bytes
            batch.append(number)
            room -= size
        if batch:
            yield batch

    def take(self) -> Bounce:
        """The next one, which nobody reads any more. Raises DeviceFailed."""
        buffer = self._buffers[self._taken % BUFFERS]
        self._taken += 1
        if buffer.sent is not None:
            buffer.sent.synchronize()
            buffer.sent = None
        self._device.freeing([buffer.region])  # also where nobody said that it was copied from
        return buffer
