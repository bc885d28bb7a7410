"""A policy is one file and one line in `POLICIES`: whatever it says, the store keeps its promises."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import kvstore.core
from kvstore.config import StoreConfig
from kvstore.core import events as ev
from kvstore.core.chunks import LISTED, NONE, RANKED, ChunkTable, LinkedRows
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import POLICIES, Candidates, Policy
from kvstore.core.policies.lists import Ranked
from kvstore.errors import ConfigError, StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.disk import DiskWorld
from kvstore.sim.simulation import Simulation
from kvstore.sim.world import PAGE, World, chain, spec
from kvstore.types import ChunkKey, NamespaceId


class Newest(Candidates):
    """What `MostRecent` keeps."""

    def __init__(self) -> None:
        self.rows = LinkedRows()

    @property
    def lists(self) -> Sequence[LinkedRows | Ranked]:
        return (self.rows,)

    @property
    def unneeded(self) -> int:
        return self.rows.count


class MostRecent(Policy):
    """Most recently used first: another policy, by nothing but what a policy has to say of one row. It learns how long
    ghosts were away."""

    away: ClassVar[list[int]] = []

    def candidates(self) -> Newest:
        return Newest()

    def add(self, candidates: Candidates, rows: Sequence[int]) -> None:
        assert isinstance(candidates, Newest)
        for row in rows:
            self._chunks.link_newest(candidates.rows, row)

    def add_last(self, candidates: Candidates, row: int) -> None:
        assert isinstance(candidates, Newest)
        self._chunks.link_oldest(candidates.rows, row)

    def put_back(self, candidates: Candidates, rows: Sequence[int]) -> None:
        self.add(candidates, rows)

    def remove(self, candidates: Candidates, row: int) -> None:
        assert isinstance(candidates, Newest)
        if self._chunks.flags[row] & LISTED:
            self._chunks.unlink(candidates.rows, row)

    def came_back(self, row: int) -> None:
        self.away.append(self._chunks.used_at[row])

    def unneeded(self, *lists: Candidates) -> Iterator[int]:
        for candidates in lists:
            assert isinstance(candidates, Newest)
            row = candidates.rows.newest
            while row != NONE:
                following = self._chunks.older[row]
                yield row
                row = following

    def check_row(self, candidates: Candidates, row: int) -> LinkedRows | Ranked:
        assert isinstance(candidates, Newest) and not self._chunks.flags[row] & RANKED
        return candidates.rows


@pytest.fixture
def most_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mru", MostRecent)
    monkeypatch.setattr(MostRecent, "away", [])


@pytest.mark.usefixtures("most_recent")
def test_the_setting_knows_what_is_registered() -> None:
    assert StoreConfig(eviction="mru").limits.eviction == "mru"
    with pytest.raises(ConfigError, match='must be one of "expected", "hints", "lru", "fifo", "mru"'):
        StoreConfig(eviction="random")


@pytest.mark.usefixtures("most_recent")
def test_another_policy_says_who_goes_and_learns_who_comes_back() -> None:
    world = World(segments=1, segment_bytes=8 * PAGE, eviction="mru", reserve_share_max=1.0)
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(8):
        world.tick(10)
        world.save(worker, namespace, chain(f"{number}", 1))
    world.save(worker, namespace, chain("8", 1))
    gone = chain("7", 1)
    assert world.outcomes(worker, namespace, gone) == ["EVICTED"]
    went_at = world.now
    world.tick(500)
    world.save(worker, namespace, gone)
    assert MostRecent.away == [went_at]
    assert world.outcomes(worker, namespace, chain("8", 1)) == ["EVICTED"]


@pytest.mark.usefixtures("most_recent")
def test_another_policy_says_who_leaves_the_ssd() -> None:
    world = DiskWorld(
        segments=1, segment_bytes=8 * PAGE, slabs=1, slab_slots=8, eviction="mru", reserve_share_max=1.0
    )
    worker = world.join()
    namespace = world.open(spec(), worker)
    for number in range(20):
        world.save(worker, namespace, chain(f"{number}", 1))
        world.tick(100)
    state = world.store.state
    assert state.counters["chunks_evicted_from_ssd"] > 3
    (cold,) = state.cold.by_sizes.values()
    assert isinstance(cold, Newest)


@pytest.mark.parametrize("number", range(2))
def test_every_life_keeps_the_invariants_under_another_policy(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in POLICIES:  # whatever is drawn, it is this
        monkeypatch.setitem(POLICIES, name, MostRecent)
    simulation = Simulation(random.SystemRandom().randrange(1 << 32), 1_500)
    simulation.run()
    assert isinstance(simulation.cluster.store.state.policy, MostRecent)


def test_nobody_else_looks_into_what_a_policy_keeps() -> None:
    """The lists belong to the policies and to the twins of their methods; all others ask the policy."""
    core = Path(kvstore.core.__file__).parent
    kept = [type(policy(ChunkTable(), 2).candidates()) for policy in POLICIES.values()]
    own = {name for kind in kept for part in kind.__mro__ for name in getattr(part, "__slots__", ())}
    assert own == {
        *("recency", "ranked", "by_arrival", "added_last"),
        *("aged_at", "by_use", "by_worth", "in_order", "row_count", "worth_versions"),
    }
    theirs = {core / "bulk" / "needed.py", *(core / "policies").glob("*.py")}
    wrong = []
    for path in sorted(set(core.parent.rglob("*.py")) - theirs):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in own:
                wrong.append(f"{path.relative_to(core.parent)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


class Alone:
    """A policy, and rows that are resident in one namespace: some needed, some used long ago."""

    def __init__(self, name: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.table = ChunkTable()
        groups = NamespaceSpec("m", b"w", "l", 4, (GroupSpec("kv", 4096),))
        self.space = Namespace(NamespaceId(1), "alice", groups, b"f", 1, (4096,), 4096)
        self.policy = POLICIES[name](self.table, 1 << 30)
        self.policy.opened(self.space)
        self.space.dram, self.space.ssd = self.policy.candidates(), self.policy.candidates()
        self.rows = [self.table.new_row(1, ChunkKey(b"%d" % number), number) for number in range(60)]
        for row in self.rows:
            self.table.give_shards(row, 1)
            self.table.ready[row] = 1
        needed = self.dice.sample(self.rows, 12)
        self.policy.set_ranks({self.space.id: self.space}, {row: place for place, row in enumerate(needed)})
        self.policy.add(self.space.dram, self.rows[:40])

    def victims(self) -> list[int]:
        return list(self.policy.victims(self.space.dram, 1_000))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["expected", "hints", "lru", "fifo", "mru"])
@pytest.mark.usefixtures("most_recent")
def test_bulk_methods_do_what_the_single_ones_do(name: str, seed: int) -> None:
    one, many = Alone(name, seed), Alone(name, seed)
    gone = one.dice.sample(one.rows[:40], 17)
    for row in gone:
        one.policy.remove(one.space.dram, row)
    many.policy.remove_many(many.space.dram, np.array(gone))
    assert one.victims() == many.victims() and len(one.victims()) == 23
    come = gone[:7] + one.rows[40:]
    for row in come:
        one.policy.add_last(one.space.dram, row)
    many.policy.add_last_many(many.space.dram, np.array(come))
    assert one.victims() == many.victims() and set(come) <= set(one.victims())
    for row in gone[7:]:
        one.policy.forget(row)
    many.policy.forget_many(gone[7:])
    assert one.policy.rank == many.policy.rank
    for alone in (one, many):
        for row in alone.victims():
            assert alone.policy.check_row(alone.space.dram, row) in alone.space.dram.lists


@pytest.mark.parametrize("name", ["expected", "hints", "lru", "fifo", "mru"])
@pytest.mark.usefixtures("most_recent")
def test_what_is_passed_over_goes_last_of_what_nobody_needs(name: str) -> None:
    alone = Alone(name, 1)
    unneeded = list(alone.policy.unneeded(alone.space.dram))
    assert len(unneeded) == alone.space.dram.unneeded
    assert alone.space.dram.count == 40
    for row in unneeded[:3]:
        alone.policy.pass_over(alone.space.dram, row)
    assert list(alone.policy.unneeded(alone.space.dram)) == [*unneeded[3:], *unneeded[:3]]


@pytest.mark.parametrize("name", ["expected", "hints", "lru", "fifo", "mru"])
@pytest.mark.usefixtures("most_recent")
def test_a_world_of_two_models_above_an_ssd_keeps_the_invariants(name: str) -> None:
    """Slots of two sizes in files that fill up: the SSD's victims come from several lists at once."""
    dice = random.Random(7)
    world = DiskWorld(
        segments=4, segment_bytes=16 * PAGE, slabs=4, slab_slots=8, eviction=name, reserve_share_max=1.0,
        batch_min=3, evict_min=2,
    )  # fmt: skip
    worker = world.join()
    groups = (GroupSpec("one", PAGE), GroupSpec("two", 2 * PAGE))
    spaces = [world.open(each, worker) for each in (spec(), spec("others", groups=groups))]
    for _ in range(60):
        world.tick(dice.randrange(100))
        keys = chain(f"{dice.randrange(12)}", dice.randrange(1, 7))
        try:
            if dice.random() < 0.6:
                reserved = world.reserve(worker, dice.choice(spaces), keys)
                if reserved.reservation:
                    world.commit(worker, reserved)
            else:
                acquired = world.acquire(worker, dice.choice(spaces), keys, prefix_only=False)
                if acquired.lease:
                    world.release(worker, acquired.lease)
        except StoreError:
            pass
        world.step(ev.Idle())
    assert world.store.state.counters["chunks_evicted_from_ssd"]
