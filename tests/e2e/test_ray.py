"""A queue in a real Ray actor, and a real Ray Serve deployment whose requests are in line. Ray is too large for the
development environment: `make test-ray` runs these in one of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Namespace, SessionEntry, connect_async
from kvstore.scheduler.job_queue import Job
from kvstore.scheduler.ray_queue import QueueActor
from kvstore.scheduler.turns import Turns

from .ssd_tools import SMALL_SSD, SPEC, client_of, eventually, keys_of, save

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: `make test-ray` runs these in an environment of their own"
)


@pytest.fixture
def space(start_daemon: Callable[..., Any], run_dir: Path) -> Iterator[Namespace]:
    daemon = start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"})
    with client_of(daemon) as client:
        space = client.open(SPEC)
        for number in range(3):
            keys = keys_of(space, 4, 100 + number)
            save(space, keys)
            entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
            space.update_session(b"talk %d" % number, expected_version=0, keep=0, append=entries)
        yield space


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Else Ray kills its workers when others on the machine have taken the memory
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  # so it is spelled
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def queued(space: Namespace) -> float:
    return space.client.stats().gauges["queued_jobs"]


@pytest.mark.timeout(300)
def test_a_queue_in_an_actor(space: Namespace, run_dir: Path, cluster: None) -> None:
    line = ray.remote(QueueActor).remote(str(run_dir), SPEC.model)
    for number in range(3):
        ray.get(line.put.remote(Job(f"talk {number}", (1, 2), 1)))
    eventually(lambda: queued(space) == 3)
    number, job = ray.get(line.start.remote())
    assert job == Job("talk 0", (1, 2), 1)
    ray.get(line.give_back.remote(number))
    assert ray.get(line.start.remote())[1] == job
    ray.get(line.finish.remote(number + 1))
    eventually(lambda: queued(space) == 2)
    ray.kill(line)
    eventually(lambda: queued(space) == 0)


@pytest.mark.timeout(300)
def test_requests_of_a_deployment(space: Namespace, run_dir: Path, cluster: None) -> None:
    from ray import serve

    class Answers:
        """One request at a time; it ends when somebody says so."""

        def __init__(self) -> None:
            self.turns: Any = None
            self.opening = asyncio.Lock()
            self.go_on = asyncio.Event()

        async def answer(self, session: str) -> str:
            async with self.opening:
                if self.turns is None:
                    self.turns = Turns(await connect_async(str(run_dir)), SPEC.model)
            async with self.turns.of(session):
                await self.go_on.wait()
                return session

        async def end(self) -> None:
            self.go_on.set()

    handle = serve.run(
        serve.deployment(Answers, max_ongoing_requests=10).bind(), name="answers", route_prefix=None
    )
    answers = [handle.answer.remote(f"talk {number}") for number in range(3)]
    eventually(lambda: queued(space) == 3)
    handle.end.remote().result()
    assert [answer.result() for answer in answers] == ["talk 0", "talk 1", "talk 2"]
    eventually(lambda: queued(space) == 0)
    serve.shutdown()
