"""Rotate, gather and scatter in Triton without a GPU: interpreted on the CPU, and compiled for one that is not here.

See test_triton.py. The interpreter cuts float32 to bf16 instead of rounding, so rotated bf16 is left to a GPU.
"""

from __future__ import annotations

import mmap
import os
import re
from typing import Any

import numpy as np
import pytest
import torch

from .hopper import CAPABILITIES, compile_aligned, interpreted_passes, stack_bytes
from .pools import LAYOUTS, Paged, same
from .test_rotate import assert_close, draw, frequencies

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: its kernels can be neither run nor compiled"
)

from kvstore.kernels.pages import kernel as pages  # noqa: E402
from kvstore.kernels.pages.naive import naive_gather, naive_scatter  # noqa: E402
from kvstore.kernels.rotate import kernel as rotation_kernel  # noqa: E402
from kvstore.kernels.rotate import rotation  # noqa: E402
from kvstore.kernels.rotate.naive import naive_rotate  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


@compiled
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    assert interpreted_passes(__file__) == 36


@interpreted
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "lead", "head_dim", "pairs"),
    [
        (torch.float32, (3, 2, 5), 128, 64),
        (torch.float16, (2, 130), 80, 40),
        (torch.float16, (70,), 96, 16),
        (torch.float32, (2, 3), 20, 3),
        (torch.float16, (4,), 16, 0),
    ],
)
def test_interpreter_rotates(
    dtype: torch.dtype, lead: tuple[int, ...], head_dim: int, pairs: int, interleaved: bool
) -> None:
    keys = draw(*lead, head_dim, dtype=dtype)
    keys[0] = float("nan")
    deltas = torch.randint(-5000, 5000, lead[-1:], generator=torch.Generator().manual_seed(1))
    deltas[1:3] = 0
    view = draw(*lead, 2 * head_dim, dtype=dtype)[..., head_dim:] if len(lead) > 1 else torch.empty_like(keys)
    by = rotation(deltas, frequencies(pairs), interleaved=interleaved)
    rotation_kernel.rotate(keys, by.map(lambda table: table.expand(*lead, pairs)), view)
    exact = naive_rotate(keys, deltas, frequencies(pairs), interleaved=interleaved)
    assert view[0, ..., : 2 * pairs].isnan().all()
    assert_close(view[1:], exact[1:], pairs, interleaved=interleaved)
    still = (deltas == 0).expand(lead)
    assert same(view[still], keys[still])


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity, by a sine of 0
@pytest.mark.parametrize("interleaved", [False, True])
def test_interpreter_leaves_frequencies_of_zero_alone(interleaved: bool) -> None:
    keys = torch.full((2, 8), -0.0)
    keys[0, ::3] = float("inf")
    by = rotation(3, torch.tensor([0.0, 1.0, 0.0, 0.0]), interleaved=interleaved)
    out = torch.empty_like(keys)
    rotation_kernel.rotate(keys, by.map(lambda table: table.expand(2, 4)), out)
    places = [0, 1, 4, 5, 6, 7] if interleaved else [0, 2, 3, 4, 6, 7]
    assert same(out[:, places], keys[:, places])


@interpreted
@pytest.mark.parametrize("stride", [(1 << 31) + 32, 1 << 32])
def test_interpreter_rotates_what_lies_far_apart(stride: int) -> None:
    """More than 2^31 elements, of which nearly none is touched."""
    far = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 2 * (stride + 64)), np.float16))
    keys = far.as_strided((2, 4, 16), (stride, 16, 1))
    keys.copy_(draw(2, 4, 16, dtype=torch.float16))
    out = torch.empty(2, 4, 16, dtype=torch.float16)
    by = rotation(3, frequencies(8))
    rotation_kernel.rotate(keys, by.map(lambda table: table.expand(2, 4, 8)), out)
    assert_close(out, naive_rotate(keys, 3, frequencies(8)), 8, interleaved=False)


CASES = [
    Paged(layout=layout, dtype=dtype, seed=seed, **shape)
    for seed, (layout, dtype, shape) in enumerate(
        [
            *((layout, torch.float16, {"holes": 0.2}) for layout in sorted(LAYOUTS)),
            ("ours", torch.bfloat16, {"chunk_blocks": 1, "block_tokens": 16, "tokens": 40, "head_dim": 128}),
            ("tokens first", torch.float8_e4m3fn, {"chunk_blocks": 4, "tokens": 33, "heads": 3}),
            ("heads first", torch.float32, {"head_dim": 80, "tokens": 32, "heads": 1}),
            ("K and V in one row", torch.float64, {"head_dim": 6, "block_tokens": 3, "chunk_blocks": 3}),
        ]
    )
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.dtype}")
def test_interpreter_gathers_and_scatters_bits(case: Paged) -> None:
    table = case.table()
    gathered = naive_gather(case.keys, case.values, table, case.slices)
    slices = case.slices.clone()
    pages.gather(case.keys, case.values, table, slices)
    assert same(slices, gathered)
    keys, values = naive_scatter(case.keys, case.values, table, case.slices)
    pages.scatter(case.keys, case.values, table, case.slices, None)
    assert same(case.keys, keys) and same(case.values, values)


@interpreted
@pytest.mark.parametrize("layout", ["ours", "tokens first", "K transposed"])
@pytest.mark.parametrize(("pairs", "interleaved"), [(8, False), (3, True), (0, False)])
def test_interpreter_rotates_what_it_scatters(layout: str, pairs: int, interleaved: bool) -> None:
    """What a key becomes is what it becomes alone; values stay."""
    case = Paged(layout=layout, chunk_blocks=3, tokens=23)
    table = case.table()
    case.slices = torch.randn(case.slices.shape, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    deltas = torch.tensor([[70], [0]])
    inv_freq = frequencies(pairs)
    by = rotation(deltas, inv_freq, interleaved=interleaved)
    ready = case.slices.clone()
    for chunk in range(table.chunks):
        size = case.heads * table.tokens_of(chunk) * case.head_dim
        keys = ready[chunk].view(-1)[:size].view(case.heads, -1, case.head_dim)
        turned = torch.empty_like(keys)
        one = rotation(deltas[chunk], inv_freq, interleaved=interleaved)
        rotation_kernel.rotate(keys, one.map(lambda table: table.unsqueeze(0)), turned)
        keys.copy_(turned)
    keys, values = naive_scatter(case.keys, case.values, table, ready)
    shape = (table.chunks, table.chunk_tokens, pairs)
    pages.scatter(case.keys, case.values, table, case.slices, by.map(lambda of: of.expand(shape)))
    assert same(case.keys, keys) and same(case.values, values)


@compiled
@pytest.mark.parametrize(
    ("dtype", "head_dim", "pairs", "interleaved"),
    [("fp16", 128, 64, False), ("bf16", 128, 64, True), ("bf16", 80, 16, False), ("fp32", 64, 32, False)],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.timeout(300)
def test_rotation_compiled(capability: int, dtype: str, head_dim: int, pairs: int, interleaved: bool) -> None:
    constants = rotation_kernel.block_sizes(head_dim=head_dim, pairs=pairs)
    constants |= {"INTERLEAVED": interleaved, "ROWS": rotation_kernel.rows_of(head_dim)}
    constants |= {"UNIT": 16, "TABLE_UNIT": 16}
    check_compiled(rotation_kernel._rotate, capability, dtype, constants, ones=("key_step", "out_step"))


@compiled
@pytest.mark.parametrize(
    ("dtype", "head_dim", "gather", "rotate", "interleaved"),
    [
        ("i16", 128, True, False, False),
        ("i8", 80, True, False, False),
        ("i16", 80, False, False, False),
        ("i32", 64, False, False, False),
        ("fp16", 128, False, True, False),
        ("bf16", 64, False, True, True),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.timeout(300)
def test_copies_compiled(
    capability: int,
    dtype: str,
    head_dim: int,
    gather: bool,
    rotate: bool,
    interleaved: bool,
) -> None:
    constants = pages.constants(
        head_dim=head_dim, pairs=head_dim // 2, heads=8, block_tokens=16, chunk_tokens=64
    )
    constants |= {"GATHER": gather, "ROTATE": rotate, "INTERLEAVED": interleaved}
    check_compiled(pages._copy, capability, dtype, constants, ones=("key_step", "value_step"))


def check_compiled(
    function: Any, capability: int, dtype: str, constants: dict[str, int], ones: tuple[str, ...]
) -> None:
    """Every element is read and written in 16 bytes at a time, and nothing spills: as at a launch where addresses and
    strides are multiples of 16, and head_dim is contiguous."""
    constants = constants | dict.fromkeys(ones, 1)
    pointers = dict.fromkeys(("keys_ptr", "values_ptr", "slices_ptr", "out_ptr"), f"*{dtype}")
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    options = {"num_warps": 4, "enable_fp_fusion": True}
    binary = compile_aligned(function, pointers | tables, constants, options, capability)
    moves = re.findall(r"\b(?:ld|st)\.global\S*", binary.asm["ptx"])
    assert {move for move in moves if not move.endswith(".v4.b32")} <= {"ld.global.b32"}, moves
    assert moves.count("ld.global.b32") <= 1, "only the block's number is read alone"
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(moves)
    assert stack_bytes(binary) == 0, "registers spill"
