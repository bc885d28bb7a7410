"""A connection that does not wait for ever: uvicorn bounds how long an idle one may live, but not how long a client may
take to say what it wants, and connections are counted."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""In which the head of a request has to arrive, from its first byte on, or from the connection's beginning."""


class Connection(H11Protocol):
    """Closed when the head of a request takes longer than `HEAD_S`."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, self._is_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if not self._answering:
            self.transport.close()
