"""Grants to write shards.

OPEN -> COPYING -> committed            visible only once every byte is in and checksummed
OPEN -> FILLING -> OPEN, filled         bytes are in, of all shards or of some; a commit makes them visible without
                                        another copy, and waits for the fills of parts that run
OPEN -> aborted | expired               slots are free again, or quarantined while their owner may still write them
        COPYING, FILLING -> late -> given back
                                        the copy missed its deadline, or nobody wants it any more; its targets are
                                        quarantined until it returns
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.events import Ticket
from kvstore.types import GrantResult, Millis, NamespaceId, OpId, ReservationId, Wait, WorkerId


@dataclass(frozen=True, slots=True)
class Copying:
    """A copy that runs."""

    numbers: Sequence[int]
    """Which of the granted (row, shard) are written, in grant order."""
    ticket: Ticket | None
    """Of a fill; None: it is the commit's."""
    region: bool = False
    """Its bytes come out of a region."""


@dataclass(slots=True, eq=False)
class Reservation:
    id: ReservationId
    worker: WorkerId
    namespace: NamespaceId
    expires_at: Millis
    reserved_bytes: int = 0
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Granted chunks, in request order."""
    shards: tuple[int, ...] = ()
    """Shard numbers of each of them."""
    maker: bytes = b""
    ticket: Ticket | None = None
    """Of the commit, once it waits for its copies."""
    grants: tuple[GrantResult, ...] = ()
    """Of a Save, which is answered with them, too."""
    wait: Wait = Wait.VISIBLE
    failed: str = ""
    """Why the commit will fail when its last copy has returned."""
    copies: dict[OpId, Copying] = field(default_factory=dict)
    """That run, no two of them in one slot."""
    filled: dict[int, int] = field(default_factory=dict)
    """Checksum of each granted (row, shard), by its number in grant order, whose bytes are in."""

    @property
    def busy(self) -> bool:
        """The daemon is writing the slots."""
        return bool(self.copies)

    def being_filled(self) -> set[int]:
        """Which of the granted (row, shard), by their numbers, some copy is writing."""
        return {number for copy in self.copies.values() for number in copy.numbers}

    @property
    def committing(self) -> bool:
        return self.ticket is not None

    def __repr__(self) -> str:
        state = "committing" if self.committing else "open"
        if self.busy:
            state += f", ops {list(self.copies)} run"
        what = f"{len(self.rows)} chunks x {len(self.shards)} shards"
        return f"Reservation({self.id} of worker {self.worker}: {what}, {state})"
