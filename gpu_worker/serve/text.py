"""Between text and tokens: a conversation as the model was taught to read it, and tokens as text, piece by piece."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError

from kvstore.gpu_worker.truncation import Turns
from kvstore.promptcache import HuggingFaceTokenizer

EXACT_MAX = 16
"""Turns whose edges are found by writing the conversation up to each of them, ..."""
RENDERED_MAX = 256
"""and the most, where there is no other way."""
MARK = "\N{SECTION SIGN}a message\N{SECTION SIGN}"
SHRINKS_BY = 4
"""As much shorter a tokenizer may make a text before it cuts it, by composing letters."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What half a character decodes to."""


class Text:
    """One tokenizer. `chat` and `encode` may be called from any thread, one at a time goes on; what `detokenizer` makes
    belongs to one thread for all."""

    def __init__(self, tokenizer: Any, *, template: str = "") -> None:
        """`template`: of chats, in Jinja; "": the tokenizer's own."""
        self._encoding = tokenizer
        self._decoding = copy.deepcopy(tokenizer)  # a tokenizer that is encoding must not be used meanwhile
        self._template = template or None
        self._lock = threading.Lock()
        self.characters_per_token = SHRINKS_BY * max(map(len, tokenizer.get_vocab()), default=1)
        """No token is made of more."""

    def another(self) -> Text:
        """The same, for another thread that encodes."""
        with self._lock:
            other = copy.copy(self)
            other._encoding = copy.deepcopy(self._encoding)
        other._lock = threading.Lock()
        return other

    @property
    def chats(self) -> bool:
        """Whether there is a template for chats."""
        return bool(self._template or getattr(self._encoding, "chat_template", None))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins. Raises ValueError for what the template
        refuses."""
        with self._lock:
            try:
                text = self._rendered(messages, answer=True)
            except (
                Exception
            ) as error:  # a template is a program: whatever it raises, it does not take these messages
                raise ValueError(f"the chat template does not take these messages: {error}") from error
            return self._tokens(text, add_special_tokens=False)

    def turns(self, messages: Sequence[Mapping[str, str]]) -> Turns | None:
        """Where the turns of a conversation begin and its prompts end, in the tokens of `chat`: a turn begins with what
        a user says. None if the template does not write a conversation one message after the other."""
        with self._lock:
            try:
                text = self._rendered(messages, answer=True)
                found = self._encoding(text, add_special_tokens=False, return_offsets_mapping=True)
                users = [number for number, message in enumerate(messages) if message["role"] == "user"]
                edges, ends = self._edges(messages, users, text)
                if users and not users[0]:
                    edges[0] = self._first_edge(messages, edges)
            except (NotImplementedError, LookupError, ValueError, TypeError, TemplateError):
                return None
        token_at = {
            begin: number for number, (begin, end) in enumerate(found["offset_mapping"]) if begin < end
        }
        begins = [token_at[edge] for number, edge in sorted(edges.items()) if edge in token_at]
        if not begins or edges[users[0]] not in token_at:
            return None
        whole = len(found["input_ids"])
        closed = [token_at.get(end, whole if end == len(text) else None) for end in ends]
        return Turns(begins[0], tuple(begins), tuple(end for end in closed if end is not None))

    def _edges(
        self, messages: Sequence[Mapping[str, str]], users: Sequence[int], text: str
    ) -> tuple[dict[int, int], list[int]]:
        """Where the turns of `users` begin, and where prompts end. Raises ValueError where that cannot be told."""
        if len(users) <= EXACT_MAX or (found := self._marked_edges(messages, users, text)) is None:
            if len(users) > RENDERED_MAX:
                raise ValueError("to write each of its beginnings would take minutes")
            return self._exact_edges(messages, users, text)
        return found

    def _exact_edges(
        self, messages: Sequence[Mapping[str, str]], users: Sequence[int], text: str
    ) -> tuple[dict[int, int], list[int]]:
        """By writing the conversation up to each of them, which takes the square of their number."""
        before = {number: self._rendered(messages[:number]) for number in users if number}
        asked = [self._rendered(messages[: number + 1], answer=True) for number in users]
        if not all(map(text.startswith, before.values())):
            raise ValueError("a conversation does not begin with its beginning")
        return (
            {number: len(each) for number, each in before.items()},
            [len(each) for each in asked if text.startswith(each)],
        )

    def _marked_edges(
        self, messages: Sequence[Mapping[str, str]], users: Sequence[int], text: str
    ) -> tuple[dict[int, int], list[int]] | None:
        """By marks in front of what is said, written once. What stands between the turn's beginning and the mark is
        looked at in two turns, and has to be the same in all. None: the template does not do what this takes."""
        mark = f"\N{SECTION SIGN}{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}\N{SECTION SIGN}"
        said = [number for number, message in enumerate(messages) if message["role"] in ("user", "assistant")]
        marked: list[Mapping[str, str]] = [
            {**message, "content": mark + message["content"]}
            if message["role"] in ("user", "assistant")
            else message
            for message in messages
        ]
        parts = self._rendered(marked, answer=True).split(mark)
        if "".join(parts) != text or len(parts) != len(said) + 1:
            return None
        starts = dict(zip(said, accumulate(map(len, parts)), strict=False))
        second, last = users[1], users[-1]
        exact, ends = self._exact_edges(messages, (second, last), text)
        head = text[exact[second] : starts[second]]
        edges = {number: starts[number] - len(head) for number in users if number}
        if any(text[edge : edge + len(head)] != head for edge in edges.values()):
            return None
        if any(edges[number] != edge for number, edge in exact.items()):
            return None
        answered = [number for number in users if number + 1 in starts and number + 1 not in users]
        found = [len(text)] if last == len(messages) - 1 else []
        if answered:
            first = messages[: answered[0] + 1]
            prompt = self._rendered(first, answer=True)
            asks = prompt[len(self._rendered(first)) :]
            """What the template writes for the model to go on from."""
            if not asks:  # then whatever stands after a user's message ends a prompt
                return None
            if text.startswith(prompt):
                shift = len(prompt) - starts[answered[0] + 1]
                before = [starts[number + 1] + shift for number in answered]
                if any(text[end - len(asks) : end] != asks for end in before):
                    return None
                found = before + found
        return (edges, found) if set(ends) <= set(found) else None

    def _first_edge(self, messages: Sequence[Mapping[str, str]], edges: Mapping[int, int]) -> int:
        """Where the first message begins, if the template writes something of its own before it: what stands in front
        of a later message of the user stands in front of the first as well."""
        if not edges:
            raise ValueError("there is no later message")
        number, edge = next(iter(edges.items()))
        said = {"role": "user", "content": MARK}
        later = self._rendered([*messages[:number], said]).partition(MARK)[0][edge:]
        first = self._rendered([said]).partition(MARK)[0]
        if not first.endswith(later):
            raise ValueError("the first message is written in another way than later ones")
        return len(first) - len(later)

    def _rendered(self, messages: Sequence[Mapping[str, str]], *, answer: bool = False) -> str:
        text: str = self._encoding.apply_chat_template(
            list(messages), chat_template=self._template, add_generation_prompt=answer, tokenize=False
        )
        return text

    def encode(self, prompt: str) -> list[int]:
        """Raises ValueError for what is no text."""
        with self._lock:
            return self._tokens(prompt)

    def _tokens(self, text: str, **options: Any) -> list[int]:
        text.encode()  # half a character: UnicodeEncodeError is a ValueError
        tokens: list[int] = self._encoding(text, **options)["input_ids"]
        return tokens

    def tokenizer(self) -> HuggingFaceTokenizer:
        """One of its own, for prompts of modules."""
        copied = copy.deepcopy(self._encoding)
        if self._template:
            copied.chat_template = self._template
        return HuggingFaceTokenizer(copied)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._decoding)


class Detokenizer:
    """The text of one answer, in pieces that are whole characters: a token's text depends on those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        """Where the tokens begin that the next ones are decoded with ..."""
        self._said = 0
        """... and up to where their text was given out."""

    def add(self, token: int) -> str:
        """What can be said now; "" for half a character or a special token."""
        self._tokens.append(token)
        return self._more(final=False)

    def end(self) -> str:
        """What is left."""
        return self._more(final=True)

    def _more(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._context : self._said])
        now = self._decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not final):
            return ""
        self._context, self._said = self._said, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class StopStrings:
    """Cuts a text at the first of some strings, which may come in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """What is certainly before a stop string; nothing after one."""
        if self.hit:
            return ""
        self._held += text
        found = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            self.hit = True
            said, self._held = self._held[: min(found)], ""
            return said
        # The longest end of the text that a stop string begins with waits for what comes after it
        held = max((self._overlap(string) for string in self._strings), default=0)
        cut = len(self._held) - held
        said, self._held = self._held[:cut], self._held[cut:]
        return said

    def end(self) -> str:
        """The answer is over: what was held back is text."""
        said, self._held = self._held, ""
        return said

    def _overlap(self, string: str) -> int:
        most = min(len(string) - 1, len(self._held))
        return next((length for length in range(most, 0, -1) if self._held.endswith(string[:length])), 0)
