"""The index: what was answered OK is there after a restart, what was not is not, and what leads nowhere is dropped."""

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.core.events import ChunkRecord, NamespaceRecord, SessionEntry, SessionRecord, WriteIndex
from kvstore.errors import ConfigError
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.sim.faulty_disk import FaultyDisk
from kvstore.tiers import format, index
from kvstore.tiers.check import Check, Findings
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.index import Index, SlabRow
from kvstore.types import ChunkKey, DiskPlace, DiskResult, OpId, SlabId

MIB = 1 << 20
SPEC = NamespaceSpec(
    model="m",
    weights_digest=b"w",
    layout_fingerprint="l",
    chunk_tokens=16,
    groups=(GroupSpec("g", 4096, 2),),
)
NAMESPACE = NamespaceRecord(3, "alice", SPEC)
OTHER = NamespaceRecord(4, "bob", dataclasses.replace(SPEC, groups=(GroupSpec("g", 4096),)))
SLAB = SlabRow(SlabId(0), 8192, 100)
OK = (DiskResult.OK, "")


class Fixture:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "ssd" / "index")
        self.control = folder / "faults.json"
        self.disk = FaultyDisk(RealDisk(), str(self.control))
        self.index = self.open()

    def open(self, *, bytes_max: int = 4 * MIB, direct: bool = False, slab_bytes: int = MIB) -> Index:
        self.index = Index(
            self.path, bytes_max=bytes_max, direct=direct, slab_bytes=slab_bytes, disk=self.disk
        )
        return self.index

    def again(self, *, bytes_max: int = 4 * MIB) -> Index:
        self.index.close()
        return self.open(bytes_max=bytes_max)

    def weather(self, *faults: dict[str, object]) -> None:
        self.control.write_text(json.dumps(faults))

    def set_up(self) -> None:
        assert self.index.add_slab(*SLAB) == OK
        assert self.write(namespaces=(NAMESPACE, OTHER)) == OK

    def write(self, **fields: object) -> index.Outcome:
        return self.index.write(WriteIndex(OpId(1), (), **fields))  # type: ignore[arg-type]

    def chunks(self, slabs: Sequence[SlabRow] = (SLAB,)) -> list[ChunkRecord]:
        """What a restart would know, one by one."""
        specs = {record.number: record.spec for record in self.index.namespaces()}
        found = []
        for batch in self.index.chunks(specs, slabs, direct=False):
            for row in range(len(batch)):
                numbers = zip(
                    *(getattr(batch, name)[row].tolist() for name in ("slab", "slot", "generation")),
                    strict=True,
                )
                places = tuple(
                    DiskPlace(SlabId(slab), slot, generation) for slab, slot, generation in numbers
                )
                counts = (int(batch.token_count[row]), int(batch.flags[row]))
                sums = tuple(batch.checksum[row].tolist())
                found.append(
                    ChunkRecord(batch.namespace, batch.keys[row], *counts, batch.maker[row], places, sums)
                )
        return found


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Fixture]:
    it = Fixture(tmp_path)
    yield it
    it.index.close()


def chunk(name: str, *slots: int, namespace: int = 3, slab: int = 0) -> ChunkRecord:
    places = tuple(DiskPlace(SlabId(slab), slot, (1 << 32) + slot) for slot in slots)
    sums = tuple(2**64 - 1 - slot for slot in slots)
    return ChunkRecord(namespace, ChunkKey(name.encode()), 16, 1, b"m" * 16, places, sums)


def session(name: bytes, count: int, *, version: int = 1, namespace: int = 3) -> SessionRecord:
    entries = (SessionEntry(ChunkKey(b"%032d" % number), 16 * number, 16) for number in range(count))
    return SessionRecord(namespace, name, version, tuple(entries))


# ------------------------------------------------------------------------------------------------- opening, restarts


def test_boots_are_counted(it: Fixture) -> None:
    assert it.index.boot_count == 1
    assert [it.again().boot_count for _ in range(3)] == [2, 3, 4]


def test_what_was_written_is_there_after_a_restart(it: Fixture) -> None:
    it.set_up()
    chunks = [chunk("a", 0, 1), chunk("b", 2, 3), chunk("c", 4, namespace=4)]
    sessions = [session(b"s", 1), session(b"t", 600, version=9), session(b"", 0)]
    assert it.write(chunks=tuple(chunks), sessions=tuple(sessions)) == OK
    it.again()
    assert it.index.slabs() == [SLAB]
    assert it.index.next_slab == 1
    assert it.index.namespaces() == [NAMESPACE, OTHER]
    assert sorted(it.index.sessions([3, 4]), key=lambda one: one.session) == sorted(
        sessions, key=lambda one: one.session
    )
    assert it.chunks() == chunks


def test_what_was_deleted_is_gone_after_a_restart(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1), chunk("b", 2, 3)), sessions=(session(b"s", 600), session(b"ss", 600)))
    deleted = it.write(
        chunks_deleted=((3, ChunkKey(b"a")), (3, ChunkKey(b"none"))), sessions_deleted=((3, b"s"),)
    )
    assert deleted == OK
    it.again()
    assert it.chunks() == [chunk("b", 2, 3)]
    assert it.index.sessions([3]) == [session(b"ss", 600)]
    it.write(slabs_deleted=(SlabId(0),))
    it.again()
    assert it.index.slabs() == []
    assert it.index.next_slab == 1, "numbers are never used again"


def test_a_key_that_is_deleted_and_written_in_one_batch_is_there(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1),))
    it.write(chunks=(chunk("a", 2, 3),), chunks_deleted=((3, ChunkKey(b"a")),))
    assert it.chunks() == [chunk("a", 2, 3)]


def test_a_deleted_namespace_takes_its_own_rows_with_it(it: Fixture) -> None:
    it.set_up()
    it.write(
        chunks=(chunk("a", 0, 1), chunk("a", 2, namespace=4)),
        sessions=(session(b"s", 3), session(b"s", 3, namespace=4)),
    )
    assert it.write(namespaces_deleted=(3,)) == OK
    assert it.index.namespaces() == [OTHER]
    assert it.chunks() == [chunk("a", 2, namespace=4)]
    assert it.index.sessions([3, 4]) == [session(b"s", 3, namespace=4)]


@pytest.mark.parametrize(("before", "after"), [(600, 601), (600, 250), (250, 251), (600, 0), (0, 600)])
def test_a_session_may_grow_and_shrink(it: Fixture, before: int, after: int) -> None:
    it.set_up()
    it.write(sessions=(session(b"s", before), session(b"t", 600)))
    it.write(sessions=(session(b"s", after, version=2),))
    found = sorted(it.again().sessions([3]), key=lambda one: one.session)
    assert found == [session(b"s", after, version=2), session(b"t", 600)]


def test_a_session_that_grows_writes_its_last_page_only(it: Fixture) -> None:
    it.set_up()
    it.write(sessions=(session(b"s", 20_000),))
    start = it.index.used_bytes
    for count in range(20_001, 20_016):
        assert it.write(sessions=(session(b"s", count, version=count),)) == OK
    assert it.index.used_bytes - start < MIB // 2, "the whole session is 0.7 MB each of 15 times"


def test_a_newer_format_is_refused_with_the_remedy_and_left_alone(it: Fixture) -> None:
    put_meta(it, "format", 2)
    before = it.index.boot_count
    it.index.close()
    with pytest.raises(
        ConfigError, match=r"newer kvstored, in format 2; this one knows 1.*run the newer version"
    ):
        it.open()
    env = lmdb.open(it.path, max_dbs=8)
    with env.begin() as txn:
        assert txn.get(b"boot_count", db=env.open_db(b"meta", txn=txn)) == format.encode_meta(before)
    env.close()


def test_another_layout_is_refused_with_the_remedy(it: Fixture) -> None:
    it.index.close()
    with pytest.raises(ConfigError, match=r"ssd_direct_io=true: .*set it to false"):
        it.open(direct=True)
    with pytest.raises(ConfigError, match=rf"ssd_slab_bytes={2 * MIB}: .*set it to {MIB}"):
        it.open(slab_bytes=2 * MIB)


def test_a_damaged_index_is_refused_with_the_remedy(it: Fixture) -> None:
    it.index.close()
    Path(it.path, "data.mdb").write_bytes(b"x" * 65_536)
    with pytest.raises(ConfigError, match=r"cannot be read.*remove the directory"):
        it.open()


def test_all_its_space_is_taken_at_once(it: Fixture) -> None:
    status = Path(it.path, "data.mdb").stat()
    assert status.st_blocks * 512 >= 4 * MIB
    assert status.st_size == 4 * MIB


def test_a_cap_can_be_raised_and_an_index_that_is_larger_keeps_its_size(it: Fixture) -> None:
    it.set_up()
    it.write(sessions=(session(b"s", 40_000),))
    for wanted, expected in ((8 * MIB, 8 * MIB), (MIB, 8 * MIB)):
        it.again(bytes_max=wanted)
        assert it.index.bytes_max == Path(it.path, "data.mdb").stat().st_size == expected
        assert it.index.sessions([3]) == [session(b"s", 40_000)]


def test_where_there_is_no_room_for_all_of_it_it_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "faults.json").write_text(
        json.dumps([{"calls": ["allocate"], "files": "data.mdb", "do": "ENOSPC"}])
    )
    it = Fixture(tmp_path)
    assert "no room for the whole index" in caplog.text
    it.set_up()
    assert Path(it.path, "data.mdb").stat().st_size < MIB
    it.index.close()


# ----------------------------------------------------------------------------------------------------------- failures


def test_a_failed_transaction_leaves_nothing_and_the_next_one_works(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1),))
    it.weather({"calls": ["index_commit"], "do": "EIO", "count": 1})
    result, why = it.write(chunks=(chunk("b", 2, 3),), chunks_deleted=((3, ChunkKey(b"a")),))
    assert result == DiskResult.IO_ERROR
    assert "EIO" in why
    assert it.chunks() == [chunk("a", 0, 1)]
    assert it.write(chunks=(chunk("b", 2, 3),)) == OK
    it.again()
    assert it.chunks() == [chunk("a", 0, 1), chunk("b", 2, 3)]


@pytest.mark.parametrize(
    ("problem", "result"),
    [
        (lmdb.PanicError("mdb_txn_begin"), DiskResult.IO_ERROR),
        (lmdb.DiskError("mdb_txn_commit"), DiskResult.NO_SPACE),
        (lmdb.Error("mdb_txn_commit: Input/output error"), DiskResult.IO_ERROR),
    ],
)
def test_after_a_failure_of_lmdb_the_environment_is_opened_anew(
    it: Fixture, monkeypatch: pytest.MonkeyPatch, problem: lmdb.Error, result: DiskResult
) -> None:
    it.set_up()
    environment = it.index._reopened().env

    def fail(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(index, "_write", fail)
        assert it.write(chunks=(chunk("a", 0, 1),))[0] == result
    assert it.write(chunks=(chunk("b", 2, 3),)) == OK
    assert it.index._reopened().env is not environment
    assert it.chunks() == [chunk("b", 2, 3)]


def test_a_full_index_says_so_stays_whole_and_can_be_emptied(it: Fixture) -> None:
    it.path += "-small"
    it.again(bytes_max=MIB)
    it.set_up()
    names = (f"{number:050}" for number in range(100_000))
    written: list[str] = []
    for size in (50, 1):  # to the last page
        while True:
            few = list(islice(names, size))
            result, why = it.write(chunks=tuple(chunk(name, 0, 1) for name in few))
            if result != DiskResult.OK:
                break
            written += few
        assert result == DiskResult.NO_SPACE
        assert "the index is full" in why
    assert Path(it.path, "data.mdb").stat().st_size == MIB
    assert rows(it) == len(written)
    # Nothing can be added, but deleting works, from the first to the last, all over the pages; and it makes room.
    assert it.write(sessions=(session(b"s", 5_000),))[0] == DiskResult.NO_SPACE
    for start in range(20):
        keys = tuple((3, ChunkKey(name.encode())) for name in written[start::20])
        assert it.write(chunks_deleted=keys) == OK
    assert rows(it) == 0
    assert it.write(sessions=(session(b"s", 5_000),)) == OK
    assert it.index.used_bytes <= MIB
    assert it.again(bytes_max=MIB).sessions([3]) == [session(b"s", 5_000)]


@pytest.mark.parametrize("seed", range(2))
def test_deletions_always_find_room_however_often_the_index_was_full(it: Fixture, seed: int) -> None:
    """What counts are pages in use: those that wait to be used again are spread over the whole file by then."""
    chance = random.Random(seed)
    it.path += "-small"
    it.again(bytes_max=MIB)
    it.set_up()
    held: list[tuple[str, bytes]] = []
    fullest = 0
    for number in range(12):
        while True:
            keys = [chance.randbytes(32) for _ in range(chance.choice((1, 50, 500)))]
            names = [
                b"x" * chance.choice((5, 200)) + keys[0] + b"%d" % n for n in range(chance.choice((0, 40)))
            ]
            entries = chance.choice((1, 1, 30, 400))
            records = tuple(dataclasses.replace(chunk("k", 0, 1), key=ChunkKey(key)) for key in keys)
            sessions = tuple(session(name, entries) for name in names)
            held += [("chunks", key) for key in keys] + [("sessions", name) for name in names]
            result, _ = it.write(chunks=records, sessions=sessions)
            if result != DiskResult.OK:
                break
        assert (result, it.index.usage.full) == (DiskResult.NO_SPACE, True)
        usage = it.index.usage
        assert usage.used <= usage.bytes_max < MIB
        fullest = max(fullest, usage.used)
        assert usage.used == usage.chunks + usage.sessions + usage.other
        chance.shuffle(held)
        left = 0 if number == 11 else int(len(held) * chance.choice((0.0, 0.5, 0.9, 0.99)))
        while len(held) > left:
            size = chance.choice((20, 300, 4096))
            several, held = held[:size], held[size:]
            outcome = it.write(
                chunks_deleted=tuple((3, ChunkKey(key)) for kind, key in several if kind == "chunks"),
                sessions_deleted=tuple((3, name) for kind, name in several if kind == "sessions"),
            )
            assert outcome == OK
            assert not it.index.usage.full
    assert fullest > it.index.usage.bytes_max * 3 // 4
    assert rows(it) == 0 and not it.index.sessions([3])
    assert it.index.usage.chunks == it.index.usage.sessions == 0


def test_a_check_tells_of_an_index_that_is_nearly_full_or_was_filled_by_an_older_daemon(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    it.again(bytes_max=4 * MIB)
    assert it.write(namespaces=(NAMESPACE,)) == OK
    assert "nearly full" not in "".join(checked(it).notes)
    it.again(bytes_max=4 * MIB)
    fill_with_sessions(it, 0)
    found = checked(it)
    assert found.clean and "nearly full" in found.notes[0] and "ssd_index_bytes" in found.notes[0]
    assert f"sessions {found_bytes(it, 'sessions') / MIB:,.1f}" in found.notes[0]
    monkeypatch.setattr("kvstore.tiers.index.RESERVE_SHARE", 1_000)  # as if nothing were kept for deletions
    it.again(bytes_max=4 * MIB)
    fill_with_sessions(it, 100_000)
    monkeypatch.undo()
    found = checked(it)
    assert [(problem.kind, problem.where, problem.fixable) for problem in found.problems] == [
        ("index", "room", False)
    ]
    assert "ssd_index_bytes" in found.problems[0].remedy


def found_bytes(it: Fixture, kind: str) -> int:
    return int(getattr(it.index.usage, kind))


def fill_with_sessions(it: Fixture, start: int) -> None:
    number = start
    while it.write(sessions=tuple(session(b"%d" % n, 200) for n in range(number, number + 20)))[0] == 0:
        number += 20
    while it.write(sessions=(session(b"%d" % number, 10),))[0] == 0:
        number += 1


def checked(it: Fixture) -> Findings:
    """By a check, while nobody has it open."""
    it.index.close()
    check = Check(str(Path(it.path).parent), RealDisk())
    try:
        return check.run()
    finally:
        check.close()


def test_a_slab_file_finds_room_for_its_row_in_a_full_index(it: Fixture) -> None:
    it.path += "-small"
    it.again(bytes_max=MIB)
    it.set_up()
    for number in range(100_000):
        if it.write(sessions=(session(b"%d" % number, 200),))[0] != DiskResult.OK:
            break
    assert it.index.usage.full
    assert it.index.add_slab(SlabId(7), 4096, 10) == OK


def test_what_is_to_go_goes_though_what_is_to_be_written_finds_no_room(it: Fixture) -> None:
    it.path += "-small"
    it.again(bytes_max=MIB)
    it.set_up()
    assert it.write(chunks=(chunk("a", 0, 1),)) == OK
    gone = ((3, ChunkKey(b"a")),)
    assert it.write(chunks_deleted=gone, sessions=(session(b"s", 50_000),))[0] == DiskResult.NO_SPACE
    assert it.chunks() == []


@pytest.mark.parametrize(("chunks", "sessions"), [(2, 0), (0, 2), (1, 1), (5, 0), (0, 5), (4, 7)])
def test_deletions_are_halved_without_loss_and_without_end(chunks: int, sessions: int) -> None:
    batch = WriteIndex(
        OpId(1),
        (),
        namespaces_deleted=(3,),
        chunks_deleted=tuple((3, ChunkKey(b"%d" % number)) for number in range(chunks)),
        sessions_deleted=tuple((3, b"%d" % number) for number in range(sessions)),
        slabs_deleted=(SlabId(0),),
    )
    first, rest = index._halves(batch)
    assert (*first.chunks_deleted, *rest.chunks_deleted) == batch.chunks_deleted
    assert (*first.sessions_deleted, *rest.sessions_deleted) == batch.sessions_deleted
    assert first.chunks_deleted or first.sessions_deleted
    assert rest.chunks_deleted or rest.sessions_deleted
    assert (first.slabs_deleted, first.namespaces_deleted) == ((), ())
    assert (rest.slabs_deleted, rest.namespaces_deleted) == ((SlabId(0),), (3,))


def test_a_probe_is_a_transaction(it: Fixture) -> None:
    assert it.index.probe() == OK
    it.weather({"calls": ["index_commit"], "do": "ENOSPC", "count": 1})
    assert it.index.probe()[0] == DiskResult.NO_SPACE
    assert it.index.probe() == OK


# --------------------------------------------------------------------------------------------- rows that lead nowhere


@pytest.mark.parametrize(
    "bad",
    [
        chunk("bad", 50, 60, slab=7),
        chunk("bad", 99, 100),
        chunk("bad", 50, 50),
        chunk("bad", 50, 1),
        chunk("bad", 50),
        chunk("bad", 50, 60, namespace=9),
        chunk("bad" * 30, 50, 60),
    ],
    ids=[
        "slab gone",
        "slot beyond",
        "slot twice",
        "slot of another",
        "shard missing",
        "no namespace",
        "key too long",
    ],
)
def test_a_chunk_that_leads_nowhere_is_dropped_for_good(it: Fixture, bad: ChunkRecord) -> None:
    it.set_up()
    good = [chunk("a", 0, 1), chunk("z", 2, 3), chunk("z", 4, namespace=4)]
    it.write(chunks=(*good, bad))
    assert it.chunks() == good
    assert rows(it) == len(good)


def test_chunks_of_a_slab_of_another_class_are_dropped(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1),))
    assert it.chunks([SlabRow(SlabId(0), 12288, 100)]) == []
    assert rows(it) == 0


def test_without_slabs_there_are_no_chunks(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1),))
    assert it.chunks([]) == []


def test_unreadable_rows_are_dropped_for_good(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=(chunk("a", 0, 1), chunk("b", 2, 3)), sessions=(session(b"s", 600), session(b"t", 600)))
    spoil(it, "chunks", format.chunk_key(3, b"a"))
    spoil(it, "sessions", format.session_key(3, b"s", 2))
    assert it.chunks() == [chunk("b", 2, 3)]
    assert it.index.sessions([3]) == [session(b"t", 600)]
    assert (rows(it), rows(it, "sessions")) == (1, 4)
    spoil(it, "slabs", format.number_key(0))
    spoil(it, "namespaces", format.number_key(3))
    assert it.index.slabs() == []
    assert it.index.namespaces() == [OTHER]
    assert (rows(it, "slabs"), rows(it, "namespaces")) == (0, 1)


@pytest.mark.parametrize("page", [0, 1, 3])
def test_a_session_without_one_of_its_pages_is_dropped(it: Fixture, page: int) -> None:
    it.set_up()
    it.write(sessions=(session(b"s", 600),))
    it.index._delete("sessions", [format.session_key(3, b"s", page)])
    assert it.index.sessions([3]) == []
    assert rows(it, "sessions") == 0


@pytest.mark.parametrize("count", [6, 7, 8, 21])
def test_batches_join_without_a_seam(it: Fixture, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "CHUNK_ROWS", 7)
    monkeypatch.setattr(index, "SESSION_ROWS", 2)
    it.set_up()
    chunks = [chunk(f"{number:03}", 2 * number, 2 * number + 1) for number in range(count)]
    chunks += [chunk(f"{number:03}", 50 + number, namespace=4) for number in range(count)]
    it.write(chunks=tuple(chunks), sessions=(session(b"s", 900), session(b"t", 0), session(b"u", 251)))
    assert it.chunks() == chunks
    found = it.index.sessions([3])
    assert [len(one.entries) for one in found] == [900, 0, 251]


def test_numbers_at_the_end_of_their_range(it: Fixture) -> None:
    last = dataclasses.replace(OTHER, number=2**32 - 1)
    it.set_up()
    one = dataclasses.replace(chunk("a", 0, namespace=2**32 - 1), key=ChunkKey(b"\xff" * 64))
    it.write(namespaces=(last,), chunks=(one,))
    assert it.chunks() == [one]
    assert it.write(namespaces_deleted=(2**32 - 1,)) == OK
    assert it.chunks() == []


def test_arrays_own_what_they_show(it: Fixture) -> None:
    it.set_up()
    it.write(chunks=tuple(chunk(f"{number}", 2 * number, 2 * number + 1) for number in range(5)))
    (batch,) = it.index.chunks({3: SPEC}, [SLAB], direct=False)
    assert batch.slab.shape == batch.checksum.shape == (5, 2)
    assert batch.generation.dtype == np.uint64
    assert batch.token_count.dtype == np.int32


# -------------------------------------------------------------------------------------------------------- behind it


def rows(it: Fixture, table: str = "chunks") -> int:
    to = it.index._reopened()
    with to.env.begin() as txn:
        return int(txn.stat(getattr(to, table))["entries"])


def spoil(it: Fixture, table: str, key: bytes) -> None:
    to = it.index._reopened()
    with to.env.begin(write=True) as txn:
        value = bytearray(txn.get(key, db=getattr(to, table)) or b"")
        value[len(value) // 2] ^= 1
        txn.put(key, bytes(value), db=getattr(to, table))


def put_meta(it: Fixture, name: str, value: int) -> None:
    to = it.index._reopened()
    with it.index._begin(to.env) as txn:
        index._put_meta(to, txn, name, value)
