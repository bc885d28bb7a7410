"""Daemons that tests fork are what a fresh process would be, and a fresh one is made where they would not be."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import forked

BOUND_S = 20.0


def test_a_forked_daemon_ends_as_any_process_does(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon()
    assert isinstance(daemon.process, forked.Forked)
    assert daemon.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(0.01)
    daemon.process.send_signal(signal.SIGKILL)
    assert daemon.process.wait(BOUND_S) == daemon.process.poll() == -signal.SIGKILL
    daemon.process.send_signal(signal.SIGTERM)  # nobody is there, nobody is hit
    assert not Path(f"/proc/{daemon.pid}").exists(), "it was reaped"


def test_it_shares_no_pipe_with_another(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    """Else the end of one daemon's log is not seen while another one lives."""

    def pipes(daemon: Any) -> set[str]:
        targets = (os.readlink(fd) for fd in Path(f"/proc/{daemon.pid}/fd").iterdir())
        return {target for target in targets if target.startswith("pipe:")}

    first, second = start_daemon(), start_daemon(run_dir=run_dir.parent / "other")
    assert pipes(first) and not pipes(first) & pipes(second)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "GRPC_TRACE", "LD_LIBRARY_PATH"])
def test_what_changes_imports_takes_a_fresh_process(name: str) -> None:
    assert forked.server_for(os.environ) is not None
    assert forked.server_for(os.environ | {"KVSTORED_DRAM_BYTES": "1"}) is not None
    assert forked.server_for(os.environ | {name: "0"}) is None


def test_so_does_what_a_process_inherits() -> None:
    assert forked.server_for(os.environ) is not None
    before = os.umask(0o123)
    try:
        assert forked.server_for(os.environ) is None
    finally:
        os.umask(before)


def test_a_command_has_input_output_and_status() -> None:
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    shown = forked.run(["--version"], environment)
    assert (shown.returncode, shown.stderr) == (0, b"") and shown.stdout.startswith(b"kvctl ")
    wrong = forked.run(["no such command"], environment)
    assert wrong.returncode == 2 and b"no such command" in wrong.stderr
