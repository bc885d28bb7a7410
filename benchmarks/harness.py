"""What all benchmarks have in common: their options, and what they say beside their figures: the machine, the commit,
which goals were met; as a last line of JSON.

{"machine": {...}, "commit": "...", "results": [...], "goals": [{name, value, unit, goal, direction, met}]}

and "key": the fields of a row that say what was measured, where the benchmark says so. The rest of a row are figures.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvstore.client import Client, connect
from kvstore.errors import BadRequest, StoreError

START_S = 120.0
"""How long a daemon may take to serve: a busy machine, a large index."""
REPORTS = "benchmarks/results"
"""Of a checkout: several benchmarks, one after the other, keep theirs there."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it should be: at least (">=") or at most ("<=") `goal`, in `unit`."""

    name: str
    value: float
    unit: str
    goal: float
    direction: Literal[">=", "<="]

    def __post_init__(self) -> None:
        if self.direction not in (">=", "<="):
            raise BadRequest('must be ">=" or "<="', field="direction", value=self.direction)

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.direction == ">=" else self.value <= self.goal

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{self.name}: {self.value:.4g} {self.unit}, goal {self.direction} {self.goal:g}: {verdict}"


def machine() -> dict[str, Any]:
    """What a figure depends on; `load` is the average of the last minute, other work included."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit(of: str | Path) -> str:
    """Of the checkout that the file `of` lies in; with "-dirty" when anything but reports was changed since; "unknown"
    outside of one."""
    git = ["git", "-C", str(Path(of).resolve().parent)]
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){REPORTS}"]
    try:
        found, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=False, timeout=10)
            for command in (["describe", "--always"], changed)
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    name = found.stdout.strip()
    return name + "-dirty" * bool(changes.stdout) if name else "unknown"


def heading(of: str | Path) -> str:
    """One line to stand above a table."""
    on = machine()
    return (
        f"{on['cpu']}, {on['cores']} cores, kernel {on['kernel']}, Python {on['python']}, "
        f"load {on['load']}, commit {commit(of)}"
    )


def slug() -> str:
    """This machine in a file name, as "amd-epyc-2-cores"."""
    on = machine()
    return re.sub(r"[^a-z0-9]+", "-", f"{on['cpu']} {on['cores']} cores".lower()).strip("-")


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has; `about` is its docstring. See `finish`. From here on SIGTERM ends the
    program as an exception does: daemons and clients that it started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="less of everything; all goals, in under 50 s")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help="keep the JSON there (no FILE: in benchmarks/results/, named after benchmark and machine); what a\n"
        "file of the same machine has already, and this run did not measure, stays",
    )
    return options


def some(value: str) -> int:
    """Of an option that says how many, for argparse: none at all would be measured as nothing, and pass."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def finish(
    of: str | Path,
    chosen: argparse.Namespace,
    results: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal],
    *,
    key: Sequence[str] = (),
) -> int:
    """End the benchmark `of` (its file) as the options that `arguments` made say: tell the goals, print the report,
    `keep` it. Returns the exit status, 0: a missed goal is a figure, not a failure."""
    print(*goals, sep="\n", flush=True)
    line = keep(of, chosen, results, goals, key=key)
    if chosen.out is not None:
        print(f"kept in {kept_in(of, chosen)}")
    if chosen.json:
        print(line)
    return 0


def keep(
    of: str | Path,
    chosen: argparse.Namespace,
    results: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal],
    *,
    key: Sequence[str] = (),
) -> str:
    """The report so far, kept where `--out` says, if it does. `key` names the fields of a row that say what was
    measured: so a file can be filled in several runs."""
    line = report(of, results, goals, key=key)
    if chosen.out is not None:
        file = kept_in(of, chosen)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            line = merged(file.read_text(), line, key)
        file.write_text(line + "\n")
    return line


def kept_in(of: str | Path, chosen: argparse.Namespace) -> Path:
    here = Path(of).resolve()
    return Path(chosen.out or here.parent / "results" / f"{here.stem}-{slug()}.json")


def merged(earlier: str, later: str, key: Sequence[str]) -> str:
    """The report `later`, with those rows and goals of `earlier` that it does not have; rows are the same when the
    fields named in `key` are. What was measured at another commit says so, in a field `commit`. Only `later` if the
    machines are different ones, or there is no key."""
    old, new = json.loads(earlier), json.loads(later)
    machines = [{**report["machine"], "load": None} for report in (old, new)]
    if not key or machines[0] != machines[1]:
        return later

    def joined(part: str, fields: Sequence[str]) -> list[Any]:
        kept = old[part]
        if old["commit"] != new["commit"]:
            kept = [{"commit": old["commit"], **row} for row in kept]
        by_key = {tuple(row.get(field) for field in fields): row for row in (*kept, *new[part])}
        return list(by_key.values())

    return json.dumps(new | {"results": joined("results", key), "goals": joined("goals", ("name",))})


def report(
    of: str | Path, results: Sequence[Mapping[str, Any]], goals: Sequence[Goal], *, key: Sequence[str] = ()
) -> str:
    """The line of JSON that ends a benchmark's output; `key` as in `finish`."""
    return json.dumps(
        {
            "machine": machine(),
            "commit": commit(of),
            "results": list(results),
            "goals": [
                asdict(goal) | {"value": round(goal.value, 4), "met": bool(goal.met)} for goal in goals
            ],
        }
        | ({"key": list(key)} if key else {})
    )


def connected(run_dir: str | Path, process: subprocess.Popen[bytes]) -> Client:
    """A client of the daemon that was just started as `process`, as soon as that serves."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connect(str(run_dir), timeout_s=30.0)
        except StoreError:
            assert process.poll() is None and time.monotonic() < deadline, "the daemon does not start"
            time.sleep(0.005)


def connect_asking(run_dir: str | Path, *, timeout_s: float) -> Client:
    """A client that asks the daemon for everything. Of a package that has no directory yet (`make bench-check` compares
    with older ones, too) any client does."""
    knows = "directory" in inspect.signature(connect).parameters
    asks: dict[str, Any] = {"directory": False} if knows else {}
    return connect(str(run_dir), timeout_s=timeout_s, **asks)


def arena_ready(client: Client) -> None:
    """Returns when all segments are made: figures are of a daemon that has run for a while."""
    deadline = time.monotonic() + START_S
    while (arena := client.stats().arena).ready_bytes < arena.bytes:
        assert time.monotonic() < deadline, "the arena is not ready"
        time.sleep(0.05)
