"""The make for CUDA, on a runtime that is not there: what is asked of torch.cuda and of the driver, and in which order.

What a card does with it only a card shows (`kvctl doctor gpu`, benchmarks/gpu_check.py)."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.gpu_worker import cuda, small_copies
from kvstore.gpu_worker.cuda import BatchedCopies, CudaDevice
from kvstore.gpu_worker.device import CannotRegister, DeviceFailed
from kvstore.gpu_worker.small_copies import SLICE_BYTES_MAX, SLICES_MIN, TABLE_SLICES, TABLES
from kvstore.kernels.slices.naive import naive_copy_slices

BOUND_S = 30.0
LOST = "CUDA error: an illegal memory access was encountered"


class FakeCuda:
    """What of torch.cuda is used. `current` are the device and the stream of each thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = threading.local()
        self.lost = False
        self.host_register = 0
        """What cudaHostRegister answers."""
        self.registered: dict[int, tuple[int, int, int]] = {}
        """Address -> (bytes, flags, device)."""
        self.modes: list[tuple[str, int]] = []
        """Of captures: capture_error_mode, and the device of its stream."""
        self.pools: list[object] = []
        """Of captures: whose memory."""
        self.users: dict[int, tuple[weakref.WeakSet[Any], list[object]]] = {}
        """Of each pool: graphs that there are still, and captures that have not ended well."""
        self.within: Callable[[], None] = lambda: None
        """Called while a graph is captured."""

    @property
    def device_number(self) -> int:
        return int(getattr(self.current, "device", 0))

    def say(self, what: str) -> None:
        self.current.context = True
        self.calls.append(what)
        if self.lost:
            raise torch.AcceleratorError(LOST)  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.device = device or torch.device("cuda", fake.device_number)
                self.cuda_stream = 0x1000 + id(self) % 0x1000

            def wait_event(self, event: Any) -> None:
                fake.say("wait_event")

            def synchronize(self) -> None:
                fake.say("stream.synchronize")

            def query(self) -> bool:
                fake.say("stream.query")
                return True

            def wait_stream(self, other: Stream) -> None:
                fake.say("wait_stream")

        class Event:
            def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
                self.blocking = blocking

            def record(self, stream: Stream | None = None) -> None:
                stream = stream or getattr(fake.current, "stream", None) or default
                fake.say(f"record on {stream.device} {'blocking' if self.blocking else 'spinning'}")

            def query(self) -> bool:
                fake.say("query")
                return True

            def synchronize(self) -> None:
                fake.say("synchronize")

            def elapsed_time(self, other: Event) -> float:
                return 1.0

        @contextmanager
        def use_device(device: torch.device) -> Iterator[None]:
            before, fake.current.device = fake.device_number, device.index
            try:
                yield
            finally:
                fake.current.device = before

        @contextmanager
        def use_stream(stream: Stream) -> Iterator[None]:
            before = getattr(fake.current, "stream", None)
            fake.current.stream = stream
            try:
                yield
            finally:
                fake.current.stream = before

        class CUDAGraph:
            def replay(self) -> None:
                fake.say("replay")

        @contextmanager
        def graph(
            made: CUDAGraph,
            *,
            pool: object = None,
            stream: Stream | None = None,
            capture_error_mode: str = "global",
        ) -> Iterator[None]:
            """Torch's stays on its stream where a capture fails, and counts who has memory of a handle."""
            pool, stream = pool or object(), stream or Stream()
            users, underway = fake.users.setdefault(id(pool), (weakref.WeakSet(), []))
            assert fake.pools.count(pool) == 0 or (users and not underway), (
                "use_count > 0 INTERNAL ASSERT FAILED"
            )
            fake.modes.append((capture_error_mode, stream.device.index))
            fake.pools.append(pool)
            fake.say(f"capture on {fake.device_number}")
            before = getattr(fake.current, "stream", None)
            fake.current.stream = stream
            underway.append(pool)
            fake.within()
            yield
            underway.clear()
            users.add(made)
            fake.current.stream = before

        class Runtime:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
                if not fake.host_register:
                    fake.registered[address] = size, flags, fake.device_number
                return fake.host_register

            def cudaHostUnregister(self, address: int) -> int:
                fake.say("cudaHostUnregister")
                return 0 if fake.registered.pop(address, None) else 713

        class Card:
            name, uuid = "a card", "GPU-1"

        default = Stream(torch.device("cuda", 0))
        default.cuda_stream = 0
        here: dict[str, Any] = {
            "current_device": lambda: fake.device_number,
            "cudart": Runtime,
            "get_device_properties": lambda device: Card,
            "Stream": Stream,
            "Event": Event,
            "device": use_device,
            "stream": use_stream,
            "current_stream": lambda device=None: getattr(fake.current, "stream", None) or default,
            "synchronize": lambda: fake.say(f"synchronize device {fake.device_number}"),
            "graph_pool_handle": object,
            "CUDAGraph": CUDAGraph,
            "set_stream": lambda stream: setattr(fake.current, "stream", stream),
            "graph": graph,
        }
        for name, value in here.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda, "_forget_last_error", lambda: fake.calls.append("forget error"))
        empty = torch.empty
        monkeypatch.setattr(
            torch,
            "empty",
            lambda *size, pin_memory=False, device=None, **more: (
                fake.calls.append("pinned") if pin_memory else None,
                empty(*size, **more),
            )[1],
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    monkeypatch.setattr(BatchedCopies, "of_driver", classmethod(lambda cls: None))
    return made


def test_a_device_without_a_number_is_the_current_one_for_good(fake: FakeCuda) -> None:
    """Other threads have device 0 for their current one."""
    fake.current.device = 1
    device = CudaDevice(torch.device("cuda"))
    memory = np.zeros(64, np.uint8)
    thread = threading.Thread(target=device.register, args=(memory,))
    thread.start()
    thread.join()
    assert fake.registered[memory.ctypes.data] == (64, 0, 1)
    assert device.stream("read")._this.device.index == 1


def test_threads_that_wait_for_an_event_sleep(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 1))
    event = device.stream("read").record()
    event.synchronize()
    assert fake.calls == ["record on cuda:1 blocking", "synchronize"]


def test_a_stream_waits_for_an_event_and_the_thread_does_not(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 1))
    read, event = device.stream("read"), device.compute.record()
    fake.calls.clear()
    assert read.wait(event) and fake.calls == ["wait_event"]


def test_nothing_reads_memory_any_more_when_it_is_unregistered(fake: FakeCuda) -> None:
    device, memory = CudaDevice(torch.device("cuda", 1)), np.zeros(64, np.uint8)
    device.register(memory)
    device.unregister(memory.ctypes.data)
    assert fake.calls == ["synchronize device 1", "cudaHostUnregister"] and not fake.registered


def test_a_lost_context_is_told_as_such_by_all_that_is_asked(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    stream = device.stream("read")
    event = stream.record()
    memory = np.zeros(64, np.uint8)
    device.register(memory)
    fake.lost = True
    asked: list[Callable[[], object]] = [
        event.query,
        event.synchronize,
        stream.record,
        lambda: stream.wait(event),
        lambda: device.unregister(memory.ctypes.data),
    ]
    for ask in asked:
        with pytest.raises(DeviceFailed, match="illegal memory access"):
            ask()
    device.close()  # whatever streams say


def test_other_threads_go_on_while_a_graph_is_captured(fake: FakeCuda) -> None:
    """In the mode that is torch's default, whatever they allocate or copy would end the capture."""
    device = CudaDevice(torch.device("cuda", 1))
    graph, out = device.capture(lambda: torch.ones(1))
    assert graph is not None and out == 1
    assert fake.modes == [("thread_local", 1)] and fake.calls == ["capture on 1"]


def test_graphs_share_the_memory_of_what_they_compute_in_between(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    kept = [device.capture(lambda: torch.ones(1)) for _ in range(3)]
    assert len(kept) == 3 and len(set(map(id, fake.pools))) == 1


def test_graphs_are_captured_again_when_all_of_before_are_gone(fake: FakeCuda) -> None:
    """As those of a model whose weights were changed: torch refuses memory that no graph has any more."""
    device = CudaDevice(torch.device("cuda", 0))
    for _ in range(3):
        device.capture(lambda: torch.ones(1))
    assert len(set(map(id, fake.pools))) == 3


def test_a_capture_that_fails_leaves_the_thread_its_stream_and_the_next_one_other_memory(
    fake: FakeCuda,
) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    before = torch.cuda.current_stream(device._device)
    kept, _ = device.capture(lambda: torch.ones(1))

    def ask() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(ask)
    assert torch.cuda.current_stream(device._device) is before
    again, _ = device.capture(lambda: torch.ones(1))
    assert kept is not again and len(set(map(id, fake.pools))) == 2


@pytest.mark.parametrize("what", ["register", "unregister", "buffer"])
def test_nobody_waits_for_the_whole_device_while_a_graph_is_captured(fake: FakeCuda, what: str) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    memory, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    device.register(other)
    asks: dict[str, Callable[[], object]] = {
        "register": lambda: device.register(memory),
        "unregister": lambda: device.unregister(other.ctypes.data),
        "buffer": lambda: device.buffer(8),
    }
    calls_before: list[int] = []
    thread = threading.Thread(target=asks[what])

    def within() -> None:
        thread.start()
        thread.join(0.1)
        calls_before.append(len(fake.calls) + len(fake.registered))

    def seen() -> int:
        return len(fake.calls) + len(fake.registered)

    fake.within = within
    device.capture(lambda: torch.ones(1))
    thread.join(BOUND_S)
    assert calls_before == [len(["capture"]) + len([other])], "it came in between"
    assert seen() != calls_before[0], "and afterwards it was done"


def test_memory_is_registered_as_it_is_mapped_and_a_failure_leaves_nothing(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    memory = np.zeros(64, np.uint8)
    memory.flags.writeable = False
    device.register(memory)
    assert fake.registered[memory.ctypes.data] == (64, cuda.READ_ONLY, 0)
    fake.host_register = 801
    with pytest.raises(CannotRegister, match="CUDA error 801"):
        device.register(np.zeros(64, np.uint8))
    assert fake.calls == ["forget error"], "the next kernel would be blamed for it"
    with pytest.raises(DeviceFailed, match="stays registered: CUDA error 713"):
        device.unregister(1 << 20)


def test_host_memory_is_asked_for_near_the_card(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is faulted in."""
    preferred: list[tuple[int, int, int]] = []
    monkeypatch.setattr(cuda, "node_of", lambda pci: {"0000:A1:00.0": 1}.get(pci))
    monkeypatch.setattr(cuda, "_pci_address", lambda number: ("0000:17:00.0", "0000:A1:00.0")[number])

    def prefer(address: int, size: int, node: int) -> None:
        assert not fake.registered
        preferred.append((address, size, node))

    @contextmanager
    def preferring(node: int) -> Iterator[None]:
        fake.calls.append(f"near {node}")
        yield
        fake.calls.append("anywhere")

    monkeypatch.setattr(cuda, "prefer", prefer)
    monkeypatch.setattr(cuda, "preferring", preferring)
    device, memory = CudaDevice(torch.device("cuda", 1)), np.zeros(64, np.uint8)
    device.buffer(8)
    assert fake.calls == ["near 1", "pinned", "anywhere"]
    device.register(memory)
    assert preferred == [(memory.ctypes.data, 64, 1)] and fake.registered


def test_a_card_without_a_driver_has_no_address() -> None:
    assert cuda._pci_address(0) == ""


def test_the_runtime_of_this_process_is_asked_to_forget() -> None:
    """Under whatever name, in whatever folder it was loaded."""
    ctypes.CDLL("libc.so.6")
    path = cuda._loaded("libc.so")
    assert path is not None and path.startswith("/") and "libc.so" in path
    assert cuda._loaded("libnothing.so") is None
    cuda._forget_last_error()  # where there is none


# ------------------------------------------------------------------------------------------------- copies in batches

Function = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
)


class Driver:
    """cuMemcpyBatchAsync as cuda.h of 13.0 declares its first version, which copies at once."""

    def __init__(self, *, answers: int = 0, wrong: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.attributes: list[tuple[int, ...]] = []
        self.answers = answers
        self.current: threading.local | None = None
        """Whose threads have a context once they called the runtime; None: all have."""

        def call(
            to: int,
            source: int,
            sizes: int,
            count: int,
            attributes: int,
            firsts: int,
            attribute_count: int,
            failed: int,
            stream: int,
        ) -> int:
            if self.answers:
                return self.answers
            pointers = [(ctypes.c_uint64 * count).from_address(address) for address in (to, source, sizes)]
            self.batches.append(list(pointers[2]))
            words = (ctypes.c_uint32 * 6).from_address(attributes)
            first = ctypes.c_size_t.from_address(firsts).value
            self.attributes.append(
                (*words, attribute_count, first, ctypes.c_size_t.from_address(failed).value)
            )
            assert stream > 2, "the default stream takes no batches"
            if self.current is not None and not hasattr(self.current, "context"):
                return 201  # CUDA_ERROR_INVALID_CONTEXT
            for a, b, size in zip(*pointers, strict=True):
                ctypes.memmove(a, b, size - wrong)
            return 0

        self.function = Function(call)


PROOF = 4
"""Batches: there and back, of any sizes and of multiples of 16 bytes."""


def with_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(BatchedCopies, "of_driver", classmethod(lambda cls: cls(driver.function)))
    return CudaDevice(torch.device("cuda", 0))


def both_ways(device: CudaDevice, sizes: Sequence[int]) -> None:
    """In and out again, with one that is no piece of memory in between."""
    source = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    card = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    strided = torch.zeros((4, 2), dtype=torch.uint8)[:, 0]
    more = np.arange(4, dtype=np.uint8)
    device.copy_all_in([*zip(card, source, strict=True), (strided, more)])
    back = [np.zeros(size, np.uint8) for size in sizes]
    strided_back = np.zeros(4, np.uint8)
    device.copy_all_out([*zip(back, card, strict=True), (strided_back, strided)])
    assert all((one == other).all() for one, other in zip(source, back, strict=True))
    assert (strided_back == more).all()


def test_many_copies_are_one_call(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    device = with_driver(driver, monkeypatch)
    assert len(driver.batches) == PROOF and not fake.registered
    device.stream("read").run(lambda: both_ways(device, (10, 300, 7)))
    assert driver.batches[PROOF:] == [[10, 300, 7], [10, 300, 7]]
    in_stream_order, location, beside_compute = 1, (0, 0), 1
    assert set(driver.attributes) == {(in_stream_order, *location, *location, beside_compute, 1, 0, 0)}


def test_a_thread_that_is_new_has_a_context_before_the_driver_is_asked(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a loader's, whose first call may be a batch."""
    driver = Driver()
    device = with_driver(driver, monkeypatch)
    driver.current = fake.current
    stream = device.stream("read")
    for _ in range(2):
        fake.calls.clear()
        thread = threading.Thread(target=stream.run, args=(lambda: both_ways(device, (10, 20)),))
        thread.start()
        thread.join(BOUND_S)
        assert fake.calls == ["stream.query"], "once of each thread"
    assert len(driver.batches) == PROOF + 4 and not caplog.text


def test_a_copy_by_itself_and_the_default_stream_make_no_batch(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    device = with_driver(driver, monkeypatch)
    device.stream("read").run(lambda: both_ways(device, (10,)))
    device.compute.run(lambda: both_ways(device, (10, 20)))
    assert len(driver.batches) == PROOF


def test_a_driver_that_copies_wrongly_is_not_asked_again(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(wrong=True)
    device = with_driver(driver, monkeypatch)
    device.stream("read").run(lambda: both_ways(device, (10, 20)))
    assert len(driver.batches) == 2 and "not what they should be" in caplog.text  # there and back, once


def test_a_driver_that_refuses_later_loses_nothing(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    device = with_driver(driver, monkeypatch)
    driver.answers = 801
    device.stream("read").run(lambda: both_ways(device, (10, 20)))
    assert "CUDA error 801" in caplog.text
    driver.answers = 0
    device.stream("read").run(lambda: both_ways(device, (10, 20)))
    assert len(driver.batches) == PROOF


def test_a_driver_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BatchedCopies.of_driver("libc.so.6") is None
    assert BatchedCopies.of_driver("libnothing.so.1") is None


# ------------------------------------------------------------------------------------ small slices, by a kernel


class Kernel:
    """`copy_slices`, which copies at once."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.tables: list[list[int]] = []
        """Of each launch the sizes."""
        self.fails = ""
        self.wrong = wrong

    def __call__(self, table: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.tables.append(table[:, 2].tolist())
        naive_copy_slices(table - np.array([0, 0, self.wrong]))


def with_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(small_copies, "copy_slices", kernel)
    monkeypatch.setattr(cuda, "uses_host_addresses", lambda number: True)
    return CudaDevice(torch.device("cuda", 0))


SIZES = [16 * (1 + number) for number in range(SLICES_MIN)]


def test_small_slices_are_one_launch_and_large_ones_copies(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    device = with_kernel(kernel, monkeypatch)
    assert [len(table) for table in kernel.tables] == [3] * PROOF and not fake.registered
    sizes = [SLICE_BYTES_MAX + 1, *SIZES, SLICE_BYTES_MAX]
    device.stream("read").run(lambda: both_ways(device, sizes))
    assert kernel.tables[PROOF:] == [[*SIZES, SLICE_BYTES_MAX]] * 2


def test_few_slices_and_the_default_stream_are_no_launch(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    device = with_kernel(kernel, monkeypatch)
    device.stream("read").run(lambda: both_ways(device, SIZES[1:]))
    device.compute.run(lambda: both_ways(device, SIZES))
    assert len(kernel.tables) == PROOF


def test_a_table_is_written_again_once_its_kernel_has_run(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    device = with_kernel(kernel, monkeypatch)
    fake.calls.clear()
    many = [1] * (TABLE_SLICES * (TABLES - PROOF) + 5)
    device.stream("read").run(lambda: both_ways(device, many))
    launches = TABLES - PROOF + 1
    assert [len(table) for table in kernel.tables[PROOF:]] == [*[TABLE_SLICES] * (launches - 1), 5] * 2
    # Of tables that were never used nobody waits for a kernel
    assert fake.calls.count("synchronize") == 2 * launches - (TABLES - PROOF)
    assert fake.calls[:2] == ["record on cuda:0 blocking"] * 2


def test_a_kernel_that_copies_wrongly_is_not_used(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(wrong=True)
    device = with_kernel(kernel, monkeypatch)
    device.stream("read").run(lambda: both_ways(device, SIZES))
    assert len(kernel.tables) == 2 and "not what they should be" in caplog.text


def test_a_kernel_that_cannot_be_launched_loses_nothing(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel()
    device = with_kernel(kernel, monkeypatch)
    kernel.fails = "no kernel image is available"
    device.stream("read").run(lambda: both_ways(device, SIZES))
    assert "no kernel image" in caplog.text
    kernel.fails = ""
    device.stream("read").run(lambda: both_ways(device, SIZES))
    assert len(kernel.tables) == PROOF


def test_a_card_that_has_host_memory_elsewhere_gets_no_kernel(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(small_copies, "copy_slices", kernel)
    device = CudaDevice(torch.device("cuda", 0))
    device.stream("read").run(lambda: both_ways(device, SIZES))
    assert not kernel.tables


def test_a_driver_that_refuses_batches_later_leaves_the_kernel(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, kernel = Driver(), Kernel()
    monkeypatch.setattr(BatchedCopies, "of_driver", classmethod(lambda cls: cls(driver.function)))
    device = with_kernel(kernel, monkeypatch)
    assert not kernel.tables, "batches are there"
    driver.answers = 801
    device.stream("read").run(lambda: both_ways(device, SIZES))
    assert kernel.tables[PROOF:] == [SIZES], "the way back"


def test_host_addresses_are_asked_for_of_the_driver(tmp_path: Any) -> None:
    assert not small_copies.uses_host_addresses(0, "libnothing.so.1")
    assert not small_copies.uses_host_addresses(0, "libc.so.6")

    class Library:
        def __init__(self, **answers: int) -> None:
            self.answers = {int(name[1:]): value for name, value in answers.items()}

        def cuDeviceGetAttribute(self, found: Any, what: int, number: int) -> int:
            found._obj.value = self.answers[what]
            return 0

    unified, at_host_addresses = 41, 91
    for answers, right in (((1, 1), True), ((1, 0), False), ((0, 1), False)):
        library = Library(**dict(zip((f"_{unified}", f"_{at_host_addresses}"), answers, strict=True)))
        assert (
            all(small_copies._attribute(library, what, 0) for what in (unified, at_host_addresses)) is right  # type: ignore[arg-type]
        )
    assert (small_copies._UNIFIED_ADDRESSING, small_copies._HOST_POINTER_OF_REGISTERED) == (41, 91)
