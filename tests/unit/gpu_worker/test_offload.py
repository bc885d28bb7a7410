"""Rows of an engine's memory, with a store that does what a test tells it: what waits, what is dropped, what is late.

Nothing sleeps: the engine's clock is a number, and threads wait for events that the test sets. Takes a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client import ActionKind, ActionsApplied, Backlog, Hint, HintAction, Peeked, QueueAccepted
from kvstore.errors import BadRequest, StoreError, Unavailable
from kvstore.gpu_worker.compute_or_load import BOUND_MIN_S, SLACK_S, ComputeOrLoad
from kvstore.gpu_worker.connectors.offload import (
    Chains,
    Crew,
    HintBoard,
    Inquiry,
    Lookups,
    Order,
    Orders,
    RowLoader,
    Rows,
    RowSaver,
    Tally,
    Transfer,
    Verdict,
)
from kvstore.gpu_worker.connectors.offload import orders as orders_module
from kvstore.gpu_worker.connectors.offload.lookups import FRESH_S
from kvstore.keys import ROOT
from kvstore.types import ChunkKey, GrantResult, HintResult, Outcome, Reason, Tier

ROW_BYTES = 64
TOKENS = 16
BOUND_S = 10.0
FAR = 1e9
MAKER = b"m" * 16
COUNTERS = dict.fromkeys(
    (
        *(
            "lookups",
            "lookups_late",
            "lookups_dropped",
            "computed",
            "blocks_loaded",
            "bytes_loaded",
            "blocks_failed",
        ),
        *("loads_dropped", "blocks_saved", "bytes_saved", "blocks_already", "blocks_refused"),
        *("blocks_dropped", "saves_dropped", "hints_published", "hints_refused", "bytes_shared"),
        *("replicas_differ", "blocks_touched", "blocks_untold"),
    ),
    "",
)


def keys(*names: str) -> list[ChunkKey]:
    return [ChunkKey(name.encode()) for name in names]


class Lease:
    def __init__(self, store: Store, wanted: Sequence[ChunkKey], outcomes: Sequence[Outcome]) -> None:
        self._store = store
        self._keys = list(wanted)
        self.outcomes = tuple(outcomes)
        here = {Outcome.HIT: Reason.NONE, Outcome.PENDING: Reason.ON_SSD, Outcome.MISS: Reason.NEVER_SEEN}
        self.reasons = tuple(map(here.__getitem__, outcomes))
        self.backlog = Backlog(outcomes.count(Outcome.PENDING) * ROW_BYTES, 0, store.ssd_bytes_per_s)
        self.released = False

    def copy_many(self, pieces: Sequence[tuple[int, int, int, Any]]) -> bool:
        self._store.copying.set()
        assert self._store.may_copy.wait(BOUND_S)
        for index, shard, offset, out in pieces:
            key = self._keys[index]
            if self.released or key in self._store.void:
                out[:] = 0xEE  # as of a copy whose slot was reused under it
                return False
            start = shard * len(out) + offset
            np.copyto(out, np.frombuffer(self._store.chunks[key], np.uint8)[start : start + len(out)])
        return True

    def settled(self, timeout_s: float) -> tuple[int, ...]:
        ready = [key for key in self._keys if key in self._store.promoting]
        self._store.promoting.clear()
        return tuple(self._keys.index(key) for key in ready)

    def release(self) -> None:
        self.released = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Batch:
    def __init__(
        self, store: Store, wanted: Sequence[ChunkKey], parents: Sequence[ChunkKey], staged: bool
    ) -> None:
        self._store = store
        self._keys = list(wanted)
        self._staged = staged
        self.error = store.error
        self.results = [GrantResult.FULL] * len(wanted)
        if self.error is None:
            self.results = [
                GrantResult.ALREADY
                if key in store.chunks
                else GrantResult.FULL
                if key in store.full
                else GrantResult.GRANTED
                for key in wanted
            ]
        self.granted = [n for n, result in enumerate(self.results) if result is GrantResult.GRANTED]
        if staged:
            for index in self.granted[store.staging :]:
                self.results[index] = GrantResult.FULL
            self.granted = self.granted[: store.staging]
        self._bytes = {index: np.zeros(store.chunk_bytes, np.uint8) for index in self.granted}
        store.parents.update(zip(wanted, parents, strict=True))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def copy_many(self, pieces: Sequence[tuple[int, int, Any]]) -> None:
        assert self._staged
        for index, shard, source in pieces:
            self._store.copied.append(index)
            self._bytes[index][shard * len(source) : (shard + 1) * len(source)] = source

    def fill(self, region: Region, offsets: Sequence[int], *, timeout_s: float) -> None:
        assert not self._staged
        self._store.filling.set()
        assert self._store.may_fill.wait(BOUND_S)
        if self._store.fill_error is not None:
            raise self._store.fill_error
        shards = len(offsets) // max(1, len(self.granted))
        part = self._store.chunk_bytes // max(1, shards)
        for number, offset in enumerate(offsets):
            target = self._bytes[self.granted[number // shards]]
            start = number % shards * part
            target[start : start + part] = region.memory[offset : offset + part]

    def commit(self, *, timeout_s: float) -> Any:
        if self._store.commit_error is None:
            for index in self.granted:
                self._store.chunks[self._keys[index]] = self._bytes[index].tobytes()
        return type(
            "Outcome", (), {"ok": self._store.commit_error is None, "error": self._store.commit_error}
        )


class Region:
    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Store:
    """What a namespace and its client do, as far as rows need them."""

    def __init__(self, memory: Any) -> None:
        self.client = self
        self.chunk_bytes = ROW_BYTES
        self.chunks: dict[ChunkKey, bytes] = {}
        self.promoting: set[ChunkKey] = set()
        """PENDING at the first read, there at the next."""
        self.spec = SimpleNamespace(chunk_bytes=ROW_BYTES)
        self.ssd_bytes_per_s = 1 << 30
        self.waits_ms: list[int] = []
        """Of each read."""
        self.promotions = 0
        """Reads that may have something promoted."""
        self.directory = True
        self.noted: list[tuple[list[ChunkKey], int]] = []
        """Lookups that the directory answered."""
        self.void: set[ChunkKey] = set()
        self.full: set[ChunkKey] = set()
        self.staging = 99
        """Chunks that staging memory has room for."""
        self.parents: dict[ChunkKey, ChunkKey] = {}
        self.error: StoreError | None = None
        self.fill_error: StoreError | None = None
        self.commit_error: StoreError | None = None
        self.adopt_error: StoreError | None = None
        self.leases: list[Lease] = []
        self.heard: list[tuple[list[bytes], list[bytes]]] = []
        self.touched: list[list[ChunkKey]] = []
        self.orders: list[tuple[list[HintAction], list[bytes]]] = []
        self.order_error: StoreError | None = None
        self.asked = threading.Event()
        self.may_read = _set()
        self.copying = threading.Event()
        self.may_copy = _set()
        self.reserving = threading.Event()
        self.may_reserve = _set()
        self.copied: list[int] = []
        """Numbers of the keys of a batch that staging memory was asked for."""
        self.filling = threading.Event()
        self.may_fill = _set()
        self._memory = memory

    def peek(self, wanted: Sequence[ChunkKey]) -> Peeked | None:
        usable = next((n for n, key in enumerate(wanted) if key not in self.chunks), len(wanted))
        hits = next((n for n, key in enumerate(wanted) if key in self.promoting), usable)
        outcomes = (
            Outcome.MISS
            if key not in self.chunks
            else Outcome.PENDING
            if key in self.promoting
            else Outcome.HIT
            for key in wanted
        )
        return Peeked(usable, min(hits, usable), tuple(outcomes)) if self.directory else None

    def note_lookup(self, wanted: Sequence[ChunkKey], peeked: Peeked) -> None:
        self.noted.append((list(wanted), peeked.usable))

    def match(self, wanted: Sequence[ChunkKey], *, timeout_s: float) -> Any:
        there = (Outcome.HIT if key in self.chunks else Outcome.MISS for key in wanted)
        return type("Matched", (), {"outcomes": tuple(there)})

    def read(
        self,
        wanted: Sequence[ChunkKey],
        *,
        any_order: bool,
        wait_ms: int = 0,
        timeout_s: float,
        promote: bool = True,
        pin: bool = False,
    ) -> Lease:
        self.asked.set()
        self.promotions += promote
        self.waits_ms.append(wait_ms)
        assert self.may_read.wait(BOUND_S)
        outcomes = []
        for key in wanted:
            found = Outcome.HIT if key in self.chunks else Outcome.MISS
            if not any_order and Outcome.MISS in outcomes:
                found = Outcome.MISS
            outcomes.append(Outcome.PENDING if key in self.promoting else found)
        self.leases.append(Lease(self, wanted, outcomes))
        return self.leases[-1]

    def write(
        self,
        wanted: Sequence[ChunkKey],
        *,
        parents: Sequence[ChunkKey],
        maker: bytes,
        transient: bool,
        staged: bool,
        timeout_s: float,
    ) -> Batch:
        assert transient and maker == MAKER
        self.reserving.set()
        assert self.may_reserve.wait(BOUND_S)
        return Batch(self, wanted, parents, staged)

    def adopt(self, fd: int, size_bytes: int) -> Region:
        assert size_bytes == self._memory.size
        if self.adopt_error is not None:
            raise self.adopt_error
        return Region(self._memory)

    def publish_queue(
        self, hints: Sequence[Hint], *, removed: Sequence[bytes], snapshot: bool, timeout_s: float
    ) -> QueueAccepted:
        assert not snapshot
        self.heard.append(([hint.job for hint in hints], list(removed)))
        return QueueAccepted((HintResult.ACCEPTED,) * len(hints), 3, 5)

    def touch(self, wanted: Sequence[ChunkKey]) -> bool:
        assert len(wanted) <= 4096
        self.touched.append(list(wanted))
        return True

    def apply_actions(
        self, actions: Sequence[HintAction], *, cancelled: Sequence[bytes], timeout_s: float
    ) -> ActionsApplied:
        if self.order_error is not None:
            raise self.order_error
        self.orders.append((list(actions), list(cancelled)))
        return ActionsApplied((HintResult.CLIPPED,) * len(actions), (1,) * len(actions))


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class Rig:
    """Six rows; a crew of one thread for everything."""

    def __init__(self, fd: int | None = 7, waiting_max: int = 8, **layout: Any) -> None:
        self.memory = np.arange(6 * ROW_BYTES, dtype=np.uint32).astype(np.uint8)
        self.store = Store(self.memory)
        self.away = False
        self.tally = Tally(COUNTERS)
        self.crew = Crew("test", threads=1, waiting_max=waiting_max)
        self.rows = Rows(memoryview(self.memory).cast("B", (6, ROW_BYTES)), fd, **layout)
        self.store.chunk_bytes = self.rows.chunk_bytes
        self.choice = ComputeOrLoad()
        self.lookups = Lookups(
            self.crew, self.opener, self.tally, self.choice, lambda wanted: TOKENS * len(wanted)
        )
        self.loader = RowLoader(self.rows, self.crew, self.opener, self.tally, self.choice)
        self.saver = RowSaver(self.rows, self.crew, self.opener, self.tally, rows_max=4, maker=MAKER)
        self.board = HintBoard(self.crew, self.opener, self.tally)
        self.orders = Orders(self.crew, self.opener, self.tally)
        self._numbers = iter(range(1000))

    def opener(self, timeout_s: float) -> Any:
        return None if self.away else self.store

    def row(self, number: int) -> bytes:
        return self.memory[number * ROW_BYTES : (number + 1) * ROW_BYTES].tobytes()

    def transfer(self, wanted: Sequence[ChunkKey], rows: Sequence[int], deadline: float = FAR) -> Transfer:
        return Transfer(next(self._numbers), wanted, rows, deadline)

    def save(self, wanted: Sequence[ChunkKey], rows: Sequence[int], deadline: float = FAR) -> Transfer:
        transfer = self.transfer(wanted, rows, deadline)
        self.saver.start(transfer, [ROOT] * len(wanted))
        return transfer

    def idle(self) -> None:
        done = threading.Event()
        assert self.crew.offer(done.set)
        assert done.wait(BOUND_S)

    def inquiry(self, lookup_s: float = 1.0, hold_s: float = 10.0) -> Inquiry:
        return Inquiry("request", 0, self.lookups, self.tally, lookup_s=lookup_s, hold_s=hold_s)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    _close(rig)


def _close(rig: Rig) -> None:
    for gate in (rig.store.may_read, rig.store.may_copy, rig.store.may_reserve, rig.store.may_fill):
        gate.set()
    assert rig.crew.close(BOUND_S)


# ---------------------------------------------------------------------------------------------------------- transfers


def test_a_job_is_told_of_once_when_it_has_ended(rig: Rig) -> None:
    transfer = rig.save(keys("a", "b"), [0, 1])
    assert transfer.ended.wait(BOUND_S)
    assert rig.saver.transfers.take(0.0) == [transfer]
    assert transfer.complete and not transfer.late
    assert rig.saver.transfers.take(FAR) == []
    assert rig.saver.transfers.rows == 0


def test_a_late_job_has_failed_and_its_rows_are_never_touched_again(rig: Rig) -> None:
    rig.store.chunks.update(zip(keys("a", "b"), (b"A" * ROW_BYTES, b"B" * ROW_BYTES), strict=True))
    inquiry = rig.inquiry()
    rig.store.may_read.clear()
    transfer = rig.transfer(keys("a", "b"), [2, 3], deadline=5.0)
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    before = rig.row(2), rig.row(3)
    assert rig.store.asked.wait(BOUND_S)
    assert rig.loader.transfers.take(4.9) == []
    assert rig.loader.transfers.take(5.0) == [transfer]
    assert transfer.late and not transfer.complete
    rig.store.may_read.set()
    rig.idle()
    assert (rig.row(2), rig.row(3)) == before
    assert all(lease.released for lease in rig.store.leases)


def test_a_row_that_is_being_copied_is_waited_for_not_by_the_engine(rig: Rig) -> None:
    rig.store.chunks.update(zip(keys("a", "b"), (b"A" * ROW_BYTES, b"B" * ROW_BYTES), strict=True))
    rig.store.may_copy.clear()
    transfer = rig.transfer(keys("a", "b"), [2, 3], deadline=5.0)
    rig.loader.start(transfer, *rig.inquiry().load(transfer.keys))
    assert rig.store.copying.wait(BOUND_S)
    assert rig.loader.transfers.take(100.0) == [], "vLLM would use a row that we write to"
    rig.store.may_copy.set()
    assert transfer.ended.wait(BOUND_S)
    assert rig.loader.transfers.take(100.0) == [transfer]
    assert transfer.complete and not transfer.late


def test_draining_ends_all_and_tells_the_truth(rig: Rig) -> None:
    rig.store.may_fill.clear()
    begun, waits = rig.save(keys("a"), [0]), rig.save(keys("b"), [1])
    assert rig.store.filling.wait(BOUND_S)
    assert rig.saver.transfers.drain(0.0) == [begun, waits]
    assert not begun.complete and not waits.complete
    assert not begun.hold() and not waits.hold()
    rig.store.may_fill.set()
    rig.idle()
    assert rig.store.chunks == {}, "what was read late must not become visible"


def test_more_rows_than_may_be_kept_from_the_engine_fail_at_once(rig: Rig) -> None:
    rig.store.may_fill.clear()
    first = rig.save(keys("a", "b", "c"), [0, 1, 2])
    second = rig.save(keys("d", "e"), [3, 4])
    assert rig.saver.transfers.take(0.0) == [second]
    assert not second.complete
    assert rig.tally.total["saves_dropped"] == 1 and rig.tally.total["blocks_dropped"] == 2
    third = rig.save(keys("f"), [5])
    rig.store.may_fill.set()
    assert first.ended.wait(BOUND_S) and third.ended.wait(BOUND_S)
    assert {transfer.number for transfer in rig.saver.transfers.take(0.0)} == {first.number, third.number}
    assert rig.save(keys("g"), [0]).ended.wait(BOUND_S)


def test_a_job_larger_than_that_is_taken_when_there_is_no_other(rig: Rig) -> None:
    transfer = rig.save(keys("a", "b", "c", "d", "e"), [0, 1, 2, 3, 4])
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete


def test_a_full_queue_fails_at_once() -> None:
    rig = Rig(waiting_max=1)
    rig.store.may_read.clear()
    first, second, third = (rig.transfer(keys("a"), [row]) for row in range(3))
    rig.loader.start(first, *rig.inquiry().load(first.keys))
    assert rig.store.asked.wait(BOUND_S)
    for transfer in (second, third):
        rig.loader.start(transfer, *rig.inquiry().load(transfer.keys))
    assert rig.loader.transfers.take(0.0) == [third]
    assert rig.tally.total["loads_dropped"] == 1
    _close(rig)


def test_a_job_that_could_not_begin_is_told_of(rig: Rig) -> None:
    rig.saver.transfers.fail(77)
    (transfer,) = rig.saver.transfers.take(0.0)
    assert transfer.number == 77 and not transfer.complete


def test_a_bug_in_a_thread_does_not_end_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    assert rig.crew.offer(lambda: 1 // 0)
    rig.idle()
    assert "ZeroDivisionError" in caplog.text


def test_a_crew_that_closes_drops_what_waits() -> None:
    crew = Crew("test", threads=1, waiting_max=8)
    entered, gate, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        entered.set()
        assert gate.wait(BOUND_S)

    assert crew.offer(first) and crew.offer(lambda: ran.append(1))
    assert entered.wait(BOUND_S)
    assert not crew.close(0.0)
    assert not crew.offer(lambda: ran.append(2))
    gate.set()
    assert crew.close(BOUND_S)
    assert ran == []


# -------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("fd", [7, None])
def test_rows_are_saved_as_they_are(fd: int | None) -> None:
    rig = Rig(fd)
    transfer = rig.transfer(keys("a", "b", "c"), [4, 0, 5])
    rig.store.chunks[ChunkKey(b"b")] = b"x" * ROW_BYTES
    rig.saver.start(transfer, [ROOT, *keys("a", "b")])
    assert transfer.ended.wait(BOUND_S)
    assert rig.store.chunks == dict(
        zip(keys("a", "b", "c"), (rig.row(4), b"x" * ROW_BYTES, rig.row(5)), strict=True)
    )
    assert rig.store.parents[ChunkKey(b"c")] == b"b"
    assert rig.store.touched == [keys("b")], "computed again, which was a use"
    assert transfer.complete
    assert rig.tally.total["blocks_saved"] == 2 and rig.tally.total["blocks_already"] == 1
    _close(rig)


def test_what_has_no_room_fails_alone(rig: Rig) -> None:
    rig.store.full.update(keys("b"))
    transfer = rig.save(keys("a", "b"), [0, 1])
    assert transfer.ended.wait(BOUND_S)
    assert transfer.done == [True, False] and not transfer.complete
    assert list(rig.store.chunks) == keys("a")
    assert rig.tally.total["blocks_refused"] == 1


def test_what_has_no_room_yet_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for new weights, whose first segment is another namespace's until all have unmapped it."""
    rig.store.full.update(keys("a", "b"))
    asked: list[list[ChunkKey]] = []
    write = rig.store.write

    def noting(wanted: Sequence[ChunkKey], **named: Any) -> Batch:
        asked.append(list(wanted))
        batch = write(wanted, **named)
        rig.store.full.clear()
        return batch

    monkeypatch.setattr(rig.store, "write", noting)
    transfer = rig.save(keys("a", "b"), [0, 1])
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete and asked == [keys("a", "b")] * 2
    assert (rig.tally.total["blocks_saved"], rig.tally.total["blocks_refused"]) == (2, 0)


def test_less_staging_memory_than_a_part_needs_takes_more_parts() -> None:
    rig = Rig(fd=None)
    rig.store.staging = 2
    rig.store.full.update(keys("c"))
    wanted = keys("a", "b", "c", "d", "e", "f")
    transfer = rig.save(wanted, range(6))
    assert transfer.ended.wait(BOUND_S)
    assert transfer.done == [True, True, False, True, True, True]
    assert [
        rig.store.chunks.get(key) == rig.row(number) for number, key in enumerate(wanted)
    ] == transfer.done
    assert rig.tally.total["blocks_saved"] == 5 and rig.tally.total["blocks_refused"] == 1
    _close(rig)


def test_rows_read_after_the_job_was_over_stay_invisible(rig: Rig) -> None:
    """A daemon that was stopped reads rows that hold another chunk by then."""
    rig.store.may_fill.clear()
    transfer = rig.save(keys("a"), [0], deadline=5.0)
    assert rig.store.filling.wait(BOUND_S)
    assert rig.saver.transfers.take(5.0) == [transfer] and transfer.late
    rig.memory[:ROW_BYTES] = 0xAB
    rig.store.may_fill.set()
    rig.idle()
    assert rig.store.chunks == {}
    assert transfer.done == [False]


def test_staged_rows_are_not_read_once_the_job_is_over() -> None:
    rig = Rig(fd=None)
    rig.store.may_reserve.clear()
    transfer = rig.save(keys("a"), [0], deadline=5.0)
    assert rig.store.reserving.wait(BOUND_S)
    assert rig.saver.transfers.take(5.0) == [transfer]
    rig.store.may_reserve.set()
    rig.idle()
    assert rig.store.chunks == {} and rig.store.copied == []
    _close(rig)


@pytest.mark.parametrize("what", ["error", "fill_error", "commit_error", "away"])
def test_a_store_that_fails_is_a_failed_job(rig: Rig, what: str) -> None:
    setattr(rig, "away", True) if what == "away" else setattr(rig.store, what, Unavailable("gone"))
    transfer = rig.save(keys("a"), [0])
    assert transfer.ended.wait(BOUND_S)
    assert rig.saver.transfers.take(0.0) == [transfer]
    assert not transfer.complete and rig.store.chunks == {}
    rig.away = False
    rig.store.error = rig.store.fill_error = rig.store.commit_error = None
    again = rig.save(keys("a"), [0])
    assert again.ended.wait(BOUND_S) and again.complete


@pytest.mark.parametrize("what", ["adopt_error", "fill_error"])
def test_memory_that_the_daemon_cannot_read_goes_through_staging(rig: Rig, what: str) -> None:
    setattr(rig.store, what, BadRequest("no file in memory"))
    first = rig.save(keys("a"), [0])
    assert first.ended.wait(BOUND_S)
    second = rig.save(keys("b"), [1])
    assert second.ended.wait(BOUND_S)
    assert second.complete and rig.store.chunks[ChunkKey(b"b")] == rig.row(1)


# ----------------------------------------------------------------------------------------------------------- looking up


def test_a_question_is_asked_once_for_all_new_keys(rig: Rig) -> None:
    rig.store.chunks.update(dict.fromkeys(keys("a", "c"), b"v" * ROW_BYTES))
    inquiry = rig.inquiry()
    wanted = keys("a", "b", "c")
    assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [Verdict.WAIT] * 3
    inquiry.ask(0.0, prefix=False)
    rig.idle()
    assert [inquiry.verdict(key, 0.1, keys_max=9) for key in wanted] == [
        Verdict.HIT,
        Verdict.MISS,
        Verdict.HIT,
    ]
    assert rig.tally.total["lookups"] == 3 and len(rig.store.leases) == 1
    inquiry.ask(0.1, prefix=False)
    rig.idle()
    assert len(rig.store.leases) == 1


def test_behind_a_hole_a_prefix_has_nothing(rig: Rig) -> None:
    rig.store.chunks.update(dict.fromkeys(keys("a", "c"), b"v" * ROW_BYTES))
    inquiry = rig.inquiry()
    for key in keys("a", "b", "c"):
        inquiry.verdict(key, 0.0, keys_max=9)
    inquiry.ask(0.0, prefix=True)
    rig.idle()
    assert inquiry.verdict(ChunkKey(b"c"), 0.1, keys_max=9) is Verdict.MISS


def test_what_rises_is_waited_for_and_the_rest_stays_pinned(rig: Rig) -> None:
    rig.store.chunks.update(dict.fromkeys(keys("a", "b"), b"v" * ROW_BYTES))
    rig.store.promoting.update(keys("b"))
    inquiry = rig.inquiry()
    for key in keys("a", "b"):
        inquiry.verdict(key, 0.0, keys_max=9)
    inquiry.ask(0.0, prefix=True)
    rig.idle()
    assert [inquiry.verdict(key, 0.1, keys_max=9) for key in keys("a", "b")] == [Verdict.HIT] * 2
    assert len(rig.store.leases) == 2 and not any(lease.released for lease in rig.store.leases)


def test_a_late_answer_is_a_miss_and_given_back(rig: Rig) -> None:
    rig.store.chunks.update(dict.fromkeys(keys("a"), b"v" * ROW_BYTES))
    rig.store.may_read.clear()
    inquiry = rig.inquiry(lookup_s=1.0)
    (key,) = keys("a")
    assert inquiry.verdict(key, 10.0, keys_max=9) is Verdict.WAIT
    inquiry.ask(10.0, prefix=True)
    assert rig.store.asked.wait(BOUND_S)
    assert inquiry.verdict(key, 10.9, keys_max=9) is Verdict.WAIT
    assert inquiry.verdict(key, 11.0, keys_max=9) is Verdict.MISS
    inquiry.tick(11.0)
    rig.store.may_read.set()
    rig.idle()
    assert inquiry.verdict(key, 11.1, keys_max=9) is Verdict.MISS
    assert rig.tally.total["lookups_late"] == 1
    assert all(lease.released for lease in rig.store.leases)
    assert inquiry.verdict(ChunkKey(b"other"), 11.1, keys_max=9) is Verdict.MISS, "its time is up for all"


def test_too_many_questions_are_misses() -> None:
    rig = Rig(waiting_max=1)
    rig.store.may_read.clear()
    inquiries = [rig.inquiry() for _ in range(3)]
    (key,) = keys("a")
    for number, inquiry in enumerate(inquiries):
        inquiry.verdict(key, 0.0, keys_max=9)
        inquiry.ask(0.0, prefix=True)
        if number == 0:
            assert rig.store.asked.wait(BOUND_S)
    assert [inquiry.verdict(key, 0.1, keys_max=9) for inquiry in inquiries] == [
        Verdict.WAIT,
        Verdict.WAIT,
        Verdict.MISS,
    ]
    assert rig.tally.total["lookups_dropped"] == 1
    _close(rig)


def test_no_more_is_asked_than_the_engine_could_hold(rig: Rig) -> None:
    inquiry = rig.inquiry()
    verdicts = [inquiry.verdict(key, 0.0, keys_max=2) for key in keys("a", "b", "c")]
    assert verdicts == [Verdict.WAIT, Verdict.WAIT, Verdict.MISS]


def found(rig: Rig, inquiry: Inquiry, wanted: Sequence[ChunkKey]) -> None:
    for number, key in enumerate(wanted):
        rig.store.chunks[key] = bytes([number + 1]) * ROW_BYTES
        inquiry.verdict(key, 0.0, keys_max=9)
    inquiry.ask(0.0, prefix=True)
    rig.idle()


# -------------------------------------------------------------------------------------------------------------- loading


def test_what_was_found_is_loaded_from_its_pins(rig: Rig) -> None:
    inquiry = rig.inquiry()
    wanted = keys("a", "b")
    found(rig, inquiry, wanted)
    transfer = rig.transfer(wanted, [5, 1])
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    assert transfer.ended.wait(BOUND_S)
    assert (rig.row(5), rig.row(1)) == (b"\1" * ROW_BYTES, b"\2" * ROW_BYTES)
    assert transfer.complete and len(rig.store.leases) == 1, "nothing was asked again"
    assert not rig.store.leases[0].released
    inquiry.scheduled()
    assert rig.store.leases[0].released


def test_a_load_keeps_the_pins_of_a_request_that_has_ended(rig: Rig) -> None:
    inquiry = rig.inquiry()
    found(rig, inquiry, keys("a"))
    rig.store.may_copy.clear()
    transfer = rig.transfer(keys("a"), [0])
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    assert rig.store.copying.wait(BOUND_S)
    inquiry.scheduled()
    assert not rig.store.leases[0].released
    rig.store.may_copy.set()
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete and rig.store.leases[0].released


def test_pins_held_too_long_go_and_the_load_looks_again(rig: Rig) -> None:
    inquiry = rig.inquiry(lookup_s=1.0, hold_s=10.0)
    found(rig, inquiry, keys("a"))
    inquiry.tick(10.9)
    assert not rig.store.leases[0].released
    inquiry.tick(11.0)
    assert rig.store.leases[0].released
    transfer = rig.transfer(keys("a"), [0])
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete and rig.row(0) == b"\1" * ROW_BYTES
    assert rig.store.leases[1].released


def test_a_void_copy_fails_alone_and_is_not_tried_for_ever(rig: Rig) -> None:
    inquiry = rig.inquiry()
    wanted = keys("a", "b")
    found(rig, inquiry, wanted)
    rig.store.void.update(keys("b"))
    transfer = rig.transfer(wanted, [0, 1])
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    assert transfer.ended.wait(BOUND_S)
    assert transfer.done == [True, False]
    assert rig.tally.total["blocks_loaded"] == 1 and rig.tally.total["blocks_failed"] == 1
    assert inquiry.verdict(wanted[1], 0.2, keys_max=9) is Verdict.MISS
    assert inquiry.verdict(wanted[0], 0.2, keys_max=9) is Verdict.MISS, "vLLM has it, or had"
    inquiry.again()
    assert inquiry.verdict(wanted[0], 0.3, keys_max=9) is Verdict.WAIT


def test_a_store_that_went_away_fails_the_load(rig: Rig) -> None:
    transfer = rig.transfer(keys("a"), [0])
    rig.away = True
    rig.loader.start(transfer, *rig.inquiry().load(transfer.keys))
    assert transfer.ended.wait(BOUND_S)
    assert rig.loader.transfers.take(0.0) == [transfer] and not transfer.complete


def test_what_the_directory_knows_is_answered_at_once(rig: Rig) -> None:
    """Nobody is asked and nothing pinned, so the load looks; it tells how fast copies are all the same."""
    rig.store.chunks.update(zip(keys("a", "b"), (b"\1" * ROW_BYTES, b"\2" * ROW_BYTES), strict=True))
    wanted = keys("a", "b", "c")
    inquiry = rig.inquiry(lookup_s=1.0)
    for number in range(2):
        inquiry.look(rig.store, wanted, 0.0, busy_s=3.0)
        assert not rig.store.asked.is_set()
        assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [HIT, HIT, MISS]
        assert not inquiry.new
        transfer = rig.transfer(wanted[:2], [3, 2])
        rig.loader.start(transfer, *inquiry.load(transfer.keys))
        assert transfer.ended.wait(BOUND_S)
        assert transfer.complete and (rig.row(3), rig.row(2)) == (b"\1" * ROW_BYTES, b"\2" * ROW_BYTES)
        rig.idle()
        assert rig.choice.copy.known == bool(number), "the first pays for what is done once"
        inquiry.again()
        rig.store.asked.clear()
    assert rig.tally.total["lookups"] == 6
    assert rig.store.noted == [(wanted, 2)] * 2, "the daemon hears of the miss too, once for each request"


def test_what_the_directory_does_not_know_is_asked(rig: Rig) -> None:
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    inquiry = rig.inquiry()
    rig.store.directory = False
    inquiry.look(rig.store, wanted, 0.0)
    assert inquiry.unasked
    rig.store.directory = True
    rig.store.promoting.add(wanted[1])  # it is on SSD, and nobody has told how fast that is
    learn(rig)
    inquiry.look(rig.store, wanted, 0.0)
    assert inquiry.unasked and inquiry.verdict(wanted[0], 0.0, keys_max=9) is Verdict.WAIT
    assert not rig.store.noted
    inquiry.ask(0.0, prefix=True)
    rig.idle()
    assert rig.choice.ssd_bytes_per_s == rig.store.ssd_bytes_per_s, "now it has"


def test_what_is_on_ssd_is_answered_at_once_and_the_load_waits_for_it(rig: Rig) -> None:
    """Of a prefix in both tiers; and what it waits for counts for who asks next."""
    wanted = keys("a", "b", "c", "d")
    rig.store.chunks.update(dict.fromkeys(wanted, b"\1" * ROW_BYTES))
    rig.store.promoting.update((wanted[1], wanted[3]))
    learn(rig)
    rig.choice.reads_from_ssd(1e9)
    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, 0.0)
    assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [HIT] * 4
    assert not rig.store.asked.is_set() and not rig.store.promotions and not inquiry.new
    rig.store.may_read.clear()
    transfer = rig.transfer(wanted, [0, 1, 2, 3])
    rig.loader.start(transfer, *inquiry.load(wanted))
    assert rig.loader.transfers.cold == 2
    rig.store.may_read.set()
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete and rig.row(3) == b"\1" * ROW_BYTES
    assert all(lease.released for lease in rig.store.leases)
    # Reading 2 of them takes 2 x 64 ns; the load may take half as long again, and some time to be looked at.
    assert rig.store.waits_ms and max(rig.store.waits_ms) <= 1000 * SLACK_S
    assert rig.loader.transfers.take(0.0) == [transfer] and not rig.loader.transfers.cold


def test_an_answer_of_the_directory_is_looked_up_again_after_a_while(rig: Rig) -> None:
    """Of a request that waits for room: others may have saved what it begins with. Not in mid-question, and not once
    something of it is loaded."""
    wanted = keys("a", "b")
    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, 1.0)
    assert inquiry.verdict(wanted[0], 1.0, keys_max=9) is MISS
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    assert not inquiry.outdated(wanted[0], 1.0 + FRESH_S)
    assert not inquiry.outdated(wanted[1], 2.0), "it begins with another one"
    assert inquiry.outdated(wanted[0], 2.0) and inquiry.unasked
    inquiry.look(rig.store, wanted, 2.0)
    assert [inquiry.verdict(key, 2.0, keys_max=9) for key in wanted] == [HIT, HIT]
    assert rig.store.noted == [(wanted, 0)], "once for each request"
    transfer = rig.transfer(wanted, [0, 1])
    rig.loader.start(transfer, *inquiry.load(wanted))
    assert transfer.ended.wait(BOUND_S)
    assert not inquiry.outdated(wanted[0], 9.0)


def test_what_the_daemon_was_asked_about_is_not_looked_up_again(rig: Rig) -> None:
    """It is pinned, or on its way."""
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    inquiry = rig.inquiry()
    found(rig, inquiry, wanted)
    assert not inquiry.outdated(wanted[0], FAR)


def test_what_comes_from_ssd_too_late_is_computed_at_once(rig: Rig) -> None:
    """Because it is far, or because others are read before."""
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    rig.store.promoting.add(wanted[1])
    learn(rig)
    for speed, ahead, second in ((1e9, 0, HIT), (1.0, 0, MISS), (1e9, 1 << 30, MISS)):
        rig.choice.reads_from_ssd(speed)
        inquiry = rig.inquiry()
        rig.choice._patience[Tier.SSD].lose(0.0)  # it was tried just now
        inquiry.look(rig.store, wanted, 0.0, ahead=ahead)
        assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [HIT, second]
        inquiry.again()


def test_of_several_groups_only_what_is_needed_is_found_at_once(rig: Rig) -> None:
    wanted = keys("a", "b", "c", "d")
    rig.store.chunks.update(dict.fromkeys(wanted[1:], b"\2" * ROW_BYTES))
    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, 0.0, needed=lambda there: sorted(there)[1:])
    assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [MISS, MISS, HIT, HIT]
    assert rig.store.noted == [(wanted[2:], 2)], "which of the others was missed nobody knows"
    transfer = rig.transfer(wanted[2:], [0, 1])
    rig.loader.start(transfer, *inquiry.load(transfer.keys))
    assert transfer.ended.wait(BOUND_S)
    assert transfer.complete and rig.row(1) == b"\2" * ROW_BYTES


def test_where_the_ssd_is_too_slow_a_nearer_boundary_is_taken(rig: Rig) -> None:
    """A part of what a boundary needs is of no use: what is in DRAM alone may be enough for one before it."""
    wanted = keys("a", "b", "c")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    rig.store.promoting.add(wanted[2])
    learn(rig)
    rig.choice.reads_from_ssd(1.0)
    rig.choice._patience[Tier.SSD].lose(0.0)

    def needed(there: Collection[ChunkKey]) -> list[ChunkKey]:
        return wanted[1:] if wanted[2] in there else wanted[:1]

    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, 0.0, needed=needed)
    assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [HIT, MISS, MISS]


def test_what_the_directory_knew_may_be_gone_when_it_is_loaded(rig: Rig) -> None:
    wanted = keys("a", "b", "c")
    rig.store.chunks.update(dict.fromkeys(wanted, b"\1" * ROW_BYTES))
    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, 0.0)
    del rig.store.chunks[wanted[1]]
    rig.store.promoting.add(wanted[2])  # it has gone to SSD: the load waits for it
    transfer = rig.transfer(wanted, [0, 1, 2])
    rig.loader.start(transfer, *inquiry.load(wanted))
    assert transfer.ended.wait(BOUND_S)
    assert transfer.done == [True, False, True] and rig.row(2) == b"\1" * ROW_BYTES
    assert all(lease.released for lease in rig.store.leases)


def test_what_is_slower_to_copy_than_to_compute_is_no_hit_at_once_either(rig: Rig) -> None:
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    learn(rig, tokens_per_s=1e9, copy_bytes_per_s=1.0)
    inquiry = rig.inquiry()
    inquiry.look(rig.store, wanted, time.monotonic())
    assert inquiry.verdict(wanted[0], time.monotonic(), keys_max=9) is Verdict.MISS
    assert rig.tally.total["computed"] == 2


# --------------------------------------------------------------------------------------------------------------- hints


def test_the_nearest_are_told_first_and_taken_back(rig: Rig) -> None:
    assert rig.board.add("late", 7, keys("b") * 4000)
    assert rig.board.add("early", 3, keys("a") * 200)
    rig.board.flush()
    rig.idle()
    assert rig.store.heard == [([b"early"], [])], "a message has 4,096 keys at most"
    rig.board.remove("early")
    rig.board.flush()
    rig.idle()
    assert rig.store.heard[1] == ([b"late"], [b"early"])
    rig.board.flush()
    rig.idle()
    assert len(rig.store.heard) == 2
    assert rig.board.windows == (3, 5) and rig.tally.total["hints_published"] == 2


def test_hints_that_wait_to_be_told_are_bounded(rig: Rig) -> None:
    assert all(rig.board.add(f"job {number}", number, keys("a")) for number in range(256))
    assert not rig.board.add("one more", 0, keys("a"))
    assert rig.board.add("job 3", 3, keys("a")), "moving one takes no room"
    rig.board.clear()
    rig.board.flush()
    rig.idle()
    assert rig.store.heard == []


def test_a_daemon_that_is_back_hears_what_is_still_true(rig: Rig) -> None:
    rig.away = True
    assert rig.board.add("job", 0, keys("a")) and rig.board.add("other", 0, keys("a"))
    rig.board.flush()
    rig.idle()
    assert rig.store.heard == []
    rig.board.remove("other")
    rig.away = False
    rig.board.flush()
    rig.idle()
    assert rig.store.heard == [([b"job"], [b"other"])]
    for number in range(5000):
        rig.board.remove(str(number))
    rig.board.flush()
    rig.idle()
    assert len(rig.store.heard[1][1]) == 4096


# -------------------------------------------------------------------------------------------------- orders and touches


def order(name: str, *named: str) -> Order:
    return Order(name, ActionKind.PIN, tuple(keys(*named)), ttl_ms=7)


def test_what_was_used_and_what_is_ordered_is_told_together(rig: Rig) -> None:
    answers: list[tuple[str, HintResult, int]] = []
    rig.orders.touch(keys("a", "b"))
    rig.orders.touch(())
    rig.orders.touch(keys("c"))
    for name in ("one", "two"):
        assert rig.orders.add(
            order(name, "a"), lambda result, chunks, name=name: answers.append((name, result, chunks))
        )
    rig.orders.cancel("two")
    rig.orders.cancel("earlier")
    rig.orders.flush()
    rig.idle()
    assert rig.store.touched == [keys("a", "b", "c")]
    ((actions, cancelled),) = rig.store.orders
    assert actions == [HintAction(b"one", ActionKind.PIN, keys=tuple(keys("a")), ttl_ms=7)]
    assert cancelled == [b"earlier", b"two"]
    assert answers == [("one", HintResult.CLIPPED, 1)]
    assert rig.tally.total["blocks_touched"] == 3
    rig.orders.flush()
    rig.idle()
    assert len(rig.store.orders) == 1


def test_many_orders_go_in_several_messages_and_many_keys_too(rig: Rig) -> None:
    many = tuple(ChunkKey(b"%d" % number) for number in range(4096))
    rig.orders.touch((*many, *keys("a")))
    answers: list[int] = []
    for number in range(70):
        rig.orders.add(order(str(number), "a"), lambda result, chunks: answers.append(chunks))
    rig.orders.flush()
    for _ in range(3):
        rig.idle()
    assert [len(part) for part in rig.store.touched] == [4096, 1]
    assert [len(actions) for actions, _ in rig.store.orders] == [64, 6] and len(answers) == 70


def test_orders_that_nobody_hears_are_rejected(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[HintResult] = []
    rig.store.order_error = Unavailable("away")
    rig.orders.add(order("one", "a"), lambda result, chunks: answers.append(result))
    rig.orders.flush()
    rig.idle()
    assert answers == [HintResult.REJECTED]
    rig.away = True
    rig.orders.add(order("two", "a"), lambda result, chunks: answers.append(result))
    rig.orders.touch(keys("a"))
    rig.orders.flush()
    rig.idle()
    assert len(answers) == 1, "the store may come"
    monkeypatch.setattr(orders_module, "PATIENCE_S", -1.0)
    rig.orders.flush()
    rig.idle()
    assert answers == [HintResult.REJECTED] * 2
    rig.away, rig.store.order_error = False, None
    rig.orders.flush()
    rig.idle()
    assert rig.store.touched == [keys("a")]


def test_what_waits_to_be_told_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "TOUCHED_MAX", 3)
    for names in ("ab", "cd"):
        rig.orders.touch(keys(*names))
    assert rig.tally.total["blocks_untold"] == 2, "the oldest"
    assert all(rig.orders.add(order(str(number), "a"), print) for number in range(1_024))
    assert not rig.orders.add(order("one more", "a"), print)
    rig.orders.clear()
    rig.orders.flush()
    rig.idle()
    assert rig.store.touched == rig.store.orders == []


def test_the_last_request_of_each_session_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = Chains()
    chains.put("a", tuple(keys("1", "2")))
    chains.put("a", tuple(keys("1")))
    assert chains.get("a") == tuple(keys("1")) and chains.get("b") == ()
    monkeypatch.setattr(orders_module, "SESSION_KEYS_MAX", 2)
    chains.put("b", tuple(keys("1", "2")))
    assert chains.get("a") == () and len(chains) == 1
    monkeypatch.setattr(orders_module, "SESSIONS_MAX", 1)
    chains.put("c", ())
    assert chains.get("b") == () and len(chains) == 1
    chains.clear()
    assert len(chains) == 0


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_let_go_of_the_engines_memory() -> None:
    memory = bytearray(4 * ROW_BYTES)
    view = memoryview(memory).cast("b", (4, ROW_BYTES))
    rows = Rows(view)
    rows.row(2)[:] = 7
    assert memory[2 * ROW_BYTES : 3 * ROW_BYTES] == b"\7" * ROW_BYTES
    view.release()
    with pytest.raises(BufferError):
        memory.clear()
    rows.close()
    memory.clear()
    with pytest.raises(AssertionError):
        rows.row(0)


def test_a_tally_counts_what_it_knows() -> None:
    tally = Tally({"a": "", "b": ""})
    tally.add(a=2, b=0)
    tally.add(a=1)
    assert tally.take() == {"a": 3} and tally.take() == {} and tally.total["a"] == 3
    with pytest.raises(AssertionError):
        tally.add(c=1)


# -------------------------------------------------------------------------------------------------- load or compute


def asked(rig: Rig, wanted: Sequence[ChunkKey], *, prefix: bool = True) -> list[Verdict]:
    inquiry = rig.inquiry()
    for key in wanted:
        inquiry.verdict(key, time.monotonic(), keys_max=9)
    inquiry.ask(time.monotonic(), prefix=prefix)
    rig.idle()
    verdicts = [inquiry.verdict(key, time.monotonic(), keys_max=9) for key in wanted]
    inquiry.again()
    return verdicts


def learn(rig: Rig, *, tokens_per_s: float = 1_000, copy_bytes_per_s: float = 1e9) -> None:
    for count in (1, 10, 1_000, 10, 1_000, 10):  # the first does not count
        rig.choice.compute.observe(count, count / tokens_per_s)
        rig.choice.copy.observe(count * ROW_BYTES, count * ROW_BYTES / copy_bytes_per_s)


HIT, MISS = Verdict.HIT, Verdict.MISS


@pytest.mark.parametrize("prefix", [True, False])
def test_what_is_on_a_slow_ssd_is_computed(rig: Rig, prefix: bool) -> None:
    wanted = keys("a", "b", "c")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    rig.store.promoting.update(wanted[1:])
    rig.store.ssd_bytes_per_s = ROW_BYTES
    learn(rig)
    assert asked(rig, wanted, prefix=prefix) == [HIT, MISS, MISS]
    assert rig.store.promotions == 0
    assert rig.tally.total["computed"] == 2
    rig.store.ssd_bytes_per_s = 1 << 30
    assert asked(rig, wanted, prefix=prefix) == [HIT] * 3


def test_in_any_order_what_is_in_memory_counts_wherever_it_is(rig: Rig) -> None:
    """Of several groups of layers, say: one key that is on SSD is no reason to leave the others."""
    wanted = keys("a", "b", "c")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    rig.store.promoting.add(wanted[0])
    rig.store.ssd_bytes_per_s = ROW_BYTES
    learn(rig)
    assert asked(rig, wanted, prefix=False) == [MISS, HIT, HIT]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_a_request_says_what_it_waited_for(rig: Rig, tier: Tier) -> None:
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    if tier is Tier.SSD:
        rig.store.promoting.update(wanted)
    learn(rig)
    inquiry = rig.inquiry()
    for key in wanted:
        inquiry.verdict(key, time.monotonic(), keys_max=9)
    inquiry.ask(time.monotonic(), prefix=True, busy_s=3.0)
    assert inquiry.delay().tier is None
    rig.idle()
    delay = inquiry.delay()
    assert (delay.tier, delay.busy_s) == (tier, 3.0)
    rig.choice.delayed(delay, delay.since + delay.expected_s + 0.2, busy_s=3.1)
    assert rig.choice._late_s[tier] > 0
    assert inquiry.delay().tier is None, "it counts once"
    inquiry.scheduled()


def test_what_is_copied_slower_than_computed_is_computed(rig: Rig) -> None:
    wanted = keys("a", "b")
    rig.store.chunks.update(dict.fromkeys(wanted, bytes(ROW_BYTES)))
    learn(rig, tokens_per_s=1e9, copy_bytes_per_s=1.0)
    assert asked(rig, wanted) == [MISS, MISS]


def test_a_row_that_comes_too_late_is_given_up(rig: Rig) -> None:
    wanted = keys("a")
    rig.store.chunks[wanted[0]] = bytes(ROW_BYTES)
    learn(rig)
    inquiry = rig.inquiry()
    inquiry.verdict(wanted[0], time.monotonic(), keys_max=9)
    inquiry.ask(time.monotonic(), prefix=True)
    rig.idle()
    hits, questions = inquiry.load(wanted)
    transfer = rig.transfer(wanted, [0])
    rig.loader.start(transfer, hits, questions)
    assert transfer.deadline == transfer.begun + max(BOUND_MIN_S, rig.choice.saves(TOKENS))
    assert transfer.ended.wait(BOUND_S)
    inquiry.again()


def test_copies_tell_how_fast_they_are(rig: Rig) -> None:
    wanted = keys("a")
    rig.store.chunks[wanted[0]] = bytes(ROW_BYTES)
    for number in range(2):
        assert not rig.choice.copy.known, "the first pays for what is done once"
        inquiry = rig.inquiry()
        inquiry.verdict(wanted[0], time.monotonic(), keys_max=9)
        inquiry.ask(time.monotonic(), prefix=True)
        rig.idle()
        transfer = rig.transfer(wanted, [number])
        rig.loader.start(transfer, *inquiry.load(wanted))
        assert transfer.ended.wait(BOUND_S)
        rig.idle()
        inquiry.again()
    assert rig.choice.copy.known


@pytest.mark.parametrize("fd", [7, None])
def test_what_ranks_share_is_stored_once(fd: int | None) -> None:
    """Four parts of a row, two and two the same; of one row they are not, whatever the engine says."""
    part = ROW_BYTES // 4
    rig = Rig(fd, copies=((0, part), (2 * part, 3 * part)), part_bytes=part)
    rows = rig.memory.reshape(6, 4, part)
    rows[:, 1], rows[:, 3] = rows[:, 0], rows[:, 2]
    rows[2, 3, 5] += 1
    wanted = keys("a", "b", "c")
    transfer = rig.save(wanted, [0, 1, 2])
    rig.idle()
    assert transfer.done == [True, True, False]
    assert rig.store.chunks[wanted[0]] == rows[0, 0].tobytes() + rows[0, 2].tobytes()
    assert wanted[2] not in rig.store.chunks
    total = rig.tally.total
    assert (total["replicas_differ"], total["blocks_refused"]) == (1, 1)
    assert total["bytes_saved"] == total["bytes_shared"] == 2 * 2 * part

    load = rig.transfer(wanted[:2], [4, 5])
    rig.loader.start(load, [None, None], [])
    rig.idle()
    assert load.complete and rig.tally.total["bytes_loaded"] == 2 * 2 * part
    assert (rows[4] == rows[0]).all() and (rows[5] == rows[1]).all()
    _close(rig)


def test_only_what_is_needed_is_pinned(rig: Rig) -> None:
    wanted = keys("a", "b", "c", "d")
    rig.store.chunks.update(dict.fromkeys(wanted[:3], bytes(ROW_BYTES)))
    told: list[set[ChunkKey]] = []

    def needed(there: Any) -> list[ChunkKey]:
        told.append(set(there))
        return wanted[1:2]

    inquiry = rig.inquiry()
    for key in wanted:
        assert inquiry.verdict(key, 0.0, keys_max=9) is Verdict.WAIT
    assert inquiry.new == tuple(wanted)
    inquiry.ask(0.0, prefix=False, needed=needed)
    rig.idle()
    assert told == [set(wanted[:3])]
    assert [inquiry.verdict(key, 0.0, keys_max=9) for key in wanted] == [
        Verdict.MISS,
        Verdict.HIT,
        Verdict.MISS,
        Verdict.MISS,
    ]
    assert inquiry.keys == (wanted[1],)
    inquiry.scheduled()
