"""`kvctl quarantine`, `kvctl recall`, `kvctl purge` and `kvctl record`: what an operator orders of a running daemon."""

from __future__ import annotations

import argparse
import datetime
import os
import time
from typing import Any

from google.protobuf.message import Message

from kvstore.cli.command import Command, ask_stats, byte_size, refuse_unused, some
from kvstore.cli.output import note, say, say_json
from kvstore.cli.tables import age, name, peer_text, plain, size, table
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded
from kvstore.types import MAKER_BYTES
from kvstore.v1 import admin_pb2, admin_pb2_grpc, stats_pb2

RECALL_WAIT_S = 300.0
"""For the index, all requests together."""
AGE_MS_MAX = 100 * 365 * 86_400_000
"""No chunk is older."""
RECORD_POLL_S = 0.5
REQUEST_S = 40.0
"""Longer than the daemon's own patience with one request."""


def maker(text: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != MAKER_BYTES:
        raise argparse.ArgumentTypeError(
            f"a maker has {MAKER_BYTES} bytes, {2 * MAKER_BYTES} hexadecimal digits"
        )
    return data


def moment(text: str) -> int:
    """An ISO 8601 time (without a zone: local), or a time ago as 90s, 15m, 2h, 3d. Returns its age in ms."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    try:
        if text[-1:] in units and text[:-1].isdecimal():
            ago = int(text[:-1]) * units[text[-1]] * 1000
        else:
            ago = int((time.time() - datetime.datetime.fromisoformat(text).timestamp()) * 1000)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text} is neither an ISO 8601 time, as 2026-01-31T12:00, nor a time ago, as 15m"
        ) from None
    if ago <= 0:  # 0 would mean at any time
        raise argparse.ArgumentTypeError(f"{text} is not in the past")
    return min(ago, AGE_MS_MAX)


def ask_admin(client: Client, method: str, request: Message, timeout_s: float | None = None) -> Any:
    return client.unary(admin_pb2_grpc.AdminStub, method, request, timeout_s=timeout_s)


def quarantine(client: Client, options: argparse.Namespace) -> int:
    reply: admin_pb2.ListQuarantineReply = ask_admin(
        client,
        "ListQuarantine",
        admin_pb2.ListQuarantineRequest(limit=options.limit, retry=options.retry),
    )
    if options.json:
        say_json(plain(reply))
        return 0
    if reply.rows:
        head = ("tier", "place", "slot", "size", "namespace", "key", "reason", "since", "back in service")
        say(table(head, [_row(row) for row in reply.rows]))
    say(
        f"{reply.dram:,} slots in DRAM, {reply.ssd:,} on SSD; since the start {reply.returned:,} returned to service,"
        f" {reply.failed:,} failed"
    )
    return 0


def _row(row: admin_pb2.QuarantinedSlot) -> tuple[object, ...]:
    place = f"segment {row.place}" if row.tier == "dram" else f"slab-{row.place:08d}.kvs"
    return (
        row.tier,
        place,
        row.slot,
        size(row.slot_bytes),
        row.namespace_id,
        row.key.hex(),
        row.reason,
        f"{age(row.age_ms)} ago",
        row.next,
    )


def recall(client: Client, options: argparse.Namespace) -> int:
    """Count first, then purge until it is durable: asked again, the daemon counts only what was left."""
    request = admin_pb2.RecallRequest(
        maker=options.maker, age_ms_max=options.since or 0, dry_run=True, sessions_max=options.limit
    )
    reply: admin_pb2.RecallReply = ask_admin(client, "Recall", request, timeout_s=REQUEST_S)
    request.dry_run = options.dry_run
    deadline = time.monotonic() + RECALL_WAIT_S
    while not options.dry_run:
        try:
            ask_admin(client, "Recall", request, timeout_s=REQUEST_S)
            break
        except DeadlineExceeded:
            if time.monotonic() > deadline:
                raise
    if options.json:
        say_json(plain(reply))
    else:
        _say_recalled(reply, dry_run=options.dry_run)
    if reply.chunks or reply.sessions_in_all:
        return 0
    barred = "" if options.dry_run else "; what it makes is refused from now on all the same"
    note(
        f"kvctl: --maker={options.maker.hex()}: nothing that it made is known here (see kvctl explain){barred}"
    )
    return 1


def _say_recalled(reply: admin_pb2.RecallReply, *, dry_run: bool) -> None:
    if reply.sessions:
        head = ("session", "tenant", "namespace", "version", "entry", "token")
        rows = [
            (
                name(row.session),
                peer_text(row.tenant),
                row.namespace_id,
                row.version,
                row.entry,
                row.first_token,
            )
            for row in reply.sessions
        ]
        say(table(head, rows))
        say("What these sessions computed from that token on may have come from the same source.")
    what = "would be purged" if dry_run else "purged, and gone for good"
    say(
        f"{reply.chunks:,} chunks, {size(reply.bytes)} {what} ({reply.pinned:,} of them under a lease);"
        f" {reply.sessions_in_all:,} sessions name what it made"
    )


def purge(client: Client, options: argparse.Namespace) -> int:
    """Count first, then purge until it is durable and told: asked again, the daemon counts only what was left."""
    request = admin_pb2.PurgeRequest(tenant=options.tenant, dry_run=True)
    reply: admin_pb2.PurgeReply = ask_admin(client, "Purge", request, timeout_s=REQUEST_S)
    request.dry_run = options.dry_run
    deadline = time.monotonic() + RECALL_WAIT_S
    while not options.dry_run:
        try:
            ask_admin(client, "Purge", request, timeout_s=REQUEST_S)
            break
        except DeadlineExceeded:
            if time.monotonic() > deadline:
                raise
    known = bool(reply.chunks or reply.sessions or reply.schemas) or options.tenant in _tenants(client)
    if options.json:
        say_json(plain(reply))
    elif known:
        what = (
            "would be purged"
            if options.dry_run
            else "purged here, and gone for good; the other nodes are told"
        )
        say(
            f"{reply.chunks:,} chunks, {size(reply.bytes)} ({reply.pinned:,} of them under a lease),"
            f" {reply.sessions:,} sessions, {reply.schemas:,} schemas {what}"
        )
    if known:
        return 0
    told = "" if options.dry_run else "; other nodes are told all the same"
    tenant = peer_text(options.tenant)
    note(f"kvctl: --tenant={tenant}: nothing of such a tenant is known here (see kvctl namespaces){told}")
    return 1


def _tenants(client: Client) -> set[str]:
    """Who has a namespace here."""
    reply = ask_stats(client, "ListNamespaces", stats_pb2.ListNamespacesRequest())
    return {row.tenant for row in reply.namespaces}


def _purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", required=True, metavar="NAME", help="see kvctl namespaces")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go at this node")


def _quarantine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=some, default=1000, metavar="N")
    parser.add_argument(
        "--retry", action="store_true", help="rewrite and verify now what can be, also what failed it before"
    )


def _recall_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--maker", type=maker, required=True, metavar="HEX", help="see kvctl explain")
    parser.add_argument(
        "--since",
        type=moment,
        metavar="TIME",
        help="only what was made since then (2026-01-31T12:00, or 15m, 2h, 3d ago); what an earlier start of the"
        " daemon left has no known time, and goes too",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--limit", type=some, default=1000, metavar="N", help="sessions listed at most")


def record(client: Client, options: argparse.Namespace) -> int:
    """Begins one and waits for its end, which an interrupt hastens; or only looks, or stops one."""
    if options.stop or options.status:
        refuse_unused(
            options, "seconds", "bytes_max", "background", remedy="with --status or --stop leave it out"
        )
        return _recorded(options, ask_admin(client, "Record", admin_pb2.RecordRequest(stop=options.stop)))
    request = admin_pb2.RecordRequest(
        path=os.path.abspath(options.file), bytes_max=options.bytes_max, seconds=options.seconds
    )
    reply: admin_pb2.RecordReply = ask_admin(client, "Record", request)
    if options.background:
        return _recorded(options, reply)
    note(f"kvctl: the daemon records to {reply.path}; an interrupt ends it")
    try:
        while reply.running:
            time.sleep(RECORD_POLL_S)
            reply = ask_admin(client, "Record", admin_pb2.RecordRequest())
    except KeyboardInterrupt:
        reply = ask_admin(client, "Record", admin_pb2.RecordRequest(stop=True))
    return _recorded(options, reply)


def _recorded(options: argparse.Namespace, reply: admin_pb2.RecordReply) -> int:
    if options.json:
        say_json(plain(reply))
    elif not reply.path:
        say("nothing was recorded since the daemon started")
    else:
        state = "is being recorded" if reply.running else f"ended: {reply.ended}"
        say(
            f"{reply.path} {state}; {reply.lookups:,} lookups, {reply.saves:,} saves, {size(reply.bytes)};"
            f" {reply.dropped:,} dropped"
        )
    return 0


def _record_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", metavar="FILE", help="a new file; the daemon writes it (mode 0600)")
    what.add_argument("--status", action="store_true", help="how far it is")
    what.add_argument("--stop", action="store_true", help="end it")
    parser.add_argument("--seconds", type=some, default=0, metavar="N", help="how long (default: an hour)")
    parser.add_argument(
        "--bytes-max",
        type=byte_size,
        default=0,
        metavar="SIZE",
        help="how large it may become (default: 1 GiB)",
    )
    parser.add_argument("--background", action="store_true", help="do not wait for its end")


COMMANDS = (
    Command(
        "record",
        "have the daemon write what engines look up and save to a file, keys hashed anew: a trace for simulate",
        run=record,
        arguments=_record_arguments,
    ),
    Command(
        "quarantine",
        "slots that are out of service: where, since when, and until when",
        run=quarantine,
        arguments=_quarantine_arguments,
    ),
    Command(
        "purge",
        "purge all that a tenant has, from every tier of every node, with its sessions and schemas",
        run=purge,
        arguments=_purge_arguments,
    ),
    Command(
        "recall",
        "purge all that one maker made, from every tier, and name the sessions that read it",
        run=recall,
        arguments=_recall_arguments,
    ),
)
