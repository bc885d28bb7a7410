"""Where the tokens of a schema and of its prompts stand (sections 3.3 and 3.4 of the paper). Positions count from 0.

schema     text: its tokens; a parameter: its length; a module: what is in it, one after the other;
           a union: its members all begin at one position, and it is as long as the longest
           a collection: its length, or nothing
prompt     what a schema's text says keeps its positions; an argument takes the first positions of its parameter;
           the prompt's own text begins where what stands before it ends; so does each document of a collection, and
           what its collection has no positions for moves what is behind
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.promptcache.markup import PmlError
from kvstore.promptcache.prompt import Documents, FreeText, Import, Item, Prompt
from kvstore.promptcache.schema import (
    Collection,
    Module,
    Node,
    Parameter,
    Path,
    Role,
    Schema,
    Text,
    Union,
)
from kvstore.promptcache.template import around_prompt, around_schema
from kvstore.promptcache.tokenizer import Tokenizer

POSITIONS_MAX = 1 << 31
_END = 1 << 62
"""Behind everything."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one module at consecutive positions: text between parameters and inner modules, or one parameter."""

    path: Path
    position: int
    tokens: tuple[int, ...] = field(repr=False)
    """Of a parameter: those of its scaffold. Placeholders take the other positions up to its length."""
    order: int
    parameter: Parameter | None = None
    cache: bool = True

    @property
    def length(self) -> int:
        return self.parameter.length if self.parameter is not None else len(self.tokens)

    @property
    def end(self) -> int:
        return self.position + self.length


@dataclass(frozen=True, slots=True)
class Area:
    """Of a named module: [start, end) with all that is in it, and between which segments in the order of the schema."""

    start: int
    end: int
    enter: int
    leave: int


class Source(enum.Enum):
    """Where the KV of a run comes from."""

    STORED = "stored"
    """The store, or computed and saved."""
    COMPUTED = "computed"
    """Of a module with cache="false": known text, computed for each prompt."""
    ARGUMENT = "argument"
    TEXT = "text"
    """The prompt's own, and what the chat template writes around it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a prompt at consecutive positions."""

    source: Source
    position: int
    tokens: tuple[int, ...] = field(repr=False)
    path: Path = ()
    parameter: str = ""
    segment: int = -1
    """Of STORED and COMPUTED: the number of the schema's segment; its position may be another by `delta`."""
    delta: int = 0
    document: bool = False
    """Of a collection: `path` ends with its number there."""

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """A prompt's tokens, in the order of their positions, which may have gaps. `end`: the position of the reply."""

    runs: tuple[Run, ...]
    end: int

    @property
    def tokens(self) -> list[int]:
        return [token for run in self.runs for token in run.tokens]

    @property
    def positions(self) -> list[int]:
        return [position for run in self.runs for position in range(run.position, run.end)]

    @property
    def stored(self) -> int:
        """Tokens whose KV the store can have."""
        return sum(len(run.tokens) for run in self.runs if run.source is Source.STORED)


class Layout:
    """The positions of one schema under one tokenizer.

    `beginning`: with how many tokens every prompt of the schema begins: those before the first parameter, union or
    module with a name. `system`: how many of them are the system's message."""

    def __init__(
        self,
        schema: Schema,
        tokenizer: Tokenizer,
        *,
        positions_max: int = POSITIONS_MAX,
        document: str = "schema",
    ) -> None:
        """Raises PmlError: the chat template refuses the messages, a scaffold or the whole is too long."""
        self.schema = schema
        self.tokenizer = tokenizer
        self.positions_max = positions_max
        self.roles = tuple(_roles(schema.children))
        self.segments: list[Segment] = []
        self.areas: dict[Path, Area] = {}
        self.collections: dict[Path, Collection] = {}
        self.system = 0
        self._document = document
        self._around = around_schema(tokenizer, self.roles, document)
        self._next_role = 0
        last = schema.children[-1] if schema.children else None
        self._open = last if isinstance(last, Role) and last.role == "user" else None
        """A user's message at the end, which the text of prompts goes on with: its end is theirs."""
        self._order = 0
        self._position = 0
        self._tokens: list[int] = []
        """Of the segment that is being made, which begins at"""
        self._begins = 0
        self._cache = True
        if not self.roles:
            self._tokens += tokenizer.start
            self._position = len(tokenizer.start)
        self._walk(schema.children, ())
        self._end_segment(())
        self.size = self._position
        """Positions that the schema takes."""
        self.areas[()] = Area(0, self.size, 0, self._number())
        if self.size > positions_max:
            raise PmlError(
                f"schema {schema.name} takes {self.size} positions, and the model has {positions_max}",
                document=document,
                remedy="put modules that exclude each other into unions, or shorten it",
            )
        first = self.segments[0] if self.segments else None
        begins = first is not None and not first.path and first.parameter is None and first.cache
        self.beginning = len(first.tokens) if first is not None and begins and first.position == 0 else 0
        self.system = min(self.system, self.beginning)

    def __repr__(self) -> str:
        return f"Layout({self.schema.name}, {len(self.areas) - 1} modules, {self.size} positions)"

    # -------------------------------------------------------------------------------------------------- schema

    def _number(self) -> int:
        self._order += 1
        return self._order

    def _walk(self, children: Sequence[Node], path: Path) -> None:
        for child in children:
            match child:
                case Text():
                    self._text(child.text)
                case Parameter():
                    self._end_segment(path)
                    self._parameter(child, path)
                case Collection():
                    self._end_segment(path)
                    self._collection(child, path)
                case Role():
                    self._role(child, path)
                case Union():
                    self._end_segment(path)
                    self._union(child, path)
                case Module(name=""):
                    self._anonymous(child, path)
                case Module():
                    self._end_segment(path)
                    self._module(child, path)

    def _text(self, text: str, *, template: bool = False) -> None:
        tokens = self.tokenizer.encode(text, template=template) if text else ()
        self._tokens += tokens
        self._position += len(tokens)

    def _end_segment(self, path: Path) -> None:
        if self._tokens:
            self.segments.append(
                Segment(path, self._begins, tuple(self._tokens), self._number(), cache=self._cache)
            )
            self._tokens = []
        self._begins = self._position

    def _parameter(self, parameter: Parameter, path: Path) -> None:
        scaffold = tuple(self.tokenizer.encode(parameter.scaffold)) if parameter.scaffold else ()
        if len(scaffold) > parameter.length:
            raise PmlError(
                f"the scaffold of parameter {parameter.name} has {len(scaffold)} tokens, more than its length of"
                f" {parameter.length}",
                document=self._document,
                value="/".join((*path, parameter.name)),
                remedy="shorten it, or raise the length",
            )
        self.segments.append(Segment(path, self._position, scaffold, self._number(), parameter, self._cache))
        self._position += parameter.length
        self._begins = self._position

    def _collection(self, collection: Collection, path: Path) -> None:
        inner, start = (*path, collection.name), self._position
        self.collections[inner] = collection
        self._position += collection.length or 0
        self._begins = self._position
        self.areas[inner] = Area(start, self._position, self._number(), self._number())

    def _role(self, role: Role, path: Path) -> None:
        around = self._around[self._next_role]
        first = not self._next_role
        self._next_role += 1
        self._text(around.before, template=True)
        self._walk(role.children, path)
        if role is not self._open:
            self._text(around.behind, template=True)
        if first and role.role == "system" and not path:
            self.system = self._position

    def _union(self, union: Union, path: Path) -> None:
        start = end = self._position
        for member in union.members:
            self._position = start
            self._module(member, path)
            end = max(end, self._position)
        self._position = self._begins = end

    def _module(self, module: Module, path: Path) -> None:
        inner = (*path, module.name)
        enter, start = self._number(), self._position
        self._begins = start
        cache, self._cache = self._cache, self._cache and module.cache
        self._walk(module.children, inner)
        self._end_segment(inner)
        self._cache = cache
        self.areas[inner] = Area(start, self._position, enter, self._number())

    def _anonymous(self, module: Module, path: Path) -> None:
        if module.cache == self._cache:
            self._walk(module.children, path)
            return
        self._end_segment(path)
        cache, self._cache = self._cache, self._cache and module.cache
        self._walk(module.children, path)
        self._end_segment(path)
        self._cache = cache

    # -------------------------------------------------------------------------------------------------- prompts

    def used(self, prompt: Prompt) -> set[Path]:
        """The modules that are in a prompt: those that it imports, and the scaffolds of unions of which it names no
        member."""
        found: set[Path] = {()}
        imported = {one.path for one in _imports(prompt.items)}
        waiting: list[Path] = [()]
        while waiting:
            path = waiting.pop()
            scope = self.schema.scopes[path]
            chosen = {
                scope.unions[name]
                for name in scope.modules
                if (*path, name) in imported and name in scope.unions
            }
            defaults = {name for union, name in scope.scaffolds.items() if union not in chosen}
            for name in scope.modules:
                inner = (*path, name)
                if inner in imported or name in defaults:
                    found.add(inner)
                    waiting.append(inner)
        return found

    def place(self, prompt: Prompt, *, move: bool = True, close_gaps: bool = False) -> Placement:
        """Where each token of a prompt stands.

        Text of the prompt that is longer than the gap it stands in moves what follows it; without `move` it is refused
        instead. `close_gaps`: nothing leaves a gap, so all that follows one moves. The KV of what moved must be rotated
        by its `delta`, or computed. Raises PmlError: an argument is too long, the prompt is.
        """
        assert prompt.schema is self.schema or prompt.schema == self.schema
        used = self.used(prompt)
        arguments: dict[Path, Import | Prompt] = {one.path: one for one in _imports(prompt.items)}
        arguments[()] = prompt
        pieces: list[tuple[tuple[int, int, int], int | tuple[int, ...] | Documents]] = [
            ((segment.order, 0, 0), number)
            for number, segment in enumerate(self.segments)
            if segment.path in used
        ]
        pieces += [
            ((self.areas[item.path].enter, 1, 0), item)
            for item in _items(prompt.items)
            if isinstance(item, Documents)
        ]
        pieces += self._own_text(prompt)
        pieces.sort(key=lambda piece: piece[0])
        runs: list[Run] = []
        cursor = shift = 0
        for _, piece in pieces:
            if isinstance(piece, tuple):
                if piece and runs and runs[-1].source is Source.TEXT and runs[-1].end == cursor:
                    before = runs.pop()
                    runs.append(Run(Source.TEXT, before.position, before.tokens + piece))
                elif piece:
                    runs.append(Run(Source.TEXT, cursor, piece))
                cursor += len(piece)
                continue
            if isinstance(piece, Documents):
                area, length = self.areas[piece.path], self.collections[piece.path].length
                start = cursor if close_gaps else max(cursor, area.start + shift)
                documents = list(self._documents(piece, start))
                runs += documents
                end = documents[-1].end if documents else start
                self._check_length(prompt, piece, end - start)
                shift += 0 if close_gaps else max(0, start - area.start - shift)
                cursor = end if length is None or close_gaps else start + length
                continue
            segment = self.segments[piece]
            run = self._run(piece, arguments.get(segment.path), prompt)
            start = cursor if close_gaps else segment.position + shift
            if start < cursor:
                if not move:
                    raise self._no_room(prompt, segment, cursor - start)
                shift += cursor - start
                start = cursor
            length = len(run.tokens) if close_gaps else segment.length
            delta = start - segment.position
            if run.tokens:
                runs.append(Run(run.source, start, run.tokens, run.path, run.parameter, run.segment, delta))
            cursor = start + length
        if cursor > self.positions_max:
            raise PmlError(
                f"the prompt reaches position {cursor}, and the model has {self.positions_max}",
                document=prompt.document,
                remedy="shorten it, or close its gaps",
            )
        return Placement(tuple(runs), cursor)

    def _documents(self, documents: Documents, start: int) -> Iterator[Run]:
        """One behind the other, from there on."""
        *path, name = documents.path
        for number, text in enumerate(documents.texts):
            tokens = tuple(self.tokenizer.encode(text))
            if tokens:
                yield Run(Source.STORED, start, tokens, (*path, f"{name}[{number}]"), document=True)
            start += len(tokens)

    def _check_length(self, prompt: Prompt, documents: Documents, tokens: int) -> None:
        length = self.collections[documents.path].length
        if length is not None and tokens > length:
            raise PmlError(
                f"the documents of {documents.path[-1]} have {tokens} tokens, more than its length of {length}",
                document=prompt.document,
                line=documents.line,
                column=documents.column,
                remedy="bring fewer, or raise the length in the schema, or leave it out there",
            )

    def _run(self, number: int, given: Import | Prompt | None, prompt: Prompt) -> Run:
        """At no position yet."""
        segment = self.segments[number]
        parameter = segment.parameter
        source = Source.STORED if segment.cache else Source.COMPUTED
        if parameter is None:
            return Run(source, 0, segment.tokens, segment.path, "", number)
        argument = given.arguments.get(parameter.name) if given is not None else None
        if argument is None:
            return Run(source, 0, segment.tokens, segment.path, parameter.name, number)
        tokens = tuple(self.tokenizer.encode(argument)) if argument else ()
        if len(tokens) > parameter.length:
            raise PmlError(
                f"the argument of {parameter.name} has {len(tokens)} tokens, more than its length of"
                f" {parameter.length}",
                document=prompt.document,
                line=given.line if isinstance(given, Import) else 1,
                column=given.column if isinstance(given, Import) else 1,
                value=argument,
                remedy="shorten it, or raise the length in the schema",
            )
        return Run(Source.ARGUMENT, 0, tokens, segment.path, parameter.name)

    def _own_text(self, prompt: Prompt) -> list[tuple[tuple[int, int, int], int | tuple[int, ...]]]:
        """The prompt's own text as tokens, each with its place among the segments."""
        texts = list(self._anchored(prompt.items, ()))
        if self.roles and self._open is None and not any(item.role for item, _ in texts):
            # behind all messages of the schema, text is a message
            texts = [
                (FreeText(item.text, (0, "user")) if place == (_END, 1) else item, place)
                for item, place in texts
            ]
        messages = list(dict.fromkeys(item.role for item, _ in texts if item.role is not None))
        around, reply = around_prompt(
            self.tokenizer, self.roles, self._around, [role for _, role in messages], prompt.document
        )
        before = dict(zip(messages, around, strict=True))
        behind = self._around[-1].behind if self._open is not None else ""
        found: list[tuple[tuple[int, int, int], int | tuple[int, ...]]] = []
        for number, (item, place) in enumerate(texts):
            tokens: list[int] = []
            if item.role is not None and item.role in before:
                tokens += self._opening(behind + before.pop(item.role).before, first=item.role == messages[0])
                behind = ""
            tokens += self.tokenizer.encode(item.text)
            found.append(((*place, number), tuple(tokens)))
        if behind or reply:
            found.append(((_END, 2, 0), tuple(self.tokenizer.encode(behind + reply, template=True))))
        return found

    def _opening(self, text: str, *, first: bool) -> list[int]:
        """What the template writes before a message. The start of the text is there already where the schema has no
        message."""
        tokens = list(self.tokenizer.encode(text, template=True)) if text else []
        start = list(self.tokenizer.start)
        if first and not self.roles and start and tokens[: len(start)] == start:
            del tokens[: len(start)]
        return tokens

    def _anchored(self, items: Sequence[Item], path: Path) -> Iterator[tuple[FreeText, tuple[int, int]]]:
        """Free text with the place it has in the order of the schema: behind the import before it, or before the one
        behind it; else at the end of what it is in."""
        later: list[Import | Documents | None] = [None] * len(items)
        for index in reversed(range(len(items) - 1)):
            item = items[index + 1]
            later[index] = item if not isinstance(item, FreeText) else later[index + 1]
        earlier: Import | Documents | None = None
        for item, follows in zip(items, later, strict=True):
            if isinstance(item, Import | Documents):
                earlier = item
                yield from self._anchored(item.items if isinstance(item, Import) else (), item.path)
            elif not path and follows is None:
                yield item, (_END, 1)
            elif earlier is not None:
                yield item, (self.areas[earlier.path].leave, 1)
            elif follows is not None:
                yield item, (self.areas[follows.path].enter, -1)
            else:
                yield item, (self.areas[path].leave, 1)

    def _no_room(self, prompt: Prompt, segment: Segment, missing: int) -> PmlError:
        return PmlError(
            f"the prompt's own text needs {missing} positions more than there are before"
            f" {'/'.join(segment.path) or 'the text that follows'}",
            document=prompt.document,
            remedy="shorten it, write it behind the imports, or let modules move",
        )


def _items(items: Sequence[Item]) -> Iterator[Item]:
    for item in items:
        yield item
        if isinstance(item, Import):
            yield from _items(item.items)


def _imports(items: Sequence[Item]) -> Iterator[Import]:
    return (item for item in _items(items) if isinstance(item, Import))


def _roles(children: Sequence[Node]) -> Iterator[str]:
    """Of all messages, in the order of the schema."""
    for child in children:
        match child:
            case Role():
                yield child.role
                yield from _roles(child.children)
            case Module():
                yield from _roles(child.children)
            case Union():
                yield from _roles(child.members)
            case _:
                pass
