"""The queue that tells the daemon of itself, with a client that writes down what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.client import Hint
from kvstore.errors import NotFound, StoreError, Unavailable
from kvstore.scheduler.hints import HintedQueue
from kvstore.scheduler.job_queue import Job


class ScriptedClient:
    """Raises what stands in `problems`, one a call, then listens."""

    def __init__(self, *problems: StoreError) -> None:
        self.boot_id = b"first"
        self.calls = 0
        self.heard: list[list[str]] = []
        self._problems = list(problems)
        self._changed = threading.Condition()

    def publish_queue(self, model: str, hints: Sequence[Hint], **options: Any) -> None:
        assert model == "m" and options["ttl_ms"] > 0 and options["timeout_s"] > 0
        with self._changed:
            self.calls += 1
            self._changed.notify_all()
            if self._problems:
                raise self._problems.pop(0)
            assert [hint.position for hint in hints] == list(range(len(hints)))
            self.heard.append([hint.session.decode() for hint in hints])

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
    client.boot_id = b"second"
    client.wait(lambda: client.calls > before)
    assert client.heard[-1] == ["a"]


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
