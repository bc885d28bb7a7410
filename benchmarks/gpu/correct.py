"""Whether kernels are right on the device: beside fp64, bit by bit, again and again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import torch

from gpu.section import Row, Section, Sequences, Steps, random_sequences
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.decode.naive import naive_decode_attention
from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.pages.naive import naive_gather, naive_scatter
from kvstore.kernels.prefill import prefill_attention
from kvstore.kernels.prefill.naive import naive_prefill_attention
from kvstore.kernels.rotate import rotate, rotation
from kvstore.kernels.rotate.naive import naive_rotate


class Correct(Section):
    """Each kernel beside what it should give."""

    def steps(self) -> Steps:
        shapes: list[Row] = [
            {"head_dim": 128, "group": 1, "chunk_tokens": 64, "tile": 16},
            {"head_dim": 128, "group": 4, "chunk_tokens": 64, "tile": 8},
            {"head_dim": 128, "group": 4, "chunk_tokens": 16, "tile": 16, "soft_cap": 20.0},
            {"head_dim": 128, "group": 8, "chunk_tokens": 256, "tile": 16},
            {"head_dim": 64, "group": 1, "chunk_tokens": 32, "tile": 64, "scale": 0.3},
            {"head_dim": 80, "group": 2, "chunk_tokens": 64, "tile": 16},
            {"head_dim": 96, "group": 7, "chunk_tokens": 128, "tile": 4},
            {"head_dim": 256, "group": 1, "chunk_tokens": 64, "tile": 64},
            {"head_dim": 256, "group": 2, "chunk_tokens": 16, "tile": 8, "soft_cap": 50.0},
        ]
        if not self.on.real:
            shapes = [
                {"head_dim": 16, "group": 2, "chunk_tokens": 16, "tile": 2, "soft_cap": 20.0, "batch": 4}
            ]
        # Time may run out: first what nothing else shows, then the common shapes in every dtype
        yield "decode: a graph that is replayed while sequences grow", self.graph_while_growing
        for dtype in self.dtypes():
            for interleaved in (False, True):
                pairs = "interleaved" if interleaved else "half-split"
                yield (
                    f"rotate: {dtype}, {pairs} pairs".replace("torch.", ""),
                    partial(self.correct_rotate, dtype, interleaved),
                )
            for layout in ("ours", "tokens first"):
                name = f"gather and scatter: {dtype}, {layout}".replace("torch.", "")
                yield name, partial(self.correct_pages, dtype, layout)
        yield "decode and prefill: layers of more than 2^31 elements", self.far_chunks
        for tokens in (32_768, 131_072) if self.on.real else (200,):
            yield f"decode and prefill: {tokens} tokens", partial(self.long_context, tokens)
        yield "decode and prefill: logits of 10^4, on another stream", self.large_logits
        for seed, shape in enumerate(shapes):
            for dtype in self.dtypes():
                for kind, attend in (("decode", self.correct_decode), ("prefill", self.correct_prefill)):
                    name = f"{kind}: {dtype} {shape}".replace("torch.", "")
                    yield name, partial(attend, dtype, seed, **shape)

    def correct_decode(
        self,
        dtype: torch.dtype,
        seed: int,
        *,
        head_dim: int,
        group: int,
        chunk_tokens: int,
        tile: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        batch: int = 24,
        kv_heads: int = 4,
    ) -> Row:
        sequences, chunks = random_sequences(seed, batch, chunk_tokens)
        heads = group * kv_heads
        q = self.randn(seed, batch, heads, head_dim).to(dtype)
        pool = self.pool(dtype, seed, sequences, chunks, chunk_tokens, kv_heads, head_dim)
        options = {"scale": scale, "soft_cap": soft_cap}

        def attend(pool: torch.Tensor, sequences: Sequences) -> torch.Tensor:
            plan = self.forest(sequences, batch, chunks, chunk_tokens, tile, split_tokens=256).plan()
            return decode_attention(q, *pool.unbind(1), plan, out=torch.full_like(q, math.nan), **options)

        tile = min(tile, self.rows_max(head_dim) // group)
        out = attend(pool, sequences)
        keys, values = pool.unbind(1)
        exact = naive_decode_attention(q, keys, values, sequences, **options)
        plain = naive_decode_attention(q, keys, values, sequences, dtype=dtype, **options)
        return self.compared(out, exact, plain) | self.same_bits(out, attend, pool, sequences)

    def correct_prefill(
        self,
        dtype: torch.dtype,
        seed: int,
        *,
        head_dim: int,
        group: int,
        chunk_tokens: int,
        tile: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        batch: int = 12,
        kv_heads: int = 4,
    ) -> Row:
        sequences, chunks = random_sequences(seed, batch, chunk_tokens)
        draw = random.Random(seed)
        new = {row: draw.choice((1, draw.randint(1, n), n)) for row, (_, n) in sequences.items() if n}
        q = self.randn(seed, sum(new.values()), group * kv_heads, head_dim).to(dtype)
        pool = self.pool(dtype, seed, sequences, chunks, chunk_tokens, kv_heads, head_dim)
        options = {"scale": scale, "soft_cap": soft_cap}

        def attend(pool: torch.Tensor, sequences: Sequences, **work: int) -> torch.Tensor:
            forest = self.forest(sequences, batch, chunks, chunk_tokens, tile, split_tokens=256)
            plan = forest.prefill(new, **work)
            return prefill_attention(q, *pool.unbind(1), plan, out=torch.full_like(q, math.nan), **options)

        out = attend(pool, sequences)
        keys, values = pool.unbind(1)
        exact = naive_prefill_attention(q, keys, values, sequences, new, **options)
        plain = naive_prefill_attention(q, keys, values, sequences, new, dtype=dtype, **options)
        row = self.compared(out, exact, plain) | self.same_bits(out, attend, pool, sequences)
        cut = attend(pool, sequences, tile_queries=tile, split_tokens=2 * chunk_tokens)
        return row | {"max_error_when_cut": self.compared(cut, exact, plain)["max_error"]}

    def both(
        self, pool: torch.Tensor, sequences: Sequences, q: torch.Tensor, scale: float | None = None
    ) -> list[torch.Tensor]:
        """Decode's and prefill's results, of the sequences' last tokens."""
        batch, chunk_tokens = len(sequences), pool.shape[3]
        forest = self.forest(sequences, batch, len(pool), chunk_tokens, 16, split_tokens=4 * chunk_tokens)
        keys, values = pool.unbind(1)
        new = dict.fromkeys(sequences, 1)
        return [
            decode_attention(q, keys, values, forest.plan(), scale=scale),
            prefill_attention(q, keys, values, forest.prefill(new), scale=scale),
        ]

    def far_chunks(self) -> Row:
        """The same chunks at both ends of a layer give the same bits."""
        kv_heads, chunk_tokens, head_dim, own = 8, 64, 128, 6
        elements = 2 * kv_heads * chunk_tokens * head_dim
        chunks = (1 << 31) // elements + 64 if self.on.real else 64
        if self.on.real and torch.cuda.mem_get_info()[0] < 2.2 * chunks * elements:
            return {"left_out": "not enough memory"}
        pool = torch.empty(
            chunks, 2, kv_heads, chunk_tokens, head_dim, dtype=torch.float16, device=self.on.device
        )
        pool[:own] = self.randn(1, own, 2, kv_heads, chunk_tokens, head_dim).half()
        pool[-own:] = pool[:own]
        q = self.randn(2, 1, 4 * kv_heads, head_dim).half()
        tokens = own * chunk_tokens - 5
        near = self.both(pool, {0: (list(range(own)), tokens)}, q)
        far = self.both(pool, {0: (list(range(chunks - own, chunks)), tokens)}, q)
        if not all(torch.equal(one, other) for one, other in zip(near, far, strict=True)):
            raise AssertionError("what is far in memory differs")
        sequences = {0: (list(range(own)), tokens)}
        exact, plain = (
            naive_decode_attention(q, *pool[:own].unbind(1), sequences, dtype=dtype)
            for dtype in (torch.float64, torch.float16)
        )
        for found in near:
            self.compared(found, exact, plain)
        return {"elements": pool.numel(), "over_2_31": pool.numel() > 1 << 31}

    def long_context(self, tokens: int) -> Row:
        kv_heads, chunk_tokens, head_dim, batch = 2, 64, 128, 2
        own = -(-tokens // chunk_tokens)
        sequences = {row: ([*range(row * own, (row + 1) * own)], tokens - row) for row in range(batch)}
        pool = self.randn(1, batch * own, 2, kv_heads, chunk_tokens, head_dim).half()
        q = self.randn(2, batch, 4 * kv_heads, head_dim).half()
        keys, values = pool.unbind(1)
        exact = naive_decode_attention(q, keys, values, sequences)
        plain = naive_decode_attention(q, keys, values, sequences, dtype=torch.float16)
        decoded, prefilled = self.both(pool, sequences, q)
        return self.compared(prefilled, exact, plain) | self.compared(decoded, exact, plain)

    def large_logits(self) -> Row:
        """exp of their differences is 0 or 1; no two infinities are subtracted."""
        sequences, chunks = random_sequences(5, 6, 16)
        sequences = dict(enumerate(each for each in sequences.values() if each[1]))
        pool = self.pool(torch.float16, 5, sequences, chunks, 16, 2, 64)
        keys, values = pool.unbind(1)
        q = (
            self.randn(6, len(sequences), 8, 64) * 1e3
        ).half()  # products of some 10^4, below what float16 has
        found: list[torch.Tensor] = []
        if self.on.real:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = self.both(pool, sequences, q, 1.0)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            found = self.both(pool, sequences, q, 1.0)
        exact = naive_decode_attention(q, keys, values, sequences, scale=1.0)
        plain = naive_decode_attention(q, keys, values, sequences, scale=1.0, dtype=torch.float16)
        return self.compared(found[0], exact, plain) | self.compared(found[1], exact, plain)

    def compared(self, out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> Row:
        """By the rule of the tests (tests/unit/kernels/conftest.py)."""
        rounding = ((exact.to(out.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
        last_place = torch.finfo(out.dtype).eps * exact.abs().max().item() / 2
        error, allowed = ((found.double() - exact).abs().max().item() for found in (out, plain))
        allowed = 2 * allowed + 2 * rounding + last_place
        if not error <= allowed:  # also if it is NaN
            raise AssertionError(f"differs by {error:.3g} from fp64, allowed are {allowed:.3g}")
        return {"max_error": error, "allowed": allowed}

    def same_bits(
        self,
        out: torch.Tensor,
        attend: Callable[[torch.Tensor, Sequences], torch.Tensor],
        pool: torch.Tensor,
        sequences: Sequences,
    ) -> Row:
        if not all(torch.equal(attend(pool, sequences), out) for _ in range(5)):
            raise AssertionError("repeated runs differ")
        last = len(pool) - 1
        moved = {row: ([last - chunk for chunk in own], tokens) for row, (own, tokens) in sequences.items()}
        if not torch.equal(attend(pool.flip(0), moved), out):
            raise AssertionError("moved chunks give other bits")
        return {}

    def correct_rotate(self, dtype: torch.dtype, interleaved: bool) -> Row:
        keys = self.randn(1, 5, 4, 33, 80).to(dtype)
        inv_freq = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        deltas = torch.randint(-100_000, 100_000, (33,), generator=torch.Generator().manual_seed(1))
        deltas[3] = 0
        by = rotation(deltas, inv_freq, interleaved=interleaved, device=self.on.device)
        out = rotate(keys, by, out=torch.full_like(keys, math.nan))
        exact = naive_rotate(keys.cpu(), deltas, inv_freq, interleaved=interleaved)
        rounding = (exact.to(dtype).double() - exact).abs().max().item()
        error = (out.cpu().double() - exact).abs().max().item()
        if not error <= 2 * rounding:
            raise AssertionError(f"differs by {error:.3g} from fp64, allowed are {2 * rounding:.3g}")
        if not (torch.equal(out[..., 64:], keys[..., 64:]) and torch.equal(out[..., 3, :], keys[..., 3, :])):
            raise AssertionError("what is not rotated differs")
        return {"max_error": error, "allowed": 2 * rounding}

    def correct_pages(self, dtype: torch.dtype, layout: str) -> Row:
        blocks, block_tokens, chunk_tokens, tokens, kv_heads, head_dim = 40, 16, 64, 300, 4, 80
        pool = self.randn(2, blocks, 2, kv_heads, block_tokens, head_dim).to(dtype)
        if layout == "tokens first":
            pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
        keys, values = pool.unbind(1)
        numbers = random.Random(3).sample(range(blocks), -(-tokens // block_tokens))
        numbers[2] = -1
        sizes = {
            "blocks": blocks,
            "block_tokens": block_tokens,
            "chunk_tokens": chunk_tokens,
            "tokens": tokens,
        }
        table = BlockTable.of(numbers, **sizes, device=self.on.device)
        slices = torch.full((table.chunks, 2, kv_heads, chunk_tokens, head_dim), math.nan, dtype=dtype)
        slices = slices.to(self.on.device)
        expected = naive_gather(keys.cpu(), values.cpu(), self.on_cpu(table, numbers, sizes), slices.cpu())
        gather(keys, values, table, slices)
        if not same(slices.cpu(), expected):
            raise AssertionError("gather: other bits than one by one")
        back = [torch.full_like(half, math.nan) for half in (keys, values)]
        slices.nan_to_num_(0.5)
        expected_back = naive_scatter(
            back[0].cpu(), back[1].cpu(), self.on_cpu(table, numbers, sizes), slices.cpu()
        )
        scatter(back[0], back[1], table, slices)
        if not all(same(found.cpu(), wanted) for found, wanted in zip(back, expected_back, strict=True)):
            raise AssertionError("scatter: other bits than one by one")
        inv_freq = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        by = rotation(torch.full((table.chunks, 1), 1234), inv_freq, device=self.on.device)
        scatter(back[0], back[1], table, slices, by=by)
        apart = rotate(slices[0, 0], rotation(1234, inv_freq, device=self.on.device))
        if not torch.equal(back[0][numbers[0]], apart[:, :block_tokens]):
            raise AssertionError("scatter with a rotation: other bits than rotate")
        return {}

    def on_cpu(self, table: BlockTable, numbers: list[int], sizes: dict[str, int]) -> BlockTable:
        return table if not self.on.real else BlockTable.of(numbers, **sizes)

    def graph_while_growing(self, tokens: int = 200) -> Row:
        batch, chunk_tokens, dtype = 8, 16, torch.float16
        tokens = tokens if self.on.real else 20
        sequences, chunks = random_sequences(
            1, batch, chunk_tokens, more=batch * (tokens // chunk_tokens + 1)
        )
        unused = iter(sorted(set(range(chunks)) - {chunk for own, _ in sequences.values() for chunk in own}))
        forest = self.forest(sequences, batch, chunks, chunk_tokens, 16, split_tokens=64)
        q = self.randn(1, batch, 8, 128).to(dtype)
        keys, values = self.pool(dtype, 1, sequences, chunks, chunk_tokens, 8, 128).nan_to_num_(0.5).unbind(1)
        plan, out = forest.plan(), torch.empty_like(q)
        replay = self.captured(lambda: decode_attention(q, keys, values, plan, out=out))
        worst, captures = 0.0, 1
        for number in range(tokens):
            new = {row: next(unused) for row, (_, length) in sequences.items() if length % chunk_tokens == 0}
            forest.step(new)
            if forest.plan().capacity != plan.capacity:
                plan, captures = forest.plan(), captures + 1
                replay = self.captured(lambda plan=plan: decode_attention(q, keys, values, plan, out=out))
            for row, (own, length) in sequences.items():
                sequences[row] = ([*own, *([new[row]] if row in new else ())], length + 1)
            if number % 10 == 0:
                out.fill_(math.nan)
                replay()
                exact = naive_decode_attention(q, keys, values, sequences)
                error = (out.double() - exact).abs().max().item()
                if not error < 5e-3:  # also if it is NaN
                    raise AssertionError(f"after {number + 1} tokens it differs by {error:.3g}")
                worst = max(worst, error)
        return {"max_error": worst, "captures": captures}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: NaN is like itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
