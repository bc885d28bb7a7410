"""Between a paged pool and chunk slices: `gather` copies a sequence's KV of one layer out of the pool's blocks, as the
store's shards hold it; `scatter` copies it back, and can rotate the keys on the way.

A pool is two views, keys and values, each [blocks, kv_heads, block_tokens, head_dim] with any strides. That covers what
engines have, without a copy:

    ours                           [chunks, 2, kv_heads, chunk_tokens, head_dim]   pool.unbind(1)
    heads first (HND)              [2, blocks, kv_heads, block_tokens, head_dim]   pool
    tokens first (NHD)             [2, blocks, block_tokens, kv_heads, head_dim]   pool.transpose(2, 3)
    K and V in one row             [blocks, kv_heads, block_tokens, 2 * head_dim]  pool.chunk(2, -1)

Slices are [chunks, 2, kv_heads, chunk_tokens, head_dim], each chunk contiguous, wherever it lies. A last chunk of n
tokens, fewer than chunk_tokens, is packed as in a shard, and zeros follow (gpu_worker/layout.py):

    | K [kv_heads, n, head_dim] | V [kv_heads, n, head_dim] | 0 ... |

`naive.py` says what is copied, `cpu.py` and `kernel.py` (Triton) how it is done fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvstore.kernels.pages import cpu
from kvstore.kernels.rotate import Rotation, apart, check_apart, check_elsewhere, check_rotation, span

__all__ = ["BlockTable", "Run", "gather", "scatter"]

HOLE = -1
DEVICES = ("cpu", "cuda")
Slices = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one chunk that follow one another in the pool: `count` from number `block` on. Their `tokens` begin
    with token `first` of the chunk; only the sequence's last block may have fewer than block_tokens."""

    chunk: int
    first: int
    block: int
    count: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Where the tokens of a sequence, from the beginning of a chunk on, lie in a pool. Made by `BlockTable.of`, which
    checks it once for all layers."""

    numbers: torch.Tensor
    """int32 [blocks of the sequence], on the pool's device."""
    runs: tuple[Run, ...]
    blocks: int
    block_tokens: int
    chunk_tokens: int
    tokens: int
    twice: int
    """A block that is named more than once, or -1: nothing can be scattered into it."""

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor | Sequence[int],
        *,
        blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> BlockTable:
        """* `numbers`: the pool's block for each block of the sequence, integers of any shape, read in C order; -1 is a
          hole, whose tokens are left out. A tensor on a GPU is waited for, since it is checked on the CPU.
        * `blocks`, `block_tokens`: of the pool; `chunk_tokens`: a multiple of block_tokens.
        * `tokens`: of the sequence, by default all that fit in its blocks; they must need every block.
        * `device`: the pool's; by default where the numbers are.

        Raises ValueError for a number outside of the pool, and for sizes that do not fit.
        """
        for name, size in (
            ("blocks", blocks),
            ("block_tokens", block_tokens),
            ("chunk_tokens", chunk_tokens),
        ):
            if size < 1:
                raise ValueError(f"{name} is {size}: must be at least 1")
        if chunk_tokens % block_tokens:
            raise ValueError(
                f"chunk_tokens is {chunk_tokens}: must be a multiple of block_tokens ({block_tokens})"
            )
        given = torch.as_tensor(numbers)
        if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool):
            raise ValueError(f"numbers are {given.dtype}: must be integers")
        named: list[int] = given.flatten().tolist()
        tokens = len(named) * block_tokens if tokens is None else tokens
        if len(named) != -(-tokens // block_tokens) or tokens < 0:
            raise ValueError(
                f"numbers names {len(named)} blocks of {block_tokens} tokens: {tokens} tokens need "
                f"{-(-tokens // block_tokens)}"
            )
        seen: set[int] = set()
        twice = HOLE
        for place, block in enumerate(named):
            if not HOLE <= block < blocks:
                raise ValueError(
                    f"numbers[{place}] is {block}: the pool has blocks 0 to {blocks - 1}, and -1 is a hole"
                )
            if block != HOLE and block in seen:
                twice = block
            seen.add(block)
        device = given.device if device is None else torch.device(device)
        return cls(
            numbers=torch.tensor(named, dtype=torch.int32).to(device, non_blocking=True),
            runs=tuple(_runs(named, block_tokens, chunk_tokens, tokens)),
            blocks=blocks,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            tokens=tokens,
            twice=twice,
        )

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk_tokens)

    def tokens_of(self, chunk: int) -> int:
        return min(self.chunk_tokens, self.tokens - chunk * self.chunk_tokens)


def gather(keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices) -> None:
    """Copy the KV that `table` names out of the pool into `slices`, bit by bit.

    * `keys`, `values`: [blocks, kv_heads, block_tokens, head_dim] of any dtype and strides, the same shape for both.
    * `slices`: [table.chunks, 2, kv_heads, chunk_tokens, head_dim], where each chunk is contiguous. On a CPU also a
      sequence of such chunks, which may lie anywhere (slots in shared memory).

    Tokens in holes are left as they are in `slices`. Behind a last chunk that is not full come zeros, unless all of it
    is a hole. On a CUDA device it runs on the current stream (one Triton kernel, and a fill where zeros are needed),
    waits for nothing and can be captured in a graph; loads are 16 bytes wide if strides and addresses are multiples of
    that and head_dim is contiguous. Raises ValueError for arguments that do not fit, before anything is written.
    """
    _check(keys, values, table, slices)
    if isinstance(slices, torch.Tensor):
        check_apart("slices", slices)
    else:
        spans = sorted((*span(chunk), number) for number, chunk in enumerate(slices))
        for (_, end, one), (begin, _, other) in pairwise(spans):
            if begin < end:
                raise ValueError(f"slices[{one}] overlaps slices[{other}]: give each chunk memory of its own")
    if table.tokens == 0:
        return
    if keys.device.type == "cpu":
        cpu.gather(keys.detach(), values.detach(), table, slices)
    else:
        from kvstore.kernels.pages import kernel  # Triton is there only where there is a GPU

        kernel.gather(keys, values, table, slices)


def scatter(
    keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices, *, by: Rotation | None = None
) -> None:
    """Copy `slices` back into the blocks of the pool that `table` names, bit by bit.

    * `keys`, `values`, `slices`: as for `gather`; the other tokens of the pool stay as they are.
    * `by`: keys are rotated while they are copied (see `kvstore.kernels.rotate`). The shape of its deltas is broadcast
      to [chunks, chunk_tokens]: one for all, [chunks, 1] for one each, [chunks, chunk_tokens] for each token.

    Raises ValueError for arguments that do not fit, a table that names a block twice, and pools whose elements share
    memory, before anything is written.
    """
    _check(keys, values, table, slices)
    if table.twice != HOLE:
        raise ValueError(f"the table names block {table.twice} twice: what is scattered there is not defined")
    for name, tensor in (("keys", keys), ("values", values)):
        check_apart(name, tensor)
    _check_pair(keys, values)
    if by is not None:
        check_rotation(by, keys)
        shape = (table.chunks, table.chunk_tokens, by.cos.shape[-1])
        try:
            by = by.map(lambda of: of.expand(shape))
        except RuntimeError:
            raise ValueError(
                f"deltas are {list(by.cos.shape[:-1])}: must broadcast to {list(shape[:-1])} (chunks, chunk_tokens)"
            ) from None
    if table.tokens == 0:
        return
    if keys.device.type == "cpu":
        cpu.scatter(keys.detach(), values.detach(), table, slices, by)
    else:
        from kvstore.kernels.pages import kernel

        kernel.scatter(keys, values, table, slices, by)


def _runs(named: Sequence[int], block_tokens: int, chunk_tokens: int, tokens: int) -> Iterator[Run]:
    begin = 0
    while begin < len(named):
        place, end = begin * block_tokens, begin + 1
        while (
            end * block_tokens % chunk_tokens
            and (end + 1) * block_tokens <= tokens
            and named[end] == named[end - 1] + 1 != 0
        ):
            end += 1
        if named[begin] != HOLE:
            yield Run(
                chunk=place // chunk_tokens,
                first=place % chunk_tokens,
                block=named[begin],
                count=end - begin,
                tokens=min(end * block_tokens, tokens) - place,
            )
        begin = end


def _check(keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: Slices) -> None:
    if keys.dim() != 4 or (keys.shape[0], keys.shape[2]) != (table.blocks, table.block_tokens):
        raise ValueError(
            f"keys is {list(keys.shape)}: must be [{table.blocks}, kv_heads, {table.block_tokens}, head_dim], "
            "as the table was made for"
        )
    if keys.device.type not in DEVICES:
        raise ValueError(f"keys is on {keys.device}: must be on one of {', '.join(DEVICES)}")
    if values.shape != keys.shape:
        raise ValueError(f"values is {list(values.shape)}: must be like keys, {list(keys.shape)}")
    if table.numbers.device != keys.device:
        raise ValueError(
            f"the table is on {table.numbers.device}, keys on {keys.device}: make it with device="
        )
    one = (2, keys.shape[1], table.chunk_tokens, keys.shape[3])
    if isinstance(slices, torch.Tensor):
        if slices.shape != (table.chunks, *one):
            raise ValueError(f"slices is {list(slices.shape)}: must be {[table.chunks, *one]}")
        if table.chunks:
            _check_slice("slices[0]", slices[0])
        _check_like("slices", slices, keys)
        check_elsewhere("slices", slices, keys=keys, values=values)
    else:
        if keys.device.type != "cpu":
            raise ValueError(f"slices is a sequence: on {keys.device} it must be one tensor")
        if len(slices) != table.chunks:
            raise ValueError(f"slices are {len(slices)}: must be {table.chunks}, one for each chunk")
        for number, chunk in enumerate(slices):
            if chunk.shape != one:
                raise ValueError(f"slices[{number}] is {list(chunk.shape)}: must be {list(one)}")
            _check_slice(f"slices[{number}]", chunk)
            _check_like(f"slices[{number}]", chunk, keys)
            check_elsewhere(f"slices[{number}]", chunk, keys=keys, values=values)
    _check_like("values", values, keys)


def _check_slice(name: str, chunk: torch.Tensor) -> None:
    if not chunk.is_contiguous():
        raise ValueError(f"{name} has strides {chunk.stride()}: each chunk must be contiguous")


def _check_like(name: str, tensor: torch.Tensor, keys: torch.Tensor) -> None:
    if tensor.dtype != keys.dtype or tensor.device != keys.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}: keys is {keys.dtype} on {keys.device}"
        )


def _check_pair(keys: torch.Tensor, values: torch.Tensor) -> None:
    """K and V take turns in memory, or one begins behind the other.

    However many of the outer dimensions they have in common, for each index of those K lies in one stretch and V in
    another, and such pairs of stretches do not touch. What is not as plain as that is refused.
    """
    between = (values.data_ptr() - keys.data_ptr()) // keys.element_size()
    dimensions = list(zip(keys.shape, keys.stride(), values.stride(), strict=True))
    for least in (math.inf, *keys.stride()):
        outer = [(step, length) for length, step, other in dimensions if step == other and step >= least]
        inner = [each for each in dimensions if each[1] != each[2] or each[1] < least]
        last_key = sum((length - 1) * step for length, step, _ in inner)
        last_value = between + sum((length - 1) * step for length, _, step in inner)
        if (between > last_key or last_value < 0) and apart(
            outer, max(last_key, last_value) - min(0, between)
        ):
            return
    raise ValueError("keys and values share memory: what is scattered there is not defined")
