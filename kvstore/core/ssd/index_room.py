"""Room in the index: who gives way when it is full.

What stands in the index has a share each, and a rule:

    sessions            a part of it (`Limits.index_sessions_share`); those that were used longest ago end
    chunks              the rest; those that left DRAM longest ago leave the SSD
    makers' digests     bounded in number; those that no chunk carries go
    namespaces, slabs   bounded in number; they always find room, because the others give way

Sessions and chunks may each use what the other leaves. Only when the index is full does a share count: who has more
than its own gives way, so that neither pushes out all of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, PROMOTING, STORED, STORING
from kvstore.core.manifests import Session
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase
from kvstore.core.ssd.durability import Durability
from kvstore.core.ssd.slabs import Slabs
from kvstore.core.state import State

ROOM_SHARE = 64
ROOM_BYTES_MAX = 256 << 10
"""Room that is made at once: one part in so many of the index, but no more than this, or twice what found none. Each
time that it was not enough, twice as much: rows that go from pages all over the index leave many a page half full."""
ROUNDS_MAX = 12
ROWS_PER_STEP_MAX = 4_096
ENTRIES_PER_STEP_MAX = 20_000
ROW_BYTES = 64
"""Of a row beside its key, its shards and its entries, about."""
SHARD_BYTES = 24
ENTRY_BYTES = 40
NEARLY_FULL = 0.8
"""Of what may be in use: worth telling an operator."""
REMEDY = "raise ssd_index_bytes; or lower session_ttl_ms, so that sessions end sooner"


class IndexRoom:
    def __init__(self, state: State, durability: Durability, slabs: Slabs) -> None:
        self.state = state
        self._durability = durability
        self._slabs = slabs

    def pump(self, end_session: Callable[[Session], None]) -> None:
        """After every step: make room, if something found none."""
        durability = self._durability
        refused = durability.wants_room
        if refused is None:
            return
        durability.wants_room = None
        durability.forget_makers()
        chunks = sum(ROW_BYTES + len(r.key) + SHARD_BYTES * len(r.places) for r in refused.chunks)
        sessions = sum(ROW_BYTES + len(r.session) + ENTRY_BYTES * len(r.entries) for r in refused.sessions)
        rounds = min(durability.full_rounds - 1, ROUNDS_MAX)
        usage = self.state.index_usage
        bytes_max = usage.bytes_max if usage is not None else 0
        wanted = max(2 * (chunks + sessions), min(bytes_max // ROOM_SHARE, ROOM_BYTES_MAX)) << rounds
        first, second = self._drop_chunks, partial(self._drop_sessions, end_session)
        if self._sessions_give_way(chunks, sessions):
            first, second = second, first
        if not (first(wanted) or second(wanted) or durability.deleted_makers):
            durability.has_no_room(
                f"the index is full ({bytes_max} bytes), and nothing can leave it: {REMEDY}"
            )

    def _sessions_give_way(self, chunks: int, sessions: int) -> bool:
        """With so many bytes more of each, have sessions more than their share, and more so than chunks of theirs?"""
        usage = self.state.index_usage
        if usage is None:
            return False
        share = self.state.limits.index_sessions_share
        return (usage.sessions + sessions) * (1 - share) > (usage.chunks + chunks) * share

    def _drop_sessions(self, end_session: Callable[[Session], None], wanted: int) -> bool:
        """End the sessions that were used longest ago, those of them that the index has, or is to have."""
        book = self.state.sessions
        entries = dropped = 0
        while wanted > 0 and book.by_name and dropped < ROWS_PER_STEP_MAX and entries < ENTRIES_PER_STEP_MAX:
            session = book.oldest()
            entries += len(session.manifest)
            wanted -= ROW_BYTES + len(session.name) + ENTRY_BYTES * len(session.manifest)
            dropped += 1
            end_session(session)
        self.state.counters["sessions_dropped_for_index"] += dropped
        return bool(dropped)

    def _drop_chunks(self, wanted: int) -> bool:
        """SSD copies go."""
        state = self.state
        dropped = 0
        for row in list(islice(self._stored(), ROWS_PER_STEP_MAX)):
            if wanted <= 0:
                break
            namespace = state.namespace_of(row)
            wanted -= self._bytes(namespace, row)
            dropped += 1
            state.evict_copy(row)
        state.counters["chunks_dropped_for_index"] += dropped
        return bool(dropped)

    def _bytes(self, namespace: Namespace, row: int) -> int:
        return ROW_BYTES + len(self.state.chunks.key[row]) + SHARD_BYTES * namespace.shards

    def _stored(self) -> Iterator[int]:
        """Rows that are on SSD and can leave it: what is on SSD only and no queued job needs, what is in DRAM too, and
        what jobs need last."""
        state = self.state
        chunks = state.chunks
        cold = self._slabs.coldest(ROWS_PER_STEP_MAX)
        yield from (row for row in cold if row not in state.policy.rank)
        slabs = [slab for slab in state.ssd_slots.segments if slab.phase is Phase.ASSIGNED]
        seen: set[int] = set()
        for slab in sorted(slabs, key=lambda slab: slab.touched_at):
            for row in slab.owner:
                if row == NONE or row in seen or not state.is_resident(row):
                    continue
                seen.add(row)
                if chunks.flags[row] & (STORED | STORING | PROMOTING | DOOMED) == STORED:
                    yield row
        yield from (row for row in cold if row in state.policy.rank)


def describe(usage: ev.IndexUsage) -> str:
    """For people: how full the index is, and of what."""
    mib = 1 << 20
    return (
        f"{usage.used / mib:,.1f} of {usage.bytes_max / mib:,.1f} MiB: sessions {usage.sessions / mib:,.1f},"
        f" chunks {usage.chunks / mib:,.1f}, other {usage.other / mib:,.1f}"
    )
