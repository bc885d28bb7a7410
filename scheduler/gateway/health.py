"""Whether each server is there: asked while it serves, and while it is left out until it is back.

A server that was stopped (SIGSTOP), or whose loop hangs, takes connections and says nothing. A long answer looks the
same from here, so a server is asked `GET /health`, which vLLM and our worker answer at once, also while they compute.
Any answer below 500 will do: a server need not know that path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import httpx

from kvstore.scheduler.gateway.dispatch import Dispatcher, Failure, Server

PATH = "/health"
EVERY_S = 5.0
ANSWER_S = 5.0
SILENCES_MAX = 3
"""Questions in a row that a server leaves without an answer, and says nothing else meanwhile: it is silent."""
log = logging.getLogger(__name__)


class Health:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        # Of its own: a request on a kept connection that closes is sent again, on a new one it is not.
        # A transport of its own takes no proxy from the environment: requests go to servers without one, too.
        self._http = httpx.AsyncClient(timeout=ANSWER_S, transport=httpx.AsyncHTTPTransport())
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._dispatcher.servers]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _watch(self, server: Server) -> None:
        silences = 0
        while True:
            failure = await self._ask(server)
            silences = silences + 1 if failure is Failure.SILENT else 0
            if failure is None:
                if not server.up:
                    self._dispatcher.is_back(server)
            elif not server.up or failure is not Failure.SILENT or silences >= SILENCES_MAX:
                self._dispatcher.leave_out(server, failure)
            if failure is not Failure.SILENT or not server.up:
                await self._pause(server)

    async def _pause(self, server: Server) -> None:
        """Until it is to be asked again."""
        if server.up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await server.went_out.wait()
        if not server.up:
            await asyncio.sleep(server.ask_at - asyncio.get_running_loop().time())

    async def _ask(self, server: Server) -> Failure | None:
        """None: it answers."""
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._http.get(server.url + PATH)
        except (TimeoutError, httpx.TimeoutException):
            return Failure.SILENT if server.heard_at < asked_at else None
        except httpx.HTTPError:
            return Failure.UNREACHABLE
        return Failure.TAKES_NOTHING if answer.status_code >= 500 else None
