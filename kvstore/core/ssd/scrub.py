"""The scrubber: goes round all that is stored, at a bounded rate, and finds bytes that changed before somebody asks.

    round:  row 0, 1, 2 ... of the chunk table, then the next round
    SSD     the record is read and held against the index, without a slot of DRAM and without being promoted
    DRAM    only under protection `group`, where workers could have written: the slots are checksummed

One op at a time, and none while the disk has other things to do: a demanded read meets at most one record of the
scrubber's on the disk, and none of its threads. What is corrupt is quarantined and a miss, unless another tier has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, NONE, PROMOTING, STORED, STORING
from kvstore.core.cold_tier import ColdTier
from kvstore.core.pool import Phase
from kvstore.core.ssd.rewrites import check_admin
from kvstore.core.ssd.slabs import long_deadline_ms
from kvstore.core.state import State
from kvstore.core.transfers import Transfers
from kvstore.core.workers import Worker
from kvstore.errors import NotFound
from kvstore.types import (
    ChunkKey,
    DiskResult,
    DiskState,
    Extent,
    Millis,
    OpId,
    Protection,
    Reason,
    Tier,
)

BYTES_PER_OP_MAX = 1 << 20
ROWS_PER_STEP_MAX = 2_000
"""Looked at in one step, so that rows without bytes cost no time at a stretch."""
ASKED_BYTES_PER_S = 64 << 20
"""Rate of a round that was asked for, unless it says otherwise, or the background's is higher."""
ENDED_MAX = 64
"""Rounds that were asked for and have ended, of which it is still told what they found."""
BURST_MS = 250
"""For how long what was not spent of the rate is kept."""


@dataclass(slots=True)
class Round:
    number: int
    asked_for: bool
    bytes_per_s: int
    began_at: Millis
    row: int = 0
    """The next to be looked at."""
    chunks: int = 0
    bytes: int = 0
    corrupt: int = 0
    failed: int = 0
    finished: bool = False


@dataclass(slots=True)
class Looking:
    """A chunk whose records are being read."""

    row: int
    key: ChunkKey
    shards: int
    generation: int
    """Of the copy."""


@dataclass(slots=True)
class Slots:
    """A chunk whose slots in DRAM are being checksummed."""

    row: int
    extents: tuple[Extent, ...]


class Scrubber:
    def __init__(self, state: State, tier: ColdTier, transfers: Transfers) -> None:
        self.state = state
        self._tier = tier
        self._transfers = transfers
        self._round: Round | None = None
        self._finished = 0
        self._ended: OrderedDict[int, Round] = OrderedDict()
        """By number: those that were asked for. Whoever asked looks later, and the next one may have begun by then."""
        self._budget = 0.0
        self._budget_at: Millis = 0
        self._held_back = False
        """It would go on if the disk had nothing else to do."""
        self.op: OpId | None = None
        """Of records, under way."""
        self._looking: list[Looking] = []
        self.audits: dict[OpId, Slots] = {}
        """Of DRAM slots, under way. They are not pinned, which would change the order of eviction: what was freed
        meanwhile shows in its generation."""

    def __repr__(self) -> str:
        return f"Scrub({self._round}, op {self.op})"

    # ------------------------------------------------------------------------------------------------------- asking

    def ask(self, worker: Worker, event: ev.Scrub) -> ev.Scrubbed:
        check_admin(worker, "scrub")
        state = self.state
        now = self._round
        if event.start and now is not None and now.asked_for and not now.finished:
            now.bytes_per_s = max(now.bytes_per_s, event.bytes_per_s)
        elif event.start:
            rate = event.bytes_per_s or max(ASKED_BYTES_PER_S, state.limits.scrub_bytes_per_s)
            self._begin(rate, asked_for=True)
            self._go_on()
        now = self._round
        if not event.round or (now is not None and now.number == event.round):
            return self._answer(now)
        if event.round not in self._ended:
            raise NotFound(
                "is none that was asked for since the daemon was started, or long ago",
                field="round",
                value=event.round,
                remedy="ask for another one",
            )
        return self._answer(self._ended[event.round])

    def _answer(self, now: Round | None) -> ev.Scrubbed:
        state = self.state
        if now is None:
            return ev.Scrubbed(0, False, False, 0, 0, state.chunks.rows_ever, 0, 0, 0, 0, 0, self._finished)
        return ev.Scrubbed(
            round=now.number,
            running=not now.finished,
            asked_for=now.asked_for,
            age_ms=state.now - now.began_at,
            rows=min(now.row, state.chunks.rows_ever),
            rows_in_all=state.chunks.rows_ever,
            chunks=now.chunks,
            bytes=now.bytes,
            corrupt=now.corrupt,
            failed=now.failed,
            bytes_per_s=now.bytes_per_s,
            finished=self._finished,
            waits_for="" if now.finished else self._waits_for(),
        )

    def _begin(self, bytes_per_s: int, *, asked_for: bool) -> None:
        number = self._round.number + 1 if self._round is not None else 1
        self._round = Round(number, asked_for, bytes_per_s, self.state.now)
        self._budget, self._budget_at = 0.0, self.state.now - BURST_MS
        self.state.counters["scrub_rounds"] += 1

    # ------------------------------------------------------------------------------------------------------- stepping

    def tick(self) -> None:
        state, now = self.state, self._round
        rate = state.limits.scrub_bytes_per_s
        anything = state.disk_state is not DiskState.ABSENT or state.limits.protection is Protection.GROUP
        rested = now is None or (now.finished and state.now >= now.began_at + state.limits.scrub_pause_ms)
        if rate and anything and rested:
            self._begin(rate, asked_for=False)
        self._go_on()

    def pump(self) -> None:
        """After every step: what was held back may go on as soon as the disk has nothing to do."""
        if self._held_back:
            self._go_on()

    def _waits_for(self) -> str:
        """Why nothing can be looked at now."""
        state = self.state
        if self.op is not None or self.audits:
            return "what is being read"
        if state.disk_state is DiskState.OFF:
            return "the SSD tier, which is off"
        if self._transfers.busy:
            return "other reads and writes of the disk"
        return ""

    def _go_on(self) -> None:
        now, state = self._round, self.state
        self._held_back = False
        if now is None or now.finished or self.op is not None or self.audits:
            return
        if self._waits_for():
            self._held_back = state.disk_state is not DiskState.OFF
            return
        passed = min(state.now - self._budget_at, BURST_MS)
        self._budget = min(
            self._budget + now.bytes_per_s * passed / 1000, max(1.0, now.bytes_per_s * BURST_MS / 1000)
        )
        self._budget_at = state.now
        in_dram: list[int] = []
        size = 0
        end = min(now.row + ROWS_PER_STEP_MAX, state.chunks.rows_ever)
        while now.row < end and size < min(BYTES_PER_OP_MAX, self._budget):
            row = now.row
            now.row += 1
            size += self._choose(row, in_dram)
        if now.row >= state.chunks.rows_ever and not size:
            now.finished = True
            self._finished = now.number
            if now.asked_for:
                self._ended[now.number] = now
                if len(self._ended) > ENDED_MAX:
                    self._ended.popitem(last=False)
            return
        self._budget -= size
        now.bytes += size
        if self._looking:
            self._read()
        for row in in_dram:
            self._checksum(row)

    def _choose(self, row: int, in_dram: list[int]) -> int:
        """How many bytes of this row are to be looked at."""
        state = self.state
        chunks = state.chunks
        flags = chunks.flags[row]
        if chunks.namespace[row] == NONE or chunks.shard0[row] == NONE or flags & DOOMED:
            return 0
        namespace = state.namespace_of(row)
        found = 0
        if flags & (STORED | STORING | PROMOTING) == STORED:
            generation = self._tier.generation_of(row)
            self._looking.append(Looking(row, chunks.key[row], namespace.shards, generation))
            found += 1
        if state.limits.protection is Protection.GROUP and state.is_hit(row):
            in_dram.append(row)
            found += 1
        assert self._round is not None
        self._round.chunks += found > 0
        return found * namespace.payload_bytes

    def _read(self) -> None:
        state = self.state
        self.op = state.new_op()
        rows = [looking.row for looking in self._looking]
        assert self._round is not None
        rate = self._round.bytes_per_s
        # The edge takes no longer than the rate allows, and may have slots to rewrite before.
        size = sum(state.namespace_of(row).payload_bytes for row in rows)
        self._transfers.scrub_deadline = state.now + long_deadline_ms(state) + 1000 * size // rate
        self._tier.scrub(self.op, rows, rate)

    # ------------------------------------------------------------------------------------------------------- results

    def has_read(self, results: Sequence[DiskResult], whys: Sequence[str]) -> None:
        state = self.state
        now = self._round
        assert now is not None
        looked, self._looking, self.op = self._looking, [], None
        self._transfers.scrub_deadline = None
        at = 0
        for looking in looked:
            mine = slice(at, at + looking.shards)
            at = mine.stop
            if not self._is_same(looking):
                continue  # it left the disk meanwhile, and its slots may be another's
            state.counters["scrub_records"] += looking.shards
            bad = [result for result in results[mine] if result is not DiskResult.OK]
            if DiskResult.REUSED in bad:
                self._reused(looking.row)
            elif DiskResult.CORRUPT in bad:
                first = results[mine].index(DiskResult.CORRUPT)
                now.corrupt += 1
                self._corrupt_on_ssd(looking.row, whys[mine][first] if whys else "")
            elif bad:
                now.failed += len(bad)
                state.counters["scrub_read_errors"] += len(bad)
        self._go_on()

    def _is_same(self, looking: Looking) -> bool:
        """The copy is still that one: a generation is never given twice."""
        chunks = self.state.chunks
        row = looking.row
        if chunks.key[row] != looking.key or chunks.shard0[row] == NONE or not chunks.flags[row] & STORED:
            return False
        return self._tier.generation_of(row) == looking.generation

    def _reused(self, row: int) -> None:
        """It was evicted before the last start, and only the index did not hear of it."""
        state = self.state
        if state.chunks.flags[row] & PROMOTING:
            return
        state.counters["chunks_reused"] += 1
        if state.is_resident(row):
            state.drop_copy(row)
        else:
            state.to_ghost(row, Reason.EVICTED)

    def _corrupt_on_ssd(self, row: int, why: str) -> None:
        state = self.state
        flags = state.chunks.flags[row]
        if flags & PROMOTING:
            return  # the read that is under way finds it too, and has slots to give back
        resident = state.is_resident(row)
        state.found_corrupt(row, Tier.SSD, why, miss=not resident)
        if resident:
            # DRAM has good bytes: they are written once more, elsewhere.
            state.drop_copy(row, quarantine=True)
            if not flags & DOOMED:
                state.store_later(row)
        else:
            state.to_ghost(row, Reason.CORRUPT)

    def _checksum(self, row: int) -> None:
        state = self.state
        sizes = state.namespace_of(row).shard_bytes
        extents = tuple(state.extent(row, shard, size) for shard, size in enumerate(sizes))
        op = state.new_op()
        self.audits[op] = Slots(row, extents)
        state.effects.append(ev.Checksum(op, extents))

    def audited(self, op: OpId, checksums: Sequence[int] | None) -> None:
        """None: it failed, and nothing is known of the bytes; the next round looks at them again."""
        state = self.state
        slots = self.audits.pop(op)
        if checksums is None and self._is_there(
            slots
        ):  # else they went meanwhile, perhaps with their segment
            assert self._round is not None
            self._round.failed += len(slots.extents)
            state.counters["scrub_read_errors"] += len(slots.extents)
        expected = tuple(extent.checksum for extent in slots.extents)
        if checksums is not None and tuple(checksums) != expected and self._is_there(slots):
            assert self._round is not None
            self._round.corrupt += 1
            state.found_corrupt(slots.row, Tier.DRAM, "its bytes do not match their checksum")
            state.doom(slots.row, Reason.CORRUPT)
        if not self.audits:
            self._go_on()

    def _is_there(self, slots: Slots) -> bool:
        """Nobody was given these slots since: a generation moves on before that."""
        state = self.state
        for extent in slots.extents:
            segment = state.pool.by_id.get(extent.segment)
            if segment is None or segment.phase is not Phase.ASSIGNED or extent.cell >= segment.capacity:
                return False
            if (
                segment.generation[extent.cell] != extent.generation
                or segment.owner[extent.cell] != slots.row
            ):
                return False
        return not state.chunks.flags[slots.row] & DOOMED
