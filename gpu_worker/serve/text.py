"""Between text and tokens: a conversation as the model was taught to read it, and tokens as text, piece by piece."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.promptcache import HuggingFaceTokenizer

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

    @property
    def chats(self) -> bool:
        """Whether there is a template for chats."""
        return bool(self._template or getattr(self._encoding, "chat_template", None))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins. Raises ValueError for what the template
        refuses."""
        with self._lock:
            try:
                text = self._encoding.apply_chat_template(
                    list(messages),
                    chat_template=self._template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except (
                Exception
            ) as error:  # a template is a program: whatever it raises, it does not take these messages
                raise ValueError(f"the chat template does not take these messages: {error}") from error
            return self._tokens(text, add_special_tokens=False)

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
