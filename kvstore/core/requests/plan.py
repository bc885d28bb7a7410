"""What queued jobs need and how far the two windows over them reach: brought up to date, and anew from nothing.

`Planner.update` looks again at the jobs that changed, and moves the ends of the windows. `anew` is the same in full,
one job after the other: nobody but tests, benchmarks and the simulator call it, which hold both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

from kvstore.core.bulk import batch
from kvstore.core.chunks import DOOMED, NONE, STORED
from kvstore.core.cold_tier import ColdTier
from kvstore.core.jobs import PLACE_MAX, Job, Window
from kvstore.core.manifests import Manifest
from kvstore.core.namespaces import Namespace
from kvstore.core.state import State
from kvstore.types import ChunkKey, DiskState

PLAN_ROWS_MAX = 1 << 19
"""Chunks of queued jobs that are kept in order, of all tenants: each takes some 500 bytes. Those of one manifest count
once, however many jobs name it."""


@dataclass(slots=True)
class Plan:
    """Of all tenants' queues."""

    rank: dict[int, int] = field(default_factory=dict)
    """By chunk row."""
    kept: dict[str, int] = field(default_factory=dict)
    """Jobs in the eviction window, of each tenant with jobs;"""
    ahead: dict[str, int] = field(default_factory=dict)
    """in the prefetch window."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What one tenant's windows may hold."""

    ahead_bytes: int
    kept_bytes: int
    looked_at: int


class Planner:
    def __init__(self, state: State, tier: ColdTier) -> None:
        self._state = state
        self._tier = tier
        self._off = False
        """What was on SSD alone could not be had when it was last looked at."""

    @property
    def is_due(self) -> bool:
        """Whether an update would find something to do."""
        jobs, off = self._state.jobs, self._state.disk_state is DiskState.OFF
        return bool(jobs.stale) or jobs.changed or (bool(jobs.windows) and (off or self._off))

    def update(self) -> None:
        state, jobs = self._state, self._state.jobs
        off = state.disk_state is DiskState.OFF
        if off or self._off:
            jobs.doubt_all()
        self._off = off
        jobs.changed = False
        self._look_again()
        windows = list(jobs.windows.values())
        while True:
            sharing = _sharing(windows)
            for tenant, window in jobs.windows.items():
                self._reach(window, self._shares(tenant, sharing, len(windows)))
            # A share has room for one job's chunks at least: that a tenant has any does not depend on its size.
            if sharing == _sharing(windows):
                return

    def _shares(self, tenant: str, sharing: int, tenants: int) -> Shares:
        """Tenants with jobs that have chunks have equal parts of the memory: neither a long queue of one nor an empty
        one shortens another's windows. What a tenant's record takes from it, others do not get as a window."""
        limits = self._state.limits
        share = self._state.jobs.shares.get(tenant, 1.0) / max(1, sharing)
        return Shares(
            int(limits.arena_bytes * limits.prefetch_share_max * share),
            int((limits.arena_bytes + self._tier.bytes_max) * share),
            PLAN_ROWS_MAX // max(1, tenants),
        )

    def _look_again(self) -> None:
        jobs = self._state.jobs
        looking: dict[Job, None] = {}
        while jobs.stale:
            job, _ = jobs.stale.popitem()
            if job not in looking:
                jobs.strip(job)
                jobs.leave_manifest(job)
                looking[job] = None
        for job in sorted(looking, key=lambda job: job.label):
            self._fill(job)

    def _fill(self, job: Job) -> None:
        state, jobs = self._state, self._state.jobs
        namespace = state.namespaces.get(job.namespace)
        if namespace is None:
            return
        manifest = _manifest(state, job)
        if manifest is None or jobs.join_manifest(job, manifest):
            jobs.fill(job, *look_up(state, namespace, job, manifest))

    def _reach(self, window: Window, shares: Shares) -> None:
        """What does not fit ends the window: a job behind it must not push out one that is nearer."""
        jobs = self._state.jobs
        while window.reach:
            last = window.job(window.reach - 1)
            size = last.owned * last.chunk_bytes
            if (
                window.bytes - size <= shares.kept_bytes
                and window.looked_at - last.looked_at <= shares.looked_at
            ):
                break
            jobs.cut(window)
        while not _is_over(window, shares) and window.reach < len(window.labels):
            self._fill(jobs.enter(window))
        jobs.set_edge(window, window.job(window.reach - 1) if _is_over(window, shares) else None)
        jobs.set_ahead(window, shares.ahead_bytes)

    def check(self) -> None:
        """If nothing changed since the last update: that it is what a plan anew would be. Raises AssertionError."""
        jobs = self._state.jobs
        jobs.check()
        if self.is_due or jobs.moves.ranks:
            return
        plan = self.anew()
        ahead = {tenant: window.ahead for tenant, window in jobs.windows.items()}
        kept = {tenant: window.kept for tenant, window in jobs.windows.items()}
        assert (ahead, kept) == (plan.ahead, plan.kept), (ahead, kept, plan)
        if self._state.policy.uses_ranks:
            rank = self._state.policy.rank
            assert rank == plan.rank, {row: (rank.get(row), plan.rank.get(row)) for row in rank | plan.rank}

    # ------------------------------------------------------------------------------------------------------ in full

    def anew(self) -> Plan:
        state = self._state
        windows = state.jobs.windows
        found = {tenant: self._chunks_of(window) for tenant, window in windows.items()}
        looked_at_max = self._shares("", 1, len(windows)).looked_at
        sharing = 0
        for tenant, jobs in found.items():
            looked_at = 0
            if windows[tenant].is_empty:
                continue
            for _, rows, looked in jobs:
                looked_at += looked
                if rows:
                    sharing += 1
                if rows or looked_at > looked_at_max:
                    break
        plan = Plan()
        for tenant, jobs in found.items():
            shares = self._shares(tenant, sharing, len(windows))
            used = handed_over = looked_at = ahead = kept = 0
            for job, rows, looked in jobs:
                new = {row: job.label + place for place, row in enumerate(rows) if row not in plan.rank}
                used += len(new) * job.chunk_bytes
                handed_over += len(new) * job.chunk_bytes * job.handed_over
                looked_at += looked
                if used > shares.kept_bytes or looked_at > shares.looked_at:
                    break
                plan.rank.update(new)
                kept += 1
                ahead += used - handed_over <= shares.ahead_bytes
            plan.kept[tenant], plan.ahead[tenant] = kept, ahead
        return plan

    def _chunks_of(self, window: Window) -> list[tuple[Job, list[int], int]]:
        """All jobs in order, with the chunks that they need and how many were looked at."""
        state = self._state
        found: list[tuple[Job, list[int], int]] = []
        seen: dict[int, Manifest] = {}
        for label in window.labels:
            job = window.of[label]
            namespace = state.namespaces.get(job.namespace)
            manifest = _manifest(state, job)
            if namespace is None or (manifest is not None and id(manifest) in seen):
                found.append((job, [], 0))
                continue
            if manifest is not None:
                seen[id(manifest)] = manifest
            rows, looked_at, _ = look_up(state, namespace, job, manifest)
            found.append((job, rows, looked_at))
        return found


def _sharing(windows: Sequence[Window]) -> int:
    """Of how many tenants some job has a chunk that can be had. Who has no job left in a queue takes nobody's share."""
    return sum(window.bytes > 0 and not window.is_empty for window in windows)


def _is_over(window: Window, shares: Shares) -> bool:
    return window.bytes > shares.kept_bytes or window.looked_at > shares.looked_at


def _manifest(state: State, job: Job) -> Manifest | None:
    """Of the session that the job names, if it names one that there is."""
    if job.keys:
        return None
    session = state.sessions.by_name.get((job.namespace, job.session))
    return session.manifest if session is not None else None


def look_up(
    state: State, namespace: Namespace, job: Job, manifest: Manifest | None
) -> tuple[list[int], int, Sequence[ChunkKey]]:
    """The chunks that the job will ask for and that can be had, each once: of a chain up to the first that cannot, of a
    manifest that is no chain all of them. How many were looked at; and those that are missed."""
    rows: Sequence[int]
    if job.keys:
        rows = list(map(namespace.index.get, job.keys, repeat(NONE)))
    elif manifest is not None:
        rows = manifest.rows
    else:
        return [], 0, ()
    rows = rows[: PLACE_MAX + 1]
    if manifest is not None and not manifest.exact:
        each = usable_each(state, namespace, rows)
        missed = dict.fromkeys(row for row, usable in zip(rows, each, strict=True) if not usable)
        found = list(dict.fromkeys(compress(rows, each)))
        return found, len(rows), list(dict.fromkeys(map(state.chunks.key.__getitem__, missed)))
    usable = usable_leading(state, namespace, rows)
    awaits: Sequence[ChunkKey] = ()
    if usable < len(rows):
        awaits = (job.keys[usable] if job.keys else state.chunks.key[rows[usable]],)
    found = list(dict.fromkeys(rows[:usable]))
    return found, usable + len(awaits), awaits


def usable_each(state: State, namespace: Namespace, rows: Sequence[int]) -> bytes:
    """Of each of a manifest's chunks whether it can be had, 1 or 0."""
    if len(rows) >= state.batch_min:
        return batch.usable_each(state, namespace, rows)
    return bytes(map(state.is_usable, rows))


def usable_leading(state: State, namespace: Namespace, rows: Sequence[int]) -> int:
    """How many of these, from the first, can be had."""
    if len(rows) >= state.batch_min:
        return batch.usable_leading(state, namespace, rows)
    chunks, shards = state.chunks, namespace.shards
    ready, flags, shard0 = chunks.ready, chunks.flags, chunks.shard0
    readable = STORED if state.disk_state is not DiskState.OFF else 0
    for usable, row in enumerate(rows):
        there = row != NONE and (flags[row] & readable or (ready[row] == shards and shard0[row] != NONE))
        if not there or flags[row] & DOOMED:
            return usable
    return len(rows)
