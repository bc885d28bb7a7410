"""Hints of an RQ queue (https://python-rq.org): jobs wait in Redis, and RQ's own workers take them.

Who enqueues says which conversation a job belongs to; `RQHints`, in any one process, looks into the queue and tells the
daemon who comes next. Neither those who enqueue nor the workers know of it:

    queue = rq.Queue("turns", connection=redis.Redis())
    queue.enqueue(answer, tokens, meta={"session": "chat 7"})

    with kvstore.client.connect("/tmp/kv") as client, RQHints(client, "my-model", queue):
        ...
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from redis.exceptions import RedisError
from rq.job import Job

from kvstore.scheduler.hints import JOBS_MAX, Publisher

if TYPE_CHECKING:
    from rq import Queue

    from kvstore.client import Client

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often the queue is looked at: two requests to Redis, and one more for jobs that are new."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A job as the hints know it."""

    job_id: str
    session: str


def session_in_meta(meta: Mapping[str, Any]) -> str:
    """`enqueue(..., meta={"session": ...})`."""
    session = meta.get("session", "")
    return session if isinstance(session, str) else ""


class RQHints:
    """Tells the daemon which jobs of `queue` run and come next, for as long as it is open.

    `session_of` finds the session's name in a job's `meta`; jobs without one ("") are left out. RQ unpickles `meta`,
    also here: who may write to that Redis may run code in this process, unless the queue has RQ's JSONSerializer. A
    Redis that does not answer is told to the log once, and costs nothing but hints: the last ones end by themselves.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        queue: Queue,
        *,
        session_of: Callable[[Mapping[str, Any]], str] = session_in_meta,
    ) -> None:
        self._queue = queue
        self._session_of = session_of
        self._turns: dict[str, Turn] = {}
        """By job id, the running ones first, then in the order of the queue."""
        self._lock = threading.Lock()
        self._away = False
        self._stop = threading.Event()
        self._publisher = Publisher(client, model, self._ahead)
        self._thread = threading.Thread(target=self._run, name="kv-rq-hints", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> dict[str, int]:
        """See `hints.Telling`."""
        return dict(self._publisher.counters)

    def close(self) -> None:
        """Nothing is told any more. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._publisher.close()

    def _ahead(self) -> list[Turn]:
        with self._lock:
            return list(self._turns.values())

    def _run(self) -> None:
        while True:
            try:
                self._look()
                self._away = False
            except RedisError as error:
                if not self._away:
                    log.warning("queue=%s: Redis does not answer, so hints wait: %s", self._queue.name, error)
                self._away = True
            if self._stop.wait(LOOK_S):
                return

    def _look(self) -> None:
        # With a cleanup, RQ would end jobs whose worker is gone: that is for its workers to do
        running = self._queue.started_job_registry.get_job_ids(cleanup=False)
        waiting = self._queue.get_job_ids(0, JOBS_MAX)
        ids = list(dict.fromkeys((*running, *waiting)))[:JOBS_MAX]
        if ids == list(self._turns):
            return
        new = self._new_turns([job_id for job_id in ids if job_id not in self._turns])
        turns = {job_id: self._turns.get(job_id) or new[job_id] for job_id in ids}
        with self._lock:
            self._turns = turns
        self._publisher.changed()

    def _new_turns(self, ids: Sequence[str]) -> dict[str, Turn]:
        pipeline = self._queue.connection.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hget(Job.key_for(job_id), "meta")
        kept = pipeline.execute()
        return {
            job_id: Turn(job_id, self._session(job_id, meta)) for job_id, meta in zip(ids, kept, strict=True)
        }

    def _session(self, job_id: str, meta: bytes | None) -> str:
        try:
            return self._session_of(self._queue.serializer.loads(meta)) if meta else ""
        except Exception as error:  # whatever unpickling raises: the job's worker will tell of it
            log.debug("job=%s: its meta cannot be read: %r", job_id, error)
            return ""
