"""The journal of forgets: what a start has to heed, whatever became of the journal, of the index, or of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.core.events import Heeded
from kvstore.tiers.remote.backend import Book, News
from kvstore.tiers.remote.tombstones import EVERYTHING, Forgotten, Journal, from_lines, to_lines
from kvstore.types import ChunkKey


def key(name: bytes) -> Forgotten:
    return b"d" * 32, ChunkKey(name), b""


def start(path: Path, heeded: Heeded | None) -> News:
    return Book(str(path), heeded=heeded).take_news()


def test_a_start_heeds_what_came_after_what_was_carried_out(tmp_path: Path) -> None:
    """Told by others, told by this node, or not told at all."""
    book = Book(str(path := tmp_path / "journal"))
    assert book.take_news().reached is None, "an empty journal says that something was carried out"
    book.learn([(key(b"theirs"), 1)], 1, "h1")
    book.postpone([key(b"ours")])
    book.learn([(key(b"ours"), 2)], 2, "h2", own=True)
    book.told([key(b"ours")])
    first = book.take_news()
    assert first.forgotten == (key(b"theirs"),), "who has forgotten it heeds it"
    assert start(path, first.reached).forgotten == ()
    book.learn([(key(b"later"), 3)], 3, "h3")
    book.postpone([key(b"waits")])
    again = start(path, first.reached)
    assert again.forgotten == (key(b"later"), key(b"waits"))
    assert start(path, again.reached).forgotten == ()
    book.learn([(key(b"theirs"), 4)], 4, "h4")  # forgotten once more
    assert start(path, again.reached).forgotten == (key(b"theirs"),)
    assert set(start(path, None).forgotten) == {
        key(name) for name in (b"theirs", b"ours", b"later", b"waits")
    }


def test_an_index_without_its_journal_and_a_journal_without_its_index_heed_all(tmp_path: Path) -> None:
    path, other = tmp_path / "journal", tmp_path / "other"
    for each in (path, other):
        Book(str(each)).learn([(key(b"k"), 1)], 1, "head")
    of_other = Book(str(other)).take_news().reached
    assert start(path, None).forgotten == (key(b"k"),), "the index was wiped"
    assert start(path, of_other).forgotten == (key(b"k"),), "its positions are those of another journal"


def test_an_older_copy_of_the_journal_heeds_all_until_the_index_knows_its_new_name(tmp_path: Path) -> None:
    """Positions would be given a second time: what is forgotten now would stand before what the index says."""
    book = Book(str(path := tmp_path / "journal"))
    book.learn([(key(b"a"), 1)], 1, "h1")
    copy = path.read_bytes()
    book.learn([(key(b"b"), 2), (key(b"c"), 3)], 3, "h3")
    reached = book.take_news().reached
    assert reached is not None
    path.write_bytes(copy)
    older = Book(str(path), heeded=reached)
    news = older.take_news()
    assert news.forgotten == (key(b"a"),) and news.reached is not None
    assert news.reached.journal != reached.journal
    older.learn([(key(b"x"), 4), (key(b"y"), 5), (key(b"z"), 6)], 6, "h6")
    assert start(path, older.take_news().reached).forgotten == ()
    assert len(start(path, reached).forgotten) == 4, "what stands under old positions is passed over"


def test_an_older_copy_of_the_index_heeds_what_came_since(tmp_path: Path) -> None:
    book = Book(str(path := tmp_path / "journal"))
    book.learn([(key(b"a"), 1)], 1, "h1")
    older = book.take_news().reached
    book.learn([(key(b"b"), 2)], 2, "h2")
    assert start(path, older).forgotten == (key(b"b"),)


def test_a_store_that_was_put_back_is_heeded_where_it_differs(tmp_path: Path) -> None:
    """The same key was forgotten at 5 here; in the older copy somebody forgot it anew, at 3."""
    book = Book(str(tmp_path / "journal"))
    book.learn([(key(b"k"), 5), (key(b"l"), 2)], 5, "head")
    book.take_news()
    book.learn([(key(b"k"), 3), (key(b"l"), 2)], 3, "other")
    assert book.take_news().forgotten == ()
    book.learn([(key(b"k"), 3), (key(b"l"), 2)], 3, "other", is_other=True)
    assert book.take_news().forgotten == (key(b"k"),)


def test_what_no_record_is_left_of_goes_from_the_journal(tmp_path: Path) -> None:
    book = Book(str(path := tmp_path / "journal"))
    book.learn([(key(b"old"), 1), (key(b"new"), 2)], 2, "head")
    reached = book.take_news().reached
    book.tombstones.forget_older(1)
    book.learn([(key(b"newer"), 3)], 3, "head 3")
    assert start(path, None).forgotten == (key(b"new"), key(b"newer"))
    assert start(path, reached).forgotten == (key(b"newer"),)


def test_a_journal_of_an_earlier_version_is_heeded_once() -> None:
    """It has neither a name nor positions."""
    new = Journal()
    new.tombstones.add(key(b"k"), 7)
    new.pending[key(b"p")] = None
    lines = [json.loads(line) for line in to_lines(new).splitlines()]
    for line in lines:
        line.pop("position", None)
    old = "\n".join(json.dumps(line) for line in lines if "journal" not in line)
    read = from_lines(old)
    assert read.behind(None) == [key(b"k"), key(b"p")] and read.name != new.name
    assert read.behind(read.reached("peers")) == []


@pytest.mark.parametrize("position", [-1, 0, 99, "many", None, 1.5, True])
def test_a_position_that_the_journal_never_gave_is_heeded(position: object) -> None:
    journal = Journal()
    journal.tombstones.add(key(b"k"), 7)
    journal.note(key(b"k"))
    reached = journal.reached("peers")
    lines = [json.loads(line) for line in to_lines(journal).splitlines()]
    next(line for line in lines if "entry" in line)["position"] = position
    read = from_lines("\n".join(map(json.dumps, lines)))
    expected = [] if position is True else [key(b"k")]  # true is 1
    assert read.behind(reached) == expected


def test_everything_has_a_position_like_all_else() -> None:
    journal = Journal()
    journal.tombstones.everything = 3
    journal.note(EVERYTHING)
    read = from_lines(to_lines(journal))
    assert read == journal and read.behind(None) == [EVERYTHING]
    assert read.behind(read.reached("remote")) == []
