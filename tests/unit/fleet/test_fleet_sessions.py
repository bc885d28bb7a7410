"""What nodes tell of their sessions, in a real Redis: only who has seen what is there replaces it, and nobody but a
node of the fleet writes any of it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.fleet.registry import connect
from kvstore.fleet.secret import FleetSecret
from kvstore.fleet.sessions import FleetSessions
from kvstore.types import ChunkKey, OpId

from ...fleet_tools import BOUND_S, SECRET, RedisServer, needs_redis, redis_server

pytestmark = needs_redis
FLEET = FleetSecret(SECRET.encode())
DIGEST, MARK, NAME = b"d" * 32, b"t" * 16, b"a conversation"
KEYS = tuple(ChunkKey(b"%d" % number) for number in range(4))


class Member:
    """A node as far as its sessions are concerned."""

    def __init__(
        self, server: RedisServer, name: str, boot: bytes = b"1", secret: FleetSecret = FLEET, ttl_s: int = 60
    ) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.sessions = FleetSessions(
            server.url, secret, name, boot, ttl_s=ttl_s, connect=connect, done=self.answers.put
        )
        self.sessions.start()
        self.seen: ev.SharedManifest | None = None

    def tell(
        self, version: int, keys: tuple[ChunkKey, ...] = KEYS, *, name: bytes = NAME, ends: bool = False
    ) -> ev.ToldResult:
        seen, count = (self.seen.head, self.seen.count) if self.seen is not None else (b"", 0)
        told = ev.SessionTold(DIGEST, MARK, name, version, keys, (64,) * len(keys), seen, count, ends)
        self.sessions.submit(ev.ShareSessions(OpId(1), "peers", (told,)))
        answer = self.answers.get(timeout=BOUND_S)
        assert not answer.failed, answer
        self.seen = answer.results[0].there
        result: ev.ToldResult = answer.results[0]
        return result

    def look(self, *names: bytes, digest: bytes = DIGEST) -> list[ev.SharedManifest | None]:
        asked = tuple((digest, MARK, name) for name in names or (NAME,))
        self.sessions.submit(ev.LookUpSessions(OpId(2), "peers", asked))
        answer = self.answers.get(timeout=BOUND_S)
        assert not answer.failed, answer
        return list(answer.found)


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


@pytest.fixture
def member(server: RedisServer, redis: Any) -> Iterator[Any]:
    made: list[Member] = []

    def make(name: str, **options: Any) -> Member:
        made.append(Member(server, name, **options))
        return made[-1]

    yield make
    for each in made:
        each.sessions.close(BOUND_S)


def test_who_has_seen_what_is_there_replaces_it(member: Any) -> None:
    a, b = member("a"), member("b")
    assert b.look() == [None]
    assert a.tell(1, KEYS[:2]).done
    [there] = b.look()
    assert (there.node, there.version, there.keys, there.token_counts, there.ours) == (
        *("a", 1, KEYS[:2], (64, 64)),
        False,
    )
    late = b.tell(1)
    assert not late.done and late.there.node == "a", "who has seen nothing replaces nothing"
    assert b.tell(2).done, "who was shown it does"
    asleep = a.tell(3, KEYS[:3])
    assert not asleep.done and asleep.there.keys == KEYS
    [there] = a.look()
    assert (there.node, there.version) == ("b", 2)


def test_another_start_of_a_node_has_seen_nothing(member: Any) -> None:
    a = member("a")
    assert a.tell(1).done and a.tell(2).done and a.seen.ours
    again = member("a", boot=b"2")
    assert not again.tell(2, KEYS[:1]).done and not again.seen.ours
    assert again.tell(3, KEYS[:1]).done
    assert not a.tell(3).done, "nor does the start before it replace what came after it"


@pytest.mark.parametrize("becomes", ["wiped", "older"])
def test_a_redis_that_went_back_in_time(member: Any, redis: Any, becomes: str) -> None:
    a, b = member("a"), member("b")
    a.tell(1, KEYS[:1])
    b.look()
    copy = {name: redis.dump(name) for name in list(redis.scan_iter())}
    b.tell(1)
    assert b.tell(2, KEYS[:2]).done and b.tell(3, KEYS[:3]).done
    redis.flushall()
    for name, value in copy.items() if becomes == "older" else ():
        redis.restore(name, 0, value)
    assert b.tell(4).done, "who has seen what is newer replaces the older copy"
    assert not a.tell(2, KEYS[:2]).done and a.seen.keys == KEYS


def test_what_no_node_wrote_is_not_believed_and_replaced(member: Any, redis: Any) -> None:
    a, b = member("a"), member("b")
    a.tell(1)
    a.tell(1, name=b"another")
    one, other = (a.sessions.name_of(DIGEST, MARK, name) for name in (NAME, b"another"))
    good = redis.get(one)
    for spoilt in (b"", b"nonsense", good[:-1], good[:40] + b"X" + good[41:], redis.get(other)):
        redis.set(one, spoilt)
        assert b.look() == [None]
        a.seen = None
        assert a.tell(2).done, spoilt
    redis.delete(one)
    redis.lpush(one, "a list")
    assert b.look() == [None] and a.tell(3).done
    assert b.look()[0].version == 3


def test_fleets_and_namespaces_are_apart_and_names_are_not_shown(member: Any, redis: Any) -> None:
    a = member("a")
    stranger = member("b", secret=FleetSecret(b"another secret of another fleet"))
    a.tell(1)
    assert stranger.look() == [None]
    assert a.look(digest=b"e" * 32) == [None]
    stranger.tell(1, KEYS[:1])
    assert a.look()[0].keys == KEYS
    for name in redis.scan_iter():
        assert NAME not in name and NAME not in redis.get(name)
        assert 0 < redis.pttl(name) <= 60_000


def test_what_ends_goes_only_if_it_is_what_was_seen(member: Any) -> None:
    a, b = member("a"), member("b")
    a.tell(1)
    assert not b.tell(1, ends=True).done
    assert a.tell(2, ends=True).done
    assert b.look() == [None]


def test_a_redis_that_is_away_is_an_answer(server: RedisServer, redis: Any) -> None:
    class Gone:
        url = "redis://127.0.0.1:1/0"

    asked: Any = Gone()
    a = Member(asked, "a")
    a.sessions.submit(ev.LookUpSessions(OpId(2), "peers", ((DIGEST, MARK, NAME),)))
    assert a.answers.get(timeout=BOUND_S).failed
    a.sessions.close(BOUND_S)


def test_a_purge_that_the_registry_could_not_hear_is_carried_out_before_anything_is_told(
    member: Any, redis: Any
) -> None:
    a, b = member("a"), member("b")
    assert a.tell(1).done
    a.sessions._refused = lambda: "it is away"
    a.sessions.submit(ev.ForgetSessions(OpId(3), "peers", MARK))
    a.sessions.submit(ev.LookUpSessions(OpId(2), "peers", ((DIGEST, MARK, NAME),)))
    assert a.answers.get(timeout=BOUND_S).failed == "it is away"
    assert b.look() != [None]
    a.sessions._refused = str
    a.sessions.submit(ev.LookUpSessions(OpId(4), "peers", ((DIGEST, MARK, NAME),)))
    assert a.answers.get(timeout=BOUND_S) == ev.PurgedBeyond(OpId(3))
    assert a.answers.get(timeout=BOUND_S) == ev.SessionsLookedUp(OpId(4), (None,))
    a.tell(1, name=b"another, since then")
    assert b.look() == [None]
    assert b.look(b"another, since then") != [None]
    a.look()
    assert b.look(b"another, since then") != [None], "it is carried out again and again"
