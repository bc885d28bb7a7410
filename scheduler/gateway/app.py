"""HTTP: the part of OpenAI's interface that is asked by prompt, answers passed through as they come.

    POST /v1/completions, /v1/chat/completions   to a server, when it is its turn; 429 when too much waits
    POST /v1/kv/presence                         {"session_id" or "prompt" or "messages", "eta_s", "ttl_s"}: who will
                                                 ask soon, because somebody types or a tool runs
    GET  /v1/models, /health, /metrics

A client that goes away is taken out of the queue, or its request ended at its server, which frees what it holds. The
session of a request is its `session_id`, the header X-Session-ID, or `user`. A server that cannot be reached, is
silent, or says that it takes nothing now (502, 503, 504), costs nobody an answer while another one is left. A request
that is answered with an error (500, or that the model or the key is unknown) is sent to another server too, which tells
whose the error is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import reprlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.scheduler.gateway.dispatch import Asked, Dispatcher, Failure, Full, Server, Silent, Ticket
from kvstore.scheduler.gateway.health import Health
from kvstore.scheduler.gateway.lookahead import LookAhead
from kvstore.scheduler.gateway.metrics import CONTENT_TYPE, Metrics

PATHS = ("/v1/completions", "/v1/chat/completions")
BODY_BYTES_MAX = 32 << 20
CONNECT_S = 5.0
BODY_S = 60.0
"""In which a request's body has to arrive."""
READ_S = 60.0
"""In which a client has to read what waits for it: until then it keeps a slot of its server."""
PRESENCE_S_MAX = 3_600.0
CLIENT_CLOSED = 499
"""Nobody reads it; logs do."""
TAKES_NOTHING = (502, 503, 504)
"""Statuses of a server that is starting, stopping or dead."""
OF_THE_SERVER = (401, 403, 404)
"""Statuses that may say, as those from 500 on, that something is wrong with the server, not with the request."""
ERRED_MAX = 2
"""Servers that answer a request with an error before the next one's is passed on."""
NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)
BROKEN_MAX = 2
"""Servers that broke off a request: it may be what ends them, and the others are spared."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A server's host that vanishes without a word keeps its requests, which may take minutes to answer, for a minute."""
PASSED_ON = (b"content-type", b"content-encoding", b"retry-after", b"x-request-id")
"""Headers of answers that clients get,"""
PASSED_DOWN = (b"authorization", b"content-type", b"x-request-id", b"traceparent", b"tracestate")
"""and of requests that servers get."""
LONG_BODY = f"a body has at most {BODY_BYTES_MAX} bytes"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    servers: tuple[str, ...]
    """Base URLs, without /v1."""
    run_dir: str = ""
    """The daemon's; "": nothing is told ahead."""
    model: str = ""
    """What workers call the model in their namespace (`kvctl namespaces`); "": the only one there is."""
    slots: int = 8
    """Requests that each server is given at a time."""
    waiting_max: int = 4_096
    silent_s: float = 600.0
    """An answer of which nothing comes for so long is given up."""
    nodes: tuple[str, ...] = ()
    """For each server: the name of the node whose store it uses, in a fleet. Requests then go where most of their
    beginning is, unless too many go there; empty: to the server that had their session last."""


def create_app(settings: Settings) -> FastAPI:
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(settings.silent_s, connect=CONNECT_S, pool=None),
        transport=httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None), socket_options=KEEP_ALIVE
        ),
        headers={"Accept-Encoding": "identity"},  # answers are passed on as they come: clients may not decode
    )
    nodes = settings.nodes or ("",) * len(settings.servers)
    servers = [
        Server(url.rstrip("/"), settings.slots, node=node)
        for url, node in zip(settings.servers, nodes, strict=True)
    ]
    dispatcher = Dispatcher(servers, waiting_max=settings.waiting_max)
    ahead = LookAhead(settings.run_dir, settings.model, dispatcher, http) if settings.run_dir else None
    health = Health(dispatcher)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        health.start()
        if ahead is not None:
            ahead.start()
        yield
        await health.close()
        if ahead is not None:
            await ahead.close()
        await http.aclose()

    app = FastAPI(title="attnstore gateway", lifespan=lifespan, openapi_url=None)
    app.add_middleware(_Ending)
    app.add_exception_handler(HTTPException, _refused)
    gateway = Gateway(http, dispatcher, ahead, silent_s=settings.silent_s, routes=bool(settings.nodes))
    for path in PATHS:
        app.add_api_route(path, gateway.generate, methods=["POST"], response_model=None)
    app.add_api_route("/v1/kv/presence", gateway.presence, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", gateway.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", gateway.health, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/metrics", gateway.metrics, methods=["GET"], response_model=None)
    return app


class Gateway:
    def __init__(
        self,
        http: httpx.AsyncClient,
        dispatcher: Dispatcher,
        ahead: LookAhead | None,
        *,
        silent_s: float,
        routes: bool = False,
    ) -> None:
        self._http = http
        self.silent_s = silent_s
        self._routes = routes
        self.dispatcher = dispatcher
        self.ahead = ahead
        self._metrics = Metrics(dispatcher, ahead.counters if ahead is not None else {})

    # ------------------------------------------------------------------------------------------------- generating

    async def generate(self, request: Request) -> Response:
        asked = await _read(request)
        costs = None
        if self._routes and self.ahead is not None:
            costs = await self.ahead.costs(asked)
        try:
            ticket = self.dispatcher.enter(asked, _session(request, asked.body), costs)
        except Full:
            return _error(429, "too many requests wait", {"Retry-After": "1"})
        gone = asyncio.create_task(_gone(request))
        answer = None
        try:
            answer = await self._ask(ticket, gone)
        except _Gone:
            return Response(status_code=CLIENT_CLOSED)
        except Silent:
            return _error(503, "all servers are silent", {"Retry-After": "5"})
        except httpx.TimeoutException:
            return _error(504, f"its server said nothing for {self.silent_s:g} s")
        except _Unsayable as error:
            return _error(400, f"the request's headers cannot be passed on: {error}")
        finally:
            gone.cancel()
            if answer is None:
                self.dispatcher.leave(ticket)
        if answer is None:
            return _error(502, "no server could be reached, or those that were broke off")
        return _Relay(self, ticket, answer)

    async def _ask(self, ticket: Ticket, gone: asyncio.Task[None]) -> httpx.Response | None:
        """The beginning of an answer; None: no server is there. Raises _Gone when nobody waits for it any more, Silent,
        TimeoutException when nothing comes of it, and _Unsayable."""
        broken = 0
        while True:
            server = await _unless(gone, ticket.turn)
            assert ticket.lost is not None, ticket
            try:
                answer: httpx.Response = await _unless(
                    gone, asyncio.ensure_future(self._send(server, ticket.asked)), lost=ticket.lost
                )
            except httpx.LocalProtocolError as error:
                raise _Unsayable(str(error)) from None
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                self.is_late(server)
                raise
            except (httpx.TransportError, _Lost) as error:
                log.warning("%s: %s", server.url, str(error) or type(error).__name__)
                reached = not isinstance(error, NOT_REACHED)
                broken += reached
                failure = Failure.SILENT if isinstance(error, _Lost) else Failure.BROKE_OFF
                more = self.dispatcher.again(ticket, failure if reached else Failure.UNREACHABLE)
                if not more or broken == BROKEN_MAX:
                    return None
                continue
            self.dispatcher.heard(server)
            status = answer.status_code
            is_error = _is_error(answer)
            server.errors_in_all += status >= 500
            if status in TAKES_NOTHING and self.dispatcher.others(ticket):
                log.warning("%s: answers %d", server.url, status)
                await answer.aclose()
                self.dispatcher.again(ticket, Failure.TAKES_NOTHING)
            elif is_error and len(ticket.erred) < ERRED_MAX and self.dispatcher.others(ticket, up=True):
                await answer.aclose()
                self.dispatcher.errs(ticket)
            else:
                if is_error:  # of all that were asked, so it is the request's own
                    ticket.erred.clear()
                return answer

    def is_late(self, server: Server) -> None:
        """Nothing came of an answer for long. If nothing came of any other one either, the server hangs, though it may
        say that it is well."""
        if server.heard_at <= asyncio.get_running_loop().time() - self.silent_s:
            server.failed += 1
            self.dispatcher.leave_out(server, Failure.SILENT)

    async def _send(self, server: Server, asked: Asked) -> httpx.Response:
        """The beginning of its answer. The server may close a kept connection just as the request comes: that says
        nothing of the server, and the request is sent again. Raises TransportError once a new connection fails."""
        while True:
            connection = _Connection()
            request = self._http.build_request(
                "POST",
                server.url + asked.path,
                content=asked.data,
                headers=asked.headers,
                extensions={"trace": connection.trace},
            )
            try:
                return await self._http.send(request, stream=True)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if connection.is_new:
                    raise

    # ----------------------------------------------------------------------------------------------------- others

    async def presence(self, request: Request) -> Response:
        asked = await _read(request)
        times = [asked.body.get(field, 0) for field in ("eta_s", "ttl_s")]
        for value in times:
            if type(value) not in (int, float) or not 0 <= value <= PRESENCE_S_MAX:
                shown = reprlib.repr(value)
                return _error(400, f"eta_s and ttl_s are seconds, from 0 to {PRESENCE_S_MAX:g}: {shown}")
        if self.ahead is None:
            return _error(404, "there is no store: start the gateway with --run-dir")
        eta_s, ttl_s = times
        return JSONResponse(await self.ahead.expect(asked, int(1000 * eta_s), int(1000 * ttl_s)))

    async def models(self, request: Request) -> Response:
        for server in sorted(self.dispatcher.servers, key=lambda server: not server.up):
            try:
                answer = await self._http.get(
                    f"{server.url}/v1/models",
                    headers=_passed(request.headers.raw, PASSED_DOWN),
                    timeout=CONNECT_S,
                )
            except httpx.HTTPError:
                continue
            found = Response(answer.content, answer.status_code)
            found.raw_headers += _passed(answer.headers.raw, (b"content-type",))  # httpx has unpacked it
            return found
        return _error(502, "no server could be reached")

    async def health(self) -> Response:
        servers = self.dispatcher.servers
        up = [server.url for server in servers if server.up]
        left_out = {server.url: server.left_out for server in servers if server.left_out is not None}
        return JSONResponse({"up": up, "left_out": left_out}, 200 if up else 503)

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


class _Relay(StreamingResponse):
    """A server's answer, passed through as it comes. Whatever ends it frees the server's slot."""

    def __init__(self, gateway: Gateway, ticket: Ticket, answer: httpx.Response) -> None:
        super().__init__(self._pieces(), answer.status_code)
        self.raw_headers = _passed(answer.headers.raw, PASSED_ON)
        self._gateway = gateway
        self._ticket = ticket
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(READ_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            log.warning("a client has read nothing of its answer for %.0f s: hung up", READ_S)
        except httpx.TransportError:
            pass  # it was told; the connection closes before the answer's end, which is how the client sees it
        finally:
            self._gateway.dispatcher.leave(self._ticket)
            await asyncio.shield(self._answer.aclose())  # which ends the request there, if it still runs

    async def _pieces(self) -> AsyncIterator[bytes]:
        server, ahead, dispatcher = self._ticket.server, self._gateway.ahead, self._gateway.dispatcher
        assert server is not None, self._ticket
        well = False
        try:
            async for data in self._answer.aiter_raw():
                dispatcher.heard(server)
                if not well and not _is_error(self._answer):
                    dispatcher.answered(self._ticket)
                    well = True
                yield data
        except httpx.TimeoutException:
            log.warning("an answer of %s stopped: nothing came for %g s", server.url, self._gateway.silent_s)
            self._gateway.is_late(server)
            raise
        except httpx.TransportError as error:
            log.warning("an answer of %s broke off: %s", server.url, str(error) or type(error).__name__)
            server.failed += 1
            dispatcher.leave_out(server, Failure.BROKE_OFF)
            raise
        server.answered += 1
        if not well and not _is_error(self._answer):
            dispatcher.answered(self._ticket)
        if ahead is not None and self._answer.status_code == 200:
            ahead.answered(self._ticket)


class _Ending:
    """What becomes of requests that still run when the time to end them is over, and uvicorn cancels them: a refusal,
    or, where the answer has begun, a connection that closes before its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                refusal = _error(503, "the gateway is being stopped", {"Retry-After": "1"})
                await refusal(scope, receive, send)


class _Connection:
    """What becomes of the connection of one request, as httpcore tells it."""

    is_new = False
    """It was made for this request, or could not be made."""

    async def trace(self, event: str, about: dict[str, Any]) -> None:
        self.is_new |= event == "connection.connect_tcp.started"


class _Gone(Exception):
    """Whoever asked is gone."""


class _Lost(Exception):
    """The server has gone silent."""


class _Unsayable(Exception):
    """What a client sent is no HTTP: that is no server's fault."""


async def _gone(request: Request) -> None:
    """Until it is; after its body was read, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless(
    gone: asyncio.Task[None], wanted: asyncio.Future[Any], *, lost: asyncio.Future[None] | None = None
) -> Any:
    """Its result; cancelled, and _Gone raised, when whoever asked is gone before, or _Lost when its server is."""
    try:
        ends = {gone, wanted} if lost is None else {gone, wanted, lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise _Gone if gone.done() else _Lost("silent")
        return wanted.result()
    finally:
        if not wanted.done():
            wanted.cancel()


def _is_error(answer: httpx.Response) -> bool:
    return answer.status_code >= 500 or answer.status_code in OF_THE_SERVER


def _passed(headers: list[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """Those with these names, as bytes: some may be no ASCII."""
    return [(name.lower(), value) for name, value in headers if name.lower() in names]


async def _refused(_: Request, error: Exception) -> Response:
    """No such path, or no such method of it, as well as a body that cannot be read."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _read(request: Request) -> Asked:
    """Raises HTTPException for a body that is no JSON object or late, and, once it is there, for one that is too long:
    who still writes does not read; and when whoever asked is gone."""
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size <= BODY_BYTES_MAX:
                    data += part
        if size > BODY_BYTES_MAX:
            raise HTTPException(413, LONG_BODY)
        body = await asyncio.to_thread(json.loads, data)
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED, "the client is gone") from None
    except TimeoutError:
        raise HTTPException(400, f"the body has not arrived within {BODY_S:g} s") from None
    except (ValueError, RecursionError) as problem:
        raise HTTPException(400, f"the body is no JSON: {problem}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is no JSON object")
    return Asked(request.url.path, bytes(data), body, _passed(request.headers.raw, PASSED_DOWN))


def _session(request: Request, body: dict[str, Any]) -> str:
    named = body.get("session_id") or request.headers.get("x-session-id") or body.get("user")
    return named if isinstance(named, str) else ""


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """As OpenAI's interface says it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)
