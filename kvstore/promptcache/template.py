"""What a model's chat template writes around the messages of a schema and of a prompt (section 3.2.3 of the paper).

The template is asked with marks in place of the messages' text. What it writes between two marks is divided where a
conversation that ends with the first of the two would end, so that a message has a text before it and one behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.promptcache.markup import PmlError
from kvstore.promptcache.tokenizer import TemplateRefused, Tokenizer

MESSAGES_MAX = 128
"""Of a schema, or of a schema and a prompt: the template is asked once for each."""


@dataclass(frozen=True, slots=True)
class Around:
    """Of one message."""

    before: str
    behind: str


def _mark(number: int) -> str:
    return f"\ue0b5{number}\ue0b6"


def _pieces(tokenizer: Tokenizer, roles: Sequence[str], *, reply: bool) -> list[str]:
    """What stands before, between and behind the messages. Raises TemplateRefused."""
    marks = [_mark(number) for number in range(len(roles))]
    rest = tokenizer.apply_template(list(zip(roles, marks, strict=True)), reply=reply)
    pieces: list[str] = []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found:
            raise TemplateRefused("it leaves a message out, or changes their order")
        pieces.append(piece)
    if any(mark in rest for mark in marks):
        raise TemplateRefused("it writes a message twice")
    return [*pieces, rest]


def around_schema(tokenizer: Tokenizer, roles: Sequence[str], document: str) -> tuple[Around, ...]:
    """For each message of a schema. Raises PmlError where the template does not take them."""
    if not roles:
        return ()
    if len(roles) > MESSAGES_MAX:
        raise PmlError(
            f"has {len(roles)} messages, more than {MESSAGES_MAX}",
            document=document,
            remedy="put several turns into one message",
        )
    refusal = ""
    between: list[str] = []
    for followed_by in ((), ("user",), ("assistant",)):
        try:
            between = _pieces(tokenizer, [*roles, *followed_by], reply=False)[: len(roles) + 1]
            break
        except TemplateRefused as problem:
            refusal = refusal or str(problem)
    if not between:
        raise PmlError(
            f"the model's chat template does not take its messages ({', '.join(roles[:8])}): {refusal}",
            document=document,
            remedy="write the messages as the model expects them, or leave the tags out",
        )
    ends = [_end(tokenizer, roles[: number + 1], between[number + 1]) for number in range(len(roles))]
    return tuple(
        Around(between[number].removeprefix(ends[number - 1]) if number else between[0], ends[number])
        for number in range(len(roles))
    )


def _end(tokenizer: Tokenizer, roles: Sequence[str], behind: str) -> str:
    """How a conversation of `roles` ends, if what stands `behind` its last message in a longer one begins so."""
    try:
        end = _pieces(tokenizer, roles, reply=False)[-1]
    except TemplateRefused:
        return ""
    return end if behind.startswith(end) else ""


def around_prompt(
    tokenizer: Tokenizer,
    schema: Sequence[str],
    around: Sequence[Around],
    prompt: Sequence[str],
    document: str,
) -> tuple[tuple[Around, ...], str]:
    """For each message of a prompt of a schema that has the messages `schema`; and what stands before the reply."""
    roles = [*schema, *prompt]
    if not roles:
        return (), ""
    if not prompt and roles[-1] == "assistant":
        return (), ""
    if len(roles) > MESSAGES_MAX:
        raise PmlError(
            f"schema and prompt have {len(roles)} messages, more than {MESSAGES_MAX}",
            document=document,
            remedy="put several turns into one message",
        )
    reply = roles[-1] != "assistant"
    try:
        pieces = _pieces(tokenizer, roles, reply=reply)
    except TemplateRefused as problem:
        raise PmlError(
            f"the model's chat template does not take these messages ({', '.join(roles[-8:])}): {problem}",
            document=document,
            remedy="the schema's messages come first, then the prompt's: write them in the model's order",
        ) from None
    known = [one.before + one.behind for one in around]
    for number in range(len(schema)):
        before = pieces[number] if not number else pieces[number].removeprefix(around[number - 1].behind)
        if before != around[number].before:
            raise PmlError(
                "the model's chat template writes the schema's messages in another way before this prompt's",
                document=document,
                value=known[number][:40],
                remedy="leave the tags of messages out of the schema",
            )
    end = around[-1].behind if around else ""
    first = len(schema)
    tail = pieces[first:]
    tail[0] = tail[0].removeprefix(end)
    return tuple(Around(piece, "") for piece in tail[:-1]), tail[-1]
