"""Threads with a bounded queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Crew:
    """Works off what it is offered, in order. What does not fit is refused at once, never waited for."""

    def __init__(self, name: str, *, threads: int, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Callable[[], object]] = deque()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, work: Callable[[], object]) -> bool:
        """False: the queue is full, or closed, and `work` will not be done."""
        with self._changed:
            if self._closing or len(self._queue) >= self._waiting_max:
                return False
            self._queue.append(work)
            self._changed.notify()
            return True

    def close(self, timeout_s: float) -> bool:
        """Drops what waits, and waits for what is under way; False if that took too long."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                work = self._queue.popleft()
            try:
                work()
            except Exception:
                # Our bug. Whoever waits for this work has a deadline; the thread goes on.
                log.exception("a bug in a background thread")
            del work  # with the rows and leases that it holds
