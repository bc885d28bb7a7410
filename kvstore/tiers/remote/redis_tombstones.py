"""Tombstones (`tombstones.py`) in Redis or Valkey, single or cluster: of a REMOTE store, and of a fleet.

    <name>:count        "<count>:<head>": how many forgets there were; raised, in one script, with
    <name>:forgotten    a sorted set of them, by the count at which each came, and
    <name>:times        "<unix s by the server>:<head>" of each count, so that old ones can go; and
    <name>:floor        the highest count whose forgets have gone: who knew less has missed something

Where nodes share a secret, each entry ends with a tag by it, and what has none is passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.tiers.remote import tombstones
from kvstore.tiers.remote.backend import Book, StoreProblem
from kvstore.tiers.remote.tombstones import EVERYTHING, Forgotten

FORGET_SCRIPT = """
local said = redis.call('GET', KEYS[1])
local count = tonumber(said and string.match(said, '^(%d+):') or '0') + 1
if count > 9e15 then count = 1 end
if count < tonumber(ARGV[1]) then count = tonumber(ARGV[1]) end
redis.call('SET', KEYS[1], string.format('%d:%s', count, ARGV[2]))
for i = 3, #ARGV do redis.call('ZADD', KEYS[2], count, ARGV[i]) end
local now = redis.call('TIME')
redis.call('HSET', KEYS[3], string.format('%d', count), now[1] .. ':' .. ARGV[2])
return count
"""
"""A count that is spoilt begins anew, above all that the caller has seen.

ARGV: the least that the count is to be, its head, then the entries. Returns the count."""
TIME_SCRIPT = "return redis.call('TIME')"
"""Of the server that has the key, in a cluster too."""
COUNT_DIGITS_MAX = 16
"""A double of Lua counts so far."""
ENTRIES_PER_CALL = 4_096


def _parsed(said: bytes | None) -> tuple[int, str]:
    """Of "<number>:<head>"; (0, "") for what is no such thing: a store that lost it is told again what it was."""
    number, _, head = (said or b"").partition(b":")
    if not number.isdigit() or len(number) > COUNT_DIGITS_MAX or not head.isascii():
        return 0, ""
    return int(number), head.decode("ascii")


class RedisTombstones:
    """Calls raise what the client raises, and StoreProblem."""

    def __init__(
        self,
        name: Callable[[str], str],
        book: Book,
        *,
        tag: Callable[[bytes], bytes] = lambda entry: b"",
        is_tag: Callable[[bytes, bytes], bool] = lambda entry, tag: True,
        tag_bytes: int = 0,
    ) -> None:
        self._name = name
        self._book = book
        self._tag = tag
        self._is_tag = is_tag
        self._tag_bytes = tag_bytes

    @property
    def count_name(self) -> str:
        return self._name("count")

    def read(self, client: Any) -> int:
        """The count, once this node knows all that belongs to it."""
        self.catch_up(client, client.get(self.count_name))
        return self._book.seen[0]

    def add(self, client: Any, forgotten: Sequence[Forgotten]) -> None:
        """Tell it."""
        names = [self._name(what) for what in ("count", "forgotten", "times")]
        for start in range(0, max(1, len(forgotten)), ENTRIES_PER_CALL):
            part = forgotten[start : start + ENTRIES_PER_CALL]
            least, head = self._book.seen[0] + 1, secrets.token_hex(8)
            entries = [entry + self._tag(entry) for entry in map(tombstones.encode, part)]
            count = int(client.eval(FORGET_SCRIPT, 3, *names, least, head, *entries))
            if count > least:  # somebody else came first: their forgets are read before ours are known
                self._learn_between(client, least - 1, count)
            self._book.learn([(one, count) for one in part], count, head, own=True)

    def _learn_between(self, client: Any, known: int, count: int) -> None:
        rows = client.zrangebyscore(self._name("forgotten"), known + 1, count - 1, withscores=True)
        self._book.learn(self._decoded(rows), known, self._book.seen[1])

    def _decoded(self, rows: Sequence[tuple[bytes, float]]) -> list[tuple[Forgotten, int]]:
        found = []
        for row, score in rows:
            entry = row[: len(row) - self._tag_bytes]
            forgotten = tombstones.decode(entry)
            if forgotten is not None and self._is_tag(entry, row[len(entry) :]):
                found.append((forgotten, int(score)))
        return found

    def catch_up(self, client: Any, said: bytes | None) -> None:
        """Read the forgets that this node does not know; `said`: what stands in `count_name`. Raises StoreProblem if
        the store is not the one that the node knew, after it was told what it lacks."""
        count, head = _parsed(said)
        known, known_head = self._book.seen
        if (count, head) == (known, known_head):
            return
        there = known_head
        if count > known > 0:
            time_and_head = client.hget(self._name("times"), str(known)) or b":"
            there = time_and_head.partition(b":")[2].decode("ascii", "replace")
        floor = self._floor(client, count)
        has_missed = known < floor
        is_other = count <= known or (there != known_head and not has_missed)
        first = 0 if is_other else known + 1
        rows = client.zrangebyscore(self._name("forgotten"), first, "+inf", withscores=True)
        entries = self._decoded(rows)
        if has_missed:
            entries.insert(0, (EVERYTHING, floor))
        self._book.learn(entries, count, head, is_other=is_other)
        if is_other:
            # Also what it knew and this node did not: it stands at a count that records and peers may have passed.
            self.add(client, self._book.everything())
            raise StoreProblem(
                f"the store was wiped, or is an older copy: it has {count} forgets, this node knew {known}; told again"
            )

    def _floor(self, client: Any, count: int) -> int:
        """Whoever knows less has missed something. One that is spoilt may have been any: the count, then."""
        said = client.get(self._name("floor")) or b"0"
        if said.isdigit() and len(said) <= COUNT_DIGITS_MAX:
            return int(said)
        client.set(self._name("floor"), count)
        return count

    def tidy(self, client: Any, ttl_s: float) -> None:
        """What was forgotten so long ago, by the server's clock, goes; who has not read it by then takes everything for
        forgotten."""
        now = int(client.eval(TIME_SCRIPT, 1, self._name("times"))[0])
        times = client.hgetall(self._name("times"))
        old = [_parsed(count + b":")[0] for count, at in times.items() if 0 < _parsed(at)[0] < now - ttl_s]
        if not old:
            return
        client.set(self._name("floor"), max(old))
        client.zremrangebyscore(self._name("forgotten"), "-inf", max(old))
        client.hdel(self._name("times"), *old)
        with self._book.lock:
            self._book.tombstones.forget_older(max(old))
