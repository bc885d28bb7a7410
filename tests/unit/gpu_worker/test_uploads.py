"""Small arrays on their way to the device: they are what they were at the call, and no buffer is written while it is
read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.gpu_worker.uploads import BUFFER_BYTES, BUFFERS, Uploads
from kvstore.kernels.forest import COUNT, Forest, Plan

from .emulated import EmulatedDevice


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(late_s=0)
    yield device
    device.close()


def test_what_arrives_is_what_was_there_at_the_call(device: EmulatedDevice) -> None:
    upload = Uploads(device)
    there = [torch.zeros(5, dtype=torch.int32), torch.zeros(3, 7, dtype=torch.long)]
    for number in range(3 * BUFFERS):
        here = [torch.full_like(tensor, number + at) for at, tensor in enumerate(there)]
        upload(list(zip(there, here, strict=True)))
        for tensor in here:
            tensor.zero_()
        assert [tensor.unique().tolist() for tensor in there] == [[number], [number + 1]]
    upload([])
    assert not device.races and device.pageable == 0


def test_more_than_a_buffer_has_room_for(device: EmulatedDevice) -> None:
    upload = Uploads(device)
    there = torch.zeros(BUFFER_BYTES, dtype=torch.int32)
    for seed in range(2 * BUFFERS):
        here = torch.randint(0, 1 << 20, there.shape, generator=torch.Generator().manual_seed(seed)).int()
        upload([(there[:3], here[:3]), (there, here)])
        assert torch.equal(there, here)
    assert not device.races and device.pageable == 0


def test_a_plan_is_the_same_whichever_way_it_got_there(device: EmulatedDevice) -> None:
    """A random life of sequences; after each change the arrays of both forests are equal."""
    options = {"chunk_tokens": 4, "chunks": 64, "sequences_max": 6, "split_tokens": 8, "tile_sequences": 2}
    here, there = Forest(**options), Forest(**options, upload=Uploads(device))
    draw = np.random.default_rng(1)
    for _ in range(300):
        row, leaves = int(draw.integers(6)), draw.random() < 0.1
        tokens = here.length(row) if row in here else 0
        for forest in (here, there):
            if row not in forest:
                forest.join(row, [0, 1, 2, 10 + row], 14)
            elif tokens > 40 or leaves:
                forest.leave(row)
            else:
                forest.append(row, None if tokens % 4 else 20 + tokens // 4)
        plans: list[Plan] = [forest.plan() for forest in (here, there)]
        for one, other in zip(plans[0].arrays(), plans[1].arrays(), strict=True):
            assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
        assert plans[0].capacity == plans[1].capacity
    assert not device.races and device.pageable == 0


def test_of_a_forest_with_much_room_only_what_is_used_is_sent() -> None:
    """There is room for the worst case: of 256 sequences of 4,096 tokens 67,840 items, that is 4 MB."""
    sent: list[int] = []

    def upload(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        sent.append(sum(here.nbytes for _, here in pairs))
        for there, here in pairs:
            there.copy_(here)

    forest = Forest(
        chunk_tokens=64,
        chunks=9000,
        sequences_max=256,
        split_tokens=512,
        items_max=67_840,
        partials_max=67_840,
        upload=upload,
    )
    for row in range(8):
        forest.join(row, range(64 * row, 64 * (row + 1)), 4096)
    plan = forest.plan()
    used = {int(item) for item in plan.schedule[: plan.capacity.items] if plan.items[item, COUNT] > 0}
    assert len(used) == 64 and sent[-1] < 10_000
    for row in range(7):
        forest.leave(row)
    plan = forest.plan()
    used = {int(item) for item in plan.schedule[:8] if plan.items[item, COUNT] > 0}
    assert len(used) == 8, "those that are used come first"
    forest.leave(7)
    assert not (forest.plan().items[:, COUNT] > 0).any()
    forest.join(3, [], 0)
    forest.plan()
