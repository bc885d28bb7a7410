"""What readers without a message are told: which chunks are hits, and where; which are on SSD alone.

Whoever changes a chunk so that `reads.lookup` may answer otherwise, or its places, notes its row (`State.note`). At the
end of the step the rows that were noted are compared with what readers were told, and effects tell the difference, in
this order, which is what keeps a reader from wrong bytes:

    CreateDirectory, CloseDirectory    who must not look any more is sent to the daemon first
    SetGenerations                     what was read meanwhile is void
    Unpublish                          nobody finds what is gone
    Publish                            everybody finds what is there, before any answer says so
    OpenDirectory, everything else     copies into slots, answers

A directory is closed while `lookup` answers otherwise for all chunks at once: for an epoch that is retired, while
chunks of a maker are being recalled, and while the SSD is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.chunks import DOOMED, NONE, STORED, ChunkTable
from kvstore.core.events import (
    CloseDirectory,
    CreateDirectory,
    DropDirectory,
    Effect,
    OpenDirectory,
    Publish,
    Unpublish,
)
from kvstore.core.limits import Limits
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Pool
from kvstore.types import NO_EXTENTS, DiskState, Extents, Millis, NamespaceId

BELOW_MAX = 1 << 20
"""Chunks in a tier of which nobody knows how many it can hold."""
MANY = 64
"""From so many rows on, arrays pay."""
GONE, HIT, COLD = range(3)
PART = 1 << 15
"""Rows that one effect tells of: of a million, an effect would take a hundred megabytes."""


class Books(Protocol):
    """What it looks into: `State`."""

    limits: Limits
    chunks: ChunkTable
    namespaces: dict[NamespaceId, Namespace]
    ssd_slots: Pool
    disk_state: DiskState
    recalling: dict[tuple[str, bytes], Millis]

    def namespace_of(self, row: int) -> Namespace: ...

    def extents(self, namespace: Namespace, rows: Sequence[int], shards: Sequence[int]) -> Extents: ...


class Directory:
    def __init__(self, state: Books) -> None:
        self._state = state
        self.noted: dict[int, None] = {}
        """Rows that may have to be told of anew."""
        self._everything = False
        self._first: list[Effect] = []
        self._last: list[Effect] = []
        self._withdrawn: dict[NamespaceId, list[int]] = {}
        self._sent_away: tuple[bool, frozenset[str]] = (False, frozenset())
        """Whether the SSD is off, and the tenants (empty: all) of whose makers some are being recalled."""
        """Why all directories are closed: the SSD is off, something is being recalled."""
        self._retiring = False

    def __repr__(self) -> str:
        return f"Directory({len(self.noted)} rows noted)"

    # ------------------------------------------------------------------------------------------------- namespaces

    def opened(self, namespace: Namespace) -> None:
        """It gets a directory, with room for all that DRAM and SSD can hold of it. Memory comes as it is filled."""
        state = self._state
        limits = state.limits
        in_dram = limits.arena_bytes // min(namespace.slot_bytes) // namespace.shards
        if limits.cold_tier == "ssd":
            sizes = [state.ssd_slots.slot_bytes(limits.disk_header_bytes + n) for n in namespace.shard_bytes]
            below = limits.disk_slabs_max * limits.disk_slab_bytes // min(sizes) // namespace.shards
        else:
            below = BELOW_MAX
        namespace.directory_rows_max = max(1, min(limits.chunks_max, in_dram + below))
        namespace.directory_open = True
        self._first.append(
            CreateDirectory(
                namespace.id,
                namespace.shards,
                namespace.directory_rows_max,
                namespace.slot_bytes,
                in_dram,
                bool(limits.sources),
            )
        )
        self._retiring = True  # it may be an old epoch's, after a restart, or be closed with all others

    def retired(self) -> None:
        """Some namespace is."""
        self._retiring = True

    def gone(self, namespace: Namespace) -> None:
        """It holds nothing any more."""
        self._withdrawn.pop(namespace.id, None)
        self._last.append(DropDirectory(namespace.id))

    def everything(self) -> None:
        """All rows are to be told of: after a restart."""
        self._everything = True

    # ------------------------------------------------------------------------------------------------------- rows

    def forget(self, row: int) -> None:
        """The row is about to be another chunk's."""
        column = self._state.chunks.directory
        if column[row] != NONE:
            self._withdraw(self._state.namespace_of(row), column[row])
            column[row] = NONE

    def _withdraw(self, namespace: Namespace, entry: int) -> None:
        self._withdrawn.setdefault(namespace.id, []).append(entry)
        namespace.directory_free.append(entry)

    # ---------------------------------------------------------------------------------------------------- effects

    def take(self) -> tuple[list[Effect], list[Effect], list[Effect]]:
        """What comes before the generations are set, what directly after, and what behind that."""
        self._look_at_all()
        if not (self.noted or self._first or self._last or self._withdrawn or self._everything):
            return [], [], []
        published: list[Effect] = []
        if self._everything:
            self._everything = False
            for start in range(0, self._state.chunks.rows_ever, PART):
                self._tell(range(start, min(start + PART, self._state.chunks.rows_ever)), published)
        elif self.noted:
            self._tell(self.noted, published)
        self.noted = {}
        withdrawn: list[Effect] = [Unpublish(number, rows) for number, rows in self._withdrawn.items()]
        self._withdrawn = {}
        first, self._first = self._first, []
        last, self._last = self._last, []
        return first, withdrawn + published, last

    def _look_at_all(self) -> None:
        state = self._state
        off = state.disk_state is DiskState.OFF
        recalled = frozenset(tenant for tenant, _ in state.recalling)
        sent_away = off, recalled
        if sent_away == self._sent_away and not self._retiring:
            return
        self._sent_away = sent_away
        self._retiring = False
        for namespace in state.namespaces.values():
            away = off or not recalled.isdisjoint(("", namespace.tenant))
            is_open = not (away or namespace.retired or namespace.directory_full)
            if is_open and not namespace.directory_open:
                self._last.append(OpenDirectory(namespace.id))
            elif namespace.directory_open and not is_open:
                self._first.append(CloseDirectory(namespace.id))
            namespace.directory_open = is_open

    def _tell(self, rows: Iterable[int], published: list[Effect]) -> None:
        """Compare with what was told, by namespace and condition."""
        rows = list(rows)
        if len(rows) >= MANY:
            self._tell_many(np.array(rows, np.intp), published)
            return
        state = self._state
        chunks = state.chunks
        hits: list[int] = []
        cold: list[int] = []
        column, of = chunks.directory, chunks.namespace
        for row in rows:
            if of[row] == NONE:
                continue
            condition = self._condition(row)
            if condition == HIT:
                hits.append(row)
            elif condition == COLD:
                cold.append(row)
            elif column[row] != NONE:
                self.forget(row)
        for mine in (hits, cold):
            for number, group in groupby(sorted(mine, key=of.__getitem__), of.__getitem__):
                namespace = state.namespaces[NamespaceId(number)]
                told = self._entries(namespace, list(group))
                if not told:
                    continue
                extents = NO_EXTENTS
                if mine is hits:
                    extents = state.extents(namespace, told, range(namespace.shards))
                published.append(
                    Publish(
                        namespace.id,
                        [column[row] for row in told],
                        [chunks.key[row] for row in told],
                        [chunks.tokens[row] for row in told],
                        extents,
                    )
                )

    def _condition(self, row: int) -> int:
        """What `lookup` would say of the row's chunk while the directory is open."""
        state = self._state
        chunks = state.chunks
        if chunks.shard0[row] == NONE or chunks.flags[row] & DOOMED:
            return GONE
        if chunks.ready[row] == state.namespaces[NamespaceId(chunks.namespace[row])].shards:
            return HIT
        return COLD if chunks.flags[row] & STORED else GONE

    def _tell_many(self, rows: npt.NDArray[np.intp], published: list[Effect]) -> None:
        """As `_tell`, through views of the columns."""
        state = self._state
        chunks = state.chunks
        owners = chunks.views.namespace[rows]
        for number in np.unique(owners[owners != NONE]).tolist():
            namespace = state.namespaces[NamespaceId(number)]
            mine = rows[owners == number]
            view = chunks.views
            flags = view.flags[mine]
            alive = (view.shard0[mine] != NONE) & (flags & DOOMED == 0)
            hit = alive & (view.ready[mine] == namespace.shards)
            cold = alive & ~hit & (flags & STORED != 0)
            for row in mine[~hit & ~cold & (view.directory[mine] != NONE)].tolist():
                self.forget(row)
            for which, in_dram in ((mine[hit], True), (mine[cold], False)):
                if not len(which):
                    continue
                told = self._entries(namespace, which.tolist())
                if not told:
                    continue
                extents = state.extents(namespace, told, range(namespace.shards)) if in_dram else NO_EXTENTS
                which = which[: len(told)]
                entries, tokens = chunks.views.directory[which].tolist(), chunks.views.tokens[which].tolist()
                keys = list(map(chunks.key.__getitem__, told))
                published.append(Publish(namespace.id, entries, keys, tokens, extents))

    def _entries(self, namespace: Namespace, rows: Sequence[int]) -> Sequence[int]:
        """Those of the rows that have an entry now: all, unless the directory is full, which is closed then."""
        column = self._state.chunks.directory
        room = namespace.directory_rows_max - namespace.directory_rows
        if len(rows) >= MANY and not namespace.directory_free and len(rows) <= room:
            view = self._state.chunks.views
            new = np.array(rows, np.intp)
            new = new[view.directory[new] == NONE]
            view.directory[new] = np.arange(namespace.directory_rows, namespace.directory_rows + len(new))
            namespace.directory_rows += len(new)
            return rows
        for number, row in enumerate(rows):
            if column[row] != NONE:
                continue
            if namespace.directory_free:
                column[row] = namespace.directory_free.pop()
            elif namespace.directory_rows < namespace.directory_rows_max:
                column[row] = namespace.directory_rows
                namespace.directory_rows += 1
            else:
                namespace.directory_full = True
                if namespace.directory_open:
                    namespace.directory_open = False
                    self._first.append(CloseDirectory(namespace.id))
                return rows[:number]
        return rows
