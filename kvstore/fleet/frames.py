"""What daemons say to each other over one TCP connection, TLS or not. Everything is little-endian.

    frame    header (magic, version, kind, body bytes, number of the request) | body
    opening  client HELLO (nonce, name) -> server WELCOME (nonce, name, proof) -> client PROOF (proof) -> server READY
    READ     namespace (32), deadline_ms, count, keys                   -> CHUNK each, in order, then END
    CHUNK    index, outcome, a record's header for each shard (tiers/remote/records.py) | bytes of the shards
    OFFER    namespace (32), count, keys: "take these, I am leaving"    -> TAKEN count
    ERROR    text; the connection ends

A shard describes itself as in a REMOTE store, but that nothing is signed (both ends have proved who they are) and the
namespace is the fleet's digest of it. Whoever reads holds that against what it asked for before the first byte, and the
checksums against the bytes that came.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.tiers.remote.records import Description, described, read_described
from kvstore.types import ChunkKey

MAGIC = b"KVPR"
VERSION = 1
HEADER = struct.Struct("<4sBBHIQ")
"""Magic, version, kind, 0, bytes of the body (those of shards not counted), number."""
BODY_BYTES_MAX = 256 << 10
KEY_BYTES_MAX = 64
KEYS_MAX = 256
"""In one request."""
SHARDS_MAX = 1_024
NAMESPACE_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES_MAX = 256
PIECE_BYTES = 1 << 20
"""Received, or sent, in one call."""
_READ = struct.Struct(f"<{NAMESPACE_BYTES}sIH")
_OFFER = struct.Struct(f"<{NAMESPACE_BYTES}sH")
_CHUNK = struct.Struct("<HBH")
_TIMEVAL = struct.Struct("@ll")

Connection = socket.socket | ssl.SSLSocket


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    PROOF = 3
    READY = 4
    READ = 5
    CHUNK = 6
    END = 7
    OFFER = 8
    TAKEN = 9
    ERROR = 10


class Answer(IntEnum):
    """Of one key."""

    HIT = 0
    MISS = 1
    LATE = 2
    """It is there, and could not be brought to DRAM in time."""


class PeerError(Exception):
    """A peer that is silent, gone, or says what it must not: the connection is of no use any more."""


class Late(PeerError):
    """The deadline passed."""


@dataclass(frozen=True, slots=True)
class ChunkHead:
    index: int
    """Place of the key in the request."""
    answer: Answer
    shards: tuple[Description, ...] = ()
    """Of a HIT: all of them, in order."""


# ------------------------------------------------------------------------------------------------------------- bodies


def encode_read(namespace: bytes, keys: Sequence[ChunkKey], deadline_ms: int) -> bytes:
    return _READ.pack(namespace, max(1, min(deadline_ms, 0xFFFF_FFFF)), len(keys)) + _keys(keys)


def decode_read(body: bytes) -> tuple[bytes, list[ChunkKey], int]:
    """(namespace, keys, deadline_ms). Raises PeerError."""
    if len(body) < _READ.size:
        raise PeerError("a READ that is too short")
    namespace, deadline_ms, count = _READ.unpack_from(body)
    return namespace, _decode_keys(body, _READ.size, count), deadline_ms


def encode_offer(namespace: bytes, keys: Sequence[ChunkKey]) -> bytes:
    return _OFFER.pack(namespace, len(keys)) + _keys(keys)


def decode_offer(body: bytes) -> tuple[bytes, list[ChunkKey]]:
    """Raises PeerError."""
    if len(body) < _OFFER.size:
        raise PeerError("an OFFER that is too short")
    namespace, count = _OFFER.unpack_from(body)
    return namespace, _decode_keys(body, _OFFER.size, count)


def _keys(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join(bytes((len(key),)) + key for key in keys)


def _decode_keys(body: bytes, at: int, count: int) -> list[ChunkKey]:
    if not 1 <= count <= KEYS_MAX:
        raise PeerError(f"{count} keys in one request")
    keys = []
    for _ in range(count):
        if at >= len(body):
            raise PeerError("keys are missing")
        size = body[at]
        if not 1 <= size <= KEY_BYTES_MAX or at + 1 + size > len(body):
            raise PeerError("a key of an impossible length")
        keys.append(ChunkKey(body[at + 1 : at + 1 + size]))
        at += 1 + size
    if at != len(body):
        raise PeerError("bytes behind the last key")
    return keys


def encode_chunk(head: ChunkHead) -> bytes:
    return _CHUNK.pack(head.index, head.answer, len(head.shards)) + b"".join(
        described(each, b"") for each in head.shards
    )


def decode_chunk(body: bytes) -> ChunkHead:
    """Raises PeerError."""
    if len(body) < _CHUNK.size:
        raise PeerError("a CHUNK that is too short")
    index, answer, count = _CHUNK.unpack_from(body)
    if answer not in Answer._value2member_map_ or count > SHARDS_MAX or bool(count) != (answer == Answer.HIT):
        raise PeerError("a CHUNK that contradicts itself")
    rest = memoryview(body)[_CHUNK.size :]
    shards = []
    for _ in range(count):
        header = read_described(rest)
        if isinstance(header, str):
            raise PeerError(header)
        shards.append(header.description)
        rest = rest[header.size :]
    if len(rest):
        raise PeerError("bytes behind the last shard's description")
    return ChunkHead(index, Answer(answer), tuple(shards))


# -------------------------------------------------------------------------------------------------------------- wires


def send(connection: Connection, kind: Kind, number: int, body: bytes, deadline: float) -> None:
    """Raises PeerError."""
    assert len(body) <= BODY_BYTES_MAX, (kind, len(body))
    head = HEADER.pack(MAGIC, VERSION, kind, 0, len(body), number)
    send_all(connection, head + body, deadline)


def send_all(connection: Connection, data: bytes | memoryview, deadline: float) -> None:
    """In pieces, so that the deadline holds for whatever a stopped peer does. Raises PeerError."""
    view = memoryview(data).cast("B")
    try:
        while len(view):
            _set_timeout(connection, socket.SO_SNDTIMEO, _left(deadline))
            sent = connection.send(view[:PIECE_BYTES])
            view = view[sent:]
    except (TimeoutError, BlockingIOError):
        raise Late("the peer does not take what is sent") from None
    except (OSError, ValueError) as problem:
        raise PeerError(f"sending failed: {problem}") from None


def receive(connection: Connection, deadline: float) -> tuple[Kind, int, bytes]:
    """(kind, number, body). Raises PeerError."""
    head = bytearray(HEADER.size)
    receive_into(connection, memoryview(head), deadline)
    magic, version, kind, zero, size, number = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION or zero or kind not in Kind._value2member_map_:
        raise PeerError("this is no frame of ours")
    if size > BODY_BYTES_MAX:
        raise PeerError(f"a body of {size} bytes")
    body = bytearray(size)
    receive_into(connection, memoryview(body), deadline)
    return Kind(kind), number, bytes(body)


def receive_into(connection: Connection, view: memoryview, deadline: float) -> None:
    """Fill it. Raises PeerError; some of it may be filled then, and nothing more will be."""
    wait_for_all = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    try:
        while len(view):
            _set_timeout(connection, socket.SO_RCVTIMEO, _left(deadline))
            got = connection.recv_into(view[:PIECE_BYTES], 0, wait_for_all)
            if not got:
                raise PeerError("the peer closed the connection")
            view = view[got:]
    except (TimeoutError, BlockingIOError):
        raise Late("the peer is too slow") from None
    except (OSError, ValueError) as problem:
        raise PeerError(f"receiving failed: {problem}") from None


def _set_timeout(connection: Connection, which: int, seconds: float) -> None:
    """Of the next call. Without TLS by the kernel, which then carries a piece in one call; a timeout of Python's
    makes it a poll and a call for each window of TCP."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    if connection.gettimeout() is not None:
        connection.settimeout(None)
    whole = int(seconds)
    micros = max(1, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(whole, micros))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Late("the deadline passed")
    return left
