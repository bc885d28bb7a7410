"""A file system that is too small, a limit, files that somebody removes or cuts under the daemon: it is said at once,
in the log, in the state and by doctor, and nothing is promised meanwhile. And files of `kvctl put` that are on SSD."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import objects
from kvstore.client import Client, Namespace
from kvstore.errors import NotFound, Unavailable
from kvstore.types import Outcome, Reason, Wait

from .ssd_tools import (
    DRAM_CHUNKS,
    SMALL_SSD,
    SPEC,
    Weather,
    client_of,
    eventually,
    in_state,
    keys_of,
    look,
    save,
    settled_ssd,
    ssd_of,
)
from .test_admin import kvctl_

RESTART = "leave its files alone; restart the daemon, which drops what is lost and keeps the rest"


@pytest.fixture
def ssd_dir(run_dir: Path) -> Path:
    return run_dir.parent / "ssd"


@pytest.fixture
def start(start_daemon: Callable[..., Any], ssd_dir: Path) -> Callable[..., Any]:
    return lambda **settings: start_daemon(**{**SMALL_SSD, "ssd_dir": ssd_dir, **settings})


def doctor_of_ssd(run_dir: Path) -> dict[str, Any]:
    """What doctor finds of the SSD tier; its exit status is 1 exactly when that is not ok."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--run-dir", str(run_dir), "doctor", "--json"],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    findings = {row["check"]: row for row in map(json.loads, done.stdout.splitlines())}
    found: dict[str, Any] = findings["ssd"]
    assert done.returncode == int(not all(row["ok"] for row in findings.values())), done.stderr
    return found


# ------------------------------------------------------------------------------------------------- room and limits


def test_a_cap_that_its_file_system_cannot_hold(start: Callable[..., Any], run_dir: Path) -> None:
    free = shutil.disk_usage(run_dir.parent).free
    cap = (2 * free >> 30) + 1
    daemon = start(ssd_bytes=cap << 30, ssd_slab_bytes=1 << 30)
    found = [line for line in daemon.lines if "its file system has" in line["message"]]
    assert len(found) == 1 and found[0]["level"] == "warning", daemon.lines
    assert found[0]["remedy"] == "lower ssd_bytes, or free some space there"
    with client_of(daemon) as client:
        ssd = ssd_of(client)
        assert (ssd.state, len(ssd.problems)) == ("ok", 1), "it serves and stores"
        assert 0 < ssd.free_bytes < 2 * free
    finding = doctor_of_ssd(run_dir)
    assert finding["detail"].startswith(f"ssd_bytes={cap << 30} wants ")
    assert finding["remedy"] == "lower ssd_bytes, or free some space there"
    text = kvctl_(run_dir, "stats")["ssd"]["problems"][0]["what"]
    # Everything else on this machine writes to the same file system between one look and the next.
    figures = re.compile(r"wants \d+ bytes more, its file system has \d+ left")
    assert figures.search(text)
    assert figures.sub("", text) == figures.sub("", finding["detail"])


def test_the_first_slab_file_without_space_is_logged(start: Callable[..., Any], run_dir: Path) -> None:
    weather = Weather(run_dir.parent)
    daemon = start(environment=weather.environment)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        save(space, keys_of(space, 8, 1), wait=Wait.DURABLE)
        weather.set([{"calls": ["allocate"], "do": "ENOSPC"}])
        save(space, keys_of(space, 3 * DRAM_CHUNKS, 2))
        settled_ssd(client)
        line = daemon.wait_for(
            "no space left for another slab file of the SSD tier: it goes on with what it has"
        )
        assert line["level"] == "error" and line["why"].startswith("ENOSPC")
        assert line["remedy"] == "free some space on its file system, or lower ssd_bytes"
        told = sum("no space left" in line["message"] for line in daemon.lines)
        assert told <= 2, "the first alone; and the next, if a file that was under way was made behind it"
        eventually(lambda: ssd_of(client).problems, lambda: ssd_of(client))
        assert ssd_of(client).state == "ok", "within the files that it has"
    finding = doctor_of_ssd(run_dir)
    assert not finding["ok"] and "no space left for another slab file: ENOSPC" in finding["detail"]
    assert finding["remedy"] == line["remedy"]


def test_a_limit_of_a_file_s_size(start: Callable[..., Any], run_dir: Path) -> None:
    """Set on the running daemon, and lifted again."""
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        first = keys_of(space, 8, 1)
        save(space, first, wait=Wait.DURABLE)
        unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (2 << 20, unlimited[1]))
        ssd = in_state(client, "read_only")
        assert ssd.why == f"a file may have {2 << 20} bytes (RLIMIT_FSIZE), a slab file needs up to {4 << 20}"
        assert daemon.wait_for("the SSD tier is degraded, DRAM serves on")["why"] == ssd.why
        finding = doctor_of_ssd(run_dir)
        assert finding["detail"].startswith("read only: a file may have")
        assert "ulimit -f" in finding["remedy"]
        assert look(space, first) == [(Outcome.HIT, Reason.NONE)] * len(first), "DRAM serves on"
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
        assert in_state(client, "ok").why == ""
        save(space, keys_of(space, 8, 2), wait=Wait.DURABLE)
    assert doctor_of_ssd(run_dir)["ok"]


def test_a_limit_below_a_segment_is_refused(launch: Callable[..., Any], run_dir: Path) -> None:
    """Nothing could ever be saved: memory files are files too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        daemon = launch(**{**SMALL_SSD, "segment_bytes": 2 << 20, "ssd_dir": None})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert daemon.exit_status() == 2
    (line,) = daemon.refusals
    assert line.startswith(
        f"segment_bytes={2 << 20}: is more than the {1 << 20} bytes that a file of this process"
    )


# ------------------------------------------------------------------------------------------------------ the files


def remove(ssd_dir: Path) -> str:
    path = min(ssd_dir.glob("slab-*.kvs"))
    path.unlink()
    return f"{path.name} was removed or replaced under the daemon"


def cut(ssd_dir: Path) -> str:
    path = min(ssd_dir.glob("slab-*.kvs"))
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path.name} was cut to {size // 2} of {size} bytes"


def replace(ssd_dir: Path) -> str:
    path = min(ssd_dir.glob("slab-*.kvs"))
    other = path.with_suffix(".other")
    shutil.copy(path, other)
    other.rename(path)
    return f"{path.name} was removed or replaced under the daemon"


def remove_index(ssd_dir: Path) -> str:
    path = ssd_dir / "index" / "data.mdb"
    path.unlink()
    return f"the index {path} is not to be found: ENOENT: No such file or directory"


def remove_all(ssd_dir: Path) -> str:
    shutil.rmtree(ssd_dir)
    return f"the directory {ssd_dir} was removed under the daemon"


@pytest.mark.parametrize("touch", [remove, cut, replace, remove_index, remove_all])
def test_files_that_somebody_touches(
    start: Callable[..., Any], run_dir: Path, ssd_dir: Path, touch: Callable[[Path], str]
) -> None:
    daemon = start()
    with client_of(daemon) as client:
        space = client.open(SPEC)
        first = keys_of(space, 2 * DRAM_CHUNKS, 1)
        save(space, first)
        settled_ssd(client)
        why = touch(ssd_dir)
        ssd = in_state(client, "read_only")
        assert ssd.why == why
        assert [(problem.what, problem.remedy) for problem in ssd.problems] == [(why, RESTART)]
        assert daemon.wait_for(why)["remedy"] == RESTART
        finding = doctor_of_ssd(run_dir)
        assert (finding["ok"], finding["remedy"]) == (False, RESTART)
        assert why[:100] in finding["detail"]
        look(space, first)  # every hit has its own bytes
        new = keys_of(space, 4, 2)
        with space.write(new) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = 1
            outcome = batch.commit(wait=Wait.DURABLE)
        assert not outcome.ok and why[:60] in str(outcome.error), "no promise that a restart would break"
    daemon.stop()
    again = start()
    with client_of(again) as client:
        space = client.open(SPEC)
        assert in_state(client, "ok").problems == []
        look(space, first)
        save(space, keys_of(space, 4, 3), wait=Wait.DURABLE)


# --------------------------------------------------------------------------------------------------- files of `put`


ROOMIER = {
    "dram_bytes": 16 << 20,
    "segment_bytes": 2 << 20,
    "staging_bytes": 8 << 20,
    "staging_bytes_max": 32 << 20,
}


def put_on_ssd(client: Client, space: Namespace, data: bytes) -> bytes:
    """A file whose pieces have left DRAM."""
    key = objects.put(client, data)
    settled_ssd(client)
    pieces = client.open(objects.SPEC)
    keys = objects.keys_of(pieces, key, -(-(len(data) + 8) // objects.PIECE_BYTES))

    def cold() -> bool:
        cold.chain += 1  # type: ignore[attr-defined]
        save(space, keys_of(space, 256, cold.chain))  # type: ignore[attr-defined]
        return set(pieces.match(keys).reasons) <= {Reason.ON_SSD, Reason.BEYOND_MISS}

    cold.chain = 100  # type: ignore[attr-defined]
    eventually(cold, lambda: pieces.match(keys))
    settled_ssd(client)
    return key


def test_a_file_on_ssd_is_waited_for(start: Callable[..., Any], run_dir: Path) -> None:
    """More of it than fits in DRAM at once, on a disk that takes its time."""
    weather = Weather(run_dir.parent)
    daemon = start(**ROOMIER, environment=weather.environment)
    data = os.urandom(20 << 20)
    assert len(data) > ROOMIER["dram_bytes"]
    with client_of(daemon, staging_bytes=8 << 20) as client:
        key = put_on_ssd(client, client.open(SPEC), data)
        weather.set([{"calls": ["read"], "files": "slab-*", "do": "delay", "ms": 100}])
        assert objects.get(client, key) == data
    path = run_dir.parent / "out"
    assert kvctl_(run_dir, "get", key.hex(), "-o", str(path)) == ""
    assert path.read_bytes() == data


def test_a_file_that_cannot_be_read_now_is_not_said_to_be_lost(
    start: Callable[..., Any], run_dir: Path
) -> None:
    weather = Weather(run_dir.parent)
    daemon = start(**ROOMIER, environment=weather.environment)
    data = os.urandom(1 << 20)
    with client_of(daemon, staging_bytes=8 << 20) as client:
        key = put_on_ssd(client, client.open(SPEC), data)
        weather.set([{"calls": ["read"], "files": "slab-*", "do": "hang"}])
        with pytest.raises(
            Unavailable, match="a piece of it is stored, but was not to be had within"
        ) as caught:
            objects.get(client, key, patience_s=0.5)
        assert "longer --wait" in caught.value.remedy
        weather.clear()
        assert objects.get(client, key) == data
        with pytest.raises(NotFound, match="NEVER_SEEN"):
            objects.get(client, b"n" * 16)
