"""Copies of many small pieces of memory in one launch, between a card and host memory that is registered with it.

For drivers without copies in batches: a copy that is asked for by itself takes microseconds to ask for, whatever it
has. `naive.py` says what is copied, `kernel.py` (Triton) how; a CPU has no need of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["copy_slices"]


def copy_slices(table: npt.NDArray[np.int64]) -> None:
    """`table` [slices, 3], contiguous: of each slice the address that it goes to, the one that it comes from, and its
    bytes. No two targets overlap, and no target a source.

    One Triton kernel on torch's current stream of its current device. Addresses, and the table itself, are of memory
    that this device reads and writes at the same addresses as the host; the table is not to be changed before the
    kernel has run.
    """
    from kvstore.kernels.slices import kernel  # Triton is there only where there is a GPU

    kernel.copy(table)
