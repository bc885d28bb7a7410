"""Decoding steps as graphs of the device: captured once for a number of sequences, and replayed with one call.

A step of an engine that only decodes launches the same kernels as the one before, with other numbers in the same
memory. A graph has baked in what it was captured with: addresses, shapes, how many programs are launched. So all that
changes lies in memory of its own (`Inputs`, and the arrays of the forest's plan), which is written before each replay:

    graph for          number of sequences, capacity of the plan (`kernels.forest.Capacity`)
    not captured       steps with pieces of prompts, and with sequences that see stretches: their plans have new arrays;
                       models that cannot be explained, whose hooks no replay would run
    captured anew      once the model was examined again (`identity.py`, before each step): it computes otherwise, or a
                       tensor of it lies elsewhere in memory

A device says whether it can (`Device.captures`): on a CPU there is nothing to be gained.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvstore.gpu_worker.device import Device, Graph
from kvstore.kernels.forest import Capacity, Upload, copy_all

GRAPHS_MAX = 64
"""That are kept, those used last."""
EAGER_RUNS = 2
"""Of a step before it is captured: kernels are compiled and memory is laid out then."""
log = logging.getLogger(__name__)
COLUMNS = ("ids", "positions", "chunks", "places", "rows")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads of its sequences, int64 [sequences] each; `lines` [rows of the plan]. See `attention.Step`."""

    ids: torch.Tensor
    positions: torch.Tensor
    chunks: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    lines: torch.Tensor


@dataclass(slots=True)
class _Captured:
    graph: Graph
    logits: torch.Tensor
    inputs: Inputs


class DecodeGraphs:
    def __init__(
        self, device: Device, memory: torch.device, *, sequences_max: int, upload: Upload | None = None
    ) -> None:
        """`upload`: how inputs get to the device."""
        self._device = device
        self._upload = upload or copy_all
        self._memory = memory
        self._sequences_max = sequences_max
        self._captured: OrderedDict[tuple[int, Capacity], _Captured] = OrderedDict()
        self._runs: Counter[tuple[int, Capacity]] = Counter()
        self.counters: Counter[str] = Counter()
        """captured, replayed, eager, dropped, refused."""
        self._refused = False
        """This model cannot be captured, as it is."""

    def __repr__(self) -> str:
        return f"DecodeGraphs({len(self._captured)} captured)"

    def forget(self) -> None:
        """The model computes otherwise, or a tensor of it lies elsewhere."""
        self.counters["dropped"] += len(self._captured)
        self._refused = False
        self._captured.clear()
        self._runs.clear()

    def run(
        self,
        capacity: Capacity,
        columns: Sequence[Sequence[int]],
        lines: Sequence[int],
        compute: Callable[[Inputs], torch.Tensor],
    ) -> torch.Tensor:
        """The logits [sequences, vocabulary]. `columns`: as `COLUMNS`. `compute` is what is captured: all that it reads
        beside its argument stays where it is until `forget` is called."""
        key = len(columns[0]), capacity
        known = self._captured.get(key)
        if known is None:
            inputs = self._inputs(len(columns[0]))
            self._write(inputs, columns, lines)
            self._runs[key] += 1
            if self._refused or self._runs[key] <= EAGER_RUNS:
                self.counters["eager"] += 1
                return compute(inputs)
            try:
                graph, logits = self._device.capture(lambda: compute(inputs))
            except RuntimeError as error:  # a layer asks the device for a number, or there is no memory left
                log.warning("steps are computed kernel by kernel, as they cannot be captured: %s", error)
                self._refused = True
                self.counters["refused"] += 1
                return compute(inputs)
            known = self._captured[key] = _Captured(graph, logits, inputs)
            self.counters["captured"] += 1
            while len(self._captured) > GRAPHS_MAX:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        self._write(known.inputs, columns, lines)
        known.graph.replay()
        self.counters["replayed"] += 1
        return known.logits.clone()  # the next replay writes there

    def _inputs(self, count: int) -> Inputs:
        def empty(length: int) -> torch.Tensor:
            return torch.empty(length, dtype=torch.long, device=self._memory)

        return Inputs(
            ids=empty(count),
            positions=empty(count),
            chunks=empty(count),
            places=empty(count),
            rows=empty(count),
            lines=empty(self._sequences_max),
        )

    def _write(self, inputs: Inputs, columns: Sequence[Sequence[int]], lines: Sequence[int]) -> None:
        given = (*zip(COLUMNS, columns, strict=True), ("lines", lines))
        self._upload(
            [(getattr(inputs, name), torch.tensor(values, dtype=torch.long)) for name, values in given]
        )
