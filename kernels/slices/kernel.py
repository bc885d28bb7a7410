"""Copies of slices on a GPU, in Triton: a program copies a block of one slice, by the row of the table that says where.

16 bytes at a time where all addresses and sizes allow. Host memory is read and written in place, over the link: nothing
of it is kept in the card's caches from one kernel to the next.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

BLOCK_BYTES = 8 << 10
"""Of one program."""
WIDE = 16
"""Bytes."""


@triton.jit(do_not_specialize=["table"])
def _copy(table, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    row = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * 3
    target = tl.load(row)
    source = tl.load(row + 1)
    size = tl.load(row + 2)
    if ALIGNED:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size // 16 * 2
        here = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        there = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)
    else:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        here = source.to(tl.pointer_type(tl.int8))
        there = target.to(tl.pointer_type(tl.int8))
        tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)


def constants(*, aligned: bool) -> dict[str, int | bool]:
    return {"BLOCK": BLOCK_BYTES // (8 if aligned else 1), "ALIGNED": aligned}


def copy(table: npt.NDArray[np.int64]) -> None:
    """See `copy_slices`."""
    aligned = not (np.bitwise_or.reduce(table, axis=None) % WIDE)
    blocks = triton.cdiv(int(table[:, 2].max()), BLOCK_BYTES)
    _copy[len(table), blocks](
        table.ctypes.data, **constants(aligned=aligned), num_warps=4, enable_fp_fusion=True
    )
