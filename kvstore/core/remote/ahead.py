"""Chunks that queued jobs need and that are beyond this node: looked up, and brought before their engines ask.

The prefetch window is that of the queue (`requests/plan.py`): the head of it whose chunks fit into a tenant's part of
DRAM. A job's chunks count whole here, as they will when they have come. A job with a due time waits until bringing what
it lacks, by the source's latency and the rate at which it has sent so far, would take the time that is left. What an
Acquire asks for goes before all of it, and half of what may be under way is kept for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.chunks import DOOMED, FETCHING, NONE
from kvstore.core.jobs import Job, Window
from kvstore.core.namespaces import Namespace
from kvstore.core.remote.sessions import SharedSessions
from kvstore.core.remote.sources import Sources
from kvstore.core.state import State
from kvstore.types import ChunkKey, Millis, Reason

LOOK_MS = 100
AGAIN_MS = 1_000
"""A job that lacks something is looked at again after so long, or when a look-up for it may have ended."""
JOBS_MAX = 64
"""Of one tenant, looked at in one step,"""
KEYS_MAX = 4_096
"""with so many keys in all; the rest comes with the next."""


class Ahead:
    def __init__(self, state: State, sources: Sources, sessions: SharedSessions) -> None:
        self.state = state
        self._sources = sources
        self._sessions = sessions
        self._next: Millis = 0
        self._again: dict[int, Millis] = {}
        """By the job's label: when what it lacks is looked up again."""

    def __repr__(self) -> str:
        return f"Ahead({len(self._again)} jobs lack something)"

    def tick(self) -> None:
        state = self.state
        if not self._sources.by_name or not state.policy.uses_ranks or state.now < self._next:
            return
        self._next = state.now + LOOK_MS
        windows = [window for window in state.jobs.windows.values() if not window.is_empty]
        if not windows:
            self._again.clear()
            return
        limits = state.limits
        share = int(limits.arena_bytes * limits.prefetch_share_max / len(windows))
        again: dict[int, Millis] = {}
        for window in windows:
            self._look(window, share, again)
        self._again = again

    def _look(self, window: Window, room: int, again: dict[int, Millis]) -> None:
        state = self.state
        keys_left = KEYS_MAX
        for number in range(min(window.ahead, JOBS_MAX)):
            job = window.job(number)
            namespace = state.namespaces.get(job.namespace)
            if namespace is None or namespace.retired:
                continue
            keys = self._keys(job)
            keys_left -= len(keys)
            room -= len(keys) * job.chunk_bytes
            if room < 0 or keys_left < 0:
                return
            at = self._again.get(job.label, 0)
            if at > state.now:
                again[job.label] = at
                continue
            missing = self._missing(namespace, keys)
            if not missing:
                continue
            under_way = self._sources.ask(namespace, missing, prefix=True)
            first = under_way and job.label not in self._again
            again[job.label] = state.now + (LOOK_MS if first else AGAIN_MS)
            if job.promote_at - self._sources.lead_ms(namespace, missing) <= state.now:
                self._bring(namespace, missing)

    def _keys(self, job: Job) -> Sequence[ChunkKey]:
        """Of a session also what another node went on with, where that is told."""
        state = self.state
        if job.keys:
            return job.keys
        name = (job.namespace, job.session)
        session = state.sessions.by_name.get(name)
        here = [state.chunks.key[row] for row in session.manifest.rows] if session is not None else []
        self._sessions.want(name)
        elsewhere = self._sessions.keys(name)
        return elsewhere if list(elsewhere[: len(here)]) == here else here

    def _missing(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """From the first that is not here and not on its way; what is behind it and here is passed over."""
        return [key for key in keys if self._sources.is_missing(namespace, key)]

    def _bring(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> None:
        """As many as are known to be somewhere, from the first on."""
        chunks = self.state.chunks
        for key in keys:
            row = namespace.index.get(key, NONE)
            if row == NONE or chunks.reason[row] != Reason.ON_REMOTE or chunks.flags[row] & DOOMED:
                return
            if not chunks.flags[row] & FETCHING:
                self.state.counters["remote_chunks_wanted_ahead"] += 1
                self._sources.fetch(row, demanded=False)
