"""What the policy of expected hits does with one row after another, for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.core.bulk import batch, equals, helper
from kvstore.core.chunks import TAIL, ChunkTable

if TYPE_CHECKING:
    from kvstore.core.policies.expected import Expected


@equals("policies.expected.Expected.used_each")
def used(policy: Expected, chunks: ChunkTable, rows: Sequence[int], behind: int) -> None:
    view = chunks.views
    which = batch.as_rows(rows)
    past, used_at = view.history[which], view.used_at[which]
    breaks = (past[1:] != past[:-1]) | (used_at[1:] != used_at[:-1])
    if policy.foreseen:
        since = np.fromiter((policy.foreseen.get(row, -1) for row in rows), np.int64, len(rows))
        breaks |= since[1:] != since[:-1]
    for start, end in _runs(breaks, len(rows)):
        new = policy.end_lives(rows[start], int(past[start]), int(used_at[start]), end - start, behind)
        view.history[which[start:end]] = new


@helper
def alike(chunks: ChunkTable, rows: Sequence[int]) -> Iterator[list[int]]:
    """Parts of `rows` that have one past, were used at one time, and are tails that somebody names, or not."""
    view = chunks.views
    which = batch.as_rows(rows)
    past, used_at = view.history[which], view.used_at[which]
    unnamed = (view.flags[which] & TAIL != 0) & (view.refs[which] == 0)
    breaks = (past[1:] != past[:-1]) | (used_at[1:] != used_at[:-1]) | (unnamed[1:] != unnamed[:-1])
    for start, end in _runs(breaks, len(rows)):
        yield list(rows[start:end])


@helper
def without_past(chunks: ChunkTable, rows: Sequence[int]) -> list[int]:
    """Those of which nothing is known."""
    which = batch.as_rows(rows)
    found: list[int] = which[chunks.views.history[which] == 0].tolist()
    return found


@helper
def chains(chunks: ChunkTable, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where parts of `rows` begin and end in which each is the child of the one before; a tail is alone."""
    view = chunks.views
    which = batch.as_rows(rows)
    breaks = (view.parent[which[1:]] != which[:-1]) | (view.flags[which[1:]] & TAIL != 0)
    return _runs(breaks, len(rows))


@helper
def by_cohort(chunks: ChunkTable, rows: batch.Rows) -> Iterator[tuple[int, batch.Rows]]:
    """Parts of `rows` that are in one cohort each, with its number."""
    numbers = chunks.views.cohort[rows]
    for start, end in _runs(numbers[1:] != numbers[:-1], len(rows)):
        yield int(numbers[start]), rows[start:end]


def _runs(breaks: npt.NDArray[np.bool_], count: int) -> Iterator[tuple[int, int]]:
    """Where runs begin and end; `breaks` says of each but the first whether it begins one."""
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), count]
    yield from pairwise(starts)
