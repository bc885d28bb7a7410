"""What a queue knows of the future, told to the daemon: which sessions' KV will be asked for, and in which order.

`HintedQueue` is a `JobQueue` that tells by itself, and `AsyncHintedQueue` the same on an event loop. Their user calls
what he called before. Telling is best effort and on a thread or task of its own: a daemon that is slow, or away, costs
the scheduler nothing but time that it could have saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from kvstore.client import Hint, QueueAccepted
from kvstore.errors import NotFound, StoreError
from kvstore.scheduler.job_queue import Job, JobQueue
from kvstore.types import SESSION_NAME_BYTES_MAX, HintResult

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Client

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
        try:
            session = job.session.encode(errors="surrogateescape")
        except (
            AttributeError,
            UnicodeEncodeError,
        ):  # no text, or half a character: its turn is computed all the same
            continue
        if 1 <= len(session) <= SESSION_NAME_BYTES_MAX:  # else the daemon would refuse them all
            hints.append(Hint(b"%d" % position, position, session=session))
    return hints


class Telling:
    """What became of the snapshots that were published, and when the next one is due: the same for a thread and a task.

    `counters`: published (snapshots of which the daemon took something, or that were empty), rejected (hints: their
    sessions nobody has recorded; told to the log once), failed (snapshots; told to the log once in a row), unknown
    (snapshots: no worker has opened the model; told to the log when jobs have waited for it for UNKNOWN_S).
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._heard = True
        self._unknown_since: float | None = None
        self._due = 0.0
        self._told = b""
        self.counters = {"published": 0, "rejected": 0, "failed": 0, "unknown": 0}

    def is_due(self, boot_id: bytes) -> bool:
        """Without a change: hints end by themselves, and a daemon that was started anew knows nothing of the queue."""
        return time.monotonic() >= self._due or boot_id != self._told

    def taken(self, hints: Sequence[Hint], answer: QueueAccepted | None, boot_id: bytes) -> None:
        results = () if answer is None else answer.results
        rejected = [
            hint for hint, result in zip(hints, results, strict=False) if result is HintResult.REJECTED
        ]
        if rejected:
            if not self.counters["rejected"]:
                self._warn_of(rejected, len(hints))
            self.counters["rejected"] += len(rejected)
        if not hints or len(rejected) < len(hints):
            self.counters["published"] += 1
        self._heard = True
        self._unknown_since = None
        self._due = time.monotonic() + TTL_MS / 3000
        self._told = boot_id

    def _warn_of(self, rejected: Sequence[Hint], hints: int) -> None:
        log.warning(
            "model=%s: %d of %d hints were rejected, because no worker has recorded their sessions (the first: %r), so "
            "nothing is brought ahead for them. Of a session's first turn that is as it should be; later, have the "
            "worker record what it saved (Namespace.update_session), under the name that the job has, or publish "
            "chunk keys (Hint(keys=...)). Told once: see counters['rejected']",
            self._model,
            len(rejected),
            hints,
            rejected[0].session,
        )

    def refused(self, hints: Sequence[Hint], error: StoreError) -> None:
        if isinstance(error, NotFound):
            self.counters["unknown"] += 1
            if hints:
                self._unknown()
            return
        self.counters["failed"] += 1
        if self._heard:
            log.warning("hints are not heard: %s", error)
        self._heard = False

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


class Publisher:
    """A thread that publishes the newest snapshot, soon after each change, to a daemon that was started anew, and again
    before it expires. For `counters` see `Telling`."""

    def __init__(self, client: Client, model: str, snapshot: Callable[[], list[Hint]]) -> None:
        self._client = client
        self._model = model
        self._snapshot = snapshot
        self._telling = Telling(model)
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-hints", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> dict[str, int]:
        return self._telling.counters

    def changed(self) -> None:
        self._changed.set()

    def close(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        again = False
        while not self._stop.is_set():
            changed = self._changed.wait(RETRY_S)
            if not (changed or again or self._telling.is_due(self._client.boot_id)):
                continue
            self._changed.clear()
            again = not self._publish()

    def _publish(self) -> bool:
        """False: try again soon."""
        hints = self._snapshot()
        try:
            answer = self._client.publish_queue(self._model, hints, ttl_ms=TTL_MS, timeout_s=TIMEOUT_S)
        except StoreError as error:
            self._telling.refused(hints, error)
            return False
        self._telling.taken(hints, answer, self._client.boot_id)
        return True


class HintedQueue(JobQueue):
    """A `JobQueue` whose every change reaches the daemon as a hint."""

    def __init__(self, client: Client, model: str) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._publisher = Publisher(client, model, self._hints)

    @property
    def published(self) -> int:
        """Snapshots of which the daemon took something."""
        return self._publisher.counters["published"]

    @property
    def rejected(self) -> int:
        """Hints whose sessions nobody had recorded, so that nothing is brought ahead for them."""
        return self._publisher.counters["rejected"]

    @property
    def counters(self) -> dict[str, int]:
        """See `Telling`."""
        return dict(self._publisher.counters)

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


class AsyncHintedQueue(JobQueue):
    """A `JobQueue` of an event loop whose every change reaches the daemon as a hint, told by a task. `put`, `start`,
    `finish` and `give_back` never wait. Made and used on the loop's thread; `async with`, or `close`, ends the task."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        super().__init__()
        self._client = client
        self._model = model
        self._telling = Telling(model)
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kv-hints")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def published(self) -> int:
        """Snapshots of which the daemon took something."""
        return self._telling.counters["published"]

    @property
    def rejected(self) -> int:
        """Hints whose sessions nobody had recorded, so that nothing is brought ahead for them."""
        return self._telling.counters["rejected"]

    @property
    def counters(self) -> dict[str, int]:
        """See `Telling`."""
        return dict(self._telling.counters)

    def put(self, job: Job) -> None:
        super().put(job)
        self._changed.set()

    def start(self) -> Job | None:
        job = super().start()
        self._changed.set()
        return job

    def finish(self, job: Job) -> None:
        super().finish(job)
        self._changed.set()

    def give_back(self, job: Job) -> None:
        super().give_back(job)
        self._changed.set()

    async def close(self) -> None:
        """Nothing is told any more. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        again = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_S)
            if not (self._changed.is_set() or again or self._telling.is_due(self._client.boot_id)):
                continue
            self._changed.clear()
            hints = hints_of(self)
            try:
                answer = await self._client.publish_queue(
                    self._model, hints, ttl_ms=TTL_MS, timeout_s=TIMEOUT_S
                )
            except StoreError as error:
                self._telling.refused(hints, error)
                again = True
                continue
            self._telling.taken(hints, answer, self._client.boot_id)
            again = False
