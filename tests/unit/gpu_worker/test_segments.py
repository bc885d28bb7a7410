"""How a device gets at the arena: what is registered, when, what becomes of a failure, and who may be trusted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvstore.errors import Unsupported
from kvstore.gpu_worker.bounce import BUFFER_BYTES, BUFFERS, BounceRing
from kvstore.gpu_worker.device import CpuDevice
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.segments import Path, Segments
from kvstore.gpu_worker.self_check import check
from kvstore.gpu_worker.verdicts import LASTS_S, Verdicts, subject
from kvstore.types import Protection

from .conftest import FakeStore, text, tiny_llama
from .emulated import EmulatedDevice, Trusting
from .recording import Recording, T

BOUND_S = 30.0
GEOMETRY = Geometry(layers=2, heads=2, head_dim=8, dtype=torch.float32, chunk_tokens=4)
Make = Callable[..., tuple[Recording, EmulatedDevice]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(layers=3)


@pytest.fixture
def make(model: PreTrainedModel, store: FakeStore) -> Iterator[Make]:
    made: list[tuple[Recording, EmulatedDevice]] = []

    def one(
        *, trusted: bool = True, sample_every: int = 0, **device: Any
    ) -> tuple[Recording, EmulatedDevice]:
        emulated = EmulatedDevice(seed=len(made), **device)
        emulated.on_copy_in = store.copied_by_device
        verdicts = {"verdicts": Trusting()} if trusted else {}
        engine = Recording(model, store.connect, device=emulated, **verdicts)
        engine._store._loader._sample_every = sample_every
        made.append((engine, emulated))
        return made[-1]

    store.views = {}
    yield one
    for engine, emulated in made:
        engine.close()
        assert not emulated.races and emulated.pageable == emulated.registered == 0
    assert store.leases == 0


def run(engine: Recording, *prompts: list[int]) -> None:
    for prompt in prompts:
        engine.add(prompt, 3)
    engine.finish().check()
    assert engine.flush(BOUND_S)


PROMPT = [*text(3 * T), 7]


def test_what_is_there_at_the_start_is_registered_then(make: Make, store: FakeStore) -> None:
    first, device = make()
    assert device.registered == 0
    run(first, PROMPT)
    shard = first.pool.geometry.shard_bytes
    second, device = make()
    assert device.registered == 3 * shard, "before anybody asks for it"
    reads = len(store.reads)
    run(second, PROMPT)
    assert second.counters["restored_tokens"] == 3 * T and len(store.reads) > reads
    run(first, [*text(2 * T, seed=5), 1])
    run(second, [*text(2 * T, seed=5), 1])  # others when they are first read
    assert device.registered == 5 * shard and second._store.segments.registered_bytes == 5 * shard


def test_memory_is_unregistered_before_it_is_unmapped(make: Make, store: FakeStore) -> None:
    run(make()[0], PROMPT)
    engine, device = make()
    log: list[str] = []
    unregister = device.unregister
    device.unregister = lambda address: (log.append("unregistered"), unregister(address))[1]  # type: ignore[method-assign,func-returns-value]
    engine._store.segments.last_view_gone(0, lambda: log.append("unmapped"))  # what was never registered
    address = next(iter(engine._store.segments._sizes))
    engine._store.segments.last_view_gone(address, lambda: log.append("unmapped"))
    deadline = threading.Event()
    while log.count("unmapped") < 2:
        deadline.wait(0.01)
    assert log == ["unmapped", "unregistered", "unmapped"]


def test_what_cannot_be_registered_at_the_start_is_fatal(make: Make, store: FakeStore) -> None:
    run(make()[0], PROMPT)
    with pytest.raises(
        Unsupported, match=r"device=emulated.*100 can be locked.*limit of locked memory"
    ) as found:
        make(registered_max=100)
    assert "doctor gpu" in str(found.value) and not store.leases


def test_what_cannot_be_registered_later_ends_loads_and_saves(
    make: Make, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Never another path in silence; tokens are what they were."""
    first, _ = make()
    engine, _ = make(registered_max=first.pool.geometry.shard_bytes)
    run(first, PROMPT)
    run(engine, PROMPT, text(2 * T, seed=8))
    assert "cannot be registered with emulated" in engine.alarm and engine.alarm in caplog.text
    assert engine.counters["restored_tokens"] == 0 and engine.namespace is None
    kept = len(store.chunks)
    run(engine, text(2 * T, seed=9))
    assert len(store.chunks) == kept


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_sealed_takes_the_ring_where_a_card_registers_nothing_read_only(
    read_only: bool, make: Make, store: FakeStore
) -> None:
    store.protection = Protection.SEALED
    run(make(registers_read_only=read_only)[0], PROMPT)
    engine, device = make(registers_read_only=read_only)
    assert engine._store.segments.path is (Path.REGISTERED if read_only else Path.BOUNCE)
    assert (device.registered > 0) is read_only
    run(engine, PROMPT)
    assert engine.counters["restored_tokens"] == 3 * T and engine.counters["load_failures"] == 0


def test_a_daemon_that_comes_back_sealed(make: Make, store: FakeStore) -> None:
    engine, _ = make()
    assert engine._store.segments.path is Path.REGISTERED
    store.protection = Protection.SEALED
    run(make()[0], PROMPT)
    run(engine, PROMPT)
    assert engine._store.segments.path is Path.BOUNCE and not engine.alarm
    run(engine, [*text(2 * T, seed=4), 3])


def test_a_load_whose_slots_changed_while_the_device_read_them_is_not_used(
    make: Make, store: FakeStore
) -> None:
    run(make()[0], PROMPT)
    engine, _ = make()
    asked: list[int] = []

    def intact() -> bool:
        asked.append(len(store.views or ()))
        return False

    store.on_intact = intact
    run(engine, PROMPT)
    assert engine.counters["load_failures"] == 1 and engine.counters["restored_tokens"] == 0
    assert asked == [0], "not before the last copy"


# ---------------------------------------------------------------------------------------------------- bounce buffers


def test_a_ring_waits_for_the_device_before_it_is_filled_anew() -> None:
    device = EmulatedDevice()
    ring, stream = BounceRing(device, 16), device.stream("read")
    first = ring.take()
    first.memory[:4] = 1
    card = torch.zeros(BUFFERS + 1, 4, dtype=torch.uint8)
    device.hold()
    stream.run(lambda: device.copy_in(card[0], first.memory[:4]), reads=[first.region])
    first.sent = stream.record()
    others = [ring.take() for _ in range(BUFFERS - 1)]
    assert len({id(buffer) for buffer in [first, *others]}) == BUFFERS
    again: list[Any] = []
    thread = threading.Thread(target=lambda: again.append(ring.take()))
    thread.start()
    thread.join(0.2)
    assert not again, "a copy still reads it"
    device.release()
    thread.join(BOUND_S)
    assert again == [first] and (card[0] == 1).all() and not device.races
    device.close()


def test_a_ring_is_not_taken_for_one_that_is_gone() -> None:
    """The self-check's, say, for what reads the arena afterwards: Python gives the same number to both."""
    device = EmulatedDevice()
    stream = device.stream("read")
    for _ in range(20):
        ring = BounceRing(device, 16)
        stream.run(lambda: None, reads=[ring.take().region])
        del ring
    assert not device.races
    device.close()


def test_pieces_are_put_into_buffers_in_their_order() -> None:
    ring = BounceRing(CpuDevice(), 16)
    half = BUFFER_BYTES // 2
    assert list(ring.batches([])) == []
    assert list(ring.batches([half, half, half, 1, BUFFER_BYTES])) == [[0, 1], [2, 3], [4]]
    big = BounceRing(CpuDevice(), 2 * BUFFER_BYTES)
    assert list(big.batches([2 * BUFFER_BYTES, 1])) == [[0], [1]]


# --------------------------------------------------------------------------------------------- self-check and verdicts


@pytest.mark.parametrize("path", [Path.REGISTERED, Path.BOUNCE])
def test_the_self_check_takes_the_path_of_the_device(path: Path, store: FakeStore) -> None:
    store.protection = Protection.SEALED if path is Path.BOUNCE else Protection.GROUP
    device, client = EmulatedDevice(), store.connect()
    segments = Segments(device)
    segments.attach(client)
    assert segments.path is path
    check(device, torch.device("cpu"), GEOMETRY, client.open, path=path)
    assert device.pageable == 0 and not device.races
    assert (segments.registered_bytes > 0) is (path is Path.REGISTERED)
    client.close()
    segments.close()
    assert device.registered == 0
    device.close()


def test_a_device_is_checked_before_it_is_used_and_not_again_for_a_while(
    model: PreTrainedModel, store: FakeStore, tmp_path: File
) -> None:
    now = [1e9]
    verdicts = Verdicts(tmp_path / "new" / "checks.json", now=lambda: now[0])

    def start(device: EmulatedDevice) -> int:
        """How many chunks the start has written."""
        before = len(store.derived)
        Recording(model, store.connect, device=device, verdicts=verdicts).close()
        return len(store.derived) - before

    assert start(EmulatedDevice()) > 0
    assert start(EmulatedDevice()) == 0
    other = EmulatedDevice()
    other.identity = "emulated 1"
    assert start(other) > 0, "another card"
    now[0] += LASTS_S
    assert start(EmulatedDevice()) > 0, "its time is over"
    now[0] -= LASTS_S + 5
    assert start(EmulatedDevice()) > 0, "the clock was set back"
    verdicts.file.write_text('{"a": ["deep"]')
    assert start(EmulatedDevice()) > 0, "a file of which half is missing"
    assert start(EmulatedDevice()) == 0


def test_a_device_that_does_not_pass_is_refused(
    model: PreTrainedModel, store: FakeStore, tmp_path: File
) -> None:
    class Wrong(EmulatedDevice):
        def copy_in(self, target: torch.Tensor, source: np.ndarray) -> None:
            super().copy_in(target, source)
            target.view(torch.int32)[..., 0] ^= 1

    verdicts = Verdicts(tmp_path / "checks.json")
    with pytest.raises(Unsupported, match=r"did not pass its self-check: .* bytes came back otherwise"):
        Recording(model, store.connect, device=Wrong(), verdicts=verdicts)
    assert "layout" not in verdicts.file.read_text(), "its kernels are right, its copies are not"
    assert store.leases == 0 and not store.chunks


def test_what_a_verdict_is_about() -> None:
    device = EmulatedDevice()
    about = json.loads(subject(device, GEOMETRY, "registered"))
    assert set(about) == {"device", "kernel", "iommu", "torch", "attnstore", "path", "layout"}
    other = Geometry(layers=2, heads=2, head_dim=8, dtype=torch.bfloat16, chunk_tokens=4)
    assert (
        len(
            {
                subject(device, GEOMETRY, "registered"),
                subject(device, GEOMETRY, "bounce"),
                subject(device, other, "bounce"),
            }
        )
        == 3
    )
    device.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_loads_are_sampled_in_service(wrong: bool, make: Make, store: FakeStore) -> None:
    """A byte that differs in the device's memory: the load is not used, nor the device; tokens are right."""
    run(make()[0], PROMPT)
    engine, device = make(sample_every=1)
    verdicts = engine._store._proven._verdicts
    if wrong:
        copy = device.copy_in

        def spoil(target: torch.Tensor, source: np.ndarray) -> None:
            copy(target, source)
            if target.is_floating_point():  # KV, no plan
                target.view(torch.int32)[..., 0] ^= 1

        device.copy_in = spoil  # type: ignore[method-assign]
    run(engine, PROMPT)
    assert engine.counters["load_failures"] == int(wrong)
    assert ("bytes in layer" in engine.alarm) is wrong
    assert verdicts.taken_back == ["emulated 0"] * wrong  # type: ignore[attr-defined]


def test_verdicts_of_one_device_are_taken_back(tmp_path: File) -> None:
    one, other = EmulatedDevice(), EmulatedDevice()
    other.identity = "emulated 10"
    verdicts = Verdicts(tmp_path / "checks.json")
    for device in (one, other):
        verdicts.note(subject(device, GEOMETRY, "bounce"))
        verdicts.note(subject(device, GEOMETRY, "registered"))
    verdicts.take_back(one)
    assert not verdicts.passed(subject(one, GEOMETRY, "bounce"))
    assert verdicts.passed(subject(other, GEOMETRY, "bounce"))
    one.close()
    other.close()


def test_verdicts_that_cannot_be_kept_are_nobodys_fault(tmp_path: File) -> None:
    (tmp_path / "file").write_text("")
    verdicts = Verdicts(tmp_path / "file" / "checks.json")
    verdicts.note("a")
    assert not verdicts.passed("a")
