"""Redis over a unix socket, by redis-py: sets in a pipeline, gets one by one with hiredis, its fastest ways for values
of 2 MiB. It returns each value as an object, which is copied into the caller's array."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from peers import PEERS_PYTHON, ByKey, Item, Server, Shape, attempts, not_installed

PYTHON = PEERS_PYTHON
GIVES = "eviction, expiry; no checksum, no pin while a value is read; one thread serves all clients"


def missing() -> str:
    return not_installed("redis-server", PYTHON)


def start(folder: Path, room_bytes: int, name: str = "redis") -> Server:
    path = str(folder / name)
    command = [
        *("redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"),
        *("--maxmemory", str(room_bytes), "--maxmemory-policy", "allkeys-lru", "--dir", str(folder)),
    ]
    return Server({"path": path}, (subprocess.Popen(command, stdout=subprocess.DEVNULL),))


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        import redis

        super().__init__(shape)
        self._redis = redis.Redis(unix_socket_path=address["path"])
        for _ in attempts("Redis"):
            try:
                self._redis.ping()
            except redis.ConnectionError:
                continue
            break

    def put(self, plan: list[Item]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for key, value, _ in plan:
            pipeline.set(key, memoryview(value))
        assert all(pipeline.execute())

    def get(self, plan: list[Item]) -> None:
        for key, _, out in plan:
            np.copyto(out, np.frombuffer(self._redis.get(key), np.uint8))

    def forget(self, plan: list[Item]) -> None:
        self._redis.delete(*(item.key for item in plan))

    def close(self) -> None:
        self._redis.close()
