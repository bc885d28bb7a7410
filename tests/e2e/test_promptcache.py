"""Schemas of Prompt Cache in a daemon: over gRPC, and by kvctl."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import kvctl
from kvstore.client import connect
from kvstore.client.schemas import get_schema, list_schemas, put_schema, remove_schema
from kvstore.errors import BadRequest, NotFound, StoreError
from kvstore.promptcache import ByteTokenizer, Encoding, Layout, parse_prompt, parse_schema

from .conftest import acting_as
from .ssd_tools import SMALL_SSD, SPEC, client_of, content

ALICE, BOB = 12_001, 12_002
TRIP = b"""<schema name="trip">
  <system>You plan trips.</system>
  <user>
    <module name="plan">For <param name="days" len="8"/> days.
      <union><module name="rome">Rome has seven hills.</module><module name="oslo">Oslo has a fjord.</module></union>
    </module>
  </user>
</schema>
"""
PROMPT = '<prompt schema="trip"><plan days="3"><oslo/></plan></prompt>'


@pytest.fixture
def run_kvctl(run_dir: Path) -> Callable[..., str]:
    def run(*arguments: str, status: int = 0) -> str:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            kvctl.main(["--run-dir", str(run_dir), "--timeout", "20", *arguments])
        assert end.value.code == status, (out.getvalue(), err.getvalue())
        return err.getvalue() + out.getvalue() if status else out.getvalue()

    return run


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "trip.xml").write_bytes(TRIP)
    (tmp_path / "prompt.xml").write_text(PROMPT)
    return tmp_path


def test_schemas_by_name_and_version(daemon: Any) -> None:
    with client_of(daemon) as client:
        first = put_schema(client, TRIP)
        assert (first.schema.name, first.schema.modules, first.added, first.durable) == (
            "trip",
            3,
            True,
            False,
        )
        assert not put_schema(client, TRIP).added
        second = put_schema(client, TRIP.replace(b"seven", b"7"))
        assert get_schema(client, "trip").text == TRIP.replace(b"seven", b"7")
        assert get_schema(client, "trip", digest=first.schema.digest).text == TRIP
        rows = list_schemas(client, all_versions=True)
        assert [(row.digest, row.current) for row in rows] == [
            (second.schema.digest, True),
            (first.schema.digest, False),
        ]
        assert remove_schema(client, "trip") == 2
        with pytest.raises(NotFound, match="no such schema"):
            get_schema(client, "trip")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"<schema name='s'>\n <param name='a'/></schema>", r"f\.xml:2:2=.*has no length"),
        (b"", "has 1 to"),
        (b"<schema name='s'>" + b"<module>" * 10_000, "inside 64 others"),
    ],
)
def test_what_is_no_schema_is_refused(daemon: Any, text: bytes, says: str) -> None:
    with client_of(daemon) as client:
        with pytest.raises(BadRequest, match=says):
            put_schema(client, text, document="f.xml")
        assert list_schemas(client) == []


def test_a_request_that_is_too_long_is_refused_and_the_daemon_goes_on(daemon: Any) -> None:
    with client_of(daemon) as client:
        with pytest.raises(StoreError):
            put_schema(client, b"x" * (16 << 20))
        with pytest.raises(BadRequest, match="digest"):
            get_schema(client, "trip", digest=b"abc")
        with pytest.raises(BadRequest, match="name"):
            remove_schema(client, "")
        assert put_schema(client, TRIP).added


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restart_keeps_what_was_answered(start_daemon: Callable[..., Any], run_dir: Path, end: str) -> None:
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    daemon = start_daemon(**settings)
    with client_of(daemon) as client:
        assert put_schema(client, TRIP).durable
        kept = put_schema(client, TRIP.replace(b"seven", b"7")).schema
        put_schema(client, TRIP.replace(b"trip", b"gone"))
        assert remove_schema(client, "gone") == 1
    getattr(daemon, end)()
    with client_of(start_daemon(**settings)) as client:
        assert [row.name for row in list_schemas(client)] == ["trip"]
        assert get_schema(client, "trip").schema == kept
        assert len(list_schemas(client, all_versions=True)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_tenants_share_no_schema_and_no_key(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    run_dir.parent.chmod(0o755)
    daemon = start_daemon(tenants=f"{ALICE}=alice,{BOB}=bob")
    keys = []
    for uid in (ALICE, BOB):
        with acting_as(uid):
            client = connect(str(daemon.run_dir), timeout_s=20)
        with client:
            assert list_schemas(client) == []
            with pytest.raises(NotFound):
                get_schema(client, "trip")
            assert put_schema(client, TRIP).added
            layout = Layout(parse_schema(TRIP), ByteTokenizer())
            keys.append(set(Encoding(layout, client.open(SPEC).salt).keys()))
    assert not keys[0] & keys[1]


def test_kvctl_from_file_to_rendered_prompt(daemon: Any, run_kvctl: Callable[..., str], files: Path) -> None:
    said = run_kvctl("promptcache", "put", str(files / "trip.xml"))
    assert said.startswith("trip is version ") and "3 modules" in said and "until the daemon ends" in said
    assert "is already version" in run_kvctl("promptcache", "put", str(files / "trip.xml"))
    (row,) = json.loads(run_kvctl("promptcache", "list", "--json"))
    assert row["name"] == "trip" and row["current"]
    assert run_kvctl("promptcache", "get", "trip").encode() == TRIP
    assert "trip" in run_kvctl("promptcache", "list", "--all")
    said = run_kvctl("promptcache", "render", str(files / "prompt.xml"), "--tokenizer", "bytes", "--tokens")
    assert "plan/oslo" in said and "argument" in said and "--namespace" in said
    assert "2 versions" not in run_kvctl("promptcache", "remove", "trip", "--version", row["digest"])
    assert "no such schema" in run_kvctl("promptcache", "get", "trip", status=1)


def test_kvctl_needs_no_daemon_for_files(run_kvctl: Callable[..., str], files: Path) -> None:
    assert "3 modules" in run_kvctl("promptcache", "check", str(files / "trip.xml"))
    (files / "bad.xml").write_text("<schema name='s'>\n<union>x</union></schema>")
    bad, good = str(files / "bad.xml"), str(files / "trip.xml")
    assert "bad.xml:2:1=<union>" in run_kvctl("promptcache", "check", bad, status=1)
    both = run_kvctl("promptcache", "check", bad, good, bad, status=1)
    assert both.count("bad.xml:2:1=<union>") == 2 and "3 modules" in both, "each file is judged"
    render = ("promptcache", "render", str(files / "prompt.xml"), "--tokenizer", "bytes")
    found = json.loads(run_kvctl(*render, "--schema", str(files / "trip.xml"), "--json"))
    oslo = next(run for run in found["runs"] if run["module"] == "plan/oslo")
    # <|im_start|>system\nYou plan trips.<|im_end|>\n<|im_start|>user\n: 31 tokens; For , 8 places, days.\n
    assert (oslo["first"], oslo["last"], oslo["hits"]) == (50, 66, None)
    (files / "prompt.xml").write_text('<prompt schema="trip"><oslo/></prompt>')
    said = run_kvctl(*render, "--schema", str(files / "trip.xml"), status=1)
    assert "prompt.xml:1:23=<oslo/>" in said and "<plan><oslo/></plan>" in said
    (files / "other.xml").write_text("<schema name='other'/>")
    said = run_kvctl(*render, "--schema", str(files / "other.xml"), status=1)
    assert "--schema=" in said and "is schema other, and the prompt is of schema trip" in said


def test_render_shows_what_the_store_has(daemon: Any, run_kvctl: Callable[..., str], files: Path) -> None:
    with client_of(daemon) as client:
        put_schema(client, TRIP)
        space = client.open(SPEC)
        layout = Layout(parse_schema(TRIP), ByteTokenizer())
        encoding = Encoding(layout, space.salt, chunk_tokens=SPEC.chunk_tokens)
        keys = [*(chunk.key for chunk in encoding.beginning), *encoding.units["plan", "oslo"].keys]
        with space.write(keys) as batch:
            batch.copy_many([(index, None, content(keys[index])) for index in batch.granted])
            assert batch.commit().error is None
        assert layout.place(parse_prompt(PROMPT, layout.schema)).end == 80
        (row,) = client.stats().namespaces
        render = ("promptcache", "render", str(files / "prompt.xml"), "--tokenizer", "bytes", "--json")
        found = json.loads(run_kvctl(*render, "--namespace", str(row.namespace_id)))
    hits = {(run["module"], run["first"]): run["hits"] for run in found["runs"] if run["source"] == "stored"}
    assert hits["", 0] == ["hit"]
    assert hits["plan/oslo", 50] == ["hit"]
    assert hits["plan", 31] == ["never seen"]
