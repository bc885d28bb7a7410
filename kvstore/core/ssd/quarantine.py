"""Slots that are out of service, why, and until when.

    LATE    somebody may still write it: a call that missed its deadline, a worker whose reservation expired. It is free
            again when the call has returned or the worker is gone
    EMPTY   its bytes were not those that were committed. It holds nothing any more, and returns to service once the
            daemon has written it and read that back (`rewrites.py`)
    BAD     it did not keep what was written, or went bad again and again: until the daemon is started anew. Again and
            again counts where nobody but the daemon writes: under protection `group` a worker may be to blame, and what
            is asked of the slot itself is only that it keeps what is written

Pools know how many slots are quarantined; this is what people are told of them, and so it is bounded: beyond LISTED_MAX
they are only counted, and stay out of service.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from kvstore.types import ChunkKey, Millis, NamespaceId, Tier

LISTED_MAX = 4_096
RETURNS_MAX = 2
"""So often a slot returns to service; after that it is BAD."""
RETURNS_REMEMBERED_MAX = 4_096

Place = tuple[Tier, int, int]
"""(tier, number of the segment or slab file, slot)"""


class Hold(enum.Enum):
    LATE = "until the call returns, or the worker is gone"
    EMPTY = "rewritten and verified soon"
    BAD = "nothing: it did not keep what was written"


@dataclass(slots=True)
class Entry:
    place: Place
    slot_bytes: int
    namespace: NamespaceId
    key: ChunkKey
    hold: Hold
    since: Millis
    retry_at: Millis
    """When an EMPTY one may be rewritten."""

    @property
    def reason(self) -> str:
        return "in use" if self.hold is Hold.LATE else "corrupt"


class QuarantineBook:
    def __init__(self) -> None:
        self.entries: OrderedDict[Place, Entry] = OrderedDict()
        """Oldest first."""
        self._returns: OrderedDict[Place, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"QuarantineBook({len(self.entries)} slots)"

    def add(
        self,
        place: Place,
        slot_bytes: int,
        namespace: NamespaceId,
        key: ChunkKey,
        *,
        corrupt: bool,
        shared: bool,
        now: Millis,
        retry_ms: Millis,
    ) -> None:
        """`shared`: workers could write those bytes, or say what they should be."""
        assert place not in self.entries, place
        if len(self.entries) >= LISTED_MAX:
            return
        hold = Hold.LATE
        if corrupt:
            worn = not shared and self._returns.get(place, 0) >= RETURNS_MAX
            hold = Hold.BAD if worn else Hold.EMPTY
        self.entries[place] = Entry(place, slot_bytes, namespace, key, hold, now, now + retry_ms)

    def drop(self, place: Place) -> None:
        """It is in service again; of one that is not listed nothing is known."""
        self.entries.pop(place, None)

    def returned(self, place: Place) -> None:
        """Rewritten and verified."""
        self.drop(place)
        self._returns[place] = self._returns.pop(place, 0) + 1
        if len(self._returns) > RETURNS_REMEMBERED_MAX:
            self._returns.popitem(last=False)
