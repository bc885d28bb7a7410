"""A real daemon with an SSD under full load for minutes: does anything grow, break or answer with wrong bytes?

Processes of two tenants save, name, read, truncate, fork and forget conversations, publish hints and open new epochs,
as fast as they can; both tenants use the same keys, with bytes of their own. Some processes stay, others join for a few
seconds and leave in order or are killed. Every byte that is read is compared.

Sessions that nobody uses end after half a minute, so that what killed processes leave behind does not grow for ever.
Each second the daemon's RssAnon, descriptors, threads and mappings are noted. Judged is what comes after the first
third (tables and caches fill): a robust line (Theil-Sen) through it must not rise over that time by more than a bound,
a share of the median and a little more (`BOUNDS`). Before the clock starts, the table of ghosts (keys that went, and
why) is filled to its cap, because it fills for minutes otherwise. At the end the daemon checks its invariants.

    python tests/stress/soak.py [--minutes 10] [--seed N] [--json]       exit status 0: every goal met
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not searched (PYTHONSAFEPATH)
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import (
    BOUND_S,
    CHUNK_TOKENS,
    Daemon,
    Hang,
    Weather,
    Wrong,
    client_of,
    content,
    goal,
    log_lines,
    space_of,
    until,
)
from harness import commit, machine

from kvstore.client import Client, Hint, Namespace, SessionEntry
from kvstore.client.lease import ReadLease
from kvstore.errors import Conflict, NotFound, StoreError
from kvstore.option_types import above_zero, whole
from kvstore.types import ChunkKey, Outcome, Wait

TENANTS = {"alice": 12_001, "bob": 12_002}
"""And the user ids that they come as; without root there is one tenant."""
SPACES = (space_of("one", 16 << 10), space_of("two", 10_000, 5_000), space_of("small", 3_000))
STAYING = 4
VISITORS_MAX = 2
CHAIN = 16
CHAINS_LIVE_MAX = 40
"""Conversations that a worker keeps; it forgets older ones."""
GHOSTS = 100_000
"""What the daemon remembers at most of keys that went."""
WARM_UP_SHARE = 1 / 3
BOUNDS = {"RssAnon": (0.03, 4 << 20), "descriptors": (0.05, 6), "threads": (0.0, 2), "mappings": (0.05, 12)}
"""By how much each may rise after the warm-up: this share of its median, and so much more."""

GAUGES = ("chunk_rows", "ghosts", "workers")
"""Of the daemon's tables, noted now and then: why memory rises, if it does."""
GAUGES_EVERY_S = 10


# ----------------------------------------------------------------------------------------------------------- workers


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """The daemon notes the effective user of whoever connects."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def key_of(space: int, pair: int, chain: int, number: int) -> ChunkKey:
    """The same for both tenants."""
    return ChunkKey(f"{SPACES[space].model}/{pair}/{chain}/{number}".encode())


class Worker:
    def __init__(self, run_dir: Path, number: int, seed: int) -> None:
        self.run_dir = run_dir
        self.pair, which = divmod(number, len(TENANTS))
        self.tenant = list(TENANTS)[which]
        self.chance = random.Random(f"{seed}/{number}")
        self.chains = number << 20
        self.live: list[tuple[int, int, int, int]] = []
        """(namespace, chain, chunks, version of the session)"""
        self.counts: Counter[str] = Counter()
        self.join()

    def join(self) -> None:
        with acting_as(TENANTS[self.tenant]):
            self.client: Client = client_of(self.run_dir)
        self.spaces: list[Namespace] = [self.client.open(spec) for spec in SPACES]

    def content(self, key: ChunkKey, shard: int, size: int) -> bytes:
        return content(self.tenant.encode() + key, shard, size)

    def run(self) -> None:
        """Until there is a letter on stdin, or nobody is there any more."""
        steps = [
            (10, self.save),
            (6, self.read),
            (1, self.hint),
            (1, self.truncate),
            (1, self.fork),
            (0.05, self.rejoin),
            (0.02, self.new_epoch),
        ]
        told = time.monotonic()
        while not select.select([0], [], [], 0)[0]:
            (step,) = self.chance.choices([step for _, step in steps], [weight for weight, _ in steps])
            with contextlib.suppress(NotFound, Conflict):  # a full store drops sessions' chunks, and sessions
                step()
            self.counts["steps"] += 1
            while len(self.live) > CHAINS_LIVE_MAX:
                self.forget()
            if time.monotonic() > told + 1:
                told = time.monotonic()
                self.tell()
        self.tell()
        self.client.close()

    def tell(self) -> None:
        os.write(1, json.dumps(["counts", self.counts]).encode() + b"\n")
        self.counts.clear()

    def save(self) -> None:
        """A turn: a few chunks at the end of a conversation, and its name."""
        if not self.live or self.chance.random() < 0.15:
            self.chains += 1
            self.live.append((self.chance.randrange(len(SPACES)), self.chains, 0, 0))
        at = self.chance.randrange(len(self.live))
        space, chain, have, version = self.live[at]
        count = min(self.chance.randint(1, 4), CHAIN - have)
        if not count:
            return
        keys = [key_of(space, self.pair, chain, have + number) for number in range(count)]
        parent = key_of(space, self.pair, chain, have - 1) if have else ChunkKey(b"")
        with self.spaces[space].write(keys, parent=parent) as batch:
            for index in batch.granted:
                for shard, size in enumerate(SPACES[space].shard_bytes):
                    data = self.content(keys[index], shard, size)
                    batch.buffer(index, shard)[:] = np.frombuffer(data, np.uint8)
            if len(batch.granted) < count:
                self.counts["saves refused"] += 1
                return
            if not batch.commit(wait=Wait.DURABLE if self.chance.random() < 0.1 else Wait.VISIBLE).ok:
                self.counts["saves failed"] += 1
                return
        self.counts["chunks saved"] += count
        append = [
            SessionEntry(key, (have + number) * CHUNK_TOKENS, CHUNK_TOKENS) for number, key in enumerate(keys)
        ]
        self.live.pop(at)  # a session that is gone in the meantime is not taken up again
        info = self.spaces[space].update_session(
            self.name(chain), expected_version=version, keep=have, append=append
        )
        self.live.append((space, chain, have + count, info.version))

    def name(self, chain: int) -> bytes:
        return b"%s %d" % (self.tenant.encode(), chain)

    def read(self) -> None:
        """Own chunks, or those that another worker of the tenant may have."""
        if not self.live:
            return
        space, chain, have, _ = self.chance.choice(self.live)
        pair = self.pair
        if self.chance.random() < 0.2:
            pair, have = self.chance.randrange(STAYING // len(TENANTS)), CHAIN
            chain = (pair * len(TENANTS) + list(TENANTS).index(self.tenant)) << 20 | self.chains & 0xFFFFF
        keys = [key_of(space, pair, chain, number) for number in range(max(1, have))]
        wait_ms = self.chance.choice((0, 0, 500))
        with self.spaces[space].read(keys, wait_ms=wait_ms, any_order=self.chance.random() < 0.5) as lease:
            self.check(lease, space)
            if wait_ms:
                lease.settled()

    def check(self, lease: ReadLease, space: int) -> None:
        for index, outcome in enumerate(lease.outcomes):
            self.counts["hits" if outcome is Outcome.HIT else "misses"] += 1
            if outcome is not Outcome.HIT:
                continue
            for shard, size in enumerate(SPACES[space].shard_bytes):
                out = np.empty(size, np.uint8)
                if lease.copy_to(index, out, shard=shard):
                    if out.tobytes() != self.content(lease.keys[index], shard, size):
                        raise Wrong(f"wrong bytes for {self.tenant}: {lease.keys[index]!r}, shard {shard}")
                    self.counts["bytes compared"] += size

    def hint(self) -> None:
        if self.live:
            space = self.chance.randrange(len(SPACES))
            mine = [chain for of, chain, have, _ in self.live if of == space and have][:8]
            hints = [Hint(b"job %d" % chain, n, session=self.name(chain)) for n, chain in enumerate(mine)]
            self.spaces[space].publish_queue(hints, ttl_ms=5_000)
            self.counts["hints"] += len(hints)

    def truncate(self) -> None:
        """What follows the hole is not used any more: the conversation ends."""
        long = [at for at, (_, _, have, version) in enumerate(self.live) if have > 4 and version]
        if long:
            space, chain, _, version = self.live.pop(self.chance.choice(long))
            self.spaces[space].truncate(
                self.name(chain),
                expected_version=version,
                first_token=CHUNK_TOKENS,
                token_count=2 * CHUNK_TOKENS,
            )
            self.counts["sessions truncated"] += 1
            self.spaces[space].forget(self.name(chain))

    def fork(self) -> None:
        if self.live:
            space, chain, have, _ = self.chance.choice(self.live)
            if have:
                fork = self.name(chain) + b" fork %d" % self.chance.randrange(1 << 40)
                self.spaces[space].fork(self.name(chain), fork)
                self.spaces[space].forget(fork)
                self.counts["sessions forked"] += 1

    def forget(self) -> None:
        space, chain, _, _ = self.live.pop(0)
        with contextlib.suppress(NotFound):
            self.spaces[space].forget(self.name(chain))
            self.counts["sessions forgotten"] += 1

    def rejoin(self) -> None:
        self.client.close()
        self.join()
        self.counts["connections"] += 1

    def new_epoch(self) -> None:
        """The weights were loaded anew: another namespace for its own conversations, the old one retires."""
        spec = replace(SPACES[2], model=f"epochs of {self.pair}", weights_epoch=int(time.monotonic() * 1000))
        space = self.client.open(spec)
        keys = [ChunkKey(b"epoch %d" % number) for number in range(4)]
        with space.write(keys) as batch:
            for index in batch.granted:
                batch.buffer(index)[:] = 7
            if batch.granted:
                batch.commit()
        self.counts["epochs"] += 1


def work(run_dir: str, number: int, seed: int) -> None:
    stands = Path(run_dir).with_name(f"worker-{os.getpid()}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, stands)  # where it stands, when it seems to hang
    try:
        Worker(Path(run_dir), number, seed).run()
    except Wrong as problem:
        os.write(1, json.dumps(["wrong", str(problem)]).encode() + b"\n")
    except Exception:
        os.write(1, json.dumps(["failed", traceback.format_exc()]).encode() + b"\n")


# ----------------------------------------------------------------------------------------------------------- judging


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Per second: the median of the slopes between all pairs (Theil-Sen), which no outlier moves."""
    t, v = np.asarray(times), np.asarray(values)
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


def judge(name: str, times: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """A goal: the rise after the warm-up."""
    start = times[0] + (times[-1] - times[0]) * WARM_UP_SHARE
    late = [(t, v) for t, v in zip(times, values, strict=True) if t >= start]
    share, more = BOUNDS[name]
    median = statistics.median(v for _, v in late)
    rise = slope([t for t, _ in late], [v for _, v in late]) * (late[-1][0] - late[0][0])
    scale, unit = (1 << 20, "MiB") if name == "RssAnon" else (1, "")
    return {
        **goal(f"rise of {name} after the warm-up", rise / scale, (median * share + more) / scale, unit),
        "median": median / scale,
        "last": values[-1] / scale,
    }


def sample(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "RssAnon": int(fields["RssAnon"].split()[0]) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


# -------------------------------------------------------------------------------------------------------------- main


def fill_ghosts(space: Namespace, count: int) -> None:
    """Each chunk with bytes of no worker, under a key of no worker's."""
    for start in range(0, count, 64):
        keys = [ChunkKey(b"%s/9/%d/0" % (space.spec.model.encode(), n)) for n in range(start, start + 64)]

        def attempt(keys: list[ChunkKey] = keys) -> bool:
            with space.write(keys) as batch:
                for index in batch.granted:
                    for shard in range(space.spec.shard_count):
                        batch.buffer(index, shard)[:] = 9
                return bool(batch.granted) and batch.commit().ok

        until(attempt, "the daemon stays full")
        space.forget(keys=keys)


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        folder.chmod(0o755)  # other users reach the sockets
        Weather(folder).set()
        self.folder = folder
        self.seed = seed
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.next = STAYING
        self.leaked: list[Client] = []
        self.daemon = Daemon(
            folder,
            {
                "dram_bytes": "32M",
                "segment_bytes": "2M",
                "staging_bytes": "2M",
                "staging_bytes_max": "64M",
                "reserve_share_max": 0.25,
                "ssd_dir": folder / "ssd",
                "ssd_bytes": "96M",
                "ssd_slab_bytes": "4M",
                "ssd_index_bytes": "8M",
                "ssd_deadline_ms": 20_000,
                "durable_within_ms": 1_000,
                "session_ttl_ms": 30_000,  # else what visitors leave behind grows for ever, as it should
                "log_level": "debug",
                "tenants": ",".join(f"{uid}={tenant}" for tenant, uid in TENANTS.items()),
            },
        )

    def fill_ghosts(self, count: int) -> None:
        """Save and forget chunks until the daemon remembers as many keys as it ever will: in the namespaces where
        others will take their place, because each has a table of its own."""
        self.client = client_of(self.folder / "run")
        for uid in TENANTS.values():
            with acting_as(uid):
                client = client_of(self.folder / "run")
            for spec in SPACES:
                fill_ghosts(client.open(spec), count // (len(TENANTS) * len(SPACES)))
            client.close()

    def start(self, number: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", __file__),
                "--worker",
                f"{self.folder}/run",
                str(number),
                str(self.seed),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        threading.Thread(target=self.listen, args=(process,), daemon=True).start()
        self.processes.append(process)
        return process

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a process that was killed
                kind, what = json.loads(line)
                if kind == "counts":
                    self.counts.update(what)
                else:
                    self.problems.append(f"{kind}: {what}")

    def leave(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"q")
            process.stdin.close()
        try:
            status = process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(5.0)
            stands = (self.folder / f"worker-{process.pid}.txt").read_text()
            raise Hang(f"a worker (pid {process.pid}) does not end: {stands}") from None
        (self.folder / f"worker-{process.pid}.txt").unlink(missing_ok=True)
        if status != 0:
            raise Wrong(f"a worker ended with status {status}")

    def run(self, seconds: float, *, leak: bool) -> dict[str, list[float]]:
        """Samples of each second."""
        for number in range(STAYING):
            self.start(number)
        visitors: list[tuple[float, subprocess.Popen[bytes]]] = []
        series: dict[str, list[float]] = {name: [] for name in ("time", *BOUNDS, *GAUGES)}
        began = time.monotonic()
        steps = 0
        quiet_since = began
        while (now := time.monotonic()) < began + seconds:
            if self.problems:
                raise Wrong("; ".join(self.problems))
            if not self.daemon.alive:
                raise Wrong(f"the daemon is gone: {log_lines(self.daemon.log)[-3:]}")
            if self.counts["steps"] > steps:
                steps, quiet_since = self.counts["steps"], now
            elif now > quiet_since + BOUND_S:
                raise Hang("no worker gets on")
            if len(visitors) < VISITORS_MAX:
                visitors.append((now + self.chance.uniform(2, 8), self.start(self.next)))
                self.next += 1
            for end, process in list(visitors):
                if now > end:
                    visitors.remove((end, process))
                    if self.chance.random() < 0.5:
                        process.kill()
                        process.wait(BOUND_S)
                        self.counts["workers killed"] += 1
                    else:
                        self.leave(process)
                        self.counts["workers that left"] += 1
            if leak:
                self.leaked += [client_of(self.folder / "run") for _ in range(2)]
            series["time"].append(now)
            for name, value in sample(self.daemon.pid).items():
                series[name].append(value)
            if len(series["time"]) % GAUGES_EVERY_S == 1:
                gauges = self.client.stats().gauges
                for name in GAUGES:
                    series[name].append(gauges[name])
            time.sleep(max(0.0, now + 1.0 - time.monotonic()))
        for process in self.processes:
            if process.poll() is None:
                self.leave(process)
        return series

    def end(self) -> int:
        self.client.close()
        status = self.daemon.stop()
        for line in log_lines(self.daemon.log):
            if line.get("level") in ("error", "critical"):
                self.problems.append(f"the daemon says: {line}")
        return status

    def abandon(self) -> None:
        for process in (*self.processes, self.daemon.process):
            if process.poll() is None:
                process.kill()
            process.wait(BOUND_S)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--minutes", type=above_zero, default=10.0)
    options.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    options.add_argument(
        "--folder", type=Path, default=None, help="for the daemon's directory; default: TMPDIR"
    )
    options.add_argument(
        "--ghosts", type=whole(1), default=GHOSTS + 5_000, help="keys to fill the table with at first"
    )
    options.add_argument("--leak", action="store_true", help="plant a leak: connections that nobody closes")
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        work(chosen.worker[0], int(chosen.worker[1]), int(chosen.worker[2]))
        return 0
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {chosen.minutes} minutes", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=chosen.folder))  # short: a socket's path is bounded
    soak = Soak(folder, seed)
    failure, hangs, status = "", 0, -1
    series: dict[str, list[float]] = {}
    began = time.monotonic()
    try:
        soak.fill_ghosts(chosen.ghosts)
        print(f"{chosen.ghosts} keys saved and forgotten in {time.monotonic() - began:.0f} s", flush=True)
        series = soak.run(60 * chosen.minutes, leak=chosen.leak)
        for client in soak.leaked:
            client.close()
        stats = soak.client.stats()
        status = soak.end()
        failure = "; ".join(soak.problems)
        for name in ("chunks_corrupt", "chunks_demoted", "chunks_evicted_from_ssd", "epochs_retired"):
            soak.counts[f"daemon: {name}"] = stats.counters[name]
    except (Wrong, Hang, StoreError, subprocess.SubprocessError) as problem:
        hangs = int(isinstance(problem, Hang))
        failure = f"{type(problem).__name__}: {problem}"
    finally:
        soak.abandon()
    goals = [
        goal("wrong bytes and errors", int(bool(failure) and not hangs), 0),
        goal("hangs", hangs, 0),
        goal("exit status of the daemon, its invariants checked", abs(status), 0),
    ]
    if not failure:
        goals += [judge(name, series["time"], series[name]) for name in BOUNDS]
    for name, count in sorted(soak.counts.items()):
        print(f"{count:>16,}  {name}")
    if failure:
        print(f"seed {seed}: {failure}\nits directory is kept: {folder}")
    else:
        shutil.rmtree(folder)
    for one in goals:
        print(
            f"{'met   ' if one['met'] else 'MISSED'} {one['name']}: {one['value']} {one['unit']}"
            f" ({one['direction']} {one['goal']:.3g})",
            flush=True,
        )
    if chosen.json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "commit": commit(__file__),
                    "seed": seed,
                    "minutes": chosen.minutes,
                    "counts": soak.counts,
                    "samples": {
                        name: values[:: max(1, len(values) // 60)] for name, values in series.items()
                    },
                    "failure": failure,
                    "goals": goals,
                }
            )
        )
    return 0 if all(one["met"] for one in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
