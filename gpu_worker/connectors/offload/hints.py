"""Telling the daemon which requests still wait, and for what: it keeps that, and brings it up from SSD."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvstore.client import Hint, QueueAccepted
from kvstore.errors import StoreError
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.lookups import Opener
from kvstore.gpu_worker.connectors.offload.tally import Counts
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, HintResult

JOBS_MAX = 256
"""Told at a time; more wait for the next time, and of those that do not fit the nearest are told."""
JOB_NAME_BYTES_MAX = 64
PUBLISH_S = 1.0
log = logging.getLogger(__name__)


class HintBoard:
    """What changed is collected, and told together once the daemon has heard what went before."""

    def __init__(self, crew: Crew, opener: Opener, tally: Counts) -> None:
        self._crew = crew
        self._opener = opener
        self._tally = tally
        self._lock = threading.Lock()  # guards all below
        self._added: dict[bytes, Hint] = {}
        self._removed: set[bytes] = set()
        self._busy = False
        self.windows = (0, 0)
        """How far the daemon's prefetch and eviction windows reached, in jobs, when it last answered."""

    def add(self, name: str, position: int, keys: Sequence[ChunkKey]) -> bool:
        """False: too many are to be told already."""
        job = job_name(name)
        with self._lock:
            if job not in self._added and len(self._added) >= JOBS_MAX:
                return False
            self._added[job] = Hint(job=job, position=position, keys=tuple(keys[:KEYS_PER_REQUEST_MAX]))
            self._removed.discard(job)
            return True

    def remove(self, name: str) -> None:
        """Of a job that was added."""
        job = job_name(name)
        with self._lock:
            self._added.pop(job, None)
            if len(self._removed) < KEYS_PER_REQUEST_MAX:  # else it ends by itself, in time
                self._removed.add(job)

    def clear(self) -> None:
        """Nothing of what was to be told is true any more."""
        with self._lock:
            self._added.clear()
            self._removed.clear()

    def flush(self) -> None:
        """Tell, in the background. Does not wait."""
        with self._lock:
            if self._busy or not (self._added or self._removed):
                return
            self._busy = True
        if not self._crew.offer(self._publish):
            with self._lock:
                self._busy = False

    def _publish(self) -> None:
        try:
            namespace = self._opener(0.0)
            if namespace is None:
                return  # told when it is back, if it is still true then
            with self._lock:
                added, removed = self._nearest(), sorted(self._removed)
                self._removed.difference_update(removed)
            answer = namespace.publish_queue(added, removed=removed, snapshot=False, timeout_s=PUBLISH_S)
            self._answered(answer)
        except StoreError as error:
            log.debug("hints were not heard: %s", error)
        finally:
            with self._lock:
                self._busy = False

    def _nearest(self) -> list[Hint]:
        """Takes as many as a message may have keys. Caller holds the lock."""
        taken: list[Hint] = []
        keys = 0
        for hint in sorted(self._added.values(), key=lambda hint: hint.position):
            keys += len(hint.keys)
            if taken and keys > KEYS_PER_REQUEST_MAX:
                break
            taken.append(self._added.pop(hint.job))
        return taken

    def _answered(self, answer: QueueAccepted) -> None:
        self.windows = (answer.prefetch_window, answer.eviction_window)
        taken = sum(result in (HintResult.ACCEPTED, HintResult.DEFERRED) for result in answer.results)
        self._tally.add(hints_published=taken, hints_refused=len(answer.results) - taken)


def job_name(name: str) -> bytes:
    """A request's name as the daemon takes it: the end of it, where engines put what is unique."""
    return name.encode()[-JOB_NAME_BYTES_MAX:] or b"-"
