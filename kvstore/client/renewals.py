"""The open leases of one connection: when to renew each, and how long each lasts by our own clock."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol, TypeVar

RENEW_FRACTION = 1 / 3
"""Of its time to live that passes before a lease is renewed: two renewals may get lost."""


T = TypeVar("T")


def alive(things: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """Its values. Other threads may change it meanwhile, as they may not while one goes through it, or a WeakSet."""
    return [thing for reference in things.valuerefs() if (thing := reference()) is not None]


class Lease(Protocol):
    """What is renewed: a `ReadLease`. Times are monotonic seconds."""

    lease_id: int
    ttl_ms: int
    granted_at: float
    expires_at: float

    def release(self) -> None: ...


class Renewals:
    """Holds leases weakly: one that was dropped without `release()` is not kept alive at the daemon either."""

    def __init__(self) -> None:
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._renew_at: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Renewals({len(self._renew_at)} leases)"

    def add(self, lease: Lease) -> float:
        """Returns when it is due for the first time."""
        due = lease.granted_at + lease.ttl_ms / 1000 * RENEW_FRACTION
        self._leases[lease.lease_id] = lease
        self._renew_at[lease.lease_id] = due
        return due

    def remove(self, lease: int) -> None:
        """Harmless when it is not there. Takes no lock, so destructors may call it."""
        self._renew_at.pop(lease, None)

    def next_due(self) -> float:
        return min(list(self._renew_at.values()), default=float("inf"))

    def due(self, now: float) -> Iterable[tuple[int, list[int]]]:
        """(ttl in ms, leases) to be renewed together now."""
        by_ttl: dict[int, list[int]] = defaultdict(list)
        for number, at in list(self._renew_at.items()):
            lease = self._leases.get(number)
            if at > now:
                continue
            if lease is None or now >= lease.expires_at:  # dropped, or void: a renewal cannot bring it back
                self.remove(number)
                continue
            by_ttl[lease.ttl_ms].append(number)
            if number in self._renew_at:
                self._renew_at[number] = now + lease.ttl_ms / 1000 * RENEW_FRACTION
        return by_ttl.items()

    def renewed(self, number: int, sent_at: float, granted_ms: int) -> None:
        """The daemon's answer to a renewal that was sent at `sent_at`; 0 ms: it is gone."""
        lease = self._leases.get(number)
        if lease is None:
            return
        if granted_ms:
            lease.expires_at = max(lease.expires_at, sent_at + granted_ms / 1000)
        else:
            self.void((number,))

    def void(self, leases: Iterable[int]) -> None:
        """The daemon took these back: nothing may be loaded under them any more."""
        for number in leases:
            self.remove(number)
            lease = self._leases.pop(number, None)  # out, so that a late renewal cannot revive it
            if lease is not None:
                lease.expires_at = 0.0

    def open_leases(self) -> list[Lease]:
        return alive(self._leases)
