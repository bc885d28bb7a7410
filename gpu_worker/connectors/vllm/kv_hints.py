"""What an orchestrator asks for with a request (vLLM's `kv_hints`), and what becomes of it.

    action     answer
    prefetch   accepted   its blocks are named: the daemon is told that they will be needed
               clipped    more than the daemon takes at a time: the first of them
               deferred   none is named: the request's own are looked up when vLLM knows them
    share      rejected   whoever has the same namespace shares it
    demote, pin, retain   rejected: what stays where follows from the queue, the daemon has no such order
    anything else, or a protocol that we do not know: rejected

Nothing about it can fail a request: whatever cannot be read is rejected, with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.types import KEY_BYTES_MAX, KEYS_PER_REQUEST_MAX, ChunkKey

PROTOCOLS = ("0", "1")
"""Major versions that we read."""
ACTIONS_MAX = 64
"""Of one request; the others are not looked at."""
KEYS_FIELDS = ("block_hashes", "keys")
REASONS = {
    "share": "whoever has the same namespace shares it already",
    "demote": "the store decides what stays where, by the queue",
    "pin": "the store has no pins without an end; a lease or the queue keeps chunks",
    "retain": "the store has no such promise; the queue keeps chunks",
}


class Answer(enum.Enum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Answered:
    action: str
    """Its id and type, as far as they could be read."""
    answer: Answer
    why: str = ""
    keys: tuple[ChunkKey, ...] = ()
    """To be told to the daemon."""


def answer_hints(envelope: Any, groups: Sequence[int]) -> list[Answered]:
    """One for each action. `groups`: numbers of the KV cache groups; a block that is named has a chunk in each."""
    try:
        version = str(_get(envelope, "protocol_version") or "")
        actions = _get(envelope, "actions") or ()
        if version.lstrip("v").split(".")[0] not in PROTOCOLS:
            return [Answered("envelope", Answer.REJECTED, f"unknown protocol_version {version[:32]!r}")]
        if not isinstance(actions, (list, tuple)):
            return [Answered("envelope", Answer.REJECTED, "its actions are no list")]
        return [_answer(action, groups) for action in actions[:ACTIONS_MAX]]
    except Exception as error:
        # It comes from outside, through somebody else's parser.
        return [Answered("envelope", Answer.REJECTED, f"cannot be read: {error!r}"[:200])]


def _answer(action: Any, groups: Sequence[int]) -> Answered:
    kind = str(_get(action, "action_type") or "").lower()[:32]
    name = f"{kind or 'nameless'} {str(_get(action, 'action_id') or '')[:64]}".rstrip()
    if kind in REASONS:
        return Answered(name, Answer.REJECTED, REASONS[kind])
    if kind != "prefetch":
        return Answered(name, Answer.REJECTED, "no such action")
    payload = _get(action, "payload")
    named = next((found for field in KEYS_FIELDS if (found := _get(payload, field)) is not None), None)
    if named is None:
        return Answered(name, Answer.DEFERRED, "the request's own blocks, when they are known")
    if not isinstance(named, (list, tuple)) or not named:
        return Answered(name, Answer.REJECTED, f"{' or '.join(KEYS_FIELDS)} must be a list of block hashes")
    hashes = [_hash(value) for value in named[: KEYS_PER_REQUEST_MAX // max(1, len(groups))]]
    if None in hashes:
        return Answered(name, Answer.REJECTED, "a block hash is hexadecimal, or bytes")
    keys = tuple(
        ChunkKey(block_hash + group.to_bytes(4, "big"))
        for block_hash in hashes
        for group in groups
        if block_hash is not None
    )
    answer = Answer.ACCEPTED if len(hashes) == len(named) else Answer.CLIPPED
    return Answered(name, answer, f"{len(hashes)} of {len(named)} blocks", keys)


def _hash(value: Any) -> bytes | None:
    try:
        data = bytes.fromhex(value.removeprefix("0x")) if isinstance(value, str) else bytes(memoryview(value))
    except (ValueError, TypeError):
        return None
    return data if 0 < len(data) <= KEY_BYTES_MAX - 4 else None


def _get(what: Any, field: str) -> Any:
    return what.get(field) if isinstance(what, Mapping) else getattr(what, field, None)
