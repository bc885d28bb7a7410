"""Whether this vLLM calls us as we expect: told when an engine starts, not by a request that fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import vllm

from kvstore.errors import Unsupported

TESTED = ("0.32", "0.33")
"""Versions of vLLM."""


def check_interface(ours: type, base: type) -> None:
    """Raises Unsupported, naming each method of vLLM's class `base` that `ours` lacks or takes with other arguments."""
    if wrong := list(_differences(ours, base)):
        raise Unsupported(
            f"vLLM calls {base.__name__} in a way that {ours.__name__} does not know",
            field="vllm",
            value=f"{vllm.__version__}: {'; '.join(wrong)}",
            remedy=f"use vLLM {' or '.join(TESTED)}, or an attnstore that knows this one",
        )


def _differences(ours: type, base: type) -> Iterator[str]:
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{name} is missing"
    for name in vars(ours):
        theirs = getattr(base, name, None)
        if name.startswith("_") or not callable(theirs):
            continue
        missing = [each for each in _parameters(theirs) if not _takes(getattr(ours, name), each)]
        if missing:
            yield f"{name} is given {', '.join(missing)}"


def _parameters(function: Any) -> list[str]:
    """Those that have a name."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in ("self", "cls")
    ]


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
