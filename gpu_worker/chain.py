"""Keys of KV that saw more than the text before it: what they cover, so that two that differ never meet under one key.

A *chain* is what a request computes itself: its own tokens, where they stand, and what they see beside each other,
which are tokens of other chains (`Seen`). Up to where it sees the first of these, or where its positions first leave a
gap, its chunks are exact (invariant 2), with the keys of any prompt. From there on chunk n is derived:

    U_n = manifest_digest( (key_(n-1), position of the chunk, token count, 0, False)
                           (b"jump", number in the chunk, position, 0, False) ...       of gaps inside of it
                           (key, first position, count, delta, True) ...                of what it sees first,
                           (maker, place in the chunk, seen from which of its tokens, 0, True)      after each
                           (method, 0, 0, 0, True) )
    key_n = derived_key(U_n, tokens of the chunk)

`key_(n-1)` covers all that came before. `method` says by what setting and version something approximate was made;
`maker` names who made it, where that is known: what is made anew differs in bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvstore.keys import ROOT, derived_key, exact_chain, manifest_digest
from kvstore.types import ChunkKey, SessionEntry

Jump = tuple[int, int]
"""(number of an own token, its position): from there on positions go up by one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one chunk of another chain, as its viewer sees it."""

    key: ChunkKey
    chunk: int
    """Its number in that chain."""
    first: int
    """Its first token's place in the chunk."""
    count: int
    begin: int
    """The position for which the keys of that token were computed."""
    position: int
    """Where it stands here."""
    at: int

    @property
    def delta(self) -> int:
        return self.position - self.begin


@dataclass(frozen=True)
class Seen:
    """Tokens [begin, end) of a chain, which are full chunks of it or lie in such. The first stands at `position`, and
    the viewer's own tokens see them from number `at` on."""

    chain: Chain
    begin: int
    end: int
    position: int
    at: int
    maker: bytes = b""

    def parts(self, salt: bytes, size: int) -> Iterator[Part]:
        """Piece by piece, with keys under this salt."""
        keys = self.chain.keys(salt, size, -(-self.end // size))
        begin, position = self.begin, self.position
        while begin < self.end:
            number, first = divmod(begin, size)
            count = min(size - first, self.end - begin)
            yield Part(keys[number], number, first, count, self.chain.position(begin), position, self.at)
            begin, position = begin + count, position + count


@dataclass(frozen=True, slots=True)
class Imported:
    """Tokens [begin, end) of a chunk that a module of Prompt Cache has in the store: what `Seen` is of a chain."""

    key: ChunkKey
    begin: int
    end: int
    position: int
    at: int
    delta: int = 0
    """How far they stand from where they were encoded."""
    maker: bytes = b""

    def parts(self, salt: bytes, size: int) -> Iterator[Part]:
        """All of it, with its one key: that of the store."""
        count = self.end - self.begin
        yield Part(self.key, 0, self.begin, count, self.position - self.delta, self.position, self.at)


@dataclass(frozen=True, eq=False)
class Chain:
    """`tokens` may be the first of more: keys are asked for with those that there are."""

    tokens: tuple[int, ...] = field(repr=False)
    root: ChunkKey = ROOT
    jumps: tuple[Jump, ...] = ((0, 0),)
    seen: tuple[Seen | Imported, ...] = ()
    method: bytes = b""
    _known: dict[tuple[bytes, int], list[ChunkKey]] = field(default_factory=dict, repr=False)

    @cached_property
    def exact_tokens(self) -> int | None:
        """So many of its first tokens are those of an ordinary prompt; None: all, however many."""
        limits = [one.at for one in self.seen] + [number for number, at in self.jumps if number != at]
        return min(limits, default=None)

    def exact_chunks(self, size: int) -> int | None:
        return None if self.exact_tokens is None else self.exact_tokens // size

    def position(self, number: int) -> int:
        """Where its own token of that number stands."""
        first, position = max(jump for jump in self.jumps if jump[0] <= number)
        return position + number - first

    def keys(self, salt: bytes, size: int, count: int) -> list[ChunkKey]:
        """Of its first `count` chunks; its tokens must fill them."""
        known = self._known.setdefault((salt, size), [])
        if len(known) < count:
            self.extend(known, self.tokens, salt, size, count)
        return known[:count]

    def extend(self, keys: list[ChunkKey], tokens: Sequence[int], salt: bytes, size: int, count: int) -> None:
        """Append those keys of the first `count` chunks that are missing; `tokens` begin as the chain's."""
        exact = self.exact_chunks(size)
        while len(keys) < count:
            number = len(keys)
            if exact is None or number < exact:
                end = count if exact is None else min(count, exact)
                here = tokens[number * size : end * size]
                keys += exact_chain(salt, here, size, keys[-1] if keys else self.root)
            else:
                under = self.under(keys, number, salt, size)
                keys.append(derived_key(salt, under, tokens[number * size : (number + 1) * size]))

    def under(self, keys: Sequence[ChunkKey], number: int, salt: bytes, size: int) -> ChunkKey:
        """What its chunk of that number attended to, beside its own tokens: a key's digest, or the exact parent."""
        before = keys[number - 1] if number else self.root
        exact = self.exact_chunks(size)
        if exact is None or number < exact:
            return before
        begin, end = number * size, (number + 1) * size
        entries = [(bytes(before), self.position(begin), size, 0, False)]
        entries += [
            (b"jump", at - begin, position, 0, False) for at, position in self.jumps if begin < at < end
        ]
        for one in self.seen:
            # In the first derived chunk, also what its exact tokens did not see
            if begin <= one.at < end or (number == exact and one.at < end):
                for part in one.parts(salt, size):
                    entries.append((part.key, part.begin, part.count, part.delta, True))
                    entries.append((one.maker, part.first, max(0, one.at - begin), 0, True))
        entries.append((self.method, 0, 0, 0, True))
        return ChunkKey(manifest_digest(entries))

    def manifest(self, own: Sequence[SessionEntry], salt: bytes, size: int) -> list[SessionEntry]:
        """A session's entries, in the order of their positions: `own` are those of its first chunks, as an ordinary
        prompt would name them."""
        exact = self.exact_chunks(size)
        if exact is None:
            return list(own)
        entries = [*own[:exact]]
        if len(own) >= exact:
            parts = [part for one in self.seen for part in one.parts(salt, size)]
            entries += [
                SessionEntry(part.key, part.begin, part.count, part.delta, approximate=True)
                for part in sorted(parts, key=lambda part: part.position)
            ]
        entries += [
            SessionEntry(one.key, self.position(one.first_token), one.token_count) for one in own[exact:]
        ]
        return entries
