"""Sessions that go on at another node, by daemons and a real redis-server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Hint, SessionEntry
from kvstore.errors import StoreError
from kvstore.types import ChunkKey, HintResult

from ..fleet_tools import BOUND_S, RedisServer, eventually, needs_redis
from .test_fleet import SPEC, Member, join, kvctl, redis

__all__ = ["join", "redis"]
pytestmark = needs_redis
NAME = "a conversation"


def keys_of(member: Member, chunks: int) -> list[ChunkKey]:
    return member.space.keys(np.arange(64 * chunks))


def go_on(member: Member, chunks: int, *, name: str = NAME) -> list[ChunkKey]:
    """A turn of the conversation at this node, which has so many chunks then."""
    keys = keys_of(member, chunks)
    member.turn(64 * chunks, chunks=chunks)
    session = member.space.get_session(name)
    kept = len(session.entries) if session is not None else 0
    append = [SessionEntry(key, 64 * at, 64) for at, key in enumerate(keys)][kept:]
    member.space.update_session(
        name, expected_version=session.version if session is not None else 0, keep=kept, append=append
    )
    return keys


def told(member: Member, name: str = NAME) -> tuple[str, list[ChunkKey]] | None:
    """Which node told of it last, as this one knows, and what."""
    found = member.space.find_session(name)
    if found is None or found.elsewhere is None:
        return None
    return found.elsewhere.node, list(found.elsewhere.keys)


def hint(member: Member, name: str = NAME) -> HintResult:
    accepted = member.space.publish_queue([Hint(b"job", 0, session=name.encode())])
    return accepted.results[0]


def saved(member: Member, keys: list[ChunkKey]) -> bool:
    """The last of these, behind the others; a client that lost its daemon for a while tries again."""
    with suppress(AssertionError, StoreError):
        member.save(keys, len(keys) - 1)
    return in_dram(member, keys) == len(keys)


def in_dram(member: Member, keys: list[ChunkKey]) -> int:
    return sum(outcome.name == "HIT" for outcome in member.space.match(keys).outcomes)


@pytest.mark.parametrize("source", ["peer", "remote"])
def test_a_hint_for_a_session_brings_what_another_node_saved(
    join: Callable[..., Member], tmp_path: Path, source: str
) -> None:
    """The node never saw the session; nothing but its name is said there."""
    settings: dict[str, Any] = {}
    if source == "remote":
        (tmp_path / "store").mkdir()
        settings = {"remote_url": f"file://{tmp_path / 'store'}", "remote_writes": "write-through"}
    a, b = join("a", **settings), join("b", **settings)
    keys = go_on(a, 6)
    eventually(lambda: told(b) == ("a", keys), "b hears of the session")
    if source == "remote":
        eventually(lambda: a.counter("remote_chunks_stored") == 6, "a has written it")
        a.daemon.kill()
    assert b.space.get_session(NAME) is None, "what another node told is no session here"
    assert hint(b) is not HintResult.REJECTED
    eventually(lambda: in_dram(b, keys) == 6, "the hint brings all of it")
    assert b.counter("remote_chunks_wanted_ahead") >= 6
    longer = go_on(b, 8)
    assert b.computed == 2
    eventually(lambda: b.counter("sessions_told") >= 1, "b tells of it")
    c = join("c", **settings)
    eventually(lambda: told(c) == ("b", longer), "who went on with it last is known")


def test_who_slept_or_began_anew_replaces_nothing(join: Callable[..., Member], tmp_path: Path) -> None:
    """A node that was stopped in the middle of telling, and one that restarts with what was on its SSD."""
    disk: dict[str, Any] = {"ssd_dir": tmp_path / "a", "ssd_bytes": 64 << 20, "ssd_slab_bytes": 4 << 20}
    a, b = join("a", **disk), join("b")
    go_on(a, 4)
    eventually(lambda: (told(b) or ("", []))[0] == "a", "b hears of the session")
    a.daemon.process.send_signal(signal.SIGSTOP)
    try:
        assert hint(b) is not HintResult.REJECTED
        longer = go_on(b, 7)
        c = join("c")
        eventually(lambda: told(c) == ("b", longer), "c hears of it by b")
    finally:
        a.daemon.process.send_signal(signal.SIGCONT)
    # What a does now it does without having heard: another turn of its own, after the four chunks that it knows
    other = a.space.keys(np.concatenate([np.arange(64 * 4), np.arange(10_000, 10_000 + 64)]))
    eventually(lambda: in_dram(a, other[:4]) == 4, "its client notices that it is back")
    eventually(lambda: saved(a, other), "it saves")
    session = eventually(lambda: a.space.get_session(NAME))
    a.space.update_session(
        NAME, expected_version=session.version, keep=4, append=[SessionEntry(other[4], 256, 64)]
    )
    eventually(lambda: a.counter("sessions_newer_elsewhere") >= 1, "a is told that it is not the newest")
    # An answer that is late is none: it is asked again
    assert eventually(lambda: told(c)) == ("b", longer), "who slept has replaced what is newer"
    assert eventually(lambda: told(a)) == ("b", longer), "and knows the newer one now"
    # What it does from here on is newer
    a.space.update_session(NAME, expected_version=session.version + 1, keep=5, append=[])
    eventually(lambda: told(b) == ("a", other), "what a does after it has heard is told")


def test_a_restarted_node_learns_before_it_tells(join: Callable[..., Member], tmp_path: Path) -> None:
    disk: dict[str, Any] = {"ssd_dir": tmp_path / "a", "ssd_bytes": 64 << 20, "ssd_slab_bytes": 4 << 20}
    a, b = join("a", **disk), join("b")
    go_on(a, 4)
    eventually(lambda: (told(b) or ("", []))[0] == "a", "b hears of the session")
    a.daemon.stop()
    longer = go_on(b, 7)
    again = join("a", **disk)
    eventually(lambda: told(again) == ("b", longer), "it is told what came meanwhile")
    session = again.space.get_session(NAME)
    assert session is not None and len(session.entries) == 4
    assert hint(again) is not HintResult.REJECTED
    eventually(lambda: in_dram(again, longer) == 7, "what b went on with is brought, too")


def test_derived_sessions_stay_and_what_was_told_of_them_goes(join: Callable[..., Member]) -> None:
    a, b = join("a"), join("b")
    keys = go_on(a, 6)
    eventually(lambda: told(b) == ("a", keys), "b hears of the session")
    version = a.space.get_session(NAME).version  # type: ignore[union-attr]
    a.space.truncate(NAME, expected_version=version, first_token=64, token_count=64)
    eventually(lambda: told(b) in (None, ("a", [])), "what is the node's own is told no more")
    assert b.space.publish_queue([Hint(b"other", 0, session=b"nobody's")]).results


def test_what_is_forgotten_is_told_no_more(join: Callable[..., Member]) -> None:
    """Also by the node that had told of it first, and slept."""
    a, b = join("a"), join("b")
    keys = go_on(a, 4)
    eventually(lambda: told(b) == ("a", keys), "b hears of the session")
    longer = go_on(b, 6)
    eventually(lambda: told(a) == ("b", longer), "a hears of it by b")
    a.space.forget(NAME)
    eventually(lambda: told(b) in (None, ("a", [])), "b hears that it is gone")
    c = join("c")
    assert told(c) in (None, ("a", []))


def test_tenants_and_epochs_hear_nothing_of_each_other(join: Callable[..., Member]) -> None:
    a, b = join("a"), join("b", tenants=f"{os.getuid()}=bob")
    c = join("c")
    go_on(a, 4)
    eventually(lambda: told(c) is not None, "c, of a's tenant, hears of it")
    assert told(b) is None
    newer = c.client.open(replace(SPEC, weights_epoch=1))
    assert newer.find_session(NAME) is None


def test_without_redis_prefixes_hit_and_nobody_waits(join: Callable[..., Member], redis: RedisServer) -> None:
    """Stopped as well as gone; when it is back, what is told goes on where it was."""
    a, b = join("a"), join("b")
    go_on(a, 4)
    eventually(lambda: told(b) is not None, "b hears of the session")
    eventually(lambda: b.knows(keys_of(b, 4)), "b learns what a holds")
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for turn in range(20):
            go_on(a, 5, name=f"other {turn}")
            assert b.space.find_session(f"unknown {turn}") is None
        assert time.monotonic() - began < BOUND_S
        assert b.load(keys_of(b, 4)) == 4, "prefixes are found by their keys"
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    redis.stop()
    go_on(a, 6)
    redis.start()
    eventually(lambda: told(b) == ("a", keys_of(a, 6)), "it is told when Redis is back")


def test_routes_by_the_name_of_a_session(join: Callable[..., Member]) -> None:
    a, b = join("a"), join("b")
    keys = go_on(a, 4)
    eventually(lambda: told(b) == ("a", keys), "b hears of the session")
    eventually(lambda: b.knows(keys), "b learns what a holds")
    shown = kvctl(b, "route", "--session", NAME)
    assert {row["name"]: row["prefix_chunks"] for row in shown["nodes"]} == {"a": 4, "b": 0}
