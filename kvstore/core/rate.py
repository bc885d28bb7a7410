"""How fast something comes, while it comes; and how much of it may be asked for at once."""

from __future__ import annotations

from kvstore.types import Millis

REMEMBERED_MS = 2_000
"""Of busy time: what is older counts half as much."""
AT_FIRST_BYTES = 8 << 20
AT_LEAST_BYTES = 1 << 20
BYTES_PER_OP_MAX = 8 << 20


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


class AtOnce:
    """How many bytes of reads, or of writes, may be under way: as many as end well before their deadline, whatever the
    disk is. Twice as many after an op that took less than an eighth of it, half as many after one that took more than
    half of it, and after one that missed it the least."""

    def __init__(self, most: int, patience_ms: Millis) -> None:
        self.bytes = min(most, AT_FIRST_BYTES)
        self._most = most
        self._least = min(most, AT_LEAST_BYTES)
        self._patience_ms = patience_ms

    def __repr__(self) -> str:
        return f"AtOnce({self.bytes} of {self._most} bytes)"

    @property
    def op_bytes(self) -> int:
        """Of one op."""
        return min(BYTES_PER_OP_MAX, max(AT_LEAST_BYTES, self.bytes))

    def ended(self, deadline: Millis, now: Millis) -> None:
        """An op that had to end until `deadline`, `patience_ms` after it began."""
        took_ms = now - deadline + self._patience_ms
        if took_ms > self._patience_ms:
            self.bytes = self._least
        elif 2 * took_ms > self._patience_ms:
            self.bytes = max(self._least, self.bytes // 2)
        elif 8 * took_ms < self._patience_ms:
            self.bytes = min(self._most, 2 * self.bytes)
