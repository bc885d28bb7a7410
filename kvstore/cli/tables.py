"""What a terminal shows (tables, sizes, times, names), and what a program reads instead."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from kvstore.errors import shorten
from kvstore.types import Outcome, Reason, Tier

TEXT_LETTERS_MAX = 2_048
"""Of one text: a peer must not flood a terminal."""
WORDS: dict[str, type[enum.IntEnum]] = {"outcome": Outcome, "reason": Reason}
"""Fields that hold a number of an enum of ours."""
SETS: dict[str, type[enum.IntEnum]] = {"tiers": Tier}
"""Fields that hold a set of them, a bit each."""


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


def rate(number: float) -> str:
    """Bytes a second, in at most eight letters: 1536 -> "1.5K", as tools for terminals write it."""
    for unit in ("", "K", "M", "G", "T"):
        if number < 1024 or unit == "T":
            break
        number /= 1024
    return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"


def count(number: float) -> str:
    """How many, in at most six letters: 1234 -> "1234", 123456 -> "123k"."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 10_000 or unit == "T":
            break
        number /= 1000
    return f"{number:.1f}{unit}" if 0 < number < 10 and number != int(number) else f"{number:.0f}{unit}"


def share(part: float | None, unit: str = " %") -> str:
    """0.831 -> "83.1 %"; None -> "-"."""
    return "-" if part is None else f"{100 * part:.1f}{unit}"


def counted(number: int, what: str) -> str:
    """1, "chunk" -> "1 chunk"; 1234, "chunk" -> "1,234 chunks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def name(session: bytes) -> str:
    """A session's name as it may be given on the command line again: text, or hex:... when it is none."""
    try:
        text = session.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    return text if text and text.isprintable() and not text.startswith("hex:") else f"hex:{session.hex()}"


def peer_text(text: str, limit: int = TEXT_LETTERS_MAX) -> str:
    """Text that came from a peer, without what a terminal might obey. Whole: names are given on the command line again,
    and the end of a reason tells it from others."""
    return "".join(letter if letter.isprintable() else "?" for letter in shorten(text, limit=limit))


def word(kind: type[enum.IntEnum], number: int) -> str:
    """The name of an enum's value, in small letters; the number itself where a newer daemon sends one that this
    version does not know."""
    try:
        return kind(number).name.lower()
    except ValueError:
        return str(number)


def words(kind: type[enum.IntEnum], bits: int) -> list[str]:
    """The names of the values whose bits are set."""
    return [word(kind, number) for number in range(bits.bit_length()) if bits >> number & 1]


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON would have it: every field, numbers as numbers (protobuf's own JSON makes large ones text),
    bytes in hexadecimal, values of enums as their names in small letters."""
    return {
        field.name: _field(field.name, getattr(message, field.name)) for field in message.DESCRIPTOR.fields
    }


def _field(name: str, value: Any) -> Any:
    if isinstance(value, int) and name in WORDS:
        return word(WORDS[name], value)
    if isinstance(value, int) and name in SETS:
        return words(SETS[name], value)
    return _plain(value)


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
