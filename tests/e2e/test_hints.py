"""A scheduler's queue, published over gRPC: what the next jobs need is in DRAM before it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Hint, Namespace, SessionEntry, connect, connect_async
from kvstore.errors import BadRequest, NotFound, StoreError
from kvstore.scheduler.hints import HintedQueue
from kvstore.scheduler.job_queue import Job
from kvstore.types import ChunkKey, HintResult, Outcome, Reason, Wait
from kvstore.v1 import hints_pb2, hints_pb2_grpc, stats_pb2, stats_pb2_grpc

from .conftest import acting_as
from .ssd_tools import (
    CHUNK,
    DRAM_CHUNKS,
    SMALL_SSD,
    SPEC,
    Weather,
    check_bytes,
    client_of,
    demote,
    eventually,
    explained,
    keys_of,
    look,
    save,
    settled_ssd,
)

TURN = 12
"""Chunks of a session: the prefetch window (0.8 of DRAM) holds four of them."""
ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult
ALICE, BOB = 12_001, 12_002


@pytest.fixture
def start(start_daemon: Callable[..., Any], run_dir: Path) -> Callable[..., Any]:
    return lambda **settings: start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd", **settings})


@pytest.fixture
def open_space() -> Iterator[Callable[..., Namespace]]:
    with contextlib.ExitStack() as clients:

        def open_space(daemon: Any, *, uid: int | None = None) -> Namespace:
            with acting_as(uid):
                client = client_of(daemon)
            return clients.enter_context(client).open(SPEC)

        yield open_space


@pytest.fixture
def space(start: Callable[..., Any], open_space: Callable[..., Namespace]) -> Namespace:
    return open_space(start())


def talk(space: Namespace, number: int) -> list[ChunkKey]:
    """Save session b"talk <number>" of TURN chunks."""
    keys = keys_of(space, TURN, 100 + number)
    save(space, keys)
    entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
    space.update_session(b"talk %d" % number, expected_version=0, keep=0, append=entries)
    return keys


def hint(number: int, position: int = 0) -> Hint:
    return Hint(b"job %d" % number, position, session=b"talk %d" % number)


def counter(space: Namespace, name: str) -> int:
    return space.client.stats().counters[name]


def in_dram(space: Namespace, keys: list[ChunkKey]) -> bool:
    """Match changes nothing: no lookup is counted, nothing is promoted."""
    return set(space.match(keys).outcomes) == {Outcome.HIT}


def read_at_once(space: Namespace, keys: list[ChunkKey]) -> set[Outcome]:
    with space.read(keys) as lease:
        check_bytes(lease, keys)
        return set(lease.outcomes)


def test_hinted_sessions_are_in_dram_before_they_are_asked_for(space: Namespace) -> None:
    talks = [talk(space, number) for number in range(4)]
    demote(space, [key for keys in talks for key in keys], filler=1)
    answer = space.publish_queue([hint(0, 0), hint(1, 1)])
    assert answer.results == (ACCEPTED, ACCEPTED)
    assert answer.prefetch_window == answer.eviction_window == 2
    for keys in talks[:2]:
        eventually(lambda keys=keys: in_dram(space, keys))
        assert read_at_once(space, keys) == {Outcome.HIT}
    eventually(lambda: counter(space, "prefetch_on_time") == 2 * TURN)  # the daemon hears of it soon
    counters = space.client.stats().counters
    assert counters["prefetch_on_time"] == counters["chunks_promoted_ahead"] == 2 * TURN
    assert counters["chunks_promoted_on_demand"] == 0

    for keys in talks[2:]:  # and those that nobody announced are read when they are asked for
        assert read_at_once(space, keys) == {Outcome.PENDING}
        assert set(look(space, keys)) == {(Outcome.HIT, Reason.NONE)}
    counters = space.client.stats().counters
    assert counters["chunks_promoted_on_demand"] == 2 * TURN
    assert counters["prefetch_on_time"] == counters["chunks_promoted_ahead"] == 2 * TURN


def test_single_keys_can_be_hinted(space: Namespace) -> None:
    keys = talk(space, 0)
    demote(space, keys, filler=1)
    assert space.publish_queue([Hint(b"job", 0, keys=tuple(keys[:5]))]).results == (ACCEPTED,)
    eventually(lambda: in_dram(space, keys[:5]))
    assert set(space.match(keys[5:]).reasons) == {Reason.ON_SSD}


def test_what_the_queue_needs_leaves_dram_last(space: Namespace) -> None:
    needed, other = talk(space, 0), talk(space, 1)
    settled_ssd(space.client)
    assert space.publish_queue([hint(0)]).results == (ACCEPTED,)
    # Some at a time: what is being written to SSD is pinned, and if that were nearly all, nothing else could leave
    save(space, keys_of(space, 2 * DRAM_CHUNKS, 1), wait=Wait.DURABLE)
    assert in_dram(space, needed), "older than all others, and still there"
    assert counter(space, "chunks_promoted_ahead") == 0, "they never left"
    assert set(space.match(other).reasons) == {Reason.ON_SSD}


def test_windows_clip_a_long_queue(space: Namespace) -> None:
    for number in range(8):
        talk(space, number)
    settled_ssd(space.client)
    answer = space.publish_queue([hint(number, number) for number in range(8)])
    near = int(0.8 * DRAM_CHUNKS) // TURN
    assert answer.results == (ACCEPTED,) * near + (DEFERRED,) * (8 - near)
    assert (answer.prefetch_window, answer.eviction_window) == (near, 8)
    # Once the others' chunks that are on their way have come
    turned = [hint(number, 8 - number) for number in range(8)]
    eventually(lambda: space.publish_queue(turned).results == (DEFERRED,) * (8 - near) + (ACCEPTED,) * near)


def test_a_queue_longer_than_all_tiers_is_cut(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    space = open_space(start(ssd_bytes=(8 + 1 + 4) << 20))  # one slab
    keys = keys_of(space, DRAM_CHUNKS - 4, 1)  # a full arena keeps a slot or two free
    save(space, keys)
    everything = [Hint(b"%d" % n, n, keys=tuple(keys)) for n in range(2)]
    assert space.publish_queue(everything).results == (DEFERRED, DEFERRED), "the same chunks count once"
    answer = space.publish_queue([Hint(b"none", 0, session=b"no such session"), Hint(b"empty", 1)])
    assert answer.results == (REJECTED, REJECTED)


def test_hints_expire(space: Namespace) -> None:
    needed = talk(space, 0)
    settled_ssd(space.client)
    assert space.publish_queue([hint(0)], ttl_ms=50).results == (ACCEPTED,)
    eventually(lambda: counter(space, "hints_expired") == 1)
    demote(space, needed, filler=1)
    assert counter(space, "chunks_promoted_ahead") == 0


def test_deltas(space: Namespace) -> None:
    talks = [talk(space, number) for number in range(3)]
    demote(space, [key for keys in talks for key in keys], filler=1)
    assert space.publish_queue([hint(0)]).eviction_window == 1
    assert space.publish_queue([hint(1, 1)], snapshot=False).eviction_window == 2
    answer = space.publish_queue([hint(2, 2)], removed=[b"job 0", b"unknown"], snapshot=False)
    assert answer.eviction_window == 2
    assert space.publish_queue([]).eviction_window == 0, "an empty snapshot: nothing waits"


def test_numbered_deltas(space: Namespace, run_dir: Path) -> None:
    for number in range(3):
        talk(space, number)
    assert space.publish_queue([hint(0)], number=1).eviction_window == 1
    assert space.publish_queue([hint(1, 1)], snapshot=False, number=2).eviction_window == 2
    again = space.publish_queue([], removed=[b"job 0"], snapshot=False, number=2)
    assert (again.eviction_window, again.snapshot_wanted) == (2, False), "it was heard already"
    lost = space.publish_queue([hint(2, 2)], snapshot=False, number=4)
    assert (lost.results, lost.eviction_window, lost.snapshot_wanted) == ((REJECTED,), 2, True)
    with connect(str(run_dir)) as other:
        answer = other.publish_queue(SPEC.model, [hint(2, 2)], snapshot=False, number=5)
        assert answer.snapshot_wanted, "another connection is another scheduler"
    assert space.publish_queue([hint(2, 2)], number=5).eviction_window == 1


def test_late_and_wasted_prefetches_are_counted(
    start: Callable[..., Any], open_space: Callable[..., Namespace], run_dir: Path
) -> None:
    weather = Weather(run_dir.parent)
    space = open_space(start(environment=weather.environment))
    keys = talk(space, 0)
    demote(space, keys, filler=1)
    weather.set([{"calls": ["read"], "files": "slab-*", "do": "hang"}])
    assert space.publish_queue([hint(0)]).results == (ACCEPTED,)
    with space.read(keys, wait_ms=5_000) as lease:
        assert set(lease.outcomes) == {Outcome.PENDING}
        weather.clear()
        assert len(lease.settled()) == TURN
    counters = space.client.stats().counters
    assert (counters["prefetch_late"], counters["prefetch_on_time"]) == (TURN, 0)
    with space.read(keys) as lease:  # else they stay for whoever waited for them
        assert lease.hits == TURN

    space.publish_queue([])
    demote(space, keys, filler=2)
    space.publish_queue([hint(0)])
    eventually(lambda: in_dram(space, keys))
    space.publish_queue([])
    eventually(
        lambda: not any(chunk.needed for chunk in explained(space, keys))
    )  # the job may have been taken
    demote(space, keys, filler=3)
    counters = space.client.stats().counters
    assert (counters["prefetch_wasted"], counters["prefetch_on_time"]) == (TURN, 0)


def test_a_scheduler_that_leaves_holds_nothing(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    daemon = start()
    space = open_space(daemon)
    needed = talk(space, 0)
    with client_of(daemon) as scheduler:
        assert scheduler.open(SPEC).publish_queue([hint(0)]).results == (ACCEPTED,)
    demote(space, needed, filler=1)


def test_what_the_caller_got_wrong(space: Namespace) -> None:
    for hints in (
        [Hint(b"", 0)],
        [Hint(b"j" * 65, 0)],
        [Hint(b"j", -1)],
        [Hint(b"j", 0, keys=(ChunkKey(b""),))],
    ):
        with pytest.raises(BadRequest, match=r"hints\[0\]"):
            space.publish_queue(hints)
    with pytest.raises(BadRequest, match="removed"):
        space.publish_queue([], removed=[b""])
    with pytest.raises(BadRequest, match="at most 4096"):
        space.publish_queue([Hint(b"%d" % n, n) for n in range(4097)])


def test_awaited(start: Callable[..., Any]) -> None:
    daemon = start()

    async def publish() -> list[tuple[HintResult, ...]]:
        async with await connect_async(str(daemon.run_dir), timeout_s=20) as client:
            with pytest.raises(NotFound, match=f"model={SPEC.model}: no worker has opened it"):
                await client.publish_queue(SPEC.model, [])
            space = await client.open(SPEC)
            hints = [Hint(b"job", 0, session=b"none")]
            answers = [await space.publish_queue(hints), await client.publish_queue(SPEC.model, hints)]
            return [answer.results for answer in answers]

    assert asyncio.run(publish()) == [(REJECTED,)] * 2


def test_a_queue_hears_of_sessions_that_nobody_recorded(
    space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    talk(space, 0)
    queue = HintedQueue(space.client, SPEC.model)
    queue.put(Job("talk 1", (1,), 1))
    eventually(lambda: queue.rejected > 0)
    before = queue.published
    queue.put(Job("talk 0", (1,), 1))
    eventually(lambda: queue.published > before)
    queue.close()
    assert ["no worker has recorded" in record.message for record in caplog.records] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_tenants_do_not_reach_each_others_queues_and_chunks(
    start: Callable[..., Any], open_space: Callable[..., Namespace], run_dir: Path
) -> None:
    run_dir.parent.chmod(0o755)
    daemon = start(tenants=f"{ALICE}=alice,{BOB}=bob", dram_bytes=2 * DRAM_CHUNKS * CHUNK)
    alice, bob = open_space(daemon, uid=ALICE), open_space(daemon, uid=BOB)
    keys = talk(alice, 0)
    settled_ssd(alice.client)
    save(alice, keys_of(alice, 4 * DRAM_CHUNKS, 1))
    settled_ssd(alice.client)
    assert set(alice.match(keys).reasons) == {Reason.ON_SSD}

    assert bob.publish_queue([hint(0)]).results == (REJECTED,), "Bob has no such session"
    theirs = bob.publish_queue([Hint(b"job 0", 0, keys=tuple(keys))])
    assert theirs.results == (ACCEPTED,), "of nothing that he has"
    number = next(row.namespace_id for row in alice.client.stats().namespaces)
    with pytest.raises(StoreError) as refused:
        publish_as(bob.client, number, [hints_pb2.Hint(job=b"job 0", session=b"talk 0")])
    assert isinstance(refused.value, NotFound), "not even that it exists"
    assert set(alice.match(keys).reasons) == {Reason.ON_SSD}, "nothing of Alice's was promoted"

    assert alice.publish_queue([hint(0)]).results == (ACCEPTED,)
    bob.publish_queue([], removed=[b"job 0"], snapshot=False)
    bob.publish_queue([])
    eventually(lambda: in_dram(alice, keys))
    assert alice.publish_queue([], snapshot=False).eviction_window == 1, "Alice's queue is as it was"


def test_what_a_worker_keeps_is_told_to_all_and_ranked_by_the_queue(
    start: Callable[..., Any], open_space: Callable[..., Namespace]
) -> None:
    daemon = start()
    worker, scheduler = open_space(daemon), open_space(daemon)
    keys = talk(worker, 0)
    scheduler.publish_queue([hint(0)])
    unknown = keys_of(worker, 1, 50)
    assert worker.report_resident([*reversed(keys[:3]), *unknown]) == (3, 2, 1, 0)
    (row,) = scheduler.client.stats().namespaces
    assert row.worker_chunks == 4
    known = scheduler.client.unary(
        stats_pb2_grpc.StatsStub,
        "Explain",
        stats_pb2.ExplainRequest(namespace_id=row.namespace_id, keys=[*keys[:4], *unknown]),
    )
    assert [len(chunk.resident_in) for chunk in known.chunks] == [1, 1, 1, 0, 1]
    with pytest.raises(BadRequest, match="keys"):
        worker.report_resident(keys_of(worker, 4_097))
    worker.client.close()
    eventually(lambda: scheduler.client.stats().namespaces[0].worker_chunks == 0)


def publish_as(client: Client, namespace: int, hints: list[hints_pb2.Hint]) -> None:
    client.unary(
        hints_pb2_grpc.HintsStub,
        "PublishQueue",
        hints_pb2.PublishQueueRequest(namespace_id=namespace, hints=hints),
    )
