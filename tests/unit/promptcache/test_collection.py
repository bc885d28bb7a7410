"""Documents that each prompt brings itself: what is read, where they stand, and that each has one KV wherever it is."""

import pytest

from kvstore.promptcache import ByteTokenizer, Encoding, Layout, Method, PmlError, parse_prompt, parse_schema
from kvstore.promptcache.prompt import Documents

from .test_layout import layout_of, placed, rows
from .words import Words

SCHEMA = "Answer briefly. <collection name=docs/> Mind the order."


def entries_of(encoding: Encoding, inner: str) -> list[list[tuple[bytes, int]]]:
    """(key, delta) of the chunks of each document."""
    placement = placed(encoding.layout, inner)
    return [
        [(entry.chunk.key, entry.delta) for entry in entries]
        for run, entries in encoding.entries(placement)
        if run.document
    ]


def test_documents_stand_one_behind_the_other_and_move_what_follows() -> None:
    layout = layout_of(SCHEMA)
    assert (layout.size, layout.beginning) == (5, 2)
    assert rows(layout, placed(layout, "<docs/> Why?")) == [
        ("Answer briefly.", [0, 1], "stored"),
        ("Mind the order.", [2, 3, 4], "stored"),
        ("Why?", [5], "text"),
    ]
    assert rows(
        layout, placed(layout, "<docs><document>a b</document> <document>c</document></docs> Why?")
    ) == [
        ("Answer briefly.", [0, 1], "stored"),
        ("a b", [2, 3], "stored"),
        ("c", [4], "stored"),
        ("Mind the order.", [5, 6, 7], "stored"),
        ("Why?", [8], "text"),
    ]


def test_a_length_keeps_positions_free_and_nothing_moves() -> None:
    layout = layout_of("One <collection name=docs length=4/> two <module name=m>three</module>")
    assert rows(layout, placed(layout, "<docs><document>a b</document></docs><m/>")) == [
        ("One", [0], "stored"),
        ("a b", [1, 2], "stored"),
        ("two", [5], "stored"),
        ("three", [6], "stored"),
    ]
    assert placed(layout, "<docs><document>a b</document></docs><m/>", close_gaps=True).positions == [
        *(0, 1, 2, 3, 4)
    ]
    with pytest.raises(PmlError, match=r"prompt:1:18.*documents of docs have 5 tokens, more than its length"):
        placed(layout, "<docs><document>a b c</document><document>d e</document></docs>")


def test_text_before_and_behind_stands_around_them() -> None:
    layout = layout_of(SCHEMA)
    found = rows(layout, placed(layout, "x <docs><document>a</document></docs> y"))
    assert [(text, at[0]) for text, at, _ in found] == [
        ("Answer briefly.", 0),
        ("x", 2),
        ("a", 3),
        ("Mind the order.", 4),
        ("y", 7),
    ]


def test_a_collection_may_be_in_a_module_and_in_a_message() -> None:
    layout = layout_of(
        "<system>Sys.</system><user>Read <module name=m>these: <collection name=docs/>!</module></user>",
        Words("chatml"),
    )
    found = rows(layout, placed(layout, "<m><docs><document>a b</document></docs></m> So?"))
    assert [text for text, _, _ in found] == [
        "<|im_start|> system Sys. <|im_end|> <|im_start|> user Read",
        "these:",
        "a b",
        "!",
        "So? <|im_end|> <|im_start|> assistant",
    ]
    with pytest.raises(PmlError, match=r"module docs is not in schema s, but in m \(write <m><docs/></m>\)"):
        placed(layout, "<docs/>")


@pytest.mark.parametrize("method", list(Method))
def test_a_document_has_the_same_keys_wherever_it_stands(method: Method) -> None:
    encoding = Encoding(layout_of(SCHEMA), b"s" * 32, chunk_tokens=2, method=method)
    one, two = entries_of(encoding, "<docs><document>a b c</document><document>d e f</document></docs>")
    other, again = entries_of(encoding, "<docs><document>d e f</document><document>a b c</document></docs>")
    assert [key for key, _ in one] == [key for key, _ in again]
    assert [key for key, _ in two] == [key for key, _ in other]
    begin = 2 if method is Method.BEGINNING else 0
    assert [delta for _, delta in one] == [2 - begin] * 2
    assert [delta for _, delta in again] == [5 - begin] * 2
    assert not {key for key, _ in one} & {key for key, _ in two}


def test_keys_cover_the_text_so_far_and_the_beginning() -> None:
    words = Words()
    encoding = Encoding(layout_of(SCHEMA, words), b"s" * 32, chunk_tokens=2)
    (((first, _), (second, _)),) = entries_of(encoding, "<docs><document>a b c</document></docs>")
    (((same, _), (edited, _)),) = entries_of(encoding, "<docs><document>a b x</document></docs>")
    assert same == first and edited != second
    (((_, _), (later, _)),) = entries_of(encoding, "<docs><document>x b c</document></docs>")
    assert later != second, "the same tokens behind others"
    other = Encoding(layout_of(SCHEMA.replace("briefly", "at length"), words), b"s" * 32, chunk_tokens=2)
    assert entries_of(other, "<docs><document>a b c</document></docs>")[0][0][0] != first
    tenant = Encoding(layout_of(SCHEMA, words), b"t" * 32, chunk_tokens=2)
    assert entries_of(tenant, "<docs><document>a b c</document></docs>")[0][0][0] != first
    # Behind another schema's same beginning it is the same
    alike = Encoding(layout_of("Answer briefly. <collection name=texts/>", words), b"s" * 32, chunk_tokens=2)
    assert entries_of(alike, "<texts><document>a b c</document></texts>")[0][0][0] == first


def test_documents_are_text() -> None:
    schema = parse_schema(f"<schema name=s>{SCHEMA}</schema>")
    prompt = parse_prompt(
        "<prompt schema=s><docs>\n  <document>\n    if a < b && c:\n        go\n  </document>\n"
        "<document><![CDATA[<docs> ]] </prompt>]]></document><document></document></docs></prompt>",
        schema,
    )
    assert prompt.items == (Documents(("docs",), ("if a < b && c:\n    go\n", "<docs> ]] </prompt>")),)
    layout = Layout(schema, ByteTokenizer())
    assert layout.place(prompt).stored == layout.size + sum(map(len, prompt.items[0].texts))
    assert parse_prompt(
        "<prompt schema=s><module name='docs'><document>x</document></module></prompt>", schema
    )


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ("<docs><x/></docs>", "a collection holds documents alone"),
        ("<docs>text</docs>", "text between the documents of docs: 'text'"),
        ("<docs><document><docs/></document></docs>", "a document is text alone"),
        ("<docs><document>a <b> c</document></docs>", r"a document is text alone.*CDATA"),
        ("<docs/><docs/>", "docs is imported already"),
        ("<docs days=3/>", "a collection has no parameter days"),
        ("<document>a</document>", "schema s has no module document"),
        ("<user>hello</user><docs/>", "the text of this message stands before an import, of docs"),
        ("<doc/>", r"<docs/> is one"),
    ],
)
def test_what_is_no_collection_is_refused(inner: str, says: str) -> None:
    with pytest.raises(PmlError, match=says):
        placed(layout_of(SCHEMA), inner)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ("<collection size='3'/>", "has no name"),
        ("<collection name=a/><module name=a>x</module>", "a is there already"),
        ("<module name=a>x</module><collection name=a/>", "a is there already"),
        ("<collection name=a length=x/>", "'x' is no number of tokens"),
        ("<collection name=a length=0/>", "a collection has 1 to 65536 tokens"),
        ("<union><collection name=a/></union>", "a union holds modules alone"),
        ("<collection name='a/b'/>", "a name has no /"),
    ],
)
def test_collections_that_cannot_be_are_refused(inner: str, says: str) -> None:
    with pytest.raises(PmlError, match=says):
        layout_of(inner)


def test_what_programs_write_of_their_own_collections_is_text() -> None:
    schema = parse_schema(
        "<schema name=s space=preserve>List<Collection> a; <collection> </collection><collection name=c/></schema>"
    )
    assert schema.children[0].text == "List<Collection> a; <collection> </collection>"
    assert not schema.warnings


def test_what_is_written_around_is_told() -> None:
    schema = parse_schema("<schema name=s><collection name=a size=3>x</collection></schema>")
    assert any("size" in line for line in schema.warnings)
    assert any("no content" in line for line in schema.warnings)
