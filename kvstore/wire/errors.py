"""StoreError <-> `Error`, in replies and in the trailing metadata of unary calls."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from kvstore.errors import BY_CODE, StoreError, Unavailable
from kvstore.v1 import types_pb2

ERROR_METADATA = "kvstore-error-bin"
"""Trailing metadata of a failed unary call: a serialised `Error`."""


def error_to_proto(error: StoreError) -> types_pb2.Error:
    return types_pb2.Error(
        code=error.code.value,
        message=clean(error.message),
        field=clean(error.field),
        value=error.value,
        remedy=clean(error.remedy),
    )


def error_from_proto(message: types_pb2.Error) -> StoreError:
    return _error_of(message.code)(
        message.message, field=message.field, value=message.value, remedy=message.remedy
    )


def error_metadata(error: StoreError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for a unary call that is answered with `error`."""
    return ((ERROR_METADATA, error_to_proto(error).SerializeToString()),)


def error_from_status(code: int, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> StoreError:
    """The error of a failed call: what `error_metadata` carried, else (gRPC failed) the status alone."""
    for key, value in metadata:
        if key == ERROR_METADATA and isinstance(value, bytes):
            try:
                return error_from_proto(types_pb2.Error.FromString(value))
            except DecodeError:
                break
    return _error_of(code)(details or f"gRPC status {code}")


_CANCELLED = 1
"""gRPC's status for a call that was cut off from either end; to a caller the same as an absent daemon."""


def _error_of(code: int) -> type[StoreError]:
    return Unavailable if code == _CANCELLED else BY_CODE.get(code, StoreError)


def clean(text: str) -> str:
    """A text field must be UTF-8; lone surrogates come from undecodable file names and the like."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
