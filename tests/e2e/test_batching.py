"""Batching engines and a real daemon: what one saved, another loads; tokens never change, whatever becomes of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine

from ..small_models import tiny_llama
from .conftest import BOUND_S, Daemon

T = 64


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return tiny_llama(layers=3, positions=2048)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    system = torch.randint(0, 256, (5 * T + 9,), generator=draw).tolist()
    return [[*system, *torch.randint(0, 256, (20 + 30 * n,), generator=draw).tolist()] for n in range(4)]


def answers(model: LlamaForCausalLM, run_dir: Path | None) -> tuple[dict[int, list[int]], BatchEngine]:
    client = (lambda: connect(str(run_dir), timeout_s=BOUND_S)) if run_dir else None
    engine = BatchEngine(model, client, pool_chunks=40)
    got: dict[int, list[int]] = {engine.add(prompt, 12): [] for prompt in prompts()}
    for output in engine.run():
        got[output.request].append(output.token)
    assert engine.flush(BOUND_S)
    engine.close()
    return got, engine


def test_an_engine_goes_on_from_what_another_saved(model: LlamaForCausalLM, daemon: Daemon) -> None:
    plain, _ = answers(model, None)
    first, saving = answers(model, daemon.run_dir)
    second, loading = answers(model, daemon.run_dir)
    assert plain == first == second
    assert saving.counters["restored_tokens"] == 0
    assert loading.counters["restored_tokens"] == (5 + 1 + 1) * T  # five that all share, and of two the next
    assert loading.counters["load_failures"] == 0


def test_a_daemon_that_stops_or_dies_changes_no_token(model: LlamaForCausalLM, daemon: Daemon) -> None:
    plain, _ = answers(model, None)
    assert answers(model, daemon.run_dir)[0] == plain
    engine = BatchEngine(
        model, lambda: connect(str(daemon.run_dir), timeout_s=BOUND_S), pool_chunks=40, retain=False
    )
    try:
        for what in (signal.SIGSTOP, signal.SIGKILL):
            got: dict[int, list[int]] = {engine.add(prompt, 12): [] for prompt in prompts()}
            os.kill(daemon.process.pid, what)
            for output in engine.run():
                got[output.request].append(output.token)
            assert list(got.values()) == list(plain.values())
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
        engine.close()


@pytest.mark.timeout(360)  # of a machine that does much else: the example imports torch
def test_the_example_runs(daemon: Daemon) -> None:
    example = Path(__file__).parents[2] / "examples" / "batching.py"
    command = [sys.executable, "-P", str(example), "--random", "--run-dir", str(daemon.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    last = done.stdout.splitlines()[-1]
    assert re.match(
        r"\d+ tokens computed, \d{4} shared, 0 loaded from the store; at most \d+ MiB of KV", last
    )
    assert done.stdout.count("?\n    ") == 3
