"""What gather and scatter copy, token by token. Both return copies of what they would change."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvstore.kernels.pages import BlockTable
from kvstore.kernels.rotate.naive import naive_rotate


def naive_gather(
    keys: torch.Tensor, values: torch.Tensor, table: BlockTable, slices: torch.Tensor
) -> torch.Tensor:
    """`slices` as `gather` leaves them."""
    slices = slices.clone()
    touched = False
    for chunk, token, block, place in _tokens(table):
        keys_of, values_of = _halves(slices[chunk], table.tokens_of(chunk))
        keys_of[:, token], values_of[:, token] = keys[block, :, place], values[block, :, place]
        touched |= chunk == table.chunks - 1
    if touched:
        used = table.tokens_of(table.chunks - 1)
        slices[-1].view(-1)[2 * slices[-1, 0, :, :used].numel() :] = 0
    return slices


def naive_scatter(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: BlockTable,
    slices: torch.Tensor,
    *,
    deltas: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`keys` and `values` as `scatter` leaves them; where it rotates, keys are computed in their own dtype (which may
    be float64)."""
    keys, values = keys.clone(), values.clone()
    for chunk, token, block, place in _tokens(table):
        keys_of, values_of = _halves(slices[chunk], table.tokens_of(chunk))
        key = keys_of[:, token]
        if deltas is not None and inv_freq is not None:
            delta = deltas.expand(table.chunks, table.chunk_tokens)[chunk, token]
            key = naive_rotate(key, delta, inv_freq, interleaved=interleaved, dtype=keys.dtype)
        keys[block, :, place], values[block, :, place] = key, values_of[:, token]
    return keys, values


def _tokens(table: BlockTable) -> Iterator[tuple[int, int, int, int]]:
    """(chunk, token in it, block, place in it) of each token that is not in a hole."""
    for token in range(table.tokens):
        block = int(table.numbers[token // table.block_tokens])
        if block >= 0:
            yield token // table.chunk_tokens, token % table.chunk_tokens, block, token % table.block_tokens


def _halves(chunk: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a slice that holds so many tokens, [kv_heads, tokens, head_dim] each."""
    _, heads, _, head_dim = chunk.shape
    size = heads * tokens * head_dim
    flat = chunk.view(-1)
    return flat[:size].view(heads, tokens, head_dim), flat[size : 2 * size].view(heads, tokens, head_dim)
