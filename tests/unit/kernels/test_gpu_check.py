"""The program that checks all kernels on a GPU, in its dry run: each section runs, and a failure stops nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvstore.kernels import tiles

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"
SECTIONS = ["device", "engine", "store", "correct", "plans", "decode", "tiles", "prefill", "copies", "trace"]


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


def test_every_section_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "tiles.py"
    code, rows = run(
        program,
        monkeypatch,
        tmp_path / "result.json",
        *("--tiles", str(module), "--trace", str(tmp_path / "trace.json")),
    )
    assert code == 0 and not [row for row in rows if "error" in row or "left_out" in row]
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
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
    code, rows = run(program, monkeypatch, tmp_path / "result.json", "--only-correct")
    assert code == 1 and {row["section"] for row in rows} == set(program.ONLY_CORRECT)
    for row in rows:
        assert ("error" in row) == row["what"].startswith("decode"), row


def test_what_there_is_no_time_for_is_named(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, rows = run(program, monkeypatch, tmp_path / "result.json", "--seconds", "0", "--trace", "none")
    assert code == 0 and all(row["left_out"] == "no time left" for row in rows)
    assert list(dict.fromkeys(row["section"] for row in rows)) == SECTIONS
