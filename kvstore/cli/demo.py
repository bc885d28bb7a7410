"""`kvctl demo`: what the store does, in half a minute, without a model and without an engine.

Starts a daemon of its own in a temporary directory, lets a few chats that share a system prompt come back turn after
turn, says of each request where its KV came from, kills the daemon half-way (kill -9) and starts it again. The KV is
synthetic: the bytes of a chunk follow from its key, so every byte that is loaded can be compared with what was saved.
"Computing" a token only takes time. Exit status 1: a byte was wrong, or something durable was lost.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.cli.command import Command
from kvstore.cli.output import say, say_json
from kvstore.cli.tables import size
from kvstore.client import Client, Hint, Namespace, connect
from kvstore.errors import StoreError, Unavailable
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason, Wait

CHUNK_TOKENS = 64
TOKEN_BYTES = 32 << 10
"""As of a model with 8 layers, 8 KV heads of 128 elements, bf16."""
SYSTEM_TOKENS = 256
TURN_TOKENS = 192
CHATS = 5
TURNS = 6
KILL_AFTER = CHATS * 3
"""Requests before the daemon is killed."""
TOKENS_PER_S = 4_000
"""How fast tokens are "computed"."""
LOOKAHEAD = 3
"""Requests that the queue shows the daemon."""
WAIT_MS = 2_000
START_S = 20.0
SSD_BYTES = 1 << 30
SETTINGS = ("--dram-bytes=96M", "--segment-bytes=32M", f"--ssd-bytes={SSD_BYTES}", "--ssd-slab-bytes=64M")
SPEC = NamespaceSpec(
    model="demo",
    weights_digest=b"kvctl.demo.v1",
    layout_fingerprint="synthetic/k,v:uint8",
    chunk_tokens=CHUNK_TOKENS,
    groups=(GroupSpec("kv", shard_bytes=CHUNK_TOKENS * TOKEN_BYTES),),
)


@dataclass(slots=True)
class Request:
    """What became of one request; counts in tokens."""

    number: int
    chat: str
    tokens: int
    dram: int = 0
    ssd: int = 0
    computed: int = 0
    load_ms: float = 0.0
    wrong_bytes: int = 0

    def __str__(self) -> str:
        loaded = self.dram + self.ssd
        where = [
            f"{count:,} from {tier}" for count, tier in ((self.dram, "DRAM"), (self.ssd, "SSD")) if count
        ]
        text = f"request {self.number:2}, chat {self.chat}: {self.tokens:5,} tokens"
        if loaded:
            text += f", {' and '.join(where)} in {self.load_ms:.0f} ms"
        text += f", {self.computed} computed"
        return text + (f"; {self.wrong_bytes:,} BYTES WRONG" if self.wrong_bytes else "")


@dataclass(slots=True)
class Summary:
    requests: int = 0
    tokens: int = 0
    dram: int = 0
    ssd: int = 0
    computed: int = 0
    ahead: int = 0
    """Tokens whose KV hints brought from SSD to DRAM before their request came."""
    compared_bytes: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    """Tokens whose KV was durable before the daemon was killed, and could not be loaded afterwards."""
    seconds: float = 0.0


@dataclass(slots=True)
class Chat:
    name: str
    tokens: list[int]
    saved: set[ChunkKey] = field(default_factory=set)
    """Keys whose commit was answered, so that each must be there or have been evicted."""


def run(_: str, options: argparse.Namespace) -> int:
    """Raises StoreError: Unavailable when the daemon cannot be started, naming what is missing."""
    for module in ("lmdb", "prometheus_client", "uvloop", "grpc_health"):
        if importlib.util.find_spec(module) is None:
            raise Unavailable(
                f"the daemon needs {module}, which is not installed",
                remedy="pip install 'attnstore[daemon]'",
            )
    with tidy_end(), directory() as folder:
        free = shutil.disk_usage(folder).free
        if free < SSD_BYTES:
            raise Unavailable(
                f"the demo needs {size(SSD_BYTES)} in {folder.parent}, of which {size(free)} are free",
                remedy="name another directory in the environment variable TMPDIR",
            )
        return Demo(folder, as_json=options.json).run()


@contextmanager
def tidy_end() -> Iterator[None]:
    """What asks the process to end (`timeout`, a closed terminal) unwinds it, so that the directory goes too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup: it is to outlive its terminal
            signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def ends_later() -> Iterator[None]:
    """What asks the process to end, does so when this is over: nothing is made that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came[:1]:
            signal.raise_signal(late)


@contextmanager
def directory() -> Iterator[Path]:
    folder: Path | None = None
    try:
        with ends_later():
            folder = Path(tempfile.mkdtemp(prefix="kvdemo-"))  # short: the path of a unix socket is bounded
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    def __init__(self, folder: Path, *, as_json: bool) -> None:
        self._folder = folder
        self._json = as_json
        self._summary = Summary()
        self._process: subprocess.Popen[bytes] | None = None
        draw = random.Random(1)
        system = [draw.randrange(1 << 16) for _ in range(SYSTEM_TOKENS)]
        self._chats = [Chat(name, list(system)) for name in "ABCDE"[:CHATS]]
        turns = [[draw.randrange(1 << 16) for _ in range(TURN_TOKENS)] for _ in range(CHATS * TURNS)]
        # Who comes back when is not the order of the chats: a cache of the last few would not do.
        order = [chat for _ in range(TURNS) for chat in draw.sample(self._chats, CHATS)]
        self._queue = list(zip(order, turns, strict=True))

    def run(self) -> int:
        begun = time.monotonic()
        self._say(
            f"a daemon in {self._folder}: 96 MiB of DRAM, {size(SSD_BYTES)} of SSD; KV of {size(TOKEN_BYTES)} a"
            f" token; tokens are computed at {TOKENS_PER_S:,} a second (pretended)"
        )
        try:
            self._start()
            with connect(self._run_dir, timeout_s=START_S) as client:
                space = client.open(SPEC)
                for number, (chat, turn) in enumerate(self._queue):
                    if number == KILL_AFTER:
                        self._kill(client)
                    self._serve(space, number, chat, turn)
                self._count_ahead(client)
        finally:
            self._stop()
        self._summary.seconds = time.monotonic() - begun
        return self._conclude()

    # ------------------------------------------------------------------------------------------------- a request

    def _serve(self, space: Namespace, number: int, chat: Chat, turn: list[int]) -> None:
        self._hint(space, number)
        chat.tokens += turn
        keys = space.keys(chat.tokens)
        request = Request(number + 1, chat.name, len(chat.tokens))
        on_ssd = {
            key
            for key, outcome, reason in zip(keys, *self._where(space, keys), strict=True)
            if outcome is not Outcome.HIT and reason is Reason.ON_SSD
        }
        loaded = self._load(space, keys, on_ssd, request)
        request.computed = len(chat.tokens) - loaded * CHUNK_TOKENS
        time.sleep(request.computed / TOKENS_PER_S)
        missing = chat.saved.intersection(keys[loaded:])
        self._summary.lost += len(missing) * CHUNK_TOKENS
        self._save(space, chat, keys, loaded)
        self._say(str(request), request)
        total = self._summary
        total.requests += 1
        total.tokens += request.tokens
        total.dram += request.dram
        total.ssd += request.ssd
        total.computed += request.computed
        total.wrong_bytes += request.wrong_bytes

    def _where(
        self, space: Namespace, keys: list[ChunkKey]
    ) -> tuple[tuple[Outcome, ...], tuple[Reason, ...]]:
        found = space.match(keys)
        return found.outcomes, found.reasons

    def _load(self, space: Namespace, keys: list[ChunkKey], on_ssd: set[ChunkKey], request: Request) -> int:
        """Leading chunks whose bytes came back."""
        buffer = np.empty(CHUNK_TOKENS * TOKEN_BYTES, np.uint8)
        begun = time.perf_counter()
        compared_s = 0.0
        with space.read(keys, wait_ms=WAIT_MS) as lease:
            lease.settled()
        loaded = 0
        with space.read(keys) as lease:
            for index in range(lease.hits):
                if not lease.copy_to(index, buffer):
                    break
                before = time.perf_counter()
                self._summary.compared_bytes += len(buffer)
                request.wrong_bytes += int(np.count_nonzero(buffer != kv(keys[index])))
                compared_s += time.perf_counter() - before
                loaded += 1
        request.load_ms = 1000 * (time.perf_counter() - begun - compared_s)
        for key in keys[:loaded]:
            if key in on_ssd:
                request.ssd += CHUNK_TOKENS
            else:
                request.dram += CHUNK_TOKENS
        return loaded

    def _save(self, space: Namespace, chat: Chat, keys: list[ChunkKey], loaded: int) -> None:
        fresh = keys[loaded:]
        if not fresh:
            return
        parent = keys[loaded - 1] if loaded else ChunkKey(b"")
        with space.write(fresh, parent=parent) as batch:
            batch.copy_many([(index, None, kv(fresh[index])) for index in batch.granted])
            outcome = batch.commit(wait=Wait.DURABLE)
        if outcome.ok:
            granted = (GrantResult.GRANTED, GrantResult.ALREADY)
            chat.saved.update(
                key for key, result in zip(fresh, batch.results, strict=True) if result in granted
            )

    def _hint(self, space: Namespace, number: int) -> None:
        """Who comes next, so that what is on SSD is in DRAM by then."""
        waiting = self._queue[number : number + LOOKAHEAD + 1]
        space.publish_queue(
            [
                Hint(b"request %d" % (number + position + 1), position, keys=tuple(space.keys(chat.tokens)))
                for position, (chat, _) in enumerate(waiting)
            ]
        )

    # ------------------------------------------------------------------------------------------------ the daemon

    @property
    def _run_dir(self) -> str:
        return str(self._folder / "run")

    def _start(self) -> None:
        log = self._folder / "log"
        with log.open("ab") as errors, ends_later():
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={self._run_dir}"),
                    *(f"--ssd-dir={self._folder / 'ssd'}", *SETTINGS, "--log-level=warning"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                connect(self._run_dir, timeout_s=0.5).close()
                return
            except StoreError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text(errors="replace").strip().splitlines()
                    raise Unavailable(
                        f"the daemon did not start: {said[-1] if said else error}",
                        remedy=f"run kvstored {' '.join(SETTINGS)} yourself and see",
                    ) from error
            time.sleep(0.05)

    def _kill(self, client: Client) -> None:
        assert self._process is not None
        self._count_ahead(client)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._say("kill -9: the daemon is gone, and what was in DRAM with it; it is started again")
        self._start()
        client.wait_connected(START_S)

    def _count_ahead(self, client: Client) -> None:
        """Before this life of the daemon ends."""
        self._summary.ahead += client.stats().counters["chunks_promoted_ahead"] * CHUNK_TOKENS

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    # --------------------------------------------------------------------------------------------------- telling

    def _say(self, text: str, row: Request | None = None) -> None:
        if not self._json:
            say(text)
        elif row is not None:
            say_json(asdict(row))

    def _conclude(self) -> int:
        total = self._summary
        right = not total.wrong_bytes and not total.lost
        if self._json:
            say_json(asdict(total))
            return 0 if right else 1
        loaded = total.dram + total.ssd
        lost = f"{total.lost:,} durable tokens were LOST" if total.lost else "nothing durable was lost"
        self._say(
            f"\n{total.requests} requests, {total.tokens:,} tokens: {loaded:,} loaded"
            f" ({loaded / total.tokens:.0%}; {total.dram:,} from DRAM, {total.ssd:,} from SSD),"
            f" {total.computed:,} computed;"
            f" hints brought {total.ahead:,} from SSD to DRAM ahead of need\n"
            f"{size(total.compared_bytes)} compared byte by byte: {total.wrong_bytes or 'none'} wrong; {lost}\n"
            f"{total.seconds:.0f} s in all. Next: kvstored --run-dir /tmp/kv --dram-bytes 1G, and beside it"
            " kvctl --run-dir /tmp/kv doctor"
        )
        return 0 if right else 1


PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(
    None
).prctl  # found before any fork: the child of a process with threads had better take no lock


def _end_with_parent() -> None:
    """Also when we are killed, no daemon is left running."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kv(key: ChunkKey) -> npt.NDArray[np.uint8]:
    """The synthetic KV of a chunk."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.Generator(np.random.SFC64(seed)).integers(
        0, 256, CHUNK_TOKENS * TOKEN_BYTES, dtype=np.uint8
    )


COMMANDS = (
    Command("demo", "a daemon of its own, chats that come back, kill -9: half a minute", run_alone=run),
)
