"""The staging allocator: nothing overlaps, nothing is lost, nothing is given back twice."""

from __future__ import annotations

import random

import pytest

from kvstore.client.staging import ALIGNMENT, PAGE, FreeList, footprint


def test_footprints_are_aligned() -> None:
    assert footprint([1]) == ALIGNMENT
    assert footprint([ALIGNMENT, ALIGNMENT + 1]) == 3 * ALIGNMENT
    assert footprint([PAGE - 1]) == PAGE
    assert footprint([PAGE + 1, 5]) == 2 * PAGE + ALIGNMENT
    assert footprint([]) == 0


def test_large_pieces_start_at_a_page() -> None:
    space = FreeList(4 * PAGE)
    assert space.take(ALIGNMENT) == 0
    assert space.take(PAGE) == PAGE
    assert space.take(ALIGNMENT) == ALIGNMENT, "the gap before the page is used"
    assert space.take(2 * PAGE) == 2 * PAGE
    assert space.take(PAGE) is None
    assert space.free_bytes == PAGE - 2 * ALIGNMENT


@pytest.mark.parametrize("seed", range(20))
def test_against_a_map_of_every_cache_line(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    size = 64 * PAGE
    space = FreeList(size)
    owner: list[int] = [0] * (size // ALIGNMENT)
    taken: dict[int, tuple[int, int]] = {}
    for number in range(1, 2000):
        if taken and chance.random() < 0.5:
            gone = chance.choice(list(taken))
            start, length = taken.pop(gone)
            space.give_back(start, length)
            for line in range(start // ALIGNMENT, (start + length) // ALIGNMENT):
                assert owner[line] == gone
                owner[line] = 0
        else:
            length = footprint([chance.choice([1, 100, PAGE, 3 * PAGE, 10 * PAGE + 1])])
            start_or_none = space.take(length)
            if start_or_none is None:
                step = PAGE if length >= PAGE else ALIGNMENT
                free = ["x" if line else "." for line in owner]
                for at in range(0, size - length + 1, step):
                    room = free[at // ALIGNMENT : (at + length) // ALIGNMENT]
                    assert "x" in room, f"{length} bytes fit at {at}"
                continue
            for line in range(start_or_none // ALIGNMENT, (start_or_none + length) // ALIGNMENT):
                assert owner[line] == 0
                owner[line] = number
            taken[number] = (start_or_none, length)
        assert space.free_bytes == owner.count(0) * ALIGNMENT
    for start, length in taken.values():
        space.give_back(start, length)
    assert space.take(size) == 0, "the free ranges have joined"


@pytest.mark.parametrize("again", [(0, PAGE), (PAGE // 2, PAGE), (PAGE, ALIGNMENT)])
def test_what_is_free_cannot_be_given_back(again: tuple[int, int]) -> None:
    space = FreeList(3 * PAGE)
    assert space.take(PAGE) == 0
    assert space.take(PAGE) == PAGE
    space.give_back(0, PAGE)
    if again[0] == PAGE:
        space.give_back(PAGE, PAGE)
    with pytest.raises(AssertionError, match="given back twice"):
        space.give_back(*again)


def test_no_memory_at_all() -> None:
    assert FreeList(0).take(ALIGNMENT) is None
