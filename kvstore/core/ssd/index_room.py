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
from kvstore.core.chunks import DOOMED, DURABLE, NONE, PROMOTING, STORED, STORING
from kvstore.core.manifests import Session
from kvstore.core.namespaces import Namespace
from kvstore.core.pool import Phase
from kvstore.core.ssd.durability import ROOM_SHARE, Durability
from kvstore.core.ssd.row_bytes import chunk_bytes, session_bytes
from kvstore.core.ssd.slabs import Slabs
from kvstore.core.state import State
from kvstore.types import NamespaceId

ROUND_SHARE = 16
ROOM_BYTES_MAX = 256 << 10
"""Room that is made at once: one part in ROOM_SHARE of the index, ROOM_BYTES_MAX at most. Each time that it was
not enough, twice as much, because rows that go from pages all over the index leave many a page half full; but never
more than one part in ROUND_SHARE, or the largest row. What gives way is hence little more than what is needed."""
ROWS_PER_STEP_MAX = 4_096
ENTRIES_PER_STEP_MAX = 20_000
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
        usage = self.state.index_usage or ev.IndexUsage(0)
        if self._drop_too_long(refused, usage, end_session):
            return
        chunks = [chunk_bytes(len(record.key), len(record.places)) for record in refused.chunks]
        sessions = [session_bytes(len(record.session), len(record.entries)) for record in refused.sessions]
        # Of the batch an earlier part may be there: the whole does not tell what is lacking.
        least = min(usage.bytes_max // ROOM_SHARE, ROOM_BYTES_MAX)
        most = max(usage.bytes_max // ROUND_SHARE, *chunks, *sessions, 1)
        wanted = min(max(least, 1) << min(durability.full_rounds - 1, ROUND_SHARE), most)
        first, second = self._drop_chunks, partial(self._drop_sessions, end_session)
        if self._sessions_give_way(sum(chunks), sum(sessions)):
            first, second = second, first
        if not (first(wanted) or second(wanted) or durability.deleted_makers):
            durability.has_no_room(
                f"the index is full ({usage.bytes_max} bytes), and nothing can leave it: {REMEDY}"
            )

    def _drop_too_long(
        self, refused: ev.WriteIndex, usage: ev.IndexUsage, end_session: Callable[[Session], None]
    ) -> bool:
        """A session that alone takes more than the share of all sessions does not push out the others: it ends."""
        state = self.state
        most = usage.bytes_max * state.limits.index_sessions_share
        names = [
            (NamespaceId(record.namespace), record.session)
            for record in refused.sessions
            if session_bytes(len(record.session), len(record.entries)) > most
        ]
        found = [session for name in names if (session := state.sessions.by_name.get(name)) is not None]
        for session in found:
            end_session(session)
        state.counters["sessions_dropped_for_index"] += len(found)
        return bool(found)

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
            wanted -= session_bytes(len(session.name), len(session.manifest))
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
        return chunk_bytes(len(self.state.chunks.key[row]), namespace.shards)

    def _stored(self) -> Iterator[int]:
        """Rows that are on SSD and can leave it: what is on SSD only and no queued job needs, what is in DRAM too, and
        what jobs need last. Of those in DRAM first those that the index has, then what was used longest ago."""
        state = self.state
        chunks = state.chunks
        cold = self._slabs.coldest(ROWS_PER_STEP_MAX)
        yield from (row for row in cold if row not in state.policy.rank)
        resident = list(islice(self._stored_in_dram(), ROWS_PER_STEP_MAX))
        yield from sorted(resident, key=lambda row: (not chunks.flags[row] & DURABLE, chunks.used_at[row]))
        yield from (row for row in cold if row in state.policy.rank)

    def _stored_in_dram(self) -> Iterator[int]:
        """Rows in DRAM that are on SSD too, from the slab files that were written longest ago."""
        state = self.state
        slabs = [slab for slab in state.ssd_slots.segments if slab.phase is Phase.ASSIGNED]
        seen: set[int] = set()
        for slab in sorted(slabs, key=lambda slab: slab.touched_at):
            for row in slab.owner:
                if row == NONE or row in seen or not state.is_resident(row):
                    continue
                seen.add(row)
                if state.chunks.flags[row] & (STORED | STORING | PROMOTING | DOOMED) == STORED:
                    yield row


def describe(usage: ev.IndexUsage) -> str:
    """For people: how full the index is, and of what."""
    mib = 1 << 20
    return (
        f"{usage.used / mib:,.1f} of {usage.bytes_max / mib:,.1f} MiB: sessions {usage.sessions / mib:,.1f},"
        f" chunks {usage.chunks / mib:,.1f}, other {usage.other / mib:,.1f}"
    )
