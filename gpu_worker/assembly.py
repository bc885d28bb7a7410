"""A prompt that is put together: some of its tokens have KV in the store, and the others are computed between them.

A *slot* is a token's number in the prompt; its position is another number, and positions may have gaps (Prompt Cache,
arXiv 2311.04934, section 3.4). Slots stand in the order in which tokens attend to one another: each to all slots before
its own. What the store does not have, and what is to be computed although it has it, are *holes*:

    slots      0 ......... 63 64 .. 79 80 ........ 120 121 ....... 150
    positions  0 ......... 63 64 .. 79 95 ........ 135 200 ....... 229
               part           hole     part            hole, which has the last token

Parts are copied into the prompt's own chunks, in between; or, with `by_part`, each lies in a chunk of its own, once for
all prompts that have it, wherever it stands in each, and only the holes are the prompt's own (`Assembly.split`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.gpu_worker.chain import Chain, Imported
from kvstore.keys import ROOT, derived_key, exact_chain, manifest_digest
from kvstore.types import ChunkKey

Span = tuple[int, int]
"""[first, end) of slots."""
METHOD = b"promptcache 1"
"""By what the own tokens of a prompt that sees modules were computed, in their keys."""


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
    deviating: float = 0.0
    """Computed in place, too: of the slots of approximate parts that were loaded, this share, those whose KV deviates
    most (`most_deviating`). Which these are depends on all parts, so nobody shares such a prompt's chunks but exact
    ones."""
    exact: int = 0
    """So many leading tokens are at the positions 0, 1, ... and attend to nothing else: they are what they are in any
    prompt. The others are shared with such prompts alone that begin with the same parts at the same positions."""
    kept: tuple[Kept, ...] = ()
    """What is saved when all is computed ..."""
    owner: str = ""
    """... and the session whose manifest it becomes."""
    salt: bytes = field(default=b"", repr=False)
    """Of the namespace that the keys belong to."""
    by_part: bool = False
    """All prompts that have a part read it in one place, where the engine can."""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not 0 <= self.deviating <= 1:
            raise ValueError(f"deviating is {self.deviating}: must be from 0 to 1")
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

    def split(self, there: Iterable[Part], root: ChunkKey = ROOT) -> Chain:
        """What is computed, as tokens that see the parts `there` in chunks of their own."""
        parts = sorted(there, key=lambda part: part.first)
        own = self.holes(len(self.tokens), parts)
        slots = [slot for begin, end in own for slot in range(begin, end)]
        stand = [*(self.positions[slot] for slot in slots), self.end]
        jumps = [(n, at) for n, at in enumerate(stand) if not n or at != stand[n - 1] + 1]
        seen = []
        for part in parts:
            begin = part.first
            for low, high in (*own, (part.end, part.end)):
                low, high = min(max(low, begin), part.end), min(high, part.end)
                if low > begin:
                    inside = begin - part.first
                    at = bisect_left(slots, begin)
                    seen.append(
                        Imported(
                            part.key, inside, inside + low - begin, self.positions[begin], at, part.delta
                        )
                    )
                begin = max(begin, high)
        return Chain(tuple(self.tokens[slot] for slot in slots), root, tuple(jumps), tuple(seen), METHOD)

    def candidates(self, loaded: Iterable[Part], first: int = 0) -> list[Span]:
        """Of which slots those that deviate most are chosen, if the parts `loaded` are there, and the KV of the first
        `first` slots is what it is to be: approximate ones that are not computed anyway."""
        open_ = bytearray(b"\1" * len(self.tokens))
        for part in loaded:
            if part.first >= self.exact:
                open_[part.first : part.end] = bytes(part.count)
        for begin, end in self.recomputed:
            open_[begin:end] = b"\1" * (end - begin)
        open_[:first] = b"\1" * first
        open_[-1:] = b"\1"
        return missing_spans(open_)

    def holes(
        self, count: int, loaded: Iterable[Part], first: int = 0, chosen: Iterable[Span] = ()
    ) -> list[Span]:
        """What is computed of `count` slots, some of them behind the prompt, if the KV of the first `first` is there,
        and that of `loaded`; `chosen`: of these, what deviates most. The last slot always is."""
        there = bytearray(count)
        there[:first] = b"\1" * first
        for part in loaded:
            there[part.first : part.end] = b"\1" * part.count
        for begin, end in (*self.recomputed, *chosen):
            there[max(begin, first) : end] = bytes(max(0, end - max(begin, first)))
        there[count - 1 :] = b"\0"
        return missing_spans(there)


def most_deviating(
    deviations: Sequence[float] | NDArray[Any], among: Iterable[Span], count: int
) -> list[Span]:
    """The `count` slots of the spans `among` whose KV deviates most from what full attention gives, as spans in their
    order; of equal ones the first, and what is no number before all. `deviations`: of each slot of these spans, one
    after the other (CacheBlend, arXiv 2405.16444: tokens that deviate in one layer deviate in the later ones)."""
    slots = np.concatenate([np.arange(begin, end) for begin, end in among] or [np.arange(0)])
    if count <= 0 or not slots.size:
        return []
    worth = np.nan_to_num(np.asarray(deviations, np.float64), nan=np.inf, posinf=np.inf)
    assert len(worth) == len(slots), (len(worth), len(slots))
    chosen = np.sort(slots[np.argsort(-worth, kind="stable")[:count]])
    edges = np.flatnonzero(np.diff(chosen) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(chosen, edges)]


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
