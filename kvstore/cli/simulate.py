"""`kvctl simulate` and `kvctl plan`: what would a store serve of a trace, and how large should it be? No daemon."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.command import Command, byte_size, number, some
from kvstore.cli.output import note, say, say_json
from kvstore.cli.tables import share, size, table
from kvstore.core.limits import EVICTION
from kvstore.errors import BadRequest
from kvstore.layout import SHARD_BYTES_MAX

if TYPE_CHECKING:
    from kvstore.replay.hardware import Hardware, Model
    from kvstore.replay.trace import Trace

COMPUTED_ANEW = "recompute"
"""In place of a policy, with --model: no store at all."""


def some_bytes(text: str) -> int:
    value = byte_size(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is no bytes at all")
    return value


ALL_TURNS = "all"
PROGRESS_S = 5.0
TURNS_MAX = 1 << 30
FAILURE_S_MAX = 1e12


def turns_known(text: str) -> int:
    """A look-ahead."""
    from kvstore.replay import WHOLE_FUTURE

    if text == ALL_TURNS:
        return WHOLE_FUTURE
    if not (text.isascii() and text.isdigit() and int(text) <= TURNS_MAX):
        raise argparse.ArgumentTypeError(
            f'{text} is neither "{ALL_TURNS}" nor a number from 0 to {TURNS_MAX}'
        )
    return int(text)


def _ahead(turns: int) -> str:
    from kvstore.replay import WHOLE_FUTURE

    return ALL_TURNS if turns == WHOLE_FUTURE else str(turns)


def rate(text: str) -> float:
    value = float(text)
    if not 1e-3 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.001 and 1e12")
    return value


def share_of(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a trace file, plain or compressed with zstd or gzip")
    parser.add_argument(
        "--format",
        required=True,
        metavar="NAME",
        help="mooncake, agentic, sharegpt, azure, lmcache or recorded (kvctl record)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="of the format's reader: sessions=9000, rate=1.0, seed=1, window=4096, chunk_tokens=256, ...",
    )
    parser.add_argument("--turns", type=some, default=0, metavar="N", help="only the first N turns")
    parser.add_argument("--warm-up", type=number, default=0, metavar="N", help="turns that do not count")
    parser.add_argument(
        "--model", metavar="NAME", help="llama-13b, llama-65b, llama-70b, falcon-40b, mistral-7b"
    )
    parser.add_argument(
        "--kv-bytes-per-token", type=some_bytes, metavar="BYTES", help="of another model (default: 128K)"
    )
    parser.add_argument(
        "--prefill-tokens-per-s", type=rate, metavar="N", help="of the engine, measured; else from the model"
    )
    parser.add_argument("--ssd-rate", type=some_bytes, metavar="BYTES", help="a second (default: 5 GB)")
    parser.add_argument(
        "--pcie-rate", type=some_bytes, metavar="BYTES", help="a second and GPU (default: 26 GB)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_arguments(parser)
    parser.add_argument(
        "--dram", type=some_bytes, nargs="+", default=[], metavar="BYTES", help="one or several sizes"
    )
    parser.add_argument("--ssd", type=byte_size, default=0, metavar="BYTES")
    parser.add_argument(
        "--hbm", type=byte_size, default=0, metavar="BYTES", help="the engine's own prefix cache"
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=[EVICTION],
        metavar="NAME",
        help="expected, hints, lru, fifo of the daemon; s3-fifo, gdsf, paper, belady as baselines; recompute",
    )
    parser.add_argument(
        "--look-ahead",
        type=turns_known,
        nargs="+",
        default=[0],
        metavar="N",
        help='turns that wait behind each, or "all"; with --engine the queue itself tells',
    )
    parser.add_argument(
        "--engine",
        action="store_true",
        help="with a serving engine around it: queue, time to first token, cost",
    )
    parser.add_argument("--plot", metavar="FILE", help="hit rate against DRAM as a PNG")
    parser.add_argument("--html", metavar="FILE", help="tables and plots as one page")


def _read(options: argparse.Namespace) -> tuple[Trace, Model, Hardware]:
    from kvstore.replay.hardware import MODELS, Hardware, Model
    from kvstore.replay.readers import read_trace

    if options.model and options.model not in MODELS:
        raise BadRequest(
            "no such model", field="--model", value=options.model, remedy="known: " + ", ".join(MODELS)
        )
    model = MODELS[options.model] if options.model else Model("other", 8e9, 131_072)
    if options.kv_bytes_per_token:
        model = dataclasses.replace(model, kv_bytes_per_token=options.kv_bytes_per_token)
    if options.prefill_tokens_per_s:
        model = model.faster(options.prefill_tokens_per_s)
    hardware = Hardware()
    if options.ssd_rate:
        hardware = dataclasses.replace(hardware, ssd_bytes_per_s=options.ssd_rate)
    if options.pcie_rate:
        hardware = dataclasses.replace(hardware, pcie_bytes_per_s=options.pcie_rate)
    settings = dict(options.option)
    if options.format == "sharegpt":
        settings.setdefault("window", model.window)
    trace = read_trace(options.trace, options.format, **settings)
    if options.turns:
        trace = trace.first(options.turns)
    if options.warm_up >= len(trace):
        raise BadRequest(
            f"leaves nothing to count: the trace has {len(trace):,} turns",
            field="--warm-up",
            value=options.warm_up,
        )
    return trace, model, hardware


def _check_chunk(model: Model, trace: Trace, dram: Sequence[int]) -> int:
    """Bytes of a chunk of the trace. Raises BadRequest where a DRAM of these sizes holds none."""
    chunk_bytes = model.kv_bytes_per_token * trace.chunk_tokens
    if chunk_bytes > SHARD_BYTES_MAX:
        raise BadRequest(
            f"makes chunks of {size(chunk_bytes)} ({trace.chunk_tokens:,} tokens); at most {size(SHARD_BYTES_MAX)}",
            field="--kv-bytes-per-token",
            value=model.kv_bytes_per_token,
            remedy="give less, or a smaller --option chunk_tokens",
        )
    for each in dram:
        if each < chunk_bytes:
            raise BadRequest(
                f"holds no chunk of {size(chunk_bytes)} ({trace.chunk_tokens:,} tokens)",
                field="--dram",
                value=each,
            )
    return chunk_bytes


def _check_outputs(**paths: str | None) -> None:
    """What cannot be written or drawn is told before the hours that lead there. Raises OSError, BadRequest."""
    for option, path in paths.items():
        if not path:
            continue
        from kvstore.replay.report import check_plots

        check_plots(option, path)
        existed = os.path.exists(path)
        with open(path, "ab"):
            pass
        if not existed:
            os.unlink(path)


def simulate(_: str, options: argparse.Namespace) -> int:
    from kvstore.core.policies import POLICIES
    from kvstore.replay.baselines import BASELINES, baseline
    from kvstore.replay.engine import serve
    from kvstore.replay.machine import replay
    from kvstore.replay.report import as_row, line_plot, page, png, write

    unknown = [name for name in options.policy if name not in (*POLICIES, *BASELINES, COMPUTED_ANEW)]
    if unknown:
        known = ", ".join(dict.fromkeys((*POLICIES, *BASELINES, COMPUTED_ANEW)))
        raise BadRequest("no such policy", field="--policy", value=unknown[0], remedy=f"known: {known}")
    fitting = [
        name
        for name in options.policy
        if (name in POLICIES or name == COMPUTED_ANEW if options.engine else name != COMPUTED_ANEW)
    ]
    for name in options.policy:
        if name not in fitting:
            why = "is a baseline, which no engine runs with" if options.engine else "needs --engine"
            note(f"kvctl: {name} {why}: left out")
    if not fitting:
        raise BadRequest(
            "no policy is left",
            field="--policy",
            value=" ".join(options.policy),
            remedy="leave --engine out" if options.engine else "add --engine",
        )
    _check_outputs(plot=options.plot, html=options.html)
    trace, model, hardware = _read(options)
    chunk_bytes = _check_chunk(model, trace, options.dram)
    rows: list[dict[str, Any]] = []
    for policy in fitting:
        for dram in options.dram or [1 << 37]:
            for look_ahead in options.look_ahead if not options.engine else [0]:
                dram_chunks, ssd_chunks = dram // chunk_bytes, options.ssd // chunk_bytes
                if options.engine:
                    served = serve(
                        trace,
                        model,
                        hardware=hardware,
                        dram_bytes=dram,
                        ssd_bytes=options.ssd,
                        hbm_bytes=options.hbm,
                        policy="lru" if policy == COMPUTED_ANEW else policy,
                        warm_up=options.warm_up,
                        store=policy != COMPUTED_ANEW,
                    )
                    rows.append(as_row(served.result, chunk_bytes, served) | {"policy": policy})
                elif policy in POLICIES:
                    result = replay(
                        trace,
                        dram_chunks=dram_chunks,
                        ssd_chunks=ssd_chunks,
                        hbm_chunks=options.hbm // chunk_bytes,
                        look_ahead=look_ahead,
                        policy=policy,
                        warm_up=options.warm_up,
                        chunk_bytes=chunk_bytes,
                        ssd_bytes_per_s=hardware.ssd_bytes_per_s,
                        ssd_latency_ms=hardware.ssd_latency_ms,
                    )
                    rows.append(as_row(result, chunk_bytes))
                else:
                    result = baseline(
                        trace,
                        policy,
                        dram_chunks=dram_chunks,
                        ssd_chunks=ssd_chunks,
                        look_ahead=look_ahead,
                        warm_up=options.warm_up,
                        chunk_bytes=chunk_bytes,
                    )
                    rows.append(as_row(result, chunk_bytes) | {"policy": policy})
    if options.plot or options.html:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = row["policy"] + (
                f", {_ahead(row['look_ahead'])} ahead" if row["look_ahead"] and not options.engine else ""
            )
            lines.setdefault(name, []).append((row["dram_bytes"] / (1 << 30), row["token_hit_rate"]))
        title = f"{trace.name}: tokens served, by GiB of DRAM"
        figure = line_plot(title, "DRAM, GiB", "share of prompt tokens", lines, log_x=True)
        if options.plot:
            write(options.plot, png(figure))
        if options.html:
            write(options.html, page(title, rows, [figure]))
    if options.json:
        say_json({"model": model.name, "chunk_bytes": chunk_bytes, "rows": rows})
    else:
        say(_as_table(rows, timed=options.engine))
    return 0


def _as_table(rows: list[dict[str, Any]], *, timed: bool) -> str:
    head = [
        "policy",
        "ahead",
        "DRAM",
        "SSD",
        "hits",
        "in HBM",
        "in DRAM",
        "on SSD",
        "tokens",
        "sessions",
        "SSD written",
    ]
    if timed:
        head += ["first token", "95th", "GPU hours", "cost"]
    lines: list[list[object]] = []
    for row in rows:
        line: list[object] = [
            row["policy"],
            _ahead(row["look_ahead"]),
            size(row["dram_bytes"]),
            size(row["ssd_bytes"]),
            *(share(row[name]) for name in ("hit_rate", "hit_rate_hbm", "hit_rate_dram", "hit_rate_ssd")),
            share(row["token_hit_rate"]),
            share(row["session_hit_rate"]),
            size(row["ssd_bytes_written"]),
        ]
        if timed:
            line += [f"{row['first_token_mean_s']:.3f} s", f"{row['first_token_p95_s']:.3f} s"]
            line += [f"{row['gpu_hours']:.2f}", f"${row['cost']:.2f}"]
        lines.append(line)
    return table(head, lines)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_arguments(parser)
    parser.add_argument(
        "--target",
        type=share_of,
        default=0.9,
        metavar="SHARE",
        help="of the tokens that an endless store would serve (default: 0.9)",
    )
    parser.add_argument("--policy", default=EVICTION, metavar="NAME")
    parser.add_argument(
        "--look-ahead",
        type=turns_known,
        default=0,
        metavar="N",
        help='turns that wait behind each, or "all"',
    )
    parser.add_argument("--plot", metavar="FILE", help="the curve as a PNG")


def plan(_: str, options: argparse.Namespace) -> int:
    from kvstore.core.policies import POLICIES
    from kvstore.replay.plan import plan as make_plan

    if options.policy not in POLICIES:
        raise BadRequest(
            "no such policy", field="--policy", value=options.policy, remedy="known: " + ", ".join(POLICIES)
        )
    _check_outputs(plot=options.plot)
    trace, model, hardware = _read(options)
    _check_chunk(model, trace, ())
    made = make_plan(
        trace,
        model,
        options.target,
        hardware=hardware,
        policy=options.policy,
        look_ahead=options.look_ahead,
        warm_up=options.warm_up,
    )
    if options.plot:
        from kvstore.replay.report import line_plot, png, write

        points = [(point.capacity_bytes / (1 << 30), point.hit_rate) for point in made.curve]
        title = f"{trace.name}, {model.name}: tokens served, by capacity"
        write(
            options.plot,
            png(line_plot(title, "GiB", "share of prompt tokens", {options.policy: points}, log_x=True)),
        )
    if options.json:
        say_json(
            dataclasses.asdict(made)
            | {
                "rcc_over_ccput": made.rcc_over_ccput,
                "loading_beats_recomputing": {"dram": made.loading.dram_wins, "ssd": made.loading.ssd_wins},
            }
        )
        return 0
    load = made.loading
    say(
        "\n".join(
            (
                f"{trace.name}, {len(trace):,} turns, {model.name} ({size(model.kv_bytes_per_token)} a token):",
                f"  an endless store serves {share(made.best)} of the prompts' tokens;"
                f" wanted {share(made.target)} of that",
                f"  DRAM {size(made.dram_bytes)}, SSD {size(made.ssd_bytes)}: {share(made.hit_rate)} of the tokens,"
                f" {share(made.dram_share)} of the hits in DRAM when asked for"
                + ("" if made.reached else "; THE TARGET IS NOT REACHED"),
                f"  it costs ${made.cost_per_hour:.2f} an hour and spares GPU time for ${made.gpu_saved_per_hour:.2f}",
                f"  {made.sessions_per_hour:,} distinct sessions an hour at most: CCpUT {size(made.ccput_bytes)},"
                f" needed {share(made.rcc_over_ccput)} of it",
                f"  1,000 tokens: computed in {1000 * load.recompute_s:.1f} ms, from DRAM {1000 * load.dram_s:.1f} ms,"
                f" from SSD {1000 * load.ssd_s:.1f} ms: loading "
                + ("pays from both" if load.ssd_wins and load.dram_wins else "")
                + ("pays from DRAM alone" if load.dram_wins and not load.ssd_wins else "")
                + ("does not pay" if not load.dram_wins else ""),
                table(
                    ["capacity", "tokens served", "of the best"],
                    [[size(p.capacity_bytes), share(p.hit_rate), share(p.share_of_best)] for p in made.curve],
                ),
            )
        )
    )
    return 0


class Progress:
    """Says on standard error, each few seconds, how far a replay of `turns` turns is."""

    def __init__(self, what: str, turns: int) -> None:
        self._what = what
        self._turns = turns
        self._told_at = time.monotonic()

    def __call__(self, turns: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_S:
            self._told_at = now
            note(f"{self._what}: {turns:,} of {self._turns:,} turns")


def simulate_fleet(_: str, options: argparse.Namespace) -> int:
    from kvstore.replay.fleet import Failure, simulate_fleet
    from kvstore.replay.plot import fleet_svg

    trace, model, hardware = _read(options)
    chunk_bytes = _check_chunk(model, trace, [options.dram])
    failures = [Failure(node, int(at_s * 1000), int(for_s * 1000)) for node, at_s, for_s in options.fail]
    rows = []
    alone = None
    sizes = [(1, "prefix", True, options.dram * max(options.nodes))] if options.compare else []
    sizes += [
        (nodes, routing, peers, options.dram)
        for nodes in options.nodes
        for routing in options.routing
        for peers in ((True, False) if options.without_peers else (True,))
    ]
    for place, (nodes, routing, peers, dram) in enumerate(sizes):
        what = f"{place + 1} of {len(sizes)}: {nodes} nodes, {routing}{'' if peers else ', no peers'}"
        result = simulate_fleet(
            trace,
            told=Progress(what, len(trace.turns)),
            nodes=nodes,
            routing=routing,
            peers=peers,
            failures=failures if nodes > 1 else (),
            dram_chunks=dram // chunk_bytes,
            ssd_chunks=options.ssd // chunk_bytes,
            chunk_bytes=chunk_bytes,
            ssd_bytes_per_s=hardware.ssd_bytes_per_s,
            network_bytes_per_s=options.network_rate,
        )
        alone = alone or (result if options.compare else None)
        row = dataclasses.asdict(result) | {"hit_rate": round(result.hit_rate, 4), "dram_bytes": dram}
        if alone is not None and alone.hits:
            row["of_one_node"] = round(result.hits / alone.hits, 4)
        rows.append(row)
    if options.plot:
        _write_plot(options.plot, fleet_svg(rows))
    if options.json:
        say_json(rows)
        return 0
    head = (
        *(
            "nodes",
            "DRAM each",
            "routing",
            "peers",
            "hits",
            "of one node",
            "from peers",
            "network",
            "registry",
        ),
        "commands/s",
    )
    say(
        table(
            head,
            [
                (
                    row["nodes"],
                    size(row["dram_bytes"]),
                    row["routing"],
                    "yes" if row["peers"] else "no",
                    f"{row['hit_rate']:.1%}",
                    f"{row['of_one_node']:.1%}" if "of_one_node" in row else "-",
                    f"{row['hits_peers'] / max(1, row['chunks']):.1%}",
                    f"{size(row['network_bytes_per_s'])}/s",
                    f"{size(row['registry_bytes_per_s'])}/s",
                    f"{row['registry_commands_per_s']:,.0f}",
                )
                for row in rows
            ],
        )
    )
    return 0


def _write_plot(path: str, svg: str) -> None:
    """Raises BadRequest."""
    try:
        Path(path).write_text(svg)
    except OSError as problem:
        raise BadRequest(
            f"cannot be written: {problem.strerror}", field="--plot", value=path, remedy="name another file"
        ) from None


def failure(text: str) -> tuple[int, float, float]:
    """NODE@SECONDS, or NODE@SECONDS+SECONDS."""
    try:
        node, _, when = text.partition("@")
        at_s, _, for_s = when.partition("+")
        found = int(node), float(at_s), float(for_s or 60.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not NODE@SECONDS or NODE@SECONDS+SECONDS") from None
    if not all(0 <= value <= FAILURE_S_MAX for value in found):  # nor is nan
        raise argparse.ArgumentTypeError(f"{text} has a number that is not between 0 and {FAILURE_S_MAX:g}")
    return found


def _fleet_arguments(parser: argparse.ArgumentParser) -> None:
    _trace_arguments(parser)
    parser.add_argument("--nodes", type=some, nargs="+", default=[3], metavar="N")
    parser.add_argument("--dram", type=some_bytes, required=True, metavar="BYTES", help="of each node")
    parser.add_argument("--ssd", type=byte_size, default=0, metavar="BYTES", help="of each node")
    parser.add_argument(
        "--routing", nargs="+", default=["prefix"], metavar="NAME", help="prefix, session, least, random"
    )
    parser.add_argument(
        "--network-rate", type=some_bytes, default=3_000_000_000, metavar="BYTES", help="a second and node"
    )
    parser.add_argument(
        "--without-peers", action="store_true", help="also as if nodes did not read from each other"
    )
    parser.add_argument("--compare", action="store_true", help="with one node that has all the memory")
    parser.add_argument("--plot", default="", metavar="FILE.svg", help="draw it, too")
    parser.add_argument(
        "--fail",
        type=failure,
        action="append",
        default=[],
        metavar="NODE@S[+S]",
        help="a node is gone from a time of the trace on, for a minute or so long; repeat",
    )


COMMANDS = (
    Command(
        "simulate",
        "replay a trace through the store's own decisions: hit rates, time to first token, bytes, cost; no daemon",
        run_alone=simulate,
        arguments=add_arguments,
    ),
    Command(
        "plan",
        "how much DRAM and SSD a workload needs for a hit rate, and whether loading beats recomputing; no daemon",
        run_alone=plan,
        arguments=add_plan_arguments,
    ),
    Command(
        "simulate-fleet",
        "what several nodes would serve of a trace: routing, reads from peers, failures, the registry's load",
        run_alone=simulate_fleet,
        arguments=_fleet_arguments,
    ),
)
