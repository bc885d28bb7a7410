"""Reads from a peer's DRAM over loopback, against iperf3 and Mooncake over TCP in the same run: plain, and with TLS.

A real `kvstored` serves 2 MiB shards; this process reads them into memory of its own as another daemon would (names,
sizes and checksums held against what came). iperf3 moves the same bytes with as many connections, checks nothing, and
what it sends is always the same buffer, in the cache. Mooncake's client (where `make bench-peers` has installed it)
gets as many values of the same size at a time out of its storage process. All take turns, round by round, and medians
are compared.

    python benchmarks/peer_reads.py [--quick] [--json]
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from data_plane import Client, Store
from harness import Goal, arguments, connected, finish
from peers import Shape, mooncake

from kvstore.client import Namespace
from kvstore.fleet.client import PeerReads, Read, Result, Wanted
from kvstore.fleet.door import PeerDoor, PeerTls
from kvstore.fleet.registry import Node
from kvstore.fleet.secret import FleetSecret
from kvstore.keys import ROOT
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey
from tests.e2e.certificates import Authority, write

SHARD = 2 << 20
CHUNKS = 96
BATCH = 16
SECRET = "a secret for this benchmark alone"
SPEC = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", SHARD),))
PLAIN_GOAL = 0.8
BOUND_S = 60.0


def main() -> int:
    chosen = arguments(__doc__).parse_args()
    if shutil.which("iperf3") is None:
        print("needs iperf3 (apt-get install iperf3)")
        return 1
    if why := mooncake.missing():
        print(f"without Mooncake: {why}")
    rounds, seconds = (3, 1.0) if chosen.quick else (5, 3.0)
    results = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)
        authority = Authority("bench")
        (folder / "ca.pem").write_bytes(authority.pem)
        ours = write(folder, "a", authority.issue("a"))
        theirs = write(folder, "b", authority.issue("b"))
        for mode in ("plain", "tls"):
            tls = PeerTls(*map(str, theirs), str(folder / "ca.pem")) if mode == "tls" else None
            options = (
                ["--peer-plaintext=true"]
                if tls is None
                else [
                    f"--peer-certificate={ours[0]}",
                    f"--peer-key={ours[1]}",
                    f"--peer-ca={folder / 'ca.pem'}",
                ]
            )
            with peer(folder / mode, folder / "secret", options) as (node, space):
                keys = fill(space)
                for streams in (1, 2):
                    with others(folder, mode, streams) as theirs_of:
                        results.append(
                            compared(mode, tls, node, space, keys, streams, rounds, seconds, theirs_of)
                        )
    for row in results:
        print(
            f"{row['mode']:5} {row['streams']} connections: {row['gb_per_s']:.2f} GB/s,"
            f" iperf3 {row['iperf3_gb_per_s']:.2f} GB/s: x {row['ratio']:.2f}"
            + (f", Mooncake {row['mooncake_gb_per_s']:.2f} GB/s" if "mooncake_gb_per_s" in row else "")
        )
    best = {mode: max(row["ratio"] for row in results if row["mode"] == mode) for mode in ("plain", "tls")}
    goals = [
        Goal("peer reads, plain, of what iperf3 carries", best["plain"], "x", PLAIN_GOAL, ">="),
        Goal("peer reads with TLS, of what iperf3 carries without", best["tls"], "x", 0.1, ">="),
    ]
    for row in results:
        if "mooncake_ratio" in row:
            what = "peer reads, plain, of what Mooncake gets over TCP"
            goals.append(Goal(what, row["mooncake_ratio"], "x", 1.0, ">="))
    return finish(__file__, chosen, results, goals, key=("mode", "streams"))


@contextmanager
def others(folder: Path, mode: str, streams: int) -> Iterator[Client | None]:
    """Mooncake's client and store, beside the one connection that it uses."""
    if mode != "plain" or streams != 1 or mooncake.missing():
        yield None
        return
    room = 2 * CHUNKS * SHARD
    store = Store("mooncake", mooncake, mooncake.start(folder, room))
    client = Client(store, Shape(SHARD, CHUNKS * SHARD, room, 64 << 20, BATCH, "c0"))
    try:
        client.answer()
        client.ask("fill", batch=BATCH)
        yield client
    finally:
        client.close()
        store.server.stop()


def gets(client: Client, seconds: float) -> float:
    """Bytes a second of Mooncake's."""
    told = client.ask("turn", action="get", batch=BATCH, begin=0.0, seconds=seconds)
    return len(told["took"]) * BATCH * SHARD / float(told["elapsed_s"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def peer(run_dir: Path, secret: Path, options: list[str]) -> Iterator[tuple[Node, Namespace]]:
    port = free_port()
    command = [
        *(sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--dram-bytes=256M"),
        *("--segment-bytes=64M", "--staging-bytes=64M", "--node-name=a", f"--fleet-secret-file={secret}"),
        *(f"--peer-address=127.0.0.1:{port}", *options),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connected(run_dir, process) as client:
            yield Node("a", b"b" * 16, f"127.0.0.1:{port}"), client.open(SPEC)
    finally:
        process.terminate()
        process.wait(BOUND_S)


def fill(space: Namespace) -> list[ChunkKey]:
    keys = space.keys(np.arange(16 * CHUNKS))
    block = np.random.default_rng(1).integers(0, 256, SHARD, dtype=np.uint8)
    for start in range(0, CHUNKS, 8):
        with space.write(keys[start : start + 8], parent=keys[start - 1] if start else ROOT) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = block
            assert batch.commit().ok
    return keys


def compared(
    mode: str,
    tls: PeerTls | None,
    node: Node,
    space: Namespace,
    keys: list[ChunkKey],
    streams: int,
    rounds: int,
    seconds: float,
    beside: Client | None,
) -> dict[str, Any]:
    secret = FleetSecret(SECRET.encode())
    reads = PeerReads(PeerDoor(secret, "b", tls), threads=streams, bytes_per_s=0)
    ours, theirs, got = [], [], []
    try:
        read_for(
            reads, node, secret, space, keys, streams, seconds / 4
        )  # connections, and memory that is there
        for _ in range(rounds):
            ours.append(read_for(reads, node, secret, space, keys, streams, seconds))
            theirs.append(iperf3(streams, seconds))
            if beside is not None:
                got.append(gets(beside, seconds))
    finally:
        reads.close(BOUND_S)
    mine, its = statistics.median(ours), statistics.median(theirs)
    found = {
        "mode": mode,
        "streams": streams,
        "gb_per_s": round(mine / 1e9, 3),
        "iperf3_gb_per_s": round(its / 1e9, 3),
        "ratio": round(mine / its, 3),
        "rounds": [round(each / 1e9, 3) for each in ours],
    }
    if got:
        best = statistics.median(got)
        found |= {"mooncake_gb_per_s": round(best / 1e9, 3), "mooncake_ratio": round(mine / best, 3)}
    return found


def read_for(
    reads: PeerReads,
    node: Node,
    secret: FleetSecret,
    space: Namespace,
    keys: list[ChunkKey],
    streams: int,
    seconds: float,
) -> float:
    """Bytes a second: `streams` reads of BATCH chunks under way all the time."""
    memory = np.zeros((streams, BATCH, SHARD), np.uint8)
    digest = secret.namespace(space.salt)
    done = [0] * streams
    until = time.monotonic() + seconds

    def go_on(stream: int) -> None:
        number = 0
        while time.monotonic() < until:
            first = (number * BATCH) % CHUNKS
            number += 1
            ended = threading.Event()

            def told(results: Any, _: Any, why: str, ended: threading.Event = ended) -> None:
                assert set(results) == {Result.OK}, why
                ended.set()

            wanted = [
                Wanted(key, [target])
                for key, target in zip(keys[first : first + BATCH], memory[stream], strict=True)
            ]
            reads.submit(Read(node, digest, wanted, time.monotonic() + BOUND_S, told))
            assert ended.wait(BOUND_S)
            done[stream] += BATCH * SHARD

    began = time.monotonic()
    threads = [threading.Thread(target=go_on, args=(stream,)) for stream in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began)


def iperf3(streams: int, seconds: float) -> float:
    port = free_port()
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", str(port), "-B", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-J", "-P", str(streams)]
            told = subprocess.run(
                [*command, "-t", str(max(1, round(seconds))), "-l", "1M"],
                capture_output=True,
                text=True,
                check=False,
            )
            if '"sum_received"' in told.stdout:
                return float(json.loads(told.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
            time.sleep(0.05)
        raise RuntimeError(told.stdout)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
