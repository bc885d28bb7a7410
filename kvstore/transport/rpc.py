"""One gRPC call from its headers to its status: every wait for the peer is bounded, and so is what it can make us hold.

All methods are served as streams of bytes, whatever they are to the peer (on the wire there is no difference). So a
handler runs before a byte of the request is taken: who has no token is refused without, and reading the request and
writing the reply are ours, with deadlines. What gRPC itself reads and writes for a unary method has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any

import grpc
import grpc.aio

from kvstore import wire
from kvstore.errors import DeadlineExceeded, Exhausted, StoreError
from kvstore.server.logs import fields

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
"""How long a peer may take to accept the status of its call; after that it gets none."""
DETAILS_MAX = 1_500
"""Characters of a status' details: headers that are longer than 8 KiB are refused by peers."""

INTERNAL = "internal error in the daemon; its log has the details"

STATUS = {code.value[0]: code for code in grpc.StatusCode}
"""By number: the numbers of errors.Code are those of gRPC."""

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]


class Handlers(grpc.GenericRpcHandler):
    """Method handlers by full name; messages pass as bytes."""

    def __init__(self, methods: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._methods = methods

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._methods.get(handler_call_details.method)


class CallLimit:
    """What one caller may have going at a time: `calls_max` calls, of which `reads_max` receive their request. The rest
    wait their turn in their peers' buffers."""

    def __init__(self, *, calls_max: int, reads_max: int) -> None:
        self._calls_max = calls_max
        self._reads_max = reads_max
        self._calls: dict[Hashable, int] = {}
        self._reading: dict[Hashable, asyncio.Semaphore] = {}
        self._readers: dict[Hashable, int] = {}
        """Calls that may read in these places."""

    def __repr__(self) -> str:
        return f"CallLimit({sum(self._calls.values())} calls of {len(self._calls)} callers)"

    @contextlib.contextmanager
    def taken(self, caller: Hashable, reader: Hashable | None = None) -> Iterator[asyncio.Semaphore]:
        """A place for one call, and what to hold while its request is read: of `reader`, where several callers receive
        their requests in the places of one. Raises Exhausted."""
        calls = self._calls.get(caller, 0)
        if calls >= self._calls_max:
            raise Exhausted(f"{calls} calls of this caller are under way already", remedy="try again later")
        reader = caller if reader is None else reader
        self._calls[caller] = calls + 1
        self._readers[reader] = self._readers.get(reader, 0) + 1
        reading = self._reading.setdefault(reader, asyncio.Semaphore(self._reads_max))
        try:
            yield reading
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller]
            self._readers[reader] -= 1
            if not self._readers[reader]:
                del self._readers[reader], self._reading[reader]


async def read(context: Context, timeout_s: float, reading: asyncio.Semaphore | None = None) -> bytes | None:
    """The next message, None at the end. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s), reading or contextlib.nullcontext():
            raw = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(
            f"no message came for {timeout_s:g} s", remedy="send what was begun, or cancel it"
        ) from None
    return None if raw is grpc.aio.EOF else raw


class NotAccepted(DeadlineExceeded):
    """`pending` still runs, and a status that is sent beside a message is lost: see `answering`."""

    def __init__(self, pending: asyncio.Future[None], timeout_s: float) -> None:
        super().__init__(f"no message was accepted for {timeout_s:g} s", remedy="read what the daemon sends")
        self.pending = pending


def _let_go(task: asyncio.Future[Any]) -> None:
    """Cancelled; should it fail instead, that is not logged as an error that somebody missed."""
    task.cancel()
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())


async def write(context: Context, data: bytes, timeout_s: float) -> None:
    """Send a message. Raises NotAccepted when the peer does not take it in time."""
    pending = asyncio.ensure_future(context.write(data))
    try:
        accepted, _ = await asyncio.wait((pending,), timeout=timeout_s)
    except asyncio.CancelledError:
        _let_go(pending)
        raise
    if not accepted:
        raise NotAccepted(pending, timeout_s)
    pending.result()


async def abort(context: Context, error: StoreError) -> None:
    """End the call with the error's status, text and Error message. Raises what gRPC raises to leave a handler."""
    ending = asyncio.ensure_future(
        context.abort(STATUS[error.code.value], str(error)[:DETAILS_MAX], wire.error_metadata(error))
    )
    try:
        told, _ = await asyncio.wait((ending,), timeout=STATUS_TIMEOUT_S)
        if told:
            ending.result()
        raise asyncio.CancelledError  # as when the peer is gone: it takes nothing, not even this
    finally:
        _let_go(ending)


def answering(handler: Handler, name: str) -> Handler:
    """`handler` with its StoreErrors turned into statuses; anything else is a bug: logged, and INTERNAL to the peer."""

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except NotAccepted as problem:
            error: StoreError = problem
            # All that the call held is given back by now. Should the peer read on, it is told why the call ended.
            await asyncio.wait((problem.pending,), timeout=STATUS_TIMEOUT_S)
            _let_go(problem.pending)
        except StoreError as problem:
            error = problem
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("a handler failed", extra=fields(call=name))
            error = StoreError(INTERNAL)
        await abort(context, error)

    return answer


def stream(handler: Handler, name: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A method whose handler reads and writes all messages itself, with `read` and `write`."""
    return grpc.stream_stream_rpc_method_handler(answering(handler, name))
