"""Python functions as schemas, and the same functions as prompts (section 3.2.4)."""

import functools

import pytest

from kvstore.promptcache import Layout, PmlError, parse_prompt, parse_schema, prompt_function
from kvstore.promptcache.prompt import FreeText, Import
from kvstore.promptcache.schema import Module, Parameter, Role, Text, Union

from .samples import food, trip
from .words import Words


def imports(pml: str) -> list[str]:
    def paths(items):
        for item in items:
            if isinstance(item, Import):
                yield "/".join(item.path), item.arguments
                yield from paths(item.items)

    return list(paths(parse_prompt(pml, trip.schema).items))


def test_a_function_is_a_schema() -> None:
    days, taste = Parameter("days", 5), Parameter("taste", 4, "mild")
    meal = (Text("I like "), taste, Text(" food. "), Module("sweet", (Text("And cake. "),)))
    tokyo = Module("tokyo", (Text("Tokyo."), Module("hotel-and-days", (Text("A capsule hotel."),))))
    assert trip.schema.name == "travel"
    assert trip.schema.children == (
        Role("system", (Text("You plan <trips> & more."),)),
        Role(
            "user",
            (
                Text("\nBe brief.\n  Be kind.\nI travel for "),
                days,
                Text(". Yes."),
                Module("hotel", (Text("I need a hotel."),)),
                Union((Module("rome", (Text("Rome."),)), tokyo, Module("else", (Text("Anywhere."),)))),
                Union(
                    (
                        Module("a-day", (Text("A day for "), days)),
                        Module("hotel-2", (Text("Long with hotel."),)),
                        Module("else-2", (Text("Long."),)),
                    )
                ),
                Module("food", meal),
                Module("food-2", meal),
            ),
        ),
    )
    assert parse_schema(trip.pml) == trip.schema


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"days": "a week"}, [("rome", {}), ("else-2", {})]),
        ({"days": "a week", "hotel": True}, [("hotel", {}), ("rome", {}), ("hotel-2", {})]),
        ({"days": "a day"}, [("rome", {}), ("a-day", {"days": "a day"})]),
        ({"days": 7, "place": "oslo"}, [("else", {}), ("else-2", {})]),
        (
            {"days": "x", "place": "tokyo", "hotel": True},
            [("hotel", {}), ("tokyo", {}), ("tokyo/hotel-and-days", {}), ("hotel-2", {})],
        ),
    ],
)
def test_the_same_function_is_the_prompt(arguments: dict, found: list) -> None:
    pml = trip.prompt(**arguments)
    foods = [("food", {"taste": "spicy"}), ("food-2", {"taste": "mild"})]
    assert imports(pml) == [*found, *foods]
    prompt = parse_prompt(pml, trip.schema)
    assert prompt.arguments == {"days": str(arguments["days"])}
    assert prompt.items[-1] == FreeText(f"Plan it. For {arguments['days']}!", (1, "user"))


def test_modules_inside_called_functions() -> None:
    assert ("food/sweet", {}) in imports(trip.prompt("x", sweet=True))
    assert food.schema.children[0] == Text("I like ")
    assert food.prompt(taste='<hot> & "sour"') == (
        '<prompt schema="food" space="preserve"><parameter name="taste" value="&lt;hot&gt; &amp; &quot;sour&quot;"/>'
        "</prompt>"
    )


def test_a_prompt_is_what_the_function_says() -> None:
    words = Words("chatml")
    layout = Layout(trip.schema, words)
    placement = layout.place(parse_prompt(trip.prompt("a day", "tokyo", sweet=True), trip.schema))
    assert words.text(placement.tokens) == (
        "<|im_start|> system You plan <trips> & more. <|im_end|> <|im_start|> user Be brief. Be kind. I travel for a"
        " day . Yes. Tokyo. A day for a day I like spicy food. And cake. I like mild food. <|im_end|> <|im_start|> user"
        " Plan it. For a day! <|im_end|> <|im_start|> assistant"
    )


@prompt_function
def looping(p, names=()):
    for name in names:
        p.text(name)


@prompt_function
def guarded(p):
    try:
        p.text("a")
    finally:
        pass


@prompt_function
def early(p, stop=False):
    if stop:
        return
    p.text("a")


@prompt_function
def unknown(p, name):
    p.text(f"Hello {name}")


@prompt_function
def local(p):
    text = "a"
    p.text(text)


@prompt_function
def formatted(p, name=1.0):
    p.text(f"{name:.2f}")


@prompt_function
def conditional(p, name=1):
    p.text("a") if name else p.text("b")


@prompt_function
def handed(p):
    print(p)


@prompt_function
def mistaken(p):
    p.say("a")


@prompt_function
def itself(p, more=False):
    if more:
        itself(p)


@prompt_function
def nested(p):
    def inner():
        p.text("a")

    inner()


@prompt_function
def filled(p):
    with p.user("a"):
        p.text("b")


@pytest.mark.parametrize(
    ("function", "says", "line"),
    [
        (looping, "where a schema cannot follow", 2),
        (guarded, "where a schema cannot follow", 2),
        (early, "returns before the end", 2),
        (unknown, "name is no text that the schema could have", 1),
        (local, "text is no text that the schema could have", 2),
        (formatted, "no text that the schema could have", 1),
        (conditional, "where a schema cannot follow", 1),
        (handed, "where a schema cannot follow", 1),
        (mistaken, "the builder has no method say", 1),
        (itself, "itself calls itself", 2),
        (nested, "where a schema cannot follow", 2),
        (filled, "has no text yet", 1),
    ],
)
def test_what_has_no_form_in_pml_is_refused_with_its_line(function, says: str, line: int) -> None:
    with pytest.raises(PmlError, match=says) as caught:
        _ = function.pml
    # the decorator's line is the first, the def the second
    assert caught.value.line >= function.function.__code__.co_firstlineno + 1 + line
    assert __file__ in caught.value.field and caught.value.remedy


@prompt_function(lengths={"name": 3})
def changing(p, name):
    name = name.upper()
    p.text(f"Hello {name}")


def test_text_that_is_not_the_schemas_is_refused() -> None:
    assert changing.schema.children == (Text("Hello "), Parameter("name", 3))
    with pytest.raises(PmlError, match="says another text than its schema has"):
        changing.prompt("x")


def test_mistakes_of_the_decorator() -> None:
    with pytest.raises(PmlError, match="takes no builder"):
        prompt_function(lambda: None)
    with pytest.raises(PmlError, match="has no parameter x"):
        prompt_function(lengths={"x": 1})(food.function)
    with pytest.raises(TypeError, match=r"food\.prompt"):
        food("spicy")


def test_a_function_without_a_file_is_refused() -> None:
    scope: dict = {"prompt_function": prompt_function}
    exec("@prompt_function\ndef f(p):\n    p.text('a')\n", scope)
    with pytest.raises(PmlError, match="define it in a file"):
        _ = scope["f"].pml


class Holder:
    def method(self, p):
        p.text("x")


async def waits(p):
    p.text("x")


def hands_out(p):
    p.text("x")
    yield 1


def passed_on(function):
    @functools.wraps(function)
    def inner(*arguments, **named):
        return function(*arguments, **named)

    return inner


@passed_on
def wrapped(p):
    p.text("x")


def takes_any(*p):
    p[0].text("x")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda p: p.text("x"), "a lambda has no statements"),
        (wrapped, "another decorator made it"),
        (takes_any, "no first parameter of its own"),
        (Holder.method, "a method's first parameter is self"),
        (Holder().method, "is a method, and no function"),
        (waits, "a coroutine waits"),
        (hands_out, "a generator hands out values"),
        (functools.partial(hands_out, 1), "is a partial, and no function"),
        (print, "is a builtin_function_or_method, and no function"),
        (Holder, "is a type, and no function"),
    ],
)
def test_what_is_no_plain_function_is_refused(function, says: str) -> None:
    with pytest.raises(PmlError, match=says):
        prompt_function(function)
