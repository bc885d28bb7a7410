"""grpc.health.v1.Health: `Check` and `Watch`.

Not the library's servicer: that one writes to a watcher while it holds the lock which the next change needs, so that a
single watcher that reads nothing would hold up every change of health and with it the daemon's end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from kvstore import wire
from kvstore.errors import BadRequest, NotFound
from kvstore.transport import rpc
from kvstore.transport.rpc import CallLimit, Context, Handlers

SERVICE = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SSD = "kvstore.ssd"
"""What the SSD tier is called here. It may be degraded while everything else is well: DRAM serves."""
CALLS_MAX = 64
"""Checks, and watches, at one time: nobody who asks has to say who it is."""
READS_MAX = 8


class Health:
    """`""` stands for the daemon as a whole. Nothing serves until `set` says so. Called on the asyncio thread; nothing
    here waits for a peer but its own call."""

    def __init__(self, *, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._status: dict[str, int] = {"": NOT_SERVING}
        self._watchers: set[asyncio.Event] = set()
        self._ending = False
        self._limit = CallLimit(calls_max=CALLS_MAX, reads_max=READS_MAX)

    def __repr__(self) -> str:
        return f"Health({self._status}, {len(self._watchers)} watchers)"

    def handlers(self) -> Handlers:
        return Handlers(
            {
                f"/{SERVICE}/Check": rpc.stream(self._check, "Check"),
                f"/{SERVICE}/Watch": rpc.stream(self._watch, "Watch"),
            }
        )

    def set(self, service: str, status: int) -> None:
        """Ignored once the daemon is ending."""
        if not self._ending:
            self._status[service] = status
            self._changed()

    def end(self) -> None:
        """NOT_SERVING, for good."""
        self._ending = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        self._changed()

    def _changed(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def _check(self, _: Any, context: Context) -> None:
        with self._limit.taken("Check") as reading:
            service = await self._asked(context, reading)
            if service not in self._status:
                raise NotFound("no such service here", field="service", value=service)
            await self._tell(context, self._status[service])

    async def _watch(self, _: Any, context: Context) -> None:
        with self._limit.taken("Watch") as reading:
            service = await self._asked(context, reading)
            changed = asyncio.Event()
            self._watchers.add(changed)
            told: int | None = None
            try:
                while True:
                    changed.clear()
                    status = self._status.get(service, UNKNOWN)
                    if status != told:
                        await self._tell(context, status)
                        told = status
                    await changed.wait()
            finally:
                self._watchers.discard(changed)

    async def _asked(self, context: Context, reading: asyncio.Semaphore) -> str:
        raw = await rpc.read(context, self._peer_timeout_s, reading)
        if raw is None:
            raise BadRequest("the call ended before its request", field="message", value="absent")
        return wire.parse(health_pb2.HealthCheckRequest, raw).service

    async def _tell(self, context: Context, status: Any) -> None:
        reply = health_pb2.HealthCheckResponse(status=status)
        await rpc.write(context, reply.SerializeToString(), self._peer_timeout_s)
