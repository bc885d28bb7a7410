"""The forest: what it shares, what its arrays say, and that small changes stay small."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.forest import BEGIN, COUNT, LENGTH, PARTIAL, PARTIALS, SLOT, TOKENS, Forest

from .conftest import Case

CHUNK = 4


def small(**changes: object) -> Forest:
    base = {"chunk_tokens": CHUNK, "chunks": 100, "sequences_max": 8, "split_tokens": 2 * CHUNK}
    return Forest(**base | {"tile_sequences": 2, "items_max": 64, "partials_max": 64} | changes)


def told(forest: Forest) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """What the arrays say: of each token of each row, (chunk, number of the partial result) of every item with it."""
    plan = forest.plan()
    items, item_chunks, schedule, order, rows = (array.numpy() for array in plan.arrays())
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in schedule.tolist():
        begin, count, first, most, partial = items[item].tolist()
        for row in order[begin : begin + count].tolist():
            for token in range(first, min(first + most, int(rows[row, LENGTH]))):
                chunk = int(item_chunks[item, (token - first) // plan.chunk_tokens])
                found.setdefault((row, token), []).append((chunk, partial))
    return found


def check(forest: Forest, sequences: dict[int, tuple[list[int], int]]) -> None:
    """Every token is in one item, with its chunk; partial results are numbered in order of the tokens, without gaps."""
    forest.check_integrity()
    found = told(forest)
    rows = forest.plan().rows.numpy()
    assert len(found) == sum(tokens for _, tokens in sequences.values())
    slots: list[int] = []
    for row, (chunks, tokens) in sequences.items():
        places = [found[row, token] for token in range(tokens)]
        assert [len(place) for place in places] == [1] * tokens
        assert [place[0][0] for place in places] == [
            chunks[token // forest.chunk_tokens] for token in range(tokens)
        ]
        partials = [place[0][1] for place in places]
        assert partials == sorted(partials)
        assert sorted(set(partials)) == list(range(rows[row, PARTIALS]))
        slots += range(rows[row, SLOT], rows[row, SLOT] + rows[row, PARTIALS])
        assert forest.chunks_of(row) == chunks and forest.length(row) == tokens
    assert sorted(slots) == list(range(len(slots))), "two sequences write the same partial result"


def runs(forest: Forest) -> list[tuple[list[int], list[int], int]]:
    return sorted((sorted(rows), chunks, first) for rows, chunks, first in forest.runs())


def shared_runs(
    sequences: dict[int, tuple[list[int], int]], chunk_tokens: int
) -> list[tuple[list[int], list[int], int]]:
    """By definition: each chunk's place and set of sequences; neighbours with the same set are one run."""
    users: dict[tuple[int, ...], list[int]] = {}
    for row, (chunks, tokens) in sequences.items():
        for number in range(len(chunks)):
            full = (number + 1) * chunk_tokens <= tokens
            users.setdefault((*chunks[: number + 1], *(() if full else (-1, row))), []).append(row)
    # A prefix stands for its last chunk; what the same sequences use, one after the other, is one run
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for prefix, rows in users.items():
        number = len(prefix) - (3 if -1 in prefix else 1)
        found.setdefault(tuple(sorted(rows)), []).append((number, prefix[number]))
    return sorted(
        (list(rows), [chunk for _, chunk in sorted(chunks)], min(chunks)[0]) for rows, chunks in found.items()
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((1, 2, 5)), st.sampled_from((1, 2, 3)), st.sampled_from((1, 4)))
def test_any_changes_leave_what_a_new_forest_has(seed: int, tile: int, split: int, chunk_tokens: int) -> None:
    draw = random.Random(seed)
    case = Case(chunk_tokens=chunk_tokens, split_chunks=split, tile_sequences=tile, chunks=400, seed=seed)
    forest = case.forest()
    for _ in range(40):
        row = draw.randrange(case.rows)
        if row not in case.sequences:
            like = draw.choice([None, *case.sequences])
            case.add(row, like=like, shared=draw.randint(0, 6), more=draw.randrange(3 * chunk_tokens))
            forest.join(row, *case.sequences[row])
        elif draw.random() < 0.5:
            forest.leave(row)
            del case.sequences[row]
        else:
            for _ in range(draw.randint(1, 2 * chunk_tokens)):
                chunks, tokens = case.sequences[row]
                new = case.unused.pop() if tokens % chunk_tokens == 0 else None
                forest.append(row, new)
                case.sequences[row] = (chunks if new is None else [*chunks, new], tokens + 1)
        check(forest, case.sequences)
        assert runs(forest) == shared_runs(case.sequences, chunk_tokens)
    assert runs(forest) == runs(case.forest())


def test_runs_are_maximal_and_tails_private() -> None:
    forest = small()
    forest.join(0, [1, 2, 3, 4], 16)
    forest.join(1, [1, 2, 5], 10)
    forest.join(2, [1, 2, 5], 11)  # the same chunk 5, but not full
    forest.join(3, [7], 4)
    forest.join(4, [], 0)
    assert runs(forest) == [
        ([0], [3, 4], 2),
        ([0, 1, 2], [1, 2], 0),
        ([1], [5], 2),
        ([2], [5], 2),
        ([3], [7], 0),
    ]
    forest.leave(0)
    assert ([1, 2], [1, 2], 0) in runs(forest)
    forest.leave(1)
    assert runs(forest) == [([2], [1, 2, 5], 0), ([3], [7], 0)]


def test_a_chunk_that_fills_up_can_be_shared_from_then_on() -> None:
    forest = small()
    forest.join(0, [1], 3)
    forest.join(1, [1], 3)
    forest.append(0)
    forest.join(2, [1, 9], 6)
    assert ([0, 2], [1], 0) in runs(forest)
    assert ([1], [1], 0) in runs(forest)


def test_without_sharing_every_run_is_private() -> None:
    forest = small(share=False)
    sequences = {row: ([1, 2, 3], 12) for row in range(3)}
    for row, sequence in sequences.items():
        forest.join(row, *sequence)
    check(forest, sequences)
    assert runs(forest) == [([row], [1, 2, 3], 0) for row in range(3)]


def test_items_are_bounded_and_longest_come_first() -> None:
    forest = small(sequences_max=8, tile_sequences=3)
    for row in range(7):
        forest.join(row, [*range(5), 10 + row], 5 * CHUNK + 1)
    plan = forest.plan()
    items, schedule = plan.items.numpy(), plan.schedule.numpy()
    used = items[schedule][: int((items[:, COUNT] > 0).sum())]
    assert (used[:, COUNT] <= 3).all() and (used[:, TOKENS] <= 2 * CHUNK).all()
    # Five shared chunks in pieces of 2, 2, 1, each for 3 + 3 + 1 sequences, then seven tails of one token
    assert used[:, COUNT].tolist() == [3, 3, 1] * 3 + [1] * 7
    assert used[:9, TOKENS].tolist() == [8] * 6 + [4] * 3
    assert used[:3, PARTIAL].tolist() == [0, 0, 0] and used[:3, BEGIN].tolist() == [0, 3, 6]
    assert sorted(schedule.tolist()) == list(range(forest.items_max))


def test_a_token_more_changes_a_length_and_no_address() -> None:
    forest = small()
    forest.join(0, [1, 2], 5)
    forest.join(1, [1, 3], 5)
    plan = forest.plan()
    before = [array.clone() for array in plan.arrays()]
    addresses = [array.data_ptr() for array in plan.arrays()]
    for _ in range(3):
        forest.step()
    assert forest.plan() is plan
    assert [array.data_ptr() for array in plan.arrays()] == addresses
    changed = [
        not np.array_equal(old.numpy(), new.numpy()) for old, new in zip(before, plan.arrays(), strict=True)
    ]
    assert changed == [False, False, False, False, True]
    assert (plan.rows.numpy() - before[4].numpy())[:2].tolist() == [[3, 0, 0], [3, 0, 0]]


def test_a_join_touches_only_the_items_on_its_path() -> None:
    forest = small(sequences_max=8)
    for row, chunks in enumerate(([1, 2, 3], [1, 2, 4], [5, 6, 7], [5, 6, 8], [9])):
        forest.join(row, chunks, len(chunks) * CHUNK)
    items, order = forest.plan().items.numpy(), forest.plan().order.numpy()
    others = [item for item in np.flatnonzero(items[:, COUNT]) if order[items[item, BEGIN]] in (0, 1, 4)]
    before = items[others, COUNT:]
    forest.join(5, [5, 6, 7, 10], 14)
    assert np.array_equal(items[others, COUNT:], before) and len(others) == 4
    forest.leave(2)
    assert np.array_equal(items[others, COUNT:], before)


def test_step_gives_every_sequence_a_token() -> None:
    forest = small()
    sequences = {0: ([1, 2], 8), 1: ([1, 3], 7), 2: ([], 0)}
    for row, sequence in sequences.items():
        forest.join(row, *sequence)
    forest.step({0: 20, 2: 21})
    check(forest, {0: ([1, 2, 20], 9), 1: ([1, 3], 8), 2: ([21], 1)})
    with pytest.raises(ValueError, match=r"rows \[1\] need a new chunk, but chunks are given for \[\]"):
        forest.step()
    check(forest, {0: ([1, 2, 20], 9), 1: ([1, 3], 8), 2: ([21], 1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda forest: forest.join(8, [], 0), "row is 8: must be below sequences_max"),
        (lambda forest: forest.join(-1, [], 0), "row is -1"),
        (lambda forest: forest.join(0, [], 0), "row 0 is in use"),
        (lambda forest: forest.join(1, [1, 2], 4), "4 tokens do not fill 2 chunks of 4"),
        (lambda forest: forest.join(1, [1], 5), "5 tokens do not fill 1 chunks"),
        (lambda forest: forest.join(1, [], -1), "-1 tokens"),
        (lambda forest: forest.join(1, [100], 4), "chunk is 100: must be below chunks"),
        (lambda forest: forest.join(1, [-1], 4), "chunk is -1"),
        (lambda forest: forest.leave(1), "row 1 has no sequence"),
        (lambda forest: forest.append(1), "row 1 has no sequence"),
        (lambda forest: forest.length(1), "row 1 has no sequence"),
        (lambda forest: forest.append(0, 5), "need a new chunk"),
        (lambda forest: forest.step({0: 5}), "need a new chunk"),
    ],
)
def test_what_is_refused_changes_nothing(change, message: str) -> None:
    forest = small()
    forest.join(0, [1, 2], 7)
    before = told(forest)
    with pytest.raises(ValueError, match=message):
        change(forest)
    check(forest, {0: ([1, 2], 7)})
    assert told(forest) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"split_tokens": 6}, "split_tokens is 6: must be a multiple of chunk_tokens"),
        ({"split_tokens": 0}, "split_tokens is 0"),
        ({"items_max": 0}, "items_max is 0"),
        ({"tile_sequences": -1}, "tile_sequences is -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**settings)


@pytest.mark.parametrize("capacity", ["items_max", "partials_max"])
def test_a_full_forest_refuses_and_stays_as_it_was(capacity: str) -> None:
    """At every capacity, whatever comes in: what fits is taken, the rest changes nothing."""
    wanted = {
        0: ([1, 2, 3, 4, 5], 20),
        1: ([1, 2, 3, 6], 14),
        2: ([1, 2, 7, 8, 9], 19),
        3: ([1, 2, 3, 4, 10], 17),
    }
    fits = []
    for most in range(1, 24):
        forest = small(**{capacity: most})
        inside: dict[int, tuple[list[int], int]] = {}
        refused = []
        for row, (chunks, tokens) in wanted.items():
            try:
                forest.join(row, chunks, tokens)
                inside[row] = (chunks, tokens)
                for new in range(30 + 10 * row, 34 + 10 * row):
                    while forest.length(row) % CHUNK:
                        forest.append(row)
                        inside[row] = (inside[row][0], forest.length(row))
                    forest.append(row, new)
                    inside[row] = ([*inside[row][0], new], forest.length(row))
            except ValueError as error:
                refused.append(str(error))
            check(forest, inside)
        assert all(f"{capacity} is {most}" in message for message in refused)
        fits.append(sum(tokens for _, tokens in inside.values()))
        assert bool(refused) == (fits[-1] < 128)
    assert fits[0] < fits[-1] == 128
