"""What `remote_url` may say, and stores that are away, are no cluster or have no bucket when the daemon starts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.cli.doctor import Failed, Patient
from kvstore.client import Client
from kvstore.config import REMOTE_STORE, StoreConfig
from kvstore.core.events import ChunksForgotten, ForgetChunks
from kvstore.errors import ConfigError
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.remote.backend import Book, StoreProblem
from kvstore.tiers.remote.object_store import ObjectStore
from kvstore.tiers.remote.opening import check, journal_path, open_remote
from kvstore.tiers.remote.records import Description
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.types import ChunkKey, OpId

from ..fleet_tools import eventually, needs_redis, redis_server


@pytest.mark.parametrize(
    ("url", "why", "remedy"),
    [
        ("redis://", "names no host", "redis://host:6379/0"),
        ("s3:///path", "names no bucket or container", "s3://bucket/path"),
        ("redis://a:6379/models", "a database that is no number", "redis://host:6379/0"),
        ("redis+cluster://a:1,b:2/x", "a database that is no number", "redis+cluster://host:6379/0"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(url: str, why: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check(StoreConfig(remote_url=url))
    assert refused.value.remedy == remedy


def test_a_folder_that_is_away_at_the_start_is_used_when_it_is_there(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.write_text("not mounted")  # so that no folder can be made below it
    store = ObjectStore(f"file://{mount}/kv", Book(""), salt=b"", ttl_s=60, timeout_s=5)
    with pytest.raises(StoreProblem, match=r"mount/kv cannot be used"):
        store.catch_up(time.monotonic() + 30)
    mount.unlink()
    store.catch_up(time.monotonic() + 30)
    store.close()


def test_a_folder_whose_opening_hangs_costs_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    over = threading.Event()

    def hang(url: str, timeout_s: float) -> None:
        began.append(url)
        over.wait(60)

    monkeypatch.setattr("kvstore.tiers.remote.object_store._open", hang)
    store = ObjectStore(f"file://{tmp_path}", Book(""), salt=b"", ttl_s=60, timeout_s=5)
    for _ in range(3):
        with pytest.raises(StoreProblem, match="the file system hangs"):
            store.catch_up(time.monotonic() + 0.05)
    assert len(began) == 1  # not a thread more with each call
    over.set()


@needs_redis
def test_a_redis_that_is_no_cluster_is_a_problem_of_the_store(tmp_path: Path) -> None:
    redis_store = pytest.importorskip("kvstore.tiers.remote.redis_store", reason="needs attnstore[remote]")
    with redis_server(tmp_path) as server:
        url = server.url.replace("redis://", "redis+cluster://")
        store = redis_store.RedisStore(url, Book(""), salt=b"", ttl_s=60, timeout_s=5)
        with pytest.raises(StoreProblem, match="Cluster mode is not enabled"):
            store.catch_up(time.monotonic() + 30)
        store.close()


def test_the_doctor_tells_that_forgets_cannot_be_read() -> None:
    gauges: dict[str, Any] = {"source_remote_well": 1.0, "remote_forgets_read_ms_ago": 900.0}
    client = SimpleNamespace(stats=lambda: SimpleNamespace(gauges=gauges))
    patient = Patient(cast("Client", client))
    assert patient.check_beyond() == "remote: well"
    gauges["remote_forgets_read_ms_ago"] = 61_000.0
    with pytest.raises(Failed, match="was not read for 61 s") as failed:
        patient.check_beyond()
    assert "bucket" in failed.value.remedy


def test_a_node_whose_clock_is_far_ahead_deletes_nothing_that_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=40)

    monkeypatch.setattr("kvstore.tiers.remote.object_store.datetime", Ahead)
    store = ObjectStore(f"file://{tmp_path}", Book(""), salt=b"", ttl_s=86_400, timeout_s=5)
    store.forget([(b"n" * 32, ChunkKey(b"k"), b"")], time.monotonic() + 30)
    store.forget([(b"n" * 32, ChunkKey(b"l"), b"")], time.monotonic() + 30)
    there = {path for path in tmp_path.rglob("*") if path.is_file()}
    store.tidy(time.monotonic() + 30)
    assert {path for path in tmp_path.rglob("*") if path.is_file() and path.name != "clock"} == there
    assert len(there) == 2
    store.close()


def test_a_daemon_that_ends_closes_the_loops_of_its_store(tmp_path: Path) -> None:
    """Inside of its own loop, where no other one can be run."""
    store = ObjectStore(f"file://{tmp_path}", Book(""), salt=b"", ttl_s=60, timeout_s=5)
    store.catch_up(time.monotonic() + 30)

    async def end() -> None:
        store.close()

    asyncio.run(end())
    assert [runner.get_loop().is_closed() for runner in store._runners] == [True]


def test_what_is_older_than_its_time_goes_by_the_clock_of_the_store(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}", Book(""), salt=b"", ttl_s=60, timeout_s=5)
    store.forget([(b"n" * 32, ChunkKey(b"k"), b"")], time.monotonic() + 30)
    store.forget([(b"n" * 32, ChunkKey(b"l"), b"")], time.monotonic() + 30)
    for path in tmp_path.rglob("forgotten/*"):
        os.utime(path, (0, 0))
    store.tidy(time.monotonic() + 30)
    assert len(list(tmp_path.rglob("forgotten/*"))) == 1  # the newest stays, whatever its age
    store.close()


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_journal_is_not_written_to_a_directory_that_is_another_daemons(
    tmp_path: Path, is_ours: bool
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = StoreConfig(run_dir=str(run_dir), remote_url=f"file://{tmp_path / 'store'}")
    told: list[object] = []
    tier = open_remote(config, cast(Any, None), told.append, is_ours=lambda: is_ours)
    tier.start()
    tier.submit(ForgetChunks(OpId(1), REMOTE_STORE, ((b"d" * 32, ChunkKey(b"k"), b""),)))
    eventually(lambda: any(isinstance(event, ChunksForgotten) and not event.why for event in told))
    tier.close(30.0)
    assert [path.name for path in run_dir.iterdir()] == [os.path.basename(journal_path(config))] * is_ours


def test_what_is_forgotten_is_refused_at_once_though_the_store_hangs(tmp_path: Path) -> None:
    """Else a fetch in between brings back what was forgotten, and nobody drops it again."""
    config = StoreConfig(run_dir=str(tmp_path), remote_url=f"file://{tmp_path / 'store'}")
    tier = open_remote(config, cast(Any, None), lambda event: None, is_ours=lambda: True)
    book = tier._book
    with book.lock:  # a thread of the tier waits for a disk
        tier.submit(ForgetChunks(OpId(1), REMOTE_STORE, ((b"d" * 32, ChunkKey(b"k"), b""),)))
        assert book._is_pending(Description(b"d" * 32, ChunkKey(b"k"), 0, 1, 64, False, (), 8, 0, 99))
        assert not book._is_pending(Description(b"d" * 32, ChunkKey(b"l"), 0, 1, 64, False, (), 8, 0, 99))
    tier.close(30.0)


def test_a_forget_says_that_it_stands_in_no_journal(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.write_text("not mounted")
    store = ObjectStore(f"file://{mount}/kv", Book(""), salt=b"", ttl_s=60, timeout_s=5)
    done: list[Any] = []
    tier = RemoteTier(
        store,
        Book(str(tmp_path / "full" / "journal")),
        cast("SlotMemory", None),
        done=done.append,
        threads=1,
        **{"lookup_s": 5, "deadline_s": 5, "bytes_per_s": 0},
    )
    tier.submit(ForgetChunks(OpId(1), "remote", ((b"n" * 32, ChunkKey(b"k"), b""),)))
    (answer,) = eventually(lambda: [event for event in done if isinstance(event, ChunksForgotten)])
    assert "cannot be used" in answer.why and "a restart loses it" in answer.why
    tier.close(30)
