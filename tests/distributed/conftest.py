"""Daemons as the tests of e2e/ start them, and the servers that nodes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..e2e.conftest import fast_lane, launch, no_server_is_left, run_dir, start_daemon
from .servers import S3, RedisCluster

__all__ = ["fast_lane", "launch", "no_server_is_left", "run_dir", "start_daemon"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def s3() -> Iterator[S3]:
    made = S3()
    yield made
    made.close()
