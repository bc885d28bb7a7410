"""Real daemons that share a REMOTE store and read from each other, in rounds of a few seconds with faults: does anybody
get wrong bytes, what was forgotten, or another tenant's chunks; does a call outlast its deadline; do they recover?

A worker process for each node and tenant saves, reads and forgets chunks of the same keys, recalls makers and opens new
epochs. The bytes of a chunk name the save that made them (a *version*), so a reader knows whose they are. Meanwhile
daemons are killed (with and without their SSD) and stopped, connections to Redis and to peers are cut, stalled and
changed in passing, Redis is stopped, killed, wiped and put back from an older copy, records are flipped, exchanged and
lost. Then all of it ends, and within BOUND_S every node has to be well and to serve what another one saves.

What is judged of a forget (of a key, a maker, an epoch) that was answered without `not_durable`: a version that was
committed before it began is read by nobody who began to read after its node has heard what others forgot (gauge
`*_forgets_read_ms_ago`) later than the answer. During a round that holds while Redis keeps what it was told; after the
round it holds whatever happened.

    python tests/stress/fleet.py [--rounds 20] [--seconds 3] [--seed N] [--store redis|file] [--canary NAME] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not searched (PYTHONSAFEPATH)
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import BOUND_S, Hang, Wrong, client_of, goal, log_lines, space_of, until
from harness import commit, machine

from kvstore.client import Client, Namespace, connect
from kvstore.errors import StoreError
from kvstore.option_types import above_zero, whole
from kvstore.sim.daemon import FAULTS
from kvstore.types import ChunkKey, Outcome
from kvstore.v1 import admin_pb2, admin_pb2_grpc

TENANTS = {"alice": 12_001, "bob": 12_002}
"""And the user ids that they come as; without root there is one tenant."""
NODES = 3
SPEC = space_of("fleet", 8 << 10, 3_000)
CHAIN = 5
CHAINS_A_ROUND = 6
CALL_S = 4.0
"""Deadline of each call,"""
LATE_S = 20.0
"""and how much later it may end on a machine that does much else."""
TTL_MS = 2_000
HEAD = np.dtype([("magic", "S8"), ("version", "<u8")])
MAGIC = b"FLEETKV1"
CANARIES = {
    "deaf": """
from kvstore.tiers.remote import backend
from kvstore.tiers.remote.backend import Book
Book.take_news = lambda self: backend.News((), self.tombstones.count, None)
Book.refuses = lambda self, description: ""
""",
    "unchecked": """
from kvstore.tiers.remote import backend, records
class Any(int):
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
backend.checksum = lambda payload: Any()
records.refusal_of_signature = lambda header, body, salt: ""
""",
}
"""Bugs to plant in the daemons: what others forget is not heard of; records of the REMOTE store are not checked."""


def content(tenant: str, epoch: int, key: bytes, version: int, shard: int) -> bytes:
    size = SPEC.shard_bytes[shard]
    rng = np.random.default_rng([*tenant.encode(), epoch, *key, version, shard])
    data = bytearray(rng.bytes(size))
    data[:16] = np.array([(MAGIC, version)], HEAD).tobytes()
    return bytes(data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------------------- lines


class Line:
    """A TCP proxy of which the other end may be away. mode: "pass", "refuse", "stall", "flip"."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.mode = "pass"
        self._chance = random.Random(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.mode == "refuse":
                    raise ConnectionRefusedError
                there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
                there.settimeout(None)
            except OSError:
                here.close()
                continue
            self._open |= {here, there}
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(64 << 10)):
                while self.mode == "stall":
                    time.sleep(0.02)
                if self.mode == "flip" and self._chance.random() < 0.2:
                    data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open -= {source, target}

    def cut(self) -> None:
        """In mid-transfer, whatever it is."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Redis:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *options, "--dir", str(self._folder), "--enable-debug-command", "yes"],
            stdout=subprocess.DEVNULL,
        )
        until(self.answers, "redis-server does not start")

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port, socket_timeout=10)

    def answers(self) -> bool:
        import redis

        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def copy(self) -> list[tuple[bytes, int, bytes]]:
        with self.client() as client:
            rows = [(name, client.pttl(name), client.dump(name)) for name in client.keys("*")]
        return [(name, max(0, ttl), data) for name, ttl, data in rows if data is not None]

    def put_back(self, rows: Sequence[tuple[bytes, int, bytes]]) -> None:
        with self.client() as client:
            client.flushall()
            for name, ttl, data in rows:
                client.restore(name, ttl, data, replace=True)


# ----------------------------------------------------------------------------------------------------------- workers


@dataclass
class Saved:
    version: int
    tenant: str
    epoch: int
    key: bytes
    maker: bytes
    ended: float
    """When its commit was answered; 0: it is not known whether it was."""


@dataclass
class Forgot:
    """Of one key; of a maker; of all epochs below."""

    tenant: str
    began: float
    ended: float
    durable: bool
    key: bytes = b""
    maker: bytes = b""
    epoch: int = 0
    node: int = 0
    round: int = 0

    def is_about(self, saved: Saved) -> bool:
        if self.maker:
            return saved.maker == self.maker
        if saved.tenant != self.tenant:
            return False
        return saved.key == self.key and saved.epoch == self.epoch if self.key else saved.epoch < self.epoch


@dataclass
class Got:
    version: int
    node: int
    began: float
    tenant: str


@dataclass
class Told:
    """What a worker has to say of a command."""

    saved: list[Saved] = field(default_factory=list)
    forgot: list[Forgot] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    late: str = ""
    wrong: str = ""


class Worker:
    """In a process of its own, whose user is the tenant."""

    def __init__(self, number: int, node: int, tenant: str, run_dir: Path, epoch: Any, seed: int) -> None:
        self.number, self.node, self.tenant, self.epoch = number, node, tenant, epoch
        self.run_dir = run_dir
        self.chance = random.Random(f"{seed}/{number}")
        self.told = Told()
        self.versions = number << 32
        self.makers = 0
        self.client: Client = client_of(run_dir)
        self.opened = -1
        self.space: Namespace

    def serve(self, commands: Connection) -> None:
        while True:
            what, *arguments = commands.recv()
            if what == "end":
                self.client.close()
                return
            self.told = Told()
            answer = None
            try:
                answer = getattr(self, what)(*arguments)
            except Wrong as problem:
                self.told.wrong = str(problem)
            commands.send((self.told, answer))

    @contextlib.contextmanager
    def calling(self, what: str, bound_s: float = CALL_S) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except StoreError as problem:
            self.told.counts[f"{what}: {type(problem).__name__}"] += 1
        else:
            self.told.counts[what] += 1
        took = time.monotonic() - began
        if took > bound_s + LATE_S:
            self.told.late = f"{what} took {took:.1f} s"

    def open(self) -> bool:
        epoch = self.epoch.value
        if epoch != self.opened:
            with self.calling("open"):
                self.space = self.client.open(replace(SPEC, weights_epoch=epoch), timeout_s=CALL_S)
                self.opened = epoch
        return bool(epoch == self.opened)

    def run(self, seconds: float, first: int, chains: int, gentle: bool) -> None:
        steps = [(8, self.save), (10, self.read), (1.5, self.forget)]
        if not gentle:
            steps += [(0.1, self.recall), (0.05, self.new_epoch)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.open():
                time.sleep(0.02)
                continue
            (step,) = self.chance.choices([step for _, step in steps], [weight for weight, _ in steps])
            step(first + self.chance.randrange(chains))
            time.sleep(self.chance.random() * 0.01)

    def keys(self, chain: int) -> list[ChunkKey]:
        return [ChunkKey(f"chain {chain}/{number}".encode()) for number in range(CHAIN)]

    def save(self, chain: int) -> bool:
        keys = self.keys(chain)
        maker = f"{self.number}/{self.makers}".encode().ljust(16)
        done = False
        new: list[Saved] = []
        with self.calling("save"), self.space.write(keys, maker=maker, timeout_s=CALL_S) as batch:
            for index in batch.granted:
                self.versions += 1
                new.append(Saved(self.versions, self.tenant, self.opened, keys[index], maker, 0.0))
                for shard in range(len(SPEC.shard_bytes)):
                    data = content(self.tenant, self.opened, keys[index], self.versions, shard)
                    batch.buffer(index, shard)[:] = np.frombuffer(data, np.uint8)
            self.told.saved += new
            done = bool(new) and batch.commit(timeout_s=CALL_S).ok
        if done:
            ended = time.monotonic()
            for saved in new:
                saved.ended = ended
        return done and len(new) == len(keys)

    def read(self, chain: int) -> int:
        """How many chunks of it came; every byte that came is compared."""
        keys = self.keys(chain)
        wait_ms = self.chance.choice([0, 200, 1_000])
        with (
            self.calling("read", 2 * CALL_S),
            self.space.read(keys, wait_ms=wait_ms, timeout_s=CALL_S) as lease,
        ):
            if Outcome.PENDING in lease.outcomes:
                lease.settled(CALL_S)
        came = 0
        began = time.monotonic()
        with self.calling("read again"), self.space.read(keys, any_order=True, timeout_s=CALL_S) as lease:
            for index, outcome in enumerate(lease.outcomes):
                came += outcome is Outcome.HIT and self.compare(lease, index, keys[index], began)
        return came

    def compare(self, lease: Any, index: int, key: ChunkKey, began: float) -> bool:
        versions = []
        for shard, size in enumerate(SPEC.shard_bytes):
            out = np.empty(size, np.uint8)
            if not lease.copy_to(index, out, shard=shard):
                self.told.counts["void"] += 1
                return False
            magic, version = np.frombuffer(out[:16].tobytes(), HEAD)[0]
            versions.append(int(version))
            if magic != MAGIC or out.tobytes() != content(self.tenant, self.opened, key, versions[-1], shard):
                raise Wrong(
                    f"wrong bytes under {key.decode()} of {self.tenant}, shard {shard}, at node {self.node}, epoch"
                    f" {self.opened}: {out[:16].tobytes()!r}"
                )
        self.told.counts["chunks compared"] += 1
        self.told.counts["chunks of two saves"] += len(set(versions)) > 1
        self.told.got += [Got(version, self.node, began, self.tenant) for version in dict.fromkeys(versions)]
        return True

    def forget(self, chain: int) -> None:
        key = self.chance.choice(self.keys(chain))
        began = time.monotonic()
        with self.calling("forget"):
            answer = self.space.forget(keys=[key], timeout_s=CALL_S)
            ended = time.monotonic()
            durable = not answer.not_durable
            self.told.counts["forgets that not all know yet"] += not durable
            self.told.forgot.append(
                Forgot(self.tenant, began, ended, durable, key=key, epoch=self.opened, node=self.node)
            )

    def recall(self, chain: int) -> None:
        """The operator's: see Fleet.recall."""
        self.makers += 1

    def new_epoch(self, chain: int) -> None:
        with self.epoch.get_lock():
            if self.epoch.value != self.opened:
                return
            began = time.monotonic()
            with self.calling("new epoch"):
                space = self.client.open(replace(SPEC, weights_epoch=self.opened + 1), timeout_s=CALL_S)
                self.told.forgot.append(
                    Forgot(
                        self.tenant,
                        began,
                        time.monotonic(),
                        durable=False,
                        epoch=self.opened + 1,
                        node=self.node,
                    )
                )
                self.space, self.opened = space, self.opened + 1
                self.epoch.value = self.opened

    def save_fresh(self, chain: int) -> bool:
        """Whether all of a chain that nobody has could be saved."""
        self.makers += 1  # the last one may have been recalled
        return self.open() and self.save(chain)

    def read_all(self, first: int, last: int) -> int:
        """What is there after a round, and how much of it."""
        return sum(self.read(chain) for chain in range(first, last)) if self.open() else 0


def work(commands: Connection, uid: int, *arguments: Any) -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.geteuid() == 0:
        os.seteuid(uid)
    Worker(*arguments).serve(commands)


# ------------------------------------------------------------------------------------------------------------- nodes


class Node:
    def __init__(
        self, number: int, folder: Path, redis: Redis, store: str, secret: Path, canary: str
    ) -> None:
        self.number = number
        self.folder = folder
        self.run_dir = folder / "run"
        self.log = folder / "daemon.log"
        folder.mkdir()
        self.redis_line = Line(redis.port)
        self.peer_port = free_port()
        self.peer_line = Line(self.peer_port)
        tenants = ",".join(f"{uid}={name}" for name, uid in TENANTS.items())
        redis_url = f"redis://127.0.0.1:{self.redis_line.port}"
        self.settings = {
            **{"dram_bytes": 8 << 20, "segment_bytes": 1 << 20, "staging_bytes": 1 << 20},
            **{"ssd_dir": folder / "ssd", "ssd_bytes": 64 << 20, "ssd_slab_bytes": 1 << 20},
            **{"ssd_index_bytes": 8 << 20, "durable_within_ms": 300, "staging_bytes_max": 32 << 20},
            **{"reserve_share_max": 0.5, "log_level": "debug", "remote_writes": "write-through"},
            **{"remote_url": f"{redis_url}/1" if store == "redis" else f"file://{store}"},
            **{"remote_deadline_ms": 1_000, "remote_lookup_ms": 200, "remote_salt_file": secret},
            **{"node_name": f"node{number}", "registry_url": f"{redis_url}/0", "registry_ttl_ms": TTL_MS},
            **{"fleet_secret_file": secret, "peer_address": f"127.0.0.1:{self.peer_port}"},
            **{"peer_advertise": f"127.0.0.1:{self.peer_line.port}", "peer_plaintext": "true"},
            **{"peer_deadline_ms": 500, "forget_within_s": 60, "drain_ms": 1_000},
            **({"tenants": tenants} if os.geteuid() == 0 else {}),
        }
        self.canary = canary
        self.process: subprocess.Popen[bytes] | None = None
        self.admin: Client | None = None
        self.is_stopped = False
        self.read_log = 0

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        plant = CANARIES[self.canary] if self.canary else "pass"
        program = f"{plant}\nfrom kvstore.sim.daemon import run; run()"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORED_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, f"--run-dir={self.run_dir}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env={**kept, "PYTHONSAFEPATH": "1", FAULTS: str(self.folder / "faults.json")},
            )

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self, *, wipe: bool) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(BOUND_S)
        if wipe:
            shutil.rmtree(self.folder / "ssd", ignore_errors=True)

    def gauges(self) -> dict[str, float]:
        """Empty while it cannot be asked."""
        try:
            if self.admin is None:
                self.admin = connect(str(self.run_dir), timeout_s=1.0)
            return dict(self.admin.stats().gauges)
        except StoreError:
            return {}

    def heard(self, *by: str) -> float:
        """Until when it knows, by our clock, what others have forgotten, `by` all of these; 0: it cannot be asked."""
        asked = time.monotonic()
        gauges = self.gauges()
        ages = [gauges.get(f"{name}_forgets_read_ms_ago", -1.0) for name in by]
        return asked - max(ages) / 1_000 - 0.002 if gauges and min(ages) >= 0 else 0.0

    def problems(self) -> list[str]:
        """What a log must not say."""
        lines = log_lines(self.log, self.read_log)
        self.read_log = self.log.stat().st_size
        return [
            f"node{self.number}: {line.get('message')} {str(line.get('exception', ''))[-600:]}"
            for line in lines
            if line.get("exception") or line.get("level") == "critical"
        ]


class Fleet:
    def __init__(self, folder: Path, seed: int, store: str, canary: str) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        folder.chmod(0o755)
        secret = folder / "secret"
        secret.write_text("5" * 64)
        secret.chmod(0o600)
        (folder / "redis").mkdir()
        self.redis = Redis(folder / "redis")
        self.shared = folder / "shared"
        where = str(self.shared) if store == "file" else "redis"
        self.store = store
        self.tenants = dict(TENANTS) if os.geteuid() == 0 else {"default": os.geteuid()}
        self.nodes = [Node(n, folder / f"n{n}", self.redis, where, secret, canary) for n in range(NODES)]
        for node in self.nodes:
            node.start()
        context = multiprocessing.get_context("fork")
        self.epochs = {tenant: context.Value("i", 0) for tenant in self.tenants}
        self.workers: list[tuple[Any, Connection, int, str]] = []
        for number in range(NODES * len(self.tenants)):
            at, tenant = number % NODES, list(self.tenants)[number // NODES]
            ours, theirs = context.Pipe()
            rest = (number, at, tenant, self.nodes[at].run_dir, self.epochs[tenant], seed)
            process = context.Process(target=work, args=(theirs, self.tenants[tenant], *rest), daemon=True)
            process.start()
            self.workers.append((process, ours, at, tenant))
        self.saved: dict[int, Saved] = {}
        self.forgot: list[Forgot] = []
        self.heard: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """Of each node: (when we knew it, until when it had heard)."""
        self.reset_at = 0.0
        """When Redis last lost something."""
        self.wiped_at = 0.0
        self.copy: list[tuple[bytes, int, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.round = 0

    # ------------------------------------------------------------------------------------------------- asking workers

    def ask(self, what: str, *arguments: Any, which: Sequence[tuple[int, str]] = ()) -> list[Any]:
        """`which`: the workers of these (node, tenant); none named: all."""
        chosen = [worker for worker in self.workers if not which or worker[2:] in which]
        for _, commands, _, _ in chosen:
            commands.send((what, *arguments))
        return chosen

    def hear(self, chosen: Sequence[Any], bound_s: float) -> list[tuple[Told, Any]]:
        found = []
        for process, commands, node, tenant in chosen:
            if not commands.poll(bound_s):
                raise Hang(
                    f"the worker of {tenant} at node {node} does not come back (alive: {process.is_alive()})"
                )
            told, answer = commands.recv()
            self.counts.update(told.counts)
            if told.wrong:
                raise Wrong(told.wrong)
            if told.late:
                raise Hang(told.late)
            for saved in told.saved:
                self.saved[saved.version] = saved
            for forgot in told.forgot:
                forgot.round = self.round
            self.forgot += told.forgot
            found.append((told, answer))
        return found

    # --------------------------------------------------------------------------------------------------------- faults

    def a_fault(self, until_: float) -> None:
        """One, and mostly its end."""
        node = self.chance.choice(self.nodes)
        kinds: list[Callable[[Node, float], None]] = [
            *(self.kill, self.stop, self.cut, self.line, self.peer_line, self.spoil, self.recall),
            *(self.redis_stops, self.redis_loses, self.redis_is_put_back, self.wipe),
        ]
        kind = self.chance.choice(kinds)
        self.counts[f"fault: {kind.__name__}"] += 1
        kind(node, min(until_, time.monotonic() + self.chance.uniform(0.1, 1.2)))

    @staticmethod
    def sleep_until(end: float) -> None:
        time.sleep(max(0.0, end - time.monotonic()))

    def kill(self, node: Node, end: float) -> None:
        node.kill(wipe=False)
        if self.chance.random() < 0.5:
            node.start()

    def wipe(self, node: Node, end: float) -> None:
        self.wiped_at = time.monotonic()
        node.kill(wipe=True)
        node.start()

    def stop(self, node: Node, end: float) -> None:
        node.signal(signal.SIGSTOP)
        self.sleep_until(end)
        node.signal(signal.SIGCONT)

    def cut(self, node: Node, end: float) -> None:
        for _ in range(self.chance.randrange(1, 20)):
            self.chance.choice([node.redis_line, node.peer_line]).cut()
            time.sleep(self.chance.random() * 0.05)

    def line(self, node: Node, end: float) -> None:
        node.redis_line.mode = self.chance.choice(["stall", "refuse"])
        node.redis_line.cut()
        self.sleep_until(end)
        node.redis_line.mode = "pass"

    def peer_line(self, node: Node, end: float) -> None:
        node.peer_line.mode = self.chance.choice(["stall", "refuse", "flip", "flip"])
        self.sleep_until(end)
        node.peer_line.mode = "pass"

    def redis_stops(self, node: Node, end: float) -> None:
        self.redis.signal(signal.SIGSTOP)
        self.sleep_until(end)
        self.redis.signal(signal.SIGCONT)

    def redis_loses(self, node: Node, end: float) -> None:
        self.reset_at = time.monotonic()
        how = self.chance.choice(["all", "count", "server"])
        if how != "server":
            with self.redis.client() as client:
                for database in (0, 1):
                    client.select(database)
                    for name in client.keys("*:count" if how == "count" else "*"):
                        client.delete(name) if how == "all" else client.set(name, self.chance.randbytes(9))
        else:
            self.redis.kill()
            if self.chance.random() < 0.5:
                self.sleep_until(end)
            self.redis.start()
        self.reset_at = time.monotonic()

    def redis_is_put_back(self, node: Node, end: float) -> None:
        """An older copy: of now, of a second ago, or of an earlier round."""
        if not self.copy or self.chance.random() < 0.5:
            self.copy = self.redis.copy()
            self.sleep_until(end)
        self.reset_at = time.monotonic()
        self.redis.put_back(self.copy)
        self.reset_at = time.monotonic()

    def spoil(self, node: Node, end: float) -> None:
        """Records and pages: flipped, cut short, exchanged, lost. What is forgotten is not touched."""
        if self.store == "file" and self.chance.random() < 0.5:
            self.spoil_files()
            return
        with self.redis.client() as client:
            for database in (0, 1):
                client.select(database)
                names = [name for name in client.keys("kvs:*") if b":{" not in name or b":held:" in name]
                values = [name for name in names if client.type(name) == b"string"]
                for name in self.chance.sample(values, min(len(values), 8)):
                    data = bytearray(client.get(name) or b"")
                    how = self.chance.choice(["flip", "short", "exchange", "lose"])
                    if how == "flip" and data:
                        data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
                        client.set(name, bytes(data), keepttl=True)
                    elif how == "short" and data:
                        client.set(name, bytes(data[: self.chance.randrange(len(data))]), keepttl=True)
                    elif how == "exchange":
                        client.set(name, client.get(self.chance.choice(values)) or b"", keepttl=True)
                    elif how == "lose":
                        client.delete(name)
                for name in names:
                    if client.type(name) != b"hash" or self.chance.random() < 0.5:
                        continue
                    for page, data in list(client.hgetall(name).items())[:2]:
                        spoilt = bytearray(data)
                        spoilt[self.chance.randrange(len(spoilt))] ^= 1 << self.chance.randrange(8)
                        client.hset(name, page, bytes(spoilt))

    def spoil_files(self) -> None:
        files = [path for path in self.shared.rglob("data/**/*") if path.is_file()]
        for path in self.chance.sample(files, min(len(files), 8)):
            with contextlib.suppress(OSError):
                data = bytearray(path.read_bytes())
                how = self.chance.choice(["flip", "short", "exchange", "lose"])
                if how == "lose" or not data:
                    path.unlink()
                elif how == "exchange":
                    path.write_bytes(self.chance.choice(files).read_bytes())
                elif how == "short":
                    path.write_bytes(data[: self.chance.randrange(len(data))])
                else:
                    data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
                    path.write_bytes(data)

    def recall(self, node: Node, end: float) -> None:
        """Of a worker's makers, of which it has begun with another one perhaps."""
        makers = sorted({saved.maker for saved in self.saved.values()})
        if not makers:
            return
        maker = self.chance.choice(makers)
        began = time.monotonic()
        try:
            if node.admin is None:
                node.admin = connect(str(node.run_dir), timeout_s=1.0)
            request = admin_pb2.RecallRequest(maker=maker)
            reply = node.admin.unary(admin_pb2_grpc.AdminStub, "Recall", request, timeout_s=5.0)
        except StoreError:
            return
        durable = not getattr(reply, "not_durable", "")
        self.forgot.append(
            Forgot("", began, time.monotonic(), durable, maker=maker, node=node.number, round=self.round)
        )
        self.counts["recalls"] += 1

    # --------------------------------------------------------------------------------------------------------- rounds

    def note_heard(self, node: Node) -> None:
        if heard := node.heard("remote", "peers"):
            self.heard[node.number].append((time.monotonic(), heard))

    def run_round(self, seconds: float) -> None:
        self.round += 1
        first = max(0, self.round - 3) * CHAINS_A_ROUND
        chains = self.round * CHAINS_A_ROUND - first
        gentle = self.chance.random() < 0.5
        asked = self.ask("run", seconds, first, chains, gentle)
        end = time.monotonic() + seconds
        noting = threading.Thread(target=self.keep_noting, args=(end,))
        noting.start()
        while time.monotonic() < end - 0.2:
            time.sleep(self.chance.uniform(0.02, 0.3))
            self.a_fault(end)
        noting.join()
        self.heal()
        answers = self.hear(asked, seconds + BOUND_S)
        self.judge([got for told, _ in answers for got in told.got], settled=False)
        self.settle()
        answers = self.hear(self.ask("read_all", first, first + chains), 2 * BOUND_S)
        self.counts["chunks there after a round"] += sum(answer for _, answer in answers)
        self.judge([got for told, _ in answers for got in told.got], settled=True)
        self.exchange()
        problems = [problem for node in self.nodes for problem in node.problems()]
        if problems:
            raise Wrong("; ".join(problems))

    def keep_noting(self, end: float) -> None:
        while time.monotonic() < end:
            for node in self.nodes:
                self.note_heard(node)
            time.sleep(0.05)

    def heal(self) -> None:
        self.redis.signal(signal.SIGCONT)
        self.redis.start()
        for node in self.nodes:
            node.redis_line.mode = node.peer_line.mode = "pass"
            if node.process is not None and node.process.poll() not in (None, -signal.SIGKILL):
                raise Wrong(f"node{node.number} ended by itself: {node.process.poll()}")
            node.signal(signal.SIGCONT)
            node.start()

    def settle(self) -> None:
        """Until every node is well and has heard what each other one has told after it was well."""
        for turn in range(3):
            by = ("remote", "peers") if self.store == "redis" or not turn else ("peers",)
            began = time.monotonic()
            for node in self.nodes:
                until(
                    lambda node=node, began=began, by=by: self.is_well(node) and node.heard(*by) > began,
                    f"node{node.number} does not recover: "
                    + str(
                        {
                            k: v
                            for k, v in node.gauges().items()
                            if "well" in k or "forget" in k or "regis" in k
                        }
                    ),
                )

    @staticmethod
    def is_well(node: Node) -> bool:
        gauges = node.gauges()
        names = ("source_remote_well", "source_peers_well", "registry_ok")
        return all(gauges.get(name, 1.0) for name in names) and not gauges.get("remote_forgets_waiting", 1.0)

    def judge(self, got: Sequence[Got], *, settled: bool) -> None:
        by_key: dict[tuple[str, bytes], list[Forgot]] = defaultdict(list)
        others: list[Forgot] = []
        for forgot in self.forgot:
            if forgot.key:
                by_key[forgot.tenant, forgot.key].append(forgot)
            else:
                others.append(forgot)
        for one in got:
            saved = self.saved.get(one.version)
            if saved is None:
                raise Wrong(f"a version that nobody has saved: {one}")
            if not saved.ended:
                continue
            for forgot in (*by_key.get((saved.tenant, saved.key), ()), *others):
                if forgot.is_about(saved) and saved.ended < forgot.began and self.holds(forgot, one, settled):
                    self.counts["forgets judged"] += 1
                    raise Wrong(
                        f"what was forgotten is served: {saved}, {forgot}, {one}, settled {settled}, Redis lost"
                        f" something at {self.reset_at}, an SSD was wiped at {self.wiped_at}, round {self.round}"
                    )

    def holds(self, forgot: Forgot, got: Got, settled: bool) -> bool:
        """Whether the promise is that this reader does not see it."""
        if settled:
            this = forgot.round == self.round
            lost = (
                this and self.wiped_at > forgot.began and (self.reset_at > forgot.began or not forgot.durable)
            )
            return not lost
        if not forgot.durable or self.reset_at > forgot.began:
            return False
        return any(
            known < got.began and heard > forgot.ended for known, heard in self.heard[got.node][-2_000:]
        )

    def exchange(self) -> None:
        """What a node saves now, each other node of the tenant gets."""
        for tenant in self.tenants:
            at = self.chance.randrange(NODES)
            chain = 1_000_000 + 10 * self.round
            here, there = [(at, tenant)], [(node, tenant) for node in range(NODES) if node != at]
            saved = False
            began = time.monotonic()
            while not saved:
                chain += 1
                saved = all(a for _, a in self.hear(self.ask("save_fresh", chain, which=here), BOUND_S))
                if time.monotonic() > began + BOUND_S:
                    raise Hang(f"{tenant} cannot save at node {at} after a round")
            while not all(
                a == CHAIN for _, a in self.hear(self.ask("read_all", chain, chain + 1, which=there), BOUND_S)
            ):
                if time.monotonic() > began + BOUND_S:
                    raise Hang(f"what {tenant} saved at node {at} does not come to the others: chain {chain}")
            self.counts["exchanges"] += 1

    def end(self) -> int:
        """The worst exit status of the daemons, which check their invariants."""
        for process, commands, _, _ in self.workers:
            commands.send(("end",))
            process.join(BOUND_S)
        worst = 0
        for node in self.nodes:
            if node.admin is not None:
                node.admin.close()
            node.signal(signal.SIGTERM)
            assert node.process is not None
            worst = max(worst, abs(node.process.wait(BOUND_S)))
        return worst

    def abandon(self) -> None:
        for process, _, _, _ in self.workers:
            process.kill()
        for node in self.nodes:
            node.kill(wipe=False)
            node.redis_line.close()
            node.peer_line.close()
        self.redis.kill()


def main() -> int:
    faulthandler.enable()
    options = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    options.add_argument("--rounds", type=whole(1), default=20)
    options.add_argument("--seconds", type=above_zero, default=3.0, help="of faults in a round (default: 3)")
    options.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    options.add_argument("--store", choices=["redis", "file"], default=None, help="default: drawn")
    options.add_argument("--folder", type=Path, default=None, help="for all that it makes; default: TMPDIR")
    options.add_argument(
        "--canary", choices=[*CANARIES], default="", help="plant a bug, which has to be found"
    )
    options.add_argument("--json", action="store_true", help="one JSON object in the last line")
    chosen = options.parse_args()
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(1 << 32)
    store = chosen.store or random.Random(seed).choice(["redis", "file"])
    print(f"seed {seed}: {chosen.rounds} rounds of {chosen.seconds} s, {store}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=chosen.folder))  # short: a socket's path is bounded
    fleet = Fleet(folder, seed, store, chosen.canary)
    failure, hangs, status, rounds = "", 0, 0, 0
    try:
        fleet.settle()
        for rounds in range(1, chosen.rounds + 1):  # noqa: B007
            fleet.run_round(chosen.seconds)
        status = fleet.end()
    except (Wrong, Hang, StoreError, subprocess.SubprocessError) as problem:
        hangs = int(isinstance(problem, Hang))
        failure = f"{type(problem).__name__}: {problem}"
    finally:
        fleet.abandon()
    goals = [
        goal("wrong bytes, forgotten chunks served and errors", int(bool(failure) and not hangs), 0),
        goal("hangs, and nodes that do not recover", hangs, 0),
        goal("exit status of the daemons, their invariants checked", status, 0),
    ]
    for name, count in sorted(fleet.counts.items()):
        print(f"{count:>16,}  {name}")
    if failure:
        print(f"seed {seed}, round {rounds}: {failure}\nits directory is kept: {folder}")
    else:
        shutil.rmtree(folder)
    if chosen.json:
        found = {"machine": machine(), "commit": commit(__file__), "seed": seed, "rounds": rounds}
        print(json.dumps({**found, "counts": fleet.counts, "failure": failure, "goals": goals}))
    return 0 if all(one["met"] for one in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
