"""The device interface on torch.cuda. A stream's work is called at once, with the stream as torch's current one: what
it enqueues there, copies with `non_blocking=True` and kernels, runs in the order of the stream.

Copies from and to shared memory are asynchronous only if it is registered (cudaHostRegister); a registration that fails
is fatal for the path, since copies from other memory hold up whoever asks for them. Copies of many slices are one call
where the driver has it (`BatchedCopies`), else those of small slices are one kernel (`small_copies.py`): to ask for a
slice takes as long as to copy 250 KB over PCIe.

While a graph is captured, nobody may wait for the device as a whole, and calls that allocate or register may wait for
it unseen: those, from whatever thread, and captures exclude one another.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress, pairwise
from operator import not_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu_worker.device import CannotRegister, DeviceFailed, Event, Graph, Region, Work, view
from kvstore.gpu_worker.numa import node_of, prefer, preferring
from kvstore.gpu_worker.small_copies import (
    SLICE_BYTES_MAX,
    SLICES_MIN,
    TABLES_BYTES,
    SmallCopies,
    uses_host_addresses,
)

Copy = tuple[int, int, int]
"""To, from, bytes."""
READ_ONLY = 8
"""cudaHostRegisterReadOnly: for mappings that the daemon has sealed, where the device can
(cudaDevAttrHostRegisterReadOnlySupported; most cannot)."""


_READ_ONLY_SUPPORTED = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""


log = logging.getLogger(__name__)


@contextmanager
def _told() -> Iterator[None]:
    """What torch says of a lost context: that is sticky, and whatever is asked later says it again."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFailed(str(error)) from error


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        with _told():
            return bool(self.event.query())

    def synchronize(self) -> None:
        with _told():
            self.event.synchronize()


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
        with _told():
            # Threads that wait for it sleep: they would keep a core each, and the model's thread needs one
            event = torch.cuda.Event(blocking=True)
            event.record(self._this)
        return CudaEvent(event)

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        assert isinstance(event, CudaEvent), "an event of another device"
        with _told():
            self._this.wait_event(event.event)
        return True


class CudaDevice:
    name = "cuda"
    in_host_memory = False
    captures = True
    tracks = False

    def __init__(self, device: torch.device) -> None:
        """`device`: without a number, the one that is torch's current one now. Threads have current ones of their
        own."""
        number = torch.cuda.current_device() if device.index is None else device.index
        self._number = number
        self._device = device = torch.device("cuda", number)
        self.compute = CudaStream(device)
        self._streams: list[torch.cuda.Stream] = []
        self._capturing: torch.cuda.Stream | None = None
        self._shared: Any = None
        """Memory for what graphs compute in between: one replay follows another."""
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """Those that somebody has still."""
        self._alone = threading.Lock()
        """Held while a graph is captured, and by what may not go on meanwhile."""
        self._threads = threading.local()
        self._runtime: Any = torch.cuda.cudart()
        self.registers_read_only = _registers_read_only(number)
        card = torch.cuda.get_device_properties(device)
        self.node = node_of(_pci_address(number))
        self.identity = f"{card.name} {getattr(card, 'uuid', number)} driver {_driver()}"
        self._batched = BatchedCopies.of_driver()
        if self._batched is not None and not self._copies_rightly(self._batched):
            log.warning("copies in batches are not what they should be on %s", self.identity)
            self._batched = None
        self._small = None if self._batched is not None else self._proven_small_copies()

    def stream(self, name: str) -> CudaStream:
        self._streams.append(torch.cuda.Stream(self._device))
        return CudaStream(self._device, self._streams[-1])

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        with self._alone, torch.cuda.device(self._device), _told(), preferring(self.node):
            made: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8, pin_memory=True).numpy()
        return made

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        flags = 0 if memory.flags.writeable else READ_ONLY
        prefer(memory.ctypes.data, memory.nbytes, self.node)  # registering faults it in
        with self._alone, torch.cuda.device(self._device):
            code = int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, flags))
            if not code:
                return
            _forget_last_error()
        raise CannotRegister(f"{memory.nbytes} bytes of host memory: CUDA error {code}")

    def unregister(self, address: int) -> None:
        with self._alone, torch.cuda.device(self._device), _told():
            torch.cuda.synchronize()  # what is in flight reads it
            if code := int(self._runtime.cudaHostUnregister(address)):
                _forget_last_error()
                raise DeviceFailed(f"memory at {address:#x} stays registered: CUDA error {code}")

    def copy_in(self, target: torch.Tensor, source: npt.NDArray[np.uint8]) -> None:
        target.copy_(view(source, target.dtype, target.shape), non_blocking=True)

    def copy_out(self, target: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
        view(target, source.dtype, source.shape).copy_(source, non_blocking=True)

    def copy_all_in(self, pairs: Sequence[tuple[torch.Tensor, npt.NDArray[np.uint8]]]) -> None:
        together = self._copy_together(
            [
                (to.data_ptr(), source.ctypes.data, to.nbytes) if to.is_contiguous() else None
                for to, source in pairs
            ]
        )
        for target, source in compress(pairs, map(not_, together)):
            self.copy_in(target, source)

    def copy_all_out(self, pairs: Sequence[tuple[npt.NDArray[np.uint8], torch.Tensor]]) -> None:
        together = self._copy_together(
            [
                (to.ctypes.data, source.data_ptr(), source.nbytes) if source.is_contiguous() else None
                for to, source in pairs
            ]
        )
        for target, source in compress(pairs, map(not_, together)):
            self.copy_out(target, source)

    def _copy_together(self, copies: Sequence[Copy | None]) -> list[bool]:
        """Which of (to, from, bytes) are asked for now, all at once, on torch's current stream; the others are left to
        the caller: what is no piece of memory (None), and what is not worth it or not to be had."""
        current = torch.cuda.current_stream(self._device)
        stream = current.cuda_stream
        if stream <= NO_STREAM_MAX:
            return [False] * len(copies)
        if self._batched is None:
            return self._copy_small(copies)
        chosen = [copy for copy in copies if copy is not None]
        if len(chosen) < BATCH_MIN:
            return [False] * len(copies)
        if not getattr(self._threads, "known", False):
            current.query()  # of the runtime: the driver itself knows no context of a thread that is new
            self._threads.known = True
        if code := self._batched(chosen, stream):
            # What of it was asked for is asked for once more, and writes the same
            log.warning("copies in batches: CUDA error %d; not in batches from now on", code)
            self._batched, self._small = None, self._proven_small_copies()
            return [False] * len(copies)
        return [copy is not None for copy in copies]

    def _copy_small(self, copies: Sequence[Copy | None]) -> list[bool]:
        small = [copy is not None and copy[2] <= SLICE_BYTES_MAX for copy in copies]
        if self._small is None or sum(small) < SLICES_MIN:
            return [False] * len(copies)
        try:
            self._small([copy for copy in compress(copies, small) if copy is not None])
        except RuntimeError as error:
            log.warning("copies by a kernel: %s; one by one from now on", error)
            self._small = None
            return [False] * len(copies)
        return small

    def _proven_small_copies(self) -> SmallCopies | None:
        if not uses_host_addresses(self._number):
            return None
        made = SmallCopies(self.buffer(TABLES_BYTES))
        if self._copies_rightly(lambda copies, stream: made(copies)):
            return made
        log.warning("copies by a kernel are not what they should be on %s: one by one", self.identity)
        return None

    def _copies_rightly(self, copy: Callable[[Sequence[Copy], int], int | None]) -> bool:
        """Of any sizes, and of multiples of 16 bytes alone."""
        try:
            return all(
                self._copies_there_and_back(copy, sizes) for sizes in ((1, 4096, 70_000), (16, 4096, 70_000))
            )
        except Exception as error:  # a driver's, or a compiler's
            log.warning("%s", error)
            return False

    def _copies_there_and_back(
        self, copy: Callable[[Sequence[Copy], int], int | None], sizes: Sequence[int]
    ) -> bool:
        """Out of memory that is registered, to the card, and into memory that was allocated for it."""
        here = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
        here[:] = np.frombuffer(os.urandom(len(here)), np.uint8)
        parts, back = np.split(here, np.cumsum(sizes[:-1])), [self.buffer(size) for size in sizes]
        self.register(here)
        try:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                there = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
                places = [
                    [each.ctypes.data for each in parts],
                    [each.data_ptr() for each in there],
                    [each.ctypes.data for each in back],
                ]
                for source, to in pairwise(places):
                    if copy(list(zip(to, source, sizes, strict=True)), stream.cuda_stream):
                        return False
            stream.synchronize()
        finally:
            self.unregister(here.ctypes.data)
        return all((one == other).all() for one, other in zip(parts, back, strict=True))

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        # "thread_local": other threads go on copying and allocating, which by default would end the capture
        with self._alone, torch.cuda.device(self._device):
            if self._capturing is None:
                self._capturing = torch.cuda.Stream(self._device)
            if self._shared is None or not self._graphs:  # torch takes no handle whose graphs are all gone
                self._shared = torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream(self._device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._shared, stream=self._capturing, capture_error_mode="thread_local"
                ):
                    out = work()
            except BaseException:
                # Torch leaves its stream the thread's current one, and the memory as if the capture went on
                torch.cuda.set_stream(before)
                self._shared = None
                raise
            self._graphs.add(graph)
        return graph, out

    def reading(self, regions: Iterable[Region]) -> None: ...

    def freeing(self, regions: Iterable[Region]) -> None: ...

    def close(self) -> None:
        for stream in self._streams:
            with suppress(RuntimeError):  # the context is lost: it ended
                stream.synchronize()
        self._streams.clear()


BATCH_MIN = 2
NO_STREAM_MAX = 2
"""Handles up to it are the default streams (0, and cudaStreamLegacy, cudaStreamPerThread), which take no batches."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM."""
BESIDE_COMPUTE = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class BatchedCopies:
    """cuMemcpyBatchAsync, of drivers since CUDA 12.8.

    In the driver's library that name is the first version for good, with `failIdx`; what headers since CUDA 13.0 call
    so is `cuMemcpyBatchAsync_v2`, without it. The runtime's library has one of the two under one name.
    """

    def __init__(self, function: Any) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        function.restype = ctypes.c_int
        self._function = function

    @classmethod
    def of_driver(cls, library: str = "libcuda.so.1") -> BatchedCopies | None:
        """None where the driver has no such call."""
        try:
            return cls(ctypes.CDLL(library).cuMemcpyBatchAsync)
        except (OSError, AttributeError):
            return None

    def __call__(self, copies: Sequence[Copy], stream: int) -> int:
        """(to, from, bytes) in any order among themselves, in order with what else the stream does. CUDA's error."""
        to, source, sizes = (np.array(column, np.uint64) for column in zip(*copies, strict=True))
        attributes = _Attributes(IN_STREAM_ORDER, _Location(), _Location(), BESIDE_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        return int(
            self._function(
                *(to.ctypes.data, source.ctypes.data, sizes.ctypes.data, len(copies)),
                *(ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream),
            )
        )


def _registers_read_only(number: int) -> bool:
    """False also where the driver cannot be asked: then memory that is read-only goes through a bounce buffer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = ctypes.c_int(0)
        code = driver.cuDeviceGetAttribute(ctypes.byref(found), _READ_ONLY_SUPPORTED, number)
    except (OSError, AttributeError):
        return False
    return code == 0 and found.value == 1


def _pci_address(number: int) -> str:
    """As sysfs names it but for capitals; "" where the driver cannot be asked."""
    try:
        found = ctypes.create_string_buffer(32)
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(found, len(found), number)
    except (OSError, AttributeError):
        return ""
    return "" if code else found.value.decode()


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return f"unknown, CUDA {torch.version.cuda}"


def _forget_last_error() -> None:
    """The runtime keeps the error of a call that failed, for each thread, and the next kernel would be blamed for it.
    The library is the very one that torch calls."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(_loaded("libcudart.so")).cudaGetLastError()


def _loaded(name: str) -> str | None:
    """The path of a library that this process has loaded; None, which stands for the process, if there is none."""
    with open("/proc/self/maps") as file:
        for line in file:
            path = line.rstrip().partition("/")
            if name in path[2].rpartition("/")[2]:
                return path[1] + path[2]
    return None
