"""Each function of `kvstore/core/bulk` does to many rows what the methods that it names do to one after another: of two
copies of a store that has lived, one goes on one by one and the other in bulk, and all that there is is compared."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore.core.bulk
from kvstore.core import events as ev
from kvstore.core.bulk import (
    HELPERS,
    TWINS,
    batch,
    cohorts,
    ghosts,
    needed,
    recency,
    references,
    slots,
    table,
)
from kvstore.core.chunks import DERIVED, DOOMED, LISTED, NONE, RANKED, STORED, TAIL, TRANSIENT, LinkedRows
from kvstore.core.policies.expected import Expected
from kvstore.core.policies.lists import Ranked
from kvstore.core.requests.reads import lookup
from kvstore.core.store import Store
from kvstore.core.workers import EngineGroup
from kvstore.errors import StoreError
from kvstore.sim.disk import DiskWorld
from kvstore.sim.integrity import ROW_COLUMNS, SHARD_COLUMNS
from kvstore.sim.world import PAGE, spec
from kvstore.types import ChunkKey, Reason, SlotState

NEVER = 1 << 30
MAKERS = (b"one maker of 16 ", b"the other maker ")
SEEDS = range(3)


class Life:
    """A store in which something of everything has happened, one by one; the same for the same seed."""

    def __init__(self, seed: int, shards: int, eviction: str = "hints") -> None:
        self.dice = dice = random.Random(seed)
        world = DiskWorld(
            segments=6, segment_bytes=32 * PAGE, slabs=30, slab_slots=16, batch_min=NEVER, evict_min=NEVER,
            reserve_share_max=1.0, pin_share_max=1.0, ghosts_max=60, eviction=eviction, lease_ttl_ms=60_000,
        )  # fmt: skip
        worker = world.join()
        number = world.open(spec(shards=shards), worker)
        chains = [[ChunkKey(b"%d %d" % (chain, place)) for place in range(40)] for chain in range(4)]
        for step in range(50):
            world.tick(dice.randrange(200))
            if step == 35:
                world.hold = {ev.WriteRecords}  # what comes from now on is in DRAM alone
            first = dice.randrange(30)
            keys = tuple(dice.choice(chains)[first : first + dice.randrange(1, 12)])
            action = dice.random()
            try:
                if action < 0.5:
                    reserved = world.reserve(worker, number, keys, maker=dice.choice((b"", *MAKERS)))
                    if reserved.reservation:
                        world.commit(worker, reserved)
                elif action < 0.8:
                    acquired = world.acquire(worker, number, keys, prefix_only=False)
                    if acquired.lease and dice.random() < 0.8:
                        world.release(worker, acquired.lease)
                elif action < 0.85:
                    world.append(worker, number, b"session %d" % step, keys)
                elif action < 0.9 and step < 45:
                    world.ask(ev.Forget, worker, number, keys=keys)
                elif action < 0.95:
                    world.ask(ev.PublishQueue, worker, number, (ev.Hint(b"job", 0, keys=keys),))
            except StoreError:
                pass
        self.store: Store = world.store
        self.state = world.store.state
        self.chunks = self.state.chunks
        self.space = self.state.namespaces[number]
        self.policy: Any = self.state.policy
        self.dram: Any = self.space.dram

    def rows(self, which: Callable[[int], object] = lambda row: True) -> list[int]:
        """Some of the rows that are so, in any order."""
        found = [row for row in self.space.index.values() if which(row)]
        assert found, "the life that is lived here has none: let it happen"
        return self.dice.sample(found, self.dice.randrange(1, len(found) + 1))

    def resident(self, row: int) -> bool:
        return self.state.is_hit(row)

    def candidate(self, row: int) -> bool:
        return self.resident(row) and bool(self.chunks.flags[row] & LISTED)

    def unneeded(self, row: int) -> bool:
        return self.candidate(row) and not self.chunks.flags[row] & RANKED

    def new_keys(self) -> list[ChunkKey]:
        return [ChunkKey(b"new %d" % number) for number in range(self.dice.randrange(1, 12))]

    def slab(self) -> Any:
        return self.state.pool.classes[self.space.id, self.space.slot_bytes[0]]

    def free_slots(self, count: int) -> Any:
        """The slab class, in which there are so many."""
        state, slab = self.state, self.slab()
        while slab.free < count:
            row = next(row for row in self.space.index.values() if self.candidate(row))
            if not self.store.segments._leave_dram(row):
                state.to_ghost(row, Reason.EVICTED)
        return slab

    def no_free_slots(self) -> Any:
        slab = self.slab()
        while slab.free:
            self.state.pool.take(slab, 0)
        return slab

    def victims(self) -> tuple[list[int], bool]:
        """Candidates that are all on SSD, or none is, and are not about to be."""
        rows = self.rows(self.unneeded)
        stored = bool(self.chunks.flags[rows[0]] & STORED)
        same = [row for row in rows if bool(self.chunks.flags[row] & STORED) == stored]
        return [row for row in same if not self.store.segments._has_to_stay(row)] or same[:1], stored

    def begun(self, keys: list[ChunkKey]) -> list[int]:
        """One by one: rows for new keys, with RESERVED slots."""
        state, rows = self.state, []
        slab = self.free_slots(len(keys) * self.space.shards)
        for key in keys:
            row = self.space.index[key] = self.chunks.new_row(self.space.id, key, state.now)
            state.begin_chunk(self.space, row)
            for shard in range(self.space.shards):
                taken = state.pool.take(slab, row)
                assert taken is not None
                state.place_shard(row, shard, *taken)
            rows.append(row)
        return rows

    def all(self) -> Iterator[tuple[str, Any]]:
        """All that there is, by what it is."""
        state, chunks = self.state, self.chunks
        yield "rows", (chunks.rows_ever, chunks._shards, list(chunks.free_rows))
        yield "free shards", {shards: list(starts) for shards, starts in chunks.free_shards.items()}
        for column in (*ROW_COLUMNS, "key", "tokens", "hits", "born_at"):
            yield column, list(getattr(chunks, column)[: chunks.rows_ever])
        for column in SHARD_COLUMNS:
            yield column, list(getattr(chunks, column)[: chunks._shards])
        yield "makers", [chunks.maker(row) for row in range(chunks.rows_ever)]
        lists: list[LinkedRows | Ranked] = [state.ghosts, state.partials]
        for candidates in (
            *state.cold.by_sizes.values(),
            *(space.dram for space in state.namespaces.values()),
        ):
            lists += candidates.lists
        for number, rows in enumerate(lists):
            if isinstance(rows, LinkedRows):
                yield f"list {number}", (rows.count, rows.oldest, rows.newest)
            else:
                yield f"ranked {number}", (rows.keys, list(rows.smallest(NEVER)))
        yield "rank", state.policy.rank
        for space in state.namespaces.values():
            names = ("visible", "cold", "partial", "pinned", "index")
            yield f"{space.id}", [getattr(space, name) for name in names]
        for segment in (*state.pool.segments, *state.ssd_slots.segments):
            told = {field.name: getattr(segment, field.name) for field in fields(segment)}
            yield f"segment {segment.id}", repr(sorted((name, plain(value)) for name, value in told.items()))
        for key, slab in state.pool.classes.items():
            yield f"class {key}", (slab.free, list(slab.with_free))
        yield "empties", list(state.pool.empties)
        for name in ("bumps", "effects", "counters", "demanded", "prefetched", "to_store", "makers"):
            yield name, getattr(state, name)
        yield "deleted", (state.deleted_chunks, state.dirty_chunks)


def plain(value: Any) -> Any:
    return list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value


@functools.cache
def lived(seed: int, shards: int) -> Life:
    """To be copied, not to be changed."""
    life = Life(seed, shards)
    life.chunks._views = None  # a copy must make its own
    return life


Case = Callable[[Life, bool], Any]
CASES: dict[str, Case] = {}


def case(twin: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[twin] = function
        return function

    return register


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("twin", sorted(TWINS))
def test_in_bulk_is_one_by_one(twin: str, shards: int) -> None:
    if twin in ONE_SHARD:
        shards = 1
    for seed in SEEDS:
        one, many = copy.deepcopy(lived(seed, shards)), copy.deepcopy(lived(seed, shards))
        assert dict(one.all()) == dict(many.all())
        told = CASES[twin](one, False), CASES[twin](many, True)
        assert told[0] == told[1], seed
        for (name, of_one), (_, of_many) in zip(one.all(), many.all(), strict=True):
            assert of_one == of_many, (name, seed)


def test_every_function_is_the_twin_of_methods_that_exist_or_a_helper() -> None:
    found = set()
    for module in pkgutil.iter_modules(kvstore.core.bulk.__path__):
        name = f"kvstore.core.bulk.{module.name}"
        for function, value in vars(importlib.import_module(name)).items():
            if inspect.isfunction(value) and value.__module__ == name and not function.startswith("_"):
                found.add(f"{module.name}.{function}")
    assert found == TWINS.keys() | HELPERS and not TWINS.keys() & HELPERS
    for twin, methods in TWINS.items():
        for method in methods:
            assert callable(resolved(method)), (twin, method)


def resolved(method: str) -> Any:
    """ "requests.reads.Reads._used_each", below kvstore.core."""
    parts = method.split(".")
    depth = next(number for number, part in enumerate(parts) if number + 1 == len(parts) or part[0].isupper())
    value: Any = importlib.import_module(".".join(("kvstore.core", *parts[:depth])))
    for part in parts[depth:]:
        value = getattr(value, part)
    return value


def test_every_twin_is_held_to_its_methods() -> None:
    assert CASES.keys() == TWINS.keys()


# ------------------------------------------------------------------------------------------------------------- cases

ONE_SHARD = {"batch.take_over"}


@case("batch.look_up")
def _(life: Life, bulk: bool) -> Any:
    keys = [*(life.chunks.key[row] for row in life.rows()), ChunkKey(b"unknown")]
    if not bulk:
        return [lookup(life.state, life.space, key)[::2] for key in keys]
    rows, reasons, rest = batch.look_up(life.state, life.space, keys)
    for number in rest:
        reasons[number] = lookup(life.state, life.space, keys[number])[2]
    return list(zip(rows.tolist(), map(Reason, reasons), strict=True))


@case("batch.usable_leading")
def _(life: Life, bulk: bool) -> Any:
    rows = [*sorted(life.rows(), key=life.state.is_usable, reverse=True), NONE]
    if bulk:
        return batch.usable_leading(life.state, life.space, rows)
    return next(number for number, row in enumerate(rows) if row == NONE or not life.state.is_usable(row))


@case("batch.usable_each")
def _(life: Life, bulk: bool) -> Any:
    rows = [*life.rows(), NONE]
    if bulk:
        return batch.usable_each(life.state, life.space, rows)
    return bytes(row != NONE and life.state.is_usable(row) for row in rows)


@case("batch.extents")
def _(life: Life, bulk: bool) -> Any:
    rows, lengths = life.rows(life.resident), life.space.shard_bytes
    shards = range(life.space.shards)
    if bulk:
        return list(batch.extents(life.state, rows, shards, lengths))
    return [life.state.extent(row, shard, lengths[shard]) for row in rows for shard in shards]


@case("batch.unlink")
def _(life: Life, bulk: bool) -> None:
    rows, listed = life.rows(life.unneeded), life.dram.recency
    if bulk:
        batch.unlink(life.chunks, listed, np.array(rows))
    else:
        for row in rows:
            life.chunks.unlink(listed, row)


def _link(name: str) -> Case:
    def link(life: Life, bulk: bool) -> None:
        rows, listed = life.rows(life.unneeded), life.dram.recency
        for row in rows:
            life.chunks.unlink(listed, row)
        if bulk:
            getattr(batch, name)(life.chunks, listed, np.array(rows))
        else:
            for row in rows:
                getattr(life.chunks, name)(listed, row)

    return link


case("batch.link_newest")(_link("link_newest"))
case("batch.link_oldest")(_link("link_oldest"))


@case("batch.pin")
def _(life: Life, bulk: bool) -> None:
    rows = life.rows(life.resident)
    if bulk:
        batch.pin(life.state, life.space, rows)
    else:
        for row in rows:
            life.state.pin(life.space, row)


@case("batch.unpin")
def _(life: Life, bulk: bool) -> Any:
    for row in life.rows(life.resident):
        life.state.pin(life.space, row)
    rows = life.rows(lambda row: life.chunks.pins[row] and not life.chunks.flags[row] & DOOMED)
    return list(
        batch.unpin(life.state, life.space, rows) if bulk else life.state._unpin_each(life.space, rows)
    )


@case("batch.charge_new")
def _(life: Life, bulk: bool) -> Any:
    group, rows = EngineGroup("alice", "engine"), life.rows()
    assert group.charge(NEVER, 10, 1_000_000)
    if bulk:
        assert batch.charge_new(group, rows, 10, 1_000_000)
    else:
        assert all(group.charge(row, 10, 1_000_000) for row in rows)
    return group.pins, group.pinned_bytes


@case("batch.used")
def _(life: Life, bulk: bool) -> None:
    rows = life.rows(life.resident)
    life.state.now += 7
    if bulk:
        batch.used(life.state, life.space, rows)
    else:
        life.store.reads._used_each(life.space, rows)


@case("batch.begin")
def _(life: Life, bulk: bool) -> Any:
    keys = life.new_keys()
    slab = life.free_slots(len(keys) * life.space.shards)
    if bulk:
        return batch.begin(life.state, life.space, keys, slab, range(life.space.shards))
    return life.begun(keys)


@case("batch.take_over")
def _(life: Life, bulk: bool) -> Any:
    slab = life.no_free_slots()
    victims, stored = life.victims()
    keys = [ChunkKey(b"new %d" % number) for number in range(len(victims))]
    if bulk:
        return batch.take_over(life.state, life.space, keys, victims, stored=stored)
    rows = []
    for key, victim in zip(keys, victims, strict=True):
        row = life.space.index[key] = life.chunks.new_row(life.space.id, key, life.state.now)
        life.state.begin_chunk(life.space, row)
        life.store.segments._leave_dram(victim)
        taken = life.state.pool.take(slab, row)
        assert taken is not None
        life.state.place_shard(row, 0, *taken)
        rows.append(row)
    return rows


@case("batch.leave_dram")
def _(life: Life, bulk: bool) -> None:
    victims, stored = life.victims()
    if bulk:
        batch.leave_dram(life.state, life.space, victims, stored=stored)
    else:
        for row in victims:
            life.store.segments._leave_dram(row)


@case("batch.describe")
def _(life: Life, bulk: bool) -> None:
    keys = life.new_keys()
    rows = life.begun(keys)
    old = life.rows()[0]
    parents = [b"", *keys[:-1]]
    parents[life.dice.randrange(len(keys))] = life.chunks.key[old]
    tokens = [life.dice.randrange(1, life.space.spec.chunk_tokens + 1) for _ in keys]
    event: Any = SimpleNamespace(derived=True, transient=life.dice.random() < 0.5, shards=())
    if bulk:
        kind = DERIVED | (TRANSIENT if event.transient else 0)
        flags = [kind | (TAIL if count < life.space.spec.chunk_tokens else 0) for count in tokens]
        above = [life.space.index.get(ChunkKey(parent), NONE) for parent in parents]
        batch.describe(life.chunks, rows, above, tokens, flags)
    else:
        for row, parent, count in zip(rows, parents, tokens, strict=True):
            life.store.saves._describe(life.space, row, ChunkKey(parent), count, event)


@case("batch.mark_shards_ready")
def _(life: Life, bulk: bool) -> Any:
    rows = life.begun(life.new_keys())
    shards = life.dice.sample(range(life.space.shards), life.dice.randrange(1, life.space.shards + 1))
    sums = [life.dice.randrange(1 << 64) for _ in range(len(rows) * len(shards))]
    if bulk:
        return batch.mark_shards_ready(life.state, life.space, rows, shards, sums)
    left = iter(sums)
    whole = []
    for row in rows:
        last = [life.state.mark_shard_ready(life.space, row, shard, next(left)) for shard in shards]
        whole.append(any(last))
    return whole


@case("batch.add_maker")
def _(life: Life, bulk: bool) -> None:
    rows = life.rows()
    if bulk:
        batch.add_maker(life.state, rows, MAKERS[0])
    else:
        for row in rows:
            life.state.add_maker(row, MAKERS[0])


@case("cohorts.used")
def _(life: Life, bulk: bool) -> Any:
    policy = Expected(life.chunks, NEVER)
    policy.opened(life.space)
    rows = life.rows()
    policy.now = life.state.now
    policy.used_each(rows[: len(rows) // 2], 9_000)
    policy.now += 10_000
    policy.foreseen = {row: policy.now - life.dice.choice((10, 1_000, 20_000)) for row in rows[::3]}
    policy.now += 100
    if bulk:
        cohorts.used(policy, life.chunks, rows, 100)
    else:
        policy.used_each(rows, 100)
    (book,) = policy.books
    return book.lives, [(each.ended, [list(young) for young in each.young]) for each in book.ages]


@case("ghosts.forget_oldest")
def _(life: Life, bulk: bool) -> None:
    for row in life.rows(life.unneeded):
        life.state.to_ghost(row, Reason.EVICTED)
    count = life.dice.randrange(1, life.state.ghosts.count + 1)
    if bulk:
        ghosts.forget_oldest(life.state, count)
    else:
        for _ in range(count):
            life.state.remove_row(life.state.ghosts.oldest)


@case("needed.changed")
def _(life: Life, bulk: bool) -> None:
    policy: Any = life.state.policy
    for _ in range(3):
        before = policy.rank
        policy.rank = {row: place for place, row in enumerate(life.rows(life.state.is_usable))}
        if bulk:
            needed.changed(policy, life.chunks, life.state.namespaces, before, policy.rank)
        else:
            policy._changed(life.state.namespaces, before, policy.rank)


@case("needed.on_ssd_only")
def _(life: Life, bulk: bool) -> Any:
    rows = life.rows()
    if bulk:
        return needed.on_ssd_only(life.state, rows)
    return life.store.queue._on_ssd_only(rows)


def _named(life: Life) -> list[int]:
    """Some rows, some several times."""
    rows = life.rows(lambda row: life.state.is_usable(row) or life.chunks.shard0[row] == NONE)
    rows += life.dice.sample(rows, len(rows) // 2)
    life.dice.shuffle(rows)
    return rows


@case("references.add")
def _(life: Life, bulk: bool) -> None:
    rows = _named(life)
    if bulk:
        life.state.batch_min = 1
        references.add(life.state, rows)
        life.state.batch_min = NEVER
    else:
        for row in rows:
            life.state.add_ref(row)


@case("references.drop")
def _(life: Life, bulk: bool) -> None:
    rows = _named(life)
    for row in rows:
        life.state.add_ref(row)
    for row in rows[::5]:
        life.chunks.flags[row] |= TAIL
    life.dice.shuffle(rows)
    if bulk:
        life.state.batch_min = 1
        references.drop(life.state, rows, Reason.TRUNCATED)
        life.state.batch_min = NEVER
    else:
        for row in rows:
            life.state.drop_ref(row, Reason.TRUNCATED)


def _relist(one_by_one: str, in_bulk: Callable[..., None]) -> Case:
    def relist(life: Life, bulk: bool) -> None:
        rows, dram = life.rows(life.unneeded), life.dram
        policy: Any = life.state.policy
        for row in rows:
            policy.remove(dram, row)
        for row in rows[::4]:
            life.chunks.flags[row] |= TAIL
        if bulk:
            in_bulk(life.chunks, dram.recency, rows)
        else:
            getattr(policy, one_by_one)(dram, rows)

    return relist


case("recency.add")(_relist("add_each", recency.add))
case("recency.put_back")(_relist("put_back_each", recency.put_back))


@case("slots.take")
def _(life: Life, bulk: bool) -> Any:
    slab = life.free_slots(9)
    owners = list(range(9))
    if not bulk:
        taken = [life.state.pool.take(slab, owner) for owner in owners]
        return [(segment.id, slot) for segment, slot in filter(None, taken)]
    found: list[Any] = []
    while len(found) < len(owners):
        segment, cells = slots.take(life.state.pool, slab, np.array(owners[len(found) :]))
        found += [(segment.id, slot) for slot in cells.tolist()]
    return found


def _ready(life: Life) -> tuple[Any, list[int]]:
    """Some READY slots of one segment."""
    ready = {
        segment.index: [slot for slot, state in enumerate(segment.state) if state == SlotState.READY]
        for segment in life.slab().segments.values()
    }
    index = max(ready, key=lambda index: len(ready[index]))
    return life.state.pool.segments[index], life.dice.sample(ready[index], len(ready[index]) // 2 + 1)


@case("slots.mark_ready")
def _(life: Life, bulk: bool) -> None:
    slab = life.free_slots(9)
    taken = list(filter(None, (life.state.pool.take(slab, 0) for _ in range(9))))
    segment = taken[0][0]
    cells = [slot for other, slot in taken if other is segment]
    if bulk:
        slots.mark_ready(segment, np.array(cells))
    else:
        for slot in cells:
            life.state.pool.mark_ready(segment, slot)


@case("slots.pass_on")
def _(life: Life, bulk: bool) -> None:
    slab = life.no_free_slots()
    segment, cells = _ready(life)
    if bulk:
        slots.pass_on(segment, np.array(cells), np.arange(len(cells)))
        return
    for owner, slot in enumerate(cells):
        life.state.pool.give_back(segment, slot)
        assert life.state.pool.take(slab, owner) == (segment, slot)


@case("slots.give_back")
def _(life: Life, bulk: bool) -> None:
    segment, cells = _ready(life)
    if bulk:
        slots.give_back(life.state.pool, segment, np.array(cells))
    else:
        for slot in cells:
            life.state.pool.give_back(segment, slot)


def _forgotten(life: Life) -> None:
    """Rows, and room for their shards, that are to be used again."""
    for row in life.rows(lambda row: life.unneeded(row) and not life.chunks.refs[row]):
        life.state.to_ghost(row, Reason.NEVER_SEEN)
    assert life.chunks.free_rows


@case("table.new_rows")
def _(life: Life, bulk: bool) -> Any:
    _forgotten(life)
    keys, chunks = life.new_keys(), life.chunks
    if not bulk:
        return [chunks.new_row(life.space.id, key, life.state.now) for key in keys]
    rows = table.new_rows(chunks, keys)
    for row in rows:
        chunks.namespace[row] = life.space.id
        chunks.used_at[row] = chunks.born_at[row] = life.state.now
    return rows


@case("table.new_shards")
def _(life: Life, bulk: bool) -> None:
    _forgotten(life)
    chunks = life.chunks
    rows = [chunks.new_row(life.space.id, key, life.state.now) for key in life.new_keys()]
    if bulk:
        for row, start in zip(rows, table.new_shards(chunks, len(rows), life.space.shards), strict=True):
            chunks.shard0[row] = start
    else:
        for row in rows:
            chunks.give_shards(row, life.space.shards)


@case("table.set_makers")
def _(life: Life, bulk: bool) -> None:
    numbers = [life.dice.choice((NONE, 0, 1)) for _ in range(9)]
    first = life.chunks.new_rows(len(numbers))
    if bulk:
        table.set_makers(life.chunks, first, numbers, MAKERS)
    else:
        for row, number in enumerate(numbers, first):
            life.chunks.set_maker(row, MAKERS[number] if number != NONE else b"")
