"""Ports: what the daemon asks of a place where shards live, and what such a place may ask of DRAM.

                read: place -> slot
    ShardTier  ---------------------->  SlotMemory
     (SSD)     <----------------------  (the arena)
                write: slot -> place

The daemon's copier and the simulator's disk are driven in the same way: submit, then poll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.events import OpDone, OpFailed
from kvstore.types import Extent, OpId, SegmentId

Place = NewType("Place", int)
"""A fixed-size place of a tier, numbered by the core, as slots of the arena are."""
Ended = OpDone | OpFailed


class SlotMemory(Protocol):
    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Writable bytes, alive as long as the view. Raises NotFound or BadRequest."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Shards that move together: the i-th extent to or from the i-th place; one answer for all."""

    op: OpId
    extents: tuple[Extent, ...]
    places: tuple[Place, ...]


class ShardTier(Protocol):
    """Submitting never blocks and never raises because of I/O; every op ends exactly once.

    An op ends when its last I/O call *has returned*: until then its slots and places belong to it, whatever the time. A
    deadline is the core's to keep: it quarantines the targets of an op that is late, until the op ends. The core also
    bounds how many are in flight.
    """

    def read(self, transfer: Transfer) -> None:
        """Places to slots. OpDone carries the xxh3_64 of each slot's bytes as they are now."""

    def write(self, transfer: Transfer) -> None:
        """Slots to places. OpDone carries the xxh3_64 of the bytes that were written."""

    def drop(self, places: tuple[Place, ...]) -> None:
        """Nobody wants these bytes any more. No answer."""

    def poll(self) -> list[Ended]:
        """What ended since the last poll. `wake`, given to the constructor, is called (from any thread) when it would
        return something after having returned nothing."""
