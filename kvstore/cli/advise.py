"""`kvctl advise`: what other sizes and policies would do for the live load. The daemon records (`kvctl record`), and
shadow caches run here, in kvctl's own process: the daemon pays for the recording alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from kvstore.cli.admin import ask_admin
from kvstore.cli.command import Command, byte_size, number, some
from kvstore.cli.output import note, say, say_json
from kvstore.cli.simulate import share_of, some_bytes
from kvstore.cli.tables import share, size, table
from kvstore.client import Client
from kvstore.core.limits import EVICTION
from kvstore.errors import BadRequest, Unavailable
from kvstore.v1 import admin_pb2

if TYPE_CHECKING:
    from kvstore.replay.shadow import Shadows

FACTORS = (0.5, 1.0, 1.5, 2.0, 4.0)
"""Of the present DRAM."""
POLL_S = 0.2
SECONDS = 60
BLOCK_BYTES = 1 << 16
"""Read at once: between two blocks it is seen that time is over."""
TURNS_MIN = 2_000
"""Sampled turns below which rates are rough: of Mooncake's conversations, samples of 250 turns said .08 to .16 where a
daemon of that size served .12."""
TRACE_BYTES_MAX = 256 << 20
"""Of the recording: a run_dir may be in memory."""


def port(text: str) -> int:
    value = number(text)
    if value > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 65535")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=some, default=SECONDS, metavar="N", help=f"how long to look (default: {SECONDS})"
    )
    parser.add_argument(
        "--dram",
        type=some_bytes,
        nargs="+",
        default=[],
        metavar="BYTES",
        help="sizes (default: 0.5 to 4 times)",
    )
    parser.add_argument(
        "--ssd", type=byte_size, metavar="BYTES", help="of the shadows (default: the daemon's)"
    )
    parser.add_argument("--policy", nargs="+", default=[EVICTION], metavar="NAME")
    parser.add_argument(
        "--share", type=share_of, default=0.1, metavar="SHARE", help="of the sessions, sampled (default: 0.1)"
    )
    parser.add_argument(
        "--metrics-port", type=port, default=0, metavar="PORT", help="for Prometheus, while it looks"
    )


def advise(client: Client, options: argparse.Namespace) -> int:
    from kvstore.core.policies import POLICIES

    for name in options.policy:
        if name not in POLICIES:
            raise BadRequest(
                "no such policy", field="--policy", value=name, remedy="known: " + ", ".join(POLICIES)
            )
    stats = client.stats()
    dram, ssd = stats.arena.bytes, stats.ssd.bytes if options.ssd is None else options.ssd
    gauges = _gauges(options.metrics_port) if options.metrics_port else None
    # In the daemon's own directory: it may run as another user, with a /tmp of its own (deploy/kvstored.service).
    path = os.path.join(os.path.abspath(options.run_dir), f"advise-{secrets.token_hex(8)}.trace")
    request = admin_pb2.RecordRequest(path=path, seconds=options.seconds + 60, bytes_max=TRACE_BYTES_MAX)
    with _interrupt() as ended:
        ask_admin(client, "Record", request)
        began = time.monotonic()
        try:
            with open(path, "rb") as file:
                note(f"kvctl: looking for {options.seconds} s; an interrupt ends it")
                looked = _look(_lines(file, options.seconds, ended), options, dram, ssd, gauges)
        finally:
            reply = ask_admin(client, "Record", admin_pb2.RecordRequest(stop=True))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    if looked.shadows is None or not looked.shadows.sampled:
        raise Unavailable(
            f"{reply.lookups} lookups in {time.monotonic() - began:.0f} s: too few to say anything",
            field="--seconds",
            value=options.seconds,
            remedy="look longer, or with a larger --share",
        )
    _tell(looked, options, dram, reply.dropped)
    return 0


@contextlib.contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """Set by the first interrupt, which ends the look and not kvctl; the second one does."""
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield ended
        return
    before = signal.getsignal(signal.SIGINT)

    def note_it(*_: object) -> None:
        ended.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note_it)
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class Looked:
    """What was seen of the live load."""

    shadows: Shadows | None = None
    elsewhere: int = 0
    """Lookups in other namespaces."""


def _look(
    lines: Iterator[dict[str, Any]], options: argparse.Namespace, dram: int, ssd: int, gauges: Any
) -> Looked:
    """Feed what the daemon writes, as it comes."""
    from kvstore.replay.readers import Recorded
    from kvstore.replay.shadow import Shadows, Size

    sizes = [
        Size(each, ssd, policy)
        for policy in options.policy
        for each in (options.dram or [int(factor * dram) for factor in FACTORS])
    ]
    if dram not in {each.dram_bytes for each in sizes}:
        sizes.insert(0, Size(dram, ssd, options.policy[0]))
    looked = Looked()
    shadows: Shadows | None = None
    reader = Recorded()
    shown_at = time.monotonic()
    for line in lines:
        if "n" not in line:
            continue
        if line["n"] != 0:  # shadows have one chunk size: that of the namespace that was seen first
            looked.elsewhere += "ask" in line
            continue
        turn = reader.take(line)
        if shadows is None:
            shadows = looked.shadows = Shadows(
                sizes, chunk_tokens=reader.chunk_tokens, chunk_bytes=reader.chunk_bytes, share=options.share
            )
        if turn is not None:
            shadows.feed(turn)
        if gauges is not None and time.monotonic() - shown_at >= 1.0:
            shown_at = time.monotonic()
            _show(gauges, shadows)
    if shadows is not None:
        for turn in reader.rest():
            shadows.feed(turn)
        if gauges is not None:
            _show(gauges, shadows)
    return looked


def _lines(file: BinaryIO, seconds: float, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """Whole lines of a file that grows: for so long, or until it is `ended`, all that is there then."""
    rest = b""
    until = time.monotonic() + seconds
    end: int | None = None
    while end is None or file.tell() < end:
        if end is None and (ended.is_set() or time.monotonic() >= until):
            end = os.fstat(file.fileno()).st_size
        data = file.read(BLOCK_BYTES)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
        if not data:
            ended.wait(POLL_S)


def _gauges(port: int) -> Any:
    try:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    except ImportError:
        raise BadRequest(
            "needs prometheus-client",
            field="--metrics-port",
            value=port,
            remedy="pip install 'attnstore[daemon]'",
        ) from None
    registry = CollectorRegistry()
    labels = ("dram_bytes", "ssd_bytes", "policy")
    gauge = Gauge(
        "kvstored_shadow_hit_ratio",
        "Chunks that a store of this size would have served",
        labels,
        registry=registry,
    )
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as problem:
        raise Unavailable(
            f"cannot be listened on: {problem.strerror}",
            field="--metrics-port",
            value=port,
            remedy="another one",
        ) from None
    return gauge


def _show(gauge: Any, shadows: Shadows) -> None:
    for wanted, result in shadows.results:
        gauge.labels(str(wanted.dram_bytes), str(wanted.ssd_bytes), wanted.policy).set(result.hit_rate)


def _tell(looked: Looked, options: argparse.Namespace, dram: int, dropped: int) -> None:
    shadows = looked.shadows
    assert shadows is not None
    now = next(result for wanted, result in shadows.results if wanted.dram_bytes == dram)
    rows: list[dict[str, Any]] = [
        {
            "policy": wanted.policy,
            "dram_bytes": wanted.dram_bytes,
            "ssd_bytes": wanted.ssd_bytes,
            "hit_rate": result.hit_rate,
            "hit_rate_dram": result.hits_dram / result.chunks if result.chunks else 0.0,
            "gain": result.hit_rate - now.hit_rate,
        }
        for wanted, result in shadows.results
    ]
    if options.json:
        say_json(
            {
                "share": shadows.share,
                "turns": shadows.sampled,
                "dropped": dropped,
                "lookups_elsewhere": looked.elsewhere,
                "rows": rows,
            }
        )
        return
    say(
        f"{shadows.sampled:,} turns of a sample of {share(shadows.share)} of the sessions"
        + (f"; {dropped:,} lookups were not seen" if dropped else "")
        + (f"; {looked.elsewhere:,} lookups in other namespaces are left out" if looked.elsewhere else "")
    )
    if shadows.sampled < TURNS_MIN:
        say(f"fewer than {TURNS_MIN:,} turns: the rates are rough; look longer, or with a larger --share")
    say(
        table(
            ["policy", "DRAM", "SSD", "hits", "in DRAM", ""],
            [
                [
                    row["policy"],
                    size(row["dram_bytes"]),
                    size(row["ssd_bytes"]),
                    share(row["hit_rate"]),
                    share(row["hit_rate_dram"]),
                    _words(row, dram),
                ]
                for row in rows
            ],
        )
    )


def _words(row: dict[str, Any], dram: int) -> str:
    """+64 GiB DRAM = +7 % of hits"""
    more = row["dram_bytes"] - dram
    if not more:
        return "the size it has"
    return f"{'+' if more > 0 else '-'}{size(abs(more))} DRAM = {100 * row['gain']:+.1f} % of hits"


COMMANDS = (
    Command(
        "advise",
        "what other sizes and policies would serve of the live load: shadow caches over a sample of it",
        run=advise,
        arguments=add_arguments,
    ),
)
