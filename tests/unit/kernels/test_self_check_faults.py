"""A kernel that is wrong in a plausible way is refused by name: faults planted into the sources, interpreted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.kernels import self_check
from kvstore.kernels.self_check import Wrong, check_kernels

from .hopper import interpreted_passes
from .test_self_check import CPU, SMALL, interpreted, plain, use_triton


@plain
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be interpreted")
    assert interpreted_passes(__file__) == len(FAULTS)


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
