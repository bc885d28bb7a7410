"""Streams and events, on the host's threads and on a device that tells races; and that it tells them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.device import (
    CannotRegister,
    CpuDevice,
    Device,
    DeviceFailed,
    HereStream,
    ThreadDevice,
    device_for_steps,
    device_of,
    view,
)

from .emulated import EmulatedDevice, Race

BOUND_S = 30.0


@pytest.fixture(params=[CpuDevice, EmulatedDevice])
def device(request: pytest.FixtureRequest) -> Iterator[ThreadDevice]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.release()
    made.close()


def test_a_stream_runs_in_order_and_behind(device: ThreadDevice) -> None:
    ran: list[int] = []
    stream, go = device.stream("one"), threading.Event()
    stream.run(lambda: go.wait(BOUND_S) and None)
    for number in range(50):
        stream.run(lambda number=number: ran.append(number))
    event = stream.record()
    assert not event.query() and not ran, "it ran on the thread that called"
    go.set()
    event.synchronize()
    assert event.query() and ran == list(range(50))


def test_a_stream_waits_for_anothers_event(device: ThreadDevice) -> None:
    first, second, go = device.stream("first"), device.stream("second"), threading.Event()
    ran: list[str] = []
    first.run(lambda: go.wait(BOUND_S) and None)
    first.run(lambda: ran.append("first"))
    assert second.wait(first.record())
    second.run(lambda: ran.append("second"))
    end = second.record()
    go.set()
    end.synchronize()
    assert ran == ["first", "second"]


def test_the_models_stream_waits_itself(device: ThreadDevice) -> None:
    stream, go = device.stream("one"), threading.Event()
    stream.run(lambda: go.wait(BOUND_S) and None)
    event = stream.record()
    assert not device.compute.wait(event, 0.0), "in vain"
    go.set()
    assert device.compute.wait(event, BOUND_S) and event.query()
    assert device.compute.wait(device.compute.record())


def test_after_a_failure_all_fails_and_nobody_hangs(
    device: ThreadDevice, caplog: pytest.LogCaptureFixture
) -> None:
    stream, other = device.stream("one"), device.stream("other")
    stream.run(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(DeviceFailed, match="ZeroDivisionError"):
        stream.record().synchronize()
    ran: list[int] = []
    with suppress(DeviceFailed):  # the one that tells races says so at once
        other.run(lambda: ran.append(1))
    with pytest.raises(DeviceFailed):
        other.record().synchronize()
    assert not ran and "ZeroDivisionError" in caplog.text
    assert not issubclass(DeviceFailed, AssertionError)


def test_memory_is_seen_as_a_tensor_without_a_copy() -> None:
    memory = np.zeros(16, np.uint8)
    view(memory, torch.float32, [2, 2]).fill_(1.0)
    assert (memory.view(np.float32) == 1.0).all()


def test_which_device_a_model_gets() -> None:
    made = device_of(torch.device("cpu"))
    assert made.name == "cpu"
    made.close()
    for other in ("cuda", "meta"):
        for make in (device_of, device_for_steps):
            with pytest.raises(Unsupported, match=rf"model\.device={other}"):
                make(torch.device(other))
    assert device_for_steps(torch.device("cpu")) is None


def test_a_model_on_a_gpu_gets_it_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its steps, with a store or without."""
    cuda = importlib.import_module("kvstore.gpu_worker.cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "CudaDevice", lambda device: ("a card", device))
    wanted = ("a card", torch.device("cuda", 1))
    assert device_of(torch.device("cuda", 1)) == device_for_steps(torch.device("cuda", 1)) == wanted


def test_the_make_for_cuda_can_be_imported_without_a_card() -> None:
    cuda = importlib.import_module("kvstore.gpu_worker.cuda")
    for name in ("name", "in_host_memory", "tracks", "stream", "buffer", "adopt", "register", "unregister"):
        assert hasattr(cuda.CudaDevice, name), name
    methods = {name for name in dir(Device) if not name.startswith("_")} - {"compute"}
    assert methods <= {*dir(cuda.CudaDevice), "compute"}
    assert {"run", "record", "wait"} <= {*dir(cuda.CudaStream)} & {*dir(HereStream)}


# -------------------------------------------------------------------------------------------- races, and their like


def test_who_reads_must_come_after_who_wrote(emulated: EmulatedDevice) -> None:
    write, read = emulated.stream("write"), emulated.stream("read")
    write.run(lambda: None, writes=["here"])
    event = write.record()
    read.run(lambda: None, reads=["elsewhere"])
    with pytest.raises(Race, match="read reads here, and nothing says that write is done with it"):
        read.run(lambda: None, reads=["here"])
    with pytest.raises(DeviceFailed):
        event.synchronize()  # as on a GPU, nothing means anything after that
    assert len(emulated.races) == 1


def test_who_writes_must_come_after_who_reads(emulated: EmulatedDevice) -> None:
    copy = emulated.stream("copy")
    copy.run(lambda: None, reads=["here"])
    emulated.compute.run(lambda: None, reads=["here"])  # both may
    with pytest.raises(Race, match="compute writes here"):
        emulated.compute.run(lambda: None, writes=["here"])


def test_an_event_says_what_came_before_it_and_no_more(emulated: EmulatedDevice) -> None:
    write, read = emulated.stream("write"), emulated.stream("read")
    write.run(lambda: None, writes=["one"])
    event = write.record()
    write.run(lambda: None, writes=["two"])
    read.wait(event)
    read.run(lambda: None, reads=["one"])
    with pytest.raises(Race, match="reads two"):
        read.run(lambda: None, reads=["two"])


def test_what_one_thread_waited_for_another_does_not_know(emulated: EmulatedDevice) -> None:
    stream = emulated.stream("one")
    stream.run(lambda: None, writes=["here"])
    stream.record().synchronize()
    emulated.reading(["here"])
    found: list[BaseException] = []

    def read() -> None:
        try:
            emulated.reading(["here"])
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert isinstance(found[0], Race)


def test_memory_is_not_given_back_while_a_copy_is_in_flight(emulated: EmulatedDevice) -> None:
    stream = emulated.stream("one")
    stream.run(lambda: None, writes=["buffer"])
    with pytest.raises(Race, match="writes buffer"):
        emulated.freeing(["buffer"])


def test_kv_that_has_moved_is_noticed(emulated: EmulatedDevice) -> None:
    pool = torch.zeros(8)
    emulated.adopt([pool])
    assert pool.isnan().all(), "what nobody wrote"
    pool.set_(torch.zeros(8).untyped_storage())  # type: ignore[call-overload]
    with pytest.raises(Race, match="moved in memory"):
        emulated.compute.run(lambda: None)


def test_copies_from_and_to_memory_that_is_not_registered_are_counted(emulated: EmulatedDevice) -> None:
    own, theirs, card = emulated.buffer(64), np.zeros(64, np.uint8), torch.zeros(16)
    emulated.copy_in(card, own)
    emulated.copy_in(card[:4], own[16:32])
    emulated.copy_out(own, card)
    assert emulated.pageable == 0
    emulated.copy_in(card, theirs)
    emulated.copy_out(theirs, card)
    assert emulated.pageable == 2
    emulated.register(theirs)
    emulated.copy_in(card, theirs)
    assert emulated.pageable == 2 and emulated.registered == 64
    emulated.unregister(theirs.ctypes.data)
    emulated.copy_in(card, theirs)
    assert emulated.pageable == 3 and emulated.registered == 0


def test_memory_that_a_card_cannot_register(emulated: EmulatedDevice) -> None:
    theirs = np.zeros(64, np.uint8)
    theirs.flags.writeable = False
    with pytest.raises(CannotRegister, match="read-only"):
        emulated.register(theirs)
    small = EmulatedDevice(registers_read_only=True, registered_max=100)
    small.register(theirs)
    with pytest.raises(CannotRegister, match="100 can be locked"):
        small.register(np.zeros(64, np.uint8))


def test_streams_can_be_held(emulated: EmulatedDevice) -> None:
    stream = emulated.stream("one")
    emulated.hold()
    stream.run(lambda: None)
    event = stream.record()
    assert not emulated.compute.wait(event, 0.01)
    emulated.release()
    assert emulated.compute.wait(event, BOUND_S)
