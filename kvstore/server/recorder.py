"""A trace of what engines look up and save, written for `kvctl simulate`: keys hashed anew, times from its beginning.

The loop hands over events as they are, into a bounded buffer; hashing and formatting happen on a thread, writing
through aiofiles. What finds the buffer full is dropped and counted: the loop never waits.

    {"kvstore_trace": 1, "started": "2026-01-31T12:00:00Z"}
    {"t": 12, "w": 0, "g": 0, "n": 0, "c": 64, "b": 1048576, "ask": [17, ...]}
    {"t": 40, "w": 0, "g": 0, "n": 0, "c": 64, "b": 1048576, "save": [93, ...], "after": 17}

t: ms; w: worker; g: its engine group, of which one may look up what another loads and saves; n: namespace; c: tokens of
a chunk; b: bytes of a chunk; ask: the keys of an Acquire, or of a lookup in the directory, in their order; save: those
of a Reserve, and the key that they follow (0: none). A number stands for one key of one namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstore.core import events
from kvstore.core.state import State
from kvstore.errors import Conflict, Unavailable
from kvstore.server.logs import fields
from kvstore.types import ChunkKey, Millis

log = logging.getLogger(__name__)

KEYS_MAX = 1 << 19
"""In the buffer: 50 MB of it at most are the recording's alone, the keys are the requests' own."""
EVENTS_MAX = 1 << 16
EVENTS_PER_WRITE = 2_048
FLUSH_S = 0.2
BYTES_MAX = 1 << 30
SECONDS_MAX = 3_600.0
NUMBER_BYTES = 6
"""Of a hashed key: of a million keys two have the same with a chance of one in 500. 48 bits stay whole in JSON."""


@dataclass(slots=True)
class Recording:
    """What is told of one."""

    path: str
    running: bool = True
    lookups: int = 0
    saves: int = 0
    bytes: int = 0
    dropped: int = 0
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Noted:
    at: Millis
    worker: int
    group: tuple[str, str]
    namespace: int
    chunk_tokens: int
    chunk_bytes: int
    keys: tuple[ChunkKey, ...]
    parent: ChunkKey | None
    """Of a save; None: it is a lookup."""


class Recorder:
    """At most one recording at a time. `tap` gets the function that is to see every event, or None."""

    def __init__(
        self, state: State, tap: Callable[[Callable[[events.Event, Millis], None] | None], None]
    ) -> None:
        self._state = state
        self._tap = tap
        self.last: Recording | None = None
        self._buffer: deque[Noted] = deque()
        self._keys = 0
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"Recorder({self.last}, {len(self._buffer)} waiting)"

    async def start(self, path: str, *, bytes_max: int = 0, seconds: float = 0.0) -> Recording:
        """Raises Conflict while one is running, Unavailable where the file cannot be made, or aiofiles is missing."""
        if self._task is not None and not self._task.done():
            raise Conflict(
                "one is running",
                field="path",
                value=self.last and self.last.path,
                remedy="kvctl record --stop",
            )
        try:
            import aiofiles
        except ImportError:
            raise Unavailable(
                "aiofiles is not installed", field="path", remedy="pip install aiofiles"
            ) from None
        try:
            file = await aiofiles.open(path, "xb", opener=_private)
        except OSError as problem:
            raise Unavailable(
                f"cannot be made: {problem.strerror}",
                field="path",
                value=path,
                remedy="name a new file where the daemon may write, as in its run_dir",
            ) from None
        self.last = Recording(path)
        self._buffer.clear()
        self._keys = 0
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(
            self._run(self.last, file, bytes_max or BYTES_MAX, seconds or SECONDS_MAX)
        )
        self._tap(self.observe)
        return self.last

    async def stop(self) -> Recording | None:
        """Once all that was noted is in the file."""
        self._tap(None)
        self._stopping.set()
        if self._task is not None:
            await self._task
        return self.last

    def observe(self, event: events.Event, now: Millis) -> None:
        """On the loop: what it costs is an append."""
        if isinstance(event, events.Touched):
            start = 0
            for count in event.counts:
                self._note(event, event.keys[start : start + count], None, now)
                start += count
        elif isinstance(event, events.Acquire):
            self._note(event, event.keys, None, now)
        elif isinstance(event, events.Reserve):
            self._note(event, event.keys, event.parent, now)
        elif isinstance(event, events.Save):
            self.observe(event.reserve, now)

    def _note(
        self,
        event: events.Touched | events.Acquire | events.Reserve,
        keys: tuple[ChunkKey, ...],
        parent: ChunkKey | None,
        now: Millis,
    ) -> None:
        if not keys:
            return
        namespace = self._state.namespaces.get(event.namespace)
        worker = self._state.workers.get(event.ticket.worker)
        if namespace is None or worker is None or self.last is None:
            return
        if len(self._buffer) >= EVENTS_MAX or self._keys + len(keys) > KEYS_MAX:
            self.last.dropped += 1
            return
        self._keys += len(keys)
        self._buffer.append(
            Noted(
                now,
                event.ticket.worker,
                (worker.group.tenant, worker.group.name),
                namespace.id,
                namespace.spec.chunk_tokens,
                namespace.payload_bytes,
                keys,
                parent,
            )
        )

    async def _run(self, recording: Recording, file: _File, bytes_max: int, seconds: float) -> None:
        writer = Lines()
        until = time.monotonic() + seconds
        try:
            recording.bytes += await file.write(writer.head())
            while True:
                if not self._buffer:
                    if self._stopping.is_set():
                        recording.ended = "stopped"
                        break
                    wait_s = min(FLUSH_S, max(0.0, until - time.monotonic()))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._stopping.wait()
                noted = [self._buffer.popleft() for _ in range(min(EVENTS_PER_WRITE, len(self._buffer)))]
                self._keys -= sum(len(one.keys) for one in noted)
                if noted:
                    recording.bytes += await file.write(await asyncio.to_thread(writer.lines, noted))
                    await file.flush()  # `kvctl advise` reads along
                    recording.lookups += sum(one.parent is None for one in noted)
                    recording.saves += sum(one.parent is not None for one in noted)
                if recording.bytes >= bytes_max:
                    recording.ended = f"the file has {recording.bytes} bytes"
                    break
                if time.monotonic() >= until:
                    recording.ended = f"{seconds:g} s are over"
                    break
        except OSError as problem:
            recording.ended = f"could not be written: {problem.strerror}"
            log.error("a recording ended", extra=fields(path=recording.path, why=recording.ended))
        finally:
            self._tap(None)
            recording.dropped += len(self._buffer)
            self._buffer.clear()
            self._keys = 0
            recording.running = False
            try:
                await file.close()
            except OSError as problem:
                recording.ended = f"could not be closed: {problem.strerror}"


class Lines:
    """Writes events down; on a thread, for it alone."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._workers: dict[int, int] = {}
        self._groups: dict[tuple[str, str], int] = {}
        self._namespaces: dict[int, int] = {}
        self._began: Millis | None = None

    def head(self) -> bytes:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps({"kvstore_trace": 1, "started": started}).encode() + b"\n"

    def lines(self, noted: list[Noted]) -> bytes:
        return b"".join(map(self._line, noted))

    def _line(self, one: Noted) -> bytes:
        if self._began is None:
            self._began = one.at
        numbers = [self._number(one.namespace, key) for key in one.keys]
        what: dict[str, object] = {
            "t": one.at - self._began,
            "w": self._workers.setdefault(one.worker, len(self._workers)),
            "g": self._groups.setdefault(one.group, len(self._groups)),
            "n": self._namespaces.setdefault(one.namespace, len(self._namespaces)),
            "c": one.chunk_tokens,
            "b": one.chunk_bytes,
        }
        if one.parent is None:
            what["ask"] = numbers
        else:
            what["save"] = numbers
            what["after"] = self._number(one.namespace, one.parent) if one.parent else 0
        return json.dumps(what, separators=(",", ":")).encode() + b"\n"

    def _number(self, namespace: int, key: ChunkKey) -> int:
        """Never 0."""
        digest = hashlib.blake2b(
            key, digest_size=NUMBER_BYTES, key=self._secret, salt=namespace.to_bytes(8, "little")
        )
        return int.from_bytes(digest.digest(), "little") or 1


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class _File(Protocol):
    """What aiofiles opens."""

    async def write(self, data: bytes) -> int: ...

    async def flush(self) -> None: ...

    async def close(self) -> None: ...
