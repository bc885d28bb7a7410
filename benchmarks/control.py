"""The control channel: what a request and its answer cost, by the fast lane and by gRPC side by side.

Two daemons with everything on (SSD tier, leases, checksums), one with fast lanes and one without; rounds of both
alternate. `one` is one thread of one client, one request at a time: an empty pair (a heartbeat), match and acquire +
release of so many keys (releases travel with the next request, as they do in an engine), an update of a queue of 64
jobs; and without a request, in the directory: match and read of so many keys, and a get of one chunk of 2 MiB,
unbatched, with its copy, beside that copy alone. `many` is one asyncio client that keeps so many requests under way.
`crowd` repeats some with 100 further workers connected, who are idle. CPU time is per request, of this process and of
the daemon with all its threads; who waits for an answer looks for it for a moment before sleeping, which counts as this
process' CPU.

    python benchmarks/control.py [--quick] [--json] [--out [FILE]]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness import Goal, arena_ready, arguments, connect_asking, connected, finish, heading

from kvstore.client import AsyncNamespace, Client, Namespace, connect_async
from kvstore.config import DESCRIPTOR_SOCKET
from kvstore.core.events import Hint
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import receive_packet
from kvstore.types import ChunkKey
from kvstore.v1 import descriptor_pb2, store_pb2

BOUND_S = 60.0
KEYS = 512
LARGE_BYTES = 2 << 20
LARGE_CHUNKS = 24
"""Together more than the caches hold."""
SMALL = NamespaceSpec("small", b"bench", "bytes", 16, (GroupSpec("full", shard_bytes=16 << 10),))
LARGE = NamespaceSpec("large", b"bench", "bytes", 16, (GroupSpec("full", shard_bytes=LARGE_BYTES),))
CROWD = 100
LANES = ("lane", "grpc")
REST_S = {"hints for 64 jobs": 0.005}
"""Before each: queues that come faster than the daemon can plan for them are answered together, by its tick."""
GOALS = {"match 512": 1.0, "acquire + release 512": 3.0}
"""Milliseconds, median, on a quiet machine."""
SHARE_GOALS = {("look up 512", "match 512"): 0.2, ("get 2 MiB", "memcpy 2 MiB"): 1.5}
"""Time of the first, of that of the second: what asks the daemon for the same, and the copy alone."""


@dataclass
class Side:
    """One daemon, and a client of it."""

    lane: str
    run_dir: str
    pid: int
    client: Client
    space: Namespace
    large: Namespace
    asking: Namespace
    """As `space`, of a client that asks for everything."""
    keys: list[ChunkKey] = field(default_factory=list)
    large_keys: list[ChunkKey] = field(default_factory=list)
    turn: int = 0

    @property
    def cpu_s(self) -> float:
        """Of all threads that it has."""
        spent = 0
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"/proc/{self.pid}/task/{task}/schedstat") as file,
            ):
                spent += int(file.read().split()[0])
        return spent / 1e9


def main() -> int:
    options = arguments(__doc__)
    chosen = options.parse_args()
    rounds = 5 if chosen.quick else 15
    print(heading(__file__), flush=True)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(daemon(lane)) for lane in LANES]
        for side in sides:
            save(side.space, side.keys)
            save(side.large, side.large_keys)
        rows += one(sides, operations(), rounds)
        for many in (1, 16, 64):
            for side in sides:
                rows.append(asyncio.run(at_once(side, many, rounds)))
                show(rows[-1])
        with contextlib.ExitStack() as crowd:
            for side in sides:
                for _ in range(CROWD):
                    crowd.enter_context(idle_worker(side.run_dir, lane=side.lane == "lane"))
            few = {
                name: work
                for name, work in operations().items()
                if name in ("match 1", "acquire + release 64")
            }
            rows += one(sides, few, rounds, crowd=CROWD)
    goals = [
        Goal(f"{row['what']}, p50", row["p50_us"] / 1e3, "ms", GOALS[row["what"]], "<=")
        for row in rows
        if row["lane"] == "lane" and row["at_once"] == 1 and not row["crowd"] and row["what"] in GOALS
    ]
    alone = {
        row["what"]: row for row in rows if row["lane"] == "lane" and row["at_once"] == 1 and not row["crowd"]
    }
    for (one_, other), goal in SHARE_GOALS.items():
        share = alone[one_]["p50_us"] / alone[other]["p50_us"]
        goals.append(Goal(f"{one_} over {other}, p50", round(share, 3), "x", goal, "<="))
    return finish(__file__, chosen, rows, goals, key=("what", "lane", "at_once", "crowd"))


# --------------------------------------------------------------------------------------------------------- the daemons


@contextlib.contextmanager
def daemon(lane: str) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        command = (
            *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={folder}/run", f"--ssd-dir={folder}/ssd"),
            *("--ssd-bytes=1G", "--ssd-slab-bytes=64M", "--dram-bytes=256M", "--segment-bytes=64M"),
            *(f"--fast-lane={str(lane == 'lane').lower()}", "--log-level=warning"),
        )
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with (
                connected(f"{folder}/run", process) as client,
                connect_asking(f"{folder}/run", timeout_s=BOUND_S) as asking,
            ):
                arena_ready(client)
                spaces = client.open(SMALL), client.open(LARGE), asking.open(SMALL)
                side = Side(lane, f"{folder}/run", process.pid, client, *spaces)
                side.keys = side.space.keys(np.arange(16 * KEYS))
                side.large_keys = side.large.keys(np.arange(16 * LARGE_CHUNKS))
                yield side
        finally:
            process.terminate()
            process.wait(30)


def save(space: Namespace, keys: list[ChunkKey]) -> None:
    for start in range(0, len(keys), 8):
        deadline = time.monotonic() + BOUND_S
        while True:
            with space.write(
                keys[start : start + 8], parent=keys[start - 1] if start else ChunkKey(b"")
            ) as batch:
                if len(batch.granted) == len(batch.results):
                    for index in batch.granted:
                        batch.buffer(index)[:] = (start + index) % 256
                    assert batch.commit().ok
                    break
            assert time.monotonic() < deadline, batch
            time.sleep(0.01)


@contextlib.contextmanager
def idle_worker(run_dir: str, *, lane: bool) -> Iterator[None]:
    """A connection that has said hello, and where there are lanes has one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.ExitStack() as stack:
        sock.settimeout(BOUND_S)
        sock.connect(os.path.join(run_dir, DESCRIPTOR_SOCKET))
        hello = descriptor_pb2.Hello(protocol=2, client="bench")
        sock.send(descriptor_pb2.DescriptorRequest(hello=hello).SerializeToString())
        receive_packet(sock)
        if lane:
            request = descriptor_pb2.DescriptorRequest(lane=descriptor_pb2.LaneRequest())
            sock.send(request.SerializeToString())
            _, fds = receive_packet(sock, fds_max=1)
            stack.enter_context(socket.socket(fileno=fds[0]))
        yield


# ------------------------------------------------------------------------------------------------------------ measuring


def operations() -> dict[str, Callable[[Side], Any]]:
    out = np.zeros(LARGE_BYTES, np.uint8)

    def beat(side: Side) -> None:
        attachment = side.client._attachment
        call = attachment.call("heartbeat", store_pb2.HeartbeatRequest(), time.monotonic() + BOUND_S)
        call.wait()
        assert isinstance(call.answer, store_pb2.AttachReply)

    def match(count: int) -> Callable[[Side], None]:
        def work(side: Side) -> None:
            assert side.asking.match(side.keys[:count]).usable == count

        return work

    def look_up(count: int) -> Callable[[Side], None]:
        def work(side: Side) -> None:
            assert side.space.match(side.keys[:count]).usable == count

        return work

    def find(count: int) -> Callable[[Side], None]:
        def work(side: Side) -> None:
            with side.space.read(side.keys[:count]) as lease:
                assert lease.hits == count

        return work

    def acquire(count: int) -> Callable[[Side], None]:
        def work(side: Side) -> None:
            with side.asking.read(side.keys[:count]) as lease:
                assert lease.hits == count

        return work

    def get(side: Side) -> None:
        side.turn += 1
        number = side.turn % LARGE_CHUNKS
        with side.large.read([side.large_keys[number]]) as lease:
            assert lease.copy_to(0, out)
        assert out[side.turn % LARGE_BYTES] == number % 256

    source = np.zeros((LARGE_CHUNKS, LARGE_BYTES), np.uint8)
    source[:] = np.arange(LARGE_CHUNKS)[:, None]

    def memcpy(side: Side) -> None:
        side.turn += 1
        np.copyto(out, source[side.turn % LARGE_CHUNKS])

    def hints(side: Side) -> None:
        side.turn += 1
        jobs = [
            Hint(b"job %d" % (side.turn + place), place, keys=tuple(side.keys[place : place + 4]))
            for place in range(64)
        ]
        side.space.publish_queue(jobs)

    return {
        "empty pair": beat,
        **{f"match {count}": match(count) for count in (1, 64, KEYS)},
        **{f"acquire + release {count}": acquire(count) for count in (1, 64, KEYS)},
        "hints for 64 jobs": hints,
        **{f"look up {count}": look_up(count) for count in (1, 64, KEYS)},
        **{f"read {count}, no copy": find(count) for count in (1, 64, KEYS)},
        "get 2 MiB": get,
        "memcpy 2 MiB": memcpy,
    }


def one(
    sides: list[Side], work_of: dict[str, Callable[[Side], Any]], rounds: int, *, crowd: int = 0
) -> list[dict[str, Any]]:
    """One request at a time."""
    rows = []
    for what, work in work_of.items():
        times: dict[str, list[float]] = {side.lane: [] for side in sides}
        ours = dict.fromkeys(LANES, 0.0)
        theirs = dict.fromkeys(LANES, 0.0)
        for side in sides:
            for _ in range(20):
                work(side)
        each = 40 if "512" in what or "jobs" in what else 100
        for _ in range(rounds):
            for side in sides:
                used, spent = time.process_time(), side.cpu_s
                for _ in range(each):
                    time.sleep(REST_S.get(what, 0.0))
                    began = time.perf_counter()
                    work(side)
                    times[side.lane].append(time.perf_counter() - began)
                ours[side.lane] += time.process_time() - used
                theirs[side.lane] += side.cpu_s - spent
        for side in sides:
            took = times[side.lane]
            rows.append(row(what, side.lane, 1, crowd, took, ours[side.lane], theirs[side.lane], len(took)))
            show(rows[-1])
    return rows


async def at_once(side: Side, many: int, rounds: int) -> dict[str, Any]:
    """Matches of one key, `many` under way all the time."""
    each = max(10, 100 * rounds // many)
    times: list[float] = []
    knows = "directory" in inspect.signature(connect_async).parameters  # else it asks for everything anyway
    asks: dict[str, Any] = {"directory": False} if knows else {}
    async with await connect_async(side.run_dir, timeout_s=BOUND_S, **asks) as client:
        space: AsyncNamespace = await client.open(SMALL)

        async def ask(count: int) -> None:
            for _ in range(count):
                began = time.perf_counter()
                assert (await space.match(side.keys[:1])).usable == 1
                times.append(time.perf_counter() - began)

        async def all_of(count: int) -> None:
            asking: list[Awaitable[None]] = [ask(count) for _ in range(many)]
            await asyncio.gather(*asking)

        await all_of(10)
        times.clear()
        used, spent, began = time.process_time(), side.cpu_s, time.perf_counter()
        await all_of(each)
        seconds = time.perf_counter() - began
        ours, theirs = time.process_time() - used, side.cpu_s - spent
    found = row("match 1", side.lane, many, 0, times, ours, theirs, len(times))
    return found | {"what": "asyncio match 1", "per_s": round(len(times) / seconds)}


def row(
    what: str, lane: str, at_once: int, crowd: int, times: list[float], ours: float, theirs: float, count: int
) -> dict[str, Any]:
    times = sorted(times)
    return {
        "what": what,
        "lane": lane,
        "at_once": at_once,
        "crowd": crowd,
        "requests": count,
        "p50_us": round(1e6 * statistics.median(times), 1),
        "p99_us": round(1e6 * times[int(0.99 * (len(times) - 1))], 1),
        "per_s": round(count / sum(times)),
        "client_cpu_us": round(1e6 * ours / count, 1),
        "daemon_cpu_us": round(1e6 * theirs / count, 1),
    }


def show(row: dict[str, Any]) -> None:
    name = row["what"] + (f", {row['at_once']} at once" if row["at_once"] > 1 else "")
    name += f", {row['crowd']} workers" if row["crowd"] else ""
    print(
        f"{name:36} {row['lane']:5} p50 {row['p50_us']:8.1f} µs  p99 {row['p99_us']:8.1f} µs {row['per_s']:7} /s"
        f"  CPU: client {row['client_cpu_us']:7.1f} daemon {row['daemon_cpu_us']:7.1f} µs",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
