"""How fast rotate, gather and scatter are, beside a copy of the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from gpu.section import Row, Section, Steps
from kvstore.kernels.pages import BlockTable, gather, scatter
from kvstore.kernels.rotate import rotate, rotation


class Copies(Section):
    """Between a pool and slices."""

    def steps(self) -> Steps:
        for dtype in self.dtypes():
            yield (
                f"rotate, gather, scatter: {dtype}".replace("torch.", ""),
                lambda dtype=dtype: self.copying(dtype),
            )

    def copying(self, dtype: torch.dtype) -> Row:
        """GB/s, read and written bytes together, and as share of a copy of the same bytes by torch."""
        on, kv_heads, block_tokens = self.on, max(1, self.on.heads // 4), 16
        chunks, blocks = on.copied_tokens // on.chunk, on.copied_tokens // block_tokens
        slices = self.randn(1, chunks, 2, kv_heads, on.chunk, on.head_dim).to(dtype)
        pool = torch.empty(blocks, 2, kv_heads, block_tokens, on.head_dim, dtype=dtype, device=on.device)
        keys, values = pool.unbind(1)
        numbers = random.Random(1).sample(range(blocks), blocks)
        table = BlockTable.of(
            numbers, blocks=blocks, block_tokens=block_tokens, chunk_tokens=on.chunk, device=on.device
        )
        inv_freq = 1 / 10000 ** (torch.arange(0, on.head_dim, 2, dtype=torch.float64) / on.head_dim)
        by = rotation(1000, inv_freq, device=on.device)
        other = torch.empty_like(slices)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (slices.nbytes, lambda: other.copy_(slices)),
            "scatter": (slices.nbytes, lambda: scatter(keys, values, table, slices)),
            "scatter_rotated": (slices.nbytes, lambda: scatter(keys, values, table, slices, by=by)),
            "gather": (slices.nbytes, lambda: gather(keys, values, table, other)),
            "rotate": (slices.nbytes // 2, lambda: rotate(slices[:, 0], by, out=other[:, 0])),
        }
        row: Row = {"bytes": slices.nbytes}
        speeds = {name: 2 * size / self.seconds(self.captured(call)) for name, (size, call) in calls.items()}
        for name, speed in speeds.items():
            row[f"{name}_gb_per_s"] = round(speed / 1e9, 1)
            row[f"{name}_of_copy"] = round(speed / speeds["copy"], 3)
        return row
