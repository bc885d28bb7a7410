"""How long the interpreter's search for reference cycles may hold up the loop.

A full search looks at every object that can be part of a cycle. With a million sessions those are millions, none of
them in a cycle, and the search takes seconds. So whatever survives a search that took long is not looked at again: it
is frozen. The next one begins with nothing and looks only at what is new since. Frozen objects still go when nobody
refers to them; only cycles that were alive at such a moment, and ended later, stay: what belonged to the connections
that were open then, a few kilobytes for each, once in some hundred thousand new objects.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_S = 0.01


class ShortSearches:
    """Beside `gc.callbacks`; `close` takes it off them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._clock()
        elif info["generation"] == 2 and self._clock() - self._began >= LONG_S:
            gc.freeze()

    def close(self) -> None:
        gc.callbacks.remove(self._called)


@contextmanager
def no_searches() -> Iterator[None]:
    """While millions of objects are made that stay: they are frozen at the end."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
