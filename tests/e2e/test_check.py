"""`kvctl check` on directories that a real daemon left behind, and that were damaged since."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest

from kvstore.cli import kvctl
from kvstore.client import SessionEntry
from kvstore.errors import Unavailable
from kvstore.sim.faulty_disk import FaultyDisk
from kvstore.tiers import format
from kvstore.tiers.check import Check
from kvstore.tiers.disk_port import RealDisk
from kvstore.tiers.lmdb_pages import LEAF, Damage, LmdbPages
from kvstore.types import ChunkKey, Wait

from .conftest import SMALL, Daemon
from .ssd_tools import SMALL_SSD, SPEC, client_of, hits, keys_of, save, settled_ssd

COUNT = 64


class Checked(NamedTuple):
    status: int
    found: dict[str, Any]
    error: str

    @property
    def kinds(self) -> dict[str, int]:
        counts: dict[str, int] = self.found["counts"]
        return counts


def check(ssd: Path, *arguments: str) -> Checked:
    """`kvctl check`, in this process: starting another takes most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        kvctl.main(["check", "--ssd-dir", str(ssd), "--json", *arguments])
    assert isinstance(end.value.code, int)
    return Checked(end.value.code, json.loads(out.getvalue() or "{}"), err.getvalue())


class Left:
    """A directory of COUNT durable chunks and a session that names them, and no daemon."""

    def __init__(self, ssd: Path, keys: list[ChunkKey]) -> None:
        self.ssd = ssd
        self.keys = keys

    def rows(self, table: str) -> dict[bytes, bytes]:
        with lmdb.open(str(self.ssd / "index"), max_dbs=5, readonly=True, lock=False) as env:
            db = env.open_db(table.encode(), create=False)
            with env.begin(db=db) as txn:
                return {bytes(key): bytes(value) for key, value in txn.cursor()}

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """A row of the index as a test wants it; None: without it."""
        with lmdb.open(str(self.ssd / "index"), max_dbs=5, map_size=8 << 20) as env:
            db = env.open_db(table.encode(), create=False)
            with env.begin(write=True, db=db) as txn:
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)

    def place(self, key: bytes) -> tuple[Path, int]:
        """The slab file of a chunk, and where its slot begins."""
        (row,) = [value for name, value in self.rows("chunks").items() if name[4:] == key]
        columns = format.decode_chunks([row], 1)
        slab, slot = int(columns.slab[0, 0]), int(columns.slot[0, 0])
        shape = format.decode_slab(self.rows("slabs")[format.number_key(slab)])
        assert not isinstance(shape, format.Defect)
        return self.ssd / format.slab_name(slab), format.slot_offset(shape[0], slot)

    def flip(self, key: bytes, offset: int) -> None:
        path, start = self.place(key)
        with path.open("r+b") as file:
            file.seek(start + offset)
            byte = file.read(1)[0]
            file.seek(start + offset)
            file.write(bytes([byte ^ 0x40]))


SETTINGS = {**SMALL_SSD, "dram_bytes": 8 << 20, "ssd_slab_bytes": 2 << 20}


def fill(daemon: Any, ssd: Path) -> Left:
    with client_of(daemon) as client:
        space = client.open(SPEC)
        keys = keys_of(space, COUNT)
        save(space, keys, wait=Wait.DURABLE)
        entries = [SessionEntry(key, 64 * index, 64) for index, key in enumerate(keys)]
        space.update_session(b"talk", expected_version=0, keep=0, append=entries)
        settled_ssd(client)
    assert daemon.stop() == 0
    return Left(ssd, keys)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """Made once by a real daemon; each test damages a copy."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    settings = {**SMALL, **SETTINGS, "run_dir": folder / "run", "ssd_dir": folder / "ssd"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    daemon = Daemon(folder / "run", flags, {**os.environ, "PYTHONSAFEPATH": "1"})
    try:
        daemon.wait_for("ready")
        yield fill(daemon, folder / "ssd")
    finally:
        daemon.close()
        shutil.rmtree(folder)


@pytest.fixture
def left(original: Left, run_dir: Path) -> Left:
    ssd = run_dir.parent / "ssd"
    shutil.copytree(original.ssd, ssd)
    ssd.chmod(0o700)
    return Left(ssd, original.keys)


@pytest.fixture
def served(left: Left, start_daemon: Callable[..., Any]) -> Callable[[], set[bytes]]:
    """What a daemon that starts now has, every byte of it compared; a check of its directory is clean afterwards."""

    def start() -> set[bytes]:
        daemon = start_daemon(**SETTINGS, ssd_dir=left.ssd)
        with client_of(daemon) as client:
            found = set(hits(client.open(SPEC), left.keys))
        assert daemon.stop() == 0
        assert check(left.ssd).status == 0
        return found

    return start


def fixed(left: Left, lost: set[bytes]) -> None:
    """--fix says that all is well again, a second look agrees, and nothing else is gone."""
    done = check(left.ssd, "--fix")
    assert done.status == 0 and done.found["fixed"], done
    again = check(left.ssd)
    assert again.status == 0 and again.found["clean"] and not again.kinds, again
    assert {row[4:] for row in left.rows("chunks")} == set(left.keys) - lost


# --------------------------------------------------------------------------------------------------------------- clean


@pytest.mark.parametrize("direct", [False, True])
def test_a_healthy_directory_is_clean(
    start_daemon: Callable[..., Any], run_dir: Path, capsys: pytest.CaptureFixture[str], direct: bool
) -> None:
    ssd = run_dir.parent / "ssd"
    left = fill(start_daemon(**SETTINGS, ssd_dir=ssd, ssd_direct_io=direct), ssd)
    done = check(left.ssd)
    assert done.status == 0 and done.found["clean"], done
    assert done.found["progress"]["chunks"] == COUNT and done.found["sessions"] == 1
    assert done.found["progress"]["bytes"] == COUNT * SPEC.chunk_bytes
    with pytest.raises(SystemExit):
        kvctl.main(["check", "--ssd-dir", str(left.ssd)])
    text = capsys.readouterr().out
    assert f"{COUNT} chunks, 4.0 MiB verified" in text and text.endswith("clean\n")


def test_a_directory_in_which_nothing_was_stored_yet_is_clean(
    start_daemon: Callable[..., Any], run_dir: Path
) -> None:
    ssd = run_dir.parent / "ssd"
    assert start_daemon(**SMALL_SSD, ssd_dir=ssd).stop() == 0
    done = check(ssd)
    assert done.status == 0 and done.found["clean"], done


def test_a_running_daemon_is_not_disturbed(start_daemon: Callable[..., Any], run_dir: Path) -> None:
    ssd = run_dir.parent / "ssd"
    daemon = start_daemon(**SMALL_SSD, ssd_dir=ssd)
    for arguments in ((), ("--fix",)):
        done = check(ssd, *arguments)
        assert done.status == 2 and f"pid {daemon.pid}" in done.error, done


def test_what_is_no_directory_of_ours_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = check(tmp_path)
    assert done.status == 2 and "it has no index" in done.error
    assert list(tmp_path.iterdir()) == [], "and stays as it is"
    with pytest.raises(SystemExit, match="2"):
        kvctl.main(["check", "--fix", "--run-dir", str(tmp_path)])
    assert "--ssd-dir" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (256 + 1_000, "do not match their checksum"),
        (256 + SPEC.chunk_bytes - 1, "do not match their checksum"),
        (0, "does not begin with its magic"),
        (8, "has another format version"),
        (100, "does not match its own checksum"),  # in the key
    ],
)
def test_a_flipped_bit_in_a_record(left: Left, offset: int, what: str) -> None:
    left.flip(left.keys[5], offset)
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"record": 1}, done
    (problem,) = done.found["problems"]
    assert left.keys[5].hex() in problem["where"] and what in problem["what"], problem
    fixed(left, {left.keys[5]})


def test_a_record_of_another_chunk(left: Left) -> None:
    """A write that went astray: whole, sealed, and not what the row names."""
    (path, one), (same, other) = left.place(left.keys[2]), left.place(left.keys[3])
    assert path == same
    data = path.read_bytes()
    size = 256 + SPEC.chunk_bytes
    with path.open("r+b") as file:
        file.seek(one)
        file.write(data[other : other + size])
    done = check(left.ssd)
    assert done.kinds == {"record": 1} and "holds another key" in done.found["problems"][0]["what"], done
    fixed(left, {left.keys[2]})


@pytest.mark.parametrize("first", [True, False])
def test_a_slot_that_two_rows_name(left: Left, first: bool) -> None:
    """The one whose record lies there keeps it, whichever of them comes first in the index."""
    rows = sorted(left.rows("chunks").items())
    (key, _), (_, value) = (rows[3], rows[9]) if first else (rows[9], rows[3])
    left.put("chunks", key, value)
    done = check(left.ssd)
    assert done.kinds == {"twice": 1} and key[4:].hex() in done.found["problems"][0]["where"], done
    fixed(left, {key[4:]})


# --------------------------------------------------------------------------------------------------------- slab files


def test_a_slab_file_that_is_gone(left: Left) -> None:
    path, _ = left.place(left.keys[0])
    lost = {key for key in left.keys if left.place(key)[0] == path}
    assert 0 < len(lost) < COUNT
    path.unlink()
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"slab": 1, "chunk": len(lost)}, done
    assert "missing" in done.found["problems"][0]["what"]
    fixed(left, lost)


def test_a_slab_file_that_was_cut_short(left: Left) -> None:
    path, _ = left.place(left.keys[0])
    lost = {key for key in left.keys if left.place(key)[0] == path}
    os.truncate(path, path.stat().st_size - 4096)
    assert check(left.ssd).kinds == {"slab": 1, "chunk": len(lost)}
    fixed(left, lost)
    assert not path.exists()


def test_a_slab_header_is_written_anew_and_nothing_is_lost(left: Left) -> None:
    path, _ = left.place(left.keys[0])
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)
    done = check(left.ssd)
    assert done.kinds == {"slab": 1}, done
    fixed(left, set())


def test_a_slab_file_that_nobody_names(left: Left) -> None:
    stray = left.ssd / format.slab_name(999)
    stray.write_bytes(b"x" * 8192)
    assert check(left.ssd).kinds == {"file": 1}
    fixed(left, set())
    assert not stray.exists()


def test_what_an_interrupted_fix_leaves_takes_no_room_for_long(
    left: Left, served: Callable[[], set[bytes]]
) -> None:
    """Neither the daemon nor the next fix leaves it there: the cap knows nothing of it."""
    for remove in (lambda: check(left.ssd, "--fix"), served):
        new = left.ssd / "index.new"
        new.mkdir()
        (new / "data.mdb").write_bytes(b"half of it")
        assert check(left.ssd).kinds == {"file": 1}
        remove()
        assert not new.exists() and check(left.ssd).status == 0


def test_more_bytes_than_the_cap(left: Left) -> None:
    done = check(left.ssd, "--ssd-bytes", "9M")
    assert done.status == 1 and done.kinds == {"cap": 1}, done
    assert check(left.ssd, "--ssd-bytes", "9M", "--fix").status == 1, "no fix of ours"
    config = left.ssd.parent / "kvstored.toml"
    config.write_text(f'ssd_dir = "{left.ssd}"\nssd_bytes = "256M"\nssd_slab_bytes = "2M"\n')
    with pytest.raises(SystemExit, match="0"):
        kvctl.main(["check", "--config", str(config)])


# --------------------------------------------------------------------------------------------------------------- rows


def test_rows_that_are_not_what_they_say(left: Left) -> None:
    chunks = sorted(left.rows("chunks"))
    rows = left.rows("chunks")
    flipped = bytearray(rows[chunks[0]])
    flipped[10] ^= 1
    left.put("chunks", chunks[0], bytes(flipped))
    left.put("chunks", chunks[1], b"short")
    left.put("chunks", format.chunk_key(77, b"no such namespace"), rows[chunks[2]])
    left.put("chunks", chunks[2][:4], rows[chunks[2]])  # no key
    left.put("chunks", b"ab", rows[chunks[2]])  # not even a namespace
    left.put("slabs", b"odd", b"x")
    left.put("namespaces", format.number_key(78), b"nonsense")
    left.put("meta", format.makers_key(b"d" * 16), format.encode_makers([b"1" * 16, b"2" * 16]))
    left.put("meta", format.makers_key(b"e" * 16), b"x" * 40)
    left.put("meta", format.barred_key(b"", b"f" * 16), format.encode_barred(purge=True))
    left.put("meta", format.barred_key(b"t" * 16, b"g" * 16), b"x" * 9)
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"chunk": 5, "slab": 1, "namespace": 1, "maker": 2}, done
    fixed(left, {chunks[0][4:], chunks[1][4:]})


def test_the_daemon_too_gets_past_rows_that_are_not_what_they_say(
    left: Left, served: Callable[[], set[bytes]]
) -> None:
    rows = left.rows("chunks")
    first, second, *_ = sorted(rows)
    left.put("chunks", first, b"short")
    left.put("chunks", b"ab", rows[second])
    left.put("chunks", second[:4], rows[second])
    left.put("chunks", b"\xff\xff\xff\xff", rows[second])
    assert served() == set(left.keys) - {first[4:]}


def test_a_record_that_cannot_be_read_now_is_not_deleted(left: Left) -> None:
    (left.ssd.parent / "faults.json").write_text(
        json.dumps([{"calls": ["read"], "files": "slab-*", "do": "EIO", "skip": 10, "count": 1}])
    )
    examined = Check(str(left.ssd), FaultyDisk(RealDisk(), str(left.ssd.parent / "faults.json")))
    found = examined.run()
    assert found.counts == {"unreadable": 1} and found.unfixable == 1 and not found.clean
    examined.fix()
    examined.close()
    assert check(left.ssd).status == 0 and len(left.rows("chunks")) == COUNT


def test_slab_files_that_cannot_be_opened_now_are_not_removed(left: Left) -> None:
    """They are not missing: whoever checks may lack the right to, or the descriptors."""
    path, _ = left.place(left.keys[0])
    inside = sum(left.place(key)[0] == path for key in left.keys)
    for error in ("EMFILE", "EACCES", "EIO"):
        (left.ssd.parent / "faults.json").write_text(
            json.dumps([{"calls": ["open"], "files": path.name, "do": error}])
        )
        examined = Check(str(left.ssd), FaultyDisk(RealDisk(), str(left.ssd.parent / "faults.json")))
        found = examined.run()
        assert found.counts == {"unreadable": 1 + inside} and found.unfixable == 1 + inside, found
        examined.fix()
        examined.close()
        assert not found.fixed and check(left.ssd).status == 0 and len(left.rows("chunks")) == COUNT


def test_as_many_files_are_open_as_there_are_slabs(left: Left) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, limits[1]))
    try:
        assert check(left.ssd, "--fix").status == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert check(left.ssd).status == 0 and len(left.rows("chunks")) == COUNT


@pytest.mark.parametrize("whole_page", [False, True])
def test_the_row_of_a_slab_is_written_anew_from_its_file(
    left: Left, served: Callable[[], set[bytes]], whole_page: bool
) -> None:
    """Else one bad row would take all that lies in a file."""
    rows = left.rows("slabs")
    if whole_page:
        (page,) = pages_of(left, "slabs")
        with (left.ssd / "index" / "data.mdb").open("r+b") as file:
            file.seek(4096 * page + 8)
            file.write(b"\xff" * 4000)
        assert check(left.ssd).kinds == {"index": 1, "slab": len(rows)}
    else:
        first, last = min(rows), max(rows)
        left.put("slabs", first, rows[first][:-1] + b"\xff")
        left.put("slabs", last, format.encode_slab(1 << 30, 9))
        assert check(left.ssd).kinds == {"slab": 4}
    fixed(left, set())
    assert left.rows("slabs") == rows and served() == set(left.keys)


@pytest.mark.parametrize("meta", [0, 1])
@pytest.mark.parametrize("offset", [16, 92])
def test_a_damaged_meta_page_of_the_index(
    left: Left, served: Callable[[], set[bytes]], meta: int, offset: int
) -> None:
    """The other one is enough to read everything; but LMDB does not open the file, or believes what is wrong."""
    with (left.ssd / "index" / "data.mdb").open("r+b") as file:
        file.seek(4096 * meta + offset)
        byte = file.read(1)[0]
        file.seek(4096 * meta + offset)
        file.write(bytes([byte ^ 4]))
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"index": 1}, done
    fixed(left, set())
    assert served() == set(left.keys)


@pytest.mark.parametrize(
    ("name", "value"), [("next_slab", 0), ("next_slab", 1 << 40), ("boot_count", 0), ("boot_count", 1 << 40)]
)
def test_counts_that_cannot_be(left: Left, served: Callable[[], set[bytes]], name: str, value: int) -> None:
    """Rows of this table have no seal; the slabs and the records say what there must have been."""
    right = left.rows("meta")[name.encode()]
    left.put("meta", name.encode(), format.encode_meta(value))
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"index": 1}, done
    assert f"meta.{name}" in done.found["problems"][0]["where"]
    fixed(left, set())
    assert left.rows("meta")[name.encode()] == right and served() == set(left.keys)


def test_the_daemon_too_knows_of_more_slabs_than_were_counted(
    left: Left, start_daemon: Callable[..., Any]
) -> None:
    left.put("meta", b"next_slab", format.encode_meta(0))
    daemon = start_daemon(**SETTINGS, ssd_dir=left.ssd)
    with client_of(daemon) as client:
        space = client.open(SPEC)
        more = keys_of(space, COUNT, 3)
        save(space, more, wait=Wait.DURABLE)
        assert set(hits(space, left.keys)) == set(left.keys)
    assert daemon.stop() == 0
    assert check(left.ssd).status == 0


@pytest.mark.parametrize(("name", "value"), [("direct", 1), ("slab_bytes", 1 << 20)])
def test_a_damaged_layout_makes_nothing_else_wrong(left: Left, name: str, value: int) -> None:
    """It has no seal, and everything that has one says otherwise: then nothing is removed."""
    right = left.rows("meta")[name.encode()]
    before = {path.name: path.read_bytes() for path in left.ssd.glob("slab-*")}
    left.put("meta", name.encode(), format.encode_meta(value))
    done = check(left.ssd, "--fix")
    assert done.status == 2 and f"its index is damaged: meta.{name} is {value}" in done.error, done
    assert {path.name: path.read_bytes() for path in left.ssd.glob("slab-*")} == before
    left.put("meta", name.encode(), right)
    assert check(left.ssd).status == 0 and len(left.rows("chunks")) == COUNT


def test_an_index_without_room_for_many_deletions_is_written_anew(left: Left) -> None:
    """Wrong rows all over a full index: each page that changes wants another one."""
    head = format.encode_session_head(1, 0)
    with lmdb.open(str(left.ssd / "index"), max_dbs=5, map_size=8 << 20) as env:
        db = env.open_db(b"sessions", create=False)
        with env.begin(write=True, db=db) as txn:
            for number in range(16_000):
                value = head if number % 20 else b"torn"
                txn.put(format.session_key(1, b"%0300d" % number, 0), value)
    before = os.path.getsize(left.ssd / "index" / "data.mdb")
    done = check(left.ssd, "--fix")
    assert done.status == 0 and "index written anew" in "".join(done.found["fixed"]), done.found["fixed"]
    assert check(left.ssd).kinds == {"index": 1}, "full still: the daemon lets the oldest give way"
    assert len(left.rows("sessions")) == 2 + 15_200
    assert os.path.getsize(left.ssd / "index" / "data.mdb") <= before
    fixed = done.found["fixed"]
    assert "800 rows of table sessions deleted" in fixed and done.kinds == {"session": 800}


def test_what_the_daemon_keeps_beside_the_tier_is_no_stranger(left: Left) -> None:
    before = check(left.ssd)
    for name in (
        "learned.json",
        "learned.json.new",
        "remote.forgotten",
        "remote.new",
        "peers.forgotten",
        "peers.new",
    ):
        (left.ssd / name).write_bytes(b"x" * (1 << 20))
    (left.ssd / "learned.txt").write_text("somebody's")
    done = check(left.ssd)
    assert done.status == 0 and done.found["notes"] == [
        *before.found["notes"],
        "learned.txt is not of the SSD tier",
    ]
    assert done.found["bytes_used"] - before.found["bytes_used"] < 1 << 20


def test_sessions(left: Left) -> None:
    """Damaged pages are a problem; chunks that a session names and nobody has any more are what time brings."""
    (head, page) = sorted(left.rows("sessions"))
    row = sorted(left.rows("chunks"))[4]
    left.put("chunks", row, None)
    done = check(left.ssd)
    assert done.status == 0 and done.found["notes"] == [
        f"session talk of namespace 1 names 1 chunks of {COUNT} that are not on SSD"
    ], done
    left.put("sessions", page, b"torn")
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"session": 1}, done
    fixed(left, {row[4:]})
    assert head not in left.rows("sessions")


def leaves(left: Left) -> list[int]:
    """Pages of the index that hold chunks."""
    found = pages_of(left, "chunks")
    assert len(found) > 1
    return found


def pages_of(left: Left, table: str) -> list[int]:
    """Pages of the index that hold rows of a table."""
    with (left.ssd / "index" / "data.mdb").open("rb") as file:
        pages = LmdbPages(file.fileno())
        rows = [row[0] for row in pages.rows(table) if not isinstance(row, Damage)]
        assert rows == sorted(left.rows(table))
        mine = [page for page, owner in enumerate(pages._owner) if owner == pages._numbers[table]]
        return [page for page in mine if os.pread(file.fileno(), 1, 4096 * page + 10)[0] & 2]


def test_a_damaged_page_of_the_index(left: Left, served: Callable[[], set[bytes]]) -> None:
    """LMDB itself may crash on it. What lies beside it is kept, but for what is wrong there."""
    last = max(left.rows("chunks"))[4:]
    left.flip(last, 1_000)
    damage(left, 12, b"\xee" * 200)
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"index": 1, "record": 1}, done
    done = check(left.ssd, "--fix")
    assert done.status == 0 and any("index written anew" in line for line in done.found["fixed"]), done
    kept = served()
    assert kept == {row[4:] for row in left.rows("chunks")} - {last} and 0 < len(kept) < COUNT
    assert last not in {row[4:] for row in left.rows("chunks")}


def test_a_page_that_cannot_be_read_again_is_not_lost(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is written anew from what was read a second time; that must be all that was there at first."""
    damage(left, 12, b"\xee" * 200)
    before = (left.ssd / "index" / "data.mdb").read_bytes()
    examined = Check(str(left.ssd), RealDisk())
    assert examined.run().counts == {"index": 1}
    last = leaves_but_damaged(examined)[-1]
    read = examined._pages._read
    monkeypatch.setattr(
        examined._pages,
        "_read",
        lambda page, count=1: "cannot be read" if page == last else read(page, count),
    )
    with pytest.raises(Unavailable, match="which it did not at first"):
        examined.fix()
    examined.close()
    assert (left.ssd / "index" / "data.mdb").read_bytes() == before
    assert check(left.ssd, "--fix").status == 0 and check(left.ssd).status == 0


def leaves_but_damaged(examined: Check) -> list[int]:
    pages = examined._pages
    mine = [page for page, owner in enumerate(pages._owner) if owner == pages._numbers["chunks"]]
    return [page for page in mine if isinstance(pages._nodes(page, LEAF), list)]


def test_an_index_that_is_none(left: Left) -> None:
    with (left.ssd / "index" / "data.mdb").open("r+b") as file:
        file.write(b"\0" * 8192)
    before = {path: path.stat().st_mtime_ns for path in left.ssd.glob("slab-*")}
    for arguments in ((), ("--fix",)):
        done = check(left.ssd, *arguments)
        assert done.status == 2 and "neither of its meta pages" in done.error, done
    assert {path: path.stat().st_mtime_ns for path in left.ssd.glob("slab-*")} == before


def test_much_at_once(left: Left, served: Callable[[], set[bytes]]) -> None:
    """A fix removes exactly what is wrong, whatever else is wrong; all else is served."""
    left.flip(left.keys[1], 300)
    left.flip(left.keys[20], 3)
    left.put("chunks", format.chunk_key(9, b"k"), b"x" * 64)
    stray = left.ssd / format.slab_name(500)
    stray.write_bytes(b"")
    path, _ = left.place(left.keys[0])
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)
    done = check(left.ssd)
    assert done.status == 1 and done.kinds == {"record": 2, "chunk": 1, "file": 1, "slab": 1}, done
    fixed(left, {left.keys[1], left.keys[20]})
    assert served() == set(left.keys) - {left.keys[1], left.keys[20]}


def test_without_a_fix_the_daemon_serves_no_wrong_byte_either(
    left: Left, served: Callable[[], set[bytes]]
) -> None:
    left.flip(left.keys[7], 20_000)
    left.put("chunks", sorted(left.rows("chunks"))[0], b"torn")
    path, _ = left.place(left.keys[-1])
    path.unlink()
    wrong = check(left.ssd)
    assert wrong.status == 1
    assert served() < set(left.keys) - {left.keys[7]}


@pytest.mark.parametrize(
    ("offset", "data"), [(10, b"\xee\xee"), (12, b"\xff\xff\xff\xff"), (0, b"\xee" * 4096)]
)
def test_the_daemon_does_not_start_on_a_page_that_is_none(
    left: Left, launch: Callable[..., Any], offset: int, data: bytes
) -> None:
    damage(left, offset, data)
    daemon = launch(**SETTINGS, ssd_dir=left.ssd)
    with pytest.raises(AssertionError, match="the log ended"):
        daemon.wait_for("ready")
    assert daemon.exit_status() == 2 and "kvctl check --fix" in " ".join(daemon.refusals), daemon.text


def test_a_page_that_looks_like_one_may_cost_rows_but_serves_no_wrong_byte(
    left: Left, start_daemon: Callable[..., Any], served: Callable[[], set[bytes]]
) -> None:
    damage(left, 16, b"\x00\x00")
    daemon = start_daemon(**SETTINGS, ssd_dir=left.ssd)
    with client_of(daemon) as client:
        found = set(hits(client.open(SPEC), left.keys))  # compares every byte
    assert daemon.stop() == 0
    assert found < set(left.keys)
    assert check(left.ssd).kinds == {"index": 1}
    assert check(left.ssd, "--fix").status == 0
    assert served() <= found


def damage(left: Left, offset: int, data: bytes) -> None:
    page = leaves(left)[0]
    with (left.ssd / "index" / "data.mdb").open("r+b") as file:
        file.seek(4096 * page + offset)
        file.write(data)
