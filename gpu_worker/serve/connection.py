"""A connection that does not wait for ever: uvicorn bounds how long an idle one may live, but not how long a client may
take to say what it wants, or to read what it is told; and connections are counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""In which the head of a request has to arrive, from its first byte on, or from the connection's beginning."""
WRITE_S = 60.0
"""In which a client has to read what waits for it."""
_BUSY = json.dumps(
    {
        "error": {
            "message": "the worker has too many connections",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    }
).encode()


class Connection(H11Protocol):
    """Closed when the head of a request takes longer than `HEAD_S`, and when nothing is read of what was sent for
    `WRITE_S`. One too many (`limit_concurrency`) is told so as any error is."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._app: Any = None
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    @property
    def app(self) -> Any:
        """What answers the request that comes next."""
        return _busy if self._most is not None and len(self.connections) > self._most else self._app

    @app.setter
    def app(self, app: Any) -> None:
        self._app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the kernel does not take is noticed
        self._late = self.loop.call_later(HEAD_S, self._is_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._is_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._is_read()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _is_late(self) -> None:
        self._late = None
        if not self._answering:
            self.transport.close()


async def _busy(scope: Any, receive: Any, send: Any) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(_BUSY)),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BUSY, "more_body": False})
