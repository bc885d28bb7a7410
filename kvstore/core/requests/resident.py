"""What workers keep in memory of their own (HBM): for operators and routers. The answer says how soon it is needed.

A report is a snapshot: it replaces what the worker said before of the namespace, and ends after a while, or with its
worker. It moves nothing here, and nothing here depends on it: a worker may drop what it reported at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.core import events as ev
from kvstore.core.chunks import NONE
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.reads import clip_ttl
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.types import ChunkKey, Millis, NamespaceId, WorkerId

NAMESPACES_MAX = 4
"""Of one worker: of more, those that were reported longest ago are forgotten."""


@dataclass(frozen=True, slots=True)
class Report:
    keys: frozenset[ChunkKey]
    until: Millis


class Residents:
    def __init__(self, state: State) -> None:
        self.state = state
        self.reports: dict[NamespaceId, dict[WorkerId, Report]] = {}

    def __repr__(self) -> str:
        return f"Residents({sum(map(len, self.reports.values()))} reports)"

    def report(self, worker: Worker, event: ev.ReportResident) -> ev.ResidentRanks:
        """Takes the report over; which of its chunks queued jobs need."""
        state = self.state
        namespace = state.own_namespace(worker, event.namespace)
        self._drop(worker.id, namespace.id)
        if event.keys:
            limits = state.limits
            ttl_ms = clip_ttl(event.ttl_ms, limits.hint_ttl_ms, limits.hint_ttl_max_ms)
            mine = [number for number, workers in self.reports.items() if worker.id in workers]
            if len(mine) >= NAMESPACES_MAX:
                oldest = min(mine, key=lambda number: (self.reports[number][worker.id].until, number))
                self._drop(worker.id, oldest)
            workers = self.reports.setdefault(namespace.id, {})
            workers[worker.id] = Report(frozenset(event.keys), state.now + ttl_ms)
        return ev.ResidentRanks(self.ranks(namespace, event.keys))

    def ranks(self, namespace: Namespace, keys: tuple[ChunkKey, ...]) -> tuple[int, ...]:
        """Of each key 0 if no job inside the eviction window needs it; else its place, from 1 on, among those that are
        needed: what is needed first has 1."""
        needed = self.state.policy.rank
        found = [needed.get(namespace.index.get(key, NONE)) for key in keys]
        places = {
            rank: place for place, rank in enumerate(sorted(rank for rank in {*found} if rank is not None), 1)
        }
        return tuple(places[rank] if rank is not None else 0 for rank in found)

    def groups(self, namespace: Namespace, key: ChunkKey) -> tuple[str, ...]:
        """The engine groups whose workers have it."""
        workers = self.state.workers
        having = [worker for worker, keys in self._valid(namespace.id) if key in keys]
        return tuple(sorted({workers[worker].group.name for worker in having}))

    def count(self, namespace: NamespaceId) -> int:
        """Chunks in the memory of all workers together."""
        return sum(len(keys) for _, keys in self._valid(namespace))

    def _valid(self, namespace: NamespaceId) -> Iterator[tuple[WorkerId, frozenset[ChunkKey]]]:
        """Reports that are not over, whether or not the clock's tick has dropped those that are."""
        now = self.state.now
        for worker, report in self.reports.get(namespace, {}).items():
            if report.until > now:
                yield worker, report.keys

    def forget(self, worker: WorkerId) -> None:
        for namespace in [number for number, workers in self.reports.items() if worker in workers]:
            self._drop(worker, namespace)

    def tick(self) -> None:
        now = self.state.now
        over = [
            (worker, number)
            for number, workers in self.reports.items()
            for worker, report in workers.items()
            if report.until <= now
        ]
        for worker, number in over:
            self._drop(worker, number)

    def _drop(self, worker: WorkerId, namespace: NamespaceId) -> None:
        workers = self.reports.get(namespace)
        if workers is not None and workers.pop(worker, None) is not None and not workers:
            del self.reports[namespace]

    def check(self) -> None:
        """The bounds; raises AssertionError."""
        of_worker: dict[WorkerId, int] = {}
        for number, workers in self.reports.items():
            assert workers and number in self.state.namespaces, (number, workers)
            for worker, report in workers.items():
                assert worker in self.state.workers and not self.state.workers[worker].closed, worker
                assert number in self.state.workers[worker].opened, (worker, number)
                assert report.keys, (worker, number)
                of_worker[worker] = of_worker.get(worker, 0) + 1
        assert max(of_worker.values(), default=0) <= NAMESPACES_MAX, of_worker
