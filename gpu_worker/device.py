"""The device that a worker computes on: streams, events, registered memory. Loader, saver and pool know no other one.

    stream.run(work)       after all that was given to the stream before; returns at once
    event = stream.record()      done once all that was given to the stream so far is done
    other.wait(event)      what is given to `other` from now on runs after it
    event.synchronize()    the calling thread waits

Three makes of it: `CpuDevice` (a thread for each stream; the model runs on the thread that calls it), `CudaDevice`
(torch.cuda), and one of the tests that is less forgiving than a GPU (tests/unit/gpu_worker/emulated.py). What streams
touch is ordered by events alone; these are all the places, and a test fails without any one of them:

    who waits          for what                                     because
    read stream        the compute stream                           chunks were read and written before they were free
    read stream        copies out of the same chunks                they read what the load overwrites
    compute stream     the layer that was loaded                    attention reads it
    compute stream     copies out of chunks that it overwrites      they read what it overwrites
    write stream       the compute stream                           attention writes what is copied out
    saver's thread     the copy into its buffer                     it reads the buffer
    loader's thread    the last copy of a load                      then the lease goes back, and slots are used again
    loader's thread    the copy out of a bounce buffer              it fills the buffer anew
    model's thread     the last copy of a load                      chunks of one that was given up are used again
    model's thread     the copy of a plan out of its buffer         it writes the next plan there
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import Unsupported

Work = Callable[[], None]
Region = Hashable
"""A name for memory that is read and written as a whole: what the tests' device tells races by."""
log = logging.getLogger(__name__)


class CannotRegister(Exception):
    """Host memory cannot be made known to the device: copies from it would hold up whoever asks for them."""


class DeviceFailed(Exception):
    """Work on a stream failed. As on a GPU, all that is asked of the device from then on fails: what ran is unknown."""


class Event(Protocol):
    """A point in a stream. Each is recorded once."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> None:
        """The calling thread waits for it. Raises DeviceFailed."""


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        """`reads`, `writes`: which memory."""

    def record(self) -> Event: ...

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        """False: a stream that runs on the calling thread, which waits itself, waited `timeout_s` in vain."""


class Graph(Protocol):
    """Work of the compute stream that was captured: memory addresses and sizes are baked in."""

    def replay(self) -> None:
        """Once more, behind what was given to the compute stream before."""


class Device(Protocol):
    """`compute` is the stream that the model runs on. `in_host_memory`: the client's copies reach its memory.
    `registers_read_only`: also memory that this process cannot write. `identity`: which card it is, with which
    driver."""

    name: str
    identity: str
    in_host_memory: bool
    registers_read_only: bool
    node: int | None
    """The NUMA node whose memory is near it; None where there is nothing to choose."""
    captures: bool
    """Whether `capture` is worth calling."""
    tracks: bool
    """Whether it looks at `reads` and `writes`: else nobody needs to tell."""

    @property
    def compute(self) -> Stream: ...

    def stream(self, name: str) -> Stream:
        """A new one. Streams have no order among one another but what events give them."""

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        """Bytes of host memory that streams copy to and from without holding up whoever asks for it."""

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """These hold KV from now on, at these addresses for as long as the device lives."""

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Host memory that others made: streams copy from it, and to it if it is writable, as with `buffer`. Keeps no
        view of it. Raises CannotRegister: without it the path is not to be used."""

    def unregister(self, address: int) -> None:
        """Memory that begins there, before it is unmapped. Waits for what is in flight."""

    def copy_in(self, target: torch.Tensor, source: npt.NDArray[np.uint8]) -> None:
        """Of work on a stream: bytes of host memory become `target`."""

    def copy_out(self, target: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
        """Of work on a stream: `target` becomes the bytes of `source`."""

    def copy_all_in(self, pairs: Sequence[tuple[torch.Tensor, npt.NDArray[np.uint8]]]) -> None:
        """`copy_in` of all (target, source), in any order."""

    def copy_all_out(self, pairs: Sequence[tuple[npt.NDArray[np.uint8], torch.Tensor]]) -> None:
        """`copy_out` of all (target, source), in any order."""

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """What `work` gives to the compute stream, as a graph, and where each replay writes what it returns. Nothing of
        it has run by then."""

    def reading(self, regions: Iterable[Region]) -> None:
        """The calling thread reads these."""

    def freeing(self, regions: Iterable[Region]) -> None:
        """The calling thread gives these back to whoever uses them next."""

    def close(self) -> None:
        """Streams end what they were given."""


def device_of(model_device: torch.device) -> Device:
    """Raises Unsupported for a device that KV is not moved from and to. A GPU proves itself before it is trusted: see
    `self_check.py`."""
    if model_device.type == "cpu":
        return CpuDevice()
    if model_device.type == "cuda" and torch.cuda.is_available():
        from kvstore.gpu_worker.cuda import CudaDevice

        return CudaDevice(model_device)
    raise Unsupported(
        "KV is stored from memory of a CPU or of a CUDA device",
        field="model.device",
        value=model_device,
        remedy="have the model on one of these",
    )


def device_for_steps(model_device: torch.device) -> Device | None:
    """On which steps are captured, and to which their plans are copied; None for a CPU, which gains nothing by that."""
    return None if model_device.type == "cpu" else device_of(model_device)


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ThreadEvent:
    """Of a stream that is a thread."""

    def __init__(self, failure: Callable[[], Exception | None]) -> None:
        self._failure = failure
        self._done = threading.Event()

    def query(self) -> bool:
        return self._done.is_set()

    def reached(self) -> None:
        self._done.set()

    def synchronize(self) -> None:
        self.reached_within(None)

    def reached_within(self, timeout_s: float | None) -> bool:
        reached = self._done.wait(timeout_s)
        if (failure := self._failure()) is not None:
            raise DeviceFailed(f"work on a stream failed: {failure!r}") from failure
        return reached


class ThreadStream:
    """Runs what it is given on a thread of its own. After a failure, of it or of any other stream of the device, it
    runs nothing more; its events are reached nevertheless, so that nobody hangs, and say that."""

    def __init__(self, name: str, device: ThreadDevice) -> None:
        self.name = name
        self._device = device
        self._given: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self._given.qsize()} waiting)"

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        self._given.put(self._unless_failed(work))

    def record(self) -> Event:
        event = ThreadEvent(lambda: self._device.failure)
        self._given.put(event.reached)
        return event

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        if not event.query():
            self._given.put(self._unless_failed(event.synchronize))
        return True

    def end(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _unless_failed(self, work: Work) -> Work:
        def run() -> None:
            if self._device.failure is not None:
                return
            try:
                self._before()
                work()
            except DeviceFailed:
                pass
            except Exception as error:
                log.exception("work on stream %s failed", self.name)
                self._device.failure = self._device.failure or error

        return run

    def _before(self) -> None:
        """Of each work."""

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            work()
            del work  # and with it the tensors that it holds, while the thread sleeps


class HereStream:
    """Runs what it is given at once, on the thread that calls: the model's, on a CPU."""

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        work()

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        if isinstance(event, ThreadEvent):
            return event.reached_within(timeout_s)
        event.synchronize()
        return True


class ThreadDevice:
    """What the makes have in common whose streams are threads."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """The first of any stream."""
        self._streams: list[ThreadStream] = []

    def stream(self, name: str) -> ThreadStream:
        self._streams.append(ThreadStream(name, self))
        return self._streams[-1]

    def copy_in(self, target: torch.Tensor, source: npt.NDArray[np.uint8]) -> None:
        target.copy_(view(source, target.dtype, target.shape))

    def copy_out(self, target: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
        view(target, source.dtype, source.shape).copy_(source)

    def copy_all_in(self, pairs: Sequence[tuple[torch.Tensor, npt.NDArray[np.uint8]]]) -> None:
        for target, source in pairs:
            self.copy_in(target, source)

    def copy_all_out(self, pairs: Sequence[tuple[npt.NDArray[np.uint8], torch.Tensor]]) -> None:
        for target, source in pairs:
            self.copy_out(target, source)

    def close(self) -> None:
        for stream in self._streams:
            stream.end()
        self._streams.clear()


class CpuDevice(ThreadDevice):
    """The host's own memory and threads."""

    name = "cpu"
    identity = "cpu"
    in_host_memory = True
    registers_read_only = True
    node: int | None = None
    captures = False
    tracks = False

    def __init__(self) -> None:
        super().__init__()
        self.compute: Stream = HereStream()

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty(count, np.uint8)

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def unregister(self, address: int) -> None: ...

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        raise NotImplementedError("a CPU launches nothing that could be captured")

    def reading(self, regions: Iterable[Region]) -> None: ...

    def freeing(self, regions: Iterable[Region]) -> None: ...


def view(memory: npt.NDArray[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Host memory as a tensor, without a copy. What is read-only is so no more: nobody may write it."""
    if memory.flags.writeable:
        return torch.frombuffer(memory.data, dtype=dtype).view(*shape)
    # torch takes such memory, and says each time that it would rather not
    same = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    same.owner = memory  # type: ignore[attr-defined]  # what is mapped stays so
    return torch.frombuffer(same, dtype=dtype).view(*shape)
