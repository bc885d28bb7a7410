"""A model whose memory the host cannot read: on torch's "meta" device, where nothing is computed. What mixes memory of
the host and of the card fails there as on a GPU, and so does every number that the host reads back; kernels are
launched with nothing but what lies on the card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvstore.gpu_worker import sampling
from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import Geometry
from kvstore.gpu_worker.loader import Load
from kvstore.gpu_worker.positions import Positions
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import GREEDY, Sampler, Sampling, choose_all
from kvstore.kernels import arguments, rotate
from kvstore.kernels.stretches import Stretch

from ...small_models import tiny_llama

triton = pytest.importorskip("triton", reason="Triton is not installed: what would be launched is not seen")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process"
)
CARD = torch.device("meta")
SIZE = 16
Launch = tuple[str, set[torch.device]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """(kernel, where its tensors are) of all launches."""
    found: list[Launch] = []

    def run(kernel: Any, *given: Any, grid: object, warmup: bool, **more: Any) -> None:
        tensors = [each for each in (*given, *more.values()) if isinstance(each, torch.Tensor)]
        found.append((kernel.fn.__module__.removeprefix("kvstore."), {each.device for each in tensors}))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setitem(arguments.DTYPES, "meta", arguments.DTYPES["cuda"])
    monkeypatch.setattr(rotate, "DEVICES", ("cpu", "meta"))
    # All of this memory begins at 0
    for module in (arguments, rotate):
        monkeypatch.setattr(module, "check_elsewhere", lambda *given, **others: None)
    return found


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_llama(torch.bfloat16, layers=3)
        self.positions = Positions.of(model)  # read once, when a model is there
        monkeypatch.setattr(Forward, "_positions_of", lambda forward, model: self.positions)
        self.pool = HbmPool(Geometry.of(model, SIZE), 48, device=CARD)
        self.forward = Forward(model.to(CARD), self.pool, sequences_max=4, tokens_max=768, share=True)
        self.forward.warm_up()
        self.rows = 0

    def request(self, tokens: int, **settings: Any) -> Request:
        request = Request(
            self.rows, [1] * tokens, 1000, frozenset(), Sampler(GREEDY), row=self.rows, **settings
        )
        self.rows += 1
        return request

    def compute(self, *requests: Request, one_more: bool = False) -> None:
        for request in requests:
            request.tokens += [1] * one_more
            request.chunks += self.pool.take(-(-len(request.tokens) // SIZE) - len(request.chunks)) or []
        logits = self.forward({request: request.missing for request in requests})
        assert {each.device for each in logits.values()} == {CARD}
        for request in requests:
            request.computed = len(request.tokens)

    def stretches(self, *deltas: int) -> dict[str, Any]:
        held = self.pool.take(len(deltas)) or []
        seen = [Stretch(chunk, 0, SIZE, delta) for chunk, delta in zip(held, deltas, strict=True)]
        return {"held": held, "stretches": seen, "jumps": [(0, 100)]}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, launched: list[Launch]) -> Machine:
    made = Machine(monkeypatch)
    assert {name.split(".")[1] for name, _ in launched} >= {"decode", "prefill", "stretches", "write"}, "warm"
    launched.clear()
    return made


@pytest.fixture(autouse=True)
def nothing_of_the_hosts_is_launched(launched: list[Launch]) -> Iterator[None]:
    yield
    assert not [each for each in launched if each[1] != {CARD}]


def test_prompts_and_what_decodes(machine: Machine, launched: list[Launch]) -> None:
    first, second = machine.request(40), machine.request(50)
    machine.compute(first, second)
    machine.compute(first, second, one_more=True)
    first.tokens.append(1)
    third = machine.request(30)
    first.chunks += machine.pool.take(1) or []
    machine.compute(first, third)
    assert {name.split(".")[1] for name, _ in launched} == {"decode", "prefill", "write"}


@pytest.mark.parametrize("deltas", [(5, 0), (0, 0)])
def test_stretches(machine: Machine, launched: list[Launch], deltas: tuple[int, ...]) -> None:
    request = machine.request(33, **machine.stretches(*deltas))
    machine.compute(request)
    machine.compute(request, one_more=True)
    assert "kernels.stretches.kernel" in {name for name, _ in launched}


@pytest.mark.parametrize("deltas", [(), (5, 0)])
def test_what_a_prompts_end_attends_to(machine: Machine, deltas: tuple[int, ...]) -> None:
    request = machine.request(40, **machine.stretches(*deltas))
    request.observe = True
    machine.compute(request)
    assert request.observation is not None and request.observation.own is not None
    assert request.observation.own.device == CARD


def test_how_far_values_deviate(machine: Machine) -> None:
    request = machine.request(40)
    machine.compute(request)
    with pytest.raises(
        NotImplementedError, match="Cannot copy out of meta tensor"
    ):  # its result, for the host
        machine.forward.deviations(request, [(0, 16)], [])


class Reads(TorchDispatchMode):
    """How often the host asks for numbers: it gets zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if to_host and args[0].device == CARD:
            self.count += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == CARD:
            self.count += 1
            return 0
        return func(*args, **kwargs)


def test_tokens_of_a_batch_are_chosen_there(machine: Machine) -> None:
    logits = torch.empty((3, 256), device=CARD)
    samplers = [Sampler(each) for each in (GREEDY, Sampling(1.0), Sampling(0.5, 5, 0.9))]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        choose_all(samplers, logits)
    for name in ("_probabilities", "_tokens_at"):
        assert callable(getattr(sampling, name))


def test_the_token_of_one_request_is_chosen_there(machine: Machine) -> None:
    """As samplers of their own kind do, one by one."""
    logits = torch.empty(256, device=CARD)
    for chosen in (Sampling(1.0), Sampling(0.5, 5, 0.9)):
        with Reads() as reads:
            assert Sampler(chosen).choose(logits) == 0
        assert reads.count == 2, "the largest logit, and the token"


def test_keys_are_moved_where_they_are(machine: Machine) -> None:
    keys = torch.empty((2, SIZE, SIZE), dtype=torch.bfloat16, device=CARD)
    load = Load.__new__(Load)
    load._positions, load._moves = machine.positions, {}  # type: ignore[misc]
    moved = rotate.rotate(keys, load._rotation(1, type("Piece", (), {"delta": 5}), CARD))  # type: ignore[arg-type]
    assert moved.device == CARD
