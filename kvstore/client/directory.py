"""A namespace's directory as this process has it mapped: lookups, and copies without a lease.

See `kvstore/directory.py` for what keeps such a copy from wrong bytes.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore import directory, memory
from kvstore.client.mapped_extents import MappedExtents
from kvstore.client.mappings import Mappings
from kvstore.types import ChunkKey, Extents

SILENT_MS_MAX = 5_000
"""A daemon whose loop has not turned for so long is asked, which tells what is wrong. (Or our clock is another.)"""
AHEAD_MS_MAX = 1_000


class Directory:
    def __init__(self, mapping: memory.SharedMapping, slot_bytes: Sequence[int], boot_id: bytes) -> None:
        """Raises ValueError where the bytes are not those of a directory of this boot."""
        self.view = directory.View(mapping.array, boot_id)
        if len(slot_bytes) != self.view.shards:
            raise ValueError(f"{len(slot_bytes)} sizes of slots for {self.view.shards} shards")
        self._slot_bytes = tuple(slot_bytes)

    def __repr__(self) -> str:
        return f"Directory({self.view!r})"

    def look_up(self, keys: Sequence[ChunkKey]) -> directory.Found | None:
        """None: the daemon has to be asked."""
        silent_ms = time.monotonic_ns() // 1_000_000 - self.view.beaten_at_ms
        return self.view.look_up(keys) if -AHEAD_MS_MAX < silent_ms < SILENT_MS_MAX else None

    def segments(self, shards: Sequence[int]) -> list[int]:
        """That have slots of these shards now, as far as the rows say: one that is written at this moment may name any
        number."""
        rows = self.view.rows[self.view.rows_in_use()]
        there = (rows[:, 0] >> np.uint64(24)) & np.uint64(directory.HIT) != 0
        at = [directory.ROW_WORDS + directory.SHARD_WORDS * shard for shard in shards]
        found: list[int] = np.unique(rows[there][:, at] >> np.uint64(32)).tolist()
        return found

    def extents(
        self,
        found: directory.Found,
        numbers: Sequence[int] | range,
        shards: Sequence[int],
        lengths: Sequence[int],
    ) -> Extents:
        """Where `shards` of these keys are, which are hits: key by key."""
        words = found.words(numbers)
        columns = [np.empty((len(words), len(shards)), np.uint64) for _ in range(6)]
        segment, offset, length, cell, generation, checksum = columns
        for column, shard in enumerate(shards):
            at = directory.ROW_WORDS + directory.SHARD_WORDS * shard
            segment[:, column] = words[:, at] >> np.uint64(32)
            cell[:, column] = words[:, at] & np.uint64(0xFFFF_FFFF)
            offset[:, column] = cell[:, column] * np.uint64(self._slot_bytes[shard])
            length[:, column] = lengths[column]
            generation[:, column] = words[:, at + 1]
            checksum[:, column] = words[:, at + 2]
        return Extents.of_columns(*(column.tobytes() for column in columns))

    def extents_of_one(self, found: directory.Found, shard: int, length: int) -> Extents:
        """The same for the one key that was looked up, and one shard, in a fifth of the time."""
        words = found.words_of_one()
        at = directory.ROW_WORDS + directory.SHARD_WORDS * shard
        place = words[at]
        cell = place & 0xFFFF_FFFF
        fields = (place >> 32, cell * self._slot_bytes[shard], length, cell, words[at + 1], words[at + 2])
        return Extents(*(array("Q", (field,)) for field in fields))


class PublishedExtents(MappedExtents):
    """Of chunks that nobody pinned for us. They are what they were as long as their rows are, and the generations and
    the tags of their slots; and the daemon may withdraw all at once."""

    def __init__(
        self,
        own: Directory,
        found: directory.Found,
        numbers: Sequence[int] | range,
        extents: Extents,
        lengths: Sequence[int],
        mappings: Mappings,
    ) -> None:
        super().__init__(extents, lengths, mappings)
        self._view = own.view
        self._each = len(lengths)
        self._tags = found.tags(numbers)
        rows = found.numbers
        self._rows = [rows[number] for number in numbers]
        self._firsts = found.firsts(numbers)

    def intact(self, rows: Iterable[int]) -> bool:
        segments, view, each = self._segments, self._view, self._each
        extents = self.extents
        numbers, cells, generations = extents.segment, extents.cell, extents.generation
        word, at, stride = view.word, view.rows_at, view.stride
        if view.closed:
            return False
        for row in rows:
            pair = segments[numbers[row]].cells
            cell = 2 * cells[row]
            number = row // each
            if (
                pair[cell] != generations[row]
                or pair[cell + 1] != self._tags[number]
                or word[at + self._rows[number] * stride] != self._firsts[number]
            ):
                return False
        return True
