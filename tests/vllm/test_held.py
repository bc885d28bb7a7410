"""What a rank's digest covers, without an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvstore.gpu_worker.connectors.loading import watch
from kvstore.gpu_worker.connectors.vllm.held import Held, RankWeights


def held(model: nn.Module) -> Held:
    return Held(SimpleNamespace(get_model=lambda: model, lora_manager=None), None, 0)


def weights_of(model: nn.Module) -> RankWeights:
    return held(model).weights(anew=True)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Quantised(nn.Module):
    """Packs its weights for a kernel, and drops them; those of one whose `scale` is None have none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.spare = nn.Parameter(torch.zeros(1))
        self.kernel: list[torch.Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        given = dict(weights)
        self.kernel = list(given.values())
        return set(given)

    def pack(self, how: str) -> None:
        if how == "none":
            self.register_parameter("weight", None)
        else:
            del self.weight
        del self.spare


def quantised(value: float, *, how: str, contents: bool = True) -> RankWeights:
    model = Quantised()
    watch(model, contents=contents)
    model.load_weights([("weight", torch.full((4,), value)), ("scale", torch.ones(1))])
    model.pack(how)
    return weights_of(model)


@pytest.mark.parametrize("how", ["none", "gone"])
def test_what_quantised_layers_drop_is_what_was_loaded(how: str) -> None:
    one, same, other = (quantised(value, how=how) for value in (1.0, 1.0, 2.0))
    assert one.digest == same.digest != b""
    assert other.digest not in (b"", one.digest)
    unseen = quantised(1.0, how=how, contents=False)
    assert not unseen.digest and "out of sight" in unseen.reason


@pytest.mark.parametrize(("name", "value"), [("attn_temperature_tuning", True), ("scaling", 0.5)])
def test_switches_and_factors_are_part(name: str, value: object) -> None:
    """Llama 4 takes one of them from the longest prompt."""
    digests = []
    for each in (None, value, value):
        model = linear()
        if each is not None:
            setattr(model, name, each)
        digests.append(weights_of(model).digest)
    assert digests[0] != digests[1] == digests[2] != b""


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_are_refused(everywhere: bool) -> None:
    model = linear()
    registers: Callable[..., Any] = (
        nn.modules.module.register_module_forward_hook if everywhere else model.register_forward_hook
    )
    here = held(model)
    assert here.weights(anew=True).digest
    generation = here.check()
    handle = registers(lambda *_: None)
    try:
        assert here.check() > generation, "seen without another digest of all"
        assert "hook" in here.weights(anew=False).reason
    finally:
        handle.remove()
    here.check()
    assert here.weights(anew=False).digest == weights_of(linear()).digest


CODE = """
from torch import nn
class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x) * {factor}
"""


def model_of(file: Path, factor: int) -> nn.Module:
    file.write_text(CODE.format(factor=factor))
    specification = util.spec_from_file_location("brought_along", file)
    assert specification is not None and specification.loader is not None
    sys.modules["brought_along"] = module = util.module_from_spec(specification)
    specification.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.Model(4, 4)
    return model


def test_code_that_is_not_vllms_is_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "brought_along", None)
    one, same, other = (
        weights_of(model_of(tmp_path / f"{place}.py", factor)).digest
        for place, factor in (("a", 1), ("a", 1), ("b", 2))
    )
    assert one == same != b""
    (tmp_path / "c").mkdir()
    moved = weights_of(model_of(tmp_path / "c" / "a.py", 1)).digest
    changed = weights_of(model_of(tmp_path / "c" / "a.py", 2)).digest
    assert one == moved != changed and other != one


def test_another_forward_is_part(tmp_path: Path) -> None:
    model = linear()
    plain = weights_of(model).digest
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert weights_of(model).digest not in (b"", plain)
    space: dict[str, Any] = {}
    exec("def forward(x):\n    return x", space)
    model.forward = space["forward"]  # type: ignore[method-assign]
    assert "code" in weights_of(model).reason
    model.forward = torch.relu  # type: ignore[method-assign]
    assert "forward" in weights_of(model).reason


class Shared(nn.Module):
    """Two modules hold a third one; what is loaded is told under one of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Module()
        self.second.inner = self.first

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.first.weight.data = tensor
        return {"first.weight"}


def test_a_weight_with_two_names_was_loaded_under_one() -> None:
    digests = []
    for value in (1.0, 2.0):
        model = Shared()
        watch(model, contents=True)
        model.load_weights([("first.weight", torch.full((4, 4), value))])
        model.first.weight = nn.Parameter(torch.empty(0))  # packed out of sight
        told = weights_of(model)
        assert told.digest, told.reason
        digests.append(told.digest)
    assert digests[0] != digests[1]


def runner(model: nn.Module, drafter: nn.Module | None) -> SimpleNamespace:
    return SimpleNamespace(
        get_model=lambda: model,
        lora_manager=None,
        drafter=SimpleNamespace(model=drafter) if drafter else None,
    )


def test_the_drafters_weights_are_part() -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"))
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    digests = {
        Held(runner(linear(), each), config, 0).weights(anew=True).digest for each in (one, one, other)
    }
    assert len(digests) == 2 and b"" not in digests
    blind = Held(runner(linear(), None), config, 0).weights(anew=True)
    assert blind.digest == b"" and "drafter" in blind.reason
    config.speculative_config.method = "ngram"
    assert Held(runner(linear(), None), config, 0).weights(anew=True).digest


def test_scales_of_kv_are_told_apart() -> None:
    class Attention(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("_k_scale", torch.tensor(scale))
            self._v_scale_float = 1.0

    def scales(model: nn.Module) -> bytes:
        return held(model).weights(anew=True).scales

    assert scales(Attention(0.5)) == scales(Attention(0.5)) != scales(Attention(0.25))
    other = Attention(0.5)
    other._v_scale_float = 2.0
    assert scales(other) != scales(Attention(0.5))
    assert weights_of(Attention(0.5)).digest != weights_of(Attention(0.25)).digest
