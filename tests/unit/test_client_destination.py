"""Bytes arrive in every kind of destination exactly as they were, or the caller is told why not."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from kvstore import memory
from kvstore.client.destination import copy_pairs, destination, gather, groups
from kvstore.errors import BadRequest

torch = pytest.importorskip("torch")


def pattern(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All byte values, so that floats among them are NaNs of every kind and booleans are neither 0 nor 1."""
    return (np.arange(size, dtype=np.uint32) * 37 % 256).astype(np.uint8)


def load(out: object, size: int) -> None:
    bits = destination(out)
    assert bits.nbytes == size
    source = pattern(size)
    source.flags.writeable = False
    copy_pairs([(bits, source)])


@pytest.mark.parametrize(
    "dtype",
    [
        "u1",
        "i1",
        "?",
        "f2",
        ">f4",
        "<f8",
        "c8",
        "c16",
        "g",
        "V12",
        "S7",
        "M8[s]",
        [("a", "u1"), ("b", "<f4")],
    ],
    ids=str,
)
def test_numpy_of_any_type_and_layout(dtype: Any) -> None:
    whole = np.zeros((6, 8, 10), dtype)
    for view in (
        whole,
        whole[1:3],
        whole[:, 2:5, 1:7],
        whole[::2, ::-1, ::3],
        whole.T,
        np.asfortranarray(whole),
        whole[3, 4, 5:6],
        whole[2, 2, 2, ...],
    ):
        load(view, view.nbytes)
        assert np.ascontiguousarray(view).tobytes() == pattern(view.nbytes).tobytes()


def test_only_the_window_is_written() -> None:
    whole = np.zeros((4, 6), np.float32)
    window = whole[1:3, 2:4]
    load(window, 16)
    whole[1:3, 2:4] = 0
    assert not whole.view(np.uint8).any()


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "int64",
    ],
)
def test_tensors_of_any_type(dtype: str) -> None:
    whole = torch.zeros((3, 8, 16), dtype=getattr(torch, dtype))
    for view in (whole, whole[1], whole[:, 2:5, 1:7], whole.transpose(0, 2), whole[:, ::2]):
        load(view, view.nbytes)
        if dtype == "bool":
            view = view.view(torch.uint8)  # torch itself makes 0 or 1 of booleans that it copies
        flat = view.contiguous()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        assert flat.view(torch.uint8).numpy().tobytes() == pattern(flat.nbytes).tobytes()


def test_a_tensor_that_wants_gradients_is_written_like_any_other() -> None:
    weight = torch.zeros(64, requires_grad=True)
    load(weight, 256)
    assert weight.detach().view(torch.uint8).numpy().tobytes() == pattern(256).tobytes()
    assert weight.grad_fn is None


def test_plain_buffers() -> None:
    for out in (bytearray(64), memoryview(bytearray(64)), array.array("d", [0.0] * 8)):
        load(out, 64)
        assert bytes(out) == pattern(64).tobytes()


LIMIT = memory.TOUCHED_BYTES


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ([], []),
        ([1], [1]),
        ([LIMIT], [1]),
        ([LIMIT + 1, 1, 1], [1, 2]),
        ([1, LIMIT + 1, 1], [1, 1, 1]),
        ([LIMIT // 4] * 9, [4, 4, 1]),
        ([LIMIT // 2, LIMIT // 2 + 1, 1], [1, 2]),
        ([0, 0, LIMIT, 0, 1], [4, 1]),
    ],
)
def test_what_is_copied_together(sizes: list[int], together: list[int]) -> None:
    found = list(groups(sizes))
    assert [len(sizes[group]) for group in found] == together
    assert [size for group in found for size in sizes[group]] == sizes


@pytest.mark.parametrize("sizes", [[8], [8, 24, 8], [LIMIT + 8, 8, 16]])
@pytest.mark.parametrize("strided", [False, True])
def test_many_at_once_are_copied_each_to_its_own_place(sizes: list[int], strided: bool) -> None:
    sources = [pattern(size + number)[number:] for number, size in enumerate(sizes)]
    plain = [np.zeros(size, np.uint8) for size in sizes]
    outs = [out.reshape(-1, 4)[:, ::2] for out in plain] if strided else plain
    halves = [source[: out.nbytes] for source, out in zip(sources, outs, strict=True)]
    copy_pairs([(destination(out), half) for out, half in zip(outs, halves, strict=True)])
    for out, half in zip(outs, halves, strict=True):
        assert out.tobytes() == half.tobytes()
    back = [np.zeros(half.size, np.uint8) for half in halves]
    gather([(target, destination(out)) for target, out in zip(back, outs, strict=True)])
    for target, half in zip(back, halves, strict=True):
        assert target.tobytes() == half.tobytes()


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (b"read-only", "read-only"),
        (np.broadcast_to(np.zeros(1, np.uint8), 8), "read-only"),
        (np.zeros(3, object), "holds objects"),
        (np.lib.stride_tricks.as_strided(np.zeros(2), (4, 2), (0, 8)), "share memory"),
        (torch.zeros(1, 8).expand(4, 8), "share memory"),
        (torch.zeros(8, device="meta"), "not in host memory"),
        (torch.zeros(8, 8).to_sparse(), "no plain strided tensor"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "no plain strided tensor"),
        ([1, 2, 3], "neither a buffer"),
        (None, "neither a buffer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_written_in_place(out: object, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        destination(out, "target")
    assert caught.value.field == "target"
