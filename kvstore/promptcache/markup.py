"""PML as a stream of tags and text. PML looks like XML and is none: its users write program code between its tags.

Rules (docs/promptcache.md has them with examples):

    1. A tag begins at `<` before an element's name, or before `/` and an element's name, if a blank, `/` or `>` follows
       the name. Every other `<` is text, and so are `>` and `&`.
    2. A tag ends at `>`. Its attributes are NAME, NAME=VALUE, NAME="VALUE" or NAME='VALUE'. What looks like a tag and
       has no such form is text, unless there is a value in quotes: then it is an error.
    3. `<!-- ... -->` is dropped. `<![CDATA[ ... ]]>` is text as it stands. Where the end is missing, both are text.
    4. `&lt; &gt; &amp; &quot; &apos; &#N; &#xN;` stand for one character. Every other `&` is text, so no entity grows.
    5. `<?xml ...?>` and `<!DOCTYPE ...>` are dropped before the root element alone; declarations inside a DOCTYPE are
       refused.
    6. A line ends at LF, CR LF or CR, and is read as LF.

Reading takes time and memory in proportion to the document, whose size, tags and depth are bounded.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.errors import BadRequest

DOCUMENT_BYTES_MAX = 8 << 20
"""Of a schema or prompt in UTF-8; 64 modules of 32,000 tokens."""
TAGS_MAX = 131_072
"""That look like tags; some hundred nanoseconds to some microseconds each."""
DEPTH_MAX = 64
"""Elements inside each other."""
ELEMENTS_MAX = 65_536
"""Modules, unions, parameters, roles and imports."""
ATTRIBUTES_MAX = 256
NAME_LENGTH_MAX = 256
WARNINGS_MAX = 100
SHOWN = 60
"""Characters of a tag that an error shows."""

ROLES = ("system", "user", "assistant")


class PmlError(BadRequest):
    """What is wrong with a schema or a prompt: `line` and `column` count from 1, and 0 stands for the document."""

    def __init__(
        self, message: str, *, document: str, line: int = 0, column: int = 0, value: object = "", remedy: str
    ) -> None:
        self.line = line
        self.column = column
        where = f"{document}:{line}:{column}" if line else document
        super().__init__(message, field=where, value=value, remedy=remedy)


class Kind(enum.Enum):
    OPEN = "<name>"
    CLOSE = "</name>"
    EMPTY = "<name/>"


@dataclass(frozen=True, slots=True)
class Tag:
    kind: Kind
    name: str
    attributes: dict[str, str | None]
    """None: a name without a value."""
    line: int
    column: int
    source: str
    """How it is written, cut to SHOWN characters."""
    quoted: bool
    """Some value is in quotes."""
    after_word: bool
    """A letter or digit stands right before it, as in `vector<int>`."""
    twice: str
    """An attribute that it has twice, if any."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text between tags, its entities resolved."""

    text: str
    offset: int
    """In the document."""


_NAME = r"\w[\w.:+@-]{0,255}"
_AFTER_NAME = r"(?=[\s/>])"
_ANY_TAG = re.compile(rf"<(?:(/?)({_NAME}){_AFTER_NAME}|!--|!\[CDATA\[)")
_PLAIN_NAME = re.compile(_NAME)
_ANY_NAME = re.compile(rf"<(?:!--|!\[CDATA\[|(/?)([^\s/<>='\"]{{1,256}}){_AFTER_NAME})")
"""A tag of any name that has no blank, no quote and none of / < > =, as `.gitignore`, `c#` or `हिन्दी`."""
_QUOTED_VALUE = re.compile(r"""[^\s<>"'=]{1,256}\s*=\s*["']""")
_UNKNOWN_TAG = re.compile(r"""<(\w{4,12})\s{1,8}[\w.:-]{1,32}\s{0,8}=\s{0,8}["']""")
_SPACE = re.compile(r"\s*")
_END = re.compile(r"/?>")
_ATTRIBUTE_NAME = re.compile(r"\w[\w.:-]{0,255}")
_ATTRIBUTE = re.compile(rf"({_ATTRIBUTE_NAME.pattern})(\s*=\s*)?")
_BARE_VALUE = re.compile(r"""(?:[^\s<>"'=`/]|/(?!>))+""")
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#([0-9]{1,7})|#x([0-9a-fA-F]{1,6}));")
_PROLOG = re.compile(r"\s*(?:<\?xml\b|<!DOCTYPE\b|<!--)", re.IGNORECASE)
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


def is_plain_name(name: str) -> bool:
    """Whether it is the name of an element wherever it stands behind a <."""
    return _PLAIN_NAME.fullmatch(name) is not None


def is_attribute_name(name: str) -> bool:
    return _ATTRIBUTE_NAME.fullmatch(name) is not None


def tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """What begins a tag of these elements, a comment or a CDATA section."""
    return re.compile(rf"<(?:(/?)({'|'.join(names)}){_AFTER_NAME}|!--|!\[CDATA\[)")


def decode(data: str | bytes, document: str) -> str:
    """The document's text, with LF alone as the end of a line. Raises PmlError: too long, no UTF-8, NUL."""
    too_long = PmlError(
        f"has more than {DOCUMENT_BYTES_MAX} bytes",
        document=document,
        value=f"{len(data)} {'bytes' if isinstance(data, bytes) else 'characters'}",
        remedy="divide it into several schemas",
    )
    if len(data) > DOCUMENT_BYTES_MAX:
        raise too_long
    try:
        raw = data if isinstance(data, bytes) else data.encode()
        text = raw.decode()
    except (UnicodeDecodeError, UnicodeEncodeError) as problem:
        raise PmlError(
            f"is no UTF-8: {problem.reason}",
            document=document,
            remedy="save the file as UTF-8",
        ) from None
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise too_long
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if (at := text.find("\0")) >= 0:
        raise PmlError(
            "holds a NUL character",
            document=document,
            line=text.count("\n", 0, at) + 1,
            column=at - text.rfind("\n", 0, at),
            remedy="remove it",
        )
    return text


def resolve_entities(text: str) -> str:
    return _ENTITY.sub(_entity, text) if "&" in text else text


def _entity(found: re.Match[str]) -> str:
    name, decimal, hexadecimal = found.groups()
    if name:
        return _NAMED[name]
    number = int(decimal) if decimal else int(hexadecimal, 16)
    if not 0 < number < 0x110000 or 0xD800 <= number < 0xE000:
        return found[0]
    return chr(number)


def escape(text: str) -> str:
    """Text as PML that is read back as this text, between tags or in quotes of either kind."""
    return (
        text.replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace('"', "&quot;")
        .replace("'", "&apos;")
        .replace("\r", "&#13;")
    )


class Reader:
    """Tags and text of one document, in order."""

    def __init__(self, text: str, document: str, pattern: re.Pattern[str] = _ANY_TAG) -> None:
        """`text` as `decode` returns it; `document` is its name in errors."""
        self.text = text
        self.document = document
        self._pattern = pattern
        self._unusual: frozenset[str] = frozenset()
        self._at = 0
        """Up to here lines are counted:"""
        self._line = 1
        self._line_start = 0
        self._no_comment_end = self._no_cdata_end = False

    def also(self, names: frozenset[str]) -> None:
        """From here on these are names of elements, too: none of them is plain."""
        self._unusual = names
        if self._unusual:
            self._pattern = _ANY_NAME

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column. Fast where `offset` grows from call to call."""
        if offset < self._at:
            return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)
        breaks = self.text.count("\n", self._at, offset)
        if breaks:
            self._line += breaks
            self._line_start = self.text.rfind("\n", self._at, offset) + 1
        self._at = offset
        return self._line, offset - self._line_start + 1

    def error(self, message: str, offset: int, *, remedy: str) -> PmlError:
        line, column = self.place(offset)
        return PmlError(
            message,
            document=self.document,
            line=line,
            column=column,
            value=self.text[offset : offset + SHOWN].partition("\n")[0],
            remedy=remedy,
        )

    def events(self, accept: Callable[[Tag], bool]) -> Iterator[Tag | Piece]:
        """`accept` says of what has the form of a tag whether it is one; it is asked of tags without quotes alone."""
        text = self.text
        start = at = self._after_prolog()
        parts: list[str] = []
        candidates = 0
        while (found := self._pattern.search(text, at)) is not None:
            name = found[2]
            if self._unusual and name and name not in self._unusual and not is_plain_name(name):
                at = found.end()
                continue
            candidates += 1
            if candidates > TAGS_MAX:
                raise self.error(
                    f"has more than {TAGS_MAX} tags", found.start(), remedy="divide the document into several"
                )
            begin = found.start()
            if name is None:
                end, literal = self._special(found)
                if end < 0:
                    at = found.end()
                    continue
                parts.append(resolve_entities(text[start:begin]))
                parts.append(literal)
                start = at = end
                continue
            tag, end = self._tag(found)
            if tag is None or (not tag.quoted and not accept(tag)):
                at = max(found.end(), end)
                continue
            if tag.twice:
                raise self.error(
                    f"names the attribute {tag.twice} twice", begin, remedy="keep one of the two"
                )
            parts.append(resolve_entities(text[start:begin]))
            if any(parts):
                yield Piece("".join(parts), start)
            parts.clear()
            yield tag
            start = at = end
        parts.append(resolve_entities(text[start:]))
        if any(parts):
            yield Piece("".join(parts), start)

    def _after_prolog(self) -> int:
        """Where the document begins behind what XML wants there."""
        text, at = self.text, 0
        while (found := _PROLOG.match(text, at)) is not None:
            kind = found[0].lstrip()
            begin = found.end() - len(kind)
            end = {"<?": "?>", "<!--": "-->"}.get(kind if kind == "<!--" else kind[:2], ">")
            stop = text.find(end, found.end())
            if stop < 0:
                raise self.error("never ends", begin, remedy=f"end it with {end}")
            if end == ">" and text.find("[", found.end(), stop) >= 0:
                raise self.error(
                    "PML has no entity or element declarations",
                    begin,
                    remedy="remove the DOCTYPE, and write the text that its entities stand for",
                )
            at = stop + len(end)
        return at

    def _special(self, found: re.Match[str]) -> tuple[int, str]:
        """The end of a comment or CDATA section (-1: there is none), and the text it stands for."""
        text, begin = self.text, found.end()
        if found[0] == "<!--":
            end = -1 if self._no_comment_end else text.find("-->", begin)
            self._no_comment_end = end < 0
            return (end + 3 if end >= 0 else -1), ""
        end = -1 if self._no_cdata_end else text.find("]]>", begin)
        self._no_cdata_end = end < 0
        return (end + 3, text[begin:end]) if end >= 0 else (-1, "")

    def _tag(self, found: re.Match[str]) -> tuple[Tag | None, int]:
        """The tag that begins here and where it ends. None: this is text, at least up to there."""
        text, begin, at = self.text, found.start(), found.end()
        attributes: dict[str, str | None] = {}
        quoted = False
        twice = ""
        while True:
            space = _SPACE.match(text, at)
            assert space is not None
            at, apart = space.end(), space.end() > space.start()
            if (end := _END.match(text, at)) is not None:
                break
            name = _ATTRIBUTE.match(text, at) if apart else None
            if name is None or found[1]:
                if quoted or _QUOTED_VALUE.match(text, at):
                    raise self._broken(begin)
                return None, at
            at = name.end()
            value = None
            if name[2]:
                quote = text[at : at + 1]
                if quote in ('"', "'") and quote:
                    stop = text.find(quote, at + 1)
                    if stop < 0:
                        raise self.error(
                            f"the value of {name[1]} never ends", begin, remedy=f"end it with {quote}"
                        )
                    value, at, quoted = resolve_entities(text[at + 1 : stop]), stop + 1, True
                elif (bare := _BARE_VALUE.match(text, at)) is not None:
                    value, at = resolve_entities(bare[0]), bare.end()
                elif quoted:
                    raise self._broken(begin)
                else:
                    return None, at
            if name[1] in attributes:
                twice = name[1]
            attributes[name[1]] = value
            if len(attributes) > ATTRIBUTES_MAX:
                raise self.error(
                    f"has more than {ATTRIBUTES_MAX} attributes", begin, remedy="write &lt; if this is text"
                )
        kind = Kind.CLOSE if found[1] else Kind.EMPTY if end[0] == "/>" else Kind.OPEN
        if found[1] and end[0] == "/>":
            return None, end.end()
        source = text[begin : min(end.end(), begin + SHOWN)].partition("\n")[0]
        before = text[begin - 1 : begin] if begin else ""
        line, column = self.place(begin)
        tag = Tag(kind, found[2], attributes, line, column, source, quoted, before.isalnum(), twice)
        return tag, end.end()

    def _broken(self, begin: int) -> PmlError:
        return self.error(
            'is no tag: attributes have the form NAME, NAME=VALUE or NAME="VALUE" with blanks between them',
            begin,
            remedy="correct it, or write &lt; for a < that is text",
        )


class Warnings:
    """What is wrong with a document and was mended; the first WARNINGS_MAX of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, tag: Tag, message: str) -> None:
        self.add_at(tag.line, tag.column, tag.source, message)

    def add_at(self, line: int, column: int, source: str, message: str) -> None:
        if len(self.lines) < WARNINGS_MAX:
            self.lines.append(f"line {line}, column {column}: {source} {message}")

    @property
    def full(self) -> bool:
        return len(self.lines) >= WARNINGS_MAX


def misspelt(text: str, names: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """Offset, source and the name that is meant of what is text by rule 1, but has an attribute in quotes and a name
    that one letter, or capitals, keep from being an element's. Comments and CDATA sections are left out."""
    near = {part: name for name in names for part in _one_letter_less(name)}
    for found in _UNKNOWN_TAG.finditer(text):
        name = found[1].lower()
        meant = next((near[part] for part in _one_letter_less(name) if part in near), "")
        if meant and found[1] not in names and not _is_literal(text, found.start()):
            yield found.start(), text[found.start() : found.start() + SHOWN].partition("\n")[0], meant


def _one_letter_less(name: str) -> Iterator[str]:
    yield name
    for at in range(len(name)):
        yield name[:at] + name[at + 1 :]


def _is_literal(text: str, offset: int) -> bool:
    return any(
        text.rfind(begin, 0, offset) > text.rfind(end, 0, offset)
        for begin, end in (("<!--", "-->"), ("<![CDATA[", "]]>"))
    )


def tag_error(document: str, tag: Tag, message: str, *, remedy: str) -> PmlError:
    return PmlError(
        message, document=document, line=tag.line, column=tag.column, value=tag.source, remedy=remedy
    )
