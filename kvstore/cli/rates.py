"""What happened between two replies of GetStats: the figures of `kvctl top` and `kvctl stats --watch`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.v1 import stats_pb2

LOOKUPS = re.compile(r"lookups\{namespace=(\d+),reason=(\w+)\}")
HIT = "none"
PENDING = frozenset(("being_saved", "being_moved", "on_ssd"))
"""Reasons of lookups that are neither hit nor miss yet: who waits asks again."""
PER_SECOND = (
    "bytes_saved",
    "chunks_saved",
    "ssd_bytes_read",
    "ssd_bytes_written",
    "chunks_promoted_ahead",
    "chunks_promoted_on_demand",
    "chunks_stored",
    "chunks_demoted",
    "chunks_evicted",
    "chunks_evicted_from_ssd",
    "chunks_corrupt",
)
"""Counters that are shown as rates; an admin's."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Numbers are of the period, `*_per_s` a second. A tail chunk counts as a whole one in tokens and bytes."""

    seconds: float
    since_start: bool
    """The period is all of the daemon's life: there is no earlier reply of this start."""
    lookups: int
    dram_hits: int
    ssd_hits: int
    """Of chunks that had to be read from SSD first."""
    pending: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    """By reason, most frequent first."""
    tokens_reused_per_s: float = 0.0
    """Tokens whose KV was loaded instead of computed."""
    bytes_loaded_per_s: float = 0.0
    counters_per_s: dict[str, float] = field(default_factory=dict)
    promotion_s: float | None = None
    """Until what waits to be promoted is in DRAM, at the rate of the period; None: nothing is promoted in it."""
    arena_s: float | None = None
    """Until all of the arena is ready, likewise."""

    def share(self, number: float) -> float | None:
        """Of all lookups; None without any."""
        return number / self.lookups if self.lookups else None

    @property
    def hits(self) -> int:
        return self.dram_hits + self.ssd_hits

    def as_dict(self) -> dict[str, Any]:
        """For programs; shares are null without lookups."""
        values = asdict(self)
        values["hit_rate"] = self.share(self.hits)
        values["hit_rate_dram"] = self.share(self.dram_hits)
        values["hit_rate_ssd"] = self.share(self.ssd_hits)
        return values


def rates(before: stats_pb2.StatsReply | None, after: stats_pb2.StatsReply) -> Rates:
    """Of the time between two replies of one start of the daemon; since its start where `before` is None or of another
    start. The time is the daemon's own."""
    if before is not None and (before.boot_id != after.boot_id or before.uptime_ms > after.uptime_ms):
        before = None
    old = before if before is not None else stats_pb2.StatsReply()
    seconds = max(after.uptime_ms - old.uptime_ms, 1) / 1000
    rows = {row.namespace_id: row for row in old.namespaces}
    lookups = dram_hits = ssd_hits = 0
    tokens = loaded = 0.0
    for row in after.namespaces:
        was = rows.get(row.namespace_id, stats_pb2.NamespaceStats())
        hits = _grown(was.hits, row.hits)
        from_ssd = min(hits, _grown(was.ssd_hits, row.ssd_hits))
        lookups += _grown(was.lookups, row.lookups)
        dram_hits += hits - from_ssd
        ssd_hits += from_ssd
        tokens += hits * row.chunk_tokens
        loaded += hits * row.chunk_bytes
    reasons = _reasons(old, after)
    counters = {
        name: _grown(old.counters.get(name, 0), after.counters[name]) / seconds
        for name in PER_SECOND
        if name in after.counters
    }
    promoted = counters.get("chunks_promoted_ahead", 0.0) + counters.get("chunks_promoted_on_demand", 0.0)
    promoting = after.gauges.get("chunks_being_promoted", 0.0)
    made = _grown(old.arena.ready_bytes, after.arena.ready_bytes) / seconds
    to_make = after.arena.bytes - after.arena.ready_bytes - after.arena.retiring_bytes
    return Rates(
        seconds=seconds,
        since_start=before is None,
        lookups=lookups,
        dram_hits=dram_hits,
        ssd_hits=ssd_hits,
        pending={reason: count for reason, count in reasons.items() if reason in PENDING},
        misses={reason: count for reason, count in reasons.items() if reason not in PENDING | {HIT}},
        tokens_reused_per_s=tokens / seconds,
        bytes_loaded_per_s=loaded / seconds,
        counters_per_s=counters,
        promotion_s=0.0 if not promoting else promoting / promoted if promoted else None,
        arena_s=0.0 if to_make <= 0 else to_make / made if made else None,
    )


def _reasons(old: stats_pb2.StatsReply, after: stats_pb2.StatsReply) -> dict[str, int]:
    """Lookups by reason, most frequent first."""
    found: Counter[str] = Counter()
    for name, count in after.counters.items():
        if (match := LOOKUPS.fullmatch(name)) is not None:
            found[match[2]] += _grown(old.counters.get(name, 0), count)
    return {reason: count for reason, count in found.most_common() if count}


def _grown(old: int, new: int) -> int:
    return max(0, new - old)
