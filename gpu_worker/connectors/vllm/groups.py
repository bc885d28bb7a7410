"""Groups of layers as vLLM caches them: which there are, which cannot be stored, and which ranks hold the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.errors import Unsupported
from kvstore.gpu_worker.connectors.offload import Group

FIELD = "kv_cache_config.kv_cache_groups"
KNOWN = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
"""Exactly these: what derives from one of them keeps its KV in a way of its own."""
PREFIX = (FullAttentionSpec, MLAAttentionSpec)


def groups_of(kv_cache_config: Any, *, blocks_per_chunk: int = 1) -> list[Group]:
    """Raises Unsupported for what cannot be stored, or cannot be right once it is loaded again."""
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise Unsupported(
            "vLLM keeps a part of the KV in host memory itself", field="kv_cache_config.hisparse", value="on"
        )
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = list(_specs(group.kv_cache_spec))
        for spec in specs:
            _check(spec, blocks_per_chunk)
        if len({(_kind(spec), _window(spec)) for spec in specs}) > 1:
            raise Unsupported(
                "layers of different kinds in one group are not supported",
                field=FIELD,
                value=", ".join(sorted({type(spec).__name__ for spec in specs})),
            )
        if not getattr(group, "enable_kv_transfer", True):
            raise Unsupported(
                "a group that vLLM rebuilds after a load is not supported",
                field=FIELD,
                value=type(specs[0]).__name__,
            )
        groups.append(
            Group(
                number,
                _kind(specs[0]),
                len(group.layer_names),
                int(specs[0].block_size),
                _block_bytes(group),
                _window(specs[0]),
                bool(getattr(group, "is_eagle_group", False)),
                int(specs[0].block_size) * blocks_per_chunk,
                int(getattr(specs[0], "extra_retained_tokens", 0)),
            )
        )
    if not groups:
        raise Unsupported("there is no KV to store", field=FIELD, value="none")
    return groups


def _specs(spec: Any) -> Iterator[Any]:
    """One, or one for each layer where those differ in size."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _check(spec: Any, blocks_per_chunk: int) -> None:
    name = type(spec).__name__
    if type(spec) not in KNOWN:
        raise Unsupported(
            "nobody knows what a request needs of these layers",
            field=FIELD,
            value=name,
            remedy="known: " + ", ".join(kind.__name__ for kind in KNOWN),
        )
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise Unsupported(
            "KV that depends on later tokens is not what its block's hash names",
            field=FIELD,
            value=f"{name}, not causal",
        )
    if not getattr(spec, "prefix_cacheable", True):
        raise Unsupported(
            "vLLM computes these layers again instead of caching them", field=FIELD, value=f"{name}, replayed"
        )
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
        raise Unsupported(
            "vLLM keeps no states at the ends of blocks, so nothing could ever be found",
            field="cache_config.mamba_cache_mode",
            value="none",
            remedy="start vLLM with --enable-prefix-caching",
        )
    if blocks_per_chunk > 1 and _window(spec):
        raise Unsupported(
            "a row of several blocks may lack those that a window had passed when it was stored",
            field="kv_connector_extra_config.blocks_per_chunk",
            value=blocks_per_chunk,
            remedy="leave blocks_per_chunk and block_size of the offloading out: a row is one block then",
        )


def _kind(spec: Any) -> str:
    if isinstance(spec, MambaSpec):
        return "state"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "local"
    if isinstance(spec, SlidingWindowSpec):
        return "window"
    return "latent" if isinstance(spec, MLAAttentionSpec) else "full"


def _window(spec: Any) -> int | None:
    if isinstance(spec, MambaSpec):
        return 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    return None


def _block_bytes(group: Any) -> int:
    """As vLLM counts them: padding is part of a page."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(group.layer_names)


def tp_replicas(config: Any, kv_cache_config: Any) -> int:
    """How many consecutive tensor-parallel ranks should hold the same KV, by what vLLM says of its layers: latent KV is
    the same on all of them, heads fewer than ranks are repeated, a state is each rank's own."""
    width = int(config.parallel_config.tensor_parallel_size)
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    if known > 1:
        return known
    heads = int(config.model_config.get_total_num_kv_heads())
    shared = width
    for group in kv_cache_config.kv_cache_groups:
        for spec in _specs(group.kv_cache_spec):
            shared = math.gcd(shared, _replicas(spec, width, heads))
    return shared


def _replicas(spec: Any, width: int, heads: int) -> int:
    if isinstance(spec, MambaSpec):
        return width if spec.tp_replicated else 1
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return width
    # A rank that has several heads has them for itself.
    return max(1, width // heads) if spec.num_kv_heads == 1 else 1
