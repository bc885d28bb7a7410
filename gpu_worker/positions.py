"""Moving keys to other positions: for which models it can be done, and by what they are rotated.

KV is stored as the model made it, keys with their position in them. Where that position changes (text before them was
cut, a module is placed elsewhere), keys are rotated once, from the stored bytes, while they are loaded
(`kvstore.kernels.rotate`). That is right only if a key is its token's projection, rotated by position * inv_freq, and
nothing else that knows the position: families are allowed one by one, after a test with a real model of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvstore.errors import Unsupported
from kvstore.kernels.rotate import DTYPES, Rotation, rotation

INTERLEAVED = {
    "cohere": True,
    "gemma3_text": False,
    "glm": True,
    "gpt_neox": False,
    "llama": False,
    "mistral": False,
    "phi": False,
    "phi3": False,
    "qwen2": False,
    "qwen3": False,
    "smollm3": False,
}
"""`config.model_type` of families that rotate keys last: whether their pairs are elements (2i, 2i + 1)."""
WITHOUT_POSITIONS = ("bloom",)
"""Families whose keys have no position at all: ALiBi adds distances to logits."""
REFUSED = {
    "gpt2": "positions are learned and added to the tokens: every key and value depends on them",
    "gpt_bigcode": "positions are learned and added to the tokens: every key and value depends on them",
    "hunyuan_v1_dense": "keys are normalised and weighted after the rotation",
    "llama4_text": "keys are normalised after the rotation",
    "opt": "positions are learned and added to the tokens: every key and value depends on them",
}
"""Families that are known to be of another kind, and why."""
FIXED_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rope types whose frequencies are the same at any length."""


@dataclass(frozen=True, slots=True)
class Positions:
    """What moves a model's keys: the inverse frequencies of each layer, [pairs], empty where keys have no position."""

    inv_freq: tuple[torch.Tensor, ...]
    interleaved: bool

    @classmethod
    def of(cls, model: PreTrainedModel, *, tokens_max: int | None = None) -> Positions:
        """From the model's own tables, which hold whatever scaling its config asks for.

        Raises Unsupported as `check_movable` does.
        """
        config = model.config
        check_movable(config, tokens_max=tokens_max, dtype=model.dtype)
        none = torch.empty(0)
        if config.model_type in WITHOUT_POSITIONS:
            return cls((none,) * config.num_hidden_layers, interleaved=False)
        tables: Any = model.get_decoder().rotary_emb
        nested = _is_nested(config.rope_parameters)
        # "original" is as at the start: dynamic types change the other one while the model runs
        by_kind = {
            kind: getattr(tables, f"{kind}_original_inv_freq").detach().cpu()
            for kind in (config.rope_parameters if nested else ())
        }
        rotated = getattr(config, "no_rope_layers", None) or [True] * config.num_hidden_layers  # 1: has rope
        inv_freq = none if nested else tables.original_inv_freq.detach().cpu()
        return cls(
            tuple(
                (by_kind[config.layer_types[layer]] if nested else inv_freq) if rotated[layer] else none
                for layer in range(config.num_hidden_layers)
            ),
            interleaved=INTERLEAVED[config.model_type],
        )

    def rotations(
        self, deltas: int | torch.Tensor, *, device: torch.device | str | None = None
    ) -> tuple[Rotation, ...]:
        """What moves keys of each layer by `deltas`, see `kvstore.kernels.rotate.rotation`. Layers with the same
        frequencies share it."""
        made = {
            id(inv_freq): rotation(deltas, inv_freq, interleaved=self.interleaved, device=device)
            for inv_freq in self.inv_freq
        }
        return tuple(made[id(inv_freq)] for inv_freq in self.inv_freq)


def check_movable(config: Any, *, tokens_max: int | None = None, dtype: torch.dtype | None = None) -> None:
    """Raises Unsupported, naming the field of the Hugging Face `config` that stands in the way, if keys of such a model
    cannot be moved.

    `tokens_max`: no sequence will ever be longer. Types of rope that change with the length are allowed where that
    keeps them on one side of their switch. `dtype`: of the keys as they are stored.
    """
    family = config.model_type
    if dtype is not None and dtype not in DTYPES:
        raise _refusal(
            "dtype",
            dtype,
            "quantised keys have scales that belong to the elements as they were",
            "store KV unquantised",
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise _refusal(
            "config.kv_lora_rank", config.kv_lora_rank, "latent attention keeps its rotated part elsewhere"
        )
    if family in WITHOUT_POSITIONS:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    for kind, parameters in (rope if _is_nested(rope) else {"": rope}).items():
        _check_rope(config, f"config.rope_parameters{f'[{kind}]' if kind else ''}", parameters, tokens_max)
    if family not in INTERLEAVED:
        known = ", ".join(sorted((*INTERLEAVED, *WITHOUT_POSITIONS)))
        why = REFUSED.get(
            family, f"how this family's keys hold positions was not tested; those that were: {known}"
        )
        raise _refusal("config.model_type", family, why)
    if not rope:
        raise _refusal("config.rope_parameters", rope, "a model without rotary embedding")


def _check_rope(config: Any, field: str, parameters: dict[str, Any], tokens_max: int | None) -> None:
    kind = parameters.get("rope_type", "default")
    if parameters.get("mrope_section"):
        raise _refusal(
            f"{field}.mrope_section", parameters["mrope_section"], "each token has several positions (M-RoPE)"
        )
    if kind in FIXED_TYPES:
        return
    switch = {
        "dynamic": getattr(config, "max_position_embeddings", None),
        "longrope": parameters.get("original_max_position_embeddings"),
    }.get(kind)
    if switch is None:
        raise _refusal(
            f"{field}.rope_type", kind, f"a type that was not tested; those that were: {FIXED_TYPES}"
        )
    if tokens_max is None or tokens_max > switch:
        raise _refusal(
            f"{field}.rope_type",
            kind,
            f"its frequencies change when a sequence has more than {switch} tokens",
            f"keep sequences below that, and say so (tokens_max is {tokens_max})",
        )


def _is_nested(rope: dict[str, Any]) -> bool:
    """One set of parameters for each kind of layer."""
    return bool(rope) and all(isinstance(value, dict) for value in rope.values())


def _refusal(
    field: str, value: object, why: str, remedy: str = "compute this text anew at its new position"
) -> Unsupported:
    return Unsupported(
        f"keys cannot be moved to other positions: {why}", field=field, value=value, remedy=remedy
    )
