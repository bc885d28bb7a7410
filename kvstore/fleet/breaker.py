"""When to leave a peer alone: after failures in a row, for longer each time, until one try succeeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES_MAX = 3
OPEN_S_MIN = 1.0
OPEN_S_MAX = 60.0


class Breaker:
    """Of one peer; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._open_s = OPEN_S_MIN
        self._trying = False
        self.why = ""
        """Of the last failure."""

    @property
    def closed(self) -> bool:
        """Whether it would let somebody through; takes no part in that."""
        with self._lock:
            return self._failures < FAILURES_MAX or (not self._trying and self._clock() >= self._until)

    def enter(self) -> bool:
        """Whether the caller may try now, and then has to say how that ended. While the peer is left alone, one at a
        time may find out whether it is back."""
        with self._lock:
            if self._failures < FAILURES_MAX:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._open_s = OPEN_S_MIN
            self._trying = False
            self.why = ""

    def failed(self, why: str) -> None:
        with self._lock:
            self._failures += 1
            self._trying = False
            self.why = why
            if self._failures >= FAILURES_MAX:
                self._until = self._clock() + self._open_s
                self._open_s = min(2 * self._open_s, OPEN_S_MAX)
