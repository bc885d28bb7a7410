"""Where a request can go on, and what of its groups it needs for that."""

from __future__ import annotations

import pytest

from kvstore.gpu_worker.connectors.offload import Group, needed
from kvstore.types import ChunkKey

SIZE = 32
ENDS = range(SIZE, 321, SIZE)


def group(number: int, kind: str, window: int | None = None, **more: bool) -> Group:
    return Group(number, kind, 2, SIZE, 4096, window, more.get("draft", False), SIZE)


FULL, WINDOW, STATE = group(0, "full"), group(1, "window", 96), group(2, "state", 0)


def ask(*groups: Group) -> dict[ChunkKey, tuple[int, int]]:
    return {ChunkKey(f"{each.number}/{end}".encode()): (each.number, end) for each in groups for end in ENDS}


def places(
    groups: tuple[Group, ...], gone: set[tuple[int, int]], keys_max: int = 1000
) -> list[tuple[int, int]]:
    asked = ask(*groups)
    there = {key for key, place in asked.items() if place not in gone}
    return [asked[key] for key in needed(groups, asked, there, keys_max=keys_max)]


def test_all_there() -> None:
    found = places((FULL, WINDOW, STATE), set())
    assert found == [*((0, end) for end in ENDS), (1, 256), (1, 288), (1, 320), (2, 320)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_group_that_is_missing_is_a_miss(number: int) -> None:
    """However much of the others there is."""
    assert places((FULL, WINDOW, STATE), {(number, end) for end in ENDS}) == []


def test_the_longest_boundary_at_which_all_agree() -> None:
    gone = {(0, 320), (1, 224), *((2, end) for end in ENDS if end % 64)}
    # A state at every second end; the window's gap keeps it from 224, 256 and 288; full ends at 288.
    assert places((FULL, WINDOW, STATE), gone) == [
        *((0, end) for end in range(32, 193, 32)),
        *((1, end) for end in (128, 160, 192)),
        (2, 192),
    ]


def test_a_state_before_or_behind_is_of_no_use() -> None:
    assert places((FULL, STATE), {(2, end) for end in ENDS if end != 160} | {(0, 160)}) == []


def test_a_drafters_last_chunk_is_given_up() -> None:
    drafter = group(1, "full", draft=True)
    found = places((FULL, drafter), {(1, 320)})
    assert found == [*((0, end) for end in range(32, 257, 32)), *((1, end) for end in range(32, 289, 32))]


def test_what_was_not_asked_about_is_the_engines() -> None:
    asked = {key: place for key, place in ask(FULL, WINDOW).items() if place[1] > 192 or place[0] == 1}
    chosen = needed((FULL, WINDOW), asked, set(asked), keys_max=9)
    assert [asked[key] for key in chosen][:2] == [(0, 224), (0, 256)]


def test_a_bound_on_keys_is_a_shorter_prefix() -> None:
    assert places((FULL, STATE), set(), keys_max=5) == [*((0, end) for end in (32, 64, 96, 128)), (2, 128)]


def test_keys_that_nobody_can_place_are_all_taken() -> None:
    """An engine that names no positions, or has a group that nobody has heard of."""
    asked = {ChunkKey(b"a"): (0, 0), ChunkKey(b"b"): (9, 64)}
    assert needed((FULL,), asked, {ChunkKey(b"a"), ChunkKey(b"b")}, keys_max=9) == [b"a", b"b"]


def test_tails() -> None:
    asked = {ChunkKey(f"{number}/{end}".encode()): (number, end) for end in (40, 56) for number in (0, 2)}
    assert needed((FULL, STATE), asked, set(asked) - {b"2/56"}, keys_max=9) == [b"0/40", b"2/40"]
