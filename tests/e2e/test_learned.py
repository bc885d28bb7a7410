"""What a real daemon learned of reuse is there after a restart, with an SSD or without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import LEARNED_FILE
from kvstore.types import Outcome

from .ssd_tools import SMALL_SSD, SPEC, client_of, keys_of, look, save


def learned_in(folder: Path) -> float:
    """Lives whose end the daemon saw, of all its tenants."""
    found = json.loads((folder / LEARNED_FILE).read_text())
    return sum(sum(ended) for kinds in found["tenants"].values() for ended, _ in kinds.values())


@pytest.mark.parametrize("ssd", [True, False], ids=["ssd", "dram"])
def test_what_was_learned_outlives_the_daemon(
    start_daemon: Callable[..., Any], run_dir: Path, ssd: bool
) -> None:
    folder = run_dir.parent / "ssd" if ssd else run_dir
    settings = {name: value for name, value in SMALL_SSD.items() if ssd or not name.startswith("ssd")}
    settings |= {"directory": False} | ({"ssd_dir": folder} if ssd else {})
    daemon = start_daemon(**settings)
    with client_of(daemon) as client:
        namespace = client.open(SPEC)
        keys = keys_of(namespace, 4)
        save(namespace, keys)
        for _ in range(3):
            assert {outcome for outcome, _ in look(namespace, keys)} == {Outcome.HIT}
    assert daemon.stop() == 0
    before = learned_in(folder)
    assert before >= len(keys)
    daemon = start_daemon(**settings)
    assert not [line for line in daemon.lines if "learned" in line["message"]], daemon.lines
    assert daemon.stop() == 0
    assert before / 2 - 0.5 <= learned_in(folder) <= before, "whole, until its tenant has opened something"
    (folder / LEARNED_FILE).write_text('{"kvstored_learned": 1, "tenants"')
    daemon = start_daemon(**settings)
    daemon.wait_for("what was learned of reuse cannot be read, and is learned anew")
    assert daemon.stop() == 0
