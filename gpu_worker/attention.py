"""Attention of a Hugging Face model straight from the paged pool, through transformers' own `AttentionInterface`.

A forward call has no batch: the new tokens of all sequences stand one after the other, [1, tokens], those that decode
first, then the pieces of prompts. Projections and everything between the layers do not care whose token is whose; the
function here does. In each layer it writes the new K and V into the pool and attends from there; no cache object holds
KV, and nothing is copied together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvstore.errors import Unsupported
from kvstore.gpu_worker.layout import check_supported
from kvstore.gpu_worker.masses import Observation
from kvstore.gpu_worker.positions import Positions
from kvstore.kernels.arguments import DTYPES
from kvstore.kernels.decode import decode_attention
from kvstore.kernels.forest import Plan
from kvstore.kernels.prefill import PrefillPlan, prefill_attention
from kvstore.kernels.stretches import StretchPlan
from kvstore.kernels.write import Slots, write_kv

NAME = "kvstore_paged"
"""What the model's config calls this attention."""


class Layers(Protocol):
    """Whoever loads KV that attention reads, and saves what it writes."""

    def begin(self, layer: int) -> None:
        """Attention of that layer comes next."""

    def end(self, layer: int) -> None:
        """It has written its KV."""


@dataclass(frozen=True, slots=True)
class Step:
    """What attention has to know of one forward call, the same in all layers."""

    layers: list[torch.Tensor]
    """The pool, of each layer [chunks, 2, kv_heads, chunk_tokens, head_dim]."""
    slots: Slots
    """Where the KV of each new token goes."""
    rows: torch.Tensor
    """[decoding] int64: the row, in the decode plan, of each of the tokens that come first."""
    lines: torch.Tensor
    """[sequences_max] int64: which of those tokens each row of the decode plan has; any, where it has none."""
    decode: Plan | None
    prefill: PrefillPlan | None
    """Of the tokens after those."""
    watch: Layers | None = None
    positions: Positions | None = None
    """What keys are moved by, where sequences see some that stand elsewhere than they were computed."""
    observed: Sequence[Observation] = ()
    """Of whom it is recorded what the last tokens attend to."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`q` [tokens, heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim] -> like `q`."""
        keys, values = self.layers[layer].unbind(1)
        if {q.dtype, k.dtype, v.dtype} != {
            keys.dtype
        }:  # autocast, or the model's new type: nothing is shared
            found = self.attend(layer, q.to(keys.dtype), k.to(keys.dtype), v.to(keys.dtype), scale)
            return found.to(q.dtype)
        write_kv(keys, values, self.slots, k, v)
        for one in self.observed:
            one.look(layer, q, keys, scale, self.positions)
        decoded = q[:0]
        if self.decode is not None:
            by_row = q.index_select(0, self.lines)
            turned = self._turned(layer, by_row, self.decode.stretches)
            found = decode_attention(by_row, keys, values, self.decode, scale=scale, turned=turned)
            decoded = found.index_select(0, self.rows)
        if self.prefill is None:
            return decoded
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decoding = len(decoded)
        out[:decoding] = decoded
        new = q[decoding:]
        turned = self._turned(layer, new, self.prefill.stretches)
        prefill_attention(new, keys, values, self.prefill, scale=scale, out=out[decoding:], turned=turned)
        return out

    def _turned(self, layer: int, q: torch.Tensor, plan: StretchPlan | None) -> torch.Tensor | None:
        """The queries for stretches: turned, not their keys, which stay as they were stored."""
        if plan is None:
            return None
        if self.positions is None:
            return plan.turn(q, None)
        return plan.turn(q, self.positions.inv_freq[layer], interleaved=self.positions.interleaved)


class Seen(Exception):
    """No error: a probe has what it wanted, and the rest of the model is not computed."""


@dataclass(frozen=True, slots=True)
class Probe(Step):
    """Looks how far the values that a request has in the second layer are from those that it computes now. In the first
    layer, whose KV depends on a token and its position alone, it writes only what is not there."""

    absent: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Which of the tokens have no KV yet, as lines of q."""
    deviations: list[torch.Tensor] = field(default_factory=list)
    """Of each token, float32, once it is seen: squares of differences, summed over heads and their dimensions."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self.layers[layer].unbind(1)
        if layer == 1:
            there = values[self.slots.chunks, :, self.slots.places]
            self.deviations.append((v.to(there.dtype).float() - there.float()).square().sum((1, 2)))
            raise Seen
        chunks, places = self.slots.chunks[self.absent], self.slots.places[self.absent]
        keys[chunks, :, places] = k[self.absent].to(keys.dtype)
        values[chunks, :, places] = v[self.absent].to(keys.dtype)
        assert self.prefill is not None
        return prefill_attention(q.to(keys.dtype), keys, values, self.prefill, scale=scale).to(q.dtype)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: Step | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: `query` [1, heads, tokens, head_dim], `key` and `value` [1, kv_heads, tokens, head_dim]
    -> [1, tokens, heads, head_dim]."""
    if step is None:
        raise RuntimeError(
            f"{NAME} is the attention of a batching engine, which says what is where: for anything else, call "
            'model.set_attn_implementation("sdpa")'
        )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if q.stride(2) != 1:  # of a layer that was computed the other way round (linear.py)
        q = q.contiguous()
    if step.watch is not None:
        step.watch.begin(module.layer_idx)
    out = step.attend(module.layer_idx, q, k, v, scaling).unsqueeze(0)
    if step.watch is not None:
        step.watch.end(module.layer_idx)
    return out, None


AttentionInterface.register(NAME, paged_attention)


@contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile the model's attention is `paged_attention`, and after it what it was."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def check_pageable(model: PreTrainedModel) -> None:
    """Raises Unsupported, naming the field, for a model whose attention the kernels do not compute."""
    check_supported(model)
    allowed = DTYPES.get(model.device.type, ())
    if model.dtype not in allowed:
        raise Unsupported(
            f"attention kernels on {model.device.type} do not compute in this",
            field="model.dtype",
            value=model.dtype,
            remedy="supported: " + (", ".join(map(str, allowed)) or "a model on a CPU or on a CUDA device"),
        )
    cache = getattr(model.generation_config, "cache_implementation", None)
    if cache not in (None, "dynamic"):
        raise Unsupported(
            "KV lies in the paged pool as it is, in no other kind of cache",
            field="generation_config.cache_implementation",
            value=cache,
            remedy="set it to None",
        )
