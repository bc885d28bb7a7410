"""Pages of LMDB, read without LMDB: the same rows as it has, and never a crash, whatever was written over them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore.tiers.lmdb_pages import UNDONE, Damage, LmdbPages, Unreadable

TABLES = ("empty", "large", "small")
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[bytes, bytes]]:
    return {name: {} for name in TABLES}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, dict[bytes, bytes]]) -> Path:
    """Three levels deep, with values of many pages, and pages that were freed."""
    folder = tmp_path_factory.mktemp("lmdb")
    chance = random.Random(5)
    with lmdb.open(str(folder), map_size=1 << 26, max_dbs=5) as env:
        tables = {name: env.open_db(name.encode()) for name in TABLES}
        for _ in range(25):
            with env.begin(write=True) as txn:
                for number in range(400):
                    name = "small" if number % 4 else "large"
                    key = chance.randbytes(chance.randrange(1, 100))
                    value = chance.randbytes(chance.choice((3_000, 9_000)) if number % 40 == 0 else 60)
                    txn.put(key, value, db=tables[name])
                    rows[name][key] = value
                    if number % 3 == 0:
                        old = next(iter(rows[name]))
                        txn.delete(old, db=tables[name])
                        del rows[name][old]
    return folder / "data.mdb"


@pytest.fixture
def fd(file: Path, tmp_path: Path) -> Iterator[int]:
    copy = tmp_path / "data.mdb"
    copy.write_bytes(file.read_bytes())
    number = os.open(copy, os.O_RDWR)
    yield number
    os.close(number)


def walk(fd: int) -> list[Damage]:
    pages = LmdbPages(fd)
    found = [*pages.damage]
    for name in TABLES:
        found += [row for row in pages.rows(name) if isinstance(row, Damage)]
    return [*found, *pages.free_list()]


def test_the_rows_are_those_that_lmdb_has(fd: int, rows: dict[str, dict[bytes, bytes]]) -> None:
    pages = LmdbPages(fd)
    assert set(pages.tables) == set(TABLES)
    assert max(root.depth for root in pages.tables.values()) >= 2
    for _ in range(2):
        for name in TABLES:
            assert list(pages.rows(name)) == sorted(rows[name].items())
            assert pages.tables[name].entries == len(rows[name])
    assert list(pages.rows("no such table")) == []
    assert walk(fd) == []


def test_a_page_of_a_table_that_is_listed_as_free_is_found(fd: int) -> None:
    """The worst of all: the next transaction would write over it."""
    pages = LmdbPages(fd)
    list(pages.rows("small"))
    used = next(page for page, owner in enumerate(pages._owner) if owner == pages._numbers["small"])
    roots = pages._roots[""]
    data = bytearray(os.pread(fd, pages.page_bytes, roots.page * pages.page_bytes))
    assert data[10] & 2, "the free list is one leaf"
    node = int.from_bytes(data[16:18], "little")
    key_bytes = int.from_bytes(data[node + 6 : node + 8], "little")
    first = node + 8 + key_bytes + 8
    data[first : first + 8] = used.to_bytes(8, "little")
    os.pwrite(fd, data, roots.page * pages.page_bytes)
    assert [str(damage) for damage in walk(fd)] == [f"page {used} is listed as free and in use"]


@pytest.mark.parametrize(
    ("offset", "data", "what"),
    [
        (0, b"\x01", "says that it is page"),
        (10, b"\x07", "has flags"),
        (12, b"\xff\xff", "impossible size"),
        (16, b"\x00\x00", "a node outside of it"),
    ],
)
def test_what_is_wrong_with_a_page_is_told_and_the_others_are_read(
    fd: int, rows: dict[str, dict[bytes, bytes]], offset: int, data: bytes, what: str
) -> None:
    pages = LmdbPages(fd)
    list(pages.rows("small"))
    mine = [page for page, owner in enumerate(pages._owner) if owner == pages._numbers["small"]]
    leaf = next(page for page in mine if os.pread(fd, 1, page * 4096 + 10)[0] & 2)
    os.pwrite(fd, data, leaf * 4096 + offset)
    found = list(LmdbPages(fd).rows("small"))
    (damage,) = [row for row in found if isinstance(row, Damage)]
    assert damage.page == leaf and what in damage.why, damage
    read = dict(row for row in found if not isinstance(row, Damage))
    assert read.items() <= rows["small"].items() and len(read) > len(rows["small"]) * 0.8


def pages_of(fd: int, table: str, kind: int) -> list[int]:
    pages = LmdbPages(fd)
    list(pages.rows(table))
    mine = [page for page, owner in enumerate(pages._owner) if owner == pages._numbers[table]]
    return [page for page in mine if os.pread(fd, 1, page * 4096 + 10)[0] & kind]


def test_keys_out_of_order(fd: int) -> None:
    """LMDB would look for some of them where they are not."""
    leaf = pages_of(fd, "small", 2)[0]
    first, second = os.pread(fd, 2, leaf * 4096 + 16), os.pread(fd, 2, leaf * 4096 + 18)
    os.pwrite(fd, second + first, leaf * 4096 + 16)
    assert f"page {leaf} has keys out of order" in map(str, walk(fd))


def test_a_page_that_has_two_places_in_the_tree(fd: int) -> None:
    branch = pages_of(fd, "small", 1)[0]
    offsets = [int.from_bytes(os.pread(fd, 2, branch * 4096 + 16 + 2 * n), "little") for n in (0, 1)]
    child = os.pread(fd, 6, branch * 4096 + offsets[0])
    os.pwrite(fd, child, branch * 4096 + offsets[1])
    assert f"page {int.from_bytes(child, 'little')} is named twice" in map(str, walk(fd))


def test_a_single_key_is_found_or_not(fd: int, rows: dict[str, dict[bytes, bytes]]) -> None:
    pages = LmdbPages(fd)
    for key, value in list(rows["small"].items())[:200]:
        assert pages.get("small", key) == (value if len(value) < 1_000 else None)
        assert pages.get("small", key + b"x") is None
    assert pages.get("empty", b"k") is None and pages.get("no such table", b"k") is None


def test_no_damage_crashes_it_or_makes_it_go_round_in_circles(fd: int) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    good = os.pread(fd, 1 << 26, 0)
    seen = 0
    for _ in range(60):
        for _ in range(chance.randrange(1, 4)):
            size = chance.choice((1, 8, 300, 4_096))
            os.pwrite(fd, chance.randbytes(size), chance.randrange(len(good) - size))
        if chance.random() < 0.1:
            os.ftruncate(fd, chance.randrange(len(good)))
        try:
            seen += bool(walk(fd))
        except Unreadable:
            seen += 1
        os.ftruncate(fd, len(good))
        os.pwrite(fd, good, 0)
    assert seen > 5
    assert walk(fd) == []


def test_what_is_no_lmdb_file_is_said_to_be_none(tmp_path: Path) -> None:
    for data in (b"", b"x" * 100, bytes(8192), os.urandom(16_384)):
        path = tmp_path / "file"
        path.write_bytes(data)
        with path.open("rb") as file, pytest.raises(Unreadable):
            LmdbPages(file.fileno())


def test_one_whole_meta_page_is_enough(fd: int) -> None:
    for start in (0, 4096):
        good = os.pread(fd, 4096, start)
        os.pwrite(fd, bytes(200), start)
        pages = LmdbPages(fd)
        assert set(pages.tables) == set(TABLES)
        assert [(damage.page, damage.why) for damage in pages.damage] == [
            (start // 4096, f"should be a meta page, but is none: {UNDONE}")
        ]
        os.pwrite(fd, good, start)


@pytest.mark.parametrize("where", [16 + 24 + 4, 16 + 72 + 4])
def test_a_database_of_another_kind_is_none(fd: int, where: int) -> None:
    """Of its flags LMDB believes each: with one of them it compares keys as numbers, or takes data for trees."""
    for start in (0, 4096):
        flags = os.pread(fd, 1, start + where)[0]
        os.pwrite(fd, bytes([flags ^ 4]), start + where)
    with pytest.raises(Unreadable):
        LmdbPages(fd)
