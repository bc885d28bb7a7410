"""Two daemons on one REMOTE store: each is a node with a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def starter(start_daemon: Callable[..., Any], run_dir: Path, **common: Any) -> Callable[..., Node]:
    """start(name, **settings) -> Node"""

    def start(name: str, **settings: Any) -> Node:
        folder = run_dir.parent / name
        return Node(start_daemon(run_dir=folder, **{**SMALL_REMOTE, **common, **settings}))

    return start
