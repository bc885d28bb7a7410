"""Workers: joining, dying, closing their connection; engine groups that must agree; repeated requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests.outlines import Outline, SessionOutline
from kvstore.errors import BadRequest, Conflict, NotFound, Precondition, Unauthenticated
from kvstore.layout import GroupSpec
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import Protection, WorkerId

# ----------------------------------------------------------------------------------------------------- life and death


def test_all_that_a_worker_had_ends_with_its_process() -> None:
    world = World()
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.save(worker, namespace, chain("k", 2))
    world.acquire(worker, namespace, chain("k", 2))
    pending = world.reserve(other, namespace, chain("pending", 1))
    world.acquire(worker, namespace, chain("pending", 1), wait_ms=1_000)
    world.reserve(worker, namespace, chain("r", 2))
    world.kill(worker)
    state = world.store.state
    assert (state.leases.leases, state.waits) == ({}, {})
    assert [reservation.worker for reservation in state.reservations.values()] == [other]
    assert worker not in state.workers and ("alice", f"worker-{worker}") not in state.groups
    assert all(worker not in segment.holders for segment in state.pool.segments)
    assert world.outcomes(other, namespace, chain("k", 2)) == ["HIT", "HIT"]
    world.commit(other, pending)
    assert world.take(ev.ChunksSettled) == []


def test_who_is_not_connected_is_answered_so() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.kill(worker)
    for stranger in (worker, WorkerId(99)):
        with pytest.raises(Unauthenticated, match="say hello again") as error:
            world.match(stranger, namespace, chain("k", 1))
        assert error.value.field == "worker"


def test_a_process_that_is_gone_twice_is_gone() -> None:
    world = World()
    worker = world.join()
    world.kill(worker)
    for event in (ev.WorkerLeft(worker), ev.WorkerClosed(worker), ev.WorkerLeft(WorkerId(7))):
        world.step(event)


def test_a_closed_connection_starts_nothing_new() -> None:
    world = World()
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.save(worker, namespace, chain("k", 1))
    world.acquire(worker, namespace, chain("k", 1))
    reserved = world.reserve(worker, namespace, chain("r", 1))
    world.close(worker)
    assert reserved.reservation not in world.store.state.reservations
    with pytest.raises(Unauthenticated):
        world.match(worker, namespace, chain("k", 1))
    with pytest.raises(Unauthenticated):
        world.map(worker, [world.store.state.pool.segments[0].id])


def test_a_closed_connection_keeps_its_pins_while_the_process_may_read() -> None:
    world = World(
        segments=1, segment_bytes=8 * PAGE, lease_ttl_ms=1_000, revoke_grace_ms=500, reserve_share_max=1.0
    )
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.save(worker, namespace, chain("k", 4))
    acquired = world.acquire(worker, namespace, chain("k", 4))
    world.close(worker)
    world.tick(1_499)
    assert [r.name for r in world.reserve(other, namespace, chain("n", 5)).results] == ["GRANTED"] * 4 + [
        "FULL"
    ]
    assert None not in [world.load(worker, extent) for extent in acquired.extents]
    world.tick(1)  # expired, the grace over, and wanted
    world.reserve(other, namespace, chain("m", 1))
    assert None in [world.load(worker, extent) for extent in acquired.extents]


def test_a_closed_connection_without_mappings_is_forgotten_at_once() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    segments = {extent.segment for extent in world.acquire(worker, namespace, chain("k", 2)).extents}
    world.unmap(worker, sorted(segments))
    world.close(worker)
    assert worker not in world.store.state.workers
    assert world.store.state.leases.leases == {}


def test_a_closed_member_does_not_end_what_another_closed_member_may_still_read() -> None:
    world = World(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1.0)
    reader, rank, other = world.join(group="engine"), world.join(group="engine", rank=1), world.join()
    namespace = world.open(spec(), reader, rank, other)
    world.save(reader, namespace, chain("k", 2))
    world.acquire(reader, namespace, chain("k", 2))
    world.close(reader)
    world.close(rank)  # it maps nothing
    world.save(other, namespace, chain("n", 2))  # the world sees when this lands under the reader
    assert world.reserve(other, namespace, chain("m", 3)).results[2].name == "FULL"
    world.kill(reader)
    assert world.store.state.leases.leases == {}


def test_a_closed_connection_goes_when_its_commit_has_returned() -> None:
    world = World()
    worker, other = world.join(), world.join()
    namespace = world.open(spec(), worker, other)
    world.hold = {ev.CopyIn}
    world.commit(worker, world.reserve(worker, namespace, chain("k", 1)))
    world.close(worker)
    assert worker in world.store.state.workers
    world.finish()
    world.tick()
    assert worker not in world.store.state.workers
    assert world.outcomes(other, namespace, chain("k", 1)) == ["HIT"]


def test_a_closed_connection_with_mappings_gives_its_staging_memory_back_once_nothing_reads_it() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 2))
    world.acquire(worker, namespace, chain("k", 2))  # from now on it has mappings
    world.hold = {ev.CopyIn}
    world.commit(worker, world.reserve(worker, namespace, chain("n", 1)))
    world.close(worker)
    world.tick()
    left = world.store.state.workers[worker]
    assert not left.staging_dropped, "the commit still reads"
    world.finish()
    world.tick()
    assert left.staging_dropped and worker in world.store.state.workers


def test_what_a_closed_worker_may_write_in_place_is_quarantined_while_it_has_mappings() -> None:
    world = World(protection=Protection.GROUP)
    worker, rank = world.join(), world.join()
    namespace = world.open(spec(), worker, rank)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    world.map(worker, [extent.segment for extent in reserved.extents])
    world.close(worker)
    world.tick()
    assert world.slots()["quarantined"] == 2
    world.kill(worker)
    assert world.slots()["quarantined"] == 0


def test_what_a_closed_worker_cannot_write_any_more_is_free() -> None:
    world = World(protection=Protection.GROUP)
    worker, rank = world.join(), world.join()
    namespace = world.open(spec(), worker, rank)
    reserved = world.reserve(worker, namespace, chain("k", 2))
    segments = world.map(worker, [extent.segment for extent in reserved.extents])
    world.unmap(worker, segments)
    world.close(worker)
    assert worker not in world.store.state.workers
    assert world.slots()["quarantined"] == 0


# ------------------------------------------------------------------------------------------------------ engine groups


@pytest.mark.parametrize(
    ("different", "field"),
    [
        (spec(groups=(GroupSpec("kv", 2 * PAGE, shard_count=2),)), "groups"),
        (spec(groups=(GroupSpec("kv", PAGE, shard_count=3),)), "groups"),
        (replace(spec(shards=2), layout_fingerprint="layout 2"), "layout_fingerprint"),
        (replace(spec(shards=2), tensor_parallel=2), "tensor_parallel"),
        (replace(spec(shards=2), hash_protocol="vllm"), "hash_protocol"),
        (replace(spec(shards=2), chunk_tokens=8), "chunk_tokens"),
    ],
)
def test_ranks_of_one_engine_that_disagree_are_told_in_which_field(different: Any, field: str) -> None:
    world = World()
    first, second, stranger = world.join(group="engine"), world.join(group="engine", rank=1), world.join()
    namespace = world.open(spec(shards=2), first)
    with pytest.raises(Precondition, match=f"'engine' opened it differently: {field}: ") as error:
        world.open(different, second)
    assert (error.value.field, error.value.value) == ("namespace", "llama")
    assert "another connect()" in error.value.remedy
    assert world.open(spec(shards=2), second) == namespace
    assert world.open(different, stranger) != namespace


def test_one_engine_may_have_other_models_adapters_weights_and_epochs() -> None:
    world = World()
    first, second = world.join(group="engine"), world.join(group="engine", rank=1)
    base = spec(shards=2)
    world.open(base, first)
    world.open(spec("draft model", shards=1), second)
    world.open(replace(base, adapter_digest=b"lora", layout_fingerprint="layout 2"), second)
    world.open(replace(base, weights_digest=b"v2"), second)
    world.open(replace(base, weights_epoch=1), second)
    with pytest.raises(Precondition, match="tensor_parallel"):
        world.open(replace(base, weights_epoch=2, tensor_parallel=2), second)


def test_a_remote_caller_is_no_engine() -> None:
    """Its connection may be a proxy's, with several callers behind it."""
    world = World()
    worker = world.join(remote=True)
    numbers = {
        world.open(replace(spec(), layout_fingerprint=layout), worker) for layout in ("one", "two", "one")
    }
    assert len(numbers) == 2


def test_what_is_remembered_of_an_engine_s_namespaces_is_bounded() -> None:
    world = World()
    worker = world.join()
    for epoch in range(100):
        world.open(spec(epoch=epoch), worker)
    assert len(world.store.state.workers[worker].group.specs) == 1


def test_open_says_in_which_fields_other_namespaces_of_the_model_differ() -> None:
    world = World()
    worker, stranger = world.join(), world.join("bob")
    number = world.open(spec(), worker)
    world.open(spec("another model"), worker)
    world.open(spec(), stranger)
    opened = world.ask(ev.Open, world.join(), replace(spec(), weights_digest=b"v2"))
    (note,) = opened.notes
    assert note == f"namespace {number} of this model does not match: weights_digest: 7632 != 77"


# -------------------------------------------------------------------------------------------------- repeated requests


def test_a_repeated_request_gets_its_first_answer_and_changes_nothing() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 2)
    first = world.ask(ev.Reserve, worker, namespace, keys, request_id=1_000)
    assert world.ask(ev.Reserve, worker, namespace, keys, request_id=1_000) is first
    world.commit(worker, first)
    lease = world.ask(ev.Acquire, worker, namespace, keys, request_id=1_001)
    assert world.ask(ev.Acquire, worker, namespace, keys, request_id=1_001) is lease
    assert len(world.store.state.leases.leases) == 1
    info = world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, (), request_id=1_002)
    assert world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, (), request_id=1_002) is info
    assert world.ask(ev.Release, worker, (lease.lease,), request_id=1_003).count == 1
    assert world.ask(ev.Release, worker, (lease.lease,), request_id=1_003).count == 1


def test_a_number_that_another_kind_of_request_had_is_refused() -> None:
    """Its answer would be nonsense; and the first request keeps it."""
    world = World(remembered_answers_max=2)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 1)
    first = world.ask(ev.Reserve, worker, namespace, keys, request_id=1_000)
    with pytest.raises(BadRequest, match="request_id=1000: another kind of request had this number"):
        world.ask(ev.Fork, worker, namespace, b"a", b"b", request_id=1_000)
    assert world.ask(ev.Reserve, worker, namespace, keys, request_id=1_000) is first
    for number in (1_001, 1_002):
        world.ask(ev.Release, worker, (), request_id=number)
    assert world.ask(ev.Release, worker, (), request_id=1_000).count == 0, "it is forgotten with its answer"


def test_an_error_is_an_answer_and_repeated_too() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    with pytest.raises(NotFound):
        world.ask(ev.Commit, worker, 5, request_id=1_000)
    for _ in range(4):
        world.reserve(worker, namespace, chain("k", 8))
    reserved = world.reserve(worker, namespace, chain("r", 1))
    assert reserved.reservation  # that one could be committed now, but the request was answered
    with pytest.raises(NotFound):
        world.ask(ev.Commit, worker, reserved.reservation, request_id=1_000)


def test_a_request_that_is_repeated_while_it_is_under_way_is_answered_twice_and_done_once() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn}
    reserved = world.reserve(worker, namespace, chain("k", 1))
    staged = world.write(reserved)
    for channel in (1, 2, 3):
        world.step(ev.Commit(ev.Ticket(worker, 1_000, channel), reserved.reservation, staged))
    assert len(world.held) == 1
    world.finish()
    answers = [(r.ticket.channel, r.answer) for r in world.replies if r.ticket.request_id == 1_000]
    assert [channel for channel, _ in answers] == [1, 2, 3]
    assert len({answer for _, answer in answers}) == 1
    world.step(ev.Commit(ev.Ticket(worker, 1_000, 4), reserved.reservation, staged))
    assert world.replies[-1].answer is answers[0][1]


def test_request_0_is_not_remembered_and_numbers_are_each_worker_s_own() -> None:
    world = World()
    one, other = world.join(), world.join()
    namespace = world.open(spec(), one, other)
    world.save(one, namespace, chain("k", 1))
    leases = {world.ask(ev.Acquire, one, namespace, chain("k", 1), request_id=0).lease for _ in range(2)}
    leases |= {world.ask(ev.Acquire, w, namespace, chain("k", 1), request_id=500).lease for w in (one, other)}
    assert len(leases) == 4


def test_reading_requests_are_answered_anew() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    assert world.ask(ev.Match, worker, namespace, chain("k", 1), request_id=500).usable == 0
    world.save(worker, namespace, chain("k", 1))
    assert world.ask(ev.Match, worker, namespace, chain("k", 1), request_id=500).usable == 1


def test_remembered_answers_are_bounded_in_number() -> None:
    world = World(remembered_answers_max=2)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    leases = [
        world.ask(ev.Acquire, worker, namespace, chain("k", 1), request_id=n).lease for n in (900, 901, 902)
    ]
    assert world.ask(ev.Acquire, worker, namespace, chain("k", 1), request_id=902).lease == leases[2]
    assert world.ask(ev.Acquire, worker, namespace, chain("k", 1), request_id=901).lease == leases[1]
    assert world.ask(ev.Acquire, worker, namespace, chain("k", 1), request_id=900).lease not in leases


@pytest.mark.parametrize("kind", ["extents", "entries"])
def test_answers_that_are_kept_whole_are_bounded_in_size(kind: str) -> None:
    world = World(remembered_rows_max=20)
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 8))
    for request in (900, 901, 902, 903):
        if kind == "extents":
            world.ask(ev.Acquire, worker, namespace, chain("k", 8), request_id=request)
        else:
            name = b"%d" % request
            world.ask(ev.UpdateSession, worker, namespace, name, 0, 0, entries("k", 8), request_id=request)
    memory = world.store.state.workers[worker].memory
    memory.check()
    whole = [number for number in range(900, 904) if not isinstance(memory.recall(number), Outline)]
    assert whole == [902, 903]


def entries(name: str, count: int, *, first: int = 0) -> tuple[ev.SessionEntry, ...]:
    return tuple(
        ev.SessionEntry(key, 4 * (first + at), 4) for at, key in enumerate(chain(name, first + count)[first:])
    )


class Repeating:
    """A worker whose answers are kept whole only if they are the newest, and eight chunks."""

    def __init__(self) -> None:
        self.world = World(remembered_rows_max=1)
        self.worker = self.world.join()
        self.namespace = self.world.open(spec(), self.worker)
        self.world.save(self.worker, self.namespace, chain("k", 8))

    def ask(self, number: int, kind: type, *args: Any) -> Any:
        return self.world.ask(kind, self.worker, self.namespace, *args, request_id=number)

    def forget_rows(self) -> None:
        """Another large answer: of the ones before an outline is left."""
        lease = self.world.ask(ev.Acquire, self.worker, self.namespace, chain("k", 8)).lease
        self.world.ask(ev.Release, self.worker, (lease,))


def test_a_large_answer_does_not_push_out_the_others() -> None:
    repeating = Repeating()
    world, worker, namespace = repeating.world, repeating.worker, repeating.namespace
    reserved = world.ask(ev.Reserve, worker, namespace, chain("r", 2))
    committed = world.ask(ev.Commit, worker, reserved.reservation, world.write(reserved), request_id=900)
    repeating.forget_rows()
    assert world.ask(ev.Commit, worker, reserved.reservation, (), request_id=900) is committed


def test_a_repeated_update_of_which_only_an_outline_is_left_is_answered_as_carried_out() -> None:
    repeating = Repeating()
    update = (b"s", 0, 0, entries("k", 8))
    first = repeating.ask(900, ev.UpdateSession, *update)
    repeating.forget_rows()
    assert repeating.ask(900, ev.UpdateSession, *update) == first
    fork = repeating.ask(901, ev.Fork, b"s", b"t")
    cut = repeating.ask(902, ev.Truncate, b"s", first.version, 4, 4)
    repeating.forget_rows()
    assert repeating.ask(901, ev.Fork, b"s", b"t") == fork
    assert repeating.ask(902, ev.Truncate, b"s", first.version, 4, 4) == cut
    # The session has moved on: the outcome is told all the same, and that its entries are not known any more.
    moved_on = ev.SessionInfo(b"s", first.version, (), 0, entries_forgotten=True)
    assert repeating.ask(900, ev.UpdateSession, *update) == moved_on
    assert repeating.ask(990, ev.GetSession, b"s").version == cut.version, "nothing was carried out twice"
    repeating.ask(903, ev.Forget, b"t")
    forgotten = ev.SessionInfo(b"t", fork.version, (), 0, entries_forgotten=True)
    assert repeating.ask(901, ev.Fork, b"s", b"t") == forgotten
    assert repeating.ask(991, ev.GetSession, b"t").version == 0


def test_a_repeated_acquire_of_which_only_an_outline_is_left_gets_the_same_lease() -> None:
    repeating = Repeating()
    leases = repeating.world.store.state.leases.leases
    keys = (*chain("k", 8), *chain("x", 2))
    first = repeating.ask(900, ev.Acquire, keys)
    repeating.forget_rows()
    assert repeating.ask(900, ev.Acquire, keys) == first and len(first.extents) == 8
    assert list(leases) == [first.lease]
    repeating.world.ask(ev.Release, repeating.worker, (first.lease,))
    second = repeating.ask(900, ev.Acquire, keys)
    assert list(leases) == [second.lease] and second.lease != first.lease, "the first one is gone"
    assert repeating.ask(900, ev.Acquire, keys) == second


@pytest.mark.parametrize("shards", [(1,), (-1,), (0, 0), (1 << 31,)])
def test_a_repetition_that_names_other_shards_than_there_are_is_refused(shards: tuple[int, ...]) -> None:
    """The daemon does not take for granted that what has the number of an earlier request asks for the same."""
    repeating = Repeating()
    first = repeating.ask(900, ev.Acquire, chain("k", 8))
    repeating.forget_rows()
    ticket = ev.Ticket(repeating.worker, 900, 1)
    again = ev.Acquire(ticket, repeating.namespace, tuple(chain("k", 8)), shards=shards)
    replies = [effect for effect in repeating.world.store.apply(again, 0) if isinstance(effect, ev.Reply)]
    assert [type(reply.answer) for reply in replies] == [BadRequest]
    assert repeating.ask(900, ev.Acquire, chain("k", 8)) == first


def test_a_repeated_reserve_of_which_only_an_outline_is_left_gets_the_same_reservation() -> None:
    repeating = Repeating()
    reservations = repeating.world.store.state.reservations
    keys = (*chain("k", 2), *chain("r", 4))
    first = repeating.ask(900, ev.Reserve, keys)
    repeating.forget_rows()
    assert repeating.ask(900, ev.Reserve, keys) == first and len(first.extents) == 4
    assert list(reservations) == [first.reservation]
    repeating.world.ask(ev.Abort, repeating.worker, (first.reservation,))
    second = repeating.ask(900, ev.Reserve, keys)
    assert list(reservations) == [second.reservation] and second.results == first.results


def test_a_big_answer_is_kept_whole_until_the_next() -> None:
    world = World()
    worker = world.join()
    memory = world.store.state.workers[worker].memory
    huge = ev.SessionInfo(b"s", 1, (ev.SessionEntry(chain("k", 1)[0], 0, 1),) * 20_000, 0)
    memory.remember(1, huge)
    memory.remember(2, ev.Done())
    assert memory.recall(1) is huge
    memory.remember(3, huge)
    assert memory.recall(1) == SessionOutline(b"s", 1) and memory.recall(2) == ev.Done()


def test_a_conflict_of_two_commits_is_not_remembered_for_the_first() -> None:
    world = World()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.hold = {ev.CopyIn}
    reserved = world.reserve(worker, namespace, chain("k", 1))
    staged = world.write(reserved)
    world.ask(ev.Commit, worker, reserved.reservation, staged, request_id=900)
    with pytest.raises(Conflict):
        world.ask(ev.Commit, worker, reserved.reservation, staged, request_id=901)
    world.finish()
    assert isinstance(world.answers[worker, 900], ev.Committed)
