"""Counters that any thread may raise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol


class Counts(Protocol):
    """Where it is counted: a `Tally`, or an engine's own."""

    def add(self, **counts: int) -> None: ...


class Tally:
    """`counters`: what may be counted, by name, with a line about each."""

    def __init__(self, counters: Mapping[str, str]) -> None:
        self._known = counters.keys()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        assert counts.keys() <= self._known, counts
        with self._lock:
            self._counts.update(counts)
            self.total.update(counts)

    def take(self) -> dict[str, int]:
        """Those counted since the last call, without zeros."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(+counts)
