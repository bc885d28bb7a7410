"""What connects in the background goes on whatever happens to it, and tries no more often than it may."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.gpu_worker import store as store_module
from kvstore.gpu_worker.connectors import link as link_module
from kvstore.gpu_worker.connectors.link import Link
from kvstore.gpu_worker.layout import Geometry, namespace_of
from kvstore.gpu_worker.store import Store

from ...waiting import eventually
from .conftest import FakeStore, tiny_llama

BOUND_S = 20.0


@pytest.fixture
def spec() -> Any:
    model = tiny_llama()
    return namespace_of(model, Geometry.of(model), digest=b"d")


@pytest.fixture
def link(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(link_module, "connect", lambda *_, **__: store.connect())
    monkeypatch.setattr(link_module, "AGAIN_S", 0.01)
    made = Link("/nowhere", engine_group="g", rank=0, timeout_s=1.0, staging_bytes=1)
    yield made
    made.close()


@pytest.mark.parametrize("where", ["prepare", "opened"])
def test_an_error_of_ours_is_told_and_it_is_tried_again(
    where: str, link: Link, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [OSError(), RuntimeError("a bug"), RuntimeError("a bug")]

    def fails(_: object) -> None:
        if problems:
            raise problems.pop()

    setattr(link, where, fails)
    link.open(spec)
    eventually(lambda: link.ready(spec) is not None)
    told = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
    assert told == [
        ("working without the store: a bug", True),
        ("working without the store: OSError()", True),
    ]


def test_a_daemon_that_is_away_is_no_bug(
    link: Link, store: FakeStore, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store.away = True
    link.open(spec)
    eventually(lambda: link.complaint)
    store.away = False
    eventually(lambda: link.ready(spec) is not None)
    assert [bool(record.exc_info) for record in caplog.records] == [False]


def test_an_engine_that_cannot_connect_for_an_error_of_ours_does_not_try_with_each_step(
    store: FakeStore, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CONNECT_AGAIN_S", 0.0)
    store.away = True
    tried = threading.Semaphore(0)

    def connect() -> Any:
        tried.release()
        if not store.away:
            raise RuntimeError("a bug")
        return store.connect()

    made = Store(connect, spec, lookup_timeout_s=1.0, promote_timeout_s=1.0, counters=Counter())
    assert tried.acquire(timeout=BOUND_S)
    store.away = False
    monkeypatch.setattr(store_module, "CONNECT_AGAIN_S", 1_000.0)
    assert made.namespace() is None
    assert tried.acquire(timeout=BOUND_S)
    eventually(lambda: not any(thread.name == "kv-connect" for thread in threading.enumerate()))
    assert made.namespace() is None
    assert not any(thread.name == "kv-connect" for thread in threading.enumerate())
    assert not tried.acquire(blocking=False)
    made.close()
