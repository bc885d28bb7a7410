"""What was found out about conversations and cannot be found out again from their tokens: which of them deviate most.

A worker that goes on with a conversation has to know it, or it finds no derived KV (`truncation.py`). It is kept in
this process, and in the store as a chunk of its own under a derived key: magic, count, the numbers. A choice that is
lost costs time only: another one is made, and keys cover which tokens it names.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.keys import derived_key
from kvstore.types import ChunkKey

MAGIC = b"kvs.choice.v1\0\0\0"
HEADER = struct.Struct("<16sQ")
CHOICES_MAX = 4096
"""That a process remembers; the oldest go."""


class Choices(Mapping[bytes, tuple[int, ...]]):
    """By `truncation.Undecided.key`; those that were made or found last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Choices({len(self._known)})"

    def __getitem__(self, key: bytes) -> tuple[int, ...]:
        return self._known[key]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, key: bytes, chosen: Sequence[int]) -> None:
        self._known[key] = tuple(chosen)
        self._known.move_to_end(key)
        while len(self._known) > CHOICES_MAX:
            self._known.popitem(last=False)


def store_key(salt: bytes, key: bytes) -> ChunkKey:
    """Under which the store has it."""
    return derived_key(salt, key, ())


def encode(chosen: Sequence[int], size: int) -> npt.NDArray[np.uint8] | None:
    """`size` bytes; None if it does not fit."""
    numbers = np.asarray(chosen, "<u4").tobytes()
    if HEADER.size + len(numbers) > size:
        return None
    record = HEADER.pack(MAGIC, len(chosen)) + numbers
    return np.frombuffer(record.ljust(size, b"\0"), np.uint8)


def decode(record: npt.NDArray[np.uint8]) -> tuple[int, ...] | None:
    """None for bytes that are no choice."""
    if len(record) < HEADER.size:
        return None
    magic, count = HEADER.unpack_from(record.data)
    if magic != MAGIC or count > (len(record) - HEADER.size) // 4:
        return None
    return tuple(np.frombuffer(record, "<u4", count, HEADER.size).tolist())
