"""What the long-running programs share: a real daemon, namespaces, and bytes that tell on themselves.

Every chunk's key says who made it ("one/3/17/5": namespace, worker, chain, number in the chain) and its bytes follow
from the key, so that whoever reads a chunk knows what must be in it, and no two chunks have the same bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.client import Client, Namespace, connect
from kvstore.client.lease import ReadLease
from kvstore.errors import Unavailable
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.daemon import FAULTS
from kvstore.types import ChunkKey, Outcome

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 60.0
"""Whatever takes longer hangs."""
CHUNK_TOKENS = 64


def space_of(name: str, *shard_bytes: int) -> NamespaceSpec:
    groups = tuple(GroupSpec(f"group {number}", size) for number, size in enumerate(shard_bytes))
    return NamespaceSpec(name, b"w" * 32, "stress:bytes", CHUNK_TOKENS, groups)


SPACES = (space_of("one", 64 << 10), space_of("two", 40_000, 20_000), space_of("small", 3_000))
"""Three sizes of slots in slab files, and a chunk of which both shards must be there."""


class Hang(Exception):
    """Something took longer than BOUND_S."""


class Wrong(Exception):
    """Bytes, or a promise, that were not kept."""


def key_of(space: int, worker: int, chain: int, number: int) -> ChunkKey:
    return ChunkKey(f"{SPACES[space].model}/{worker}/{chain}/{number}".encode())


def content(key: bytes, shard: int, size: int) -> bytes:
    return np.random.default_rng([*key, shard]).bytes(size)


def check_bytes(lease: ReadLease, keys: list[ChunkKey], sizes: tuple[int, ...]) -> list[ChunkKey]:
    """The keys that were had; raises Wrong."""
    had = []
    for index, outcome in enumerate(lease.outcomes):
        if outcome is not Outcome.HIT:
            continue
        whole = True
        for shard, size in enumerate(sizes):
            out = np.empty(size, np.uint8)
            if not lease.copy_to(index, out, shard=shard):
                whole = False  # void: its slot was taken back meanwhile, which the copy itself noticed
            elif out.tobytes() != content(keys[index], shard, size):
                raise Wrong(f"wrong bytes under {keys[index].decode()}, shard {shard}")
        if whole:
            had.append(keys[index])
    return had


def until(what: Callable[[], Any], why: str, bound_s: float = BOUND_S) -> Any:
    deadline = time.monotonic() + bound_s
    while not (found := what()):
        if time.monotonic() >= deadline:
            raise Hang(why)
        time.sleep(0.005)
    return found


def client_of(run_dir: Path) -> Client:
    """Of a daemon that may be starting still."""

    def attempt() -> Client | None:
        try:
            return connect(str(run_dir), timeout_s=BOUND_S / 4, staging_bytes=2 << 20)
        except Unavailable:
            return None

    client: Client = until(attempt, "the daemon does not start")
    return client


class Weather:
    """The control file of the daemon's FaultyDisk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "faults.json"

    def set(self, *faults: dict[str, Any]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(faults))
        os.replace(new, self.path)


class Running:
    """A process that was started here."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Daemon(Running):
    """One `kvstored` process on `folder`: sockets in run/, the SSD tier in ssd/, its log in daemon.log."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self.log = folder / "daemon.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORED_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*(sys.executable, "-P", "-m", "kvstore.sim.daemon"), f"--run-dir={folder}/run", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env={**kept, "PYTHONSAFEPATH": "1", FAULTS: str(folder / "faults.json")},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)

    def stop(self) -> int:
        """SIGTERM. At log level debug the daemon checks its invariants before it ends, and fails if one is broken."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Hang("the daemon does not end") from None

    def files(self) -> list[str]:
        """What its descriptors lead to."""
        found = []
        folder = f"/proc/{self.pid}/fd"
        try:
            for name in os.listdir(folder):
                try:
                    found.append(os.readlink(f"{folder}/{name}"))
                except FileNotFoundError:
                    continue
        except (FileNotFoundError, ProcessLookupError):
            pass
        return found


def check_directory(folder: Path, ssd_dir: Path) -> None:
    """After a stop in good order nothing is wrong in it, whatever happened before; raises Wrong."""
    command = [*(sys.executable, "-P", "-m", "kvstore.cli.kvctl"), "--run-dir", str(folder / "run")]
    done = subprocess.run(
        [*command, "check", "--ssd-dir", str(ssd_dir)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise Wrong(f"kvctl check ends with {done.returncode}: {done.stdout} {done.stderr}")


def log_lines(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """The daemon's log from byte `start` on; what is no JSON becomes {"message": ...}."""
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            found.append({"level": "error", "message": line})
    return found


def open_all(client: Client) -> list[Namespace]:
    return [client.open(spec) for spec in SPACES]


def goal(name: str, value: float, limit: float, unit: str = "", *, at_least: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "goal": limit,
        "direction": ">=" if at_least else "<=",
        "met": value >= limit if at_least else value <= limit,
    }
