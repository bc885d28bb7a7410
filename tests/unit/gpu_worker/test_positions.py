"""Keys of real models, computed at some positions and moved, beside the same models at the new positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvstore.errors import Unsupported
from kvstore.gpu_worker.layout import Geometry, bits
from kvstore.gpu_worker.loader import Loader, LoadFailed, Piece
from kvstore.gpu_worker.positions import INTERLEAVED, WITHOUT_POSITIONS, Positions, check_movable
from kvstore.kernels.rotate import rotate
from kvstore.types import Outcome

from .conftest import FakeLease, FakeStore

TOKENS = 12
MOVE = 300
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "rope_type": "default"}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 400,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": ROPE | {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        },
    },
    "glm": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "gpt_neox": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
    "phi": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "phi3": {"original_max_position_embeddings": 400},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
CASES = [
    *(
        (family, SPECIAL.get(family, {"rope_parameters": ROPE}))
        for family in (*INTERLEAVED, *WITHOUT_POSITIONS)
    ),
    *(("llama", {"rope_parameters": ROPE | scaling}) for scaling in SCALED.values()),
    ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    ("phi3", SPECIAL["phi3"] | {"rope_parameters": ROPE | LONGROPE}),
]


def config_of(family: str, **changes: Any) -> Any:
    sizes = SIZES | ({"rope_parameters": dict(ROPE)} if family in INTERLEAVED else {})
    return AutoConfig.for_model(family, **sizes | changes)


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()
    for name, weights in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weights, std=0.15)
    return model


def kv_at(model: Any, first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer for tokens whose positions begin there, [1, H_kv, n, D]."""
    tokens = torch.arange(3, 3 + TOKENS).unsqueeze(0)
    cache = DynamicCache(config=model.config)
    at = (
        {}
        if model.config.model_type == "bloom"
        else {"position_ids": torch.arange(TOKENS).unsqueeze(0) + first}
    )
    with torch.inference_mode():
        model(input_ids=tokens, cache=cache, use_cache=True, **at)
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_moved_keys_are_those_that_the_model_makes_there(family: str, changes: dict[str, Any]) -> None:
    model = model_of(family, **changes)
    here, there = kv_at(model, 0), kv_at(model, MOVE)
    moves = Positions.of(model, tokens_max=400).rotations(MOVE)
    backs = Positions.of(model, tokens_max=400).rotations(torch.full((TOKENS,), -MOVE))
    assert len(moves) == len(here) == 3
    stay = 0
    for (keys, values), (new_keys, new_values), by, back in zip(here, there, moves, backs, strict=True):
        # The model's own angles are float32: 300 radians with half a unit of the last place
        assert torch.allclose(rotate(keys, by), new_keys, rtol=0, atol=2e-4 * float(keys.abs().max()))
        assert torch.allclose(rotate(new_keys, back), keys, rtol=0, atol=2e-4 * float(keys.abs().max()))
        assert torch.allclose(values, new_values, rtol=0, atol=1e-4 * float(values.abs().max()))
        stay += torch.allclose(keys, new_keys, rtol=0, atol=0.05 * float(keys.abs().max()))
    assert stay == {"smollm3": 1, "bloom": 3}.get(family, 0), "what did not have to move proves nothing"


def test_keys_of_alibi_hold_no_position() -> None:
    model = model_of("bloom", **SPECIAL["bloom"])
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.full((1, TOKENS), 7), cache=cache, use_cache=True)
    keys = cache.layers[0].keys
    assert torch.allclose(keys, keys[:, :, :1].expand_as(keys), rtol=0, atol=1e-6)


def test_yarn_multiplies_keys_once() -> None:
    """Its attention factor is in the stored keys; a rotation keeps their length."""
    model = model_of("llama", rope_parameters=ROPE | SCALED["yarn"])
    assert model.model.rotary_emb.attention_scaling > 1.2
    keys = kv_at(model, 0)[0][0]
    moved = rotate(keys, Positions.of(model).rotations(MOVE)[0])
    assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)


def test_layers_with_the_same_frequencies_share_a_rotation() -> None:
    same = Positions.of(model_of("llama")).rotations(5)
    assert same[0] is same[1] is same[2]
    one, other, third = Positions.of(model_of("gemma3_text", **SPECIAL["gemma3_text"])).rotations(5)
    assert one is third and one is not other and not torch.equal(one.cos, other.cos)


def test_dynamic_frequencies_are_those_of_short_sequences_whatever_ran_before() -> None:
    model = model_of("llama", rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 4.0})
    before = Positions.of(model, tokens_max=512).inv_freq[0].clone()
    kv_at(model, 2000)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(Positions.of(model, tokens_max=512).inv_freq[0], before)


DYNAMIC = ROPE | {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "limits", "field", "why"),
    [
        (
            "llama",
            {"rope_parameters": DYNAMIC},
            {},
            "config.rope_parameters.rope_type=dynamic",
            "more than 512 tokens",
        ),
        (
            "llama",
            {"rope_parameters": DYNAMIC},
            {"tokens_max": 513},
            "rope_type=dynamic",
            "tokens_max is 513",
        ),
        (
            "phi3",
            SPECIAL["phi3"] | {"rope_parameters": ROPE | LONGROPE},
            {},
            "rope_type=longrope",
            "more than 400 tokens",
        ),
        (
            "phi3",
            SPECIAL["phi3"] | {"rope_parameters": ROPE | LONGROPE},
            {"tokens_max": 401},
            "rope_type=longrope",
            "tokens_max is 401",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
            {},
            r"config.rope_parameters.mrope_section=\[2, 3, 3\]",
            "several positions",
        ),
        (
            "llama",
            {},
            {"dtype": torch.float8_e4m3fn},
            "dtype=torch.float8_e4m3fn",
            "quantised keys have scales",
        ),
        ("gpt2", {}, {}, "config.model_type=gpt2", "positions are learned"),
        ("opt", {}, {}, "config.model_type=opt", "positions are learned"),
        ("hunyuan_v1_dense", {}, {}, "config.model_type=hunyuan_v1_dense", "after the rotation"),
        ("olmo", {}, {}, "config.model_type=olmo", "was not tested; those that were: bloom, cohere"),
        ("deepseek_v3", {}, {}, "config.kv_lora_rank=512", "latent attention"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], limits: dict[str, Any], field: str, why: str
) -> None:
    config = config_of(family, **changes) if family in INTERLEAVED else AutoConfig.for_model(family)
    with pytest.raises(Unsupported, match=f"{field}.*keys cannot be moved to other positions: .*{why}"):
        check_movable(config, **limits)


def test_a_type_of_layer_is_named() -> None:
    changes = SPECIAL["gemma3_text"]
    rope = changes["rope_parameters"] | {"full_attention": DYNAMIC}
    with pytest.raises(Unsupported, match=r"config.rope_parameters\[full_attention\].rope_type=dynamic"):
        check_movable(config_of("gemma3_text", **changes | {"rope_parameters": rope}))


def test_types_of_later_releases_are_refused() -> None:
    config = config_of("llama")
    config.rope_parameters["rope_type"] = "newer"
    with pytest.raises(Unsupported, match=r"rope_type=newer: .*a type that was not tested"):
        check_movable(config)


def test_refused_families_would_be_wrong() -> None:
    """Keys that are normalised and weighted after their rotation are not those that a rotation gives."""
    model = model_of("hunyuan_v1_dense", rope_parameters=ROPE)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.key_layernorm.weight, 0.2, 2.0)
    here, there = kv_at(model, 0), kv_at(model, MOVE)
    positions = Positions((model.model.rotary_emb.inv_freq,), interleaved=False)
    moved = rotate(here[0][0], positions.rotations(MOVE)[0])
    assert not torch.allclose(moved, there[0][0], rtol=0, atol=0.05 * float(moved.abs().max()))


def test_a_load_moves_keys_from_the_stored_bytes() -> None:
    """A chunk and a tail that were computed from position 0 on, loaded as if they stood 300 and 900 further on."""
    model = model_of("llama", rope_parameters=ROPE | SCALED["llama3"])
    here = kv_at(model, 0)
    there = {move: kv_at(model, move) for move in (0, MOVE, 900)}
    geometry = Geometry.of(model, chunk_tokens=8)
    shards = [np.zeros(geometry.shard_bytes, np.uint8) for _ in range(2)]
    for layer, pair in enumerate(here):
        for number, (keys_or_values, (shard, tokens)) in enumerate(
            (each, part) for each in pair for part in zip(shards, (slice(0, 8), slice(8, 12)), strict=True)
        ):
            window = geometry.window(shard, layer, tokens.stop - tokens.start)
            window[number // 2] = bits(keys_or_values[0, :, tokens])
    store = FakeStore(leases=1)
    into = [np.full((2, 2, 24, 16), -1, np.int32) for _ in range(3)]
    wanted = [
        Piece(0, 0, 8),
        Piece(0, 8, 8, delta=MOVE),
        Piece(1, 16, 4, delta=900),
        Piece(1, 20, 4, delta=MOVE),
    ]
    loader = Loader(geometry, Positions.of(model))
    load = loader.start(
        FakeLease(store, shards, (Outcome.HIT,) * 2),
        wanted,
        lambda layer, piece: into[layer][:, :, piece.first_token : piece.first_token + piece.token_count],
        deadline_s=30,
    )
    load.wait(2)
    loader.close()
    assert store.leases == 0
    for piece, tokens in zip(wanted, (slice(0, 8), slice(0, 8), slice(8, 12), slice(8, 12)), strict=True):
        for layer, (found, (keys, values)) in enumerate(zip(into, there[piece.delta], strict=True)):
            at = torch.from_numpy(found[:, :, piece.first_token : piece.first_token + piece.token_count])
            moved, kept = at.view(torch.float32)
            atol = 0.0 if piece.delta == 0 else 6e-4 * float(keys.abs().max())
            assert torch.allclose(moved, keys[0, :, tokens], rtol=0, atol=atol)
            assert torch.equal(kept, here[layer][1][0, :, tokens]) and values.shape == keys.shape


def test_a_void_lease_voids_a_load_that_moves_keys() -> None:
    model = model_of("llama")
    geometry = Geometry.of(model, chunk_tokens=8)
    store = FakeStore(leases=1, on_copy=lambda number: number != 1)
    into = np.full((2, 2, 8, 16), -7, np.int32)
    loader = Loader(geometry, Positions.of(model))
    lease = FakeLease(store, [np.zeros(geometry.shard_bytes, np.uint8)], (Outcome.HIT,))
    load = loader.start(lease, [Piece(0, 0, 8, delta=5)], lambda layer, piece: into, deadline_s=30)
    with pytest.raises(LoadFailed, match="void at layer 1"):
        load.wait(1)
    loader.close()
    assert store.leases == 0


def test_a_loader_without_positions_moves_nothing() -> None:
    geometry = Geometry.of(model_of("llama"), chunk_tokens=8)
    loader = Loader(geometry)
    store = FakeStore(leases=1)
    lease = FakeLease(store, [np.zeros(geometry.shard_bytes, np.uint8)], (Outcome.HIT,))
    with pytest.raises(Unsupported, match=r"pieces\.delta=5: this loader moves no keys"):
        loader.start(
            lease, [Piece(0, 0, 8, delta=5)], lambda layer, piece: np.empty(0, np.int32), deadline_s=30
        )
    loader.close()
    assert store.leases == 1 and lease.copies == 0
