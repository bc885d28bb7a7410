"""The gateway before two nodes of a fleet: a request goes where its beginning is, unless too many go there."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import numpy as np
import pytest

from ..fleet_tools import eventually, needs_redis
from .test_fleet import Member, join, redis
from .test_gateway import Asking, OpenAi, figure, gateway, servers

pytestmark = needs_redis
__all__ = ["gateway", "join", "redis", "servers"]


def tokens(session: int) -> list[int]:
    return (np.arange(64 * 4) + 1_000 * session).tolist()


def test_a_request_goes_where_its_beginning_is_unless_too_many_do(
    join: Callable[..., Member], servers: list[OpenAi], gateway: Callable[..., str]
) -> None:
    a, b = join("a"), join("b")
    members = [a, b]
    for session in range(6):
        members[session % 2].save(a.space.keys(tokens(session)))

    def known() -> bool:
        for session in range(6):
            rows = a.client.route("tiny", tokens=tokens(session)).nodes
            costs = {row.name: row.cost_ms for row in rows}
            here, there = members[session % 2].name, members[1 - session % 2].name
            if not costs.get(here, 1.0) == 0 < costs.get(there, 0.0):
                return False
        return True

    eventually(known, "a knows who holds what")
    url = gateway(slots=4, nodes=("a", "b"), run_dir=str(a.daemon.run_dir))
    eventually(lambda: _answers(url, servers), "the gateway has found the daemon")
    for server in servers:
        server.asked.clear()
    for session in (0, 1, 2, 3, 4, 5, 0, 1):
        body = {"model": "tiny", "prompt": [*tokens(session), 7]}
        told = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
        assert told["by"] == servers[session % 2].name, f"session {session}"
    # More than its server has room for go elsewhere, rather than wait
    for server in servers:
        server.go.clear()
        server.asked.clear()
    asking = [Asking(url, {"model": "tiny", "prompt": [*tokens(0), number]}) for number in range(8)]
    eventually(lambda: [len(server.asked) for server in servers] == [4, 4], "both are full")
    for server in servers:
        server.go.set()
    assert {each.result().status_code for each in asking} == {200}


def _answers(url: str, servers: list[OpenAi]) -> bool:
    for server in servers:
        server.go.set()
    body = {"model": "tiny", "prompt": tokens(0)}
    httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    return figure(url, "attnstore_gateway_hints_routed_total") > 0


def test_without_routes_it_is_as_ever(servers: list[OpenAi], gateway: Callable[..., str]) -> None:
    url = gateway(slots=4)
    for server in servers:
        server.go.set()
    told = {
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "user": "u"}).json()["by"] for _ in range(3)
    }
    assert len(told) == 1


def test_a_wrong_number_of_nodes_is_refused(servers: list[OpenAi], gateway: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="zip"):
        gateway(nodes=("a",), run_dir="/nowhere")
