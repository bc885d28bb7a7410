"""Hints of a real RQ queue on a real redis-server, which a test starts for itself."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Namespace, SessionEntry

from .ssd_tools import SMALL_SSD, SPEC, client_of, demote, eventually, keys_of, save

redis = pytest.importorskip("redis", reason="the extra `scheduler` brings redis and rq")
rq = pytest.importorskip("rq", reason="the extra `scheduler` brings redis and rq")

from kvstore.scheduler.rq_queue import RQHints  # noqa: E402
from kvstore.types import Outcome  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (apt-get install redis-server)"
)


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder))
        self._process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        eventually(self._answers, lambda: f"redis-server ended with {self._process.poll()}")

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as connection:
            try:
                return bool(connection.ping())
            except redis.ConnectionError:
                return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def queue(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as connection:
        yield rq.Queue("turns", connection=connection)


@pytest.fixture
def space(start_daemon: Callable[..., Any], run_dir: Path) -> Iterator[Namespace]:
    daemon = start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"})
    with client_of(daemon) as client:
        yield client.open(SPEC)


def talks(space: Namespace, count: int) -> list[list[Any]]:
    """Sessions of 12 chunks each, on SSD alone."""
    found = []
    for number in range(count):
        keys = keys_of(space, 12, 100 + number)
        save(space, keys)
        entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
        space.update_session(b"talk %d" % number, expected_version=0, keep=0, append=entries)
        found.append(keys)
    demote(space, [key for keys in found for key in keys], filler=1)
    return found


def enqueue(queue: Any, *numbers: int) -> list[Any]:
    return [queue.enqueue("time.time", meta={"session": f"talk {number}"}) for number in numbers]


def gauge(space: Namespace, name: str) -> float:
    return space.client.stats().gauges[name]


def run(queue: Any, jobs: int) -> None:
    rq.SimpleWorker([queue], connection=queue.connection).work(
        burst=True, max_jobs=jobs, logging_level="WARNING"
    )


def test_what_rq_has_queued_is_brought_ahead(space: Namespace, queue: Any) -> None:
    found = talks(space, 3)
    with RQHints(space.client, SPEC.model, queue):
        enqueue(queue, 0, 1)
        queue.enqueue("time.time")  # of no session
        eventually(lambda: gauge(space, "queued_jobs") == 2)
        for keys in found[:2]:
            eventually(lambda keys=keys: set(space.match(keys).outcomes) == {Outcome.HIT})
        run(queue, 1)
        eventually(lambda: gauge(space, "queued_jobs") == 1)
        enqueue(queue, 2)
        eventually(lambda: set(space.match(found[2]).outcomes) == {Outcome.HIT})
        run(queue, 3)
        eventually(lambda: gauge(space, "queued_jobs") == 0)


def test_a_redis_that_goes_away_costs_hints_alone(
    space: Namespace, server: Server, queue: Any, caplog: pytest.LogCaptureFixture
) -> None:
    talks(space, 2)
    with RQHints(space.client, SPEC.model, queue) as hints:
        enqueue(queue, 0)
        eventually(lambda: gauge(space, "queued_jobs") == 1)
        server.stop()
        eventually(lambda: "so hints wait" in caplog.text)
        server.start()  # and has forgotten everything
        enqueue(queue, 0, 1)
        eventually(lambda: gauge(space, "queued_jobs") == 2)
        assert hints.counters["failed"] == 0


def test_meta_that_nobody_can_read_spoils_no_other_hint(space: Namespace, queue: Any) -> None:
    talks(space, 1)
    (job,) = enqueue(queue, 0)
    queue.connection.hset(rq.job.Job.key_for(job.id), "meta", b"no pickle")
    with RQHints(space.client, SPEC.model, queue):
        enqueue(queue, 0)
        eventually(lambda: gauge(space, "queued_jobs") == 1)


def test_the_example(
    start_daemon: Callable[..., Any],
    run_dir: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"})
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import rq_turns

    try:
        found = rq_turns.main(str(run_dir), server.url, chats=2, turns=3)
        assert found == [(0, 4), (0, 4), (4, 4), (4, 4), (8, 4), (8, 4)]
        assert "6 jobs" in capsys.readouterr().out
    finally:
        rq_turns.client_of(str(run_dir)).close()
        sys.modules.pop("rq_turns")
