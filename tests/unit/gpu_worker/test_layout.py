"""What an HF model's KV looks like in the store, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvstore.errors import Unsupported
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import Geometry, bits, namespace_of

from .conftest import FakeStore, text, tiny_llama

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = DEFAULT_ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = DEFAULT_ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = DEFAULT_ROPE | {"rope_type": "linear", "factor": 4.0}


def llama(**options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def test_a_chunk_is_one_shard_with_a_slice_a_layer() -> None:
    geometry = Geometry.of(tiny_llama(torch.bfloat16))
    assert (geometry.layers, geometry.heads, geometry.head_dim) == (4, 2, 16)
    assert geometry.token_bytes == 2 * 2 * 16 * 2
    assert geometry.slice_bytes == 64 * 128
    assert geometry.shard_bytes == 4 * 64 * 128
    group = geometry.group
    assert [(piece.layer, piece.offset, piece.length) for piece in group.layers] == [
        (layer, layer * 8192, 8192) for layer in range(4)
    ]


def test_the_shape_of_smollm2_gives_its_bytes_a_token() -> None:
    geometry = Geometry(layers=30, heads=3, head_dim=64, dtype=torch.float16)
    assert geometry.layers * geometry.token_bytes == 23_040


@pytest.mark.parametrize("tokens", [1, 63, 64])
def test_a_window_is_k_then_v_packed(tokens: int) -> None:
    geometry = Geometry(layers=3, heads=2, head_dim=4, dtype=torch.float32)
    shard = np.zeros(geometry.shard_bytes, np.uint8)
    k = torch.randn(2, tokens, 4)
    v = torch.randn(2, tokens, 4)
    window = geometry.window(shard, 1, tokens)
    window[0], window[1] = bits(k), bits(v)
    expected = k.numpy().tobytes() + v.numpy().tobytes()
    assert shard[geometry.slice_bytes :][: len(expected)].tobytes() == expected
    assert not shard[: geometry.slice_bytes].any()
    assert not shard[geometry.slice_bytes + len(expected) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_bits_share_the_tensor_s_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, 4).to(dtype)[:, 1]  # not contiguous
    view = bits(tensor)
    assert view.shape == tensor.shape
    view[1, 2] = 1
    assert tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])[1, 2] == 1


SUPPORTED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama3 rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "yarn rope": lambda: llama(rope_parameters=YARN_ROPE),
    "linear rope": lambda: llama(rope_parameters=LINEAR_ROPE),
    "eager attention": lambda: llama(attn_implementation="eager"),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval(),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval(),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval(),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_families_give_the_same_answer_from_the_store(
    name: str, store: FakeStore, engines: Callable[..., BatchEngine]
) -> None:
    torch.manual_seed(0)
    engine = engines(SUPPORTED[name](), store)
    first = engine.turn("s", text(100), 5)
    assert engine.flush(10)
    prompt = [*text(100), *first.tokens, 1, 2, 3]
    second = engine.turn("s", prompt, 5)
    assert second.reused_tokens == 104
    assert second.tokens == engines(engine._model, None).turn("s", prompt, 5).tokens


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "sliding window": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32)),
        "layer_types[0]",
    ),
    "window on some layers": (
        lambda: Qwen2ForCausalLM(
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=2)
        ),
        "layer_types[2]",
    ),
    "dynamic rope": (
        lambda: llama(rope_parameters=DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "config.rope_parameters",
    ),
    "latent": (lambda: llama(kv_lora_rank=16), "config.kv_lora_rank"),
    "another family": (
        lambda: OPTForCausalLM(
            OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
        ),
        "config.model_type=opt",
    ),
    "ALiBi": (
        lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)),
        "ALiBi adds a bias by distance",
    ),
    "several positions a token": (
        lambda: llama(rope_parameters=DEFAULT_ROPE | {"mrope_section": [2, 3, 3]}),
        "M-RoPE gives the tokens of an image several positions each",
    ),
    "attention to another text": (
        lambda: GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, add_cross_attention=True)
        ),
        "config.add_cross_attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_and_told_why(
    name: str, store: FakeStore, engines: Callable[..., BatchEngine]
) -> None:
    make, field = REFUSED[name]
    with pytest.raises(Unsupported) as refusal:
        engines(make(), store)
    assert field in str(refusal.value)
    assert "supported: " in str(refusal.value)


def test_the_fingerprint_names_what_the_bytes_depend_on() -> None:
    model = tiny_llama(torch.bfloat16)
    spec = namespace_of(model, Geometry.of(model), digest=b"d")
    assert spec.layout_fingerprint == f"hf-{transformers.__version__}/sdpa/k,v:[H,T,D]:bfloat16"
    assert spec.chunk_tokens == 64
    assert spec.model == "llama"


def test_a_wrapper_is_refused_and_told_what_to_give() -> None:
    with pytest.raises(Unsupported, match=r"model=DataParallel.*model\.module"):
        Geometry.of(torch.nn.DataParallel(llama()))
