"""Bytes per second through the client against a daemon of its own, as shares of a plain memcpy of the same run.

A get is read (16 keys) + copy into the caller's arrays + release; a put is write (16 fresh keys) + copy into staging
memory + commit until visible: the daemon copies once more and checksums. A fill is write + fill out of a region that
was adopted + commit: the only copy is the daemon's, by pread. Rounds of get, put, fill and memcpy alternate, so that a
machine whose speed drifts does not favour one of them; figures are medians over rounds, working sets exceed the caches.
"memcpy shm" copies out of plain shared memory, which many machines map in small pages: the ceiling of a get. CPU time
is that of this process: what an engine pays.

    python benchmarks/data_plane.py [--quick] [--json] [--protection sealed|group]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import memory
from kvstore.benchmark import Goal, report
from kvstore.client import Namespace, Region, connect
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.types import ChunkKey

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
GOALS = {
    ("get", 2 << 20): 0.6,
    ("put", 2 << 20): 0.45,
    ("fill", 2 << 20): 0.45,
    ("get", 256 << 10): 0.35,
    ("put", 256 << 10): 0.3,
    ("fill", 256 << 10): 0.3,
}
"""Share of memcpy that is to be reached at least."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument("--protection", choices=("sealed", "group"), default="sealed")
    chosen = options.parse_args()
    rounds = 12 if chosen.quick else 60
    rows = []
    for size in (2 << 20, 256 << 10):
        with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
            command = (
                *(sys.executable, "-P", "-m", "kvstore"),
                *(f"--run-dir={folder}/run", "--dram-bytes=1G", "--segment-bytes=128M"),
                *(f"--protection={chosen.protection}", "--log-level=warning"),
            )
            daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                rows += measure(f"{folder}/run", size, rounds)
            finally:
                daemon.terminate()
                daemon.wait(30)
    goals = [goal_of(row) for row in rows if (row["what"], row["chunk_bytes"]) in GOALS]
    for row in rows:
        share = f"{row['of_memcpy']:6.2f} x memcpy" if row["what"] != "memcpy" else ""
        name = f"{row['chunk_bytes'] >> 10:6} KiB  {row['what']:10}"
        print(f"{name} {row['gb_per_s']:6.1f} GB/s {row['ms']:8.3f} ms {row['cpu_ms']:8.3f} ms CPU {share}")
    if chosen.json:
        print(report(__file__, rows, goals))
    return 0


def measure(run_dir: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows for memcpy, get, put and fill of 16 chunks of `size` bytes."""
    sets = 8 if size >= 1 << 20 else 32
    """Batches that gets cycle through: together 128 MiB or more."""
    spec = NamespaceSpec(
        model=f"bench-{size}",
        weights_digest=b"bench",
        layout_fingerprint="bytes",
        chunk_tokens=16,
        groups=(GroupSpec("full", shard_bytes=size),),
    )
    source = np.random.default_rng(1).integers(0, 256, (sets, BATCH, size), dtype=np.uint8)
    target = np.zeros((BATCH, size), np.uint8)
    with connect(run_dir, timeout_s=30, staging_bytes=2 * BATCH * size) as client:
        deadline = time.monotonic() + 60
        while (arena := client.stats().arena).ready_bytes < arena.bytes:
            assert time.monotonic() < deadline, "the arena is not ready"
            time.sleep(0.1)
        space = client.open(spec)
        keys = [space.keys(np.arange(BATCH * 16) + (number << 20)) for number in range(sets)]
        fresh = iter(range(1 << 14, 1 << 18))
        for number in range(sets):
            put(space, keys[number], source[number])
            get(
                space, keys[number], target
            )  # touches the pages: figures are of a worker that has run for a while
        fd, shared = shared_copy_of(source)
        region = client.adopt(fd, source.nbytes)
        os.close(fd)
        took: dict[str, list[float]] = {"memcpy": [], "memcpy shm": [], "get": [], "put": [], "fill": []}

        def fresh_keys() -> list[ChunkKey]:
            return space.keys(np.arange(BATCH * 16) + (next(fresh) << 12))

        cpu: dict[str, list[float]] = {what: [] for what in took}
        actions: dict[str, Callable[[int], None]] = {
            "memcpy": lambda n: copy_all(target, source[n]),
            "memcpy shm": lambda n: copy_all(target, shared[n]),
            "get": lambda n: get(space, keys[n], target),
            "put": lambda n: put(space, fresh_keys(), source[n]),
            "fill": lambda n: fill(space, fresh_keys(), region, n * BATCH * size, size),
        }
        for turn in range(rounds + 4):
            for what, action in actions.items():
                n = turn % sets
                if what in ("put", "fill"):
                    # kept from evicting what the gets read: they are the more recent ones
                    get(space, keys[n], target)
                began, used = time.perf_counter(), time.process_time()
                action(n)
                if turn >= 4:
                    took[what].append(time.perf_counter() - began)
                    cpu[what].append(time.process_time() - used)
        get(space, keys[0], target)
        assert np.array_equal(target, source[0]), "wrong bytes"
        last = fresh_keys()
        fill(space, last, region, BATCH * size, size)
        get(space, last, target)
        assert np.array_equal(target, source[1]), "wrong bytes"
        assert not client.counters["saves_dropped"], client.counters
    memcpy = statistics.median(took["memcpy"])
    return [
        {
            "what": what,
            "chunk_bytes": size,
            "chunks": BATCH,
            "ms": 1e3 * statistics.median(times),
            "cpu_ms": 1e3 * statistics.median(cpu[what]),
            "gb_per_s": BATCH * size / statistics.median(times) / 1e9,
            "of_memcpy": memcpy / statistics.median(times),
            "rounds": len(times),
        }
        for what, times in took.items()
    ]


def shared_copy_of(source: Any) -> tuple[int, Any]:
    """Its descriptor, and the array."""
    fd = memory.create_memfd("bench", source.nbytes)
    shared = memory.map_shared(fd, source.nbytes, writable=True).array.reshape(source.shape)
    np.copyto(shared, source)
    return fd, shared


def copy_all(target: Any, source: Any) -> None:
    for index in range(BATCH):
        np.copyto(target[index], source[index])


def get(space: Namespace, keys: list[ChunkKey], target: Any) -> None:
    with space.read(keys) as lease:
        assert lease.hits == BATCH, lease
        for index in range(BATCH):
            assert lease.copy_to(index, target[index])


def put(space: Namespace, keys: list[ChunkKey], source: Any) -> None:
    with space.write(keys) as batch:
        assert len(batch.granted) == BATCH, batch
        for index in batch.granted:
            np.copyto(batch.buffer(index), source[index])
        assert batch.commit().ok


def fill(space: Namespace, keys: list[ChunkKey], region: Region, start: int, size: int) -> None:
    with space.write(keys, staged=False) as batch:
        assert len(batch.granted) == BATCH, batch
        batch.fill(region, [start + index * size for index in range(BATCH)])
        assert batch.commit().ok


def goal_of(row: dict[str, Any]) -> Goal:
    what, size = row["what"], row["chunk_bytes"]
    return Goal(f"{what} of 16 x {size >> 10} KiB", row["of_memcpy"], "x memcpy", GOALS[what, size], ">=")


if __name__ == "__main__":
    sys.exit(main())
