"""Grants to write shards.

OPEN -> COPYING -> committed            visible only once every byte is in and checksummed
OPEN -> FILLING -> OPEN, filled         the bytes of a region are in; a commit makes them visible without another copy
OPEN -> aborted | expired               slots are free again, or quarantined while their owner may still write them
        COPYING, FILLING -> late -> given back
                                        the copy missed its deadline, or nobody wants it any more; its targets are
                                        quarantined until it returns
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvstore.core.events import Ticket
from kvstore.types import Millis, NamespaceId, OpId, ReservationId, Wait, WorkerId


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
    """Of the commit or fill whose copy runs."""
    filling: bool = False
    """It is a fill's."""
    wait: Wait = Wait.VISIBLE
    op: OpId = OpId(0)
    filled: tuple[int, ...] | None = None
    """Checksum of each granted (row, shard) that a fill has put there, in grant order."""

    @property
    def busy(self) -> bool:
        """The daemon is writing the slots."""
        return self.ticket is not None

    @property
    def committing(self) -> bool:
        return self.busy and not self.filling

    def __repr__(self) -> str:
        state = "open" if self.filled is None else "filled"
        if self.busy:
            state = f"{'filling' if self.filling else 'copying'} (op {self.op})"
        what = f"{len(self.rows)} chunks x {len(self.shards)} shards"
        return f"Reservation({self.id} of worker {self.worker}: {what}, {state})"
