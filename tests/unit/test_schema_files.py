"""Schemas in files: versions, bounds, damage, and crashes at every call of the disk."""

import os
from pathlib import Path

import pytest

from kvstore.errors import Exhausted, NotFound, Unavailable
from kvstore.keys import tenant_mark
from kvstore.promptcache import PmlError
from kvstore.promptcache.schema import text_digest
from kvstore.tiers import schema_files
from kvstore.tiers.schema_files import SCHEMAS_DIR, VERSIONS_MAX, SchemaFiles


def text(name: str = "s", inner: str = "x") -> bytes:
    return f"<schema name='{name}'>{inner}</schema>".encode()


def opened(folder: object) -> SchemaFiles:
    files = SchemaFiles(str(folder))
    files.load()
    return files


@pytest.fixture(params=["on disk", "in memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> SchemaFiles:
    return opened(tmp_path if request.param == "on disk" else "")


def test_versions_of_a_name(files: SchemaFiles) -> None:
    first, added, warnings = files.put("t", text(inner="<module name='a'/>"), "f")
    assert (first.name, first.modules, added, warnings) == ("s", 1, True, ())
    assert files.put("t", text(inner="<module name='a'/>"), "f") == (first, False, ())
    second, _, warnings = files.put("t", text(inner="</user>"), "f")
    assert len(warnings) == 1
    assert files.get("t", "s") == (second, text(inner="</user>"))
    assert files.get("t", "s", first.digest) == (first, text(inner="<module name='a'/>"))
    assert files.versions("t") == [second]
    assert files.versions("t", all_versions=True) == [second, first]
    again, added, _ = files.put("t", text(inner="<module name='a'/>"), "f")
    assert added and again.digest == first.digest and again.number > second.number
    assert files.versions("t", all_versions=True) == [again, second]


def test_tenants_have_names_of_their_own(files: SchemaFiles) -> None:
    mine, _, _ = files.put("a", text(inner="mine"), "f")
    files.put("b", text(inner="theirs"), "f")
    assert files.get("a", "s") == (mine, text(inner="mine"))
    assert files.versions("a") == [mine]
    with pytest.raises(NotFound):
        files.get("b", "s", mine.digest)
    with pytest.raises(NotFound):
        files.remove("c", "s")
    assert files.remove("b", "s") == 1
    assert files.get("a", "s")[0] == mine


def test_what_is_no_schema_changes_nothing(files: SchemaFiles) -> None:
    kept, _, _ = files.put("t", text(), "f")
    with pytest.raises(PmlError, match="f:1:27"):
        files.put("t", text(inner="<param/> <param name='a'/>"), "f")
    assert files.versions("t", all_versions=True) == [kept]


def test_removal(files: SchemaFiles) -> None:
    versions = [files.put("t", text(inner=str(number)), "f")[0] for number in range(3)]
    assert files.remove("t", "s", versions[2].digest) == 1
    assert files.get("t", "s")[0] == versions[1]
    assert files.remove("t", "s") == 2
    with pytest.raises(NotFound, match="no such schema"):
        files.get("t", "s")
    assert files.versions("t") == []


def test_the_oldest_version_goes_when_there_are_too_many(files: SchemaFiles) -> None:
    versions = [files.put("t", text(inner=str(number)), "f")[0] for number in range(VERSIONS_MAX + 2)]
    assert files.versions("t", all_versions=True) == versions[: -VERSIONS_MAX - 1 : -1]
    with pytest.raises(NotFound, match="no such version"):
        files.get("t", "s", versions[0].digest)


def test_bounds(files: SchemaFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_files, "NAMES_PER_TENANT_MAX", 2)
    files.put("t", text("a"), "f")
    files.put("t", text("b"), "f")
    with pytest.raises(Exhausted, match="3 schemas, more than 2"):
        files.put("t", text("c"), "f")
    files.put("t", text("a", "other"), "f")
    files.put("u", text("c"), "f")
    monkeypatch.setattr(schema_files, "BYTES_PER_TENANT_MAX", 100)
    with pytest.raises(Exhausted, match="bytes of schemas"):
        files.put("t", text("a", "y" * 50), "f")
    monkeypatch.setattr(schema_files, "FILES_MAX", 4)
    with pytest.raises(Exhausted, match="versions of all tenants"):
        files.put("v", text("d"), "f")


def test_a_restart_finds_all_versions(tmp_path: Path) -> None:
    files = opened(tmp_path)
    first, _, _ = files.put("t", text(inner="1"), "f")
    second, _, _ = files.put("t", text(inner="2"), "f")
    other, _, _ = files.put("ü", text("ключ", "3"), "f")
    files.put("t", text(inner="1"), "f")
    again = opened(tmp_path)
    assert [one.digest for one in again.versions("t", all_versions=True)] == [first.digest, second.digest]
    assert again.get("ü", "ключ") == (other, text("ключ", "3"))
    new, _, _ = again.put("t", text(inner="4"), "f")
    assert new.number > max(one.number for one in files.versions("t", all_versions=True))


@pytest.mark.parametrize("cut", [0, 10, 60, -1])
def test_a_damaged_file_is_no_schema(tmp_path: Path, cut: int) -> None:
    files = opened(tmp_path)
    files.put("t", text(), "f")
    (path,) = (tmp_path / SCHEMAS_DIR).iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    assert opened(tmp_path).versions("t") == []
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    assert opened(tmp_path).versions("t") == []
    assert path.exists(), "it is left for who wants to look"


def test_damaged_text_is_not_served(tmp_path: Path) -> None:
    files = opened(tmp_path)
    version, _, _ = files.put("t", text(), "f")
    (path,) = (tmp_path / SCHEMAS_DIR).iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    for one in (files, opened(tmp_path)):
        with pytest.raises(Unavailable, match="damaged"):
            one.get("t", "s", version.digest)
    path.rename(path.with_name("0" * 32 + path.name[32:]))
    assert opened(tmp_path).versions("t") == [], "another tenant's or name's file"


class Crash(BaseException):
    """The process is gone."""


CALLS = ("fsync", "rename", "unlink", "open")


@pytest.mark.parametrize("lost", [False, True])
def test_a_crash_or_an_error_at_any_call_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The n-th call of the disk fails, for every n: with an error, or because the process ends there."""
    done = number = 0
    while not done:
        folder = tmp_path / str(number)
        files = opened(folder)
        for version in range(VERSIONS_MAX):
            files.put("t", text(inner=str(version)), "f")
        before = [one.digest for one in files.versions("t", all_versions=True)]
        left = number

        def failing(call, lost=lost):
            def wrapped(*arguments, **named):
                nonlocal left
                if left == 0:
                    left -= 1
                    raise Crash if lost else OSError(5, "Input/output error")
                left -= 1
                return call(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, failing(getattr(os, name)))
            try:
                new = files.put("t", text(inner="new"), "f")[0].digest
                files.remove("t", "s")
                done = left >= 0
            except (Unavailable, Crash):
                new = text_digest(text(inner="new"))
        found = [one.digest for one in opened(folder).versions("t", all_versions=True)]
        after = [new, *before]
        assert found == [] or found in ([*before], after, after[:-1]) or after[: len(found)] == found, number
        assert not any(path.name.endswith(".new") for path in (folder / SCHEMAS_DIR).iterdir())
        number += 1
    assert number > VERSIONS_MAX + 4, "each call was reached"


def test_a_folder_that_cannot_be_used_keeps_no_kv_from_being_served(tmp_path: Path) -> None:
    (tmp_path / SCHEMAS_DIR).write_text("a file")
    files = opened(tmp_path)
    with pytest.raises(Unavailable, match="cannot be written"):
        files.put("t", text(), "f")
    assert files.versions("t") == []


def test_all_of_a_tenant_goes_by_its_mark_and_nothing_of_another(files: SchemaFiles) -> None:
    for tenant in ("a", "b"):
        files.put(tenant, text("s"), "f")
        files.put(tenant, text("t"), "f")
    assert files.remove_all_marked(tenant_mark("c")) == 0
    assert files.remove_all_marked(tenant_mark("a")) == 2
    assert not files.versions("a") and len(files.versions("b")) == 2
