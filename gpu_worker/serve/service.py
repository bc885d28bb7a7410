"""The engine's own thread, and how an event loop asks it for things.

    event loop                               the engine's thread
    submit, abort, call ──commands──▶        all commands that are there, then a step, and so on
    Job.outputs         ◀──outputs───        each step's tokens, in one call of the loop

The loop never waits for a step, and the thread never waits for a client: what a job does not read stays in its queue,
which no more tokens come to than its request may have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvstore.errors import Exhausted, Unavailable
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine, Output
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import Sampler, Sampling
from kvstore.gpu_worker.truncation import Turns
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

T = TypeVar("T")
FAILURES_MAX = 3
"""So many steps in a row that raised make the worker unhealthy."""
RETRY_AFTER_MAX_S = 60
log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The engine raised in a step: the requests that were live got no more tokens."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants computed."""

    tokens: Sequence[int]
    max_new_tokens: int
    session: str = ""
    root: ChunkKey = ROOT
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = ()
    turns: Turns | None = None
    """Of a chat, for a worker that cuts long ones."""
    cut: bool = True
    """Whether it may be cut."""
    assembly: Assembly | None = None
    sampler: Sampler | None = None
    """Chooses the tokens, instead of one that is made from `sampling`."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `begun`, `first` and `ended` are times of the monotonic clock, in seconds."""

    begun: float
    first: float = 0.0
    ended: float = 0.0
    finish: str = ""
    request: Request = field(init=False)
    """Once the engine has taken it; what it says of itself changes until it has ended."""
    _asked: bool = False
    """The engine has not said yet whether it takes it."""
    _unwanted: bool = False
    """The client went away before the engine took it."""
    _queue: asyncio.Queue[Output | Exception] = field(default_factory=asyncio.Queue)

    @property
    def ttft_s(self) -> float:
        return self.first - self.begun

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """As they come, to the last. Raises StepFailed, and Unavailable when the service ends."""
        while True:
            output = await self._queue.get()
            if isinstance(output, Exception):
                raise output
            yield output
            if output.finish:
                return


class Service:
    """One engine for many clients. Its methods belong to the event loop; `ended` hears of every job that is over, there
    too."""

    def __init__(self, engine: BatchEngine, *, ended: Callable[[Job], None] = lambda job: None) -> None:
        self.engine = engine
        self.failure = ""
        """Why the worker is unhealthy; "" while it is not."""
        self._ended = ended
        self._jobs: dict[int, Job] = {}
        self._asked = 0
        """Requests that the engine has not taken yet."""
        self._request_s = 0.0
        """How long a request runs, averaged over the last ones."""
        self._broken = ""
        """Why the engine computes nothing any more; of its thread."""
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def live(self) -> int:
        return len(self._jobs) + self._asked

    @property
    def retry_after_s(self) -> int:
        """When a place in the queue is likely to be free."""
        engine = self.engine
        wait = self._request_s * max(1, self.live - engine.waiting_max) / engine.sequences_max
        return min(max(1, math.ceil(wait)), RETRY_AFTER_MAX_S)

    async def submit(self, ask: Ask) -> Job:
        """Raises ValueError for what cannot be computed, Exhausted when too many wait, Unavailable at the end."""
        self._check_open()
        most = self.engine.sequences_max + self.engine.waiting_max
        if self.live >= most:  # said at once, not after a step
            self.engine.counters["requests_rejected"] += 1
            raise Exhausted("too many requests wait", field="waiting_max", value=self.engine.waiting_max)
        job = Job(time.monotonic())
        self._asked += 1
        job._asked = True
        try:
            await asyncio.wrap_future(self._submit_command(partial(self._add, ask, job)))
        except asyncio.CancelledError:
            job._unwanted = True
            if job in self._jobs.values():
                self.abort(job)
            raise
        finally:
            self._answered(job)
        return job

    def abort(self, job: Job) -> None:
        """It gets no more tokens; nothing happens if it is over."""
        if self._jobs.pop(job.request.number, None) is not None:
            self._end(job, "abort")
            self._commands.put(partial(self.engine.abort, job.request.number))

    def is_live(self, job: Job) -> bool:
        """Whether it gets tokens yet."""
        return self._jobs.get(job.request.number) is job

    async def call(self, what: Callable[[BatchEngine], T]) -> T:
        """Between two steps."""
        self._check_open()
        return await asyncio.wrap_future(self._submit_command(lambda: what(self.engine)))

    async def close(self, timeout_s: float) -> None:
        """Ends all jobs, saves what is queued, for at most `timeout_s`, and closes the engine."""
        self._closing = True
        for job in list(self._jobs.values()):
            job._queue.put_nowait(Unavailable("the worker is shutting down", remedy="ask another one"))
            self.abort(job)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.close, timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the worker is shutting down", remedy="ask another one")

    def _end(self, job: Job, finish: str) -> None:
        job.finish, job.ended = finish, time.monotonic()
        if finish != "abort":
            took = job.ended - job.begun
            self._request_s = took if not self._request_s else 0.9 * self._request_s + 0.1 * took
        self._ended(job)

    def _answered(self, job: Job) -> None:
        """The engine has taken it or not: it is counted once."""
        self._asked -= job._asked
        job._asked = False

    def _register(self, job: Job) -> None:
        self._answered(job)
        self._jobs[job.request.number] = job
        if job._unwanted:
            self.abort(job)

    def _take(self, outputs: Sequence[Output]) -> None:
        """What a step brought; in the loop."""
        now = time.monotonic()
        self.failure = ""  # it computes again
        for output in outputs:
            job = self._jobs.get(output.request)
            if job is None:
                continue  # aborted
            job.first = job.first or now
            job._queue.put_nowait(output)
            if output.finish:
                del self._jobs[output.request]
                self._end(job, output.finish)

    def _fail(self, failure: str, unhealthy: bool) -> None:
        self.failure = failure if unhealthy else self.failure
        for job in list(self._jobs.values()):
            job._queue.put_nowait(StepFailed(failure))
            del self._jobs[job.request.number]
            self._end(job, "error")

    # ---------------------------------------------------------------------------------------- the engine's thread

    def _submit_command(self, what: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._broken:
                    raise StepFailed(self._broken)
                done.set_result(what())
            except Exception as error:
                done.set_exception(error)

        self._commands.put(command)
        return done

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                command = self._commands.get(block=bool(self._broken) or not self.engine.live)
            except queue.Empty:
                failures = self._step(failures)
                continue
            if command is None:
                return
            try:
                command()
            except Exception as error:
                self._break_down(error)

    def _step(self, failures: int) -> int:
        try:
            outputs = self.engine.step()
        except Exception as error:
            # A bug, or a model that cannot compute: said here, and to all whose requests were live.
            log.exception("a step failed")
            try:
                self.engine.abort_all()  # at once: a request that is taken later must not be stopped unheard
            except Exception as worse:
                self._break_down(worse)
            else:
                self._tell(partial(self._fail, f"a step failed: {error!r}", failures + 1 >= FAILURES_MAX))
            return failures + 1
        if outputs:
            self._tell(partial(self._take, outputs))
        return 0

    def _break_down(self, error: Exception) -> None:
        """A bug. The engine is in no known state: nothing more is computed, and everybody hears why."""
        log.error("the engine broke down", exc_info=error)
        self._broken = f"the engine broke down: {error!r}"
        self._tell(partial(self._fail, self._broken, True))

    def _tell(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has ended: nobody listens any more
            log.debug("nobody heard of a step", exc_info=True)

    def _add(self, ask: Ask, job: Job) -> None:
        number = self.engine.add(
            ask.tokens,
            ask.max_new_tokens,
            session=ask.session,
            root=ask.root,
            sampling=ask.sampling,
            stop_tokens=ask.stop_tokens,
            turns=ask.turns,
            cut=ask.cut,
            assembly=ask.assembly,
            sampler=ask.sampler,
        )
        job.request = self.engine.request(number)
        self._tell(partial(self._register, job))  # ahead of its first token
