"""The gateway's process, until it is ended."""

from __future__ import annotations

import contextlib
import resource
import socket
from types import FrameType

import uvicorn

from kvstore.scheduler.gateway.app import Settings, create_app


def serve(settings: Settings, *, host: str, port: int, drain_s: int) -> None:
    """Ends the process with status 3, and a line in the log, where it cannot listen there."""
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a request that runs has two; a shell allows 1,024 in all
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=drain_s,
    )
    _Server(config).run()


class _Server(uvicorn.Server):
    """Ends at once at the second signal, and with status 0: uvicorn's own `handle_exit` has signals raised once more at
    the end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn does neither
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()
