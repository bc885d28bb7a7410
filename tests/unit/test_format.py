"""What is on the disk: golden bytes, round trips, and decoders that no bytes can surprise."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.events import ChunkRecord, NamespaceRecord, SessionEntry
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec
from kvstore.tiers import format
from kvstore.tiers.format import Defect, RecordHeader, SlabHeader
from kvstore.types import ChunkKey, DiskPlace, Record, SlabId

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEY = st.binary(min_size=1, max_size=64).map(ChunkKey)
MAKER = st.just(b"") | st.binary(min_size=16, max_size=16).filter(any)
RECORD = st.builds(
    Record, st.binary(min_size=32, max_size=32), KEY, U32, length=U64, checksum=U64, maker=MAKER
)
ENTRY = st.builds(SessionEntry, KEY, st.integers(0, 2**40), U32, st.integers(-(2**40), 2**40), st.booleans())
SPEC = NamespaceSpec(
    model="llama",
    weights_digest=b"w" * 32,
    layout_fingerprint="hf/k,v",
    chunk_tokens=64,
    groups=(
        GroupSpec("full", 4096, 2, GroupKind.FULL, (LayerSlice(0, 0, 2048), LayerSlice(1, 2048, 2048))),
        GroupSpec("latent", 100, 1, GroupKind.LATENT, (), "none"),
    ),
    weights_epoch=3,
    adapter_digest=b"a",
    kv_scales_digest=b"",
    tensor_parallel=2,
    pipeline_parallel=4,
    context_parallel=8,
    salt=b"\0salt",
)
NAMESPACE = NamespaceRecord(5, "alice", SPEC)


def chunk(**changes: object) -> ChunkRecord:
    places = (DiskPlace(SlabId(1), 2, 3), DiskPlace(SlabId(4), 5, 2**64 - 1))
    known = ChunkRecord(9, ChunkKey(b"k"), 64, 1, bytes(range(16)), places, (7, 2**64 - 2))
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize(
    ("shard_bytes", "direct", "expected"),
    [
        (1, False, 4096),
        (4096 - 256, False, 4096),
        (4096 - 255, False, 8192),
        (4096, False, 8192),
        (2 << 20, False, (2 << 20) + 4096),
        (1, True, 8192),
        (4096, True, 8192),
        (4097, True, 12288),
    ],
)
def test_a_slot_holds_header_and_shard_in_whole_pages(shard_bytes: int, direct: bool, expected: int) -> None:
    assert format.slot_bytes(shard_bytes, direct=direct) == expected


def test_slots_fill_a_slab_and_no_more() -> None:
    assert format.slots_per_slab(4096 + 3 * 8192 - 1, 8192) == 2
    assert format.slots_per_slab(4096 + 3 * 8192, 8192) == 3
    assert format.slots_per_slab(8191, 8192) == 0
    assert format.slab_file_bytes(8192, 3) == 4096 + 3 * 8192
    assert format.slot_offset(8192, 2) + 8192 == format.slab_file_bytes(8192, 3)


# ------------------------------------------------------------------------------------------------------ golden bytes


def test_the_bytes_of_a_record_are_these() -> None:
    record = Record(b"N" * 32, ChunkKey(b"key"), 2, 4096, 0x1122334455667788, b"M" * 16)
    data = format.encode_record_header(record, 0x0A0B, direct=False)
    expected = (
        b"KVSRECRD" + bytes.fromhex("01000000 00010000 0b0a000000000000 0010000000000000 8877665544332211")
        + bytes.fromhex("02000000 03000000") + b"M" * 16 + b"N" * 32 + b"key" + bytes(61) + bytes(88)
    )  # fmt: skip
    assert data[:248] == expected
    assert data[248:].hex() == "0bac04d657a2f1bc"
    assert format.encode_record_header(record, 0x0A0B, direct=True)[12:16].hex() == "00100000"


def test_the_bytes_of_a_slab_header_are_these() -> None:
    data = format.encode_slab_header(SlabHeader(SlabId(7), 8192, 3, True))
    assert data[:40] == b"KVSSLAB\0" + bytes.fromhex(
        "01000000 00100000 07000000 01000000 0020000000000000 0300000000000000"
    )
    assert data[40:48].hex() == "a7a51f0d19845dfd"
    assert data[48:] == bytes(4096 - 48)


def test_the_bytes_of_a_chunk_in_the_index_are_these() -> None:
    assert format.chunk_key(258, b"k") == b"\0\0\x01\x02k"
    assert format.encode_chunk(chunk()).hex(" ", 8).split(" ") == [
        "4000000001000000",
        "0001020304050607",
        "08090a0b0c0d0e0f",
        "0100000002000000",
        "0300000000000000",
        "0700000000000000",
        "0400000005000000",
        "ffffffffffffffff",
        "feffffffffffffff",
        "81f102fd2d0c2255",
    ]


def test_the_bytes_of_a_session_in_the_index_are_these() -> None:
    assert format.session_key(1, b"ab", 3).hex() == "00000001" + "0002" + "6162" + "00000003"
    assert format.encode_session_head(9, 251)[:16].hex() == "0900000000000000" + "fb00000000000000"
    entries = [SessionEntry(ChunkKey(b"a"), 0, 4), SessionEntry(ChunkKey(b"b"), 4, 4)]
    entries.append(SessionEntry(ChunkKey(b"c"), 8, 4, -1, True))
    (page,) = format.encode_session_pages(entries)
    one = "02000000 04000000 0000000000000000 0000000000000000 01000000 00000000"
    two = "01000000 04000000 0800000000000000 ffffffffffffffff 01000000 01000000"
    assert page[:-8] == bytes.fromhex("02000000" + one + two) + b"abc"


# ------------------------------------------------------------------------------------------------------- round trips


@given(RECORD, U64, st.booleans())
def test_record_headers_come_back(record: Record, generation: int, direct: bool) -> None:
    data = format.encode_record_header(record, generation, direct=direct)
    assert len(data) == format.RECORD_HEADER_BYTES
    found = format.decode_record_header(data)
    assert found == RecordHeader(record, generation, format.record_header_bytes(direct=direct))
    assert format.difference(found, record, generation, direct=direct) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"namespace": b"M" * 32}, "another namespace"),
        ({"key": b"kez"}, "another key"),
        ({"shard": 1}, "shard"),
        ({"length": 11}, "length"),
        ({"checksum": 13}, "checksum"),
    ],
)
def test_a_record_that_is_another_one_is_told_apart(change: dict[str, object], why: str) -> None:
    wanted = Record(b"N" * 32, ChunkKey(b"key"), 0, 10, 12, b"m" * 16)
    other = dataclasses.replace(wanted, **change)  # type: ignore[arg-type]
    assert why in format.difference(RecordHeader(other, 5, 256), wanted, 5, direct=False)


def test_a_stale_record_and_one_of_another_layout_are_told_apart() -> None:
    wanted = Record(b"N" * 32, ChunkKey(b"key"), 0, 10, 12)
    assert "generation 4, not 5" in format.difference(RecordHeader(wanted, 4, 256), wanted, 5, direct=False)
    assert "header bytes" in format.difference(RecordHeader(wanted, 5, 256), wanted, 5, direct=True)
    other_maker = dataclasses.replace(wanted, maker=b"x" * 16)
    assert format.difference(RecordHeader(other_maker, 5, 256), wanted, 5, direct=False) == ""


def test_chunks_come_back_as_columns() -> None:
    chunks = [chunk(), chunk(token_count=3, flags=0, maker=b"", checksums=(1, 2))]
    columns = format.decode_chunks([format.encode_chunk(one) for one in chunks], shards=2)
    assert columns.sound.tolist() == [True, True]
    assert columns.token_count.tolist() == [64, 3]
    assert columns.flags.tolist() == [1, 0]
    assert columns.maker == [bytes(range(16)), b""]
    assert columns.slab.tolist() == [[1, 4], [1, 4]]
    assert columns.slot.tolist() == [[2, 5], [2, 5]]
    assert columns.generation.tolist() == [[3, 2**64 - 1]] * 2
    assert columns.checksum.tolist() == [[7, 2**64 - 2], [1, 2]]
    assert len(format.decode_chunks([], shards=2).sound) == 0


def test_unsound_chunks_are_marked_among_sound_ones() -> None:
    good = format.encode_chunk(chunk())
    bad = [good[:-1], good + b"\0", b"", bytes(len(good))]
    bad += [
        bytes(byte ^ (1 << 4) * (at == place) for at, byte in enumerate(good)) for place in range(len(good))
    ]
    columns = format.decode_chunks([good, *bad, good], shards=2)
    assert columns.sound.tolist() == [True, *[False] * len(bad), True]
    assert columns.token_count[[0, -1]].tolist() == [64, 64]


def test_namespaces_come_back() -> None:
    assert format.decode_namespace(5, format.encode_namespace(NAMESPACE)) == NAMESPACE


@given(st.lists(ENTRY, max_size=600))
def test_sessions_come_back(entries: list[SessionEntry]) -> None:
    pages = list(format.encode_session_pages(entries))
    assert len(pages) == -(-len(entries) // format.SESSION_PAGE_ENTRIES)
    found: list[SessionEntry] = []
    for page in pages:
        decoded = format.decode_session_page(page)
        assert not isinstance(decoded, Defect)
        found += decoded
    assert found == entries


def test_a_session_that_grows_keeps_its_pages_and_is_little_more_than_its_keys() -> None:
    entries = [SessionEntry(ChunkKey(bytes([n % 256]) * 32), 64 * n, 64) for n in range(1000)]
    short, long = (list(format.encode_session_pages(entries[:n])) for n in (700, 1000))
    assert [a == b for a, b in zip(short, long, strict=False)] == [True, True, False]
    assert sum(map(len, long)) < 1000 * 33
    head = format.decode_session_head(format.encode_session_head(8, 1000))
    assert head == format.SessionHead(8, 1000)


@given(U32, st.binary(max_size=256), U32)
def test_session_keys_come_back_in_order(namespace: int, name: bytes, page: int) -> None:
    key = format.session_key(namespace, name, page)
    assert format.decode_session_key(key) == format.SessionKey(namespace, name, page)
    assert len(key) <= 511, "LMDB allows no longer keys"


def test_meta_and_slab_rows_come_back() -> None:
    assert format.decode_meta(format.encode_meta(2**64 - 1)) == 2**64 - 1
    assert format.decode_slab(format.encode_slab(8192, 3)) == (8192, 3)
    assert format.decode_slab(format.encode_slab(8193, 3)) == Defect.RANGE
    assert format.decode_slab(format.encode_slab(0, 3)) == Defect.RANGE
    header = SlabHeader(SlabId(7), 8192, 3, False)
    assert format.decode_slab_header(format.encode_slab_header(header)) == header


# ---------------------------------------------------------------------------------------------------- hostile bytes

DECODERS = {
    "slab header": format.decode_slab_header,
    "record header": format.decode_record_header,
    "session key": format.decode_session_key,
    "meta": format.decode_meta,
    "slab": format.decode_slab,
    "namespace": lambda data: format.decode_namespace(1, data),
    "session head": format.decode_session_head,
    "session page": format.decode_session_page,
}
SEALED = {
    "slab header": format.encode_slab_header(SlabHeader(SlabId(7), 8192, 3, True)),
    "record header": format.encode_record_header(Record(b"N" * 32, ChunkKey(b"k"), 0, 1, 2), 3, direct=False),
    "slab": format.encode_slab(8192, 3),
    "namespace": format.encode_namespace(NAMESPACE),
    "session head": format.encode_session_head(1, 1),
    "session page": next(format.encode_session_pages([SessionEntry(ChunkKey(b"a"), 0, 4)])),
}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=400))
def test_no_bytes_surprise_a_decoder(name: str, data: bytes) -> None:
    DECODERS[name](data)
    DECODERS[name](format._seal(data))  # as hostile as it gets: with a seal that is right
    format.decode_chunks([data, format._seal(data)], shards=3)


@pytest.mark.parametrize("name", SEALED)
def test_a_flipped_bit_or_a_cut_is_noticed(name: str) -> None:
    good = SEALED[name]
    assert not isinstance(DECODERS[name](good), Defect)
    sealed = 48 if name == "slab header" else len(good)
    for place in range(sealed):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        assert isinstance(DECODERS[name](bytes(bad)), Defect), place
        assert isinstance(DECODERS[name](good[:place]), Defect), place


@pytest.mark.parametrize("name", ["slab header", "record header"])
def test_another_format_version_is_called_so(name: str) -> None:
    data = bytearray(SEALED[name])
    data[8:12] = np.uint32(2).tobytes()
    assert DECODERS[name](bytes(data)) == Defect.VERSION
    assert DECODERS[name](b"X" + SEALED[name][1:]) == Defect.MAGIC


def test_a_page_cannot_claim_more_entries_than_it_may_have() -> None:
    run = format._SESSION_RUN.pack(format.SESSION_PAGE_ENTRIES + 1, 1, 0, 0, 1, 0)
    page = format._seal(b"\x01\0\0\0" + run + b"k" * (format.SESSION_PAGE_ENTRIES + 1))
    assert format.decode_session_page(page) == Defect.RANGE
    keyless = format._seal(b"\x01\0\0\0" + format._SESSION_RUN.pack(1, 1, 0, 0, 0, 0))
    assert format.decode_session_page(keyless) == Defect.RANGE


def test_a_namespace_that_could_not_have_been_opened_is_refused() -> None:
    spec = dataclasses.replace(SPEC, chunk_tokens=0)
    assert format.decode_namespace(5, format.encode_namespace(NamespaceRecord(5, "t", spec))) == Defect.RANGE
