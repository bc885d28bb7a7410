"""Python functions as schemas (section 3.2.4 of the paper).

    @prompt_function(lengths={"days": 5})
    def trip(p, days, place="rome", hotel=False):
        p.system("You plan trips.")
        with p.user():
            p.text(f"I travel for {days}.")
            if hotel:                       # module hotel
                p.text("I need a hotel.")
            match place:                    # union of the modules rome and tokyo
                case "rome": p.text("Rome ...")
                case "tokyo": p.text("Tokyo ...")
            food(p, taste="spicy")          # module food: another prompt function
        p.ask("Make a plan.")               # the prompt's own text, a message of the user

`trip.pml` is the schema: it is read from the function's syntax tree, and nothing is run for it. `trip.prompt("a week",
hotel=True)` is a prompt: the function itself runs, unchanged, with a recorder for `p`, which knows by the place of each
call in the source which modules were reached. What the function says must be what the schema has: text that depends on
anything but parameters is refused.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

from kvstore.promptcache.markup import ROLES, PmlError, escape
from kvstore.promptcache.prompt import parse_prompt
from kvstore.promptcache.schema import Module, Node, Parameter, Path, Role, Schema, Text, Union, parse_schema

NAME_LENGTH = 40
"""Of a module that is named after a condition."""
_MARK = re.compile("\ue0b7([0-9]+)\ue0b8")
"""Where an argument was put into text: its number among the recorder's."""
_TRANSPARENT: tuple[Callable[..., str], ...] = (textwrap.dedent, inspect.cleandoc)
"""What may be applied to constant text."""

End = tuple[int, int]
"""Line and column at which a call ends: no two calls of a function end at one place."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A call of the builder, or of another prompt function: in which module it is, and what the schema has there."""

    path: Path
    expected: tuple[Text | Parameter, ...] = ()
    module: str = ""
    """Of another function."""


@dataclass(slots=True)
class _Names:
    """What is taken in one module."""

    modules: set[str] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)
    """How often each argument was used."""

    def module(self, wanted: str) -> str:
        name = next(name for name in _variants(wanted) if name not in self.modules)
        self.modules.add(name)
        return name

    def parameter(self, name: str) -> str:
        self.parameters[name] = count = self.parameters.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"


def _variants(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


class PromptFunction:
    """A function that is a schema. See the module's text."""

    def __init__(self, function: Callable[..., Any], name: str, lengths: Mapping[str, int]) -> None:
        self.name = name
        self.lengths = dict(lengths)
        self.function = function
        if not isinstance(function, FunctionType):
            raise PmlError(
                f"is a {type(function).__name__}, and no function",
                document="prompt_function",
                value=repr(function)[:80],
                remedy="decorate a function that def defines",
            )
        functools.update_wrapper(self, function)
        self._signature = inspect.signature(function)
        parameters = list(self._signature.parameters)
        if not parameters:
            raise _refused(
                function.__code__,
                function.__code__.co_firstlineno,
                0,
                "takes no builder",
                "give it a first parameter, as p",
            )
        if why := _no_plain_function(function, parameters):
            raise _refused(
                function.__code__,
                function.__code__.co_firstlineno,
                0,
                why,
                "write an ordinary function, def f(p, ...): p is the builder",
            )
        self._builder = parameters[0]
        for one in lengths:
            if one not in parameters[1:]:
                raise _refused(
                    function.__code__,
                    function.__code__.co_firstlineno,
                    0,
                    f"has no parameter {one}, for which a length is given",
                    "correct the name",
                )

    def __repr__(self) -> str:
        return f"PromptFunction({self.name})"

    @functools.cached_property
    def _read(self) -> tuple[tuple[Node, ...], dict[End, _Site]]:
        reading = _Reading(self)
        return reading.tree(), reading.sites

    @functools.cached_property
    def pml(self) -> str:
        """The schema. Raises PmlError, with the line in the Python file, for what has no form in PML."""
        return Schema(self.name, self._read[0]).to_pml()

    @functools.cached_property
    def schema(self) -> Schema:
        return parse_schema(self.pml, document=self.name)

    def prompt(self, *arguments: Any, **named: Any) -> str:
        """PML of the prompt for these arguments. Raises what the function raises, and PmlError."""
        recorder = Recorder()
        recorder.run(self, (), arguments, named)
        pml = recorder.pml(self.schema)
        parse_prompt(pml, self.schema, document=self.name)
        return pml

    def __call__(self, builder: Recorder, /, *arguments: Any, **named: Any) -> None:
        """Inside another prompt function: its module."""
        if not isinstance(builder, Recorder):
            raise TypeError(
                f"{self.name} takes the builder of the function that calls it; see {self.name}.prompt"
            )
        builder.call(self, sys._getframe(1), arguments, named)

    def bound(
        self, recorder: Recorder, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        bound = self._signature.bind(recorder, *arguments, **named)
        bound.apply_defaults()
        for name in self.lengths:
            bound.arguments[name] = recorder.argument(name, str(bound.arguments[name]))
        return bound


def prompt_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    lengths: Mapping[str, int] | None = None,
) -> Any:
    """Decorator. `name`: of the schema, by default the function's. `lengths`: which of its parameters go into text, and
    the most tokens that each may have; one with a default has it as its scaffold."""

    def decorate(function: Callable[..., Any]) -> PromptFunction:
        return PromptFunction(function, name or getattr(function, "__name__", ""), lengths or {})

    return decorate if function is None else decorate(function)


# ------------------------------------------------------------------------------------------------------- the schema


class _Reading:
    """The syntax tree of one function as nodes of a schema."""

    def __init__(self, owner: PromptFunction, around: tuple[PromptFunction, ...] = ()) -> None:
        self.owner = owner
        self.code: CodeType = owner.function.__code__
        self.sites: dict[End, _Site] = {}
        self.around = (*around, owner)
        self._definition = _definition(self.code)
        self._names: dict[str, Any] = {
            **vars(builtins),
            **owner.function.__globals__,
            **_closure(owner.function),
        }
        self._own = set(self.code.co_varnames) | set(self.code.co_cellvars)

    def tree(self) -> tuple[Node, ...]:
        body = self._definition.body
        if isinstance(body[-1], ast.Return):
            self._refuse_builder(body[-1])
            body = body[:-1]
        return self._block(body, (), _Names())

    def error(self, node: ast.AST, message: str, remedy: str) -> PmlError:
        return _refused(
            self.code, getattr(node, "lineno", 0), getattr(node, "col_offset", 0) + 1, message, remedy
        )

    def _block(self, statements: Sequence[ast.stmt], path: Path, names: _Names) -> tuple[Node, ...]:
        found: list[Node] = []
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Call() as call) if self._is_call(call):
                    found += self._call(call, path, names)
                case ast.If():
                    found += self._if(statement, path, names)
                case ast.Match():
                    self._refuse_builder(statement.subject)
                    branches = [(_case_name(case.pattern), case.body) for case in statement.cases]
                    found += self._choice(branches, path, names, alone=False)
                case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)]) if (
                    self._method(call) in ROLES
                ):
                    if call.args or call.keywords:
                        raise self.error(
                            call, "a message that is opened by `with` has no text yet", "say it inside"
                        )
                    self._site(call, _Site(path))
                    found.append(Role(self._method(call), self._block(statement.body, path, names)))
                case ast.Return():
                    raise self.error(
                        statement, "returns before the end", "put what follows into an else branch"
                    )
                case _:
                    self._refuse_builder(statement)
        return tuple(found)

    def _if(self, statement: ast.If, path: Path, names: _Names) -> list[Node]:
        branches: list[tuple[str, Sequence[ast.stmt]]] = []
        rest: Sequence[ast.stmt] = [statement]
        while len(rest) == 1 and isinstance(inner := rest[0], ast.If):
            self._refuse_builder(inner.test)
            branches.append((_test_name(inner.test), inner.body))
            rest = inner.orelse
        alone = len(branches) == 1 and not rest
        if rest:
            branches.append(("else", rest))
        return self._choice(branches, path, names, alone=alone)

    def _choice(
        self, branches: Sequence[tuple[str, Sequence[ast.stmt]]], path: Path, names: _Names, *, alone: bool
    ) -> list[Node]:
        members = []
        for wanted, body in branches:
            if self._says_nothing(body):
                self._block(body, path, names)  # it may still return
                continue
            name = names.module(wanted)
            members.append(Module(name, self._block(body, (*path, name), _Names())))
        if not members:
            return []
        return [members[0]] if alone or len(branches) == 1 else [Union(tuple(members))]

    def _says_nothing(self, body: Sequence[ast.stmt]) -> bool:
        return not any(
            isinstance(node, ast.Name) and node.id == self.owner._builder
            for statement in body
            for node in ast.walk(statement)
        )

    def _is_call(self, call: ast.Call) -> bool:
        return bool(self._method(call)) or self._inner(call) is not None

    def _method(self, call: ast.Call) -> str:
        """Of the builder; "": it is no call of it."""
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name == self.owner._builder:
                return method
        return ""

    def _inner(self, call: ast.Call) -> PromptFunction | None:
        found = self._resolve(call.func)
        return found if isinstance(found, PromptFunction) else None

    def _call(self, call: ast.Call, path: Path, names: _Names) -> list[Node]:
        inner = self._inner(call)
        if inner is not None:
            return [self._other(inner, call, path, names)]
        method = self._method(call)
        if method == "ask":
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                self._refuse_builder(argument)
            return []
        if method not in ("text", *ROLES):
            raise self.error(
                call, f"the builder has no method {method}", "use text, system, user, assistant or ask"
            )
        if len(call.args) != 1 or call.keywords:
            raise self.error(call, f"{method} takes one text", "give it one argument")
        text = tuple(self._text(call.args[0], names))
        self._site(call, _Site(path, text))
        return [Role(method, text)] if method in ROLES else list(text)

    def _other(self, inner: PromptFunction, call: ast.Call, path: Path, names: _Names) -> Module:
        if inner in self.around:
            raise self.error(
                call, f"{inner.name} calls itself", "a schema has an end: write its parts one by one"
            )
        first = call.args[0] if call.args else None
        if not isinstance(first, ast.Name) or first.id != self.owner._builder:
            raise self.error(
                call,
                f"{inner.name} does not get the builder first",
                f"write {inner.name}({self.owner._builder}, ...)",
            )
        for argument in (*call.args[1:], *(keyword.value for keyword in call.keywords)):
            self._refuse_builder(argument)
        name = names.module(inner.name)
        self._site(call, _Site(path, module=name))
        return Module(name, _Reading(inner, self.around).tree())

    def _site(self, call: ast.Call, site: _Site) -> None:
        assert call.end_lineno is not None and call.end_col_offset is not None
        self.sites[call.end_lineno, call.end_col_offset] = site

    def _refuse_builder(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == self.owner._builder:
                raise self.error(
                    inner,
                    "the builder is used where a schema cannot follow",
                    "call it in statements of the function itself, of if, match, or with p.user(); not in loops, try,"
                    " or expressions",
                )

    # ---------------------------------------------------------------------------------------------------- text

    def _text(self, node: ast.expr, names: _Names) -> Iterator[Text | Parameter]:
        match node:
            case ast.Constant(value=str(text)):
                if text:
                    yield Text(text)
            case ast.JoinedStr(values=values):
                for value in values:
                    yield from self._text(value, names)
            case ast.FormattedValue(value=ast.Name() as name, conversion=-1, format_spec=None):
                yield from self._text(name, names)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from self._text(left, names)
                yield from self._text(right, names)
            case ast.Name(id=name) if name in self.owner.lengths:
                default = self.owner._signature.parameters[name].default
                scaffold = None if default is inspect.Parameter.empty else str(default)
                yield Parameter(names.parameter(name), self.owner.lengths[name], scaffold)
            case ast.Call(func=function, args=[inner], keywords=[]) if (
                self._resolve(function) in _TRANSPARENT
            ):
                parts = list(self._text(inner, names))
                if any(isinstance(part, Parameter) for part in parts):
                    raise self.error(node, "is applied to text with parameters", "apply it to constant text")
                yield Text(
                    self._resolve(function)("".join(part.text for part in parts if isinstance(part, Text)))
                )
            case _:
                found = self._resolve(node)
                if not isinstance(found, str):
                    raise self.error(
                        node,
                        f"{ast.unparse(node)[:40]} is no text that the schema could have",
                        "name it in lengths=, as a parameter; or make it a constant of the module",
                    )
                if found:
                    yield Text(found)

    def _resolve(self, node: ast.expr) -> Any:
        """What a name means when the function is read; None: nothing that is known now."""
        match node:
            case ast.Name(id=name) if name not in self._own:
                return self._names.get(name)
            case ast.Attribute(value=value, attr=attribute):
                owner = self._resolve(value)
                return getattr(owner, attribute, None) if inspect.ismodule(owner) else None
        return None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells = function.__closure__ or ()
    found = {}
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _no_plain_function(function: FunctionType, parameters: Sequence[str]) -> str:
    """Why it cannot be a schema, whatever is in it."""
    if function.__name__ == "<lambda>":
        return "a lambda has no statements"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "a coroutine waits, and a schema cannot"
    if inspect.isgeneratorfunction(function):
        return "a generator hands out values, which no schema has"
    if hasattr(function, "__wrapped__"):
        return (
            "another decorator made it: what it wraps is not seen (put prompt_function right above the def)"
        )
    if inspect.getfullargspec(function).args[:1] != parameters[:1]:
        return "it has no first parameter of its own, which would be the builder"
    if parameters[:1] in (["self"], ["cls"]):
        return f"a method's first parameter is {parameters[0]}, and not the builder"
    return ""


def _definition(code: CodeType) -> ast.FunctionDef:
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError, TypeError):
        raise _refused(
            code, code.co_firstlineno, 0, "its source is not to be had", "define it in a file"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise _refused(
        code, code.co_firstlineno, 0, "is not in its source file as it is here", "import the file again"
    )


def _refused(code: CodeType, line: int, column: int, message: str, remedy: str) -> PmlError:
    return PmlError(
        message, document=code.co_filename, line=line, column=column, value=code.co_name, remedy=remedy
    )


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-.")[:NAME_LENGTH].strip("-.") or "case"


def _test_name(test: ast.expr) -> str:
    match test:
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=str() | int() as value)]):
            return _slug(str(value))
    return _slug(ast.unparse(test))


def _case_name(pattern: ast.pattern) -> str:
    match pattern:
        case ast.MatchAs(pattern=None):
            return "else"
        case ast.MatchValue(value=ast.Constant(value=value)):
            return _slug(str(value))
    return _slug(ast.unparse(pattern))


# ------------------------------------------------------------------------------------------------------- the prompt


class _Argument(str):
    """An argument that shows in text where it was put."""

    mark: str

    def __format__(self, spec: str, /) -> str:
        return self.mark if not spec else super().__format__(spec)

    def __str__(self) -> str:
        return self.mark

    def __add__(self, other: str, /) -> str:
        return self.mark + (other.mark if isinstance(other, _Argument) else other)

    def __radd__(self, other: str, /) -> str:
        return other + self.mark


class Recorder:
    """What a prompt function gets for `p`: it notes which modules and arguments the function reaches."""

    def __init__(self) -> None:
        self._arguments: list[tuple[str, str]] = []
        """(name, value) of each that was given, by the number in its mark."""
        self._running: list[tuple[PromptFunction, Path]] = []
        self._reached: dict[Path, dict[str, str]] = {(): {}}
        """Modules, with the arguments of each."""
        self._asked: list[str] = []

    def text(self, text: str) -> None:
        """Text of the schema."""
        self._say(sys._getframe(1), text)

    def system(self, text: str | None = None) -> contextlib.AbstractContextManager[None]:
        """The message of the system; without text, what is said inside `with`."""
        return self._message(sys._getframe(1), text)

    def user(self, text: str | None = None) -> contextlib.AbstractContextManager[None]:
        """A message of the user."""
        return self._message(sys._getframe(1), text)

    def assistant(self, text: str | None = None) -> contextlib.AbstractContextManager[None]:
        """A message of the assistant."""
        return self._message(sys._getframe(1), text)

    def ask(self, text: str) -> None:
        """A message of the user that is the prompt's own: at its end, and no part of the schema."""
        self._asked.append(_MARK.sub(lambda mark: self._arguments[int(mark[1])][1], _plain(text)))

    def _message(self, frame: FrameType, text: str | None) -> contextlib.AbstractContextManager[None]:
        if text is None:
            self._site(frame)
        else:
            self._say(frame, text)
        return contextlib.nullcontext()

    def argument(self, name: str, value: str) -> str:
        found = _Argument(_MARK.sub(lambda mark: self._arguments[int(mark[1])][1], value))
        found.mark = f"\ue0b7{len(self._arguments)}\ue0b8"
        self._arguments.append((name, str.__str__(found)))
        return found

    def run(
        self, function: PromptFunction, path: Path, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        bound = function.bound(self, arguments, named)
        self._running.append((function, path))
        try:
            function.function(*bound.args, **bound.kwargs)
        finally:
            self._running.pop()

    def call(
        self, function: PromptFunction, frame: FrameType, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        site, path = self._site(frame)
        inner = (*path, site.module)
        self._reach(inner)
        self.run(function, inner, arguments, named)

    def _site(self, frame: FrameType) -> tuple[_Site, Path]:
        """What the schema has where the builder was called."""
        function, prefix = self._running[-1]
        code = frame.f_code
        if code is not function.function.__code__:
            raise _refused(
                code,
                frame.f_lineno,
                0,
                f"uses the builder of {function.name}",
                "decorate it with prompt_function",
            )
        positions = list(code.co_positions())[frame.f_lasti // 2]
        site = function._read[1].get((positions[1] or 0, positions[3] or 0))
        if site is None:
            raise _refused(
                code,
                frame.f_lineno,
                0,
                "is called where the schema has nothing",
                "call the builder in statements of its own, and start Python without -X no_debug_ranges",
            )
        path = (*prefix, *site.path)
        self._reach(path)
        return site, path

    def _reach(self, path: Path) -> None:
        for length in range(len(path) + 1):
            self._reached.setdefault(path[:length], {})

    def _say(self, frame: FrameType, text: str) -> None:
        site, path = self._site(frame)
        said = _MARK.split(_plain(text))
        wanted = [""]
        for part in site.expected:
            if isinstance(part, Text):
                wanted[-1] += part.text
            else:
                wanted += [part.name, ""]
        same = len(said) == len(wanted) and all(
            (self._arguments[int(one)][0] == other.partition(".")[0]) if index % 2 else one == other
            for index, (one, other) in enumerate(zip(said, wanted, strict=False))
        )
        if not same:
            raise _refused(
                frame.f_code,
                frame.f_lineno,
                0,
                "says another text than its schema has",
                'text may depend on the parameters named in lengths= alone, put in as f"{name}"',
            )
        for index in range(1, len(said), 2):
            self._reached[path][wanted[index]] = self._arguments[int(said[index])][1]

    def pml(self, schema: Schema) -> str:
        parts = [f'<prompt schema="{escape(schema.name)}" space="preserve">']
        children: dict[Path, list[Path]] = {}
        for path in self._reached:
            if path:
                children.setdefault(path[:-1], []).append(path)
        self._write((), children, parts)
        for text in self._asked:
            parts.append(f"<user>{escape(text)}</user>")
        return "".join([*parts, "</prompt>"])

    def _write(self, path: Path, children: Mapping[Path, Sequence[Path]], parts: list[str]) -> None:
        for name, value in self._reached[path].items():
            parts.append(f'<parameter name="{escape(name)}" value="{escape(value)}"/>')
        for inner in children.get(path, ()):
            parts.append(f'<module name="{escape(inner[-1])}">')
            self._write(inner, children, parts)
            parts.append("</module>")


def _plain(text: str) -> str:
    """`text` with marks, also where it is an argument and nothing else."""
    return text.mark if isinstance(text, _Argument) else text
