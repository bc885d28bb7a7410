"""What one node put into the REMOTE store another one serves, and nothing that was forgotten or tampered with."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Hint
from kvstore.tiers.remote import records
from kvstore.types import Outcome

from ..fleet_tools import RedisServer, needs_redis
from .remote_tools import Node, SlowLine, starter
from .ssd_tools import CHUNK, content, eventually


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/shared"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url


@pytest.fixture
def start(start_daemon: Callable[..., Any], run_dir: Path, url: str) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []
    begin = starter(start_daemon, run_dir, remote_url=url)

    def start(name: str, **settings: Any) -> Node:
        made.append(begin(name, **settings))
        return made[-1]

    yield start
    for node in made:
        node.close()


@needs_redis
def test_another_node_serves_what_one_has_written(start: Callable[..., Node]) -> None:
    a, b = start("a"), start("b")
    keys = a.keys(24)
    a.save(keys)
    a.stored_remotely(24)
    matched = b.space.match(keys)
    assert [reason.name for reason in matched.reasons] == ["ON_REMOTE"] * 24 and matched.usable == 24
    assert b.read(keys) == ["HIT"] * 24  # every byte is compared
    assert b.counter("remote_chunks_fetched") == 24


@pytest.mark.parametrize(("writes", "said"), [("write-through", "everything, soon"), ("off", "reads alone")])
def test_the_start_line_names_the_store_and_what_is_written_there(
    start_daemon: Callable[..., Any], tmp_path: Path, writes: str, said: str
) -> None:
    """And no credentials. A store that is away keeps no daemon from starting."""
    pytest.importorskip("redis")
    salt = tmp_path / "salt"
    salt.write_text("5" * 64)
    salt.chmod(0o600)
    url = "redis://kv:hunter2@127.0.0.1:1/0?client_name=hunter2"
    daemon = start_daemon(remote_url=url, remote_writes=writes, remote_salt_file=salt)
    daemon.stop()
    text = daemon.process.stdout.read()
    (line,) = [line for line in map(json.loads, text.splitlines()) if line["message"].endswith("serves")]
    assert line["remote"] == f"REMOTE redis://kv:***@127.0.0.1:1/0?*** (writes {writes}: {said}, signed)"
    assert "hunter2" not in text + json.dumps(daemon.lines)


@needs_redis
def test_it_outlives_the_node_that_wrote_it(start: Callable[..., Node]) -> None:
    a = start("a")
    keys = a.keys(8)
    a.save(keys)
    a.stored_remotely(8)
    a.close()
    a.daemon.kill()
    assert start("c").read(keys) == ["HIT"] * 8


@needs_redis
def test_what_one_node_forgets_no_node_serves(start: Callable[..., Node]) -> None:
    a, b = start("a"), start("b")
    keys = a.keys(8)
    a.save(keys)
    a.stored_remotely(8)
    assert b.space.match(keys).usable == 8  # b knows where they are
    a.space.forget(keys=keys[:4])
    found = b.read(keys)
    assert "HIT" not in found[:4], found
    b.save(keys[:4])  # computed again: what is written now is no longer what was forgotten
    b.stored_remotely(4)
    c = start("c")
    assert c.read(keys[:4]) == ["HIT"] * 4


@needs_redis
def test_a_copy_of_what_another_node_forgets_goes(start: Callable[..., Node]) -> None:
    """Out of DRAM, and it is not written there again by who had not heard of it yet."""
    a, b = start("a"), start("b")
    keys = a.keys(8)
    a.save(keys)
    a.stored_remotely(8)
    assert b.read(keys) == ["HIT"] * 8
    own = b.keys(4, chain=1)
    b.save(own)
    a.space.forget(keys=[*keys[:4], own[0]])
    eventually(lambda: "HIT" not in b.read(keys[:4]), b.counters)
    assert b.read(keys[4:]) == ["HIT"] * 4
    assert b.read(own)[0] != "HIT" and b.read(own)[1:] == ["HIT"] * 3
    c = start("c")
    assert "HIT" not in c.read([*keys[:4], own[0]])


@needs_redis
def test_a_hint_brings_what_another_node_has_written(start: Callable[..., Node]) -> None:
    """Before anybody asks for it."""
    a, b = start("a"), start("b")
    keys = a.keys(8)
    a.save(keys)
    a.stored_remotely(8)
    b.space.publish_queue([Hint(b"turn", 1, keys=tuple(keys))])
    eventually(lambda: all(o is Outcome.HIT for o in b.space.match(keys).outcomes), b.counters)
    assert b.counter("remote_chunks_wanted_ahead") == 8
    assert b.read(keys) == ["HIT"] * 8


@needs_redis
def test_what_is_encrypted_is_read_with_its_key_alone(
    start: Callable[..., Node], url: str, tmp_path: Path
) -> None:
    """Keys are rotated: the newest seals, all that are there open."""
    pytest.importorskip("cryptography")

    def key_file(name: str, *keys: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(keys))
        path.chmod(0o600)
        return path

    old, new = "11" * 32, "22" * 32
    a = start("a", remote_key_file=key_file("old", old))
    keys = a.keys(8)
    a.save(keys)
    a.stored_remotely(8)
    told = stored_bytes(url)
    assert len(told) > 8 * CHUNK and content(keys[0])[:64].tobytes() not in told, "KV can be read there"
    both = start("both", remote_key_file=key_file("both", new, old))
    assert both.read(keys) == ["HIT"] * 8
    more = both.keys(4, chain=1)
    both.save(more)
    both.stored_remotely(4)
    rotated = start("rotated", remote_key_file=key_file("new", new))
    assert rotated.read(more) == ["HIT"] * 4
    assert "HIT" not in rotated.read(keys)
    assert "HIT" not in start("without").read([*keys, *more])


def stored_bytes(url: str) -> bytes:
    """All that is in the store."""
    if url.startswith("file://"):
        files = Path(url.removeprefix("file://")).rglob("*")
        return b"".join(path.read_bytes() for path in files if path.is_file())
    redis = pytest.importorskip("redis")
    with redis.Redis.from_url(url) as client:
        return b"".join(client.get(name) for name in client.scan_iter() if client.type(name) == b"string")


@needs_redis
def test_nodes_with_different_salts_share_nothing(start: Callable[..., Node], tmp_path: Path) -> None:
    salts = []
    for name in ("one", "other"):
        salts.append(tmp_path / name)
        salts[-1].write_text(name * 10)
        salts[-1].chmod(0o600)
    a, b = start("a", remote_salt_file=salts[0]), start("b", remote_salt_file=salts[1])
    keys = a.keys(4)
    a.save(keys)
    a.stored_remotely(4)
    assert b.space.match(keys).usable == 0
    assert start("c", remote_salt_file=salts[0]).read(keys) == ["HIT"] * 4


@needs_redis
def test_poisoned_records_are_refused(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Flipped, truncated, swapped with another key's, or of another epoch: a miss, and never its bytes."""
    start = starter(start_daemon, run_dir, remote_url=redis_server.url)
    a = start("a")
    keys = a.keys(6)
    a.save(keys)
    a.stored_remotely(6)
    digest = a.space.salt
    names = [_name(digest, key) for key in keys]
    with redis_server.client() as client:
        good = [client.get(name) for name in names]
        assert all(good)
        flipped = bytearray(good[0])
        flipped[-1] ^= 1
        client.set(names[0], bytes(flipped))
        client.set(names[1], good[1][:-1])
        client.set(names[2], good[3])
        client.set(names[3], good[2])
        other = bytearray(good[4])
        other[70] ^= 1  # the namespace in its header
        client.set(names[4], bytes(other))
    b = start("b")
    found = b.read(keys)
    assert found[5] == "HIT" and "HIT" not in found[:5], found
    assert b.counter("remote_chunks_refused") >= 2
    a.close()
    b.close()


def _name(digest: bytes, key: Any) -> str:
    return f"kvs:{records.prefix_of()}:{records.place_of(digest)}:{records.name_of(digest, key, 0)}"


@needs_redis
def test_a_store_that_stops_delays_no_hit_and_is_used_again_when_it_is_back(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer
) -> None:
    import os
    import signal

    start = starter(start_daemon, run_dir, remote_url=redis_server.url, remote_lookup_ms=200)
    a, b = start("a"), start("b")
    shared, own = a.keys(4, chain=1), b.keys(8, chain=2)
    a.save(shared)
    a.stored_remotely(4)
    b.save(own)
    b.stored_remotely(8)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        assert b.read(own) == ["HIT"] * 8
        misses = [b.space.match(b.keys(4, chain=10 + number)).usable for number in range(10)]
        assert misses == [0] * 10
        assert "HIT" not in b.read(shared)
        b.save(b.keys(4, chain=30))
        assert b.read(own) == ["HIT"] * 8
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    eventually(lambda: b.read(shared) == ["HIT"] * 4, b.counters)
    a.close()
    b.close()


@needs_redis
def test_a_store_at_a_kilobyte_a_second_costs_misses_until_it_is_fast_again(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer
) -> None:
    line = SlowLine(redis_server.port)
    try:
        start = starter(start_daemon, run_dir, remote_lookup_ms=200, remote_deadline_ms=600)
        a = start("a", remote_url=redis_server.url)
        b = start("b", remote_url=f"redis://127.0.0.1:{line.port}/0")
        shared, own = a.keys(4, chain=1), b.keys(8, chain=2)
        a.save(shared)
        a.stored_remotely(4)
        b.save(own)
        b.stored_remotely(8)
        line.bytes_per_s = 1_000
        for _ in range(4):
            assert b.read(own) == ["HIT"] * 8
            assert "HIT" not in b.read(shared)
        b.save(b.keys(4, chain=3))
        assert b.read(b.keys(4, chain=3)) == ["HIT"] * 4
        line.bytes_per_s = 0
        eventually(lambda: b.read(shared) == ["HIT"] * 4, b.counters)
        a.close()
        b.close()
    finally:
        line.close()


@needs_redis
def test_a_store_at_five_megabytes_a_second_is_late_with_nothing(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer
) -> None:
    """More is wanted at once than the link carries within a deadline."""
    line = SlowLine(redis_server.port)
    try:
        big = {"dram_bytes": 1 << 30, "segment_bytes": 64 << 20, "remote_deadline_ms": 5_000}
        start = starter(start_daemon, run_dir, **big)
        a = start("a", remote_url=redis_server.url)
        b = start("b", remote_url=f"redis://127.0.0.1:{line.port}/0")
        count = (32 << 20) // CHUNK
        keys, own = a.keys(count, chain=1), b.keys(16, chain=2)
        a.save(keys)
        a.stored_remotely(count)
        line.bytes_per_s = 5_000_000
        with b.space.read(keys, wait_ms=60_000) as lease:
            assert len(lease.settled()) == count, b.counters()
        assert b.read(keys[:16]) == ["HIT"] * 16
        b.save(own)
        b.stored_remotely(16)
        assert not b.counter("remote_trips") and not b.counter("remote_fetches_late")
        a.close()
        b.close()
    finally:
        line.close()


@needs_redis
def test_a_store_that_is_full_is_read_and_written_again_when_it_has_room(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer
) -> None:
    start = starter(start_daemon, run_dir, remote_url=redis_server.url)
    a = start("a")
    keys = a.keys(4)
    a.save(keys)
    a.stored_remotely(4)
    with redis_server.client() as client:
        client.config_set("maxmemory", 1)  # noeviction: it takes nothing more
        more = a.keys(4, chain=1)
        a.save(more)
        eventually(lambda: a.counter("remote_chunks_not_stored") >= 4, a.counters)
        assert a.read([*keys, *more]) == ["HIT"] * 8
        b = start("b")
        eventually(lambda: b.read(keys) == ["HIT"] * 4, b.counters)  # what is there is served
        assert "HIT" not in b.read(more)
        assert "the REMOTE store does not know it yet" in a.space.forget(keys=keys[:1]).not_durable
        client.config_set("maxmemory", 0)
    eventually(lambda: "HIT" not in b.read(keys[:1]), b.counters)
    later = a.keys(4, chain=2)

    def is_written() -> bool:
        a.save(
            a.keys(1, chain=100 + a.counter("remote_chunks_stored") + a.counter("remote_chunks_not_stored"))
        )
        a.save(later)
        return a.counter("remote_chunks_stored") >= 6

    eventually(is_written, a.counters)
    a.close()
    b.close()


@needs_redis
def test_a_forget_while_the_store_is_away_is_told_when_it_is_back(
    start_daemon: Callable[..., Any], run_dir: Path, redis_server: RedisServer
) -> None:
    start = starter(start_daemon, run_dir, remote_url=redis_server.url)
    a = start("a")
    keys = a.keys(4)
    a.save(keys)
    a.stored_remotely(4)
    with redis_server.client() as client:
        kept = {name: client.get(name) for name in client.keys("kvs:*") if client.type(name) == b"string"}
    redis_server.stop()
    done: list[Any] = []
    asking = threading.Thread(target=lambda: done.append(a.space.forget(keys=keys)))
    asking.start()
    asking.join(30)
    assert done, "a forget hangs"
    redis_server.start()
    with redis_server.client() as client:
        for name, value in kept.items():  # an old copy is put back: the records are there again
            client.set(name, value)
        eventually(lambda: client.zcard(f"kvs:{{{records.prefix_of()}}}:forgotten") == 4)
    assert "HIT" not in start("b").read(keys)
    a.close()


SICK = b"a sick GPU......"


def made_by(node: Node, keys: list[Any], maker: bytes) -> None:
    with node.space.write(keys, maker=maker) as batch:
        for index in batch.granted:
            batch.buffer(index)[:] = content(keys[index])
        assert batch.commit().ok


@needs_redis
@pytest.mark.parametrize("ssd", [False, True], ids=["without-ssd", "ssd"])
def test_a_quarantined_maker_comes_back_nowhere(
    start: Callable[..., Node], tmp_path: Path, ssd: bool
) -> None:
    """Not from the store, not on another node, not after a `kill -9`."""
    settings = {"ssd_bytes": 64 << 20, "ssd_slab_bytes": 4 << 20, "ssd_index_bytes": 8 << 20}

    def begin(name: str) -> Node:
        return start(name, **({"ssd_dir": tmp_path / f"{name}-ssd", **settings} if ssd else {}))

    a, b = begin("a"), begin("b")
    bad, more, good = a.keys(4), a.keys(4, chain=1), a.keys(4, chain=2)
    for keys, maker in ((bad, SICK), (more, SICK), (good, b"a good GPU......")):
        made_by(a, keys, maker)
    a.stored_remotely(12)
    assert b.read(bad) == b.read(good) == ["HIT"] * 4
    assert b.space.report_wrong(bad[:1], healthy=True) == 1
    assert "HIT" not in b.read(bad) + b.read(more), "here it is a miss at once"
    eventually(lambda: "HIT" not in a.read(bad) + a.read(more), a.counters)
    a.close()
    a.daemon.kill()
    for node in (begin("a"), b, begin("c")):
        found = node.read(bad) + node.read(more)
        assert "HIT" not in found, (node.daemon.run_dir, found)
        assert node.read(good) == ["HIT"] * 4

        def refused(node: Node = node) -> bool:
            with node.space.write(bad, maker=SICK) as batch:
                return not batch.granted

        eventually(refused, node.counters)  # a node that has just begun reads what others have forgotten
    made_by(b, bad, b"another GPU.....")
    assert b.read(bad) == ["HIT"] * 4
