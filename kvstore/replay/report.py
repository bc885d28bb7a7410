"""Results as rows, tables, plots and pages. matplotlib is imported only where something is drawn."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import BadRequest
from kvstore.replay.engine import Served
from kvstore.replay.machine import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
Lines = Mapping[str, Sequence[tuple[float, float]]]


def as_row(result: Result, chunk_bytes: int, served: Served | None = None) -> dict[str, Any]:
    """Everything that is told of one replay: rates between 0 and 1, sizes in bytes, times in seconds, dollars."""
    row: dict[str, Any] = {
        "trace": result.trace,
        "policy": result.policy,
        "look_ahead": result.look_ahead,
        "dram_bytes": result.dram_chunks * chunk_bytes,
        "ssd_bytes": result.ssd_chunks * chunk_bytes,
        "turns": result.turns,
        "hit_rate": result.hit_rate,
        "hit_rate_hbm": _share(result.hits_hbm, result.chunks),
        "hit_rate_dram": _share(result.hits_dram, result.chunks),
        "hit_rate_ssd": _share(result.hits_ssd, result.chunks),
        "token_hit_rate": result.token_hit_rate,
        "session_hit_rate": result.session_hit_rate,
        "dram_share_of_hits": result.dram_share,
        "ssd_wait_mean_s": _share(result.waited_ms, result.turns) / 1000,
        "ssd_bytes_read": result.ssd_bytes_read,
        "ssd_bytes_written": result.ssd_bytes_written,
    }
    if served is not None:
        late = sum(chunks for _, chunks, _ in served.late)
        row |= {
            "first_token_mean_s": served.first_token_mean_s,
            "first_token_p95_s": served.first_token_percentile_s(0.95),
            "dram_share_foreseen": _share(served.hits_foreseen_dram, served.hits_foreseen),
            "late_share": late / max(1, result.hits_dram + result.hits_ssd),
            "late_unforeseen": _share(sum(n for _, n, foreseen in served.late if not foreseen), late),
            "late_ssd_busy": _share(served.late_foreseen_busy, late),
            "queued_mean_s": served.queued_s,
            "gpu_hours": served.gpu_s / 3600,
            "prefill_hours": served.prefill_s / 3600,
            "bytes_loaded": served.bytes_loaded,
            "cost": served.cost.total,
            "cost_storage_share": served.cost.storage_share,
        }
    return row


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ------------------------------------------------------------------------------------------------------------- plots


def check_plots(option: str, path: str) -> None:
    """Raises BadRequest, which names the option, where nothing can be drawn."""
    try:
        _figure(1.0, 1.0)
    except BadRequest as problem:
        raise BadRequest(problem.message, field=f"--{option}", value=path, remedy=problem.remedy) from None


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest(
            "needs matplotlib", field="plot", value="PNG", remedy="pip install 'attnstore[simulate]'"
        ) from None
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def line_plot(title: str, x: str, y: str, lines: Lines, *, log_x: bool = False) -> Figure:
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    for number, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", label=name, color=COLOURS[number % len(COLOURS)])
    if log_x:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def bar_plot(title: str, y: str, groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """Groups of bars; the same names in each."""
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(groups))]
        heights = [group.get(name, 0.0) for group in groups.values()]
        bars = axes.bar(places, heights, width, label=name, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, fmt="%.2f", fontsize=6)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(title=title, ylabel=y)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def png(figure: Figure) -> bytes:
    """Without a date or a version inside: the same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def page(title: str, rows: Sequence[Mapping[str, Any]], figures: Sequence[Figure]) -> str:
    """One HTML file that needs nothing else: tables and plots."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    cells = "".join(f"<th>{html.escape(head.replace('_', ' '))}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(head, '')))}</td>" for head in heads) + "</tr>"
        for row in rows
    )
    plots = "".join(
        f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(png(figure)).decode()}">'
        for figure in figures
    )
    style = (
        "body{font:14px sans-serif} table{border-collapse:collapse} td,th{border:1px solid #ccc;padding:4px}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{plots}"
        f"<table><tr>{cells}</tr>{body}</table></html>\n"
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(path: str | Path, content: bytes | str) -> None:
    """Raises OSError."""
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
