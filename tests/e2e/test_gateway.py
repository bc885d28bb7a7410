"""The gateway in front of two small servers that speak OpenAI's interface, and of a real daemon: queue, streams,
aborts, a server that dies, and what the daemon is told ahead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvstore.client import ActionKind, Client, Namespace
from kvstore.scheduler.gateway import __main__ as gateway_program
from kvstore.scheduler.gateway import dispatch, lookahead
from kvstore.scheduler.gateway.app import Settings, create_app
from kvstore.v1 import stats_pb2, stats_pb2_grpc

from .ssd_tools import SMALL_SSD, SPEC, client_of, demote, eventually, save

BOUND_S = 20.0
PROMPT = "".join(chr(ord("a") + number % 26) for number in range(3 * SPEC.chunk_tokens))


def token_ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Listener:
    """An app on a port of its own, in a thread of its own."""

    def __init__(self, app: FastAPI) -> None:
        settings = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


class OpenAi:
    """Answers when it is let go, piece by piece if asked to; knows who went away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[Any] = []
        self.aborted: list[Any] = []
        self.tokenized = 0
        self.received: list[tuple[bytes, str]] = []
        """Bodies, and who asked."""
        self.tokenizers: list[str] = []
        self.go = threading.Event()
        app = FastAPI()
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"], response_model=None)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self._complete, methods=["POST"], response_model=None)
        app.add_api_route(
            "/v1/models", lambda: {"data": [{"id": "tiny"}]}, methods=["GET"], response_model=None
        )
        self.listener = Listener(app)

    async def _tokenize(self, request: Request) -> JSONResponse:
        self.tokenized += 1
        self.tokenizers.append(request.headers.get("authorization", ""))
        body = await request.json()
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        return JSONResponse({"tokens": token_ids(text)})

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        self.received.append((await request.body(), request.headers.get("authorization", "")))
        self.asked.append(body.get("prompt") or body["messages"][0]["content"])
        if body.get("stream"):
            return StreamingResponse(self._pieces(body), media_type="text/event-stream")
        while not self.go.is_set():
            if await request.is_disconnected():
                self.aborted.append(self.asked[-1])
                return JSONResponse({})
            await asyncio.sleep(0.005)
        return JSONResponse({"by": self.name, "prompt": self.asked[-1]})

    async def _pieces(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            yield b'data: {"n": 0}\n\n'
            while not self.go.is_set():
                yield b": still here\n\n"
                await asyncio.sleep(0.005)
            yield b'data: {"n": 1}\n\ndata: [DONE]\n\n'
        except asyncio.CancelledError:
            self.aborted.append(body["prompt"])
            raise


@pytest.fixture
def servers() -> Iterator[list[OpenAi]]:
    both = [OpenAi("one"), OpenAi("two")]
    yield both
    for server in both:
        server.go.set()
        server.listener.stop()


@pytest.fixture
def gateway(servers: list[OpenAi]) -> Iterator[Callable[..., str]]:
    """gateway(**settings) -> its URL"""
    with contextlib.ExitStack() as ends:

        def start(**settings: Any) -> str:
            urls = tuple(server.listener.url for server in servers)
            listener = Listener(create_app(Settings(**{"servers": urls, "slots": 1, **settings})))
            ends.callback(listener.stop)
            ends.callback(lambda: [server.go.set() for server in servers])
            return listener.url

        yield start


class Asking:
    """One request, in a thread."""

    def __init__(self, url: str, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._ask, args=(url + path, body), daemon=True)
        self._thread.start()

    def _ask(self, url: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": "Bearer me"}
        self.answer = httpx.post(url, json=body, headers=headers, timeout=BOUND_S)

    def result(self) -> Any:
        self._thread.join(BOUND_S)
        return self.answer


def figure(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        label, _, value = line.rpartition(" ")
        if label == name:
            return float(value)
    raise AssertionError(name)


def test_requests_are_spread_queued_and_answered_as_the_servers_answer(
    servers: list[OpenAi], gateway: Callable[..., str]
) -> None:
    url = gateway()
    asking = [Asking(url, {"model": "tiny", "prompt": f"p{number}"}) for number in range(4)]
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 2)
    eventually(lambda: [len(server.asked) for server in servers] == [1, 1])
    for server in servers:
        server.go.set()
    answers = [each.result() for each in asking]
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["prompt"] for answer in answers) == ["p0", "p1", "p2", "p3"]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert len(httpx.get(f"{url}/health").json()["up"]) == 2


def test_a_session_goes_to_the_server_that_had_it(servers: list[OpenAi], gateway: Callable[..., str]) -> None:
    url = gateway(slots=4)
    for server in servers:
        server.go.set()
    told = {
        session: {
            httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "session_id": session},
            ).json()["by"]
            for _ in range(3)
        }
        for session in ("a", "b", "c")
    }
    assert all(len(names) == 1 for names in told.values()), told


def test_new_sessions_go_where_least_was_taken_in(servers: list[OpenAi], gateway: Callable[..., str]) -> None:
    """However few ask at a time: else one server's store would evict while the other's is empty."""
    url = gateway(slots=4)
    for server in servers:
        server.go.set()

    def by(session: str, letters: int) -> str:
        body = {"prompt": "x" * letters, "user": session} if session else {"prompt": "x" * letters}
        name: str = httpx.post(f"{url}/v1/completions", json=body).json()["by"]
        return name

    first = by("a", 9_000)
    other = by("b", 3_000)
    assert other != first
    assert by("c", 3_000) == other, "it has taken in 3,000 letters so far, and the first 9,000"
    assert by("a", 10_000) == first, "a session stays; of this turn 1,000 letters are new"
    assert by("d", 5_000) == other, "6,000 and 10,000"
    assert by("b", 3_000) == other, "nothing is new"
    assert by("e", 3_000) == first, "11,000 and 10,000"
    assert {by("", 100) for _ in range(3)} == {servers[0].name}, (
        "without a session: where those before it went"
    )


def test_streams_come_piece_by_piece_and_end_at_the_server_when_the_client_goes(
    servers: list[OpenAi], gateway: Callable[..., str]
) -> None:
    url = gateway()
    body = {"prompt": "streamed", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == 'data: {"n": 0}'  # while the rest is not there yet
    eventually(lambda: [server.aborted for server in servers if server.asked] == [["streamed"]])
    eventually(lambda: all(server.running == 0 for server in _servers(url, servers)))
    for server in servers:
        server.go.set()
    assert httpx.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def _servers(url: str, servers: list[OpenAi]) -> list[Any]:
    class Row:
        def __init__(self, server: OpenAi) -> None:
            self.running = figure(url, f'attnstore_gateway_running{{server="{server.listener.url}"}}')

    return [Row(server) for server in servers]


def test_who_goes_away_leaves_the_queue_and_the_server(
    servers: list[OpenAi], gateway: Callable[..., str]
) -> None:
    url = gateway()
    for number in range(2):
        Asking(url, {"prompt": f"first {number}"})
    eventually(lambda: all(server.asked for server in servers))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": "impatient"}, timeout=0.3)
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 0)
    servers[0].go.set()
    eventually(lambda: _servers(url, servers)[0].running == 0)
    servers[0].go.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": "running"}, timeout=0.3)
    eventually(lambda: servers[0].aborted == ["running"])
    assert "impatient" not in [*servers[0].asked, *servers[1].asked]


def test_a_server_that_is_gone_costs_nobody_an_answer(
    servers: list[OpenAi], gateway: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OUT_S", 2 * BOUND_S)
    url = gateway(slots=2)
    servers[0].listener.stop()
    servers[1].go.set()
    for number in range(4):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": f"p{number}"}, timeout=BOUND_S)
        assert (answer.status_code, answer.json()["by"]) == (200, "two")
    servers[1].listener.stop()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "nobody"}, timeout=BOUND_S)
    assert answer.status_code == 502 and "no server" in answer.json()["error"]["message"]
    assert [row.running for row in _servers(url, servers)] == [0, 0]
    assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xc3\xa4",  "temperature": NaN, "seed": 1e999}',
        b'{"prompt": "x", "stop": "\\ud800", "n":1}',
    ],
    ids=["no number", "half a letter"],
)
def test_a_server_gets_what_was_sent(servers: list[OpenAi], gateway: Callable[..., str], body: bytes) -> None:
    """And judges it: the gateway only reads it."""
    url = gateway()
    for server in servers:
        server.go.set()
    answer = httpx.post(
        f"{url}/v1/completions",
        content=body,
        headers={"Authorization": "Bearer me", "Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    assert [each for server in servers for each in server.received] == [(body, "Bearer me")]


NESTED = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"no json", "the body is no JSON: Expecting value: line 1 column 1"),
        (b"[1]", "the body is no JSON object"),
        (b"", "the body is no JSON: Expecting value"),
        (NESTED, "the body is no JSON: maximum recursion depth"),
        (b"\xff\xfe", "the body is no JSON: "),
    ],
    ids=["text", "list", "nothing", "nested", "no UTF-8"],
)
def test_what_cannot_be_read_is_refused_and_why(gateway: Callable[..., str], body: bytes, why: str) -> None:
    answer = httpx.post(f"{gateway()}/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(why)


def test_too_many_are_refused(servers: list[OpenAi], gateway: Callable[..., str]) -> None:
    url = gateway(waiting_max=1)
    asking = [Asking(url, {"prompt": f"p{number}"}) for number in range(3)]
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 1)
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "one more"})
    assert refused.status_code == 429 and refused.headers["retry-after"]
    for server in servers:
        server.go.set()
    assert {each.result().status_code for each in asking} == {200}


def test_too_much_is_refused(
    servers: list[OpenAi], gateway: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "WAITING_BYTES_MAX", 1_000)
    url = gateway()
    asking = [Asking(url, {"prompt": "x" * 900}) for _ in range(2)]
    eventually(lambda: all(server.asked for server in servers))
    asking.append(Asking(url, {"prompt": "x" * 900}))
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 1)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 100}).status_code == 429
    asking.append(Asking(url, {"prompt": "x"}))
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 2)
    for server in servers:
        server.go.set()
    assert {each.result().status_code for each in asking} == {200}


# -------------------------------------------------------------------------------------------------- the daemon is told


@pytest.fixture
def connected(start_daemon: Callable[..., Any], run_dir: Path) -> Iterator[Callable[[], Client]]:
    """connected() -> one more client"""
    daemon = start_daemon(**{**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"})
    with contextlib.ExitStack() as clients:
        yield lambda: clients.enter_context(contextlib.closing(client_of(daemon)))


@pytest.fixture
def client(connected: Callable[[], Client]) -> Client:
    return connected()


@pytest.fixture
def space(client: Client) -> Namespace:
    return client.open(SPEC)


def queued(client: Client) -> float:
    return client.stats().gauges["queued_jobs"]


@pytest.mark.parametrize("chat", [False, True])
def test_what_waits_is_in_dram_when_its_turn_comes(
    servers: list[OpenAi],
    gateway: Callable[..., str],
    space: Namespace,
    client: Client,
    run_dir: Path,
    chat: bool,
) -> None:
    keys = space.keys(token_ids(PROMPT))
    save(space, keys)
    demote(space, keys, filler=1)
    url = gateway(run_dir=str(run_dir))
    busy = [Asking(url, {"prompt": f"busy {number}"}) for number in range(2)]
    eventually(lambda: all(server.asked for server in servers))
    if chat:
        body = {"messages": [{"role": "user", "content": PROMPT}]}
        waits = Asking(url, body, "/v1/chat/completions")
    else:
        waits = Asking(url, {"prompt": PROMPT})
    eventually(lambda: space.match(keys).outcomes.count(0) == len(keys))  # though nobody has asked for it
    assert queued(client) == 1
    assert {who for server in servers for who in server.tokenizers} == {"Bearer me"}
    for server in servers:
        server.go.set()
    assert waits.result().status_code == 200 and all(each.result().status_code == 200 for each in busy)
    eventually(lambda: queued(client) == 0)


def needed(client: Client) -> list[bool]:
    """Whether somebody waits for all chunks of PROMPT, in each namespace, the one opened last first."""
    found = []
    for number, keys in client.prompts(SPEC.model, token_ids(PROMPT)):
        ask = stats_pb2.ExplainRequest(namespace_id=number, keys=keys)
        chunks = client.unary(stats_pb2_grpc.StatsStub, "Explain", ask).chunks
        found.append(all(chunk.needed for chunk in chunks))
    return found


def test_what_waits_is_told_in_each_namespace_of_its_model(
    servers: list[OpenAi],
    gateway: Callable[..., str],
    space: Namespace,
    client: Client,
    connected: Callable[[], Client],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two versions beside one another: whichever server has room takes the request. A third comes while it waits."""
    monkeypatch.setattr(lookahead, "TTL_MS", 3_000)
    other = connected().open(replace(SPEC, layout_fingerprint="test:other bytes"))
    spaces = {each: each.keys(token_ids(PROMPT)) for each in (space, other)}
    for each, keys in spaces.items():
        save(each, keys)
    for each, keys in spaces.items():
        demote(each, keys, filler=1)
    url = gateway(run_dir=str(run_dir))
    for number in range(2):
        Asking(url, {"prompt": [number]})
    eventually(lambda: all(server.asked for server in servers))
    waits = Asking(url, {"prompt": token_ids(PROMPT)})
    for each, keys in spaces.items():
        eventually(lambda each=each, keys=keys: each.match(keys).outcomes.count(0) == len(keys))
    assert queued(client) == 2
    assert figure(url, "attnstore_gateway_hints_told_total") == 1, "of one request"
    third = connected().open(replace(SPEC, tensor_parallel=2))
    save(third, third.keys(token_ids(PROMPT)))
    eventually(lambda: needed(client) == [True] * 3)
    for server in servers:
        server.go.set()
    assert waits.result().status_code == 200
    eventually(lambda: queued(client) == 0)


def test_what_came_while_the_daemon_was_away_is_told_once_it_is_back(
    servers: list[OpenAi], gateway: Callable[..., str], start_daemon: Callable[..., Any], run_dir: Path
) -> None:
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    daemon = start_daemon(**settings)
    with contextlib.closing(client_of(daemon)) as client:
        client.open(SPEC)
    url = gateway(run_dir=str(run_dir), model=SPEC.model)
    for number in range(2):
        Asking(url, {"prompt": [number]})
    eventually(lambda: all(server.asked for server in servers))
    waits = [Asking(url, {"prompt": token_ids(PROMPT)})]
    eventually(lambda: figure(url, "attnstore_gateway_hints_told_total") == 1)
    daemon.kill()
    waits.append(Asking(url, {"prompt": token_ids(PROMPT)}))
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 2)
    with contextlib.closing(client_of(start_daemon(**settings))) as client:
        client.open(SPEC)
        eventually(lambda: queued(client) == 2)
        for server in servers:
            server.go.set()
        assert {each.result().status_code for each in waits} == {200}
        eventually(lambda: queued(client) == 0)


def test_a_prompt_with_a_cache_salt_is_not_told_by_other_keys(
    servers: list[OpenAi], gateway: Callable[..., str], space: Namespace, client: Client, run_dir: Path
) -> None:
    url = gateway(run_dir=str(run_dir))
    for number in range(2):
        Asking(url, {"prompt": [number]})
    eventually(lambda: all(server.asked for server in servers))
    Asking(url, {"prompt": token_ids(PROMPT), "cache_salt": "alice"})
    eventually(lambda: figure(url, "attnstore_gateway_hints_unknown_total") == 1)
    assert queued(client) == 0


def test_prompts_of_token_ids_need_no_tokenizer(
    servers: list[OpenAi], gateway: Callable[..., str], space: Namespace, client: Client, run_dir: Path
) -> None:
    url = gateway(run_dir=str(run_dir), model=SPEC.model)
    save(space, space.keys(token_ids(PROMPT)))
    for number in range(2):
        Asking(url, {"prompt": [number]})
    eventually(lambda: all(server.asked for server in servers))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": token_ids(PROMPT)}, timeout=1.0)
    assert figure(url, "attnstore_gateway_hints_told_total") == 1
    eventually(lambda: queued(client) == 0)  # it has gone away
    assert servers[0].tokenized == servers[1].tokenized == 0


def test_presence_is_told_by_session_and_by_prompt(
    servers: list[OpenAi], gateway: Callable[..., str], space: Namespace, client: Client, run_dir: Path
) -> None:
    keys = space.keys(token_ids(PROMPT))
    save(space, keys)
    url = gateway(run_dir=str(run_dir))
    for server in servers:
        server.go.set()
    presence = f"{url}/v1/kv/presence"
    unknown = httpx.post(presence, json={"session_id": "agent", "eta_s": 40}).json()
    assert unknown["result"] == "rejected" and unknown["why"]
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "session_id": "agent"})

    def told() -> bool:
        answer = httpx.post(presence, json={"session_id": "agent", "eta_s": 40}).json()
        return bool(answer == {"result": "accepted", "chunks": len(keys)})

    eventually(told)
    (row,) = client.unary(
        stats_pb2_grpc.StatsStub, "ListNamespaces", stats_pb2.ListNamespacesRequest()
    ).namespaces
    ask = stats_pb2.ExplainRequest(namespace_id=row.namespace_id, keys=keys[:1])
    ((hint,),) = [chunk.hints for chunk in client.unary(stats_pb2_grpc.StatsStub, "Explain", ask).chunks]
    assert hint.kind == ActionKind.EXPECT and 0 < hint.due_in_ms <= 40_000
    assert httpx.post(presence, json={"prompt": PROMPT}).json()["result"] == "accepted"
    for wrong in ({"eta_s": -1}, {"eta_s": "soon"}, {"ttl_s": 1e9}):
        assert httpx.post(presence, json={"prompt": PROMPT, **wrong}).status_code == 400


def test_only_so_many_tokens_of_sessions_are_remembered(
    servers: list[OpenAi],
    gateway: Callable[..., str],
    space: Namespace,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookahead, "SESSION_TOKENS_MAX", 2 * len(PROMPT))
    save(space, space.keys(token_ids(PROMPT)))
    url = gateway(run_dir=str(run_dir))
    for server in servers:
        server.go.set()

    def result(session: str) -> str:
        answer = httpx.post(f"{url}/v1/kv/presence", json={"session_id": session, "eta_s": 40})
        told: str = answer.json()["result"]
        return told

    for session in ("first", "second", "second", "third"):
        httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "session_id": session})
        eventually(lambda session=session: result(session) == "accepted")
    assert [result(session) for session in ("first", "second")] == ["rejected", "accepted"]


def test_who_waits_far_back_is_told_of_when_he_comes_nearer(
    servers: list[OpenAi],
    gateway: Callable[..., str],
    space: Namespace,
    client: Client,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookahead, "TOLD_MAX", 1)
    save(space, space.keys(token_ids(PROMPT)))
    url = gateway(run_dir=str(run_dir), model=SPEC.model)
    for number in range(2):
        Asking(url, {"prompt": [number]})
    eventually(lambda: all(server.asked for server in servers))
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": token_ids(PROMPT)}).encode()
    told = "attnstore_gateway_hints_told_total"
    with socket.create_connection((host, int(port))) as near:
        near.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        eventually(lambda: figure(url, told) == 1)
        far = Asking(url, {"prompt": token_ids(PROMPT)})
        eventually(lambda: figure(url, "attnstore_gateway_waiting") == 2)
        assert figure(url, told) == 1
    eventually(lambda: figure(url, told) == 2)
    for server in servers:
        server.go.set()
    assert far.result().status_code == 200


def test_without_a_daemon_everything_is_answered(
    servers: list[OpenAi], gateway: Callable[..., str], tmp_path: Path
) -> None:
    url = gateway(run_dir=str(tmp_path / "nobody"))
    asking = [Asking(url, {"prompt": f"p{number}", "session_id": "s"}) for number in range(4)]
    eventually(lambda: figure(url, "attnstore_gateway_waiting") > 0)
    for server in servers:
        server.go.set()
    assert {each.result().status_code for each in asking} == {200}
    answer = httpx.post(f"{url}/v1/kv/presence", content=json.dumps({"prompt": "x"}))
    assert answer.json()["result"] == "rejected"


@pytest.mark.parametrize("option", ["--slots", "--waiting-max"])
def test_room_for_nobody_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gateway", "--server", "http://127.0.0.1:1", option, "0"])
    with pytest.raises(SystemExit) as ended:
        gateway_program.main()
    assert ended.value.code == 2
    assert f"argument {option}: 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "127.0.0.1:8000", "http://", "http://host:99999", "ftp://host"),
        *("http://a..b:8000", f"http://{'a' * 64}:8000", "http://a\tb:8000"),
    ],
)
def test_a_server_without_an_address_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gateway", "--server", f"{url}=gpu-1"])
    with pytest.raises(SystemExit) as ended:
        gateway_program.main()
    assert ended.value.code == 2
    assert f"argument --server: {url} is no address of a server (as http://" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["uvicorn", "fastapi", "httpx"])
def test_without_its_extra_it_says_what_to_install(module: str) -> None:
    ended = run_without([module], "--server", "http://127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr == f"the gateway needs {module}: pip install 'attnstore[gateway]'\n"


@pytest.mark.parametrize(("given", "status"), [(["--help"], 0), (["--slots", "x"], 2)], ids=["help", "wrong"])
def test_its_options_are_read_before_what_takes_long_to_load(given: list[str], status: int) -> None:
    ended = run_without(["uvicorn", "fastapi", "httpx", "grpc", "numpy"], *given)
    assert ended.returncode == status, ended.stderr
    assert "usage: python -m kvstore.scheduler.gateway" in ended.stdout + ended.stderr


def run_without(modules: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({modules!r}));"
        "runpy.run_module('kvstore.scheduler.gateway', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
