"""Whatever the daemon counts has a line that says what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import measures
from kvstore.core.requests.saves import _COUNTED
from kvstore.types import DiskState

ROOT = Path(kvstore.__file__).parent
SPELLED = {
    "f'chunks_promoted_{how}'": ("chunks_promoted_ahead", "chunks_promoted_on_demand"),
    "f'reservations_{why}'": ("reservations_aborted", "reservations_expired"),
    "f'ssd_degraded_{to.name.lower()}'": tuple(
        f"ssd_degraded_{state.name.lower()}" for state in (DiskState.READ_ONLY, DiskState.OFF)
    ),
    "name": tuple(name for _, name in _COUNTED),
}
"""What is no plain text where it is counted."""


def names_of(key: ast.expr) -> Iterator[str]:
    match key:
        case ast.Constant(value=str(name)):
            yield name
        case ast.IfExp(body=body, orelse=other):
            yield from names_of(body)
            yield from names_of(other)
        case _:
            yield from SPELLED[ast.unparse(key)]


def counted_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="counters") | ast.Name(id="counters"), slice=key):
                yield from names_of(key)


def counted() -> set[str]:
    names = {name for path in (ROOT / "core").rglob("*.py") for name in counted_in(path)}
    fleet = {"client": "peer_reads", "server": "peer_serves", "registry": "registry"}
    for module, prefix in fleet.items():
        names |= {f"{prefix}_{name}" for name in counted_in(ROOT / "fleet" / f"{module}.py")}
    return names


def test_every_counter_has_a_meaning_and_no_meaning_is_left_over() -> None:
    assert counted() == set(measures.COUNTERS)


@pytest.mark.parametrize(
    "text", [*measures.COUNTERS.values(), *measures.GAUGES.values(), *measures.PATTERNS.values()]
)
def test_a_meaning_is_one_sentence_or_a_few_on_one_line(text: str) -> None:
    assert re.fullmatch(r"[0-9A-Z].*[.]", text), text
    assert "\n" not in text


def test_names_with_a_source_or_labels_in_them() -> None:
    assert "left alone" in measures.meaning("source_redis_well")
    assert "never" in measures.meaning("registry_forgets_read_ms_ago")
    assert measures.meaning("lookups{namespace=1,reason=evicted}")
    assert measures.meaning("nobody_counts_this") == ""


def gauges_named_by_a_source() -> set[str]:
    """f"source_{source.name}_well" and the like, with "x" for the name."""
    names = set()
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Subscript(slice=ast.JoinedStr(values=parts)):
                    texts = [part.value if isinstance(part, ast.Constant) else "x" for part in parts]
                    if texts[0] == "source_":
                        names.add("".join(texts))
    return names


def test_every_gauge_of_a_source_has_a_meaning() -> None:
    names = gauges_named_by_a_source()
    assert "source_x_well" in names
    assert [name for name in sorted(names) if not measures.meaning(name)] == []
