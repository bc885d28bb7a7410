"""What a queue knows of the future, told to the daemon: which sessions' KV will be asked for, and in which order.

`HintedQueue` is a `JobQueue` that tells by itself; its user calls what he called before. Telling is best effort and on
a thread of its own: a daemon that is slow, or away, costs the scheduler nothing but time that it could have saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.client import Hint
from kvstore.errors import NotFound, StoreError
from kvstore.scheduler.job_queue import Job, JobQueue

if TYPE_CHECKING:
    from kvstore.client import Client

log = logging.getLogger(__name__)

JOBS_MAX = 1024
"""How far into the queue hints reach: the daemon clips them to the memory it has."""
TTL_MS = 30_000
"""Hints of a scheduler that died end after this; a living one repeats them in time."""
TIMEOUT_S = 1.0
RETRY_S = 0.1
"""How soon what was not heard is said again, and how soon a new daemon is noticed."""
UNKNOWN_S = 120.0
"""A worker may take so long to load its model and open it; if none has by then, the name may be wrong."""


def hints_of(queue: JobQueue) -> list[Hint]:
    """The queue in order, the running jobs first: their KV is in use, or will be in a moment."""
    hints = []
    for position, job in enumerate((*queue.running, *queue.waiting)[:JOBS_MAX]):
        hints.append(Hint(b"%d" % position, position, session=job.session.encode()))
    return hints


class Publisher:
    """A thread that publishes the newest snapshot, soon after each change, to a daemon that was started anew, and again
    before it expires.

    `counters`: published, failed (told to the log once in a row), unknown (no worker has opened the model; told to the
    log when jobs have waited for it for UNKNOWN_S).
    """

    def __init__(self, client: Client, model: str, snapshot: Callable[[], list[Hint]]) -> None:
        self._client = client
        self._model = model
        self._snapshot = snapshot
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._heard = True
        self._unknown_since: float | None = None
        self.counters = {"published": 0, "failed": 0, "unknown": 0}
        self._thread = threading.Thread(target=self._run, name="kv-hints", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        self._changed.set()

    def close(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        due = 0.0
        told = b""
        while not self._stop.is_set():
            changed = self._changed.wait(RETRY_S)
            # A daemon that was started anew knows nothing of the queue, and hints end by themselves.
            if not changed and time.monotonic() < due and self._client.boot_id == told:
                continue
            self._changed.clear()
            if self._publish():
                due = time.monotonic() + TTL_MS / 3000
                told = self._client.boot_id

    def _publish(self) -> bool:
        """False: try again soon."""
        hints = self._snapshot()
        try:
            self._client.publish_queue(self._model, hints, ttl_ms=TTL_MS, timeout_s=TIMEOUT_S)
        except NotFound:
            self.counters["unknown"] += 1
            if hints:
                self._unknown()
            return False
        except StoreError as error:
            self.counters["failed"] += 1
            if self._heard:
                log.warning("hints are not heard: %s", error)
            self._heard = False
            return False
        self.counters["published"] += 1
        self._heard = True
        self._unknown_since = None
        return True

    def _unknown(self) -> None:
        """No worker has opened the model, so there is nothing to bring: yet, or because its name is another."""
        now = time.monotonic()
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since >= UNKNOWN_S:
            self._unknown_since = float("inf")  # said once
            log.warning(
                "model=%s: no worker has opened it, so hints wait (is it the name that workers give their namespace? "
                "See kvctl namespaces)",
                self._model,
            )


class HintedQueue(JobQueue):
    """A `JobQueue` whose every change reaches the daemon as a hint."""

    def __init__(self, client: Client, model: str) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._publisher = Publisher(client, model, self._hints)

    @property
    def published(self) -> int:
        return self._publisher.counters["published"]

    def put(self, job: Job) -> None:
        with self._lock:
            super().put(job)
        self._publisher.changed()

    def start(self) -> Job | None:
        with self._lock:
            job = super().start()
        self._publisher.changed()
        return job

    def finish(self, job: Job) -> None:
        with self._lock:
            super().finish(job)
        self._publisher.changed()

    def give_back(self, job: Job) -> None:
        with self._lock:
            super().finish(job)
            self._waiting.appendleft(job)
        self._publisher.changed()

    def close(self) -> None:
        self._publisher.close()

    def _hints(self) -> list[Hint]:
        with self._lock:
            return hints_of(self)
