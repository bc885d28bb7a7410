"""The registry on a real redis-server: who is there, what they hold, and what becomes of it when Redis misbehaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.errors import ConfigError
from kvstore.fleet.held import PAGE_ROWS, Where
from kvstore.fleet.registry import Node, Registry, check_url, connect, without_password
from kvstore.fleet.secret import FleetSecret
from kvstore.tiers.remote.backend import StoreProblem
from kvstore.types import ChunkKey

from ...fleet_tools import RedisServer, eventually, needs_redis, redis_server

pytestmark = needs_redis
SECRET = FleetSecret(b"a secret of this fleet")
NAMESPACE = SECRET.namespace(b"s" * 32)
HASH = SECRET.hasher(NAMESPACE)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    with shared.client() as client:
        client.flushall()
    return shared


def node(name: str, *, boot: int = 1, started_at: float = 1.0) -> Node:
    return Node(name, bytes([boot]) * 16, f"{name}:7000", started_at=started_at)


def registry(server: RedisServer, name: str, **options: Any) -> Registry:
    """It takes its rounds when the test says so."""
    secret = options.pop("secret", SECRET)
    boot = {name: options.pop(name) for name in ("boot", "started_at") if name in options}
    settings = {"ttl_ms": 60_000, "pages_per_s": 16, **options}
    return Registry(server.url, secret, node(name, **boot), **settings)


def found(who: Registry, *numbers: int) -> dict[str, list[int]]:
    return {
        holder.node.name: holder.where.tolist()
        for holder in who.holders(NAMESPACE, [key(number) for number in numbers])
    }


def test_nodes_find_each_others_chunks_and_not_their_own(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(0, HASH(key(1))), (1, HASH(key(2)) | 1)])
    b.note([(0, HASH(key(3)))])
    for each in (a, b, a):
        each.round()
    assert found(a, 1, 2, 3) == {"b": [Where.NOWHERE, Where.NOWHERE, Where.DRAM]}
    assert found(b, 1, 2, 3) == {"a": [Where.DRAM, Where.SSD, Where.NOWHERE]}
    assert [each.address for each in b.others()] == ["a:7000"]
    a.note([(0, 0)])
    a.round()
    b.round()
    assert found(b, 1, 2) == {"a": [Where.NOWHERE, Where.SSD]}


def test_the_longest_beginning_comes_first(server: RedisServer) -> None:
    short, long, reader = (registry(server, name) for name in ("short", "long", "reader"))
    short.note([(row, HASH(key(row))) for row in (1, 3, 4, 5)])
    long.note([(row, HASH(key(row))) for row in (1, 2)])
    for each in (short, long, reader):
        each.round()
    holders = reader.holders(NAMESPACE, [key(number) for number in range(1, 6)])
    assert [(each.node.name, each.leading) for each in holders] == [("long", 2), ("short", 1)]


def test_only_what_changed_is_written_and_read(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(page * PAGE_ROWS, HASH(key(page))) for page in range(8)])
    a.round()
    b.round()
    assert (a.counters["pages_written"], b.counters["pages_read"]) == (8, 8)
    a.note([(5, HASH(key(99)))])
    a.round()
    b.round()
    # One that changed, and one that is written anew in its turn whatever it is
    assert a.counters["pages_written"] == 10
    assert b.counters["pages_read"] == 10
    assert found(b, 99) == {"a": [Where.DRAM]}


def test_writes_a_second_are_bounded(server: RedisServer) -> None:
    a, b = registry(server, "a", ttl_ms=10_000, pages_per_s=3), registry(server, "b")
    a.note([(page * PAGE_ROWS, HASH(key(page))) for page in range(8)])
    told = []
    for _ in range(4):
        a.round()
        told.append(a.counters["pages_written"])
    assert told[:2] == [3, 6] and told[2] >= 8
    b.round()
    assert found(b, *range(8)) == {"a": [Where.DRAM] * 8}


def test_a_node_that_ends_or_dies_vanishes(server: RedisServer) -> None:
    a, b, c = (registry(server, name, ttl_ms=1_000) for name in "abc")
    for each in (a, b):
        each.note([(0, HASH(key(1)))])
        each.round()
    c.round()
    assert set(found(c, 1)) == {"a", "b"}
    a._leave()
    c.round()
    assert set(found(c, 1)) == {"b"}

    def gone() -> bool:
        c.round()
        return not c.others()

    eventually(gone, "b, which is silent, has gone")
    with server.client() as client:
        assert not client.keys(f"kvs:{SECRET.prefix}:node:*b*")


def test_redis_that_forgot_everything_is_told_again(server: RedisServer) -> None:
    """All of it with the next heartbeat, not page by page in their turn."""
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(page * PAGE_ROWS, HASH(key(page))) for page in range(4)])
    a.round()
    with server.client() as client:
        client.flushall()
    b.round()
    assert b.others() == []
    a.round()
    b.round()
    assert found(b, *range(4)) == {"a": [Where.DRAM] * 4}


def test_an_older_copy_of_redis_is_replaced(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(0, HASH(key(1)))])
    a.round()
    with server.client() as client:
        old = {name: client.dump(name) for name in client.scan_iter()}
        a.note([(0, HASH(key(2)))])
        a.round()
        a.round()
        for name, value in old.items():
            client.restore(name, 0, value, replace=True)
    a.round()
    b.round()
    assert found(b, 1, 2) == {"a": [Where.NOWHERE, Where.DRAM]}


@pytest.mark.parametrize("what", ["held", "nodes", "node", "order"])
def test_one_name_that_is_spoilt_spoils_no_other(server: RedisServer, what: str) -> None:
    """Somebody wrote something else there: the node stays, and makes its part anew."""
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(0, HASH(key(1)))])
    a.round()
    name = a._name(what, "" if what == "nodes" else "a")
    with server.client() as client:
        client.delete(name)
        client.rpush(name, "nonsense")
    for _ in range(3):
        a.round()
        if what == "held":  # the heartbeat goes on meanwhile
            b.round()
            assert [each.name for each in b.others()] == ["a"]
    b.round()
    assert found(b, 1) == {"a": [Where.DRAM]}
    assert a.state == "ok"


def test_a_page_that_is_spoilt_is_not_believed_and_made_anew(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    a.note([(0, HASH(key(1))), (PAGE_ROWS, HASH(key(2)))])
    a.round()
    with server.client() as client:
        client.hset(a._name("held", "a"), "0", b"x" * 64)
    b.round()
    assert found(b, 1, 2) == {"a": [Where.NOWHERE, Where.DRAM]}
    assert b.counters["pages_bad"] == 1
    for _ in range(2):
        a.round()
    b.round()
    assert found(b, 1, 2) == {"a": [Where.DRAM, Where.DRAM]}


def test_nobody_else_can_say_that_a_node_is_there(server: RedisServer) -> None:
    """Who can write to Redis and does not know the secret leads nobody anywhere."""
    a, b = registry(server, "a"), registry(server, "b")
    a.round()
    forged = node("a", boot=9).encode(FleetSecret(b"guessed, but wrong secret"))
    with server.client() as client:
        client.set(a._name("node", "a"), forged)
        client.set(a._name("node", "c"), node("evil").encode(SECRET))  # another's, under a new name
        client.sadd(a._name("nodes"), "c")
    b.round()
    assert b.others() == []


def test_fleets_with_other_secrets_share_nothing(server: RedisServer) -> None:
    a = registry(server, "a")
    stranger = registry(server, "b", secret=FleetSecret(b"another fleet's secret"))
    a.note([(0, HASH(key(1)))])
    a.round()
    stranger.round()
    assert stranger.others() == [] and found(stranger, 1) == {}


def test_a_redis_that_evicts_is_refused(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            a.round()
            assert a.state == "refused" and "allkeys-lru" in a.why
            assert client.keys() == []
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    a.round()
    b.round()
    assert a.state == "ok" and [each.name for each in b.others()] == ["a"]


def test_of_two_daemons_with_one_name_the_later_stays(server: RedisServer) -> None:
    first = registry(server, "a")
    second = registry(server, "a", boot=2, started_at=2.0)
    reader = registry(server, "b")
    second.note([(0, HASH(key(1)))])
    for each in (first, second, first, second, reader):
        each.round()
    assert first.state == "refused" and "node_name" in first.why
    assert second.state == "ok" and found(reader, 1) == {"a": [Where.DRAM]}


def test_orders_reach_their_node_once_and_only_from_the_fleet(server: RedisServer) -> None:
    got: list[Any] = []
    a, b = registry(server, "a", on_order=got.append), registry(server, "b")
    b.order("a", {"do": "drain"})
    a.round()
    a.round()
    assert got == [{"do": "drain"}]
    with server.client() as client:
        body = json.dumps({"do": "drain"}).encode()
        client.set(a._name("order", "a"), SECRET.tag(b"b" + body) + body)  # given to another node
    a.round()
    assert len(got) == 1


def test_a_draining_node_says_so(server: RedisServer) -> None:
    a, b = registry(server, "a"), registry(server, "b")
    a.drain()
    a.round()
    b.round()
    assert [each.draining for each in b.others()] == [True]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path) as server:
        yield server


def test_a_redis_that_is_gone_or_stands_still_holds_nobody_up(own: RedisServer) -> None:
    a, b = registry(own, "a", ttl_ms=2_000), registry(own, "b", ttl_ms=2_000)
    a.note([(0, HASH(key(1)))])
    a.start()
    b.start()
    try:
        eventually(lambda: found(b, 1), "b learns of a's chunk")
        os.kill(own.pid, signal.SIGSTOP)
        eventually(lambda: b.state == "away", "b notices that Redis stands still")
        began = time.monotonic()
        for _ in range(100):
            assert found(b, 1) == {"a": [Where.DRAM]}  # what it knew
        assert time.monotonic() - began < 20
        os.kill(own.pid, signal.SIGCONT)
        eventually(lambda: b.state == a.state == "ok", "both are back")
        own.stop()
        eventually(lambda: b.state == "away", "b notices that Redis has gone")
        own.start()
        a.note([(1, HASH(key(2)))])
        eventually(lambda: found(b, 1, 2) == {"a": [2, 2]}, "all is told again")
    finally:
        a.close(20)
        b.close(20)


def test_forgets_that_a_redis_lost_twice_in_one_round_are_no_bug(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It was put back from an older copy again while it was told what it had lost."""

    class LostAgain:
        told: ClassVar[list[str]] = []

        def round(self, client: Any) -> None:
            raise StoreProblem("the store was wiped, or is an older copy")

        def postpone(self, why: str) -> None:
            self.told.append(why)

    a = registry(server, "a", forgets=LostAgain())
    a.round()
    assert a.state == "away" and "older copy" in LostAgain.told[-1]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("url", ["", "http://x", "x", "s3://bucket", "redis://a:1/models"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="registry_url"):
        check_url(url)


def test_a_log_says_no_password() -> None:
    assert without_password("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert without_password("redis://host:1") == "redis://host:1"
    assert without_password("redis://host:1/0?db=1") == "redis://host:1/0?***"
    for url in (
        "rediss://:secret@host",
        "redis://host?password=secret",
        "redis://user:secret@host?password=secret",
        "redis://host?password=p@secret",
        "redis://:p?secret@host",
    ):
        assert "secret" not in without_password(url), url


def test_the_thread_outlives_answers_that_are_none(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = registry(server, "a")

    def broken() -> None:
        raise KeyError("what is this")

    monkeypatch.setattr(a, "_read_others", broken)
    a.round()
    assert a.state == "away" and "KeyError" in a.why
    monkeypatch.undo()
    a.round()
    assert a.state == "ok"


def test_of_a_cluster_several_nodes_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pytest.importorskip("redis.cluster")
    made: list[tuple[str, list[tuple[str, int]]]] = []

    def from_url(url: str, *, startup_nodes: list[Any], **_: Any) -> str:
        made.append((url, [(node.host, node.port) for node in startup_nodes]))
        return "a client"

    monkeypatch.setattr(cluster.RedisCluster, "from_url", from_url)
    url = "redis+cluster://u:p@10.0.0.1:7000,10.0.0.2:7001,10.0.0.3:7002/"
    check_url(url)
    assert connect(url) == "a client"
    assert made == [("redis://u:p@10.0.0.1:7000/", [("10.0.0.2", 7001), ("10.0.0.3", 7002)])]
    for wrong in ("redis+cluster://a:1,b", "redis://a:1,b:2"):
        with pytest.raises(ConfigError, match="registry_url"):
            check_url(wrong)
