"""Products the other way round are the same products, and a model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvstore.gpu_worker import linear
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.linear import ROWS_MAX, turnable, turned

from .conftest import tiny_llama

WIDE, NARROW = 96, 40


def layer(*, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDE, NARROW, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "shape", [(0,), (1,), (2,), (1, 16), (3, 5), (2, 1, 4), (ROWS_MAX,), (ROWS_MAX + 1,)], ids=str
)
def test_the_result_is_that_of_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    one = layer(bias=bias)
    x = torch.randn(*shape, WIDE, dtype=torch.float64)
    expected = nn.functional.linear(x, one.weight.double(), one.bias.double() if bias else None)
    with turned([one]):
        got = one(x.float())
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_need_not_lie_side_by_side() -> None:
    one = layer(bias=True)
    x = torch.randn(1, WIDE, 12).transpose(1, 2)
    with turned([one]):
        got = one(x)
    torch.testing.assert_close(got, one(x.contiguous()), rtol=1e-5, atol=1e-5)


def test_few_rows_are_turned_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(bias=False)
    turns: list[int] = []
    product = torch.mm

    def counted(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        turns.append(columns.shape[1])
        return product(weight, columns)

    monkeypatch.setattr(linear.torch, "mm", counted)
    for rows in (1, 2, ROWS_MAX, ROWS_MAX + 1):
        with turned([one]):
            one(torch.randn(rows, WIDE))
        one(torch.randn(rows, WIDE))
    assert turns == [2, ROWS_MAX]


def test_what_is_not_a_plain_layer_of_float32_is_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    replaced = layer(bias=False)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    plain = layer(bias=True)
    model = nn.Sequential(
        plain, Adapted(WIDE, NARROW), replaced, layer(bias=True).bfloat16(), layer(bias=False).double()
    )
    assert turnable(model) == [plain]


def test_hooks_are_called_and_a_failure_leaves_the_layer_as_it_was() -> None:
    one = layer(bias=True)
    seen: list[torch.Size] = []
    one.register_forward_hook(lambda _, __, out: seen.append(out.shape))
    with turned([one]):
        one(torch.randn(4, WIDE))
    with pytest.raises(RuntimeError, match="shape"), turned([one]):
        one(torch.randn(4, WIDE + 1))
    assert seen == [torch.Size([4, NARROW])]
    assert "forward" not in one.__dict__


def test_the_engine_turns_them_in_its_steps_and_only_there() -> None:
    model = tiny_llama(layers=2)
    layers = turnable(model)
    assert len(layers) == 2 * 7 + 1
    during: list[bool] = []
    for one in layers:
        one.register_forward_pre_hook(lambda one, _: during.append("forward" in one.__dict__))
    engine = BatchEngine(model, pool_chunks=8)
    for start in range(2):
        engine.add(range(start, 70 + start), 3)
    assert len(list(engine.run())) == 6
    assert during
    assert all(during)
    assert not any("forward" in one.__dict__ for one in layers)
