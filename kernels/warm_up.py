"""Launches each attention kernel once for everything that a model's serving compiles it for, so that no step waits for
a compiler later, and graphs can be captured: a kernel cannot be compiled while one is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvstore.kernels.forest import Forest
from kvstore.kernels.launch import card_of, rows_max
from kvstore.kernels.stretches import Stretch
from kvstore.kernels.write import NOWHERE, Slots, write_kv

ROWS = (16, 32, 64, 128)


def warm_up(
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    heads: int,
    split_tokens: int,
    tile_sequences: int,
    soft_caps: Iterable[float | None] = (None,),
    stretches: bool = True,
) -> None:
    """`keys`, `values`: of one layer of the pool, [chunks, kv_heads, chunk_tokens, head_dim], whose first chunk is read
    and not written. `split_tokens`, `tile_sequences`: of the forest that decodes. `stretches`: whether sequences may
    see some."""
    # On a CPU, where tests look at what would be launched
    from kvstore.kernels.decode import kernel as decode
    from kvstore.kernels.prefill import kernel as prefill

    pool_chunks, kv_heads, chunk_tokens, head_dim = keys.shape
    group, scale = heads // kv_heads, head_dim**-0.5
    most = rows_max(head_dim, most=ROWS[-1], card=card_of(keys.device))
    forest = Forest(
        chunk_tokens=chunk_tokens,
        chunks=pool_chunks,
        sequences_max=2,
        split_tokens=split_tokens,
        tile_sequences=tile_sequences,
        share=False,  # its one sequence has the same chunk many times
        device=keys.device,
    )
    tokens = -(-max(most, split_tokens + 1) // chunk_tokens) * chunk_tokens
    zeros = keys.new_zeros((most, heads, head_dim))
    new = keys.new_zeros((1, kv_heads, head_dim))
    slots = Slots.of([NOWHERE], [0], pool_chunks=pool_chunks, chunk_tokens=chunk_tokens, device=keys.device)
    if keys.device.type == "cpu":
        from kvstore.kernels.write import kernel as write

        write.write(keys, values, slots, new, new)
    else:
        write_kv(keys, values, slots, new, new)
    for seen in ((), (Stretch(0, 0, 1),)) if stretches else ((),):
        forest.join(0, [0] * (tokens // chunk_tokens), tokens, seen)
        plan = forest.plan()
        q = zeros[:2].clone()
        turned = None if plan.stretches is None else plan.stretches.turn(q, None)
        for cap in soft_caps:
            decode.decode(
                q, keys, values, plan, scale=scale, soft_cap=cap, out=torch.empty_like(q), turned=turned
            )
        for rows in ROWS:
            if rows > most:
                break
            # As many queries as make tiles of so many rows, cut along the tokens so that results are merged
            queries = max(1, rows // group)
            work = forest.prefill({0: queries}, tile_queries=queries, split_tokens=split_tokens)
            q = zeros[:queries].clone()
            turned = None if work.stretches is None else work.stretches.turn(q, None)
            for cap in soft_caps:
                prefill.prefill(
                    q, keys, values, work, scale=scale, soft_cap=cap, out=torch.empty_like(q), turned=turned
                )
        forest.leave(0)
