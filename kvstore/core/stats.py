"""What an operator sees, as plain numbers; a tenant sees its own, an admin everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.core.pool import Phase
from kvstore.core.requests.queue import Queue
from kvstore.core.requests.resident import Residents
from kvstore.core.state import State
from kvstore.core.transfers import Transfers
from kvstore.core.workers import Worker
from kvstore.types import DiskState, Reason, SlotState, Tier


def stats(
    state: State, worker: Worker, residents: Residents, remote_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """{"arena": {…}, "ssd": {…}, "pools": [{…}], "namespaces": [{…}], "tenants": [{…}], "counters": {…}, "gauges": {…}}

    In every pool free + reserved + ready + quarantined = capacity. Counters and gauges of the whole daemon are for
    admins: another tenant's activity shows in them. `remote_bytes`: by tenant, what this node has put into the REMOTE
    store.
    """
    seen = {n.id: n for n in state.namespaces.values() if worker.admin or n.tenant == worker.tenant}
    segments: dict[int, int] = {}
    pools = []
    for (namespace_id, slot_bytes), slab in sorted(state.pool.classes.items()):
        segments[namespace_id] = segments.get(namespace_id, 0) + len(slab.segments)
        if namespace_id in seen:
            counts = [sum(segment.counts[kind] for segment in slab.segments.values()) for kind in SlotState]
            pools.append(
                {
                    "namespace_id": namespace_id,
                    "slot_bytes": slot_bytes,
                    "segments": len(slab.segments),
                    "capacity": sum(segment.capacity for segment in slab.segments.values()),
                    "free": counts[SlotState.FREE],
                    "reserved": counts[SlotState.RESERVED],
                    "ready": counts[SlotState.READY],
                    "quarantined": counts[SlotState.QUARANTINED],
                }
            )
    namespaces = [
        {
            "namespace_id": namespace.id,
            "tenant": namespace.tenant,
            "model": namespace.spec.model,
            "weights_epoch": namespace.spec.weights_epoch,
            "spec": namespace.spec,
            "salt": namespace.salt if namespace.tenant == worker.tenant else b"",
            "chunk_tokens": namespace.spec.chunk_tokens,
            "chunk_bytes": namespace.payload_bytes,
            "chunks": namespace.visible,
            "incomplete": namespace.partial,
            "cold_chunks": namespace.cold,
            "cold_bytes": namespace.cold * namespace.payload_bytes,
            "ssd_hits": namespace.ssd_hits,
            "worker_chunks": residents.count(namespace.id),
            "opened": namespace.opened,
            "resident_bytes": namespace.visible * namespace.payload_bytes,
            "pinned_bytes": namespace.pinned * namespace.chunk_bytes,
            "sessions": namespace.sessions,
            "lookups": sum(namespace.lookups),
            "hits": namespace.lookups[Reason.NONE],
            "segments": segments.get(namespace.id, 0),
            "by_reason": {
                Reason(i).name.lower(): count for i, count in enumerate(namespace.lookups) if count
            },
        }
        for namespace in seen.values()
    ]
    bytes_each = state.pool.segment_bytes
    phases = [segment.phase for segment in state.pool.segments]
    return {
        "arena": {
            "bytes": bytes_each * len(phases),
            "ready_bytes": bytes_each * sum(phase in (Phase.IDLE, Phase.ASSIGNED) for phase in phases),
            "assigned_bytes": bytes_each * phases.count(Phase.ASSIGNED),
            "retiring_bytes": bytes_each * phases.count(Phase.RETIRING),
            "protection": state.limits.protection.value,
            "segment_bytes": bytes_each,
        },
        "ssd": _cold_tier(state),
        "pools": pools,
        "namespaces": namespaces,
        "tenants": [
            _tenant(state, tenant, remote_bytes) for tenant in sorted({row.tenant for row in seen.values()})
        ],
        "counters": dict(state.counters) if worker.admin else {},
        "gauges": {
            "workers": sum(worker_id > 0 for worker_id in state.workers),  # the daemon's own are below
            "engine_groups": len({worker.group for worker in state.workers.values()}),
            "leases": len(state.leases.leases),
            "leases_expired": sum(map(len, state.leases.expired.values())),
            "reservations": len(state.reservations),
            "ghosts": state.ghosts.count,
            "chunk_rows": state.chunks.rows_used,
            "quarantined_listed": len(state.quarantine.entries),
            "waits": sum(map(len, state.waits.values())),
        }
        if worker.admin
        else {},
    }


def _tenant(state: State, tenant: str, remote_bytes: Mapping[str, int]) -> dict[str, Any]:
    """What a tenant has in each tier, and its quota there; 0: none."""
    quotas = state.quotas
    used = {
        Tier.DRAM: quotas.dram_bytes(tenant),
        Tier.SSD: quotas.ssd_bytes(tenant),
        Tier.REMOTE: remote_bytes.get(tenant, 0),
    }
    row: dict[str, Any] = {"tenant": tenant}
    for tier, size in used.items():
        name = tier.name.lower()
        row[f"{name}_bytes"] = size
        row[f"{name}_quota"] = quotas.of(tier, tenant) if quotas.has(tier, tenant) else 0
    return row


def traffic(queue: Queue, transfers: Transfers) -> dict[str, float]:
    """Gauges for admins: the queue and how far its windows reach, in jobs, and the chunks that are on their way between
    the tiers. A chunk that waits for its read is counted with those that are being read, and may be gone meanwhile."""
    reading = sum(len(read.rows) for read in transfers.reads.values())
    return {
        "queued_jobs": queue.count,
        "prefetch_window_jobs": sum(ahead for ahead, _ in map(queue.reach, queue.state.jobs.windows)),
        "eviction_window_jobs": sum(kept for _, kept in map(queue.reach, queue.state.jobs.windows)),
        "chunks_being_promoted": reading + len(transfers.demanded) + len(transfers.foreseen),
        "chunks_being_stored": sum(len(write.rows) for write in transfers.writes.values()),
    }


def _cold_tier(state: State) -> dict[str, Any]:
    if state.disk_state is DiskState.ABSENT:
        return {"state": "absent"}
    return {
        "state": state.disk_state.name.lower(),
        "why": state.disk_why,
        "full": state.disk_full,
        "to_store": len(state.to_store),
        "cold_chunks": state.cold.count,
        **state.cold_tier.stats(),
    }
