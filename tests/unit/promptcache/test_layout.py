"""The paper's rules of positions (sections 3.2 to 3.4), each with the position ids written out. A token is a word."""

import pytest

from kvstore.promptcache import Layout, Placement, PmlError, parse_prompt, parse_schema
from kvstore.promptcache.layout import Source

from .words import Words


def layout_of(inner: str, words: Words | None = None, **options) -> Layout:
    return Layout(parse_schema(f"<schema name=s>{inner}</schema>"), words or Words(), **options)


def placed(layout: Layout, inner: str, head: str = "schema=s", **options) -> Placement:
    return layout.place(parse_prompt(f"<prompt {head}>{inner}</prompt>", layout.schema), **options)


def rows(layout: Layout, placement: Placement) -> list[tuple[str, list[int], str]]:
    """(words, positions, source) of each run."""
    return [
        (layout.tokenizer.text(run.tokens), list(range(run.position, run.end)), run.source.value)
        for run in placement.runs
    ]


def numbered(count: int, prefix: str) -> str:
    return " ".join(f"{prefix}{index}" for index in range(count))


def test_modules_stand_one_after_the_other() -> None:
    """The paper's own example: two modules of 50 and 60 tokens, so the third begins at 110."""
    layout = layout_of(
        f"<module name=a>{numbered(50, 'a')}</module>\n<module name=b>{numbered(60, 'b')}</module>\n"
        "<module name=c>x y</module>"
    )
    assert [layout.areas[name,].start for name in "abc"] == [0, 50, 110]
    assert layout.size == 112
    assert placed(layout, "<c/>").positions == [110, 111]


def test_anonymous_text_is_in_every_prompt_at_its_place() -> None:
    layout = layout_of("one two <module name=a>three</module> four <module>five</module>")
    assert rows(layout, placed(layout, "")) == [
        ("one two", [0, 1], "stored"),
        ("four five", [3, 4], "stored"),
    ]
    assert rows(layout, placed(layout, "<a/>")) == [
        ("one two", [0, 1], "stored"),
        ("three", [2], "stored"),
        ("four five", [3, 4], "stored"),
    ]


def test_members_of_a_union_share_their_start_and_it_is_as_long_as_the_longest() -> None:
    layout = layout_of(
        "s <union><module name=a>a1</module><module name=b>b1 b2 b3</module><module name=c>c1 c2</module></union> e"
    )
    assert layout.areas["a",].start == 1
    assert [(layout.areas[name,].start, layout.areas[name,].end) for name in "abc"] == [
        (1, 2),
        (1, 4),
        (1, 3),
    ]
    assert placed(layout, "<a/>").positions == [0, 1, 4]
    assert placed(layout, "<b/>").positions == [0, 1, 2, 3, 4]
    assert placed(layout, "<c/>").positions == [0, 1, 2, 4]
    assert placed(layout, "").positions == [0, 4]


def test_a_union_inside_a_module_and_one_inside_a_union() -> None:
    layout = layout_of(
        "<module name=a>a1 <union><module name=b>b1 b2 <union><module name=c>c1</module>"
        "<module name=d>d1 d2 d3</module></union> b3</module><module name=e>e1</module></union> a2</module> z"
    )
    assert placed(layout, "<a><b><c/></b></a>").positions == [0, 1, 2, 3, 6, 7, 8]
    assert placed(layout, "<a><b><d/></b></a>").positions == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert placed(layout, "<a><e/></a>").positions == [0, 1, 7, 8]
    assert placed(layout, "<a/>").positions == [0, 7, 8]


def test_the_scaffold_of_a_union_stands_where_a_prompt_names_no_member() -> None:
    layout = layout_of(
        "<module name=p><union scaffold=b><module name=a>a1 a2</module><module name=b>b1</module></union></module> z"
    )
    assert rows(layout, placed(layout, "<p/>")) == [("b1", [0], "stored"), ("z", [2], "stored")]
    assert rows(layout, placed(layout, "<p><a/></p>")) == [("a1 a2", [0, 1], "stored"), ("z", [2], "stored")]
    assert rows(layout, placed(layout, "")) == [("z", [2], "stored")]


def test_an_argument_takes_the_first_positions_of_its_parameter() -> None:
    layout = layout_of("<module name=a>for <param name=d len=4/> days</module> z")
    assert layout.size == 7
    assert rows(layout, placed(layout, "<a d='x y'/>")) == [
        ("for", [0], "stored"),
        ("x y", [1, 2], "argument"),
        ("days", [5], "stored"),
        ("z", [6], "stored"),
    ]
    assert placed(layout, "<a d='p q r s'/>").positions == [0, 1, 2, 3, 4, 5, 6]
    assert placed(layout, "<a d=''/>").positions == [0, 5, 6]


def test_an_argument_that_is_too_long_is_refused_where_it_is_written() -> None:
    layout = layout_of("<module name=a><param name=d len=2/></module>")
    with pytest.raises(PmlError, match="argument of d has 3 tokens, more than its length of 2") as caught:
        placed(layout, "\n <a d='x y z'/>")
    assert (caught.value.line, caught.value.column) == (2, 2)
    assert "raise the length" in caught.value.remedy


def test_a_parameter_without_argument_is_its_scaffold() -> None:
    layout = layout_of("<module name=a><param name=d len=3 scaffold='one week'/> z</module>")
    assert rows(layout, placed(layout, "<a/>")) == [("one week", [0, 1], "stored"), ("z", [3], "stored")]
    assert rows(layout, placed(layout, "<a d=x/>")) == [("x", [0], "argument"), ("z", [3], "stored")]
    with pytest.raises(PmlError, match="scaffold of parameter d has 2 tokens"):
        layout_of("<param name=d len=1 scaffold='one week'/>")


def test_a_parameter_is_a_buffer_for_any_text() -> None:
    """Section 3.2.2: one at the begin or end of a module takes a text of the prompt."""
    layout = layout_of("<module name=a>a1 <param name=more len=5/></module><module name=b>b1</module>")
    assert rows(layout, placed(layout, "<a more='see also c'/><b/>")) == [
        ("a1", [0], "stored"),
        ("see also c", [1, 2, 3], "argument"),
        ("b1", [6], "stored"),
    ]
    assert placed(layout, "<a more='see'/> t").positions == [0, 1, 6]


def test_text_between_two_modules_begins_where_the_first_ends() -> None:
    """Section 3.4: module x between them is not imported, which leaves the gap."""
    layout = layout_of(
        "<module name=a>a1 a2</module><module name=x>x1 x2 x3</module><module name=b>b1</module>"
    )
    assert rows(layout, placed(layout, "<a/> t1 t2 <b/>")) == [
        ("a1 a2", [0, 1], "stored"),
        ("t1 t2", [2, 3], "text"),
        ("b1", [5], "stored"),
    ]


def test_text_without_a_gap_moves_what_follows() -> None:
    layout = layout_of("<module name=a>a1 a2</module><module name=b>b1</module><module name=c>c1</module>")
    placement = placed(layout, "<a/> t1 t2 <b/><c/>")
    assert rows(layout, placement) == [
        ("a1 a2", [0, 1], "stored"),
        ("t1 t2", [2, 3], "text"),
        ("b1", [4], "stored"),
        ("c1", [5], "stored"),
    ]
    assert [run.delta for run in placement.runs] == [0, 0, 2, 2]
    with pytest.raises(PmlError, match="2 positions more than there are before b"):
        placed(layout, "<a/> t1 t2 <b/>", move=False)
    assert placed(layout, "<a/> t1 <c/>", move=False).positions == [0, 1, 2, 3]


def test_text_at_the_end_begins_behind_all_that_is_in_the_prompt() -> None:
    layout = layout_of("<union><module name=a>a1</module><module name=b>b1 b2 b3</module></union>")
    assert placed(layout, "<a/> t1").positions == [0, 1]
    assert placed(layout, "<b/> t1").positions == [0, 1, 2, 3]
    layout = layout_of("<module name=a>a1</module><module name=b>b1 b2</module> always")
    placement = placed(layout, "<a/> t1 t2")
    assert rows(layout, placement)[1:] == [("always", [3], "stored"), ("t1 t2", [4, 5], "text")]
    assert placement.end == 6


def test_text_before_the_first_import_stands_before_it() -> None:
    layout = layout_of("s <module name=x>x1 x2 x3</module><module name=a>a1</module>")
    assert rows(layout, placed(layout, "t1 <a/>")) == [
        ("s", [0], "stored"),
        ("t1", [1], "text"),
        ("a1", [4], "stored"),
    ]


def test_text_inside_an_import() -> None:
    layout = layout_of("<module name=a>a1 <module name=b>b1 b2</module> a2</module> z")
    assert placed(layout, "<a>t1</a>").positions == [0, 3, 4, 5]
    assert rows(layout, placed(layout, "<a>t1</a>"))[2:] == [("t1", [4], "text"), ("z", [5], "stored")]
    assert rows(layout, placed(layout, "<a>t1<b/></a>"))[:3] == [
        ("a1", [0], "stored"),
        ("t1", [1], "text"),
        ("b1 b2", [2, 3], "stored"),
    ]
    assert rows(layout, placed(layout, "<a><b/>t1</a>"))[1:4] == [
        ("b1 b2", [1, 2], "stored"),
        ("t1", [3], "text"),
        ("a2", [4], "stored"),
    ]


def test_imports_stand_where_the_schema_has_them_whatever_their_order() -> None:
    layout = layout_of("<module name=a>a1</module><module name=b>b1</module>")
    assert rows(layout, placed(layout, "<b/><a/>")) == [("a1", [0], "stored"), ("b1", [1], "stored")]


def test_nothing_leaves_a_gap_where_gaps_are_closed() -> None:
    layout = layout_of("<module name=x>x1 x2</module><module name=a>a1 <param name=d len=4/> a2</module> z")
    placement = placed(layout, "<a d=q/> t", close_gaps=True)
    assert rows(layout, placement) == [
        ("a1", [0], "stored"),
        ("q", [1], "argument"),
        ("a2", [2], "stored"),
        ("z", [3], "stored"),
        ("t", [4], "text"),
    ]
    assert [run.delta for run in placement.runs] == [-2, -2, -5, -5, 0]


def test_modules_that_are_not_cached_keep_their_places() -> None:
    layout = layout_of("s <module name=a cache=false>a1 <module name=b>b1</module></module> z")
    assert rows(layout, placed(layout, "<a><b/></a>")) == [
        ("s", [0], "stored"),
        ("a1", [1], "computed"),
        ("b1", [2], "computed"),
        ("z", [3], "stored"),
    ]


@pytest.mark.parametrize(
    ("pml", "beginning"),
    [
        ("one two <param name=x len=3/> z", 2),
        ("one <union><module name=a>a</module></union> z", 1),
        ("one <module name=a>a</module> z", 1),
        ("one <module>two</module> three <module name=a>a</module>", 3),
        ("<module name=a>a</module> z", 0),
        ("<param name=x len=3/> z", 0),
        ("one two", 2),
        ("<module cache=false>a</module> z", 0),
        ("", 0),
    ],
)
def test_the_beginning_ends_before_what_may_differ(pml: str, beginning: int) -> None:
    assert layout_of(pml).beginning == beginning


def test_what_the_model_has_no_positions_for_is_refused() -> None:
    with pytest.raises(PmlError, match="takes 65536 positions, and the model has 2048"):
        layout_of("<param name=x len=65536/>", positions_max=2048)
    layout = layout_of("<module name=a>one two</module>", positions_max=3)
    assert placed(layout, "<a/> t").end == 3
    with pytest.raises(PmlError, match="reaches position 4"):
        placed(layout, "<a/> t u")


def test_a_text_without_messages_begins_as_the_model_expects() -> None:
    words = Words(start=[0])
    layout = layout_of("one <module name=a>two</module>", words)
    assert rows(layout, placed(layout, "<a/>")) == [("<unk> one", [0, 1], "stored"), ("two", [2], "stored")]


def test_sources_say_what_must_be_computed() -> None:
    layout = layout_of("s <module name=a><param name=d len=2/></module>")
    placement = placed(layout, "<a d=x/> t")
    assert [run.source for run in placement.runs] == [Source.STORED, Source.ARGUMENT, Source.TEXT]
    assert placement.stored == 1
    assert len(placement.tokens) == len(placement.positions) == 3
