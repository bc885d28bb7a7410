"""Batches that are read ahead of their turn, against the real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Namespace, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, Reason

BOUND_S = 20.0
SHARD = 64 << 10
SPEC = NamespaceSpec("reads", b"w", "test:bytes", 64, (GroupSpec("full", SHARD),))
SETTINGS = {"dram_bytes": 8 << 20, "segment_bytes": 1 << 20, "staging_bytes": 8 << 20}
BATCH = 8


@pytest.fixture(
    params=[("sealed", True), ("group", True), ("sealed", False)], ids=["sealed", "group", "grpc"]
)
def client(request: pytest.FixtureRequest, start_daemon: Callable[..., Any]) -> Iterator[Client]:
    protection, fast_lane = request.param
    daemon = start_daemon(protection=protection, fast_lane=fast_lane, **SETTINGS)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=8 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        yield client


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saved(space: Namespace, batches: int) -> list[list[ChunkKey]]:
    keys = space.keys(np.arange(64 * BATCH * batches))
    parts = [keys[first : first + BATCH] for first in range(0, len(keys), BATCH)]
    for part in parts:
        with space.write(part) as batch:
            assert len(batch.granted) == BATCH, batch
            for index in batch.granted:
                batch.copy_from(index, content(part[index]))
            assert batch.commit().ok
    return parts


def content(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key]).integers(0, 256, SHARD, dtype=np.uint8)


def check(keys: list[ChunkKey], lease: Any) -> None:
    out = np.zeros((BATCH, SHARD), np.uint8)
    assert lease.hits == BATCH, lease
    assert lease.copy_many([(index, 0, 0, out[index]) for index in range(BATCH)])
    for key, found in zip(keys, out, strict=True):
        assert np.array_equal(found, content(key)), "wrong bytes"


def pinned(client: Client) -> int:
    return sum(row.pinned_bytes for row in client.stats().namespaces) // SHARD


def test_every_batch_has_its_own_bytes_and_misses_are_its_own(client: Client) -> None:
    space = client.open(SPEC)
    batches = saved(space, 4)
    never = [ChunkKey(b"never")]
    wanted = [batches[0], never, batches[1], batches[3], batches[2], batches[0]]
    for keys, lease in zip(wanted, space.reads(wanted, ahead=2), strict=True):
        with lease:
            if keys is never:
                assert lease.hits == 0 and lease.reasons == (Reason.NEVER_SEEN,)
            else:
                check(keys, lease)
    eventually(lambda: pinned(client) == 0)


def test_who_ends_early_leaves_nothing_pinned(client: Client) -> None:
    space = client.open(SPEC)
    batches = saved(space, 4)
    with space.reads(batches, ahead=2) as reads:
        lease = next(reads)
        eventually(lambda: pinned(client) == 3 * BATCH)
    eventually(lambda: pinned(client) == BATCH)
    check(batches[0], lease)
    lease.release()
    eventually(lambda: pinned(client) == 0)


def test_batches_that_fit_one_at_a_time_are_hits_all_the_same(client: Client) -> None:
    """Two of them together are more than may be pinned: half of the arena."""
    space = client.open(SPEC)
    keys = [key for batch in saved(space, 10) for key in batch]
    halves = [keys[:40], keys[40:]]
    for half, lease in zip(halves, space.reads(halves), strict=True):
        with lease:
            assert lease.hits == len(half), lease
            assert lease.copy_to(39, out := np.zeros(SHARD, np.uint8)) and np.array_equal(
                out, content(half[39])
            )
