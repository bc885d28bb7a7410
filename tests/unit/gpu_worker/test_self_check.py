"""A device is trusted only if every byte comes back; with all the waits that serving needs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.gpu_worker import self_check
from kvstore.gpu_worker.device import CpuDevice, Device
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.self_check import GEOMETRIES, Refused, check
from kvstore.kernels import rotate
from kvstore.kernels.self_check import Shape

from ...cards import card, on_a_card
from .conftest import FakeStore
from .emulated import EmulatedDevice

SMALL = Geometry(layers=3, heads=2, head_dim=16, dtype=torch.bfloat16, chunk_tokens=6)


@pytest.fixture(params=[CpuDevice, EmulatedDevice, on_a_card(card)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def where(device: Device) -> torch.device:
    """Its memory."""
    return torch.device("cuda", 0) if device.name == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("geometry", [SMALL, *GEOMETRIES])
def test_a_device_that_works_passes_and_leaves_nothing(
    geometry: Geometry, device: Device, where: torch.device, store: FakeStore
) -> None:
    passed = check(device, where, geometry, store.connect().open)
    assert passed.bytes == self_check.CHUNKS * geometry.shard_bytes
    assert not store.chunks and store.leases == 0
    assert not getattr(device, "races", [])


@pytest.mark.parametrize("at", [0, 5, -1])
def test_one_byte_that_differs_is_found(
    at: int, device: Device, where: torch.device, store: FakeStore
) -> None:
    whole = [True]

    def spoil(number: int) -> bool:
        if whole.pop() if whole else False:
            shards = list(store.chunks.values())
            tail = shards[-1]
            used = SMALL.window(tail, SMALL.layers - 1, SMALL.chunk_tokens // 3).view(np.uint8)
            used.reshape(-1)[at] ^= 1
        return True

    store.on_copy = spoil
    with pytest.raises(
        Refused, match=r"2 x 16 bfloat16, chunks of 6: chunk 5, layer 2: 1 of 256 bytes came back"
    ):
        check(device, where, SMALL, store.connect().open)
    assert not store.chunks and store.leases == 0


def test_a_lease_that_is_void_is_no_pass(device: Device, where: torch.device, store: FakeStore) -> None:
    store.on_copy = lambda number: number < 2
    with pytest.raises(Refused, match="the lease was void at layer"):
        check(device, where, SMALL, store.connect().open)
    assert store.leases == 0


def test_a_store_without_room_is_no_pass(device: Device, where: torch.device, store: FakeStore) -> None:
    store.room = 3
    with pytest.raises(Refused, match="has no room for 6 chunks: GRANTED, GRANTED, GRANTED, FULL"):
        check(device, where, SMALL, store.connect().open)


# ------------------------------------------------------------------------------------------------- kvctl doctor gpu


def findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: FakeStore, *devices: Any
) -> list[dict[str, Any]]:
    monkeypatch.setattr("kvstore.client.connect", lambda *given, **named: nullcontext(store.connect()))
    monkeypatch.setattr(self_check, "devices", lambda: iter(devices))
    monkeypatch.setattr(self_check, "LINK_BYTES", 1 << 12)
    monkeypatch.setattr(self_check, "KERNELS_OF", Shape(2, 1, 16, torch.float16, 16, 32, 2, pairs=8))
    monkeypatch.setattr(self_check, "VOCABULARY", 96)
    with suppress(SystemExit):
        self_check.main(["--run-dir", "/nowhere"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_doctor_says_of_each_device_how_fast_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: FakeStore
) -> None:
    cpu = torch.device("cpu")
    given = [("a card", cpu, lambda: EmulatedDevice(late_s=0)), ("cpu", cpu, CpuDevice)]
    card, host = findings(monkeypatch, capsys, store, *given)
    assert card["ok"] and "registered with it; the link takes" in card["detail"]
    assert "every kernel gives what it should, 2/1 heads of 16 float16, chunks of 16" in card["detail"]
    assert (
        host["ok"]
        and "kernel" not in host["detail"]
        and self_check.NO_GPU in host["detail"]
        and "link" not in host["detail"]
    )


def test_the_doctor_says_where_the_pages_are_that_a_card_copies_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: FakeStore
) -> None:
    device = EmulatedDevice(late_s=0)
    device.node = 1
    looked: list[tuple[int, int]] = []

    def nodes_of(address: int, size: int) -> Counter[int]:
        looked.append((address, size))
        return Counter({0: 1, 1: 2})

    monkeypatch.setattr(self_check, "nodes_of", nodes_of)
    (card,) = findings(monkeypatch, capsys, store, ("a card", torch.device("cpu"), lambda: device))
    assert looked and card["ok"], "what is registered is looked at while it is mapped"
    told = f"{len(looked)} on node 0, {2 * len(looked)} on node 1"
    assert (
        f"; the device is near NUMA node 1; of the arena's pages that were looked at: {told}"
        in card["detail"]
    )


def test_the_doctor_names_a_kernel_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: FakeStore
) -> None:
    monkeypatch.setattr(rotate.cpu, "rotate", lambda keys, by, out: out.copy_(keys))
    given = ("a card", torch.device("cpu"), lambda: EmulatedDevice(late_s=0))
    (card,) = findings(monkeypatch, capsys, store, given)
    assert not card["ok"] and "a kernel is wrong: rotate, 2/1 heads of 16 float16" in card["detail"]
    assert "another version of the driver" in card["remedy"]


def test_a_device_that_cannot_be_had_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: FakeStore
) -> None:
    def make() -> CpuDevice:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    (finding,) = findings(monkeypatch, capsys, store, ("a card", torch.device("cpu"), make))
    assert not finding["ok"] and "too old" in finding["detail"] and "driver" in finding["remedy"]
    with monkeypatch.context() as patched:
        patched.setattr(self_check, "check", lambda *given, **named: torch.empty(1 << 60))
        (finding,) = findings(patched, capsys, store, ("a card", torch.device("cpu"), CpuDevice))
    assert not finding["ok"] and "memory" in finding["detail"]
