"""All chunks as columns: identity, tree, recency, pins, shards.

A million chunks must cost at most 300 bytes each, so a chunk is a *row number* into arrays, not an object. A row is in
one of these conditions:

    resident   ready == shards                     all bytes in DRAM: a hit, unless DOOMED
    cold       STORED, not resident                all bytes on SSD only; RISING while they are read back
    partial    shard0 >= 0, neither of these       some shard is being written or was never committed
    ghost      shard0 <  0                         bytes gone; key and reason are remembered for a while

Row numbers are reused; whoever keeps one (lease, manifest, reservation, index) must be undone before `free_row`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.types import ChunkKey, Reason

NONE = -1

DERIVED = 1
"""Attended to something approximate: never reported as exact (invariant 2)."""
TAIL = 2
"""Fewer tokens than a chunk; lives as long as a manifest names it."""
LISTED = 4
"""Linked in a list: the candidates for eviction from DRAM (resident, unpinned) or from SSD (cold), the partial chunks,
or the ghosts."""
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
RISING = 256
"""Waits to be read back from SSD, or is."""
WANTED = 512
"""Linked among the chunks that queued jobs need, not in the recency list."""


class LinkedRows:
    """Ends of a doubly linked list of rows; the links are columns of the table."""

    __slots__ = ("count", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest = NONE
        self.newest = NONE
        self.count = 0

    def __repr__(self) -> str:
        return f"LinkedRows({self.count} rows)"


class ChunkTable:
    def __init__(self) -> None:
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
        self.tokens = array("i")
        self.maker = array("i")
        self.shard0 = array("i")
        self.ready = array("H")
        self.reserved = array("H")
        self.flags = array("H")
        self.reason = bytearray()
        self.free_rows = array("i")

        self.shard_segment = array("i")
        """Index of the segment in the pool, NONE if the shard has no slot."""
        self.shard_slot = array("i")
        self.shard_checksum = array("Q")
        self.shard_ready = bytearray()
        self.disk_slab = array("i")
        """Index of the slab in the disk pool, NONE if the shard is not on SSD."""
        self.disk_slot = array("i")
        self.disk_generation = array("Q")
        self._free_shards: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return f"ChunkTable({self.rows_used} of {len(self.key)} rows)"

    @property
    def rows_used(self) -> int:
        return len(self.key) - len(self.free_rows)

    # ---------------------------------------------------------------------------------------------------- rows

    def new_row(self, namespace: int, key: ChunkKey, now: int) -> int:
        """A ghost row, unlinked from everything."""
        if self.free_rows:
            row = self.free_rows.pop()
            self.key[row] = key
            self.namespace[row] = namespace
            self.used_at[row] = self.born_at[row] = now
            return row
        row = len(self.key)
        self.key.append(key)
        self.namespace.append(namespace)
        for column in (
            self.parent,
            self.first_child,
            self.next_sibling,
            self.prev_sibling,
            self.newer,
            self.older,
        ):
            column.append(NONE)
        self.used_at.append(now)
        self.born_at.append(now)
        self.shard0.append(NONE)
        self.maker.append(NONE)
        for counter in (self.pins, self.refs, self.hits, self.tokens, self.ready, self.reserved):
            counter.append(0)
        self.flags.append(0)
        self.reason.append(Reason.NEVER_SEEN)
        return row

    def free_row(self, row: int) -> None:
        assert self.shard0[row] == NONE and not self.pins[row] and not self.refs[row], self.describe(row)
        assert not self.flags[row] & LISTED, self.describe(row)
        self.leave_parent(row)
        self.leave_children(row)
        self.key[row] = ChunkKey(b"")
        self.namespace[row] = NONE
        self.hits[row] = 0
        self.tokens[row] = 0
        self.maker[row] = NONE
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
        free = self._free_shards.get(shards)
        if free:
            self.shard0[row] = free.pop()
            return
        self.shard0[row] = len(self.shard_segment)
        for _ in range(shards):
            self.shard_segment.append(NONE)
            self.shard_slot.append(NONE)
            self.shard_checksum.append(0)
            self.shard_ready.append(0)
            self.disk_slab.append(NONE)
            self.disk_slot.append(NONE)
            self.disk_generation.append(0)

    def take_shards(self, row: int, shards: int) -> None:
        """The row becomes a ghost; none of its shards may have a slot any more."""
        start = self.shard0[row]
        assert self.ready[row] == 0 and self.reserved[row] == 0, self.describe(row)
        for place in range(start, start + shards):
            assert self.shard_segment[place] == NONE and self.disk_slab[place] == NONE, self.describe(row)
        self._free_shards.setdefault(shards, []).append(start)
        self.shard0[row] = NONE

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
