"""How fast something comes, while it comes."""

from __future__ import annotations

from kvstore.types import Millis

REMEMBERED_MS = 2_000
"""Of busy time: what is older counts half as much."""


class Rate:
    """Bytes a second over the time in which there is something to do, the recent weighted more. Several ops at a time
    count as one stream: what matters to who waits is what comes, not how long one of them takes."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._ms = 0.0
        self._since: Millis | None = None
        """Up to when busy time is counted; None: there is nothing to do."""

    def __repr__(self) -> str:
        return f"Rate({self.bytes_per_s} bytes/s)"

    def begin(self, now: Millis) -> None:
        """An op begins."""
        if self._since is None:
            self._since = now

    def end(self, bytes_: int, now: Millis, *, more: bool) -> None:
        """An op has brought so many bytes (0: it failed); `more`: others are under way."""
        assert self._since is not None, self
        self._ms += now - self._since
        self._bytes += bytes_
        self._since = now if more else None
        if self._ms > REMEMBERED_MS:
            keep = max(0.5, REMEMBERED_MS / (2 * self._ms))
            self._bytes, self._ms = self._bytes * keep, self._ms * keep

    @property
    def bytes_per_s(self) -> int:
        """0: nothing came yet."""
        return int(1_000 * self._bytes / max(1.0, self._ms))
