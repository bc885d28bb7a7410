"""What a tier below DRAM asks of DRAM, and what the loop asks of a source beyond this node."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.events import (
    DropChunks,
    FetchChunks,
    ForgetChunks,
    ForgetSessions,
    LookUpChunks,
    LookUpSessions,
    ShareSessions,
    StoreChunks,
)
from kvstore.types import SegmentId


class SlotMemory(Protocol):
    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Writable bytes, alive as long as the view. Raises NotFound or BadRequest."""


SourceEffect = (
    LookUpChunks
    | FetchChunks
    | StoreChunks
    | DropChunks
    | ForgetChunks
    | ShareSessions
    | LookUpSessions
    | ForgetSessions
)


class ChunkSource(Protocol):
    """Who performs the look-ups and fetches of one name in `Limits.sources`; see `core/remote/sources.py`. Answers go
    to `Loop.post_threadsafe`, one for each effect."""

    def submit(self, effect: Any) -> None:
        """A `SourceEffect`. Never blocks, never raises because of I/O. Only `Limits.remote_store` gets more than the
        first two."""

    def close(self, timeout_s: float) -> None:
        """What was submitted has so long to end; what is late is left behind."""
