"""A benchmark that is ended by a signal ends what it started."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..waiting import BOUND_S, eventually

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def of_session(number: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.timeout(4 * BOUND_S)
def test_no_daemon_is_left(tmp_path: Path) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-P", str(BENCHMARKS / "control.py"), "--quick"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        eventually(lambda: len(of_session(benchmark.pid)) > 1)
        benchmark.terminate()
        assert benchmark.wait(BOUND_S) == 143
        eventually(lambda: not of_session(benchmark.pid))
        assert not list(tmp_path.iterdir())
    finally:
        for process in of_session(benchmark.pid):
            process.kill()
