"""Where the shards of a grant are in shared memory: the daemon's columns, checked, and looked at when bytes are copied.

A batch may have thousands of shards. Checking them takes a few passes in C; an object for a shard is made when somebody
wants that one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.types import Extents

if TYPE_CHECKING:
    from kvstore.client.mappings import Mappings, Segment


class Place(NamedTuple):
    """One shard, in shared memory."""

    data: npt.NDArray[np.uint8]
    generations: memoryview
    cell: int
    generation: int
    checksum: int

    def intact(self) -> bool:
        """Whether the slot still holds what the daemon granted."""
        return bool(self.generations[self.cell] == self.generation)


class Places:
    """One row for each extent. Keeps the segments mapped that it uses."""

    def __init__(self, extents: Extents, lengths: Sequence[int], mappings: Mappings) -> None:
        """`lengths`: what the rows have to have, over and over again."""
        self.extents = extents
        found = {number: mappings.get(number) for number in set(extents.segment)}
        self._segments: dict[int, Segment] = {
            number: segment for number, segment in found.items() if segment is not None
        }
        self.wrong = set() if self._all_well(lengths) else self._wrong(lengths)
        """Rows that are not inside a segment that we have mapped, or have another length."""

    def __repr__(self) -> str:
        return f"Places({len(self.extents)} rows, {len(self.wrong)} wrong, {len(self._segments)} segments)"

    def __len__(self) -> int:
        return len(self.extents)

    def __getitem__(self, row: int) -> Place:
        extents = self.extents
        segment = self._segments[extents.segment[row]]
        offset = extents.offset[row]
        return Place(
            segment.data[offset : offset + extents.length[row]],
            segment.generations,
            extents.cell[row],
            extents.generation[row],
            extents.checksum[row],
        )

    def _all_well(self, lengths: Sequence[int]) -> bool:
        """Enough for True, and quick: True where all extents are the daemon's usual ones."""
        extents, segments = self.extents, self._segments.values()
        if not extents:
            return True
        return (
            len(segments) == len(set(extents.segment))
            and extents.length == array("Q", lengths) * (len(extents) // len(lengths))
            and max(extents.offset) + max(lengths) <= min(segment.data.size for segment in segments)
            and max(extents.cell) < min(len(segment.generations) for segment in segments)
        )

    def _wrong(self, lengths: Sequence[int]) -> set[int]:
        wrong = set()
        for row, extent in enumerate(self.extents):
            segment = self._segments.get(extent.segment)
            if (
                segment is None
                or extent.length != lengths[row % len(lengths)]
                or extent.offset + extent.length > segment.data.size
                or extent.cell >= len(segment.generations)
            ):
                wrong.add(row)
        return wrong
