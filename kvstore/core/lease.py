"""Read pins with an owner and an expiry.

open -> released                       by its owner, or by the death of the whole engine group
open -> expired -> released            no renewal, no new copies; pins stay while nobody wants the slots
                -> revoked             the slots were wanted: generations move on, so any copy under way is void
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field

from kvstore.core.workers import EngineGroup
from kvstore.types import LeaseId, Millis, NamespaceId, WorkerId

CLOSED_IN_HEAP_MAX = 1_024


@dataclass(slots=True, eq=False)
class Lease:
    id: LeaseId
    group: EngineGroup
    worker: WorkerId
    """Who acquired it (any member of the group may renew or release it)."""
    namespace: NamespaceId
    expires_at: Millis
    rows: array[int] = field(default_factory=lambda: array("i"))
    expired: bool = False

    def __repr__(self) -> str:
        state = "expired" if self.expired else f"until {self.expires_at}"
        return f"Lease({self.id} of {self.group.name}: {len(self.rows)} chunks, {state})"


class LeaseBook:
    def __init__(self) -> None:
        self.leases: dict[LeaseId, Lease] = {}
        self.expired: dict[NamespaceId, dict[LeaseId, Lease]] = {}
        """Expired and not yet released or revoked, oldest first."""
        self._by_expiry: list[tuple[Millis, LeaseId]] = []
        """A heap with one entry of each open lease, at its expiry or earlier (renewals do not move it)."""
        self._next_id = 1

    def __repr__(self) -> str:
        return f"LeaseBook({len(self.leases)} leases, {sum(map(len, self.expired.values()))} of them expired)"

    def open(self, group: EngineGroup, worker: WorkerId, namespace: NamespaceId, expires_at: Millis) -> Lease:
        lease = Lease(LeaseId(self._next_id), group, worker, namespace, expires_at)
        self._next_id += 1
        self.leases[lease.id] = lease
        group.leases.add(lease.id)
        heapq.heappush(self._by_expiry, (expires_at, lease.id))
        if len(self._by_expiry) > 2 * len(self.leases) + CLOSED_IN_HEAP_MAX:
            self._by_expiry = [
                (other.expires_at, other.id) for other in self.leases.values() if not other.expired
            ]
            heapq.heapify(self._by_expiry)
        return lease

    def renew(self, lease: Lease, expires_at: Millis) -> None:
        """Only ever later; an expired lease stays expired."""
        assert not lease.expired, lease
        lease.expires_at = max(lease.expires_at, expires_at)

    def expire(self, now: Millis) -> int:
        """Mark what is over; returns how many."""
        count = 0
        while self._by_expiry and self._by_expiry[0][0] <= now:
            at, lease_id = heapq.heappop(self._by_expiry)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.expires_at > at:  # renewed since
                heapq.heappush(self._by_expiry, (lease.expires_at, lease_id))
            elif lease is not None:
                lease.expired = True
                self.expired.setdefault(lease.namespace, {})[lease_id] = lease
                count += 1
        return count

    def close(self, lease: Lease) -> None:
        del self.leases[lease.id]
        lease.group.leases.discard(lease.id)
        if lease.expired:
            waiting = self.expired[lease.namespace]
            del waiting[lease.id]
            if not waiting:
                del self.expired[lease.namespace]

    def revocable(self, namespace: NamespaceId, now: Millis, grace_ms: int) -> Lease | None:
        """The lease that expired first in `namespace`, if its grace is over."""
        lease = next(iter(self.expired.get(namespace, {}).values()), None)
        return lease if lease is not None and lease.expires_at + grace_ms <= now else None
