"""gRPC <-> events, for the services Store and Stats. No decision is made here and no byte of KV passes.

Request bytes are parsed inside our handlers (no deserializer is registered), so that whatever is wrong with a message
is answered by us: INVALID_ARGUMENT with field, value and remedy, and the same as an `Error` in the trailing metadata.

A worker's Attach stream (`attach.py` has what it says) is two tasks: one reads requests, one writes answers as they
become ready. A stream that is not read is held back by HTTP/2 flow control.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from kvstore import __version__, wire
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.errors import (
    BadRequest,
    DeadlineExceeded,
    Denied,
    Exhausted,
    Precondition,
    StoreError,
    Unauthenticated,
    Unavailable,
)
from kvstore.server.loop import Loop, monotonic_ms
from kvstore.transport import audit, decoding, rpc
from kvstore.transport.attach import (
    FINISH_TIMEOUT_S,
    LAST_WRITE_TIMEOUT_S,
    OUTSTANDING_MAX,
    REQUEST_TIMEOUT_S,
    STARTS_SOMETHING,
    UNSENT_BYTES_MAX,
    UNSENT_PAUSE_BYTES,
    Attached,
)
from kvstore.transport.decoding import Call
from kvstore.transport.door import TcpDoor
from kvstore.transport.lane import Lane
from kvstore.transport.rpc import CallLimit, Context, Handlers
from kvstore.types import WorkerId
from kvstore.v1 import admin_pb2, stats_pb2, store_pb2

log = logging.getLogger(__name__)

STORE_SERVICE = "kvstore.v1.Store"
STATS_SERVICE = "kvstore.v1.Stats"
HINTS_SERVICE = "kvstore.v1.Hints"
ADMIN_SERVICE = "kvstore.v1.Admin"

HELLO_TIMEOUT_S = 5.0
"""How long a new Attach stream may take to say hello."""
PEER_TIMEOUT_S = 30.0
"""How long a peer may take to accept a message, unless the configuration says otherwise."""
MESSAGE_BYTES_MAX = 4 << 20
"""Longest message on a fast lane, unless the configuration says otherwise."""
CALLS_PER_WORKER_MAX = 512
READS_PER_WORKER_MAX = 16
"""Requests of one worker that are being received: each may have message_bytes_max."""
TCP_CALLERS = "over TCP"
"""And a tenant's name: whose places those are in which its TCP callers receive their requests, all of them together."""
STRANGERS_MAX = 64
"""Attach streams that have not said who they are; each may do so in HELLO_TIMEOUT_S."""
WATCHERS_MAX = 64
WATCH_INTERVAL_MS_MIN = 100
WATCH_INTERVAL_MS_MAX = 3_600_000

Answer = Callable[[WorkerId, bytes, Context], Awaitable[bytes | None]]
"""Of a method with one request, or whose first message says it all: (caller, that message, context) -> the reply, or
None where it has written its replies itself."""
Record = Callable[[admin_pb2.RecordRequest], Awaitable[admin_pb2.RecordReply]]
Identify = Callable[[bytes], WorkerId | None]
"""The worker that a token belongs to: `DescriptorServer.worker_of`."""


class Service:
    """Handlers of Store and Stats. `tcp` says who calls over TCP; None: nobody does."""

    def __init__(
        self,
        loop: Loop,
        identify: Identify,
        *,
        boot_id: bytes,
        welcome: store_pb2.AttachWelcome,
        tcp: TcpDoor | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        discard: Callable[[int], None] = os.close,
        who: audit.Who = lambda worker: {"worker": worker},
        record: Record | None = None,
    ) -> None:
        """`discard`: see `Lane`; `who`: see the audit log; `record`: who carries out Admin.Record."""
        self.loop = loop
        self.peer_timeout_s = peer_timeout_s
        self.draining = False
        self._identify = identify
        self.who = who
        self._boot_id = boot_id
        self._welcome = welcome
        self._message_bytes_max = message_bytes_max
        self._discard = discard
        self._record_by = record
        self._started_ms = monotonic_ms()
        self._tcp = tcp
        self._streams: dict[WorkerId, Attached] = {}
        self._watchers = 0
        self._strangers = 0
        self._limit = CallLimit(calls_max=CALLS_PER_WORKER_MAX, reads_max=READS_PER_WORKER_MAX)

    def __repr__(self) -> str:
        return f"Service(streams={len(self._streams)}, watchers={self._watchers}, draining={self.draining})"

    @property
    def streams(self) -> int:
        return len(self._streams)

    def handlers(self) -> Handlers:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for service, calls in (
            (STORE_SERVICE, decoding.STORE_CALLS),
            (HINTS_SERVICE, decoding.HINTS_CALLS),
            (STATS_SERVICE, decoding.STATS_CALLS),
            (ADMIN_SERVICE, decoding.ADMIN_CALLS),
        ):
            for name, call in calls.items():
                methods[f"/{service}/{name}"] = self.method(self._unary(call), f"{call.service}/{name}")
        methods[f"/{STORE_SERVICE}/Attach"] = rpc.stream(self._attach, "Attach")
        methods[f"/{ADMIN_SERVICE}/Record"] = self.method(self._record, "Admin/Record")
        methods[f"/{STATS_SERVICE}/Explain"] = self.method(self._explain, "Stats/Explain")
        methods[f"/{STATS_SERVICE}/GetStats"] = self.method(self._get_stats, "Stats/GetStats")
        methods[f"/{STATS_SERVICE}/ListNamespaces"] = self.method(
            self._list_namespaces, "Stats/ListNamespaces"
        )
        methods[f"/{STATS_SERVICE}/WatchStats"] = self.method(self._watch_stats, "Stats/WatchStats")
        return Handlers(methods)

    def method(self, answer: Answer, name: str) -> grpc.RpcMethodHandler[Any, Any]:
        """Everything but Attach: the caller is known, and may call this ("Service/Method"), before anything of its
        request is taken."""

        async def serve(_: Any, context: Context) -> None:
            worker = self.caller(context, name)
            # All of a tenant read in the places of one worker: whoever wants to be many just connects again.
            reader = (TCP_CALLERS, self._tcp.tenant_of(worker)) if self._tcp and is_tcp(context) else worker
            with self._limit.taken(worker, reader) as reading:
                raw = await rpc.read(context, self.peer_timeout_s, reading)
                if raw is None:
                    raise BadRequest("the call ended before its request", field="message", value="absent")
                reply = await answer(worker, raw, context)
                if reply is not None:
                    await rpc.write(context, reply, self.peer_timeout_s)

        return rpc.stream(serve, name)

    # ------------------------------------------------------------------------------------------------ identity

    def caller(self, context: Context, method: str) -> WorkerId:
        """Who calls: over TCP by what proves it, on this machine by the token of its descriptor socket, which is worth
        nothing over TCP. Raises Unauthenticated; over TCP also Denied, BadRequest, Exhausted and Unavailable."""
        if self._tcp is not None and is_tcp(context):
            return self._tcp.caller(context, method)
        for key, value in context.invocation_metadata() or ():
            if key == wire.TOKEN_METADATA:
                data = value if isinstance(value, bytes) else value.encode()
                worker = self._identify(data)
                if worker is None:
                    raise Unauthenticated(
                        "unknown token: its connection was closed, or the daemon restarted",
                        field=wire.TOKEN_METADATA,
                        value=f"{len(data)} bytes",
                        remedy="say hello on the descriptor socket again",
                    )
                return worker
        raise Unauthenticated(
            "no token in the metadata",
            field=wire.TOKEN_METADATA,
            value="absent",
            remedy="say hello on the descriptor socket and send the token that it answers",
        )

    def check_tcp(self, context: Context) -> None:
        """For what asks no caller on this machine who it is. Raises Unauthenticated."""
        if self._tcp is not None and is_tcp(context):
            self._tcp.check(context)

    async def carry(self, context: Context, worker: WorkerId, size: int) -> None:
        """`size` bytes pass between a caller and the store: over TCP not faster than its tenant may."""
        if self._tcp is not None and is_tcp(context):
            await self._tcp.carry(context, worker, size)

    def check_not_draining(self) -> None:
        if self.draining:
            raise Unavailable(
                "the daemon is stopping and starts nothing new", remedy="recompute; try again later"
            )

    # --------------------------------------------------------------------------------------------------- unary

    def _unary(self, call: Call) -> Answer:
        build = call.event
        assert build is not None, "every unary call has an event"

        async def answer(worker: WorkerId, raw: bytes, context: Context) -> bytes:
            message: Any = wire.parse(call.request, raw)
            event = build(message, Ticket(worker, getattr(message, "request_id", 0)))
            if type(event) in STARTS_SOMETHING:
                self.check_not_draining()
            try:
                found = await self.loop.ask(event, time_left(context))
            except StoreError as error:
                audit.ended(event, self.who(worker), error)
                raise
            audit.ended(event, self.who(worker), found)
            packed = {"packed": True} if getattr(message, "packed_extents", False) else {}
            return call.reply(found, **packed).SerializeToString()

        return answer

    async def _explain(self, worker: WorkerId, raw: bytes, context: Context) -> bytes:
        """In steps, between which the loop serves others; replies that follow each other are one reply."""
        call = decoding.STATS_CALLS["Explain"]
        assert call.event is not None
        event: Any = call.event(wire.parse(call.request, raw), Ticket(worker))
        parts: list[bytes] = []
        while True:
            found: events.Explained = await self.loop.ask(event, time_left(context))
            parts.append(call.reply(found).SerializeToString())
            if not found.rest:
                return b"".join(parts)
            event = replace(event, session=b"", keys=found.rest)

    async def _record(self, worker: WorkerId, raw: bytes, context: Context) -> bytes:
        request = wire.parse(admin_pb2.RecordRequest, raw)
        caller = self.loop.store.state.workers.get(worker)
        try:
            if caller is None or not caller.admin or caller.remote or self._record_by is None:
                raise Denied(
                    "is for admins on the daemon's own machine, whose files it writes",
                    field="Record",
                    value=f"worker {worker}",
                    remedy="ask there as the daemon's own user, or root",
                )
            reply = await self._record_by(request)
        except StoreError as error:
            audit.ended(request, self.who(worker), error)
            raise
        audit.ended(request, self.who(worker), reply)
        return reply.SerializeToString()

    async def _get_stats(self, worker: WorkerId, raw: bytes, context: Context) -> bytes:
        wire.parse(stats_pb2.GetStatsRequest, raw)
        return (await self._stats_of(worker, time_left(context))).SerializeToString()

    async def _list_namespaces(self, worker: WorkerId, raw: bytes, context: Context) -> bytes:
        wire.parse(stats_pb2.ListNamespacesRequest, raw)
        answer: events.Stats = await self.loop.ask(events.GetStats(Ticket(worker)), time_left(context))
        reply = stats_to_proto(answer)
        for shown, row in zip(reply.namespaces, answer.values["namespaces"], strict=True):
            shown.spec.CopyFrom(wire.spec_to_proto(row["spec"]))
            shown.salt = row["salt"]
        return stats_pb2.ListNamespacesReply(namespaces=reply.namespaces).SerializeToString()

    async def _stats_of(self, worker: WorkerId, timeout_s: float) -> stats_pb2.StatsReply:
        answer: events.Stats = await self.loop.ask(events.GetStats(Ticket(worker)), timeout_s)
        reply = stats_to_proto(answer)
        disk = self.loop.disk_stats()
        if disk is not None:
            reply.ssd.index_used_bytes = disk.index.used
            reply.ssd.index_max_bytes = disk.index.bytes_max
            reply.ssd.index_sessions_bytes = disk.index.sessions
            reply.ssd.index_chunks_bytes = disk.index.chunks
            reply.ssd.index_bytes = disk.index_bytes
            reply.ssd.io_errors = disk.io_errors
            reply.ssd.no_space = disk.no_space
            reply.ssd.corrupt = disk.records_corrupt
            reply.ssd.free_bytes = disk.free_bytes
            reply.ssd.problems.extend(
                stats_pb2.Problem(what=problem.what, remedy=problem.remedy) for problem in disk.problems
            )
        reply.uptime_ms = monotonic_ms() - self._started_ms
        reply.version = __version__
        reply.boot_id = self._boot_id
        return reply

    async def _watch_stats(self, worker: WorkerId, raw: bytes, context: Context) -> None:
        message = wire.parse(stats_pb2.WatchStatsRequest, raw)
        interval_ms = decoding.number(
            "interval_ms", message.interval_ms, WATCH_INTERVAL_MS_MAX, low=WATCH_INTERVAL_MS_MIN
        )
        if self._watchers >= WATCHERS_MAX:
            raise Exhausted(f"{WATCHERS_MAX} callers watch already", remedy="ask with GetStats")
        self._watchers += 1
        try:
            while not self.draining:
                self.check_tcp(context)  # a token that was taken back ends this too
                reply = await self._stats_of(worker, REQUEST_TIMEOUT_S)
                await rpc.write(context, reply.SerializeToString(), self.peer_timeout_s)
                await asyncio.sleep(interval_ms / 1000)
        finally:
            self._watchers -= 1
        self.check_not_draining()

    # -------------------------------------------------------------------------------------------------- attach

    async def _attach(self, _: Any, context: Context) -> None:
        worker, request_id = await self._hello(context)
        stream = AttachStream(self, worker, context)
        self._joined(worker, stream, request_id)
        try:
            await stream.run()
        finally:
            self._left(worker, stream)

    def open_lane(self, worker: WorkerId) -> socket.socket:
        """A fast lane for a worker that the descriptor socket knows. Returns the worker's end, which the caller closes
        once it has handed it over. Raises Unavailable, Exhausted."""
        self.check_not_draining()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as problem:
            raise Exhausted(
                f"no socket can be made: {problem.strerror}", field="lane", remedy="attach by gRPC"
            ) from None
        lane = Lane(
            self,
            worker,
            ours,
            frame_bytes_max=self._message_bytes_max,
            ended=lambda ended: self._left(worker, ended),
            discard=self._discard,
        )
        lane.start()
        self._joined(worker, lane)
        return theirs

    def _joined(self, worker: WorkerId, stream: Attached, request_id: int = 0) -> None:
        older = self._streams.get(worker)
        self._streams[worker] = stream
        if older is not None:
            older.end(
                Precondition("a newer Attach stream of the same worker took over", remedy="keep one stream")
            )
        stream.send(store_pb2.AttachReply(request_id=request_id, welcome=self._welcome))
        self.loop.subscribe(worker, stream.push)

    def _left(self, worker: WorkerId, stream: Attached) -> None:
        self.loop.unsubscribe(worker, stream.push)
        if self._streams.get(worker) is stream:
            del self._streams[worker]

    async def _hello(self, context: Context) -> tuple[WorkerId, int]:
        """Read the stream's first message. Returns the worker and the request id to be answered with the welcome."""
        if is_tcp(context):
            raise Precondition(
                "Attach needs shared memory, which a TCP caller has not",
                remedy="use the unary calls, Get and Put",
            )
        self.check_not_draining()
        if self._strangers >= STRANGERS_MAX:
            raise Exhausted(f"{STRANGERS_MAX} streams have not said hello yet", remedy="try again later")
        self._strangers += 1
        try:
            raw = await rpc.read(context, HELLO_TIMEOUT_S)
        except DeadlineExceeded:
            raise Precondition(
                f"no hello within {HELLO_TIMEOUT_S:.0f} s", field="hello", value="absent"
            ) from None
        finally:
            self._strangers -= 1
        if raw is None:
            raise BadRequest("the stream ended before its hello", field="hello", value="absent")
        message = wire.parse(store_pb2.AttachRequest, raw)
        if message.WhichOneof("body") != "hello":
            raise BadRequest(
                "the first message of a stream must be hello", field="body", value=message.WhichOneof("body")
            )
        hello = message.hello
        if hello.boot_id != self._boot_id:
            raise Precondition(
                "the daemon restarted: say hello again",
                field="boot_id",
                value=hello.boot_id,
                remedy="connect to the descriptor socket anew and drop all mappings",
            )
        worker = self._identify(hello.token)
        if worker is None:
            raise Unauthenticated(
                "unknown token: its connection was closed",
                field="token",
                value=f"{len(hello.token)} bytes",
                remedy="say hello on the descriptor socket again",
            )
        return worker, hello.request_id

    def drain(self) -> None:
        """Tell everybody that the daemon is about to stop, and start nothing new."""
        self.draining = True
        for stream in list(self._streams.values()):
            stream.send(store_pb2.AttachReply(draining=store_pb2.Draining()))

    def close(self) -> None:
        """End all streams, telling why."""
        self.draining = True
        for stream in list(self._streams.values()):
            stream.end(Unavailable("the daemon is shutting down", remedy="recompute; attach again later"))


class AttachStream(Attached):
    """One worker's gRPC stream after its hello."""

    def __init__(self, service: Service, worker: WorkerId, context: Context) -> None:
        super().__init__(service, worker)
        self._context = context
        self._outbox: deque[tuple[bytes, bool]] = deque()
        """Serialised replies, and whether each answers a request (else it is a push)."""
        self._unsent_bytes = 0
        """In the outbox, and in the message that is being sent."""
        self._write_began: float | None = None
        """Since when the peer has not accepted the message that is being sent."""
        self._stopping = False
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._ended: asyncio.Future[StoreError] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the peer closes its side; raises the StoreError that `end` was given."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        self._watch_writer()
        try:
            await asyncio.wait((reader, writer, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            if writer.done():
                return writer.result()  # the peer is gone
            reader.result()
            with contextlib.suppress(TimeoutError):  # then the peer gets what is there
                await asyncio.wait_for(self._finish(), FINISH_TIMEOUT_S)
        finally:
            self.drop_channels()
            self._watchdog.cancel()
            reader.cancel()
            # gRPC takes one send at a time: a status sent while a message is still on its way is lost, and the peer
            # then waits for the end until its own deadline.
            self._stopping = True
            self._wake.set()
            await asyncio.wait((writer,), timeout=LAST_WRITE_TIMEOUT_S)
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def end(self, error: StoreError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def deliver(self, data: bytes, *, answers: bool) -> None:
        if self._ended.done():
            return
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.end(
                Exhausted(f"{self._unsent_bytes} bytes were not read", remedy="read the stream; attach again")
            )
            return
        self._unsent_bytes += len(data)
        self._outbox.append((data, answers))
        self._wake.set()

    async def _read(self) -> None:
        read = self._context.read
        while (raw := await read()) is not grpc.aio.EOF:
            self._outstanding += 1
            try:
                self.handle(raw)
            except StoreError as error:  # not even the request id could be read
                self.end(error)
                return
            while self._outstanding >= OUTSTANDING_MAX or self._unsent_bytes >= UNSENT_PAUSE_BYTES:
                self._written.clear()
                await self._written.wait()

    async def _write(self) -> None:
        outbox, write = self._outbox, self._context.write
        while not self._stopping:
            while outbox and not self._stopping:
                data, answers = outbox.popleft()
                self._write_began = time.monotonic()
                await write(data)
                self._write_began = None
                self._unsent_bytes -= len(data)
                self.written(answers=answers)
                self._written.set()
            self._written.set()
            self._wake.clear()
            if not outbox and not self._stopping:
                await self._wake.wait()

    def _watch_writer(self) -> None:
        """Look from time to time, which costs less than a timer for each message: a peer that accepts nothing may take
        half as long again."""
        timeout_s = self._service.peer_timeout_s
        self._watchdog = asyncio.get_running_loop().call_later(timeout_s / 2, self._watch_writer)
        if self._write_began is not None and time.monotonic() - self._write_began >= timeout_s:
            self.end(
                DeadlineExceeded(
                    f"no message was accepted for {timeout_s:g} s", remedy="read the stream, and attach again"
                )
            )

    async def _finish(self) -> None:
        """The peer sends nothing more: wait until all that it asked is answered and written."""
        while self._outstanding or self._pushes:
            self._written.clear()
            await self._written.wait()


def stats_to_proto(answer: events.Stats) -> stats_pb2.StatsReply:
    """The layout of `values` is that of core/stats.py."""
    values = answer.values
    counters = dict(values["counters"])
    namespaces = []
    for row in values["namespaces"]:
        plain = dict(row)
        del plain["spec"], plain["salt"]  # long, and for ListNamespaces alone
        for reason, times in plain.pop("by_reason").items():
            counters[f"lookups{{namespace={row['namespace_id']},reason={reason}}}"] = times
        namespaces.append(stats_pb2.NamespaceStats(**plain))
    return stats_pb2.StatsReply(
        arena=stats_pb2.Arena(**values["arena"]),
        ssd=stats_pb2.Ssd(**values["ssd"]),
        pools=[stats_pb2.PoolStats(**row) for row in values["pools"]],
        tenants=[stats_pb2.TenantStats(**row) for row in values["tenants"]],
        namespaces=namespaces,
        counters=counters,
        gauges=values["gauges"],
    )


def is_tcp(context: Context) -> bool:
    return context.peer().startswith(("ipv4:", "ipv6:"))


def time_left(context: Context) -> float:
    """Seconds that the core may take: the caller's deadline, but at most REQUEST_TIMEOUT_S."""
    left = context.time_remaining()
    return REQUEST_TIMEOUT_S if left is None else max(0.0, min(left, REQUEST_TIMEOUT_S))
