"""`kvctl purge`: one order, and a tenant's KV is nowhere: not in DRAM, on SSD, in a REMOTE store, at peers or in the
registry, and not after a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.client.schemas import list_schemas, put_schema
from kvstore.config import PEERS, PEERS_JOURNAL, REMOTE_JOURNAL, REMOTE_STORE
from kvstore.errors import StoreError
from kvstore.tiers import format
from kvstore.transport.descriptors import DEFAULT_TENANT

from ..fleet_tools import RedisServer, eventually, needs_redis
from . import forked
from .test_fleet import Member, join, kvctl, redis
from .test_fleet_sessions import NAME, go_on, told

__all__ = ["join", "redis"]
pytestmark = needs_redis
CHANNELS = {PEERS_JOURNAL: PEERS, REMOTE_JOURNAL: REMOTE_STORE}
SCHEMA = b'<schema name="trip"><module name="paris">Paris is in France.</module></schema>'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    server = RedisServer(folder)
    yield server
    server.stop()


def records(server: RedisServer) -> int:
    """Of chunks; what was forgotten stands under other names."""
    with server.client() as client:
        return sum(b"{" not in name for name in client.scan_iter())


def sessions(server: RedisServer) -> int:
    with server.client() as client:
        return sum(b":session:" in name for name in client.scan_iter())


def purge(member: Member) -> None:
    """A machine that is late may not tell the others within the time that an answer waits: then it is asked again."""
    order = ["--run-dir", str(member.daemon.run_dir), "--timeout", "30", "purge", "--tenant", DEFAULT_TENANT]
    eventually(lambda: forked.run(order, dict(os.environ)).returncode == 0, "the order is carried out")


def test_one_order_and_a_tenant_is_gone_everywhere(
    join: Callable[..., Member], redis: RedisServer, store: RedisServer, tmp_path: Path
) -> None:
    def settings(name: str) -> dict[str, Any]:
        return {
            "ssd_dir": tmp_path / name,
            "ssd_bytes": 64 << 20,
            "ssd_slab_bytes": 4 << 20,
            "durable_within_ms": 100,
            "remote_url": store.url,
            "remote_writes": "write-through",
        }

    a, b = join("a", **settings("a")), join("b", **settings("b"))
    keys = go_on(a, 6)
    eventually(lambda: told(b) == ("a", keys) and b.knows(keys), "b knows")
    assert b.load(keys) == 6, "b has a copy"
    for each in (a, b):
        put_schema(each.client, SCHEMA)
    eventually(lambda: records(store) >= 12 and sessions(redis) == 1, "all of it is beyond the node, too")
    counted = kvctl(a, "purge", "--tenant", DEFAULT_TENANT, "--dry-run")
    assert (int(counted["chunks"]), int(counted["sessions"]), int(counted["schemas"])) == (6, 1, 1), counted
    assert a.load(keys) == 6, "counting purges nothing"
    purge(a)
    assert a.load(keys) == 0 and a.space.get_session(NAME) is None
    told_of = a.daemon.wait_for("an operator's call")
    assert (told_of["call"], told_of["tenant"]) == ("Admin/Purge", DEFAULT_TENANT)
    eventually(lambda: b.load(keys) == 0, "b hears of it")
    eventually(lambda: sessions(redis) == 0, "nothing is told of its sessions")
    eventually(lambda: records(store) == 0, "nor is a record left")
    eventually(lambda: b.counter("tenants_purged") >= 1, "by the same order")
    eventually(lambda: not list_schemas(a.client) and not list_schemas(b.client), "no schema is left")
    # Nothing brings it back: a node that ends and begins again, one that was killed, one that is new
    a.daemon.stop()
    b.daemon.kill()
    a, b, c = join("a", **settings("a")), join("b", **settings("b")), join("c", **settings("c"))
    for each in (a, b, c):
        assert each.load(keys) == 0 and each.space.get_session(NAME) is None
        assert told(each) is None
    # and the tenant may begin anew; what a node saves before it has heard of the order goes by it, too
    again = c.space.keys(list(range(10_000, 10_000 + 64 * 2)))

    def has_begun_anew() -> bool:
        if c.load(again) < 2:
            with suppress(AssertionError, StoreError):
                c.save(again)
        return c.load(again) == 2

    eventually(has_begun_anew, "it is served again")


def test_a_node_that_was_away_hears_of_it_when_it_is_back(
    join: Callable[..., Member], tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"ssd_dir": tmp_path / "a", "ssd_bytes": 64 << 20, "ssd_slab_bytes": 4 << 20}
    a, b = join("a", **disk), join("b")
    keys = go_on(a, 4)
    a.daemon.stop()
    purge(b)
    again = join("a", **disk)
    eventually(lambda: again.counter("tenants_purged") >= 1, "it hears of what it had missed")
    eventually(lambda: again.load(keys) == 0, "and drops it")
    assert again.space.get_session(NAME) is None


@pytest.mark.parametrize("gone", ["registry", "store"])
def test_no_order_is_said_to_be_done_while_others_cannot_be_told(
    join: Callable[..., Member], redis: RedisServer, store: RedisServer, tmp_path: Path, gone: str
) -> None:
    """From the first order of an outage on; how many wait to be told is shown, after a restart too."""
    settings = {**disk(tmp_path / "a"), "remote_url": store.url, "remote_writes": "write-through"}
    a = join("a", **settings)
    keys = go_on(a, 4)
    eventually(lambda: records(store) >= 8, "all of it is in the store")
    server = redis if gone == "registry" else store

    def waiting(member: Member) -> int:
        return int(member.client.stats().gauges["remote_forgets_waiting"])

    server.stop()
    order = ["--run-dir", str(a.daemon.run_dir), "--timeout", "30", "purge", "--tenant", DEFAULT_TENANT]
    for _ in range(3):
        ended = forked.run(order, dict(os.environ))
        assert ended.returncode == 1 and b"not know it yet" in ended.stderr, (ended.stdout, ended.stderr)
    forgotten = a.space.forget(keys=keys)
    assert "not know it yet" in forgotten.not_durable
    eventually(lambda: waiting(a) > 0, "it is shown that the others do not know it")
    a.daemon.kill()
    again = join("a", **settings)
    eventually(lambda: waiting(again) > 0, "and after a restart still")
    server.start()
    eventually(lambda: waiting(again) == 0, "they are told")
    purge(again)
    assert again.load(keys) == 0


# ------------------------------------------------------------------ what was saved after a forget outlives a start


def disk(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "ssd_dir": folder,
        "ssd_bytes": 64 << 20,
        "ssd_slab_bytes": 4 << 20,
        "durable_within_ms": 100,
        **settings,
    }


def is_heeded(folder: Path, journal: str) -> bool:
    """Whether the index says that all of this journal was carried out. What was told to a daemon that runs is seen by
    a reader of its index like any other."""
    text = (folder / journal).read_text() if (folder / journal).exists() else ""
    first = json.loads(text.partition("\n")[0]) if text else {"journal": "", "position": 0}
    index = lmdb.open(str(folder / "index"), readonly=True, lock=False, max_dbs=8)
    with index, index.begin() as txn:
        key = format.heeded_key(CHANNELS[journal])
        value = txn.get(key, db=index.open_db(b"meta", txn=txn, create=False))
    if value is None:
        return not first["position"]
    found = format.decode_heeded(key, value)
    assert not isinstance(found, format.Defect), found
    return (found[1].hex(), found[2]) == (first["journal"], first["position"])


def ends(member: Member, how: str, folder: Path, journals: Sequence[str] = (PEERS_JOURNAL,)) -> None:
    for journal in journals:
        eventually(lambda name=journal: is_heeded(folder, name), f"{journal} was carried out")
    if how == "kill":
        member.daemon.kill()
    else:
        member.daemon.stop()


def stored(member: Member, chunks: int) -> None:
    eventually(lambda: member.counter("chunks_stored") >= chunks, f"{chunks} chunks are on SSD")
    eventually(lambda: not member.client.stats().ssd.to_forget, "what was forgotten has left the index")
    behind = lambda: member.client.stats().ssd.oldest_not_durable_ms  # noqa: E731
    eventually(lambda: not behind(), "all of it is in the index")


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("what", ["purge", "keys", "recall", "elsewhere"])
def test_what_is_saved_after_a_forget_outlives_every_start(
    join: Callable[..., Member], store: RedisServer, tmp_path: Path, what: str, how: str
) -> None:
    """Of one journal each: that of the fleet, and that of the REMOTE store."""
    folder = tmp_path / "a"
    settings = disk(folder, remote_url=store.url, remote_writes="write-through")
    a = join("a", **settings)
    other = join("b") if what == "elsewhere" else a
    keys = go_on(a, 4)
    stored(a, 4)
    match what:
        case "purge":
            purge(a)
        case "keys" | "elsewhere":
            assert not other.space.forget(keys=keys).not_durable
        case "recall":
            order = ["--run-dir", str(a.daemon.run_dir), "recall", "--maker", a.maker.hex()]
            assert forked.run(order, dict(os.environ)).returncode == 0
            a.maker = b"another engine".ljust(16)
    eventually(lambda: a.load(keys) == 0, "it is forgotten")
    a.save(keys)
    stored(a, 8)
    ends(a, how, folder, (PEERS_JOURNAL, REMOTE_JOURNAL))
    for _ in range(2):
        a = join("a", **settings)
        assert a.client.stats().counters.get("chunks_forgotten_elsewhere", 0) == 0
        # All that a start heeds stands in the inbox before the first request.
        assert a.space.match(keys).usable == 4 and a.counter("tenants_purged") == 0
        assert a.load(keys) == 4 and a.counter("remote_chunks_fetched") == 0
        ends(a, how, folder, (PEERS_JOURNAL, REMOTE_JOURNAL))
