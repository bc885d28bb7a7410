"""Queued jobs in their order, the chunks that each will ask for, and the two windows over them, kept up to date.

A plan in full costs a microsecond per chunk of the whole queue. Here a change costs what it changes: each job's chunks
are looked up once and again only when one of them comes or goes (`came`, `lost`, `session_changed`), and of sums over
the queue only the jobs at the ends of the windows are looked at. `requests/plan.py` says the same in full, from
nothing; the simulator and the tests hold both together.

A chunk that several jobs need is counted for the first of them, and ranked with it. A chunk's rank is its job's label
and its place in the job, so that no job behind one that comes or goes is numbered anew.

A hint action that keeps or brings chunks (`requests/hint_actions.py`) is a job too. Its position is beyond those of
queued jobs, and it counts in no sum that schedulers are told.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvstore.types import ActionKind, ChunkKey, HintAction, Millis, NamespaceId, WorkerId

PLACE_BITS = 17
"""Of a rank: a job has fewer chunks."""
PLACE_MAX = (1 << PLACE_BITS) - 1
ARRIVAL_BITS = 46
"""Of a line: jobs at equal positions stand in the order in which they came;"""
LINE_STEP = 1 << ARRIVAL_BITS
"""and positions are so far apart,"""
LINES_BEFORE = 1 << 32
"""with room for so many more before position 0."""
FIRST, BEHIND, LAST = -(1 << 31), 1 << 40, 1 << 62
"""Positions of hint actions: before the first queued job, even where a snapshot puts some before others that stay in
line; behind the last one (the due time is added); last of all."""


@dataclass(slots=True, eq=False)
class Job:
    worker: WorkerId
    tenant: str
    namespace: NamespaceId
    name: bytes
    session: bytes
    keys: tuple[ChunkKey, ...]
    position: int
    line: int
    """Where it stands among the tenant's jobs; no two stand at the same."""
    since: Millis
    until: Millis
    chunk_bytes: int
    promote_at: Millis = 0
    """Its chunks are not brought to DRAM before."""
    action: HintAction | None = None
    """It stands for a hint action, not for a queued job."""
    label: int = field(init=False)
    """Of all jobs, the soonest first; the rank of its first chunk."""
    rows: list[int] = field(default_factory=list)
    """The chunks that it will ask for and that can be had: of a chain up to the first that cannot. While it is in
    reach."""
    owned: int = 0
    """How many of them no sooner job needs."""
    looked_at: int = 0
    awaits: Sequence[ChunkKey] = ()
    """Those that would be among them if they could be had, each once: of a chain one at most."""
    manifest: object | None = None
    """That `rows` were taken from. Of several jobs that name it, the first has them."""
    in_reach: bool = False
    handed_over: bool = False
    """It left its queue, and nobody asked for its chunks yet: it stands before all that still wait."""

    def __post_init__(self) -> None:
        self.stand(self.line)

    def stand(self, line: int) -> None:
        """There, while it is in no book."""
        self.line = line
        self.label = line << PLACE_BITS

    @property
    def is_pin(self) -> bool:
        return self.action is not None and self.action.kind is ActionKind.PIN

    def __repr__(self) -> str:
        return f"Job({self.name!r} at {self.position}, {len(self.rows)} chunks, {self.owned} its own)"


def first_label(position: int) -> int:
    """No job at this position, or behind it, has a lower one."""
    return position + LINES_BEFORE << ARRIVAL_BITS + PLACE_BITS


_QUEUED_FROM, _QUEUED_TO = first_label(FIRST + 1), first_label(BEHIND)
_label = attrgetter("label")
MANY = 16
"""Jobs: from so many on, what is done to all of them at once pays."""


class Window:
    """Jobs of one tenant, and how far the memory reaches."""

    __slots__ = (
        "ahead",
        "ahead_bytes",
        "ahead_bytes_max",
        "bytes",
        "edge",
        "handed_over",
        "kept_bytes_max",
        "labels",
        "looked_at",
        "of",
        "pinned_bytes",
        "reach",
    )  # fmt: skip

    def __init__(self) -> None:
        self.labels: list[int] = []
        """Of all jobs, ascending."""
        self.of: dict[int, Job] = {}
        """By label."""
        self.reach = 0
        """So many jobs, from the first, have been looked up: those whose chunks fit, and the first that does not."""
        self.bytes = 0
        """Of the chunks of these."""
        self.pinned_bytes = 0
        """Of these, the ones that pins keep: they have a bound of their own, and take no queued job's place."""
        self.looked_at = 0
        """Chunks that were looked at for these."""
        self.edge: Job | None = None
        """The first that does not fit."""
        self.ahead = 0
        """So many jobs, from the first, are in the prefetch window."""
        self.ahead_bytes = 0
        self.ahead_bytes_max = self.kept_bytes_max = 0
        """What the windows might hold when they were moved last."""
        self.handed_over = 0
        """So many jobs, from the first, left their queues and have not asked yet."""

    def __repr__(self) -> str:
        return f"Window({len(self.labels)} jobs, {self.kept} kept, {self.ahead} ahead)"

    @property
    def kept(self) -> int:
        """So many jobs, from the first, are in the eviction window."""
        return self.reach - (self.edge is not None)

    def job(self, number: int) -> Job:
        return self.of[self.labels[number]]

    @property
    def is_whole(self) -> bool:
        """Whether all jobs are in reach: what they need is known."""
        return self.reach == len(self.labels)

    @property
    def queued(self) -> range:
        """The numbers of the queued jobs; those that left their queues and pins stand before them, other actions
        behind."""
        labels = self.labels
        return range(bisect_left(labels, _QUEUED_FROM), bisect_left(labels, _QUEUED_TO))

    @property
    def reaches(self) -> tuple[int, int]:
        """How far the prefetch and the eviction window reach, in queued jobs."""
        queued = self.queued
        ahead, kept = (min(max(end, queued.start), queued.stop) for end in (self.ahead, self.kept))
        return ahead - queued.start, kept - queued.start

    def queued_before(self, rank: int) -> int:
        """How many queued jobs come before the one whose chunk has this rank."""
        queued = self.queued
        number = bisect_left(self.labels, rank & ~PLACE_MAX)
        return min(max(number - queued.start, 0), len(queued))

    @property
    def is_empty(self) -> bool:
        """Whether all of its jobs have left their queues."""
        return len(self.labels) == self.handed_over

    def handed_over_bytes(self) -> int:
        """Of the chunks of these."""
        jobs = map(self.job, range(min(self.handed_over, self.kept)))
        return sum(job.owned * job.chunk_bytes for job in jobs)

    def is_ahead(self, job: Job) -> bool:
        return bool(self.ahead) and job.label <= self.labels[self.ahead - 1]

    def is_kept(self, job: Job) -> bool:
        return job.in_reach and job is not self.edge


@dataclass(slots=True)
class Moves:
    """What a step of the books changed, until somebody acts on it."""

    ranks: dict[int, int | None] = field(default_factory=dict)
    """By chunk row; None: no job needs it any more."""
    ahead: dict[int, None] = field(default_factory=dict)
    """Rows that may have come into the prefetch window."""
    work: int = 0
    """How many chunks were looked at."""


class JobBook:
    def __init__(self) -> None:
        self.windows: dict[str, Window] = {}
        """By tenant."""
        self.shares: dict[str, float] = {}
        """Of a tenant's windows that its record leaves it (see `requests/credit.py`); else all."""
        self.stale: dict[Job, None] = {}
        """Jobs in reach whose chunks have to be looked up again."""
        self.changed = False
        """Jobs came or went since the last plan."""
        self.cooled: dict[int, None] = {}
        """Needed chunks that left DRAM since the last plan."""
        self.moves = Moves()
        self._needed_by: dict[int, Job | list[Job]] = {}
        """By chunk row: the jobs in reach that need it, the soonest first."""
        self._awaited: dict[tuple[NamespaceId, ChunkKey], dict[Job, None]] = {}
        """Jobs in reach that await this chunk."""
        self._of_session: dict[tuple[NamespaceId, bytes], dict[Job, None]] = {}
        self._of_manifest: dict[int, list[Job]] = {}
        """By its id, the soonest first: whoever is listed keeps it alive."""
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"JobBook({sum(len(window.labels) for window in self.windows.values())} jobs)"

    # --------------------------------------------------------------------------------------------- coming and going

    def new_line(self, position: int) -> int:
        """For a job at this position, behind those that have it already."""
        self._arrivals += 1
        return position + LINES_BEFORE << ARRIVAL_BITS | self._arrivals

    def add(self, jobs: Sequence[Job]) -> None:
        self.changed = True
        for job in jobs:
            window = self.windows.get(job.tenant)
            if window is None:
                window = self.windows[job.tenant] = Window()
            window.of[job.label] = job
            window.handed_over += job.handed_over
            if not window.labels or job.label > window.labels[-1]:
                window.labels.append(job.label)
                continue
            at = bisect_left(window.labels, job.label)
            window.labels.insert(at, job.label)
            if at < window.reach:
                window.reach += 1
                window.ahead += at < window.ahead
                job.in_reach = True
                self._watch_session(job)
                self.stale[job] = None

    def remove(self, job: Job) -> None:
        self.changed = True
        window = self.windows[job.tenant]
        at = bisect_left(window.labels, job.label)
        if at < window.reach:
            self._leave(window, job)
            window.reach -= 1
            window.ahead -= at < window.ahead
        if window.edge is job:
            window.edge = None
        del window.labels[at], window.of[job.label]
        window.handed_over -= job.handed_over
        if not window.labels:
            del self.windows[job.tenant]

    def remove_many(self, jobs: Sequence[Job]) -> None:
        """`remove` for each; quick where many go."""
        if len(jobs) < MANY:
            for job in jobs:
                self.remove(job)
            return
        self.changed = True
        by_tenant: dict[str, list[Job]] = {}
        for job in jobs:
            by_tenant.setdefault(job.tenant, []).append(job)
        for tenant, mine in by_tenant.items():
            window = self.windows[tenant]
            if len(mine) == len(window.labels):
                self._clear(window)
                del self.windows[tenant]
                continue
            ahead = sum(map(window.is_ahead, mine))
            reach = sum(job.in_reach for job in mine)
            for job in mine:
                if job.in_reach:
                    self._leave(window, job)
                if window.edge is job:
                    window.edge = None
                del window.of[job.label]
                window.handed_over -= job.handed_over
            window.labels = [label for label in window.labels if label in window.of]
            window.reach -= reach
            window.ahead -= ahead

    def _clear(self, window: Window) -> None:
        """All jobs of a tenant go: nobody inherits their chunks."""
        needed_by, ranks = self._needed_by, self.moves.ranks
        for number in range(window.reach):
            job = window.job(number)
            for row in job.rows:
                if needed_by.pop(row, None) is not None:
                    ranks[row] = None
            self.moves.work += len(job.rows)
            job.rows, job.owned = [], 0
            self._leave(window, job)

    # ------------------------------------------------------------------------------------- what happens to chunks

    def came(self, namespace: NamespaceId, key: ChunkKey) -> None:
        """This chunk can be had from now on."""
        for job in self._awaited.get((namespace, key), ()):
            self.stale[job] = None

    def came_many(self, namespace: NamespaceId, keys: Iterable[ChunkKey]) -> None:
        """`came` for each."""
        if self._awaited:
            for key in keys:
                self.came(namespace, key)

    def lost(self, row: int) -> None:
        """This chunk cannot be had any more."""
        needed_by = self._needed_by.get(row)
        if isinstance(needed_by, list):
            self.stale.update(dict.fromkeys(needed_by))
        elif needed_by is not None:
            self.stale[needed_by] = None

    def lost_many(self, rows: Iterable[int]) -> None:
        """`lost` for each."""
        if self._needed_by and not self._needed_by.keys().isdisjoint(rows):
            for row in rows:
                self.lost(row)

    def left_dram(self, rows: Iterable[int]) -> None:
        """These are on SSD alone."""
        if self._needed_by:
            self.cooled.update(dict.fromkeys(row for row in rows if row in self._needed_by))

    def awaited(self, namespace: NamespaceId, key: ChunkKey) -> set[ChunkKey]:
        """What is asked for by the jobs in reach that stop at this chunk, because it cannot be had."""
        return {wanted for job in self._awaited.get((namespace, key), ()) for wanted in (*job.keys, key)}

    def session_changed(self, namespace: NamespaceId, name: bytes) -> None:
        """It has another manifest, or is gone, or came."""
        for job in self._of_session.get((namespace, name), ()):
            self.stale[job] = None

    def doubt_all(self) -> None:
        """What can be had changed for all chunks."""
        for window in self.windows.values():
            for number in range(window.reach):
                self.stale[window.job(number)] = None

    def owner(self, row: int) -> Job | None:
        """The soonest job in reach that needs it."""
        needed_by = self._needed_by.get(row)
        return needed_by[0] if isinstance(needed_by, list) else needed_by

    # ------------------------------------------------------------------------------------------- chunks of one job

    def fill(self, job: Job, rows: list[int], looked_at: int, awaits: Sequence[ChunkKey]) -> None:
        """The job, in reach and without chunks, needs these."""
        window = self.windows[job.tenant]
        job.looked_at = looked_at
        window.looked_at += looked_at
        self.moves.work += max(1, looked_at)
        job.awaits = awaits
        for key in awaits:
            self._awaited.setdefault((job.namespace, key), {})[job] = None
        if not rows:
            return
        job.rows = rows
        needed_by, ranks = self._needed_by, self.moves.ranks
        ahead = window.is_ahead(job)
        if needed_by.keys().isdisjoint(rows):
            needed_by.update(dict.fromkeys(rows, job))
            ranks.update(zip(rows, range(job.label, job.label + len(rows)), strict=True))
            self._resize(window, job, len(rows))
            if ahead:
                self.moves.ahead.update(dict.fromkeys(rows))
            return
        label, owned = job.label, 0
        for place, row in enumerate(rows):
            known = needed_by.get(row)
            if known is None:
                needed_by[row] = job
            elif isinstance(known, list):
                before = known[0]
                insort(known, job, key=_label)
                if known[0] is not job:
                    continue
                self._resize(window, before, -1)
            elif known.label < label:
                needed_by[row] = [known, job]
                continue
            else:
                needed_by[row] = [job, known]
                self._resize(window, known, -1)
            ranks[row] = label + place
            owned += 1
            if ahead:
                self.moves.ahead[row] = None
        self._resize(window, job, owned)

    def strip(self, job: Job) -> None:
        """The job needs no chunk, for now."""
        window = self.windows[job.tenant]
        window.looked_at -= job.looked_at
        job.looked_at = 0
        for key in job.awaits:
            waiting = self._awaited[job.namespace, key]
            del waiting[job]
            if not waiting:
                del self._awaited[job.namespace, key]
        job.awaits = ()
        rows, job.rows = job.rows, []
        self.moves.work += len(rows)
        self._resize(window, job, -job.owned)
        needed_by, ranks = self._needed_by, self.moves.ranks
        for place, row in enumerate(rows):
            known = needed_by[row]
            if known is job:
                del needed_by[row]
                ranks[row] = None
                continue
            assert isinstance(known, list), (job, row)
            at = bisect_left(known, job.label, key=_label)
            del known[at]
            heir = known[0]
            if len(known) == 1:
                needed_by[row] = heir
            if at:
                continue
            # Jobs that share chunks mostly share the beginning of a chain.
            same = place < len(heir.rows) and heir.rows[place] == row
            ranks[row] = heir.label + (place if same else heir.rows.index(row))
            self._resize(window, heir, +1)
            if window.is_ahead(heir):
                self.moves.ahead[row] = None

    def join_manifest(self, job: Job, manifest: object) -> bool:
        """The job in reach names it; whether it is the first to do so, and is to be filled. Who was that until now has
        no chunks any more."""
        job.manifest = manifest
        sharing = self._of_manifest.setdefault(id(manifest), [])
        insort(sharing, job, key=_label)
        if sharing[0] is not job:
            return False
        if len(sharing) > 1:
            self.strip(sharing[1])
        return True

    def leave_manifest(self, job: Job) -> None:
        """The next that names it is to be filled."""
        if job.manifest is None:
            return
        sharing = self._of_manifest[id(job.manifest)]
        first = sharing[0] is job
        sharing.remove(job)
        if not sharing:
            del self._of_manifest[id(job.manifest)]
        elif first:
            self.stale[sharing[0]] = None
        job.manifest = None

    def _resize(self, window: Window, job: Job, chunks: int) -> None:
        job.owned += chunks
        window.bytes += chunks * job.chunk_bytes
        if job.is_pin:
            window.pinned_bytes += chunks * job.chunk_bytes
        if window.is_ahead(job):
            window.ahead_bytes += chunks * job.chunk_bytes

    # --------------------------------------------------------------------------------------------------- windows

    def enter(self, window: Window) -> Job:
        """The next job comes in reach: to be filled."""
        job = window.job(window.reach)
        window.reach += 1
        job.in_reach = True
        self._watch_session(job)
        return job

    def cut(self, window: Window) -> None:
        """The last job in reach is out of it."""
        self._leave(window, window.job(window.reach - 1))
        window.reach -= 1
        window.ahead = min(window.ahead, window.reach)

    def _leave(self, window: Window, job: Job) -> None:
        self.strip(job)
        self.leave_manifest(job)
        self.stale.pop(job, None)
        job.in_reach = False
        if job.session and not job.keys:
            watching = self._of_session[job.namespace, job.session]
            del watching[job]
            if not watching:
                del self._of_session[job.namespace, job.session]

    def _watch_session(self, job: Job) -> None:
        if job.session and not job.keys:
            self._of_session.setdefault((job.namespace, job.session), {})[job] = None

    def set_edge(self, window: Window, edge: Job | None) -> None:
        """What the job at the edge alone needs has no rank."""
        before, window.edge = window.edge, edge
        ranks = self.moves.ranks
        if before is not None and before is not edge and before.in_reach:
            for place, row in enumerate(before.rows):
                if self.owner(row) is before:
                    ranks[row] = before.label + place
        if edge is not None:
            ranks.update((row, None) for row in edge.rows if self.owner(row) is edge)

    def set_ahead(self, window: Window, bytes_max: int) -> None:
        """As many of the kept jobs, from the first, as have no more bytes, handed over ones and pins aside."""
        kept = window.kept
        bytes_max += window.handed_over_bytes() + window.pinned_bytes
        while window.ahead and (window.ahead > kept or window.ahead_bytes > bytes_max):
            job = window.job(window.ahead - 1)
            window.ahead_bytes -= job.owned * job.chunk_bytes
            window.ahead -= 1
        while window.ahead < kept:
            job = window.job(window.ahead)
            size = job.owned * job.chunk_bytes
            if window.ahead_bytes + size > bytes_max:
                break
            window.ahead_bytes += size
            window.ahead += 1
            self.moves.ahead.update(dict.fromkeys(job.rows))

    def take_moves(self) -> Moves:
        moves, self.moves = self.moves, Moves()
        return moves

    # ------------------------------------------------------------------------------------------------ for checkers

    def check(self) -> None:
        """The sums and the lists; raises AssertionError. Whether they are right is for `requests.plan` to say."""
        needed_by: dict[int, list[Job]] = {}
        for tenant, window in self.windows.items():
            assert window.labels == sorted(window.of) and window.labels, (tenant, window)
            jobs = list(map(window.of.__getitem__, window.labels))
            assert all(job.handed_over == (at < window.handed_over) for at, job in enumerate(jobs)), (
                tenant,
                window,
            )
            assert all(job.in_reach == (at < window.reach) for at, job in enumerate(jobs)), (tenant, window)
            assert not any(job.rows or job.owned or job.awaits for job in jobs[window.reach :]), (
                tenant,
                window,
            )
            assert window.bytes == sum(job.owned * job.chunk_bytes for job in jobs), (tenant, window)
            pinned = sum(job.owned * job.chunk_bytes for job in jobs if job.is_pin)
            assert window.pinned_bytes == pinned, (tenant, window)
            assert window.looked_at == sum(job.looked_at for job in jobs), (tenant, window)
            for job in jobs[: window.reach]:
                for row in job.rows:
                    needed_by.setdefault(row, []).append(job)
        kept = {row: of if isinstance(of, list) else [of] for row, of in self._needed_by.items()}
        assert kept == needed_by, (kept, needed_by)
        for job in _in_reach(self.windows.values()):
            assert job.owned == sum(needed_by[row][0] is job for row in job.rows), job
        waiting = {
            (job.namespace, key, job) for job in _in_reach(self.windows.values()) for key in job.awaits
        }
        assert waiting == {(*name, job) for name, jobs in self._awaited.items() for job in jobs}
        assert all(job.in_reach for job in self.stale), self.stale


def _in_reach(windows: Iterable[Window]) -> Iterator[Job]:
    for window in windows:
        for number in range(window.reach):
            yield window.job(number)
