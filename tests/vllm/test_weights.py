"""Weights and adapters of a real engine that changed: its answer is that of an engine without a store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .conftest import Daemon, Engine, make_model, prompt, whole_blocks

TOKENS = prompt(1, 200)
CACHED = whole_blocks(TOKENS)
Launch = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(folder / "weights", dram_bytes=64 << 20)
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """Another model of the same shape."""
    return make_model(folder / "other", seed=7)


@pytest.fixture(scope="module")
def truth(launch_engine: Launch, model: Path) -> Engine:
    """Has no store, and is given the weights and adapters in question."""
    return launch_engine("truth", None, enable_lora=True, max_lora_rank=8)


def reload(engine: Engine, path: Path) -> None:
    assert engine.ask(rpc="reload_weights", kwargs={"weights_path": str(path)})["called"]


def replace_file(target: Path, source: Path) -> None:
    """Other contents, of the same size, under the same name, of the same time of modification."""
    status = target.stat()
    assert status.st_size == source.stat().st_size
    target.unlink()
    shutil.copyfile(source, target)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def says(engine: Engine, cached: int, **more: Any) -> dict[str, Any]:
    """Its answer, of which so many tokens were not computed."""
    engine.forget()
    (output,) = engine.generate(TOKENS, **more)
    assert output["cached"] == cached
    return output


def truth_says(truth: Engine, path: Path, **more: Any) -> dict[str, Any]:
    reload(truth, path)
    assert truth.ask(forget=True)["forgotten"]
    return truth.generate(TOKENS, **more)[0]


def equal(one: dict[str, Any], another: dict[str, Any]) -> None:
    """But for rounding: what was restored was computed in other company."""
    assert one["tokens"] == another["tokens"]
    assert one["logprobs"] == pytest.approx(another["logprobs"], abs=1e-4)


def test_weights_are_those_that_were_loaded(
    daemon: Daemon, launch_engine: Launch, folder: Path, model: Path, other: Path, truth: Engine
) -> None:
    mine, its = truth_says(truth, model), truth_says(truth, other)
    assert mine["tokens"] != its["tokens"], "they can be told apart"
    place = folder / "place"
    shutil.copytree(model, place, copy_function=shutil.copy2)
    first = launch_engine("weights-first", daemon.run_dir, model=str(place))
    replace_file(place / "model.safetensors", other / "model.safetensors")
    equal(says(first, 0), mine)

    second = launch_engine("weights-second", daemon.run_dir, model=str(place))
    equal(says(second, 0), its)
    equal(says(second, CACHED), its)

    # Through vLLM's call, in the living engine, to weights whose KV somebody has saved.
    reload(second, model)
    equal(says(second, CACHED), mine)
    reload(second, other)
    equal(says(second, CACHED), its)

    # By a program that reaches into the model.
    for counted in (True, False):
        for engine in (first, truth):
            assert engine.ask(scale=1.5, counted=counted)["scaled"]
        if not counted:
            assert first.ask(verify=True)["verified"]
        assert truth.ask(forget=True)["forgotten"]
        first.ask(forget=True)
        scaled = first.generate(TOKENS)[0]
        assert scaled["cached"] == 0
        if counted:
            reload(truth, model)
            truth.ask(scale=1.5, counted=True)
        equal(scaled, truth.generate(TOKENS)[0])
    assert first.end() == second.end() == 0


def make_adapter(path: Path, seed: int) -> Path:
    path.mkdir(exist_ok=True)
    described = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(described))
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(4, 256) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 4) * 0.1
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_adapters_are_those_that_were_loaded(
    daemon: Daemon, launch_engine: Launch, folder: Path, model: Path, truth: Engine
) -> None:
    one, two = make_adapter(folder / "one", 1), make_adapter(folder / "two", 2)
    place = folder / "adapter"
    shutil.copytree(one, place, copy_function=shutil.copy2)

    def lora(number: int, path: Path, **more: Any) -> dict[str, Any]:
        return {"name": path.name, "id": number, "path": str(path), **more}

    with_one = truth_says(truth, model, lora=lora(1, one))
    with_two = truth_says(truth, model, lora=lora(2, two))
    assert with_one["tokens"] != with_two["tokens"], "they can be told apart"

    options = {"enable_lora": True, "max_lora_rank": 8}
    mine = lora(5, place)
    first = launch_engine("adapters-first", daemon.run_dir, **options)
    equal(says(first, 0, lora=mine), with_one)
    replace_file(place / "adapter_model.safetensors", two / "adapter_model.safetensors")
    equal(
        says(first, CACHED, lora=mine), with_one
    )  # it holds the one before, which does not lie there any more

    second = launch_engine("adapters-second", daemon.run_dir, **options)
    equal(says(second, 0, lora=mine), with_two)
    equal(says(second, CACHED, lora=mine), with_two)

    # Replaced in the living engine, under its id, name and path.
    assert first.ask(lora={**mine, "inplace": True})["loaded"]
    first.forget()
    first.generate(prompt(3, 40))  # the scheduler's side hears of it with a step
    equal(says(first, CACHED, lora=mine), with_two)
    # The id for another adapter.
    equal(says(first, 0, lora={**lora(5, one), "inplace": True}), with_one)
    assert first.end() == second.end() == 0
