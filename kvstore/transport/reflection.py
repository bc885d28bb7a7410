"""grpc.reflection.v1alpha: the library's answers, by our rules of who may make us wait and hold how much."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore import wire
from kvstore.transport import rpc
from kvstore.transport.rpc import CallLimit, Context, Handlers

SERVICE: str = reflection.SERVICE_NAME
CALLS_MAX = 16


class Reflection:
    def __init__(
        self,
        services: Sequence[str],
        *,
        peer_timeout_s: float,
        check: Callable[[Context], None] = lambda _: None,
    ) -> None:
        """`check` raises for whom it should not answer."""
        self._check = check
        # its stubs have it awaited, where it is iterated
        self._answers: Any = reflection.aio.ReflectionServicer((*services, SERVICE))
        self._peer_timeout_s = peer_timeout_s
        self._limit = CallLimit(calls_max=CALLS_MAX, reads_max=CALLS_MAX)

    def handlers(self) -> Handlers:
        name = "ServerReflectionInfo"
        return Handlers({f"/{SERVICE}/{name}": rpc.stream(self._serve, name)})

    async def _serve(self, _: Any, context: Context) -> None:
        self._check(context)
        with self._limit.taken(SERVICE):
            async for reply in self._answers.ServerReflectionInfo(self._questions(context), context):
                await rpc.write(context, reply.SerializeToString(), self._peer_timeout_s)

    async def _questions(self, context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await rpc.read(context, self._peer_timeout_s)) is not None:
            yield wire.parse(reflection_pb2.ServerReflectionRequest, raw)
