"""Groups of layers as vLLM caches them: what each holds, what of it a request needs, and which cannot be stored.

vLLM keys a block by the hash of all tokens up to its end and the number of its group. A boundary (a count of tokens) of
a request can be resumed if each group has what it needs there:

    full, latent      every block up to the boundary
    window, local     the blocks that the next token can see
    state             exactly the state at the boundary: one before or behind is of no use
    draft             as its kind, and one block more: the last one depends on a token that its hash does not cover
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.errors import Unsupported
from kvstore.types import ChunkKey

FIELD = "kv_cache_config.kv_cache_groups"
KNOWN = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
"""Exactly these: what derives from one of them keeps its KV in a way of its own."""
PREFIX = (FullAttentionSpec, MLAAttentionSpec)


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers."""

    number: int
    """vLLM's, as in its keys."""
    kind: str
    """full, latent, window, local or state."""
    layers: int
    block_tokens: int
    block_bytes: int
    """Of all its layers, on one rank."""
    window: int | None
    """Tokens that the next one sees, itself counted, or that vLLM keeps with them; 0: a state; None: all."""
    draft: bool
    """Of a drafter."""
    chunk_tokens: int
    """Of the blocks that have one key."""
    kept: int = 0
    """Tokens in front of the window that vLLM keeps all the same."""

    def __str__(self) -> str:
        kind = f"{self.kind} of {self.window} tokens" if self.window else self.kind
        return f"{kind}{' of a drafter' if self.draft else ''}, {self.layers} layers"

    def span(self, boundary: int) -> tuple[int, int]:
        """(first, last]: of chunks that end there, vLLM loads the request only if all are found."""
        size = self.chunk_tokens
        last = -(-boundary // size) * size
        chunks = boundary // size + 1
        if self.window == 0:
            chunks = 1
        elif self.window is not None:
            chunks = -(-self.window // size)
            if self.kind == "window":
                chunks = max(chunks, -(-(self.window - 1 + self.kept + last - boundary) // size))
        first = last - chunks * size
        return max(0, first), last + (size if self.draft else 0)


def groups_of(kv_cache_config: Any, *, blocks_per_chunk: int = 1) -> list[Group]:
    """Raises Unsupported for what cannot be stored, or cannot be right once it is loaded again."""
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise Unsupported(
            "vLLM keeps a part of the KV in host memory itself", field="kv_cache_config.hisparse", value="on"
        )
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = list(_specs(group.kv_cache_spec))
        for spec in specs:
            _check(spec, blocks_per_chunk)
        if len({(_kind(spec), _window(spec)) for spec in specs}) > 1:
            raise Unsupported(
                "layers of different kinds in one group are not supported",
                field=FIELD,
                value=", ".join(sorted({type(spec).__name__ for spec in specs})),
            )
        if not getattr(group, "enable_kv_transfer", True):
            raise Unsupported(
                "a group that vLLM rebuilds after a load is not supported",
                field=FIELD,
                value=type(specs[0]).__name__,
            )
        groups.append(
            Group(
                number,
                _kind(specs[0]),
                len(group.layer_names),
                int(specs[0].block_size),
                _block_bytes(group),
                _window(specs[0]),
                bool(getattr(group, "is_eagle_group", False)),
                int(specs[0].block_size) * blocks_per_chunk,
                int(getattr(specs[0], "extra_retained_tokens", 0)),
            )
        )
    if not groups:
        raise Unsupported("there is no KV to store", field=FIELD, value="none")
    return groups


def _specs(spec: Any) -> Iterator[Any]:
    """One, or one for each layer where those differ in size."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _check(spec: Any, blocks_per_chunk: int) -> None:
    name = type(spec).__name__
    if type(spec) not in KNOWN:
        raise Unsupported(
            "nobody knows what a request needs of these layers",
            field=FIELD,
            value=name,
            remedy="known: " + ", ".join(kind.__name__ for kind in KNOWN),
        )
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise Unsupported(
            "KV that depends on later tokens is not what its block's hash names",
            field=FIELD,
            value=f"{name}, not causal",
        )
    if not getattr(spec, "prefix_cacheable", True):
        raise Unsupported(
            "vLLM computes these layers again instead of caching them", field=FIELD, value=f"{name}, replayed"
        )
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
        raise Unsupported(
            "vLLM keeps no states at the ends of blocks, so nothing could ever be found",
            field="cache_config.mamba_cache_mode",
            value="none",
            remedy="start vLLM with --enable-prefix-caching",
        )
    if blocks_per_chunk > 1 and _window(spec):
        raise Unsupported(
            "a row of several blocks may lack those that a window had passed when it was stored",
            field="kv_connector_extra_config.blocks_per_chunk",
            value=blocks_per_chunk,
            remedy="leave blocks_per_chunk and block_size of the offloading out: a row is one block then",
        )


def _kind(spec: Any) -> str:
    if isinstance(spec, MambaSpec):
        return "state"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "local"
    if isinstance(spec, SlidingWindowSpec):
        return "window"
    return "latent" if isinstance(spec, MLAAttentionSpec) else "full"


def _window(spec: Any) -> int | None:
    if isinstance(spec, MambaSpec):
        return 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    return None


def _block_bytes(group: Any) -> int:
    """As vLLM counts them: padding is part of a page."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(group.layer_names)


def needed(
    groups: Sequence[Group],
    places: Mapping[ChunkKey, tuple[int, int]],
    there: Collection[ChunkKey],
    *,
    keys_max: int,
) -> list[ChunkKey]:
    """Of the keys in `there`, those that the request needs at the longest boundary where it can go on, at most
    `keys_max`.

    `places`: (group, tokens up to its end) of each key that was asked about, in one question; a place that is not among
    them counts as there: vLLM has it itself, or would ask. vLLM asks about everything that might be of use, which for a
    group with a window is all of a long prompt; promoting that would push out what is needed.
    """
    by_number = {group.number: group for group in groups}
    ends: dict[int, dict[int, ChunkKey]] = {group.number: {} for group in groups}
    tails: dict[int, list[ChunkKey]] = {}
    for key, (number, end) in places.items():
        if number not in by_number or end <= 0:
            return [key for key in places if key in there][:keys_max]  # vLLM has changed its keys
        if end % by_number[number].chunk_tokens:
            tails.setdefault(end, []).append(key)
        else:
            ends[number][end] = key
    for end in sorted(tails, reverse=True):
        if all(key in there for key in tails[end]):
            return [*_complete(groups, ends, there, keys_max), *tails[end]]
    return _complete(groups, ends, there, keys_max)


def _complete(
    groups: Sequence[Group],
    asked: Mapping[int, Mapping[int, ChunkKey]],
    there: Collection[ChunkKey],
    keys_max: int,
) -> list[ChunkKey]:
    """`needed` among the keys of complete chunks."""
    absent, present = (
        {
            number: sorted(end for end, key in ends.items() if (key in there) is wanted)
            for number, ends in asked.items()
        }
        for wanted in (False, True)
    )
    last = max((end for ends in asked.values() for end in ends), default=0)
    for boundary in sorted({end for ends in asked.values() for end in ends}, reverse=True):
        spans = [(group, *group.span(boundary)) for group in groups]
        if any(
            _between(absent[group.number], first, end)
            or (group.draft and end > last)
            or (group.window == 0 and boundary % group.chunk_tokens)
            for group, first, end in spans
        ):
            continue
        wanted = [
            asked[group.number][number]
            for group, first, end in spans
            for number in _between(present[group.number], first, end)
        ]
        if len(wanted) <= keys_max:
            return wanted
    return []


def _between(ends: Sequence[int], first: int, last: int) -> Sequence[int]:
    return ends[bisect_right(ends, first) : bisect_right(ends, last)]


def tp_replicas(config: Any, kv_cache_config: Any) -> int:
    """How many consecutive tensor-parallel ranks should hold the same KV, by what vLLM says of its layers: latent KV is
    the same on all of them, heads fewer than ranks are repeated, a state is each rank's own."""
    width = int(config.parallel_config.tensor_parallel_size)
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    if known > 1:
        return known
    heads = int(config.model_config.get_total_num_kv_heads())
    shared = width
    for group in kv_cache_config.kv_cache_groups:
        for spec in _specs(group.kv_cache_spec):
            shared = math.gcd(shared, _replicas(spec, width, heads))
    return shared


def _replicas(spec: Any, width: int, heads: int) -> int:
    if isinstance(spec, MambaSpec):
        return width if spec.tp_replicated else 1
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return width
    # A rank that has several heads has them for itself.
    return max(1, width // heads) if spec.num_kv_heads == 1 else 1
