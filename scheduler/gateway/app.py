"""HTTP: the part of OpenAI's interface that is asked by prompt, answers passed through as they come.

    POST /v1/completions, /v1/chat/completions   to a server, when it is its turn; 429 when too many wait
    POST /v1/kv/presence                         {"session_id" or "prompt" or "messages", "eta_s", "ttl_s"}: who will
                                                 ask soon, because somebody types or a tool runs
    GET  /v1/models, /health, /metrics

A client that goes away is taken out of the queue, or its request ended at its server, which frees what it holds. The
session of a request is its `session_id`, the header X-Session-ID, or `user`. A server that cannot be reached, or says
that it takes nothing now (502, 503, 504), costs nobody an answer while another one is left.
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
from starlette.types import Message, Receive, Scope, Send

from kvstore.scheduler.gateway.dispatch import Asked, Dispatcher, Full, Server, Ticket
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
PASSED_ON = ("content-type", "content-encoding", "retry-after", "x-request-id")
"""Headers of answers that clients get,"""
PASSED_DOWN = (b"authorization", b"content-type", b"x-request-id", b"traceparent", b"tracestate")
"""and of requests that servers get."""
NO_BODY = f"the body is no JSON object of at most {BODY_BYTES_MAX} bytes that arrives within {BODY_S:g} s"
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
    nodes: tuple[str, ...] = ()
    """For each server: the name of the node whose store it uses, in a fleet. Requests then go where most of their
    beginning is, unless too many go there; empty: to the server that had their session last."""


def create_app(settings: Settings) -> FastAPI:
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_S),
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

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if ahead is not None:
            ahead.start()
        yield
        if ahead is not None:
            await ahead.close()
        await http.aclose()

    app = FastAPI(title="attnstore gateway", lifespan=lifespan)
    gateway = Gateway(http, dispatcher, ahead, routes=bool(settings.nodes))
    for path in PATHS:
        app.add_api_route(path, gateway.generate, methods=["POST"], response_model=None)
    app.add_api_route("/v1/kv/presence", gateway.presence, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", gateway.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", gateway.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", gateway.metrics, methods=["GET"], response_model=None)
    app.state.gateway = gateway
    return app


class Gateway:
    def __init__(
        self,
        http: httpx.AsyncClient,
        dispatcher: Dispatcher,
        ahead: LookAhead | None,
        *,
        routes: bool = False,
    ) -> None:
        self._http = http
        self._routes = routes
        self.dispatcher = dispatcher
        self.ahead = ahead
        self._metrics = Metrics(dispatcher, ahead.counters if ahead is not None else {})

    # ------------------------------------------------------------------------------------------------- generating

    async def generate(self, request: Request) -> Response:
        asked = await _read(request)
        if asked is None:
            return _error(400, NO_BODY)
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
        """The beginning of an answer; None: no server is there. Raises _Gone when nobody waits for it any more, and
        _Unsayable."""
        broken = 0
        while True:
            server = await _unless(gone, ticket.turn)
            try:
                answer: httpx.Response = await _unless(
                    gone, asyncio.ensure_future(self._send(server, ticket.asked))
                )
            except httpx.LocalProtocolError as error:
                raise _Unsayable(str(error)) from None
            except httpx.TransportError as error:
                log.warning("%s: %s", server.url, error or type(error).__name__)
                broken += not isinstance(error, NOT_REACHED)
                if not self.dispatcher.again(ticket) or broken == BROKEN_MAX:
                    return None
                continue
            if answer.status_code not in TAKES_NOTHING or not self.dispatcher.others(ticket):
                return answer
            log.warning("%s: answers %d", server.url, answer.status_code)
            await answer.aclose()
            self.dispatcher.again(ticket)

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
        if asked is None:
            return _error(400, NO_BODY)
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
        for server in self.dispatcher.servers:
            try:
                answer = await self._http.get(
                    f"{server.url}/v1/models", headers=_passed_down(request), timeout=CONNECT_S
                )
            except httpx.HTTPError:
                continue
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return _error(502, "no server could be reached")

    async def health(self) -> Response:
        up = [server.url for server in self.dispatcher.servers if server.up]
        return JSONResponse({"up": up}, 200 if up else 503)

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


class _Relay(StreamingResponse):
    """A server's answer, passed through as it comes. Whatever ends it frees the server's slot."""

    def __init__(self, gateway: Gateway, ticket: Ticket, answer: httpx.Response) -> None:
        headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
        super().__init__(self._pieces(), answer.status_code, headers)
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
        finally:
            self._gateway.dispatcher.leave(self._ticket)
            await asyncio.shield(self._answer.aclose())  # which ends the request there, if it still runs

    async def _pieces(self) -> AsyncIterator[bytes]:
        server, ahead = self._ticket.server, self._gateway.ahead
        assert server is not None, self._ticket
        try:
            async for data in self._answer.aiter_raw():
                yield data
        except httpx.TransportError as error:
            log.warning("an answer broke off: %s", error or type(error).__name__)
            self._gateway.dispatcher.broke(server)
            raise
        server.answered += 1
        if ahead is not None and self._answer.status_code == 200:
            ahead.answered(self._ticket)


class _Connection:
    """What becomes of the connection of one request, as httpcore tells it."""

    is_new = False
    """It was made for this request, or could not be made."""

    async def trace(self, event: str, about: dict[str, Any]) -> None:
        self.is_new |= event == "connection.connect_tcp.started"


class _Gone(Exception):
    """Whoever asked is gone."""


class _Unsayable(Exception):
    """What a client sent is no HTTP: that is no server's fault."""


async def _gone(request: Request) -> None:
    """Until it is; after its body was read, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], wanted: asyncio.Future[Any]) -> Any:
    """Its result; cancelled, and _Gone raised, when whoever asked is gone before."""
    try:
        await asyncio.wait({gone, wanted}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise _Gone
        return wanted.result()
    finally:
        if not wanted.done():
            wanted.cancel()


def _passed_down(request: Request) -> dict[bytes, bytes]:
    """As bytes: a header may have some that are no ASCII."""
    return {name: value for name, value in request.headers.raw if name in PASSED_DOWN}


async def _read(request: Request) -> Asked | None:
    """None: its body is no JSON object, too long or too late."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > BODY_BYTES_MAX:
                    return None
        body = await asyncio.to_thread(json.loads, data)
    except (TimeoutError, ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return Asked(request.url.path, bytes(data), body, _passed_down(request))


def _session(request: Request, body: dict[str, Any]) -> str:
    named = body.get("session_id") or request.headers.get("x-session-id") or body.get("user")
    return named if isinstance(named, str) else ""


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """As OpenAI's interface says it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)
