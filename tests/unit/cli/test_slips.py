"""Slips of the hand at `kvctl`: the answer names what was typed, and what to type instead."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from kvstore.cli import check, kvctl
from kvstore.cli.fleet import _routes
from kvstore.cli.kvctl import main, parser
from kvstore.errors import ConfigError
from kvstore.server.daemon import check_port_is_free
from kvstore.tiers.check import Findings
from kvstore.v1 import fleet_pb2

EXAMPLES = Path(__file__).parents[3] / "examples" / "promptcache"
RENDER = ("promptcache", "render", str(EXAMPLES / "travel_prompt.xml"), "--tokenizer")
TRAVEL = ("--schema", str(EXAMPLES / "travel.xml"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("check", "--rate", "8X"),
            "argument --rate: 8X is not a size (bytes, or a whole number with K, M, G",
        ),
        (("check", "--fix"), "kvctl: --fix: is for a directory that no daemon uses (stop the daemon"),
        (("check", "--wait", "soon"), "argument --wait: soon is no number of seconds"),
        (("record", "file", "--bytes-max", "1X"), "argument --bytes-max: 1X is not a size"),
        (("simulate", "/nowhere", "--format", "mooncake"), "trace=/nowhere: cannot be read: No such file"),
        (("promptcache", "check", "/nowhere"), "FILE=/nowhere: cannot be read: No such file"),
        ((*RENDER, "bytes", "--schema", "/nowhere"), "--schema=/nowhere: cannot be read: No such file"),
        (
            (*RENDER, "bytes", "--schema", str(EXAMPLES / "code.xml")),
            "code.xml: is schema queue-code, and the prompt is of schema journey (name the file of schema journey",
        ),
        (("sessions", "--limit", "0"), "argument --limit: 0 is none at all"),
        (("recall", "--maker", "ab" * 16, "--limit", "0"), "argument --limit: 0 is none at all"),
        (("quarantine", "--limit", "0"), "argument --limit: 0 is none at all"),
        (("simulate", "x", "--turns", "0"), "argument --turns: 0 is none at all"),
        (("advise", "--seconds", "0"), "argument --seconds: 0 is none at all"),
        (("statz",), "argument COMMAND: did you mean stats? invalid choice: 'statz'"),
        (("fleet", "stat"), "did you mean stats? invalid choice: 'stat'"),
        (("stats", "--wach"), "kvctl stats: error: unrecognized arguments: --wach (did you mean --watch?)"),
        (("stats", "7"), "kvctl stats: error: unrecognized arguments: 7"),
        (("--run-dir", "", "purge", "--tenant", "a"), "argument --run-dir: is empty (name the daemon's"),
        (("promptcache", "list", "--run-dir="), "argument --run-dir: is empty (name the daemon's"),
        (("check", "--ssd-bytes", "1G"), "--ssd-bytes: would do nothing here (a running daemon has its own"),
        (("check", "--ssd-key-file", "/nowhere"), "--ssd-key-file: would do nothing here"),
        (
            ("check", "--ssd-dir", "/nowhere", "--rate", "1G"),
            "--rate: would do nothing here (it is for a running",
        ),
        (
            ("check", "--config", "/nowhere"),
            "--config=/nowhere: cannot be read: No such file or directory (name",
        ),
        (("record",), "one of the arguments FILE --status --stop is required"),
        (("record", "a", "--status"), "argument --status: not allowed with argument FILE"),
        (("record", "a", "--seconds", "0"), "argument --seconds: 0 is none at all"),
        (("explain",), "one of the arguments SESSION --key is required"),
        (("forget",), "one of the arguments SESSION --key --file is required"),
        (("explain", "a", "--key", "00"), "argument --key: not allowed with argument SESSION"),
        (("forget", "--key", "00", "--file", "00"), "argument --file: not allowed with argument --key"),
        ((*RENDER, "bites", *TRAVEL), "--tokenizer=bites: has no tokenizer.json (name a folder with"),
    ],
)
def test_an_answer_names_the_slip(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (1, 2)
    assert words in capsys.readouterr().err


def test_a_name_that_a_daemon_cannot_be_told_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvctl, "connect", lambda run_dir, timeout_s: contextlib.nullcontext())
    with pytest.raises(SystemExit) as ended:
        main(("record", os.fsdecode(b"/tmp/\xff")))
    assert ended.value.code == 1
    assert "/tmp/\\udcff: is no text in UTF-8" in capsys.readouterr().err


def test_check_says_what_it_could_not_verify(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of a key that a rotation left behind are no damage, and not verified either."""
    for count, end in (
        (0, "clean"),
        (1, "clean; 1 chunk could not be verified: encrypted with a key that is not here"),
    ):
        check._show(Findings("/ssd", other_key=count), argparse.Namespace(json=False, fix=False))
        assert capsys.readouterr().out.splitlines()[-1].startswith(end)


@pytest.mark.parametrize("arguments", [("record", "file"), ("fleet", "drain", "gpu-1")])
def test_bytes_max_is_a_size(arguments: tuple[str, ...]) -> None:
    assert parser().parse_args([*arguments, "--bytes-max", "1G"]).bytes_max == 1 << 30


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_what_cannot_be_drawn_is_told_of_its_option(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 1, "input_length": 512, "output_length": 9, "hash_ids": [1]}\n' * 2)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(trace), "--format", "mooncake", option, str(tmp_path / "out")])
    assert ended.value.code == 1
    assert f"{option}={tmp_path}/out: needs matplotlib (pip install" in capsys.readouterr().err


def test_a_trace_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    row = '{"timestamp": 1, "input_length": 512, "output_length": 9, "hash_ids": [1]}\n'
    writer = threading.Thread(target=pipe.write_text, args=(row * 2,))
    writer.start()
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(pipe), "--format", "mooncake", "--dram", "1G"])
    writer.join()
    assert not ended.value.code, capsys.readouterr().err


def test_a_prompt_without_a_chunk_has_no_routes() -> None:
    assert _routes(fleet_pb2.RouteReply()).startswith("no chunk to look for: fewer tokens than a chunk has")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EADDRINUSE, "stop what listens there"),
        (errno.EADDRNOTAVAIL, "choose an address of this machine"),
        (errno.EACCES, "choose a port from 1024 on"),
    ],
)
def test_an_address_is_refused_with_what_helps(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(ConfigError) as refused:
        check_port_is_free("metrics_port", "10.9.9.9", 80)
    assert refused.value.remedy.startswith(remedy)
