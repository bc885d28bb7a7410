"""What a batch hands over and when, and that each piece of staging memory comes back exactly once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import memory
from kvstore.client import batch as batch_module
from kvstore.client.batch import StagedPieces, WriteBatch
from kvstore.client.staging import Staging, footprint
from kvstore.errors import BadRequest
from kvstore.types import GrantResult
from kvstore.v1 import store_pb2

LENGTHS = (4096, 4000)
PIECE = footprint(LENGTHS)
ROOM = 8 * PIECE
GRANTED, BUSY = GrantResult.GRANTED, GrantResult.BUSY


class Wire:
    """Stands for an attachment: notes requests, and answers them when it is told to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.alive = True
        self.sends = True
        self.asked: list[tuple[str, Any, Callable[[Any], None]]] = []
        self.notices: list[tuple[str, list[int]]] = []

    def call(self, field: str, body: Any, deadline: float, *, must_end: bool, on_reply: Any) -> Any:
        assert must_end, "the daemon reads our memory until it says that it does not"
        if self.sends:
            self.asked.append((field, body, on_reply))
        unused = {"when_done": lambda *_: None, "watch": lambda *_: None}
        return type("Call", (), {"request": body if self.sends else None, **unused})()

    def notice(self, kind: str, ids: list[int]) -> None:
        self.notices.append((kind, ids))

    def later(self, work: Callable[[], None]) -> None:
        work()

    def answer(self, number: int = 0) -> None:
        """Whatever it says: the daemon has read what the request named."""
        _, _, on_reply = self.asked.pop(number)
        on_reply(store_pb2.AttachReply())


@pytest.fixture(autouse=True)
def two_chunks_are_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "FILL_AHEAD_BYTES", 2 * sum(LENGTHS))


@pytest.fixture
def staging() -> Staging:
    fd = memory.create_memfd("kvs-test", ROOM)
    staging = Staging(fd, ROOM)
    os.close(fd)
    return staging


def staged(
    wire: Wire, staging: Staging, results: tuple[GrantResult, ...] = (GRANTED,) * 5
) -> tuple[WriteBatch, StagedPieces]:
    pieces = StagedPieces(staging, PIECE, len(results))
    pieces.limit(results.count(GRANTED))
    batch = WriteBatch(
        results,
        shards=(0, 1),
        attachment=wire,  # type: ignore[arg-type]
        timeout_s=5,
        reservation_id=7,
        lengths=LENGTHS,
        pieces=pieces,
    )
    return batch, pieces


def in_place(wire: Wire, results: tuple[GrantResult, ...] = (GRANTED,) * 5) -> tuple[WriteBatch, list[Any]]:
    slots = [np.zeros(length, np.uint8) for _ in range(results.count(GRANTED)) for length in LENGTHS]
    batch = WriteBatch(
        results,
        shards=(0, 1),
        attachment=wire,  # type: ignore[arg-type]
        reservation_id=7,
        lengths=LENGTHS,
        slots=slots,
    )
    return batch, slots


def chunk(index: int, shard: int) -> Any:
    return np.full(LENGTHS[shard], 16 * index + shard + 1, np.uint8)


def write(batch: WriteBatch, *indexes: int) -> None:
    for index in indexes:
        for shard in (0, 1):
            batch.copy_from(index, chunk(index, shard), shard=shard)


def ask_for_all(batch: WriteBatch) -> None:
    """The buffers of all that was not said to be written, as whoever writes them without saying so does."""
    for place, index in enumerate(batch.granted):
        for column, shard in enumerate(batch.shards):
            if column in batch._unwritten.get(place, (column,)):
                batch.buffer(index, shard)


def held(staging: Staging, offset: int, shard: int) -> int:
    """The byte of which all are that are there."""
    row = staging.array[offset : offset + LENGTHS[shard]]
    assert (row == row[0]).all()
    return int(row[0])


def test_what_is_written_is_handed_over_and_the_rest_goes_with_the_commit(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    write(batch, 3)
    assert not wire.asked, "too little yet"
    write(batch, 0)
    write(batch, 1, 4)
    write(batch, 2)
    batch.commit_async()
    assert [(field, list(body.numbers)) for field, body, _ in wire.asked[:2]] == [
        ("fill", [0, 1, 6, 7]),
        ("fill", [2, 3, 8, 9]),
    ]
    field, commit, _ = wire.asked[2]
    assert field == "commit" and commit.reservation_id == 7
    named = [(n, o) for _, body, _ in wire.asked[:2] for n, o in zip(body.numbers, body.offsets, strict=True)]
    named += zip((4, 5), commit.staging_offsets, strict=True)
    for number, offset in named:
        index, shard = divmod(number, 2)
        assert held(staging, offset, shard) == 16 * index + shard + 1


def test_the_last_chunks_are_not_worth_a_message_of_their_own(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging, (GRANTED, GRANTED))
    write(batch, 0, 1)
    assert not wire.asked
    batch.commit_async()
    assert [field for field, _, _ in wire.asked] == ["commit"]
    assert len(wire.asked[0][1].staging_offsets) == 4


def test_a_chunk_is_handed_over_when_its_last_shard_is_written(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    for index in range(4):
        batch.buffer(index, 1)[:] = 1
        batch.written(index, 1)
    assert not wire.asked
    for index in range(2):
        batch.buffer(index)[:] = 2
        batch.written(index)
    assert [list(body.numbers) for _, body, _ in wire.asked] == [[0, 1, 2, 3]]


def test_a_piece_that_was_read_is_written_again_and_never_before(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    write(batch, 0, 1)
    first = set(wire.asked[0][1].offsets)
    assert {batch.buffer(2).ctypes.data - staging.array.ctypes.data}.isdisjoint(first)
    wire.answer()
    write(batch, 3, 2)
    second = set(wire.asked[0][1].offsets)
    assert len(second & first) == 2, "one chunk had its piece before, the other has one that was read"


def test_in_place_there_are_no_offsets() -> None:
    wire = Wire()
    batch, slots = in_place(wire)
    for index in (0, 1, 2):
        for shard in (0, 1):
            batch.buffer(index, shard)[:] = chunk(index, shard)
            batch.written(index, shard)
    ask_for_all(batch)
    batch.commit_async()
    fill, commit = (body for _, body, _ in wire.asked)
    assert (list(fill.numbers), list(fill.offsets), fill.region) == ([0, 1, 2, 3], [], 0)
    assert list(commit.staging_offsets) == []
    assert [int(slot[0]) for slot in slots[:6]] == [1, 2, 17, 18, 33, 34]


def test_of_what_is_copied_in_place_the_checksums_go_with_the_commit() -> None:
    wire = Wire()
    batch, slots = in_place(wire, (GRANTED, BUSY, GRANTED, GRANTED))
    batch.copy_many([(index, shard, chunk(index, shard)) for shard in (1, 0) for index in (3, 0, 2)])
    batch.commit_async()
    ((field, commit, _),) = wire.asked
    assert (field, list(commit.staging_offsets)) == ("commit", [])
    assert list(commit.checksums) == [xxhash.xxh3_64_intdigest(slot) for slot in slots]


@pytest.mark.parametrize("seen", ["buffer", "written"])
@pytest.mark.parametrize("first", [True, False])
def test_of_what_the_caller_puts_there_itself_the_daemon_makes_the_checksums(seen: str, first: bool) -> None:
    wire = Wire()
    batch, _ = in_place(wire, (GRANTED, GRANTED))
    own, copied = (0, 1) if first else (1, 0)
    for step in ("own", "copied") if first else ("copied", "own"):
        if step == "copied":
            write(batch, copied)
            continue
        for shard in (0, 1):
            batch.buffer(own, shard)[:] = 1
            if seen == "written":
                batch.written(own, shard)
    batch.commit_async()
    ((field, commit, _),) = wire.asked
    assert (field, list(commit.checksums)) == ("commit", [])


def test_a_chunk_that_was_copied_in_part_is_handed_over_whole() -> None:
    wire = Wire()
    batch, _ = in_place(wire)
    for index in (0, 1):
        batch.copy_from(index, chunk(index, 0), shard=0)
        batch.buffer(index, 1)[:] = 1
        batch.written(index, 1)
    write(batch, 2, 3, 4)
    batch.commit_async()
    (fill, commit) = (body for _, body, _ in wire.asked)
    assert (list(fill.numbers), list(commit.checksums)) == ([0, 1, 2, 3], [])


def test_a_copy_that_failed_in_the_middle_tells_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    batch, _ = in_place(wire, (GRANTED, GRANTED))
    write(batch, 0)

    def fails(pairs: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "gather", fails)
        with pytest.raises(MemoryError):
            batch.copy_from(1, chunk(1, 0), shard=0)
    for shard in (0, 1):
        batch.buffer(1, shard)[:] = 1
    batch.commit_async()
    assert list(wire.asked[-1][1].checksums) == []


def test_staging_memory_is_for_the_daemon_to_check(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging, (GRANTED, GRANTED))
    write(batch, 0, 1)
    batch.commit_async()
    assert [list(body.checksums) for field, body, _ in wire.asked if field == "commit"] == [[]]


@pytest.mark.parametrize("end", ["commit", "abort", "drop"])
@pytest.mark.parametrize("answered_first", [True, False])
def test_every_piece_comes_back_once(staging: Staging, end: str, answered_first: bool) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging, (GRANTED, BUSY, GRANTED, GRANTED, GRANTED))
    assert staging.space.free_bytes == 4 * PIECE
    write(batch, 0, 2)
    batch.buffer(3)
    if answered_first:
        wire.answer()
    if end == "commit":
        ask_for_all(batch)
        batch.commit_async()
        assert staging.space.free_bytes == (6 if answered_first else 4) * PIECE, "what is idle, at once"
    elif end == "abort":
        batch.abort()
        assert wire.notices == [("abort", [7])]
    del batch
    if end != "commit":
        assert staging.space.free_bytes == (8 if answered_first else 6) * PIECE, "what is not being read"
    while wire.asked:
        wire.answer(-1)
    assert staging.space.free_bytes == ROOM


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_what_could_not_be_handed_over_goes_with_the_commit(staging: Staging, end: str) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    wire.sends = False
    write(batch, 0, 1)
    wire.sends = True
    write(batch, 2)
    assert not wire.asked
    if end == "abort":
        batch.abort()
    else:
        write(batch, 3, 4)
        batch.commit_async()
        fills = [body for field, body, _ in wire.asked if field == "fill"]
        assert [list(body.numbers) for body in fills] == [[4, 5, 6, 7]]
        offsets = list(wire.asked[-1][1].staging_offsets)
        assert [held(staging, offset, n % 2) for n, offset in enumerate(offsets)] == [1, 2, 17, 18, 65, 66]
        while wire.asked:
            wire.answer()
    assert staging.space.free_bytes == ROOM


def test_a_commit_that_was_never_sent_gives_all_back(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    write(batch, 0)
    ask_for_all(batch)
    wire.sends = False
    batch.commit_async()
    assert staging.space.free_bytes == ROOM
    assert wire.notices == [("abort", [7])]


def test_what_is_handed_over_is_out_of_reach(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging, (GRANTED, BUSY, GRANTED, GRANTED))
    write(batch, 0, 2)
    for again in (batch.buffer, batch.written, lambda index: batch.copy_from(index, chunk(0, 0))):
        with pytest.raises(BadRequest, match="was said to be written"):
            again(2)
    with pytest.raises(BadRequest, match="was not granted"):
        batch.copy_from(1, chunk(0, 0))
    for wrong in (chunk(0, 1), np.zeros(4095, np.uint8), b""):
        with pytest.raises(BadRequest, match="must have the shard's 4096 bytes"):
            batch.copy_from(3, wrong)
    with pytest.raises(BadRequest, match="neither a buffer"):
        batch.copy_from(3, [1, 2])
    batch.abort()
    with pytest.raises(BadRequest, match="has ended"):
        batch.written(3)


def test_many_that_are_copied_at_once_are_handed_over_as_one_by_one(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TOUCHED_BYTES", sum(LENGTHS))
    wire = Wire()
    batch, _ = staged(wire, staging, (GRANTED, BUSY, GRANTED, GRANTED, GRANTED))
    batch.copy_many([(index, shard, chunk(index, shard)) for index in (4, 0, 2) for shard in (0, 1)])
    ((field, body, _),) = wire.asked
    assert (field, list(body.numbers)) == ("fill", [0, 1, 6, 7]), "two are much"
    batch.copy_many([(3, 1, chunk(3, 1)), (3, None, chunk(3, 0))])
    batch.commit_async()
    for body, indexes in ((wire.asked[0][1], (0, 4)), (wire.asked[1][1], (2, 3))):
        offsets = list(getattr(body, "offsets", None) or body.staging_offsets)
        expected = [(index, shard) for index in indexes for shard in (0, 1)]
        for offset, (index, shard) in zip(offsets, expected, strict=True):
            assert held(staging, offset, shard) == 16 * index + shard + 1


def test_a_shard_that_many_name_twice_is_handed_over_once(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    twice = [(0, shard, chunk(9, shard)) for shard in (0, 1)]
    batch.copy_many(twice + [(index, shard, chunk(index, shard)) for index in (0, 1) for shard in (0, 1)])
    ((_, body, _),) = wire.asked
    assert list(body.numbers) == [0, 1, 2, 3]
    assert held(staging, body.offsets[0], 0) == 1, "the last counts"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ((1, 0, chunk(0, 0)), "was not granted"),
        ((3, 2, chunk(0, 0)), "was asked for shards"),
        ((3, 1, chunk(0, 0)), "must have the shard's 4000 bytes"),
        ((3, 0, [1, 2]), "neither a buffer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_copied_if_one_of_many_is_wrong(
    staging: Staging, wrong: tuple[int, int, Any], why: str
) -> None:
    batch, pieces = staged(Wire(), staging, (GRANTED, BUSY, GRANTED, GRANTED))
    staging.array[:] = 0
    with pytest.raises(BadRequest, match=why):
        batch.copy_many([(0, 0, chunk(0, 0)), wrong])
    assert not staging.array.any() and not pieces._held
    write(batch, 0, 2, 3)


@pytest.mark.parametrize(
    "source",
    [
        np.arange(2048, dtype=np.uint16).reshape(32, 64).T,
        np.arange(1024, dtype=np.float32),
        bytes(range(256)) * 16,
        np.broadcast_to(np.arange(64, dtype=np.uint8), (64, 64)),
    ],
    ids=["strided", "floats", "bytes", "repeated rows"],
)
def test_any_source_is_copied_in_c_order(staging: Staging, source: Any) -> None:
    batch, _ = staged(Wire(), staging)
    batch.copy_from(1, source)
    start = next(iter(batch._starts.values()))
    expected = source if isinstance(source, bytes) else np.ascontiguousarray(source).tobytes()
    assert bytes(staging.array[start : start + 4096]) == expected


def test_a_tensor_is_copied_bit_by_bit(staging: Staging) -> None:
    torch = pytest.importorskip("torch")
    batch, _ = staged(Wire(), staging)
    tensor = torch.arange(2048, dtype=torch.int16).view(torch.bfloat16)
    batch.copy_from(0, tensor)
    start = next(iter(batch._starts.values()))
    assert bytes(staging.array[start : start + 4096]) == tensor.view(torch.uint8).numpy().tobytes()


def test_fewer_pieces_than_wanted(staging: Staging) -> None:
    first = StagedPieces(staging, PIECE, 6)
    second = StagedPieces(staging, PIECE, 6)
    assert first.count == 6 and 0 < second.count < 6
    starts = {first.next() for _ in range(6)}
    assert len(starts) == 6
    first.end()
    second.end()
    assert staging.space.free_bytes == ROOM


def test_what_an_interruption_kept_comes_back_when_nobody_reads_it_any_more(staging: Staging) -> None:
    """Of a batch that was interrupted anywhere: its destructor, too, may be."""
    wire = Wire()
    batch, pieces = staged(wire, staging)
    write(batch, 0, 1, 2)  # of which two were handed over
    batch._attachment = None  # nothing is done for it when it goes
    del batch, pieces
    assert staging.space.take(ROOM) is None, "the daemon still reads"
    wire.asked.clear()
    assert staging.space.take(ROOM) == 0


def test_what_is_being_copied_into_is_nobody_elses_when_another_thread_aborts(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `Client.close` does with the batches of all threads. Another save would be committed with these bytes."""
    wire = Wire()
    batch, _ = staged(wire, staging)

    def gather(pairs: Any) -> None:
        batch.abort()
        assert staging.space.take(ROOM) is None and not wire.notices, "it is still being written"

    monkeypatch.setattr(batch_module, "gather", gather)
    with pytest.raises(BadRequest, match="has ended"):
        batch.copy_from(0, chunk(0, 0), shard=0)
    assert staging.space.take(ROOM) == 0
    assert wire.notices == [("abort", [7])]
    batch.abort()
    assert len(wire.notices) == 1


# ------------------------------------------------------------------------------------------- what nobody has written


def granted_three(wire: Wire, staging: Staging, protection: str) -> WriteBatch:
    """Keys 0, 2 and 3."""
    results = (GRANTED, BUSY, GRANTED, GRANTED)
    return staged(wire, staging, results)[0] if protection == "sealed" else in_place(wire, results)[0]


def refused(batch: WriteBatch, index: int, shard: int) -> None:
    """Both ways to commit are, by the name of the first (key, shard) that is not written."""
    for commit in (batch.commit_async, batch.commit):
        with pytest.raises(
            BadRequest, match=f"shard {shard} of this key was granted and never written"
        ) as caught:
            commit()
        assert (caught.value.field, caught.value.value) == ("index", str(index))
        assert "abort" in caught.value.remedy


UNWRITTEN = pytest.mark.parametrize(
    ("unwritten", "shard"),
    [
        pytest.param([(2, 0), (2, 1)], 0, id="key"),
        pytest.param([(2, 0)], 0, id="first shard"),
        pytest.param([(2, 1)], 1, id="last shard"),
        pytest.param([(2, 1), (3, 0), (3, 1)], 1, id="all from there"),
    ],
)
PROTECTIONS = pytest.mark.parametrize("protection", ["sealed", "in place"])


@UNWRITTEN
@PROTECTIONS
def test_what_nobody_wrote_is_not_committed_until_somebody_does(
    staging: Staging, protection: str, unwritten: list[tuple[int, int]], shard: int
) -> None:
    """Its memory holds what was there before: bytes of other chunks, which would be hits under this one's key."""
    wire = Wire()
    batch = granted_three(wire, staging, protection)
    every = [(index, shard) for index in batch.granted for shard in (0, 1)]
    batch.copy_many([(*which, chunk(*which)) for which in every if which not in unwritten])
    refused(batch, 2, shard)
    assert "commit" not in [field for field, _, _ in wire.asked] and not wire.notices
    for index, shard in unwritten:
        batch.copy_from(index, chunk(index, shard), shard=shard)
    batch.commit_async()
    assert wire.asked[-1][0] == "commit" and not wire.notices
    while wire.asked:
        wire.answer()
    assert staging.space.free_bytes == ROOM


@PROTECTIONS
def test_what_was_not_copied_to_its_end_is_not_written(
    staging: Staging, protection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = granted_three(Wire(), staging, protection)
    batch.copy_many([(index, shard, chunk(index, shard)) for index in (0, 2) for shard in (0, 1)])
    batch.copy_from(3, chunk(3, 0), shard=0)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "gather", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.copy_from(3, chunk(3, 1), shard=1)
    refused(batch, 3, 1)
    batch.copy_from(3, chunk(3, 1), shard=1)
    batch.commit_async()


@UNWRITTEN
@PROTECTIONS
def test_what_nobody_wrote_can_be_aborted(
    staging: Staging, protection: str, unwritten: list[tuple[int, int]], shard: int
) -> None:
    wire = Wire()
    with granted_three(wire, staging, protection) as batch:
        for index in batch.granted:
            for column in (0, 1):
                if (index, column) not in unwritten:
                    batch.buffer(index, column)[:] = 1
        refused(batch, 2, shard)
    assert wire.notices == [("abort", [7])]
    assert not wire.asked, "nothing was said to be written"
    assert staging.space.free_bytes == ROOM


def test_a_refused_commit_takes_back_nothing_that_was_handed_over(staging: Staging) -> None:
    wire = Wire()
    batch, _ = staged(wire, staging)
    write(batch, 0, 1)
    write(batch, 4)
    assert [field for field, _, _ in wire.asked] == ["fill"]
    refused(batch, 2, 0)
    write(batch, 2)
    refused(batch, 3, 0)
    write(batch, 3)
    batch.commit_async()
    told = [list(body.numbers) for field, body, _ in wire.asked if field == "fill"]
    assert told == [[0, 1, 2, 3], [4, 5, 8, 9]]
    offsets = list(wire.asked[-1][1].staging_offsets)
    assert [held(staging, offset, n) for n, offset in enumerate(offsets)] == [49, 50], "the third"
    while wire.asked:
        wire.answer()
    assert staging.space.free_bytes == ROOM


def test_a_batch_that_was_granted_nothing_commits(staging: Staging) -> None:
    for batch in (staged(Wire(), staging, (BUSY, BUSY))[0], in_place(Wire(), (BUSY, BUSY))[0]):
        assert batch.commit().ok
    assert staging.space.free_bytes == ROOM
    assert WriteBatch((BUSY,)).commit().ok, "nor was anybody asked"


def test_a_batch_that_is_filled_out_of_a_region_has_no_buffers_to_ask_for() -> None:
    wire = Wire()
    batch = WriteBatch(
        (GRANTED, BUSY, GRANTED),
        shards=(0, 1),
        attachment=wire,  # type: ignore[arg-type]
        reservation_id=7,
        lengths=LENGTHS,
    )
    with pytest.raises(BadRequest, match="no fill has ended well"):
        batch.commit_async()
    batch._filled = True
    batch.commit_async()
    assert [field for field, _, _ in wire.asked] == ["commit"]
