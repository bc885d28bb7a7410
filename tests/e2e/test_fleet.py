"""Three daemons and a real redis-server: KV follows its conversation from node to node."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, Namespace, connect
from kvstore.errors import BadRequest
from kvstore.keys import ROOT
from kvstore.layout import GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import ChunkKey, Outcome, Reason

from ..fleet_tools import BOUND_S, SECRET, RedisServer, eventually, free_port, needs_redis, redis_server
from . import forked
from .remote_tools import SlowLine

pytestmark = needs_redis
SHARD = 64 << 10
SPEC = NamespaceSpec(
    model="tiny",
    weights_digest=b"w" * 32,
    layout_fingerprint="test:bytes",
    chunk_tokens=64,
    groups=(GroupSpec("full", shard_bytes=SHARD, shard_count=2, layers=(LayerSlice(0, 0, SHARD),)),),
)
TTL_MS = 2_000
WAIT_MS = 10_000


def content(key: bytes, shard: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([*key, shard]).integers(0, 256, SHARD, dtype=np.uint8)


class Member:
    """A node, its client, and how many chunks of the conversation it had to compute."""

    def __init__(self, daemon: Any, name: str, client: Client) -> None:
        self.daemon = daemon
        self.name = name
        self.client = client
        self.space: Namespace = client.open(SPEC)
        self.computed = 0
        self.maker = f"engine of {name}".encode().ljust(16)

    def turn(self, tokens: int, *, chunks: int) -> None:
        """What an engine does for a prompt of so many tokens: load what there is, compute and save the rest."""
        keys = self.space.keys(np.arange(tokens))
        assert len(keys) == chunks
        loaded = self.load(keys)
        self.computed += len(keys) - loaded
        self.save(keys, loaded)

    def load(self, keys: list[ChunkKey]) -> int:
        """How many from the first on could be had, each with the bytes that were saved."""
        until = time.monotonic() + BOUND_S
        while True:
            with self.space.read(keys, wait_ms=WAIT_MS) as lease:
                if Outcome.PENDING in lease.outcomes and time.monotonic() < until:
                    lease.settled()
                    continue
                for index in range(lease.hits):
                    for shard in range(2):
                        out = np.zeros(SHARD, np.uint8)
                        assert lease.copy_to(index, out, shard=shard)
                        np.testing.assert_array_equal(out, content(keys[index], shard))
                return lease.hits

    def save(self, keys: list[ChunkKey], first: int = 0) -> None:
        if first == len(keys):
            return
        parent = keys[first - 1] if first else ROOT
        with self.space.write(keys[first:], parent=parent, maker=self.maker) as batch:
            for index in batch.granted:
                for shard in batch.shards:
                    batch.buffer(index, shard)[:] = content(keys[first + index], shard)
            assert batch.commit().ok

    def saves(self, keys: list[ChunkKey], first: int) -> bool:
        """Whether all of them are there now: the arena grows as it is used."""
        self.save(keys, first)
        return self.knows(keys)

    def knows(self, keys: list[ChunkKey]) -> bool:
        """Whether a lookup finds them all, here or elsewhere."""
        return self.space.match(keys).usable == len(keys)

    def counter(self, name: str) -> int:
        return self.client.stats().counters.get(name, 0)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def join(
    start_daemon: Callable[..., Any], redis: RedisServer, run_dir: Path, tmp_path: Path
) -> Iterator[Callable[..., Member]]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    with ExitStack() as clients:

        def start(name: str, **settings: Any) -> Member:
            daemon = start_daemon(
                **{
                    "run_dir": run_dir.parent / name,
                    "node_name": name,
                    "registry_url": redis.url,
                    "registry_ttl_ms": TTL_MS,
                    "fleet_secret_file": secret,
                    "peer_address": "127.0.0.1:0",
                    "peer_plaintext": True,
                    "peer_deadline_ms": 20_000,
                    "remote_deadline_ms": 30_000,
                    **settings,
                }
            )
            client = clients.enter_context(connect(str(daemon.run_dir), timeout_s=BOUND_S))
            return Member(daemon, name, client)

        yield start


def test_a_conversation_moves_from_node_to_node(join: Callable[..., Member]) -> None:
    """It begins on a, goes on at b, then at c after a was killed: nothing is computed that a peer holds."""
    a, b, c = join("a"), join("b"), join("c")
    a.turn(64 * 6, chunks=6)
    keys = a.space.keys(np.arange(64 * 6))
    assert b.space.keys(np.arange(64 * 6)) == keys, "keys differ from node to node"
    eventually(lambda: b.knows(keys), "b learns what a holds")
    b.turn(64 * 8, chunks=8)
    assert (a.computed, b.computed) == (6, 2)
    longer = b.space.keys(np.arange(64 * 8))
    a.daemon.kill()
    eventually(lambda: c.knows(longer), "c learns what b holds")
    c.turn(64 * 9, chunks=9)
    assert c.computed == 1
    assert c.counter("remote_chunks_fetched") == 8


@pytest.mark.timeout(600)  # of a machine that does much else
def test_a_peer_behind_a_slow_link_gives_all_it_holds_and_is_not_left_alone(
    join: Callable[..., Member],
) -> None:
    """20 MiB at 2 MB/s, of which at most 8 s are waited for: asked for at once they would be late. What is here is
    read on meanwhile."""
    port = free_port()
    line = SlowLine(port)
    room = {"dram_bytes": 64 << 20, "segment_bytes": 4 << 20, "pin_share_max": 1.0, "reserve_share_max": 0.5}
    try:
        a = join("a", peer_address=f"127.0.0.1:{port}", peer_advertise=f"127.0.0.1:{line.port}", **room)
        b = join("b", peer_deadline_ms=8_000, remote_deadline_ms=8_000, **room)
        keys = a.space.keys(np.arange(64 * 160))
        for first in range(0, len(keys), 32):
            eventually(lambda first=first: a.saves(keys[: first + 32], first), "there is room")
        own = b.space.keys(np.arange(64 * 8) + (1 << 20))
        b.save(own)
        eventually(lambda: b.knows(keys), "b learns what a holds")
        line.bytes_per_s = 2_000_000
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(b.load, keys)
            reads = 0
            while not coming.done():
                assert b.load(own) == len(own)
                reads += 1
                time.sleep(0.05)
        assert coming.result() == len(keys)
        assert reads and not b.counter("remote_trips") and not b.counter("remote_fetches_late")
    finally:
        line.close()


def test_what_one_node_forgets_no_other_serves(join: Callable[..., Member], tmp_path: Path) -> None:
    """Neither the node that brought it, from DRAM or from SSD, nor one that reads it from there."""
    a, b = join("a"), join("b", ssd_dir=tmp_path / "b", ssd_bytes=64 << 20, ssd_slab_bytes=4 << 20)
    a.turn(64 * 6, chunks=6)
    keys = a.space.keys(np.arange(64 * 6))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    assert b.load(keys) == 6
    assert not a.space.forget(keys=keys[3:]).not_durable
    assert a.space.match(keys).reasons[3] is Reason.FORGOTTEN
    assert a.load(keys) == 3, "what somebody wanted gone comes back"
    eventually(lambda: b.space.match(keys).usable == 3, "b hears of it")
    assert b.load(keys) == 3
    c = join("c")
    eventually(lambda: c.knows(keys[:3]), "c learns what a and b hold")
    assert c.load(keys) == 3
    b.save(keys, 3)  # computed again
    eventually(lambda: c.knows(keys), "c learns of what came after it")
    assert c.load(keys) == 6
    b.daemon.kill()
    again = join("b", ssd_dir=tmp_path / "b", ssd_bytes=64 << 20, ssd_slab_bytes=4 << 20)
    assert again.counter("chunks_forgotten_elsewhere") <= 3  # what stood in its journal is heeded once more


@pytest.mark.parametrize("what", ["epoch", "maker"])
def test_a_recall_and_a_reload_end_copies_everywhere(join: Callable[..., Member], what: str) -> None:
    a, b = join("a"), join("b")
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    assert b.load(keys) == 4
    if what == "epoch":
        a.client.open(replace(SPEC, weights_epoch=1))
    else:
        assert kvctl(a, "recall", "--maker", a.maker.hex())["chunks"] == 4
    eventually(lambda: not any(o is Outcome.HIT for o in b.space.match(keys).outcomes), "b hears of it")
    assert b.load(keys) == 0
    b.turn(64 * 4, chunks=4)
    assert b.computed == 4 and b.load(keys) == 4, "what b makes itself is another's business"


def test_a_node_that_hears_nothing_serves_nothing_of_others(
    join: Callable[..., Member], redis: RedisServer
) -> None:
    """And what it made itself all the same; what it is told to forget meanwhile it says is not told yet."""
    a, b = join("a"), join("b", forget_within_s=10)
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    assert b.load(keys) == 4
    own = b.space.keys(np.arange(1000, 1000 + 64 * 2))
    b.save(own)
    redis.stop()
    assert "the other nodes do not know it yet" in a.space.forget(keys=keys[:1]).not_durable
    eventually(lambda: b.load(keys) == 0, "the bound is over")
    assert b.load(own) == 2
    redis.start()
    eventually(lambda: b.knows(keys[1:]), "it hears again, and learns what a holds")
    assert b.load(keys[:1]) == 0, "what a could not tell then, it has told now"


def test_a_node_that_stood_still_hears_first(join: Callable[..., Member]) -> None:
    """Stopped while the others forget; what it answers when it goes on is in the bound, and soon right."""
    a, b = join("a"), join("b")
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    assert b.load(keys) == 4
    b.daemon.process.send_signal(signal.SIGSTOP)
    try:
        a.space.forget(keys=keys)
    finally:
        b.daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: b.load(keys) == 0, "b hears of it")


def test_another_tenant_gets_nothing(join: Callable[..., Member]) -> None:
    """The same model and tokens, on a node where the caller is another tenant."""
    a = join("a")
    b = join("b", tenants=f"{os.getuid()}=bob")
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    assert b.client.tenant == "bob"
    b.turn(64 * 4, chunks=4)
    assert b.computed == 4
    # Nor by the other's keys
    for _ in range(3):
        assert b.space.match(keys).usable == 0 and b.load(keys) == 0
    assert b.counter("remote_keys_found") == 0
    c = join("c")
    eventually(lambda: c.knows(keys), "c, of a's tenant, learns what a holds")
    assert c.load(keys) == 4


def test_a_reload_of_the_weights_ends_what_peers_serve(join: Callable[..., Member]) -> None:
    a, b = join("a"), join("b")
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    newer = a.client.open(replace(SPEC, weights_epoch=1))
    assert newer.salt != a.space.salt
    assert b.load(keys) == 0, "a serves an old epoch"


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_peer_that_is_gone_costs_a_miss(join: Callable[..., Member], fault: str) -> None:
    a, b = join("a"), join("b", peer_deadline_ms=300)
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    if fault == "stop":
        a.daemon.process.send_signal(signal.SIGSTOP)
    else:
        a.daemon.kill()
    try:
        assert b.load(keys) == 0
        b.turn(64 * 4, chunks=4)
        assert b.computed == 4
        assert b.load(keys) == 4
    finally:
        if fault == "stop":
            a.daemon.process.send_signal(signal.SIGCONT)


def test_without_redis_a_node_serves_on(join: Callable[..., Member], redis: RedisServer) -> None:
    a, b = join("a"), join("b")
    a.turn(64 * 4, chunks=4)
    keys = a.space.keys(np.arange(64 * 4))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    redis.stop()
    a.turn(64 * 6, chunks=6)
    assert a.computed == 6
    assert b.load(keys) == 4, "what b knew of a is still there"
    late = join("late")  # and one begins without
    late.turn(64 * 4, chunks=4)
    assert late.computed == 4
    redis.start()
    longer = a.space.keys(np.arange(64 * 6))
    eventually(lambda: b.knows(longer), "everything is told again")
    assert b.load(longer) == 6


def kvctl(member: Member, *arguments: str) -> Any:
    ended = forked.run(["--run-dir", str(member.daemon.run_dir), "--json", *arguments], dict(os.environ))
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    return json.loads(ended.stdout)


def test_routes_say_who_holds_how_much_and_what_the_rest_costs(join: Callable[..., Member]) -> None:
    a, b, c = join("a"), join("b"), join("c")
    tokens = np.arange(64 * 6)
    keys = a.space.keys(tokens)
    a.save(keys)
    b.save(keys[:2])
    c.space.match(keys)

    def routes() -> dict[str, Any] | None:
        reply = c.client.route("tiny", keys=keys)
        rows = {row.name: row for row in reply.nodes}
        return (
            rows
            if {name: row.prefix_chunks for name, row in rows.items()} == {"a": 6, "b": 2, "c": 0}
            else None
        )

    rows = eventually(routes, "c knows who holds what")
    assert list(rows) == ["a", "b", "c"], "the cheapest comes first"
    assert [row.cost_ms == 0 for row in rows.values()] == [True, False, False]
    assert rows["b"].cost_ms < rows["c"].cost_ms
    assert rows["c"].here and not rows["a"].here
    assert rows["a"].prefix_bytes == 6 * 2 * SHARD and rows["a"].prefix_dram_chunks == 6
    shown = kvctl(c, "route", *(part for each in keys for part in ("--key", each.hex())))
    assert [row["name"] for row in shown["nodes"]] == ["a", "b", "c"] and shown["registry"] == "ok"
    nodes = kvctl(b, "fleet", "stats")
    assert [(row["name"], row["here"]) for row in nodes["nodes"]] == [("a", False), ("b", True), ("c", False)]


def test_a_node_that_drains_hands_over_what_it_has(join: Callable[..., Member]) -> None:
    a, b = join("a"), join("b")
    a.turn(64 * 6, chunks=6)
    keys = a.space.keys(np.arange(64 * 6))
    eventually(lambda: b.knows(keys), "b learns what a holds")
    told = kvctl(b, "fleet", "drain", "a", "--wait")
    assert told["load"]["drain_chunks"] == told["load"]["drain_taken"] == 6
    assert [row.name for row in b.client.route("tiny", keys=keys).nodes] == ["b", "a"], "a is routed to"
    a.daemon.kill()
    assert b.load(keys) == 6
    assert b.counter("remote_chunks_fetched") == 6


def test_a_route_needs_no_fleet(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon()
    with connect(str(daemon.run_dir), timeout_s=BOUND_S) as client:
        member = Member(daemon, "", client)
        member.turn(64 * 3, chunks=3)
        reply = client.route("tiny", keys=member.space.keys(np.arange(64 * 4)))
        assert [(row.here, row.prefix_chunks) for row in reply.nodes] == [(True, 3)]
        assert reply.registry == "off"
        with pytest.raises(BadRequest, match="keys"):
            client.route("tiny")
