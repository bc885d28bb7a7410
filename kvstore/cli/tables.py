"""What a terminal shows (tables, sizes, times, names), and what a program reads instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from kvstore.errors import shorten


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need; numbers to the right."""
    texts = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    right = [bool(rows) and type(rows[0][column]) in (int, float) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in texts
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def size(number: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def age(milliseconds: int) -> str:
    """93784000 -> "1d 2h"."""
    seconds = milliseconds // 1000
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {seconds % 60}s" if minutes else f"{milliseconds / 1000:.1f}s"


def name(session: bytes) -> str:
    """A session's name as it may be given on the command line again: text, or hex:... when it is none."""
    try:
        text = session.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    return text if text and text.isprintable() and not text.startswith("hex:") else f"hex:{session.hex()}"


def peer_text(text: str) -> str:
    """Text that came from a peer, without what a terminal might obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in shorten(text, limit=40))


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON would have it: every field, numbers as numbers (protobuf's own JSON makes large ones text),
    bytes in hexadecimal."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in sorted(value.items())}
    return [_plain(item) for item in value]
