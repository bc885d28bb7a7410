"""Forgets in an object store (a folder that nodes share): what an older copy of it has lost is told again."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.remote import object_store
from kvstore.tiers.remote.backend import Book, StoreProblem
from kvstore.tiers.remote.object_store import ObjectStore
from kvstore.tiers.remote.records import Description
from kvstore.tiers.remote.tombstones import EVERYTHING, Forgotten
from kvstore.types import ChunkKey

from ..fleet_tools import BOUND_S

DIGEST = b"d" * 32


class Node:
    """A node as far as its forgets are concerned."""

    def __init__(self, folder: Path) -> None:
        self.book = Book("")
        self.store = ObjectStore(f"file://{folder}", self.book, salt=b"", ttl_s=60, timeout_s=BOUND_S)

    def forget(self, name: bytes) -> None:
        self.store.forget([key(name)], time.monotonic() + BOUND_S)

    def read(self) -> None:
        """What is told again is read after that, as `RemoteTier` does."""
        with suppress(StoreProblem):
            self.store.catch_up(time.monotonic() + BOUND_S)
        self.store.catch_up(time.monotonic() + BOUND_S)

    @property
    def count(self) -> int:
        return self.book.seen[0]

    def refuses(self, name: bytes, generation: int) -> str:
        return self.book.refuses(
            Description(DIGEST, ChunkKey(name), 0, 1, 64, False, (), 4_096, 0, generation, 0)
        )


Make = Callable[[], Node]


def key(name: bytes) -> Forgotten:
    return DIGEST, ChunkKey(name), b""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("obstore")
    monkeypatch.setattr(object_store, "KNOWN_CHECKED_S", 0.0)
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def node(folder: Path) -> Iterator[Make]:
    made: list[Node] = []

    def make() -> Node:
        made.append(Node(folder))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def test_what_a_new_node_forgets_on_an_older_copy_holds_against_what_was_computed_before(
    folder: Path, node: Make, tmp_path: Path
) -> None:
    """It stands there at a count that others, and what they have written, have passed."""
    a = node()
    shutil.copytree(folder, copy := tmp_path / "copy")
    for number in range(5):
        a.forget(b"%d" % number)
    put_back(copy, folder)
    new = node()
    new.forget(b"k")
    assert new.count == 1
    a.read()
    assert a.count > 5 and a.refuses(b"k", 5), "a record of another node would bring it back"
    new.read()
    assert new.refuses(b"k", 5) and new.refuses(b"0", 5), "it never hears what was told again"


@pytest.mark.parametrize("kept", [0, 3])
def test_who_was_behind_when_an_older_copy_was_put_back_goes_on_hearing(
    folder: Path, node: Make, tmp_path: Path, kept: int
) -> None:
    """The counts between what it knows and what is told again are nowhere any more."""
    a, behind = node(), node()
    for number in range(kept):
        a.forget(b"%d" % number)
    behind.read()
    shutil.copytree(folder, copy := tmp_path / "copy")
    for number in range(kept, 6):
        a.forget(b"%d" % number)
    put_back(copy, folder)
    assert behind.count == kept
    a.read()
    behind.read()
    assert behind.count == a.count and behind.refuses(b"5", 6)
    a.forget(b"later")
    behind.read()
    assert behind.refuses(b"later", a.count - 1)
    behind.forget(b"last")
    a.read()
    assert a.refuses(b"last", a.count - 1)


def test_two_that_tell_again_at_once_lose_nothing_of_each_other(folder: Path, node: Make) -> None:
    a, b = node(), node()
    for number in range(4):
        a.forget(b"a%d" % number)
        b.forget(b"b%d" % number)
    a.read()
    b.read()
    with a.book.lock:
        a.book.tombstones.add(key(b"of a alone"), a.book.tombstones.count)
    shutil.rmtree(folder)
    folder.mkdir()
    listed = b.store._list_forgotten

    async def a_comes_between() -> Any:
        found = await listed()
        b.store._list_forgotten = listed  # type: ignore[method-assign]
        other = threading.Thread(target=a.read)
        other.start()
        other.join()
        return found

    b.store._list_forgotten = a_comes_between  # type: ignore[method-assign]
    b.read()
    assert b.refuses(b"of a alone", 5), "b wrote over what a had told"
    a.read()
    assert a.count == b.count


# ------------------------------------------------------------------------------------------- what cannot be read


def tombstone(folder: Path, count: int) -> Path:
    (found,) = folder.rglob(f"forgotten/{count:012d}")
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def test_what_is_damaged_is_written_again_by_a_node_that_has_read_it(folder: Path, node: Make) -> None:
    a, b = node(), node()
    a.forget(b"1")
    a.forget(b"2")
    b.read()
    cut(tombstone(folder, 2))
    late = node()
    with pytest.raises(StoreProblem, match="damaged: nothing is served before"):
        late.store.catch_up(time.monotonic() + BOUND_S)
    b.store._checked_at = 0.0
    b.read()
    late.read()
    assert late.count == 2 and late.refuses(b"2", 1) and late.refuses(b"1", 0)
    assert not late.refuses(b"3", 0), "more is refused than was forgotten"
    a.forget(b"3")
    for each in (b, late):
        each.read()
        assert each.refuses(b"3", 2) and not each.refuses(b"3", 3)


@pytest.mark.parametrize("how", ["cut", "removed"])
def test_what_nobody_can_read_any_more_refuses_all_that_was_stored_before_it(
    folder: Path, node: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Another node's forget, of which this one has not heard: it must not go on as if there were none."""
    monkeypatch.setattr(object_store, "GAPS_LOOKED_FOR_S", 0.0)
    behind, a = node(), node()
    a.forget(b"1")
    behind.read()
    a.forget(b"2")
    a.forget(b"3")
    path = tombstone(folder, 2)
    cut(path) if how == "cut" else path.unlink()
    with pytest.raises(StoreProblem, match=r"damaged|gone"):
        behind.store.catch_up(time.monotonic() + BOUND_S)
    assert behind.count == 1
    monkeypatch.setattr(object_store, "DAMAGED_PATIENCE_S", 0.0)
    behind.read()
    assert behind.count == 3
    assert behind.refuses(b"2", 1) and behind.refuses(b"never heard of", 1), "it may be what was forgotten"
    assert not behind.refuses(b"never heard of", 2) and behind.refuses(b"3", 2)
    news, count, *_ = behind.book.take_news()
    assert count == 3 and EVERYTHING in news, "what it has itself may be meant as well"
    new = node()
    new.read()
    assert new.count == 3 and new.refuses(b"never heard of", 1) and not new.refuses(b"never heard of", 2)
    a.read()
    assert not a.refuses(b"never heard of", 1), "who has read it knows better"


def test_everything_is_dropped_once_more_by_a_start_until_it_was_carried_out(tmp_path: Path) -> None:
    """And by none after that: it would empty the SSD each time."""
    book = Book(str(path := tmp_path / "journal"))
    book.learn([(EVERYTHING, 4)], 4, "head")
    assert EVERYTHING in book.take_news().forgotten
    again = Book(str(path)).take_news()
    assert EVERYTHING in again.forgotten
    later = Book(str(path), heeded=again.reached)
    assert EVERYTHING not in later.take_news().forgotten and later.tombstones.everything == 4


def test_a_count_that_comes_while_it_is_looked_for_is_no_gap(
    folder: Path, node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "GAPS_LOOKED_FOR_S", 0.0)
    monkeypatch.setattr(object_store, "DAMAGED_PATIENCE_S", 0.0)
    a, b = node(), node()
    a.forget(b"1")
    b.read()
    counts = b.store._counts

    async def two_come() -> list[int]:
        b.store._counts = counts  # type: ignore[method-assign]
        other = threading.Thread(target=lambda: (a.forget(b"2"), a.forget(b"3")))
        other.start()
        other.join()
        return [1, 3]

    b.store._counts = two_come  # type: ignore[method-assign]
    b.store.catch_up(time.monotonic() + BOUND_S)
    b.read()
    assert b.count == 3 and not b.refuses(b"never heard of", 0)
