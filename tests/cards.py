"""Tests that also run on a CUDA device, where there is one: `CARD` among the parameters of a fixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

Work = Callable[[], None]
LATE_CYCLES = 2_000_000
"""Of the card's clock: about a millisecond."""
NAN_BYTE = 0xFF
"""All bits set are NaN in every float."""


def on_a_card(*values: Any, id: str = "cuda") -> Any:
    """Parameters that need one; without it they are skipped, and said to be."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.param(*values, marks=[pytest.mark.gpu, missing], id=id)


def card() -> Any:
    """The device that a worker would make; but each work of its streams begins late, as on the emulated device, and KV
    that nobody wrote is NaN: whoever leaves out a wait reads that."""
    from kvstore.gpu_worker.cuda import CudaDevice, CudaStream

    class LateStream(CudaStream):
        def run(self, work: Work, **regions: Any) -> None:
            with torch.cuda.stream(self._this):
                torch.cuda._sleep(LATE_CYCLES)
                work()

    class LateDevice(CudaDevice):
        def stream(self, name: str) -> CudaStream:
            return LateStream(self._device, super().stream(name)._stream)

        def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
            for tensor in tensors:
                tensor.view(torch.uint8).fill_(NAN_BYTE)
            torch.cuda.synchronize(self._device)

    return LateDevice(torch.device("cuda", 0))
