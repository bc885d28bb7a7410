"""What Prompt Cache needs of a model's tokenizer, and two that bring it: of Hugging Face, and one for trying out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvstore.errors import BadRequest, Unsupported

Message = tuple[str, str]
"""(role, content)"""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateRefused(Exception):
    """A chat template does not take this conversation; the text says why."""


class Tokenizer(Protocol):
    @property
    def placeholder(self) -> int:
        """The token that stands where an argument may come (the paper's <unk>)."""

    @property
    def start(self) -> tuple[int, ...]:
        """What the model expects before a text without a chat template, as <s>."""

    def encode(self, text: str, *, template: bool = False) -> Sequence[int]:
        """Tokens of `text` and nothing around them. `template`: it is of the chat template, and the names of special
        tokens in it are those tokens; in the text of users they are text."""

    def apply_template(self, messages: Sequence[Message], *, reply: bool) -> str:
        """The conversation as the model's own chat template writes it, up to where the assistant replies with `reply`.
        Raises TemplateRefused."""


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`, wrapped."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        candidates = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.placeholder: int = next(number for number in candidates if number is not None)
        begins = list(tokenizer.encode("", add_special_tokens=True))
        self.start: tuple[int, ...] = tuple(begins[:1]) if begins[:1] == [tokenizer.bos_token_id] else ()

    def encode(self, text: str, *, template: bool = False) -> Sequence[int]:
        tokens: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not template
        )
        return tokens

    def apply_template(self, messages: Sequence[Message], *, reply: bool) -> str:
        named = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(named, tokenize=False, add_generation_prompt=reply)
            )
        except Exception as problem:  # a template raises what it likes
            raise TemplateRefused(f"{type(problem).__name__}: {problem}") from None


class FileTokenizer:
    """The files tokenizer.json, tokenizer_config.json and chat_template.jinja of a Hugging Face model, read with the
    packages `tokenizers` and `jinja2` alone."""

    def __init__(self, folder: Path) -> None:
        """Raises BadRequest: no such files; Unsupported: a package is missing."""
        if not (
            folder / "tokenizer.json"
        ).exists():  # a misspelt folder, told before a package that it does not need
            raise BadRequest(
                "has no tokenizer.json",
                field="--tokenizer",
                value=str(folder),
                remedy="name a folder with tokenizer.json and tokenizer_config.json, or the tokenizer `bytes`",
            )
        try:
            from jinja2 import StrictUndefined, TemplateError, Undefined  # noqa: F401
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer as Fast
        except ImportError as problem:
            raise Unsupported(
                f"reading a tokenizer needs a package: {problem.name}",
                field="--tokenizer",
                value=str(folder),
                remedy="pip install tokenizers jinja2, or use the tokenizer `bytes`",
            ) from None
        try:
            self._fast = Fast.from_file(str(folder / "tokenizer.json"))
            config_path = folder / "tokenizer_config.json"
            config = json.loads(config_path.read_text()) if config_path.exists() else {}
            jinja = folder / "chat_template.jinja"
            template = jinja.read_text() if jinja.exists() else config.get("chat_template")
        except Exception as problem:  # tokenizers raises Exception itself
            raise BadRequest(
                f"cannot be read: {problem}",
                field="--tokenizer",
                value=str(folder),
                remedy="name a folder with tokenizer.json and tokenizer_config.json",
            ) from None
        if isinstance(template, list):
            template = next((one["template"] for one in template if one.get("name") == "default"), None)
        self._special = {
            name: _content(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name)
        }
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template) if template else None
        numbers = (
            self._fast.token_to_id(self._special[name])
            for name in ("unk_token", "pad_token", "eos_token")
            if name in self._special
        )
        self.placeholder: int = next((number for number in numbers if number is not None), 0)
        begins = self._fast.encode("").ids[:1]
        bos = self._fast.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None
        self.start: tuple[int, ...] = tuple(begins) if begins == [bos] else ()

    def encode(self, text: str, *, template: bool = False) -> Sequence[int]:
        self._fast.encode_special_tokens = not template
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def apply_template(self, messages: Sequence[Message], *, reply: bool) -> str:
        if self._template is None:
            raise TemplateRefused("the tokenizer has no chat template")
        named = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=named, add_generation_prompt=reply, **self._special)
        except Exception as problem:  # a template raises what it likes
            raise TemplateRefused(f"{type(problem).__name__}: {problem}") from None


def _content(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _refuse(message: str) -> None:
    raise TemplateRefused(message)


class ByteTokenizer:
    """A token for each byte of UTF-8, 256 for <unk>, and ChatML, whose marks are one token each: to look at schemas
    without a model's files."""

    SPECIAL = ("<|im_start|>", "<|im_end|>")
    placeholder = 256
    start: tuple[int, ...] = ()

    def encode(self, text: str, *, template: bool = False) -> Sequence[int]:
        if not template:
            return list(text.encode())
        tokens: list[int] = []
        rest = text
        while rest:
            found = [
                (rest.find(mark), number) for number, mark in enumerate(self.SPECIAL, 257) if mark in rest
            ]
            at, number = min(found, default=(len(rest), 0))
            tokens += rest[:at].encode()
            if number:
                tokens.append(number)
                at += len(self.SPECIAL[number - 257])
            rest = rest[at:]
        return tokens

    def apply_template(self, messages: Sequence[Message], *, reply: bool) -> str:
        parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
        return "".join([*parts, "<|im_start|>assistant\n" if reply else ""])


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the folder of a Hugging Face model. Raises BadRequest, Unsupported."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))
