"""Prompts against their schema (section 3.2), and what is refused of them."""

import pytest

from kvstore.promptcache import PmlError, parse_prompt, parse_schema
from kvstore.promptcache.prompt import FreeText, Import

TRIP = parse_schema(
    """<schema name="trip">
    <module name="plan">For <param name="days" len="2"/>.
      <union>
        <module name="home"><param name="city" len="1" scaffold="Bonn"/></module>
        <module name="away"><union><module name="rome">r</module><module name="tokyo">t</module></union></module>
      </union>
    </module>
    <module name="unit.py">u</module>
    <module name="two words">w</module>
    <module name="user">U</module>
    <param name="top" len="3" scaffold="x"/>
    </schema>"""
)


def parsed(inner: str, head: str = 'schema="trip"'):
    return parse_prompt(f"<prompt {head}>{inner}</prompt>", TRIP)


def shape(items) -> list:
    return [
        (item.text, item.role)
        if isinstance(item, FreeText)
        else ("/".join(item.path), item.arguments, *shape(item.items))
        for item in items
    ]


def test_imports_arguments_and_text() -> None:
    prompt = parsed(
        'before <plan days="a week"><away><tokyo/></away></plan> between <unit.py/>\n <user>do it</user>',
        'schema="trip" top="a b"',
    )
    assert prompt.arguments == {"top": "a b"}
    assert shape(prompt.items) == [
        ("before ", None),
        ("plan", {"days": "a week"}, ("plan/away", {}, ("plan/away/tokyo", {}))),
        (" between ", None),
        ("unit.py", {}),
        ("do it", (1, "user")),
    ]
    assert parse_prompt(prompt.to_pml(), TRIP) == prompt


def test_modules_whose_names_are_no_tags() -> None:
    assert shape(parsed("<module name='two words'/><module name=user></module>").items) == [
        ("two words", {}),
        ("user", {}),
    ]


def test_arguments_as_elements() -> None:
    prompt = parsed("<plan><parameter name=days>\n  a < b\n</parameter></plan><param name=top value='q'/>")
    assert shape(prompt.items) == [("plan", {"days": "a < b"})]
    assert prompt.arguments == {"top": "q"}


def test_messages_hold_imports_and_text() -> None:
    prompt = parsed("<user><unit.py/> now you </user><assistant>yes</assistant>")
    assert shape(prompt.items) == [
        ("unit.py", {}),
        (" now you ", (1, "user")),
        ("yes", (2, "assistant")),
    ]


@pytest.mark.parametrize(
    "text",
    ["x < 3 && y <b", "vector<int> f<T>(g)", "a <- b", "if (a<b && c>d)", "&lt;div> &amp; <![CDATA[<div>]]>"],
)
def test_free_text_may_be_code(text: str) -> None:
    plain = text.replace("&lt;", "<").replace("&amp;", "&").replace("<![CDATA[<div>]]>", "<div>")
    assert shape(parsed(text).items) == [(plain, None)]


@pytest.mark.parametrize(
    ("inner", "line", "column", "says", "remedy"),
    [
        ("<nowhere/>", 1, 23, "schema trip has no module nowhere", "<plan/>"),
        ("Hello<nowhere/>", 1, 28, "no module nowhere", ""),
        ("<plann days='x'/>", 1, 23, "no module plann", "<plan/> is one"),
        (
            "\n<tokyo/>",
            2,
            1,
            "module tokyo is not in schema trip, but in plan/away",
            "<plan><away><tokyo/></away></plan>",
        ),
        ("<plan days=x>\n <rome/></plan>", 2, 2, "is not in plan, but in plan/away", ""),
        ("<plan/>", 1, 23, "parameter days has no argument", 'days="..."'),
        (
            "<plan days=1><home/>\n<away/></plan>",
            2,
            1,
            "<home/> of line 1 are members of one union",
            "one of them",
        ),
        ("<plan days=1><away><rome/><tokyo/></away></plan>", 1, 49, "members of one union", ""),
        ("<unit.py/>\n<unit.py/>", 2, 1, "imported already, in line 1", "once"),
        ("<plan days=1 nights=2/>", 1, 23, "plan has no parameter nights", "it has days"),
        ("<unit.py days=1/>", 1, 23, "no parameter days", "it has none"),
        ("<plan days/>", 1, 23, "has no value", ""),
        ("<plan days=1><param name=days>x</param></plan>", 1, 36, "has its argument already", ""),
        ("<plan><param>x</param></plan>", 1, 29, "names no parameter", ""),
        ("<plan><param name=days><rome/></param></plan>", 1, 46, "text alone", ""),
        ("<user>a<unit.py/></user>", 1, 23, "stands before an import, of unit.py", "behind all imports"),
        ("<user>a</user><unit.py/>", 1, 23, "stands before an import", ""),
        ("<user><user>a</user></user>", 1, 29, "a message inside a message", ""),
        ("<unit.py><user>a</user></unit.py>", 1, 32, "a message inside an import", ""),
        ("a</nowhere>", 1, 24, "no module nowhere", ""),
        ("<prompt schema=trip/>", 1, 23, "no module prompt", ""),
    ],
)
def test_errors_say_where_and_what_to_do(inner: str, line: int, column: int, says: str, remedy: str) -> None:
    with pytest.raises(PmlError, match=says) as caught:
        parsed(inner)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert remedy in caught.value.remedy and caught.value.remedy
    assert caught.value.field == f"prompt:{line}:{column}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<prompt schema=other/>", "there is no schema other"),
        ("<prompt/>", "names no schema"),
        ("<prompt schema=trip/>x", "text outside of the prompt"),
        ("<prompt schema=trip/><prompt schema=trip/>", "one <prompt>"),
        ("<prompt schema=trip>", "never ends"),
        ("hello", "outside of the prompt"),
        ("", "is no prompt"),
    ],
)
def test_documents_that_are_no_prompts(text: str, says: str) -> None:
    with pytest.raises(PmlError, match=says):
        parse_prompt(text, TRIP)


def test_the_default_member_needs_its_arguments_too() -> None:
    schema = parse_schema(
        "<schema name=s><module name=a><union scaffold=b><module name=b><param name=x len=1/></module>"
        "<module name=c/></union></module></schema>"
    )
    assert parse_prompt("<prompt schema=s><a><c/></a></prompt>", schema)
    with pytest.raises(PmlError, match="parameter x has no argument"):
        parse_prompt("<prompt schema=s><a/></prompt>", schema)


def test_an_import_that_is_not_ended_is_mended() -> None:
    prompt = parsed("<plan days=1><away><tokyo></away></plan>")
    assert shape(prompt.items) == [("plan", {"days": "1"}, ("plan/away", {}, ("plan/away/tokyo", {})))]
    assert prompt.warnings == ("line 1, column 42: <tokyo> was not ended before </away> in line 1",)
    assert isinstance(prompt.items[0], Import)


def test_a_module_that_is_named_like_a_message_is_never_left_out_in_silence() -> None:
    schema = parse_schema(
        '<schema name="s"><module name="user">U</module><module name="a b">B</module></schema>'
    )
    with pytest.raises(PmlError, match='import the module by <module name="user"/>'):
        parse_prompt('<prompt schema="s"><user/>?</prompt>', schema)
    found = parse_prompt('<prompt schema="s"><module name="user"/><user>Hello</user></prompt>', schema)
    assert [type(item).__name__ for item in found.items] == ["Import", "FreeText"]
    with pytest.raises(PmlError, match='there are <module name="user"/>, <module name="a b"/>'):
        parse_prompt('<prompt schema="s"><nothing/></prompt>', schema)


UNUSUAL = parse_schema(
    """<schema name="files">
    <module name=".gitignore">i</module>
    <module name="c#">c <module name="f(x)">f</module></module>
    <module name="हिन्दी">h<param name="लंबा" len="4"/></module>
    <module name="🎉">p</module>
    <module name="plain">q</module>
    </schema>"""
)


def unusual(inner: str):
    return parse_prompt(f'<prompt schema="files">{inner}</prompt>', UNUSUAL)


@pytest.mark.parametrize("name", [".gitignore", "c#", "🎉", "plain"])
def test_any_name_that_can_be_a_tag_is_one(name: str) -> None:
    """What is no letter, digit or _ begins no name elsewhere: such an import was text, in silence."""
    assert shape(unusual(f"a<{name}/>b").items) == [("a", None), (name, {}), ("b", None)]
    assert shape(unusual(f"<{name}> b</{name}>").items) == [(name, {}, (" b", None))]


def test_unusual_names_nest_and_take_arguments() -> None:
    prompt = unusual('<c#><f(x)/></c#><हिन्दी><parameter name="लंबा">x</parameter></हिन्दी>')
    assert shape(prompt.items) == [("c#", {}, ("c#/f(x)", {})), ("हिन्दी", {"लंबा": "x"})]
    assert parse_prompt(prompt.to_pml(), UNUSUAL) == prompt


@pytest.mark.parametrize("text", ["a <- b", "x <b, c", "<(y)/>", "<.env/>", "<#if a>", "<= 3", "<<d#>>="])
def test_in_such_a_schema_all_else_is_the_text_that_it_is_in_others(text: str) -> None:
    assert shape(unusual(text).items) == shape(parsed(text).items) == [(text, None)]


def test_in_such_a_schema_comments_and_sections_are_what_they_are() -> None:
    assert shape(unusual("a<!-- <c#/> -->b<![CDATA[<c#/>]]><!---->").items) == [("ab<c#/>", None)]


@pytest.mark.parametrize("tag", ['<हिन्दी लंबा="x"/>', "<plain !a='b'/>", '<plan -days = "x">'])
def test_what_has_a_value_in_quotes_and_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(PmlError, match="is no tag") as caught:
        unusual(tag)
    assert (caught.value.line, caught.value.column) == (1, 24)


def test_an_argument_that_no_attribute_can_be_is_asked_for_as_an_element() -> None:
    with pytest.raises(PmlError, match="parameter लंबा has no argument") as caught:
        unusual("<हिन्दी/>")
    assert '<parameter name="लंबा">' in (caught.value.remedy or "")


def test_an_argument_of_a_member_that_is_there_by_default_is_asked_for_where_it_belongs() -> None:
    schema = parse_schema(
        """<schema name="s"><module name="m"><union scaffold="a"><module name="a"><union scaffold="b">
        <module name="b"><param name="p" len="3"/></module></union></module></union></module></schema>"""
    )
    with pytest.raises(PmlError, match="parameter p has no argument") as caught:
        parse_prompt('<prompt schema="s"><m/></prompt>', schema)
    assert caught.value.remedy.startswith('write <a><b p="..."></b></a> in this element')
    done = parse_prompt('<prompt schema="s"><m><a><b p="..."></b></a></m></prompt>', schema)
    assert shape(done.items) == [("m", {}, ("m/a", {}, ("m/a/b", {"p": "..."})))]
