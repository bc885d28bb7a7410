"""What of this node's chunks came and went, found by looking at the core's columns, some rows at a time.

No step of the core pays for that, and no code path can forget to tell. What comes and goes between two looks at its row
is never told, which costs a peer nothing or one question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.chunks import DOOMED, NONE, STORED
from kvstore.core.state import State
from kvstore.fleet.held import Where
from kvstore.types import ChunkKey, DiskState, NamespaceId

ROWS_PER_LOOK = 65_536
"""0.5 ms."""
CHANGES_PER_LOOK = 2_048
"""What is more is found by the next look."""


@dataclass(frozen=True, slots=True)
class Change:
    """A row of the core's table holds another chunk than it did, or holds it elsewhere."""

    row: int
    namespace: NamespaceId
    key: ChunkKey
    """Of the chunk that can be had now; empty: none can."""
    where: Where


class Sweep:
    """On the loop's thread."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._next = 0
        self._where: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._born: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._namespace: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def look(self, rows_max: int = ROWS_PER_LOOK) -> list[Change]:
        """At the next so many rows, and round again."""
        state = self._state()
        chunks = state.chunks
        view = chunks.views
        total = chunks.rows_ever
        if total > len(self._where):
            more = total - len(self._where)
            self._where = np.append(self._where, np.zeros(more, np.uint8))
            self._born = np.append(self._born, np.zeros(more, np.int64))
            self._namespace = np.append(self._namespace, np.full(more, NONE, np.int32))
        if self._next >= total:
            self._next = 0
        start, end = self._next, min(total, self._next + rows_max)
        part = slice(start, end)
        where = self._look_at(state, part)
        born = view.born_at[part]
        namespace = view.namespace[part]
        differs = (where != self._where[part]) | (
            (where != 0) & ((born != self._born[part]) | (namespace != self._namespace[part]))
        )
        found = np.flatnonzero(differs)
        if len(found) > CHANGES_PER_LOOK:
            found = found[:CHANGES_PER_LOOK]
            end = start + int(found[-1]) + 1
        self._next = end if end < total else 0
        rows = (found + start).tolist()
        self._where[rows] = where[found]
        self._born[rows] = born[found]
        self._namespace[rows] = namespace[found]
        return [
            Change(
                row,
                NamespaceId(int(namespace[row - start])),
                chunks.key[row] if where[row - start] else ChunkKey(b""),
                Where(int(where[row - start])),
            )
            for row in rows
        ]

    @staticmethod
    def _look_at(state: State, part: slice) -> npt.NDArray[np.uint8]:
        """A `Where` for each row. Chunks of an old epoch are nowhere."""
        view = state.chunks.views
        namespace = view.namespace[part]
        shards = np.full(max((int(n) for n in state.namespaces), default=0) + 2, -1, np.int64)
        for number, each in state.namespaces.items():
            if not each.retired:
                shards[int(number)] = each.shards
        wanted = shards[namespace]  # NONE, of a row that is free, finds the last
        flags = view.flags[part]
        alive = (wanted > 0) & (view.shard0[part] != NONE) & (flags & DOOMED == 0)
        resident = alive & (view.ready[part] == wanted)
        stored = alive & ~resident & (flags & STORED != 0)
        if state.disk_state is DiskState.OFF:
            stored[:] = False
        return np.where(resident, Where.DRAM, np.where(stored, Where.SSD, Where.NOWHERE)).astype(np.uint8)
