"""What a client still holds, or has just asked for, when it is closed or refused: nothing of it stays with the daemon
until its time is up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.client import Client, Namespace, ReadLease, WriteBatch, connect
from kvstore.client import connection as connection_module
from kvstore.client.attachment import Attachment
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, Reason, Wait

from .ssd_tools import eventually

BOUND_S = 20.0
SHARD = 64 << 10
SPEC = NamespaceSpec("closing", b"w", "test:bytes", 64, (GroupSpec("full", SHARD),))
SETTINGS = {"dram_bytes": 8 << 20, "segment_bytes": 1 << 20, "staging_bytes": 8 << 20}
LONG_MS = 600_000


@pytest.fixture(
    params=[("sealed", True), ("group", True), ("sealed", False)], ids=["sealed", "group", "grpc"]
)
def daemon(request: pytest.FixtureRequest, start_daemon: Callable[..., Any]) -> Any:
    protection, fast_lane = request.param
    return start_daemon(
        protection=protection,
        fast_lane=fast_lane,
        lease_ttl_ms=LONG_MS,
        reservation_ttl_ms=LONG_MS,
        **SETTINGS,
    )


@pytest.fixture
def client(daemon: Any) -> Iterator[Client]:
    with connect(str(daemon.run_dir), timeout_s=BOUND_S, staging_bytes=8 << 20) as client:
        eventually(lambda: client.stats().arena.ready_bytes == client.stats().arena.bytes)
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


@pytest.fixture
def other(daemon: Any) -> Iterator[Client]:
    """Sees what the daemon still keeps."""
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as other:
        yield other


def saved(space: Namespace, count: int) -> list[ChunkKey]:
    keys = space.keys(np.arange(64 * count))
    with space.write(keys) as batch:
        for index in batch.granted:
            batch.copy_from(index, np.full(SHARD, index, np.uint8))
        assert batch.commit().ok
    return keys


def pinned(client: Client) -> int:
    return sum(row.pinned_bytes for row in client.stats().namespaces) // SHARD


def reserved(client: Client) -> int:
    return sum(pool.reserved for pool in client.stats().pools)


def view(space: Namespace, key: ChunkKey) -> memoryview:
    """Of a chunk's bytes: while it lives the segment stays mapped, and the daemon does not take a closed client's pins
    for over."""
    with space.read([key]) as lease:
        view = lease.unsafe_view(0)
        assert view is not None
        return view


def attached(client: Client) -> Attachment:
    return client._attachment


def stop(daemon: Any) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def started(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread, and what comes out of `work`."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def joined(thread: threading.Thread) -> None:
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_what_the_daemon_refuses_to_commit_is_given_back(client: Client, space: Namespace) -> None:
    keys = space.keys(np.arange(64 * 3))
    batch = space.write(keys)
    for index in batch.granted:
        batch.copy_from(index, np.zeros(SHARD, np.uint8))
    assert reserved(client) == 3
    outcome = batch.commit(wait=Wait.DURABLE)
    assert isinstance(outcome.error, errors.Precondition), "there is no SSD tier"
    eventually(lambda: reserved(client) == 0)
    assert len(space.write(keys).granted) == 3, "anybody may save them now"


def test_what_is_read_after_the_client_was_closed_is_a_miss(
    client: Client, space: Namespace, other: Client
) -> None:
    keys = saved(space, 4)
    kept = view(space, keys[0])
    lease = space.read(keys[:3], pin=True)
    assert pinned(other) == 3
    client.close()
    assert pinned(other) == 0 and not lease.alive
    for again in (space.read(keys), space.read(keys, pin=True)):
        assert not again.alive and again.reasons == (Reason.UNAVAILABLE,) * 4
    assert kept[0] == 0
    lease.release()


def test_what_is_granted_while_the_client_closes_is_given_back(
    daemon: Any, client: Client, space: Namespace, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the daemon grants only then; who asked for it hears at once that it is over."""
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", BOUND_S)
    keys = saved(space, 2)
    kept = view(space, keys[0])
    fresh = space.keys(np.arange(1000, 1064))
    attachment = attached(client)
    stop(daemon)
    try:
        reading, leases = started(lambda: space.read(keys, pin=True))
        writing, batches = started(lambda: space.write(fresh))
        eventually(lambda: len(attachment._calls) >= 2)
        closing, _ = started(client.close)
        joined(reading)
        joined(writing)
        assert closing.is_alive(), "it waits for the daemon's answers, which name what is to be given back"
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    joined(closing)
    lease: ReadLease = leases[0]
    batch: WriteBatch = batches[0]
    assert not lease.alive and lease.reasons == (Reason.UNAVAILABLE,) * 2
    assert not batch.granted and "closed" in str(batch.error)
    assert pinned(other) == 0 and reserved(other) == 0 and kept[0] == 0


def test_nothing_new_begins_once_the_client_is_being_closed(
    daemon: Any, client: Client, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", BOUND_S)
    keys = saved(space, 2)
    held = space.read(keys, pin=True)
    attachment = attached(client)
    stop(daemon)
    try:
        closing, _ = started(client.close)
        eventually(lambda: attachment._closing)
        unanswered = set(attachment._calls)
        lease = space.read(keys)
        batch = space.write(space.keys(np.arange(1000, 1064)))
        assert lease.reasons == (Reason.UNAVAILABLE,) * 2 and not lease.alive
        assert batch.error is not None and batch.error.remedy == "connect again"
        with pytest.raises(errors.Unavailable, match="connect again"):
            space.update_session("s", expected_version=0, keep=0, append=[])
        with pytest.raises(errors.Unavailable, match="connect again"):
            client.stats()
        assert closing.is_alive(), "the daemon has confirmed nothing yet"
        assert not {call.expects for n, call in attachment._calls.items() if n not in unanswered} - {"done"}
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    joined(closing)
    assert not held.alive
    assert space.write(keys).error.remedy == "connect again"  # type: ignore[union-attr]
