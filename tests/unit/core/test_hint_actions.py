"""Hint actions: what they keep, bring and let go, within which bounds, and what is answered; and touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED
from kvstore.core.policies.expected import USES_MASK, USES_SHIFT
from kvstore.core.policies.interface import AWAITED_MS
from kvstore.core.requests.credit import LOOK_MS, MARKED_JOBS, PATIENCE_MIN
from kvstore.core.stats import traffic
from kvstore.errors import BadRequest, NotFound
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ActionKind, ChunkKey, DiskState, HintResult, NamespaceId, Reason, WorkerId

PREFETCH, DEMOTE, PIN, RETAIN, EXPECT = ActionKind
ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult
DRAM = 8
"""Chunks that it holds; of hints 4 may be pinned."""


def start(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    world = DiskWorld(
        **{
            "segments": 1,
            "segment_bytes": DRAM * PAGE,
            "slabs": 4,
            "slab_slots": 16,
            "prefetch_share_max": 1.0,
            "reserve_share_max": 1.0,
            "pin_share_max": 1.0,
            "hint_pin_share_max": 0.5,
            **limits,
        }
    )
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def save(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, name: str, count: int = 1) -> None:
    world.tick(1)
    world.save(worker, namespace, chain(name, count))
    world.tick(1)


def order(
    world: World,
    worker: WorkerId,
    namespace: NamespaceId,
    kind: ActionKind,
    keys: Sequence[ChunkKey] = (),
    *,
    name: str = "order",
    cancelled: Sequence[bytes] = (),
    **named: Any,
) -> tuple[HintResult, int]:
    action = ev.HintAction(name.encode(), kind, keys=tuple(keys), **named)
    answer: ev.ActionsApplied = world.ask(ev.ApplyActions, worker, namespace, (action,), tuple(cancelled))
    return answer.results[0], answer.chunks[0]


def in_dram(world: World, worker: WorkerId, namespace: NamespaceId, *keys: ChunkKey) -> list[bool]:
    return [outcome == "HIT" for outcome in world.outcomes(worker, namespace, keys)]


# ------------------------------------------------------------------------------------------------------------- pinning


def test_what_is_pinned_leaves_dram_last_until_its_time_is_over() -> None:
    world, worker, namespace = start()
    pinned = chain("system", 2)
    save(world, worker, namespace, "system", 2)
    assert order(world, worker, namespace, PIN, pinned, ttl_ms=5_000) == (ACCEPTED, 2)
    world.tick(30)
    for number in range(5):
        save(world, worker, namespace, f"others {number}", 3)  # more in all than there is room for
    assert all(in_dram(world, worker, namespace, *pinned))
    world.tick(5_000)
    save(world, worker, namespace, "more", DRAM)
    assert not any(in_dram(world, worker, namespace, *pinned))


def test_a_pin_never_stands_in_the_way_of_a_save() -> None:
    world, worker, namespace = start(hint_pin_share_max=1.0)
    save(world, worker, namespace, "system", DRAM)
    assert order(world, worker, namespace, PIN, chain("system", DRAM))[0] is ACCEPTED
    world.tick(30)
    save(world, worker, namespace, "new", DRAM)
    assert all(in_dram(world, worker, namespace, *chain("new", DRAM)))


def test_pins_are_clipped_to_their_share_and_then_refused() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 6)
    assert order(world, worker, namespace, PIN, chain("a", 6), name="one") == (CLIPPED, 4)
    assert order(world, worker, namespace, PIN, chain("a", 1), name="two") == (REJECTED, 0)
    assert order(world, worker, namespace, PIN, chain("a", 2), name="one") == (
        ACCEPTED,
        2,
    )  # instead of the first
    assert order(world, worker, namespace, PIN, chain("a", 2), name="two") == (ACCEPTED, 2)


def test_a_second_tenant_gets_its_part_of_the_pins_at_once() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 4)
    for number in range(4):
        keys = chain("a", 4)[number : number + 1]
        assert order(world, worker, namespace, PIN, keys, name=f"{number}")[0] is ACCEPTED
    other = world.join("bob")
    theirs = world.open(spec(), other)
    result, _ = order(world, other, theirs, PIN, chain("b", 2))
    assert result is DEFERRED  # nothing of it is there yet; it counts from when it is saved
    kept = world.store.actions.kept_bytes[PIN]
    assert kept == {"alice": 2 * PAGE, "bob": 2 * PAGE}
    names = [place.name for place in world.store.actions.kept if place.worker == worker]
    assert names == [b"0", b"1"]  # the newest went


def test_a_pin_brings_to_dram_what_is_on_ssd() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "system", 2)
    save(world, worker, namespace, "others", DRAM)
    assert not any(in_dram(world, worker, namespace, *chain("system", 2)))
    assert order(world, worker, namespace, PIN, chain("system", 2)) == (DEFERRED, 2)
    world.tick(30)
    assert all(in_dram(world, worker, namespace, *chain("system", 2)))


def test_chunks_that_come_later_are_pinned_from_then_on() -> None:
    """An engine orders at a request's end, and the save of its last chunks may still be on its way."""
    world, worker, namespace = start()
    assert order(world, worker, namespace, PIN, chain("late", 2)) == (DEFERRED, 0)
    save(world, worker, namespace, "late", 2)
    world.tick(30)
    for number in range(5):
        save(world, worker, namespace, f"others {number}", 3)
    assert all(in_dram(world, worker, namespace, *chain("late", 2)))


# ------------------------------------------------------------------------------------------------------------ retaining


def test_what_is_retained_leaves_the_ssd_last_and_is_not_promoted() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=10)
    save(world, worker, namespace, "kept", 2)
    assert order(world, worker, namespace, RETAIN, chain("kept", 2), ttl_ms=60_000) == (ACCEPTED, 2)
    for number in range(6):
        save(world, worker, namespace, f"others {number}", 4)
    found = world.outcomes(worker, namespace, chain("kept", 2))
    assert set(found) <= {"HIT", "ON_SSD"}
    gone = world.outcomes(worker, namespace, chain("others 0", 4))
    assert set(gone) == {"EVICTED"}


def test_a_retained_chunk_on_ssd_stays_there() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "kept", 2)
    save(world, worker, namespace, "others", DRAM)
    before = world.store.state.counters["chunks_promoted_ahead"]
    assert order(world, worker, namespace, RETAIN, chain("kept", 2)) == (ACCEPTED, 2)
    world.tick(100)
    assert world.store.state.counters["chunks_promoted_ahead"] == before


# ------------------------------------------------------------------------------------------------------------ expecting


def test_what_is_expected_comes_back_in_time_and_not_before() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "agent", 2)
    save(world, worker, namespace, "others", DRAM)
    agent = chain("agent", 2)
    assert order(world, worker, namespace, EXPECT, agent, eta_ms=40_000, ttl_ms=10_000) == (DEFERRED, 2)
    world.tick(30_000)
    assert not any(in_dram(world, worker, namespace, *agent))
    world.tick(9_600)  # half a second and the time that their bytes take before they are due
    world.tick(30)
    assert all(in_dram(world, worker, namespace, *agent))
    world.tick(10_400)
    assert not world.store.actions.kept  # nobody came


def test_a_session_is_expected_as_it_will_be_then() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "s", 3)
    info = world.append(worker, namespace, b"chat", chain("s", 1))
    assert order(world, worker, namespace, EXPECT, session=b"chat", eta_ms=2_000)[0] is ACCEPTED
    world.append(worker, namespace, b"chat", chain("s", 3)[1:], version=info.version, keep=1)
    world.tick(2_000)
    index = world.store.state.namespaces[namespace].index
    assert {index[key] for key in chain("s", 3)} <= world.store.state.policy.rank.keys()
    told = world.ask(ev.Explain, worker, namespace, b"chat").chunks
    assert [[state.kind for state in chunk.hints] for chunk in told] == [[EXPECT]] * 3
    (row,) = world.ask(ev.ListSessions, worker).rows
    assert [(state.kind, state.due_in_ms) for state in row.hints] == [(EXPECT, 0)]


def test_queued_jobs_come_before_what_is_only_expected() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "typing", 1)
    save(world, worker, namespace, "queued", 1)
    order(world, worker, namespace, EXPECT, chain("typing", 1))
    order(world, worker, namespace, PIN, chain("system", 1), name="pin")
    save(world, worker, namespace, "system", 1)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 1 << 31, keys=chain("queued", 1)),))
    world.tick(30)
    state = world.store.state
    index = state.namespaces[namespace].index
    rows = [index[chain(name, 1)[0]] for name in ("system", "queued", "typing")]
    assert sorted(rows, key=state.policy.rank.__getitem__) == rows


# ------------------------------------------------------------------------------------------------------------- demoting


def test_what_is_demoted_leaves_dram_for_the_ssd() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "done", 3)
    assert order(world, worker, namespace, DEMOTE, chain("done", 3)) == (ACCEPTED, 3)
    assert world.outcomes(worker, namespace, chain("done", 3)) == ["ON_SSD"] * 3


def test_what_is_not_on_ssd_yet_leaves_once_it_is() -> None:
    world, worker, namespace = start()
    world.hold = {ev.WriteRecords}
    save(world, worker, namespace, "done", 2)
    assert order(world, worker, namespace, DEMOTE, chain("done", 2)) == (DEFERRED, 2)
    assert all(in_dram(world, worker, namespace, *chain("done", 2)))
    world.hold = set()
    while world.held:
        world.finish()
    world.tick(10)
    assert world.outcomes(worker, namespace, chain("done", 2)) == ["ON_SSD"] * 2
    assert not world.store.actions.demotions


def test_what_somebody_reads_leaves_after_its_lease() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "read", 2)
    acquired = world.acquire(worker, namespace, chain("read", 2))
    assert order(world, worker, namespace, DEMOTE, chain("read", 2)) == (DEFERRED, 2)
    world.release(worker, acquired.lease)
    world.tick(10)
    assert world.outcomes(worker, namespace, chain("read", 2)) == ["ON_SSD"] * 2


@pytest.mark.parametrize("taken", [True, False])
def test_what_somebody_waited_for_leaves_once_it_was_taken_or_after_a_while(taken: bool) -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "awaited", 2)
    order(world, worker, namespace, DEMOTE, chain("awaited", 2))
    world.acquire(worker, namespace, chain("awaited", 2))  # finds them on SSD, and asks for them
    world.tick(1)
    assert order(world, worker, namespace, DEMOTE, chain("awaited", 2)) == (DEFERRED, 2)
    world.tick(1000)
    assert all(in_dram(world, worker, namespace, *chain("awaited", 2))), "who asked is about to take them"
    if taken:
        world.release(worker, world.acquire(worker, namespace, chain("awaited", 2)).lease)
        world.tick(10)
    else:
        world.tick(AWAITED_MS)
        assert order(world, worker, namespace, DEMOTE, chain("awaited", 2)) == (ACCEPTED, 2)
    assert world.outcomes(worker, namespace, chain("awaited", 2)) == ["ON_SSD"] * 2


def test_of_a_session_stays_what_another_has_too_and_of_a_chain_what_another_continues() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "both", 2)
    world.tick(1)
    world.save(worker, namespace, chain("mine", 2), parent=chain("both", 2)[1])
    world.tick(1)
    world.append(worker, namespace, b"mine", (*chain("both", 2), *chain("mine", 2)))
    world.append(worker, namespace, b"other", chain("both", 2))
    assert order(world, worker, namespace, DEMOTE, session=b"mine") == (ACCEPTED, 2)
    assert in_dram(world, worker, namespace, *chain("both", 2)) == [True, True]
    assert not any(in_dram(world, worker, namespace, *chain("mine", 2)))
    assert order(world, worker, namespace, PREFETCH, chain("mine", 2), name="back")[0] is DEFERRED
    world.tick(30)
    assert order(world, worker, namespace, DEMOTE, chain("both", 2)) == (REJECTED, 0)  # `mine` continues it


def test_nothing_is_demoted_where_nothing_is_below_or_a_job_needs_it() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 1)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=chain("a", 1)),))
    assert order(world, worker, namespace, DEMOTE, chain("a", 1)) == (REJECTED, 0)
    world.ask(ev.PublishQueue, worker, namespace, ())
    world.store.cold_tier.degrade(DiskState.OFF, "broken")
    assert order(world, worker, namespace, DEMOTE, chain("a", 1)) == (REJECTED, 0)


# ----------------------------------------------------------------------------------------------------- ends and bounds


def test_orders_end_with_their_worker_and_when_they_are_cancelled() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 2)
    other = world.join()
    world.open(spec(), other)
    order(world, other, namespace, PIN, chain("a", 1))
    order(world, worker, namespace, PIN, chain("a", 2), name="mine")
    world.kill(other)
    assert [place.name for place in world.store.actions.kept] == [b"mine"]
    order(world, worker, namespace, RETAIN, chain("a", 1), name="third", cancelled=(b"mine", b"unknown"))
    assert [place.name for place in world.store.actions.kept] == [b"third"]


def test_a_snapshot_of_the_queue_leaves_orders_alone() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 1)
    order(world, worker, namespace, PIN, chain("a", 1))
    world.ask(ev.PublishQueue, worker, namespace, ())
    assert len(world.store.actions.kept) == 1


def test_a_worker_has_so_many_jobs_and_orders_and_no_more() -> None:
    world, worker, namespace = start(hints_per_worker_max=2)
    save(world, worker, namespace, "a", 1)
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=chain("a", 1)),))
    assert order(world, worker, namespace, EXPECT, chain("a", 1), name="1")[0] is ACCEPTED
    assert order(world, worker, namespace, EXPECT, chain("a", 1), name="2") == (REJECTED, 0)
    assert (
        order(world, worker, namespace, EXPECT, chain("a", 1), name="1")[0] is ACCEPTED
    )  # instead of itself


def test_of_the_windows_schedulers_are_told_their_own_jobs_alone() -> None:
    world, worker, namespace = start()
    for name in ("system", "agent", "a", "b"):
        save(world, worker, namespace, name)
    order(world, worker, namespace, PIN, chain("system", 1), name="pin")
    order(world, worker, namespace, EXPECT, chain("agent", 1))
    jobs = tuple(ev.Hint(name.encode(), place, keys=chain(name, 1)) for place, name in enumerate("ab"))
    told = world.ask(ev.PublishQueue, worker, namespace, jobs)
    assert (told.results, told.prefetch_window, told.eviction_window) == ((ACCEPTED, ACCEPTED), 2, 2)
    shown = traffic(world.store.queue, world.store.transfers)
    assert [shown[f"{name}_jobs"] for name in ("queued", "prefetch_window", "eviction_window")] == [2] * 3
    world.ask(ev.PublishQueue, worker, namespace, ())
    assert world.store.queue.reach("alice") == (0, 0)


def test_a_queue_that_moves_up_stays_behind_the_pins_and_where_it_was() -> None:
    """A snapshot that finds the known jobs in their order leaves them where they stand, hint actions or not."""
    world, worker, namespace = start()
    for name in ("system", "a", "b"):
        save(world, worker, namespace, name)

    def publish(*names: str) -> None:
        hints = (ev.Hint(name.encode(), place, keys=chain(name, 1)) for place, name in enumerate(names))
        world.ask(ev.PublishQueue, worker, namespace, tuple(hints))

    publish("a")
    known = dict(world.store.queue.feeds[worker][namespace].jobs)
    order(world, worker, namespace, PIN, chain("system", 1))
    order(world, worker, namespace, RETAIN, chain("system", 1), name="last")
    publish("b", "a")
    jobs = world.store.queue.feeds[worker][namespace].jobs
    assert jobs[b"a"] is known[b"a"]
    window = world.store.state.jobs.windows["alice"]
    places = [window.of[label] for label in window.labels]
    assert [job.action.kind if job.action else job.name for job in places] == [PIN, b"b", b"a", RETAIN]


def test_credit_judges_queued_jobs_however_many_pins_stand_before_them() -> None:
    world, worker, namespace = start(hint_pin_share_max=1.0)
    for name in ("system", "waits", "asked"):
        save(world, worker, namespace, name)
    for number in range(
        MARKED_JOBS + 1
    ):  # what is saved later has no bytes yet that a share could be full of
        order(world, worker, namespace, PREFETCH, chain("system", 1), name=f"prefetch {number}")
    order(world, worker, namespace, PIN, chain("system", 1), name="pin")

    def ask_for_others() -> None:
        for _ in range(8):
            for _ in range(PATIENCE_MIN // 4):
                world.release(worker, world.acquire(worker, namespace, chain("asked", 1)).lease)
            world.tick(LOOK_MS)

    ask_for_others()
    assert "alice" not in world.store.queue.credit.records, "a hint action promises nothing"
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=chain("waits", 1)),))
    world.tick(30)
    ask_for_others()
    assert world.store.queue.credit.records["alice"].false > 0


def test_a_worker_has_so_many_orders_however_many_jobs_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.requests.hint_actions.ACTIONS_PER_WORKER_MAX", 2)
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 1)
    results = [order(world, worker, namespace, EXPECT, chain("a", 1), name=name)[0] for name in "123"]
    assert results == [ACCEPTED, ACCEPTED, REJECTED]


def test_what_names_nothing_known_or_another_tenants_namespace_is_refused() -> None:
    world, worker, namespace = start()
    assert order(world, worker, namespace, PIN, session=b"nobody") == (REJECTED, 0)
    with pytest.raises(BadRequest, match="time to come"):
        order(world, worker, namespace, EXPECT, chain("a", 1), eta_ms=-1)
    stranger = world.join("bob")
    with pytest.raises(NotFound):
        order(world, stranger, namespace, PIN, chain("a", 1))


def test_times_are_clipped() -> None:
    world, worker, namespace = start(hint_ttl_max_ms=1_000)
    save(world, worker, namespace, "a", 1)
    order(world, worker, namespace, PIN, chain("a", 1), ttl_ms=1 << 40)
    order(world, worker, namespace, EXPECT, chain("a", 1), name="b", eta_ms=1 << 40, ttl_ms=1 << 40)
    world.tick(1_000)
    assert [place.name for place in world.store.actions.kept] == [b"b"]
    world.tick(1_000)
    assert not world.store.actions.kept


def test_an_operator_sees_what_is_in_force() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 2)
    order(world, worker, namespace, PIN, chain("a", 2), ttl_ms=4_000)
    world.tick(1_000)
    first, second = world.ask(
        ev.Explain, worker, namespace, keys=(chain("a", 1)[0], ChunkKey(b"unknown"))
    ).chunks
    assert [(state.kind, state.ends_in_ms) for state in first.hints] == [(PIN, 3_000)]
    assert first.needed and not second.hints
    admin = world.join("operator", admin=True)
    gauges = world.ask(ev.GetStats, admin).values["gauges"]
    assert (gauges["hint_pins"], gauges["hint_pinned_bytes"], gauges["queued_jobs"]) == (1, 2 * PAGE, 0)


# ------------------------------------------------------------------------------------------------------------- touches


@pytest.mark.parametrize("batch_min", [2, 24])
def test_what_was_touched_goes_after_what_was_not(batch_min: int) -> None:
    world, worker, namespace = start(batch_min=batch_min, evict_min=batch_min)
    save(world, worker, namespace, "prefix", 4)
    save(world, worker, namespace, "once", 4)
    world.tick(100)
    assert world.ask(ev.Touch, worker, namespace, (*chain("prefix", 4), ChunkKey(b"unknown"))).count == 4
    save(world, worker, namespace, "new", 4)
    assert all(in_dram(world, worker, namespace, *chain("prefix", 4)))
    assert not any(in_dram(world, worker, namespace, *chain("once", 4)))
    told = world.ask(ev.Explain, worker, namespace, keys=chain("prefix", 1)).chunks[0]
    assert told.hits == 1 and told.idle_ms < 100


def test_of_what_was_touched_together_the_end_of_the_chain_goes_first() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", DRAM)
    world.ask(ev.Touch, worker, namespace, chain("a", DRAM))
    save(world, worker, namespace, "b", 3)
    assert in_dram(world, worker, namespace, *chain("a", DRAM)) == [True] * 5 + [False] * 3


def test_a_touch_moves_nothing_and_a_pin_of_a_lease_stays() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "cold", 2)
    save(world, worker, namespace, "others", DRAM)
    acquired = world.acquire(worker, namespace, chain("others", 2))
    before = dict(world.store.state.counters)
    world.ask(ev.Touch, worker, namespace, (*chain("cold", 2), *chain("others", 2)))
    world.tick(30)
    assert world.outcomes(worker, namespace, chain("cold", 2)) == ["ON_SSD"] * 2
    assert world.store.state.counters["chunks_promoted_ahead"] == before.get("chunks_promoted_ahead", 0)
    world.release(worker, acquired.lease)


def test_on_ssd_what_was_touched_goes_after_what_was_not() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=12)
    save(world, worker, namespace, "a", 2)
    save(world, worker, namespace, "b", 2)
    save(world, worker, namespace, "others", DRAM)  # both are on SSD alone, and it is full
    world.ask(ev.Touch, worker, namespace, chain("a", 2))
    save(world, worker, namespace, "new", 2)
    assert world.outcomes(worker, namespace, chain("a", 2)) == ["ON_SSD"] * 2
    assert world.outcomes(worker, namespace, chain("b", 2)) == ["EVICTED"] * 2


def test_a_ghost_that_is_touched_is_remembered_for_longer() -> None:
    world, worker, namespace = start(slabs=0, ghosts_max=4)
    save(world, worker, namespace, "a", 2)
    save(world, worker, namespace, "b", 2)
    save(world, worker, namespace, "c", DRAM)
    assert world.outcomes(worker, namespace, chain("a", 2)) == ["EVICTED"] * 2
    world.ask(ev.Touch, worker, namespace, chain("a", 2))
    save(world, worker, namespace, "d", 2)  # two ghosts more, and two must be forgotten
    assert world.outcomes(worker, namespace, chain("a", 2)) == ["EVICTED"] * 2
    assert world.outcomes(worker, namespace, chain("b", 2)) == ["NEVER_SEEN"] * 2


@pytest.mark.parametrize("batch_min", [2, 24])
@pytest.mark.parametrize("where", ["dram", "ssd", "gone"])
def test_the_policy_learns_from_touches_as_from_other_uses(where: str, batch_min: int) -> None:
    world, worker, namespace = start(eviction="expected", batch_min=batch_min, slabs=where == "ssd")
    save(world, worker, namespace, "a", 2)
    if where != "dram":
        save(world, worker, namespace, "others", DRAM)
    assert world.where(namespace, chain("a", 2))[0].startswith(where) or where == "gone"
    state = world.store.state
    rows = [state.namespaces[namespace].index[key] for key in chain("a", 2)]

    def uses() -> list[int]:
        return [state.chunks.history[row] >> USES_SHIFT & USES_MASK for row in rows]

    assert uses() == [1, 1]
    world.tick(100)
    assert world.ask(ev.Touch, worker, namespace, chain("a", 2)).count == 2
    assert uses() == [2, 2]


def test_what_is_forgotten_or_of_an_old_epoch_is_not_touched() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", 2)
    acquired = world.acquire(worker, namespace, chain("a", 1))
    world.ask(ev.Forget, worker, namespace, keys=chain("a", 1))
    assert world.ask(ev.Touch, worker, namespace, chain("a", 1)).count == 0
    state = world.store.state
    row = state.namespaces[namespace].index[chain("a", 1)[0]]
    assert state.chunks.flags[row] & DOOMED and state.chunks.reason[row] == Reason.FORGOTTEN
    world.release(worker, acquired.lease)
    world.open(spec(epoch=1), worker)
    assert world.ask(ev.Touch, worker, namespace, chain("a", 2)).count == 0
