"""What vLLM does not tell a tier, but its callers have in hand: looked up on the stack. Where vLLM has changed, nobody
knows, and the tier goes on without."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from kvstore.gpu_worker.connectors.offload import Group

CALLERS_MAX = 12


class Range(NamedTuple):
    """Tokens of a request about whose chunks vLLM asks."""

    begin: int
    """It has those before by itself."""
    end: int


def tokens_of_step() -> Mapping[str, int]:
    """Of each request in the step that is being scheduled; empty if nobody among the callers knows."""
    output = _held_by_a_caller("scheduler_output").get("scheduler_output")
    tokens = getattr(output, "num_scheduled_tokens", None)
    return tokens if isinstance(tokens, Mapping) else {}


def range_asked() -> Range | None:
    """Of the request whose first chunk vLLM asks about; None if nobody among the callers knows, or vLLM will load a
    part of it only."""
    held = _held_by_a_caller("max_hit_size_tokens")
    begin, end = held.get("num_computed_tokens"), held.get("max_hit_size_tokens")
    capped = getattr(held.get("req_status"), "max_load_tokens", 0) is not None
    return None if capped or not isinstance(begin, int) or not isinstance(end, int) else Range(begin, end)


def own_cache_was_emptied() -> bool | None:
    """By the reset that is under way: vLLM empties its own cache first, unless requests hold blocks of it. None if
    nobody among the callers knows."""
    emptied = _held_by_a_caller("reset_successful").get("reset_successful")
    return emptied if isinstance(emptied, bool) else None


def asked(
    groups: Sequence[Group], places: Mapping[bytes, tuple[int, int]], asks: Range
) -> dict[bytes, tuple[int, int]]:
    """Of a request's chunks those that vLLM asks about if the answer to each is "ask again": the groups that need all
    chunks first, then the others, the largest windows first. `places`: (group, tokens up to its end) of each key."""
    ends: dict[int, int] = {}
    for number, end in places.values():
        ends[number] = max(end, ends.get(number, 0))
    spans: dict[int, tuple[int, int]] = {}
    end = asks.end
    for group in sorted(groups, key=_order):
        size, last = group.chunk_tokens, ends.get(group.number, 0)
        end = min(end, last)
        if end - asks.begin < size:
            return {}
        upto = min(end + size, last) if group.draft else end
        spans[group.number] = (asks.begin // size * size, -(-upto // size) * size)
    return {
        key: (number, end)
        for key, (number, end) in places.items()
        if number in spans and spans[number][0] < end <= spans[number][1]
    }


def _order(group: Group) -> tuple[bool, int]:
    if group.window is None:
        return (False, 0)
    return (True, -max(1, -(-group.window // group.chunk_tokens)))


def _held_by_a_caller(name: str) -> dict[str, Any]:
    """The variables of the nearest caller that has one of this name."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(CALLERS_MAX):
        if frame is None:
            break
        if name in frame.f_code.co_varnames:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}
