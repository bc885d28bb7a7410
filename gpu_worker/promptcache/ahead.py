"""Tells the daemon which modules the prompts that wait will import, so that what is on SSD is in DRAM when they run.

    prompts in the worker's queue, in their order   -> PublishQueue: their modules are promoted in that order
    other members of the unions that they choose of -> PREFETCH: behind all queued jobs, in what bandwidth is left

Told on a thread of its own and only while prompts wait; a daemon that does not hear it costs nothing but that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import StoreError
from kvstore.gpu_worker.promptcache.prompts import Planned
from kvstore.gpu_worker.serve.service import Job
from kvstore.types import ActionKind, ChunkKey, Hint, HintAction

if TYPE_CHECKING:
    from kvstore.client import Namespace

LOOK_S = 0.05
"""How often the queue is looked at while prompts wait: who runs at once is told nobody."""
JOBS_MAX = 256
JOBS_WITH_SIBLINGS_MAX = 16
"""Of the queue's first jobs, for which siblings are named, too."""
TTL_MS = 30_000
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt in the queue."""

    name: bytes
    keys: tuple[ChunkKey, ...]
    siblings: tuple[ChunkKey, ...]


class Ahead:
    """Belongs to the event loop."""

    def __init__(
        self, namespace: Callable[[], Namespace | None], is_live: Callable[[Job], bool] = lambda job: True
    ) -> None:
        """`is_live`: whether somebody still wants it."""
        self.told = 0
        self._namespace = namespace
        self._is_live = is_live
        self._jobs: dict[int, tuple[Job, Waiting]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def queued(self, planned: Planned, job: Job) -> None:
        if planned.assembly is None:
            return
        keys = tuple(dict.fromkeys(part.key for part in planned.assembly.parts))
        number = job.request.number
        self._jobs[number] = job, Waiting(b"pml%d" % number, keys, planned.siblings)
        self._wake.set()

    def left(self, job: Job) -> None:
        """It runs, or nobody wants it any more."""
        self._jobs.pop(job.request.number, None)

    async def _run(self) -> None:
        before: list[Waiting] = []
        while True:
            if not self._jobs and not before:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(LOOK_S)
            for number, (job, _) in list(self._jobs.items()):
                if job.request.row >= 0 or not self._is_live(job):
                    del self._jobs[number]
            waiting = [waits for _, (_, waits) in sorted(self._jobs.items())][:JOBS_MAX]
            if waiting == before:
                continue
            namespace = self._namespace()
            if namespace is not None:
                await asyncio.to_thread(tell, namespace, waiting)
                self.told += 1
            before = waiting


def tell(namespace: Namespace, waiting: Sequence[Waiting]) -> None:
    """All of the queue, in the order in which it will run."""
    hints = [
        Hint(waits.name, position, keys=waits.keys) for position, waits in enumerate(waiting) if waits.keys
    ]
    actions = {
        _name_of(waits.siblings): HintAction(
            _name_of(waits.siblings), ActionKind.PREFETCH, keys=waits.siblings, ttl_ms=TTL_MS
        )
        for waits in waiting[:JOBS_WITH_SIBLINGS_MAX]
        if waits.siblings
    }
    try:
        namespace.publish_queue(hints, ttl_ms=TTL_MS)
        if actions:
            namespace.apply_actions(list(actions.values()))
    except StoreError as error:
        log.debug("the daemon was not told which modules come: %s", error)


def _name_of(keys: Sequence[ChunkKey]) -> bytes:
    return b"siblings" + hashlib.blake2b(b"".join(keys), digest_size=16).digest()
