"""Groups of layers that an engine caches apart, and what a request needs of each to go on somewhere.

A chunk's key names all tokens up to its end and its group. A boundary (a count of tokens) of a request can be resumed
if each group has what it needs there:

    full, latent      every chunk up to the boundary
    window, local     the chunks that the next token can see
    state             exactly the state at the boundary: one before or behind is of no use
    draft             as its kind, and one chunk more: the last one depends on a token that its key does not name
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvstore.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers."""

    number: int
    """vLLM's, as in its keys."""
    kind: str
    """full, latent, window, local or state."""
    layers: int
    block_tokens: int
    block_bytes: int
    """Of all its layers, on one rank."""
    window: int | None
    """Tokens that the next one sees, itself counted, or that vLLM keeps with them; 0: a state; None: all."""
    draft: bool
    """Of a drafter."""
    chunk_tokens: int
    """Of the blocks that have one key."""
    kept: int = 0
    """Tokens in front of the window that vLLM keeps all the same."""

    def __str__(self) -> str:
        kind = f"{self.kind} of {self.window} tokens" if self.window else self.kind
        return f"{kind}{' of a drafter' if self.draft else ''}, {self.layers} layers"

    def span(self, boundary: int) -> tuple[int, int]:
        """(first, last]: of chunks that end there, vLLM loads the request only if all are found."""
        size = self.chunk_tokens
        last = -(-boundary // size) * size
        chunks = boundary // size + 1
        if self.window == 0:
            chunks = 1
        elif self.window is not None:
            chunks = -(-self.window // size)
            if self.kind == "window":
                chunks = max(chunks, -(-(self.window - 1 + self.kept + last - boundary) // size))
        first = last - chunks * size
        return max(0, first), last + (size if self.draft else 0)


def needed(
    groups: Sequence[Group],
    places: Mapping[ChunkKey, tuple[int, int]],
    there: Collection[ChunkKey],
    *,
    keys_max: int,
) -> list[ChunkKey]:
    """Of the keys in `there`, those that the request needs at the longest boundary where it can go on, at most
    `keys_max`.

    `places`: (group, tokens up to its end) of each key that was asked about, in one question; a place that is not among
    them counts as there: vLLM has it itself, or would ask. vLLM asks about everything that might be of use, which for a
    group with a window is all of a long prompt; promoting that would push out what is needed.
    """
    by_number = {group.number: group for group in groups}
    ends: dict[int, dict[int, ChunkKey]] = {group.number: {} for group in groups}
    tails: dict[int, list[ChunkKey]] = {}
    for key, (number, end) in places.items():
        if number not in by_number or end <= 0:
            return [key for key in places if key in there][:keys_max]  # vLLM has changed its keys
        if end % by_number[number].chunk_tokens:
            tails.setdefault(end, []).append(key)
        else:
            ends[number][end] = key
    for end in sorted(tails, reverse=True):
        if all(key in there for key in tails[end]):
            return [*_complete(groups, ends, there, keys_max), *tails[end]]
    return _complete(groups, ends, there, keys_max)


def _complete(
    groups: Sequence[Group],
    asked: Mapping[int, Mapping[int, ChunkKey]],
    there: Collection[ChunkKey],
    keys_max: int,
) -> list[ChunkKey]:
    """`needed` among the keys of complete chunks."""
    absent, present = (
        {
            number: sorted(end for end, key in ends.items() if (key in there) is wanted)
            for number, ends in asked.items()
        }
        for wanted in (False, True)
    )
    last = max((end for ends in asked.values() for end in ends), default=0)
    for boundary in sorted({end for ends in asked.values() for end in ends}, reverse=True):
        spans = [(group, *group.span(boundary)) for group in groups]
        if any(
            _between(absent[group.number], first, end)
            or (group.draft and end > last)
            or (group.window == 0 and boundary % group.chunk_tokens)
            for group, first, end in spans
        ):
            continue
        wanted = [
            asked[group.number][number]
            for group, first, end in spans
            for number in _between(present[group.number], first, end)
        ]
        if len(wanted) <= keys_max:
            return wanted
    return []


def _between(ends: Sequence[int], first: int, last: int) -> Sequence[int]:
    return ends[bisect_right(ends, first) : bisect_right(ends, last)]
