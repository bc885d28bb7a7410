"""The gateway before servers that are stopped, hang, or fail fast: they are left out, asked again, and come back; what
one request brings about is not held against all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest

from kvstore.scheduler.gateway import app, dispatch, health

from .ssd_tools import eventually
from .test_gateway import BOUND_S, Asking, OpenAi, figure, gateway, servers
from .test_gateway_servers import Peer, ask, before, said

__all__ = ["before", "gateway", "servers"]  # fixtures
SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "7")
        self.end_headers()
        self.wfile.write(b"process")

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "EVERY_S", 0.2)
    monkeypatch.setattr(health, "ANSWER_S", 2.0)
    monkeypatch.setattr(health, "SILENCES_MAX", 2)
    monkeypatch.setattr(dispatch, "OUT_S", 0.1)
    monkeypatch.setattr(app, "CONNECT_S", BOUND_S)  # and patient, where a server is there


@pytest.fixture
def process() -> Iterator[tuple[str, int]]:
    """A server that is a process of its own: its URL and pid."""
    program = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program.stdout as output:
        try:
            yield f"http://127.0.0.1:{int(output.readline())}", program.pid
        finally:
            program.kill()
            program.wait()


def left_out(url: str) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{url}/health").json()["left_out"]
    return found


def times(url: str, server: str, why: str) -> float:
    return figure(url, f'attnstore_gateway_left_out_total{{server="{server}",why="{why}"}}')


def test_a_server_that_was_stopped_keeps_no_request_and_comes_back(
    process: tuple[str, int], servers: list[OpenAi], gateway: Callable[..., str]
) -> None:
    here, pid = process
    there = servers[1].listener.url
    url = gateway(servers=(here, there), slots=4)
    servers[1].go.set()
    body = {"prompt": "x", "session_id": "s"}
    assert httpx.post(f"{url}/v1/completions", json=body).text == "process"
    os.kill(pid, signal.SIGSTOP)
    asking = [Asking(url, body) for _ in range(6)]
    assert {each.result().json()["by"] for each in asking} == {"two"}
    eventually(lambda: left_out(url) == {here: "silent"})
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=BOUND_S).json()["by"] == "two"
    assert figure(url, f'attnstore_gateway_running{{server="{here}"}}') == 0
    assert figure(url, f'attnstore_gateway_up{{server="{here}"}}') == 0
    assert times(url, here, "silent") == 1
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: left_out(url) == {})
    servers[1].listener.stop()
    answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=BOUND_S).text for _ in range(2)]
    assert answers == ["process"] * 2


def test_while_all_are_silent_nobody_is_kept_waiting_for_one(
    process: tuple[str, int], gateway: Callable[..., str]
) -> None:
    here, pid = process
    url = gateway(servers=(here,))
    os.kill(pid, signal.SIGSTOP)
    first = Asking(url, {"prompt": "came before it was known"})
    eventually(lambda: left_out(url) == {here: "silent"})
    late = ask(url)
    assert (late.status_code, late.json()["error"]["message"]) == (503, "all servers are silent")
    os.kill(pid, signal.SIGCONT)
    assert first.result().text == "process", "there was no other one, so it waited"
    eventually(lambda: ask(url).status_code == 200)


def test_a_silent_server_is_not_asked_though_no_other_one_answers(before: Callable[..., str]) -> None:
    silent, away = Peer(lambda *_: said(b"of a silent one")), Peer(lambda *_: b"")
    away.close()
    silent.well.clear()
    url = before(silent, away)
    eventually(lambda: left_out(url) == {silent.url: "silent", away.url: "unreachable"})
    assert ask(url).status_code == 502


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def test_a_stream_is_not_cut_for_its_servers_silence(before: Callable[..., str]) -> None:
    go_on = threading.Event()

    def streams(number: int, headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
        yield HEAD + chunked(b"first")
        go_on.wait(BOUND_S)
        yield chunked(b"second") + END

    peer = Peer(streams)
    url = before(peer, lambda *_: said(b"other"))
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x"}, timeout=BOUND_S) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"first"
        peer.well.clear()
        eventually(lambda: left_out(url) == {peer.url: "silent"})
        assert ask(url).text == "other"
        go_on.set()
        assert list(pieces) == [b"second"]
    peer.well.set()
    eventually(lambda: left_out(url) == {})


def test_a_server_that_streams_is_not_silent(
    before: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its loop takes to say that it is well."""
    monkeypatch.setattr(health, "ANSWER_S", 1.0)
    end = threading.Event()

    def streams(number: int, headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
        yield HEAD
        while not end.wait(0.05):
            yield chunked(b": still here\n\n")
        yield END

    peer = Peer(streams)
    url = before(peer, lambda *_: said(b"other"))
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x"}, timeout=BOUND_S) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        peer.well.clear()
        enough = peer.asked_for_health + health.SILENCES_MAX + 2
        while peer.asked_for_health < enough:
            next(pieces)
        assert times(url, peer.url, "silent") == 0
        end.set()
        list(pieces)


def test_a_server_that_fails_fast_is_left_out_and_tried_again(before: Callable[..., str]) -> None:
    """It would have room all the time, and attract what the others have no room for."""
    sick = threading.Event()
    sick.set()
    had: list[int] = []

    def fails(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        had.append(number)
        return said(b"out of memory", status=b"500 E") if sick.is_set() else said(b"well again")

    peer = Peer(fails)
    url = before(peer, lambda *_: said(b"fine"))
    while not times(url, peer.url, "errors"):
        assert ask(url).text == "fine"
    assert len(had) == dispatch.ERRORS_MAX
    eventually(lambda: figure(url, f'attnstore_gateway_on_trial{{server="{peer.url}"}}') == 1)
    assert ask(url).text == "fine"
    eventually(lambda: times(url, peer.url, "errors") == 2 or ask(url).text != "fine")
    assert len(had) == dispatch.ERRORS_MAX + 1, "one request is enough to see that it is no better"
    sick.clear()
    eventually(lambda: ask(url).text == "well again")
    assert figure(url, f'attnstore_gateway_on_trial{{server="{peer.url}"}}') == 0


@pytest.mark.parametrize("status", [b"500 E", b"404 N", b"401 U", b"403 F"])
def test_a_request_that_fails_everywhere_leaves_out_nobody(before: Callable[..., str], status: bytes) -> None:
    had: list[bytes] = []

    def judges(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        had.append(headers.get(b"x-request-id", b""))
        return said(b"no", status=status) if had[-1] == b"bad" else said(b"fine")

    url = before(judges, judges, judges, judges)
    for _ in range(3 * dispatch.ERRORS_MAX):
        answer = ask(url, headers={"X-Request-ID": "bad"})
        assert (answer.status_code, answer.text) == (int(status[:3]), "no")
    assert len(had) == 9 * dispatch.ERRORS_MAX, "three servers are asked, not all"
    assert ask(url).text == "fine"
    assert left_out(url) == {}


def test_one_server_alone_is_asked_on_whatever_it_answers(before: Callable[..., str]) -> None:
    url = before(lambda *_: said(b"no", status=b"500 E"))
    answers = [ask(url) for _ in range(2 * dispatch.ERRORS_MAX)]
    assert {(answer.status_code, answer.text) for answer in answers} == {(500, "no")}
    assert left_out(url) == {}


def test_an_answer_that_never_comes_is_given_up(before: Callable[..., str]) -> None:
    """Though its server says that it is well: what computes there may hang alone."""
    end = threading.Event()

    def silent(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        end.wait(BOUND_S)
        return b""

    peer = Peer(silent)
    url = before(peer, silent_s=0.5)
    try:
        answer = ask(url)
        assert answer.status_code == 504 and "said nothing for 0.5 s" in answer.json()["error"]["message"]
        assert times(url, peer.url, "silent") == 1
        assert figure(url, f'attnstore_gateway_running{{server="{peer.url}"}}') == 0
    finally:
        end.set()


def test_a_server_that_is_well_again_gets_its_requests_one_by_one(before: Callable[..., str]) -> None:
    """Until it has answered one."""
    end = threading.Event()
    at_once: list[int] = []

    def silent(number: int, headers: Mapping[bytes, bytes]) -> bytes:
        at_once.append(number)
        end.wait(BOUND_S)
        return said(b"at last")

    peer = Peer(silent)
    url = before(peer, silent_s=3.0)
    assert ask(url).status_code == 504
    eventually(lambda: left_out(url) == {})
    asking = [Asking(url, {"prompt": "x"}) for _ in range(3)]
    eventually(lambda: figure(url, "attnstore_gateway_waiting") == 2)
    assert len(at_once) == 2
    end.set()
    assert {each.result().text for each in asking} == {"at last"}


def test_a_proxy_of_the_environment_is_not_asked_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests do not go through it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")

    async def asked() -> dispatch.Failure | None:
        with contextlib.closing(Peer(lambda *_: said(b"fine"))) as peer:
            server = dispatch.Server(peer.url, slots=1)
            return await health.Health(dispatch.Dispatcher([server], waiting_max=1))._ask(server)

    assert asyncio.run(asked()) is None


def test_models_are_those_of_a_server_that_is_up(before: Callable[..., str]) -> None:
    peer = Peer(lambda *_: said(b"of one that is left out"))
    url = before(peer, lambda *_: said(b"of one that is up"))
    peer.well.clear()
    eventually(lambda: left_out(url) == {peer.url: "silent"})
    assert httpx.get(f"{url}/v1/models", timeout=BOUND_S).text == "of one that is up"


def test_models_are_those_of_a_server_that_answers(before: Callable[..., str]) -> None:
    url = before(lambda *_: b"", lambda *_: said(b"fine"))
    assert httpx.get(f"{url}/v1/models", timeout=BOUND_S).text == "fine"
    answer = httpx.get(f"{before(lambda *_: b'')}/v1/models", timeout=BOUND_S)
    assert answer.status_code == 502 and "no server" in answer.json()["error"]["message"]
