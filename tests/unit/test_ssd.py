"""The SSD tier: right bytes or a reason, one answer for every op, an end in bounded time, whatever the disk does."""

import errno
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.config import SSD_OVERHEAD_BYTES, StoreConfig
from kvstore.core.events import (
    Bar,
    ChunkRecord,
    CreateSlab,
    DiskDone,
    NamespaceRecord,
    ProbeDisk,
    ReadRecords,
    SessionEntry,
    SessionRecord,
    SlabReady,
    WriteIndex,
    WriteRecords,
)
from kvstore.core.ssd.restart import Snapshot
from kvstore.errors import ConfigError, NotFound
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.faulty_disk import FaultyDisk
from kvstore.tiers import format, io_pool
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.ssd import DiskEffect, SsdTier
from kvstore.types import ChunkKey, DiskPlace, DiskResult, Extent, OpId, Record, SegmentId, SlabId

MIB = 1 << 20
SHARD = 5_000
SLOTS = 16
WAIT_S = 30.0
DIGEST = b"N" * 32
SPEC = NamespaceSpec("m", b"w", "l", 16, (GroupSpec("g", SHARD),))
NAMESPACE = NamespaceRecord(1, "alice", SPEC)
OK, CORRUPT, IO_ERROR, NO_SPACE, REUSED = DiskResult


class Memory:
    """One segment of noise; `offset` of a slot is a multiple of 8192 unless a test wants it crooked."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
        self.bytes[:] = np.random.default_rng(7).integers(0, 256, len(self.bytes), dtype=np.uint8)

    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        if segment != 0:
            raise NotFound("no such segment", field="segment", value=segment)
        return self.bytes[offset : offset + length]


@dataclass(slots=True)
class Fixture:
    folder: Path
    config: StoreConfig
    memory: Memory = field(default_factory=Memory)
    answers: "queue.SimpleQueue[SlabReady | DiskDone]" = field(default_factory=queue.SimpleQueue)
    ops: int = 0
    tier: SsdTier = field(init=False)
    disk: FaultyDisk = field(init=False)

    def open(self) -> Snapshot:
        self.disk = FaultyDisk(RealDisk(), str(self.folder / "faults.json"))
        self.tier = SsdTier(self.config, self.memory, self.disk, done=self.answers.put)
        return self.tier.open()

    def again(self) -> Snapshot:
        self.tier.close(WAIT_S)
        return self.open()

    def weather(self, *faults: dict[str, object]) -> None:
        new = self.folder / "faults.new"
        new.write_text(json.dumps(faults))
        new.replace(self.folder / "faults.json")

    def next_op(self) -> OpId:
        self.ops += 1
        return OpId(self.ops)

    def submit(self, effect: DiskEffect) -> SlabReady | DiskDone:
        self.tier.submit(effect)
        answer = self.answers.get(timeout=WAIT_S)
        assert answer.op == effect.op
        return answer

    def create(self, slab: int = 0, shard_bytes: int = SHARD, slots: int = SLOTS) -> SlabReady | DiskDone:
        size = format.slot_bytes(shard_bytes, direct=self.config.ssd_direct_io)
        return self.submit(CreateSlab(self.next_op(), SlabId(slab), size, slots))

    def write(self, *numbers: int) -> DiskDone:
        answer = self.submit(self.writing(*numbers))
        assert isinstance(answer, DiskDone)
        return answer

    def writing(self, *numbers: int) -> WriteRecords:
        sources = tuple(extent(number) for number in numbers)
        return WriteRecords(self.next_op(), self.records(numbers), sources, tuple(map(place, numbers)))

    def read(self, *numbers: int, at: Sequence[DiskPlace] = ()) -> DiskDone:
        """Into other slots than the bytes came from, full of something else."""
        for number in numbers:
            self.slot(number, target=True)[:] = 0xEE
        answer = self.submit(self.reading(*numbers, at=at))
        assert isinstance(answer, DiskDone)
        for number, result in zip(numbers, answer.results, strict=True):
            if result == OK:
                assert bytes(self.slot(number, target=True)) == bytes(self.slot(number))
        return answer

    def reading(self, *numbers: int, at: Sequence[DiskPlace] = ()) -> ReadRecords:
        targets = tuple(extent(number, target=True) for number in numbers)
        return ReadRecords(self.next_op(), self.records(numbers), tuple(at or map(place, numbers)), targets)

    def records(self, numbers: Sequence[int]) -> tuple[Record, ...]:
        return tuple(
            Record(DIGEST, key(number), 0, SHARD, xxhash.xxh3_64_intdigest(self.slot(number)), b"m" * 16)
            for number in numbers
        )

    def slot(self, number: int, *, target: bool = False) -> npt.NDArray[np.uint8]:
        where = extent(number, target=target)
        return self.memory.view(where.segment, where.offset, where.length)

    def commit(self, *numbers: int, slabs: Sequence[int] = (0,), **fields: object) -> DiskDone:
        answer = self.submit(self.committing(*numbers, slabs=slabs, **fields))
        assert isinstance(answer, DiskDone)
        return answer

    def committing(self, *numbers: int, slabs: Sequence[int] = (0,), **fields: object) -> WriteIndex:
        chunks = tuple(
            ChunkRecord(1, key(number), 16, 0, b"m" * 16, (place(number),), (record.checksum,))
            for number, record in zip(numbers, self.records(numbers), strict=True)
        )
        names = tuple(map(SlabId, slabs))
        return WriteIndex(self.next_op(), names, (NAMESPACE,), chunks=chunks, **fields)  # type: ignore[arg-type]

    def slab_file(self, slab: int = 0) -> Path:
        return Path(self.config.ssd_dir) / format.slab_name(slab)

    def spoil(self, number: int, at: int, data: bytes) -> None:
        """Overwrites bytes of a record behind the tier's back."""
        size = format.slot_bytes(SHARD, direct=self.config.ssd_direct_io)
        with open(self.slab_file(), "r+b") as file:
            file.seek(format.slot_offset(size, number) + at)
            file.write(data)

    def flip(self, number: int, at: int) -> None:
        """One bit of a byte of a record."""
        size = format.slot_bytes(SHARD, direct=self.config.ssd_direct_io)
        before = self.slab_file().read_bytes()[format.slot_offset(size, number) + at]
        self.spoil(number, at, bytes([before ^ 1]))

    def until_waiting(self, count: int) -> None:
        """Until so many calls hang in the disk."""
        while self.disk.waiting < count:
            assert self.answers.empty()

    @property
    def header_bytes(self) -> int:
        return format.record_header_bytes(direct=self.config.ssd_direct_io)


def extent(number: int, *, target: bool = False) -> Extent:
    return Extent(SegmentId(0), 8192 * number + (2 * MIB if target else 0), SHARD, cell=0, generation=1)


def place(number: int) -> DiskPlace:
    return DiskPlace(SlabId(number // SLOTS), number % SLOTS, (1 << 32) + number)


def key(number: int) -> ChunkKey:
    return ChunkKey(b"key-%d" % number)


def settings(folder: Path, **changes: object) -> StoreConfig:
    config = StoreConfig(
        ssd_dir=str(folder / "ssd"),
        ssd_bytes=64 * MIB,
        ssd_index_bytes=2 * MIB,
        ssd_slab_bytes=4 * MIB,
        ssd_threads=4,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def key_file(folder: Path, *keys: bytes) -> str:
    """Of keys that are one letter each."""
    path = folder / "".join(["keys-", *(key.decode() for key in keys)])
    path.write_text("\n".join((key * 32).hex() for key in keys))
    path.chmod(0o600)
    return str(path)


def keys(snapshot: Snapshot) -> list[bytes]:
    return [key for batch in snapshot.chunks for key in batch.keys]


@pytest.fixture(params=["buffered", "direct", "encrypted", "direct, encrypted"])
def it(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fixture]:
    it = Fixture(tmp_path, settings(tmp_path, ssd_direct_io="direct" in request.param))
    if "encrypted" in request.param:
        it.config = replace(it.config, ssd_key_file=key_file(tmp_path, b"1"))
    it.open()
    assert isinstance(it.create(), SlabReady)
    yield it
    it.weather()
    it.tier.close(WAIT_S)
    assert it.answers.empty(), "one answer an op"


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Fixture]:
    """Buffered, with one slab."""
    it = Fixture(tmp_path, settings(tmp_path))
    it.open()
    assert isinstance(it.create(), SlabReady)
    yield it
    it.weather()
    it.tier.close(WAIT_S)
    assert it.answers.empty(), "one answer an op"


# ------------------------------------------------------------------------------------------------------- round trips


def test_what_is_written_comes_back(it: Fixture) -> None:
    assert it.write(*range(SLOTS)).results == (OK,) * SLOTS
    assert it.read(*reversed(range(SLOTS))).results == (OK,) * SLOTS
    assert it.commit(*range(SLOTS)).results == (OK,)
    stats = it.tier.stats()
    assert (stats.records_written, stats.records_read, stats.bytes_read) == (SLOTS, SLOTS, SLOTS * SHARD)
    assert (stats.slab_files, stats.index_commits, stats.records_corrupt) == (1, 1, 0)


def test_a_restart_knows_what_was_committed_and_serves_it(it: Fixture) -> None:
    it.write(*range(5))
    assert it.commit(*range(4)).results == (OK,)
    snapshot = it.again()
    assert snapshot.slabs == [(0, format.slot_bytes(SHARD, direct=it.config.ssd_direct_io), SLOTS)]
    assert (snapshot.boot_count, snapshot.next_slab) == (2, 1)
    assert snapshot.namespaces == [NAMESPACE]
    (batch,) = snapshot.chunks
    assert batch.keys == [key(number) for number in range(4)]
    assert list(batch.slot) == [0, 1, 2, 3]
    assert list(batch.generation) == [place(number).generation for number in range(4)]
    assert list(batch.checksum) == [record.checksum for record in it.records(range(4))]
    assert it.read(*range(4)).results == (OK,) * 4


def test_slots_anywhere_in_memory_will_do(it: Fixture) -> None:
    """Direct I/O moves whole pages; what is not aligned takes a detour."""
    crooked = Extent(SegmentId(0), 8192 * 3 + 100, SHARD, cell=0, generation=1)
    data = it.memory.view(crooked.segment, crooked.offset, SHARD).copy()
    record = Record(DIGEST, key(0), 0, SHARD, xxhash.xxh3_64_intdigest(data))
    it.submit(WriteRecords(it.next_op(), (record,), (crooked,), (place(0),)))
    around = it.memory.bytes[8192 * 3 : 8192 * 5].copy()
    it.memory.view(crooked.segment, crooked.offset, SHARD)[:] = 0
    answer = it.submit(ReadRecords(it.next_op(), (record,), (place(0),), (crooked,)))
    assert answer == DiskDone(answer.op, (OK,))
    assert bytes(it.memory.bytes[8192 * 3 : 8192 * 5]) == bytes(around), "and nothing beside it was touched"


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 8192 - 256, 8192, 3 * MIB // 2])
def test_shards_of_any_size_come_back(it: Fixture, length: int) -> None:
    assert isinstance(it.create(1, length, 2), SlabReady)
    where = Extent(SegmentId(0), 0, length, cell=0, generation=1)
    data = it.memory.view(where.segment, 0, length).copy()
    record = Record(DIGEST, key(0), 3, length, xxhash.xxh3_64_intdigest(data))
    spot = DiskPlace(SlabId(1), 1, 5)
    after = bytes(it.memory.bytes[length : length + 4096])
    assert it.submit(WriteRecords(it.next_op(), (record,), (where,), (spot,))) == DiskDone(
        OpId(it.ops), (OK,)
    )
    it.memory.view(where.segment, 0, length)[:] = 0
    assert it.submit(ReadRecords(it.next_op(), (record,), (spot,), (where,))) == DiskDone(OpId(it.ops), (OK,))
    assert bytes(it.memory.view(where.segment, 0, length)) == bytes(data)
    assert bytes(it.memory.bytes[length : length + 4096]) == after


def test_an_op_is_shared_by_the_threads_and_answered_in_its_order(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_pool, "PART_BYTES", SHARD)
    it.write(*range(SLOTS))
    it.spoil(5, 100, b"x")
    it.spoil(11, 0, b"x")
    expected = [CORRUPT if number in (5, 11) else OK for number in range(SLOTS)]
    assert list(it.read(*range(SLOTS)).results) == expected


def test_a_record_on_disk_is_header_payload_and_zeros(it: Fixture) -> None:
    it.write(2)
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    start = format.slot_offset(size, 2)
    slot = it.slab_file().read_bytes()[start : start + size]
    found = format.decode_record_header(slot)
    assert isinstance(found, format.RecordHeader)
    header = format.encode_record_header(
        it.records([2])[0], place(2).generation, direct=it.config.ssd_direct_io, sealing=found.sealing
    )
    payload = slot[it.header_bytes : it.header_bytes + SHARD]
    if it.config.ssd_key_file:
        assert found.sealing and payload != bytes(it.slot(2))
        slot = slot.replace(payload, bytes(it.slot(2)))
    assert slot == (header.ljust(it.header_bytes, b"\0") + bytes(it.slot(2))).ljust(size, b"\0")


# ------------------------------------------------------------------------------------------- neighbours, in one call


def count_calls(it: Fixture, monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    """Offset (and size) of each call from now on."""
    calls: list[tuple[int, ...]] = []
    real = getattr(it.disk, name)

    def counted(fd: int, *rest: object) -> object:
        calls.append(tuple(what for what in rest if isinstance(what, int)))
        return real(fd, *rest)

    monkeypatch.setattr(it.disk, name, counted)
    return calls


def test_neighbours_are_moved_in_one_call_in_whatever_order_they_come(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, reads = (count_calls(it, monkeypatch, name) for name in ("write", "read"))
    numbers = [3, 1, 2, 0, 9, 8, 15]
    assert it.write(*numbers).results == (OK,) * 7
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    runs = [(format.slot_offset(size, first),) for first in (0, 8, 15)]
    assert writes == runs
    it.spoil(2, it.header_bytes + 7, b"xyz")
    it.spoil(8, 3, b"xyz")
    assert it.read(*numbers).results == (OK, OK, CORRUPT, OK, OK, CORRUPT, OK)
    assert reads == runs


def test_a_run_ends_with_the_slab_and_when_enough_is_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(*rows: tuple[int, int, int]) -> list[int]:
        cut = io_pool.runs(
            [
                (Record(DIGEST, key(0), 0, length, 0), extent(0), DiskPlace(SlabId(slab), slot, 1))
                for slab, slot, length in rows
            ]
        )
        return [len(run) for run in cut]

    monkeypatch.setattr(io_pool, "RUN_BYTES", 100)
    monkeypatch.setattr(io_pool, "RUN_RECORDS_MAX", 3)
    assert lengths() == []
    assert lengths((0, 4, 10), (0, 5, 10), (1, 6, 10), (1, 8, 10), (1, 8, 10)) == [2, 1, 1, 1]
    assert lengths(*((0, slot, 10) for slot in range(7))) == [3, 3, 1]
    assert lengths((0, 0, 50), (0, 1, 50), (0, 2, 1), (0, 3, 400), (0, 4, 400)) == [2, 1, 1, 1]


def test_the_end_of_the_file_within_a_run_costs_what_lies_behind_it(it: Fixture) -> None:
    it.write(0, 1, 2)
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    os.truncate(it.slab_file(), format.slot_offset(size, 1) + it.header_bytes + SHARD - 1)
    answer = it.read(0, 1, 2)
    assert answer.results == (OK, CORRUPT, CORRUPT)
    assert "the file ends in it" in answer.why


def test_neighbours_in_slots_with_pages_to_spare(it: Fixture) -> None:
    """No call moves more of a slot than its record has."""
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io) + 2 * 4096
    assert isinstance(it.submit(CreateSlab(it.next_op(), SlabId(1), size, 4)), SlabReady)
    places = [DiskPlace(SlabId(1), number, 7) for number in range(4)]
    for number in range(4):
        with it.slab_file(1).open("r+b") as file:
            file.seek(format.slot_offset(size, number) + size - 4096)
            file.write(b"not of a record")
    effect = it.writing(*range(4))
    assert it.submit(replace(effect, targets=tuple(places))) == DiskDone(effect.op, (OK,) * 4)
    assert it.read(*range(4), at=places).results == (OK,) * 4
    assert it.slab_file(1).read_bytes().count(b"not of a record") == 4


def test_as_many_neighbours_as_one_call_moves_and_a_few_more(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = io_pool.RUN_RECORDS_MAX + 6
    assert isinstance(it.create(1, slots=count), SlabReady)
    places = tuple(DiskPlace(SlabId(1), number, 7 + number) for number in range(count))
    writes, reads = (count_calls(it, monkeypatch, name) for name in ("write", "read"))
    effect = it.writing(*range(count))
    assert it.submit(replace(effect, targets=places)) == DiskDone(effect.op, (OK,) * count)
    assert it.read(*range(count), at=places).results == (OK,) * count
    assert len(writes) == len(reads) == 2


def test_neighbours_that_reach_beyond_the_slab(it: Fixture) -> None:
    size = it.slab_file().stat().st_size
    effect = it.writing(0, 1)
    places = (DiskPlace(SlabId(0), SLOTS - 1, 7), DiskPlace(SlabId(0), SLOTS, 7))
    answer = it.submit(replace(effect, targets=places))
    assert isinstance(answer, DiskDone)
    assert answer.results == (OK, IO_ERROR)
    assert it.slab_file().stat().st_size == size
    assert it.read(0, 1, at=places).results == (OK, IO_ERROR)


def test_neighbours_from_anywhere_in_memory(it: Fixture) -> None:
    places = (place(0), place(1))
    extents = tuple(Extent(SegmentId(0), 8192 * n + 100, SHARD, cell=0, generation=1) for n in (5, 9))
    data = [it.memory.view(SegmentId(0), where.offset, SHARD).copy() for where in extents]
    records = tuple(
        Record(DIGEST, key(n), 0, SHARD, xxhash.xxh3_64_intdigest(data[n].data)) for n in range(2)
    )
    assert it.submit(WriteRecords(it.next_op(), records, extents, places)) == DiskDone(OpId(it.ops), (OK, OK))
    around = it.memory.bytes.copy()
    for where in extents:
        it.memory.view(SegmentId(0), where.offset, SHARD)[:] = 0
    assert it.submit(ReadRecords(it.next_op(), records, places, extents)) == DiskDone(OpId(it.ops), (OK, OK))
    assert np.array_equal(it.memory.bytes, around)


def test_writing_back_begins_at_once_with_what_is_large(it: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = count_calls(it, monkeypatch, "start_writeback")
    it.write(0, 1)
    assert begun == [], "the kernel had better gather these"
    monkeypatch.setattr("kvstore.tiers.ssd.WRITEBACK_BYTES_MIN", 2 * SHARD)
    it.write(3, 4)
    size = format.slot_bytes(SHARD, direct=False)
    expected = [] if it.config.ssd_direct_io else [(format.slot_offset(size, 3), 2 * size)]
    assert begun == expected


def test_what_cannot_be_written_back_is_not_written(plain: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.ssd.WRITEBACK_BYTES_MIN", 1)
    plain.weather(*fails("writeback", 1, 3))
    assert plain.write(0, 1, 2).results == (OK, IO_ERROR, OK)


# ------------------------------------------------------------------------------------------- what must not be served


@pytest.mark.parametrize("at", [0, 9, 17, 40, 70, 100, 250], ids=lambda at: f"header {at}")
def test_a_flipped_byte_in_a_header_is_found(it: Fixture, at: int) -> None:
    it.write(0, 1)
    good = it.slab_file().read_bytes()[4096 + at]
    it.spoil(0, at, bytes([good ^ 4]))
    answer = it.read(0, 1)
    assert answer.results == (CORRUPT, OK)
    assert answer.why.startswith("slab-00000000.kvs, slot 0: ")


@pytest.mark.parametrize("at", [0, 2500, SHARD - 1])
def test_a_flipped_byte_in_a_payload_is_found(it: Fixture, at: int) -> None:
    it.write(0, 1)
    it.flip(0, it.header_bytes + at)
    answer = it.read(0, 1)
    assert answer.results == (CORRUPT, OK)
    assert ("decrypt" if it.config.ssd_key_file else "do not match their checksum") in answer.why
    assert it.tier.stats().records_corrupt == 1


def test_a_misdirected_read_is_found(it: Fixture) -> None:
    it.write(0, 1)
    answer = it.read(0, 1, at=[place(1), place(0)])
    assert answer.results == (CORRUPT, CORRUPT)
    assert "another key" in answer.why


def test_swapped_slots_are_found(it: Fixture) -> None:
    it.write(0, 1)
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    data = it.slab_file().read_bytes()[4096 : 4096 + 2 * size]
    it.spoil(0, 0, data[size:] + data[:size])
    assert it.read(0, 1).results == (CORRUPT, CORRUPT)


def test_a_stale_record_is_found(it: Fixture) -> None:
    it.write(0)
    newer = DiskPlace(SlabId(0), 0, place(0).generation + 1)
    answer = it.read(0, at=[newer])
    assert answer.results == (CORRUPT,)
    assert "generation" in answer.why


def test_a_slot_that_was_reused_before_the_restart_is_no_corruption(it: Fixture) -> None:
    """Its chunk was evicted and the slot filled again; the daemon was killed before the index knew of either."""
    it.write(0, 1)
    assert it.commit(0, 1).results == (OK,)
    newer = DiskPlace(SlabId(0), 0, place(0).generation + SLOTS)
    it.submit(replace(it.writing(0), targets=(newer,), records=it.records([2])))
    assert it.read(0).results == (CORRUPT,), "within one boot that is no order of events"
    it.again()
    answer = it.read(0, 1)
    assert answer.results == (REUSED, OK)
    assert "reused before the restart" in answer.why
    later = DiskPlace(SlabId(0), 1, 2 << 32)
    it.submit(replace(it.writing(1), targets=(later,), records=it.records([2])))
    assert it.read(1).results == (CORRUPT,), "this boot knows what it writes over"
    assert it.read(0, at=[replace(place(0), generation=5 << 32)]).results == (CORRUPT,), "an older record"


def test_a_record_of_another_namespace_is_found(it: Fixture) -> None:
    it.write(0)
    effect = it.reading(0)
    foreign = replace(effect, records=(replace(effect.records[0], namespace=b"O" * 32),))
    answer = it.submit(foreign)
    assert isinstance(answer, DiskDone)
    assert answer.results == (CORRUPT,)


@pytest.mark.parametrize("kept", [0, 100, 256, 2048, 4096, 4097, 5000])
def test_a_torn_write_is_found(it: Fixture, kept: int) -> None:
    """Only the first `kept` bytes of the second record reached the slot; behind them is still the first one."""
    size = format.slot_bytes(SHARD, direct=it.config.ssd_direct_io)
    it.write(1)
    old = it.slab_file().read_bytes()[4096 + size : 4096 + 2 * size]
    it.memory.bytes[:] ^= 0xFF
    effect = it.writing(1)
    spot = DiskPlace(SlabId(0), 1, 99)
    it.submit(replace(effect, targets=(spot,)))
    it.spoil(1, kept, old[kept:])
    assert it.read(1, at=[spot]).results == (CORRUPT,)


def test_a_slot_that_was_never_written_is_found(it: Fixture) -> None:
    assert it.read(7).results == (CORRUPT,)


def test_a_file_that_was_cut_is_found(it: Fixture) -> None:
    it.write(0, 15)
    os.truncate(it.slab_file(), 8 * 4096)
    answer = it.read(0, 15)
    assert answer.results == (OK, CORRUPT)
    assert "the file ends" in answer.why


def test_bytes_that_changed_under_a_write_are_found(it: Fixture) -> None:
    effect = it.writing(0)
    it.slot(0)[17] ^= 1
    it.submit(effect)
    it.slot(0)[17] ^= 1
    assert it.read(0).results == (CORRUPT,)


def test_lies_of_the_disk_are_found(it: Fixture) -> None:
    it.write(0)
    it.weather({"calls": ["read"], "do": "flip", "count": 1})
    assert it.read(0).results == (CORRUPT,)
    assert it.read(0).results == (OK,)
    it.weather({"calls": ["write"], "do": "tear"})
    assert it.write(1).results == (OK,)
    assert it.read(1).results == (CORRUPT,)


# ------------------------------------------------------------------------------------------------ errors of the disk


def test_one_bad_record_does_not_spoil_the_others(it: Fixture) -> None:
    """All of them fail in one call; then each is tried alone."""
    it.weather(*fails("write", 1, 3))
    answer = it.write(0, 1, 2)
    assert answer.results == (OK, IO_ERROR, OK)
    assert answer.why.startswith("EIO") and answer.why.endswith("(slab-00000000.kvs)")
    it.weather(*fails("read", 1, 4))
    assert it.read(0, 1, 2).results == (OK, CORRUPT, IO_ERROR)
    assert it.tier.stats().io_errors == 2


def fails(call: str, *numbers: int) -> list[dict[str, object]]:
    return [{"calls": [call], "do": "EIO", "skip": number - 1, "count": 1} for number in numbers]


def test_places_and_slots_that_do_not_exist_are_errors_of_one_record(it: Fixture) -> None:
    at = [DiskPlace(SlabId(9), 0, 1), DiskPlace(SlabId(0), SLOTS, 1), place(0)]
    it.write(0)
    assert it.read(0, 0, 0, at=at).results == (IO_ERROR, IO_ERROR, OK)
    effect = it.writing(0)
    nowhere = (replace(effect.sources[0], segment=SegmentId(5)),)
    answer = it.submit(replace(effect, sources=nowhere))
    assert isinstance(answer, DiskDone)
    assert answer.results == (IO_ERROR,)
    assert "no such segment" in answer.why


def test_a_record_larger_than_its_slot_is_not_written_into_the_next_one(it: Fixture) -> None:
    it.write(0, 1)
    big = Extent(SegmentId(0), 0, 2 * SHARD, cell=0, generation=1)
    record = Record(DIGEST, key(0), 0, 2 * SHARD, 0)
    answer = it.submit(WriteRecords(it.next_op(), (record,), (big,), (place(0),)))
    assert isinstance(answer, DiskDone)
    assert answer.results == (IO_ERROR,)
    assert it.read(0, 1).results == (OK, OK)


def test_what_a_failed_sync_lost_never_becomes_durable_by_trying_again(plain: Fixture) -> None:
    """The kernel drops the dirty mark of pages that it could not write: a second sync would succeed, for nothing."""
    plain.write(0, 1)
    plain.weather({"calls": ["sync"], "do": "EIO", "count": 1})
    answer = plain.commit(0)
    assert answer.results == (CORRUPT,)
    assert "a sync failed: EIO" in answer.why
    for numbers in ((0,), (1,), (0, 1)):
        answer = plain.commit(*numbers)
        assert answer.results == (CORRUPT,)
        assert "a failed sync lost it" in answer.why
    assert plain.commit().results == (OK,), "what names none of them goes on"
    plain.write(0)
    assert plain.commit(0).results == (OK,), "written again, it is a new record"
    assert plain.commit(1).results == (CORRUPT,)
    assert keys(plain.again()) == [key(0)]


@pytest.mark.parametrize("fails_meanwhile", [True, False])
def test_a_sync_beside_a_write_of_neighbours_proves_nothing_of_any(
    plain: Fixture, *, fails_meanwhile: bool
) -> None:
    """One that fails while they are written has lost them all; one that succeeds may have missed them all."""
    hangs = {"calls": ["write"], "do": "hang"}
    fails_once = {"calls": ["sync"], "do": "EIO", "count": 1}
    plain.weather(hangs, *([fails_once] if fails_meanwhile else []))
    writing = plain.writing(0, 1, 2)
    plain.tier.submit(writing)
    plain.until_waiting(1)
    assert plain.commit().results == ((IO_ERROR,) if fails_meanwhile else (OK,))
    plain.weather(*([] if fails_meanwhile else [fails_once]))
    assert plain.answers.get(timeout=WAIT_S) == DiskDone(writing.op, (OK,) * 3)
    if not fails_meanwhile:
        assert plain.commit().results == (IO_ERROR,)
    for number in range(3):
        answer = plain.commit(number)
        assert answer.results == (CORRUPT,), f"record {number}"
        assert "a failed sync lost it" in answer.why


def test_a_sync_that_fails_names_its_slab_and_the_others_are_synced(plain: Fixture) -> None:
    plain.create(1)
    plain.write(0, SLOTS)
    plain.weather({"calls": ["sync"], "files": "slab-00000000.kvs", "do": "EIO"})
    answer = plain.commit(0, SLOTS, slabs=(0, 1))
    assert (answer.results, answer.slabs) == ((CORRUPT,), (0,))
    assert answer.why.endswith("(slab-00000000.kvs)")
    plain.weather({"calls": ["sync"], "do": "EIO"})
    assert plain.commit(SLOTS, slabs=()).results == (OK,), "it was synced, and is not again"
    answer = plain.commit(slabs=(0,))
    assert (answer.results, answer.slabs) == ((IO_ERROR,), (0,))
    plain.weather()
    assert keys(plain.again()) == [key(SLOTS)]


def test_a_record_that_is_being_written_while_a_sync_fails_counts_as_lost(plain: Fixture) -> None:
    hang = {"calls": ["write"], "do": "hang"}
    plain.weather(hang)
    writing = plain.writing(0)
    plain.tier.submit(writing)
    plain.until_waiting(1)
    plain.weather(hang, {"calls": ["sync"], "do": "EIO", "count": 1})
    assert plain.commit().results == (IO_ERROR,)
    plain.weather()
    assert plain.answers.get(timeout=WAIT_S) == DiskDone(writing.op, (OK,))
    assert plain.commit(0).results == (CORRUPT,)


def test_a_record_that_is_written_while_a_sync_fails_counts_as_lost(
    plain: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first byte to its last while the call runs: the kernel began to write it back, and failed with it; the
    call that reports so may be this one, and then no other will."""
    began, goes_on = threading.Event(), threading.Event()

    def sync(fd: int) -> None:
        began.set()
        assert goes_on.wait(WAIT_S)
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patched:
        patched.setattr(plain.disk, "sync", sync)
        plain.tier.submit(committing := plain.committing())
        assert began.wait(WAIT_S)
        assert plain.write(0).results == (OK,)
        goes_on.set()
        answer = plain.answers.get(timeout=WAIT_S)
    assert (answer.op, answer.results) == (committing.op, (IO_ERROR,))
    assert plain.commit(0).results == (CORRUPT,)
    plain.write(0)
    assert plain.commit(0).results == (OK,)


def test_slabs_that_the_batch_forgot_to_name_are_synced(plain: Fixture) -> None:
    plain.write(0)
    plain.weather({"calls": ["sync"], "files": "slab-*", "do": "EIO", "count": 1})
    assert plain.commit(0, slabs=()).results == (CORRUPT,)


def test_a_batch_with_an_unknown_slab_is_refused(plain: Fixture) -> None:
    plain.write(0)
    assert plain.commit(0, slabs=(0, 5)).results == (IO_ERROR,)
    assert plain.commit(SLOTS * 5).results == (IO_ERROR,)
    assert keys(plain.again()) == []


def test_a_failing_index_is_said_and_heals(plain: Fixture) -> None:
    plain.write(0, 1)
    plain.weather({"calls": ["index_commit"], "do": "EIO", "count": 1})
    assert plain.commit(0).results == (IO_ERROR,)
    assert plain.commit(1).results == (OK,)
    plain.weather()
    assert keys(plain.again()) == [key(1)]


def test_power_cuts_forget_only_what_was_not_acknowledged(plain: Fixture) -> None:
    """Writes reach the file with the sync only. What was committed is served after the cut; what was written later over
    a slot of its own is not."""
    plain.weather({"calls": ["write"], "files": "slab-*", "do": "hold"})
    plain.write(0)
    assert plain.commit(0).results == (OK,)
    plain.write(1)
    assert plain.read(1).results == (OK,)
    plain.again()
    assert plain.read(0, 1).results == (OK, CORRUPT)


def test_index_batches_are_performed_in_the_order_of_submission(plain: Fixture) -> None:
    plain.write(0)
    plain.weather({"calls": ["index_commit"], "do": "hang"})
    batches = [
        plain.committing(0),
        plain.committing(chunks_deleted=((1, key(0)),)),
        plain.committing(0),
        plain.committing(chunks_deleted=((1, key(0)),)),
    ]
    for batch in batches:
        plain.tier.submit(batch)
    plain.until_waiting(1)
    plain.weather()
    assert [plain.answers.get(timeout=WAIT_S).op for _ in batches] == [batch.op for batch in batches]
    assert keys(plain.again()) == []


@pytest.mark.parametrize(
    ("calls", "result"),
    [
        ({"calls": ["open"], "files": "probe", "do": "EIO"}, IO_ERROR),
        ({"calls": ["write"], "files": "probe", "do": "ENOSPC"}, NO_SPACE),
        ({"calls": ["sync"], "files": "probe", "do": "EIO"}, IO_ERROR),
        ({"calls": ["read"], "files": "probe", "do": "flip"}, CORRUPT),
        ({"calls": ["index_commit"], "do": "EIO"}, IO_ERROR),
    ],
)
def test_a_probe_finds_what_is_wrong_and_that_it_is_right_again(
    it: Fixture, calls: dict[str, object], result: DiskResult
) -> None:
    assert it.submit(ProbeDisk(it.next_op())) == DiskDone(OpId(it.ops), (OK,))
    it.weather(calls)
    answer = it.submit(ProbeDisk(it.next_op()))
    assert isinstance(answer, DiskDone)
    assert answer.results == (result,)
    assert answer.why
    it.weather()
    assert it.submit(ProbeDisk(it.next_op())) == DiskDone(OpId(it.ops), (OK,))


def test_an_answer_that_cannot_be_delivered_does_not_end_the_thread(
    plain: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    undelivered: queue.SimpleQueue[object] = queue.SimpleQueue()

    def fail(answer: object) -> None:
        undelivered.put(answer)
        raise RuntimeError("nobody there")

    with monkeypatch.context() as patch:
        patch.setattr(plain.tier, "_done", fail)
        for _ in range(2 * plain.config.ssd_threads):
            plain.tier.submit(plain.writing(0))
        plain.tier.submit(plain.committing())
        for _ in range(2 * plain.config.ssd_threads + 1):
            undelivered.get(timeout=WAIT_S)
    assert plain.write(0).results == (OK,)
    assert plain.commit(0).results == (OK,)


# -------------------------------------------------------------------------------------------------------------- slabs


def test_a_slab_is_preallocated(it: Fixture) -> None:
    status = it.slab_file().stat()
    expected = format.slab_file_bytes(format.slot_bytes(SHARD, direct=it.config.ssd_direct_io), SLOTS)
    assert status.st_size == expected
    assert status.st_blocks * 512 >= expected
    assert status.st_mode & 0o777 == 0o600


def test_the_cap_is_hard_and_counts_the_index(plain: Fixture) -> None:
    slab = plain.config.ssd_slab_bytes
    slots = (slab - 4096) // 8192
    made = 0
    while isinstance(answer := plain.create(1 + made, slots=slots), SlabReady):
        made += 1
    assert answer.results == (NO_SPACE,)
    assert "exceed ssd_bytes by" in answer.why
    assert 1 <= made <= plain.config.ssd_slabs_max
    used = SSD_OVERHEAD_BYTES + plain.config.ssd_index_max + plain.tier.stats().slab_bytes
    assert used <= plain.config.ssd_bytes < used + slab
    files = [path for path in Path(plain.config.ssd_dir).rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) <= plain.config.ssd_bytes
    assert plain.commit(slabs_deleted=(SlabId(1),)).results == (OK,)
    assert not plain.slab_file(1).exists()
    assert isinstance(plain.create(1 + made + 1, slots=slots), SlabReady)


@pytest.mark.parametrize("call", ["open", "allocate", "write", "sync", "sync_directory", "index_commit"])
def test_a_slab_that_fails_half_way_leaves_nothing(plain: Fixture, call: str) -> None:
    for do, result in (("ENOSPC", NO_SPACE), ("EIO", IO_ERROR)):
        plain.weather({"calls": [call], "do": do})
        answer = plain.create(1)
        assert isinstance(answer, DiskDone)
        assert answer.results == (result,)
        assert not plain.slab_file(1).exists()
        assert plain.tier.stats().slab_files == 1
    plain.weather()
    used = plain.tier.stats().slab_bytes
    assert isinstance(plain.create(1), SlabReady)
    assert plain.tier.stats().slab_bytes == 2 * used


def test_a_slab_that_could_not_be_removed_goes_on_counting_until_the_next_start(plain: Fixture) -> None:
    before = plain.tier.stats().slab_bytes
    plain.weather({"calls": ["unlink"], "do": "EIO"})
    assert plain.commit(slabs_deleted=(SlabId(0),)).results == (OK,)
    assert plain.tier.stats().slab_bytes == before
    plain.weather()
    assert plain.again().slabs == []
    assert not plain.slab_file().exists()
    assert plain.tier.stats().slab_bytes == 0


def test_a_slab_that_could_not_be_removed_is_removed_before_the_next_one_is_made(plain: Fixture) -> None:
    plain.weather({"calls": ["unlink"], "files": "slab-00000000.kvs", "do": "EIO"})
    assert plain.commit(slabs_deleted=(SlabId(0),)).results == (OK,)
    used = plain.tier.stats().slab_bytes
    assert isinstance(plain.create(1), SlabReady)
    assert plain.tier.stats().slab_bytes == 2 * used and plain.slab_file(0).exists(), "it counts"
    plain.weather()
    assert isinstance(plain.create(2), SlabReady)
    assert plain.tier.stats().slab_bytes == 2 * used
    assert not plain.slab_file(0).exists()


def test_the_same_slab_is_not_created_twice(plain: Fixture) -> None:
    plain.write(0)
    answer = plain.create(0)
    assert isinstance(answer, DiskDone)
    assert answer.results == (IO_ERROR,)
    assert plain.read(0).results == (OK,)


def test_a_deleted_slab_is_closed_and_gone(plain: Fixture) -> None:
    plain.write(0)
    plain.commit(0)
    deleted = plain.commit(chunks_deleted=((1, key(0)),), slabs_deleted=(SlabId(0),))
    assert deleted.results == (OK,)
    assert plain.read(0).results == (IO_ERROR,)
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd)]
    assert [path for path in open_files if str(plain.slab_file()) in path] == []
    snapshot = plain.again()
    assert (snapshot.slabs, snapshot.next_slab, keys(snapshot)) == ([], 1, [])


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_file_that_the_index_does_not_name_is_removed(plain: Fixture) -> None:
    stray = plain.slab_file(77)
    stray.write_bytes(b"half a slab")
    plain.again()
    assert not stray.exists()
    assert plain.slab_file().exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "header", "another"])
def test_a_slab_that_is_missing_or_damaged_takes_its_chunks_along(
    plain: Fixture, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain.create(1)
    plain.write(0, 1, SLOTS)
    plain.commit(0, 1, SLOTS, slabs=(0, 1))
    match damage:
        case "missing":
            plain.slab_file().unlink()
        case "cut":
            os.truncate(plain.slab_file(), 40960)
        case "header":
            with open(plain.slab_file(), "r+b") as file:
                file.write(b"x")
        case "another":
            plain.slab_file().write_bytes(plain.slab_file(1).read_bytes())
    snapshot = plain.again()
    assert [row.slab for row in snapshot.slabs] == [1]
    assert keys(snapshot) == [key(SLOTS)]
    assert plain.read(SLOTS).results == (OK,)
    assert not plain.slab_file().exists()
    assert "dropped" in caplog.text
    caplog.clear()
    assert keys(plain.again()) == [key(SLOTS)]
    assert not caplog.text, "the second start finds all in order"


def test_slabs_beyond_a_cap_that_was_lowered_are_dropped(plain: Fixture) -> None:
    slots = format.slots_per_slab(plain.config.ssd_slab_bytes, 8192)
    for number in (1, 2, 3):
        plain.create(number, slots=slots)
    plain.write(0, SLOTS, 2 * SLOTS, 3 * SLOTS)
    plain.commit(0, SLOTS, 2 * SLOTS, 3 * SLOTS, slabs=(0, 1, 2, 3))
    plain.config = replace(plain.config, ssd_bytes=SSD_OVERHEAD_BYTES + 2 * MIB + 9 * MIB)
    snapshot = plain.again()
    assert [row.slab for row in snapshot.slabs] == [0, 1, 2]
    assert keys(snapshot) == [key(0), key(SLOTS), key(2 * SLOTS)]
    assert plain.tier.slabs_max == 2, "of full size"
    assert not plain.slab_file(3).exists()


def test_an_index_that_was_larger_counts_as_large_as_it_is(plain: Fixture) -> None:
    plain.write(0)
    plain.commit(0)
    before = plain.config
    smaller = replace(before, ssd_index_bytes=MIB)
    plain.config = replace(smaller, ssd_bytes=SSD_OVERHEAD_BYTES + 2 * MIB + 8 * MIB - 1)
    plain.again()
    assert plain.tier.slabs_max == 1, "not two"
    plain.config = replace(smaller, ssd_bytes=SSD_OVERHEAD_BYTES + MIB + 4 * MIB)
    with pytest.raises(ConfigError, match=r"ssd_bytes=.*no room for one slab file beside the index"):
        plain.again()
    assert plain.slab_file().exists(), "and nothing is lost by the attempt"
    plain.config = before
    assert keys(plain.open()) == [key(0)]


# ---------------------------------------------------------------------------------------------------- settings, locks


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ssd_bytes": 6 * MIB}, "ssd_bytes=.*no room for one slab"),
        ({"ssd_threads": 257}, "ssd_threads=257"),
        ({"ssd_slab_bytes": 4096}, "ssd_slab_bytes=4096.*too small"),
        ({"ssd_index_bytes": 4096}, "ssd_index_bytes=4096.*at least"),
        ({"ssd_threads": 0}, "ssd_threads=0"),
        ({"ssd_slab_bytes": 16384, "ssd_bytes": 1 << 44}, "ssd_slab_bytes=16384.*files may be open"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Fixture(tmp_path, settings(tmp_path, **changes)).open()
    assert not (tmp_path / "ssd").exists()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    it = Fixture(tmp_path, settings(tmp_path))
    Path(it.config.ssd_dir).mkdir()
    Path(it.config.ssd_dir).chmod(0o777)
    with pytest.raises(ConfigError, match="written to by other users"):
        it.open()


def test_a_second_opener_is_refused_with_the_pid_of_the_first(plain: Fixture) -> None:
    second = SsdTier(plain.config, plain.memory, RealDisk(), done=lambda _: None)
    with pytest.raises(ConfigError, match=rf"another daemon uses this directory \(pid {os.getpid()}\)"):
        second.open()
    assert plain.write(0).results == (OK,)
    plain.again()


def test_the_layout_of_a_directory_stays_what_it_was(it: Fixture) -> None:
    it.tier.close(WAIT_S)
    it.config = replace(it.config, ssd_direct_io=not it.config.ssd_direct_io)
    with pytest.raises(ConfigError, match="ssd_direct_io"):
        it.open()
    it.config = replace(it.config, ssd_direct_io=not it.config.ssd_direct_io)
    it.open()


# ---------------------------------------------------------------------------------------------------- hanging, closing


def test_closing_does_not_wait_for_a_hung_read(plain: Fixture) -> None:
    plain.write(0)
    plain.weather({"calls": ["read"], "do": "hang"})
    hung = plain.reading(0)
    plain.tier.submit(hung)
    plain.until_waiting(1)
    closed = threading.Event()
    closer = threading.Thread(target=lambda: (plain.tier.close(0.2), closed.set()))
    closer.start()
    assert closed.wait(WAIT_S), "the read hangs still"
    closer.join(WAIT_S)
    assert plain.answers.empty()
    with pytest.raises(ConfigError, match="another daemon uses"):
        SsdTier(plain.config, plain.memory, RealDisk(), done=lambda _: None).open()
    plain.weather()
    assert plain.answers.get(timeout=WAIT_S) == DiskDone(hung.op, (OK,)), (
        "answered when the call has returned"
    )


def test_closing_with_all_threads_hung_fails_what_waits(plain: Fixture) -> None:
    plain.write(0)
    plain.weather({"calls": ["read", "sync"], "do": "hang"})
    hung = [plain.reading(0) for _ in range(plain.config.ssd_threads)]
    sync = plain.committing(0)
    waiting: list[DiskEffect] = [
        plain.reading(0, 0),
        plain.writing(1),
        plain.committing(),
        ProbeDisk(plain.next_op()),
    ]
    for effect in (*hung, sync):
        plain.tier.submit(effect)
    plain.until_waiting(len(hung) + 1)
    for effect in waiting:
        plain.tier.submit(effect)
    plain.tier.close(0.2)
    answers = {}
    while not plain.answers.empty():
        answer = plain.answers.get()
        assert isinstance(answer, DiskDone)
        answers[answer.op] = answer
    assert answers.keys() == {effect.op for effect in waiting}
    assert answers[waiting[0].op].results == (IO_ERROR, IO_ERROR)
    assert {answer.why for answer in answers.values()} == {io_pool.CLOSING}
    plain.tier.submit(plain.writing(1, 2))
    assert plain.answers.get().results == (IO_ERROR, IO_ERROR)
    plain.weather()
    ended = {plain.answers.get(timeout=WAIT_S).op for _ in range(len(hung) + 1)}
    assert ended == {effect.op for effect in (*hung, sync)}


def test_closing_lets_what_was_submitted_end(plain: Fixture) -> None:
    effects = [plain.writing(*range(SLOTS)), plain.committing()]
    for effect in effects:
        plain.tier.submit(effect)
    plain.tier.close(WAIT_S)
    answers = [plain.answers.get_nowait() for _ in effects]
    assert {answer.op for answer in answers} == {effect.op for effect in effects}
    assert all(set(answer.results) == {OK} for answer in answers if isinstance(answer, DiskDone))
    plain.open()


def test_reads_go_on_while_one_thread_hangs(plain: Fixture) -> None:
    plain.write(0, 1)
    plain.weather({"calls": ["read"], "do": "hang", "count": 1})
    hung = plain.reading(0)
    plain.tier.submit(hung)
    plain.until_waiting(1)
    assert plain.read(1).results == (OK,)
    plain.weather()
    assert plain.answers.get(timeout=WAIT_S).op == hung.op


def test_too_many_ops_are_refused_at_once(plain: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.ssd.OPS_MAX", 3)
    plain.weather({"calls": ["write"], "do": "hang"})
    hung = [plain.writing(number) for number in range(plain.config.ssd_threads)]
    for number, effect in enumerate(hung):
        plain.tier.submit(effect)
        plain.until_waiting(number + 1)
    waiting = [plain.writing(5) for _ in range(3)]
    for effect in waiting:
        plain.tier.submit(effect)
    assert plain.write(6, 7).results == (IO_ERROR, IO_ERROR)
    plain.weather()
    ended = {plain.answers.get(timeout=WAIT_S).op for _ in range(len(hung) + len(waiting))}
    assert ended == {effect.op for effect in (*hung, *waiting)}


# ----------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder, image = tmp_path / "mount", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(folder)]]
    else:
        with open(image, "wb") as file:
            file.truncate(64 * MIB)
        commands = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            pytest.skip(f"cannot mount a small file system here: {problem}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """To the last byte."""
    with open(folder / "filler", "ab", buffering=0) as file:
        for piece in (bytes(MIB), bytes(4096), b"\0"):
            try:
                while file.write(piece):
                    pass
            except OSError:
                continue


def test_a_disk_that_is_full_serves_what_it_has(small_disk: Path, tmp_path: Path) -> None:
    it = Fixture(
        tmp_path, settings(small_disk, ssd_bytes=1 << 30, ssd_index_bytes=4 * MIB, ssd_slab_bytes=8 * MIB)
    )
    slots = format.slots_per_slab(8 * MIB, 8192)
    it.open()
    try:
        made = 0
        while isinstance(answer := it.create(made, slots=slots), SlabReady):
            made += 1
        assert answer.results == (NO_SPACE,)
        assert made >= 4
        assert not it.slab_file(made).exists(), "no half file"
        it.write(0, 1)
        assert it.commit(0).results == (OK,)
        fill(small_disk)
        assert it.write(2, 3).results == (OK, OK), "slabs have their space"
        assert it.commit(1, 2).results == (OK,), "and so has the index"
        assert it.read(0, 1, 2, 3).results == (OK,) * 4
        assert it.commit(chunks_deleted=((1, key(1)),)).results == (OK,)
        assert it.create(made + 1).results == (NO_SPACE,)  # type: ignore[union-attr]
        snapshot = it.again()
        assert sorted(keys(snapshot)) == [key(0), key(2)], "a restart needs no space either"
        assert len(snapshot.slabs) == made
        assert it.read(0, 2).results == (OK, OK)
        (small_disk / "filler").unlink()
        assert isinstance(it.create(snapshot.next_slab), SlabReady), "and it heals"
    finally:
        it.tier.close(WAIT_S)


def test_an_index_without_space_of_its_own_says_so_and_heals(small_disk: Path, tmp_path: Path) -> None:
    it = Fixture(tmp_path, settings(small_disk, ssd_bytes=1 << 30, ssd_index_bytes=256 * MIB))
    it.open()
    try:
        assert isinstance(it.create(), SlabReady)
        it.write(*range(SLOTS))
        assert it.commit(0).results == (OK,)
        fill(small_disk)
        entries = tuple(SessionEntry(ChunkKey(b"%060d" % number), 16 * number, 16) for number in range(5_000))
        sessions = (SessionRecord(1, b"session-%d" % number, 1, entries) for number in range(100))
        answers = (it.commit(sessions=(session,)).results for session in sessions)
        assert next(answer for answer in answers if answer != (OK,)) == (NO_SPACE,)
        assert it.read(0).results == (OK,)
        (small_disk / "filler").unlink()
        assert it.commit(*range(SLOTS)).results == (OK,)
        assert len(keys(it.again())) == SLOTS
    finally:
        it.tier.close(WAIT_S)


# ----------------------------------------------------------------------------------------------------------- kill -9


def turn(it: Fixture, number: int) -> tuple[Record, Extent, DiskPlace]:
    """Chunk `number` of a process that writes them in a circle of slots."""
    (record,) = it.records([number % SLOTS])
    spot = DiskPlace(SlabId(0), number % SLOTS, (1 << 32) + number)
    return replace(record, key=key(number)), extent(number % SLOTS), spot


def test_what_was_answered_survives_kill_9(tmp_path: Path) -> None:
    """A process writes and commits without pause, and says so; it is killed at an arbitrary moment, five times over."""
    it = Fixture(tmp_path, settings(tmp_path))
    last = 0
    for round_number in range(5):
        command = [sys.executable, "-P", __file__, str(tmp_path), str(last + 1)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(20 + 7 * round_number):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        said = child.stdout.read().rpartition("\n")[0].split()
        last = int(said[-1]) if said else last
        child.stdout.close()
        assert child.wait(WAIT_S) == -signal.SIGKILL

        snapshot = it.open()  # nobody has to unlock it
        assert snapshot.boot_count == 2 * round_number + 2
        found = {}
        for batch in snapshot.chunks:
            for row, name in enumerate(batch.keys):
                spot = DiskPlace(SlabId(0), batch.slot[row], batch.generation[row])
                found[int(name.removeprefix(b"key-"))] = spot
        # What was answered is there, but for the one that the next turn deletes first; at most that turn's is new.
        assert set(range(max(1, last - SLOTS + 2), last + 1)) <= found.keys()
        assert found.keys() <= set(range(last - SLOTS + 1, last + 2))
        for number, spot in found.items():
            record, target, expected = turn(it, number)
            assert spot == expected
            answer = it.submit(ReadRecords(it.next_op(), (record,), (spot,), (target,)))
            assert answer == DiskDone(OpId(it.ops), (OK,))
        it.tier.close(WAIT_S)


def write_for_ever(folder: Path, number: int) -> None:
    """The process that is killed: frees a slot, fills it, and prints the number of each chunk that is durable."""
    it = Fixture(folder, settings(folder))
    snapshot = it.open()
    keys(snapshot)
    if not snapshot.slabs:
        it.create()
    while True:
        record, source, spot = turn(it, number)
        old = ((1, key(number - SLOTS)),)
        assert it.commit(chunks_deleted=old).results == (OK,)
        it.submit(WriteRecords(it.next_op(), (record,), (source,), (spot,)))
        chunk = ChunkRecord(1, record.key, 16, 0, b"m" * 16, (spot,), (record.checksum,))
        assert it.submit(WriteIndex(it.next_op(), (SlabId(0),), chunks=(chunk,))).results == (OK,)  # type: ignore[union-attr]
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))


def test_who_several_makers_are_comes_back(plain: Fixture) -> None:
    plain.write(0, 1)
    makers = ((b"d" * 16, (b"1" * 16, b"2" * 16)), (b"e" * 16, (b"1" * 16, b"2" * 16, b"3" * 16)))
    assert plain.commit(0, 1, makers=makers).results == (OK,)
    snapshot = plain.again()
    assert snapshot.makers == dict(makers)
    assert len(keys(snapshot)) == 2


def test_who_was_recalled_comes_back(plain: Fixture) -> None:
    bars = (Bar(b"", b"1" * 16, purge=False), Bar(b"t" * 16, b"1" * 16, purge=True))
    assert plain.commit(slabs=(), bars=bars).results == (OK,)
    assert set(plain.again().bars) == set(bars)
    later = Bar(b"", b"1" * 16, purge=True)
    assert plain.commit(slabs=(), bars=(later,)).results == (OK,)
    assert set(plain.again().bars) == {later, bars[1]}
