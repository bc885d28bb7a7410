"""kill -9 of a real daemon at random moments, again and again, under processes that go on; an oracle judges each time.

A *life* is a directory with settings drawn from the seed, and ten or so *rounds* in it: load, kill, start, judge. What
the oracle knows of a chunk, from what its worker wrote down before and after each call:

    durable   acknowledged by Commit(wait=DURABLE), or found after a crash: is there, for ever
    visible   acknowledged: is there if that was more than durable_within_ms before the kill
    maybe     sent, not acknowledged: there or not
    gone      forgotten for good, as its answer said, or found missing after a crash: stays away

and of a session: at least what was acknowledged so long ago, at most what was ever sent. In lives with too small an SSD
(`pressure`: slab files change hands, the index runs full) nothing has to be there. Whatever is there is bit-exact. A
life ends in good order, the daemon's invariants are checked, and `kvctl check` must find nothing wrong.

Kills fall anywhere, while the daemon hangs in a certain call of the disk or of LMDB, while it starts (also several
times over), and as a *power cut*: what was not synced never reaches the slab files, or in part. LMDB writes its files
past the disk port: of them a power cut loses nothing here.

A machine that stands still for a while breaks promises of time for reasons of its own: the program watches its own
clock, and expects nothing of the moments in which it stood still itself.

    python tests/stress/crash.py [--rounds 300] [--seed N] [--json]       exit status 0: every goal met
    python tests/stress/crash.py --canary       a disk whose syncs lie: must be found out, exit status 1

A failing run prints its seed; the same seed draws the same lives and moments, though not the same scheduling.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not searched (PYTHONSAFEPATH)
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import (
    BOUND_S,
    CHUNK_TOKENS,
    SPACES,
    Daemon,
    Hang,
    Weather,
    Wrong,
    check_bytes,
    check_directory,
    client_of,
    content,
    goal,
    key_of,
    log_lines,
    open_all,
    until,
)
from harness import commit, machine

from kvstore.client import Namespace, SessionEntry
from kvstore.errors import Conflict, NotFound, StoreError
from kvstore.option_types import whole
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason, Wait

WORKERS = 3
CHAIN = 12
"""Chunks of a conversation."""
DURABLE_WITHIN_S = 0.8
ROUNDS_PER_LIFE = 10
REMEMBERED = 200
"""Of the older chunks so many are asked for again after every later crash; all would take ever longer."""
ASK = 16
COUNTERS = (
    "chunks_demoted",
    "chunks_promoted_on_demand",
    "chunks_evicted_from_ssd",
    "index_full",
    "ssd_healed",
)
"""Of the daemon, under load: that the rounds reach what they are to reach."""
MISSES = (Reason.NEVER_SEEN, Reason.LOST, Reason.EVICTED, Reason.INCOMPLETE, Reason.FORGOTTEN)
AGAIN = (Reason.ON_SSD, Reason.SLOW, Reason.BEING_SAVED, Reason.UNAVAILABLE)
KINDS = {
    "any moment": 30,
    "power cut": 20,
    "in a write": 8,
    "in a sync": 8,
    "in the index": 14,
    "in a deletion": 6,
    "in a start": 14,
}
INDEX_CALLS = ("begin", "put", "delete", "commit", "committed")
START_CALLS = ("open", "read", "allocate", *(f"index_{call}" for call in ("open", "begin", "commit", "read")))

Talk = tuple[int, int, int]
"""(namespace, worker, chain)"""
Chunk = tuple[int, int, int, int]


# ----------------------------------------------------------------------------------------------------------- workers


class Worker:
    """A process that saves conversations, names them, reads and forgets some, and writes down what it was told."""

    def __init__(self, run_dir: Path, number: int, seed: int) -> None:
        self.client = client_of(run_dir)
        self.spaces = open_all(self.client)
        self.number = number
        self.chance = random.Random(f"{seed}/{number}")
        self.chains = seed << 20  # of a life: no key ever comes back
        self.known: list[Chunk] = []
        self.talks: list[tuple[Talk, int]] = []
        self.reads = 0
        self.begin()

    def begin(self) -> None:
        self.chains += 1
        self.talk: Talk = (self.chance.randrange(len(SPACES)), self.number, self.chains)
        self.at = 0
        self.version = 0
        self.named = 0
        self.boot = self.client.boot_id

    def tell(self, *what: Any) -> None:
        os.write(1, json.dumps(what).encode() + b"\n")

    def run(self) -> None:
        """Commands are single letters: go, stop, quit."""
        going = False
        while True:
            ready, _, _ = select.select([0], [], [], 0 if going else None)
            if ready:
                command = os.read(0, 1)
                if command in (b"q", b""):
                    return
                going = command == b"g"
                if going:
                    self.client.wait_connected(BOUND_S)
                    self.begin()
                else:
                    self.tell("idle", self.reads)
            if going and not self.step():
                time.sleep(0.01)  # the daemon is away

    def step(self) -> bool:
        dice = self.chance.random()
        if dice < 0.3 and self.known:
            return self.read()
        if dice < 0.34 and self.talks:
            return self.forget()
        return self.save()

    def save(self) -> bool:
        count = min(self.chance.randint(1, 4), CHAIN - self.at)
        space = self.talk[0]
        chunks = [(*self.talk, self.at + n) for n in range(count)]
        keys = [key_of(*chunk) for chunk in chunks]
        parent = key_of(*self.talk, self.at - 1) if self.at else ChunkKey(b"")
        durable = self.number > 0 and self.chance.random() < 0.4  # worker 0 waits for no disk
        with self.spaces[space].write(keys, parent=parent) as batch:
            if len(batch.granted) < count:
                if not self.client.connected or batch.results[0] is GrantResult.ALREADY:
                    self.begin()
                return self.client.connected
            for index, key in enumerate(keys):
                for shard, size in enumerate(SPACES[space].shard_bytes):
                    batch.buffer(index, shard)[:] = memoryview(content(key, shard, size))
            self.tell("maybe", *self.talk, self.at, count)
            outcome = batch.commit(wait=Wait.DURABLE if durable else Wait.VISIBLE)
        if not outcome.ok:
            self.begin()
            return self.client.connected
        self.tell("visible", *self.talk, self.at, count, time.monotonic(), durable)
        self.known += chunks
        self.at += count
        self.name()
        if self.at == CHAIN:
            self.talks.append((self.talk, self.named))
            self.begin()
        return True

    def name(self) -> None:
        """The session follows its chunks."""
        append = [
            SessionEntry(key_of(*self.talk, n), n * CHUNK_TOKENS, CHUNK_TOKENS)
            for n in range(self.named, self.at)
        ]
        self.tell("naming", *self.talk, self.at)
        try:
            info = self.spaces[self.talk[0]].update_session(
                session_of(self.talk), expected_version=self.version, keep=self.named, append=append
            )
        except Conflict:
            if self.client.boot_id == self.boot:
                raise
            self.begin()
            return
        except StoreError:
            self.begin()  # lost with the daemon, or (a full SSD) some chunk of it was dropped already
            return
        if info.version <= self.version:
            raise Wrong(f"version {info.version} of a session after {self.version}")
        self.version = info.version
        self.named = self.at
        self.tell("named", *self.talk, self.at, time.monotonic())

    def forget(self) -> bool:
        talk, _ = self.talks.pop(self.chance.randrange(len(self.talks)))
        self.tell("forgetting", *talk)
        self.known = [chunk for chunk in self.known if chunk[:3] != talk]
        space = self.spaces[talk[0]]
        try:
            with contextlib.suppress(NotFound):  # lost with an earlier crash
                if space.forget(session_of(talk)).not_durable:
                    return True
            if space.forget(keys=[key_of(*talk, number) for number in range(CHAIN)]).not_durable:
                return True
        except StoreError:
            return False
        self.tell("forgotten", *talk)
        return True

    def read(self) -> bool:
        """Old chunks too, so that promotions and demotions go on."""
        chunks = self.chance.sample(self.known[-400:], min(4, len(self.known)))
        for space in {chunk[0] for chunk in chunks}:
            keys = [key_of(*chunk) for chunk in chunks if chunk[0] == space]
            with self.spaces[space].read(keys, wait_ms=200, any_order=True) as lease:
                self.reads += len(check_bytes(lease, keys, SPACES[space].shard_bytes))
                lease.settled()
        return self.client.connected


def session_of(talk: Talk) -> bytes:
    return b"talk %d/%d/%d" % talk


def work(run_dir: str, number: int, seed: int) -> None:
    stands = Path(run_dir).with_name(f"worker-{number}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, stands)  # where it stands, when it seems to hang
    worker = None
    try:
        worker = Worker(Path(run_dir), number, seed)
        worker.tell("idle", 0)
        worker.run()
        worker.client.close()
    except Wrong as problem:
        os.write(1, json.dumps(["wrong", str(problem)]).encode() + b"\n")
    except Exception:
        os.write(1, json.dumps(["failed", traceback.format_exc()]).encode() + b"\n")


# ------------------------------------------------------------------------------------------------------------ oracle


class Standstill:
    """How long this process was not run, although it wanted to: `lost_s`, in pieces of at least STEP_S."""

    STEP_S = 0.1

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(self.STEP_S / 2):
            now = time.monotonic()
            if now - last > self.STEP_S:
                self.lost_s += now - last
            last = now


@dataclass
class Known:
    """Of one chunk."""

    visible_at: float | None = None
    durable: bool = False
    forgetting: bool = False
    forgotten: bool = False


@dataclass
class Named:
    """Of one session."""

    sent: int = 0
    acknowledged: list[tuple[float, int]] = field(default_factory=list)
    forgetting: bool = False
    forgotten: bool = False


class Oracle:
    def __init__(self) -> None:
        self.chunks: dict[Chunk, Known] = {}
        self.sessions: dict[Talk, Named] = {}
        self.gone: set[Chunk] = set()
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def hear(self, what: list[Any]) -> None:
        kind, rest = what[0], what[1:]
        with self.lock:
            if kind in ("wrong", "failed"):
                self.wrong.append(f"{kind}: {rest[0]}")
                return
            talk: Talk = (rest[0], rest[1], rest[2])
            match kind:
                case "maybe":
                    for number in range(rest[3], rest[3] + rest[4]):
                        self.chunks.setdefault((*talk, number), Known())
                case "visible":
                    for number in range(rest[3], rest[3] + rest[4]):
                        known = self.chunks[(*talk, number)]
                        known.visible_at, known.durable = rest[5], rest[6]
                    self.counts["chunks saved"] += rest[4]
                    self.counts["acknowledged as durable"] += rest[4] * rest[6]
                case "naming":
                    named = self.sessions.setdefault(talk, Named())
                    named.sent = max(named.sent, rest[3])
                case "named":
                    self.sessions[talk].acknowledged.append((rest[4], rest[3]))
                    self.counts["sessions updated"] += 1
                case "forgetting" | "forgotten":
                    self.counts["sessions forgotten"] += kind == "forgotten"
                    records: list[Known | Named] = [
                        known for chunk, known in self.chunks.items() if chunk[:3] == talk
                    ]
                    records += [named] if (named := self.sessions.get(talk)) else []
                    for record in records:
                        record.forgetting = True
                        record.forgotten = kind == "forgotten"


# ------------------------------------------------------------------------------------------------------------- lives


class Life:
    """One directory, one set of settings, its workers, its oracle."""

    def __init__(self, folder: Path, seed: int, *, pressure: bool, direct: bool, log_level: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.pressure = pressure
        self.chance = random.Random(f"life {seed}")
        self.weather = Weather(folder)
        self.weather.set()
        self.settings: dict[str, Any] = {
            "dram_bytes": "8M",
            "segment_bytes": "1M",
            "staging_bytes": "2M",
            "staging_bytes_max": "32M",
            "reserve_share_max": 0.5,
            "ssd_dir": folder / "ssd",
            "ssd_bytes": "12M" if pressure else "4G",
            "ssd_slab_bytes": "2M" if pressure else "8M",
            "ssd_index_bytes": "1M" if pressure else "32M",
            "ssd_direct_io": str(direct).lower(),
            "ssd_deadline_ms": 20_000,
            "durable_within_ms": int(DURABLE_WITHIN_S * 1000),
            "drain_ms": 500,
            "log_level": log_level,
        }
        self.name = f"{'pressure' if pressure else 'room'}, {'direct' if direct else 'buffered'} I/O"
        self.seed = seed
        self.oracle = Oracle()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.idle = [threading.Event() for _ in range(WORKERS)]
        self.reads = [0] * WORKERS
        self.daemon = self.begin()

    def start(self) -> None:
        run_dir = self.folder / "run"
        self.client = client_of(run_dir)
        self.spaces = open_all(self.client)
        for number in range(WORKERS):
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, "--worker", str(run_dir), str(number), str(self.seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
            self.workers.append(process)
            threading.Thread(target=self.listen, args=(number, process), daemon=True).start()
        self.wait_idle()

    def begin(self) -> Daemon:
        return Daemon(self.folder, self.settings)

    def listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            what = json.loads(line)
            if what[0] == "idle":
                self.reads[number] = what[1]
                self.idle[number].set()
            else:
                self.oracle.hear(what)
        self.idle[number].set()

    def command(self, letter: bytes) -> None:
        for number, process in enumerate(self.workers):
            assert process.stdin is not None
            self.idle[number].clear()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(letter)
                process.stdin.flush()

    def wait_idle(self) -> None:
        deadline = time.monotonic() + BOUND_S
        while not all(event.wait(0.01) for event in self.idle):
            self.check_workers()
            if time.monotonic() > deadline:
                number = next(number for number, event in enumerate(self.idle) if not event.is_set())
                self.workers[number].send_signal(signal.SIGUSR1)
                time.sleep(5.0)
                stands = (self.folder / f"worker-{number}.txt").read_text()
                raise Hang(f"worker {number} does not answer: {stands}")
        self.check_workers()

    def check_workers(self) -> None:
        if self.oracle.wrong:
            raise Wrong("; ".join(self.oracle.wrong))
        for number, process in enumerate(self.workers):
            if process.poll() is not None:
                raise Wrong(f"worker {number} ended: {process.returncode}")

    # -------------------------------------------------------------------------------------------------- one round

    def round(self, kind: str, *, canary: bool = False) -> Counter[str]:
        if canary:
            self.weather.set(
                {"calls": ["write"], "files": "slab-*", "do": "hold"}, {"calls": ["sync"], "do": "lie"}
            )
        self.command(b"g")
        with Standstill() as still:
            time.sleep(self.chance.uniform(0.9, 1.5))
            before = self.client.stats().counters
            promised = self.arrange(kind)
            self.daemon.kill()
            promised = min(promised, time.monotonic()) - still.lost_s
        self.weather.set()
        self.command(b"s")
        log_start = self.daemon.log.stat().st_size
        if kind == "in a start":
            for _ in range(self.chance.randint(1, 3)):
                self.killed_start()
        if self.pressure and self.chance.random() < 0.2:
            self.settings["ssd_bytes"] = self.chance.choice(("8M", "12M", "20M"))
        began = time.monotonic()
        self.daemon = self.begin()
        until(lambda: self.daemon.alive and self.client.connected, "the daemon does not start")
        started = time.monotonic() - began
        self.wait_idle()
        counts = self.judge(promised)
        counts["start ms"] = round(1000 * started)
        counts.update({f"daemon: {name}": before[name] for name in COUNTERS})
        counts["daemon: chunks_reused"] = self.client.stats().counters["chunks_reused"]
        torn = kind == "power cut"
        counts["ms in which the machine stood still"] = round(1000 * still.lost_s)
        for line in log_lines(self.daemon.log, log_start):
            message = str(line["message"])
            if message.startswith("a record on SSD is corrupt"):
                counts["alarms: corrupt after a power cut" if torn else "alarms: corrupt"] += 1
            elif line.get("level") in ("error", "critical"):
                raise Wrong(f"the daemon says: {line}")
            elif "unreadable or name what is gone" in message or message.startswith("dropped"):
                counts["alarms: index rows without records"] += not self.pressure
        return counts

    def arrange(self, kind: str) -> float:
        """Bring the daemon where it is to be killed; returns until when the disk kept its promise."""
        skip = self.chance.randrange(6)
        now = time.monotonic()
        faults: dict[str, list[dict[str, Any]]] = {
            "in a write": [{"calls": ["write"], "files": "slab-*", "do": "hang", "skip": skip}],
            "in a sync": [{"calls": ["sync"], "files": "slab-*", "do": "hang"}],
            "in the index": [
                {"calls": [f"index_{self.chance.choice(INDEX_CALLS)}"], "do": "hang", "skip": skip}
            ],
            "in a deletion": [{"calls": ["unlink", "index_delete"], "do": "hang", "skip": skip // 3}],
        }
        if kind in faults:
            self.weather.set(*faults[kind])
            time.sleep(self.chance.uniform(0.05, 0.5))
            return now
        if kind == "power cut":
            files = self.chance.choice(("slab-*", "slab-*[02468].kvs", "slab-*[13579].kvs"))
            do = self.chance.choice(("hold", "hold", "part"))
            self.weather.set({"calls": ["write"], "files": files, "do": do})
            time.sleep(self.chance.uniform(0.3, 0.8))
        return time.monotonic()

    def killed_start(self) -> None:
        """A daemon that is killed while it opens its directory."""
        call = self.chance.choice(START_CALLS)
        if self.chance.random() < 0.5:
            self.weather.set({"calls": [call], "do": "hang", "skip": self.chance.randrange(8)})
        daemon = self.begin()
        until(lambda: not daemon.alive or any("/ssd/lock" in name for name in daemon.files()), "no start")
        time.sleep(self.chance.uniform(0.0, 0.15))
        if not daemon.alive:
            raise Wrong(f"the daemon ended with status {daemon.process.returncode} when it was started")
        daemon.kill()
        self.weather.set()

    # ------------------------------------------------------------------------------------------------------ judging

    def judge(self, promised: float) -> Counter[str]:
        """Compare what the daemon has with what the oracle knows. Nobody writes meanwhile."""
        oracle = self.oracle
        since = promised - DURABLE_WITHIN_S
        with oracle.lock:
            chunks, oracle.chunks = oracle.chunks, {}
            sessions, oracle.sessions = oracle.sessions, {}
        must = {
            chunk
            for chunk, known in chunks.items()
            if not known.forgetting
            and (known.durable or (known.visible_at is not None and known.visible_at < since))
        }
        must_not = {chunk for chunk, known in chunks.items() if known.forgotten}
        again = set(self.chance.sample(sorted(oracle.gone), min(REMEMBERED // 4, len(oracle.gone))))
        had = self.had([*chunks, *again])
        if lost := sorted(must - had) if not self.pressure else []:
            durable = sum(chunks[chunk].durable for chunk in lost)
            raise Wrong(
                f"{len(lost)} of {len(must)} chunks are lost, {durable} of them acknowledged as durable; the first:"
                f" {lost[0]} {chunks[lost[0]]}, promised until {promised}"
            )
        if back := sorted(had & (must_not | again)):
            raise Wrong(f"{len(back)} chunks came back, the first: {back[0]} {chunks.get(back[0])}")
        for talk, named in sessions.items():
            self.judge_session(talk, named, since)
        for number, space in enumerate(self.spaces):
            with space.read([key_of(number, 99, 99, 99)], any_order=True) as lease:
                if lease.reasons != (Reason.NEVER_SEEN,):
                    raise Wrong(f"a key that nobody wrote: {lease.reasons}")
        oracle.gone = set(chunks) - had if self.chance.random() < 0.3 else oracle.gone | (set(chunks) - had)
        # What is there came out of the index: it is durable. What was sent to be forgotten may yet go.
        kept = sorted(chunk for chunk in had if not chunks[chunk].forgetting)
        for chunk in self.chance.sample(kept, min(REMEMBERED, len(kept))):
            oracle.chunks[chunk] = Known(0.0, durable=True)
        for talk, named in sessions.items():
            if not named.forgetting and self.chance.random() < 0.1:
                oracle.sessions[talk] = Named(named.sent, [(0.0, self.entries(talk))])
        return Counter(
            {
                "checked": len(chunks) + len(again),
                "had to be there": len(must),
                "there": len(had),
                "unacknowledged but there": sum(chunks[chunk].visible_at is None for chunk in had),
                "sessions checked": len(sessions),
            }
        )

    def had(self, chunks: list[Chunk]) -> set[Chunk]:
        """Those that can be had; what is on SSD but finds no slot at once is asked for again."""
        found: set[Chunk] = set()
        for number, space in enumerate(self.spaces):
            mine = [chunk for chunk in chunks if chunk[0] == number]
            for start in range(0, len(mine), ASK):
                found |= self.had_in(space, number, mine[start : start + ASK])
        return found

    def had_in(self, space: Namespace, number: int, chunks: list[Chunk]) -> set[Chunk]:
        sizes = SPACES[number].shard_bytes
        left = {key_of(*chunk): chunk for chunk in chunks}
        found: set[Chunk] = set()

        def ask() -> bool:
            keys = list(left)
            with space.read(keys, wait_ms=2_000, any_order=True) as lease:
                lease.settled()
                with space.read(
                    keys, any_order=True
                ) as again:  # pinned meanwhile, so that it does not go again
                    had = check_bytes(again, keys, sizes)
                    found.update(left.pop(key) for key in had)
                    for key, outcome, reason in zip(keys, again.outcomes, again.reasons, strict=True):
                        if outcome is Outcome.MISS and reason not in AGAIN:
                            if reason not in (*MISSES, Reason.CORRUPT):
                                raise Wrong(f"{key.decode()} is missing because of {reason}")
                            left.pop(key, None)
            return not left

        until(ask, f"neither had nor missing: {left}")
        return found

    def entries(self, talk: Talk) -> int:
        info = self.spaces[talk[0]].get_session(session_of(talk))
        return 0 if info is None else len(info.entries)

    def judge_session(self, talk: Talk, named: Named, since: float) -> None:
        info = self.spaces[talk[0]].get_session(session_of(talk))
        entries = 0 if info is None else len(info.entries)
        least = max((count for at, count in named.acknowledged if at < since), default=0)
        if named.forgetting or self.pressure:
            least = 0
        most = 0 if named.forgotten else named.sent
        if not least <= entries <= most:
            raise Wrong(f"session {talk} has {entries} entries, not {least} to {most}: {named}")
        if info is not None and [entry.key for entry in info.entries] != [
            key_of(*talk, number) for number in range(entries)
        ]:
            raise Wrong(f"session {talk} names other chunks: {info}")

    # ----------------------------------------------------------------------------------------------------------- end

    def end(self) -> int:
        """In good order: every process ends by itself, the daemon after it has checked its invariants."""
        self.command(b"q")
        for process in self.workers:
            process.wait(BOUND_S)
        self.check_oracle()
        self.client.close()
        if (status := self.daemon.stop()) != 0:
            raise Wrong(f"the daemon ended with status {status}: {log_lines(self.daemon.log)[-3:]}")
        check_directory(self.folder, self.settings["ssd_dir"])
        return sum(self.reads)

    def check_oracle(self) -> None:
        if self.oracle.wrong:
            raise Wrong("; ".join(self.oracle.wrong))

    def abandon(self) -> None:
        for process in (*self.workers, self.daemon.process):
            if process.poll() is None:
                process.kill()
            process.wait(BOUND_S)


# -------------------------------------------------------------------------------------------------------------- main


def can_do_direct_io(folder: Path) -> bool:
    try:
        fd = os.open(folder / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    os.close(fd)
    return True


def draw_lives(seed: int, rounds: int, *, direct: bool) -> list[tuple[int, bool, bool, list[str]]]:
    """(seed, pressure, direct I/O, kinds of its rounds)"""
    chance = random.Random(seed)
    lives = []
    while rounds > 0:
        count = min(rounds, ROUNDS_PER_LIFE)
        kinds = chance.choices(list(KINDS), list(KINDS.values()), k=count)
        pressure = len(lives) % 3 == 2
        lives.append((chance.randrange(1 << 20), pressure, direct and chance.random() < 0.3, kinds))
        rounds -= count
    return lives


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=whole(1), default=300)
    options.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    options.add_argument(
        "--folder", type=Path, default=None, help="for the daemons' directories; default: TMPDIR"
    )
    options.add_argument("--log-level", default="debug", help="of the daemons; debug: invariants at the end")
    options.add_argument("--canary", action="store_true", help="a disk that lies about what it has synced")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        work(chosen.worker[0], int(chosen.worker[1]), int(chosen.worker[2]))
        return 0
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {chosen.rounds} rounds", flush=True)
    # Short, because a socket's path is bounded
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=chosen.folder))
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    took: list[float] = []
    failure, hangs = "", 0
    began = time.monotonic()
    lives = draw_lives(seed, chosen.rounds, direct=can_do_direct_io(folder))
    for number, (life_seed, pressure, direct, planned) in enumerate(lives):
        life = None
        try:
            life = Life(
                folder / str(number), life_seed, pressure=pressure, direct=direct, log_level=chosen.log_level
            )
            life.start()
            for kind in planned:
                at = time.monotonic()
                counts = life.round("any moment" if chosen.canary else kind, canary=chosen.canary)
                took.append(time.monotonic() - at)
                kinds[kind] += 1
                totals += counts
                totals += life.oracle.counts
                life.oracle.counts.clear()
                shown = ", ".join(f"{value} {name}" for name, value in counts.items() if value)
                print(f"round {len(took)}, life {number} ({life.name}), {kind}: {shown}", flush=True)
            totals["reads under load"] += life.end()
        except (Wrong, Hang, StoreError, subprocess.SubprocessError) as problem:
            hangs += isinstance(problem, Hang)
            failure = f"{type(problem).__name__}: {problem}"
            print(f"seed {seed}, life {number}, round {len(took) + 1}: {failure}", flush=True)
            print(f"its directory is kept: {folder / str(number)}", flush=True)
        finally:
            if life is not None:
                life.abandon()
        if failure:
            break
        shutil.rmtree(folder / str(number))
    if not failure:
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    table(kinds, totals, took)
    goals = [
        goal("rounds", len(took), chosen.rounds, at_least=True),
        goal("wrong bytes, lost or resurrected chunks", int(bool(failure) and not hangs), 0),
        goal("hangs", hangs, 0),
        goal("false alarms of corruption without a power cut", totals["alarms: corrupt"], 0),
        goal("index rows without records", totals["alarms: index rows without records"], 0),
        goal("seconds a round", statistics.mean(took) if took else 0.0, 3.0, "s"),
    ]
    for one in goals:
        print(
            f"{'met   ' if one['met'] else 'MISSED'} {one['name']}: {one['value']} {one['unit']}", flush=True
        )
    if chosen.json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "commit": commit(__file__),
                    "seed": seed,
                    "seconds": round(seconds, 1),
                    "rounds": len(took),
                    "kinds": kinds,
                    "totals": totals,
                    "failure": failure,
                    "goals": goals,
                }
            )
        )
    return 0 if all(one["met"] for one in goals[:5]) else 1


def table(kinds: Counter[str], totals: Counter[str], took: list[float]) -> None:
    if took:
        print(f"{len(took)} rounds, {statistics.mean(took):.2f} s each (longest {max(took):.2f} s)")
    for name, count in kinds.most_common():
        print(f"{count:>10,}  killed {'at ' if name == 'any moment' else ''}{name}")
    for name, count in sorted(totals.items()):
        if name != "start ms":
            print(f"{count:>10,}  {name}")


if __name__ == "__main__":
    sys.exit(main())
