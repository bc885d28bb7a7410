"""The gateway before servers that close what they kept, pack what nobody can unpack, take nothing, or come back;
clients whose headers are odd; and how its process ends."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from kvstore.scheduler.gateway import app as gateway_app
from kvstore.scheduler.gateway import dispatch
from kvstore.scheduler.gateway.app import Settings, create_app

from .ssd_tools import eventually
from .test_gateway import BOUND_S, Asking, Listener, OpenAi, figure, gateway, servers

__all__ = ["gateway", "servers"]  # fixtures
Answer = Callable[[int, Mapping[bytes, bytes]], bytes | Iterator[bytes]]
"""From the number of a request on its connection, and its headers; b"" closes the connection."""
PROGRAM = (sys.executable, "-P", "-m", "kvstore.scheduler.gateway")
KEEPALIVE_TIMER = "02"


def said(body: bytes, *lines: bytes, status: bytes = b"200 OK") -> bytes:
    head = [b"HTTP/1.1 " + status, b"content-type: text/plain", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join([*head, b"", body])


class Peer:
    """Answers byte by byte as it is told to, and that it is well while `well` is set; until then it does not say."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.well = threading.Event()
        self.well.set()
        self.asked_for_health = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.well.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._talk, args=self._socket.accept()[:1], daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
            answer: bytes | Iterator[bytes] = b"?"
            number = 0
            while answer and (lines := list(iter(lambda: stream.readline().strip(), b""))):
                if lines[0].startswith(b"GET /health "):
                    self.asked_for_health += 1
                    self.well.wait(BOUND_S)
                    connection.sendall(said(b"well"))
                    continue
                headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
                stream.read(int(headers.get(b"content-length", 0)))
                answer, number = self._answer(number, headers), number + 1
                for part in [answer] if isinstance(answer, bytes) else answer:
                    connection.sendall(part)


@pytest.fixture
def before() -> Iterator[Callable[..., str]]:
    """before(answer or Peer, ..., **settings) -> the URL of a gateway before such servers"""
    with contextlib.ExitStack() as ends:

        def start(*answers: Answer | Peer, **settings: Any) -> str:
            peers = [answer if isinstance(answer, Peer) else Peer(answer) for answer in answers]
            for peer in peers:
                ends.callback(peer.close)
            listener = Listener(create_app(Settings(tuple(peer.url for peer in peers), **settings)))
            ends.callback(listener.stop)
            return listener.url

        yield start


def ask(url: str, **options: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=BOUND_S, **options)  # type: ignore[arg-type]


def test_an_answer_is_packed_for_no_client_that_did_not_ask(before: Callable[..., str]) -> None:
    def packs(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        if b"gzip" not in headers.get(b"accept-encoding", b""):
            return said(b"plain")
        return said(gzip.compress(b"packed"), b"content-encoding: gzip")

    answer = ask(before(packs), headers={"Accept-Encoding": "identity"})
    assert answer.content == b"plain"


def test_an_answer_that_is_packed_says_so(before: Callable[..., str]) -> None:
    answer = ask(before(lambda *_: said(gzip.compress(b"packed"), b"content-encoding: gzip")))
    assert answer.content == b"packed"


def test_a_connection_that_was_kept_and_is_closed_costs_nobody_an_answer(before: Callable[..., str]) -> None:
    url = before(lambda number, _: said(b"fine") if number == 0 else b"")
    assert [ask(url).status_code for _ in range(4)] == [200] * 4
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_server_that_closes_each_connection_ends_an_answer_soon(before: Callable[..., str]) -> None:
    assert ask(before(lambda *_: b"")).status_code == 502


@pytest.mark.parametrize("status", [b"502 B", b"503 U", b"504 T"])
def test_a_server_that_takes_nothing_costs_nobody_an_answer(
    before: Callable[..., str], status: bytes
) -> None:
    def stopping(*_: object) -> bytes:
        return said(b"ask another one", b"retry-after: 7", status=status)

    url = before(stopping, lambda *_: said(b"fine"))
    assert {ask(url).text for _ in range(4)} == {"fine"}
    alone = ask(before(stopping, stopping))
    assert (alone.status_code, alone.text) == (int(status[:3]), "ask another one")
    assert alone.headers["retry-after"] == "7", "the client is told what the server said"


def test_a_request_that_ends_its_servers_does_not_get_all_of_them(before: Callable[..., str]) -> None:
    had: list[int] = []

    def ends(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        had.append(number)
        return b""

    answer = ask(before(ends, ends, ends))
    assert (answer.status_code, len(had)) == (502, 2)


def test_who_waits_gets_a_server_that_is_back(
    servers: list[OpenAi], gateway: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody comes or leaves, which is when the queue was looked at."""
    monkeypatch.setattr(dispatch, "OUT_S", 0.1)
    broke_off = threading.Event()

    def first_breaks_off(*_: object) -> bytes:
        if broke_off.is_set():
            return said(b"back")
        broke_off.set()
        peer.well.clear()
        return b""

    with contextlib.closing(Peer(first_breaks_off)) as peer:
        url = gateway(servers=(peer.url, servers[1].listener.url))
        first = Asking(url, {"prompt": "first"})
        eventually(lambda: servers[1].asked == ["first"])
        waits = Asking(url, {"prompt": "waits"})
        eventually(lambda: figure(url, "attnstore_gateway_waiting") == 1)
        peer.well.set()
        assert waits.result().text == "back"
        servers[1].go.set()
        assert first.result().json()["by"] == "two"


def test_headers_that_are_no_ascii_are_passed_on(before: Callable[..., str]) -> None:
    def echoes(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        return said(headers[b"authorization"])

    assert ask(before(echoes), headers={b"Authorization": b"bearer caf\xe9"}).content == b"bearer caf\xe9"


ODD = "\N{LATIN SMALL LETTER E WITH ACUTE}\N{CJK UNIFIED IDEOGRAPH-4E2D}".encode()


def test_headers_of_answers_that_are_no_ascii_are_passed_on_too(before: Callable[..., str]) -> None:
    """An echo of the client's own, say; and whatever becomes of it, its server's slot is free again."""
    url = before(lambda *_: said(b"fine", b"x-request-id: " + ODD))
    answer = ask(url)
    assert (answer.status_code, dict(answer.headers.raw)[b"x-request-id"]) == (200, ODD)
    assert running(url) == 0


def test_a_list_of_models_has_the_type_that_its_server_says(before: Callable[..., str]) -> None:
    url = before(
        lambda *_: (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; x=" + ODD + b"\r\ncontent-length: 2\r\n\r\n{}"
        )
    )
    answer = httpx.get(f"{url}/v1/models")
    assert (answer.text, dict(answer.headers.raw)[b"content-type"]) == ("{}", b"text/plain; x=" + ODD)


def test_who_goes_away_within_his_body_is_no_error() -> None:
    async def asked() -> list[Message]:
        told: list[Message] = [
            {"type": "http.request", "body": b'{"pro', "more_body": True},
            {"type": "http.disconnect"},
        ]
        said: list[Message] = []

        async def receive() -> Message:
            return told.pop(0)

        async def send(message: Message) -> None:
            said.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        await create_app(Settings(("http://127.0.0.1:1",)))(scope, receive, send)
        return said

    assert asyncio.run(asked())[0]["status"] == gateway_app.CLIENT_CLOSED


def test_headers_that_are_no_http_are_the_clients_fault(before: Callable[..., str]) -> None:
    """uvicorn refuses them where h11 reads them, and not where httptools does."""

    async def asked() -> list[int]:
        with contextlib.closing(Peer(lambda *_: said(b"fine"))) as peer:
            app = create_app(Settings((peer.url,)))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                return [
                    (await client.post("/v1/completions", json={}, headers=headers)).status_code
                    for headers in ({b"X-Request-ID": b"a\0b"}, {})
                ]

    assert asyncio.run(asked()) == [400, 200]


@pytest.mark.parametrize("value", [b"1" + b"0" * 400, b"NaN", b"true", b"[" * 90 + b"]" * 90])
def test_seconds_that_are_none_are_refused(before: Callable[..., str], value: bytes) -> None:
    url = before()
    answer = httpx.post(f"{url}/v1/kv/presence", content=b'{"prompt": "x", "eta_s": ' + value + b"}")
    assert answer.status_code == 400 and "eta_s and ttl_s are seconds" in answer.json()["error"]["message"]


def running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("attnstore_gateway_running{"))


def endless(number: int, headers: Mapping[bytes, bytes]) -> bytes:
    """More than the buffers on its way hold."""
    return said(b"x" * (64 << 20))


def test_who_does_not_read_his_answer_keeps_no_slot(
    before: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_app, "READ_S", 0.3)
    url = before(endless)
    with asking(url):
        eventually(lambda: running(url) == 1)
        eventually(lambda: running(url) == 0)


def test_a_server_whose_host_vanishes_is_found_out(before: Callable[..., str]) -> None:
    """Its kernel is asked whether it is still there, while nothing comes."""
    asked, end = threading.Event(), threading.Event()
    ports: list[int] = []

    def silent(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        ports.append(int(headers[b"host"].rpartition(b":")[2]))
        asked.set()
        end.wait(BOUND_S)
        return b""

    url = before(silent)
    asking = threading.Thread(target=ask, args=(url,))
    asking.start()
    try:
        assert asked.wait(BOUND_S)
        eventually(lambda: KEEPALIVE_TIMER in timers_to(ports[0]))
    finally:
        end.set()
        asking.join(BOUND_S)


def timers_to(port: int) -> list[str]:
    """Of connections to it that are open, the kernel's timer of each: /proc/net/tcp in the kernel's documentation."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[5].partition(":")[0] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"]


@contextlib.contextmanager
def running_program(server: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The gateway as a process of its own, which answers, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*PROGRAM, "--server", server, "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        try:
            eventually(lambda: answers(url) or program.poll() is not None, bound_s=100)
            assert program.poll() is None, program.communicate()
            yield program, url
        finally:
            program.kill()


def asking(url: str) -> socket.socket:
    """Of a request that was sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), BOUND_S)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    return client


def everything(client: socket.socket) -> bytes:
    """Until the connection closes."""
    with client.makefile("rb") as stream:
        return stream.read()


def streams_for_ever(number: int, headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    while True:
        yield b"5\r\nfirst\r\n"
        time.sleep(0.01)


def test_requests_have_a_while_to_end_after_sigterm() -> None:
    """A server that goes on answering for ever keeps no gateway from its end."""
    with (
        contextlib.closing(Peer(streams_for_ever)) as peer,
        running_program(peer.url, "--drain-s", "1", "--slots", "1") as (program, url),
        asking(url) as streamed,
    ):
        assert streamed.recv(1)
        with asking(url) as waits:
            eventually(lambda: figure(url, "attnstore_gateway_waiting") == 1)
            program.terminate()
            assert not everything(streamed).endswith(b"0\r\n\r\n")
            answer = everything(waits)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"the gateway is being stopped" in answer
        assert "Traceback" not in program.communicate(timeout=BOUND_S)[1]
        assert program.returncode == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with (
        contextlib.closing(Peer(streams_for_ever)) as peer,
        running_program(peer.url, "--drain-s", "3600") as (program, url),
        asking(url) as streamed,
    ):
        assert streamed.recv(1)
        program.send_signal(signal.SIGINT)
        eventually(lambda: not answers(url))
        program.terminate()
        assert "Traceback" not in program.communicate(timeout=BOUND_S)[1]
        assert program.returncode == 0


def test_it_may_have_as_many_connections_as_the_system_allows() -> None:
    """More than a shell allows: else it would leave out servers, to which it cannot connect then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        with running_program("http://127.0.0.1:1") as (program, _):
            assert resource.prlimit(program.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_that_somebody_else_has_is_said_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*PROGRAM, "--server", "http://127.0.0.1:1", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 3
    lines = ended.stderr.splitlines()  # perhaps one about the server, too
    assert all(line.startswith("gateway: ") for line in lines), "no traceback"
    assert len([line for line in lines if line.endswith("address already in use")]) == 1


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/metrics").status_code == 200
    return False


def test_a_body_that_does_not_arrive_is_refused(
    before: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_app, "BODY_S", 0.3)
    host, _, port = before().removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), BOUND_S) as slow:
        slow.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"a"')
        answer = slow.recv(4096)
        while chunk := slow.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 400") and b"the body has not arrived within 0.3 s" in answer


def test_a_body_that_is_too_long_is_refused_in_words(
    before: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the client is still writing: it reads no answer before."""
    monkeypatch.setattr(gateway_app, "BODY_BYTES_MAX", 1 << 20)
    answer = httpx.post(f"{before()}/v1/completions", json={"prompt": "x" * (32 << 20)}, timeout=BOUND_S)
    assert answer.status_code == 413 and "a body has at most" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_what_there_is_not_is_refused_in_openais_words(
    method: str, path: str, status: int, before: Callable[..., str]
) -> None:
    answer = httpx.request(method, before() + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


def test_load_balancers_may_ask_without_a_body(before: Callable[..., str]) -> None:
    assert httpx.head(f"{before(lambda *_: said(b''))}/health").status_code == 200


def test_an_answer_that_breaks_off_is_a_line_in_the_log(
    before: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    def breaks_off(number: int, headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n"
        raise ConnectionError

    url = before(breaks_off)
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/completions", json={}) as answer,
    ):
        answer.read()
    assert "broke off: peer closed connection" in caplog.text
    assert [record.message for record in caplog.records if record.exc_info] == []


def test_a_failure_without_words_is_named(
    before: Callable[..., str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(*_: object) -> httpx.Response:
        raise httpx.ReadError("")

    monkeypatch.setattr(gateway_app.Gateway, "_send", reset)
    url = before(lambda *_: b"")
    assert ask(url).status_code == 502
    lines = [record.getMessage() for record in caplog.records if record.name == gateway_app.__name__]
    assert len(lines) == 1 and lines[0].endswith(": ReadError")
