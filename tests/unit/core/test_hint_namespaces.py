"""Hints by model: each reaches the namespace that has what it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import NotFound
from kvstore.sim.world import World, chain, spec
from kvstore.types import ActionKind, ChunkKey, HintResult, NamespaceId, SessionEntry, WorkerId

ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult


@pytest.fixture
def world() -> World:
    return World()


def version(name: str) -> Any:
    return spec("llama", weights=name.encode())


def record(
    world: World, worker: WorkerId, namespace: NamespaceId, session: str, keys: Sequence[ChunkKey]
) -> None:
    world.tick(1)
    world.save(worker, namespace, keys)
    entries = tuple(SessionEntry(key, 4 * at, 4) for at, key in enumerate(keys))
    world.ask(ev.UpdateSession, worker, namespace, session.encode(), 0, 0, entries)


def publish(
    world: World, worker: WorkerId, namespace: NamespaceId, *hints: ev.Hint, **named: Any
) -> ev.QueueAccepted:
    accepted: ev.QueueAccepted = world.ask(ev.PublishQueue, worker, namespace, hints, by_model=True, **named)
    return accepted


def homes(world: World, worker: WorkerId) -> dict[bytes, NamespaceId]:
    feeds = world.store.queue.feeds.get(worker, {})
    return {name: job.namespace for feed in feeds.values() for name, job in feed.jobs.items()}


def test_a_session_is_found_in_whichever_namespace_of_the_model_it_is(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    other = world.open(spec("another model"), worker)
    record(world, worker, old, "a", chain("a", 2))
    record(world, worker, new, "b", chain("b", 2))
    record(world, worker, other, "c", chain("c", 2))
    hints = [ev.Hint(name.encode(), at, session=name.encode()) for at, name in enumerate("abc")]
    for anchor in (old, new):
        answer = publish(world, scheduler, anchor, *hints)
        assert answer.results == (ACCEPTED, ACCEPTED, REJECTED), "of another model, c is not ours"
        assert answer.namespaces == (new, old), "the one opened last first"
        assert homes(world, scheduler) == {b"a": old, b"b": new}
        publish(world, scheduler, anchor)
    plain = world.ask(ev.PublishQueue, scheduler, new, tuple(hints))
    assert plain.results == (REJECTED, ACCEPTED, REJECTED) and plain.namespaces == ()


def test_of_two_recordings_of_a_session_the_one_used_last_counts(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    record(world, worker, old, "a", chain("a", 2))
    record(world, worker, new, "a", chain("b", 2))
    hint = ev.Hint(b"job", 0, session=b"a")
    publish(world, scheduler, old, hint)
    assert homes(world, scheduler) == {b"job": new}
    world.tick(1)
    world.ask(ev.GetSession, worker, old, b"a")  # rolled back: v1 serves it again
    assert publish(world, scheduler, old, hint, number=1).results == (ACCEPTED,)
    assert homes(world, scheduler) == {b"job": old}, "what is said again is looked for again"
    world.store.queue.check_integrity()


def test_keys_are_looked_for_and_else_belong_to_the_namespace_opened_last(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    world.save(worker, old, chain("a", 3))
    world.save(worker, new, chain("a", 1))
    publish(
        world, scheduler, new, ev.Hint(b"job", 0, keys=chain("a", 4)), ev.Hint(b"none", 1, keys=chain("z", 1))
    )
    assert homes(world, scheduler) == {b"job": old, b"none": new}
    world.open(version("v1"), worker)
    publish(world, scheduler, new, ev.Hint(b"none", 1, keys=chain("z", 1)))
    assert homes(world, scheduler) == {b"none": old}, "a rollback"


def test_a_prompt_has_the_keys_of_each_namespace(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    foreign = world.open(spec("another model"), worker)
    world.save(worker, old, chain("old", 2))
    world.save(worker, foreign, chain("foreign", 3))
    prompts = (
        ev.Prompt(new, chain("new", 2)),
        ev.Prompt(old, chain("old", 2)),
        ev.Prompt(foreign, chain("foreign", 3)),
    )
    assert publish(world, scheduler, new, ev.Hint(b"job", 0), prompts=(prompts,)).results == (ACCEPTED,)
    assert homes(world, scheduler) == {b"job": old}
    world.save(worker, new, chain("new", 3))
    publish(
        world, scheduler, new, ev.Hint(b"job", 0), prompts=((ev.Prompt(new, chain("new", 3)), prompts[1]),)
    )
    assert homes(world, scheduler) == {b"job": new}
    publish(world, scheduler, new, ev.Hint(b"job", 0), prompts=((prompts[2],),))
    assert homes(world, scheduler) == {}, "no model's keys but this one's"


def test_what_a_retired_epoch_had_is_not_looked_for(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old = world.open(spec("llama", epoch=1), worker)
    record(world, worker, old, "a", chain("a", 2))
    new = world.open(spec("llama", epoch=2), worker)
    answer = publish(world, scheduler, new, ev.Hint(b"job", 0, session=b"a"))
    assert answer.results == (REJECTED,) and answer.namespaces == (new,)


def test_another_tenant_s_namespaces_are_not_looked_at(world: World) -> None:
    alice, bob = world.join("alice"), world.join("bob")
    theirs, ours = world.open(version("v1"), alice), world.open(version("v1"), bob)
    record(world, alice, theirs, "a", chain("a", 2))
    answer = publish(world, bob, ours, ev.Hint(b"job", 0, session=b"a"))
    assert answer.results == (REJECTED,) and answer.namespaces == (ours,)
    with pytest.raises(NotFound):
        publish(world, bob, theirs, ev.Hint(b"job", 0, session=b"a"))


def test_numbered_changes_go_on_whatever_namespace_a_job_is_of(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    record(world, worker, old, "a", chain("a", 2))
    record(world, worker, new, "b", chain("b", 2))
    publish(world, scheduler, old, ev.Hint(b"1", 0, session=b"b"), number=1)
    answer = publish(world, scheduler, old, ev.Hint(b"2", 1, session=b"a"), snapshot=False, number=2)
    assert answer.results == (ACCEPTED,) and answer.eviction_window == 2
    lost = publish(world, scheduler, old, ev.Hint(b"3", 2, session=b"a"), snapshot=False, number=4)
    assert lost.snapshot_wanted and lost.namespaces == (new, old)
    publish(world, scheduler, old, removed=(b"1",), snapshot=False, number=3)
    assert homes(world, scheduler) == {b"2": old}


def test_actions_reach_the_namespace_and_end_under_their_name(world: World) -> None:
    worker, scheduler = world.join(), world.join()
    old, new = world.open(version("v1"), worker), world.open(version("v2"), worker)
    record(world, worker, old, "a", chain("a", 2))
    record(world, worker, new, "b", chain("b", 3))

    def act(*actions: ev.HintAction, **named: Any) -> ev.ActionsApplied:
        world.tick(1)
        world.store.actions.check_integrity()
        applied: ev.ActionsApplied = world.ask(
            ev.ApplyActions, scheduler, old, actions, by_model=True, **named
        )
        world.store.actions.check_integrity()
        return applied

    pin, expect = ActionKind.PIN, ActionKind.EXPECT
    answer = act(ev.HintAction(b"1", pin, session=b"a"), ev.HintAction(b"2", expect, session=b"b"))
    assert (answer.results, answer.chunks) == ((ACCEPTED, ACCEPTED), (2, 3))
    assert answer.namespaces == (new, old)
    kept = world.store.actions.kept
    assert [each.job.namespace for each in kept.values()] == [old, new]
    act(ev.HintAction(b"1", pin, session=b"b"))
    assert [each.job.namespace for each in kept.values()] == [new, new], "the same name, elsewhere"
    prompts = ((ev.Prompt(new, chain("b", 1)), ev.Prompt(old, chain("a", 2))),)
    assert act(ev.HintAction(b"3", pin), prompts=prompts).chunks == (2,)
    act(cancelled=(b"1", b"2", b"3"))
    assert not kept
