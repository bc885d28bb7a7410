"""The device interface on torch.cuda. A stream's work is called at once, with the stream as torch's current one: what
it enqueues there, copies with `non_blocking=True` and kernels, runs in the order of the stream.

Copies from and to shared memory are asynchronous only if it is registered (cudaHostRegister); a registration that fails
is fatal for the path, since copies from other memory hold up whoever asks for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu_worker.device import CannotRegister, DeviceFailed, Event, Graph, Region, Work, view

READ_ONLY = 8
"""cudaHostRegisterReadOnly: for mappings that the daemon has sealed, where the device can
(cudaDevAttrHostRegisterReadOnlySupported; most cannot)."""


_READ_ONLY_SUPPORTED = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""


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
    captures = True
    tracks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaStream(device)
        self._streams: list[torch.cuda.Stream] = []
        self._runtime: Any = torch.cuda.cudart()
        self.registers_read_only = _registers_read_only(device)
        card = torch.cuda.get_device_properties(device)
        self.identity = f"{card.name} {getattr(card, 'uuid', device.index or 0)} driver {_driver()}"

    def stream(self, name: str) -> CudaStream:
        self._streams.append(torch.cuda.Stream(self._device))
        return CudaStream(self._device, self._streams[-1])

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        made: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
        return made

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        flags = 0 if memory.flags.writeable else READ_ONLY
        with torch.cuda.device(self._device):
            code = int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, flags))
            if not code:
                return
            _forget_last_error()
        raise CannotRegister(f"{memory.nbytes} bytes of host memory: CUDA error {code}")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # what is in flight reads it
            if code := int(self._runtime.cudaHostUnregister(address)):
                _forget_last_error()
                raise DeviceFailed(f"memory at {address:#x} stays registered: CUDA error {code}")

    def copy_in(self, target: torch.Tensor, source: npt.NDArray[np.uint8]) -> None:
        target.copy_(view(source, target.dtype, target.shape), non_blocking=True)

    def copy_out(self, target: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
        view(target, source.dtype, source.shape).copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = work()
        return graph, out

    def reading(self, regions: Iterable[Region]) -> None: ...

    def freeing(self, regions: Iterable[Region]) -> None: ...

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()


def _registers_read_only(device: torch.device) -> bool:
    """False also where the driver cannot be asked: then memory that is read-only goes through a bounce buffer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = ctypes.c_int(0)
        code = driver.cuDeviceGetAttribute(ctypes.byref(found), _READ_ONLY_SUPPORTED, device.index or 0)
    except (OSError, AttributeError):
        return False
    return code == 0 and found.value == 1


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return f"unknown, CUDA {torch.version.cuda}"


def _forget_last_error() -> None:
    """The runtime keeps the error of a call that failed, and the next kernel would be blamed for it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).cudaGetLastError()
