"""Where the shards of a grant are in shared memory: the daemon's columns, checked, and looked at when bytes are copied.

A batch may have thousands of shards. Checking them takes a few passes in C; what is not read costs nothing more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.client.mappings import Mappings, Segment
from kvstore.types import Extents


class MappedExtents:
    """One row for each extent. Keeps the segments mapped that it uses."""

    def __init__(self, extents: Extents, lengths: Sequence[int], mappings: Mappings) -> None:
        """`lengths`: what the rows have to have, over and over again."""
        self.extents = extents
        self._segments: dict[int, Segment] = {}
        for number in set(extents.segment):
            segment = mappings.get(number)
            if segment is not None:
                self._segments[number] = segment
        self.wrong = set() if self._all_well(lengths) else self._wrong(lengths)
        """Rows that are not inside a segment that we have mapped, or have another length."""

    def __repr__(self) -> str:
        return f"MappedExtents({len(self.extents)} rows, {len(self.wrong)} wrong, {len(self._segments)} segments)"

    def __len__(self) -> int:
        return len(self.extents.segment)

    def data(self, row: int, start: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """The shard's bytes in shared memory, or `length` from `start` on, which must be inside of it."""
        extents = self.extents
        first = extents.offset[row] + start
        if length is None:
            length = extents.length[row]
        return self._segments[extents.segment[row]].data[first : first + length]

    def intact(self, rows: Iterable[int]) -> bool:
        """Whether their slots still hold what the daemon granted."""
        segments = self._segments
        extents = self.extents
        numbers, cells, generations = extents.segment, extents.cell, extents.generation
        return all(segments[numbers[row]].cells[2 * cells[row]] == generations[row] for row in rows)

    def _all_well(self, lengths: Sequence[int]) -> bool:
        """Enough for True, and quick: True where all extents are the daemon's usual ones."""
        extents, segments = self.extents, self._segments.values()
        count = len(extents.segment)
        if not count:
            return True
        return (
            len(segments) == len(set(extents.segment))
            and extents.length == array("Q", lengths) * (count // len(lengths))
            and max(extents.offset) + max(lengths) <= min(segment.data.size for segment in segments)
            and 2 * max(extents.cell) < min(len(segment.cells) for segment in segments)
        )

    def _wrong(self, lengths: Sequence[int]) -> set[int]:
        wrong = set()
        for row, extent in enumerate(self.extents):
            segment = self._segments.get(extent.segment)
            if (
                segment is None
                or extent.length != lengths[row % len(lengths)]
                or extent.offset + extent.length > segment.data.size
                or 2 * extent.cell >= len(segment.cells)
            ):
                wrong.add(row)
        return wrong
