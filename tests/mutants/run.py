"""Plants one bug after another into a copy of the sources and runs the tests that should notice.

    make mutants                        all of them
    make mutants ARGS='lease kvstore/tiers'     those whose name, or whose file's, contains one of the words
    make mutants ARGS=--list

Each source file has a list of its own, `bugs/PATH_OF_THE_SOURCE.toml`, so that two changes of different sources never
meet in one list: a name, the text `old` that occurs once in the source, what it becomes, and the tests that are asked.
Tests of `tests/vllm` run with vLLM's environment (`make vllm-installed`); where there is none their bugs are left out.
First all of these tests must pass as things are. Then a bug is caught when pytest reports failed tests, or runs into
the time limit: a hang is noticed too. The exit status is 0 if all were caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUGS = Path(__file__).resolve().parent / "bugs"
INSIDE = ("gpu_worker", "scheduler", "kernels")
"""Folders that are packages inside of `kvstore`."""
COPIED = ("kvstore", *INSIDE, "proto", "tests", "examples", "deploy", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "Makefile")
TIME_LIMIT_S = 540
MORE_S = 60
"""For each file of tests that is asked."""
VLLM = ROOT / ".cache" / "vllm-venv" / "bin" / "python"
VLLM_OPTIONS = ("-o", "filterwarnings=")
TESTS_FAILED = 1
"""pytest's exit status."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: `old` occurs {text.count(self.old)} times in {self.file}, not once"
            )
        path.write_text(text.replace(self.old, self.new))


def mutants() -> list[Mutant]:
    found = []
    for path in sorted(BUGS.rglob("*.toml")):
        source = path.relative_to(BUGS).as_posix().removesuffix(".toml")
        for row in tomllib.loads(path.read_text())["mutant"]:
            if "file" in row:
                raise SystemExit(f"{path}: {row['name']}: remove `file`: the list's path says {source}")
            found.append(Mutant(row["name"], source, row["old"], row["new"], tuple(row["tests"])))
    return found


def copy_sources(to: Path) -> None:
    for folder in COPIED:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in INSIDE:  # else the installed ones are found, without the bug
        (to / "kvstore" / folder).symlink_to(to / folder)
    for file in FILES:
        shutil.copy(ROOT / file, to / file)


def needs_vllm(test: str) -> bool:
    return test.startswith("tests/vllm/")


def ask(tests: Sequence[str], folder: Path) -> str:
    """What pytest says of the copy: passed, failed, hung, or what kept it from running."""
    # The copy's package comes before the installed one, for the daemons that tests start too.
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    vllm = any(map(needs_vllm, tests))
    command = [str(VLLM) if vllm else sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [*(VLLM_OPTIONS if vllm else ()), *tests]
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S + MORE_S * len(tests),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if ended.returncode == 0:
        return "passed"
    last = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    what = last[0] if last else ended.stdout[-2000:]
    return (
        f"failed: {what}"
        if ended.returncode == TESTS_FAILED
        else f"pytest ended with {ended.returncode}: {what}"
    )


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("words", nargs="*", help="parts of names, or of files' names")
    options.add_argument("--list", action="store_true", help="only say which there are")
    chosen = options.parse_args()
    wanted = [
        m
        for m in mutants()
        if not chosen.words or any(word in name for word in chosen.words for name in (m.name, m.file))
    ]
    if not wanted:
        options.error(
            f"{' '.join(chosen.words)}: is in no bug's name, nor in its file's (--list says which there are)"
        )
    if chosen.list:
        for mutant in wanted:
            print(f"{mutant.file:32} {mutant.name}")
        return 0
    if not VLLM.is_file():
        left_out = [mutant for mutant in wanted if any(map(needs_vllm, mutant.tests))]
        wanted = [mutant for mutant in wanted if mutant not in left_out]
        for mutant in left_out:
            print(f"left out: {mutant.name}: there is no {VLLM.relative_to(ROOT)}")
    survived = 0
    with tempfile.TemporaryDirectory(prefix="kvs-mutants-") as name:
        folder = Path(name)
        copy_sources(folder)
        asked = sorted({test for mutant in wanted for test in mutant.tests})
        for vllm in (False, True):
            tests = [test for test in asked if needs_vllm(test) is vllm]
            found = ask(tests, folder) if tests else "passed"
            if found != "passed":
                print(f"without any planted bug: {found}")
                return 1
        print("without any planted bug: passed", flush=True)
        for mutant in wanted:
            path = folder / mutant.file
            sound = path.read_text()
            mutant.plant(folder)
            began = time.monotonic()
            found = ask(mutant.tests, folder)
            path.write_text(sound)
            caught = found.startswith(("failed", "hung"))
            survived += not caught
            verdict = "caught" if caught else "SURVIVED"
            print(f"{verdict:8} {time.monotonic() - began:6.1f} s  {mutant.name}: {found}", flush=True)
    print(f"{len(wanted) - survived} of {len(wanted)} planted bugs were caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
