"""Attention kernels compiled for every card they are for: nothing spills, tiles are fetched while others are computed,
loads are 16 bytes wide, and shared memory is what the rule says at most."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from kvstore.kernels.launch import HOPPER, SHARED_BYTES_MIN, Card, card, rows_max

from .conftest import Case
from .hopper import SHARED_BYTES, compile_aligned, pipelined_waits, stack_bytes

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be compiled")

from kvstore.kernels import tiles  # noqa: E402
from kvstore.kernels.decode import kernel as decode  # noqa: E402
from kvstore.kernels.prefill import kernel as prefill  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process"
)
Shape = dict[str, int]


def card_of(capability: int) -> Card:
    major, minor = divmod(capability, 10)
    return card((major, minor), SHARED_BYTES[capability])


def check(capability: int, function: Any, sizes: Shape, dtype: str, *, capped: bool) -> None:
    tile = tiles.Tile(sizes["BLOCK_N"], sizes["num_warps"], sizes["STAGES"])
    most = decode.shared_bytes_needed(
        tile, rows=sizes["BLOCK_M"], block_d=sizes["BLOCK_D"], element_bytes=2, card=card_of(capability)
    )
    constants = sizes | {"heads": 8 * sizes["GROUP"], "CAPPED": capped, "UPCAST": False, "STRETCHES": False}
    constants |= {"UNIT": 16}
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    types = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), f"*{dtype}")
    types |= {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32", "soft_cap": "fp32"}
    binary = compile_aligned(function, types, constants, options, capability)
    code = binary.asm["ptx"]
    assert stack_bytes(binary) == 0, "registers spill"
    # Two at each stage, K and V: with 3 stages one tile is computed, one is awaited, one is under way
    assert max(pipelined_waits(binary)) == 2 * (sizes["STAGES"] - 2), (
        "the pipeline is not as deep as asked for"
    )
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", code), "loads are not 16 bytes wide"
    assert binary.metadata.shared <= most <= SHARED_BYTES[capability]
    own = {9: "wgmma.mma_async", 10: "tcgen05.mma"}.get(capability // 10)
    assert own is None or (own in code) == (sizes["BLOCK_M"] >= 64)


SHAPES: list[tuple[str, Shape, bool]] = [
    ("bf16", {"head_dim": 128, "group": 4}, False),
    ("fp16", {"head_dim": 128}, True),
    ("fp16", {"head_dim": 80, "group": 8, "chunk_tokens": 16}, True),
    ("bf16", {"head_dim": 256, "chunk_tokens": 256}, False),
    ("fp16", {"head_dim": 64, "group": 8, "chunk_tokens": 32}, False),
]
CASES = [
    pytest.param(capability, *shape, marks=() if number == 0 and capability != 90 else pytest.mark.slow)
    for capability in (80, 86, 89, 90, 100, 120)
    for number, shape in enumerate(SHAPES)
    if not (capability in (86, 120) and number == 0)
]


def test_registers_that_spill_are_seen() -> None:
    """A tile that needs 8 warps, given one."""
    case = Case(chunk_tokens=64, split_chunks=8, head_dim=128, tile_sequences=64)
    sizes = decode.block_sizes(
        head_dim=128, group=1, plan=case.forest().plan(), element_bytes=2, card=card_of(90)
    )
    with pytest.raises(AssertionError, match="registers spill"):
        check(90, decode._attend, sizes | {"num_warps": 1}, "fp16", capped=False)


@pytest.mark.parametrize(("capability", "dtype", "shape", "capped"), CASES)
@pytest.mark.timeout(300)
def test_decode_compiled(capability: int, dtype: str, shape: Shape, capped: bool) -> None:
    most = rows_max(shape["head_dim"], most=64, card=card_of(capability))
    case = Case(
        **{"chunk_tokens": 64, "split_chunks": 8} | shape, tile_sequences=most // shape.get("group", 1)
    )
    sizes = decode.block_sizes(
        head_dim=case.head_dim,
        group=case.group,
        plan=case.forest().plan(),
        element_bytes=2,
        card=card_of(capability),
    )
    check(capability, decode._attend, sizes, dtype, capped=capped)


@pytest.mark.parametrize(("capability", "dtype", "shape", "capped"), CASES)
@pytest.mark.timeout(300)
def test_prefill_compiled(capability: int, dtype: str, shape: Shape, capped: bool) -> None:
    case = Case(**{"chunk_tokens": 64} | shape)
    case.add(0, more=400)
    sizes = prefill.block_sizes(
        head_dim=case.head_dim,
        group=case.group,
        plan=case.forest().prefill({0: 128}, tile_queries=128),
        element_bytes=2,
        card=card_of(capability),
    )
    check(capability, prefill._attend, sizes, dtype, capped=capped)


def test_a_tile_is_made_smaller_until_it_fits() -> None:
    """At first in its tokens: its stages are what hides the loads."""
    small = card((8, 9), SHARED_BYTES_MIN)
    wanted = tiles.Tile(128, 8, 4)

    def fitting(card: Card, rows: int, block_d: int) -> tuple[int, int]:
        tile = decode.fitting(wanted, rows=rows, block_d=block_d, element_bytes=2, card=card)
        assert (
            decode.shared_bytes_needed(tile, rows=rows, block_d=block_d, element_bytes=2, card=card)
            <= card.shared_bytes
        )
        return tile.tokens, tile.stages

    assert fitting(Card(1 << 20, 1 << 14, True), 64, 128) == (128, 4)
    assert fitting(HOPPER, 64, 128) == (64, 4)
    assert fitting(small, 64, 64) == (64, 4)
    assert fitting(small, 64, 128) == (32, 4)
    assert fitting(small, 32, 256) == (32, 3)
    with pytest.raises(ValueError, match="does not fit in 20000 bytes of shared memory"):
        fitting(Card(20_000, 1 << 14, False), 64, 128)


def test_what_cards_have() -> None:
    assert card((9, 0), 227 << 10) == HOPPER
    assert [card((8, 9), 99 << 10), card((10, 0), 227 << 10)] == [
        Card(99 << 10, 64 * 128, False),
        Card(227 << 10, 64 * 128, True),
    ]
    assert rows_max(256, most=64, card=card((8, 9), 99 << 10)) == 32
    assert rows_max(80, most=64, card=HOPPER) == 64
