"""The program that checks all kernels on a GPU, in its dry run: each section runs, and a failure stops nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvstore.kernels import tiles

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"
SECTIONS = [
    *("device", "engine", "store", "correct", "decode", "overlap"),
    *("prefill", "trace", "copies", "plans", "tiles"),
]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    for name in ("DECODE", "PREFILL"):
        monkeypatch.setattr(tiles, name, {})
    return module


def run(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, into: Path, *options: str
) -> tuple[int, list[dict]]:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--into", str(into), *options])
    code = program.main()
    return code, json.loads(into.read_text())["results"]


@pytest.mark.timeout(600)  # engines, daemons, and a profile
def test_every_section_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "tiles.py"
    code, rows = run(
        program,
        monkeypatch,
        tmp_path / "result.json",
        *("--tiles", str(module), "--trace", str(tmp_path / "trace.json"), "--seconds", "3000"),
    )
    assert code == 0 and not [row for row in rows if "error" in row or "left_out" in row]
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
    goals = [goal["name"] for goal in json.loads((tmp_path / "result.json").read_text())["goals"]]
    for wanted in (
        "of the roofline",
        "64 shared",
        "of the link",
        "loaded against kept",
        "with saving against",
    ):
        assert [name for name in goals if wanted in name], wanted
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found: dict = {}
    exec(module.read_text(), found)
    assert found["DECODE"] == tiles.DECODE and found["PREFILL"] == tiles.PREFILL
    assert found["__doc__"].startswith(tiles.__doc__.splitlines()[0])


def test_a_wrong_kernel_is_found_and_the_rest_is_done(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    correct = importlib.import_module("gpu.correct")
    right = correct.decode_attention

    def wrong(
        q: torch.Tensor, keys: torch.Tensor, *others: object, out: torch.Tensor, **more: object
    ) -> torch.Tensor:
        return right(q, keys, *others, out=out, **more).mul_(1.05)

    monkeypatch.setattr(correct, "decode_attention", wrong)
    code, rows = run(program, monkeypatch, tmp_path / "result.json", "--only-correct", "--seconds", "3000")
    assert code == 1 and {row["section"] for row in rows} == set(program.ONLY_CORRECT)
    for row in rows:
        assert ("error" in row) == row["what"].startswith("decode"), row


def test_a_load_that_brings_other_bytes_is_found(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = importlib.import_module("gpu.store")
    copy = store.Held.copy_many

    def spoilt(self: Any, pieces: Any) -> bool:
        copy(self, pieces)
        pieces[-1][-1].reshape(-1)[-1] ^= 1
        return True

    section = store.Store(program.DRY, {})
    assert section.loads()["layers"] == 2
    monkeypatch.setattr(store.Held, "copy_many", spoilt)
    with pytest.raises(AssertionError, match="registered: what was loaded differs in layer 0"):
        section.loads()


def test_goals_are_of_what_was_measured_and_can_be_met(program: ModuleType) -> None:
    """On a card: all heads have KV of their own, the longest sequences; a load that can be hidden."""
    goals_of, on = program.goals_of, program.Setting()
    decode = {"section": "decode", "what": "", "tokens": 4096, "kv_heads": 32, "us": 41.0, "of_read": 0.9}
    overlap = {"section": "overlap", "what": "", "over_kept": 1.04, "load_over_kept": 0.7}
    met = [
        goals_of(on, [decode | {"shared": 0}]),
        goals_of(on, [overlap]),
        goals_of(on, [{"section": "store", "what": "", "registered_of_link": 0.9}]),
        goals_of(on, [{"section": "overlap", "what": "", "behind": 1.0}]),
    ]
    assert [goal.met for (goal,) in met] == [True] * 4
    (missed,) = goals_of(on, [decode | {"shared": 4096}])
    assert not missed.met and missed.unit == "us"
    assert not goals_of(on, [decode | {"shared": 0, "kv_heads": 8}, decode | {"shared": 0, "tokens": 1024}])
    assert not goals_of(on, [overlap | {"load_over_kept": 0.9}, overlap | {"error": "differs"}])


def test_what_there_is_no_time_for_is_named(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, rows = run(program, monkeypatch, tmp_path / "result.json", "--seconds", "0", "--trace", "none")
    assert code == 0 and all(row["left_out"] == "no time left" for row in rows)
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
