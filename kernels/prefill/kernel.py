"""Prefill attention on a GPU, in Triton: one launch for all items, one that merges the results of cut or joint ones.

A program does a tile of an item for one KV head. Its rows are queries times the heads of the group, flattened, so that
a tile is full whatever the size of the group. Tokens that all rows of the tile see come first, without a mask; then the
diagonal. The numbers of the chunks are loaded many at a time, as a vector, before the loop over them: a look-up inside
makes Triton wait for each tile before it asks for the next (cp.async.wait_group 0). A query that has a single partial
result gets its output at once; others are merged in fp32 in the order of their tokens, so the same plan gives the same
bits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstore.kernels import tiles
from kvstore.kernels.decode.kernel import (
    CHUNK_TOKENS,
    HEAD_DIM_MAX,
    LOG2_E,
    ROWS,
    STAGES,
    STRIDES,
    TILE_BYTES,
    _merge,
    fitting,
    warps_for,
)
from kvstore.kernels.launch import Card, card_of, unit_of
from kvstore.kernels.prefill.plan import PrefillPlan
from kvstore.kernels.stretches import kernel as stretches

TABLE_CHUNKS = 64
"""Chunk numbers that are loaded at a time, at most."""


@triton.jit
def _step(
    q,
    acc,
    maximum,
    total,
    chunks,  # the numbers of the chunks of this part
    start,  # of the tile, in the part
    tokens,  # of the part
    limits,  # of each row, in the part
    k_base,
    v_base,
    k_chunk,
    v_chunk,
    scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """BLOCK_N tokens for all rows. Not MASKED: all rows see all of them."""
    c = tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_tile = (n % CHUNK)[:, None] * HEAD_DIM + d[None, :]
    if BLOCK_N <= CHUNK:  # the tile lies in one chunk
        chunk = tl.sum(tl.where(c == start // CHUNK, chunks, 0), 0).to(tl.int64)
        k_at = k_base + chunk * k_chunk + start % CHUNK * HEAD_DIM + in_tile
        v_at = v_base + chunk * v_chunk + start % CHUNK * HEAD_DIM + in_tile
    else:
        here = c[None, :] == ((start + n) // CHUNK)[:, None]
        chunk = tl.sum(tl.where(here, chunks[None, :], 0), 1).to(tl.int64)
        k_at = k_base + (chunk * k_chunk)[:, None] + in_tile
        v_at = v_base + (chunk * v_chunk)[:, None] + in_tile
    inside = (d < HEAD_DIM)[None, :] & (n >= 0)[:, None]
    if MASKED:  # what is not loaded is zero: a slot that nobody wrote may hold NaN
        inside &= (start + n < tokens)[:, None]
    if MASKED or BLOCK_D != HEAD_DIM:
        k = tl.load(k_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1), which overflows to the right values
        logits = soft_cap * (1 - 2 / (tl.exp(2 * logits) + 1))
    if MASKED:
        logits = tl.where((start + n)[None, :] < limits[:, None], logits, -float("inf"))
    larger = tl.maximum(maximum, tl.max(logits, 1))  # finite: all rows see the item's first token
    weights = tl.exp2(logits - larger[:, None])
    fade = tl.exp2(maximum - larger)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, larger, total


@triton.jit(do_not_specialize=["table_row", *STRIDES, "scale", "soft_cap"])
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,  # fp32 [slots, heads, head_dim]
    stats_ptr,  # fp32 [slots, heads, 2]: maximum (log2), sum
    items_ptr,
    tables_ptr,
    order_ptr,
    queries_ptr,
    elsewhere_ptr,  # int32 [queries, 2]: how many partial results each has over stretches, and where
    table_row,
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
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    STRETCHES: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    k_chunk, k_head, v_chunk, v_head = k_chunk * UNIT, k_head * UNIT, v_chunk * UNIT, v_head * UNIT
    kv_head = tl.program_id(0) % (heads // GROUP)
    item = (tl.program_id(0) // (heads // GROUP)).to(tl.int64)
    begin = tl.load(items_ptr + item * 6)
    count = tl.load(items_ptr + item * 6 + 1)
    first = tl.load(items_ptr + item * 6 + 2)
    most = tl.load(items_ptr + item * 6 + 3)
    partial = tl.load(items_ptr + item * 6 + 4)
    table = tl.load(items_ptr + item * 6 + 5).to(tl.int64)
    tile = tl.program_id(1) * BLOCK_M
    if tile < count * GROUP:
        # Rows of the tile: query by query, in each the heads of the group
        m = tile + tl.arange(0, BLOCK_M)
        used = m < count * GROUP
        head = kv_head * GROUP + m % GROUP
        row = tl.load(order_ptr + begin + m // GROUP, mask=used, other=0).to(tl.int64)
        results = tl.load(queries_ptr + row * 3 + 1, mask=used, other=0)
        slot = tl.load(queries_ptr + row * 3 + 2, mask=used, other=0).to(tl.int64) + partial
        # What each row sees of the item. All of its first token; the last row of a tile, whatever another one sees
        limits = tl.minimum(tl.load(queries_ptr + row * 3, mask=used, other=2147483647) - first, most)
        seen_by_all = tl.min(limits, 0)
        last = tl.minimum(tile + BLOCK_M, count * GROUP) - 1
        last_row = tl.load(order_ptr + begin + last // GROUP).to(tl.int64)
        tokens = tl.minimum(tl.load(queries_ptr + last_row * 3) - first, most)

        d = tl.arange(0, BLOCK_D)
        in_head = d < HEAD_DIM
        q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=used[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        k_base = keys_ptr + kv_head.to(tl.int64) * k_head
        v_base = values_ptr + kv_head.to(tl.int64) * v_head
        table_at = tables_ptr + table * table_row + first // CHUNK
        c = tl.arange(0, BLOCK_C)

        maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in range(0, tokens, BLOCK_C * CHUNK):
            size = tl.minimum(tokens - part, BLOCK_C * CHUNK)
            numbers = part // CHUNK + c
            chunks = tl.load(table_at + numbers, mask=numbers * CHUNK < tokens, other=0)
            # Whole tiles that every row sees. What both loops compute in each turn, they would keep in registers that
            # are needed, if it were moved out of them (LICM)
            plain = tl.maximum(tl.minimum(seen_by_all - part, size), 0) // BLOCK_N * BLOCK_N
            for start in tl.range(0, plain, BLOCK_N, num_stages=STAGES, disable_licm=True):
                acc, maximum, total = _step(
                    *(q, acc, maximum, total, chunks, start, size, limits - part),
                    *(k_base, v_base, k_chunk, v_chunk, scale, soft_cap),
                    *(HEAD_DIM, CHUNK, BLOCK_C, BLOCK_N, BLOCK_D, False, CAPPED, UPCAST),
                )
            for start in tl.range(plain, size, BLOCK_N, num_stages=1, disable_licm=True):
                acc, maximum, total = _step(
                    *(q, acc, maximum, total, chunks, start, size, limits - part),
                    *(k_base, v_base, k_chunk, v_chunk, scale, soft_cap),
                    *(HEAD_DIM, CHUNK, BLOCK_C, BLOCK_N, BLOCK_D, True, CAPPED, UPCAST),
                )

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


def block_sizes(
    *, head_dim: int, group: int, plan: PrefillPlan, element_bytes: int, card: Card
) -> dict[str, int]:
    """The constants of `_attend` that follow from shapes, and how many warps. ValueError for what it cannot do."""
    if plan.chunk_tokens not in CHUNK_TOKENS:
        raise ValueError(f"chunk_tokens is {plan.chunk_tokens}: the kernel knows {CHUNK_TOKENS}")
    if head_dim > HEAD_DIM_MAX:
        raise ValueError(f"head_dim is {head_dim}: must be at most {HEAD_DIM_MAX}")
    block_d = max(16, triton.next_power_of_2(head_dim))
    most = min(ROWS[-1], card.accumulator_max // block_d)
    rows = next(rows for rows in ROWS if rows >= min(most, plan.tile_queries * group))
    tile = tiles.PREFILL.get(tiles.Key(rows, block_d, plan.chunk_tokens)) or tiles.Tile(
        max(16, min(64, 2 * plan.chunk_tokens, TILE_BYTES // (2 * block_d * element_bytes))),
        warps_for(rows, block_d),
        STAGES,
    )
    tile = fitting(tile, rows=rows, block_d=block_d, element_bytes=element_bytes, card=card)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "CHUNK": plan.chunk_tokens,
        "BLOCK_C": TABLE_CHUNKS,
        "BLOCK_M": rows,
        "BLOCK_N": tile.tokens,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def _heads_within_int32(tensor: torch.Tensor) -> bool:
    """Whether the kernel, where the offset of a head is 32 bits (64 would spill registers), can address them all. What
    lies head by head, as queries from Hugging Face models do, passes that at some 130,000 tokens of 128 x 128."""
    return tensor.shape[1] * tensor.stride(1) < 1 << 31


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
    turned: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
) -> None:
    """See `prefill_attention`, which checked the arguments. `partials`, `stats`: memory for intermediate results."""
    if not _heads_within_int32(out):
        result = torch.empty_like(out, memory_format=torch.contiguous_format)
        prefill(
            *(q, keys, values, plan),
            scale=scale,
            soft_cap=soft_cap,
            out=result,
            turned=turned,
            partials=partials,
            stats=stats,
        )
        out.copy_(result)
        return
    if not _heads_within_int32(q):
        q = q.contiguous()
    (tokens, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    group = heads // kv_heads
    sizes = block_sizes(
        head_dim=head_dim,
        group=group,
        plan=plan,
        element_bytes=q.element_size(),
        card=card_of(q.device),
    )
    if partials is None or stats is None:
        partials, stats = plan.scratch.of(plan.partials, heads, head_dim, q.device)
    tiles = triton.cdiv(plan.tile_queries * group, sizes["BLOCK_M"])
    scale = scale * LOG2_E if soft_cap is None else scale / soft_cap
    soft_cap = None if soft_cap is None else soft_cap * LOG2_E
    elsewhere = None
    if plan.stretches is not None and turned is not None:
        elsewhere = stretches.attend(turned, keys, values, plan.stretches, scale=scale, soft_cap=soft_cap)
    strides = [stride for tensor in (q, keys, values, out) for stride in tensor.stride()[:2]]
    unit = unit_of(*strides)
    strides = [stride // unit for stride in strides]
    with torch.cuda.device_of(q):  # does nothing where tensors of a CPU are interpreted
        _attend[plan.items.shape[0] * kv_heads, tiles](
            *(q, keys, values, out, partials, stats, *plan.arrays()),
            *(plan.queries if elsewhere is None else elsewhere.results, plan.tables.stride(0)),
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
            enable_fp_fusion=True,
        )
        if plan.partials:
            _merge[tokens, heads](
                *(out, partials, stats, plan.queries, *(elsewhere or (partials, stats, plan.queries))),
                *(*strides[-2:], heads),
                HEAD_DIM=head_dim,
                BLOCK_D=sizes["BLOCK_D"],
                STRETCHES=elsewhere is not None,
                UNIT=unit,
                num_warps=1,
                enable_fp_fusion=True,
            )
