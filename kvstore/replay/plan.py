"""How much DRAM and SSD a workload needs: the curve of hit rate against capacity, CCpUT, and what it costs.

CCpUT is what would keep everything (AttentionStore, section 4.3.5): the most distinct sessions in any unit of time
(DSpUT), times the bytes of a full context (CCpS).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.limits import EVICTION
from kvstore.errors import BadRequest
from kvstore.replay.hardware import Hardware, Model
from kvstore.replay.machine import Result, replay
from kvstore.replay.trace import Trace

Tried = Callable[..., Result]
UNIT_MS = 3_600_000
CURVE_POINTS = 8
DRAM_SHARES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Of the capacity, how much is tried as DRAM."""
WAIT_SHARE_MAX = 0.1
"""Of the prefill that hits spare: so much may reads from SSD take of it, else more DRAM is planned."""


@dataclass(slots=True)
class Point:
    capacity_bytes: int
    hit_rate: float
    """Of tokens."""
    share_of_best: float
    """Of the hit rate of an endless store."""


@dataclass(slots=True)
class Loading:
    """Whether a cached token is loaded faster than it is computed."""

    recompute_s: float
    dram_s: float
    ssd_s: float
    """All for a thousand tokens."""

    @property
    def dram_wins(self) -> bool:
        return self.dram_s < self.recompute_s

    @property
    def ssd_wins(self) -> bool:
        return self.ssd_s < self.recompute_s


@dataclass(slots=True)
class Plan:
    target: float
    best: float
    """Token hit rate of an endless store."""
    reached: bool
    dram_bytes: int
    ssd_bytes: int
    hit_rate: float
    dram_share: float
    sessions_per_hour: int
    """DSpUT."""
    ccput_bytes: int
    cost_per_hour: float
    gpu_saved_per_hour: float
    """What the GPU time that hits spare would have cost."""
    loading: Loading
    curve: list[Point] = field(default_factory=list)

    @property
    def rcc_over_ccput(self) -> float:
        """Required capacity over the capacity that keeps everything."""
        return max(self.dram_bytes, self.ssd_bytes) / self.ccput_bytes if self.ccput_bytes else 0.0


def sessions_per(trace: Trace, unit_ms: int = UNIT_MS) -> int:
    """The most distinct sessions that have a turn within any span of `unit_ms` (DSpUT)."""
    within: Counter[int] = Counter()
    most = first = 0
    for turn in trace.turns:
        if turn.session < 0:
            continue
        within[turn.session] += 1
        while trace.turns[first].at_ms <= turn.at_ms - unit_ms:
            old = trace.turns[first].session
            first += 1
            if old >= 0:
                within[old] -= 1
                if not within[old]:
                    del within[old]
        most = max(most, len(within))
    return most


def footprint(trace: Trace) -> int:
    """Distinct chunks of the whole trace: no store needs more."""
    seen: set[int] = set()
    for turn in trace.turns:
        seen.update(turn.chunks)
        seen.update(turn.answer)
    return len(seen)


def loading(model: Model, hardware: Hardware) -> Loading:
    return Loading(
        1000 / model.prefill_tokens_per_s,
        hardware.load_s(model, 1000),
        max(hardware.load_s(model, 1000), 1000 * model.kv_bytes_per_token / hardware.ssd_bytes_per_s),
    )


def plan(
    trace: Trace,
    model: Model,
    target: float,
    *,
    hardware: Hardware | None = None,
    policy: str = EVICTION,
    look_ahead: int = 0,
    warm_up: int = 0,
    points: int = CURVE_POINTS,
    dram_shares: Sequence[float] = DRAM_SHARES,
) -> Plan:
    """The least storage that serves `target` of the prompts' tokens, as a share of what an endless store would serve.

    First the capacity, by a curve of `points` sizes and a bisection; then the least part of it that has to be DRAM, so
    that waiting for the SSD eats at most a tenth of what hits spare. Raises BadRequest.
    """
    hardware = hardware or Hardware()
    if not 0.0 < target <= 1.0:
        raise BadRequest("must be above 0 and at most 1", field="target", value=target)
    if not trace.turns:
        raise BadRequest("has no turn", field="trace", value=trace.name)
    chunk_bytes = model.kv_bytes_per_token * trace.chunk_tokens
    ends = max(1, footprint(trace))
    longest = max(len(turn.chunks) + len(turn.answer) for turn in trace.turns)

    def tried(dram_chunks: int, ssd_chunks: int = 0) -> Result:
        return replay(
            trace,
            dram_chunks=dram_chunks,
            ssd_chunks=ssd_chunks,
            look_ahead=look_ahead,
            policy=policy,
            warm_up=warm_up,
            chunk_bytes=chunk_bytes,
            ssd_bytes_per_s=hardware.ssd_bytes_per_s,
            ssd_latency_ms=hardware.ssd_latency_ms,
        )

    best = tried(ends).token_hit_rate
    least = min(ends, max(1, longest, ends // 200))
    steps = max(1, points - 1)
    sizes = sorted({min(ends, round(least * (ends / least) ** (n / steps))) for n in range(points)})
    rates = {size: tried(size).token_hit_rate if size < ends else best for size in sizes}
    wanted = target * best
    enough = min((size for size in sizes if rates[size] >= wanted), default=ends)
    below = max((size for size in sizes if size < enough), default=0)
    while below and enough - below > max(1, enough // 20):
        middle = (below + enough) // 2
        rates[middle] = tried(middle).token_hit_rate
        if rates[middle] >= wanted:
            enough = middle
        else:
            below = middle
    hours = max(1.0, trace.turns[-1].at_ms - trace.turns[0].at_ms) / UNIT_MS
    chosen, dram_chunks = _least_dram(model, enough, longest, tried, dram_shares, wanted)
    ssd_chunks = chosen.ssd_chunks
    saved_s = chosen.tokens_hit / model.prefill_tokens_per_s
    cost = hardware.cost(model, 1.0, dram_chunks * chunk_bytes, ssd_chunks * chunk_bytes)
    dspt = sessions_per(trace)
    return Plan(
        target,
        best,
        chosen.token_hit_rate >= wanted * 0.99,
        dram_chunks * chunk_bytes,
        ssd_chunks * chunk_bytes,
        chosen.token_hit_rate,
        chosen.dram_share,
        dspt,
        dspt * model.window * model.kv_bytes_per_token,
        cost.dram + cost.ssd,
        saved_s / 3600 / hours * model.gpus * hardware.gpu_per_hour,
        loading(model, hardware),
        [
            Point(size * chunk_bytes, rates[size], rates[size] / best if best else 0.0)
            for size in sorted(rates)
        ],
    )


def _least_dram(
    model: Model,
    capacity: int,
    longest: int,
    tried: Tried,
    shares: Sequence[float],
    wanted: float,
) -> tuple[Result, int]:
    """The result with the smallest DRAM of those tried that waits little enough for the SSD."""
    for share in shares:
        dram_chunks = min(capacity, max(1, 2 * longest, math.ceil(share * capacity)))
        if dram_chunks >= capacity:
            break
        result = tried(dram_chunks, capacity)
        spared_s = result.tokens_hit / model.prefill_tokens_per_s
        if result.token_hit_rate >= 0.99 * wanted and result.waited_ms / 1000 <= WAIT_SHARE_MAX * spared_s:
            return result, dram_chunks
    return tried(capacity), capacity
