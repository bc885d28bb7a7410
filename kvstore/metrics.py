"""/metrics in Prometheus format, on a loopback port.

A small HTTP server of our own on the daemon's loop: one GET a connection, bounded in size, time and number, so that no
scraper can hold the daemon up. What is reported comes from the core's own statistics at the moment of the scrape, and
the number of time series is bounded whatever is opened and asked for.
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

from kvstore.errors import StoreError, shorten
from kvstore.logs import fields

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
REQUEST_BYTES_MAX = 8_192
TIMEOUT_S = 5.0


NAMESPACES_MAX = 100
"""Namespaces with time series of their own, largest first; the others are summed up as "other"."""

Families = Callable[[], Awaitable[Iterable[Metric]]]


class MetricsServer:
    """`families` makes the metrics of now; it may raise StoreError (then 503)."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, port: int) -> None:
        """Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(
            self._connected, host="127.0.0.1", port=port, limit=REQUEST_BYTES_MAX, reuse_port=False
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._answer(reader)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # a scraper that is slow or went away
        except Exception:
            log.exception("a scrape failed")
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, bytes]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            return "400 Bad Request", b"one GET request of at most 8 KiB, please\n"
        method, path, *_ = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")
        if method != b"GET":
            return "405 Method Not Allowed", b"only GET\n"
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
    "ready_bytes": "Arena that is prefaulted and in service.",
    "assigned_bytes": "Arena in segments that belong to some namespace.",
    "retiring_bytes": "Arena in segments that wait for workers to unmap them.",
}
PROCESS = {
    "uptime_seconds": "Time since the daemon started.",
    "attach_streams": "Workers with an open Attach stream.",
    "staging_bytes": "Staging memory of all workers.",
}
NAMESPACE = {
    "chunks": ("chunks", "Chunks that are hits."),
    "chunks_incomplete": ("incomplete", "Chunks of which some shard is missing."),
    "resident_bytes": ("resident_bytes", "Bytes of chunks that are hits."),
    "pinned_bytes": ("pinned_bytes", "Bytes of chunks that leases pin."),
    "sessions": ("sessions", "Sessions."),
}
"""Name -> (column of the core's row, help)."""
SLOT_STATES = ("free", "reserved", "ready", "quarantined")
PENDING = ("being_saved", "being_moved")


def families(values: Mapping[str, Any], process: Mapping[str, float], version: str) -> list[Metric]:
    """Metrics of the core's statistics (`values`, see core/stats.py) and of the daemon around it (`process`).

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
        _counter(
            "lookups",
            "Keys asked for by Acquire, by what was found.",
            ("tenant", "outcome", "reason"),
            lookups,
        ),
        *(
            _gauge(name, "See docs of GetStats.", (), {(): value})
            for name, value in sorted(values["gauges"].items())
        ),
        *(
            _counter(name, "See docs of GetStats.", (), {(): value})
            for name, value in sorted(values["counters"].items())
        ),
    ]


Labels = tuple[str, ...]


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
