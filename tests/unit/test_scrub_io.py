"""The scrubber's reads, and rewriting of slots, on real files and real memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.core.events import (
    DiskDone,
    OpDone,
    RewriteRecords,
    RewriteSlots,
    ScrubRecords,
    SlabReady,
    WriteRecords,
)
from kvstore.tiers import format
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.verify import WINDOW_BYTES, Verifier
from kvstore.types import ChunkKey, DiskPlace, DiskResult, Extent, OpId, Record, SegmentId, SlabId

from .test_copier import ONE, SIZE, SLOT
from .test_copier import Fixture as CopierFixture
from .test_ssd import SHARD, WAIT_S, Fixture, key_file, place, settings

OK, CORRUPT, IO_ERROR = DiskResult.OK, DiskResult.CORRUPT, DiskResult.IO_ERROR


@pytest.fixture(params=["buffered", "direct", "encrypted"])
def it(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fixture]:
    keys = key_file(tmp_path, b"1") if request.param == "encrypted" else ""
    it = Fixture(tmp_path, settings(tmp_path, ssd_direct_io=request.param == "direct", ssd_key_file=keys))
    it.open()
    assert isinstance(it.create(), SlabReady)
    it.write(*range(6))
    yield it
    it.weather()
    it.tier.close(WAIT_S)
    assert it.answers.empty(), "one answer an op"


def scrub(it: Fixture, *numbers: int, at: tuple[DiskPlace, ...] = ()) -> DiskDone:
    places = at or tuple(map(place, numbers))
    answer = it.submit(ScrubRecords(it.next_op(), it.records(numbers), places))
    assert isinstance(answer, DiskDone) and len(answer.results) == len(numbers) == len(answer.whys)
    return answer


def test_records_that_are_whole(it: Fixture) -> None:
    assert scrub(it, *range(6)).results == (OK,) * 6
    assert it.tier.stats().records_read == 0, "that is for reads that somebody asked for"


@pytest.mark.parametrize("at", [0, 24, 250])
def test_what_is_wrong_with_a_header_is_told(it: Fixture, at: int) -> None:
    it.spoil(2, at, b"\xff\xfe")
    answer = scrub(it, 1, 2, 3)
    assert answer.results == (OK, CORRUPT, OK) and answer.whys[1]


@pytest.mark.parametrize("at", [0, SHARD // 2, SHARD - 1])
def test_one_wrong_byte_is_found(it: Fixture, at: int) -> None:
    it.flip(4, it.header_bytes + at)
    answer = scrub(it, 3, 4)
    assert answer.results == (OK, CORRUPT)
    assert ("decrypt" if it.config.ssd_key_file else "checksum") in answer.whys[1]
    assert it.tier.stats().records_corrupt == 0, "the core counts: it knows whose slot that is by now"


def test_a_record_of_many_windows(tmp_path: Path) -> None:
    """All of it counts, also the last byte of the last window."""

    size = 2 * WINDOW_BYTES + 5_000
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    record = Record(b"n" * 32, ChunkKey(b"k"), 0, size, xxhash.xxh3_64_intdigest(data))
    path = tmp_path / "slab"
    for direct in (False, True):
        header = format.encode_record_header(record, 7, direct=direct)
        header = header.ljust(format.record_header_bytes(direct=direct), b"\0")
        for flipped in (None, 0, WINDOW_BYTES, size - 1):
            body = bytearray(data)
            if flipped is not None:
                body[flipped] ^= 8
            path.write_bytes(bytes(8192) + header + body + bytes(-(len(header) + size) % 4096))
            fd = os.open(path, os.O_RDONLY)
            pauses: list[int] = []
            verifier = Verifier(RealDisk(), direct=direct, first_generation=1 << 32, pause=pauses.append)
            assert (verifier.check(fd, 8192, record, 7).result is OK) == (flipped is None), flipped
            assert len(pauses) == 2 and pauses[0] == WINDOW_BYTES, "between the windows of one record"
            os.close(fd)


def test_a_long_record_is_read_slowly_and_given_up_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 byte a second it would take years."""
    it = Fixture(tmp_path, settings(tmp_path))
    it.open()
    size = 2 * WINDOW_BYTES
    record = Record(b"n" * 32, ChunkKey(b"k"), 0, size, 7)
    target = DiskPlace(SlabId(0), 0, 1)
    assert isinstance(it.create(shard_bytes=size, slots=2), SlabReady)
    write = WriteRecords(it.next_op(), (record,), (Extent(SegmentId(0), 0, size, 0, 1),), (target,))
    assert isinstance(it.submit(write), DiskDone)
    fast = it.submit(ScrubRecords(it.next_op(), (record,), (target,)))
    assert isinstance(fast, DiskDone) and fast.results == (CORRUPT,), "its checksum is none"
    slow = ScrubRecords(it.next_op(), (record,), (target,), bytes_per_s=1)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.ssd.PAUSE_MAX_S", 0.01)
        answer = it.submit(slow)
        assert isinstance(answer, DiskDone) and answer.results == (CORRUPT,), "not after days"
    slow = replace(slow, op=it.next_op())
    it.tier.submit(slow)
    assert it.answers.empty()
    it.tier.close(WAIT_S)
    answer = it.answers.get(timeout=WAIT_S)
    assert isinstance(answer, DiskDone) and answer.op == slow.op and answer.results == (IO_ERROR,)
    it.open()  # the directory was let go of
    it.tier.close(WAIT_S)


def test_a_disk_that_fails_is_not_called_corrupt(it: Fixture) -> None:
    it.weather({"calls": ["read"], "files": "slab-*", "do": "EIO", "count": 1})
    assert scrub(it, 1, 2).results == (IO_ERROR, OK)


def test_a_hanging_scrub_takes_no_thread_of_anybody_else(it: Fixture) -> None:
    it.weather({"calls": ["read"], "files": "slab-*", "do": "hang", "count": 1})
    effect = ScrubRecords(it.next_op(), it.records((0,)), (place(0),))
    it.tier.submit(effect)
    it.until_waiting(1)
    for _ in range(3):
        assert it.read(1, 2, 3).results == (OK,) * 3
    it.weather()
    answer = it.answers.get(timeout=WAIT_S)
    assert answer.op == effect.op


@pytest.mark.parametrize("bypass", [True, False])
def test_what_a_rewriting_sync_is_told_is_not_kept_from_others(
    it: Fixture, monkeypatch: pytest.MonkeyPatch, *, bypass: bool
) -> None:
    """The kernel tells each descriptor once. Not every file system can bypass its cache."""
    real, synced = it.disk.open, []

    def refusing(path: str, *, create: bool = False, direct: bool = False) -> int:
        if direct and not bypass:
            raise OSError(errno.EINVAL, "cannot bypass the cache")
        return real(path, create=create, direct=direct)

    monkeypatch.setattr(it.disk, "open", refusing)
    monkeypatch.setattr(it.disk, "sync", synced.append)
    answer = it.submit(RewriteRecords(it.next_op(), (place(2),)))
    assert isinstance(answer, DiskDone) and answer.results == (OK,)
    assert synced and it.tier._slabs.at(place(2)).fd not in synced


def test_a_slot_is_rewritten_and_its_neighbours_are_not(it: Fixture) -> None:
    answer = it.submit(RewriteRecords(it.next_op(), (place(2), place(4))))
    assert isinstance(answer, DiskDone) and answer.results == (OK, OK)
    assert scrub(it, 0, 1, 3, 5).results == (OK,) * 4
    assert scrub(it, 2, 4).results == (CORRUPT, CORRUPT), "nothing is left that could be taken for a record"
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    start = format.slot_offset(size, 2)
    assert it.slab_file().read_bytes()[start : start + size] == bytes(size)


def test_a_slot_that_does_not_keep_what_is_written(it: Fixture) -> None:
    it.weather({"calls": ["write"], "files": "slab-*", "do": "flip", "count": 1})
    answer = it.submit(RewriteRecords(it.next_op(), (place(2), place(4))))
    assert isinstance(answer, DiskDone) and answer.results == (CORRUPT, OK)
    it.weather({"calls": ["read"], "files": "slab-*", "do": "flip", "skip": 2, "count": 1})
    answer = it.submit(RewriteRecords(it.next_op(), (place(2),)))
    assert isinstance(answer, DiskDone) and answer.results == (CORRUPT,), "in the last pattern too"
    it.weather({"calls": ["sync"], "files": "slab-*", "do": "EIO"})
    answer = it.submit(RewriteRecords(it.next_op(), (place(2),)))
    assert isinstance(answer, DiskDone) and answer.results == (IO_ERROR,)


def test_a_place_that_is_not_there(it: Fixture) -> None:
    nowhere = DiskPlace(SlabId(9), 0, 1)
    assert scrub(it, 0, at=(nowhere,)).results == (IO_ERROR,)
    answer = it.submit(RewriteRecords(it.next_op(), (nowhere,)))
    assert isinstance(answer, DiskDone) and answer.results == (IO_ERROR,)


def test_slots_in_dram(monkeypatch: pytest.MonkeyPatch) -> None:
    it = CopierFixture()
    try:
        targets = tuple(Extent(ONE, number * SLOT, SLOT, number, 1) for number in (1, 5, 7))
        whole = it.arena.view(ONE, 0, SIZE)
        whole[:] = 9
        assert it.run(RewriteSlots(OpId(3), targets)) == OpDone(OpId(3), (1, 1, 1))
        touched = np.flatnonzero(whole.reshape(-1, SLOT)[:, 0] != 9).tolist()
        assert touched == [1, 5, 7] and int(whole.astype(np.int64).sum()) == 9 * (SIZE - 3 * SLOT)

        # Memory that does not keep what is written: somebody else writes there all the time.
        scribbled = Extent(ONE, 5 * SLOT, SLOT, 5, 1)
        view = it.copier._slot

        def stuck(extent: Extent) -> np.ndarray:
            slot = view(extent)
            return StuckSlot(slot) if extent == scribbled else slot  # type: ignore[return-value]

        monkeypatch.setattr(it.copier, "_slot", stuck)
        assert it.run(RewriteSlots(OpId(4), targets)) == OpDone(OpId(4), (1, 0, 1))
    finally:
        it.copier.close(WAIT_S)
        it.regions.close(WAIT_S)
        it.staging.close()
        it.arena.close()


class StuckSlot:
    """One bit of it is always set."""

    def __init__(self, slot: np.ndarray) -> None:
        self._slot = slot
        self.size = slot.size

    def __setitem__(self, where: slice, value: int) -> None:
        self._slot[where] = value

    def __getitem__(self, where: slice) -> np.ndarray:
        found = self._slot[where].copy()
        found[len(found) // 2] |= 0x80
        return found
