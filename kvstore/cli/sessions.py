"""`kvctl sessions`, `kvctl explain` and `kvctl forget`: conversations and their chunks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvstore.cli import objects
from kvstore.cli.command import EXIT_NOT_DURABLE, Command, ask_stats, key, number, session_name, show
from kvstore.cli.output import say, say_json
from kvstore.cli.tables import age, name, peer_text, plain, size, table, word
from kvstore.client import Client
from kvstore.errors import NotFound
from kvstore.types import MAKER_BYTES, ActionKind, Outcome, Reason, Tier
from kvstore.v1 import hints_pb2, stats_pb2, store_pb2, store_pb2_grpc

HINTED = {
    ActionKind.PREFETCH: "prefetched",
    ActionKind.DEMOTE: "demoted",
    ActionKind.PIN: "pinned",
    ActionKind.RETAIN: "retained",
    ActionKind.EXPECT: "expected",
}


def sessions(client: Client, options: argparse.Namespace) -> int:
    reply = listed(client, options.namespace, options.limit)
    return show(options, reply, lambda: _sessions_text(reply))


def _sessions_text(reply: stats_pb2.ListSessionsReply) -> str:
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
        "hints",
    )
    rows = [
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
            _hints(row.hints) or "-",
        )
        for row in reply.rows
    ]
    return f"{table(head, rows)}\n{len(reply.rows):,} of {reply.total:,} sessions"


def explain(client: Client, options: argparse.Namespace) -> int:
    asked = [
        stats_pb2.ExplainRequest(namespace_id=namespace, session=options.session or b"", keys=options.key)
        for namespace in _where(client, options)
    ]
    replies = [(ask.namespace_id, ask_stats(client, "Explain", ask)) for ask in asked]
    if options.json:
        say_json([{"namespace_id": n, **plain(reply)} for n, reply in replies])
        return 0
    head = (
        "key",
        "found",
        "reason",
        "tier",
        "size",
        "last decision",
        "goes by",
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
    for namespace, reply in replies:
        version = f", version {reply.version}" if reply.version else ""
        say(f"namespace {namespace}{version}: {len(reply.chunks)} chunks")
        say(table(head, [_history(chunk) for chunk in reply.chunks]))
    return 0


def _history(chunk: stats_pb2.ChunkHistory) -> tuple[object, ...]:
    return (
        chunk.key.hex()[:16],
        word(Outcome, chunk.outcome),
        _reason(chunk.reason),
        " + ".join(tier.name for tier in Tier if chunk.tiers >> tier & 1) or "-",
        size(chunk.bytes) if chunk.tiers else "-",
        _decision(chunk),
        _standing(chunk.standing) if chunk.HasField("standing") else "-",
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


def _reason(value: int) -> str:
    return word(Reason, value).replace("_", " ") if value else "-"


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
    if chunk.resident_in:
        what += f", in HBM of {', '.join(name or 'a worker' for name in chunk.resident_in[:3])}"
    if chunk.hints:
        return f"{what}, {_hints(chunk.hints)}"
    return f"{what}, needed by the queue" if chunk.needed else what


def _standing(standing: stats_pb2.Standing) -> str:
    """What decides when it goes, with the figures that decide it."""
    match standing.rule:
        case "needed":
            before = f"queue: {standing.jobs_before} jobs before its own"
            if standing.jobs_before < standing.jobs_ahead:
                return f"{before}; prefetch window: {standing.jobs_ahead} jobs, {size(standing.ahead_bytes)}"
            return f"{before}; eviction window: {standing.jobs_kept} jobs, {size(standing.kept_bytes)}"
        case "worth":
            return f"{standing.worth:.3g} hits/h expected ({standing.kind}); next to go {standing.least_worth:.3g}"
        case "pinned":
            return "pinned: it stays"
        case rule:
            return rule


def _hints(states: Sequence[hints_pb2.HintState]) -> str:
    """What hint actions want of it, and for how long yet."""
    told = []
    for state in states:
        kind = ActionKind(state.kind)
        if kind is ActionKind.EXPECT and state.due_in_ms:
            told.append(f"expected in {age(state.due_in_ms)}")
        else:
            told.append(f"{HINTED[kind]} for {age(state.ends_in_ms)}")
    return ", ".join(told)


def forget(client: Client, options: argparse.Namespace) -> int:
    if options.file is not None:
        forgotten = objects.forget(client, options.file)
        count, why = int(forgotten), forgotten.not_durable
    else:
        count, why = _forget(client, options, _where(client, options, missing_ok=True))
    if options.json:
        say_json({"count": count, "durable": not why, "not_durable": why})
    else:
        say(
            f"{count} dropped" + (f", but a restart now could bring it back: {peer_text(why)}" if why else "")
        )
    return EXIT_NOT_DURABLE if why else 0


def _forget(client: Client, options: argparse.Namespace, numbers: Sequence[int]) -> tuple[int, str]:
    """How many were dropped, and why that is not durable. None of them has the session: it may be forgotten already,
    and not durably."""
    count, why = 0, ""
    for namespace in numbers or _all_namespaces(client):
        ask = store_pb2.ForgetRequest(
            namespace_id=namespace, session=options.session or b"", keys=options.key
        )
        reply = client.unary(store_pb2_grpc.StoreStub, "Forget", ask)
        count += reply.count
        why = why or reply.not_durable
    if not numbers and not count and not why:
        raise _no_such_session(options)
    return count, why


# ------------------------------------------------------------------------------------------------------------- helpers


def listed(client: Client, namespace: int, limit: int) -> stats_pb2.ListSessionsReply:
    """In as many requests as it takes: the daemon lists little at a time."""
    found = stats_pb2.ListSessionsReply()
    seen: set[tuple[int, bytes]] = set()
    skip = 0
    while True:
        ask = stats_pb2.ListSessionsRequest(namespace_id=namespace, limit=limit - len(found.rows), skip=skip)
        reply: stats_pb2.ListSessionsReply = ask_stats(client, "ListSessions", ask)
        found.total = reply.total
        skip += len(reply.rows)
        found.rows.extend(row for row in reply.rows if (row.namespace_id, row.session) not in seen)
        seen.update((row.namespace_id, row.session) for row in reply.rows)
        if not reply.rows or skip >= reply.total or len(found.rows) >= limit:
            return found


def _where(client: Client, options: argparse.Namespace, *, missing_ok: bool = False) -> list[int]:
    """The namespaces that are meant: the one that was named, else those that have the session, else (keys) all."""
    if options.namespace:
        return [options.namespace]
    if options.session:
        reply = ask_stats(client, "ListSessions", stats_pb2.ListSessionsRequest(session=options.session))
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
    rows = ask_stats(client, "ListNamespaces", stats_pb2.ListNamespacesRequest()).namespaces
    return [row.namespace_id for row in rows]


def _no_such_session(options: argparse.Namespace) -> NotFound:
    remedy = "see kvctl sessions"
    return NotFound("no such session", field="SESSION", value=name(options.session), remedy=remedy)


def _sessions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", type=number, default=0, metavar="ID")
    parser.add_argument("--limit", type=number, default=1000, metavar="N")


def _chunks_arguments(parser: argparse.ArgumentParser, *, file: bool = False) -> None:
    parser.add_argument("--namespace", type=number, default=0, metavar="ID")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "session",
        nargs="?",
        type=session_name,
        metavar="SESSION",
        help="its name, or hex:...; see kvctl sessions",
    )
    one.add_argument(
        "--key", action="append", type=key, default=[], metavar="HEX", help="of a chunk; may be given again"
    )
    if file:
        one.add_argument("--file", type=key, metavar="KEY", help="as put printed it")


def _forget_arguments(parser: argparse.ArgumentParser) -> None:
    _chunks_arguments(parser, file=True)


COMMANDS = (
    Command(
        "sessions",
        "one line per session, most recently used first",
        run=sessions,
        arguments=_sessions_arguments,
    ),
    Command(
        "explain",
        "the history of a session's chunks, or of single keys: where they are, or why not",
        run=explain,
        arguments=_chunks_arguments,
    ),
    Command(
        "forget",
        "drop a session and the chunks that nothing else names, single keys, or a file;"
        f" status {EXIT_NOT_DURABLE}: dropped, but a restart now could bring it back",
        run=forget,
        arguments=_forget_arguments,
    ),
)
