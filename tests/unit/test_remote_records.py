"""Records that go between nodes: each is refused unless it is exactly what was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.remote.records import (
    HEADER_BYTES_MAX,
    MAKERS_MAX,
    Description,
    Header,
    checksum_of,
    described,
    name_of,
    read_described,
    refusal,
    refusal_of_payload,
)
from kvstore.types import ChunkKey

PAYLOAD = bytes(range(256)) * 8
WANTED = {"namespace": b"n" * 32, "key": ChunkKey(b"key"), "shard": 1, "shards": 2, "length": len(PAYLOAD)}
WHAT = Description(
    b"n" * 32, ChunkKey(b"key"), 1, 2, 64, False, (b"m" * 16,), len(PAYLOAD), checksum_of(PAYLOAD), 7, 1_000
)


def judged(record: bytes, salt: bytes = b"") -> str:
    """Why a reader that wants `WANTED` refuses this record; empty: it does not."""
    header = read_described(record)
    if isinstance(header, str):
        return header
    return refusal(header, **WANTED) or refusal_of_payload(header, record[header.size :], salt)  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_described() -> None:
    head = described(WHAT, PAYLOAD)
    header = read_described(head + PAYLOAD)
    assert isinstance(header, Header)
    assert (header.description, header.size) == (WHAT, len(head))
    assert judged(head + PAYLOAD) == ""


def test_the_bytes_of_format_version_1() -> None:
    """Other nodes read them: a change needs another version."""
    head = described(replace(WHAT, checksum=0x1122334455667788), b"", b"")
    assert head[:64].hex() == (
        "4b56535348415245"
        "0100"
        "d800"
        "00000000"
        "01000000"
        "02000000"
        "40000000"
        "0300"
        "0100"
        "0008000000000000"
        "8877665544332211"
        "0700000000000000"
        "e803000000000000"
    )
    assert head[64:160] == b"n" * 32 + b"key" + bytes(61)
    assert head[160:176] == b"m" * 16 and head[176:208] == bytes(32) and len(head) == 216


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 215 + len(PAYLOAD)), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_anywhere_is_refused(place: int, bit: int, signed: bool) -> None:
    salt = b"salt" if signed else b""
    record = bytearray(described(WHAT, PAYLOAD, salt) + PAYLOAD)
    record[place] ^= 1 << bit
    assert judged(bytes(record), salt)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 215 + len(PAYLOAD)))
def test_a_truncated_record_is_refused(length: int) -> None:
    assert judged((described(WHAT, PAYLOAD) + PAYLOAD)[:length])


@pytest.mark.parametrize(
    "other",
    [
        replace(WHAT, namespace=b"o" * 32),
        replace(WHAT, key=ChunkKey(b"kez")),
        replace(WHAT, shard=0),
        replace(WHAT, shards=3),
        replace(WHAT, token_count=0),
    ],
)
def test_another_records_bytes_are_refused(other: Description) -> None:
    assert judged(described(other, PAYLOAD) + PAYLOAD)


def test_who_has_not_the_salt_forges_nothing() -> None:
    forged = bytes(len(PAYLOAD))
    record = described(replace(WHAT, checksum=checksum_of(forged)), forged, b"") + forged
    assert judged(record) == ""
    assert judged(record, b"salt") == "the record is not signed with this salt"
    assert judged(described(WHAT, PAYLOAD, b"other") + PAYLOAD, b"salt")
    assert judged(described(WHAT, PAYLOAD, b"salt") + PAYLOAD, b"salt") == ""


def test_names_differ_in_all_that_they_are_made_of() -> None:
    names = {
        name_of(namespace, ChunkKey(key), shard, salt)
        for namespace in (b"n" * 32, b"o" * 32)
        for key in (b"", b"a", b"a\0")
        for shard in (0, 1)
        for salt in (b"", b"s", b"t" * 100)
    }
    assert len(names) == 36 and {len(name) for name in names} == {48}


def test_the_longest_header_has_room_for_all_makers() -> None:
    makers = tuple(bytes([number]) * 16 for number in range(MAKERS_MAX))
    head = described(replace(WHAT, makers=makers, key=ChunkKey(b"k" * 64)), PAYLOAD)
    assert len(head) == HEADER_BYTES_MAX
    header = read_described(head)
    assert isinstance(header, Header) and header.description.makers == makers


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400))
def test_anything_may_be_there(data: bytes) -> None:
    assert isinstance(read_described(data), str)
    assert isinstance(read_described(b"KVSSHARE" + data), str)
