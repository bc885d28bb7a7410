"""A tokenizer whose tokens one can count by eye: one for each word, one for each mark of its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvstore.promptcache.tokenizer import TemplateRefused


class Words:
    """A word is what stands between blanks. `style`: what the chat template looks like."""

    MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<|im_start|>", "<|im_end|>")
    placeholder = 0

    def __init__(self, style: str = "", start: Sequence[int] = ()) -> None:
        self.style = style
        self.start = tuple(start)
        self.words: list[str] = ["<unk>"]

    def encode(self, text: str, *, template: bool = False) -> list[int]:
        if template:
            text = re.sub("|".join(map(re.escape, self.MARKS)), r" \g<0> ", text)
        return [self._number(word) for word in text.split()]

    def _number(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def apply_template(self, messages: Sequence[tuple[str, str]], *, reply: bool) -> str:
        if self.style == "chatml":
            parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
            return "".join([*parts, "<|im_start|>assistant\n" if reply else ""])
        if self.style == "llama2":
            return self._llama2(list(messages))
        raise TemplateRefused("there is none")

    @staticmethod
    def _llama2(messages: list[tuple[str, str]]) -> str:
        """A turn is `<s>[INST] user [/INST] assistant </s>`; the system's message is part of the first user's."""
        system = ""
        if messages[0][0] == "system":
            system = f"<<SYS>>\n{messages.pop(0)[1]}\n<</SYS>>\n\n"
        if not messages:
            raise TemplateRefused("the system's message needs a user's")
        parts = []
        for number, (role, content) in enumerate(messages):
            if role != ("assistant" if number % 2 else "user"):
                raise TemplateRefused("roles must alternate user/assistant/user/assistant/...")
            parts.append(f"<s>[INST] {system}{content} [/INST]" if role == "user" else f" {content} </s>")
            system = ""
        return "".join(parts)
