"""The copier: right bytes, right checksums, one answer for every op, an end in bounded time."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash

from kvstore import memory
from kvstore.core.events import Checksum, CopyIn, FillSlots, MoveSlots, OpDone, OpFailed
from kvstore.tiers import copier as copier_module
from kvstore.tiers.arena import Arena, Staging
from kvstore.tiers.copier import Copier, Task
from kvstore.tiers.regions import Regions
from kvstore.types import Extent, OpId, Protection, SegmentId, StagedPiece, WorkerId

SIZE = 8 << 20
SLOT = 64 << 10
ONE, TWO = SegmentId(1), SegmentId(2)
WORKER = WorkerId(1)
WAIT_S = 30.0

Ended = OpDone | OpFailed


class Fixture:
    """A copier over two segments and one worker's staging memory, full of noise."""

    def __init__(self) -> None:
        self.arena = Arena(protection=Protection.SEALED, boot_id=bytes(16), huge_pages=False, prefault=False)
        for segment in (ONE, TWO):
            self.arena.create(segment, SIZE, SIZE // 4096)
        self.staging = Staging(bytes_max=SIZE)
        fd, _ = self.staging.create(WORKER, SIZE)
        self.worker = memory.map_shared(fd, SIZE, writable=True)
        os.close(fd)
        self.worker.array[:] = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
        self.regions = Regions()
        self.copier = Copier(self.arena, self.staging, self.regions, threads=2)
        self.answers: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def run(self, effect: Task) -> Ended:
        self.copier.submit(effect, self.answers.put)
        return self.answers.get(timeout=WAIT_S)

    def staged(self, offset: int, length: int) -> bytes:
        return bytes(self.worker.array[offset : offset + length])


@pytest.fixture
def it() -> Iterator[Fixture]:
    it = Fixture()
    yield it
    it.copier.close(WAIT_S)
    it.regions.close(WAIT_S)
    it.staging.close()
    it.arena.close()


def slot(segment: SegmentId, offset: int, length: int = SLOT) -> Extent:
    return Extent(segment, offset, length, cell=offset // 4096, generation=1)


def copy_in(*pairs: tuple[StagedPiece, Extent], worker: WorkerId = WORKER, op: int = 1) -> CopyIn:
    return CopyIn(OpId(op), worker, tuple(piece for piece, _ in pairs), tuple(target for _, target in pairs))


def test_staged_pieces_go_into_their_slots(it: Fixture) -> None:
    pairs = [
        (StagedPiece(5, 1000), slot(TWO, 0, 1000)),
        (StagedPiece(SIZE - SLOT, SLOT), slot(ONE, SIZE - SLOT)),
        (StagedPiece(0, SLOT), slot(ONE, SLOT)),
    ]
    answer = it.run(copy_in(*pairs))
    expected = [it.staged(piece.offset, piece.length) for piece, _ in pairs]
    assert answer == OpDone(OpId(1), tuple(xxhash.xxh3_64_intdigest(data) for data in expected))
    for (_, target), data in zip(pairs, expected, strict=True):
        assert bytes(it.arena.view(target.segment, target.offset, target.length)) == data
    # and nothing else was touched
    assert not it.arena.view(TWO, 1000, SIZE - 1000).any()
    assert not it.arena.view(ONE, 2 * SLOT, SIZE - 3 * SLOT).any()


@pytest.mark.parametrize("length", [1, 4095, 8191, 8192, 8193, 16_384, 100_000])
def test_ragged_lengths_around_the_step(it: Fixture, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(copier_module, "BLOCK_BYTES", 8192)
    answer = it.run(copy_in((StagedPiece(3, length), slot(ONE, 4096, length))))
    data = it.staged(3, length)
    assert answer == OpDone(OpId(1), (xxhash.xxh3_64_intdigest(data),))
    assert bytes(it.arena.view(ONE, 4096, length)) == data
    assert it.arena.view(ONE, 4096 + length, 64).sum() == 0
    assert it.run(Checksum(OpId(2), (slot(ONE, 4096, length),))) == OpDone(OpId(2), answer.checksums)


def test_slots_move_and_are_checksummed(it: Fixture) -> None:
    for offset in (0, SLOT):
        it.arena.view(ONE, offset, SLOT)[:] = it.worker.array[offset : offset + SLOT]
    sources = (slot(ONE, 0), slot(ONE, SLOT))
    targets = (slot(TWO, SLOT), slot(TWO, 0))
    sums = tuple(xxhash.xxh3_64_intdigest(it.staged(offset, SLOT)) for offset in (0, SLOT))
    assert it.run(MoveSlots(OpId(3), sources, targets)) == OpDone(OpId(3), sums)
    assert it.run(Checksum(OpId(4), (*targets, *sources))) == OpDone(OpId(4), sums + sums)
    assert it.run(Checksum(OpId(5), ())) == OpDone(OpId(5), ())


def test_the_checksum_is_of_what_was_stored(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker goes on scribbling over its staging memory after it asked for a commit."""
    monkeypatch.setattr(copier_module, "BLOCK_BYTES", SLOT)
    first = it.staged(0, SLOT)
    real = memory.copy

    def copy_then_scribble(target: np.ndarray, source: np.ndarray) -> None:
        real(target, source)
        it.worker.array[: 2 * SLOT] = 1

    monkeypatch.setattr(memory, "copy", copy_then_scribble)
    answer = it.run(copy_in((StagedPiece(0, 2 * SLOT), slot(ONE, 0, 2 * SLOT))))
    stored = bytes(it.arena.view(ONE, 0, 2 * SLOT))
    assert stored == first + b"\x01" * SLOT
    assert answer == OpDone(OpId(1), (xxhash.xxh3_64_intdigest(stored),))


FITS = StagedPiece(0, SLOT)


@pytest.mark.parametrize(
    ("effect", "why"),
    [
        pytest.param(copy_in((FITS, slot(ONE, 0)), worker=WorkerId(2)), "no staging memory", id="no staging"),
        pytest.param(copy_in((StagedPiece(SIZE - 1, SLOT), slot(ONE, 0))), "outside of", id="beyond staging"),
        pytest.param(copy_in((StagedPiece(-1, SLOT), slot(ONE, 0))), "outside of", id="before staging"),
        pytest.param(copy_in((FITS, slot(SegmentId(9), 0))), "no such segment", id="unknown segment"),
        pytest.param(copy_in((FITS, slot(ONE, SIZE - 1))), "outside of", id="beyond the segment"),
        pytest.param(
            copy_in((FITS, slot(ONE, 0, SLOT + 1))), "does not fit a slot of 65537", id="short piece"
        ),
        pytest.param(
            copy_in((FITS, slot(ONE, 0, SLOT - 1))), "does not fit a slot of 65535", id="long piece"
        ),
        pytest.param(CopyIn(OpId(1), WORKER, (FITS,), ()), "there are 0 targets", id="no target"),
        pytest.param(MoveSlots(OpId(1), (slot(ONE, 0),), ()), "there are 0 targets", id="move to nowhere"),
        pytest.param(
            MoveSlots(OpId(1), (slot(SegmentId(9), 0),), (slot(ONE, 0),)), "no such", id="move from nowhere"
        ),
        pytest.param(Checksum(OpId(1), (slot(ONE, 0), slot(ONE, -1))), "outside of", id="checksum outside"),
    ],
)
def test_what_cannot_be_done_fails_with_a_reason(it: Fixture, effect: Task, why: str) -> None:
    for _ in range(3):  # more often than there are threads
        answer = it.run(effect)
        assert isinstance(answer, OpFailed)
        assert answer.op == OpId(1)
        assert why in answer.why
    assert isinstance(it.run(copy_in((FITS, slot(ONE, 0)))), OpDone)


def test_a_bug_ends_its_op_and_not_the_thread(
    it: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("our bug")

    with monkeypatch.context() as patch:
        patch.setattr(it.arena, "view", broken)
        for _ in range(3):
            assert it.run(Checksum(OpId(6), (slot(ONE, 0),))) == OpFailed(OpId(6), "RuntimeError: our bug")
    assert isinstance(it.run(Checksum(OpId(7), (slot(ONE, 0),))), OpDone)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3


def test_an_answer_that_nobody_takes_does_not_end_the_thread(
    it: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(answer: Ended) -> None:
        raise RuntimeError("nobody there")

    for op in range(4):
        it.copier.submit(Checksum(OpId(op), ()), refuse)
    assert it.run(Checksum(OpId(9), ())) == OpDone(OpId(9), ())
    it.copier.close(WAIT_S)
    assert len(caplog.records) == 4


def hold_all_threads(it: Fixture) -> Callable[[], None]:
    """Keeps both threads in their `done` until the returned function is called."""
    held, release = threading.Semaphore(0), threading.Event()

    def hold(answer: Ended) -> None:
        held.release()
        assert release.wait(WAIT_S)

    for op in (100, 101):
        it.copier.submit(Checksum(OpId(op), ()), hold)
    for _ in range(2):
        assert held.acquire(timeout=WAIT_S)
    return release.set


def test_one_op_too_many_fails_at_once(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "OPS_MAX", 3)
    release = hold_all_threads(it)
    for op in range(3):
        it.copier.submit(Checksum(OpId(op), ()), it.answers.put)
    assert it.answers.empty()
    assert it.run(Checksum(OpId(3), ())) == OpFailed(
        OpId(3), "3 of the daemon's own copies are under way already"
    )
    release()
    assert {it.answers.get(timeout=WAIT_S).op for _ in range(3)} == {OpId(0), OpId(1), OpId(2)}


@pytest.mark.parametrize("kind", ["CopyIn", "FillSlots", "Checksum"])
def test_who_has_too_much_under_way_fails_nobody_elses_ops(
    it: Fixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Neither another worker's commit nor the daemon's own work."""
    monkeypatch.setattr(copier_module, "OPS_MAX", 3)
    other = WorkerId(2)
    it.staging.bytes_max += SLOT
    os.close(it.staging.create(other, SLOT)[0])
    memfd = memory.create_memfd("region", SLOT)
    region = it.regions.adopt(WORKER, memfd, SLOT)
    target = slot(ONE, 0)

    def one(op: int, worker: WorkerId) -> Task:
        match kind:
            case "CopyIn":
                return copy_in((FITS, target), worker=worker, op=op)
            case "FillSlots":
                return FillSlots(OpId(op), worker, region, (StagedPiece(0, target.length),), (target,))
            case _:
                return Checksum(OpId(op), (target,), worker)

    release = hold_all_threads(it)
    for op in range(3):
        it.copier.submit(one(op, WORKER), it.answers.put)
    refused = it.run(one(3, WORKER))
    assert refused == OpFailed(OpId(3), "3 of this worker's copies are under way already")
    it.copier.submit(copy_in((FITS, target), worker=other, op=4), it.answers.put)
    it.copier.submit(Checksum(OpId(5), (target,), other), it.answers.put)
    it.copier.submit(Checksum(OpId(6), (target,)), it.answers.put)
    assert it.answers.empty(), "none of them was refused"
    release()
    assert {type(it.answers.get(timeout=WAIT_S)) for _ in range(6)} == {OpDone}
    assert isinstance(it.run(one(7, WORKER)), OpDone), "and what has ended counts no more"


def test_close_lets_what_was_submitted_end(it: Fixture) -> None:
    for op in range(200):
        it.copier.submit(copy_in((FITS, slot(ONE, 0)), op=op), it.answers.put)
    it.copier.close(WAIT_S)
    answers = [it.answers.get_nowait() for _ in range(200)]
    assert all(isinstance(answer, OpDone) for answer in answers)
    assert it.run(Checksum(OpId(1), ())) == OpFailed(OpId(1), "the copier is closing")
    it.copier.close(WAIT_S)


def test_close_does_not_wait_for_a_thread_that_hangs(it: Fixture) -> None:
    release = hold_all_threads(it)
    for op in range(5):
        it.copier.submit(copy_in((FITS, slot(ONE, 0)), op=op), it.answers.put)
    started = time.monotonic()
    it.copier.close(0.05)
    assert time.monotonic() - started < WAIT_S / 2
    answers = [it.answers.get_nowait() for _ in range(5)]
    assert answers == [OpFailed(OpId(op), "the copier is closing") for op in range(5)]
    assert not it.arena.view(ONE, 0, SLOT).any()
    release()


def test_out_of_time_stops_an_op_between_two_steps(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "BLOCK_BYTES", SLOT)
    reached, go_on = threading.Event(), threading.Event()
    real = memory.copy

    def slow(target: np.ndarray, source: np.ndarray) -> None:
        real(target, source)
        reached.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(memory, "copy", slow)
    it.copier.submit(copy_in((StagedPiece(0, SIZE), slot(ONE, 0, SIZE))), it.answers.put)
    assert reached.wait(WAIT_S)
    it.copier.close(0.01)
    go_on.set()
    assert it.answers.get(timeout=WAIT_S) == OpFailed(OpId(1), "the copier is closing")
    assert it.arena.view(ONE, 0, SLOT).any()
    assert not it.arena.view(ONE, SLOT, SIZE - SLOT).any()


BIG = np.ones(64 << 20, np.uint8)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: memory.copy(BIG, BIG[::-1]), id="copy"),
        pytest.param(lambda: xxhash.xxh3_64().update(BIG.data), id="xxh3"),
    ],
)
def test_the_interpreter_lock_is_released_meanwhile(work: Callable[[], None]) -> None:
    """With a switch interval of 1,000 s nobody is ever asked to give the lock up: this thread gets it back only
    while `work` itself has let go of it."""
    started, seen = threading.Semaphore(0), threading.Event()
    saw_it = []

    def works() -> None:
        started.release()
        for _ in range(200):
            work()
            if seen.is_set():
                break
        saw_it.append(seen.is_set())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=works)
        thread.start()
        started.acquire()
        seen.set()
        thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(interval)
    assert saw_it == [True]


def test_a_mismatch_of_counts_is_refused_however_large_the_op(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "PART_BYTES", SLOT)
    effect = CopyIn(OpId(1), WORKER, (StagedPiece(0, SLOT),), tuple(slot(ONE, n * SLOT) for n in range(8)))
    answer = it.run(effect)
    assert isinstance(answer, OpFailed)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
def test_a_large_op_is_shared_among_the_threads_and_answered_once(
    it: Fixture, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(copier_module, "PART_BYTES", SLOT)
    used: set[str] = set()
    both = threading.Barrier(2)
    copy = Copier._copy

    def noting(self: Copier, source: np.ndarray, target: np.ndarray) -> int:
        name = threading.current_thread().name
        if name not in used and shards > 1:
            used.add(name)
            both.wait(WAIT_S)  # goes on only when a second thread works on the same op
        return copy(self, source, target)

    monkeypatch.setattr(Copier, "_copy", noting)
    pairs = [(StagedPiece(n * 1000, SLOT), slot(ONE, n * SLOT)) for n in range(shards)]
    answer = it.run(copy_in(*pairs))
    expected = [it.staged(piece.offset, piece.length) for piece, _ in pairs]
    assert answer == OpDone(OpId(1), tuple(xxhash.xxh3_64_intdigest(data) for data in expected))
    for (_, target), data in zip(pairs, expected, strict=True):
        assert bytes(it.arena.view(target.segment, target.offset, target.length)) == data
    assert it.answers.empty()


def test_an_op_has_ended_only_when_all_its_parts_have(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core reuses the slots of a failed op: no part of it may still be writing then."""
    monkeypatch.setattr(copier_module, "PART_BYTES", SLOT)
    gate, begun = threading.Event(), threading.Event()
    copy = Copier._copy

    def gated(self: Copier, source: np.ndarray, target: np.ndarray) -> int:
        begun.set()
        assert gate.wait(WAIT_S)
        return copy(self, source, target)

    monkeypatch.setattr(Copier, "_copy", gated)
    good = (StagedPiece(0, SLOT), slot(ONE, 0))
    bad = (StagedPiece(SIZE, SLOT), slot(ONE, SLOT))  # behind the end of staging memory: fails at once
    it.copier.submit(copy_in(good, bad), it.answers.put)
    assert begun.wait(WAIT_S)
    with pytest.raises(queue.Empty):
        it.answers.get(timeout=0.2)
    gate.set()
    assert isinstance(it.answers.get(timeout=WAIT_S), OpFailed)


def test_a_worker_with_much_does_not_keep_the_others_waiting(it: Fixture) -> None:
    for worker in (2, 3):
        it.staging.bytes_max += SLOT
        os.close(it.staging.create(WorkerId(worker), SLOT)[0])
    begun, release = threading.Event(), threading.Event()

    def hold(_: Ended) -> None:
        begun.set()
        assert release.wait(WAIT_S)

    one = Copier(it.arena, it.staging, it.regions, threads=1)
    try:
        one.submit(Checksum(OpId(100), ()), hold)
        assert begun.wait(WAIT_S)
        for op in range(5):
            one.submit(copy_in((FITS, slot(ONE, 0)), op=op), it.answers.put)
        for op in (10, 11):
            one.submit(copy_in((FITS, slot(ONE, 0)), worker=WorkerId(2), op=op), it.answers.put)
        one.submit(copy_in((FITS, slot(ONE, 0)), worker=WorkerId(3), op=20), it.answers.put)
        one.submit(Checksum(OpId(30), ()), it.answers.put)
        one.submit(Checksum(OpId(40), (), WorkerId(3)), it.answers.put)
        release.set()
        order = [it.answers.get(timeout=WAIT_S).op for _ in range(10)]
    finally:
        release.set()
        one.close(WAIT_S)
    assert order == [0, 10, 20, 30, 1, 11, 40, 2, 3, 4], "a checksum waits in the line of who wants it"


def test_an_op_of_many_parts_counts_as_one(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "PART_BYTES", SLOT)
    monkeypatch.setattr(copier_module, "OPS_MAX", 2)
    release = hold_all_threads(it)
    for op in (1, 2):
        it.copier.submit(copy_in(*[(FITS, slot(ONE, n * SLOT)) for n in range(8)], op=op), it.answers.put)
    release()
    assert {type(it.answers.get(timeout=WAIT_S)) for _ in range(2)} == {OpDone}
