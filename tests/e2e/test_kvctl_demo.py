"""`kvctl demo`: it works out of the box, notices what is wrong, and leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli import demo
from kvstore.errors import Unavailable
from kvstore.types import ChunkKey


def test_it_serves_chats_survives_kill_9_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--json", "demo"]
    done = subprocess.run(
        command, env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    *requests, summary = map(json.loads, done.stdout.splitlines())
    assert len(requests) == summary["requests"] == demo.CHATS * demo.TURNS
    assert summary["wrong_bytes"] == summary["lost"] == 0
    assert summary["compared_bytes"] == (summary["dram"] + summary["ssd"]) * demo.TOKEN_BYTES > 100 << 20
    assert summary["ssd"] + summary["ahead"] > 0, "after kill -9 everything comes from SSD"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_it_finds_nothing_left(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "demo"]
    with subprocess.Popen(command, env={"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # it has its directory, and starts its daemon
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_ends_it_while_the_daemon_is_being_started_leaves_none(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process is there, and nobody has heard of it yet."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))
        signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(demo.subprocess, "Popen", start)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    with pytest.raises((SystemExit, KeyboardInterrupt)), demo.tidy_end(), demo.directory() as folder:
        demo.Demo(folder, as_json=True).run()
    assert [process.poll() is not None for process in started] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right, seen = demo.kv, set[ChunkKey]()

    def wrong(key: ChunkKey) -> np.ndarray:
        """One byte differs when it is asked for again: what is compared is not what was saved."""
        data = right(key)
        data[-1] ^= key in seen
        seen.add(key)
        return data

    monkeypatch.setattr(demo, "kv", wrong)
    monkeypatch.setattr(demo, "TURNS", 1)
    monkeypatch.setattr(demo, "KILL_AFTER", 100)
    assert demo.Demo(tmp_path, as_json=False).run() == 1
    # One byte of each shared chunk of the system prompt, in each of the chats after the first
    assert "BYTES WRONG" in (told := capsys.readouterr().out)
    assert f": {demo.SYSTEM_TOKENS // demo.CHUNK_TOKENS * (demo.CHATS - 1)} wrong" in told


def test_what_is_lost_after_a_kill_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start, monkeypatched = demo.Demo._start, []

    def start_on_an_empty_disk(self: demo.Demo) -> None:
        if monkeypatched:
            shutil.rmtree(tmp_path / "ssd")
        monkeypatched.append(self)
        start(self)

    monkeypatch.setattr(demo.Demo, "_start", start_on_an_empty_disk)
    monkeypatch.setattr(demo, "TURNS", 2)
    monkeypatch.setattr(demo, "KILL_AFTER", demo.CHATS)
    assert demo.Demo(tmp_path, as_json=False).run() == 1
    assert "durable tokens were LOST" in capsys.readouterr().out


def test_what_the_daemon_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "lmdb" else object())
    with pytest.raises(Unavailable, match=r"needs lmdb.*pip install 'attnstore\[daemon\]'"):
        demo.run("", argparse.Namespace(json=False))
