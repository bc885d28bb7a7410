"""What schedulers say of the future, and the two windows made of it (AttentionStore, section 3.3).

    prefetch window   the head of the queue whose chunks fit in DRAM: C_mem / S_kv. What of it is on SSD is promoted.
    eviction window   the part of the queue whose chunks fit in all tiers: (C_mem + C_disk) / S_kv. It is ranked: within
                      a namespace's share, what the window does not need goes first, then what is needed last.

Both are cut within a tenant's part of the memory. The windows order victims; they never refuse to evict. A queue longer
than the window is clipped from its tail, and the answer says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, repeat

from kvstore.core import events as ev
from kvstore.core.bulk import batch, needed
from kvstore.core.chunks import DOOMED, NONE, PROMOTING, STORED
from kvstore.core.cold_tier import ColdTier
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.reads import clip_ttl
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest
from kvstore.types import ChunkKey, HintAction, HintResult, Millis, NamespaceId, WorkerId

REPLAN_MS = 20
"""Without a new hint, plans are made at most this often,"""
REPLAN_ROWS_PER_MS = 20
"""and a long queue is planned again less often: a plan takes about a microsecond per chunk of the loop's time."""
PUBLISH_ROWS_PER_MS = 200
"""With new hints, so often: planning never takes more than about a fifth of the loop's time, however many come."""
PLAN_ROWS_MAX = 1 << 17
"""Chunks that one plan looks at, of all tenants: each takes the loop's time. Those of one manifest count once, however
many jobs name it."""
KEYS_PER_WORKER_MAX = 1 << 17
"""In hints that name keys: these are kept, and a plan would not look at more."""
POSITION_MAX = 1 << 31


@dataclass(slots=True)
class Job:
    namespace: NamespaceId
    session: bytes
    keys: tuple[ChunkKey, ...]
    position: int
    until: Millis
    promote_at: Millis = 0
    """Not brought to DRAM before."""
    action: HintAction | None = None
    """It stands for a hint action (see `hint_actions`), not for a queued job."""


@dataclass(slots=True)
class Windows:
    """The last plan: how far both windows reach, in jobs of each tenant."""

    prefetch: Counter[str] = field(default_factory=Counter)
    eviction: Counter[str] = field(default_factory=Counter)
    results: dict[tuple[WorkerId, NamespaceId, bytes], HintResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Publication:
    """Hints that were taken over, and are answered after the next plan."""

    ticket: ev.Ticket
    namespace: NamespaceId
    jobs: tuple[bytes, ...]
    rejected: frozenset[bytes]


class Queue:
    def __init__(self, state: State, tier: ColdTier, promote: Callable[[int], None]) -> None:
        self.state = state
        self._tier = tier
        self._promote = promote
        self.jobs: dict[WorkerId, dict[tuple[NamespaceId, bytes], Job]] = {}
        self.windows = Windows()
        self._planned_at: Millis = -REPLAN_MS
        self._planned_rows = 0
        """How many the last plan looked at."""
        self._due = False
        self._unanswered: list[Publication] = []

    def __repr__(self) -> str:
        count = sum(map(len, self.jobs.values()))
        reach = f"prefetch {self.windows.prefetch.total()}, eviction {self.windows.eviction.total()}"
        return f"Queue({count} jobs, windows: {reach})"

    def publish(self, worker: Worker, event: ev.PublishQueue) -> ev.QueueAccepted | None:
        """Replace or change the worker's queue for one namespace of its tenant. None: the last plan was long and is not
        long ago, the next one answers. The namespace need not be open: a scheduler knows sessions and jobs, and is
        handed no bytes."""
        state = self.state
        limits = state.limits
        namespace = state.administered_namespace(worker, event.namespace)
        for index, hint in enumerate(event.hints):
            if not 0 <= hint.position <= POSITION_MAX:
                raise BadRequest(
                    f"must be between 0 and {POSITION_MAX}",
                    field=f"hints[{index}].position",
                    value=hint.position,
                )
        jobs = self.jobs.setdefault(worker.id, {})
        if event.snapshot:
            for pair in [
                pair for pair, job in jobs.items() if pair[0] == namespace.id and job.action is None
            ]:
                del jobs[pair]
        for job_name in event.removed:
            jobs.pop((namespace.id, job_name), None)
        until = state.now + clip_ttl(event.ttl_ms, limits.hint_ttl_ms, limits.hint_ttl_max_ms)
        rejected = set()
        kept = sum(len(job.keys) for job in jobs.values())
        for hint in event.hints:
            known = jobs.pop((namespace.id, hint.job), None)
            kept += len(hint.keys) - (len(known.keys) if known is not None else 0)
            named = hint.keys or (namespace.id, hint.session) in state.sessions.by_name
            if not named or len(jobs) >= limits.hints_per_worker_max or kept > KEYS_PER_WORKER_MAX:
                rejected.add(hint.job)
                kept -= len(hint.keys)
                continue
            jobs[namespace.id, hint.job] = Job(namespace.id, hint.session, hint.keys, hint.position, until)
        if not jobs:
            del self.jobs[worker.id]
        state.counters["hints_received"] += len(event.hints)
        state.counters["hints_rejected"] += len(rejected)
        publication = Publication(
            event.ticket, namespace.id, tuple(hint.job for hint in event.hints), frozenset(rejected)
        )
        if self._planned_at + self._planned_rows // PUBLISH_ROWS_PER_MS > state.now:
            self._unanswered.append(publication)
            self._due = True
            return None
        self._plan_and_answer()
        return self._answer(publication)

    def _answer(self, published: Publication) -> ev.QueueAccepted:
        """A job that ended again before the plan was made is rejected."""
        worker = published.ticket.worker
        results = self.windows.results
        tenant = self.state.workers[worker].tenant
        return ev.QueueAccepted(
            tuple(
                HintResult.REJECTED
                if job in published.rejected
                else results.get((worker, published.namespace, job), HintResult.REJECTED)
                for job in published.jobs
            ),
            self.windows.prefetch[tenant],
            self.windows.eviction[tenant],
        )

    def put(self, worker: WorkerId, name: bytes, job: Job) -> None:
        """A job of a hint action: `name` is none that a caller could give a job of his."""
        self.jobs.setdefault(worker, {})[job.namespace, name] = job
        self._due = True

    def drop(self, worker: WorkerId, namespace: NamespaceId, name: bytes) -> bool:
        """Whether there was such a job."""
        jobs = self.jobs.get(worker, {})
        if jobs.pop((namespace, name), None) is None:
            return False
        if not jobs:
            del self.jobs[worker]
        self._due = True
        return True

    def held_by(self, worker: WorkerId) -> tuple[int, int]:
        """How many jobs, and keys in them, a worker has, those of hint actions included."""
        jobs = self.jobs.get(worker, {}).values()
        return len(jobs), sum(len(job.keys) for job in jobs)

    def of_actions(self) -> Iterator[tuple[WorkerId, NamespaceId, bytes]]:
        """Jobs that stand for hint actions: whose, where, and their names."""
        for worker, jobs in self.jobs.items():
            yield from ((worker, *name) for name, job in jobs.items() if job.action is not None)

    def forget(self, worker: WorkerId) -> None:
        if self.jobs.pop(worker, None) is not None:
            self._due = True
        self._unanswered = [published for published in self._unanswered if published.ticket.worker != worker]

    def tick(self) -> None:
        state = self.state
        for worker, jobs in list(self.jobs.items()):
            over = [name for name, job in jobs.items() if job.until <= state.now]
            for name in over:
                del jobs[name]
            state.counters["hints_expired"] += len(over)
            self._due = self._due or bool(over)
            if not jobs:
                del self.jobs[worker]
        rows_per_ms = PUBLISH_ROWS_PER_MS if self._due else REPLAN_ROWS_PER_MS
        interval_ms = max(REPLAN_MS, int(self._planned_rows // rows_per_ms))
        if (self._due or self.jobs) and self._planned_at + interval_ms <= state.now:
            self._plan_and_answer()

    def _plan_and_answer(self) -> None:
        """Whoever waits for the next plan is answered by this one: if nobody has a job any more, it is the last."""
        self.plan()
        unanswered, self._unanswered = self._unanswered, []
        for published in unanswered:
            self.state.reply(published.ticket, self._answer(published))

    def plan(self) -> None:
        """Rank what the queue needs, soonest job first, as far as all tiers reach; promote what DRAM can hold of it.

        Tenants with jobs that have chunks have equal parts of the memory, and of what a plan looks at: neither a long
        queue of one nor an empty one shortens another's windows.
        """
        state = self.state
        limits = state.limits
        self._due = False
        self._planned_at = state.now
        self._planned_rows = 0
        tenants = {state.workers[worker].tenant for worker in self.jobs}
        sharing = self._tenants_with_chunks()
        in_dram = int(limits.arena_bytes * limits.prefetch_share_max) // max(1, len(sharing))
        in_all = limits.arena_bytes + self._tier.bytes_max
        in_all //= max(1, len(sharing))
        windows = Windows()
        rank: dict[int, int] = {}
        job_ends: list[int] = []
        promoting: list[int] = []
        used: Counter[str] = Counter()
        looked_at: Counter[str] = Counter()
        clipped: set[str] = set()
        planned: set[int] = set()
        rows_max = {
            shares: PLAN_ROWS_MAX // max(1, len(of)) for shares, of in ((True, sharing), (False, tenants))
        }
        ordered = sorted(
            (
                (job.position, worker, name, job)
                for worker, jobs in self.jobs.items()
                for name, job in jobs.items()
            ),
            key=lambda item: item[:3],
        )
        for _, worker, name, job in ordered:
            key = (worker, name[0], name[1])
            tenant = state.workers[worker].tenant
            if tenant in clipped:
                windows.results[key] = HintResult.CLIPPED
                self._planned_rows += 1
                continue
            namespace = state.namespaces.get(job.namespace)
            rows, looked = self._rows(namespace, job, planned) if namespace is not None else ([], 0)
            self._planned_rows += max(1, looked)
            looked_at[tenant] += looked
            new = dict.fromkeys(row for row in rows if row not in rank) if rank else dict.fromkeys(rows)
            size = len(new) * namespace.chunk_bytes if namespace is not None else 0
            if used[tenant] + size > in_all or looked_at[tenant] > rows_max[tenant in sharing]:
                # What does not fit ends the window: a job behind it must not push out one that is nearer.
                clipped.add(tenant)
                windows.results[key] = HintResult.CLIPPED
                continue
            used[tenant] += size
            if new:
                rank.update(zip(new, count(len(rank)), strict=False))
                job_ends.append(len(rank) - 1)
            windows.eviction[tenant] += 1
            if used[tenant] <= in_dram:
                windows.prefetch[tenant] += 1
                if namespace is not None and new and job.promote_at <= state.now:
                    promoting += self._on_ssd_only(namespace, list(new))
                windows.results[key] = HintResult.ACCEPTED
            else:
                windows.results[key] = HintResult.DEFERRED
        self.windows = windows
        if state.policy.uses_ranks:
            if rank != state.policy.rank:
                state.room += 1  # what was needed may go now, or is needed later than something else
            state.policy.set_ranks(state.namespaces, rank, job_ends)
            for row in promoting:
                if not state.is_resident(row):
                    self._promote(row)

    def _tenants_with_chunks(self) -> set[str]:
        """Those of whose jobs at least one has a chunk that can be had."""
        state = self.state
        found: set[str] = set()
        for worker, jobs in self.jobs.items():
            tenant = state.workers[worker].tenant
            if tenant not in found and any(map(self._has_chunks, jobs.values())):
                found.add(tenant)
        return found

    def _has_chunks(self, job: Job) -> bool:
        state = self.state
        namespace = state.namespaces.get(job.namespace)
        if namespace is None:
            return False
        if job.keys:
            row = namespace.index.get(job.keys[0], NONE)
        else:
            session = state.sessions.by_name.get((namespace.id, job.session))
            row = session.manifest.rows[0] if session is not None and len(session.manifest) else NONE
        return row != NONE and state.is_usable(row)

    def _on_ssd_only(self, namespace: Namespace, rows: list[int]) -> list[int]:
        """Those of a job's chunks that are to be promoted."""
        state = self.state
        if len(rows) >= state.batch_min:
            return needed.on_ssd_only(state.chunks, namespace, rows)
        flags = state.chunks.flags
        return [
            row
            for row in rows
            if flags[row] & (STORED | PROMOTING | DOOMED) == STORED and not state.is_resident(row)
        ]

    def _rows(self, namespace: Namespace, job: Job, planned: set[int]) -> tuple[list[int], int]:
        """The chunks that the job will ask for and that can be had, up to the first that cannot; and how many were
        looked at. None again of the manifests in `planned` (by id, for as long as a plan takes), which get this one."""
        state = self.state
        if job.keys:
            rows = list(map(namespace.index.get, job.keys, repeat(NONE)))
        else:
            session = state.sessions.by_name.get((namespace.id, job.session))
            if session is None or id(session.manifest) in planned:
                return [], 0
            planned.add(id(session.manifest))
            rows = session.manifest.rows.tolist()
        if len(rows) >= state.batch_min:
            return rows[: batch.usable_leading(state, namespace, rows)], len(rows)
        for usable, row in enumerate(rows):
            if row == NONE or not state.is_usable(row):
                return rows[:usable], len(rows)
        return rows, len(rows)
