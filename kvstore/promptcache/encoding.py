"""Which chunks a schema's KV are, and under which keys: what an edit changes, and what it leaves (section 3.3).

A module's KV depends on its tokens, on their positions, and on all that they attended to when the module was encoded.
The key of each of its chunks covers just that:

    beginning   exact keys: the chain of an ordinary prompt, a hit for other prompts too; its last chunk is partial
    others      key_i   = derived_key(salt, manifest_digest((A_i, 0, 0, 0, True), (b"", position_i, count_i, 0, True)),
                                      tokens of chunk i), where
                A_0     = manifest_digest(entries of what the module is encoded after)
                A_(i+1) = manifest_digest((A_i, 0, 0, 0, True), (key_i, position_i, count_i, 0, True))

Placeholders of parameters are attended to and not stored: their key_i is b"placeholder" and the token's number (u32).
So an edit of a module changes the keys of that module, an edit of the beginning those of all, and a module that only
moved has other keys and the same `content`.
"""

from __future__ import annotations

import copy
import enum
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.keys import ROOT, derived_key, exact_key, manifest_digest
from kvstore.promptcache.layout import Layout, Placement, Run, Segment, Source
from kvstore.promptcache.schema import Path
from kvstore.types import ChunkKey

CHUNK_TOKENS = 64


class Method(enum.Enum):
    """What a module is encoded after."""

    BEGINNING = "beginning"
    """The text with which every prompt of its schema begins."""
    ALONE = "alone"
    """Nothing, as in the paper."""
    SHARED = "shared"
    """The system's message, and right behind it: one KV for many schemas, which are rotated to their positions."""


@dataclass(frozen=True, slots=True)
class Chunk:
    key: ChunkKey
    tokens: tuple[int, ...] = field(repr=False)
    position: int
    """Of its first token, when it is encoded."""
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Of a prompt's manifest: `position` is where the chunk was encoded, which moves by `delta`."""

    chunk: Chunk
    delta: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """What is encoded together: a module's own text, the schema's own behind the beginning, or a scaffold."""

    paths: tuple[Path, ...]
    chunks: dict[int, tuple[Chunk, ...]]
    """By segment."""
    content: bytes
    """Digest of all that its keys cover but its place: what moved alone has the same."""
    start: int
    """Position of its first token."""
    after: tuple[Chunk, ...] = ()
    """What it attends to when it is encoded, beside itself."""
    pieces: tuple[Chunk, ...] = ()
    """All that is computed when it is encoded, in this order: its chunks, and placeholders, which have no key."""

    @property
    def keys(self) -> list[ChunkKey]:
        return [chunk.key for chunks in self.chunks.values() for chunk in chunks]

    def encoded_as(self, other: Unit) -> Unit:
        """Itself, with the KV of one that has the same `content`: its own segments, the other's chunks and place."""
        there = iter([chunk for chunks in other.chunks.values() for chunk in chunks])
        chunks = {segment: tuple(next(there) for _ in own) for segment, own in self.chunks.items()}
        return Unit(self.paths, chunks, self.content, other.start, other.after, other.pieces)


class Encoding:
    """The chunks of one schema in one namespace, whose salt is `salt`."""

    def __init__(
        self,
        layout: Layout,
        salt: bytes,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        method: Method = Method.BEGINNING,
    ) -> None:
        self.layout = layout
        self.method = method
        self._salt = salt
        self._chunk_tokens = chunk_tokens
        self.beginning = self._exact(layout.segments[0].tokens if layout.beginning else ())
        """Empty where the schema begins with a parameter, a union or a module with a name."""
        system = layout.segments[0].tokens[: layout.system] if layout.system else ()
        self._after: dict[Method, tuple[Chunk, ...]] = {
            Method.BEGINNING: self.beginning,
            Method.ALONE: (),
            Method.SHARED: self._exact(system),
        }
        by_path: dict[Path, list[int]] = {}
        first = 1 if layout.beginning else 0
        for number, segment in enumerate(layout.segments[first:], first):
            if segment.cache:
                by_path.setdefault(segment.path, []).append(number)
        self.units = {path: self._unit((path,), numbers) for path, numbers in by_path.items()}
        self.scaffolds = tuple(
            self._unit(paths, [number for path in paths for number in by_path.get(path, [])])
            for paths in layout.schema.scaffolds
        )

    def __repr__(self) -> str:
        return f"Encoding({self.layout.schema.name}, {self.method.value}, {len(self.units)} units)"

    def keys(self) -> Iterator[ChunkKey]:
        """Of all chunks of the schema."""
        yield from (chunk.key for chunk in self.beginning)
        for unit in (*self.units.values(), *self.scaffolds):
            yield from unit.keys

    def moved_from(self, earlier: Iterable[Encoding]) -> dict[Path, list[Unit]]:
        """Of each module that has the same text behind the same beginning in encodings of earlier versions, but stood
        elsewhere there: what it was, in the order of `earlier`. Scaffolds are not among them."""
        found: dict[Path, list[Unit]] = {}
        for one in earlier:
            for path, unit in self.units.items():
                old = one.units.get(path)
                if old is not None and old.content == unit.content and old.keys != unit.keys:
                    found.setdefault(path, []).append(old)
        return found

    def replaced(self, units: Mapping[Path, Unit]) -> Encoding:
        """With the KV of these in place of that of its own: prompts have it moved."""
        made = copy.copy(self)
        made.units = self.units | {path: self.units[path].encoded_as(unit) for path, unit in units.items()}
        return made

    # ------------------------------------------------------------------------------------------------- prompts

    def entries(self, placement: Placement) -> list[tuple[Run, tuple[Entry, ...]]]:
        """For each run of a prompt that the store can have, its chunks. A scaffold's take the place of its members' own
        where all of them are in the prompt."""
        used = {run.path for run in placement.runs if run.source is Source.STORED}
        overriding: dict[int, tuple[Chunk, ...]] = {}
        for unit in self.scaffolds:
            if all(path in used for path in unit.paths):
                overriding |= unit.chunks
        exact = True
        found = []
        for run in placement.runs:
            if run.source is not Source.STORED:
                exact = False
                continue
            begins = run.segment == 0 and bool(self.beginning)
            own = self.units.get(run.path)
            chunks = (
                self.document(run).pieces
                if run.document
                else self.beginning
                if begins
                else overriding.get(run.segment)
                or (own.chunks.get(run.segment, ()) if own is not None else ())
            )
            at = run.position
            entries = []
            for chunk in chunks:
                delta = at - chunk.position
                exact = exact and chunk.exact and delta == 0
                entries.append(Entry(chunk, delta, exact))
                at += len(chunk.tokens)
            found.append((run, tuple(entries)))
        return found

    def document(self, run: Run) -> Unit:
        """Of a collection: encoded right behind what it attends to, wherever it stands in a prompt. It has one KV,
        which is rotated to its place."""
        after = self._after[self.method]
        start = sum(len(chunk.tokens) for chunk in after)
        attended = _attended(after)
        content = attended
        chunks = []
        for first in range(0, len(run.tokens), self._chunk_tokens):
            piece = run.tokens[first : first + self._chunk_tokens]
            chunks.append(self._derived(attended, piece, start + first))
            attended = manifest_digest(
                [(attended, 0, 0, 0, True), (chunks[-1].key, start + first, len(piece), 0, True)]
            )
            what = derived_key(self._salt, content, piece)
            content = manifest_digest([(content, 0, 0, 0, True), (what, first, len(piece), 0, True)])
        return Unit((run.path,), {}, content, start, after, tuple(chunks))

    # -------------------------------------------------------------------------------------------------- chunks

    def _exact(self, tokens: Sequence[int]) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        parent = ROOT
        for start in range(0, len(tokens), self._chunk_tokens):
            piece = tuple(tokens[start : start + self._chunk_tokens])
            parent = exact_key(self._salt, parent, piece)
            chunks.append(Chunk(parent, piece, start, exact=True))
        return tuple(chunks)

    def _unit(self, paths: tuple[Path, ...], numbers: Sequence[int]) -> Unit:
        segments = [self.layout.segments[number] for number in numbers]
        order = sorted(
            range(len(numbers)), key=lambda index: (segments[index].position, segments[index].order)
        )
        start = min((segment.position for segment in segments), default=0)
        # the schema's own text is in no other schema
        own = paths == ((),) and self.method is Method.SHARED
        shared = self.method is Method.SHARED and not own
        move = (self.layout.system - start) if shared else 0
        after = self._after[Method.BEGINNING if own else self.method]
        attended = content = _attended(after)
        chunks: dict[int, tuple[Chunk, ...]] = {}
        pieces: list[Chunk] = []
        for index in order:
            made = []
            for at, piece, count in self._pieces(segments[index]):
                place = at + move
                if piece:
                    made.append(self._derived(attended, piece, place))
                    key = made[-1].key
                    pieces.append(made[-1])
                    what = derived_key(self._salt, content, piece)
                else:
                    placeholders = (self.layout.tokenizer.placeholder,) * count
                    pieces.append(Chunk(ChunkKey(b""), placeholders, place))
                    key = what = ChunkKey(
                        b"placeholder" + struct.pack("<I", self.layout.tokenizer.placeholder)
                    )
                attended = manifest_digest([(attended, 0, 0, 0, True), (key, place, count, 0, True)])
                content = manifest_digest([(content, 0, 0, 0, True), (what, at - start, count, 0, True)])
            if made:
                chunks[numbers[index]] = tuple(made)
        return Unit(paths, chunks, content, start, after, tuple(pieces))

    def _derived(self, attended: bytes, piece: Sequence[int], place: int) -> Chunk:
        """Of these tokens from that position on, behind what `attended` says."""
        here = manifest_digest([(attended, 0, 0, 0, True), (b"", place, len(piece), 0, True)])
        return Chunk(derived_key(self._salt, here, piece), tuple(piece), place)

    def _pieces(self, segment: Segment) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """(position, tokens, how many) of each chunk; of placeholders no tokens."""
        for start in range(0, len(segment.tokens), self._chunk_tokens):
            piece = segment.tokens[start : start + self._chunk_tokens]
            yield segment.position + start, piece, len(piece)
        if segment.length > len(segment.tokens):
            at = segment.position + len(segment.tokens)
            yield at, (), segment.end - at


def _attended(chunks: Sequence[Chunk]) -> bytes:
    return manifest_digest((chunk.key, chunk.position, len(chunk.tokens), 0, False) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class Changes:
    """From one version of a schema to another."""

    beginning: bool
    """It is another: nothing is kept that was encoded after it."""
    kept: tuple[Path, ...]
    moved: dict[Path, int]
    """By how many positions. Where keys that moved are not rotated, these are encoded again."""
    encoded: tuple[Path, ...]
    """New, or with another text."""
    gone: tuple[Path, ...]


def changes(old: Encoding, new: Encoding) -> Changes:
    """What of a schema must be encoded after an edit."""
    kept, moved, encoded = [], {}, []
    for path, unit in new.units.items():
        before = old.units.get(path)
        if before is not None and before.keys == unit.keys:
            kept.append(path)
        elif before is not None and before.content == unit.content:
            moved[path] = unit.start - before.start
        else:
            encoded.append(path)
    return Changes(
        [chunk.key for chunk in old.beginning] != [chunk.key for chunk in new.beginning],
        tuple(kept),
        moved,
        tuple(encoded),
        tuple(path for path in old.units if path not in new.units),
    )
