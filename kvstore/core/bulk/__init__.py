"""What is done to one row, done to hundreds through views of their columns, in a fraction of the time.

Every function here is a twin of methods that handle one row (`equals`), or a helper that changes nothing and has no
twin. Names with an underscore are parts of these. `tests/unit/core/test_twins.py` does the same with each twin and, one
by one, with the methods that it equals, and compares all that there is; a twin without such a test fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = Callable[Arguments, Result]

TWINS: dict[str, tuple[str, ...]] = {}
"""By the name of a function ("batch.pin"), what it does for many rows ("state.State.pin", below `kvstore.core`)."""
HELPERS: set[str] = set()


def equals(*methods: str) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result]]:
    """The function does for many rows what a loop over these would do."""

    def register(function: Function[Arguments, Result]) -> Function[Arguments, Result]:
        TWINS[_name(function)] = methods
        return function

    return register


def helper(function: Function[Arguments, Result]) -> Function[Arguments, Result]:
    """The function looks at rows for the others and changes nothing."""
    HELPERS.add(_name(function))
    return function


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
