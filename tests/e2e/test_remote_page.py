"""docs/remote.md: what a newcomer pastes to see two nodes share a store."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .ssd_tools import eventually

PAGE = (Path(__file__).resolve().parents[2] / "docs/remote.md").read_text()


def test_the_two_nodes_of_the_page_share_what_one_has_saved(start_daemon, run_dir, tmp_path) -> None:
    pytest.importorskip("obstore")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    commands = re.findall(r"(?m)^kvstored (.* --remote-writes .*) &$", PAGE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        flags = dict(zip(words[::2], words[1::2], strict=True))
        where = Path(f"{run_dir}{Path(flags.pop('--run-dir')).name}")
        flags["--remote-url"] = flags["--remote-url"].replace("/tmp", str(tmp_path))
        settings = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
        start_daemon(run_dir=where, **settings)

    def share(node: str, *save: str) -> list[str]:
        command = [sys.executable, "-P", "-c", program, f"{run_dir}kv-{node}", *save]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
        return ended.stdout.splitlines()

    said: list[str] = []
    assert share("a", "save")[1] == "4 chunks loaded"
    eventually(lambda: share("b")[1] == "4 chunks loaded", lambda: said)
    assert "NONE" not in said[1], said  # it was not on node b before
