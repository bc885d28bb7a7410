"""`kvctl top`: what the daemon does now, in place on a terminal of 80 columns; elsewhere a frame a tick.

Each figure stands twice: of the last tick, and since the daemon's start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from kvstore.cli.command import Command, ask_stats, number, seconds
from kvstore.cli.output import say, say_json
from kvstore.cli.rates import Rates, rates
from kvstore.cli.tables import age, count, peer_text, share, size
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.v1 import stats_pb2

INTERVAL_S = 1.0
COLUMNS = 80
"""What a frame is made for; a narrower terminal cuts it."""
REASONS_SHOWN = 4
NAMESPACES_SHOWN = 20
LABEL, NUMBER = 22, 16
"""Widths of the columns of figures."""


def top(client: Client, options: argparse.Namespace) -> int:
    screen = Screen() if sys.stdout.isatty() and not options.json else None
    if screen is None:
        return _frames(client, options)
    with screen:
        return _live(client, options, screen)


def _frames(client: Client, options: argparse.Namespace) -> int:
    """For pipes and programs: whole frames, one after the other."""
    for reply, before in _ticks(client, options):
        if options.json:
            say_json(_as_dict(rates(before, reply), reply))
        else:
            say("\n".join(frame(reply, before, options.interval)) + "\n")
    return 0


def _live(client: Client, options: argparse.Namespace, screen: Screen) -> int:
    """Until `q`. A daemon that goes away may come back: the last figures stay, and the first line says so."""
    lines: list[str] = []
    before: stats_pb2.StatsReply | None = None
    shown = 0
    while True:
        try:
            reply: stats_pb2.StatsReply = ask_stats(client, "GetStats", stats_pb2.GetStatsRequest())
            lines = frame(reply, before, options.interval)
            before = reply
        except (Unavailable, DeadlineExceeded) as problem:
            gone = f"NO ANSWER: {problem.message}; trying again"
            lines = [gone, *(lines[1:] if lines else [])]
            before = None
        screen.draw(lines)
        shown += 1
        if options.count and shown >= options.count:
            return 0
        if screen.wait_for_q(options.interval):
            return 0


def _ticks(
    client: Client, options: argparse.Namespace
) -> Iterator[tuple[stats_pb2.StatsReply, stats_pb2.StatsReply | None]]:
    """Each reply with the one before."""
    before: stats_pb2.StatsReply | None = None
    shown = 0
    while True:
        reply: stats_pb2.StatsReply = ask_stats(client, "GetStats", stats_pb2.GetStatsRequest())
        yield reply, before
        before = reply
        shown += 1
        if options.count and shown >= options.count:
            return
        time.sleep(options.interval)


def _as_dict(change: Rates, reply: stats_pb2.StatsReply) -> dict[str, Any]:
    gauges = reply.gauges
    return {
        "version": reply.version,
        "boot_id": reply.boot_id.hex(),
        "uptime_ms": reply.uptime_ms,
        **change.as_dict(),
        "arena_bytes": reply.arena.bytes,
        "arena_ready_bytes": reply.arena.ready_bytes,
        "ssd_state": reply.ssd.state,
        "ssd_why": reply.ssd.why,
        "ssd_problems": [problem.what for problem in reply.ssd.problems],
        "ssd_to_store_chunks": reply.ssd.to_store,
        **{name: gauges[name] for name in GAUGES if name in gauges},
    }


GAUGES = (
    "queued_jobs",
    "prefetch_window_jobs",
    "eviction_window_jobs",
    "chunks_being_promoted",
    "chunks_being_stored",
    "waits",
    "workers",
    "leases",
    "reservations",
)


# ------------------------------------------------------------------------------------------------------------- frame


def frame(reply: stats_pb2.StatsReply, before: stats_pb2.StatsReply | None, interval_s: float) -> list[str]:
    """Lines of at most 80 letters, most important first."""
    now, ever = rates(before, reply), rates(None, reply)
    lines = [
        _both(
            f"kvstored {peer_text(reply.version)}  up {age(reply.uptime_ms)}  boot {reply.boot_id.hex()[:8]}"
            + (f"  {reply.gauges['workers']:.0f} clients" if "workers" in reply.gauges else ""),
            f"{time.strftime('%H:%M:%S')}  every {interval_s:g} s",
        ),
        _dram(reply, now),
        *_ssd(reply),
        "",
        _figure("", "since start" if now.since_start else f"last {now.seconds:.1f} s", "since start"),
    ]
    pairs: list[tuple[str, str, str]] = [
        ("lookups/s", count(now.lookups / now.seconds), count(ever.lookups / ever.seconds)),
        ("hit rate", share(now.share(now.hits)), share(ever.share(ever.hits))),
        ("  from DRAM", share(now.share(now.dram_hits)), share(ever.share(ever.dram_hits))),
        ("  from SSD", share(now.share(now.ssd_hits)), share(ever.share(ever.ssd_hits))),
        ("pending", _of_all(now, now.pending), _of_all(ever, ever.pending)),
        ("miss", _of_all(now, now.misses), _of_all(ever, ever.misses)),
        *_reasons(now, ever),
        ("reused tokens/s", count(now.tokens_reused_per_s), count(ever.tokens_reused_per_s)),
        ("reused KV/s", size(now.bytes_loaded_per_s), size(ever.bytes_loaded_per_s)),
    ]
    if now.counters_per_s:  # an admin's
        new, old = now.counters_per_s, ever.counters_per_s
        pairs += [
            ("saved KV/s", size(new.get("bytes_saved", 0)), size(old.get("bytes_saved", 0))),
            ("evicted chunks/s", count(_evicted(new)), count(_evicted(old))),
        ]
    lines += [_figure(*pair) for pair in pairs]
    lines += ["", *_moving(reply, now), *_queue(reply)]
    if len(reply.namespaces) > 1:
        lines += ["", *_namespaces(reply, before, now.seconds)]
    return [line[:COLUMNS].rstrip() for line in lines]


def _of_all(of: Rates, counts: Mapping[str, int]) -> str:
    return share(of.share(sum(counts.values())))


def _evicted(per_s: Mapping[str, float]) -> float:
    """From either tier."""
    return per_s.get("chunks_evicted", 0.0) + per_s.get("chunks_evicted_from_ssd", 0.0)


def _both(left: str, right: str) -> str:
    return f"{left}{right.rjust(max(0, COLUMNS - len(left)))}" if len(left) + len(right) < COLUMNS else left


def _figure(label: str, now: str, ever: str) -> str:
    return f"{label:{LABEL}}{now:>{NUMBER}}{ever:>{NUMBER}}"


def _dram(reply: stats_pb2.StatsReply, now: Rates) -> str:
    arena = reply.arena
    used = sum(pool.slot_bytes * (pool.capacity - pool.free) for pool in reply.pools)
    line = f"DRAM  {size(used)} of {size(arena.bytes)} in use"
    if arena.ready_bytes + arena.retiring_bytes < arena.bytes:
        left = "" if now.arena_s is None else f", all of it in about {now.arena_s:.0f} s"
        line += f", {size(arena.ready_bytes)} ready{left}"
    return line


def _ssd(reply: stats_pb2.StatsReply) -> list[str]:
    ssd = reply.ssd
    if ssd.state == "absent":
        return ["SSD   off"]
    state = ssd.state.replace("_", " ").upper() if ssd.state != "ok" else "ok"
    lines = [
        f"SSD   {state}  {size(ssd.slab_bytes)} of {size(ssd.bytes)} in slab files{', full' if ssd.full else ''},"
        f" {size(ssd.free_bytes)} free on disk"
    ]
    trouble = dict.fromkeys(filter(None, (ssd.why, *(problem.what for problem in ssd.problems))))
    return lines + [f"      ! {peer_text(why, COLUMNS)}" for why in list(trouble)[:3]]


def _reasons(now: Rates, ever: Rates) -> list[tuple[str, str, str]]:
    """Misses by reason, most frequent of late first; the rest in one line."""
    order = list(dict.fromkeys((*now.misses, *ever.misses)))
    shown = order[:REASONS_SHOWN]
    lines = {f"  {peer_text(reason).replace('_', ' ')}": {reason} for reason in shown}
    if len(order) > len(shown):
        lines["  other"] = set(order) - set(shown)
    return [(label, _misses(now, reasons), _misses(ever, reasons)) for label, reasons in lines.items()]


def _misses(of: Rates, reasons: Container[str]) -> str:
    return _of_all(of, {reason: times for reason, times in of.misses.items() if reason in reasons})


def _moving(reply: stats_pb2.StatsReply, now: Rates) -> list[str]:
    gauges, per_s = reply.gauges, now.counters_per_s
    if reply.ssd.state == "absent" or "chunks_being_promoted" not in gauges:
        return []
    coming = int(gauges["chunks_being_promoted"])
    ready = f", ready in about {_short(now.promotion_s)}" if coming and now.promotion_s is not None else ""
    return [
        f"SSD -> DRAM   {count(coming)} chunks on the way{ready};"
        f" {count(per_s.get('chunks_promoted_ahead', 0))}/s ahead,"
        f" {count(per_s.get('chunks_promoted_on_demand', 0))}/s on demand,"
        f" {size(per_s.get('ssd_bytes_read', 0))}/s",
        f"DRAM -> SSD   {count(gauges['chunks_being_stored'])} chunks on the way,"
        f" {count(reply.ssd.to_store)} wait; {count(per_s.get('chunks_stored', 0))}/s,"
        f" {size(per_s.get('ssd_bytes_written', 0))}/s",
    ]


def _short(time_s: float) -> str:
    return f"{1000 * time_s:.0f} ms" if time_s < 1 else age(int(1000 * time_s))


def _queue(reply: stats_pb2.StatsReply) -> list[str]:
    gauges = reply.gauges
    if "queued_jobs" not in gauges:
        return []
    return [
        f"queue         {count(gauges['queued_jobs'])} jobs: {count(gauges['prefetch_window_jobs'])} in the"
        f" prefetch window, {count(gauges['eviction_window_jobs'])} in the eviction window"
    ]


def _namespaces(
    reply: stats_pb2.StatsReply, before: stats_pb2.StatsReply | None, passed_s: float
) -> list[str]:
    """One line each, most lookups of late first."""
    if before is not None and before.boot_id != reply.boot_id:
        before = None
    old = {row.namespace_id: row for row in before.namespaces} if before is not None else {}
    rows = []
    for row in reply.namespaces:
        was = old.get(row.namespace_id, stats_pb2.NamespaceStats())
        lookups, hits = max(0, row.lookups - was.lookups), max(0, row.hits - was.hits)
        rate = share(hits / lookups if lookups else None)
        line = (
            f"{row.namespace_id:>4}  {peer_text(row.model)[:30]:30}  {count(lookups / passed_s):>9}  {rate:>8}"
            f"  {size(row.resident_bytes):>9}  {size(row.cold_bytes):>9}"
        )
        rows.append((-lookups, row.namespace_id, line))
    head = f"{'id':>4}  {'model':30}  {'lookups/s':>9}  {'hit rate':>8}  {'in DRAM':>9}  {'SSD only':>9}"
    return [head, *(line for _, _, line in sorted(rows)[:NAMESPACES_SHOWN])]


# ------------------------------------------------------------------------------------------------------------ screen


class Screen:
    """A terminal that one frame is drawn on again and again: over the last one, from where that began. What is above
    stays, and the last frame stays when the command ends. A context manager; restores the terminal."""

    def __init__(self) -> None:
        self._drawn = 0
        """Lines of the last frame."""
        self._size = (0, 0)
        self._saved: list[Any] | None = None
        self._before: Any = None

    def __enter__(self) -> Screen:
        with contextlib.suppress(termios.error, OSError, ValueError):
            if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                self._saved = termios.tcgetattr(sys.stdin.fileno())
                tty.setcbreak(sys.stdin.fileno())
        self._before = signal.signal(signal.SIGTERM, _terminated)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if self._saved is not None:
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    def draw(self, lines: Sequence[str]) -> None:
        """Raises OutputFailed when the terminal is gone."""
        columns, rows = shutil.get_terminal_size()
        # The last line stays free for the cursor, or each frame would scroll the terminal.
        lines = [line[:columns] for line in lines[: max(1, rows - 1)]]
        if (columns, rows) != self._size:  # lines of a wider terminal have been broken: begin at its top
            start = "\x1b[H\x1b[2J"
        else:
            start = f"\r\x1b[{self._drawn}A" if self._drawn else "\r"
        self._size = (columns, rows)
        self._drawn = len(lines)
        say(start + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="")

    def wait_for_q(self, time_s: float) -> bool:
        """For so long, or until somebody presses q."""
        until = time.monotonic() + time_s
        while (left := until - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left)
                continue
            if select.select([sys.stdin], [], [], left)[0]:
                pressed = os.read(sys.stdin.fileno(), 64)
                if not pressed or b"q" in pressed.lower():
                    return True
        return False


def _terminated(signum: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        type=seconds,
        default=INTERVAL_S,
        metavar="SECONDS",
        help="between two frames (default: 1)",
    )
    parser.add_argument("--count", type=number, default=0, metavar="N", help="end after so many frames")


COMMANDS = (
    Command(
        "top",
        "what it does now, in place: hit rate by tier, misses by reason, what moves, queue; q ends it",
        run=top,
        arguments=_arguments,
    ),
)
