"""One file per value in memory: no server, no limit, no check."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from peers import ByKey, Item, Server, Shape

GIVES = (
    "no server; no eviction, no checksum, no pin: whoever deletes while another reads, or stops halfway, wins"
)
MEMORY = Path("/dev/shm")


def missing() -> str:
    return "" if MEMORY.is_dir() else f"there is no {MEMORY}"


def start(folder: Path, room_bytes: int) -> Server:
    return Server({})


class Client(ByKey):
    suffix = "bin"

    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._folder = tempfile.mkdtemp(prefix="kvs-", dir=MEMORY)

    def key(self, number: int) -> str:
        return f"{self._folder}/{number}.{self.suffix}"

    def put(self, plan: list[Item]) -> None:
        for key, value, _ in plan:
            with open(key, "wb", buffering=0) as file:
                assert file.write(value) == value.nbytes

    def get(self, plan: list[Item]) -> None:
        for key, _, out in plan:
            with open(key, "rb", buffering=0) as file:
                assert file.readinto(out) == out.nbytes

    def forget(self, plan: list[Item]) -> None:
        for item in plan:
            os.unlink(item.key)

    def close(self) -> None:
        shutil.rmtree(self._folder)
