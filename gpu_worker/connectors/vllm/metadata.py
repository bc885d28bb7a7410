"""What the scheduler's side tells the ranks in each step, and what the ranks tell it. Pickled by vLLM."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.layout import NamespaceSpec
from kvstore.types import ChunkKey

IDLE_S = 0.005
"""An engine that has nothing to compute but requests that wait for us would ask again and again: it burns a core, and
keeps the threads that work for it from the interpreter's lock. So each side waits this long, or until there is news."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """By which a request's chunks were named: a rank that holds another one under this id does not use them."""

    number: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter as a rank has loaded it. `digest`: 32 bytes; b"": not known."""

    name: str
    path: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Fill `blocks` (numbers in the paged cache) with the chunks `keys`, one each."""

    request: str
    keys: tuple[ChunkKey, ...]
    blocks: tuple[int, ...]
    adapter: Adapter | None = None
    bound_s: float = math.inf
    """A load that takes longer is of no use: computing the blocks is faster."""
    wait_s: float = 0.0
    """So long chunks are awaited that are on SSD; 0: none are."""


@dataclass(frozen=True, slots=True)
class Save:
    """`blocks` are full once this step's forward has run; keys[0] follows `parent`."""

    request: str
    parent: ChunkKey
    keys: tuple[ChunkKey, ...]
    blocks: tuple[int, ...]
    before: tuple[int, ...] = ()
    """Layer-wise only: the request's blocks in front of these."""
    adapter: Adapter | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    """Layer-wise only: blocks whose content is made anew from this step on, whatever they held before."""
    written: set[int] | None = None
    """Blocks that vLLM gave to requests for this step, of whomever: it writes no others that were full. None: not
    known."""
    spec: NamespaceSpec | None = None
    """Sent when it changes: all ranks use the one that the scheduler's side made."""
    idle: bool = False
    """There is nothing to compute in this step."""
    weights: Mapping[int, int] | None = None
    """The ranks' generations (see held) for which chunks are named here; None: what they hold is not known, and nothing
    may be loaded or saved."""
    begun: tuple[str, ...] = ()
    """Requests whose first step this is, or the first after a preemption: what was loaded for them is used now."""
    recalled: frozenset[ChunkKey] = frozenset()
    """Saved in steps in which some rank held other weights than those that they are named for."""


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


@dataclass(frozen=True, slots=True)
class Change:
    """What became of some chunks of a namespace."""

    spec: NamespaceSpec
    keys: tuple[ChunkKey, ...]
    shard: int | None = None
    """This shard of each is in the store; None: the chunks are lost."""


@dataclass
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Changes since the report before; of one rank, or of all."""

    changes: list[Change] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    """Of ranks, by number, that hold something else than the step's metadata said."""
    adapters: dict[tuple[int, int], HeldAdapter] = field(default_factory=dict)
    """By rank and id: those that were loaded."""
    loads: list[tuple[int, float]] = field(default_factory=list)
    """(blocks, seconds) of those that ended whole and waited for no SSD."""
    ssd_bytes_per_s: int = 0
    """As the store told last, since the report before."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        assert isinstance(other, RankReport), other
        return RankReport(
            self.changes + other.changes,
            self.generations | other.generations,
            self.adapters | other.adapters,
            self.loads + other.loads,
            other.ssd_bytes_per_s or self.ssd_bytes_per_s,
        )


class Changes:
    """Collected by a rank's threads until the next report, where KV events are wanted."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._changes: list[Change] = []

    def add(self, spec: NamespaceSpec, keys: Sequence[ChunkKey], shard: int | None = None) -> None:
        if self._wanted and keys:
            with self._lock:
                self._changes.append(Change(spec, tuple(keys), shard))

    def take(self) -> list[Change]:
        with self._lock:
            changes, self._changes = self._changes, []
        return changes
