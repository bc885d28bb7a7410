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
from kvstore.core.pool import Phase
from kvstore.core.state import State
from kvstore.types import ChunkKey, DiskState, Millis, SlotState

PLAN_ROWS_MAX = 1 << 19
"""Chunks of queued jobs that are kept in order, of all tenants: each takes some 500 bytes. Those of one manifest count
once, however many jobs name it."""


MEMORY_STEPS = 16
"""What leases pin counts in such parts of the arena,"""
MEASURE_MS: Millis = 100
"""and is looked up at most so often."""


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
class Memory:
    """What windows may hold, of all tenants together, in bytes."""

    ahead: int
    """Of DRAM: what no lease pins and nobody writes or reads now, in steps, as far as prefetches may fill it."""
    kept: int
    """Of all tiers; what is in DRAM and on SSD both counts once."""


@dataclass(frozen=True, slots=True)
class Level:
    """Tenants share memory as equally as they can use it: who needs less than its part lends the rest to those who need
    more. A level is what each of these may have."""

    bytes: int
    caps: dict[str, int]
    """Of tenants whose record takes something from them: at most such a part of an equal share."""

    def of(self, tenant: str) -> int:
        return min(self.bytes, self.caps.get(tenant, self.bytes))


ENDLESS = 1 << 62
"""What a window needs whose jobs have not all been looked at."""


class Planner:
    def __init__(self, state: State, tier: ColdTier) -> None:
        self._state = state
        self._tier = tier
        self._off = False
        """What was on SSD alone could not be had when it was last looked at."""
        self._memory = Memory(0, 0)
        self._measured_at: Millis = -MEASURE_MS

    @property
    def is_due(self) -> bool:
        """Whether an update would find something to do."""
        jobs, off = self._state.jobs, self._state.disk_state is DiskState.OFF
        if jobs.stale or jobs.changed:
            return True
        return bool(jobs.windows) and (off or self._off or (self._is_old and self._has_other_memory()))

    @property
    def memory(self) -> Memory:
        return self._memory

    def update(self) -> None:
        state, jobs = self._state, self._state.jobs
        off = state.disk_state is DiskState.OFF
        if off or self._off:
            jobs.doubt_all()
        self._off = off
        jobs.changed = False
        if self._is_old:
            self._memory, self._measured_at = self._measured(), state.now
        self._look_again()
        windows = jobs.windows
        looked_at_max = PLAN_ROWS_MAX // max(1, len(windows))
        while True:
            kept = self._level(
                self._memory.kept, {name: _needs(one, looked_at_max) for name, one in windows.items()}
            )
            for tenant, window in windows.items():
                self._reach(window, kept.of(tenant), looked_at_max)
            needs = {name: _needs(one, looked_at_max) for name, one in windows.items()}
            if kept == self._level(self._memory.kept, needs):
                break
        for tenant, window in windows.items():
            over = _is_over(window, kept.of(tenant), looked_at_max)
            jobs.set_edge(window, window.job(window.reach - 1) if over else None)
        ahead = self._level(
            self._memory.ahead, {name: _needs_ahead(one, looked_at_max) for name, one in windows.items()}
        )
        for tenant, window in windows.items():
            jobs.set_ahead(window, ahead.of(tenant))
            window.ahead_bytes_max, window.kept_bytes_max = ahead.of(tenant), kept.of(tenant)

    # --------------------------------------------------------------------------------------------------- memory

    @property
    def _is_old(self) -> bool:
        return self._state.now - self._measured_at >= MEASURE_MS

    def _has_other_memory(self) -> bool:
        """Whether the ends of some window may move, because there is more memory now, or less."""
        measured = self._measured()
        if measured == self._memory:
            return False
        windows = self._state.jobs.windows.values()
        if any(window.ahead < len(window.labels) for window in windows):
            return True
        return sum(window.ahead_bytes for window in windows) > measured.ahead

    def _measured(self) -> Memory:
        """In steps, or every lease would move the ends of all windows. Something is left for windows at any time: pins
        go, and whoever waits is worth being ready for."""
        state, limits = self._state, self._state.limits
        step = max(1, limits.arena_bytes // MEMORY_STEPS)
        taken = sum(
            (segment.pinned + segment.counts[SlotState.RESERVED] + segment.counts[SlotState.QUARANTINED])
            * segment.slot_bytes
            for segment in state.pool.segments
            if segment.phase is Phase.ASSIGNED
        )
        unpinned = max(step, limits.arena_bytes - taken // step * step)
        pins = sum(window.pinned_bytes for window in state.jobs.windows.values()) // step * step
        ahead = min(int(limits.arena_bytes * limits.prefetch_share_max), unpinned)
        below = 0 if state.disk_state is DiskState.OFF else self._tier.bytes_max
        twice = 0
        if below:
            # What jobs need and DRAM has is always written below it too.
            in_dram = sum(window.ahead_bytes for window in state.jobs.windows.values())
            twice = min(in_dram, below) // step * step
        kept = limits.arena_bytes + below - twice
        return Memory(max(step, ahead - pins), max(step, kept - pins))

    def _level(self, total: int, needs: dict[str, int]) -> Level:
        """Who needs nothing, or has no job left in a queue, takes nobody's part."""
        sharing = {tenant: need for tenant, need in needs.items() if need}
        caps = {}
        for tenant in sharing:
            share = self._state.jobs.shares.get(tenant, 1.0)
            if share < 1.0:
                caps[tenant] = int(total * share / len(sharing))
        left, tenants = total, len(sharing)
        most = 0
        for need in sorted(min(need, caps.get(tenant, need)) for tenant, need in sharing.items()):
            if need > left // tenants:
                return Level(left // tenants, caps)
            left -= need
            tenants -= 1
            most = need
        return Level(left + most, caps)

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

    def _reach(self, window: Window, kept_bytes: int, looked_at_max: int) -> None:
        """What does not fit ends the window: a job behind it must not push out one that is nearer. A pin ends none."""
        jobs = self._state.jobs
        while window.reach:
            last = window.job(window.reach - 1)
            size = 0 if last.is_pin else last.owned * last.chunk_bytes
            if (
                window.bytes - window.pinned_bytes - size <= kept_bytes
                and window.looked_at - last.looked_at <= looked_at_max
            ):
                break
            jobs.cut(window)
        while not _is_over(window, kept_bytes, looked_at_max) and not window.is_whole:
            self._fill(jobs.enter(window))

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
        windows = self._state.jobs.windows
        found = {tenant: self._chunks_of(window) for tenant, window in windows.items()}
        looked_at_max = PLAN_ROWS_MAX // max(1, len(windows))
        needs, handed_over = {}, {}
        for tenant, jobs in found.items():
            needs[tenant], handed_over[tenant] = _needs_of(jobs, looked_at_max)
        empty = {tenant for tenant, window in windows.items() if window.is_empty}
        kept = self._level(
            self._memory.kept, {name: 0 if name in empty else need for name, need in needs.items()}
        )
        needs_ahead = {
            name: 0 if name in empty else need - handed_over[name] if need <= kept.of(name) else ENDLESS
            for name, need in needs.items()
        }
        ahead = self._level(self._memory.ahead, needs_ahead)
        plan = Plan()
        for tenant, jobs in found.items():
            used = on_top = pinned = looked_at = reached = fitting = 0
            for job, rows, looked in jobs:
                new = {row: job.label + place for place, row in enumerate(rows) if row not in plan.rank}
                size = len(new) * job.chunk_bytes
                used += size
                pinned += size * job.is_pin
                on_top += size * (job.is_pin or job.handed_over)
                looked_at += looked
                if used - pinned > kept.of(tenant) or looked_at > looked_at_max:
                    break
                plan.rank.update(new)
                reached += 1
                fitting += used - on_top <= ahead.of(tenant)
            plan.kept[tenant], plan.ahead[tenant] = reached, fitting
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


def _needs(window: Window, looked_at_max: int) -> int:
    """What all jobs of a window need, pins aside, as far as that is known: ENDLESS, if they were not all looked at.
    Nothing, if no job has a chunk that can be had, or all have left their queues."""
    need = window.bytes - window.pinned_bytes
    if window.is_empty or not need:
        return 0
    return need if window.is_whole and window.looked_at <= looked_at_max else ENDLESS


def _needs_ahead(window: Window, looked_at_max: int) -> int:
    """The same of the prefetch window, on top of which is what was handed over."""
    need = _needs(window, looked_at_max)
    if not need or window.edge is not None:
        return ENDLESS if need else 0
    return need - window.handed_over_bytes()


def _needs_of(jobs: Sequence[tuple[Job, list[int], int]], looked_at_max: int) -> tuple[int, int]:
    """`_needs` of all jobs, one after the other, and what of it was handed over."""
    seen: set[int] = set()
    need = handed_over = looked_at = 0
    for job, rows, looked in jobs:
        new = len(set(rows) - seen)
        seen.update(rows)
        looked_at += looked
        if not job.is_pin:
            need += new * job.chunk_bytes
            handed_over += new * job.chunk_bytes * job.handed_over
        if looked_at > looked_at_max:
            return (ENDLESS if need else 0), 0
    return need, handed_over


def _is_over(window: Window, kept_bytes: int, looked_at_max: int) -> bool:
    return window.bytes - window.pinned_bytes > kept_bytes or window.looked_at > looked_at_max


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
    keys = job.keys or (state.keys_elsewhere((job.namespace, job.session)) if manifest is None else ())
    if keys:
        rows = list(map(namespace.index.get, keys, repeat(NONE)))
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
        awaits = (keys[usable] if keys else state.chunks.key[rows[usable]],)
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
