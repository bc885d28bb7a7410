"""The engine's host memory, as equal rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Rows:
    """`count` rows of `row_bytes`, one chunk each. The engine says when which of them may be touched (see Transfer)."""

    def __init__(self, view: memoryview, fd: int | None = None) -> None:
        """`view`: writable, of shape (rows, row bytes), without gaps; `fd`: of the file behind it, from its first byte
        on, so that the daemon can read rows by itself. It stays the caller's."""
        array: npt.NDArray[Any] = np.asarray(view)
        assert array.ndim == 2 and array.itemsize == 1 and array.flags.c_contiguous, (
            array.shape,
            array.dtype,
        )
        assert array.flags.writeable
        self._array: npt.NDArray[np.uint8] | None = array.view(np.uint8)
        self.count, self.row_bytes = (int(length) for length in array.shape)
        self.fd = fd

    def __repr__(self) -> str:
        return f"Rows({self.count} of {self.row_bytes} bytes{'' if self.fd is None else ', in a file'})"

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
