"""docs/promptcache.md: its commands and programs say what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/promptcache.md").read_text()
COMMANDS = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, **options
    )


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_commands_say_what_the_page_says(number: int, tmp_path: Path) -> None:
    command, says = COMMANDS[number]
    kvctl = tmp_path / "kvctl"
    kvctl.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m kvstore.cli.kvctl "$@"\n')
    kvctl.chmod(0o755)
    ended = run(["sh", "-c", command], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert ended.stdout + ended.stderr == says


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 6 and len(PROGRAMS) == 2


def test_the_program_prints_what_the_page_says() -> None:
    ended = run([sys.executable, "-P", "-c", PROGRAMS[1]])
    first, second = ended.stdout.splitlines()
    assert f"It prints `{first}` and `{second}`." in PAGE, ended


def test_the_function_is_a_schema(tmp_path: Path) -> None:
    program = tmp_path / "journey.py"
    program.write_text(
        f"{PROGRAMS[0]}\nprint(journey.pml)\nprint(journey.prompt('four days', place='kyoto'))\n"
    )
    ended = run([sys.executable, "-P", str(program)])
    assert (
        '<module name="with_children">' in ended.stdout and '<module name="kyoto"></module>' in ended.stdout
    ), ended


def test_the_example_in_python_runs() -> None:
    ended = run([sys.executable, "-P", "examples/promptcache/travel.py"])
    assert ended.returncode == 0 and ended.stdout.count("\n") == 2, ended
