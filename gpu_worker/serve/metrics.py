"""Metrics of a worker, in Prometheus format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.compute_or_load import Why
from kvstore.gpu_worker.serve.service import Job

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
FINISHES = ("stop", "length", "abort", "error")
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics(Collector):
    """Counts jobs that ended; all else is read from the engine when it is asked for."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._finished = dict.fromkeys(FINISHES, 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first = Histogram(
            "kvstore_worker_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "kvstore_worker_request_seconds",
            "From a request's arrival to its last token",
            buckets=SECONDS,
            registry=self._registry,
        )

    def ended(self, job: Job) -> None:
        self._finished[job.finish] += 1
        if job.first:
            self._first.observe(job.first - job.begun)
        if job.finish in ("stop", "length"):
            self._whole.observe(job.ended - job.begun)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        engine, did = self._engine, self._engine.counters
        pool = engine.pool
        yield _gauge("requests", "Live requests", {"running": engine.running, "waiting": engine.waiting})
        chunks = {"held": pool.used, "idle": pool.idle, "free": pool.available - pool.idle}
        yield _gauge("pool_chunks", "Chunks of the HBM pool: held by requests, idle and kept, free", chunks)
        yield GaugeMetricFamily(
            "kvstore_worker_store_connected", "Whether kvstored answers", value=float(engine.connected)
        )
        yield _counter("requests_finished", "Requests that ended, by how", "finish", self._finished)
        plain = {
            "requests_rejected": "Requests refused because too many waited",
            "preemptions": "Requests that had to make room",
            "load_failures": "Loads whose KV did not arrive, or was no numbers, and was computed",
            "requests_cut": "Requests whose conversation was too long and was cut",
            "cut_tokens": "Tokens that such requests did not look at",
            "cuts_by_mass": "Cuts at which old tokens stayed because others attend to them",
            "prompts_observed": "Prompts of which it was recorded what their ends attend to",
            "truncations_recomputed": "Such requests that computed all that remains, without what was stored",
            "canary_checks": "Hits that were computed again and compared",
            "canary_failures": "Such hits that were not what this worker computes",
            "promotions_awaited": "Lookups that waited for KV on SSD",
            "promotions_late": "Of these, that went on without all of it",
            "loads_overlapped": "Requests that ran while their KV was loaded",
            "loads_late": "Loads that were given up because computing is faster",
            "steps": "Forward calls",
        }
        for name, help_ in plain.items():
            yield CounterMetricFamily(f"kvstore_worker_{name}", help_, value=did[name])
        yield CounterMetricFamily("kvstore_worker_pool_evicted", "Idle chunks evicted", value=pool.evicted)
        tokens = {
            "computed": did["computed_tokens"],
            "hbm": did["adopted_tokens"],
            "dram": did["restored_tokens"] - did["restored_ssd_tokens"],
            "ssd": did["restored_ssd_tokens"],
        }
        yield _counter("tokens", "Tokens by where their KV came from", "source", tokens)
        chosen = {why.value: did[f"choices_{why.value}"] for why in Why}
        yield _counter("choices", "What was made of KV that the store had", "choice", chosen)
        saved = {name: engine.save_counters.get(name, 0) for name in ("chunks_saved", "chunks_already")}
        saved |= {name: engine.save_counters.get(name, 0) for name in ("chunks_refused", "chunks_dropped")}
        by_outcome = {name.removeprefix("chunks_"): count for name, count in saved.items()}
        yield _counter(
            "saved_chunks", "Chunks that were to be saved, by what came of it", "outcome", by_outcome
        )


def _gauge(name: str, help_: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"kvstore_worker_{name}", help_, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family


def _counter(name: str, help_: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvstore_worker_{name}", help_, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
