"""What a restart costs the core: seconds and memory to put 1,000,000 chunks from the index back in service.

`core.restart.restore` alone, in a fresh process: batches of 65,536 chunks as the edge hands them over (keys of 32
bytes, columns as arrays), one shard each, in slab files of 1 GiB, and 1,000 sessions of 64 entries. Reading the index
is not in it. Seconds are of this process's CPU and leave out the making of the batches; memory is the growth of
RssAnon, the keys included.

    make bench-core_restart ARGS='--quick --json'
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.benchmark import Goal, heading, report
from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.restart import ChunkBatch, Snapshot
from kvstore.core.state import DISK_SLAB_HEADER_BYTES
from kvstore.core.store import Store
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import fix_mmap_threshold
from kvstore.types import ChunkKey, SlabId

SECONDS_GOAL = 2.5
BATCH = 65_536
CHAIN = 64
SESSIONS = 1_000
SHARD_BYTES = 4096
SEGMENT_BYTES = 64 << 20
SLAB_BYTES = 1 << 30
SPEC = NamespaceSpec("llama", b"w", "layout", 64, (GroupSpec("kv", SHARD_BYTES),))


class Edge:
    """Makes a snapshot of `chunks` chunks, batch after batch, and knows how long that took."""

    def __init__(self, chunks: int, limits: Limits) -> None:
        slot_bytes = limits.disk_header_bytes + SHARD_BYTES
        self.slot_bytes = -(-slot_bytes // limits.disk_alignment) * limits.disk_alignment
        self.slots = (limits.disk_slab_bytes - DISK_SLAB_HEADER_BYTES) // self.slot_bytes
        self.chunks = chunks
        self.seconds = 0.0

    def snapshot(self) -> Snapshot:
        count = -(-self.chunks // self.slots)
        slabs = [(SlabId(number), self.slot_bytes, self.slots) for number in range(1, count + 1)]
        sessions = [
            ev.SessionRecord(
                namespace=1,
                session=b"session %d" % number,
                version=1,
                entries=tuple(
                    ev.SessionEntry(key(CHAIN * number + place), first_token=64 * place, token_count=64)
                    for place in range(CHAIN)
                ),
            )
            for number in range(SESSIONS)
        ]
        namespaces = [ev.NamespaceRecord(1, "alice", SPEC)]
        return Snapshot(1, SlabId(count + 1), slabs, namespaces, self._batches(), sessions)

    def _batches(self) -> Iterator[ChunkBatch]:
        for start in range(0, self.chunks, BATCH):
            began = time.process_time()
            numbers = range(start, min(start + BATCH, self.chunks))
            batch = ChunkBatch(
                namespace=1,
                shards=1,
                keys=[key(number) for number in numbers],
                token_count=array("i", [64]) * len(numbers),
                flags=array("i", [0]) * len(numbers),
                maker=array("i", [number % 8 for number in numbers]),
                makers=[b"worker %d, gpu %d!" % (number, number) for number in range(8)],
                slab=array("i", [1 + number // self.slots for number in numbers]),
                slot=array("i", [number % self.slots for number in numbers]),
                generation=array("Q", numbers),
                checksum=array("Q", numbers),
            )
            self.seconds += time.process_time() - began
            yield batch


def key(number: int) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest())


def restart(chunks: int) -> dict[str, float]:
    """Run this in a fresh process."""
    fix_mmap_threshold()  # as the daemon does
    slabs = -(-chunks * 2 * SHARD_BYTES // SLAB_BYTES) + 1
    limits = Limits(SEGMENT_BYTES, SEGMENT_BYTES, disk_slab_bytes=SLAB_BYTES, disk_slabs_max=slabs)
    edge = Edge(chunks, limits)
    store = Store(limits)
    snapshot = edge.snapshot()
    gc.collect()
    before = rss_anon_bytes()
    began = time.process_time()
    restored = store.restore(snapshot, 0)
    seconds = time.process_time() - began - edge.seconds
    assert (restored.chunks, restored.sessions) == (chunks, SESSIONS), restored
    del snapshot
    gc.collect()
    grown = rss_anon_bytes() - before
    began = time.process_time()
    store.start()
    store.apply(ev.Tick(), 0)
    return {
        "chunks": chunks,
        "seconds": seconds,
        "us_per_chunk": seconds / chunks * 1e6,
        "first_step_seconds": time.process_time() - began,
        "rss_anon_bytes": grown,
        "bytes_per_chunk": grown / chunks,
    }


def ceiling(chunks: int) -> dict[str, float]:
    """What any restart has to do at least: each key into a dict."""
    keys = [key(number) for number in range(chunks)]
    began = time.process_time()
    index = dict(zip(keys, range(chunks), strict=True))
    return {"chunks": len(index), "seconds": time.process_time() - began}


def rss_anon_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def in_fresh_process(part: str, chunks: int) -> Any:
    command = [sys.executable, "-P", __file__, "--part", part, str(chunks)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100,000 chunks instead of 1,000,000")
    parser.add_argument("--json", action="store_true", help="one JSON object in the last line")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        part, chunks = options.part
        print(json.dumps((restart if part == "restart" else ceiling)(int(chunks))))
        return
    count = 100_000 if options.quick else 1_000_000
    rows = {part: in_fresh_process(part, count) for part in ("restart", "ceiling")}
    print(f"{heading(__file__)}\n")
    found = rows["restart"]
    print(f"{'':34}{'CPU s':>9}{'µs a chunk':>12}{'bytes a chunk':>15}")
    print(
        f"{f'restore {count:,} chunks':34}{found['seconds']:>9.2f}{found['us_per_chunk']:>12.2f}"
        f"{found['bytes_per_chunk']:>15.0f}"
    )
    print(f"{'first step after it':34}{found['first_step_seconds']:>9.3f}")
    least = rows["ceiling"]["seconds"]
    print(f"{'(ceiling: their keys into a dict)':34}{least:>9.2f}{least / count * 1e6:>12.2f}")
    print(f"\ngoal: at most {SECONDS_GOAL} s for 1,000,000 chunks")
    if options.json:
        seconds = found["seconds"] * 1_000_000 / count
        goal = Goal("CPU time of restoring 1,000,000 chunks", seconds, "s", SECONDS_GOAL, "<=")
        print(report(__file__, [{"part": part, **row} for part, row in rows.items()], [goal]))


if __name__ == "__main__":
    main()
