"""Bytes per second through the client against daemons of its own, beside memcpy and beside other stores, in one run.

Every store has a client in a process of its own, and all do the same: put and get batches of values between the store
and arrays of the caller. They take turns in short rounds, so that a machine whose speed drifts favours nobody, and all
ratios are of one run. Working sets exceed the caches; bytes are compared at the end of every part. CPU time is that of
the client's process and of the server's, per GB. With several clients all of them work for a while at the same time.
What is not installed, or fails, is left out, with a reason.

    make bench-data_plane ARGS='--quick --json'
    make bench-data_plane ARGS='--sizes 2M --clients 1 --stores memcpy sealed redis --out'
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, keep, some
from peers import Server, Shape

PEERS = Path(__file__).resolve().parent / "peers"
STORES: dict[str, tuple[str, dict[str, str]]] = {
    "memcpy": ("memcpy", {}),
    "sealed": ("attnstore", {"protection": "sealed"}),
    "group": ("attnstore", {"protection": "group"}),
    "tcp": ("attnstore_tcp", {"protection": "sealed"}),
    "redis": ("redis", {}),
    "redis bare": ("redis_bare", {"name": "redis-bare"}),
    "memcached": ("memcached", {}),
    "memcached bare": ("memcached_bare", {"name": "memcached-bare"}),
    "mooncake": ("mooncake", {}),
    "lmcache": ("lmcache", {}),
    "tmpfs": ("tmpfs", {}),
    "safetensors": ("safetensors", {}),
}
"""Name in tables: module of `peers`, and how it is started."""
OURS = ("sealed", "group", "tcp")
COMPARED = ("sealed", "group")
ONLY = {"fill": ("sealed",), "write": ("sealed",)}
"""What one client of these stores does besides; "write" is a put by `write` and `commit`, two messages."""
SIZES = {"64K": 64 << 10, "256K": 256 << 10, "2M": 2 << 20, "32M": 32 << 20}
BATCHES = (1, 16, 64)
KEY = ("size", "batch", "clients", "store", "action")
CLIENTS = (1, 4)
ROOM_BYTES = 576 << 20
"""Of each store: the values that are read, and room for some that are new."""
HOT_BYTES = 128 << 20
SOURCE_BYTES = 64 << 20
TURN_BYTES = 32 << 20
TURN_CALLS_MAX = 32
WARM_ROUNDS = 2
WINDOW_S = 0.15
WINDOW_PUT_BYTES = 64 << 20
"""How long several clients work at the same time in one round, and how much each of them puts at most: no more than
what leaves the values that gets read in every store."""
ANSWER_S = 120.0
GOALS = {
    ("2M", 1, "sealed", "get"): 1 / 1.5,
    ("2M", 16, "sealed", "get"): 0.8,
    ("2M", 16, "group", "put"): 0.65,
    ("2M", 16, "sealed", "put"): 0.35,
    ("256K", 1, "sealed", "get"): 0.3,
    ("256K", 16, "sealed", "get"): 0.55,
    ("256K", 64, "sealed", "get"): 0.7,
    ("256K", 16, "group", "put"): 0.35,
    ("256K", 16, "sealed", "put"): 0.22,
}
"""Share of memcpy, by batch, one client."""
OVER_PEER_GOALS = {
    ("2M", "get"): {"redis": 3.0, "memcached": 3.5, "mooncake": 4.0, "lmcache": 5.0},
    ("2M", "put"): {"redis": 5.0, "memcached": 3.0, "mooncake": 2.5, "lmcache": 4.0},
    ("256K", "get"): {"redis": 5.0, "memcached": 5.0, "mooncake": 5.0, "lmcache": 5.0},
}
"""Of "sealed" over each, in batches of 16, one client."""
REMOTE_GOAL = 1.5
"""GB/s over TCP, in frames of 2 MiB."""
ONE_MESSAGE_GOAL = 0.8
"""Time of a put of 16 values of 256 KiB, of that of the same by two messages."""
TOGETHER_GOAL, FAIR_GOAL = 0.9, 1.5
"""4 clients: of what one has alone; the fastest over the slowest."""


@dataclass(frozen=True)
class Part:
    size: str
    batch: int
    clients: int

    @property
    def value_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def batch_bytes(self) -> int:
        return self.value_bytes * self.batch

    @property
    def hot_bytes(self) -> int:
        """Of each client."""
        return HOT_BYTES // self.clients

    @property
    def leaves_room_for_fills(self) -> bool:
        """Two calls of each, put, write and fill, beside what gets read: or that would be pushed out."""
        return self.hot_bytes + 6 * self.batch_bytes <= ROOM_BYTES

    def too_big(self) -> str:
        """Why it is left out."""
        if self.batch_bytes <= self.hot_bytes:
            return ""
        return (
            f"{self.batch_bytes * self.clients >> 20} MiB in flight: with so much for each store, and for each "
            "client, all of them together would not fit in 6 GB"
        )


ONE_MESSAGE = Part("256K", 16, 1)
QUICK: dict[Part, Sequence[str]] = {
    Part("2M", 16, 1): ("memcpy", "sealed", "group", "redis", "memcached", "mooncake", "lmcache"),
    Part("2M", 1, 1): ("memcpy", "sealed"),
    Part("2M", 16, 4): ("sealed",),
    Part("256K", 16, 1): ("memcpy", "sealed", "group", "redis", "memcached", "mooncake", "lmcache"),
    Part("256K", 64, 1): ("memcpy", "sealed"),
    Part("256K", 1, 1): ("memcpy", "sealed"),
    Part("32M", 1, 1): ("memcpy", "tcp"),
}
"""Parts that have goals, and the stores that do."""


class ClientFailed(Exception):
    """It says why."""


class Client:
    """Drives `peers/client.py`."""

    def __init__(self, store: Store, shape: Shape) -> None:
        python = getattr(store.module, "PYTHON", sys.executable)
        name, address = store.module.__name__.rpartition(".")[2], json.dumps(store.server.address)
        self._process = subprocess.Popen(
            [python, "-P", PEERS / "client.py", name, address, json.dumps(asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise ClientFailed(f"its client does not answer within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or '{"error": "its client has ended"}')
        if "error" in answer:
            raise ClientFailed(answer["error"])
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass
class Store:
    name: str
    module: ModuleType
    server: Server
    clients: list[Client] = field(default_factory=list)
    failed: bool = False


@dataclass
class Figures:
    """Of one store and action in one part; one entry a call, or a round."""

    took: list[float] = field(default_factory=list)
    bytes: int = 0
    client_s: float = 0.0
    server_s: float = 0.0
    together: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    each: list[list[float]] = field(default_factory=list)
    """Bytes per second of every client, all of them working."""


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES), metavar="STORE")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    options.add_argument("--clients", nargs="+", type=int, choices=CLIENTS, default=CLIENTS)
    options.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    options.add_argument("--rounds", type=some, help="default 30, or 4 with --quick")
    chosen = options.parse_args()
    rounds = chosen.rounds or (4 if chosen.quick else 30)
    plan: dict[Part, list[str]] = {}
    for part in QUICK if chosen.quick else every_part():
        if part.size in chosen.sizes and part.clients in chosen.clients and part.batch in chosen.batches:
            if why := part.too_big():
                print(f"{spelled(part.size)} x {part.batch}, clients: {part.clients}: left out, {why}")
            else:
                plan[part] = [
                    name for name in (QUICK[part] if chosen.quick else STORES) if name in chosen.stores
                ]
    rows: list[dict[str, Any]] = []
    for size, clients in dict.fromkeys((part.size, part.clients) for part in plan):
        parts = {p: stores for p, stores in plan.items() if (p.size, p.clients) == (size, clients) and stores}
        for group in groups(list(dict.fromkeys(itertools.chain(*parts.values()))), clients):
            with running(group) as started, with_clients(started, list(parts)):
                for part, stores in parts.items():
                    of_part = [store for store in started if store.name in stores]
                    for row in measure(part, of_part, rounds, only_goals=chosen.quick):
                        if not any(all(row[name] == other[name] for name in KEY) for other in rows):
                            rows.append(row)
                            print(told(row), flush=True)
                    keep(__file__, chosen, rows, goals_of(rows), key=KEY)
    return finish(__file__, chosen, rows, goals_of(rows), key=KEY)


def every_part() -> Iterator[Part]:
    return (Part(size, batch, clients) for size, clients, batch in itertools.product(SIZES, CLIENTS, BATCHES))


def groups(stores: Sequence[str], clients: int) -> Iterator[list[str]]:
    """Which stores take turns with each other: all, but where each of them has several clients, which take memory, ours
    and then one other at a time. "tcp" has a daemon for itself: what two kinds of clients put would push out what is to
    be read."""
    memcpy = [name for name in stores if name == "memcpy"]
    ours = [name for name in stores if name in ("sealed", "group")]
    others = [name for name in stores if name not in ("memcpy", *OURS)]
    if ours or (others and clients == 1):
        yield memcpy + ours + (others if clients == 1 else [])
    if clients > 1:
        yield from (memcpy + ours[:1] + [other] for other in others)
    if "tcp" in stores:
        yield [*memcpy, "tcp"]


@contextlib.contextmanager
def running(names: Sequence[str]) -> Iterator[list[Store]]:
    """Those that can run; they start at the same time."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))
        stores: list[Store] = []
        servers: dict[Any, Server] = {}
        for name in names:
            module_name, how = STORES[name]
            module = importlib.import_module(f"peers.{module_name}")
            if why := module.missing():
                print(f"{name}: left out, {why}")
                continue
            shared_by = (module.start, *how.items())
            if shared_by not in servers:
                servers[shared_by] = module.start(folder, ROOM_BYTES, **how)
                stack.callback(servers[shared_by].stop)
            stores.append(Store(name, module, servers[shared_by]))
        yield stores


@contextlib.contextmanager
def with_clients(stores: Sequence[Store], parts: Sequence[Part]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for store in stores:
            for number in range(parts[0].clients):
                clients = parts[0].clients
                shape = Shape(
                    value_bytes=parts[0].value_bytes,
                    hot_bytes=parts[0].hot_bytes,
                    room_bytes=ROOM_BYTES,
                    source_bytes=max(SOURCE_BYTES // clients, 2 * parts[0].value_bytes),
                    batch_max=max(part.batch for part in parts),
                    client=f"{store.name} {clients} {number}".replace(" ", "-"),
                )
                store.clients.append(Client(store, shape))
                stack.callback(store.clients[-1].close)
            stack.callback(store.clients.clear)
        for store in stores:
            with leaving_out(store):
                for client in store.clients:
                    client.answer()
        for store in stores:
            ask_all(store, "touch")
        yield


@contextlib.contextmanager
def leaving_out(store: Store) -> Iterator[None]:
    """Another store that fails is left out from here on; memory and ours may not fail."""
    try:
        yield
    except ClientFailed as error:
        if store.name in ("memcpy", *OURS):
            raise
        store.failed = True
        print(f"{store.name}: left out, {error}")


def ask_all(store: Store, do: str, **arguments: Any) -> None:
    """Ask each of its clients, one after the other."""
    if not store.failed:
        with leaving_out(store):
            for client in store.clients:
                client.ask(do, **arguments)


def measure(
    part: Part, stores: Sequence[Store], rounds: int, *, only_goals: bool = False
) -> Iterator[dict[str, Any]]:
    """`only_goals`: nothing but what has goals."""
    figures: dict[tuple[str, str], Figures] = defaultdict(Figures)
    for store in stores:
        ask_all(store, "fill", batch=part.batch)
        if store.name in OURS:  # what the part before did not read is the oldest there by now
            ask_all(store, "refresh")
    if part.clients == 1:
        take_turn: Callable[..., None] = turn_of_one
    else:
        take_turn, rounds = turn_of_many, max(3 if only_goals else 8, rounds // 3)
    warm_rounds = 1 if only_goals else WARM_ROUNDS
    for number in range(warm_rounds + rounds):
        for store in stores:
            if store.name in OURS and part.clients > 1:
                ask_all(store, "refresh")
            for action in ("get", "put", *ONLY):
                also = part.clients == 1 and part.leaves_room_for_fills
                if only_goals:
                    also &= action == "write" and part == ONE_MESSAGE
                if action in ("get", "put") or (also and store.name in ONLY[action]):
                    into = figures[store.name, action] if number >= warm_rounds else Figures()
                    if not store.failed:
                        with leaving_out(store):
                            take_turn(part, store, action, into)
                    if action != "get":
                        ask_all(store, "tidy")
    for store in stores:
        ask_all(store, "check", batch=part.batch)
    failed = {store.name for store in stores if store.failed}
    yield from rows_of(part, {which: of for which, of in figures.items() if which[0] not in failed})


def turn_of_one(part: Part, store: Store, action: str, into: Figures) -> None:
    calls = min(TURN_CALLS_MAX, max(1, TURN_BYTES // part.batch_bytes))
    before = store.server.cpu_s()
    answer = store.clients[0].ask("turn", action=action, batch=part.batch, calls=calls)
    time.sleep(0.001)  # what the server does after its last answer belongs to this turn
    into.server_s += (
        (store.server.cpu_s() - before) * calls / (calls + 1)
    )  # one call went before those that count
    into.client_s += answer["cpu_s"]
    into.took += answer["took"]
    into.bytes += part.batch_bytes * calls


def turn_of_many(part: Part, store: Store, action: str, into: Figures) -> None:
    """One client alone, then all of them."""
    most = max(1, WINDOW_PUT_BYTES // part.batch_bytes) if action != "get" else 0
    for working, speeds in ((store.clients[:1], into.alone), (store.clients, into.together)):
        before = store.server.cpu_s()
        begin = time.monotonic() + 0.01
        for client in working:
            client.send("turn", action=action, batch=part.batch, most=most, begin=begin, seconds=WINDOW_S)
        answers = [client.answer() for client in working]
        moved = [len(answer["took"]) * part.batch_bytes for answer in answers]
        elapsed = [answer["elapsed_s"] for answer in answers]
        speeds.append(sum(moved) / max(elapsed) / 1e9)
        if len(working) > 1:
            into.server_s += store.server.cpu_s() - before
            into.client_s += sum(answer["cpu_s"] for answer in answers)
            into.took += [seconds for answer in answers for seconds in answer["took"]]
            into.bytes += sum(moved)
            into.each.append([of / seconds for of, seconds in zip(moved, elapsed, strict=True)])


def rows_of(part: Part, figures: dict[tuple[str, str], Figures]) -> Iterator[dict[str, Any]]:
    speed = {
        which: statistics.median(of.together)
        if of.together
        else part.batch_bytes / statistics.median(of.took) / 1e9
        for which, of in figures.items()
    }
    for (store, action), of in figures.items():
        memcpy = speed.get(("memcpy", action if action == "get" else "put"))
        took = sorted(of.took)
        row = {
            "size": part.size,
            "batch": part.batch,
            "clients": part.clients,
            "store": store,
            "action": action,
            "gb_per_s": speed[store, action],
            "p50_ms": 1e3 * statistics.median(took),
            "p99_ms": 1e3 * took[len(took) * 99 // 100],
            "client_cpu_s_per_gb": of.client_s / of.bytes * 1e9,
            "server_cpu_s_per_gb": of.server_s / of.bytes * 1e9,
            "calls": len(took),
        }
        if memcpy:
            row["of_memcpy"] = speed[store, action] / memcpy
        for mine in COMPARED:
            if store not in (*OURS, "memcpy") and (mine, action) in speed:
                row[f"{mine}_over_it"] = speed[mine, action] / speed[store, action]
        if of.alone:
            row["of_one_client"] = statistics.median(of.together) / statistics.median(of.alone)
            means = [statistics.mean(speeds) for speeds in zip(*of.each, strict=True)]
            row["fastest_over_slowest"] = max(means) / min(means)
        yield row


def told(row: dict[str, Any]) -> str:
    share = f"{row['of_memcpy']:5.2f} x memcpy" if "of_memcpy" in row else ""
    beside = f", sealed is {row['sealed_over_it']:5.2f} x it" if "sealed_over_it" in row else ""
    together = (
        f", {row['of_one_client']:.2f} x one client, fastest/slowest {row['fastest_over_slowest']:.2f}"
        if "of_one_client" in row
        else ""
    )
    return (
        f"{row['size']:>4} x {row['batch']:<2} {row['clients']} client{'s' if row['clients'] > 1 else ' '} "
        f"{row['store']:<11} {row['action']:<4} {row['gb_per_s']:6.2f} GB/s "
        f"p50 {row['p50_ms']:8.3f} p99 {row['p99_ms']:8.3f} ms, "
        f"CPU s/GB {row['client_cpu_s_per_gb']:5.3f} + {row['server_cpu_s_per_gb']:5.3f} {share}{beside}{together}"
    )


def spelled(size: str) -> str:
    return f"{size[:-1]} {size[-1]}iB"


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    found = {(row["size"], row["batch"], row["clients"], row["store"], row["action"]): row for row in rows}
    goals = []
    for (size, batch, store, action), goal in GOALS.items():
        row = found.get((size, batch, 1, store, action), {})
        if "of_memcpy" in row:
            name = f"{spelled(size)} x {batch}, one client: {action}, {store}"
            goals.append(Goal(name, row["of_memcpy"], "x memcpy", goal, ">="))
    for (size, action), peers in OVER_PEER_GOALS.items():
        for peer, goal in peers.items():
            row = found.get((size, 16, 1, peer, action), {})
            if "sealed_over_it" in row:
                name = f"{spelled(size)} x 16, one client: {action}, sealed over {peer}"
                goals.append(Goal(name, row["sealed_over_it"], "x", goal, ">="))
    for action in ("get", "put"):
        if row := found.get(("32M", 1, 1, "tcp", action)):
            name = f"over TCP, a chunk of 32 MiB in frames of 2 MiB: {action}"
            goals.append(Goal(name, row["gb_per_s"], "GB/s", REMOTE_GOAL, ">="))
    by_one, by_two = (
        found.get((ONE_MESSAGE.size, ONE_MESSAGE.batch, 1, "sealed", action)) for action in ("put", "write")
    )
    if by_one and by_two:
        name = f"{spelled(ONE_MESSAGE.size)} x {ONE_MESSAGE.batch}, one client: put by one message"
        share = by_one["p50_ms"] / by_two["p50_ms"]
        goals.append(Goal(name, share, "x by two", ONE_MESSAGE_GOAL, "<="))
    for action in ("get", "put"):
        if row := found.get(("2M", 16, 4, "sealed", action)):
            name = f"2 MiB x 16, 4 clients: {action}, sealed"
            goals.append(Goal(f"{name}, together", row["of_one_client"], "x one client", TOGETHER_GOAL, ">="))
            goals.append(
                Goal(f"{name}, fastest over slowest", row["fastest_over_slowest"], "x", FAIR_GOAL, "<=")
            )
    return goals


if __name__ == "__main__":
    sys.exit(main())
