"""What a chunk and a session cost the daemon, from 10,000 chunks to 4,000,000 and from 1,000 sessions to 1,000,000:
time of each operation, memory, the longest step, and how long a restart takes.

core      `Store.apply` alone, in a fresh process for each size: chains of 64 chunks with parents, 32-byte keys, one
          shard of 4 KiB, in requests of 512 keys; then saves that evict. The core holds no bytes, so 4,000,000 chunks
          need no 16 GB. Memory is the growth of RssAnon, the longest step the thread's CPU time while the arena was
          filled. The interpreter searches for garbage as in the daemon.
sessions  the same with many sessions of 4 chunks each over 262,144 chunks.
daemon    a real daemon that finds that many chunks of 4 KiB on SSD (the index is written directly and dropped from the
          page cache, slab files are sparse: a restart reads no data), and a client that asks for 512 keys at a time:
          start to first hit, round trips, memory.

    make bench-scale ARGS='--quick --json'

The indices of the daemon's part can be kept for other runs (--indices DIR), and parts run one by one (--only).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import xxhash
from harness import Goal, arguments, connect_asking, connected, finish, heading, keep

from kvstore.client import Namespace
from kvstore.config import StoreConfig
from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.namespaces import chunk_salt
from kvstore.core.requests.sessions import LISTED_MAX
from kvstore.core.store import Store
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.memory import fix_mmap_threshold
from kvstore.server.garbage import ShortSearches, no_searches
from kvstore.tiers import format
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.index import Index
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    NamespaceId,
    OpId,
    Record,
    SlabId,
    StagedPiece,
    WorkerId,
)

Row = dict[str, Any]

CHUNKS = (10_000, 100_000, 1_000_000, 4_000_000)
SESSIONS = (1_000, 10_000, 100_000, 1_000_000)
DAEMON_CHUNKS = (10_000, 1_000_000, 4_000_000)
KEY = ("part", "chunks", "sessions", "what")
QUICK = {"core": (10_000, 1_000_000), "sessions": (), "daemon": (1_000_000,)}
"""Which of these: those that goals are about."""
BATCH = 512
CHAIN = 64
ENTRIES = 4
SESSION_CHUNKS = 1 << 18
SHARD_BYTES = 4096
SEGMENT_BYTES = 64 << 20
STEP_MS = 20
"""Virtual time per batch: 25,600 chunks a second, more than two cores copy."""
WORKER = WorkerId(1)
SPEC = NamespaceSpec("llama", b"w", "bytes", 64, (GroupSpec("kv", SHARD_BYTES),))

MATCH_MS, LEASE_MS, RESTART_S = 1.0, 3.0, 5.0
"""Round trips of 512 keys, p50; start to first hit with 1,000,000 chunks."""
US_PER_KEY = {"acquire + release": 2.5, "reserve + commit": 8.0}
"""Of the core, in requests of 512 keys."""
BYTES_PER_CHUNK, BYTES_AT = 300, 1_000_000
TIMES_MORE = 4.0
"""Cost of an operation with the most chunks, over that with 10,000: cache misses alone may come to that."""


# ----------------------------------------------------------------------------------------------------- the core alone


class Driver:
    """A store with one worker whose copies end at once; `now` is virtual. Knows its longest step."""

    def __init__(self, chunks: int, **limits: Any) -> None:
        segments = -(-chunks * SHARD_BYTES // SEGMENT_BYTES)
        self.store = Store(Limits(segments * SEGMENT_BYTES, SEGMENT_BYTES, **limits))
        self.now = 0
        self.longest: tuple[float, str] = (0.0, "")
        self._request = 0
        for effect in self.store.start():
            assert isinstance(effect, ev.CreateSegment)
            self.store.apply(ev.SegmentReady(effect.op), self.now)
        self.apply(ev.WorkerJoined(WORKER, "alice", "engine", admin=True))
        self.namespace: NamespaceId = self.ask(ev.Open, SPEC).namespace

    def apply(self, event: Any) -> list[ev.Effect]:
        began = time.thread_time()
        effects = self.store.apply(event, self.now)
        self.longest = max(self.longest, (time.thread_time() - began, type(event).__name__))
        return effects

    def ask(self, kind: type, *args: Any, **named: Any) -> Any:
        """The answer; a copy that the request starts is carried out."""
        self._request += 1
        effects = self.apply(kind(ev.Ticket(WORKER, self._request), *args, **named))
        while effects:
            effect = effects.pop(0)
            match effect:
                case ev.Reply():
                    return effect.answer
                case ev.CopyIn():
                    effects += self.apply(ev.OpDone(effect.op, tuple(range(1, len(effect.targets) + 1))))
        raise AssertionError(f"{kind.__name__} was not answered")

    def save(self, keys: Sequence[ChunkKey]) -> int:
        """How many chunks of these chains were granted, and are committed now."""
        parents = [ChunkKey(b"") if place % CHAIN == 0 else keys[place - 1] for place in range(len(keys))]
        maker = b"worker 1, gpu 0!"
        reserved = self.ask(ev.Reserve, self.namespace, tuple(keys), parents=tuple(parents), maker=maker)
        assert isinstance(reserved, ev.Reserved), reserved
        count = len(reserved.extents)
        pieces = tuple(StagedPiece(SHARD_BYTES * number, SHARD_BYTES) for number in range(count))
        committed = self.ask(ev.Commit, reserved.reservation, pieces)
        assert isinstance(committed, ev.Committed), committed
        return count

    def tick(self, ms: int) -> None:
        self.now += ms
        self.apply(ev.Tick())


def chain(number: int, count: int = CHAIN) -> list[ChunkKey]:
    seed = number.to_bytes(8, "little")
    return [
        ChunkKey(hashlib.blake2b(seed + bytes([place]), digest_size=32).digest()) for place in range(count)
    ]


def chains(first: int) -> list[ChunkKey]:
    return [key for number in range(first, first + BATCH // CHAIN) for key in chain(number)]


def fill(driver: Driver, chunks: int) -> list[float]:
    """Seconds of each batch."""
    took = []
    for first in range(0, chunks // CHAIN, BATCH // CHAIN):
        keys = chains(first)
        began = time.perf_counter()
        assert driver.save(keys) == BATCH
        took.append(time.perf_counter() - began)
        driver.tick(STEP_MS)
    return took


def new_driver(chunks: int, **limits: Any) -> Driver:
    """As the daemon makes its store."""
    fix_mmap_threshold()
    ShortSearches()
    with no_searches():
        return Driver(chunks, **limits)


def core(chunks: int) -> list[Row]:
    driver = new_driver(chunks)
    gc.collect()
    before = rss_anon_bytes(os.getpid())
    took = fill(driver, chunks // BATCH * BATCH)
    gc.collect()
    grown = rss_anon_bytes(os.getpid()) - before
    stored = driver.store.state.chunks.rows_used
    dice = random.Random(1)

    def somewhere() -> tuple[ChunkKey, ...]:
        numbers = dice.sample(range(stored // CHAIN), BATCH // CHAIN)
        return tuple(key for number in numbers for key in chain(number))

    def match(keys: tuple[ChunkKey, ...]) -> None:
        assert driver.ask(ev.Match, driver.namespace, keys).usable == BATCH

    def read(keys: tuple[ChunkKey, ...]) -> None:
        acquired = driver.ask(ev.Acquire, driver.namespace, keys)
        assert len(acquired.extents) == BATCH
        driver.ask(ev.Release, (acquired.lease,))
        driver.now += 1

    def evicting(keys: list[ChunkKey]) -> None:
        assert driver.save(keys) == BATCH
        driver.tick(STEP_MS)

    rounds = 40
    new = iter(range(1 << 40, 1 << 41, BATCH // CHAIN))
    seconds, step = driver.longest
    timed = {
        "match": times(match, somewhere, rounds),
        "acquire + release": times(read, somewhere, rounds),
        "reserve + commit": took[len(took) // 2 :],
    }
    while not driver.store.state.counters["chunks_evicted"]:
        evicting(chains(next(new)))
    timed["reserve + commit that evict"] = times(evicting, lambda: chains(next(new)), rounds)
    each = {
        "tick": times(lambda _: driver.tick(100), lambda: None, rounds),
        "stats": times(lambda _: driver.ask(ev.GetStats), lambda: None, rounds),
    }
    of = {"part": "core", "chunks": chunks}
    rows = [of | {"what": what} | spread(seconds, BATCH, "µs per key") for what, seconds in timed.items()]
    rows += [of | {"what": what} | spread(seconds, 1, "µs") for what, seconds in each.items()]
    rows.append(of | {"what": "memory", "p50": grown / stored, "unit": "bytes per chunk", "bytes": grown})
    return [*rows, of | {"what": f"longest step ({step})", "p50": 1e3 * seconds, "unit": "ms"}]


def sessions(count: int) -> list[Row]:
    driver = new_driver(SESSION_CHUNKS)
    fill(driver, SESSION_CHUNKS)
    gc.collect()
    before = rss_anon_bytes(os.getpid())
    driver.longest = (0.0, "")
    manifests = [
        tuple(ev.SessionEntry(key, CHAIN * place, CHAIN) for place, key in enumerate(chain(number, ENTRIES)))
        for number in range(SESSION_CHUNKS // CHAIN)
    ]

    def create(number: int) -> ev.SessionInfo:
        chosen = manifests[number % len(manifests)]
        info = driver.ask(ev.UpdateSession, driver.namespace, b"session %d" % number, 0, 0, chosen)
        assert isinstance(info, ev.SessionInfo) and info.usable == ENTRIES, info
        return info

    took = times(create, iter(range(count)).__next__, count)
    gc.collect()
    grown = rss_anon_bytes(os.getpid()) - before
    dice = random.Random(1)
    numbers = range(count)

    def name() -> bytes:
        return b"session %d" % dice.choice(numbers)

    def get(session: bytes) -> None:
        assert driver.ask(ev.GetSession, driver.namespace, session).version

    def update(info: ev.SessionInfo) -> None:
        last = info.entries[-1:]
        new = driver.ask(
            ev.UpdateSession, driver.namespace, info.session, info.version, len(info.entries) - 1, last
        )
        assert new.version > info.version

    def hints() -> tuple[ev.Hint, ...]:
        driver.now += 10_000
        return tuple(ev.Hint(b"job %d" % place, place, name()) for place in range(64))

    def publish(queue: tuple[ev.Hint, ...]) -> None:
        assert len(driver.ask(ev.PublishQueue, driver.namespace, queue).results) == len(queue)

    rounds = 40
    timed = {
        "create": took[len(took) // 2 :],
        "get": times(get, name, rounds),
        "update": times(update, lambda: driver.ask(ev.GetSession, driver.namespace, name()), rounds),
        "publish a queue of 64": times(
            lambda queue: driver.ask(ev.PublishQueue, driver.namespace, queue), hints, rounds
        ),
        "tick with that queue": times(lambda _: driver.tick(1_000), lambda: None, rounds),
        f"list the newest {LISTED_MAX}": times(lambda _: driver.ask(ev.ListSessions), lambda: None, 5),
    }
    of = {"part": "sessions", "chunks": SESSION_CHUNKS, "sessions": count}
    rows = [of | {"what": what} | spread(seconds, 1, "µs") for what, seconds in timed.items()]
    rows.append(of | {"what": "memory", "p50": grown / count, "unit": "bytes per session", "bytes": grown})
    seconds, step = driver.longest
    return [*rows, of | {"what": f"longest step ({step})", "p50": 1e3 * seconds, "unit": "ms"}]


def times(action: Callable[[Any], Any], of: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds that `action` takes, of what `of` makes for it each time."""
    took = []
    for _ in range(rounds):
        argument = of()
        began = time.perf_counter()
        action(argument)
        took.append(time.perf_counter() - began)
    return took


def spread(seconds: Sequence[float], per: int, unit: str) -> Row:
    scale = (1e3 if unit == "ms" else 1e6) / per
    return {
        "p50": scale * float(np.median(seconds)),
        "p99": scale * float(np.quantile(seconds, 0.99)),
        "unit": unit,
    }


# ------------------------------------------------------------------------------------------------------ a real daemon

SLAB_BYTES = 256 << 20
INDEX_BYTES_PER_CHUNK = 512
"""Three times what it needs: a transaction writes its pages anew."""
SLOT_BYTES = format.slot_bytes(SHARD_BYTES, direct=False)
SLOTS = format.slots_per_slab(SLAB_BYTES, SLOT_BYTES)
FAMILY = SPEC.digest("default")
RECORDS = 50_000
"""In one transaction of the index."""
ASKED_EVERY = 50_000
"""One chunk in so many has bytes, and is asked for."""
GENERATION = 1 << 32
BOUND_S = 120.0
ROUNDS = 300
LOOKED_UP, ASKED = "match of 512 in DRAM, looked up", "match of 512 in DRAM, asked"
LOOKED_UP_SHARE = 0.2
BYTES_WITH_DIRECTORY = 400
NO_DIRECTORY, RESTART_SHARE = ", no directory", 1.2
"""Of a start without a directory: what the directory may take of one."""


def key_of(number: int) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(b"%d" % number, digest_size=32).digest())


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SHARD_BYTES)


def index_bytes(chunks: int) -> int:
    return (64 << 20) + INDEX_BYTES_PER_CHUNK * chunks


def build(folder: Path, chunks: int) -> float:
    """An SSD directory as a daemon that was killed would leave it. Bytes of the index per chunk."""
    folder.mkdir(mode=0o700, parents=True)
    index = Index(
        str(folder / "index"),
        bytes_max=index_bytes(chunks),
        direct=False,
        slab_bytes=SLAB_BYTES,
        disk=RealDisk(),
    )
    for slab in map(SlabId, range(-(-chunks // SLOTS))):
        with (folder / format.slab_name(slab)).open("wb") as file:
            file.write(format.encode_slab_header(format.SlabHeader(slab, SLOT_BYTES, SLOTS, direct=False)))
            file.truncate(format.slab_file_bytes(SLOT_BYTES, SLOTS))
        expect_ok(index.add_slab(slab, SLOT_BYTES, SLOTS))
    namespace = ev.NamespaceRecord(1, "default", SPEC)
    expect_ok(index.write(ev.WriteIndex(OpId(0), (), namespaces=(namespace,))))
    for start in range(0, chunks, RECORDS):
        records = tuple(record(folder, number) for number in range(start, min(start + RECORDS, chunks)))
        expect_ok(index.write(ev.WriteIndex(OpId(1), (), chunks=records)))
    used = index.used_bytes
    index.close()
    return used / chunks


def record(folder: Path, number: int) -> ev.ChunkRecord:
    slab, slot = divmod(number, SLOTS)
    checksum = 0
    if number % ASKED_EVERY == 0:
        payload = content(number)
        checksum = xxhash.xxh3_64_intdigest(payload)
        header = Record(chunk_salt(FAMILY, 0), key_of(number), 0, SHARD_BYTES, checksum)
        with (folder / format.slab_name(SlabId(slab))).open("r+b") as file:
            file.seek(format.slot_offset(SLOT_BYTES, slot))
            file.write(format.encode_record_header(header, GENERATION + number, direct=False) + payload)
    place = DiskPlace(SlabId(slab), slot, GENERATION + number)
    return ev.ChunkRecord(1, key_of(number), 64, 0, b"", (place,), (checksum,))


def expect_ok(outcome: tuple[DiskResult, str]) -> None:
    assert outcome[0] is DiskResult.OK, outcome


def forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def daemon(chunks: int, folder: Path) -> list[Row]:
    """One start, with the index dropped from the page cache."""
    made: float | None = None
    if not (folder / "ssd").exists():
        with no_searches():
            made = build(folder / "ssd", chunks)
    forget_pages(folder / "ssd" / "index" / "data.mdb")
    of = {"part": "daemon", "chunks": chunks}
    rows: list[Row] = []
    if made is not None:
        rows.append(of | {"what": "index", "p50": made, "unit": "bytes per chunk"})
    if chunks == BYTES_AT and "directory" in {field.name for field in fields(StoreConfig)}:
        rows.append(
            of
            | {"what": f"start to first hit{NO_DIRECTORY}", "unit": "s"}
            | without_directory(chunks, folder)
        )
        forget_pages(folder / "ssd" / "index" / "data.mdb")
    began = time.perf_counter()
    process = start(chunks, folder)
    try:
        with connected(folder / "run", process) as client:
            space = client.open(SPEC)
            first_hit(space, random.Random().randrange(-(-chunks // ASKED_EVERY)) * ASKED_EVERY)
            hit = {"what": "start to first hit", "p50": time.perf_counter() - began, "unit": "s"}
            rows.append(of | hit | {"cpu_s": cpu_seconds(process.pid)})
            rss = rss_anon_bytes(process.pid)
            rows.append(of | {"what": "memory", "p50": rss / chunks, "unit": "bytes per chunk", "bytes": rss})
            with connect_asking(folder / "run", timeout_s=BOUND_S) as asking:
                rows += [of | row for row in round_trips(space, asking.open(SPEC), chunks)]
            size = directory_bytes(process.pid)
            rows.append(
                of | {"what": "directory", "p50": size / chunks, "unit": "bytes per chunk", "bytes": size}
            )
    finally:
        process.kill()
        process.wait(30)
    return rows


def start(chunks: int, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = (
        *(sys.executable, "-P", "-m", "kvstore"),
        *(f"--run-dir={folder}/run", "--dram-bytes=256M", "--segment-bytes=64M", "--log-level=warning"),
        *(
            f"--ssd-dir={folder}/ssd",
            f"--ssd-slab-bytes={SLAB_BYTES}",
            f"--ssd-index-bytes={index_bytes(chunks)}",
        ),
        f"--ssd-bytes={index_bytes(chunks) + (-(-chunks // SLOTS) + 4) * SLAB_BYTES}",
        "--scrub-bytes-per-s=0",  # only the records that are asked for have bytes
        *more,
    )
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def without_directory(chunks: int, folder: Path) -> Row:
    """Start to first hit of a daemon that tells nobody where its chunks are."""
    began = time.perf_counter()
    process = start(chunks, folder, "--directory=false")
    try:
        with connected(folder / "run", process) as client:
            first_hit(client.open(SPEC), random.Random().randrange(-(-chunks // ASKED_EVERY)) * ASKED_EVERY)
            return {"p50": time.perf_counter() - began, "cpu_s": cpu_seconds(process.pid)}
    finally:
        process.kill()
        process.wait(30)


def directory_bytes(pid: int) -> int:
    """Pages of the directories in shared memory that were touched."""
    folder = Path(f"/proc/{pid}/fd")
    names = [fd for fd in folder.iterdir() if "kvs-directory" in os.readlink(fd)]
    return sum(fd.stat().st_blocks * 512 for fd in names)


def first_hit(space: Namespace, asked: int) -> None:
    out = np.empty(SHARD_BYTES, np.uint8)
    deadline = time.monotonic() + BOUND_S
    while True:
        with space.read([key_of(asked)], wait_ms=1000) as lease:
            if lease.hits and lease.copy_to(0, out):
                break
            lease.settled()
        assert time.monotonic() < deadline, lease
    assert out.tobytes() == content(asked), "wrong bytes"


def round_trips(space: Namespace, asking: Namespace, chunks: int) -> Iterator[Row]:
    """512 keys that are anywhere on SSD; 512 that are in DRAM, of which `asking` asks and `space` looks them up."""
    dice = random.Random(1)

    def anywhere() -> list[ChunkKey]:
        return [key_of(dice.randrange(chunks)) for _ in range(BATCH)]

    def match(keys: list[ChunkKey]) -> None:
        assert space.match(keys).usable == BATCH

    yield {"what": "match of 512"} | spread(times(match, anywhere, ROUNDS), 1, "ms")
    unknown = random.Random().randrange(1 << 40, 1 << 60)  # also to an index that an earlier run has used
    resident = [chains(unknown + first) for first in range(0, 16 * BATCH, BATCH)]
    for keys in resident:
        with space.write(keys) as batch:
            assert len(batch.granted) == BATCH, batch
            for number in batch.granted:
                batch.buffer(number)[:] = number % 251
            assert batch.commit().ok

    def read(keys: list[ChunkKey]) -> None:
        with asking.read(keys) as lease:
            assert lease.hits == BATCH, lease

    def resident_match(by: Namespace) -> Callable[[list[ChunkKey]], None]:
        def match(keys: list[ChunkKey]) -> None:
            assert by.match(keys).usable == BATCH

        return match

    for what, by in ((LOOKED_UP, space), (ASKED, asking)):
        yield {"what": what} | spread(
            times(resident_match(by), lambda: dice.choice(resident), ROUNDS), 1, "ms"
        )
    reads = times(read, lambda: dice.choice(resident), ROUNDS)
    yield {"what": "acquire + release of 512"} | spread(reads, 1, "ms")


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads: what a machine that does nothing else would need at least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_anon_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/PID/status has no RssAnon")


# ----------------------------------------------------------------------------------------------------------- the whole


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Of whatever was measured."""
    found = {(row["part"], row["chunks"], row.get("sessions"), row["what"]): row for row in rows}
    goals: list[Goal] = []

    def at_most(name: str, key: tuple[str, int, int | None, str], limit: float, unit: str) -> None:
        if key in found:
            goals.append(Goal(name, found[key]["p50"], unit, limit, "<="))

    sizes = {part: {row["chunks"] for row in rows if row["part"] == part} for part in ("core", "daemon")}
    for chunks in sorted(sizes["daemon"] - {min(DAEMON_CHUNKS)}):
        with_ = f"round trip with {chunks:,} chunks, p50"
        at_most(f"match of 512 keys: {with_}", ("daemon", chunks, None, "match of 512"), MATCH_MS, "ms")
        key = ("daemon", chunks, None, "acquire + release of 512")
        at_most(f"acquire + release of 512 chunks: {with_}", key, LEASE_MS, "ms")
    for chunks in sorted(sizes["daemon"]):
        looked, asked = (found.get(("daemon", chunks, None, what)) for what in (LOOKED_UP, ASKED))
        if looked and asked:
            share = looked["p50"] / asked["p50"]
            goals.append(
                Goal(f"{LOOKED_UP} over {ASKED}, {chunks:,} chunks", share, "x", LOOKED_UP_SHARE, "<=")
            )
    one, its = (
        found.get((part, BYTES_AT, None, what))
        for part, what in (("core", "memory"), ("daemon", "directory"))
    )
    if one and its:
        name = f"memory with the directory at {BYTES_AT:,} chunks"
        goals.append(Goal(name, one["p50"] + its["p50"], "bytes per chunk", BYTES_WITH_DIRECTORY, "<="))
    key = ("daemon", 1_000_000, None, "start to first hit")
    at_most("restart with 1,000,000 chunks: start to first hit", key, RESTART_S, "s")
    with_it, without = (
        found.get(("daemon", BYTES_AT, None, f"start to first hit{how}")) for how in ("", NO_DIRECTORY)
    )
    if with_it and without:
        name = f"restart with {BYTES_AT:,} chunks: with the directory over without"
        goals.append(Goal(name, with_it["p50"] / without["p50"], "x", RESTART_SHARE, "<="))
    at_most(
        f"memory of the core at {BYTES_AT:,} chunks",
        ("core", BYTES_AT, None, "memory"),
        BYTES_PER_CHUNK,
        "bytes per chunk",
    )
    most, least = max(sizes["core"], default=0), min(sizes["core"], default=0)
    for what, limit in US_PER_KEY.items():
        at_most(f"core, {what} with {most:,} chunks", ("core", most, None, what), limit, "µs per key")
    for row in rows:
        small = found.get(("core", least, None, row["what"]))
        if small is not None and row["chunks"] == most > least and row["unit"] == "µs per key":
            name = f"core, {row['what']}: {most:,} chunks over {least:,}"
            goals.append(Goal(name, row["p50"] / small["p50"], "times", TIMES_MORE, "<="))
    return goals


def table(rows: Sequence[Row]) -> None:
    for part, size in (("core", "chunks"), ("sessions", "sessions"), ("daemon", "chunks")):
        mine = [row for row in rows if row["part"] == part]
        if not mine:
            continue
        sizes = sorted({row[size] for row in mine})
        print(f"\n{f'{part}, p50':40}" + "".join(f"{found:>14,}" for found in sizes))
        names = dict.fromkeys((row["what"].partition(" (")[0], row["unit"]) for row in mine)
        for what, unit in names:
            cells = {row[size]: row["p50"] for row in mine if row["what"].partition(" (")[0] == what}
            line = "".join(f"{cells[found]:>14,.2f}" if found in cells else " " * 14 for found in sizes)
            print(f"{f'{what} [{unit}]':40}{line}")
    print()


def in_fresh_process(part: str, *args: object) -> list[Row]:
    command = [sys.executable, "-P", __file__, "--part", part, *map(str, args)]
    found: list[Row] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return found


@contextmanager
def folder_for_indices(chosen: str | None) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        yield Path(chosen or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))


def main() -> int:
    options = arguments(__doc__)
    options.add_argument(
        "--only", nargs="+", metavar="PART", help="core, sessions or daemon; with a size as core:10000"
    )
    options.add_argument(
        "--indices", metavar="DIR", help="keep the daemon's indices there, and use those that it has"
    )
    options.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.part is not None:
        part, size, *rest = chosen.part
        measure: dict[str, Callable[..., list[Row]]] = {"core": core, "sessions": sessions, "daemon": daemon}
        print(json.dumps(measure[part](int(size), *map(Path, rest))))
        return 0
    rows: list[Row] = []
    print(heading(__file__), flush=True)
    with folder_for_indices(chosen.indices) as indices:
        for part, sizes in (("core", CHUNKS), ("sessions", SESSIONS), ("daemon", DAEMON_CHUNKS)):
            for size in sizes:
                if chosen.only and not {part, f"{part}:{size}"} & set(chosen.only):
                    continue
                if chosen.quick and size not in QUICK[part]:
                    continue
                rows += in_fresh_process(part, size, *([indices / str(size)] if part == "daemon" else []))
                print(f"{part} with {size:,}: measured", flush=True)
                keep(__file__, chosen, rows, (), key=KEY)  # goals are of the largest that is measured
    table(rows)
    return finish(__file__, chosen, rows, goals(rows), key=KEY)


if __name__ == "__main__":
    sys.exit(main())
