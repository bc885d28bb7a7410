"""`kvctl`: what an operator asks of a running daemon.

Exit status: 0, 1 when the daemon refused or doctor or check found something (one line on stderr says why), 2 for a
wrong command line, or when check cannot tell.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from kvstore import __version__
from kvstore.cli import admin, check, demo, doctor, objects
from kvstore.cli.tables import age, name, peer_text, plain, size, table
from kvstore.client import Client, connect
from kvstore.config import ENVIRONMENT_PREFIX, StoreConfig
from kvstore.errors import BadRequest, NotFound, StoreError
from kvstore.types import KEY_BYTES_MAX, MAKER_BYTES, SESSION_NAME_BYTES_MAX, Outcome, Reason, Tier
from kvstore.v1 import stats_pb2, stats_pb2_grpc, store_pb2, store_pb2_grpc

RUN_DIR_VARIABLE = f"{ENVIRONMENT_PREFIX}RUN_DIR"
WATCH_S = 1.0
EXIT_NOT_DURABLE = 3
"""What was asked for is done, but a restart of the daemon now could undo it."""
FOREVER_S = 10 * 365 * 86_400.0
"""A watch that reaches this ends."""


def parser() -> argparse.ArgumentParser:
    # On both sides of the command's name; what is not given leaves the other's value alone.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--run-dir", metavar="DIR", help=f"the daemon's directory (environment: {RUN_DIR_VARIABLE})"
    )
    common.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="longest wait for the daemon (default: 5)"
    )
    common.add_argument("--json", action="store_true", help="for programs: JSON, bytes in hexadecimal")
    result = argparse.ArgumentParser(prog="kvctl", description=__doc__, parents=[common], allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"kvctl {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[Client, argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            run.__name__, help=about, description=about, parents=[common], allow_abbrev=False
        )
        added.set_defaults(run=run)
        return added

    stats_ = command(stats, "arena, pools, namespaces and counters")
    stats_.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help="again and again (default: 1)",
    )
    command(namespaces, "one line per namespace")
    sessions_ = command(sessions, "one line per session, most recently used first")
    sessions_.add_argument("--namespace", type=int, default=0, metavar="ID")
    sessions_.add_argument("--limit", type=int, default=1000, metavar="N")
    explain_ = command(
        explain, "the history of a session's chunks, or of single keys: where they are, or why not"
    )
    explain_.add_argument("session", nargs="?", type=session_name, help="its name, or hex:...")
    explain_.add_argument(
        "--key", action="append", type=key, default=[], metavar="HEX", help="of a chunk; may be given again"
    )
    explain_.add_argument("--namespace", type=int, default=0, metavar="ID")
    put_ = command(put, "store a file; prints its key")
    put_.add_argument("file", help="- for standard input")
    get_ = command(get, "write a file that was put to standard output")
    get_.add_argument("key", type=key, metavar="KEY")
    get_.add_argument("-o", "--output", metavar="FILE")
    forget_ = command(
        forget,
        "drop a session and the chunks that nothing else names, single keys, or a file;"
        f" status {EXIT_NOT_DURABLE}: dropped, but a restart now could bring it back",
    )
    forget_.add_argument("session", nargs="?", type=session_name, help="its name, or hex:...")
    forget_.add_argument(
        "--key", action="append", type=key, default=[], metavar="HEX", help="of a chunk; may be given again"
    )
    forget_.add_argument("--file", type=key, metavar="KEY", help="as put printed it")
    forget_.add_argument("--namespace", type=int, default=0, metavar="ID")
    quarantine_ = command(
        admin.quarantine, "slots that are out of service: where, since when, and until when"
    )
    quarantine_.add_argument("--limit", type=int, default=1000, metavar="N")
    quarantine_.add_argument(
        "--retry", action="store_true", help="rewrite and verify now what can be, also what failed it before"
    )
    recall_ = command(
        admin.recall, "purge all that one maker made, from every tier, and name the sessions that read it"
    )
    recall_.add_argument("--maker", type=admin.maker, required=True, metavar="HEX", help="see kvctl explain")
    recall_.add_argument(
        "--since",
        type=admin.moment,
        metavar="TIME",
        help="only what was made since then (2026-01-31T12:00, or 15m, 2h, 3d ago); what an earlier start of the"
        " daemon left has no known time, and goes too",
    )
    recall_.add_argument("--dry-run", action="store_true", help="only say what would go")
    recall_.add_argument("--limit", type=int, default=1000, metavar="N", help="sessions listed at most")
    check_ = commands.add_parser(
        "check",
        help="verify all that is stored: by the running daemon, or a directory without one; perhaps --fix",
        description=check.__doc__,
        parents=[common],
        allow_abbrev=False,
    )
    check.add_arguments(check_)
    check_.set_defaults(run=None)
    examine = commands.add_parser(
        "doctor", help="a round trip through everything, with findings", parents=[common], allow_abbrev=False
    )
    examine.add_argument(
        "engine",
        nargs="?",
        choices=["vllm"],
        help="look at an engine's arguments too, in the engine's environment",
    )
    examine.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENTS", help="what `vllm serve` is given, behind --"
    )
    examine.set_defaults(run=None)
    commands.add_parser(
        "demo",
        help="a daemon of its own, chats that come back, kill -9: half a minute",
        description=demo.__doc__,
        parents=[common],
        allow_abbrev=False,
    ).set_defaults(run=None)
    return result


def seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def session_name(text: str) -> bytes:
    data = bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else os.fsencode(text)
    if not 1 <= len(data) <= SESSION_NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"a session's name has 1 to {SESSION_NAME_BYTES_MAX} bytes")
    return data


def key(text: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not in hexadecimal digits, two a byte") from None
    if not 1 <= len(data) <= KEY_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"a key has 1 to {KEY_BYTES_MAX} bytes")
    return data


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments, argparse.Namespace(json=False, timeout=5.0, run_dir=""))
    run_dir = options.run_dir or os.environ.get(RUN_DIR_VARIABLE) or StoreConfig().run_dir
    try:
        if options.command == "doctor":
            sys.exit(run_doctor(run_dir, options))
        if options.command == "check":
            sys.exit(check.run(run_dir, options))
        if options.command == "demo":
            sys.exit(demo.run(options))
        with connect(run_dir, timeout_s=options.timeout) as client:
            sys.exit(options.run(client, options))
    except StoreError as error:
        print(f"kvctl: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # of `kvctl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


# ---------------------------------------------------------------------------------------------------------- commands


def stats(client: Client, options: argparse.Namespace) -> int:
    ask = stats_pb2.GetStatsRequest()
    until = time.monotonic() + (FOREVER_S if options.watch else 0.0)
    while True:
        reply = _ask(client, "GetStats", ask)
        if options.json:
            print(json.dumps(plain(reply)), flush=True)
        else:
            print(_stats_text(reply), end="\n\n" if options.watch else "\n", flush=True)
        if time.monotonic() >= until:
            return 0
        time.sleep(options.watch)


def _stats_text(reply: stats_pb2.StatsReply) -> str:
    arena = reply.arena
    parts = [
        f"kvstored {reply.version}, up {age(reply.uptime_ms)}, boot {reply.boot_id.hex()[:8]}",
        f"arena {size(arena.bytes)} ({arena.protection}): ready {size(arena.ready_bytes)},"
        f" assigned {size(arena.assigned_bytes)}, retiring {size(arena.retiring_bytes)}",
        *_ssd_lines(reply),
    ]
    if reply.namespaces:
        parts += ["", _namespaces_text(reply.namespaces)]
    if reply.pools:
        head = ("namespace", "slot", "segments", "capacity", "free", "reserved", "ready", "quarantined")
        rows = [
            (
                p.namespace_id,
                size(p.slot_bytes),
                p.segments,
                p.capacity,
                p.free,
                p.reserved,
                p.ready,
                p.quarantined,
            )
            for p in reply.pools
        ]
        parts += ["", table(head, rows)]
    numbers = [
        *sorted(reply.gauges.items()),
        *((counter, value) for counter, value in sorted(reply.counters.items()) if "{" not in counter),
    ]
    if numbers:
        parts += ["", "\n".join(f"{number:>12,.0f}  {what}" for what, number in numbers)]
    return "\n".join(parts)


def _ssd_lines(reply: stats_pb2.StatsReply) -> list[str]:
    ssd = reply.ssd
    if ssd.state == "absent":
        return ["SSD off"]
    counters = reply.counters
    why = f" ({peer_text(ssd.why)})" if ssd.why else ""
    hits = sum(row.hits for row in reply.namespaces)
    cold = sum(row.ssd_hits for row in reply.namespaces)
    lines = [
        f"SSD {ssd.state.replace('_', ' ')}{why}{', full' if ssd.full else ''}: {size(ssd.slab_bytes)} in slab files"
        f" of at most {size(ssd.bytes)}; slots: {ssd.ready:,} ready, {ssd.free:,} free, {ssd.reserved:,} reserved,"
        f" {ssd.quarantined:,} quarantined",
        f"    {ssd.cold_chunks:,} chunks on SSD only, {ssd.to_store:,} to be stored,"
        f" index {size(ssd.index_used_bytes)} of {size(ssd.index_max_bytes)}"
        f" (sessions {size(ssd.index_sessions_bytes)}, chunks {size(ssd.index_chunks_bytes)}),"
        f" {ssd.to_forget:,} records to go from it, behind by"
        f" {age(ssd.oldest_not_durable_ms)};"
        f" errors: {ssd.io_errors:,} I/O, {ssd.no_space:,} no space, {ssd.corrupt:,} corrupt",
        f"    hits: {hits - cold:,} in DRAM, {cold:,} on SSD"
        + (f" ({1 - cold / hits:.1%} in DRAM)" if hits else ""),
    ]
    if counters:  # an admin's
        lines.append(
            f"    prefetch: {counters['prefetch_on_time']:,} on time, {counters['prefetch_late']:,} late,"
            f" {counters['prefetch_wasted']:,} wasted; promoted: {counters['chunks_promoted_ahead']:,} ahead,"
            f" {counters['chunks_promoted_on_demand']:,} on demand"
        )
    return lines


def namespaces(client: Client, options: argparse.Namespace) -> int:
    reply = _ask(client, "ListNamespaces", stats_pb2.ListNamespacesRequest())
    return _show(options, reply, lambda: _namespaces_text(reply.namespaces))


def _namespaces_text(rows: Sequence[stats_pb2.NamespaceStats]) -> str:
    head = (
        "id",
        "tenant",
        "model",
        "epoch",
        "chunks",
        "incomplete",
        "resident",
        "on SSD only",
        "pinned",
        "sessions",
        "hit rate",
    )
    return table(
        head,
        [
            (
                row.namespace_id,
                peer_text(row.tenant),
                peer_text(row.model),
                row.weights_epoch,
                row.chunks,
                row.incomplete,
                size(row.resident_bytes),
                size(row.cold_bytes),
                size(row.pinned_bytes),
                row.sessions,
                f"{row.hits / row.lookups:.1%} of {row.lookups:,}" if row.lookups else "-",
            )
            for row in rows
        ],
    )


def sessions(client: Client, options: argparse.Namespace) -> int:
    reply = _sessions(client, options.namespace, options.limit)
    head = (
        "session",
        "tenant",
        "namespace",
        "version",
        "entries",
        "tokens",
        "usable",
        "size",
        "in DRAM",
        "on SSD",
        "idle",
        "reason",
    )
    return _show(
        options,
        reply,
        lambda: "\n".join(
            (
                table(
                    head,
                    [
                        (
                            name(row.session),
                            peer_text(row.tenant),
                            row.namespace_id,
                            row.version,
                            row.entry_count,
                            row.token_count,
                            row.usable,
                            size(row.bytes),
                            size(row.resident_bytes),
                            size(row.ssd_bytes),
                            age(row.idle_ms),
                            _reason(row.reason),
                        )
                        for row in reply.rows
                    ],
                ),
                f"{len(reply.rows):,} of {reply.total:,} sessions",
            )
        ),
    )


def explain(client: Client, options: argparse.Namespace) -> int:
    asked = [
        stats_pb2.ExplainRequest(namespace_id=number, session=options.session or b"", keys=options.key)
        for number in _where(client, options)
    ]
    replies = [(ask.namespace_id, _ask(client, "Explain", ask)) for ask in asked]
    if options.json:
        print(json.dumps([{"namespace_id": n, **plain(reply)} for n, reply in replies]))
        return 0
    head = (
        "key",
        "found",
        "reason",
        "tier",
        "size",
        "last decision",
        "tokens",
        "shards",
        "pins",
        "hits",
        "age",
        "idle",
        "sessions",
        "derived",
        "maker",
    )
    for number, reply in replies:
        version = f", version {reply.version}" if reply.version else ""
        print(f"namespace {number}{version}: {len(reply.chunks)} chunks")
        print(table(head, [_history(chunk) for chunk in reply.chunks]))
    return 0


def _history(chunk: stats_pb2.ChunkHistory) -> tuple[object, ...]:
    return (
        chunk.key.hex()[:16],
        Outcome(chunk.outcome).name.lower(),
        _reason(chunk.reason),
        " + ".join(tier.name for tier in Tier if chunk.tiers >> tier & 1) or "-",
        size(chunk.bytes) if chunk.tiers else "-",
        _decision(chunk),
        chunk.token_count,
        f"{chunk.shards_ready}/{chunk.shards}",
        chunk.pins,
        chunk.hits,
        age(chunk.age_ms),
        age(chunk.idle_ms),
        chunk.manifests,
        chunk.derived,
        " + ".join(chunk.maker[at : at + MAKER_BYTES].hex() for at in range(0, len(chunk.maker), MAKER_BYTES))
        or "-",
    )


def _reason(number: int) -> str:
    return Reason(number).name.lower().replace("_", " ") if number else "-"


def _decision(chunk: stats_pb2.ChunkHistory) -> str:
    """What the daemon did with it last, and for whom."""
    in_dram, on_ssd = (chunk.tiers >> tier & 1 for tier in (Tier.DRAM, Tier.SSD))
    if in_dram and on_ssd:
        what = "stored on SSD" if chunk.durable else "stored on SSD, not in its index yet"
    elif in_dram:
        what = "being stored on SSD" if chunk.moving else "kept in DRAM"
    elif on_ssd:
        what = "being read from SSD" if chunk.moving else "left DRAM for SSD"
    else:
        what = "never saved" if chunk.reason == Reason.NEVER_SEEN else "dropped"
    return f"{what}, needed by the queue" if chunk.needed else what


def put(client: Client, options: argparse.Namespace) -> int:
    try:
        data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    except OSError as problem:
        raise BadRequest(f"cannot be read: {problem.strerror}", field="FILE", value=options.file) from None
    stored = objects.put(client, data).hex()
    print(json.dumps({"key": stored, "bytes": len(data)}) if options.json else stored)
    return 0


def get(client: Client, options: argparse.Namespace) -> int:
    data = objects.get(client, options.key)
    if options.output:
        Path(options.output).write_bytes(data)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def forget(client: Client, options: argparse.Namespace) -> int:
    if options.file is not None:
        if options.session or options.key:
            raise BadRequest("name one of SESSION, --key and --file", field="--file", value=options.file)
        forgotten = objects.forget(client, options.file)
        count, why = int(forgotten), forgotten.not_durable
    else:
        count, why = _forget(client, options, _where(client, options, missing_ok=True))
    if options.json:
        print(json.dumps({"count": count, "durable": not why, "not_durable": why}))
    else:
        print(
            f"{count} dropped" + (f", but a restart now could bring it back: {peer_text(why)}" if why else "")
        )
    return EXIT_NOT_DURABLE if why else 0


def _forget(client: Client, options: argparse.Namespace, numbers: Sequence[int]) -> tuple[int, str]:
    """How many were dropped, and why that is not durable. None of them has the session: it may be forgotten already,
    and not durably."""
    count, why = 0, ""
    for number in numbers or _all_namespaces(client):
        ask = store_pb2.ForgetRequest(namespace_id=number, session=options.session or b"", keys=options.key)
        reply = client.unary(store_pb2_grpc.StoreStub, "Forget", ask)
        count += reply.count
        why = why or reply.not_durable
    if not numbers and not count and not why:
        raise _no_such_session(options)
    return count, why


def run_doctor(run_dir: str, options: argparse.Namespace) -> int:
    status = 0
    findings = doctor.examine(run_dir, options.timeout)
    if options.engine:
        findings = itertools.chain(findings, doctor.ask_engine(run_dir, options.timeout, options.arguments))
    for finding in findings:
        status = status if finding.ok else 1
        if options.json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
        else:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check:16} {finding.detail}", flush=True)
            if finding.remedy:
                print(f"      {'':16} -> {finding.remedy}", flush=True)
        if not finding.ok:
            break  # no later check makes sense
    return status


# ------------------------------------------------------------------------------------------------------------- helpers

AS_THEY_ARE: dict[str, Any] = {
    "preserving_proto_field_name": True,
    "always_print_fields_with_no_presence": True,
}


def _ask(client: Client, method: str, request: Message) -> Any:
    return client.unary(stats_pb2_grpc.StatsStub, method, request)


def _sessions(client: Client, namespace: int, limit: int) -> stats_pb2.ListSessionsReply:
    """In as many requests as it takes: the daemon lists little at a time."""
    found = stats_pb2.ListSessionsReply()
    seen: set[tuple[int, bytes]] = set()
    skip = 0
    while True:
        ask = stats_pb2.ListSessionsRequest(namespace_id=namespace, limit=limit - len(found.rows), skip=skip)
        reply: stats_pb2.ListSessionsReply = _ask(client, "ListSessions", ask)
        found.total = reply.total
        skip += len(reply.rows)
        found.rows.extend(row for row in reply.rows if (row.namespace_id, row.session) not in seen)
        seen.update((row.namespace_id, row.session) for row in reply.rows)
        if not reply.rows or skip >= reply.total or len(found.rows) >= limit:
            return found


def _where(client: Client, options: argparse.Namespace, *, missing_ok: bool = False) -> list[int]:
    """The namespaces that are meant: the one that was named, else those that have the session, else (keys) all."""
    if bool(options.session) == bool(options.key):
        raise BadRequest("name either a session or --key", field="SESSION", value=options.session or "")
    if options.namespace:
        return [options.namespace]
    if options.session:
        reply = _ask(client, "ListSessions", stats_pb2.ListSessionsRequest(session=options.session))
        # a daemon that is older lists all of them
        found = [row.namespace_id for row in reply.rows if row.session == options.session]
        if not found and not missing_ok:
            raise _no_such_session(options)
        return found
    numbers = _all_namespaces(client)
    if not numbers:
        raise NotFound("no namespace is open", field="--key", value=options.key[0])
    return numbers


def _all_namespaces(client: Client) -> list[int]:
    rows = _ask(client, "ListNamespaces", stats_pb2.ListNamespacesRequest()).namespaces
    return [row.namespace_id for row in rows]


def _no_such_session(options: argparse.Namespace) -> NotFound:
    remedy = "see kvctl sessions"
    return NotFound("no such session", field="SESSION", value=name(options.session), remedy=remedy)


def _show(options: argparse.Namespace, reply: Message, text: Callable[[], str]) -> int:
    print(json.dumps(plain(reply)) if options.json else text())
    return 0


if __name__ == "__main__":
    main()
