"""Copies of slices in Triton without a GPU: interpreted on host memory, and compiled for cards that are not here."""

from __future__ import annotations

import os
import re

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.kernels.slices import copy_slices
from kvstore.kernels.slices.naive import naive_copy_slices

from .hopper import compile_aligned, interpreted_passes, stack_bytes

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: its kernels can be neither run nor compiled"
)

from kvstore.kernels.slices import kernel  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
Bytes = npt.NDArray[np.uint8]


@compiled
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    assert interpreted_passes(__file__) == 6


def slices(sizes: list[int], source: Bytes, target: Bytes, *, gap: int, shift: int) -> npt.NDArray[np.int64]:
    """One after the other, `gap` bytes apart, in the target in the opposite order and `shift` bytes further on."""
    starts = np.cumsum([0, *(size + gap for size in sizes[:-1])])
    ends = np.cumsum([0, *(size + gap for size in sizes[:0:-1])])[::-1]
    return np.array(
        [
            (target.ctypes.data + shift + end, source.ctypes.data + start, size)
            for start, end, size in zip(starts.tolist(), ends.tolist(), sizes, strict=True)
        ],
        np.int64,
    )


@interpreted
@pytest.mark.parametrize(
    ("sizes", "gap", "shift"),
    [
        ([16], 0, 0),
        ([4096, 16, 32, 8192, 8208, 20_000 // 16 * 16], 16, 0),
        ([4096, 16, 32], 0, 3),  # a target that is not aligned
        ([1, 7, 8, 9, 8191, 8192, 8193], 0, 0),
        ([16, 0, 48], 16, 0),
        ([24, 8], 8, 0),
    ],
)
def test_interpreter_copies_all_slices_and_nothing_else(sizes: list[int], gap: int, shift: int) -> None:
    draw = np.random.default_rng(0)
    size = sum(sizes) + gap * len(sizes) + 64
    memory = draw.integers(0, 256, 2 * size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :]
    source, target = memory[:size], memory[-(-size // 16) * 16 :][:size]
    before, kept = target.copy(), source.copy()
    table = slices(sizes, source, target, gap=gap, shift=shift)
    naive_copy_slices(table)
    exact = target.copy()
    target[:] = before
    assert not np.array_equal(exact, before)
    copy_slices(table)
    assert np.array_equal(target, exact) and np.array_equal(source, kept)


@compiled
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_slices_compiled(capability: int, aligned: bool) -> None:
    binary = compile_aligned(
        kernel._copy,
        {"table": "i64"},
        kernel.constants(aligned=aligned),
        {"num_warps": 4, "enable_fp_fusion": True},
        capability,
    )
    assert stack_bytes(binary) == 0, "registers spill"
    moves = re.findall(r"\b(?:ld|st)\.global\S*", binary.asm["ptx"])
    wide = {"ld.global.v2.b64", "st.global.v2.b64", "ld.global.v4.b32", "st.global.v4.b32"}
    assert bool(wide & set(moves)) == aligned, moves
    assert "ld.global.nc" not in binary.asm["ptx"], "host memory changes between kernels"
