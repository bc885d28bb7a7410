"""Writes docs/performance.md out of the reports in benchmarks/results/: every table there is exactly its JSON.

A report is called BENCH-MACHINE.json, or BENCH.json. Those of benchmarks that have no words here yet get a plain table.

    make bench-docs
"""

from __future__ import annotations

import importlib
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
favours nobody. Figures are medians. "×" is "times as fast as".
"""


@dataclass(frozen=True)
class Section:
    title: str
    before: str
    """What is measured, and how to read it."""
    tables: Callable[[Report], Iterator[str]] | None = None
    """None: one table of all rows."""
    after: str = ""
    """What limits it."""
    order: int = 100


def main() -> int:
    (ROOT / "docs/performance.md").write_text(page(reports(ROOT / "benchmarks/results")))
    return 0


def reports(folder: Path) -> list[tuple[str, Report]]:
    """(benchmark, report), in the order of the page."""
    found = [
        (file.stem.partition("-")[0], json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))
    ]
    return sorted(found, key=lambda item: SECTIONS[item[0]].order if item[0] in SECTIONS else 1000)


def page(found: Sequence[tuple[str, Report]]) -> str:
    parts = [START]
    for bench, report in found:
        section = SECTIONS.get(bench, Section(f"`{bench}`", ""))
        parts.append(f"## {section.title}\n")
        if section.before:
            parts.append(section.before.strip() + "\n")
        parts.append(f"{told(bench, report)}\n")
        if report["goals"]:
            parts.append(table(["goal", "measured", "wanted", ""], list(map(goal_cells, report["goals"]))))
        parts += section.tables(report) if section.tables else [plain(report)]
        if section.after:
            parts.append(section.after.strip() + "\n")
    return "\n".join(parts)


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


def plain(report: Report) -> str:
    """All rows, one column for each of their fields."""
    names = list(dict.fromkeys(name for row in report["results"] for name in row))
    rows = [[cell(row.get(name)) for name in names] for row in report["results"]]
    return table([name.replace("_", " ") for name in names], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    ruler = ["---", *("--:" for _ in heads[1:])]
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


def data_plane(report: Report) -> Iterator[str]:
    rows = {(r["size"], r["batch"], r["clients"], r["store"], r["action"]): r for r in report["results"]}
    stores = list(dict.fromkeys(row["store"] for row in report["results"]))
    yield "### 2 MiB in batches of 16, one client\n"
    heads = ["", "get GB/s", "× memcpy", "ms p50", "p99", "CPU s/GB client + server"]
    heads += ["put GB/s", "× memcpy", "ms p50", "p99", "CPU s/GB client + server"]
    yield table(heads, [detail(rows, "2M", 16, store) for store in stores])
    for action in ("get", "put"):
        for clients in (1, 4):
            shapes = list(dict.fromkeys((k[0], k[1]) for k in rows if k[2] == clients))
            yield f"### {action}, {clients} client{'s at a time' if clients > 1 else ''}: GB/s\n"
            yield table(
                [
                    "",
                    *(
                        f"{size}iB × {batch}".replace("KiB", " KiB").replace("MiB", " MiB")
                        for size, batch in shapes
                    ),
                ],
                [
                    [
                        store,
                        *(
                            cell(rows.get((*shape, clients, store, action), {}).get("gb_per_s"))
                            for shape in shapes
                        ),
                    ]
                    for store in stores
                ],
            )
    yield "### What each of them is\n"
    yield table(["", "gives"], [[store, gives(store)] for store in stores])


def detail(rows: Mapping[tuple[Any, ...], Row], size: str, batch: int, store: str) -> list[str]:
    cells = [store]
    for action in ("get", "put"):
        row = rows.get((size, batch, 1, store, action), {})
        cells += [cell(row.get(name)) for name in ("gb_per_s", "of_memcpy", "p50_ms", "p99_ms")]
        both = [row.get(f"{side}_cpu_s_per_gb") for side in ("client", "server")]
        cells.append(" + ".join(map(cell, both)) if row else "")
    return cells


def gives(store: str) -> str:
    from data_plane import STORES

    said: str = importlib.import_module(f"peers.{STORES[store][0]}").GIVES
    return said


SECTIONS: dict[str, Section] = {}


if __name__ == "__main__":
    sys.exit(main())
