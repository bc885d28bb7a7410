"""The cache whose history arrives late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.restored_cache import GrowingLayer, LoadFailed, RestoredCache

GEOMETRY = Geometry(layers=2, heads=2, head_dim=4, dtype=torch.float32)


def kv(tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4)


OPERATIONS: dict[str, Callable[[DynamicLayer], object]] = {
    "append": lambda layer: layer.update(*kv(3)),
    "crop": lambda layer: layer.crop(-2),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([0])),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([0])),
    "offload": lambda layer: layer.offload(),
    "keys": lambda layer: layer.keys,
    "values": lambda layer: layer.values,
}


@pytest.mark.parametrize("capacity", [0, 7, 1000])
@pytest.mark.parametrize("name", [*OPERATIONS, "reset"])
def test_a_growing_layer_does_what_hugging_face_s_does(name: str, capacity: int) -> None:
    ours, theirs = GrowingLayer(capacity=capacity), DynamicLayer()
    operation = (OPERATIONS | {"reset": lambda layer: layer.reset()})[name]
    for step in (5, 1, 1, 9, 1):
        torch.manual_seed(step)
        batch = 1 if ours.keys is None else ours.keys.shape[0]
        new = kv(step, batch)
        for mine, other in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(mine, other)
        if name == "append" or step == 9:
            for layer in (ours, theirs):
                torch.manual_seed(99)
                operation(layer)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        assert ours.is_initialized == theirs.is_initialized
        assert (ours.keys is None) == (theirs.keys is None)


def test_early_initialization_makes_room() -> None:
    cache = RestoredCache(GEOMETRY, capacity=10)
    cache.early_initialization(1, 2, 4, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    new = kv(3)
    assert torch.equal(cache.update(*new, layer_idx=1)[0], new[0])


def test_a_step_copies_only_what_is_new() -> None:
    layer = GrowingLayer(capacity=100)
    first, _ = layer.update(*kv(50))
    for _ in range(50):
        keys, _ = layer.update(*kv(1))
    assert keys.data_ptr() == first.data_ptr()
    moved, _ = layer.update(*kv(1))  # out of room: once, and with room for the next
    again, _ = layer.update(*kv(1))
    assert moved.data_ptr() == again.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("name", ["append", "crop", "repeat", "select", "reorder"])
@pytest.mark.parametrize("capacity", [0, 1000])
def test_a_snapshot_never_changes(name: str, capacity: int) -> None:
    """What the saver relies on: see saver._Job."""
    cache = RestoredCache(GEOMETRY, capacity=capacity)
    for layer in range(2):
        cache.update(*kv(10), layer_idx=layer)
    snapshot = cache.snapshot()
    before = [(keys.clone(), values.clone()) for keys, values in snapshot]
    for layer in cache.layers:
        OPERATIONS[name](layer)
        layer.update(*kv(40, layer.keys.shape[0]))
        layer.update(*kv(1, layer.keys.shape[0]))
    for now, then in zip(snapshot, before, strict=True):
        assert torch.equal(now[0], then[0]) and torch.equal(now[1], then[1])


def restored(wait: Callable[[int], None]) -> RestoredCache:
    """Six tokens of history, 0.5 everywhere."""
    cache = RestoredCache(GEOMETRY, capacity=10, restored=6)
    for target in cache.targets():
        assert target.shape == (2, 2, 10, 4)
        target[:, :, :6] = torch.tensor(0.5).view(torch.int32).item()
    cache.expect(wait)
    return cache


def test_lengths_are_known_before_the_history_is_there() -> None:
    def never(layer: int) -> None:
        raise AssertionError("waited")

    cache = restored(never)
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(3, 0) == (9, 0)
    assert cache.is_initialized
    assert cache.get_max_length() == -1
    assert not any(cache.is_sliding)


@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_touches_tensors_waits_for_its_own_layer_first(name: str) -> None:
    waited: list[int] = []
    cache = restored(waited.append)
    OPERATIONS[name](cache.layers[1])
    assert waited == [1]
    OPERATIONS[name](cache.layers[1])
    assert waited == [1]
    assert (cache.layers[1].keys[:, :, :4] == 0.5).all()
    assert waited == [1]


def test_new_tokens_come_after_the_history() -> None:
    cache = restored(lambda layer: None)
    new = kv(3)
    keys, values = cache.update(*new, layer_idx=0)
    assert keys.shape == values.shape == (1, 2, 9, 4)
    assert (keys[:, :, :6] == 0.5).all() and torch.equal(keys[:, :, 6:], new[0])
    assert (values[:, :, :6] == 0.5).all() and torch.equal(values[:, :, 6:], new[1])


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_history_that_did_not_arrive_is_never_seen(name: str) -> None:
    def fail(layer: int) -> None:
        raise LoadFailed("gone")

    cache = restored(fail)
    for _ in range(2):
        with pytest.raises(LoadFailed):
            OPERATIONS[name](cache.layers[0])


def test_reset_forgets_the_history() -> None:
    cache = restored(lambda layer: pytest.fail("waited"))
    cache.reset()
    assert cache.get_seq_length() == 0
    new = kv(2)
    assert torch.equal(cache.update(*new, layer_idx=0)[0], new[0])
