"""A cap on bytes a second that several threads share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEPTH_S = 0.1
"""How much of a second may go at once."""


class Bucket:
    """It may be overdrawn by one piece, so that a piece larger than the bucket passes too."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0: no cap."""
        self._rate = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = bytes_per_s * DEPTH_S
        self._at = clock()

    def take(self, size: int, deadline: float) -> bool:
        """Wait until `size` bytes may go. False, at once, if that would be after `deadline`: nothing was taken."""
        if not self._rate:
            return True
        with self._lock:
            now = self._clock()
            self._level = min(self._rate * DEPTH_S, self._level + (now - self._at) * self._rate)
            self._at = now
            wait_s = max(0.0, -self._level / self._rate)
            if now + wait_s > deadline:
                return False
            self._level -= size
        if wait_s:
            self._sleep(wait_s)
        return True
