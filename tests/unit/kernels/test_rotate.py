"""Rotation of keys, held against fp64. test_copies_in_triton.py has the GPU's; tests/unit/gpu_worker/test_positions.py
has models whose own embedding it is to agree with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.rotate import Rotation, rotate, rotation
from kvstore.kernels.rotate.naive import naive_rotate

NAN = float("nan")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def frequencies(pairs: int, theta: float = 10_000.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(pairs).double() / max(pairs, 1))


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_close(found: torch.Tensor, exact: torch.Tensor, pairs: int, *, interleaved: bool) -> None:
    """Each element is at most twice as far from the exact one as rounding a number of the size of its pair can be. In
    float32 the products are rounded as coarsely as the sum, and the table, too: three times."""
    assert not found.isnan().any(), "something was left that nobody wrote"
    half = torch.finfo(found.dtype).eps / 2
    times = 3 if found.dtype is torch.float32 else 2
    assert torch.equal(found[..., 2 * pairs :].double(), exact[..., 2 * pairs :])
    if not pairs or not exact.numel():
        return
    rotary = exact[..., : 2 * pairs]
    size = rotary.unflatten(-1, (pairs, 2) if interleaved else (2, pairs)).norm(dim=-1 if interleaved else -2)
    sizes = size.repeat_interleave(2, -1) if interleaved else torch.cat((size, size), -1)
    smallest = torch.finfo(found.dtype).smallest_normal  # below it, steps are of one size
    allowed = times * half * (sizes * (1 + 1e-6) + smallest)
    assert ((found[..., : 2 * pairs].double() - rotary).abs() <= allowed).all()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    lead=st.sampled_from([(), (1,), (5,), (3, 7), (2, 3, 4), (1, 2, 700)]),
    head_dim=st.sampled_from((2, 20, 64, 128)),
    part=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    interleaved=st.booleans(),
    order=st.randoms(use_true_random=False),
    farthest=st.sampled_from((0, 1, 4096, 2**31)),
    theta=st.sampled_from((1e4, 5e5)),
)
def test_any_keys_are_rotated_exactly_but_for_rounding(
    seed: int,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    head_dim: int,
    part: float,
    interleaved: bool,
    order,
    farthest: int,
    theta: float,
) -> None:
    pairs = int(head_dim * part) // 2
    keys = laid_out(draw(*lead, head_dim, dtype=dtype, seed=seed), order)
    out = laid_out(torch.full_like(keys, NAN), order)
    # Deltas of any shape that broadcasts
    shape = [order.choice((1, length)) for length in lead][order.randint(0, len(lead)) :]
    deltas = torch.randint(
        -farthest, farthest + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64
    )
    before = as_bits(keys)
    returned = rotate(keys, rotation(deltas, frequencies(pairs, theta), interleaved=interleaved), out=out)
    assert returned is out
    assert torch.equal(as_bits(keys), before)
    exact = naive_rotate(keys, deltas, frequencies(pairs, theta), interleaved=interleaved)
    assert_close(out, exact, pairs, interleaved=interleaved)


def laid_out(keys: torch.Tensor, order) -> torch.Tensor:
    """The same values in other strides: dimensions permuted, every second row of something larger."""
    if keys.dim() > 1 and order.random() < 0.7:
        axes = list(range(keys.dim()))
        order.shuffle(axes)
        large = keys.new_full([2 * length for length in (keys.shape[axis] for axis in axes)], NAN)
        view = large[tuple(slice(None, None, 2) for _ in axes)].permute(
            [axes.index(n) for n in range(keys.dim())]
        )
        view.copy_(keys)
        return view
    return keys


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_at_most_twice_that_of_rounding_the_exact_result(
    dtype: torch.dtype, interleaved: bool
) -> None:
    """Over many keys, at its largest and on the average."""
    keys = draw(16, 8, 64, 128, dtype=dtype)
    deltas = torch.randint(-100_000, 100_000, (16, 1, 64), generator=torch.Generator().manual_seed(1))
    exact = naive_rotate(keys, deltas, frequencies(64), interleaved=interleaved)
    error = rotate(keys, rotation(deltas, frequencies(64), interleaved=interleaved)).double() - exact
    rounding = exact.to(dtype).double() - exact
    assert error.abs().max() <= 2 * rounding.abs().max()
    assert error.square().mean() <= 4 * rounding.square().mean()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_or_a_frequency_of_zero_changes_no_bit(dtype: torch.dtype, interleaved: bool) -> None:
    """Also of a NaN with a payload, of infinity and of -0.0, beside keys that are rotated."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(integers)
    keys = torch.randint(limits.min, limits.max, (4, 6, 32), dtype=integers).view(dtype)
    keys[:, :, ::5] = -0.0
    deltas = torch.tensor([[0], [3], [0], [-7]])
    inv_freq = frequencies(12)
    inv_freq[[2, 7]] = 0
    found = rotate(keys, rotation(deltas, inv_freq, interleaved=interleaved))
    assert torch.equal(as_bits(found[::2]), as_bits(keys[::2]))
    places = [4, 5, 14, 15] if interleaved else [2, 14, 7, 19]
    assert torch.equal(as_bits(found[..., places]), as_bits(keys[..., places]))
    assert torch.equal(as_bits(found[..., 24:]), as_bits(keys[..., 24:]))
    moved = [place for place in range(24) if place not in places]
    assert not torch.equal(as_bits(found[1::2][..., moved]), as_bits(keys[1::2][..., moved]))
    whole = rotate(keys, rotation(0, frequencies(16), interleaved=interleaved))
    assert torch.equal(as_bits(whole), as_bits(keys))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_compose_and_can_be_undone(interleaved: bool) -> None:
    keys = draw(3, 5, 64, dtype=torch.float32)

    def move(what: torch.Tensor, delta: int) -> torch.Tensor:
        return rotate(what, rotation(delta, frequencies(32), interleaved=interleaved))

    assert torch.allclose(move(move(keys, 1234), -777), move(keys, 1234 - 777), rtol=0, atol=2e-6)
    assert torch.allclose(move(move(keys, 1_000_000), -1_000_000), keys, rtol=0, atol=2e-6)
    assert not torch.allclose(move(keys, 1234), keys, rtol=0, atol=0.1)


def test_scores_depend_on_distances_only() -> None:
    """What rotary embeddings are for: queries and keys that move alike attend as before."""
    q, k = draw(7, 64, dtype=torch.float32, seed=1), draw(7, 64, dtype=torch.float32, seed=2)
    by = rotation(4321, frequencies(32))
    assert torch.allclose(rotate(q, by) @ rotate(k, by).T, q @ k.T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_is_larger_than_a_piece_is_rotated_in_pieces(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along any dimension, with any of them alone."""
    from kvstore.kernels.rotate import cpu

    keys = draw(1, pieces, 50, 64, dtype=torch.bfloat16)
    by = rotation(torch.arange(50), frequencies(32))
    whole = [rotate(keys.to(dtype), by) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(cpu, "PIECE", 7 * 64)
    monkeypatch.setattr(cpu, "CONVERTED_PIECE", 7 * 64)
    assert all(torch.equal(rotate(keys.to(one.dtype), by), one) for one in whole)


@pytest.mark.parametrize(
    ("deltas", "inv_freq", "message"),
    [
        (
            torch.tensor([1.0]),
            frequencies(4),
            r"deltas are torch.float32: must be torch.int64 or torch.int32",
        ),
        (1.5, frequencies(4), r"deltas are 1.5: must be an integer"),
        ([1, 2], frequencies(4), r"deltas are \[1, 2\]: must be an integer, or a tensor of them"),
        (
            1,
            frequencies(4).unsqueeze(0),
            r"inv_freq is torch.float64 \[1, 4\]: must be floating-point \[pairs\]",
        ),
        (1, torch.arange(4), r"inv_freq is torch.int64 \[4\]"),
        (1, torch.tensor([1.0, NAN]), "inv_freq holds nan: must be finite"),
    ],
)
def test_no_rotation_is_refused(deltas, inv_freq: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotation(deltas, inv_freq)


KEYS = torch.zeros(3, 8, 16)


@pytest.mark.parametrize(
    ("keys", "by", "out", "message"),
    [
        (torch.zeros(1, 1, 1, 1, 16), rotation(1, frequencies(4)), None, "must have 1 to 4 dimensions"),
        (torch.tensor(1.0), rotation(1, frequencies(4)), None, r"keys is \[\]"),
        (
            KEYS.to(torch.float8_e4m3fn),
            rotation(1, frequencies(4)),
            None,
            "keys is torch.float8_e4m3fn: what can be",
        ),
        (KEYS.double(), rotation(1, frequencies(4)), None, "keys is torch.float64"),
        (KEYS.to("meta"), rotation(1, frequencies(4)), None, "keys is on meta"),
        (KEYS, rotation(1, frequencies(9)), None, "inv_freq has 9 pairs: head_dim is 16"),
        (KEYS, rotation(1, frequencies(4), device="meta"), None, "the rotation is on meta, keys on cpu"),
        (
            KEYS,
            rotation(torch.arange(3), frequencies(4)),
            None,
            r"deltas are \[3\]: must broadcast to \[3, 8\]",
        ),
        (KEYS, rotation(torch.zeros(2, 3, 8, dtype=torch.int64), frequencies(4)), None, "deltas are "),
        (KEYS, rotation(1, frequencies(4)), torch.empty(3, 8, 8), r"out is torch.float32 \[3, 8, 8\]"),
        (KEYS, rotation(1, frequencies(4)), torch.empty(3, 8, 16).half(), "out is torch.float16"),
        (KEYS, rotation(1, frequencies(4)), KEYS, "out overlaps keys"),
        (KEYS[:2], rotation(1, frequencies(4)), KEYS[1:], "out overlaps keys"),
        (KEYS, rotation(1, frequencies(4)), torch.empty(1, 8, 16).expand(3, 8, 16), "out has strides"),
        (
            KEYS,
            rotation(1, frequencies(4)),
            torch.empty(146).as_strided((3, 8, 16), (1, 18, 1)),
            "its elements share memory",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    keys: torch.Tensor, by: Rotation, out: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rotate(keys, by, out=out)
    assert not KEYS.any()


def test_a_machine_without_triton_can_rotate_and_copy() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kvstore.kernels.pages import BlockTable, gather, scatter\n"
        "from kvstore.kernels.rotate import rotate, rotation\n"
        "by = rotation(1, torch.zeros(2)); pool, slices = torch.ones(2, 3, 1, 4, 8), torch.zeros(1, 2, 1, 4, 8)\n"
        "table = BlockTable.of([2], blocks=3, block_tokens=4, chunk_tokens=4)\n"
        "gather(*pool, table, slices); scatter(*pool, table, slices, by=by)\n"
        "print((rotate(pool[0], by).sum() + slices.sum()).item())\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("160.0", 0), done.stderr
