"""Objects that hold consecutive chunks: a request to the store moves more than one, and a look-up needs no index.

    off size                             entry
      0   8  magic "KVSPACK1"            off size
      8   4  entries                       0   2  length of the key
     12   4  header bytes                  2   2  shard
     16   -  entries                       4  64  key, then zeros
      -   8  seal: xxh3_64 of the header  68   8  where its record (`records.py`) begins
      -   -  records                      76   8  length of that record

A pack is named by its last key. Where a chain is cut into packs is told by the keys alone (`ends_pack`), so a reader
that has a chain of keys knows the names of the packs that may be there. What was at the end of a chain when it was
written is a pack that ends elsewhere: it has the name of its last key, too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.types import KEY_BYTES_MAX, ChunkKey

MAGIC = b"KVSPACK1"
CHUNKS_MEAN = 8
"""Of a pack, about;"""
CHUNKS_MAX = 32
ENTRIES_MAX = 256
_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<HH64sQQ")
HEADER_BYTES_MAX = _HEAD.size + ENTRIES_MAX * _ENTRY.size + 8
"""So much of an object is read for a look-up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A record in a pack."""

    key: ChunkKey
    shard: int
    start: int
    length: int


def ends_pack(key: ChunkKey) -> bool:
    """Whether a chain is cut behind this key: every eighth, as its hash has it."""
    return hashlib.blake2b(key, digest_size=1, person=b"kvs.pack.v1").digest()[0] % CHUNKS_MEAN == 0


def runs(keys: Sequence[ChunkKey], parents: Sequence[ChunkKey], shards: int) -> list[range]:
    """Which of these chunks go into one object each: neighbours in a chain, up to where it is cut."""
    most = max(1, min(CHUNKS_MAX, ENTRIES_MAX // shards))
    found: list[range] = []
    start = 0
    for number in range(1, len(keys) + 1):
        at_end = number == len(keys)
        if (
            at_end
            or parents[number] != keys[number - 1]
            or ends_pack(keys[number - 1])
            or number - start >= most
        ):
            found.append(range(start, number))
            start = number
    return found


def header(pieces: Sequence[tuple[ChunkKey, int, int]]) -> tuple[bytes, list[Piece]]:
    """Of a pack with these records in this order: (key, shard, length)."""
    size = _HEAD.size + len(pieces) * _ENTRY.size + 8
    at = size
    placed: list[Piece] = []
    for key, shard, length in pieces:
        placed.append(Piece(key, shard, at, length))
        at += length
    entries = b"".join(
        _ENTRY.pack(len(piece.key), piece.shard, piece.key, piece.start, piece.length) for piece in placed
    )
    head = _HEAD.pack(MAGIC, len(placed), size) + entries
    return head + xxhash.xxh3_64_digest(head), placed


def read_header(data: bytes | memoryview) -> list[Piece] | None:
    """None: the object does not begin like a pack."""
    if len(data) < _HEAD.size:
        return None
    magic, count, size = _HEAD.unpack_from(data)
    if (
        magic != MAGIC
        or count > ENTRIES_MAX
        or size != _HEAD.size + count * _ENTRY.size + 8
        or len(data) < size
    ):
        return None
    if xxhash.xxh3_64_digest(bytes(data[: size - 8])) != bytes(data[size - 8 : size]):
        return None
    pieces = []
    for number in range(count):
        key_bytes, shard, key, start, length = _ENTRY.unpack_from(data, _HEAD.size + number * _ENTRY.size)
        if key_bytes > KEY_BYTES_MAX:
            return None
        pieces.append(Piece(ChunkKey(key[:key_bytes]), shard, start, length))
    return pieces
