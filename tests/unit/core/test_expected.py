"""The policy of expected hits: what it learns, what goes first, what is not saved, and what is not written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import events as ev
from kvstore.core.chunks import STORED
from kvstore.core.limits import Limits
from kvstore.core.policies import ages
from kvstore.core.policies.ages import BUCKETS, EDGES, PRIOR, Ages, Book, bucket_of, worths
from kvstore.core.policies.expected import KIND_MASK, Expected, history_of
from kvstore.core.policies.interface import AWAITED_MS
from kvstore.core.segments import PASSED_OVER_FROM
from kvstore.errors import StoreError
from kvstore.sim.disk import DiskWorld
from kvstore.sim.integrity import check_integrity
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, GrantResult, Reason, Wait

NEVER_MS = 1 << 40


@given(st.integers(0, NEVER_MS))
def test_an_age_is_in_the_bucket_between_whose_edges_it_lies(age: int) -> None:
    number = bucket_of(age)
    assert EDGES[number] <= age
    assert number == BUCKETS - 1 or age < EDGES[number + 1]


def test_a_chance_is_that_of_those_that_came_so_far() -> None:
    """Of 100 lives 60 end after a second; of the rest nobody sees the end, and half of them are young."""
    book = Book(lives_min=1)
    book.begin(ages.UNKNOWN, 0, 80)
    book.end(ages.UNKNOWN, 0, 1_000, 60)
    book.begin(ages.UNKNOWN, 5_000, 20)
    assert book.refresh(5_400)
    mine = book.ages[ages.UNKNOWN]
    number = bucket_of(1_000)
    assert (mine.ended[number], mine.passed[number]) == (60, 20)
    assert sum(mine.passed[number + 1 : number + 5]) == 4 * 20, "the young ones have not come so far"
    chance = book.chances()[ages.UNKNOWN]
    assert chance[number] == pytest.approx(0.75, abs=0.25) and chance[number] > 5 * chance[number - 1]


def test_lives_that_end_are_those_that_began_then() -> None:
    mine = Ages()
    for began in range(0, 10_000, 1_000):
        mine.begin(began, 5)
    mine.run(20_000)
    mine.end(3_000, 17_000, 5)
    assert sum(count for young in mine.young for _, count in young) == 45
    assert all(count for young in mine.young for began, count in young if began != 3_000)


def test_what_a_queue_told_of_ends_when_it_told() -> None:
    mine = Ages()
    mine.begin(0, 10)
    mine.run(59_000)
    mine.end(0, 60_000, 10, notice=50_000)
    told = bucket_of(10_000)
    assert mine.ended[told] == sum(mine.ended) == 10
    assert mine.passed == [10] * told + [0] * (BUCKETS - told)


def test_what_nobody_knows_is_worth_less_the_longer_ago_it_was_used() -> None:
    assert all(older < younger for younger, older in pairwise(PRIOR[0]))


def test_what_was_never_used_again_is_worth_less_the_longer_ago_it_was_saved() -> None:
    """Much data without a use must not make what is older than all data look better."""
    book = Book(lives_min=1)
    for now in range(0, 100_000, 50):
        book.begin(ages.FIRST_TURN, now, 10)
        book.refresh(now)
    worth = book.worth[ages.FIRST_TURN]
    assert all(older <= younger for younger, older in pairwise(worth))


def test_what_comes_within_a_look_ahead_counts_for_nothing() -> None:
    """All come back after about 10 s: who knows that nothing comes for a minute expects nothing of them."""
    chance = np.full((1, BUCKETS), 1e-6)
    chance[0, bucket_of(10_000)] = 0.9
    young = bucket_of(1_000)
    known, unknown = worths(chance, 60_000)[0], worths(chance)[0]
    assert unknown[young] > 100 * known[young]
    assert unknown[young] == pytest.approx(0.9 / 9_500, rel=0.3)


def test_kinds_fit_in_what_is_kept_of_a_chunk() -> None:
    for kind in range(ages.KINDS):
        assert history_of(kind, 99, 99) < 1 << 16


class Reads:
    """A world in which some chains are read again and again while others pass by."""

    def __init__(self, **limits: object) -> None:
        named = {
            "lives_min": 100,
            "reserve_share_max": 1.0,
            "pin_share_max": 1.0,
            "ahead_slots_max": 0,
        } | limits
        kind = DiskWorld if "slabs" in named else World
        self.world = kind(segments=4, segment_bytes=16 * PAGE, **named)
        self.worker = self.world.join()
        self.namespace = self.world.open(spec(), self.worker)
        self.passed = 0

    def ask(self, name: str, count: int = 4) -> int:
        """How many of its chunks are hits; the others are saved."""
        return self.ask_for(chain(name, count))

    def ask_for(self, keys: Sequence[ChunkKey]) -> int:
        acquired = self.world.acquire(self.worker, self.namespace, keys)
        if acquired.lease:
            self.world.release(self.worker, acquired.lease)
        hits = [outcome.name for outcome in acquired.outcomes].count("HIT")
        if hits < len(keys):
            parent = keys[hits - 1] if hits else b""
            reserved = self.world.reserve(self.worker, self.namespace, keys[hits:], parent=parent)
            if reserved.reservation:
                self.world.commit(self.worker, reserved)
        self.world.tick(100)
        return hits

    def pass_by(self, count: int) -> None:
        for _ in range(count):
            self.passed += 1
            self.ask(f"passes by {self.passed} ")


def hits_of_a_loop(eviction: str) -> int:
    """20 chains of 4 chunks in turn, in 64 slots: by recency each is gone when its turn comes."""
    reads = Reads(eviction=eviction)
    return sum(reads.ask(f"chain {number % 20} ") for number in range(160))


def test_a_loop_that_does_not_fit_is_kept_in_part() -> None:
    assert hits_of_a_loop("hints") == 0
    assert hits_of_a_loop("expected") > 40


def test_what_passes_by_does_not_push_out_what_is_used() -> None:
    hits = {}
    for eviction in ("hints", "expected"):
        reads = Reads(eviction=eviction)
        hits[eviction] = 0
        for _ in range(20):
            for number in range(6):
                hits[eviction] += reads.ask(f"chain {number} ")
            reads.pass_by(12)
    assert hits["expected"] > hits["hints"] + 40


def refusing() -> Reads:
    reads = Reads()
    for _ in range(20):
        for number in range(6):
            reads.ask(f"chain {number} ")
        reads.pass_by(12)
    assert reads.world.store.state.counters["saves_refused"] > 50
    return reads


def granted(reads: Reads, name: str, *, commit: bool = False) -> set[GrantResult]:
    found = reads.world.reserve(reads.worker, reads.namespace, chain(name, 4))
    if commit and found.reservation:
        reads.world.commit(reads.worker, found)
    return set(found.results)


def test_a_save_that_is_worth_less_than_what_would_go_is_refused_and_remembered() -> None:
    reads = refusing()
    found = [granted(reads, f"new {number} ") for number in range(4)]
    assert found.count({GrantResult.FULL}) >= 3, "one of them may be tried all the same"
    refused = found.index({GrantResult.FULL})
    keys = chain(f"new {refused} ", 4)
    assert reads.world.outcomes(reads.worker, reads.namespace, keys) == ["EVICTED"] * 4


def test_a_refused_save_may_name_a_key_twice() -> None:
    reads = refusing()
    granted(reads, "one before ")
    world, worker, namespace = reads.world, reads.worker, reads.namespace
    keys = chain("twice ", 4)
    twice = (*keys, keys[1], keys[3])
    assert set(world.reserve(worker, namespace, twice).results) == {GrantResult.FULL}
    check_integrity(world.store)
    assert world.outcomes(worker, namespace, keys) == ["EVICTED"] * 4
    world.reserve(worker, namespace, twice)  # they are remembered by now
    check_integrity(world.store)


def test_one_of_a_hundred_refusals_is_made_good() -> None:
    reads = refusing()
    found = [granted(reads, f"new {number} ") for number in range(330)]
    made_good = [number for number, results in enumerate(found) if results == {GrantResult.GRANTED}]
    # The first may find slots that nobody uses.
    assert [later - earlier for earlier, later in pairwise(made_good[1:])] == [101, 101]


def test_a_namespace_with_sessions_and_what_a_job_waits_for_are_not_refused() -> None:
    reads = refusing()
    world, worker, namespace = reads.world, reads.worker, reads.namespace
    world.ask(ev.PublishQueue, worker, namespace, (ev.Hint(b"job", 0, keys=chain("awaited ", 4)),))
    assert granted(reads, "awaited ") == {GrantResult.GRANTED}
    assert granted(reads, "not awaited ") == {GrantResult.FULL}
    world.append(worker, namespace, b"session", chain("chain 0 ", 2))
    assert granted(reads, "new ") == {GrantResult.GRANTED}


def test_a_write_to_a_full_ssd_has_to_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth nothing is not written, but if a session or a job names it, or a commit waits for it; one of a
    hundred is, so that somebody learns."""
    reads = Reads(slabs=2, slab_slots=64, durable_within_ms=100)
    reads.pass_by(50)
    world, worker, state = reads.world, reads.worker, reads.world.store.state
    assert state.counters["chunks_evicted_from_ssd"]
    monkeypatch.setattr(Expected, "worth_of", lambda policy, row: 0.0)
    monkeypatch.setattr(Expected, "least_worth", lambda policy, candidates: 1e-6)

    def stored(name: str) -> set[bool]:
        world.settle(1_000)
        index = state.namespaces[reads.namespace].index
        return {bool(state.chunks.flags[index[key]] & STORED) for key in chain(name, 4)}

    reads.ask("new ")
    assert stored("new ") == {False}
    world.append(worker, reads.namespace, b"session", chain("new ", 4))
    assert stored("new ") == {True}
    reads.ask("durable ")
    reserved = world.reserve(worker, reads.namespace, chain("durable too ", 4))
    world.ask(ev.Commit, worker, reserved.reservation, world.write(reserved), wait=Wait.DURABLE)
    assert (stored("durable "), stored("durable too ")) == ({False}, {True})
    written = state.counters["chunks_stored"]
    reads.pass_by(50)
    world.settle(1_000)
    assert state.counters["chunks_stored"] - written == 2


def not_worth_it(monkeypatch: pytest.MonkeyPatch, chance: float, mean: float) -> Reads:
    """A full SSD, of which it is known how long it holds what is written; kinds are used again so often."""
    reads = Reads(slabs=2, slab_slots=64)
    reads.pass_by(50)
    transfers = reads.world.store.transfers
    assert transfers._lap_ms, "it was written over once"
    transfers._averaged, transfers._used_mean = 4_096, mean
    monkeypatch.setattr(Expected, "worth_of", lambda policy, row: 1.0)
    monkeypatch.setattr(Expected, "least_worth", lambda policy, candidates: 0.0)
    monkeypatch.setattr(Expected, "used_within", lambda policy, row, ms: chance)
    return reads


@pytest.mark.parametrize(
    ("chance", "mean", "written"),
    [(0.1, 0.4, False), (0.3, 0.9, True), (0.1, 0.05, True)],
    ids=["seldom used", "often enough", "better than most"],
)
def test_what_is_seldom_used_before_the_ssd_is_written_over_is_not_written(
    monkeypatch: pytest.MonkeyPatch, chance: float, mean: float, written: bool
) -> None:
    reads = not_worth_it(monkeypatch, chance, mean)
    state = reads.world.store.state
    reads.ask("new ")
    reads.world.settle(1_000)
    index = state.namespaces[reads.namespace].index
    assert {bool(state.chunks.flags[index[key]] & STORED) for key in chain("new ", 4)} == {written}


@pytest.mark.parametrize("what", ["job", "session", "use"])
def test_what_was_not_worth_a_write_is_written_when_somebody_names_or_uses_it(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    reads = not_worth_it(monkeypatch, 0.1, 0.4)
    world, state, keys = reads.world, reads.world.store.state, chain("new ", 4)
    reads.ask("new ")
    world.settle(1_000)
    rows = [state.namespaces[reads.namespace].index[key] for key in keys]
    assert not any(state.chunks.flags[row] & STORED for row in rows)
    if what == "job":
        world.ask(ev.PublishQueue, reads.worker, reads.namespace, (ev.Hint(b"job", 0, keys=keys),))
    elif what == "session":
        world.append(reads.worker, reads.namespace, b"session", keys)
    else:
        monkeypatch.setattr(Expected, "used_within", lambda policy, row, ms: 0.5)
        world.settle(1_000)
        assert not any(state.chunks.flags[row] & STORED for row in rows), "nothing happened"
        assert reads.ask("new ") == 4
    world.settle(1_000)
    assert all(state.chunks.flags[row] & STORED for row in rows)


def test_a_tail_that_nobody_names_is_not_written_to_a_full_ssd(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = not_worth_it(monkeypatch, 0.9, 0.4)
    world, state = reads.world, reads.world.store.state
    (key,) = chain("tail ", 1)
    reserved = world.reserve(reads.worker, reads.namespace, (key,), token_counts=(1,))
    world.commit(reads.worker, reserved)
    world.settle(1_000)
    row = state.namespaces[reads.namespace].index[key]
    assert not state.chunks.flags[row] & STORED
    world.append(reads.worker, reads.namespace, b"session", (key,), counts=(1,))
    world.settle(1_000)
    assert state.chunks.flags[row] & STORED


def test_the_chance_to_be_used_within_a_time_grows_with_it() -> None:
    book = Book(lives_min=1)
    book.begin(ages.UNKNOWN, 0, 5_000)
    book.end(ages.UNKNOWN, 0, 60_000, 1_500)
    assert book.refresh(10_000_000)
    chances = book.used_by[ages.UNKNOWN]
    assert all(sooner <= later for sooner, later in pairwise(chances))
    assert chances[bucket_of(30_000)] < 0.02
    assert chances[bucket_of(60_000)] == pytest.approx(0.3, abs=0.03)


def test_ghosts_grow_with_the_arena_and_take_a_bounded_part_of_it() -> None:
    small, large = (Limits(arena_bytes=gib << 30, segment_bytes=1 << 30) for gib in (1, 512))
    assert small.ghost_rows_max == 100_000
    assert large.ghost_rows_max > 10 * small.ghost_rows_max
    assert large.ghost_rows_max * 300 <= large.arena_bytes / 512


@pytest.mark.parametrize("batch_min", [1, 99], ids=["batch", "each"])
def test_a_use_counts_from_when_the_queue_told_of_it(batch_min: int) -> None:
    """A chunk that waits in the queue for a minute was needed again ten seconds after its last use."""
    reads = Reads(eviction="expected", batch_min=batch_min)
    world, keys = reads.world, chain("told ", 4)
    reads.ask("told ")
    world.tick(10_000)
    world.ask(
        ev.PublishQueue, reads.worker, reads.namespace, (ev.Hint(b"job", 0, keys=keys),), ttl_ms=600_000
    )
    world.tick(50_000)
    assert reads.ask("told ") == 4
    (book,) = world.store.state.policy.books  # type: ignore[attr-defined]
    ended = np.sum([each.ended for each in book.ages], axis=0)
    assert set(np.flatnonzero(ended)) <= {bucket_of(10_000), bucket_of(10_100), bucket_of(10_200)}
    assert ended.sum() == 4


@pytest.mark.parametrize("batch_min", [1, 99], ids=["batch", "each"])
def test_chains_that_are_saved_together_begin_lives_of_their_own_kinds(batch_min: int) -> None:
    """One goes on with a dialogue, the other begins one."""
    reads = Reads(eviction="expected", batch_min=batch_min)
    world = reads.world
    reads.ask("dialogue ")
    assert reads.ask("dialogue ") == 4
    later, first = chain("dialogue ", 8)[4:], chain("another ", 4)
    parents = (*chain("dialogue ", 8)[3:7], b"", *first[:3])
    reserved = world.ask(ev.Reserve, reads.worker, reads.namespace, (*later, *first), parents=parents)
    world.commit(reads.worker, reserved)
    chunks = world.store.state.chunks
    kinds = {
        chunks.key[row]: chunks.history[row] & KIND_MASK for row in range(chunks.rows_ever) if chunks.key[row]
    }
    tokens = sum(chunks.tokens[row] for row in range(chunks.rows_ever) if chunks.key[row] in (*later, *first))
    assert {kinds[key] for key in later} == {ages.kind_of_new(partial=False, turn=2, tokens=tokens)}
    assert {kinds[key] for key in first} == {ages.kind_of_new(partial=False, turn=1, tokens=tokens)}


def test_a_job_that_never_comes_ends_no_life() -> None:
    reads = Reads(eviction="expected")
    world, keys = reads.world, chain("told ", 4)
    reads.ask("told ")
    hints = (ev.Hint(b"job", 0, keys=keys),)
    for _ in range(20):
        world.ask(ev.PublishQueue, reads.worker, reads.namespace, hints, ttl_ms=600_000)
        world.tick(100)
        world.ask(ev.PublishQueue, reads.worker, reads.namespace, (), (b"job",))
        world.tick(2_000)
    policy = world.store.state.policy
    assert isinstance(policy, Expected) and not policy.foreseen
    assert not any(any(each.ended) for each in policy.books[0].ages)


def nothing_else_is_worth_less(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    """From now on what was used again is worth nothing, and all else something."""
    (book,) = reads.world.store.state.policy.books  # type: ignore[attr-defined]
    assert book.knows
    worth = [[0.0 if ages.USED <= kind < ages.UNKNOWN else 1.0] * BUCKETS for kind in range(ages.KINDS)]
    monkeypatch.setattr(Book, "refresh", lambda book, now: False)
    book.worth = worth
    book.version += 1


@pytest.mark.parametrize("needed", [False, True], ids=["others go", "what jobs need goes"])
def test_what_somebody_waits_for_is_there_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    """It came from SSD on demand, is worth less than all else, and DRAM is full: others go until it is taken."""
    reads = Reads(slabs=4, slab_slots=64, lives_min=10, prefetch_share_max=1.0)
    world, worker, space = reads.world, reads.worker, reads.namespace
    reads.ask("asked ", 8)
    reads.pass_by(20)
    world.settle(1_000)
    nothing_else_is_worth_less(monkeypatch, reads)
    keys = chain("asked ", 8)
    waiting = world.acquire(worker, space, keys, wait_ms=5_000)
    assert {outcome.name for outcome in waiting.outcomes} == {"PENDING"}
    world.settle(100)
    if needed:
        names = [f"passes by {number} " for number in range(1, 21)]
        hints = tuple(ev.Hint(name.encode(), at, keys=chain(name, 4)) for at, name in enumerate(names))
        world.ask(ev.PublishQueue, worker, space, hints)
        world.settle(500)
    reads.ask("saved meanwhile ", 8)
    taken = world.acquire(worker, space, keys)
    assert {outcome.name for outcome in taken.outcomes} == {"HIT"}


def test_what_nobody_takes_goes_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(slabs=4, slab_slots=64, lives_min=10)
    world = reads.world
    reads.ask("asked ", 8)
    reads.pass_by(20)
    world.settle(1_000)
    nothing_else_is_worth_less(monkeypatch, reads)
    keys = chain("asked ", 8)
    world.acquire(reads.worker, reads.namespace, keys, wait_ms=5_000)
    world.settle(AWAITED_MS + 1_000)
    reads.ask("saved ", 8)
    left = world.ask(ev.Match, reads.worker, reads.namespace, keys).reasons
    assert Reason.ON_SSD in left, "it is worth the least"


def waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """DRAM is full; 36 chunks in it are worth the least, and wait for their writes on a disk that ends none."""
    reads = Reads(slabs=8, slab_slots=64, lives_min=10, disk_bytes_in_flight_max=4 * PAGE)
    reads.ask("asked ", 8)
    reads.pass_by(20)
    reads.world.settle(1_000)
    (book,) = reads.world.store.state.policy.books  # type: ignore[attr-defined]
    assert book.knows
    monkeypatch.setattr(Book, "refresh", lambda book, now: False)
    book.worth = [[0.0, 0.0] + [1.0] * (BUCKETS - 2) for _ in range(ages.KINDS)]
    book.version += 1
    reads.world.hold.add(ev.WriteRecords)
    for number in range(10):
        assert granted(reads, f"new {number} ", commit=True) == {GrantResult.GRANTED}
    return reads


def test_saves_and_fetches_find_slots_behind_what_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have to stay, what is behind them goes; and they are not all looked at again for each slot."""
    reads = waiting_for_the_disk(monkeypatch)
    world, worker, space = reads.world, reads.worker, reads.namespace
    assert granted(reads, "saved ") == {GrantResult.GRANTED}
    tried = []
    leave_dram = world.store.segments._leave_dram
    monkeypatch.setattr(world.store.segments, "_leave_dram", lambda row: tried.append(row) or leave_dram(row))
    keys = chain("asked ", 8)
    waiting = world.acquire(worker, space, keys, wait_ms=5_000)
    assert {outcome.name for outcome in waiting.outcomes} == {"PENDING"}
    assert set(world.where(space, keys)) == {"dram+ssd"}
    assert len(tried) < 2 * PASSED_OVER_FROM


def test_what_jobs_need_stays_however_many_chunks_others_are_about_to_take() -> None:
    reads = Reads(eviction="hints", slabs=8, slab_slots=64)
    world, worker, space = reads.world, reads.worker, reads.namespace
    asked = [chain(f"asked {number} ", 4) for number in range(10)]
    for number in range(10):
        reads.ask(f"asked {number} ")
    reads.pass_by(20)
    world.settle(1_000)
    for keys in asked:
        world.acquire(worker, space, keys, wait_ms=50_000)
    world.settle(200)
    reads.ask("needed ")
    needed = chain("needed ", 4)
    world.ask(ev.PublishQueue, worker, space, (ev.Hint(b"job", 0, keys=needed),))
    for number in range(5):
        reads.ask(f"other {number} ")
    world.settle(1_000)
    assert not reads.world.store.state.pool.classes[space, PAGE].free
    reads.ask("saved ")
    assert set(world.where(space, needed)) == {"dram+ssd"}
    assert {where for keys in asked for where in world.where(space, keys)} == {"dram+ssd"}
    assert world.where(space, chain("other 0 ", 4))[-1] == "ssd", "nobody needs it"


def test_as_many_ghosts_are_remembered_as_the_arena_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.limits.GHOST_BYTES", 1)
    monkeypatch.setattr("kvstore.core.limits.GHOSTS_MIN", 4)
    reads = Reads(eviction="lru")
    reads.pass_by(100)
    state = reads.world.store.state
    assert state.ghosts.count == min(400 - 64, 64 * PAGE // 512)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_pinned_and_needed_chunks_stay_and_saves_make_progress(seed: int, disk: bool) -> None:
    """The worlds check after each event that no pinned chunk loses its slot and that no capacity is exceeded."""
    dice = random.Random(seed)
    reads = Reads(lives_min=20, **({"slabs": 4, "slab_slots": 16} if disk else {}))
    world, state = reads.world, reads.world.store.state
    assert isinstance(state.policy, Expected)
    held = []
    for _ in range(40):
        name = f"chain {int(30 * dice.random() ** 2)} "
        if dice.random() < 0.1:
            hints = tuple(
                ev.Hint(b"%d" % n, n, keys=chain(f"chain {dice.randrange(30)} ", 4)) for n in range(3)
            )
            world.ask(ev.PublishQueue, reads.worker, reads.namespace, hints)
        rank, dram = state.policy.rank, state.namespaces[reads.namespace].dram
        needed = {row for row in rank if state.is_hit(row) and not state.chunks.pins[row]}
        spare = dram.unneeded
        wanted = dice.randrange(1, 5)
        try:
            reads.ask(name, wanted)
        except StoreError:
            continue
        if spare > 8:
            gone = [row for row in needed if row in state.policy.rank and not state.is_hit(row)]
            assert not gone, "what a job needs went though others were there"
        if dice.random() < 0.2 and len(held) < 3:
            acquired = world.acquire(reads.worker, reads.namespace, chain(name, wanted))
            held += [acquired.lease] if acquired.lease else []
        elif held and dice.random() < 0.3:
            world.release(reads.worker, held.pop())
    free = sum(slab.free for slab in state.pool.classes.values())
    assert free or dram.count, "something may always go"


def standing(reads: Reads, *keys: ChunkKey) -> list[ev.Standing | None]:
    told = reads.world.ask(ev.Explain, reads.worker, reads.namespace, keys=keys)
    return [chunk.standing for chunk in told.chunks]


def test_a_chunk_says_by_which_rule_it_goes_and_with_what_figures() -> None:
    reads = Reads()
    for _ in range(20):
        for number in range(6):
            reads.ask(f"chain {number} ")
        reads.pass_by(12)
    world, worker, namespace = reads.world, reads.worker, reads.namespace
    used, needed, pinned = (chain(f"chain {number} ", 1)[0] for number in range(3))
    hints = (ev.Hint(b"first", 0, keys=chain("chain 5 ", 1)), ev.Hint(b"second", 1, keys=(needed,)))
    world.ask(ev.PublishQueue, worker, namespace, hints)
    assert world.acquire(worker, namespace, (pinned,)).lease
    by_worth, by_queue, by_pin, gone = standing(reads, used, needed, pinned, ChunkKey(b"never saved"))
    assert by_worth is not None and by_worth.rule == "worth"
    assert by_worth.worth >= by_worth.least_worth > 0
    assert by_worth.kind.startswith("used 5 times or more")
    arena = 64 * PAGE
    assert by_queue == ev.Standing(
        "needed", jobs_before=1, jobs_ahead=2, jobs_kept=2, ahead_bytes=int(0.8 * arena), kept_bytes=arena
    )
    assert by_pin == ev.Standing("pinned")
    assert gone is None


@pytest.mark.parametrize(
    ("eviction", "rule"), [("expected", "recency"), ("lru", "recency"), ("fifo", "arrival")]
)
def test_before_anything_is_learnt_and_under_other_policies_the_rule_has_no_figures(
    eviction: str, rule: str
) -> None:
    reads = Reads(eviction=eviction)
    reads.ask("chain 0 ")
    assert standing(reads, chain("chain 0 ", 1)[0]) == [ev.Standing(rule)]


def test_the_worth_that_is_told_is_that_by_which_chunks_go() -> None:
    """What goes next is told to be worth what everything else is told to exceed."""
    reads = Reads()
    for _ in range(20):
        for number in range(6):
            reads.ask(f"chain {number} ")
        reads.pass_by(12)
    state = reads.world.store.state
    keys = [key for key in map(state.chunks.key.__getitem__, range(state.chunks.rows_ever)) if key]
    told = [each for each in standing(reads, *keys) if each is not None and each.rule == "worth"]
    assert len(told) > 20
    assert {each.least_worth for each in told} == {min(each.worth for each in told)}


@pytest.mark.parametrize("seed", range(8))
def test_nothing_goes_before_what_can_only_be_found_behind_it(seed: int) -> None:
    """Whatever kinds are worth: dialogues of many lengths branch off each other, and are used at different depths."""
    draw = random.Random(seed)
    reads = Reads(eviction="expected")
    for _ in range(120):
        root = f"root {draw.randrange(3)} "
        branch = chain(f"{root} branch {draw.randrange(5)} ", 1 + draw.randrange(6))
        reads.ask_for((*chain(root, 3), *branch))
    state = reads.world.store.state
    policy, chunks = state.policy, state.chunks
    (dram,) = (namespace.dram for namespace in state.namespaces.values())
    before = [list(kind) for kind in policy.books[0].worth]
    policy.books[0].worth = [[draw.random() for _ in kind] for kind in before]
    policy.books[0].version += 1
    dram.aged_at = 0  # cells are put in order anew
    order = list(policy.unneeded(dram))
    assert len(order) == len(set(order)) == dram.unneeded > 40
    place = {row: number for number, row in enumerate(order)}
    pairs = [(row, chunks.parent[row]) for row in order if chunks.parent[row] in place]
    assert len(pairs) > 20
    assert all(place[row] < place[parent] for row, parent in pairs)
