"""Decode attention on a CPU, held against fp64 over the sequences as told. test_triton.py has the GPU's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.decode import decode_attention
from kvstore.kernels.decode.naive import naive_decode_attention

from .conftest import NAN, Case, assert_close

SEEDS = st.integers(0, 2**32)
TOLERANCE = 1e-12
"""Between two ways to compute the same in fp64."""


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attend(case: Case, tensors: tuple[torch.Tensor, ...], **changes: object) -> torch.Tensor:
    return decode_attention(*tensors, case.forest(**changes).plan())


@settings(max_examples=100, deadline=None)
@given(
    seed=SEEDS,
    dtype=st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    chunk_tokens=st.sampled_from((1, 16, 64)),
    split_chunks=st.integers(1, 4),
    tile_sequences=st.sampled_from((1, 2, 4, 64)),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 4, 8)),
    head_dim=st.sampled_from((8, 80)),
    soft_cap=st.sampled_from((None, 3.0)),
    scale=st.sampled_from((None, 0.5, -1.0, 0.0)),
    sequences=st.integers(0, 6),
)
def test_any_forest_gives_the_exact_result_but_for_rounding(
    seed: int, dtype: torch.dtype, soft_cap: float | None, scale: float | None, sequences: int, **shape: int
) -> None:
    case = Case(seed=seed, **shape).fill(sequences)
    case.check(decode_attention, dtype, soft_cap=soft_cap, scale=scale)


def test_rows_without_a_token_are_zero() -> None:
    case = Case()
    case.add(1, more=20)
    case.add(2)
    out = case.check(decode_attention, torch.float32)
    assert (out[[0, 2, 3, 4, 5]] == 0).all() and (out[1] != 0).all()


def test_constant_values_come_out_unchanged() -> None:
    case = Case(group=2, seed=5).fill(6)
    q, keys, _ = case.tensors(torch.float64)
    out = decode_attention(q, keys, torch.full_like(keys, 1.25), case.forest().plan())
    used = [row for row, (_, tokens) in case.sequences.items() if tokens]
    assert used and torch.allclose(out[used], torch.tensor(1.25, dtype=torch.float64), rtol=0, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 5), st.sampled_from((1, 2, 3, 32)))
def test_how_runs_are_split_does_not_matter(seed: int, split_chunks: int, tile_sequences: int) -> None:
    case = Case(seed=seed, group=2).fill(6)
    tensors = case.tensors(torch.float64)
    other = attend(case, tensors, split_tokens=split_chunks * 16, tile_sequences=tile_sequences)
    assert torch.allclose(attend(case, tensors), other, rtol=0, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_sharing_gives_what_no_sharing_gives(seed: int) -> None:
    case = Case(seed=seed, kv_heads=2).fill(6)
    tensors = case.tensors(torch.float64)
    alone = attend(case, tensors, share=False)
    assert torch.allclose(attend(case, tensors), alone, rtol=0, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.randoms(use_true_random=False))
def test_sequences_in_another_order_give_results_in_that_order(seed: int, random) -> None:
    case = Case(seed=seed, group=4).fill(6)
    q, keys, values = case.tensors(torch.float64)
    out = attend(case, (q, keys, values))
    rows = list(range(case.rows))
    random.shuffle(rows)  # the sequence of row n goes to rows[n]
    moved = torch.empty_like(q)
    moved[rows] = q
    case.sequences = {rows[row]: sequence for row, sequence in sorted(case.sequences.items(), reverse=True)}
    assert torch.allclose(attend(case, (moved, keys, values))[rows], out, rtol=0, atol=TOLERANCE)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.randoms(use_true_random=False), st.sampled_from((torch.float32, torch.bfloat16)))
def test_where_chunks_lie_in_the_pool_changes_no_bit(seed: int, random, dtype: torch.dtype) -> None:
    case = Case(seed=seed, group=2).fill(6)
    q, keys, values = case.tensors(dtype)
    out = attend(case, (q, keys, values))
    places = list(range(case.chunks))
    random.shuffle(places)  # chunk n moves to places[n]
    keys, values = (
        torch.empty_like(pool).index_copy_(0, torch.tensor(places), pool) for pool in (keys, values)
    )
    case.sequences = {
        row: ([places[chunk] for chunk in chunks], tokens) for row, (chunks, tokens) in case.sequences.items()
    }
    assert torch.equal(attend(case, (q, keys, values)), out)


@pytest.mark.parametrize("group", [1, 2])
def test_what_lies_behind_the_last_token_changes_no_bit(group: int) -> None:
    case = Case(seed=7, rows=16, kv_heads=2, group=group, head_dim=80, chunks=200).fill(16)
    q, keys, values = case.tensors(torch.float32)
    unwritten = keys.isnan()
    found = []
    for other in (NAN, 0.0, float("-inf"), 1e30):
        pools = (pool.masked_fill(unwritten, other) for pool in (keys, values))
        found.append(attend(case, (q, *pools)))
    assert found[0].isfinite().all()
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_same_call_gives_the_same_bits() -> None:
    case = Case(seed=3, rows=32, group=4, chunks=200).fill(32)
    tensors = case.tensors(torch.float32)
    plan = case.forest(items_max=500, partials_max=500).plan()
    out = decode_attention(*tensors, plan)
    assert all(torch.equal(decode_attention(*tensors, plan), out) for _ in range(10))


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_huge_logits_give_no_nan(soft_cap: float | None) -> None:
    """Logits of about +-10,000: exp of their difference is 0 or 1, and no two infinities are subtracted."""
    case = Case(seed=1, head_dim=64, group=2).fill(6)
    q, keys, _ = case.tensors(torch.float32, 1e4)
    sizes = [
        (q[row, 0] @ keys[chunks[0], 0, 0]).abs().item() / 8
        for row, (chunks, _) in case.sequences.items()
        if chunks
    ]
    assert max(sizes) > 1e4
    case.check(decode_attention, torch.float32, size=1e4, soft_cap=soft_cap)


def test_growing_sequences_are_attended_with_the_same_plan() -> None:
    case = Case(seed=2, chunk_tokens=4, chunks=200).fill(5)
    forest = case.forest()
    plan = forest.plan()
    for _ in range(20):
        new = {row: case.unused.pop() for row, (_, tokens) in case.sequences.items() if tokens % 4 == 0}
        forest.step(new)
        for row, (chunks, tokens) in case.sequences.items():
            case.sequences[row] = ([*chunks, *([new[row]] if row in new else ())], tokens + 1)
        assert forest.plan() is plan
        q, keys, values = case.tensors(torch.float64)
        exact = naive_decode_attention(q, keys, values, case.sequences)
        assert torch.allclose(decode_attention(q, keys, values, plan), exact, rtol=0, atol=TOLERANCE)


def test_a_chunk_of_separate_pools_and_one_of_a_common_pool_are_alike() -> None:
    case = Case(seed=4, kv_heads=2).fill(6)
    q, keys, values = case.tensors(torch.float32)
    assert not keys.is_contiguous()
    apart = attend(case, (q, keys.contiguous(), values.contiguous()))
    assert torch.equal(attend(case, (q, keys, values)), apart)


def test_queries_and_results_may_be_views() -> None:
    case = Case(seed=6, kv_heads=2, group=2).fill(6)
    q, keys, values = case.tensors(torch.float32)
    fused = torch.full((case.rows, 3 * 4, 16), NAN)
    fused[:, 4:8] = q
    result = torch.zeros(case.rows, 8, 16)
    out = decode_attention(fused[:, 4:8], keys, values, case.forest().plan(), out=result[:, ::2])
    assert out.data_ptr() == result.data_ptr()
    assert torch.equal(result[:, ::2], attend(case, (q, keys, values)))
    assert (result[:, 1::2] == 0).all()


def test_the_check_itself_can_fail() -> None:
    exact = torch.randn(4, 8, dtype=torch.float64)
    assert_close(exact.float(), exact, exact.float())
    with pytest.raises(AssertionError):
        assert_close(exact.float() + 1e-5, exact, exact.float())
    with pytest.raises(AssertionError, match="nobody wrote"):
        assert_close(torch.full((4, 8), NAN), exact, exact.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v: (q[:5], k, v),
            r"q is \[5, 4, 16\]: must be \[6 \(sequences_max\), heads, head_dim\]",
        ),
        (lambda q, k, v: (q[0], k, v), "q is "),
        (lambda q, k, v: (q[:, :3], k, v), "q has 3 heads: must be a multiple of the 2"),
        (lambda q, k, v: (q, k[:9], v), r"keys is \[9, 2, 16, 16\]: must be \[64, 2, 16, 16\]"),
        (lambda q, k, v: (q, k[0], v), "keys is "),
        (lambda q, k, v: (q, k, v[:, :1]), r"values is \[64, 1, 16, 16\]: must be \[64, 2, 16, 16\]"),
        (lambda q, k, v: (q, k, v[..., :8]), "values is "),
        (lambda q, k, v: (q, k.transpose(2, 3), v), "keys has strides"),
        (lambda q, k, v: (q, k.double(), v), "keys is torch.float64 on cpu: q is torch.float32 on cpu"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "q is torch.int32: must be one of torch.float16"),
        (lambda q, k, v: (q.to("meta"), k, v), "q is on meta"),
        (lambda q, k, v: (q.expand(6, 4, 16)[..., :1].expand(6, 4, 16), k, v), "q must be contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message: str) -> None:
    case = Case(kv_heads=2, group=2).fill(3)
    with pytest.raises(ValueError, match=message):
        decode_attention(*change(*case.tensors(torch.float32)), case.forest().plan())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": NAN}, "scale is nan"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0: must be positive"),
        ({"soft_cap": float("inf")}, "soft_cap is inf"),
        ({"out": torch.empty(6, 4, 8)}, r"out is \[6, 4, 8\]"),
        ({"out": torch.empty(6, 4, 16, dtype=torch.float64)}, "out is torch.float64"),
        ({"out": torch.empty(1, 4, 16).expand(6, 4, 16)}, "out has strides .*: its elements share memory"),
        ({"out": torch.empty(104).as_strided((6, 4, 16), (8, 16, 1))}, "its elements share memory"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    case = Case(kv_heads=2, group=2).fill(3)
    with pytest.raises(ValueError, match=message):
        decode_attention(*case.tensors(torch.float32), case.forest().plan(), **options)


@pytest.mark.parametrize("name", ["q", "keys", "values"])
def test_a_result_over_what_is_read_is_refused(name: str) -> None:
    case = Case(kv_heads=2, group=2).fill(3)
    read = dict(zip(("q", "keys", "values"), case.tensors(torch.float32), strict=True))
    read = {each: tensor.contiguous() for each, tensor in read.items()}
    out = read[name].as_strided((6, 4, 16), (64, 16, 1))
    with pytest.raises(ValueError, match=f"out overlaps {name}: give other memory"):
        decode_attention(*read.values(), case.forest().plan(), out=out)


def test_a_machine_without_triton_can_attend() -> None:
    """And the CPU path does not load it where it is installed."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kvstore.kernels.decode import decode_attention; from kvstore.kernels.forest import Forest\n"
        "forest = Forest(chunk_tokens=4, chunks=1, sequences_max=1); forest.join(0, [0], 4)\n"
        "q, pool = torch.ones(1, 2, 8), torch.ones(2, 1, 2, 4, 8)\n"
        "print(decode_attention(q, *pool, forest.plan()).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("16.0", 0), done.stderr
