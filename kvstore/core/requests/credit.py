"""Whose hints come true: a tenant's windows grow and shrink with its record.

A hint is advice, and may be wrong, late or hostile. What it names keeps DRAM from what would be asked for instead, so a
tenant whose jobs come has all of its windows, and one whose jobs do not is left with a hundredth, which shows when they
come true again. A job came true if its last chunk was hit while the daemon knew of it, or soon after, and if the job
had come near the head of its queue: who says last what comes first is no help either.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvstore.core.chunks import NONE
from kvstore.core.jobs import Job, Window
from kvstore.core.state import State
from kvstore.types import ChunkKey, Millis, NamespaceId

GRACE_MS = 1_000
"""Some schedulers take a job off their queue before it asks for anything."""
ENDED_MAX = 16_384
"""Jobs that are waited for so long."""
BENEFIT_OF_DOUBT = 4.0
"""Hints that came true before any was given."""
JUDGED_MAX = 64.0
"""Beyond, all that was judged counts half: what a scheduler did lately tells most."""
NEAR_JOBS = 8
"""So many at the head of a queue are near, however small the window."""
MARKED_JOBS = 64
"""So many at the head are watched."""
PATIENCE, PATIENCE_MIN = 2, 256
"""A job at the head has failed when its tenant asked for so many times the chunks of the window, and so many, since."""
LOOK_MS = 100
"""How often that is looked at."""
LEAST_SHARE = 0.01
STEPS = 16
"""A share changes by such parts: each change moves the ends of the windows."""


@dataclass(slots=True)
class Mark:
    """How often the last chunk of a job had been hit and when it was used, and what its tenant had asked for, when that
    was noted."""

    key: ChunkKey
    hits: int
    used_at: Millis
    asked: int
    used: bool
    """It came true already, or saved the chunk itself: its end tells nothing, but it must not stay for ever."""


@dataclass(slots=True)
class Record:
    true: float = BENEFIT_OF_DOUBT
    false: float = 0.0

    @property
    def share(self) -> float:
        """Of its windows; all of them when three in four came true."""
        ratio = self.true / (self.true + self.false)
        return max(LEAST_SHARE, min(1.0, round(STEPS * 2 * (ratio - 0.25)) / STEPS))

    def add(self, *, true: bool) -> None:
        self.true += true
        self.false += not true
        if self.true + self.false > JUDGED_MAX:
            self.true, self.false = self.true / 2, self.false / 2


class Credit:
    def __init__(self, state: State) -> None:
        self._state = state
        self.records: dict[str, Record] = {}
        """By tenant, of those that ever had a job judged,"""
        self.of_actions: dict[str, Record] = {}
        """and of those that ever had a hint action judged which says what comes (PREFETCH, EXPECT)."""
        self._marks: dict[Job, Mark] = {}
        self._behind: dict[Job, Mark] = {}
        """Of jobs far behind the heads, some: asked for there, they show that the order is none."""
        self._ended: deque[tuple[Millis, str, NamespaceId, Mark]] = deque()
        self._looked_at: Millis = -LOOK_MS
        self._asked: Counter[str] = Counter()
        """Chunks that each tenant had ever asked for, lately."""

    def ended(self, job: Job) -> Mark | None:
        """It is about to leave the queue. What was noted of it, if it may be on its way to who asks for its chunks."""
        mark = self._marks.pop(job, None)
        if mark is None or mark.used:
            return None
        window = self._state.jobs.windows[job.tenant]
        if not _is_near(window, job):
            self._judge(job.tenant, true=False)
        elif self.was_asked_for(job.namespace, mark):
            self._judge(job.tenant, true=True)
        elif len(self._ended) < ENDED_MAX:
            self._ended.append((self._state.now + GRACE_MS, job.tenant, job.namespace, mark))
            return mark
        return None

    def moved(self, old: Job, new: Job) -> None:
        """The same job, at another place."""
        mark = self._marks.pop(old, None)
        if mark is not None:
            self._marks[new] = mark

    def dropped(self, job: Job) -> None:
        """Its scheduler is gone: nobody knows what became of it."""
        self._marks.pop(job, None)

    # ------------------------------------------------------------------------------------------------- hint actions

    def share_of_actions(self, tenant: str) -> float:
        """Of what a tenant's hint actions may bring and keep, its record leaves it so much."""
        record = self.of_actions.get(tenant)
        return 1.0 if record is None else record.share

    def note_action(self, job: Job) -> Mark | None:
        """Of an action that says what comes, how often its last chunk was hit until now; None: it is not there."""
        return self._marked(job, self._asked[job.tenant], used=False) if job.rows else None

    def action_ended(self, job: Job, mark: Mark) -> None:
        """It is over; did somebody ask for what it named?"""
        hit = None if mark.used else self.was_asked_for(job.namespace, mark)
        if hit is not None:
            self._judge_action(job.tenant, true=hit)

    def overdue_action(self, job: Job, mark: Mark) -> Mark | None:
        """Its tenant asked for so much that two arenas would have been filled anew: whatever is said of a time to come,
        what did not come until then kept others out for nothing. It is judged, and noted anew; None: not yet."""
        chunks = self._state.limits.arena_bytes // max(1, job.chunk_bytes)
        asked = self._asked[job.tenant]
        if asked - mark.asked < PATIENCE_MIN + PATIENCE * chunks or not job.rows:
            return None
        hit = self.was_asked_for(job.namespace, mark)
        if hit is not None and not mark.used:
            self._judge_action(job.tenant, true=hit)
        return self._marked(job, asked, used=bool(hit))

    def _judge_action(self, tenant: str, *, true: bool) -> None:
        self.of_actions.setdefault(tenant, Record()).add(true=true)
        self._state.counters["hint_actions_came_true" if true else "hint_actions_came_to_nothing"] += 1

    # ------------------------------------------------------------------------------------------------------ in time

    def tick(self) -> None:
        state = self._state
        while self._ended and self._ended[0][0] <= state.now:
            _, tenant, namespace, mark = self._ended.popleft()
            hit = self.was_asked_for(namespace, mark)
            if hit is not None:
                self._judge(tenant, true=hit)
        if self._looked_at + LOOK_MS > state.now:
            return
        self._looked_at = state.now
        asked: Counter[str] = Counter()
        for space in state.namespaces.values():
            asked[space.tenant] += sum(space.lookups)
        self._asked = asked
        for tenant, window in state.jobs.windows.items():
            self._lose_patience(tenant, window)
        self._look_behind()

    def note_near(self) -> None:
        """Of the jobs at the heads of the queues, how often their chunks were hit until now."""
        for tenant, window in self._state.jobs.windows.items():
            for job in _head(window):
                if job.rows and job not in self._marks:
                    self._mark(job, self._asked[tenant])

    def _lose_patience(self, tenant: str, window: Window) -> None:
        """With the jobs at the head, if one of the first stays for ever."""
        jobs = _head(window)
        if not jobs:
            return
        asked = self._asked[tenant]
        chunks = max(window.ahead_bytes // jobs[0].chunk_bytes, sum(job.owned for job in jobs))
        patience = PATIENCE_MIN + PATIENCE * chunks

        def is_overdue(job: Job) -> bool:
            mark = self._marks.get(job)
            return mark is not None and asked - mark.asked >= patience

        marked = [job for job in jobs if job in self._marks]
        if not any(map(is_overdue, marked[:NEAR_JOBS])):
            return
        for job in filter(is_overdue, marked):
            hit = self.was_asked_for(job.namespace, self._marks[job])
            if hit is not None:
                self._judge(tenant, true=hit)
            self._mark(job, asked, used=bool(hit))

    def _look_behind(self) -> None:
        """What is asked for though MARKED_JOBS others were said to come first, and none of them needs it, counts as a
        job that did not come: who names all that there is in any order would be right with every one of them."""
        windows = self._state.jobs.windows
        for job, mark in list(self._behind.items()):
            window = windows.get(job.tenant)
            if window is None or window.of.get(job.label) is not job or not self._is_far(window, job):
                del self._behind[job]
            elif self.was_asked_for(job.namespace, mark):
                del self._behind[job]
                self._judge(job.tenant, true=False)
        for window in windows.values():
            queued = window.queued
            far = range(queued.start + MARKED_JOBS, min(queued.stop, window.reach))
            for number in far[:: 1 + len(far) // MARKED_JOBS]:
                job = window.job(number)
                if job not in self._behind and self._is_far(window, job):
                    self._behind[job] = self._marked(job, 0, used=False)

    def _is_far(self, window: Window, job: Job) -> bool:
        """Whether it is in reach, behind the head, and the first that needs its last chunk."""
        if not job.rows or self._state.jobs.owner(job.rows[-1]) is not job:
            return False
        return window.queued_before(job.label) >= MARKED_JOBS

    def _mark(self, job: Job, asked: int, *, used: bool = False) -> None:
        self._marks.pop(job, None)
        if job.rows:
            self._marks[job] = self._marked(job, asked, used=used)

    def _marked(self, job: Job, asked: int, *, used: bool) -> Mark:
        """Of a job that has chunks."""
        chunks, row = self._state.chunks, job.rows[-1]
        used = used or chunks.born_at[row] >= job.since
        return Mark(chunks.key[row], chunks.hits[row], chunks.used_at[row], asked, used)

    def was_asked_for(self, namespace_id: NamespaceId, mark: Mark) -> bool | None:
        """Since it was noted. None: the chunk is gone, so that nobody knows."""
        state = self._state
        namespace = state.namespaces.get(namespace_id)
        row = namespace.index.get(mark.key, NONE) if namespace is not None else NONE
        if row == NONE:
            return None
        chunks = state.chunks
        # What has to come from SSD first was asked for as well; what somebody saved anew proves nothing.
        asked = chunks.born_at[row] <= mark.used_at < chunks.used_at[row]
        if asked or chunks.hits[row] > mark.hits:
            return True
        return False if state.is_usable(row) else None

    def _judge(self, tenant: str, *, true: bool) -> None:
        state = self._state
        record = self.records.setdefault(tenant, Record())
        record.add(true=true)
        state.counters["hints_came_true" if true else "hints_came_to_nothing"] += 1
        if state.jobs.shares.get(tenant, 1.0) != record.share:
            state.jobs.shares[tenant] = record.share
            state.jobs.changed = True


def _head(window: Window) -> list[Job]:
    """Of the queued jobs in reach, the first; a hint action promises nothing that could come true."""
    queued = window.queued
    return [window.job(number) for number in queued[:MARKED_JOBS] if number < window.reach]


def _is_near(window: Window, job: Job) -> bool:
    queued = window.queued
    return window.is_ahead(job) or job.label <= window.labels[queued[:NEAR_JOBS].stop - 1]
