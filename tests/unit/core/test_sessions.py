"""Sessions and manifests: compare-and-set, forks, truncation, what stays exact, what is dropped with the last name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvstore import wire
from kvstore.core import events as ev
from kvstore.core import manifests
from kvstore.core.bulk import references
from kvstore.core.manifests import Manifest
from kvstore.core.requests import sessions
from kvstore.core.state import State
from kvstore.errors import BadRequest, Conflict, Exhausted, NotFound, Precondition, StoreError
from kvstore.sim.disk import DiskWorld
from kvstore.sim.integrity import ROW_COLUMNS, check_integrity
from kvstore.sim.simulation import Simulation
from kvstore.sim.world import CHUNK_TOKENS, PAGE, World, chain, spec
from kvstore.types import ChunkKey, NamespaceId, OpId, Reason, WorkerId
from kvstore.v1 import store_pb2


def started(**limits: Any) -> tuple[World, WorkerId, NamespaceId]:
    world = World(**limits)
    worker = world.join()
    return world, worker, world.open(spec(), worker)


def places(info: ev.SessionInfo) -> list[tuple[bytes, int, int, int, bool]]:
    return [(e.key, e.first_token, e.token_count, e.delta, e.approximate) for e in info.entries]


# ---------------------------------------------------------------------------------------------------- update, get


def test_a_session_is_a_list_of_committed_chunks_with_a_version() -> None:
    world, worker, namespace = started()
    keys = chain("k", 4)
    world.save(worker, namespace, keys)
    first = world.append(worker, namespace, b"s", keys[:2])
    assert (first.version, first.usable) == (1, 2)
    second = world.append(worker, namespace, b"s", keys[2:], version=1, keep=2)
    assert (second.version, second.usable) == (2, 4)
    assert places(second) == [(key, 4 * i, 4, 0, False) for i, key in enumerate(keys)]
    assert world.session(worker, namespace, b"s") == second


@pytest.mark.parametrize("batch_min", [2, 1_000])
def test_a_hole_hides_no_later_entry(batch_min: int) -> None:
    """Modules of Prompt Cache: in any order, with gaps between them and a partial one in the middle."""
    world = World(batch_min=batch_min)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 5)
    world.save(worker, namespace, keys)
    tail = ChunkKey(b"tail")
    world.save(worker, namespace, (tail,), token_counts=(2,))
    entries = [ev.SessionEntry(key, 10 * place, 4, approximate=True) for place, key in enumerate(keys)]
    entries.insert(2, ev.SessionEntry(tail, 14, 2, approximate=True))
    info = world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, tuple(entries))
    assert (info.usable, info.usable_beyond) == (6, b"")
    world.ask(ev.Forget, worker, namespace, b"", (keys[1], keys[3]))
    info = world.session(worker, namespace, b"s")
    assert (info.usable, info.usable_beyond) == (1, bytes([0, 1, 1, 0, 1]))
    assert [(entry.first_token, entry.token_count) for entry in info.entries] == [
        *((0, 4), (10, 4), (14, 2), (20, 4), (30, 4), (40, 4)),
    ]


def test_a_session_that_is_not_there_has_version_0() -> None:
    world, worker, namespace = started()
    assert world.session(worker, namespace, b"s") == ev.SessionInfo(b"s", 0, (), 0)


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_an_update_of_another_version_is_refused(expected: int) -> None:
    world, worker, namespace = started()
    keys = chain("k", 3)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys[:1])
    world.append(worker, namespace, b"s", keys[1:2], version=1, keep=1)
    with pytest.raises(Conflict, match=r"at version 2.*get it and decide again") as error:
        world.append(worker, namespace, b"s", keys[2:], version=expected, keep=1)
    assert (error.value.field, error.value.value) == ("expected_version", str(expected))
    assert world.session(worker, namespace, b"s").version == 2


def test_a_new_session_expects_version_0() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 1))
    with pytest.raises(Conflict, match="at version 0"):
        world.append(worker, namespace, b"s", chain("k", 1), version=1)


def test_a_name_that_comes_back_never_repeats_a_version() -> None:
    """Or who knew the old conversation could append to the new one."""
    world, worker, namespace = started()
    world.save(worker, namespace, chain("old", 3))
    world.save(worker, namespace, chain("new", 3))
    old = world.append(worker, namespace, b"s", chain("old", 2))
    world.ask(ev.Forget, worker, namespace, b"s")
    new = world.append(worker, namespace, b"s", chain("new", 2))
    assert new.version > old.version
    with pytest.raises(Conflict):
        world.append(worker, namespace, b"s", chain("old", 3)[2:], version=old.version, keep=2)


def test_updating_a_prefix_drops_the_rest() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 4))
    world.save(worker, namespace, chain("edit", 1), parent=chain("k", 4)[1])
    world.append(worker, namespace, b"s", chain("k", 4))
    edited = world.append(worker, namespace, b"s", chain("edit", 1), version=1, keep=2)
    assert [e.key for e in edited.entries] == [*chain("k", 2), *chain("edit", 1)]
    assert [e.first_token for e in edited.entries] == [0, 4, 8]


def test_a_manifest_names_committed_chunks_only() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 1))
    world.reserve(worker, namespace, chain("k", 2))
    for missing in (chain("k", 2)[1], ChunkKey(b"never")):
        with pytest.raises(Precondition, match=r"never committed.*commit the chunk first") as error:
            world.append(worker, namespace, b"s", [*chain("k", 1), missing])
        assert (error.value.field, error.value.value) == ("append[1].key", missing.hex())
    assert world.session(worker, namespace, b"s").version == 0


def test_a_manifest_does_not_name_what_never_had_all_its_shards() -> None:
    world = World(incomplete_ttl_ms=1_000)
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    world.save(worker, namespace, chain("k", 1), shards=(0,))
    for _ in range(2):
        with pytest.raises(Precondition, match="never committed"):
            world.append(worker, namespace, b"s", chain("k", 1))
        world.tick(1_000)  # then it is a ghost


def test_losing_the_bytes_between_commit_and_update_is_no_error() -> None:
    world, worker, namespace = started(segments=1, segment_bytes=4 * PAGE)
    world.save(worker, namespace, chain("k", 1))
    for number in range(5):
        world.save(worker, namespace, chain(f"{number}", 1))
    assert world.outcomes(worker, namespace, chain("k", 1)) == ["EVICTED"]
    assert world.append(worker, namespace, b"s", chain("k", 1)).usable == 0
    # Somebody is saving it again, and it is usable when that is done.
    reserved = world.reserve(worker, namespace, chain("k", 1))
    assert world.append(worker, namespace, b"t", chain("k", 1)).usable == 0
    world.commit(worker, reserved)
    assert world.session(worker, namespace, b"s").usable == 1


def test_usable_is_the_longest_whole_prefix() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 4))
    world.append(worker, namespace, b"s", chain("k", 4))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 4)[2:3])
    assert world.session(worker, namespace, b"s").usable == 2
    assert len(world.session(worker, namespace, b"s").entries) == 4


# ----------------------------------------------------------------------------------------------------------- purity


def test_exact_after_approximate_is_refused_and_derived_is_taken() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    world.save(worker, namespace, chain("derived", 2), derived=True)
    world.append(worker, namespace, b"s", chain("k", 2), approximate=True)
    with pytest.raises(Precondition, match=r"follows approximate.*derived key") as error:
        world.append(worker, namespace, b"s", chain("k", 3)[2:], version=1, keep=2)
    assert error.value.field == "append[0].key"
    world.append(worker, namespace, b"s", chain("derived", 1), version=1, keep=2)
    world.append(worker, namespace, b"s", chain("derived", 2)[1:], version=2, keep=3)


def test_exact_after_approximate_in_one_request_is_refused_too() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    entries = (
        ev.SessionEntry(chain("k", 2)[0], 0, 4, approximate=True),
        ev.SessionEntry(chain("k", 2)[1], 4, 4),
    )
    with pytest.raises(Precondition, match="follows approximate") as error:
        world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, entries)
    assert error.value.field == "append[1].key"


@pytest.mark.parametrize(("first", "delta"), [(8, 0), (4, 4), (0, 4)])
def test_exact_after_a_gap_or_a_shift_is_refused(first: int, delta: int) -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"s", chain("k", 1))
    entry = ev.SessionEntry(chain("k", 2)[1], first, 4, delta)
    with pytest.raises(Precondition, match="a gap or a shift"):
        world.ask(ev.UpdateSession, worker, namespace, b"s", 1, 1, (entry,))


def test_exact_after_truncation_is_refused_unless_only_the_end_was_cut() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 4))
    world.append(worker, namespace, b"s", chain("k", 3))
    world.ask(ev.Fork, worker, namespace, b"s", b"middle cut")
    world.ask(ev.Truncate, worker, namespace, b"s", 1, 8, 4)
    world.append(worker, namespace, b"s", chain("k", 3)[2:], version=2, keep=2)  # still exact
    world.ask(ev.Truncate, worker, namespace, b"middle cut", 1, 4, 4)
    with pytest.raises(Precondition):
        world.append(worker, namespace, b"middle cut", chain("k", 4)[3:], version=2, keep=2, first=12)


# --------------------------------------------------------------------------------------------------------- truncate


def test_truncation_keeps_the_front_exact_and_makes_the_rest_approximate() -> None:
    world, worker, namespace = started()
    keys = chain("k", 6)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    cut = world.ask(ev.Truncate, worker, namespace, b"s", 1, 4, 8)
    assert (cut.version, cut.usable) == (2, 4)
    assert places(cut) == [
        (keys[0], 0, 4, 0, False),
        (keys[3], 12, 4, 0, True),
        (keys[4], 16, 4, 0, True),
        (keys[5], 20, 4, 0, True),
    ]


def test_closing_the_gap_adds_up_in_deltas_and_edits_no_bytes() -> None:
    world, worker, namespace = started()
    keys = chain("k", 6)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    once = world.ask(ev.Truncate, worker, namespace, b"s", 1, 4, 4, True)
    assert places(once)[1:] == [(keys[i], 4 * i, 4, -4, True) for i in (2, 3, 4, 5)]
    # In the new positions: [0] 0-4, [2] 4-8, [3] 8-12, [4] 12-16, [5] 16-20.
    twice = world.ask(ev.Truncate, worker, namespace, b"s", 2, 8, 8, True)
    assert places(twice)[1:] == [(keys[2], 8, 4, -4, True), (keys[5], 20, 4, -12, True)]
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 6


def test_cutting_the_head_makes_everything_approximate() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 3))
    cut = world.ask(ev.Truncate, worker, namespace, b"s", 1, 0, 4)
    assert [e.approximate for e in cut.entries] == [True, True]


def test_cutting_everything_leaves_an_empty_session() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 3))
    assert world.ask(ev.Truncate, worker, namespace, b"s", 1, 0, 1_000).entries == ()
    assert world.append(worker, namespace, b"s", chain("k", 3), version=2).usable == 3


def test_old_versions_of_a_fork_do_not_change() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    before = world.append(worker, namespace, b"s", chain("k", 3))
    world.ask(ev.Fork, worker, namespace, b"s", b"fork")
    world.ask(ev.Truncate, worker, namespace, b"s", 1, 4, 4, True)
    assert places(world.session(worker, namespace, b"fork")) == places(before)


@pytest.mark.parametrize("span", [(1, 3), (4, 5), (5, 3), (2, 100), (1 << 39, 4)])
def test_a_range_that_splits_an_entry_is_refused_with_the_boundaries(span: tuple[int, int]) -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 3))
    with pytest.raises(BadRequest, match=r"begin and end where entries do.*nearest boundaries: \[") as error:
        world.ask(ev.Truncate, worker, namespace, b"s", 1, *span)
    assert (error.value.field, error.value.value) == ("first_token", f"[{span[0]}, {span[0] + span[1]})")
    assert world.session(worker, namespace, b"s").version == 1


def test_truncating_nothing_or_of_nothing_is_refused() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 1))
    world.append(worker, namespace, b"s", chain("k", 1))
    with pytest.raises(BadRequest, match="at least 1") as error:
        world.ask(ev.Truncate, worker, namespace, b"s", 1, 0, 0)
    assert error.value.field == "token_count"
    with pytest.raises(NotFound, match="no such session"):
        world.ask(ev.Truncate, worker, namespace, b"t", 1, 0, 4)
    with pytest.raises(Conflict):
        world.ask(ev.Truncate, worker, namespace, b"s", 2, 0, 4)


@pytest.mark.parametrize("cut", [False, True])
def test_long_manifests_are_updated_and_cut_in_linear_time(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that builtins go through are counted, nothing is timed: an item per pair of entries would be millions."""
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 1))
    count = 2_000
    items = 0

    def counted(builtin: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(iterable: Iterable[Any] = ()) -> Any:
            nonlocal items
            listed = list(iterable)
            items += len(listed)
            return builtin(listed)

        return call

    for module in (sessions, manifests):
        for builtin in (any, sum, set, list, sorted):
            monkeypatch.setattr(module, builtin.__name__, counted(builtin), raising=False)
    (key,) = chain("k", 1)
    entries = tuple(ev.SessionEntry(key, 4 * i, 4, approximate=i == count - 1) for i in range(count))
    monkeypatch.setattr(world.watch, "check", lambda: None)  # not what is counted
    world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, entries)
    if cut:
        world.ask(ev.Truncate, worker, namespace, b"s", 1, 4 * count // 2, 4 * count // 4, True)
    assert items < 20 * count


def test_a_long_session_is_handled_without_an_object_for_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits behind such a request waits for as long as it takes; so also for the index record."""
    world = DiskWorld()
    worker = world.join()
    namespace = world.open(spec(), worker)
    world.save(worker, namespace, chain("k", 1))
    (key,) = chain("k", 1)
    entries = tuple(ev.SessionEntry(key, 4 * i, 4) for i in range(300))
    version = world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, entries).version

    def made(*_: object) -> None:
        raise AssertionError("an object for an entry")

    with monkeypatch.context() as patch:
        patch.setattr(ev, "SessionEntry", made)
        answers = [
            world.session(worker, namespace, b"s"),
            world.ask(ev.UpdateSession, worker, namespace, b"s", version, 300, ()),
            world.ask(ev.Fork, worker, namespace, b"s", b"t"),
            world.ask(ev.Truncate, worker, namespace, b"s", version + 1, 4 * 299, 4),
        ]
        written = [store_pb2.SessionReply.FromString(_on_the_wire(answer)) for answer in answers]
        record = world.store.cold_tier.durability._batch(OpId(1 << 40))[0].sessions[0]
    assert [len(reply.entries) for reply in written] == [300, 300, 300, 299]
    assert record.entries == entries[:299]


def _on_the_wire(answer: ev.SessionInfo) -> bytes:
    return wire.session_to_proto(answer).SerializeToString()


def test_an_update_counts_only_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """References of the entries that it keeps stay as they are."""
    counted: list[int] = []
    for name in ("add", "drop"):
        before = getattr(references, name)

        def call(state: Any, rows: Any, *reason: Any, before: Any = before) -> None:
            counted.append(len(rows))
            before(state, rows, *reason)

        monkeypatch.setattr(references, name, call)
    world, worker, namespace = started()
    keys = chain("k", 8)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys[:7])
    world.append(worker, namespace, b"s", keys[6:], version=1, keep=6)
    world.ask(ev.Truncate, worker, namespace, b"s", 2, 4 * 5, 4)
    assert counted == [7, 2, 1, 2, 3]


@pytest.mark.parametrize("batch_min", [2, 1 << 30])
def test_entries_that_name_a_chunk_again_and_again_are_counted_each(batch_min: int) -> None:
    world, worker, namespace = started(batch_min=batch_min)
    keys = chain("k", 3)
    world.save(worker, namespace, keys)
    entries = tuple(ev.SessionEntry(keys[n % 3], 4 * n, 4, approximate=True) for n in range(9))
    world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, entries)
    rows = [world.store.state.namespaces[namespace].index[key] for key in keys]
    refs = world.store.state.chunks.refs
    assert [refs[row] for row in rows] == [3, 3, 3]
    world.ask(ev.Forget, worker, namespace, b"", tuple(keys[:2]))
    assert world.store.state.ghosts.count == 0, "named ghosts are nobody's to forget"
    world.ask(ev.UpdateSession, worker, namespace, b"s", 1, 5, ())
    assert [refs[row] for row in rows] == [2, 2, 1]
    world.ask(ev.UpdateSession, worker, namespace, b"s", 2, 0, ())
    ghosts = list(world.store.state.chunks.walk(world.store.state.ghosts))
    assert [refs[row] for row in rows] == [0, 0, 0]
    assert ghosts == rows[:2], "in the order in which the last entry of each went"
    world.ask(ev.UpdateSession, worker, namespace, b"t", 0, 0, entries)
    assert world.store.state.ghosts.count == 0


@pytest.mark.parametrize("batch_min", [2, 1 << 30])
def test_ghosts_that_are_forgotten_together_leave_tree_and_makers(batch_min: int) -> None:
    """Chunks with several children, of which some stay; siblings of which one stays; a maker that made nothing else."""
    world, worker, namespace = started(batch_min=batch_min, ghosts_max=2, segments=4)
    above = {"a": "", "b": "a", "c": "a", "d": "a", "e": "b", "f": "b", "g": "e", "h": "c"}
    above |= {"top": "", "i": "top", "j": "top", "k": "top", "l": "d", "m": "l"}
    keys = tuple(ChunkKey(name.encode()) for name in above)
    stay = {b"d", b"top", b"j", b"m"}
    for key, parent in zip(keys, above.values(), strict=True):
        maker = b"a maker of these" if key in stay else b"maker of others!"
        world.save(worker, namespace, (key,), maker=maker, parents=(ChunkKey(parent.encode()),))
    chunks = world.store.state.chunks
    of = world.store.state.namespaces[namespace]
    gone = [key for key in keys if key not in stay]
    entries = tuple(ev.SessionEntry(key, 4 * n, 4, approximate=True) for n, key in enumerate(gone))
    world.ask(ev.UpdateSession, worker, namespace, b"s", 0, 0, entries)
    world.ask(ev.Forget, worker, namespace, b"", tuple(gone))
    world.ask(ev.UpdateSession, worker, namespace, b"s", 1, 0, ())
    assert set(of.index) == {*stay, *gone[-2:]}
    assert chunks.parent[of.index[ChunkKey(b"j")]] == of.index[ChunkKey(b"top")]
    for key in gone[-2:]:
        world.ask(ev.Forget, worker, namespace, b"", (key,))
    assert set(of.index) == stay
    assert list(chunks.children(of.index[ChunkKey(b"top")])) == [of.index[ChunkKey(b"j")]]
    assert set(chunks._maker_numbers) == {b"a maker of these"}
    check_integrity(world.store)


@pytest.mark.parametrize("seed", range(8))
def test_ghosts_are_forgotten_together_as_one_by_one(seed: int) -> None:
    """Of trees of any shape, with any part of them gone."""
    worlds = []
    for batch_min in (2, 1 << 30):
        dice = random.Random(seed)
        world, worker, namespace = started(batch_min=batch_min, ghosts_max=3, segments=8)
        keys = [ChunkKey(b"%d" % number) for number in range(60)]
        for number, key in enumerate(keys):
            above = keys[dice.randrange(number)] if number and dice.random() < 0.9 else ChunkKey(b"")
            world.save(worker, namespace, (key,), maker=dice.randbytes(1) * 16, parents=(above,))
        for name in (b"s", b"t"):
            known = world.store.state.namespaces[namespace].index
            gone = dice.sample([key for key in keys if key in known], 20)
            entries = tuple(ev.SessionEntry(key, 4 * n, 4, approximate=True) for n, key in enumerate(gone))
            version = world.ask(ev.UpdateSession, worker, namespace, name, 0, 0, entries).version
            world.ask(ev.Forget, worker, namespace, b"", tuple(gone))
            world.ask(ev.UpdateSession, worker, namespace, name, version, 0, ())
            check_integrity(world.store)
        worlds.append(world.store.state)
    together, single = (state.chunks for state in worlds)
    for column in (*ROW_COLUMNS, "key", "tokens", "hits", "free_rows"):
        assert getattr(together, column) == getattr(single, column), column
    rows = range(together.rows_ever)
    assert list(map(together.maker, rows)) == list(map(single.maker, rows))
    assert worlds[0].ghosts.count == 3


# ------------------------------------------------------------------------------------------------------- fork, tails


def test_a_fork_is_a_second_name_for_the_same_manifest() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3))
    world.append(worker, namespace, b"s", chain("k", 2))
    fork = world.ask(ev.Fork, worker, namespace, b"s", b"t")
    assert (fork.session, fork.version, len(fork.entries)) == (b"t", 1, 2)
    world.append(worker, namespace, b"t", chain("k", 3)[2:], version=1, keep=2)
    assert len(world.session(worker, namespace, b"s").entries) == 2
    with pytest.raises(Conflict, match="exists already"):
        world.ask(ev.Fork, worker, namespace, b"s", b"t")
    with pytest.raises(NotFound, match="no such session"):
        world.ask(ev.Fork, worker, namespace, b"u", b"v")


def test_a_tail_goes_with_the_last_manifest_that_names_it() -> None:
    world, worker, namespace = started()
    keys = chain("k", 2)
    world.save(worker, namespace, keys, token_counts=(4, 2))
    world.save(worker, namespace, chain("full", 1), parent=keys[0])
    world.append(worker, namespace, b"s", keys, counts=(4, 2))
    world.ask(ev.Fork, worker, namespace, b"s", b"t")
    world.append(worker, namespace, b"s", chain("full", 1), version=1, keep=1)
    assert world.outcomes(worker, namespace, keys) == ["HIT", "HIT"]
    world.append(worker, namespace, b"t", chain("full", 1), version=1, keep=1)
    assert world.outcomes(worker, namespace, keys) == ["HIT", "TRUNCATED"]
    assert world.slots()["ready"] == 2


def test_a_tail_that_is_kept_in_the_next_version_stays() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2), token_counts=(4, 2))
    world.append(worker, namespace, b"s", chain("k", 2), counts=(4, 2))
    world.append(worker, namespace, b"s", (), version=1, keep=2)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["HIT", "HIT"]


def test_full_chunks_outlive_their_manifests() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"s", chain("k", 2))
    world.append(worker, namespace, b"s", (), version=1, keep=0)
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["HIT", "HIT"]


def test_tails_that_nobody_names_are_evicted_first() -> None:
    world, worker, namespace = started(segments=1, segment_bytes=4 * PAGE, reserve_share_max=1)
    world.save(worker, namespace, chain("full", 2))
    world.save(worker, namespace, chain("tail", 2), token_counts=(2, 2))
    world.append(worker, namespace, b"s", chain("tail", 1), counts=(2,))
    world.release(worker, world.acquire(worker, namespace, chain("tail", 2)).lease)
    world.save(worker, namespace, chain("new", 1))
    assert world.outcomes(worker, namespace, chain("full", 2) + chain("tail", 2)) == ["HIT"] * 3 + ["EVICTED"]


def test_only_the_last_entry_may_be_a_tail() -> None:
    world, worker, namespace = started()
    keys = chain("k", 2)
    world.save(worker, namespace, keys, token_counts=(2, 4))
    with pytest.raises(BadRequest, match="only the last entry may be a tail") as error:
        world.append(worker, namespace, b"s", keys, counts=(2, 4))
    assert error.value.field == "append[0].token_count"


# ----------------------------------------------------------------------------------------------------------- forget


def test_forgetting_a_session_drops_what_nothing_else_names_or_continues() -> None:
    world, worker, namespace = started()
    keys = chain("k", 4)
    world.save(worker, namespace, keys)
    world.save(worker, namespace, chain("branch", 1), parent=keys[1])
    world.append(worker, namespace, b"s", keys)
    world.append(worker, namespace, b"other", keys[:1])
    # keys[0] is named by another session, keys[1] is continued by the branch.
    assert world.ask(ev.Forget, worker, namespace, b"s").count == 3
    assert world.outcomes(worker, namespace, keys) == ["HIT", "HIT", "FORGOTTEN", "FORGOTTEN"]
    assert world.session(worker, namespace, b"s").version == 0
    assert world.ask(ev.Forget, worker, namespace, b"s").count == 0


def test_a_chunk_that_came_back_is_still_continued_by_its_children() -> None:
    world, worker, namespace = started()
    keys = chain("k", 3)
    world.save(worker, namespace, keys)
    world.ask(ev.Forget, worker, namespace, b"", keys[:2])
    world.ask(ev.Forget, worker, namespace, b"", keys[:1])  # the root is not even a ghost now
    world.save(worker, namespace, keys[:2])
    world.append(worker, namespace, b"s", keys[:2])
    world.ask(ev.Forget, worker, namespace, b"s")
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 3


def test_forgetting_keys_drops_them_whoever_names_them() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    world.append(worker, namespace, b"s", chain("k", 2))
    assert world.ask(ev.Forget, worker, namespace, b"", (*chain("k", 1), ChunkKey(b"never"))).count == 1
    assert world.outcomes(worker, namespace, chain("k", 2)) == ["FORGOTTEN", "HIT"]
    assert world.session(worker, namespace, b"s").usable == 0


def test_a_session_and_keys_are_forgotten_together() -> None:
    world, worker, namespace = started()
    keys, single = chain("k", 3), chain("single", 2)
    world.save(worker, namespace, keys)
    world.save(worker, namespace, single)
    world.append(worker, namespace, b"s", keys)
    world.append(worker, namespace, b"other", (keys[0], single[0]))
    # Of the session what nothing else names, and what is named one by one whoever names it.
    assert world.ask(ev.Forget, worker, namespace, b"s", single) == ev.Done(5)
    assert world.outcomes(worker, namespace, keys) == ["HIT", "FORGOTTEN", "FORGOTTEN"]
    assert world.outcomes(worker, namespace, single) == ["FORGOTTEN"] * 2
    assert world.ask(ev.Forget, worker, namespace, b"s", keys[:1]) == ev.Done(1), (
        "no such session, but such a key"
    )
    assert world.outcomes(worker, namespace, keys[:1]) == ["FORGOTTEN"]


# ----------------------------------------------------------------------------------------------------------- bounds


def test_sessions_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    world, worker, namespace = started(sessions_max=3)
    world.save(worker, namespace, chain("k", 1))
    for name in (b"a", b"b", b"c"):
        world.append(worker, namespace, name, chain("k", 1))
    world.session(worker, namespace, b"a")
    world.append(worker, namespace, b"d", chain("k", 1))
    found = {row.session for row in world.ask(ev.ListSessions, worker).rows}
    assert found == {b"a", b"c", b"d"}
    assert world.store.state.counters["sessions_dropped"] == 1


def test_a_fork_at_the_bound_keeps_what_it_names() -> None:
    world, worker, namespace = started(sessions_max=1)
    world.save(worker, namespace, chain("k", 2), token_counts=(4, 2))
    world.append(worker, namespace, b"s", chain("k", 2), counts=(4, 2))
    fork = world.ask(ev.Fork, worker, namespace, b"s", b"t")
    assert (fork.usable, world.session(worker, namespace, b"s").version) == (2, 0)


def test_entries_of_a_manifest_are_bounded() -> None:
    world, worker, namespace = started(session_entries_max=3)
    world.save(worker, namespace, chain("k", 4))
    world.append(worker, namespace, b"s", chain("k", 3))
    with pytest.raises(Exhausted, match="at most 3 entries") as error:
        world.append(worker, namespace, b"s", chain("k", 4)[3:], version=1, keep=3)
    assert error.value.value == "4"


def test_entries_of_all_manifests_are_bounded() -> None:
    world, worker, namespace = started(manifest_entries_max=10)
    world.save(worker, namespace, chain("k", 4))
    for name in (b"a", b"b", b"c"):
        world.append(worker, namespace, name, chain("k", 4))
    found = {row.session for row in world.ask(ev.ListSessions, worker).rows}
    assert found == {b"b", b"c"}


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("entry", "keep", "field", "message"),
    [
        (ev.SessionEntry(ChunkKey(b"k-1"), 4, 3), 1, "append[0].token_count", "has 4 tokens"),
        (ev.SessionEntry(ChunkKey(b"k-1"), 3, 4), 1, "append[0].first_token", "ends at 4"),
        (ev.SessionEntry(ChunkKey(b"k-1"), -1, 4), 0, "append[0].first_token", "overlap"),
        (ev.SessionEntry(ChunkKey(b"k-1"), 4, 4, -1), 1, "append[0].first_token", "ends at 4"),
        (ev.SessionEntry(ChunkKey(b"k-1"), 4, 4), 2, "keep", "has 1 entries"),
        (ev.SessionEntry(ChunkKey(b"k-1"), 4, 4), -1, "keep", "has 1 entries"),
    ],
)
def test_a_bad_update_is_refused_and_changes_nothing(
    entry: ev.SessionEntry, keep: int, field: str, message: str
) -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    before = world.append(worker, namespace, b"s", chain("k", 1))
    with pytest.raises(StoreError, match=message) as error:
        world.ask(ev.UpdateSession, worker, namespace, b"s", 1, keep, (entry,))
    assert isinstance(error.value, BadRequest)
    assert error.value.field == field
    assert world.session(worker, namespace, b"s") == before


# -------------------------------------------------------------------------------------------------------- manifests


def test_a_manifest_knows_whether_it_is_exact() -> None:
    manifest = Manifest()
    assert manifest.exact and manifest.end == 0
    manifest.add(0, 0, CHUNK_TOKENS, 0, False)
    manifest.add(1, CHUNK_TOKENS, 2, 0, False)
    assert manifest.exact and (manifest.end, manifest.token_count) == (6, 6)
    for first, delta, approximate in ((6, 0, True), (7, 0, False), (5, 1, False)):
        other = manifest.head(2)
        other.add(2, first, CHUNK_TOKENS, delta, approximate)
        assert not other.exact
        assert other.head(2).exact
    assert len(manifest) == 2


def test_a_list_of_sessions_is_most_recent_first_and_says_what_is_there() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 3), token_counts=(4, 4, 1))
    world.append(worker, namespace, b"a", chain("k", 3), counts=(4, 4, 1))
    world.tick(1_000)
    world.append(worker, namespace, b"b", chain("k", 1))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2)[1:])
    listed = world.ask(ev.ListSessions, worker, None, 1)
    assert ([row.session for row in listed.rows], listed.total) == ([b"b"], 2)
    (_, row) = world.ask(ev.ListSessions, worker, namespace).rows
    assert row == ev.SessionRow(
        b"a", "alice", namespace, 1, 3, 9, 1, 2 * PAGE, 1_000, 3 * PAGE, 0, Reason.FORGOTTEN
    )


def test_a_long_list_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LISTED_MAX", 3)
    monkeypatch.setattr(sessions, "LISTED_ENTRIES_MAX", 4)
    world, worker, namespace = started()
    keys = chain("k", 5)
    world.save(worker, namespace, keys)
    for name, length in ((b"a", 1), (b"b", 5), (b"c", 1), (b"d", 1), (b"e", 1), (b"f", 1)):
        world.append(worker, namespace, name, keys[:length])

    def listed(limit: int, skip: int) -> list[bytes]:
        answer = world.ask(ev.ListSessions, worker, namespace, limit, skip)
        assert answer.total == 6
        return [row.session for row in answer.rows]

    assert listed(1000, 0) == [b"f", b"e", b"d"], "no more rows than one answer has"
    assert listed(1000, 3) == [b"c", b"b"], "no more after so many entries"
    assert listed(1000, 5) == [b"a"]
    assert listed(1, 1) == [b"e"]
    assert listed(1000, 6) == listed(1000, 90_000) == []


def test_a_long_history_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "EXPLAINED_MAX", 2)
    world, worker, namespace = started()
    keys = chain("k", 5)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    told = world.ask(ev.Explain, worker, namespace, b"s")
    assert (told.version, [chunk.key for chunk in told.chunks], told.rest) == (1, list(keys[:2]), keys[2:])
    told = world.ask(ev.Explain, worker, namespace, b"", told.rest)
    assert ([chunk.key for chunk in told.chunks], told.rest) == (list(keys[2:4]), keys[4:])
    assert world.ask(ev.Explain, worker, namespace, b"", told.rest).rest == ()


def dooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were doomed, to be cleared."""
    doomed: list[int] = []
    doom = State.doom

    def counted(state: State, row: int, reason: Reason) -> bool:
        doomed.append(row)
        return doom(state, row, reason)

    monkeypatch.setattr(State, "doom", counted)
    return doomed


def test_a_long_session_is_forgotten_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    world, worker, namespace = started()
    keys = chain("k", 8)
    world.save(worker, namespace, keys)
    world.append(worker, namespace, b"s", keys)
    world.append(worker, namespace, b"other", keys[:1])
    doomed = dooms(monkeypatch)
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    assert world.session(worker, namespace, b"s").version == 0, "the name goes at once"
    assert len(doomed) == 4
    assert world.outcomes(worker, namespace, keys) == ["HIT"] * 4 + ["FORGOTTEN"] * 4
    assert world.store.has_ahead()
    world.step(ev.Idle())
    assert len(doomed) == 7
    assert world.replies[-1].answer == ev.Done(8), "the session, and all but the chunk that another names"
    assert not world.store.has_ahead()


def test_a_session_and_keys_are_forgotten_some_at_a_time_the_session_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    world, worker, namespace = started()
    keys, single = chain("k", 6), chain("single", 3)
    world.save(worker, namespace, keys)
    world.save(worker, namespace, single)
    world.append(worker, namespace, b"s", keys)
    assert world.ask(ev.Forget, worker, namespace, b"s", single) is None
    assert world.outcomes(worker, namespace, keys + single) == ["HIT"] * 2 + ["FORGOTTEN"] * 4 + ["HIT"] * 3
    world.step(ev.Idle())
    assert world.outcomes(worker, namespace, keys + single) == ["FORGOTTEN"] * 8 + ["HIT"]
    world.step(ev.Idle())
    assert world.replies[-1].answer == ev.Done(10)
    assert world.outcomes(worker, namespace, keys + single) == ["FORGOTTEN"] * 9


@pytest.mark.parametrize("updated_just_now", [False, True])
def test_a_session_that_was_half_forgotten_at_a_crash_can_be_forgotten_again(
    updated_just_now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its name nobody could say what the chunks are that are left."""
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    world = DiskWorld(durable_within_ms=400)
    worker = world.join()
    namespace = world.open(spec(), worker)
    keys = chain("k", 10)
    world.save(worker, namespace, keys)
    before = 9 if updated_just_now else 10
    version = world.append(worker, namespace, b"s", keys[:before]).version
    world.settle(1_000)
    if updated_just_now:
        world.append(worker, namespace, b"s", keys[before:], version=version, keep=before)
    assert world.ask(ev.Forget, worker, namespace, b"s") is None
    assert world.session(worker, namespace, b"s").version == 0
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 0)
    world.settle(1_000)
    assert {key for _, key in world.platter.chunks} == set(keys[:6])
    world.crash(power=True)
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    worker = world.join()
    world.open(spec(), worker)
    assert world.session(worker, namespace, b"s").usable == 6
    world.ask(ev.Forget, worker, namespace, b"s")
    world.settle(1_000)
    assert not world.platter.chunks and not world.platter.sessions


def test_many_keys_are_forgotten_some_at_a_time_by_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    world = World()
    worker = world.join()
    namespace = world.open(spec(shards=2), worker)
    keys = chain("k", 6)
    world.save(worker, namespace, keys)
    doomed = dooms(monkeypatch)
    assert world.ask(ev.Forget, worker, namespace, b"", keys) is None
    assert len(doomed) == 2
    assert world.outcomes(worker, namespace, keys) == ["FORGOTTEN"] * 2 + ["HIT"] * 4, "in their order"
    done = world.ask(ev.Forget, worker, namespace, b"", keys[2:3])
    assert done == ev.Done(1), "who wants little need not wait for it"
    world.tick(100)
    world.tick(100)
    assert world.replies[-1].answer == ev.Done(5)
    assert world.outcomes(worker, namespace, keys).count("FORGOTTEN") == 5


@pytest.mark.parametrize(("per_tick", "forgetting_max", "first"), [(2, 8, 2), (8, 3, 1)])
def test_sessions_that_expire_together_go_some_at_a_time(
    per_tick: int, forgetting_max: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 4)
    monkeypatch.setattr(sessions, "EXPIRED_PER_TICK", per_tick)
    monkeypatch.setattr(sessions, "FORGETTING_MAX", forgetting_max)
    world, worker, namespace = started(session_ttl_ms=1_000)
    for name in ("a", "b", "c", "d"):
        world.save(worker, namespace, chain(name, 6))
        world.append(worker, namespace, name.encode(), chain(name, 6))
    doomed = dooms(monkeypatch)
    left = []
    for _ in range(6):
        world.tick(1_000)
        left.append(len(world.store.state.sessions.by_name))
        assert len(doomed) <= 4 + 3 * 4
        doomed.clear()
    assert left == [first, 0, 0, 0, 0, 0]
    for name in ("a", "b", "c", "d"):
        assert world.outcomes(worker, namespace, chain(name, 6)) == ["EXPIRED"] * 6
    assert world.store.state.counters["sessions_expired"] == 4


@pytest.mark.parametrize("seed", range(2))
def test_a_simulated_life_in_which_all_is_forgotten_some_at_a_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 1)
    monkeypatch.setattr(sessions, "EXPIRED_PER_TICK", 1)
    Simulation(seed, 800).run()


def test_too_much_to_forget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_PER_STEP", 1)
    monkeypatch.setattr(sessions, "FORGETTING_MAX", 2)
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2))
    for _ in range(2):
        assert world.ask(ev.Forget, worker, namespace, b"", chain("k", 2)) is None
    with pytest.raises(Exhausted, match=r"2 .*try again later"):
        world.ask(ev.Forget, worker, namespace, b"", chain("k", 2))


def test_explain_tells_the_history_of_a_session() -> None:
    world, worker, namespace = started()
    world.save(worker, namespace, chain("k", 2), maker=b"maker of all this")
    world.append(worker, namespace, b"s", chain("k", 2))
    world.tick(500)
    world.acquire(worker, namespace, chain("k", 1))
    world.ask(ev.Forget, worker, namespace, b"", chain("k", 2)[1:])
    world.tick(500)
    told = world.ask(ev.Explain, worker, namespace, b"s", (ChunkKey(b"never"),))
    assert told.version == 1
    assert [(h.key, h.outcome.name, h.reason.name) for h in told.chunks] == [
        (b"never", "MISS", "NEVER_SEEN"),
        (b"k-0", "HIT", "NONE"),
        (b"k-1", "MISS", "FORGOTTEN"),
    ]
    first = told.chunks[1]
    assert (first.pins, first.hits, first.age_ms, first.idle_ms, first.manifests) == (1, 1, 1_000, 500, 1)
    assert (first.shards_ready, first.shards, first.token_count) == (1, 1, 4)
    with pytest.raises(NotFound, match="no such session"):
        world.ask(ev.Explain, worker, namespace, b"t")
