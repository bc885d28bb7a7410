"""A worker whose device copies out of the arena by itself, beside a real daemon: under both protections, while segments
come and go, and over a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine, Turn
from kvstore.gpu_worker.segments import Path

from ..cards import card, on_a_card
from ..small_models import tiny_llama
from ..unit.gpu_worker.emulated import EmulatedDevice, Trusting
from .conftest import BOUND_S, Daemon

T = 16
PROMPTS = [
    torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)
]
Make = Callable[..., tuple[BatchEngine, Any]]
CLEAR = {"emulated": 0.0, "cuda": 0.25}
"""Where the largest logit is less above the second one, another order of the same sums may choose the other token."""


@pytest.fixture(scope="module", params=["emulated", on_a_card("cuda")])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    if kind == "cuda":
        return tiny_llama(torch.bfloat16, layers=3).to("cuda")
    return tiny_llama(layers=3)


@pytest.fixture
def make(model: LlamaForCausalLM, kind: str) -> Iterator[Make]:
    made: list[tuple[BatchEngine, Any]] = []

    def one(daemon: Daemon, **device: Any) -> tuple[BatchEngine, Any]:
        emulated = card() if kind == "cuda" else EmulatedDevice(seed=len(made), **device)
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
        if kind == "emulated":
            assert not emulated.races and emulated.pageable == emulated.registered == 0


def agree(kind: str, one: Turn, other: Turn) -> bool:
    """Up to the first token that was no clear choice."""
    for mine, theirs, gap in zip(one.tokens, other.tokens, one.gaps, strict=True):
        if mine != theirs:
            return gap < CLEAR[kind]
    return True


def registered(engine: BatchEngine, device: Any) -> int:
    """Bytes of the arena, as the engine and the device see it."""
    assert engine._store is not None
    found = engine._store.segments.registered_bytes
    assert device.name == "cuda" or device.registered == found
    return found


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
    kind: str,
    model: LlamaForCausalLM,
    make: Make,
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(protection=protection)
    plain = BatchEngine(model, pool_chunks=32, chunk_tokens=T)
    wanted = [plain.turn("", prompt, 8) for prompt in PROMPTS]
    first, device = make(daemon, registers_read_only=read_only)
    if protection == "sealed" and device.registers_read_only is not read_only:
        plain.close()
        pytest.skip("cards of the other kind do that")
    assert agree(kind, first.turn("", PROMPTS[0], 8), wanted[0]) and first.flush(BOUND_S)
    second, device = make(daemon, registers_read_only=read_only)
    assert second._store is not None and second._store.segments.path is path
    assert (registered(second, device) > 0) is (path is Path.REGISTERED), "at the start, before anybody reads"
    turns = [second.turn("", prompt, 8) for prompt in PROMPTS]
    assert all(agree(kind, turn, other) for turn, other in zip(turns, wanted, strict=True))
    assert turns[0].reused.dram == 144 and not second.alarm
    plain.close()


def test_segments_are_registered_anew_after_a_restart(
    kind: str, make: Make, start_daemon: Callable[..., Daemon]
) -> None:
    daemon = start_daemon(protection="group")
    engine, device = make(daemon)
    wanted = engine.turn("", PROMPTS[0], 8)
    assert engine.flush(BOUND_S)
    assert engine.turn("", PROMPTS[0], 8).reused.dram == 144 and registered(engine, device) > 0
    daemon.kill()
    daemon = start_daemon(protection="group")
    assert engine._store is not None and engine._store.namespace is not None
    engine._store.namespace.client.wait_connected(BOUND_S)
    for _ in range(3):  # what the dead daemon had is computed, and saved in the arena of the new one
        assert agree(kind, engine.turn("", PROMPTS[0], 8), wanted)
        assert engine.flush(BOUND_S)
    turn = engine.turn("", PROMPTS[0], 8)
    assert agree(kind, turn, wanted) and turn.reused.dram == 144 and not engine.alarm
    assert registered(engine, device) > 0
