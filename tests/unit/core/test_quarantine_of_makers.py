"""Workers that find chunks wrong: who made them is quarantined for their tenant, if that can be believed."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.requests import recall
from kvstore.errors import BadRequest, Denied, NotFound
from kvstore.sim.world import World, chain, spec
from kvstore.types import NamespaceId, Outcome, Reason, WorkerId

SICK, OTHER = b"1" * 16, b"2" * 16


def start(**settings: Any) -> tuple[World, WorkerId, NamespaceId]:
    world = World(**settings)
    worker = world.join(group="one")
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("sick", 4), maker=SICK)
    world.save(worker, namespace, chain("good", 4), maker=OTHER)
    return world, worker, namespace


def wrong(world: World, worker: WorkerId, namespace: NamespaceId, *keys: Any, healthy: bool) -> int:
    done: ev.Done = world.ask(ev.ReportDuplicates, worker, namespace, keys, (), wrong=True, healthy=healthy)
    return done.count


def hits(world: World, worker: WorkerId, namespace: NamespaceId, name: str) -> int:
    matched: ev.Matched = world.ask(ev.Match, worker, namespace, chain(name, 4), 4 * 64 + 1)
    return sum(outcome is Outcome.HIT for outcome in matched.outcomes)


def test_a_healthy_worker_is_believed() -> None:
    world, worker, namespace = start()
    assert wrong(world, worker, namespace, chain("sick", 4)[2], healthy=True) == 1
    assert hits(world, worker, namespace, "sick") == 0 and hits(world, worker, namespace, "good") == 4
    matched = world.ask(ev.Match, worker, namespace, chain("sick", 1), 65)
    assert matched.reasons[0] is Reason.RECALLED
    with pytest.raises(Denied, match="was recalled"):
        world.reserve(worker, namespace, chain("new", 1), maker=SICK)
    assert world.store.state.counters["makers_quarantined"] == 1
    assert wrong(world, worker, namespace, chain("sick", 4)[2], healthy=True) == 0, "it is gone"


def test_a_sick_checker_purges_nothing_however_often_it_asks() -> None:
    world, worker, namespace = start()
    rank = world.join(group="one")
    world.open(spec(), rank)
    for who in (worker, worker, rank):  # ranks of one engine are one opinion
        assert wrong(world, who, namespace, *chain("good", 4), healthy=False) == 0
    assert hits(world, worker, namespace, "good") == 4
    world.save(worker, namespace, chain("more", 1), maker=OTHER)


def test_a_second_engine_that_agrees_is_enough() -> None:
    world, worker, namespace = start()
    second = world.join(group="two")
    world.open(spec(), second)
    assert wrong(world, worker, namespace, chain("sick", 1)[0], healthy=False) == 0
    assert wrong(world, second, namespace, chain("good", 1)[0], healthy=False) == 0, "another maker"
    assert hits(world, worker, namespace, "sick") == 4
    assert wrong(world, second, namespace, chain("sick", 4)[3], healthy=False) == 1
    assert hits(world, worker, namespace, "sick") == 0 and hits(world, worker, namespace, "good") == 4


def test_another_tenants_maker_of_the_same_name_is_not_touched() -> None:
    """Callers name makers themselves: nobody may purge what is another's by naming it."""
    world, worker, namespace = start()
    stranger = world.join(tenant="stranger")
    theirs = world.open(spec(), stranger)
    world.save(stranger, theirs, chain("bait", 2), maker=SICK)
    assert wrong(world, stranger, theirs, chain("bait", 1)[0], healthy=True) == 1
    assert hits(world, stranger, theirs, "bait") == 0 and hits(world, worker, namespace, "sick") == 4
    world.save(worker, namespace, chain("more", 1), maker=SICK)
    with pytest.raises(Denied):
        world.reserve(stranger, theirs, chain("bait", 1), maker=SICK)
    with pytest.raises(NotFound):
        wrong(world, stranger, namespace, chain("sick", 1)[0], healthy=True)


def test_what_is_not_there_or_has_no_maker_proves_nothing() -> None:
    world, worker, namespace = start()
    world.save(worker, namespace, chain("nameless", 1))
    keys = (*chain("nameless", 1), *chain("unknown", 1))
    assert wrong(world, worker, namespace, *keys, healthy=True) == 0
    assert not world.store.state.counters["makers_quarantined"]
    with pytest.raises(BadRequest, match="checksums"):
        world.ask(ev.ReportDuplicates, worker, namespace, chain("sick", 1), (1,), wrong=True)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "ACCUSED_MAX", 3)
    world, worker, namespace = start()
    for number in range(6):
        world.save(worker, namespace, chain(f"m{number}", 1), maker=b"%16d" % number)
        assert wrong(world, worker, namespace, *chain(f"m{number}", 1), healthy=False) == 0
    assert len(world.store.recalls._accused) == 3
    for number in range(6):
        assert wrong(world, worker, namespace, *chain(f"m{number}", 1), healthy=True) == 1
    assert not world.store.recalls._accused and not world.store.recalls.purges
