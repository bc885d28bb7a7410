"""Linear layers of a model on a CPU, for the few rows that a step of decoding has.

torch computes `x @ weight.T`, which its BLAS shares out badly among threads when `x` has few rows. The same product the
other way round, `weight @ x.T`, takes 0.5 to 0.9 of the time on two threads, from 2 to 128 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional

ROWS_MAX = 128
"""So far it was measured to win."""


def turnable(model: nn.Module) -> list[nn.Linear]:
    """The layers that are plain `nn.Linear` in float32 on a CPU. A `forward` that was replaced is left alone."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    ]


@contextmanager
def turned(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Meanwhile these compute their products the other way round, where that is faster; to the same precision."""
    try:
        for layer in layers:
            layer.__dict__["forward"] = partial(
                _forward, layer
            )  # past nn.Module, which would look at it for long
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """[.., in] -> [.., out], of which the rows are the last axis in memory: the next layer reads it so, and what is
    between them does not care. A copy would take 4 % of a step."""
    rows = x.numel() // layer.in_features
    if not 2 <= rows <= ROWS_MAX:
        return functional.linear(x, layer.weight, layer.bias)
    columns = x.reshape(rows, -1).t()
    bias = cast("torch.Tensor | None", layer.bias)
    if bias is None:
        out = torch.mm(layer.weight, columns)
    else:
        out = torch.addmm(bias.unsqueeze(1), layer.weight, columns)
    return out.t().view(*x.shape[:-1], -1)
