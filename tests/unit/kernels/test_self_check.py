"""Kernels that are right pass, on the CPU and interpreted; one that is wrong in a plausible way is refused by name."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch

from kvstore.kernels import decode, pages, prefill, rotate, self_check
from kvstore.kernels.self_check import KERNELS, Shape, Wrong, check_kernels

from .hopper import interpreted_passes
from .launches import bound

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
plain = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
CPU = torch.device("cpu")
SMALL = Shape(4, 2, 16, torch.float16, chunk_tokens=16, split_tokens=128, tile_sequences=4, pairs=6)


@plain
@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        Shape(8, 2, 64, torch.bfloat16, 16, 64, 4, pairs=32, interleaved=True),
        Shape(3, 3, 80, torch.float16, 32, 128, 8, pairs=10),
        Shape(2, 1, 24, torch.float32, 6, 12, 3),
        Shape(1, 1, 6, torch.float32, 2, 2, 1, pairs=3),
    ],
    ids=str,
)
def test_kernels_for_a_cpu_pass(shape: Shape) -> None:
    found = check_kernels(shape, CPU)
    assert list(found) == list(KERNELS)
    assert found["write"] == 0 and all(difference >= 0 for difference in found.values())


@plain
def test_what_is_wrong_is_named_with_its_shape_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.cpu.decode

    def shorter(*given: Any, scale: float, **options: Any) -> None:
        right(*given, scale=scale * 1.02, **options)

    monkeypatch.setattr(decode.cpu, "decode", shorter)
    told = (
        r"decode, 4/2 heads of 16 float16, chunks of 16: one token each of 11 sequences: differs by 0\.0\d+ "
        r"from the exact result, where rounding is 0\.0039"
    )
    with pytest.raises(Wrong, match=told):
        check_kernels(SMALL, CPU)


@plain
def test_a_kernel_that_fails_is_refused_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(rotate.cpu, "rotate", fails)
    with pytest.raises(Wrong, match=r"^rotate, .*RuntimeError: an illegal memory access"):
        check_kernels(SMALL, CPU, names=("write", "rotate"))
    assert check_kernels(SMALL, CPU, names=("write", "prefill")).keys() == {"write", "prefill"}


@plain
def test_a_kernel_that_leaves_its_result_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill.cpu, "prefill", lambda *given, **options: None)
    with pytest.raises(Wrong, match=r"^prefill, .* differs by nan"):
        check_kernels(SMALL, CPU)


@plain
@pytest.mark.parametrize("shape", [SMALL._replace(head_dim=64, pairs=32, tile_sequences=32), SMALL], ids=str)
def test_nothing_is_compiled_for_the_check_that_serving_does_not_need(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all is launched that serving does."""
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be bound")
    from kvstore.kernels.warm_up import warm_up

    pool = torch.zeros(2, 2, shape.kv_heads, shape.chunk_tokens, shape.head_dim, dtype=shape.dtype)
    with bound(monkeypatch) as warm:
        warm_up(
            *pool.unbind(1),
            heads=shape.heads,
            split_tokens=shape.split_tokens,
            tile_sequences=shape.tile_sequences,
        )
    with bound(monkeypatch) as launched:
        use_triton(monkeypatch)
        monkeypatch.setattr(self_check, "_difference", lambda result: 0.0)  # nothing is computed
        check_kernels(shape, CPU, names=("write", "decode", "prefill", "stretches"))
    ours = {key for key in launched.keys if "rotate" not in key[0]}
    assert ours == warm.keys


# ------------------------------------------------------------------------------------------------------- interpreted


def use_triton(monkeypatch: pytest.MonkeyPatch, **planted: ModuleType) -> None:
    """Instead of the kernels for a CPU; `planted`: modules in their place."""
    from kvstore.kernels.decode import kernel as of_decode
    from kvstore.kernels.pages import kernel as of_pages
    from kvstore.kernels.prefill import kernel as of_prefill
    from kvstore.kernels.rotate import kernel as of_rotate
    from kvstore.kernels.stretches import kernel as of_stretches
    from kvstore.kernels.write import kernel as of_write

    decoding, prefilling = planted.get("decode", of_decode), planted.get("prefill", of_prefill)
    for module in (decoding, prefilling):
        monkeypatch.setattr(module, "stretches", planted.get("stretches", of_stretches))
    monkeypatch.setattr(decode.cpu, "decode", decoding.decode)
    monkeypatch.setattr(prefill.cpu, "prefill", prefilling.prefill)
    monkeypatch.setattr(rotate.cpu, "rotate", planted.get("rotate", of_rotate).rotate)
    for name in ("gather", "scatter"):
        monkeypatch.setattr(pages.cpu, name, getattr(planted.get("pages", of_pages), name))
    monkeypatch.setattr(self_check, "write_kv", planted.get("write", of_write).write)


@plain
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be interpreted")
    assert interpreted_passes(__file__) == 2


SCATTERED = SMALL._replace(heads=3, kv_heads=1, head_dim=24, pairs=12, interleaved=True, chunk_tokens=32)


@interpreted
@pytest.mark.parametrize(
    ("shape", "names"),
    [(SMALL, tuple(KERNELS)), (SCATTERED, ("write", "decode", "rotate", "pages"))],
    ids=str,
)
def test_interpreter_passes(shape: Shape, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    monkeypatch.setattr(self_check, "ROWS", (128,))  # interpreted, each size takes seconds
    assert tuple(check_kernels(shape, CPU, names=names)) == names
