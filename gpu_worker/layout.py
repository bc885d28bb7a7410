"""How the KV of a Hugging Face model lies in the store: namespace, chunk geometry, what is refused and why.

One group "kv" with one shard a chunk. Inside the shard the layers follow one another, each in one contiguous slice, so
that they can be loaded one by one. The slice of a chunk that holds n tokens (T, or fewer in a tail):

    0            H*n*D*b       2*H*n*D*b          2*H*T*D*b        H KV heads, T tokens a chunk, D head size,
    | K [H, n, D] | V [H, n, D] | zeros ... (n < T) |              b bytes an element, K after RoPE

A tail is packed the same way, only shorter: its K and V stay contiguous, and the zeros make its bytes a function of its
key alone (two workers that save the same tail write the same shard).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstore.errors import Unsupported
from kvstore.gpu_worker.defaults import CHUNK_TOKENS
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec

GROUP = "kv"
SUPPORTED_MODELS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""`config.model_type` of the families whose KV is known to be what the keys say: K and V of a token depend on its
position, on the tokens before it, and on nothing else."""
LEARNED_POSITIONS = ("gpt2",)
"""Of these, those with a table of positions: their KV is that of the positions that it was computed at, for ever."""
REASONS = {
    "bloom": "ALiBi adds a bias by distance, for which the kernels take no positions",
    "mpt": "ALiBi adds a bias by distance, for which the kernels take no positions",
    "qwen2_vl": "M-RoPE gives the tokens of an image several positions each",
    "qwen2_5_vl": "M-RoPE gives the tokens of an image several positions each",
    "qwen3_vl": "M-RoPE gives the tokens of an image several positions each",
}
"""Why some families are refused, by `config.model_type`."""
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles do not change with the length of the context ("dynamic" and "longrope" do)."""

Bits = npt.NDArray[np.signedinteger[Any]]
"""Elements as integers of their size: numpy has no bfloat16, and copies of bits are exact whatever they mean."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one chunk. Sizes in elements unless they end in `_bytes`."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_tokens: int = CHUNK_TOKENS

    @classmethod
    def of(cls, model: PreTrainedModel, chunk_tokens: int = CHUNK_TOKENS) -> Geometry:
        """Raises Unsupported, naming the field, for a model whose cache is anything but full attention, ValueError for
        chunks of no tokens."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}: must be at least 1")
        check_supported(model)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            chunk_tokens=chunk_tokens,
        )

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def slice_bytes(self) -> int:
        return self.chunk_tokens * self.token_bytes

    @property
    def shard_bytes(self) -> int:
        return self.layers * self.slice_bytes

    @property
    def group(self) -> GroupSpec:
        slices = tuple(
            LayerSlice(layer=layer, offset=layer * self.slice_bytes, length=self.slice_bytes)
            for layer in range(self.layers)
        )
        return GroupSpec(name=GROUP, shard_bytes=self.shard_bytes, layers=slices)

    def offset(self, layer: int) -> int:
        return layer * self.slice_bytes

    def window(self, shard: npt.NDArray[np.uint8], layer: int, token_count: int) -> Bits:
        """The part of one layer's slice that `token_count` tokens fill, [2, H, n, D], a view of `shard`."""
        start = self.offset(layer)
        used = shard[start : start + token_count * self.token_bytes]
        integers = used.view(f"i{self.dtype.itemsize}")
        return integers.reshape(2, self.heads, token_count, self.head_dim)


def bits(tensor: torch.Tensor) -> Bits:
    """A CPU tensor's elements as integers, of the same shape and strides, sharing its memory."""
    view: Bits = tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()
    return view


def check_supported(model: PreTrainedModel) -> None:
    """Raises Unsupported, naming the field of the model's config that stands in the way."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise Unsupported(
            "this is no model of transformers",
            field="model",
            value=type(model).__qualname__,
            remedy="give the model that is wrapped (model.module)",
        )
    _refuse_unless(
        config.model_type in SUPPORTED_MODELS,
        "config.model_type",
        config.model_type,
        SUPPORTED_MODELS,
        REASONS.get(config.model_type, ""),
    )
    _refuse_unless(not config.is_encoder_decoder, "config.is_encoder_decoder", True, ("decoders",))
    _refuse_unless(
        getattr(config, "kv_lora_rank", None) is None, "config.kv_lora_rank", "set", ("full attention",)
    )
    # The config's own fields disagree between families (use_sliding_window, layer_types, ...): what Hugging Face would
    # build for it is what counts.
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    for number, kind in enumerate(kinds):
        _refuse_unless(
            kind is DynamicLayer, f"config.layer_types[{number}]", kind.__name__, ("full attention",)
        )
    if config.model_type in LEARNED_POSITIONS:
        cross = getattr(config, "add_cross_attention", False)
        _refuse_unless(not cross, "config.add_cross_attention", cross, ("decoders",))
        return
    rope = getattr(config, "rope_parameters", None) or {}
    mrope = rope.get("mrope_section")
    _refuse_unless(
        not mrope,
        "config.rope_parameters.mrope_section",
        mrope,
        ("one position a token",),
        REASONS["qwen2_vl"],
    )
    _refuse_unless(rope.get("rope_type") in SUPPORTED_ROPE, "config.rope_parameters", rope, SUPPORTED_ROPE)


def namespace_of(
    model: PreTrainedModel,
    geometry: Geometry,
    *,
    digest: bytes,
    attention: str = "",
    weights_epoch: int = 0,
    salt: bytes = b"",
) -> NamespaceSpec:
    """What makes this model's KV comparable. `digest`: of what it computes with (see `identity.Identity`). `attention`:
    by which it is computed, if not by the one that its config names."""
    attention = attention or model.config._attn_implementation
    dtype = str(geometry.dtype).removeprefix("torch.")
    spec = NamespaceSpec(
        model=model_name(model),
        weights_digest=digest,
        layout_fingerprint=f"hf-{transformers.__version__}/{attention}/k,v:[H,T,D]:{dtype}",
        chunk_tokens=geometry.chunk_tokens,
        groups=(geometry.group,),
        weights_epoch=weights_epoch,
        salt=salt,
    )
    spec.validate()
    return spec


def model_name(model: PreTrainedModel) -> str:
    """What operators and schedulers call it: its name on the hub, the folder it was loaded from, or else its type."""
    name = str(getattr(model, "name_or_path", "") or model.config.model_type)
    return Path(name).name if os.path.isdir(name) else name  # False for what can be no path at all


def _refuse_unless(fine: bool, field: str, value: object, supported: Sequence[str], why: str = "") -> None:
    if not fine:
        raise Unsupported(
            f"this model's KV cannot be stored yet{': ' * bool(why)}{why}",
            field=field,
            value=value,
            remedy="supported: " + ", ".join(supported),
        )
