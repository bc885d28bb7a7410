"""Copies of many small slices as one kernel, where the driver has no copies in batches.

The kernel reads and writes registered host memory in place, at the host's own addresses. That those are the device's
too, is what CUDA says of each device that has unified addresses and `cudaDevAttrCanUseHostPointerForRegisteredMem`:
it is asked before the first kernel, since one that reads elsewhere loses the context. What is copied is listed in
tables of registered memory, of which there are some in turn; one is written again once its kernel has run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.kernels.slices import copy_slices

SLICE_BYTES_MAX = 128 << 10
"""Of what is small: asking for a larger copy by itself takes a few times less than the copy."""
SLICES_MIN = 8
"""A launch takes as long as asking for some copies does."""
TABLES = 8
TABLE_SLICES = 1024
TABLES_BYTES = TABLES * TABLE_SLICES * 3 * 8

_UNIFIED_ADDRESSING = 41
_HOST_POINTER_OF_REGISTERED = 91
"""Of CUdevice_attribute: CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""


class SmallCopies:
    """From any thread."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """`memory`: of the host, registered, TABLES_BYTES."""
        self._tables = memory.view(np.int64).reshape(TABLES, TABLE_SLICES, 3)
        self._read: list[torch.cuda.Event | None] = [None] * TABLES
        self._taken = 0
        self._lock = threading.Lock()

    def __call__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """(to, from, bytes), in any order among themselves, on torch's current stream of its current device."""
        for begin in range(0, len(copies), TABLE_SLICES):
            self._launch(copies[begin : begin + TABLE_SLICES])

    def _launch(self, copies: Sequence[tuple[int, int, int]]) -> None:
        with self._lock:
            number = self._taken % TABLES
            self._taken += 1
            if (read := self._read[number]) is not None:
                read.synchronize()
            table = self._tables[number, : len(copies)]
            table[:] = copies
            copy_slices(table)
            self._read[number] = read = torch.cuda.Event(blocking=True)
            read.record()


def uses_host_addresses(number: int, library: str = "libcuda.so.1") -> bool:
    """Whether the device has registered memory of the host at the host's addresses; False where nobody says so."""
    try:
        driver = ctypes.CDLL(library)
        return all(
            _attribute(driver, what, number) for what in (_UNIFIED_ADDRESSING, _HOST_POINTER_OF_REGISTERED)
        )
    except (OSError, AttributeError):
        return False


def _attribute(driver: ctypes.CDLL, what: int, number: int) -> bool:
    found = ctypes.c_int(0)
    return driver.cuDeviceGetAttribute(ctypes.byref(found), what, number) == 0 and found.value == 1
