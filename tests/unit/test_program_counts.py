"""Programs that run something so many times: what would run nothing, and pass, is refused by name."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.option_types import above_zero, whole
from kvstore.sim.__main__ import main as simulate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--steps", "-1"), "argument --steps: -1: must be at least 1"),
        (("--total", "0"), "argument --total: 0: must be at least 1"),
        (("--count", "0"), "argument --count: 0: must be at least 1"),
        (("--seed", "x"), "argument --seed: 'x' is no whole number"),
    ],
)
def test_the_simulator(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate([*given])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "option"),
    [
        ("tests/stress/crash.py", "--rounds"),
        ("tests/stress/fleet.py", "--rounds"),
        ("tests/stress/serving.py", "--rounds"),
        ("tests/stress/serving.py", "--minutes"),
        ("tests/stress/soak.py", "--minutes"),
        ("tests/stress/readers.py", "--seconds"),
        ("tests/stress/fuzz.py", "--seconds"),
        ("benchmarks/compare.py", "--rounds"),
        ("benchmarks/data_plane.py", "--rounds"),
    ],
)
def test_stress_and_benchmarks(program: str, option: str) -> None:
    command = [sys.executable, "-P", str(ROOT / program), f"{option}=0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"argument {option}: 0: must be " in ended.stderr


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_numbers_that_are_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        above_zero(text)
    assert above_zero("0.5") == 0.5


@pytest.mark.parametrize("text", ["0", "9", "1.5", ""])
def test_numbers_out_of_bounds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        whole(1, 8)(text)
    assert whole(1, 8)("8") == 8
