"""vLLM's own scheduler and one connector of ours for each rank, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from .conftest import BLOCK


def config_of(model: Path, transfer: dict[str, Any], *, ranks: int, **scheduling: Any) -> VllmConfig:
    """`transfer`: of KVTransferConfig; `scheduling`: more of SchedulerConfig."""
    init_none_hash(sha256)
    scheduler = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=120,  # no multiple of a block
        max_model_len=1024,
        is_encoder_decoder=False,
        **{"async_scheduling": False, **scheduling},
    )
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.parallel_config.tensor_parallel_size = ranks
    return config


def scheduler_of(config: VllmConfig, cache: Any) -> Scheduler:
    """`cache`: a KVCacheConfig."""
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return (AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def connectors_of(
    scheduler: Scheduler, layers: Sequence[str], shape: tuple[int, ...], *, ranks: int
) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Each rank's connector, which the scheduler's has met, and its paged cache: zeros of this shape by layer."""
    config, workers, caches, layouts = scheduler.vllm_config, [], [], {}
    for rank in range(ranks):
        config.parallel_config.rank = rank
        worker = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, scheduler.kv_cache_config
        )
        tensors = {name: torch.zeros(shape) for name in layers}
        worker.register_kv_caches(tensors)
        layouts[0, rank] = worker.get_handshake_metadata()
        workers.append(worker)
        caches.append(tensors)
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(layouts)
    return workers, caches
