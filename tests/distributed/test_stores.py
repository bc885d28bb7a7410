"""The REMOTE store on a Redis cluster that fails over, and on an S3 (`make test-distributed`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..e2e.remote_tools import Node, starter
from ..fleet_tools import eventually, needs_redis
from .servers import BUCKET, S3, RedisCluster

pytestmark = pytest.mark.slow


def closing(nodes: list[Node]) -> None:
    for node in nodes:
        node.close()


@needs_redis
def test_a_cluster_that_fails_over_in_mid_write(
    start_daemon: Callable[..., Any],
    run_dir: Path,
    cluster: RedisCluster,
) -> None:
    start = starter(start_daemon, run_dir, remote_url=cluster.url)
    a, b = start("a"), start("b")
    first = a.keys(16, chain=1)
    a.save(first)
    a.stored_remotely(16)
    assert b.read(first) == ["HIT"] * 16
    for chain in range(2, 6):
        if chain == 3:
            cluster.kill(cluster.masters()[0])
        a.save(a.keys(8, chain=chain))
    eventually(lambda: len(cluster.masters()) == 3, "a replica takes over")
    later = a.keys(8, chain=9)
    written = a.counter("remote_chunks_stored")
    a.save(later)

    def written_again() -> bool:
        if a.counter("remote_chunks_stored") >= written + 8:
            return True
        a.save(a.keys(8, chain=10 + a.counter("remote_trips")))
        return False

    eventually(written_again, "it is written to again")
    found = b.read(first)  # by now in its DRAM
    assert found == ["HIT"] * 16
    c = start("c")
    eventually(lambda: sum(name == "HIT" for name in c.read(first[:8])) >= 1, "a copy serves")
    closing([a, b, c])


def test_an_s3_keeps_packs_and_serves_them(
    start_daemon: Callable[..., Any],
    run_dir: Path,
    s3: S3,
) -> None:
    start = starter(start_daemon, run_dir, remote_url=f"s3://{BUCKET}/cache", environment=s3.environment)
    a, b = start("a"), start("b")
    keys = a.keys(40)
    a.save(keys)
    a.stored_remotely(40)
    objects = [entry["path"] for page in __import__("obstore").list(s3.store()) for entry in page]
    assert 2 <= len([path for path in objects if "/data/" in path]) <= 30, objects
    assert b.space.match(keys).usable == 40
    assert b.read(keys) == ["HIT"] * 40
    assert not a.space.forget(keys=keys[:8]).not_durable
    assert "HIT" not in start("c").read(keys[:8])
    os.kill(s3.pid, signal.SIGSTOP)
    try:
        own = a.keys(8, chain=5)
        a.save(own)
        assert a.read(own) == ["HIT"] * 8
        assert a.space.match(a.keys(4, chain=6)).usable == 0
    finally:
        os.kill(s3.pid, signal.SIGCONT)
    closing([a, b])
