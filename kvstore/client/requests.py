"""What a namespace's callers ask for, checked before it goes on the wire: bad input is refused with its name.

Every function raises BadRequest for what its caller got wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore import wire
from kvstore.answers import ActionsApplied, QueueAccepted
from kvstore.arguments import NUMBER_MAX, binary, flag, listed, one_of, shown, text, whole, wrong_type
from kvstore.errors import BadRequest, StoreError
from kvstore.keys import Tokens
from kvstore.types import (
    KEY_BYTES_MAX,
    KEYS_PER_REQUEST_MAX,
    MAKER_BYTES,
    SESSION_NAME_BYTES_MAX,
    ActionKind,
    ChunkKey,
    Hint,
    HintAction,
    NamespaceId,
    SessionEntry,
)
from kvstore.v1 import hints_pb2

JOB_NAME_BYTES_MAX = 64
QUEUE_POSITION_MAX = 1 << 31

KeysOf = Callable[[Tokens], list[ChunkKey]]
"""Makes keys of a prompt's token ids."""
PromptsOf = Callable[[Tokens], list[tuple[NamespaceId, list[ChunkKey]]]]
"""The same, for each namespace of a model."""


def _check_count(field: str, items: Sequence[Any], what: str = "of them") -> None:
    if len(items) > KEYS_PER_REQUEST_MAX:
        raise BadRequest(
            f"a request has at most {KEYS_PER_REQUEST_MAX} {what}",
            field=field,
            value=len(items),
            remedy="split the request",
        )


def _check_job(field: str, name: bytes) -> bytes:
    if not 1 <= len(binary(field, name)) <= JOB_NAME_BYTES_MAX:
        raise BadRequest(
            f"a job's name has 1 to {JOB_NAME_BYTES_MAX} bytes", field=field, value=f"{len(name)} bytes"
        )
    return name


def checked_keys(field: str, keys: Sequence[ChunkKey], *, empty: bool = False) -> Sequence[ChunkKey]:
    """The keys, in a list or tuple."""
    keys = listed(field, keys, "keys (bytes)")
    _check_count(field, keys, "keys")
    sizes = set(map(len, keys)) if set(map(type, keys)) == {bytes} else {0}
    if min(sizes) > 0 and max(sizes) <= KEY_BYTES_MAX:
        return keys
    for index, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) > KEY_BYTES_MAX or not (key or empty):
            raise BadRequest(
                f"a key is {0 if empty else 1} to {KEY_BYTES_MAX} bytes",
                field=f"{field}[{index}]",
                value=f"{len(key)} bytes" if isinstance(key, bytes) else shown(key),
            )
    return keys


def check_parent(parent: ChunkKey) -> None:
    if len(binary("parent", parent)) > KEY_BYTES_MAX:
        raise BadRequest(f"a key is 0 to {KEY_BYTES_MAX} bytes", field="parent", value=f"{len(parent)} bytes")


def check_share(field: str, value: float) -> None:
    try:
        good = 0 <= value <= 1
    except TypeError:
        raise wrong_type(field, value, "a number between 0 and 1, or None") from None
    if not good:
        raise BadRequest("must be between 0 and 1", field=field, value=value)


def check_maker(maker: bytes) -> bytes:
    if len(binary("maker", maker)) not in (0, MAKER_BYTES):
        raise BadRequest(f"has {MAKER_BYTES} bytes or none", field="maker", value=maker)
    return maker


def check_entries(append: Sequence[SessionEntry]) -> None:
    for index, entry in enumerate(listed("append", append, "SessionEntry")):
        where = f"append[{index}]"
        one_of(where, entry, SessionEntry)
        whole(f"{where}.first_token", entry.first_token)
        whole(f"{where}.token_count", entry.token_count, 1)
        whole(f"{where}.delta", entry.delta, -NUMBER_MAX)
        flag(f"{where}.approximate", entry.approximate)
    checked_keys("append", [entry.key for entry in append])


def session_name(name: str | bytes, field: str = "name") -> bytes:
    if isinstance(name, str):
        name = text(field, name).encode()
    elif not isinstance(name, bytes):
        raise wrong_type(field, name, "a str or bytes")
    if not 1 <= len(name) <= SESSION_NAME_BYTES_MAX:
        raise BadRequest(
            f"a session's name has 1 to {SESSION_NAME_BYTES_MAX} bytes",
            field=field,
            value=f"{len(name)} bytes",
        )
    return name


def queue_request(
    hints: Sequence[Hint],
    *,
    removed: Sequence[bytes],
    snapshot: bool,
    ttl_ms: int,
    number: int = 0,
    keys_of: KeysOf | None = None,
    prompts_of: PromptsOf | None = None,
) -> hints_pb2.PublishQueueRequest:
    """The message, without its namespace; with `prompts_of` it is by model. Raises BadRequest."""
    hints = listed("hints", hints, "Hint")
    removed = listed("removed", removed, "names of jobs (bytes)")
    _check_count("hints", hints)
    _check_count("removed", removed)
    return hints_pb2.PublishQueueRequest(
        hints=[_hint(f"hints[{index}]", hint, keys_of, prompts_of) for index, hint in enumerate(hints)],
        removed=[_check_job(f"removed[{index}]", job) for index, job in enumerate(removed)],
        delta=not flag("snapshot", snapshot),
        ttl_ms=whole("ttl_ms", ttl_ms),
        number=whole("number", number),
        by_model=prompts_of is not None,
    )


def _hint(where: str, hint: Hint, keys_of: KeysOf | None, prompts_of: PromptsOf | None) -> hints_pb2.Hint:
    one_of(where, hint, Hint)
    keys = _keys_named(where, hint, keys_of)
    prompts = _prompts_named(hint, prompts_of)
    if hint.namespace is not None:
        if prompts_of is None or not keys:
            raise BadRequest(
                "is of hints by model that name keys",
                field=f"{where}.namespace",
                value=hint.namespace,
                remedy="publish with Client.publish_queue, and name keys of this namespace",
            )
        prompts = [hints_pb2.Prompt(namespace_id=whole(f"{where}.namespace", hint.namespace), keys=keys)]
        keys = ()
    session = hint.session
    return hints_pb2.Hint(
        job=_check_job(f"{where}.job", hint.job),
        position=whole(f"{where}.position", hint.position, 0, QUEUE_POSITION_MAX),
        session=session_name(session, f"{where}.session")
        if session or not isinstance(session, bytes)
        else b"",
        keys=keys,
        prompts=prompts,
    )


def _keys_named(where: str, named: Hint | HintAction, keys_of: KeysOf | None) -> Sequence[ChunkKey]:
    """By keys, else by the beginning of a prompt: behind so many chunks nobody needs a hint."""
    keys = checked_keys(f"{where}.keys", named.keys)
    if keys or keys_of is None or not len(named.tokens):
        return keys
    return keys_of(named.tokens)[:KEYS_PER_REQUEST_MAX]


def _prompts_named(named: Hint | HintAction, prompts_of: PromptsOf | None) -> list[hints_pb2.Prompt]:
    """The same, for each namespace of a model."""
    if named.keys or prompts_of is None or not len(named.tokens):
        return []
    return [
        hints_pb2.Prompt(namespace_id=number, keys=keys[:KEYS_PER_REQUEST_MAX])
        for number, keys in prompts_of(named.tokens)
    ]


def actions_request(
    actions: Sequence[HintAction],
    *,
    cancelled: Sequence[bytes],
    keys_of: KeysOf | None = None,
    prompts_of: PromptsOf | None = None,
) -> hints_pb2.ApplyActionsRequest:
    """The message, without its namespace; with `prompts_of` it is by model. Raises BadRequest."""
    actions = listed("actions", actions, "HintAction")
    cancelled = listed("cancelled", cancelled, "names of actions (bytes)")
    return hints_pb2.ApplyActionsRequest(
        actions=[
            _action(f"actions[{index}]", action, keys_of, prompts_of) for index, action in enumerate(actions)
        ],
        cancelled=[_check_job(f"cancelled[{index}]", name) for index, name in enumerate(cancelled)],
        by_model=prompts_of is not None,
    )


def _action(
    where: str, action: HintAction, keys_of: KeysOf | None, prompts_of: PromptsOf | None
) -> hints_pb2.HintAction:
    one_of(where, action, HintAction)
    one_of(f"{where}.kind", action.kind, ActionKind)
    return hints_pb2.HintAction(
        name=_check_job(f"{where}.name", action.name),
        kind=f"ACTION_KIND_{action.kind.name}",
        session=session_name(action.session, f"{where}.session") if action.session else b"",
        keys=_keys_named(where, action, keys_of),
        ttl_ms=whole(f"{where}.ttl_ms", action.ttl_ms),
        eta_ms=whole(f"{where}.eta_ms", action.eta_ms),
        prompts=_prompts_named(action, prompts_of),
    )


def actions_applied(reply: hints_pb2.ActionsReply, actions: int) -> ActionsApplied:
    applied = wire.actions_from_proto(reply)
    if not len(applied.results) == len(applied.chunks) == actions:
        raise StoreError(
            "the daemon answered for another number of actions", field="results", value=len(applied.results)
        )
    return applied


def queue_accepted(reply: hints_pb2.QueueReply, hints: int) -> QueueAccepted:
    accepted = wire.queue_from_proto(reply)
    if len(accepted.results) != hints:
        raise StoreError(
            "the daemon answered for another number of hints", field="results", value=len(accepted.results)
        )
    return accepted
