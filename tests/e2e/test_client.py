"""The client library against real `kvstored` processes: bytes, lost and late daemons, restarts, forks, tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.arguments import NUMBER_MAX
from kvstore.client import (
    Client,
    CommitOutcome,
    Namespace,
    ReadLease,
    SessionEntry,
    WriteBatch,
    connect,
    connect_async,
)
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import (
    TTL_MS_MAX,
    ChunkKey,
    CommitResult,
    GrantResult,
    Outcome,
    Protection,
    Reason,
    Wait,
)
from kvstore.v1 import store_pb2

BOUND_S = 20.0
"""Every wait in these tests ends by then; it is a failure, never a measurement."""
SHARD = 256 << 10
SPEC = NamespaceSpec(
    model="tiny",
    weights_digest=b"w" * 32,
    layout_fingerprint="test:bytes",
    chunk_tokens=64,
    groups=(
        GroupSpec(
            "full",
            shard_bytes=SHARD,
            layers=(LayerSlice(0, 0, SHARD // 2), LayerSlice(1, SHARD // 2, SHARD // 2)),
        ),
    ),
)
TWO_RANKS = replace(SPEC, model="two ranks", groups=(GroupSpec("full", shard_bytes=SHARD, shard_count=2),))
LARGE = replace(SPEC, model="large", groups=(GroupSpec("full", shard_bytes=1 << 20),))


@pytest.fixture(params=[True, False], ids=["lane", "grpc"])
def fast_lane(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


def eventually(what: Callable[[], Any]) -> Any:
    """Poll until `what` answers something true."""
    deadline = time.monotonic() + BOUND_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
    return found


@pytest.fixture
def client_of() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def start(daemon: Any, **settings: Any) -> Client:
        settings = {"timeout_s": BOUND_S, "staging_bytes": 8 << 20, **settings}
        client = connect(str(daemon.run_dir), **settings)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def client(daemon: Any, client_of: Callable[..., Client]) -> Client:
    return client_of(daemon)


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def keys_of(space: Namespace, count: int, first: int = 0) -> list[ChunkKey]:
    return space.keys(np.arange(first, first + 64 * count))


def content(key: bytes, shard: int = 0, size: int = SHARD) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that nobody else would have: random, from the key."""
    return np.random.default_rng([*key, shard]).integers(0, 256, size, dtype=np.uint8)


def written(batch: WriteBatch) -> WriteBatch:
    """It, with something in all that was granted: so that it can be committed."""
    for index in batch.granted:
        for shard in batch.shards:
            batch.buffer(index, shard)[:] = index + 1
    return batch


def save(space: Namespace, keys: list[ChunkKey], *, wait: Wait = Wait.VISIBLE, **how: Any) -> CommitOutcome:
    with space.write(keys, **how) as batch:
        for index in batch.granted:
            for shard in batch.shards:
                buffer = batch.buffer(index, shard)
                buffer[:] = content(keys[index], shard, buffer.size)
        return batch.commit(wait=wait)


def whole(lease: ReadLease, index: int, shard: int = 0, size: int = SHARD) -> bool:
    """Whether the copy succeeds, and then: with exactly the bytes that were saved."""
    out = np.zeros(size, np.uint8)
    if not lease.copy_to(index, out, shard=shard):
        return False
    np.testing.assert_array_equal(out, content(lease.keys[index], shard, size))
    return True


def pinned_bytes(client: Client) -> int:
    return sum(row.pinned_bytes for row in client.stats().namespaces)


def reserved_slots(client: Client) -> int:
    return sum(pool.reserved for pool in client.stats().pools)


def mapped_bytes(kind: str = "data") -> int:
    """Bytes of our address space in memfds of the daemon."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"/memfd:kvs-{kind}" in line:
            low, high = line.split()[0].split("-")
            total += int(high, 16) - int(low, 16)
    return total


def stop(daemon: Any) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def resume(daemon: Any) -> None:
    daemon.process.send_signal(signal.SIGCONT)


# ----------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_what_was_committed_comes_back(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client], protection: str
) -> None:
    daemon = start_daemon(protection=protection)
    writer, reader = client_of(daemon), client_of(daemon)
    assert writer.protection is Protection(protection)
    space = writer.open(SPEC)
    keys = keys_of(space, 20)
    outcome = save(space, keys)
    assert outcome == CommitOutcome(ok=True, results=(CommitResult.VISIBLE,) * 20)

    other = reader.open(SPEC)
    assert other.salt == space.salt
    assert keys_of(other, 20) == keys
    assert other.match(keys).usable == 20
    assert other.match(keys, token_count=20 * 64).usable == 19
    missing = keys_of(other, 1, first=9999)[0]
    with other.read([*keys, missing]) as lease:
        assert lease.hits == 20
        assert lease.outcomes == (Outcome.HIT,) * 20 + (Outcome.MISS,)
        assert lease.reasons[-1] is Reason.NEVER_SEEN
        assert all(whole(lease, index) for index in range(20))
        assert not lease.copy_to(20, bytearray(SHARD))
    assert not lease.copy_to(0, bytearray(SHARD)), "released"
    assert again(space, keys) == (GrantResult.ALREADY,) * 20
    with other.read([missing, keys[3]], any_order=True) as lease:
        assert lease.hits == 0
        assert lease.outcomes == (Outcome.MISS, Outcome.HIT)
        assert whole(lease, 1)
    eventually(lambda: pinned_bytes(reader) == 0)


def again(space: Namespace, keys: list[ChunkKey]) -> tuple[GrantResult, ...]:
    with space.write(keys) as batch:
        return batch.results


async def test_the_same_on_an_event_loop(daemon: Any) -> None:
    async with await connect_async(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = await client.open(SPEC)
        large = await client.open(LARGE)
        for namespace, size in (
            (space, SHARD),
            (large, 1 << 20),
        ):  # copied in the loop's thread, and in another
            keys = namespace.keys(np.arange(64 * 3))
            async with await namespace.write(keys) as batch:
                for index in batch.granted:
                    batch.buffer(index)[:] = content(keys[index], 0, size)
                assert (await batch.commit()).ok
            assert (await namespace.match(keys)).usable == 3
            async with await namespace.read(keys) as lease:
                assert lease.hits == 3
                outs = [np.empty(size, np.uint8) for _ in keys]
                assert await lease.copy_to(0, outs[0])
                assert await lease.copy_many([(index, 0, 0, outs[index]) for index in (1, 2)])
            for key, out in zip(keys, outs, strict=True):
                np.testing.assert_array_equal(out, content(key, 0, size))
        info = await space.update_session("s", expected_version=0, keep=0, append=[])
        assert info.version == 1
        assert await space.get_session("nobody") is None
        with pytest.raises(errors.Conflict):
            await space.update_session("s", expected_version=7, keep=0, append=[])
        assert (await client.stats()).namespaces


def test_many_requests_of_many_threads(client: Client, space: Namespace) -> None:
    chains = [keys_of(space, 4, first=1000 * number) for number in range(6)]
    failures: list[BaseException] = []

    def work(keys: list[ChunkKey]) -> None:
        try:
            for _ in range(10):
                save(space, keys)
                with space.read(keys) as lease:
                    assert lease.hits == 4
                    assert all(whole(lease, index) for index in range(4))
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(keys,)) for keys in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert not failures
    eventually(lambda: pinned_bytes(client) == 0)
    assert reserved_slots(client) == 0


def test_destinations_of_every_shape(space: Namespace) -> None:
    torch = pytest.importorskip("torch")
    keys = keys_of(space, 1)
    save(space, keys)
    expected = content(keys[0])
    with space.read(keys) as lease:
        # one layer into [heads, tokens, dim], a window of a larger bfloat16 cache
        cache = torch.zeros(2, 4, 100, 256, dtype=torch.bfloat16)
        window = cache[1, :, 10:74]
        assert not window.is_contiguous()
        assert lease.copy_to(0, window, layer=1)
        got = cache[1, :, 10:74].contiguous().view(torch.uint8).numpy().reshape(-1)
        np.testing.assert_array_equal(got, expected[SHARD // 2 :])
        assert not cache[0].any()
        assert not cache[1, :, :10].any()
        assert not cache[1, :, 74:].any()

        transposed = np.zeros((128, 512), np.float32).T
        assert lease.copy_to(0, transposed)
        np.testing.assert_array_equal(np.ascontiguousarray(transposed).view(np.uint8).ravel(), expected)

        part = bytearray(1000)
        assert lease.copy_to(0, part, offset=SHARD - 1000)
        assert part == expected[-1000:].tobytes()
        part = bytearray(10)
        assert lease.copy_to(0, part, layer=1, offset=5)
        assert part == expected[SHARD // 2 + 5 :][:10].tobytes()

        view = lease.unsafe_view(0)
        assert view is not None
        assert view.readonly
        assert view == expected.data

        for out, field in (
            (bytearray(SHARD - 1), "out"),
            (bytes(SHARD), "out"),
            (torch.zeros(SHARD, dtype=torch.uint8, device="meta"), "out"),
            (3, "out"),
        ):
            with pytest.raises(errors.BadRequest) as caught:
                lease.copy_to(0, out)
            assert caught.value.field == field
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("index", {"index": 1, "out": bytearray(SHARD)}),
            ("shard", {"index": 0, "out": bytearray(SHARD), "shard": 1}),
            ("layer", {"index": 0, "out": bytearray(SHARD), "layer": 2}),
            ("offset", {"index": 0, "out": bytearray(SHARD), "offset": 1}),
            ("offset", {"index": 0, "out": bytearray(1), "offset": -1}),
        ]
        for field, arguments in wrong:
            with pytest.raises(errors.BadRequest) as caught:
                lease.copy_to(**arguments)
            assert caught.value.field == field


def test_shards_of_two_ranks(daemon: Any, client_of: Callable[..., Client]) -> None:
    first, second = (client_of(daemon, engine_group="engine", rank=rank).open(TWO_RANKS) for rank in range(2))
    keys = keys_of(first, 3)
    assert save(first, keys, shards=[0]).results == (CommitResult.WAITING_FOR_SHARDS,) * 3
    with second.read(keys, wait_ms=int(BOUND_S * 1000)) as lease:
        assert lease.reasons[0] is Reason.INCOMPLETE
    batch = second.write(keys, shards=[1])
    with first.read(keys, wait_ms=int(BOUND_S * 1000), any_order=True) as lease:
        assert lease.outcomes == (Outcome.PENDING,) * 3
        for index in batch.granted:
            batch.buffer(index, 1)[:] = content(keys[index], 1)
        assert batch.commit().results == (CommitResult.VISIBLE,) * 3
        assert lease.settled() == (0, 1, 2)
    with first.read(keys, shards=[1, 0]) as lease:
        assert lease.hits == 3
        for index in range(3):
            assert whole(lease, index, 0)
            assert whole(lease, index, 1)
        with pytest.raises(errors.BadRequest, match="shard=2"):
            lease.copy_to(0, bytearray(SHARD), shard=2)


def test_a_reader_waits_for_a_save_that_is_aborted(space: Namespace) -> None:
    keys = keys_of(space, 2)
    batch = space.write(keys)
    lease = space.read(keys, wait_ms=int(BOUND_S * 1000), any_order=True)
    assert lease.outcomes == (Outcome.PENDING,) * 2
    batch.abort()
    assert lease.settled() == ()
    assert again(space, keys) == (GrantResult.GRANTED,) * 2


@pytest.mark.parametrize("forever", [TTL_MS_MAX + 1, NUMBER_MAX])
def test_a_reader_that_would_wait_for_ever_or_keep_its_lease(space: Namespace, forever: int) -> None:
    """No time is too long: a request that the daemon refuses looks like a daemon that is away."""
    keys = keys_of(space, 2)
    batch = space.write(keys)
    waiting = space.read(keys, wait_ms=forever, ttl_ms=forever, any_order=True)
    assert waiting.outcomes == (Outcome.PENDING,) * 2
    batch.abort()
    assert waiting.settled() == ()
    save(space, keys)
    with space.read(keys, ttl_ms=forever, pin=True) as lease:
        assert lease.hits == 2


def test_sessions(space: Namespace) -> None:
    keys = keys_of(space, 3)
    save(space, keys)
    entries = [SessionEntry(key, 64 * number, 64) for number, key in enumerate(keys)]
    assert space.get_session("talk") is None
    assert space.update_session("talk", expected_version=0, keep=0, append=entries).version == 1
    info = space.get_session(b"talk")
    assert info is not None
    assert (info.version, info.entries, info.usable) == (1, tuple(entries), 3)
    with pytest.raises(errors.Conflict):
        space.update_session("talk", expected_version=0, keep=0, append=entries)
    with pytest.raises(errors.Precondition):
        space.update_session(
            "talk", expected_version=1, keep=3, append=[SessionEntry(ChunkKey(b"unknown"), 192, 64)]
        )
    assert space.fork("talk", "branch").entries == tuple(entries)
    cut = space.truncate("branch", expected_version=1, first_token=128, token_count=64)
    assert cut.entries == tuple(entries[:2])
    assert space.forget("talk") > 0
    assert space.get_session("talk") is None
    assert space.get_session("branch") is not None
    for bad in ("", "x" * 257):
        with pytest.raises(errors.BadRequest, match="name"):
            space.get_session(bad)


# --------------------------------------------------------------------------------------------------- callers' bugs


def test_a_caller_is_told_what_it_got_wrong(client: Client, space: Namespace) -> None:
    key = ChunkKey(b"k")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("keys[1]", lambda: space.match([key, ChunkKey(b"x" * 65)])),
        ("keys[0]", lambda: space.read([ChunkKey(b"")])),
        ("keys[0]", lambda: space.read(["text"])),  # type: ignore[list-item]
        ("keys", lambda: space.match([key] * 4097)),
        ("shards", lambda: space.read([key], shards=[1])),
        ("shards", lambda: space.write([key], shards=[0, 0])),
        ("token_count", lambda: space.match([key], token_count=-1)),
        ("token_count", lambda: space.match([key], token_count=1 << 41)),
        ("ttl_ms", lambda: space.read([key], ttl_ms=-1)),
        ("wait_ms", lambda: space.read([key], wait_ms=1 << 80)),
        ("verify", lambda: space.read([key], verify=1.5)),
        ("token_counts", lambda: space.write([key], token_counts=[65])),
        ("token_counts", lambda: space.write([key], token_counts=[1, 1])),
        ("parents", lambda: space.write([key], parents=[key, key])),
        ("maker", lambda: space.write([key], maker=b"short")),
        ("timeout_s", lambda: space.match([key], timeout_s=-1)),
        ("name", lambda: space.forget()),
        ("namespace.chunk_tokens", lambda: client.open(replace(SPEC, chunk_tokens=0))),
    ]
    for field, call in wrong:
        with pytest.raises(errors.BadRequest) as caught:
            call()
        assert caught.value.field == field, field
    with space.write([key]) as batch:
        for field, call in (("index", lambda: batch.buffer(1)), ("shard", lambda: batch.buffer(0, 1))):
            with pytest.raises(errors.BadRequest) as caught:
                call()
            assert caught.value.field == field
        batch.buffer(0)[:] = 1
        assert batch.commit().ok
        for call in (lambda: batch.buffer(0), batch.commit):
            with pytest.raises(errors.BadRequest, match="the batch has ended"):
                call()


def test_staging_that_can_never_hold_a_chunk(daemon: Any, client_of: Callable[..., Client]) -> None:
    space = client_of(daemon, staging_bytes=SHARD // 2).open(SPEC)
    with pytest.raises(errors.BadRequest, match=f"staging_bytes={SHARD // 2}"):
        space.write(keys_of(space, 1))


def test_nobody_serves_that_directory(tmp_path: Path) -> None:
    with pytest.raises(errors.Unavailable, match="run_dir="):
        connect(str(tmp_path), timeout_s=0.2)


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_a_key_that_was_granted_and_not_written_is_nobodys_hit(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client], protection: str
) -> None:
    """Not even with the bytes of another model, which the same memory held before."""
    daemon = start_daemon(protection=protection)
    with client_of(daemon) as client, client_of(daemon) as reader:
        space = client.open(SPEC)
        first = keys_of(space, 1)
        assert save(space, first).ok
        with space.read(first) as lease:
            assert whole(lease, 0)
        spec = replace(SPEC, model="second")
        second = client.open(spec)
        keys = keys_of(second, 2)
        with second.write(keys) as batch:
            assert batch.granted == (0, 1)
            batch.copy_from(0, content(keys[0]))
            with pytest.raises(errors.BadRequest, match="never written") as caught:
                batch.commit()
            assert (caught.value.field, caught.value.value) == ("index", "1")
        eventually(lambda: reserved_slots(client) == 0)
        for anybody in (second, reader.open(spec)):
            with anybody.read(keys, any_order=True) as lease:
                assert lease.reasons == (Reason.NEVER_SEEN,) * 2
            with anybody.read(keys[1:]) as lease:
                assert lease.outcomes == (Outcome.MISS,)
                assert not lease.copy_to(0, bytearray(SHARD))
        assert save(second, keys).ok, "anybody may save them now"
        with reader.open(spec).read(keys) as lease:
            assert whole(lease, 0) and whole(lease, 1)


# --------------------------------------------------------------------------------------------------- staging, bounds


def test_what_does_not_fit_in_staging_is_dropped_and_counted(
    daemon: Any, client_of: Callable[..., Client]
) -> None:
    client = client_of(daemon, staging_bytes=4 * SHARD)
    space = client.open(SPEC)
    keys = keys_of(space, 6)
    first = space.write(keys)
    assert first.results == (GrantResult.GRANTED,) * 4 + (GrantResult.FULL,) * 2
    assert again(space, keys[4:]) == (GrantResult.FULL,) * 2
    assert client.counters["saves_dropped"] == 4
    for index in first.granted:
        first.buffer(index)[:] = content(keys[index])
    assert first.commit().ok
    assert save(space, keys[4:], parent=keys[3]).results == (CommitResult.VISIBLE,) * 2
    with space.read(keys) as lease:
        assert lease.hits == 6
        assert all(whole(lease, index) for index in range(6))
    attachment = client._connection.attachment
    assert attachment is not None
    assert attachment.staging is not None
    assert attachment.staging.space.free_bytes == 4 * SHARD


def test_an_aborted_or_dropped_batch_gives_everything_back(client: Client, space: Namespace) -> None:
    keys = keys_of(space, 4)
    with space.write(keys) as batch:
        assert len(batch.granted) == 4
    batch = space.write(keys)
    assert len(batch.granted) == 4
    attachment = client._connection.attachment
    assert attachment is not None
    staging = attachment.staging
    assert staging is not None
    assert staging.space.free_bytes < staging.space.size
    del batch
    gc.collect()
    eventually(lambda: staging.space.free_bytes == staging.space.size)
    eventually(lambda: reserved_slots(client) == 0)


def test_commits_under_way_together(space: Namespace) -> None:
    chains = [keys_of(space, 2, first=1000 * number) for number in range(8)]
    futures = []
    for keys in chains:
        batch = space.write(keys)
        for index in batch.granted:
            batch.buffer(index)[:] = content(keys[index])
        futures.append(batch.commit_async())
    assert all(future.result(BOUND_S).ok for future in futures)
    for keys in chains:
        with space.read(keys) as lease:
            assert all(whole(lease, index) for index in range(2))


# --------------------------------------------------------------------------------------------------- leases


def test_a_lease_outlives_its_time_while_it_is_open(client: Client, space: Namespace) -> None:
    keys = keys_of(space, 2)
    save(space, keys)
    with space.read(
        keys, ttl_ms=1_000, pin=True
    ) as lease:  # a busy machine renews it late, not a second too late
        granted_until = lease.expires_at
        eventually(lambda: time.monotonic() > granted_until + 0.3)
        assert whole(lease, 0)
        assert pinned_bytes(client) == 2 * SHARD


def test_a_forgotten_lease_is_released(client: Client, space: Namespace) -> None:
    keys = keys_of(space, 2)
    save(space, keys)
    lease = space.read(keys, pin=True)
    assert pinned_bytes(client) == 2 * SHARD
    del lease
    gc.collect()
    eventually(lambda: pinned_bytes(client) == 0)


def test_closing_gives_everything_back(daemon: Any, client: Client, client_of: Callable[..., Client]) -> None:
    other = client_of(daemon)
    space = client.open(SPEC)
    keys = keys_of(space, 4)
    save(space, keys[:2])
    lease, batch = space.read(keys[:2], pin=True), space.write(keys)
    assert pinned_bytes(other) == 2 * SHARD
    assert reserved_slots(other) == 2
    client.close()
    assert pinned_bytes(other) == 0
    assert reserved_slots(other) == 0
    assert not lease.copy_to(0, bytearray(SHARD))
    assert space.match(keys).reasons == (Reason.UNAVAILABLE,) * 4
    assert not batch.granted or batch.results
    with pytest.raises(errors.Unavailable, match="closed"):
        space.update_session("s", expected_version=0, keep=0, append=[])
    assert mapped_bytes() == 0
    assert mapped_bytes("header") == 0
    assert mapped_bytes("staging") == 0


def test_a_slot_that_was_given_away_voids_the_load(daemon: Any, client_of: Callable[..., Client]) -> None:
    victim, other = client_of(daemon), client_of(daemon)
    space, busy = victim.open(SPEC), other.open(SPEC)
    keys = keys_of(space, 8)
    save(space, keys)
    lease = space.read(keys)
    assert lease.hits == 8
    # The daemon is told behind the lease's back: as if it had expired while this process was stopped in the middle.
    attachment = victim._connection.attachment
    assert attachment is not None
    attachment.notice("release", [lease.lease_id])
    assert attachment.wait_for_notices(time.monotonic() + BOUND_S)
    assert whole(lease, 0), "nobody wanted the slots yet"

    first = 10_000
    while busy.match(keys).usable:  # the arena holds 64 MiB: after two rounds of it nothing old is left
        assert first < 10_000 + 64 * 1000, "nothing was evicted"
        save(busy, keys_of(busy, 16, first=first))
        first += 64 * 16
    for _ in range(16):
        save(busy, keys_of(busy, 16, first=first))
        first += 64 * 16
    assert not any(whole(lease, index) for index in range(8))
    assert victim.counters["loads_void"] == 8
    assert lease.unsafe_view(0) is None


def test_damaged_bytes_are_noticed_and_reported(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    client = client_of(start_daemon(protection="group"))
    space = client.open(SPEC)
    keys = keys_of(space, 2)
    save(space, keys)
    with space.read(keys, verify=1.0) as lease:
        assert whole(lease, 0)
        lease._grant.mapped.data(1)[77] ^= 1  # what a worker of the same group can do
        assert not lease.copy_to(1, bytearray(SHARD))
        assert client.counters["loads_corrupt"] == 1
    eventually(lambda: space.match(keys).reasons[1] is Reason.CORRUPT)
    with space.read(keys) as lease:
        assert lease.hits == 1


def test_what_a_worker_copies_in_place_it_checksums_itself(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members of a group: what one tells of its bytes is what the other compares."""
    daemon = start_daemon(protection="group")
    writer, reader = (client_of(daemon).open(SPEC) for _ in range(2))
    keys = keys_of(writer, 40)

    def put(some: list[ChunkKey]) -> None:
        with writer.write(some) as batch:
            batch.copy_many([(index, 0, content(key, 0, SHARD)) for index, key in enumerate(some)])
            assert batch.commit().ok

    put(keys[:20])
    monkeypatch.setattr("kvstore.client.batch._checksum", lambda shard: int(shard[0]))  # a liar
    put(keys[20:])
    with reader.read(keys, verify=1.0) as lease:
        assert all(whole(lease, index) for index in range(20))
        assert not any(lease.copy_to(index, bytearray(SHARD)) for index in range(20, 40))
    eventually(lambda: set(reader.match(keys, token_count=40 * 64).reasons[20:]) == {Reason.CORRUPT})
    with reader.read(keys) as lease:
        assert lease.hits == 20
    put(keys[20:30])  # refused nothing, and lies again
    monkeypatch.undo()
    eventually(lambda: again(writer, keys[30:]) == (GrantResult.GRANTED,) * 10)
    put(keys[30:])
    with reader.read(keys[30:], verify=1.0) as lease:
        assert all(whole(lease, index) for index in range(10))


# ------------------------------------------------------------------------------------- a daemon that stands still


def test_a_daemon_that_stands_still_is_data(daemon: Any, client: Client, space: Namespace) -> None:
    keys = keys_of(space, 8)
    save(space, keys[:4])
    batch = written(space.write(keys[4:6]))
    open_lease = space.read(keys[:2], pin=True)
    stop(daemon)
    try:
        late_read = space.read(keys[:4], pin=True, timeout_s=0.05)
        assert late_read.reasons == (Reason.UNAVAILABLE,) * 4
        assert late_read.hits == 0
        late_write = space.write(keys[6:], timeout_s=0.05)
        assert late_write.results == (GrantResult.UNAVAILABLE,) * 2
        assert isinstance(late_write.error, errors.DeadlineExceeded)
        assert not late_write.commit().ok
        assert space.match(keys[6:], timeout_s=0.05).usable == 0
        late_commit = batch.commit(timeout_s=0.05)
        assert not late_commit.ok
        assert isinstance(late_commit.error, errors.DeadlineExceeded)
        assert space.get_session("s", timeout_s=0.05) is None
        with pytest.raises(errors.DeadlineExceeded):
            space.update_session("s", expected_version=0, keep=0, append=[], timeout_s=0.05)
        assert whole(open_lease, 0), "its lease still runs"
        attachment = client._connection.attachment
        assert attachment is not None
        staging = attachment.staging
        assert staging is not None
        assert staging.space.free_bytes < staging.space.size, "the daemon may read it yet"
        open_lease.release()
        # after a while nobody waits for it any more
        eventually(lambda: attachment.silent)
        began = time.monotonic()
        assert space.read(keys[:4], pin=True).hits == 0
        assert time.monotonic() - began < BOUND_S / 2
    finally:
        resume(daemon)
    # what the late requests acquired is given back, and the late commit was carried out
    eventually(lambda: not attachment.silent)
    eventually(lambda: pinned_bytes(client) == 0)
    eventually(lambda: reserved_slots(client) == 0)
    eventually(lambda: staging.space.free_bytes == staging.space.size)
    assert space.match(keys[4:6]).usable == 2
    with space.read(keys[:4]) as lease:
        assert lease.hits == 4
        assert all(whole(lease, index) for index in range(4))
    assert client.counters["requests_late"] >= 5
    assert client.counters["late_answers"] >= 5


def test_a_lease_that_cannot_be_renewed_is_void_in_time(
    daemon: Any, client: Client, space: Namespace
) -> None:
    keys = keys_of(space, 1)
    save(space, keys)
    lease = space.read(keys, ttl_ms=200, pin=True)
    stop(daemon)
    try:
        eventually(lambda: not lease.alive)
        assert not whole(lease, 0)
        assert client.counters["loads_void"] == 1
    finally:
        resume(daemon)


async def test_a_cancelled_read_pins_nothing(daemon: Any) -> None:
    async with await connect_async(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = await client.open(SPEC)
        keys = space.keys(np.arange(64 * 2))
        async with await space.write(keys) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = content(keys[index])
            assert (await batch.commit()).ok
        stop(daemon)
        try:
            reading = asyncio.create_task(space.read(keys, pin=True))
            writing = asyncio.create_task(space.write(space.keys(np.arange(500, 500 + 64 * 2))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
            writing.cancel()
            for task in (reading, writing):
                with pytest.raises(asyncio.CancelledError):
                    await task
        finally:
            resume(daemon)
        deadline = time.monotonic() + BOUND_S
        while client.counters["late_answers"] < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        while True:
            stats = await client.stats()
            if not stats.namespaces[0].pinned_bytes and not sum(pool.reserved for pool in stats.pools):
                break
            assert time.monotonic() < deadline


def test_an_answer_lost_with_the_stream_is_given_again(daemon: Any, client: Client, space: Namespace) -> None:
    """The daemon carries the requests out, but their answers are lost with the stream: asked again under the same
    numbers it repeats its first answers."""
    keys = keys_of(space, 6)
    save(space, keys[:2])
    batch = space.write(keys[2:4])
    for index in batch.granted:
        batch.buffer(index)[:] = content(keys[2 + index])
    attachment = client._connection.attachment
    assert attachment is not None
    stop(daemon)
    try:
        committing = batch.commit_async()
        leases: list[ReadLease] = []
        reader = threading.Thread(target=lambda: leases.append(space.read(keys[:2])))
        reader.start()
        batches: list[Any] = []
        writer = threading.Thread(target=lambda: batches.append(space.write(keys[4:])))
        writer.start()
        eventually(lambda: len(attachment._calls) >= 3)
        carrier = attachment._carrier
        assert carrier is not None
        eventually(lambda: not carrier.unsent)
        attachment.cancel_stream()
        eventually(lambda: not attachment.attached)
    finally:
        resume(daemon)
    for thread in (reader, writer):
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert client.counters["reconnects"] == 1
    assert client._connection.attachment is attachment, "the same hello, the same leases"
    assert committing.result(BOUND_S).results == (CommitResult.VISIBLE,) * 2
    assert batches[0].results == (GrantResult.GRANTED,) * 2
    assert whole(leases[0], 0)
    leases[0].release()
    batches[0].abort()
    assert attachment.wait_for_notices(time.monotonic() + BOUND_S)
    assert pinned_bytes(client) == 0, "one lease, not two"
    assert reserved_slots(client) == 0


# ---------------------------------------------------------------------------------------------------- lost daemons


def test_a_killed_daemon_under_an_open_lease(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    daemon = start_daemon()
    client = client_of(daemon)
    space = client.open(SPEC)
    keys = keys_of(space, 4)
    save(space, keys)
    lease, batch = space.read(keys), written(space.write(keys_of(space, 2, first=5000)))
    boot, salt = client.boot_id, space.salt
    daemon.kill()
    whole(lease, 0)  # it may succeed until we noticed, but then with the right bytes
    eventually(lambda: not client.connected)
    eventually(lambda: not lease.alive)
    assert not whole(lease, 0)
    assert not batch.commit().ok
    assert space.read(keys).reasons == (Reason.UNAVAILABLE,) * 4
    assert space.write(keys).results == (GrantResult.UNAVAILABLE,) * 4
    assert space.get_session("s", timeout_s=0.01) is None

    start_daemon()
    client.wait_connected()
    assert client.boot_id != boot
    eventually(lambda: space.match(keys).reasons[0] is Reason.NEVER_SEEN)
    assert space.salt == salt
    assert not whole(lease, 0), "a lease of the old boot stays void"
    assert save(space, keys).ok
    with space.read(keys) as again:
        assert again.hits == 4
        assert all(whole(again, index) for index in range(4))
    lease.release()
    eventually(lambda: pinned_bytes(client) == 0)


def test_shared_memory_does_not_grow_over_restarts(
    start_daemon: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    daemon = start_daemon()
    client = client_of(daemon)
    space = client.open(SPEC)
    keys = keys_of(space, 8)
    mapped = []
    rss = []
    for _ in range(6):
        eventually(lambda: space.match(keys).reasons[0] is not Reason.UNAVAILABLE)
        assert save(space, keys).ok
        lease = space.read(keys)
        assert all(whole(lease, index) for index in range(8))
        mapped.append([mapped_bytes(kind) for kind in ("data", "header", "staging")])
        rss.append(shared_memory_kib())
        daemon.kill()
        eventually(lambda: not client.connected)
        lease.release()
        daemon = start_daemon()
        client.wait_connected()
    assert mapped[1:] == mapped[:-1]
    assert all(mapped[0])
    assert max(rss) <= rss[0] + 1024, rss
    assert sum(name.startswith("/memfd:kvs") for name in open_files()) == 0


def shared_memory_kib() -> int:
    found = re.search(r"(?m)^RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_a_client_waits_for_a_daemon_that_starts_later(
    run_dir: Path,
    start_daemon: Callable[..., Any],
    client_of: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.client.connection.NOBODY_S", BOUND_S)  # a daemon under load starts slowly

    class Later:
        pass

    later: Any = Later()
    later.run_dir = run_dir
    found: list[Client] = []
    thread = threading.Thread(target=lambda: found.append(client_of(later)))
    thread.start()
    start_daemon()
    thread.join(BOUND_S)
    assert found[0].connected


# ------------------------------------------------------------------------------------------------ retired segments


def test_retired_segments_are_unmapped_when_nobody_uses_them(
    daemon: Any, client: Client, client_of: Callable[..., Client]
) -> None:
    """Two models take turns in an arena of four segments: what the first no longer needs must leave our memory, or the
    second would never get it."""
    space = client.open(SPEC)
    rounds = [keys_of(space, 16, first=10_000 * number) for number in range(14)]
    for keys in rounds:
        assert save(space, keys).ok
        with space.read(keys) as lease:
            assert all(whole(lease, index) for index in range(lease.hits))
    assert mapped_bytes() == 64 << 20
    view = None
    with space.read(rounds[-1]) as lease:
        view = lease.unsafe_view(0)
    assert view is not None
    before = bytes(view)

    large = client_of(daemon, staging_bytes=16 << 20).open(LARGE)
    first = 0
    saved = 0

    def fill_until(mapped: int) -> bool:
        nonlocal first, saved
        keys = keys_of(large, 4, first=first)
        first += 64 * 4
        outcome = save(large, keys)
        saved += len(outcome.results)
        return mapped_bytes() <= mapped

    eventually(lambda: fill_until(16 << 20))
    assert mapped_bytes() == 16 << 20, "the view holds its segment"
    assert bytes(view) == before or space.match(rounds[-1]).usable < 16
    del view
    eventually(lambda: fill_until(0))
    assert saved > 16
    assert mapped_bytes("header") == 0


# ------------------------------------------------------------------------------------------------------------ forks


FORKER = """
import contextlib, json, os, signal, sys
import numpy as np
from kvstore import errors
from kvstore.client import connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import GrantResult, Reason

client = connect(sys.argv[1], timeout_s=20)
space = client.open(NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", 1 << 18),)))
keys = space.keys(np.arange(64 * 4))
batch = space.write(keys)
for index in batch.granted:
    batch.buffer(index)[:] = index
assert batch.commit().ok
lease = space.read(keys)
batch = space.write(space.keys(np.arange(7, 7 + 64)))
batch.buffer(0)[:] = 9
assert lease.copy_to(0, bytearray(1 << 18))
memfd = os.memfd_create("kvs-test-region")
os.ftruncate(memfd, 1 << 18)
region = client.adopt(memfd, 1 << 18)
filled = space.write([b"filled"], staged=False)

# As if other threads were just counting, sending, mapping: what they hold at a fork is never let go of in the child.
attachment = client._connection.attachment
held = (client._connection._counters_lock, client._connection._changed, attachment._lock, attachment._socket_lock,
        attachment.mappings._lock, attachment.staging.space._lock)
if hasattr(attachment._carrier, "_lock"):  # a lane's; a gRPC stream has none
    held += (attachment._carrier._lock,)
with contextlib.ExitStack() as locks:
    for lock in held:
        locks.enter_context(lock)
    child = os.fork()
    if child == 0:
        locks.pop_all()
if child == 0:
    try:
        signal.alarm(20)
        assert not client.connected
        assert space.match(keys).reasons == (Reason.UNAVAILABLE,) * 4
        assert space.read(keys).hits == 0
        assert space.write(keys).results == (GrantResult.UNAVAILABLE,) * 4
        assert not lease.copy_to(0, bytearray(1 << 18))
        assert lease.unsafe_view(0) is None
        assert not batch.commit().ok
        assert space.get_session("s") is None
        for call in (lambda: space.update_session("s", expected_version=0, keep=0, append=[]), client.stats,
                     lambda: filled.fill(region, [0]), lambda: client.adopt(memfd, 1 << 18),
                     lambda: connect(sys.argv[1], timeout_s=20)):
            try:
                call()
                os._exit(3)
            except errors.Unavailable:
                pass
        lease.release()
        filled.abort()
        region.close()
        client.close()
        del lease, batch, filled, region, space, client
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(2)
    if sys.argv[2] == "exit":
        os._exit(0)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

out = np.zeros(1 << 18, np.uint8)
assert client.connected
assert lease.copy_to(2, out) and (out == 2).all()
with space.read(keys) as again:
    assert again.hits == 4 and again.copy_to(3, out) and (out == 3).all()
assert batch.commit().ok
filled.fill(region, [0])
assert filled.commit().ok
assert space.match(keys).usable == 4
assert client.counters["reconnects"] == 0, dict(client.counters)
print(json.dumps({"child": status, "reconnects": client.counters["reconnects"]}))
client.close()
"""


@pytest.mark.parametrize("fork_support", ["0", "1"])
@pytest.mark.parametrize("way", ["exit", "finalize"])
def test_a_forked_child_neither_uses_nor_disturbs_its_parents_connection(
    daemon: Any, way: str, fork_support: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKER, str(daemon.run_dir), way],
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": fork_support},
        capture_output=True,
        text=True,
        timeout=3 * BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"child": 0, "reconnects": 0}, done.stderr


DROPPER = """
import sys
import numpy as np
from kvstore.client import connect
from kvstore.layout import GroupSpec, NamespaceSpec

client = connect(sys.argv[1], timeout_s=20)
space = client.open(NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", 1 << 18),)))
keys = space.keys(np.arange(64))
batch = space.write(keys)
lease = space.read(keys)
print("there", flush=True)
"""


def test_a_process_that_just_ends_leaves_nothing(daemon: Any, client: Client) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", DROPPER, str(daemon.run_dir)],
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "there\n", "")
    eventually(lambda: reserved_slots(client) == 0)


# ---------------------------------------------------------------------------------------------------------- tenants


TENANT = """
import json, os, sys, time
import numpy as np
from kvstore import errors
from kvstore.client import connect
from kvstore.client.attachment import Attachment
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import GrantResult, Reason
from kvstore.v1 import stats_pb2, stats_pb2_grpc, store_pb2

os.setresuid(*[int(sys.argv[2])] * 3)
SPEC = NamespaceSpec("tiny", b"w" * 32, "test:bytes", 64, (GroupSpec("full", 1 << 18),))
client = connect(sys.argv[1], timeout_s=20)
space = client.open(SPEC)
for line in sys.stdin:
    result = eval(line)
    print(json.dumps(result), flush=True)
"""


class Tenant:
    """A process of another user; `ask` evaluates an expression in it."""

    def __init__(self, run_dir: Path, uid: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", TENANT, str(run_dir), str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(expression.split()) + "\n")
        line = self.process.stdout.readline()
        if not line:
            _, problem = self.process.communicate(timeout=BOUND_S)
            raise AssertionError(problem)
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(BOUND_S)
        finally:
            self.process.kill()
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_tenants_cannot_reach_each_other(
    run_dir: Path, start_daemon: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    run_dir.parent.chmod(0o755)
    daemon = start_daemon(tenants="65534=alice,65533=bob")
    alice, bob = Tenant(run_dir, 65534), Tenant(run_dir, 65533)
    try:
        assert alice.ask("[client.tenant, os.getuid()]") == ["alice", 65534]
        assert bob.ask("client.tenant") == "bob"
        # alice saves, reads, and keeps a lease and a reservation open
        keys = alice.ask(
            "[globals().update(keys=space.keys(np.arange(64 * 3)), other=space.keys(np.arange(9, 9 + 64))), "
            "[key.hex() for key in keys]][1]"
        )
        assert alice.ask(
            "[globals().update(batch=space.write(keys)), [batch.buffer(i).fill(77) for i in range(3)], "
            "batch.commit().ok][2]"
        )
        lease, reservation, namespace, segments = alice.ask(
            "[globals().update(lease=space.read(keys, pin=True), held=space.write(other)), "
            "[lease.lease_id, held.reservation_id, space._binding.now()[1], "
            "list(client._connection.attachment.mappings._mapped)]][1]"
        )
        assert lease
        assert reservation
        assert segments
        # the same specification is another namespace with another salt; alice's keys are not there
        hexes = json.dumps(keys)
        assert not set(bob.ask("[key.hex() for key in space.keys(np.arange(64 * 3))]")) & set(keys)
        assert (
            bob.ask(f"[r.name for r in space.match([bytes.fromhex(k) for k in {hexes}]).reasons]")
            == ["NEVER_SEEN"] * 3
        )
        assert bob.ask(f"space.read([bytes.fromhex(k) for k in {hexes}]).hits") == 0
        # nor by her namespace's number
        for request in (
            f"'match', store_pb2.MatchRequest(namespace_id={namespace}, keys=[b'k'])",
            f"'acquire', store_pb2.AcquireRequest(namespace_id={namespace}, "
            f"keys=[bytes.fromhex(k) for k in {hexes}])",
            f"'reserve', store_pb2.ReserveRequest(namespace_id={namespace}, keys=[b'k'])",
            f"'forget', store_pb2.ForgetRequest(namespace_id={namespace}, keys=[b'k'])",
            f"'commit', store_pb2.CommitRequest(reservation_id={reservation}, staging_offsets=[0])",
        ):
            answer = bob.ask(
                f"(lambda call: [call.wait(), type(call.answer).__name__][1])"
                f"(client._connection.attachment.call({request}, time.monotonic() + 20))"
            )
            assert answer in ("NotFound", "Denied", "Precondition"), (request, answer)
        # releasing her lease or aborting her reservation changes nothing for her
        for notice in (f"'release', [{lease}]", f"'abort', [{reservation}]"):
            assert bob.ask(
                f"[client._connection.attachment.notice({notice}), "
                "client._connection.attachment.wait_for_notices(time.monotonic() + 20)][1]"
            )
        assert alice.ask(
            "[lease.copy_to(0, bytearray(1 << 18)), client.stats().namespaces[0].pinned_bytes]"
        ) == [
            True,
            3 << 18,
        ]
        # nor are her segments handed to him
        assert bob.ask(
            f"[client._connection.attachment.map_segments({segments}, time.monotonic() + 20), "
            f"[client._connection.attachment.mappings.get(n) is None for n in {segments}]][1]"
        ) == [True] * len(segments)
        # nor her numbers
        assert bob.ask("[row.tenant for row in client.stats().namespaces]") == ["bob"]
        assert alice.ask("[row.tenant for row in client.stats().namespaces]") == ["alice"]
        root = client_of(daemon)
        root.open(SPEC)
        assert {row.tenant for row in root.stats().namespaces} == {"alice", "bob", "default"}
        assert alice.ask("[held.buffer(0).fill(78), held.commit().ok][1]")
    finally:
        alice.close()
        bob.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_a_user_without_a_tenant_is_refused_at_once(run_dir: Path, start_daemon: Callable[..., Any]) -> None:
    run_dir.parent.chmod(0o755)
    start_daemon(tenants="65534=alice")
    stranger = Tenant(run_dir, 65533)
    try:
        _, problem = stranger.process.communicate(timeout=BOUND_S)
        assert "kvstore.errors.Denied" in problem
    finally:
        stranger.close()


def test_states_can_be_read_in_one_line(client: Client, space: Namespace) -> None:
    keys = keys_of(space, 2)
    with space.write(keys) as batch:
        assert re.fullmatch(r"WriteBatch\(\d+, 2 of 2 keys granted, open\)", repr(batch))
        written(batch).commit()
        assert "committed" in repr(batch)
    lease = space.read(keys)
    assert re.fullmatch(r"ReadLease\(\d+, 2 of 2 keys hit, open\)", repr(lease))
    lease.release()
    assert "released" in repr(lease)
    assert re.fullmatch(r"Namespace\(tiny, epoch 0, id \d+\)", repr(space))
    assert "connected" in repr(client)
    assert "\n" not in repr(client)
    client.close()
    assert "closed" in repr(client)


def test_unknown_pushes_and_unary_calls(client: Client, space: Namespace) -> None:
    from kvstore.v1 import store_pb2_grpc

    reply = client.unary(
        store_pb2_grpc.StoreStub,
        "Match",
        store_pb2.MatchRequest(namespace_id=space._binding.now()[1], keys=[b"k"]),  # type: ignore[index]
    )
    assert reply.outcomes == b"\x02"
    with pytest.raises(errors.BadRequest, match="namespace_id"):
        client.unary(store_pb2_grpc.StoreStub, "Match", store_pb2.MatchRequest(keys=[b"k"]))
