"""What an orchestrator asks for with a request (vLLM's `kv_hints`), and what becomes of it.

    action       asks that the chunks of its target
    prefetch     be in DRAM
    demote       leave DRAM for the SSD
    pin          stay in DRAM
    retain       stay in the store
    pause        be in DRAM again in `eta_ms`: a tool runs, somebody types (also: tool_call, typing, expect)
    cancel       be left alone again: `action_id` in its payload names an earlier action

    target (a field of the payload)          which chunks
    block_hashes, keys                       of these blocks, hexadecimal or bytes
    session_id                               those that the session's last request here used
    none                                     the request's own: prefetch looks them up anyway; all else is carried out
                                             when the request has ended, with what it has generated

`ttl_ms` or `ttl_s` says for how long, `eta_ms` or `eta_s` in how long; both are optional.

    answer     means
    accepted   in force, or told to the daemon, whose own answer follows
    clipped    a part of it is: the daemon takes no more blocks at a time, or the tenant's share is used up
    deferred   it will be: when the request's blocks are known, or chunks have come from the SSD or gone there
    rejected   it is not, and the reason says why

Nothing about it can fail a request: whatever cannot be read is rejected, with the reason.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client import ActionKind
from kvstore.types import KEY_BYTES_MAX, KEYS_PER_REQUEST_MAX, ChunkKey, HintResult

PROTOCOLS = ("0", "1")
"""Major versions that we read."""
ACTIONS_MAX = 64
"""Of one request; the others are not looked at."""
KEYS_FIELDS = ("block_hashes", "keys")
SESSION_FIELDS = ("session_id", "session")
TIME_MS_MAX = 24 * 3600 * 1000
KINDS = {
    "prefetch": ActionKind.PREFETCH,
    "demote": ActionKind.DEMOTE,
    "pin": ActionKind.PIN,
    "retain": ActionKind.RETAIN,
    **dict.fromkeys(("pause", "tool_call", "typing", "expect"), ActionKind.EXPECT),
}
REASONS = {"share": "whoever has the same namespace shares it already"}
"""Of actions that are known, and never done."""


class Answer(enum.Enum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"


DAEMON_SAID = {
    HintResult.ACCEPTED: Answer.ACCEPTED,
    HintResult.DEFERRED: Answer.DEFERRED,
    HintResult.CLIPPED: Answer.CLIPPED,
    HintResult.REJECTED: Answer.REJECTED,
}


@dataclass(frozen=True, slots=True)
class Answered:
    action: str
    """Its type and id, as far as they could be read."""
    answer: Answer
    why: str = ""
    keys: tuple[ChunkKey, ...] = ()
    """To be told to the daemon."""
    kind: ActionKind | None = None
    """What is to be told; None: nothing, or (`cancels`) that something is no longer wanted."""
    own: bool = False
    """Its keys are the request's, once that has ended."""
    ttl_ms: int = 0
    eta_ms: int = 0
    cancels: str = ""
    """The name of an earlier action."""

    @property
    def name(self) -> str:
        """What the daemon knows it by: a later action of this id replaces it, whatever its type."""
        return self.action.partition(" ")[2]


def hints_of(request: Any) -> Any:
    """A request's envelope: vLLM's own field, or `kv_transfer_params["kv_hints"]`, which `vllm serve` takes too."""
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        envelope = _get(getattr(request, "kv_transfer_params", None) or {}, "kv_hints")
    return envelope


def answer_hints(
    envelope: Any,
    groups: Sequence[int],
    chain_of: Callable[[str], Sequence[ChunkKey]] = lambda session: (),
) -> list[Answered]:
    """One for each action. `groups`: numbers of the KV cache groups; a block that is named has a chunk in each (none:
    its hash is the key). `chain_of`: what a session's last request used."""
    try:
        version = str(_get(envelope, "protocol_version") or "")
        actions = _get(envelope, "actions") or ()
        if version.lstrip("v").split(".")[0] not in PROTOCOLS:
            return [Answered("envelope", Answer.REJECTED, f"unknown protocol_version {version[:32]!r}")]
        if not isinstance(actions, (list, tuple)):
            return [Answered("envelope", Answer.REJECTED, "its actions are no list")]
        return [_answer(action, groups, chain_of) for action in actions[:ACTIONS_MAX]]
    except Exception as error:
        # It comes from outside, through somebody else's parser.
        return [Answered("envelope", Answer.REJECTED, f"cannot be read: {error!r}"[:200])]


def _answer(action: Any, groups: Sequence[int], chain_of: Callable[[str], Sequence[ChunkKey]]) -> Answered:
    what = str(_get(action, "action_type") or "").lower()[:32]
    number = str(_get(action, "action_id") or "")[:64]
    name = f"{what or 'nameless'} {number}".rstrip()
    payload = _get(action, "payload")
    if what == "cancel":
        other = str(_get(payload, "action_id") or "")[:64]
        if not other:
            return Answered(name, Answer.REJECTED, "its payload has no action_id")
        return Answered(name, Answer.ACCEPTED, f"{other} is no longer wanted", cancels=other)
    kind = KINDS.get(what)
    if kind is None:
        return Answered(name, Answer.REJECTED, REASONS.get(what, "no such action"))
    ttl_ms, eta_ms = _time_ms(payload, "ttl"), _time_ms(payload, "eta")
    if ttl_ms is None or eta_ms is None:
        return Answered(name, Answer.REJECTED, "a time is a number, from 0 to a day")
    if eta_ms and kind is not ActionKind.EXPECT:
        return Answered(name, Answer.REJECTED, "only pause, tool_call, typing and expect have an eta")

    def ordered(keys: Sequence[ChunkKey], count: str, *, clipped: bool) -> Answered:
        answer = Answer.CLIPPED if clipped else Answer.ACCEPTED
        return Answered(name, answer, count, tuple(keys), kind, ttl_ms=ttl_ms, eta_ms=eta_ms)

    named = next((found for field in KEYS_FIELDS if (found := _get(payload, field)) is not None), None)
    session = next((found for field in SESSION_FIELDS if (found := _get(payload, field)) is not None), None)
    if named is not None:
        if not isinstance(named, (list, tuple)) or not named:
            return Answered(
                name, Answer.REJECTED, f"{' or '.join(KEYS_FIELDS)} must be a list of block hashes"
            )
        hashes = [_hash(value) for value in named[: KEYS_PER_REQUEST_MAX // max(1, len(groups))]]
        if None in hashes:
            return Answered(name, Answer.REJECTED, "a block hash is hexadecimal, or bytes")
        suffixes = [group.to_bytes(4, "big") for group in groups] or [b""]
        keys = [ChunkKey(each + suffix) for each in hashes for suffix in suffixes if each is not None]
        return ordered(keys, f"{len(hashes)} of {len(named)} blocks", clipped=len(hashes) < len(named))
    if session is not None:
        chain = chain_of(session) if isinstance(session, str) else ()
        if not chain:
            return Answered(name, Answer.REJECTED, "no request of this session has ended here")
        keys = list(chain[:KEYS_PER_REQUEST_MAX])
        return ordered(keys, f"{len(keys)} of {len(chain)} chunks", clipped=len(keys) < len(chain))
    if kind is ActionKind.PREFETCH:
        return Answered(name, Answer.DEFERRED, "the request's own blocks, when they are known")
    return Answered(
        name, Answer.DEFERRED, "when the request has ended", (), kind, own=True, ttl_ms=ttl_ms, eta_ms=eta_ms
    )


def _time_ms(payload: Any, field: str) -> int | None:
    """0: not said. None: no time."""
    for name, factor in ((f"{field}_ms", 1), (f"{field}_s", 1000)):
        value = _get(payload, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return int(value * factor) if 0 <= value * factor <= TIME_MS_MAX else None
    return 0


def _hash(value: Any) -> bytes | None:
    try:
        data = bytes.fromhex(value.removeprefix("0x")) if isinstance(value, str) else bytes(memoryview(value))
    except (ValueError, TypeError):
        return None
    return data if 0 < len(data) <= KEY_BYTES_MAX - 4 else None


def _get(what: Any, field: str) -> Any:
    return what.get(field) if isinstance(what, Mapping) else getattr(what, field, None)
