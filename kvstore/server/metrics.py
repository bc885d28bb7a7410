"""/metrics in Prometheus format, on loopback unless told otherwise.

A small HTTP server of our own on the daemon's loop: one GET or HEAD a connection, bounded in size, time and number, so
that no scraper can hold the daemon up. What is reported comes from the core's own statistics at the moment of the
scrape, and the number of time series is bounded whatever is opened and asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore import measures
from kvstore.errors import StoreError, shorten
from kvstore.server.logs import fields
from kvstore.tiers.ssd import SsdStats
from kvstore.types import DiskState

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
REQUEST_BYTES_MAX = 8_192
TIMEOUT_S = 5.0
METHODS = ("GET", "HEAD")


NAMESPACES_MAX = 100
"""Namespaces with time series of their own, largest first; the others are summed up as "other"."""

Families = Callable[[], Awaitable[Iterable[Metric]]]


class MetricsServer:
    """`families` makes the metrics of now; it may raise StoreError (then 503)."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(
            self._connected, host=host, port=port, limit=REQUEST_BYTES_MAX, reuse_port=False
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                method, status, body = await self._answer(reader)
                kind = CONTENT_TYPE_LATEST if status.startswith("200 ") else "text/plain; charset=utf-8"
                allow = f"Allow: {', '.join(METHODS)}\r\n" if status.startswith("405 ") else ""
                writer.write(
                    f"HTTP/1.1 {status}\r\n{allow}Content-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                if method != "HEAD":
                    writer.write(body)
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # a scraper that is slow or went away
        except Exception:
            log.exception("a scrape failed")
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        """The request's method, the status and the body that a GET has."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            return "GET", "400 Bad Request", b"one GET request of at most 8 KiB, please\n"
        method, path, *_ = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")
        return method.decode("ascii", "replace"), *await self._found(method, path)

    async def _found(self, method: bytes, path: bytes) -> tuple[str, bytes]:
        if method.decode("ascii", "replace") not in METHODS:
            return "405 Method Not Allowed", b"only GET and HEAD\n"
        if path.split(b"?", 1)[0] != b"/metrics":
            return "404 Not Found", b"only /metrics\n"
        if self._connections > CONNECTIONS_MAX:
            return "503 Service Unavailable", b"too many scrapes at once\n"
        try:
            return "200 OK", render(await self._families())
        except StoreError as error:
            log.warning("no statistics for a scrape", extra=fields(why=str(error)))
            return "503 Service Unavailable", f"{error}\n".encode("ascii", "replace")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def render(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


# ---------------------------------------------------------------------------------------------------------- families

ARENA = {
    "bytes": "Size of the arena.",
    "ready_bytes": "Arena that has its pages and is in service.",
    "assigned_bytes": "Arena in segments that belong to some namespace.",
    "retiring_bytes": "Arena in segments that wait for workers to unmap them.",
}
PROCESS = {
    "uptime_seconds": "Time since the daemon started.",
    "attach_streams": "Workers with an open Attach stream.",
    "staging_bytes": "Staging memory of all workers.",
    "directory_bytes": "Memory of the directories in which workers look chunks up without a message.",
    "regions": "Regions that workers lent the daemon.",
    "region_bytes": "Size of those regions; their memory is the workers'.",
    "tcp_refused": "Calls over TCP without a valid identity, since the start.",
}
NAMESPACE = {
    "chunks": ("chunks", "Chunks that are hits."),
    "chunks_incomplete": ("incomplete", "Chunks of which some shard is missing."),
    "resident_bytes": ("resident_bytes", "Bytes of chunks that are hits."),
    "pinned_bytes": ("pinned_bytes", "Bytes of chunks that leases pin."),
    "sessions": ("sessions", "Sessions."),
    "cold_chunks": ("cold_chunks", "Chunks on SSD only."),
    "cold_bytes": ("cold_bytes", "Bytes of chunks on SSD only."),
    "worker_chunks": ("worker_chunks", "Chunks in memory of the workers' own, as they reported."),
}
"""Name -> (column of the core's row, help)."""
TENANT_TIERS = ("dram", "ssd", "remote")
SLOT_STATES = ("free", "reserved", "ready", "quarantined")
PENDING = ("being_saved", "being_moved", "on_ssd")
PREFETCHES = ("on_time", "late", "wasted")
PROMOTIONS = ("ahead", "on_demand")
LABELLED = frozenset(
    (*(f"prefetch_{result}" for result in PREFETCHES), *(f"chunks_promoted_{how}" for how in PROMOTIONS))
)
"""Counters of the core that have a family with a label here."""
SSD = {
    "bytes": "Size of all slab files that may exist.",
    "slab_bytes": "Size of the slab files that do.",
    "cold_chunks": "Chunks on SSD only.",
}


def families(
    values: Mapping[str, Any], process: Mapping[str, float], version: str, disk: SsdStats | None = None
) -> list[Metric]:
    """Metrics of the core's statistics (`values`, see core/stats.py), of the daemon around it (`process`), and of its
    SSD tier (`disk`; None: there is none).

    Sums over slots: free + reserved + ready + quarantined = capacity, in every scrape.
    """
    rows = sorted(values["namespaces"], key=lambda row: (-row["resident_bytes"], row["namespace_id"]))
    label = {
        row["namespace_id"]: str(row["namespace_id"]) if place < NAMESPACES_MAX else "other"
        for place, row in enumerate(rows)
    }
    shown = rows[:NAMESPACES_MAX]
    slots: Counter[Labels] = Counter()
    for row in values["pools"]:
        for state in SLOT_STATES:
            slots[label[row["namespace_id"]], state] += row[state]
    lookups: Counter[Labels] = Counter()
    for row in rows:
        for reason, times in row["by_reason"].items():
            outcome = "hit" if reason == "none" else "pending" if reason in PENDING else "miss"
            lookups[shorten(row["tenant"]), outcome, reason] += times
    return [
        _gauge("build_info", "Always 1; the label has the version.", ("version",), {(version,): 1}),
        *(_gauge(name, text, (), {(): process[name]}) for name, text in PROCESS.items()),
        *(_gauge(f"arena_{kind}", text, (), {(): values["arena"][kind]}) for kind, text in ARENA.items()),
        _gauge("slots", "Slots by what is in them.", ("namespace", "state"), slots),
        _gauge(
            "namespace_info",
            "Always 1; the labels say whose and what a namespace is.",
            ("namespace", "tenant", "model"),
            {(label[r["namespace_id"]], shorten(r["tenant"]), shorten(r["model"])): 1 for r in shown},
        ),
        *(
            _gauge(name, text, ("namespace",), _sums(rows, label, column))
            for name, (column, text) in NAMESPACE.items()
        ),
        *_tenants(values["tenants"]),
        _counter(
            "lookups",
            "Keys asked for by Acquire, by what was found.",
            ("tenant", "outcome", "reason"),
            lookups,
        ),
        _counter(
            "hits",
            'Hits of Acquire by where the bytes were when they were asked for: what waited for the SSD is "ssd".',
            ("tenant", "tier"),
            _hits(rows),
        ),
        *_ssd(values["ssd"], values["counters"], disk),
        *(
            _gauge(name, measures.meaning(name), (), {(): value})
            for name, value in sorted(values["gauges"].items())
        ),
        *(
            _counter(name, measures.meaning(name), (), {(): value})
            for name, value in sorted(values["counters"].items())
            if name not in LABELLED
        ),
    ]


def _tenants(rows: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    used: dict[Labels, float] = {}
    quota: dict[Labels, float] = {}
    shown = sorted(rows, key=lambda row: (-row["dram_bytes"] - row["ssd_bytes"], row["tenant"]))[
        :NAMESPACES_MAX
    ]
    for row in shown:
        for tier in TENANT_TIERS:
            labels = shorten(row["tenant"]), tier
            used[labels] = used.get(labels, 0) + row[f"{tier}_bytes"]
            if row[f"{tier}_quota"]:
                quota[labels] = row[f"{tier}_quota"]
    what = "Bytes of a tenant in a tier of this node, padding included; of the largest tenants."
    yield _gauge("tenant_bytes", what, ("tenant", "tier"), used)
    yield _gauge("tenant_quota_bytes", "What it may have there; none: no quota.", ("tenant", "tier"), quota)


def _hits(rows: Iterable[Mapping[str, Any]]) -> dict[Labels, float]:
    hits: Counter[Labels] = Counter()
    for row in rows:
        tenant = shorten(row["tenant"])
        hits[tenant, "dram"] += row["hits"] - row["ssd_hits"]
        hits[tenant, "ssd"] += row["ssd_hits"]
    return dict(hits)


def _ssd(ssd: Mapping[str, Any], counters: Mapping[str, int], disk: SsdStats | None) -> Iterator[Metric]:
    """`ssd`: see core/stats.py."""
    states: Samples = {
        (state.name.lower(),): float(state.name.lower() == ssd["state"]) for state in DiskState
    }
    yield _gauge("ssd_state", "1 for the state that the SSD tier is in.", ("state",), states)
    results: Samples = {(result,): counters.get(f"prefetch_{result}", 0) for result in PREFETCHES}
    yield _counter("prefetch", "Chunks that hints brought to DRAM, by what came of it.", ("result",), results)
    hows: Samples = {(how,): counters.get(f"chunks_promoted_{how}", 0) for how in PROMOTIONS}
    yield _counter("promoted_chunks", "Chunks read from SSD into DRAM, by who wanted it.", ("how",), hows)
    if disk is None:
        return
    for name, text in SSD.items():
        yield _gauge(f"ssd_{name}", text, (), {(): ssd[name]})
    yield _gauge("ssd_full", "1 while no slot can be freed on SSD.", (), {(): float(ssd["full"])})
    slots: Samples = {(state,): ssd[state] for state in SLOT_STATES}
    yield _gauge("ssd_slots", "Slots of slab files by what is in them.", ("state",), slots)
    yield _gauge("ssd_chunks_to_store", "Chunks in DRAM that are to be written.", (), {(): ssd["to_store"]})
    waited = ssd["oldest_not_durable_ms"] / 1000
    yield _gauge("ssd_oldest_not_durable_seconds", "How long the index is behind.", (), {(): waited})
    yield _gauge("ssd_index_bytes", "Cap of the index.", (), {(): disk.index_bytes})
    yield _gauge("ssd_index_used_bytes", "Of that in use.", (), {(): disk.index.used})
    most = "Of that, what may be in use: the rest is for deletions."
    yield _gauge("ssd_index_max_bytes", most, (), {(): disk.index.bytes_max})
    shares: Samples = {(kind,): getattr(disk.index, kind) for kind in ("chunks", "sessions", "other")}
    yield _gauge("ssd_index_share_bytes", "Of the index in use, by what is in it.", ("kind",), shares)
    waits = "Index records that are to go: a restart now could bring these back."
    yield _gauge("ssd_to_forget", waits, (), {(): ssd["to_forget"]})
    yield _gauge("ssd_free_bytes", "What its file system has left, measured last.", (), {(): disk.free_bytes})
    yield _gauge(
        "ssd_problems", "Standing problems, as kvctl doctor tells them.", (), {(): len(disk.problems)}
    )
    yield _counter("ssd_index_commits", "Transactions of the index.", (), {(): disk.index_commits})
    yield _counter(
        "ssd_index_commit_seconds", "Time in them, syncs included.", (), {(): disk.index_commit_seconds}
    )
    errors: Samples = {
        ("io",): disk.io_errors,
        ("no_space",): disk.no_space,
        ("corrupt",): disk.records_corrupt,
    }
    yield _counter("ssd_errors", "Results of disk operations that failed.", ("kind",), errors)


Labels = tuple[str, ...]
Samples = Mapping[Labels, float]


def _sums(rows: Iterable[Mapping[str, Any]], label: Mapping[int, str], column: str) -> dict[Labels, float]:
    sums: Counter[Labels] = Counter()
    for row in rows:
        sums[label[row["namespace_id"]],] += row[column]
    return dict(sums)


def _gauge(name: str, text: str, labels: Labels, samples: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(f"kvstored_{name}", text, labels=labels)
    for values, sample in samples.items():
        family.add_metric(values, sample)
    return family


def _counter(name: str, text: str, labels: Labels, samples: Mapping[Labels, float]) -> Metric:
    family = CounterMetricFamily(f"kvstored_{name}", text, labels=labels)
    for values, sample in samples.items():
        family.add_metric(values, sample)
    return family
