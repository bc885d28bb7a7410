"""What the scheduler's side tells the ranks in each step, and what each rank tells it once. Pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Load:
    """Fill `blocks` (numbers in the paged cache) with the chunks `keys`, one each."""

    request: str
    keys: tuple[ChunkKey, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """`blocks` are full once this step's forward has run; keys[0] follows `parent`."""

    request: str
    parent: ChunkKey
    keys: tuple[ChunkKey, ...]
    blocks: tuple[int, ...]
    before: tuple[int, ...] = ()
    """Layer-wise only: the request's blocks in front of these."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    """Layer-wise only: blocks whose content is made anew from this step on, whatever they held before."""
    spec: NamespaceSpec | None = None
    """Sent when it changes: all ranks use the one that the scheduler's side made."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's tensor, as one block sees it. Dimensions and their order in memory, the block's own left out."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class RankLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank says about its paged cache, before the first step."""

    backend: str
    """Attention backends and how they pack elements."""
    layers: tuple[LayerShape, ...]
    replicas: int
    """So many consecutive ranks hold the same bytes."""

    @property
    def shard_bytes(self) -> int:
        return sum(layer.slice_bytes for layer in self.layers)
