"""`make demo`, with few conversations and a tiny random model: it judges itself, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 900.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BOUND_S)]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """All there is outside of the repository: what it puts there it must take away. Short, as a socket's path is."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        yield Path(folder)


@pytest.fixture
def start_demo(temporary: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-P",
            "-u",
            str(ROOT / "examples/demo.py"),
            "--random",
            "--conversations=2",
        ]
        environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(temporary)}
        started.append(
            subprocess.Popen(
                [*command, "--dram=64M", "--answer-tokens=3", "--threads=1", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for demo in started:
        if demo.poll() is None:
            demo.kill()
        demo.wait(BOUND_S)
        assert demo.stdout is not None and demo.stderr is not None
        demo.stdout.close()
        demo.stderr.close()


def test_the_demo_runs_and_says_that_all_is_well(
    start_demo: Callable[..., subprocess.Popen[str]], temporary: Path
) -> None:
    demo = start_demo()
    said, problems = demo.communicate(timeout=BOUND_S)
    assert demo.returncode == 0, (said, problems)
    assert said.count("killed with SIGKILL") == 1
    assert said.count(": identical to recomputation") == 1
    assert said.count("every token: the same in both runs") == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_takes_its_processes_along(
    by: signal.Signals, start_demo: Callable[..., subprocess.Popen[str]], temporary: Path
) -> None:
    demo = start_demo()
    assert demo.stdout is not None
    for line in demo.stdout:
        if "2. With kvstored beside it" in line:
            break
    for line in demo.stdout:
        if "[ 1/" in line:  # daemon and worker are at work
            break
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) == 2
    if by is signal.SIGINT:
        os.killpg(demo.pid, by)  # as a terminal does with Ctrl-C: to all that have no group of their own
    else:
        demo.send_signal(by)
    _, problems = demo.communicate(timeout=BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.01)
    if by is signal.SIGINT:
        assert demo.returncode == 130
        assert problems.strip() == "Interrupted. Nothing is left running."
    if by is not signal.SIGKILL:
        assert list(temporary.iterdir()) == []
