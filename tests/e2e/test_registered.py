"""A worker whose device copies out of the arena by itself, beside a real daemon: under both protections, while segments
come and go, and over a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.segments import Path

from ..small_models import tiny_llama
from ..unit.gpu_worker.emulated import EmulatedDevice, Trusting
from .conftest import BOUND_S, Daemon

T = 16
PROMPTS = [
    torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)
]
Make = Callable[..., tuple[BatchEngine, EmulatedDevice]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return tiny_llama(layers=3)


@pytest.fixture
def make(model: LlamaForCausalLM) -> Iterator[Make]:
    made: list[tuple[BatchEngine, EmulatedDevice]] = []

    def one(daemon: Daemon, **device: Any) -> tuple[BatchEngine, EmulatedDevice]:
        emulated = EmulatedDevice(seed=len(made), **device)
        engine = BatchEngine(
            model,
            lambda: connect(str(daemon.run_dir), timeout_s=BOUND_S),
            pool_chunks=32,
            chunk_tokens=T,
            retain=False,
            lookup_timeout_s=BOUND_S,
            device=emulated,
            verdicts=Trusting(),  # type: ignore[arg-type]
        )
        made.append((engine, emulated))
        return made[-1]

    yield one
    for engine, emulated in made:
        engine.close()
        assert not emulated.races and emulated.pageable == emulated.registered == 0


@pytest.mark.parametrize(
    ("protection", "read_only", "path"),
    [
        ("group", False, Path.REGISTERED),
        ("sealed", True, Path.REGISTERED),
        ("sealed", False, Path.BOUNCE),
    ],
)
def test_tokens_are_those_of_a_worker_without_a_store(
    protection: str,
    read_only: bool,
    path: Path,
    model: LlamaForCausalLM,
    make: Make,
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(protection=protection)
    plain = BatchEngine(model, pool_chunks=32, chunk_tokens=T)
    wanted = [plain.turn("", prompt, 8).tokens for prompt in PROMPTS]
    first, _ = make(daemon, registers_read_only=read_only)
    assert first.turn("", PROMPTS[0], 8).tokens == wanted[0] and first.flush(BOUND_S)
    second, device = make(daemon, registers_read_only=read_only)
    assert second._store is not None and second._store.segments.path is path
    assert (device.registered > 0) is (path is Path.REGISTERED), "at the start, before anybody reads"
    turns = [second.turn("", prompt, 8) for prompt in PROMPTS]
    assert [turn.tokens for turn in turns] == wanted
    assert turns[0].reused.dram == 144 and not second.alarm
    plain.close()


def test_segments_are_registered_anew_after_a_restart(
    make: Make, start_daemon: Callable[..., Daemon], launch: Callable[..., Daemon]
) -> None:
    daemon = start_daemon(protection="group")
    engine, device = make(daemon)
    wanted = engine.turn("", PROMPTS[0], 8).tokens
    assert engine.flush(BOUND_S)
    assert engine.turn("", PROMPTS[0], 8).reused.dram == 144 and device.registered > 0
    daemon.kill()
    daemon = start_daemon(protection="group")
    assert engine._store is not None and engine._store.namespace is not None
    engine._store.namespace.client.wait_connected(BOUND_S)
    for _ in range(3):  # what the dead daemon had is computed, and saved in the arena of the new one
        assert engine.turn("", PROMPTS[0], 8).tokens == wanted
        assert engine.flush(BOUND_S)
    turn = engine.turn("", PROMPTS[0], 8)
    assert turn.tokens == wanted and turn.reused.dram == 144 and not engine.alarm
    segments = engine._store.segments
    assert device.registered == segments.registered_bytes > 0
