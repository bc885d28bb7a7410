"""Schemas of the daemon as a worker reads them: while somebody edits them, and while there is no daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import Client
from kvstore.errors import NotFound, Unavailable
from kvstore.gpu_worker.promptcache import prompts
from kvstore.gpu_worker.promptcache.prompts import DaemonLibrary
from kvstore.promptcache import ByteTokenizer, PmlError
from kvstore.promptcache.schema import text_digest


def text_of(version: int) -> str:
    return f'<schema name="s"><module name="a">{version}</module></schema>'


class Daemon:
    """Versions of one schema, the current one first. `meanwhile`: what happens after a list, before it is read."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.away = False
        self.lists = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def list(self, client: Any, *, name: str, all_versions: bool) -> list[Any]:
        assert name == "s" and all_versions
        if self.away:
            raise Unavailable("no daemon")
        self.lists += 1
        rows = [SimpleNamespace(name="s", digest=text_digest(text)) for text in self.texts]
        self.meanwhile()
        return rows

    def get(self, client: Any, name: str, *, digest: bytes) -> Any:
        for text in self.texts:
            if text_digest(text) == digest:
                return SimpleNamespace(text=text)
        raise NotFound("no such version")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    made = Daemon(text_of(2), text_of(1))
    monkeypatch.setattr(prompts, "list_schemas", made.list)
    monkeypatch.setattr(prompts, "get_schema", made.get)
    return made


@pytest.fixture
def library(daemon: Daemon) -> DaemonLibrary:
    return DaemonLibrary(lambda: cast(Client, SimpleNamespace()))


def versions(library: DaemonLibrary) -> list[int]:
    return [int(schema.scopes[()].modules["a"].children[0].text) for schema in library.versions("s")]  # type: ignore[union-attr]


def test_the_current_version_comes_first(library: DaemonLibrary) -> None:
    assert versions(library) == [2, 1]


def test_a_version_that_is_replaced_while_it_is_read_is_no_missing_schema(
    daemon: Daemon, library: DaemonLibrary
) -> None:
    def edit() -> None:
        daemon.texts[:] = [text_of(4), text_of(3)]
        daemon.meanwhile = lambda: None

    daemon.meanwhile = edit
    assert versions(library) == [4, 3]
    assert daemon.lists == 2


def test_an_earlier_version_that_goes_meanwhile_is_left_out(daemon: Daemon, library: DaemonLibrary) -> None:
    daemon.meanwhile = lambda: daemon.texts.__delitem__(slice(1, None))
    assert versions(library) == [2]
    assert daemon.lists == 1


def test_a_schema_that_is_edited_all_the_time_is_asked_for_so_often(
    daemon: Daemon, library: DaemonLibrary
) -> None:
    def edit() -> None:
        daemon.texts[:] = [text_of(10 + daemon.lists)]

    daemon.meanwhile = edit
    assert versions(library) == []
    assert daemon.lists == prompts.LISTED_MAX


def test_an_earlier_version_that_is_no_schema_any_more_is_left_out(
    daemon: Daemon, library: DaemonLibrary
) -> None:
    daemon.texts.append("<schema name='s'><module name='a' -b='c'/></schema>")
    assert versions(library) == [2, 1]
    daemon.texts.insert(0, "<schema name='s'><module name='a' -b='d'/></schema>")
    with pytest.raises(PmlError, match="is no tag"):
        versions(library)


def test_without_a_daemon_the_last_versions_serve_but_not_those_that_were_removed(
    daemon: Daemon, library: DaemonLibrary
) -> None:
    daemon.away = True
    with pytest.raises(Unavailable):
        versions(library)
    daemon.away = False
    assert versions(library) == [2, 1]
    daemon.away = True
    assert versions(library) == [2, 1]
    daemon.away = False
    daemon.texts.clear()
    assert versions(library) == []
    daemon.away = True
    assert versions(library) == []


def test_what_is_kept_of_schemas_is_bounded_by_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 schemas of 20,000 modules each would take 5 GB."""
    monkeypatch.setattr(prompts, "KEPT_COST_MAX", 10)
    kept: prompts._Kept[str] = prompts._Kept(len)
    for text in ("aaaa", "bbbb", "cc"):
        assert kept.get(text[0], lambda text=text: text) == text  # type: ignore[misc]
    assert [kept.peek(key) for key in "abc"] == ["aaaa", "bbbb", "cc"]
    kept.get("a", lambda: "never made")
    kept.put("d", "d")
    assert [kept.peek(key) for key in "abcd"] == [
        "aaaa",
        None,
        "cc",
        "d",
    ]  # the one that was asked for last stays
    kept.put("d", "dddd")
    assert len(kept) == 3
    kept.put("e", "e" * 20)
    assert [kept.peek(key) for key in "acde"] == [None, None, None, "e" * 20]


def test_layouts_encodings_and_schemas_have_a_cost() -> None:
    schema = prompts.parse_schema(text_of(1).replace("1", "x" * 1000))
    layout = prompts.Layout(schema, ByteTokenizer())
    encoding = prompts.Encoding(layout, bytes(32))
    assert (
        prompts._layout_cost(layout) == prompts._encoding_cost((encoding, ())) == 1000 + prompts.MODULE_COST
    )
    assert prompts._schemas_cost([schema, schema]) > 500
