"""Schemas as the paper describes them (section 3.2) and as their users write them."""

from pathlib import Path

import pytest

from kvstore.promptcache import PmlError, parse_schema
from kvstore.promptcache.schema import Module, Parameter, Role, Text, Union

DATA = Path(__file__).resolve().parents[4] / "shared/data/promptcache"


@pytest.mark.parametrize(
    ("name", "schema", "modules"),
    [
        ("code_generation_game.xml", "code-generation-game", 5),
        ("parameterized_prompts.xml", "travel", 11),
        ("persona_generation.xml", "persona", 35),
    ],
)
def test_schemas_of_others_load_unchanged(name: str, schema: str, modules: int) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    found = parse_schema(path.read_bytes())
    assert (found.name, len(list(found.modules)), found.warnings) == (schema, modules, ())
    assert parse_schema(found.to_pml()) == found


def test_code_in_a_module_keeps_its_text() -> None:
    path = DATA / "code_generation_game.xml"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    module = dict(parse_schema(path.read_bytes()).modules)[("map.py",)]
    (text,) = module.children
    assert isinstance(text, Text)
    assert text.text.startswith(
        "class Map:\n    def __init__(self, grid_size):\n        self.grid_size = grid_size\n"
    )
    assert "return (0 <= position[0] < self.grid_size and\n" in text.text
    compile(text.text, "map.py", "exec")


def test_unions_stand_in_modules_and_have_scaffolds() -> None:
    schema = parse_schema(
        "<schema name=s><module name=a><union scaffold='c'><module name=b>x</module><module name=c>y</module>"
        "</union></module></schema>"
    )
    union = Union((Module("b", (Text("x"),)), Module("c", (Text("y"),))), "c")
    assert schema.children == (Module("a", (union,)),)
    assert schema.scopes[("a",)].unions == {"b": 0, "c": 0}
    assert schema.scopes[("a",)].scaffolds == {0: "c"}


def test_a_name_may_come_again_in_another_module() -> None:
    schema = parse_schema(
        "<schema name=s><module name=education><union><module name=none/></union></module>"
        "<module name=occupation><union><module name=education/></union></module></schema>"
    )
    assert [path for path, _ in schema.modules] == [
        ("education",),
        ("occupation",),
        ("education", "none"),
        ("occupation", "education"),
    ]


def test_anonymous_modules_and_messages_are_transparent_to_names() -> None:
    schema = parse_schema("<schema name=s><user><module><module name=a/></module></user></schema>")
    assert schema.children == (Role("user", (Module("", (Module("a", ()),)),)),)
    assert list(schema.scopes) == [(), ("a",)]


@pytest.mark.parametrize(
    ("pml", "text"),
    [
        ("<module name=a>\n    one\n      two\n\n    three\n  </module>", "one\n  two\n\nthree\n"),
        ("<module name=a>\none\n  two\n</module>", "one\n  two\n"),
        ("<module name=a>one\n    two</module>", "one\n    two"),
        ("<module name=a> one </module>", " one "),
        ("<module name=a>\n\ta\n\t\tb\n</module>", "a\n\tb\n"),
        ("<module name=a>\n  a\n\tb\n</module>", "  a\n\tb\n"),
        ("<module name=a>\n\n   \n  a   \n   \n\n</module>", "a\n"),
        ("<module name=a space=preserve>\n  a\n </module>", "\n  a\n "),
        ("<module name=a>\n  <!-- c -->\n  a\n</module>", "a\n"),
    ],
)
def test_white_space_that_is_markup_goes(pml: str, text: str) -> None:
    (module,) = parse_schema(f"<schema name=s>\n  {pml}\n</schema>").children
    assert module == Module("a", (Text(text),))


def test_a_parameter_stands_in_the_text_around_it() -> None:
    schema = parse_schema(
        "<schema name=s><module name=a>\n    In\n    <param name=x len=1/> and <param name=y len=2/>\n"
        "    <param name=z len=3/>.\n  </module></schema>"
    )
    parts = (
        *(Text("In\n"), Parameter("x", 1), Text(" and "), Parameter("y", 2)),
        *(Text("\n"), Parameter("z", 3), Text(".\n")),
    )
    assert schema.children == (Module("a", parts),)


def test_a_message_ends_without_a_line_break() -> None:
    schema = parse_schema(
        "<schema name=s>\n <system>\n  a\n </system>\n <user>\n  b\n  <module name=c/>\n </user></schema>"
    )
    assert schema.children == (Role("system", (Text("a"),)), Role("user", (Text("b\n"), Module("c", ()))))


@pytest.mark.parametrize(
    ("pml", "line", "column", "says"),
    [
        ("<schema>x</schema>", 1, 1, "has no name"),
        ("<schema name=s>\n<module name=a/>\n<module name=a/></schema>", 3, 1, "is there already, in line 2"),
        (
            "<schema name=s><module name=a/>\n<union><module name=a/></union></schema>",
            *(2, 8, "is there already, in line 1"),
        ),
        (
            "<schema name=s><param name=a len=1/>\n <param name=a len=1/></schema>",
            2,
            2,
            "parameter a is there already",
        ),
        ("<schema name=s><module name=a/b></module></schema>", 1, 16, "no /"),
        ("<schema name=s><module name=''><module name='  '/></module></schema>", 1, 32, "printable"),
        ("<schema name=s><param name=a/></schema>", 1, 16, "has no length"),
        ("<schema name=s><param len=5/></schema>", 1, 16, "has no name"),
        ("<schema name=s><param name=a len=x/></schema>", 1, 16, "no number"),
        ("<schema name=s><param name=a len=-1/></schema>", 1, 16, "no number"),
        ("<schema name=s><param name=a len=0/></schema>", 1, 16, "1 to 65536"),
        ("<schema name=s><param name=a len=99999999999999999999/></schema>", 1, 16, "1 to 65536"),
        ("<schema name=s><union>text</union></schema>", 1, 16, "modules alone"),
        ("<schema name=s><union><param name=a len=1/></union></schema>", 1, 23, "modules alone"),
        ("<schema name=s><union><module>x</module></union></schema>", 1, 23, "no name"),
        ("<schema name=s><union scaffold=b><module name=a/></union></schema>", 1, 16, "b is no member"),
        ("<schema name=s><module name=a cache=maybe/></schema>", 1, 16, "neither true nor false"),
        ("<schema name=s space=odd></schema>", 1, 1, "space is odd"),
        ("<schema name=s><scaffold modules='a b'/><module name=a/></schema>", 1, 16, "no module b"),
        ("<schema name=s><scaffold modules=''/></schema>", 1, 16, "names no modules"),
        ("<schema name=s><user><user>a</user></user></schema>", 1, 22, "a message inside a message"),
        ("<schema name=s><schema name=t/></schema>", 1, 16, "inside a schema"),
        ("<schema name=s>\n<module name=a>x", 1, 1, "never ends"),
    ],
)
def test_errors_say_where_and_what_to_do(pml: str, line: int, column: int, says: str) -> None:
    with pytest.raises(PmlError, match=says) as caught:
        parse_schema(pml)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.remedy


def test_what_was_mended_is_told() -> None:
    schema = parse_schema(
        "<schema name=s>\n<user>\n<module name=a>x\n</user>\n</union>\n<module name=b odd=1>y</module></schema>"
    )
    assert [path for path, _ in schema.modules] == [("a",), ("b",)]
    assert schema.warnings == (
        "line 3, column 1: <module name=a> was not ended before </user> in line 4",
        "line 5, column 1: </union> ends nothing that was begun, and is ignored",
        "line 6, column 1: <module name=b odd=1> has an attribute odd, which means nothing here",
    )


@pytest.mark.parametrize(
    ("tag", "meant"),
    [
        ('<modul name="tone">', "module"),
        ('<Module name="tone">', "module"),
        ("<moduel name='tone'>", "module"),
        ('<parametre name="x" length="3"/>', "parameter"),
        ('<paramter name="x" length="3"/>', "parameter"),
        ('<model name="x">', ""),
        ("<modules>", ""),
        ('&lt;modul name="tone">', ""),
        ('<!-- <modul name="tone"> -->', ""),
        ('<![CDATA[<modul name="tone">]]>', ""),
    ],
)
def test_a_misspelt_tag_is_text_with_a_warning(tag: str, meant: str) -> None:
    schema = parse_schema(f'<schema name="a">\n<module name="b">x</module>{tag}</schema>')
    if meant:
        (warning,) = schema.warnings
        assert f": {tag}</schema> is text; write <{meant} if" in warning and warning.startswith(
            "line 2, column 28"
        )
    else:
        assert not schema.warnings
