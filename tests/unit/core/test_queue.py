"""Hints and the two windows made of them: what is promoted ahead of need, what stays longest, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import plan, queue
from kvstore.core.requests.credit import GRACE_MS
from kvstore.errors import BadRequest, NotFound
from kvstore.sim.disk import DiskWorld
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ActionKind, ChunkKey, HintResult, NamespaceId, Outcome, WorkerId

HIT, PENDING, MISS = Outcome
ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult


def start(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """DRAM for 8 chunks of 4096 bytes, of which the prefetch window may fill 4. On SSD they take 512 bytes each and
    there is room for 32, in 20,480 bytes: C_mem + C_disk is 53,248 bytes, or 13 chunks as they are in DRAM."""
    world = DiskWorld(
        **{
            "segments": 1,
            "segment_bytes": 8 * PAGE,
            "slabs": 1,
            "disk_alignment": 512,
            "disk_slab_bytes": 4096 + 32 * 512,
            "prefetch_share_max": 0.5,
            "reserve_share_max": 1.0,
            "pin_share_max": 1.0,
            **limits,
        }
    )
    worker = world.join()
    return world, worker, world.open(spec(shard_bytes=100), worker)


def save(world: DiskWorld, worker: WorkerId, namespace: NamespaceId, *names: str, count: int = 1) -> None:
    for name in names:
        world.tick(1)
        world.save(worker, namespace, chain(name, count))


def hint(job: str, position: int, keys: Sequence[ChunkKey] = (), session: bytes = b"") -> ev.Hint:
    return ev.Hint(job.encode(), position, session, tuple(keys))


def publish(
    world: World, worker: WorkerId, namespace: NamespaceId, *hints: ev.Hint, **named: Any
) -> ev.QueueAccepted:
    accepted: ev.QueueAccepted = world.ask(ev.PublishQueue, worker, namespace, hints, **named)
    return accepted


def jobs(world: World, worker: WorkerId) -> dict[bytes, int]:
    feeds = world.store.queue.feeds.get(worker, {})
    return {name: job.position for feed in feeds.values() for name, job in feed.jobs.items()}


def places(world: World, rows: Sequence[int]) -> list[int]:
    """Where each stands among all that are needed."""
    rank = world.store.state.policy.rank
    order = sorted(rank.values())
    return [order.index(rank[row]) for row in rows]


# ------------------------------------------------------------------------------------------------------------ windows


def fourteen(world: DiskWorld, worker: WorkerId, namespace: NamespaceId) -> None:
    for name, count in (("a", 3), ("b", 3), ("c", 7), ("d", 1)):
        save(world, worker, namespace, name, count=count)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_windows_by_hand(backwards: bool) -> None:
    """job     chunks    so far
    a       3         3       <= 4: in the prefetch window
    b       3         6       <= 13: in the eviction window
    c       7        13       <= 13
    d       1        14       clipped, and with it whatever is behind it, however small
    """
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    hints = [
        hint("job a", 0, chain("a", 3)),
        hint("job b", 1, chain("b", 3)),
        hint("job c", 2, chain("c", 7)),
        hint("job d", 3, chain("d", 1)),
        hint("job e", 4, chain("a", 2)),
    ]
    results = [ACCEPTED, DEFERRED, DEFERRED, CLIPPED, CLIPPED]
    if backwards:  # it is the position that orders jobs
        hints, results = hints[::-1], results[::-1]
    accepted = publish(world, worker, namespace, *hints)
    assert list(accepted.results) == results
    assert (accepted.prefetch_window, accepted.eviction_window) == (1, 3)


def test_a_chunk_that_two_jobs_need_counts_once_and_for_the_nearer_one() -> None:
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    accepted = publish(
        world,
        worker,
        namespace,
        hint("far", 7, [*chain("a", 3), *chain("d", 1), *chain("a", 1)]),
        hint("near", 2, chain("a", 3)),
        hint("behind", 8, chain("b", 1)),
    )
    assert accepted.results == (ACCEPTED, ACCEPTED, DEFERRED)  # 3 and 1 more, then a fifth
    index = world.store.state.namespaces[namespace].index
    policy = world.store.state.policy
    rows = [index[key] for key in (*chain("a", 3), *chain("d", 1), *chain("b", 1))]
    assert places(world, rows) == [0, 1, 2, 3, 4]
    ends = [policy.job_end(row) for row in rows]
    assert ends[0] == ends[1] == ends[2] < policy.rank[rows[3]] <= ends[3] < policy.rank[rows[4]] <= ends[4]


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("batch_min", [2, 1_000])
def test_a_hole_ends_a_chain_and_hides_no_module(approximate: bool, lost: int, batch_min: int) -> None:
    """A prompt of Prompt Cache needs each of its modules, whatever became of those before it."""
    world, worker, namespace = start(batch_min=batch_min)
    keys = chain("a", 3)
    save(world, worker, namespace, "a", count=3)
    world.append(worker, namespace, b"s", keys, approximate=approximate)
    world.ask(ev.Forget, worker, namespace, b"", (keys[lost],))
    assert publish(world, worker, namespace, hint("j", 0, session=b"s")).results == (ACCEPTED,)
    index = world.store.state.namespaces[namespace].index
    rank = world.store.state.policy.rank
    needed = [key in index and index[key] in rank for key in keys]
    assert needed == [number != lost if approximate else number < lost for number in range(3)]


def test_a_chunk_that_a_job_names_twice_counts_once() -> None:
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    assert publish(world, worker, namespace, hint("j", 0, chain("a", 3) * 2)).results == (ACCEPTED,)


def test_what_comes_and_goes_is_planned_without_another_hint() -> None:
    world, worker, namespace = start(hint_ttl_ms=10_000)
    save(world, worker, namespace, "a")
    info = world.append(worker, namespace, b"s", chain("a", 1))
    publish(world, worker, namespace, hint("j", 0, session=b"s"), hint("k", 1, chain("c", 2)))
    save(world, worker, namespace, "b")
    world.append(worker, namespace, b"s", chain("b", 1), version=info.version, keep=1)
    world.tick(20)
    assert len(world.store.state.policy.rank) == 2
    save(world, worker, namespace, "c", count=2)
    world.tick(20)
    assert len(world.store.state.policy.rank) == 4
    world.ask(ev.Forget, worker, namespace, b"", chain("c", 1))
    world.tick(20)
    assert len(world.store.state.policy.rank) == 2


def test_a_queue_that_nothing_happens_to_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, worker, namespace = start(hint_ttl_ms=10_000)
    save(world, worker, namespace, "a", "b")
    publish(world, worker, namespace, hint("j", 0, chain("a", 1)), hint("k", 1, chain("?", 1)))
    monkeypatch.setattr(world.store.queue, "plan", lambda: pytest.fail("nothing changed"))
    save(world, worker, namespace, "c")
    for _ in range(10):
        world.tick(20)


def test_hints_that_come_fast_are_planned_together_and_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.requests.queue.PUBLISH_ROWS_PER_MS", 1 / 128)  # 128 ms per chunk
    world, worker, namespace = start(hint_ttl_ms=10_000)
    other = world.join(group="other")
    save(world, worker, namespace, "a", count=2)
    assert publish(world, worker, namespace, hint("j", 0, chain("a", 1))).results == (ACCEPTED,)
    asked = (hint("j", 0, chain("a", 2)), hint("gone", 1, chain("a", 1)), hint("nothing", 2))
    for request_id in (901, 901):  # the second one is a repetition
        assert world.ask(ev.PublishQueue, worker, namespace, asked, request_id=request_id) is None
    assert world.ask(ev.PublishQueue, worker, namespace, (), (b"gone",), False, request_id=902) is None
    leaves = world.open(spec(), other)
    assert world.ask(ev.PublishQueue, other, leaves, (hint("theirs", 3, chain("a", 1)),)) is None
    world.kill(other)
    before = len(world.replies)
    world.tick(127)
    assert len(world.replies) == before, "a plan has been made lately"
    world.tick(1)
    assert len(world.replies) == before + 3
    first, second = (world.answers[worker, request_id] for request_id in (901, 902))
    assert (first.results, first.prefetch_window) == ((ACCEPTED, REJECTED, REJECTED), 1)
    assert (second.results, second.prefetch_window) == ((), 1)
    assert len(world.store.state.policy.rank) == 2


def test_a_plan_that_other_hints_bring_about_answers_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no other plan: nobody has a job after this one."""
    monkeypatch.setattr("kvstore.core.requests.queue.PUBLISH_ROWS_PER_MS", 1 / 128)  # 128 ms per chunk
    world, worker, namespace = start(hint_ttl_ms=10_000)
    save(world, worker, namespace, "a")
    publish(world, worker, namespace, hint("j", 0, chain("a", 1)))
    assert world.ask(ev.PublishQueue, worker, namespace, (), (), True, request_id=901) is None
    world.now += 130  # and no tick
    assert publish(world, worker, namespace, snapshot=True).results == ()
    world.tick(1_000)
    assert (worker, 901) in world.answers


def test_a_job_counts_as_far_as_its_chunks_can_be_had() -> None:
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    world.ask(ev.Forget, worker, namespace, b"", chain("c", 4)[3:])
    accepted = publish(
        world,
        worker,
        namespace,
        hint("unknown first", 0, [ChunkKey(b"?"), *chain("a", 3)]),
        hint("three of c", 1, chain("c", 7)),
        hint("one more", 2, chain("d", 1)),
        hint("too much", 3, chain("b", 3)),
    )
    assert accepted.results == (ACCEPTED, ACCEPTED, ACCEPTED, DEFERRED)
    assert (accepted.prefetch_window, accepted.eviction_window) == (3, 4)


def test_queues_of_a_tenants_workers_and_namespaces_are_one_queue() -> None:
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    other = world.join()
    others = world.open(spec(shard_bytes=100, model="another"), other)
    assert publish(world, other, others, hint("j", 5, chain("a", 1))).results == (ACCEPTED,)
    assert publish(world, worker, namespace, hint("j", 6, chain("a", 3))).prefetch_window == 2
    accepted = publish(world, worker, namespace, hint("j", 6, chain("c", 5)))
    assert accepted.results == (DEFERRED,)
    assert (accepted.prefetch_window, accepted.eviction_window) == (1, 2)


def test_a_tenants_long_queue_does_not_shorten_anothers_windows() -> None:
    """Two tenants with jobs: each has half, 2 of the 4 chunks in DRAM and 6 of the 13 in all; who needs less than that
    lends the rest."""
    world, worker, namespace = start(segments=2, segment_bytes=4 * PAGE)
    bob = world.join("bob")
    bobs = world.open(spec(shard_bytes=100), bob)
    save(world, bob, bobs, "x", "y")
    for name, count in (("a", 3), ("c", 7)):
        for key in chain(name, count):
            world.tick(1)
            world.save(worker, namespace, (key,))
    greedy = publish(world, worker, namespace, hint("all", 0, chain("c", 7)), hint("more", 1, chain("a", 3)))
    assert greedy.results == (DEFERRED, DEFERRED)  # alone, it may have all of the 13
    late = publish(world, bob, bobs, hint("x", 100, chain("x", 1)), hint("y", 101, chain("y", 1)))
    assert late.results == (ACCEPTED, ACCEPTED)
    assert (late.prefetch_window, late.eviction_window) == (2, 2)
    again = publish(world, worker, namespace, hint("all", 0, chain("c", 7)), hint("more", 1, chain("a", 3)))
    assert again.results == (DEFERRED, DEFERRED)
    assert (again.prefetch_window, again.eviction_window) == (0, 2)
    assert world.store.queue.reach("bob") == (2, 2)
    world.store.state.jobs.shares["alice"] = 0.5  # a record that leaves her 3 of the 6
    again = publish(world, worker, namespace, hint("all", 0, chain("c", 7)), hint("some", 1, chain("a", 3)))
    assert again.results == (CLIPPED, CLIPPED)
    assert (again.prefetch_window, again.eviction_window) == (0, 0)
    del world.store.state.jobs.shares["alice"]
    publish(world, bob, bobs)
    assert publish(world, worker, namespace, hint("all", 0, chain("c", 7))).results == (DEFERRED,)


def test_a_scheduler_need_not_open_what_its_tenant_has() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a")
    scheduler = world.join()
    assert publish(world, scheduler, namespace, hint("j", 0, chain("a", 1))).results == (ACCEPTED,)
    with pytest.raises(NotFound):
        publish(world, world.join("bob"), namespace, hint("j", 0, chain("a", 1)))


def test_a_session_stands_for_the_chunks_of_its_manifest() -> None:
    world, worker, namespace = start()
    fourteen(world, worker, namespace)
    info = world.append(worker, namespace, b"s", chain("a", 3))
    assert publish(world, worker, namespace, hint("j", 0, session=b"s")).results == (ACCEPTED,)
    world.append(worker, namespace, b"s", chain("c", 7), version=info.version, keep=3)
    world.tick(100)  # plans again
    assert world.store.queue.reach("alice") == (0, 1)
    assert len(world.store.state.policy.rank) == 10


# ---------------------------------------------------------------------------------------------------------- publishing


def test_a_snapshot_replaces_a_delta_adds_moves_and_removes() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", "b", "c", "d")
    publish(world, worker, namespace, hint("a", 0, chain("a", 1)), hint("b", 1, chain("b", 1)))
    assert jobs(world, worker) == {b"a": 0, b"b": 1}
    publish(
        world, worker, namespace, hint("b", 9, chain("b", 1)), hint("c", 2, chain("c", 1)), snapshot=False,
        removed=(b"a", b"never there"),
    )  # fmt: skip
    assert jobs(world, worker) == {b"b": 9, b"c": 2}
    publish(world, worker, namespace, hint("d", 4, chain("d", 1)))
    assert jobs(world, worker) == {b"d": 4}
    accepted = publish(world, worker, namespace)
    assert jobs(world, worker) == {}
    assert accepted == ev.QueueAccepted((), 0, 0)
    world.tick(GRACE_MS)
    assert world.store.state.policy.rank == {}


def test_a_snapshot_is_of_one_worker_and_one_namespace() -> None:
    world, worker, namespace = start()
    other = world.join()
    world.open(spec(shard_bytes=100), other)
    second = world.open(spec("second", shard_bytes=100), worker)
    save(world, worker, namespace, "a", "b")
    publish(world, worker, namespace, hint("mine", 0, chain("a", 1)))
    publish(world, worker, second, hint("second", 0, chain("a", 1)))
    publish(world, other, namespace, hint("other", 0, chain("b", 1)))
    publish(world, worker, namespace)
    assert jobs(world, worker) == {b"second": 0}
    assert jobs(world, other) == {b"other": 0}


def test_hints_end_by_themselves() -> None:
    world, worker, namespace = start(hint_ttl_ms=5_000, hint_ttl_max_ms=8_000)
    save(world, worker, namespace, "a", "b", "c")
    publish(world, worker, namespace, hint("default", 0, chain("a", 1)))
    publish(world, worker, namespace, hint("short", 1, chain("b", 1)), snapshot=False, ttl_ms=100)
    publish(world, worker, namespace, hint("clipped", 2, chain("c", 1)), snapshot=False, ttl_ms=1 << 40)
    world.tick(99)
    assert len(jobs(world, worker)) == 3
    world.tick(1)
    assert jobs(world, worker) == {b"default": 0, b"clipped": 2}
    world.tick(20)  # a plan at most so often
    assert len(world.store.state.policy.rank) == 2
    world.tick(4_880)
    assert jobs(world, worker) == {b"clipped": 2}
    world.tick(3_000)
    assert jobs(world, worker) == {}
    assert world.counters["hints_expired"] == 3
    assert world.store.state.policy.rank == {}


def test_a_hint_that_is_published_again_lives_on() -> None:
    world, worker, namespace = start(hint_ttl_ms=1_000)
    save(world, worker, namespace, "a")
    for _ in range(5):
        publish(world, worker, namespace, hint("j", 0, chain("a", 1)), snapshot=False)
        world.tick(900)
    assert jobs(world, worker) == {b"j": 0}


def test_numbered_changes_are_taken_in_order_and_once() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a", "b", "c")
    a, b, c = (hint(name, place, chain(name, 1)) for place, name in enumerate("abc"))
    publish(world, worker, namespace, a, number=1)
    assert not publish(world, worker, namespace, b, snapshot=False, number=2).snapshot_wanted
    assert publish(world, worker, namespace, snapshot=False, removed=(b"a",), number=3).results == ()
    late = publish(world, worker, namespace, a, snapshot=False, number=2)
    assert not late.snapshot_wanted and jobs(world, worker) == {b"b": 1}, "it was taken, and is not again"
    early = publish(world, worker, namespace, c, snapshot=False, removed=(b"b",), number=5)
    assert early.snapshot_wanted and early.results == (REJECTED,)
    assert (early.prefetch_window, early.eviction_window) == (1, 1) and jobs(world, worker) == {b"b": 1}
    assert publish(world, worker, namespace, c, number=6).results == (ACCEPTED,)
    assert not publish(world, worker, namespace, a, number=4).snapshot_wanted, "a snapshot that comes late"
    assert jobs(world, worker) == {b"c": 2}
    publish(world, worker, namespace, a, snapshot=False)
    assert jobs(world, worker) == {b"c": 2, b"a": 0}, "without a number as ever"
    assert publish(world, worker, namespace, b, snapshot=False, number=7).snapshot_wanted
    assert world.counters["hints_out_of_order"] == 2


def test_a_numbered_change_renews_what_was_said_before() -> None:
    world, worker, namespace = start(hint_ttl_ms=1_000)
    save(world, worker, namespace, "a", "b")
    publish(world, worker, namespace, hint("a", 0, chain("a", 1)), number=1)
    for number in range(2, 6):
        world.tick(900)
        assert not publish(world, worker, namespace, snapshot=False, number=number).snapshot_wanted
    assert jobs(world, worker) == {b"a": 0}
    world.tick(1_000)
    assert jobs(world, worker) == {}
    change = publish(world, worker, namespace, hint("b", 0, chain("b", 1)), snapshot=False, number=6)
    assert change.snapshot_wanted, "what it changes is over"


def test_a_snapshot_of_a_queue_that_moved_on_costs_what_is_new() -> None:
    """All positions are others, and the order is the same."""
    world, worker, namespace = start(segments=4)
    names = "abcdefgh"
    save(world, worker, namespace, *names)
    queue = world.store.queue
    for first in range(4):
        now = names[first : first + 4]
        publish(world, worker, namespace, *[hint(name, at, chain(name, 1)) for at, name in enumerate(now)])
        assert queue._planned_rows == (4 if not first else 3), (
            "one that went, and is handed over; and one that came"
        )
        index = world.store.state.namespaces[namespace].index
        # Those that were handed over stand before them.
        assert places(world, [index[key] for name in now for key in chain(name, 1)]) == list(
            range(first, first + 4)
        )
    world.tick(GRACE_MS)
    other = world.join()
    world.open(spec(shard_bytes=100), other)
    publish(world, other, namespace, hint("between", 1, chain("a", 1)))
    index = world.store.state.namespaces[namespace].index
    publish(world, worker, namespace, *[hint(name, at, chain(name, 1)) for at, name in enumerate("defg")])
    rows = [index[key] for name in "deafg" for key in chain(name, 1)]
    assert places(world, rows) == [0, 1, 2, 3, 4], "two queues stand where their positions say"


def test_hints_of_a_worker_are_bounded() -> None:
    world, worker, namespace = start(hints_per_worker_max=2)
    save(world, worker, namespace, "a")
    accepted = publish(world, worker, namespace, *[hint(f"{n}", n, chain("a", 1)) for n in range(4)])
    assert accepted.results == (ACCEPTED, ACCEPTED, CLIPPED, CLIPPED)
    again = publish(
        world, worker, namespace, hint("1", 7, chain("a", 1)), hint("new", 8, chain("a", 1)), snapshot=False
    )
    assert again.results == (ACCEPTED, CLIPPED)
    swapped = publish(
        world, worker, namespace, hint("new", 0, chain("a", 1)), snapshot=False, removed=(b"1",)
    )
    assert swapped.results == (ACCEPTED,)
    assert jobs(world, worker) == {b"0": 0, b"new": 0}
    assert world.counters["hints_rejected"] == 0


def test_keys_in_hints_of_a_worker_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "KEYS_PER_WORKER_MAX", 4)
    world, worker, namespace = start()
    save(world, worker, namespace, "a", "b", count=2)
    a, b = chain("a", 2), chain("b", 2)
    accepted = publish(world, worker, namespace, hint("0", 0, a), hint("1", 1, b), hint("2", 2, a[:1]))
    assert accepted.results == (ACCEPTED, ACCEPTED, CLIPPED)
    again = publish(
        world, worker, namespace, hint("1", 1, b[:1]), hint("2", 2, a), hint("3", 3, a[:1]), snapshot=False
    )
    assert again.results == (ACCEPTED, CLIPPED, ACCEPTED)
    assert jobs(world, worker) == {b"0": 0, b"1": 1, b"3": 3}
    anew = publish(world, worker, namespace, hint("4", 4, [*a, *b]))
    assert anew.results == (ACCEPTED,)


def test_a_plan_looks_at_no_more_chunks_than_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of jobs may name one long session; and of that one tenant's do not shorten another's window."""
    monkeypatch.setattr(plan, "PLAN_ROWS_MAX", 8)
    world, worker, namespace = start(segments=2)
    save(world, worker, namespace, "a", count=2)
    other = world.join("bob")
    others = world.open(spec(shard_bytes=100), other)
    save(world, other, others, "b", count=2)
    same = [hint(f"{n}", 0, chain("a", 2)) for n in range(6)]
    alone = publish(world, worker, namespace, *same)
    assert alone.results == (ACCEPTED,) * 4 + (CLIPPED,) * 2
    world.tick(20)
    assert publish(world, other, others, hint("b", 9, chain("b", 2))).results == (ACCEPTED,)
    world.tick(20)
    assert publish(world, worker, namespace, *same).results == (ACCEPTED,) * 2 + (CLIPPED,) * 4


def test_jobs_that_name_one_session_look_at_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at the manifest that a fork shares: a plan holds everybody up for as long as it takes."""
    monkeypatch.setattr(plan, "PLAN_ROWS_MAX", 5)
    world, worker, namespace = start(segments=2)
    save(world, worker, namespace, "a", "b", count=4)
    world.append(worker, namespace, b"s", chain("a", 4))
    world.ask(ev.Fork, worker, namespace, b"s", b"fork")
    jobs_of_it = [hint(f"{n}", n, session=b"s" if n % 2 else b"fork") for n in range(6)]
    accepted = publish(world, worker, namespace, *jobs_of_it, hint("b", 9, chain("b", 2)))
    assert accepted.results == (ACCEPTED,) * 6 + (CLIPPED,)
    assert len(world.store.state.policy.rank) == 4


@pytest.mark.parametrize("batch_min", [2, 1 << 30])
def test_what_no_job_needs_any_more_goes_back_in_the_order_of_its_chain(batch_min: int) -> None:
    """Where it was used last: before what is used since, behind what was used long before."""
    world, worker, namespace = start(segments=4, batch_min=batch_min, eviction="hints")
    for name in ("old", "a", "b", "new"):
        save(world, worker, namespace, name, count=3)
        world.tick(1_000)
    publish(world, worker, namespace, hint("j", 0, chain("a", 3)), hint("k", 1, chain("b", 3)))
    state = world.store.state
    of = state.namespaces[namespace]

    def order(rows: Any) -> list[bytes]:
        return [state.chunks.key[row] for row in rows]

    assert order(state.policy.needed(of.dram, limit=10)) == [
        *reversed(chain("b", 3)),
        *reversed(chain("a", 3)),
    ]
    publish(world, worker, namespace)
    world.tick(GRACE_MS)
    a, b, old, new = (list(reversed(chain(name, 3))) for name in ("a", "b", "old", "new"))
    assert order(state.policy.unneeded(of.dram)) == [*a, *old, *new, *b]
    assert not state.policy.rank and not list(state.policy.needed(of.dram, limit=1))


def test_a_job_that_names_nothing_is_rejected_and_forgotten() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a")
    publish(world, worker, namespace, hint("j", 0, chain("a", 1)))
    accepted = publish(
        world, worker, namespace, hint("j", 0), hint("k", 0, session=b"no such session"), snapshot=False
    )
    assert accepted.results == (REJECTED, REJECTED)
    assert jobs(world, worker) == {}


@pytest.mark.parametrize("position", [-1, (1 << 31) + 1])
def test_a_position_out_of_range_is_refused_and_nothing_changes(position: int) -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a")
    publish(world, worker, namespace, hint("j", 3, chain("a", 1)))
    with pytest.raises(BadRequest, match="must be between 0 and") as error:
        publish(world, worker, namespace, hint("k", 0, chain("a", 1)), hint("l", position, chain("a", 1)))
    assert error.value.field == "hints[1].position"
    assert jobs(world, worker) == {b"j": 3}


def test_another_tenants_namespace_is_not_there() -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a")
    stranger = world.join("bob")
    with pytest.raises(NotFound):
        publish(world, stranger, namespace, hint("j", 0, chain("a", 1)))


@pytest.mark.parametrize("how", ["kill", "close"])
def test_the_hints_of_a_worker_that_is_gone_end(how: str) -> None:
    world, worker, namespace = start()
    save(world, worker, namespace, "a")
    scheduler = world.join()
    world.open(spec(shard_bytes=100), scheduler)
    lease = world.acquire(scheduler, namespace, chain("a", 1)).lease
    world.release(scheduler, lease)  # it still maps the segment: a closed one stays for a while
    publish(world, scheduler, namespace, hint("j", 0, chain("a", 1)))
    assert len(world.store.state.policy.rank) == 1
    getattr(world, how)(scheduler)
    world.tick(100)
    assert world.store.queue.feeds == {}
    assert world.store.state.policy.rank == {}


# ------------------------------------------------------------------------------------------------------------ prefetch


def filled(**limits: Any) -> tuple[DiskWorld, WorkerId, NamespaceId]:
    """Chunks a to h are on SSD alone, i to p in DRAM too."""
    world, worker, namespace = start(**limits)
    save(world, worker, namespace, *"abcdefghijklmnop")
    world.tick(1)
    assert world.where(namespace, names("abcdefgh")) == ["ssd"] * 8
    assert world.where(namespace, names("ijklmnop")) == ["dram+ssd"] * 8
    return world, worker, namespace


def names(text: str) -> list[ChunkKey]:
    return [chain(name, 1)[0] for name in text]


def test_the_prefetch_window_rises_and_no_more() -> None:
    world, worker, namespace = filled()
    accepted = publish(
        world,
        worker,
        namespace,
        hint("first", 0, names("ab")),
        hint("second", 1, names("cd")),
        hint("third", 2, names("ef")),
    )
    assert accepted.results == (ACCEPTED, ACCEPTED, DEFERRED)
    assert world.where(namespace, names("abcdef")) == ["dram+ssd"] * 4 + ["ssd"] * 2
    assert world.counters["chunks_promoted_ahead"] == 4
    assert world.counters["chunks_promoted_on_demand"] == 0
    publish(world, worker, namespace, removed=(b"first",), snapshot=False)
    assert world.where(namespace, names("ef")) == ["dram+ssd"] * 2  # its turn has come


def test_what_is_in_dram_already_counts_for_the_window() -> None:
    world, worker, namespace = filled()
    accepted = publish(world, worker, namespace, hint("there", 0, names("mnop")), hint("cold", 1, names("a")))
    assert accepted.results == (ACCEPTED, DEFERRED)
    assert world.where(namespace, names("a")) == ["ssd"]


def test_a_prefetch_takes_no_slot_of_what_an_earlier_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lease the windows have not heard yet."""
    monkeypatch.setattr("kvstore.core.requests.plan.MEMORY_STEPS", 1)
    world, worker, namespace = filled(prefetch_share_max=1.0)
    lease = world.acquire(worker, namespace, names("ijkl"), prefix_only=False).lease
    accepted = publish(
        world, worker, namespace, hint("near", 0, names("mnop")), hint("later", 1, names("abcd"))
    )
    assert accepted.results == (ACCEPTED, ACCEPTED)
    assert world.where(namespace, names("mnop")) == ["dram+ssd"] * 4
    assert world.where(namespace, names("abcd")) == ["ssd"] * 4
    assert world.counters["promotions_without_slot"] == 4
    # Who asks for it now gets it all the same.
    assert world.fetch(worker, namespace, names("a")) == ["HIT"]
    assert world.where(namespace, names("mnop")).count("dram+ssd") == 3
    world.release(worker, lease)
    world.tick(100)
    assert world.where(namespace, names("mnopabcd")) == ["dram+ssd"] * 8


def test_a_prefetch_takes_the_slots_of_what_a_later_job_needs() -> None:
    world, worker, namespace = filled()
    publish(world, worker, namespace, hint("later", 5, names("ijklmnop")), hint("near", 1, names("abcd")))
    assert world.where(namespace, names("abcd")) == ["dram+ssd"] * 4
    assert world.where(namespace, names("ijklmnop")).count("dram+ssd") == 4


def test_what_no_job_needs_makes_room_first_then_the_farthest() -> None:
    world, worker, namespace = filled()
    publish(
        world, worker, namespace, hint("near", 0, names("ij")), hint("mid", 1, names("k")),
        hint("far", 2, names("l")),
    )  # fmt: skip
    order = [*"mnop", "l", "k"]
    for number, expected in enumerate(order):
        save(world, worker, namespace, f"new {number}")
        gone = [name for name in "ijklmnop" if world.where(namespace, names(name)) == ["ssd"]]
        assert expected in gone, (expected, gone)
        assert len(gone) == number + 1
        # What was saved just now is needed by nobody and would go before the jobs': keep it in use.
        world.acquire(worker, namespace, chain(f"new {number}", 1))


def test_demanded_reads_go_before_foreseen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.transfers.CHUNKS_PER_OP_MAX", 1)
    world, worker, namespace = filled(disk_bytes_in_flight_max=1)
    world.hold = {ev.ReadRecords}
    publish(world, worker, namespace, hint("j", 0, names("abcd")))
    world.acquire(worker, namespace, names("h"), wait_ms=5_000)
    world.acquire(worker, namespace, names("d"), wait_ms=5_000)  # foreseen, and now somebody waits for it
    order = []
    while world.held:
        (read,) = world.of(ev.ReadRecords)
        order.append(read.records[0].key)
        world.finish()
    assert order == names("ahdbc")
    assert world.counters["prefetch_late"] == 1
    assert world.counters["chunks_promoted_ahead"] == 3
    assert world.counters["chunks_promoted_on_demand"] == 2


def test_the_read_that_is_needed_soonest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a job that comes later stands before those whose reads wait."""
    monkeypatch.setattr("kvstore.core.transfers.CHUNKS_PER_OP_MAX", 1)
    world, worker, namespace = filled(disk_bytes_in_flight_max=1)
    world.hold = {ev.ReadRecords}
    publish(world, worker, namespace, hint("far", 5, names("ab")), hint("farther", 6, names("c")))
    publish(world, worker, namespace, hint("near", 1, names("d")), snapshot=False)
    publish(world, worker, namespace, hint("farther", 2, names("c")), snapshot=False)
    order = []
    while world.held:
        (read,) = world.of(ev.ReadRecords)
        order.append(read.records[0].key)
        world.finish()
    assert order == names("adcb"), "the first was under way"


def test_siblings_of_a_union_rise_in_what_bandwidth_the_queue_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker tells them of prompts in its queue: the member that a prompt has as a job, the others as PREFETCH."""
    monkeypatch.setattr("kvstore.core.transfers.CHUNKS_PER_OP_MAX", 1)
    world, worker, namespace = filled(disk_bytes_in_flight_max=1, prefetch_share_max=1.0)
    world.hold = {ev.ReadRecords}
    siblings = ev.HintAction(b"siblings", ActionKind.PREFETCH, keys=tuple(names("abc")))
    world.ask(ev.ApplyActions, worker, namespace, (siblings,), ())
    world.tick(30)
    publish(world, worker, namespace, hint("first", 0, names("de")), hint("second", 1, names("f")))
    world.acquire(worker, namespace, names("h"), wait_ms=5_000)
    order = []
    while world.held:
        (read,) = world.of(ev.ReadRecords)
        order.append(read.records[0].key)
        world.finish()
    assert order == names("ahdefbc"), "the first was under way"


def test_a_job_that_left_its_queue_keeps_its_chunks_until_it_asks() -> None:
    """An engine takes a job off the queue and then asks for its chunks: what the next jobs need must not push them out
    in between."""
    world, worker, namespace = filled(prefetch_share_max=1.0)
    publish(
        world, worker, namespace, hint("first", 0, names("abcd")), hint("next", 1, names("efgh")),
        hint("last", 2, names("ijkl")),
    )  # fmt: skip
    accepted = publish(world, worker, namespace, removed=(b"first",), snapshot=False)
    assert (accepted.prefetch_window, accepted.eviction_window) == (2, 2), "who left is not counted"
    world.tick(100)
    assert world.where(namespace, names("abcd")) == ["dram+ssd"] * 4
    lease = world.acquire(worker, namespace, names("abcd"), prefix_only=False)
    assert lease.outcomes == (HIT,) * 4
    world.release(worker, lease.lease)
    world.tick(100)
    world.tick(100)
    assert not world.store.queue._handed_over, "it asked"
    assert world.where(namespace, names("efghijkl")) == ["dram+ssd"] * 8, "and others come"
    assert world.counters["prefetch_wasted"] == 0


def test_who_left_its_queue_and_never_asks_is_let_go_after_a_grace() -> None:
    world, worker, namespace = filled(prefetch_share_max=1.0)
    publish(world, worker, namespace, hint("first", 0, names("abcd")), hint("next", 1, names("efghijkl")))
    publish(world, worker, namespace, removed=(b"first",), snapshot=False)
    assert world.where(namespace, names("abcd")) == ["dram+ssd"] * 4
    world.tick(GRACE_MS)
    world.tick(100)
    assert world.where(namespace, names("efghijkl")) == ["dram+ssd"] * 8
    assert not world.store.queue._handed_over


def test_a_job_whose_reads_take_long_has_come_true() -> None:
    """A slow SSD says nothing of who hints: else its windows would shrink, and more reads would be late."""
    world, worker, namespace = filled()
    for name in "abcdefgh":
        world.hold = {ev.ReadRecords}
        publish(world, worker, namespace, hint(name, 0, names(name)))
        publish(world, worker, namespace)
        assert world.acquire(worker, namespace, names(name), wait_ms=5_000).outcomes == (PENDING,)
        world.tick(GRACE_MS + 1)
        world.hold = set()
        while world.held:
            world.finish()
    assert world.counters["hints_came_to_nothing"] == 0
    assert world.counters["hints_came_true"] == 8


def test_prefetches_are_counted_as_on_time_late_or_wasted() -> None:
    world, worker, namespace = filled()
    publish(world, worker, namespace, hint("j", 0, names("ab")))
    lease = world.acquire(worker, namespace, names("a")).lease
    world.release(worker, lease)
    world.release(worker, world.acquire(worker, namespace, names("a")).lease)  # counted once
    assert world.counters["prefetch_on_time"] == 1
    world.hold = {ev.ReadRecords}
    publish(world, worker, namespace, hint("j", 0, names("c")), snapshot=False)
    world.acquire(worker, namespace, names("c"), wait_ms=1_000)
    world.acquire(worker, namespace, names("c"), wait_ms=1_000)
    assert world.counters["prefetch_late"] == 1
    world.hold = set()
    world.finish()
    publish(world, worker, namespace)  # b is needed no more, and goes unused
    for number in range(8):
        save(world, worker, namespace, f"new {number}")
    assert world.counters["prefetch_wasted"] == 1
    assert (world.counters["prefetch_on_time"], world.counters["prefetch_late"]) == (1, 1)
    assert world.store.state.prefetched == set()


def test_a_prefetch_that_fails_is_tried_again_while_the_job_is_queued() -> None:
    world, worker, namespace = filled()
    world.hold = {ev.ReadRecords}
    publish(world, worker, namespace, hint("j", 0, names("a")))
    world.finish(fails="IO_ERROR")
    assert world.where(namespace, names("a")) == ["ssd"]
    world.hold = set()
    world.tick(100)
    assert world.where(namespace, names("a")) == ["dram+ssd"]


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_other_policies_raise_nothing_ahead_and_rank_nothing(eviction: str) -> None:
    world, worker, namespace = filled(eviction=eviction)
    publish(world, worker, namespace, hint("j", 0, names("ab")), hint("k", 1, names("ij")))
    world.tick(1_000)
    assert world.where(namespace, names("ab")) == ["ssd"] * 2
    for number in range(2):
        save(world, worker, namespace, f"new {number}")
    assert world.where(namespace, names("ij")) == ["ssd"] * 2


def test_nothing_rises_while_the_ssd_is_off() -> None:
    world, worker, namespace = filled(disk_deadline_ms=100, probe_interval_ms=50)
    world.hold = {ev.ReadRecords}
    publish(world, worker, namespace, hint("j", 0, names("abcd")))
    world.tick(100)
    (late,) = world.held
    world.tick(1_000)
    assert world.held == [late]
    assert world.store.queue.reach("alice")[0] == 1  # a job without anything that can be had
    world.hold = set()
    world.finish()
    for _ in range(5):
        world.tick(100)
    assert world.where(namespace, names("abcd")) == ["dram+ssd"] * 4


def test_a_queue_that_is_published_again_and_again_raises_each_chunk_once() -> None:
    world, worker, namespace = filled()
    world.hold = {ev.ReadRecords}
    for _ in range(10):
        publish(world, worker, namespace, hint("j", 0, names("abcd")))
        world.tick(100)
    assert sum(len(read.records) for read in world.of(ev.ReadRecords)) == 4
