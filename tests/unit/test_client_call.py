"""Operations run to their end on a thread and on an event loop; what interrupts them lets them clean up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client.call import Call, Operation, drive, drive_async
from kvstore.errors import StoreError, Unavailable
from kvstore.v1 import store_pb2


class Attachment:
    """What a Call asks of its attachment."""

    def __init__(self) -> None:
        self.expired: list[Call] = []
        self.abandoned: list[Call] = []

    def wait_for(self, call: Call) -> None:
        call.pause(call.deadline - time.monotonic())
        if not call.done:
            self.expired.append(call)
            call.settle(Unavailable("late"))

    def abandon(self, call: Call) -> None:
        self.abandoned.append(call)

    def listen(self) -> None:
        pass


@pytest.fixture
def attachment() -> Any:
    return Attachment()


REPLY = store_pb2.AttachReply(request_id=1)


def answered(attachment: Any) -> Call:
    call = Call(attachment, "done", float("inf"))
    call.settle(REPLY)
    return call


def two_steps(attachment: Any, log: list[str]) -> Operation[str]:
    call = answered(attachment)
    yield call
    assert call.answer is REPLY
    yield lambda: log.append(threading.current_thread().name)
    return "end"


async def test_both_ways_give_the_same(attachment: Any) -> None:
    log: list[str] = []
    assert drive(two_steps(attachment, log)) == "end"
    assert await drive_async(two_steps(attachment, log)) == "end"
    assert log[0] == threading.current_thread().name
    assert log[1] != log[0], "what blocks runs in another thread than the loop"


def test_no_step_at_all(attachment: Any) -> None:
    def operation() -> Operation[int]:
        return 3
        yield  # type: ignore[unreachable]

    assert drive(operation()) == 3


def test_a_wait_ends_with_the_deadline(attachment: Any) -> None:
    call = Call(attachment, "done", 0.0)
    call.wait()
    assert attachment.expired == [call]
    assert isinstance(call.answer, StoreError)


def test_what_follows_is_run_once_whenever_the_answer_comes(attachment: Any) -> None:
    call = Call(attachment, "done", float("inf"))
    seen: list[Any] = []
    call.when_done(lambda done: seen.append(("early", done.answer)))
    assert not seen
    call.settle(REPLY)
    call.when_done(lambda done: seen.append(("late", done.answer)))
    assert seen == [("early", REPLY), ("late", REPLY)]


def test_a_bug_in_what_follows_harms_nobody_else(attachment: Any, caplog: pytest.LogCaptureFixture) -> None:
    call = Call(attachment, "done", float("inf"))
    seen: list[Call] = []
    call.when_done(lambda _: raising(ValueError("a bug"))())
    call.when_done(seen.append)
    call.settle(REPLY)
    assert seen == [call]
    assert "a bug in what was to follow" in caplog.text


def test_a_nudge_before_the_pause_is_noticed(attachment: Any) -> None:
    call = Call(attachment, "done", float("inf"))
    call.prepare()
    call.nudge()
    call.nudge()
    call.pause(float("inf"))
    call.pause(0.0)  # and only once
    assert not call.done
    threading.Timer(0.01, call.settle, (REPLY,)).start()
    call.pause(float("inf"))
    assert call.answer is REPLY
    call.pause(float("inf"))  # there is nothing to wait for


def raising(problem: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise problem

    return step


def test_what_a_step_raises_is_raised_inside(attachment: Any) -> None:
    log: list[str] = []

    def operation() -> Operation[None]:
        try:
            yield raising(Unavailable("no"))
        finally:
            log.append("cleaned up")

    with pytest.raises(Unavailable):
        drive(operation())
    assert log == ["cleaned up"]

    def patient() -> Operation[str]:
        try:
            yield raising(Unavailable("no"))
        except Unavailable:
            yield lambda: log.append("went on")
        return "fine"

    assert drive(patient()) == "fine"
    assert log[-1] == "went on"


def test_an_interrupted_wait_abandons_its_call(attachment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(attachment, "done", float("inf"))
    monkeypatch.setattr(Call, "wait", lambda self: raising(KeyboardInterrupt())())

    def operation() -> Operation[None]:
        yield call

    with pytest.raises(KeyboardInterrupt):
        drive(operation())
    assert attachment.abandoned == [call]


async def test_a_cancelled_task_abandons_its_call(attachment: Any) -> None:
    call = Call(attachment, "done", float("inf"))
    log: list[str] = []

    def operation() -> Operation[None]:
        try:
            yield call
        finally:
            log.append("cleaned up")

    task = asyncio.create_task(drive_async(operation()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attachment.abandoned == [call]
    assert log == ["cleaned up"]
    call.settle(REPLY)  # the late answer finds nobody, and harms nobody


def test_a_call_shows_its_state(attachment: Any) -> None:
    call = Call(attachment, "acquire", 0.0)
    assert "waiting" in repr(call)
    call.wait()
    assert "answered" in repr(call)
    call.abandoned = True
    assert "abandoned" in repr(call)
