"""What is loaded into a model is noted, whatever becomes of the tensors afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.gpu_worker.connectors import loading
from kvstore.gpu_worker.connectors.loading import Loaded, loaded_into, watch

Weights = list[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Keeps nothing of what it is given."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {f"packed.{name}" for name, tensor in weights if tensor.numel()}


def weights(**changed: torch.Tensor) -> Weights:
    return list({"a": torch.zeros(4), "b": torch.ones(2, 3), **changed}.items())


def digest_of(*loads: Weights) -> bytes:
    model = Model()
    loaded = watch(model, contents=True)
    for each in loads:
        model.load_weights(iter(each))
    assert not loaded.broken and loaded.loads == len(loads)
    return loaded.digest()


def test_every_byte_tells() -> None:
    last = torch.ones(2, 3)
    last[1, 2] += 2**-20
    others = [
        weights(b=last),
        weights(b=torch.ones(3, 2)),
        weights(b=torch.ones(2, 3).view(torch.int32)),
        weights(c=torch.zeros(1)),
        weights()[:1],
        [("b", torch.zeros(4)), ("a", torch.ones(2, 3))],
    ]
    digests = {digest_of(each) for each in others}
    assert len(digests) == len(others) and digest_of(weights()) not in digests
    assert digest_of(weights()) == digest_of(weights()[::-1]), "but not the order"


def test_what_is_loaded_later_takes_its_place() -> None:
    assert digest_of(weights(a=torch.ones(4)), weights()) == digest_of(weights())
    assert digest_of(weights(), weights(a=torch.ones(4))[:1]) == digest_of(weights(a=torch.ones(4)))


class Renamed(torch.nn.Module):
    """Takes weights under their names of before too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.holds: dict[str, float] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        given = {name.removeprefix("old."): float(tensor.sum()) for name, tensor in weights}
        self.holds |= given
        return set(given)


def test_weights_that_have_more_than_one_name() -> None:
    """What the model holds decides, in whatever order and under whatever names it came."""

    def load(*loads: tuple[tuple[str, ...], float]) -> tuple[tuple[tuple[str, float], ...], bytes]:
        model = Renamed()
        loaded = watch(model, contents=True)
        for names, value in loads:
            model.load_weights((name, torch.full((2,), value)) for name in names)
        assert not loaded.broken
        return tuple(sorted(model.holds.items())), loaded.digest()

    new, old = ("a", "b"), ("old.a", "old.b")
    told: dict[bytes, tuple[tuple[str, float], ...]] = {}
    for loads in (
        [(new, 0)],
        [(new, 0), (old, 1)],
        [(new, 0), (old, 1), (new, 0)],
        [(new, 0), (old, 1), (new, 0), (old, 1)],
        [(old, 1), (new, 0)],
        [(old, 1)],
        [(new, 0), (("old.a",), 1)],
        [(new, 0), (("old.a",), 1), (("a",), 0)],
        [(new, 0), (("old.a", "b"), 1)],
        [(("a",), 0), (("old.b",), 0)],
        [(("a",), 0), (("old.b",), 0), (("b",), 1)],
    ):
        holds, digest = load(*loads)
        assert told.setdefault(digest, holds) == holds, loads
    assert load((new, 0), (old, 1)) == load((new, 0), (old, 1)), "replicas with one history share"
    assert load((("a",), 0), (("b",), 0)) == load((new, 0)), "in one load or in two"


def test_the_model_gets_what_it_got_before() -> None:
    model = Model()
    loaded = watch(model, contents=True)
    assert watch(model, contents=True) is loaded is loaded_into(model)
    assert model.load_weights(weights=weights()) == {"packed.a", "packed.b"} == loaded.filled


def test_loading_that_fails_leaves_contents_that_nobody_knows() -> None:
    model = Model()
    loaded = watch(model, contents=True)
    model.load_weights(weights())

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        model.load_weights(torn())
    assert loaded.broken
    model.load_weights(weights()[:1])
    assert loaded.broken, "a part may still be the torn one's"
    model.load_weights(weights())
    assert not loaded.broken and loaded.digest() == digest_of(weights())


def test_without_contents_loads_are_counted() -> None:
    model = Model()
    loaded = watch(model, contents=False)
    model.load_weights(weights())
    assert (loaded.loads, loaded.digest()) == (1, Loaded(contents=True).digest())


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's, as far as the plug-in knows it."""

    class BaseModelLoader:
        def create_model(self, vllm_config: Any, model_config: Any = None, prefix: str = "") -> Model:
            return Model()

    base = ModuleType("vllm.model_executor.model_loader.base_loader")
    base.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return BaseModelLoader


def config(connector: str, device: str = "cpu", quantization: str | None = None) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_module_path=connector),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(quantization=quantization),
    )


def test_the_plugin_looks_at_models_that_use_the_store(loader: type) -> None:
    loading.register()
    once = loader.create_model
    loading.register()
    assert loader.create_model is once
    ours = "kvstore.gpu_worker.connectors.vllm"
    for connector, device, quantization, contents in (
        (ours, "cpu", None, True),
        (ours, "cuda", None, False),
        (ours, "cuda", "gptq", True),
        ("other", "cpu", None, None),
    ):
        given = config(connector, device, quantization)
        model = loader().create_model(vllm_config=given, model_config=None)
        loaded = loaded_into(model)
        assert (loaded is not None) is (contents is not None)
        if loaded is not None:
            model.load_weights(weights())
            assert (loaded.digest() != Loaded(contents=True).digest()) is contents


def test_another_vllm_goes_on_without_it(loader: type, caplog: pytest.LogCaptureFixture) -> None:
    del loader.create_model
    loading.register()
    assert "does not show what it loads" in caplog.text
