"""Bytes that are all there, saved in one call: by one message where that is possible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Namespace, connect, connect_async
from kvstore.errors import BadRequest
from kvstore.keys import ROOT
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, CommitResult, GrantResult, Wait

BOUND_S = 30.0
SHARD = 64 << 10
SPEC = NamespaceSpec("put", b"w", "test:bytes", 4, (GroupSpec("kv", SHARD, shard_count=2),))
SETTINGS = {"dram_bytes": 64 << 20, "segment_bytes": 8 << 20, "staging_bytes": 16 << 20}
GRANTED, ALREADY = GrantResult.GRANTED, GrantResult.ALREADY


@pytest.fixture(params=["sealed", "group"])
def protection(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def daemon(protection: str, start_daemon: Callable[..., Any]) -> Any:
    return start_daemon(protection=protection, **SETTINGS)


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=12 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def content(key: bytes, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key, shard]).integers(0, 256, SHARD, dtype=np.uint8)


def values(keys: list[ChunkKey]) -> list[Any]:
    return [content(key, shard) for key in keys for shard in (0, 1)]


def check(space: Namespace, keys: list[ChunkKey]) -> None:
    out = np.zeros((len(keys), 2, SHARD), np.uint8)
    with space.read(keys, pin=True) as lease:
        assert lease.hits == len(keys), lease.reasons
        pieces = [(n, shard, 0, out[n, shard]) for n in range(len(keys)) for shard in (0, 1)]
        assert lease.copy_many(pieces)
    for number, key in enumerate(keys):
        for shard in (0, 1):
            assert np.array_equal(out[number, shard], content(key, shard)), "wrong bytes"


def messages(client: Client) -> int:
    return client._attachment._last_id


@pytest.mark.parametrize("count", [1, 4, 32, 64])
def test_what_is_put_is_there_with_its_own_bytes(space: Namespace, count: int) -> None:
    """64 chunks are more than goes in one message."""
    keys = space.keys(np.arange(4 * count))
    put = space.put(keys, values(keys))
    assert put.ok and put.results == (GRANTED,) * count and put.committed == (CommitResult.VISIBLE,) * count
    check(space, keys)
    again = space.put(keys, values(keys))
    assert again.ok and again.results == (ALREADY,) * count and again.committed == ()


def test_what_is_new_takes_one_message(client: Client, space: Namespace, protection: str) -> None:
    first, keys = space.keys(np.arange(4)), space.keys(np.arange(100, 116))
    space.put(first, values(first))  # staging memory is there now
    before = messages(client)
    assert space.put(keys, values(keys)).ok
    if protection == "sealed":
        assert messages(client) == before + 1
    check(space, keys)


def test_of_what_is_there_in_part_the_rest_is_saved(space: Namespace) -> None:
    keys = space.keys(np.arange(4 * 6))
    space.put(keys[:1], values(keys[:1]))
    space.put(keys[3:4], values(keys[3:4]))
    put = space.put(keys, values(keys))
    assert put.results == (ALREADY, GRANTED, GRANTED, ALREADY, GRANTED, GRANTED)
    assert put.committed == (CommitResult.VISIBLE,) * 4
    check(space, keys)


def test_nothing_is_copied_ahead_of_a_grant_when_an_end_of_the_chain_is_known(
    client: Client, space: Namespace, protection: str
) -> None:
    """The daemon is asked first which of it is wanted."""
    keys = space.keys(np.arange(4 * 16))
    space.put(keys[:1], values(keys[:1]))
    space.put(keys[8:], values(keys[8:]))
    for part in (keys[4:], keys[:4]):  # the last is known; the first is
        before = client.stats().counters["saves_in_one_message"]
        assert space.put(part, values(part)).ok
        assert client.stats().counters["saves_in_one_message"] == before, protection
    check(space, keys)


def test_a_client_that_looks_nothing_up_leaves_it_to_the_daemon(daemon: Any, space: Namespace) -> None:
    """What is ALREADY there was copied for nothing, and its bytes are not looked at."""
    keys = space.keys(np.arange(4 * 4))
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, directory=False) as other:
        theirs = other.open(SPEC)
        assert theirs.put(keys[1:3], values(keys[1:3])).ok
        put = theirs.put(
            keys, [np.roll(value, 1) if n in (2, 3, 4, 5) else value for n, value in enumerate(values(keys))]
        )
    assert put.results == (GRANTED, ALREADY, ALREADY, GRANTED)
    check(space, keys)


def test_ranks_put_their_own_shards(space: Namespace) -> None:
    keys = space.keys(np.arange(4 * 3))
    for shard, result in ((1, CommitResult.WAITING_FOR_SHARDS), (0, CommitResult.VISIBLE)):
        put = space.put(keys, np.stack([content(key, shard) for key in keys]), shards=(shard,))
        assert put.committed == (result,) * 3
    check(space, keys)


def test_any_buffer_is_put_and_what_is_wrong_is_named(space: Namespace) -> None:
    keys = space.keys(np.arange(4))
    strided = np.zeros((SHARD, 2), np.uint8)
    strided[:, 0] = content(keys[0], 0)
    assert space.put(keys, [strided[:, 0], content(keys[0], 1).tobytes()]).ok
    check(space, keys)
    with pytest.raises(BadRequest, match="values"):
        space.put(keys, [content(keys[0], 0)])
    with pytest.raises(BadRequest, match=r"values\[1\]"):
        space.put(keys, [content(keys[0], 0), b"short"])
    with pytest.raises(BadRequest, match="values"):
        space.put(keys, None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="wait"):
        space.put(keys, values(keys), wait=9)  # type: ignore[arg-type]
    assert space.put([], []).results == ()


def test_an_error_is_data(space: Namespace, client: Client, daemon: Any) -> None:
    keys = space.keys(np.arange(4))
    put = space.put(keys, values(keys), wait=Wait.DURABLE)
    assert not put.ok and "no SSD" in str(put.error)
    daemon.kill()
    eventually(lambda: not client.connected)
    put = space.put(keys, values(keys))
    assert not put.ok and put.results == (GrantResult.UNAVAILABLE,)


def test_staging_memory_comes_back(client: Client, space: Namespace, protection: str) -> None:
    for turn in range(40):
        keys = space.keys(np.arange(4 * 32) + 1000 * turn)
        assert space.put(keys, values(keys)[:1] * 64).ok
    if protection == "sealed":
        staging = client._attachment.staging
        assert staging is not None
        eventually(lambda: staging.space.free_bytes == staging.space.size)


def test_the_awaitable_client_puts_too(daemon: Any) -> None:
    async def put() -> None:
        async with await connect_async(str(daemon.run_dir), timeout_s=BOUND_S) as client:
            space = await client.open(SPEC)
            many = space.keys(np.arange(4 * 40))
            for parent, keys in ((ROOT, many[:2]), (many[1], many[2:])):  # the second is copied in a thread
                assert (await space.put(keys, values(keys), parent=parent)).ok
            async with await space.read(many, pin=True) as lease:
                assert lease.hits == 40
                out = np.zeros(SHARD, np.uint8)
                assert await lease.copy_to(39, out, shard=1)
                assert np.array_equal(out, content(many[39], 1))

    asyncio.run(put())
