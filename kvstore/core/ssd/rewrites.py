"""Slots whose bytes went bad return to service: written by the daemon itself, read back, and only then given out again.

A slot on SSD is first left alone until the index names it no more: a power cut must not bring back a row whose record
was overwritten. One op a tier at a time; one that hangs delays others here and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.core import events as ev
from kvstore.core.cold_tier import ColdTier
from kvstore.core.pool import Phase, Segment
from kvstore.core.ssd.quarantine import Entry, Hold
from kvstore.core.state import State
from kvstore.core.workers import Worker
from kvstore.errors import Denied
from kvstore.types import DiskResult, DiskState, Extent, OpId, SegmentId, SlotState, Tier

SLOTS_PER_OP_MAX = 16
BYTES_PER_OP_MAX = 8 << 20


def check_admin(worker: Worker, what: str) -> None:
    if not worker.admin:
        raise Denied(
            "is for admins", field=what, value=worker.tenant, remedy="call as the daemon's own user, or root"
        )


class Rewrites:
    def __init__(self, state: State, tier: ColdTier) -> None:
        self.state = state
        self._tier = tier
        self.ops: dict[OpId, tuple[Tier, list[Entry]]] = {}
        """Under way."""

    def __repr__(self) -> str:
        return f"Rewrites({self.state.quarantine}, {len(self.ops)} ops)"

    def tick(self) -> None:
        busy = {tier for tier, _ in self.ops.values()}
        if Tier.DRAM not in busy and (entries := self._due(Tier.DRAM)):
            self._rewrite_dram(entries)
        if (
            Tier.SSD not in busy
            and self.state.disk_state is DiskState.OK
            and (entries := self._due(Tier.SSD))
        ):
            self._rewrite_ssd(entries)

    def _due(self, tier: Tier) -> list[Entry]:
        state = self.state
        found: list[Entry] = []
        size = 0
        for entry in state.quarantine.entries.values():
            if entry.place[0] is not tier or entry.hold is not Hold.EMPTY or entry.retry_at > state.now:
                continue
            if tier is Tier.SSD and not self._tier.may_rewrite(entry):
                continue
            if found and size + entry.slot_bytes > BYTES_PER_OP_MAX:
                break
            found.append(entry)
            size += entry.slot_bytes
            if len(found) == SLOTS_PER_OP_MAX:
                break
        return found

    def _segment(self, entry: Entry) -> Segment:
        """Neither a segment nor a slab file changes hands while a slot of it is quarantined."""
        tier, number, slot = entry.place
        pool = self.state.pool if tier is Tier.DRAM else self.state.ssd_slots
        segment = pool.by_id[SegmentId(number)]
        assert segment.phase is Phase.ASSIGNED and segment.state[slot] == SlotState.QUARANTINED, (
            entry,
            segment,
        )
        return segment

    def _rewrite_dram(self, entries: list[Entry]) -> None:
        op = self.state.new_op()
        targets = []
        for entry in entries:
            segment, slot = self._segment(entry), entry.place[2]
            size = segment.slot_bytes
            targets.append(Extent(segment.id, slot * size, size, slot, segment.generation[slot]))
        self.ops[op] = (Tier.DRAM, entries)
        self.state.effects.append(ev.RewriteSlots(op, tuple(targets)))

    def _rewrite_ssd(self, entries: list[Entry]) -> None:
        op = self.state.new_op()
        self.ops[op] = (Tier.SSD, entries)
        self._tier.rewrite(op, entries)

    def rewritten_dram(self, op: OpId, kept: Sequence[int] | None) -> None:
        """None: the op failed, and nothing is known of its slots; they are tried again later."""
        self._ended(op, None if kept is None else [bool(one) for one in kept])

    def rewritten_ssd(self, op: OpId, results: Sequence[DiskResult]) -> None:
        """A slot that cannot be written or read now may be so later; one that holds other bytes is bad."""
        if any(result in (DiskResult.IO_ERROR, DiskResult.NO_SPACE) for result in results):
            self._ended(op, None)
        else:
            self._ended(op, [result is DiskResult.OK for result in results])

    def _ended(self, op: OpId, kept: Sequence[bool] | None) -> None:
        state = self.state
        tier, entries = self.ops.pop(op)
        for number, entry in enumerate(entries):
            if kept is None:
                entry.retry_at = state.now + state.limits.quarantine_ms
            elif kept[number]:
                state.quarantine.returned(entry.place)
                state.counters["slots_returned"] += 1
                if tier is Tier.DRAM:
                    state.free_slot(self._segment(entry), entry.place[2])
                else:
                    state.ssd_slots.give_back(self._segment(entry), entry.place[2])
            else:
                entry.hold = Hold.BAD
                state.counters["slots_bad"] += 1

    # -------------------------------------------------------------------------------------------------- for operators

    def list(self, worker: Worker, event: ev.ListQuarantine) -> ev.QuarantineList:
        check_admin(worker, "quarantine")
        state = self.state
        entries = state.quarantine.entries
        running = {id(entry) for _, mine in self.ops.values() for entry in mine}
        if event.retry:
            for entry in entries.values():
                if entry.hold is not Hold.LATE and id(entry) not in running:
                    entry.hold = Hold.EMPTY
                    entry.retry_at = state.now
        rows = tuple(
            ev.QuarantinedSlot(
                tier=entry.place[0],
                place=entry.place[1],
                slot=entry.place[2],
                slot_bytes=entry.slot_bytes,
                namespace=entry.namespace,
                key=entry.key,
                reason=entry.reason,
                age_ms=state.now - entry.since,
                next=entry.hold.value,
            )
            for entry in islice(entries.values(), event.limit)
        )
        if event.retry:
            self.tick()
        return ev.QuarantineList(
            rows,
            dram=_quarantined(state.pool.segments),
            ssd=_quarantined(state.ssd_slots.segments),
            returned=state.counters["slots_returned"],
            failed=state.counters["slots_bad"],
        )

    def check_integrity(self) -> None:
        """What is listed is out of service, and what is listed as late or empty is nobody's."""
        for entry in self.state.quarantine.entries.values():
            segment = self._segment(entry)
            assert segment.slot_bytes == entry.slot_bytes, (entry, segment)


def _quarantined(segments: Sequence[Segment]) -> int:
    return sum(s.counts[SlotState.QUARANTINED] for s in segments if s.phase is Phase.ASSIGNED)
