"""Nothing is compiled while serving, and no grid is larger than a GPU takes: launches of random plans, bound as Triton
binds them for a GPU, and not run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvstore.kernels.forest import CAPACITY_MIN, Forest, room_for
from kvstore.kernels.rotate import rotation
from kvstore.kernels.stretches import Stretch
from kvstore.kernels.write import NOWHERE, Slots

from .launches import Launches, bound

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing can be bound")

from kvstore.kernels.decode import kernel as decode  # noqa: E402
from kvstore.kernels.prefill import kernel as prefill  # noqa: E402
from kvstore.kernels.rotate import kernel as rotate  # noqa: E402
from kvstore.kernels.warm_up import warm_up  # noqa: E402
from kvstore.kernels.write import kernel as write  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process"
)
PLANS = 200
CHUNK, CHUNKS, SPLIT = 16, 400, 64


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with bound(monkeypatch) as found:
        yield found


class Serving:
    """Steps as an engine takes them: sequences come, grow, share and go; queries lie as models leave them."""

    def __init__(self, seed: int, group: int, head_dim: int) -> None:
        self.random = random.Random(seed)
        self.group, self.kv_heads, self.head_dim = group, 2, head_dim
        pool = torch.zeros(CHUNKS, 2, self.kv_heads, CHUNK, head_dim, dtype=torch.bfloat16)
        self.keys, self.values = pool.unbind(1)
        self.forest = Forest(
            chunk_tokens=CHUNK,
            chunks=CHUNKS,
            sequences_max=24,
            split_tokens=SPLIT,
            tile_sequences=max(1, 64 // group),
            items_max=4096,
            partials_max=4096,
        )

    def warm_up(self) -> None:
        warm_up(
            self.keys,
            self.values,
            heads=self.group * self.kv_heads,
            split_tokens=SPLIT,
            tile_sequences=self.forest.tile_sequences,
            soft_caps=(None, 20.0),
        )

    def new(self, tokens: int, heads: int) -> torch.Tensor:
        """Token by token or head by head, and not at the beginning of its memory."""
        skipped, d = self.random.randrange(5), self.head_dim
        if self.random.random() < 0.5:
            return torch.zeros(skipped + tokens, heads, d, dtype=torch.bfloat16)[skipped:]
        if self.random.random() < 0.5:
            return torch.zeros(heads, skipped + tokens, d, dtype=torch.bfloat16).transpose(0, 1)[skipped:]
        return torch.zeros(tokens, heads + 2 * self.kv_heads, d, dtype=torch.bfloat16)[:, :heads]

    def change(self) -> None:
        row = self.random.randrange(self.forest.sequences_max)
        if row in self.forest:
            self.forest.leave(row)
            return
        tokens = self.random.randint(1, 20 * CHUNK)
        first = self.random.choice((0, self.random.randrange(300)))
        stretches = [
            Stretch(self.random.randrange(CHUNKS), 0, 5, delta=self.random.choice((0, 7)))
            for _ in range(self.random.choice((0, 0, 0, 3)))
        ]
        self.forest.join(row, range(first, first - (-tokens // CHUNK)), tokens, stretches)

    def options(self, turned: torch.Tensor | None, q: torch.Tensor) -> dict:
        cap = self.random.choice((None, 20.0))
        scale = self.random.choice(
            (1, 0.5, 1 / 3, 16)
        )  # a whole number is an integer, unless it is made a float
        return {"scale": scale, "soft_cap": cap, "out": torch.empty_like(q), "turned": turned}

    def step(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.change()
        heads, pool = self.group * self.kv_heads, (self.keys, self.values)
        plan = self.forest.plan()
        q = torch.zeros(self.forest.sequences_max, heads, self.head_dim, dtype=torch.bfloat16)
        turned = (
            None if plan.stretches is None else q[:1].expand(len(plan.stretches.turned), -1, -1).contiguous()
        )
        decode.decode(q, *pool, plan, **self.options(turned, q))
        rows = [row for row in range(24) if row in self.forest]
        new = {
            row: self.random.randint(1, self.forest.length(row))
            for row in self.random.sample(rows, min(len(rows), self.random.randint(1, 4)))
        }
        if not new:
            return
        work = self.forest.prefill(new, tile_queries=self.random.choice((None, 16, 128)))
        q = self.new(sum(new.values()), heads)
        turned = (
            None if work.stretches is None else q[:1].expand(len(work.stretches.turned), -1, -1).contiguous()
        )
        prefill.prefill(q, *pool, work, **self.options(turned, q))
        tokens = self.random.randint(1, 40)
        chunks = [self.random.choice((NOWHERE, number)) for number in range(tokens)]
        slots = Slots.of(chunks, [3] * tokens, pool_chunks=CHUNKS, chunk_tokens=CHUNK)
        write.write(*pool, slots, self.new(tokens, 2), self.new(tokens, 2))


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (4, 128), (7, 80)])
def test_nothing_is_compiled_after_the_warm_up(group: int, head_dim: int, launches: Launches) -> None:
    serving = Serving(group, group, head_dim)
    serving.warm_up()
    warm = set(launches.keys)
    for _ in range(PLANS):
        serving.step()
    assert len(launches.grids) > 3 * PLANS, "not much was launched"
    new = sorted(launches.keys - warm)
    assert not new, f"{len(new)} kernels would be compiled while serving, the first: {new[0]}"
    assert len(warm) <= 40


def test_rotations_are_compiled_once(launches: Launches) -> None:
    draw = random.Random(1)
    inv_freq = 1 / 10_000 ** (torch.arange(64) / 64)
    for _ in range(50):
        tokens, heads = draw.randint(1, 99), draw.choice((1, 2, 8))
        keys = torch.zeros(heads, tokens, 128, dtype=torch.bfloat16)
        pool = torch.zeros(heads, 128, 128, dtype=torch.bfloat16)
        by = rotation(5, inv_freq)
        tables = by.map(lambda table: table.expand(heads, tokens, 64))  # noqa: B023
        rotate.rotate(keys, tables, pool[:, :tokens])
    assert len(launches.keys) == 1


@pytest.mark.parametrize(
    ("sequences", "tokens", "kv_heads"), [(256, 4096, 8), (64, 131_072, 8), (2048, 4096, 32)]
)
def test_no_grid_is_larger_than_a_gpu_takes(
    sequences: int, tokens: int, kv_heads: int, launches: Launches
) -> None:
    """Items of sequences that share nothing, as many as they have."""
    own = -(-tokens // 64)
    forest = Forest(
        chunk_tokens=64, chunks=sequences * own, sequences_max=sequences, tokens_max=tokens, split_tokens=512
    )
    one = torch.zeros(1, kv_heads, 64, 64, dtype=torch.bfloat16)
    keys = one.expand(sequences * own, -1, -1, -1)
    plan = forest.plan()
    plan = replace(plan, capacity=plan.capacity._replace(items=sequences * tokens // 512))
    q = torch.zeros(sequences, kv_heads, 64, dtype=torch.bfloat16)
    decode.decode(q, keys, keys, plan, scale=1.0, soft_cap=None, out=torch.empty_like(q))
    (_, (programs,)), *_ = launches.grids
    assert programs == sequences * tokens // 512 * kv_heads


# ------------------------------------------------------------------------------------------ room, by what a step needs


def test_room_grows_by_powers_of_two_and_is_all_at_most() -> None:
    assert [room_for(needed, 5000) for needed in (0, 1, 64, 65, 128, 129, 4096, 4097, 5000)] == [
        *(64, 64, 64, 128, 128, 256, 4096, 5000, 5000)
    ]
    assert room_for(1, 20) == 20 and CAPACITY_MIN == 64
    steps = {room_for(needed, 20_544) for needed in range(20_545)}
    assert len(steps) == 10, "a graph for each"


def test_a_step_launches_and_takes_memory_for_what_it_needs(launches: Launches) -> None:
    forest = Forest(
        chunk_tokens=64,
        chunks=70_000,
        sequences_max=64,
        tokens_max=131_072,
        split_tokens=512,
        tile_sequences=16,
    )
    assert forest.items_max == forest.partials_max == 32_768
    pool = torch.zeros(1, 8, 64, 128, dtype=torch.bfloat16).expand(70_000, -1, -1, -1)
    q = torch.zeros(64, 8, 128, dtype=torch.bfloat16)

    def programs() -> int:
        launches.grids.clear()
        decode.decode(q, pool, pool, forest.plan(), scale=1.0, soft_cap=None, out=torch.empty_like(q))
        return launches.grids[0][1][0]

    forest.join(0, range(100), 6400)
    assert programs() == 64 * 8
    plan = forest.plan()
    assert plan.scratch.nbytes == 64 * 8 * (128 + 2) * 4
    forest.join(1, range(100, 1000), 900 * 64)
    assert programs() == 128 * 8
    assert forest.plan() is not plan and forest.plan().items is plan.items, "the arrays stay where they are"
    forest.leave(1)
    assert programs() == 64 * 8 and forest.plan().capacity == plan.capacity
    assert forest.plan().scratch is plan.scratch
    assert plan.scratch.nbytes == (64 + 128) * 8 * (128 + 2) * 4, "what a graph writes to was given back"


def test_layers_use_the_same_memory(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(1, 2, 64)
    for _ in range(6):
        serving.change()
    made: list[object] = []
    empty: Callable[..., torch.Tensor] = torch.empty

    def counted(*shape: object, **options: object) -> torch.Tensor:
        made.append(shape)
        return empty(*shape, **options)

    plan, q = serving.forest.plan(), torch.zeros(24, 4, 64, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    turned = None if plan.stretches is None else torch.zeros(len(plan.stretches.turned), 4, 64, dtype=q.dtype)
    monkeypatch.setattr(torch, "empty", counted)
    for _ in range(5):
        decode.decode(
            *(q, serving.keys, serving.values, plan), scale=1.0, soft_cap=None, out=out, turned=turned
        )
    assert len(made) == (2 if plan.stretches is None else 4)
