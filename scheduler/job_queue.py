"""Jobs (turns of conversations) that wait for a worker, first come first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Job:
    """One turn: answer `tokens`, the whole conversation so far."""

    session: str
    tokens: tuple[int, ...]
    max_new_tokens: int


class JobQueue:
    """Waiting and running jobs. Of one session one job runs at a time: the next turn needs the last one's KV. Jobs
    without a session (its name is "") stand each for itself.

    Jobs of one session leave in the order in which they came; `waiting` is the order over all sessions, from which the
    store's next reads can be foretold.
    """

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._busy: set[str] = set()
        """Sessions of which a job runs."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __repr__(self) -> str:
        return f"JobQueue({len(self._waiting)} waiting, {len(self._running)} running)"

    @property
    def waiting(self) -> tuple[Job, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Job, ...]:
        return tuple(self._running)

    def put(self, job: Job) -> None:
        """It waits, behind all that wait already. Raises BadRequest for what is no Job."""
        if not isinstance(job, Job) or not isinstance(job.session, str):
            raise BadRequest(
                "is no job of a session whose name is a str",
                field="job",
                value=repr(job)[:200],
                remedy="put a Job(session, tokens, max_new_tokens)",
            )
        self._waiting.append(job)

    def start(self) -> Job | None:
        """The first job whose session is idle; None if there is none. It runs until `finish`."""
        for at, job in enumerate(self._waiting):
            if job.session not in self._busy:
                del self._waiting[at]
                self._running.append(job)
                if job.session:
                    self._busy.add(job.session)
                return job
        return None

    def finish(self, job: Job) -> None:
        """The job was answered."""
        for at, running in enumerate(self._running):
            if running is job:
                del self._running[at]
                self._busy.discard(job.session)
                return
        raise KeyError(f"no such job of session {job.session!r} is running")

    def withdraw(self, job: Job) -> None:
        """Nobody wants this waiting job's answer any more. Raises KeyError if it does not wait."""
        for at, waiting in enumerate(self._waiting):
            if waiting is job:
                del self._waiting[at]
                return
        raise KeyError(f"no such job of session {job.session!r} waits")

    def give_back(self, job: Job) -> None:
        """The job's worker is gone: it is the next to be started again."""
        self.finish(job)
        self._waiting.appendleft(job)
