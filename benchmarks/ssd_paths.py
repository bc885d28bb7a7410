"""Bytes per second of each path of the SSD tier, beside what the disk and memcpy give in the same run.

The tier alone, without daemon and client: ops of 16 shards from and into a segment of DRAM. `write` is WriteRecords
until answered (page cache, or the disk with direct I/O); `+ durable` adds the WriteIndex that syncs the slab and
commits the 16 chunks; `read` is ReadRecords with all verification, from the page cache and, after dropping it, from
the disk.

    python benchmarks/ssd_paths.py [--quick] [--json] [--folder DIR]
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import format
from kvstore.benchmark import report
from kvstore.config import StoreConfig
from kvstore.core.events import (
    ChunkRecord,
    CreateSlab,
    DiskDone,
    NamespaceRecord,
    ReadRecords,
    SlabReady,
    WriteIndex,
    WriteRecords,
)
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.ports import RealDisk
from kvstore.tiers.ssd import DiskEffect, SsdTier
from kvstore.types import ChunkKey, DiskPlace, DiskResult, Extent, OpId, Record, SegmentId, SlabId

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
SETS = 8
"""Batches that are cycled through: 256 MiB of 2 MiB shards."""
DIGEST = b"n" * 32


class Memory:
    def __init__(self, size: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        return self.bytes[offset : offset + length]


class Bench:
    def __init__(self, folder: str, shard_bytes: int, *, direct: bool) -> None:
        self.shard_bytes = shard_bytes
        slot = format.slot_bytes(shard_bytes, direct=direct)
        slots = SETS * BATCH
        slab_bytes = format.slab_file_bytes(slot, slots)
        config = StoreConfig(
            ssd_dir=folder,
            ssd_bytes=slab_bytes + (64 << 20),
            ssd_slab_bytes=slab_bytes,
            ssd_index_bytes=32 << 20,
            ssd_direct_io=direct,
        )
        self.memory = Memory(shard_bytes * (slots + BATCH))
        self.memory.bytes[:] = np.random.default_rng(1).integers(0, 256, self.memory.bytes.size, np.uint8)
        self.sums = [
            xxhash.xxh3_64_intdigest(self.memory.view(SegmentId(0), shard_bytes * number, shard_bytes))
            for number in range(slots)
        ]
        self.answers: queue.SimpleQueue[SlabReady | DiskDone] = queue.SimpleQueue()
        self.tier = SsdTier(config, self.memory, RealDisk(), done=self.answers.put)
        list(self.tier.open().chunks)
        assert isinstance(self.ask(CreateSlab(OpId(1), SlabId(0), slot, slots)), SlabReady)
        spec = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", shard_bytes),))
        self.ask(WriteIndex(OpId(1), (), (NamespaceRecord(1, "bench", spec),)))
        self.slab = f"{folder}/{format.slab_name(0)}"

    def ask(self, effect: DiskEffect) -> SlabReady | DiskDone:
        self.tier.submit(effect)
        answer = self.answers.get(timeout=60)
        assert isinstance(answer, SlabReady) or set(answer.results) == {DiskResult.OK}, answer
        return answer

    def rows(self, batch: int) -> tuple[tuple[Record, ...], tuple[Extent, ...], tuple[DiskPlace, ...]]:
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        records = tuple(
            Record(DIGEST, ChunkKey(b"%032d" % number), 0, self.shard_bytes, self.sums[number])
            for number in numbers
        )
        return records, self.extents(batch), tuple(DiskPlace(SlabId(0), number, 1) for number in numbers)

    def extents(self, batch: int) -> tuple[Extent, ...]:
        size = self.shard_bytes
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        return tuple(Extent(SegmentId(0), size * number, size, 0, 1) for number in numbers)

    def write(self, batch: int) -> None:
        records, extents, places = self.rows(batch)
        self.ask(WriteRecords(OpId(1), records, extents, places))

    def commit(self, batch: int) -> None:
        records, _, places = self.rows(batch)
        chunks = tuple(
            ChunkRecord(1, record.key, 16, 0, b"", (place,), (record.checksum,))
            for record, place in zip(records, places, strict=True)
        )
        self.ask(WriteIndex(OpId(1), (SlabId(0),), chunks=chunks))

    def write_durable(self, batch: int) -> None:
        self.write(batch)
        self.commit(batch)

    def read(self, batch: int) -> None:
        records, _, places = self.rows(batch)
        self.ask(ReadRecords(OpId(1), records, places, self.extents(SETS)))

    def copy(self, batch: int) -> None:
        size = BATCH * self.shard_bytes
        target = self.memory.view(SegmentId(0), SETS * size, size)
        np.copyto(target, self.memory.view(SegmentId(0), batch * size, size))

    def forget_pages(self) -> None:
        fd = os.open(self.slab, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure(folder: str, shard_bytes: int, *, direct: bool, rounds: int) -> list[dict[str, Any]]:
    bench = Bench(folder, shard_bytes, direct=direct)
    try:
        for batch in range(SETS):
            bench.write_durable(batch)  # the file's blocks are no longer fresh ones
        took: dict[str, list[float]] = {}

        def timed(what: str, action: Callable[[int], None], batch: int) -> None:
            began = time.perf_counter()
            action(batch)
            took.setdefault(what, []).append(time.perf_counter() - began)

        for turn in range(rounds):
            batch = turn % SETS
            timed("memcpy", bench.copy, batch)
            timed("write", bench.write, batch)
            timed("commit after it", bench.commit, batch)
            timed("write + durable", bench.write_durable, batch)
            if not direct:
                timed("read, page cache", bench.read, batch)
            bench.forget_pages()
            timed("read, disk", bench.read, batch)
    finally:
        bench.tier.close(10)
    size = BATCH * shard_bytes
    return [
        {
            "what": what,
            "io": "direct" if direct else "buffered",
            "shard_bytes": shard_bytes,
            "ms": 1e3 * statistics.median(times),
            "gb_per_s": size / statistics.median(times) / 1e9,
            "rounds": len(times),
        }
        for what, times in took.items()
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument("--folder", help="where to write; a folder of the disk in question")
    chosen = options.parse_args()
    rows = []
    for shard_bytes in (4 << 10, 256 << 10, 2 << 20):
        for direct in (False, True):
            with tempfile.TemporaryDirectory(prefix="kvs-", dir=chosen.folder) as folder:
                rows += measure(folder, shard_bytes, direct=direct, rounds=8 if chosen.quick else 40)
    for row in rows:
        print(
            f"{row['shard_bytes'] >> 10:5} KiB  {row['io']:8}  {row['what']:17} "
            f"{row['gb_per_s']:7.2f} GB/s {row['ms']:8.2f} ms for {BATCH}"
        )
    if chosen.json:
        print(report(__file__, rows, []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
