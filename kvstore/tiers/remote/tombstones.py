"""What was forgotten, for every node that reads the REMOTE store: which records it must not serve.

A store counts its forgets. Each forget raises the *count* and is kept under it, with a *head* drawn for it; a record
carries the count that its writer knew (`Description.generation`). A record is refused if something that it is about was
forgotten at a higher count: so what is computed and written again after a forget is served, what was written before it
is not, and no clock is compared with another one's. A writer that knew too little only has its record refused.

Whoever serves from the store reads the count after the records, and all forgets that it does not know before it serves
any of them. A store whose count is lower than what a node has seen, or which has another head for that count, is an
older copy that was put back, or was wiped: nothing of it is served before that node has read all that it has, and told
it every forget that it knows, at a count above all that it has seen.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.core.events import Heeded
from kvstore.keys import is_tenant_mark
from kvstore.tiers.remote.records import Description
from kvstore.types import MAKER_BYTES, ChunkKey

Forgotten = tuple[bytes, ChunkKey, bytes]
"""(digest of the namespace, key, maker): a maker alone; a maker for one tenant (then the key is the tenant's mark); all
of a namespace, or one key of it."""
EVERYTHING: Forgotten = (b"", ChunkKey(b""), b"")
"""What a node has missed, and nobody knows any more: all that it has, and all records of before that count, may have
been forgotten."""
DIGEST_BYTES = 32
NAME_BYTES = 16
"""Of a journal."""
_NO_DIGEST, _NO_MAKER = bytes(DIGEST_BYTES), bytes(MAKER_BYTES)
_LINE = struct.Struct("<QH")


def encode(forgotten: Forgotten) -> bytes:
    digest, key, maker = forgotten
    return (digest or _NO_DIGEST) + (maker or _NO_MAKER) + key


def decode(data: bytes) -> Forgotten | None:
    """None: it is no such thing."""
    if len(data) < DIGEST_BYTES + MAKER_BYTES:
        return None
    digest, maker = data[:DIGEST_BYTES], data[DIGEST_BYTES : DIGEST_BYTES + MAKER_BYTES]
    key = ChunkKey(data[DIGEST_BYTES + MAKER_BYTES :])
    return (digest if digest != _NO_DIGEST else b""), key, (maker if maker != _NO_MAKER else b"")


def quarantines_of(d: Description) -> Iterator[Forgotten]:
    """What would be told of its makers if one was quarantined for its tenant."""
    for mark in filter(is_tenant_mark, d.makers):
        for maker in d.makers:
            yield b"", ChunkKey(mark), maker


@dataclass(slots=True)
class Tombstones:
    """All that one node knows. Guarded by whoever owns it."""

    count: int = 0
    """The highest that it has seen,"""
    head: str = ""
    """and what was drawn for it."""
    at: dict[Forgotten, int] = field(default_factory=dict)
    """At which count each was forgotten last."""
    everything: int = 0
    """The highest count at which EVERYTHING was."""

    def __repr__(self) -> str:
        return f"Tombstones({len(self.at)} up to {self.count})"

    def add(self, forgotten: Forgotten, count: int) -> None:
        self.count = max(self.count, count)
        if self.at.get(forgotten, 0) < count:
            self.at[forgotten] = count

    def refuses(self, d: Description) -> str:
        """Why a record must not be served; empty: no forget stands against it."""
        if self.everything > d.generation:
            return "what was forgotten since cannot be read any more"
        key = (d.namespace, d.key, b"")
        if self.at.get(key, 0) > d.generation:
            return "it was forgotten"
        if self.at.get((d.namespace, ChunkKey(b""), b""), 0) > d.generation:
            return "its namespace was forgotten, or is of an old epoch"
        for maker in d.makers:
            if self.at.get((b"", ChunkKey(b""), maker), 0) > d.generation:
                return "its maker was recalled"
        for quarantine in quarantines_of(d):
            if self.at.get(quarantine, 0) > d.generation:
                return "its maker is quarantined"
        return ""

    def forget_older(self, count: int) -> None:
        """No record of before that count is left anywhere: their time to live is over."""
        self.at = {forgotten: at for forgotten, at in self.at.items() if at > count}


def pack(tombstones: Tombstones) -> bytes:
    """As one object of a store that has no better way: count, then (count, length, entry) of each."""
    parts = [struct.pack("<8sQ16s", b"KVSTOMBS", tombstones.count, tombstones.head.encode())]
    for forgotten, count in sorted(tombstones.at.items(), key=lambda item: item[1]):
        entry = encode(forgotten)
        parts += (_LINE.pack(count, len(entry)), entry)
    return b"".join(parts)


def unpack(data: bytes) -> Tombstones | None:
    """None: it is no such object, or not whole."""
    if len(data) < 32 or data[:8] != b"KVSTOMBS":
        return None
    count, head = struct.unpack_from("<Q16s", data, 8)
    found = Tombstones(count, head.rstrip(b"\0").decode("ascii", "replace"))
    at = 32
    while at < len(data):
        if at + _LINE.size > len(data):
            return None
        count, length = _LINE.unpack_from(data, at)
        at += _LINE.size
        forgotten = decode(data[at : at + length])
        if forgotten is None or at + length > len(data):
            return None
        found.add(forgotten, count)
        at += length
    return found


@dataclass(slots=True)
class Journal:
    """What one node keeps over its restarts: what it has seen, and what no store knows yet, each at a *position*.

    Positions only rise, and belong to the journal's name, which is drawn with it. The index of the SSD tier has one up
    to which everything was carried out (`core.events.Heeded`): a start heeds what stands behind it."""

    tombstones: Tombstones = field(default_factory=Tombstones)
    pending: dict[Forgotten, None] = field(default_factory=dict)
    name: bytes = field(default_factory=lambda: secrets.token_bytes(NAME_BYTES))
    position: int = 0
    """The last one."""
    positions: dict[Forgotten, int] = field(default_factory=dict)

    def note(self, forgotten: Forgotten) -> None:
        """It is to be carried out, or has been, by the time that the core is told of this position."""
        self.position += 1
        self.positions[forgotten] = self.position

    def behind(self, heeded: Heeded | None) -> list[Forgotten]:
        """What a start heeds, in order. Another journal, or an older copy of this one, which gives positions a second
        time: all, under a new name."""
        if heeded is None:
            return sorted(self.positions, key=self.positions.__getitem__)
        if heeded.journal != self.name or heeded.position > self.position:
            self.name = secrets.token_bytes(NAME_BYTES)
            return self.behind(None)
        return [one for one in self.behind(None) if self.positions[one] > heeded.position]

    def reached(self, channel: str) -> Heeded | None:
        """How far it goes; None: it is empty."""
        return Heeded(channel, self.name, self.position) if self.position else None


def to_lines(journal: Journal) -> str:
    """The journal of a node: its name, what it has seen, and what no store knows yet."""
    seen, positions = journal.tombstones, journal.positions
    lines = [
        json.dumps({"journal": journal.name.hex(), "position": journal.position}),
        json.dumps({"count": seen.count, "head": seen.head}),
    ]
    if seen.everything:
        lines.append(json.dumps({"everything": seen.everything, "position": positions.get(EVERYTHING, 0)}))
    lines += [
        json.dumps({"at": count, "entry": encode(one).hex(), "position": positions.get(one, 0)})
        for one, count in seen.at.items()
    ]
    lines += [
        json.dumps({"pending": encode(one).hex(), "position": positions.get(one, 0)})
        for one in journal.pending
    ]
    return "\n".join(lines) + "\n"


def from_lines(text: str) -> Journal:
    """What does not parse is left out: a line that was cut short by a crash was not answered either. What has no
    position, or one that the journal never gave, gets a new one, and so is heeded."""
    journal = Journal()
    seen = journal.tombstones
    for line in _lines(text):
        position, name = _number(line, "position"), _bytes(line, "journal")
        if name is not None and len(name) == NAME_BYTES:
            journal.name, journal.position = name, position
        everything = _number(line, "everything")
        if everything:
            seen.everything = max(seen.everything, everything)
            journal.positions[EVERYTHING] = position
        if "count" in line:
            seen.count = max(seen.count, _number(line, "count"))
            seen.head = str(line.get("head", ""))
        for kind in ("entry", "pending"):
            forgotten = decode(_bytes(line, kind) or b"")
            if forgotten is None or (kind == "entry" and not _number(line, "at")):
                continue
            journal.positions[forgotten] = position
            if kind == "pending":
                journal.pending[forgotten] = None
            else:
                seen.add(forgotten, _number(line, "at"))
    first = journal.position
    for forgotten, position in list(journal.positions.items()):
        if not 0 < position <= first:
            journal.note(forgotten)
    return journal


def _number(line: dict[str, object], name: str) -> int:
    """0 where it has none."""
    found = line.get(name)
    return found if isinstance(found, int) and found > 0 else 0


def _bytes(line: dict[str, object], name: str) -> bytes | None:
    try:
        return bytes.fromhex(str(line[name]))
    except (KeyError, ValueError):
        return None


def _lines(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
