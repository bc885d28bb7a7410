"""grpc.health.v1.Health: `Check` and `Watch`.

Not the library's servicer: that one writes to a watcher while it holds the lock which the next change needs, so that a
single watcher that reads nothing would hold up every change of health and with it the daemon's end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvstore import wire
from kvstore.errors import Exhausted, NotFound
from kvstore.service import Context, Handlers, answering, write

SERVICE = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCHERS_MAX = 64


class Health:
    """`""` stands for the daemon as a whole. Called on the asyncio thread; nothing here waits for a peer but its own
    call."""

    def __init__(self, *, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._status: dict[str, int] = {"": SERVING}
        self._watchers: set[asyncio.Event] = set()
        self._ending = False

    def __repr__(self) -> str:
        return f"Health({self._status}, {len(self._watchers)} watchers)"

    def handlers(self) -> Handlers:
        return Handlers(
            {
                f"/{SERVICE}/Check": grpc.unary_unary_rpc_method_handler(answering(self._check, "Check")),
                f"/{SERVICE}/Watch": grpc.unary_stream_rpc_method_handler(answering(self._watch, "Watch")),
            }
        )

    def set(self, service: str, status: int) -> None:
        """Ignored once the daemon is ending."""
        if not self._ending:
            self._status[service] = status
            self._tell()

    def end(self) -> None:
        """NOT_SERVING, for good."""
        self._ending = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def _check(self, raw: bytes, _: Context) -> bytes:
        service = wire.parse(health_pb2.HealthCheckRequest, raw).service
        if service not in self._status:
            raise NotFound("no such service here", field="service", value=service)
        return _reply(self._status[service])

    async def _watch(self, raw: bytes, context: Context) -> None:
        service = wire.parse(health_pb2.HealthCheckRequest, raw).service
        if len(self._watchers) >= WATCHERS_MAX:
            raise Exhausted(f"{WATCHERS_MAX} callers watch already", remedy="ask with Check")
        changed = asyncio.Event()
        self._watchers.add(changed)
        told: int | None = None
        try:
            while True:
                changed.clear()
                status = self._status.get(service, UNKNOWN)
                if status != told:
                    await write(context, _reply(status), self._peer_timeout_s)
                    told = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)


def _reply(status: Any) -> bytes:
    return health_pb2.HealthCheckResponse(status=status).SerializeToString()
