"""The program that checks all kernels on a GPU, in its dry run: each section runs, and a failure stops nothing else."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvstore.gpu_worker.cuda import BatchedCopies, CudaDevice
from kvstore.kernels import tiles

from ..gpu_worker.test_cuda import FakeCuda

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"
ALONE = ["engine", "store", "decode", "overlap", "prefill", "trace", "copies", "plans", "tiles"]


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
    given = ["gpu_check", "--dry-run", "--processes", "2", "--into", str(into), *options]
    monkeypatch.setattr(sys, "argv", given)
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
    assert not [row for row in rows if "error" in row or "left_out" in row] and code == 0
    found = list(dict.fromkeys(row["section"] for row in rows))
    compiled = [f"compile {name}" for name in ("engine", "overlap", "decode", "prefill", "copies", "tiles")]
    assert found[0] == "device" and {*found[1:8]} == {"correct", *compiled} and found[8:] == ALONE
    steps = [(row["section"], row["what"]) for row in rows]
    assert len(set(steps)) == len(steps), "a step was done by two processes"
    goals = [goal["name"] for goal in json.loads((tmp_path / "result.json").read_text())["goals"]]
    for wanted in (
        "of the roofline",
        "64 shared",
        "of the link",
        "loaded against kept",
        "with saving against",
    ):
        assert [name for name in goals if wanted in name], wanted
    assert not [name for name in goals if name.startswith("compile")]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    written: dict = {}
    exec(module.read_text(), written)
    assert {"DECODE", "PREFILL"} <= written.keys()
    assert written["__doc__"].startswith(tiles.__doc__.splitlines()[0])


def test_a_wrong_kernel_is_found_and_the_rest_is_done(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = importlib.import_module("gpu.correct")
    right = correct.decode_attention

    def wrong(
        q: torch.Tensor, keys: torch.Tensor, *others: object, out: torch.Tensor | None = None, **more: object
    ) -> torch.Tensor:
        return right(q, keys, *others, out=out, **more).mul_(1.05)

    monkeypatch.setattr(correct, "decode_attention", wrong)
    chosen = argparse.Namespace(dry_run=True, seconds=3000.0, tiles=None, trace=None)
    assert program.work_on(chosen, program.Work(("correct",))) == 0
    mark = importlib.import_module("gpu.processes").MARK
    told = [
        json.loads(line.removeprefix(mark)) for line in capsys.readouterr().out.splitlines() if mark in line
    ]
    rows = [each["row"] for each in told if "row" in each]
    assert told[-1] == {"done": True} and len(rows) == sum("begins" in each for each in told) > 10
    for row in rows:
        assert ("error" in row) == row["what"].startswith("decode"), row


# ------------------------------------------------------------------------------------ steps in processes of their own

STEPS = """
import json, os, sys, time
work = json.loads(sys.argv[1])
say = lambda **what: print("step: " + json.dumps(what), flush=True)
print("said by a library")
{before}
for number in range(6):
    if number < work["first"] or number % work["part"][1] != work["part"][0]:
        continue
    say(begins={{"section": "s", "what": str(number)}}, number=number)
    if number == 2:
        {at_two}
    say(speeds={{"copy": number}})
    say(row={{"section": "s", "what": str(number), "speeds": work["speeds"]}})
say(done=True)
{after}
"""


def told(
    program: ModuleType,
    at_two: str,
    *,
    before: str = "",
    after: str = "",
    count: int = 1,
    hangs_s: float = 100.0,
) -> list[dict]:
    processes = importlib.import_module("gpu.processes")
    works = [program.Work(("s",), part=(n, count)) for n in range(count)]
    text = STEPS.format(at_two=at_two, before=before, after=after)
    return list(
        processes.rows_of_all(works, lambda work: [sys.executable, "-c", text, work.told()], hangs_s=hangs_s)
    )


@pytest.mark.parametrize(
    ("at_two", "error"),
    [
        ("os.abort()", "ended with -6"),
        ("sys.exit(3)", "ended with 3"),
        ("time.sleep(600)", "took more than 15 s"),
    ],
)
def test_a_step_that_ends_its_process_or_hangs_costs_no_other(
    program: ModuleType, at_two: str, error: str
) -> None:
    rows = told(program, at_two, hangs_s=15.0 if "sleep" in at_two else 100.0)
    assert [row["what"] for row in rows] == [str(number) for number in range(6)]
    assert [row["what"] for row in rows if "error" in row] == ["2"] and rows[2]["error"] == error
    assert rows[3]["speeds"] == {"copy": 1}, "the next process knows what was measured before"


def test_a_process_that_lost_the_card_leaves_its_steps_to_the_next_one(program: ModuleType) -> None:
    row = 'say(row={"section": "s", "what": "2", "error": "CUDA error"}); sys.exit(1)'
    rows = told(program, row)
    assert [row["what"] for row in rows] == [str(number) for number in range(6)]
    assert [row.get("error") for row in rows] == [None, None, "CUDA error", None, None, None]
    is_lost = importlib.import_module("gpu.processes").is_lost
    assert is_lost({"error": "AcceleratorError: CUDA error: an illegal memory access"})
    assert not is_lost({"error": "AssertionError: differs by 1"}) and not is_lost({})


def test_a_process_that_does_not_begin_is_told_once(program: ModuleType) -> None:
    (row,) = told(program, "pass", before="sys.exit(1)")
    assert row == {"section": "s", "what": "its process", "error": "ended with 1"}


@pytest.mark.parametrize("end", ["time.sleep(600)", "os.close(1); time.sleep(600)"])
def test_a_process_that_hangs_at_its_end_keeps_nobody(program: ModuleType, end: str) -> None:
    """As one does that waits for a card which answers no more."""
    rows = told(program, "pass", after=end, hangs_s=15.0)
    assert [row["what"] for row in rows] == [str(number) for number in range(6)]
    assert not [row for row in rows if "error" in row]


def test_steps_are_shared_out_among_processes(program: ModuleType) -> None:
    rows = told(program, "os.abort()", count=2)
    assert sorted(row["what"] for row in rows) == [str(number) for number in range(6)]
    assert [row["what"] for row in rows if "error" in row] == ["2"]


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
    decode = {"section": "decode", "what": "", "tokens": 4096, "kv_heads": 32, "us": 41.0, "of_roofline": 0.9}
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
    assert [each for each in dict.fromkeys(row["section"] for row in rows) if each in ALONE] == ALONE


# ---------------------------------------------------------------------------- what a card alone does, without one


@pytest.fixture
def fake(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """torch.cuda as the worker's tests have it; its memory is the host's, and what it is asked for is done at once."""
    made = FakeCuda()
    made.install(monkeypatch)
    monkeypatch.setattr(BatchedCopies, "of_driver", classmethod(lambda cls: None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 4 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


@pytest.fixture
def card(program: ModuleType) -> Any:
    """All that is asked whether there is a card says yes, and sizes that follow from it are those of a card."""
    return replace(program.DRY, real=True)


@pytest.mark.timeout(300)
def test_the_way_to_the_store_by_a_card(program: ModuleType, card: Any, fake: FakeCuda) -> None:
    section = program.Store(card, {})
    assert section.registration().keys() == {"s_per_gib", "unregistering_s_per_gib"} and not fake.registered
    link = section.link()
    assert link["registered_of_link"] > 0 and {"pageable_in_gb_per_s", "pageable_out_gb_per_s"} <= link.keys()
    assert "pageable_in_one_by_one_gb_per_s" not in link and not fake.registered
    loads = section.loads()
    assert loads["layers"] == 8 and loads["link_gb_per_s"] > 0
    assert {"registered_of_link", "bounce_of_link", "rotated_of_link"} <= loads.keys() and not fake.registered
    paths = {protection: section.self_check(protection)["path"] for protection in ("group", "sealed")}
    assert paths == {"group": "registered", "sealed": "bounce"} and not fake.registered


def test_nothing_asks_for_pageable_memory_in_batches(
    program: ModuleType, card: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that reads it loses the context, and a driver that refuses it is asked for no batches any more."""
    known: list[tuple[int, int]] = []
    together = CudaDevice._copy_together
    buffer, register = CudaDevice.buffer, CudaDevice.register

    def noted_buffer(device: Any, count: int) -> Any:
        made = buffer(device, count)
        known.append((made.ctypes.data, made.nbytes))
        return made

    def noted(device: Any, memory: Any) -> None:
        register(device, memory)
        known.append((memory.ctypes.data, memory.nbytes))

    def looked(device: Any, copies: Any) -> list[bool]:
        for to, source, size in filter(None, copies):
            here = [any(a <= p and p + size <= a + n for a, n in known) for p in (to, source)]
            assert any(here), "neither side is registered"
        return together(device, copies)

    monkeypatch.setattr(CudaDevice, "buffer", noted_buffer)
    monkeypatch.setattr(CudaDevice, "register", noted)
    monkeypatch.setattr(CudaDevice, "_copy_together", looked)
    program.Store(card, {}).link()


def test_graphs_events_and_streams_of_the_kernels_checks(
    program: ModuleType, card: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = program.Correct(card, {"read": 1.0, "copy": 2.0})
    assert "left_out" in section.far_chunks(), "a card with little memory"
    assert section.large_logits()["max_error"] >= 0 and fake.calls.count("wait_stream") == 2
    fake.calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(section, "captured", lambda call: call)  # what a graph computes is not there
        assert section.graph_while_growing(tokens=20)["captures"] >= 1
    decode = program.Decode(card, section.speeds)
    point = decode.point(*card.points[1], card.heads)
    assert point["us"] == 1000.0 and point["of_roofline"] > 0 and "torch_us" in point
    assert program.section_of("compile decode", card, {}, argparse.Namespace()).point(
        *card.points[1], card.heads
    )
    assert program.Overlap(card, {}).layers() == 2, "few fit"


def test_a_graph_keeps_what_it_reads(program: ModuleType, card: Any, fake: FakeCuda) -> None:
    """Its memory would be given to others, and a replay would read theirs."""
    section = program.Correct(card, {})
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    replay = section.captured(lambda tensor=tensor: tensor * 2)
    del tensor
    gc.collect()
    assert alive() is not None
    replay()
    del replay
    gc.collect()
    assert alive() is None
