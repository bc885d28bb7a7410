"""Requests of a server, some at a time, the others in line: the line is what the daemon is told.

For whoever answers requests on an event loop: a gateway with FastAPI, a deployment of Ray Serve.

    turns = Turns(client, "my-model", at_once=4)
    ...
    async with turns.of("chat 7"):
        ...  # this request runs: at most four do, and of one session one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from kvstore.scheduler.hints import AsyncHintedQueue
from kvstore.scheduler.job_queue import Job

if TYPE_CHECKING:
    from kvstore.client import AsyncClient


class Turns:
    """First come, first served; a session's next turn waits for its last one. Made and used on one event loop."""

    def __init__(self, client: AsyncClient, model: str, *, at_once: int = 1) -> None:
        self._queue = AsyncHintedQueue(client, model)
        self._at_once = at_once
        self._may_run: dict[int, asyncio.Event] = {}
        """By the id of a job that waits."""

    def __repr__(self) -> str:
        return f"Turns({self._queue!r}, {self._at_once} at once)"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def counters(self) -> dict[str, int]:
        """See `hints.Telling`."""
        return self._queue.counters

    @asynccontextmanager
    async def of(self, session: str) -> AsyncIterator[None]:
        """Its turn, when it comes. Who is cancelled leaves the line."""
        job = Job(session, (), 0)
        self._queue.put(job)
        may_run = self._may_run[id(job)] = asyncio.Event()
        self._start()
        try:
            await may_run.wait()
            yield
        finally:
            del self._may_run[id(job)]
            if may_run.is_set():
                self._queue.finish(job)
            else:
                self._queue.withdraw(job)
            self._start()

    async def close(self) -> None:
        """Nothing is told any more; those in line still come to their turns. Idempotent."""
        await self._queue.close()

    def _start(self) -> None:
        while len(self._queue.running) < self._at_once and (job := self._queue.start()) is not None:
            self._may_run[id(job)].set()
