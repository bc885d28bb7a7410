"""Documents made to cost much: each is refused, or read, in steps and memory that its length bounds. What takes more
steps ends by the time that any test has."""

import tracemalloc

import pytest

from kvstore.promptcache import PmlError, Schema, parse_prompt, parse_schema
from kvstore.promptcache.markup import DEPTH_MAX, DOCUMENT_BYTES_MAX, ELEMENTS_MAX, TAGS_MAX

BYTES = 400 << 20
SIZE = 2 << 20
"""Of most documents here: what is quadratic in it takes longer than any test may."""


def schema(inner: str) -> str:
    return f"<schema name='s'>{inner}</schema>"


def filled(piece: str, size: int = SIZE) -> str:
    return piece * (size // len(piece))


SMALL = parse_schema(schema("<module name='a'>x</module>"))

SCHEMAS = {
    "100 MB": "x" * (100 << 20),
    "100 MB of bytes": b"<" * (100 << 20),
    "depth 10,000": schema("<module>" * 10_000),
    "depth with names": schema("".join(f"<module name='m{n}'>" for n in range(10_000))),
    "unions in unions": schema("<union><module name='a'>" * 10_000),
    "an entity bomb": "<!DOCTYPE s ["
    + "".join(f'<!ENTITY a{n} "&a{n - 1};&a{n - 1};">' for n in range(1, 99))
    + "]>"
    + schema("&a98;"),
    "a million modules": schema("<module/>" * 700_000),
    "a million ends": schema("</module>" * 700_000),
    "a tag with a million attributes": schema("<module " + filled("a=1 b=2 ") + ">"),
    "a tag with a million different attributes": schema(
        "<module " + " ".join(f"a{n}=1" for n in range(200_000)) + ">"
    ),
    "a module named twice": schema("".join(f"<module name='m{n % 20_000}'/>" for n in range(20_001))),
    "too many messages": schema("<user>a</user>" * 70_000),
}
READ = {
    "text": schema(filled("x")),
    "nothing but <": schema(filled("<")),
    "nothing but &": schema(filled("&")),
    "entities": schema(filled("&lt;")),
    "things like entities": schema(filled("&#x")),
    "blanks": schema(filled(" ")),
    "lines": schema(filled("\n")),
    "tags that never end": schema(filled("<module ", 1 << 20)),
    "tags that never end, with attributes": schema(filled("<module a=1 ", 1 << 20)),
    "long blanks in a tag": schema("<module" + filled(" ")),
    "comments that never end": schema(filled("<!-- ", 1 << 20)),
    "sections that never end": schema(filled("<![CDATA[ ", 1 << 20)),
    "empty comments": schema(filled("<!---->", 1 << 20)),
    "long names": schema("<" + filled("a")),
    "names as long as can be": schema(filled("<" + "a" * 300)),
    "parameters": schema("".join(f"<param name='p{n}' len='65536'/>" for n in range(20_000))),
    "modules": schema("".join(f"<module name='m{n}'>text</module>\n" for n in range(20_000))),
    "one union": schema(
        "<union>" + "".join(f"<module name='m{n}'>text</module>\n" for n in range(20_000)) + "</union>"
    ),
}
PROMPTS = {
    "tags that never end": filled("<a "),
    "text like types": filled("x<b>", 1 << 20),
    "text like tags": filled("x<b c>", 1 << 20),
    "quotes that never end": "<a x=" + filled("'", 11),
    "imports": filled("<a/>"),
    "unknown imports": filled("<b/>"),
    "depth": filled("<a>"),
    "ends": filled("</a>"),
    "messages": filled("<user>x</user>", 1 << 20),
}


def outcome(parse, *arguments) -> str:
    """The refusal, or "read"."""
    try:
        parse(*arguments)
    except PmlError as problem:
        return f"{problem} / {problem.remedy}"
    return "read"


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas_are_refused(name: str) -> None:
    said = outcome(parse_schema, SCHEMAS[name])
    assert said != "read" and len(said) < 1_000 and not said.endswith("/ ")


@pytest.mark.parametrize("name", ["100 MB", "text", "nothing but <"])
def test_memory_is_bounded(name: str) -> None:
    text = {**SCHEMAS, **READ}[name]
    tracemalloc.start()
    try:
        outcome(parse_schema, text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BYTES


@pytest.mark.parametrize("name", READ)
def test_large_schemas_are_read_or_refused_in_bounds(name: str) -> None:
    assert outcome(parse_schema, READ[name])


@pytest.mark.parametrize("name", PROMPTS)
def test_hostile_prompts_are_read_or_refused_in_bounds(name: str) -> None:
    assert outcome(parse_prompt, f"<prompt schema='s'>{PROMPTS[name]}</prompt>", SMALL)


@pytest.fixture(scope="module")
def many() -> Schema:
    return parse_schema(
        schema("<module name='.a'/>" + "".join(f"<module name='m{n}'/>" for n in range(60_000)))
    )


@pytest.mark.parametrize("piece", ["</m1>", "<.b/>", "<m1 ="])
def test_prompts_of_a_schema_with_many_modules_are_read_or_refused_in_bounds(
    piece: str, many: Schema
) -> None:
    """What looks at all names for each tag takes minutes."""
    assert outcome(parse_prompt, f"<prompt schema='s'>{piece * (TAGS_MAX - 2)}</prompt>", many)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"x" * (DOCUMENT_BYTES_MAX + 1), f"more than {DOCUMENT_BYTES_MAX} bytes"),
        ("é" * (DOCUMENT_BYTES_MAX // 2 + 1), f"more than {DOCUMENT_BYTES_MAX} bytes"),
        (schema("<module>" * DEPTH_MAX), f"inside {DEPTH_MAX} others"),
        (schema("<module/>" * ELEMENTS_MAX), f"at most {ELEMENTS_MAX} elements"),
        (schema("<user" * (TAGS_MAX + 1)).replace("<user", "<user "), f"more than {TAGS_MAX} tags"),
    ],
)
def test_what_happens_at_the_bounds(text: str | bytes, says: str) -> None:
    with pytest.raises(PmlError, match=says):
        parse_schema(text)


def test_the_greatest_depth_is_read() -> None:
    inner = "<module>" * (DEPTH_MAX - 1) + "x" + "</module>" * (DEPTH_MAX - 1)
    assert parse_schema(parse_schema(schema(inner)).to_pml())
