"""The paged pool beside a plain record of who holds what."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Geometry
from kvstore.types import ChunkKey

GEOMETRY = Geometry(layers=2, heads=2, head_dim=4, dtype=torch.float32, chunk_tokens=16)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(4, "little"))


@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_conserved_whatever_comes(seed: int) -> None:
    choose = random.Random(seed)
    pool = HbmPool(GEOMETRY, 12)
    held: list[list[int]] = []
    tree: dict[ChunkKey, int] = {}
    most = 0
    for _ in range(300):
        match choose.choice(["take", "take", "adopt", "publish", "drop"]):
            case "take":
                count, free = choose.randrange(6), pool.free
                taken = pool.take(count)
                assert (taken is None) == (count > free)
                if taken is not None:
                    assert len(set(taken)) == count
                    held.append(taken)
            case "adopt":
                wanted = [key(choose.randrange(8)) for _ in range(3)]
                found = pool.find(wanted)
                expected = [tree.get(one) for one in wanted]
                assert found == expected[: expected.index(None) if None in expected else 3]
                pool.hold(found)
                held.append(found)
            case "publish" if any(held):
                chunk = choose.choice([chunk for chunks in held for chunk in chunks])
                name = key(choose.randrange(8))
                if chunk not in tree.values():
                    pool.publish(chunk, name)
                    tree.setdefault(name, chunk)
            case "drop" if held:
                pool.drop(held.pop(choose.randrange(len(held))))
                used = {chunk for chunks in held for chunk in chunks}
                tree = {name: chunk for name, chunk in tree.items() if chunk in used}
        pool.check_integrity(held)
        used = {chunk for chunks in held for chunk in chunks}
        most = max(most, len(used))
        assert pool.used == len(used) and pool.peak_chunks == most
    for chunks in held:
        pool.drop(chunks)
    pool.check_integrity([])
    assert pool.free == 12 and pool.find([key(number) for number in range(8)]) == []


def test_memory_that_is_not_needed_is_not_touched() -> None:
    pool = HbmPool(GEOMETRY, 8)
    first = pool.take(3)
    assert first == [0, 1, 2]
    pool.drop([1])
    assert pool.take(2) == [1, 3]


def test_what_it_says_of_itself() -> None:
    pool = HbmPool(GEOMETRY, 8)
    assert [list(layer.shape) for layer in pool.layers] == [[8, 2, 2, 16, 4]] * 2
    assert pool.take(3)
    pool.publish(0, key(1))
    assert repr(pool) == "HbmPool(3/8 chunks in use, 1 in the tree)"
    assert pool.peak_bytes == 3 * 2 * 2 * 2 * 16 * 4 * 4
    with pytest.raises(ValueError, match="chunks is 0"):
        HbmPool(GEOMETRY, 0)
