"""`kvctl record`: a real daemon writes a trace of its engines, and the replay reads it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import connect
from kvstore.errors import Conflict, StoreError, Unavailable
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.replay import read_trace, replay
from kvstore.v1 import admin_pb2, admin_pb2_grpc

from .test_admin import kvctl_

pytest.importorskip("aiofiles", reason="aiofiles is not installed: the daemon cannot record")
BOUND_S = 60.0
SPEC = NamespaceSpec("recorded-model", b"digest", "k:[T]:int8", 4, (GroupSpec("kv", 4096),))


def turn(store: Any, tokens: range) -> int:
    """A prompt is looked up, and what is missing saved. How many chunks were there."""
    keys = store.keys(tokens)
    with store.read(keys) as lease:
        hits: int = lease.hits
    with store.write(keys[hits:], parent=keys[hits - 1] if hits else b"") as batch:
        batch.copy_many([(i, None, bytes(4096)) for i in batch.granted])
        batch.commit()
    return hits


def test_what_engines_do_is_written_and_can_be_replayed(daemon: Any, run_dir: Path) -> None:
    path = run_dir.parent / "trace.jsonl"
    with connect(str(run_dir)) as client:
        store = client.open(SPEC)
        begun = kvctl_(run_dir, "record", str(path), "--background")
        assert (begun["running"], begun["path"]) == (True, str(path))
        met = [
            turn(store, range(16)),
            turn(store, range(32)),
            turn(store, range(100, 112)),
            turn(store, range(40)),
        ]
        ended = kvctl_(run_dir, "record", "--stop")
        keys = store.keys(range(40))
    assert met == [0, 4, 0, 8]
    assert (ended["running"], ended["lookups"], ended["saves"], ended["dropped"]) == (False, 4, 4, 0)
    assert ended["ended"] == "stopped"
    assert ended["bytes"] == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_bytes()
    assert not any(key in text or key.hex().encode() in text for key in keys), "keys are hashed anew"
    trace = read_trace(path, "recorded")
    assert [len(turn.chunks) for turn in trace] == [4, 8, 3, 10]
    assert [turn.history for turn in trace] == [0, 4, 0, 8]
    assert replay(trace, dram_chunks=64).hits == sum(met)


def engine_turn(scheduler: Any, rank: Any, tokens: range) -> int:
    """As vLLM does: one process looks into the directory and says how much is to be loaded, another loads and saves;
    the daemon has heard of the one before the other begins."""
    keys = scheduler.keys(tokens)
    deadline = time.monotonic() + BOUND_S
    while (
        peeked := scheduler.peek(keys)
    ) is None:  # a busy machine's daemon may have been silent for seconds
        assert time.monotonic() < deadline, "it is in the directory, or nowhere"
        time.sleep(0.02)
    scheduler.note_lookup(keys, peeked)
    scheduler.client._connection.attachment.tell_touched()
    scheduler.client.stats()
    hits: int = peeked.hits
    if hits:
        with rank.read(keys[:hits]) as lease:
            assert lease.hits == hits
    rank.put(keys[hits:], [bytes(4096)] * (len(keys) - hits), parent=keys[hits - 1] if hits else b"")
    return hits


def test_what_an_engine_looks_up_without_a_message_is_written_misses_and_all(
    daemon: Any, run_dir: Path
) -> None:
    path = run_dir.parent / "trace.jsonl"
    prompts = [range(16), range(32), range(100, 112), range(40)]
    with (
        connect(str(run_dir), engine_group="engine") as scheduler,
        connect(str(run_dir), engine_group="engine") as rank,
    ):
        spaces = scheduler.open(SPEC), rank.open(SPEC)
        kvctl_(run_dir, "record", str(path), "--background")
        met = [engine_turn(*spaces, tokens) for tokens in prompts]
        stats = rank.stats().namespaces[0]
        kvctl_(run_dir, "record", "--stop")
    assert met == [0, 4, 0, 8]
    trace = read_trace(path, "recorded")
    assert [len(turn.chunks) for turn in trace] == [4, 8, 3, 10]
    assert replay(trace, dram_chunks=64).hits == sum(met)
    assert (stats.lookups, stats.hits) == (12 + 4, 12), "a miss for each prompt, and each hit once"


def test_one_at_a_time_and_never_over_a_file(daemon: Any, run_dir: Path) -> None:
    there = run_dir.parent / "there"
    there.write_text("mine")

    def record(client: Any, **request: Any) -> Any:
        return client.unary(admin_pb2_grpc.AdminStub, "Record", admin_pb2.RecordRequest(**request))

    with connect(str(run_dir)) as client:
        with pytest.raises(Unavailable, match="exists"):
            record(client, path=str(there))
        with pytest.raises(StoreError, match="absolute"):
            record(client, path="trace.jsonl")
        record(client, path=str(run_dir.parent / "new"))
        with pytest.raises(Conflict, match="running"):
            record(client, path=str(run_dir.parent / "newer"))
        assert record(client, stop=True).ended == "stopped"
        assert not record(client).running
    assert there.read_text() == "mine"


def test_the_end_of_the_daemon_ends_a_recording(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    daemon = start_daemon()
    path = run_dir.parent / "trace.jsonl"
    with connect(str(run_dir)) as client:
        store = client.open(SPEC)
        kvctl_(run_dir, "record", str(path), "--background")
        turn(store, range(16))
    assert daemon.stop() == 0
    assert len(read_trace(path, "recorded")) == 1


def test_advise_says_what_more_memory_would_bring(
    start_daemon: Callable[..., Any], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chats that come back one after the other, more than fit: nothing is hit, and in four times the DRAM all is."""
    start_daemon(dram_bytes=8 << 20, segment_bytes=4 << 20)
    spec = NamespaceSpec("advised-model", b"digest", "k:[T]:int8", 4, (GroupSpec("kv", 256 << 10),))
    ended = threading.Event()

    def chat() -> None:
        with connect(str(run_dir)) as client:
            store = client.open(spec)
            while not ended.is_set():
                for first in range(0, 16_000, 1_000):
                    keys = store.keys(range(first, first + 12))
                    with store.read(keys) as lease:
                        hits = lease.hits
                    with store.write(keys[hits:]) as batch:
                        batch.copy_many([(i, None, bytes(256 << 10)) for i in batch.granted])
                        batch.commit()

    chatting = threading.Thread(target=chat)
    chatting.start()
    try:
        found = kvctl_(
            run_dir, "advise", "--seconds", "4", "--share", "1.0", "--dram", "8M", "32M", "--policy", "lru"
        )
    finally:
        ended.set()
        chatting.join()
    small, large = found["rows"]
    assert found["turns"] >= 32, "each chat was seen twice"
    assert (small["dram_bytes"], large["dram_bytes"]) == (8 << 20, 32 << 20)
    assert small["hit_rate"] == 0.0
    assert large["hit_rate"] > 0.4
    assert large["gain"] == large["hit_rate"]
    assert not kvctl_(run_dir, "record", "--status")["running"]


CHUNK_BYTES = 4096
ADVISED = NamespaceSpec("advised-model", b"digest", "k:[T]:int8", 4, (GroupSpec("kv", CHUNK_BYTES),))
SIZES = (256, 1_024)
"""Chunks of two daemons."""
CHATS = 120
FREE = 0.02
"""A daemon keeps 1/64 of its slots free for what comes next, a shadow none."""


def requests(count: int) -> list[range]:
    """Of chats, some of which come back often, most seldom; each time they are longer."""
    dice = random.Random(1)
    lengths = [6] * CHATS
    found = []
    for chat in dice.choices(range(CHATS), [(1 + n) ** -0.5 for n in range(CHATS)], k=count):
        lengths[chat] += 1
        found.append((chat, lengths[chat]))
    return [range(1_000 * chat, 1_000 * chat + 4 * length) for chat, length in found]


def hits_of(client: Any, prompts: list[range]) -> float:
    """Of the chunks that were asked for."""
    store = client.open(ADVISED)
    hits = asked = 0
    for tokens in prompts:
        keys = store.keys(tokens)
        with store.read(keys) as lease:
            found = lease.hits
        if found < len(keys):
            with store.write(keys[found:], parent=keys[found - 1] if found else b"") as batch:
                batch.copy_many([(i, None, bytes(CHUNK_BYTES)) for i in batch.granted])
                batch.commit()
        hits, asked = hits + found, asked + len(keys)
    return hits / asked


def recording(client: Any) -> Any:
    return client.unary(admin_pb2_grpc.AdminStub, "Record", admin_pb2.RecordRequest())


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def serving(start_daemon: Callable[..., Any], run_dir: Path, chunks: int) -> Iterator[Any]:
    """A client of a daemon with so many chunks of DRAM."""
    size = chunks * CHUNK_BYTES
    daemon = start_daemon(dram_bytes=size, segment_bytes=size, eviction="lru")
    with connect(str(run_dir)) as client:
        until(lambda: client.stats().arena.ready_bytes == size)
        yield client
    assert daemon.stop() == 0


def test_what_advise_says_of_a_size_is_what_a_daemon_of_it_serves(
    start_daemon: Callable[..., Any], run_dir: Path
) -> None:
    """Also when an interrupt ends it; and it leaves nothing in the daemon's directory."""
    prompts = requests(250)
    small, large = SIZES
    arguments = ["--json", "advise", "--seconds", "600", "--share", "1.0", "--policy", "lru"]
    arguments += ["--dram", *(str(size * CHUNK_BYTES) for size in SIZES)]
    with serving(start_daemon, run_dir, large) as client:
        served = {large: hits_of(client, prompts)}
    with serving(start_daemon, run_dir, small) as client:
        before = sorted(os.listdir(run_dir))
        advising = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.cli.kvctl", f"--run-dir={run_dir}", *arguments],
            stdout=subprocess.PIPE,
        )
        try:
            until(lambda: recording(client).running)
            served[small] = hits_of(client, prompts)
            until(lambda: recording(client).lookups == len(prompts))
            advising.send_signal(signal.SIGINT)
            found = json.loads(advising.communicate(timeout=BOUND_S)[0])
        finally:
            advising.kill()
            advising.wait()
        assert advising.returncode == 0
        assert sorted(os.listdir(run_dir)) == before
    assert found["turns"] == len(prompts)
    said = {row["dram_bytes"] // CHUNK_BYTES: row["hit_rate"] for row in found["rows"]}
    assert served[large] > served[small] + 0.1, served
    assert said == pytest.approx(served, abs=FREE)


def test_advise_says_how_much_it_left_out(daemon: Any, run_dir: Path) -> None:
    """Of two models, it looks at the one whose request came first."""
    ended = threading.Event()

    def ask_both() -> None:
        other = NamespaceSpec("other-model", b"digest", "k:[T]:int8", 4, (GroupSpec("kv", CHUNK_BYTES),))
        with connect(str(run_dir)) as client:
            stores = client.open(ADVISED), client.open(other)
            while not ended.is_set():
                for store in stores:
                    turn(store, range(16))

    asking = threading.Thread(target=ask_both)
    asking.start()
    try:
        found = kvctl_(run_dir, "advise", "--seconds", "2", "--share", "1.0")
    finally:
        ended.set()
        asking.join()
    assert found["turns"] > 0
    assert found["lookups_elsewhere"] > 0
