"""What the daemon is told of prompts that wait: their modules in their order, and the siblings of union members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.gpu_worker.promptcache import ahead as ahead_module
from kvstore.gpu_worker.promptcache.ahead import Ahead
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.gpu_worker.promptcache.prompts import Planned, Prompts
from kvstore.gpu_worker.promptcache.quality import Fixed
from kvstore.promptcache import ByteTokenizer, parse_schema
from kvstore.types import ActionKind, ChunkKey, Hint, HintAction

from .conftest import FakeStore
from .modular import PROMPT, TRIP, encoding_of
from .test_promptcache import MakeEngine, engine_of

DEADLINE_S = 30.0


@dataclass
class Daemon:
    queues: list[list[Hint]] = field(default_factory=list)
    actions: list[HintAction] = field(default_factory=list)
    away: bool = False

    def publish_queue(self, hints: Sequence[Hint], *, ttl_ms: int) -> None:
        self.queues.append(list(hints))
        if self.away:
            raise Unavailable("no daemon")

    def apply_actions(self, actions: Sequence[HintAction]) -> None:
        self.actions += actions


def planned(number: int, siblings: tuple[ChunkKey, ...] = ()) -> Any:
    parts = [SimpleNamespace(key=ChunkKey(bytes([number, n]) * 16)) for n in (0, 1, 0)]
    return SimpleNamespace(assembly=SimpleNamespace(parts=parts), siblings=siblings)


def job(number: int, row: int = -1) -> Any:
    return SimpleNamespace(request=SimpleNamespace(number=number, row=row))


async def until(what: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "LOOK_S", 0.001)


def test_the_queue_is_told_in_its_order_and_without_those_that_run() -> None:
    async def run() -> None:
        daemon, gone = Daemon(), set()
        ahead = Ahead(lambda: daemon, lambda job: job.request.number not in gone)  # type: ignore[arg-type,return-value]
        sibling = (ChunkKey(b"s" * 32),)
        jobs = {number: job(number) for number in (1, 2, 3)}
        ahead.start()
        for number in (3, 1, 2):
            ahead.queued(planned(number, sibling if number == 2 else ()), jobs[number])
        await until(lambda: daemon.queues)
        assert [(hint.job, hint.position) for hint in daemon.queues[0]] == [
            (b"pml1", 0),
            (b"pml2", 1),
            (b"pml3", 2),
        ]
        assert daemon.queues[0][0].keys == (ChunkKey(b"\1\0" * 16), ChunkKey(b"\1\1" * 16))
        await until(lambda: daemon.actions)
        assert [(one.kind, one.keys) for one in daemon.actions] == [(ActionKind.PREFETCH, sibling)]
        jobs[1].request.row = 0
        gone.add(3)
        await until(lambda: [hint.job for hint in daemon.queues[-1]] == [b"pml2"])
        ahead.left(jobs[2])
        await until(lambda: daemon.queues[-1] == [])
        told = len(daemon.queues)
        ahead.queued(planned(4), job(4, row=1))  # it runs already: nobody is told
        await until(lambda: not ahead._jobs)
        assert len(daemon.queues) == told
        await ahead.close()

    asyncio.run(run())


def test_a_daemon_that_is_away_is_told_the_next_time() -> None:
    async def run() -> None:
        daemon = Daemon(away=True)
        ahead = Ahead(lambda: daemon)  # type: ignore[arg-type,return-value]
        ahead.start()
        ahead.queued(planned(1), job(1))
        await until(lambda: daemon.queues)
        daemon.away = False
        ahead.queued(planned(2), job(2))
        await until(lambda: len(daemon.queues[-1]) == 2)
        await ahead.close()

    asyncio.run(run())


def test_a_prompts_siblings_are_the_other_members_of_the_unions_it_chose_of(
    store: FakeStore, engines: MakeEngine
) -> None:
    engine = engine_of(engines, store)
    prompts = Prompts(engine, ByteTokenizer(), Fixed(parse_schema(TRIP)))
    encoding = encoding_of(engine, TRIP)
    chosen: Planned = prompts.plan(PROMPT, Recipe())
    assert chosen.siblings == tuple(encoding.units["plan", "rome"].keys)
    without = prompts.plan('<prompt schema="trip"><plan days="12"/><food/> Why?</prompt>', Recipe())
    assert without.siblings == ()
