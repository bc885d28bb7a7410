"""A shard on its way between nodes describes itself: header, then the shard's bytes. For REMOTE stores and peers alike.

    record, all integers little-endian
    off size
      0   8  magic "KVSSHARE"
      8   2  format version
     10   2  header bytes: the payload follows them
     12   4  flags: 1 derived, 2 its payload is sealed (`encryption.py`)
     16   4  shard number
     20   4  shards that the chunk has
     24   4  tokens of the chunk
     28   2  length of the key, at most 64
     30   2  makers, at most 64
     32   8  length of the payload
     40   8  xxh3_64 of the payload
     48   8  generation: how many forgets the writer knew of (`tombstones.py`)
     56   8  when it was written, unix ms by the writer's clock: for people, and for garbage collection by age
     64  32  namespace: digest of tenant, spec and epoch
     96  64  key, then zeros
    160 16n  makers
      -  32  HMAC-SHA256 of all before it and of the payload, keyed with `remote.salt`; zeros without one
      -   8  seal: xxh3_64 of all before it

A reader knows which namespace, key and shard it asked for and how long the shard is; `refusal` says what differs. What
does not decode, or differs, is data, never an exception: a store may hold anything.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.tiers.disk_port import Buffer
from kvstore.types import KEY_BYTES_MAX, MAKER_BYTES, ChunkKey

FORMAT_VERSION = 1
MAKERS_MAX = 64
DERIVED = 1
ENCRYPTED = 2
MAGIC = b"KVSSHARE"
MAC_BYTES = 32
SEAL_BYTES = 8
_FIXED = struct.Struct("<8sHHIIIIHHQQQQ32s64s")
FIXED_BYTES = _FIXED.size
HEADER_BYTES_MAX = FIXED_BYTES + MAKERS_MAX * MAKER_BYTES + MAC_BYTES + SEAL_BYTES
assert FIXED_BYTES == 160


@dataclass(frozen=True, slots=True)
class Description:
    """What a record says of its payload."""

    namespace: bytes
    """32 bytes: `Namespace.salt`."""
    key: ChunkKey
    shard: int
    shards: int
    token_count: int
    derived: bool
    makers: tuple[bytes, ...]
    length: int
    checksum: int
    """xxh3_64 of the payload."""
    generation: int = 0
    written_ms: int = 0
    encrypted: bool = False
    """What follows the header is the payload as `encryption.py` sealed it; `length` and `checksum` are of what was."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header as it was read: well formed, and not yet held against anything."""

    description: Description
    size: int
    """Its own length: the payload follows."""
    mac: bytes
    signed: bytes
    """The part of it that the MAC covers."""


def described(description: Description, payload: Buffer, salt: bytes = b"") -> bytes:
    """The header of a record. `payload` is read only if there is a `salt` to sign it with; its checksum is taken from
    the description: should the bytes have changed since, the reader finds out."""
    d = description
    assert len(d.namespace) == 32 and len(d.key) <= KEY_BYTES_MAX and len(d.makers) <= MAKERS_MAX, d
    assert all(len(maker) == MAKER_BYTES for maker in d.makers), d
    size = FIXED_BYTES + MAKER_BYTES * len(d.makers) + MAC_BYTES + SEAL_BYTES
    signed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        size,
        (DERIVED if d.derived else 0) | (ENCRYPTED if d.encrypted else 0),
        d.shard,
        d.shards,
        d.token_count,
        len(d.key),
        len(d.makers),
        d.length,
        d.checksum,
        d.generation,
        d.written_ms,
        d.namespace,
        d.key,
    ) + b"".join(d.makers)
    head = signed + _mac(signed, payload, salt)
    return head + _seal(head)


def read_described(data: bytes | memoryview) -> Header | str:
    """The header that `data` begins with (`HEADER_BYTES_MAX` bytes are always enough), or why there is none."""
    if len(data) < FIXED_BYTES:
        return "the record is cut short"
    (
        magic,
        version,
        size,
        flags,
        shard,
        shards,
        tokens,
        key_bytes,
        makers,
        length,
        checksum,
        generation,
        written_ms,
        namespace,
        key,
    ) = _FIXED.unpack_from(data)
    if magic != MAGIC:
        return "the record does not begin with its magic"
    if version != FORMAT_VERSION:
        return f"the record has format version {version}, and this daemon reads {FORMAT_VERSION}"
    in_range = key_bytes <= KEY_BYTES_MAX and makers <= MAKERS_MAX and flags <= DERIVED | ENCRYPTED
    if not in_range or size != FIXED_BYTES + MAKER_BYTES * makers + MAC_BYTES + SEAL_BYTES:
        return "the record's header holds a value out of range"
    if len(data) < size:
        return "the record is cut short"
    head = bytes(data[: size - SEAL_BYTES])
    if _seal(head) != bytes(data[size - SEAL_BYTES : size]):
        return "the record's header does not match its own checksum"
    signed = head[:-MAC_BYTES]
    names = tuple(
        signed[FIXED_BYTES + MAKER_BYTES * n : FIXED_BYTES + MAKER_BYTES * (n + 1)] for n in range(makers)
    )
    description = Description(
        namespace,
        ChunkKey(key[:key_bytes]),
        shard,
        shards,
        tokens,
        bool(flags & DERIVED),
        names,
        length,
        checksum,
        generation,
        written_ms,
        bool(flags & ENCRYPTED),
    )
    return Header(description, size, head[-MAC_BYTES:], signed)


def peek(data: bytes | memoryview, *, namespace: bytes, key: ChunkKey) -> tuple[int, int] | None:
    """(tokens of the chunk, bytes of all its shards) as the first `FIXED_BYTES` of a record say; None if they are not
    of this key. Good enough for a look-up: what is served is read whole, and verified."""
    if len(data) < FIXED_BYTES:
        return None
    magic, version, _, _, _, shards, tokens, key_bytes, _, length, _, _, _, found, name = _FIXED.unpack_from(
        data
    )
    if (magic, version, found) != (MAGIC, FORMAT_VERSION, namespace):
        return None
    if name[: min(key_bytes, KEY_BYTES_MAX)] != key or not 1 <= shards <= 1 << 16:
        return None
    return tokens, length * shards


def refusal(header: Header, *, namespace: bytes, key: ChunkKey, shard: int, shards: int, length: int) -> str:
    """Why this is not the record that was asked for; empty: it is, as far as the header says."""
    d = header.description
    if d.namespace != namespace:
        return "the record is of another namespace"
    if d.key != key:
        return "the record is of another key"
    if (d.shard, d.shards) != (shard, shards):
        return f"the record is of shard {d.shard} of {d.shards}, not {shard} of {shards}"
    if d.length != length:
        return f"the record has {d.length} bytes of payload, not {length}"
    if d.token_count < 1:
        return "the record is of no token"
    return ""


def refusal_of_payload(header: Header, payload: Buffer, salt: bytes = b"") -> str:
    """Why these are not the bytes that the header describes; empty: they are."""
    if memoryview(payload).nbytes != header.description.length:
        return "the record is cut short"
    if checksum_of(payload) != header.description.checksum:
        return "the record's bytes do not match their checksum"
    return refusal_of_signature(header, payload, salt)


def refusal_of_signature(header: Header, stored: Buffer, salt: bytes) -> str:
    """Why who wrote this did not know the salt; empty: he did, or there is none. `stored`: what follows the header."""
    if salt and not hmac.compare_digest(_mac(header.signed, stored, salt), header.mac):
        return "the record is not signed with this salt"
    return ""


def name_of(namespace: bytes, key: ChunkKey, shard: int, salt: bytes = b"") -> str:
    """Under which a store keeps the record: 48 hexadecimal digits that tell nothing of the key without the salt."""
    keyed = hashlib.blake2b(salt, digest_size=32, person=b"kvs.remote.v1").digest()
    state = hashlib.blake2b(digest_size=24, key=keyed, person=b"kvs.record.v1")
    state.update(struct.pack("<IB", shard, len(key)) + key + namespace)
    return state.hexdigest()


def place_of(namespace: bytes, salt: bytes = b"") -> str:
    """Of all records of a namespace, so that they can be found again to be deleted: 12 hexadecimal digits."""
    keyed = hashlib.blake2b(salt, digest_size=32, person=b"kvs.remote.v1").digest()
    return hashlib.blake2b(namespace, digest_size=6, key=keyed, person=b"kvs.place.v1").hexdigest()


def prefix_of(salt: bytes = b"") -> str:
    """Of all names: two clusters with different salts share nothing in one store. 16 hexadecimal digits."""
    return hashlib.blake2b(salt, digest_size=8, person=b"kvs.prefix.v1").hexdigest()


def checksum_of(payload: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _mac(signed: bytes, payload: Buffer, salt: bytes) -> bytes:
    if not salt:
        return bytes(MAC_BYTES)
    state = hmac.new(salt, signed, hashlib.sha256)
    state.update(payload)
    return state.digest()


def _seal(head: bytes) -> bytes:
    return xxhash.xxh3_64_digest(head)[::-1]


def makers_fit(makers: Sequence[bytes]) -> bool:
    """Whether a record can name them all: what cannot be recalled by its maker is not handed on."""
    return len(makers) <= MAKERS_MAX
