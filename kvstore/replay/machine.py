"""The production core, driven by a trace under a virtual clock: every lookup, save and hint is an event for
`Store.apply`, every effect is performed by a model of the machine around it.

A turn acquires the chunks of its prompt, waits for those that are being read from SSD, releases, and saves what it had
to compute. A hit is a chunk of the leading run that the store served; whatever is behind the first miss is computed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore.core import events as ev
from kvstore.core.limits import Limits
from kvstore.core.store import Store
from kvstore.errors import BadRequest
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.replay.trace import Trace, Turn
from kvstore.types import ChunkKey, DiskResult, Hint, Millis, Outcome, WorkerId

WHOLE_FUTURE = 1 << 60
"""A look-ahead that ends with the trace."""
ENGINE, SCHEDULER = WorkerId(1), WorkerId(2)
TICK_MS, TICK_MS_DRAM = 100, 10_000
"""The clock's steps with an SSD, where ticks try again what found no room, and without one."""
FOREVER_MS = 1 << 40


@dataclass(slots=True)
class Result:
    """What was served. Counts begin after the warm-up; a chunk counts once for each turn that asks for it."""

    trace: str
    policy: str
    dram_chunks: int
    ssd_chunks: int
    look_ahead: int
    turns: int = 0
    chunks: int = 0
    hits_dram: int = 0
    """In DRAM when they were asked for."""
    hits_ssd: int = 0
    """Read from SSD while the turn waited."""
    tokens: int = 0
    """Of all prompts."""
    tokens_hit: int = 0
    returning: int = 0
    """Turns whose session had left something."""
    returning_hit: int = 0
    """Of these, the ones that found all of it."""
    waited_ms: int = 0
    """For reads from SSD, all turns together."""
    ssd_bytes_written: int = 0
    ssd_bytes_read: int = 0
    counters: dict[str, int] = field(default_factory=dict, repr=False)
    """Of the core, the warm-up included."""

    @property
    def hits(self) -> int:
        return self.hits_dram + self.hits_ssd

    @property
    def hit_rate(self) -> float:
        """Of chunks."""
        return self.hits / self.chunks if self.chunks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.tokens_hit / self.tokens if self.tokens else 0.0

    @property
    def session_hit_rate(self) -> float:
        """Of turns whose session had left something (AttentionStore, section 4.2)."""
        return self.returning_hit / self.returning if self.returning else 0.0

    @property
    def dram_share(self) -> float:
        """Of the hits."""
        return self.hits_dram / self.hits if self.hits else 0.0


class Keys(dict[int, ChunkKey]):
    """By number of a chunk."""

    def __missing__(self, number: int) -> ChunkKey:
        key = self[number] = ChunkKey(number.to_bytes(8, "little"))
        return key

    def of(self, chunks: Sequence[int]) -> tuple[ChunkKey, ...]:
        return tuple(map(self.__getitem__, chunks))


def replay(
    trace: Trace,
    *,
    dram_chunks: int,
    ssd_chunks: int = 0,
    look_ahead: int = 0,
    policy: str = "hints",
    warm_up: int = 0,
    chunk_bytes: int = 1 << 20,
    ssd_bytes_per_s: float = math.inf,
    ssd_latency_ms: float = 0.0,
    **limits: Any,
) -> Result:
    """Replay `trace` through a store of this size.

    `look_ahead`: before each turn its job leaves the queue, where so many turns wait behind it. `policy`: a name in
    `core.policies.POLICIES`. `warm_up`: turns that are served, but not counted. `limits`: anything else of
    `core.limits.Limits`. Turns are served one after the other, as fast as they come: what a turn waits for is the SSD.
    Raises BadRequest.
    """
    machine = Machine(
        trace,
        dram_chunks=dram_chunks,
        ssd_chunks=ssd_chunks,
        policy=policy,
        chunk_bytes=chunk_bytes,
        ssd_bytes_per_s=ssd_bytes_per_s,
        ssd_latency_ms=ssd_latency_ms,
        **limits,
    )
    return machine.run(look_ahead=look_ahead, warm_up=warm_up)


class Disk:
    """An SSD that serves one thing at a time, reads before writes that wait."""

    def __init__(self, bytes_per_s: float, latency_ms: float) -> None:
        self._bytes_per_ms = bytes_per_s / 1000
        self._latency_ms = latency_ms
        self._free_at = 0.0

    def ends(self, now: float, size: int) -> float:
        """When an op of so many bytes that is asked for now has ended."""
        start = max(now, self._free_at)
        self._free_at = start + size / self._bytes_per_ms
        return self._free_at + self._latency_ms


class Machine:
    """One store, one engine, one scheduler."""

    def __init__(
        self,
        trace: Trace,
        *,
        dram_chunks: int,
        ssd_chunks: int,
        policy: str,
        chunk_bytes: int,
        ssd_bytes_per_s: float,
        ssd_latency_ms: float,
        **limits: Any,
    ) -> None:
        if dram_chunks < 1:
            raise BadRequest("must be at least 1", field="dram_chunks", value=dram_chunks)
        self.trace = trace
        self.chunk_bytes = chunk_bytes
        settings: dict[str, Any] = {
            "arena_bytes": dram_chunks * chunk_bytes,
            "segment_bytes": dram_chunks * chunk_bytes,
            "slot_alignment": chunk_bytes,
            "eviction": policy,
            "pin_share_max": 1.0,
            "reserve_share_max": 1.0,
            "ahead_slots_max": 0,
            "lease_ttl_ms": FOREVER_MS,
            "lease_ttl_max_ms": FOREVER_MS,
            "hint_ttl_ms": FOREVER_MS,
            "hint_ttl_max_ms": FOREVER_MS,
            "hints_per_worker_max": WHOLE_FUTURE,
            "remembered_answers_max": 0,
            "disk_slab_bytes": ssd_chunks * chunk_bytes,
            "disk_slabs_max": 1 if ssd_chunks else 0,
            "disk_header_bytes": 0,
            "disk_alignment": chunk_bytes,
            "disk_deadline_ms": FOREVER_MS,
        } | limits
        self.store = Store(Limits(**settings))
        self.disk = Disk(ssd_bytes_per_s, ssd_latency_ms)
        self.has_ssd = ssd_chunks > 0
        self.now = 0.0
        self.keys = Keys()
        self.answers: deque[Any] = deque()
        self._pending: list[tuple[float, int, ev.Event]] = []
        """Ends of what is under way: when, a number, and what the core is told."""
        self._order = count()
        self._ticked_at = -math.inf
        self.bytes_read = self.bytes_written = 0
        self.settled: set[ChunkKey] = set()
        self.result = Result(trace.name, policy, dram_chunks, ssd_chunks, 0)
        self._perform(self.store.start())
        for worker, group in ((ENGINE, "engine"), (SCHEDULER, "scheduler")):
            self.apply(ev.WorkerJoined(worker, "replay", group))
        spec = NamespaceSpec(
            "replay", b"replay", "replay", trace.chunk_tokens, (GroupSpec("kv", chunk_bytes),)
        )
        self.ticket = ev.Ticket(ENGINE)
        self.namespace = self.ask(ev.Open(self.ticket, spec)).namespace
        self.advance(0.0)

    # ------------------------------------------------------------------------------------------------ the machine

    def apply(self, event: ev.Event) -> None:
        self._perform(self.store.apply(event, Millis(self.now)))

    def ask(self, event: ev.Event) -> Any:
        self.apply(event)
        assert self.answers, f"not answered at once: {event}"
        answer = self.answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _later(self, at: float, event: ev.Event) -> None:
        heapq.heappush(self._pending, (at, next(self._order), event))

    def _perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Reply():
                    if effect.ticket.worker == ENGINE or isinstance(effect.answer, Exception):
                        self.answers.append(effect.answer)
                case ev.SetGenerations() | ev.AssignSegment() | ev.LeasesRevoked():
                    pass
                case ev.ReadRecords():
                    size = len(effect.records) * self.chunk_bytes
                    self.bytes_read += size
                    results = (DiskResult.OK,) * len(effect.records)
                    self._later(self.disk.ends(self.now, size), ev.DiskDone(effect.op, results))
                case ev.WriteRecords():
                    size = len(effect.records) * self.chunk_bytes
                    self.bytes_written += size
                    results = (DiskResult.OK,) * len(effect.records)
                    self._later(self.disk.ends(self.now, size), ev.DiskDone(effect.op, results))
                case ev.WriteIndex() | ev.ProbeDisk():
                    self._later(self.now, ev.DiskDone(effect.op, (DiskResult.OK,)))
                case ev.CreateSegment():
                    self._later(self.now, ev.SegmentReady(effect.op))
                case ev.CreateSlab():
                    self._later(self.now, ev.SlabReady(effect.op))
                case ev.ChunksSettled():
                    self.settled.update(effect.ready, effect.failed)
                case _:
                    raise AssertionError(f"a replay never asks for this: {effect}")

    def advance(self, until: float) -> None:
        """Time passes, and what is under way ends."""
        while self._pending and self._pending[0][0] <= until:
            at, _, event = heapq.heappop(self._pending)
            self._tick(at)
            self.now = max(self.now, at)
            self.apply(event)
        self._tick(until)
        self.now = max(self.now, until)

    def _tick(self, until: float) -> None:
        """The clock tells the core that time passed; not more often than that could change anything."""
        if until - self._ticked_at >= (TICK_MS if self.has_ssd else TICK_MS_DRAM):
            self._ticked_at = self.now = until
            self.apply(ev.Tick())

    # ---------------------------------------------------------------------------------------------------- a replay

    def run(self, *, look_ahead: int, warm_up: int) -> Result:
        turns = self.trace.turns
        self.result.look_ahead = look_ahead
        published = 0
        before = (0, 0)
        for number, turn in enumerate(turns):
            if number == warm_up:
                before = self.bytes_read, self.bytes_written
            self.advance(max(self.now, turn.at_ms))
            if look_ahead:
                end = min(len(turns), number + 1 + look_ahead)
                self._publish(number, range(max(published, number + 1), end))
                published = end
            self._serve(turn, counted=number >= warm_up)
        result = self.result
        result.ssd_bytes_read = self.bytes_read - before[0]
        result.ssd_bytes_written = self.bytes_written - before[1]
        result.counters = dict(self.store.state.counters)
        return result

    def _publish(self, number: int, new: range) -> None:
        hints = tuple(Hint(_job(n), n, keys=self.keys.of(self.trace.turns[n].chunks)) for n in new)
        removed = (_job(number),) if number else ()
        self.apply(
            ev.PublishQueue(ev.Ticket(SCHEDULER), self.namespace, hints, removed, snapshot=number == 0)
        )

    def _serve(self, turn: Turn, *, counted: bool) -> None:
        keys = self.keys.of(turn.chunks)
        leases = []
        in_dram = served = 0
        began = self.now
        if keys:
            got: ev.Acquired = self.ask(ev.Acquire(self.ticket, self.namespace, keys, wait_ms=FOREVER_MS))
            leases.append(got.lease)
            in_dram = served = _leading(got.outcomes, Outcome.HIT)
            pending = [
                key for key, outcome in zip(keys, got.outcomes, strict=True) if outcome is Outcome.PENDING
            ]
            if pending:
                self._await(set(pending))
                again: ev.Acquired = self.ask(
                    ev.Acquire(self.ticket, self.namespace, tuple(pending), prefix_only=False)
                )
                leases.append(again.lease)
                came = {
                    key
                    for key, outcome in zip(pending, again.outcomes, strict=True)
                    if outcome is Outcome.HIT
                }
                in_dram = served = 0
                for key, outcome in zip(keys, got.outcomes, strict=True):
                    if outcome is not Outcome.HIT and key not in came:
                        break
                    in_dram += outcome is Outcome.HIT
                    served += 1
            self.ask(ev.Release(self.ticket, tuple(lease for lease in leases if lease)))
        self._save(turn, keys, served)
        if counted:
            self._count(turn, in_dram, served, self.now - began)

    def _await(self, pending: set[ChunkKey]) -> None:
        self.settled.clear()
        while not pending <= self.settled:
            assert self._pending, f"{len(pending - self.settled)} chunks never come"
            self.advance(self._pending[0][0])

    def _save(self, turn: Turn, keys: tuple[ChunkKey, ...], served: int) -> None:
        new = keys[served:] + self.keys.of(turn.answer)
        if not new:
            return
        parent = keys[served - 1] if served else ChunkKey(b"")
        got: ev.Reserved = self.ask(ev.Reserve(self.ticket, self.namespace, new, parent))
        if got.reservation:
            checksums = (0,) * len(got.extents)
            self.ask(ev.Commit(self.ticket, got.reservation, checksums=checksums))

    def _count(self, turn: Turn, in_dram: int, served: int, waited_ms: float) -> None:
        result = self.result
        result.turns += 1
        result.chunks += len(turn.chunks)
        result.hits_dram += in_dram
        result.hits_ssd += served - in_dram
        result.tokens += turn.input_tokens
        result.tokens_hit += min(turn.input_tokens, served * self.trace.chunk_tokens)
        result.waited_ms += int(waited_ms)
        if turn.history:
            result.returning += 1
            result.returning_hit += served >= turn.history


def _job(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _leading(outcomes: Sequence[Outcome], outcome: Outcome) -> int:
    for number, found in enumerate(outcomes):
        if found is not outcome:
            return number
    return len(outcomes)
