"""The SSD tier against fio on the same file system in the same run, and what it needs of the disk beside the bytes.

`promote`: chunks that are on SSD only are acquired, 8 at a time and 4 such requests ahead, until the daemon says that
they are in DRAM, read and verified. fio reads the same slab files.

`demote`: fresh chunks are committed into a full DRAM and a full SSD until all of them are durable: each pushes one out
of DRAM that is on SSD by then, and takes the slot of one that left DRAM long ago. They are saved in place (protection
"group") and but for a stamp hold what was in the slot before: what saving costs the worker is the question of another
benchmark, data_plane. fio overwrites files that were preallocated and written once, as the slab files were, and syncs
(fdatasync) after each SYNC_BYTES of all its threads together, which is about as often as the daemon does here.

Both sequential (the order of writing) and random, through the page cache and with direct I/O. fio has one thread a
file, as many as the daemon has I/O threads, blocks of a chunk, ioengine psync, shared memory as the arena is
(iomem=mmapshared), and tells the kernel nothing about its order (fadvise_hint=0), because the daemon does not either.
Each round is one of ours and one of fio, in turns the other first, and the page cache of both dropped before; speeds
are medians, `of_fio` is the median of the rounds' ratios. Small chunks are in the full run: what they cost is Python,
not the disk.

`space`: 10 times the capacity is written. Write amplification is what the daemon had the kernel write, the index
included, over the bytes of the chunks; growth is the largest size of the directory afterwards over that when it was
full for the first time.

With `--encrypted` each row of chunks is there once more with our files encrypted (`ssd_key_file`), those of fio are
not. `cpu_s_per_gb` is the daemon's.

    python benchmarks/ssd.py [--quick] [--json] [--out [FILE]] [--folder DIR] [--only buffered|direct|space]
                             [--chunk KIB] [--encrypted]
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness import Goal, arena_ready, arguments, connected, finish, some

from kvstore.client import Client, Namespace, ReadLease, WriteBatch
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.tiers import format
from kvstore.types import ChunkKey, Outcome, Reason, Wait

BOUND_S = 60.0
MIB = 1 << 20
THREADS = 4
SLABS = 4
"""One for each thread of fio."""
SLAB_BYTES, QUICK_SLAB_BYTES = 256 * MIB, 128 * MIB
SLAB_SLOTS_MAX = 4096
PARTS = 2
"""Of what is on SSD. A round reads one, or replaces it; DRAM is smaller than one."""
BATCH_BYTES = 16 * MIB
BATCH_MAX = 512
BATCH_CHECKED = 16
AHEAD = 4
SYNC_BYTES = 32 * MIB
GOALS = {"promote": 0.85, "demote": 0.8}
"""Share of fio's speed, for chunks of 2 MiB; mean of both orders."""
GOAL_CHUNK = 2 * MIB
COLD_SHARE_MIN = 0.25
"""Of a part, what has to be on SSD only when it is promoted."""
CAPACITIES = 10


# --------------------------------------------------------------------------------------------------------- the daemon


@contextmanager
def daemon(folder: Path, key: str = "", **settings: Any) -> Iterator[tuple[Client, int]]:
    command = [sys.executable, "-P", "-m", "kvstore", f"--run-dir={folder}/run", f"--ssd-dir={folder}/ssd"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    if key:
        (folder / "key").write_text(key)
        (folder / "key").chmod(0o600)
        command.append(f"--ssd-key-file={folder}/key")
    process = subprocess.Popen([*command, "--log-level=warning"], stdout=subprocess.DEVNULL)
    try:
        with connected(f"{folder}/run", process) as client:
            arena_ready(client)
            yield client, process.pid
    finally:
        process.terminate()
        process.wait(30)


def granted(space: Namespace, keys: list[ChunkKey]) -> WriteBatch:
    """All of them, as soon as there is room."""
    deadline = time.monotonic() + BOUND_S
    while True:
        batch = space.write(keys)
        if len(batch.granted) == len(keys):
            return batch
        batch.abort()
        assert time.monotonic() < deadline, batch
        time.sleep(0.001)


def batches(space: Namespace, keys: list[ChunkKey]) -> Iterator[list[ChunkKey]]:
    size = min(BATCH_MAX, BATCH_BYTES // space.spec.chunk_bytes)
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def save(space: Namespace, keys: list[ChunkKey]) -> None:
    """Until all are durable."""
    commits = []
    for part in batches(space, keys):
        batch = granted(space, part)
        for index, key in enumerate(part):
            batch.buffer(index)[: len(key)] = np.frombuffer(key, np.uint8)
        commits.append(batch.commit_async(wait=Wait.DURABLE))
    for commit in commits:
        assert commit.result(BOUND_S).ok, commit.result()


def load(space: Namespace, keys: list[ChunkKey]) -> None:
    """From SSD; until all were in DRAM."""
    asked: deque[ReadLease] = deque()
    for part in batches(space, keys):
        if len(asked) == AHEAD:
            settle(asked.popleft())
        asked.append(space.read(part, wait_ms=30_000))
        assert set(asked[-1].outcomes) == {Outcome.PENDING}, asked[-1]
    while asked:
        settle(asked.popleft())


def cold(space: Namespace, keys: list[ChunkKey]) -> list[ChunkKey]:
    """Those that are on SSD only: some of those saved last may be in DRAM still, and from a full SSD the daemon drops
    what it thinks least of, which need not be the oldest."""
    found = [key for key in keys if space.match([key]).reasons == (Reason.ON_SSD,)]
    assert len(found) >= COLD_SHARE_MIN * len(keys), f"{len(found)} of {len(keys)} chunks are on SSD only"
    return found


def settle(lease: ReadLease) -> None:
    with lease:
        assert len(lease.settled()) == len(lease.keys), "not all of them came"


def check(space: Namespace, keys: list[ChunkKey]) -> None:
    """They have the bytes that tell on them."""
    out = np.empty(space.spec.chunk_bytes, np.uint8)
    with space.read(keys, wait_ms=30_000) as lease:
        lease.settled()
    with space.read(keys) as lease:
        assert lease.hits == len(keys), lease.reasons
        for index, key in enumerate(keys):
            assert lease.copy_to(index, out) and out[: len(key)].tobytes() == key, "wrong bytes"


def forget_pages(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# ----------------------------------------------------------------------------------------------------------------- fio


def fio(paths: list[Path], rw: str, *, block: int, start: int, size: int, direct: bool) -> float:
    """GB/s of one thread a file, [start, start + size) of each."""
    job = ["[global]", "ioengine=psync", "thread", "group_reporting", "allow_file_create=0"]
    job += ["fadvise_hint=0", "iomem=mmapshared"]
    job += [f"rw={rw}", f"bs={block}", f"direct={int(direct)}", f"offset={start}", f"size={size}"]
    if "write" in rw:
        job += [f"fdatasync={max(1, SYNC_BYTES // block // len(paths))}", "end_fsync=1", "overwrite=1"]
    for number, path in enumerate(paths):
        job += [f"[{number}]", f"filename={path}"]
    read_only = [] if "write" in rw else ["--readonly"]
    done = subprocess.run(
        ["fio", "--output-format=json", *read_only, "-"],
        input="\n".join(job),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    direction = "write" if "write" in rw else "read"
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]) / 1e9


def lay_out(folder: Path, slab_bytes: int) -> list[Path]:
    """Files for fio to overwrite, made as slab files are."""
    paths = [folder / f"fio-{number}" for number in range(THREADS)]
    block = np.random.default_rng(1).bytes(MIB)
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, slab_bytes)
            for start in range(0, slab_bytes, MIB):
                os.pwrite(fd, block, start)
            os.fsync(fd)
        finally:
            os.close(fd)
    return paths


# ------------------------------------------------------------------------------------------------------------- streams


def streams(
    folder: Path,
    scratch: list[Path],
    chunk: int,
    *,
    slab_bytes: int,
    direct: bool,
    repeats: int,
    key: str = "",
) -> list[dict[str, Any]]:
    """promote and demote of chunks of `chunk` bytes; `scratch`: files of `slab_bytes` for fio, [] to do without it;
    `key`: with which our files are encrypted."""
    slot = format.slot_bytes(chunk, direct=direct)
    slab_bytes = min(slab_bytes, slot * SLAB_SLOTS_MAX)
    slots = format.slots_per_slab(slab_bytes, slot) // PARTS * PARTS
    count = SLABS * slots // PARTS
    segment_bytes = 1 << (count * chunk // 16).bit_length() - 1
    part_bytes = slots // PARTS * slot // chunk * chunk
    """Of each slab file."""
    took: dict[tuple[str, str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    """Seconds of the daemon's for a GB."""
    first = itertools.cycle((False, True))

    def round_(
        what: str, order: str, ours: Callable[[Namespace, list[ChunkKey]], None], paths: list[Path], part: int
    ) -> None:
        """Both, in turns the other first. `paths`: what fio reads or writes."""

        def theirs() -> float:
            rw = ("rand" if order == "random" else "") + ("read" if what == "promote" else "write")
            start = format.SLAB_HEADER_BYTES + part * part_bytes
            return fio(paths, rw, block=chunk, start=start, size=part_bytes, direct=direct)

        def timed() -> float:
            used, began = cpu_seconds(pid), time.perf_counter()
            ours(space, asked)
            seconds = time.perf_counter() - began
            gigabytes = len(asked) * chunk / 1e9
            cpu.setdefault((what, order), []).append((cpu_seconds(pid) - used) / gigabytes)
            return gigabytes / seconds

        runs = [("attnstore", timed), ("fio", theirs)] if scratch else [("attnstore", timed)]
        for by, run in runs[:: 1 if next(first) else -1]:
            forget_pages([*slabs, *scratch])
            took.setdefault((what, order, by), []).append(run())

    random = np.random.default_rng(2)
    spec = NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", chunk),))
    index_bytes = (16 + SLABS * slots * 512 // MIB) * MIB
    with daemon(
        folder,
        key,
        dram_bytes=count * chunk * 3 // 4 // segment_bytes * segment_bytes,
        segment_bytes=segment_bytes,
        protection="group",
        reserve_share_max=0.5,
        ssd_bytes=SLABS * slab_bytes + index_bytes + MIB,
        ssd_slab_bytes=slab_bytes,
        ssd_index_bytes=index_bytes,
        ssd_direct_io=str(direct).lower(),
        ssd_threads=THREADS,
        scrub_bytes_per_s=0,
        eviction="lru",  # what is fresh replaces what is old, however often that was promoted
    ) as (client, pid):
        space = client.open(spec)
        parts = [space.keys(np.arange(16 * count) + (number << 24)) for number in range(PARTS)]
        for keys in parts:
            save(space, keys)
        fresh = PARTS
        slabs = sorted((folder / "ssd").glob("slab-*.kvs"))
        for _ in range(repeats):
            for order in ("sequential", "random"):
                # What is promoted in some order leaves DRAM in that order, and is then replaced in it.
                for number, keys in enumerate(parts):
                    asked = cold(space, keys)
                    if order == "random":
                        asked = [asked[n] for n in random.permutation(len(asked))]
                    round_("promote", order, load, slabs, number)
                    check(space, asked[-BATCH_CHECKED:])
                for number in range(PARTS):
                    asked = parts[number] = space.keys(np.arange(16 * count) + (fresh << 24))
                    fresh += 1
                    round_("demote", order, save, scratch, number)
        ssd = client.stats().ssd
        assert ssd.state == "ok" and not ssd.corrupt, ssd
    rows = []
    for (what, order, by), speeds in took.items():
        row = {
            "what": what,
            "io": ("direct" if direct else "buffered") + (", encrypted" if key else ""),
            "order": order,
            "chunk_bytes": chunk,
            "by": by,
            "gb_per_s": statistics.median(speeds),
            "gb_per_s_min": min(speeds),
            "gb_per_s_max": max(speeds),
            "rounds": len(speeds),
        }
        if by == "attnstore":
            row["cpu_s_per_gb"] = statistics.median(cpu[what, order])
        if scratch and by == "attnstore":
            row["of_fio"] = statistics.median(
                mine / theirs for mine, theirs in zip(speeds, took[what, order, "fio"], strict=True)
            )
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------------------------- space


def space_needed(folder: Path, chunk: int, slab_bytes: int) -> dict[str, Any]:
    """What 10 times the capacity leaves behind."""
    index_bytes = 16 * MIB
    ssd_bytes = SLABS * slab_bytes + index_bytes + MIB
    capacity = SLABS * format.slots_per_slab(slab_bytes, format.slot_bytes(chunk, direct=False))
    sizes: list[int] = []
    with daemon(
        folder,
        dram_bytes=64 * MIB,
        segment_bytes=16 * MIB,
        protection="group",
        reserve_share_max=0.5,
        ssd_bytes=ssd_bytes,
        ssd_slab_bytes=slab_bytes,
        ssd_index_bytes=index_bytes,
        scrub_bytes_per_s=0,
    ) as (client, pid):
        space = client.open(NamespaceSpec("bench", b"w", "bytes", 16, (GroupSpec("full", chunk),)))
        before = bytes_written(pid)
        for number in range(CAPACITIES):
            keys = space.keys(np.arange(16 * capacity) + (number << 24))
            save(space, keys)
            sizes.append(bytes_on_disk(folder / "ssd"))
            assert sizes[-1] <= ssd_bytes, f"{sizes[-1]} bytes, more than ssd_bytes allows"
        written = bytes_written(pid) - before
        check(space, keys[-BATCH_CHECKED:])
        index_used = client.stats().ssd.index_used_bytes
    return {
        "what": "space",
        "io": "buffered",
        "chunk_bytes": chunk,
        "chunks_written": CAPACITIES * capacity,
        "write_amplification": written / (CAPACITIES * capacity * chunk),
        "growth": max(sizes) / sizes[0],
        "index_bytes_per_chunk": index_used / capacity,
    }


def cpu_seconds(pid: int) -> float:
    """That the process has used until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def bytes_written(pid: int) -> int:
    """What the process had the kernel write, or will: pages that it made dirty, and direct I/O."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--folder", help="where to write; a folder of the disk in question")
    options.add_argument("--only", choices=("buffered", "direct", "space"))
    options.add_argument("--encrypted", action="store_true", help="and the same with our files encrypted")
    options.add_argument("--chunk", type=some, help="KiB of the only size of chunks")
    chosen = options.parse_args()
    keys = ("", secrets.token_hex(32)) if chosen.encrypted else ("",)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-", dir=chosen.folder) as name:
        folder = Path(name)
        if not (has_fio := shutil.which("fio") is not None):
            print("no fio here (apt install fio): nothing to compare with, and no goals")
        slab_bytes = QUICK_SLAB_BYTES if chosen.quick else SLAB_BYTES
        scratch = lay_out(folder, slab_bytes) if has_fio and chosen.only != "space" else []
        sizes = (GOAL_CHUNK,) if chosen.quick else (GOAL_CHUNK, 256 << 10, 4 << 10)
        for chunk in (chosen.chunk << 10,) if chosen.chunk else sizes:
            for io, key in itertools.product(("buffered", "direct"), keys):
                if chosen.only in (None, io):
                    repeats = 1 if chosen.quick or chunk != GOAL_CHUNK else 2
                    how: dict[str, Any] = {
                        "slab_bytes": slab_bytes,
                        "direct": io == "direct",
                        "repeats": repeats,
                        "key": key,
                    }
                    with tempfile.TemporaryDirectory(dir=folder) as part:
                        rows += streams(Path(part), scratch, chunk, **how)
        for path in scratch:
            path.unlink()
        if chosen.only in (None, "space"):
            for chunk, slab_bytes in ((4 << 10, (8 if chosen.quick else 16) * MIB), (2 * MIB, 32 * MIB)):
                with tempfile.TemporaryDirectory(dir=folder) as part:
                    rows.append(space_needed(Path(part), chunk, slab_bytes))
    for row in rows:
        tell(row)
    return finish(__file__, chosen, rows, goals(rows), key=("what", "io", "order", "chunk_bytes", "by"))


def tell(row: dict[str, Any]) -> None:
    size = f"{row['chunk_bytes'] >> 10:5} KiB"
    if row["what"] == "space":
        print(
            f"{'space':8} {size}  {row['chunks_written']:,} chunks written: write amplification"
            f" {row['write_amplification']:.2f}, growth x {row['growth']:.3f},"
            f" index {row['index_bytes_per_chunk']:.0f} bytes a chunk"
        )
        return
    share = f"{row['of_fio']:5.2f} x fio" if "of_fio" in row else ""
    if "cpu_s_per_gb" in row:
        share += f", {row['cpu_s_per_gb']:.2f} s of CPU a GB"
    print(
        f"{row['what']:8} {size}  {row['io']:8} {row['order']:10} {row['by']:9} {row['gb_per_s']:6.2f} GB/s"
        f" ({row['gb_per_s_min']:.2f} to {row['gb_per_s_max']:.2f}) {share}"
    )


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    found = []
    for what, io in itertools.product(GOALS, ("buffered", "direct")):
        shares = [
            row["of_fio"]
            for row in rows
            if (row["what"], row["io"], row["chunk_bytes"], row.get("by"))
            == (what, io, GOAL_CHUNK, "attnstore")
            and "of_fio" in row
        ]
        if shares:
            found.append(Goal(f"{what}, 2 MiB, {io}", statistics.fmean(shares), "x fio", GOALS[what], ">="))
    found += [
        Goal(
            f"space after {CAPACITIES} x the capacity, chunks of {row['chunk_bytes'] >> 10} KiB",
            row["growth"],
            "x full once",
            1.0,
            "<=",
        )
        for row in rows
        if row["what"] == "space"
    ]
    return found


if __name__ == "__main__":
    sys.exit(main())
