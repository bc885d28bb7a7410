"""Readers without a message against writers at full speed: real processes, judged byte by byte.

    python tests/stress/readers.py --seconds 300

The arena holds a quarter of the keys, so that slots and rows of the directory change hands all the time. Readers look
chunks up in the directory and copy them; every word of a chunk tells its key. Meanwhile readers are stopped in the
middle of anything and go on later, chunks are forgotten, and the daemon is killed and started again. Prints one line of
JSON; exit status 1: wrong bytes, or nothing was read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.client import Client, Namespace, connect
from kvstore.client.directory import PublishedExtents
from kvstore.errors import StoreError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.option_types import above_zero
from kvstore.types import ChunkKey

SHARD = 32 << 10
SPEC = NamespaceSpec("readers", b"w", "test:bytes", 16, (GroupSpec("kv", SHARD, shard_count=2),))
ARENA = 8 << 20
KEYS = 4 * ARENA // (2 * SHARD)
BATCH_MAX = 24
GRACE_S = 60.0
"""On a busy machine the time may be over before the first chunk is read."""
SETTINGS = ("--dram-bytes", str(ARENA), "--segment-bytes", str(1 << 20), "--staging-bytes", str(4 << 20))


def key_of(number: int) -> ChunkKey:
    """Half of them have 32 bytes, the others 36."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return ChunkKey(digest if number % 2 else digest + b"long")


def word_of(number: int, shard: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{number}/{shard}".encode()).digest()[:8], "little")


def connected(run_dir: str, ends: float) -> tuple[Client, Namespace] | None:
    while time.monotonic() < ends:
        with suppress(StoreError):
            client = connect(run_dir, timeout_s=5.0)
            with suppress(StoreError):
                return client, client.open(SPEC)
            client.close()
        time.sleep(0.05)
    return None


def write(run_dir: str, seed: int, ends: float) -> None:
    chance = random.Random(seed)
    made = connected(run_dir, ends + GRACE_S)
    if made is None:
        return
    client, space = made
    once = False
    while time.monotonic() < ends or not once:
        once = True
        first = chance.randrange(KEYS)
        numbers = [(first + n) % KEYS for n in range(chance.randrange(1, BATCH_MAX))]
        with suppress(StoreError):
            if chance.random() < 0.05:
                space.forget(keys=[key_of(number) for number in numbers], timeout_s=2.0)
            if chance.random() < 0.5:
                made_of = [
                    np.full(SHARD // 8, word_of(number, shard), np.uint64)
                    for number in numbers
                    for shard in (0, 1)
                ]
                space.put([key_of(number) for number in numbers], made_of, timeout_s=2.0)
                continue
            with space.write([key_of(number) for number in numbers], timeout_s=2.0) as batch:
                for index in batch.granted:
                    for shard in range(2):
                        batch.buffer(index, shard).view(np.uint64)[:] = word_of(numbers[index], shard)
                batch.commit(timeout_s=2.0)
    client.close()


def read(run_dir: str, seed: int, ends: float, results: Any, canary: bool) -> None:
    if canary:  # what the comparisons are good for: without them this program finds wrong bytes
        PublishedExtents.intact = lambda self, rows: True  # type: ignore[method-assign]
    chance = random.Random(seed)
    counts = {"chunks": 0, "void": 0, "wrong": 0, "reads": 0, "misses": 0}
    out = np.zeros((BATCH_MAX, 2, SHARD), np.uint8)
    words = [[word_of(number, shard) for shard in range(2)] for number in range(KEYS)]
    keys = [key_of(number) for number in range(KEYS)]
    made = connected(run_dir, ends + GRACE_S)
    if made is None:
        return
    client, space = made
    while time.monotonic() < ends or (not counts["chunks"] and time.monotonic() < ends + GRACE_S):
        first = chance.randrange(KEYS)
        numbers = [(first + n) % KEYS for n in range(chance.randrange(1, BATCH_MAX))]
        with space.read([keys[number] for number in numbers], any_order=True, promote=False) as lease:
            hits = list(lease._ranks)
            counts["reads"] += 1
            counts["misses"] += len(numbers) - len(hits)
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.003)
            if chance.random() < 0.5:
                pieces = [(index, shard, 0, out[index, shard]) for index in hits for shard in range(2)]
                good = hits if lease.copy_many(pieces) else []
            else:
                good = [i for i in hits if all(lease.copy_to(i, out[i, s], shard=s) for s in range(2))]
            counts["void"] += len(hits) - len(good)
            for index in good:
                for shard in range(2):
                    wanted = words[numbers[index]][shard]
                    counts["wrong"] += bool((out[index, shard].view(np.uint64) != wanted).any())
                counts["chunks"] += 1
    counts["pinned_late"] = client.counters["reads_pinned_late"]
    results.put(counts)
    client.close()


def start(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvstore", "--run-dir", str(folder / "run"), *SETTINGS],
            stdout=log,
            stderr=log,
        )


def run(
    seconds: float,
    seed: int,
    *,
    kills: bool = True,
    readers: int = 3,
    writers: int = 2,
    canary: bool = False,
) -> dict[str, int]:
    """What the readers counted in all."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-readers-"))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    run_dir = str(folder / "run")
    chance = random.Random(seed)
    daemon = start(folder)
    ends = time.monotonic() + seconds
    processes = [spawn.Process(target=write, args=(run_dir, seed + n, ends)) for n in range(writers)]
    reading = [
        spawn.Process(target=read, args=(run_dir, seed - n, ends, results, canary)) for n in range(readers)
    ]
    total = {"kills": 0, "stops": 0}
    try:
        for process in (*processes, *reading):
            process.start()
        next_kill = time.monotonic() + 8 + 8 * chance.random()
        while time.monotonic() < ends - 1:
            victim = chance.choice(reading)
            if victim.pid is not None and victim.is_alive():
                os.kill(victim.pid, signal.SIGSTOP)
                time.sleep(chance.random() * 0.1)
                os.kill(victim.pid, signal.SIGCONT)
                total["stops"] += 1
            time.sleep(chance.random() * 0.05)
            if kills and time.monotonic() > next_kill and ends - time.monotonic() > 6:
                daemon.kill()
                daemon.wait()
                daemon = start(folder)
                total["kills"] += 1
                next_kill = time.monotonic() + 8 + 8 * chance.random()
        for _ in reading:
            for name, count in results.get(timeout=3 * GRACE_S).items():
                total[name] = total.get(name, 0) + count
        for process in (*processes, *reading):
            process.join(30)
        assert daemon.poll() is None, (folder / "log").read_text()[-2000:]
    finally:
        for process in (*processes, *reading):
            if process.is_alive():
                process.kill()
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=above_zero, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--no-kills", action="store_true", help="leave the daemon alone")
    parser.add_argument("--canary", action="store_true", help="readers compare nothing: has to fail")
    told = parser.parse_args()
    total = run(told.seconds, told.seed, kills=not told.no_kills, canary=told.canary)
    print(json.dumps({"seed": told.seed, **total}), flush=True)
    return int(total.get("wrong", 0) > 0 or not total.get("chunks"))


if __name__ == "__main__":
    raise SystemExit(main())
