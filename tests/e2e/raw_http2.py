"""As much HTTP/2 as it takes to be a bad peer: gRPC's own client library would not send such things, nor fail to read.

A frame is 3 bytes of length, type, flags, 4 bytes of stream, payload (RFC 9113). Header fields are sent as literals
without indexing (RFC 7541, 6.2.2), so no table is needed.
"""

from __future__ import annotations

import base64
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

BOUND_S = 20.0
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INITIAL_WINDOW_SIZE = 4
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + payload


def grpc_message(body: bytes) -> bytes:
    return b"\0" + struct.pack("!I", len(body)) + body


def _text(value: bytes) -> bytes:
    """Length as an integer with a prefix of 7 bits, then the bytes as they are."""
    if len(value) < 127:
        return bytes((len(value),)) + value
    rest, encoded = len(value) - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded) + value


def header_block(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def in_header(value: bytes) -> bytes:
    """A value of metadata whose name ends in -bin."""
    return base64.b64encode(value).rstrip(b"=")


def call_headers(method: str, metadata: Mapping[str, bytes] | None = None) -> bytes:
    return header_block(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *((name.encode(), value) for name, value in (metadata or {}).items()),
        ]
    )


class Http2:
    """One connection. `window`: how many bytes of each answer the daemon may send before we `allow` more."""

    def __init__(self, address: Path | tuple[str, int], *, window: int | None = None) -> None:
        family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(BOUND_S)
        self.socket.connect(address if isinstance(address, tuple) else str(address))
        settings = b"" if window is None else struct.pack("!HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._next = 1

    def begin(self, method: str, metadata: Mapping[str, bytes] | None = None, *, end: bool = False) -> int:
        """Send the headers of a call; returns its stream."""
        stream, self._next = self._next, self._next + 2
        flags = END_HEADERS | (END_STREAM if end else 0)
        self.socket.sendall(frame(HEADERS, flags, stream, call_headers(method, metadata)))
        return stream

    def send(self, stream: int, body: bytes, *, end: bool = False) -> None:
        """One gRPC message in one frame."""
        self.socket.sendall(frame(DATA, END_STREAM if end else 0, stream, grpc_message(body)))

    def call(self, method: str, body: bytes, metadata: Mapping[str, bytes] | None = None) -> int:
        stream = self.begin(method, metadata)
        self.send(stream, body, end=True)
        return stream

    def allow(self, stream: int, more: int) -> None:
        """So many bytes more, of this answer and in all."""
        data = struct.pack("!I", more)
        self.socket.sendall(frame(WINDOW_UPDATE, 0, 0, data) + frame(WINDOW_UPDATE, 0, stream, data))

    def answer(self, stream: int) -> bytes:
        """All data and headers of an answer, as they are, until its end."""
        found = b""
        with self.socket.makefile("rb") as received:
            while True:
                head = received.read(9)
                assert len(head) == 9, "the connection ended"
                payload = received.read(int.from_bytes(head[:3], "big"))
                kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
                if number == stream and kind in (DATA, HEADERS, RST_STREAM):
                    found += payload
                    if kind == RST_STREAM or flags & END_STREAM:
                        return found

    def reset(self, stream: int) -> None:
        self.socket.sendall(frame(RST_STREAM, 0, stream, struct.pack("!I", CANCEL)))

    def close(self) -> None:
        self.socket.close()
