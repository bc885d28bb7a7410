"""Uses that the store was not asked for: a request found its chunks in its engine's own caches.

Or it found them in the directory, and they are uses like those under a lease (`Touches.looked_up`).

Without them the store sees only what those caches miss, and takes a prefix that every request begins with for one that
nobody uses. A touch moves nothing between tiers, and no answer to anybody else changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import events as ev
from kvstore.core.bulk import batch
from kvstore.core.chunks import DOOMED, LISTED, NONE, PROMOTING, STORED
from kvstore.core.namespaces import Namespace
from kvstore.core.requests.reads import Reads, lookup
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.types import ChunkKey, Outcome, Reason

MISSED, FOUND, BEHIND = range(3)
"""What `Touched.found` says of a key. BEHIND: it was named, and neither counts as a hit nor as a miss."""


class Touches:
    def __init__(self, state: State, reads: Reads) -> None:
        self._state = state
        self._reads = reads

    def touch(self, worker: Worker, event: ev.Touch) -> ev.Done:
        """`count`: chunks whose age was renewed, ghosts included. A chunk that is named twice was used once."""
        state = self._state
        namespace = state.namespace(worker, event.namespace)
        resident: list[int] = []
        cold: list[int] = []
        ghosts: list[int] = []
        for key in dict.fromkeys(event.keys) if not namespace.retired else ():
            row = namespace.index.get(key, NONE)
            if row == NONE:
                continue
            if state.chunks.shard0[row] == NONE:
                ghosts.append(row)
            elif state.is_hit(row):
                resident.append(row)
            elif state.chunks.flags[row] & (STORED | DOOMED) == STORED:
                cold.append(row)
        self._reads.count_use(namespace, resident)
        self._renew_resident(namespace, resident)
        self._renew_cold(namespace, cold)
        self._renew_ghosts(ghosts)
        touched = len(resident) + len(cold) + len(ghosts)
        state.counters["chunks_touched"] += touched
        state.counters["chunks_touched_unknown"] += len(event.keys) - touched
        return ev.Done(touched)

    def looked_up(self, worker: Worker, event: ev.Touched) -> ev.Done:
        """What `Reads.acquire` does to ages and statistics, without pins: the worker found the chunks by itself, and
        may have copied them. `count`: hits that are in DRAM still."""
        state = self._state
        namespace = state.own_namespace(worker, event.namespace)
        used: dict[int, None] = {}
        start = 0
        for count in event.counts:
            end = start + count
            self._note_lookup(namespace, event.keys[start:end], event.found[start:end], used)
            start = end
        rows = list(used)
        if rows:
            self._renew_resident(namespace, rows)
            state.store_used(rows)
            state.drop_transient(rows)
        state.counters["lookups_without_message"] += len(event.counts)
        return ev.Done(len(rows))

    def _note_lookup(
        self, namespace: Namespace, keys: Sequence[ChunkKey], found: bytes, used: dict[int, None]
    ) -> None:
        """One of them. Adds to `used` what it found that is in DRAM still."""
        state = self._state
        rows: list[int] = []
        unknown = 0
        for key, what in zip(keys, found, strict=True):
            if what == BEHIND:
                unknown += key not in namespace.index
                continue
            row, outcome, reason = lookup(state, namespace, key)
            unknown += row == NONE
            if what == MISSED:
                namespace.lookups[Reason.BEING_SAVED if reason is Reason.NONE else reason] += 1
            elif outcome is Outcome.HIT and row not in used:
                used[row] = None
                rows.append(row)
        namespace.lookups[Reason.NONE] += found.count(FOUND)
        if rows:
            self._reads.note_used(namespace, rows, unknown * namespace.spec.chunk_tokens)

    def _renew_resident(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """Those without a pin go to where a lease that ends now would put them."""
        state = self._state
        flags = state.chunks.flags
        listed = [row for row in rows if flags[row] & LISTED]
        if not listed:
            return
        if len(listed) >= state.batch_min:
            state.policy.remove_many(namespace.dram, batch.as_rows(listed))
        else:
            for row in listed:
                state.policy.remove(namespace.dram, row)
        state.policy.add(namespace.dram, listed)

    def _renew_cold(self, namespace: Namespace, rows: Sequence[int]) -> None:
        """On SSD alone. What is being read is in no list; its age counts all the same."""
        state = self._state
        chunks = state.chunks
        self._reads.count_use_of_cold(rows)
        listed = [row for row in rows if chunks.flags[row] & (LISTED | PROMOTING) == LISTED]
        for row in listed:
            state.policy.remove(namespace.ssd, row)
        if listed:
            state.policy.add(namespace.ssd, listed)

    def _renew_ghosts(self, rows: Sequence[int]) -> None:
        """The store would have had a hit, had it kept them: remembered for as long as if they had gone now."""
        state = self._state
        chunks = state.chunks
        for row in reversed(rows):
            state.policy.used_elsewhere(row)
            chunks.used_at[row] = state.now
            if chunks.flags[row] & LISTED:
                chunks.unlink(state.ghosts, row)
                chunks.link_newest(state.ghosts, row)
