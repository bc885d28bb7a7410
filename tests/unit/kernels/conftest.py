"""Random forests beside a plain record of their sequences; what a result may differ from the exact one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvstore.kernels.decode.naive import naive_decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.prefill.naive import naive_prefill_attention
from kvstore.kernels.stretches import Stretch

NAN = float("nan")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled once in a run is compiled; what an earlier run compiled proves nothing."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


FEW = 256
"""Numbers of which the plain result may be closer than usual."""
Attend = Callable[..., torch.Tensor]
New = Mapping[int, int | Sequence[int]]


@dataclass
class Case:
    """Sequences as told, and a pool that holds NaN wherever no sequence has a token."""

    chunk_tokens: int = 16
    split_chunks: int = 2
    tile_sequences: int = 4
    rows: int = 6
    chunks: int = 64
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    seed: int = 0
    interleaved: bool = False
    sequences: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    stretches: dict[int, list[Stretch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.unused = list(range(self.chunks))
        self.random.shuffle(self.unused)

    def add(self, row: int, *, like: int | None = None, shared: int = 0, more: int = 0) -> None:
        """A sequence with the first `shared` (or all) full chunks of another one, and `more` tokens of its own."""
        chunks: list[int] = []
        if like is not None:
            other, tokens = self.sequences[like]
            chunks = other[: min(shared, tokens // self.chunk_tokens)]
        tokens = len(chunks) * self.chunk_tokens + more
        own = -(-more // self.chunk_tokens)
        self.sequences[row] = ([*chunks, *(self.unused.pop() for _ in range(own))], tokens)

    def fill(self, sequences: int) -> Case:
        """Add so many random sequences: new roots, forks at any chunk, empty ones, tails of any length."""
        for row in self.random.sample(range(self.rows), sequences):
            like = self.random.choice([None, *self.sequences])
            shared = self.random.randint(0, 6)
            more = self.random.choice((0, self.chunk_tokens, self.random.randrange(3 * self.chunk_tokens)))
            self.add(row, like=like, shared=shared, more=min(more, len(self.unused) * self.chunk_tokens))
        return self

    def scatter(self) -> Case:
        """Give some sequences stretches: of chunks of their own, of other sequences' chunks, and of those that another
        one sees too, there or elsewhere, also twice."""
        known: list[tuple[int, int, int]] = []
        for row, (_, tokens) in self.sequences.items():
            for _ in range(self.random.randrange(5) if tokens else 0):
                full = [
                    one for chunks, n in self.sequences.values() for one in chunks[: n // self.chunk_tokens]
                ]
                pick = self.random.randrange(3)
                if pick == 0 and known:
                    what = self.random.choice(known)
                elif pick == 1 and full:
                    what = (self.random.choice(full), 0, self.chunk_tokens)
                elif self.unused:
                    first = self.random.randrange(self.chunk_tokens)
                    what = (self.unused.pop(), first, self.random.randint(1, self.chunk_tokens - first))
                else:
                    continue
                known.append(what)
                delta = self.random.choice((0, 0, -7, -7, self.random.randint(-5000, 5000)))
                at = self.random.choice((0, 0, self.random.randrange(tokens)))
                self.stretches.setdefault(row, []).append(Stretch(*what, delta=delta, at=at))
        return self

    @property
    def inv_freq(self) -> torch.Tensor:
        """Of a part of head_dim, as where rotation is partial."""
        pairs = max(1, self.head_dim // 4)
        return 10_000.0 ** -(torch.arange(pairs) / pairs)

    def elsewhere(self) -> dict[str, Any]:
        """What the plain functions have to know of stretches."""
        return {"stretches": self.stretches, "inv_freq": self.inv_freq, "interleaved": self.interleaved}

    def forest(self, **changes: Any) -> Forest:
        settings = {
            "chunk_tokens": self.chunk_tokens,
            "chunks": self.chunks,
            "sequences_max": self.rows,
            "split_tokens": self.split_chunks * self.chunk_tokens,
            "tile_sequences": self.tile_sequences,
            "items_max": 128,
            "partials_max": 128,
        }
        forest = Forest(**settings | changes)
        for row, (chunks, tokens) in self.sequences.items():
            forest.join(row, chunks, tokens, self.stretches.get(row, ()))
        return forest

    def attend(
        self, attend: Attend, q: torch.Tensor, *pool: torch.Tensor, plan: Any, **options: Any
    ) -> torch.Tensor:
        """With turned queries, where there is something to turn them for."""
        if plan.stretches is not None:
            options["turned"] = plan.stretches.turn(q, self.inv_freq, interleaved=self.interleaved)
        return attend(q, *pool, plan, **options)

    def tensors(
        self, dtype: torch.dtype, size: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values; logits grow with `size`."""
        draw = torch.Generator().manual_seed(self.seed)
        shape = (self.chunks, 2, self.kv_heads, self.chunk_tokens, self.head_dim)
        q = torch.randn(self.rows, self.kv_heads * self.group, self.head_dim, generator=draw) * size
        drawn = torch.randn(shape, generator=draw)
        pool = torch.full(shape, NAN)
        for chunks, tokens in self.sequences.values():
            for number, chunk in enumerate(chunks):
                here = min(self.chunk_tokens, tokens - number * self.chunk_tokens)
                pool[chunk, :, :, :here] = drawn[chunk, :, :, :here]
        for stretch in (one for stretches in self.stretches.values() for one in stretches):
            here = slice(stretch.first, stretch.first + stretch.tokens)
            pool[stretch.chunk, :, :, here] = drawn[stretch.chunk, :, :, here]
        return q.to(dtype), *pool.to(dtype).unbind(1)

    def check(self, attend: Attend, dtype: torch.dtype, *, size: float = 1.0, **options: Any) -> torch.Tensor:
        """The result of `attend(q, keys, values, plan, out=..., **options)`, held against the exact one."""
        q, keys, values = self.tensors(dtype, size)
        out = torch.full_like(q, NAN)
        self.attend(attend, q, keys, values, plan=self.forest().plan(), out=out, **options)
        options |= self.elsewhere()
        exact = naive_decode_attention(q, keys, values, self.sequences, **options)
        same_maths = naive_decode_attention(q, keys, values, self.sequences, dtype=dtype, **options)
        assert_close(out, exact, same_maths, of_logits(q, keys, values, **options))
        return out

    def new_tokens(self) -> dict[int, int]:
        """Of some rows, in any order, how many of their last tokens are new: all, one, or any number."""
        rows = [row for row, (_, tokens) in self.sequences.items() if tokens]
        rows = self.random.sample(rows, self.random.randint(min(1, len(rows)), len(rows)))
        lengths = {row: self.sequences[row][1] for row in rows}
        return {row: self.random.choice((1, self.random.randint(1, n), n)) for row, n in lengths.items()}

    def scattered(self) -> dict[int, int | list[int]]:
        """As `new_tokens`; of some rows any of their tokens are new."""
        new: dict[int, int | list[int]] = dict(self.new_tokens())
        for row in self.random.sample(list(new), self.random.randint(0, len(new))):
            tokens = self.sequences[row][1]
            new[row] = sorted(self.random.sample(range(tokens), self.random.randint(1, tokens)))
        return new

    def queries(self, new: New, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + 1)
        count = sum(one if isinstance(one, int) else len(one) for one in new.values())
        shape = (count, self.kv_heads * self.group, self.head_dim)
        return (torch.randn(shape, generator=draw) * size).to(dtype)

    def check_prefill(
        self,
        attend: Attend,
        dtype: torch.dtype,
        new: New,
        *,
        size: float = 1.0,
        tile_queries: int | None = None,
        split_tokens: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As `check`, of the last tokens of some rows."""
        q = self.queries(new, dtype, size)
        _, keys, values = self.tensors(dtype)
        out = torch.full_like(q, NAN)
        plan = self.forest().prefill(new, tile_queries=tile_queries, split_tokens=split_tokens)
        self.attend(attend, q, keys, values, plan=plan, out=out, **options)
        options |= self.elsewhere()
        exact = naive_prefill_attention(q, keys, values, self.sequences, new, **options)
        same_maths = naive_prefill_attention(q, keys, values, self.sequences, new, dtype=dtype, **options)
        if new:
            assert_close(out, exact, same_maths, of_logits(q, keys, values, **options))
        return out


def of_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    **_: Any,
) -> float:
    """By how much results may be off because logits are. A logit is a sum in float32, and is multiplied once more: with
    two roundings of numbers of its size it is off by eps of it. Weights p change by as much, relatively, and results by
    p times how far values are from their mean, summed: at most by half of what lies between the values. Which query
    attends to which tokens is not asked here: of all of them, the largest logit."""
    keys, values = (of.nan_to_num(0.0).double() for of in (keys, values))
    by_head = q.double().unflatten(1, (keys.shape[1], -1))
    products = torch.einsum("nhgd,chtd->nhgct", by_head, keys)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    largest = abs(scale) * float(products.abs().amax()) if len(q) else 0.0
    largest = largest if soft_cap is None else min(largest, soft_cap)
    return torch.finfo(torch.float32).eps * largest * float(values.abs().amax())


def assert_close(
    found: torch.Tensor, exact: torch.Tensor, same_maths: torch.Tensor, by_logits: float = 0.0
) -> None:
    """At most twice as far from the fp64 result as the same mathematics done plainly in the working precision, and as
    much again as rounding a number of about that size costs (the rule of flash-attention's tests), half a unit of the
    largest one's last place, and what `of_logits` says: where one query's logits are large, the plain result may be
    closer by luck. Where there are few numbers, it may be all but exact: two units."""
    assert not found.isnan().any(), "something was used or left that nobody wrote"
    rounding = ((exact.to(found.dtype) + 0.3 - 0.3).double() - exact).abs().max()
    units = 2 if exact.count_nonzero() < FEW else 0.5
    last_place = units * torch.finfo(found.dtype).eps * exact.abs().max()
    allowed = 2 * (same_maths.double() - exact).abs().max() + 2 * rounding + last_place + by_logits
    if found.dtype is torch.float64:  # there is nothing more exact to compare with
        allowed = 1e-12 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= allowed
