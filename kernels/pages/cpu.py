"""Gather and scatter on a CPU: numpy copies of plain bits from view to view, one for each run of blocks.

They need no memory of their own, and numpy lets other Python threads run meanwhile. Rotation is done on the views, too.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    pools = bits(keys), bits(values)
    chunks = [bits(one) for one in slices]
    for run, packed in _packed(table, chunks):
        for pool, half in zip(pools, packed, strict=True):
            np.copyto(_blocks(half, run, table), _held(pool, run))
    if (rest := behind(table, slices[-1])) is not None:
        rest.zero_()


def scatter(
    keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices, by: Rotation | None
) -> None:
    """See `scatter` in __init__.py, which checked the arguments. The tables of `by`: [chunks, chunk_tokens, pairs]."""
    pools = bits(keys), bits(values)
    for run, packed in _packed(table, [bits(one) for one in slices]):
        for number, (pool, half) in enumerate(zip(pools, packed, strict=True)):
            if number == 0 and by is not None:
                _rotated(keys, _blocks(half, run, table), run, by)
            else:
                np.copyto(_held(pool, run), _blocks(half, run, table))


def behind(table: BlockTable, last: torch.Tensor) -> torch.Tensor | None:
    """Where the last slice is to be zero, if anywhere."""
    used = table.tokens_of(table.chunks - 1)
    if used == table.chunk_tokens or not table.runs or table.runs[-1].chunk < table.chunks - 1:
        return None
    return last.reshape(-1)[2 * last[0, :, :used].numel() :]


def bits(tensor: torch.Tensor) -> Bits:
    """A tensor's elements as integers, of the same shape and strides, sharing its memory."""
    view: Bits = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    return view


def _packed(table: BlockTable, chunks: list[Bits]) -> Iterator[tuple[Run, Bits]]:
    """Each run with the slice of its chunk, [2, kv_heads, tokens of the chunk, head_dim]."""
    for run in table.runs:
        chunk = chunks[run.chunk]
        if (tokens := table.tokens_of(run.chunk)) < table.chunk_tokens:
            _, heads, _, head_dim = chunk.shape
            chunk = chunk.reshape(-1)[: 2 * heads * tokens * head_dim].reshape(2, heads, tokens, head_dim)
        yield run, chunk


def _blocks(half: Bits, run: Run, table: BlockTable) -> Bits:
    """The run's part of K or V of a slice, as the pool has it: [count, kv_heads, tokens of a block, head_dim]."""
    here = half[:, run.first : run.first + run.tokens]
    return here.reshape(half.shape[0], run.count, -1, half.shape[2]).swapaxes(0, 1)


def _held(pool: Bits, run: Run) -> Bits:
    """The same part of the pool."""
    here = pool[run.block : run.block + run.count]
    return here[:, :, : run.tokens] if run.count == 1 else here


def _rotated(keys: torch.Tensor, blocks: Bits, run: Run, by: Rotation) -> None:
    source = torch.from_numpy(blocks).view(keys.dtype)
    target = keys[run.block : run.block + run.count, :, : source.shape[2]]
    here = slice(run.first, run.first + run.tokens)
    by = by.map(lambda table: table[run.chunk, here].unflatten(0, (run.count, 1, -1)))
    cpu.rotate(source, by, target)
