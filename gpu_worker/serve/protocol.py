"""What clients may ask in OpenAI's words, and what they are told. Fields that we do not know are ignored, as other
servers do; fields that ask for what we do not do are refused by name."""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.gpu_worker.request import is_session_name
from kvstore.gpu_worker.sampling import Sampling

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 512
NEUTRAL: tuple[tuple[str, object], ...] = (
    *(("n", 1), ("best_of", 1), ("logprobs", False), ("top_logprobs", 0), ("echo", False), ("suffix", "")),
    *(("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("min_p", 0)),
    *(("min_tokens", 0), ("use_beam_search", False)),
)
"""Fields that are not served, of OpenAI's interface and of vLLM's, each with the value that asks for nothing."""
NOT_SERVED = (
    *("tools", "functions", "logit_bias", "prompt_logprobs", "audio", "stop_token_ids", "bad_words"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
ROLES = ("system", "developer", "user", "assistant", "tool")
_SEEDS = 1 << 63


class Refused(Exception):
    """An answer with an HTTP status; `param` names the field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


@dataclass(frozen=True, slots=True)
class Wish:
    """A checked request, but for its prompt."""

    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    session: str
    cache_salt: str
    ignore_eos: bool
    return_token_ids: bool
    cut: bool
    """Whether a prompt that is too long may be cut (`truncation` of OpenAI's responses)."""


def shown(value: object) -> str:
    """In a message: what a client sent may be long, or deep enough to overflow the stack of whoever spells it out."""
    return reprlib.repr(value)


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raises Refused for another model than the one that is `served`: its answer would be taken for the other's."""
    model = body.get("model")
    if model not in (None, "", served):
        raise Refused(
            404 if isinstance(model, str) else 400,
            f"model is {shown(model)}: this worker serves {shown(served)} (--name calls it otherwise)",
            param="model",
        )


def wish_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> Wish:
    """Raises Refused (400), naming the field."""
    for name, neutral in NEUTRAL:
        if (value := body.get(name)) not in (None, neutral):
            raise Refused(400, f"{name} is {shown(value)}: only {neutral!r} is served", param=name)
    for name in NOT_SERVED:
        if body.get(name):
            raise Refused(400, f"{name} is not served", param=name)
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise Refused(400, "only plain text is served", param="response_format")
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise Refused(400, "truncation is auto or disabled", param="truncation")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > STOP_STRINGS_MAX:
        raise Refused(400, f"stop is a text, or up to {STOP_STRINGS_MAX} of them", param="stop")
    if not all(isinstance(each, str) and 0 < len(each) <= STOP_STRING_CHARACTERS_MAX for each in stop):
        raise Refused(400, f"a stop string has 1 to {STOP_STRING_CHARACTERS_MAX} characters", param="stop")
    limits = [_whole(body, name, least=1) for name in ("max_completion_tokens", "max_tokens")]
    return Wish(
        max_tokens=next((limit for limit in limits if limit is not None), None),
        sampling=_sampling(body),
        stop=tuple(stop),
        stream=_flag(body, "stream"),
        include_usage=_flag(_object(body, "stream_options"), "include_usage"),
        session=_session(body, headers),
        cache_salt=_text(body, "cache_salt"),
        ignore_eos=_flag(body, "ignore_eos"),
        return_token_ids=_flag(body, "return_token_ids"),
        cut=body.get("truncation") != "disabled",
    )


def messages_of(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Raises Refused (400)."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages is a list of at least one message", param="messages")
    return [_message(number, message) for number, message in enumerate(messages)]


def prompt_of(body: Mapping[str, Any]) -> str | list[int]:
    """Raises Refused (400)."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise Refused(
        400,
        f"prompt is {shown(prompt)}: must be a text or a list of token ids, not empty, one a request",
        param="prompt",
    )


def _message(number: int, message: object) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(400, f"a message has a role: one of {', '.join(ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise Refused(400, "only parts of type text are served", param=f"{where}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(400, "a message has a content: text", param=f"{where}.content")
    return {"role": message["role"], "content": content}


def _sampling(body: Mapping[str, Any]) -> Sampling:
    seed = _whole(body, "seed", least=None)
    values = {
        "temperature": number_of(body, "temperature", 1.0),
        "top_p": number_of(body, "top_p", 1.0),
        "top_k": _whole(body, "top_k", least=-1) or 0,
        "seed": secrets.randbits(62) if seed is None else seed % _SEEDS,
    }
    values["top_k"] = max(values["top_k"], 0)  # -1: all, as vLLM has it
    try:
        return Sampling(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise Refused(400, str(error), param=str(error).split()[0]) from None


def _session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    session = _text(body, "session_id") or headers.get("x-session-id", "")
    if session and not is_session_name(session):
        raise Refused(400, "a session's name has 1 to 256 bytes", param="session_id")
    return session


def number_of(body: Mapping[str, Any], name: str, default: float) -> float:
    """Raises Refused (400) for what is no finite number."""
    value = body.get(name)
    if value is None:
        return default
    try:
        finite = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float comes near
        finite = False
    if not finite:
        raise Refused(400, f"{name} is {shown(value)}: must be a number", param=name)
    return float(value)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise Refused(400, f"{name} is {shown(value)}: must be an object", param=name)
    return value or {}


def _whole(body: Mapping[str, Any], name: str, *, least: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or (least is not None and value < least):
        raise Refused(
            400,
            f"{name} is {shown(value)}: must be a whole number"
            + (f" from {least} on" if least is not None else ""),
            param=name,
        )
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} is {shown(value)}: must be true or false", param=name)
    return bool(value)


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(400, f"{name} is {shown(value)}: must be text", param=name)
    return value or ""
