"""Saving behind the model: which chunks, which bytes, what happens when the store cannot take them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvstore.core.events import SessionEntry, SessionInfo
from kvstore.errors import Conflict
from kvstore.gpu_worker import assembly
from kvstore.gpu_worker import saver as saver_module
from kvstore.gpu_worker.layout import Geometry, namespace_of
from kvstore.gpu_worker.saver import PartSave, Saver, Shards, TurnSave
from kvstore.keys import ROOT
from kvstore.types import ChunkKey

from .conftest import FakeNamespace, FakeStore, text, tiny_llama

MODEL = tiny_llama()
GEOMETRY = Geometry.of(MODEL)
SPEC = namespace_of(MODEL, GEOMETRY, digest=b"d")


@pytest.fixture
def namespace(store: FakeStore) -> FakeNamespace:
    return store.connect().open(SPEC)


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = Saver(GEOMETRY)
    yield made
    made.close()


class Kept:
    """KV of one sequence, [1, H_kv, n, D] of each layer."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.layers = layers

    def snapshot(self, first_token: int, token_count: int, /) -> Shards:
        ends = range(first_token, first_token + token_count, 64)
        return Packed([expected_shard(self, at, min(64, first_token + token_count - at)) for at in ends])


class Packed:
    """What a write buffer holds."""

    def __init__(self, shards: list[np.ndarray]) -> None:
        self._shards = shards
        self._arrived = False

    def wait(self) -> None:
        self._arrived = True

    def shard(self, number: int, /) -> np.ndarray:
        assert self._arrived, "it is read while it is copied"
        return self._shards[number]

    def release(self) -> None:
        self._shards = []


def filled(tokens: int) -> Kept:
    torch.manual_seed(tokens)
    return Kept(
        [(torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16)) for _ in range(GEOMETRY.layers)]
    )


def begin(saver: Saver, namespace: FakeNamespace, chain: list[ChunkKey] | None = None) -> TurnSave:
    return TurnSave(saver, namespace, "s", namespace.get_session("s"), chain or [])


def expected_shard(cache: Kept, first: int, count: int) -> np.ndarray:
    shard = np.zeros(GEOMETRY.shard_bytes, np.uint8)
    for number, (keys, values) in enumerate(cache.layers):
        packed = torch.cat([part[0, :, first : first + count].reshape(-1) for part in (keys, values)])
        start = number * GEOMETRY.slice_bytes
        shard[start : start + packed.nbytes] = packed.contiguous().view(torch.uint8).numpy()
    return shard


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129, 1000])
def test_every_token_is_saved_once(
    tokens: int, store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    cache, ids = filled(tokens), text(tokens)
    save = begin(saver, namespace)
    save.extend(cache, ids)
    save.finish(cache, ids)
    assert saver.flush(10)
    full, rest = divmod(tokens, 64)
    keys = namespace.keys(ids)
    assert len(keys) == full
    if rest:
        keys.append(namespace.tail_key(ids[full * 64 :], keys[-1] if keys else ROOT))
    assert {key for _, key in store.chunks} == set(keys)
    for number, key in enumerate(keys):
        count = 64 if number < full else rest
        # All bytes of the shard, also those that no token fills: staging memory was not empty.
        assert (store.chunks[namespace.salt, key] == expected_shard(cache, number * 64, count)).all()
    entries = tuple(
        SessionEntry(key, number * 64, 64 if number < full else rest) for number, key in enumerate(keys)
    )
    info = namespace.get_session("s")
    assert info is not None and info.entries == entries and info.version == 1
    assert save.saved.is_set()
    assert saver.counters == {
        "chunks_saved": len(keys),
        "bytes_saved": len(keys) * GEOMETRY.shard_bytes,
        "chunks_already": 0,
        "chunks_refused": 0,
        "manifests": 1,
    }


def test_chunks_are_saved_as_soon_as_they_are_full(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    cache, ids = filled(200), text(200)
    save = begin(saver, namespace)
    for tokens, chunks in ((63, 0), (64, 1), (65, 1), (191, 2), (200, 3)):
        save.extend(cache, ids[:tokens])
        assert saver.flush(10)
        assert len(store.chunks) == chunks
    assert namespace.get_session("s") is None  # the turn is not over


def test_large_turns_are_saved_in_batches(
    store: FakeStore, namespace: FakeNamespace, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "BATCH_BYTES_MAX", 3 * GEOMETRY.shard_bytes)
    calls = []
    store.on_write = lambda: calls.append(len(store.chunks))
    cache, ids = filled(500), text(500)
    begin(saver, namespace).finish(cache, ids)
    assert saver.flush(10)
    assert calls == [0, 3, 6, 7]
    assert (store.chunks[namespace.salt, namespace.keys(ids)[6]] == expected_shard(cache, 6 * 64, 64)).all()


def test_what_others_saved_is_compared_on_a_sample(store: FakeStore, namespace: FakeNamespace) -> None:
    """Bytes of whole chunks and of a tail: equal ones are equal, and one that differs is noticed."""
    cache, ids = filled(150), text(150)
    for compared, differed in ((0, 0), (3, 0), (3, 1)):
        saver = Saver(GEOMETRY, audit_every=1)
        save = TurnSave(saver, namespace, f"s{compared}{differed}", None, [])
        if differed:
            store.chunks[namespace.salt, namespace.keys(ids)[1]][0] ^= 1
        save.finish(cache, ids)
        assert saver.flush(10)
        saver.close()
        assert (saver.counters["chunks_compared"], saver.counters["chunks_differed"]) == (compared, differed)
    for every, some in ((0, False), (1 << 32, False), (2, True)):
        saver = Saver(GEOMETRY, audit_every=every)
        TurnSave(saver, namespace, f"every {every}", None, []).finish(filled(1_000), text(1_000))
        TurnSave(saver, namespace, f"again {every}", None, []).finish(filled(1_000), text(1_000))
        assert saver.flush(10)
        saver.close()
        assert bool(saver.counters["chunks_compared"]) is some, "a part of the keys, the same for all"
        assert saver.counters["chunks_compared"] < 32, "both turns found all 16 chunks there"


def test_a_turn_goes_on_from_what_was_restored(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    first, ids = filled(150), text(300)
    begin(saver, namespace).finish(first, ids[:150])
    assert saver.flush(10)
    base = namespace.get_session("s")
    save = begin(saver, namespace, namespace.keys(ids[:150]))
    save.finish(filled(300), ids)
    assert saver.flush(10)
    info = namespace.get_session("s")
    assert info is not None and base is not None and info.version == 2
    assert (
        info.entries[:2] == base.entries[:2]
    )  # the tail of the first turn is gone, its tokens are in a chunk now
    assert [(entry.first_token, entry.token_count) for entry in info.entries] == [
        *((number * 64, 64) for number in range(4)),
        (256, 44),
    ]
    assert saver.counters["chunks_already"] == 0
    assert saver.counters["chunks_saved"] == 3 + 3


def test_the_same_turn_again_changes_nothing(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    cache, ids = filled(100), text(100)
    for _ in range(2):
        begin(saver, namespace).finish(cache, ids)
        assert saver.flush(10)
    assert saver.counters["chunks_saved"] == saver.counters["chunks_already"] == 2
    assert saver.counters["manifests"] == 1


def test_a_store_without_room_is_counted_and_the_history_ends_there(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    store.room = 2
    cache, ids = filled(300), text(300)
    save = begin(saver, namespace)
    save.extend(cache, ids[:192])
    save.finish(cache, ids)
    assert saver.flush(10)
    assert saver.counters["chunks_saved"] == 2
    assert saver.counters["chunks_refused"] == 1
    assert saver.counters["chunks_dropped"] == 2  # behind the hole
    info = namespace.get_session("s")
    assert info is not None and len(info.entries) == 2


def test_a_hole_does_not_shorten_an_older_manifest(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    cache, ids = filled(300), text(300)
    begin(saver, namespace).finish(cache, ids)
    assert saver.flush(10)
    store.forget(namespace.keys(ids)[1])
    store.room = 0
    begin(saver, namespace, namespace.keys(ids)[:1]).finish(cache, ids)
    assert saver.flush(10)
    info = namespace.get_session("s")
    assert info is not None and info.version == 1 and len(info.entries) == 5


def test_an_edited_conversation_replaces_the_manifest(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    begin(saver, namespace).finish(filled(300), text(300))
    assert saver.flush(10)
    ids = text(300)[:128]
    begin(saver, namespace, namespace.keys(ids)).finish(filled(128), ids)
    assert saver.flush(10)
    info = namespace.get_session("s")
    assert info is not None and info.version == 2
    assert [entry.token_count for entry in info.entries] == [64, 64]


def test_a_queue_that_is_full_drops_and_never_waits(store: FakeStore, namespace: FakeNamespace) -> None:
    saver = Saver(GEOMETRY, queue_bytes_max=3 * GEOMETRY.shard_bytes)
    saving, go = threading.Event(), threading.Event()

    def hang() -> None:
        saving.set()
        assert go.wait(30)

    store.on_write = hang
    cache, ids = filled(600), text(600)
    save = begin(saver, namespace)
    save.extend(cache, ids[:64])
    assert saving.wait(30)
    save.extend(cache, ids[:192])  # two more: as much as may wait
    save.extend(cache, ids[:256])
    save.finish(cache, ids)
    with saver._changed:
        assert saver.counters["chunks_dropped"] == 1 + 6
    go.set()
    assert saver.flush(10)
    assert saver.counters["chunks_saved"] == 3  # what was queued before is still of use
    info = namespace.get_session("s")
    assert info is not None and len(info.entries) == 3
    assert save.saved.is_set()
    saver.close()


def test_nothing_is_saved_behind_what_was_dropped(store: FakeStore, namespace: FakeNamespace) -> None:
    """Also when the queue has room again: its key would leave out what was dropped, and name another text's KV."""
    saver = Saver(GEOMETRY, queue_bytes_max=2 * GEOMETRY.shard_bytes)
    cache, ids = filled(600), text(600)
    save = begin(saver, namespace)
    save.extend(cache, ids[:128])
    assert saver.flush(10)
    save.extend(cache, ids[:320])  # three at once: more than may wait
    assert saver.flush(10)
    save.extend(cache, ids[:384])
    save.finish(cache, ids)
    assert saver.flush(10)
    assert {key for _, key in store.chunks} == set(namespace.keys(ids)[:2])
    assert saver.counters["chunks_dropped"] == 8
    info = namespace.get_session("s")
    assert info is not None and len(info.entries) == 2
    saver.close()


def test_a_store_that_is_away_is_counted(store: FakeStore, namespace: FakeNamespace, saver: Saver) -> None:
    store.away = True
    save = begin(saver, namespace)
    save.finish(filled(100), text(100))
    assert saver.flush(10)
    assert saver.counters["chunks_refused"] == 1
    assert saver.counters["chunks_dropped"] == 1
    assert save.saved.is_set()


def test_a_commit_that_fails_saves_nothing(store: FakeStore, namespace: FakeNamespace, saver: Saver) -> None:
    store.commits_fail = True
    begin(saver, namespace).finish(filled(100), text(100))
    assert saver.flush(10)
    assert saver.counters["chunks_saved"] == 0
    assert namespace.get_session("s") is None


@dataclass
class Doubtful:
    """An identity whose weights were others since nobody knows when."""

    doubts: int = 1
    verified_at: float = 0.0


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_what_may_have_been_saved_with_other_weights_is_forgotten(
    store: FakeStore, namespace: FakeNamespace, saver: Saver, unheard: bool, parts: bool
) -> None:
    """Also if nobody answered the commit: the store may have it."""
    store.commits_unheard = unheard
    cache, ids = filled(100), text(100)
    if parts:
        kept = assembly.Kept(
            key=namespace.keys(ids)[0], parent=ROOT, position=0, first=0, count=64, exact=True
        )
        save = PartSave(namespace, "", (kept,), 0, 64)  # type: ignore[arg-type] # a fake one
        assert saver.put_parts(save, lambda: cache.snapshot(0, 64))
    else:
        begin(saver, namespace).finish(cache, ids)
    assert saver.flush(10)
    assert store.chunks
    saver.follow(Doubtful())  # type: ignore[arg-type]
    assert saver.flush(10)
    assert not store.chunks


def test_chunks_that_another_worker_saves_are_left_to_it(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    """It may fail: then the manifest ends before them."""
    cache, ids = filled(200), text(200)
    keys = namespace.keys(ids)
    store.busy = {keys[1]}
    begin(saver, namespace).finish(cache, ids)
    assert saver.flush(10)
    info = namespace.get_session("s")
    assert info is not None and [entry.key for entry in info.entries] == keys[:1]
    assert saver.counters["manifests"] == 1


def test_a_manifest_that_moved_on_is_read_again(
    store: FakeStore, namespace: FakeNamespace, saver: Saver
) -> None:
    cache, ids = filled(200), text(200)
    late = begin(saver, namespace)
    begin(saver, namespace).finish(cache, ids[:100])
    assert saver.flush(10)
    late.finish(cache, ids)
    assert saver.flush(10)
    info = namespace.get_session("s")
    assert info is not None and info.version == 2
    assert [entry.token_count for entry in info.entries] == [64, 64, 64, 8]


def test_a_manifest_that_moves_on_for_ever_is_dropped(
    store: FakeStore, namespace: FakeNamespace, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def conflict(name: str, **options: object) -> SessionInfo:
        tries.append(name)
        raise Conflict("again")

    save = begin(saver, namespace)
    monkeypatch.setattr(namespace, "update_session", conflict)
    save.finish(filled(100), text(100))
    assert saver.flush(10)
    assert len(tries) == 3
    assert saver.counters["manifests_dropped"] == 1
    assert save.saved.is_set()


def test_a_bug_is_seen_and_stops_nobody(store: FakeStore, namespace: FakeNamespace) -> None:
    saver = Saver(GEOMETRY)

    def break_down() -> None:
        raise ZeroDivisionError("a bug")

    store.on_write = break_down
    save = begin(saver, namespace)
    save.finish(filled(100), text(100))
    assert save.saved.wait(10)
    with pytest.raises(RuntimeError, match="the saver failed"):
        saver.flush(10)
    with pytest.raises(RuntimeError, match="the saver failed"):
        saver.close()
    assert not saver._thread.is_alive()


def test_close_saves_what_is_queued(store: FakeStore, namespace: FakeNamespace) -> None:
    saver = Saver(GEOMETRY)
    begin(saver, namespace).finish(filled(200), text(200))
    saver.close()
    assert len(store.chunks) == 4
    begin(saver, namespace).finish(filled(200), text(200, seed=2))
    assert saver.counters["chunks_dropped"] == 4


def test_close_does_not_wait_for_ever(store: FakeStore, namespace: FakeNamespace) -> None:
    saver = Saver(GEOMETRY)
    saving, go = threading.Event(), threading.Event()

    def hang() -> None:
        saving.set()
        assert go.wait(30)

    store.on_write = hang
    save = begin(saver, namespace)
    save.finish(filled(100), text(100))
    assert saving.wait(30)
    saver.close(timeout_s=0)
    assert save.saved.is_set()
    go.set()
    saver._thread.join(30)
    assert not saver._thread.is_alive()
