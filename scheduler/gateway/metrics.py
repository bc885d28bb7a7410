"""What Prometheus reads of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.scheduler.gateway.dispatch import Dispatcher, Failure, Server

CONTENT_TYPE = CONTENT_TYPE_LATEST
HINTS = {
    "told": "Waiting requests of which the daemon was told",
    "unknown": "Waiting requests whose token ids were not to be had",
    "failed": "Messages to the daemon that it did not take",
    "expected": "Presence hints that the daemon took",
    "routed": "Requests of which it was known what their KV costs each node",
    "unrouted": "Requests of which that was not known in time",
}


class Metrics(Collector):
    def __init__(self, dispatcher: Dispatcher, hints: Mapping[str, int]) -> None:
        self._dispatcher = dispatcher
        self._hints = hints
        """Counters of the look-ahead (HINTS); empty without a store."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        servers = self._dispatcher.servers
        yield GaugeMetricFamily(
            "attnstore_gateway_waiting", "Requests that wait for a server", value=len(self._dispatcher)
        )
        yield _by_server(
            GaugeMetricFamily, "running", "Requests that it has", servers, lambda one: one.running
        )
        yield _by_server(
            GaugeMetricFamily,
            "up",
            "Whether it gets requests; 0: it is left out",
            servers,
            lambda one: one.up,
        )
        yield _by_server(
            GaugeMetricFamily,
            "on_trial",
            "Whether it gets one request at a time, until it has answered one",
            servers,
            lambda one: one.on_trial,
        )
        outages = CounterMetricFamily(
            "attnstore_gateway_left_out", "Times that it was left out, and why", labels=["server", "why"]
        )
        for server in servers:
            for failure in Failure:
                outages.add_metric([server.url, failure], server.outages_in_all[failure])
        yield outages
        yield _by_server(
            CounterMetricFamily,
            "errors",
            "Answers with a status of 500 or more",
            servers,
            lambda one: one.errors_in_all,
        )
        yield _by_server(CounterMetricFamily, "answered", "Answers", servers, lambda one: one.answered)
        yield _by_server(
            CounterMetricFamily,
            "failed",
            "Requests that it broke off, or never got",
            servers,
            lambda one: one.failed,
        )
        for name, count in self._hints.items():
            yield CounterMetricFamily(f"attnstore_gateway_hints_{name}", HINTS[name], value=count)


def _by_server(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_: str,
    servers: Sequence[Server],
    value: Callable[[Server], float],
) -> Metric:
    family = kind(f"attnstore_gateway_{name}", help_, labels=["server"])
    for server in servers:
        family.add_metric([server.url], value(server))
    return family
