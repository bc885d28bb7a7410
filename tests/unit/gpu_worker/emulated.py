"""A device for tests that is less forgiving than a GPU.

Its streams are threads that run late on purpose, and it tells races by what is ordered, not by what happens to be fast
enough: each stream, and each thread of the host, has a vector clock; an event carries the clock of the stream that
recorded it; a wait joins it. Whoever reads memory must come after who wrote it last, whoever writes also after all who
read it since. A race is an error of the device, which is sticky as on a GPU: all that is asked of it later fails.

What it finds beyond races: copies from or to memory that is not registered (`pageable`), KV at other addresses than
before (graphs that were captured have them), memory given back while a copy is in flight, KV that nobody wrote (it is
NaN). The client's copies do not reach its memory, and it registers what it is told to: `registers_read_only`,
`registered_max` say what it cannot.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvstore.gpu_worker import attention
from kvstore.gpu_worker.device import (
    CannotRegister,
    Device,
    DeviceFailed,
    Event,
    Region,
    ThreadDevice,
    ThreadEvent,
    ThreadStream,
    Work,
    view,
)
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import COUNT, PARTIALS, Plan

Clock = dict[str, int]
Graph = tuple["EmulatedGraph", torch.Tensor]
LATE_S = 0.002
"""At most so much later than it could, each work of a stream runs."""
POISON = 0xA5
"""Of host memory that was given back."""


class Trusting:
    """Verdicts by which every device has passed the self-check."""

    def __init__(self) -> None:
        self.taken_back: list[str] = []

    def passed(self, subject: str) -> bool:
        return True

    def take_back(self, device: Device) -> None:
        self.taken_back.append(device.identity)


class Race(AssertionError):
    """Memory was touched without an event between."""


@dataclass(slots=True)
class _Touched:
    """Who touched a region, and when by its own clock."""

    writer: tuple[str, int] | None = None
    readers: Clock = field(default_factory=dict)
    """Since it was written."""


class EmulatedEvent(ThreadEvent):
    def __init__(self, device: EmulatedDevice, clock: Clock) -> None:
        super().__init__(lambda: device.failure)
        self.clock = clock
        self._device = device

    def reached_within(self, timeout_s: float | None) -> bool:
        reached = super().reached_within(timeout_s)
        if reached:
            self._device.join_host(self.clock)
        return reached


class EmulatedStream(ThreadStream):
    _device: EmulatedDevice

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        self._device.touch(self.name, reads, writes)
        super().run(work)

    def record(self) -> Event:
        event = EmulatedEvent(self._device, self._device.clock_of(self.name))
        self._given.put(event.reached)
        return event

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        assert isinstance(event, EmulatedEvent), "an event of another device"
        self._device.join(self.name, event.clock)
        # On the stream's thread nobody's host clock moves: it waits for the thread of the other stream alone.
        self._given.put(self._unless_failed(lambda: self._await(event)))
        return True

    def _await(self, event: EmulatedEvent) -> None:
        ThreadEvent.reached_within(event, None)

    def _before(self) -> None:
        self._device.late()


class EmulatedCompute:
    """Runs on the thread that calls, as the model does; what others know of it is what they waited for."""

    name = "compute"

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def run(self, work: Work, *, reads: Iterable[Region] = (), writes: Iterable[Region] = ()) -> None:
        self._device.touch(self.name, reads, writes)
        work()

    def record(self) -> Event:
        event = EmulatedEvent(self._device, self._device.clock_of(self.name))
        event.reached()
        return event

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        assert isinstance(event, EmulatedEvent), "an event of another device"
        if not ThreadEvent.reached_within(event, timeout_s):
            return False
        self._device.join(self.name, event.clock)  # the stream knows; the thread that called does not
        return True


class EmulatedDevice(ThreadDevice):
    name = "emulated"
    identity = "emulated 0"
    in_host_memory = False
    node: int | None = None
    captures = True
    tracks = True

    def __init__(
        self,
        *,
        late_s: float = LATE_S,
        seed: int = 0,
        registers_read_only: bool = False,
        registered_max: int | None = None,
    ) -> None:
        """`registered_max`: bytes that it takes of memory that others made; None: any number."""
        super().__init__()
        self.races: list[str] = []
        self.on_copy_in: Callable[[npt.NDArray[np.uint8]], None] = lambda source: None
        self.pageable = 0
        """Copies from or to host memory that is not registered."""
        self.registered = 0
        """Bytes of memory that others made."""
        self.registers_read_only = registers_read_only
        self._registered_max = registered_max
        self._late_s = late_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards all below
        self._clocks: dict[str, Clock] = {}
        self._touched: dict[Region, _Touched] = {}
        self._buffers: dict[int, int] = {}
        """Registered host memory: address -> bytes."""
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._adopted: list[tuple[torch.Tensor, int]] = []
        self._go = threading.Event()
        self._go.set()
        self.compute = EmulatedCompute(self)

    def stream(self, name: str) -> EmulatedStream:
        made = EmulatedStream(name, self)
        self._streams.append(made)
        return made

    def hold(self) -> None:
        """Streams run nothing until `release`."""
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def late(self) -> None:
        self._go.wait()
        with self._lock:
            seconds = self._random.uniform(0, self._late_s)
        time.sleep(seconds)

    def buffer(self, count: int) -> npt.NDArray[np.uint8]:
        made = np.full(count, POISON, np.uint8)
        with self._lock:
            self._buffers[made.ctypes.data] = made.nbytes
            self._kept.append(made)  # the card knows its address
        return made

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        if not (memory.flags.writeable or self.registers_read_only):
            raise CannotRegister(f"{memory.nbytes} bytes of host memory that is read-only")
        most = self._registered_max
        with self._lock:
            assert memory.ctypes.data not in self._buffers, "registered twice"
            if most is not None and self.registered + memory.nbytes > most:
                raise CannotRegister(f"{memory.nbytes} bytes of host memory: {most} can be locked")
            self._buffers[memory.ctypes.data] = memory.nbytes
            self.registered += memory.nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            self.registered -= self._buffers.pop(address)

    def copy_in(self, target: torch.Tensor, source: npt.NDArray[np.uint8]) -> None:
        self.on_copy_in(source)
        self._look_at(source)
        target.copy_(view(source, target.dtype, target.shape))

    def copy_out(self, target: npt.NDArray[np.uint8], source: torch.Tensor) -> None:
        self._look_at(target)
        view(target, source.dtype, source.shape).copy_(source)

    def _look_at(self, memory: npt.NDArray[np.uint8]) -> None:
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        with self._lock:
            known = any(start <= begin and end <= start + size for start, size in self._buffers.items())
            self.pageable += not known

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.fill_(float("nan"))
            self._adopted.append((tensor, tensor.data_ptr()))

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        recorder = _Recorder()
        with recorder, mock.patch.object(attention, "decode_attention", recorder.launched(decode_attention)):
            out = work()
        return EmulatedGraph(recorder.calls, out), out

    def reading(self, regions: Iterable[Region]) -> None:
        self.touch(_thread(), regions, ())

    def freeing(self, regions: Iterable[Region]) -> None:
        regions = list(regions)
        self.touch(_thread(), (), regions)
        with self._lock:
            for region in regions:
                del self._touched[region]

    # ------------------------------------------------------------------------------------------------------ clocks

    def clock_of(self, who: str) -> Clock:
        with self._lock:
            return dict(self._clocks.get(who, {}))

    def join(self, who: str, clock: Clock) -> None:
        with self._lock:
            self._join(who, clock)

    def join_host(self, clock: Clock) -> None:
        self.join(_thread(), clock)

    def touch(self, who: str, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """`who` does it next. A stream also comes after whatever its caller knows to have ended."""
        with self._lock:
            if self.failure is not None:
                raise DeviceFailed(f"work on a stream failed: {self.failure!r}")
            if any(tensor.data_ptr() != address for tensor, address in self._adopted):
                self._fail("KV has moved in memory: graphs that were captured have its old address")
            if who != _thread():
                self._join(who, self._clocks.get(_thread(), {}))
            clock = self._clocks.setdefault(who, {})
            clock[who] = now = clock.get(who, 0) + 1
            for region in reads:
                touched = self._touched.setdefault(region, _Touched())
                self._check(who, clock, region, "reads", touched.writer)
                touched.readers[who] = now
            for region in writes:
                touched = self._touched.setdefault(region, _Touched())
                self._check(who, clock, region, "writes", touched.writer)
                for reader in touched.readers.items():
                    self._check(who, clock, region, "writes", reader)
                self._touched[region] = _Touched((who, now))

    def _join(self, who: str, clock: Clock) -> None:
        mine = self._clocks.setdefault(who, {})
        for name, time_ in clock.items():
            mine[name] = max(time_, mine.get(name, 0))

    def _check(
        self, who: str, clock: Clock, region: Region, does: str, other: tuple[str, int] | None
    ) -> None:
        if other is not None and other[0] != who and clock.get(other[0], 0) < other[1]:
            self._fail(f"{who} {does} {region}, and nothing says that {other[0]} is done with it")

    def _fail(self, race: str) -> None:
        self.races.append(race)
        self.failure = self.failure or Race(race)
        raise self.failure


class _Recorder(TorchDispatchMode):
    """What is computed while it is on. Python that runs meanwhile runs no more at a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._inside = False
        self._made: dict[int, torch.Tensor] = {}
        self._addressed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self._inside:
            raise AssertionError("the host reads a number while a graph is captured")
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        args, kwargs = tree_map(self._baked, args), tree_map(self._baked, kwargs)
        self._made |= {id(each): each for each in tree_leaves(out) if isinstance(each, torch.Tensor)}
        self.calls.append((func, args, kwargs, out))

    def _baked(self, value: Any) -> Any:
        """What comes from outside is read where it lies now, whatever memory its tensor is given later."""
        if not isinstance(value, torch.Tensor) or id(value) in self._made:
            return value
        return self._addressed.setdefault(id(value), (value, value.detach()))[1]

    def launched(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """One launch, whatever it calls: it reads its arrays when it runs."""

        def launch(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._inside = True
            try:
                out = kernel(*args, **kwargs)
                self._record(kernel, args, kwargs, out)
            finally:
                self._inside = False
            return out

        return launch


class EmulatedGraph:
    """Calls with the tensors that they were captured with: what the program put in their place since is not seen."""

    def __init__(self, calls: list[Any], out: torch.Tensor) -> None:
        self._calls = calls
        self._out = out
        self._static = out

    def replay(self) -> None:
        now: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, out in self._calls:
            if func is decode_attention:
                _check_launch(args[3])
            made = func(*tree_map(current, args), **tree_map(current, kwargs))
            for before, after in zip(tree_leaves(out), tree_leaves(made), strict=True):
                if isinstance(before, torch.Tensor):
                    now[id(before)] = after
        self._static.copy_(now[id(self._out)])


def _check_launch(plan: Plan) -> None:
    """As many programs run, with as much room, as when it was captured."""
    items = int((plan.items[:, COUNT] > 0).sum())
    partials = int(plan.rows[:, PARTIALS].sum())
    assert items <= plan.capacity.items and partials <= plan.capacity.partials, (
        items,
        partials,
        plan.capacity,
    )
    plan.divisions.clear()  # what the CPU path worked out from the arrays, which kernels read themselves


def _thread() -> str:
    return f"thread {threading.get_ident()}"
