"""What a queue knows of the future, told to the daemon: which sessions' KV will be asked for, and in which order.

`HintedQueue` is a `JobQueue` that tells by itself, and `AsyncHintedQueue` the same on an event loop. Their user calls
what he called before. Telling is best effort and on a thread or task of its own: a daemon that is slow, or away, costs
the scheduler nothing but time that it could have saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from kvstore.client import Hint, QueueAccepted
from kvstore.errors import NotFound, StoreError
from kvstore.scheduler.job_queue import Job, JobQueue
from kvstore.types import SESSION_NAME_BYTES_MAX, HintResult

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Client

log = logging.getLogger(__name__)

JOBS_MAX = 8192
"""How far into the queue hints reach: the daemon clips them to the memory it has."""
MESSAGE_HINTS_MAX = 4096
RENUMBER_AT = 1024
"""Positions begin at 0 again when the head of the queue has a higher one, and one higher than the queue is long: other
schedulers of the tenant number theirs from 0 too."""
TTL_MS = 30_000
"""Hints of a scheduler that died end after this; a living one repeats them in time."""
TIMEOUT_S = 1.0
RETRY_S = 0.1
"""How soon what was not heard is said again, and how soon a new daemon is noticed."""
UNKNOWN_S = 120.0
"""A worker may take so long to load its model and open it; if none has by then, the name may be wrong."""


@dataclass(frozen=True, slots=True)
class Message:
    """What `publish_queue` is told."""

    hints: list[Hint]
    removed: list[bytes]
    snapshot: bool
    number: int


@dataclass(slots=True)
class Told:
    """A job that the daemon has heard of."""

    job: Any
    """Kept, so that no other object has its id."""
    hint: Hint
    rejected: bool = False


class Ledger:
    """What the daemon was told of a queue, so that it need be told no more than what changed.

    Jobs keep their positions while others come and go: those in front go up from 0 as the queue moves on, until they
    are numbered anew. Not for several threads at a time.
    """

    highest: ClassVar[int] = 0
    """Of all messages of this process: to a client's next queue the daemon must not say that it heard all that."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], Told] = {}
        """By the job's id, and which of several entries of the same object it is."""
        self._names = 0
        self._number = Ledger.highest
        self._whole = True

    def forget(self) -> None:
        """The daemon may lack some of it: it is told all at the next time."""
        self._whole = True

    def messages(self, jobs: Sequence[JobLike], *, again: bool) -> Iterator[Message]:
        """What has to be said of these, in the order in which they will run; `again`: also when nothing changed, and
        what was rejected. Each counts as said: `answered` tells what became of it, `forget` that nobody knows."""
        queue = self._places(jobs)
        gone = [entry for entry in self._told if entry not in queue]
        left = {self._told[entry].hint.session for entry in gone}
        removed = [self._told.pop(entry).hint.job for entry in gone]
        positions = self._positions(list(queue))
        hints: list[Hint] = []
        for (entry, (job, session)), position in zip(queue.items(), positions, strict=True):
            told = self._told.get(entry)
            if told is None:
                self._names += 1
                told = Told(job, Hint(b"%d" % self._names, position, session=session))
                self._told[entry] = told
            elif told.hint.position != position:
                told.hint = replace(told.hint, position=position)
            elif not (self._whole or (told.rejected and (again or session in left))):
                continue
            told.rejected = False
            hints.append(told.hint)
        whole, self._whole = self._whole, False
        if not (whole or again or hints or removed):
            return
        for first in range(0, max(1, len(hints), len(removed)), MESSAGE_HINTS_MAX):
            part = slice(first, first + MESSAGE_HINTS_MAX)
            self._number += 1
            Ledger.highest = max(Ledger.highest, self._number)
            yield Message(hints[part], [] if whole else removed[part], whole and first == 0, self._number)

    def answered(self, message: Message, answer: QueueAccepted) -> list[Hint]:
        """The hints of it that were rejected: they are said again when that may be of use."""
        if answer.snapshot_wanted:
            self.forget()
            return []
        results = dict(zip((hint.job for hint in message.hints), answer.results, strict=False))
        rejected = {name for name, result in results.items() if result is HintResult.REJECTED}
        for told in self._told.values() if rejected else ():
            told.rejected = told.rejected or told.hint.job in rejected
        return [hint for hint in message.hints if hint.job in rejected]

    def _places(self, jobs: Sequence[JobLike]) -> dict[tuple[int, int], tuple[JobLike, bytes]]:
        """The jobs of which the daemon can be told, in order, with the names of their sessions."""
        found: dict[tuple[int, int], tuple[JobLike, bytes]] = {}
        for job in jobs:
            session = _session_of(job)
            if session:
                same = 0
                while (id(job), same) in found:
                    same += 1
                found[id(job), same] = (job, session)
        return found

    def _positions(self, entries: Sequence[tuple[int, int]]) -> list[int]:
        """Ascending; as few as possible are other than before."""
        positions = [
            told.hint.position if (told := self._told.get(entry)) is not None else None for entry in entries
        ]
        known = [position for position in positions if position is not None]
        if self._whole or not known or known[0] > max(RENUMBER_AT, len(entries)):
            return list(range(len(entries)))
        found: list[int] = []
        behind = max(known) + 1
        tail = len(entries)
        while tail and positions[tail - 1] is None:
            tail -= 1
        found += range(behind, behind + len(entries) - tail)
        for position in reversed(positions[:tail]):
            if position is None or position >= behind:
                position = max(0, behind - 1)
            found.insert(0, position)
            behind = position
        return found


class JobLike(Protocol):
    """A job of any scheduler."""

    @property
    def session(self) -> str: ...


def _session_of(job: JobLike) -> bytes:
    """What the daemon calls it; nothing for what the daemon would refuse: its turn is computed all the same."""
    try:
        session = job.session.encode(errors="surrogateescape")
    except (AttributeError, UnicodeEncodeError):  # no text, or half a character
        return b""
    return session if len(session) <= SESSION_NAME_BYTES_MAX else b""


def jobs_ahead(queue: JobQueue) -> list[Job]:
    """The queue in order, the running jobs first: their KV is in use, or will be in a moment."""
    return [*queue.running, *islice(queue.waiting, JOBS_MAX)][:JOBS_MAX]


class Telling:
    """What became of the messages that were published, and when the next one is due: the same for a thread and a task.

    `counters`: published (messages of which the daemon took something, or that had no hints), rejected (hints: their
    sessions nobody has recorded; told to the log once), failed (messages; told to the log once in a row), unknown
    (messages: no worker has opened the model; told to the log when jobs have waited for it for UNKNOWN_S).
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.ledger = Ledger()
        self._heard = True
        self._unknown_since: float | None = None
        self._due = 0.0
        self._told = b""
        self.counters = {"published": 0, "rejected": 0, "failed": 0, "unknown": 0}

    def is_due(self, boot_id: bytes) -> bool:
        """Without a change: hints end by themselves, and a daemon that was started anew knows nothing of the queue."""
        return time.monotonic() >= self._due or boot_id != self._told

    def messages(self, jobs: Sequence[JobLike], boot_id: bytes) -> Iterator[Message]:
        if boot_id != self._told:
            self.ledger.forget()
        return self.ledger.messages(jobs, again=self.is_due(boot_id))

    def taken(self, message: Message, answer: QueueAccepted, boot_id: bytes) -> bool:
        """False: nothing was, and all has to be said."""
        hints = message.hints
        rejected = self.ledger.answered(message, answer)
        if answer.snapshot_wanted:
            return False
        if rejected:
            if not self.counters["rejected"]:
                self._warn_of(rejected, len(hints), answer.namespaces)
            self.counters["rejected"] += len(rejected)
        if not hints or len(rejected) < len(hints):
            self.counters["published"] += 1
        self._heard = True
        self._unknown_since = None
        self._due = time.monotonic() + TTL_MS / 3000
        self._told = boot_id
        return True

    def _warn_of(self, rejected: Sequence[Hint], hints: int, namespaces: Sequence[int]) -> None:
        log.warning(
            "model=%s: %d of %d hints were rejected, because no worker has recorded their sessions (the first: %r) in "
            "any namespace of the model (looked at: %s), so nothing is brought ahead for them. Of a session's first "
            "turn that is as it should be; later, have the worker record what it saved (Namespace.update_session), "
            "under the name that the job has, or publish chunk keys (Hint(keys=...)). Told once: see "
            "counters['rejected']",
            self._model,
            len(rejected),
            hints,
            rejected[0].session,
            ", ".join(map(str, namespaces)) or "?",
        )

    def refused(self, message: Message, error: Exception) -> None:
        if isinstance(error, NotFound):
            self.ledger.forget()
            self.counters["unknown"] += 1
            if message.hints:
                self._unknown()
            return
        self.unheard(error)

    def unheard(self, error: Exception) -> None:
        """By a daemon that is away, or for an error of ours, which must not end the telling."""
        self.ledger.forget()
        self.counters["failed"] += 1
        if self._heard:
            log.warning("hints are not heard: %s", error, exc_info=not isinstance(error, StoreError))
        self._heard = False

    def _unknown(self) -> None:
        """No worker has opened the model, so there is nothing to bring: yet, or because its name is another."""
        now = time.monotonic()
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since >= UNKNOWN_S:
            self._unknown_since = float("inf")  # said once
            log.warning(
                "model=%s: no worker has opened it, so hints wait (is it the name that workers give their namespace? "
                "See kvctl namespaces)",
                self._model,
            )


class Publisher:
    """A thread that publishes what changed in a queue, soon after it did; all of it to a daemon that was started anew
    or missed something; and a word that all still holds before it expires. `jobs` gives the queue in order, and is
    called on that thread. For `counters` see `Telling`."""

    def __init__(self, client: Client, model: str, jobs: Callable[[], Sequence[JobLike]]) -> None:
        self._client = client
        self._model = model
        self._jobs = jobs
        self._telling = Telling(model)
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-hints", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> dict[str, int]:
        return self._telling.counters

    def changed(self) -> None:
        self._changed.set()

    def close(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        again = False
        while not self._stop.is_set():
            changed = self._changed.wait(RETRY_S)
            if not (changed or again or self._telling.is_due(self._client.boot_id)):
                continue
            self._changed.clear()
            try:
                again = not self._publish()
            except Exception as error:
                self._telling.unheard(error)
                again = True

    def _publish(self) -> bool:
        """False: try again soon."""
        for message in self._telling.messages(self._jobs(), self._client.boot_id):
            try:
                answer = self._client.publish_queue(
                    self._model,
                    message.hints,
                    removed=message.removed,
                    snapshot=message.snapshot,
                    number=message.number,
                    ttl_ms=TTL_MS,
                    timeout_s=TIMEOUT_S,
                )
            except StoreError as error:
                self._telling.refused(message, error)
                return False
            if not self._telling.taken(message, answer, self._client.boot_id):
                return False
        return True


class HintedQueue(JobQueue):
    """A `JobQueue` for several threads whose every change reaches the daemon as a hint, told by a thread; `with`, or
    `close`, ends it.

        with connect("/tmp/kv") as client, HintedQueue(client, "my-model") as queue:
            queue.put(Job("chat 7", tokens=(1, 2, 3), max_new_tokens=64))
            job = queue.start()      # None: nothing waits whose session is idle
            ...                      # the worker answers it
            queue.finish(job)        # or give_back(job), if its worker is gone
    """

    def __init__(self, client: Client, model: str) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._publisher = Publisher(client, model, self._jobs_ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def published(self) -> int:
        """Messages of which the daemon took something."""
        return self._publisher.counters["published"]

    @property
    def rejected(self) -> int:
        """Hints whose sessions nobody had recorded, so that nothing is brought ahead for them."""
        return self._publisher.counters["rejected"]

    @property
    def counters(self) -> dict[str, int]:
        """See `Telling`."""
        return dict(self._publisher.counters)

    def put(self, job: Job) -> None:
        """It waits, behind all that wait already. Raises BadRequest for what is no Job."""
        with self._lock:
            super().put(job)
        self._publisher.changed()

    def start(self) -> Job | None:
        """The first job whose session is idle; None if there is none. It runs until `finish`."""
        with self._lock:
            job = super().start()
        self._publisher.changed()
        return job

    def finish(self, job: Job) -> None:
        """The job was answered. Raises KeyError if it does not run."""
        with self._lock:
            super().finish(job)
        self._publisher.changed()

    def give_back(self, job: Job) -> None:
        """The job's worker is gone: it is the next to be started again. Raises KeyError if it does not run."""
        with self._lock:
            super().finish(job)
            self._waiting.appendleft(job)
        self._publisher.changed()

    def withdraw(self, job: Job) -> None:
        """Nobody wants this waiting job's answer any more. Raises KeyError if it does not wait."""
        with self._lock:
            super().withdraw(job)
        self._publisher.changed()

    def close(self) -> None:
        """Nothing is told any more. Idempotent."""
        self._publisher.close()

    def _jobs_ahead(self) -> list[Job]:
        with self._lock:
            return jobs_ahead(self)


class AsyncHintedQueue(JobQueue):
    """A `JobQueue` of an event loop whose every change reaches the daemon as a hint, told by a task. `put`, `start`,
    `finish`, `give_back` and `withdraw` never wait. Made and used on the loop's thread; `async with`, or `close`, ends
    the task."""

    def __init__(self, client: AsyncClient | Callable[[], Awaitable[AsyncClient]], model: str) -> None:
        """`client`: or what makes one, as soon as there is a daemon; that one is closed with the queue."""
        super().__init__()
        self._connect = client if callable(client) else None
        self._client = None if callable(client) else client
        self._model = model
        self._telling = Telling(model)
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kv-hints")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def published(self) -> int:
        """Messages of which the daemon took something."""
        return self._telling.counters["published"]

    @property
    def rejected(self) -> int:
        """Hints whose sessions nobody had recorded, so that nothing is brought ahead for them."""
        return self._telling.counters["rejected"]

    @property
    def counters(self) -> dict[str, int]:
        """See `Telling`."""
        return dict(self._telling.counters)

    def put(self, job: Job) -> None:
        super().put(job)
        self._changed.set()

    def start(self) -> Job | None:
        job = super().start()
        self._changed.set()
        return job

    def finish(self, job: Job) -> None:
        super().finish(job)
        self._changed.set()

    def give_back(self, job: Job) -> None:
        super().give_back(job)
        self._changed.set()

    def withdraw(self, job: Job) -> None:
        super().withdraw(job)
        self._changed.set()

    async def close(self) -> None:
        """Nothing is told any more. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._connect is not None and self._client is not None:
            await self._client.close()

    async def _run(self) -> None:
        again = False
        while True:
            # Not wait_for: that one forgets a cancellation that comes together with the change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._changed.wait()
            again = again or self._changed.is_set()
            self._changed.clear()
            try:
                if self._client is None and self._connect is not None:
                    self._client = await self._connect()
                client = self._client
                assert client is not None, "neither given nor to be made"
                if again or self._telling.is_due(client.boot_id):
                    again = not await self._publish(client)
            except Exception as error:
                self._telling.unheard(error)
                again = True

    async def _publish(self, client: AsyncClient) -> bool:
        """False: try again soon."""
        for message in self._telling.messages(jobs_ahead(self), client.boot_id):
            try:
                answer = await client.publish_queue(
                    self._model,
                    message.hints,
                    removed=message.removed,
                    snapshot=message.snapshot,
                    number=message.number,
                    ttl_ms=TTL_MS,
                    timeout_s=TIMEOUT_S,
                )
            except StoreError as error:
                self._telling.refused(message, error)
                return False
            if not self._telling.taken(message, answer, client.boot_id):
                return False
        return True
