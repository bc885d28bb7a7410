"""Chunks that are handed over while the next ones are written, against the real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Namespace, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, Reason

from ..waiting import eventually

BOUND_S = 20.0
SHARD = 1 << 20
COUNT = 12
SPEC = NamespaceSpec("ahead", b"w", "test:bytes", 64, (GroupSpec("full", SHARD, shard_count=2),))
SETTINGS = {"dram_bytes": 128 << 20, "segment_bytes": 16 << 20, "staging_bytes": 32 << 20}


@pytest.fixture(params=["sealed", "group"])
def daemon(request: pytest.FixtureRequest, start_daemon: Callable[..., Any]) -> Any:
    return start_daemon(protection=request.param, **SETTINGS)


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=32 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def keys_of(space: Namespace, first: int = 0) -> list[ChunkKey]:
    return space.keys(np.arange(first, first + 64 * COUNT))


def content(key: bytes, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key, shard]).integers(0, 256, SHARD, dtype=np.uint8)


def check(space: Namespace, keys: list[ChunkKey]) -> None:
    out = np.zeros(SHARD, np.uint8)
    with space.read(keys) as lease:
        assert lease.hits == len(keys), lease
        for index, key in enumerate(keys):
            for shard in (0, 1):
                assert lease.copy_to(index, out, shard=shard)
                assert np.array_equal(out, content(key, shard)), f"wrong bytes under key {index}"


def slots(client: Client) -> tuple[int, int]:
    pools = client.stats().pools
    return sum(pool.reserved for pool in pools), sum(pool.quarantined for pool in pools)


@pytest.mark.parametrize("order", [1, -1])
def test_bytes_come_back_bit_exact_in_whatever_order_they_are_written(
    client: Client, space: Namespace, order: int
) -> None:
    for turn in range(
        3
    ):  # the second and third use staging memory again, and slots that others have let go of
        keys = keys_of(space, turn << 12)
        with space.write(keys) as batch:
            assert len(batch.granted) == COUNT, batch
            for index in batch.granted[::order]:
                for shard in (1, 0):
                    batch.copy_from(index, content(keys[index], shard), shard=shard)
            assert batch.commit().ok
        check(space, keys)
        client_reserved, quarantined = slots(client)
        assert (client_reserved, quarantined) == (0, 0)


def test_nothing_is_seen_of_what_was_only_handed_over(client: Client, space: Namespace) -> None:
    keys = keys_of(space)
    with space.write(keys) as batch:
        for index in batch.granted[:-1]:
            for shard in (0, 1):
                batch.copy_from(index, content(keys[index], shard), shard=shard)
        assert set(space.match(keys).reasons) == {Reason.BEING_SAVED}
    assert set(space.match(keys).reasons) == {Reason.NEVER_SEEN}
    eventually(lambda: slots(client) == (0, 0))
    with space.write(keys) as batch:
        for index in batch.granted:
            for shard in (0, 1):
                batch.copy_from(index, content(keys[index], shard), shard=shard)
        assert batch.commit().ok
    check(space, keys)


WRITER = """
import sys, numpy as np
from kvstore.client import connect
from kvstore.layout import GroupSpec, NamespaceSpec
client = connect(sys.argv[1], timeout_s=20, staging_bytes=32 << 20)
space = client.open(NamespaceSpec("ahead", b"w", "test:bytes", 64, (GroupSpec("full", 1 << 20, shard_count=2),)))
batch = space.write(space.keys(np.arange(64 * 12)))
for index in batch.granted[:-1]:
    for shard in (0, 1):
        batch.copy_from(index, np.full(1 << 20, 7, np.uint8), shard=shard)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_is_killed_in_the_middle_leaves_nothing_behind(
    daemon: Any, client: Client, space: Namespace
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, str(daemon.run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None and writer.stdin is not None
    assert writer.stdout.readline() == "written\n"
    keys = keys_of(space)
    assert set(space.match(keys).reasons) == {Reason.BEING_SAVED}
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(BOUND_S)
    writer.stdin.close()
    writer.stdout.close()
    eventually(lambda: set(space.match(keys).reasons) == {Reason.NEVER_SEEN})
    eventually(lambda: slots(client) == (0, 0))


def test_a_daemon_that_stands_still_fails_the_save_and_nothing_else(
    daemon: Any, client: Client, space: Namespace
) -> None:
    keys = keys_of(space)
    with space.write(keys) as batch:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            for index in batch.granted:
                for shard in (0, 1):
                    batch.copy_from(index, content(keys[index], shard), shard=shard)
            assert not batch.commit(timeout_s=0.2).ok
        finally:
            os.kill(daemon.pid, signal.SIGCONT)

    def seen() -> bool:
        return not set(space.match(keys).reasons) & {Reason.BEING_SAVED, Reason.UNAVAILABLE}

    eventually(seen)
    if Reason.NEVER_SEEN not in space.match(keys).reasons:
        check(space, keys)  # the commit came after all: then with the right bytes
    later = keys_of(space, 1 << 14)
    with space.write(later) as batch:
        for index in batch.granted:
            for shard in (0, 1):
                batch.copy_from(index, content(later[index], shard), shard=shard)
        assert batch.commit().ok
    check(space, later)
