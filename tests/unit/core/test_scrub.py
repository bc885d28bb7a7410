"""The scrubber, and what becomes of slots whose bytes went bad."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.ssd.quarantine import RETURNS_MAX
from kvstore.errors import Denied, NotFound
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    DiskState,
    NamespaceId,
    Protection,
    Tier,
    Wait,
    WorkerId,
)

from .test_disk import cold, small, start

SECOND = 1_000


def scrubbed(world: World, admin: WorkerId, **asked: Any) -> ev.Scrubbed:
    answer: ev.Scrubbed = world.ask(ev.Scrub, admin, **asked)
    return answer


def round_of(world: DiskWorld, admin: WorkerId) -> ev.Scrubbed:
    """A round that was asked for, to its end."""
    asked = scrubbed(world, admin, start=True)
    for _ in range(200):
        state = scrubbed(world, admin)
        if state.finished >= asked.round:
            return state
        world.tick(100)
    raise AssertionError(f"it never ends: {state}")


def place(world: DiskWorld, namespace: NamespaceId, key: ChunkKey, shard: int = 0) -> DiskPlace:
    state = world.store.state
    return world.store.cold_tier.slabs.place_of(state.namespaces[namespace].index[key], shard)


def rot(world: DiskWorld, namespace: NamespaceId, key: ChunkKey) -> DiskPlace:
    where = place(world, namespace, key)
    world.rot(where)
    return where


def listed(world: World, admin: WorkerId, **asked: Any) -> ev.QuarantineList:
    answer: ev.QuarantineList = world.ask(ev.ListQuarantine, admin, **asked)
    return answer


# -------------------------------------------------------------------------------------------------------------- rounds


def test_a_round_looks_at_every_record_and_promotes_nothing() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    before = world.where(namespace, chain("k", 4))
    done = round_of(world, admin)
    assert (done.chunks, done.bytes, done.corrupt) == (12, 12 * PAGE, 0)
    assert done.finished == done.round == 1 and not done.running
    assert world.where(namespace, chain("k", 4)) == before == ["ssd"] * 4
    assert world.counters["scrub_records"] == 12


def test_a_record_that_rotted_is_a_miss_before_anybody_asked_for_it() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    where = rot(world, namespace, chain("k", 4)[1])
    assert round_of(world, admin).corrupt == 1
    assert world.where(namespace, chain("k", 4)) == ["ssd", "CORRUPT", "ssd", "ssd"]
    assert world.counters["chunks_corrupt"] == 1
    (slot,) = listed(world, admin).rows
    assert (slot.tier, slot.place, slot.slot, slot.key) == (
        Tier.SSD,
        where.slab,
        where.slot,
        chain("k", 4)[1],
    )
    assert (slot.reason, slot.namespace) == ("corrupt", namespace)
    assert round_of(world, admin).corrupt == 0, "once"


def test_it_is_logged_once_with_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    where = rot(world, namespace, chain("k", 1)[0])
    seen: list[ev.Quarantined] = []
    perform = world._perform_all
    monkeypatch.setattr(
        world,
        "_perform_all",
        lambda effects: (seen.extend(e for e in effects if isinstance(e, ev.Quarantined)), perform(effects)),
    )
    round_of(world, admin)
    round_of(world, admin)
    world.fetch(worker, namespace, chain("k", 1))
    (line,) = seen
    assert (line.tier, line.places, line.key, line.miss) == (
        Tier.SSD,
        ((where.slab, where.slot),),
        chain("k", 1)[0],
        True,
    )


def test_a_chunk_that_dram_still_has_is_written_anew_elsewhere() -> None:
    world, worker, namespace = start()
    admin = world.join(admin=True)
    world.save(worker, namespace, chain("k", 2))
    where = rot(world, namespace, chain("k", 2)[0])
    assert round_of(world, admin).corrupt == 1
    assert world.where(namespace, chain("k", 2)) == ["dram+ssd"] * 2
    again = place(world, namespace, chain("k", 2)[0])
    assert (again.slab, again.slot) != (where.slab, where.slot)
    world.tick(60 * SECOND)
    assert round_of(world, admin).corrupt == 0


def test_a_slot_that_was_freed_and_filled_meanwhile_is_no_corruption() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.hold = {ev.ScrubRecords}
    scrubbed(world, admin, start=True)
    (scrub,) = world.of(ev.ScrubRecords)
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 4))
    for number in range(3):  # into the slots that were given up
        world.save(worker, namespace, chain(f"new {number}", 4))
    world.hold = set()
    found = [(world.platter.read(source), source) for source in scrub.sources]
    assert any(other is not None and other.generation > source.generation for other, source in found)
    world.finish(scrub)
    assert world.counters["chunks_corrupt"] == 0 and listed(world, admin).ssd == 0


def test_records_that_cannot_be_read_are_counted_and_stay() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.faults = {ev.ScrubRecords: DiskResult.IO_ERROR}
    done = round_of(world, admin)
    assert (done.failed, done.corrupt) == (12, 0)
    assert world.where(namespace, chain("k", 4)) == ["ssd"] * 4


def test_the_background_goes_round_at_its_rate_and_rests() -> None:
    world, worker, namespace = small(scrub_bytes_per_s=8 * PAGE, scrub_pause_ms=10 * SECOND)
    world.hold = {ev.ScrubRecords}
    cold(world, worker, namespace)
    read = []
    for _ in range(200):  # 20 s
        world.tick(100)
        for scrub in world.of(ev.ScrubRecords):
            read.append((world.now, len(scrub.records)))
            world.finish(scrub)
    assert sum(count for _, count in read) == 24, "12 records, twice in 20 s: at 0 and at 10"
    assert world.counters["scrub_rounds"] in (2, 3)
    for now, _ in read:
        in_a_second = sum(count for at, count in read if now <= at < now + SECOND)
        assert in_a_second <= 8 + 3, read


def test_nothing_is_looked_at_while_the_disk_has_other_reads() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.hold = {ev.ReadRecords, ev.ScrubRecords}
    world.acquire(worker, namespace, chain("k", 2), wait_ms=5_000)
    asked = scrubbed(world, admin, start=True)
    assert asked.running and asked.waits_for == "other reads and writes of the disk"
    world.tick(100)
    assert not world.of(ev.ScrubRecords)
    world.finish(world.of(ev.ReadRecords)[0])
    assert world.of(ev.ScrubRecords), "at once, when the disk has nothing else to do"
    # And a read that is asked for now waits for nothing.
    world.acquire(worker, namespace, chain("k", 4)[2:], wait_ms=5_000)
    assert world.of(ev.ReadRecords)


def test_a_scrub_that_hangs_holds_up_nobody_and_tells_that_the_disk_hangs() -> None:
    """It has the time that its rate allows, and more, because it is in no hurry."""
    world, worker, namespace = small(disk_deadline_ms=400, probe_interval_ms=100)
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.hold = {ev.ScrubRecords}
    scrubbed(world, admin, start=True, bytes_per_s=PAGE)
    world.tick(10 * SECOND + 500)
    assert len(world.of(ev.ScrubRecords)) == 1 and world.health() is DiskState.OK
    assert world.fetch(worker, namespace, chain("k", 4)) == ["HIT"] * 4
    assert scrubbed(world, admin).waits_for == "what is being read"
    world.tick(SECOND)
    assert world.health() is DiskState.OFF
    assert world.store.state.disk_why == "a read of the scrubber missed its deadline"
    world.tick(60 * SECOND)
    assert not world.of(ev.ProbeDisk) and world.health() is DiskState.OFF, (
        "nothing is probed before it has returned"
    )
    (hung,) = world.of(ev.ScrubRecords)
    world.finish(hung)
    world.tick(SECOND)
    assert world.health() is DiskState.OK
    assert world.counters["ssd_degraded_off"] == 1


def test_a_round_that_was_asked_for_is_joined_and_takes_over_from_the_background() -> None:
    world, worker, namespace = small(scrub_bytes_per_s=1)
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.tick(100)
    assert not scrubbed(world, admin).asked_for
    world.hold = {ev.ScrubRecords}
    asked = scrubbed(world, admin, start=True, bytes_per_s=1 << 20)
    again = scrubbed(world, admin, start=True, bytes_per_s=7)
    assert asked.asked_for and (again.round, again.bytes_per_s) == (asked.round, 1 << 20)


def test_a_round_that_is_too_slow_is_made_faster() -> None:
    world, worker, namespace = small()
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    slow = scrubbed(world, admin, start=True, bytes_per_s=1)
    world.tick(1_000)
    assert scrubbed(world, admin).running
    assert scrubbed(world, admin, start=True, bytes_per_s=1 << 30).round == slow.round
    world.tick(1_000)
    assert scrubbed(world, admin).finished == slow.round


def test_what_a_round_found_is_told_when_the_next_has_begun() -> None:
    """Whoever waits for it looks now and then, and after a long round the background begins at once."""
    world, worker, namespace = small(scrub_bytes_per_s=8 * PAGE, scrub_pause_ms=100)
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    rot(world, namespace, chain("k", 1)[0])
    asked = scrubbed(world, admin, start=True, bytes_per_s=8 * PAGE)
    for _ in range(100):
        world.tick(100)
    newest, mine = scrubbed(world, admin), scrubbed(world, admin, round=asked.round)
    assert newest.round > asked.round and newest.corrupt == 0
    assert (mine.round, mine.running, mine.asked_for, mine.corrupt) == (asked.round, False, True, 1)
    with pytest.raises(NotFound, match="since the daemon was started"):
        scrubbed(world, admin, round=newest.round + 1)


def test_rounds_that_ended_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.ssd.scrub.ENDED_MAX", 3)
    world, *_ = small()
    admin = world.join(admin=True)
    rounds = [round_of(world, admin).round for _ in range(5)]
    assert [scrubbed(world, admin, round=number).round for number in rounds[2:]] == rounds[2:]
    with pytest.raises(NotFound):
        scrubbed(world, admin, round=rounds[1])


def test_only_admins_ask() -> None:
    world, worker, _ = small()
    for kind, named in ((ev.Scrub, {}), (ev.ListQuarantine, {}), (ev.Recall, {"maker": b"m" * 16})):
        with pytest.raises(Denied):
            world.ask(kind, worker, **named)


def test_under_group_dram_is_looked_at_too() -> None:
    world = World(protection=Protection.GROUP, scrub_bytes_per_s=1 << 20)
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 3))
    world.release(worker, world.acquire(worker, namespace, chain("k", 1)).lease)  # used last
    state = world.store.state
    extent = state.extent(state.namespaces[namespace].index[chain("k", 3)[1]], 0, PAGE)
    page = extent.offset // PAGE
    world.memory[extent.segment][page] ^= 1  # a stray write of some worker
    world.damaged.add((extent.segment, page))
    world.tick(60 * SECOND)
    world.tick(100)
    assert world.outcomes(worker, namespace, chain("k", 3)) == ["HIT", "CORRUPT", "HIT"]
    (slot,) = listed(world, admin).rows
    assert (slot.tier, slot.place, slot.slot) == (Tier.DRAM, extent.segment, extent.cell)
    assert state.counters["chunks_corrupt"] == 1
    # Being looked at is no use: the order in which chunks leave is what it was.
    order = [state.chunks.key[row] for row in state.policy.unneeded(state.namespaces[namespace].dram)]
    assert order == [chain("k", 3)[2], chain("k", 3)[0]]


def test_a_checksum_that_failed_finds_nothing_and_the_next_round_looks_again() -> None:
    world = World(protection=Protection.GROUP)
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 1))
    world.hold = {ev.Checksum}
    asked = world.ask(ev.Scrub, admin, start=True)
    while world.held:
        assert world.held[0].worker is None
        world.finish(fails="4096 of the daemon's own copies are under way already")
    world.tick(1_000)
    found = world.ask(ev.Scrub, admin, round=asked.round)
    assert (found.running, found.corrupt, found.failed) == (False, 0, 2)
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["HIT"]
    world.hold = set()
    asked = world.ask(ev.Scrub, admin, start=True)
    world.tick(1_000)
    found = world.ask(ev.Scrub, admin, round=asked.round)
    assert (found.running, found.corrupt, found.failed) == (False, 0, 0)


def test_a_slot_in_dram_that_was_given_away_meanwhile_is_no_corruption() -> None:
    world = World(
        protection=Protection.GROUP,
        segments=1,
        segment_bytes=2 * PAGE,
        scrub_bytes_per_s=1 << 20,
        reserve_share_max=1.0,
    )
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    world.hold = {ev.Checksum}
    world.tick(60 * SECOND)
    world.tick(100)
    assert world.held, "the scrubber is at it"
    world.hold = set()
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))
    world.save(worker, namespace, chain("other", 2))
    while world.held:
        world.finish()
    assert world.store.state.counters["chunks_corrupt"] == 0
    assert world.outcomes(worker, namespace, chain("other", 2)) == ["HIT"] * 2


# ---------------------------------------------------------------------------------------------------- back to service


def corrupt_on_ssd() -> tuple[DiskWorld, WorkerId, NamespaceId, WorkerId, DiskPlace]:
    world, worker, namespace = small(durable_within_ms=0, quarantine_ms=5 * SECOND)
    admin = world.join(admin=True)
    cold(world, worker, namespace)
    world.settle(100)
    where = rot(world, namespace, chain("k", 4)[0])
    world.hold = {ev.WriteIndex, ev.RewriteRecords, ev.RewriteSlots}
    round_of(world, admin)
    return world, worker, namespace, admin, where


def test_a_slot_on_ssd_returns_once_the_index_forgot_it_and_it_kept_what_was_written() -> None:
    world, _, namespace, admin, where = corrupt_on_ssd()
    key = (namespace, chain("k", 4)[0])
    world.tick(6 * SECOND)
    assert key in world.platter.chunks and not world.of(ev.RewriteRecords), (
        "a power cut could bring the row back"
    )
    world.finish(world.of(ev.WriteIndex)[0])
    assert key not in world.platter.chunks
    world.tick(100)
    (rewrite,) = world.of(ev.RewriteRecords)
    assert [(target.slab, target.slot) for target in rewrite.targets] == [(where.slab, where.slot)]
    world.finish(rewrite)
    assert listed(world, admin) == ev.QuarantineList((), dram=0, ssd=0, returned=1, failed=0)
    world.hold = set()
    world.settle(1_000)


def test_what_failed_its_rewrite_stays_until_somebody_wants_it_tried_again() -> None:
    world, _, _, admin, _ = corrupt_on_ssd()
    world.finish(world.of(ev.WriteIndex)[0])
    world.tick(10 * SECOND)
    world.finish(world.of(ev.RewriteRecords)[0], fails="CORRUPT")
    (row,) = listed(world, admin).rows
    assert row.next.startswith("nothing") and listed(world, admin).failed == 1
    world.tick(600 * SECOND)
    assert not world.of(ev.RewriteRecords)
    listed(world, admin, retry=True)
    world.finish(world.of(ev.RewriteRecords)[0])
    assert listed(world, admin).ssd == 0


def test_what_could_not_be_written_now_is_tried_again_later() -> None:
    world, _, _, admin, _ = corrupt_on_ssd()
    world.finish(world.of(ev.WriteIndex)[0])
    world.tick(10 * SECOND)
    world.finish(world.of(ev.RewriteRecords)[0], fails="IO_ERROR")
    world.tick(4 * SECOND)
    assert not world.of(ev.RewriteRecords) and listed(world, admin).ssd == 1
    world.tick(2 * SECOND)
    world.finish(world.of(ev.RewriteRecords)[0])
    assert listed(world, admin).ssd == 0


@pytest.mark.parametrize("protection", list(Protection))
def test_a_slot_that_goes_bad_again_and_again_is_not_trusted_for_ever(protection: Protection) -> None:
    """Unless a worker may be to blame: then it is enough that it keeps what is written, however often."""
    world, worker, namespace = start(
        segments=2, durable_within_ms=0, quarantine_ms=0, slabs=1, slab_slots=1, protection=protection
    )
    admin = world.join(admin=True)
    for turn in range(RETURNS_MAX + 1):
        key = chain(f"turn {turn}", 1)
        world.save(worker, namespace, key)
        world.settle(100)
        rot(world, namespace, key[0])
        assert round_of(world, admin).corrupt == 1
        world.ask(ev.Forget, worker, namespace, b"", key)
        world.settle(200)
    state = listed(world, admin)
    if protection is Protection.SEALED:
        assert (state.returned, state.ssd, state.rows[0].next[:7]) == (RETURNS_MAX, 1, "nothing")
    else:
        assert (state.returned, state.ssd) == (RETURNS_MAX + 1, 0)


def reported(world: World, worker: WorkerId, namespace: NamespaceId) -> None:
    state = world.store.state
    extent = state.extent(state.namespaces[namespace].index[chain("k", 2)[0]], 0, PAGE)
    world.memory[extent.segment][extent.offset // PAGE] ^= 1
    world.damaged.add((extent.segment, extent.offset // PAGE))
    world.ask(ev.ReportLoad, worker, namespace, chain("k", 2))


def test_a_slot_in_dram_returns_too() -> None:
    world = World(quarantine_ms=SECOND)
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    world.hold = {ev.RewriteSlots}
    reported(world, worker, namespace)
    assert listed(world, admin).dram == 1
    world.tick(SECOND)
    world.finish(spoil=1)
    assert listed(world, admin).failed == 1
    listed(world, admin, retry=True)
    world.finish()
    assert listed(world, admin) == ev.QuarantineList((), dram=0, ssd=0, returned=1, failed=1)


def test_what_somebody_may_still_write_is_listed_but_never_rewritten() -> None:
    world = World(protection=Protection.GROUP, reservation_ttl_ms=100)
    worker, admin = world.join(), world.join(admin=True)
    namespace = world.open(spec(), worker)
    world.reserve(worker, namespace, chain("k", 2))
    world.hold = {ev.RewriteSlots}
    world.tick(120 * SECOND)
    rows = listed(world, admin, retry=True).rows
    assert [row.reason for row in rows] == ["in use"] * 2 and not world.held
    world.kill(worker)
    assert listed(world, admin).dram == 0 and listed(world, admin).rows == ()


def test_a_durable_answer_waits_for_what_is_written_anew() -> None:
    """Good bytes in DRAM, a bad record: the chunk is not durable again before its new record is."""
    world, worker, namespace = start(durable_within_ms=0)
    admin = world.join(admin=True)
    world.save_durably(worker, namespace, chain("k", 1))
    world.settle(100)
    rot(world, namespace, chain("k", 1)[0])
    world.hold = {ev.WriteRecords}
    round_of(world, admin)
    assert world.where(namespace, chain("k", 1)) == ["dram"]
    world.hold = set()
    world.settle(100)
    assert world.where(namespace, chain("k", 1)) == ["dram+ssd"] and Wait.DURABLE
    world.crash(power=True)
    assert world.where(namespace, chain("k", 1)) == ["ssd"]
