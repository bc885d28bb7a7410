"""The bytes that outlive the process: slab files and index values, format version 1. Pure encoders and decoders.

All integers are little-endian, except in index keys, where big-endian ones sort as numbers do. A *seal* is the xxh3_64
of all bytes before it. What does not decode is data, a `Defect`, never an exception: disks may hold anything.

Slab file `slab-%08d.kvs`: one page of header, then `slots` slots of `slot_bytes`, preallocated when it is created.

    slab header, 4096 bytes          record = one slot
    off size                         off size
      0   8  magic "KVSSLAB\\0"         0   8  magic "KVSRECRD"
      8   4  format version            8   4  format version
     12   4  header bytes: 4096       12   4  header bytes: 256, or 4096 with direct I/O; the payload follows them
     16   4  slab number              16   8  generation of the slot when this was written
     20   4  1: direct I/O            24   8  length of the payload
     24   8  slot bytes               32   8  xxh3_64 of the payload
     32   8  slots                    40   4  shard number
     40   8  seal                     44   4  length of the key, at most 64
     48   -  zeros                    48  16  maker
                                      64  32  namespace: digest of tenant, spec and epoch
                                      96  64  key, then zeros
                                     160  32  sealing of an encrypted payload, or zeros (`encryption.py`)
                                     192  56  zeros
                                     248   8  seal
                                     256   -  zeros up to header bytes; payload; zeros up to a multiple of 4096

A record is served only if namespace, key, shard, generation, length and checksum are what the index says and the
payload has that checksum: a torn, stale or misdirected one is found whatever else is on the disk.

Index tables (LMDB, `<ssd_dir>/index`):

    meta         name                            -> u64: "format", "direct", "slab_bytes", "boot_count",
                                                    "next_slab", "probe"
                 "key"                           -> id of the key that encrypts, 4 bytes, if any ever did; seal
                 "makers:", 16 bytes             -> 16 bytes each of the makers that these 16 bytes stand for in
                                                    chunks that several ranks committed; seal
                 "barred:", 16 bytes, 16 bytes   -> u8: 1 if all that it made is to go, 0 if it only makes no more;
                                                    seal. The mark of a tenant, or zeros for all, and a maker
                 "heeded:", channel              -> 16 bytes that name a journal of forgets, u64 position in it up to
                                                    which all of it has left the index; seal
    slabs        u32 number                      -> u64 slot bytes, u64 slots, seal
    namespaces   u32 number                      -> strings (u32 length, bytes): tenant, model, weights digest, layout
                                                    fingerprint, adapter digest, KV scales digest, hash protocol, salt;
                                                    u64 epoch; u32 chunk tokens, tp, pp, cp; u32 groups, each: strings
                                                    name, kind, position rule; u64 shard bytes; u32 shards; u32 layers,
                                                    each u64 layer, u64 offset, u64 length; seal
    chunks       u32 namespace, key              -> u32 tokens, u32 flags, 16 bytes maker; per shard: u32 slab, u32
                                                    slot, u64 generation, u64 xxh3_64 of the payload; seal. One size
                                                    per namespace: a million of them decode as one array
    sessions     u32 namespace, u16 name length, -> page 0: u64 version, u64 entries, seal
                 name, u32 page                     page n: SESSION_PAGE_ENTRIES entries (the last: the rest), as u32
                                                    runs, then per run of entries that follow each other: u32 entries,
                                                    u32 tokens each, u64 first token, i64 delta, u32 key bytes each,
                                                    u32 approximate; then all keys; seal

A session that grows by a turn leaves all its pages but the last as they are, and equal pages are not written.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.events import ChunkRecord, NamespaceRecord, SessionEntry
from kvstore.errors import StoreError
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec
from kvstore.types import KEY_BYTES_MAX, MAKER_BYTES, ChunkKey, Record, SlabId

FORMAT_VERSION = 1
PAGE_BYTES = 4096
SLAB_HEADER_BYTES = PAGE_BYTES
RECORD_HEADER_BYTES = 256
NO_MAKER = bytes(MAKER_BYTES)
"""How an unknown maker, b"", is stored."""
MAKERS_PREFIX = b"makers:"
BARRED_PREFIX = b"barred:"
HEEDED_PREFIX = b"heeded:"
JOURNAL_BYTES = 16
KEY_ID = b"key"
SESSION_PAGE_ENTRIES = 250
"""With keys of 32 bytes a page of a session fills two pages of LMDB."""

_U64 = struct.Struct("<Q")
_SLAB_HEADER = struct.Struct("<8sIIIIQQ")
_SLAB_MAGIC = b"KVSSLAB\0"
_RECORD_HEADER = struct.Struct("<8sIIQQQII16s32s64s")
RECORD_ABOUT_BYTES = _RECORD_HEADER.size
"""What a record header says of its payload: all that is before the sealing."""
_SEALING = struct.Struct("<32s56x")
_RECORD_MAGIC = b"KVSRECRD"
_SLAB_VALUE = struct.Struct("<QQ")
_CHUNK_HEAD = struct.Struct("<II16s")
_CHUNK_SHARD = struct.Struct("<IIQQ")
_SESSION_HEAD = struct.Struct("<QQ")
_SESSION_RUN = struct.Struct("<IIQqII")


class Defect(enum.Enum):
    """Why bytes are not what they should be."""

    SHORT = "is cut short"
    MAGIC = "does not begin with its magic"
    VERSION = "has another format version"
    SEAL = "does not match its own checksum"
    RANGE = "holds a value out of range"


# --------------------------------------------------------------------------------------------------------- geometry


def slot_bytes(shard_bytes: int, *, direct: bool) -> int:
    """Size of the slot in a slab file that holds a shard: header, bytes, and zeros up to a whole page, so that writing
    a slot never has to read the rest of a page first, and direct I/O finds it aligned."""
    return _whole_pages(record_header_bytes(direct=direct) + shard_bytes)


def record_header_bytes(*, direct: bool) -> int:
    return PAGE_BYTES if direct else RECORD_HEADER_BYTES


def slots_per_slab(slab_bytes: int, slot_bytes: int) -> int:
    """Slots that fit in a slab file of `slab_bytes`, header included; 0: such shards are too large for this tier."""
    return max(0, (slab_bytes - SLAB_HEADER_BYTES) // slot_bytes)


def slab_file_bytes(slot_bytes: int, slots: int) -> int:
    return SLAB_HEADER_BYTES + slot_bytes * slots


def slot_offset(slot_bytes: int, slot: int) -> int:
    return SLAB_HEADER_BYTES + slot_bytes * slot


def slab_name(slab: int) -> str:
    return f"slab-{slab:08d}.kvs"


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


# ----------------------------------------------------------------------------------------------- slab header, record


@dataclass(frozen=True, slots=True)
class SlabHeader:
    slab: SlabId
    slot_bytes: int
    slots: int
    direct: bool


def encode_slab_header(header: SlabHeader) -> bytes:
    return _seal(
        _SLAB_HEADER.pack(
            _SLAB_MAGIC,
            FORMAT_VERSION,
            SLAB_HEADER_BYTES,
            header.slab,
            header.direct,
            header.slot_bytes,
            header.slots,
        )
    ).ljust(SLAB_HEADER_BYTES, b"\0")


def decode_slab_header(data: bytes) -> SlabHeader | Defect:
    if len(data) < SLAB_HEADER_BYTES:
        return Defect.SHORT
    magic, version, size, slab, direct, slot_bytes, slots = _SLAB_HEADER.unpack_from(data)
    if magic != _SLAB_MAGIC:
        return Defect.MAGIC
    if version != FORMAT_VERSION:
        return Defect.VERSION
    body = _unseal(data[: _SLAB_HEADER.size + _U64.size])
    if isinstance(body, Defect):
        return body
    if size != SLAB_HEADER_BYTES or direct > 1:
        return Defect.RANGE
    return SlabHeader(SlabId(slab), slot_bytes, slots, bool(direct))


@dataclass(frozen=True, slots=True)
class RecordHeader:
    record: Record
    generation: int
    header_bytes: int
    sealing: bytes = b""
    """Of a payload that is encrypted."""


def encode_record_header(record: Record, generation: int, *, direct: bool, sealing: bytes = b"") -> bytes:
    """RECORD_HEADER_BYTES bytes, also with direct I/O, where zeros follow up to a page."""
    return _seal(record_about(record, generation, direct=direct) + _SEALING.pack(sealing))


def record_about(record: Record, generation: int, *, direct: bool) -> bytes:
    """RECORD_ABOUT_BYTES bytes."""
    return _RECORD_HEADER.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        record_header_bytes(direct=direct),
        generation,
        record.length,
        record.checksum,
        record.shard,
        len(record.key),
        record.maker,
        record.namespace,
        record.key,
    )


def decode_record_header(data: bytes | bytearray | memoryview) -> RecordHeader | Defect:
    if len(data) < RECORD_HEADER_BYTES:
        return Defect.SHORT
    magic, version, size, generation, length, checksum, shard, key_bytes, maker, namespace, key = (
        _RECORD_HEADER.unpack_from(data)
    )
    if magic != _RECORD_MAGIC:
        return Defect.MAGIC
    if version != FORMAT_VERSION:
        return Defect.VERSION
    body = _unseal(bytes(data[:RECORD_HEADER_BYTES]))
    if isinstance(body, Defect):
        return body
    if key_bytes > KEY_BYTES_MAX or size not in (RECORD_HEADER_BYTES, PAGE_BYTES):
        return Defect.RANGE
    record = Record(
        namespace, ChunkKey(key[:key_bytes]), shard, length, checksum, maker.replace(NO_MAKER, b"")
    )
    (sealing,) = _SEALING.unpack_from(data, _RECORD_HEADER.size)
    return RecordHeader(record, generation, size, sealing if any(sealing) else b"")


def difference(found: RecordHeader, wanted: Record, generation: int, *, direct: bool) -> str:
    """The first field in which a record is not the wanted one, "" if it is. Its maker may be anybody."""
    if found.record.namespace != wanted.namespace:
        return "holds a record of another namespace"
    if found.record.key != wanted.key:
        return "holds another key"
    pairs = (
        ("shard", found.record.shard, wanted.shard),
        ("generation", found.generation, generation),
        ("length", found.record.length, wanted.length),
        ("checksum", found.record.checksum, wanted.checksum),
        ("header bytes", found.header_bytes, record_header_bytes(direct=direct)),
    )
    return next((f"holds {name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs), "")


# ------------------------------------------------------------------------------------------------------- index keys


def number_key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def chunk_key(namespace: int, key: bytes) -> bytes:
    return number_key(namespace) + key


def session_key(namespace: int, session: bytes, page: int) -> bytes:
    return number_key(namespace) + len(session).to_bytes(2, "big") + session + number_key(page)


@dataclass(frozen=True, slots=True)
class SessionKey:
    namespace: int
    session: bytes
    page: int


def decode_session_key(key: bytes) -> SessionKey | Defect:
    if len(key) < 10:
        return Defect.SHORT
    if len(key) != 10 + int.from_bytes(key[4:6], "big"):
        return Defect.RANGE
    return SessionKey(int.from_bytes(key[:4], "big"), key[6:-4], int.from_bytes(key[-4:], "big"))


# ----------------------------------------------------------------------------------------------------- index values


COUNT_MAX = (1 << 31) - 1
"""Of starts and of slab files ever made. These rows have no seal; more than that is damage."""


def encode_meta(value: int) -> bytes:
    return _U64.pack(value)


def decode_meta(value: bytes) -> int | Defect:
    return int(_U64.unpack(value)[0]) if len(value) == _U64.size else Defect.SHORT


def encode_key_id(key_id: bytes) -> bytes:
    return _seal(key_id)


def decode_key_id(value: bytes) -> bytes | Defect:
    return _unseal(value)


def makers_key(digest: bytes) -> bytes:
    return MAKERS_PREFIX + digest


def encode_makers(makers: Sequence[bytes]) -> bytes:
    return _seal(b"".join(makers))


def decode_makers(value: bytes) -> tuple[bytes, ...] | Defect:
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    if not body or len(body) % MAKER_BYTES:
        return Defect.RANGE
    return tuple(body[start : start + MAKER_BYTES] for start in range(0, len(body), MAKER_BYTES))


def barred_key(mark: bytes, maker: bytes) -> bytes:
    return BARRED_PREFIX + (mark or NO_MAKER) + maker


def encode_barred(*, purge: bool) -> bytes:
    return _seal(bytes([purge]))


def decode_barred(key: bytes, value: bytes) -> tuple[bytes, bytes, bool] | Defect:
    """Mark of the tenant (empty: all), maker, and whether all that it made is to go."""
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    mark, maker = key[len(BARRED_PREFIX) : -MAKER_BYTES], key[-MAKER_BYTES:]
    if body not in (b"\0", b"\1") or len(mark) != MAKER_BYTES:
        return Defect.RANGE
    return mark.replace(NO_MAKER, b""), maker, body == b"\1"


def heeded_key(channel: str) -> bytes:
    return HEEDED_PREFIX + channel.encode("ascii")


def encode_heeded(journal: bytes, position: int) -> bytes:
    return _seal(journal + _U64.pack(position))


def decode_heeded(key: bytes, value: bytes) -> tuple[str, bytes, int] | Defect:
    """Channel, name of the journal, and position."""
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    channel = key.removeprefix(HEEDED_PREFIX)
    if len(body) != JOURNAL_BYTES + _U64.size or not channel.isascii():
        return Defect.RANGE
    return channel.decode("ascii"), body[:JOURNAL_BYTES], _U64.unpack_from(body, JOURNAL_BYTES)[0]


def encode_slab(slot_bytes: int, slots: int) -> bytes:
    return _seal(_SLAB_VALUE.pack(slot_bytes, slots))


def decode_slab(value: bytes) -> tuple[int, int] | Defect:
    """Slot bytes and slots."""
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    if len(body) != _SLAB_VALUE.size:
        return Defect.SHORT
    slot_bytes, slots = _SLAB_VALUE.unpack(body)
    if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or slots <= 0:
        return Defect.RANGE
    return slot_bytes, slots


def encode_chunk(chunk: ChunkRecord) -> bytes:
    parts = [_CHUNK_HEAD.pack(chunk.token_count, chunk.flags, chunk.maker)]
    parts += [
        _CHUNK_SHARD.pack(place.slab, place.slot, place.generation, checksum)
        for place, checksum in zip(chunk.places, chunk.checksums, strict=True)
    ]
    return _seal(b"".join(parts))


def chunk_value_bytes(shards: int) -> int:
    return _CHUNK_HEAD.size + _CHUNK_SHARD.size * shards + _U64.size


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """n chunk values as columns."""

    sound: npt.NDArray[np.bool_]
    """[n] whether the value has the right size and matches its seal; the other columns mean nothing where not."""
    token_count: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    maker: list[bytes]
    slab: npt.NDArray[np.int64]
    """[n, shards], like the next ones."""
    slot: npt.NDArray[np.int64]
    generation: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]


def decode_chunks(values: Sequence[bytes], shards: int) -> ChunkColumns:
    """Many values at once: about a microsecond each."""
    size = chunk_value_bytes(shards)
    right = np.fromiter(map(len, values), np.int64, len(values)) == size
    if not right.all():
        values = [value if len(value) == size else bytes(size) for value in values]
    rows = np.frombuffer(b"".join(values), _chunk_dtype(shards))
    digest, end = xxhash.xxh3_64_intdigest, -_U64.size
    seals = np.fromiter((digest(value[:end]) for value in values), np.uint64, len(values))
    blob, interned = rows["maker"].tobytes(), {NO_MAKER: b""}
    makers = (blob[start : start + MAKER_BYTES] for start in range(0, len(blob), MAKER_BYTES))
    return ChunkColumns(
        sound=right & (seals == rows["seal"]),
        token_count=rows["token_count"].astype(np.int32),
        flags=rows["flags"].astype(np.int32),
        maker=[interned.setdefault(maker, maker) for maker in makers],
        slab=rows["shards"]["slab"].astype(np.int64),
        slot=rows["shards"]["slot"].astype(np.int64),
        generation=rows["shards"]["generation"].astype(np.uint64),
        checksum=rows["shards"]["checksum"].astype(np.uint64),
    )


def _chunk_dtype(shards: int) -> np.dtype[np.void]:
    shard = np.dtype([("slab", "<u4"), ("slot", "<u4"), ("generation", "<u8"), ("checksum", "<u8")])
    fields = [("token_count", "<u4"), ("flags", "<u4"), ("maker", f"V{MAKER_BYTES}")]
    return np.dtype([*fields, ("shards", shard, (shards,)), ("seal", "<u8")])


def encode_namespace(namespace: NamespaceRecord) -> bytes:
    spec = namespace.spec
    parts = [
        _string(text)
        for text in (
            namespace.tenant.encode(),
            spec.model.encode(),
            spec.weights_digest,
            spec.layout_fingerprint.encode(),
            spec.adapter_digest,
            spec.kv_scales_digest,
            spec.hash_protocol.encode(),
            spec.salt,
        )
    ]
    parallel = (spec.tensor_parallel, spec.pipeline_parallel, spec.context_parallel)
    parts.append(struct.pack("<QIIIII", spec.weights_epoch, spec.chunk_tokens, *parallel, len(spec.groups)))
    for group in spec.groups:
        parts += [_string(text.encode()) for text in (group.name, group.kind.value, group.position_rule)]
        parts.append(struct.pack("<QII", group.shard_bytes, group.shard_count, len(group.layers)))
        parts += [struct.pack("<QQQ", piece.layer, piece.offset, piece.length) for piece in group.layers]
    return _seal(b"".join(parts))


def decode_namespace(number: int, value: bytes) -> NamespaceRecord | Defect:
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    reader = _Reader(body)
    try:
        tenant, model = reader.text(), reader.text()
        weights_digest, layout_fingerprint = reader.string(), reader.text()
        adapter_digest, kv_scales_digest = reader.string(), reader.string()
        hash_protocol, salt = reader.text(), reader.string()
        epoch, chunk_tokens, tensor, pipeline, context, groups = reader.take("<QIIIII")
        spec = NamespaceSpec(
            model=model,
            weights_digest=weights_digest,
            layout_fingerprint=layout_fingerprint,
            chunk_tokens=chunk_tokens,
            groups=tuple(_read_group(reader) for _ in range(groups)),
            weights_epoch=epoch,
            adapter_digest=adapter_digest,
            kv_scales_digest=kv_scales_digest,
            hash_protocol=hash_protocol,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            context_parallel=context,
            salt=salt,
        )
        if reader.left:
            return Defect.RANGE
        spec.validate()
    except _CutShort:
        return Defect.SHORT
    except (ValueError, StoreError):  # no UTF-8, no such kind; or not what this version can hold
        return Defect.RANGE
    return NamespaceRecord(number, tenant, spec)


def _read_group(reader: _Reader) -> GroupSpec:
    name, kind, position_rule = reader.text(), GroupKind(reader.text()), reader.text()
    shard_bytes, shard_count, layers = reader.take("<QII")
    return GroupSpec(
        name=name,
        shard_bytes=shard_bytes,
        shard_count=shard_count,
        kind=kind,
        layers=tuple(LayerSlice(*reader.take("<QQQ")) for _ in range(layers)),
        position_rule=position_rule,
    )


# --------------------------------------------------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class SessionHead:
    version: int
    entries: int


def encode_session_head(version: int, entries: int) -> bytes:
    return _seal(_SESSION_HEAD.pack(version, entries))


def decode_session_head(value: bytes) -> SessionHead | Defect:
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    if len(body) != _SESSION_HEAD.size:
        return Defect.SHORT
    return SessionHead(*_SESSION_HEAD.unpack(body))


def encode_session_pages(entries: Sequence[SessionEntry]) -> Iterator[bytes]:
    """Pages 1, 2, .. in order."""
    for start in range(0, len(entries), SESSION_PAGE_ENTRIES):
        yield _encode_session_page(tuple(entries[start : start + SESSION_PAGE_ENTRIES]))


def _encode_session_page(entries: Sequence[SessionEntry]) -> bytes:
    kinds = [(entry.token_count, entry.delta, entry.approximate, len(entry.key)) for entry in entries]
    firsts = [entry.first_token for entry in entries]
    starts = [0]
    for number in range(1, len(entries)):
        before = kinds[number - 1]
        if kinds[number] != before or firsts[number] != firsts[number - 1] + before[0]:
            starts.append(number)
    runs = []
    for start, end in itertools.pairwise((*starts, len(entries))):
        token_count, delta, approximate, key_bytes = kinds[start]
        runs.append(_SESSION_RUN.pack(end - start, token_count, firsts[start], delta, key_bytes, approximate))
    keys = (entry.key for entry in entries)
    return _seal(b"".join((struct.pack("<I", len(runs)), *runs, *keys)))


def decode_session_page(value: bytes) -> list[SessionEntry] | Defect:
    body = _unseal(value)
    if isinstance(body, Defect):
        return body
    reader = _Reader(body)
    entries: list[SessionEntry] = []
    try:
        (count,) = reader.take("<I")
        runs = [reader.take(_SESSION_RUN.format) for _ in range(count)]
        for entry_count, token_count, first_token, delta, key_bytes, approximate in runs:
            if (
                not 0 < key_bytes <= KEY_BYTES_MAX
                or entry_count > SESSION_PAGE_ENTRIES - len(entries)
                or approximate > 1
            ):
                return Defect.RANGE
            for number in range(entry_count):
                key = ChunkKey(reader.piece(key_bytes))
                first = first_token + number * token_count
                entries.append(SessionEntry(key, first, token_count, delta, bool(approximate)))
    except _CutShort:
        return Defect.SHORT
    return Defect.RANGE if reader.left else entries


# -------------------------------------------------------------------------------------------------------- the pieces


def _seal(body: bytes) -> bytes:
    return body + _U64.pack(xxhash.xxh3_64_intdigest(body))


def _unseal(value: bytes) -> bytes | Defect:
    body, seal = value[: -_U64.size], value[-_U64.size :]
    if len(seal) != _U64.size:
        return Defect.SHORT
    return body if _U64.pack(xxhash.xxh3_64_intdigest(body)) == seal else Defect.SEAL


def _string(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


class _CutShort(Exception):
    """Raised by `_Reader` alone, and never let out of a decoder."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def piece(self, count: int) -> bytes:
        if count > self.left:
            raise _CutShort
        self._at += count
        return self._data[self._at - count : self._at]

    def take(self, format: str) -> tuple[int, ...]:
        return struct.unpack(format, self.piece(struct.calcsize(format)))

    def string(self) -> bytes:
        return self.piece(self.take("<I")[0])

    def text(self) -> str:
        return self.string().decode()
