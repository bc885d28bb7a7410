"""Touches and hint actions over the wire, with the client library, and what an operator sees of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import kvctl
from kvstore.client import ActionKind, Client, Hint, HintAction, Namespace, SessionEntry, connect_async
from kvstore.errors import BadRequest, NotFound
from kvstore.types import HintResult
from kvstore.v1 import hints_pb2, hints_pb2_grpc, store_pb2, store_pb2_grpc

from .ssd_tools import SMALL_SSD, SPEC, client_of, demote, eventually, explained, keys_of, save

ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult


@pytest.fixture
def client(start_daemon: Callable[..., Any], run_dir: Path) -> Iterator[Client]:
    with contextlib.closing(
        client_of(start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}))
    ) as client:
        yield client


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def in_dram(space: Namespace, keys: list[Any]) -> bool:
    return space.match(keys).outcomes.count(0) == len(keys)


def test_a_touch_renews_ages_and_nobody_waits_for_it(space: Namespace) -> None:
    keys = keys_of(space, 3)
    save(space, keys)
    assert space.touch(keys)
    eventually(lambda: [chunk.hits for chunk in explained(space, keys)] == [1, 1, 1])
    with pytest.raises(BadRequest, match="keys"):
        space.touch("keys")  # type: ignore[arg-type]
    space.client.close()
    assert not space.touch(keys)


def test_orders_by_keys_by_session_and_by_tokens(space: Namespace) -> None:
    tokens = list(range(3 * SPEC.chunk_tokens))
    keys = space.keys(tokens)
    save(space, keys)
    entries = [SessionEntry(key, SPEC.chunk_tokens * n, SPEC.chunk_tokens) for n, key in enumerate(keys)]
    space.update_session("chat", expected_version=0, keep=0, append=entries)
    applied = space.apply_actions(
        [
            HintAction(b"1", ActionKind.PIN, keys=tuple(keys), ttl_ms=60_000),
            HintAction(b"2", ActionKind.RETAIN, session=b"chat"),
            HintAction(b"3", ActionKind.EXPECT, tokens=tuple(tokens), eta_ms=40_000),
            HintAction(b"4", ActionKind.RETAIN, session=b"nobody"),
        ]
    )
    assert applied.results == (ACCEPTED, ACCEPTED, ACCEPTED, REJECTED)
    assert applied.chunks == (3, 3, 3, 0)
    kinds = [[hint.kind for hint in chunk.hints] for chunk in explained(space, keys)]
    assert kinds == [[ActionKind.PIN, ActionKind.RETAIN, ActionKind.EXPECT]] * 3
    space.apply_actions([], cancelled=[b"1", b"3", b"unknown"])
    assert [[hint.kind for hint in chunk.hints] for chunk in explained(space, keys)] == [
        [ActionKind.RETAIN]
    ] * 3
    stats = space.client.stats()
    assert (stats.gauges["hint_pins"], stats.counters["hint_actions_rejected"]) == (0, 1)


def test_a_scheduler_that_knows_a_model_and_prompts_alone(space: Namespace, client: Client) -> None:
    tokens = list(range(4 * SPEC.chunk_tokens))
    keys = space.keys(tokens)
    save(space, keys)
    demote(space, keys, filler=1)
    assert client.only_model() == SPEC.model
    assert client.prompt_keys(SPEC.model, tokens) == keys
    answer = client.publish_queue(SPEC.model, [Hint(b"job", 0, tokens=tuple(tokens))])
    assert answer.results == (ACCEPTED,)
    eventually(lambda: in_dram(space, keys))
    client.publish_queue(SPEC.model, [])
    eventually(
        lambda: not any(chunk.needed for chunk in explained(space, keys))
    )  # the job may have been taken
    demoting = HintAction(b"d", ActionKind.DEMOTE, keys=tuple(keys))
    assert client.apply_actions(SPEC.model, [demoting]).results[0] in (ACCEPTED, DEFERRED)
    eventually(lambda: not in_dram(space, keys))
    with pytest.raises(NotFound, match="no worker has opened it"):
        client.apply_actions("another", [])


async def test_awaited(start_daemon: Callable[..., Any]) -> None:
    daemon = await asyncio.to_thread(start_daemon)
    async with await connect_async(str(daemon.run_dir)) as client:
        space = await client.open(SPEC)
        tokens = list(range(SPEC.chunk_tokens))
        keys = space.keys(tokens)
        assert await client.only_model() == SPEC.model
        assert await client.prompt_keys(SPEC.model, tokens) == keys
        order = HintAction(b"1", ActionKind.EXPECT, keys=tuple(keys))
        assert (await space.apply_actions([order])).results == (DEFERRED,)
        assert (await client.apply_actions(SPEC.model, [order])).chunks == (0,)
        assert space.touch(keys)


def test_kvctl_shows_what_hints_want(
    space: Namespace, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of(space, 2)
    save(space, keys)
    entries = [SessionEntry(key, 64 * n, 64) for n, key in enumerate(keys)]
    space.update_session("agent", expected_version=0, keep=0, append=entries)
    space.apply_actions(
        [
            HintAction(b"1", ActionKind.EXPECT, session=b"agent", eta_ms=40_000),
            HintAction(b"2", ActionKind.PIN, keys=tuple(keys[:1]), ttl_ms=60_000),
        ]
    )
    where = ["--run-dir", str(run_dir)]
    assert kvctl._run([*where, "sessions"]) == 0
    assert "expected in " in capsys.readouterr().out
    assert kvctl._run([*where, "explain", "agent"]) == 0
    shown = capsys.readouterr().out
    assert "expected in " in shown and "pinned for " in shown
    assert kvctl._run([*where, "sessions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["hints"]


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ({"kind": 1, "keys": [b"k"]}, "actions[0].name"),
        ({"name": b"n" * 65, "keys": [b"k"]}, "actions[0].name"),
        ({"name": b"n"}, "actions[0].keys"),
        ({"name": b"n", "keys": [b"k" * 65]}, "actions[0].keys[0]"),
        ({"name": b"n", "keys": [b"k"], "kind": 9}, "actions[0].kind"),
        ({"name": b"n", "keys": [b"k"], "kind": 2, "eta_ms": 1}, "actions[0].eta_ms"),
        ({"name": b"n", "keys": [b"k"], "ttl_ms": 1 << 60}, "actions[0].ttl_ms"),
        ({"name": b"n", "session": b"s" * 300}, "actions[0].session"),
    ],
)
def test_what_is_wrong_is_named(space: Namespace, action: dict[str, Any], field: str) -> None:
    request = hints_pb2.ApplyActionsRequest(namespace_id=1)
    request.actions.add(**action)
    with pytest.raises(BadRequest) as refused:
        space.client.unary(hints_pb2_grpc.HintsStub, "ApplyActions", request)
    assert refused.value.field == field


def test_a_request_is_bounded(space: Namespace) -> None:
    many = hints_pb2.ApplyActionsRequest(namespace_id=1)
    many.actions.extend(hints_pb2.HintAction(name=b"%d" % n, keys=[b"k"]) for n in range(257))
    with pytest.raises(BadRequest, match="at most 256"):
        space.client.unary(hints_pb2_grpc.HintsStub, "ApplyActions", many)
    none = store_pb2.TouchRequest(namespace_id=1)
    with pytest.raises(BadRequest, match="at least one key"):
        space.client.unary(store_pb2_grpc.StoreStub, "Touch", none)
