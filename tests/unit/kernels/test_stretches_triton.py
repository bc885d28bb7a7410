"""Triton's attention over stretches without a GPU, as test_triton.py has it: interpreted, and compiled for Hopper."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kvstore.kernels.launch import card
from kvstore.kernels.stretches import Stretch

from .conftest import NAN, Case
from .hopper import CAPABILITIES, SHARED_BYTES, compile_aligned, interpreted_passes, stack_bytes

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: its kernels can be neither run nor compiled"
)

from kvstore.kernels.decode import kernel as decode_kernel  # noqa: E402
from kvstore.kernels.prefill import kernel as prefill_kernel  # noqa: E402
from kvstore.kernels.stretches import kernel  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


@compiled
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    assert interpreted_passes(__file__) == 7


def _options(q: torch.Tensor, scale: float | None, soft_cap: float | None) -> dict[str, Any]:
    return {"scale": q.shape[2] ** -0.5 if scale is None else scale, "soft_cap": soft_cap}


def decode(q, keys, values, plan, *, out, turned=None, scale=None, soft_cap=None) -> None:
    decode_kernel.decode(
        *(q, keys, values, plan),
        **_options(q, scale, soft_cap),
        out=out,
        turned=turned,
        partials=torch.full((plan.capacity.partials, *q.shape[1:]), NAN),
        stats=torch.full((plan.capacity.partials, q.shape[1], 2), NAN),
    )


def prefill(q, keys, values, plan, *, out, turned=None, scale=None, soft_cap=None) -> None:
    prefill_kernel.prefill(*(q, keys, values, plan), **_options(q, scale, soft_cap), out=out, turned=turned)


def scattered(**shape: int) -> Case:
    """Own chunks shared and not; a stretch that three rows see at three places, one twice; parts of chunks; another
    sequence's chunk; a row without any."""
    case = Case(rows=5, chunks=24, **shape)
    tokens = case.chunk_tokens
    case.add(0, more=2 * tokens + 3)
    case.add(1, like=0, shared=1, more=2)
    case.add(2, more=tokens)
    case.add(4, more=7)
    one, other = case.unused[0], case.unused[1]
    case.stretches = {
        0: [Stretch(one, 2, tokens - 3, delta=64), Stretch(other, 0, tokens, delta=64, at=5)],
        1: [Stretch(one, 2, tokens - 3, delta=-3, at=tokens)],
        2: [
            Stretch(one, 2, tokens - 3),
            Stretch(one, 2, tokens - 3, delta=4000),
            Stretch(case.sequences[0][0][0], 0, tokens, delta=9),
        ],
    }
    return case


SHAPES = [
    (torch.float32, {"head_dim": 64, "kv_heads": 2}, {}),
    (torch.float16, {"head_dim": 80, "group": 4, "tile_sequences": 8}, {"soft_cap": 5.0}),
    (torch.bfloat16, {"head_dim": 32, "group": 3, "chunk_tokens": 64, "split_chunks": 1}, {"scale": 0.3}),
]


@interpreted
@pytest.mark.parametrize(("dtype", "shape", "options"), SHAPES)
def test_interpreter_decodes_over_stretches(
    dtype: torch.dtype, shape: dict[str, int], options: dict[str, float]
) -> None:
    scattered(**shape).check(decode, dtype, **options)


@interpreted
@pytest.mark.parametrize(("dtype", "shape", "options"), SHAPES)
def test_interpreter_prefills_over_stretches(
    dtype: torch.dtype, shape: dict[str, int], options: dict[str, float]
) -> None:
    case = scattered(**shape)
    new = {2: case.chunk_tokens, 0: case.chunk_tokens + 4, 4: 7, 1: 1}
    case.check_prefill(prefill, dtype, new, tile_queries=16, **options)


@interpreted
def test_interpreter_on_random_stretches() -> None:
    Case(seed=5, head_dim=16, group=2, chunks=32).fill(6).scatter().check(decode, torch.float16)


@compiled
@pytest.mark.parametrize(("head_dim", "lines"), [(128, 512), (80, 4), (256, 512), (256, 4), (256, 32)])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.timeout(300)
def test_compiled(capability: int, head_dim: int, lines: int) -> None:
    """For decoding, with few lines an item, and for prompts."""
    on = card(divmod(capability, 10), SHARED_BYTES[capability])
    sizes = kernel.block_sizes(head_dim=head_dim, lines=lines, card=on)
    options = {"num_warps": sizes.pop("num_warps"), "enable_fp_fusion": True}
    constants = {"heads": 8, "GROUP": 4, "HEAD_DIM": head_dim, "CAPPED": False, "UPCAST": False, "UNIT": 16}
    types = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr"), "*bf16")
    types |= dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32") | {"scale": "fp32", "soft_cap": "fp32"}
    binary = compile_aligned(kernel._attend, types, constants | sizes, options, capability)
    assert binary.metadata.shared <= on.shared_bytes
    assert stack_bytes(binary) == 0, "registers spill"
