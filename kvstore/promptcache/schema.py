"""Schemas: which modules there are, in which order, and what a prompt may say of them (section 3.2 of the paper)."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.promptcache.markup import (
    DEPTH_MAX,
    ELEMENTS_MAX,
    NAME_LENGTH_MAX,
    ROLES,
    Kind,
    PmlError,
    Reader,
    Tag,
    Warnings,
    decode,
    escape,
    is_plain_name,
    misspelt,
    tag_error,
    tag_pattern,
)

PARAMETER_TAGS = ("parameter", "param")
ELEMENTS = ("schema", "module", "union", "collection", *PARAMETER_TAGS, "scaffold", *ROLES)
PARAMETER_LENGTH_MAX = 65_536
DIGEST_BYTES = 16
SUGGESTED_FROM = 2_000
"""Names among which one is looked for that is like an unknown one."""

Path = tuple[str, ...]
"""Names of the modules from the schema down to one; () is the schema itself."""

BLANKS = " \t\n"
_INDENT = re.compile(r"[ \t]*")
_KNOWN = tag_pattern(ELEMENTS)
_TAG_NAME = re.compile(r"[^\s/<>='\"]+")
_PLACEHOLDER = "\0"
"""Stands for a parameter while white space is settled; a document holds none."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place for an argument of at most `length` tokens. `scaffold`: what stands there without an argument."""

    name: str
    length: int
    scaffold: str | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """`name` is empty for an anonymous one, which every prompt includes. `cache`: whether its KV is stored."""

    name: str
    children: tuple[Node, ...]
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Union:
    """At most one of its members is in a prompt. `scaffold`: the one that is there when a prompt names none."""

    members: tuple[Module, ...]
    scaffold: str | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """A message of the conversation: `role` is one of ROLES."""

    role: str
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Collection:
    """A place for documents, which are modules that each prompt brings itself. `length`: positions that are kept free
    for them; None: as many as a prompt's documents take, and what stands behind moves."""

    name: str
    length: int | None = None


Node = Text | Parameter | Module | Union | Role | Collection


@dataclass(slots=True)
class Scope:
    """What a prompt can name inside one module: those below its anonymous parts, too."""

    modules: dict[str, Module] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    collections: dict[str, Collection] = field(default_factory=dict)
    unions: dict[str, int] = field(default_factory=dict)
    """By member: which union."""
    scaffolds: dict[int, str] = field(default_factory=dict)
    """By union: the member that stands for all."""
    union_count: int = 0

    def like(self, name: str) -> str:
        """For an error: what is there, and which of it is like `name`."""
        some = [*self.collections, *self.modules][:SUGGESTED_FROM]
        if near := difflib.get_close_matches(name[:NAME_LENGTH_MAX], some, n=1):
            return f"{import_tag(near[0])} is one"
        if not some:
            return "there is none"
        shown = ", ".join(import_tag(one) for one in some[:8])
        return f"there are {shown}{' ...' if len(some) > 8 else ''}"


def import_tag(name: str) -> str:
    """What imports a module of that name in a prompt."""
    own = name in (*ELEMENTS, "prompt", "document") or not _TAG_NAME.fullmatch(name)
    return f'<module name="{escape(name)}"/>' if own else f"<{name}/>"


@dataclass(frozen=True, slots=True)
class Schema:
    name: str
    children: tuple[Node, ...] = field(repr=False)
    scaffolds: tuple[tuple[Path, ...], ...] = ()
    """Sets of modules that are also encoded together (section 3.3)."""
    scopes: dict[Path, Scope] = field(default_factory=dict, repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    digest: bytes = field(default=b"", compare=False)
    """Of the text: what tells versions apart."""
    names: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Of all modules and collections: what begins a tag in its prompts."""
    unusual: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Of these, names that are no element's elsewhere."""
    characters: int = field(default=0, repr=False, compare=False)
    """Of the text."""

    @property
    def modules(self) -> Iterator[tuple[Path, Module]]:
        """All named modules, parents first."""
        for path, scope in self.scopes.items():
            for name, module in scope.modules.items():
                yield (*path, name), module

    def to_pml(self) -> str:
        """PML that `parse_schema` reads as this schema."""
        parts = [f'<schema name="{escape(self.name)}" space="preserve">']
        _write(self.children, parts)
        for paths in self.scaffolds:
            joined = " ".join("/".join(path) for path in paths)
            parts.append(f'<scaffold modules="{escape(joined)}"/>')
        return "".join([*parts, "</schema>"])


def text_digest(text: str | bytes) -> bytes:
    """What tells versions of a schema apart."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"kvs.schema.v1").digest()


def _write(children: Sequence[Node], parts: list[str]) -> None:
    for child in children:
        match child:
            case Text():
                parts.append(escape(child.text))
            case Parameter():
                default = f' scaffold="{escape(child.scaffold)}"' if child.scaffold is not None else ""
                parts.append(f'<parameter name="{escape(child.name)}" length="{child.length}"{default}/>')
            case Module():
                name = f' name="{escape(child.name)}"' if child.name else ""
                cache = "" if child.cache else ' cache="false"'
                parts.append(f"<module{name}{cache}>")
                _write(child.children, parts)
                parts.append("</module>")
            case Union():
                default = f' scaffold="{escape(child.scaffold)}"' if child.scaffold is not None else ""
                parts.append(f"<union{default}>")
                _write(child.members, parts)
                parts.append("</union>")
            case Collection():
                length = f' length="{child.length}"' if child.length is not None else ""
                parts.append(f'<collection name="{escape(child.name)}"{length}/>')
            case Role():
                parts.append(f"<{child.role}>")
                _write(child.children, parts)
                parts.append(f"</{child.role}>")


# ------------------------------------------------------------------------------------------------------ white space


def settle(items: Sequence[Any], *, preserve: bool, role: bool) -> tuple[Any, ...]:
    """The content of an element with its white space as a model gets it. `items`: text, parameters and blocks.

    Text runs from one block tag to the next (a parameter is none). Of a run, white space with a line break is markup
    where a block tag is near: before the text it goes, behind the text it becomes one line break, which goes at the end
    of a role. Indentation that all its lines have goes, too. A run of white space alone goes. `preserve`: nothing does.
    """
    out: list[Any] = []
    run: list[str | Parameter] = []

    def end_run(*, last: bool) -> None:
        parameters = [part for part in run if isinstance(part, Parameter)]
        whole = "".join(part if isinstance(part, str) else _PLACEHOLDER for part in run)
        run.clear()
        if not preserve:
            whole = _settled(whole, last=last and role)
        pieces = whole.split(_PLACEHOLDER)
        for index, piece in enumerate(pieces):
            if piece:
                out.append(Text(piece))
            if index < len(parameters):
                out.append(parameters[index])

    for item in items:
        if isinstance(item, str | Parameter):
            run.append(item)
        else:
            end_run(last=False)
            out.append(item)
    end_run(last=True)
    return tuple(out)


def _settled(text: str, *, last: bool) -> str:
    body = text.strip(BLANKS)
    if not body:
        return ""
    before = text[: len(text) - len(text.lstrip(BLANKS))]
    after = text[len(text.rstrip(BLANKS)) :]
    if "\n" in before:
        body = _dedented(before[before.rfind("\n") + 1 :] + body)
        before = (
            ""  # else it begins in the line of a tag, and how far its first line is indented cannot be seen
        )
    if "\n" in after:
        after = "" if last else "\n"
    return before + body + after


def _dedented(body: str) -> str:
    lines = body.split("\n")
    indents = [_indent(line) for line in lines if line.strip(BLANKS)]
    low, high = min(indents), max(indents)
    common = next((at for at, letter in enumerate(low) if high[at : at + 1] != letter), len(low))
    return "\n".join(line[common:] if line.strip(BLANKS) else "" for line in lines)


def _indent(line: str) -> str:
    found = _INDENT.match(line)
    assert found is not None
    return found[0]


# ----------------------------------------------------------------------------------------------------------- parsing


@dataclass(slots=True)
class _Open:
    """An element whose end has not come yet."""

    tag: Tag
    scope: Scope
    """Where a module in it is named."""
    path: Path
    preserve: bool
    items: list[str | Node] = field(default_factory=list)


@dataclass(slots=True)
class _Pending:
    """A parameter that may have text and an end tag, or neither."""

    tag: Tag
    parameter: Parameter
    text: str = ""


class _Parser:
    def __init__(self, text: str, document: str, digest: bytes) -> None:
        self.reader = Reader(text, document, _KNOWN)
        self.document = document
        self.digest = digest
        self.warnings = Warnings()
        self.stack: list[_Open] = []
        self.pending: _Pending | None = None
        self.elements = 0
        self.scopes: dict[Path, Scope] = {}
        self.first: dict[tuple[int, str, bool], Tag] = {}
        """Where a name of a scope was given: (id of the scope, name, whether to a parameter)."""
        self.sets: list[tuple[Tag, tuple[Path, ...]]] = []
        self.root: Schema | None = None
        self.collections_open = 0

    def error(self, tag: Tag, message: str, remedy: str) -> PmlError:
        return tag_error(self.document, tag, message, remedy=remedy)

    def parse(self) -> Schema:
        for event in self.reader.events(self._accept):
            if not isinstance(event, Tag):
                self._text(event.text, event.offset)
                continue
            if self.pending is not None and self._parameter_ends(event):
                continue
            match event.kind:
                case Kind.CLOSE:
                    self._close(event)
                case Kind.OPEN | Kind.EMPTY:
                    self._begin(event)
        if self.stack:
            opened = self.stack[0].tag
            raise self.error(
                opened,
                "the schema never ends: </schema> is missing",
                "add it, unless the file was cut off",
            )
        if self.root is None:
            raise PmlError(
                "is no schema: it does not begin with <schema name=...>",
                document=self.document,
                value=self.reader.text[:40].partition("\n")[0],
                remedy='write <schema name="..."> ... </schema>',
            )
        return self.root

    def _accept(self, tag: Tag) -> bool:
        """The end of a collection is one where one was begun; else it is text, as where programs write of their own."""
        if tag.name == "collection" and tag.kind is Kind.CLOSE:
            return self.collections_open > 0
        return _is_tag(tag)

    # -------------------------------------------------------------------------------------------------- events

    def _text(self, text: str, offset: int) -> None:
        if self.pending is not None:
            self.pending.text += text
        elif self.stack:
            self.stack[-1].items.append(text)
        elif text.strip():
            offset += len(text) - len(text.lstrip())
            what = "behind" if self.root is not None else "before"
            remedy = "a file has one <schema>, and everything is in it"
            if text.lstrip().startswith("<prompt"):
                remedy = "this is a prompt: kvctl promptcache render --schema SCHEMA PROMPT shows it"
            raise self.reader.error(f"text {what} the schema", offset, remedy=remedy)

    def _begin(self, tag: Tag) -> None:
        self.elements += 1
        if self.elements > ELEMENTS_MAX:
            raise self.error(
                tag, f"a schema has at most {ELEMENTS_MAX} elements", "divide it into several schemas"
            )
        if not self.stack and (tag.name != "schema" or self.root is not None):
            again = self.root is not None
            raise self.error(
                tag,
                "stands behind the schema" if again else "stands outside of a schema",
                "a file has one <schema>, and everything is in it",
            )
        if self.stack and self.stack[-1].tag.name == "union" and tag.name != "module":
            raise self.error(
                tag, "a union holds modules alone", 'put it into a <module name="..."> of the union'
            )
        if tag.name in PARAMETER_TAGS:
            self._parameter(tag)
            return
        if tag.name == "scaffold":
            self._scaffold(tag)
            return
        if tag.name == "collection":
            self._collection(tag)
            return
        if tag.name in ROLES and any(opened.tag.name in ROLES for opened in self.stack):
            raise self.error(tag, "a message inside a message", "end the one before first")
        if len(self.stack) >= DEPTH_MAX:
            raise self.error(tag, f"is inside {DEPTH_MAX} others, which is the most", "nest less deeply")
        self.stack.append(self._opened(tag))
        if tag.kind is Kind.EMPTY:
            self._end(self.stack.pop())

    def _opened(self, tag: Tag) -> _Open:
        known: tuple[str, ...] = ("space", "xml:space")
        if tag.name == "schema":
            if self.stack:
                raise self.error(
                    tag, "a schema inside a schema", "write &lt;schema if this is text, or use a module"
                )
            known = (*known, "name")
            self._name(tag)
            path: Path = ()
            scope = self.scopes[()] = Scope()
        else:
            path, scope = self.stack[-1].path, self.stack[-1].scope
        if tag.name == "module":
            known = (*known, "name", "cache")
            self._flag(tag, "cache")
            if tag.attributes.get("name"):
                path, scope = self._named(tag)
            elif self.stack[-1].tag.name == "union":
                raise self.error(tag, "a member of a union has no name", 'write <module name="...">')
        elif tag.name == "union":
            known = (*known, "scaffold", "default")
        for name in tag.attributes:
            if name not in known:
                self.warnings.add(tag, f"has an attribute {name}, which means nothing here")
        return _Open(tag, scope, path, self._preserves(tag))

    def _named(self, tag: Tag) -> tuple[Path, Scope]:
        around = self.stack[-1]
        name = self._name(tag)
        self._once(tag, around.scope, name, parameter=False)
        path = (*around.path, name)
        if around.tag.name == "union":
            around.scope.unions[name] = around.scope.union_count
        around.scope.modules[name] = Module(name, ())  # until its end; this keeps the order of the document
        scope = self.scopes[path] = Scope()
        return path, scope

    def _collection(self, tag: Tag) -> None:
        opened, name = self.stack[-1], self._name(tag)
        self._once(tag, opened.scope, name, parameter=False)
        length = None
        if "length" in tag.attributes:
            length = self._tokens(tag, f"collection {name}", tag.attributes["length"])
        for other in tag.attributes:
            if other not in ("name", "length"):
                self.warnings.add(tag, f"has an attribute {other}, which means nothing here")
        if tag.kind is not Kind.EMPTY:
            self.collections_open += 1
            self.warnings.add(tag, "has no content: write <collection name=.../>")
        collection = Collection(name, length)
        opened.scope.collections[name] = collection
        opened.items.append(collection)

    def _close(self, tag: Tag) -> None:
        if tag.name == "collection":
            self.collections_open -= 1
            return  # told where it begins
        depth = next(
            (depth for depth in reversed(range(len(self.stack))) if self.stack[depth].tag.name == tag.name),
            None,
        )
        if depth is None:
            self.warnings.add(tag, "ends nothing that was begun, and is ignored")
            return
        while len(self.stack) > depth:
            opened = self.stack.pop()
            if len(self.stack) > depth:
                self.warnings.add(opened.tag, f"was not ended before {tag.source} in line {tag.line}")
            self._end(opened)

    def _end(self, opened: _Open) -> None:
        tag, kind = opened.tag, opened.tag.name
        children = settle(opened.items, preserve=opened.preserve, role=kind in ROLES)
        match kind:
            case "schema":
                self._finish(tag, children)
                return
            case "module":
                module = Module(tag.attributes.get("name") or "", children, self._flag(tag, "cache"))
                if module.name:
                    self.stack[-1].scope.modules[module.name] = module
                node: Node = module
            case "union":
                node = self._union(opened, children)
            case _:
                node = Role(kind, children)
        self.stack[-1].items.append(node)

    def _union(self, opened: _Open, children: tuple[Node, ...]) -> Union:
        scope = opened.scope
        members = tuple(child for child in children if isinstance(child, Module))
        if len(members) < len(children):
            raise self.error(
                opened.tag,
                "a union holds modules alone, but there is text in it",
                "put the text into a module",
            )
        default = opened.tag.attributes.get("scaffold", opened.tag.attributes.get("default"))
        if default is not None and default not in [member.name for member in members]:
            names = ", ".join(member.name for member in members[:8])
            raise self.error(
                opened.tag, f"{default} is no member of this union", f"name one of its members: {names}"
            )
        if default is not None:
            scope.scaffolds[scope.union_count] = default
        scope.union_count += 1
        return Union(members, default)

    def _finish(self, tag: Tag, children: tuple[Node, ...]) -> None:
        for set_tag, paths in self.sets:
            for path in paths:
                parent = self.scopes.get(path[:-1])
                if parent is None or path[-1] not in parent.modules:
                    raise self.error(
                        set_tag,
                        f"there is no module {'/'.join(path)}",
                        "name modules by their paths from the schema down, as a/b",
                    )
        for offset, source, meant in misspelt(self.reader.text, ELEMENTS):
            if self.warnings.full:
                break
            line, column = self.reader.place(offset)
            self.warnings.add_at(
                line, column, source, f"is text; write <{meant} if it is one, or &lt; if it is not"
            )
        names = frozenset(
            name for scope in self.scopes.values() for name in (*scope.modules, *scope.collections)
        )
        self.root = Schema(
            tag.attributes["name"] or "",
            children,
            tuple(paths for _, paths in self.sets),
            self.scopes,
            tuple(self.warnings.lines),
            self.digest,
            names,
            frozenset(name for name in names if not is_plain_name(name)),
            len(self.reader.text),
        )

    # ---------------------------------------------------------------------------------------------- parameters

    def _parameter(self, tag: Tag) -> None:
        attributes = dict(tag.attributes)
        if positional := _positional(tag):
            attributes = {"name": positional[0], "length": positional[1]}
        named = tag if attributes.get("name") else None
        if named is None:
            raise self.error(tag, "has no name", 'write <parameter name="..." length="..."/>')
        name = self._name(tag, attributes["name"])
        number = self._tokens(tag, f"parameter {name}", attributes.get("length", attributes.get("len")))
        for other in attributes:
            if other not in ("name", "length", "len", "scaffold", "default"):
                self.warnings.add(tag, f"has an attribute {other}, which means nothing here")
        self._once(tag, self.stack[-1].scope, name, parameter=True)
        scaffold = attributes.get("scaffold", attributes.get("default"))
        parameter = Parameter(name, number, scaffold)
        if tag.kind is Kind.EMPTY:
            self._add(parameter)
        else:
            self.pending = _Pending(tag, parameter)

    def _tokens(self, tag: Tag, what: str, length: str | None) -> int:
        """Of a `length`."""
        if length is None or not length.strip().isdecimal():
            raise self.error(
                tag,
                f"{what} has no length, the most tokens that its argument may have"
                if length is None and tag.name != "collection"
                else f"{(length or '')[:20]!r} is no number of tokens",
                'write length="..." with a whole number',
            )
        number = int(length.strip()[:9])
        if not 1 <= number <= PARAMETER_LENGTH_MAX:
            kind = "collection" if tag.name == "collection" else "parameter"
            raise self.error(tag, f"a {kind} has 1 to {PARAMETER_LENGTH_MAX} tokens", "give another length")
        return number

    def _parameter_ends(self, tag: Tag) -> bool:
        """Whether `tag` is the end of the parameter that is pending; else the parameter had none."""
        pending, self.pending = self.pending, None
        assert pending is not None
        ends = tag.kind is Kind.CLOSE and tag.name in PARAMETER_TAGS
        parameter = pending.parameter
        if ends:
            inner = pending.text.strip()
            if inner and parameter.scaffold is None:
                parameter = Parameter(parameter.name, parameter.length, inner)
            self._add(parameter)
        else:
            self.warnings.add(pending.tag, "was not ended, and stands for itself")
            self._add(parameter)
            if pending.text:
                self.stack[-1].items.append(pending.text)
        return ends

    def _add(self, parameter: Parameter) -> None:
        opened = self.stack[-1]
        opened.items.append(parameter)
        opened.scope.parameters[parameter.name] = parameter

    def _scaffold(self, tag: Tag) -> None:
        named = (tag.attributes.get("modules") or "").replace(",", " ").split()
        paths = tuple(tuple(part for part in one.split("/") if part) for one in named)
        if not paths or not all(paths):
            raise self.error(
                tag, "names no modules", 'write <scaffold modules="a b/c"/>, paths with blanks between them'
            )
        if tag.kind is not Kind.EMPTY:
            self.warnings.add(tag, "has no content: write <scaffold modules=.../>")
        self.sets.append((tag, tuple(dict.fromkeys(paths))))

    # ------------------------------------------------------------------------------------------------- attributes

    def _name(self, tag: Tag, name: str | None = None) -> str:
        name = name if name is not None else tag.attributes.get("name")
        if not name or not name.strip() or len(name) > NAME_LENGTH_MAX or not name.isprintable():
            raise self.error(
                tag,
                "has no name" if not name else f"a name has 1 to {NAME_LENGTH_MAX} printable characters",
                'write name="..."',
            )
        if "/" in name:
            raise self.error(tag, "a name has no /, which stands between names in a path", "rename it")
        return name

    def _once(self, tag: Tag, scope: Scope, name: str, *, parameter: bool) -> None:
        before = self.first.setdefault((id(scope), name, parameter), tag)
        if before is not tag:
            raise self.error(
                tag,
                f"{'parameter' if parameter else 'module'} {name} is there already, in line {before.line}",
                "rename one of the two: in one module, names are given once",
            )

    def _flag(self, tag: Tag, name: str) -> bool:
        value = (tag.attributes.get(name) or "true").strip().lower()
        if value not in ("true", "false", "yes", "no", "1", "0"):
            raise self.error(tag, f"{name} is neither true nor false", f'write {name}="false", or nothing')
        return value in ("true", "yes", "1")

    def _preserves(self, tag: Tag) -> bool:
        space = tag.attributes.get("space", tag.attributes.get("xml:space"))
        if space is None:
            return bool(self.stack) and self.stack[-1].preserve
        if space not in ("preserve", "default"):
            raise self.error(tag, f"space is {space[:20]}", 'write space="preserve" or space="default"')
        return space == "preserve"


def _positional(tag: Tag) -> tuple[str, str] | None:
    """Name and length of <parameter city 10>."""
    words = list(tag.attributes)
    bare = len(words) == 2 and all(value is None for value in tag.attributes.values())
    return (words[0], words[1]) if bare and words[1].isdecimal() else None


def _is_tag(tag: Tag) -> bool:
    """Of what has the form of a tag of ours, without quotes: prose about PML, and comparisons, are text."""
    if tag.kind is Kind.CLOSE:
        return True
    words = [name for name, value in tag.attributes.items() if value is None]
    if tag.name in PARAMETER_TAGS:
        return len(words) < len(tag.attributes) or _positional(tag) is not None
    if tag.name == "scaffold":
        return "modules" in tag.attributes
    if tag.name == "collection":
        return "name" in tag.attributes
    if tag.name in ROLES:
        return not tag.attributes
    return not words


def parse_schema(data: str | bytes, *, document: str = "schema") -> Schema:
    """A schema out of PML; bytes are UTF-8. Raises PmlError, which names the line, the column and what to do. What was
    mended is in `Schema.warnings`."""
    text = decode(data, document)
    return _Parser(text, document, text_digest(data)).parse()
