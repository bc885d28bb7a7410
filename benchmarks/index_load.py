"""How fast the SSD tier's index is written and read back: 1,000,000 chunks of one shard, keys in random order.

Written in transactions of 1,000 chunks, each on the disk before the next begins; read as a restart reads it, in a fresh
process, from opening the environment to the last batch of columns: with the file in the page cache, and without.

    python benchmarks/index_load.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.benchmark import Goal, report
from kvstore.core.events import ChunkRecord, NamespaceRecord, WriteIndex
from kvstore.index import Index
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.ports import RealDisk
from kvstore.types import ChunkKey, DiskPlace, DiskResult, OpId, SlabId

ROOT = Path(__file__).resolve().parent.parent
LOAD_GOAL_S = 5.0
"""For 1,000,000 chunks; for fewer, a share of it, but a second for what does not depend on their number."""
BATCH = 1_000
INDEX_BYTES = 512 << 20
SLAB_BYTES = 256 << 20
SLOT_BYTES = 8_192
SPEC = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", 4_096),))


def opened(folder: str) -> Index:
    return Index(
        f"{folder}/index", bytes_max=INDEX_BYTES, direct=False, slab_bytes=SLAB_BYTES, disk=RealDisk()
    )


def write(folder: str, chunks: int) -> dict[str, float]:
    index = opened(folder)
    assert index.add_slab(SlabId(0), SLOT_BYTES, chunks)[0] == DiskResult.OK
    namespace = WriteIndex(OpId(0), (), namespaces=(NamespaceRecord(1, "bench", SPEC),))
    assert index.write(namespace)[0] == DiskResult.OK
    random = np.random.default_rng(1)
    took = []
    for start in range(0, chunks, BATCH):
        records = tuple(
            ChunkRecord(
                namespace=1,
                key=ChunkKey(random.bytes(32)),
                token_count=16,
                flags=0,
                maker=b"worker 1, gpu 0!",
                places=(DiskPlace(SlabId(0), slot, (1 << 32) + slot),),
                checksums=(slot,),
            )
            for slot in range(start, min(start + BATCH, chunks))
        )
        began = time.perf_counter()
        result, why = index.write(WriteIndex(OpId(1), (), chunks=records))
        took.append(time.perf_counter() - began)
        assert result == DiskResult.OK, why
    used = index.used_bytes
    index.close()
    return {
        "transaction_ms_median": 1e3 * float(np.median(took)),
        "transaction_ms_p99": 1e3 * float(np.quantile(took, 0.99)),
        "bytes_per_chunk": used / chunks,
    }


def load(folder: str) -> dict[str, float]:
    began = time.perf_counter()
    index = opened(folder)
    specs = {namespace.number: namespace.spec for namespace in index.namespaces()}
    count = sum(len(batch) for batch in index.chunks(specs, index.slabs(), direct=False))
    spent = time.perf_counter() - began
    index.close()
    return {"chunks": count, "seconds": spent}


def load_in_fresh_process(folder: str) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--load", folder]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def forget_pages(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="100,000 chunks instead of 1,000,000")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument("--load", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.load:
        print(json.dumps(load(chosen.load)))
        return 0
    chunks = 100_000 if chosen.quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        written = write(folder, chunks)
        warm = load_in_fresh_process(folder)
        forget_pages(f"{folder}/index/data.mdb")
        cold = load_in_fresh_process(folder)
    assert warm["chunks"] == cold["chunks"] == chunks, (warm, cold)
    print(
        f"write  {BATCH} chunks a transaction: {written['transaction_ms_median']:.1f} ms median, "
        f"{written['transaction_ms_p99']:.1f} ms p99; {written['bytes_per_chunk']:.0f} bytes a chunk in the index"
    )
    print(
        f"load   {chunks:,} chunks: {warm['seconds']:.2f} s from the page cache, {cold['seconds']:.2f} s without it"
    )
    if chosen.json:
        goal = Goal(
            f"load of {chunks:,} index records, page cache dropped",
            cold["seconds"],
            "s",
            max(1.0, LOAD_GOAL_S * chunks / 1_000_000),
            "<=",
        )
        print(report(__file__, [written, warm, cold], [goal]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
