"""A queue that lives in a Ray actor: drivers put jobs, workers take them, and the daemon knows who comes next.

    line = ray.remote(QueueActor).options(name="turns", resources={"node:<the daemon's>": 0.01}).remote("/tmp/kv", "m")
    ray.get(line.put.remote(Job("chat 7", tokens, 64)))
    number, job = ray.get(line.start.remote())  # in a worker, which says line.finish.remote(number) when it is done

The actor must run on the machine of the daemon whose hints these are. A Ray Serve deployment needs no such actor: its
requests are in line in each replica (`turns.Turns`). Nothing here imports Ray.
"""

from __future__ import annotations

from functools import partial
from itertools import count

from kvstore.client import connect_async
from kvstore.scheduler.hints import AsyncHintedQueue
from kvstore.scheduler.job_queue import Job


class QueueActor:
    """Its methods are awaited, so Ray runs them all on one event loop. Jobs that run go by numbers: what a worker sends
    back is a copy. A daemon that is away, from the beginning or later, costs hints and no job."""

    def __init__(self, run_dir: str, model: str) -> None:
        self._run_dir = run_dir
        self._model = model
        self._queue: AsyncHintedQueue | None = None
        self._numbers = count(1)
        self._running: dict[int, Job] = {}

    async def put(self, job: Job) -> None:
        self._opened().put(job)

    async def start(self) -> tuple[int, Job] | None:
        """The first job whose session is idle, with its number; None if there is none."""
        job = self._opened().start()
        if job is None:
            return None
        number = next(self._numbers)
        self._running[number] = job
        return number, job

    async def finish(self, number: int) -> None:
        """The job was answered. Raises KeyError if no such job runs."""
        self._opened().finish(self._running.pop(number))

    async def give_back(self, number: int) -> None:
        """The job's worker is gone: it is the next to be started again. Raises KeyError if no such job runs."""
        self._opened().give_back(self._running.pop(number))

    async def counters(self) -> dict[str, int]:
        """See `hints.Telling`."""
        return self._opened().counters

    def _opened(self) -> AsyncHintedQueue:
        """Made in the first call: only there is the loop."""
        if self._queue is None:
            self._queue = AsyncHintedQueue(partial(connect_async, self._run_dir), self._model)
        return self._queue
