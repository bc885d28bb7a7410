"""Two commits compared by a benchmark, in one run: rounds alternate between them, each commit with its own code.

Each commit's packages are laid out in a folder of their own, which comes first on the path of the benchmark and of the
daemons that it starts. The yardstick is the same for both: the benchmarks of the second commit. A figure is the median
over the rounds; a ratio is that of the medians, and above 1 the second commit is the better one, whichever way the
figure is counted; its spread is that of the single rounds. Slower is what got worse by more than `--threshold` and in
every round; then the exit status is 1. "." stands for the files as they lie here.

    make bench-check BASE=HEAD~3 BENCH=data_plane ARGS='--rounds 5 -- --stores memcpy sealed --clients 1'
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from directions import Unknown, more_is_better
from harness import machine, some

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("gpu_worker", "kernels", "scheduler")
"""Folders that lie inside the package once it is installed."""
RUN_S = 1_200


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure under both commits; `better` and its spread are above 1 where the second commit is better."""

    name: str
    base: float
    head: float
    better: float
    worst: float
    best: float

    def slower(self, threshold: float) -> bool:
        return self.better < 1 / threshold and self.best < 1

    def __str__(self) -> str:
        spread = f"({self.worst:.2f} to {self.best:.2f})"
        return f"{self.better:6.2f} {spread}  {self.base:10.4g} -> {self.head:<10.4g} {self.name}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("base", help="a commit")
    options.add_argument("head", nargs="?", default=".", help="another")
    options.add_argument("--bench", default="data_plane", help="a file in benchmarks/")
    options.add_argument("--rounds", type=some, default=5)
    options.add_argument("--threshold", type=float, default=1.1, help="1.1: slower by more than 10 %%")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    mine, theirs = sys.argv[1:], []
    if "--" in mine:
        mine, theirs = mine[: mine.index("--")], mine[mine.index("--") + 1 :]
    chosen = options.parse_args(mine)
    refs = (chosen.base, chosen.head)
    names = [described(ref) for ref in refs]
    print(f"{names[0]} -> {names[1]}: {chosen.bench}, {chosen.rounds} rounds, on {machine()}", flush=True)
    reports: tuple[list[Any], list[Any]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        trees = [lay_out(ref, Path(name) / side) for ref, side in zip(refs, "ab", strict=True)]
        for number in range(chosen.rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                reports[side].append(run(trees[side], trees[1] / "benchmarks" / f"{chosen.bench}.py", theirs))
                print(f"round {number + 1}: {names[side]} done", flush=True)
    unknown: set[str] = set()
    sides = [[figures(report, unknown) for report in side] for side in reports]
    rows = compared(*sides)
    print(*rows, sep="\n")
    if unknown:
        print(
            f"not judged, as benchmarks/directions.py does not say what is better: {', '.join(sorted(unknown))}"
        )
    slower = [row for row in rows if row.slower(chosen.threshold)]
    print(f"{len(slower)} of {len(rows)} figures are worse by more than {chosen.threshold - 1:.0%}:")
    print(*slower, sep="\n")
    if chosen.json:
        told = {"base": names[0], "head": names[1], "machine": machine(), "threshold": chosen.threshold}
        print(json.dumps({**told, "rows": [asdict(row) for row in rows], "slower": [r.name for r in slower]}))
    return 1 if slower else 0


def described(ref: str) -> str:
    if ref == ".":
        return "the files here"
    return git("describe", "--always", ref).strip()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def lay_out(ref: str, folder: Path) -> Path:
    """The commit's files; in "site" the package, put together as an installation would, and nothing else: whatever
    lies on the path can be imported."""
    folder.mkdir()
    if ref == ".":
        for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
    else:
        archive = subprocess.Popen(["git", "-C", str(ROOT), "archive", ref], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
        if archive.wait():
            raise SystemExit(f"git archive {ref} failed")
    (folder / "site").mkdir()
    (folder / "kvstore").rename(folder / "site/kvstore")
    for side in SIDES:
        if (folder / side).is_dir():
            (folder / side).rename(folder / "site/kvstore" / side)
    (folder / ".cache").symlink_to(ROOT / ".cache")  # where other stores are installed
    return folder


def run(tree: Path, bench: Path, arguments: Sequence[str]) -> Any:
    """The report of one run, with the package of `tree`."""
    done = subprocess.run(
        [sys.executable, "-P", str(bench), "--quick", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": str(tree / "site")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode or not done.stdout:
        raise SystemExit(f"{done.stdout}\n{bench} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(report: Mapping[str, Any], unknown: set[str] | None = None) -> dict[str, Figure]:
    """By name: the goals, and of the rows what is better when it is more, or less (`directions.py`); what it does not
    know is added to `unknown`. A row is named by the fields that the report calls its key, or else by its words and
    whole numbers."""
    found = {
        f"goal: {goal['name']}": Figure(goal["value"], goal["direction"] == ">=") for goal in report["goals"]
    }
    for row in report["results"]:
        key = report.get("key") or [name for name, value in row.items() if not isinstance(value, float)]
        name = " ".join(f"{field}={row[field]}" for field in key if field in row)
        for field, value in row.items():
            if not isinstance(value, float) or field in key:
                continue
            try:
                more = more_is_better(field, row)
            except Unknown as problem:
                if unknown is not None:
                    unknown.add(str(problem))
                continue
            if more is not None:
                found[f"{name}: {field}"] = Figure(value, more)
    return found


def compared(base: Sequence[Mapping[str, Figure]], head: Sequence[Mapping[str, Figure]]) -> list[Compared]:
    """What all rounds of both have; base[n] and head[n] were measured one after the other."""
    rows = []
    for name, first in base[0].items():
        if not all(name in round_ and round_[name].value > 0 for round_ in (*base, *head)):
            continue
        before, after = ([round_[name].value for round_ in side] for side in (base, head))
        sign = 1 if first.more_is_better else -1
        ratios = [(b / a) ** sign for a, b in zip(before, after, strict=True)]
        was, is_ = statistics.median(before), statistics.median(after)
        rows.append(Compared(name, was, is_, (is_ / was) ** sign, min(ratios), max(ratios)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
