"""How fast the callers of one tenant may go over TCP: token buckets, one second deep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvstore.errors import Exhausted
from kvstore.transport.identities import Rates

WAIT_S_MAX = 30.0
"""Longest that bytes are held up; the call's own deadline ends it earlier."""


class Bucket:
    """Holds what comes in a second, but at least 1. It may be overdrawn: then whoever comes next waits."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._depth = max(1.0, rate)
        self._level = self._depth
        self._at = clock()

    def take(self, amount: float) -> float:
        """Seconds until it is out of debt: 0 where there was enough."""
        now = self._clock()
        self._level = min(self._depth, self._level + (now - self._at) * self.rate) - amount
        self._at = now
        return max(0.0, -self._level / self.rate)

    def full(self) -> bool:
        return self._level + (self._clock() - self._at) * self.rate >= 1.0


class TenantRates:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, Rates] = {}
        self._calls: dict[str, Bucket] = {}
        self._bytes: dict[str, Bucket] = {}

    def __repr__(self) -> str:
        return f"TenantRates({self._limits})"

    def set(self, limits: dict[str, Rates]) -> None:
        """Tenants that are not named go as fast as they can. A bucket whose rate stays keeps its level."""
        self._limits = dict(limits)
        for buckets, kind in ((self._calls, "calls_per_s"), (self._bytes, "bytes_per_s")):
            for tenant in list(buckets):
                if tenant not in limits or getattr(limits[tenant], kind) != buckets[tenant].rate:
                    del buckets[tenant]

    def call(self, tenant: str) -> None:
        """Count one call. Raises Exhausted when the tenant has none left."""
        rate = self._limits[tenant].calls_per_s if tenant in self._limits else 0.0
        if not rate:
            return
        bucket = self._calls.setdefault(tenant, Bucket(rate, self._clock))
        if not bucket.full():
            raise Exhausted(
                f"tenant {tenant} may make {rate:g} calls a second",
                field="calls_per_s",
                remedy="try again later",
            )
        bucket.take(1)

    async def carry(self, tenant: str, size: int) -> None:
        """Count `size` bytes, and wait until the tenant may go on."""
        rate = self._limits[tenant].bytes_per_s if tenant in self._limits else 0.0
        if not rate:
            return
        wait_s = self._bytes.setdefault(tenant, Bucket(rate, self._clock)).take(size)
        if wait_s:
            await asyncio.sleep(min(wait_s, WAIT_S_MAX))
