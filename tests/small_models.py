"""Random models that are small enough for tests, with weights large enough that every token of a prompt tells on the
answer."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    dtype: torch.dtype = torch.float32, *, seed: int = 0, layers: int = 4, positions: int = 1024
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()
