"""The Triton kernel without a GPU: its programs interpreted on the CPU, and compiled for one that is not here.

Interpreting has to be asked for before Triton is imported, so those tests run in a process of their own. It knows no
bf16 products (the kernel converts to fp32 first); what bf16 really gives is checked by benchmarks/gpu_check.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from .conftest import NAN, Case
from .hopper import CAPABILITIES, compile_aligned, interpreted_passes, pipelined_waits, stack_bytes

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: its kernels can be neither run nor compiled"
)

from kvstore.kernels.decode import kernel  # noqa: E402
from kvstore.kernels.launch import HOPPER  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see below")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


@compiled
@pytest.mark.timeout(300)
def test_interpreted() -> None:
    assert interpreted_passes(__file__) == 13


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Any,
    *,
    out: torch.Tensor,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> None:
    """Intermediate results begin as NaN."""
    kernel.decode(
        *(q, keys, values, plan),
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
        out=out,
        partials=torch.full((plan.capacity.partials, *q.shape[1:]), NAN),
        stats=torch.full((plan.capacity.partials, q.shape[1], 2), NAN),
    )


def forked(**shape: int) -> Case:
    """Two roots, a fork, a ragged tail, a full one, an empty sequence, a sequence of one item, an unused row."""
    case = Case(rows=7, chunks=24, **shape)
    tokens = case.chunk_tokens
    case.add(0, more=3 * tokens + 5)
    case.add(2, like=0, shared=3, more=0)
    case.add(1, like=0, shared=2, more=tokens + 1)
    case.add(4, more=7)
    case.add(6)
    case.add(5, like=0, shared=1, more=tokens)
    return case


@interpreted
@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [
        (torch.float32, {"head_dim": 64, "kv_heads": 2}, {}),
        (torch.float16, {"head_dim": 128, "chunk_tokens": 64, "split_chunks": 1}, {"scale": 0.3}),
        (torch.float16, {"head_dim": 80, "group": 4, "tile_sequences": 8}, {"soft_cap": 5.0}),
        (torch.bfloat16, {"head_dim": 96, "group": 8, "tile_sequences": 2, "split_chunks": 3}, {}),
        (torch.float16, {"head_dim": 256, "group": 3, "tile_sequences": 16, "chunk_tokens": 32}, {}),
        (
            torch.float32,
            {"head_dim": 16, "group": 2, "chunk_tokens": 128, "split_chunks": 1},
            {"soft_cap": 0.5},
        ),
        (torch.float16, {"head_dim": 64, "chunk_tokens": 256, "split_chunks": 1, "tile_sequences": 1}, {}),
    ],
)
def test_interpreter_gives_the_exact_result_but_for_rounding(
    dtype: torch.dtype, shape: dict[str, int], options: dict[str, float]
) -> None:
    forked(**shape).check(attend, dtype, **options)


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_interpreter_on_random_forests(seed: int) -> None:
    Case(seed=seed, head_dim=64, group=2, chunks=32).fill(6).check(attend, torch.float16)


@interpreted
def test_interpreter_on_huge_logits() -> None:
    forked(head_dim=64).check(attend, torch.float32, size=1e4)


@interpreted
def test_interpreter_moved_chunks_and_repeated_runs_change_no_bit() -> None:
    case = forked(head_dim=64, group=2)
    q, keys, values = case.tensors(torch.float16)
    out, again, moved = (torch.empty_like(q) for _ in range(3))
    attend(q, keys, values, case.forest().plan(), out=out)
    attend(q, keys, values, case.forest().plan(), out=again)
    case.sequences = {
        row: ([case.chunks - 1 - chunk for chunk in chunks], tokens)
        for row, (chunks, tokens) in case.sequences.items()
    }
    attend(q, keys.flip(0), values.flip(0), case.forest().plan(), out=moved)
    assert torch.equal(out, again) and torch.equal(out, moved)


@interpreted
def test_interpreter_with_a_plan_that_grows_in_place() -> None:
    case = forked(head_dim=16)
    forest = case.forest()
    plan = forest.plan()
    for _ in range(12):
        new = {row: case.unused.pop() for row, (_, tokens) in case.sequences.items() if tokens % 16 == 0}
        forest.step(new)
        for row, (chunks, tokens) in case.sequences.items():
            case.sequences[row] = ([*chunks, *([new[row]] if row in new else ())], tokens + 1)
    assert forest.plan() is plan
    case.check(lambda q, keys, values, _, **options: attend(q, keys, values, plan, **options), torch.float32)


@compiled
@pytest.mark.parametrize(
    ("dtype", "shape", "capped"),
    [
        ("fp16", {"head_dim": 128, "tile_sequences": 16}, False),
        ("bf16", {"head_dim": 128, "tile_sequences": 32}, True),
        ("bf16", {"head_dim": 128, "tile_sequences": 16, "group": 4}, False),
        (
            "fp16",
            {"head_dim": 80, "tile_sequences": 16, "group": 8, "chunk_tokens": 16, "split_chunks": 32},
            True,
        ),
        ("bf16", {"head_dim": 256, "tile_sequences": 64, "chunk_tokens": 256}, False),
    ],
)
@pytest.mark.timeout(300)
def test_compiled_for_hopper(dtype: str, shape: dict[str, int], capped: bool) -> None:
    """Nothing spills, tiles are fetched while others are computed, and large tiles use Hopper's own instructions."""
    case = Case(**{"chunk_tokens": 64, "split_chunks": 8} | shape)
    sizes = kernel.block_sizes(
        head_dim=case.head_dim, group=case.group, plan=case.forest().plan(), element_bytes=2, card=HOPPER
    )
    binary = compile_for_hopper(dtype, sizes, capped=capped)
    code = binary.asm["ptx"]
    assert pipelined_waits(binary)[0] == 2, "each tile is waited for before the next one is asked for"
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", code), "loads are not 16 bytes wide"
    assert ("wgmma.mma_async" in code) == (sizes["BLOCK_M"] >= 64)
    assert ("mma.sync" in code) == (sizes["BLOCK_M"] < 64)
    assert binary.metadata.shared <= HOPPER.shared_bytes
    assert stack_bytes(binary) == 0, "registers spill"


@compiled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("stretches", [False, True])
def test_merge_compiled(capability: int, stretches: bool) -> None:
    constants = {"heads": 32, "HEAD_DIM": 80, "BLOCK_D": 128, "STRETCHES": stretches, "UNIT": 16}
    types = dict.fromkeys(("partial_ptr", "stats_ptr", "more_ptr", "more_stats_ptr"), "*fp32")
    types["out_ptr"] = "*bf16"
    binary = compile_aligned(
        kernel._merge, types, constants, {"num_warps": 1, "enable_fp_fusion": True}, capability
    )
    assert stack_bytes(binary) == 0, "registers spill"


def compile_for_hopper(dtype: str, sizes: dict[str, int], *, capped: bool, stretches: bool = False) -> Any:
    constants = sizes | {
        "heads": 8 * sizes["GROUP"],
        "CAPPED": capped,
        "UPCAST": False,
        "STRETCHES": stretches,
        "UNIT": 16,
    }
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    types = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), f"*{dtype}")
    types |= {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32", "soft_cap": "fp32"}
    return compile_aligned(kernel._attend, types, constants, options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"chunk_tokens": 24}, "chunk_tokens is 24: the kernel knows"),
        ({"head_dim": 257}, "head_dim is 257: must be at most 256"),
        ({"tile_sequences": 33, "group": 4}, "make the forest with tile_sequences of at most 32"),
        ({"tile_sequences": 65, "head_dim": 256}, "do not fit in a tile of 64 rows"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(shape: dict[str, int], message: str) -> None:
    case = Case(**shape)
    with pytest.raises(ValueError, match=message):
        kernel.block_sizes(
            head_dim=case.head_dim, group=case.group, plan=case.forest().plan(), element_bytes=2, card=HOPPER
        )


def test_measured_tile_shapes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(chunk_tokens=64, tile_sequences=16, head_dim=128)
    monkeypatch.setattr(kernel.tiles, "DECODE", {(16, 128, 64): kernel.tiles.Tile(32, 2, 5)})
    sizes = kernel.block_sizes(head_dim=128, group=1, plan=case.forest().plan(), element_bytes=2, card=HOPPER)
    assert (sizes["BLOCK_N"], sizes["num_warps"], sizes["STAGES"]) == (32, 2, 5)
    sizes = kernel.block_sizes(head_dim=128, group=2, plan=case.forest().plan(), element_bytes=2, card=HOPPER)
    assert (sizes["BLOCK_N"], sizes["num_warps"], sizes["STAGES"]) == (64, 4, 3)
