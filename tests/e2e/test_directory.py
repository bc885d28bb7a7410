"""Reads without a message, against the real daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.client import Client, Namespace, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, Outcome, Reason
from kvstore.v1 import descriptor_pb2

BOUND_S = 30.0
SHARD = 64 << 10
SPEC = NamespaceSpec("found", b"w", "test:bytes", 4, (GroupSpec("kv", SHARD, shard_count=2),))
SETTINGS = {"dram_bytes": 8 << 20, "segment_bytes": 1 << 20, "staging_bytes": 4 << 20}


@pytest.fixture
def client(start_daemon: Callable[..., Any]) -> Iterator[Client]:
    daemon = start_daemon(**SETTINGS)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    space = client.open(SPEC)
    assert space._binding.published is not None, "the directory is mapped as soon as it is open"
    return space


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def keys_of(first: int, count: int) -> list[ChunkKey]:
    return [ChunkKey(b"key %5d" % number * (3 + number % 3)) for number in range(first, first + count)]


def content(key: bytes, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key, shard]).integers(0, 256, SHARD, dtype=np.uint8)


def save(space: Namespace, keys: list[ChunkKey], **how: Any) -> None:
    with space.write(keys, **how) as batch:
        for index in batch.granted:
            for shard in range(2):
                batch.copy_from(index, content(keys[index], shard), shard=shard)
        assert batch.commit().ok


def loaded(lease: Any, keys: list[ChunkKey]) -> bool:
    out = np.zeros((len(keys), 2, SHARD), np.uint8)
    pieces = [(index, shard, 0, out[index, shard]) for index in range(len(keys)) for shard in range(2)]
    if not lease.copy_many(pieces):
        return False
    for index, key in enumerate(keys):
        for shard in range(2):
            assert np.array_equal(out[index, shard], content(key, shard)), "wrong bytes"
    return True


def asked(client: Client) -> int:
    attachment = client._connection.attachment
    assert attachment is not None
    return attachment._last_id


def of_namespace(client: Client) -> Any:
    return client.stats().namespaces[0]


def test_a_read_and_a_match_of_what_is_there_ask_nobody(client: Client, space: Namespace) -> None:
    keys = keys_of(0, 8)
    save(space, keys)
    with space.read(keys[:1], pin=True):  # maps the segment
        pass
    eventually(lambda: of_namespace(client).pinned_bytes == 0)
    before, lookups = asked(client), of_namespace(client).lookups
    stats = asked(client) - before
    for _ in range(3):
        with space.read(keys) as lease:
            assert lease.hits == 8 and lease.reasons == (Reason.NONE,) * 8 and lease.alive
            assert loaded(lease, keys)
        for index in (0, 7):
            with space.read([keys[index]]) as lease:
                assert loaded(lease, [keys[index]])
    assert space.match(keys).usable == 8
    assert space.match(keys, token_count=32).usable == 7, "a token is left to compute"
    peeked = space.peek(keys + keys_of(50, 1), token_count=20)
    assert peeked is not None and (peeked.usable, peeked.hits) == (4, 4)
    assert asked(client) - before <= stats + 1, "but for a heartbeat"
    # and the daemon hears of it
    eventually(lambda: of_namespace(client).lookups == lookups + 3 * 10)
    assert of_namespace(client).hits >= 3 * 10


def test_what_may_be_beyond_the_node_cannot_be_told_by_a_look(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(0, 2)
    save(space, keys)
    eventually(lambda: space.peek(keys) is not None)
    assert space.peek(keys + keys_of(50, 1)) is not None
    assert space._binding.published is not None
    monkeypatch.setattr(space._binding.published[1].view, "ask_for_others", True)
    assert space.peek(keys + keys_of(50, 1)) is None
    peeked = space.peek(keys)
    assert peeked is not None and peeked.usable == 2


def test_why_something_is_missing_is_asked_when_somebody_wants_to_know(
    client: Client, space: Namespace
) -> None:
    keys = keys_of(0, 3)
    save(space, keys)
    space.forget(keys=[keys[1]])
    never = keys_of(90, 1)[0]
    before = asked(client)
    matched = space.match([keys[0], keys[1], never])
    assert matched.usable == 1
    assert matched.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.MISS)
    with space.read([keys[0], never, keys[2]]) as prefix:
        assert prefix.hits == 1
        with space.read([keys[0], never, keys[2]], any_order=True) as any_order:
            assert any_order.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.HIT)
            assert asked(client) - before <= 1, "but for a heartbeat"
            assert matched.reasons == (Reason.NONE, Reason.FORGOTTEN, Reason.NEVER_SEEN)
            assert prefix.reasons == (Reason.NONE, Reason.NEVER_SEEN, Reason.BEYOND_MISS)
            assert any_order.reasons == (Reason.NONE, Reason.NEVER_SEEN, Reason.NONE)
            out = np.zeros(SHARD, np.uint8)
            assert any_order.copy_to(2, out, shard=1) and np.array_equal(out, content(keys[2], 1))
            assert not any_order.copy_to(1, out)


def test_what_is_forgotten_is_void_at_once_though_its_slot_is_in_use(
    client: Client, space: Namespace
) -> None:
    """Pins keep the slots: neither generation nor tag tells, but the row does."""
    keys = keys_of(0, 4)
    save(space, keys)
    held = space.read(keys, pin=True)
    with space.read(keys) as lease:
        assert space.forget(keys=keys) == 4
        assert not loaded(lease, keys)
    assert loaded(held, keys), "a pin goes on"
    held.release()
    assert space.read(keys).hits == 0


def test_a_load_that_is_overtaken_is_void_and_one_in_parts_is_pinned(
    client: Client, space: Namespace
) -> None:
    keys = keys_of(0, 4)
    save(space, keys)
    lease, whole = space.read(keys), space.read(keys)
    out = np.zeros(SHARD, np.uint8)
    assert lease.copy_to(1, out[:4096], offset=0), "the rest has to be there, too"
    assert of_namespace(client).pinned_bytes == 4 * 2 * SHARD
    for first in range(100, 600, 20):
        save(space, keys_of(first, 20))
    assert lease.copy_to(1, out[4096:], offset=4096) and np.array_equal(out, content(keys[1], 0))
    assert lease.unsafe_view(2, 1) is not None
    assert loaded(whole, keys), "another try finds them pinned"
    lease.release()
    whole.release()
    eventually(lambda: of_namespace(client).pinned_bytes == 0)
    gone = space.read(keys)
    assert gone.hits == 4
    for first in range(600, 1100, 20):
        save(space, keys_of(first, 20))
    assert not loaded(gone, keys)
    assert client.counters["loads_void"] == 1


def test_a_place_of_another_key_is_refused(client: Client, space: Namespace) -> None:
    """A row that was torn between its key and its place: only the tag can tell."""
    keys = keys_of(0, 2)
    save(space, keys)
    lease = space.read(keys)
    mapped = lease._grant.mapped  # type: ignore[union-attr]
    for column in mapped.extents.columns:
        column[0], column[1], column[2], column[3] = column[2], column[3], column[0], column[1]
    assert not mapped.intact([0]) and not mapped.intact([3])
    lease.release()


def test_who_never_touched_the_daemon_keeps_what_is_hot(client: Client, space: Namespace) -> None:
    """Ten times the arena is saved by others meanwhile, and the uses are all in the directory."""
    hot = keys_of(0, 8)
    save(space, hot)
    for first in range(100, 700, 10):
        with space.read(hot) as lease:
            assert lease.hits == 8, first
            assert loaded(lease, hot)
        save(space, keys_of(first, 10))
    assert client.counters["reads_pinned_late"] == 0


def test_all_of_it_can_be_turned_off(start_daemon: Callable[..., Any]) -> None:
    for settings, own in (({"directory": False}, True), ({}, False)):
        daemon = start_daemon(**SETTINGS, **settings)
        with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20, directory=own) as client:
            space = client.open(SPEC)
            keys = keys_of(0, 2)
            save(space, keys)
            assert space.peek(keys) is None
            assert space.match(keys).usable == 2
            with space.read(keys) as lease:
                assert lease.lease_id and loaded(lease, keys)
        daemon.process.kill()
        daemon.process.wait(BOUND_S)


def test_a_directory_is_for_those_who_opened_the_namespace(client: Client, space: Namespace) -> None:
    number = space._binding.now()[1]  # type: ignore[index]
    with connect(client._connection.run_dir, timeout_s=BOUND_S) as other:
        attachment = other._connection.attachment
        assert attachment is not None
        refused: list[descriptor_pb2.DescriptorReply] = []
        request = descriptor_pb2.DescriptorRequest(
            directory=descriptor_pb2.DirectoryRequest(namespace_id=number)
        )
        attachment._exchange(request, lambda reply, fds: refused.append(reply), time.monotonic() + BOUND_S)
        assert refused[0].error.field == "namespace_id"
        assert attachment.map_directory(number, time.monotonic() + BOUND_S) is None
    mapping = space._binding.published[1].view  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        mapping.buckets[0, 0] = 1


def test_after_a_restart_it_is_another_directory(
    start_daemon: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    daemon = start_daemon(**SETTINGS)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20) as client:
        space = client.open(SPEC)
        keys = keys_of(0, 2)
        save(space, keys)
        first = space._binding.published
        lease = space.read(keys)
        daemon.process.kill()
        daemon.process.wait(BOUND_S)
        eventually(lambda: not lease.alive)
        assert not loaded(lease, keys) and space.peek(keys) is None
        launch(**SETTINGS).wait_for("ready")
        eventually(lambda: space._binding.published is not None and space._binding.published is not first)
        peeked = space.peek(keys)
        assert peeked is not None and peeked.usable == 0
        save(space, keys)
        with space.read(keys) as again:
            assert loaded(again, keys)


def test_readers_under_full_churn_get_right_bytes_or_none() -> None:
    """A few seconds of `tests/stress/readers.py`: slots and rows change hands all the time, readers are stopped."""
    program = Path(__file__).resolve().parents[1] / "stress/readers.py"
    ran = subprocess.run(
        [sys.executable, str(program), "--seconds=5", "--no-kills"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert told["chunks"] and not told["wrong"], told


def test_wrong_words_about_lookups_are_refused(client: Client, space: Namespace) -> None:
    with pytest.raises(errors.BadRequest, match=r"keys\[0\]"):
        space.peek([ChunkKey(b"")])


@pytest.mark.parametrize("eviction", ["lru", "expected"])
def test_a_hot_set_that_nobody_asks_for_survives_ten_arenas_of_other_saves(
    start_daemon: Callable[..., Any], eviction: str
) -> None:
    """It is looked up in shared memory alone, before each save: by the rule of LRU it never goes."""
    daemon = start_daemon(eviction=eviction, **SETTINGS)
    chunk_bytes = 2 * SHARD
    hot, others = keys_of(0, 8), 10 * SETTINGS["dram_bytes"] // chunk_bytes
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=4 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        space = client.open(SPEC)
        save(space, hot)
        saved = 0
        while saved < others:
            with space.read(hot) as lease:
                assert lease.lease_id == 0, "without a message"
                assert lease.hits == len(hot), f"gone after {saved} other chunks"
                assert loaded(lease, hot)
            keys = keys_of(1000 + saved, 8)
            put = space.put(keys, [content(key, shard) for key in keys for shard in range(2)])
            assert put.ok, put
            saved += len(put.committed)
        with space.read(hot) as lease:
            assert lease.hits == len(hot) and loaded(lease, hot)
        assert space.match(keys_of(1000, 8)).usable == 0, "what was saved first is gone"
        assert client.counters["reads_pinned_late"] == 0
