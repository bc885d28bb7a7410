"""Match and Acquire: what is a hit, why something is none, who is told when that changes; ReportLoad."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.core.requests.reads import AUDITS_AGAIN_MAX
from kvstore.errors import BadRequest, Exhausted, NotFound
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, chain, spec
from kvstore.types import NamespaceId, Outcome, Protection, Reason

HIT, PENDING, MISS = Outcome

# ------------------------------------------------------------------------------------------------------------ match


@pytest.mark.parametrize(
    ("token_count", "usable"),
    [(0, 3), (100, 3), (13, 3), (12, 2), (11, 2), (9, 2), (8, 1), (5, 1), (4, 0), (1, 0)],
)
def test_match_leaves_at_least_one_token_to_compute(token_count: int, usable: int) -> None:
    """Three chunks of four tokens are stored; a prompt of twelve may use two of them (invariant 4)."""
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 3))
    assert world.match(worker, namespace, chain("k", 5), token_count).usable == usable


def test_match_counts_the_tokens_of_a_tail_as_they_are() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2), token_counts=(CHUNK_TOKENS, 2))
    assert world.match(worker, namespace, chain("k", 2), 7).usable == 2
    assert world.match(worker, namespace, chain("k", 2), 6).usable == 1


def test_match_stops_at_the_first_hole_but_says_what_lies_behind_it() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 5))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 5)[2:3])
    matched = world.match(worker, namespace, chain("k", 6))
    assert matched.usable == 2
    assert matched.outcomes == (HIT, HIT, MISS, HIT, HIT, MISS)
    assert matched.reasons[2] is Reason.FORGOTTEN


def test_match_neither_pins_nor_uses() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(4):
        world.tick(1)
        world.save(worker, namespace, chain(f"{number}", 1))
    world.match(worker, namespace, chain("0", 1))
    world.save(worker, namespace, chain("new", 1))
    assert world.outcomes(worker, namespace, chain("0", 1)) == ["EVICTED"]


# ---------------------------------------------------------------------------------------------------------- acquire


def test_a_prefix_lookup_stops_at_the_first_miss() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 4)[1:2])
    acquired = world.acquire(worker, namespace, chain("k", 4))
    assert acquired.outcomes == (HIT, MISS, MISS, MISS)
    assert acquired.reasons == (
        Reason.NONE,
        Reason.FORGOTTEN,
        Reason.BEYOND_MISS,
        Reason.BEYOND_MISS,
    )
    assert len(acquired.extents) == 1
    anyhow = world.acquire(worker, namespace, chain("k", 4), prefix_only=False)
    assert anyhow.outcomes == (HIT, MISS, HIT, HIT)
    assert len(anyhow.extents) == 3


def test_nothing_found_is_no_lease() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    acquired = world.acquire(worker, namespace, chain("k", 2))
    assert acquired == ev.Acquired(
        acquired.lease, 0, (MISS, MISS), (Reason.NEVER_SEEN, Reason.BEYOND_MISS), ()
    )
    assert acquired.lease == 0
    assert world.store.state.leases.leases == {}


def test_extents_come_in_key_order_then_in_the_order_of_the_wanted_shards() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=3), worker)
    world.save(worker, namespace, chain("k", 2))
    acquired = world.acquire(worker, namespace, chain("k", 2)[::-1], shards=(2, 0))  # compared by the world
    assert len(acquired.extents) == 4
    every = world.acquire(worker, namespace, chain("k", 2))
    assert {(e.segment, e.offset) for e in acquired.extents} < {(e.segment, e.offset) for e in every.extents}


def test_a_pinned_chunk_is_never_evicted_and_an_unpinned_one_is() -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("old", 4))
    world.save(worker, namespace, chain("new", 4))
    lease = world.acquire(worker, namespace, chain("old", 4)).lease
    world.save(worker, namespace, chain("more", 4))
    assert world.outcomes(worker, namespace, chain("old", 4)) == ["HIT"] * 4
    assert world.outcomes(worker, namespace, chain("new", 4)) == ["EVICTED"] * 4
    world.release(worker, lease)
    for number in range(2):
        world.save(worker, namespace, chain(f"{number}", 4))
    assert world.outcomes(worker, namespace, chain("old", 4)) == ["EVICTED"] * 4


def test_of_what_was_used_together_descendants_go_first() -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(8):  # saved in this order, one by one; used together
        world.save(worker, namespace, chain("k", 8)[number : number + 1])
    # 4 of 8 pages may be pinned: used in two halves, the front last
    for keys in (chain("k", 8)[4:], chain("k", 8)[:4]):
        world.tick(1)
        world.release(worker, world.acquire(worker, namespace, keys).lease)
    world.save(worker, namespace, chain("new", 6))
    assert world.outcomes(worker, namespace, chain("k", 8)) == ["HIT"] * 2 + ["EVICTED"] * 6


def test_time_to_live_of_a_lease_is_what_was_asked_but_at_most_the_bound() -> None:
    world = World(lease_ttl_ms=1_000, lease_ttl_max_ms=5_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    for wanted, granted in ((0, 1_000), (10, 10), (1 << 40, 5_000)):
        assert world.acquire(worker, namespace, chain("k", 1), ttl_ms=wanted).ttl_ms == granted


# ------------------------------------------------------------------------------------------------------------ quota


def test_an_engine_group_pins_at_most_its_share() -> None:
    world = World(pin_share_max=0.25)  # of 128 pages
    one, rank, other = world.join(group="engine"), world.join(group="engine", rank=1), world.join()
    namespace = world.open(spec(), one, rank, other)
    for part in range(2):
        world.save(one, namespace, chain("k", 40)[20 * part : 20 * part + 20])
    first = world.acquire(one, namespace, chain("k", 20))
    second = world.acquire(rank, namespace, chain("k", 40))
    assert second.reasons.count(Reason.NONE) == 32
    assert second.reasons[32:34] == (Reason.QUOTA, Reason.BEYOND_MISS)
    assert world.acquire(other, namespace, chain("k", 40)).outcomes.count(HIT) == 32
    # A shared prefix counts once: with the first lease gone, the group still pins 32.
    world.release(one, first.lease)
    assert world.acquire(one, namespace, chain("k", 40)[32:]).reasons[0] is Reason.QUOTA
    world.release(one, second.lease)
    assert world.acquire(one, namespace, chain("k", 40)[32:]).outcomes == (HIT,) * 8


def test_a_key_twice_in_one_request_is_pinned_twice_and_counted_once() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    lease = world.acquire(worker, namespace, chain("k", 1) * 3).lease
    group = world.store.state.workers[worker].group
    assert group.pinned_bytes == PAGE
    world.release(worker, lease)
    assert (group.pinned_bytes, group.pins) == (0, {})


def test_renewing_holds_no_more_than_the_share() -> None:
    world = World(pin_share_max=0.25, lease_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for part in range(2):
        world.save(worker, namespace, chain("k", 40)[20 * part : 20 * part + 20])
    leases = [world.acquire(worker, namespace, chain("k", 40)[i : i + 8]).lease for i in range(0, 40, 8)]
    assert leases[4] == 0
    for _ in range(20):
        world.tick(900)
        assert world.ask(ev.Renew, worker, tuple(leases[:4])).ttl_ms == (1_000,) * 4
    assert world.store.state.workers[worker].group.pinned_bytes == 32 * PAGE


def test_open_leases_are_bounded_per_member() -> None:
    world = World(leases_per_worker_max=2)
    worker = world.join(group="engine")
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    leases = [world.acquire(worker, namespace, chain("k", 1)).lease for _ in range(2)]
    with pytest.raises(Exhausted, match=r"too many open leases.*release some") as error:
        world.acquire(worker, namespace, chain("k", 1))
    assert error.value.value == "2"
    world.join(group="engine", rank=1)
    assert world.acquire(worker, namespace, chain("k", 1)).lease
    world.release(worker, *leases)
    assert world.acquire(worker, namespace, chain("k", 1)).lease


# ------------------------------------------------------------------------------------------------------------ waits


def settled(world: World) -> list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]]:
    return [(push.worker, push.ready, push.failed) for push in world.take(ev.ChunksSettled)]


def test_who_waits_is_told_when_a_chunk_is_there() -> None:
    world = World()
    saver, reader = world.join(), world.join()
    namespace = world.open(spec(), saver, reader)
    (key,) = chain("k", 1)
    reserved = world.reserve(saver, namespace, (key,))
    pending = world.acquire(reader, namespace, (key,), wait_ms=1_000)
    assert (pending.outcomes, pending.reasons) == ((PENDING,), (Reason.BEING_SAVED,))
    assert settled(world) == []
    world.commit(saver, reserved)
    assert settled(world) == [(reader, (key,), ())]
    assert world.acquire(reader, namespace, (key,)).outcomes == (HIT,)
    world.tick(5_000)
    assert settled(world) == []


@pytest.mark.parametrize("end", ["abort", "expiry", "death", "forget", "failed copy", "late copy"])
def test_who_waits_is_told_when_a_chunk_will_not_come(end: str) -> None:
    world = World(reservation_ttl_ms=1_000)
    saver, reader = world.join(), world.join()
    namespace = world.open(spec(), saver, reader)
    (key,) = chain("k", 1)
    reserved = world.reserve(saver, namespace, (key,))
    world.acquire(reader, namespace, (key,), wait_ms=60_000)
    if end == "abort":
        world.abort(saver, reserved)
    elif end == "expiry":
        world.tick(1_000)
    elif end == "death":
        world.kill(saver)
    elif end == "forget":
        world.ask(ev.Forget, reader, namespace, b"", (key,))
    else:
        world.hold = {ev.CopyIn}
        world.commit(saver, reserved)
        if end == "late copy":
            world.tick(20_000)
        else:
            world.finish(fails="no")
    assert settled(world) == [(reader, (), (key,))]


def test_who_waits_is_told_at_the_deadline_at_the_latest() -> None:
    world = World(wait_max_ms=2_000)
    saver, soon, late = world.join(), world.join(), world.join()
    namespace = world.open(spec(), saver, soon, late)
    (key,) = chain("k", 1)
    world.reserve(saver, namespace, (key,))
    world.acquire(soon, namespace, (key,), wait_ms=500)
    world.acquire(late, namespace, (key,), wait_ms=1 << 40)  # as long as one may wait
    world.tick(499)
    assert settled(world) == []
    world.tick(1)
    assert settled(world) == [(soon, (), (key,))]
    world.tick(1_500)
    assert settled(world) == [(late, (), (key,))]
    world.tick(10_000)
    assert settled(world) == []


def test_nobody_is_told_who_does_not_wait() -> None:
    world = World()
    saver, reader, gone = world.join(), world.join(), world.join()
    namespace = world.open(spec(), saver, reader, gone)
    reserved = world.reserve(saver, namespace, chain("k", 1))
    world.acquire(reader, namespace, chain("k", 1))
    world.match(reader, namespace, chain("k", 1))
    world.acquire(gone, namespace, chain("k", 1), wait_ms=1_000)
    world.kill(gone)
    world.commit(saver, reserved)
    assert settled(world) == []


def test_a_chunk_that_waits_for_another_rank_settles_with_the_last_one() -> None:
    world = World()
    ranks = [world.join(group="engine", rank=rank) for rank in range(2)]
    namespace = world.open(spec(shards=2), *ranks)
    (key,) = chain("k", 1)
    reserved = world.reserve(ranks[0], namespace, (key,), shards=(0,))
    world.acquire(ranks[0], namespace, (key,), wait_ms=5_000)
    world.commit(ranks[0], reserved)
    assert settled(world) == []
    world.save(ranks[1], namespace, (key,), shards=(1,))
    assert settled(world) == [(ranks[0], (key,), ())]


def test_waits_of_a_worker_are_bounded() -> None:
    world = World(waits_per_worker_max=3)
    saver, reader = world.join(), world.join()
    namespace = world.open(spec(), saver, reader)
    reserved = world.reserve(saver, namespace, chain("k", 8))
    for _ in range(5):
        world.acquire(reader, namespace, chain("k", 8), wait_ms=1_000, prefix_only=False)
    assert world.store.state.workers[reader].waits == 3
    world.commit(saver, reserved)
    assert len(settled(world)) == 3
    assert world.store.state.workers[reader].waits == 0


# ----------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize("protection", list(Protection))
def test_reported_bytes_that_are_damaged_are_a_miss_and_their_slots_are_out_of_service(
    protection: Protection,
) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 3))
    (extent, *_) = world.acquire(worker, namespace, chain("k", 3)[1:2]).extents
    world.leases.clear()
    world.memory[extent.segment][extent.offset // PAGE] ^= 1  # a stray write
    world.damaged.add((extent.segment, extent.offset // PAGE))
    assert world.ask(ev.ReportLoad, worker, namespace, chain("k", 3)).count == 3
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["HIT", "CORRUPT", "HIT"]
    for lease in list(world.store.state.leases.leases):
        world.release(worker, lease)
    assert world.load(worker, extent) is None
    assert (world.slots()["quarantined"], world.slots()["ready"]) == (2, 4)
    assert world.store.state.counters["chunks_corrupt"] == 1
    world.save(worker, namespace, chain("k", 3)[1:2])
    world.acquire(worker, namespace, chain("k", 3))


def test_reported_bytes_that_are_whole_stay() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    assert world.ask(ev.ReportLoad, worker, namespace, chain("k", 3)).count == 2
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["HIT", "HIT", "NEVER_SEEN"]
    assert world.store.state.counters["loads_reported_bad"] == 3


@pytest.mark.parametrize(
    "why", ["4096 of this worker's copies are under way already", "the copier is closing", "EIO"]
)
@pytest.mark.parametrize("protection", list(Protection))
def test_a_checksum_that_failed_says_nothing_of_the_bytes(protection: Protection, why: str) -> None:
    world = World(protection=protection)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 2))
    world.hold = {ev.Checksum}
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 2))
    world.finish(fails=why)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["HIT", "HIT"]
    counters = world.store.state.counters
    assert (counters["audits_failed"], counters["chunks_corrupt"], counters["slots_quarantined"]) == (1, 0, 0)
    assert not any(world.store.state.chunks.pins), "it waits without a pin"


def test_an_audit_that_failed_is_repeated_and_finds_what_is_damaged() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    (extent, *_) = world.acquire(worker, namespace, chain("k", 1)).extents
    world.leases.clear()
    world.memory[extent.segment][extent.offset // PAGE] ^= 1  # a stray write
    world.damaged.add((extent.segment, extent.offset // PAGE))
    world.hold = {ev.Checksum}
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 2))
    for _ in range(3):
        world.finish(fails="busy")
        assert world.held == []
        world.tick(100)
        (again,) = world.held
        assert len(again.extents) == 2 and again.worker is None, "the daemon's own by now"
        world.tick(100)
        assert world.held == [again], "one at a time"
    world.finish()
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["CORRUPT", "HIT"]
    world.tick(100)
    assert world.held == []


def test_an_audit_that_always_fails_is_given_up() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    world.hold = {ev.Checksum}
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 1))
    for _ in range(AUDITS_AGAIN_MAX):
        world.finish(fails="busy")
        world.tick(100)
    world.finish(fails="busy")
    world.tick(100)
    assert world.held == []
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 1))
    assert len(world.held) == 1, "who finds it bad again is heard"


def test_what_waits_to_be_audited_again_may_be_evicted() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 4))
    world.hold = {ev.Checksum}
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 4))
    world.finish(fails="busy")
    world.save(worker, namespace, chain("new", 4))
    world.tick(100)
    assert sum(len(held.extents) for held in world.held) <= 4
    while world.held:
        world.finish()
    assert world.outcomes(worker, namespace, chain("new", 4)) == ["HIT"] * 4


def test_who_reports_is_named_with_the_checksum() -> None:
    """The copier bounds what each worker has under way."""
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    world.hold = {ev.Checksum}
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 1))
    assert [held.worker for held in world.held] == [worker]


def test_a_chunk_is_checked_once_however_often_it_is_reported() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    world.hold = {ev.Checksum}
    for _ in range(50):
        world.ask(ev.ReportLoad, worker, namespace, chain("k", 2) * 2)
    assert len(world.held) == 1
    world.finish()
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 2))
    assert len(world.held) == 1


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", [ev.Match, ev.Acquire, ev.Reserve, ev.ReportLoad])
def test_a_namespace_that_is_not_open_is_refused(kind: type) -> None:
    world = World()
    worker = world.join()
    with pytest.raises(NotFound, match=r"not open.*call Open first") as error:
        world.ask(kind, worker, NamespaceId(1), chain("k", 1))
    assert (error.value.field, error.value.value) == ("namespace_id", "1")


@pytest.mark.parametrize("shards", [(1,), (-1,), (0, 0)])
def test_shards_that_are_not_there_are_refused(shards: tuple[int, ...]) -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    with pytest.raises(BadRequest) as error:
        world.acquire(worker, namespace, chain("k", 1), shards=shards)
    assert error.value.field == "shards"
    assert world.store.state.leases.leases == {}
