"""Writes docs/performance.md out of the reports in benchmarks/results/: every table of a report is exactly its JSON.
The page ends with benchmarks/limits.md: what limits what, and what was tried.

A report is called BENCH-MACHINE.json, or BENCH.json. Those of benchmarks that have no words here yet get a plain table.

    make bench-docs
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

Report = Mapping[str, Any]
Row = Mapping[str, Any]

START = """\
# How fast it is, and where the time goes

Written by `make bench-docs` out of the reports in `benchmarks/results/`: change `benchmarks/performance.py`, or measure
again, rather than edit this page. `benchmarks/README.md` says which benchmark answers which question.

Ratios of one run mean more than times: what is compared took turns in that run, so that a machine whose speed drifts
favours nobody. Figures are medians, and so are ratios: of the rounds of a run, so they are not always the quotient of
the speeds beside them. "×" is "times as fast as". A goal that is **missed** stays here until it is met; what limits it
is said below its table, or in the last section, whose text is `benchmarks/limits.md`.
"""


@dataclass(frozen=True)
class Section:
    """What a benchmark has on the page beside its goals and tables; its question is the beginning of its docstring."""

    title: str
    after: str = ""
    """What limits it, or how to read it."""
    tables: Callable[[Report], Iterator[str]] | None = None
    """None: all rows, in one table for each kind of row."""
    columns: Sequence[str] = ()
    """Of them; none named: all."""


def main() -> int:
    (ROOT / "docs/performance.md").write_text(whole_page())
    return 0


def whole_page() -> str:
    limits = (ROOT / "benchmarks/limits.md").read_text()
    return page(reports(ROOT / "benchmarks/results")) + "\n" + limits


def reports(folder: Path) -> list[tuple[str, Report]]:
    """(benchmark, report), in the order of SECTIONS."""
    found = [
        (file.stem.partition("-")[0], json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))
    ]
    order = list(SECTIONS)
    return sorted(found, key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def page(found: Sequence[tuple[str, Report]]) -> str:
    parts = [START]
    for bench, report in found:
        section = SECTIONS.get(bench, Section(f"`{bench}`"))
        parts += [f"## {section.title}\n", question(bench), f"{told(bench, report)}\n"]
        if report["goals"]:
            parts.append(table(["goal", "measured", "wanted", ""], list(map(goal_cells, report["goals"]))))
        parts += section.tables(report) if section.tables else plain(report, section.columns)
        if section.after:
            parts.append(section.after.strip() + "\n")
    return "\n".join(part for part in parts if part)


def question(bench: str) -> str:
    """The first paragraph of the benchmark's docstring."""
    file = ROOT / "benchmarks" / f"{bench}.py"
    words = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    return (words or "").partition("\n\n")[0] + "\n" if words else ""


def told(bench: str, report: Report) -> str:
    on = report["machine"]
    return (
        f"`make bench-{bench}`, commit {report['commit']}: {on['cpu']}, {on['cores']} cores, kernel {on['kernel']}, "
        f"Python {on['python']}, load {on['load']:g}."
    )


def goal_cells(goal: Row) -> list[str]:
    wanted = f"{'≥' if goal['direction'] == '>=' else '≤'} {goal['goal']:g}"
    return [
        goal["name"],
        f"{number(goal['value'])} {goal['unit']}",
        wanted,
        "met" if goal["met"] else "**missed**",
    ]


def plain(report: Report, columns: Sequence[str] = ()) -> Iterator[str]:
    """A table for each run of rows that have the same fields."""
    for fields, rows in itertools.groupby(report["results"], key=lambda row: tuple(row)):
        names = [name for name in fields if not columns or name in columns]
        heads = [name.replace("_", " ").replace("gb per s", "GB/s") for name in names]
        yield table(heads, [[cell(row[name]) for name in names] for row in rows])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers are set to the right."""
    if not rows:
        return ""
    columns = list(zip(*rows, strict=True))
    ruler = [
        "--:" if all(not text or text[0] in "-0123456789" for text in column) else "---" for column in columns
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows)) + "\n"


def cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float() | int():
            return number(value)
        case dict() | list():
            return json.dumps(value)
    return str(value)


def number(value: float) -> str:
    """Three significant digits, or all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------ data_plane


SEVERAL_RUNS = """\
The rows are of several runs. `× memcpy` and "`sealed` is" compare within the row's own run, whose commit the row names:
go by these ratios. Speeds in GB/s, also in the tables further down, are not comparable from one run to another.
"""


def data_plane(report: Report) -> Iterator[str]:
    from data_plane import SIZES, STORES

    if any("commit" in row for row in report["results"]):
        yield SEVERAL_RUNS
    rows: dict[tuple[Any, ...], Row] = {
        tuple(row[name] for name in report["key"]): {"commit": report["commit"], **row}
        for row in report["results"]
    }
    # Another way to put has a row beside the others
    rows |= {(*key[:3], "fill", "put"): row for key, row in rows.items() if key[3:] == ("sealed", "fill")}
    order = [*STORES]
    after = order.index("group") + 1
    order[after:after] = ["fill"]
    stores = sorted({key[3] for key in rows}, key=order.index)
    for action in ("get", "put"):
        yield f"### {action}: 2 MiB in batches of 16, one client\n"
        heads = [
            "",
            "GB/s",
            "× memcpy",
            "`sealed` is",
            "ms p50",
            "p99",
            "CPU s/GB, client",
            "server",
            "commit",
        ]
        names = (
            "gb_per_s",
            "of_memcpy",
            "sealed_over_it",
            "p50_ms",
            "p99_ms",
            "client_cpu_s_per_gb",
            "server_cpu_s_per_gb",
            "commit",
        )
        found = {store: rows.get(("2M", 16, 1, store, action)) for store in stores}
        yield table(heads, [[store, *cells(row, names)] for store, row in found.items() if row])
    for clients, action in itertools.product((1, 4), ("get", "put")):
        shapes = sorted(
            {key[:2] for key in rows if key[2] == clients}, key=lambda shape: (SIZES[shape[0]], shape[1])
        )
        if shapes:
            yield f"### {action}, {'one client' if clients == 1 else f'{clients} clients at a time'}: GB/s\n"
            heads = ["", *(f"{size[:-1]} {size[-1]}iB × {batch}" for size, batch in shapes)]
            of = {store: [rows.get((*shape, clients, store, action)) for shape in shapes] for store in stores}
            yield table(
                heads,
                [[s, *(cells(row, ["gb_per_s"])[0] for row in each)] for s, each in of.items() if any(each)],
            )
    yield "### What each of them is\n"
    yield table(["", "gives"], [[store, gives(store)] for store in stores if store in STORES])


def cells(row: Row | None, names: Sequence[str]) -> list[str]:
    return [cell((row or {}).get(name)) for name in names]


def gives(store: str) -> str:
    from data_plane import STORES

    said: str = importlib.import_module(f"peers.{STORES[store][0]}").GIVES
    return said


# ----------------------------------------------------------------------------------------------------------- scale


def scale(report: Report) -> Iterator[str]:
    """One table for each part, with a column for each number of chunks or sessions."""
    for part, title, across in (
        ("core", "The core, by chunks", "chunks"),
        ("sessions", "Sessions, by their number", "sessions"),
        ("daemon", "A daemon after a restart, by chunks", "chunks"),
    ):
        rows = [row for row in report["results"] if row["part"] == part]
        if not rows:
            continue
        counts = sorted({row[across] for row in rows})
        # "longest step (Reserve)": which it was differs from size to size
        found = {(row["what"].partition(" (")[0], row["unit"], row[across]): row for row in rows}
        lines = [
            [f"{what}, {unit}", *(timed(found.get((what, unit, count))) for count in counts)]
            for what, unit in dict.fromkeys(key[:2] for key in found)
        ]
        yield f"### {title}\n"
        yield "p50, and p99 in brackets where there are many of a kind.\n"
        yield table(["", *(f"{count:,}" for count in counts)], lines)


def timed(row: Row | None) -> str:
    if row is None:
        return ""
    which = row["what"].partition(" (")[2].rstrip(")")
    beside = number(row["p99"]) if row.get("p99") is not None else which
    return number(row["p50"]) + (f" ({beside})" if beside else "")


DATA_PLANE = """\
`sealed` and `group` are our daemon under its two protections, `tcp` is the same over loopback TCP, for callers on
other machines. "`sealed` is" tells how many times as fast as the others it is. What the rows have in common: bytes
begin and end in arrays of the caller; keys are known before the clock starts; every put has a key of its own.

The machine is shared, and how fast memory is differs from run to run: in five runs within an hour memcpy moved 8 to 15
GB/s at 2 MiB × 16, and the shares of it that batches of 2 MiB reached were 0.66 to 1.02 (get), 0.23 to 0.56 (put,
`group`) and 0.20 to 0.42 (put, `sealed`). Those above are of one of these runs.

* **What a get costs.** One message pair and one copy, out of the slot into the caller's array. The copy runs at about
  memcpy's speed, though shared memory lies in pages of 4 KiB here (`kvstore/memory.py` says how). So at 2 MiB a get
  is mostly that copy; at 256 KiB and below most of it is the message pair and the two changes of process in it, which
  only larger batches spread over more bytes. memcpy is also flattered where a batch fits in the cache: at 256 KiB ×
  16, 4 MiB.
* **What a put costs.** Two message pairs, one to reserve and one to commit. Under `group` one copy into the slot by
  the caller, who makes the checksum too, while the bytes are in its cache. Under `sealed` a copy into staging memory,
  then the daemon's copy into the slot, hashed while it is in the cache. One core nearly fills this machine's memory
  by itself, so what counts is how often bytes cross it, not how many threads move them: twice means half of memcpy at
  the very best.
* **`fill`** saves out of memory of the engine's own that the daemon has adopted: the engine copies nothing, and pays
  the least of its CPU; the daemon reads by pread, which is slower than memcpy at pages of 4 KiB.
* **Sockets** (Redis, memcached, Mooncake, `tcp`) take every byte through the kernel, in by one copy and out by
  another, and put both processes to sleep in between: see the CPU seconds. Most of `tcp`'s are gRPC's own threads. A
  client library of Python then makes an object of each value, and its user copies that once more; "bare" rows leave
  that out: the protocol, spoken by hand straight from and into the arrays. They are what is left to gain there, not
  what users of these libraries have.
* **Files in memory** are read by one copy, and written into fresh pages, which the kernel clears first. There is no
  eviction and no promise about readers, and the first reader of a mapped file (safetensors) pays for its page faults.
* **LMCache** gathers the pages of an engine's KV into its memory and scatters them back, page by page and layer by
  layer, as it does for engines; its puts are fast only while evicting keeps up.

### Where the time goes

![flame graphs of a get and of a put, of the client and of the daemon](profile.svg)

`make bench-flame`: 16 values of 2 MiB; the daemon's panels leave out what waits for work. Wide `memory.copy` is bytes
being copied; `_read` in the client is waiting for the daemon's answer, and `_write` and `_flush` are mostly the kernel
waking the other process up.
"""

SECTIONS: dict[str, Section] = {
    "data_plane": Section("Bytes: put and get, beside other stores", DATA_PLANE, data_plane),
    "control": Section(
        "Messages",
        "An empty pair is what two processes cost that wake each other through a socket; the rest is the daemon's "
        "work. The daemon has one loop, so requests a second end where that has a core for itself.",
    ),
    "scale": Section(
        "From 10,000 to 4,000,000 chunks",
        "What grows is the time of a cache miss, not the number of steps: columns and dictionaries no longer fit in\n"
        "the caches. The request that took the longest step is named in brackets.",
        scale,
    ),
    "ssd": Section(
        "The SSD tier, beside fio",
        "The disk is a virtual one: what it says about syncs says nothing about power cuts. Buffered figures depend\n"
        "on how much the host has in its own cache. `of fio` is the median of the rounds' ratios, a goal the mean of\n"
        "sequential and random; with two rounds both move by 0.2 from one run to the next.",
    ),
    "hung_disk": Section("A disk that hangs"),
    "remote": Section(
        "The REMOTE tier beside the bare client",
        "Server, tier and client share one core, so a ratio is one of processor time: what the tier spends beside\n"
        "the client's is a checksum of all bytes, and signed a keyed hash as well. moto is slow, and its ratios say\n"
        "little of a store that is fast. Attackers had the other core.",
    ),
    "peer_reads": Section(
        "Reads from a peer's DRAM",
        "Both ends share one core. iperf3 sends one buffer that stays in the cache and looks at nothing. A loop of\n"
        "bare sockets moved 2.07 GB/s from and to such buffers, 1.81 from and to memory that is not in the cache, and\n"
        "1.41 with the checksum of what came: on one core this is the most that a peer's reads can reach.",
    ),
    "turns": Section(
        "The next turn of a conversation",
        "What is left beside `kept`, the same turn with its KV never let go, is the load, of which the copy is a part.",
    ),
    "overlap": Section(
        "Loading and saving beside computing",
        "`over_kept` is a turn whose history is loaded against the same turn whose history the pool has kept, `alone` "
        "the load by itself against the latter. In rows with a `link_share` each layer takes as long as on a link that "
        "needs so much of the kept turn for all of them.",
    ),
    "shared_prefix": Section(
        "Sequences that begin alike",
        "Two thirds of a shared step's processor time are what the model does beside attention, which sharing does not "
        "change: the fewer sequences and shared tokens, the less there is to win. The engine that shares nothing reads "
        "16 times the common KV, with the same kernels.",
    ),
    "attention_cpu": Section(
        "Attention over shared chunks, on a CPU",
        columns=(
            "kind",
            "shared",
            "new",
            "kv_heads",
            "shuffled",
            "ours_ms",
            "sdpa_ms",
            "gather_ms",
            "ours_speedup",
            "ours_cpu_speedup",
        ),
    ),
    "copy_kernels": Section("Copies between pages and chunks, and rotation"),
    "vllm_turns": Section("vLLM, with and without the store"),
    "vllm_lmcache": Section(
        "vLLM, our connector and LMCache's",
        "A first answer takes what the engine computes, with and without a store: that LMCache takes as long leaves "
        "nothing to win. A prompt that is restored takes what 8 tokens alone take, and the copy.",
    ),
    "vllm_pd": Section("vLLM, one engine computes prompts and another one answers"),
}


if __name__ == "__main__":
    sys.exit(main())
