"""Gather and scatter on a CPU: numpy copies of plain bits from view to view, one for each run of blocks, K and V
together where they are parts of one pool.

They need no memory of their own, and numpy lets other Python threads run meanwhile. Rotation is done on the views, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels.rotate import cpu

if TYPE_CHECKING:
    from kvstore.kernels.pages import BlockTable, Run, Slices
    from kvstore.kernels.rotate import Rotation

Bits = NDArray[np.signedinteger[Any]]
"""Elements as integers of their size: numpy has no bfloat16, and copies of bits are exact whatever they mean."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices) -> None:
    """See `gather` in __init__.py, which checked the arguments."""
    pools = _pools(keys, values)
    for run, part in _parts(table, slices):
        for pool, these in pools:
            part[:, these] = _held(pool, run)
    if (rest := behind(table, slices[-1])) is not None:
        rest.zero_()


def scatter(
    keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices, by: Rotation | None
) -> None:
    """See `scatter` in __init__.py, which checked the arguments. The tables of `by`: [chunks, chunk_tokens, pairs]."""
    pools = _pools(keys, values) if by is None else [(_bits(values)[:, None], slice(1, 2))]
    for run, part in _parts(table, slices):
        for pool, these in pools:
            _held(pool, run)[...] = part[:, these]
        if by is not None:
            _rotated(keys, part[:, 0], run, by)


def behind(table: BlockTable, last: torch.Tensor) -> torch.Tensor | None:
    """Where the last slice is to be zero, if anywhere."""
    used = table.tokens_of(table.chunks - 1)
    if used == table.chunk_tokens or not table.runs or table.runs[-1].chunk < table.chunks - 1:
        return None
    return last.reshape(-1)[2 * last[0, :, :used].numel() :]


def _bits(tensor: torch.Tensor) -> Bits:
    """A tensor's elements as integers, of the same shape and strides, sharing its memory."""
    view: Bits = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    return view


def _pools(keys: torch.Tensor, values: torch.Tensor) -> list[tuple[Bits, slice]]:
    """[blocks, one or both of K and V, kv_heads, block_tokens, head_dim], and which of both those are."""
    between = values.storage_offset() - keys.storage_offset()
    one = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    if one and between > 0 and keys.stride() == values.stride():
        shape, strides = (keys.shape[0], 2, *keys.shape[1:]), (keys.stride(0), between, *keys.stride()[1:])
        return [(_bits(keys.as_strided(shape, strides)), slice(0, 2))]
    return [(_bits(keys)[:, None], slice(0, 1)), (_bits(values)[:, None], slice(1, 2))]


def _parts(table: BlockTable, slices: Slices) -> Iterator[tuple[Run, Bits]]:
    """Each run with its part of its chunk's slice, seen as the pool is:
    [count, 2, kv_heads, tokens of a block, head_dim]."""
    chunks = [_by_block(chunk, table.block_tokens) for chunk in _whole(table, slices)]
    for run in table.runs:
        begin = run.first // table.block_tokens
        if run.chunk < len(chunks):
            yield run, chunks[run.chunk][begin : begin + run.count]
        else:  # the last one, packed
            tokens = table.tokens_of(run.chunk)
            last = _bits(slices[run.chunk])
            _, heads, _, head_dim = last.shape
            packed = last.reshape(-1)[: 2 * heads * tokens * head_dim].reshape(2, heads, tokens, head_dim)
            here = packed[:, :, run.first : run.first + run.tokens]
            yield run, _by_block(here, run.tokens // run.count)


def _whole(table: BlockTable, slices: Slices) -> Sequence[Bits]:
    full = table.tokens // table.chunk_tokens
    if isinstance(slices, torch.Tensor):
        return list(_bits(slices[:full]))
    return [_bits(chunk) for chunk in slices[:full]]


def _by_block(chunk: Bits, block_tokens: int) -> Bits:
    """[2, kv_heads, tokens, head_dim] seen as [blocks, 2, kv_heads, block_tokens, head_dim]."""
    _, heads, _, head_dim = chunk.shape
    return chunk.reshape(2, heads, -1, block_tokens, head_dim).transpose(2, 0, 1, 3, 4)


def _held(pool: Bits, run: Run) -> Bits:
    """The run's part of the pool."""
    here = pool[run.block : run.block + run.count]
    return here[..., : run.tokens, :] if run.count == 1 else here


def _rotated(keys: torch.Tensor, part: Bits, run: Run, by: Rotation) -> None:
    source = torch.from_numpy(part).view(keys.dtype)
    target = keys[run.block : run.block + run.count, :, : source.shape[2]]
    here = slice(run.first, run.first + run.tokens)
    by = by.map(lambda table: table[run.chunk, here].unflatten(0, (run.count, 1, -1)))
    cpu.rotate(source, by, target)
