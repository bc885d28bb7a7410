"""How fast something comes, while it comes; and how much of it may be asked for at once.

These are two questions. `Rate` forecasts when so many bytes will be here (prefetch windows), so it averages, and it is
low where little was asked for. `AtOnce` keeps the slowest op clear of its deadline, so it goes by how long single ops
take, queueing and latency included, and one late op is enough; were it the rate times a delay, a source of which
little was asked would never be asked for more. What a source says of a chunk (`Found.cost_ms`) is a third: the latency
of one chunk, by which sources are compared before either of them was read.
"""

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
    disk or the link is. Twice as many after an op that took less than an eighth of it while more than half of them were
    under way (that few come soon says nothing of many), half as many after one that took more than half of it, and
    after one that missed it the least."""

    def __init__(
        self,
        most: int,
        patience_ms: Millis,
        *,
        ops: int = 1,
        first: int = AT_FIRST_BYTES,
        least: int = AT_LEAST_BYTES,
    ) -> None:
        """`ops` share them: several connections bring more than one does. `first` and `least` bytes, where `most`
        allows so many."""
        self.bytes = min(most, first)
        self._ops = ops
        self._most = most
        self._least = min(most, least)
        self._op_least = least
        self._patience_ms = patience_ms

    def __repr__(self) -> str:
        return f"AtOnce({self.bytes} of {self._most} bytes)"

    @property
    def op_bytes(self) -> int:
        """Of one op, its last chunk not counted."""
        return min(BYTES_PER_OP_MAX, max(self._op_least, self.bytes // self._ops))

    def ended(self, took_ms: Millis, under_way: int, *, failed: bool = False) -> None:
        """An op took so long, and until now so many bytes were under way, its own too. One that failed soon tells
        nothing."""
        if took_ms > self._patience_ms:
            self.is_late()
        elif 2 * took_ms > self._patience_ms:
            self.bytes = max(self._least, self.bytes // 2)
        elif 8 * took_ms < self._patience_ms and 2 * under_way > self.bytes and not failed:
            self.bytes = min(self._most, 2 * self.bytes)

    def is_late(self) -> None:
        """An op missed its deadline."""
        self.bytes = self._least
