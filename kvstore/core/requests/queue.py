"""What schedulers say of the future, and the two windows made of it (AttentionStore, section 3.3).

    prefetch window   the head of the queue whose chunks fit in DRAM: C_mem / S_kv. What of it is on SSD is promoted.
    eviction window   the part of the queue whose chunks fit in all tiers: (C_mem + C_disk) / S_kv. It is ranked: within
                      a namespace's share, what the window does not need goes first, then what is needed last.

Both are cut within a tenant's part of the memory. The windows order victims; they never refuse to evict. A queue longer
than the window is clipped from its tail, and the answer says so. `core.jobs` keeps the queue's books, `plan.py` moves
the windows; here is what schedulers ask, and when plans are made.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from kvstore.core import events as ev
from kvstore.core.bulk import needed
from kvstore.core.chunks import DOOMED, PROMOTING, STORED
from kvstore.core.cold_tier import ColdTier
from kvstore.core.jobs import LINE_STEP, LINES_BEFORE, Job
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.credit import GRACE_MS, Credit, Mark
from kvstore.core.requests.hint_namespaces import namespace_for
from kvstore.core.requests.plan import Planner
from kvstore.core.requests.reads import clip_ttl
from kvstore.core.state import SessionName, State
from kvstore.core.workers import Worker
from kvstore.errors import BadRequest
from kvstore.types import HintResult, Millis, NamespaceId, WorkerId

REPLAN_MS = 20
"""Without a new hint, plans are made at most this often;"""
PUBLISH_ROWS_PER_MS = 200
"""and with new hints, so often: planning never takes more than about a fifth of the loop's time, however many come."""
KEYS_PER_WORKER_MAX = 1 << 19
"""In hints that name keys: these are kept, some 75 bytes each."""
PROMOTED_PER_PLAN_MAX = 4_096
"""Chunks that one plan asks for."""
HANDED_OVER_MAX = 256
"""Jobs that left their queues, of all tenants; the first of them is let go for one more."""
POSITION_MAX = 1 << 31
NEVER = 1 << 62


@dataclass(slots=True)
class Feed:
    """What one scheduler said of one namespace."""

    tenant: str
    jobs: dict[bytes, Job] = field(default_factory=dict)
    keys: int = 0
    """In all of them."""
    number: int = 0
    """Of the last message that was taken; 0: its messages are not numbered, or what it said is over."""
    renewed_until: Millis = 0
    """A numbered message vouches for everything that was said before."""
    looked_at: Millis = NEVER
    """No job ends before this."""
    in_line: bool = True
    """Its jobs stand where their positions say; else only their order is that of their positions."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Hints that were taken over, and are answered after the next plan."""

    ticket: ev.Ticket
    namespace: NamespaceId
    tenant: str
    jobs: tuple[bytes, ...]
    refused: dict[bytes, HintResult]
    looked_in: tuple[NamespaceId, ...]
    """Of hints by model."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A job that is on its way from its queue to an engine."""

    job: Job
    mark: Mark
    until: Millis


class Queue:
    def __init__(
        self,
        state: State,
        tier: ColdTier,
        promote: Callable[[int], None],
        needed_sooner: Callable[[Iterable[int]], None],
    ) -> None:
        self.state = state
        self.planner = Planner(state, tier)
        self.credit = Credit(state)
        self.is_unknown: Callable[[SessionName], bool] = lambda name: True
        """Whether other nodes told nothing of a session that is not here; set by the store."""
        self._promote = promote
        self._needed_sooner = needed_sooner
        self.feeds: dict[WorkerId, dict[NamespaceId, Feed]] = {}
        self.actions: dict[WorkerId, dict[tuple[NamespaceId, bytes], Job]] = {}
        """Jobs that stand for hint actions: other feeds' jobs behind, before and between them never change them."""
        self._later: list[tuple[Millis, int, Job]] = []
        """Those that are to be promoted at some time to come, the soonest first; labels tell equal ones apart."""
        self._planned_at: Millis = -REPLAN_MS
        self._planned_rows = 0
        """How many the last plan looked at."""
        self._promoting: dict[int, None] = {}
        """Rows in the prefetch window that may be on SSD alone."""
        self._unanswered: list[Publication] = []
        self._handed_over: deque[HandedOver] = deque()
        """Jobs that left their queues and keep their windows until somebody asks for their chunks, or GRACE_MS."""

    def __repr__(self) -> str:
        reach = [self.reach(tenant) for tenant in self.state.jobs.windows]
        prefetch, eviction = sum(ahead for ahead, _ in reach), sum(kept for _, kept in reach)
        return f"Queue({self.count} jobs, windows: prefetch {prefetch}, eviction {eviction})"

    @property
    def count(self) -> int:
        """Of all queued jobs."""
        return sum(len(feed.jobs) for feeds in self.feeds.values() for feed in feeds.values())

    def reach(self, tenant: str) -> tuple[int, int]:
        """How far the prefetch and the eviction window of a tenant reach, in queued jobs."""
        window = self.state.jobs.windows.get(tenant)
        return (0, 0) if window is None else window.reaches

    # ------------------------------------------------------------------------------------------------- hint actions

    def put(self, job: Job, namespace: NamespaceId) -> None:
        """A job of a hint action that was asked for under `namespace`: its name is none that a caller could give a job
        of his, and it has none yet."""
        self.actions.setdefault(job.worker, {})[namespace, job.name] = job
        self.state.jobs.add([job])
        if self.state.now < job.promote_at < NEVER:
            insort(self._later, (job.promote_at, job.label, job))

    def drop(self, worker: WorkerId, namespace: NamespaceId, name: bytes) -> bool:
        """Whether there was such a job."""
        jobs = self.actions.get(worker, {})
        job = jobs.pop((namespace, name), None)
        if job is None:
            return False
        if not jobs:
            del self.actions[worker]
        self.state.jobs.remove(job)
        self._not_later(job)
        return True

    def held_by(self, worker: WorkerId) -> tuple[int, int]:
        """How many jobs, and keys in them, a worker has, those of hint actions included."""
        feeds, actions = self.feeds.get(worker, {}).values(), self.actions.get(worker, {}).values()
        jobs = sum(len(feed.jobs) for feed in feeds) + len(actions)
        return jobs, sum(feed.keys for feed in feeds) + sum(len(job.keys) for job in actions)

    def of_actions(self) -> Iterator[tuple[WorkerId, NamespaceId, bytes]]:
        """Jobs that stand for hint actions: whose, where, and their names."""
        for worker, jobs in self.actions.items():
            yield from ((worker, *name) for name in jobs)

    def _not_later(self, job: Job) -> None:
        at = bisect_left(self._later, (job.promote_at, job.label))
        if at < len(self._later) and self._later[at][2] is job:
            del self._later[at]

    # --------------------------------------------------------------------------------------------------- publishing

    def publish(self, worker: Worker, event: ev.PublishQueue) -> ev.QueueAccepted | None:
        """Replace or change the worker's queue for one namespace of its tenant. None: the last plan was long and is not
        long ago, the next one answers. The namespace need not be open: a scheduler knows sessions and jobs, and is
        handed no bytes."""
        state = self.state
        namespace = state.administered_namespace(worker, event.namespace)
        for index, hint in enumerate(event.hints):
            if not 0 <= hint.position <= POSITION_MAX:
                raise BadRequest(
                    f"must be between 0 and {POSITION_MAX}",
                    field=f"hints[{index}].position",
                    value=hint.position,
                )
        feeds = self.feeds.setdefault(worker.id, {})
        feed = feeds.setdefault(namespace.id, Feed(namespace.tenant))
        names = tuple(hint.job for hint in event.hints)
        state.counters["hints_received"] += len(names)
        candidates = state.namespaces_of_model(namespace) if event.by_model else []
        looked_in = tuple(each.id for each in candidates)
        refused: dict[bytes, HintResult] = {}
        if event.number and not event.snapshot and event.number > feed.number + 1:
            self._drop_if_empty(worker.id, namespace.id)
            state.counters["hints_out_of_order"] += 1
            rejected = (HintResult.REJECTED,) * len(names)
            return ev.QueueAccepted(rejected, *self.reach(feed.tenant), True, looked_in)
        if not event.number or event.number > feed.number:
            homes: dict[bytes, Namespace] = {}
            if candidates:
                hints = []
                for hint, prompts in zip(event.hints, event.prompts or repeat(()), strict=False):
                    home, keys = namespace_for(
                        state, self.is_unknown, candidates, hint.session, hint.keys, prompts
                    )
                    homes[hint.job] = home
                    hints.append(replace(hint, keys=keys))
                event = replace(event, hints=tuple(hints))
            refused = self._take(worker, namespace, feed, event, homes)
        self._drop_if_empty(worker.id, namespace.id)
        publication = Publication(event.ticket, namespace.id, feed.tenant, names, refused, looked_in)
        if self._planned_at + self._planned_rows // PUBLISH_ROWS_PER_MS > state.now:
            self._unanswered.append(publication)
            return None
        self._plan_and_answer()
        return self._answer(publication)

    def _take(
        self,
        worker: Worker,
        namespace: Namespace,
        feed: Feed,
        event: ev.PublishQueue,
        homes: Mapping[bytes, Namespace],
    ) -> dict[bytes, HintResult]:
        """The hints of a message that is not a repetition; those that are not kept, with the answer. `homes`: the
        namespaces of jobs that are not for `namespace`."""
        state, limits = self.state, self.state.limits
        hints = {hint.job: hint for hint in event.hints}
        gone = {name: None for name in feed.jobs if name not in hints} if event.snapshot else {}
        gone.update(dict.fromkeys(event.removed))
        ordered = sorted(hints.values(), key=lambda hint: hint.position)
        known_as = {
            hint.job: job
            for hint in ordered
            if (job := feed.jobs.get(hint.job)) is not None
            and job.keys == hint.keys
            and job.session == hint.session
            and job.namespace == homes.get(hint.job, namespace).id
        }
        lines = self._lines(feed, ordered, known_as) if event.snapshot else {}
        self._end(feed, gone)
        ttl_ms = clip_ttl(event.ttl_ms, limits.hint_ttl_ms, limits.hint_ttl_max_ms)
        until = state.now + ttl_ms
        feed.number = event.number
        feed.renewed_until = until if event.number else 0
        feed.looked_at = min(feed.looked_at, until)
        refused: dict[bytes, HintResult] = {}
        wanted: list[ev.Hint] = []
        away: list[bytes] = []
        held, held_keys = self.held_by(worker.id)
        others, keys_of_others = held - len(feed.jobs), held_keys - feed.keys
        if not lines:
            self._put_in_line(feed)
        moved: dict[bytes, Job] = {}
        for hint in ordered:
            known = feed.jobs.get(hint.job)
            if known is not None:
                same = hint.job in known_as
                if same and (known.position == hint.position or lines.get(hint.job) == known.line):
                    known.position = hint.position
                    known.until = until
                    continue
                if same:
                    moved[hint.job] = known
                else:
                    self.credit.ended(known)
                away.append(hint.job)
            wanted.append(hint)
        self._remove(feed, away)
        new: list[Job] = []
        for hint in wanted:
            home = homes.get(hint.job, namespace)
            name = (home.id, hint.session)
            if not (hint.keys or name in state.sessions.by_name or not self.is_unknown(name)):
                refused[hint.job] = HintResult.REJECTED
                continue
            if (
                others + len(feed.jobs) >= limits.hints_per_worker_max
                or keys_of_others + feed.keys + len(hint.keys) > KEYS_PER_WORKER_MAX
            ):
                refused[hint.job] = HintResult.CLIPPED
                continue
            line = lines[hint.job] if lines else state.jobs.new_line(hint.position)
            job = Job(
                worker.id,
                feed.tenant,
                home.id,
                hint.job,
                hint.session,
                hint.keys,
                hint.position,
                line,
                moved[hint.job].since if hint.job in moved else state.now,
                until,
                home.chunk_bytes,
            )
            if hint.job in moved:
                self.credit.moved(moved.pop(hint.job), job)
            feed.jobs[hint.job] = job
            feed.keys += len(hint.keys)
            new.append(job)
        for job in moved.values():
            self.credit.dropped(job)
        state.jobs.add(new)
        state.counters["hints_rejected"] += sum(result is HintResult.REJECTED for result in refused.values())
        return refused

    def _lines(
        self, feed: Feed, ordered: Sequence[ev.Hint], known_as: Mapping[bytes, Job]
    ) -> dict[bytes, int]:
        """Where the jobs of a snapshot stand if those of them that are known stay where they are: the head of a queue
        goes, all others have other positions and are in the same order. Nothing, if they are not, or if others of the
        tenant have jobs that stand between them."""
        window = self.state.jobs.windows.get(feed.tenant)
        if window is None or len(window.queued) != len(feed.jobs):
            return {}
        if feed.in_line and all(
            hint.position == known.position
            for hint in ordered
            if (known := feed.jobs.get(hint.job)) is not None
        ):
            return {}
        lines: dict[bytes, int] = {}
        waiting: list[bytes] = []
        last = None
        for hint in ordered:
            known = known_as.get(hint.job)
            if known is None:
                waiting.append(hint.job)
                continue
            step = LINE_STEP if last is None else (known.line - last) // (len(waiting) + 1)
            if step < 1:
                return {}
            lines.update(
                (job, known.line - step * at)
                for at, job in zip(range(len(waiting), 0, -1), waiting, strict=True)
            )
            waiting.clear()
            last = lines[hint.job] = known.line
        if last is None:
            return {}
        lines.update((job, last + LINE_STEP * at) for at, job in enumerate(waiting, 1))
        feed.in_line = False
        return lines

    def _put_in_line(self, feed: Feed) -> None:
        """Where their positions say, among those of the tenant's other schedulers."""
        jobs = self.state.jobs
        for feeds in self.feeds.values():
            for other in feeds.values():
                if other.tenant == feed.tenant and not other.in_line:
                    other.in_line = True
                    moved = list(other.jobs.values())
                    jobs.remove_many(moved)
                    for job in moved:
                        job.stand(jobs.new_line(job.position))
                    jobs.add(moved)

    def _end(self, feed: Feed, names: Iterable[bytes], *, hand_over: bool = True) -> None:
        """Those that are there, of which the scheduler has no more to say. Many a scheduler takes a job off its queue
        before the engine asks for its chunks: until then they would be what no job needs and goes first."""
        leaving: list[tuple[Job, Mark]] = []
        for name in names:
            job = feed.jobs.get(name)
            mark = self.credit.ended(job) if job is not None else None
            if job is not None and mark is not None:
                leaving.append((job, mark))
        self._remove(feed, names)
        for job, mark in leaving[-HANDED_OVER_MAX:] if hand_over else ():
            self._hand_over(job, mark)

    def _hand_over(self, gone: Job, mark: Mark) -> None:
        """A job that was just removed stands before all others for a while."""
        jobs = self.state.jobs
        if len(self._handed_over) >= HANDED_OVER_MAX:
            jobs.remove(self._handed_over.popleft().job)
        job = replace(gone, line=jobs.new_line(-LINES_BEFORE), rows=[], handed_over=True)
        self._handed_over.append(HandedOver(job, mark, self.state.now + GRACE_MS))
        jobs.add((job,))

    def _let_go(self) -> None:
        """Of the jobs that were handed over, those whose chunks somebody has asked for, and the overdue."""
        now, staying, going = self.state.now, deque[HandedOver](), list[Job]()
        for handed in self._handed_over:
            asked = self.credit.was_asked_for(handed.job.namespace, handed.mark)
            if handed.until <= now or asked is not False:
                going.append(handed.job)
            else:
                staying.append(handed)
        if going:
            self._handed_over = staying
            self.state.jobs.remove_many(going)

    def _remove(self, feed: Feed, names: Iterable[bytes]) -> None:
        """Those that are there."""
        jobs = [job for name in names if (job := feed.jobs.pop(name, None)) is not None]
        feed.keys -= sum(len(job.keys) for job in jobs)
        self.state.jobs.remove_many(jobs)

    def _drop_if_empty(self, worker: WorkerId, namespace: NamespaceId) -> None:
        feeds = self.feeds[worker]
        if not feeds[namespace].jobs and not feeds[namespace].number:
            del feeds[namespace]
            if not feeds:
                del self.feeds[worker]

    def _answer(self, published: Publication) -> ev.QueueAccepted:
        """A job that ended again before the plan was made is rejected."""
        feed = self.feeds.get(published.ticket.worker, {}).get(published.namespace)
        jobs = feed.jobs if feed is not None else {}
        window = self.state.jobs.windows.get(published.tenant)
        results = []
        for name in published.jobs:
            job = jobs.get(name)
            if name in published.refused:
                results.append(published.refused[name])
            elif job is None or window is None:
                results.append(HintResult.REJECTED)
            elif not window.is_kept(job):
                results.append(HintResult.CLIPPED)
            else:
                results.append(HintResult.ACCEPTED if window.is_ahead(job) else HintResult.DEFERRED)
        return ev.QueueAccepted(tuple(results), *self.reach(published.tenant), namespaces=published.looked_in)

    # ------------------------------------------------------------------------------------------------------- ending

    def forget(self, worker: WorkerId) -> None:
        for feed in self.feeds.pop(worker, {}).values():
            for job in feed.jobs.values():
                self.credit.dropped(job)
            self._remove(feed, list(feed.jobs))
        for handed in [handed for handed in self._handed_over if handed.job.worker == worker]:
            self._handed_over.remove(handed)
            self.state.jobs.remove(handed.job)
        for namespace, name in list(self.actions.get(worker, {})):
            self.drop(worker, namespace, name)
        self._unanswered = [published for published in self._unanswered if published.ticket.worker != worker]

    def _expire(self) -> None:
        now = self.state.now
        due = [
            (worker, number, feed)
            for worker, feeds in self.feeds.items()
            for number, feed in feeds.items()
            if feed.looked_at <= now
        ]
        for worker, number, feed in due:
            if feed.renewed_until > now:
                feed.looked_at = feed.renewed_until
                continue
            over = [name for name, job in feed.jobs.items() if job.until <= now]
            self._end(feed, over, hand_over=False)
            if over:
                feed.number = 0  # changes to what is over mean nothing
            self.state.counters["hints_expired"] += len(over)
            feed.looked_at = min((job.until for job in feed.jobs.values()), default=NEVER)
            self._drop_if_empty(worker, number)

    # ----------------------------------------------------------------------------------------------------- planning

    def tick(self) -> None:
        self._expire()
        if self._handed_over:
            self._let_go()
        self.credit.tick()
        due = self.planner.is_due or (self._later and self._later[0][0] <= self.state.now)
        waiting = self._unanswered or self._promoting or self.state.jobs.cooled or due
        interval_ms = max(REPLAN_MS, self._planned_rows // PUBLISH_ROWS_PER_MS)
        if waiting and self._planned_at + interval_ms <= self.state.now:
            self._plan_and_answer()

    def _plan_and_answer(self) -> None:
        """Whoever waits for the next plan is answered by this one: if nobody has a job any more, it is the last."""
        self.plan()
        unanswered, self._unanswered = self._unanswered, []
        for published in unanswered:
            self.state.reply(published.ticket, self._answer(published))

    def plan(self) -> None:
        """Rank what the queue needs, soonest job first, as far as all tiers reach; promote what DRAM can hold of it."""
        state = self.state
        if self._handed_over:
            self._let_go()
        self.planner.update()
        moves = state.jobs.take_moves()
        self._planned_at = state.now
        self._planned_rows = moves.work
        self.credit.note_near()
        cooled, state.jobs.cooled = state.jobs.cooled, {}
        due = bisect_left(self._later, (state.now + 1,))
        now_due, self._later = self._later[:due], self._later[due:]
        if not state.policy.uses_ranks:
            return
        changes = {row: rank for row, rank in moves.ranks.items() if state.policy.rank.get(row) != rank}
        if changes:
            state.room += 1  # what was needed may go now, or is needed later than something else
            state.policy.change_ranks(state.namespaces, changes)
            self._needed_sooner(changes)
        self._promoting.update(moves.ahead)
        self._promoting.update(cooled)
        for _, _, job in now_due:
            self._promoting.update(dict.fromkeys(job.rows))
        self._promote_ahead()

    def _promote_ahead(self) -> None:
        """What is in the prefetch window and on SSD alone, the soonest first. What finds no room is tried again."""
        state = self.state
        rank, jobs = state.policy.rank, state.jobs
        wanted: list[int] = []
        for row in self._on_ssd_only(list(self._promoting)):
            job = jobs.owner(row)
            if job is None or row not in rank or job.promote_at > state.now:
                continue
            if jobs.windows[job.tenant].is_ahead(job):
                wanted.append(row)
        wanted.sort(key=rank.__getitem__)
        self._planned_rows += len(wanted)
        self._promoting = dict.fromkeys(wanted[PROMOTED_PER_PLAN_MAX:])
        for row in wanted[:PROMOTED_PER_PLAN_MAX]:
            self._promote(row)
            if not state.chunks.flags[row] & PROMOTING and not state.is_resident(row):
                self._promoting[row] = None

    def _on_ssd_only(self, rows: Sequence[int]) -> list[int]:
        """Those that are to be promoted."""
        state = self.state
        if len(rows) >= state.batch_min:
            return needed.on_ssd_only(state, rows)
        flags = state.chunks.flags
        return [
            row
            for row in rows
            if flags[row] & (STORED | PROMOTING | DOOMED) == STORED and not state.is_resident(row)
        ]

    # ------------------------------------------------------------------------------------------------ for checkers

    def check_integrity(self) -> None:
        """A job is of its scheduler's tenant, and of the model that its message named."""
        namespaces = self.state.namespaces
        for worker, feeds in self.feeds.items():
            for number, feed in feeds.items():
                named = namespaces.get(number)
                for job in feed.jobs.values():
                    home = namespaces.get(job.namespace)
                    if named is not None and home is not None:
                        assert (home.tenant, home.spec.model) == (named.tenant, named.spec.model), (
                            worker,
                            job,
                        )
