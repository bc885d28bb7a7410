"""A forget is answered when it is durable, or says that it is not; and a full index lets the oldest give way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Namespace, SessionEntry
from kvstore.types import Outcome, Reason

from .ssd_tools import SMALL_SSD, SPEC, Weather, client_of, in_state, keys_of, save, settled_ssd

NOT_DURABLE = 3
NAME = "x" * 240


def kvctl(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--run-dir", str(run_dir), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )


@pytest.fixture
def start(start_daemon: Callable[..., Any], run_dir: Path) -> Callable[..., Any]:
    small = {**SMALL_SSD, "ssd_index_bytes": 1 << 20, "ssd_dir": run_dir.parent / "ssd"}
    return lambda **settings: start_daemon(**{**small, **settings})


def name(space: Namespace, session: str, number: int = 0, *, entries: int = 1) -> None:
    """Let a session name a chunk that is there, so often."""
    key = keys_of(space, 8, 1)[number]
    append = [SessionEntry(key, 64 * place, 64, approximate=True) for place in range(entries)]
    space.update_session(session, expected_version=0, keep=0, append=append)


def there(client: Client, session: str, number: int) -> tuple[bool, str]:
    space = client.open(SPEC)
    found = space.match([keys_of(space, 8, 1)[number]])
    what = "there" if found.outcomes[0] is not Outcome.MISS else Reason(found.reasons[0]).name
    return space.get_session(session) is not None, what


@pytest.mark.parametrize("calls", ["index_commit", "write"])
def test_a_forget_says_whether_a_restart_could_bring_it_back(
    start: Callable[..., Any], run_dir: Path, calls: str
) -> None:
    weather = Weather(run_dir.parent)
    daemon = start(environment=weather.environment)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys_of(space, 8, 1))
        name(space, "secret", 7)
        settled_ssd(client)
        weather.set([{"calls": [calls], "do": "EIO"}])
        save(space, keys_of(space, 8, 2))
        in_state(client, "read_only")
        done = kvctl(run_dir, "forget", "secret")
        if calls == "write":  # slab files only: the index is well
            assert (done.returncode, done.stdout) == (0, "the session and 1 chunk dropped\n")
        else:
            assert done.returncode == NOT_DURABLE
            assert "but not for good yet, it could come back: the SSD tier is read_only" in done.stdout
            assert "tried again; ask again to see it done" in done.stdout, "the reason is told to its end"
            again = kvctl(run_dir, "forget", "--json", "secret")
            assert again.returncode == NOT_DURABLE
            assert json.loads(again.stdout)["durable"] is False
            assert client.stats().ssd.to_forget
            weather.clear()
            in_state(client, "ok")
            assert kvctl(run_dir, "forget", "secret").returncode in (0, 1)
            settled_ssd(client)
            assert "no such session" in kvctl(run_dir, "forget", "secret").stderr
    daemon.kill()
    weather.clear()
    with client_of(start()) as client:
        assert there(client, "secret", 7) == (False, "NEVER_SEEN")


@pytest.mark.timeout(600)  # of a machine that does much else
@pytest.mark.parametrize(("burst", "entries"), [(100, 1), (2_000, 1), (100, 100)])
def test_an_index_full_of_sessions_lets_the_oldest_give_way(
    start: Callable[..., Any], run_dir: Path, burst: int, entries: int
) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys_of(space, 8, 1))
        name(space, "secret", 7)
        count = 0
        while not client.stats().counters["index_full"]:
            for _ in range(burst):
                name(space, f"{NAME}{count}", entries=entries)
                count += 1
            if burst > 1_000:
                settled_ssd(client)
        settled_ssd(client)
        assert client.stats().ssd.index_used_bytes > client.stats().ssd.index_max_bytes * 7 // 8
        name(space, "secret again", 6)
        done = space.forget("secret again")
        assert done and not done.not_durable
        assert not space.forget(keys=[keys_of(space, 8, 1)[5]]).not_durable
        save(space, keys_of(space, 8, 2))
        settled_ssd(client)
        ssd = client.stats().ssd
        assert ssd.state == "ok"
        assert ssd.index_sessions_bytes > ssd.index_max_bytes * 3 // 4, "little more gave way than was needed"
        assert ssd.index_used_bytes <= ssd.index_max_bytes < ssd.index_bytes == 1 << 20
        assert "the index is nearly full" in kvctl(run_dir, "doctor").stdout
        newest = f"{NAME}{count - 1}"
        assert space.get_session(newest) is not None
    daemon.kill()
    with client_of(start()) as client:
        assert not there(client, "secret again", 6)[0]
        assert there(client, newest, 5) == (True, "NEVER_SEEN")
        space = client.open(SPEC)
        assert Outcome.MISS not in space.match(keys_of(space, 8, 2)).outcomes
        assert space.get_session("secret") is None, "it was the oldest"
