"""Counters of both sides, through vLLM's own hooks: its log line, and Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "lookups": "Requests that the store was asked about.",
    "lookups_late": "Requests that were computed because the store's answer did not come in time.",
    "hit_tokens": "Prompt tokens that vLLM was told to load.",
    "computed_tokens": "Prompt tokens that the store had and vLLM computed, because that is faster.",
    "loads_deferred": "Requests that waited until another one had loaded the same blocks.",
    "blocks_loaded": "Blocks that a rank loaded.",
    "bytes_loaded": "Bytes that ranks loaded.",
    "load_us": "Microseconds that loads took, from their start to their end.",
    "blocks_failed": "Blocks that a rank was to load and vLLM computed instead.",
    "blocks_saved": "Blocks that a rank saved.",
    "bytes_saved": "Bytes that ranks saved.",
    "blocks_already": "Blocks that the store had already.",
    "blocks_dropped": "Blocks not saved: the queue was full, or the daemon away.",
    "blocks_refused": "Blocks not saved: the store had no room, or the save failed.",
    "blocks_recalled": "Blocks that the store forgot again: the weights had changed, nobody knows when.",
    "hints_published": "Waiting requests that the daemon was told of, and keeps blocks for.",
    "hints_refused": "Waiting requests that the daemon was told of, too far for its memory.",
    "blocks_touched": "Blocks of which the daemon was told that a request used them without it.",
    "blocks_untold": "Such blocks of which it was not: too many waited, or it was away.",
    "actions_accepted": "kv_hints actions that are done or in force.",
    "actions_clipped": "kv_hints actions that are in force for a part of their blocks.",
    "actions_deferred": "kv_hints actions that are in force while blocks are on their way, or not saved yet.",
    "actions_rejected": "kv_hints actions that the store cannot carry out.",
    "resets": "Resets of the cache: a new weights epoch each.",
    "bugs": "Errors in the connector itself; the log has one of each kind.",
}


class Tally:
    """Counts, from any thread, until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        assert counts.keys() <= COUNTERS.keys(), counts
        with self._lock:
            self._counts.update(counts)
            self.total.update(counts)

    def take(self) -> KVStoreStats | None:
        with self._lock:
            if not +self._counts:
                return None
            counts, self._counts = self._counts, Counter()
        return KVStoreStats(data=dict(counts))


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counts since the last ones, by name (see COUNTERS)."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """vllm:kvstore_<name> for each of COUNTERS."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[PromCounter]
        self._counters = {
            name: create_metric_per_engine(
                make(name=f"vllm:kvstore_{name}", documentation=about, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, about in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
