"""A real redis-server for a test, and what nodes of a fleet need."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .waiting import eventually as eventually

BOUND_S = 30.0
"""Within this what should happen does happen; else it is a failure."""
SECRET = "0123456789abcdef0123456789abcdef"

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (apt-get install redis-server)"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Keeps nothing on disk. `stop` and `start` again: it has forgotten everything."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port)

    def start(self) -> None:
        options = [
            *("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(self._folder), *self._options),
        ]
        self._process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        with self.client() as client:
            eventually(lambda: _answers(client), "redis-server answers")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()
