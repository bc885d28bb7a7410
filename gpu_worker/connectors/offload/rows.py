"""The engine's host memory, as equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Rows:
    """`count` rows of `row_bytes`, one chunk each. The engine says when which of them may be touched (see Transfer).

    A row may hold the same bytes several times, where ranks have the same KV. The store has one copy of each such part,
    as a shard of its own:

        row     | rank 0 | rank 1 | rank 2 | rank 3 |     copies ((0, 1 x part), (2 x part, 3 x part))
        chunk   | shard 0         | shard 1         |     of `part_bytes` each
    """

    def __init__(
        self,
        view: memoryview,
        fd: int | None = None,
        *,
        copies: Sequence[Sequence[int]] = ((0,),),
        part_bytes: int = 0,
    ) -> None:
        """`view`: writable, of shape (rows, row bytes), without gaps; `fd`: of the file behind it, from its first byte
        on, so that the daemon can read rows by itself. It stays the caller's. `copies`: of each shard, where in a row
        its copies begin, in bytes; `part_bytes` of a shard (0: the whole row)."""
        array: npt.NDArray[Any] = np.asarray(view)
        assert array.ndim == 2 and array.itemsize == 1 and array.flags.c_contiguous, (
            array.shape,
            array.dtype,
        )
        assert array.flags.writeable
        self._array: npt.NDArray[np.uint8] | None = array.view(np.uint8)
        self.count, self.row_bytes = (int(length) for length in array.shape)
        self.part_bytes = part_bytes or self.row_bytes
        self.copies = tuple(tuple(starts) for starts in copies)
        assert all(
            0 <= start <= self.row_bytes - self.part_bytes for starts in self.copies for start in starts
        )
        self.fd = fd

    def __repr__(self) -> str:
        return f"Rows({self.count} of {self.row_bytes} bytes{'' if self.fd is None else ', in a file'})"

    @property
    def chunk_bytes(self) -> int:
        """Of a row, what the store has."""
        return len(self.copies) * self.part_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a row, what the store need not have, because another part is the same."""
        return (sum(map(len, self.copies)) - len(self.copies)) * self.part_bytes

    def offsets(self, number: int) -> list[int]:
        """Where in the file the first copy of each shard is."""
        return [number * self.row_bytes + starts[0] for starts in self.copies]

    def parts(self, number: int) -> list[tuple[int, npt.NDArray[np.uint8]]]:
        """(shard, its bytes) of each copy, the first one of each shard first; not to be kept. Only while a transfer of
        that row is held."""
        row = self.row(number)
        return [
            (shard, row[start : start + self.part_bytes])
            for shard, starts in enumerate(self.copies)
            for start in starts
        ]

    def agree(self, number: int) -> bool:
        """Whether what should be the same bytes is. As `parts`."""
        first: dict[int, npt.NDArray[np.uint8]] = {}
        return not self.shared_bytes or all(
            np.array_equal(first.setdefault(shard, part), part) for shard, part in self.parts(number)
        )

    @property
    def size_bytes(self) -> int:
        return self.count * self.row_bytes

    def row(self, number: int) -> npt.NDArray[np.uint8]:
        """Its bytes; not to be kept. Only while a transfer of that row is held."""
        assert self._array is not None, "the engine's memory was given back"
        row: npt.NDArray[np.uint8] = self._array[number]
        return row

    def close(self) -> None:
        """Lets go of the engine's memory."""
        self._array = None
