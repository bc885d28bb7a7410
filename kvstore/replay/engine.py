"""A serving engine around the replayed core: turns queue for it, its queue is what the scheduler publishes, and the
next turn of a session comes a think time after the answer.

Prompt and answer are saved together when the answer has ended, or the prompt after its prefill where the trace knows
nothing of answers. One prefill runs at a time, and while it runs nobody decodes; the others decode together. A turn
whose KV is being read from SSD holds its place in the batch until it has come. A saturated engine thus has a long
queue, which is what AttentionStore's windows look into (section 3.3).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore.core import events as ev
from kvstore.core.limits import EVICTION
from kvstore.replay.hardware import Cost, Hardware, Model
from kvstore.replay.machine import SCHEDULER, Lookup, Machine, Result
from kvstore.replay.trace import Trace, Turn
from kvstore.types import Hint

TICK_MS = 1_000
SSD_BUSY = 0.9
"""Of a minute: an SSD that works for so much of it has no time left for what comes unevenly."""
BACKLOG_MAX = 16_384
"""Jobs of the queue that are published: those behind them are told as they come nearer."""


@dataclass(slots=True)
class Served:
    """A `Result` and what it meant for the engine. Times count from the end of the warm-up."""

    result: Result
    first_token_s: list[float] = field(default_factory=list, repr=False)
    """Of each turn, from the beginning of its service."""
    hits_foreseen: int = 0
    """Of turns that had waited in the queue, so that the store knew of them,"""
    hits_foreseen_dram: int = 0
    """those that were in DRAM by then."""
    late: list[tuple[int, int, bool]] = field(default_factory=list, repr=False)
    """When turns asked for chunks that were on SSD, for how many, and whether the store knew of them."""
    late_foreseen_busy: int = 0
    """Of the chunks that the store knew of, those that came late in minutes in which the SSD had no time left."""
    queued_s: float = 0.0
    """Mean wait for a place in the batch."""
    gpu_s: float = 0.0
    """That the GPUs prefilled or decoded."""
    prefill_s: float = 0.0
    hours: float = 0.0
    """From the first turn to the end of the last."""
    bytes_loaded: int = 0
    """From DRAM to GPUs."""
    cost: Cost = field(default_factory=Cost)
    """Of the GPUs while they worked, and of the storage for as long."""
    order: list[int] = field(default_factory=list, repr=False)
    """Numbers of the turns in the order in which they were served,"""
    served_at_ms: list[int] = field(default_factory=list, repr=False)
    """when,"""
    backlog: list[int] = field(default_factory=list, repr=False)
    """and how many waited behind each."""

    @property
    def first_token_mean_s(self) -> float:
        return sum(self.first_token_s) / len(self.first_token_s) if self.first_token_s else 0.0

    def first_token_percentile_s(self, share: float) -> float:
        if not self.first_token_s:
            return 0.0
        return sorted(self.first_token_s)[
            min(len(self.first_token_s) - 1, int(share * len(self.first_token_s)))
        ]

    def as_served(self, trace: Trace) -> Trace:
        """The trace in the order and at the times of service: what every policy can be asked about."""
        turns = []
        for number, at_ms in zip(self.order, self.served_at_ms, strict=True):
            turn = trace.turns[number]
            turns.append(
                Turn(
                    at_ms,
                    turn.chunks,
                    turn.input_tokens,
                    turn.output_tokens,
                    turn.answer,
                    turn.session,
                    turn.number,
                    turn.history,
                )
            )
        return Trace(trace.name, trace.chunk_tokens, turns)


@dataclass(slots=True)
class Job:
    number: int
    turn: Turn
    arrived: float
    began: float = 0.0
    lookup: Lookup | None = None


def serve(
    trace: Trace,
    model: Model,
    *,
    hardware: Hardware | None = None,
    dram_bytes: float = 128e9,
    ssd_bytes: float = 0.0,
    hbm_bytes: float = 0.0,
    policy: str = EVICTION,
    warm_up: int = 0,
    store: bool = True,
    **limits: Any,
) -> Served:
    """Serve `trace` with a model and a store of this size; without `store` the engine has its
    own prefix cache alone."""
    hardware = hardware or Hardware()
    chunk_bytes = model.kv_bytes_per_token * trace.chunk_tokens
    machine = Machine(
        trace,
        dram_chunks=max(1, int(dram_bytes // chunk_bytes)),
        ssd_chunks=int(ssd_bytes // chunk_bytes),
        hbm_chunks=int(hbm_bytes // chunk_bytes),
        policy=policy,
        chunk_bytes=chunk_bytes,
        ssd_bytes_per_s=hardware.ssd_bytes_per_s,
        ssd_latency_ms=hardware.ssd_latency_ms,
        tick_ms=TICK_MS,
        **limits,
    )
    served = Engine(machine, model, hardware, store=store).run(warm_up)
    stored = (dram_bytes, ssd_bytes) if store else (0.0, 0.0)
    served.cost = hardware.cost(model, served.gpu_s / 3600, *stored)
    return served


class Engine:
    def __init__(self, machine: Machine, model: Model, hardware: Hardware, *, store: bool) -> None:
        self.machine = machine
        self.model = model
        self.hardware = hardware
        self.store = store
        self.served = Served(machine.result)
        self.queue: deque[Job] = deque()
        self.loading: list[Job] = []
        self.ready: deque[Job] = deque()
        self.decoding: list[tuple[float, int, Job]] = []
        """When each ends, by the clock that stands still during prefill."""
        self.decoded_ms = 0.0
        self._arrivals: list[tuple[float, int]] = []
        self._following: dict[int, int] = {}
        """The session's next turn, by number of a turn."""
        self._hints: list[Hint] = []
        self._gone: list[bytes] = []
        self._order = count()
        self._published = 0
        self._first = True
        latest: dict[int, int] = {}
        for number, turn in enumerate(machine.trace.turns):
            before = latest.get(turn.session) if turn.session >= 0 else None
            if before is not None:
                self._following[before] = number
            else:
                self._arrivals.append((float(turn.at_ms), number))
            latest[turn.session] = number
        heapq.heapify(self._arrivals)

    # ------------------------------------------------------------------------------------------------------- running

    def run(self, warm_up: int) -> Served:
        served, machine = self.served, self.machine
        self.counted_from = warm_up
        before = machine.bytes_read, machine.bytes_written
        started = 0.0
        while self._arrivals or self.queue or self.loading or self.ready or self.decoding:
            self._admit()
            if len(served.order) < warm_up:
                before = machine.bytes_read, machine.bytes_written
                started = machine.now
            if self.ready:
                self._prefill(self.ready.popleft())
            else:
                self._wait()
        served.hours = (machine.now - started) / 3_600_000
        served.late_foreseen_busy = sum(
            chunks for at, chunks, foreseen in served.late if foreseen and machine.disk.busy(at) >= SSD_BUSY
        )
        served.result.ssd_bytes_read = machine.bytes_read - before[0]
        served.result.ssd_bytes_written = machine.bytes_written - before[1]
        served.result.counters = dict(machine.store.state.counters)
        served.queued_s /= max(1, served.result.turns)
        return served

    def _wait(self) -> None:
        """Until the next arrival, answer or end of a read; the batch decodes meanwhile."""
        machine = self.machine
        until = math.inf
        if self._arrivals and len(self.loading) + len(self.decoding) < self.hardware.batch:
            until = self._arrivals[0][0]
        if self.decoding:
            until = min(until, machine.now + self.decoding[0][0] - self.decoded_ms)
        if self.loading:
            until = min(until, machine.next_end)
        if until == math.inf:
            until = self._arrivals[0][0]
        self._pass(max(0.0, until - machine.now), decode=True)

    def _pass(self, span_ms: float, *, decode: bool) -> None:
        machine = self.machine
        until = machine.now + span_ms
        if decode and self.decoding:
            self._gpu(span_ms)
            self.decoded_ms += span_ms
        while self._arrivals and self._arrivals[0][0] <= until:
            at, number = heapq.heappop(self._arrivals)
            machine.advance(max(machine.now, at))
            self._arrive(number)
        machine.advance(until)
        self._loaded()
        while self.decoding and self.decoding[0][0] <= self.decoded_ms + 1e-6:
            self._answer(heapq.heappop(self.decoding)[2])

    def _gpu(self, span_ms: float) -> None:
        if len(self.served.order) > self.counted_from:
            self.served.gpu_s += span_ms / 1000

    # --------------------------------------------------------------------------------------------------- one job's way

    def _arrive(self, number: int) -> None:
        job = Job(number, self.machine.trace.turns[number], self.machine.now)
        self.queue.append(job)
        if (
            len(self.queue) <= self.hardware.batch
        ):  # else it is told with the next that leaves the queue: soon enough
            self._publish()

    def _publish(self) -> None:
        """What came into the published part of the queue, and what left it."""
        if not self.store:
            return
        machine = self.machine
        while self._published < min(len(self.queue), BACKLOG_MAX):
            job = self.queue[self._published]
            keys = machine.keys_of(job.turn)
            self._hints.append(Hint(_name(job), next(self._order), keys=keys))
            self._published += 1
        if self._hints or self._gone:
            machine.apply(
                ev.PublishQueue(
                    ev.Ticket(SCHEDULER),
                    machine.namespace,
                    tuple(self._hints),
                    tuple(self._gone),
                    snapshot=self._first,
                )
            )
            self._first = False
            self._hints.clear()
            self._gone.clear()

    def _admit(self) -> None:
        machine = self.machine
        while self.queue and len(self.loading) + len(self.ready) + len(self.decoding) < self.hardware.batch:
            job = self.queue.popleft()
            if self._published:
                self._published -= 1
                self._gone.append(_name(job))
            self._publish()
            job.began = machine.now
            self.served.order.append(job.number)
            self.served.served_at_ms.append(int(machine.now))
            self.served.backlog.append(len(self.queue))
            if self.store:
                job.lookup = machine.look_up(job.turn)
            else:
                in_hbm = machine.hbm.leading(job.turn.chunks)
                job.lookup = Lookup((), in_hbm, served=in_hbm)
            self.loading.append(job)
            self._loaded()

    def _loaded(self) -> None:
        """Jobs all of whose reads have ended."""
        settled = self.machine.settled
        for job in list(self.loading):
            assert job.lookup is not None
            job.lookup.missing -= settled
            if not job.lookup.missing:
                self.loading.remove(job)
                if self.store:
                    self.machine.settle(job.lookup)
                self.ready.append(job)
        settled.clear()

    def _prefill(self, job: Job) -> None:
        machine, model, served = self.machine, self.model, self.served
        assert job.lookup is not None
        counted = len(served.order) > self.counted_from
        cached = min(job.lookup.served * machine.trace.chunk_tokens, job.turn.input_tokens - 1)
        compute_s = (job.turn.input_tokens - cached) / model.prefill_tokens_per_s
        from_store = job.lookup.served - job.lookup.in_hbm
        load_s = self.hardware.load_s(model, from_store * machine.trace.chunk_tokens)
        span_s = max(compute_s, load_s)
        self._gpu(span_s * 1000)
        self._pass(span_s * 1000, decode=False)
        if counted:
            served.prefill_s += span_s
            served.bytes_loaded += from_store * machine.chunk_bytes
            served.queued_s += (job.began - job.arrived) / 1000
            served.first_token_s.append((machine.now - job.began) / 1000)
            machine.count(job.turn, job.lookup, machine.now - job.began - span_s * 1000)
            from_ssd = from_store - job.lookup.in_dram
            if from_ssd:
                served.late.append((int(job.began), from_ssd, job.began > job.arrived))
            if job.began > job.arrived:
                served.hits_foreseen += from_store
                served.hits_foreseen_dram += job.lookup.in_dram
        if self.store:
            machine.release(job.lookup)
            if not job.turn.answer:
                machine.save(job.turn, job.lookup)
        ends = self.decoded_ms + job.turn.output_tokens * model.decode_s * 1000
        heapq.heappush(self.decoding, (ends, job.number, job))

    def _answer(self, job: Job) -> None:
        assert job.lookup is not None
        if not self.store:
            self.machine.hbm.use((*job.turn.chunks, *job.turn.answer))
        elif job.turn.answer:
            self.machine.save(job.turn, job.lookup)
        following = self._following.get(job.number)
        if following is not None:
            turn = self.machine.trace.turns[following]
            at = self.machine.now + turn.think_ms if turn.think_ms >= 0 else float(turn.at_ms)
            heapq.heappush(self._arrivals, (max(self.machine.now, at), following))


def _name(job: Job) -> bytes:
    return job.number.to_bytes(8, "little")
