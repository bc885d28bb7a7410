"""Expected failures, and the one table that maps them to gRPC status codes.

A miss, a full tier or a lost worker is a *reply*, never one of these. An error always names the field, the value and
what to do about it.
"""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """The status codes we use; values are those of gRPC (kept here so that the core needs no gRPC)."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class StoreError(Exception):
    """An expected failure.

    `field` is the name of the offending request field or setting ("" if none), `remedy` one sentence in the
    imperative.
    """

    code: Code = Code.INTERNAL

    def __init__(self, message: str, *, field: str = "", value: object = "", remedy: str = "") -> None:
        self.message = message
        self.field = field
        self.value = shorten(value)
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        where = (
            f"{self.field}={self.value}: "
            if self.field and self.value
            else f"{self.field}: "
            if self.field
            else ""
        )
        what_to_do = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{what_to_do}"


class BadRequest(StoreError):
    code = Code.INVALID_ARGUMENT


class NotFound(StoreError):
    code = Code.NOT_FOUND


class Conflict(StoreError):
    """A compare-and-set lost, or two callers disagree."""

    code = Code.ABORTED


class Precondition(StoreError):
    """The request is fine, the state is not (an expired lease, an aborted reservation)."""

    code = Code.FAILED_PRECONDITION


class Denied(StoreError):
    code = Code.PERMISSION_DENIED


class Unauthenticated(StoreError):
    code = Code.UNAUTHENTICATED


class Exhausted(StoreError):
    """A stated bound was reached."""

    code = Code.RESOURCE_EXHAUSTED


class Unsupported(StoreError):
    code = Code.UNIMPLEMENTED


class Unavailable(StoreError):
    code = Code.UNAVAILABLE


class DeadlineExceeded(StoreError):
    code = Code.DEADLINE_EXCEEDED


class ConfigError(StoreError):
    """A setting that cannot work; raised before anything is started."""

    code = Code.INVALID_ARGUMENT

    @classmethod
    def unreadable(cls, problem: OSError, *, field: str, path: str) -> ConfigError:
        """Of a file that a setting names."""
        return cls(
            f"cannot be read: {problem.strerror}",
            field=field,
            value=path,
            remedy="name a file that the user who runs this may read",
        )

    @classmethod
    def unbound(cls, problem: Exception, *, field: str, address: str) -> ConfigError:
        """Of an address at which nothing can listen."""
        return cls(
            f"cannot be bound: {problem}",
            field=field,
            value=address,
            remedy="choose an address of this machine and a free port, or end what listens there",
        )


BY_CODE: dict[int, type[StoreError]] = {
    cls.code.value: cls
    for cls in (
        BadRequest,
        NotFound,
        Conflict,
        Precondition,
        Denied,
        Unauthenticated,
        Exhausted,
        Unsupported,
        Unavailable,
        DeadlineExceeded,
    )
}


def shorten(value: object, *, limit: int = 80) -> str:
    """`value` for an error message: bytes as hex, long texts cut, so that a hostile request cannot flood a log."""
    text = value.hex() if isinstance(value, (bytes, bytearray)) else str(value)
    text = text.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
