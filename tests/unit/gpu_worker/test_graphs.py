"""Decoding steps that are captured and replayed: the same answers, whatever changed between two replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.gpu_worker import graphs
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.truncation import Truncation
from kvstore.kernels import forest

from .conftest import FakeStore, text, tiny_llama
from .emulated import EmulatedDevice, Trusting
from .test_truncation import Chat

T = 16
Make = Callable[..., BatchEngine]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=2)


def pair(engines: Make, model: LlamaForCausalLM, **options: Any) -> tuple[BatchEngine, BatchEngine]:
    """One that computes each step anew, and one with graphs."""
    settings = {"chunk_tokens": T, "pool_chunks": 64, "sequences_max": 4} | options
    return (
        engines(model, None, **settings),
        engines(model, None, device=EmulatedDevice(late_s=0), verdicts=Trusting(), **settings),
    )


def played(engine: BatchEngine) -> list[tuple[int, int, float]]:
    """Requests that come and go, share prefixes, and are aborted: each token, and how clear it was."""
    common = text(40, seed=5)
    arrivals = {
        0: [([*common, *text(9, seed=1)], 30), ([*common, *text(20, seed=2)], 12)],
        4: [(text(70, seed=3), 25)],
        9: [([*common, *text(9, seed=1), 7], 20), (text(5, seed=4), 40), (text(30, seed=6), 9)],
    }
    found, step = [], 0
    while engine.live or step <= max(arrivals):
        numbers = [engine.add(prompt, answer) for prompt, answer in arrivals.get(step, ())]
        if step == 9:
            engine.abort(numbers[0])
        found += [(one.request, one.token, round(one.gap, 4)) for one in engine.step()]
        engine.check_integrity()
        step += 1
    return found


@pytest.mark.parametrize("least", [1, 64])
def test_replays_give_the_same_tokens(
    model: LlamaForCausalLM, engines: Make, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """`least` 1: room for what a step has, so that each item more is another graph."""
    monkeypatch.setattr(forest, "CAPACITY_MIN", least)
    eager, replaying = pair(engines, model)
    assert eager._forward.graphs is None, "a CPU has nothing to gain from them"
    assert played(replaying) == played(eager)
    device = replaying._forward.graphs._device  # type: ignore[union-attr]
    assert not device.races and device.pageable == 0, "a plan, or a graph's input, was copied in passing"
    counters = replaying._forward.graphs.counters  # type: ignore[union-attr]
    assert counters["replayed"] > 3 * counters["captured"] > 3 and counters["eager"] > 0, counters


def test_a_model_that_changed_is_captured_anew(model: LlamaForCausalLM, engines: Make) -> None:
    """In place, and by other tensors: the old ones would be read, or what lies there now."""
    eager, replaying = pair(engines, model)
    for change in ("in place", "elsewhere"):
        for engine in (eager, replaying):
            engine.turn("", text(30), 12)
        with torch.no_grad():
            for parameter in model.model.layers[1].mlp.parameters():
                if change == "in place":
                    parameter.mul_(1.5)
                else:
                    parameter.data = parameter.data * 0.7
        eager.reset(), replaying.reset()
        assert replaying.turn("", text(30), 12).tokens == eager.turn("", text(30), 12).tokens
    assert replaying._forward.graphs.counters["dropped"] >= 2  # type: ignore[union-attr]


def test_weights_that_lie_elsewhere_are_read_there(model: LlamaForCausalLM, engines: Make) -> None:
    """The same numbers in other memory: nothing is to be computed again, but a graph has the old address."""
    _, replaying = pair(engines, model)
    wanted = replaying.turn("", text(30), 12).tokens
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old.clone()
        old.fill_(float("nan"))  # as freed memory is
    assert replaying.turn("", text(30), 12).tokens == wanted


def test_a_layer_in_the_place_of_another_is_computed(model: LlamaForCausalLM, engines: Make) -> None:
    """It has the same numbers, so nothing is computed again; the one before has none any more."""
    _, replaying = pair(engines, model)
    wanted = replaying.turn("", text(30), 12).tokens
    before = model.model.layers[1].mlp
    model.model.layers[1].mlp = copy.deepcopy(before)
    for parameter in before.parameters():
        parameter.data.fill_(float("nan"))
    assert replaying.turn("", text(30), 12).tokens == wanted


def test_what_a_hook_does_in_python_is_done_in_each_step(model: LlamaForCausalLM, engines: Make) -> None:
    """A replay runs no Python: of a model with hooks that nobody knows nothing is captured."""
    eager, replaying = pair(engines, model)
    replaying.turn("", text(30), 12)
    captured = replaying._forward.graphs.counters["captured"]  # type: ignore[union-attr]
    calls: list[float] = []

    def steer(module: object, args: object, out: torch.Tensor) -> torch.Tensor:
        calls.append(1.0)
        return out * (1 + len(calls) % 7)

    found = []
    hook = model.model.layers[0].mlp.register_forward_hook(steer)
    for engine in (eager, replaying):
        calls.clear()
        found.append(engine.turn("", text(30), 24).tokens)
        assert len(calls) == 24 and engine.refusal
    assert found[0] == found[1]
    counters = replaying._forward.graphs.counters  # type: ignore[union-attr]
    assert counters["captured"] == captured > 0
    _, from_the_start = pair(engines, model)
    calls.clear()
    assert from_the_start.turn("", text(30), 24).tokens == found[0] and len(calls) == 24
    hook.remove()
    replaying.turn("", text(30), 12)
    assert counters["captured"] > captured


def test_a_model_that_cannot_be_captured_is_computed_as_before(
    model: LlamaForCausalLM, engines: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that asks the device for a number: on a GPU, an error of each capture. It is tried once."""
    eager, replaying = pair(engines, model)
    asked: list[object] = []

    def refuse(work: object) -> None:
        asked.append(work)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(replaying._forward.graphs._device, "capture", refuse)  # type: ignore[union-attr]
    assert played(replaying) == played(eager)
    counters = replaying._forward.graphs.counters  # type: ignore[union-attr]
    assert (
        len(asked) == counters["refused"] == 1
        and counters["replayed"] == 0
        and "not permitted" in caplog.text
    )
    replaying.reset()
    replaying._forward.renew(explained=True)  # by then it may be another
    replaying.turn("", text(30), 12)
    assert len(asked) == 2


def test_what_sees_stretches_is_not_captured(model: LlamaForCausalLM, engines: Make) -> None:
    """Their plans have new arrays each time."""
    settings = Truncation(window=256)
    eager, replaying = pair(engines, model, pool_chunks=128, retain=True, truncation=settings)
    chats = [Chat(engine) for engine in (eager, replaying)]
    for number in range(12):
        mine, theirs = (chat.turn(number) for chat in chats)
        assert mine.tokens == theirs.tokens
    assert theirs.cut_tokens > 0 and eager.counters["truncations_recomputed"] == 0


def test_beside_loads_and_saves_on_a_device_that_runs_late(
    model: LlamaForCausalLM, store: FakeStore, engines: Make
) -> None:
    prompts = [[*text(64, seed=9), *text(20, seed=number)] for number in range(3)]
    options: dict[str, Any] = {"chunk_tokens": T, "pool_chunks": 48, "read_buffer": 0}
    plain = engines(model, None, chunk_tokens=T, pool_chunks=48)
    wanted = [plain.turn("", prompt, 40).tokens for prompt in prompts]
    writer = engines(model, store, **options)
    writer.turn("", prompts[0], 1)
    assert writer.flush(30)
    device = EmulatedDevice()
    engine = engines(model, store, device=device, verdicts=Trusting(), **options)
    numbers = [engine.add(prompt, 40) for prompt in prompts]
    got: dict[int, list[int]] = {number: [] for number in numbers}
    for output in engine.run():
        got[output.request].append(output.token)
    assert [tuple(got[number]) for number in numbers] == wanted
    assert engine.flush(30) and not device.races and engine.counters["restored_tokens"] > 0
    assert engine._forward.graphs.counters["replayed"] > 10  # type: ignore[union-attr]
    again = engines(model, store, **options)
    done = again.turn("", [*prompts[1], *wanted[1]], 1)
    assert done.reused.dram >= (len(prompts[1]) + 32) // T * T, "what was replayed is saved like all else"


def test_few_are_kept(model: LlamaForCausalLM, engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GRAPHS_MAX", 2)
    monkeypatch.setattr(forest, "CAPACITY_MIN", 1)
    eager, replaying = pair(engines, model)
    for _ in range(2):
        assert played(replaying) == played(eager)
    assert len(replaying._forward.graphs._captured) <= 2  # type: ignore[union-attr]
