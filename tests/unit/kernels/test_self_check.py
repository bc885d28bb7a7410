"""Kernels that are right pass, on the CPU and interpreted; one that is wrong in a plausible way is refused by name."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
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
    assert interpreted_passes(__file__) == 2 + len(FAULTS)


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


FAULTS: list[tuple[str, str, str]] = [
    ("decode", "valid = start + n < tokens", "valid = start + n < tokens - 1"),
    ("decode", "valid = start + n < tokens", "valid = start + n <= tokens"),
    ("decode", "logits = tl.where(valid[None, :], logits, -float(\"inf\"))", "pass"),
    ("decode", "tl.range(0, tokens, BLOCK_N,", "tl.range(0, tokens // BLOCK_N * BLOCK_N, BLOCK_N,"),
    ("decode", "input_precision=\"ieee\") * scale", "input_precision=\"ieee\") * scale * 1.01"),
    ("decode", "acc = acc * fade[:, None] + tl.dot", "acc = acc + tl.dot"),
    ("decode", "k_base = keys_ptr + kv_head * k_head", "k_base = keys_ptr"),
    ("decode", "for number in range(0, results):", "for number in range(0, results - 1):"),
    ("decode", "alone = used & (results == 1)", "alone = used & (results == 3)"),
    ("prefill", "(start + n)[None, :] < limits", "(start + n)[None, :] <= limits"),
    ("prefill", "numbers = part // CHUNK + c", "numbers = c"),
    ("prefill", "tl.maximum(tl.minimum(seen_by_all - part, size), 0)", "tl.minimum(seen_by_all + BLOCK_N, size)"),
    ("prefill", "tile = tl.program_id(1) * BLOCK_M\n", "tile = tl.program_id(1) * 0\n"),
    ("stretches", "at = (first + start + n)", "at = (start + n)"),
    ("stretches", "for number in range(0, parts):", "for number in range(0, 1):"),
    ("stretches", "valid = start + n < tokens", "valid = start + n < BLOCK_N"),
    ("write", "at = place * HEAD_DIM + d", "at = (place - 1) * HEAD_DIM + d"),
    ("write", "if chunk >= 0:", "if chunk >= 1:"),
    ("write", "+ at, v, mask=inside)", "+ at, k, mask=inside)"),
    ("rotate", "x32 * c - y32 * s", "x32 * c + y32 * s"),
    ("rotate", "mask=inside, other=1.0)", "mask=inside & (p[None, :] > 0), other=1.0)"),
    ("rotate", "if HEAD_DIM > 2 * PAIRS:", "if HEAD_DIM > 4 * PAIRS:"),
    ("pages", "used = (head < HEADS) & (first + token < held)", "used = (head < HEADS) & (first + token <= held)"),
    ("pages", "number >= 0", "number > 2"),
    ("pages", "packed += HEADS * held * HEAD_DIM", "packed += HEADS * CHUNK_TOKENS * HEAD_DIM"),
]  # fmt: skip
"""Of each kernel: what it says, and what it would say instead: a mask that is off by one, a tail that is missing, a
scale that is wrong, results that are not merged."""


@pytest.fixture
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    name, old, new = request.param
    source = Path(self_check.__file__).parent / name / "kernel.py"
    text = source.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {source}"
    file = tmp_path / f"{name}_kernel.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"planted_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@interpreted
@pytest.mark.parametrize(("name", "planted"), [(fault[0], fault) for fault in FAULTS], indirect=["planted"])
def test_interpreter_refuses_a_fault(name: str, planted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch, **{name: planted})
    monkeypatch.setattr(self_check, "ROWS", (128,))
    with pytest.raises(Wrong, match=f"^{name}, 4/2 heads of 16 float16, chunks of 16: "):
        check_kernels(SMALL, CPU, names=(name,))
