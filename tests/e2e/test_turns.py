"""Requests of an event loop in line, whose order the daemon knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import AsyncClient, SessionEntry, connect, connect_async
from kvstore.scheduler.turns import Turns

from .ssd_tools import BOUND_S, SMALL_SSD, SPEC, client_of, eventually, keys_of, save


@pytest.fixture
async def client(start_daemon: Callable[..., Any], run_dir: Path) -> AsyncIterator[AsyncClient]:
    daemon = start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"})
    with client_of(daemon) as worker:
        space = worker.open(SPEC)
        for number in range(4):
            keys = keys_of(space, 4, 100 + number)
            save(space, keys)
            entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
            space.update_session(b"talk %d" % number, expected_version=0, keep=0, append=entries)
        async with await connect_async(str(run_dir)) as client:
            yield client


async def queued(run_dir: Path, count: int) -> None:
    def look() -> None:
        with connect(str(run_dir)) as client:
            eventually(lambda: client.stats().gauges["queued_jobs"] == count)

    await asyncio.to_thread(look)


async def test_who_waits_is_told_and_runs_in_turn(client: AsyncClient, run_dir: Path) -> None:
    ran: list[str] = []
    go_on = asyncio.Event()

    async def request(session: str) -> None:
        async with turns.of(session):
            ran.append(session)
            await go_on.wait()

    async with Turns(client, SPEC.model, at_once=2) as turns:
        names = ("talk 0", "talk 1", "talk 0", "talk 2", "talk 3")
        requests = [asyncio.create_task(request(name)) for name in names]
        await queued(run_dir, 5)
        assert ran == ["talk 0", "talk 1"], "two at once"
        requests[3].cancel()
        await queued(run_dir, 4)
        go_on.set()
        await asyncio.gather(*requests, return_exceptions=True)
        assert ran == ["talk 0", "talk 1", "talk 0", "talk 3"], "who was cancelled left the line"
        await queued(run_dir, 0)
        assert turns.counters["failed"] == 0


async def test_a_request_that_fails_makes_room(client: AsyncClient) -> None:
    async with Turns(client, SPEC.model) as turns:
        with pytest.raises(ZeroDivisionError):
            async with turns.of("talk 0"):
                raise ZeroDivisionError
        async with asyncio.timeout(BOUND_S), turns.of("talk 0"):
            pass
