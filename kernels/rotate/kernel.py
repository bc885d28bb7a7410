"""Rotate-on-load on a GPU, in Triton. `rotate_rows` is what the copies of a paged pool use, too.

A program copies a tile of keys: it reads the bytes once, 16 at a time where strides allow, and writes them once. Tables
are small and stay in the cache. Elements that do not turn keep their bits: what a float32 makes of a NaN or of -0.0 is
not stored for them.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvstore.kernels.launch import unit_of

if TYPE_CHECKING:
    from kvstore.kernels.rotate import Rotation

TILE = 8 << 10
"""Elements of one program."""


@triton.jit
def copy_rows(
    source, target, used, source_step, target_step, begin, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Elements [begin, begin + WIDTH) of each row; `source`, `target`: pointers to rows, [rows]."""
    d = tl.arange(0, BLOCK).to(tl.int64)
    inside = used[:, None] & (d < WIDTH)[None, :]
    moved = tl.load(source[:, None] + ((begin + d) * source_step)[None, :], mask=inside)
    tl.store(target[:, None] + ((begin + d) * target_step)[None, :], moved, mask=inside)


@triton.jit
def rotate_rows(
    source,
    target,
    cos,  # pointers to the row of each row, [rows]
    sin,
    used,
    source_step,
    target_step,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows of HEAD_DIM elements, of which the first 2 * PAIRS are rotated and the others copied."""
    p = tl.arange(0, BLOCK_PAIRS).to(tl.int64)
    inside = used[:, None] & (p < PAIRS)[None, :]
    c = tl.load(cos[:, None] + p[None, :], mask=inside, other=1.0)
    s = tl.load(sin[:, None] + p[None, :], mask=inside, other=0.0)
    if INTERLEAVED:
        d = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)
        both = used[:, None] & (d < 2 * PAIRS)[None, :]
        pairs = tl.load(source[:, None] + (d * source_step)[None, :], mask=both, other=0.0)
        x, y = tl.split(pairs.reshape(pairs.shape[0], BLOCK_PAIRS, 2))
    else:
        x = tl.load(source[:, None] + (p * source_step)[None, :], mask=inside, other=0.0)
        y = tl.load(source[:, None] + ((PAIRS + p) * source_step)[None, :], mask=inside, other=0.0)
    x32 = x.to(tl.float32)
    y32 = y.to(tl.float32)
    turned_x = tl.where(s == 0.0, x, (x32 * c - y32 * s).to(x.dtype))
    turned_y = tl.where(s == 0.0, y, (y32 * c + x32 * s).to(y.dtype))
    if INTERLEAVED:
        turned = tl.join(turned_x, turned_y).reshape(pairs.shape[0], 2 * BLOCK_PAIRS)
        tl.store(target[:, None] + (d * target_step)[None, :], turned, mask=both)
    else:
        tl.store(target[:, None] + (p * target_step)[None, :], turned_x, mask=inside)
        tl.store(target[:, None] + ((PAIRS + p) * target_step)[None, :], turned_y, mask=inside)
    if HEAD_DIM > 2 * PAIRS:
        copy_rows(source, target, used, source_step, target_step, 2 * PAIRS, HEAD_DIM - 2 * PAIRS, BLOCK_REST)


VARYING = ("rows", "second", "third")
STRIDES = ("key_0", "key_1", "key_2", "out_0", "out_1", "out_2")
"""In units of UNIT elements."""
TABLE_STRIDES = ("table_0", "table_1", "table_2")
"""In units of TABLE_UNIT elements."""


@triton.jit(do_not_specialize=[*VARYING, *STRIDES, *TABLE_STRIDES])
def _rotate(
    keys_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    rows,  # in all, of shape [.., second, third]
    second,
    third,
    key_0,
    key_1,
    key_2,
    key_step,
    out_0,
    out_1,
    out_2,
    out_step,
    table_0,
    table_1,
    table_2,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
):
    key_0, key_1, key_2 = key_0 * UNIT, key_1 * UNIT, key_2 * UNIT
    out_0, out_1, out_2 = out_0 * UNIT, out_1 * UNIT, out_2 * UNIT
    table_0, table_1, table_2 = table_0 * TABLE_UNIT, table_1 * TABLE_UNIT, table_2 * TABLE_UNIT
    # As 32 bits: dividing longer numbers would take most of the time
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = (row // (second * third)).to(tl.int64)
    j = (row // third % second).to(tl.int64)
    k = (row % third).to(tl.int64)
    table = i * table_0 + j * table_1 + k * table_2
    rotate_rows(
        keys_ptr + i * key_0 + j * key_1 + k * key_2,
        out_ptr + i * out_0 + j * out_1 + k * out_2,
        cos_ptr + table,
        sin_ptr + table,
        row < rows,
        key_step,
        out_step,
        HEAD_DIM,
        PAIRS,
        BLOCK_PAIRS,
        BLOCK_REST,
        INTERLEAVED,
    )


def block_sizes(*, head_dim: int, pairs: int) -> dict[str, int]:
    """The constants that follow from shapes."""
    rest = head_dim - 2 * pairs
    return {
        "HEAD_DIM": head_dim,
        "PAIRS": pairs,
        "BLOCK_PAIRS": triton.next_power_of_2(max(pairs, 1)),
        "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
    }


def rows_of(head_dim: int) -> int:
    return max(1, TILE // int(triton.next_power_of_2(head_dim)))


def rotate(keys: torch.Tensor, by: Rotation, out: torch.Tensor) -> None:
    """See `rotate` in __init__.py, which checked the arguments. The tables of `by` have the dimensions of `keys`."""
    keys, out, cos, sin = (tensor[(None,) * (4 - tensor.dim())] for tensor in (keys, out, by.cos, by.sin))
    first, second, third, head_dim = keys.shape
    shape, rows = (first, second, third, cos.shape[-1]), first * second * third
    cos, sin = cos.expand(shape), sin.expand(shape)
    at_once = rows_of(head_dim)
    strides, tables = [*keys.stride()[:3], *out.stride()[:3]], cos.stride()[:3]
    unit, table_unit = unit_of(*strides), unit_of(*tables)
    key_strides, out_strides = ([stride // unit for stride in of] for of in (strides[:3], strides[3:]))
    with torch.cuda.device_of(keys):  # does nothing where tensors of a CPU are interpreted
        _rotate[(triton.cdiv(rows, at_once),)](
            *(keys, out, cos, sin, rows, second, third),
            *(*key_strides, keys.stride(3), *out_strides, out.stride(3)),
            *(stride // table_unit for stride in tables),
            **block_sizes(head_dim=head_dim, pairs=cos.shape[-1]),
            INTERLEAVED=by.interleaved,
            ROWS=at_once,
            UNIT=unit,
            TABLE_UNIT=table_unit,
            num_warps=4,
            enable_fp_fusion=True,
        )
