"""What `copy_slices` copies, slice by slice, in host memory."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt


def naive_copy_slices(table: npt.NDArray[np.int64]) -> None:
    for to, source, size in table.tolist():
        ctypes.memmove(to, source, size)
