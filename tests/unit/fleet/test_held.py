"""The page table of hashes: what one node tells is what the others find, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.fleet.held import PAGE_ROWS, Held, Known, Where, as_hashes, decode_page, decode_versions
from kvstore.fleet.secret import FleetSecret
from kvstore.types import ChunkKey

SECRET = FleetSecret(b"a secret of this fleet")
OTHER = FleetSecret(b"a secret of another fleet")
BOOT = bytes(range(16))
NAMESPACE = SECRET.namespace(b"s" * 32)
HASH = SECRET.hasher(NAMESPACE)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def told(held: Held, known: Known, pages_max: int = 1_000) -> None:
    pages = {number: decode_page(SECRET, BOOT, number, data) for number, data in held.take(pages_max).items()}
    known.replace(pages)


def where(known: Known, *numbers: int) -> list[Where]:
    return [Where(int(each)) for each in known.where(as_hashes([HASH(key(n)) for n in numbers]))]


def test_what_is_told_is_found_and_says_in_which_tier() -> None:
    held, known = Held(SECRET, BOOT), Known()
    held.set(0, HASH(key(1)))
    held.set(PAGE_ROWS + 5, HASH(key(2)) | 1)
    told(held, known)
    assert where(known, 1, 2, 3) == [Where.DRAM, Where.SSD, Where.NOWHERE]
    held.set(0, HASH(key(3)))  # the row is another chunk's now
    held.set(PAGE_ROWS + 5, 0)
    assert held.behind == 2
    told(held, known)
    assert where(known, 1, 2, 3) == [Where.NOWHERE, Where.NOWHERE, Where.DRAM]
    assert held.count == 1 and held.behind == 0


def test_pages_with_new_chunks_go_before_those_that_only_lost_some() -> None:
    held = Held(SECRET, BOOT)
    for number in range(4):
        held.set(number * PAGE_ROWS, HASH(key(number)))
    held.take(10)
    held.set(0, 0)
    held.set(3 * PAGE_ROWS + 1, HASH(key(9)))
    assert list(held.take(1)) == [3]
    assert list(held.take(10)) == [0]
    assert held.take(10) == {}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3 * PAGE_ROWS), st.integers(0, 20), st.booleans()), max_size=80),
    st.integers(1, 3),
)
def test_a_reader_that_read_everything_knows_what_is_held(
    steps: list[tuple[int, int, bool]], pages_max: int
) -> None:
    held, known = Held(SECRET, BOOT), Known()
    rows: dict[int, tuple[int, bool]] = {}
    for row, number, cold in steps:
        if number:
            rows[row] = (number, cold)
        else:
            rows.pop(row, None)
        held.set(row, HASH(key(number)) | cold if number else 0)
        told(held, known, pages_max)
    while held.behind:
        told(held, known, pages_max)
    assert held.count == len(rows) == len(known)
    held_now = {number for number, _ in rows.values()}
    for number in range(1, 21):
        (found,) = where(known, number)
        assert (found is not Where.NOWHERE) == (number in held_now)
        if found is Where.DRAM:
            assert (number, False) in rows.values()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"",
        lambda data: data * 2,
    ],
)
def test_a_page_that_is_not_as_it_was_written_is_refused(spoil: object) -> None:
    held = Held(SECRET, BOOT)
    held.set(7, HASH(key(1)))
    data = held.take(1)[0]
    assert decode_page(SECRET, BOOT, 0, data)[0] == 1
    with pytest.raises(ValueError, match=r"page|fleet|bytes"):
        decode_page(SECRET, BOOT, 0, spoil(data))  # type: ignore[operator]


def test_a_page_counts_for_its_node_its_start_its_number_and_its_fleet() -> None:
    held = Held(SECRET, BOOT)
    held.set(7, HASH(key(1)))
    data = held.take(1)[0]
    for secret, boot, number in (
        (OTHER, BOOT, 0),
        (SECRET, bytes(16), 0),
        (SECRET, BOOT, 1),
    ):
        with pytest.raises(ValueError, match=r"page|fleet"):
            decode_page(secret, boot, number, data)
    versions = held.encoded_versions()
    assert decode_versions(SECRET, BOOT, versions) == [1]
    for secret, boot in ((OTHER, BOOT), (SECRET, bytes(16))):
        with pytest.raises(ValueError, match="versions"):
            decode_versions(secret, boot, versions)


def test_tenants_and_fleets_have_other_hashes_of_one_key() -> None:
    others = {
        secret.hasher(secret.namespace(salt))(key(1))
        for secret in (SECRET, OTHER)
        for salt in (b"s" * 32, b"t" * 32)
    }
    assert len(others) == 4
    assert all(value % 2 == 0 for value in others)


def test_a_million_chunks_cost_eight_bytes_each() -> None:
    known = Known()
    values = np.arange(2, 2 + 2 * 1_000_000, 2, dtype=np.uint64)
    known.replace({0: (1, values)})
    assert known.where(as_hashes([2, 4, 1_999_999, 5_000_000])).tolist() == [2, 2, 0, 0]
