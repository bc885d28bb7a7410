"""What a caller hands to our Python functions, checked before it is used: a wrong type is a BadRequest that names the
argument and its value, where protobuf or numpy would name neither.

Whole numbers may be numpy's; what is listed may be any list, tuple or the like.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterator, KeysView, Sequence, ValuesView
from typing import Any

from kvstore.errors import BadRequest

NUMBER_MAX = (1 << 63) - 1
SIZE_MAX = 1 << 128
"""Whatever is larger is refused by the bound that is told."""
SECONDS_MAX = 1e9
"""Longer is as good as for ever, and more than the system's locks take."""

NOT_SEVERAL = (str, bytes, bytearray, memoryview)
"""Sequences that are one thing."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlist = _repr.maxtuple = 4


def wrong_type(field: str, value: object, wanted: str, remedy: str = "") -> BadRequest:
    """The error: `wanted` completes "must be"."""
    return BadRequest(f"must be {wanted}", field=field, value=shown(value), remedy=remedy)


def shown(value: object) -> str:
    """The value and its type, shortened."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"{_repr.repr(value)} ({name})"


def whole(field: str, value: Any, low: int = 0, high: int = NUMBER_MAX) -> int:
    """A whole number in [low, high], as an int. Raises BadRequest."""
    number: int = value
    if type(value) is not int:
        try:
            number = operator.index(value)
        except TypeError:
            raise wrong_type(field, value, f"a whole number between {low} and {high}") from None
    if not low <= number <= high:
        raise BadRequest(f"must be between {low} and {high}", field=field, value=number)
    return number


def wholes(field: str, values: Any, low: int = 0, high: int = NUMBER_MAX) -> Sequence[int]:
    """Each of them. Raises BadRequest: a wrong type names its place, too."""
    found = listed(field, values, "whole numbers")
    if any(type(value) is not int for value in found):
        found = [whole(f"{field}[{index}]", value, -SIZE_MAX, SIZE_MAX) for index, value in enumerate(found)]
    for value in found:
        whole(field, value, low, high)
    return found


def seconds(field: str, value: Any) -> float:
    """A time, 0 or longer. Raises BadRequest."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise wrong_type(field, value, "a number of seconds")
    if number < 0:
        raise BadRequest("must not be negative", field=field, value=value)
    return min(number, SECONDS_MAX)


def text(field: str, value: Any) -> str:
    """A str that UTF-8 can hold. Raises BadRequest."""
    if not isinstance(value, str):
        decode = "decode it" if isinstance(value, bytes) else ""
        raise wrong_type(field, value, "a str", decode)
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise BadRequest(f"is no text: {problem.reason}", field=field, value=value) from None
    return value


def binary(field: str, value: Any) -> bytes:
    """Raises BadRequest."""
    if not isinstance(value, bytes):
        encode = "encode it" if isinstance(value, str) else ""
        raise wrong_type(field, value, "bytes", encode)
    return value


def flag(field: str, value: Any) -> bool:
    """True or False, numpy's too. Raises BadRequest."""
    if value is True or value is False:
        return bool(value)
    if type(value).__name__ not in ("bool", "bool_"):
        raise wrong_type(field, value, "True or False")
    return bool(value)


def listed(field: str, values: Any, what: str) -> Sequence[Any]:
    """A list or tuple as it is; any other sequence, a view of a dict's keys or values, and a row of an array as a list.
    `what` they are. Raises BadRequest for everything else: None, one thing, text, bytes, and what has no order."""
    if isinstance(values, (list, tuple)):
        return values
    if isinstance(values, (Sequence, KeysView, ValuesView)) and not isinstance(values, NOT_SEVERAL):
        return list(values)
    if hasattr(values, "tolist") and getattr(values, "ndim", 0) == 1:
        found: list[Any] = values.tolist()
        return found
    raise wrong_type(field, values, f"a list or tuple of {what}")


def one_of(field: str, value: Any, kind: type[Any], remedy: str = "") -> None:
    """Raises BadRequest unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise wrong_type(field, value, f"a {kind.__name__}", remedy)


def rows_of(field: str, pieces: Any, what: str, length: int) -> Sequence[Any]:
    """Pieces of so many parts, in a list or tuple; an iterator is read to its end. Raises BadRequest."""
    found = list(pieces) if isinstance(pieces, Iterator) else listed(field, pieces, what)
    for index, piece in enumerate(found):
        if not isinstance(piece, (tuple, list)) or len(piece) != length:
            raise wrong_type(f"{field}[{index}]", piece, what)
    return found
