"""Tile shapes of the attention kernels that were measured to be the fastest. Elsewhere a rule of each kernel holds.

Written by `make bench-gpu_check ARGS='--tiles kernels/tiles.py'`; nothing was measured yet.
"""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """What a kernel is compiled for: rows of a tile, head_dim (the power of two above it), tokens of a chunk."""

    rows: int
    head_dim: int
    chunk_tokens: int


class Tile(NamedTuple):
    """Tokens of a step, warps of a program, stages of the pipeline."""

    tokens: int
    warps: int
    stages: int


DECODE: dict[Key, Tile] = {}
PREFILL: dict[Key, Tile] = {}
