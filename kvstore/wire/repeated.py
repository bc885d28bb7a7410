"""Entries of a session as protobuf has them, out of columns. A message object for each takes more than a microsecond,
and a long session has tens of thousands; here all of them pass together through each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.types import SessionEntries
from kvstore.v1 import store_pb2

Numbers = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.intp]

FIELD = store_pb2.SessionReply.DESCRIPTOR.fields_by_name["entries"].number
KEY, FIRST, COUNT, DELTA, APPROXIMATE = (
    store_pb2.SessionEntry.DESCRIPTOR.fields_by_name[name].number
    for name in ("key", "first_token", "token_count", "delta", "approximate")
)
TOGETHER = 2_048
"""Entries whose columns, and what is made of them, stay in the processor's cache."""
VARINT, BYTES = 0, 2
"""Wire types."""


def session_entries(entries: SessionEntries) -> bytes:
    """The field `entries` of a SessionReply, to be merged into one."""
    return b"".join(_together(entries[at : at + TOGETHER]) for at in range(0, len(entries), TOGETHER))


def _together(entries: SessionEntries) -> bytes:
    """Keys have at most 64 bytes, so every entry has its length in one byte."""
    key_bytes = np.fromiter(map(len, entries.keys), np.intp, len(entries))
    key_size = np.where(key_bytes > 0, key_bytes + 2, 0).astype(np.intp)
    delta = np.array(entries.delta, np.int64)
    numbers = {
        FIRST: np.array(entries.first_token, np.uint64),
        COUNT: np.array(entries.token_count, np.uint64),
        DELTA: ((delta << 1) ^ (delta >> 63)).astype(np.uint64),
        APPROXIMATE: np.array(entries.approximate, np.uint64),
    }
    sizes = {field: _size(values) for field, values in numbers.items()}
    size = key_size + sum(sizes.values())
    assert size.max() < 128, size.max()
    end = np.cumsum(size + 2)
    out = np.zeros(int(end[-1]), np.uint8)
    at: Offsets = end - size - 2
    out[at] = _tag(FIELD, BYTES)
    out[at + 1] = size
    at += 2
    _put_keys(out, at, entries.keys, key_bytes)
    at += key_size
    for field, values in numbers.items():
        _put_numbers(out, at, field, values)
        at += sizes[field]
    return out.tobytes()


def _tag(field: int, kind: int) -> int:
    return field << 3 | kind


def _size(values: Numbers) -> Offsets:
    """With the tag; 0 is left out."""
    size = (values > 0).astype(np.intp) * 2
    limit = 1 << 7
    most = int(values.max(initial=0))
    while limit <= most:
        size += values >= limit
        limit <<= 7
    return size


def _put_numbers(out: npt.NDArray[np.uint8], at: Offsets, field: int, values: Numbers) -> None:
    given = values > 0
    at, values = at[given], values[given]
    out[at] = _tag(field, VARINT)
    while len(at):
        at = at + 1
        more = values > 127
        out[at] = (values & 127) | (more.astype(np.uint64) << 7)
        at, values = at[more], values[more] >> np.uint64(7)


def _put_keys(out: npt.NDArray[np.uint8], at: Offsets, keys: list[Any], key_bytes: Offsets) -> None:
    lengths = np.unique(key_bytes).tolist()
    for length in lengths:
        if not length:
            continue
        mine, some = at, keys
        if len(lengths) > 1:
            which = np.flatnonzero(key_bytes == length)
            mine, some = at[which], [keys[number] for number in which.tolist()]
        out[mine] = _tag(KEY, BYTES)
        out[mine + 1] = length
        places = np.lib.stride_tricks.sliding_window_view(out, length, writeable=True)
        places[mine + 2] = np.frombuffer(b"".join(some), np.uint8).reshape(-1, length)
