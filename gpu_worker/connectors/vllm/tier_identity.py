"""The namespace of the tier's chunks: what the connector's covers (see identity), and the layout of vLLM's host rows.

A row holds what all ranks have of one chunk of one group of layers; to the store it is one opaque shard. Its key is
vLLM's own: hash of the tokens, then the number of the group.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec
from vllm.v1.kv_offload.base import OffloadingSpec

from kvstore.errors import ConfigError, Unsupported
from kvstore.gpu_worker.connectors.offload import Group
from kvstore.gpu_worker.connectors.vllm.groups import groups_of, tp_replicas
from kvstore.gpu_worker.connectors.vllm.identity import (
    check_comparable,
    describe_backend,
    hash_protocol,
    scales_digest,
    vllm_version,
    weights_digest,
)
from kvstore.gpu_worker.connectors.vllm.settings import Settings, TierSettings
from kvstore.layout import GroupKind, GroupSpec, NamespaceSpec

GROUP = "row"
MULTI_CONNECTOR = "MultiConnector"
COMPARING = ("OffloadingConnector", "KVStoreConnector")
"""Of its connectors: the one that has the tier, and the one that loads by the weights' digest."""


@dataclass(frozen=True)
class Engine:
    """What vLLM tells connectors, but not tiers."""

    config: Any
    kv_cache_config: Any


def engine_under_construction() -> Engine | None:
    """Of the engine whose scheduler is just making the tier; None: vLLM has changed.

    A tier is given the part of the configuration that names a model and its cache, not that which decides what KV comes
    out (overrides, quantisation, positions, adapters). vLLM makes tiers in the constructor of its scheduler's
    connector, where both are at hand, so they are looked up there rather than guessed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        given = frame.f_locals
        config, cache = given.get("vllm_config"), given.get("kv_cache_config")
        if isinstance(config, VllmConfig) and isinstance(cache, KVCacheConfig):
            return Engine(config, cache)
        frame = frame.f_back
    return None


def check_alone() -> None:
    """Raises Unsupported if the tier is being made for one of several connectors, and another one loads: in whose
    blocks what is, a tier is not told."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config, outer = frame.f_locals.get("vllm_config"), frame.f_locals.get("self")
        if isinstance(config, VllmConfig) and type(outer).__name__ == MULTI_CONNECTOR:
            check_alone_among(config.kv_transfer_config.kv_connector_extra_config.get("connectors") or ())
        frame = frame.f_back


def check_alone_among(connectors: Sequence[Mapping[str, Any]]) -> None:
    """`connectors`: as a MultiConnector is configured with them. Raises Unsupported."""
    others = [
        str(each.get("kv_connector"))
        for each in connectors
        if each.get("kv_role") != "kv_producer" and each.get("kv_connector") not in COMPARING
    ]
    if others:
        raise Unsupported(
            f"{' and '.join(others)} may load KV of weights that nobody compares with ours, and vLLM has it saved here",
            field="kv_connector",
            value=MULTI_CONNECTOR,
            remedy="use the connector KVStoreConnector, which tells them apart; or set save_what_others_load of the "
            "tier, if the engines that they load from surely hold the same weights",
        )


def check_engine(engine: Engine, blocks_per_chunk: int = 1) -> list[Group]:
    """What is stored, by group. Raises Unsupported or ConfigError, naming the vLLM setting that stands in the way."""
    check_engine_settings(engine.config)
    return groups_of(engine.kv_cache_config, blocks_per_chunk=blocks_per_chunk)


def check_engine_settings(config: Any) -> None:
    """As `check_engine`, before anything is known of the groups."""
    check_comparable(config)
    if config.lora_config is not None:
        raise Unsupported(
            "vLLM tells a tier an adapter's name only, and tomorrow that may be another adapter",
            field="lora_config",
            value="enabled",
            remedy="use the connector KVStoreConnector, which looks at the adapter's files",
        )
    if getattr(config.parallel_config, "nnodes_within_dp", 1) > 1:
        raise Unsupported(
            "the rows in this node's memory are only a part",
            field="parallel_config.nnodes",
            value=config.parallel_config.nnodes,
        )


@dataclass(frozen=True)
class RowLayout:
    """Where in a row each shard of its chunk is (see offload.Rows)."""

    part_bytes: int
    copies: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        return len(self.copies[0])


def row_layout(engine: Engine | None, offloading: OffloadingSpec, row_bytes: int) -> RowLayout:
    """vLLM's rows have a part for each rank, in order; where it has not joined equal ones itself, the store does."""
    given = offloading.config
    parts, part_bytes = given.parallel.world_size, getattr(offloading, "cpu_page_size_per_worker", 0)
    joined = offloading.replicated_layout or given.canonical_layout
    if engine is None or joined or parts < 2 or not 0 < parts * part_bytes <= row_bytes:
        return RowLayout(row_bytes, ((0,),))
    replicas = tp_replicas(engine.config, engine.kv_cache_config)
    if replicas < 2 or parts % replicas:
        return RowLayout(row_bytes, ((0,),))
    starts = [number * part_bytes for number in range(parts)]
    copies = tuple(tuple(starts[first : first + replicas]) for first in range(0, parts, replicas))
    return RowLayout(part_bytes, copies)


def is_prefix_only(engine: Engine | None) -> bool:
    """Whether behind a missing chunk nothing is of use: one group, of full attention."""
    if engine is None:
        return False
    groups = engine.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return False
    spec = groups[0].kv_cache_spec
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return isinstance(spec, FullAttentionSpec) and not windowed


def namespace_of_rows(
    engine: Engine | None,
    offloading: OffloadingSpec,
    settings: TierSettings,
    *,
    row_bytes: int,
    weights: bytes,
    scales: bytes = b"",
) -> NamespaceSpec:
    """`weights`, `scales`: digests of those that all ranks hold (weights.Known); b"" where vLLM does not show its
    ranks. Raises Unsupported, ConfigError, BadRequest."""
    given = offloading.config
    rows = row_layout(engine, offloading, row_bytes)
    layout = {
        "row_bytes": row_bytes,
        "blocks_per_chunk": given.cache.blocks_per_chunk,
        "tokens_per_hash": given.cache.tokens_per_hash,
        "worker_bytes_per_block": given.worker_kv_bytes_per_block,
        "groups": [asdict(group) for group in given.groups],
        "dtype": given.model.dtype,
        "kv_cache_layout": given.kv_cache_layout,
        "canonical": given.canonical_layout,
        "replicated": bool(offloading.replicated_layout),
        "copies": rows.copies,
        "parallel": [
            *(given.parallel.world_size, given.parallel.tp_size, given.parallel.pp_size),
            *(given.parallel.pcp_size, given.parallel.dcp_size),
        ],
    }
    if engine is not None and (weights or settings.weights_digest):
        groups = check_engine(engine, offloading.blocks_per_chunk)
        specs = [group.kv_cache_spec for group in engine.kv_cache_config.kv_cache_groups]
        layout["specs"] = [repr(spec) for spec in specs]
        model = engine.config.model_config.hf_config.model_type
        backend = _backend(engine, specs)
        dtype = str(engine.config.cache_config.cache_dtype)
        digest = weights_digest(engine.config, Settings(weights_digest=settings.weights_digest), weights)
        protocol = hash_protocol(engine.config.cache_config.prefix_caching_hash_algo, os.environ)
        latent = all(group.kind == "latent" for group in groups)
    else:
        # Whoever names the weights answers for everything that decides what KV comes out.
        if not settings.weights_digest:
            raise ConfigError(
                "this vLLM does not show a tier what its KV depends on",
                field="secondary_tiers.weights_digest",
                value=settings.weights_digest,
                remedy="name weights and all that decides their KV there, or use the connector KVStoreConnector",
            )
        model, backend, dtype, latent = given.model.name or "unnamed", _device(), given.model.dtype, False
        digest = hashlib.blake2b(
            settings.weights_digest.encode(), digest_size=32, person=b"kvs.vllm.named"
        ).digest()
        protocol = f"vllm-{vllm_version()}/python-{sys.version_info[0]}.{sys.version_info[1]}"
    laid_out = hashlib.blake2b(digest_size=16, person=b"kvs.vllm.rows")
    laid_out.update(json.dumps(layout, sort_keys=True).encode())
    spec = NamespaceSpec(
        model=model,
        weights_digest=digest,
        layout_fingerprint=f"vllm-{vllm_version()}/tier/{backend}/{dtype}/{laid_out.hexdigest()}",
        chunk_tokens=min(offloading.tokens_per_block) * offloading.blocks_per_chunk,
        groups=(
            GroupSpec(
                name=GROUP,
                shard_bytes=rows.part_bytes,
                shard_count=len(rows.copies),
                kind=GroupKind.LATENT if latent else GroupKind.FULL,
                position_rule="engine",
            ),
        ),
        weights_epoch=settings.weights_epoch,
        kv_scales_digest=scales_digest(engine.config, scales) if engine is not None else b"",
        hash_protocol=protocol,
        tensor_parallel=given.parallel.tp_size,
        pipeline_parallel=given.parallel.pp_size,
        salt=hashlib.sha256(settings.salt.encode()).digest() if settings.salt else b"",
    )
    spec.validate()
    return spec


def _backend(engine: Engine, specs: list[Any]) -> str:
    groups = engine.kv_cache_config.kv_cache_groups
    names = [name for group in groups for name in group.layer_names]
    # A state's element type is part of its spec; kernels pack attention only.
    described = describe_backend(
        engine.config, names, [spec for spec in specs if not isinstance(spec, MambaSpec)]
    )
    if described.startswith("none"):
        # The model is in other processes. They choose by device and by what they are told, and so do all like them.
        chosen = hashlib.sha256(repr(engine.config.attention_config).encode()).hexdigest()[:16]
        return f"{_device()}:{chosen}/{described}"
    return described


def _device() -> str:
    try:
        return str(current_platform.get_device_name())
    except Exception:
        # A platform that cannot tell raises what it likes; its kind must do.
        return str(current_platform.device_type)
