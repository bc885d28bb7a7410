"""What the figures of a run should be; `Row`s as the sections give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness import Goal

from gpu.section import Row, Setting

ROOFLINE_SHARE = 0.85
"""Of the faster of two rates, at which the card reads and copies, as measured in the same run, while sequences have
tokens of their own."""
ALL_SHARED_US = 40
"""Of a step in which all tokens are shared: too little for the rate to count."""
LINK_SHARE = 0.9
HIDDEN = 1.05
HIDEABLE = 0.8
"""A load that takes more of the turn than this cannot be hidden behind it."""
BESIDE_SAVES = 1.03


def goals_of(on: Setting, rows: Sequence[Row]) -> list[Goal]:
    return [goal for row in rows if "error" not in row for goal in _goals(on, row)]


def _goals(on: Setting, row: Row) -> Iterator[Goal]:
    what = f"{row['section']}, {row['what']}"
    if row.get("kv_heads") == on.heads and row["tokens"] == on.points[0][0]:
        if row["shared"] == row["tokens"]:
            yield Goal(what, row["us"], "us", ALL_SHARED_US, "<=")
        elif "of_roofline" in row:
            yield Goal(f"{what}: of the roofline", row["of_roofline"], "ratio", ROOFLINE_SHARE, ">=")
    if "registered_of_link" in row:
        yield Goal(f"{what}: of the link", row["registered_of_link"], "ratio", LINK_SHARE, ">=")
    if "over_kept" in row and row["load_over_kept"] <= HIDEABLE:
        yield Goal(f"{what}: loaded against kept", row["over_kept"], "ratio", HIDDEN, "<=")
    if "behind" in row:
        yield Goal(f"{what}: with saving against without", row["behind"], "ratio", BESIDE_SAVES, "<=")
