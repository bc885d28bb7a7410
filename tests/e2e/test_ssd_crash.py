"""kill -9 of the daemon in mid-save and mid-demotion, again and again on one directory, under a worker that goes on.

The oracle (all in the worker's process, which lives through every round):

    durable   acknowledged by Commit(wait=DURABLE), or seen to be there after a crash: is there, for ever
    visible   acknowledged: is there if that was more than durable_within_ms before the kill
    maybe     sent, not acknowledged: there or not, never anything else
    gone      found to be a miss after a crash: stays one

Whatever is served has the bytes of its key.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.client import Client, Namespace, SessionEntry
from kvstore.errors import Conflict, StoreError
from kvstore.types import ChunkKey, GrantResult, Outcome, Reason, Wait

from .ssd_tools import (
    BOUND_S,
    SMALL_SSD,
    SPEC,
    Weather,
    check_bytes,
    client_of,
    content,
    eventually,
    hits,
    in_background,
    in_state,
    keys_of,
    look,
    ssd_of,
)

ROUNDS = int(os.environ.get("ATTNSTORE_CRASH_ROUNDS", "5"))
DURABLE_WITHIN_S = 0.8
REMEMBERED = 512
CHAIN = 16
"""Chunks of one conversation; each writer begins a new one when it is full."""
MISSES = (Reason.NEVER_SEEN, Reason.LOST, Reason.EVICTED, Reason.INCOMPLETE)


@dataclass
class Conversation:
    name: str
    keys: list[ChunkKey]
    version: int = 0
    acknowledged: list[tuple[float, int]] = field(default_factory=list)
    """(when, entries) of each update."""
    sent: int = 0
    """Entries of the longest update that was ever sent."""


@dataclass
class Oracle:
    lock: threading.Lock = field(default_factory=threading.Lock)
    durable: set[ChunkKey] = field(default_factory=set)
    visible: dict[ChunkKey, float] = field(default_factory=dict)
    """Monotonic time of the acknowledgement."""
    maybe: set[ChunkKey] = field(default_factory=set)
    gone: set[ChunkKey] = field(default_factory=set)
    conversations: list[Conversation] = field(default_factory=list)
    durable_commits: int = 0
    reads: int = 0


class Writer:
    """Saves conversations chunk by chunk and notes what it was told. A lost daemon costs it what it was doing.

    Writer 0 waits for no disk, so that whatever hangs, there is more to be stored; the other does now and then."""

    def __init__(self, space: Namespace, oracle: Oracle, number: int) -> None:
        self.space = space
        self.oracle = oracle
        self.number = number
        self.random = random.Random(number)
        self.chains = 0
        self.saved = 0
        self._begin()

    def _begin(self) -> None:
        self.chains += 1
        chain = self.number << 20 | self.chains
        self.talk = Conversation(f"talk {chain}", keys_of(self.space, CHAIN, chain))
        self.at = 0
        with self.oracle.lock:
            self.oracle.conversations.append(self.talk)

    def step(self) -> None:
        count = self.random.randint(1, 4)
        part = self.talk.keys[self.at : self.at + count]
        if not part:
            self._begin()
            return
        parent = self.talk.keys[self.at - 1] if self.at else ChunkKey(b"")
        if self._save(
            part, parent, Wait.DURABLE if self.number and self.random.random() < 0.5 else Wait.VISIBLE
        ):
            self.at += len(part)
            self.saved += len(part)
            self._name(self.at)
        elif not self.space.client.connected:
            self._begin()  # what this conversation had in DRAM alone is gone
            time.sleep(0.01)

    def _save(self, part: list[ChunkKey], parent: ChunkKey, wait: Wait) -> bool:
        with self.space.write(part, parent=parent, timeout_s=2 * BOUND_S) as batch:
            known = (GrantResult.GRANTED, GrantResult.ALREADY)
            if not all(result in known for result in batch.results):
                return False
            granted = [part[index] for index in batch.granted]
            with self.oracle.lock:
                self.oracle.maybe.update(key for key in granted if key not in self.oracle.visible)
            for index in batch.granted:
                batch.buffer(index)[:] = content(part[index])
            if not granted:
                return True
            outcome = batch.commit(wait=wait)
        if not outcome.ok:
            return False
        with self.oracle.lock:
            now = time.monotonic()
            for key in granted:
                self.oracle.maybe.discard(key)
                self.oracle.visible[key] = now
            if wait is Wait.DURABLE:
                self.oracle.durable.update(granted)
                self.oracle.durable_commits += 1
        return True

    def _name(self, count: int) -> None:
        """The session follows its chunks."""
        talk = self.talk
        tokens = self.space.spec.chunk_tokens
        have = talk.acknowledged[-1][1] if talk.acknowledged else 0
        append = [SessionEntry(talk.keys[n], n * tokens, tokens) for n in range(have, count)]
        talk.sent = max(talk.sent, count)
        try:
            info = self.space.update_session(
                talk.name, expected_version=talk.version, keep=have, append=append, timeout_s=1.0
            )
        except Conflict:
            raise
        except StoreError:
            self._begin()
            return
        assert info.version > talk.version, "a version came back"
        talk.version = info.version
        talk.acknowledged.append((time.monotonic(), count))


def reading(space: Namespace, oracle: Oracle) -> Callable[[], None]:
    """Reads old chunks, so that promotions and demotions go on; every byte that comes is checked."""
    choice = random.Random(99)

    def step() -> None:
        with oracle.lock:
            known = sorted(oracle.visible) if oracle.visible else []
        if not known:
            time.sleep(0.01)
            return
        keys = choice.sample(known, min(4, len(known)))
        with space.read(keys, wait_ms=200, any_order=True) as lease:
            check_bytes(lease, keys)
            oracle.reads += sum(outcome is Outcome.HIT for outcome in lease.outcomes)
            lease.settled()

    return step


KINDS = ("any moment", "writing records", "writing the index", "power cut", "syncing")


def arrange(kind: str, weather: Weather, client: Client, oracle: Oracle) -> float:
    """Bring the daemon into the state in which it is to be killed; returns when the disk last kept its promise."""
    now = time.monotonic()
    match kind:
        case "any moment":
            time.sleep(random.Random().uniform(0.0, 0.2))  # the one round whose very point is chance
            return time.monotonic()
        case "writing records":
            weather.set([{"calls": ["write"], "files": "slab-*", "do": "hang", "skip": 3}])
            eventually(lambda: ssd_of(client).reserved > 0)
        case "writing the index":
            weather.set([{"calls": ["index_commit"], "do": "hang"}])
            eventually(lambda: ssd_of(client).oldest_not_durable_ms > 500 * DURABLE_WITHIN_S)
        case "syncing":
            weather.set([{"calls": ["sync"], "files": "slab-*", "do": "hang"}])
            eventually(lambda: ssd_of(client).oldest_not_durable_ms > 500 * DURABLE_WITHIN_S)
        case "power cut":  # what is not synced never reaches the file
            weather.set([{"calls": ["write"], "files": "slab-*", "do": "hold"}])
            stored, durable = ssd_of(client).ready, oracle.durable_commits
            eventually(lambda: ssd_of(client).ready > stored + 16)
            eventually(lambda: oracle.durable_commits > durable + 2)  # and what was said to be durable is
            return time.monotonic()
    return now


def after_crash(space: Namespace, oracle: Oracle, promised: float) -> dict[str, int]:
    """Compare what the restarted daemon has with what the oracle knows. Nobody writes meanwhile."""
    old = {key for key, at in oracle.visible.items() if at < promised - DURABLE_WITHIN_S}
    must = oracle.durable | old
    asked = [*oracle.visible, *oracle.maybe]
    had = hits(space, asked)
    lost = must - had
    assert not lost, (
        f"{len(lost)} of {len(must)} chunks are lost that were durable:"
        f" {look(space, sorted(lost)[:4])}, acknowledged as such: {len(lost & oracle.durable)}"
    )
    found = look(space, sorted(oracle.gone)[:64])
    assert all(reason in MISSES for _, reason in found), "a chunk that was lost came back"
    for talk in oracle.conversations:
        info = space.get_session(talk.name)
        entries = len(info.entries) if info is not None else 0
        expected = max((n for at, n in talk.acknowledged if at < promised - DURABLE_WITHIN_S), default=0)
        assert expected <= entries <= talk.sent, (talk, info)
        if info is not None:
            assert [entry.key for entry in info.entries] == talk.keys[:entries]
    strangers = keys_of(space, 8, (1 << 31) - 1)
    assert {reason for _, reason in look(space, strangers)} == {Reason.NEVER_SEEN}
    result = {
        "must": len(must),
        "there": len(had),
        "lost": len(asked) - len(had),
        "unacknowledged but there": len(had & oracle.maybe),
    }
    oracle.gone = set(asked) - had
    # Of the old ones some are asked for again after every later crash; all would take ever longer.
    oracle.durable = set(random.Random(len(had)).sample(sorted(had), min(REMEMBERED, len(had))))
    oracle.visible = dict.fromkeys(oracle.durable, 0.0)
    oracle.maybe = set()
    oracle.conversations = []
    return result


def test_killed_again_and_again(start_daemon: Any, run_dir: Path, capsys: Any) -> None:
    weather = Weather(run_dir.parent)
    settings = {
        **SMALL_SSD,
        "ssd_dir": run_dir.parent / "ssd",
        "ssd_bytes": 2 << 30,  # nothing has to go
        "durable_within_ms": int(DURABLE_WITHIN_S * 1000),
        "log_level": "info",
        "environment": weather.environment,
    }
    daemon = start_daemon(**settings)
    oracle = Oracle()
    totals: list[str] = []
    with client_of(daemon) as client:
        space = client.open(SPEC)
        writers = [Writer(space, oracle, number) for number in range(2)]
        for number in range(ROUNDS):
            kind = KINDS[number % len(KINDS)]
            stop = threading.Event()
            saved = [writer.saved for writer in writers]
            demoted = client.stats().counters["chunks_demoted"]
            threads = [in_background(writer.step, stop) for writer in writers]
            threads.append(in_background(reading(space, oracle), stop))
            try:
                began = time.monotonic()
                eventually(lambda began=began: time.monotonic() > began + 1.2 * DURABLE_WITHIN_S)
                eventually(
                    lambda s=saved: all(w.saved > n + 32 for w, n in zip(writers, s, strict=True)),
                    lambda n=number: f"the worker does not go on after round {n}",
                )
                eventually(lambda n=demoted: client.stats().counters["chunks_demoted"] > n)
                promised = arrange(kind, weather, client, oracle)
                daemon.kill()
                killed = time.monotonic()
            finally:
                stop.set()
                weather.clear()
            for thread, problems in threads:
                thread.join(BOUND_S)
                assert not thread.is_alive()
                assert not problems, problems
            boot = client.boot_id
            daemon = start_daemon(**settings)
            eventually(lambda old=boot: client.connected and client.boot_id != old)
            eventually(lambda: space.match(keys_of(space, 1)).reasons != (Reason.UNAVAILABLE,))
            result = after_crash(space, oracle, min(promised, killed))
            totals.append(f"round {number} ({kind}): {result}")
        assert oracle.durable_commits > 0 and oracle.reads > 0
        in_state(client, "ok")
        writers[0].step()
    assert daemon.stop() == 0
    with capsys.disabled():
        if os.environ.get("ATTNSTORE_CRASH_ROUNDS"):
            print("", *totals, sep="\n")
