"""The production core, driven by a trace under a virtual clock: every lookup, save and hint is an event for
`Store.apply`, every effect is performed by a model of the machine around it.

A turn acquires the chunks of its prompt, waits for those that are being read from SSD, releases, and saves what it had
to compute. A hit is a chunk of the leading run that the store served; whatever is behind the first miss is computed.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore.core import events as ev
from kvstore.core.limits import EVICTION, Limits
from kvstore.core.requests.reads import lookup as lookup_of
from kvstore.core.requests.touches import BEHIND, FOUND, MISSED
from kvstore.core.store import Store
from kvstore.errors import BadRequest
from kvstore.layout import GroupSpec, NamespaceSpec
from kvstore.replay.trace import Trace, Turn
from kvstore.types import ChunkKey, DiskResult, Hint, LeaseId, Millis, Outcome, WorkerId

WHOLE_FUTURE = 1 << 60
"""A look-ahead that ends with the trace."""
ENGINE, SCHEDULER = WorkerId(1), WorkerId(2)
TICK_MS, TICK_MS_DRAM = 100, 10_000
"""The clock's steps with an SSD, where ticks try again what found no room, and without one."""
FOREVER_MS = 1 << 40
MINUTE_MS = 60_000


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
    hits_hbm: int = 0
    """The engine had them itself, and asked the store for what is behind them."""
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
        return self.hits_hbm + self.hits_dram + self.hits_ssd

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
        """Of the store's hits."""
        return self.hits_dram / (self.hits_dram + self.hits_ssd) if self.hits_dram + self.hits_ssd else 0.0


class Keys(dict[int, ChunkKey]):
    """By number of a chunk."""

    def __missing__(self, number: int) -> ChunkKey:
        key = self[number] = ChunkKey(number.to_bytes(8, "little", signed=True))
        return key

    def of(self, chunks: Sequence[int]) -> tuple[ChunkKey, ...]:
        return tuple(map(self.__getitem__, chunks))


@dataclass(slots=True)
class Lookup:
    """What a turn found."""

    keys: tuple[ChunkKey, ...]
    in_hbm: int = 0
    in_dram: int = 0
    served: int = 0
    """Leading chunks that need not be computed."""
    outcomes: tuple[Outcome, ...] = ()
    missing: set[ChunkKey] = field(default_factory=set)
    pending: bool = False
    leases: list[LeaseId] = field(default_factory=list)


class Hbm:
    """The engine's own prefix cache, above the store: least recently used first, ends of chains before beginnings."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._chunks: dict[int, None] = {}

    def leading(self, chunks: Sequence[int]) -> int:
        if not self._chunks:
            return 0
        return next((n for n, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def use(self, chunks: Sequence[int]) -> None:
        if not self._chunks_max:
            return
        for chunk in reversed(chunks):
            self._chunks.pop(chunk, None)
            self._chunks[chunk] = None
        while len(self._chunks) > self._chunks_max:
            del self._chunks[next(iter(self._chunks))]


def replay(
    trace: Trace,
    *,
    dram_chunks: int,
    ssd_chunks: int = 0,
    hbm_chunks: int = 0,
    look_ahead: int | Sequence[int] = 0,
    policy: str = EVICTION,
    warm_up: int = 0,
    whole: bool = False,
    chunk_bytes: int = 1 << 20,
    ssd_bytes_per_s: float = math.inf,
    ssd_latency_ms: float = 0.0,
    touched_ms: float | None = None,
    **limits: Any,
) -> Result:
    """Replay `trace` through a store of this size.

    `look_ahead`: before each turn its job leaves the queue, where so many turns wait behind it; or how many, for
    each turn. `hbm_chunks`: what the engine keeps itself, and does not ask the store for. `policy`: a name in
    `core.policies.POLICIES`. `whole`: the last chunk of a prompt counts as whole, as in published figures.
    `warm_up`: turns that are served, but not counted. `touched_ms`: what is all in DRAM is found without a message;
    the store hears of it so much later, or with the engine's next request (None: it is asked for everything).
    `limits`: anything else of `core.limits.Limits`. Turns are served one after the other, as fast as they come:
    what a turn waits for is the SSD. Raises BadRequest.
    """
    machine = Machine(
        trace,
        dram_chunks=dram_chunks,
        ssd_chunks=ssd_chunks,
        hbm_chunks=hbm_chunks,
        policy=policy,
        whole=whole,
        chunk_bytes=chunk_bytes,
        ssd_bytes_per_s=ssd_bytes_per_s,
        ssd_latency_ms=ssd_latency_ms,
        touched_ms=touched_ms,
        **limits,
    )
    return machine.run(look_ahead=look_ahead, warm_up=warm_up)


class Disk:
    """An SSD that serves one thing after the other, in the order in which it was asked."""

    def __init__(self, bytes_per_s: float, latency_ms: float) -> None:
        self._bytes_per_ms = bytes_per_s / 1000
        self._latency_ms = latency_ms
        self._free_at = 0.0
        self._busy_ms: defaultdict[int, float] = defaultdict(float)
        """By the minute in which an op began."""

    def ends(self, now: float, size: int) -> float:
        """When an op of so many bytes that is asked for now has ended."""
        start = max(now, self._free_at)
        self._free_at = start + size / self._bytes_per_ms
        self._busy_ms[int(start // MINUTE_MS)] += self._free_at - start
        return self._free_at + self._latency_ms

    def busy(self, at: float) -> float:
        """Which share of the minute around this time it worked."""
        return min(1.0, self._busy_ms[int(at // MINUTE_MS)] / MINUTE_MS)


class Machine:
    """One store, one engine, one scheduler."""

    def __init__(
        self,
        trace: Trace,
        *,
        dram_chunks: int,
        ssd_chunks: int,
        hbm_chunks: int = 0,
        tick_ms: float = 0.0,
        policy: str,
        whole: bool = False,
        chunk_bytes: int,
        ssd_bytes_per_s: float,
        ssd_latency_ms: float,
        touched_ms: float | None = None,
        **limits: Any,
    ) -> None:
        if dram_chunks < 1:
            raise BadRequest("must be at least 1", field="dram_chunks", value=dram_chunks)
        self.trace = trace
        self._whole = whole
        self._touched_ms = touched_ms
        self._untold: list[ev.Touched] = []
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
            "durable_within_ms": 60_000,
        } | limits
        self.store = Store(Limits(directory=False, **settings))
        self.disk = Disk(ssd_bytes_per_s, ssd_latency_ms)
        self.hbm = Hbm(hbm_chunks)
        self.now = 0.0
        self.keys = Keys()
        self.answers: deque[Any] = deque()
        self._pending: list[tuple[float, int, ev.Event]] = []
        """Ends of what is under way: when, a number, and what the core is told."""
        self._order = count()
        self._ticked_at = -math.inf
        self._tick_ms = tick_ms or (TICK_MS if ssd_chunks else TICK_MS_DRAM)
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
                case (
                    ev.SetGenerations()
                    | ev.AssignSegment()
                    | ev.LeasesRevoked()
                    | ev.CreateDirectory()
                    | ev.DropDirectory()
                    | ev.CloseDirectory()
                    | ev.OpenDirectory()
                    | ev.Publish()
                    | ev.Unpublish()
                ):
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

    @property
    def next_end(self) -> float:
        """When the next thing that is under way ends."""
        return self._pending[0][0] if self._pending else math.inf

    def advance(self, until: float) -> None:
        """Time passes, and what is under way ends."""
        while self._pending and self._pending[0][0] <= until:
            at, _, event = heapq.heappop(self._pending)
            self._tick(at)
            self.now = max(self.now, at)
            if isinstance(event, ev.Touched):
                self._tell_touched()
            else:
                self.apply(event)
        self._tick(until)
        self.now = max(self.now, until)

    def _tick(self, until: float) -> None:
        """The clock tells the core that time passed; not more often than that could change anything."""
        if until - self._ticked_at >= self._tick_ms:
            self._ticked_at = self.now = until
            self.apply(ev.Tick())

    # ---------------------------------------------------------------------------------------------------- a replay

    def run(self, *, look_ahead: int | Sequence[int], warm_up: int) -> Result:
        turns = self.trace.turns
        self.result.look_ahead = (
            max(look_ahead, default=0) if isinstance(look_ahead, Sequence) else look_ahead
        )
        published = 0
        before = (0, 0)
        for number, turn in enumerate(turns):
            if number == warm_up:
                before = self.bytes_read, self.bytes_written
            self.advance(max(self.now, turn.at_ms))
            ahead = look_ahead[number] if isinstance(look_ahead, Sequence) else look_ahead
            if self.result.look_ahead:
                end = max(published, min(len(turns), number + 1 + ahead))
                self._publish(number, range(max(published, number + 1), end))
                published = end
            self._serve(turn, counted=number >= warm_up)
        result = self.result
        result.ssd_bytes_read = self.bytes_read - before[0]
        result.ssd_bytes_written = self.bytes_written - before[1]
        result.counters = dict(self.store.state.counters)
        return result

    def serve(self, turn: Turn) -> None:
        """One turn, when it comes."""
        self.advance(max(self.now, turn.at_ms))
        self._serve(turn, counted=True)

    def _publish(self, number: int, new: range) -> None:
        hints = tuple(Hint(_job(n), n, keys=self.keys_of(self.trace.turns[n])) for n in new)
        removed = (_job(number),) if number else ()
        self.apply(
            ev.PublishQueue(ev.Ticket(SCHEDULER), self.namespace, hints, removed, snapshot=number == 0)
        )

    def _serve(self, turn: Turn, *, counted: bool) -> None:
        began = self.now
        lookup = self.look_up(turn)
        while lookup.missing:
            assert self._pending, f"{len(lookup.missing)} chunks never come"
            self.advance(self._pending[0][0])
            lookup.missing -= self.settled
        self.settled.clear()
        self.settle(lookup)
        self.release(lookup)
        self.save(turn, lookup)
        if counted:
            self.count(turn, lookup, self.now - began)

    def look_up(self, turn: Turn) -> Lookup:
        """Ask for the turn's chunks behind those that the engine has itself. What is on SSD is read from now on:
        `missing`, until it is in `settled`."""
        lookup = Lookup(self.keys_of(turn), in_hbm=self.hbm.leading(turn.chunks))
        lookup.served = lookup.in_hbm
        asked = lookup.keys[lookup.in_hbm :]
        if not asked:
            return lookup
        if self._touched_ms is not None and (found := self._in_directory(asked)) is not None:
            lookup.outcomes = found
            return lookup
        self._tell_touched()
        got: ev.Acquired = self.ask(ev.Acquire(self.ticket, self.namespace, asked, wait_ms=FOREVER_MS))
        lookup.leases.append(got.lease)
        lookup.outcomes = got.outcomes
        lookup.missing = {
            key for key, outcome in zip(asked, got.outcomes, strict=True) if outcome is Outcome.PENDING
        }
        lookup.pending = bool(lookup.missing)
        return lookup

    def _in_directory(self, asked: tuple[ChunkKey, ...]) -> tuple[Outcome, ...] | None:
        """What a worker sees there, of which the store hears later; None: it has to ask, since some is on SSD."""
        state = self.store.state
        namespace = state.namespaces[self.namespace]
        hits = 0
        for key in asked:
            _, outcome, _ = lookup_of(state, namespace, key)
            if outcome is Outcome.PENDING:
                return None
            if outcome is not Outcome.HIT:
                break
            hits += 1
        found = (bytes((FOUND,)) * hits + bytes((MISSED,))).ljust(len(asked), bytes((BEHIND,)))[: len(asked)]
        touched = ev.Touched(self.ticket, self.namespace, asked, (len(asked),), found)
        self._untold.append(touched)
        self._later(self.now + (self._touched_ms or 0.0), touched)
        return (Outcome.HIT,) * hits + (Outcome.MISS,) * (len(asked) - hits)

    def _tell_touched(self) -> None:
        """All at once, with the engine's next request at the latest."""
        untold, self._untold = self._untold, []
        for touched in untold:
            self.ask(touched)

    def settle(self, lookup: Lookup) -> None:
        """Nothing is missing any more: how much of the prompt is there?"""
        asked = lookup.keys[lookup.in_hbm :]
        came: set[ChunkKey] = set()
        if lookup.pending:
            wanted = tuple(
                key for key, found in zip(asked, lookup.outcomes, strict=True) if found is Outcome.PENDING
            )
            got: ev.Acquired = self.ask(ev.Acquire(self.ticket, self.namespace, wanted, prefix_only=False))
            lookup.leases.append(got.lease)
            came.update(key for key, found in zip(wanted, got.outcomes, strict=True) if found is Outcome.HIT)
        for key, found in zip(asked, lookup.outcomes, strict=False):
            if found is not Outcome.HIT and key not in came:
                break
            lookup.in_dram += found is Outcome.HIT
            lookup.served += 1

    def release(self, lookup: Lookup) -> None:
        leases = tuple(lease for lease in lookup.leases if lease)
        if leases:
            self.ask(ev.Release(self.ticket, leases))
        lookup.leases.clear()

    def save(self, turn: Turn, lookup: Lookup) -> None:
        """What was computed of the prompt, and the answer."""
        self.hbm.use((*turn.chunks, *turn.answer))
        new = lookup.keys[lookup.served :] + self.keys.of(turn.answer)
        if not new:
            return
        self._tell_touched()
        parent = lookup.keys[lookup.served - 1] if lookup.served else ChunkKey(b"")
        got: ev.Reserved = self.ask(
            ev.Reserve(self.ticket, self.namespace, new, parent, token_counts=self._counts(turn, len(new)))
        )
        if got.reservation:
            checksums = (0,) * len(got.extents)
            self.ask(ev.Commit(self.ticket, got.reservation, checksums=checksums))

    def keys_of(self, turn: Turn) -> tuple[ChunkKey, ...]:
        """Of its prompt. A chunk in which so many tokens are is another one than what grows out of it, though a trace
        may call both by one number."""
        keys = self.keys.of(turn.chunks)
        last = self._last_tokens(turn)
        if not keys or last == self.trace.chunk_tokens:
            return keys
        return (*keys[:-1], ChunkKey(keys[-1] + last.to_bytes(4, "little")))

    def _last_tokens(self, turn: Turn) -> int:
        """Of the last chunk of its prompt, as it is saved."""
        return self.trace.chunk_tokens if turn.answer or self._whole else self.trace.last_tokens(turn)

    def _counts(self, turn: Turn, count: int) -> tuple[int, ...]:
        """Tokens of the last `count` chunks; none: all are whole. Behind a tail nothing is saved."""
        full, last = self.trace.chunk_tokens, self._last_tokens(turn)
        return (full,) * (count - 1) + (last,) if last < full else ()

    def count(self, turn: Turn, lookup: Lookup, waited_ms: float) -> None:
        result = self.result
        served = lookup.served
        result.turns += 1
        result.chunks += len(turn.chunks)
        result.hits_hbm += lookup.in_hbm
        result.hits_dram += lookup.in_dram
        result.hits_ssd += served - lookup.in_dram - lookup.in_hbm
        result.tokens += turn.input_tokens
        result.tokens_hit += min(turn.input_tokens, served * self.trace.chunk_tokens)
        result.waited_ms += int(waited_ms)
        if turn.history:
            result.returning += 1
            result.returning_hit += served >= turn.history


def _job(number: int) -> bytes:
    return number.to_bytes(8, "little")
