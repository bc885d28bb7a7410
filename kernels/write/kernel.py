"""Writing the KV of new tokens on a GPU, in Triton: a program copies K and V of one token and some heads, 16 bytes at a
time where strides and addresses allow. Elements are copied as integers of their size."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstore.kernels.launch import unit_of
from kvstore.kernels.pages.cpu import INTEGERS
from kvstore.kernels.write import Slots

TILE = 4 << 10
"""Elements of K, and as many of V, of one program at most."""
STRIDES = ("key_chunk", "key_head", "value_chunk", "value_head", "k_token", "k_head", "v_token", "v_head")
"""In units of UNIT elements."""


@triton.jit(do_not_specialize=["chunks_ptr", "places_ptr", *STRIDES])
def _write(
    keys_ptr,
    values_ptr,
    k_ptr,
    v_ptr,
    chunks_ptr,
    places_ptr,
    key_chunk,
    key_head,
    value_chunk,
    value_head,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.load(chunks_ptr + token)
    place = tl.load(places_ptr + token)
    if chunk >= 0:
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        d = tl.arange(0, BLOCK_D)
        inside = (h < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        head = h.to(tl.int64)[:, None]
        k = tl.load(k_ptr + token * (k_token * UNIT) + head * (k_head * UNIT) + d[None, :], mask=inside)
        v = tl.load(v_ptr + token * (v_token * UNIT) + head * (v_head * UNIT) + d[None, :], mask=inside)
        at = place * HEAD_DIM + d[None, :]
        tl.store(keys_ptr + chunk * (key_chunk * UNIT) + head * (key_head * UNIT) + at, k, mask=inside)
        tl.store(values_ptr + chunk * (value_chunk * UNIT) + head * (value_head * UNIT) + at, v, mask=inside)


def block_sizes(*, heads: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """The constants of `_write` that follow from shapes, and how many warps: each thread has 16 bytes to copy."""
    block_d = int(triton.next_power_of_2(head_dim))
    block_h = min(int(triton.next_power_of_2(heads)), max(1, TILE // block_d))
    warps = max(1, min(4, block_h * block_d * element_bytes // (16 * 32)))
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "num_warps": warps,
    }


def write(keys: torch.Tensor, values: torch.Tensor, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
    """See `write_kv`, which checked the arguments."""
    keys, values, k, v = (each.view(INTEGERS[each.element_size()]) for each in (keys, values, k, v))
    k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (k, v))
    tokens, heads, head_dim = k.shape
    sizes = block_sizes(heads=heads, head_dim=head_dim, element_bytes=k.element_size())
    strides = [stride for tensor in (keys, values, k, v) for stride in tensor.stride()[:2]]
    unit = unit_of(*strides)
    with torch.cuda.device_of(keys):  # does nothing where tensors of a CPU are interpreted
        _write[tokens, triton.cdiv(heads, sizes["BLOCK_H"])](
            *(keys, values, k, v, slots.chunks, slots.places),
            *(stride // unit for stride in strides),
            **sizes,
            UNIT=unit,
            enable_fp_fusion=True,
        )
