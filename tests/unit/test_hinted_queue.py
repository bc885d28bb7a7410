"""The queue that tells the daemon of itself, with a client that writes down what it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Hint, QueueAccepted
from kvstore.errors import BadRequest, NotFound, StoreError, Unavailable
from kvstore.scheduler.hints import AsyncHintedQueue, HintedQueue
from kvstore.scheduler.job_queue import Job
from kvstore.scheduler.ray_queue import QueueActor
from kvstore.scheduler.turns import Turns
from kvstore.types import HintResult


class ScriptedClient:
    """Raises what stands in `problems`, one a call, then listens: `heard` has the queue as it is known after each
    message, in order."""

    def __init__(self, *problems: Exception) -> None:
        self.boot_id = b"first"
        self.calls = 0
        self.heard: list[list[str]] = []
        self.unrecorded: set[str] = set()
        """Sessions that the daemon does not know."""
        self.number = 0
        self.jobs: dict[bytes, Hint] = {}
        self.said = self.refused = self.wanted = 0
        """Hints; how many were rejected; and how often a snapshot was wanted."""
        self._problems = list(problems)
        self._changed = threading.Condition()

    def publish_queue(self, model: str, hints: Sequence[Hint], **options: Any) -> QueueAccepted:
        assert model == "m" and options["ttl_ms"] > 0 and options["timeout_s"] > 0
        with self._changed:
            self.calls += 1
            self._changed.notify_all()
            if self._problems:
                raise self._problems.pop(0)
            number = options["number"]
            if not options["snapshot"] and number != self.number + 1:
                self.wanted += 1
                return QueueAccepted((HintResult.REJECTED,) * len(hints), 0, 0, snapshot_wanted=True)
            if number <= self.number:
                return QueueAccepted((HintResult.REJECTED,) * len(hints), 0, 0)
            self.number = number
            if options["snapshot"]:
                self.jobs = {}
            for name in options["removed"]:
                del self.jobs[name]
            self.said += len(hints)
            self.jobs |= {hint.job: hint for hint in hints}
            ordered = sorted(self.jobs.values(), key=lambda hint: hint.position)
            self.heard.append([hint.session.decode() for hint in ordered])
            unknown = [hint.session.decode() in self.unrecorded for hint in hints]
            for hint in hints:
                if hint.session.decode() in self.unrecorded:
                    self.refused += 1
            return QueueAccepted(
                tuple(HintResult.REJECTED if so else HintResult.ACCEPTED for so in unknown), 0, 0
            )

    def restart(self) -> None:
        """As another daemon, or one that knows nothing any more."""
        self.boot_id = b"second"
        self.forget()

    def forget(self) -> None:
        with self._changed:
            self.number, self.jobs = 0, {}

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10), (self.calls, self.heard)


@pytest.fixture
def made() -> Iterator[list[HintedQueue]]:
    queues: list[HintedQueue] = []
    yield queues
    for queue in queues:
        queue.close()


def queue_for(client: ScriptedClient, made: list[HintedQueue]) -> HintedQueue:
    made.append(HintedQueue(client, "m"))  # type: ignore[arg-type]  # all of a client that it uses
    return made[-1]


class AsyncScriptedClient:
    """The same, awaited."""

    def __init__(self, client: ScriptedClient) -> None:
        self._client = client
        self.asked = asyncio.Event()
        self.closed = False

    async def close(self) -> None:
        self.closed = True

    @property
    def boot_id(self) -> bytes:
        return self._client.boot_id

    async def publish_queue(self, model: str, hints: Sequence[Hint], **options: Any) -> QueueAccepted:
        await asyncio.sleep(0)
        try:
            return self._client.publish_queue(model, hints, **options)
        finally:
            self.asked.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.asked.clear()
                await self.asked.wait()


def job(name: str) -> Job:
    return Job(name, (1,), 1)


def test_jobs_are_told_in_order_the_running_ones_first(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    queue = queue_for(client, made)
    for name in "abc":
        queue.put(job(name))
    client.wait(lambda: client.heard[-1:] == [["a", "b", "c"]])
    running = queue.start()
    assert running == job("a")
    queue.put(job("d"))
    client.wait(lambda: client.heard[-1:] == [["a", "b", "c", "d"]])
    queue.finish(running)
    client.wait(lambda: client.heard[-1:] == [["b", "c", "d"]])
    again = queue.start()
    assert again == job("b")
    queue.give_back(again)
    assert queue.waiting == (job("b"), job("c"), job("d"))


def test_what_is_no_job_is_refused_and_hides_none_behind_it(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    with HintedQueue(client, "m") as queue:  # type: ignore[arg-type]  # all of a client that it uses
        for wrong in ("chat 7", Job(b"chat 7", (1,), 1)):  # type: ignore[arg-type]
            with pytest.raises(BadRequest, match="is no job"):
                queue.put(wrong)  # type: ignore[arg-type]
        queue.put(job("a"))
        assert queue.start() == job("a")
        client.wait(lambda: client.heard[-1:] == [["a"]])
        thread = queue._publisher._thread
    assert not thread.is_alive(), "left by `with`"


def test_what_was_not_heard_is_said_again(made: list[HintedQueue]) -> None:
    client = ScriptedClient(Unavailable("away"), NotFound("no such model yet"), Unavailable("away"))
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: client.heard == [["a"]])
    assert client.calls == 4


def test_a_daemon_that_was_started_anew_is_told(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: len(client.heard) > 0 and client.heard[-1] == ["a"])
    before = client.calls
    client.restart()
    client.wait(lambda: client.calls > before)
    assert client.heard[-1] == ["a"]


def test_what_changes_is_told_and_no_more(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    queue = queue_for(client, made)
    for number in range(100):
        queue.put(job(str(number)))
    client.wait(lambda: client.heard[-1:] != [] and len(client.heard[-1]) == 100)
    said = client.said
    for number in range(100, 130):
        running = queue.start()
        assert running is not None
        queue.finish(running)
        queue.put(job(str(number)))
        there = [str(at) for at in range(number - 99, number + 1)]
        client.wait(lambda there=there: client.heard[-1] == there)  # type: ignore[misc]
    assert client.said - said <= 30 + 5, "one hint for each job that comes"


def test_a_daemon_that_lost_a_change_is_told_all(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: client.heard[-1:] == [["a"]])
    client.forget()
    queue.put(job("b"))
    client.wait(lambda: client.heard[-1:] == [["a", "b"]])
    assert client.wanted == 1


def test_another_queue_of_the_same_client_is_heard(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    for name in "ab":
        queue = queue_for(client, made)
        for number in range(5):
            queue.put(job(name))
            client.wait(lambda name=name, number=number: client.heard[-1:] == [[name] * (number + 1)])  # type: ignore[misc]
        queue.close()


def test_a_job_whose_session_is_recorded_later_is_told_again(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    client.unrecorded = {"a"}
    queue = queue_for(client, made)
    queue.put(job("a"))
    queue.put(job("a"))
    client.wait(lambda: client.heard[-1:] == [["a", "a"]])
    running = queue.start()
    assert running is not None
    client.unrecorded = set()
    refused = client.refused
    queue.finish(running)
    client.wait(lambda: client.heard[-1] == ["a"] and client.said > refused)
    assert client.refused == refused


def test_positions_begin_anew_when_the_head_is_far_from_0(
    made: list[HintedQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.scheduler.hints.RENUMBER_AT", 4)
    client = ScriptedClient()
    queue = queue_for(client, made)
    for name in "abc":
        queue.put(job(name))
    highest = 0
    for name in "defghijklmnop":
        running = queue.start()
        assert running is not None
        queue.finish(running)
        queue.put(job(name))
        client.wait(lambda name=name: client.heard[-1:] and client.heard[-1][2:] == [name])  # type: ignore[misc]
        highest = max(highest, *(hint.position for hint in client.jobs.values()))
    assert 3 <= highest <= 8


def test_a_daemon_that_does_not_answer_holds_up_nobody(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    answering = threading.Event()
    listen = client.publish_queue
    client.publish_queue = lambda *a, **k: (answering.wait(10), listen(*a, **k))[1]  # type: ignore[method-assign]
    queue = queue_for(client, made)
    begun = time.monotonic()
    for number in range(1000):
        queue.put(job(str(number)))
    assert len(queue.waiting) == 1000 and time.monotonic() - begun < 9
    answering.set()
    client.wait(lambda: client.heard[-1:] != [] and len(client.heard[-1]) == 1000)


def unknown(calls: int) -> list[StoreError]:
    return [NotFound("no worker has opened it", field="model", value="m") for _ in range(calls)]


def test_a_model_that_nobody_opens_is_told_to_the_log_once(
    made: list[HintedQueue], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore.scheduler.hints.UNKNOWN_S", 0.0)
    client = ScriptedClient(*unknown(5))
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: client.heard == [["a"]])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["model=m"]


def test_a_model_that_is_opened_soon_is_no_matter(
    made: list[HintedQueue], caplog: pytest.LogCaptureFixture
) -> None:
    client = ScriptedClient(*unknown(3))
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: client.heard == [["a"]])
    assert caplog.records == []


def test_hints_of_sessions_that_nobody_recorded_are_counted_apart_and_told_once(
    made: list[HintedQueue], caplog: pytest.LogCaptureFixture
) -> None:
    client = ScriptedClient()
    client.unrecorded = {"a", "b"}
    queue = queue_for(client, made)
    queue.put(job("a"))
    queue.put(job("b"))
    client.wait(lambda: client.heard[-1:] == [["a", "b"]])
    queue.put(job("c"))
    client.wait(lambda: client.heard[-1:] == [["a", "b", "c"]])
    queue.close()
    taken = queue.published
    assert 1 <= taken < client.calls, "a message of which nothing was taken is not published"
    assert queue.rejected == client.refused >= 2
    assert queue.counters == {"published": taken, "rejected": queue.rejected, "failed": 0, "unknown": 0}
    (record,) = caplog.records
    assert (
        "hints were rejected, because no worker has recorded their sessions (the first: b'a')"
        in record.message
    )
    assert "Namespace.update_session" in record.message and record.levelname == "WARNING"


def test_a_name_that_cannot_be_a_session_s_spoils_no_other_hint(made: list[HintedQueue]) -> None:
    client = ScriptedClient()
    queue = queue_for(client, made)
    for name in ("", "x" * 257, "half a character: \ud83d", "a"):
        queue.put(job(name))
    client.wait(lambda: client.heard[-1:] == [["a"]])
    queue.put(job("b"))
    client.wait(lambda: client.heard[-1:] == [["a", "b"]])


async def test_the_queue_of_an_event_loop_tells_every_change() -> None:
    client = ScriptedClient()
    awaited = AsyncScriptedClient(client)
    async with AsyncHintedQueue(awaited, "m") as queue:  # type: ignore[arg-type]
        for name in "abc":
            queue.put(job(name))
        await awaited.wait(lambda: client.heard[-1:] == [["a", "b", "c"]])
        running = queue.start()
        queue.put(job("d"))
        await awaited.wait(lambda: client.heard[-1:] == [["a", "b", "c", "d"]])
        assert running is not None
        queue.give_back(running)
        assert queue.start() == running
        queue.finish(running)
        await awaited.wait(lambda: client.heard[-1:] == [["b", "c", "d"]])
        before = client.calls
        client.restart()
        await awaited.wait(lambda: client.calls > before)
    assert queue._task.done(), "closed: nothing is told"
    queue.put(job("e"))
    await queue.close()


async def test_a_bug_in_telling_does_not_end_it(
    made: list[HintedQueue], caplog: pytest.LogCaptureFixture
) -> None:
    client, other = (ScriptedClient(ValueError("a bug"), ValueError("a bug")) for _ in range(2))
    queue = queue_for(client, made)
    queue.put(job("a"))
    client.wait(lambda: client.heard == [["a"]])
    awaited = AsyncScriptedClient(other)
    async with AsyncHintedQueue(awaited, "m") as at_once:  # type: ignore[arg-type]
        at_once.put(job("a"))
        await awaited.wait(lambda: other.heard == [["a"]])
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]
    assert queue.counters["failed"] == at_once.counters["failed"] == 2


async def test_a_queue_of_an_event_loop_may_be_there_before_the_daemon() -> None:
    client = ScriptedClient()
    awaited = AsyncScriptedClient(client)
    problems: list[Exception] = [Unavailable("away"), ValueError("a bug")]

    async def connect() -> AsyncScriptedClient:
        if problems:
            raise problems.pop(0)
        return awaited

    async with AsyncHintedQueue(connect, "m") as queue:  # type: ignore[arg-type]
        queue.put(job("a"))
        assert queue.start() == job("a")
        await awaited.wait(lambda: client.heard == [["a"]])
    assert awaited.closed


async def test_an_actor_takes_jobs_while_the_daemon_is_away(tmp_path: Path) -> None:
    actor = QueueActor(str(tmp_path / "nobody"), "m")
    await actor.put(job("a"))
    assert await actor.start() == (1, job("a"))
    await actor.give_back(1)
    assert await actor.start() == (2, job("a"))
    await actor.finish(2)
    assert (await actor.counters())["published"] == 0
    queue = actor._queue
    assert queue is not None
    await queue.close()


async def test_a_turn_that_is_refused_leaves_nothing_behind() -> None:
    awaited = AsyncScriptedClient(ScriptedClient())
    async with Turns(awaited, "m") as turns:  # type: ignore[arg-type]
        with pytest.raises(BadRequest):
            async with turns.of(None):  # type: ignore[arg-type]
                pass
        assert not turns._may_run
        async with asyncio.timeout(20), turns.of("a"):
            pass


async def test_closing_right_behind_a_change_ends() -> None:
    client = ScriptedClient()
    awaited = AsyncScriptedClient(client)
    queue = AsyncHintedQueue(awaited, "m")  # type: ignore[arg-type]
    queue.put(job("a"))
    await awaited.wait(lambda: client.heard[-1:] == [["a"]])
    for _ in range(5):  # the task has looked, and waits for the next change
        await asyncio.sleep(0)
    queue.put(job("b"))
    async with asyncio.timeout(20):
        await queue.close()
    assert queue._task.done()


async def test_the_queue_of_an_event_loop_says_again_what_was_not_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient(Unavailable("away"), NotFound("no such model yet"), Unavailable("away"))
    client.unrecorded = {"a", "b"}
    awaited = AsyncScriptedClient(client)
    async with AsyncHintedQueue(awaited, "m") as queue:  # type: ignore[arg-type]
        queue.put(job("a"))
        await awaited.wait(lambda: client.heard[-1:] == [["a"]])
        queue.put(job("b"))
        await awaited.wait(lambda: client.heard[-1:] == [["a", "b"]])
        assert queue.published == 0 and queue.rejected > 0
        assert (queue.counters["failed"], queue.counters["unknown"]) == (2, 1)
    assert ["rejected" in record.message for record in caplog.records] == [False, True]
