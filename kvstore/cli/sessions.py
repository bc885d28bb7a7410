"""`kvctl sessions`, `kvctl explain` and `kvctl forget`: conversations and their chunks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvstore.cli import objects
from kvstore.cli.command import EXIT_NOT_DURABLE, Command, ask_stats, key, number, session_name, show, some
from kvstore.cli.output import note, say, say_json
from kvstore.cli.tables import age, counted, name, peer_text, plain, size, table, word
from kvstore.client import Client
from kvstore.errors import NotFound
from kvstore.types import MAKER_BYTES, ActionKind, Outcome, Reason, Tier
from kvstore.v1 import hints_pb2, stats_pb2, store_pb2, store_pb2_grpc

NOT_FOR_GOOD = "but not for good yet, it could come back"
HINTED = {
    ActionKind.PREFETCH: "prefetched",
    ActionKind.DEMOTE: "demoted",
    ActionKind.PIN: "pinned",
    ActionKind.RETAIN: "retained",
    ActionKind.EXPECT: "expected",
}


def sessions(client: Client, options: argparse.Namespace) -> int:
    reply = listed(client, options.namespace, options.limit)
    if options.namespace and not reply.total and options.namespace not in _all_namespaces(client):
        raise _no_such_namespace(options)
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
    known = {chunk.key for _, reply in replies for chunk in reply.chunks if chunk.reason != Reason.NEVER_SEEN}
    unknown = [one for one in dict.fromkeys(options.key) if one not in known]
    if options.json:
        say_json([{"namespace_id": n, **plain(reply)} for n, reply in replies])
    else:
        _say_explained(replies)
    for one in unknown:
        note(f"kvctl: --key={one.hex()}: no such chunk is known here")
    return 1 if unknown else 0


def _say_explained(replies: Sequence[tuple[int, stats_pb2.ExplainReply]]) -> None:
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


def _history(chunk: stats_pb2.ChunkHistory) -> tuple[object, ...]:
    return (
        chunk.key.hex(),
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
    unknown: list[str] = []
    if options.file is not None:
        forgotten = objects.forget(client, options.file)
        count, why = int(forgotten), forgotten.not_durable
        what = f"{counted(count, 'chunk')} of the file"
        if not count and not why:
            unknown.append(options.file.hex())
    elif options.session:
        count, why, what = _forget_session(client, options)
    else:
        count, why = 0, ""
        numbers = _where(client, options)
        for one in dict.fromkeys(options.key):
            dropped, not_durable = _forget(client, numbers, keys=[one])
            count, why = count + dropped, why or not_durable
            if not dropped and not not_durable:
                unknown.append(one.hex())
        what = counted(count, "chunk")
    if options.json:
        say_json({"count": count, "durable": not why, "not_durable": why, "unknown": unknown})
    else:
        say(f"{what} dropped" + (f", {NOT_FOR_GOOD}: {peer_text(why)}" if why else ""))
    for each in unknown:
        field, kind = ("--key", "chunk") if options.key else ("--file", "file")
        note(f"kvctl: {field}={each}: no such {kind} is known here")
    if why:
        return EXIT_NOT_DURABLE
    return 1 if unknown else 0


def _forget_session(client: Client, options: argparse.Namespace) -> tuple[int, str, str]:
    """How many were dropped, why that is not for good, and what they were. Where no namespace has the session it may be
    forgotten already, and not durably."""
    having = _having(client, options)
    named = [options.namespace] if options.namespace else having
    count, why = _forget(client, named or _all_namespaces(client), session=options.session)
    if not having and not count and not why:
        raise _no_such_session(options)
    sessions = min(count, len(having))
    what = "the session" if sessions == 1 else counted(sessions, "session")
    return count, why, f"{what} and {counted(count - sessions, 'chunk')}"


def _forget(
    client: Client, numbers: Sequence[int], *, session: bytes = b"", keys: Sequence[bytes] = ()
) -> tuple[int, str]:
    """How many were dropped, and why that is not for good; "" if it is."""
    count, why = 0, ""
    for namespace in numbers:
        ask = store_pb2.ForgetRequest(namespace_id=namespace, session=session, keys=keys)
        reply = client.unary(store_pb2_grpc.StoreStub, "Forget", ask)
        count += reply.count
        why = why or reply.not_durable
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


def _where(client: Client, options: argparse.Namespace) -> list[int]:
    """The namespaces that are meant: those that have the session, or (keys) all; of them the one that was named, if one
    was. Raises NotFound."""
    if options.namespace and options.namespace not in _all_namespaces(client):
        raise _no_such_namespace(options)
    if options.namespace and not options.session:
        return [options.namespace]
    if options.session:
        found = _having(client, options)
        if not found:
            raise _no_such_session(options)
        return found
    numbers = _all_namespaces(client)
    if not numbers:
        raise NotFound("no namespace is open", field="--key", value=options.key[0])
    return numbers


def _having(client: Client, options: argparse.Namespace) -> list[int]:
    """The namespaces that have the session; of them the one that was named, if one was."""
    ask = stats_pb2.ListSessionsRequest(namespace_id=options.namespace, session=options.session)
    rows = ask_stats(client, "ListSessions", ask).rows
    return [
        row.namespace_id for row in rows if row.session == options.session
    ]  # an older daemon lists others


def _all_namespaces(client: Client) -> list[int]:
    rows = ask_stats(client, "ListNamespaces", stats_pb2.ListNamespacesRequest()).namespaces
    return [row.namespace_id for row in rows]


def _no_such_namespace(options: argparse.Namespace) -> NotFound:
    remedy = "see kvctl namespaces"
    return NotFound("no such namespace", field="--namespace", value=options.namespace, remedy=remedy)


def _no_such_session(options: argparse.Namespace) -> NotFound:
    remedy = "see kvctl sessions"
    return NotFound("no such session", field="SESSION", value=name(options.session), remedy=remedy)


def _sessions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", type=number, default=0, metavar="ID")
    parser.add_argument("--limit", type=some, default=1000, metavar="N")


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
        f" status 1: some of it is not known here; {EXIT_NOT_DURABLE}: dropped, but a restart now, or another node,"
        " could bring it back",
        run=forget,
        arguments=_forget_arguments,
    ),
)
