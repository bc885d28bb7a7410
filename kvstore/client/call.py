"""One request and its answer, and how operations made of several steps run, awaited or not.

An operation (read, write, ...) is written once, as a generator that yields what must be waited for: a `Call`, or a
function that blocks (descriptors over the socket, waiting for the connection). `drive` runs it on the caller's
thread, `drive_async` on an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import StoreError
from kvstore.v1 import store_pb2

if TYPE_CHECKING:
    from kvstore.client.attachment import Attachment

T = TypeVar("T")
Reply = store_pb2.AttachReply | StoreError
"""What a request got: failures are values here, raised only by who wants to."""


class Call:
    """A request under way. Its future always gets a result: the daemon's, or ours once the deadline has passed.

    `on_reply` is called (on the receiving thread) with the daemon's answer whenever it comes, `on_late` when it comes
    after we stopped waiting: what the request acquired must be given back then.
    """

    __slots__ = (
        "abandoned",
        "asked_at",
        "attachment",
        "deadline",
        "expects",
        "future",
        "must_end",
        "on_late",
        "on_reply",
        "request",
        "sent_at",
        "settled",
    )

    def __init__(
        self,
        attachment: Attachment,
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
        """The future has its result, or gets it at this moment. Changed under the attachment's lock."""
        self.abandoned = False
        """We answered it ourselves, and the daemon's answer is still to come."""
        self.future: Future[Reply] = Future()
        self.future.set_running_or_notify_cancel()  # so that nobody can cancel it: the answer must be dealt with

    @property
    def has_consequences(self) -> bool:
        """Whether the answer matters even when nobody waits for it."""
        return self.on_reply is not None or self.on_late is not None

    @property
    def answer(self) -> Reply:
        """What came; only once the future is done."""
        return self.future.result(timeout=0)

    def wait(self) -> None:
        """Until there is an answer, at the latest until the deadline."""
        try:
            self.future.result(timeout=max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            self.attachment.expire(self)

    def __repr__(self) -> str:
        state = "abandoned" if self.abandoned else "answered" if self.future.done() else "waiting"
        return f"Call({self.expects}, {state}, {time.monotonic() - self.sent_at:.3f} s)"


Step = Call | Callable[[], None]
Operation = Generator[Step, None, T]


def drive(operation: Operation[T]) -> T:
    """Run on this thread. Whatever interrupts it (Ctrl-C) is raised inside the operation too, which then cleans up."""
    try:
        step = next(operation)
        while True:
            try:
                if isinstance(step, Call):
                    step.wait()
                else:
                    step()
            except BaseException as problem:
                step = _interrupted(operation, step, problem)
            else:
                step = operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(operation: Operation[T]) -> T:
    """The same on an event loop; steps that block run in a thread, and cancelling the task interrupts the operation."""
    try:
        step = next(operation)
        while True:
            try:
                if isinstance(step, Call):
                    await asyncio.wrap_future(step.future)
                else:
                    await asyncio.to_thread(step)
            except BaseException as problem:
                step = _interrupted(operation, step, problem)
            else:
                step = operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


def _interrupted(operation: Operation[Any], step: Step, problem: BaseException) -> Step:
    if isinstance(step, Call):
        step.attachment.abandon(step)
    return operation.throw(problem)
