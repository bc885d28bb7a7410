"""What the tests of the SSD tier share: a small daemon, the weather of its disk, bytes that tell on themselves."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, Namespace, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.daemon import FAULTS
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason, Wait
from kvstore.v1 import stats_pb2, stats_pb2_grpc

from ..waiting import eventually as eventually

BOUND_S = 20.0
"""Every wait in these tests ends by then; it is a failure, never a measurement."""
CHUNK = 64 << 10
SPEC = NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", shard_bytes=CHUNK),))
DRAM_CHUNKS = 64
"""What the arena of SMALL_SSD holds."""
SMALL_SSD = {
    "dram_bytes": DRAM_CHUNKS * CHUNK,
    "segment_bytes": 1 << 20,
    "staging_bytes": 1 << 20,
    "staging_bytes_max": 16 << 20,
    "ssd_bytes": 256 << 20,
    "ssd_slab_bytes": 4 << 20,
    "ssd_index_bytes": 8 << 20,
    "ssd_deadline_ms": 2_000,
    "durable_within_ms": 400,
    "reserve_share_max": 0.5,
}
FAIR: list[dict[str, Any]] = []


class Weather:
    """The control file of the daemon's FaultyDisk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "faults.json"

    @property
    def environment(self) -> dict[str, str]:
        return {FAULTS: str(self.path)}

    def set(self, faults: Sequence[dict[str, Any]]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(list(faults)))
        os.replace(new, self.path)

    def clear(self) -> None:
        self.set(FAIR)


def client_of(daemon: Any, **settings: Any) -> Client:
    return connect(str(daemon.run_dir), **{"timeout_s": BOUND_S, "staging_bytes": 1 << 20, **settings})


def content(key: bytes, size: int = CHUNK) -> npt.NDArray[np.uint8]:
    """Bytes that nobody else would have: random, from the key."""
    return np.random.default_rng([*key]).integers(0, 256, size, dtype=np.uint8)


def keys_of(space: Namespace, count: int, chain: int = 0) -> list[ChunkKey]:
    """The first `count` chunks of conversation number `chain`."""
    tokens = np.arange(64 * count)
    tokens[0] = (1 << 31) + chain
    return space.keys(tokens)


def save(space: Namespace, keys: Sequence[ChunkKey], *, wait: Wait = Wait.VISIBLE) -> None:
    """Until all of them are committed, however often the daemon says that it is full."""
    for start in range(0, len(keys), 8):
        part = keys[start : start + 8]
        parent = keys[start - 1] if start else ChunkKey(b"")

        def attempt(part: Sequence[ChunkKey] = part, parent: ChunkKey = parent) -> bool:
            with space.write(part, parent=parent) as batch:
                for index in batch.granted:
                    batch.buffer(index)[:] = content(part[index])
                if batch.granted:
                    outcome = batch.commit(wait=wait)
                    assert outcome.ok, outcome
                known = (GrantResult.GRANTED, GrantResult.ALREADY)
                return all(result in known for result in batch.results)

        eventually(attempt, lambda: "the daemon stayed full")


def look(space: Namespace, keys: Sequence[ChunkKey], wait_ms: int = 2_000) -> list[tuple[Outcome, Reason]]:
    """What each key is found to be, waiting once for what is on SSD. Every hit must have its own bytes."""
    found: list[tuple[Outcome, Reason]] = []
    for start in range(0, len(keys), 8):
        part = keys[start : start + 8]
        with space.read(part, wait_ms=wait_ms, any_order=True) as lease:
            lease.settled()
            check_bytes(lease, part)
            # Pinned meanwhile, so that what is promoted does not push out what is there
            with space.read(part, any_order=True) as again:
                check_bytes(again, part)
                found += zip(again.outcomes, again.reasons, strict=True)
    return found


def check_bytes(lease: Any, keys: Sequence[ChunkKey]) -> None:
    out = np.empty(CHUNK, np.uint8)
    for index, outcome in enumerate(lease.outcomes):
        if outcome is Outcome.HIT and lease.copy_to(index, out):
            assert np.array_equal(out, content(keys[index])), f"wrong bytes under key {keys[index].hex()}"


def hits(space: Namespace, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
    """Which of `keys` can be had. What is on SSD but finds no slot at once is asked for again."""
    left = list(keys)
    had: set[ChunkKey] = set()
    deadline = time.monotonic() + BOUND_S
    while left:
        found = look(space, left)
        had.update(key for key, (outcome, _) in zip(left, found, strict=True) if outcome is Outcome.HIT)
        again = (Reason.ON_SSD, Reason.SLOW, Reason.BEING_SAVED, Reason.UNAVAILABLE)
        unknown = [key for key, (_, reason) in zip(left, found, strict=True) if reason in again]
        if len(unknown) < len(left):  # it goes on, however slowly
            deadline = time.monotonic() + BOUND_S
        assert time.monotonic() < deadline, f"neither had nor missing: {found}"
        left = unknown
    return had


def ssd_of(client: Client) -> stats_pb2.Ssd:
    return client.stats().ssd


def settled_ssd(client: Client) -> stats_pb2.Ssd:
    """Once all that was committed is on SSD and in the index."""

    def quiet() -> stats_pb2.Ssd | None:
        ssd = ssd_of(client)
        busy = ssd.to_store or ssd.reserved or ssd.oldest_not_durable_ms
        return None if busy else ssd

    found: stats_pb2.Ssd = eventually(quiet, lambda: f"never quiet: {ssd_of(client)}")
    return found


def in_state(client: Client, state: str) -> stats_pb2.Ssd:
    def reached() -> stats_pb2.Ssd | None:
        ssd = ssd_of(client)
        return ssd if ssd.state == state else None

    found: stats_pb2.Ssd = eventually(reached, lambda: f"never {state}: {ssd_of(client)}")
    return found


def demote(space: Namespace, keys: Sequence[ChunkKey], filler: int) -> None:
    """Push `keys` out of DRAM with other chunks (chain `filler`), once they are on SSD."""
    settled_ssd(space.client)
    save(space, keys_of(space, 2 * DRAM_CHUNKS, filler))
    settled_ssd(space.client)
    matched = space.match(keys)
    assert set(matched.reasons) == {Reason.ON_SSD}, matched


def in_background(
    work: Callable[[], None], stop: threading.Event
) -> tuple[threading.Thread, list[BaseException]]:
    """Run `work` again and again until `stop` is set; what it raises ends it, and is to be looked at."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, problems


def explained(space: Namespace, keys: Sequence[Any]) -> list[Any]:
    """What `kvctl explain` says of these chunks."""
    (row,) = space.client.unary(
        stats_pb2_grpc.StatsStub, "ListNamespaces", stats_pb2.ListNamespacesRequest()
    ).namespaces
    ask = stats_pb2.ExplainRequest(namespace_id=row.namespace_id, keys=keys)
    return list(space.client.unary(stats_pb2_grpc.StatsStub, "Explain", ask).chunks)
