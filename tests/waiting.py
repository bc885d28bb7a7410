"""Waiting for facts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BOUND_S = 60.0


def eventually(
    what: Callable[[], Any],
    why: str | Callable[[], object] = "it never became true",
    *,
    bound_s: float = BOUND_S,
) -> Any:
    """The first true answer of `what`. There has to be one within `bound_s` seconds, or the test fails and says
    `why`."""
    deadline = time.monotonic() + bound_s
    while not (found := what()):
        assert time.monotonic() < deadline, why() if callable(why) else why
        time.sleep(0.002)
    return found
