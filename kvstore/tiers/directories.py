"""The directories of all namespaces, in shared memory: written by the loop's thread, handed out to workers.

Each is a memfd, sealed as headers of segments are: nobody can resize it, and nobody but the daemon maps it writable. It
is sparse: a page comes with the first row or bucket in it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore import directory, memory
from kvstore.core.events import CreateDirectory, Publish
from kvstore.errors import NotFound
from kvstore.server.logs import fields
from kvstore.tiers.arena import Arena
from kvstore.types import NamespaceId, SegmentId

log = logging.getLogger(__name__)

BUCKETS_MIN = 64
BUCKETS_AT_FIRST_MAX = 1 << 18
"""16 MiB: what a directory with room for more has at first, unless DRAM alone holds more."""


@dataclass(frozen=True, slots=True)
class _Made:
    writer: directory.Writer
    mapping: memory.SharedMapping
    fd: int
    slot_bytes: tuple[int, ...]


class Directories:
    """All but `descriptor` and `memory_bytes` are called on one thread."""

    def __init__(self, arena: Arena, *, boot_id: bytes) -> None:
        self._arena = arena
        self._boot_id = boot_id
        self._made: dict[NamespaceId, _Made] = {}
        self._beaten_at_ms = 0
        self._lock = threading.Lock()
        """Held to change the table, and to duplicate a descriptor that is in it."""

    def __repr__(self) -> str:
        return (
            f"Directories({len(self._made)}, {sum(made.writer.count for made in self._made.values())} rows)"
        )

    def create(self, effect: CreateDirectory) -> None:
        """Where memory is short there is none, and workers ask the daemon."""
        most = max(BUCKETS_MIN, directory.buckets_for(effect.rows_max))
        first = max(BUCKETS_AT_FIRST_MAX, directory.buckets_for(effect.rows_in_dram))
        size = directory.size_bytes(effect.shards, effect.rows_max, most)
        try:
            fd = memory.create_memfd(f"kvs-directory-{effect.namespace}", size)
            try:
                mapping = memory.map_shared(fd, size, writable=True)
                memory.add_seals(fd, memory.SEALS_READ_ONLY)
            except OSError:
                os.close(fd)
                raise
        except OSError as problem:
            log.error(
                "no directory for a namespace: its workers ask the daemon",
                extra=fields(namespace=effect.namespace, bytes=size, why=str(problem)),
            )
            return
        writer = directory.Writer(
            mapping.array,
            shards=effect.shards,
            rows=effect.rows_max,
            buckets_max=most,
            buckets=min(most, first),
            boot_id=self._boot_id,
            ask_for_others=effect.ask_for_others,
        )
        writer.beat(self._beaten_at_ms)
        with self._lock:
            self._made[effect.namespace] = _Made(writer, mapping, fd, effect.slot_bytes)

    def drop(self, namespace: NamespaceId) -> None:
        """Workers that map it find it closed."""
        with self._lock:
            made = self._made.pop(namespace, None)
        if made is not None:
            made.writer.close(True)
            made.mapping.close()
            os.close(made.fd)

    def close(self, namespace: NamespaceId, closed: bool) -> None:
        made = self._made.get(namespace)
        if made is not None:
            made.writer.close(closed)

    def unpublish(self, namespace: NamespaceId, rows: Sequence[int]) -> None:
        made = self._made.get(namespace)
        if made is not None:
            made.writer.unpublish(rows)

    def publish(self, effect: Publish) -> None:
        """The tags first: a row whose key is there leads to slots that say so, too."""
        made = self._made.get(effect.namespace)
        if made is None:
            return
        state = directory.ON_SSD
        places = np.empty((0, 0), np.uint64)
        if len(effect.extents):
            state = directory.HIT
            places = self._tagged(effect, made.writer.shards)
        made.writer.publish(effect.rows, effect.keys, state, effect.tokens, places)

    def _tagged(self, effect: Publish, shards: int) -> directory.Words:
        tags, places = directory.places_of(effect.keys, effect.extents, shards)
        segment, cell = places[:, ::3] >> np.uint64(32), places[:, ::3] & np.uint64(0xFFFF_FFFF)
        segment, cell = segment.ravel(), cell.ravel().astype(np.intp)
        for number in set(segment.tolist()):
            mine = segment == number
            self._arena.set_tags(SegmentId(number), cell[mine], tags[mine])
        memory.fence()
        return places

    def beat(self, now_ms: int) -> None:
        """The daemon's loop turns: readers may rely on what stands there."""
        self._beaten_at_ms = now_ms
        for made in self._made.values():
            made.writer.beat(now_ms)

    def descriptor(self, namespace: NamespaceId) -> tuple[int, int, tuple[int, ...]]:
        """(a duplicate, which the caller sends and closes; bytes; bytes of a slot of each shard). Raises NotFound,
        OSError."""
        with self._lock:
            made = self._made.get(namespace)
            if made is None:
                raise NotFound("the namespace has no directory", field="namespace_id", value=namespace)
            return os.dup(made.fd), made.mapping.size_bytes, made.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the pages that rows and buckets have touched."""
        with self._lock:
            return sum(512 * os.fstat(made.fd).st_blocks for made in self._made.values())

    def end(self) -> None:
        for namespace in list(self._made):
            self.drop(namespace)
