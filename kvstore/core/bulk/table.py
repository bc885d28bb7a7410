"""New rows, room for their shards, and who made them, hundreds at a time: what `ChunkTable` does with one after
another."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from kvstore.core.bulk import equals
from kvstore.core.chunks import NONE, ChunkTable
from kvstore.types import ChunkKey


@equals("chunks.ChunkTable.new_row")
def new_rows(chunks: ChunkTable, keys: Sequence[ChunkKey]) -> list[int]:
    """As many rows as `new_row` would give one after the other; only their keys are set."""
    reused = min(len(keys), len(chunks.free_rows))
    rows = _taken_from(chunks.free_rows, reused)
    first = chunks.new_rows(len(keys) - reused)
    rows += range(first, first + len(keys) - reused)
    for row, key in zip(rows, keys, strict=True):
        chunks.key[row] = key
    return rows


@equals("chunks.ChunkTable.give_shards")
def new_shards(chunks: ChunkTable, count: int, shards: int) -> list[int]:
    """Where the shards of `count` rows start that are given room, `shards` each."""
    free = chunks.free_shards.get(shards, array("i"))
    reused = min(count, len(free))
    starts = _taken_from(free, reused)
    first = chunks.new_shards((count - reused) * shards)
    starts += range(first, first + (count - reused) * shards, shards)
    return starts


@equals("chunks.ChunkTable.set_maker")
def set_makers(chunks: ChunkTable, first: int, numbers: Sequence[int], makers: Sequence[bytes]) -> None:
    """Of many new rows, from `first` on: numbers index `makers`, NONE for nobody."""
    own = {
        number: chunks.number_of_maker(makers[number], uses)
        for number, uses in Counter(numbers).items()
        if number >= 0
    }
    own[NONE] = NONE
    chunks.views.maker[first : first + len(numbers)] = [own[number] for number in numbers]


def _taken_from(stack: array[int], count: int) -> list[int]:
    """The last `count` numbers, as so many calls of pop() would give them."""
    taken = stack[len(stack) - count :].tolist()
    del stack[len(stack) - count :]
    taken.reverse()
    return taken
