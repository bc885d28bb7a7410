"""Decode attention on a GPU, in Triton: one launch for the items of both phases, one that merges their results.

A program does one item for one KV head. Its rows are the queries of the item's sequences times the heads of the group,
so that a chunk is read once for all of them. The numbers of the item's chunks are loaded together before the loop: a
look-up inside it makes Triton wait for each tile before it asks for the next (cp.async.wait_group 0). A sequence that
has a single partial result gets its output at once; others are merged in fp32 in the order of their tokens, so the same
plan gives the same bits. Unused items end at once: the grid has the plan's capacity and fits every later state of it
that needs no more. Items and KV heads are flattened on x, since a grid's y ends at 65,535.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvstore.kernels import tiles
from kvstore.kernels.forest import Plan
from kvstore.kernels.launch import Card, card_of, unit_of
from kvstore.kernels.stretches import kernel as stretches

ROWS = (16, 32, 64, 128)
"""Of a tile: at least what `tile_sequences` sequences need. From 64 on, Hopper multiplies with wgmma."""
CHUNK_TOKENS = (16, 32, 64, 128, 256)
HEAD_DIM_MAX = 256
TILE_BYTES = 32 << 10
"""Keys and values of one step of the loop; with 3 stages, two programs and more fit on one processor of an H100."""
STAGES = 3
LOG2_E = math.log2(math.e)
STRIDES = ("q_row", "q_head", "k_chunk", "k_head", "v_chunk", "v_head", "out_row", "out_head")
"""In units of UNIT elements."""


@triton.jit(do_not_specialize=[*STRIDES, "scale", "soft_cap"])
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,  # fp32 [slots, heads, head_dim]
    stats_ptr,  # fp32 [slots, heads, 2]: maximum (log2), sum
    items_ptr,
    item_chunks_ptr,
    schedule_ptr,
    order_ptr,
    rows_ptr,
    elsewhere_ptr,  # int32 [queries, 2]: how many partial results each has over stretches, and where
    q_row,
    q_head,
    k_chunk,
    k_head,
    v_chunk,
    v_head,
    out_row,
    out_head,
    scale,  # to base 2; of what is capped, relative to the cap
    soft_cap,  # to base 2
    heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    ITEM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    STRETCHES: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):
    kv_head = (tl.program_id(0) % (heads // GROUP)).to(tl.int64)  # times a stride may pass 2^31
    item = tl.load(schedule_ptr + tl.program_id(0) // (heads // GROUP))
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    k_chunk, k_head, v_chunk, v_head = k_chunk * UNIT, k_head * UNIT, v_chunk * UNIT, v_head * UNIT
    begin = tl.load(items_ptr + item * 5)
    count = tl.load(items_ptr + item * 5 + 1)
    first = tl.load(items_ptr + item * 5 + 2)
    most = tl.load(items_ptr + item * 5 + 3)
    partial = tl.load(items_ptr + item * 5 + 4)
    if count > 0:
        # Rows of the tile: sequence by sequence, in each the heads of the group
        m = tl.arange(0, BLOCK_M)
        used = m < count * GROUP
        row = tl.load(order_ptr + begin + m // GROUP, mask=used, other=0).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        results = tl.load(rows_ptr + row * 3 + 1, mask=used, other=0)
        slot = tl.load(rows_ptr + row * 3 + 2, mask=used, other=0).to(tl.int64) + partial
        tokens = tl.minimum(most, tl.load(rows_ptr + tl.load(order_ptr + begin) * 3) - first)

        d = tl.arange(0, BLOCK_D)
        in_head = d < HEAD_DIM
        q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=used[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)

        c = tl.arange(0, BLOCK_C)
        chunks = tl.load(item_chunks_ptr + item * ITEM_CHUNKS + c, mask=c < ITEM_CHUNKS, other=0)
        n = tl.arange(0, BLOCK_N)
        k_base = keys_ptr + kv_head * k_head
        v_base = values_ptr + kv_head * v_head
        in_tile = (n % CHUNK)[:, None] * HEAD_DIM + d[None, :]

        maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in tl.range(0, tokens, BLOCK_N, num_stages=STAGES):
            valid = start + n < tokens
            inside = valid[:, None] & in_head[None, :]
            if BLOCK_N <= CHUNK:  # the tile lies in one chunk
                chunk = tl.sum(tl.where(c == start // CHUNK, chunks, 0), 0).to(tl.int64)
                k_at = k_base + chunk * k_chunk + start % CHUNK * HEAD_DIM + in_tile
                v_at = v_base + chunk * v_chunk + start % CHUNK * HEAD_DIM + in_tile
            else:
                here = c[None, :] == ((start + n) // CHUNK)[:, None]
                chunk = tl.sum(tl.where(here, chunks[None, :], 0), 1).to(tl.int64)
                k_at = k_base + (chunk * k_chunk)[:, None] + in_tile
                v_at = v_base + (chunk * v_chunk)[:, None] + in_tile
            # What is not loaded is zero: a slot that nobody wrote may hold NaN
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
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

        alone = used & (results == 1)
        several = used & (results > 1)
        if STRETCHES:
            elsewhere = tl.load(elsewhere_ptr + row * 2, mask=used, other=0)
            alone &= elsewhere == 0
            several |= used & (elsewhere > 0)
        out_at = out_ptr + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_at, result, mask=alone[:, None] & in_head[None, :])

        at = slot * heads + head
        partial_at = partial_ptr + at[:, None] * HEAD_DIM + d[None, :]
        tl.store(partial_at, acc, mask=several[:, None] & in_head[None, :])
        tl.store(stats_ptr + at * 2, maximum, mask=several)
        tl.store(stats_ptr + at * 2 + 1, total, mask=several)


@triton.jit(do_not_specialize=["out_row", "out_head"])
def _merge(
    out_ptr,
    partial_ptr,
    stats_ptr,
    rows_ptr,
    more_ptr,  # those over stretches
    more_stats_ptr,
    elsewhere_ptr,
    out_row,
    out_head,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRETCHES: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    out_row, out_head = out_row * UNIT, out_head * UNIT
    results = tl.load(rows_ptr + row * 3 + 1)
    more = 0
    if STRETCHES:
        more = tl.load(elsewhere_ptr + row * 2)
    if (results != 1) | (more > 0):
        slot = tl.load(rows_ptr + row * 3 + 2).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        in_head = d < HEAD_DIM
        maximum = -float("inf")
        total = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        if STRETCHES:
            first = tl.load(elsewhere_ptr + row * 2 + 1).to(tl.int64)
            for number in range(0, more):
                at = (first + number) * heads + head
                other = tl.load(more_stats_ptr + at * 2)
                larger = tl.maximum(maximum, other)
                fade = tl.exp2(maximum - larger)
                weight = tl.exp2(other - larger)
                total = total * fade + weight * tl.load(more_stats_ptr + at * 2 + 1)
                acc = acc * fade + weight * tl.load(more_ptr + at * HEAD_DIM + d, mask=in_head, other=0.0)
                maximum = larger
        for number in range(0, results):
            at = (slot + number) * heads + head
            other = tl.load(stats_ptr + at * 2)
            larger = tl.maximum(maximum, other)
            fade = tl.exp2(maximum - larger)
            weight = tl.exp2(other - larger)
            total = total * fade + weight * tl.load(stats_ptr + at * 2 + 1)
            acc = acc * fade + weight * tl.load(partial_ptr + at * HEAD_DIM + d, mask=in_head, other=0.0)
            maximum = larger
        if results == 0:
            total = 1.0  # no token: zeros
        out_at = out_ptr + row.to(tl.int64) * out_row + head * out_head + d
        tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=in_head)


def block_sizes(*, head_dim: int, group: int, plan: Plan, element_bytes: int, card: Card) -> dict[str, int]:
    """The constants of `_attend` that follow from shapes, and how many warps. ValueError for what it cannot do."""
    if plan.chunk_tokens not in CHUNK_TOKENS:
        raise ValueError(f"chunk_tokens is {plan.chunk_tokens}: the kernel knows {CHUNK_TOKENS}")
    if head_dim > HEAD_DIM_MAX:
        raise ValueError(f"head_dim is {head_dim}: must be at most {HEAD_DIM_MAX}")
    block_d = max(16, triton.next_power_of_2(head_dim))
    allowed = [rows for rows in ROWS if rows * block_d <= card.accumulator_max]
    rows = next((rows for rows in allowed if rows >= plan.tile_sequences * group), None)
    if rows is None:
        raise ValueError(
            f"{plan.tile_sequences} sequences of {group} heads do not fit in a tile of {allowed[-1]} rows: "
            f"make the forest with tile_sequences of at most {allowed[-1] // group}"
        )
    item_chunks = plan.split_tokens // plan.chunk_tokens
    tile = tiles.DECODE.get(tiles.Key(rows, block_d, plan.chunk_tokens)) or tiles.Tile(
        max(16, min(64, TILE_BYTES // (2 * block_d * element_bytes))),
        warps_for(rows, block_d) if rows >= 64 else 4,  # 8 spill on sm_100 with 32 rows of 256
        STAGES,
    )
    tile = fitting(tile, rows=rows, block_d=block_d, element_bytes=element_bytes, card=card)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "CHUNK": plan.chunk_tokens,
        "ITEM_CHUNKS": item_chunks,
        "BLOCK_C": triton.next_power_of_2(item_chunks),
        "BLOCK_M": rows,
        "BLOCK_N": tile.tokens,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def shared_bytes_needed(tile: tiles.Tile, *, rows: int, block_d: int, element_bytes: int, card: Card) -> int:
    """At most: what compiled kernels have is held against it by the tests. Keys and values, the queries, the weights as
    the second product reads them, and some for reductions."""
    in_place = card.reads_in_place and rows >= 64
    loaded = (tile.stages - (not in_place)) * 2 * tile.tokens * block_d * element_bytes
    queries = (
        (1 + in_place) * rows * block_d * element_bytes
    )  # and as much again for results, where rows are many
    return loaded + queries + rows * tile.tokens * element_bytes + (2 << 10)


def fitting(tile: tiles.Tile, *, rows: int, block_d: int, element_bytes: int, card: Card) -> tiles.Tile:
    """The tile itself, or one with fewer tokens or stages where a card has less shared memory: at first fewer tokens,
    since without 3 stages nothing is fetched while another tile is computed."""
    for tokens, stages in ((1, 0), (2, 0), (1, 1), (4, 0), (2, 1), (4, 1), (8, 0), (8, 1)):
        smaller = tile._replace(tokens=max(16, tile.tokens // tokens), stages=max(2, tile.stages - stages))
        needed = shared_bytes_needed(
            smaller, rows=rows, block_d=block_d, element_bytes=element_bytes, card=card
        )
        if needed <= card.shared_bytes:
            return smaller
    raise ValueError(
        f"a tile of {rows} rows of {block_d} does not fit in {card.shared_bytes} bytes of shared memory"
    )


def warps_for(rows: int, block_d: int) -> int:
    """Enough threads to keep the accumulator in registers."""
    return 8 if rows * block_d >= 64 * 128 else 4


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
    turned: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
) -> None:
    """See `decode_attention`, which checked the arguments. `partials`, `stats`: memory for intermediate results."""
    heads, kv_heads, head_dim = q.shape[1], keys.shape[1], q.shape[2]
    sizes = block_sizes(
        head_dim=head_dim,
        group=heads // kv_heads,
        plan=plan,
        element_bytes=q.element_size(),
        card=card_of(q.device),
    )
    if partials is None or stats is None:
        partials, stats = plan.scratch.of(plan.capacity.partials, heads, head_dim, q.device)
    scale = scale * LOG2_E if soft_cap is None else scale / soft_cap
    soft_cap = None if soft_cap is None else soft_cap * LOG2_E
    elsewhere = None
    if plan.stretches is not None and turned is not None:
        elsewhere = stretches.attend(turned, keys, values, plan.stretches, scale=scale, soft_cap=soft_cap)
    strides = [stride for tensor in (q, keys, values, out) for stride in tensor.stride()[:2]]
    unit = unit_of(*strides)
    strides = [stride // unit for stride in strides]
    with torch.cuda.device_of(q):  # does nothing where tensors of a CPU are interpreted
        _attend[(plan.capacity.items * kv_heads,)](
            *(q, keys, values, out, partials, stats, *plan.arrays()),
            plan.rows if elsewhere is None else elsewhere.results,
            *strides,
            scale,
            0.0 if soft_cap is None else soft_cap,
            heads,
            **sizes,
            CAPPED=soft_cap is not None,
            UPCAST=q.dtype is torch.bfloat16
            and triton.knobs.runtime.interpret,  # which knows no bf16 products
            STRETCHES=elsewhere is not None,
            UNIT=unit,
            enable_fp_fusion=True,  # in every release
        )
        _merge[q.shape[0], heads](
            *(out, partials, stats, plan.rows, *(elsewhere or (partials, stats, plan.rows))),
            *strides[-2:],
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=sizes["BLOCK_D"],
            STRETCHES=elsewhere is not None,
            UNIT=unit,
            num_warps=1,
            enable_fp_fusion=True,
        )
