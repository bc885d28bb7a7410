"""`make venv`, with a Python that only writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 60.0
FAKE = """#!/bin/bash
echo "$*" >> "{log}"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *torch*) while [ -e "{hold}" ]; do sleep 0.02; done ;;
esac
"""
Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    write(tmp_path / "fake-python", FAKE.format(log=tmp_path / "log", hold=tmp_path / "hold"))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        command = ["make", "venv", f"PYTHON={folder}/fake-python"]
        started.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    (folder / "hold").unlink(missing_ok=True)
    for process in started:
        process.communicate(timeout=BOUND_S)


def write(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def asked(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_an_environment_that_was_interrupted_before_it_had_pip_is_completed(
    folder: Path, start: Start
) -> None:
    write(folder / ".venv/bin/python", "#!/bin/bash\nexit 1\n")
    assert start().wait(BOUND_S) == 0
    assert asked(folder)[0] == "-m venv .venv"
    assert (folder / ".venv/ready").exists()


def test_one_that_has_pip_is_kept(folder: Path, start: Start) -> None:
    write(folder / ".venv/bin/python", (folder / "fake-python").read_text())
    assert start().wait(BOUND_S) == 0
    assert not any("venv" in line for line in asked(folder))


def test_two_at_once_take_turns(folder: Path, start: Start) -> None:
    (folder / "hold").touch()
    first = start()
    while not ((folder / "log").exists() and any("torch" in line for line in asked(folder))):
        assert first.poll() is None
        time.sleep(0.01)
    second = start()
    assert second.stdout is not None
    assert "waiting for it" in second.stdout.readline()
    (folder / "hold").unlink()
    assert (first.wait(BOUND_S), second.wait(BOUND_S)) == (0, 0)
    assert sum("torch" in line for line in asked(folder)) == 1


@pytest.mark.parametrize("developer", [True, False])
def test_the_wheel_needs_no_torch(folder: Path, developer: bool) -> None:
    """Who only installs it does not wait for .venv. A developer's wheel is built by .venv, without the net."""
    for name in ("README.md", "LICENSE", "kvstore", "gpu_worker", "scheduler", "kernels"):
        (folder / name).touch()
    if developer:
        write(folder / ".venv/bin/python", (folder / "fake-python").read_text())
        (folder / ".venv/ready").touch()
    command = ["make", "wheel", f"PYTHON={folder}/fake-python"]
    subprocess.run(command, cwd=folder, check=True, timeout=BOUND_S)
    (built,) = (line for line in asked(folder) if " wheel " in line)
    assert ("--no-build-isolation" in built) is developer
    assert not any("torch" in line or "--editable" in line for line in asked(folder))
    assert (folder / ".cache/build-venv").exists() is not developer


@pytest.mark.parametrize("there", [True, False])
def test_bench_peers_installs_the_library_that_a_wheel_forgets(folder: Path, there: bool) -> None:
    for environment in ("peers", "lmcache", "vllm"):
        write(folder / f".cache/{environment}-venv/bin/python", f"#!/bin/bash\nexit {int(not there)}\n")
        (folder / f".cache/{environment}-venv/ready").touch()
    for program in ("redis-server", "memcached"):
        write(folder / "bin" / program, "#!/bin/bash\n")
    write(folder / "bin/apt-get", f'#!/bin/bash\necho "$*" >> "{folder}/log"\n')
    path = f"{folder}/bin:{os.environ['PATH']}"
    touched = [f"--assume-old=.cache/{name}-venv/ready" for name in ("peers", "lmcache", "vllm")]
    command = ["make", "bench-peers", *touched]
    subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, check=True, timeout=BOUND_S)
    found = asked(folder) if (folder / "log").exists() else []
    assert found == (
        [] if there else ["install --yes --no-install-recommends redis-server memcached libibverbs1"]
    )
