"""The device interface on torch.cuda. A stream's work is called at once, with the stream as torch's current one: what
it enqueues there, copies with `non_blocking=True` and kernels, runs in the order of the stream.

Copies from and to shared memory are asynchronous only if it is registered (cudaHostRegister); a registration that fails
is fatal for the path, since copies from other memory hold up whoever asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu_worker.device import DeviceFailed, Event, Region, Work

READ_ONLY = 8
"""cudaHostRegisterReadOnly: for mappings that the daemon has sealed, where the device can
(cudaDevAttrHostRegisterReadOnlySupported; most cannot)."""


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:  # sticky: the context is lost
            raise DeviceFailed(str(error)) from error


class CudaStream:
    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: None: whatever torch's current one is at the time, which the model runs on."""
        self._device = device
        self._stream = stream

    @property
    def _this(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        with torch.cuda.stream(self._this):
            work()

    def record(self) -> Event:
        return CudaEvent(self._this.record_event())

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        assert isinstance(event, CudaEvent), "an event of another device"
        self._this.wait_event(event.event)
        return True


class CudaDevice:
    name = "cuda"
    in_host_memory = False
    tracks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaStream(device)
        self._streams: list[torch.cuda.Stream] = []
        self._runtime: Any = torch.cuda.cudart()

    def stream(self, name: str) -> CudaStream:
        self._streams.append(torch.cuda.Stream(self._device))
        return CudaStream(self._device, self._streams[-1])

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        made: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
        return made

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        flags = 0 if memory.flags.writeable else READ_ONLY
        self._check(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, flags), memory)

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        torch.cuda.synchronize(self._device)  # what is in flight reads it
        self._check(self._runtime.cudaHostUnregister(memory.ctypes.data), memory)

    def reading(self, regions: Iterable[Region]) -> None: ...

    def freeing(self, regions: Iterable[Region]) -> None: ...

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()

    def _check(self, code: Any, memory: npt.NDArray[np.uint8]) -> None:
        if int(code):
            raise DeviceFailed(
                f"{memory.nbytes} bytes of host memory cannot be registered: CUDA error {int(code)}"
            )
