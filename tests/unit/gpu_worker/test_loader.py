"""One load: order, failures, deadline, and that the lease always goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.gpu_worker import bounce
from kvstore.gpu_worker.device import CpuDevice, Device
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.loader import Loader, LoadFailed, Piece, Target
from kvstore.types import Outcome

from ...cards import card, on_a_card
from .conftest import FakeLease, FakeStore
from .emulated import EmulatedDevice

GEOMETRY = Geometry(layers=3, heads=2, head_dim=4, dtype=torch.float32, chunk_tokens=8)
WANTED = [Piece(0, 0, 8), Piece(2, 8, 5)]


@pytest.fixture(
    params=[
        *("cpu", "emulated", "emulated, bounce"),
        *(on_a_card(name, id=name) for name in ("cuda", "cuda, bounce")),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    kinds: dict[str, Callable[[], Any]] = {"cpu": CpuDevice, "emulated": EmulatedDevice, "cuda": card}
    made = kinds[request.param.partition(",")[0]]()
    yield made
    made.close()
    assert not getattr(made, "races", ())


@pytest.fixture
def loader(device: Device, request: pytest.FixtureRequest) -> Iterator[Loader]:
    bounce = request.node.callspec.params["device"].endswith("bounce")
    made = Loader(GEOMETRY, device=device, bounce=bounce)
    yield made
    made.close()
    assert not bounce or getattr(device, "pageable", 0) == 0


def lease(store: FakeStore) -> FakeLease:
    """A hit, a miss, and a hit whose bytes count upwards."""
    shards = [
        np.zeros(GEOMETRY.shard_bytes, np.uint8),
        None,
        np.arange(GEOMETRY.shard_bytes // 4, dtype=np.int32).view(np.uint8),
    ]
    store.leases += 1
    return FakeLease(store, shards, (Outcome.HIT, Outcome.MISS, Outcome.HIT))


class Into:
    """Where a load goes: memory of the device, three layers."""

    def __init__(self, device: Device) -> None:
        self.layers: list[Any] = [np.full((2, 2, 20, 4), -7, np.int32) for _ in range(3)]
        if not device.in_host_memory:
            where = "cuda" if device.name == "cuda" else "cpu"
            self.layers = [torch.from_numpy(layer).to(where) for layer in self.layers]

    def __getitem__(self, layer: int) -> np.ndarray:
        """What is there now."""
        return np.asarray(torch.as_tensor(self.layers[layer]).cpu())


def placing(into: Into) -> Target:
    layers = into.layers
    return lambda layer, piece: layers[layer][:, :, piece.first_token : piece.first_token + piece.token_count]


def test_chunks_land_at_their_tokens_and_nowhere_else(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    into = Into(device)
    load = loader.start(lease(store), WANTED, placing(into), deadline_s=30)
    for layer in range(3):
        load.wait(layer)
        assert (into[layer][:, :, :8] == 0).all()
        start = layer * GEOMETRY.slice_bytes // 4
        assert (into[layer][:, :, 8:13].ravel() == np.arange(start, start + 2 * 2 * 5 * 4)).all()
        assert (into[layer][:, :, 13:] == -7).all()
    loader.close()
    assert store.leases == 0
    assert load.bytes == 13 * GEOMETRY.token_bytes * 3


def test_a_layer_is_handed_out_while_the_next_is_copied(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    go = threading.Event()
    store.on_copy = lambda number: number == 0 or go.wait(30)
    load = loader.start(lease(store), WANTED, placing(Into(device)), deadline_s=30)
    load.wait(0)  # would hang for layers 1 and 2
    go.set()
    load.wait(2)


def test_a_void_layer_voids_the_load(store: FakeStore, loader: Loader, device: Device) -> None:
    store.on_copy = lambda number: number != 1
    load = loader.start(lease(store), WANTED, placing(Into(device)), deadline_s=30)
    with pytest.raises(LoadFailed, match="void at layer 1"):
        load.wait(1)
    with pytest.raises(LoadFailed, match="void at layer 1"):
        load.wait(0)
    loader.close()
    assert store.leases == 0


def test_pieces_that_go_to_several_places_are_the_stores_or_void(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    """As those of a module that stands between chunks of the pool."""
    into = Into(device)
    whole = placing(into)

    def split(layer: int, piece: Piece) -> list[np.ndarray]:
        there = whole(layer, piece)
        return [there[:, :, :3], there[:, :, 3:]]

    load = loader.start(lease(store), WANTED, split, deadline_s=30)
    for layer in range(3):
        load.wait(layer)
        assert (into[layer][:, :, :8] == 0).all()
        start = layer * GEOMETRY.slice_bytes // 4
        assert (into[layer][:, :, 8:13].ravel() == np.arange(start, start + 2 * 2 * 5 * 4)).all()
    store.on_copy = lambda number: number != 1
    load = loader.start(lease(store), WANTED, split, deadline_s=30)
    with pytest.raises(LoadFailed, match="void at layer 1"):
        load.wait(1)
    loader.close()
    assert store.leases == 0


def test_a_layer_that_comes_after_the_deadline_does_not_count(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    go = threading.Event()
    store.on_copy = lambda number: go.wait(30)
    load = loader.start(lease(store), WANTED, placing(Into(device)), deadline_s=0)
    with pytest.raises(LoadFailed, match="layer 0 was not in"):
        load.wait(0)
    go.set()
    loader.close()
    with pytest.raises(LoadFailed, match="layer 0 was not in"):
        load.wait(0)
    assert store.leases == 0


def test_a_cancelled_load_stops_and_gives_its_lease_back(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    copying, go = threading.Event(), threading.Event()

    def copy(number: int) -> bool:
        copying.set()
        return go.wait(30)

    store.on_copy = copy
    taken = lease(store)
    load = loader.start(taken, WANTED, placing(Into(device)), deadline_s=30)
    assert copying.wait(30)
    load.cancel("enough")
    assert store.leases == 1  # the copy still reads
    go.set()
    loader.close()
    assert store.leases == 0
    assert taken.copies == 1
    with pytest.raises(LoadFailed, match="enough"):
        load.wait(0)


def test_a_load_that_was_cancelled_before_it_began_copies_nothing(
    store: FakeStore, loader: Loader, device: Device
) -> None:
    go = threading.Event()
    store.on_copy = lambda number: go.wait(30)
    loader.start(lease(store), WANTED, placing(Into(device)), deadline_s=30)
    second = lease(store)
    loader.start(second, WANTED, placing(Into(device)), deadline_s=30).cancel("enough")
    go.set()
    loader.close()
    assert second.copies == 0
    assert store.leases == 0


def test_one_bounce_buffer_is_enough(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled with each layer in turn, once the device has read the one before."""
    monkeypatch.setattr(bounce, "BUFFERS", 1)
    device = EmulatedDevice()
    into = Into(device)
    loader = Loader(GEOMETRY, device=device, bounce=True)
    load = loader.start(lease(store), WANTED, placing(into), deadline_s=30)
    load.settle()
    for layer in range(3):
        start = layer * GEOMETRY.slice_bytes // 4
        assert (into[layer][:, :, 8:13].ravel() == np.arange(start, start + 2 * 2 * 5 * 4)).all()
    loader.close()
    device.close()
    assert not device.races and store.leases == 0
