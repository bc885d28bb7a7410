"""Attention over stretches on a GPU, in Triton: one launch, whose partial results decode and prefill merge.

A program does a tile of an item for one KV head: rows are the item's turned queries times the heads of the group, and
every row sees all of the item's tokens, so that nothing is masked but the end of a stretch. A chunk's number is read
inside of the loop over stretches, since these have any length; the next one's keys are not asked for meanwhile.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvstore.kernels.launch import Card, card_of, unit_of
from kvstore.kernels.stretches.plan import StretchPlan

HEAD_DIM_MAX = 256
ROWS = (16, 32, 64, 128)
BLOCK_TOKENS = 32
"""Half of that for heads of more than 128: of the others' registers, some would spill."""


class Partials(NamedTuple):
    """What the merging kernels read: fp32 [slots, heads, head_dim], fp32 [slots, heads, 2] (maximum to base 2, sum),
    and of each query how many there are and where the first lies, int32 [queries, 2]."""

    outputs: torch.Tensor
    stats: torch.Tensor
    results: torch.Tensor


@triton.jit(
    do_not_specialize=["q_row", "q_head", "k_chunk", "k_head", "v_chunk", "v_head", "scale", "soft_cap"]
)
def _attend(
    q_ptr,  # turned queries
    keys_ptr,
    values_ptr,
    partial_ptr,  # fp32 [slots, heads, head_dim]
    stats_ptr,  # fp32 [slots, heads, 2]: maximum (log2), sum
    items_ptr,
    lines_ptr,
    parts_ptr,
    q_row,  # strides: in units of UNIT elements
    q_head,
    k_chunk,
    k_head,
    v_chunk,
    v_head,
    scale,  # to base 2; of what is capped, relative to the cap
    soft_cap,  # to base 2
    heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
):
    q_row, q_head, k_chunk, k_head = q_row * UNIT, q_head * UNIT, k_chunk * UNIT, k_head * UNIT
    v_chunk, v_head = v_chunk * UNIT, v_head * UNIT
    kv_head = (tl.program_id(0) % (heads // GROUP)).to(tl.int64)
    item = (tl.program_id(0) // (heads // GROUP)).to(tl.int64)
    begin = tl.load(items_ptr + item * 4)
    count = tl.load(items_ptr + item * 4 + 1)
    part = tl.load(items_ptr + item * 4 + 2).to(tl.int64)
    parts = tl.load(items_ptr + item * 4 + 3)
    tile = tl.program_id(1) * BLOCK_M
    if tile < count * GROUP:
        m = tile + tl.arange(0, BLOCK_M)
        used = m < count * GROUP
        head = kv_head * GROUP + m % GROUP
        line = (begin + m // GROUP).to(tl.int64)
        turned = tl.load(lines_ptr + line * 3, mask=used, other=0).to(tl.int64)
        slot = tl.load(lines_ptr + line * 3 + 2, mask=used, other=0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, BLOCK_N)
        in_head = d < HEAD_DIM
        q_at = q_ptr + turned[:, None] * q_row + head[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=used[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        k_base = keys_ptr + kv_head * k_head
        v_base = values_ptr + kv_head * v_head
        maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for number in range(0, parts):
            chunk = tl.load(parts_ptr + (part + number) * 3).to(tl.int64)
            first = tl.load(parts_ptr + (part + number) * 3 + 1)
            tokens = tl.load(parts_ptr + (part + number) * 3 + 2)
            for start in range(0, tokens, BLOCK_N):
                valid = start + n < tokens
                inside = valid[:, None] & in_head[None, :]
                at = (first + start + n)[:, None] * HEAD_DIM + d[None, :]
                # What is not loaded is zero: beside a stretch there may be NaN
                k = tl.load(k_base + chunk * k_chunk + at, mask=inside, other=0.0)
                v = tl.load(v_base + chunk * v_chunk + at, mask=inside, other=0.0)
                if UPCAST:
                    k = k.to(tl.float32)
                    v = v.to(tl.float32)
                logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                if CAPPED:
                    # tanh(x) = 1 - 2 / (e^2x + 1), which overflows to the right values
                    logits = soft_cap * (1 - 2 / (tl.exp(2 * logits) + 1))
                logits = tl.where(valid[None, :], logits, -float("inf"))
                larger = tl.maximum(maximum, tl.max(logits, 1))  # finite: each tile has a token
                weights = tl.exp2(logits - larger[:, None])
                fade = tl.exp2(maximum - larger)
                total = total * fade + tl.sum(weights, 1)
                acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                maximum = larger
        at = slot * heads + head
        tl.store(
            partial_ptr + at[:, None] * HEAD_DIM + d[None, :], acc, mask=used[:, None] & in_head[None, :]
        )
        tl.store(stats_ptr + at * 2, maximum, mask=used)
        tl.store(stats_ptr + at * 2 + 1, total, mask=used)


def block_sizes(*, head_dim: int, lines: int, card: Card) -> dict[str, int]:
    """`lines`: queries times heads of a group that an item has at most."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    most = min(ROWS[-1], card.accumulator_max // block_d)
    rows = next(rows for rows in ROWS if rows >= min(most, lines))
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": rows,
        "BLOCK_N": BLOCK_TOKENS // 2 if block_d > 128 else BLOCK_TOKENS,
        "num_warps": 8 if rows * block_d >= 128 * 128 else 4,
    }


def attend(
    turned: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: StretchPlan,
    *,
    scale: float,
    soft_cap: float | None,
) -> Partials:
    """Of each query, over the stretches that it sees. `scale` and `soft_cap` are to base 2, as `_attend` takes them."""
    heads, kv_heads, head_dim = turned.shape[1], keys.shape[1], turned.shape[2]
    if head_dim > HEAD_DIM_MAX:
        raise ValueError(f"head_dim is {head_dim}: must be at most {HEAD_DIM_MAX}")
    group = heads // kv_heads
    sizes = block_sizes(head_dim=head_dim, lines=plan.tile_queries * group, card=card_of(turned.device))
    outputs, stats = plan.scratch.of(plan.partials, heads, head_dim, turned.device)
    strides = [stride for tensor in (turned, keys, values) for stride in tensor.stride()[:2]]
    unit = unit_of(*strides)
    tiles = triton.cdiv(plan.tile_queries * group, sizes["BLOCK_M"])
    with torch.cuda.device_of(turned):  # does nothing where tensors of a CPU are interpreted
        _attend[plan.items.shape[0] * kv_heads, tiles](
            *(turned, keys, values, outputs, stats, plan.items, plan.lines, plan.parts),
            *(stride // unit for stride in strides),
            *(scale, 0.0 if soft_cap is None else soft_cap, heads),
            GROUP=group,
            HEAD_DIM=head_dim,
            CAPPED=soft_cap is not None,
            UPCAST=turned.dtype is torch.bfloat16
            and triton.knobs.runtime.interpret,  # which knows no bf16 products
            UNIT=unit,
            enable_fp_fusion=True,
            **sizes,
        )
    return Partials(outputs, stats, plan.results)
