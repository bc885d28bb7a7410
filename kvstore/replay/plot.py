"""What a fleet's replays found, drawn as SVG: hits, network and the registry's load over the number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, GAP = 300, 200, 60
"""Of one panel, in pixels, and the space around it."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
PANELS = (
    ("hits, %", lambda row: 100.0 * row["hit_rate"]),
    ("network, MB/s", lambda row: row["network_bytes_per_s"] / 1e6),
    ("registry, commands/s", lambda row: row["registry_commands_per_s"]),
)


def fleet_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`: each with `nodes`, `routing`, `peers` and what PANELS look at. A line for each routing, with peers and
    without; what has one number of nodes is a point."""
    names = sorted({_name(row) for row in rows})
    parts = []
    for number, (title, value_of) in enumerate(PANELS):
        left = GAP + number * (WIDTH + GAP)
        parts += _panel(rows, names, title, value_of, left)
    for number, name in enumerate(names):
        y = GAP + HEIGHT + 44 + 16 * number
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{GAP}" y="{y - 9}" width="12" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{GAP + 18}" y="{y}">{escape(name)}</text>')
    width, height = GAP + len(PANELS) * (WIDTH + GAP), GAP + HEIGHT + 60 + 16 * len(names)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _name(row: Mapping[str, Any]) -> str:
    if row["nodes"] == 1:
        return "one node with all the memory"
    return f"{row['routing']}{'' if row['peers'] else ', without peers'}"


def _panel(
    rows: Sequence[Mapping[str, Any]], names: list[str], title: str, value_of: Any, left: int
) -> list[str]:
    nodes = sorted({int(row["nodes"]) for row in rows})
    top = max([1e-9, *(float(value_of(row)) for row in rows)])

    def x(count: int) -> float:
        return left + (nodes.index(count) + 0.5) * WIDTH / len(nodes)

    def y(value: float) -> float:
        return GAP + HEIGHT * (1 - value / top)

    parts = [
        f'<text x="{left}" y="{GAP - 12}">{escape(title)}</text>',
        f'<path d="M{left} {GAP} V{GAP + HEIGHT} H{left + WIDTH}" fill="none" stroke="black"/>',
        f'<text x="{left - 6}" y="{GAP + 4}" text-anchor="end">{top:.3g}</text>',
    ]
    parts += [
        f'<text x="{x(count):.1f}" y="{GAP + HEIGHT + 16}" text-anchor="middle">{count}</text>'
        for count in nodes
    ]
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        points = sorted((int(row["nodes"]), float(value_of(row))) for row in rows if _name(row) == name)
        line = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(c):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for c, v in points]
    return parts
