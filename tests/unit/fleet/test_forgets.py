"""Forgets in a real Redis: who reads it knows all of them, whatever becomes of it; and nobody else can tell of any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.fleet.forgets import FleetForgets
from kvstore.fleet.secret import FleetSecret
from kvstore.tiers.remote import tombstones
from kvstore.tiers.remote.backend import News
from kvstore.tiers.remote.records import Description
from kvstore.tiers.remote.tombstones import EVERYTHING, Forgotten
from kvstore.types import ChunkKey, OpId

from ...fleet_tools import SECRET, RedisServer, needs_redis, redis_server

pytestmark = needs_redis
FLEET = FleetSecret(SECRET.encode())
SALT = b"s" * 32
DIGEST = FLEET.namespace(SALT)
MAKER = b"m" * 16


class Member:
    """A node as far as its forgets are concerned."""

    def __init__(self, path: Path, secret: FleetSecret = FLEET, **options: Any) -> None:
        self.news: list[Forgotten] = []
        self.done: list[ev.ChunksForgotten] = []
        self.count = 0
        self.forgets = FleetForgets(
            secret, str(path), news=self._heard, done=self.done.append, within_s=60.0, **options
        )
        self._ops = iter(range(1, 100))

    def _heard(self, news: News, asked_at: float) -> None:
        self.news += news.forgotten
        self.count = news.up_to

    def forget(self, *keys: bytes, maker: bytes = b"") -> None:
        forgotten = [(SALT, ChunkKey(key), b"") for key in keys] + [(b"", ChunkKey(b""), maker)] * bool(maker)
        self.forgets.submit(ev.ForgetChunks(OpId(next(self._ops)), "peers", tuple(forgotten)))

    def heard(self) -> list[Forgotten]:
        news, self.news = self.news, []
        return news

    def refuses(self, key: bytes, generation: int, maker: bytes = MAKER) -> bool:
        what = Description(DIGEST, ChunkKey(key), 0, 1, 64, False, (maker,), 8, 0, generation)
        return bool(self.forgets.refuses(what))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Any]:
    with server.client() as client:
        client.flushall()
        yield client


def key(name: bytes) -> Forgotten:
    return DIGEST, ChunkKey(name), b""


def test_the_others_hear_once_and_the_one_who_told_does_not(redis: Any, tmp_path: Path) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    assert b.refuses(b"k", 9), "nothing of a peer is served before its forgets were read"
    for each in (a, b):
        each.forgets.round(redis)
    a.forget(b"k", b"l", maker=b"n" * 16)
    a.forgets.round(redis)
    assert a.done == [ev.ChunksForgotten(OpId(1), "")] and a.heard() == []
    b.forgets.round(redis)
    assert sorted(b.heard()) == sorted([key(b"k"), key(b"l"), (b"", ChunkKey(b""), b"n" * 16)])
    b.forgets.round(redis)
    assert b.heard() == [] and b.count == a.count == 1
    assert b.refuses(b"k", 0) and not b.refuses(b"k", 1) and not b.refuses(b"other", 0)
    assert b.refuses(b"other", 0, maker=b"n" * 16)


def test_two_that_tell_at_once_miss_nothing_of_each_other(redis: Any, tmp_path: Path) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    for each in (a, b):
        each.forgets.round(redis)
    a.forget(b"a")
    a.forgets.round(redis)
    b.forgets.book.postpone([key(b"b")])
    b.forgets._tombstones.add(redis, [key(b"b")])  # without having read what a told
    b.forgets.book.told([key(b"b")])
    b.forgets.round(redis)
    assert b.heard() == [key(b"a")] and b.count == 2
    a.forgets.round(redis)
    assert a.heard() == [key(b"b")]


def test_what_could_not_be_told_is_told_after_a_restart(redis: Any, tmp_path: Path) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    b.forgets.round(redis)
    a.forget(b"k")
    a.forgets.postpone("Redis is away")
    assert a.done == [ev.ChunksForgotten(OpId(1), "Redis is away")]
    assert Member(tmp_path / "a").forgets.book.take_news()[0] == (key(b"k"),), (
        "it may not have left the index"
    )
    again = Member(tmp_path / "a")
    again.forgets.round(redis)
    b.forgets.round(redis)
    assert b.heard() == [key(b"k")]


@pytest.mark.parametrize("becomes", ["wiped", "an older copy"])
def test_a_redis_that_lost_them_is_told_again(redis: Any, tmp_path: Path, becomes: str) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    a.forget(b"first")
    a.forgets.round(redis)
    copy = {name: redis.dump(name) for name in list(redis.scan_iter())}
    a.forget(b"k")
    a.forgets.round(redis)
    redis.flushall()
    for name, value in copy.items() if becomes == "an older copy" else ():
        redis.restore(name, 0, value)
    b.forgets.round(redis)
    assert key(b"k") not in b.heard()
    a.forgets.round(redis)
    b.forgets.round(redis)
    assert key(b"k") in b.heard() and b.refuses(b"k", 2)


def test_who_was_away_for_longer_than_they_are_kept_takes_all_for_forgotten(
    redis: Any, tmp_path: Path
) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    a.forget(b"first")
    for each in (a, b):
        each.forgets.round(redis)
    b.heard()
    a.forget(b"k")
    a.forgets.round(redis)
    a.forgets._tombstones.tidy(redis, -10.0)
    assert not redis.zcard(f"kvs:{{{FLEET.prefix}}}:forgotten")
    a.forget(b"l")
    a.forgets.round(redis)
    b.forgets.round(redis)
    assert b.heard() == [EVERYTHING, key(b"l")] and b.count == 3
    assert a.heard() == []


def test_nobody_else_can_tell_of_a_forget(redis: Any, tmp_path: Path) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    a.forget(b"k")
    a.forgets.round(redis)
    name = f"kvs:{{{FLEET.prefix}}}:forgotten"
    redis.zadd(name, {tombstones.encode(key(b"forged")): 1, tombstones.encode(key(b"x")) + b"t" * 16: 1})
    b.forgets.round(redis)
    assert b.heard() == [key(b"k")]
    assert SALT not in b"".join(redis.zrange(name, 0, -1)), "the namespace's salt is shown"


def test_what_a_new_node_forgets_on_an_older_copy_holds_against_what_was_computed_before(
    redis: Any, tmp_path: Path
) -> None:
    """It stands there at a count that others, and what they have written, have passed."""
    a = Member(tmp_path / "a")
    copy = {name: redis.dump(name) for name in list(redis.scan_iter())}
    for number in range(5):
        a.forget(b"%d" % number)
        a.forgets.round(redis)
    redis.flushall()
    for name, value in copy.items():
        redis.restore(name, 0, value)
    new = Member(tmp_path / "new")
    new.forget(b"k")
    new.forgets.round(redis)
    a.forgets.round(redis)
    assert a.heard() == [key(b"k")] and a.count > 5
    assert a.refuses(b"k", 5), "a peer that has not heard of it would bring it back"
    new.forgets.round(redis)
    assert new.refuses(b"k", 5)


def test_a_node_whose_clock_is_far_ahead_drops_no_forgets(
    redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Member(tmp_path / "a")
    a.forget(b"k")
    a.forgets.round(redis)
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 40 * 24 * 3_600)
    a.forgets._tidied_at -= 3_600
    a.forgets.round(redis)
    assert redis.zcard(f"kvs:{{{FLEET.prefix}}}:forgotten") == 1 and a.refuses(b"k", 0)


def test_the_journal_is_not_written_to_a_directory_that_is_another_daemons(
    redis: Any, tmp_path: Path
) -> None:
    a = Member(tmp_path / "ours")
    a.forget(b"k")
    a.forgets.round(redis)
    assert (tmp_path / "ours").exists()
    b = Member(tmp_path / "theirs", is_ours=lambda: False)
    b.forget(b"l")
    b.forgets.round(redis)
    assert b.heard() == [key(b"k")] and b.refuses(b"l", 1), "it heeds what it hears, and tells"
    assert not (tmp_path / "theirs").exists()


def test_what_is_forgotten_is_refused_before_the_registry_answers(redis: Any, tmp_path: Path) -> None:
    """A peer that has not heard of it may be asked meanwhile; nobody drops what comes by that later."""
    a = Member(tmp_path / "a")
    a.forgets.round(redis)
    a.forget(b"k")
    a.forget(b"k", maker=MAKER)
    assert a.refuses(b"k", 99) and a.refuses(b"other", 99)
    a.forgets.postpone("it is away")
    assert a.refuses(b"k", 99) and a.refuses(b"other", 99)
    a.forgets.round(redis)
    assert a.refuses(b"k", 0) and not a.refuses(b"k", 99), "what is computed again is served"
    assert not a.refuses(b"other", 99)


def test_a_journal_that_cannot_be_written_is_told_and_written_when_it_can(redis: Any, tmp_path: Path) -> None:
    """A full disk, and Redis is away: nothing but this process knows of the forget."""
    journal = tmp_path / "full" / "journal"
    a, b = Member(journal), Member(tmp_path / "b")
    b.forgets.round(redis)
    a.forget(b"k")
    a.forgets.postpone("Redis is away")
    assert "Redis is away" in a.done[0].why and "cannot be written" in a.done[0].why
    assert "a restart loses it" in a.done[0].why
    journal.parent.mkdir()
    a.forgets.postpone("Redis is away")
    again = Member(journal)
    again.forgets.round(redis)
    b.forgets.round(redis)
    assert b.heard() == [key(b"k")]


@pytest.mark.parametrize("what", ["count", "floor", "times"])
@pytest.mark.parametrize(
    "value", [b"", b"x", b"1", b"-3:h", b"12\xb2:h", b"9" * 30 + b":h", b"7:\xff", b"\xb2:"]
)
def test_numbers_that_are_spoilt_are_made_anew(redis: Any, tmp_path: Path, what: str, value: bytes) -> None:
    a, b = Member(tmp_path / "a"), Member(tmp_path / "b")
    a.forget(b"k")
    for each in (a, b):
        each.forgets.round(redis)
    name = f"kvs:{{{FLEET.prefix}}}:{what}"
    if what == "times":
        redis.hset(name, value, value)
        redis.hset(name, "1", value)
    else:
        redis.set(name, value)
    for each in (b, a, b):
        each.forgets.round(redis)
    a.forget(b"l")
    late = Member(tmp_path / "late")
    for each in (a, b, late, a, b, late):
        each.forgets._tombstones.tidy(redis, 3_600)
        each.forgets.round(redis)
    for each in (a, b, late):
        assert each.refuses(b"k", 0) and each.refuses(b"l", 0)
        assert each.forgets.book.seen == a.forgets.book.seen
