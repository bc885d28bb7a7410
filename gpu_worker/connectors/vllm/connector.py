"""vLLM's KVConnectorBase_V1: hands each of its calls to the side that it is for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.connectors.vllm.harmless import harmless
from kvstore.gpu_worker.connectors.vllm.identity import check_settings, group_of
from kvstore.gpu_worker.connectors.vllm.interface import check_interface
from kvstore.gpu_worker.connectors.vllm.metadata import RankLayout, RankReport, StepMetadata
from kvstore.gpu_worker.connectors.vllm.scheduler import SchedulerSide
from kvstore.gpu_worker.connectors.vllm.settings import Settings
from kvstore.gpu_worker.connectors.vllm.stats import KVStorePromMetrics, KVStoreStats, Tally
from kvstore.gpu_worker.connectors.vllm.worker import WorkerSide

STAGING_BYTES = 64 << 20


def rank_layout(_: Any) -> tuple[tuple[int, int], RankLayout | None]:
    """Run in each rank, by its executor: (pp, tp), and how it lays out its KV."""
    worker = next(each for each in _connectors() if isinstance(each, KVStoreConnector)).worker_side
    return worker.place, worker.layout


def _connectors() -> list[Any]:
    """Of this rank: the one that vLLM calls, or of a MultiConnector those that it has."""
    if not has_kv_transfer_group():
        return []
    outer = get_kv_transfer_group()
    return list(getattr(outer, "_connectors", (outer,)))


def _computes(connector: KVStoreConnector, request: Any, _: int) -> tuple[int | None, bool]:
    connector.scheduler_side.drop(request.request_id)
    return 0, False


def _finished(connector: KVStoreConnector, request: Any, _: list[int]) -> tuple[bool, dict[str, Any] | None]:
    connector.scheduler_side.drop(request.request_id)
    return False, None


def _silenced(connector: KVStoreConnector) -> bool | None:
    """What was computed before must not be found again."""
    connector.scheduler_side.silence()
    return False


def _nothing(*_: Any, **__: Any) -> None:
    """For whole loads and saves no layer is awaited or copied by itself."""


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One per role: in the scheduler's process, and in each rank. Construction raises StoreError for an engine whose KV
    cannot be stored, naming the setting; a daemon that is not there is no error, now or later.

    Hybrid models are vLLM's business to hand us (SupportsHMA); those with other than full attention are refused.
    """

    def __new__(cls, *_: Any, **__: Any) -> KVStoreConnector:
        """Raises Unsupported where vLLM would call it otherwise than it expects."""
        check_interface(KVStoreConnector, KVConnectorBase_V1)
        connector: KVStoreConnector = super().__new__(cls)
        return connector

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_settings(vllm_config)
        transfer = self._kv_transfer_config
        settings = Settings.of(transfer.kv_connector_extra_config)
        block_tokens = group_of(kv_cache_config).kv_cache_spec.block_size
        scheduler = role == KVConnectorRole.SCHEDULER
        link = Link(
            settings.run_dir,
            engine_group=f"vllm-{transfer.engine_id}",
            rank=0 if scheduler else vllm_config.parallel_config.rank,
            timeout_s=settings.connect_ms / 1000,
            staging_bytes=STAGING_BYTES,
        )
        self.complaints: set[tuple[str, type[Exception]]] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if scheduler:
            self._scheduler = SchedulerSide(
                vllm_config,
                settings,
                link,
                block_tokens=block_tokens,
                blocks=kv_cache_config.num_blocks,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, link)
            if not settings.layerwise:
                # vLLM calls them for each layer of each step
                self.wait_for_layer_load = self.save_kv_layer = _nothing  # type: ignore[method-assign]

    @property
    def tally(self) -> Tally:
        side = self._scheduler or self._worker
        assert side is not None
        return side.tally

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, no more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # ----------------------------------------------------------------------------------------------- scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "called for the other role"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        layouts = {place: layout for place, layout in metadata.items() if isinstance(layout, RankLayout)}
        self.scheduler_side.meet_ranks(layouts or self.scheduler_side.ask_ranks(rank_layout))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler_side.forget_blocks = gpu_block_pool.evict_blocks

    @harmless(lambda self, request: self.scheduler_side.drop(request.request_id))
    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.on_new_request(request)

    @harmless(_computes)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched(request, num_computed_tokens)

    @harmless(lambda self, *given: self.scheduler_side.fail(*given))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    @harmless(lambda self, _: self.scheduler_side.step_without())
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler_side.step(scheduler_output)

    @harmless(lambda *_: None)
    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler_side.failed(connector_output.invalid_block_ids)
        self.scheduler_side.loaded(connector_output.finished_recving or set())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self.scheduler_side.reported(report)

    @harmless(lambda _: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self.scheduler_side.events
        return events.take() if events is not None else ()

    @harmless(_finished)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # Nothing of ours reads its blocks any more.
        return False, self.scheduler_side.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @harmless(_silenced)
    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset()

    # -------------------------------------------------------------------------------------------------- worker side

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "called for the other role"
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), metadata
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None beside a connector that tells something itself: a MultiConnector hands what the first one says to all,
        and vLLM's NIXL does not start with what is not its own. Then the scheduler's side asks (`rank_layout`)."""
        others = (each for each in _connectors() if each is not self)
        if any(each.get_handshake_metadata() is not None for each in others):
            return None
        return self.worker_side.layout

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin()

    @harmless(lambda self: self.worker_side.distrust(self._step))
    def _begin(self) -> None:
        self.worker_side.begin(self._step)

    @harmless(lambda self, *_, **__: self.worker_side.refuse_all(self._step))
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.load(self._step)

    @harmless(lambda self, _: self.worker_side.spoil())
    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker_side.await_layer(layer_name)

    @harmless(lambda self, *_, **__: self.worker_side.give_up())
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.worker_side.save_layer(self._step, layer_name)

    @harmless(lambda self: self.worker_side.spoil())
    def wait_for_save(self) -> None:
        self.worker_side.end_forward(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.worker_side.forget(finished_req_ids)
        return None, self.worker_side.take_done() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_failed()

    @harmless(lambda _: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.report()

    # ------------------------------------------------------------------------------------------------------- both

    @harmless(lambda _: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            self._scheduler.step_ended()  # vLLM asks once a step, when it is over
        return self.tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @harmless(lambda _: None)
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        assert side is not None
        side.close()


# vLLM's MultiConnector looks the classes of its connectors up by name when it puts their statistics together, and ends
# the engine if it does not find one.
if KVStoreConnector.__name__ not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(KVStoreConnector.__name__, __name__, KVStoreConnector.__name__)
