"""README.md's examples, as a newcomer pastes them: against a daemon that was just started, and again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
RUN_DIR = '"/tmp/kv"'
SAYS = {
    "twelve lines": "[True, True, True, True]",
    "after a restart": "[True, True, True, True]",
    "asyncio": "[True, True, True, True]",
    "hints": "['ACCEPTED', 'ACCEPTED']",
}


def examples() -> dict[str, str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    by_name = dict(zip(SAYS, found, strict=True))
    # It stands for the last lines of the first.
    before, _, _ = by_name["twelve lines"].partition("    with store.read(")
    by_name["after a restart"] = before + by_name["after a restart"]
    return by_name


def paste(example: str, run_dir: Path) -> tuple[str, str]:
    """What it says on both outputs, in a Python that finds the installed package alone."""
    assert RUN_DIR in example
    command = [sys.executable, "-P", "-c", example.replace(RUN_DIR, repr(str(run_dir)))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    return ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize("name", SAYS)
def test_examples_run_as_pasted_against_a_daemon_just_started(name, start_daemon, run_dir, tmp_path):
    start_daemon(ssd_dir=tmp_path / "ssd", ssd_bytes=256 << 20, ssd_slab_bytes=32 << 20)
    for _ in range(2):  # the second time all is there already
        assert paste(examples()[name], run_dir) == (SAYS[name], "")


def test_each_follows_the_others_and_the_doctor(start_daemon, run_dir, tmp_path):
    """In the order of the page, and with no --segment-bytes, as there."""
    start_daemon(
        dram_bytes="128M",
        segment_bytes=None,
        ssd_dir=tmp_path / "ssd",
        ssd_bytes=256 << 20,
        ssd_slab_bytes=32 << 20,
    )
    doctor = [sys.executable, "-P", "-m", "kvstore.cli.kvctl", "--run-dir", str(run_dir), "doctor"]
    found = subprocess.run(doctor, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0 and "FAIL" not in found.stdout, found
    for name, example in examples().items():
        assert paste(example, run_dir) == (SAYS[name], "")


def test_what_is_on_ssd_alone_is_read_as_the_page_says(start_daemon, run_dir, tmp_path):
    settings = {"ssd_dir": tmp_path / "ssd", "ssd_bytes": 256 << 20, "ssd_slab_bytes": 32 << 20}
    daemon = start_daemon(**settings, drain_ms=20_000)
    assert paste(examples()["twelve lines"], run_dir) == (SAYS["twelve lines"], "")
    assert daemon.stop() == 0
    start_daemon(**settings)
    assert paste(examples()["after a restart"], run_dir) == (SAYS["after a restart"], "")


def test_what_each_prints_stands_in_the_page():
    assert {f"`{said}`" for said in SAYS.values()} <= set(re.findall(r"`\[[^`]*`", README.read_text()))


def test_the_first_has_twelve_lines():
    first = examples()["twelve lines"].splitlines()
    assert len([line for line in first if line and not line.startswith("#")]) == 12


def test_the_daemon_that_the_page_starts_may_be_started():
    """With its flags, which kvstored knows and finds possible."""
    from kvstore.__main__ import configuration

    commands = re.findall(r"(?m)^kvstored ([^>&\n]*?)(?: 2>.*)?$", README.read_text())
    assert commands
    for command in commands:
        assert configuration(command.split(), {}).limits.segment_count > 3
