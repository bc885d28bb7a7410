"""Bytes <-> messages, and the metadata that goes beside them."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.errors import BadRequest

TOKEN_METADATA = "kvstore-token-bin"
"""Request metadata of a unary call: the token of the descriptor socket's hello."""

LANE_PREFIX_BYTES = 4
"""Before each message on a fast lane: its length, u32 little-endian."""

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """`data` as a message; raises BadRequest where gRPC would say only "exception deserializing"."""
    try:
        return kind.FromString(data)
    except DecodeError as problem:
        raise BadRequest(
            f"is not a valid {kind.DESCRIPTOR.name}: {problem}",
            field="message",
            value=f"{len(data)} bytes",
            remedy="text fields must be UTF-8; use stubs generated from this version of proto/",
        ) from None


def lane_frame(data: bytes) -> bytes:
    """A serialised message as it goes over a fast lane."""
    return len(data).to_bytes(LANE_PREFIX_BYTES, "little") + data
