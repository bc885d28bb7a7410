"""Small random models of the kinds whose KV is laid out differently: one for each kind of group that vLLM has.

Weights are large enough that every token of a prompt tells on the answer, so KV of another token would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _gemma() -> Any:
    """Windows of 96 tokens in five layers of six, as Gemma 3 has them: groups of both kinds."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=6,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=96,
            layer_types=kinds,
        )
    )


def _mistral() -> Any:
    """A window in every layer: no group of full attention."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(**COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=64, sliding_window=96)
    )


def _deepseek() -> Any:
    """Latent KV (MLA): one vector a token and layer, the same on every rank."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **COMMON,
            num_hidden_layers=3,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            n_routed_experts=4,
            first_k_dense_replace=3,
        )
    )


def _granite() -> Any:
    """Mamba 2 in three layers of four: a state at each block's end, beside attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **COMMON,
            num_hidden_layers=4,
            num_key_value_heads=2,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            shared_intermediate_size=256,
            num_local_experts=0,
            num_experts_per_tok=0,
            attention_multiplier=0.17,
            position_embedding_type="rope",
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
        )
    )


def _llama(layers: int = 3) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**COMMON, num_hidden_layers=layers, num_key_value_heads=2, head_dim=64)
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma": _gemma,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "granite": _granite,
    "llama": _llama,
}


def make_family(name: str, path: Path, seed: int = 0) -> Path:
    """Writes the model to `path`, as a checkpoint of transformers."""
    import torch

    torch.manual_seed(seed)
    FAMILIES[name]().save_pretrained(path)
    return path


def make_drafter(path: Path, seed: int = 1) -> Path:
    """A drafter for the Llama: a model of one layer."""
    import torch

    torch.manual_seed(seed)
    _llama(1).save_pretrained(path)
    return path
