"""The Triton kernel of prefill without a GPU: interpreted on the CPU, and compiled for one that is not here.

As in test_triton.py, which says why in a process of its own.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from .conftest import NAN, Case
from .hopper import compile_aligned, interpreted_passes, pipelined_waits, stack_bytes

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: its kernels can be neither run nor compiled"
)

from kvstore.kernels.launch import HOPPER  # noqa: E402
from kvstore.kernels.prefill import kernel  # noqa: E402

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
    kernel.prefill(
        *(q, keys, values, plan),
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
        out=out,
        partials=torch.full((plan.partials, *q.shape[1:]), NAN),
        stats=torch.full((plan.partials, q.shape[1], 2), NAN),
    )


def forked(**shape: int) -> tuple[Case, dict[int, int]]:
    """Three rows that share cached chunks, one whose new tokens are in one, one without anything cached, one that
    decodes; tails of any length."""
    case = Case(rows=7, chunks=24, **shape)
    tokens = case.chunk_tokens
    case.add(0, more=3 * tokens + 5)
    case.add(1, like=0, shared=2, more=tokens + 1)
    case.add(2, like=0, shared=3, more=7)
    case.add(4, more=tokens + 9)
    case.add(5, like=0, shared=1, more=tokens)
    return case, {4: tokens + 9, 0: 5, 2: 1, 5: tokens + 3, 1: 9}


@interpreted
@pytest.mark.parametrize(
    ("dtype", "shape", "work", "options"),
    [
        (torch.float32, {"head_dim": 64, "kv_heads": 2}, {"tile_queries": 16}, {}),
        (torch.float16, {"head_dim": 128, "chunk_tokens": 64}, {"split_tokens": 64}, {"scale": 0.3}),
        (torch.float16, {"head_dim": 80, "group": 4}, {"tile_queries": 32}, {"soft_cap": 5.0}),
        (torch.bfloat16, {"head_dim": 96, "group": 7}, {"tile_queries": 20, "split_tokens": 32}, {}),
        (torch.float16, {"head_dim": 256, "group": 2, "chunk_tokens": 32}, {"tile_queries": 64}, {}),
        (torch.float32, {"head_dim": 16, "group": 2, "chunk_tokens": 128}, {}, {"soft_cap": 0.5}),
        (torch.float16, {"head_dim": 64, "chunk_tokens": 256}, {"tile_queries": 128}, {}),
    ],
)
def test_interpreter_gives_the_exact_result_but_for_rounding(
    dtype: torch.dtype, shape: dict[str, int], work: dict[str, int], options: dict[str, float]
) -> None:
    case, new = forked(**shape)
    case.check_prefill(attend, dtype, new, **work, **options)


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_interpreter_on_random_forests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TABLE_CHUNKS", 4)  # so that several parts are needed
    case = Case(seed=seed, head_dim=64, group=2, chunks=32).fill(6)
    case.check_prefill(attend, torch.float16, case.scattered(), tile_queries=24)


@interpreted
def test_interpreter_where_heads_lie_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case, new = forked(head_dim=64, group=2)
    asked: list[torch.Size] = []

    def too_far_at_first(tensor: torch.Tensor) -> bool:
        asked.append(tensor.shape)
        return len(asked) % 3 == 2  # the result at first; then, with one of its own, the queries

    monkeypatch.setattr(kernel, "_heads_within_int32", too_far_at_first)
    case.check_prefill(attend, torch.float16, new)
    assert len(asked) % 3 == 0


@compiled
def test_which_heads_lie_too_far_apart() -> None:
    q = torch.empty((32, 140_000, 128), dtype=torch.float16, device="meta").transpose(0, 1)
    assert kernel._heads_within_int32(q[:, :16])
    assert kernel._heads_within_int32(q.contiguous()), "token by token they are near each other"
    far = torch.empty((128, 140_000, 128), dtype=torch.float16, device="meta").transpose(0, 1)
    assert not kernel._heads_within_int32(far)


@interpreted
def test_interpreter_on_huge_logits() -> None:
    case, new = forked(head_dim=64)
    case.check_prefill(attend, torch.float32, new, size=1e4)


@interpreted
def test_interpreter_moved_chunks_and_repeated_runs_change_no_bit() -> None:
    case, new = forked(head_dim=64, group=2)
    q, (_, keys, values) = case.queries(new, torch.float16), case.tensors(torch.float16)
    out, again, moved = (torch.empty_like(q) for _ in range(3))
    attend(q, keys, values, case.forest().prefill(new), out=out)
    attend(q, keys, values, case.forest().prefill(new), out=again)
    case.sequences = {
        row: ([case.chunks - 1 - chunk for chunk in chunks], tokens)
        for row, (chunks, tokens) in case.sequences.items()
    }
    attend(q, keys.flip(0), values.flip(0), case.forest().prefill(new), out=moved)
    assert torch.equal(out, again) and torch.equal(out, moved)


@compiled
@pytest.mark.parametrize(
    ("dtype", "shape", "tile_queries", "capped"),
    [
        ("fp16", {"head_dim": 128}, 128, False),
        ("bf16", {"head_dim": 128, "group": 4}, 128, True),
        ("fp16", {"head_dim": 64, "chunk_tokens": 16}, 128, False),
        ("bf16", {"head_dim": 80, "group": 8, "chunk_tokens": 32}, 16, False),
        ("bf16", {"head_dim": 128, "chunk_tokens": 16}, 128, True),
        ("fp16", {"head_dim": 128}, 8, False),
        ("bf16", {"head_dim": 256, "chunk_tokens": 256}, 128, False),
    ],
)
@pytest.mark.timeout(300)
def test_compiled_for_hopper(
    dtype: str,
    shape: dict[str, int],
    tile_queries: int,
    capped: bool,
) -> None:
    """Nothing spills, tiles are fetched while others are computed, and large tiles use Hopper's own instructions."""
    case = Case(**{"chunk_tokens": 64} | shape)
    case.add(0, more=400)
    plan = case.forest().prefill({0: tile_queries}, tile_queries=tile_queries)
    sizes = kernel.block_sizes(
        head_dim=case.head_dim, group=case.group, plan=plan, element_bytes=2, card=HOPPER
    )
    constants = sizes | {"heads": 8 * case.group, "CAPPED": capped, "UPCAST": False, "UNIT": 16}
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    types = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), f"*{dtype}")
    types |= {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32", "soft_cap": "fp32"}
    binary = compile_aligned(kernel._attend, types, constants, options)
    code = binary.asm["ptx"]
    assert max(pipelined_waits(binary)) >= 2, "each tile is waited for before the next one is asked for"
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", code), "loads are not 16 bytes wide"
    assert ("wgmma.mma_async" in code) == (sizes["BLOCK_M"] >= 64)
    assert binary.metadata.shared <= HOPPER.shared_bytes
    assert stack_bytes(binary) == 0, "registers spill"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"chunk_tokens": 24}, "chunk_tokens is 24: the kernel knows"),
        ({"head_dim": 257}, "head_dim is 257: must be at most 256"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(shape: dict[str, int], message: str) -> None:
    case = Case(**shape)
    case.add(0, more=20)
    with pytest.raises(ValueError, match=message):
        kernel.block_sizes(
            head_dim=case.head_dim,
            group=1,
            plan=case.forest().prefill({0: 3}),
            element_bytes=2,
            card=HOPPER,
        )


def test_measured_tile_shapes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(chunk_tokens=64, head_dim=128)
    case.add(0, more=400)
    monkeypatch.setattr(kernel.tiles, "PREFILL", {(128, 128, 64): kernel.tiles.Tile(128, 4, 2)})
    plan = case.forest().prefill({0: 400}, tile_queries=128)
    sizes = kernel.block_sizes(head_dim=128, group=1, plan=plan, element_bytes=2, card=HOPPER)
    assert (sizes["BLOCK_N"], sizes["num_warps"], sizes["STAGES"]) == (128, 4, 2)
    sizes = kernel.block_sizes(head_dim=64, group=1, plan=plan, element_bytes=2, card=HOPPER)
    assert (sizes["BLOCK_N"], sizes["num_warps"], sizes["STAGES"]) == (64, 8, 3)
