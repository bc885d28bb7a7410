"""When leases are renewed, and how long each lasts by our own clock."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.client.renewals import Renewals


@dataclass(eq=False)
class Lease:
    lease_id: int
    ttl_ms: int
    granted_at: float = 100.0

    def __post_init__(self) -> None:
        self.expires_at = self.granted_at + self.ttl_ms / 1000


@pytest.fixture
def renewals() -> Any:
    return Renewals()


def due(renewals: Renewals, now: float) -> dict[int, list[int]]:
    return dict(renewals.due(now))


def test_due_after_a_third_of_its_time_and_again(renewals: Any) -> None:
    lease, brief = Lease(1, 9_000), Lease(2, 300)
    assert renewals.add(lease) == pytest.approx(103.0)
    assert renewals.next_due() == pytest.approx(103.0)
    assert renewals.add(brief) == pytest.approx(100.1)
    assert renewals.next_due() == pytest.approx(100.1)
    assert due(renewals, 100.05) == {}
    assert due(renewals, 100.2) == {300: [2]}
    renewals.renewed(2, sent_at=100.2, granted_ms=300)
    assert brief.expires_at == pytest.approx(100.5)
    assert due(renewals, 100.25) == {}
    brief.expires_at = 1e9
    assert due(renewals, 103.1) == {300: [2], 9_000: [1]}


def test_equal_times_go_together(renewals: Any) -> None:
    leases = [Lease(number, 3_000) for number in range(3)]
    for lease in leases:
        renewals.add(lease)
    assert due(renewals, 101.0) == {3_000: [0, 1, 2]}


def test_an_expired_lease_is_not_renewed(renewals: Any) -> None:
    lease = Lease(1, 3_000)
    renewals.add(lease)
    assert due(renewals, 103.0) == {}
    assert renewals.next_due() == float("inf")


def test_a_dropped_lease_is_not_renewed(renewals: Any) -> None:
    lease = Lease(1, 3_000)
    renewals.add(lease)
    del lease
    gc.collect()
    assert due(renewals, 101.5) == {}
    assert renewals.open_leases() == []


def test_a_released_lease_is_not_renewed(renewals: Any) -> None:
    lease = Lease(1, 3_000)
    renewals.add(lease)
    renewals.remove(1)
    renewals.remove(1)
    assert due(renewals, 101.5) == {}


def test_a_renewal_never_shortens(renewals: Any) -> None:
    lease = Lease(1, 3_000)
    renewals.add(lease)
    renewals.renewed(1, sent_at=99.0, granted_ms=3_000)
    assert lease.expires_at == pytest.approx(103.0)


def test_void_for_good(renewals: Any) -> None:
    refused, revoked = Lease(1, 3_000), Lease(2, 3_000)
    for lease in (refused, revoked):
        renewals.add(lease)
    renewals.renewed(1, sent_at=101.0, granted_ms=0)
    renewals.void([2, 77])
    assert refused.expires_at == revoked.expires_at == 0.0
    for number in (1, 2):
        renewals.renewed(number, sent_at=101.0, granted_ms=3_000)
    assert refused.expires_at == revoked.expires_at == 0.0, "a late answer revives nothing"
    assert due(renewals, 101.5) == {}


def test_open_leases_can_be_asked_for_while_others_come_and_go() -> None:
    """Close asks, and an error would leave everything else open."""
    renewals, stop = Renewals(), threading.Event()
    interval = sys.getswitchinterval()

    def come_and_go() -> None:
        kept: list[Any] = []
        for number in itertools.count():
            kept = [*kept[-100:], Lease(number, 1000)]
            renewals._leases[number] = kept[-1]
            if stop.is_set():
                return

    thread = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(8000):
            renewals.open_leases()
    finally:
        stop.set()
        thread.join(20)
        sys.setswitchinterval(interval)
