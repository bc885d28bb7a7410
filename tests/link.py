"""A link between two processes on this machine: as it is, slow, or cut. `python tests/link.py PORT_OF_WHOM` prints the
port where it listens, and does what it is told, a line each: `well`, `slow BYTES_PER_S` (each way), `cut`: nothing
passes, and nobody is told. It ends with its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

PIECE_BYTES = 16 << 10
PIECES_PER_S = 10
"""Of a slow link: what is on its way when it is told otherwise takes no longer than one."""


class Link:
    """The process, as its parent sees it."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __repr__(self) -> str:
        return f"Link({self.port})"

    def runs_on(self, core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=30)

    def well(self) -> None:
        self._tell("well")

    def slow(self, bytes_per_s: int) -> None:
        self._tell(f"slow {bytes_per_s}")

    def cut(self) -> None:
        self._tell("cut")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == line


class _Carrier:
    def __init__(self) -> None:
        self.bytes_per_s = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._free_at = {"there": 0.0, "back": 0.0}

    async def serve(self, port: int, there: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                self._carry(there, writer, "there"), self._carry(reader, back, "back"), return_exceptions=True
            )
        back.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                rate = self.bytes_per_s
                piece = await reader.read(
                    max(1, min(PIECE_BYTES, rate // PIECES_PER_S)) if rate else PIECE_BYTES
                )
                await self.is_open.wait()
                if not piece:
                    break
                if rate := self.bytes_per_s:
                    self._free_at[way] = max(self._free_at[way], clock()) + len(piece) / rate
                    await asyncio.sleep(self._free_at[way] - clock())
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()


async def _main(port: int) -> None:
    loop = asyncio.get_running_loop()
    carrier = _Carrier()
    told = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    server = await asyncio.start_server(lambda *ends: carrier.serve(port, *ends), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := (await told.readline()).decode().strip():
        carrier.bytes_per_s = int(line.split()[1]) if line.startswith("slow") else 0
        (carrier.is_open.clear if line == "cut" else carrier.is_open.set)()
        print(line, flush=True)
    loop.set_exception_handler(lambda *_: None)  # what is open is given up


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1])))
