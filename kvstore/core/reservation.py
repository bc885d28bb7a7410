"""Grants to write shards.

OPEN -> COPYING -> committed            visible only once every byte is in and checksummed
OPEN -> aborted | expired               slots are free again, or quarantined while their owner may still write them
        COPYING -> late -> given back   the copy missed its deadline; its targets are quarantined until it returns
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
    """Of the commit that is being copied."""
    wait: Wait = Wait.VISIBLE
    op: OpId = OpId(0)

    @property
    def copying(self) -> bool:
        return self.ticket is not None

    def __repr__(self) -> str:
        state = f"copying (op {self.op})" if self.copying else "open"
        what = f"{len(self.rows)} chunks x {len(self.shards)} shards"
        return f"Reservation({self.id} of worker {self.worker}: {what}, {state})"
