"""The world of the simulator: ops take time, requests are deliveries that are answered once each, bits flip.

`DiskWorld` performs effects and checks what no test should have to remember. Here an op begins (its targets hold
garbage from then on), is performed, and is reported to the core at three different times, and the simulation says
when. In between anything else may happen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, QUEUED, STORED
from kvstore.core.ssd.slab_tier import SlabTier
from kvstore.types import (
    ChunkKey,
    DiskPlace,
    DiskResult,
    Extent,
    GrantResult,
    NamespaceId,
    Outcome,
    SegmentId,
    Tier,
    WorkerId,
)

from .disk import DISK_OPS, GARBAGE, TORN, DiskWorld, Written
from .world import CHUNK_TOKENS, PAGE

COPIES = (ev.CopyIn, ev.FillSlots, ev.Checksum, ev.MoveSlots, ev.RewriteSlots)
HISTORY = 30
OPS = (*COPIES, ev.CreateSegment, *DISK_OPS)


class Listener(Protocol):
    """Who drives the cluster."""

    def begun(self, op: Any) -> None:
        """An op is under way, to be performed later."""

    def replied(self, ticket: ev.Ticket, answer: ev.Answer) -> None: ...

    def pushed(self, worker: WorkerId, push: Any) -> None: ...


class Cluster(DiskWorld):
    RECORD_OPS: tuple[type, ...] = (ev.WriteRecords, ev.ReadRecords)
    """What the tier below DRAM writes and reads,"""
    READS: tuple[type, ...] = (ev.ReadRecords,)
    """of these the reads,"""
    GROWING_OPS: tuple[type, ...] = (ev.WriteRecords, ev.CreateSlab, ev.WriteIndex)
    """what takes room there,"""
    PROBES: tuple[type, ...] = (ev.ProbeDisk,)
    """what finds out whether it is well,"""
    FILLING_OPS: tuple[type, ...] = (ev.CopyIn, ev.FillSlots, ev.MoveSlots, ev.ReadRecords)
    """and, of all ops, those that write to DRAM and those of the scrubber."""
    SCRUBS: tuple[type, ...] = (ev.Checksum, ev.ScrubRecords)

    def __init__(self, listener: Listener, chance: random.Random, **limits: Any) -> None:
        self._listener = listener
        self.misdirect_in = 0
        """Counts down to the read that gets another record's bytes."""
        self.events = 0
        """Applied since the beginning, over all restarts."""
        self.history: deque[tuple[int, int, ev.Event]] = deque(maxlen=HISTORY)
        """The last of them, with their numbers and times."""
        self.unanswered: dict[int, ev.Ticket] = {}
        """Deliveries of requests, by channel; each is answered once."""
        self._called_corrupt: set[tuple[int, int]] = set()
        """Places on SSD (slab file, slot) whose record a read did not find as it should be."""
        super().__init__(**limits)
        self.chance = chance

    def _begin(self) -> list[ev.Effect]:
        self.hold = set(OPS)
        self.unmap_at_once = False
        self.unanswered.clear()  # those of before a crash are void
        return super()._begin()

    # ------------------------------------------------------------------------------------------------------ events

    def is_forgotten(self, namespace: NamespaceId, key: ChunkKey) -> bool:
        """Whether a start may drop it, because some node forgot it once."""
        return False

    def step(self, event: ev.Event) -> None:
        """One event, and all that is checked after it."""
        self.history.append((self.events + 1, self.now, event))
        ticket: ev.Ticket | None = getattr(event, "ticket", None)
        if ticket is not None:
            self.unanswered[ticket.channel] = ticket
            self._asked[ticket.worker, ticket.request_id] = event
        super().step(event)

    def refuse(self, op: Any) -> list[ev.Event]:
        """The op does nothing: there are too many of its worker's already."""
        self.held.remove(op)
        return [ev.OpFailed(op.op, "refused")]

    def perform(self, op: Any, *, fails: str = "") -> list[ev.Event]:
        """The op does its work; what it has to report to the core comes back, for later."""
        self.held.remove(op)
        self._perform_op(op, fails=fails)
        reports = list(self._inbox)
        self._inbox.clear()
        return reports

    def _perform_all(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Quarantined):
                self._check_quarantined(effect)
        under_way = len(self.held)
        super()._perform_all(effects)
        for op in self.held[under_way:]:
            filling: Any = op
            if isinstance(op, self.FILLING_OPS):
                for target in filling.targets:
                    self._write(target, GARBAGE, by=None)
            self._listener.begun(op)
        pushes, self.pushes = self.pushes, []
        for push in pushes:
            self._listener.pushed(push.worker, push)
        for effect in effects:
            if isinstance(effect, ev.ForgetWorker):
                self._forget(effect.worker)

    def _forget(self, worker: WorkerId) -> None:
        """Nothing is owed to it; with the last of its group its leases end, and nobody reads under them any more."""
        self.unanswered = {
            channel: ticket for channel, ticket in self.unanswered.items() if ticket.worker != worker
        }
        known = self.store.state.leases.leases
        self.leases = {lease: held for lease, held in self.leases.items() if lease in known}

    def _applied(self, event: ev.Event) -> None:
        self.events += 1
        super()._applied(event)

    def _replied(self, effect: ev.Reply) -> None:
        ticket = effect.ticket
        gone = ticket.worker not in self.store.state.workers
        assert gone or ticket.channel in self.unanswered, f"answered twice: {effect}"
        self.unanswered.pop(ticket.channel, None)
        self.replies.clear()
        first = self.answers.get((ticket.worker, ticket.request_id))
        if effect.answer is first:
            self._listener.replied(
                ticket, effect.answer
            )  # asked again: the same answer, whatever happened since
            return
        if not gone and first is not None:
            self._check_again(self._asked[ticket.worker, ticket.request_id], first, effect.answer)
        super()._replied(effect)
        match effect.answer:
            case ev.Acquired() if effect.answer != first:  # else it was checked when it was given
                self._check_served(effect.ticket, effect.answer)
            case ev.Matched():
                self._check_matched(effect.ticket, effect.answer)
            case ev.Reserved():
                self._check_granted(effect.ticket, effect.answer)
            case ev.Saved():
                granted = effect.answer.results.count(GrantResult.GRANTED)
                assert len(effect.answer.committed) == granted, effect
            case ev.SessionInfo():
                self._check_session(effect.ticket, effect.answer)
        self._listener.replied(ticket, effect.answer)

    # ------------------------------------------------------------------------------------------------------ checks

    def _check_served(self, ticket: ev.Ticket, answer: ev.Acquired) -> None:
        """Hits are of the caller's tenant, whole, of the newest epoch, and nobody doomed them."""
        event = self._asked[ticket.worker, ticket.request_id]
        state = self.store.state
        for key, outcome in zip(event.keys, answer.outcomes, strict=True):
            if outcome is Outcome.HIT:
                namespace = state.namespaces[event.namespace]
                row = namespace.index[key]
                assert namespace.tenant == self.groups[ticket.worker][0] and not namespace.retired, (
                    event,
                    key,
                )
                if (
                    answer.lease in state.leases.leases
                ):  # else it was revoked by what the same event did later
                    assert not state.chunks.flags[row] & DOOMED, state.chunks.describe(row)
                    assert state.chunks.ready[row] == namespace.shards, state.chunks.describe(row)

    def _check_again(self, event: Any, first: Any, answer: ev.Answer) -> None:
        """Of a large answer the core keeps an outline: what it makes of that is the first answer, as far as what it
        spoke of is there."""
        state = self.store.state
        match first:
            case ev.Acquired() if first.lease in state.leases.leases:
                assert answer == first, (event, first, answer)
            case ev.Reserved() if first.reservation in state.reservations:
                assert answer == first, (event, first, answer)
            case ev.SessionInfo() if not isinstance(event, ev.GetSession):
                assert isinstance(answer, ev.SessionInfo), (event, first, answer)
                assert answer.version == first.version, (event, first, answer)
                assert answer.entries_forgotten or answer.entries == first.entries, (event, first, answer)

    def _check_matched(self, ticket: ev.Ticket, answer: ev.Matched) -> None:
        """Invariant 4: the longest usable prefix, and one token at least is left to compute."""
        event = self._asked[ticket.worker, ticket.request_id]
        namespace = self.store.state.namespaces[event.namespace]
        assert namespace.tenant == self.groups[ticket.worker][0], (event, answer)
        rows = [namespace.index.get(key, NONE) for key in event.keys]
        usable, tokens = 0, 0
        for row in rows:
            if row == NONE or namespace.retired or not self.store.state.is_usable(row):
                break
            tokens += self.store.state.chunks.tokens[row]
            if event.token_count and tokens >= event.token_count:
                break
            usable += 1
        assert answer.usable == usable, (event, answer, usable)
        assert not event.token_count or usable * CHUNK_TOKENS < event.token_count, (event, answer)

    def check_queue(
        self, worker: WorkerId, namespace: NamespaceId, number: int, queue: Mapping[bytes, ev.Hint]
    ) -> None:
        """Once a scheduler's message of this number is answered: what is kept is part of what it said."""
        feed = self.store.queue.feeds.get(worker, {}).get(namespace)
        if feed is None or feed.number != number:  # its hints ended meanwhile
            return
        kept = {name: job.position for name, job in feed.jobs.items()}
        said = {name: hint.position for name, hint in queue.items()}
        assert kept.items() <= said.items(), (worker, namespace, number, kept, said)

    def _check_session(self, ticket: ev.Ticket, answer: ev.SessionInfo) -> None:
        """Of each entry it is told whether it can be had: a hole hides none of those behind it."""
        event = self._asked[ticket.worker, ticket.request_id]
        if not isinstance(event, ev.GetSession):
            return  # the same event may have gone on
        state = self.store.state
        session = state.sessions.by_name.get((event.namespace, event.session))
        rows = session.manifest.rows if session is not None else ()
        retired = state.namespaces[event.namespace].retired
        each = [not retired and state.is_usable(row) for row in rows]
        assert answer.usable == [*each, False].index(False), (event, answer, each)
        assert list(answer.usable_beyond) == each[answer.usable :], (event, answer, each)

    def _check_granted(self, ticket: ev.Ticket, answer: ev.Reserved) -> None:
        """Slots of segments that serve the caller's namespace, each granted to nobody else."""
        event = self._asked[ticket.worker, ticket.request_id]
        for extent in answer.extents:
            assert self._owner[extent.segment] == event.namespace, (event, extent)
        if not answer.reservation:
            assert GrantResult.GRANTED not in answer.results, answer

    def at_rest(self) -> None:
        """After healing: nobody waits, nothing is under way, nothing is pinned."""
        state, transfers, saves = self.store.state, self.store.transfers, self.store.saves
        assert not self.unanswered, f"never answered: {list(self.unanswered.values())[:5]}"
        assert not [op for op in self.held if not isinstance(op, self.SCRUBS)], (
            self.held
        )  # they go on for ever
        assert not (
            state.leases.leases or state.reservations or state.waits or state.workers or state.groups
        ), (
            state.leases,
            state.reservations,
            state.waits,
            state.workers,
        )
        assert not any(state.chunks.pins), [row for row, pins in enumerate(state.chunks.pins) if pins]
        assert not (saves.copies or saves.late or self.store.segments.moves or self.store.reads.audits)
        assert not (transfers.writes or transfers.reads or transfers.probe), transfers
        assert not (transfers.demanded or transfers.foreseen), transfers
        assert state.partials.count == 0, state.partials
        quarantined = sum(segment.counts[3] for segment in state.pool.segments)
        assert quarantined <= state.counters["slots_quarantined"], quarantined
        assert sum(segment.counts[1] for segment in state.pool.segments) == 0
        queued = [row for row, flags in enumerate(state.chunks.flags) if flags & QUEUED]
        assert state.disk_full or not queued, queued
        self._tier_at_rest([row for row in self.watch.facts if state.chunks.flags[row] & STORED])

    def _tier_at_rest(self, stored: Sequence[int]) -> None:
        """Nothing of the tier's own is under way, and what it keeps is what these rows say."""
        state, tier = self.store.state, self.store.cold_tier
        assert isinstance(tier, SlabTier)
        durability, slabs = tier.durability, tier.slabs
        assert not (durability.index or slabs.creating or durability.waits), tier
        assert slabs.emptying is None and not slabs.retiring, tier
        assert not (state.dirty_chunks or state.dirty_sessions or durability.deleted_namespaces), tier
        assert not (state.deleted_chunks or state.deleted_sessions or state.cut_sessions), tier
        assert not (durability.gone_waits or durability.wants_room), tier
        chunks = {(state.namespace_of(row).id, state.chunks.key[row]) for row in stored}
        assert chunks == self.platter.chunks.keys(), chunks ^ self.platter.chunks.keys()
        sessions = {name: session.version for name, session in state.sessions.by_name.items()}
        assert sessions == {name: session.version for name, session in self.platter.sessions.items()}

    def _check_quarantined(self, effect: ev.Quarantined) -> None:
        """Corrupt is what was found to be corrupt: an op that failed, was refused or came late says nothing."""
        if effect.tier is Tier.SSD:
            assert not self._called_corrupt.isdisjoint(effect.places), effect
            return
        pages = {
            (SegmentId(number), page)
            for number, slot in effect.places
            for page in self._pages_of_slot(SegmentId(number), slot)
        }
        assert not self.damaged.isdisjoint(pages), f"a good chunk is called corrupt: {effect}"

    def _pages_of_slot(self, number: SegmentId, slot: int) -> range:
        size = self.store.state.pool.by_id[number].slot_bytes
        return range(slot * size // PAGE, (slot + 1) * size // PAGE)

    # ------------------------------------------------------------------------------------------------------ damage

    def flip(self, segment: SegmentId, page: int) -> None:
        """Bits of a page flip, behind everybody's back."""
        self.memory[segment][page] ^= 1 << 40
        self.damaged.add((segment, page))

    def _read(self, extent: Extent) -> int:
        if self.damaged and not self.damaged.isdisjoint(self._pages(extent)):
            return (
                hash(tuple(sorted(self.memory[extent.segment][page] for _, page in self._pages(extent)))) | 1
            )
        return super()._read(extent)

    def _read_record(self, effect: ev.ReadRecords, number: int, result: DiskResult) -> DiskResult:
        return self._noted(effect.sources[number], super()._read_record(effect, number, result))

    def _scrub_record(self, effect: ev.ScrubRecords, number: int, result: DiskResult) -> DiskResult:
        return self._noted(effect.sources[number], super()._scrub_record(effect, number, result))

    def _noted(self, place: DiskPlace, result: DiskResult) -> DiskResult:
        if result is DiskResult.CORRUPT:
            self._called_corrupt.add((int(place.slab), place.slot))
        return result

    def _found_at(self, place: DiskPlace) -> Written:
        found = super()._found_at(place)
        if self.misdirect_in:
            self.misdirect_in -= 1
            if not self.misdirect_in:
                slots = {**self.platter.synced, **self.platter.cached}
                others = [written for written in slots.values() if written is not found]
                return self.chance.choice(others) if others and self.chance else TORN
        return found

    def _put(self, effect: ev.WriteRecords, number: int) -> None:
        super()._put(effect, number)
        if self.is_damaged(
            effect.sources[number]
        ):  # what is written has not the checksum that its record names
            self.platter.rotten.add(effect.targets[number])
