"""The rules by which PML is told from text; docs/promptcache.md states the same."""

import pytest

from kvstore.promptcache import PmlError, parse_schema
from kvstore.promptcache.markup import DOCUMENT_BYTES_MAX, escape, resolve_entities
from kvstore.promptcache.schema import Module, Parameter, Text


def content(inner: str, head: str = 'name="s" space="preserve"') -> tuple:
    return parse_schema(f"<schema {head}>{inner}</schema>").children


@pytest.mark.parametrize(
    "text",
    [
        "if 0 <= a < b and b<c: return a << 2",
        "a && b & c &unknown; &lt",
        "std::vector<int> x; List<Map<String, Unit>> y;",
        "<div class='x'><p>HTML</p></div><br/>",
        "<modules> <moduleX name='a'> </schemas> <user-name> <users>",
        "< module name='a'>",
        "<user and b > c",
        "<system",
        "<Module name='Big'>",
        "<parameter name length> and <param name len>",
        "<module name>",
        "<scaffold>",
        "<!important> <!DOCTYPE html> <!ELEMENT a> <?php echo 1 ?>",
        "<!-- no end",
        "<![CDATA[ no end",
        "]]> --> /> > >>>",
        "<module\x0bx",
        "<user/x>",
    ],
)
def test_everything_else_is_text(text: str) -> None:
    assert content(text) == (Text(text),)


@pytest.mark.parametrize(
    ("pml", "nodes"),
    [
        ("<param name='a' len='3'/>", (Parameter("a", 3),)),
        ('<parameter name="a" length="3"/>', (Parameter("a", 3),)),
        ("<parameter name=a length=3/>", (Parameter("a", 3),)),
        ("<parameter name = a\n length = 3 />", (Parameter("a", 3),)),
        ("<param city 10/>", (Parameter("city", 10),)),
        ("<param name='a' len='3'></param>", (Parameter("a", 3),)),
        ("<param name='a' len='3'> here </param>", (Parameter("a", 3, "here"),)),
        ("<param name='a' len='3' scaffold='x y'/>", (Parameter("a", 3, "x y"),)),
        ("<param name='a' len='3'>b", (Parameter("a", 3), Text("b"))),
        (
            "<param name='a' len='3'>b<param name='c' len='1'>",
            (Parameter("a", 3), Text("b"), Parameter("c", 1)),
        ),
        ("<module name='unit.py'>x</module>", (Module("unit.py", (Text("x"),)),)),
        ("<module name='doc-en-US'/>", (Module("doc-en-US", ()),)),
        ("<module name='ключ 1'/>", (Module("ключ 1", ()),)),
        ("<module>x</module>", (Module("", (Text("x"),)),)),
        ("<module name='a' cache='false'>x</module>", (Module("a", (Text("x"),), cache=False),)),
        ("a<!-- <module name='x'> -->b", (Text("ab"),)),
        ("a<![CDATA[<module name='x'>&lt;]]>&lt;", (Text("a<module name='x'>&lt;<"),)),
        ("&lt;module&gt; &amp;amp; &#65;&#x42; &quot;&apos;", (Text("<module> &amp; AB \"'"),)),
        ("&#0; &#xD800; &#x110000; &#9999999;", (Text("&#0; &#xD800; &#x110000; &#9999999;"),)),
        ("a\r\nb\rc", (Text("a\nb\nc"),)),
    ],
)
def test_what_is_a_tag(pml: str, nodes: tuple) -> None:
    assert content(pml) == nodes


def test_what_xml_wants_before_the_root_is_dropped() -> None:
    text = '\ufeff<?xml version="1.0"?>\n<!DOCTYPE schema>\n<!-- of us -->\n<schema name="s">x</schema>\n<!-- end -->\n'
    assert parse_schema(text.encode()).children == (Text("x"),)


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ('<schema name="s">\n <module name="a></schema>', 2, 2, "never ends"),
        ('<schema name="s">\n\n  <module name="a" name="b"/></schema>', 3, 3, "twice"),
        ('<schema name="s"><module name="a"b="c"/></schema>', 1, 18, "is no tag"),
        ('<schema name="s"><module name="a" <b/></schema>', 1, 18, "is no tag"),
        (
            '<!DOCTYPE s [<!ENTITY a "b">]><schema name="s">&a;</schema>',
            1,
            1,
            "no entity or element declarations",
        ),
        ("<?xml version='1.0'", 1, 1, "never ends"),
        ("a\nb\0c", 2, 2, "NUL"),
        (b"<schema name='s'>\xff</schema>", 0, 0, "no UTF-8"),
        ("<schema name='s'>\ud800</schema>", 0, 0, "no UTF-8"),
        ("", 0, 0, "is no schema"),
        ("  hello", 1, 3, "text before the schema"),
        ("<prompt schema='s'/>", 1, 1, "text before the schema"),
        ("<module name='a'/>", 1, 1, "outside of a schema"),
        ("<schema name='a'/>x", 1, 19, "text behind the schema"),
        ("<schema name='a'/><schema name='b'/>", 1, 19, "behind the schema"),
    ],
)
def test_an_error_says_where(text: str | bytes, line: int, column: int, says: str) -> None:
    with pytest.raises(PmlError, match=says) as caught:
        parse_schema(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.remedy
    assert caught.value.field == (f"schema:{line}:{column}" if line else "schema")


def test_a_document_of_the_greatest_length_is_read() -> None:
    head, end = "<schema name='s' space='preserve'>", "</schema>"
    text = "x" * (DOCUMENT_BYTES_MAX - len(head) - len(end))
    assert parse_schema(head + text + end).children == (Text(text),)
    with pytest.raises(PmlError, match="more than"):
        parse_schema(head + text + "x" + end)


def test_escaped_text_is_read_back() -> None:
    text = "<module name='a'>&lt;&amp;]]><!-- \"'\r\n -->"
    assert resolve_entities(escape(text)) == text
