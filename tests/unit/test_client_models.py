"""What the client knows of a model's namespaces, with a daemon that writes down what it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import wire
from kvstore.client import ActionKind, Hint, HintAction
from kvstore.client.models import Models
from kvstore.client.requests import queue_request
from kvstore.client.sync import Client
from kvstore.errors import BadRequest, NotFound, Unsupported
from kvstore.keys import exact_chain
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import HintResult
from kvstore.v1 import fleet_pb2, hints_pb2, stats_pb2

TOKENS = tuple(range(8))


class Daemon:
    """All of a client that `Client`'s calls by model use."""

    def __init__(self) -> None:
        self.boot_id, self.tenant = b"first", "alice"
        self.rows: list[stats_pb2.NamespaceStats] = []
        self.sessions: dict[bytes, int] = {}
        self.asked: list[str] = []
        self.heard: list[Any] = []
        self._models = Models(self)

    def opened(
        self, number: int, chunk_tokens: int = 4, *, tenant: str = "alice", protocol: str = "kvs.exact.v1"
    ) -> None:
        groups = (GroupSpec("kv", 64),)
        spec = NamespaceSpec("m", b"w", "layout", chunk_tokens, groups, hash_protocol=protocol)
        row = stats_pb2.NamespaceStats(
            namespace_id=number,
            tenant=tenant,
            model="m",
            spec=wire.spec_to_proto(spec),
            salt=bytes([number]) * 32 if tenant == self.tenant else b"",
            chunk_tokens=chunk_tokens,
            opened=1 + max((each.opened for each in self.rows), default=0),
        )
        self.rows = [each for each in self.rows if each.namespace_id != number] + [row]

    def unary(self, stub: Any, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        self.asked.append(method)
        if method == "ListNamespaces":
            return stats_pb2.ListNamespacesReply(namespaces=self.rows)
        if request.namespace_id not in {row.namespace_id for row in self.rows}:
            raise NotFound("no such namespace of this tenant", field="namespace_id")
        if method == "Route":
            if self.sessions.get(request.session, request.namespace_id) != request.namespace_id:
                raise NotFound("no such session", field="session")
            held = request.namespace_id * bool(request.keys)  # the later it was made, the more it has
            return fleet_pb2.RouteReply(nodes=[{"prefix_chunks": held}], keys=request.namespace_id)
        self.heard.append(request)
        numbers = [row.namespace_id for row in self.rows]
        if method == "PublishQueue":
            return hints_pb2.QueueReply(results=bytes(len(request.hints)), namespaces=numbers)
        count = len(request.actions)
        return hints_pb2.ActionsReply(results=bytes(count), chunks=[1] * count, namespaces=numbers)

    def _of_model(self, *args: Any) -> Any:
        return Client._of_model(self, *args)  # type: ignore[arg-type]

    def prompts(self, *args: Any, **named: Any) -> Any:
        return Client.prompts(self, *args, **named)  # type: ignore[arg-type]

    def publish(self, *hints: Hint, **named: Any) -> Any:
        return Client.publish_queue(self, "m", hints, **named)  # type: ignore[arg-type]

    def route(self, **named: Any) -> fleet_pb2.RouteReply:
        return Client.route(self, "m", **named)  # type: ignore[arg-type]


def prompts(message: Any) -> dict[int, int]:
    """Namespaces, and how many keys are named there."""
    return {prompt.namespace_id: len(prompt.keys) for prompt in message.hints[0].prompts}


@pytest.fixture
def daemon() -> Daemon:
    daemon = Daemon()
    daemon.opened(2)
    daemon.opened(3, 2)
    return daemon


def test_hints_are_by_model_and_namespaces_are_asked_for_once(daemon: Daemon) -> None:
    for _ in range(3):
        answer = daemon.publish(Hint(b"job", 0, session=b"a"))
        assert answer.results == (HintResult.ACCEPTED,) and answer.namespaces == (2, 3)
    assert daemon.asked.count("ListNamespaces") == 1
    assert {(message.namespace_id, message.by_model) for message in daemon.heard} == {(2, True)}


def test_of_tokens_each_namespace_has_keys_of_its_own(daemon: Daemon) -> None:
    daemon.opened(4, protocol="my-keys.v1")
    daemon.publish(Hint(b"job", 0, tokens=TOKENS))
    assert prompts(daemon.heard[-1]) == {2: 2, 3: 4}, "the hashes of the third are not known here"
    assert list(daemon.heard[-1].hints[0].prompts[1].keys) == exact_chain(bytes([2]) * 32, TOKENS, 4)
    action = HintAction(b"name", ActionKind.PIN, tokens=TOKENS)
    Client.apply_actions(daemon, "m", [action])  # type: ignore[arg-type]
    assert [prompt.namespace_id for prompt in daemon.heard[-1].actions[0].prompts] == [3, 2]
    assert Client.prompt_keys(daemon, "m", TOKENS) == exact_chain(bytes([3]) * 32, TOKENS, 2)  # type: ignore[arg-type]
    daemon.opened(2)  # a rollback: it is opened again
    daemon._models.forget()
    assert Client.prompt_keys(daemon, "m", TOKENS) == exact_chain(bytes([2]) * 32, TOKENS, 4)  # type: ignore[arg-type]
    daemon.rows = daemon.rows[1:2]
    daemon._models.forget()
    assert [row.namespace_id for row in daemon.rows] == [4]
    with pytest.raises(Unsupported, match="hash_protocol"):
        daemon.publish(Hint(b"job", 0, tokens=TOKENS))


def test_a_hint_names_keys_of_one_namespace(daemon: Daemon) -> None:
    made = Client.prompts(daemon, "m", TOKENS)  # type: ignore[arg-type]
    assert [(number, len(keys)) for number, keys in made] == [(3, 4), (2, 2)]
    (_, _), (number, keys) = made
    hint = Hint(b"job", 0, keys=tuple(keys), namespace=number)
    daemon.publish(hint)
    assert prompts(daemon.heard[-1]) == {2: 2}
    assert not daemon.heard[-1].hints[0].keys, "they are nobody else's"
    with pytest.raises(BadRequest, match=r"hints\[0\]\.namespace"):
        daemon.publish(Hint(b"job", 0, session=b"a", namespace=number))
    with pytest.raises(BadRequest, match=r"hints\[0\]\.namespace"):
        queue_request([hint], removed=(), snapshot=True, ttl_ms=0)


def test_what_is_opened_later_is_noticed_with_the_next_answer(daemon: Daemon) -> None:
    daemon.publish(Hint(b"job", 0, tokens=TOKENS))
    daemon.opened(5, 8)
    daemon.publish(Hint(b"job", 0, tokens=TOKENS))
    assert [prompts(message) for message in daemon.heard[1:]] == [{2: 2, 3: 4}, {2: 2, 3: 4, 5: 1}]
    daemon.opened(6, 8)
    answer = daemon.publish(Hint(b"job", 0, tokens=TOKENS), number=7, snapshot=False)
    assert answer.snapshot_wanted, "under the number that was taken it would not be heard again"
    daemon.publish(Hint(b"job", 0, tokens=TOKENS), number=8)
    assert len(prompts(daemon.heard[-1])) == 4
    daemon.opened(7, 8)
    heard = len(daemon.heard)
    assert not daemon.publish(Hint(b"job", 0, session=b"a"), number=9).snapshot_wanted
    assert len(daemon.heard) == heard + 1, "sessions are looked for by the daemon"


def test_a_daemon_that_was_started_anew_has_other_namespaces(daemon: Daemon) -> None:
    daemon.publish(Hint(b"job", 0, session=b"a"))
    daemon.boot_id, daemon.rows = b"second", []
    daemon.opened(2, tenant="alice")
    daemon.rows[0].model = "another"  # under the same number
    daemon.opened(9)
    daemon.publish(Hint(b"job", 0, session=b"a"))
    assert daemon.heard[-1].namespace_id == 9
    daemon.rows = []
    daemon.opened(10)
    daemon.publish(Hint(b"job", 0, session=b"a"))
    assert daemon.heard[-1].namespace_id == 10, "it was dropped, and not found"


def test_an_admin_s_hints_are_for_one_tenant() -> None:
    daemon = Daemon()
    daemon.opened(1, tenant="bob")
    daemon.opened(2, tenant="carol")
    daemon.publish(Hint(b"job", 0, session=b"a"))
    assert daemon.heard[-1].namespace_id == 2, "nobody of ours has it: whoever opened it last"
    with pytest.raises(Unsupported):
        daemon.publish(Hint(b"job", 0, tokens=TOKENS))
    daemon.opened(3)
    daemon.opened(4, tenant="carol")
    daemon._models.forget()
    daemon.publish(Hint(b"job", 0, session=b"a"))
    assert daemon.heard[-1].namespace_id == 3


def test_a_route_is_that_of_the_namespace_that_has_most(daemon: Daemon) -> None:
    daemon.sessions[b"chat"] = 2
    assert daemon.route(session=b"chat").keys == 2
    assert daemon.route(keys=exact_chain(bytes(32), TOKENS, 4)).keys == 2, "2 chunks of 4 tokens, 3 of 2"
    assert daemon.route(tokens=TOKENS).keys == 2
    daemon.opened(4, protocol="my-keys.v1")
    daemon._models.forget()
    assert daemon.route(tokens=TOKENS).keys == 2
    assert not daemon.route(tokens=TOKENS[:1]).keys
    daemon.sessions[b"chat"] = 77
    with pytest.raises(NotFound, match="no such session"):
        daemon.route(session=b"chat")


def test_a_model_that_nobody_opened_is_asked_for_each_time() -> None:
    daemon = Daemon()
    for _ in range(2):
        with pytest.raises(NotFound, match="no worker has opened it"):
            daemon.publish()
    daemon.opened(1)
    assert daemon.publish().namespaces == (1,)
    assert daemon.asked.count("ListNamespaces") == 3
