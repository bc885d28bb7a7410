"""A session that goes on from node to node while the Redis cluster that knows of it fails over in mid-write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import connect
from kvstore.errors import StoreError

from ..e2e.test_fleet import Member
from ..e2e.test_fleet_sessions import NAME, go_on, hint, in_dram, told
from ..fleet_tools import BOUND_S, SECRET, eventually, needs_redis
from .servers import RedisCluster

pytestmark = [pytest.mark.slow, needs_redis]


@pytest.fixture
def join(
    start_daemon: Callable[..., Any], cluster: RedisCluster, run_dir: Path, tmp_path: Path
) -> Iterator[Callable[..., Member]]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    with ExitStack() as clients:

        def start(name: str) -> Member:
            daemon = start_daemon(
                run_dir=run_dir.parent / name,
                node_name=name,
                registry_url=cluster.url,
                registry_ttl_ms=4_000,
                remote_url=cluster.url,
                remote_writes="write-through",
                fleet_secret_file=secret,
                peer_address="127.0.0.1:0",
                peer_plaintext=True,
                peer_deadline_ms=5_000,
                remote_deadline_ms=5_000,
            )
            client = clients.enter_context(connect(str(daemon.run_dir), timeout_s=BOUND_S))
            return Member(daemon, name, client)

        yield start


class Writing:
    """Another conversation of a node, saved chunk by chunk until it is told to end."""

    def __init__(self, member: Member, chunks: int) -> None:
        self._member = member
        self.keys = member.space.keys(np.arange(1_000_000, 1_000_000 + 64 * chunks))
        self.saved = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.saved < len(self.keys) and not self._ends.wait(0.02):
            self._member.save(self.keys[: self.saved + 1], self.saved)
            self.saved += 1

    def end(self) -> None:
        self._ends.set()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "a save hangs"


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_session_goes_on_while_a_cluster_fails_over(
    join: Callable[..., Member], cluster: RedisCluster, killed: int
) -> None:
    """Whichever of the three masters it is. B goes on before anybody has taken over, C when A is gone, too."""
    a, b, c = join("a"), join("b"), join("c")
    keys = go_on(a, 6)
    for member in (b, c):
        eventually(lambda member=member: told(member) == ("a", keys), "all hear of the session")
        eventually(lambda member=member: member.knows(keys), "and of what it has")
    eventually(lambda: a.counter("remote_chunks_stored") >= 6, "it is written")
    writing = Writing(a, 200)
    eventually(lambda: writing.saved >= 8, "writes are under way")
    cluster.kill(cluster.masters()[killed])
    assert hint(b).name == "ACCEPTED"
    longer = go_on(b, 9)
    assert b.computed == 3, "what a peer holds is computed again while a master is away"
    eventually(lambda: len(cluster.masters()) == 3, "a replica takes over")
    eventually(lambda: told(c) == ("b", longer), "c hears who went on with it")
    eventually(lambda: c.knows(longer), "and knows where all of it is")
    writing.end()
    assert a.load(writing.keys[: writing.saved]) == writing.saved, "what was saved meanwhile is there"
    a.daemon.kill()
    go_on(c, 12)
    assert c.computed == 3, "what b or the store holds is computed again"
    written = b.counter("remote_chunks_stored")
    more = iter(range(64))

    def written_again() -> bool:
        with suppress(StoreError):
            start = 2_000_000 + 64 * next(more)
            b.save(b.space.keys(np.arange(start, start + 64)))
        return b.counter("remote_chunks_stored") > written

    eventually(written_again, "it is written to again")
    d = join("d")
    eventually(lambda: told(d) == ("c", c.space.keys(np.arange(64 * 12))), "who comes later hears of it, too")
    assert hint(d).name == "ACCEPTED"
    eventually(lambda: in_dram(d, d.space.keys(np.arange(64 * 12))) == 12, "and gets all of it ahead")
    assert d.space.get_session(NAME) is None
