"""Each kernel beside its naive.py, on the device and for the shapes that a model is served with, before it is trusted:
a compiler or a driver that makes a kernel wrong shows by nothing but wrong tokens.

Inputs are made so that what a fault changes is large beside rounding. A query attends to one token almost alone: to
tokens at the edges of chunks, items and tiles, to the one that it must not see yet, and to none more than to others; or
it is averse to all keys, so that a slot without a token, which is loaded as zeros, would get everything. What nobody
wrote is NaN: pools, results, memory for partial results, and chunk 0, which look-ups beyond a table find. The same code
checks kernels that are interpreted on a CPU, and those for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvstore.kernels.decode import decode_attention
from kvstore.kernels.decode.naive import naive_decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.launch import card_of, rows_max
from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.pages.cpu import INTEGERS
from kvstore.kernels.pages.naive import naive_gather, naive_scatter
from kvstore.kernels.prefill import prefill_attention
from kvstore.kernels.prefill.naive import naive_prefill_attention
from kvstore.kernels.rotate import rotate, rotation
from kvstore.kernels.rotate.naive import naive_rotate
from kvstore.kernels.stretches import Stretch
from kvstore.kernels.warm_up import ROWS
from kvstore.kernels.write import NOWHERE, Slots, write_kv
from kvstore.kernels.write.naive import naive_write_kv

NAN = float("nan")
LOGIT = 8.0
"""Of a token that a query is aimed at, or below all that it is averse to. Some thousand others weigh as much."""
ROUNDING = 4
"""Of attention, in units of the dtype's last place, of values up to 1: weights, turned queries and results are
rounded, each by half a unit at most, and a turned query's logits change with it."""
MORE_SEQUENCES = 3
"""Than a tile has."""
LONG_CHUNKS = 65
"""More than the prefill kernel loads the numbers of at a time."""
PREFILL_SPLIT_TOKENS = 128
"""Of an item, or a chunk: no kernel is compiled for it, and the exact result takes less time."""


class Shape(NamedTuple):
    """What kernels are compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_tokens: int
    split_tokens: int
    """Of the forest, as `tile_sequences`."""
    tile_sequences: int
    pairs: int = 0
    """That a rotation turns; 0: keys of such a model are not moved."""
    interleaved: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim} {dtype}, chunks of {self.chunk_tokens}"


class Wrong(Exception):
    """A kernel gave something else than `naive.py`, or failed."""


class Result(NamedTuple):
    """What a kernel gave, what it should have given, on the CPU, and how far the two may be apart; 0: no bit."""

    case: str
    found: torch.Tensor
    exact: torch.Tensor
    allowed: float = 0.0


Check = Callable[[Shape, torch.device], Iterator[Result]]


def check_kernels(
    shape: Shape, device: torch.device, *, names: Collection[str] | None = None
) -> dict[str, float]:
    """Of each kernel the largest difference that was found. `names`: of those that are checked, by default all. Raises
    Wrong for the first that differs by more than rounding."""
    found: dict[str, float] = {}
    for name in KERNELS if names is None else names:
        try:
            found[name] = max(_difference(result) for result in KERNELS[name](shape, device))
        except Wrong as wrong:
            raise Wrong(f"{name}, {shape}: {wrong}") from wrong.__cause__
        except Exception as error:  # a compiler's, a launch's, or a context that is lost by now
            raise Wrong(f"{name}, {shape}: {type(error).__name__}: {error}") from error
    return found


def _difference(result: Result) -> float:
    found, exact = result.found.cpu(), result.exact
    if not result.allowed:
        differ = (_bits(found) != _bits(exact)).flatten().nonzero()
        if len(differ):
            raise Wrong(
                f"{result.case}: {len(differ)} of {exact.numel()} elements have other bits, the first at "
                f"{int(differ[0])}"
            )
        return 0.0
    largest = float((found.double() - exact.double()).abs().max())  # NaN if any is
    if not largest <= result.allowed:
        raise Wrong(
            f"{result.case}: differs by {largest:.3g} from the exact result, where rounding is {result.allowed:.2g}"
        )
    return largest


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


# ---------------------------------------------------------------------------------------------------------- attention


class _Case:
    """Sequences, some of which share, in a pool that is NaN elsewhere; keys and values on the CPU."""

    def __init__(self, shape: Shape, *, like: int = MORE_SEQUENCES, stretches: bool = False) -> None:
        """`like`: so many sequences are the same chunks, and nothing else."""
        self.shape = shape
        size, split = shape.chunk_tokens, shape.split_tokens
        long = max(2 * split, ROWS[-1] + 1) + size + 5
        self._next = 1  # look-ups beyond a table find chunk 0
        chunks = self._take(-(-long // size))
        item = split // size + 1
        self.sequences: dict[int, tuple[list[int], int]] = {
            0: (chunks, long),
            1: ([*chunks[:item], *self._take(1)], item * size + 1),
            2: ([*chunks[:2], *self._take(1)], 3 * size),
            4: (self._take(-(-3 // size)), 3),  # row 3 has no sequence
        }
        self.rows = 5 + like
        self.sequences |= dict.fromkeys(range(5, self.rows), (chunks[:2], 2 * size))
        self.stretches: dict[int, list[Stretch]] = {}
        if stretches:
            (other,) = self._take(1)
            first = min(3, size - 1)
            moved = (7, -300) if shape.pairs else (0, 0)
            whole = [Stretch(chunk, 0, size, delta=moved[0], at=size) for chunk in chunks[2:4]]
            self.stretches = {
                0: [Stretch(other, first, size - first, delta=moved[1], at=2)],
                1: [Stretch(other, first, size - first, delta=moved[1]), *whole],
                2: whole,
                4: [Stretch(other, first, 1)],
            }
        self.chunks = self._next + 1
        self._known: dict[Stretch, torch.Tensor] = {}
        self.draw = torch.Generator().manual_seed(shape.head_dim)
        self.keys, self.values = self._pool()

    def _take(self, count: int) -> list[int]:
        """Chunks, of which no two are neighbours in their order."""
        self._next += count
        numbers = list(range(self._next - count, self._next))
        return [*numbers[1::2], *numbers[::2]]

    @property
    def apart(self) -> int:
        """The element of keys that is the same in all of them: of the pair that a rotation turns least."""
        if not self.shape.pairs:
            return 0
        return 2 * (self.shape.pairs - 1) if self.shape.interleaved else self.shape.pairs - 1

    @property
    def inv_freq(self) -> torch.Tensor:
        return 10_000.0 ** -(torch.arange(self.shape.pairs) / max(1, self.shape.pairs))

    def _pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        pool = torch.full(
            (self.chunks, 2, shape.kv_heads, shape.chunk_tokens, shape.head_dim), NAN, dtype=shape.dtype
        )
        written = torch.zeros(self.chunks, shape.chunk_tokens, dtype=torch.bool)
        for chunks, tokens in self.sequences.values():
            for number, chunk in enumerate(chunks):
                written[chunk, : tokens - number * shape.chunk_tokens] = True
        for stretch in (one for some in self.stretches.values() for one in some):
            written[stretch.chunk, stretch.first : stretch.first + stretch.tokens] = True
        chunks_of, places = written.nonzero(as_tuple=True)
        new = (len(places), shape.kv_heads, shape.head_dim)
        keys = torch.randn(new, generator=self.draw)
        keys[..., self.apart] = shape.head_dim**0.5
        values = torch.rand(new, generator=self.draw)
        half = shape.head_dim // 2
        values[..., :half] = values[..., :half] * 2 - 1
        values[..., half:] = values[..., half:] / 2 + 0.5  # their mean shows what is missing of many
        pool[chunks_of, 0, :, places] = keys.to(shape.dtype)
        pool[chunks_of, 1, :, places] = values.to(shape.dtype)
        keys, values = pool.unbind(1)
        return keys, values

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.stack((self.keys, self.values), 1).to(device).unbind(1)
        return keys, values

    def forest(self, device: torch.device, *, share: bool = True) -> Forest:
        forest = Forest(
            chunk_tokens=self.shape.chunk_tokens,
            chunks=self.chunks,
            sequences_max=self.rows,
            split_tokens=self.shape.split_tokens,
            tile_sequences=self.shape.tile_sequences,
            share=share,
            device=device,
        )
        for row, (chunks, tokens) in self.sequences.items():
            forest.join(row, chunks, tokens, self.stretches.get(row, ()))
        return forest

    def also(self) -> dict[str, object]:
        """What the naive functions have to know beside sequences."""
        return {
            "stretches": self.stretches,
            "inv_freq": self.inv_freq,
            "interleaved": self.shape.interleaved,
            "dtype": self.exactly,
        }

    def queries(self, asked: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[queries, heads, head_dim]; of each its row, and how many tokens of it it sees."""
        heads = torch.arange(self.shape.heads)
        q = torch.zeros(len(asked), self.shape.heads, self.shape.head_dim)
        for line, (row, seen) in enumerate(asked):
            targets = list(self._targets(row, seen)) if row in self.sequences else []
            # Two kinds more: averse to all, and the same for all
            kinds = (heads + line * (self.shape.heads + 1)) % (len(targets) + 2)
            for kind, target in enumerate(targets):
                q[line, kinds == kind] = self._aimed(target)[kinds == kind]
            q[line, kinds == len(targets), self.apart] = -LOGIT
        return q.to(self.shape.dtype)

    def _targets(self, row: int, seen: int) -> Iterator[Stretch]:
        """Tokens at edges; the one that comes next too, which is not to be seen."""
        chunks, tokens = self.sequences[row]
        size, split = self.shape.chunk_tokens, self.shape.split_tokens
        last = (seen - 1) // size * size
        edges = {0, size - 1, size, last - 1, last, split - 1, split, seen - 2, seen - 1, seen}
        for token in sorted(edge for edge in edges if 0 <= edge < min(tokens, seen + 1)):
            yield Stretch(chunks[token // size], token % size, 1)
        for stretch in self.stretches.get(row, ()):
            for place in {stretch.first, stretch.first + stretch.tokens - 1}:
                yield stretch._replace(first=place, tokens=1)

    def _aimed(self, target: Stretch) -> torch.Tensor:
        """[heads, head_dim]"""
        if target not in self._known:
            keys = self.keys[target.chunk, :, target.first].to(torch.float32, copy=True)
            if target.delta:
                keys = naive_rotate(
                    keys, target.delta, self.inv_freq, interleaved=self.shape.interleaved, dtype=keys.dtype
                )
            keys[:, self.apart] = 0
            aimed = keys * (LOGIT * self.shape.head_dim**0.5 / keys.square().sum(1, keepdim=True))
            self._known[target] = aimed.repeat_interleave(self.shape.heads // self.shape.kv_heads, 0)
        return self._known[target]

    @property
    def exactly(self) -> torch.dtype:
        """What naive functions compute in: float32 is exact beside 16 bits, and takes half the time."""
        return torch.float32 if self.shape.dtype.itemsize == 2 else torch.float64

    @property
    def allowed(self) -> float:
        # Logits are sums in float32
        return ROUNDING * torch.finfo(self.shape.dtype).eps + 2 * LOGIT * torch.finfo(torch.float32).eps


def _check_decode(shape: Shape, device: torch.device, *, stretches: bool = False) -> Iterator[Result]:
    like = MORE_SEQUENCES + (0 if stretches else shape.tile_sequences)
    case = _Case(shape, like=like, stretches=stretches)
    plan = case.forest(device).plan()
    for memory in plan.scratch.of(plan.capacity.partials, shape.heads, shape.head_dim, device):
        memory.fill_(NAN)
    q = case.queries([(row, case.sequences.get(row, ((), 0))[1]) for row in range(case.rows)])
    there = q.to(device)
    turned = None
    if plan.stretches is not None:
        turned = plan.stretches.turn(there, case.inv_freq, interleaved=shape.interleaved)
    out = torch.full_like(there, NAN)
    decode_attention(there, *case.on(device), plan, out=out, turned=turned)
    exact = naive_decode_attention(q, case.keys, case.values, case.sequences, **case.also())  # type: ignore[arg-type]
    yield Result(f"one token each of {len(case.sequences)} sequences", out, exact, case.allowed)


def _check_prefill(shape: Shape, device: torch.device, *, stretches: bool = False) -> Iterator[Result]:
    size = shape.chunk_tokens
    case = _Case(
        shape._replace(split_tokens=max(size, PREFILL_SPLIT_TOKENS // size * size)), stretches=stretches
    )
    forest, pool = case.forest(device), case.on(device)
    group = shape.heads // shape.kv_heads
    most = rows_max(shape.head_dim, most=ROWS[-1], card=card_of(device))
    for rows in (rows for rows in ROWS if rows <= most):
        count = max(1, rows // group) + (rows == most)  # an item of more than one tile
        new: Mapping[int, int | Sequence[int]] = {
            1: 1,
            0: count,
            4: 3,
            2: sorted({0, size - 1, size, 3 * size - 1}),  # what is in between was there before
            **dict.fromkeys(range(5, case.rows), 2),
        }
        plan = forest.prefill(new, tile_queries=count, split_tokens=case.shape.split_tokens)
        for memory in plan.scratch.of(plan.partials, shape.heads, shape.head_dim, device):
            memory.fill_(NAN)
        asked = [(row, number + 1) for row, told in new.items() for number in _numbers(case, row, told)]
        q = case.queries(asked)
        there = q.to(device)
        turned = None
        if plan.stretches is not None:
            turned = plan.stretches.turn(there, case.inv_freq, interleaved=shape.interleaved)
        out = torch.full_like(there, NAN)
        prefill_attention(there, *pool, plan, out=out, turned=turned)
        exact = naive_prefill_attention(
            q,
            case.keys,
            case.values,
            case.sequences,
            new,
            **case.also(),  # type: ignore[arg-type]
        )
        yield Result(f"{len(q)} tokens, tiles of {rows} rows", out, exact, case.allowed)
    if not stretches:
        yield _long_prefill(shape, device)


def _long_prefill(shape: Shape, device: torch.device) -> Result:
    """Behind more chunks than a kernel has numbers of at a time, the same few again and again."""
    case = _Case(shape)
    (chunks, tokens), size = case.sequences[0], shape.chunk_tokens
    *others, last = chunks
    times = -(-LONG_CHUNKS // len(others))
    tokens += (times - 1) * len(others) * size
    case.sequences = {0: ([*others * times, last], tokens)}
    plan = case.forest(device, share=False).prefill({0: 2}, split_tokens=tokens // size * size + size)
    q = case.queries([(0, tokens - 1), (0, tokens)])
    out = torch.full_like(q, NAN, device=device)
    prefill_attention(q.to(device), *case.on(device), plan, out=out)
    exact = naive_prefill_attention(
        q,
        case.keys,
        case.values,
        case.sequences,
        {0: 2},
        **case.also(),  # type: ignore[arg-type]
    )
    return Result(f"behind {len(others) * times} chunks", out, exact, case.allowed)


def _numbers(case: _Case, row: int, told: int | Sequence[int]) -> Sequence[int]:
    tokens = case.sequences[row][1]
    return range(tokens - told, tokens) if isinstance(told, int) else told


def _check_stretches(shape: Shape, device: torch.device) -> Iterator[Result]:
    yield from _check_decode(shape, device, stretches=True)
    yield from _check_prefill(shape, device, stretches=True)


# -------------------------------------------------------------------------------------------------------------- copies


def _random_bits(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN of many kinds among them."""
    draw = torch.Generator().manual_seed(len(shape))
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=draw, dtype=torch.uint8)
    return raw.view(dtype)


def _check_write(shape: Shape, device: torch.device) -> Iterator[Result]:
    chunks, size = 5, shape.chunk_tokens
    pool = _random_bits((chunks, 2, shape.kv_heads, size, shape.head_dim), shape.dtype)
    numbers = [4, 1, NOWHERE, 2, 0]
    places = [0, size - 1, 0, size // 2, size - 1]
    new = _random_bits((2, shape.kv_heads, len(numbers), shape.head_dim), shape.dtype).transpose(1, 2)
    slots = partial(Slots.of, numbers, places, pool_chunks=chunks, chunk_tokens=size)
    there = pool.to(device, copy=True)
    write_kv(there[:, 0], there[:, 1], slots(device=device), new[0].to(device), new[1].to(device))
    exact = naive_write_kv(pool[:, 0], pool[:, 1], slots(), new[0], new[1])
    yield Result(f"{len(numbers)} tokens", there, torch.stack(exact, 1))


def _check_rotate(shape: Shape, device: torch.device) -> Iterator[Result]:
    """Into a chunk that is not full, as a load does; tokens that do not move keep their bits."""
    tokens = max(1, shape.chunk_tokens - 1)
    draw = torch.Generator().manual_seed(0)
    keys = torch.rand((shape.kv_heads, tokens, shape.head_dim), generator=draw) * 2 - 1
    keys = keys.to(shape.dtype)
    inv_freq = 10_000.0 ** -(torch.arange(shape.pairs) / max(1, shape.pairs))
    for delta in (0, 1, -5000):
        chunk = torch.full(
            (shape.kv_heads, shape.chunk_tokens, shape.head_dim), NAN, dtype=shape.dtype, device=device
        )
        by = rotation(delta, inv_freq, interleaved=shape.interleaved, device=device)
        rotate(keys.to(device), by, out=chunk[:, :tokens])
        exact = naive_rotate(keys, delta, inv_freq, interleaved=shape.interleaved)
        found = chunk[:, :tokens]
        if delta:
            yield Result(f"tokens moved by {delta}", found, exact, torch.finfo(shape.dtype).eps)
        else:
            yield Result("tokens that stay", found, keys)
        rest = torch.full_like(chunk[:, tokens:], NAN, device="cpu")
        yield Result("what is behind them", chunk[:, tokens:], rest)


def _check_pages(shape: Shape, device: torch.device) -> Iterator[Result]:
    """Pools as ours and with tokens first, a hole, a last chunk that is not full."""
    block = next(tokens for tokens in (16, 8, 4, 2, 1) if not shape.chunk_tokens % tokens)
    numbers = [7, 2, 3, -1, *range(8, 8 + 2 * shape.chunk_tokens // block)]
    blocks = 9 + 2 * shape.chunk_tokens // block
    tokens = len(numbers) * block - block // 2
    of_pool = (blocks, 2, shape.kv_heads, block, shape.head_dim)
    made = partial(
        BlockTable.of,
        numbers,
        blocks=blocks,
        block_tokens=block,
        chunk_tokens=shape.chunk_tokens,
        tokens=tokens,
    )
    table, table_there = made(), made(device=device)
    one = (2, shape.kv_heads, shape.chunk_tokens, shape.head_dim)
    slices = _random_bits((table.chunks, *one), shape.dtype)
    plain = _random_bits(of_pool, shape.dtype)
    tokens_first = plain.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    for layout, pool in (("ours", plain), ("tokens first", tokens_first)):
        there, gathered = (each.to(device, copy=True) for each in (pool, slices))
        keys, values = pool.unbind(1)
        keys_there, values_there = there.unbind(1)
        gather(keys_there, values_there, table_there, gathered)
        yield Result(f"gather, {layout}", gathered, naive_gather(keys, values, table, slices))
        scatter(keys_there, values_there, table_there, slices.to(device))
        exact = torch.stack(naive_scatter(keys, values, table, slices), 1)
        yield Result(f"scatter, {layout}", there, exact)
    if shape.pairs:
        yield from _check_moved_pages(shape, table, table_there, torch.zeros(of_pool, dtype=shape.dtype))


def _check_moved_pages(
    shape: Shape, table: BlockTable, table_there: BlockTable, pool: torch.Tensor
) -> Iterator[Result]:
    device = table_there.numbers.device
    draw = torch.Generator().manual_seed(1)
    one = (2, shape.kv_heads, shape.chunk_tokens, shape.head_dim)
    slices = (torch.rand((table.chunks, *one), generator=draw) * 2 - 1).to(shape.dtype)
    inv_freq = 10_000.0 ** -(torch.arange(shape.pairs) / shape.pairs)
    deltas = 100 * torch.arange(table.chunks).unsqueeze(1)
    there = pool.to(device, copy=True)
    by = rotation(deltas.to(device), inv_freq, interleaved=shape.interleaved)
    scatter(there[:, 0], there[:, 1], table_there, slices.to(device), by=by)
    keys, values = pool.double().unbind(1)
    exact = naive_scatter(
        keys,
        values,
        table,
        slices.double(),
        deltas=deltas,
        inv_freq=inv_freq,
        interleaved=shape.interleaved,
    )
    yield Result("scatter, moved", there, torch.stack(exact, 1), torch.finfo(shape.dtype).eps)


KERNELS: dict[str, Check] = {
    "write": _check_write,
    "decode": _check_decode,
    "prefill": _check_prefill,
    "rotate": _check_rotate,
    "stretches": _check_stretches,
    "pages": _check_pages,
}
