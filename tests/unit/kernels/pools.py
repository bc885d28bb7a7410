"""Random paged pools as engines lay them out, beside slices of a store, filled with bits of any meaning."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvstore.kernels.pages import BlockTable

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64)
Pair = tuple[torch.Tensor, torch.Tensor]


def _rows(shared: torch.Tensor) -> Pair:
    keys, values = shared.unbind(1)
    return torch.cat((keys, values), -1).chunk(2, -1)


def _apart(shared: torch.Tensor) -> Pair:
    """In memory of their own, V not at its beginning."""
    keys, values = (half.contiguous() for half in shared.unbind(1))
    return keys, torch.cat((values[:1], values))[1:]


def _packed(shared: torch.Tensor) -> Pair:
    """For each block and head K transposed, then V, as vLLM has it on CPUs."""
    blocks, _, heads, tokens, head_dim = shared.shape
    memory = shared.new_empty(blocks, heads, 2, tokens * head_dim)
    keys = memory[:, :, 0].unflatten(-1, (head_dim, tokens)).transpose(2, 3)
    values = memory[:, :, 1].unflatten(-1, (tokens, head_dim))
    return keys.copy_(shared[:, 0]), values.copy_(shared[:, 1])


LAYOUTS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "ours": lambda pool: pool.unbind(1),
    "heads first": lambda pool: pool.transpose(0, 1).contiguous().unbind(0),
    "tokens first": lambda pool: pool.permute(1, 0, 3, 2, 4).contiguous().transpose(2, 3).unbind(0),
    "tokens first, K beside V": lambda pool: (
        pool.permute(0, 3, 2, 1, 4).contiguous().permute(3, 0, 2, 1, 4).unbind(0)
    ),
    "K and V in one row": _rows,
    "K and V apart": _apart,
    "K transposed": _packed,
    "blocks last": lambda pool: pool.permute(1, 2, 3, 4, 0).contiguous().permute(0, 4, 1, 2, 3).unbind(0),
    "a part of something larger": lambda pool: (
        pool.new_empty([2 * length for length in pool.shape])[(slice(1, None, 2),) * 5].copy_(pool).unbind(1)
    ),
}


@dataclass
class Paged:
    """A sequence in a pool, a table of where it lies, and slices; every bit of both is random."""

    layout: str = "ours"
    dtype: torch.dtype = torch.float16
    heads: int = 2
    head_dim: int = 16
    block_tokens: int = 4
    chunk_blocks: int = 2
    tokens: int = 19
    holes: float = 0.0
    in_order: float = 0.5
    """How often a block follows the one before it."""
    seed: int = 0
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        needed = -(-self.tokens // self.block_tokens)
        blocks = needed + 3
        # Pieces of consecutive blocks, shuffled
        pieces: list[list[int]] = []
        for block in range(blocks):
            if pieces and self.random.random() < self.in_order:
                pieces[-1].append(block)
            else:
                pieces.append([block])
        self.random.shuffle(pieces)
        numbers = [block for piece in pieces for block in piece][:needed]
        self.numbers = [-1 if self.random.random() < self.holes else block for block in numbers]
        self.blocks = blocks
        shape = (blocks, 2, self.heads, self.block_tokens, self.head_dim)
        self.keys, self.values = LAYOUTS[self.layout](self.bits(shape))
        self.slices = self.bits((self.table().chunks, 2, self.heads, self.chunk_tokens, self.head_dim))

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * self.block_tokens

    def bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        *lead, last = shape
        drawn = [self.random.getrandbits(8) for _ in range(64)]
        draw = torch.Generator().manual_seed(sum(drawn))
        raw = torch.randint(0, 256, (*lead, last * self.dtype.itemsize), generator=draw, dtype=torch.uint8)
        return raw.view(self.dtype)

    def table(self, **changes: object) -> BlockTable:
        settings: dict = {
            "numbers": self.numbers,
            "blocks": self.blocks,
            "block_tokens": self.block_tokens,
            "chunk_tokens": self.chunk_tokens,
            "tokens": self.tokens,
        }
        return BlockTable.of(**settings | changes)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    plain = (each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (one, other))
    return one.shape == other.shape and torch.equal(*plain)
