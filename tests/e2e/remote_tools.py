"""Two daemons on one REMOTE store: each is a node with a folder of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.client import Client, Namespace, connect
from kvstore.types import ChunkKey, Outcome

from .ssd_tools import BOUND_S, CHUNK, DRAM_CHUNKS, SPEC, eventually, keys_of, look, save

SMALL_REMOTE = {
    "dram_bytes": DRAM_CHUNKS * CHUNK,
    "segment_bytes": 1 << 20,
    "staging_bytes": 1 << 20,
    "staging_bytes_max": 16 << 20,
    "reserve_share_max": 0.5,
    "pin_share_max": 1.0,
    "remote_writes": "write-through",
    "remote_deadline_ms": 2_000,
    "remote_lookup_ms": 5_000,  # a loaded machine: what is there is to be found
    "drain_ms": 5_000,
}


class Node:
    """A daemon, a client of it, and the one namespace."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.client: Client = connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=1 << 20)
        self.space: Namespace = self.client.open(SPEC)

    def keys(self, count: int, chain: int = 0) -> list[ChunkKey]:
        return keys_of(self.space, count, chain)

    def save(self, keys: Sequence[ChunkKey]) -> None:
        save(self.space, keys)

    def stored_remotely(self, count: int) -> None:
        """Until so many chunks were written there."""
        eventually(lambda: self.counter("remote_chunks_stored") >= count, self.counters)

    def counters(self) -> dict[str, int]:
        return dict(self.client.stats().counters)

    def counter(self, name: str) -> int:
        return self.counters().get(name, 0)

    def read(self, keys: Sequence[ChunkKey]) -> list[str]:
        """ "HIT" or the reason of each; every byte that came is compared."""
        found = look(self.space, keys, wait_ms=10_000)
        return ["HIT" if outcome is Outcome.HIT else reason.name for outcome, reason in found]

    def close(self) -> None:
        self.client.close()


class SlowLine:
    """Between a node and a server on loopback: so many bytes a second each way, of all connections together; 0: as they
    come."""

    def __init__(self, port: int) -> None:
        self._server = port
        self.bytes_per_s = 0
        self._ways = threading.Lock(), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._server))
                self._open += (here, there)
                for way, ends in zip(self._ways, ((here, there), (there, here)), strict=True):
                    threading.Thread(target=self._carry, args=(*ends, way), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, way: threading.Lock) -> None:
        with suppress(OSError):
            while data := source.recv(64 << 10):
                while data and (speed := self.bytes_per_s):
                    piece, data = data[: speed // 10 or 1], data[speed // 10 or 1 :]
                    with way:
                        time.sleep(len(piece) / speed)
                    target.sendall(piece)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def starter(start_daemon: Callable[..., Any], run_dir: Path, **common: Any) -> Callable[..., Node]:
    """start(name, **settings) -> Node"""

    def start(name: str, **settings: Any) -> Node:
        folder = run_dir.parent / name
        return Node(start_daemon(run_dir=folder, **{**SMALL_REMOTE, **common, **settings}))

    return start
