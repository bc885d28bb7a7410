"""A prompt that is put together: some of its tokens have KV in the store, and the others are computed between them.

A *slot* is a token's number in the prompt; its position is another number, and positions may have gaps (Prompt Cache,
arXiv 2311.04934, section 3.4). Slots stand in the order in which tokens attend to one another: each to all slots before
its own. What the store does not have, and what is to be computed although it has it, are *holes*:

    slots      0 ......... 63 64 .. 79 80 ........ 120 121 ....... 150
    positions  0 ......... 63 64 .. 79 95 ........ 135 200 ....... 229
               part           hole     part            hole, which has the last token
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.keys import derived_key, exact_chain, manifest_digest
from kvstore.types import ChunkKey

Span = tuple[int, int]
"""[first, end) of slots."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk that the store may have: the slots [first, first + count) are its tokens. `delta`: how far they have
    moved from the positions that their KV was computed at."""

    key: ChunkKey
    first: int
    count: int
    delta: int = 0

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Kept:
    """Slots whose KV is saved once it is computed, as a chunk of this key, at this position."""

    key: ChunkKey
    parent: ChunkKey
    first: int
    count: int
    position: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Assembly:
    """All of a prompt but what is chosen later: generated tokens stand at the positions from `end` on."""

    tokens: tuple[int, ...] = field(repr=False)
    positions: tuple[int, ...] = field(repr=False)
    end: int
    parts: tuple[Part, ...] = field(default=(), repr=False)
    """In the order of their slots."""
    recomputed: tuple[Span, ...] = ()
    """Computed in place although the store may have them."""
    exact: int = 0
    """So many leading tokens are at the positions 0, 1, ... and attend to nothing else: they are what they are in any
    prompt. The others are shared with such prompts alone that begin with the same parts at the same positions."""
    kept: tuple[Kept, ...] = ()
    """What is saved when all is computed ..."""
    owner: str = ""
    """... and the session whose manifest it becomes."""
    salt: bytes = field(default=b"", repr=False)
    """Of the namespace that the keys belong to."""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count != len(self.positions) or not count:
            raise ValueError(f"{count} tokens have {len(self.positions)} positions")
        end = 0
        for part in self.parts:
            if part.first < end or part.end > count or part.count < 1:
                raise ValueError(f"the part at slot {part.first} overlaps the one before it, or the end")
            end = part.end

    @property
    def jumps(self) -> list[tuple[int, int]]:
        """(slot, its position) of the first slot and of each that does not stand right behind the one before it."""
        stand = (*self.positions, self.end)
        return [(slot, at) for slot, at in enumerate(stand) if not slot or at != stand[slot - 1] + 1]

    def chain(self, chunk_tokens: int, salt: bytes, root: ChunkKey) -> list[ChunkKey]:
        """What the pool calls the prompt's full chunks, if all parts are loaded: two prompts whose slots begin alike,
        at the same positions, with KV of the same source, have the same KV there. Chunks of exact tokens have the keys
        that they have in any prompt; the others' stand for nothing outside of such prompts."""
        keys = exact_chain(salt, self.tokens[: self.exact], chunk_tokens, root)
        parent = keys[-1] if keys else root
        positions = np.array(self.positions, "<u8")
        for begin in range(len(keys) * chunk_tokens, len(self.tokens) - chunk_tokens + 1, chunk_tokens):
            end = begin + chunk_tokens
            entries = [
                (parent, begin, chunk_tokens, 0, False),
                (positions[begin:end].tobytes(), 0, 0, 0, False),
            ]
            # Which of these slots are of which part, and which of those are computed all the same
            low = bisect_right(self.parts, begin, key=lambda part: part.end)
            high = bisect_left(self.parts, end, key=lambda part: part.first)
            entries += [
                (part.key, part.first, part.count, part.delta, False) for part in self.parts[low:high]
            ]
            low = bisect_right(self.recomputed, begin, key=lambda span: span[1])
            high = bisect_left(self.recomputed, end, key=lambda span: span[0])
            entries += [(b"", first, until - first, 0, True) for first, until in self.recomputed[low:high]]
            parent = derived_key(salt, manifest_digest(entries), self.tokens[begin:end])
            keys.append(parent)
        return keys

    def holes(self, count: int, loaded: Iterable[Part], first: int = 0) -> list[Span]:
        """What is computed of `count` slots, some of them behind the prompt, if the KV of the first `first` is there,
        and that of `loaded`. The last slot always is."""
        there = bytearray(count)
        there[:first] = b"\1" * first
        for part in loaded:
            there[part.first : part.end] = b"\1" * part.count
        for begin, end in self.recomputed:
            there[max(begin, first) : end] = bytes(max(0, end - max(begin, first)))
        there[count - 1 :] = b"\0"
        return missing_spans(there)


def missing_spans(there: Sequence[int]) -> list[Span]:
    """Maximal spans of zeros."""
    found: list[Span] = []
    begin = -1
    for at, one in enumerate(there):
        if one and begin >= 0:
            found.append((begin, at))
            begin = -1
        elif not one and begin < 0:
            begin = at
    if begin >= 0:
        found.append((begin, len(there)))
    return found
