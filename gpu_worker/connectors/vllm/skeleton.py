"""The groups that an engine will have, without its weights: for the doctor, who looks before vLLM is started.

vLLM forms groups from what the model's layers say of their caches, so the model is made on the meta device, where
nothing is allocated, and asked as the engine's workers ask it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, UniformTypeKVCacheSpecs


def planned_cache(config: Any, blocks: int) -> KVCacheConfig:
    """As the engine's scheduler would be given it for `blocks` blocks, of one rank alone: sets the configuration to one
    rank. Raises whatever a model raises that cannot be made without weights."""
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = parallel.world_size = 1
    parallel.rank = 0
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        _one_rank(f"file://{folder}/ranks")
        try:
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config=config)
            current_platform.update_block_size_for_backend(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            specs = {
                name: spec
                for name, layer in layers.items()
                if not getattr(layer, "kv_sharing_target_layer_name", None)
                and (spec := layer.get_kv_cache_spec(config)) is not None
            }
            layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
            resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
            groups = get_kv_cache_groups(config, specs)
            del model
        finally:
            config.compilation_config.static_forward_context.clear()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    # Groups lie over one another: a block is as long as the longest of them.
    longest = max((_bytes_of(group) for group in groups), default=0)
    names = groups[0].layer_names if groups else []
    tensor = KVCacheTensor(size=longest * blocks, layers=names, layer_stride=0, block_stride=longest)
    return generate_scheduler_kv_cache_config([KVCacheConfig(blocks, [tensor], groups)])


def _bytes_of(group: Any) -> int:
    spec = group.kv_cache_spec
    return int(spec.page_size_bytes) * (
        1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    )


def _one_rank(address: str) -> None:
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=address, local_rank=0, backend="gloo"
    )
    parallel_state.initialize_model_parallel(1, 1)
