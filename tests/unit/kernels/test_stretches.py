"""Attention over stretches on a CPU, held against fp64 with the keys rotated: any tokens of any chunk, anywhere in any
sequence. test_stretches_triton.py has the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import Forest
from kvstore.kernels.prefill import prefill_attention
from kvstore.kernels.rotate.naive import naive_rotate
from kvstore.kernels.stretches import Stretch

from .conftest import NAN, Case

SEEDS = st.integers(0, 2**32)
DTYPES = st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16))
SHAPE = {
    "chunk_tokens": st.sampled_from((1, 16, 64)),
    "split_chunks": st.integers(1, 3),
    "tile_sequences": st.sampled_from((1, 2, 64)),
    "kv_heads": st.integers(1, 2),
    "group": st.sampled_from((1, 3)),
    "head_dim": st.sampled_from((8, 80)),
    "interleaved": st.booleans(),
}


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, dtype=DTYPES, sequences=st.integers(0, 6), soft_cap=st.sampled_from((None, 3.0)), **SHAPE)
def test_decoding_sees_stretches_where_they_stand(
    seed: int, dtype: torch.dtype, sequences: int, soft_cap: float | None, **shape: int
) -> None:
    Case(seed=seed, **shape).fill(sequences).scatter().check(decode_attention, dtype, soft_cap=soft_cap)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    sequences=st.integers(0, 6),
    soft_cap=st.sampled_from((None, 3.0)),
    tile_queries=st.sampled_from((1, 3, 512)),
    **SHAPE,
)
def test_prefill_sees_stretches_from_a_token_on(
    seed: int,
    dtype: torch.dtype,
    sequences: int,
    soft_cap: float | None,
    tile_queries: int,
    **shape: int,
) -> None:
    case = Case(seed=seed, **shape).fill(sequences).scatter()
    case.check_prefill(
        prefill_attention, dtype, case.scattered(), tile_queries=tile_queries, soft_cap=soft_cap
    )


def case_of_three() -> Case:
    """Rows 0, 1, 2 have a shared chunk, and see chunk 9 at three places; row 2 sees it twice."""
    case = Case(seed=3, kv_heads=2, group=2)
    case.add(0, more=40)
    case.add(1, like=0, shared=1, more=5)
    case.add(2, more=3)
    case.stretches = {
        0: [Stretch(9, 2, 11, delta=64)],
        1: [Stretch(9, 2, 11, delta=-3, at=4)],
        2: [Stretch(9, 2, 11), Stretch(9, 2, 11, delta=1000)],
    }
    return case


def test_who_sees_a_stretch_at_other_places_reads_it_together() -> None:
    plan = case_of_three().forest(tile_sequences=64).plan()
    assert plan.stretches is not None
    assert plan.stretches.parts.tolist() == [[9, 2, 11], [9, 2, 11]]
    assert sorted(plan.stretches.items[:, 1].tolist()) == [1, 3]
    alone = case_of_three().forest(share=False).plan().stretches
    assert alone is not None and alone.items[:, 1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("split_tokens", [16, 64])
def test_how_items_are_made_does_not_matter(share: bool, split_tokens: int) -> None:
    case = case_of_three()
    q, keys, values = case.tensors(torch.float64)
    wanted = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    plan = case.forest(share=share, split_tokens=split_tokens, tile_sequences=1).plan()
    found = case.attend(decode_attention, q, keys, values, plan=plan)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_a_stretch_is_what_its_keys_are_when_they_are_rotated() -> None:
    """Queries turned back are keys turned on: the two ways differ by rounding only."""
    case = Case(seed=1)
    case.add(0, more=20)
    case.stretches[0] = [Stretch(case.unused[0], 0, 16, delta=-4000)]
    q, keys, values = case.tensors(torch.float64)
    found = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    chunk = case.stretches[0][0].chunk
    keys[chunk] = naive_rotate(keys[chunk], -4000, case.inv_freq)
    case.stretches[0] = [Stretch(chunk, 0, 16)]
    again = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    assert torch.allclose(found[0], again[0], rtol=0, atol=1e-9)
    case.stretches[0] = [Stretch(chunk, 0, 16, delta=1)]
    other = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    assert not torch.allclose(found[0], other[0], rtol=0, atol=1e-4), "a delta makes no difference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_without_stretches_keep_every_bit(dtype: torch.dtype) -> None:
    case = Case(seed=8, group=2).fill(5)
    q, keys, values = case.tensors(dtype)
    wanted = decode_attention(q, keys, values, case.forest().plan())
    row = next(row for row, (_, tokens) in case.sequences.items() if tokens)
    case.stretches[row] = [Stretch(case.unused[-1], 0, 16, delta=5)]
    q, keys, values = case.tensors(dtype)
    found = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    others = [other for other in range(case.rows) if other != row]
    assert torch.equal(found[others], wanted[others])
    assert not torch.equal(found[row], wanted[row])


def test_where_chunks_lie_in_the_pool_changes_no_bit() -> None:
    case = Case(seed=4, group=2, chunks=64)
    case.add(0, more=20)
    unused = sorted(case.unused)
    numbers = unused[20:24]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    case.stretches[0] = [Stretch(number, 0, 16, delta=-7) for number in numbers]
    q, keys, values = case.tensors(torch.float32)
    wanted = case.attend(decode_attention, q, keys, values, plan=case.forest().plan())
    apart = [unused[place] for place in (41, 30, 52, 9)]
    for pool in (keys, values):
        pool[apart] = pool[numbers]
    case.stretches[0] = [Stretch(number, 0, 16, delta=-7) for number in apart]
    assert torch.equal(case.attend(decode_attention, q, keys, values, plan=case.forest().plan()), wanted)


def test_stretches_come_and_go_with_their_sequences() -> None:
    case = case_of_three()
    forest = case.forest()
    assert forest.plan().stretches is not None
    assert forest.stretches_of(1) == (Stretch(9, 2, 11, delta=-3, at=4),)
    forest.append(1)
    before = forest.plan().stretches
    assert before is forest.plan().stretches, "made again though nothing changed"
    for row in (0, 1, 2):
        forest.leave(row)
    assert forest.plan().stretches is None
    forest.join(0, [1], 5)
    assert forest.stretches_of(0) == ()
    forest.leave(0)
    forest.join(0, [1], 5, [Stretch(9, 0, 3)])
    forest.extend(0, [2], 20)
    assert forest.stretches_of(0) == (Stretch(9, 0, 3),)
    forest.check_integrity()


@pytest.mark.parametrize(
    ("stretch", "says"),
    [
        (Stretch(64, 0, 1), "chunk is 64"),
        (Stretch(-1, 0, 1), "chunk is -1"),
        (Stretch(0, 10, 7), "tokens 10 to 17"),
        (Stretch(0, 0, 0), "tokens 0 to 0"),
        (Stretch(0, -1, 3), "tokens -1 to 2"),
        (Stretch(0, 0, 3, at=5), "at is 5"),
        (Stretch(0, 0, 3, at=-1), "at is -1"),
    ],
)
def test_what_lies_nowhere_is_refused(stretch: Stretch, says: str) -> None:
    forest = Case().forest()
    with pytest.raises(ValueError, match=says):
        forest.join(0, [3], 5, [stretch])
    assert 0 not in forest
    forest.check_integrity()


def test_turned_queries_are_checked() -> None:
    case = case_of_three()
    q, keys, values = case.tensors(torch.float32)
    plan = case.forest().plan()
    assert plan.stretches is not None
    with pytest.raises(ValueError, match="turned is None: must be"):
        decode_attention(q, keys, values, plan)
    with pytest.raises(ValueError, match="inverse frequencies"):
        plan.stretches.turn(q, None)
    turned = plan.stretches.turn(q, case.inv_freq)
    with pytest.raises(ValueError, match=r"turned is torch.float64"):
        decode_attention(q, keys, values, plan, turned=turned.double())
    with pytest.raises(ValueError, match="no sequence of the plan has stretches"):
        decode_attention(
            q, keys, values, Forest(chunk_tokens=16, chunks=64, sequences_max=6).plan(), turned=turned
        )


def test_what_lies_beside_a_stretch_is_never_used() -> None:
    case = case_of_three()
    q, keys, values = case.tensors(torch.float32)
    assert keys[9, :, :2].isnan().all() and values[9, :, 13:].isnan().all()
    out = case.attend(
        decode_attention, q, keys, values, plan=case.forest().plan(), out=torch.full_like(q, NAN)
    )
    assert not out[:3].isnan().any()
