"""The REMOTE tier beside the bare Redis client, on one redis-server on loopback in one run; and what hits in DRAM
notice of a Redis that hangs.

Throughput: records of 2 MiB, four at a time in a pipeline, by as many threads. The bare client moves the same bytes
with SET and GET and looks at none of them; the tier describes, verifies and copies them from and into slots. DRAM
hits: one thread reads 16 hot chunks of 64 KiB of a real daemon all the time, another asks for chunks that nobody has,
while Redis is well, and then while it is stopped (SIGSTOP).

    python benchmarks/remote.py [--quick] [--json]
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import numpy.typing as npt
import redis
import xxhash
from harness import Goal, arguments, finish

from kvstore.client import Client, Namespace, connect
from kvstore.core.events import ChunkAbout, ChunksFetched, ChunksStored, Event, FetchChunks, StoreChunks
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.tiers.remote.backend import Book
from kvstore.tiers.remote.redis_store import RedisStore
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.types import ChunkKey, DiskResult, Extent, Extents, NamespaceId, OpId, Outcome, SegmentId

RECORD = 2 << 20
PER_OP = 4
THREADS = 4
RATIO_GOAL = 0.7
P99_GOAL = 1.2
DIGEST = b"d" * 32
CHUNK = 64 << 10
HOT = 16
SPEC = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", CHUNK),))


def main() -> int:
    chosen = arguments(__doc__).parse_args()
    if shutil.which("redis-server") is None:
        print("needs redis-server (apt-get install redis-server)")
        return 2
    total = (128 if chosen.quick else 512) << 20
    rounds = 3 if chosen.quick else 5
    with tempfile.TemporaryDirectory(prefix="kvs-") as name, server(Path(name)) as (url, pid):
        results: list[dict[str, Any]] = []
        for salt in (b"", b"s" * 32):
            results += throughput(url, salt, total, rounds)
        results.append(dram_hits(Path(name), url, pid, 3.0 if chosen.quick else 10.0))
    for row in results:
        if row["what"] == "dram_hits":
            print(
                f"DRAM reads: p99 {row['well_p99_ms']:.2f} ms while Redis is well, {row['hung_p99_ms']:.2f} ms while it"
                f" hangs, ratio {row['ratio']:.2f}; longest {row['hung_max_ms']:.1f} ms"
            )
        else:
            print(
                f"{row['what']:5} {'signed' if row['signed'] else 'unsigned':8} {row['tier_gb_per_s']:.2f} GB/s, bare"
                f" client {row['bare_gb_per_s']:.2f} GB/s, ratio {row['ratio']:.2f}"
            )
    goals = [
        Goal(f"{row['what']} against the bare client", row["ratio"], "x", RATIO_GOAL, ">=")
        for row in results
        if row["what"] != "dram_hits" and not row["signed"]
    ]
    goals.append(
        Goal(
            "p99 of DRAM hits while Redis hangs", results[-1]["ratio"], "x of when it is well", P99_GOAL, "<="
        )
    )
    return finish(__file__, chosen, results, goals, key=("what", "signed"))


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        client = redis.Redis(port=port)
        until = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0", process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()


class Memory:
    """Slots as the arena has them."""

    def __init__(self, size: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        return self.array[offset : offset + length]


def throughput(url: str, salt: bytes, total: int, rounds: int) -> list[dict[str, Any]]:
    """Rounds of the one and of the other in turns; medians."""
    count = total // RECORD
    memory = Memory(total)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def done(event: Event) -> None:
        if isinstance(
            event, ChunksStored | ChunksFetched
        ):  # the tier also says that it has read what was forgotten
            answers.put(event)

    book = Book("")
    store = RedisStore(url, book, salt=salt, ttl_s=600, timeout_s=30.0)
    tier = RemoteTier(
        store,
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

    def extents(numbers: range) -> Extents:
        return Extents.of(
            Extent(SegmentId(1), number * RECORD, RECORD, number, 1, checksums[number]) for number in numbers
        )

    def ops(write: bool) -> float:
        began = time.perf_counter()
        parts = [range(start, min(start + PER_OP, count)) for start in range(0, count, PER_OP)]
        for number, part in enumerate(parts):
            mine = tuple(keys[part.start : part.stop])
            if write:
                effect: Any = StoreChunks(
                    OpId(number), "remote", NamespaceId(1), DIGEST, mine, (about,) * len(mine), extents(part)
                )
            else:
                effect = FetchChunks(
                    OpId(number), "remote", NamespaceId(1), DIGEST, mine, (None,) * len(mine), extents(part)
                )
            tier.submit(effect)
        for _ in parts:
            answer = answers.get(timeout=120)
            if isinstance(answer, ChunksStored):
                assert set(answer.results) == {DiskResult.OK}, answer
            else:
                assert isinstance(answer, ChunksFetched), answer
                assert {chunk.result for chunk in answer.chunks} == {DiskResult.OK}, answer
        return total / (time.perf_counter() - began) / 1e9

    results = []

    def bare(write: bool) -> float:
        starts = iter(range(0, count, PER_OP))
        lock = threading.Lock()

        def run() -> None:
            client = redis.Redis.from_url(url)
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                pipe = client.pipeline(transaction=False)
                for number in range(start, min(start + PER_OP, count)):
                    if write:
                        data = memory.array[number * RECORD : (number + 1) * RECORD].data
                        pipe.set(f"bare {number}", data)
                    else:
                        pipe.get(f"bare {number}")
                pipe.execute()

        threads = [
            threading.Thread(target=run) for _ in range(THREADS if not write else max(1, THREADS // 2))
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return total / (time.perf_counter() - began) / 1e9

    for what, write in (("write", True), ("read", False)):
        pairs = [(ops(write), bare(write)) for _ in range(rounds)]
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(mine / other for mine, other in pairs)
        results.append(
            {
                "what": what,
                "signed": bool(salt),
                "tier_gb_per_s": ours,
                "bare_gb_per_s": theirs,
                "ratio": ratio,
            }
        )
    tier.close(5.0)
    redis.Redis.from_url(url).flushall()
    return results


def dram_hits(folder: Path, url: str, pid: int, seconds: float) -> dict[str, Any]:
    run_dir = folder / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--dram-bytes=64M"),
            *("--segment-bytes=16M", f"--remote-url={url}", "--remote-writes=write-through"),
            *("--remote-deadline-ms=1000", "--log-level=error"),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        client = _connected(str(run_dir))
        with client:
            return _measure(client, pid, seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
        process.terminate()
        process.wait(30)


def _connected(run_dir: str) -> Client:
    until = time.monotonic() + 60
    while True:
        try:
            return connect(run_dir, timeout_s=30.0)
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _measure(client: Client, pid: int, seconds: float) -> dict[str, Any]:
    space = client.open(SPEC)
    keys = space.keys(np.arange(16 * HOT))
    with space.write(keys) as batch:
        for index in batch.granted:
            batch.buffer(index)[:] = np.full(CHUNK, index, np.uint8)
        batch.commit()
    asking = threading.Event()
    asking.set()
    asker = threading.Thread(target=_ask, args=(space, asking))
    asker.start()
    _reads(space, keys, 0.5)
    well = _reads(space, keys, seconds)
    os.kill(pid, signal.SIGSTOP)
    hung = _reads(space, keys, seconds)
    os.kill(pid, signal.SIGCONT)
    well += _reads(space, keys, seconds)
    asking.clear()
    asker.join()
    p99: Callable[[list[float]], float] = lambda times: 1_000 * float(np.quantile(times, 0.99))  # noqa: E731
    return {
        "what": "dram_hits",
        "signed": False,
        "well_p99_ms": p99(well),
        "hung_p99_ms": p99(hung),
        "hung_max_ms": 1_000 * max(hung),
        "ratio": p99(hung) / p99(well),
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
    """For conversations that nobody has: each has to be looked up."""
    number = 0
    while going.is_set():
        number += 1
        tokens = np.arange(16 * 8)
        tokens[0] = (1 << 31) + number
        space.match(space.keys(tokens))
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
