"""Whatever a schema or a prompt is, its PML is read as the same; and whatever is written is read or refused."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.promptcache import ByteTokenizer, Encoding, Layout, PmlError, parse_prompt, parse_schema
from kvstore.promptcache.layout import Source
from kvstore.promptcache.markup import escape, resolve_entities
from kvstore.promptcache.prompt import Documents, FreeText, Import, Prompt
from kvstore.promptcache.schema import Collection, Module, Parameter, Role, Schema, Text, Union

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")
TEXT = st.one_of(
    st.text(LETTERS, min_size=1, max_size=30),
    st.sampled_from(
        ["<module name='a'>", "</module>", "&lt;", " \n ", "<!--", "-->", "]]>", "&&", "<", "<user>"]
    ),
)
NAME = st.text(st.sampled_from("ab.-_é 1"), min_size=1, max_size=6).filter(str.strip)


def joined(nodes: list) -> tuple:
    """Neighbouring texts are one."""
    out: list = []
    for node in nodes:
        if out and isinstance(node, Text) and isinstance(out[-1], Text):
            out[-1] = Text(out[-1].text + node.text)
        else:
            out.append(node)
    return tuple(out)


@st.composite
def children(draw, depth: int, names: set[str], parameters: set[str]) -> tuple:
    found: list = []
    for kind in draw(
        st.lists(
            st.sampled_from(["text", "parameter", "module", "anonymous", "union", "collection"]), max_size=4
        )
    ):
        if kind == "text" or depth == 0:
            found.append(Text(draw(TEXT)))
        elif kind == "parameter":
            name = draw(NAME.filter(lambda name: name not in parameters))
            parameters.add(name)
            scaffold = draw(st.none() | st.text(st.sampled_from("ab <&"), max_size=9))
            found.append(Parameter(name, draw(st.integers(9, 20)), scaffold))
        elif kind == "module":
            found.append(draw(module(depth, names)))
        elif kind == "collection":
            name = draw(NAME.filter(lambda name: name not in names))
            names.add(name)
            found.append(Collection(name, draw(st.none() | st.integers(150, 200))))
        elif kind == "anonymous":
            inner = draw(children(depth - 1, names, parameters))
            found.append(Module("", inner, draw(st.booleans())))
        else:
            members = tuple(draw(module(depth, names)) for _ in range(draw(st.integers(0, 3))))
            scaffold = (
                draw(st.none() | st.sampled_from([member.name for member in members])) if members else None
            )
            found.append(Union(members, scaffold))
    return joined(found)


@st.composite
def module(draw, depth: int, names: set[str]) -> Module:
    name = draw(NAME.filter(lambda name: name not in names))
    names.add(name)
    return Module(name, draw(children(depth - 1, set(), set())), draw(st.booleans()))


@st.composite
def schemas(draw) -> Schema:
    names: set[str] = set()
    parameters: set[str] = set()
    nodes = list(draw(children(3, names, parameters)))
    if draw(st.booleans()):
        nodes.append(Role("user", draw(children(2, names, parameters))))
    return parse_schema(Schema(draw(NAME), joined(nodes)).to_pml())


@st.composite
def prompts(draw) -> Prompt:
    schema = draw(schemas())

    def arguments(path) -> dict:
        return {
            name: draw(st.text(st.sampled_from("ab<& \n"), max_size=9))
            for name, parameter in schema.scopes[path].parameters.items()
            if parameter.scaffold is None or draw(st.booleans())
        }

    def needs(path) -> bool:
        """A scaffold that needs arguments must be imported."""
        scope = schema.scopes[path]
        return any(one.scaffold is None for one in scope.parameters.values()) or any(
            needs((*path, name)) for name in scope.scaffolds.values()
        )

    def items(path) -> tuple:
        scope = schema.scopes[path]
        chosen: set[int] = set()
        found: list = []
        wanted = [name for name in scope.modules if draw(st.booleans())]
        wanted += [name for name in scope.scaffolds.values() if needs((*path, name)) and name not in wanted]
        for name in wanted:
            union = scope.unions.get(name)
            if union in chosen:
                continue
            default = scope.scaffolds.get(union) if union is not None else None
            if default is not None and default != name and needs((*path, default)) and default in wanted:
                name = default
            if union is not None:
                chosen.add(union)
            inner = (*path, name)
            if draw(st.booleans()) and not (found and isinstance(found[-1], FreeText)):
                found.append(FreeText(draw(TEXT)))
            found.append(Import(inner, scope.modules[name], arguments(inner), items(inner)))
        for name in [name for name in scope.collections if draw(st.booleans())]:
            texts = draw(st.lists(st.text(LETTERS, min_size=1, max_size=12), max_size=3))
            found.append(Documents((*path, name), tuple(texts)))
        if not path and draw(st.booleans()):
            found.append(FreeText("question", (1, "user")))
        return tuple(found)

    return Prompt(schema, items(()), arguments(()))


@settings(max_examples=40, deadline=None)
@given(schema=schemas())
def test_a_schema_is_read_back(schema: Schema) -> None:
    again = parse_schema(schema.to_pml())
    assert again == schema
    assert again.scopes == schema.scopes
    assert again.warnings == ()


@settings(max_examples=40, deadline=None)
@given(prompt=prompts())
def test_a_prompt_is_read_back_and_placed(prompt: Prompt) -> None:
    assert parse_prompt(prompt.to_pml(), prompt.schema) == prompt
    layout = Layout(prompt.schema, ByteTokenizer())
    for options in ({}, {"close_gaps": True}):
        placement = layout.place(prompt, **options)
        positions = placement.positions
        assert positions == sorted(set(positions)), (
            "each position is taken once, and tokens stand in their order"
        )
        assert placement.end > max(positions, default=-1)
        if options:
            assert positions == list(range(len(positions)))
    used = layout.used(prompt)
    assert () in used
    for run in placement.runs:
        assert run.path in used or run.source is Source.TEXT or run.document
    encoding = Encoding(layout, b"s" * 32, chunk_tokens=8)
    for run, entries in encoding.entries(placement):
        assert [token for entry in entries for token in entry.chunk.tokens] == list(run.tokens)
        assert all(0 < len(entry.chunk.tokens) <= 8 for entry in entries)
        assert [entry.chunk.position + entry.delta for entry in entries] == list(
            range(run.position, run.end, 8)
        )
    keys = list(encoding.keys())
    assert len(keys) == len(set(keys)), "two places never have one key"


@settings(max_examples=100, deadline=None)
@given(text=st.text(LETTERS | st.just("\r"), max_size=50))
def test_text_is_read_back(text: str) -> None:
    assert resolve_entities(escape(text)) == text
    found = parse_schema(f"<schema name='s' space='preserve'>{escape(text)}</schema>").children
    assert found == ((Text(text),) if text else ())


PIECES = st.sampled_from(
    [
        *(
            "<schema name='s'>",
            "</schema>",
            "<module name='a'>",
            "<module>",
            "</module>",
            "<union>",
            "</union>",
        ),
        *(
            "<param a 1>",
            "<param name='b' len='2'/>",
            "</param>",
            "<user>",
            "</user>",
            "<scaffold modules='a'/>",
        ),
        *("<prompt schema='s'>", "</prompt>", "<a/>", "<a x='1'>", "</a>"),
        *("<!--", "-->", "<![CDATA[", "]]>", "&lt;", "<", "'", ">", " ", "\n", "text"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25), root=st.booleans())
def test_whatever_is_written_is_read_or_refused(pieces: list[str], root: bool) -> None:
    inner = "".join(pieces)
    for head, parse in (
        ("schema name='s'", parse_schema),
        ("prompt schema='s'", lambda text: parse_prompt(text, SMALL)),
    ):
        kind = re.split(" ", head)[0]
        text = f"<{head}>{inner}</{kind}>" if root else inner
        try:
            found = parse(text)
        except PmlError:
            continue
        assert parse(found.to_pml()) == found


SMALL = parse_schema(
    "<schema name='s'><module name='a'><param name='x' len='3' scaffold='y'/></module></schema>"
)
