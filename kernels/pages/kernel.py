"""Gather and scatter on a GPU, in Triton: a program copies one tile of rows, keys or values, of one block.

Elements are copied as integers of their size, 16 bytes at a time where strides and addresses allow: one launch for all
chunks of a layer. Keys that are rotated on the way are read and written once, too.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvstore.kernels.pages.cpu import INTEGERS, behind
from kvstore.kernels.rotate.kernel import block_sizes, copy_rows, rotate_rows, rows_of

if TYPE_CHECKING:
    from kvstore.kernels.pages import BlockTable, Slices
    from kvstore.kernels.rotate import Rotation


@triton.jit(do_not_specialize=["tokens"])
def _copy(
    keys_ptr,
    values_ptr,
    slices_ptr,
    numbers_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    key_block,
    key_head,
    key_token,
    key_step,
    value_block,
    value_head,
    value_token,
    value_step,
    slice_chunk,
    table_chunk,
    table_token,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0)
    number = tl.load(numbers_ptr + place).to(tl.int64)
    if number >= 0:
        chunk = (place * BLOCK_TOKENS // CHUNK_TOKENS).to(tl.int64)
        first = place * BLOCK_TOKENS % CHUNK_TOKENS
        # Tokens that the chunk holds: its heads lie that far apart
        held = tl.minimum(tokens - chunk * CHUNK_TOKENS, CHUNK_TOKENS)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        head = (row // BLOCK_TOKENS).to(tl.int64)
        token = (row % BLOCK_TOKENS).to(tl.int64)
        used = (head < HEADS) & (first + token < held)
        packed = slices_ptr + chunk * slice_chunk + (head * held + first + token) * HEAD_DIM
        if tl.program_id(2) == 0:
            pool = keys_ptr + number * key_block + head * key_head + token * key_token
            if ROTATE:
                table = chunk * table_chunk + (first + token) * table_token
                rotate_rows(
                    packed,
                    pool,
                    cos_ptr + table,
                    sin_ptr + table,
                    used,
                    1,
                    key_step,
                    HEAD_DIM,
                    PAIRS,
                    BLOCK_PAIRS,
                    BLOCK_REST,
                    INTERLEAVED,
                )
            elif GATHER:
                copy_rows(pool, packed, used, key_step, 1, 0, HEAD_DIM, BLOCK_D)
            else:
                copy_rows(packed, pool, used, 1, key_step, 0, HEAD_DIM, BLOCK_D)
        else:
            packed += HEADS * held * HEAD_DIM
            pool = values_ptr + number * value_block + head * value_head + token * value_token
            if GATHER:
                copy_rows(pool, packed, used, value_step, 1, 0, HEAD_DIM, BLOCK_D)
            else:
                copy_rows(packed, pool, used, 1, value_step, 0, HEAD_DIM, BLOCK_D)


def constants(
    *, head_dim: int, pairs: int, heads: int, block_tokens: int, chunk_tokens: int
) -> dict[str, int]:
    """Those of `_copy` that follow from shapes."""
    return {
        "HEADS": heads,
        "BLOCK_TOKENS": block_tokens,
        "CHUNK_TOKENS": chunk_tokens,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "ROWS": rows_of(head_dim),
        **block_sizes(head_dim=head_dim, pairs=pairs),
    }


def gather(keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices) -> None:
    """See `gather` in __init__.py, which checked the arguments."""
    _launch(keys, values, table, slices, None, gathering=True)
    if (rest := behind(table, slices[-1])) is not None:
        rest.zero_()


def scatter(
    keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices, by: Rotation | None
) -> None:
    """See `scatter` in __init__.py, which checked the arguments. The tables of `by`: [chunks, chunk_tokens, pairs]."""
    _launch(keys, values, table, slices, by, gathering=False)


def _launch(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: BlockTable,
    slices: Slices,
    by: Rotation | None,
    *,
    gathering: bool,
) -> None:
    assert isinstance(slices, torch.Tensor)
    if by is None:  # plain bits
        keys, values, slices = (each.view(INTEGERS[each.element_size()]) for each in (keys, values, slices))
        cos = sin = torch.empty((1, 1, 0), device=keys.device)
    else:
        cos, sin = by.cos, by.sin
    _, heads, block_tokens, head_dim = keys.shape
    sizes = constants(
        head_dim=head_dim,
        pairs=cos.shape[-1],
        heads=heads,
        block_tokens=block_tokens,
        chunk_tokens=table.chunk_tokens,
    )
    with torch.cuda.device_of(keys):  # does nothing where tensors of a CPU are interpreted
        _copy[(table.numbers.shape[0], triton.cdiv(heads * block_tokens, sizes["ROWS"]), 2)](
            *(keys, values, slices, table.numbers, cos, sin, table.tokens),
            *(*keys.stride(), *values.stride(), slices.stride(0), *cos.stride()[:2]),
            **sizes,
            INTERLEAVED=by is not None and by.interleaved,
            GATHER=gathering,
            ROTATE=by is not None,
            num_warps=4,
            enable_fp_fusion=True,
        )
