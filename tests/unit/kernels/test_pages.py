"""Gather and scatter on a CPU, held against copies token by token. test_copies_in_triton.py has the GPU's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.pages.naive import naive_gather, naive_scatter
from kvstore.kernels.rotate import rotation

from .pools import DTYPES, LAYOUTS, Paged, same
from .test_rotate import assert_close

paged = st.builds(
    Paged,
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from((1, 6, 16)),
    block_tokens=st.sampled_from((1, 3, 4)),
    chunk_blocks=st.integers(1, 4),
    tokens=st.integers(0, 40),
    holes=st.sampled_from((0.0, 0.2, 1.0)),
    in_order=st.sampled_from((0.0, 0.7, 1.0)),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=200, deadline=None)
@given(paged)
def test_gather_copies_bits_from_any_layout(case: Paged) -> None:
    table = case.table()
    before = case.keys.clone(), case.values.clone()
    expected = naive_gather(case.keys, case.values, table, case.slices)
    apart = [chunk.clone() for chunk in case.slices]
    gather(case.keys, case.values, table, case.slices)
    assert same(case.slices, expected)
    gather(case.keys, case.values, table, apart)
    assert all(same(chunk, wanted) for chunk, wanted in zip(apart, expected, strict=True))
    assert same(case.keys, before[0]) and same(case.values, before[1])


@settings(max_examples=200, deadline=None)
@given(paged)
def test_scatter_copies_bits_to_any_layout_and_leaves_the_rest(case: Paged) -> None:
    table = case.table()
    before = case.slices.clone()
    keys, values = naive_scatter(case.keys, case.values, table, case.slices)
    scatter(case.keys, case.values, table, case.slices)
    assert same(case.keys, keys) and same(case.values, values)
    assert same(case.slices, before)


@settings(max_examples=100, deadline=None)
@given(
    paged.filter(lambda case: case.dtype in (torch.float16, torch.bfloat16, torch.float32)),
    st.booleans(),
    st.sampled_from(("all", "chunk", "token")),
    st.sampled_from((0.0, 0.5, 1.0)),
)
def test_scatter_rotates_keys_and_nothing_else(
    case: Paged, interleaved: bool, deltas: str, part: float
) -> None:
    table = case.table()
    shape = {"all": (), "chunk": (table.chunks, 1), "token": (table.chunks, table.chunk_tokens)}[deltas]
    draw = torch.Generator().manual_seed(case.seed)
    for tensor in (case.keys, case.values, case.slices):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    moves = torch.randint(-500, 500, shape, generator=draw) * torch.randint(0, 2, shape, generator=draw)
    inv_freq = torch.rand(int(case.head_dim * part) // 2, generator=draw)
    plain, values = naive_scatter(case.keys, case.values, table, case.slices)
    exact, _ = naive_scatter(
        *(case.keys.double(), case.values.double(), table, case.slices.double()),
        **{"deltas": moves, "inv_freq": inv_freq, "interleaved": interleaved},
    )
    scatter(case.keys, case.values, table, case.slices, by=rotation(moves, inv_freq, interleaved=interleaved))
    assert same(case.values, values)
    assert_close(case.keys, exact, len(inv_freq), interleaved=interleaved)
    stays = exact == plain
    assert torch.equal(case.keys[stays], plain[stays])


def test_what_was_gathered_can_be_scattered_elsewhere() -> None:
    """Blocks of one engine become blocks of another size and layout in another."""
    case = Paged(layout="tokens first", block_tokens=4, chunk_blocks=4, tokens=45, seed=3)
    gather(case.keys, case.values, case.table(), case.slices)
    other = Paged(layout="K and V in one row", block_tokens=8, chunk_blocks=2, tokens=45, seed=4)
    scatter(other.keys, other.values, other.table(), case.slices)
    back = torch.zeros_like(case.slices)
    gather(other.keys, other.values, other.table(), back)
    assert same(back, case.slices)


def test_a_last_chunk_is_packed_and_zeros_follow() -> None:
    case = Paged(tokens=19, chunk_blocks=4)
    gather(case.keys, case.values, case.table(), case.slices)
    flat = case.slices[1].view(-1)
    size = case.heads * 3 * case.head_dim
    assert same(flat[:size].view(case.heads, 3, case.head_dim), case.keys[case.numbers[4], :, :3])
    assert same(flat[size : 2 * size].view(case.heads, 3, case.head_dim), case.values[case.numbers[4], :, :3])
    assert not flat[2 * size :].view(torch.int16).any()
    untouched = case.slices.clone()
    gather(case.keys, case.values, case.table(numbers=[-1] * 5), case.slices)
    assert same(case.slices, untouched), "a chunk that is a hole is left alone"


def test_blocks_that_follow_one_another_are_one_copy() -> None:
    table = BlockTable.of([5, 6, 7, 2, -1, 0, 1, 3], blocks=8, block_tokens=4, chunk_tokens=16, tokens=30)
    assert [(run.chunk, run.first, run.block, run.count, run.tokens) for run in table.runs] == [
        (0, 0, 5, 3, 12),
        (0, 12, 2, 1, 4),
        (1, 4, 0, 2, 8),
        (1, 12, 3, 1, 2),
    ]
    assert table.chunks == 2 and table.tokens_of(1) == 14 and table.numbers.dtype is torch.int32


def test_a_table_may_be_of_any_integers_in_any_shape() -> None:
    told = [[5, 6], [7, 2]]
    for numbers in (told[0] + told[1], torch.tensor(told), torch.tensor(told, dtype=torch.int32)):
        table = BlockTable.of(numbers, blocks=8, block_tokens=4, chunk_tokens=8)
        assert table.numbers.tolist() == [5, 6, 7, 2] and table.tokens == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": [0, 1, 9, 2, 3]}, r"numbers\[2\] is 9: the pool has blocks 0 to 7, and -1 is a hole"),
        ({"numbers": [0, 1, 2, 3, -2]}, r"numbers\[4\] is -2"),
        ({"numbers": [0, 1, 2, 3]}, "numbers names 4 blocks of 4 tokens: 19 tokens need 5"),
        ({"numbers": [0, 1, 2, 3, 4, 5]}, "numbers names 6 blocks"),
        ({"tokens": -1, "numbers": []}, "numbers names 0 blocks of 4 tokens: -1 tokens need"),
        ({"numbers": torch.rand(5)}, "numbers are torch.float32: must be integers"),
        ({"numbers": torch.ones(5, dtype=torch.bool)}, "numbers are torch.bool"),
        ({"chunk_tokens": 10}, r"chunk_tokens is 10: must be a multiple of block_tokens \(4\)"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0: must be at least 1"),
        ({"block_tokens": -4}, "block_tokens is -4"),
        ({"blocks": 0}, "blocks is 0"),
    ],
)
def test_tables_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Paged().table(**change)


@pytest.mark.parametrize("copy", [gather, scatter])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v, s: (k[:7], v, s), r"keys is \[7, 2, 4, 16\]: must be \[8, kv_heads, 4, head_dim\]"),
        (lambda k, v, s: (k[:, :, :2], v, s), "keys is "),
        (lambda k, v, s: (k[0], v, s), "keys is "),
        (lambda k, v, s: (k, v[:, :1], s), r"values is \[8, 1, 4, 16\]: must be like keys"),
        (
            lambda k, v, s: (k, v.view(torch.bfloat16), s),
            "values is torch.bfloat16 on cpu: keys is torch.float16",
        ),
        (lambda k, v, s: (k.to("meta"), v, s), "keys is on meta"),
        (lambda k, v, s: (k, v, s[:2]), r"slices is \[2, 2, 2, 8, 16\]: must be \[3, 2, 2, 8, 16\]"),
        (lambda k, v, s: (k, v, s.transpose(3, 4)), "slices is "),
        (lambda k, v, s: (k, v, s.view(torch.int16)), "slices is torch.int16"),
        (lambda k, v, s: (k, v, s.transpose(2, 3).contiguous().transpose(2, 3)), r"slices\[0\] has strides"),
        (lambda k, v, s: (k, v, list(s[:2])), "slices are 2: must be 3, one for each chunk"),
        (lambda k, v, s: (k, v, [s[0], s[1], s[2, :1]]), r"slices\[2\] is \[1, 2, 8, 16\]"),
        (lambda k, v, s: (k, v, [s[0], s[1].view(torch.int16), s[2]]), r"slices\[1\] is torch.int16"),
        (lambda k, v, s: (k, v, torch.as_strided(k, s.shape, s.stride())), "slices overlaps keys"),
        (
            lambda k, v, s: (k, v, [s[0], torch.as_strided(v, s[0].shape, s[0].stride()), s[1]]),
            r"slices\[1\] overlaps",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(copy, change, message: str) -> None:
    case = Paged(layout="heads first")
    table = case.table()
    before = [tensor.clone() for tensor in (case.keys, case.values, case.slices)]
    keys, values, slices = change(case.keys, case.values, case.slices)
    with pytest.raises(ValueError, match=message):
        copy(keys, values, table, slices)
    after = case.keys, case.values, case.slices
    assert all(same(one, other) for one, other in zip(before, after, strict=True))


def test_slices_that_share_memory_are_not_gathered_into() -> None:
    case = Paged()
    with pytest.raises(ValueError, match=r"slices has strides .*: its elements share memory"):
        gather(case.keys, case.values, case.table(), case.slices[:1].expand(3, -1, -1, -1, -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[:1].expand(8, -1, -1, -1), v), "keys has strides"),
        (lambda k, v: (k, v.as_strided(v.shape, (1, *v.stride()[1:]))), "values has strides"),
        (lambda k, v: (k, k), "keys and values share memory"),
        (lambda k, v: (k, k.transpose(2, 3).contiguous().transpose(2, 3)), None),
        (lambda k, v: (k, k.flip(0).as_strided(k.shape, k.stride())), None),
    ],
)
def test_pools_whose_elements_share_memory_are_not_scattered_into(change, message: str | None) -> None:
    case = Paged(layout="heads first")
    keys, values = change(case.keys, case.values)
    if message is None:  # in memory of its own
        scatter(keys, values, case.table(), case.slices)
        return
    before = keys.clone(), values.clone()
    with pytest.raises(ValueError, match=message):
        scatter(keys, values, case.table(), case.slices)
    assert same(keys, before[0]) and same(values, before[1])


def test_keys_and_values_that_alternate_in_other_strides_are_not_scattered_into() -> None:
    memory = torch.zeros(4096)
    keys = memory.as_strided((8, 2, 4, 16), (256, 128, 32, 1))
    values = memory[16:].as_strided((8, 2, 4, 16), (256, 128, 32, 1))
    case = Paged(dtype=torch.float32)
    scatter(keys, values, case.table(), case.slices)
    with pytest.raises(ValueError, match="keys and values share memory"):
        scatter(keys, memory[16:].as_strided((8, 2, 4, 16), (256, 32, 64, 1)), case.table(), case.slices)
    with pytest.raises(ValueError, match="keys and values share memory"):
        scatter(keys, memory[8:].as_strided((8, 2, 4, 16), (256, 128, 32, 1)), case.table(), case.slices)


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(*(st.integers(1, 3),) * 3),
    *(st.tuples(*(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24, 48)),) * 4),) * 2,
    st.integers(0, 60),
    st.sets(st.integers(0, 3)),
)
def test_no_pool_is_scattered_into_that_has_two_elements_at_one_address(
    shape: tuple[int, ...],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    between: int,
    alike: set[int],
) -> None:
    heads, tokens, head_dim = shape
    value_strides = tuple(key_strides[n] if n in alike else step for n, step in enumerate(value_strides))
    memory, address = torch.zeros(400, dtype=torch.int64), torch.arange(400)
    views = [
        tuple(
            of[start:].as_strided((2, heads, tokens, head_dim), strides)
            for start, strides in ((0, key_strides), (between, value_strides))
        )
        for of in (memory, address)
    ]
    table = BlockTable.of([1, 0], blocks=2, block_tokens=tokens, chunk_tokens=2 * tokens)
    slices = torch.ones(1, 2, heads, 2 * tokens, head_dim, dtype=torch.int64)
    used = torch.cat([view.flatten() for view in views[1]])
    try:
        scatter(*views[0], table, slices)
    except ValueError:
        assert not memory.any()
    else:
        assert used.unique().numel() == used.numel()
        assert memory[used].all() and memory.sum() == used.numel()


def test_a_block_named_twice_can_be_gathered_from_only() -> None:
    case = Paged()
    table = case.table(numbers=[0, 1, 2, 1, 4])
    assert same(naive_gather(case.keys, case.values, table, case.slices)[0], _gathered(case, table)[0])
    before = case.keys.clone(), case.values.clone()
    with pytest.raises(ValueError, match="the table names block 1 twice"):
        scatter(case.keys, case.values, table, case.slices)
    assert same(case.keys, before[0]) and same(case.values, before[1])


def _gathered(case: Paged, table: BlockTable) -> torch.Tensor:
    gather(case.keys, case.values, table, case.slices)
    return case.slices


@pytest.mark.parametrize(
    ("case", "deltas", "pairs", "message"),
    [
        (Paged(dtype=torch.float8_e4m3fn), 1, 8, "keys is torch.float8_e4m3fn: what can be rotated"),
        (Paged(), 1, 9, "inv_freq has 9 pairs: head_dim is 16"),
        (
            Paged(),
            torch.arange(5),
            8,
            r"deltas are \[5\]: must broadcast to \[3, 8\] \(chunks, chunk_tokens\)",
        ),
        (Paged(), torch.zeros(1, 3, 8, dtype=torch.int64), 8, r"deltas are \[1, 3, 8\]"),
    ],
)
def test_rotations_that_do_not_fit_are_refused(case: Paged, deltas, pairs: int, message: str) -> None:
    before = case.values.clone()
    with pytest.raises(ValueError, match=message):
        scatter(case.keys, case.values, case.table(), case.slices, by=rotation(deltas, torch.rand(pairs)))
    assert same(case.values, before)


def test_no_token_is_no_copy() -> None:
    case = Paged(tokens=0)
    assert case.table().chunks == 0
    gather(case.keys, case.values, case.table(), [])
    scatter(case.keys, case.values, case.table(), case.slices, by=rotation(3, torch.rand(2)))


def test_chunks_that_share_memory_are_not_gathered_into() -> None:
    """A slot named twice would hold the second chunk where the first is asked for."""
    pool = torch.randn(4, 2, 2, 16, 8)
    table = BlockTable.of([0, 1], blocks=4, block_tokens=16, chunk_tokens=16)
    memory = torch.zeros(3, 2, 2, 16, 8)
    half = memory.view(-1)[256:768].view(2, 2, 16, 8)
    for slices in ([memory[0], memory[0]], [memory[1], half], [half, memory[0]]):
        with pytest.raises(ValueError, match=r"slices\[\d\] overlaps slices\[\d\]"):
            gather(*pool.unbind(1), table, slices)
    assert not memory.any()
    gather(*pool.unbind(1), table, [memory[2], memory[0]])
    assert torch.equal(memory[2], pool[0]) and torch.equal(memory[0], pool[1])
