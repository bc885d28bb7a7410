"""Searches for reference cycles: what survives a long one is not looked at again, and all else is as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvstore.server.garbage import LONG_S, ShortSearches, no_searches


class Clock:
    """Each search takes `seconds`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


class Node:
    other: Node


@pytest.fixture
def clock() -> Iterator[Clock]:
    gc.unfreeze()
    clock = Clock()
    searches = ShortSearches(clock)
    yield clock
    searches.close()
    gc.unfreeze()


def test_what_survives_a_long_search_is_frozen(clock: Clock) -> None:
    kept = [[number] for number in range(10_000)]
    clock.seconds = LONG_S / 2
    gc.collect()
    assert gc.get_freeze_count() == 0
    clock.seconds = 2 * LONG_S
    gc.collect(1)
    assert gc.get_freeze_count() == 0, "a search that leaves most out is short by itself"
    gc.collect()
    assert gc.get_freeze_count() >= len(kept)


def test_new_cycles_go_all_the_same(clock: Clock) -> None:
    clock.seconds = 2 * LONG_S
    gc.collect()
    one, two = Node(), Node()
    one.other, two.other = two, one
    gone = weakref.ref(one)
    del one, two
    gc.collect()
    assert gone() is None


def test_frozen_objects_go_when_nobody_refers_to_them(clock: Clock) -> None:
    one = Node()
    clock.seconds = 2 * LONG_S
    gc.collect()
    gone = weakref.ref(one)
    del one
    assert gone() is None


def test_no_search_while_much_is_made_that_stays() -> None:
    gc.unfreeze()
    try:
        with no_searches():
            assert not gc.isenabled()
            kept = [[number] for number in range(1_000)]
        assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
        with pytest.raises(KeyError), no_searches():
            raise KeyError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
