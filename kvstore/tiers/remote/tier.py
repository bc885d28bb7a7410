"""The REMOTE tier: performs the core's effects for the source named "remote" on threads of its own, each answered once.

    looking  LookUpChunks                 fetching  FetchChunks
    storing  StoreChunks, DropChunks      forgetting  ForgetChunks, and what the store could not take before;
                                                      reads what other nodes have forgotten

Each kind has threads of its own, so that no look-up waits behind a transfer and no fetch behind a write. A call that
has not returned `deadline_ms` after it began is ended by a watch, which takes its connection away: a thread is never
lost to a store that answers a byte a second. How many ops are under way is the core's business.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore.config import REMOTE_STORE
from kvstore.core.events import (
    ChunksFetched,
    ChunksForgotten,
    ChunksLookedUp,
    ChunksStored,
    DropChunks,
    Event,
    FetchChunks,
    FetchedChunk,
    ForgetChunks,
    ForgottenElsewhere,
    LookUpChunks,
    StoreChunks,
)
from kvstore.errors import StoreError
from kvstore.fleet.bucket import Bucket
from kvstore.server.logs import fields
from kvstore.tiers.base import SlotMemory, SourceEffect
from kvstore.tiers.remote.backend import Backend, Book, StoreFull, StoreProblem
from kvstore.types import DiskResult, OpId

log = logging.getLogger(__name__)

LOOK_THREADS = 2
WATCH_S = 0.02
FULL_PAUSE_S = 1.0
"""A store that was full is not written to for so long."""
RETRY_S = 1.0
"""What it could not be told is tried again,"""
RETRY_MAX_S = 30.0
"""at least so often."""
POLL_S = 1.0
"""How often it is read what others have forgotten; each read of an object store costs money."""
TIDY_S = 600.0
QUEUED_MAX = 4_096
TOLD_AGAIN_S = 60.0
KIND_CHARACTERS = 60


@dataclass(slots=True)
class _Call:
    thread: int
    deadline: float
    abandoned: bool = False


@dataclass(slots=True)
class _Lane:
    """Threads that share a queue."""

    name: str
    tasks: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)


class RemoteTier:
    def __init__(
        self,
        backend: Backend,
        book: Book,
        memory: SlotMemory,
        *,
        done: Callable[[Event], None],
        threads: int,
        lookup_s: float,
        deadline_s: float,
        bytes_per_s: int,
        poll_s: float = POLL_S,
    ) -> None:
        """`done` is called from threads of the tier; or, for what is refused at once, from `submit`."""
        self._backend = backend
        self._book = book
        self._memory = memory
        self._done = done
        self._lookup_s = lookup_s
        self._deadline_s = deadline_s
        self._read_bucket = Bucket(bytes_per_s)
        self._write_bucket = Bucket(bytes_per_s)
        self._poll_s = poll_s
        self._told_lock = threading.Lock()
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._calls: dict[int, _Call] = {}
        self._full_until = 0.0
        self._told = ""
        """What the store said when it failed last."""
        self._told_at = 0.0
        self._lanes = {
            "look": self._lane("look", LOOK_THREADS),
            "fetch": self._lane("fetch", threads),
            "store": self._lane("store", max(1, threads // 2)),
        }
        self._forgets: queue.SimpleQueue[ForgetChunks | None] = queue.SimpleQueue()
        self._others = [
            threading.Thread(target=self._run_forgets, name="kvstored-remote-forget", daemon=True),
            threading.Thread(target=self._watch, name="kvstored-remote-watch", daemon=True),
        ]
        for thread in self._others:
            thread.start()

    def __repr__(self) -> str:
        waiting = sum(lane.tasks.qsize() for lane in self._lanes.values())
        return f"RemoteTier({self._backend}, {waiting} waiting)"

    def _lane(self, name: str, count: int) -> _Lane:
        lane = _Lane(name)
        lane.threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"kvstored-remote-{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in lane.threads:
            thread.start()
        return lane

    # ------------------------------------------------------------------------------------------------- for the loop

    def submit(self, effect: SourceEffect) -> None:
        now = time.monotonic()
        match effect:
            case LookUpChunks():
                self._put("look", effect, partial(self._look_up, effect, now + self._lookup_s))
            case FetchChunks():
                self._put("fetch", effect, partial(self._fetch, effect, now + self._deadline_s))
            case StoreChunks():
                self._put("store", effect, partial(self._store, effect, now + self._deadline_s))
            case DropChunks():
                self._put("store", effect, partial(self._drop, effect, now + self._deadline_s))
            case ForgetChunks():
                self._book.announce(effect.forgotten)
                self._forgets.put(effect)

    def _put(self, lane: str, effect: SourceEffect, task: Callable[[], None]) -> None:
        tasks = self._lanes[lane].tasks
        if self._closing.is_set() or tasks.qsize() >= QUEUED_MAX:
            self._refuse(effect, "the REMOTE tier is closing, or has too much to do")
        else:
            tasks.put(task)

    def start(self) -> None:
        """The loop takes events now: what was read before a crash may not have left the index, and is heeded again."""
        self._post_news(time.monotonic())

    def close(self, timeout_s: float) -> None:
        """What was submitted has so long to end; a thread that is late is left behind."""
        self._closing.set()
        for lane in self._lanes.values():
            for _ in lane.threads:
                lane.tasks.put(None)
        self._forgets.put(None)
        until = time.monotonic() + timeout_s
        for thread in [thread for lane in self._lanes.values() for thread in lane.threads] + self._others:
            thread.join(max(0.0, until - time.monotonic()))
        self._backend.close()

    # ----------------------------------------------------------------------------------------------------- the threads

    def _run(self, lane: _Lane) -> None:
        while (task := lane.tasks.get()) is not None:
            task()

    def _tell(self, event: Event) -> None:
        """What it was found out with comes first: a chunk that somebody forgot is a miss before it can arrive."""
        self._post_news()
        self._done(event)

    def _post_news(self, asked_at: float | None = None) -> None:
        """Tell the core what others have forgotten, in the order in which it was read; or that nothing is new."""
        with self._telling:
            news, count, reached, untold = self._book.take_news()
            if news or asked_at is not None:
                age_ms = 0 if asked_at is None else int(1_000 * (time.monotonic() - asked_at))
                self._done(ForgottenElsewhere(REMOTE_STORE, news, count, age_ms, reached, untold))

    def _watch(self) -> None:
        """Ends calls that are late, by taking their connections away."""
        while not self._closing.wait(WATCH_S):
            now = time.monotonic()
            for thread, call in list(self._calls.items()):
                if not call.abandoned and now > call.deadline:
                    call.abandoned = True
                    drop = getattr(self._backend, "drop_connections", None)
                    if drop is not None:
                        drop(thread)

    def _calling(self, deadline: float, call: Callable[[], Any]) -> Any:
        """Raises StoreProblem, whatever goes wrong."""
        thread = threading.get_ident()
        if time.monotonic() >= deadline:
            raise StoreProblem("it waited for a thread until its deadline")
        self._calls[thread] = _Call(thread, deadline)
        try:
            return call()
        except StoreProblem:
            raise
        except (StoreError, OSError) as problem:
            raise StoreProblem(str(problem)) from None
        except Exception as problem:
            log.exception("a bug in the REMOTE tier: counted as a failure of the store")
            raise StoreProblem(f"{type(problem).__name__}: {problem}") from None
        finally:
            del self._calls[thread]

    def _problem(self, problem: StoreProblem) -> str:
        why = str(problem) or type(problem).__name__
        now = time.monotonic()
        with self._told_lock:
            # Stores put numbers of requests and times into what they say: the beginning tells kinds of trouble apart.
            new = why[:KIND_CHARACTERS] != self._told[:KIND_CHARACTERS]
            new = new or now - self._told_at > TOLD_AGAIN_S
            self._told = why
            quiet = now - self._told_at < 1.0
            if new and not quiet:
                self._told_at = now
        if new and not quiet:
            log.warning(
                "the REMOTE store fails: this node serves on from its own tiers", extra=fields(why=why)
            )
        return why

    def _look_up(self, effect: LookUpChunks, deadline: float) -> None:
        try:
            found = tuple(self._calling(deadline, lambda: self._backend.look_up(effect, deadline)))
        except StoreProblem as problem:
            self._tell(ChunksLookedUp(effect.op, failed=self._problem(problem)))
            return
        self._tell(ChunksLookedUp(effect.op, found))

    def _fetch(self, effect: FetchChunks, deadline: float) -> None:
        try:
            if not self._read_bucket.take(sum(effect.targets.length), deadline):
                raise StoreProblem("the cap on bandwidth leaves no room before the deadline")
            chunks, count = self._calling(
                deadline, lambda: self._backend.fetch(effect, self._memory, deadline)
            )
        except StoreProblem as problem:
            why = self._problem(problem)
            chunks, count = (FetchedChunk(DiskResult.IO_ERROR, why=why),) * len(effect.keys), 0
        self._tell(ChunksFetched(effect.op, tuple(chunks), count))

    def _store(self, effect: StoreChunks, deadline: float) -> None:
        failed = ""
        wheres: tuple[object, ...] = ()
        result = DiskResult.OK
        try:
            if time.monotonic() < self._full_until:
                raise StoreFull("the store is full")
            if not self._write_bucket.take(sum(effect.sources.length), deadline):
                raise StoreProblem("the cap on bandwidth leaves no room before the deadline")
            wheres = tuple(
                self._calling(
                    deadline, lambda: self._backend.store(effect, self._memory, effect.generation, deadline)
                )
            )
        except StoreFull as problem:
            if time.monotonic() >= self._full_until:
                self._problem(problem)
                self._full_until = time.monotonic() + FULL_PAUSE_S
            result = DiskResult.NO_SPACE
        except StoreProblem as problem:
            failed = self._problem(problem)
            result = DiskResult.IO_ERROR
        self._tell(ChunksStored(effect.op, (result,) * len(effect.keys), failed, 2.0, wheres))

    def _drop(self, effect: DropChunks, deadline: float) -> None:
        try:
            self._calling(deadline, lambda: self._backend.drop(effect.digest, effect.keys, deadline))
        except StoreProblem as problem:
            self._problem(problem)  # they expire

    def _run_forgets(self) -> None:
        pause_s, tidied_at = RETRY_S, time.monotonic()
        postponed: list[OpId] = []
        while True:
            try:
                effect = self._forgets.get(timeout=pause_s)
            except queue.Empty:
                effect = None
                if self._closing.is_set():
                    return
            else:
                if effect is None:
                    return
            asked_at = time.monotonic()
            why = self._forget(effect)
            pause_s = min(RETRY_MAX_S, 2 * pause_s) if why and effect is None else self._poll_s
            self._post_news(None if why else asked_at)
            if effect is not None and why:
                postponed.append(effect.op)
            if not why:
                for op in postponed:  # what was in the journal was told with this
                    self._done(ChunksForgotten(op))
                postponed.clear()
            if effect is not None:
                self._done(ChunksForgotten(effect.op, why))
            if time.monotonic() - tidied_at > TIDY_S:
                tidied_at = time.monotonic()
                self._tidy()

    def _forget(self, effect: ForgetChunks | None) -> str:
        """First into the journal, so that a crash forgets no forget. With nothing to tell: read what others told."""
        if effect is not None:
            self._book.postpone(effect.forgotten)
        self._book.save_again()
        with self._book.lock:
            pending = list(self._book.pending)
        deadline = time.monotonic() + self._deadline_s
        try:
            if pending:
                self._calling(deadline, lambda: self._backend.forget(pending, deadline))
            else:
                self._calling(deadline, lambda: self._backend.catch_up(deadline))
        except StoreProblem as problem:
            return "; ".join(filter(None, [self._problem(problem), self._book.unsaved]))
        self._book.told(pending)
        return ""

    def _tidy(self) -> None:
        deadline = time.monotonic() + max(30.0, self._deadline_s)
        try:
            self._calling(deadline, lambda: self._backend.tidy(deadline))
        except StoreProblem as problem:
            self._problem(problem)

    def _refuse(self, effect: SourceEffect, why: str) -> None:
        match effect:
            case LookUpChunks():
                self._done(ChunksLookedUp(effect.op, failed=why))
            case FetchChunks():
                refused = FetchedChunk(DiskResult.IO_ERROR, why=why)
                self._done(ChunksFetched(effect.op, (refused,) * len(effect.keys)))
            case StoreChunks():
                results = (DiskResult.IO_ERROR,) * len(effect.keys)
                self._done(ChunksStored(effect.op, results, why))
