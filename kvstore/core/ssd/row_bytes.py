"""What a row takes in the index, about: how it is laid out there is no matter of the core's (`tiers/format.py`)."""

from __future__ import annotations

ROW_BYTES = 64
"""Of a row beside its key, its shards and its entries."""
SHARD_BYTES = 24
ENTRY_BYTES = 40
ENTRIES_PER_ROW = 250


def chunk_bytes(key_bytes: int, shards: int) -> int:
    return ROW_BYTES + key_bytes + SHARD_BYTES * shards


def session_bytes(name_bytes: int, entries: int) -> int:
    """A head, and a row for each so many entries; all of them repeat the name."""
    rows = 1 + -(-entries // ENTRIES_PER_ROW)
    return rows * (ROW_BYTES + name_bytes) + ENTRY_BYTES * entries
