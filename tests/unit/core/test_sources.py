"""Chunks that this node lacks are looked up beyond it, and come into DRAM by the rules of a promotion."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import CHUNK_TOKENS, PAGE, chain, spec
from kvstore.types import DiskResult, NamespaceId, WorkerId

KEYS = chain("k", 4)


def start(**limits: Any) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    world = RemoteWorld(**{"segments": 2, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0, **limits})
    worker = world.join()
    return world, worker, world.open(spec(shards=limits.pop("shards", 1)), worker)


def acquire(world: RemoteWorld, worker: WorkerId, namespace: NamespaceId, keys: Any = KEYS) -> Any:
    return world.ask(ev.Acquire, worker, namespace, keys, wait_ms=5_000)


def settled(world: RemoteWorld) -> tuple[list[Any], list[Any]]:
    pushes = world.take(ev.ChunksSettled)
    return [key for push in pushes for key in push.ready], [key for push in pushes for key in push.failed]


def test_match_says_what_is_elsewhere_and_brings_nothing() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS[:3])
    assert world.outcomes(worker, namespace, KEYS) == ["ON_REMOTE"] * 3 + ["NEVER_SEEN"]
    assert world.match(worker, namespace, KEYS).usable == 3
    assert world.match(worker, namespace, KEYS[:3], 3 * CHUNK_TOKENS).usable == 2
    assert not world.counters["remote_chunks_fetched"] and world.slots()["reserved"] == 0


def test_acquire_brings_it_and_the_bytes_are_those_that_were_committed() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    assert [reason.name for reason in acquire(world, worker, namespace).reasons] == ["ON_REMOTE"] * 4
    assert settled(world) == (list(KEYS), [])
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4  # the world compares the bytes
    assert acquire(world, worker, namespace).lease
    assert world.store.state.namespaces[namespace].remote_hits == 4


def test_what_is_here_waits_for_no_look_up() -> None:
    world, worker, namespace = start()
    world.hold = {ev.LookUpChunks}
    world.save(worker, namespace, KEYS)
    assert acquire(world, worker, namespace).lease and not world.held
    assert world.match(worker, namespace, KEYS).usable == 4 and not world.held


def test_a_request_waits_for_its_look_up_and_for_no_longer_than_it_may() -> None:
    world, worker, namespace = start(lookup_wait_ms=50)
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.LookUpChunks}
    assert world.ask(ev.Match, worker, namespace, KEYS) is None
    world.finish()
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Matched)]
    assert reply.answer.usable == 4
    world.replies.clear()
    other = chain("other", 2)
    assert world.ask(ev.Match, worker, namespace, other) is None
    world.tick(50)
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Matched)]
    assert reply.answer.usable == 0
    world.finish()  # late, and of use to the next
    assert world.counters["lookups_not_waited_for"] == 1


def test_negative_answers_are_remembered_for_a_while() -> None:
    world, worker, namespace = start(lookup_absent_ms=1_000)
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 4
    asked = len(world.looked_up)
    assert world.outcomes(worker, namespace, KEYS) == ["NEVER_SEEN"] * 4
    assert len(world.looked_up) == asked
    world.put_elsewhere(namespace, KEYS)
    world.tick(1_001)
    assert world.outcomes(worker, namespace, KEYS) == ["ON_REMOTE"] * 4


def test_two_requests_ask_once() -> None:
    world, worker, namespace = start()
    world.hold = {ev.LookUpChunks}
    world.ask(ev.Match, worker, namespace, KEYS)
    world.ask(ev.Match, worker, namespace, KEYS)
    assert len(world.held) == 1
    world.finish()
    assert len([reply for reply in world.replies if isinstance(reply.answer, ev.Matched)]) == 2


@pytest.mark.parametrize(
    ("result", "reason"), [("CORRUPT", "CORRUPT"), ("REUSED", "EVICTED"), ("IO_ERROR", "SLOW")]
)
def test_what_does_not_come_is_a_miss_with_a_reason_and_leaves_no_slot(result: str, reason: str) -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS, results=[DiskResult[result]] * 2)
    before = world.slots()
    acquire(world, worker, namespace)
    assert settled(world) == ([], list(KEYS))
    assert world.outcomes(worker, namespace, KEYS) == [reason] * 4
    after = world.slots()
    assert after["reserved"] == 0 and after["free"] == after["capacity"] >= before["capacity"]
    assert world.counters["remote_chunks_refused"] == 4 * (result == "CORRUPT")


def test_it_is_read_from_the_next_source_if_the_cheapest_has_it_no_more() -> None:
    world, worker, namespace = start(sources=("peer", "remote"))
    world.cost_ms = {"peer": 1.0, "remote": 20.0}
    world.put_elsewhere(namespace, KEYS, source="peer", results=[DiskResult.REUSED])
    world.put_elsewhere(namespace, KEYS, source="remote")
    world.hold = {ev.FetchChunks}
    acquire(world, worker, namespace)
    assert [held.source for held in world.held] == ["peer"]
    world.finish()
    assert [held.source for held in world.held] == ["remote"]
    world.finish()
    assert settled(world) == (list(KEYS), [])


def test_the_targets_of_a_late_fetch_stay_out_of_use_until_it_returns() -> None:
    world, worker, namespace = start(remote_deadline_ms=400)
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    acquire(world, worker, namespace)
    world.tick(400)
    assert settled(world) == ([], list(KEYS))
    assert world.slots()["quarantined"] == 4 and len(world.late_ops()) == 1
    world.finish()
    assert world.slots()["quarantined"] == 0 and not world.store.sources.fetches
    assert "HIT" not in world.outcomes(worker, namespace, KEYS)


def test_a_source_that_hangs_is_left_alone_and_comes_back_by_itself() -> None:
    world, worker, namespace = start(lookup_wait_ms=50, lookup_deadline_ms=200, source_pause_ms=1_000)
    world.put_elsewhere(namespace, chain("there", 2))
    world.hold = {ev.LookUpChunks}
    assert world.ask(ev.Match, worker, namespace, KEYS) is None
    world.tick(200)
    assert not world.store.sources.by_name["remote"].is_well
    for number in range(20):  # nobody waits, nothing more is begun
        assert world.ask(ev.Match, worker, namespace, chain(f"miss {number}", 2)).usable == 0
    assert len(world.held) == 1
    world.tick(1_001)
    there = chain("there", 2)
    assert len(world.held) == 2  # the trial: nobody waits for it
    assert world.ask(ev.Match, worker, namespace, there).usable == 0
    assert len(world.held) == 2
    world.finish(world.held[1])
    assert world.store.sources.by_name["remote"].is_well
    world.hold = set()
    assert world.match(worker, namespace, there).usable == 2


def test_a_failing_source_is_left_alone_for_longer_each_time() -> None:
    world, worker, namespace = start(source_pause_ms=1_000, source_pause_max_ms=3_000)
    world.hold = {ev.LookUpChunks}
    source = world.store.sources.by_name["remote"]
    pauses = []
    for number in range(7):
        world.ask(ev.Match, worker, namespace, chain(f"k {number}", 1))
        world.finish(fails="connection refused")
        if not source.is_well:
            pauses.append(source.pause_ms)
            world.tick(source.pause_ms + 1)
    assert pauses == [1_000, 2_000, 3_000, 3_000, 3_000]


def test_what_is_on_its_way_is_granted_to_nobody() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    acquire(world, worker, namespace)
    assert {result.name for result in world.reserve(worker, namespace, KEYS).results} == {"BUSY"}
    world.finish()
    assert {result.name for result in world.reserve(worker, namespace, KEYS).results} == {"ALREADY"}


def test_what_is_forgotten_while_it_comes_is_no_hit() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    acquire(world, worker, namespace)
    world.ask(ev.Forget, worker, namespace, b"", KEYS)
    assert settled(world) == ([], list(KEYS))
    world.finish()
    world.elsewhere["remote"].clear()
    assert set(world.outcomes(worker, namespace, KEYS)) <= {"FORGOTTEN", "NEVER_SEEN"}
    assert world.slots()["reserved"] == 0


def test_a_chunk_that_a_recalled_maker_made_is_refused() -> None:
    world, worker, namespace = start()
    admin = world.join("operator", admin=True)
    world.ask(ev.Recall, admin, b"m" * 16)
    world.put_elsewhere(namespace, KEYS, makers=(b"m" * 16,))
    acquire(world, worker, namespace)
    assert settled(world) == ([], list(KEYS))
    assert world.outcomes(worker, namespace, KEYS) == ["RECALLED"] * 4


def test_a_chunk_never_changes_what_it_is() -> None:
    world, worker, namespace = start(ghosts_max=100, slabs=1, slab_slots=8)
    world.save(worker, namespace, KEYS)
    for number in range(16):
        world.save(worker, namespace, chain(f"other {number}", 4))
    world.put_elsewhere(namespace, KEYS, derived=True)
    world.tick(1_001)
    acquire(world, worker, namespace)
    assert settled(world) == ([], list(KEYS))
    assert world.outcomes(worker, namespace, KEYS) == ["CORRUPT"] * 4


def test_a_tail_comes_with_its_tokens() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS[:1], token_count=2)
    assert world.match(worker, namespace, KEYS[:1], 3).usable == 1
    acquire(world, worker, namespace, KEYS[:1])
    row = world.store.state.namespaces[namespace].index[KEYS[0]]
    assert world.store.state.chunks.tokens[row] == 2


def test_without_dram_it_waits_or_is_told() -> None:
    world, worker, namespace = start(segments=1, pin_share_max=1.0)
    world.save(worker, namespace, chain("mine", 8))
    lease = world.ask(ev.Acquire, worker, namespace, chain("mine", 8))
    world.put_elsewhere(namespace, KEYS)
    acquire(world, worker, namespace)
    world.tick(10_000)  # the lease expires; or whoever waits is told that it does not come
    ready, failed = settled(world)
    assert lease.lease and sorted(ready + failed) == sorted(KEYS)


def test_other_tenants_and_old_epochs_are_asked_for_nowhere() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    stranger = world.join("bob")
    theirs = world.open(spec(), stranger)
    assert world.outcomes(stranger, theirs, KEYS) == ["NEVER_SEEN"] * 4
    world.open(spec(epoch=1), worker)
    asked = len(world.looked_up)
    assert world.outcomes(worker, namespace, KEYS) == ["OLD_EPOCH"] * 4
    assert len(world.looked_up) == asked


def test_a_worker_that_goes_is_answered_nothing() -> None:
    world, worker, namespace = start()
    world.hold = {ev.LookUpChunks}
    world.ask(ev.Match, worker, namespace, KEYS)
    world.kill(worker)
    world.finish()
    assert not world.store.sources.parked


def test_an_answer_to_a_repeated_acquire_is_one_answer() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.LookUpChunks}
    world.ask(ev.Acquire, worker, namespace, KEYS, request_id=77)
    world.ask(ev.Acquire, worker, namespace, KEYS, request_id=77)
    assert len(world.held) == 1
    world.finish()
    assert len([reply for reply in world.replies if reply.ticket.request_id == 77]) == 2


def test_another_node_is_served_from_this_one_alone() -> None:
    """It asks the others itself: else two nodes would ask each other for what neither has."""
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.save(worker, namespace, KEYS[:2])
    peer = world.join()
    assert world.open(spec(), peer) == namespace
    answer = world.ask(ev.Acquire, peer, namespace, KEYS, wait_ms=5_000, prefix_only=False, local=True)
    assert [reason.name for reason in answer.reasons] == ["NONE", "NONE", "NEVER_SEEN", "NEVER_SEEN"]
    assert not world.looked_up
    world.match(worker, namespace, KEYS)  # now it is known to be elsewhere
    answer = world.ask(ev.Acquire, peer, namespace, KEYS, wait_ms=5_000, prefix_only=False, local=True)
    assert [reason.name for reason in answer.reasons] == ["NONE", "NONE", "EVICTED", "EVICTED"]
    assert not world.counters["remote_chunks_fetched"]


MIB = 1 << 20


def test_as_much_is_asked_of_a_source_as_comes_before_its_deadline() -> None:
    """A link of 2 chunks a second: more at once and it would be left alone."""
    world = RemoteWorld(
        segments=4, segment_bytes=32 * MIB, remote_deadline_ms=5_000, remote_bytes_in_flight_max=64 * MIB
    )
    worker = world.join()
    namespace = world.open(spec(shard_bytes=MIB), worker)
    keys = chain("k", 64)
    world.put_elsewhere(namespace, keys)
    world.hold = {ev.FetchChunks}
    world.ask(ev.Acquire, worker, namespace, keys, wait_ms=60_000)
    assert world.finish_over_link(ms_per_chunk=500) == 8
    ready, failed = settled(world)
    assert sorted(ready) == sorted(keys) and not failed
    assert not world.counters["remote_trips"]


def test_what_a_slow_source_has_does_not_keep_back_what_another_has() -> None:
    world = RemoteWorld(
        segments=4, segment_bytes=32 * MIB, sources=("peer", "remote"), remote_bytes_in_flight_max=64 * MIB
    )
    worker = world.join()
    namespace = world.open(spec(shard_bytes=MIB), worker)
    slow, quick = chain("slow", 48), chain("quick", 8)
    world.put_elsewhere(namespace, slow, source="remote")
    world.put_elsewhere(namespace, quick, source="peer")
    world.hold = {ev.FetchChunks}
    acquire(world, worker, namespace, slow)
    acquire(world, worker, namespace, quick)
    mine = {
        held.source: sum(len(other.keys) for other in world.held if other.source == held.source)
        for held in world.held
    }
    assert mine == {"remote": 8, "peer": 8}
