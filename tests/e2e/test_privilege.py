"""Lowest privilege: what the daemon leaves in reach of others, looked at by another user of the machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import connect
from kvstore.memory import get_seals

from .standing_process import SPEC, keys_of, load, save

BOUND_S = 20.0
NOBODY_RESIZES = 0x01 | 0x02 | 0x04
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW."""
NOBODY_WRITES = NOBODY_RESIZES | 0x10
"""And F_SEAL_FUTURE_WRITE: but through mappings that exist."""
F_SEAL_EXEC = 0x20
"""That nobody can make it executable: set by kernels that know it (6.3)."""
STRANGER = 12_003
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

PROBE = """
import json, os, socket, sys
uid, pid, run_dir, ssd_dir = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)

def attempt(name, what):
    try:
        what()
    except OSError as problem:
        found[name] = type(problem).__name__
    else:
        found[name] = "reached"

def dial(name, kind):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(run_dir + "/" + name)

found = {}
attempt("list run_dir", lambda: os.listdir(run_dir))
attempt("write run_dir", lambda: open(run_dir + "/new", "x"))
attempt("replace a socket", lambda: os.unlink(run_dir + "/grpc.sock"))
attempt("lock", lambda: open(run_dir + "/lock"))
attempt("descriptor socket", lambda: dial("kvstored.sock", socket.SOCK_SEQPACKET))
attempt("grpc socket", lambda: dial("grpc.sock", socket.SOCK_STREAM))
attempt("list ssd_dir", lambda: os.listdir(ssd_dir))
attempt("index", lambda: open(ssd_dir + "/index/data.mdb"))
attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("memory", lambda: open(f"/proc/{pid}/mem"))
attempt("maps", lambda: open(f"/proc/{pid}/map_files/x"))
print(json.dumps(found))
"""


def probe(daemon: Any, ssd_dir: Path) -> dict[str, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            PROBE,
            str(STRANGER),
            str(daemon.pid),
            str(daemon.run_dir),
            str(ssd_dir),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@as_root
def test_another_user_reaches_nothing(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    run_dir.parent.chmod(0o755)
    ssd_dir = run_dir.parent / "ssd"
    daemon = start_daemon(ssd_dir=ssd_dir, ssd_bytes="128M", ssd_slab_bytes="4M")
    found = probe(daemon, ssd_dir)
    assert set(found.values()) == {"PermissionError"}, found


@as_root
def test_where_others_are_tenants_a_stranger_may_knock_and_no_more(
    start_daemon: Callable[..., Any], run_dir: Path
) -> None:
    """The sockets are open to all then, because the kernel says who knocks (test_daemon_tenants: and is refused)."""
    run_dir.parent.chmod(0o755)
    ssd_dir = run_dir.parent / "ssd"
    daemon = start_daemon(tenants="12001=alice", ssd_dir=ssd_dir, ssd_bytes="128M", ssd_slab_bytes="4M")
    found = probe(daemon, ssd_dir)
    knock = {"list run_dir", "descriptor socket", "grpc socket"}
    assert {name for name, what in found.items() if what == "reached"} == knock, found


def test_every_file_is_for_the_daemons_user_alone(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    ssd_dir = run_dir.parent / "ssd"
    umask = os.umask(0)  # whatever it was started with
    try:
        daemon = start_daemon(ssd_dir=ssd_dir, ssd_bytes="128M", ssd_slab_bytes="4M")
    finally:
        os.umask(umask)
    with connect(str(run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        assert save(space, keys_of(space, "mine"))
    assert daemon.stop() == 0
    for folder in (run_dir, ssd_dir):
        for path in (folder, *folder.rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"
    assert list(ssd_dir.rglob("*.kvs")), "no slab file was looked at"


@pytest.mark.parametrize("protection", ["sealed", "group"])
def test_memory_is_sealed_and_readers_read(start_daemon: Callable[..., Any], protection: str) -> None:
    """The daemon's memfds as /proc shows them, and our own mappings as a client."""
    daemon = start_daemon(protection=protection)
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        space = client.open(SPEC)
        keys = keys_of(space, "mine")
        assert save(space, keys)
        lease = space.read(keys)
        assert load(space, keys) == 4
        seals: dict[str, set[int]] = {}
        for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("/memfd:kvs-"):
                fd = os.open(link, os.O_RDONLY)
                seals.setdefault(target.split("-")[1], set()).add(get_seals(fd) & ~F_SEAL_EXEC)
                os.close(fd)
        data = NOBODY_WRITES if protection == "sealed" else NOBODY_RESIZES
        expected = {"data": {data}, "header": {NOBODY_WRITES}, "directory": {NOBODY_WRITES}}
        assert seals == expected | ({"staging": {NOBODY_RESIZES}} if protection == "sealed" else {})
        modes = {
            line.split("/memfd:kvs-")[1].split("-")[0]: line.split()[1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/memfd:kvs-" in line
        }
        reads = {"data": "r--s" if protection == "sealed" else "rw-s", "header": "r--s", "directory": "r--s"}
        assert modes == reads | ({"staging": "rw-s"} if protection == "sealed" else {})
        lease.release()
