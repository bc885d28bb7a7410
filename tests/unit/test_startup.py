"""Programs of ours while they import: Ctrl-C ends them without a traceback, and what is missing is one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.startup import end_at_interrupt, loading

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import runpy, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


@pytest.mark.parametrize(
    ("program", "module", "given"),
    [
        ("kvstore", "kvstore.config", []),
        ("kvstore.scheduler.gateway", "uvicorn", ["--server", "http://127.0.0.1:1"]),
        ("kvstore.gpu_worker.worker", "torch", ["--model", "{folder}"]),
        ("examples/demo.py", "kvstore.client", []),
        ("examples/batching.py", "transformers", []),
    ],
)
def test_an_interrupt_while_it_imports_ends_it_without_a_word(
    program: str, module: str, given: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = (
        f"runpy.run_path({str(ROOT / program)!r}, run_name='__main__')"
        if program.endswith(".py")
        else f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    )
    arguments = [each.format(folder=tmp_path) for each in given]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", RUN.format(module=module) + run, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_what_a_program_does_at_an_interrupt_is_as_before_once_it_has_imported() -> None:
    for before in (signal.default_int_handler, signal.SIG_IGN):
        own = signal.signal(signal.SIGINT, before)
        try:
            with loading("it", extra="x"):
                within = signal.getsignal(signal.SIGINT)
            after = signal.getsignal(signal.SIGINT)
            end_at_interrupt()
            until_it_catches_signals = signal.getsignal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, own)
        ends = signal.SIG_IGN if before is signal.SIG_IGN else signal.SIG_DFL
        assert (within, after, until_it_catches_signals) == (ends, before, ends)


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    said = r"^it needs torch: pip install 'attnstore\[worker\]'$"
    with pytest.raises(SystemExit, match=said), loading("it", extra="worker"):
        raise ModuleNotFoundError(name="torch")


def test_a_module_of_ours_that_is_missing_is_a_bug_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError), loading("it", extra="worker"):
        raise ModuleNotFoundError(name="kvstore.client")
