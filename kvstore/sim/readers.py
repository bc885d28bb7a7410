"""Directories of the simulator, and readers who copy without a lease, stopped between any two effects.

The daemon's own `Writer` and the workers' own `View` are at work here. After each step the directory says what `lookup`
would (`Directories.check`). Between the effects of a step readers go on, each in three moves that anything may come
between: it looks, it compares and copies, it compares again. Half of them see a torn row, the key of one chunk with the
place of another that the row held before or after, and no sequence tells them: generation and tag alone have to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore import directory
from kvstore.core import events as ev
from kvstore.core.directory import COLD, GONE, HIT
from kvstore.core.requests.reads import lookup
from kvstore.core.store import Store
from kvstore.types import ChunkKey, DiskState, NamespaceId, Outcome, Reason, SegmentId

BOOT = bytes(16)
READERS_MAX = 6
BUCKETS = 4
"""Few, so that they overflow, and grow."""

ORDER: dict[type, int] = {
    ev.CreateDirectory: 0,
    ev.CloseDirectory: 0,
    ev.SetGenerations: 1,
    ev.Unpublish: 2,
    ev.Publish: 3,
    ev.OpenDirectory: 4,
    ev.DropDirectory: 4,
}
"""In which effects of one step have to come; all others behind them."""


@dataclass(slots=True)
class Published:
    writer: directory.Writer
    view: directory.View
    keys: dict[int, ChunkKey] = field(default_factory=dict)
    """By row, the last one."""
    before: dict[int, tuple[list[int], ChunkKey]] = field(default_factory=dict)
    """What a row held when it was last of use before its last change, and of which key."""


@dataclass(slots=True)
class Reader:
    namespace: NamespaceId
    key: ChunkKey
    row: int
    words: list[int]
    torn: bool
    content: list[int] | None = None
    """What it copied: by shard."""


class Directories:
    def __init__(
        self,
        store: Store,
        cells: Mapping[SegmentId, list[int]],
        content: Callable[[SegmentId, int, int], int | None],
        committed: Mapping[tuple[NamespaceId, ChunkKey, int], int],
    ) -> None:
        """`content`: of the slot at this (segment, offset, length), None if damage is to be expected there."""
        self._store = store
        self._cells = cells
        self._content = content
        self._committed = committed
        self.tags: dict[tuple[SegmentId, int], int] = {}
        self.published: dict[NamespaceId, Published] = {}
        self._readers: list[Reader] = []
        self._chance = random.Random(0)
        self.copies = 0
        self.void = 0

    def __repr__(self) -> str:
        return f"Directories({len(self.published)}, {self.copies} copies, {self.void} void)"

    # ------------------------------------------------------------------------------------------------------ effects

    def check_order(self, effects: Sequence[ev.Effect]) -> None:
        ranks = [ORDER.get(type(effect), 5) for effect in effects]
        assert ranks == sorted(ranks), [type(effect).__name__ for effect in effects]

    def perform(self, effect: Any) -> None:
        if isinstance(effect, ev.CreateDirectory):
            most = max(BUCKETS, directory.buckets_for(effect.rows_max))
            size = directory.size_bytes(effect.shards, effect.rows_max, most)
            array = np.zeros(size, np.uint8)
            writer = directory.Writer(
                array,
                shards=effect.shards,
                rows=effect.rows_max,
                buckets_max=most,
                buckets=BUCKETS,
                boot_id=BOOT,
            )
            self.published[effect.namespace] = Published(writer, directory.View(array, BOOT))
            return
        its = self.published[effect.namespace]
        match effect:
            case ev.CloseDirectory():
                its.writer.close(True)
            case ev.OpenDirectory():
                its.writer.close(False)
            case ev.DropDirectory():
                del self.published[effect.namespace]
            case ev.Unpublish():
                self._note_before(its, effect.rows)
                its.writer.unpublish(effect.rows)
            case ev.Publish():
                self._note_before(its, effect.rows)
                places = np.empty((0, 0), np.uint64)
                if len(effect.extents):
                    tags, places = directory.places_of(effect.keys, effect.extents, its.writer.shards)
                    for extent, tag in zip(effect.extents, tags.tolist(), strict=True):
                        assert self._cells[extent.segment][extent.cell] == extent.generation, extent
                        self.tags[extent.segment, extent.cell] = tag
                state = directory.HIT if len(effect.extents) else directory.ON_SSD
                its.writer.publish(effect.rows, effect.keys, state, effect.tokens, places)
                its.keys.update(zip(effect.rows, effect.keys, strict=True))

    def bumped(self, segment: SegmentId, cells: Sequence[int]) -> None:
        for cell in cells:
            self.tags.pop((segment, cell), None)

    def _note_before(self, its: Published, rows: Sequence[int]) -> None:
        for row in rows:
            words, key = its.writer.rows[row].tolist(), its.keys.get(row)
            if key is not None and words[directory.ROW_WORDS + 1] and self._is(key, words[1:5]):
                its.before[row] = (words, key)

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self, changed: Sequence[int]) -> None:
        """The directory says what `lookup` says, of these rows of the chunk table and in number."""
        state = self._store.state
        chunks = state.chunks
        off, recalled = state.disk_state is DiskState.OFF, {tenant for tenant, _ in state.recalling}
        for number, its in self.published.items():
            namespace = state.namespaces[number]
            away = off or not recalled.isdisjoint(("", namespace.tenant))
            closed = away or namespace.retired or namespace.directory_full
            assert its.view.closed == closed, (namespace, closed)
            assert its.writer.count == namespace.visible + namespace.cold, (namespace, its.writer)
        for row in changed:
            if row >= chunks.rows_ever or chunks.namespace[row] < 0:
                continue
            number = NamespaceId(chunks.namespace[row])
            its_own = self.published.get(number)
            if its_own is not None:
                self._check_row(row, its_own, closed=its_own.view.closed)

    def _check_row(self, row: int, its: Published, *, closed: bool) -> None:
        state = self._store.state
        chunks = state.chunks
        key = chunks.key[row]
        namespace = state.namespace_of(row)
        told = state.directory._condition(row)
        if not closed:
            _, outcome, reason = lookup(state, namespace, key)
            said = HIT if outcome is Outcome.HIT else COLD if reason is Reason.ON_SSD else GONE
            assert said == told, (chunks.describe(row), outcome, reason)
        mapped = 0 if len(key) == directory.KEY_BYTES else directory.MAPPED
        short = directory.digest(key) if mapped else key
        at, words = its.view._find(short, directory.hash_of(short), mapped, its.view.buckets_in_use)
        if told == GONE:
            assert at == -1, (chunks.describe(row), at, words)
            return
        assert at == chunks.directory[row], (chunks.describe(row), at)
        assert words[0] & 0xFFFFFF == chunks.tokens[row], (chunks.describe(row), words)
        assert words[0] >> 24 & 0x7F == (directory.HIT if told == HIT else directory.ON_SSD), words
        if told == HIT:
            extents = state.extents(namespace, (row,), range(namespace.shards))
            _, places = directory.places_of((key,), extents, namespace.shards)
            assert words[directory.ROW_WORDS :] == places[0].tolist(), (chunks.describe(row), words, extents)

    # ------------------------------------------------------------------------------------------------------ readers

    def go_on(self) -> None:
        """Between two effects."""
        chance = self._chance
        if self.published and len(self._readers) < READERS_MAX and chance.random() < 0.2:
            self._look()
        if self._readers and chance.random() < 0.5:
            self._move(self._readers[chance.randrange(len(self._readers))])

    def _look(self) -> None:
        chance = self._chance
        number = chance.choice(list(self.published))
        its = self.published[number]
        if not its.keys:
            return
        row = chance.choice(list(its.keys)) if len(its.keys) < 64 else chance.randrange(len(its.keys))
        words = its.writer.rows[row].tolist()
        before = its.before.get(row)
        torn = before is not None and chance.random() < 0.5
        key = its.keys.get(row)
        if torn and before is not None:
            old, old_key = before
            if chance.random() < 0.5:
                words = words[: directory.ROW_WORDS] + old[directory.ROW_WORDS :]
            else:  # the key that the row had before stands beside the place of the one that it has
                words, key = old[: directory.ROW_WORDS] + words[directory.ROW_WORDS :], old_key
        if key is None or words[directory.ROW_WORDS + 1] == 0 or not self._is(key, words[1:5]):
            return
        self._readers.append(Reader(number, key, row, words, torn))

    @staticmethod
    def _is(key: ChunkKey, words: Sequence[int]) -> bool:
        short = key if len(key) == directory.KEY_BYTES else directory.digest(key)
        return bool(directory.words_of((short,))[0].tolist() == list(words))

    def _move(self, reader: Reader) -> None:
        if not self._is_intact(reader):
            self._readers.remove(reader)
            self.void += 1
            return
        if reader.content is None:
            content = []
            for shard, (segment, cell, _) in enumerate(self._places(reader)):
                namespace = self._store.state.namespaces[reader.namespace]
                size = namespace.slot_bytes[shard]
                found = self._content(segment, cell * size, namespace.shard_bytes[shard])
                if found is None:
                    self._readers.remove(reader)
                    return
                content.append(found)
            reader.content = content
            return
        self._readers.remove(reader)
        self.copies += 1
        for shard, found in enumerate(reader.content):
            wanted = self._committed[reader.namespace, reader.key, shard]
            assert found == wanted, f"wrong bytes without a message: {reader}, shard {shard}, {wanted}"

    def _places(self, reader: Reader) -> list[tuple[SegmentId, int, int]]:
        """(segment, cell, generation) by shard."""
        words = reader.words[directory.ROW_WORDS :]
        return [
            (SegmentId(words[at] >> 32), words[at] & 0xFFFFFFFF, words[at + 1])
            for at in range(0, len(words), directory.SHARD_WORDS)
        ]

    def _is_intact(self, reader: Reader) -> bool:
        its = self.published.get(reader.namespace)
        if its is None or reader.namespace not in self._store.state.namespaces:
            return False
        first = its.writer.rows[reader.row, 0]
        if not reader.torn and (its.view.closed or int(first) != reader.words[0]):
            return False
        hashed = directory.hashes_of(np.array([reader.words[1:5]], np.uint64))
        tag = int(directory.tags_of(hashed)[0])
        return all(
            segment in self._cells
            and self._cells[segment][cell] == generation
            and self.tags.get((segment, cell)) == tag
            for segment, cell, generation in self._places(reader)
        )
