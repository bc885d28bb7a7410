"""Prefill attention on a CPU, held against fp64 over the sequences as told; what its plan says of any forest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.prefill import PrefillPlan, cpu, prefill_attention
from kvstore.kernels.prefill.naive import naive_prefill_attention
from kvstore.kernels.prefill.plan import LIMIT, PARTIALS, SLOT

from .conftest import NAN, Case, assert_close

SEEDS = st.integers(0, 2**32)
TOLERANCE = 1e-12
"""Between two ways to compute the same in fp64."""
TILES = st.sampled_from((1, 3, 16, 512))


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several blocks, tiles and pieces of work."""
    monkeypatch.setattr(cpu, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(cpu, "TILE_ROWS", 8)
    monkeypatch.setattr(cpu, "TILES", 2)


def attend(
    case: Case, new: dict[int, int], tensors: tuple[torch.Tensor, ...], **settings: int | None
) -> torch.Tensor:
    return prefill_attention(*tensors, case.forest().prefill(new, **settings))


def tensors(
    case: Case, new: dict[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.queries(new, dtype), *case.tensors(dtype)[1:]


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    dtype=st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    tile_queries=TILES,
    split_chunks=st.sampled_from((None, 1, 2)),
    soft_cap=st.sampled_from((None, 3.0)),
    scale=st.sampled_from((None, 0.5, -1.0, 0.0)),
    sequences=st.integers(0, 6),
    chunk_tokens=st.sampled_from((1, 16, 64)),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 4, 7)),
    head_dim=st.sampled_from((8, 80)),
)
def test_any_forest_gives_the_exact_result_but_for_rounding(
    seed: int,
    dtype: torch.dtype,
    tile_queries: int,
    split_chunks: int | None,
    soft_cap: float | None,
    scale: float | None,
    sequences: int,
    **shape: int,
) -> None:
    case = Case(seed=seed, **shape).fill(sequences)
    case.check_prefill(
        *(prefill_attention, dtype, case.scattered()),
        tile_queries=tile_queries,
        split_tokens=split_chunks and split_chunks * case.chunk_tokens,
        soft_cap=soft_cap,
        scale=scale,
    )


# Logits of 30 and more, of which the plain result is right by luck
LARGE = {"scale": -1.0, "kv_heads": 2, "chunk_tokens": 16, "head_dim": 80}


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    scale=st.sampled_from((None, 0.5, -1.0, 0.0)),
    sequences=st.integers(1, 6),
    chunk_tokens=st.sampled_from((1, 16, 64)),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 4, 7)),
    head_dim=st.sampled_from((8, 80)),
)
@example(seed=272347861, sequences=4, group=4, **LARGE)
@example(seed=1602595325, sequences=1, group=1, **LARGE)
def test_torchs_attention_gives_the_same(
    seed: int, scale: float | None, sequences: int, **shape: int
) -> None:
    case = Case(seed=seed, **shape).fill(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "TORCH_MIN", 1)
        patch.setattr(cpu, "TORCH_ALONE_MIN", 1)
        case.check_prefill(prefill_attention, torch.float32, case.scattered(), scale=scale)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_torchs_attention_is_used_where_a_kv_head_has_many_queries(group: int) -> None:
    """What is gathered is gathered for all heads of a group."""
    case = Case(seed=1, chunk_tokens=16, rows=3, kv_heads=1, group=group, head_dim=8)
    least, alone = -(-cpu.TORCH_MIN // group), cpu.TORCH_ALONE_MIN
    for row, tokens in enumerate((least + 40, least, alone)):
        case.add(row, more=tokens)

    def chosen(new: dict[int, int], dtype: torch.dtype = torch.float32) -> bool:
        return cpu.is_torchs(case.forest().prefill(new), dtype, group)

    assert chosen({0: least}) and chosen({1: least}) and chosen({2: alone})
    assert chosen({0: least, 1: least, 2: alone})
    assert not chosen({0: least - 1}) and not chosen({0: least, 2: 1})
    assert not chosen({0: least}, torch.bfloat16)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    scale=st.sampled_from((None, 0.5)),
    sequences=st.integers(2, 5),
    chunk_tokens=st.sampled_from((1, 16)),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 4, 7)),
    head_dim=st.sampled_from((8, 80)),
)
def test_what_all_have_cached_is_attended_to_together(
    seed: int, scale: float | None, sequences: int, chunk_tokens: int, **shape: int
) -> None:
    """By torch's kernel; some have more than that cached, in common with others or not."""
    case = Case(seed=seed, chunk_tokens=chunk_tokens, rows=sequences, chunks=60, **shape)
    draw = case.random
    case.add(0, more=6 * chunk_tokens + draw.randrange(chunk_tokens))
    for row in range(1, sequences):
        case.add(row, like=0, shared=draw.randint(2, 5), more=draw.randint(1, 3 * chunk_tokens))
    rows = draw.sample(range(sequences), sequences)
    new = {row: draw.randint(1, case.sequences[row][1] - 2 * chunk_tokens) for row in rows}
    used: list[int] = []

    def noted(*given: Any, **options: Any) -> None:
        used.append(given[4])
        together(*given, **options)

    together = cpu.together
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TOGETHER_MIN", "TOGETHER_TOKENS_MIN"):
            patch.setattr(cpu, name, 1)
        patch.setattr(cpu, "together", noted)
        case.check_prefill(prefill_attention, torch.float32, new, scale=scale)
    assert used and min(used) >= 2


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_together_large_logits_cost_what_their_own_last_place_is(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge knows sums by their logarithms, which are rounded as the logits are."""
    for name in ("TOGETHER_MIN", "TOGETHER_TOKENS_MIN"):
        monkeypatch.setattr(cpu, name, 1)
    case = Case(seed=1, head_dim=64, group=2, chunk_tokens=16, rows=3, chunks=60)
    case.add(0, more=70)
    for row in (1, 2):
        case.add(row, like=0, shared=4, more=20)
    new = {0: 6, 1: 20, 2: 3}
    q, keys, values = case.queries(new, torch.float32, size), *case.tensors(torch.float32)[1:]
    plan = case.forest().prefill(new)
    assert cpu.shared_chunks(plan, torch.float32, 2) == 4
    out = prefill_attention(q, keys, values, plan)
    exact = naive_prefill_attention(q, keys, values, case.sequences, new)
    logits = (q.abs().max() * keys.nan_to_num().abs().max() * 64**0.5).item()
    allowed = 4 * torch.finfo(torch.float32).eps * logits * values.nan_to_num().abs().max().item()
    assert (out - exact).abs().max() <= allowed


def test_together_is_attended_where_it_pays() -> None:
    case = Case(seed=1, chunk_tokens=16, rows=3, kv_heads=1, head_dim=8, chunks=100)
    most, least = cpu.TOGETHER_TOKENS_MIN // 16, cpu.TOGETHER_MIN
    case.add(0, more=16 * most + least)
    case.add(1, like=0, shared=most, more=least)
    case.add(2, more=16 * most + least)

    def shared(new: dict[int, int], dtype: torch.dtype = torch.float32, group: int = 1) -> int:
        return cpu.shared_chunks(case.forest().prefill(new), dtype, group)

    assert shared({0: least, 1: least}) == most
    assert shared({0: least // 2, 1: least}, group=2) == most
    assert not shared({0: least - 1, 1: least}) and not shared({0: least})
    assert not shared({0: least + 1, 1: least}), "one has a token less cached"
    assert not shared({0: least, 1: least, 2: least}) and not shared({0: least, 1: least}, torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(SEEDS, TILES, st.sampled_from((None, 1, 2)), st.sampled_from((1, 4)))
def test_a_plan_covers_what_each_query_sees_once(
    seed: int, tile_queries: int, split_chunks: int | None, chunk_tokens: int
) -> None:
    """Every token that a query sees is in one of its items, with its chunk; its partial results are numbered in order
    of the tokens, without gaps, and no two queries have a slot in common."""
    case = Case(seed=seed, chunk_tokens=chunk_tokens).fill(6)
    new = case.new_tokens()
    split_tokens = split_chunks and split_chunks * chunk_tokens
    plan = case.forest().prefill(new, tile_queries=tile_queries, split_tokens=split_tokens)
    items, tables, order, queries = (array.tolist() for array in plan.arrays())
    queries = [queries[line] for line in order]  # by place
    owners = [(row, case.sequences[row][1] - count + n) for row, count in new.items() for n in range(count)]
    assert sorted(order) == list(range(len(owners)))
    seen: dict[int, dict[int, tuple[int, int]]] = {place: {} for place in range(len(order))}
    made: set[tuple[int, int]] = set()
    for begin, count, first, length, partial, table in items:
        assert 1 <= count <= plan.tile_queries <= tile_queries and first % chunk_tokens == 0
        for place in range(begin, begin + count):
            assert first < queries[place][LIMIT], "a query sees nothing of its item"
            assert (place, partial) not in made, "two items make the same partial result"
            made.add((place, partial))
            for token in range(first, min(first + length, queries[place][LIMIT])):
                assert token not in seen[place]
                seen[place][token] = (tables[table][token // chunk_tokens], partial)
    slots: list[int] = []
    for place, line in enumerate(order):
        row, position = owners[line]
        assert queries[place][LIMIT] == position + 1 == len(seen[place])
        chunks, partials = zip(*(seen[place][token] for token in range(position + 1)), strict=True)
        assert list(chunks) == [
            case.sequences[row][0][token // chunk_tokens] for token in range(position + 1)
        ]
        assert list(partials) == sorted(partials)
        assert set(partials) == set(range(queries[place][PARTIALS]))
        slots += range(queries[place][SLOT], queries[place][SLOT] + queries[place][PARTIALS])
    assert slots == list(range(len(slots)))
    assert plan.partials == (len(slots) if len(slots) > len(order) else 0)


def items(plan: PrefillPlan) -> list[tuple[int, ...]]:
    return sorted(tuple(item) for item in plan.items.tolist())


def test_rows_that_share_cached_chunks_attend_to_them_together() -> None:
    """And alone to the chunk that is new for one of them, and to a run in which it makes no tile less."""
    forest = Forest(chunk_tokens=4, chunks=40, sequences_max=8)
    forest.join(0, [0, 1, 2, 3], 15)
    forest.join(1, [0, 1, 2, 4], 14)
    forest.join(2, [0, 1, 2, 5], 16)
    assert items(forest.prefill({0: 3, 1: 4, 2: 4}, tile_queries=16)) == [
        (0, 3, 8, 7, 1, 0),
        (0, 11, 0, 8, 0, 0),  # the first two chunks with all queries; of the third, row 1 has new tokens
        (3, 4, 8, 6, 1, 1),
        (7, 4, 8, 8, 1, 2),
    ]
    assert items(forest.prefill({0: 3, 1: 4, 2: 4}, tile_queries=4)) == [
        (0, 3, 0, 15, 0, 0),
        (3, 4, 0, 14, 0, 1),
        (7, 4, 0, 16, 0, 2),
    ]
    assert items(forest.prefill({2: 1})) == [(0, 1, 0, 16, 0, 0)]


def test_a_decoded_token_is_a_prefill_of_one() -> None:
    case = Case(seed=3, kv_heads=2, group=2).fill(6)
    new = {row: 1 for row, (_, tokens) in case.sequences.items() if tokens}
    q, keys, values = tensors(case, new, torch.float64)
    rows = torch.zeros(case.rows, *q.shape[1:], dtype=q.dtype)
    rows[list(new)] = q
    decoded = decode_attention(rows, keys, values, case.forest().plan())[list(new)]
    assert torch.allclose(attend(case, new, (q, keys, values)), decoded, rtol=0, atol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(SEEDS, TILES)
def test_piece_by_piece_gives_what_one_call_gives(seed: int, tile_queries: int) -> None:
    """The forest grows with the pieces; what later pieces bring is in no pool yet."""
    case = Case(seed=seed, group=2).fill(5)
    new = case.new_tokens()
    q, keys, values = tensors(case, new, torch.float64)
    at_once = attend(case, new, (q, keys, values))
    lines = dict(zip(new, q.split(list(new.values())), strict=True))
    found: dict[int, list[torch.Tensor]] = {row: [] for row in new}
    forest = Forest(chunk_tokens=16, chunks=case.chunks, sequences_max=case.rows)
    done = {row: case.sequences[row][1] - count for row, count in new.items()}
    for row, tokens in done.items():
        forest.join(row, case.sequences[row][0][: -(-tokens // 16)], tokens)
    while any(done[row] < case.sequences[row][1] for row in new):
        piece = {}
        for row in case.random.sample(list(new), len(new)):
            chunks, tokens = case.sequences[row]
            more = min(case.random.choice((0, 1, 7, 16, 40)), tokens - done[row])
            if more:
                piece[row] = more
                have = len(forest.chunks_of(row))
                forest.extend(row, chunks[have : -(-(done[row] + more) // 16)], done[row] + more)
        forest.check_integrity()
        cut = {row: done[row] - case.sequences[row][1] + new[row] for row in piece}
        asked = torch.cat([lines[row][cut[row] : cut[row] + more] for row, more in piece.items()] or [q[:0]])
        told = prefill_attention(asked, keys, values, forest.prefill(piece, tile_queries=tile_queries))
        for (row, more), part in zip(piece.items(), told.split(list(piece.values())), strict=True):
            found[row].append(part)
            done[row] += more
    pieces = torch.cat([part for row in new for part in found[row]] or [q[:0]])
    assert torch.allclose(pieces, at_once, rtol=0, atol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(SEEDS, TILES, st.sampled_from((None, 16, 48)))
def test_how_work_is_cut_does_not_matter(seed: int, tile_queries: int, split_tokens: int | None) -> None:
    case = Case(seed=seed, group=2).fill(6)
    new = case.new_tokens()
    these = tensors(case, new, torch.float64)
    other = attend(case, new, these, tile_queries=tile_queries, split_tokens=split_tokens)
    alone = prefill_attention(*these, case.forest(share=False).prefill(new))
    assert torch.allclose(attend(case, new, these), other, rtol=0, atol=TOLERANCE)
    assert torch.allclose(alone, other, rtol=0, atol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.randoms(use_true_random=False))
def test_rows_in_another_order_give_results_in_that_order(seed: int, shuffle: random.Random) -> None:
    case = Case(seed=seed, kv_heads=2).fill(6)
    new = case.new_tokens()
    q, keys, values = tensors(case, new, torch.float64)
    out = dict(zip(new, attend(case, new, (q, keys, values)).split(list(new.values())), strict=True))
    lines = dict(zip(new, q.split(list(new.values())), strict=True))
    rows = list(new)
    shuffle.shuffle(rows)
    case.sequences = {row: case.sequences[row] for row in sorted(case.sequences, reverse=True)}
    moved = torch.cat([lines[row] for row in rows]) if rows else q
    told = attend(case, {row: new[row] for row in rows}, (moved, keys, values))
    assert torch.allclose(told, torch.cat([out[row] for row in rows]) if rows else q, rtol=0, atol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.randoms(use_true_random=False), st.sampled_from((torch.float32, torch.bfloat16)))
def test_where_chunks_lie_in_the_pool_changes_no_bit(
    seed: int, shuffle: random.Random, dtype: torch.dtype
) -> None:
    case = Case(seed=seed, group=2).fill(6)
    new = case.new_tokens()
    q, keys, values = tensors(case, new, dtype)
    out = attend(case, new, (q, keys, values))
    places = list(range(case.chunks))
    shuffle.shuffle(places)  # chunk n moves to places[n]
    keys, values = (
        torch.empty_like(pool).index_copy_(0, torch.tensor(places), pool) for pool in (keys, values)
    )
    case.sequences = {
        row: ([places[chunk] for chunk in chunks], tokens) for row, (chunks, tokens) in case.sequences.items()
    }
    assert torch.equal(attend(case, new, (q, keys, values)), out)


def test_the_same_call_gives_the_same_bits() -> None:
    case = Case(seed=3, rows=32, group=4, chunks=200).fill(32)
    new = case.new_tokens()
    these = tensors(case, new, torch.float32)
    plan = case.forest(items_max=500, partials_max=500).prefill(new)
    out = prefill_attention(*these, plan)
    assert all(torch.equal(prefill_attention(*these, plan), out) for _ in range(3))


@pytest.mark.parametrize(("soft_cap", "torch_min"), [(None, 10**9), (30.0, 10**9), (None, 1)])
def test_huge_logits_give_no_nan(
    soft_cap: float | None, torch_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of about +-10,000: exp of their difference is 0 or 1, and no two infinities are subtracted."""
    monkeypatch.setattr(cpu, "TORCH_MIN", torch_min)
    monkeypatch.setattr(cpu, "TORCH_ALONE_MIN", torch_min)
    case = Case(seed=1, head_dim=64, group=2).fill(6)
    new = case.new_tokens()
    q, keys, _ = case.queries(new, torch.float32, 1e4), *case.tensors(torch.float32)[1:]
    chunk = case.sequences[next(iter(new))][0][0]
    assert (q[:, 0] @ keys[chunk, 0, 0]).abs().max().item() / 8 > 1e4
    case.check_prefill(prefill_attention, torch.float32, new, size=1e4, soft_cap=soft_cap)


def test_constant_values_come_out_unchanged() -> None:
    case = Case(group=2, seed=5).fill(6)
    new = case.new_tokens()
    q, keys, _ = tensors(case, new, torch.float64)
    out = attend(case, new, (q, keys, torch.full_like(keys, 1.25)))
    assert torch.allclose(out, torch.tensor(1.25, dtype=torch.float64), rtol=0, atol=1e-15)


def test_nothing_new_gives_nothing() -> None:
    case = Case().fill(3)
    assert attend(case, {}, tensors(case, {}, torch.float32)).shape == (0, 1, 16)


def test_queries_and_results_may_be_views() -> None:
    case = Case(seed=6, kv_heads=2, group=2).fill(6)
    new = case.new_tokens()
    q, keys, values = tensors(case, new, torch.float32)
    fused = torch.full((len(q), 3 * 4, 16), NAN)
    fused[:, 4:8] = q
    result = torch.zeros(len(q), 8, 16)
    plan = case.forest().prefill(new)
    out = prefill_attention(fused[:, 4:8], keys, values, plan, out=result[:, ::2])
    assert out.data_ptr() == result.data_ptr()
    assert torch.equal(result[:, ::2], attend(case, new, (q, keys, values)))
    assert (result[:, 1::2] == 0).all()


def test_at_its_real_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cpu.BLOCK_TOKENS == 512
    case = Case(seed=1, chunk_tokens=64, rows=4, kv_heads=3, group=2, head_dim=64)
    case.add(0, more=700)
    for row in range(1, 4):
        case.add(row, like=0, shared=9, more=40 * row)
    case.check_prefill(prefill_attention, torch.float32, {0: 690, 3: 120, 1: 40, 2: 1})
    q, keys, values = tensors(case, {0: 700}, torch.float64)
    exact = naive_prefill_attention(q, keys, values, case.sequences, {0: 700})
    assert_close(attend(case, {0: 700}, (q, keys, values)), exact, exact)


@pytest.mark.parametrize(
    ("new", "changes", "message"),
    [
        ({0: 0}, {}, "row 0 has 0 new tokens: must be at least 1 and at most its 20"),
        ({0: 21}, {}, "row 0 has 21 new tokens"),
        (
            {0: [3, 3]},
            {},
            r"row 0 has these new tokens: \[3, 3\]: their numbers must rise, and be below its 20",
        ),
        ({0: [-1, 3]}, {}, "row 0 has these new tokens"),
        ({0: [3, 20]}, {}, "row 0 has these new tokens"),
        ({0: []}, {}, "row 0 has these new tokens"),
        ({1: 1}, {}, "row 1 has no sequence"),
        ({0: 1}, {"tile_queries": 0}, "tile_queries is 0: must be at least 1"),
        ({0: 1}, {"split_tokens": 0}, "split_tokens is 0"),
        ({0: 1}, {"split_tokens": 24}, "split_tokens is 24: must be a multiple of chunk_tokens"),
    ],
)
def test_plans_that_cannot_be_are_refused(new: dict, changes: dict, message: str) -> None:
    case = Case()
    case.add(0, more=20)
    with pytest.raises(ValueError, match=message):
        case.forest().prefill(new, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:4], k, v), r"q is \[4, 4, 16\]: must be \[5 \(new tokens in the plan\), heads,"),
        (lambda q, k, v: (q, k[:9], v), r"keys is \[9, 2, 16, 16\]: must be \[64, 2, 16, 16\]"),
        (lambda q, k, v: (q, k, v[..., :8]), "values is "),
        (lambda q, k, v: (q[:, :3], k, v), "q has 3 heads: must be a multiple of the 2"),
        (lambda q, k, v: (q, k.double(), v), "keys is torch.float64 on cpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message: str) -> None:
    case = Case(kv_heads=2, group=2)
    case.add(0, more=20)
    plan = case.forest().prefill({0: 5})
    with pytest.raises(ValueError, match=message):
        prefill_attention(*change(*tensors(case, {0: 5}, torch.float32)), plan)


@pytest.mark.parametrize("name", ["q", "keys", "values"])
def test_a_result_over_what_is_read_is_refused(name: str) -> None:
    case = Case(kv_heads=2, group=2)
    case.add(0, more=20)
    read = dict(zip(("q", "keys", "values"), tensors(case, {0: 5}, torch.float32), strict=True))
    read = {each: tensor.contiguous() for each, tensor in read.items()}
    out = read[name].as_strided((5, 4, 16), (64, 16, 1))
    with pytest.raises(ValueError, match=f"out overlaps {name}: give other memory"):
        prefill_attention(*read.values(), case.forest().prefill({0: 5}), out=out)


def test_a_longer_sequence_shares_what_it_came_to_share_and_a_refused_change_changes_nothing() -> None:
    forest = Forest(chunk_tokens=4, chunks=9, sequences_max=2, split_tokens=4, items_max=5, tokens_max=16)
    forest.join(0, [1, 2, 3], 12)
    forest.join(1, [1], 3)
    forest.extend(1, [2], 8)
    assert sorted(forest.runs()) == [([0], [3], 2), ([0, 1], [1, 2], 0)]
    forest.check_integrity()
    for tokens, chunks, message in (
        (7, [], "tokens is 7: row 1 has 8 already"),
        (9, [], "9 tokens do not fill 2 chunks of 4"),
        (9, [9], "chunk is 9: must be below chunks"),
        (20, [4, 5, 6], "items_max"),
    ):
        with pytest.raises(ValueError, match=message):
            forest.extend(1, chunks, tokens)
        forest.check_integrity()
        assert forest.length(1) == 8 and forest.chunks_of(1) == [1, 2]
