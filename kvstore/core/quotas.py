"""Byte quotas: how much of each tier of this node one tenant may use.

DRAM   slots that are not free, in segments of the tenant's namespaces
SSD    slots of its chunks in slab files
REMOTE bytes that this node has put there (`remote/saves.py` counts them)

Who is at a quota gives way to itself: another chunk of the same tenant leaves that tier for the new one, in the order
of the policy. Where none can go (all are pinned, or on their way to the SSD) the new one is refused, and the answer
says QUOTA. What others use changes nothing of this, so a quota protects them, and promises its tenant no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvstore.core.limits import Limits
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Pool
from kvstore.types import Tier

EVERYBODY = "*"
"""In a table of quotas: every tenant that it does not name."""
NO_QUOTA = 1 << 62
SETTINGS = {Tier.DRAM: "dram_quotas", Tier.SSD: "ssd_quotas", Tier.REMOTE: "remote_quotas"}


class Quotas:
    def __init__(self, limits: Limits, arena: Pool, counters: Counter[str]) -> None:
        self._arena = arena
        self._tables: dict[Tier, Mapping[str, int]] = {
            Tier.DRAM: limits.dram_quotas,
            Tier.SSD: limits.ssd_quotas,
            Tier.REMOTE: limits.remote_quotas,
        }
        # A counter that begins with its first refusal raises no alert then.
        if limits.dram_quotas:
            counters["dram_quota_refusals"] += 0
        if limits.ssd_quotas:
            counters["ssd_quota_refusals"] += 0
        self.namespaces: dict[str, list[Namespace]] = {}
        """By tenant."""

    def __repr__(self) -> str:
        return (
            f"Quotas({', '.join(f'{SETTINGS[tier]} {len(table)}' for tier, table in self._tables.items())})"
        )

    def opened(self, namespace: Namespace) -> None:
        self.namespaces.setdefault(namespace.tenant, []).append(namespace)

    def gone(self, namespaces: Iterable[Namespace]) -> None:
        for namespace in namespaces:
            others = self.namespaces[namespace.tenant]
            others.remove(namespace)
            if not others:
                del self.namespaces[namespace.tenant]

    def of(self, tier: Tier, tenant: str) -> int:
        """Bytes; NO_QUOTA where nobody set one."""
        table = self._tables[tier]
        return table.get(tenant, table.get(EVERYBODY, NO_QUOTA)) if table else NO_QUOTA

    def has(self, tier: Tier, tenant: str) -> bool:
        return self.of(tier, tenant) < NO_QUOTA

    def dram_left(self, tenant: str) -> int:
        """How many bytes of slots the tenant may take."""
        quota = self.of(Tier.DRAM, tenant)
        return quota if quota == NO_QUOTA else quota - self.dram_bytes(tenant)

    def ssd_left(self, tenant: str) -> int:
        quota = self.of(Tier.SSD, tenant)
        return quota if quota == NO_QUOTA else quota - self.ssd_bytes(tenant)

    def dram_bytes(self, tenant: str) -> int:
        """Of slots that are not free."""
        pool = self._arena
        used = 0
        for namespace in self.namespaces.get(tenant, ()):
            for size in set(namespace.slot_bytes):
                slab = pool.classes.get((namespace.id, size))
                if slab is not None:
                    used += size * (len(slab.segments) * pool.slots_of(size) - slab.free)
        return used

    def ssd_bytes(self, tenant: str) -> int:
        """Of slots in slab files."""
        return sum(mine.below * mine.ssd_chunk_bytes for mine in self.namespaces.get(tenant, ()))
