"""What other nodes have forgotten is a miss here; what came from others goes when nobody can be heard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import FETCHING
from kvstore.keys import tenant_mark
from kvstore.layout import DOCTORS_LAYOUT
from kvstore.sim.remote_world import RemoteWorld
from kvstore.sim.world import PAGE, chain, spec
from kvstore.types import ChunkKey, DiskResult, NamespaceId, Reason, WorkerId

KEYS = chain("k", 4)
NOTHING = (b"", ChunkKey(b""), b"")


def start(**limits: Any) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    defaults: dict[str, Any] = {"segments": 2, "segment_bytes": 8 * PAGE, "reserve_share_max": 1.0}
    remote = {"remote_store": "remote", "remote_writes": "write-through", "forget_within_ms": 60_000}
    world = RemoteWorld(**{**defaults, **remote, **limits})
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def digest(world: RemoteWorld, namespace: NamespaceId) -> bytes:
    return world.store.state.namespaces[namespace].salt


def heard(world: RemoteWorld, *forgotten: tuple[bytes, ChunkKey, bytes], count: int, age_ms: int = 0) -> None:
    world.step(ev.ForgottenElsewhere("remote", forgotten, count, age_ms))


def fetch(world: RemoteWorld, worker: WorkerId, namespace: NamespaceId) -> None:
    world.put_elsewhere(namespace, KEYS)
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    for lease in list(world.store.state.leases.leases):
        world.ask(ev.Release, worker, (lease,))


@pytest.mark.parametrize("fetched", [True, False])
def test_a_key_that_another_node_forgot_is_a_miss_here(fetched: bool) -> None:
    world, worker, namespace = start()
    if fetched:
        fetch(world, worker, namespace)
    else:
        world.save(worker, namespace, KEYS)
    heard(world, (digest(world, namespace), KEYS[1], b""), count=5)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT", "FORGOTTEN", "HIT", "HIT"]
    assert world.store.state.applied == {"remote": 5}
    assert not world.tombstones, "a node that heard of a forget tells of it again"


def test_on_ssd_too_and_for_good() -> None:
    world, worker, namespace = start(slabs=1, slab_slots=8)
    world.save(worker, namespace, KEYS)
    world.tick(10_000)
    heard(world, (digest(world, namespace), KEYS[0], b""), count=1)
    world.tick(10_000)
    assert world.outcomes(worker, namespace, KEYS)[0] == "FORGOTTEN"
    assert (namespace, KEYS[0]) not in world.platter.chunks and (namespace, KEYS[1]) in world.platter.chunks


def test_a_namespace_a_maker_and_everything() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    heard(world, (b"of a namespace that is not open here" * 1, ChunkKey(b""), b""), count=1)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    heard(world, (digest(world, namespace), ChunkKey(b""), b""), count=2)
    assert "HIT" not in world.outcomes(worker, namespace, KEYS)
    others = chain("o", 2)
    world.save(worker, namespace, others, maker=b"m" * 16)
    heard(world, (b"", ChunkKey(b""), b"m" * 16), count=3)
    assert world.outcomes(worker, namespace, others) == ["RECALLED"] * 2
    with pytest.raises(Exception, match="was recalled"):
        world.save(worker, namespace, chain("p", 1), maker=b"m" * 16)
    more = chain("q", 2)
    world.save(worker, namespace, more)
    heard(world, NOTHING, count=9)
    assert "HIT" not in world.outcomes(worker, namespace, more)


def test_what_was_on_its_way_when_it_was_forgotten_does_not_arrive() -> None:
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    heard(world, (digest(world, namespace), KEYS[0], b""), count=1)
    world.finish()
    assert world.outcomes(worker, namespace, KEYS[:1]) != ["HIT"]
    assert world.outcomes(worker, namespace, KEYS[1:]) == ["HIT"] * 3


def test_what_came_and_is_newer_than_the_forget_is_served() -> None:
    """A node reads of the forget and of what was written after it in one call."""
    world, worker, namespace = start()
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    world.count = 2
    heard(world, (digest(world, namespace), KEYS[0], b""), (b"", ChunkKey(b""), b"m" * 16), count=2)
    world.finish()
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4


def wait_for_room(**limits: Any) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    """Two chunks are on their way, and two wait until they are here."""
    world, worker, namespace = start(remote_bytes_in_flight_max=2 * PAGE, **limits)
    world.put_elsewhere(namespace, KEYS)
    world.hold = {ev.FetchChunks}
    world.ask(ev.Acquire, worker, namespace, KEYS, wait_ms=1_000)
    assert [effect.keys for effect in world.held] == [KEYS[:2]]
    world.looked_up.clear()
    return world, worker, namespace


def coming(world: RemoteWorld) -> list[bool]:
    """Of each of `KEYS`, whether it is on its way still."""
    (namespace,) = world.store.state.namespaces.values()
    flags = world.store.state.chunks.flags
    return [bool(flags[namespace.index[key]] & FETCHING) for key in KEYS]


@pytest.mark.parametrize("number", [0, 3])
def test_what_was_saved_again_after_a_forget_comes_though_it_was_asked_for_before(number: int) -> None:
    """The forget is heard while the chunk waits for its turn (3), or is on its way (0)."""
    world, worker, namespace = wait_for_room()
    heard(world, (digest(world, namespace), KEYS[number], b""), count=1)
    world.finish()
    world.count = 1
    while world.held:
        world.finish()
    assert world.looked_up == [KEYS[number]]
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4


def test_what_one_channel_says_was_forgotten_comes_from_another() -> None:
    world, worker, namespace = wait_for_room(
        sources=("peers", "remote"), forgets_told=("peers", "remote"), remote_writes="off"
    )
    salt = digest(world, namespace)
    world.elsewhere["peers"], world.elsewhere["remote"] = world.elsewhere["remote"], {}
    heard(world, (salt, KEYS[0], b""), (salt, KEYS[3], b""), count=1)
    while world.held:
        world.finish()
    assert world.outcomes(worker, namespace, KEYS[:1] + KEYS[3:]) == ["HIT"] * 2


def test_each_forget_is_a_reason_once_to_ask_anew() -> None:
    world, worker, namespace = wait_for_room()
    salt = digest(world, namespace)
    heard(world, (salt, KEYS[3], b""), count=1)
    world.count = 1
    world.finish()
    assert world.looked_up == [KEYS[3]] and coming(world)[3]
    heard(world, (salt, KEYS[3], b""), count=2)
    while world.held:
        world.finish()  # what comes is older than the second
    assert world.looked_up == [KEYS[3]] * 2
    assert coming(world) == [False] * 4
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 3 + ["EVICTED"]


@pytest.mark.parametrize("trouble", ["gone", "late", "failed", "own"])
def test_what_nobody_has_after_a_forget_is_a_miss_and_nothing_waits_for_it(trouble: str) -> None:
    world, worker, namespace = wait_for_room(lookup_deadline_ms=100)
    salt = digest(world, namespace)
    world.hold |= {ev.LookUpChunks}
    heard(world, (salt, KEYS[3], b""), count=1)
    world.finish()
    assert coming(world) == [False, False, True, True]
    assert world.held[-1].keys == (KEYS[3],)
    if trouble == "gone":
        del world.elsewhere["remote"][salt, KEYS[3]]
        world.finish(world.held[-1])
    elif trouble == "late":
        world.tick(101)
    elif trouble == "failed":
        world.finish(world.held[-1], fails="connection refused")
    else:
        world.hold -= {ev.LookUpChunks}
        world.ask(ev.Forget, worker, namespace, b"", KEYS[3:])
        world.finish(world.held[-1])
    while world.held:
        world.finish()
    assert coming(world) == [False] * 4
    reason = {"late": "SLOW", "own": "FORGOTTEN"}.get(trouble, "EVICTED")
    row = world.store.state.namespaces[namespace].index[KEYS[3]]
    assert Reason(world.store.state.chunks.reason[row]).name == reason


def test_a_source_that_is_left_alone_is_not_asked_anew() -> None:
    world, _, namespace = wait_for_room(source_pause_ms=60_000)
    heard(world, (digest(world, namespace), KEYS[3], b""), count=1)
    world.store.sources.is_late("remote", "as told")
    world.finish(fails="IO_ERROR")
    assert not world.looked_up and coming(world) == [False] * 4


def test_who_asks_while_sources_are_asked_anew_waits_for_their_answer() -> None:
    world, worker, namespace = wait_for_room()
    world.hold |= {ev.LookUpChunks}
    heard(world, (digest(world, namespace), KEYS[3], b""), count=1)
    world.finish()
    world.ask(ev.Acquire, worker, namespace, KEYS[3:], wait_ms=1_000)
    assert [effect.keys for effect in world.held if isinstance(effect, ev.LookUpChunks)] == [KEYS[3:]]
    world.count = 1
    while world.held:
        world.finish()
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4


def test_what_is_saved_after_it_stays_and_says_which_forgets_it_is_newer_than() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    heard(world, (digest(world, namespace), KEYS[0], b""), count=7)
    world.hold = {ev.StoreChunks}
    world.save(worker, namespace, KEYS[:1])
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    assert {effect.generation for effect in world.held} == {7}


def test_many_are_heeded_in_parts_and_counted_when_all_are() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    salt = digest(world, namespace)
    unknown = [(salt, ChunkKey(n.to_bytes(32, "little")), b"") for n in range(5_000)]
    heard(world, *unknown, (salt, KEYS[0], b""), count=3)
    assert not world.store.state.applied and world.store.has_ahead()
    heard(world, count=4)
    world.step(ev.Idle())
    assert world.store.state.applied == {"remote": 4}
    assert world.outcomes(worker, namespace, KEYS[:1]) == ["FORGOTTEN"]


def test_what_came_from_others_goes_when_nobody_is_heard_and_what_is_ours_stays() -> None:
    world, worker, namespace = start()
    own = chain("own", 2)
    heard(world, count=1)
    fetch(world, worker, namespace)
    world.save(worker, namespace, own)
    world.tick(59_000)
    assert world.outcomes(worker, namespace, [*KEYS, *own]) == ["HIT"] * 6
    heard(world, count=1, age_ms=30_000)
    world.tick(29_000)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4
    world.elsewhere["remote"].clear()
    world.tick(1_000)
    assert "HIT" not in world.outcomes(worker, namespace, KEYS)
    assert world.outcomes(worker, namespace, own) == ["HIT"] * 2
    heard(world, count=1)
    world.tick(2_000)
    fetch(world, worker, namespace)


def test_without_a_bound_it_stays() -> None:
    world, worker, namespace = start(forget_within_ms=0)
    fetch(world, worker, namespace)
    world.tick(10_000_000)
    assert world.outcomes(worker, namespace, KEYS) == ["HIT"] * 4


def test_a_node_that_stood_still_serves_nothing_of_others_before_it_has_heard() -> None:
    """The first request after a standstill comes before any tick."""
    world, worker, namespace = start(remote_writes="off")
    heard(world, count=1)
    fetch(world, worker, namespace)
    world.elsewhere["remote"].clear()
    world.now += 61_000
    assert "HIT" not in world.outcomes(worker, namespace, KEYS)


def test_two_channels_both_know_before_it_is_answered_and_either_is_enough_to_hear() -> None:
    world, worker, namespace = start(sources=("peers", "remote"), forgets_told=("peers", "remote"))
    fetch(world, worker, namespace)
    world.hold = {ev.ForgetChunks}
    assert world.ask(ev.Forget, worker, namespace, b"", KEYS[:1]) is None
    first, second = world.held
    assert {first.source, second.source} == {"peers", "remote"}
    world.finish(first)
    assert not [reply for reply in world.replies if isinstance(reply.answer, ev.Done)]
    world.finish(second, fails="it is away")
    (reply,) = [reply for reply in world.replies if isinstance(reply.answer, ev.Done)]
    assert "it is away" in reply.answer.not_durable
    world.hold = set()
    world.tick(50_000)
    heard(world, count=1)
    world.tick(50_000)
    assert world.outcomes(worker, namespace, KEYS[1:]) == ["HIT"] * 3


def test_each_answer_says_whether_the_channel_knows_what_was_forgotten_before_it() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, KEYS)
    world.hold = {ev.ForgetChunks}

    def forget(number: int, *, fails: str) -> str:
        assert world.ask(ev.Forget, worker, namespace, b"", KEYS[number : number + 1]) is None
        world.finish(fails=fails)
        answer: str = world.replies[-1].answer.not_durable
        return answer

    def waiting() -> float:
        return world.store.forgets.gauges()["remote_forgets_waiting"]

    assert "(away)" in forget(0, fails="away") and "(away)" in forget(1, fails="away")
    assert waiting() == 2
    assert world.ask(ev.Forget, worker, namespace, b"", KEYS[:1]) is None, "asked again: it is told again"
    world.finish(fails="still away")
    assert "(still away)" in world.replies[-1].answer.not_durable
    assert forget(2, fails="") == "" and waiting() == 0, "what could not be told before goes along"
    assert forget(3, fails="") == ""


def test_what_is_of_one_node_is_told_to_nobody() -> None:
    """The doctor's chunks, in an outage too: the alert is of forgets that somebody needs."""
    world, worker, _ = start()
    mine = world.open(replace(spec("kvctl-doctor"), layout_fingerprint=DOCTORS_LAYOUT), worker)
    world.save(worker, mine, KEYS)
    world.tick(10_000)
    assert not world.elsewhere["remote"], "it went to the REMOTE store"
    world.hold = {ev.ForgetChunks}
    answer = world.ask(ev.Forget, worker, mine, b"", KEYS)
    assert (answer.count, answer.not_durable) == (len(KEYS), "")
    assert world.store.forgets.gauges()["remote_forgets_waiting"] == 0


def test_what_a_channel_did_not_know_before_a_start_is_shown() -> None:
    world, _, _ = start()
    world.step(ev.ForgottenElsewhere("remote", (), 0, untold=7))
    assert world.store.forgets.gauges()["remote_forgets_waiting"] == 7
    world.step(ev.ForgottenElsewhere("remote", (), 0))
    assert world.store.forgets.gauges()["remote_forgets_waiting"] == 0


# ----------------------------------------------------------------------------------------- what a start need not heed


def reached(position: int, journal: bytes = b"j" * 16) -> ev.Heeded:
    return ev.Heeded("remote", journal, position)


def tell(world: RemoteWorld, *forgotten: tuple[bytes, ChunkKey, bytes], position: int) -> None:
    world.step(ev.ForgottenElsewhere("remote", forgotten, position, 0, reached(position)))


def on_ssd(**limits: Any) -> tuple[RemoteWorld, WorkerId, NamespaceId]:
    world, worker, namespace = start(slabs=2, slab_slots=8, durable_within_ms=200, **limits)
    world.save(worker, namespace, KEYS)
    world.tick(5_000)
    assert len(world.platter.chunks) == 4
    return world, worker, namespace


def test_the_index_says_what_was_heeded_after_it_has_left_it() -> None:
    """A crash before that heeds again; the index never says it before."""
    world, _, namespace = on_ssd()
    world.hold.add(ev.WriteIndex)
    tell(world, (digest(world, namespace), KEYS[0], b""), position=1)
    world.tick(1_000)
    (deleting,) = world.held
    assert deleting.chunks_deleted and not deleting.heeded and not world.platter.heeded
    world.finish()
    world.tick(1_000)
    (writing,) = world.held
    assert writing.heeded == (reached(1),) and len(world.platter.chunks) == 3
    world.finish()
    assert world.platter.heeded == {"remote": reached(1)}
    world.crash()
    assert world.store.state.heeded == {"remote": reached(1)}


def test_a_deletion_that_fails_leaves_it_to_be_heeded_again() -> None:
    world, _, namespace = on_ssd()
    world.faults[ev.WriteIndex] = DiskResult.IO_ERROR
    tell(world, (digest(world, namespace), KEYS[0], b""), position=1)
    for _ in range(20):
        world.tick(200)
    assert not world.platter.heeded and len(world.platter.chunks) == 4
    world.faults.clear()
    for _ in range(40):
        world.tick(200)
    assert world.platter.heeded == {"remote": reached(1)} and len(world.platter.chunks) == 3


def test_what_fails_to_be_written_is_written_again() -> None:
    world, _, _ = on_ssd()
    world.hold.add(ev.WriteIndex)
    tell(world, position=1)
    world.tick(1_000)
    assert world.held[0].heeded
    world.finish(fails="IO_ERROR")
    world.hold.clear()
    for _ in range(40):
        world.tick(200)
    assert world.platter.heeded == {"remote": reached(1)}


def test_many_forgets_neither_hurry_nor_put_off_what_the_index_says() -> None:
    """Something always is to go: deletions and writes take turns then. What the index says has left it at any time, and
    what was heeded first is waited for, whatever comes meanwhile."""
    world, _, namespace = on_ssd()
    world.hold.add(ev.WriteIndex)
    said = []
    for position, key in enumerate(KEYS, 1):
        tell(world, (digest(world, namespace), key, b""), position=position)
        world.tick(100)
        (op,) = world.held
        world.finish()
        said.append(world.platter.heeded["remote"].position if world.platter.heeded else 0)
        left = {each for _, each in world.platter.chunks}
        assert not left & set(KEYS[: said[-1]]), f"the index has what it says has left it, with {op}"
    assert said[-1] > 0, said


def test_a_store_without_ssd_notes_nothing() -> None:
    world, worker, namespace = start(slabs=0)
    world.save(worker, namespace, KEYS)
    tell(world, (digest(world, namespace), KEYS[0], b""), position=1)
    world.tick(2_000)
    assert not world.store.state.heeded and not world.store.behind


@pytest.mark.parametrize("beyond", [ev.TenantPurged, ev.ForgetSessions])
def test_a_purge_is_heeded_when_the_edge_has_removed_what_it_keeps(beyond: type) -> None:
    """Schemas, and what other nodes were told of its sessions: nobody else asks for that again."""
    world, _, _ = on_ssd(sessions_told="remote")
    world.hold.add(beyond)
    tell(world, (b"", ChunkKey(b""), tenant_mark("alice")), position=1)
    for _ in range(20):
        world.tick(200)
    assert not world.platter.chunks and not world.platter.heeded
    assert [type(op) for op in world.held] == [beyond]
    world.finish()
    for _ in range(20):
        world.tick(200)
    assert world.platter.heeded == {"remote": reached(1)}
