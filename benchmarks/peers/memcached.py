"""memcached over a unix socket, by pymemcache: one by one, its fastest way for values of 2 MiB. It returns each value
as an object, which is copied into the caller's array."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from peers import PEERS_PYTHON, ByKey, Item, Server, Shape, connected, not_installed

PYTHON = PEERS_PYTHON
GIVES = "eviction, expiry; no checksum"


def missing() -> str:
    return not_installed("memcached", PYTHON)


def start(folder: Path, room_bytes: int, name: str = "memcached") -> Server:
    path = str(folder / name)
    command = ["memcached", "-u", "root", "-s", path, "-m", str(room_bytes >> 20), "-I", "64m", "-t", "4"]
    return Server({"path": path}, (subprocess.Popen(command),))


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        from pymemcache.client.base import Client as Library

        super().__init__(shape)
        connected(address["path"]).close()
        self._memcached = Library(f"unix:{address['path']}")

    def put(self, plan: list[Item]) -> None:
        for key, value, _ in plan:
            assert self._memcached.set(key, value.tobytes(), noreply=False)

    def get(self, plan: list[Item]) -> None:
        for key, _, out in plan:
            np.copyto(out, np.frombuffer(self._memcached.get(key), np.uint8))

    def forget(self, plan: list[Item]) -> None:
        for item in plan:
            self._memcached.delete(item.key, noreply=False)

    def close(self) -> None:
        self._memcached.close()
