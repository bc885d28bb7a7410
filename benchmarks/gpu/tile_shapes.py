"""Tile shapes of the attention kernels: each timed in turn, the best ones kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gpu.section import Row, Section, Setting, Steps
from kvstore.kernels import tiles
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.prefill import prefill_attention

DECODE_TILES = [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3)]
PREFILL_TILES = [(32, 8, 4), (64, 8, 2), (64, 8, 3), (64, 4, 2), (128, 8, 2), (32, 4, 4)]


class TileShapes(Section):
    """Of both kernels; the best ones stay in the tables that kernels read."""

    def __init__(self, on: Setting, speeds: dict[str, float]) -> None:
        super().__init__(on, speeds)
        self.best: dict[str, dict[tiles.Key, tiles.Tile]] = {"DECODE": {}, "PREFILL": {}}

    def steps(self) -> Steps:
        on = self.on
        for kv_heads in (on.heads, on.heads // 4):
            for rows in (16, 32, 64):
                yield (
                    f"decode: {rows} rows, {on.heads}/{kv_heads} heads",
                    lambda rows=rows, kv=kv_heads: self.sweep(
                        "DECODE", self.decode_call(kv, rows), DECODE_TILES
                    ),
                )
        for kv_heads in (on.heads, on.heads // 4):
            yield (
                f"prefill: {on.heads}/{kv_heads} heads",
                lambda kv=kv_heads: self.sweep("PREFILL", self.prefill_call(kv), PREFILL_TILES),
            )

    def decode_call(self, kv_heads: int, rows: int) -> tuple[tiles.Key, Callable[[], object]]:
        """Halfway shared: both phases count."""
        on = self.on
        tokens, shared = on.points[0][0], on.points[0][0] // 2
        sequences, chunks = self.sharing(on.batch, tokens, shared)
        pool = self.randn(0, chunks, 2, kv_heads, on.chunk, on.head_dim).to(torch.float16)
        q = self.randn(1, on.batch, on.heads, on.head_dim).to(torch.float16)
        tile = max(1, rows * kv_heads // on.heads)
        plan = self.forest(
            sequences, on.batch, chunks, on.chunk, tile, split_tokens=8 * on.chunk, timed=True
        ).plan()
        keys, values = pool.unbind(1)
        out = torch.empty_like(q)
        return self.key(rows), lambda: decode_attention(q, keys, values, plan, out=out)

    def prefill_call(self, kv_heads: int) -> tuple[tiles.Key, Callable[[], object]]:
        on = self.on
        cached, new = on.points[0][0] // 2, 8 * on.chunk
        q, keys, values, plan, _ = self.prefilling(2, cached, new, kv_heads, torch.float16)
        out = torch.empty_like(q)
        return self.key(self.rows_max(on.head_dim)), lambda: prefill_attention(q, keys, values, plan, out=out)

    def key(self, rows: int) -> tiles.Key:
        return tiles.Key(rows, 1 << (self.on.head_dim - 1).bit_length(), self.on.chunk)

    def sweep(
        self, kind: str, made: tuple[tiles.Key, Callable[[], object]], candidates: list[tuple[int, int, int]]
    ) -> Row:
        """Each candidate in turn in the table that kernels read; the best one stays there."""
        key, call = made
        table: dict[tiles.Key, tiles.Tile] = getattr(tiles, kind)
        before = table.pop(key, None)
        row: Row = {"key": list(key)}
        row["us_by_rule"] = round(1e6 * self.seconds(self.captured(call)), 1)
        best, least = None, row["us_by_rule"]
        for candidate in candidates:
            name = "us_{}_tokens_{}_warps_{}_stages".format(*candidate)
            table[key] = tiles.Tile(*candidate)
            try:
                row[name] = round(1e6 * self.seconds(self.captured(call)), 1)
            except Exception as error:  # what does not fit on this device is no candidate
                row[name.replace("us_", "error_")] = f"{type(error).__name__}: {error}"[:100]
                continue
            if row[name] < 0.98 * least:
                best, least = table[key], row[name]
        table.pop(key)
        if best is None:
            if before is not None:
                table[key] = before
        else:
            # Two shapes of heads may have the same key: the first one decides
            known = self.best[kind].get(key)
            table[key] = self.best[kind][key] = known or best
        return row | {"best": list(best) if best else "by rule"}

    def tiles_module(self) -> str:
        """kernels/tiles.py with what was found."""
        name = torch.cuda.get_device_name() if self.on.real else "no GPU (a dry run)"
        text = Path(tiles.__file__).read_text()
        head, _, _ = text.partition("DECODE: dict")
        first, last = head.index("Written by"), head.index('"""\n\nfrom')
        told = f"Written by `make bench-gpu_check ARGS='--tiles kernels/tiles.py'` on: {name}.\n"
        lines = [head[:first] + told + head[last:]]
        for kind in ("DECODE", "PREFILL"):
            found = {**getattr(tiles, kind), **self.best[kind]}
            entries = "".join(f"    {key!r}: {tile!r},\n" for key, tile in sorted(found.items()))
            lines.append(f"{kind}: dict[Key, Tile] = {{{chr(10) + entries if entries else ''}}}\n")
        return "".join(lines)
