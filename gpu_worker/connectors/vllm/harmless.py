"""An error of ours must not end the engine: a cache is no reason to fail."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)


class Complaining(Protocol):
    """Whose methods are `harmless`."""

    @property
    def complaints(self) -> set[tuple[str, type[Exception]]]:
        """What was logged already."""

    @property
    def tally(self) -> Any:
        """Counts `bugs`."""


def harmless(fallback: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Whatever is raised is counted, and logged once; then `fallback` is called with the same arguments, and returns
    what the method might have returned."""

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                whose: Any = args[0]
                complain(whose, method.__name__, error)
                instead: R = fallback(*args, **kwargs)
                return instead

        return call

    return wrap


def complain(whose: Complaining, name: str, error: Exception) -> None:
    whose.tally.add(bugs=1)
    if (name, type(error)) not in whose.complaints:
        whose.complaints.add((name, type(error)))
        log.exception("a bug in %s.%s: the engine goes on without", type(whose).__name__, name)
