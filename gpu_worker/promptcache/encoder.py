"""Computes the KV of modules behind the requests of clients: what a prompt missed is a hit for the next one.

One module at a time, by the engine that serves, so that it shares its steps with whoever decodes. After each one the
encoder rests as long as it took while clients wait: they lose no more than half of the machine to it, and a schema that
is edited again and again no more than that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from kvstore.errors import Exhausted, StoreError
from kvstore.gpu_worker.promptcache.plan import Job
from kvstore.gpu_worker.serve.service import Ask, Service, StepFailed
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

WAITING_MAX = 4096
AGAIN_S = 30.0
"""After an encoding that failed, or brought nothing into the store."""
DONE_MAX = 4096
SAVE_S = 60.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class EncodeQueue:
    """Which module is encoded next: those that were asked for first; each once, however many prompts miss it. What was
    encoded lately is not encoded again before `AGAIN_S`: its save may be under way, or find no room."""

    waiting: OrderedDict[ChunkKey, tuple[Job, ChunkKey]] = field(default_factory=OrderedDict)
    """By first key: the job, and its tenant's root."""
    not_before: OrderedDict[ChunkKey, float] = field(default_factory=OrderedDict)
    dropped: int = 0

    def want(self, jobs: Iterable[Job], root: ChunkKey, now: float) -> int:
        """How many are new."""
        new = 0
        for job in jobs:
            known = job.keys[-1]
            if known in self.waiting or self.not_before.get(known, 0.0) > now:
                continue
            if len(self.waiting) >= WAITING_MAX:
                self.dropped += 1
                continue
            self.waiting[known] = job, root
            new += 1
        return new

    def take(self, now: float) -> tuple[Job, ChunkKey] | None:
        if not self.waiting:
            return None
        known, (job, root) = self.waiting.popitem(last=False)
        self.not_before[known] = now + AGAIN_S
        self.not_before.move_to_end(known)
        while len(self.not_before) > DONE_MAX:
            self.not_before.popitem(last=False)
        return job, root


class Encoder:
    """Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self.queue = EncodeQueue()
        self.encoded = 0
        self.failed = 0
        self._service = service
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def left(self) -> int:
        """Modules that are to be encoded, the one that is being encoded included."""
        return len(self.queue.waiting) + (not self._idle.is_set())

    def want(self, jobs: Iterable[Job], root: ChunkKey = ROOT) -> None:
        if self.queue.want(jobs, root, time.monotonic()):
            self._idle.clear()
            self._wake.set()

    async def settled(self) -> None:
        """Until nothing waits to be encoded."""
        await self._idle.wait()

    async def encode(self, job: Job, root: ChunkKey = ROOT) -> None:
        """Raises ValueError for one that the engine cannot hold, Exhausted, Unavailable, StepFailed."""
        ask = Ask(tokens=job.assembly.tokens, max_new_tokens=1, root=root, assembly=job.assembly)
        running = await self._service.submit(ask)
        try:
            async with aclosing(running.outputs()) as outputs:
                async for output in outputs:
                    if output.finish == "error":
                        raise StepFailed("the model's logits are no numbers")
        finally:
            self._service.abort(running)

    async def _run(self) -> None:
        while True:
            found = self.queue.take(time.monotonic())
            if found is None:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            job, root = found
            begun = time.monotonic()
            try:
                await self.encode(job, root)
                self.encoded += 1
            except Exhausted:
                self.queue.not_before.pop(job.keys[-1], None)
                self.queue.want([job], root, begun)
                await asyncio.sleep(1.0)
                continue
            except (ValueError, StepFailed, StoreError) as error:
                self.failed += 1
                log.warning("%s was not encoded: %s", job.name, error)
            if self._service.live:
                await asyncio.sleep(time.monotonic() - begun)

    async def flush(self) -> bool:
        """What was encoded is in the store, or dropped; False if that takes too long."""
        return await asyncio.to_thread(self._service.engine.flush, SAVE_S)
