"""Prompts: modules of a schema, arguments, and text of their own (sections 3.2 and 3.4 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.promptcache.markup import (
    DEPTH_MAX,
    ELEMENTS_MAX,
    ROLES,
    Kind,
    Piece,
    PmlError,
    Reader,
    Tag,
    Warnings,
    decode,
    escape,
    is_attribute_name,
    tag_error,
)
from kvstore.promptcache.schema import (
    BLANKS,
    PARAMETER_TAGS,
    Module,
    Path,
    Schema,
    Scope,
    Text,
    import_tag,
    settle,
)

_ENDS = ("module", *PARAMETER_TAGS, *ROLES, "prompt")
Find = Callable[[str], Schema | None]
"""The schema of a name."""


@dataclass(frozen=True, slots=True)
class FreeText:
    """Text of the prompt's own. `role`: which message of the prompt it belongs to, as (number, role)."""

    text: str
    role: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Import:
    path: Path
    module: Module = field(repr=False)
    arguments: dict[str, str]
    items: tuple[Item, ...] = ()
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Documents:
    """Of a collection: texts that are modules, in this order. `path`: of the collection."""

    path: Path
    texts: tuple[str, ...]
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)


Item = FreeText | Import | Documents


@dataclass(frozen=True, slots=True)
class Prompt:
    schema: Schema
    items: tuple[Item, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    """Of the parameters that stand in the schema itself."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    document: str = field(default="prompt", compare=False)
    """What errors call it."""

    def to_pml(self) -> str:
        """PML that `parse_prompt` reads as this prompt."""
        parts = [
            f'<prompt schema="{escape(self.schema.name)}" space="preserve">',
            *_arguments(self.arguments),
        ]
        role: tuple[int, str] | None = None
        for item in self.items:
            wanted = item.role if isinstance(item, FreeText) else None
            if role is not None and wanted != role:
                parts.append(f"</{role[1]}>")
            if wanted is not None and wanted != role:
                parts.append(f"<{wanted[1]}>")
            role = wanted
            _write(item, parts)
        return "".join([*parts, f"</{role[1]}></prompt>" if role is not None else "</prompt>"])


def _write(item: Item, parts: list[str]) -> None:
    if isinstance(item, FreeText):
        parts.append(escape(item.text))
        return
    parts.append(f'<module name="{escape(item.path[-1])}">')
    if isinstance(item, Documents):
        parts += [f"<document>{escape(text)}</document>" for text in item.texts]
        parts.append("</module>")
        return
    parts += _arguments(item.arguments)
    for inner in item.items:
        _write(inner, parts)
    parts.append("</module>")


def _argument(name: str, within: Path) -> str:
    """How it is given in an element, to a module `within` it that the prompt does not name."""
    plain = is_attribute_name(name)
    if not within:
        element = f'<parameter name="{escape(name)}">...</parameter>'
        return f'{name}="..." in this tag' if plain else f"{element} in this element"
    attribute = f' {name}="..."' if plain else ""
    inner = "" if plain else f'<parameter name="{escape(name)}">...</parameter>'
    written = f"<{within[-1]}{attribute}>{inner}</{within[-1]}>"
    for one in reversed(within[:-1]):
        written = f"<{one}>{written}</{one}>"
    return f"{written} in this element"


def _arguments(arguments: dict[str, str]) -> list[str]:
    """As elements: a parameter may have a name that no attribute can have."""
    return [
        f'<parameter name="{escape(name)}" value="{escape(value)}"/>' for name, value in arguments.items()
    ]


@dataclass(slots=True)
class _Owner:
    """What imports and arguments belong to: a module that is being imported, or the prompt itself."""

    scope: Scope
    path: Path
    module: Module | None
    arguments: dict[str, str] = field(default_factory=dict)
    imported: dict[str, Tag] = field(default_factory=dict)
    chosen: dict[int, Tag] = field(default_factory=dict)
    """By union: where its member was imported."""


@dataclass(slots=True)
class _Open:
    """An element whose end has not come yet."""

    kind: str
    """prompt, import, role, argument, collection or document."""
    tag: Tag
    owner: _Owner
    items: list[str | Item | _Message | _Document] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Document:
    text: str


@dataclass(frozen=True, slots=True)
class _Message:
    tag: Tag
    items: tuple[Item, ...]


class _Parser:
    def __init__(self, text: str, find: Find, document: str) -> None:
        self.reader = Reader(text, document)
        self.document = document
        self.find = find
        self.warnings = Warnings()
        self.schema: Schema | None = None
        self.names: frozenset[str] = frozenset()
        """Of all modules of the schema, and collections."""
        self.collections = False
        self.preserve = False
        self.stack: list[_Open] = []
        self.elements = 0
        self.messages = 0
        self.done: Prompt | None = None

    def error(self, tag: Tag, message: str, remedy: str) -> PmlError:
        return tag_error(self.document, tag, message, remedy=remedy)

    def accept(self, tag: Tag) -> bool:
        """Of what has the form of a tag, without quotes. What begins right behind a letter, as in `vector<int>`, and
        means nothing here is text."""
        if self.schema is None:
            return tag.name == "prompt"
        known = tag.name in self.names or tag.name in ("prompt", "module", *PARAMETER_TAGS, *ROLES)
        known = known or (tag.name == "document" and self.collections)
        return known or not tag.after_word or tag.kind is not Kind.OPEN

    def parse(self) -> Prompt:
        for event in self.reader.events(self.accept):
            if isinstance(event, Piece):
                self._text(event)
            elif event.kind is Kind.CLOSE:
                self._close(event)
            else:
                self._begin(event)
        if self.stack:
            raise self.error(
                self.stack[0].tag,
                "the prompt never ends: </prompt> is missing",
                "add it, unless the text was cut off",
            )
        if self.done is None:
            raise PmlError(
                "is no prompt: it does not begin with <prompt schema=...>",
                document=self.document,
                value=self.reader.text[:40].partition("\n")[0],
                remedy='write <prompt schema="..."> ... </prompt>',
            )
        return self.done

    # -------------------------------------------------------------------------------------------------- events

    def _text(self, piece: Piece) -> None:
        if self.stack:
            self.stack[-1].items.append(piece.text)
        elif piece.text.strip():
            offset = piece.offset + len(piece.text) - len(piece.text.lstrip())
            raise self.reader.error(
                "text outside of the prompt", offset, remedy="write it inside <prompt> ... </prompt>"
            )

    def _begin(self, tag: Tag) -> None:
        self.elements += 1
        if self.elements > ELEMENTS_MAX:
            raise self.error(tag, f"a prompt has at most {ELEMENTS_MAX} elements", "import less")
        if len(self.stack) > DEPTH_MAX:
            raise self.error(tag, f"is inside {DEPTH_MAX} others, which is the most", "nest less deeply")
        if not self.stack:
            opened = self._root(tag)
        elif self.stack[-1].kind == "argument":
            raise self.error(tag, "an argument is text alone", "write &lt; if this is text of the argument")
        elif self.stack[-1].kind == "document":
            raise self.error(
                tag, "a document is text alone", "write <document><![CDATA[ ... ]]></document> around it"
            )
        elif self.stack[-1].kind == "collection":
            if tag.name != "document":
                raise self.error(
                    tag, "a collection holds documents alone", "write <document> ... </document>"
                )
            opened = _Open("document", tag, self.stack[-1].owner)
        elif tag.name in PARAMETER_TAGS:
            opened = self._argument(tag)
        elif tag.name in ROLES:
            opened = self._role(tag)
        else:
            opened = self._import(tag)
        self.stack.append(opened)
        if tag.kind is Kind.EMPTY:
            self._end(self.stack.pop())

    def _root(self, tag: Tag) -> _Open:
        if tag.name != "prompt" or self.done is not None:
            raise self.error(tag, "a document has one <prompt>, and everything is in it", "make them two")
        name = tag.attributes.get("schema")
        if not name:
            raise self.error(tag, "names no schema", 'write <prompt schema="...">')
        self.schema = self.find(name)
        if self.schema is None:
            raise self.error(
                tag,
                f"there is no schema {name[:80]}",
                "see kvctl promptcache list, or put it: kvctl promptcache put",
            )
        self.names = self.schema.names
        self.reader.also(self.schema.unusual)
        self.collections = any(scope.collections for scope in self.schema.scopes.values())
        self.preserve = tag.attributes.get("space", tag.attributes.get("xml:space")) == "preserve"
        owner = _Owner(self.schema.scopes[()], (), None)
        self._arguments(owner, tag, skip=("schema", "space", "xml:space"))
        return _Open("prompt", tag, owner)

    def _import(self, tag: Tag) -> _Open:
        owner = self.stack[-1].owner
        skip: tuple[str, ...] = ()
        name = tag.name
        if name == "module":
            skip, name = ("name",), tag.attributes.get("name") or ""
        module = owner.scope.modules.get(name)
        if module is None and name not in owner.scope.collections:
            raise self._not_there(owner, tag, name)
        before = owner.imported.setdefault(name, tag)
        if before is not tag:
            raise self.error(tag, f"{name} is imported already, in line {before.line}", "import it once")
        if module is None:
            if extra := [attribute for attribute in tag.attributes if attribute not in skip]:
                raise self.error(
                    tag, f"a collection has no parameter {extra[0][:80]}", "remove the attribute"
                )
            return _Open("collection", tag, owner)
        union = owner.scope.unions.get(name)
        if union is not None and (before := owner.chosen.setdefault(union, tag)) is not tag:
            raise self.error(
                tag,
                f"{name} and {before.source} of line {before.line} are members of one union",
                "import one of them",
            )
        assert self.schema is not None
        path = (*owner.path, name)
        inner = _Owner(self.schema.scopes[path], path, module)
        self._arguments(inner, tag, skip=skip)
        return _Open("import", tag, inner)

    def _not_there(self, owner: _Owner, tag: Tag, name: str) -> PmlError:
        assert self.schema is not None
        where = "/".join(owner.path) or f"schema {self.schema.name}"
        for parent, scope in self.schema.scopes.items():
            if name in scope.modules or name in scope.collections:
                opening = "".join(f"<{part}>" for part in parent)
                closing = "".join(f"</{part}>" for part in reversed(parent))
                return self.error(
                    tag,
                    f"module {name} is not in {where}, but in {'/'.join(parent) or 'the schema itself'}",
                    f"write {opening}{import_tag(name)}{closing}",
                )
        return self.error(
            tag,
            f"{where} has no module {name[:80]}",
            f"{owner.scope.like(name)}; write &lt; if this is text",
        )

    def _role(self, tag: Tag) -> _Open:
        around = self.stack[-1]
        if around.kind != "prompt":
            raise self.error(
                tag,
                f"a message inside {'a message' if around.kind == 'role' else 'an import'}",
                "write messages behind the imports, one after the other",
            )
        if tag.kind is Kind.EMPTY and tag.name in around.owner.scope.modules:
            raise self.error(
                tag,
                f"is a message without text, and a module of the schema is named {tag.name}, too",
                f"import the module by {import_tag(tag.name)}",
            )
        return _Open("role", tag, around.owner)

    def _argument(self, tag: Tag) -> _Open:
        owner, name = self.stack[-1].owner, tag.attributes.get("name")
        if not name:
            raise self.error(tag, "names no parameter", 'write <parameter name="...">argument</parameter>')
        self._give(owner, tag, name, "")
        return _Open("argument", tag, owner)

    def _close(self, tag: Tag) -> None:
        depth = next(
            (at for at in reversed(range(len(self.stack))) if self.stack[at].tag.name == tag.name), None
        )
        if depth is None:
            known = tag.name in self.names or tag.name in _ENDS
            if self.stack and not known:
                raise self._not_there(self.stack[-1].owner, tag, tag.name)
            self.warnings.add(tag, "ends nothing that was begun, and is ignored")
            return
        while len(self.stack) > depth:
            opened = self.stack.pop()
            if len(self.stack) > depth:
                self.warnings.add(opened.tag, f"was not ended before {tag.source} in line {tag.line}")
            self._end(opened)

    # ----------------------------------------------------------------------------------------------------- ends

    def _end(self, opened: _Open) -> None:
        owner = opened.owner
        if opened.kind == "argument":
            text = "".join(item for item in opened.items if isinstance(item, str))
            given = opened.tag.attributes.get("value")
            owner.arguments[opened.tag.attributes["name"] or ""] = (
                given if given is not None else text if self.preserve else text.strip(BLANKS)
            )
            return
        if opened.kind == "document":
            pieces = settle(opened.items, preserve=self.preserve, role=False)
            text = "".join(piece.text for piece in pieces)
            self.stack[-1].items.append(_Document(text))
            return
        if opened.kind == "collection":
            self.stack[-1].items.append(self._documents(opened))
            return
        settled = settle(opened.items, preserve=self.preserve, role=opened.kind in ("role", "prompt"))
        if opened.kind == "role":
            self.messages += 1
            role = (self.messages, opened.tag.name)
            items = tuple(FreeText(item.text, role) if isinstance(item, Text) else item for item in settled)
            self.stack[-1].items.append(_Message(opened.tag, items))
            return
        self._check_parameters(owner, opened.tag)
        found: list[Item] = []
        for item in settled:
            if isinstance(item, _Message):
                found += item.items
            else:
                found.append(FreeText(item.text) if isinstance(item, Text) else item)
        if opened.kind == "import":
            assert owner.module is not None
            tag = opened.tag
            self.stack[-1].items.append(
                Import(owner.path, owner.module, owner.arguments, tuple(found), tag.line, tag.column)
            )
            return
        self._check_order(opened)
        assert self.schema is not None
        self.done = Prompt(
            self.schema, tuple(found), owner.arguments, tuple(self.warnings.lines), self.document
        )

    def _documents(self, opened: _Open) -> Documents:
        tag = opened.tag
        name = tag.attributes["name"] or "" if tag.name == "module" else tag.name
        texts = []
        for item in opened.items:
            if isinstance(item, _Document):
                texts.append(item.text)
            elif isinstance(item, str) and item.strip():
                raise self.error(
                    tag,
                    f"there is text between the documents of {name}: {item.strip()[:40]!r}",
                    "write it into a <document>, or behind the collection",
                )
        path = (*opened.owner.path, name)
        return Documents(path, tuple(text for text in texts if text), tag.line, tag.column)

    def _check_order(self, opened: _Open) -> None:
        """Of a prompt: the conversation goes on behind what the schema has of it."""
        message: Tag | None = None
        for item in opened.items:
            inner = item.items if isinstance(item, _Message) else (item,)
            for one in inner:
                if isinstance(one, Import | Documents) and message is not None:
                    raise self.error(
                        message,
                        f"the text of this message stands before an import, of {'/'.join(one.path)}",
                        "write messages behind all imports",
                    )
                if isinstance(item, _Message) and isinstance(one, FreeText):
                    message = item.tag

    def _check_parameters(self, owner: _Owner, tag: Tag, within: Path = ()) -> None:
        """`within`: members of unions that are there by default, from the element of `tag` down."""
        for name, parameter in owner.scope.parameters.items():
            if name not in owner.arguments and parameter.scaffold is None:
                raise self.error(
                    tag,
                    f"parameter {name} has no argument, and no scaffold",
                    f"write {_argument(name, within)}, with at most {parameter.length} tokens",
                )
        assert self.schema is not None
        for union, member in owner.scope.scaffolds.items():
            if union not in owner.chosen:
                path = (*owner.path, member)
                self._check_parameters(_Owner(self.schema.scopes[path], path, None), tag, (*within, member))

    # ------------------------------------------------------------------------------------------------ arguments

    def _arguments(self, owner: _Owner, tag: Tag, *, skip: tuple[str, ...]) -> None:
        for name, value in tag.attributes.items():
            if name not in skip:
                if value is None:
                    raise self.error(tag, f"argument {name} has no value", f'write {name}="..."')
                self._give(owner, tag, name, value)

    def _give(self, owner: _Owner, tag: Tag, name: str, value: str) -> None:
        parameters = owner.scope.parameters
        if name not in parameters:
            there = ", ".join(list(parameters)[:8])
            raise self.error(
                tag,
                f"{'/'.join(owner.path) or 'the schema itself'} has no parameter {name[:80]}",
                f"it has {there}" if there else "it has none: remove the attribute",
            )
        if name in owner.arguments:
            raise self.error(tag, f"parameter {name} has its argument already", "give one argument")
        owner.arguments[name] = value


def parse_prompt(data: str | bytes, schema: Schema | Find, *, document: str = "prompt") -> Prompt:
    """A prompt out of PML; `schema`: the one that it has to be of, or what finds one by its name. Raises PmlError."""
    find = _only(schema) if isinstance(schema, Schema) else schema
    return _Parser(decode(data, document), find, document).parse()


def _only(schema: Schema) -> Find:
    return lambda name: schema if name == schema.name else None
