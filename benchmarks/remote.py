"""The REMOTE tier beside the bare client of the same store, on one server on loopback in one run; what hits in DRAM
notice of a Redis that hangs, and a good caller of an attack.

`redis`, `s3` (moto): records of 2 MiB, four at a time, by as many threads. The bare client (redis-py with hiredis;
obstore) moves the same bytes and looks at none of them; the tier describes, verifies and copies them from and into
slots, and packs four into one object of an S3. `hits`: one thread reads 16 hot chunks of 64 KiB of a real daemon all
the time, another asks for chunks that nobody has and saves others (20 a second), while Redis is well and in turns while
it is killed, stopped (SIGSTOP), full (maxmemory), behind a link of 1 KB/s, wiped, or cut off without a word.
`attack`: the same reads, and look-ups by a caller over TLS with a token, while attackers come to the same port:
handshakes that end in nothing, plaintext, no token, wrong tokens. They are on other machines: here on a core that this
process does not use (--attackers-core), with so many attempts a second.

    python benchmarks/remote.py [--parts redis s3 hits attack] [--faults killed stopped filled slow wiped cut] [--quick]
                                [--json]
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import numpy as np
import numpy.typing as npt
import redis
import xxhash
from harness import Goal, arguments, finish

from kvstore import wire
from kvstore.client import Client, Namespace, connect
from kvstore.core.events import ChunkAbout, ChunksFetched, ChunksStored, Event, FetchChunks, StoreChunks
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.tiers.remote.backend import Backend, Book
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.types import ChunkKey, DiskResult, Extent, Extents, NamespaceId, OpId, Outcome, SegmentId
from kvstore.v1 import store_pb2
from tests.distributed.servers import BUCKET, S3
from tests.e2e import certificates
from tests.link import Link

RECORD = 2 << 20
PER_OP = 4
THREADS = 4
RATIO_GOAL = 0.7
P99_GOAL = 1.2
ATTACKED_GOAL = 1.5
ATTEMPTS_PER_S = 100
DIGEST = b"d" * 32
CHUNK = 64 << 10
HOT = 16
SPEC = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", CHUNK),))
PARTS = ("redis", "s3", "hits", "attack")
FAULTS = ("killed", "stopped", "filled", "slow", "wiped", "cut")
SLOW_BYTES_PER_S = 1_000
TOKEN = "token of the worker of this benchmark"
ACCESS = """[[identity]]
name = "worker"
tenant = "bench"
roles = ["worker"]
token_file = "worker.token"
"""


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    options.add_argument(
        "--attackers-core", type=int, default=None, help="where they run; not told: where this does"
    )
    options.add_argument(
        "--attack", nargs=2, metavar=("ADDRESS", "PER_S"), help="be an attacker, until ended"
    )
    chosen = options.parse_args()
    if chosen.attack:
        attack(chosen.attack[0], float(chosen.attack[1]))
    if shutil.which("redis-server") is None:
        print("needs redis-server (apt-get install redis-server)")
        return 2
    total = (64 if chosen.quick else 512) << 20
    rounds = 3 if chosen.quick else 7
    seconds = 2.0 if chosen.quick else 10.0
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        if "redis" in chosen.parts:
            with Redis(folder) as server:
                for salt in (b"", b"s" * 32):
                    results += throughput(RedisUnderTest(server.url), salt, total, rounds)
        if "s3" in chosen.parts:
            results += on_s3(total // 2, rounds)
        if "hits" in chosen.parts:
            results += dram_hits(
                folder, seconds / 2 if chosen.quick else seconds, chosen.faults, chosen.attackers_core
            )
        if "attack" in chosen.parts:
            results += attacked(folder, seconds, chosen.attackers_core)
    for row in results:
        print(
            ", ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else str(value)
                for name, value in row.items()
            )
        )
    return finish(__file__, chosen, results, [goal_of(row) for row in results if not row["signed"]], key=KEY)


KEY = ("part", "what", "signed")


def goal_of(row: dict[str, Any]) -> Goal:
    what, ratio = row["what"], row["ratio"]
    match row["part"]:
        case "hits":
            return Goal(f"p99 of {what}", ratio, "x of when it is well", P99_GOAL, "<=")
        case "attack":
            return Goal(f"p99 of {what} under attack", ratio, "x of without", ATTACKED_GOAL, "<=")
        case store:
            return Goal(f"{store}: {what} against the bare client", ratio, "x", RATIO_GOAL, ">=")


class Redis:
    """A server on a port that stays."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port)
        self._folder = folder
        self.start()

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(self._folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Memory:
    """Slots as the arena has them."""

    def __init__(self, size: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        return self.array[offset : offset + length]


class RedisUnderTest:
    name = "redis"

    def __init__(self, url: str) -> None:
        self._url = url

    def backend(self, book: Book, salt: bytes) -> Backend:
        from kvstore.tiers.remote.redis_store import RedisStore

        return RedisStore(self._url, book, salt=salt, ttl_s=600, timeout_s=30.0)

    def bare(self) -> Callable[[list[tuple[str, Any]]], None]:
        """A client's way to put (name, data), or to get (name, None)."""
        client = redis.Redis.from_url(self._url)

        def move(records: list[tuple[str, Any]]) -> None:
            pipe = client.pipeline(transaction=False)
            for name, data in records:
                if data is None:
                    pipe.get(name)
                else:
                    pipe.set(name, data)
            pipe.execute()

        return move

    def empty(self) -> None:
        redis.Redis.from_url(self._url).flushall()


class S3UnderTest:
    name = "s3"

    def __init__(self, s3: S3) -> None:
        self._s3 = s3

    def backend(self, book: Book, salt: bytes) -> Backend:
        from kvstore.tiers.remote.object_store import ObjectStore

        return ObjectStore(
            f"s3://{BUCKET}/cache", book, salt=salt, ttl_s=600, timeout_s=30.0, store=self._s3.store()
        )

    def bare(self) -> Callable[[list[tuple[str, Any]]], None]:
        import obstore

        store = self._s3.store()

        def move(records: list[tuple[str, Any]]) -> None:
            for name, data in records:
                if data is None:
                    obstore.get(store, name).bytes()
                else:
                    obstore.put(store, name, data)

        return move

    def empty(self) -> None:
        pass


def on_s3(total: int, rounds: int) -> list[dict[str, Any]]:
    s3 = S3()
    try:
        os.environ.update(s3.environment)
        return throughput(S3UnderTest(s3), b"", total, rounds)
    finally:
        s3.close()


def throughput(
    of: RedisUnderTest | S3UnderTest, salt: bytes, total: int, rounds: int
) -> list[dict[str, Any]]:
    """Rounds of the one and of the other in turns; medians."""
    count = total // RECORD
    memory = Memory(total)
    answers: queue.SimpleQueue[ChunksStored | ChunksFetched] = queue.SimpleQueue()

    def done(event: Event) -> None:
        # The tier also says that it has read what was forgotten
        if isinstance(event, ChunksStored | ChunksFetched):
            answers.put(event)

    book = Book("")
    tier = RemoteTier(
        of.backend(book, salt),
        book,
        memory,
        done=done,
        threads=THREADS,
        lookup_s=30.0,
        deadline_s=60.0,
        bytes_per_s=0,
    )
    checksums = [
        xxhash.xxh3_64_intdigest(memory.array[n * RECORD : (n + 1) * RECORD].data) for n in range(count)
    ]
    keys = [ChunkKey(b"key %d" % number) for number in range(count)]
    about = ChunkAbout(64, False, (b"m" * 16,), ChunkKey(b""))
    wheres: dict[int, tuple[object, ...]] = {}
    parts = [range(start, min(start + PER_OP, count)) for start in range(0, count, PER_OP)]

    def extents(numbers: range) -> Extents:
        return Extents.of(
            Extent(SegmentId(1), number * RECORD, RECORD, number, 1, checksums[number]) for number in numbers
        )

    def ours(write: bool) -> float:
        began = time.perf_counter()
        for number, part in enumerate(parts):
            mine = tuple(keys[part.start : part.stop])
            common: Any = OpId(number), "remote", NamespaceId(1), DIGEST, mine
            if write:
                tier.submit(StoreChunks(*common, (about,) * len(mine), extents(part)))
            else:
                tier.submit(FetchChunks(*common, wheres.get(number) or (None,) * len(mine), extents(part)))
        for _ in parts:
            answer = answers.get(timeout=120)
            if isinstance(answer, ChunksStored):
                assert set(answer.results) == {DiskResult.OK}, answer
                wheres[int(answer.op)] = answer.wheres
            else:
                assert {chunk.result for chunk in answer.chunks} == {DiskResult.OK}, answer
        return total / (time.perf_counter() - began) / 1e9

    def bare(write: bool) -> float:
        left = iter(parts)
        lock = threading.Lock()
        moves = [of.bare() for _ in range(THREADS if not write else max(1, THREADS // 2))]

        def run(move: Callable[[list[tuple[str, Any]]], None]) -> None:
            while True:
                with lock:
                    part = next(left, None)
                if part is None:
                    return
                at = memory.array
                move([(f"bare {n}", at[n * RECORD : (n + 1) * RECORD].data if write else None) for n in part])

        threads = [threading.Thread(target=run, args=(move,)) for move in moves]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return total / (time.perf_counter() - began) / 1e9

    results = []
    for what, write in (("write", True), ("read", False)):
        pairs = [(ours(write), bare(write)) for _ in range(rounds)]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        results.append(
            {
                "part": of.name,
                "what": what,
                "signed": bool(salt),
                "tier_gb_per_s": mine,
                "bare_gb_per_s": theirs,
                "ratio": statistics.median(one / other for one, other in pairs),
            }
        )
    tier.close(5.0)
    of.empty()
    return results


def dram_hits(folder: Path, seconds: float, faults: Sequence[str], core: int | None) -> list[dict[str, Any]]:
    """A row for each of `faults`: periods without and with it in turns."""
    rows = []
    with Redis(folder) as server, Link(server.port) as link:
        link.runs_on(core)
        for fault in faults:
            remote = (f"--remote-url=redis://127.0.0.1:{link.port}/0", "--remote-writes=write-through")
            with daemon(folder / f"hits-{fault}", *remote, "--remote-deadline-ms=1000") as client:
                rows.append(_measure(client, seconds, fault, *_happens(fault, server, link)))
            server.client.flushall()
    return rows


def _happens(fault: str, server: Redis, link: Link) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """How it begins, and how it ends."""
    match fault:
        case "killed":
            return server.kill, server.start
        case "stopped":
            return server.stop, server.go_on
        case "filled":
            limit = partial(server.client.config_set, "maxmemory")
            return partial(limit, "1mb"), partial(limit, "0")
        case "slow":
            return partial(link.slow, SLOW_BYTES_PER_S), link.well
        case "wiped":
            return server.client.flushall, lambda: None
        case _:
            return link.cut, link.well


@contextmanager
def daemon(run_dir: Path, *options: str) -> Iterator[Client]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--dram-bytes=64M"),
            *("--segment-bytes=16M", "--log-level=error", *options),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        with _connected(str(run_dir)) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def attacked(folder: Path, seconds: float, core: int | None) -> list[dict[str, Any]]:
    """Periods without and with attackers in turns, all of one kind together."""
    (folder / "worker.token").write_text(TOKEN)
    (folder / "worker.token").chmod(0o600)
    (folder / "access.toml").write_text(ACCESS)
    authority = certificates.Authority("bench")
    certificate, key = certificates.write(folder, "a", authority.issue("a"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    tcp = (f"--tcp-address={address}", f"--tls-certificate={certificate}", f"--tls-key={key}")
    times: dict[tuple[str, bool], list[float]] = {}
    with daemon(folder / "attack", *tcp, f"--access-file={folder / 'access.toml'}") as client:
        space, keys = _hot(client)
        caller = _caller(address, authority.pem)
        for attacked in (False, True) * 3:
            attackers = _attackers(address, core) if attacked else None
            try:
                _reads(space, keys, 0.5)
                for what, take in (
                    ("DRAM reads", lambda: _reads(space, keys, seconds / 4)),
                    ("look-ups over TLS", lambda: _calls(caller, seconds / 4)),
                ):
                    times.setdefault((what, attacked), []).extend(take())
            finally:
                if attackers is not None:
                    attackers.kill()
                    attackers.wait()
    found = []
    for what in ("DRAM reads", "look-ups over TLS"):
        calm, under = (_p99(times[what, attacked]) for attacked in (False, True))
        found.append(
            {
                "part": "attack",
                "what": what,
                "signed": False,
                "calm_p99_ms": calm,
                "attacked_p99_ms": under,
                "ratio": under / calm,
            }
        )
    return found


def _attackers(address: str, core: int | None) -> subprocess.Popen[bytes]:
    def elsewhere() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    command = [sys.executable, "-P", __file__, "--attack", address, str(ATTEMPTS_PER_S)]
    return subprocess.Popen(command, preexec_fn=elsewhere)


def attack(address: str, per_s: float) -> None:
    """Until it is ended: each attempt is another, and is refused."""
    host, port = address.split(":")
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    held: list[socket.socket] = []
    number = 0
    while True:
        number += 1
        with suppress(OSError):
            raw = socket.create_connection((host, int(port)), timeout=1.0)
            match number % 4:
                case 0:
                    raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))
                case 1:
                    raw.sendall(os.urandom(512))
                case 2:
                    held.append(raw)  # says nothing
                    if len(held) > 64:
                        held.pop(0).close()
                    raw = None
                case _:
                    raw = trusting.wrap_socket(raw)
                    raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _call_with("a wrong token"))
                    raw.settimeout(0.2)
                    raw.recv(4_096)
            if raw is not None:
                raw.close()
        time.sleep(1.0 / per_s)


def _call_with(token: str) -> bytes:
    """Frames of HTTP/2: settings, and the headers of a call with this token, none of them indexed."""

    def said(name: str, value: str) -> bytes:
        return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    headers = b"".join(
        said(*pair)
        for pair in (
            (":method", "POST"),
            (":scheme", "https"),
            (":path", "/kvstore.v1.Stats/GetStats"),
            (":authority", "a"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("authorization", f"Bearer {token}"),
        )
    )
    frame = len(headers).to_bytes(3, "big") + b"\x01\x04\0\0\0\x01" + headers
    body = b"\0\0\x05\0\x01\0\0\0\x01" + bytes(5)
    return b"\0\0\0\x04\0\0\0\0\0" + frame + body


def _caller(address: str, authority: bytes) -> Callable[[], Any]:
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    def ask(method: str, request: Any) -> Any:
        call = channel.unary_unary(f"/kvstore.v1.{method}")
        return call(request.SerializeToString(), metadata=metadata, timeout=30.0)

    opened = ask("Store/Open", store_pb2.OpenRequest(namespace=wire.spec_to_proto(SPEC)))
    number = store_pb2.OpenReply.FromString(opened).namespace_id
    request = store_pb2.MatchRequest(namespace_id=number, keys=[b"%032d" % n for n in range(HOT)])
    return lambda: ask("Store/Match", request)


def _calls(caller: Callable[[], Any], seconds: float) -> list[float]:
    times = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        caller()
        times.append(time.perf_counter() - began)
    return times


def _p99(times: list[float]) -> float:
    return 1_000 * float(np.quantile(times, 0.99))


def _connected(run_dir: str) -> Client:
    until = time.monotonic() + 60
    while True:
        try:
            return connect(run_dir, timeout_s=30.0)
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _hot(client: Client) -> tuple[Namespace, list[ChunkKey]]:
    space = client.open(SPEC)
    keys = space.keys(np.arange(16 * HOT))
    with space.write(keys) as batch:
        for index in batch.granted:
            batch.buffer(index)[:] = np.full(CHUNK, index, np.uint8)
        batch.commit()
    return space, keys


def _measure(
    client: Client, seconds: float, fault: str, begins: Callable[[], Any], ends: Callable[[], Any]
) -> dict[str, Any]:
    space, keys = _hot(client)
    asking = threading.Event()
    asking.set()
    asker = threading.Thread(target=_ask, args=(space, asking))
    asker.start()
    _reads(space, keys, 0.5)
    well: list[float] = []
    struck: list[float] = []
    for _ in range(3):
        well += _reads(space, keys, seconds / 3)
        begins()
        struck += _reads(space, keys, seconds / 3)
        ends()
        _reads(space, keys, 1.0)  # it is found again
    asking.clear()
    asker.join()
    return {
        "part": "hits",
        "what": f"DRAM reads, Redis {fault}",
        "signed": False,
        "well_p99_ms": _p99(well),
        "struck_p99_ms": _p99(struck),
        "struck_max_ms": 1_000 * max(struck),
        "ratio": _p99(struck) / _p99(well),
    }


def _reads(space: Namespace, keys: Any, seconds: float) -> list[float]:
    out = np.empty(CHUNK, np.uint8)
    times = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        with space.read(keys) as lease:
            assert set(lease.outcomes) == {Outcome.HIT}, lease
            for index in range(len(keys)):
                lease.copy_to(index, out)
        times.append(time.perf_counter() - began)
    return times


def _ask(space: Namespace, going: threading.Event) -> None:
    """For conversations that nobody has, so that each has to be looked up, and saves the beginning of it."""
    number = 0
    while going.is_set():
        number += 1
        tokens = np.arange(16 * 8)
        tokens[0] = (1 << 31) + number
        keys = space.keys(tokens)
        space.match(keys)
        with space.write(keys[:1]) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = number % 256
            if batch.granted:
                batch.commit()
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
