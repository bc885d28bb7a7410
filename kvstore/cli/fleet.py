"""`kvctl route` and `kvctl fleet`: which node holds what, and what an operator orders of nodes."""

from __future__ import annotations

import argparse
import time
from typing import Any

from google.protobuf.message import Message

from kvstore.cli.command import Command, byte_size, key, number, refuse_unused, seconds, session_name, show
from kvstore.cli.output import note, say, say_json
from kvstore.cli.tables import name, peer_text, plain, size, table
from kvstore.client import Client
from kvstore.errors import BadRequest, DeadlineExceeded, NotFound
from kvstore.types import ChunkKey
from kvstore.v1 import fleet_pb2, fleet_pb2_grpc

POLL_S = 0.5
DRAIN_STARTS_S = 60.0
"""An order reaches its node with that node's next heartbeat."""


def ask_fleet(client: Client, method: str, request: Message) -> Any:
    return client.unary(fleet_pb2_grpc.FleetStub, method, request)


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError("token ids are whole numbers, with commas between") from None


def route(client: Client, options: argparse.Namespace) -> int:
    model = options.model or client.only_model()
    reply = client.route(
        model,
        tokens=options.tokens,
        keys=[ChunkKey(each) for each in options.key or ()],
        session=options.session or b"",
    )
    if options.session and not reply.keys:
        raise NotFound(
            "no session with chunks of such a name is known here",
            field="--session",
            value=name(options.session),
            remedy="see kvctl sessions",
        )
    return show(options, reply, lambda: _routes(reply))


def _routes(reply: fleet_pb2.RouteReply) -> str:
    head = ("node", "prefix", "in DRAM", "bytes", "of keys", "to bring, ms", "DRAM full", "leases", "")
    rows = [
        (
            peer_text(row.name) or "(this node)",
            row.prefix_chunks,
            row.prefix_dram_chunks,
            size(row.prefix_bytes),
            row.chunks,
            f"{row.cost_ms:,.1f}",
            f"{row.resident_share:.0%}",
            f"{row.leases:.0f}",
            _remarks(row),
        )
        for row in reply.nodes
    ]
    if not reply.keys:
        return "no chunk to look for: fewer tokens than a chunk has"
    return f"{table(head, rows)}\n{reply.keys:,} keys; registry: {reply.registry}"


def _remarks(row: Any) -> str:
    told = (("here", row.here), ("draining", row.draining), ("unreachable", not row.reachable))
    return ", ".join(word for word, holds in told if holds)


def fleet(client: Client, options: argparse.Namespace) -> int:
    if options.action == "drain":
        return _drain(client, options)
    refuse_unused(options, "stop", "wait", "bytes_max", remedy="it is for drain: leave it out")
    if options.node:
        raise BadRequest(f"{options.action} shows all nodes", field="NODE", value=options.node)
    shown = 0
    while True:
        reply = ask_fleet(client, "ListNodes", fleet_pb2.ListNodesRequest())
        status = show(options, reply, lambda reply=reply: _nodes(reply))  # type: ignore[misc]
        shown += 1
        if options.action == "stats" or (options.count and shown >= options.count):
            return status
        time.sleep(options.interval)


def _nodes(reply: fleet_pb2.ListNodesReply) -> str:
    head = (
        *(
            "node",
            "address",
            "chunks",
            "DRAM",
            "full",
            "sessions",
            "leases",
            "sent",
            "received",
            "read at",
            "",
        ),
    )
    rows = []
    for row in reply.nodes:
        load = row.load
        dram = load.get("dram_bytes", 0.0)
        rows.append(
            (
                peer_text(row.name),
                peer_text(row.address) or "-",
                row.known_chunks,
                size(dram),
                f"{load.get('resident_bytes', 0.0) / max(1.0, dram):.0%}",
                f"{load.get('sessions', 0.0):,.0f}",
                f"{load.get('leases', 0.0):,.0f}",
                size(load.get("peer_bytes_sent", 0.0)),
                size(load.get("peer_bytes_received", 0.0)),
                f"{size(row.bytes_per_s)}/s" if row.bytes_per_s else "-",
                _remarks(row),
            )
        )
    why = f": {peer_text(reply.why)}" if reply.why else ""
    return f"{table(head, rows)}\n{len(reply.nodes)} nodes; registry {reply.registry}{why}"


def _drain(client: Client, options: argparse.Namespace) -> int:
    if not options.node:
        raise BadRequest("is missing", field="NODE", value="", remedy="kvctl fleet stats names the nodes")
    if options.stop:
        refuse_unused(options, "wait", "bytes_max", remedy="nothing is offered after --stop: leave it out")
    request = fleet_pb2.DrainRequest(node=options.node, stop=options.stop, bytes_max=options.bytes_max)
    ask_fleet(client, "Drain", request)
    if options.stop or not options.wait:
        if options.json:
            say_json({"node": options.node, "stop": options.stop})
        else:
            what = (
                "takes part again"
                if options.stop
                else "is asked to drain; kvctl fleet top shows how far it is"
            )
            say(f"{options.node} {what}")
        return 0
    began = time.monotonic()
    while True:
        row = _node(client, options.node)
        started = row is not None and row.draining
        if row is not None and started and not row.load.get("drain_running", 0.0):
            break
        if not started and time.monotonic() - began > DRAIN_STARTS_S:
            raise DeadlineExceeded(
                f"{options.node} did not follow the order", remedy="look whether it runs: kvctl fleet stats"
            )
        time.sleep(POLL_S)
    chunks, taken = row.load.get("drain_chunks", 0.0), row.load.get("drain_taken", 0.0)
    if options.json:
        say_json(plain(row))
    else:
        say(f"{options.node}: of {chunks:,.0f} chunks in DRAM {taken:,.0f} are at other nodes now")
        note("kvctl: it may be stopped; routers pass it by until fleet drain --stop")
    return 0


def _node(client: Client, wanted: str) -> Any:
    reply = ask_fleet(client, "ListNodes", fleet_pb2.ListNodesRequest())
    return next((row for row in reply.nodes if row.name == wanted), None)


def _route_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="which one, if workers have opened several")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--session", type=session_name, metavar="NAME", help="of this node")
    what.add_argument("--key", type=key, action="append", metavar="HEX", help="chunk keys in chain order")
    what.add_argument("--tokens", type=token_ids, metavar="IDS", help="the prompt's token ids, with commas")


def _fleet_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("stats", "top", "drain"))
    parser.add_argument("node", nargs="?", default="", metavar="NODE", help="to drain")
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help="of top")
    parser.add_argument("--count", type=number, default=0, metavar="N", help="frames of top; 0: until ended")
    parser.add_argument("--stop", action="store_true", help="drain: it takes part again")
    parser.add_argument("--wait", action="store_true", help="drain: until all was offered")
    parser.add_argument(
        "--bytes-max",
        type=byte_size,
        default=0,
        metavar="SIZE",
        help="drain: offered at most (default: all of DRAM)",
    )


COMMANDS = (
    Command(
        "route",
        "which nodes hold how much of a prompt, and what it costs each to have the rest",
        run=route,
        arguments=_route_arguments,
    ),
    Command(
        "fleet",
        "the nodes and their load (stats, top); have one offer its chunks to the others (drain NODE)",
        run=fleet,
        arguments=_fleet_arguments,
    ),
)
