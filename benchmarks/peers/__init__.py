"""The stores that `benchmarks/data_plane.py` compares: one module each, every one with the same few names.

    GIVES                                  in one line: what it does, and what it does not do
    PYTHON                                 optional: the interpreter with what its client imports
    missing() -> str                       why it cannot take part here; "" when it can
    start(folder, room_bytes, **options)   starts it, without waiting; returns a Server
    Client(address, shape)                 in a process of its own (`client.py`); waits until the server answers
        plan(numbers)                      what can be made ready before the clock runs: keys, and where bytes are
        put(plan), get(plan)               all values of a plan, in one batch if the store has batches
        check(plan)                        after a get: the bytes are those that were put
        clear()                            optional: drop all there is, before the first put that counts
        wait(plan)                         optional: until what was put can be found
        forget(plan)                       some time after a put that will not be read: make room, where nothing is
                                           evicted, or not in an order that spares what is read
        close()

A module imports what is foreign inside its Client only, so that the benchmark itself needs no foreign package.
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PEERS_PYTHON = str(Path(__file__).resolve().parents[2] / ".cache/peers-venv/bin/python")
"""Of the environment that `make bench-peers` makes."""
PAGE = 4096
START_S = 90.0
"""How long a server may take until it answers."""


@dataclass(frozen=True)
class Shape:
    """What one client puts and gets."""

    value_bytes: int
    hot_bytes: int
    """Together the values that gets cycle through: more than the caches hold."""
    room_bytes: int
    """What the store has room for."""
    source_bytes: int
    """The memory that puts read from."""
    batch_max: int
    client: str
    """Clients of one server have names of their own, and with them keys of their own."""

    @property
    def hot(self) -> int:
        return self.hot_bytes // self.value_bytes


@dataclass
class Server:
    """Processes, and whatever their client needs to find them."""

    address: dict[str, Any]
    processes: Sequence[subprocess.Popen[bytes]] = field(default_factory=tuple)

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self.processes)  # CPUCLOCK_SCHED

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Item(NamedTuple):
    key: Any
    value: npt.NDArray[np.uint8]
    out: npt.NDArray[np.uint8]


class ByKey:
    """What clients of stores with keys and values have in common: arrays of the caller's own to put from and to get
    into. Value n is a window of one random buffer, and no two windows are equal."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._source = np.random.default_rng(1).integers(0, 256, shape.source_bytes, dtype=np.uint8)
        self.outs = np.zeros((shape.batch_max, shape.value_bytes), np.uint8)

    def key(self, number: int) -> Any:
        return f"{self.shape.client}:{number}"

    def plan(self, numbers: Sequence[int]) -> list[Item]:
        return [
            Item(self.key(number), self.value(number), out)
            for number, out in zip(numbers, self.outs, strict=False)
        ]

    def value(self, number: int) -> npt.NDArray[np.uint8]:
        size = self.shape.value_bytes
        start = number * (size + PAGE) % (self.shape.source_bytes - size) // PAGE * PAGE
        return self._source[start : start + size]

    def check(self, plan: list[Item]) -> None:
        for item in plan:
            assert np.array_equal(item.value, item.out), f"wrong bytes for {item.key}"

    def forget(self, plan: list[Item]) -> None:
        """The store evicts by itself."""

    def close(self) -> None:
        """Nothing to do."""


def attempts(what: str) -> Iterator[None]:
    """Goes on until the caller breaks out, or for START_S."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
    raise TimeoutError(f"{what} does not answer within {START_S:.0f} s")


def not_installed(*programs: str | Path) -> str:
    """Why something that needs these programs cannot take part; "" when all are there."""
    absent = [str(program) for program in programs if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed (make bench-peers)" if absent else ""


def no_library(name: str) -> str:
    """Why something that links this shared library cannot take part; "" when it can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"{name} not installed (make bench-peers)"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connected(path: str) -> socket.socket:
    """To the server that listens on this unix socket, sooner or later."""
    for _ in attempts(path):
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(path)
        except OSError:
            stream.close()
        else:
            return stream
    raise AssertionError("attempts() ends by raising")


def line(stream: socket.socket) -> bytes:
    """The next line that the server sends, without its end, and not a byte more: what follows may be a value."""
    while (end := stream.recv(256, socket.MSG_PEEK).find(b"\n")) < 0:
        if not stream.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the server has closed the connection")
    return receive(stream, bytearray(end + 1)).rstrip()


def receive(stream: socket.socket, into: Any) -> Any:
    """Fill `into` with the next bytes."""
    view = memoryview(into).cast("B")
    while view:
        count = stream.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the server has closed the connection")
        view = view[count:]
    return into
