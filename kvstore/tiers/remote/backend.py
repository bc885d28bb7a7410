"""What `RemoteTier` asks of a kind of store; and what both kinds do alike: judge records, and keep tombstones."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.config import REMOTE_STORE
from kvstore.core.events import ChunkAbout, FetchChunks, FetchedChunk, Heeded, LookUpChunks, StoreChunks
from kvstore.server.logs import fields
from kvstore.tiers.base import SlotMemory
from kvstore.tiers.disk_port import Buffer
from kvstore.tiers.remote import records, tombstones
from kvstore.tiers.remote.encryption import OVERHEAD, Cipher
from kvstore.tiers.remote.tombstones import Forgotten, Journal, Tombstones
from kvstore.types import ChunkKey, DiskResult, Extent, Found

log = logging.getLogger(__name__)

CHECK_BYTES = 1 << 20
"""Checksummed in such pieces: a long call of xxhash's one-shot function would hold the interpreter's lock."""


class StoreProblem(Exception):
    """The store failed, was late, or said something that nobody understands."""


class StoreFull(StoreProblem):
    """It takes nothing more for now; what is there can be read."""


class Stored(Protocol):
    """What became of each key of a StoreChunks."""

    results: Sequence[DiskResult]
    wheres: Sequence[object]


class Backend(Protocol):
    """All calls block, from threads of `RemoteTier`, and raise StoreProblem; none takes longer than its deadline by
    more than a little, or `abandon` ends it."""

    def look_up(self, effect: LookUpChunks, deadline: float) -> Sequence[Found | None]: ...

    def fetch(
        self, effect: FetchChunks, memory: SlotMemory, deadline: float
    ) -> tuple[Sequence[FetchedChunk], int]:
        """What came, and up to which count of forgets it was held against."""

    def store(
        self, effect: StoreChunks, memory: SlotMemory, generation: int, deadline: float
    ) -> Sequence[object]:
        """Where each key is now: `Found.where`. All of them are there. `generation` stands in the records. Raises
        StoreFull."""

    def drop(self, digest: bytes, keys: Sequence[ChunkKey], deadline: float) -> None: ...

    def forget(self, forgotten: Sequence[Forgotten], deadline: float) -> None:
        """Tombstones first, then the records go, as far as they are known."""

    def catch_up(self, deadline: float) -> None:
        """Read what was forgotten since the last time, into the Book."""

    def tidy(self, deadline: float) -> None:
        """Now and then: what dead nodes have left behind goes by its age."""

    def abandon(self) -> None:
        """End the calls of this thread's connections, from another thread."""

    def close(self) -> None: ...


class News(NamedTuple):
    """What nobody here has been told of, and up to where that is all."""

    forgotten: tuple[Forgotten, ...]
    up_to: int
    """By the count of the store."""
    reached: Heeded | None
    """In this node's journal."""
    untold: int = 0
    """Forgets of this node that the store does not know yet, by the journal."""


class Book:
    """The tombstones that this node knows, shared by its threads, and its journal on disk."""

    def __init__(
        self,
        path: str,
        *,
        channel: str = REMOTE_STORE,
        heeded: Heeded | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`path`: of the journal; empty: none, and a restart knows what the store tells it. `heeded`: what the index
        says of this channel. `is_ours`: whether its folder is still this daemon's; if not, nothing is written there."""
        self._path = Path(path) if path else None
        self._channel = channel
        self._is_ours = is_ours
        self.lock = threading.Lock()
        self.journal = Journal()
        self._announced: dict[Forgotten, int] = {}
        """And what is not even in the journal yet, how often. Read by threads that have no lock,"""
        self._announcing = threading.Lock()
        """changed under this one, which nobody holds while he waits for a disk."""
        if self._path is not None:
            with suppress(OSError, UnicodeDecodeError):
                self.journal = tombstones.from_lines(self._path.read_text())
        self.unsaved = ""
        """Why the journal does not hold all of this; empty: it does."""
        # What was read before a crash may not have left the index: it is heeded once more.
        name = self.journal.name
        self._news = self.journal.behind(heeded)
        if self.journal.name != name:
            self._save()

    @property
    def tombstones(self) -> Tombstones:
        return self.journal.tombstones

    @property
    def pending(self) -> dict[Forgotten, None]:
        """What was forgotten here and no store knows yet: refused here all the same."""
        return self.journal.pending

    @property
    def seen(self) -> tuple[int, str]:
        """The highest count that this node has seen, and its head."""
        with self.lock:
            return self.tombstones.count, self.tombstones.head

    def learn(
        self,
        entries: Iterable[tuple[Forgotten, int]],
        count: int,
        head: str,
        *,
        own: bool = False,
        is_other: bool = False,
    ) -> None:
        """`own`: this node has dropped them before it told of them. `is_other`: the store is not the one that it knew,
        and the same count may stand for a forget of after that."""
        with self.lock:
            before = self.tombstones.count, self.tombstones.head, self.tombstones.everything
            for forgotten, at in entries:
                if forgotten == tombstones.EVERYTHING:
                    if self.tombstones.everything < at:
                        self.tombstones.everything = at
                        self._is_new(forgotten)
                    continue
                known = self.tombstones.at.get(forgotten, 0)
                if not own and (known < at or (is_other and known != at)):
                    self._is_new(forgotten)
                elif forgotten not in self.journal.positions:
                    self.journal.note(forgotten)
                self.tombstones.add(forgotten, at)
            if count >= self.tombstones.count:
                self.tombstones.count, self.tombstones.head = count, head
            if before != (self.tombstones.count, self.tombstones.head, self.tombstones.everything):
                self._save()

    def _is_new(self, forgotten: Forgotten) -> None:
        self.journal.note(forgotten)
        self._news.append(forgotten)

    def take_news(self) -> News:
        """What others have forgotten."""
        with self.lock:
            news, self._news = tuple(dict.fromkeys(self._news)), []
            reached = self.journal.reached(self._channel)
            return News(news, self.tombstones.count, reached, len(self.pending))

    def announce(self, forgotten: Iterable[Forgotten]) -> None:
        """Refused from now on; `postpone` follows. Never waits for the disk."""
        with self._announcing:
            for one in forgotten:
                self._announced[one] = self._announced.get(one, 0) + 1

    def postpone(self, forgotten: Sequence[Forgotten]) -> None:
        with self.lock:
            for one in forgotten:
                self.pending[one] = None
                self.journal.note(one)
            self._save()
        with self._announcing:
            for one in forgotten:
                left = self._announced.pop(one, 0) - 1
                if left > 0:
                    self._announced[one] = left

    def told(self, forgotten: Iterable[Forgotten]) -> None:
        with self.lock:
            for one in forgotten:
                self.pending.pop(one, None)
            self._save()

    def save_again(self) -> None:
        """Now and then: there may be room again."""
        if self.unsaved:
            with self.lock:
                self._save()

    def refuses(self, description: records.Description) -> str:
        with self.lock:
            if (self.pending or self._announced) and self._is_pending(description):
                return "it was forgotten, and the store does not know it yet"
            return self.tombstones.refuses(description)

    def _is_pending(self, d: records.Description) -> bool:
        none = ChunkKey(b"")
        about = [(d.namespace, d.key, b""), (d.namespace, none, b""), *((b"", none, m) for m in d.makers)]
        about += tombstones.quarantines_of(d)
        return any(one in self.pending or one in self._announced for one in about)

    def forgotten_at(self, count: int) -> list[tuple[Forgotten, int]]:
        """What was forgotten at this count, and not again since."""
        with self.lock:
            found = [(one, at) for one, at in self.tombstones.at.items() if at == count]
            if self.tombstones.everything == count:
                found.append((tombstones.EVERYTHING, count))
            return found

    def everything(self) -> list[Forgotten]:
        """That is told a store which lost it. EVERYTHING is not: who has not heard of that has a count of before it,
        and a store that leads him on from there."""
        with self.lock:
            return [*self.tombstones.at, *self.pending]

    def _save(self) -> None:
        """Whole and synced, or not at all: a crash in the middle leaves the one before."""
        known = (self.tombstones.at, self.pending, {tombstones.EVERYTHING})
        positions = self.journal.positions
        for one in [one for one in positions if not any(one in each for each in known)]:
            del positions[one]  # no record of before it is left anywhere
        if self._path is None or not self._is_ours():
            return
        new = self._path.with_suffix(".new")
        try:
            with open(new, "w") as file:
                file.write(tombstones.to_lines(self.journal))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as problem:
            unsaved = f"{self._path} cannot be written ({problem.strerror or problem}): a restart loses it"
            if unsaved != self.unsaved:
                log.error("the journal of forgets cannot be written", extra=fields(why=unsaved))
            self.unsaved = unsaved
            with suppress(OSError):
                new.unlink()
        else:
            self.unsaved = ""


def describe(effect: StoreChunks, number: int, shard: int, generation: int) -> records.Description:
    """Of one shard of the chunk with this number."""
    shards = len(effect.sources) // len(effect.keys)
    about: ChunkAbout = effect.about[number]
    extent = effect.sources[number * shards + shard]
    return records.Description(
        effect.digest,
        effect.keys[number],
        shard,
        shards,
        about.token_count,
        about.derived,
        about.makers,
        extent.length,
        extent.checksum,
        generation,
        int(time.time() * 1_000),
    )


def view(memory: SlotMemory, extent: Extent) -> npt.NDArray[np.uint8]:
    return memory.view(extent.segment, extent.offset, extent.length)


def checksum(payload: npt.NDArray[np.uint8]) -> int:
    state = xxhash.xxh3_64()
    for start in range(0, len(payload), CHECK_BYTES):
        state.update(payload[start : start + CHECK_BYTES].data)
    return state.intdigest()


Read = Callable[[int, int], bytes | memoryview | None]
"""The record of (number of the key, shard); None: it is not there."""


def sealed(
    about: records.Description, payload: npt.NDArray[np.uint8], salt: bytes, cipher: Cipher | None
) -> tuple[bytes, Buffer]:
    """Header and body of a record."""
    body: Buffer = payload.data
    if cipher is not None:
        about = replace(about, encrypted=True)
        body = cipher.seal(body, about)
    return records.described(about, body, salt), body


def judge(
    effect: FetchChunks,
    number: int,
    read: Read,
    memory: SlotMemory,
    book: Book,
    salt: bytes,
    cipher: Cipher | None = None,
) -> FetchedChunk:
    """Put the shards of one chunk into their slots, if they are what was asked for. The checksum is that of the slots'
    bytes, after the copy."""
    shards = len(effect.targets) // len(effect.keys)
    key = effect.keys[number]
    checksums: list[int] = []
    makers: dict[bytes, None] = {}
    first: records.Description | None = None
    for shard in range(shards):
        target = effect.targets[number * shards + shard]
        data = read(number, shard)
        if data is None:
            return FetchedChunk(DiskResult.REUSED, why="it is not there any more")
        header = records.read_described(data)
        if isinstance(header, str):
            return FetchedChunk(DiskResult.CORRUPT, why=header)
        d = header.description
        why = records.refusal(
            header, namespace=effect.digest, key=key, shard=shard, shards=shards, length=target.length
        )
        first = first or d
        if not why and (d.token_count, d.derived) != (first.token_count, first.derived):
            why = "its shards are described differently"
        payload = memoryview(data)[header.size :]
        if not why and payload.nbytes != d.length + OVERHEAD * d.encrypted:
            why = "the record is cut short"
        why = why or records.refusal_of_signature(header, payload, salt)
        if not why and d.encrypted:
            if cipher is None or not cipher.has_key_of(payload):
                return FetchedChunk(DiskResult.REUSED, why="it is encrypted with a key that is not here")
            opened = cipher.open(payload, d)
            why = "" if opened is not None else "the record does not open with the key that it names"
            payload = memoryview(opened or b"")
        if not why:
            slot = view(memory, target)
            np.copyto(slot, np.frombuffer(payload, np.uint8))
            if checksum(slot) != d.checksum:
                why = "the record's bytes do not match their checksum"
        if why:
            return FetchedChunk(DiskResult.CORRUPT, why=why)
        if book.refuses(d):
            return FetchedChunk(DiskResult.REUSED, why=book.refuses(d))
        checksums.append(d.checksum)
        makers.update(dict.fromkeys(d.makers))
    assert first is not None, effect
    return FetchedChunk(DiskResult.OK, tuple(checksums), first.token_count, first.derived, tuple(makers))
