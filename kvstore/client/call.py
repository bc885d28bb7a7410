"""One request and its answer, and how operations made of several steps run, awaited or not.

An operation (read, write, ...) is written once, as a generator that yields what must be waited for: a `Call`, or a
function that blocks (descriptors over the socket, waiting for the connection). `drive` runs it on the caller's
thread, `drive_async` on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from kvstore.errors import StoreError, Unavailable
from kvstore.v1 import store_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")
Reply = store_pb2.AttachReply | StoreError
"""What a request got: failures are values here, raised only by who wants to."""

FORKED = "this is a forked child: the connection is its parent's"


def gone(why: str) -> Unavailable:
    return Unavailable(why, remedy="recompute; the client reconnects by itself")


def closed() -> Unavailable:
    return Unavailable("the client is closed", remedy="connect again")


class Answers(Protocol):
    """What a call, and who gives one up, asks of the attachment that carries it."""

    pid: int

    def later(self, work: Callable[[], None]) -> None: ...

    def listen(self) -> None: ...

    def wait_for(self, call: Call) -> None: ...

    def abandon(self, call: Call) -> None: ...


class Call:
    """A request under way. It always gets an answer: the daemon's, or ours once the deadline has passed.

    `on_reply` is called (on the thread that receives) with the daemon's answer whenever it comes, `on_late` when it
    comes after we stopped waiting: what the request acquired must be given back then.
    """

    __slots__ = (
        "_answer",
        "_gate",
        "_lock",
        "_then",
        "abandoned",
        "asked_at",
        "attachment",
        "deadline",
        "expects",
        "must_end",
        "on_late",
        "on_reply",
        "request",
        "sent_at",
        "settled",
        "watched",
    )

    def __init__(
        self,
        attachment: Answers,
        expects: str,
        deadline: float,
        must_end: bool = False,
        on_reply: Callable[[Reply], None] | None = None,
        on_late: Callable[[store_pb2.AttachReply], None] | None = None,
    ) -> None:
        self.attachment = attachment
        self.expects = expects
        self.deadline = deadline
        self.must_end = must_end
        self.on_reply = on_reply
        self.on_late = on_late
        self.sent_at = self.asked_at = time.monotonic()
        self.request: store_pb2.AttachRequest | None = None
        """None: it was never sent."""
        self.settled = False
        """It has its answer, or gets it at this moment. Changed under the attachment's lock."""
        self.abandoned = False
        """We answered it ourselves, and the daemon's answer is still to come."""
        self.watched = False
        """The answer is wanted at once though no thread waits for it."""
        self._lock = threading.Lock()
        self._answer: Reply | None = None
        self._then: list[Callable[[Call], None]] = []
        self._gate: threading.Lock | None = None
        """Held while somebody sleeps until it is let go."""

    @property
    def has_consequences(self) -> bool:
        """Whether the answer matters even when nobody waits for it."""
        return self.on_reply is not None or self.on_late is not None

    @property
    def done(self) -> bool:
        return self._answer is not None

    @property
    def answer(self) -> Reply:
        """What came; only once it is done."""
        assert self._answer is not None, self
        return self._answer

    def settle(self, answer: Reply) -> None:
        """By whoever set `settled`; again where that was interrupted, with the first answer."""
        with self._lock:
            if self._answer is None:
                self._answer = answer
        self.nudge()
        while self._then:
            self._run(self._then.pop(0))

    def when_done(self, work: Callable[[Call], None]) -> None:
        """Run `work` with this call once it is done: on the thread that receives, or here and now if it is."""
        with self._lock:
            done = self._answer is not None
            if not done:
                self._then.append(work)
        if done:
            self._run(work)
        else:
            self.watch()

    def watch(self) -> None:
        """What follows the answer is not to wait until somebody else asks something."""
        self.watched = True
        self.attachment.listen()

    def _run(self, work: Callable[[Call], None]) -> None:
        try:
            work(self)
        except Exception:
            log.exception("a bug in what was to follow %r", self)

    def wait(self) -> None:
        """Until there is an answer, at the latest until the deadline."""
        if self._answer is None:
            self.attachment.wait_for(self)

    def prepare(self) -> None:
        """From now on `nudge` is noticed by the next `pause`. One thread waits for a call."""
        if self._gate is None:
            self._gate = threading.Lock()
            self._gate.acquire()

    def pause(self, timeout_s: float) -> None:
        """Sleep until the call is done, somebody nudges, or the time is up."""
        self.prepare()
        assert self._gate is not None, self
        if self._answer is None:
            self._gate.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))

    def nudge(self) -> None:
        """Wake who waits for this call."""
        with self._lock:
            if self._gate is not None and self._gate.locked():
                self._gate.release()

    def __repr__(self) -> str:
        state = "abandoned" if self.abandoned else "answered" if self.done else "waiting"
        return f"Call({self.expects}, {state}, {time.monotonic() - self.sent_at:.3f} s)"


Suspension = Call | Callable[[], None]
Operation = Generator[Suspension, None, T]


def drive(operation: Operation[T], suspension: Suspension | None = None) -> T:
    """Run on this thread, from the beginning or from where it waits for `suspension`. Whatever interrupts it (Ctrl-C)
    is raised inside the operation too, which then cleans up."""
    try:
        if suspension is None:
            suspension = next(operation)
        while True:
            try:
                if isinstance(suspension, Call):
                    suspension.wait()
                else:
                    suspension()
            except BaseException as problem:
                suspension = _interrupted(operation, suspension, problem)
            else:
                suspension = operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(operation: Operation[T]) -> T:
    """The same on an event loop; calls that block run in a thread, and cancelling the task interrupts the operation."""
    try:
        suspension = next(operation)
        while True:
            try:
                if isinstance(suspension, Call):
                    await _answered(suspension)
                else:
                    await asyncio.to_thread(suspension)
            except BaseException as problem:
                suspension = _interrupted(operation, suspension, problem)
            else:
                suspension = operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


async def _answered(call: Call) -> None:
    if call.done:
        return
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    def done(_: Call) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(wake)

    call.when_done(done)
    await waiting


def _interrupted(operation: Operation[Any], suspension: Suspension, problem: BaseException) -> Suspension:
    if isinstance(suspension, Call):
        suspension.attachment.abandon(suspension)
    return operation.throw(problem)
