"""`kvctl stats` and `kvctl namespaces`: what the daemon holds, and what it did."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterable, Sequence

from kvstore import measures
from kvstore.cli.command import Command, ask_stats, refuse_unused, seconds, show
from kvstore.cli.output import say, say_json
from kvstore.cli.rates import Rates, rates
from kvstore.cli.tables import age, count, counted, peer_text, plain, rate, share, size, table
from kvstore.client import Client
from kvstore.v1 import stats_pb2, types_pb2

WATCH_S = 1.0
HEAD_EVERY = 20
"""Lines of a watch between two heads."""
TEXT_LETTERS = 200
"""Of a field of an identity, where what is cut alike is told apart."""
DIGEST_LETTERS = 16
"""Of a digest in hexadecimal, where that tells all that are shown apart."""


def stats(client: Client, options: argparse.Namespace) -> int:
    if options.watch:
        refuse_unused(
            options, "long", remedy="a line a tick has no room for it: leave out --watch, or --long"
        )
        return _watch(client, options)
    reply = _get(client)
    return show(options, reply, lambda: stats_text(reply, long=options.long))


def _get(client: Client) -> stats_pb2.StatsReply:
    reply: stats_pb2.StatsReply = ask_stats(client, "GetStats", stats_pb2.GetStatsRequest())
    return reply


def _watch(client: Client, options: argparse.Namespace) -> int:
    """One line a tick, for ever; the first is of the time since the daemon's start, as `vmstat` has it."""
    before: stats_pb2.StatsReply | None = None
    lines = 0
    while True:
        reply = _get(client)
        if options.json:
            say_json(plain(reply))
        else:
            if lines % HEAD_EVERY == 0:
                say(_cells(WATCH_HEAD))
            say(_cells(watch_row(rates(before, reply), reply)))
        before = reply
        lines += 1
        time.sleep(options.watch)


WATCH_HEAD = (
    "time",
    "look/s",
    "hit%",
    "dram%",
    "ssd%",
    "tok/s",
    "load/s",
    "save/s",
    "prom/s",
    "evict/s",
    "ssd",
)
WATCH_WIDTHS = (8, 6, 5, 5, 5, 6, 8, 8, 6, 7, 6)
"""With one blank between, no more than 80 columns."""


def watch_row(change: Rates, reply: stats_pb2.StatsReply) -> tuple[str, ...]:
    per_s = change.counters_per_s
    promoted = per_s.get("chunks_promoted_ahead", 0.0) + per_s.get("chunks_promoted_on_demand", 0.0)
    return (
        time.strftime("%H:%M:%S"),
        count(change.lookups / change.seconds),
        share(change.share(change.hits), unit=""),
        share(change.share(change.dram_hits), unit=""),
        share(change.share(change.ssd_hits), unit=""),
        count(change.tokens_reused_per_s),
        rate(change.bytes_loaded_per_s),
        rate(per_s["bytes_saved"]) if "bytes_saved" in per_s else "-",
        count(promoted) if per_s else "-",
        count(per_s.get("chunks_evicted", 0.0) + per_s.get("chunks_evicted_from_ssd", 0.0)) if per_s else "-",
        {"read_only": "rdonly", "absent": "-"}.get(reply.ssd.state, peer_text(reply.ssd.state)),
    )


def _cells(texts: Sequence[str]) -> str:
    return " ".join(text.rjust(width) for text, width in zip(texts, WATCH_WIDTHS, strict=True))


def stats_text(reply: stats_pb2.StatsReply, *, long: bool = False) -> str:
    """`long`: with what each number counts."""
    arena = reply.arena
    parts = [
        f"kvstored {peer_text(reply.version)}, up {age(reply.uptime_ms)}, boot {reply.boot_id.hex()[:8]}",
        f"arena {size(arena.bytes)} ({peer_text(arena.protection)}): ready {size(arena.ready_bytes)},"
        f" assigned {size(arena.assigned_bytes)}, retiring {size(arena.retiring_bytes)}",
        *_ssd_lines(reply),
        *_beyond_lines(reply),
        *_lookup_lines(reply),
    ]
    if any(row.dram_quota or row.ssd_quota or row.remote_quota for row in reply.tenants):
        parts += ["", _tenants_text(reply.tenants)]
    if reply.namespaces:
        parts += ["", namespaces_text(reply.namespaces)]
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
        meanings = {what: f": {measures.meaning(what)}" if long else "" for what, _ in numbers}
        parts += ["", "\n".join(f"{number:>12,.0f}  {what}{meanings[what]}" for what, number in numbers)]
    return "\n".join(parts)


def _tenants_text(rows: Iterable[stats_pb2.TenantStats]) -> str:
    """What each has in each tier, of how much it may have there."""

    def of(used: int, quota: int) -> str:
        return f"{size(used)} of {size(quota)}" if quota else size(used)

    cells = [
        (
            peer_text(row.tenant),
            of(row.dram_bytes, row.dram_quota),
            of(row.ssd_bytes, row.ssd_quota),
            of(row.remote_bytes, row.remote_quota),
        )
        for row in rows
    ]
    return table(("tenant", "DRAM", "SSD", "REMOTE"), cells)


def _beyond_lines(reply: stats_pb2.StatsReply) -> list[str]:
    """The REMOTE store and the peers, where there are any."""
    gauges, counters = reply.gauges, reply.counters
    names = [
        name.removeprefix("source_").removesuffix("_well")
        for name in sorted(gauges)
        if name.startswith("source_") and name.endswith("_well")
    ]
    if not names:
        return []
    lines = [
        f"{peer_text(name)} {'well' if gauges[f'source_{name}_well'] else 'LEFT ALONE: it fails, or is late'},"
        f" {rate(gauges[f'source_{name}_bytes_per_s'])}/s of late"
        for name in names
    ]
    lines.append(
        f"    {counters['remote_keys_looked_up']:,} keys looked up, {counters['remote_keys_found']:,} found;"
        f" {counters['remote_chunks_fetched']:,} chunks came, {counters['remote_chunks_refused']:,} were refused,"
        f" {counters['remote_chunks_gone']:,} were gone"
    )
    if "remote_bytes_kept" in gauges:
        lines.append(
            f"    {counters['remote_chunks_stored']:,} chunks written ({size(int(gauges['remote_bytes_kept']))} kept),"
            f" {counters['remote_chunks_not_stored']:,} not; {gauges['remote_forgets_waiting']:,.0f} forgets to be told"
        )
    return lines


def _lookup_lines(reply: stats_pb2.StatsReply) -> list[str]:
    """Since the start: what was found of what was asked for, and why the rest was not."""
    ever = rates(None, reply)
    if not ever.lookups:
        return []
    lines = [
        f"{counted(ever.lookups, 'lookup')}: {counted(ever.hits, 'hit')} ({share(ever.share(ever.hits))}),"
        f" {sum(ever.pending.values()):,} pending, {sum(ever.misses.values()):,} missed"
    ]
    for what, reasons in (("pending", ever.pending), ("missed", ever.misses)):
        if reasons:
            told = (f"{times:,} {peer_text(reason).replace('_', ' ')}" for reason, times in reasons.items())
            lines.append(f"    {what}: {', '.join(told)}")
    return lines


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
        f" {ssd.to_forget:,} records to go from it, behind by {age(ssd.oldest_not_durable_ms)};"
        f" errors: {ssd.io_errors:,} I/O, {ssd.no_space:,} no space, {ssd.corrupt:,} corrupt",
        f"    hits: {hits - cold:,} in DRAM, {cold:,} on SSD"
        + (f" ({1 - cold / hits:.1%} in DRAM)" if hits else "")
        + f"; {size(ssd.free_bytes)} are free on its file system",
        *(
            f"    problem: {peer_text(problem.what)} ({peer_text(problem.remedy)})"
            for problem in ssd.problems
        ),
    ]
    if counters:  # an admin's
        lines.append(
            f"    prefetch: {counters['prefetch_on_time']:,} on time, {counters['prefetch_late']:,} late,"
            f" {counters['prefetch_wasted']:,} wasted; promoted: {counters['chunks_promoted_ahead']:,} ahead,"
            f" {counters['chunks_promoted_on_demand']:,} on demand"
        )
    return lines


# -------------------------------------------------------------------------------------------------------- namespaces


def namespaces(client: Client, options: argparse.Namespace) -> int:
    reply = ask_stats(client, "ListNamespaces", stats_pb2.ListNamespacesRequest())
    return show(
        options,
        reply,
        lambda: differences_text(reply.namespaces) if options.long else namespaces_text(reply.namespaces),
    )


def namespaces_text(rows: Sequence[stats_pb2.NamespaceStats]) -> str:
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


def differences_text(rows: Sequence[stats_pb2.NamespaceStats]) -> str:
    """The fields of their identity in which they differ, a column each; and below what all have in common."""
    if not rows:
        return "no namespace is open"
    fields = identities(rows)
    differing = [name for name, values in fields.items() if len(set(values)) > 1]
    head = ("id", "tenant", "model", *differing)
    shown = [
        (
            row.namespace_id,
            peer_text(row.tenant),
            peer_text(row.model),
            *(fields[name][number] for name in differing),
        )
        for number, row in enumerate(rows)
    ]
    common = [f"  {name}: {values[0]}" for name, values in fields.items() if name not in differing]
    title = "the same in all of them:" if len(rows) > 1 else "its identity:"
    return "\n".join([table(head, shown), "", title, *common])


def identities(rows: Sequence[stats_pb2.NamespaceStats]) -> dict[str, list[str]]:
    """Every field that makes KV comparable but tenant and model, with its value in each namespace. Two values read the
    same only if they are."""
    found: dict[str, list[str]] = {}
    for item in types_pb2.Namespace.DESCRIPTOR.fields:
        if item.name not in ("model", "groups"):
            values = [getattr(row.spec, item.name) for row in rows]
            found[item.name] = _apart([_shown(value) for value in values], [str(value) for value in values])
    groups = [[group.SerializeToString(deterministic=True) for group in row.spec.groups] for row in rows]
    texts = [" + ".join(map(_group_text, row.spec.groups)) for row in rows]
    found["groups"] = _apart(texts, list(map(str, groups)))
    return found


def _shown(value: object) -> str:
    text = value.hex()[:DIGEST_LETTERS] if isinstance(value, bytes) else peer_text(str(value), TEXT_LETTERS)
    return text or "-"


def _group_text(group: types_pb2.Group) -> str:
    layers = f", {len(group.layers)} layer slices" if group.layers else ""
    what = f"{peer_text(group.name)} ({peer_text(group.kind)}, {peer_text(group.position_rule)}{layers})"
    return f"{what}: {group.shard_count} x {size(group.shard_bytes)}"


def _apart(texts: list[str], values: list[str]) -> list[str]:
    """`texts`, as they are unless two of them are equal though their values are not: then each with a digest."""
    if len(set(texts)) == len(set(values)):
        return texts
    return [
        f"{text} #{hashlib.blake2b(value.encode(), digest_size=4).hexdigest()}"
        for text, value in zip(texts, values, strict=True)
    ]


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help="again and again, a line each time (default: 1)",
    )
    parser.add_argument("--long", action="store_true", help="with what each counter and gauge means")


def _namespaces_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--long", action="store_true", help="what makes their KV differ: digests, layout, parallel shape"
    )


COMMANDS = (
    Command("stats", "arena, pools, namespaces and counters", run=stats, arguments=_stats_arguments),
    Command("namespaces", "one line per namespace", run=namespaces, arguments=_namespaces_arguments),
)
