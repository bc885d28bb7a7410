"""An engine computes with a device only if its kernels, and the choice of tokens, are right there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.errors import Unsupported
from kvstore.gpu_worker import kernel_check, sampling
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.kernel_check import check_choice, prove_kernels
from kvstore.gpu_worker.verdicts import LASTS_S, Verdicts
from kvstore.kernels import decode
from kvstore.kernels.self_check import Shape, Wrong

from .conftest import FakeStore, tiny_llama
from .emulated import EmulatedDevice

CPU = torch.device("cpu")
SHAPE = Shape(2, 1, 16, torch.float32, 16, 32, 2, pairs=8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice(late_s=0)
    yield made
    made.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes whose kernels were compared."""
    shapes: list[Shape] = []
    monkeypatch.setattr(kernel_check, "check_kernels", lambda shape, where, *, names: shapes.append(shape))
    return shapes


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.cpu.decode

    def attend(*given: Any, scale: float, **options: Any) -> None:
        right(*given, scale=1.1 * scale, **options)

    monkeypatch.setattr(decode.cpu, "decode", attend)


def test_an_engine_whose_kernels_are_wrong_is_refused_before_it_knows_the_store(
    model: LlamaForCausalLM,
    store: FakeStore,
    device: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    verdicts = Verdicts(tmp_path / "checks.json")
    asked: list[object] = []

    def connect() -> Any:
        asked.append(store)
        return store.connect()

    def engine() -> BatchEngine:
        return BatchEngine(model, connect, pool_chunks=16, chunk_tokens=16, device=device, verdicts=verdicts)

    with monkeypatch.context() as patched:
        wrong_scale(patched)
        with pytest.raises(
            Unsupported, match=r"a kernel is wrong on it: decode, .*float32, chunks of 16: .* differs by"
        ) as refused:
            engine()
    assert (refused.value.field, refused.value.value) == ("device", "emulated 0")
    assert "kvctl doctor gpu" in refused.value.remedy
    assert not asked and not verdicts.file.exists()
    engine().close()
    assert asked and verdicts.file.exists()
    with monkeypatch.context() as patched:
        wrong_scale(patched)
        engine().close()  # for a week it is not looked at again


def test_what_an_engine_is_served_with_is_what_is_checked(
    model: LlamaForCausalLM, device: EmulatedDevice, checked: list[Shape], tmp_path: Path
) -> None:
    verdicts = Verdicts(tmp_path / "checks.json")
    BatchEngine(
        model, pool_chunks=16, chunk_tokens=16, sequences_max=3, device=device, verdicts=verdicts
    ).close()
    config = model.config
    (shape,) = checked
    assert shape[:5] == (
        *(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        *(model.dtype, 16),
    )
    assert (shape.split_tokens, shape.pairs, shape.interleaved) == (512, config.head_dim // 2, False)


def test_kernels_are_proved_before_all_else_is_compiled(
    model: LlamaForCausalLM, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that fails is a refusal with its name, not an error from somewhere; and nobody waits for the others."""
    order: list[str] = []
    fails = [True]

    def check(shape: Shape, where: torch.device, *, names: list[str]) -> None:
        order.append("checked")
        if fails.pop():
            raise Wrong("decode: RuntimeError: no kernel image is available")

    monkeypatch.setattr(kernel_check, "check_kernels", check)
    monkeypatch.setattr(Forward, "warm_up", lambda forward: order.append("compiled"))
    settings: dict[str, Any] = {"pool_chunks": 16, "chunk_tokens": 16, "device": device}
    with pytest.raises(Unsupported, match="a kernel is wrong on it: decode: RuntimeError: no kernel image"):
        BatchEngine(model, verdicts=Verdicts(tmp_path / "checks.json"), **settings)
    assert order == ["checked"]
    fails.append(False)
    BatchEngine(model, verdicts=Verdicts(tmp_path / "checks.json"), **settings).close()
    assert order == ["checked", "checked", "compiled"]


def test_memory_of_the_host_needs_no_check(model: LlamaForCausalLM, checked: list[Shape]) -> None:
    BatchEngine(model, pool_chunks=16, chunk_tokens=16).close()
    assert not checked


def test_a_verdict_counts_for_what_was_checked_and_expires(
    device: EmulatedDevice, checked: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    verdicts = Verdicts(tmp_path / "checks.json", now=lambda: now[0])

    def checks(shape: Shape = SHAPE, vocabulary: int = 30) -> int:
        before = len(checked)
        prove_kernels(device, CPU, shape, vocabulary, verdicts=verdicts)
        return len(checked) - before

    assert [checks(), checks()] == [1, 0]
    assert [checks(SHAPE._replace(tile_sequences=3)), checks(vocabulary=31), checks()] == [1, 1, 0]
    changes: list[tuple[Any, str, Any]] = [
        (kernel_check, "_sources", lambda: "other kernels"),
        (kernel_check, "_triton", lambda: "4.0"),
        (torch, "__version__", "9.9"),
        (device, "identity", "a card with another driver"),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            assert [checks(), checks()] == [1, 0], name
    now[0] += LASTS_S
    assert [checks(), checks()] == [1, 0]
    verdicts.take_back(device)
    assert checks() == 1


def test_a_change_of_any_source_of_the_kernels_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        kernel_check._sources.cache_clear()
        return kernel_check._sources()

    ours = digest()
    names = [file.name for file in kernel_check._files(kernel_check.kernels.__path__)]
    assert names.count("kernel.py") >= 7 and "tiles.py" in names
    for name in ("a.py", "decode/kernel.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("1")
    with monkeypatch.context() as patched:
        patched.setattr(kernel_check.kernels, "__path__", [str(tmp_path)])
        one = digest()
        (tmp_path / "decode" / "kernel.py").write_text("2")
        other = digest()
    kernel_check._sources.cache_clear()
    assert len({ours, one, other}) == 3


# ------------------------------------------------------------------------------------------------- choice of tokens


@pytest.mark.parametrize("vocabulary", [2, 96, 1000])
def test_a_choice_that_is_right_passes(vocabulary: int) -> None:
    check_choice(vocabulary, CPU)


def spoilt(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(sampling, name)
        monkeypatch.setattr(sampling, name, lambda *given: spoil(right(*given)))

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        spoilt("_tokens_at", lambda tokens: tokens + 1),
        spoilt("_probabilities", lambda found: found.roll(1, 1)),
        spoilt("_probabilities", lambda found: found.clamp(min=1e-4)),  # what was left out gets a share
        spoilt("_moved", lambda moved: moved * 0.99 if moved.is_floating_point() else moved),
    ],
)
def test_a_choice_that_is_wrong_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Wrong, match=r"choice of tokens, .*: token \d+ instead of \d+"):
        check_choice(1000, CPU)


def test_a_choice_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_check.choose_all
    monkeypatch.setattr(
        kernel_check,
        "choose_all",
        lambda *given: [choice._replace(failure="") for choice in right(*given)],
    )
    with pytest.raises(Wrong, match="NaN is no failure"):
        check_choice(96, CPU)
