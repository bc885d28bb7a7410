"""Errors in the connector itself, one at each of its calls: vLLM's scheduler and ranks go on, every request ends with
the right KV, and nothing wrong is found in the store afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import prompt
from .test_ranks import Rig, daemon, rig

__all__ = ["daemon", "rig"]

SCHEDULER = (
    *("on_new_request", "_look_up", "matched", "allocated", "step", "_begin", "_save", "_hint"),
    *("_look_at_weights", "loaded", "reported", "finished", "step_ended"),
)
WORKER = (
    "begin",
    "_check",
    "_use",
    "load",
    "await_layer",
    "save_layer",
    "end_forward",
    "_room",
    "_put",
    "report",
)
BY_LAYER = ("await_layer", "save_layer")
"""Not called for whole loads and saves."""
SILENCED = ("_look_at_weights", "_check")
"""Behind these nobody knows any more what the ranks hold."""


class Fails:
    """Raises at the call with this number, and does what it stands for at all others."""

    def __init__(self, method: Callable[..., Any], number: int) -> None:
        self._method = method
        self._left = number
        self.failed = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.failed = True
            raise ZeroDivisionError
        return self._method(*given, **named)


def check(rig: Callable[..., Rig], engine: Rig, tokens: list[int], where: Any, name: str) -> None:
    """`engine` knows these tokens from the store, unless it fails at one of the first calls."""
    failures = 0
    for number in (1, 2):
        engine.scheduler.reset_prefix_cache()
        whole = getattr(where, name)
        fault = Fails(whole, number)
        setattr(where, name, fault)
        engine.run(tokens + prompt(900 + number, 70))
        setattr(where, name, whole)
        failures += fault.failed
    assert failures, "it was never called"
    last = rig()
    for number in (1, 2):  # what is in the store is right, whatever of it there is
        last.scheduler.reset_prefix_cache()
        assert last.run(tokens + prompt(900 + number, 70)) >= 288


@pytest.mark.parametrize("name", SCHEDULER)
def test_on_the_schedulers_side(rig: Callable[..., Rig], name: str) -> None:
    tokens = prompt(800 + SCHEDULER.index(name), 300)
    rig().run(tokens)
    engine = rig()
    side = engine.scheduler.connector.scheduler_side
    check(rig, engine, tokens, side, name)
    assert side.tally.total["bugs"]
    assert not side._requests and not side._loading
    engine.scheduler.reset_prefix_cache()
    assert engine.run(tokens) == (0 if name in SILENCED else 288)


@pytest.mark.parametrize(
    ("name", "layerwise"),
    [*((name, True) for name in WORKER), *((name, False) for name in WORKER if name not in BY_LAYER)],
)
def test_on_a_ranks_side(rig: Callable[..., Rig], name: str, layerwise: bool) -> None:
    tokens = prompt(850 + 20 * layerwise + WORKER.index(name), 300)
    rig().run(tokens)
    engine = rig(layerwise=layerwise)
    side = engine.workers[1].worker_side
    check(rig, engine, tokens, side, name)
    assert side.tally.total["bugs"]
    engine.scheduler.reset_prefix_cache()
    assert engine.run(tokens) == 288


def test_a_reset_that_fails_leaves_nothing_to_be_found(rig: Callable[..., Rig]) -> None:
    """Whoever reset the cache wants nothing of before."""
    tokens = prompt(899, 300)
    engine = rig()
    engine.run(tokens)
    side = engine.scheduler.connector.scheduler_side
    side._use = Fails(side._use, 1)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.scheduler.reset_prefix_cache()
    assert engine.run(tokens) == 0 and side.tally.total["bugs"] == 1
    engine.scheduler.reset_prefix_cache()
    assert engine.run(tokens) == 0, "nothing was saved either"
