"""Short forms of `make crash`, `make soak` and `make serving`, and that both find what they are there to find."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ..fleet_tools import needs_redis

STRESS = Path(__file__).resolve().parent.parent / "stress"

pytestmark = pytest.mark.timeout(600)  # of a machine that does much else; alone, none takes half a minute


def run(program: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the object in the last line."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        Path(folder).chmod(0o755)  # other users reach the daemon's sockets
        process = subprocess.Popen(
            [sys.executable, "-P", str(STRESS / program), "--json", "--folder", folder, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        try:
            said, problems = process.communicate(timeout=500)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # daemons and workers of it, too
            said, problems = process.communicate()
            raise AssertionError(f"{program} does not end: {said[-4000:]} {problems[-4000:]}") from None
    *shown, last = said.splitlines() or [""]
    print(*shown, problems, sep="\n")
    try:
        return process.returncode, json.loads(last)
    except json.JSONDecodeError:
        raise AssertionError(f"{program} ended with {process.returncode}: {last} {problems}") from None


def goals(result: dict[str, Any]) -> dict[str, bool]:
    return {goal["name"]: goal["met"] for goal in result["goals"]}


def test_five_crashes() -> None:
    """ATTNSTORE_CRASH_ROUNDS=300 for more; `make crash` shows what it does."""
    rounds = int(os.environ.get("ATTNSTORE_CRASH_ROUNDS", "5"))
    seed = random.randrange(1 << 32)
    status, result = run("crash.py", "--rounds", str(rounds), "--seed", str(seed))
    assert status == 0, (result["failure"], result["goals"])
    assert (result["seed"], result["rounds"]) == (seed, rounds)
    assert result["totals"]["had to be there"] > 0 and result["totals"]["acknowledged as durable"] > 0


@pytest.mark.slow
def test_a_disk_that_lies_about_its_syncs_is_found_out() -> None:
    status, result = run("crash.py", "--rounds", "3", "--canary")
    assert status == 1
    assert "acknowledged as durable" in result["failure"], result["failure"]
    assert not goals(result)["wrong bytes, lost or resurrected chunks"]


@pytest.mark.slow
def test_a_planted_leak_is_not_judged_flat() -> None:
    """Connections that nobody closes: the daemon's descriptors rise, and not much else does."""
    status, result = run("soak.py", "--minutes", "0.3", "--ghosts", "1000", "--leak")
    assert not result["failure"], result["failure"]
    assert status == 1
    met = goals(result)
    assert not met["rise of descriptors after the warm-up"], result["goals"]
    assert met["rise of threads after the warm-up"], result["goals"]
    assert met["exit status of the daemon, its invariants checked"]
    assert result["counts"]["bytes compared"] > 0 and result["counts"]["chunks saved"] > 0


@needs_redis
@pytest.mark.slow
@pytest.mark.parametrize("store", ["redis", "file"])
def test_nodes_that_share_a_store_in_trouble(store: str) -> None:
    """ATTNSTORE_FLEET_ROUNDS=100 for more."""
    rounds = int(os.environ.get("ATTNSTORE_FLEET_ROUNDS", "2"))
    seed = random.randrange(1 << 32)
    status, result = run("fleet.py", "--rounds", str(rounds), "--seed", str(seed), "--store", store)
    assert status == 0, (result["failure"], result["goals"])
    assert result["rounds"] == rounds and result["counts"]["chunks compared"] > 0


@needs_redis
@pytest.mark.slow
def test_a_fleet_that_hears_of_no_forget_is_found_out() -> None:
    status, result = run("fleet.py", "--rounds", "10", "--store", "redis", "--canary", "deaf")
    assert status == 1
    assert "what was forgotten is served" in result["failure"], result["failure"]


def test_workers_serve_while_the_daemon_dies() -> None:
    """No worker is killed here: each start imports torch."""
    seed = random.randrange(1 << 32)
    small = ("--talks", "4", "--turns", "4", "--seconds", "3", "--spare-workers")
    status, result = run("serving.py", "--rounds", "1", *small, "--seed", str(seed))
    assert status == 0, (result["failure"], result["goals"])
    assert (result["seed"], result["rounds"]) == (seed, 1)
    assert result["counts"]["flushed and hit"] > 0 and result["counts"]["cut and kept"] == 1


@pytest.mark.slow
def test_workers_serve_while_everything_breaks() -> None:
    """ATTNSTORE_SERVING_ROUNDS=100 for more."""
    rounds = int(os.environ.get("ATTNSTORE_SERVING_ROUNDS", "3"))
    seed = random.randrange(1 << 32)
    status, result = run(
        "serving.py", "--rounds", str(rounds), "--rounds-per-life", "3", "--talks", "6", "--seed", str(seed)
    )
    assert status == 0, (result["failure"], result["goals"])
    assert result["counts"]["chunks promised"] > 0 and result["counts"]["killed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("canary", "found"), [("wrong", "Wrong: "), ("forgetful", "is not hit"), ("deaf", "no answer")]
)
def test_workers_with_a_planted_bug_are_found_out(canary: str, found: str) -> None:
    small = ("--talks", "4", "--turns", "5", "--seconds", "3", "--spare-workers")
    status, result = run("serving.py", "--rounds", "6", *small, "--canary", canary)
    assert status == 1 and found in result["failure"], result
