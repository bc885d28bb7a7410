"""All chunks as columns: identity, tree, recency, pins, shards.

A million chunks must cost at most 300 bytes each, so a chunk is a *row number* into arrays, not an object. A row is in
one of these conditions:

    resident   ready == shards                     all bytes in DRAM: a hit, unless DOOMED
    cold       STORED, not resident                all bytes on SSD only; PROMOTING while they are read back
    partial    shard0 >= 0, neither of these       some shard is being written or was never committed; FETCHING while
                                                   it comes from beyond this node
    ghost      shard0 <  0                         bytes gone; key and reason are remembered for a while

Row numbers are reused; whoever keeps one (lease, manifest, reservation, index) must be undone before `free_row`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.types import ChunkKey, Reason

NONE = -1
NO_KEY = ChunkKey(b"")
"""Of a row that is free."""
HITS_MAX = (1 << 32) - 1
GROWTH_MIN = 1_024
GROWTH_SHARE = 32
"""Columns grow by this part of their length, at least by GROWTH_MIN rows."""

DERIVED = 1
"""Attended to something approximate: never reported as exact (invariant 2)."""
TAIL = 2
"""Fewer tokens than a chunk; lives as long as a manifest names it."""
LISTED = 4
"""In a list: the candidates for eviction from DRAM (resident, unpinned) or from SSD (cold), the partial chunks, or the
ghosts."""
DOOMED = 8
"""A miss from now on; its slots are freed with its last pin."""
COMMITTED = 16
"""Was whole at least once: what it is (tokens, derived or exact) is settled, and manifests may name it."""
STORING = 32
"""Being written to SSD; pinned meanwhile."""
STORED = 64
"""Every shard is on SSD."""
DURABLE = 128
"""Its index record is synced: it survives a power cut."""
PROMOTING = 256
"""Waits to be read back from SSD, or is."""
RANKED = 512
"""Listed by its key (`policies.lists.Ranked`): not linked."""
QUEUED = 1024
"""Waits for its write to SSD: has an entry in `State.to_store`."""
TRANSIENT = 2048
"""Its worker keeps the bytes too: what is on SSD and not pinned is not kept in DRAM."""

KEPT = 4096
"""A session or a durable commit named it: it is written to SSD, whatever it is worth."""
FETCHING = 8192
"""Waits to be brought from beyond this node, or is (`remote/sources.py`): partial until it is here."""
FOREIGN = 16384
"""Came from beyond this node, or may have: it is served only while this node hears of forgets (`remote/forgets.py`)."""


class LinkedRows:
    """Ends of a doubly linked list of rows; the links are columns of the table."""

    __slots__ = ("count", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest = NONE
        self.newest = NONE
        self.count = 0

    def __repr__(self) -> str:
        return f"LinkedRows({self.count} rows)"


class Views:
    """Columns of a table as arrays of numpy, which share their memory (see batch.py)."""

    __slots__ = (
        *(
            "namespace",
            "parent",
            "first_child",
            "next_sibling",
            "prev_sibling",
            "newer",
            "older",
            "used_at",
            "born_at",
            "pins",
            "refs",
            "hits",
            "cohort",
            "history",
        ),
        *("tokens", "shard0", "ready", "reserved", "flags", "reason", "maker", "directory"),
        *("shard_segment", "shard_slot", "shard_checksum", "shard_ready"),
    )

    def __init__(self, table: ChunkTable) -> None:
        self.namespace = _view(table.namespace)
        self.parent = _view(table.parent)
        self.first_child = _view(table.first_child)
        self.next_sibling = _view(table.next_sibling)
        self.prev_sibling = _view(table.prev_sibling)
        self.newer = _view(table.newer)
        self.older = _view(table.older)
        self.used_at = _view(table.used_at)
        self.born_at = _view(table.born_at)
        self.pins = _view(table.pins)
        self.refs = _view(table.refs)
        self.hits = _view(table.hits)
        self.cohort = _view(table.cohort)
        self.history = _view(table.history)
        self.tokens = _view(table.tokens)
        self.shard0 = _view(table.shard0)
        self.ready = _view(table.ready)
        self.reserved = _view(table.reserved)
        self.flags = _view(table.flags)
        self.reason = _view(table.reason)
        self.maker = _view(table._maker)
        self.directory = _view(table.directory)
        self.shard_segment = _view(table.shard_segment)
        self.shard_slot = _view(table.shard_slot)
        self.shard_checksum = _view(table.shard_checksum)
        self.shard_ready = _view(table.shard_ready)


def _view(column: array[int] | bytearray) -> npt.NDArray[Any]:
    return np.frombuffer(column, column.typecode if isinstance(column, array) else np.uint8)


class ChunkTable:
    def __init__(self) -> None:
        self._views: Views | None = None
        self.key: list[ChunkKey] = []
        self.namespace = array("i")
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.prev_sibling = array("i")
        self.newer = array("i")
        self.older = array("i")
        self.used_at = array("q")
        self.born_at = array("q")
        self.pins = array("i")
        self.refs = array("i")
        """How many manifest entries name it."""
        self.hits = array("I")
        """At most HITS_MAX are counted."""
        self.cohort = array("i")
        self.history = array("H")
        """For the policy: where it lists the row, and what it knows of its past (0: nothing)."""
        self.tokens = array("i")
        self.shard0 = array("i")
        self.ready = array("H")
        self.reserved = array("H")
        self.flags = array("H")
        self.reason = bytearray()
        self.directory = array("i")
        """Row in the directory of its namespace, NONE if readers are not told of it."""
        self.free_rows = array("i")
        self._rows = 0
        """Rows that were ever used; the columns are longer."""

        self.shard_segment = array("i")
        """Index of the segment in the pool, NONE if the shard has no slot."""
        self.shard_slot = array("i")
        self.shard_checksum = array("Q")
        self.shard_ready = bytearray()
        self.disk_slab = array("i")
        """Index of the slab in the disk pool, NONE if the shard is not on SSD."""
        self.disk_slot = array("i")
        self.disk_generation = array("Q")
        self._shards = 0
        self.free_shards: dict[int, array[int]] = {}
        """By number of shards: where they start."""

        self._maker = array("i")
        """Number of the maker, NONE if nobody said."""
        self._makers: list[bytes] = []
        self._maker_uses: list[int] = []
        self._maker_numbers: dict[bytes, int] = {}
        self._free_makers: list[int] = []

    def __repr__(self) -> str:
        return f"ChunkTable({self.rows_used} of {self._rows} rows)"

    @property
    def rows_used(self) -> int:
        return self._rows - len(self.free_rows)

    @property
    def rows_ever(self) -> int:
        """Row numbers are below this."""
        return self._rows

    @property
    def views(self) -> Views:
        """Valid until the next row or shard is new, and not to be kept until then."""
        if self._views is None:
            self._views = Views(self)
        return self._views

    # ---------------------------------------------------------------------------------------------------- rows

    def new_row(self, namespace: int, key: ChunkKey, now: int) -> int:
        """A ghost row, unlinked from everything."""
        if self.free_rows:
            row = self.free_rows.pop()
        else:
            row = self.new_rows(1)
        self.key[row] = key
        self.namespace[row] = namespace
        self.used_at[row] = self.born_at[row] = now
        return row

    def new_rows(self, count: int) -> int:
        """`count` rows at the end of the columns, to be filled by the caller; the first of them."""
        first = self._rows
        self._rows += count
        if self._rows > len(self.key):
            self._grow_rows(max(GROWTH_MIN, count, len(self.key) // GROWTH_SHARE))
        return first

    def _grow_rows(self, more: int) -> None:
        """All columns at once and in steps, so that the allocator is not asked for each of them again and again."""
        self._views = None
        self.key += [NO_KEY] * more
        for none in (
            self.namespace,
            self.parent,
            self.first_child,
            self.next_sibling,
            self.prev_sibling,
            self.newer,
            self.older,
            self.shard0,
            self._maker,
            self.directory,
            self.cohort,
        ):
            none.extend(array("i", [NONE]) * more)
        for zero in (
            self.used_at,
            self.born_at,
            self.pins,
            self.refs,
            self.hits,
            self.history,
            self.tokens,
            self.ready,
            self.reserved,
            self.flags,
        ):
            zero.frombytes(bytes(more * zero.itemsize))
        self.reason += bytes([Reason.NEVER_SEEN]) * more

    def free_row(self, row: int) -> None:
        assert self.shard0[row] == NONE and not self.pins[row] and not self.refs[row], self.describe(row)
        assert not self.flags[row] & LISTED, self.describe(row)
        assert self.directory[row] == NONE, self.describe(row)
        if self.parent[row] != NONE:
            self.leave_parent(row)
        if self.first_child[row] != NONE:
            self.leave_children(row)
        self.key[row] = NO_KEY
        self.namespace[row] = NONE
        self.hits[row] = 0
        self.history[row] = 0
        self.tokens[row] = 0
        self.set_maker(row, b"")
        self.flags[row] = 0
        self.reason[row] = Reason.NEVER_SEEN
        self.free_rows.append(row)

    def describe(self, row: int) -> str:
        return (
            f"chunk row {row} key {self.key[row].hex()[:16]} namespace {self.namespace[row]} ready {self.ready[row]} "
            f"reserved {self.reserved[row]} pins {self.pins[row]} refs {self.refs[row]} flags {self.flags[row]:#x} "
            f"reason {Reason(self.reason[row]).name} shard0 {self.shard0[row]}"
        )

    # -------------------------------------------------------------------------------------------------- shards

    def give_shards(self, row: int, shards: int) -> None:
        """Give a ghost row room for `shards` shards, none of which has a slot yet."""
        assert self.shard0[row] == NONE, self.describe(row)
        free = self.free_shards.get(shards)
        if free:
            self.shard0[row] = free.pop()
            return
        self.shard0[row] = self.new_shards(shards)

    def new_shards(self, count: int) -> int:
        """Room for `count` shards at the end of their columns; where it starts."""
        start = self._shards
        self._shards += count
        if self._shards > len(self.shard_segment):
            self._views = None
            more = max(GROWTH_MIN, count, len(self.shard_segment) // GROWTH_SHARE)
            for none in (self.shard_segment, self.shard_slot, self.disk_slab, self.disk_slot):
                none.extend(array("i", [NONE]) * more)
            for zero in (self.shard_checksum, self.disk_generation):
                zero.frombytes(bytes(more * zero.itemsize))
            self.shard_ready += bytes(more)
        return start

    def take_shards(self, row: int, shards: int) -> None:
        """The row becomes a ghost; none of its shards may have a slot any more."""
        start = self.shard0[row]
        assert self.ready[row] == 0 and self.reserved[row] == 0, self.describe(row)
        for shard_row in range(start, start + shards):
            assert self.shard_segment[shard_row] == NONE and self.disk_slab[shard_row] == NONE, self.describe(
                row
            )
            # It tells of the bytes, and who gets the place next may be a stranger.
            self.shard_checksum[shard_row] = 0
        self.give_back_shards((start,), shards)
        self.shard0[row] = NONE

    def give_back_shards(self, starts: Sequence[int], shards: int) -> None:
        """For other rows: `shards` at each."""
        self.free_shards.setdefault(shards, array("i")).extend(starts)

    # -------------------------------------------------------------------------------------------------- makers

    def maker(self, row: int) -> bytes:
        """Who computed it; b"" if nobody said."""
        number = self._maker[row]
        return self._makers[number] if number != NONE else b""

    def is_maker(self, maker: bytes) -> bool:
        """Whether some row carries it."""
        return maker in self._maker_numbers

    def rows_of_maker(self, maker: bytes, start: int, end: int) -> Iterator[int]:
        """Of the rows [start, end) those that it made, ghosts included. Rows may be freed meanwhile."""
        number = self._maker_numbers.get(maker, NONE)
        while number != NONE and start < end:
            try:
                row = self._maker.index(number, start, end)
            except ValueError:
                return
            yield row
            start = row + 1

    def set_maker(self, row: int, maker: bytes) -> None:
        """Few makers make many chunks: each is kept once, as long as some chunk is of it."""
        old = self._maker[row]
        if old != NONE:
            self.give_up_maker(old, 1)
            self._maker[row] = NONE
        if maker:
            self._maker[row] = self.number_of_maker(maker, uses=1)

    def give_up_maker(self, number: int, uses: int) -> None:
        """So many rows name it no more."""
        self._maker_uses[number] -= uses
        if not self._maker_uses[number]:
            del self._maker_numbers[self._makers[number]]
            self._makers[number] = b""
            self._free_makers.append(number)

    def number_of_maker(self, maker: bytes, uses: int) -> int:
        """To be put into so many rows."""
        number = self._maker_numbers.get(maker, NONE)
        if number == NONE:
            if self._free_makers:
                number = self._free_makers.pop()
                self._makers[number] = maker
            else:
                number = len(self._makers)
                self._makers.append(maker)
                self._maker_uses.append(0)
            self._maker_numbers[maker] = number
        self._maker_uses[number] += uses
        return number

    # ---------------------------------------------------------------------------------------------------- tree

    def attach(self, row: int, parent: int) -> None:
        """Make `row` a child of `parent`; it has none."""
        assert self.parent[row] == NONE and row != parent, self.describe(row)
        head = self.first_child[parent]
        self.parent[row] = parent
        self.next_sibling[row] = head
        self.prev_sibling[row] = NONE
        if head != NONE:
            self.prev_sibling[head] = row
        self.first_child[parent] = row

    def leave_parent(self, row: int) -> None:
        parent = self.parent[row]
        if parent != NONE:
            before, after = self.prev_sibling[row], self.next_sibling[row]
            if before != NONE:
                self.next_sibling[before] = after
            else:
                self.first_child[parent] = after
            if after != NONE:
                self.prev_sibling[after] = before
            self.parent[row] = self.prev_sibling[row] = self.next_sibling[row] = NONE

    def leave_children(self, row: int) -> None:
        child = self.first_child[row]
        while child != NONE:
            after = self.next_sibling[child]
            self.parent[child] = self.prev_sibling[child] = self.next_sibling[child] = NONE
            child = after
        self.first_child[row] = NONE

    def children(self, row: int) -> Iterator[int]:
        child = self.first_child[row]
        while child != NONE:
            yield child
            child = self.next_sibling[child]

    # ------------------------------------------------------------------------------------------- linked lists

    def link_newest(self, rows: LinkedRows, row: int) -> None:
        assert not self.flags[row] & LISTED, self.describe(row)
        self.older[row] = rows.newest
        self.newer[row] = NONE
        if rows.newest != NONE:
            self.newer[rows.newest] = row
        else:
            rows.oldest = row
        rows.newest = row
        rows.count += 1
        self.flags[row] |= LISTED

    def link_oldest(self, rows: LinkedRows, row: int) -> None:
        assert not self.flags[row] & LISTED, self.describe(row)
        self.newer[row] = rows.oldest
        self.older[row] = NONE
        if rows.oldest != NONE:
            self.older[rows.oldest] = row
        else:
            rows.newest = row
        rows.oldest = row
        rows.count += 1
        self.flags[row] |= LISTED

    def unlink(self, rows: LinkedRows, row: int) -> None:
        assert self.flags[row] & LISTED, self.describe(row)
        older, newer = self.older[row], self.newer[row]
        if older != NONE:
            self.newer[older] = newer
        else:
            rows.oldest = newer
        if newer != NONE:
            self.older[newer] = older
        else:
            rows.newest = older
        self.older[row] = self.newer[row] = NONE
        rows.count -= 1
        self.flags[row] &= ~LISTED

    def walk(self, rows: LinkedRows) -> Iterator[int]:
        """From the oldest to the newest."""
        row = rows.oldest
        while row != NONE:
            yield row
            row = self.newer[row]
