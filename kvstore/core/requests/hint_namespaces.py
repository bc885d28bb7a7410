"""Hints by model: which of the model's namespaces each is for.

A scheduler knows sessions and prompts of a model, and neither how its workers lay KV out nor which of them will serve a
turn. A tenant may have several namespaces of one model at a time: other chunk sizes or parallel shapes, new weights
beside old ones, a version that was rolled back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from kvstore.core import events as ev
from kvstore.core.chunks import NONE
from kvstore.core.namespaces import Namespace
from kvstore.core.state import SessionName, State
from kvstore.types import ChunkKey


def namespace_for(
    state: State,
    is_unknown: Callable[[SessionName], bool],
    candidates: Sequence[Namespace],
    session: bytes,
    keys: tuple[ChunkKey, ...],
    prompts: Iterable[ev.Prompt],
) -> tuple[Namespace, tuple[ChunkKey, ...]]:
    """One of `candidates`, the one opened last first, and the keys that are named there: where most of the keys can be
    had; or else where the session is, of several where it was used last; or else the first."""
    by_id = {namespace.id: namespace for namespace in candidates}
    named = {namespace.id: keys for namespace in candidates if keys}
    named.update((prompt.namespace, prompt.keys) for prompt in prompts if prompt.namespace in by_id)
    if len(candidates) > 1:
        there = {number: _usable_leading(state, by_id[number], named[number]) for number in named}
        best = max(there.values(), default=0)
        if best:
            number = next(number for number in by_id if there.get(number) == best)
            return by_id[number], named[number]
    home = _home_of(state, is_unknown, candidates, session) if session else None
    if home is None:
        home = next((namespace for namespace in candidates if namespace.id in named), candidates[0])
    return home, named.get(home.id, ())


def _usable_leading(state: State, namespace: Namespace, keys: Sequence[ChunkKey]) -> int:
    """How many of the first keys can be had, by bisection: of a chain those that can stand before those that cannot."""

    def is_gone(at: int) -> bool:
        row = namespace.index.get(keys[at], NONE)
        return row == NONE or not state.is_usable(row)

    return bisect_left(range(len(keys)), True, key=is_gone)


def _home_of(
    state: State,
    is_unknown: Callable[[SessionName], bool],
    candidates: Sequence[Namespace],
    name: bytes,
) -> Namespace | None:
    """Where a session is; if it is nowhere here, where another node may have it."""
    used = [
        (session.used_at, -at)
        for at, namespace in enumerate(candidates)
        if (session := state.sessions.by_name.get((namespace.id, name))) is not None
    ]
    if used:
        return candidates[-max(used)[1]]
    return next((each for each in candidates if not is_unknown((each.id, name))), None)
