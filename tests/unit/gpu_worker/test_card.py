"""The make for CUDA on a card: streams that are late on purpose, each kind of wait, copies both ways, registered
memory, and captured steps. What needs no card is in test_cuda.py."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.device import CannotRegister, Event
from kvstore.gpu_worker.small_copies import uses_host_addresses

from ...cards import LATE_CYCLES, card
from .conftest import tiny_llama
from .test_graphs import T, played

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CARD = torch.device("cuda", 0)
CLEAR = 0.25
"""See e2e/test_registered.py."""
SIZE = 1 << 20


@pytest.fixture
def device() -> Iterator[Any]:
    made = card()
    yield made
    made.close()


def late(count: int = 100) -> None:
    torch.cuda._sleep(count * LATE_CYCLES)


def shared_memory(size: int, *, writable: bool = True) -> np.ndarray:
    """As the arena's."""
    handle = os.memfd_create("test-card")
    try:
        os.ftruncate(handle, size)
        mmap.mmap(handle, size)[:] = os.urandom(size)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(handle, size, mmap.MAP_SHARED, access), np.uint8)
    finally:
        os.close(handle)


@pytest.mark.parametrize("who", ["another stream", "the compute stream", "a thread"])
def test_who_waits_for_a_late_stream_sees_what_it_wrote(device: Any, who: str) -> None:
    written, seen = torch.zeros(SIZE, device=CARD), torch.full((SIZE,), -1.0, device=CARD)
    first, second = device.stream("first"), device.stream("second")
    torch.cuda.synchronize()
    first.run(late)
    first.run(lambda: written.fill_(7))
    event: Event = first.record()
    assert not event.query(), "it was not late: nothing was tested"
    reader = device.compute if who == "the compute stream" else second
    if who == "a thread":
        event.synchronize()
        assert event.query()
    else:
        assert reader.wait(event)
    reader.run(lambda: seen.copy_(written))
    reader.record().synchronize()
    assert (seen == 7).all()


def test_a_stream_holds_up_neither_the_thread_nor_the_model(device: Any) -> None:
    stream, here = device.stream("read"), torch.zeros(SIZE, device=CARD)
    torch.cuda.synchronize()
    stream.run(late)
    event = stream.record()
    device.compute.run(lambda: here.fill_(1))
    device.compute.record().synchronize()
    assert (here == 1).all() and not event.query()
    event.synchronize()


@pytest.mark.parametrize(
    "sizes", [(4096,), (1, 4096, 70_000, 2, SIZE), (*range(1, 10), SIZE), (*[4096] * 9, 16)]
)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("way", ["as the driver can", "by a kernel", "one by one"])
def test_every_bit_comes_back(device: Any, sizes: tuple[int, ...], contiguous: bool, way: str) -> None:
    if way != "as the driver can":
        device._batched = None
        device._small = device._proven_small_copies() if way == "by a kernel" else None
    if way == "by a kernel" and device._small is None:
        assert not uses_host_addresses(0), "the kernel copies wrongly: see the log"
        pytest.skip("this card has host memory elsewhere")
    step = 1 if contiguous else 2
    there = [torch.zeros(size * step, dtype=torch.uint8, device=CARD)[::step] for size in sizes]
    given, back = ([device.buffer(size) for size in sizes] for _ in range(2))
    for each in given:
        each[:] = np.frombuffer(os.urandom(each.nbytes), np.uint8)
    torch.cuda.synchronize()
    read, write = device.stream("read"), device.stream("write")
    read.run(lambda: device.copy_all_in(list(zip(there, given, strict=True))))
    write.wait(read.record())
    write.run(lambda: device.copy_all_out(list(zip(back, there, strict=True))))
    write.record().synchronize()
    assert all((one == other).all() for one, other in zip(given, back, strict=True))


def test_shared_memory_is_registered_copied_from_and_to_and_given_back(device: Any) -> None:
    memory, there = shared_memory(SIZE), torch.zeros(SIZE, dtype=torch.uint8, device=CARD)
    before = memory.copy()
    for _ in range(2):
        device.register(memory)
        with pytest.raises(CannotRegister):
            device.register(memory)
        stream = device.stream("read")
        stream.run(lambda: device.copy_in(there, memory))
        stream.run(lambda: there.bitwise_not_())
        stream.run(lambda: device.copy_out(memory, there))
        device.unregister(memory.ctypes.data)  # waits for what is in flight
        assert (memory == ~before).all()
        before = memory.copy()
    assert (there * 0 == 0).all(), "the refusals are no error of the next kernel"


def test_memory_that_is_read_only_is_registered_or_refused_as_the_device_says(device: Any) -> None:
    memory, there = shared_memory(SIZE, writable=False), torch.zeros(SIZE, dtype=torch.uint8, device=CARD)
    if not device.registers_read_only:
        with pytest.raises(CannotRegister):
            device.register(memory)
        assert (there == 0).all(), "the refusal is no error of the next kernel"
        return
    device.register(memory)
    stream = device.stream("read")
    stream.run(lambda: device.copy_in(there, memory))
    device.unregister(memory.ctypes.data)
    assert (there.cpu().numpy() == memory).all()


def test_copies_in_batches_go_on_from_a_thread_that_is_new(device: Any) -> None:
    """The driver's own call is the first that it makes."""
    if device._batched is None:
        pytest.skip("a driver without copies in batches")
    given = device.buffer(2 * SIZE).reshape(2, SIZE)
    given[:] = 7
    there, stream = torch.zeros(2, SIZE, dtype=torch.uint8, device=CARD), device.stream("read")
    torch.cuda.synchronize()
    pairs = list(zip(there, given, strict=True))
    thread = threading.Thread(target=stream.run, args=(lambda: device.copy_all_in(pairs),))
    thread.start()
    thread.join()
    stream.record().synchronize()
    assert (there == 7).all() and device._batched is not None


def test_graphs_are_captured_again_when_all_of_before_are_gone(device: Any) -> None:
    """While memory of theirs is in use still, as that for partial results is."""
    numbers, kept = torch.ones(1 << 20, device=CARD), []
    assert (numbers * 2 == 2).all()

    def work() -> torch.Tensor:
        kept.append(torch.empty_like(numbers))
        return numbers * 2

    for number in (1, 3, 4):
        graph, out = device.capture(work)
        numbers.fill_(number)
        graph.replay()
        assert (out == 2 * number).all()
        del graph, out


def test_a_capture_that_fails_leaves_the_thread_its_stream(device: Any) -> None:
    numbers, before = torch.ones(8, device=CARD), torch.cuda.current_stream(CARD)
    with pytest.raises(RuntimeError):
        device.capture(lambda: numbers * float(numbers.sum()))
    assert torch.cuda.current_stream(CARD) == before
    assert (numbers * 2 == 2).all()


def test_a_captured_step_reads_what_lies_there_when_it_is_replayed(device: Any) -> None:
    numbers = torch.ones(8, device=CARD)
    assert (numbers * 2 == 2).all()  # the kernel is loaded, which a capture is not for
    graph, out = device.capture(lambda: numbers * 2)
    for number in (5, 9):
        numbers.fill_(number)
        graph.replay()
        assert (out == 2 * number).all()


def test_replayed_steps_say_what_steps_computed_one_by_one_say(
    engines: Callable[..., BatchEngine],
) -> None:
    model = tiny_llama(torch.bfloat16, layers=2).to(CARD)
    settings = {"chunk_tokens": T, "pool_chunks": 64, "sequences_max": 4}
    eager, replaying = (engines(model, None, **settings) for _ in range(2))
    eager._forward.graphs = None
    said = [{}, {}]  # type: list[dict[int, list[tuple[int, float]]]]
    for engine, each in zip((eager, replaying), said, strict=True):
        for request, token, gap in played(engine):
            each.setdefault(request, []).append((token, gap))
    assert replaying._forward.graphs is not None and replaying._forward.graphs.counters["replayed"] > 20
    for request, tokens in said[0].items():
        for (one, gap), (other, _) in zip(tokens, said[1][request], strict=True):
            if one != other:
                assert gap < CLEAR, (request, one, other, gap)
                break
