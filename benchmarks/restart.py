"""Seconds from the start of a daemon's process to the first chunk that a client has from it: 1,000,000 chunks of 4 KiB
in the index.

The index is written directly, in batches; slab files are sparse but for the chunks that are asked for afterwards, since
a restart reads no data. Each run starts a fresh process, with the index in the page cache or dropped from it; a client
tries to connect all the time, opens the namespace and reads a chunk from SSD, which must have its bytes.

    python benchmarks/restart.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore import format
from kvstore.benchmark import Goal, report
from kvstore.client import Client, connect
from kvstore.core.events import ChunkRecord, NamespaceRecord, WriteIndex
from kvstore.core.namespaces import chunk_salt
from kvstore.errors import StoreError
from kvstore.index import Index
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.ports import RealDisk
from kvstore.types import ChunkKey, DiskPlace, DiskResult, OpId, Record, SlabId

ROOT = Path(__file__).resolve().parent.parent
GOAL_S = 5.0
"""Also with fewer chunks: the rest of a start does not shrink with them."""
CHUNK_BYTES = 4096
SLAB_BYTES = 256 << 20
INDEX_BYTES = 512 << 20
SSD_BYTES = 16 << 30
BATCH = 20_000
ASKED_EVERY = 50_000
"""One chunk in so many has bytes, and is asked for."""
GENERATION = 1 << 32
SPEC = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", CHUNK_BYTES),))
FAMILY = SPEC.digest("default")
SLOT_BYTES = format.slot_bytes(CHUNK_BYTES, direct=False)
SLOTS = format.slots_per_slab(SLAB_BYTES, SLOT_BYTES)
BOUND_S = 120.0


def key_of(number: int) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(b"%d" % number, digest_size=32).digest())


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(CHUNK_BYTES)


def build(folder: Path, chunks: int) -> None:
    """An SSD directory as a daemon that was killed would leave it."""
    folder.mkdir(mode=0o700)
    index = Index(
        str(folder / "index"), bytes_max=INDEX_BYTES, direct=False, slab_bytes=SLAB_BYTES, disk=RealDisk()
    )
    for slab in map(SlabId, range(-(-chunks // SLOTS))):
        with (folder / format.slab_name(slab)).open("wb") as file:
            file.write(format.encode_slab_header(format.SlabHeader(slab, SLOT_BYTES, SLOTS, direct=False)))
            file.truncate(format.slab_file_bytes(SLOT_BYTES, SLOTS))
        expect_ok(index.add_slab(slab, SLOT_BYTES, SLOTS))
    namespace = NamespaceRecord(1, "default", SPEC)
    expect_ok(index.write(WriteIndex(OpId(0), (), namespaces=(namespace,))))
    for start in range(0, chunks, BATCH):
        records = tuple(chunk(folder, number) for number in range(start, min(start + BATCH, chunks)))
        expect_ok(index.write(WriteIndex(OpId(1), (), chunks=records)))
    index.close()


def chunk(folder: Path, number: int) -> ChunkRecord:
    slab, slot = divmod(number, SLOTS)
    checksum = 0
    if number % ASKED_EVERY == 0:
        payload = content(number)
        checksum = xxhash.xxh3_64_intdigest(payload)
        record = Record(chunk_salt(FAMILY, 0), key_of(number), 0, CHUNK_BYTES, checksum)
        with (folder / format.slab_name(SlabId(slab))).open("r+b") as file:
            file.seek(format.slot_offset(SLOT_BYTES, slot))
            file.write(format.encode_record_header(record, GENERATION + number, direct=False) + payload)
    place = DiskPlace(SlabId(slab), slot, GENERATION + number)
    return ChunkRecord(1, key_of(number), 16, 0, b"", (place,), (checksum,))


def expect_ok(outcome: tuple[DiskResult, str]) -> None:
    assert outcome[0] is DiskResult.OK, outcome


def measure(folder: Path, chunks: int, asked: int) -> dict[str, float]:
    """One start. Seconds after the start of the process: connected, first hit."""
    began = time.perf_counter()
    command = (
        *(sys.executable, "-P", "-m", "kvstore"),
        *(f"--run-dir={folder}/run", "--dram-bytes=256M", "--segment-bytes=64M", "--log-level=warning"),
        *(f"--ssd-dir={folder}/ssd", f"--ssd-bytes={SSD_BYTES}", f"--ssd-slab-bytes={SLAB_BYTES}"),
        f"--ssd-index-bytes={INDEX_BYTES}",
        "--scrub-bytes-per-s=0",  # only the records that are asked for have bytes
    )
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with connected(folder, daemon) as client:
            connected_s = time.perf_counter() - began
            space = client.open(SPEC)
            out = np.empty(CHUNK_BYTES, np.uint8)
            while True:
                with space.read([key_of(asked)], wait_ms=1000) as lease:
                    if lease.hits and lease.copy_to(0, out):
                        break
                    lease.settled()
                assert time.perf_counter() < began + BOUND_S, lease
            hit_s = time.perf_counter() - began
            cpu_s = cpu_seconds(daemon.pid)
            assert out.tobytes() == content(asked), "wrong bytes"
            cold = client.stats().ssd.cold_chunks
            assert cold == chunks - 1, f"{cold} chunks are left on SSD"
            rss_kib = next(
                int(line.split()[1])
                for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
                if line.startswith("RssAnon:")
            )
    finally:
        daemon.kill()
        daemon.wait(30)
    return {"connected_s": connected_s, "first_hit_s": hit_s, "cpu_s": cpu_s, "rss_anon_mib": rss_kib / 1024}


def connected(folder: Path, daemon: subprocess.Popen[bytes]) -> Client:
    deadline = time.perf_counter() + BOUND_S
    while True:
        try:
            return connect(f"{folder}/run", timeout_s=30.0)
        except StoreError:
            assert daemon.poll() is None and time.perf_counter() < deadline, "the daemon does not start"
            time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads: what a machine that does nothing else would need at least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget_pages(path: Path) -> None:
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
    chosen = options.parse_args()
    chunks = 100_000 if chosen.quick else 1_000_000
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        began = time.perf_counter()
        build(folder / "ssd", chunks)
        print(f"index of {chunks:,} chunks written in {time.perf_counter() - began:.1f} s")
        asked = iter(range(0, chunks, ASKED_EVERY))
        for cached in (True, False):
            runs = []
            for _ in range(1 if chosen.quick else 3):
                if not cached:
                    forget_pages(folder / "ssd" / "index" / "data.mdb")
                runs.append(measure(folder, chunks, next(asked)))
            median = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
            rows.append({"chunks": chunks, "page_cache": cached, "runs": len(runs), **median})
            print(
                f"{'index in page cache' if cached else 'page cache dropped':20} connected after"
                f" {median['connected_s']:.2f} s, first hit after {median['first_hit_s']:.2f} s"
                f" ({median['cpu_s']:.2f} s of the daemon's CPU), {median['rss_anon_mib']:.0f} MiB of anonymous memory"
            )
    if chosen.json:
        name = f"{chunks:,} chunks: start to first hit, page cache dropped"
        print(report(__file__, rows, [Goal(name, rows[1]["first_hit_s"], "s", GOAL_S, "<=")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
