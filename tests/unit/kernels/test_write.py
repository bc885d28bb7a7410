"""KV of new tokens into a pool: every make of it writes what the plain one does, and nothing else."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from kvstore.kernels.write import NOWHERE, Slots, write_kv
from kvstore.kernels.write.naive import naive_write_kv

from .hopper import compile_aligned, interpreted_passes, stack_bytes
from .pools import same

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
CHUNKS, SIZE = 7, 16
SLOTS = {"chunks": [3, NOWHERE, 0, 3, 6, NOWHERE, 0], "places": [15, 2, 0, 0, 9, 2, 1]}


def slots(**changes: Any) -> Slots:
    return Slots.of(**SLOTS | {"pool_chunks": CHUNKS, "chunk_tokens": SIZE} | changes)


def tensors(dtype: torch.dtype, heads: int, head_dim: int, order: str) -> list[torch.Tensor]:
    """Keys, values, k, v, of any bits; `order`: whether new ones lie token by token, head by head or within others."""
    draw = torch.Generator().manual_seed(heads * head_dim)

    def bits(*shape: int) -> torch.Tensor:
        *lead, last = shape
        return torch.randint(0, 256, (*lead, last * dtype.itemsize), generator=draw, dtype=torch.uint8).view(
            dtype
        )

    pool = bits(CHUNKS, 2, heads, SIZE, head_dim)
    tokens = len(SLOTS["chunks"])
    if order == "tokens":
        k, v = bits(tokens, heads, head_dim), bits(tokens, heads, head_dim)
    elif order == "heads":
        k, v = (bits(heads, tokens, head_dim).transpose(0, 1) for _ in range(2))
    elif order == "turned":
        k, v = (bits(heads, head_dim, tokens).permute(2, 0, 1) for _ in range(2))
    else:
        k, v = bits(tokens, heads * 2 * head_dim).view(tokens, heads, 2 * head_dim).chunk(2, -1)
    return [*pool.unbind(1), k, v]


CASES = [
    (torch.float16, 2, 64, "tokens"),
    (torch.bfloat16, 3, 80, "heads"),
    (torch.float32, 1, 6, "fused"),
    (torch.float16, 40, 128, "fused"),
    (torch.float32, 2, 16, "turned"),
]


@pytest.mark.parametrize(("dtype", "heads", "head_dim", "order"), CASES)
def test_writes_what_the_plain_one_writes(dtype: torch.dtype, heads: int, head_dim: int, order: str) -> None:
    keys, values, k, v = tensors(dtype, heads, head_dim, order)
    wanted = naive_write_kv(keys, values, slots(), k, v)
    write_kv(keys, values, slots(), k, v)
    assert same(keys, wanted[0]) and same(values, wanted[1])
    everywhere = slots(chunks=range(7), places=[0] * 7)
    wanted = naive_write_kv(keys, values, everywhere, k, v)
    write_kv(keys, values, everywhere, k, v)
    assert same(keys, wanted[0]) and same(values, wanted[1])


@interpreted
@pytest.mark.parametrize(("dtype", "heads", "head_dim", "order"), CASES)
def test_interpreter_writes_what_the_plain_one_writes(
    dtype: torch.dtype, heads: int, head_dim: int, order: str
) -> None:
    from kvstore.kernels.write import kernel

    keys, values, k, v = tensors(dtype, heads, head_dim, order)
    wanted = naive_write_kv(keys, values, slots(), k, v)
    kernel.write(keys, values, slots(), k, v)
    assert same(keys, wanted[0]) and same(values, wanted[1])


@compiled
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert interpreted_passes(__file__) == len(CASES)


@compiled
@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "head_dim"),
    [
        (90, "i16", 8, 128),
        (89, "i16", 4, 80),
        pytest.param(80, "i8", 8, 128, marks=pytest.mark.slow),
        pytest.param(100, "i32", 2, 64, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_compiled(capability: int, dtype: str, heads: int, head_dim: int) -> None:
    """Every element is read and written in 16 bytes at a time, and nothing spills."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be compiled")
    from kvstore.kernels.write import kernel

    types = dict.fromkeys(("keys_ptr", "values_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("chunks_ptr", "places_ptr"), "*i64")
    bits = int(dtype[1:])
    constants = kernel.block_sizes(heads=heads, head_dim=head_dim, element_bytes=bits // 8) | {"UNIT": 16}
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    binary = compile_aligned(kernel._write, types, constants, options, capability)
    moves = re.findall(r"\b(?:ld|st)\.global\S*", binary.asm["ptx"])
    assert set(moves) <= {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b64"}, moves
    assert moves.count("ld.global.b64") == 2, "only the slot is read alone"
    assert stack_bytes(binary) == 0, "registers spill"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": [0]}, "1 chunks and 7 places"),
        ({"chunks": [0, 1, 2, 3, 4, 5, 7]}, "chunks are 0 to 7: must be at least -1 and below 7"),
        ({"chunks": [-2, 1, 2, 3, 4, 5, 6]}, "chunks are -2 to 6"),
        ({"places": [0, 1, 2, 3, 4, 5, 16]}, "places are 0 to 16: must be at least 0 and below 16"),
        ({"chunks": [1] * 7, "places": [1] * 7}, "name a slot twice"),
    ],
)
def test_slots_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slots(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda keys, values, k, v: (keys[1:], values, k, v),
            r"keys is \[6, 2, 16, 8\]: must be \[7, 2, 16, 8\]",
        ),
        (lambda keys, values, k, v: (keys, values, k, v[1:]), r"v is \[6, 2, 8\]: must be \[7, 2, 8\]"),
        (lambda keys, values, k, v: (keys, values, k, v.double()), "v is torch.float64"),
        (
            lambda keys, values, k, v: (keys.transpose(2, 3).contiguous().transpose(2, 3), values, k, v),
            "keys has strides",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    given = tensors(torch.float32, 2, 8, "tokens")
    where = slots()
    write_kv(*given[:2], where, *given[2:])  # what fitted once says nothing of others
    keys, values, k, v = change(*given)
    with pytest.raises(ValueError, match=message):
        write_kv(keys, values, where, k, v)
